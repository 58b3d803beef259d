"""The run that a call names, its figures without torch, and a session's first and last texts."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from raffia._version import __version__
from raffia.cli.parser import Parser, UsageError
from raffia.cli.style import call, columns, number, paint, printable, width_of
from raffia.files import DamagedFileError, is_free, parse_json
from raffia.hints import plural
from raffia.recipes.algorithm import ALGORITHMS, Algorithm, find_algorithm, recorded_algorithm
from raffia.report.folder import (
    MANIFEST,
    Run,
    RunSummary,
    find_runs,
    is_run,
    near_runs,
    read_json,
    read_key_rows,
    summarise,
)
from raffia.report.markup import duration
from raffia.train.config import ConfigError, read_config

if TYPE_CHECKING:
    from raffia.recipes import RunResult


Config = TypeVar("Config")
HOME = Path("runs")  # where runs lie unless another folder is named
STATES = {  # of runs, in other words than their names
    "empty": "nothing in it yet",
    "target": "reached its target return",
    "running": "running, or killed",
}


def run_parser(command: str, about: str, examples: Sequence[str]) -> Parser:
    """The parser of a command about one run, with the flag that chooses a checkpoint of it.

    >>> run_parser("look", "looks", []).read(["runs/a", "--checkpoint", "newest"]).checkpoint
    'newest'
    """
    parser = Parser(f"raffia {command}", about, examples)
    parser.add_argument("run", metavar="RUN", nargs="?", help="folder of the run")
    text = "best, newest, or the number of an update"
    parser.flag("--checkpoint WHICH", text, _checkpoint, "best")
    return parser


def _checkpoint(word: str) -> str:
    if word not in ("best", "newest") and not word.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{word!r} must be best, newest, or the number of an update"
        )
    return word


def add_device(parser: Parser) -> None:
    """The flag that says where an agent's networks compute.

    >>> parser = Parser("raffia look", "looks", "")
    >>> add_device(parser)
    >>> parser.read(["--device", "cuda:1"]).device
    'cuda:1'
    """
    parser.flag("--device NAME", "device of the networks, such as cuda", default="cpu")


def add_algorithm(parser: Parser) -> None:
    """The flag that names the algorithm of a run that is not an installed package.

    >>> parser = Parser("raffia look", "looks", "")
    >>> add_algorithm(parser)
    >>> parser.read(["--algorithm", "dqn.py:dqn"]).algorithm
    'dqn.py:dqn'
    """
    about = "your own algorithm: package.module:name or file.py:name"
    parser.flag("--algorithm WHERE", about, default="")


def chosen_run(
    given: str | None,
    command: str,
    fits: Callable[[RunSummary], bool] = lambda run: True,
    start: str = "raffia train efficientzero --preset cartpole",
) -> Path:
    """The folder of the run; UsageError, with existing runs, if it is not a run folder.

    fits: which runs are offered where none is given.
    start: the call that starts one, where none fits.

    >>> chosen_run("away/gone", "evaluate")
    Traceback (most recent call last):
        ...
    raffia.cli.parser.UsageError: away/gone does not exist
    """
    if given is not None and is_run(Path(given)):
        return Path(given)
    runs = sorted(find_runs(HOME), key=_age)
    if given is None:
        fit = [run for run in runs if fits(summarise(run))]
        raise UsageError(
            "which run?", *[call("raffia", command, run) for run in fit[:3]] or [start]
        )
    near = near_runs(Path(given), runs)
    problem = "holds no run" if Path(given).exists() else "does not exist"
    raise UsageError(
        f"{given} {problem}; did you mean {near[0]}?" if near else f"{given} {problem}",
        *[call("raffia", command, run) for run in near[:3]] or ["raffia list", start],
    )


def summary_line(run: RunSummary) -> str:
    """The state of a run, in half a line.

    >>> summary_line(RunSummary(Path("runs/a"), "stopped", env_step=3400, best_return=187.0))
    'stopped after 3,400 environment steps, best return 187.0'
    """
    steps = "" if run.update is None else f" after {plural(run.update, 'update')}"
    if run.env_step is not None:
        steps = f" after {plural(run.env_step, 'environment step')}"
    best = "" if run.best_return is None else f", best return {number(run.best_return)}"
    return f"{STATES.get(run.state, printable(run.state))}{steps}{best}"


def config_of(run: Path, given: str = "") -> tuple[Algorithm, Any]:
    """The algorithm and the settings of a run.

    given: the algorithm as "module:name" or "file.py:name"; nothing: as the run records.
    Raises ConfigError, with the version that wrote it, if it was another one.
    """
    path = run / "config.json"
    made_by = _made_by(path)
    algorithm: Algorithm | None = None
    try:
        if given:
            algorithm = find_algorithm(given)
        else:
            algorithm = recorded_algorithm({"algorithm": next(iter(ALGORITHMS)), **made_by})
        return algorithm, read_config(algorithm.config, path)
    except ConfigError as error:
        written_by = made_by.get("raffia", "")
        if written_by not in ("", __version__):
            raise ConfigError(
                f"{error}. The run was written by raffia {written_by}, and this is {__version__}: "
                f"pip install raffia=={written_by} can read it"
            ) from None
        if given or algorithm is None:  # nothing is wrong with the settings
            raise
        raise UsageError(
            f"{error}. The run cannot be resumed without its settings: repair {path}, or replace "
            "it by a copy, or by that of a run with the same settings. Its results can still be "
            "read:",
            call("raffia", "report", run),
        ) from None


def config_of_kind(kind: type[Config], run: Path, *others: str) -> Config:
    """The settings of a run; UsageError if it is of another algorithm than this one.

    others: calls that do with such a run what was meant.
    """
    algorithm, config = config_of(run)
    wanted = next(one for one in ALGORITHMS.values() if one.config is kind)
    if algorithm.name != wanted.name or not isinstance(config, kind):
        raise UsageError(f"{run} is not a run of {wanted.title} but of {config.title}", *others)
    return config


def _made_by(path: Path) -> dict[str, Any]:
    """The entries "run" of a run's config; empty where there are none."""
    try:
        made_by = parse_json(path, path.read_bytes()).get("run", {})
    except (OSError, DamagedFileError, AttributeError):
        return {}
    return made_by if isinstance(made_by, dict) else {}


