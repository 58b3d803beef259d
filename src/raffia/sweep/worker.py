"""`RunRole`: a worker that trains runs of a sweep, each begun or resumed by its folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from raffia.hints import error_text
from raffia.recipes.algorithm import Algorithm, find_algorithm
from raffia.recipes.api import resume, train
from raffia.recipes.run_folder import CONFIG, read_run, visible_here
from raffia.sweep.manifest import RUNS, Manifest, read_manifest
from raffia.sweep.plan import PlannedRun
from raffia.tensordict.byte_tensors import bytes_to_tensor, tensor_to_bytes
from raffia.tensordict.tensordict import TensorDict
from raffia.train.view import Status

STOP = ".stop"  # in a sweep's folder: names the session whose runs are to save and stop
_EVERY = 0.5  # seconds between looks at it


class RunRole:
    """A worker of a sweep: a task is the number of a run, the answer is how the run ended, as JSON.

    config: JSON with `folder`, `reference`, `session` and `devices`.
    A run that fails is an answer, too: only what hinders every run is an error.

    >>> RunRole('{"folder": "sweeps/elsewhere"}', 0)
    Traceback (most recent call last):
    ...
    raffia.train.experiment.RunError: the machine ... does not see the folder sweeps/elsewhere, ...
    """

    def __init__(self, config: str, index: int) -> None:
        given = json.loads(config)
        self.folder = visible_here(given["folder"])
        self.manifest = read_manifest(self.folder)
        self.algorithm = sweep_algorithm(self.manifest, given["reference"])
        self.device = (given["devices"] or [""])[index % max(1, len(given["devices"]))]
        self.stop = Stopped(self.folder / STOP, given["session"])

    def load(self, state: TensorDict) -> None:
        """Load nothing: no state outlives a run."""

    def do(self, task: TensorDict, weights: TensorDict | None) -> TensorDict:
        """Train the run of this number until it ends."""
        if int(task["run"]) >= len(self.manifest.runs):  # it was suggested since
            self.manifest = read_manifest(self.folder)
        run = self.manifest.runs[int(task["run"])]
        ended = train_one(
            self.manifest, run, self.folder / RUNS, self.algorithm, self.device, self.stop
        )
        return TensorDict(json=bytes_to_tensor(json.dumps(ended).encode()))


def sweep_algorithm(manifest: Manifest, reference: str) -> Algorithm:
    """The algorithm from where the leader found it, under the name that runs record."""
    if not reference:
        return manifest.find_algorithm()
    return replace(find_algorithm(reference), reference=manifest.reference)


def answer_of(answer: TensorDict) -> dict[str, Any]:
    """The end of a run, from a worker's answer.

    >>> answer_of(TensorDict(json=bytes_to_tensor(b'{"reason": "finished"}')))
    {'reason': 'finished'}
    """
    found: dict[str, Any] = json.loads(tensor_to_bytes(answer["json"]))
    return found


def train_one(
    manifest: Manifest,
    run: PlannedRun,
    home: Path,
    algorithm: Algorithm,
    device: str = "",
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Start a run or resume it; returns `reason`, `signal` and `messages`.

    The reason is "failed" if the run ended in an error, whose text is `error`.
    """
    folder, view = home / run.name, _Quiet()
    try:
        is_started = (folder / CONFIG).exists()
        config = planned = manifest.config_of(run, algorithm)
        if is_started:
            config = read_run(folder, algorithm)
        device = device_of_worker(manifest.engine.name, device or config.device)
        if device != config.device:
            config = replace(config, device=device)
        more: dict[str, Any] = {"algorithm": algorithm, "view": view, "stop": stop}
        more |= algorithm.named_outside(planned)  # for which the sweep's leader has vouched
        if is_started:
            result = resume(folder, config=config, **more)
        else:
            result = train(config, folder, preset=manifest.preset, **more)
    except Exception as error:
        text = error_text(error)
        return {"reason": "failed", "error": text, "signal": "", "messages": view.messages}
    return {"reason": result.reason, "signal": result.signal, "messages": view.messages}


def device_of_worker(engine: str, device: str) -> str:
    """The device by the name that it has for a worker: on Ray the one card that it sees.

    >>> device_of_worker("ray", "cuda:3"), device_of_worker("process", "cuda:3")
    ('cuda', 'cuda:3')
    """
    return "cuda" if engine == "ray" and device.startswith("cuda") else device


class Stopped:
    """Whether the leader has asked the runs of a session to stop.

    >>> Stopped(Path("no such file"), "a")()
    False
    """

    def __init__(self, path: Path, session: str) -> None:
        self.path, self.session = path, session
        self._due, self._found = 0.0, False

    def __call__(self) -> bool:
        """Look at the file now and then."""
        if not self._found and time.monotonic() >= self._due:
            self._due = time.monotonic() + _EVERY
            try:
                self._found = self.path.read_text() == self.session
            except OSError:
                self._found = False
        return self._found


class _Quiet:
    """Shows nothing, and keeps what is worth a line."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def show(self, status: Status) -> None:
        pass

    def message(self, line: str) -> None:
        self.messages.append(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass
