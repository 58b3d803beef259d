"""Runs of EfficientZero on a device, as they are checked and timed: presets, taken apart."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.efficientzero_ours import play, random_batch
from raffia.algorithms.efficientzero.observations import AUGMENTATION, draw_augmentation
from raffia.envs.batch import SerialBatch
from raffia.envs.config import EnvConfig
from raffia.envs.env import BatchEnv, Discrete, EnvSpec
from raffia.envs.make import make_env
from raffia.learner import Learner
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.recipes.efficientzero.presets import PRESETS
from raffia.tensordict.tensordict import TensorDict
from raffia.train.loop import train
from raffia.train.view import PlainView

FRAME = EnvSpec(  # Pong's, as the paper shows it
    observation_shape=(3, 96, 96), action=Discrete(6), observation_dtype=torch.uint8
)
NAMES = ("cartpole", "atari100k")  # presets
NUM_FRAMES, NUM_STEPS = 16, 100  # different ones; of an episode


class RandomFrames:
    """Stands for an Atari game, without its ROM and the time that it takes: noise to look at.

    >>> env = RandomFrames()
    >>> env.reset(3)["observation"].shape, env.step(torch.tensor(1))["reward"].shape
    (torch.Size([3, 96, 96]), torch.Size([]))
    """

    spec = FRAME

    def __init__(self) -> None:
        draws = torch.Generator().manual_seed(0)
        size = (NUM_FRAMES, *FRAME.observation_shape)
        self.frames = torch.randint(256, size, dtype=torch.uint8, generator=draws)
        self.at = self.num_steps = 0

    def reset(self, seed: int) -> TensorDict:
        """Begin the episode of this seed; gives its first state []."""
        self.at, self.num_steps = seed, 0
        return TensorDict(observation=self._seen())

    def step(self, action: Tensor) -> TensorDict:
        """Act: which frame comes, and a reward, are the action's."""
        self.at += 1 + int(action)
        self.num_steps += 1
        return TensorDict(
            observation=self._seen(),
            reward=torch.tensor(float(self.at % 3 - 1)),
            terminated=torch.tensor(self.num_steps == NUM_STEPS),
            truncated=torch.tensor(False),
        )

    def _seen(self) -> Tensor:
        return self.frames[self.at % NUM_FRAMES]

    def render(self) -> None:
        """There is no picture."""

    def close(self) -> None:
        """There is nothing to give back."""


def make_any(config: EnvConfig) -> BatchEnv:
    """The environments of a config; in place of Atari's, frames at random.

    >>> make_any(EnvConfig(id="atari/pong", num_envs=3)).num_envs
    3
    """
    if config.id.startswith("atari/"):
        return SerialBatch([RandomFrames() for _ in range(config.num_envs)])
    return make_env(config)


def preset(name: str, small: bool) -> EfficientZeroRun:
    """The preset with a replay that is soon filled; if small, of few windows and simulations, with
    the networks as they are.

    >>> preset("atari100k", small=False).replay.batch_size, preset("cartpole", True).env.num_envs
    (256, 2)
    """
    config = PRESETS[name]
    capacity = 512 if small else 8_192
    if small:
        config = replace(
            config,
            env=replace(config.env, num_envs=2),
            search=replace(config.search, num_simulations=4),
            replay=replace(config.replay, batch_size=4),
        )
    return replace(config, replay=replace(config.replay, capacity=capacity))


def shaken(weights: TensorDict, seed: int = 0) -> TensorDict:
    """Parameters with noise: the zero heads of a new model would not test a search.

    >>> float(shaken(TensorDict(w=torch.zeros(3, 3)))["w"].abs().max()) > 0
    True
    """
    draws = torch.Generator().manual_seed(seed)

    def moved(weight: Tensor) -> Tensor:
        scale = max(0.05, float(weight.std(correction=0)))
        return weight + scale * torch.randn(weight.shape, generator=draws)

    return weights.apply(moved)


def noise_batch(spec: EnvSpec, config: EfficientZeroRun, size: int) -> TensorDict:
    """Windows of noise for a learner, all of whose steps count.

    >>> noise_batch(FRAME, preset("atari100k", True), 2)["frames"].shape
    torch.Size([2, 9, 3, 96, 96])
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        batch = random_batch(spec, size, config.loss.unroll_steps, config.env.frame_stack)
    if config.loss.augmentation:
        draws = torch.Generator().manual_seed(0)
        batch[AUGMENTATION] = draw_augmentation(size, config.loss.augmentation, 2, draws)
    return batch


class Played:
    """A run of a preset on a device, with steps at random in its replay."""

    def __init__(
        self, config: EfficientZeroRun, device: torch.device, folder: Path, **settings: Any
    ) -> None:
        self.config = replace(config, device=str(device), **settings)
        self.device = device
        with open(os.devnull, "w") as nowhere:
            self.run = EfficientZeroExperiment(
                self.config, folder, PlainView(nowhere), make_any, None
            )
        run, num_envs = self.run, config.env.num_envs
        self.state = run.networks.init(0).to(device)
        # In a small replay windows overlap, so that a batch has fewer steps to search.
        steps = max(40, config.replay.capacity // (2 * num_envs))
        run.replay.extend(run.collector.collect(run.player.act_first, steps))
        self.batch = self.targets()

    def collect(self) -> None:
        """A step in each environment, by the newest weights, put into the replay."""
        play(self.run, self.state, 1)

    def windows(self) -> TensorDict:
        """As many as a batch has."""
        return self.run.replay.sample(self.config.replay.batch_size)

    def targets(self) -> TensorDict:
        """A batch on the device, with reanalyze as the preset has it."""
        return self.run._make_batch(self.state, self.windows())

    def learn(self, learner: Learner | None = None) -> TensorDict:
        """An update with the current batch; by the run's learner, or another."""
        learner = self.run.learner if learner is None else learner
        update, metrics = learner.grads(self.state, self.batch)
        self.state = learner.apply(self.state, update)
        return metrics

    def train(self, num_updates: int = 1) -> None:
        """The loop of a run: playing, targets, updates and checks."""
        to = int(self.state["step"]) + num_updates
        self.state, _ = train(self.state, self.run.step, num_updates=to)


@contextmanager
def played(name: str, device: torch.device, small: bool, **settings: Any) -> Iterator[Played]:
    """A run of a preset with other settings, in its own folder."""
    with TemporaryDirectory() as folder:
        parts = Played(preset(name, small), device, Path(folder), **settings)
        try:
            yield parts
        finally:
            parts.run.close()
