"""The device a run computes on, and whether gradients are compiled or recorded as CUDA graphs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

import torch

from raffia.learner import Learner, applies_shards, applies_stacks
from raffia.nn.cudagraphs import CudaGraphModule
from raffia.tensordict.tensordict import TensorDict
from raffia.train.experiment import RunError

NUM_WARM = 3  # updates before the gradients are recorded; libraries make what they keep


def device_trouble(name: str, is_here: bool = True) -> str:
    """Describe why torch cannot compute on this device; "" if it can.

    is_here: on this machine; else only the name is looked at.

    >>> device_trouble("cpu"), device_trouble("gpu")
    ('', 'no device has this name')
    """
    try:
        kind = torch.device(name).type
    except RuntimeError:
        return "no device has this name"
    if not is_here:
        return ""
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0].partition(". ")[0]
        return f"{kind} is not available here ({why})"
    return ""


def require_device(name: str, setting: str = "device") -> None:
    """Raise RunError unless torch can use this device on this machine.

    setting: where it is named.

    >>> require_device("cpu")
    """
    if why := device_trouble(name):
        raise RunError(
            f"{setting}={name!r} cannot be used: {why}. Use cpu, or cuda if torch finds a GPU"
        )


def require_compiler(device: str) -> None:
    """Raise RunError if torch.compile lacks the C++ compiler that it needs on a CPU.

    >>> require_compiler("cuda")
    """
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if device == "cpu" and os.name == "posix" and shutil.which(compiler) is None:
        raise RunError(
            f"compile=True needs a C++ compiler, and {compiler} is not found: install g++ or "
            "clang, name it in the environment variable CXX, or leave compile out"
        )


def require_defaults() -> None:
    """Raise RunError unless torch makes tensors by default as a run needs them.

    >>> require_defaults()
    """
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    if dtype != torch.float32 or device.type != "cpu":
        raise RunError(
            f"torch makes tensors of {dtype} on {device} by default here, and a run needs "
            "torch.float32 on cpu: call torch.set_default_dtype(torch.float32) and "
            "torch.set_default_device(None) first, outside of `with torch.device(...)`; the "
            "settings device and precision say where and how the run computes"
        )


class CompiledLearner:
    """A learner with its gradients compiled by torch.compile."""

    def __init__(self, learner: Learner) -> None:
        self.init, self.apply = learner.init, learner.apply
        self.applies_stacks, self.applies_shards = applies_stacks(learner), applies_shards(learner)
        self.grads = torch.compile(learner.grads)


class GraphedLearner:
    """A learner with its gradients recorded as a CUDA graph, of batches of one shape.

    reads: what gradients read of a state, which is copied into the graph's memory for each.
    """

    def __init__(self, learner: Learner, reads: Sequence[str]) -> None:
        self.init, self.apply, self._reads = learner.init, learner.apply, reads
        self.applies_stacks, self.applies_shards = applies_stacks(learner), applies_shards(learner)
        self._learner = learner
        self._graph: CudaGraphModule | None = None

    def grads(self, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, TensorDict]:
        """The learner's gradients and metrics, in memory of their own."""
        if self._graph is None:
            # The entries of a state come in another order after `apply`: a graph takes them by key.
            self._graph = CudaGraphModule(
                *(self._of_both, NUM_WARM + 1),
                in_keys=["state", "batch"],
                out_keys=["update", "metrics"],
                device=next((x.device for x in batch.values(True, True) if x.is_cuda), None),
            )
        found = self._graph(TensorDict(state=state.select(*self._reads), batch=batch))
        return found["update"], found["metrics"]

    def _of_both(self, given: TensorDict) -> TensorDict:
        update, metrics = self._learner.grads(given["state"], given["batch"])
        return TensorDict(update=update, metrics=metrics)


def accelerated(
    learner: Learner, *, compile: bool, cudagraphs: bool = False, reads: Sequence[str] = ()
) -> Learner:
    """The learner with its gradients compiled, or recorded as a CUDA graph, if it is to be.

    reads: of `GraphedLearner`.

    >>> from raffia.distributed.check_engine import MeanLearner
    >>> type(accelerated(MeanLearner("{}", 0), compile=False)).__name__
    'MeanLearner'
    """
    if compile:
        return CompiledLearner(learner)
    return GraphedLearner(learner, reads) if cudagraphs else learner
