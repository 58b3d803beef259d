"""Messages with containers between `torch.distributed` processes, received into existing trees.

A container is sent as one message and one for each large leaf. The first describes the leaves, as
JSON, and the memory of all small ones; what of it is over `FIRST` bytes is a separate message. So
the receiver compares before it writes, and knows how much it has to take off the line of a tree
that differs from its own: gloo ends a process that is sent more than it has room for. All messages
of one transfer have one tag; those of one channel arrive in the order in which they were sent.
"""

from __future__ import annotations

import json
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _unflatten_dense_tensors
from torch.nn.parameter import is_lazy

from raffia.tensordict import kinds
from raffia.tensordict.byte_tensors import bytes_to_tensor, tensor_to_bytes
from raffia.tensordict.consolidated import spans
from raffia.tensordict.json_values import Json, encode
from raffia.tensordict.memmap import DTYPE_NAMES
from raffia.tensordict.node import Node
from raffia.tensordict.signatures import shows_options_of

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
LARGE = 2**18  # bytes of a leaf from which on it is a separate message, and not copied
FIRST = 2**13  # bytes of the first message: two lengths, and as much of the rest as there is room
ALIGN = 16  # bytes: the largest item size, complex128, and that of the two lengths
Listed = list[Any]  # of each leaf or value: path, dtype or "value", shape or the value, offset
Group = Any  # torch.distributed.ProcessGroup


@dataclass(slots=True)
class Layout:
    """The leaves of a container, in an order that does not depend on that of its entries."""

    listed: Listed
    leaves: list[Tensor]

    def text(self) -> bytes:
        return json.dumps(self.listed, separators=(",", ":")).encode()


def layout(td: Any, doing: str, values: bool = True) -> Layout:
    """The leaves of a container, sorted by name; TypeError if one has no plain memory.

    values: with the non-tensor entries.
    """
    listed: Listed = []
    leaves: list[Tensor] = []

    def walk(node: Any, path: tuple[Any, ...]) -> None:
        if isinstance(node, kinds.TensorClass):
            node = node._td
        members = getattr(node, "tensordicts", None)
        if members is not None and not isinstance(members, (Tensor, Node)):
            found: Any = enumerate(members)
        else:
            found = sorted(node._entries().items())
        for name, value in found:
            if isinstance(value, Tensor) or not isinstance(value, Node):
                leaf: Any = value
                if isinstance(value, Node):
                    leaf = value._plain_tensor()  # type: ignore[attr-defined]
                check(leaf, (*path, name), doing)
                listed.append([[*path, name], DTYPE_NAMES[leaf.dtype], list(leaf.shape)])
                leaves.append(leaf.detach() if leaf.requires_grad else leaf)
            elif not value._is_data():
                walk(value, (*path, name))
            elif values:
                listed.append([[*path, name], "value", described(value)])

    if not td._is_data():
        walk(td, ())
    return Layout(listed, leaves)


def described(node: Any) -> Json:
    """A non-tensor value as JSON; its class, if it is none that can be written down."""
    value = node.tolist() if hasattr(node, "tensordicts") else node._data
    try:
        return encode(value, ())
    except TypeError:
        return {"$class": type(value).__name__}


def check(leaf: Any, path: tuple[Any, ...], doing: str) -> None:
    """TypeError if a leaf is not plain memory that can be written into."""
    if leaf.is_nested or leaf.layout is not torch.strided or leaf.dtype not in DTYPE_NAMES:
        kind = "a nested tensor" if leaf.is_nested else f"of {leaf.dtype} and {leaf.layout}"
        raise TypeError(
            f"{doing}: entry {dotted(path)} is {kind}, but only plain tensors can be sent from "
            "memory to memory; init_remote and broadcast send jagged ones, to_padded_tensor() and "
            "to_dense() make plain ones"
        )
    if leaf.is_meta or leaf.__class__ is not Tensor and is_lazy(leaf):
        raise TypeError(f"{doing}: entry {dotted(path)} has no memory; give it values first")


def dotted(path: Sequence[Any]) -> str:
    return repr(".".join([str(name) for name in path]))


