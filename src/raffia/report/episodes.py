"""The recorded episode that a page shows, and its HTML."""

from __future__ import annotations

import base64
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from raffia.draw.markup import Html, el
from raffia.report.folder import Run, content, entries, read_json
from raffia.report.markup import count, figure, size
from raffia.report.rows import EvaluationRow, number, numbers

LARGEST = 4_000_000  # bytes of a recording that is put into the page
_KINDS = {".gif": "image/gif", ".mp4": "video/mp4"}


@dataclass(frozen=True)
class EpisodeFile:
    """A file of a recorded episode.

    >>> EpisodeFile(Path("episodes/9.gif")).score
    nan
    """

    path: Path
    score: float = math.nan  # its return, where a file has it
    at: EvaluationRow | None = None  # the evaluation during training that it is of


@dataclass(frozen=True)
class EvaluationFile:
    """One file of `evaluations/`: episodes that were played after, or beside, the training.

    >>> EvaluationFile("a", {"returns": [1, 2]}).returns
    [1.0, 2.0]
    """

    name: str
    data: dict[str, Any]

    @property
    def returns(self) -> list[float]:
        """Returns of the file's episodes."""
        return numbers(self.data.get("returns"))


def natural(path: Path) -> list[tuple[int, int, str]]:
    """A key that sorts names by the numbers in them.

    >>> sorted([Path("a10"), Path("a9")], key=natural)[0].name
    'a9'
    """
    pieces = re.findall(r"\d+|\D+", path.stem)
    # no int() of thousands of digits: their number, then the digits, compare in the same order
    return [(0, len(p.lstrip("0")), p.lstrip("0")) if p.isdecimal() else (1, 0, p) for p in pieces]


def read_evaluations(run: Path) -> tuple[list[EvaluationFile], list[str]]:
    """The files of `evaluations/`, oldest first by name, and what is wrong with others.

    >>> read_evaluations(Path("no such run"))
    ([], [])
    """
    found: list[EvaluationFile] = []
    notes: list[str] = []
    for path in sorted(entries(run, "evaluations", "*.json"), key=natural):
        try:
            data = read_json(path)
        except ValueError as error:
            notes.append(f"evaluations/{path.name} could not be read: {error}")
            continue
        if isinstance(data, dict):
            found.append(EvaluationFile(path.stem, data))
        else:
            notes.append(f"evaluations/{path.name} does not contain an object")
    return found, notes


def best_recording(run: Run, evaluations: list[EvaluationFile]) -> EpisodeFile | None:
    """The episode to show of a run.

    The best one of the newest file of `evaluations/` whose recordings are there; else the newest
    that is named after the best checkpoint; else that of the best evaluation during training, whose
    environment step names it; else the newest.

    >>> best_recording(Run(Path("no such run")), []) is None
    True
    """
    there = {
        path.name: path
        for path in sorted(entries(run.folder, "episodes"), key=natural)
        if path.suffix.lower() in _KINDS and path.is_file() and not path.is_symlink()
    }
    for evaluation in reversed(evaluations):
        files, returns = evaluation.data.get("files"), evaluation.data.get("returns")
        if not isinstance(files, list) or not isinstance(returns, list):
            continue
        pairs = [
            EpisodeFile(there[Path(str(file)).name], number(value))
            for file, value in zip(files, returns, strict=False)
            if Path(str(file)).name in there
        ]
        scored = [one for one in pairs if not math.isnan(one.score)]
        if scored:
            return max(scored, key=lambda one: one.score)
    named = [path for name, path in there.items() if name.lower().startswith("best")]
    if named:
        return EpisodeFile(named[-1])
    evaluated = {f"{one.progress:.0f}": one for one in run.evaluations}
    training = [
        EpisodeFile(path, at=evaluated[step])
        for path in there.values()
        if (step := path.stem.lstrip("0") or "0") in evaluated
    ]
    if training:
        return max(reversed(training), key=lambda one: one.at.mean if one.at else -math.inf)
    return EpisodeFile(list(there.values())[-1]) if there else None


def shown(recording: EpisodeFile, page: Path) -> Html:
    """The episode embedded in the page, or a link to it if its file is too large."""
    path = recording.path
    num_bytes = path.lstat().st_size
    about = "an episode" if math.isnan(recording.score) else f"return {figure(recording.score)}"
    if recording.at is not None:
        at, mean = recording.at, figure(recording.at.mean)
        about = f"at {count(at.progress)} {at.unit}, where the mean return was {mean}"
    if num_bytes > LARGEST:
        there = os.path.relpath(path, page.parent).replace(os.sep, "/")
        link = el("a", there, href=quote(there))
        text = f"Too large to include in this page ({size(num_bytes)}): "
        return el("p.missing", text, link)
    kind = _KINDS[path.suffix.lower()]
    data = f"data:{kind};base64,{base64.b64encode(content(path, LARGEST)).decode()}"
    if kind.startswith("video"):
        on = {name: "" for name in ("controls", "loop", "muted", "playsinline")}
        picture = el("video.episode", src=data, **on)
    else:
        picture = el("img.episode", src=data, alt=f"Recorded: {about}")
    caption = el("figcaption", f"{about} · {path.parent.name}/{path.name} · {size(num_bytes)}")
    return el("figure", picture, caption)
