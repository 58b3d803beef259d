"""Checkpoints of a run: written atomically, checked when read, the newest whole one found.

Each is a folder named by its update, `checkpoints/000001000/`, whose manifest comes last and holds
the sizes and sha256 of its files (`raffia.files.folder`). So at any time, killed or without power,

- a folder without a manifest is what a killed save left: it counts for nothing, and the next save
  removes it;
- a folder with a manifest was brought to disk as a whole, and an older one goes only after that;
- one that is removed loses its manifest first.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from raffia.files import DamagedFileError, dump_json, make_folder, parse_json, read_signed, sync
from raffia.files.folder import (
    MANIFEST,
    OURS,
    Content,
    Folder,
    read_folder,
    replace_extras,
    write_folder,
)
from raffia.tensordict.safetensors_file import save_file
from raffia.tensordict.tensordict import TensorDict

KIND, VERSION = "raffia.checkpoint", 1
NAME = re.compile(r"\d{9,}")

Part = TensorDict | Content
Warn = Callable[[str], object]
Check = Callable[["Checkpoint"], object]


class CheckpointError(RuntimeError):
    """A checkpoint was not written, or cannot be read: `path` names it, `available` lists the
    others.

    >>> raise CheckpointError("checkpoints/000000002", "was not saved", available=["000000001"])
    Traceback (most recent call last):
    ...
    raffia.train.checkpoint.CheckpointError: checkpoints/000000002 was not saved. Available:
    000000001
    """

    def __init__(self, path: str, why: str, *, available: Sequence[str] = ()) -> None:
        what = f" Available: {', '.join(available)}" if available else ""
        super().__init__(f"{path} {why}.{what}")
        self.path, self.available = path, [*available]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found to be whole.

    >>> import tempfile
    >>> parts = {"state": TensorDict(step=torch.tensor(7))}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Checkpoints(folder).save(7, parts, {"n": 1})
    ...     found = read_checkpoint(path)
    ...     found.update, found.extras, found.tensors("state")["step"]
    (7, {'n': 1}, tensor(7))
    """

    update: int
    score: float | None
    extras: dict[str, Any]
    folder: Folder

    @property
    def root(self) -> str:
        """The path of the folder."""
        return self.folder.root

    def tensors(self, name: str, device: torch.device | str | None = None) -> TensorDict:
        """The part that was a TensorDict."""
        return TensorDict.load(self.folder.path(f"{name}.safetensors"), device)

    def has(self, name: str) -> bool:
        """Whether there is a part of this name."""
        return name in self.folder.files or f"{name}.safetensors" in self.folder.files

    def path(self, name: str) -> str:
        """The path of the part that was stored as bytes or written by a function."""
        return self.folder.path(name)

    def read(self, name: str) -> bytes:
        """The bytes of the part that was bytes, or was written by a function."""
        return self.folder.read(name)


