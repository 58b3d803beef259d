"""Which environment, and how it is shown. Imports no torch: help comes at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from raffia.envs.checked import check_choices, check_least, check_types

__all__ = ["AtariConfig", "EnvConfig"]


@dataclass(frozen=True, kw_only=True)
class AtariConfig:
    """The standard preprocessing of Atari games (Mnih et al. 2015; Machado et al. 2018).

    >>> AtariConfig(size=84, colour=False).frame_skip
    4
    """

    frame_skip: int = 4  # an action is repeated; the maximum of the last two frames is seen
    noop_max: int = 30  # up to as many idle frames after a reset
    size: Literal[64, 84, 96] = 96  # of the square picture, pixels
    colour: bool = True  # three channels, or one of grey
    episodic_life: bool = True  # training: a lost life ends the episode
    clip_reward: bool = True  # training: to its sign
    sticky: float = 0.0  # probability that an action is repeated once more
    # At the start and after each lost life FIRE is pressed where the game has it: some wait for it.
    press_fire: bool = True
    max_frames: int = 12_000  # of the emulator, in an episode: 3000 steps with a frame_skip of 4
    evaluation_frames: int = 12_000  # ... when evaluating; 108,000, half an hour, is the longest

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(self)


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """An environment.

    >>> EnvConfig(id="atari/pong", num_envs=4).atari.size
    96
    """

    id: str = "CartPole-v1"  # of Gymnasium, or "tictactoe", "minatar/breakout", "atari/pong" ...
    num_envs: int = 8  # stepped together; one search serves all of them
    num_workers: int = 0  # processes they are spread over; 0: this one
    step_timeout_seconds: float = 300.0  # of one call of a worker; 0: waits for as long as it takes
    max_episode_steps: int = 0  # 0: what the environment itself says
    frame_stack: int = 1  # the newest observations, seen together
    atari: AtariConfig = field(default_factory=AtariConfig)

    def __post_init__(self) -> None:
        check_types(self)
        check_least(self, 1, "num_envs", "frame_stack")
        check_least(self, 0, "num_workers", "max_episode_steps", "step_timeout_seconds")
