"""What a run writes down as it goes: one row for each thing that happened, in two forms."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raffia.train.events import EventFile
from raffia.train.metrics import MetricsFile


class Records:
    """`metrics.jsonl` and TensorBoard's event file of a run folder.

    seconds: how long the run had lasted before this sitting.

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
        self._rows = MetricsFile(folder / "metrics.jsonl")
        self._events = EventFile(folder)
        self._before, self._begun = seconds, time.monotonic()

    @property
    def seconds(self) -> float:
        """Wall time of the run, over all its sittings."""
        return self._before + time.monotonic() - self._begun

    def write(self, kind: str, *, update: int, env_step: int, values: Mapping[str, Any]) -> None:
        """One row; what of it is a number is a curve in TensorBoard, over the updates."""
        now = self.seconds
        place = {"kind": kind, "update": update, "env_step": env_step, "seconds": round(now, 3)}
        self._rows.write({**place, **values})
        for name, value in values.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                self._events.write(f"{kind}/{name}", float(value), step=update)

    def state(self) -> dict[str, Any]:
        """How far the files are written, for a checkpoint; what is written is on the disk then."""
        self._rows.sync()
        self._events.sync()
        return {
            "seconds": self.seconds,
            "rows": self._rows.position(),
            "events": self._events.position(),
        }

    def rewind(self, state: Mapping[str, Any]) -> None:
        """Take back what was written after the checkpoint with this state."""
        self._before, self._begun = float(state["seconds"]), time.monotonic()
        self._rows.rewind(state["rows"])
        self._events.rewind(state["events"])

    def close(self) -> None:
        """Close both files."""
        self._rows.close()
        self._events.close()
