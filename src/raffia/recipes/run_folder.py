"""The folder of a run: its config, written once, and the claim of the one process that runs it."""

from __future__ import annotations

import contextlib
import functools
import json
import platform
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from raffia._version import __version__
from raffia.files import (
    DamagedFileError,
    is_free,
    locked,
    make_folder,
    parse_json,
    write_atomically,
)
from raffia.recipes.algorithm import ALGORITHMS, Algorithm, flag_of, recorded_algorithm
from raffia.train.checkpoint import Checkpoint, Checkpoints
from raffia.train.config import ConfigError, from_json, to_json
from raffia.train.experiment import RunError

CONFIG, ROWS = "config.json", "metrics.jsonl"
TOKENS, TOKENIZER = "tokens", "tokenizer"  # folders that a run of ILQL makes of its data
LANGUAGE_MODEL = "language_model"  # ... and of the model that it goes on from
Config = TypeVar("Config")


def create_run(
    folder: Path,
    config: Any,
    preset: str = "",
    own: Sequence[str] = (),
    algorithm: Algorithm | None = None,
) -> None:
    """Make the folder of a new run.

    algorithm: whose settings these are; None: one of `ALGORITHMS`, by their class.
    Raises RunError if there is a run already, or something else.

    >>> import tempfile
    >>> from raffia.recipes.efficientzero.config import EfficientZeroRun
    >>> with tempfile.TemporaryDirectory() as there:
    ...     create_run(Path(there) / "run", EfficientZeroRun(seed=3))
    ...     read_run(Path(there) / "run").seed
    3
    """
    _refuse_a_second(folder)
    if not is_free(folder):
        raise RunError(
            f"{folder} already exists and is not a run folder: give another folder (on the "
            "command line --run OTHER)"
        )
    algorithm = algorithm or algorithm_of(config)
    text = _config_text(config, preset, own, algorithm)  # before there is a folder: it may fail
    make_folder(folder)
    with claimed(folder):
        _refuse_a_second(folder)  # of a process that came here at the same time
        for left in folder.iterdir():  # a half-written config of a process that was killed
            left.unlink()
        write_atomically(str(folder / CONFIG), text)


def _refuse_a_second(folder: Path) -> None:
    if (folder / CONFIG).exists():
        raise RunError(
            f"{folder} already holds a run: resume it with `raffia resume {folder}`, or give "
            "another folder (on the command line --run OTHER)"
        )


@contextlib.contextmanager
def given_back(folder: Path) -> Iterator[None]:
    """Remove the folder of a new run, which is claimed, if the run fails before it has begun."""
    try:
        yield
    except BaseException:
        if _has_not_begun(folder):
            shutil.rmtree(folder, ignore_errors=True)  # the error that is raised tells more
        raise


