"""Collective operations on containers across the processes of a `torch.distributed` group.

Sums are over the memory that is there: all processes compare what leaves they have, by one number,
before any of it is sent, for gloo ends a process that is sent more than it has room for. Whole
containers go as a record (JSON, no pickle) and the block of their entries. A process that can't
take part informs the others, so that none waits for it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from raffia.files import parse_json
from raffia.tensordict.byte_tensors import tensor_to_bytes
from raffia.tensordict.consolidated import described, over_block
from raffia.tensordict.messages import (
    LARGE,
    Group,
    Layout,
    Listed,
    as_bytes,
    difference,
    layout,
    wire,
)
from raffia.tensordict.node import Container, Device

BUCKET = 25 * 2**20  # bytes of small leaves that are summed together


# -------------------------------------------------------------------------------------- like trees


def agreed(td: Any, doing: str, group: Group) -> Layout:
    """The leaves of a container, if all processes have the same; ValueError in all if they do not.

    One number of each is compared; what the trees are is sent only where they differ.
    """
    where, mine, error = wire(group), None, None
    try:
        mine = layout(td, doing, values=False)
        text = mine.text()
    except TypeError as raised:
        error, text = raised, json.dumps(str(raised)).encode()
    number = fingerprint(text)
    both = torch.tensor([number, -number], device=where)
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    if int(both[0]) != -int(both[1]):
        texts = gathered_texts(text, group, where)
        if error is None:
            raise tree_mismatch(doing, [json.loads(found) for found in texts], group)
    if error is not None:
        raise error
    return cast(Layout, mine)


def fingerprint(text: bytes) -> int:
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1


def gathered_texts(text: bytes, group: Group, device: torch.device) -> list[bytes]:
    num = dist.get_world_size(group)
    lengths = gathered(torch.tensor([len(text)], device=device), num, group)
    sizes = [int(length) for length in lengths]
    data = padded(as_bytes(text, device), max(sizes))
    found = zip(gathered(data, num, group), sizes, strict=True)
    return [tensor_to_bytes(data[:size]) for data, size in found]


def gathered(tensor: Tensor, num: int, group: Group) -> list[Tensor]:
    out = [torch.empty_like(tensor) for _ in range(num)]
    dist.all_gather(out, tensor, group=group)
    return out


def padded(data: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(data, (0, size - len(data))) if len(data) < size else data


def tree_mismatch(doing: str, listings: Sequence[str | Listed | None], group: Group) -> Exception:
    """The error for trees that differ, which names two ranks; a text is the error of that rank."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    for rank, listed in zip(ranks, listings, strict=True):
        if isinstance(listed, str):
            return ValueError(f"{doing}: rank {rank} can't take part: {listed}")
    found = [(r, e) for r, e in zip(ranks, listings, strict=True) if e is not None]
    first, theirs = cast(tuple[int, Listed], found[0])
    for rank, other in found[1:]:
        if other != theirs:
            what = difference(theirs, cast(Listed, other), f"on rank {first}", f"on rank {rank}")
            return ValueError(
                f"{doing}: the containers of ranks {first} and {rank} differ: {what}. Nothing was "
                "sent. All ranks need the same keys, shapes and dtypes, which td.broadcast(src) "
                "gives them"
            )
    raise AssertionError("no listing differs")


# -------------------------------------------------------------------------------------------- sums


def all_reduce(
    td: Any,
    op: dist.ReduceOp | None = None,
    *,
    group: Group = None,
    async_op: bool = False,
    bucket_bytes: int | None = None,
) -> list[dist.Work] | None:
    """Sum each entry over all processes and write the sum into it, in all of them.

    Small entries of one dtype are summed together. All processes call it with the same keys, shapes
    and dtypes. Non-tensor entries are left alone.

    op: of `torch.distributed.ReduceOp`; None for the sum.
    async_op: give a list of what is under way; call `wait()` of each before the entries are used.
    bucket_bytes: entries of one dtype are summed together up to this size; larger ones by
        themselves, without a copy. None: those under 256 KiB, up to 25 MiB together.
    Raises ValueError in all processes, which names what differs, if the containers differ.

    >>> def program(rank):  # each process calls it
    ...     td = TensorDict(a=torch.ones(2))
    ...     td.all_reduce()  # td["a"] is the number of processes
    """
    found = agreed(td, "all_reduce", group)

    def start(flat: Tensor) -> dist.Work | None:
        return dist.all_reduce(flat, op=_op(op), group=group, async_op=True)

    works = reductions(found.leaves, bucket_bytes, start, "all_reduce", wire(group), True)
    if async_op:
        return works
    _finish(works)
    return None


