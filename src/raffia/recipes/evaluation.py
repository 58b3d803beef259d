"""Whole episodes of a run's agent: played without noise, recorded, and one of its searches kept."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from raffia.algorithms.efficientzero.actor import act
from raffia.algorithms.efficientzero.planning import Planner
from raffia.envs.env import BatchEnv
from raffia.envs.make import make_env
from raffia.envs.opponents import make_opponent
from raffia.recipes.config import EfficientZeroRun
from raffia.tensordict.disk import write_atomically
from raffia.tensordict.tensordict import TensorDict
from raffia.train.evaluate import Episodes, play_episodes
from raffia.train.record import EpisodeRecorder

AT_ONCE = 32  # worlds that are played together

MakeEnv = Callable[..., BatchEnv]  # as `raffia.envs.make.make_env`


class Evaluator:
    """Plays whole episodes of a world as a config says, in worlds of its own.

    worlds: makes them.
    record: whether they can give pictures.

    >>> from raffia.envs.config import EnvConfig
    >>> run = EfficientZeroRun(env=EnvConfig(id="probe/value"))
    >>> evaluator = Evaluator(run)
    >>> evaluator.env.num_envs
    16
    >>> evaluator.close()
    """

    def __init__(
        self, config: EfficientZeroRun, worlds: MakeEnv = make_env, *, record: bool = False
    ) -> None:
        self.config, self.record = config, record
        self._worlds = worlds
        self._env: BatchEnv | None = None

    @property
    def env(self) -> BatchEnv:
        """Made when it is asked for."""
        if self._env is None:
            num = min(self.config.evaluate.num_episodes, AT_ONCE)
            self._env = self._worlds(
                self.config.env, evaluation=True, render=self.record, num_envs=num
            )
        return self._env

    @property
    def num_simulations(self) -> int:
        """Of each search."""
        return self.config.evaluate.num_simulations or self.config.search.num_simulations

    def play(
        self,
        planner: Planner,
        *,
        seed: int,
        recording: Recording | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Episodes | None:
        """Play as many episodes as the config says; None if `stop` said so meanwhile."""
        evaluate, spec = self.config.evaluate, self.env.spec
        opponent = make_opponent(evaluate.opponent, spec) if spec.num_players == 2 else None

        def choose(states: TensorDict) -> TensorDict:
            return act(
                planner,
                states,
                temperature=0.0,
                noise=False,
                num_simulations=self.num_simulations,
            )

        return play_episodes(
            self.env,
            choose,
            num_episodes=evaluate.num_episodes,
            seed=seed,
            frame_stack=self.config.env.frame_stack,
            max_steps=evaluate.max_steps,
            opponent=opponent,
            watch=recording,
            stop=stop,
        )

    def close(self) -> None:
        """Close the worlds."""
        if self._env is not None:
            self._env.close()
            self._env = None


class Recording:
    """Records the first episodes of an evaluation, with the agent's value and visits below.

    folder: gets the files.
    name: from an episode's number to the file's name without suffix.

    >>> Recording(Path("nowhere"), lambda episode: f"{episode:03d}", num=2).files
    []
    """

    def __init__(
        self, folder: Path, name: Callable[[int], str], *, num: int, suffix: str = "gif"
    ) -> None:
        self._saved: dict[int, Path] = {}
        self._folder, self._name, self._num, self._suffix = folder, name, num, suffix
        self._going: dict[int, EpisodeRecorder] = {}

    @property
    def files(self) -> list[Path]:
        """In the order of the episodes."""
        return [self._saved[episode] for episode in sorted(self._saved)]

    def saw(self, env: BatchEnv, episode: int, row: int, chosen: TensorDict | None) -> None:
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
        if recorder is not None:
            self._saved[episode] = recorder.save(self._name(episode))


def save_tree(folder: Path, name: str, planner: Planner, state: TensorDict) -> None:
    """Search from one state [1], and keep the tree as a picture and as data."""
    tree = planner.plan(state, noise=False, temperature=0.0).tree
    folder.mkdir(exist_ok=True)
    graph = json.dumps(dataclasses.asdict(tree.to_graph()))
    write_atomically(str(folder / f"{name}.svg"), tree.to_svg().encode())
    write_atomically(str(folder / f"{name}.json"), graph.encode())
