"""A limit of time around any BatchEnv."""

from __future__ import annotations

import torch
from torch import Tensor

from raffia.envs.env import BatchEnv
from raffia.tensordict.tensordict import TensorDict


class TimeLimit:
    """Truncates episodes after so many steps, unless they end before; a BatchEnv around another.

    >>> from raffia.envs.batch import SerialBatch
    >>> from raffia.envs.probe import DelayProbe
    >>> batch = TimeLimit(SerialBatch([DelayProbe(), DelayProbe()]), max_episode_steps=1)
    >>> _ = batch.reset(torch.arange(2))
    >>> after = batch.step(torch.tensor([0, 0]))
    >>> after["truncated"], after["terminated"]
    (tensor([True, True]), tensor([False, False]))
    """

    def __init__(self, batch: BatchEnv, max_episode_steps: int) -> None:
        if max_episode_steps < 1:
            raise ValueError(f"max_episode_steps={max_episode_steps} must be at least 1")
        self.batch = batch
        self.spec = batch.spec
        self.num_envs = batch.num_envs
        self.max_episode_steps = max_episode_steps
        self._length = torch.zeros(batch.num_envs, dtype=torch.int64)

    def reset(self, seeds: Tensor, rows: Tensor | None = None) -> TensorDict:
        """Begin the episodes of these seeds [n] in these rows [n] (None: all): the states [n]."""
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

    def render(self, row: int) -> Tensor | None:
        """A picture of one environment, uint8 [H, W, 3]; None where there is none."""
        return self.batch.render(row)

    def close(self) -> None:
        """Close the batch within."""
        self.batch.close()
