"""The folder of a run: its config, written once, and the claim of the one process that runs it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from raffia._version import __version__
from raffia.recipes.config import EfficientZeroRun
from raffia.tensordict.disk import write_atomically
from raffia.train.config import ConfigError, from_json, to_json

CONFIG = "config.json"


class RunError(RuntimeError):
    """A run's folder is not as it should be; the message says what to do.

    >>> raise RunError("there is no run in runs/x")
    Traceback (most recent call last):
    ...
    raffia.recipes.run_folder.RunError: there is no run in runs/x
    """


def create_run(folder: Path, config: EfficientZeroRun, preset: str = "") -> None:
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
    write_config(folder, config, preset)


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


def write_config(folder: Path, config: EfficientZeroRun, preset: str) -> None:
    """Write the config, complete, with what it is run by."""
    made_by = {
        "algorithm": "efficientzero",
        "preset": preset,
        "raffia": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
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
