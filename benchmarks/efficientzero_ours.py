"""The worker of `benchmarks.efficientzero` that does our part, and a run taken apart."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.efficientzero import (
    IMAGE,
    IMAGE_SUPPORT,
    MAX_EPISODE_STEPS,
    NUM_IMAGE_PARAMETERS,
    TEMPERATURE,
    UPDATES_PER_ENV_STEP,
)
from benchmarks.search_models import (
    DISCOUNT,
    HEAD,
    HORIZON,
    LATENT,
    LSTM,
    MLP,
    NUM_PARAMETERS,
    OBSERVATION,
)
from benchmarks.search_worker import Case, serve
from raffia.algorithms.efficientzero.config import (
    EfficientZeroConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    SearchConfig,
    TargetConfig,
)
from raffia.algorithms.efficientzero.learner import EfficientZeroLearner, ModelFactory
from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
from raffia.algorithms.efficientzero.planning import Planner
from raffia.algorithms.efficientzero.targets import make_batch
from raffia.envs.config import EnvConfig
from raffia.envs.env import Discrete, EnvSpec
from raffia.envs.make import make_env
from raffia.recipes.efficientzero.config import CollectConfig, EfficientZeroRun, ReplayConfig
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.recipes.efficientzero.presets import PRESETS
from raffia.tensordict.tensordict import TensorDict
from raffia.train.loop import train
from raffia.train.session import TrainingSession
from raffia.train.view import PlainView

# LightZero's CartPole configuration; supports, projection and norms are our defaults as well.
CARTPOLE = EfficientZeroRun(
    env=EnvConfig(id="CartPole-v1", num_envs=8, max_episode_steps=MAX_EPISODE_STEPS),
    model=ModelConfig(latent_state_dim=LATENT, lstm_hidden_size=LSTM, head_hidden_channels=(HEAD,)),
    loss=LossConfig(lstm_horizon=HORIZON),
    targets=TargetConfig(
        discount=DISCOUNT, n_step=5, target_interval=100, reanalyze_ratio=0.0, correct_horizon=False
    ),
    optimizer=OptimizerConfig(name="adamw", learning_rate=3e-3, max_grad_norm=10.0),
    search=SearchConfig(num_simulations=25, temperatures=(TEMPERATURE,), temperature_from=(0.0,)),
    replay=ReplayConfig(batch_size=256, alpha=0.0),
    collect=CollectConfig(
        num_env_steps=10**6,
        random_env_steps=1_024,
        updates_per_env_step=UPDATES_PER_ENV_STEP,
    ),
)
_SUPPORT = (-float(IMAGE_SUPPORT // 2), IMAGE_SUPPORT // 2 + 1.0, 1.0)
PONG = EfficientZeroConfig(
    model=ModelConfig(reward_support_range=_SUPPORT, value_support_range=_SUPPORT),
    loss=LossConfig(lstm_horizon=HORIZON),
    optimizer=OptimizerConfig(name="sgd", learning_rate=0.02, max_grad_norm=10.0),
)


def random_batch(spec: EnvSpec, batch: int, steps: int, frame_stack: int = 1) -> TensorDict:
    """Windows of noise, all of whose steps count."""
    num_actions = spec.action.n

    def observations(*lead: int) -> torch.Tensor:
        size = (*lead, *spec.observation_shape)
        if spec.observation_dtype == torch.uint8:
            return torch.randint(256, size, dtype=torch.uint8)
        return torch.rand(size)

    ones = torch.ones(batch, steps + 1)
    return TensorDict(
        frames=observations(batch, frame_stack + steps),
        action=torch.randint(num_actions, (batch, steps)),
        target_policy=torch.rand(batch, steps + 1, num_actions).softmax(-1),
        target_value=20 * torch.rand(batch, steps + 1),
        target_value_prefix=torch.arange(1.0, steps + 1).repeat(batch, 1),
        policy_mask=ones,
        value_mask=ones,
        value_prefix_mask=ones[:, 1:],
        consistency_mask=ones[:, 1:],
        weight=torch.ones(batch),
        index=torch.arange(batch),
        batch_size=[batch],
    )


class OurUpdate:
    """case: "batch" windows, and as "simulations" the steps that are unrolled."""

    def __init__(self, case: Case):
        torch.manual_seed(0)
        config: EfficientZeroConfig
        action = Discrete(case.actions)
        if case.model == "mlp":
            config, wanted = CARTPOLE, NUM_PARAMETERS["mlp"]
            spec = EnvSpec(observation_shape=(OBSERVATION,), action=action)
        else:
            config, wanted = PONG, NUM_IMAGE_PARAMETERS
            shape = IMAGE["observation_shape"]
            spec = EnvSpec(observation_shape=shape, action=action, observation_dtype=torch.uint8)
        self.learner = EfficientZeroLearner(spec, config, num_updates=10**6)
        self.state = self.learner.init(0)
        num_parameters = sum(p.numel() for p in self.state["params"].values(True, True))
        if num_parameters != wanted:
            raise ValueError(f"{num_parameters} parameters, not {wanted}")
        self.batch = random_batch(spec, case.batch, case.simulations)

    def __call__(self) -> Any:
        update, metrics = self.learner.grads(self.state, self.batch)
        self.state = self.learner.apply(self.state, update)
        return metrics

    def shares(self) -> dict[str, float]:
        """All of it is the model."""
        return {"model": 1.0}


def make_run(
    config: EfficientZeroRun, folder: Path, networks: ModelFactory | None = None
) -> EfficientZeroExperiment:
    """The parts of a run, joined; it shows nothing."""
    with open(os.devnull, "w") as nowhere:
        return EfficientZeroExperiment(config, folder, PlainView(nowhere), make_env, networks)


def play(run: EfficientZeroExperiment, state: TensorDict, num_steps: int) -> None:
    """Steps in each environment by the newest weights, put into the replay."""
    run.actor.refresh(state)
    act = partial(run.player.act, temperature=1.0)
    run.replay.extend(run.collector.collect(act, num_steps))


class OurActing:
    """case: as "batch" the environments. A call is a turn of a run: it takes over the newest
    weights, plays a step in each environment, and puts them into the replay."""

    def __init__(self, case: Case):
        def networks() -> EfficientZeroModelMLP:  # heads of zeros would give the null model's tree
            return EfficientZeroModelMLP(
                **MLP, action_space_size=case.actions, last_linear_layer_init_zero=False
            )

        config = replace(
            CARTPOLE,
            env=replace(CARTPOLE.env, num_envs=case.batch),
            search=replace(CARTPOLE.search, num_simulations=case.simulations),
        )
        self.folder = tempfile.TemporaryDirectory()
        self.run = make_run(config, Path(self.folder.name), networks)
        self.state = self.run.networks.init(0)

    def __call__(self) -> Any:
        play(self.run, self.state, 1)

    def shares(self) -> dict[str, float]:
        """`benchmarks.search` measures its parts."""
        return {"model": 1.0}


class OurTraining:
    """case: its "policy" is "train", at LightZero's sizes, or "preset", ours; as "simulations" the
    updates of a call, which plays as many steps as go with them. It is the loop of a run, without
    what is done now and then: logging, evaluating, saving."""

    def __init__(self, case: Case):
        self.num_updates = case.simulations
        self.folder = tempfile.TemporaryDirectory()
        config = CARTPOLE if case.policy == "train" else PRESETS["cartpole"]
        self.run = make_run(config, Path(self.folder.name))
        self.session = TrainingSession(self.run)
        self.state = self.run.networks.init(0)

    def __call__(self) -> Any:
        run = self.run
        self.state, reason = train(
            self.state,
            run.step,
            num_updates=int(self.state["step"]) + self.num_updates,
            every=[lambda state, metrics: self.session.log.add(metrics)],
        )
        return reason

    def shares(self) -> dict[str, float]:
        """The first table has its parts."""
        return {"model": 1.0}


KINDS = {"update": OurUpdate, "act": OurActing, "train": OurTraining, "preset": OurTraining}


def prepare(case: Case) -> Any:
    return KINDS[case.policy](case)


class Parts:
    """A run of a preset, with a filled replay, taken apart."""

    def __init__(self, preset: str, folder: Path):
        config = PRESETS[preset]
        self.config = replace(config, replay=replace(config.replay, on_disk=False))
        self.run = make_run(self.config, folder)
        self.state = self.run.networks.init(0)
        run, num = self.run, self.config.env.num_envs
        run.replay.extend(run.collector.collect(run.player.act_first, max(64, 1024 // num)))
        self.reanalyze_planners = {ratio: self._analyst(ratio) for ratio in (0.0, 1.0)}
        self.batch = self.targets(0.0)
        self.update, _ = self.grads()
        self.apply()  # the first one takes longer

    def _analyst(self, ratio: float) -> Planner:
        config = replace(self.config, targets=replace(self.config.targets, reanalyze_ratio=ratio))
        stack = config.env.frame_stack
        model = self.run.networks.make_model(0)
        planner = Planner(model, self.run.env.spec, config, frame_stack=stack)
        planner.refresh(self.state["target"])
        return planner

    def collect(self) -> None:
        """A rollout with the newest weights in each environment, put into the replay."""
        play(self.run, self.state, self.config.collect.rollout_length)

    def targets(self, ratio: float) -> TensorDict:
        """A batch, with this fraction of its policies reanalyzed and written back."""
        replay = self.run.replay
        windows = replay.sample(self.config.replay.batch_size)
        draws = torch.Generator().manual_seed(0)
        batch, fresh = make_batch(windows, self.reanalyze_planners[ratio], generator=draws)
        if fresh is not None:
            replay.update(fresh["step_index"], fresh.exclude("step_index"))
        return batch

    def grads(self) -> tuple[TensorDict, TensorDict]:
        """Of one batch."""
        return self.run.networks.grads(self.state, self.batch)

    def apply(self) -> None:
        """The optimiser's step."""
        self.state = self.run.networks.apply(self.state, self.update)

    def simulations(self, planner: Planner, call: Callable[[], object]) -> int:
        """How many simulations a call makes."""
        before = planner.num_simulations
        call()
        return planner.num_simulations - before


def versions() -> dict[str, str]:
    """Versions of the timed packages."""
    return {name: version(name) for name in ("torch", "gymnasium")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(prepare, versions)
