"""Episodes as JSON lines, read and written: a line is an object, which is one episode or one step.

Legend: T steps of one episode.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from raffia.data.readers.episode import (
    EPISODE,
    OF_STEPS,
    REWARD,
    Column,
    Columns,
    EpisodeMaker,
    Episodes,
    Key,
    Location,
    MalformedDataError,
    Names,
    NumberedLocation,
    Path,
    Rules,
    existing_file,
    in_episodes,
    leave_out,
    missing,
)
from raffia.data.readers.json_text import (
    Entries,
    JsonLine,
    JsonRows,
    Numbers,
    check_same_entries,
    kind,
    opened,
    read_objects,
    to_columns,
)
from raffia.files import write_atomically
from raffia.tensordict.keys import NestedKey, dotted, unravel_key_to_tuple
from raffia.tensordict.tensordict import TensorDict
from raffia.tensordict.views import is_leaf_nontensor

EpisodeParts = tuple[Location, dict[Key, JsonRows]]  # what an episode is made of


def read_json_lines(
    path: Path,
    *,
    columns: Columns | None = None,
    dtypes: Mapping[NestedKey, torch.dtype] | None = None,
    float_dtype: torch.dtype = torch.float32,
    allow_nan: bool = False,
    truncate_unfinished: bool = False,
    complete: bool = False,
    max_line_bytes: int = 2**28,
) -> JsonLineEpisodes:
    """The episodes of a file of JSON lines, which may be compressed with gzip.

    The first line decides what a line is. Where its `reward` is a list, each line is an episode of
    T steps, with T + 1 observations, or with T and as many under `"next": {"obs": ...}`:

        {"obs": [[0.1], [0.2], [0.3]], "action": [1, 0], "reward": [0.0, 1.0],
         "terminated": [false, true], "truncated": [false, false]}

    Where it is a number, each line is a step, which holds what it leads to and the episode it
    belongs to; the steps of an episode stand together:

        {"episode": 0, "obs": [0.1], "action": 1, "reward": 0.0, "terminated": false,
         "truncated": false, "next": {"obs": [0.2]}}

    `episode`, a whole number or a string, is no part of what is read. Nested objects become nested
    entries. Other entries keep their names; a list of T + 1 goes with the observations: its last T
    are read into `next`.

    columns: name in the file -> name here: {"state": "obs", "next_obs": ("next", "obs")}; None
        leaves a column out: {"comment": None}.
    dtypes: name here -> dtype. Without one, a column that holds only whole numbers in the first
        episode is int64; other numbers are `float_dtype`, and so is the reward; true and false are
        bool.
    allow_nan: take NaN, Infinity and -Infinity, which Python writes though JSON has none.
    truncate_unfinished: the last step of an episode counts as truncated if it is neither terminated
        nor truncated, which is an error otherwise.
    complete: what is missing, but for rewards, gets its usual value; see `read_parquet`.
    max_line_bytes: a longer line is an error. Reading a line may take twenty times its size.

    Going through the result reads the file, as often as one likes, an episode at a time. A
    MalformedDataError names the file and the line; `step` counts from 0 within the line.

        for episode in read_json_lines("data.jsonl"):
            buffer.extend(episode)

    >>> import pathlib, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = pathlib.Path(folder.name, "data.jsonl")
    >>> line = ('{"obs": [[0.5], [1], [2]], "action": [1, 0], "reward": [0, 1], '
    ...         '"terminated": [false, true], "truncated": [false, false]}')
    >>> _ = path.write_text(line)
    >>> for episode in read_json_lines(path):
    ...     print(episode["obs"].tolist(), episode["next", "obs"].tolist(), episode["action"])
    [[0.5], [1.0]] [[1.0], [2.0]] tensor([1, 0])
    >>> _ = path.write_text(line.replace("[2]", "null"))
    >>> try:
    ...     next(iter(read_json_lines(path)))
    ... except ValueError as error:
    ...     print(error.where, "-", error.why)
    line 1, 'obs', step 2 - null, but the values before are a list
    >>> folder.cleanup()
    """
    return JsonLineEpisodes(
        existing_file(path),
        Names(columns, {}),
        Numbers.checked(dtypes or {}, float_dtype),
        Rules(allow_nan, truncate_unfinished, complete),
        max_line_bytes,
    )


class JsonLineEpisodes(Episodes):
    """The episodes of a file of JSON lines; `read_json_lines` makes it."""

    def __init__(
        self, path: str, names: Names, numbers: Numbers, rules: Rules, max_line_bytes: int
    ) -> None:
        super().__init__(path, rules)
        self._names, self._numbers = names, numbers
        self._max_line_bytes = max_line_bytes

    def _read(self, maker: EpisodeMaker) -> Iterator[tuple[dict[Key, Column], Location]]:
        with opened(self.path) as file:
            lines = read_objects(file, self.path, self._names, self._max_line_bytes)
            for location, rows in self._parts(lines):
                yield to_columns(rows, location, self._numbers, maker.layout), location

    def _parts(self, lines: Iterator[JsonLine]) -> Iterator[EpisodeParts]:
        """Detect whether lines are episodes or steps."""
        first = next(lines, None)
        if first is None:
            raise MalformedDataError(self.path, "line 1", "the file is empty")
        reward = self._reward(first)
        if type(reward) is list:
            return self._by_episode(chain([first], lines))
        if type(reward) in (int, float):
            return self._by_step(first, lines)
        return first.location.fail(
            f"the reward is {kind(reward)}; it must be a list of numbers if each line is an "
            "episode, or a number if each line is a step"
        )

    def _reward(self, line: JsonLine) -> Any:
        for path, name in self._names.of_all(line.entries, line.location).items():
            if name == REWARD:
                return line.entries[path]
        return line.location.fail(missing("reward", line.entries))

    def _by_episode(self, lines: Iterable[JsonLine]) -> Iterator[EpisodeParts]:
        for _, location, entries in lines:
            rows = {}
            for path, name in self._names.of_all(entries, location).items():
                value = entries[path]
                if type(value) is list:
                    rows[name] = JsonRows(path, value)
                elif name != EPISODE or type(value) not in (int, str):
                    location.fail(
                        f"{kind(value)}, but each line is an episode, as the list of rewards "
                        f"shows: it must be a list with one value for each step; {leave_out(path)}",
                        dotted(path),
                    )
            yield location, rows

    def _by_step(self, first: JsonLine, rest: Iterable[JsonLine]) -> Iterator[EpisodeParts]:
        names = self._names.of_all(first.entries, first.location)
        paths = {name: path for path, name in names.items()}
        if EPISODE not in paths:
            first.location.fail(
                "each line is a step, because its reward is a number, so each line must name its "
                f"episode; {missing('episode', first.entries)}"
            )
        naming = paths.pop(EPISODE)

        def steps() -> Iterator[tuple[int | str, Location, Entries]]:
            for number, location, entries in chain([first], rest):
                check_same_entries(entries, first.entries, location)
                episode = entries[naming]
                if type(episode) not in (int, str):
                    why = f"{kind(episode)}, not a whole number or a string"
                    location.fail(why, dotted(naming))
                yield episode, NumberedLocation(self.path, "line", number), entries

        for location, found in in_episodes(steps(), dotted(naming)):
            yield (
                location,
                {
                    name: JsonRows(path, [entries[path] for entries in found])
                    for name, path in paths.items()
                },
            )


def write_json_lines(
    path: Path, episodes: Iterable[TensorDict], *, allow_nan: bool = False
) -> None:
    """Write episodes as JSON lines, one on each line, for `read_json_lines`.

    path: compressed with gzip if it ends in ".gz".
    episodes: containers of batch size [T] with the entries that a reader gives.
    allow_nan: write NaN, Infinity and -Infinity, which are not JSON.

    Where `next` holds what follows one step later anyway, it is written once. What is read back has
    JSON's dtypes, float32, int64 and bool, unless `float_dtype` and `dtypes` say otherwise. If
    anything fails, a file that was there is as it was.

    >>> import pathlib, tempfile
    >>> from raffia.data.readers.json_lines import read_json_lines
    >>> from raffia.tensordict.tensordict import TensorDict
    >>> episode = TensorDict({"obs": torch.tensor([0, 1]), "next": {"obs": torch.tensor([1, 2])},
    ...                       "action": torch.tensor([1, 0]), "reward": torch.tensor([0., 1.]),
    ...                       "terminated": torch.tensor([False, True]),
    ...                       "truncated": torch.tensor([False, False])}, batch_size=[2])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_json_lines(f"{folder}/data.jsonl", [episode])
    ...     text = pathlib.Path(folder, "data.jsonl").read_text()
    ...     (again,) = read_json_lines(f"{folder}/data.jsonl")
    >>> text[:33], bool((again == episode).all())
    ('{"obs":[0,1,2],"action":[1,0],"re', True)
    """
    path = os.fspath(path)
    if not path.endswith(".gz"):
        write_atomically(path, lambda file: _write_all(file, path, episodes, allow_nan))
        return

    def write_compressed(file: BinaryIO) -> None:
        # No name and no time in it: equal episodes make equal files.
        with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as compressed:
            _write_all(cast(BinaryIO, compressed), path, episodes, allow_nan)

    write_atomically(path, write_compressed)


def _write_all(file: BinaryIO, path: str, episodes: Iterable[TensorDict], allow_nan: bool) -> None:
    # What an end means is the reader's to say.
    maker = EpisodeMaker(Rules(allow_nan, truncate_unfinished=True))
    for number, episode in enumerate(episodes):
        location = Location(path, f"episode {number}")
        columns = _joined(episode, location)
        maker.check(columns, location)
        file.write(_as_line(columns))
    if maker.layout is None:
        raise ValueError(f"there are no episodes to write to {path}")


def _joined(episode: TensorDict, location: Location) -> dict[Key, Column]:
    """The columns of an episode, where possible with T + 1 rows instead of an entry in `next`."""
    if not isinstance(episode, TensorDict) or episode.batch_dims != 1:
        given = getattr(episode, "batch_size", type(episode).__name__)
        location.fail(f"an episode must be a TensorDict of batch size [T]; this is {given}")
    columns: dict[Key, Column] = {}
    for nested, values in episode.items(True, True, is_leaf=is_leaf_nontensor):
        key = unravel_key_to_tuple(nested)
        if not isinstance(values, Tensor) or values.is_complex():
            given = values.dtype if isinstance(values, Tensor) else type(values).__name__
            location.fail(f"JSON cannot hold {given}", dotted(key))
        columns[key] = Column(dotted(key), values.detach().cpu())
    for key in list(columns):
        after = columns.get(("next", *key))
        if after is not None and key[0] not in OF_STEPS and _follows(columns[key], after):
            values = torch.cat([columns[key].values, after.values[-1:]])
            columns[key] = Column(dotted(key), values)
            del columns["next", *key]
    return columns


def _follows(column: Column, after: Column) -> bool:
    """Whether a column of `next` holds the rows of another, one step later."""
    before, later = column.values, after.values
    equal = before.dtype == later.dtype and before.shape == later.shape
    return equal and torch.equal(before[1:], later[:-1])


def _as_line(columns: Mapping[Key, Column]) -> bytes:
    tree: dict[str, Any] = {}
    for key, (_, values) in columns.items():
        node = tree
        for name in key[:-1]:
            node = node.setdefault(name, {})
        node[key[-1]] = (values.double() if values.is_floating_point() else values).tolist()
    return json.dumps(tree, separators=(",", ":")).encode() + b"\n"
