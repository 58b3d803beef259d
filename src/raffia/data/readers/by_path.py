"""Episodes from a path of any format that is read here: the path tells which."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from raffia.data.readers.episode import Columns, Path
from raffia.data.readers.hdf5 import read_d4rl
from raffia.data.readers.json_lines import read_json_lines
from raffia.data.readers.minari import FILE, METADATA, local_folder, read_minari
from raffia.data.readers.tables import (
    INFO,
    SPLITS,
    STATE,
    read_hugging_face,
    read_lerobot,
    read_parquet,
)
from raffia.tensordict.tensordict import TensorDict

JSON = (".jsonl", ".json", ".ndjson")
TABLES = (".parquet", ".arrow", ".feather")
HDF5 = (".hdf5", ".h5")


def read_episodes(
    path: Path, *, columns: Columns | None = None, complete: bool = False
) -> Iterable[TensorDict]:
    """The episodes of a file or folder, by the reader of its format.

    path: a file .jsonl, .json (also .gz), .parquet, .arrow or D4RL's .hdf5; a folder of Minari's,
        of LeRobot's, of `save_to_disk` or of Parquet files; or the id of a data set that Minari
        has downloaded.
    columns: name in the file -> name here, see the readers.
    complete: what is missing gets its usual value; an episode that nothing ended is truncated.
    Raises FileNotFoundError where nothing is there, ValueError for another format.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
    ...     _ = file.write('{"obs": [0, 1], "action": [1], "reward": [1.0], "terminated": [true], '
    ...                    '"truncated": [false]}')
    ...     file.flush()
    ...     [episode["action"] for episode in read_episodes(file.name)]
    [tensor([1])]
    """
    path = os.fspath(path)
    found = local_folder(path)
    name = found.lower().removesuffix(".gz")
    if found.endswith(os.sep + FILE):  # of Minari's, whose metadata lie next to it
        found = found.removesuffix(os.sep + FILE)
    options: Any = {"columns": columns, "truncate_unfinished": complete, "complete": complete}
    if os.path.isdir(found):
        return _of_folder(found, options)
    if not os.path.exists(found):
        raise FileNotFoundError(
            f"there is no file or folder {path}, and no Minari dataset with this id"
        )
    if name.endswith(JSON):
        return read_json_lines(found, **options)
    if name.endswith(TABLES):
        return read_parquet(found, **options)
    if name.endswith(HDF5):
        return read_d4rl(found, columns=columns)
    raise ValueError(
        f"the format of {path} cannot be recognized from its name. Supported are files "
        f"{', '.join(JSON)} (or .gz), {', '.join(TABLES + HDF5)}, and folders of Minari, LeRobot, "
        "datasets and Parquet files"
    )


def _of_folder(folder: str, options: Any) -> Iterable[TensorDict]:
    def has(*names: str) -> bool:
        return any(os.path.exists(os.path.join(folder, name)) for name in names)

    columns, complete = options["columns"], options["complete"]
    if has(FILE, os.path.join("data", METADATA)):
        return read_minari(folder, columns=columns, truncate_unfinished=complete)
    if has(INFO):
        return read_lerobot(folder, columns=columns)
    if has(STATE, SPLITS):
        return read_hugging_face(folder, **options)
    return read_parquet(folder, **options)
