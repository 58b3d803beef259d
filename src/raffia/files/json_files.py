"""JSON in files: written for programs or for people, read so that nothing in it is ambiguous."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from raffia.files.atomic import write_atomically
from raffia.files.damage import DamagedFileError, Path, brief, shown

DEEPEST = 100  # brackets within brackets


def dump_json(content: Any) -> bytes:
    """Convert a value to JSON for programs, without spaces.

    >>> dump_json({"a": [1, 2]})
    b'{"a":[1,2]}'
    """
    return json.dumps(content, separators=(",", ":")).encode()


def write_json(path: Path, content: Mapping[str, Any], *, indent: int = 2) -> None:
    """Write JSON for people to read, as `write_atomically` does.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_json(f"{folder}/x.json", {"a": 1}, indent=0)
    ...     pathlib.Path(folder, "x.json").read_text()
    '{\\n"a": 1\\n}\\n'
    """
    text = json.dumps(content, ensure_ascii=False, indent=indent) + "\n"
    # Half a surrogate pair is written as JSON spells it, "\ud800": UTF-8 has none.
    write_atomically(path, text.encode("utf-8", "backslashreplace"))


def parse_json(path: Path, text: bytes | str, *, deepest: int | None = DEEPEST) -> Any:
    """Parse JSON; DamagedFileError if it is invalid, has a name twice, or is nested too deeply.

    path: of the file that it is from, for the error.
    deepest: brackets within brackets; None for as many as Python's own parser takes.

    >>> parse_json("x.json", b'{"a": [1]}')
    {'a': [1]}
    """
    try:
        text = text if isinstance(text, str) else bytes(text).decode()
        found = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(path, f"it is not JSON: {brief(error)}") from None
    if deepest is not None and is_deeper(found, deepest):  # so that nobody's recursion ends in it
        raise DamagedFileError(path, f"it is nested more than {deepest} levels deep")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in out if names.count(name) > 1)
        raise ValueError(f"the name {shown(twice)} occurs twice")
    return out


def is_deeper(value: Any, most: int) -> bool:
    """Whether JSON is nested deeper than that; found without recursion.

    >>> is_deeper([[1]], 1), is_deeper([[1]], 2)
    (True, False)
    """
    level = [value]
    for _ in range(most):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return any(isinstance(one, dict | list) for one in level)
