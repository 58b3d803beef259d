"""Whole episodes of a run's agent: played without noise, recorded, and one of its searches kept."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from raffia.algorithms.efficientzero.actor import act
from raffia.algorithms.efficientzero.planning import Planner
from raffia.envs.env import BatchEnv, EnvSpec
from raffia.envs.make import make_env
from raffia.envs.opponents import make_opponent
from raffia.envs.video import require_writer
from raffia.files import make_folder, write_atomically
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.tensordict.tensordict import TensorDict
from raffia.train.evaluate import Episodes, play_episodes, play_members
from raffia.train.record import EpisodeRecorder, require_picture

AT_ONCE = 32  # environments that are played together

MakeEnv = Callable[..., BatchEnv]  # as `raffia.envs.make.make_env`


class Evaluator:
    """Plays whole episodes of an environment as a config says, in environments of its own.

    make_env: makes them.
    record: whether they can give pictures.

    >>> from raffia.envs.config import EnvConfig
    >>> run = EfficientZeroRun(env=EnvConfig(id="probe/value"))
    >>> evaluator = Evaluator(run)
    >>> evaluator.env.num_envs
    16
    >>> evaluator.close()
    """

    def __init__(
        self, config: EfficientZeroRun, make_env: MakeEnv = make_env, *, record: bool = False
    ) -> None:
        self.config, self.record = config, record
        self._make_env = make_env
        self._env: BatchEnv | None = None

    @property
    def env(self) -> BatchEnv:
        """Made when it is asked for."""
        if self._env is None:
            num = min(self.config.evaluate.num_episodes * self.config.population.size, AT_ONCE)
            self._env = self._make_env(
                self.config.env, evaluation=True, render=self.record, num_envs=num
            )
        return self._env

    @property
    def num_simulations(self) -> int:
        """Of each search."""
        return self.config.evaluate.num_simulations or self.config.search.num_simulations

    def prepare(self, spec: EnvSpec) -> None:
        """Raise now what would stop the first evaluation: no such opponent, or no pictures."""
        evaluate = self.config.evaluate
        if spec.num_players == 2:
            make_opponent(evaluate.opponent, spec)
        if self.record and evaluate.record != "none":
            require_writer(f".{evaluate.record}")
            self.env.reset(torch.arange(self.env.num_envs))
            require_picture(self.env.render(0))

    def play(
        self,
        planner: Planner,
        *,
        seed: int,
        recording: Recording | None = None,
        stop: Callable[[], bool] = lambda: False,
        check: Callable[[TensorDict], None] = lambda said: None,
    ) -> Episodes | None:
        """Play as many episodes as the config says; None if `stop` said so meanwhile.

        check: is shown what the environments said; it may raise.
        """
        return play_episodes(
            self.env,
            self._choose(planner),
            seed=seed,
            watch=recording,
            stop=stop,
            check=check,
            **self._settings(),
        )

    def play_members(
        self,
        planner: Planner,  # a `StackedPlanner`
        members: Sequence[int],
        *,
        seed: int,
        recording: Recording | None = None,
        recorded: int = 0,  # whose episodes
        stop: Callable[[], bool] = lambda: False,
        check: Callable[[TensorDict], None] = lambda said: None,
    ) -> dict[int, Episodes] | None:
        """The same for each of these members, in the same environments at once."""
        return play_members(
            self.env,
            self._choose(planner),
            members,
            seed=seed,
            watch=recording,
            watched=recorded,
            stop=stop,
            check=check,
            **self._settings(),
        )

    def _choose(self, planner: Planner) -> Callable[[TensorDict], TensorDict]:
        def choose(states: TensorDict) -> TensorDict:
            return act(
                planner,
                states,
                temperature=0.0,
                noise=False,
                num_simulations=self.num_simulations,
            )

        return choose

    def _settings(self) -> dict[str, Any]:
        """Of how episodes are played, whoever plays."""
        evaluate, spec = self.config.evaluate, self.env.spec
        return {
            "num_episodes": evaluate.num_episodes,
            "frame_stack": self.config.env.frame_stack,
            "max_steps": evaluate.max_steps,
            "opponent": make_opponent(evaluate.opponent, spec) if spec.num_players == 2 else None,
        }

    def close(self) -> None:
        """Close the environments."""
        if self._env is not None:
            self._env.close()
            self._env = None


class Recording:
    """Records the first episodes of an evaluation, with the agent's value and visits below.

    folder: gets the files.
    name: from an episode's number to the file's name without suffix.
    say: hears of a film that can't be written, as the disk is full; None: that is an error.

    >>> Recording(Path("nowhere"), lambda episode: f"{episode:03d}", num=2).files
    []
    """

    def __init__(
        self,
        folder: Path,
        name: Callable[[int], str],
        *,
        num: int,
        suffix: str = "gif",
        say: Callable[[str], object] | None = None,
    ) -> None:
        self._say = say
        self._saved: dict[int, Path] = {}
        self._folder, self._name, self._num, self._suffix = folder, name, num, suffix
        self._going: dict[int, EpisodeRecorder] = {}

    @property
    def files(self) -> list[Path]:
        """In the order of the episodes."""
        return [self._saved[episode] for episode in sorted(self._saved)]

    def on_step(self, env: BatchEnv, episode: int, row: int, chosen: TensorDict | None) -> None:
        """A picture of a step."""
        if episode >= self._num:
            return
        if episode not in self._going:
            self._going[episode] = EpisodeRecorder(self._folder, suffix=self._suffix)
        value = None if chosen is None else float(chosen["value"])
        policy = None if chosen is None else chosen["policy"]
        self._going[episode].frame(env.render(row), value=value, policy=policy)

    def ended(self, episode: int, episode_return: float) -> None:
        """The film is complete."""
        recorder = self._going.pop(episode, None)
        if recorder is None:
            return
        try:
            self._saved[episode] = recorder.save(self._name(episode))
        except OSError as error:
            if self._say is None:
                raise
            self._say(f"an episode was not recorded: {error}")


def save_tree(folder: Path, name: str, planner: Planner, state: TensorDict) -> None:
    """Search from one state [1], and keep the tree as a picture and as data."""
    tree = planner.plan(state, noise=False, temperature=0.0).tree
    make_folder(folder)
    graph = json.dumps(dataclasses.asdict(tree.to_graph()))
    write_atomically(str(folder / f"{name}.svg"), tree.to_svg().encode())
    write_atomically(str(folder / f"{name}.json"), graph.encode())
