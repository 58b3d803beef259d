"""Several sources of dialogues as one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from raffia.data.readers.episode import Location as Place
from raffia.lm.data.dialogue_sources import DialogueSource

__all__ = ["JoinedDialogues"]


class JoinedDialogues:
    """The rows of one source after those of another.

    >>> from raffia.lm.data.dialogue_sources import TranscriptDialogues
    >>> first = TranscriptDialogues([[{"role": "user", "content": "hi"}]])
    >>> both = JoinedDialogues([first, TranscriptDialogues([[], []])])
    >>> [place.where for place, raw in both.rows()]
    ['row 0', 'row 0', 'row 1']
    """

    def __init__(self, sources: Sequence[DialogueSource]) -> None:
        self.sources = sources

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.sources)!r})"

    def rows(self) -> Iterator[tuple[Place, Any]]:
        """The rows of all, each with the source that it is of."""
        for source in self.sources:
            for place, raw in source.rows():
                yield place, (source, raw)

    def read(self, raw: Any, place: Place) -> Any:
        """What a row says, as its source understands it."""
        source, content = raw
        return source.read(content, place)

    def settings(self) -> dict[str, Any]:
        """Those of all."""
        return {"kind": "joined", "sources": [source.settings() for source in self.sources]}

    def stamp(self) -> list[int] | None:
        """Those of all; None if one has none."""
        stamps = [source.stamp() for source in self.sources]
        if any(stamp is None for stamp in stamps):
            return None
        return [number for stamp in stamps for number in stamp or ()]

    def checksum(self) -> str:
        """Of all rows of all."""
        together = " ".join(source.checksum() for source in self.sources)
        return hashlib.sha256(together.encode()).hexdigest()
