"""Groups of processes that sum tensors: all make the same calls in the same order, and get the same
bits.

Over gloo of torch.distributed, and over NCCL between GPUs, but not its group of the whole program:
a group that lost a member is closed, and another is made.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, Self, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, TCPStore

from raffia.distributed.arrays import pack, unpack
from raffia.distributed.engine import LOCALHOST, Lost
from raffia.distributed.nccl import NCCL, can_use_nccl, card_of
from raffia.tensordict.tensordict import TensorDict

Sums = Literal["ring", "ordered"]
BUCKET = 25 * 2**20  # bytes that are summed at once


class Rendezvous:
    """A rendezvous at which the members of a future group find each other; open until all have.

    host: the address of this machine that members connect to; those of this machine alone can with
        the default.

    >>> with Rendezvous() as rendezvous:
    ...     rendezvous.address.startswith("127.0.0.1:")
    True
    """

    def __init__(self, host: str = LOCALHOST, timeout: float = 60.0) -> None:
        # A socket of our own: the store's would listen to all networks.
        with socket.create_server((host, 0)) as server:
            port = server.getsockname()[1]
            self._store: Any = TCPStore(
                *(host, port, None, True, timedelta(seconds=timeout)),
                wait_for_workers=False,
                master_listen_fd=server.detach(),
                use_libuv=False,  # not every build of torch has it
            )
        self.address = f"{host}:{port}"

    def close(self) -> None:
        """Close the rendezvous: no further member can join."""
        self._store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Group:
    """A member of a group of processes that sum tensors; making it waits until all members have
    joined.

    address: of the `Rendezvous`.
    rank: this member's number, from 0 to size - 1.
    sums: "ring": each member sums a part of the numbers, so that what is sent does not grow with
        the members; of two members the sum is that of `Accumulate`. "ordered": each gets all
        numbers and adds them in order of rank, as `Accumulate` does; for small models and tests.
    timeout: seconds without another member after which it is taken for dead.
    meet_seconds: the same until all are there; None: as many.
    device: where this member's tensors are: of one kind in all members. Between GPUs tensors are
        summed, gathered and exchanged over NCCL if each member has one of its own, else over the
        CPU's memory; trees (`gather`, `broadcast`) always over the CPU's.

    All methods raise `Lost` where a member is gone or silent, and close the group.

    >>> with Rendezvous() as rendezvous, Group(rendezvous.address, rank=0, size=1) as group:
    ...     group.mean([torch.tensor([1.0, 2.0])])
    [tensor([1., 2.])]
    """

    def __init__(
        self,
        address: str,
        rank: int,
        size: int,
        *,
        sums: Sums = "ring",
        timeout: float = 60.0,
        meet_seconds: float | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank={rank} must be in 0..{size - 1}, for {size} members")
        if sums not in get_args(Sums):
            raise ValueError(f"sums={sums!r} must be one of {', '.join(get_args(Sums))}")
        if timeout <= 0:
            raise ValueError(f"timeout={timeout} must be above 0")
        self.rank, self.size, self.sums, self.timeout = rank, size, sums, timeout
        self._group: Any = None
        self._nccl: NCCL | None = None
        self._store: Rendezvous | None = None  # of NCCL, where this member is the first
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(
                f"address={address!r} must be host:port: pass the address of a Rendezvous"
            )
        with self._lost_in("waited for the others"):
            limit = timedelta(seconds=meet_seconds or timeout)
            self._group = _gloo(host, int(port), rank, size, limit)
        if torch.device(device).type == "cuda":
            self._connect_gpus(torch.device(device), host)

    @property
    def backend(self) -> Literal["gloo", "nccl"]:
        """What tensors of this member's device are summed, gathered and exchanged over."""
        return "gloo" if self._nccl is None else "nccl"

    def _connect_gpus(self, device: torch.device, host: str) -> None:
        """Connect the members' GPUs, if each has one of its own."""
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if not can_use_nccl(self.gather_flat(card_of(device))):
            return
        port = torch.tensor([0])
        if self.rank == 0:
            self._store = Rendezvous(host, self.timeout)  # as long as the group
            port[0] = int(self._store.address.rpartition(":")[2])
        self._from_first(port)
        with self._lost_in("connected its GPU"):
            store = _store(host, int(port), timedelta(seconds=self.timeout))
            self._nccl = NCCL(store, self.rank, self.size, device, self._meet)

    @property
    def is_open(self) -> bool:
        """Whether the group is open."""
        return self._group is not None

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The means of each tensor [*] over all members, which have equal shapes."""
        for tensor in tensors:
            if not tensor.is_floating_point():
                raise TypeError(
                    f"a mean of {tensor.dtype} is not defined: pass floating-point tensors"
                )
        out = list(tensors)
        for bucket in buckets(tensors):
            flat = torch.cat([tensors[at].detach().reshape(-1) for at in bucket])
            flat = self._sum(flat).div_(self.size)
            parts = flat.split([tensors[at].numel() for at in bucket])
            for at, part in zip(bucket, parts, strict=True):
                like, part = tensors[at], part.view(tensors[at].shape)
                # In the memory of the sum, unless the tensor has its numbers in another order
                out[at] = part if like.is_contiguous() else torch.empty_like(like).copy_(part)
        return out

    def _sum(self, flat: Tensor) -> Tensor:  # [N]
        if self.sums == "ring":
            with self._lost_in("summed"):
                if flat.is_cuda and self._nccl is not None:
                    self._nccl.all_reduce(flat)
                    return flat
                there = flat.cpu()
                self._group.allreduce([there], self._limited(dist.AllreduceOptions())).wait()
            return there.to(flat.device)
        first, *others = self.gather_flat(flat)
        for other in others:
            first += other
        return first

    def gather(self, tree: TensorDict) -> list[TensorDict]:
        """The trees of all members, in order of rank; on the CPU."""
        own = torch.frombuffer(pack(tree), dtype=torch.uint8)
        sizes = [int(size) for size in self.gather_flat(torch.tensor([len(own)]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(own)] = own
        return [unpack(bytearray(data.numpy())) for data in self.gather_flat(padded)]

    def gather_flat(self, flat: Tensor) -> list[Tensor]:
        """The tensors [N] of all members, in order of rank; N and dtype are the same in all."""
        data = flat.contiguous().view(torch.uint8)
        with self._lost_in("gathered"):
            if data.is_cuda and self._nccl is not None:
                out = self._nccl.all_gather(data)
            else:
                there = data.cpu()
                out = [torch.empty_like(there) for _ in range(self.size)]
                self._group.allgather([out], [there], self._limited(AllgatherOptions())).wait()
        return [one.to(flat.device).view(flat.dtype) for one in out]

    def exchange(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The tensor that each member has for this one [N], in order of rank.

        parts: what this one has for each, in order of rank; one for a member is as long in all.
        """
        own = parts[self.rank]
        data = torch.cat([part.contiguous().view(torch.uint8) for part in parts])
        sizes = [part.nbytes for part in parts]
        with self._lost_in("exchanged"):
            if data.is_cuda and self._nccl is not None:
                out = self._nccl.all_to_all(data, sizes, own.nbytes)
            else:
                out = torch.empty(self.size * own.nbytes, dtype=torch.uint8)
                given = [own.nbytes] * self.size, sizes, self._limited(AllToAllOptions())
                self._group.alltoall_base(out, data.cpu(), *given).wait()
        return [one.view(own.dtype) for one in out.to(own.device).view(self.size, -1)]

    def broadcast(self, tree: TensorDict | None) -> TensorDict:
        """The tree that member 0 has; the others pass None, and get it on the CPU."""
        if (tree is None) != (self.rank > 0):
            raise ValueError("member 0 must pass the tree, and all others None")
        data = torch.empty(0) if tree is None else torch.frombuffer(pack(tree), dtype=torch.uint8)
        size = torch.tensor([len(data)])
        self._from_first(size)
        if tree is not None:
            self._from_first(data)
            return tree
        data = torch.empty(int(size), dtype=torch.uint8)
        self._from_first(data)
        return unpack(memoryview(cast(Any, data.numpy()))).clone()  # each leaf in memory of its own

    def _from_first(self, data: Tensor) -> None:
        options = self._limited(dist.BroadcastOptions())
        options.rootRank = 0
        with self._lost_in("read from the first"):
            self._group.broadcast([data], options).wait()

    def _meet(self) -> None:
        """Wait until all members have called this."""
        self._group.barrier(self._limited(dist.BarrierOptions())).wait()

    def _limited(self, options: Any) -> Any:
        options.timeout = timedelta(seconds=self.timeout)
        return options

    @contextmanager
    def _lost_in(self, doing: str) -> Iterator[None]:
        """Errors of gloo and NCCL as `Lost`."""
        who = f"member {self.rank} of {self.size}"
        if self._group is None and doing != "waited for the others":
            raise Lost(f"{who}: the group is closed; make a new one")
        try:
            yield
        except RuntimeError as error:
            self.close()
            lines = re.sub(r"^\[[^]]*\] *", "", str(error)).splitlines() or [""]
            cause = lines[0].partition(" This is typically")[0]
            raise Lost(f"{who} lost another while it {doing}: {cause}") from None
        except BaseException:  # such as Ctrl-C: the others are not where this one is
            self.close()
            raise

    def close(self) -> None:
        """Leave; members that wait for this one notice at once."""
        if self._nccl is not None:
            self._nccl.close()
        self._group = self._nccl = self._store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _gloo(host: str, port: int, rank: int, size: int, timeout: timedelta) -> Any:
    """Make a gloo group that is not registered as the program's default group of torch."""
    gloo = cast(Any, dist.ProcessGroupGloo)
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=address_towards(host))]
    return gloo(_store(host, port, timeout), rank, size, options)


