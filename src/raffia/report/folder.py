"""A run folder, read into plain records, and a run in one line for lists of runs.

Every part may be missing; `notes` list what is.
"""

from __future__ import annotations

import difflib
import math
import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from raffia.files import DamagedFileError, open_plain, parse_json
from raffia.lazy import is_outside
from raffia.report.rows import EvaluationRow as EvaluationRow
from raffia.report.rows import Row, counted_rows, evaluations_of, key_rows, number

LARGEST = 50_000_000  # bytes of a file of JSON
ABOUT = ("run", "preset", "versions")  # of config.json: what is not a setting
PLAYED_BY_PEOPLE = ("tictactoe", "connect4")  # environments that `raffia play` has
MANIFEST = "sweep.json"  # of a folder of many runs, which lie in its folder "runs"
_FEW = 6  # names in an error


@dataclass(frozen=True, eq=False)
class Run:
    """The content of one run's files.

    >>> run = Run(Path("runs/a"), rows=({"kind": "end", "reason": "target", "env_step": 70},))
    >>> run.state, run.env_step, run.best
    ('target', 70.0, None)
    """

    folder: Path
    config: dict[str, Any] = field(
        default_factory=dict
    )  # nested settings; without what `about` has
    about: dict[str, Any] = field(default_factory=dict)  # preset, versions ...
    rows: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()  # what is missing or damaged
    counts: Mapping[str, int] = field(
        default_factory=dict
    )  # numbers of rows of each kind, where not all were read

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.name or self.folder.resolve().name

    @cached_property
    def by_kind(self) -> dict[str, list[Row]]:
        """The rows of each kind, in their order."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row["kind"], []).append(row)
        return found

    def of(self, kind: str) -> list[Row]:
        """The rows of a kind."""
        return self.by_kind.get(kind, [])

    def num_of(self, kind: str) -> int:
        """How many rows of a kind its files have."""
        return self.counts.get(kind, len(self.of(kind)))

    @property
    def state(self) -> str:
        """finished, target (reached), stopped, failed, running (or killed: no end), or empty."""
        for row in reversed(self.rows):
            if row["kind"] == "error":
                return "failed"
            if row["kind"] == "end":
                return str(row.get("reason", "finished"))
            if row["kind"] in ("start", "resume"):
                return "running"
        return "running" if self.rows else "empty"

    @property
    def failure(self) -> str:
        """The error that stopped a run that failed, such as "ValueError: no piece"; or nothing."""
        rows = self.of("error")
        return str(rows[-1].get("error", "")) if rows and self.state == "failed" else ""

    @property
    def algorithm(self) -> str:
        """The algorithm's name, or nothing."""
        return str(self.about.get("algorithm") or "")

    @property
    def preset(self) -> str:
        """The preset's name, or nothing."""
        return str(self.about.get("preset") or "")

    @property
    def env(self) -> str:
        """The environment's id, or the task if there is no id; empty if there is neither."""
        return str(self.setting("env", "id") or self.setting("task") or "")

    @property
    def seed(self) -> str:
        """The seed as text, for use in names; empty where no file has it."""
        seed = self.config.get("seed", self.about.get("seed"))
        return "" if seed is None else str(seed)

    def setting(self, *path: str) -> object:
        """A value of the config, or None."""
        found: object = self.config
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        return found

    @property
    def update(self) -> float:
        """The newest number that a row names; nan without one."""
        return self._newest("update")

    @property
    def env_step(self) -> float:
        """The newest number that a row names; nan without one."""
        return self._newest("env_step")

    @property
    def seconds(self) -> float:
        """Wall time over all sessions; nan if no row has it."""
        return self._newest("seconds")

    @property
    def target_return(self) -> float:
        """The mean return at which the run ends; nan without one."""
        nested = number(self.setting("evaluate", "target_return"))
        return number(self.setting("target_return")) if math.isnan(nested) else nested

    @property
    def searches(self) -> bool:
        """Whether its agent plans by a search, as far as its settings are known."""
        return not self.config or self.setting("search") is not None

    @property
    def records(self) -> bool:
        """Whether `raffia evaluate` records its episodes: not of algorithms from elsewhere."""
        return not self.about.get("reference")

    def call(self, command: str, *flags: str) -> str:
        """The command line's call about this run.

        >>> Run(Path("runs/a"), about={"reference": "dqn.py:dqn"}).call("evaluate", "--json")
        'raffia evaluate runs/a --json --algorithm dqn.py:dqn'
        """
        own = {
            "--algorithm": self.about.get("reference"),
            "--env": self.setting("env", "id") or self.setting("evaluate", "env"),
            "--networks": self.setting("networks"),
        }
        named: list[str] = []
        for flag, name in own.items():
            if name and (flag == "--algorithm" or is_outside(str(name))):
                named += [flag, str(name)]
        return shlex.join(["raffia", command, str(self.folder), *flags, *named])

    @property
    def num_restarts(self) -> int:
        """The number of times that it was resumed."""
        return len(self.of("resume"))

    @property
    def by_updates(self) -> bool:
        """Whether only updates count its progress: it plays in no environment to learn."""
        plays = self.setting("env") is not None
        return math.isnan(self.env_step) and not (plays and math.isnan(self.update))

    @property
    def of_dialogues(self) -> bool:
        """Whether it learns from dialogues: by updates, and without a search."""
        return self.by_updates and self.setting("search") is None

    @cached_property
    def evaluations(self) -> list[EvaluationRow]:
        """The evaluations with a mean return, or a loss of held-out rows, in their order."""
        return evaluations_of(self.of("evaluate"))

    @property
    def of_loss(self) -> bool:
        """Whether it is evaluated by a loss, of which less is better."""
        return self.last is not None and self.last.of_loss

    @property
    def best(self) -> EvaluationRow | None:
        """The first evaluation with the highest mean return; of held-out rows the newest with the
        highest score, as its checkpoint is."""
        of_rows = [one for one in reversed(self.evaluations) if one.of_loss]
        return max(of_rows or self.evaluations, key=lambda one: one.score, default=None)

    @property
    def last(self) -> EvaluationRow | None:
        """The newest evaluation."""
        return self.evaluations[-1] if self.evaluations else None

    @property
    def reached(self) -> EvaluationRow | None:
        """The first evaluation at or above the target."""
        return next((one for one in self.evaluations if one.score >= self.target_return), None)

    def _newest(self, key: str) -> float:
        # The row of an evaluation that was played elsewhere names an earlier update than its
        # neighbours; what is before a resume may name later ones.
        largest = math.nan
        for row in reversed(self.rows):
            if not math.isnan(found := number(row.get(key))):
                largest = found if math.isnan(largest) else max(largest, found)
                if row.get("kind") != "evaluate":
                    return largest
        return largest


