"""Episodes from files of tables, Parquet and others: a row is one episode, or one step.

Legend: T steps of one episode.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch

from raffia.data.readers.arrow import (
    check_numeric,
    field_types,
    is_id,
    is_list,
    opened_table,
    pyarrow,
    read_batches,
    row_of_lists,
    to_array,
)
from raffia.data.readers.episode import (
    EPISODE,
    REWARD,
    Column,
    Columns,
    EpisodeIds,
    EpisodeMaker,
    Episodes,
    Key,
    Location,
    Names,
    NumberedLocation,
    Path,
    Rules,
    existing_file,
    leave_out,
    missing,
)
from raffia.tensordict.keys import dotted

NAMES: Columns = {"next_obs": ("next", "obs")}


def read_parquet(
    path: Path,
    *,
    columns: Columns | None = None,
    allow_nan: bool = False,
    truncate_unfinished: bool = False,
    complete: bool = False,
) -> TableEpisodes | TableSteps:
    """The episodes of a Parquet file or a folder of them; needs `pip install 'raffia[parquet]'`.

    The type of the column `reward` decides what a row is. If it is a list, each row is an episode
    of T steps, and the other columns are lists as well: T + 1 `obs`, or T and as many `next_obs`;
    T `action`, `reward`, `terminated` and `truncated`. The result then has a length. If it is a
    number, each row is a step, with the same columns, and one `episode`, an integer or a string,
    that holds the episode that the step belongs to; it is no part of what is read. The steps of an
    episode stand together.

    Vectors and larger arrays are lists (of lists), all of one length; structs are nested entries.
    Other columns keep their names; one of T + 1 rows goes with the observations: its last T are
    read into `next`. Numbers keep the file's dtypes. No value may be null.

    path: the file; or a folder, whose files *.parquet are read one after the other, by their names
        and the numbers in them. All have the same columns; the steps of an episode may go on in the
        next file, with rows counted on from the file that it begins in.
    columns: name in the file -> name here: {"state": "obs"}; None leaves a column out:
        {"comment": None}.
    allow_nan: take NaN and infinite numbers.
    truncate_unfinished: the last step of an episode counts as truncated if it is neither terminated
        nor truncated, which is an error otherwise.
    complete: what is missing gets its usual value: rewards are 0, no step is terminated, and the
        last one is truncated. Of T observations without next ones the last stands for the one after
        it where the episode was terminated there; elsewhere the last step is left out.

    Going through the result reads the file, as often as one likes, an episode at a time. A
    MalformedDataError names the file and the row, counted from 0.

        for episode in read_parquet("data.parquet"):
            buffer.extend(episode)

    >>> import tempfile, pyarrow, pyarrow.parquet
    >>> table = pyarrow.table({"episode": [7, 7, 8], "obs": [[0.0], [0.5], [0.0]],
    ...                        "next_obs": [[0.5], [1.0], [0.5]], "action": [1, 0, 1],
    ...                        "reward": [0.0, 1.0, 0.0], "terminated": [False, True, False],
    ...                        "truncated": [False, False, True]})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pyarrow.parquet.write_table(table, f"{folder}/data.parquet")
    ...     for episode in read_parquet(f"{folder}/data.parquet"):
    ...         print(episode["obs"].tolist(), episode["next", "obs"].tolist(), episode["action"])
    [[0.0], [0.5]] [[0.5], [1.0]] tensor([1, 0])
    [[0.0]] [[0.5]] tensor([1])
    """
    pyarrow()
    rules = Rules(allow_nan, truncate_unfinished, complete)
    return episodes_of_tables(os.fspath(path), shards(path), Names(columns, NAMES), rules)


ROWS_AT_ONCE = 4096  # of steps; some hundred kilobytes where observations are vectors


def episodes_of_tables(
    path: str, files: Sequence[str], names: Names, rules: Rules
) -> TableEpisodes | TableSteps:
    """The episodes of files of tables, one after the other; all have the same columns."""
    found, first = [], None
    for file in files:
        num_rows, types, paths = described(file, names, rules)
        found.append((file, num_rows))
        first = first or (types, paths)
        if (types, paths) != first:
            Location(file, "the file").fail(
                f"its columns are {listed(types)}, but those of {files[0]} are "
                f"{listed(first[0])}: the files of a folder must have the same columns"
            )
    assert first is not None
    types, paths = first
    if REWARD in paths and is_list(types[paths[REWARD]]):
        return TableEpisodes(path, found, paths, rules)
    return TableSteps(path, found, paths, rules)


def by_number(name: str) -> list[tuple[int, str]]:
    """A key to sort names by, in which numbers count as such.

    >>> sorted(["part-10", "part-9"], key=by_number)
    ['part-9', 'part-10']
    """
    return [(int(digits or 0), text) for text, digits in re.findall(r"([^0-9]*)([0-9]*)", name)]


def listed(types: Mapping[Key, Any]) -> str:
    """Columns and their types, as text."""
    return ", ".join(f"{dotted(path)} {kind}" for path, kind in types.items())


def described(path: str, names: Names, rules: Rules) -> tuple[int, dict[Key, Any], dict[Key, Key]]:
    """A file's number of rows, the types of its columns, and the column of each entry."""
    location = Location(path, "the file")
    with location.foreign(), opened_table(path) as file:
        num_rows = file.num_rows
        types = field_types(file.schema, location)
    if num_rows < 1:
        location.fail("it has no rows")
    paths = {name: path for path, name in names.of_all(types, location).items()}
    if REWARD not in paths and not rules.complete:
        location.fail(missing("reward", types))
    if REWARD not in paths or not is_list(types[paths[REWARD]]):
        if EPISODE not in paths:
            location.fail(
                "each row is a step, because its reward is not a list, so each row must name its "
                "episode; " + missing("episode", types)
            )
        for name, column in paths.items():
            if name != EPISODE:
                check_numeric(types[column], column, location)
            elif not is_id(types[column]):
                location.fail(f"{types[column]}, not integers or strings", dotted(column))
        return num_rows, types, paths
    if EPISODE in paths and is_id(types[paths[EPISODE]]):
        del paths[EPISODE]
    for column in paths.values():
        if not is_list(types[column]):
            location.fail(
                f"{types[column]}, but each row is an episode, as the list of rewards shows: it "
                f"must be a list with one value for each step; {leave_out(column)}",
                dotted(column),
            )
        check_numeric(types[column], column, location)
    return num_rows, types, paths


