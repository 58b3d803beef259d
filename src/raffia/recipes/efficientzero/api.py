"""What the runs of EfficientZero have learnt: evaluate, act."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raffia.algorithms.efficientzero.actor import act
from raffia.algorithms.efficientzero.learner import ModelFactory
from raffia.algorithms.efficientzero.planning import Planner
from raffia.envs.env import EnvSpec
from raffia.envs.make import make_env as MAKE_ENV
from raffia.envs.make import require_env_factory
from raffia.envs.opponents import make_opponent
from raffia.hints import check_range
from raffia.recipes.algorithm import ALGORITHMS
from raffia.recipes.devices import require_device
from raffia.recipes.efficientzero.actors import make_networks, spec_of
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.recipes.efficientzero.evaluation import EpisodeFilms, Evaluator, MakeEnv
from raffia.recipes.members import best_of
from raffia.recipes.population_config import PopulationConfig
from raffia.recipes.run_folder import find_checkpoint, read_run_of, refuse_without_own
from raffia.recipes.running import Evaluation, plain_arithmetic, threads
from raffia.search.policies import PolicyOutput
from raffia.tensordict.tensordict import TensorDict


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


def read_with(
    folder: str | Path,
    make_env: MakeEnv | str | None = None,
    networks: ModelFactory | str | None = None,
) -> tuple[EfficientZeroRun, MakeEnv, ModelFactory | None]:
    """The config of a run with the parts that are named, and what makes its environments and
    networks.

    Raises RunError or ConfigError if the run has parts of its own that are not given.
    """
    config = read_run_of(EfficientZeroRun, folder)
    given = {"make_env": make_env, "networks": networks}
    refuse_without_own(Path(folder), [part for part, one in given.items() if one is not None])
    config, others = ALGORITHMS["efficientzero"].with_named(config, given)
    factory = others.get("make_env", MAKE_ENV)
    require_env_factory(factory)
    return config, factory, others.get("networks")


@plain_arithmetic()
def load_agent(
    folder: str | Path,
    checkpoint: str | int = "best",
    *,
    device: str = "cpu",  # of the networks, such as "cuda"
    num_simulations: int | None = None,  # of a search; None: as the run evaluates
    make_env: MakeEnv | str | None = None,
    networks: ModelFactory | str | None = None,
) -> Agent:
    """The agent of a run: of its "best" or "newest" checkpoint, or of one by its number.

    >>> import io, tempfile
    >>> from raffia.recipes import train
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
    require_device(device)
    if num_simulations is not None:
        check_range("num_simulations", num_simulations, 1)
    config, make_env, factory = read_with(folder, make_env, networks)
    spec = spec_of(config.env, make_env)
    planner = Planner(
        make_networks(config, spec, factory).make_model(0).to(device),
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
    checkpoint: str | int = "best",
    seed: int = 0,
    device: str = "cpu",
    num_simulations: int | None = None,
    record: int = 0,
    suffix: str = "gif",
    opponent: str | None = None,
    make_env: MakeEnv | str | None = None,
    networks: ModelFactory | str | None = None,
) -> Evaluation:
    """Play whole episodes with the agent of a run, without noise.

    record: how many of the episodes are recorded, into the folder's `episodes`.
    suffix: of the recordings, "gif" or "mp4".
    opponent: in games of two players, "random", "rule" or "perfect"; None: as in the run.

    >>> import io, tempfile
    >>> from raffia.recipes import train
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
        *(folder, checkpoint),
        device=device,
        num_simulations=num_simulations,
        make_env=make_env,
        networks=networks,
    )
    config, make_env, _ = read_with(folder, make_env, networks)
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
