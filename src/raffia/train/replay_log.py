"""Incremental saving of a replay buffer with a run's checkpoints: only new rows are written.

Observations before actions are nearly all of a buffer, and is never changed after it came in: it
goes into chunks, files that are written once, of the rows that came since the checkpoint before.
All else is small, or changes: it goes whole into each checkpoint, with a list of the chunks that
belong to it and their sha256. What is restored is the buffer as it was, bit for bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raffia.data.segment import LockedView, SegmentReplayBuffer
from raffia.data.structure import RowStructure, StorageContents, to_state
from raffia.files import Checksum, DamagedFileError, check_file, checksum
from raffia.tensordict.keys import NestedKey, unravel_key_to_tuple
from raffia.tensordict.safetensors_file import raw_bytes, save_file
from raffia.tensordict.tensordict import TensorDict
from raffia.train.checkpoint import Checkpoint, CheckpointError

VERSION = 2  # of what a checkpoint holds of a replay; in 1 the state of the segments was another
SMALL = 8 << 20  # bytes: the last chunk is written again, with what came since, while it is smaller
LARGE = 256 << 20  # bytes of a chunk, at most: what a restore holds besides the buffer
OURS = re.compile(r"(rows-\d+-\d+-[0-9a-f]{12}\.safetensors|\.[0-9a-f]{12}\.tmp)")


class Logged(NamedTuple):
    """The parts of a buffer that go into a checkpoint."""

    parts: dict[str, TensorDict]
    extras: dict[str, Any]  # belongs under the log's name in the extras of the checkpoint


@dataclass(frozen=True)
class Chunk:
    """A file with the fixed columns of the items first .. stop - 1, which lie in rows in a row."""

    file: str
    first: int
    stop: int
    bytes: int
    sha256: str
    last: str  # sha256 of its last row


class ReplayLog:
    """Saves a `SegmentReplayBuffer` along with checkpoints.

    folder: where the chunks are. It may hold a folder for a `MemmapStorage` besides: that is then
        room for the rows and no more, and is filled again by `restore`.
    mutable: what `buffer.update` is called with. Of the buffer's `observation_keys`, those that are
        not named here must never be updated: they are written once.
    name: of the part of a checkpoint, and in its extras; of several logs each has its own, and its
        own folder.

    One save is `files`, then `Checkpoints.save`, then `prune`; killed at any time between them,
    all checkpoints have their chunks.

    >>> import tempfile
    >>> from raffia.data.storage import TensorStorage
    >>> from raffia.train.checkpoint import Checkpoints
    >>> def make_buffer():
    ...     return SegmentReplayBuffer(TensorStorage(100), unroll_steps=1, alpha=0.6, beta=0.4)
    >>> buffer, other, no = make_buffer(), make_buffer(), torch.zeros(5, dtype=torch.bool)
    >>> steps = TensorDict(observation=torch.arange(5), terminated=no, truncated=no, batch_size=[5])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log, checkpoints = ReplayLog(f"{folder}/replay"), Checkpoints(f"{folder}/checkpoints")
    ...     for update in range(2):
    ...         _ = buffer.extend(steps)
    ...         logged = log.files(buffer)
    ...         _ = checkpoints.save(update, logged.parts, {"replay": logged.extras})
    ...         log.prune(checkpoints.available())
    ...     found = checkpoints.newest(check=log.check)
    ...     log.restore(found, other)
    >>> len(other), other.read(torch.tensor([4]))["observation"]
    (9, tensor([[4, 0]]))
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        mutable: Sequence[NestedKey] = (),
        name: str = "replay",
    ) -> None:
        self.folder, self.name = os.path.abspath(folder), name
        self._mutable = {unravel_key_to_tuple(key) for key in mutable}
        self._chunks: list[Chunk] = []  # of the last checkpoint, by their items

    # -- saving

    def files(self, buffer: SegmentReplayBuffer) -> Logged:
        """Write the rows added since the last call, and return what belongs into the checkpoint.

        Raises CheckpointError where the disk is full or fails; nothing new is left then.
        """
        with buffer.locked_view() as view:
            storage, found = buffer.storage, view.contents
            oldest = max(0, storage.total - len(storage))
            if found.max_size is None or len(storage) != min(found.total, found.max_size):
                raise ValueError(
                    f"only {len(storage)} of the {found.total} items that were added to a ring of "
                    f"{found.max_size} rows are left: rows of a replay buffer's storage must not "
                    "be erased"
                )
            columns = _columns(found)
            fixed = self._fixed(view)
            fixed_columns = {name: columns[name] for name in fixed}
            self._chunks = self._written(fixed_columns, oldest, found.total, found.max_size)
            whole = {name: leaf.clone() for name, leaf in columns.items() if name not in fixed}
            parts = {self.name: TensorDict({"columns": whole, "buffer": view.buffer_state})}
            structure = found.structure
            return Logged(
                parts,
                {
                    "version": VERSION,
                    "max_size": found.max_size,
                    "total": found.total,
                    "num_ignored": buffer.num_ignored,
                    "structure": None if structure is None else structure.to_json(),
                    "chunks": [asdict(chunk) for chunk in self._chunks],
                },
            )

    def _fixed(self, view: LockedView) -> list[str]:
        """The names of the columns that never change once they are written."""
        structure = view.contents.structure
        if structure is None:
            return []
        return [
            name
            for name, path in zip(_names(structure), structure.paths, strict=True)
            if any(path[: len(key)] == key for key in view.observation_keys)
            and path not in self._mutable
        ]

    def _written(
        self, columns: dict[str, Tensor], oldest: int, total: int, size: int
    ) -> list[Chunk]:
        """The chunks that hold all items from `oldest` on; those that lack are written."""
        row_bytes = sum([leaf[:1].numel() * leaf.element_size() for leaf in columns.values()])
        if not row_bytes:
            return []
        chunks = [chunk for chunk in self._chunks if chunk.stop > oldest]
        same = [_digest(columns, (chunk.stop - 1) % size) == chunk.last for chunk in chunks]
        if not all(same) or (chunks and chunks[-1].stop > total):
            chunks = []  # it is not the buffer of the last time, or it was emptied
        first = chunks[-1].stop if chunks else oldest
        if chunks and first < total and (first - chunks[-1].first) * row_bytes < SMALL:
            first = max(oldest, chunks.pop().first)
        token = secrets.token_hex(6)
        pieces = _pieces(first, total, size, max(1, LARGE // row_bytes))
        try:
            return chunks + [self._write(columns, *piece, size, token) for piece in pieces]
        except BaseException as error:
            with contextlib.suppress(OSError):  # the error reports it; `prune` removes them too
                self._remove([name for name in os.listdir(self.folder) if token in name])
            if isinstance(error, OSError):
                why = f"could not be written: {error.strerror or error}"
                raise CheckpointError(self.folder, why) from error
            raise

    def _write(
        self, columns: dict[str, Tensor], first: int, stop: int, size: int, token: str
    ) -> Chunk:
        rows = slice(first % size, first % size + stop - first)
        file = f"rows-{first:012d}-{stop:012d}-{token}.safetensors"
        path = f"{self.folder}/{file}"
        save_file(TensorDict({name: leaf[rows] for name, leaf in columns.items()}), path)
        return Chunk(file, first, stop, *checksum(path), _digest(columns, rows.stop - 1))

    def _remove(self, names: list[str]) -> None:
        for name in names:
            os.unlink(f"{self.folder}/{name}")

    def prune(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Remove the chunks that none of these checkpoints needs.

        Called after a save, and after one that failed: what was written for that is removed, and
        is written again for the next one.

        checkpoints: all that there are, `Checkpoints.available()`.
        Raises CheckpointError where one can't be removed.
        """
        needed = {chunk.file for found in checkpoints for chunk in self._chunks_of(found)}
        self._chunks = [chunk for chunk in self._chunks if chunk.file in needed]
        found = os.listdir(self.folder) if os.path.isdir(self.folder) else []
        try:
            self._remove([name for name in found if OURS.fullmatch(name) and name not in needed])
        except OSError as error:
            why = f"holds rows that could not be removed: {error.strerror or error}"
            raise CheckpointError(self.folder, why) from error

    # -- restoring

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise DamagedFileError unless all chunks of a checkpoint are as they were written."""
        for chunk in self._chunks_of(checkpoint):
            check_file(f"{self.folder}/{chunk.file}", Checksum(chunk.bytes, chunk.sha256))

    def restore(self, checkpoint: Checkpoint, buffer: SegmentReplayBuffer) -> None:
        """Restore the buffer of the checkpoint, bit for bit, with its generator.

        buffer: made as that one was; what it holds is replaced.
        Raises DamagedFileError, CheckpointError or ValueError, and changes nothing, if the chunks
        are damaged, another version wrote them, or the buffer is made otherwise.
        """
        record = self._record(checkpoint)
        if (version := record.get("version", 1)) != VERSION:
            raise CheckpointError(
                checkpoint.root,
                f"holds a replay of version {version}, but this raffia resumes version {VERSION}. "
                "Its agent can still be evaluated and played; to continue training, train a new "
                "run, or resume this one with the raffia that wrote it (see its config.json)",
            )
        self.check(checkpoint)
        chunks = self._chunks_of(checkpoint)
        saved = checkpoint.tensors(self.name).to_dict()
        total, size, structure = record["total"], record["max_size"], None
        if record["structure"] is not None:
            structure = RowStructure.from_json(record["structure"])
        # First a storage without rows, of that many items; then the rows, in their order.
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        layouts = structure.layouts if structure is not None else ()
        empty = [
            torch.empty((0, *layout.shape), dtype=layout.dtype, device="cpu") for layout in layouts
        ]
        state = {
            "storage": to_state(StorageContents(size, total, structure, none, empty)),
            "buffer": saved["buffer"],
        }
        buffer.load_state_dict(state)
        buffer.num_ignored = record["num_ignored"]
        if structure is not None:
            for rows, columns in self._rows(chunks, saved["columns"], total, size):
                leaves = [columns[name] for name in _names(structure)]
                batch = torch.Size([rows.stop - rows.start])
                buffer.storage.set(rows, structure.build(leaves, batch, torch.device("cpu")))
        self._chunks = chunks

    def _rows(
        self, chunks: list[Chunk], whole: dict[str, Tensor], total: int, size: int
    ) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """All rows in order, with all columns."""
        oldest = max(0, total - size)
        if not chunks:
            for first, stop in sorted(
                _pieces(oldest, total, size, size), key=lambda x: x[0] % size
            ):
                rows = slice(first % size, first % size + stop - first)
                yield rows, {name: leaf[rows] for name, leaf in whole.items()}
        for chunk in sorted(chunks, key=lambda chunk: chunk.first % size):
            found = TensorDict.load(f"{self.folder}/{chunk.file}").to_dict()
            first = max(oldest, chunk.first)
            rows = slice(first % size, first % size + chunk.stop - first)
            columns = {name: leaf[first - chunk.first :] for name, leaf in found.items()}
            yield rows, columns | {name: leaf[rows] for name, leaf in whole.items()}

    def _record(self, checkpoint: Checkpoint) -> dict[str, Any]:
        record = checkpoint.extras.get(self.name)
        if type(record) is not dict:
            raise DamagedFileError(checkpoint.root, "it holds no replay buffer")
        return record

    def _chunks_of(self, checkpoint: Checkpoint) -> list[Chunk]:
        return [Chunk(**listed) for listed in self._record(checkpoint)["chunks"]]


def _names(structure: RowStructure | None) -> list[str]:
    """A name for each column, all different."""
    names = structure.names if structure is not None else []
    return [f"{i}.{name}" for i, name in enumerate(names)]


def _columns(found: StorageContents) -> dict[str, Tensor]:
    return dict(zip(_names(found.structure), found.leaves, strict=True))


def _pieces(first: int, stop: int, size: int, most: int) -> Iterator[tuple[int, int]]:
    """Split items into ranges that are contiguous in the ring, of at most `most` items each.

    >>> list(_pieces(7, 14, size=10, most=2))
    [(7, 9), (9, 10), (10, 12), (12, 14)]
    """
    while first < stop:
        end = min(stop, first + most, first + size - first % size)
        yield first, end
        first = end


def _digest(columns: dict[str, Tensor], row: int) -> str:
    found = hashlib.sha256()
    for leaf in columns.values():
        found.update(raw_bytes(leaf[row : row + 1]))
    return found.hexdigest()
