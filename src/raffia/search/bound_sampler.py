"""A search over sampled actions in its own memory: choosing and drawing around a model's step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from raffia.search import kernels
from raffia.search.base import SearchMemory


def bind_sampler(
    bind: Callable[[SearchMemory], Any],  # of the model
    memory: SearchMemory,  # whose `action` is which of the K the search took
    parameters: Tensor,  # float32 [B, P], which the model will write
    **arrays: Tensor | None,  # those of `SamplingRecord` that are not the memory's
) -> BoundSampler | None:
    """The compiled step; None where the model has none here, or arrays are of another kind."""
    actions, floats = arrays["actions"], [memory.prior_logits, parameters]
    assert actions is not None
    chosen = torch.zeros(len(memory.action), actions.shape[-1])
    floats += [array for array in arrays.values() if array is not None and array.dim() != 1]
    if actions.dim() != 3 or not all(map(_is_float32_here, floats)):
        return None
    model = bind(replace(memory, action=chosen, prior_logits=parameters))
    if not hasattr(model, "native"):
        return None
    record = kernels.sampling.SamplingRecord(
        **arrays,
        parent_row=memory.parent_row,
        node_row=memory.node_row,
        choice=memory.action,
        chosen=chosen,
        parameters=parameters,
        prior_logits=memory.prior_logits,
        num_samples=actions.shape[1],
        size=actions.shape[2],
    )
    return BoundSampler(actions, model, record)


@dataclass(frozen=True)
class BoundSampler:
    """The step of one simulation: the chosen actions for the model, its answer, the next draws."""

    actions: Tensor  # [R, K, D]: those of each node, in the search's memory
    model: Any  # what a model's `bind` returned, with `native`
    record: kernels.sampling.SamplingRecord

    def __call__(self, rows: int) -> None:
        kernels.sampling.run(self.native()[1], rows)

    def native(self) -> tuple[int, int]:
        """The step's address and context, see raffia.jit.kernel; the model's hold in one thread."""
        model, context = self.model.native()
        self.record.update(model=model, context=context)
        return kernels.sampling.step_address(), self.record.address


def _is_float32_here(array: Tensor) -> bool:
    return array.dtype == torch.float32 and array.is_cpu and array.is_contiguous()
