"""Several environments as one BatchEnv in this process, and a limit of time around any BatchEnv."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from raffia.envs.env import BatchEnv, Env, EnvSpec, FastForwardBatch, FastForwardEnv
from raffia.envs.rows import (
    EnvRows,
    RowEnv,
    TensorRows,
    checked_actions,
    checked_seeds,
    chosen_rows,
    raised_in,
    refuse_ended,
)
from raffia.hints import check_range
from raffia.tensordict.access import unchecked
from raffia.tensordict.tensordict import TensorDict


class SerialBatch:
    """E environments of one kind, stepped one after the other.

    >>> from raffia.envs.gym import GymEnv
    >>> batch = SerialBatch([GymEnv("CartPole-v1") for _ in range(3)])
    >>> batch.reset(torch.arange(3))["observation"].shape
    torch.Size([3, 4])
    >>> batch.step(torch.tensor([0, 1]), rows=torch.tensor([2, 0]))["reward"]
    tensor([1., 1.])
    """

    def __init__(self, envs: Sequence[Env], rows: EnvRows | None = None) -> None:
        """`rows` are arrays to write into, as in memory that is shared; None: its own."""
        if not envs:
            raise ValueError("SerialBatch(envs) needs at least one environment")
        self.spec = spec_of(envs[0])
        for row, env in enumerate(envs):
            if env.spec != self.spec:
                raise ValueError(
                    f"environments of a batch must have equal specs; row 0 has {self.spec}, but "
                    f"row {row} has {env.spec}"
                )
        self.num_envs = len(envs)
        self.envs = list(envs)
        self.rows = EnvRows.for_spec(self.spec, self.num_envs) if rows is None else rows
        self._writers = [env if isinstance(env, RowEnv) else TensorRows(env) for env in envs]
        inner = [getattr(w, "gym", env) for w, env in zip(self._writers, envs, strict=True)]
        if len(set(map(id, inner))) < len(envs):
            raise ValueError(
                "SerialBatch(envs) has the same environment in several rows, which would step it "
                "in turn: make a new one for each row"
            )
        self._tensors = self.rows.tensors(self.spec.step_keys)

    def reset(self, seeds: Tensor, rows: Tensor | None = None) -> TensorDict:
        """Start episodes from these seeds [n] in these rows [n] (None: all); return states [n]."""
        chosen = chosen_rows(rows, self.num_envs)
        for row, seed in zip(chosen, checked_seeds(seeds, len(chosen)), strict=True):
            self.reset_row(row, seed)
        return outputs_of(self._tensors, self.spec.state_keys, rows, len(chosen))

    def step(self, action: Tensor, rows: Tensor | None = None) -> TensorDict:
        """Act in these rows [n] (None: all), action [n, ...]: the states after it, [n]."""
        chosen = chosen_rows(rows, self.num_envs)
        actions = checked_actions(action, self.spec, len(chosen))
        refuse_ended([row for row in chosen if not self.rows.runs[row]])
        for row, one in zip(chosen, actions, strict=True):
            self.step_row(row, one)
        return outputs_of(self._tensors, self.spec.step_keys, rows, len(chosen))

    def reset_row(self, row: int, seed: int) -> None:
        """Start the episode of a seed in one row; the state is written to `rows`."""
        self.rows.runs[row] = False  # if the environment raises, nothing runs there
        try:
            self._writers[row].reset_row(seed, self.rows, row)
        except Exception as error:
            raised_in(error, row)
            raise
        self.rows.runs[row] = True

    def step_row(self, row: int, action: object) -> None:
        """Act in one row, an int or an array [D]; the state after it lies in `rows`."""
        self.rows.runs[row] = False
        try:
            self._writers[row].step_row(action, self.rows, row)
        except Exception as error:
            raised_in(error, row)
            raise
        rows = self.rows
        ended = rows.terminated[row] or rows.truncated[row]
        rows.runs[row] = not ended or (rows.continues is not None and rows.continues[row])

    def fast_forward(
        self, seeds: Tensor, actions: Sequence[Tensor], rows: Tensor | None = None
    ) -> None:
        """Start episodes from seeds [n] in rows [n] (None: all), and play the actions of each."""
        chosen = chosen_rows(rows, self.num_envs)
        for row, seed, played in zip(
            chosen, checked_seeds(seeds, len(chosen)), actions, strict=True
        ):
            self.fast_forward_row(row, seed, played)

    def fast_forward_row(self, row: int, seed: int, actions: Tensor) -> None:
        """Start the episode of a seed in one row, and play these actions [t, ...]."""
        checked, env = checked_actions(actions, self.spec, len(actions)), self.envs[row]
        self.rows.runs[row] = False
        try:
            if isinstance(env, FastForwardEnv):
                env.fast_forward(seed, actions)
                self.rows.runs[row] = True
                return
            self.reset_row(row, seed)
            for action in checked:
                refuse_ended([] if self.rows.runs[row] else [row])
                self.step_row(row, action)
        except Exception as error:
            raised_in(error, row)
            raise

    def render(self, row: int) -> Tensor | None:
        """A picture of one environment, uint8 [H, W, 3]; None where it has no picture."""
        return self.envs[row].render()

    def close(self) -> None:
        """Close all environments."""
        for env in self.envs:
            env.close()


def spec_of(env: Any) -> EnvSpec:
    """The spec of an environment; TypeError if it is not an Env.

    >>> spec_of(None)
    Traceback (most recent call last):
    ...
    TypeError: a NoneType is not an Env, because its spec is not an EnvSpec; ...
    """
    spec = getattr(env, "spec", None)
    if not isinstance(spec, EnvSpec):
        raise TypeError(
            f"a {type(env).__name__} is not an Env, because its spec is not an EnvSpec; "
            "raffia.envs.GymEnv(env) makes one from a Gymnasium environment"
        )
    return spec


def outputs_of(
    tensors: dict[str, Tensor], keys: tuple[str, ...], rows: Tensor | None, num_rows: int
) -> TensorDict:
    """The outputs of these rows, [num_rows], in new memory.

    >>> arrays = {"reward": torch.tensor([1.0, 2.0])}
    >>> outputs_of(arrays, ("reward",), torch.tensor([1]), 1)["reward"]
    tensor([2.])
    """
    if rows is None:
        entries = {key: tensors[key].clone() for key in keys}
    else:
        rows = rows.cpu()
        entries = {key: tensors[key].index_select(0, rows) for key in keys}
    return unchecked(entries, torch.Size([num_rows]))


class TimeLimit:
    """A BatchEnv wrapper that truncates episodes after a number of steps, unless they end earlier.

    >>> from raffia.envs.batch import SerialBatch
    >>> from raffia.envs.probe import DelayProbe
    >>> batch = TimeLimit(SerialBatch([DelayProbe(), DelayProbe()]), max_episode_steps=1)
    >>> _ = batch.reset(torch.arange(2))
    >>> after = batch.step(torch.tensor([0, 0]))
    >>> after["truncated"], after["terminated"]
    (tensor([True, True]), tensor([False, False]))
    """

    def __init__(self, batch: BatchEnv, max_episode_steps: int) -> None:
        check_range("max_episode_steps", max_episode_steps, 1)
        self.batch = batch
        self.spec = batch.spec
        self.num_envs = batch.num_envs
        self.max_episode_steps = max_episode_steps
        self._length = torch.zeros(batch.num_envs, dtype=torch.int64, device="cpu")
        if isinstance(batch, FastForwardBatch):  # it is offered where it does something
            self.fast_forward = self._fast_forward

    def reset(self, seeds: Tensor, rows: Tensor | None = None) -> TensorDict:
        """Start episodes from these seeds [n] in these rows [n] (None: all); return states [n]."""
        state = self.batch.reset(seeds, rows)
        self._length[slice(None) if rows is None else rows] = 0
        return state

    def step(self, action: Tensor, rows: Tensor | None = None) -> TensorDict:
        """Act in these rows [n] (None: all), action [n, ...]: the states after it, [n]."""
        chosen = slice(None) if rows is None else rows
        over = (self._length[chosen] >= self.max_episode_steps).nonzero().flatten()
        if len(over):
            ended = (over if rows is None else rows[over]).tolist()
            raise RuntimeError(
                f"rows {ended} were truncated after {self.max_episode_steps} steps; call "
                f"reset(seeds, rows=torch.tensor({ended})) with {len(ended)} new seeds, then step"
            )
        after = self.batch.step(action, rows)
        self._length[chosen] += 1
        late = self._length[chosen] >= self.max_episode_steps
        after["truncated"] = (after["truncated"] | late) & ~after["terminated"]
        if self.spec.continues:
            after["continues"] = after["continues"] & ~late
        return after

    def _fast_forward(
        self, seeds: Tensor, actions: Sequence[Tensor], rows: Tensor | None = None
    ) -> None:
        assert isinstance(self.batch, FastForwardBatch)
        self.batch.fast_forward(seeds, actions, rows)
        lengths = self._length.new_tensor(list(map(len, actions)))
        self._length[slice(None) if rows is None else rows] = lengths

    def render(self, row: int) -> Tensor | None:
        """A picture of one environment, uint8 [H, W, 3]; None where it has no picture."""
        return self.batch.render(row)

    def close(self) -> None:
        """Close the wrapped batch."""
        self.batch.close()
