"""The log of a run: `Log`, the task that makes its rows, and `Records`, the files that hold them.

Records are one row for each event, as JSON lines and for TensorBoard. They go on after a resume
without doubled rows: a checkpoint notes how long the files are, and what was written after that is
cut off (`state`, `load_state`).

TensorBoard's event file is a row of records, each an Event message; the formats are those of
TensorFlow's `tfrecord` and `event.proto`, of which only scalars are written:

    record    length uint64, masked crc of it uint32, data, masked crc of the data uint32
    Event     1 wall_time double, 2 step int64, 3 file_version string, 5 summary Summary
    Summary   1 value, repeated: 1 tag string, 2 simple_value float

Source: Castagnoli, Braeuer & Herrmann (1993), for the crc (crc32c, polynomial 0x1EDC6F41).
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from raffia.files import AppendLog, JsonLines
from raffia.learner import step_of
from raffia.tensordict.tensordict import TensorDict
from raffia.train.experiment import Experiment
from raffia.train.metrics import RunningMeans
from raffia.train.view import Status

PREFIX, SUFFIX = "events.out.tfevents.", ".raffia"
TAIL = 1 << 16  # bytes that a crash can have spoilt
VERSION = b"brain.Event:2"
POLYNOMIAL = 0x82F63B78  # with its bits in reverse order


OnRow = Callable[[dict[str, Any]], object]


class Log:
    """Rows about training and episodes, each `plan.log_every` updates, and the view at each one."""

    def __init__(self, experiment: Experiment, records: Records) -> None:
        self._experiment, self._records, plan = experiment, records, experiment.plan
        self._means = RunningMeans()
        self.status = Status(
            title=plan.title,
            num_updates=plan.num_updates,
            env_step=None if plan.num_env_steps is None else 0,
            num_env_steps=plan.num_env_steps,
        )
        self._before: tuple[float, dict[str, int]] | None = None  # seconds, counts
        self._waited = 0.0  # seconds for workers, up to the last row

    def __call__(self, state: TensorDict, metrics: TensorDict) -> None:
        """Record the metrics of an update, and write the rows that are due."""
        self.add(metrics)
        update = step_of(state)
        if self._before is None:  # what comes before the first update of a session is no speed
            self._mark(update)
        self.episodes(update)
        if update % self._experiment.plan.log_every == 0:
            self.row(update)
        self._show(update)

    def add(self, metrics: TensorDict) -> None:
        """Add the metrics of an update to the means; members that are not finite are left out."""
        self._means.add(
            {
                key: value[value.isfinite()] if value.dim() else value
                for key, value in metrics.items()
                if key != "priority"
            }
        )

    def episodes(self, update: int) -> None:
        """Write a row for each episode that has ended."""
        for episode in self._experiment.take_ended():
            values = {"return": episode.episode_return, "length": episode.length}
            self._write("episode", update, values)
            self.status = replace(self.status, latest_return=episode.episode_return)

    def row(self, update: int) -> None:
        """The means since the last row."""
        means = self._means.take()
        if not means:
            return
        values = {**means, **self._rates(update), **self._experiment.clock.take()}
        extra = self._experiment.extra_metrics(update)
        self._write("train", update, values | extra)
        self._workers(update, extra)
        losses = {name: mean for name, mean in means.items() if name.endswith("loss")}
        self.status = replace(self.status, losses=losses)
        self._mark(update)

    def _seconds_since(self, update: int) -> float | None:
        """Seconds since the last row; None if nothing was learnt in them."""
        if self._before is None or self._before[1]["updates"] == update:
            return None
        return max(self._records.seconds - self._before[0], 1e-9)

    def _workers(self, update: int, extra: Mapping[str, float]) -> None:
        """Show what workers cost: `Pool.metrics` names what is counted since the session began."""
        waits = [value for name, value in extra.items() if name.startswith("waited_for_")]
        waited, self._waited = sum(waits) - self._waited, sum(waits)
        took = self._seconds_since(update)
        if not waits or took is None:
            return
        restarts = [value for name, value in extra.items() if name.endswith("_restarts")]
        self.status = replace(
            self.status,
            waiting=min(1.0, max(0.0, waited / took)),
            staleness=extra.get("staleness"),
            worker_restarts=int(sum(restarts)),
        )

    def _write(self, kind: str, update: int, values: Mapping[str, Any]) -> None:
        env_step = self._experiment.num_env_steps
        self._records.write(kind, update=update, env_step=env_step, values=values)

    def _mark(self, update: int) -> None:
        self._before = self._records.seconds, self._counts(update)

    def _counts(self, update: int) -> dict[str, int]:
        env_step = self._experiment.num_env_steps
        played = {} if env_step is None else {"env_steps": env_step}
        return {"updates": update, **played, **self._experiment.counters()}

    def _rates(self, update: int) -> dict[str, float]:
        took = self._seconds_since(update)
        if took is None or self._before is None:
            return {}
        rates = {
            f"{name}_per_second": (count - self._before[1][name]) / took
            for name, count in self._counts(update).items()
        }
        self.status = replace(
            self.status,
            updates_per_second=rates["updates_per_second"],
            env_steps_per_second=rates.get("env_steps_per_second"),
            simulations_per_second=rates.get("simulations_per_second"),
        )
        return rates

    def _show(self, update: int) -> None:
        left = None
        if self.status.updates_per_second:
            left = (self.status.num_updates - update) / self.status.updates_per_second
        self.status = replace(
            self.status,
            update=update,
            env_step=self._experiment.num_env_steps,
            seconds=self._records.seconds,
            seconds_left=left,
        )
        self._experiment.view.show(self.status)

    def evaluated(self, mean_return: float, best: float) -> None:
        """Record the outcome of an evaluation."""
        self.status = replace(self.status, evaluated_return=mean_return, best_return=best)

    def state(self) -> dict[str, Any]:
        """The state for a resume: values that no row has yet."""
        return {"means": self._means.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state` gave."""
        self._means.load_state(state["means"])