@dataclass(frozen=True)
class RunSummary:
    """The figures of a run that a list shows; None where no file has them.

    >>> RunSummary(Path("runs/a"), state="running").best_return is None
    True
    """

    folder: Path
    state: str  # "finished", "target" (reached), "stopped", "failed", "running" (or killed) ...
    algorithm: str = ""
    preset: str = ""
    env: str = ""
    seed: str = ""
    last_return: float | None = None  # mean of the newest evaluation
    best_return: float | None = None  # mean of the best one
    env_step: int | None = None
    update: int | None = None
    seconds: float | None = None  # wall time over all sessions
    last_loss: float | None = None  # of the newest evaluation, where held-out rows are evaluated
    best_loss: float | None = None  # ... and the least
    notes: tuple[str, ...] = ()  # what is missing or damaged


def is_run(folder: Path) -> bool:
    """Whether a folder looks like a run's.

    >>> is_run(Path("no such folder"))
    False
    """
    return (folder / "metrics.jsonl").is_file() or (folder / "config.json").is_file()


def find_runs(root: str | os.PathLike[str], depth: int = 3) -> list[Path]:
    """The run folders in `root` and in up to `depth` levels of folders below, by name.

    >>> find_runs("no such folder")
    []
    """
    folder = Path(root)
    if is_run(folder):
        return [folder]
    if depth < 1 or not folder.is_dir():
        return []
    below = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    shown = [entry for entry in below if not entry.name.startswith(".")]
    return [run for entry in shown for run in find_runs(entry, depth - 1)]


