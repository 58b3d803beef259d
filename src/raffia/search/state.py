"""SearchState: the arrays that a search works on, made from the root."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from raffia.search.memory import new_memory
from raffia.search.outputs import RootOutput
from raffia.search.settings import Settings
from raffia.search.tree import Tree
from raffia.tensordict.tensordict import TensorDict


@dataclass
class SearchState:
    """Tree entries, the paths of the simulation that runs, and the rows that the model works on.

    Only the two kinds of steps (reference.py, compiled.py) and the loop (mcts.py) touch it.
    """

    settings: Settings
    select: Any
    entries: dict[str, Any]  # of the tree, [B, ...]
    budget: list[int]  # simulations of each root
    order: Tensor  # int64 [M]: roots by falling budget: the first m are those still searched
    gamma: Tensor  # float32 [B]
    parent_row: Tensor  # int64 [B], rows of all roots' nodes, b * N + node
    node_row: Tensor  # int64 [B]
    move: Tensor  # int64 [B]: the action
    reset: Tensor  # bool [B]
    path_node: Tensor  # int32 [B, N]
    path_action: Tensor  # int32 [B, N]
    path_length: Tensor  # int32 [B]
    leaf: Tensor  # int32 [B]: the known node that ended the walk; -1: a new one
    players: int  # the sum of the two players' numbers: 1 + 2, or 0 + 1
    stamp: Tensor | None  # int32 [B, N]: the simulation that last met a node (transpositions)

    @property
    def shape(self) -> tuple[int, int, int]:
        """B, N, A."""
        batch, rows, actions = self.entries["children"].shape
        return batch, rows, actions

    def tree(self, embeddings: Any = None) -> Tree:
        """The tree that was searched."""
        return Tree(TensorDict(self.entries, batch_size=self.shape[:1]), embeddings)

    def num_searched(self) -> list[int]:
        """How many roots are searched in each simulation."""
        budget = sorted((self.budget[root] for root in self.order.tolist()), reverse=True)
        if budget[0] == budget[-1]:
            return [len(budget)] * budget[0]
        return [sum(num > simulation for num in budget) for simulation in range(budget[0])]

    def divided(self, num_parts: int) -> list["SearchState"]:
        """States of some of the roots each, over the same arrays."""
        num = len(self.order)
        return [
            replace(
                self,
                order=order,
                parent_row=torch.empty_like(order),
                node_row=torch.empty_like(order),
                move=torch.empty_like(order),
                reset=torch.zeros_like(order, dtype=torch.bool),
            )
            for part in range(min(num_parts, num))
            if len(order := self.order[part::num_parts].contiguous())
        ]

    def use_mask(self) -> None:
        """From now on actions may be illegal: those of the nodes so far are all legal."""
        if "mask" not in self.entries:
            self.entries["mask"] = torch.ones(
                self.shape, dtype=torch.bool, device=self.gamma.device
            )


UNUSED = {"children": -1, "children_visits": 0, "children_q": 0, "prior": 0, "prior_logits": 0}


def make_state(
    root: RootOutput, budget: list[int], gamma: Tensor, rows: int, settings: Settings, select: Any
) -> SearchState:
    """The arrays of a search, whose values are not set yet: `plant` of the steps does that."""
    (batch, actions), device = root.prior_logits.shape, root.prior_logits.device
    num_legal = [actions] * batch if root.mask is None else root.mask.sum(-1).tolist()
    order = sorted(range(batch), key=lambda root: -budget[root])
    i32, i64, f32, f64 = torch.int32, torch.int64, torch.float32, torch.float64

    def new(dtype: torch.dtype, *shape: int) -> Tensor:
        return new_memory(shape, dtype, device)

    nodes, edges = (batch, rows), (batch, rows, actions)
    entries: dict[str, Any] = {
        "visits": new(i32, *nodes),
        "value_sum": new(f64, *nodes),
        "raw_value": new(f32, *nodes),
        "reward": new(f32, *nodes),
        "discount": new(f32, *nodes),
        "parent": new(i32, *nodes),
        "action": new(i32, *nodes),
        "depth": new(i32, *nodes),
        "ended": new(torch.bool, *nodes),
        "children": new(i32, *edges),
        "children_visits": new(i32, *edges),
        "children_q": new(f32, *edges),
        "prior": new(f32, *edges),
        "num_tried": new(i32, *nodes),
        "q_sum": new(f64, *nodes),
        "q_min": new(f32, batch),
        "q_max": new(f32, batch),
    }
    if root.mask is not None:
        entries["mask"] = new(torch.bool, *edges)
    if select.needs_logits:
        entries["prior_logits"] = new(f32, *edges)
    if root.to_play is not None:
        entries["to_play"] = new(i32, *nodes)
    if settings.value_prefix is not None:
        entries["value_prefix"] = new(f32, *nodes)
    if settings.transpositions is not None:
        entries |= {"key": new(i64, *nodes), "canonical": new(i32, *nodes)}
    if root.actions is not None:
        entries["actions"] = root.actions.new_zeros((batch, rows, *root.actions.shape[1:]))
    return SearchState(
        settings=settings,
        select=select.prepare(num_legal, budget, actions, device),
        entries=entries,
        budget=budget,
        order=torch.tensor(order, device=device),
        gamma=gamma.to(device),
        parent_row=new(i64, batch),
        node_row=new(i64, batch),
        move=new(i64, batch),
        reset=torch.zeros(batch, dtype=torch.bool, device=device),
        path_node=new(i32, *nodes),
        path_action=new(i32, *nodes),
        path_length=new(i32, batch),
        leaf=new(i32, batch),
        players=1 if root.to_play is not None and bool((root.to_play == 0).any()) else 3,
        stamp=None if settings.transpositions is None else new(i32, *nodes),
    )
