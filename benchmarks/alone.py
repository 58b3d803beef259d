"""Operations timed in one process per package, for what two packages in one process would disturb.

The processes still take turns, block by block.
"""

import functools
import gc
import multiprocessing
import os
import resource
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import torch

from benchmarks.operation import Operation
from benchmarks.results import bare, plain
from benchmarks.timing import Call, block, block_length, take_turns

Modules = dict[str, str | None]  # column of the table -> module to import; None for the floor
Comparable = dict[str, dict[str, Any]]  # a plain result, whole and as far as the floor has it


def start_worker() -> None:
    torch.set_num_threads(1)
    gc.disable()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # more would be processes, on the same cores


def find(table: str, name: str) -> Operation:
    return next(op for op in import_module(table).OPERATIONS if op.name == name)


@functools.cache
def prepared(module: str | None, table: str, name: str) -> Call:
    operation = find(table, name)
    return operation.make(import_module(module)) if module else operation.floor()


def comparable(operation: Operation, result: Any, by_hand: bool = False) -> Comparable:
    """What a column gave; one by hand need not have more than the part that is read.

    >>> comparable(Operation("sum", ..., ...), {"a": 1})
    {'whole': {'a': 1}, 'read': {'a': 1}}
    """
    whole = {} if by_hand else plain(operation.compared(result))
    return {"whole": whole, "read": bare(plain(operation.read(result)))}


def worker_result(module: str | None, table: str, name: str) -> Comparable:
    call = prepared(module, table, name)
    torch.manual_seed(0)
    return comparable(find(table, name), call(), by_hand=module is None)


def worker_length(module: str | None, table: str, name: str, seconds: float) -> int:
    return block_length(prepared(module, table, name), seconds)


def worker_block(module: str | None, table: str, name: str, num_calls: int) -> float:
    return block(prepared(module, table, name), num_calls)


def cpu_seconds() -> float:
    """Of this process and of the children that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def worker_import(module: str | None, table: str) -> None:
    import_module(table)
    if module:
        import_module(module)


def worker_first(module: str | None, table: str, name: str) -> tuple[float, Comparable]:
    """CPU seconds of one call, with those of the compiler that it starts, and its result."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        call = prepared(module, table, name)
        start = cpu_seconds()
        result = call()
        seconds = cpu_seconds() - start
    return seconds, comparable(find(table, name), result, by_hand=module is None)


class Workers:
    """One process per column of the table, started and ended by `with`."""

    def __init__(self, modules: Modules, table: str):
        self.modules = modules
        self.table = table  # the module whose OPERATIONS they know

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
        return self.pools[column].submit(f, self.modules[column], self.table, *args).result()

    def results(self, name: str) -> dict[str, Comparable]:
        return {column: self.run(column, worker_result, name) for column in self.modules}

    def interleave(self, name: str, rounds: int, seconds: float) -> dict[str, list[float]]:
        lengths = {c: self.run(c, worker_length, name, seconds) for c in self.modules}
        turns = {
            c: functools.partial(self.run, c, worker_block, name, lengths[c]) for c in self.modules
        }
        return take_turns(turns, rounds)

    def first_calls(self, name: str) -> dict[str, tuple[float, Comparable]]:
        for starting in [
            pool.submit(worker_import, self.modules[column], self.table)
            for column, pool in self.pools.items()
        ]:
            starting.result()
        return {column: self.run(column, worker_first, name) for column in self.modules}