def difference(theirs: Listed, mine: Listed, there: str, here: str = "here") -> str:
    """The first three differences between two listings, as text."""
    of_theirs = {dotted(path): rest for path, *rest in theirs}
    of_mine = {dotted(path): rest for path, *rest in mine}
    found = []
    for name in sorted({*of_theirs, *of_mine}):
        if name not in of_mine:
            found.append(f"{name} only {there}")
        elif name not in of_theirs:
            found.append(f"{name} only {here}")
        elif of_theirs[name] != of_mine[name]:
            found.append(
                f"{name} is {_described(of_theirs[name])} {there}, "
                f"{_described(of_mine[name])} {here}"
            )
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    return "; ".join(found[:3]) + more


def _described(entry: list[Any]) -> str:
    kind, what, *at = entry
    if kind == "value":
        text = json.dumps(what)
        return f"the value {text if len(text) <= 40 else text[:37] + '...'}"
    return f"{kind} {what}" + (f" at byte {at[0]}" if at else "")


# ------------------------------------------------------------------------------ memory of messages


def wire(group: Group, device: Any = None) -> torch.device:
    """The device of the memory of messages: the CPU, except with NCCL."""
    if device is not None:
        return torch.device(device)
    name = str(dist.get_backend(group)) if group is None or _is_known(group) else group.name()
    if name.lower() != "nccl":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _is_known(group: Group) -> bool:
    """Whether a group is one of `init_process_group` or `new_group`."""
    return group in dist.distributed_c10d._world.pg_map


def as_bytes(text: bytes, device: torch.device, align: int = 1) -> Tensor:
    """Text as a tensor; padded with blanks."""
    text += b" " * (-len(text) % align)
    return bytes_to_tensor(text).to(device)


def is_large(leaf: Tensor) -> bool:
    return leaf.nbytes >= LARGE


def sections(leaves: list[Tensor]) -> list[list[Tensor]]:
    """The small leaves by dtype, such that each section begins where its dtype may."""
    by: dict[torch.dtype, list[Tensor]] = {}
    for leaf in leaves:
        if leaf.numel() and not is_large(leaf):
            by.setdefault(leaf.dtype, []).append(leaf)
    return sorted(by.values(), key=lambda found: (-found[0].dtype.itemsize, str(found[0].dtype)))


def payload(text: bytes, leaves: list[Tensor], device: torch.device) -> Tensor:
    """Two lengths, what the leaves are, and the memory of small ones; at least `FIRST` bytes."""
    head = as_bytes(text, device, ALIGN)
    found = sections(leaves)
    sizes = [sum([leaf.nbytes for leaf in section]) for section in found]
    start = ALIGN + len(head)
    stop = start + sum(sizes)
    out = torch.empty(max(FIRST, stop), dtype=torch.uint8, device=device)
    out[:ALIGN].view(torch.int64).copy_(torch.tensor([len(head), stop - start]))
    out[ALIGN:start] = head
    out[stop:] = 0
    for section, size in zip(found, sizes, strict=True):
        flat = [leaf.to(device).reshape(-1) for leaf in section]
        torch.cat(flat, out=out[start : start + size].view(section[0].dtype))
        start += size
    return out


def unpack(data: Tensor, leaves: list[Tensor]) -> None:
    """Write the memory of small leaves into them."""
    start = 0
    for section in sections(leaves):
        stop = start + sum([leaf.nbytes for leaf in section])
        flat = data[start:stop].view(section[0].dtype)
        torch._foreach_copy_(section, list(_unflatten_dense_tensors(flat, section)))
        start = stop


# ------------------------------------------------------------------------------ from one to another


@dataclass(frozen=True, slots=True)
class Line:
    """A route to another process, or from it."""

    rank: int
    group: Group
    in_group: bool  # whether the rank is that in the group, which torch need not know
    tag: int
    device: torch.device

    def send(self, tensor: Tensor) -> dist.Work | None:
        if self.in_group:
            return self.group.send([tensor], self.rank, self.tag)
        return dist.isend(tensor, self.rank, group=self.group, tag=self.tag)

    def take(self, *tensors: Tensor) -> None:
        for work in [self._post(tensor) for tensor in tensors]:
            work.wait()

    def _post(self, tensor: Tensor) -> Any:
        if self.in_group:
            return self.group.recv([tensor], self.rank, self.tag)
        return dist.irecv(tensor, self.rank, group=self.group, tag=self.tag)