class Tables(Episodes):
    """The episodes of files of tables.

    files: each with its number of rows.
    paths: the column of each entry.
    """

    def __init__(
        self, path: str, files: list[tuple[str, int]], paths: dict[Key, Key], rules: Rules
    ) -> None:
        super().__init__(path, rules)
        self._files, self._paths = files, paths
        self._num_rows = sum(num_rows for _, num_rows in files)


class TableEpisodes(Tables):
    """The episodes of tables that have one in each row."""

    def __len__(self) -> int:
        return self._num_rows

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r}, {len(self)} episodes)"

    def _read(self, maker: EpisodeMaker) -> Iterator[tuple[dict[Key, Column], Location]]:
        for file, num_rows in self._files:
            for row, arrays in read_batches(file, num_rows, self._paths.values(), 1):
                location = Location(file, f"row {row}")
                columns = {}
                for name, path in self._paths.items():
                    column = dotted(path)
                    values = to_array(row_of_lists(arrays[path], column, location), path, location)
                    columns[name] = Column(column, torch.from_numpy(values))
                yield columns, location


class TableSteps(Tables):
    """The episodes of tables that have a step in each row."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r}, {self._num_rows} steps)"

    def _read(self, maker: EpisodeMaker) -> Iterator[tuple[dict[Key, Column], Location]]:
        for location, pieces in self._parts():
            columns = {
                name: Column(dotted(path), torch.from_numpy(np.concatenate(pieces[path])))
                for name, path in self._paths.items()
                if name != EPISODE
            }
            yield columns, location

    def _parts(self) -> Iterator[tuple[Location, dict[Key, list[np.ndarray[Any, Any]]]]]:
        """The location of each episode, and for each of its columns the arrays to be joined."""
        ids = EpisodeIds(dotted(self._paths[EPISODE]))
        part: tuple[Location, dict[Key, list[np.ndarray[Any, Any]]]] | None = None
        for file, begin, episodes, arrays in self._batches():
            stop = 0
            for episode, steps in groupby(episodes):
                start, stop = stop, stop + len(list(steps))
                location = NumberedLocation(file, "row", begin + start)
                if ids.begins(episode, location, 0) or part is None:
                    if part is not None:
                        yield part
                    part = location, {path: [] for path in arrays}
                for path, pieces in part[1].items():
                    piece = arrays[path][start:stop]
                    if pieces and piece.shape[1:] != pieces[0].shape[1:]:
                        why = (
                            f"rows of {list(piece.shape[1:])}, but the ones before are "
                            f"{list(pieces[0].shape[1:])}"
                        )
                        location.fail(why, dotted(path), 0)
                    pieces.append(piece)
        if part is not None:
            yield part

    def _batches(self) -> Iterator[tuple[str, int, list[int | str], dict[Key, Any]]]:
        """Batches of rows: file, first row, the episodes of the rows, and the columns."""
        naming = self._paths[EPISODE]
        for file, num_rows in self._files:
            for begin, arrays in read_batches(file, num_rows, self._paths.values(), ROWS_AT_ONCE):
                location = NumberedLocation(file, "row", begin)
                episodes = arrays.pop(naming).to_pylist()
                if None in episodes:
                    why = "null, which names no episode"
                    location.fail(why, dotted(naming), episodes.index(None))
                values = {path: to_array(arrays[path], path, location) for path in arrays}
                yield file, begin, episodes, values


def shards(path: Path) -> list[str]:
    """The file of a path, or those of a folder in their order."""
    path = os.fspath(path)
    if not os.path.isdir(path):
        return [existing_file(path)]
    found = [name for name in os.listdir(path) if name.endswith(".parquet") and name[0] not in "._"]
    if not found:
        raise IsADirectoryError(
            f"{path} is a folder; pass the file that holds the episodes, or a folder with files "
            "*.parquet in it"
        )
    return [os.path.join(path, name) for name in sorted(found, key=by_number)]
