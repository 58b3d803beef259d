"""Episodes from any file: the checks and the names that all readers share.

A reader finds the columns of an episode in its file and gives them here; `Episodes.make` sees that
they belong together, and that the episode is like the first one of the file.

Legend: T steps of one episode.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from raffia.tensordict.keys import NestedKey, unravel_key, unravel_key_to_tuple
from raffia.tensordict.tensordict import TensorDict

Path = str | os.PathLike[str]
Key = tuple[str, ...]
Columns = Mapping[NestedKey, NestedKey | None]
Layout = dict[Key, tuple[torch.dtype, tuple[int, ...]]]  # dtype and shape of a row

MAX_DEPTH = 32  # of groups, objects and dimensions; deeper is an attack or an accident
EPISODE: Key = ("episode",)  # which episode a step belongs to, where a file holds steps
REWARD: Key = ("reward",)
FLAGS = (("terminated",), ("truncated",))
DONE = ("done", "dones")  # names of ends in files that do not tell their kind
OF_STEPS = ("action", "reward", "terminated", "truncated", "next")  # they have no row T + 1


class MalformedDataError(ValueError):
    """A file of episodes does not hold what it should: `path`, `where` in it, and `why`.

    >>> raise MalformedDataError("a.jsonl", "line 3, 'reward'", "it is a string")
    Traceback (most recent call last):
    ...
    raffia.data.readers.episode.MalformedDataError: a.jsonl: line 3, 'reward': it is a string
    """

    def __init__(self, path: Path, where: str, why: str) -> None:
        super().__init__(f"{os.fspath(path)}: {where}: {why}")
        self.path = os.fspath(path)
        self.where = where
        self.why = why

    def __reduce__(self) -> tuple[type[MalformedDataError], tuple[str, str, str]]:
        return type(self), (self.path, self.where, self.why)


class Column(NamedTuple):
    """The values of one entry for all steps of an episode."""

    name: str  # name in the file
    values: Tensor  # [T, ...], or [T + 1, ...] if it goes with the observations


class Location:
    """The location of an episode in a file, with the names of its columns and steps in errors.

    path: the file.
    where: the episode.
    """

    def __init__(self, path: Path, where: str) -> None:
        self.path = os.fspath(path)
        self.where = where

    def of(self, column: str | None = None, step: int | None = None) -> str:
        """The location of a column of the episode, or of one step of it, as text."""
        where = self.where if column is None else f"{self.where}, {column!r}"
        return where if step is None else f"{where}, step {step}"

    def fail(self, why: str, column: str | None = None, step: int | None = None) -> NoReturn:
        raise MalformedDataError(self.path, self.of(column, step), why)

    @contextmanager
    def foreign(self, column: str | None = None) -> Iterator[None]:
        """Errors of a library, raised as MalformedDataError with this location."""
        try:
            yield
        except MalformedDataError:
            raise
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            why = f"it cannot be read ({cause}); the file may be damaged"
            raise MalformedDataError(self.path, self.of(column), why) from error


class NumberedLocation(Location):
    """The location of an episode whose steps are numbered: a line, or a row, each.

    >>> NumberedLocation("a.jsonl", "line", 3).of("obs", 2)
    "line 5, 'obs'"
    """

    def __init__(self, path: Path, unit: str, first: int) -> None:
        super().__init__(path, f"the episode from {unit} {first}")
        self.unit = unit
        self.first = first

    def of(self, column: str | None = None, step: int | None = None) -> str:
        if step is None:
            return super().of(column)
        where = f"{self.unit} {self.first + step}"
        return where if column is None else f"{where}, {column!r}"


def shown(key: Key) -> str:
    """A key as text, as written in a program.

    >>> shown(("obs",)), shown(("next", "obs"))
    ("'obs'", "('next', 'obs')")
    """
    return repr(unravel_key(key))


def leave_out(path: Key) -> str:
    """The hint in errors how to leave out a column of the file."""
    return f"to leave the column out: columns={{{shown(path)}: None}}"


class Names:
    """The names here of the columns of a file.

    given: the caller's names. None leaves a column out; one that is renamed must be in the file.
    usual: those that the format has anyway; the caller's come before them.

    >>> names = Names({"state": "obs", "note": None}, {"state": "x", "infos": "info"})
    >>> names.of(("state",)), names.of(("infos", "a")), names.of(("note",)), names.of(("b",))
    (('obs',), ('info', 'a'), None, ('b',))
    """

    def __init__(self, given: Columns | None, usual: Columns) -> None:
        self.given = {_key(old): _new_key(old, new) for old, new in (given or {}).items()}
        self.map = {_key(old): _new_key(old, new) for old, new in usual.items()} | self.given

    def of(self, path: Key) -> Key | None:
        """The name of the column at a path of the file, None if it is left out."""
        for n in range(len(path), 0, -1):
            if path[:n] in self.map:
                new = self.map[path[:n]]
                return None if new is None else new + path[n:]
        return path

    def of_all(self, paths: Iterable[Key], location: Location) -> dict[Key, Key]:
        """Path in the file -> name, of the columns that are not left out."""
        paths = list(paths)
        starts = {path[:n] for path in paths for n in range(1, len(path) + 1)}
        for old, renamed in self.given.items():
            if renamed is not None and old not in starts:
                columns = _listed(paths)
                location.fail(f"there is no column {shown(old)}, which `columns` names; {columns}")
        found: dict[Key, Key] = {}  # name -> path
        for path in paths:
            new = self.of(path)
            if new in found:
                both = f"{shown(found[new])} and {shown(path)}"
                location.fail(f"two columns have the name {shown(new)}: {both}")
            if new is not None:
                found[new] = path
        return {path: name for name, path in found.items()}


def _key(key: NestedKey) -> Key:
    return unravel_key_to_tuple(key)


def _new_key(old: NestedKey, new: NestedKey | None) -> Key | None:
    if new is not None and not (isinstance(new, (str, tuple)) and new):
        raise TypeError(
            f"columns={{{old!r}: {new!r}}}: the new name of a column must be a string, a tuple of "
            "strings, or None to leave the column out"
        )
    return None if new is None else _key(new)


def _listed(paths: Iterable[Key]) -> str:
    shortened = sorted({shown(path) for path in paths})
    more = f" and {len(shortened) - 20} more" if len(shortened) > 20 else ""
    return f"only {', '.join(shortened[:20]) or 'nothing'}{more}"


class Rules(NamedTuple):
    """The rules of a reader: what it lets pass."""

    allow_nan: bool  # take NaN and infinite numbers
    truncate_unfinished: bool  # the last step of an episode counts as truncated if nothing ended it
    complete: bool = False  # what is missing gets its usual value, see `completed`


class EpisodeMaker:
    """Makes the episodes of a file, each like the first one.

    >>> flags = {(k,): Column(k, torch.tensor([False])) for k in ("terminated", "truncated")}
    >>> columns = {("obs",): Column("obs", torch.zeros(2, 3)), **flags,
    ...            ("action",): Column("action", torch.ones(1)),
    ...            ("reward",): Column("reward", torch.ones(1))}
    >>> maker = EpisodeMaker(Rules(allow_nan=False, truncate_unfinished=True))
    >>> episode = maker.make(columns, Location("a.jsonl", "line 1"))
    >>> episode.batch_size, episode["obs"].shape, episode["next", "obs"].shape
    (torch.Size([1]), torch.Size([1, 3]), torch.Size([1, 3]))
    >>> episode["truncated"]
    tensor([True])
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.layout: Layout | None = None  # of the first episode

    def make(self, columns: Mapping[Key, Column], location: Location) -> TensorDict | None:
        """The episode that columns make, batch size [T]; None where nothing is left of it.

        Raises MalformedDataError if they make no episode.
        """
        if self.rules.complete:
            columns = completed(columns)
            if REWARD in columns and not len(columns[REWARD].values):
                return None
        columns = with_truncated(columns)
        finished = self.check(columns, location)
        steps = len(columns[REWARD].values)
        episode = TensorDict({}, batch_size=[steps])
        for key, (_, values) in columns.items():
            episode.set(key, values[:steps])
            if len(values) > steps:
                # In separate memory: a write to one would change the other.
                episode.set(("next", *key), values[1:].clone())
        if not finished:
            episode["truncated"][-1] = True
        return episode

    def check(self, columns: Mapping[Key, Column], location: Location) -> bool:
        """Whether the episode that columns make is finished.

        Raises MalformedDataError if they make no episode, or not one like the first.
        """
        check_required(columns, location)
        steps = num_steps(columns, location)
        check_pairs(columns, steps, location)
        layout: Layout = {}
        for key, (_, values) in columns.items():
            layout[key] = values.dtype, tuple(values.shape[1:])
            if len(values) > steps:
                layout["next", *key] = layout[key]
        check_nesting(layout, location)
        if self.layout is not None:
            check_equal_layout(columns, layout, self.layout, location)
        if not self.rules.allow_nan:
            for column in columns.values():
                check_finite(column, location)
        ended = columns[FLAGS[0]].values | columns[FLAGS[1]].values
        check_end(ended, location, self.rules.truncate_unfinished)
        self.layout = self.layout or layout
        return bool(ended[-1])