def line(
    doing: str, side: str, rank: Any, group: Group, group_rank: Any, tag: int, mixed: bool
) -> Line:
    """The line that the arguments of a method name; ValueError if they name none."""
    given = rank if group_rank is None else group_rank
    if (rank is None) == (group_rank is None):
        raise ValueError(
            f"{doing}: pass {side}, a rank of the program, or group_{side}, one of the group, "
            f"got {side}={rank!r} and group_{side}={group_rank!r}"
        )
    if group_rank is not None and group is None:
        raise ValueError(
            f"{doing}: group_{side}={group_rank!r} is a rank within a group: pass the group too, "
            "group=..."
        )
    if not isinstance(given, int):
        raise TypeError(
            f"{doing}: {side} must be a rank, which is a number, got {type(given).__name__}; UCXX "
            "pipes are not supported"
        )
    if mixed:
        tag = int.from_bytes(blake2b(str(tag).encode(), digest_size=4).digest(), "big") >> 1
    return Line(given, group, group_rank is not None, tag, wire(group))


def messages(found: Layout, large: list[Tensor], device: torch.device) -> list[Tensor]:
    """The messages that a container is: its small leaves, and by themselves the large ones."""
    first = payload(found.text(), found.leaves, device)
    rest = [first[FIRST:]] if len(first) > FIRST else []
    return [first[:FIRST], *rest, *[part.to(device).contiguous() for part in large]]


def receive(way: Line, target: Layout, doing: str, whole: bool, large: list[Tensor]) -> None:
    """Receive a container from a line, into existing leaves."""
    data = torch.empty(FIRST, dtype=torch.uint8, device=way.device)
    way.take(data)
    length, size = data[:ALIGN].view(torch.int64).tolist()
    start = ALIGN + length
    if start + size > FIRST:
        data = torch.cat([data, data.new_empty(start + size - FIRST)])
        way.take(data[FIRST:])
    theirs = json.loads(tensor_to_bytes(data[ALIGN:start]))
    if theirs != json.loads(target.text()):
        for num in _large(theirs):  # so that the sender is not left waiting
            way.take(torch.empty(num, dtype=torch.uint8, device=way.device))
        here, there = [_is_whole(listed) for listed in (target.listed, theirs)]
        if here != there:
            raise ValueError(
                f"{doing}: rank {way.rank} sent with consolidated={there}, but here it is {here}: "
                "pass the same on both sides"
            )
        raise ValueError(
            f"{doing}: what rank {way.rank} sent does not fit: "
            f"{difference(theirs, target.listed, 'there')}. Nothing was written. Make both "
            "containers equal in keys, shapes and dtypes, or send the structure too: "
            "td.init_remote(...) and TensorDict.from_remote_init(...)"
        )
    if not whole:
        unpack(data[start : start + size], target.leaves)
    direct = [part.device == way.device and part.is_contiguous() for part in large]
    buffers = [
        part if fits else torch.empty(part.shape, dtype=part.dtype, device=way.device)
        for part, fits in zip(large, direct, strict=True)
    ]
    way.take(*buffers)
    for part, buffer in zip(large, buffers, strict=True):
        if part is not buffer:
            part.copy_(buffer)


def _large(listed: Listed) -> list[int]:
    """The lengths of the messages of large leaves."""
    if _is_whole(listed):
        num = listed[-1][2][0]
        return [num] if num else []
    sizes = [math.prod(e[2]) * DTYPES[e[1]].itemsize for e in listed if e[1] != "value"]
    return [size for size in sizes if size >= LARGE]


def _is_whole(listed: Listed) -> bool:
    return bool(listed) and listed[-1][0] == []


def in_parts(td: Any, doing: str) -> tuple[Layout, list[Tensor]]:
    """The leaves of a container, and those that are separate messages."""
    found = layout(td, doing)
    return found, [leaf for leaf in found.leaves if is_large(leaf)]


