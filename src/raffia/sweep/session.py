"""`SweepSession`: the runs of a sweep that are not done, spread over the workers of an engine."""

from __future__ import annotations

import contextlib
import json
import secrets
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from raffia.distributed.engine import Engine, InlineEngine, Needs, RoleError, Workers
from raffia.distributed.pool import Pool
from raffia.files import write_atomically
from raffia.lazy import absolute
from raffia.recipes.algorithm import Algorithm, flag_of
from raffia.recipes.run_folder import claimed, is_saved
from raffia.recipes.workers import engine_for, make_engine
from raffia.report.folder import RunSummary, is_run, summarise
from raffia.sweep.manifest import RUNS, Manifest, read_manifest, write_manifest
from raffia.sweep.progress import Progress, SweepView
from raffia.sweep.search import next_trial
from raffia.sweep.worker import STOP, answer_of
from raffia.tensordict.tensordict import TensorDict
from raffia.train.config import ConfigError
from raffia.train.signals import stop_on_signals

ROLE = "raffia.sweep.worker:RunRole"
DONE = ("finished", "target")
_PAUSE = 0.2  # seconds that an answer is waited for


@dataclass(frozen=True)
class SweepResult:
    """The state of each run when a session of a sweep ends.

    >>> SweepResult(Path("sweeps/lr"), {"0": "finished", "1": "failed"}).failed
    ['1']
    """

    folder: Path
    states: Mapping[str, str]  # by run: "finished", "target", "failed", "stopped" or "waiting"
    signal: str = ""  # that stopped the session, such as "SIGINT"

    @property
    def failed(self) -> list[str]:
        """The runs that ended in an error."""
        return [name for name, state in self.states.items() if state == "failed"]


def make_sweep_engine(
    manifest: Manifest, algorithm: Algorithm, message: Callable[[str], None]
) -> Engine:
    """Make the engine of a sweep, after a check that it can be reached and has room for the
    workers.

    Raises what `raffia.recipes.workers.make_engine` and `Engine.require` raise.

    >>> from raffia.recipes.algorithm import ALGORITHMS
    >>> from raffia.recipes.scale_config import EngineConfig
    >>> from raffia.sweep.plan import PlannedRun
    >>> ilql, one = ALGORITHMS["ilql"], PlannedRun("0", {}, 0)
    >>> here = EngineConfig(name="inline")
    >>> made = Manifest.of(ilql, ilql.presets["ilql-smoke"], [one], engine=here)
    >>> type(make_sweep_engine(made, ilql, print)).__name__
    'InlineEngine'
    """
    num = 1 if manifest.engine.name == "inline" else manifest.workers
    workers = Workers(ROLE, min(num, manifest.num_runs), _needs(manifest, algorithm))
    remark = "A sweep has --workers with num_threads CPUs each, and with --devices one GPU each."
    return engine_for(manifest.engine, [workers], message, remark=remark)


def room_of(manifest: Manifest, algorithm: Algorithm, num_cores: int) -> int:
    """The number of runs that have room at the same time, at least 1.

    num_cores: of this machine; of a Ray cluster that is elsewhere its machines are asked.

    >>> from raffia.recipes.algorithm import ALGORITHMS
    >>> from raffia.sweep.plan import PlannedRun
    >>> ilql, one = ALGORITHMS["ilql"], PlannedRun("0", {"num_threads": 2}, 0)
    >>> room_of(Manifest.of(ilql, ilql.presets["ilql-smoke"], [one]), ilql, num_cores=7)
    3
    """
    needs = _needs(manifest, algorithm)
    if manifest.engine.name == "ray" and manifest.engine.address:
        with contextlib.closing(make_engine(manifest.engine)) as engine:
            return max(1, engine.room_for(needs))
    fit = num_cores // int(needs.cpus)
    if manifest.engine.name == "ray" and needs.gpus:  # each run has a card of its own there
        fit = min(fit, torch.cuda.device_count())
    return max(1, fit)


def _needs(manifest: Manifest, algorithm: Algorithm) -> Needs:
    """The resources that each run needs."""
    configs = manifest.configs(algorithm)
    devices = [*manifest.devices, *[config.device for config in configs]]
    on_card = any(device.startswith("cuda") for device in devices)
    cpus = max(config.num_threads for config in configs)
    return Needs(cpus=float(max(1, cpus)), gpus=1.0 if on_card else 0.0)


