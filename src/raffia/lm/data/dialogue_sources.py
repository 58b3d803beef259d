"""Sources of rows: files of JSON lines or Parquet, lists of chats, observations of environments.

A source gives raw rows and parses each of them apart; so a malformed row can be left out, and those
after it are still read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Protocol

from raffia.data.readers.arrow import pyarrow, read_batches
from raffia.data.readers.episode import Location, Path, existing_file
from raffia.data.readers.json_text import DECODER, opened, parse, read_pieces
from raffia.lm.data.dialogue_rows import ROLES, TokenRow, dialogue_of, dialogue_of_messages
from raffia.lm.data.utterances import Observation

ROWS_AT_ONCE = 256  # of Parquet; some hundred kilobytes of text
BLOCK = 2**20  # bytes that are skipped at a time


class DialogueSource(Protocol):
    """Raw rows of dialogues, and the way to parse each of them.

    >>> for location, raw in TranscriptDialogues([[{"role": "user", "content": "hi"}]]).rows():
    ...     location.where
    'row 0'
    """

    def rows(self) -> Iterator[tuple[Location, Any]]:
        """The rows unparsed; raises MalformedDataError where nothing more can be read.

        It starts over at each call.
        """

    def read(self, raw: Any, location: Location) -> Observation | TokenRow:
        """The observation or the `TokenRow` in a row; raises MalformedDataError."""

    def settings(self) -> dict[str, Any]:
        """How the rows are understood, as JSON."""

    def stamp(self) -> list[int] | None:
        """A cheap fingerprint of the rows, equal only if the rows are; None without one."""

    def checksum(self) -> str:
        """A checksum of all rows, which changes if any row does."""


class ListDialogues:
    """The common part of sources that are lists: rows by number, without a cheap fingerprint."""

    def __init__(self, items: Sequence[Any], name: str) -> None:
        self.items, self.name = items, name

    def rows(self) -> Iterator[tuple[Location, Any]]:
        """Iterate over all rows, each with its number from 0 on."""
        for number, item in enumerate(self.items):
            yield Location(self.name, f"row {number}"), item

    def stamp(self) -> None:
        """Return None: lists have no cheap fingerprint."""
        return None


class TranscriptDialogues(ListDialogues):
    """Chats: each is a list of messages, or an object in one of the forms of a file's row.

    >>> chats = [[{"role": "user", "content": "hi"},
    ...           {"role": "assistant", "content": "hello", "reward": 1.0}]]
    >>> source = TranscriptDialogues(chats)
    >>> [source.read(raw, location).sequence for location, raw in source.rows()]
    [[('hi', None), ('hello', 1.0)]]
    """

    def __init__(
        self,
        chats: Sequence[Any],
        *,
        roles: Mapping[str, bool] | None = None,
        name: str = "the list",
    ) -> None:
        super().__init__(chats, name)
        self._roles = {**ROLES, **(roles or {})}

    def read(self, raw: Any, location: Location) -> Observation | TokenRow:
        """The dialogue of a chat.

        >>> location = Location("the list", "row 0")
        >>> TranscriptDialogues([]).read([{"role": "user", "content": "hi"}], location).sequence
        [('hi', None)]
        """
        if isinstance(raw, dict):
            return dialogue_of(raw, location, self._roles)
        return dialogue_of_messages(raw, location, self._roles)

    def settings(self) -> dict[str, Any]:
        """The names of the roles.

        >>> TranscriptDialogues([], roles={"bot": True}).settings()["roles"][:3]
        [['agent', True], ['assistant', True], ['bot', True]]
        """
        return {"kind": "transcripts", "roles": _listed(self._roles)}

    def checksum(self) -> str:
        """A checksum of all chats.

        >>> TranscriptDialogues([]).checksum()[:8]
        'e3b0c442'
        """
        return _digest(json.dumps(chat, sort_keys=True, default=repr) for chat in self.items)


class ObservationDialogues(ListDialogues):
    """Observations at the end of games, as environments give them: any object with `to_sequence()`.

    >>> from raffia.lm.data.dialogue_rows import Dialogue
    >>> source = ObservationDialogues([Dialogue([("hello", 1.0)])])
    >>> [source.read(raw, location).to_sequence() for location, raw in source.rows()]
    [([('hello', 1.0)], True)]
    """

    def __init__(
        self, observations: Sequence[Observation], *, name: str = "the observations"
    ) -> None:
        super().__init__(observations, name)

    def read(self, raw: Any, location: Location) -> Observation | TokenRow:
        """The observation itself.

        >>> from raffia.lm.data.dialogue_rows import Dialogue
        >>> ObservationDialogues([]).read(Dialogue([]), Location("the observations", "row 0"))
        Dialogue(sequence=[], terminal=True, roles=())
        """
        if not hasattr(raw, "to_sequence"):
            location.fail(f"a {type(raw).__name__} has no to_sequence(): see `Observation`")
        return raw

    def settings(self) -> dict[str, Any]:
        """The kind of the source, which has no other settings.

        >>> ObservationDialogues([]).settings()
        {'kind': 'observations'}
        """
        return {"kind": "observations"}

    def checksum(self) -> str:
        """A checksum of the sequences of all observations, with the roles where there are some.

        >>> from raffia.lm.data.dialogue_rows import Dialogue
        >>> ObservationDialogues([Dialogue([])]).checksum()[:8]
        'e5b9deae'
        """
        return _digest(
            json.dumps([*item.to_sequence(), *getattr(item, "roles", ())], default=repr)
            for item in self.items
        )


class FileDialogues:
    """The common part of sources that are files: names of columns, and the detection of changes.

    columns: name in the file -> name here; None leaves a column out.
    roles: whether it is the agent, of roles that are not known.
    """

    def __init__(
        self,
        path: Path,
        *,
        columns: Mapping[str, str | None] | None = None,
        roles: Mapping[str, bool] | None = None,
    ) -> None:
        self.path = existing_file(path)
        self._columns = dict(columns or {})
        self._unseen = {name for name, new in self._columns.items() if new is not None}
        self._roles = {**ROLES, **(roles or {})}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"

    def settings(self) -> dict[str, Any]:
        """The meaning of columns and roles."""
        columns, roles = _listed(self._columns), _listed(self._roles)
        return {"kind": type(self).__name__, "columns": columns, "roles": roles}

    def stamp(self) -> list[int]:
        """The file's size, and when it was written."""
        found = os.stat(self.path)
        return [found.st_size, found.st_mtime_ns]

    def unseen_columns(self) -> set[str]:
        """Names that `columns` gives another meaning, of which no row that was read has one."""
        return set(self._unseen)

    def checksum(self) -> str:
        """The sha256 of the file."""
        with open(self.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def read(self, raw: Any, location: Location) -> Observation | TokenRow:
        """The dialogue of a row, whose entries are renamed by `columns`; or of a list of messages.

        Raises MalformedDataError.
        """
        if isinstance(raw, list):
            return dialogue_of_messages(raw, location, self._roles)
        if not isinstance(raw, dict):
            location.fail(f'{raw!r:.60} must be an object, such as {{"messages": [...]}}')
        renamed: dict[str, Any] = {}
        self._unseen -= raw.keys()
        for name, value in raw.items():
            new = self._columns.get(name, name)
            if new in renamed:
                location.fail(f"two entries have the name {new!r}", name)
            if new is not None:
                renamed[new] = value
        return dialogue_of(renamed, location, self._roles)


class JsonLineDialogues(FileDialogues):
    """A file with one JSON object on each line, or one list of them; it may be gzip-compressed.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "chats.jsonl")
    ...     _ = path.write_text('{"sequence": [["hi", null], ["hello", -0.5]]}')
    ...     source = JsonLineDialogues(path)
    ...     [source.read(raw, location).sequence for location, raw in source.rows()]
    [[('hi', None), ('hello', -0.5)]]
    """

    def __init__(
        self,
        path: Path,
        *,
        columns: Mapping[str, str | None] | None = None,
        roles: Mapping[str, bool] | None = None,
        max_line_bytes: int = 2**28,
    ) -> None:
        super().__init__(path, columns=columns, roles=roles)
        self._max_line_bytes = max_line_bytes

    def rows(self) -> Iterator[tuple[Location, Any]]:
        """The lines, from 1; of one that is too long, the beginning. Of a list the rows, from 0."""
        with opened(self.path) as file:
            for number in count(1):
                location = Location(self.path, f"line {number}")
                with location.foreign():
                    line = passed = read_pieces(file, location, self._max_line_bytes)
                    if number == 1 and line.lstrip()[:1] == b"[":
                        text = read_pieces(
                            file, location, self._max_line_bytes, begun=line, is_line=False
                        )
                        break
                    while len(line) > self._max_line_bytes and passed[-1:] not in (b"\n", b""):
                        passed = file.readline(BLOCK)
                if not line:
                    return
                yield location, line
        yield from self._of_list(text)

    def _of_list(self, text: bytes) -> Iterator[tuple[Location, Any]]:
        whole = Location(self.path, "the file")
        if len(text) > self._max_line_bytes:
            whole.fail(
                f"it is a single list of more than {self._max_line_bytes} bytes, which would have "
                "to be read in one piece: write one row on each line, or raise max_line_bytes"
            )
        try:
            found: list[Any] = DECODER.decode(text.decode())
        except UnicodeDecodeError as error:
            whole.fail(f"byte {error.start + 1}: it is not UTF-8")
        except (ValueError, RecursionError) as error:
            whole.fail(f"it begins like a list, but is not JSON: {error}")
        for number, row in enumerate(found):
            yield Location(self.path, f"row {number}"), row

    def read(self, raw: Any, location: Location) -> Observation | TokenRow:
        """The dialogue of a line, or of a row of a list."""
        if not isinstance(raw, bytes):
            return super().read(raw, location)
        if len(raw) > self._max_line_bytes:
            location.fail(
                f"it is longer than {self._max_line_bytes} bytes; to read it raise "
                "max_line_bytes, which needs twenty times as much memory"
            )
        if raw.isspace():
            location.fail("it is blank")
        if not raw.lstrip().startswith(b"{"):
            start = raw.strip()[:40].decode(errors="replace")
            location.fail(f'it begins with {start!r}, but must be an object: {{"messages": [...]}}')
        return super().read(parse(raw, location), location)


class ParquetDialogues(FileDialogues):
    """A Parquet file with a dialogue in each row; needs `pip install 'raffia[parquet]'`.

    `messages` is a list of structs, `utterances` and `rewards` are lists; a null is nothing.

    >>> import tempfile, pyarrow, pyarrow.parquet
    >>> table = pyarrow.table({"utterances": [["hi", "hello"]], "rewards": [[None, -0.5]]})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pyarrow.parquet.write_table(table, f"{folder}/chats.parquet")
    ...     source = ParquetDialogues(f"{folder}/chats.parquet")
    ...     [source.read(raw, location).sequence for location, raw in source.rows()]
    [[('hi', None), ('hello', -0.5)]]
    """

    def rows(self) -> Iterator[tuple[Location, Any]]:
        """The rows, from 0."""
        whole = Location(self.path, "the file")
        pa = pyarrow()
        with whole.foreign(), pa.parquet.ParquetFile(self.path) as file:
            num_rows, names = file.metadata.num_rows, list(file.schema_arrow.names)
        paths = [(name,) for name in names if self._columns.get(name, name) is not None]
        if not paths:
            whole.fail("it has no columns, or `columns` leaves all of them out")
        for first, arrays in read_batches(self.path, num_rows, paths, ROWS_AT_ONCE):
            with Location(self.path, f"row {first}").foreign():
                columns = {name: array.to_pylist() for (name,), array in arrays.items()}
            for at in range(len(next(iter(columns.values())))):
                row = {name: values[at] for name, values in columns.items()}
                yield Location(self.path, f"row {first + at}"), row


class JoinedDialogues:
    """The rows of one source after those of another.

    >>> first = TranscriptDialogues([[{"role": "user", "content": "hi"}]])
    >>> both = JoinedDialogues([first, TranscriptDialogues([[], []])])
    >>> [location.where for location, raw in both.rows()]
    ['row 0', 'row 0', 'row 1']
    """

    def __init__(self, sources: Sequence[DialogueSource]) -> None:
        self.sources = sources

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.sources)!r})"

    def rows(self) -> Iterator[tuple[Location, Any]]:
        """The rows of all, each with the source that it is of."""
        for source in self.sources:
            for location, raw in source.rows():
                yield location, (source, raw)

    def read(self, raw: Any, location: Location) -> Observation | TokenRow:
        """The dialogue of a row, as its source parses it."""
        source, content = raw
        return source.read(content, location)

    def unseen_columns(self) -> set[str]:
        """Names of columns that no row of any source has."""
        files = [source for source in self.sources if isinstance(source, FileDialogues)]
        unseen = [source.unseen_columns() for source in files]
        return set.intersection(*unseen) if unseen else set()

    def settings(self) -> dict[str, Any]:
        """The settings of all sources."""
        return {"kind": "joined", "sources": [source.settings() for source in self.sources]}

    def stamp(self) -> list[int] | None:
        """The stamps of all sources; None if one of them has none."""
        stamps = [source.stamp() for source in self.sources]
        if any(stamp is None for stamp in stamps):
            return None
        return [number for stamp in stamps for number in stamp or ()]

    def checksum(self) -> str:
        """A checksum of all rows of all sources."""
        together = " ".join(source.checksum() for source in self.sources)
        return hashlib.sha256(together.encode()).hexdigest()