def as_block(td: Any, doing: str) -> tuple[Layout, list[Tensor]]:
    """The layout of the block of a consolidated container, and the block unless it is empty."""
    found = layout(td, doing)
    start, leaves = td._buffer.data_ptr(), iter(found.leaves)
    for entry in found.listed:
        if entry[1] != "value":
            leaf = next(leaves)
            entry.append(leaf.data_ptr() - start if leaf.numel() else 0)
    listed = [*found.listed, [[], "bytes", [len(td._buffer)]]]
    return Layout(listed, []), [td._buffer] if len(td._buffer) else []


_OPEN: weakref.WeakValueDictionary[Any, Transfer] = weakref.WeakValueDictionary()


class Transfer:
    """A container under way to this process: `wait()` before its entries are read."""

    def __init__(self, way: Line, run: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._ready = threading.Event()
        before = _OPEN.get(channel(way))
        _OPEN[channel(way)] = self

        def take() -> None:
            try:
                if before is not None:
                    before._ready.wait()
                with torch.no_grad():
                    run()
            except BaseException as error:
                self._error = error
            finally:
                self._ready.set()

        threading.Thread(target=take, daemon=True, name="irecv").start()

    def is_completed(self) -> bool:
        return self._ready.is_set()

    def wait(self, timeout: Any = None) -> bool:
        """Wait for all data; raises the error that occurred, or TimeoutError after `timeout`."""
        seconds = timeout.total_seconds() if hasattr(timeout, "total_seconds") else timeout
        if not self._ready.wait(seconds):
            raise TimeoutError(f"irecv: no complete message has arrived within {seconds} seconds")
        if self._error is not None:
            raise self._error
        return True


def channel(way: Line) -> tuple[int, bool, int, int]:
    """The identity of a channel; transfers on the same one must not be read concurrently."""
    return (id(way.group), way.in_group, way.rank, way.tag)


class LineOptions(TypedDict, total=False):
    """Options of both sides of a transfer, for type checkers."""

    group: Group
    init_tag: int
    pseudo_rand: bool
    consolidated: bool


class SendOptions(LineOptions, total=False):
    """Options of `send` and `isend`, for type checkers."""

    group_dst: int | None


class ReceiveOptions(LineOptions, total=False):
    """Options of `recv` and `irecv`, for type checkers."""

    group_src: int | None


def _last(way: Line, init_tag: int, leaves: list[Tensor], mixed: bool) -> int:
    """The tag that the last leaf has where each leaf is a message."""
    return way.tag if mixed else init_tag - 1 + len(leaves)


def posted(
    doing: str,
    td: Any,
    dst: int | None,
    *,
    group: Group = None,
    group_dst: int | None = None,
    init_tag: int = 0,
    pseudo_rand: bool = False,
    consolidated: bool = False,
) -> tuple[list[Any], int | None]:
    """Start sending a container; return the works in progress and the tag of the last entry."""
    way = line(doing, "dst", dst, group, group_dst, init_tag, pseudo_rand)
    if consolidated:
        found, large = as_block(td.consolidate() if spans(td) is None else td, doing)
    else:
        found, large = in_parts(td, doing)
    works = [way.send(part) for part in messages(found, large, way.device)]
    return works, None if consolidated else _last(way, init_tag, found.leaves, pseudo_rand)


@shows_options_of(posted)
def send(td: Any, dst: int | None = None, **options: Unpack[SendOptions]) -> None:
    """Send the values of the entries to another process, which calls `recv`.

    It has a container of the same keys, shapes and dtypes; to one that has none, `init_remote`
    sends. All small entries are one message. Non-tensor entries stay where they are: the receiver
    raises ValueError if its own are others.

    dst: the rank of the receiver.
    group: a group of processes; None for all.
    group_dst: the rank of the receiver in the group, instead of `dst`; torch need not know this
        group.
    init_tag: distinguishes transfers that are under way concurrently; the receiver passes the
        same.
    pseudo_rand: draw the tag from `init_tag`, so that neighbouring ones are far apart.
    consolidated: send the block of a consolidated container as it is, not copied; another container
        is consolidated first. The receiver passes it, too.
    Raises TypeError for entries that are not plain tensors.

    >>> def program(rank):  # each process calls it
    ...     td = TensorDict(a=torch.full((2,), rank))
    ...     td.send(dst=1) if rank == 0 else td.recv(src=0)
    """
    works, _ = posted("send", td, dst, **options)
    for work in works:
        work.wait()


@shows_options_of(posted)
def isend(
    td: Any, dst: int | None = None, *, return_early: bool = False, **options: Unpack[SendOptions]
) -> list[dist.Work] | int | None:
    """Like `send`, with all messages in progress together; returns the tag of the last entry.

    return_early: return a list of what is under way immediately; call `wait()` of each before the
        entries are changed. None is given with `consolidated`, once all is sent.

    >>> def program(rank):
    ...     td = TensorDict(a=torch.full((2,), rank))
    ...     for work in td.isend(dst=1, return_early=True) if rank == 0 else []:
    ...         work.wait()
    """
    works, last = posted("isend", td, dst, **options)
    if return_early:
        return works
    for work in works:
        work.wait()
    return last


def taking(
    doing: str,
    td: Any,
    src: int | None,
    *,
    group: Group = None,
    group_src: int | None = None,
    init_tag: int = 0,
    pseudo_rand: bool = False,
    consolidated: bool = False,
) -> tuple[Line, Callable[[], None], int | None]:
    """The line, a function that receives a container into these leaves, and the last tag."""
    way = line(doing, "src", src, group, group_src, init_tag, pseudo_rand)
    if consolidated and spans(td) is None:
        raise RuntimeError(
            f"{doing}: consolidated=True writes one block, and the entries of this container do "
            "not lie in one: td = td.consolidate() before, or consolidated=False on both sides"
        )
    target, large = as_block(td, doing) if consolidated else in_parts(td, doing)

    def run() -> None:
        receive(way, target, doing, consolidated, large)

    return way, run, None if consolidated else _last(way, init_tag, target.leaves, pseudo_rand)


@shows_options_of(taking)
def recv(td: Any, src: int | None = None, **options: Unpack[ReceiveOptions]) -> int | None:
    """Receive what another process sends with `send`, into the entries; the tag of the last.

    Also into those of a locked container, of parameters, and of files that are mapped. Batch sizes
    and names of dimensions are not compared.

    src, group, group_src, init_tag, pseudo_rand: as of `send`.
    consolidated: take the block as it is; this container is consolidated, with its entries at the
        same offsets. Gives None.
    Raises ValueError that names what differs if the container that is sent has other keys, shapes,
    dtypes or non-tensor values; nothing is written then, and the sender does not wait.

    >>> def program(rank):
    ...     td = TensorDict(a=torch.full((2,), rank))
    ...     td.send(dst=1) if rank == 0 else td.recv(src=0)
    """
    way, run, last = taking("recv", td, src, **options)
    _await(way, run)
    return last


def _await(way: Line, run: Callable[[], None]) -> None:
    """Receive in this thread, after what is under way on the same channel."""
    before = _OPEN.get(channel(way))
    if before is not None:
        before._ready.wait()
    with torch.no_grad():
        run()


@shows_options_of(taking)
def irecv(
    td: Any,
    src: int | None = None,
    *,
    return_premature: bool = False,
    **options: Unpack[ReceiveOptions],
) -> list[Transfer] | None:
    """Like `recv`, but returns None.

    return_premature: return a list of what is under way immediately, while a thread receives; call
        `wait()` of each before the entries are read: it raises what `recv` would.

    >>> def program(rank):
    ...     td = TensorDict(a=torch.full((2,), rank))
    ...     works = td.irecv(src=1 - rank, return_premature=True)
    ...     TensorDict(a=torch.full((2,), rank)).send(dst=1 - rank)
    ...     [work.wait() for work in works]
    """
    way, run, _ = taking("irecv", td, src, **options)
    if not return_premature:
        _await(way, run)
        return None
    return [Transfer(way, run)]
