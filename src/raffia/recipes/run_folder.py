"""The folder of a run: its config, written once, and the claim of the one process that runs it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from raffia._version import __version__
from raffia.recipes.config import EfficientZeroRun
from raffia.tensordict.disk import write_atomically
from raffia.tensordict.tensordict import TensorDict
from raffia.train.config import ConfigError, from_json, to_json

CONFIG = "config.json"


class RunError(RuntimeError):
    """A run's folder is not as it should be; the message says what to do.

    >>> raise RunError("there is no run in runs/x")
    Traceback (most recent call last):
    ...
    raffia.recipes.run_folder.RunError: there is no run in runs/x
    """


def create_run(
    folder: Path, config: EfficientZeroRun, preset: str = "", own: Sequence[str] = ()
) -> None:
    """Make the folder of a new run; RunError if there is one already, or something else.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as there:
    ...     create_run(Path(there) / "run", EfficientZeroRun(seed=3))
    ...     read_run(Path(there) / "run").seed
    3
    """
    if (folder / CONFIG).exists():
        raise RunError(
            f"{folder} holds a run already: go on with it by `raffia resume {folder}`, or give "
            "another folder by `--run OTHER`"
        )
    if folder.exists() and (not folder.is_dir() or any(map(_is_foreign, folder.iterdir()))):
        raise RunError(f"{folder} exists and is no run: give another folder by `--run OTHER`")
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, config, preset, own)


def _is_foreign(path: Path) -> bool:
    """Whether this is more than a half-written config of a process that was killed."""
    return not (path.name.startswith(".") and path.name.endswith(".tmp"))


@contextlib.contextmanager
def given_back(folder: Path) -> Iterator[None]:
    """If a new run fails before it has begun, its folder is taken away again."""
    try:
        yield
    except BaseException:
        if folder.is_dir() and [path.name for path in folder.iterdir()] == [CONFIG]:
            (folder / CONFIG).unlink()
            folder.rmdir()
        raise


def write_config(
    folder: Path, config: EfficientZeroRun, preset: str, own: Sequence[str] = ()
) -> None:
    """Write the config, complete, with what it is run by.

    own: of "worlds" and "networks", what the caller gave, which no config can hold.
    """
    made_by = {
        "algorithm": "efficientzero",
        "preset": preset,
        "raffia": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "own": [*own],
    }
    text = json.dumps({**to_json(config), "run": made_by}, indent=2)
    write_atomically(str(folder / CONFIG), (text + "\n").encode())


def read_run(folder: str | Path) -> EfficientZeroRun:
    """The config of a run; RunError if there is none, or if it can't be read.

    >>> read_run("runs/nowhere")
    Traceback (most recent call last):
    ...
    raffia.recipes.run_folder.RunError: there is no run in runs/nowhere: it has no config.json
    """
    config, _ = _read(Path(folder))
    return config


def read_made_by(folder: Path) -> dict[str, Any]:
    """Preset and versions of a run."""
    _, made_by = _read(folder)
    return made_by


def _read(folder: Path) -> tuple[EfficientZeroRun, dict[str, Any]]:
    path = folder / CONFIG
    try:
        data = json.loads(path.read_text())
        made_by = data.pop("run")
        return from_json(EfficientZeroRun, data), made_by
    except FileNotFoundError:
        raise RunError(f"there is no run in {folder}: it has no {CONFIG}") from None
    except (ValueError, KeyError, AttributeError, ConfigError) as error:
        raise RunError(f"{path} can't be read: {error}") from error


def refuse_without_own(folder: Path, given: Sequence[str]) -> None:
    """RunError if a run was begun with worlds or networks of its own that are not given now.

    Others would do as well as these if their shapes are alike, and it would not show.
    """
    lacks = [name for name in read_made_by(folder).get("own", []) if name not in given]
    if lacks:
        call = ", ".join(f"{name}=..." for name in lacks)
        raise RunError(
            f"{folder} was begun with {' and '.join(lacks)} of its own: pass the same, "
            f"as in resume({str(folder)!r}, {call}), from the script that it was begun by"
        )


def refuse_to_begin_anew(folder: Path, passed_over: Sequence[str]) -> None:
    """RunError if there are checkpoints, of which none can be used: they would be removed.

    >>> refuse_to_begin_anew(Path("runs/x"), [])
    """
    if passed_over:
        raise RunError(
            f"none of the {len(passed_over)} checkpoints in {folder} can be gone on with, as said "
            "above. Nothing was changed: bring back what is missing, or begin another run. Where "
            "the replay alone is missing, they can still be evaluated"
        )


def refuse_other_state(state: TensorDict, like: TensorDict, where: str) -> None:
    """RunError unless a state that was saved is one of the learner that is to go on with it.

    >>> one = TensorDict(weight=torch.ones(2))
    >>> refuse_other_state(one, TensorDict(weight=torch.ones(3)), "checkpoints/7")
    Traceback (most recent call last):
    ...
    raffia.recipes.run_folder.RunError: checkpoints/7 is of other networks or another optimizer: ...
    """
    saved, wanted = _shapes(state), _shapes(like)
    differ = [key for key in {**wanted, **saved} if saved.get(key) != wanted.get(key)]
    if differ:
        key = differ[0]
        raise RunError(
            f"{where} is of other networks or another optimizer: {key} is "
            f"{saved.get(key, 'not there')} in it, and {wanted.get(key, 'not there')} here, and "
            f"{len(differ) - 1} more differ. Go on with model.*, env.* and optimizer.name as they "
            "were, and with the same networks"
        )


def _shapes(state: TensorDict) -> dict[str, list[int]]:
    return {
        key if isinstance(key, str) else ".".join(key): list(value.shape)
        for key, value in state.items(True, True)
    }


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other processes from the same run, until this one ends, however it does."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"{folder} is being run by another process: wait for it, or stop it first"
            ) from None
        yield
    finally:
        os.close(fd)