def free_folder(wanted: Path) -> Path:
    """`wanted`, or the first of wanted-2, wanted-3 ... that does not exist.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as home:
    ...     (Path(home) / "demo").mkdir()
    ...     free_folder(Path(home) / "demo").name
    'demo-2'
    """
    number, folder = 1, wanted
    while folder.exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def refuse_taken(folder: Path, *words: str, flag: str = "--run", what: str = "run") -> None:
    """Raise UsageError if something exists there; `words` are the call, `flag` would name the
    folder.
    """
    if is_free(folder):
        return
    other = call("raffia", *words, flag, free_folder(folder))
    if is_run(folder):
        state = summary_line(summarise(folder))
        raise UsageError(f"{folder} already holds a run: {state}", resume_call(folder), other)
    if (folder / MANIFEST).is_file():
        raise UsageError(f"{folder} already holds a sweep", resume_call(folder), other)
    raise UsageError(f"{folder} already exists and is not a {what} folder", other)


def resume_call(folder: Path) -> str:
    """The call that continues the run or the sweep of a folder.

    >>> resume_call(Path("sweeps/lr"))
    'raffia resume sweeps/lr'
    """
    if is_run(folder):
        return read_key_rows(folder).call("resume")
    try:
        manifest: Any = read_json(folder / MANIFEST)
        about = {"reference": manifest["reference"]}
    except (ValueError, KeyError, TypeError):  # damaged
        about = {}
    return Run(folder, about=about).call("resume")


def _age(run: Path) -> float:
    """The age of a run in seconds, to sort the one written last first."""
    newest = run / "metrics.jsonl"
    return -newest.stat().st_mtime if newest.exists() else 0.0


def print_start(config: Any, folder: Path, remark: str = "") -> None:
    """Print what starts, before seconds go into loading torch.

    >>> from raffia.recipes.efficientzero.presets import PRESETS
    >>> print_start(PRESETS["smoke"], Path("runs/a"))
    EfficientZero on CartPole-v1, seed 0, in runs/a; Ctrl-C saves and stops
    """
    what = f"{config.title}, seed {config.seed}, in {folder}{remark}"
    print(f"{printable(what)}; Ctrl-C saves and stops", flush=True)


def require_device(name: str, is_here: bool = True) -> None:
    """Raise UsageError if torch cannot compute on a device.

    is_here: on this machine; else only the name is looked at.

    >>> require_device("cpu")
    >>> require_device("gpu")
    Traceback (most recent call last):
        ...
    raffia.cli.parser.UsageError: torch cannot use --device gpu: no device has this name
    """
    from raffia.recipes.devices import device_trouble

    if why := device_trouble(name, is_here):
        raise UsageError(f"torch cannot use --device {name}: {why}", "raffia doctor")


def end_line(result: RunResult) -> str:
    """The line at a session's end: reason, length, result."""
    step = result.env_step
    steps = "" if step is None else f"{plural(step, 'environment step')}, "
    updates = f"{plural(result.update, 'update')} in {duration(result.seconds)}"
    best = "" if result.best_return is None else f"; best mean return {number(result.best_return)}"
    return f"{result.folder} {STATES.get(result.reason, result.reason)}: {steps}{updates}{best}"


def exit_status(result: RunResult) -> int:
    """0, or 128 plus the number of the signal that stopped the run, as shells report it."""
    if result.reason != "stopped":
        return 0
    return 128 + signal.Signals[result.signal].value


def print_next(calls: Sequence[Sequence[str]]) -> None:
    """Print calls to copy, with what each does."""
    print(paint("next", "bold", sys.stdout))
    print(columns(calls, width=width_of(sys.stdout)))
