"""The learner interface: three pure functions on one tree of tensors; and composite learners.

`grads` draws nothing, searches nothing and writes nothing, so it can be vmapped over stacked states
and compiled. `Accumulate` takes a learner and is one; so will be whatever trains a population or in
several processes, and they wrap each other in any order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from raffia.functional.gradients import global_norm
from raffia.hints import check_range
from raffia.tensordict.keys import dotted
from raffia.tensordict.tensordict import TensorDict


class Learner(Protocol):
    """The interface of the learners that the training loop trains.

    A state holds all of a run that learning changes, at least

        params, buffers   of the network, by the names of its modules
        target            the slow copy of both
        opt               of the optimiser
        hyper             what may differ between members of a population, tensors []
        step              int64 [], how many updates were made
    """

    def init(self, seed: int) -> TensorDict:
        """The state before the first update; the same seed gives the same bits."""

    def grads(self, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, TensorDict]:
        """Compute the update for a batch [B], and its metrics.

        The update holds "grads", like "params", and "buffers" as they are after the batch. The
        metrics are means [], and "priority" [B] where replay has priorities.
        """

    def apply(self, state: TensorDict, update: TensorDict) -> TensorDict:
        """The state after the update: one step of the optimiser, the target moved, step + 1.

        It may use the memory of the state that it is given, which is not to be used any more.
        """


def applies_stacks(learner: Learner) -> bool:
    """Whether `apply` also takes the stacked states [P] of several members in one call; such a
    learner declares this with an attribute `applies_stacks`.

    >>> class Plain:
    ...     pass
    >>> applies_stacks(Plain())
    False
    """
    return bool(getattr(learner, "applies_stacks", False))


def applies_shards(learner: Learner) -> bool:
    """Whether `apply` also takes a state and gradients that hold only some rows of each tensor;
    such a learner declares this with an attribute `applies_shards`.

    Such an `apply` treats each number by itself, but for clipping: it clips by the norm
    `update["grad_norm"]`, that of all of the gradients, where an update has it.

    >>> class Plain:
    ...     pass
    >>> applies_shards(Plain())
    False
    """
    return bool(getattr(learner, "applies_shards", False))


class Accumulate:
    """A learner that takes a batch in equal parts, one after the other, to need less memory.

    Its gradients are the mean over the parts, which is what the batch as a whole gives where the
    loss is a mean over samples. Layers that look at a batch (BatchNorm) see the parts, each with
    the statistics that the one before has left. Of the metrics "priority" is joined, and others
    become their mean; "grad_norm" is the length of the mean gradient. Over a population, whose
    state is [P], a batch [B] or batches [P, B] are cut along B.

    >>> class Mean:  # the parameter moves to where the data are
    ...     def init(self, seed):
    ...         return TensorDict(params=TensorDict(w=torch.zeros(())), buffers=TensorDict())
    ...     def grads(self, state, batch):
    ...         error = state["params", "w"] - batch["x"]
    ...         update = TensorDict(grads=TensorDict(w=error.mean()), buffers=state["buffers"])
    ...         return update, TensorDict(loss=error.square().mean() / 2, priority=error.abs())
    ...     def apply(self, state, update):
    ...         return state.replace(params=state["params"] - update["grads"])
    >>> learner, batch = Accumulate(Mean(), 2), TensorDict(x=torch.arange(4.0), batch_size=[4])
    >>> update, metrics = learner.grads(learner.init(0), batch)
    >>> update["grads", "w"], metrics["loss"], metrics["priority"]
    (tensor(-1.5000), tensor(1.7500), tensor([0., 1., 2., 3.]))
    """

    def __init__(self, learner: Learner, num_micro_batches: int) -> None:
        check_range("num_micro_batches", num_micro_batches, 1)
        self.learner, self.num_micro_batches = learner, num_micro_batches
        self.applies_stacks = applies_stacks(learner)
        self.applies_shards = applies_shards(learner)
        self.learns_faster_alone = bool(getattr(learner, "learns_faster_alone", False))

    def init(self, seed: int) -> TensorDict:
        """The state of the wrapped learner."""
        return self.learner.init(seed)

    def grads(self, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, TensorDict]:
        """The mean gradients over the parts, and the buffers as the last part has left them."""
        members = len(state.batch_size)
        dim = members if len(batch.batch_size) > members else 0
        size, num = batch.batch_size[dim], self.num_micro_batches
        if size % num:
            near = [n for n in range(1, size + 1) if size % n == 0]
            raise ValueError(
                f"a batch of {size} cannot be split into {num} equal parts; num_micro_batches may "
                f"be one of {near}"
            )
        first, *others = batch.split(size // num, dim)
        update, metrics = self.learner.grads(state, first)
        grads, of_parts = update["grads"], [metrics]
        for part in others:
            state = state.copy().set("buffers", update["buffers"])
            update, metrics = self.learner.grads(state, part)
            grads = grads + update["grads"]
            of_parts.append(metrics)
        grads = grads / num
        return update.copy().set("grads", grads), join_metrics(of_parts, grads, members)

    def apply(self, state: TensorDict, update: TensorDict) -> TensorDict:
        """Apply the update with the wrapped learner."""
        return self.learner.apply(state, update)


def step_of(state: TensorDict) -> int:
    """The number of updates made, which is equal for all members of a population.

    >>> step_of(TensorDict(step=torch.tensor([3, 3]), batch_size=[2]))
    3
    """
    return int(state["step"].max())


def module_tree(named: Iterable[tuple[str, Tensor]]) -> TensorDict:
    """The tensors of a module by the names of its layers, as a state has them.

    >>> layers = torch.nn.Sequential(torch.nn.Linear(1, 1))
    >>> sorted(module_tree(layers.named_parameters())["0"].keys())
    ['bias', 'weight']
    """
    return TensorDict({name: tensor.detach() for name, tensor in named}).unflatten_keys(".")


def module_names(prefix: str, tree: TensorDict) -> dict[str, Tensor]:
    """The tensors of such a tree by the names that they have in a module around the first one.

    >>> module_names("model", TensorDict(v=TensorDict(bias=torch.ones(1))))
    {'model.v.bias': tensor([1.])}
    """
    return {f"{prefix}.{dotted(key)}": tensor for key, tensor in tree.items(True, True)}


def join_metrics(parts: list[TensorDict], grads: TensorDict, members: int = 0) -> TensorDict:
    """The metrics of a batch out of those of its parts: means, "priority" joined.

    grads: the mean over the parts, of which "grad_norm" is the length.
    members: how many leading dimensions of the gradients count members.

    >>> parts = [TensorDict(loss=torch.tensor(x), priority=torch.tensor([x])) for x in (1.0, 2.0)]
    >>> joined = join_metrics(parts, TensorDict(w=torch.ones(2)))
    >>> joined["loss"], joined["priority"]
    (tensor(1.5000), tensor([1., 2.]))
    """
    out = TensorDict()
    for name in parts[0].keys(True, True):
        values = [metrics[name] for metrics in parts]
        joins = name == "priority"  # [..., B]
        out[name] = torch.cat(values, -1) if joins else torch.stack(values).mean(0)
    return out.set("grad_norm", global_norm(grads, members)) if "grad_norm" in out else out
