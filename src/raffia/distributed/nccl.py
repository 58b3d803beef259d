"""Collectives over NCCL between the GPUs of a group's members, which outlive a lost member."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from raffia.environment import environment
from raffia.tensordict.byte_tensors import bytes_to_tensor

SECONDS = 30.0  # of one collective, which all members have reached: for 25 MB it takes milliseconds
FOREVER = timedelta(days=365)
# Of torch's own threads: by default they end the whole process when a collective fails.
NO_WATCH = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
SHARES_A_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"


class NCCL:
    """The collectives of one member of a group; making it waits for all the others.

    store: that all members share, open as long as any of them.
    meet: waits until all members have called it, and raises RuntimeError where one is gone.
    device: this member's GPU.

    All methods raise RuntimeError where a member is gone: before the collective at once, in the
    midst of it after `SECONDS`.
    """

    def __init__(
        self, store: Any, rank: int, size: int, device: torch.device, meet: Callable[[], None]
    ) -> None:
        self.size, self.device, self._meet = size, device, meet
        made: Any = dist.ProcessGroupNCCL
        options = made.Options()
        options._timeout = FOREVER
        with environment(NO_WATCH):
            self._group = made(store, rank, size, options)
        self._group.eager_connect_single_device(device)

    def all_reduce(self, flat: Tensor) -> None:  # [N]
        """Sum a tensor over all members, in place."""
        with self._done():
            self._group.allreduce([flat], dist.AllreduceOptions()).wait()

    def all_gather(self, data: Tensor) -> list[Tensor]:  # [N]
        """The tensors of all members, in order of rank."""
        out = [torch.empty_like(data) for _ in range(self.size)]
        with self._done():
            self._group.allgather([out], [data], AllgatherOptions()).wait()
        return out

    def all_to_all(self, data: Tensor, sizes: Sequence[int], size: int) -> Tensor:
        """What each member has for this one: a tensor [size] of each, in order of rank.

        data: what this one has for each, in order of rank; sizes: the lengths of these.
        """
        out = data.new_empty(self.size * size)
        with self._done():
            self._group.alltoall_base(
                *(out, data, [size] * self.size, list(sizes), AllToAllOptions())
            ).wait()
        return out

    @contextmanager
    def _done(self) -> Iterator[None]:
        """Wait until what is started here is done on the GPU."""
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            stream.synchronize()  # what is to be sent is there
            self._meet()
            yield  # `wait()` of a work makes the stream wait, not this thread
            done = stream.record_event()
            until = time.monotonic() + SECONDS
            while not done.query():
                if time.monotonic() > until:
                    self.close()
                    raise RuntimeError(f"a member's GPU did not answer for {SECONDS:g} seconds")
                time.sleep(0)

    def close(self) -> None:
        """End what runs, and leave."""
        self._group.abort()


def card_of(device: torch.device) -> Tensor:  # uint8 [32]
    """A digest that tells GPUs of any machines apart."""
    name = str(torch.cuda.get_device_properties(device).uuid)
    return bytes_to_tensor(hashlib.sha256(name.encode()).digest())


def can_use_nccl(cards: Sequence[Tensor]) -> bool:
    """Whether members with these GPUs can sum over NCCL: each has one of its own.

    >>> can_use_nccl([torch.zeros(32), torch.zeros(32)])
    False
    """
    are_distinct = len({tuple(card.tolist()) for card in cards}) == len(cards)
    return dist.is_nccl_available() and (are_distinct or may_share_a_gpu())


def may_share_a_gpu() -> bool:
    """Whether NCCL is told to accept several processes on one GPU, as it can from 2.30 on."""
    return os.environ.get(SHARES_A_GPU) == "1"
