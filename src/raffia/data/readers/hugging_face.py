"""Episodes from data sets of Hugging Face's libraries: `datasets`' folders, and LeRobot's.

Legend: T steps of one episode.
"""

from __future__ import annotations

import glob
import os
from typing import Any

from raffia.data.readers.arrow import field_types, opened_table, pyarrow
from raffia.data.readers.episode import (
    Columns,
    Location,
    Names,
    Path,
    Rules,
    json_object,
)
from raffia.data.readers.tables import (
    NAMES,
    TableEpisodes,
    TableSteps,
    by_number,
    episodes_of_tables,
)

STATE, SPLITS = "state.json", "dataset_dict.json"  # of `save_to_disk`
INFO = os.path.join("meta", "info.json")  # of LeRobot
LEROBOT_VERSIONS = ("v2", "v3")
# What numbers steps, and tells nothing about them.
LEROBOT_NAMES: Columns = {
    "episode_index": "episode",
    "next.reward": "reward",
    **dict.fromkeys(("next.done", "frame_index", "index", "task_index")),
}


def read_hugging_face(
    folder: Path,
    *,
    columns: Columns | None = None,
    allow_nan: bool = False,
    truncate_unfinished: bool = False,
    complete: bool = False,
) -> TableEpisodes | TableSteps:
    """The episodes in a folder of `datasets.Dataset.save_to_disk`; needs
    `pip install 'raffia[parquet]'`.

    Rows are steps or episodes, with columns as in `read_parquet`, and the same arguments.

    folder: of a `Dataset`; of a `DatasetDict` each split is one.

        for episode in read_hugging_face("dataset/train", columns={"state": "obs"}):
            buffer.extend(episode)

    >>> import json, pathlib, tempfile, pyarrow
    >>> folder = tempfile.TemporaryDirectory()
    >>> table = pyarrow.table({"episode": [0, 0], "obs": [0.0, 0.5], "action": [1, 0],
    ...                        "reward": [0.0, 1.0], "terminated": [False, True]})
    >>> with pyarrow.ipc.new_stream(f"{folder.name}/data.arrow", table.schema) as stream:
    ...     stream.write_table(table)
    >>> state = json.dumps({"_data_files": [{"filename": "data.arrow"}]})
    >>> _ = pathlib.Path(folder.name, "state.json").write_text(state)
    >>> [episode["action"].tolist() for episode in read_hugging_face(folder.name, complete=True)]
    [[1, 0]]
    >>> folder.cleanup()
    """
    pyarrow()
    folder = os.fspath(folder)
    if os.path.exists(os.path.join(folder, SPLITS)):
        found = json_object(os.path.join(folder, SPLITS)).get("splits")
        raise IsADirectoryError(
            f"{folder} holds several splits; pass the folder of one of {found}: "
            f"read_hugging_face({os.path.join(folder, 'train')!r})"
        )
    state = json_object(os.path.join(folder, STATE))
    location = Location(os.path.join(folder, STATE), "the file")
    with location.foreign():
        names = [file["filename"] for file in state["_data_files"]]
    for name in names:
        if not isinstance(name, str) or not name or os.path.basename(name) != name:
            location.fail(f"{name!r} is not the name of a file in this folder")
    if not names:
        location.fail("it names no files")
    files = [os.path.join(folder, name) for name in names]
    rules = Rules(allow_nan, truncate_unfinished, complete)
    return episodes_of_tables(folder, files, Names(columns, NAMES), rules)


def read_lerobot(
    folder: Path, *, columns: Columns | None = None, allow_nan: bool = False
) -> TableSteps:
    """The episodes of a LeRobot data set of version 2 or 3; needs `pip install 'raffia[parquet]'`.

    folder: it holds `meta/info.json`, and `data/chunk-000/*.parquet` with a step in each row.
    columns: name in the file -> name here. "observation.state" is ("obs", "state") anyway,
        "episode_index" the episode, "next.reward" the reward; numbers of frames and tasks, and
        "next.done", which does not tell how an episode ended, are left out.

    Videos lie in separate files, which are not read; images in a column are not numbers: leave
    them out, as columns={"observation.images.top": None}.

    Data sets of demonstrations have no rewards and no ends: rewards are 0, no step is terminated
    and the last one is truncated. As the observation after the last step is not there, that step is
    left out.

        for episode in read_lerobot("lerobot/pusht"):
            buffer.extend(episode)

    >>> import json, pathlib, tempfile, pyarrow, pyarrow.parquet
    >>> folder = tempfile.TemporaryDirectory()
    >>> root = pathlib.Path(folder.name)
    >>> for name in ("meta", "data/chunk-000"): (root / name).mkdir(parents=True)
    >>> _ = (root / "meta/info.json").write_text(json.dumps({"codebase_version": "v3.0"}))
    >>> table = pyarrow.table({"episode_index": [0, 0, 0], "observation.state": [0.0, 0.5, 1.0],
    ...                        "action": [1, 0, 1]})
    >>> pyarrow.parquet.write_table(table, root / "data/chunk-000/file-000.parquet")
    >>> for episode in read_lerobot(folder.name):
    ...     print(episode["obs", "state"].tolist(), episode["next", "obs", "state"].tolist())
    [0.0, 0.5] [0.5, 1.0]
    >>> folder.cleanup()
    """
    pyarrow()
    folder = os.fspath(folder)
    info, location = json_object(os.path.join(folder, INFO)), Location(folder, INFO)
    version = info.get("codebase_version")
    if not str(version).startswith(LEROBOT_VERSIONS):
        location.fail(f"its codebase_version is {version!r}; supported are {LEROBOT_VERSIONS}")
    data = os.path.join(folder, "data")
    found = glob.glob("**/*.parquet", root_dir=data, recursive=True)
    if not found:
        raise FileNotFoundError(f"there is no file data/chunk-*/*.parquet in {folder}")
    files = [os.path.join(data, name) for name in sorted(found, key=by_number)]
    first = Location(files[0], "the file")
    with first.foreign(), opened_table(files[0]) as file:
        types = field_types(file.schema, first)
    usual: dict[Any, Any] = dict(LEROBOT_NAMES)
    for name, *_ in types:
        head, *rest = name.split(".")
        if head == "observation":
            usual[name] = ("obs", *rest) if rest else "obs"
    rules = Rules(allow_nan, truncate_unfinished=True, complete=True)
    episodes = episodes_of_tables(folder, files, Names(columns, usual), rules)
    assert isinstance(episodes, TableSteps)
    return episodes