class Records:
    """`metrics.jsonl` and TensorBoard's event file of a run folder.

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

    def __init__(self, folder: Path, on_row: OnRow | None = None) -> None:
        """on_row: called with each row; once it raises, which is `error`, no more."""
        self._on_row = on_row
        self.error: Exception | None = None
        self._rows = JsonLines(folder / "metrics.jsonl")
        self._events = EventFile(folder)
        self._before, self._begun = 0.0, time.monotonic()
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
        if self._on_row is not None and self.error is None:
            try:
                self._on_row({**row, **values})
            except Exception as error:  # raised between two updates, where all fits together
                self.error = error

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
        """Remove what was written after the checkpoint with this state."""
        self._waiting.clear()
        self._before, self._begun = float(state["seconds"]), time.monotonic()
        self._rows.rewind(state["rows"])
        self._events.rewind(state["events"])

    def close(self) -> None:
        """Close both files."""
        with contextlib.closing(self._rows), contextlib.closing(self._events):
            self._write_what_waits()


class EventFile(AppendLog):
    """Scalars for `tensorboard --logdir FOLDER`; a file that is there already is resumed.

    What a crash cut off at its end is removed; the first record, which names the kind of file, is
    there always. A TensorBoard that looks at the file needs to be started again after a rewind.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, EventFile(folder) as events:
    ...     events.write("train/loss", 0.5, step=10)
    ...     position = events.position()
    ...     events.write("train/loss", 0.25, step=20)
    ...     events.rewind(position)
    48
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        names = sorted([n for n in os.listdir(folder) if n.startswith(PREFIX)])
        names = [name for name in names if name.endswith(SUFFIX)]
        name = names[-1] if names else f"{PREFIX}{int(time.time()):010d}{SUFFIX}"
        super().__init__(f"{os.fspath(folder)}/{name}")

    def write(self, tag: str, value: float, *, step: int, wall_time: float | None = None) -> None:
        """Append a point of the curve `tag`.

        wall_time: seconds since 1970; without it now.
        Raises OSError if the disk is full; the file is as it was then.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, EventFile(folder) as events:
        ...     events.write("evaluate/mean_return", 200.0, step=3000)
        """
        point = _bytes(1, tag.encode()) + b"\x15" + struct.pack("<f", value)
        now = time.time() if wall_time is None else wall_time
        event = b"\x09" + struct.pack("<d", now) + b"\x10" + _varint(step)
        self._append(event + _bytes(5, _bytes(1, point)))

    def _end(self, file: BinaryIO) -> int:
        return _end_of_records(file)

    def _begin(self) -> None:
        self._append(b"\x09" + struct.pack("<d", time.time()) + _bytes(3, VERSION))

    def _append(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        self.append(length + masked_crc(length) + data + masked_crc(data))


def masked_crc(data: bytes) -> bytes:
    """The crc32c of the data, turned such that a crc of data with crcs in it is a good one.

    >>> masked_crc(b"123456789").hex()
    'e5b08ac7'
    """
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    """The cyclic redundancy check by Castagnoli's polynomial.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _table() -> Iterator[int]:
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (POLYNOMIAL if crc & 1 else 0)
        yield crc


TABLE = tuple(_table())


def _bytes(field: int, data: bytes) -> bytes:
    """A field of a message that holds bytes, a string or a message."""
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """A number of 64 bits, seven at a time, the lowest first."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _end_of_records(file: BinaryIO) -> int:
    """The offset at which the last complete record ends."""
    size, end = file.seek(0, os.SEEK_END), 0
    file.seek(0)
    while True:
        head = file.read(12)
        if len(head) < 12 or masked_crc(head[:8]) != head[8:]:
            return end
        length = int.from_bytes(head[:8], "little")
        rest = file.read(length + 4)
        is_near_end = end + TAIL > size
        if len(rest) < length + 4 or (is_near_end and masked_crc(rest[:length]) != rest[length:]):
            return end
        end += 12 + length + 4