def _has_not_begun(folder: Path) -> bool:
    """Whether a folder holds a run's config and nothing written after the run's first row."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    made = {CONFIG, ROWS, TOKENS, TOKENIZER, LANGUAGE_MODEL, "replay"}
    others = [name for name in names - made if not name.startswith("events.out.")]
    rows = folder / ROWS
    return CONFIG in names and not others and not (rows.exists() and rows.stat().st_size)


def write_config(
    folder: Path,
    config: Any,
    preset: str,
    own: Sequence[str],
    algorithm: Algorithm,
) -> None:
    """Write the complete config, with the algorithm and the versions that run it.

    own: of "make_env" and "networks", what the caller gave, which no config can hold.
    """
    write_atomically(str(folder / CONFIG), _config_text(config, preset, own, algorithm))


def _config_text(config: Any, preset: str, own: Sequence[str], algorithm: Algorithm) -> bytes:
    made_by = {
        "algorithm": algorithm.name,
        **({"reference": algorithm.reference} if algorithm.reference else {}),
        "preset": preset,
        "raffia": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "own": [*own],
    }
    text = json.dumps({**to_json(config), "run": made_by}, indent=2)
    return (text + "\n").encode()


def algorithm_of(config: object) -> Algorithm:
    """The algorithm in `ALGORITHMS` that a config belongs to.

    Raises TypeError, with the call that was meant, for what is not a config of one.

    >>> from raffia.recipes.ilql.config import ILQLRun
    >>> algorithm_of(ILQLRun()).name
    'ilql'
    >>> algorithm_of("cartpole")
    Traceback (most recent call last):
    ...
    TypeError: a run needs settings, but 'cartpole' is a name: pass PRESETS['cartpole'], from
    raffia.recipes
    """
    for one in ALGORITHMS.values():
        if type(config) is one.config:
            return one
    if isinstance(config, str):
        presets = "ILQL_PRESETS" if config in ALGORITHMS["ilql"].presets else "PRESETS"
        raise TypeError(
            f"a run needs settings, but {config!r} is a name: pass {presets}[{config!r}], from "
            "raffia.recipes"
        )
    kinds = " or ".join(f"raffia.recipes.{one.config.__name__}" for one in ALGORITHMS.values())
    raise TypeError(
        f"config is a {type(config).__name__}, but must be a {kinds}; with settings of your own "
        "algorithm, pass that, too: algorithm=ALGORITHM"
    )


def require_config(config: object, algorithm: Algorithm) -> None:
    """TypeError for what is not a config of the algorithm.

    >>> require_config({"seed": 1}, ALGORITHMS["ilql"])
    Traceback (most recent call last):
    ...
    TypeError: config is a dict, but ilql has a ILQLRun
    """
    if type(config) is not algorithm.config:
        raise TypeError(
            f"config is a {type(config).__name__}, but {algorithm.name} has a "
            f"{algorithm.config.__name__}"
        )


def read_run(folder: str | Path, algorithm: Algorithm | None = None) -> Any:
    """The config of a run.

    algorithm: the one that the run is of; None: as the run records.
    Raises RunError if there is none, or if it can't be read.

    >>> read_run("runs/nowhere")
    Traceback (most recent call last):
    ...
    raffia.train.experiment.RunError: runs/nowhere is not a run folder: it has no config.json
    """
    return read_record(folder, algorithm).config


def read_run_of(kind: type[Config], folder: str | Path) -> Config:
    """Read a run whose algorithm is known; RunError if it is of another one.

    >>> import tempfile
    >>> from raffia.recipes.efficientzero.config import EfficientZeroRun
    >>> with tempfile.TemporaryDirectory() as there:
    ...     create_run(Path(there) / "run", EfficientZeroRun(seed=3))
    ...     read_run_of(EfficientZeroRun, Path(there) / "run").seed
    3
    """
    found = read_record(folder)
    if not isinstance(found.config, kind):
        raise RunError(_of_another(folder, found.algorithm.name))
    return found.config


def _of_another(folder: str | Path, name: str) -> str:
    return f"{folder} is a run of {name}: the functions of raffia.recipes serve any algorithm"


class RunRecord(NamedTuple):
    """The contents of a run's config file."""

    algorithm: Algorithm
    config: Any
    made_by: dict[str, Any]  # preset, versions, and what the caller gave


def read_record(folder: str | Path, algorithm: Algorithm | None = None) -> RunRecord:
    """The algorithm, config and origin of the run in a folder; errors as of `read_run`.

    >>> import tempfile
    >>> from raffia.recipes.efficientzero.config import EfficientZeroRun
    >>> with tempfile.TemporaryDirectory() as there:
    ...     create_run(Path(there) / "run", EfficientZeroRun())
    ...     read_record(Path(there) / "run").algorithm.title
    'EfficientZero'
    """
    folder = Path(folder)
    path = folder / CONFIG
    try:
        data = parse_json(path, path.read_bytes())
        made_by = data.pop("run")
        if algorithm is not None and (recorded := made_by["algorithm"]) != algorithm.name:
            raise RunError(_of_another(folder, recorded))
        known = algorithm or recorded_algorithm(made_by)
        return RunRecord(known, from_json(known.config, data), made_by)
    except FileNotFoundError:
        raise RunError(f"{folder} is not a run folder: it has no {CONFIG}") from None
    except DamagedFileError as error:
        raise RunError(f"{path} cannot be read: {error.why}") from error
    except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error


