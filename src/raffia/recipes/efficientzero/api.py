"""EfficientZero's runs: train, resume, evaluate, act."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raffia.algorithms.efficientzero.actor import act
from raffia.algorithms.efficientzero.learner import ModelFactory
from raffia.algorithms.efficientzero.planning import Planner
from raffia.envs.env import EnvSpec
from raffia.envs.make import make_env, require_env_factory
from raffia.envs.opponents import make_opponent
from raffia.recipes.algorithm import ALGORITHMS
from raffia.recipes.efficientzero.actors import make_networks, spec_of
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.recipes.efficientzero.evaluation import EpisodeFilms, Evaluator, MakeEnv
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.recipes.members import best_of
from raffia.recipes.population_config import PopulationConfig
from raffia.recipes.run_folder import (
    find_checkpoint,
    read_run_of,
    refuse_without_own,
    require_config,
)
from raffia.recipes.running import (
    Evaluation,
    Make,
    plain_arithmetic,
    resume_run,
    threads,
    train_run,
)
from raffia.search.policies import PolicyOutput
from raffia.tensordict.tensordict import TensorDict
from raffia.train.session import RunResult
from raffia.train.view import View

EFFICIENTZERO = ALGORITHMS["efficientzero"]


def train(
    config: EfficientZeroRun,
    folder: str | Path,
    *,
    view: View | None = None,
    preset: str = "",
    make_env: MakeEnv = make_env,
    networks: ModelFactory | None = None,
) -> RunResult:
    """Train in a new folder, until the end, the target return or a signal to stop.

    view: where progress is shown; None: the terminal.
    preset: the name of the config, to be shown in the report.
    make_env, networks: replace those that the config names: functions like
        `raffia.envs.make.make_env` and `raffia.algorithms.efficientzero.make_model`. A resume
        needs the same.
    Raises RunError if the folder holds a run already, TypeError for what is not a config.

    >>> import io, tempfile
    >>> from dataclasses import replace
    >>> from raffia.recipes.efficientzero.presets import PRESETS
    >>> from raffia.train.view import PlainView
    >>> smoke = PRESETS["smoke"]
    >>> short = replace(smoke, collect=replace(smoke.collect, num_env_steps=120))
    >>> with tempfile.TemporaryDirectory() as there:
    ...     result = train(short, f"{there}/run", view=PlainView(io.StringIO()))
    >>> result.reason, result.env_step
    ('finished', 120)
    """
    require_config(config, EFFICIENTZERO)
    require_env_factory(make_env)
    own, make = _own(make_env, networks)
    return train_run(EFFICIENTZERO, config, folder, view=view, preset=preset, own=own, make=make)


def resume(
    folder: str | Path,
    *,
    config: EfficientZeroRun | None = None,
    view: View | None = None,
    make_env: MakeEnv = make_env,
    networks: ModelFactory | None = None,
) -> RunResult:
    """Resume at the newest checkpoint, as if the run had never been stopped.

    config: replaces the run's, which `read_run(folder)` gives: a longer run, another target.
        What depends on the fraction of training that is done, as temperatures do, follows it.

    >>> import io, tempfile
    >>> from raffia.recipes.efficientzero.presets import PRESETS
    >>> from raffia.train.view import PlainView
    >>> smoke = replace(PRESETS["smoke"], env=replace(PRESETS["smoke"].env, id="probe/value"))
    >>> short = replace(smoke, collect=replace(smoke.collect, num_env_steps=88))
    >>> longer = replace(smoke, collect=replace(smoke.collect, num_env_steps=96))
    >>> with tempfile.TemporaryDirectory() as there:
    ...     first = train(short, f"{there}/run", view=PlainView(io.StringIO()))
    ...     then = resume(f"{there}/run", config=longer, view=PlainView(io.StringIO()))
    >>> first.update, then.update
    (2, 4)
    """
    own, make = _own(make_env, networks)
    return resume_run(folder, EFFICIENTZERO, config=config, view=view, own=own, make=make)


def _own(factory: MakeEnv, networks: ModelFactory | None) -> tuple[list[str], Make]:
    """The custom parts of a run that do not follow from its config, by name; and the function that
    makes the run with them."""
    given = {"make_env": factory is not make_env, "networks": networks is not None}
    make = functools.partial(EfficientZeroExperiment, make_env=factory, networks=networks)
    return [name for name, is_own in given.items() if is_own], make


@dataclass(frozen=True)
class Agent:
    """A trained agent: actions for states, with policies and values.

    A state is a TensorDict [n], as the environment's `reset` and `step` give it; with a frame_stack
    of S > 1 its "observation" is [n, S, ...].

    >>> from raffia.envs.env import Discrete
    >>> spec = EnvSpec(observation_shape=(4,), action=Discrete(2))
    >>> config = EfficientZeroRun()
    >>> planner = Planner(make_networks(config, spec).make_model(0), spec, config)
    >>> agent = Agent(spec, planner, num_simulations=8)
    >>> agent.act(TensorDict(observation=torch.zeros(3, 4), batch_size=[3]))["policy"].shape
    torch.Size([3, 2])
    """

    spec: EnvSpec
    planner: Planner
    num_simulations: int
    update: int | None = None  # update of the checkpoint that it was read from

    def act(self, state: TensorDict) -> TensorDict:
        """Return "action", "policy" and "value" for states [n], without noise."""
        return act(
            self.planner,
            state,
            temperature=0.0,
            noise=False,
            num_simulations=self.num_simulations,
        )

    def plan(self, state: TensorDict) -> PolicyOutput:
        """Return the search itself, with its tree."""
        return self.planner.plan(
            state, noise=False, temperature=0.0, num_simulations=self.num_simulations
        )


@plain_arithmetic()
def load_agent(
    folder: str | Path,
    checkpoint: str = "best",
    *,
    num_simulations: int | None = None,  # of a search; None: as the run evaluates
    make_env: MakeEnv = make_env,
    networks: ModelFactory | None = None,
) -> Agent:
    """The agent of a run: of its "best" or "newest" checkpoint, or of one by its number.

    >>> import io, tempfile
    >>> from raffia.recipes.efficientzero.presets import PRESETS
    >>> from raffia.train.view import PlainView
    >>> smoke = replace(PRESETS["smoke"], env=replace(PRESETS["smoke"].env, id="probe/value"))
    >>> short = replace(smoke, collect=replace(smoke.collect, num_env_steps=88))
    >>> with tempfile.TemporaryDirectory() as there:
    ...     _ = train(short, f"{there}/run", view=PlainView(io.StringIO()))
    ...     agent = load_agent(f"{there}/run")
    >>> agent.act(TensorDict(observation=torch.ones(2, 1), batch_size=[2]))["action"].shape
    torch.Size([2])
    """
    config = read_run_of(EfficientZeroRun, folder)
    refuse_without_own(Path(folder), _own(make_env, networks)[0])
    spec = spec_of(config.env, make_env)
    planner = Planner(
        make_networks(config, spec, networks).make_model(0),
        spec,
        config,
        frame_stack=config.env.frame_stack,
        num_threads=config.num_threads,
    )
    found = find_checkpoint(Path(folder), checkpoint)
    planner.refresh(best_of(found))
    default = config.evaluate.num_simulations or config.search.num_simulations
    return Agent(spec, planner, num_simulations or default, found.update)


@plain_arithmetic()
def evaluate(
    folder: str | Path,
    *,
    episodes: int = 100,
    checkpoint: str = "best",
    seed: int = 0,
    num_simulations: int | None = None,
    record: int = 0,
    suffix: str = "gif",
    opponent: str | None = None,
    make_env: MakeEnv = make_env,
    networks: ModelFactory | None = None,
) -> Evaluation:
    """Play whole episodes with the agent of a run, without noise.

    record: how many of the episodes are recorded, into the folder's `episodes`.
    suffix: of the recordings, "gif" or "mp4".
    opponent: in games of two players, "random", "rule" or "perfect"; None: as in the run.

    >>> import io, tempfile
    >>> from raffia.recipes.efficientzero.presets import PRESETS
    >>> from raffia.train.view import PlainView
    >>> smoke = replace(PRESETS["smoke"], env=replace(PRESETS["smoke"].env, id="probe/value"))
    >>> short = replace(smoke, collect=replace(smoke.collect, num_env_steps=88))
    >>> with tempfile.TemporaryDirectory() as there:
    ...     _ = train(short, f"{there}/run", view=PlainView(io.StringIO()))
    ...     evaluate(f"{there}/run", episodes=3).returns
    [1.0, 1.0, 1.0]
    """
    folder = Path(folder)
    agent = load_agent(
        folder, checkpoint, num_simulations=num_simulations, make_env=make_env, networks=networks
    )
    config = read_run_of(EfficientZeroRun, folder)
    own: dict[str, Any] = {"num_episodes": episodes, "num_simulations": agent.num_simulations}
    if opponent is not None:
        make_opponent(opponent, agent.spec)  # refuses it in an environment of one player
        own["opponent"] = opponent
    one = PopulationConfig()  # it is one agent that plays, also of a population
    config = replace(config, evaluate=replace(config.evaluate, **own), population=one)
    recording = None
    if record:
        thinks = f"-{num_simulations}-simulations" if num_simulations else ""
        stem = f"update-{agent.update}-seed{seed}{thinks}{f'-{opponent}' if opponent else ''}"
        recording = EpisodeFilms(
            folder / "episodes", lambda i: f"{stem}-{i:03d}", num=record, suffix=suffix
        )
    evaluator = Evaluator(config, make_env, record=record > 0)
    with contextlib.closing(evaluator), threads(config.num_threads):
        played = evaluator.play(agent.planner, seed=seed, recording=recording)
    assert played is not None  # nobody stops it
    found = played[0]
    files = [] if recording is None else recording.files
    return Evaluation(
        found.returns, found.lengths, found.as_first, files, agent.update, found.num_cut
    )
