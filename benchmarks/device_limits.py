"""How fast a device can be: products of large matrices, and copies; and with which precision."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.device_cost import Cost, seconds_per_call

PRECISIONS = ("float32", "tf32", "bfloat16")
_BACKENDS: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]


@dataclass(frozen=True)
class Limits:
    """What was reached by nothing but products, and by nothing but copies.

    >>> limits = Limits(flops={"float32": 1e12}, bytes_per_second=1e11)
    >>> limits.share_by_flops(Cost(flops=1e12), 2.0, "float32")
    0.5
    >>> limits.share_by_bytes(Cost(num_bytes=1e11), 4.0)
    0.25
    """

    flops: dict[str, float]  # a second, by precision
    bytes_per_second: float  # read and written

    def share_by_flops(self, cost: Cost, seconds: float, precision: str) -> float:
        """The fraction of the time that the matrix products alone would take."""
        return cost.flops / seconds / self.flops[precision]

    def share_by_bytes(self, cost: Cost, seconds: float) -> float:
        """The fraction of the time that reading and writing alone would take."""
        return cost.num_bytes / seconds / self.bytes_per_second


def measure_limits(device: torch.device, seconds: float, small: bool) -> Limits:
    """Of this device.

    >>> limits = measure_limits(torch.device("cpu"), 0.0, small=True)
    >>> sorted(limits.flops), limits.bytes_per_second > 0
    (['bfloat16', 'float32', 'tf32'], True)
    """
    size = 384 if small else 8192
    flops = {name: _products(device, seconds, name, size) for name in PRECISIONS}
    if device.type != "cuda":  # there is no such precision
        flops["tf32"] = flops["float32"]
    return Limits(flops, _copies(device, seconds, 2**22 if small else 2**28))


def _products(device: torch.device, seconds: float, precision: str, size: int) -> float:
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    x, y = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    with fixed_precision("tf32" if precision == "tf32" else "float32"):
        return 2 * size**3 / seconds_per_call(lambda: x @ y, device, seconds)


def _copies(device: torch.device, seconds: float, length: int) -> float:
    source = torch.ones(length, device=device)
    target = torch.empty_like(source)
    return 2 * 4 * length / seconds_per_call(lambda: target.copy_(source), device, seconds)


@contextmanager
def fixed_precision(name: str) -> Iterator[None]:
    """Products of float32 on a GPU within the block: "float32" as it is, or "tf32", rounded first.

    Outside torch's own choice holds: convolutions are rounded, other products are not.

    >>> with fixed_precision("float32"):
    ...     torch.backends.cudnn.allow_tf32
    False
    >>> torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    (True, False)
    """
    rounded = {"float32": False, "tf32": True}[name]
    before = [backend.allow_tf32 for backend in _BACKENDS]
    try:
        _set([rounded] * len(_BACKENDS))
        yield
    finally:
        _set(before)


def _set(rounded: list[bool]) -> None:
    # `fp32_precision`, which is newer, leaves a state in which torch's own reads of these raise.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some releases say that there is a newer one
        for backend, value in zip(_BACKENDS, rounded, strict=True):
            backend.allow_tf32 = value