def reduce(
    td: Any,
    dst: int,
    op: dist.ReduceOp | None = None,
    async_op: bool = False,
    return_premature: bool = False,
    group: Group = None,
    *,
    bucket_bytes: int | None = None,
) -> list[dist.Work] | None:
    """Sum each entry over all processes, into the container of one of them.

    What the others hold afterwards is not defined: some entries may be partial sums.

    dst: the rank that has the sums.
    op, group, bucket_bytes: as of `all_reduce`.
    async_op, return_premature: with both, give a list of what is under way; call `wait()` of each
        before the entries are used.
    Raises ValueError in all processes, which names what differs, if the containers differ.

    >>> def program(rank):
    ...     td = TensorDict(a=torch.ones(2))
    ...     td.reduce(dst=0)
    """
    found = agreed(td, "reduce", group)

    def start(flat: Tensor) -> dist.Work | None:
        return dist.reduce(flat, dst, op=_op(op), group=group, async_op=True)

    receives = dist.get_rank() == dst
    works = reductions(found.leaves, bucket_bytes, start, "reduce", wire(group), receives)
    if async_op and return_premature:
        return works
    _finish(works)
    return None


def _op(op: Any) -> Any:
    return dist.ReduceOp.SUM if op is None else op


def reductions(
    leaves: list[Tensor],
    bucket_bytes: int | None,
    start: Callable[[Tensor], Any],
    doing: str,
    device: torch.device,
    receives: bool,
) -> list[Any]:
    """Start a reduction of each bucket of leaves; return the works to wait for.

    receives: whether the result is written into the leaves.
    """
    if bucket_bytes is not None and bucket_bytes <= 0:
        raise ValueError(f"{doing}: bucket_bytes={bucket_bytes} must be above 0, or None")
    alone, most = (LARGE, BUCKET) if bucket_bytes is None else (bucket_bytes, bucket_bytes)
    works = []
    for bucket in buckets(leaves, alone, most):
        whole = len(bucket) == 1 and bucket[0].is_contiguous()
        flat = bucket[0] if whole else _flatten_dense_tensors([x.contiguous() for x in bucket])
        if device.type != "cpu":
            flat = flat.to(device)
        work = start(flat)
        if receives and flat is not bucket[0]:
            work = work.get_future().then(_writes(flat, bucket))
        works.append(work)
    return works


def buckets(leaves: list[Tensor], alone: int, most: int) -> list[list[Tensor]]:
    """Leaves of one device and dtype, of `most` bytes together; those of `alone` by themselves."""
    out: list[list[Tensor]] = []
    open_: dict[Any, tuple[list[Tensor], int]] = {}
    for leaf in leaves:
        num = leaf.nbytes
        if not num:
            continue
        key = (leaf.dtype, leaf.device.type)
        bucket, size = open_.get(key, ([], 0))
        if num >= alone:
            out.append([leaf])
        elif bucket and size + num <= most:
            bucket.append(leaf)
            open_[key] = bucket, size + num
        else:
            out.append([leaf])
            open_[key] = out[-1], num
    return out


def _writes(flat: Tensor, bucket: list[Tensor]) -> Callable[[Any], None]:
    def write(_: Any) -> None:
        with torch.no_grad():  # a thread of the backend may run it
            torch._foreach_copy_(bucket, list(_unflatten_dense_tensors(flat, bucket)))

    return write


def _finish(works: list[Any]) -> None:
    """Wait for all works, even if one fails; then raise the first error."""
    errors = []
    for work in works:
        try:
            work.wait()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


# -------------------------------------------------------------------------------- whole containers