class SweepSession:
    """A session of a sweep: finished runs stay as they are, the others are begun or resumed.

    engine: instead of the one that the manifest names; the session ends it.
    trusted: names of your own environments and networks in the manifest, which it may import;
        ConfigError without them. Their files must lie where they lay when the sweep was planned.
    Whoever is killed, worker or leader: the next session, or the next worker, resumes the run.

    >>> def run(folder: Path, algorithm: Algorithm) -> list[str]:
    ...     return SweepSession(folder, algorithm).run().failed
    """

    def __init__(
        self,
        folder: str | Path,
        algorithm: Algorithm,
        *,
        view: SweepView | None = None,
        engine: Engine | None = None,
        trusted: Collection[str] = (),
    ) -> None:
        self.folder, self.algorithm = Path(folder).resolve(), algorithm
        self.shown_folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        trusted = [absolute(name) for name in trusted]
        for part, names in self.manifest.named_outside(algorithm).items():
            if any(name not in trusted for name in names):
                raise ConfigError(
                    f"its {algorithm.names[part]} is {' or '.join(names)}, which is not part of an "
                    f"installed package. If you trust it, name it: {flag_of(part)} "
                    f"{','.join(names)}, in Python SweepSession(..., trusted={names})"
                )
        self.view = view or SweepView()
        self._engine = engine
        self._began = time.monotonic()
        self._session = secrets.token_hex(8)
        self._states: dict[str, str] = {}
        self._due = 0.0
        self._seconds: dict[str, float] = {}  # of runs that are done

    def run(self) -> SweepResult:
        """Run all that is not done, until it is, or until a signal to stop."""
        with (
            claimed(self.folder),
            stop_on_signals() as signals,
            contextlib.closing(
                self._engine or make_sweep_engine(self.manifest, self.algorithm, self.view.message)
            ) as engine,
            self.view,
        ):
            signals.announce = lambda text: self.view.message(
                f"{signals.name}: all runs save and stop; a second signal stops immediately"
            )
            waiting: deque[int] = deque()
            for index, run in enumerate(self.manifest.runs):
                is_done = self._is_done(self.folder / RUNS / run.name)
                self._states[run.name] = is_done or "waiting"
                if not is_done:
                    waiting.append(index)
            waiting.extend(self._suggested())
            signal = self._spread(waiting, engine, lambda: signals.name) if waiting else ""
        return SweepResult(self.shown_folder, dict(self._states), signal)

    def _spread(self, waiting: deque[int], engine: Engine, asked: Any) -> str:
        """Let the workers do the runs; returns the signal that ended the sweep, or ""."""
        manifest, is_inline = self.manifest, isinstance(engine, InlineEngine)
        most = len(waiting) if manifest.search is None else manifest.workers
        num_workers = 1 if is_inline else min(manifest.workers, most)
        config = {
            "folder": str(self.folder),
            "reference": absolute(self.algorithm.reference),
            "session": self._session,
            "devices": manifest.devices,
        }
        pool = Pool(
            engine,
            ROLE,
            json.dumps(config),
            num_workers,
            needs=_needs(manifest, self.algorithm),
            max_restarts=manifest.engine.max_restarts,
            patience=manifest.engine.patience_seconds,
        )
        key, signal, is_sent = 0, "", False
        at_work: dict[int, tuple[int, int]] = {}  # by worker: key and number of the run
        while at_work or (waiting and not signal):
            signal = signal or asked()
            if signal and not is_sent:
                is_sent = True
                write_atomically(self.folder / STOP, self._session.encode())
            for worker in range(num_workers):
                if worker not in at_work and waiting and not signal:
                    at_work[worker] = key, waiting.popleft()
                    self._states[self._name(at_work[worker][1])] = "running"
                    pool.ask(worker, key, TensorDict(run=torch.tensor(at_work[worker][1])))
                    key += 1
            self._show()
            for worker, (of, index) in list(at_work.items()):
                ended = self._ended(pool, worker, of, _PAUSE / len(at_work))
                if ended is not None:
                    del at_work[worker]
                    self._note(self._name(index), ended)
                    waiting.extend(self._suggested())
                    if is_inline and ended["reason"] == "stopped":
                        signal = signal or ended["signal"]
        (self.folder / STOP).unlink(missing_ok=True)
        return signal

    def _name(self, index: int) -> str:
        return self.manifest.runs[index].name

    def _suggested(self) -> list[int]:
        """The numbers of runs that a search plans now: their trials follow from those that ended.

        Scores are reported in the order of the trials, and saved with what follows from them.
        """
        search, first = self.manifest.search, len(self.manifest.runs)
        if search is None:
            return []
        manifest, num = self.manifest, len(search.seeds)
        scores = list(search.scores)
        while len(scores) * num < first:
            names = [run.name for run in manifest.runs[len(scores) * num : (len(scores) + 1) * num]]
            if any(self._states[name] not in (*DONE, "failed") for name in names):
                break
            of_runs = [self._score(name) for name in names]
            known = [score for score in of_runs if score is not None]
            scores.append(statistics.fmean(known) if len(known) == num else None)
        search = replace(search, scores=tuple(scores))
        manifest = replace(manifest, search=search)
        while search.may_suggest(len(manifest.runs) // num):
            manifest = manifest.with_runs(next_trial(search, manifest.runs), self.algorithm)
        if manifest != self.manifest:
            self.manifest = manifest
            write_manifest(self.folder, manifest)
        for run in manifest.runs[first:]:
            self._states[run.name] = "waiting"
        return list(range(first, len(manifest.runs)))

    def _score(self, name: str) -> float | None:
        """The score that a search maximises: a run's newest mean return, or minus its loss."""
        found = None if self._states[name] == "failed" else self._summary(name)
        if found is None or found.last_return is not None:
            return None if found is None else found.last_return
        return None if found.last_loss is None else -found.last_loss

    def _ended(self, pool: Pool, worker: int, key: int, seconds: float) -> dict[str, Any] | None:
        try:
            answer = pool.try_to_take(worker, key, seconds)
        except RoleError as error:  # its process was lost again and again, or could not begin
            pool.drop(worker)
            return {"reason": "failed", "error": str(error), "signal": "", "messages": []}
        return None if answer is None else answer_of(answer)

    def _note(self, name: str, ended: Mapping[str, Any]) -> None:
        """Tell the end of a run, and keep its error in the manifest."""
        self._states[name] = ended["reason"]
        for line in ended["messages"]:
            self.view.message(f"{name}: {line}")
        error = ended.get("error", "")
        self.view.message(f"{name}: {ended['reason']}{f': {error}' if error else ''}")
        errors = {key: text for key, text in self.manifest.errors.items() if key != name}
        errors |= {name: error} if error else {}
        if errors != self.manifest.errors:
            self.manifest = replace(self.manifest, errors=errors)
            write_manifest(self.folder, self.manifest)

    def _is_done(self, run: Path) -> str:
        """How a run ended, if it needs nothing more."""
        if not is_run(run):
            return ""
        found = summarise(run)
        is_whole = found.state in DONE and is_saved(run, found.update or 0, self.view.message)
        return found.state if is_whole else ""

    # -- progress

    def _show(self) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + self.view.every_seconds
        names = [name for name, state in self._states.items() if state == "running"]
        found = [(name, self._summary(name)) for name in names]
        states = list(self._states.values())
        progress = Progress(
            num_runs=self.manifest.num_runs,
            num_done=sum(state in DONE for state in states),
            num_failed=states.count("failed"),
            running=found,
            seconds=now - self._began,
            seconds_left=self._seconds_left(),
        )
        self.view.show(progress)

    def _summary(self, name: str) -> RunSummary | None:
        run = self.folder / RUNS / name
        return summarise(run) if is_run(run) else None

    def _seconds_left(self) -> float | None:
        """The seconds left at the pace of the runs that have ended; None while none has."""
        whole, left = [], float(self.manifest.num_runs - len(self.manifest.runs))
        for run in self.manifest.runs:
            state = self._states[run.name]
            if state in DONE:
                whole += [self._seconds_of_done(run.name)]
            elif state == "running":
                found = self._summary(run.name)
                fraction = 0.0 if found is None else self._fraction(run, found)
                left += 1.0 - fraction
                if found is not None and found.seconds and fraction > 0:
                    whole.append(found.seconds / fraction)
            elif state == "waiting":
                left += 1.0
        if not whole:
            return None
        return left * sum(whole) / len(whole) / max(1, self.manifest.workers)

    def _seconds_of_done(self, name: str) -> float:
        if name not in self._seconds:
            found = self._summary(name)
            self._seconds[name] = (found.seconds if found else None) or 0.0
        return self._seconds[name]

    def _fraction(self, run: Any, found: RunSummary) -> float:
        config = self.manifest.config_of(run, self.algorithm)
        length = self.algorithm.length_of(config)
        done = found.env_step if "env_step" in self.algorithm.length else found.update
        if getattr(config, "is_offline", False):
            length, done = config.num_updates, found.update
        return min(1.0, (done or 0) / length) if length else 0.0
