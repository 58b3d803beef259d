"""What a call costs: seconds on the wall, operations, FLOPs, and bytes that they read and write."""

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

Call = Callable[[], Any]
BLOCKS = 5  # of calls, whose median counts

FREE = ("empty", "new_empty", "_unsafe_view", "_reshape_alias", "detach", "lift")  # no kernels
OF_ROWS = ("embedding", "index", "index_select", "gather")  # read of a table what they give


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished; nothing to wait for on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_per_call(call: Call, device: torch.device, seconds: float) -> float:
    """Of the wall, from a device that rests to one that rests again; for about so many in all.

    Two calls come before the clock counts: what is compiled compiles, and memory is there then. A
    call that takes longer than all of the time is made three times in all, or twice.

    >>> seconds_per_call(lambda: time.sleep(0.001), torch.device("cpu"), 0.01) >= 0.001
    True
    """
    first, once = _block(call, device, 1), _block(call, device, 1)
    if once >= seconds:
        return once if first >= 4 * max(once, seconds) else min(once, _block(call, device, 1))
    num = max(1, round(seconds / BLOCKS / once))
    return statistics.median(_block(call, device, num) for _ in range(BLOCKS))


def _block(call: Call, device: torch.device, num_calls: int) -> float:
    synchronise(device)
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    synchronise(device)
    return (time.perf_counter() - start) / num_calls


@dataclass(frozen=True)
class Cost:
    """What torch's operations do in a call; what compiled loops of our own do is not counted.

    >>> Cost(flops=2.0, num_bytes=8.0, operations=1).times(3)
    Cost(flops=6.0, num_bytes=24.0, operations=3)
    """

    flops: float = 0.0  # a multiply-add counts twice
    num_bytes: float = 0.0  # read and written, counted for each operation
    operations: int = 0  # that reach the device

    def plus(self, other: "Cost") -> "Cost":
        """
        >>> Cost(1.0).plus(Cost(2.0)).flops
        3.0
        """
        return Cost(
            self.flops + other.flops,
            self.num_bytes + other.num_bytes,
            self.operations + other.operations,
        )

    def times(self, num: int) -> "Cost":
        """Of so many such calls."""
        return Cost(num * self.flops, num * self.num_bytes, num * self.operations)


def cost_of(call: Call) -> Cost:
    """Of one call.

    >>> x = torch.ones(4, 4)
    >>> cost_of(lambda: x @ x)
    Cost(flops=128.0, num_bytes=192.0, operations=1)
    >>> cost_of(lambda: x.t()).operations, cost_of(lambda: x.add_(x)).num_bytes
    (0, 192.0)
    """
    with Kernels() as kernels, FlopCounterMode(display=False) as flops:
        call()
    return Cost(float(flops.get_total_flops()), float(kernels.num_bytes), kernels.found.total())


class Kernels(TorchDispatchMode):
    """Counts operations that reach a device, not views, nor what only asks for memory; and bytes.

    >>> with Kernels() as kernels:
    ...     _ = torch.ones(3) + torch.ones(3)
    >>> kernels.found["add"]
    1
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        result = func(*args, **(kwargs or {}))
        if not func.is_view and not name.startswith(FREE):
            self.found[name] += 1
            self.num_bytes += _moved(func, name, args, kwargs or {}, result)
        return result


def _moved(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> int:
    """Bytes that an operation reads and writes."""
    read, given = _tensors((args, kwargs)), {id(tensor) for tensor in _tensors((args, kwargs))}
    written = [tensor for tensor in _tensors(result) if id(tensor) not in given]
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += _tensors(value)
    if name in OF_ROWS:
        read = [*read[1:], *written]
    return sum(_size(tensor) for tensor in [*read, *written])


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _size(tensor: Tensor) -> int:
    """Bytes; of an expanded tensor those that there are."""
    strided = zip(tensor.shape, tensor.stride(), strict=True)
    distinct = 1
    for length, stride in strided:
        distinct *= length if stride else min(length, 1)
    return distinct * tensor.element_size()