def read_dialogues(
    path: Path,
    *,
    columns: Mapping[str, str | None] | None = None,
    roles: Mapping[str, bool] | None = None,
) -> JsonLineDialogues | ParquetDialogues:
    """The source in a file: `.parquet`, or JSON lines (`.jsonl`, `.json`, `.jsonl.gz`, ...).

    columns: name in the file -> name here: {"conversation": "messages"}; None leaves a column out.
    roles: other roles than assistant, agent, gpt (the agent's), user, human, system, tool and
        environment: {"bot": True, "caller": False}, True being the agent.

    >>> read_dialogues("chats.csv")
    Traceback (most recent call last):
    ...
    ValueError: 'chats.csv' is not supported: dialogues are read from .jsonl, .json, ...
    """
    name = os.fspath(path)
    if name.endswith((".parquet", ".pq")):
        return ParquetDialogues(path, columns=columns, roles=roles)
    if name.endswith((".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz")):
        return JsonLineDialogues(path, columns=columns, roles=roles)
    raise ValueError(
        f"{name!r} is not supported: dialogues are read from .jsonl, .json, .jsonl.gz and "
        ".parquet files. For another file name use JsonLineDialogues(path) or "
        "ParquetDialogues(path)"
    )


def _listed(table: Mapping[str, Any]) -> list[list[Any]]:
    """The value as it would be after a round trip through JSON."""
    return [list(pair) for pair in sorted(table.items())]


def _digest(texts: Iterable[str]) -> str:
    code = hashlib.sha256()
    for text in texts:
        data = text.encode()
        code.update(len(data).to_bytes(8, "little") + data)
    return code.hexdigest()
