"""Whole episodes of a run's agent: played without noise, recorded, one of its searches saved.

They are played in the loop, or elsewhere by an `EvaluateRole`.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from raffia.algorithms.efficientzero.actor import act
from raffia.algorithms.efficientzero.planning import Planner
from raffia.envs.env import BatchEnv, EnvSpec
from raffia.envs.make import make_env
from raffia.envs.opponents import make_opponent
from raffia.envs.video import require_writer
from raffia.files import make_folder, write_atomically
from raffia.functional.seeds import derive_seed
from raffia.hints import plural
from raffia.recipes.efficientzero.actors import (
    PlannerRole,
    configured_run,
)
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.tensordict.byte_tensors import bytes_to_tensor
from raffia.tensordict.tensordict import TensorDict
from raffia.train.evaluate import EpisodeBatch, Episodes
from raffia.train.nan_guard import all_finite
from raffia.train.record import EpisodeRecorder, require_picture

AT_ONCE = 32  # environments that are played together

MakeEnv = Callable[..., BatchEnv]  # as `raffia.envs.make.make_env`


class Evaluator:
    """Plays whole episodes as configured, in environments separate from those of training.

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
        """The environment, made at its first use."""
        if self._env is None:
            num = min(self.config.evaluate.num_episodes * self.config.population.size, AT_ONCE)
            self._env = self._make_env(
                self.config.env, evaluation=True, render=self.record, num_envs=num
            )
        return self._env

    @property
    def num_simulations(self) -> int:
        """Simulations of each search."""
        return self.config.evaluate.num_simulations or self.config.search.num_simulations

    def prepare(self, spec: EnvSpec) -> None:
        """Raise the errors that would stop the first evaluation now: an unknown opponent, or no
        pictures.
        """
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
        members: Sequence[int] | None = None,  # of a `StackedPlanner`; None: one agent, which is 0
        *,
        seed: int,
        recording: EpisodeFilms | None = None,
        recorded: int = 0,  # the member whose episodes are recorded
        stop: Callable[[], bool] = lambda: False,
        check: Callable[[TensorDict], None] = lambda outputs: None,
    ) -> dict[int, Episodes] | None:
        """Play as many episodes as the config sets for each of these members, in the same
        environments together; None if `stop` asked to stop meanwhile.

        check: called with the environments' outputs; it may raise.
        """
        evaluate, spec = self.config.evaluate, self.env.spec
        num_simulations = self.num_simulations
        return EpisodeBatch(
            self.env,
            partial(act, planner, temperature=0.0, noise=False, num_simulations=num_simulations),
            num_episodes=evaluate.num_episodes,
            seed=seed,
            members=members,
            frame_stack=self.config.env.frame_stack,
            max_steps=evaluate.max_steps,
            opponent=make_opponent(evaluate.opponent, spec) if spec.num_players == 2 else None,
            watch=recording,
            watched=recorded,
            stop=stop,
            check=check,
        ).play()

    def close(self) -> None:
        """Close the environments."""
        if self._env is not None:
            self._env.close()
            self._env = None


class EpisodeFilms:
    """Records the first episodes of an evaluation, with the agent's value and visits below.

    folder: gets the files.
    name: from an episode's number to the file's name without suffix.
    warn: called with a text about a film that can't be written, as the disk is full; None: that is
    an error.

    >>> EpisodeFilms(Path("nowhere"), lambda episode: f"{episode:03d}", num=2).files
    []
    """

    def __init__(
        self,
        folder: Path,
        name: Callable[[int], str],
        *,
        num: int,
        suffix: str = "gif",
        warn: Callable[[str], object] | None = None,
    ) -> None:
        self._warn = warn
        self._saved: dict[int, Path] = {}
        self._folder, self._name, self._num, self._suffix = folder, name, num, suffix
        self._going: dict[int, EpisodeRecorder] = {}

    @property
    def files(self) -> list[Path]:
        """The files, in the order of the episodes."""
        return [self._saved[episode] for episode in sorted(self._saved)]

    def on_step(self, env: BatchEnv, episode: int, row: int, chosen: TensorDict | None) -> None:
        """Record the picture of a step."""
        if episode >= self._num:
            return
        if episode not in self._going:
            self._going[episode] = EpisodeRecorder(self._folder, suffix=self._suffix)
        value = None if chosen is None else float(chosen["value"])
        policy = None if chosen is None else chosen["policy"]
        self._going[episode].frame(env.render(row), value=value, policy=policy)

    def ended(self, episode: int, episode_return: float) -> None:
        """Complete the film."""
        recorder = self._going.pop(episode, None)
        if recorder is None:
            return
        try:
            self._saved[episode] = recorder.save(self._name(episode))
        except OSError as error:
            if self._warn is None:
                raise
            self._warn(f"an episode was not recorded: {error}")