def sealed(td: Any, device: Any) -> tuple[Any, bytes]:
    """The container as one block, at the offsets of its record, and the record."""
    out = td
    if not td.is_consolidated() or device is not None:
        out = td.consolidate(device=device)
    record, parts = described(out)
    begin, end = out._buffer.data_ptr(), len(out._buffer)
    for leaf, at in zip(parts.tensors, parts.starts, strict=True):
        lies = leaf.data_ptr() == begin + at and leaf.is_contiguous() and at + leaf.nbytes <= end
        if leaf.numel() and not lies:  # it was consolidated once, and changed
            return sealed(td.clone(), device)
    return out, record


class Packed(NamedTuple):
    """A container packed to be sent: the lengths of its parts, the parts, or why packing failed.

    head: 1, the length of the record, and that of the block; 0 and the length of what is wrong,
        which is sent instead of the record.
    """

    head: Tensor
    record: Tensor
    block: Tensor
    error: Exception | None
    td: Any  # consolidated


def packed(td: Any, where: torch.device, device: Any = None) -> Packed:
    """A container as a record and a block; or, if it can't be sent, the reason instead."""
    try:
        out, record = sealed(td, device)
    except Exception as error:
        return failed(error, where)
    head = torch.tensor([1, len(record), len(out._buffer)], device=where)
    return Packed(head, as_bytes(record, where), out._buffer.to(where), None, out)


def failed(error: Exception, where: torch.device) -> Packed:
    text = as_bytes(str(error).encode(), where)
    nothing = torch.empty(0, dtype=torch.uint8, device=where)
    return Packed(torch.tensor([0, len(text), 0], device=where), text, nothing, error, None)


def opened(doing: str, rank: int, fine: int, record: Tensor, block: Tensor) -> Any:
    """The container that another process packed; RuntimeError if it could not."""
    text = tensor_to_bytes(record)
    if not fine:
        raise RuntimeError(f"{doing}: rank {rank} could not send its container: {text.decode()}")
    source = f"what rank {rank} sent"
    return over_block(source, parse_json(source, text, deepest=None), block)


def _put(td: Any, device: Any, where: torch.device, put: Callable[[Tensor], Any]) -> Any:
    """Send a whole container; if it can't be sent, send why, and raise that."""
    found = packed(td, where, device)
    for part in (found.head, found.record, found.block):
        if len(part):
            put(part)
    if found.error is not None:
        raise found.error
    return found.td


def _taken(src: int, doing: str, where: torch.device, take: Callable[[Tensor], Any]) -> Any:
    """Receive what `_put` sends."""

    def part(num: int) -> Tensor:
        out = torch.empty(num, dtype=torch.uint8, device=where)
        if num:
            take(out)
        return out

    head = torch.empty(3, dtype=torch.int64, device=where)
    take(head)
    fine, length, size = head.tolist()
    return opened(doing, src, fine, part(length), part(size))


def _on(td: Any, device: Any) -> Any:
    return td if device is None or td._buffer.device == torch.device(device) else td.to(device)


def broadcast(td: Container, src: int, *, group: Group = None, device: Device = None) -> Container:
    """Send the container of one process to all; the others need no container of that form.

    Its non-tensor entries and tensorclasses come along, too, as in a file: no pickle is sent.

    src: the rank that sends. There the container itself comes back if it is consolidated, and
        otherwise a copy that is.
    device: where the entries are then.
    Raises TypeError at `src` for what no file can hold, and RuntimeError in the others.

    >>> def program(rank):
    ...     td = TensorDict(a=torch.arange(3)) if rank == 0 else TensorDict()
    ...     td = td.broadcast(src=0)
    """
    where = wire(group)

    def send(tensor: Tensor) -> None:
        dist.broadcast(tensor, src, group=group)

    if dist.get_rank() == src:
        return _put(td, device, where, send)
    return _on(_taken(src, "broadcast", where, send), device)


