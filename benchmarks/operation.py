"""The parts of one row of a benchmark's table."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import Call

PEER = "tensordict"
BATCH = 32

Entries = dict[str, Any]


def two_digits(ratio: float) -> str:
    """
    >>> two_digits(1.05), two_digits(0.5), two_digits(1 / 70)
    ('1.05', '0.50', '0.014')
    """
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


@dataclass(frozen=True)
class Aim:
    """How long ours may take at most, as a share of another column's time or in seconds."""

    share: float
    of: str = "peer"  # or floor, or seconds

    def __str__(self) -> str:
        return f"{two_digits(self.share)} {'s' if self.of == 'seconds' else f'of {self.of}'}"


def whole(result: Any) -> Any:
    return result


@dataclass(frozen=True)
class Operation:
    """The same work for two packages and by hand; each call returns its result.

    `make(package)` prepares the data and returns the call to time, for any package with the names
    of PyTorch's tensordict; `floor()` does so for plain torch. All three have the same seed.
    """

    name: str
    make: Callable[[ModuleType], Call]
    floor: Callable[[], Call]
    aim: Aim | None = None
    alone: bool = False  # one process per package: the peer patches torch's vmap when imported
    first: bool = False  # only the very first call counts, in a fresh process per package
    cached: bool = False  # first: files that ours stores for later processes exist already
    big: bool = False  # takes gigabytes: left out unless asked for
    read: Callable[[Any], Any] = whole  # the part of a result that the floor has too
    compared: Callable[[Any], Any] = whole  # the part that ours and the peer must agree on


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def container(package: ModuleType, entries: Entries, batch: int = BATCH) -> Any:
    return package.TensorDict(entries, batch_size=[batch])
