"""The making of a segment buffer's batches: choose starts, copy the rows of their segments, move
them.

A segment is a run of consecutive steps. Stacks of its frames are views, without a copy.

Legend: B segments, L rows in a segment, S frames in a stack.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raffia.data import kernels
from raffia.data.prefetch import BatchSource
from raffia.data.priorities import StepPriorities
from raffia.data.ring import CLOSED_TERMINATED, CLOSED_TRUNCATED, STEP, TRUNCATED, EpisodeRing
from raffia.data.row_index import carried, selected
from raffia.data.steps import StepKeys
from raffia.data.storage import Storage, TensorStorage
from raffia.tensordict.keys import NestedKey, unravel_key, unravel_key_to_tuple
from raffia.tensordict.tensordict import TensorDict


class Kinds(NamedTuple):
    """The entries about a row, by its kind."""

    mask: Tensor  # [kinds] bool
    discount: Tensor  # [kinds] float32


OF_ROWS = {  # entries [B, L] about each row, and their dtypes, in the order of the kernel
    "step_index": torch.int64,  # number of the row, -1 where it is not valid
    "valid": torch.bool,  # the row belongs to the episode, and is not its last one repeated
    "valid_step": torch.bool,  # the row, or what it repeats, is a step
    "mask": torch.bool,
    "discount": torch.float32,
}


def find_segments(
    ring: EpisodeRing,
    kinds: Kinds,
    start: Tensor,
    *,
    length: int,
    out: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The rows of segments: those that the ring looks back in front of each start, and L from it.

    start: [B] int64, rows.
    out: has the entries of OF_ROWS, which are filled; contiguous and on the CPU.
    Returns int64 [B, before + L], and what the last L of them are, as OF_ROWS has it.

    >>> from raffia.data.segment_batches import Kinds, find_segments
    >>> ring = EpisodeRing(9, look_ahead=0, look_back=2)
    >>> no, ends = torch.zeros(3, 1, dtype=torch.bool), torch.tensor([[False], [False], [True]])
    >>> _ = ring.append(ends, no, torch.tensor([0]))
    >>> kinds = Kinds(torch.ones(5, dtype=torch.bool), torch.tensor([1.0, 0, 1, 0, 0]))
    >>> rows, found = find_segments(ring, kinds, torch.tensor([1]), length=4)
    >>> rows, found["step_index"]
    (tensor([[0, 0, 1, 2, 3, 3]]), tensor([[ 1,  2,  3, -1]]))
    >>> found["discount"]
    tensor([[1., 0., 0., 0.]])
    """
    num_segments, before = len(start), ring.look_back
    size = num_segments, length
    found = {
        name: torch.empty(size, dtype=dtype, device="cpu") if out is None else out[name]
        for name, dtype in OF_ROWS.items()
    }
    rows = start.new_empty(num_segments, before + length)
    rows[:, before] = start
    arrays = rows, *found.values(), kinds.mask, kinds.discount
    ring.segments.set(*[array.data_ptr() for array in arrays], num_segments, before, length)
    kernels.ring.find_segments(ring.address, ring.segments.address)
    return rows, found


def stacked(frames: Tensor, stack: int) -> Tensor:
    """Frames [B, L + S - 1, ...] as stacks [B, L, S, ...] of the S newest: a view, no copy.

    Stacks of neighbouring rows lie on the same memory: clone before writing to one.

    >>> from raffia.data.segment_batches import stacked
    >>> stacked(torch.tensor([[1, 2, 3, 4]]), 2)
    tensor([[[1, 2],
             [2, 3],
             [3, 4]]])
    """
    return frames.unfold(1, stack, 1).movedim(-1, 2)


def unstacked(stacks: Tensor) -> Tensor | None:
    """The frames [B, L + S - 1, ...] under a view that `stacked` made; None if it isn't one.

    >>> from raffia.data.segment_batches import stacked, unstacked
    >>> frames = torch.tensor([[1, 2, 3, 4]])
    >>> unstacked(stacked(frames, 2)).data_ptr() == frames.data_ptr()
    True
    >>> unstacked(stacked(frames, 2).clone()) is None
    True
    """
    num_segments, length, stack, *shape = stacks.shape
    segment, step, frame, *inner = stacks.stride()
    num_frames = length + stack - 1
    if step != frame:
        return None
    size, stride = (num_segments, num_frames, *shape), (segment, frame, *inner)
    frames = stacks.as_strided(size, stride, stacks.storage_offset())
    return frames if frames.is_contiguous() else None


Path = tuple[Any, ...]
# What a batch holds besides the entries that were stored.
ADDED = {"index": torch.int64, "priority_weight": torch.float32, **OF_ROWS}
CLOSED = {"terminated": CLOSED_TERMINATED, "truncated": CLOSED_TRUNCATED}


class Copied(NamedTuple):
    """The tensors of a batch, of which no container is made yet."""

    size: torch.Size  # [B, L]
    leaves: list[Tensor]  # of the stored entries, in order; stacks as their frames [B, L+S-1, ...]
    added: dict[str, Tensor]  # by name as in ADDED


@dataclass(eq=False, kw_only=True)
class SegmentMaker(BatchSource[Copied, Copied]):
    """Makes batches of the segments in a storage, in two steps.

    `draw` and `copy` are called under the lock of the buffer, `finish` is not. Fields without a
    comment are documented in `SegmentReplayBuffer`.
    """

    ring: EpisodeRing
    priorities: StepPriorities
    length: int  # L
    stacks: Mapping[Path, int]  # S by the path of an entry, where it is more than 1
    kinds: Kinds
    replacement: bool | None
    num_changes: int = 0
    # Entries of which batches have the rows' numbers instead.
    by_row: set[Path] = field(default_factory=set)

    @property
    def on_cpu(self) -> bool:
        """Whether batches stay where the rows are, so that an earlier one can be drawn into."""
        return self.device is None and self.storage.device.type == "cpu"

    @cached_property
    def target_device(self) -> torch.device:
        """The device of batches."""
        if self.device is None:
            return self.storage.device
        return torch.empty(0, device=self.device).device

    def draw(self, batch_size: int, into: TensorDict | None = None) -> Copied:
        """Choose starts and copy their segments; into an earlier batch, if one is given."""
        num_steps = len(self.ring)
        if not num_steps:
            raise ValueError(
                f"no step can be drawn yet: {self.ring.total} rows have been added, and a step "
                f"needs {self.length - 1} rows after it, or the end of its episode"
            )
        enough = batch_size <= num_steps
        if self.replacement is False and not enough:
            raise ValueError(
                f"{batch_size} different steps cannot be drawn from {num_steps}: sample fewer, or "
                "create the buffer with replacement=True, or with None, which repeats steps only "
                "if there are too few"
            )
        # Missing entries of `into` are reported before a draw is lost for it.
        targets = None if into is None else self.targets(into, batch_size, self.length)
        again = not enough if self.replacement is None else self.replacement
        start, weight = self.priorities.draw(batch_size, self.generator, replacement=again)
        return self.copy(start, weight, self.length, targets)

    def copy(
        self, start: Tensor, weight: Tensor, length: int, into: Copied | None = None
    ) -> Copied:
        """The segments of L rows from these rows [B] on."""
        structure = self.storage.settled_structure()
        before, size = self.ring.look_back, torch.Size([len(start), length])
        known = None if into is None else into.added
        rows, found = find_segments(self.ring, self.kinds, start, length=length, out=known)
        index = self.ring.item(start)
        if into is not None:
            index = into.added["index"].copy_(index)
            weight = into.added["priority_weight"].copy_(weight)
        targets = [None] * len(structure.paths) if into is None else into.leaves
        wanted: dict[int, Tensor] = {}  # the rows to read, by S
        leaves = []
        for path, leaf, target in zip(structure.paths, self._leaves(), targets, strict=True):
            stack = self.stacks.get(path, 1)
            if stack not in wanted:
                wanted[stack] = rows[:, before - stack + 1 :].reshape(-1).to(leaf.device)
                self.storage.ensure_whole(wanted[stack])
            shape = len(start), length + stack - 1, *leaf.shape[1:]
            if path in self.by_row:
                numbers = wanted[stack].view(shape[:2])
                leaves.append(numbers if target is None else target.copy_(numbers))
            elif target is None:
                leaves.append(selected(leaf, wanted[stack]).view(shape))
            else:
                out = carried(target.flatten(0, 1))
                torch.index_select(carried(leaf), 0, wanted[stack], out=out)
                leaves.append(target)
        return Copied(size, leaves, {"index": index, "priority_weight": weight, **found})

    def _leaves(self) -> list[Tensor]:
        """The tensors of all rows [N, ...], in the order of the structure's paths."""
        # Through `storage.get`, entries that aren't stacked would be read at all rows that are.
        leaves = self.storage._leaves
        if not leaves:
            raise RuntimeError("the storage has been closed, so it cannot be read any more")
        return leaves

    def finish(self, drawn: Copied) -> Copied:
        """The drawn tensors, pinned and moved to their device."""
        if self.on_cpu and not self.pin_memory:
            return drawn
        # Entries about rows come from the CPU, whereas the entries are where the storage is.
        device = self.target_device
        added = {name: self.moved(value, device) for name, value in drawn.added.items()}
        leaves = [self.moved(leaf, device) for leaf in drawn.leaves]
        return Copied(drawn.size, leaves, added)

    def build(self, copied: Copied) -> TensorDict:
        """A batch of these tensors."""
        structure = self.storage.settled_structure()
        pairs = list(zip(structure.paths, copied.leaves, strict=True))
        leaves = [
            stacked(leaf, self.stacks[path]) if path in self.stacks else leaf
            for path, leaf in pairs
        ]
        batch: TensorDict = structure.build(leaves, copied.size, self.target_device)
        batch.batch_size = copied.size[:1]
        for path, leaf in pairs:
            if path in self.by_row:
                batch.set(path, leaf)
        for name, value in copied.added.items():
            batch.set(name, value)
        return batch

    def fill(self, out: TensorDict, copied: Copied) -> TensorDict:
        """Copy these tensors into an earlier batch of this size."""
        targets = self.targets(out, *copied.size)
        for target, leaf in zip(targets.leaves, copied.leaves, strict=True):
            target.copy_(leaf)
        for name, value in copied.added.items():
            targets.added[name].copy_(value)
        return out

    def targets(self, out: TensorDict, batch_size: int, length: int) -> Copied:
        """The tensors of an earlier batch; ValueError if it is not one of this size."""
        structure = self.storage.settled_structure()
        size = torch.Size([batch_size, length])
        leaves = []
        for path, layout in zip(structure.paths, structure.layouts, strict=True):
            stack = self.stacks.get(path, 1)
            if path in self.by_row:
                shape: tuple[int, ...] = (batch_size, length + stack - 1)
                leaves.append(self._target(out, path, shape, torch.int64, 1))
                continue
            shape = (*size, *layout.shape) if stack == 1 else (*size, stack, *layout.shape)
            leaves.append(self._target(out, path, shape, layout.dtype, stack))
        added = {
            name: self._target(out, (name,), size if name in OF_ROWS else size[:1], dtype, 1)
            for name, dtype in ADDED.items()
        }
        return Copied(size, leaves, added)

    def _target(
        self, out: TensorDict, path: Path, shape: tuple[int, ...], dtype: torch.dtype, stack: int
    ) -> Tensor:
        found: Tensor | None = out[path]
        assert found is not None
        if found.shape != shape or found.dtype is not dtype or found.device != self.target_device:
            found = None
        elif stack > 1:
            found = unstacked(found)
        if found is None or not found.is_contiguous():
            raise ValueError(
                f"out cannot be filled: its entry {path[0] if len(path) == 1 else path!r} must be "
                f"as in a sample, {dtype} {list(shape)} on {self.target_device}. Pass an earlier "
                "sample of this size itself, not a copy of it"
            )
        return found

    def version(self) -> Hashable:
        return self.num_changes


