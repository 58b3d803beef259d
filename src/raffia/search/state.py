"""SearchState: the arrays that a search works on, made from the root."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raffia.search.base import RootOutput, TreeRules
from raffia.search.memory import new_memory
from raffia.search.tree import Tree
from raffia.tensordict.access import unchecked


@dataclass
class SearchState:
    """Tree entries, the paths of the simulation that runs, and the rows that the model works on.

    Only the two kinds of steps (reference.py, compiled.py), the loop (mcts.py) and the ways to ask
    the model (models.py) touch it.
    """

    rules: TreeRules
    max_depth: int  # the rules', or else that of the longest path
    select: Any
    entries: dict[str, Tensor]  # of the tree, [B, ...]
    budget: list[int]  # simulations of each root
    order: Tensor  # int64 [M]: roots by falling budget: the first m are those still searched
    gamma: Tensor  # float32 [B]
    parent_row: Tensor  # int64 [B], rows of embeddings, node * B + root: new ones lie together
    node_row: Tensor  # int64 [B]
    leaf_action: Tensor  # int64 [B]
    reset: Tensor  # bool [B]
    path_node: Tensor  # int32 [B, N]
    path_action: Tensor  # int32 [B, N]
    path_length: Tensor  # int64 [B]
    leaf: Tensor  # int64 [B]: the known node that ended the descent; -1: a new one
    stamp: Tensor | None  # int32 [B, N]: the simulation that last visited a node (transpositions)
    kinds: list[Kind]  # of the tree's entries

    @property
    def shape(self) -> tuple[int, int, int]:
        """The numbers of roots, nodes and actions: B, N, A."""
        batch, rows, actions = self.entries["children"].shape
        return batch, rows, actions

    def tree(self) -> Tree:
        """The tree that was searched."""
        return Tree(unchecked(self.entries, self.entries["children"].shape[:1]))

    def renew(self, root: RootOutput, select: Any, gamma: Tensor) -> None:
        """Start another search of the same shapes, with new entries."""
        actions, device = self.shape[2], self.gamma.device
        self.entries = new_arrays(self.kinds, device)
        self.select = select.prepare(num_legal(root), self.budget, actions, device)
        self.gamma = gamma

    def set_root_actions(
        self,
        actions: Tensor,  # [B, K, ...]
    ) -> None:
        """Begin with the sampled actions of the roots; those of all other nodes are zeros."""
        batch, rows, _ = self.shape
        self.entries["actions"] = actions.new_zeros((batch, rows, *actions.shape[1:]))
        self.entries["actions"][:, 0] = actions

    def take_actions(
        self,
        actions: Tensor,  # [N * B, K, ...], of rows that were used
    ) -> None:
        """Copy the sampled actions of this state's nodes from the memory of the search."""
        batch, rows, _ = self.shape
        roots: Any = self.order if len(self.order) < batch else slice(None)  # the others: no part
        by_node = actions.unflatten(0, (rows, batch)).transpose(0, 1)[roots]
        used = self.entries["parent"][roots] >= 0
        used[:, 0] = True
        used = used.view(*used.shape, *[1] * (by_node.dim() - 2))
        self.entries["actions"][roots] = torch.where(used, by_node, 0)

    def arrays(self) -> dict[str, Tensor | None]:
        """The arrays that the search needs in addition to the tree's entries, by name."""
        return {name: getattr(self, name) for name in OWN_NAMES}

    def model_rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The rows that the model works on: those of the parents and new nodes, actions, resets."""
        return self.parent_row, self.node_row, self.leaf_action, self.reset

    def num_searched(self) -> list[int]:
        """The number of roots that are searched in each simulation."""
        budget = [self.budget[root] for root in self.order.tolist()]
        if budget[0] == budget[-1]:
            return [len(budget)] * budget[0]
        # The number of roots with a budget of at most 0, 1, ...
        ended = torch.tensor(budget, device="cpu").bincount().cumsum(0)
        return (len(budget) - ended[:-1]).tolist()

    def divided(self, num_parts: int) -> list[SearchState]:
        """Parts of the state with some of the roots each, over the same arrays."""
        num = len(self.order)
        return [
            replace(
                self,
                order=order,
                parent_row=torch.empty_like(order),
                node_row=torch.empty_like(order),
                leaf_action=torch.empty_like(order),
                reset=torch.zeros_like(order, dtype=torch.bool),
            )
            for part in range(min(num_parts, num))
            if len(order := self.order[part::num_parts].contiguous())
        ]

    def use_mask(self) -> None:
        """Allow illegal actions from now on: those of the nodes so far are all legal."""
        if "mask" not in self.entries:  # the mask of the first thread that comes here stays
            ones = torch.ones(self.shape, dtype=torch.bool, device=self.gamma.device)
            self.entries.setdefault("mask", ones)


I32, I64, F32, F64, BOOL = torch.int32, torch.int64, torch.float32, torch.float64, torch.bool
ENTRIES = {  # of the tree, [B, N] unless its table says otherwise; those of one kind made together
    ("nodes", I32): ("visits", "parent", "action", "depth", "num_tried", "to_play", "canonical"),
    ("nodes", F32): ("raw_value", "reward", "discount", "value_prefix"),
    ("nodes", F64): ("value_sum", "q_sum"),
    ("nodes", I64): ("key",),
    ("nodes", BOOL): ("ended",),
    ("edges", I32): ("children", "children_visits"),
    ("edges", F32): ("children_q", "prior", "prior_logits"),
    ("edges", BOOL): ("mask",),
    ("roots", F32): ("q_min", "q_max"),
}
OWN = {  # of the search, not of the tree
    ("nodes", I32): ("path_node", "path_action", "stamp"),
    ("roots", I64): ("parent_row", "node_row", "leaf_action", "path_length", "leaf"),
}
OWN_NAMES = (*(name for names in OWN.values() for name in names), "order", "gamma", "reset")


def make_state(
    root: RootOutput,
    budget: list[int],
    gamma: Tensor,
    select: Any,
    rules: TreeRules,
) -> SearchState:
    """The arrays of a search, uninitialised: `instantiate` of the steps sets their values."""
    (batch, actions), device = root.prior_logits.shape, root.prior_logits.device
    rows = max(budget) + 1
    unused = {
        "mask": root.mask is None,
        "prior_logits": not select.needs_logits,
        "to_play": root.to_play is None,
        "value_prefix": rules.value_prefix is None,
        **dict.fromkeys(("key", "canonical", "stamp"), rules.transpositions is None),
    }
    shapes = {"nodes": (batch, rows), "edges": (batch, rows, actions), "roots": (batch,)}
    kinds, own_kinds = (
        [
            Kind(used, (len(used), *shapes[kind]), dtype)
            for (kind, dtype), names in table.items()
            if (used := [name for name in names if not unused.get(name, False)])
        ]
        for table in (ENTRIES, OWN)
    )
    entries, own = new_arrays(kinds, device), new_arrays(own_kinds, device)
    order = torch.arange(batch, device=device)
    if min(budget) != max(budget):
        order = torch.tensor(sorted(range(batch), key=lambda root: -budget[root]), device=device)
    return SearchState(
        rules=rules,
        max_depth=rows if rules.max_depth is None else rules.max_depth,
        select=select.prepare(num_legal(root), budget, actions, device),
        entries=entries,
        kinds=kinds,
        budget=budget,
        order=order,
        gamma=gamma,
        reset=torch.zeros(batch, dtype=BOOL, device=device),
        stamp=own.pop("stamp", None),
        **own,
    )


class Kind(NamedTuple):
    """Arrays of one shape and dtype."""

    names: list[str]
    shape: tuple[int, ...]  # [as many as there are names, ...]
    dtype: torch.dtype


def new_arrays(kinds: list[Kind], device: torch.device) -> dict[str, Tensor]:
    """Uninitialised arrays by name."""
    arrays: dict[str, Tensor] = {}
    for names, shape, dtype in kinds:
        arrays.update(zip(names, new_memory(shape, dtype, device).unbind(), strict=True))
    return arrays


def num_legal(root: RootOutput) -> list[int]:
    """The number of legal actions at each root."""
    batch, actions = root.prior_logits.shape
    return [actions] * batch if root.mask is None else root.mask.sum(-1).tolist()