def refuse_without_own(
    folder: Path, given: Sequence[str], algorithm: Algorithm | None = None
) -> None:
    """Raise RunError if a run was started with custom environments or networks that are not given
    now, and ConfigError if its settings name such that may come from elsewhere.

    Others would do as well as these if their shapes are equal, and nobody would notice.
    """
    found = read_record(folder, algorithm)
    lacks = [name for name in own_parts(found.made_by) if name not in given]
    if lacks:
        call = ", ".join(f"{name}=..." for name in lacks)
        flags = " ".join(f"{flag_of(name)} file.py:name" for name in lacks)
        raise RunError(
            f"{folder} was started with custom {' and '.join(lacks)}: pass the same, as in "
            f"resume({str(folder)!r}, {call}), from the script that started it; or name them in "
            f"the file that has them: {flags}"
        )
    others = [part for part, is_needed in found.algorithm.parts.items() if not is_needed]
    found.algorithm.refuse_unnamed(found.config, [*given, *others])


def own_parts(made_by: Mapping[str, Any]) -> list[str]:
    """The parts of a run that were given to `train` and that no setting names.

    >>> own_parts({"own": ["networks"]})
    ['networks']
    """
    return ["make_env" if name == "worlds" else name for name in made_by.get("own", [])]


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[str]:
    """Keep other processes from the same run until this process ends.

    Yields a warning where the file system has no locks, so that no other is excluded; else nothing.
    """
    with contextlib.ExitStack() as stack:
        try:
            missing = stack.enter_context(locked(folder, wait=False))
        except BlockingIOError:
            raise RunError(
                f"{folder} is being run by another process: wait for it, or stop it first"
            ) from None
        yield missing and (
            f"{folder}: {missing}. Nothing prevents a second process from running here: make sure "
            "that there is only one"
        )


def refuse_without_checkpoints(folder: Path) -> None:
    """Raise RunError if a run has ended and yet none of its checkpoints exists.

    To begin it again would take away the rows that it left.

    >>> refuse_without_checkpoints(Path("no such run"))
    """
    if has_ended(folder) and not Checkpoints(folder / "checkpoints").has_any():
        raise RunError(_gone(folder))


def has_ended(folder: Path) -> bool:
    """Whether a session of a run came to its end, finished or stopped: then it was saved.

    >>> has_ended(Path("no such run"))
    False
    """
    try:
        with open(folder / ROWS, "rb") as rows:
            return any(row.startswith(b'{"kind": "end"') for row in rows)
    except FileNotFoundError:
        return False


def _gone(folder: Path) -> str:
    return (
        f"the checkpoints of {folder} are gone: restore them, or train again, for example with "
        f"`raffia train {read_record(folder).made_by['algorithm']} --config {folder / CONFIG} "
        f"--run {folder}-new`"
    )


def visible_here(folder: str | Path) -> Path:
    """The folder that a worker on any machine reads; RunError if this machine does not see it.

    >>> visible_here("no/such/folder")
    Traceback (most recent call last):
    ...
    raffia.train.experiment.RunError: the machine ... does not see the folder no/such/folder, ...
    """
    if not Path(folder).is_dir():
        raise RunError(
            f"the machine {platform.node()} does not see the folder {folder}, which its workers "
            "read: put it on a file system that all machines have under the same path"
        )
    return Path(folder)


def is_saved(folder: Path, update: int, warn: Callable[[str], object]) -> bool:
    """Whether the newest whole checkpoint is of this update; `warn` is called with a text
    about each damaged one.

    >>> is_saved(Path("no such run"), 0, print)
    False
    """
    newest = Checkpoints(folder / "checkpoints").newest(warn)
    return newest is not None and newest.update >= update


def find_checkpoint(folder: Path, which: str | int) -> Checkpoint:
    """The "best" or the "newest" checkpoint of a run, or one by its number; RunError if none is."""
    checkpoints = Checkpoints(folder / "checkpoints")
    if which in ("best", "newest"):
        warn = functools.cache(warnings.warn)  # of each damaged one once
        best = checkpoints.best(warn) if which == "best" else None
        found = best or checkpoints.newest(warn)
        if found is None and checkpoints.passed_over:
            raise RunError(f"all checkpoints of {folder} are damaged")
        if found is None and has_ended(folder):
            raise RunError(_gone(folder))
        if found is None:
            raise RunError(
                f"{folder} has no checkpoint yet: `raffia resume {folder}` continues the run"
            )
        return found
    available = {checkpoint.update: checkpoint for checkpoint in checkpoints.available()}
    which = str(which)
    if not which.isdecimal() or int(which) not in available:
        raise RunError(
            f"{folder} has no checkpoint {which!r}; there are 'best', 'newest' and "
            f"{', '.join(map(str, available)) or 'no numbers'}"
        )
    return available[int(which)]