def cut_line(num: int, of: int, max_steps: int) -> str:
    """The line about episodes that were broken off.

    >>> cut_line(3, 4, 100)
    '3 of 4 episodes were cut at evaluate.max_steps=100: their returns are those of so many steps'
    """
    return (
        f"{num} of {plural(of, 'episode')} {'was' if num == 1 else 'were'} cut at "
        f"evaluate.max_steps={max_steps}: their returns are those of so many steps"
    )


def save_tree(folder: Path, name: str, planner: Planner, state: TensorDict) -> None:
    """Search from one state [1], and save the tree as a picture and as data."""
    tree = planner.plan(state, noise=False, temperature=0.0).tree
    make_folder(folder)
    graph = json.dumps(dataclasses.asdict(tree.to_graph()))
    write_atomically(str(folder / f"{name}.svg"), tree.to_svg().encode())
    write_atomically(str(folder / f"{name}.json"), graph.encode())


class EvaluateRole(PlannerRole):
    """Plays an evaluation for each task; see `raffia.train.evaluations.Evaluations`.

    >>> from raffia.algorithms.efficientzero.learner import EfficientZeroLearner
    >>> from raffia.recipes.efficientzero.actors import (
    ...     acting_weights, process_config, make_networks)
    >>> from raffia.recipes.efficientzero.presets import PRESETS
    >>> run = PRESETS["smoke"]
    >>> role = EvaluateRole(process_config(run), 0)
    >>> weights = acting_weights(make_networks(run, role.evaluator.env.spec).init(0))
    >>> answer = role.do(TensorDict(count=torch.tensor(0)), weights)
    >>> len(episodes_of(answer).returns) == run.evaluate.num_episodes
    True
    >>> role.close()
    """

    def __init__(self, config: str, index: int) -> None:
        run = configured_run(config)
        self._records = run.evaluate.record != "none"
        self.evaluator = Evaluator(run, record=self._records)
        super().__init__(run, self.evaluator.env.spec, run.evaluators.device)

    def _answer(self, task: TensorDict, weights: TensorDict | None) -> TensorDict:
        """Play the evaluation of these weights."""
        assert weights is not None
        self.planner.refresh(weights)
        seed = derive_seed(self.config.seed, "evaluate", int(task["count"]))
        try:
            return self._recorded(seed) if self._records else self._played(seed, None)
        except _NotFinite as error:
            return TensorDict(outputs=error.outputs)

    def _recorded(self, seed: int) -> TensorDict:
        """The answer with a film; with a warning, where there is no room for it."""
        warnings: list[str] = []
        suffix = self.config.evaluate.record
        with tempfile.TemporaryDirectory() as folder:
            films = EpisodeFilms(
                Path(folder), lambda _: "film", num=1, suffix=suffix, warn=warnings.append
            )
            answer = self._played(seed, films)
            for path in films.files:
                answer["film"] = bytes_to_tensor(path.read_bytes())
        for text in warnings:
            answer["warning"] = bytes_to_tensor(text.encode())
        return answer

    def _played(self, seed: int, films: EpisodeFilms | None) -> TensorDict:
        played = self.evaluator.play(
            self.planner, seed=seed, recording=films, check=_require_finite
        )
        assert played is not None  # nothing asks it to stop
        found = played[0]
        return TensorDict(
            returns=torch.tensor(found.returns, dtype=torch.float64),
            lengths=torch.tensor(found.lengths),
            as_first=torch.tensor(found.as_first, dtype=torch.bool),
            num_cut=torch.tensor(found.num_cut),
        )

    def close(self) -> None:
        """Close the environments."""
        self.evaluator.close()


class _NotFinite(Exception):
    """Ends an evaluation, whose last outputs of the environments are its answer."""

    def __init__(self, outputs: TensorDict) -> None:
        super().__init__("an environment's outputs are not finite")
        self.outputs = outputs


def _require_finite(outputs: TensorDict) -> None:
    if not all_finite(outputs):
        raise _NotFinite(outputs)


def episodes_of(answer: TensorDict) -> Episodes:
    """The episodes that an `EvaluateRole` answered with.

    >>> episodes_of(TensorDict(returns=torch.tensor([1.0]), lengths=torch.tensor([5]),
    ...                        as_first=torch.tensor([], dtype=torch.bool),
    ...                        num_cut=torch.tensor(0)))
    Episodes(returns=[1.0], lengths=[5], as_first=[])
    """
    return Episodes(
        *(answer[name].tolist() for name in ("returns", "lengths", "as_first", "num_cut"))
    )
