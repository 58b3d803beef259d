"""The parts of a run of EfficientZero, and how they are joined.

worlds -> collector -> replay -> windows -> targets -> learner -> parameters -> planner -> worlds
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from raffia.algorithms.efficientzero.actor import act, act_at_random
from raffia.algorithms.efficientzero.learner import EfficientZeroLearner, ModelFactory
from raffia.algorithms.efficientzero.planning import Planner
from raffia.algorithms.efficientzero.stacked import StackedPlanner
from raffia.algorithms.efficientzero.targets import make_batch
from raffia.functional.seeds import derive_seed, generator_for
from raffia.learner import Learner, step_of
from raffia.recipes.config import EfficientZeroRun
from raffia.recipes.evaluation import Evaluator, MakeEnv, Recording, save_tree
from raffia.recipes.members import Members
from raffia.recipes.parts import close_replay, compiled, make_replay, plan_of, require_device
from raffia.recipes.run_folder import refuse_other_state, refuse_to_begin_anew
from raffia.search.errors import UnfitOutputError
from raffia.tensordict.stack import stack
from raffia.tensordict.tensordict import TensorDict
from raffia.train.checkpoint import Checkpoint, Checkpoints
from raffia.train.collect import Act, Collector, EndedEpisode
from raffia.train.damage import Guard, all_finite
from raffia.train.evaluate import Episodes
from raffia.train.metrics import PhaseClock
from raffia.train.replay_log import ReplayLog
from raffia.train.sitting import Kept, RunResult, Sitting
from raffia.train.stream import OnlineStream
from raffia.train.tasks import Evaluated, Outcome
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
        self.actor = self.planner
        self.members = self._make_members()
        # Make targets, with the weights of the target network; one for each member.
        self.analysts = [self._make_planner() for _ in range(config.population.size)]
        self._analysts_are_new = False
        self.guard = Guard(folder / "damage", seed=config.seed)
        self.clock = PhaseClock()
        self.collector = Collector(
            self.env,
            seed=config.seed,
            frame_stack=config.env.frame_stack,
            check=lambda step: self.guard.check(step, update=self._update),
        )
        self.replay_log = ReplayLog(folder / "replay", mutable=SEARCHED)

    def _make_members(self) -> Members | None:
        """Of a population, which acts by one search and learns by one program."""
        config = self.config
        if config.population.size == 1:
            return None
        self.actor = StackedPlanner(
            self.networks.make_model(0).to(config.device),
            self.env.spec,
            config,
            size=config.population.size,
            frame_stack=config.env.frame_stack,
            num_threads=config.num_threads,
        )
        members = Members(config.population, self.networks, config.seed, batches="own")
        self.learner = members.learner
        return members

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
        seed = derive_seed(self.config.seed, "networks")
        if self.members is None:
            return self.networks.init(seed)
        return self.members.begin(self.learner.init(seed))

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
        if self.members is not None:
            self.members.restore(found)
        return state

    def keep(self) -> Kept:
        """Worlds, and which rows of the replay there are."""
        logged = self.replay_log.files(self.replay)
        extras = {"replay": logged.extras}
        if self.members is not None:
            extras |= self.members.kept()
        return Kept({"stream": self.stream.state(), **logged.parts}, extras)

    def saved(self, kept: Sequence[Checkpoint]) -> None:
        """Rows of the replay that no checkpoint needs any more go."""
        self.replay_log.prune(kept)

    def evolve(self, state: TensorDict) -> tuple[TensorDict, dict[str, Any]] | None:
        """The next generation of a population."""
        if self.members is None:
            return None
        self._analysts_are_new = False
        return self.members.evolve(state)

    def take_ended(self) -> list[EndedEpisode]:
        """The episodes that have ended since this was asked."""
        return self.collector.take_ended()

    def counters(self) -> dict[str, int]:
        """Simulations of both searches."""
        planners = {self.planner, self.actor, *self.analysts}
        return {"simulations": sum(planner.num_simulations for planner in planners)}

    def extra(self, update: int) -> dict[str, float]:
        """What a row of means tells besides."""
        told = {
            "temperature": self.config.search.temperature(self._share),
            "replay_steps": float(len(self.replay)),
        }
        if self.members is None:  # else each has its own, which rows of generations tell
            told["learning_rate"] = self.networks.learning_rate(update)
        return told

    # -- playing and learning

    def _begin_turn(self, state: TensorDict) -> Act:
        self._update = step_of(state)
        self.actor.refresh(state)
        temperature = self.config.search.temperature(self._share)

        def choose(states: TensorDict) -> TensorDict:
            draws = self._draws("act")
            with self._guarded(state, states):
                return act(self.actor, states, temperature=temperature, noise=True, generator=draws)

        return choose

    def _act_first(self, states: TensorDict) -> TensorDict:
        return act_at_random(
            self.env.spec,
            states,
            num_sampled_actions=self.config.search.num_sampled_actions,
            generator=self._draws("act"),
        )

    def _make_batch(self, state: TensorDict, windows: TensorDict) -> TensorDict:
        targets, update = self.config.targets, step_of(state)
        if update % targets.target_interval == 0 or not self._analysts_are_new:
            self._renew_analysts(state)
        horizon = targets.horizon_share * self.config.collect.num_env_steps
        made = []
        with self._guarded(state, windows):
            for place, analyst in enumerate(self.analysts):
                made.append(
                    make_batch(
                        windows,
                        analyst,
                        generator=generator_for(
                            self.config.seed, "targets", update, *([place] if place else [])
                        ),
                        total=self.replay.storage.total,
                        correction_interval=round(horizon) if targets.correct_horizon else 0,
                    )
                )
        fresh = made[0 if self.members is None else self.members.best][1]
        if fresh is not None:
            self.replay.update(fresh["step_index"], fresh.exclude("step_index"))
        batches = [batch for batch, _ in made]
        batch = batches[0] if self.members is None else stack(batches)
        return batch.to(self.config.device)

    def _renew_analysts(self, state: TensorDict) -> None:
        """With the target networks of today; of a member that came to grief, another one's."""
        if self.members is None:
            self.analysts[0].refresh(state["target"])
        else:
            targets = [state["target"][place] for place in range(len(state))]
            fine = [target for target in targets if all_finite(target)]
            for analyst, target in zip(self.analysts, targets, strict=True):
                analyst.refresh(target if all_finite(target) or not fine else fine[0])
        self._analysts_are_new = True

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

    def evaluate(self, state: TensorDict, stop: Callable[[], bool]) -> Outcome | None:
        """Play whole episodes; None if `stop` said so meanwhile."""
        with self.clock.phase("evaluate"), self._guarded(state, self.collector.now):
            if self.members is None:
                found: Outcome | None = self._play(state, stop)
            else:
                found = self._play_all(self.members, state, stop)
            if found is not None:
                self._keep_tree(self.stream.num_env_steps)
            return found

    def _play(
        self, state: TensorDict, stop: Callable[[], bool], record: bool = True
    ) -> Episodes | None:
        """Episodes of one agent, which the planner is then of."""
        env_step = self.stream.num_env_steps
        self.planner.refresh(state)
        recording, kind = None, self.config.evaluate.record
        if record and kind != "none":
            recording = Recording(
                self.folder / "episodes",
                lambda _: f"{env_step:09d}",
                num=1,
                suffix=kind,
                say=self.view.say,
            )
        return self.evaluator.play(
            self.planner,
            seed=derive_seed(self.config.seed, "evaluate", env_step),
            recording=recording,
            stop=stop,
            check=lambda said: self.guard.check(said, update=step_of(state)),
        )

    def _play_all(
        self, members: Members, state: TensorDict, stop: Callable[[], bool]
    ) -> Evaluated | None:
        """Episodes of all members, the best one's told; recorded is who was the best before."""
        played: list[Episodes | None] = []
        for place, member in enumerate(members.each(state)):
            if member is None:
                played.append(None)
                continue
            played.append(self._play(member, stop, record=place == members.best))
            if played[-1] is None:
                return None
        fitness = [math.nan if found is None else found.score for found in played]
        told = members.evaluated(fitness)
        best = played[members.best]
        assert best is not None  # the guard lets no population go on of which none is finite
        self.planner.refresh(state[members.best])
        return Evaluated(best.score, {**best.values, **told})

    def _keep_tree(self, env_step: int) -> None:
        state = self.collector.now[:1]
        try:
            save_tree(self.folder / "trees", f"{env_step:09d}", self.planner, state)
        except OSError as error:  # a full disk, of which the next save tells more
            self.view.say(f"the searched tree of step {env_step:,} was not saved: {error}")