def near_runs(path: Path, others: Iterable[Path] = ()) -> list[Path]:
    """The runs that a path may stand for which is not a run's folder: the run that it lies in; or
    the runs below it, and those of a similar name beside it or among others.

    >>> near_runs(Path("away/gone"))
    []
    """
    around = next((parent for parent in path.parents if parent.name and is_run(parent)), None)
    if around is not None:
        return [around]
    below = find_runs(path, 2) if path.is_dir() else []
    beside = find_runs(path.parent, 1) if path.parent.name else []  # never the whole disk
    runs = [*others, *beside]
    names = difflib.get_close_matches(path.name, [run.name for run in runs], n=3)
    return list(dict.fromkeys([*below, *(run for n in names for run in runs if run.name == n)]))


def runs_of_sweep(folder: str | os.PathLike[str]) -> tuple[list[Path], list[str]] | None:
    """The runs of a sweep's folder, and lines about those that are not there; None if it is none.

    >>> runs_of_sweep("no such folder")
    """
    there = Path(folder)
    if not (there / MANIFEST).is_file():
        return None
    found = find_runs(there / "runs", 1)
    try:
        data: Any = read_json(there / MANIFEST)
        planned = [str(run["name"]) for run in data["runs"]]
        errors = {str(name): str(text) for name, text in data["errors"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return found, [f"{MANIFEST} could not be read: {error}"]
    begun = {run.name for run in found}
    missing = [name for name in planned if name not in begun and name not in errors]
    failed = [f"{name} failed: {errors[name]}" for name in planned if name in errors]
    if missing:
        failed.append(f"{len(missing)} of {len(planned)} runs have not started: {_listed(missing)}")
    return found, failed


def read_run(path: str | os.PathLike[str]) -> Run:
    """A whole run.

    >>> read_run("no such folder")
    Traceback (most recent call last):
    ...
    FileNotFoundError: no such folder is not a run folder: it does not exist...
    """
    return _read(path, counted_rows)


def read_key_rows(path: str | os.PathLike[str]) -> Run:
    """The run without rows of training and episodes; see `raffia.report.rows.key_rows`.

    >>> read_key_rows("no such folder")
    Traceback (most recent call last):
    ...
    FileNotFoundError: no such folder is not a run folder: it does not exist...
    """
    return _read(path, lambda file: (*key_rows(file), {}))


def summarise(run: str | os.PathLike[str]) -> RunSummary:
    """Read what a list shows of a run: of long files a few lines only.

    Raises FileNotFoundError, with the runs nearby, if the folder is not a run's.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows = '{"kind": "start"}\\n{"kind": "evaluate", "env_step": 9, "mean_return": 7}\\n'
    ...     _ = Path(folder, "metrics.jsonl").write_text(rows)
    ...     found = summarise(folder)
    >>> found.state, found.best_return, found.env_step, found.seconds
    ('running', 7.0, 9, None)
    """
    found = read_key_rows(run)
    env_step, update, seconds = _there(found.env_step), _there(found.update), found.seconds
    means = [one.mean if one else None for one in (found.last, found.best)]
    returns, losses = ([None, None], means) if found.of_loss else (means, [None, None])
    return RunSummary(
        folder=found.folder,
        state=found.state,
        algorithm=found.algorithm,
        preset=found.preset,
        env=found.env,
        seed=found.seed,
        last_return=returns[0],
        best_return=returns[1],
        env_step=None if env_step is None else int(env_step),
        update=None if update is None else int(update),
        seconds=_there(seconds),
        last_loss=losses[0],
        best_loss=losses[1],
        notes=found.notes,
    )


def _there(value: float) -> float | None:
    return None if math.isnan(value) else value


def _read(
    path: str | os.PathLike[str],
    rows_of: Callable[[Path], tuple[list[Row], list[str], dict[str, int]]],
) -> Run:
    folder = Path(path)
    if not is_run(folder):
        raise FileNotFoundError(_no_run(folder))
    config, about, notes = _read_config(folder / "config.json")
    rows: list[Row] = []
    counts: dict[str, int] = {}
    try:
        rows, faults, counts = rows_of(folder / "metrics.jsonl")
        notes += faults
        if not rows:
            notes.append("metrics.jsonl has no rows yet")
    except OSError as error:
        notes.append(f"metrics.jsonl could not be read: {error.strerror}")
    except DamagedFileError as error:
        notes.append(f"metrics.jsonl could not be read: {error.why}")
    return Run(folder, config, about, tuple(rows), tuple(notes), counts)


def entries(run: Path, name: str, pattern: str = "*") -> list[Path]:
    """The entries of a run's folder; none if the folder is a link, which may lead anywhere.

    >>> entries(Path("no such run"), "episodes")
    []
    """
    folder = run / name
    return [] if folder.is_symlink() else list(folder.glob(pattern))


def content(path: Path, largest: int = LARGEST) -> bytes:
    """The bytes of a file of a run; a ValueError that names the reason if it is not shown.

    >>> content(Path("no such file"))
    Traceback (most recent call last):
    ...
    ValueError: No such file or directory
    """
    try:
        with open_plain(path) as file:
            data = file.read(largest + 1)
    except OSError as error:
        raise ValueError(str(error.strerror)) from None
    except DamagedFileError as error:
        raise ValueError(error.why) from None
    if len(data) > largest:
        raise ValueError(f"it is larger than {largest:,} bytes")
    return data


def read_json(path: Path) -> object:
    """The content of a JSON file; a ValueError that names the reason if it cannot be read.

    >>> read_json(Path("no such file.json"))
    Traceback (most recent call last):
    ...
    ValueError: No such file or directory
    """
    try:
        found: object = parse_json(path, content(path))
        return found
    except DamagedFileError as error:
        raise ValueError(error.why) from None


def _read_config(path: Path) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    try:
        data = read_json(path)
    except ValueError as error:
        return {}, {}, [f"config.json could not be read: {error}"]
    if not isinstance(data, dict):
        return {}, {}, [f"config.json contains a {type(data).__name__}, not an object"]
    run = data.get("run")
    about = {name: data[name] for name in ABOUT if name in data and name != "run"}
    about |= run if isinstance(run, dict) else {}
    settings = {name: value for name, value in data.items() if name not in ABOUT}
    return settings, about, []


def _no_run(folder: Path) -> str:
    """The error text for a path that is not a run's folder, with the runs that are near."""
    if not folder.exists():
        found = "it does not exist"
    elif not folder.is_dir():
        found = "it is a file; pass the folder that holds metrics.jsonl"
    else:
        inside = sorted(entry.name for entry in folder.iterdir())
        content = _listed(inside) if inside else "nothing"
        found = f"it contains {content}, and neither metrics.jsonl nor config.json"
    near = near_runs(folder) or find_runs(folder)
    others = [] if near else find_runs(folder.parent, depth=2)
    listed = _listed(list(map(str, near or others)))
    if near:
        hint = f"did you mean {listed}?"
    else:
        hint = f"runs near it: {listed}" if others else "there are no runs near it"
    return f"{folder} is not a run folder: {found}; {hint}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return ", ".join(names[:_FEW]) + more
