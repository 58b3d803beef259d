"""Operations timed in one process per package, for what two packages in one process would disturb.

The processes still take turns, block by block.
"""

import functools
import gc
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import torch

from benchmarks.operations import OPERATIONS
from benchmarks.results import plain
from benchmarks.timing import Call, block, block_length, take_turns

Modules = dict[str, str | None]  # column of the table -> module to import; None for the floor


def start_worker() -> None:
    torch.set_num_threads(1)
    gc.disable()


@functools.cache
def prepared(module: str | None, name: str) -> Call:
    operation = next(op for op in OPERATIONS if op.name == name)
    return operation.make(import_module(module)) if module else operation.floor()


def worker_result(module: str | None, name: str) -> dict[str, Any]:
    return plain(prepared(module, name)())


def worker_length(module: str | None, name: str, seconds: float) -> int:
    return block_length(prepared(module, name), seconds)


def worker_block(module: str | None, name: str, num_calls: int) -> float:
    return block(prepared(module, name), num_calls)


class Workers:
    """One process per column of the table, started and ended by `with`."""

    def __init__(self, modules: Modules):
        self.modules = modules

    def __enter__(self) -> "Workers":
        self.exits = ExitStack()
        spawn = multiprocessing.get_context("spawn")
        self.pools = {
            column: self.exits.enter_context(
                ProcessPoolExecutor(1, mp_context=spawn, initializer=start_worker)
            )
            for column in self.modules
        }
        return self

    def __exit__(self, *error: Any) -> None:
        self.exits.close()

    def run(self, column: str, f: Any, *args: Any) -> Any:
        return self.pools[column].submit(f, self.modules[column], *args).result()

    def results(self, name: str) -> dict[str, dict[str, Any]]:
        return {column: self.run(column, worker_result, name) for column in self.modules}

    def interleave(self, name: str, rounds: int, seconds: float) -> dict[str, list[float]]:
        lengths = {c: self.run(c, worker_length, name, seconds) for c in self.modules}
        turns = {
            c: functools.partial(self.run, c, worker_block, name, lengths[c]) for c in self.modules
        }
        return take_turns(turns, rounds)
