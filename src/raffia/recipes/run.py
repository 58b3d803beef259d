"""The parts of a run of EfficientZero, and how they are joined.

worlds -> collector -> replay -> windows -> targets -> learner -> parameters -> planner -> worlds
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from raffia.algorithms.efficientzero.actor import act, act_at_random
from raffia.algorithms.efficientzero.learner import EfficientZeroLearner, ModelFactory
from raffia.algorithms.efficientzero.planning import Planner
from raffia.algorithms.efficientzero.targets import make_batch
from raffia.functional.seeds import derive_seed, generator_for
from raffia.learner import Learner
from raffia.recipes.config import EfficientZeroRun
from raffia.recipes.evaluation import Evaluator, MakeEnv, Recording, save_tree
from raffia.recipes.parts import close_replay, compiled, make_replay, plan_of, require_device
from raffia.recipes.run_folder import refuse_other_state, refuse_to_begin_anew
from raffia.search.errors import UnfitOutputError
from raffia.tensordict.tensordict import TensorDict
from raffia.train.checkpoint import Checkpoint, Checkpoints
from raffia.train.collect import Act, Collector, EndedEpisode
from raffia.train.damage import Guard
from raffia.train.evaluate import Episodes
from raffia.train.metrics import PhaseClock
from raffia.train.replay_log import ReplayLog
from raffia.train.sitting import Kept, RunResult, Sitting
from raffia.train.stream import OnlineStream
from raffia.train.view import View

SEARCHED = ("policy", "value", "sampled_actions")  # what reanalyse writes anew into the replay


class Run:
    """EfficientZero's parts of a run in its folder; the rest of it is the `Sitting`."""

    def __init__(
        self,
        config: EfficientZeroRun,
        folder: Path,
        view: View,
        worlds: MakeEnv,
        networks: ModelFactory | None,
    ) -> None:
        self.config, self.folder, self.view = config, folder, view
        self.plan = plan_of(config)
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
            self.stream = self._make_stream()
            self.sitting = Sitting(self, folder, view)
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
        self.replay_log = ReplayLog(folder / "replay", mutable=SEARCHED)

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

    @property
    def checkpoints(self) -> Checkpoints:
        """Those of the run."""
        return self.sitting.checkpoints

    def go(self, stop: Callable[[], bool], begun: Callable[[], None]) -> RunResult:
        """Train from the newest checkpoint on, or from the start: see `Sitting.go`."""
        return self.sitting.go(stop, begun)

    def close(self) -> None:
        """Close worlds and files."""
        with self._opened:
            self.sitting.close()

    # -- what a sitting asks for

    def init(self) -> TensorDict:
        """Fresh networks, of the run's seed."""
        return self.networks.init(derive_seed(self.config.seed, "networks"))

    def begin_anew(self, passed_over: Sequence[str]) -> None:
        """On disk, a run that was killed before may have left rows."""
        remark = ". Where the replay alone is missing, they can still be evaluated"
        refuse_to_begin_anew(self.folder, passed_over, remark)
        self.replay.empty()

    def check(self, found: Checkpoint) -> None:
        """The replay lies beside the checkpoints."""
        self.replay_log.check(found)

    def restore(self, found: Checkpoint) -> TensorDict:
        """The learner's state; worlds and replay as they were."""
        state = found.tensors("state")
        refuse_other_state(state, self.init(), found.root)
        self.stream.load_state(found.tensors("stream"))
        self.replay_log.restore(found, self.replay)
        return state

    def keep(self) -> Kept:
        """Worlds, and which rows of the replay there are."""
        logged = self.replay_log.files(self.replay)
        return Kept({"stream": self.stream.state(), **logged.parts}, {"replay": logged.extras})

    def saved(self, kept: Sequence[Checkpoint]) -> None:
        """Rows of the replay that no checkpoint needs any more go."""
        self.replay_log.prune(kept)

    def take_ended(self) -> list[EndedEpisode]:
        """The episodes that have ended since this was asked."""
        return self.collector.take_ended()

    def counters(self) -> dict[str, int]:
        """Simulations of both searches."""
        return {"simulations": self.planner.num_simulations + self.analyst.num_simulations}

    def extra(self, update: int) -> dict[str, float]:
        """What a row of means tells besides."""
        return {
            "learning_rate": self.networks.learning_rate(update),
            "temperature": self.config.search.temperature(self._share),
            "replay_steps": float(len(self.replay)),
        }

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

    # -- evaluating

    def evaluate(self, state: TensorDict, stop: Callable[[], bool]) -> Episodes | None:
        """Play whole episodes; None if `stop` said so meanwhile."""
        env_step = self.stream.num_env_steps
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
                stop=stop,
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
