"""Rows of a BatchEnv: the arrays of their latest steps, and checks of indices and actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raffia.envs.env import Box, Env, EnvSpec
from raffia.files import shown
from raffia.tensordict.tensordict import TensorDict

Array = npt.NDArray[Any]
Raised = TypeVar("Raised", bound=Exception)
Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Array]  # an array of zeros


@dataclass(frozen=True)
class EnvRows:
    """The outputs of E environments as arrays [E, ...], which each step overwrites.

    >>> rows = EnvRows.for_spec(EnvSpec(observation_shape=(3,), action=Box((0.0,), (1.0,))), 2)
    >>> rows.observation.shape, rows.reward.dtype, rows.action_mask is None
    ((2, 3), dtype('float32'), True)
    """

    observation: Array  # [E, *O]
    reward: Array  # float32 [E]
    terminated: Array  # bool [E]
    truncated: Array  # bool [E]
    runs: Array  # bool [E]: an episode runs there; False before its reset and after its end
    action_mask: Array | None  # bool [E, n]; None where the spec has none
    to_play: Array | None  # int64 [E]; None where the spec has none
    continues: Array | None  # bool [E]; None where the spec has none

    @classmethod
    def for_spec(cls, spec: EnvSpec, num_envs: int, allocate: Allocate = np.zeros) -> EnvRows:
        """Arrays for `num_envs` environments, in memory that `allocate` returns.

        >>> from raffia.envs.env import Discrete
        >>> spec = EnvSpec(observation_shape=(3,), action=Discrete(2), masked=True)
        >>> EnvRows.for_spec(spec, 4).action_mask.shape
        (4, 2)
        """

        def array(shape: tuple[int, ...], dtype: torch.dtype) -> Array:
            kind = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
            return allocate((num_envs, *shape), kind)

        num_actions = spec.action.shape[0] if isinstance(spec.action, Box) else spec.action.n
        return cls(
            observation=array(spec.observation_shape, spec.observation_dtype),
            reward=array((), torch.float32),
            terminated=array((), torch.bool),
            truncated=array((), torch.bool),
            runs=array((), torch.bool),
            action_mask=array((num_actions,), torch.bool) if spec.masked else None,
            to_play=array((), torch.int64) if spec.num_players == 2 else None,
            continues=array((), torch.bool) if spec.continues else None,
        )

    def part(self, start: int, stop: int) -> EnvRows:
        """The rows start .. stop - 1, in the same memory.

        >>> rows = EnvRows.for_spec(EnvSpec(observation_shape=(3,), action=Box((0.0,), (1.0,))), 5)
        >>> rows.part(1, 3).observation.shape
        (2, 3)
        """
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        there = {name: array for name, array in arrays.items() if array is not None}
        return replace(self, **{name: array[start:stop] for name, array in there.items()})

    def tensors(self, keys: tuple[str, ...]) -> dict[str, Tensor]:
        """The entries with these keys, as tensors that share the memory of the arrays.

        >>> rows = EnvRows.for_spec(EnvSpec(observation_shape=(3,), action=Box((0.0,), (1.0,))), 2)
        >>> rows.tensors(("reward",))
        {'reward': tensor([0., 0.])}
        """
        return {key: torch.from_numpy(getattr(self, key)) for key in keys}


@runtime_checkable
class RowEnv(Protocol):
    """An Env that can also write its steps into a row of arrays.

    A SerialBatch uses these two methods where an environment has them: they spare a TensorDict for
    each step, which takes longer than the step of a small environment.

    >>> from raffia.envs.gym import GymEnv
    >>> isinstance(GymEnv("CartPole-v1"), RowEnv)
    True
    """

    def reset_row(self, seed: int, rows: EnvRows, row: int) -> None:
        """Like `Env.reset`, but write to `rows`: the state, not reward, terminated, truncated."""

    def step_row(self, action: Any, rows: EnvRows, row: int) -> None:
        """Like `Env.step`, but write to `rows`; the action is an int, or an array float32 [D]."""


class TensorRows:
    """Any Env as a RowEnv.

    >>> from raffia.envs.probe import ValueProbe
    >>> env = ValueProbe()
    >>> rows = EnvRows.for_spec(env.spec, 2)
    >>> TensorRows(env).reset_row(0, rows, 1)
    >>> rows.observation
    array([[0.],
           [1.]], dtype=float32)
    """

    def __init__(self, env: Env) -> None:
        self.env = env

    def reset_row(self, seed: int, rows: EnvRows, row: int) -> None:
        """The first state of this seed's episode."""
        self._write(self.env.reset(seed), self.env.spec.state_keys, rows, row)

    def step_row(self, action: Any, rows: EnvRows, row: int) -> None:
        """The state after this action, with reward, terminated and truncated."""
        tensor = torch.tensor(action, dtype=self.env.spec.action.dtype, device="cpu")
        self._write(self.env.step(tensor), self.env.spec.step_keys, rows, row)

    def _write(self, outputs: TensorDict, keys: tuple[str, ...], rows: EnvRows, row: int) -> None:
        for key in keys:
            value, array = outputs[key].numpy(), getattr(rows, key)
            if (
                value.shape != array.shape[1:] or value.dtype != array.dtype
            ):  # numpy would broadcast
                raise ValueError(
                    f"{type(self.env).__name__} returned {key!r} as {value.dtype} "
                    f"{list(value.shape)}, but its spec has {array.dtype} {list(array.shape[1:])}"
                )
            array[row] = value