def init_remote(
    td: Any,
    dst: int | None = None,
    group: Group = None,
    device: Device = None,
    use_broadcast: bool = False,
) -> None:
    """Send the container to a process that has none yet: it calls `TensorDict.from_remote_init`.

    Later containers of the same form can be sent into it by `send(consolidated=True)`.

    dst: the rank of the receiver.
    device: the device whose memory is sent; with NCCL a CUDA device.
    use_broadcast: send to all processes of the group, by `broadcast`.
    Raises TypeError for what no file can hold.

    >>> def program(rank):
    ...     if rank == 0:
    ...         TensorDict(a=torch.arange(3), b="text").init_remote(dst=1)
    ...     else:
    ...         td = TensorDict.from_remote_init(src=0)
    """
    if use_broadcast:
        broadcast(td, dist.get_rank(), group=group, device=device)
        return
    if dst is None:
        raise ValueError("init_remote: pass dst, the rank of the receiver, or use_broadcast=True")
    _put(td, None, wire(group, device), lambda tensor: dist.send(tensor, dst, group=group))


def from_remote_init(
    cls: type[Container],
    src: int,
    group: Group = None,
    device: Device = None,
    use_broadcast: bool = False,
) -> Container:
    """The container that another process sends with `init_remote`; it is consolidated.

    It is of the class that was sent; tensorclasses must be defined here, too.

    src: the rank of the sender.
    device: where the entries are; with NCCL a CUDA device.
    use_broadcast: as the sender passes it.
    Raises RuntimeError if the sender could not send it, DamagedFileError for unknown tensorclasses.

    >>> def program(rank):
    ...     if rank == 0:
    ...         TensorDict(a=torch.arange(3), b="text").init_remote(dst=1)
    ...     else:
    ...         td = TensorDict.from_remote_init(src=0)
    """
    if use_broadcast:
        nothing: Any = None
        return broadcast(nothing, src, group=group, device=device)
    where = wire(group, device)
    return _taken(
        src, "from_remote_init", where, lambda tensor: dist.recv(tensor, src, group=group)
    )


async def asend(td: Any, dst: int, *, group: Group = None) -> None:
    """`init_remote` to a rank, for `await`: other coroutines run on while it sends.

    >>> async def program(rank):
    ...     return await (TensorDict(a=1).asend(1) if rank == 0 else TensorDict().arecv(0))
    """
    await asyncio.to_thread(init_remote, td, dst, group)


async def arecv(
    td: Container, src: int, *, device: Device = None, group: Group = None
) -> Container:
    """Receive what another process sends with `asend`, for `await`; use the returned container.

    That is this container, with the values written into it, if it has the same keys, shapes and
    dtypes, and another otherwise.

    device: where another is made.

    >>> async def program(rank):
    ...     return await (TensorDict(a=1).asend(1) if rank == 0 else TensorDict().arecv(0))
    """
    out = await asyncio.to_thread(from_remote_init, type(td), src, group, device)
    theirs, mine = layout(out, "arecv"), layout(td, "arecv")
    if not mine.leaves or theirs.listed != mine.listed:
        return out
    with torch.no_grad():
        torch._foreach_copy_(mine.leaves, theirs.leaves)
    return td


def all_gather(td: Container, *, group: Group = None) -> list[Container]:
    """The containers of all processes, in order of rank, in each process; they may differ in
    structure.

    They are new and consolidated, and have their non-tensor entries.

    Raises TypeError in a process whose container no file can hold, and RuntimeError in the others.

    >>> def program(rank):
    ...     tds = TensorDict(a=torch.full((2,), rank)).all_gather()
    """
    mine, num = packed(td, wire(group)), dist.get_world_size(group)
    heads = [found.tolist() for found in gathered(mine.head, num, group)]
    most = max([length + size for _, length, size in heads])
    parts = gathered(in_a_row(mine, most), num, group)
    if mine.error is not None:
        raise mine.error
    return [row("all_gather", *found) for found in zip(_ranks(group), heads, parts, strict=True)]


def _ranks(group: Group) -> list[int]:
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def in_a_row(found: Packed, most: int) -> Tensor:
    """The block followed by the record, padded to the length of the longest."""
    return padded(torch.cat([found.block, found.record]), most)


def row(doing: str, rank: int, head: Sequence[int], data: Tensor) -> Any:
    """The container that `in_a_row` put in a row."""
    fine, length, size = head[:3]
    return opened(doing, rank, fine, data[size : size + length], data[:size])