def kinds_of_rows(absorb: Collection[str]) -> Kinds:
    """What counts of rows by their kind; the ends of `absorb` are absorbing."""
    if isinstance(absorb, str) or not set(absorb) <= set(CLOSED):
        raise ValueError(f"absorb={absorb!r} must be a collection of some of {list(CLOSED)}")
    mask = torch.ones(5, dtype=torch.bool, device="cpu")
    discount = torch.zeros(5, dtype=torch.float32, device="cpu")
    for end, kind in CLOSED.items():
        mask[kind] = end in absorb
    discount[STEP] = 1.0
    discount[TRUNCATED] = float("truncated" not in absorb)
    return Kinds(mask, discount)


def frame_stacks(
    frame_stack: int | Mapping[NestedKey, int], observation_keys: Sequence[NestedKey]
) -> dict[Path, int]:
    """The number of stacked frames by entry path, for entries with more than 1.

    >>> from raffia.data.segment_batches import frame_stacks
    >>> frame_stacks(4, ["obs"]), frame_stacks({("obs", "pixels"): 4}, ["turn", ("obs", "pixels")])
    ({('obs',): 4}, {('obs', 'pixels'): 4})
    """
    if not isinstance(frame_stack, Mapping):
        if frame_stack != 1 and len(observation_keys) != 1:
            raise ValueError(
                f"frame_stack={frame_stack} does not say which of "
                f"observation_keys={list(observation_keys)} are stacked: pass "
                f"frame_stack={{{observation_keys[0]!r}: {frame_stack}}}"
            )
        frame_stack = dict.fromkeys(observation_keys, frame_stack)
    for key, stack in frame_stack.items():
        if unravel_key(key) not in observation_keys or not isinstance(stack, int) or stack < 1:
            raise ValueError(
                f"frame_stack: {key!r}: {stack!r} must be one of "
                f"observation_keys={list(observation_keys)} and its number of stacked frames, at "
                "least 1"
            )
    return {unravel_key_to_tuple(key): stack for key, stack in frame_stack.items() if stack > 1}


