"""Settings of the environment and its observations. Imports no torch: help comes at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from raffia.envs.checked import check_choices, check_least, check_types


@dataclass(frozen=True, kw_only=True)
class AtariConfig:
    """The standard preprocessing of Atari games (Mnih et al. 2015; Machado et al. 2018).

    >>> AtariConfig(size=84, colour=False).frame_skip
    4
    """

    frame_skip: int = (
        4  # frames that an action is repeated; the observation is the maximum of the last two
    )
    noop_max: int = 30  # most idle frames after a reset
    size: Literal[64, 84, 96] = 96  # pixels of a side of the square picture
    colour: bool = True  # three channels of colour instead of one of grey
    episodic_life: bool = True  # end the episode at a lost life, in training only
    clip_reward: bool = True  # clip the reward to its sign, in training only
    sticky: float = 0.0  # probability that an action is repeated once more
    # At the start and after each lost life FIRE is pressed where the game has it: some wait for it.
    press_fire: bool = True
    max_frames: int = (
        12_000  # longest episode in the emulator's frames: 3000 steps with a frame_skip of 4
    )
    evaluation_frames: int = (
        12_000  # longest episode when evaluating; at most 108,000, half an hour
    )

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(self)


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """An environment.

    >>> EnvConfig(id="atari/pong", num_envs=4).atari.size
    96
    """

    id: str = "CartPole-v1"  # id of Gymnasium, or "tictactoe", "minatar/breakout", "atari/pong" ...
    num_envs: int = 8  # environments stepped together; one search serves all of them
    num_workers: int = 0  # worker processes of the environments; 0: none besides this one
    step_timeout_seconds: float = 300.0  # most seconds of one call of a worker; 0: no limit
    max_episode_steps: int = (
        0  # steps after which an episode is truncated; 0: the environment's own limit
    )
    frame_stack: int = 1  # newest observations that are stacked
    atari: AtariConfig = field(default_factory=AtariConfig)

    def __post_init__(self) -> None:
        check_types(self)
        check_least(self, 1, "num_envs", "frame_stack")
        check_least(self, 0, "num_workers", "max_episode_steps", "step_timeout_seconds")

    @property
    def clips_reward(self) -> bool:
        """Whether training is given the signs of rewards.

        >>> EnvConfig(id="atari/pong").clips_reward, EnvConfig().clips_reward
        (True, False)
        """
        return self.id.startswith("atari/") and self.atari.clip_reward
