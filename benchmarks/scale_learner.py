"""A learner of 6.6 million weights for `benchmarks.scale`; followers import it by name."""

from __future__ import annotations

import torch

from raffia.functional.gradients import value_and_grad
from raffia.functional.optim import adamw
from raffia.tensordict.tensordict import TensorDict

WIDTH, DEPTH = 1_280, 4


class DenseLearner:
    """Layers of 1,280 x 1,280 with tanh, which learn their input by Adam."""

    applies_shards = True

    def __init__(self, config: str = "{}", index: int = 0) -> None:
        self._optimizer = adamw(weight_decay=0.0)

    def init(self, seed: int) -> TensorDict:
        """Weights from the seed."""
        generator = torch.Generator().manual_seed(seed)
        weights = {
            f"layer{at}": torch.randn(WIDTH, WIDTH, generator=generator) * WIDTH**-0.5
            for at in range(DEPTH)
        }
        params = TensorDict(weights)
        return TensorDict(
            params=params, buffers=TensorDict(), opt=self._optimizer.init(params), step=0
        )

    def grads(self, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, TensorDict]:
        """Of the mean squared error."""

        def loss(params: TensorDict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            x = batch["x"]
            for name in params.keys():
                x = torch.tanh(x @ params[name])
            return (x - batch["x"]).square().mean(), {}

        grads, (value, _) = value_and_grad(loss, state["params"])
        return TensorDict(grads=grads, buffers=state["buffers"]), TensorDict(loss=value)

    def apply(self, state: TensorDict, update: TensorDict) -> TensorDict:
        """A step of Adam."""
        params, opt = self._optimizer.update(
            state["params"], update["grads"], state["opt"], learning_rate=1e-4
        )
        return state.replace(params=params, opt=opt)


def batch(rows: int) -> TensorDict:
    """Rows at random."""
    generator = torch.Generator().manual_seed(0)
    return TensorDict(x=torch.randn(rows, WIDTH, generator=generator), batch_size=[rows])
