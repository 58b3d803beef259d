"""Rows as JSON records, in a file that other programs read."""

from __future__ import annotations

import json
import os
from typing import Any, Unpack

import torch
from torch import Tensor

from raffia.files import write_atomically
from raffia.tensordict import build, kinds
from raffia.tensordict.keys import unravel_key_to_tuple
from raffia.tensordict.node import Container
from raffia.tensordict.signatures import shows_options_of
from raffia.tensordict.views import entries_list, is_leaf_nontensor


def to_json(
    td: Any, path: str | os.PathLike[str], *, separator: str | None = None, lines: bool = False
) -> None:
    """Write a JSON file with a record for each row: a field for each entry, `from_json` reads it.

    path: the file, which is replaced once all is written.
    separator: joins the keys of nested entries to the names of fields.
    lines: one record on each line (JSON Lines), instead of a list of records.
    Raises ValueError for nested containers without separator, TypeError for values that JSON lacks.

    >>> import tempfile
    >>> from raffia import TensorDict
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     TensorDict(a=[1, 2], batch_size=[2]).to_json(f"{folder}/rows.json")
    ...     Path(folder, "rows.json").read_text(), TensorDict.from_json(f"{folder}/rows.json")["a"]
    ('[{"a": 1}, {"a": 2}]', tensor([1, 2]))
    """
    columns = {}
    for key, value in entries_list(td, True, True, is_leaf_nontensor, False):
        parts = unravel_key_to_tuple(key)
        if len(parts) > 1 and separator is None:
            raise ValueError(
                f"to_json: the entry {key!r} is nested: separator='.' joins its keys to one name"
            )
        columns[(separator or "").join(parts)] = value.tolist()
    size = td.batch_size
    count = size[0] if size else 1
    columns = {name: rows if size else [rows] for name, rows in columns.items()}
    records = [{name: rows[i] for name, rows in columns.items()} for i in range(count)]
    if lines:
        text = "".join([json.dumps(record) + "\n" for record in records])
    else:
        text = json.dumps(records)
    write_atomically(path, text.encode())


@shows_options_of(build.finished, without="names")
def from_json(
    cls: type[Container],
    path: str | os.PathLike[str],
    *,
    separator: str | None = None,
    dtype: torch.dtype | None = None,
    lines: bool = False,
    **options: Unpack[build.SizeOptions],
) -> Container:
    """A container from a JSON file of records: an entry for each field, a row for each record.

    batch_size: the number of rows if not given.
    separator: splits the names of fields into nested keys.
    dtype: that of all entries of numbers and truth values.
    lines: one record on each line (JSON Lines).
    Raises ValueError if the file does not hold records, or the records have different fields.

    >>> import tempfile
    >>> from raffia import TensorDict
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.json").write_text('[{"x.y": 1}, {"x.y": 2}]')
    ...     TensorDict.from_json(f"{folder}/a.json", separator=".")["x", "y"]
    tensor([1, 2])
    """
    with open(path, encoding="utf-8") as file:
        records = [json.loads(line) for line in file if line.strip()] if lines else json.load(file)
    if not isinstance(records, list) or not all([isinstance(one, dict) for one in records]):
        raise ValueError(f"from_json: {os.fspath(path)} does not hold a list of records")
    for i, one in enumerate(records):
        if one.keys() != records[0].keys():
            raise ValueError(
                f"from_json: record {i} has the fields {sorted(one)}, but record 0 has "
                f"{sorted(records[0])}"
            )
    size = torch.Size((len(records),))
    td = kinds.TensorDict(batch_size=size, device=options.get("device"))
    for name in records[0] if records else ():
        key = tuple(name.split(separator)) if separator else name
        value = build.as_entry([one[name] for one in records], td, name)
        if dtype is not None and isinstance(value, Tensor):
            value = value.to(dtype)
        td.set(key, value)
    return build.finished(cls, td, **build.sized(options, size))
