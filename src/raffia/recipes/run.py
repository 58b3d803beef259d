"""The parts of a run of EfficientZero, and how they are joined.

worlds -> collector -> replay -> windows -> targets -> learner -> parameters -> planner -> worlds
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raffia._version import __version__
from raffia.algorithms.efficientzero.actor import act, act_at_random
from raffia.algorithms.efficientzero.learner import EfficientZeroLearner, ModelFactory
from raffia.algorithms.efficientzero.planning import Planner
from raffia.algorithms.efficientzero.targets import make_batch
from raffia.functional.seeds import derive_seed, generator_for
from raffia.learner import Learner
from raffia.recipes.config import EfficientZeroRun
from raffia.recipes.evaluation import Evaluator, MakeEnv, Recording, save_tree
from raffia.recipes.parts import close_replay, compiled, make_replay, require_device
from raffia.recipes.run_folder import refuse_other_state, refuse_to_begin_anew
from raffia.search.errors import UnfitOutputError
from raffia.tensordict.tensordict import TensorDict
from raffia.train.checkpoint import Checkpoint, CheckpointError, Checkpoints
from raffia.train.collect import Act, Collector
from raffia.train.damage import Guard
from raffia.train.evaluate import Episodes
from raffia.train.loop import Ended, train
from raffia.train.metrics import PhaseClock
from raffia.train.records import Records
from raffia.train.replay_log import ReplayLog
from raffia.train.stream import OnlineStream
from raffia.train.tasks import Evaluate, Log, Save
from raffia.train.view import Status, View

SEARCHED = ("policy", "value", "sampled_actions")  # what reanalyse writes anew into the replay


@dataclass(frozen=True)
class RunResult:
    """How a run, or a sitting of it, ended.

    >>> from pathlib import Path
    >>> RunResult(Path("runs/x"), "target", 500, 2_700, 201.5, 201.5, 60.0).reason
    'target'
    """

    folder: Path
    reason: str  # "finished", "target" (a mean return was reached) or "stopped"
    update: int
    env_step: int
    mean_return: float | None  # of the latest evaluation
    best_return: float | None
    seconds: float  # over all sittings
    signal: str = ""  # that stopped it, such as "SIGTERM"


class Run:
    """A run in its folder; `go` trains from the newest checkpoint on, or from the start."""

    def __init__(
        self,
        config: EfficientZeroRun,
        folder: Path,
        view: View,
        worlds: MakeEnv,
        networks: ModelFactory | None,
    ) -> None:
        self.config, self.folder, self.view = config, folder, view
        self._stop: Callable[[], bool] = lambda: False
        self._update = 0
        require_device(config.device)
        with contextlib.ExitStack() as opened:  # closed if the run can't be made
            self.env = worlds(config.env)
            opened.callback(self.env.close)
            self.evaluator = Evaluator(config, worlds, record=config.evaluate.record != "none")
            opened.callback(self.evaluator.close)
            self.evaluator.prepare(self.env.spec)
            self._make_parts(networks)
            self.replay = make_replay(config, self.env.spec, folder)
            opened.callback(close_replay, self.replay)
            self._join_parts()
            self._opened = opened.pop_all()

    def _make_parts(self, networks: ModelFactory | None) -> None:
        config, folder = self.config, self.folder
        self.networks = EfficientZeroLearner(
            self.env.spec,
            config,
            num_updates=config.num_updates,
            model_factory=networks,
            frame_stack=config.env.frame_stack,
        )
        self.learner: Learner = compiled(self.networks) if config.compile else self.networks
        self.planner = self._make_planner()  # acts and is evaluated, with the newest weights
        self.analyst = self._make_planner()  # makes targets, with those of the target network
        self.guard = Guard(folder / "damage", seed=config.seed)
        self.clock = PhaseClock()
        self.collector = Collector(
            self.env,
            seed=config.seed,
            frame_stack=config.env.frame_stack,
            check=lambda step: self.guard.check(step, update=self._update),
        )
        self.checkpoints = Checkpoints(folder / "checkpoints", keep=config.checkpoint.keep)
        self.replay_log = ReplayLog(folder / "replay", mutable=SEARCHED)

    def _join_parts(self) -> None:
        self.stream = self._make_stream()
        self.records = Records(self.folder)
        self._wire_tasks()

    def _make_planner(self) -> Planner:
        return Planner(
            self.networks.make_model(0).to(self.config.device),
            self.env.spec,
            self.config,
            frame_stack=self.config.env.frame_stack,
            num_threads=self.config.num_threads,
        )

    def _make_stream(self) -> OnlineStream:
        collect, replay = self.config.collect, self.config.replay
        return OnlineStream(
            self.collector,
            self.replay,
            begin_turn=self._begin_turn,
            act_first=self._act_first,
            make_batch=self._make_batch,
            batch_size=replay.batch_size,
            updates_per_env_step=collect.updates_per_env_step,
            random_env_steps=collect.random_env_steps,
            num_env_steps=collect.num_env_steps,
            steps_per_turn=collect.steps_per_turn,
            clock=self.clock,
            beta=self._beta if replay.alpha else None,
        )

    def _wire_tasks(self) -> None:
        config = self.config
        self.log = Log(
            self.records,
            self.view,
            self.clock,
            Status(
                title=f"EfficientZero on {config.env.id}, seed {config.seed}",
                num_updates=config.num_updates,
                num_env_steps=config.collect.num_env_steps,
            ),
            every=min(50, max(10, config.num_updates // 100)),
            env_steps=lambda: self.stream.num_env_steps,
            ended=self.collector.take_ended,
            simulations=lambda: self.planner.num_simulations + self.analyst.num_simulations,
            extra=self._extra,
        )
        self.evaluate = Evaluate(
            self._evaluate,
            self.records,
            self.log,
            every=config.evaluate.every_env_steps,
            env_steps=lambda: self.stream.num_env_steps,
            target=config.evaluate.target_return,
            num_simulations=self.evaluator.num_simulations,
        )
        self.save = Save(
            self._try_to_save,
            every=config.checkpoint.every_updates,
            worth=self.evaluate.improved,
        )

    # -- the run

    def go(self, stop: Callable[[], bool], begun: Callable[[], None]) -> RunResult:
        """Train until the end, the target, or `stop`; `begun` is called before the first update."""
        self._stop = stop
        state = self._begin()
        begun()
        try:
            self._make_up(state)
            state, reason = train(
                self.learner,
                state,
                self.stream,
                num_updates=self.config.num_updates,
                clock=self.clock,
                check=self.guard,
                told=self.log.told,
                tasks=[self.log, self.evaluate, self.save],
                stop=stop,
            )
            if reason == "finished":
                reason = self._look_at_the_end(state)
        except Ended as ended:
            reason = ended.reason
        return self._end(state, reason)

    def _begin(self) -> TensorDict:
        found = self.checkpoints.newest(self.view.say, check=self.replay_log.check)
        state = self.networks.init(derive_seed(self.config.seed, "networks"))
        if found is None:
            refuse_to_begin_anew(self.folder, self.checkpoints.passed_over)
            if self.records.state()["rows"]:
                self.view.say("no checkpoint was saved yet: it begins anew")
            self.replay.empty()  # on disk, a run that was killed before may have left rows
            self.records.rewind({"seconds": 0.0, "rows": 0, "events": 0})
            self._write("start", state, **self._made_by())
        else:
            state = self._restore(found, like=state)
            self.view.say(f"goes on after update {found.update:,}")
            self._write("resume", state, **self._made_by())
        return state.to(self.config.device)

    def _made_by(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "torch": torch.__version__,
            "num_threads": self.config.num_threads,
        }

    def _make_up(self, state: TensorDict) -> None:
        """Evaluate if a stop broke that off, as it would have been done then."""
        if int(state["step"]) and self.evaluate.is_due:
            self.evaluate(state)
            self.save(state)

    def _look_at_the_end(self, state: TensorDict) -> str:
        """Evaluate what the run ends with; gives its reason: "stopped" if that was broken off."""
        update, env_step = int(state["step"]), self.stream.num_env_steps
        self.log.row(update, env_step)
        if self.evaluate.is_old(env_step, update):
            self.save.last = -1  # what comes of it belongs into the last checkpoint, too
            self.evaluate.now(state)
        return "stopped" if self.evaluate.is_old(env_step, update) else "finished"

    def _end(self, state: TensorDict, reason: str) -> RunResult:
        update, env_step = int(state["step"]), self.stream.num_env_steps
        if reason != "stopped":  # else the means go on after the resume
            self.log.row(update, env_step)
        if self.save.last != update:
            self._save(state)  # before it is said to have ended, or a kill between would be final
        self._write("end", state, reason=reason)
        return RunResult(
            folder=self.folder,
            reason=reason,
            update=update,
            env_step=env_step,
            mean_return=self.evaluate.latest,
            best_return=self.evaluate.best,
            seconds=self.records.seconds,
        )

    def _write(self, kind: str, state: TensorDict, **values: Any) -> None:
        update, env_step = int(state["step"]), self.stream.num_env_steps
        self.records.write(kind, update=update, env_step=env_step, values=values)

    def close(self) -> None:
        """Close worlds and files."""
        with self._opened:
            self.records.close()

    # -- playing and learning

    def _begin_turn(self, state: TensorDict) -> Act:
        self._update = int(state["step"])
        self.planner.refresh(state)
        temperature = self.config.search.temperature(self._share)

        def choose(states: TensorDict) -> TensorDict:
            draws = self._draws("act")
            with self._guarded(state, states):
                return act(
                    self.planner, states, temperature=temperature, noise=True, generator=draws
                )

        return choose

    def _act_first(self, states: TensorDict) -> TensorDict:
        return act_at_random(
            self.env.spec,
            states,
            num_sampled_actions=self.config.search.num_sampled_actions,
            generator=self._draws("act"),
        )

    def _make_batch(self, state: TensorDict, windows: TensorDict) -> TensorDict:
        targets, update = self.config.targets, int(state["step"])
        if update % targets.target_interval == 0 or not self.analyst.num_refreshed:
            self.analyst.refresh(state["target"])
        horizon = targets.horizon_share * self.config.collect.num_env_steps
        with self._guarded(state, windows):
            batch, fresh = make_batch(
                windows,
                self.analyst,
                generator=generator_for(self.config.seed, "targets", update),
                total=self.replay.storage.total,
                correction_interval=round(horizon) if targets.correct_horizon else 0,
            )
        if fresh is not None:
            self.replay.update(fresh["step_index"], fresh.exclude("step_index"))
        return batch.to(self.config.device)

    @contextlib.contextmanager
    def _guarded(self, state: TensorDict, seen: TensorDict) -> Iterator[None]:
        """A search that meets NaN stops the run as a loss does."""
        try:
            yield
        except UnfitOutputError as error:
            self.guard.searched(state, seen, str(error))

    def _draws(self, purpose: str) -> torch.Generator:
        return generator_for(self.config.seed, purpose, self.stream.num_env_steps)

    @property
    def _share(self) -> float:
        """Of the training that lies behind us, in steps of the worlds."""
        return min(1.0, self.stream.num_env_steps / max(1, self.config.collect.num_env_steps))

    def _beta(self, update: int) -> float:
        first = self.config.replay.beta
        return min(1.0, first + (1 - first) * update / max(1, self.config.num_updates))

    def _extra(self, update: int, env_step: int) -> dict[str, float]:
        return {
            "learning_rate": self.networks.learning_rate(update),
            "temperature": self.config.search.temperature(self._share),
            "replay_steps": float(len(self.replay)),
        }

    # -- evaluating and saving

    def _evaluate(self, state: TensorDict, env_step: int) -> Episodes | None:
        with self.clock.phase("evaluate"), self._guarded(state, self.collector.now):
            self.planner.refresh(state)
            recording, kind = None, self.config.evaluate.record
            if kind != "none":
                recording = Recording(
                    self.folder / "episodes",
                    lambda _: f"{env_step:09d}",
                    num=1,
                    suffix=kind,
                    say=self.view.say,
                )
            found = self.evaluator.play(
                self.planner,
                seed=derive_seed(self.config.seed, "evaluate", env_step),
                recording=recording,
                stop=self._stop,
                check=lambda said: self.guard.check(said, update=int(state["step"])),
            )
            if found is not None:
                self._keep_tree(env_step)
            return found

    def _keep_tree(self, env_step: int) -> None:
        state = self.collector.now[:1]
        try:
            save_tree(self.folder / "trees", f"{env_step:09d}", self.planner, state)
        except OSError as error:  # a full disk, of which the next save tells more
            self.view.say(f"the searched tree of step {env_step:,} was not saved: {error}")

    def _try_to_save(self, state: TensorDict) -> bool:
        try:
            self._save(state)
        except (CheckpointError, OSError) as error:
            # What is full now may have room later, and what was saved before is whole.
            self.view.say(f"update {int(state['step']):,}: {error}")
            return False
        return True

    def _save(self, state: TensorDict) -> None:
        update = int(state["step"])
        self.guard.check_state(state)
        logged = self.replay_log.files(self.replay)
        self.checkpoints.save(
            update,
            {"state": state, "stream": self.stream.state(), **logged.parts},
            {
                "evaluate": self.evaluate.state(),
                "log": self.log.state(),
                "records": self.records.state(),
                "replay": logged.extras,
            },
            score=self.evaluate.score_of(update),
        )
        self.replay_log.prune(self.checkpoints.kept())

    def _restore(self, found: Checkpoint, *, like: TensorDict) -> TensorDict:
        state = found.tensors("state")
        refuse_other_state(state, like, found.root)
        self.stream.load_state(found.tensors("stream"))
        self.replay_log.restore(found, self.replay)
        self.evaluate.load_state(found.extras["evaluate"])
        self.log.load_state(found.extras["log"])
        self.records.rewind(found.extras["records"])
        self.save.last = -1 if self.evaluate.is_due else found.update
        return state