class StoredRows:
    """The rows of a storage, which are steps and closing rows.

    >>> from raffia.data.segment_batches import StoredRows
    >>> from raffia.data.steps import StepKeys
    >>> from raffia.data.storage import TensorStorage
    >>> storage = TensorStorage(5)
    >>> no = torch.tensor([False, False])
    >>> steps = TensorDict(obs=torch.ones(2), value=torch.ones(2), truncated=no, batch_size=[2])
    >>> _ = storage.extend(steps)
    >>> rows = StoredRows(storage, StepKeys(("obs",), "terminated", "truncated"))
    >>> rows.close(torch.tensor([1]), torch.tensor([0]))
    >>> storage.get(1)["obs"], storage.get(1)["value"], storage.get(slice(None))["truncated"]
    (tensor(1.), tensor(0.), tensor([True, True]))
    """

    def __init__(self, storage: Storage, keys: StepKeys) -> None:
        self.storage, self.keys = storage, keys

    def close(self, rows: Tensor, before: Tensor) -> None:
        """Make steps closing rows, and the steps before them the last ones of their episodes."""
        if len(rows):
            found = self.storage.read(rows)
            closing = found.clone().zero_().update(found.select(*self.keys.observation))
            self._truncate(rows, closing)
        if len(before):
            self._truncate(before, self.storage.read(before))

    def _truncate(self, rows: Tensor, entries: TensorDict) -> None:
        entries[self.keys.truncated].fill_(True)
        self.storage.set(rows, entries)

    def fitting(self, entries: TensorDict) -> dict[Path, Tensor]:
        """New entries [n, ...] by their paths; KeyError or ValueError if they don't fit."""
        structure = self.storage.structure
        layouts = (
            {} if structure is None else dict(zip(structure.paths, structure.layouts, strict=True))
        )
        values: dict[Path, Tensor] = {}
        for key, value in entries.items(True, True):
            path = unravel_key_to_tuple(key)
            if path not in layouts or path in self.keys.flag_paths:
                others = [path for path in layouts if path not in self.keys.flag_paths]
                why = (
                    "marks where an episode ends"
                    if path in self.keys.flag_paths
                    else "is not in the storage"
                )
                raise KeyError(f"entry {key!r} {why}; entries that can be updated: {others}")
            layout = layouts[path]
            if value.dtype is not layout.dtype or value.shape[1:] != layout.shape:
                given = f"{value.dtype} {list(value.shape[1:])}"
                raise ValueError(f"entry {key!r} has rows {given}, but {layout} is stored")
            values[path] = value.detach()
        return values

    def write(self, rows: Tensor, values: dict[Path, Tensor], is_step: Tensor) -> None:
        """Write entries of rows [n]; to closing rows only those that they have."""
        if not isinstance(self.storage, TensorStorage):
            self._write_whole(rows, values, is_step)
            return
        all_steps = bool(is_step.all())
        for path, value in values.items():
            if all_steps or self.keys.is_observation(path):
                self.storage.set_entry(path, rows, value)
            else:
                self.storage.set_entry(path, rows[is_step], value[is_step.to(value.device)])

    def _write_whole(self, rows: Tensor, values: dict[Path, Tensor], is_step: Tensor) -> None:
        """Write entries on disk, where a checksum covers whole rows: all entries in one write."""
        found = self.storage.read(rows)
        everywhere = torch.ones_like(is_step)
        for path, value in values.items():
            entry = found[path]
            where = (everywhere if self.keys.is_observation(path) else is_step).to(entry.device)
            carried(entry)[where] = carried(value.to(entry.device))[where]
        self.storage.set(rows, found)
