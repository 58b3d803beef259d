"""A learner whose batch is shared among processes: each takes its rows, all take the mean."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from raffia.distributed.group import Group
from raffia.functional.trees import aligned_leaves
from raffia.learner import Learner, applies_stacks, join_metrics
from raffia.tensordict.byte_tensors import bytes_to_tensor
from raffia.tensordict.tensordict import TensorDict


class Leading(Protocol):
    """A group that this process leads: `raffia.distributed.Followers`."""

    def grads(
        self, learner: Learner, state: TensorDict, batch: TensorDict
    ) -> tuple[TensorDict, TensorDict]:
        """The mean gradients over the parts of a batch."""

    def apply(self, learner: Learner, state: TensorDict, update: TensorDict) -> TensorDict:
        """The state after the update, here and in all others."""


class DataParallel:
    """A learner that shares each batch [B] with the other processes of a group.

    Its gradients are the mean over the parts. Two processes give the bits of
    `Accumulate(learner, 2)`, and any number those of `Accumulate(learner, number)` with
    sums="ordered". "priority" is joined in the order of rows, other metrics become their mean;
    "grad_norm" is the length of the mean gradient. Buffers that a part has changed (statistics of
    BatchNorm) become their mean, where `Accumulate` shows parts their statistics in turn.

    group: `Followers`, which this process leads; or a `Group` whose members all call the same with
        the same state and the same batch.

    >>> from raffia.distributed.group import Rendezvous
    >>> from raffia.distributed.check_engine import MeanLearner
    >>> with Rendezvous() as rendezvous, Group(rendezvous.address, rank=0, size=1) as group:
    ...     learner = DataParallel(MeanLearner("{}", 0), group)
    ...     batch = TensorDict(x=torch.arange(4.0), batch_size=[4])
    ...     update, metrics = learner.grads(learner.init(0), batch)
    >>> update["grads", "w"], metrics["priority"]
    (tensor(-1.5000), tensor([0., 1., 2., 3.]))
    """

    def __init__(self, learner: Learner, group: Group | Leading) -> None:
        self.learner, self.group = learner, group
        self.applies_stacks = applies_stacks(learner)
        self.learns_faster_alone = bool(getattr(learner, "learns_faster_alone", False))

    def init(self, seed: int) -> TensorDict:
        """The initial state of the wrapped learner."""
        return self.learner.init(seed)

    def grads(self, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, TensorDict]:
        """The mean gradients over the parts of all processes."""
        if not isinstance(self.group, Group):
            return self.group.grads(self.learner, state, batch)
        part = part_of(batch, self.group.rank, self.group.size, len(state.batch_size))
        return mean_over(self.group, state, *self.learner.grads(state, part))

    def apply(self, state: TensorDict, update: TensorDict) -> TensorDict:
        """Apply the update with the wrapped learner, in all processes."""
        if not isinstance(self.group, Group):
            return self.group.apply(self.learner, state, update)
        return self.learner.apply(state, update)


def part_of(batch: TensorDict, rank: int, size: int, members: int = 0) -> TensorDict:
    """The rows of a batch [B] that a process takes: rank B / size and those after.

    members: how many leading dimensions of the state count members; batches may be [P, B].

    >>> batch = TensorDict(x=torch.arange(6), batch_size=[6])
    >>> part_of(batch, 1, 3)["x"]
    tensor([2, 3])
    """
    dim = members if len(batch.batch_size) > members else 0
    rows = batch.batch_size[dim]
    if rows % size:
        near = [number for number in range(1, rows + 1) if rows % number == 0]
        raise ValueError(
            f"a batch of {rows} cannot be divided equally among {size} processes: use {near}"
        )
    return batch.split(rows // size, dim)[rank]


def mean_over(
    group: Group,
    state: TensorDict,
    update: TensorDict,
    metrics: TensorDict,
    *,
    mean_grads: Callable[[Sequence[Tensor]], list[Tensor]] | None = None,
) -> tuple[TensorDict, TensorDict]:
    """The update and the metrics of a batch, out of those that each process has of its part.

    state: before the update.
    mean_grads: of the gradients' leaves; None: `group.mean`.

    >>> from raffia.distributed.group import Rendezvous
    >>> update = TensorDict(grads=TensorDict(w=torch.ones(2)), buffers=TensorDict())
    >>> with Rendezvous() as rendezvous, Group(rendezvous.address, rank=0, size=1) as group:
    ...     mean, _ = mean_over(group, TensorDict(buffers=TensorDict()), update, TensorDict())
    >>> mean["grads", "w"]
    tensor([1., 1.])
    """
    grads, grads_structure = pytree.tree_flatten(update["grads"])
    buffers, buffers_structure = pytree.tree_flatten(update["buffers"])
    before = aligned_leaves(update["buffers"], state["buffers"])[1]
    changed = [
        at
        for at, (new, old) in enumerate(zip(buffers, before, strict=True))
        if new.data_ptr() != old.data_ptr()
    ]
    averaged = [at for at in changed if buffers[at].is_floating_point()]
    counted = {str(at): buffers[at] for at in changed if not buffers[at].is_floating_point()}
    form = _form(update, [*grads, *(buffers[at] for at in changed)])
    reports = group.gather(TensorDict(metrics=metrics, counted=TensorDict(counted), form=form))
    for rank, other in enumerate(reports):
        if not torch.equal(other["form"], form):
            raise ValueError(
                f"process {rank} has gradients of other names or shapes than process "
                f"{group.rank}: all must make the same learner from the same config"
            )
    # Of buffers what was added, so that one that is as it was stays so to the bit.
    added = [torch.where(buffers[at] == before[at], 0, buffers[at] - before[at]) for at in averaged]
    if mean_grads is None:
        means = group.mean([*grads, *added])
    else:
        means = [*mean_grads(grads), *group.mean(added)]
    for at, change in zip(averaged, means[len(grads) :], strict=True):
        buffers[at] = before[at] + change
    for name in counted:  # the same in all, such as numbers of batches; else the first one's
        buffers[int(name)] = reports[0]["counted", name].to(buffers[int(name)].device)
    mean = grads_structure.unflatten(means[: len(grads)])
    device = grads[0].device
    parts = [one["metrics"].to(device) for one in reports]  # they came over the CPU
    joined = join_metrics(parts, mean, len(state.batch_size))
    out = update.copy().set("grads", mean)
    return out.set("buffers", buffers_structure.unflatten(buffers)), joined


def _form(update: TensorDict, summed: list[Tensor]) -> Tensor:  # [32]
    """A digest of the names, dtypes and shapes of the summed tensors, equal in all processes."""
    names = [*update["grads"].keys(True, True)]
    text = repr([names, [(leaf.dtype, tuple(leaf.shape)) for leaf in summed]])
    return bytes_to_tensor(hashlib.sha256(text.encode()).digest())