class Episodes(ABC):
    """The episodes of a file: each pass over them reads it again, an episode at a time."""

    def __init__(self, path: str, rules: Rules) -> None:
        self.path, self._rules = path, rules

    @abstractmethod
    def _read(self, maker: EpisodeMaker) -> Iterator[tuple[Mapping[Key, Column], Location]]:
        """The columns and the location of each episode; `maker` knows the first one's layout."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"

    def __iter__(self) -> Iterator[TensorDict]:
        maker = EpisodeMaker(self._rules)
        for columns, location in self._read(maker):
            episode = maker.make(columns, location)
            if episode is not None:
                yield episode


Part = TypeVar("Part")


def in_episodes(
    steps: Iterable[tuple[int | str, Location, Part]], column: str
) -> Iterator[tuple[Location, list[Part]]]:
    """Each episode's location, and its steps in one or several parts, which come one after another.

    steps: the id of an episode, the location of the part, and the part.
    column: the column of the ids, for errors.
    Raises MalformedDataError if an episode continues after another one.

    >>> numbers = [(5, Location("a.jsonl", f"line {i}"), i) for i in range(2)]
    >>> [parts for location, parts in in_episodes(numbers, "episode")]
    [[0, 1]]
    """
    first, current, parts = None, None, list[Part]()
    known = set[int | str]()
    for episode, location, part in steps:
        if first is None or episode != current:
            if episode in known:
                why = "this episode ended before; its steps must be adjacent"
                location.fail(why, column, 0)
            if first is not None:
                yield first, parts
            first, current, parts = location, episode, []
            known.add(episode)
        parts.append(part)
    if first is not None:
        yield first, parts


def completed(columns: Mapping[Key, Column]) -> Mapping[Key, Column]:
    """The columns with what data sets often lack; with no steps where nothing is left.

    No reward: it is 0. No `terminated` or `truncated`: no step is, but the last is truncated if it
    is not terminated. T observations for T steps, and no next ones: where the last step is
    terminated its observation stands for the next one, from which nothing is bootstrapped;
    elsewhere the last step is left out, as its outcome is not known.

    >>> obs, action = Column("obs", torch.arange(3)), Column("action", torch.tensor([1, 0, 1]))
    >>> found = completed({("obs",): obs, ("action",): action})
    >>> found["obs",].values, found["action",].values, found["truncated",].values
    (tensor([0, 1, 2]), tensor([1, 0]), tensor([False,  True]))
    """
    found = dict(columns)
    action = next((column for key, column in columns.items() if key[0] == "action"), None)
    if action is None or unclear_ends(columns):
        return columns
    steps = len(action.values)
    found.setdefault(REWARD, Column("reward", torch.zeros(steps, device="cpu")))
    for flag in FLAGS:
        found.setdefault(flag, Column(flag[0], torch.zeros(steps, dtype=torch.bool, device="cpu")))
    (_, terminated), (_, truncated) = (found[flag] for flag in FLAGS)
    alone = [
        key
        for key, (_, values) in found.items()
        if key[0] == "obs" and len(values) == steps and ("next", *key) not in found
    ]
    if alone and terminated.dtype is torch.bool and len(terminated) == steps and steps:
        if bool(terminated[-1]):
            for key in alone:
                name, values = found[key]
                found[key] = Column(name, torch.cat([values, values[-1:]]))
        else:
            for key, (name, values) in list(found.items()):
                if key not in alone:
                    found[key] = Column(name, values[: len(values) - 1])
    (_, terminated), (name, truncated) = (found[flag] for flag in FLAGS)
    if len(truncated) and truncated.dtype is torch.bool and not bool(terminated[-1]):
        truncated = truncated.clone()
        truncated[-1] = True
        found[FLAGS[1]] = Column(name, truncated)
    return found


def with_truncated(columns: Mapping[Key, Column]) -> Mapping[Key, Column]:
    """The columns, with none truncated where the caller renamed `done` to terminated.

    >>> done = Column("done", torch.tensor([False, True]))
    >>> with_truncated({("terminated",): done})["truncated",].values
    tensor([False, False])
    """
    terminated, truncated = FLAGS
    ended = columns.get(terminated)
    if ended is None or truncated in columns or ended.name not in DONE:
        return columns
    return {**columns, truncated: Column(ended.name, torch.zeros_like(ended.values))}


def unclear_ends(columns: Iterable[Key]) -> list[str]:
    """The columns of ends whose kind nothing tells."""
    starts = {key[0] for key in columns}
    return [] if starts & {"terminated", "truncated"} else [name for name in DONE if name in starts]


def check_required(columns: Mapping[Key, Column], location: Location) -> None:
    starts = {key[0] for key in columns}
    if done := unclear_ends(columns):
        location.fail(
            f"there is {done[0]!r}, but neither 'terminated' nor 'truncated', so it is unknown "
            "whether an episode ended or was cut off; only after a real end is the future worth "
            f"0. If all episodes ended: columns={{{done[0]!r}: 'terminated'}}; if all were cut "
            f"off: complete=True, columns={{{done[0]!r}: None}}"
        )
    for name in ("obs", "action"):
        if name not in starts:
            location.fail(missing(name, columns))
    for name in ("reward", "terminated", "truncated"):
        if (name,) not in columns:
            location.fail(missing(name, columns))


def missing(name: str, columns: Iterable[Key]) -> str:
    """The error text for an episode that lacks a column."""
    return (
        f"there is no {name!r}, {_listed(columns)}; if it has another name: "
        f"columns={{<its name>: {name!r}}}"
    )


def num_steps(columns: Mapping[Key, Column], location: Location) -> int:
    """Number of steps T, after a check that every column has as many rows as it should."""
    name, reward = columns[REWARD]
    if reward.ndim != 1 or reward.dtype is torch.bool or reward.is_complex():
        location.fail(
            f"it has {_rows(reward)}; a reward must be one real number for each step", name
        )
    steps = len(reward)
    if not steps:
        location.fail("it is empty; an episode must have at least one step", name)
    for flag in FLAGS:
        name, values = columns[flag]
        if values.ndim != 1 or values.dtype is not torch.bool:
            location.fail(
                f"it has {_rows(values)}; {flag[0]} must be one true or false for each step", name
            )
    for key, (name, values) in columns.items():
        allowed = [steps] if key[0] in OF_STEPS else [steps, steps + 1]
        if len(values) not in allowed:
            wanted = " or ".join([str(n) for n in allowed])
            location.fail(
                f"it has {len(values)} rows, but should have {wanted}: there are {steps} rewards",
                name,
            )
    return steps


def _rows(values: Tensor) -> str:
    return f"rows of dtype {values.dtype} and shape {list(values.shape[1:])}"


def check_pairs(columns: Mapping[Key, Column], steps: int, location: Location) -> None:
    """Check that each step has an observation before it and one after it."""
    for key, (name, values) in columns.items():
        after = columns.get(("next", *key))
        if len(values) > steps and after is not None:
            location.fail(
                f"it has {steps + 1} rows for {steps} steps, so it repeats what {after.name!r} "
                "holds; leave one of them out",
                name,
            )
        if key[0] == "obs" and len(values) == steps:
            if after is None:
                location.fail(
                    f"it has {steps} rows for {steps} steps, and there is no "
                    f"{shown(('next', *key))}: the observation after the last step is missing",
                    name,
                )
            if _rows(after.values) != _rows(values):
                location.fail(
                    f"it has {_rows(after.values)}, {name!r} has {_rows(values)}", after.name
                )
        if key[:2] == ("next", "obs") and key[1:] not in columns:
            location.fail(f"there is no entry {shown(key[1:])} to go with it", name)


def check_nesting(names: Collection[Key], location: Location) -> None:
    """Check that nothing is to be an entry of a column, which is a tensor."""
    for name in names:
        for n in range(1, len(name)):
            if name[:n] in names:
                location.fail(f"{shown(name[:n])} is a column, so it cannot contain {shown(name)}")


def check_equal_layout(
    columns: Mapping[Key, Column], layout: Layout, first: Layout, location: Location
) -> None:
    """Check that an episode has the columns of the first one, of the same dtypes and shapes."""
    for key in first:
        if key not in layout:
            location.fail(f"there is no {shown(key)}, which the first episode has")
    for key, row in layout.items():
        column = columns[key if key in columns else key[1:]]
        if key not in first:
            location.fail(f"the first episode has no {shown(key)}", column.name)
        if row != first[key]:
            dtype, shape = first[key]
            location.fail(
                f"it has {_rows(column.values)}, in the first episode of dtype {dtype} and shape "
                f"{list(shape)}",
                column.name,
            )


def check_finite(column: Column, location: Location) -> None:
    name, values = column
    if (values.is_floating_point() or values.is_complex()) and not values.isfinite().all():
        at = int((~values.isfinite()).nonzero()[0, 0])
        bad = values[at][~values[at].isfinite()].flatten()[0].item()
        location.fail(f"it contains {bad}; to accept NaN and infinity: allow_nan=True", name, at)


def check_end(ended: Tensor, location: Location, truncate_unfinished: bool) -> None:
    """Check that an episode ends at its last step, and nowhere else."""
    if ended[:-1].any():
        at = int(ended.nonzero()[0, 0])
        location.fail(
            f"the episode ends here, but {len(ended) - 1 - at} more of its steps follow", step=at
        )
    if not ended[-1] and not truncate_unfinished:
        location.fail(
            "the last step of the episode is neither terminated nor truncated; if the recording "
            "stopped there: truncate_unfinished=True",
            step=len(ended) - 1,
        )


def existing_file(path: Path) -> str:
    """The path of an existing file; raises FileNotFoundError or IsADirectoryError otherwise."""
    path = os.fspath(path)
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path} is a folder; pass the file that holds the episodes")
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no file {path}")
    return path


def json_object(path: str) -> dict[str, Any]:
    """The object in a file of JSON."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no file {path}")
    location = Location(path, "the file")
    with open(path, "rb") as text, location.foreign():
        found = json.loads(text.read().decode())
    if type(found) is not dict:
        location.fail("it is not a JSON object")
    return found