def gather_and_stack(td: Container, dst: int, group: Group = None) -> Container | None:
    """Stack the containers of all other processes into the one at `dst`.

    dst: the rank that receives; its batch size begins with the number of the others, in the order
        of whose ranks the rows are. There the container comes back, None elsewhere.
    Raises ValueError in all processes, which names what differs, if those of the senders differ.

    >>> def program(rank):
    ...     if rank == 0:
    ...         td = TensorDict(a=torch.zeros(1, 2), batch_size=[1]).gather_and_stack(dst=0)
    ...     else:
    ...         TensorDict(a=torch.ones(2)).gather_and_stack(dst=0)
    """
    doing, where, ranks = "gather_and_stack", wire(group), _ranks(group)
    num, receives, listed = len(ranks), dist.get_rank() == dst, None
    mine = None if receives else packed(td, where)
    if mine is not None and mine.error is None:
        try:
            listed = layout(td, doing, values=False)
        except TypeError:  # such as jagged ones, which are compared by stacking them
            pass
    number = 0 if listed is None else fingerprint(listed.text())
    head = torch.tensor([1, 0, 0], device=where) if mine is None else mine.head
    heads = [
        found.tolist()
        for found in gathered(torch.cat([head, head.new_tensor([number])]), num, group)
    ]
    if len({found[3] for found in heads if found[3]}) > 1:
        text = b"null" if listed is None else listed.text()
        raise tree_mismatch(
            doing, [json.loads(t) for t in gathered_texts(text, group, where)], group
        )
    most = max([sum(found[1:3]) for found in heads])
    data = torch.empty(most, dtype=torch.uint8, device=where)
    data = data if mine is None else in_a_row(mine, most)
    parts = [torch.empty_like(data) for _ in range(num)] if receives else None
    dist.gather(data, parts, dst=dst, group=group)
    if mine is not None and mine.error is not None:
        raise mine.error
    if parts is None:
        for rank, found in zip(ranks, heads, strict=True):
            if not found[0]:
                raise RuntimeError(f"{doing}: rank {rank} could not send its container")
        return None
    sent = zip(ranks, heads, parts, strict=True)
    rows = [row(doing, rank, head, data) for rank, head, data in sent if rank != dst]
    if not td._batch_size or td._batch_size[0] != len(rows):
        raise ValueError(
            f"{doing}: {len(rows)} other processes sent a row each, but the batch size here is "
            f"{list(td._batch_size)}: it must begin with {len(rows)}"
        )
    td.update(torch.stack(rows, 0), inplace=True)
    return td


def scatter(
    td: Container,
    src: int,
    tensordicts: Sequence[Container] | None = None,
    *,
    group: Group = None,
    device: Device = None,
) -> Container:
    """The container that one process has for this one, out of a list of one for each.

    The container that it is called on plays no part: `TensorDict().scatter(...)`.

    src: the rank that has the list.
    tensordicts: at `src` a container for each process, in order of rank; they may differ.
    device: where the entries are.
    Raises ValueError at `src` if there are not as many, TypeError for what no file can hold, and
    RuntimeError in the others then.

    >>> def program(rank, num):
    ...     tds = [TensorDict(a=i) for i in range(num)] if rank == 0 else None
    ...     td = TensorDict().scatter(0, tds)
    """
    where, num = wire(group), dist.get_world_size(group)
    head = torch.empty(4, dtype=torch.int64, device=where)
    heads = rows = None
    error: Exception | None = None
    if dist.get_rank() == src:
        if tensordicts is None or len(tensordicts) != num:
            given = "None" if tensordicts is None else len(tensordicts)
            error = ValueError(
                f"scatter: {num} processes take one container each, got {given}: pass a list of "
                f"{num} at rank {src}"
            )
            found = []
        else:
            found = [packed(one, where) for one in tensordicts]
            error = next((one.error for one in found if one.error is not None), None)
        if error is not None:
            found = [failed(error, where)] * num
        most = max([len(one.record) + len(one.block) for one in found])
        heads = [torch.cat([one.head, one.head.new_tensor([most])]) for one in found]
        rows = [in_a_row(one, most) for one in found]
    dist.scatter(head, heads, src=src, group=group)
    data = torch.empty(int(head[3]), dtype=torch.uint8, device=where)
    dist.scatter(data, rows, src=src, group=group)
    if error is not None:
        raise error
    return _on(row("scatter", src, head.tolist(), data), device)
