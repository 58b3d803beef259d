"""Episodes written as JSON lines.

Legend: T steps of one episode.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from raffia.data.readers.episode import (
    OF_STEPS,
    Column,
    Key,
    Layout,
    Location,
    Path,
    Rules,
    check_episode,
    layout_of,
)
from raffia.files import write_atomically
from raffia.tensordict.keys import dotted, unravel_key_to_tuple
from raffia.tensordict.tensordict import TensorDict
from raffia.tensordict.views import is_leaf_nontensor


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
        write_atomically(path, lambda file: write_lines(file, path, episodes, allow_nan))
        return

    def write_compressed(file: BinaryIO) -> None:
        # No name and no time in it: equal episodes make equal files.
        with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as compressed:
            write_lines(cast(BinaryIO, compressed), path, episodes, allow_nan)

    write_atomically(path, write_compressed)


def write_lines(file: BinaryIO, path: str, episodes: Iterable[TensorDict], allow_nan: bool) -> None:
    rules = Rules(allow_nan, truncate_unfinished=True)  # what an end means is the reader's to say
    layout: Layout | None = None
    for number, episode in enumerate(episodes):
        location = Location(path, f"episode {number}")
        columns = joined(episode, location)
        check_episode(columns, location, rules, layout)
        layout = layout or layout_of(columns)
        file.write(as_line(columns))
    if layout is None:
        raise ValueError(f"there is no episode to write to {path}")


def joined(episode: TensorDict, location: Location) -> dict[Key, Column]:
    """The columns of an episode, where possible with T + 1 rows instead of an entry in `next`."""
    if not isinstance(episode, TensorDict) or episode.batch_dims != 1:
        given = getattr(episode, "batch_size", type(episode).__name__)
        location.fail(f"an episode is a TensorDict of batch size [T], this is {given}")
    columns: dict[Key, Column] = {}
    for nested, values in episode.items(True, True, is_leaf=is_leaf_nontensor):
        key = unravel_key_to_tuple(nested)
        if not isinstance(values, Tensor) or values.is_complex():
            given = values.dtype if isinstance(values, Tensor) else type(values).__name__
            location.fail(f"JSON cannot hold {given}", dotted(key))
        columns[key] = Column(dotted(key), values.detach().cpu())
    for key in list(columns):
        after = columns.get(("next", *key))
        if after is not None and key[0] not in OF_STEPS and follows(columns[key], after):
            values = torch.cat([columns[key].values, after.values[-1:]])
            columns[key] = Column(dotted(key), values)
            del columns["next", *key]
    return columns


def follows(column: Column, after: Column) -> bool:
    """Whether a column of `next` holds the rows of another, one step later."""
    before, later = column.values, after.values
    equal = before.dtype == later.dtype and before.shape == later.shape
    return equal and torch.equal(before[1:], later[:-1])


def as_line(columns: Mapping[Key, Column]) -> bytes:
    tree: dict[str, Any] = {}
    for key, (_, values) in columns.items():
        node = tree
        for name in key[:-1]:
            node = node.setdefault(name, {})
        node[key[-1]] = (values.double() if values.is_floating_point() else values).tolist()
    return json.dumps(tree, separators=(",", ":")).encode() + b"\n"
