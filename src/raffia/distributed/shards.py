"""States divided by rows among the processes of a group: divide, gather, and learn from them.

Of "params", "target" and "opt" each tensor is divided along its first dimension, rows in order of
rank; one with fewer rows than there are processes, and all else in a state, is whole in each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from raffia.distributed.data_parallel import mean_over
from raffia.distributed.group import Group, buckets
from raffia.functional.trees import aligned_leaves
from raffia.learner import Learner
from raffia.tensordict.tensordict import TensorDict

DIVIDED = ("params", "target", "opt")


def rows_of(state: TensorDict, size: int) -> TensorDict:
    """The number of rows of each tensor that is divided among this many processes; 0 if it is
    replicated.

    >>> state = TensorDict(params=TensorDict(w=torch.ones(5, 2), b=torch.ones(())))
    >>> rows_of(state, 2)["params"].to_dict()
    {'w': tensor(5), 'b': tensor(0)}
    """

    def rows(leaf: Tensor) -> Tensor:
        is_divided = leaf.dim() > 0 and leaf.shape[0] >= size and leaf.numel() > 0
        return torch.tensor(leaf.shape[0] if is_divided else 0)

    return TensorDict(
        {name: pytree.tree_map(rows, state[name]) for name in DIVIDED if name in state.keys()}
    )


def cut(state: TensorDict, rows: TensorDict, rank: int, size: int) -> TensorDict:
    """A process's part of a complete state, copied.

    rows: see `rows_of`.

    >>> state = TensorDict(params=TensorDict(w=torch.arange(5)), step=torch.tensor(3))
    >>> part = cut(state, rows_of(state, 2), 1, 2)
    >>> part["params", "w"], part["step"]
    (tensor([3, 4]), tensor(3))
    """
    out = state.copy()
    for name in rows.keys():
        _, structure = pytree.tree_flatten(state[name])
        leaves, numbers = aligned_leaves(state[name], rows[name])
        parts = [
            leaf[_span(int(number), rank, size)].clone() if number else leaf.clone()
            for leaf, number in zip(leaves, numbers, strict=True)
        ]
        out.set(name, structure.unflatten(parts))
    return out


def gathered(
    group: Group, parts: TensorDict, rows: TensorDict, *, is_kept: bool = True
) -> TensorDict:
    """Gather the whole of which each process of a group has a part; all processes must call it.

    parts: some of "params", "target" and "opt".
    is_kept: False for a process that only gives its part: it gets its part back.

    >>> from raffia.distributed.group import Rendezvous
    >>> params = TensorDict(params=TensorDict(w=torch.arange(3.0)))
    >>> with Rendezvous() as rendezvous, Group(rendezvous.address, rank=0, size=1) as group:
    ...     gathered(group, params, rows_of(params, 1))["params", "w"]
    tensor([0., 1., 2.])
    """
    out, structure = pytree.tree_flatten(parts)
    numbers = [int(n) for n in aligned_leaves(parts, rows.select(*parts.keys()))[1]]
    wholes = [_meta(leaf, number) for leaf, number in zip(out, numbers, strict=True)]
    divided = [at for at, number in enumerate(numbers) if number]
    for bucket in ([divided[i] for i in one] for one in buckets([wholes[at] for at in divided])):
        flat = torch.cat([out[at].reshape(-1) for at in bucket])
        lengths = [
            [_numel(wholes[at], rank, group.size) for at in bucket] for rank in range(group.size)
        ]
        padded = flat.new_zeros(max(map(sum, lengths)))
        padded[: len(flat)] = flat
        found = group.gather_flat(padded)
        if not is_kept:
            continue
        pieces = [one[: sum(each)].split(each) for one, each in zip(found, lengths, strict=True)]
        for at, of_leaf in zip(bucket, zip(*pieces, strict=True), strict=True):
            out[at] = torch.cat(of_leaf).view(wholes[at].shape)
    return structure.unflatten(out)


def shard_grads(
    group: Group, learner: Learner, state: TensorDict, rows: TensorDict, batch: TensorDict
) -> tuple[TensorDict, TensorDict]:
    """This process's rows of the mean gradients, and the metrics of the whole batch.

    The parameters and the target are whole meanwhile. Parts are added in order of rank. The update
    holds "grad_norm", too: the length of all of the gradient, as doubles give it.

    state: this process's part.
    batch: this process's part.

    >>> from raffia.distributed.check_engine import MeanLearner
    >>> from raffia.distributed.group import Rendezvous
    >>> learner, batch = MeanLearner("{}", 0), TensorDict(x=torch.arange(4.0), batch_size=[4])
    >>> state = learner.init(0)
    >>> with Rendezvous() as rendezvous, Group(rendezvous.address, rank=0, size=1) as group:
    ...     update, _ = shard_grads(group, learner, state, rows_of(state, 1), batch)
    >>> update["grads", "w"], update["grad_norm"]
    (tensor(-1.5000), tensor(1.5000))
    """
    names = [name for name in ("params", "target") if name in rows.keys()]
    whole = state.copy()
    for name, tree in gathered(group, state.select(*names), rows).items():
        whole.set(name, tree)
    own = learner.grads(whole, batch)
    del whole
    numbers = [int(n) for n in aligned_leaves(own[0]["grads"], rows["params"])[1]]
    update, metrics = mean_over(
        *(group, state, *own), mean_grads=lambda grads: _scattered_mean(group, grads, numbers)
    )
    grads = aligned_leaves(own[0]["grads"], update["grads"])[1]
    # What is whole in each process counts once.
    counted = [
        grad
        for grad, number in zip(grads, numbers, strict=True)
        if grad.is_floating_point() and (number or group.rank == 0)
    ]
    # As doubles, so that the norm is rounded once, whichever rows a process has.
    square = torch.zeros((), dtype=torch.float64)
    for grad in counted:
        square += torch.linalg.vector_norm(grad, dtype=torch.float64).square().cpu()
    norm = torch.stack(group.gather_flat(square.reshape(1))).sum().sqrt()
    norm = norm.to(grads[0]) if grads else norm.float()  # with their dtype and device
    if "grad_norm" in metrics.keys():
        metrics.set("grad_norm", norm)
    return update.set("grad_norm", norm), metrics


def _scattered_mean(group: Group, grads: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
    """The mean over all processes: this process's rows of what is divided."""
    out = list(grads)
    wholes = [at for at, number in enumerate(numbers) if not number]
    for at, mean in zip(wholes, group.mean([grads[at] for at in wholes]), strict=True):
        out[at] = mean
    divided = [at for at, number in enumerate(numbers) if number]
    for bucket in ([divided[i] for i in one] for one in buckets([grads[at] for at in divided])):
        parts = [
            torch.cat(
                [grads[at][_span(numbers[at], rank, group.size)].reshape(-1) for at in bucket]
            )
            for rank in range(group.size)
        ]
        mean, *others = group.exchange(parts)
        for other in others:
            mean += other
        mean /= group.size
        lengths = [_numel(grads[at], group.rank, group.size) for at in bucket]
        for at, piece in zip(bucket, mean.split(lengths), strict=True):
            out[at] = piece.view(-1, *grads[at].shape[1:]).clone()
    return out


def _span(rows: int, rank: int, size: int) -> slice:
    """The rows of a process; the first ones have one more where they are not divisible."""
    each, more = divmod(rows, size)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))


def _numel(whole: Tensor, rank: int, size: int) -> int:
    span = _span(len(whole), rank, size)
    return (span.stop - span.start) * whole[0].numel()


def _meta(part: Tensor, rows: int) -> Tensor:
    """A whole tensor without its memory."""
    shape = (rows, *part.shape[1:]) if rows else part.shape
    return torch.empty(shape, dtype=part.dtype, device="meta")