class Checkpoints:
    """The checkpoints in a folder: the `keep` newest, and the one with the best score.

    folder: where they are; made at the first save. One process saves; others may read beside it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoints = Checkpoints(folder, keep=2)
    ...     for update, score in [(10, 5.0), (20, 9.0), (30, 7.0), (40, 8.0)]:
    ...         path = checkpoints.save(update, {"note": b"hello"}, score=score)
    ...     sorted(os.listdir(folder)), checkpoints.newest().update, checkpoints.best().update
    (['000000020', '000000030', '000000040'], 40, 20)
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(
                f"keep={keep} must be at least 1: a run is resumed from its newest checkpoint"
            )
        self.folder = os.path.abspath(folder)
        self.keep = keep
        self._whole: dict[str, Checkpoint] = {}  # those that were checked once, or were saved here
        self._passed_over: set[str] = set()
        self.held: Callable[[], Collection[int]] = tuple  # updates whose checkpoints stay

    # -- saving

    def save(
        self,
        update: int,
        parts: Mapping[str, Part],
        extras: dict[str, Any] | None = None,
        score: float | None = None,
    ) -> Path:
        """Write a checkpoint, then remove those beyond `keep`; returns its path.

        update: its number. One of this number that is there is replaced atomically.
        parts: under each name a TensorDict, bytes, or a function that writes the file at a path.
        extras: what JSON can hold.
        score: the larger the better; None: unknown.
        Raises CheckpointError where the disk is full or fails: what was half written is removed,
        and those from before are as they were, so that a run can go on. Raises ValueError if there
        is a later one, which is of another run, unless `newest` passed it over.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Checkpoints(folder).save(3, {"note": b"hello"}).name
        '000000003'
        """
        files = _files(parts)
        if update < 0 or (score is not None and not math.isfinite(score)):
            raise ValueError(f"update={update} must be 0 or more, and score={score} finite or None")
        record = {"update": update, "score": score, "extras": extras or {}}
        parse_json("extras", dump_json(record), deepest=None)  # refused before anything is written
        path = f"{self.folder}/{update:09d}"
        self._refuse_the_past(update)
        try:
            make_folder(self.folder)
            self._remove_leftovers(path)
            self._write(path, files, record)
        except OSError as error:
            raise self._failed(path, f"was not saved: {_cause(error)}") from error
        try:
            self._whole[path] = Checkpoint(update, score, extras or {}, _listed(path))
            self._passed_over.discard(path)
            self._prune(update)
        except OSError as error:
            why = f"was saved, but an older one could not be removed: {_cause(error)}"
            raise self._failed(path, why) from error
        return Path(path)

    def score(self, update: int, score: float) -> None:
        """Set the score of a saved checkpoint.

        Raises ValueError where there is none of this update.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoints = Checkpoints(folder)
        ...     path = checkpoints.save(3, {"note": b"hello"})
        ...     checkpoints.score(3, 7.5)
        ...     checkpoints.best().score
        7.5
        """
        saved = {one.update: one for one in self.available()}
        if update not in saved or not math.isfinite(score):
            raise ValueError(
                f"update={update}, score={score}: a score must be finite and belong to a saved "
                f"checkpoint, one of {sorted(saved)}"
            )
        found = saved[update]
        record = {"update": update, "score": score, "extras": found.extras}
        replace_extras(found.root, KIND, VERSION, record)
        self._whole[found.root] = replace(found, score=score)

    def _refuse_the_past(self, update: int) -> None:
        later = [
            x for x in self.available() if x.update > update and x.root not in self._passed_over
        ]
        if later:
            raise ValueError(
                f"update={update} cannot be saved: {self.folder} holds a checkpoint of update "
                f"{later[-1].update}. Continue from that one, checkpoints.newest(), or use "
                "another folder for another run"
            )

    def _remove_leftovers(self, path: str) -> None:
        """Remove what killed saves left, and what is damaged under the new one's name."""
        for found in self._paths():
            if _is_leftover(found) or (found == path and _is_damaged(found)):
                _remove(found)

    def _write(self, path: str, files: dict[str, Content], record: dict[str, Any]) -> None:
        is_new = not os.path.lexists(path)
        try:
            write_folder(path, KIND, VERSION, files, extras=record)
        except BaseException:
            if is_new and os.path.isdir(path):
                with contextlib.suppress(
                    OSError
                ):  # the error above is raised; the next save removes it
                    _remove(path)
            raise

    def _prune(self, newest: int) -> None:
        """Remove checkpoints beyond `keep`, and what is damaged or was passed over.

        newest: the one that was just saved, which is never among these.
        """
        whole = self.available()
        for path in self._paths():
            if path not in self._whole and _is_damaged(path):
                _remove(path)
        past = [found for found in whole if found.update <= newest]
        keep = {found.update for found in past[-self.keep :]} | set(self.held())
        if (best := _best(past)) is not None:
            keep.add(best.update)
        for found in whole:
            if found.update not in keep:
                del self._whole[found.root]
                _remove(found.root)

    def _failed(self, path: str, why: str) -> CheckpointError:
        others = [other for other in self._paths() if os.path.exists(f"{other}/{MANIFEST}")]
        return CheckpointError(path, why, available=[os.path.basename(other) for other in others])

    # -- reading

    @property
    def passed_over(self) -> list[str]:
        """The paths of those that `newest` or `best` found and could not use.

        >>> Checkpoints("nowhere").passed_over
        []
        """
        return sorted(self._passed_over)

    def has_any(self) -> bool:
        """Whether there are folders of checkpoints, whole or not.

        >>> Checkpoints("nowhere").has_any()
        False
        """
        return bool(self._paths())

    def available(self) -> list[Checkpoint]:
        """The intact checkpoints, oldest first; each is checked once in the lifetime of this
        object.

        >>> Checkpoints("nowhere").available()
        []
        """
        paths = self._paths()
        self._whole = {path: found for path, found in self._whole.items() if path in paths}
        for path in paths:
            if path not in self._whole:
                with contextlib.suppress(DamagedFileError, OSError, ValueError, CheckpointError):
                    self._whole[path] = read_checkpoint(path)
        return [self._whole[path] for path in paths if path in self._whole]

    def newest(self, warn: Warn = warnings.warn, check: Check | None = None) -> Checkpoint | None:
        """The newest checkpoint that is whole; None if there is none.

        warn: called with a text about each that is passed over, and why.
        check: raises DamagedFileError for one whose files elsewhere are not whole.
        Raises CheckpointError if a later version of raffia wrote one that is newer.

        >>> Checkpoints("nowhere").newest() is None
        True
        """
        return next(self._checked(self._paths()[::-1], warn, check), None)

    def best(self, warn: Warn = warnings.warn, check: Check | None = None) -> Checkpoint | None:
        """The checkpoint with the best score, of several the newest; None if none has a score.

        warn, check: as of `newest`.

        >>> Checkpoints("nowhere").best() is None
        True
        """
        return _best(self._checked(self._paths(), warn, check))

    def _checked(self, paths: list[str], warn: Warn, check: Check | None) -> Iterator[Checkpoint]:
        for path in paths:
            try:
                if _is_leftover(path):
                    continue  # it never was one
                found = read_checkpoint(path)
                if check is not None:
                    check(found)
            except (DamagedFileError, ValueError, OSError) as error:
                if os.path.lexists(path):  # else it was removed meanwhile
                    self._passed_over.add(path)
                    why = str(error).removeprefix(f"{os.path.abspath(path)}/")
                    warn(f"checkpoint {path} is skipped: {why}")
                continue
            yield found

    def _paths(self) -> list[str]:
        """The paths of all folders that are named as checkpoints, the lowest update first."""
        names = os.listdir(self.folder) if os.path.isdir(self.folder) else []
        names = sorted([name for name in names if NAME.fullmatch(name)], key=int)
        return [f"{self.folder}/{name}" for name in names]


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint in this folder, after a check that all is as it was written.

    Raises DamagedFileError if it is not, FileNotFoundError or ValueError if the folder holds none,
    CheckpointError if a later version of raffia wrote it.

    >>> read_checkpoint("nowhere")
    Traceback (most recent call last):
    ...
    FileNotFoundError: ... no manifest.json...
    """
    root = os.path.abspath(path)
    if os.path.isfile(f"{root}/{MANIFEST}"):
        record = read_signed(f"{root}/{MANIFEST}")
        version = record.get("version")
        if record.get("kind") == KIND and isinstance(version, int) and version > VERSION:
            raise CheckpointError(
                root,
                f"was written by a later version of raffia, in format version {version}, but this "
                f"one reads version {VERSION}: pip install --upgrade raffia",
            )
    elif not os.path.isdir(root) or not os.listdir(root):
        raise FileNotFoundError(2, "no checkpoint is here: the folder has no manifest.json", root)
    else:
        raise ValueError(f"{root} is not a checkpoint: it has no manifest.json")
    folder = read_folder(root, KIND, VERSION)
    extras = folder.extras
    try:
        return Checkpoint(int(extras["update"]), extras["score"], extras["extras"], folder)
    except (KeyError, TypeError) as error:
        raise DamagedFileError(root, f"its manifest is incomplete: {error!r}") from None


def _best(found: Iterable[Checkpoint]) -> Checkpoint | None:
    scored = [(one.score, one.update, one) for one in found if one.score is not None]
    return max(scored, key=lambda entry: entry[:2])[-1] if scored else None


def _files(parts: Mapping[str, Part]) -> dict[str, Content]:
    files: dict[str, Content] = {}
    for name, part in parts.items():
        name = f"{name}.safetensors" if isinstance(part, TensorDict) else name
        if name in files:
            raise ValueError(f"two parts have the name {name!r}: rename one of them")
        files[name] = _writer(part) if isinstance(part, TensorDict) else part
    return files


def _writer(part: TensorDict) -> Callable[[str], None]:
    return lambda path: save_file(part, path)


def _listed(path: str) -> Folder:
    """The checkpoint that was just written, without reading it all again."""
    record = read_signed(f"{path}/{MANIFEST}")
    files = {name: f"{path}/{listed['file']}" for name, listed in record["files"].items()}
    return Folder(path, files, record["extras"])


def _is_leftover(path: str) -> bool:
    """Whether this is what a killed save, or a killed removal, left: files of ours, no manifest."""
    return os.path.isdir(path) and all(OURS.fullmatch(name) for name in os.listdir(path))


def _is_damaged(path: str) -> bool:
    """Whether this was a checkpoint; False for whatever is not ours, or of a later version."""
    if not os.path.isfile(f"{path}/{MANIFEST}"):
        return False
    try:
        read_checkpoint(path)
    except DamagedFileError:
        return True
    except (ValueError, CheckpointError):
        return False
    return False


def _remove(path: str) -> None:
    """Remove a checkpoint: a kill meanwhile leaves a leftover, not a damaged one.

    What is not ours in its folder stays.
    """
    if os.path.lexists(f"{path}/{MANIFEST}"):
        os.unlink(f"{path}/{MANIFEST}")
        sync(path)
    for name in os.listdir(path):
        if OURS.fullmatch(name):
            os.unlink(f"{path}/{name}")
    if not os.listdir(path):
        os.rmdir(path)


def _cause(error: OSError) -> str:
    return error.strerror or str(error)
