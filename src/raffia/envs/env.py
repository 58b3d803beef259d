"""The contract between an environment and an agent: `Env`, `BatchEnv`, `EnvSpec`.

An `Env` is one environment. A `BatchEnv` is E of them that are stepped together; collection and
evaluation work on these. Each state and each step is a TensorDict with these entries:

    observation   spec.observation_shape, spec.observation_dtype: images uint8 [C, H, W] of 0..255
    action_mask   bool [n], True where the action is legal; only if spec.masked
    to_play       int64 [], 0 or 1: who acts next; only if spec.num_players == 2

and after a step besides

    reward        float32 []: to the player who acted
    terminated    bool []: the task has ended, nothing follows
    truncated     bool []: the episode was cut, as by a time limit; more would have followed
    continues     bool []: this end is one for learning only, as a lost life: the next action is
                  taken without a reset; only if spec.continues

An episode is made of its seed and its actions alone: `reset` with the same seed, and the same
actions, give the same episode in any process. Resume stands on that. Where playing on without
showing the states takes less time, an environment may offer `fast_forward`: see `FastForwardEnv`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from raffia.tensordict.tensordict import TensorDict


@dataclass(frozen=True)
class Discrete:
    """Actions 0 .. n - 1, int64 [].

    >>> Discrete(3).shape, Discrete(3).dtype
    ((), torch.int64)
    """

    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"Discrete({self.n}) must have at least one action")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one action."""
        return ()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of one action."""
        return torch.int64


@dataclass(frozen=True)
class Box:
    """Actions of D numbers within bounds, float32 [D].

    >>> Box((-2.0,), (2.0,)).shape
    (1,)
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.low) != len(self.high) or not self.low:
            raise ValueError(
                f"low={self.low} and high={self.high} must have equal lengths, at least 1"
            )
        if not all(low < high for low, high in zip(self.low, self.high, strict=True)):
            raise ValueError(f"low={self.low} must be below high={self.high} in each number")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one action."""
        return (len(self.low),)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of one action."""
        return torch.float32


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """Shapes, dtypes and actions of an environment, and its number of players.

    >>> spec = EnvSpec(observation_shape=(4,), action=Discrete(2))
    >>> spec.observation_dtype, spec.num_players, spec.masked
    (torch.float32, 1, False)
    """

    observation_shape: tuple[int, ...]
    action: Discrete | Box
    observation_dtype: torch.dtype = torch.float32
    num_players: int = 1  # number of players; 2: they act in turns, as "to_play" tells
    masked: bool = False  # whether "action_mask" marks the legal actions
    continues: bool = False  # whether "continues" marks ends that are for learning only
    name: str = ""

    def __post_init__(self) -> None:
        if self.num_players not in (1, 2):
            raise ValueError(f"num_players={self.num_players} must be 1 or 2")
        if self.masked and isinstance(self.action, Box):
            raise ValueError(
                "masked=True needs Discrete actions, because each is marked as legal or not"
            )

    @property
    def state_keys(self) -> tuple[str, ...]:
        """The keys of a state, which `reset` returns."""
        masks = ("action_mask",) if self.masked else ()
        turns = ("to_play",) if self.num_players == 2 else ()
        return ("observation", *masks, *turns)

    @property
    def step_keys(self) -> tuple[str, ...]:
        """The keys that `step` returns: those of the state, and those of the action's outcome."""
        return (*self.state_keys, *STEP_KEYS, *(("continues",) if self.continues else ()))


STEP_KEYS = ("reward", "terminated", "truncated")


@runtime_checkable
class Env(Protocol):
    """One environment; `raffia.envs.check.check_env` tells whether yours keeps the contract.

    >>> class Corridor:  # go right to the end, one metre a step
    ...     spec = EnvSpec(observation_shape=(1,), action=Discrete(2))
    ...     def reset(self, seed):
    ...         self.position = 0
    ...         return TensorDict(observation=torch.tensor([0.0]))
    ...     def step(self, action):
    ...         self.position += 1 if int(action) else -1
    ...         return TensorDict(observation=torch.tensor([float(self.position)]),
    ...                           reward=torch.tensor(float(self.position == 3)),
    ...                           terminated=torch.tensor(abs(self.position) == 3),
    ...                           truncated=torch.tensor(False))
    ...     def render(self):
    ...         return None
    ...     def close(self):
    ...         pass
    >>> isinstance(Corridor(), Env)
    True
    """

    spec: EnvSpec

    def reset(self, seed: int) -> TensorDict:
        """Start the episode of this seed and return its first state []."""

    def step(self, action: Tensor) -> TensorDict:
        """Act: the state after it, with reward, terminated and truncated, []."""

    def render(self) -> Tensor | None:
        """A picture of the current state, uint8 [H, W, 3]; None if there is no picture."""
        return None

    def close(self) -> None:
        """Release windows and processes."""
        return None


@runtime_checkable
class FastForwardEnv(Protocol):
    """An Env that can also play an episode without showing it.

    A resumed run, and a worker that is started again, use this where an environment has it: of all
    the actions since a reset, only the last few are then played by `step`.

    >>> from raffia.envs.probe import ValueProbe
    >>> isinstance(ValueProbe(), FastForwardEnv)
    False
    """

    def fast_forward(self, seed: int, actions: Tensor) -> None:
        """Do what `reset(seed)` and a `step` for each of the actions [n, ...] do, but show nothing.

        None of the actions ends the episode.
        """


@runtime_checkable
class BatchEnv(Protocol):
    """E environments of one kind, stepped together; a row is one of them.

    An episode that has ended stays so until its row is reset: nothing resets by itself, so that the
    last observation of an episode is never mistaken for the first of the next.

    >>> from raffia.envs.probe import ValueProbe
    >>> from raffia.envs.batch import SerialBatch
    >>> isinstance(SerialBatch([ValueProbe(), ValueProbe()]), BatchEnv)
    True
    """

    spec: EnvSpec
    num_envs: int

    def reset(self, seeds: Tensor, rows: Tensor | None = None) -> TensorDict:
        """Start episodes from seeds int64 [n] in rows int64 [n] (None: all); return states [n]."""

    def step(self, action: Tensor, rows: Tensor | None = None) -> TensorDict:
        """Act in these rows (None: all), action [n, ...]: the states after it, [n]."""

    def render(self, row: int) -> Tensor | None:
        """A picture of one environment, uint8 [H, W, 3]; None where it has no picture."""

    def close(self) -> None:
        """Release the resources of all environments."""


@runtime_checkable
class FastForwardBatch(Protocol):
    """A BatchEnv that can also play episodes without showing them.

    >>> from raffia.envs.batch import SerialBatch
    >>> from raffia.envs.probe import ValueProbe
    >>> isinstance(SerialBatch([ValueProbe()]), FastForwardBatch)
    True
    """

    def fast_forward(
        self, seeds: Tensor, actions: Sequence[Tensor], rows: Tensor | None = None
    ) -> None:
        """Start episodes from seeds int64 [n] in rows int64 [n] (None: all), and play in each its
        actions [t, ...], none of which ends it.
        """