def chosen_rows(rows: Tensor | None, num_envs: int) -> list[int]:
    """The row numbers, checked to exist and to be distinct; None: all rows.

    >>> chosen_rows(torch.tensor([2, 0]), 3), chosen_rows(None, 3)
    ([2, 0], [0, 1, 2])
    """
    if rows is None:
        return list(range(num_envs))
    if rows.ndim != 1 or rows.dtype != torch.int64:
        raise ValueError(
            f"rows must be int64 [n]; got {rows.dtype} {list(rows.shape)}. Pass for instance "
            "torch.tensor([0, 2]), or None for all"
        )
    numbers: list[int] = rows.tolist()
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"rows={numbers}: each row may be given only once")
    if numbers and not (0 <= min(numbers) and max(numbers) < num_envs):
        raise IndexError(f"rows={numbers} must be in 0 .. {num_envs - 1}, the rows of this batch")
    return numbers


def checked_seeds(seeds: Tensor, num_rows: int) -> list[int]:
    """The seeds as integers, checked to be one for each row.

    >>> checked_seeds(torch.tensor([7, 8]), 2)
    [7, 8]
    """
    if not _is_tensor(seeds, (num_rows,), torch.int64):
        raise ValueError(
            f"seeds must be int64 [{num_rows}], one for each row; got {_shown(seeds)}. Pass for "
            f"instance torch.arange({num_rows})"
        )
    numbers: list[int] = seeds.tolist()
    if numbers and min(numbers) < 0:
        raise ValueError(f"seeds={numbers} must be at least 0")
    return numbers


def checked_actions(action: Tensor, spec: EnvSpec, num_rows: int) -> list[Any]:
    """The actions one by one, as ints or as arrays [D], checked against the spec.

    >>> from raffia.envs.env import Discrete
    >>> spec = EnvSpec(observation_shape=(1,), action=Discrete(2))
    >>> checked_actions(torch.tensor([1, 0]), spec, 2)
    [1, 0]
    """
    kind = spec.action
    if not _is_tensor(action, (num_rows, *kind.shape), kind.dtype):
        raise ValueError(
            f"actions must be {kind.dtype} {[num_rows, *kind.shape]}, one for each row; got "
            f"{_shown(action)}"
        )
    if isinstance(kind, Box):
        array: Array = action.numpy(force=True)
        low, high = np.asarray(kind.low), np.asarray(kind.high)
        slack = 1e-4 * (high - low)  # what rounding may do
        inside = (low - slack <= array) & (array <= high + slack)  # False for NaN too
        if not inside.all():
            raise ValueError(
                f"actions {array.tolist()} must be in {kind.low} .. {kind.high}: action.clamp(low, "
                "high) cuts off the draws of an unbounded policy, tanh bounds it"
            )
        return list(array)
    numbers: list[int] = action.tolist()
    if num_rows and not (0 <= min(numbers) and max(numbers) < kind.n):
        raise ValueError(f"actions {numbers} must be in 0 .. {kind.n - 1}")
    return numbers


def _is_tensor(value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return isinstance(value, Tensor) and value.shape == shape and value.dtype == dtype


def _shown(value: Any) -> str:
    """A description of a value that was passed where a tensor is expected."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return f"{shown(value)}, which is not a tensor"


def refuse_ended(ended: list[int]) -> None:
    """Raise an error if there are rows whose episode has ended, or has not begun.

    >>> refuse_ended([])
    """
    if ended:
        raise RuntimeError(
            f"rows {ended} have no running episode: it has ended or was never started; call "
            f"reset(seeds, rows=torch.tensor({ended})) with {len(ended)} new seeds, then step. "
            "Environments that a Collector plays are its alone: evaluate in others"
        )


def raised_in(error: Raised, row: int) -> Raised:
    """The error, with the row of the environment that raised it, for `row_of_error`.

    >>> row_of_error(raised_in(ValueError("the motor is hot"), 3))
    3
    """
    error.row = row  # type: ignore[attr-defined]
    return error


def row_of_error(error: Exception) -> int | None:
    """The row of the environment that raised an error; None if it does not say.

    >>> row_of_error(ValueError("of nobody"))
    """
    return getattr(error, "row", None)
