"""Records of a run: one row for each event, as JSON lines and for TensorBoard.

They go on after a resume without doubled rows: a checkpoint notes how long the files are, and what
was written after that is cut off (`state`, `rewind`).
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from raffia.files import JsonLines
from raffia.train.events import EventFile


class Records:
    """`metrics.jsonl` and TensorBoard's event file of a run folder.

    seconds: how long the run had lasted before this session.

    What can't be written, as the disk is full, waits until it can; `state` and `close` raise the
    OSError if that is not yet so.

    >>> import json, tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     records = Records(Path(folder))
    ...     records.write("train", update=5, env_step=40, values={"loss": 0.25})
    ...     records.close()
    ...     row = json.loads((Path(folder) / "metrics.jsonl").read_text())
    >>> row["kind"], row["update"], row["env_step"], row["loss"]
    ('train', 5, 40, 0.25)
    """

    def __init__(self, folder: Path, seconds: float = 0.0) -> None:
        self._rows = JsonLines(folder / "metrics.jsonl")
        self._events = EventFile(folder)
        self._before, self._begun = seconds, time.monotonic()
        self._waiting: deque[Callable[[], object]] = deque()  # writes, in their order

    @property
    def seconds(self) -> float:
        """Wall time of the run, over all its sessions."""
        return self._before + time.monotonic() - self._begun

    def write(
        self,
        kind: str,
        *,
        update: int,
        env_step: int | None,  # None: none are played
        values: Mapping[str, Any],
    ) -> None:
        """Write a row; each number in it is a point of a curve in TensorBoard, over the updates."""
        now = self.seconds
        played = {} if env_step is None else {"env_step": env_step}
        row = {"kind": kind, "update": update, **played, "seconds": round(now, 3)}
        self._waiting.append(functools.partial(self._rows.write, {**row, **values}))
        for name, value in values.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                write = functools.partial(self._events.write, f"{kind}/{name}", float(value))
                self._waiting.append(functools.partial(write, step=update))
        with contextlib.suppress(OSError):  # `state` raises it, if it lasts
            self._write_what_waits()

    def _write_what_waits(self) -> None:
        while self._waiting:
            self._waiting[0]()
            self._waiting.popleft()

    def state(self) -> dict[str, Any]:
        """The lengths of the files, for a checkpoint; all that is written is on the disk then."""
        self._write_what_waits()
        self._rows.sync()
        self._events.sync()
        return {
            "seconds": self.seconds,
            "rows": self._rows.position(),
            "events": self._events.position(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what was written after the checkpoint with this state."""
        self._waiting.clear()
        self._before, self._begun = float(state["seconds"]), time.monotonic()
        self._rows.rewind(state["rows"])
        self._events.rewind(state["events"])

    def close(self) -> None:
        """Close both files."""
        with contextlib.closing(self._rows), contextlib.closing(self._events):
            self._write_what_waits()
