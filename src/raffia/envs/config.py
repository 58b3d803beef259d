"""Settings of the environment and its observations. Imports no torch, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from raffia.envs.checked import (
    Checked,
    FractionBelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
)

EVALUATION_FRAMES = 108_000  # half an hour of play, at 60 frames a second


@dataclass(frozen=True, kw_only=True)
class AtariConfig(Checked):
    """The standard preprocessing of Atari games (Mnih et al. 2015; Machado et al. 2018).

    >>> AtariConfig(size=84, colour=False).frame_skip
    4
    """

    # Frames that an action is repeated; the observation is the maximum of the last two.
    frame_skip: PositiveInt = 4
    noop_max: NonNegativeInt = 30  # maximal number of idle frames after a reset
    size: Literal[64, 84, 96] = 96  # width and height of the picture in pixels
    colour: bool = True  # three colour channels instead of one of grey
    episodic_life: bool = True  # end the episode when a life is lost, in training only
    clip_reward: bool = True  # clip rewards to their sign, in training only
    # Probability that the previous action is repeated (sticky actions).
    sticky: FractionBelowOne = 0.0
    # Press FIRE at the start and after each lost life, since some games wait for it.
    press_fire: bool = True
    # Maximal length of an episode in frames of the emulator: 3,000 steps at a frame_skip of 4.
    max_frames: int = 12_000
    # Maximal length of an evaluation episode in frames; up to 108,000, half an hour.
    evaluation_frames: int = 12_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_frames < self.frame_skip:
            raise ValueError(
                f"max_frames={self.max_frames} must be at least frame_skip={self.frame_skip}"
            )
        if not self.frame_skip <= self.evaluation_frames <= EVALUATION_FRAMES:
            raise ValueError(
                f"evaluation_frames={self.evaluation_frames} must be in frame_skip="
                f"{self.frame_skip} .. {EVALUATION_FRAMES}"
            )


@dataclass(frozen=True, kw_only=True)
class EnvConfig(Checked):
    """An environment.

    >>> EnvConfig(id="atari/pong", num_envs=4).atari.size
    96
    """

    # Id of Gymnasium, or "tictactoe", "minatar/breakout", "atari/pong" ...; your own environment as
    # file.py:name or module:name, of its class or of a function that makes it.
    id: str = "CartPole-v1"
    # Environments that are stepped together, with one search for all of them.
    num_envs: PositiveInt = 8
    # Worker processes of the environments; 0: run them in this process.
    num_workers: NonNegativeInt = 0
    # Time limit of a worker's call in seconds; 0: no limit.
    step_timeout_seconds: NonNegativeFloat = 300.0
    # Steps after which an episode is truncated; 0: the environment's own limit.
    max_episode_steps: NonNegativeInt = 0
    frame_stack: PositiveInt = 1  # number of most recent observations that are stacked
    atari: AtariConfig = field(default_factory=AtariConfig)

    @property
    def name(self) -> str:
        """The name of the environment, without the file or module of one's own.

        >>> EnvConfig(id="corridor.py:Corridor").name
        'Corridor'
        """
        return self.id.rpartition(":")[2]

    @property
    def clips_reward(self) -> bool:
        """Whether training is given the signs of rewards.

        >>> EnvConfig(id="atari/pong").clips_reward, EnvConfig().clips_reward
        (True, False)
        """
        return self.id.startswith("atari/") and self.atari.clip_reward
