"""The learner's state made of an agent's own tensors, and an update put back into the agent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from raffia.algorithms.ilql.model import ILQLModel, ILQLTarget
from raffia.tensordict.tensordict import TensorDict

__all__ = ["Holder", "become", "shared_state", "take_over"]

Named = Iterable[tuple[str, Tensor]]


class Holder(Protocol):
    """What of an agent learning changes, and the seed of its dropout."""

    model: ILQLModel
    target: ILQLTarget
    opt: TensorDict | None
    step: int
    seed: int


def shared_state(holder: Holder, hyper: TensorDict) -> TensorDict:
    """The learner's state, in the memory of the agent.

    >>> from raffia.algorithms.ilql.agent import ILQL
    >>> agent = ILQL(None, {"vocab_size": 6, "n_layer": 1, "n_head": 2, "n_embd": 8})
    >>> state = shared_state(agent, TensorDict())
    >>> state["params", "v", "2", "bias"].fill_(5.0)
    tensor([5.])
    >>> agent.model.v[2].bias.item()
    5.0
    """
    named = list(holder.model.named_parameters())
    learns = [(name, p) for name, p in named if p.requires_grad]
    kept = [(name, p) for name, p in named if not p.requires_grad]
    return TensorDict(
        params=_nested(learns),
        buffers=_nested([*kept, *holder.model.named_buffers()]),
        target=_nested(_followers(holder)),
        opt=TensorDict() if holder.opt is None else holder.opt,
        hyper=hyper,
        step=torch.tensor(holder.step),
        dropout_seed=torch.tensor(holder.seed),
    )


@torch.no_grad()
def take_over(holder: Holder, state: TensorDict) -> None:
    """Make the agent what the state is. Most of it lies in the agent's memory already.

    >>> from raffia.algorithms.ilql.agent import ILQL
    >>> agent = ILQL(None, {"vocab_size": 6, "n_layer": 1, "n_head": 2, "n_embd": 8})
    >>> state = shared_state(agent, TensorDict()).clone()
    >>> state["params", "v", "2", "bias"].fill_(5.0), state["step"].fill_(3)
    (tensor([5.]), tensor(3))
    >>> take_over(agent, state)
    >>> agent.model.v[2].bias.item(), agent.step
    (5.0, 3)
    """
    learns = [(name, p) for name, p in holder.model.named_parameters() if p.requires_grad]
    for part, named in (("params", learns), ("target", _followers(holder))):
        for name, mine in named:
            new = state[(part, *name.split("."))]
            if new.data_ptr() != mine.data_ptr():
                mine.copy_(new)
    holder.opt, holder.step = state["opt"], int(state["step"])


@torch.no_grad()
def become(holder: Holder, state: TensorDict) -> None:
    """As `take_over`, of a state that learning has not made: its buffers count, too.

    >>> from raffia.algorithms.ilql.agent import ILQL
    >>> agent = ILQL(None, {"vocab_size": 6, "n_layer": 1, "n_head": 2, "n_embd": 8})
    >>> become(agent, shared_state(agent, TensorDict()).clone())
    >>> agent.opt is None
    True
    """
    take_over(holder, state)
    if not len(list(holder.opt.keys()) if holder.opt is not None else []):
        holder.opt = None
    kept = [(name, p) for name, p in holder.model.named_parameters() if not p.requires_grad]
    buffers = [*holder.model.named_buffers(), *holder.target.named_buffers()]
    for name, mine in (*kept, *buffers):
        new = state[("buffers", *name.split("."))]
        if new.data_ptr() != mine.data_ptr():
            mine.copy_(new)


def _followers(holder: Holder) -> list[tuple[str, Tensor]]:
    """The slow copy of what learns."""
    learns = {name for name, p in holder.model.named_parameters() if p.requires_grad}
    return [(name, p) for name, p in holder.target.named_parameters() if name in learns]


def _nested(named: Named) -> TensorDict:
    return TensorDict({name: tensor.detach() for name, tensor in named}).unflatten_keys(".")