def _store(host: str, port: int, timeout: timedelta) -> Any:
    """The store of a `Rendezvous`."""
    return TCPStore(host, port, None, False, timeout, use_libuv=False)


def address_towards(host: str) -> str:
    """The address of this machine by which another one reaches it.

    >>> address_towards("127.0.0.1")
    '127.0.0.1'
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        found.connect((host, 9))  # sends nothing, but chooses a network
        name: str = found.getsockname()[0]
    return name


def device_of(name: str, rank: int) -> torch.device:
    """The device of a member of a group: of "cuda" cards in turn, the leader's first.

    >>> device_of("cpu", 3), device_of("cuda:0", 3)
    (device(type='cpu'), device(type='cuda', index=0))
    """
    device = torch.device(name)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", rank % max(1, torch.cuda.device_count()))
    return device


def buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The indices of tensors that are sent together: of equal dtype and device, in order, up to 25
    MB or one tensor.

    >>> buckets([torch.ones(3), torch.ones(2), torch.ones(2, dtype=torch.bfloat16)])
    [[0, 1], [2]]
    """
    out: list[list[int]] = []
    size = 0
    for at, tensor in enumerate(tensors):
        first = tensors[out[-1][0]] if out else tensor
        is_alike = tensor.dtype is first.dtype and tensor.device == first.device
        if out and is_alike and size + tensor.nbytes <= BUCKET:
            out[-1].append(at)
            size += tensor.nbytes
        else:
            out.append([at])
            size = tensor.nbytes
    return out
