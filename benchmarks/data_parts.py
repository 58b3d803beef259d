"""What the operations of `benchmarks.data` have in common: how to reach the packages, and data."""

import functools
import itertools
import logging
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks import peer_extension
from benchmarks.operation import Entries
from benchmarks.timing import Call

PEER = "torchrl"


def data_of(package: ModuleType) -> Any:
    if package.__name__ == PEER:
        peer_extension.load()
        logging.getLogger(PEER).setLevel(logging.WARNING)  # it logs each storage that it allocates
    return import_module(f"{package.__name__}.data")


def container(package: ModuleType, entries: Entries, *batch: int) -> Any:
    module = import_module("tensordict") if package.__name__ == PEER else package
    return module.TensorDict(entries, batch_size=batch)


def nothing(result: Any) -> None:
    """What is left to compare of a result that only one column has."""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def permuted(num_rows: int) -> Tensor:
    return torch.randperm(num_rows, generator=seeded(1))


def in_turn(rows: Tensor, num: int) -> Callable[[], Tensor]:
    """Gives `num` of them, then the next, and so on round: what repeats, a processor learns."""
    parts = rows[: len(rows) // num * num].split(num)
    return functools.partial(next, itertools.cycle(parts))


def scatter(num_rows: int) -> Callable[[], Call]:
    """Each number to a random slot of a table twice as large."""

    def make() -> Call:
        slots = permuted(2 * num_rows)[:num_rows]
        table, numbers = torch.empty(2 * num_rows, dtype=torch.int64), torch.arange(num_rows)

        def call() -> None:
            table[slots] = numbers

        return call

    return make


def gather(num_rows: int, columns: int = 2) -> Callable[[], Call]:
    """A number from each of so many random slots of a table twice as large."""

    def make() -> Call:
        slots = permuted(columns * num_rows)[:num_rows]
        table = torch.arange(columns * num_rows)

        def call() -> None:
            table[slots]

        return call

    return make
