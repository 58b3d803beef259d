"""Episodes from a Parquet file, or a folder of them: a row is one episode, or one step.

Legend: T steps of one episode.
"""

from __future__ import annotations

import os

from raffia.data.readers.arrow import pyarrow
from raffia.data.readers.episode import Columns, Names, Path, Rules, existing_file
from raffia.data.readers.tables import TableEpisodes, TableSteps, by_number, episodes_of_tables

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


def shards(path: Path) -> list[str]:
    """The file of a path, or those of a folder in their order."""
    path = os.fspath(path)
    if not os.path.isdir(path):
        return [existing_file(path)]
    found = [name for name in os.listdir(path) if name.endswith(".parquet") and name[0] not in "._"]
    if not found:
        raise IsADirectoryError(
            f"{path} is a folder; give the file that holds the episodes, or a folder with files "
            "*.parquet in it"
        )
    return [os.path.join(path, name) for name in sorted(found, key=by_number)]
