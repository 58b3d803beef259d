"""Where a run computes: its device, and whether gradients are compiled or recorded."""

from __future__ import annotations

from collections.abc import Callable

import torch

from raffia.learner import Learner
from raffia.nn.cudagraphs import Card
from raffia.tensordict.tensordict import TensorDict
from raffia.train.experiment import RunError

NUM_WARM = 3  # updates before the gradients are recorded


def device_trouble(name: str) -> str:
    """Why torch cannot compute on this device; nothing where it can.

    >>> device_trouble("cpu"), device_trouble("gpu")
    ('', 'it knows no such device')
    """
    try:
        kind = torch.device(name).type
    except RuntimeError:
        return "it knows no such device"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return f"there is no {kind} for it here ({str(error).splitlines()[0]})"
    return ""


def require_device(name: str, setting: str = "device") -> None:
    """RunError unless torch can use this device here.

    setting: where it is named.

    >>> require_device("cpu")
    """
    if why := device_trouble(name):
        raise RunError(
            f"{setting}={name!r} can't be used: {why}. Take cpu, or cuda where torch sees a GPU"
        )


def compiled(learner: Learner) -> Learner:
    """The learner with its gradients compiled by torch.compile."""
    return _Compiled(learner)


class _Compiled:
    def __init__(self, learner: Learner) -> None:
        self.init, self.apply = learner.init, learner.apply
        self.grads = torch.compile(learner.grads)


def recorded(learner: Learner, card: Card | None = None) -> Learner:
    """The learner with its gradients recorded as a CUDA graph, of batches of one shape.

    card: None: the current GPU.
    """
    return _Recorded(learner, Card(None) if card is None else card)


class _Recorded:
    def __init__(self, learner: Learner, card: Card) -> None:
        self.init, self.apply = learner.init, learner.apply
        self._grads, self._card = learner.grads, card
        self._num_warm = 0
        self._given: tuple[TensorDict, TensorDict] | None = None
        self._output: tuple[TensorDict, TensorDict]
        self._replay: Callable[[], None]

    def grads(self, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, TensorDict]:
        """The learner's gradients and metrics, in memory of their own."""
        if self._num_warm < NUM_WARM:  # by then libraries have made what they keep
            self._num_warm += 1
            return self._card.warm(lambda: self._grads(state, batch))
        if self._given is None:
            given = state.clone(), batch.clone()
            self._output, self._replay = self._card.record(lambda: self._grads(*given))
            self._given = given
        for own, now in zip(self._given, (state, batch), strict=True):
            own.copy_(now)
        self._replay()
        update, metrics = self._output
        return update.clone(), metrics.clone()
