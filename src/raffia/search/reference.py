"""The two halves of a simulation in plain tensor operations: any device, the kernels' oracle."""

import torch
from torch import Tensor

from raffia.search.base import PRIOR_LOGITS, VALUE, RecurrentOutput, RootOutput, unfit, unfit_root
from raffia.search.nodes import Nodes, mean_values
from raffia.search.softmax import in_order, softmax
from raffia.search.state import SearchState

_EMPTY = {
    **{"parent": -1, "action": -1, "children": -1, "canonical": -1, "mask": True},
    **{"q_min": torch.inf, "q_max": -torch.inf},
}


class ReferenceSteps:
    """The two halves of a simulation in tensor operations over all roots together."""

    def __init__(self, state: SearchState) -> None:
        self.state = state

    def instantiate(self, root: RootOutput) -> None:
        """Set the values of trees with roots only."""
        entries, root_value = self.state.entries, self.state.rules.root_value
        for name, entry in entries.items():
            entry.fill_(_EMPTY.get(name, 0))
        if self.state.stamp is not None:
            self.state.stamp.fill_(-1)
            entries["canonical"][:, 0] = 0
        legal = root.prior_logits.float()
        if root.mask is not None:
            legal = legal.masked_fill(~root.mask, -torch.inf)
            entries["mask"][:, 0] = root.mask
        unfit_value = ~torch.isfinite(root.value.float())
        for field, bad in ((VALUE, unfit_value), (PRIOR_LOGITS, _unfit_logits(legal, root.mask))):
            if bool(bad.any()):
                raise unfit_root(field, int(bad.nonzero()[0]))
        entries["raw_value"][:, 0] = root.value
        entries["prior"][:, 0] = softmax(legal)
        if "prior_logits" in entries:
            entries["prior_logits"][:, 0] = legal
        if root_value != "exclude":
            entries["visits"][:, 0] = 1
        if root_value == "include":
            entries["value_sum"][:, 0] = entries["raw_value"][:, 0].double()
        if root.to_play is not None:
            entries["to_play"][:, 0] = root.to_play

    def clear_unused(self) -> None:
        """Do nothing: unused rows were set by `instantiate`."""

    def simulate(self, simulation: int, num_roots: int) -> int | None:
        """Descend from each root to an untried action or to a node that ends the simulation.

        Returns how many of the new nodes are resets; None: unknown.
        """
        state, entries = self.state, self.state.entries
        root = state.order[:num_roots]
        node, leaf = torch.zeros_like(root), torch.full_like(root, -1)
        action, length = torch.zeros_like(root), torch.zeros_like(root)
        last, carry, descending = node, None, torch.ones_like(root, dtype=torch.bool)
        depth = 0
        while bool(descending.any()):
            self._visit(root, node, descending, simulation)
            chosen, carry = state.select(Nodes(entries, root, node, depth, simulation), carry)
            action = torch.where(descending, chosen, action)
            last = torch.where(descending, node, last)
            state.path_node[root, depth] = node.int()
            state.path_action[root, depth] = chosen.int()
            depth += 1
            length = torch.where(descending, depth, length)
            child = entries["children"][root, node, chosen].long()
            found = self._canonical(root, child.clamp_min(0))
            ends = entries["ended"][root, found]
            if state.stamp is not None:
                ends = ends | (state.stamp[root, found] == simulation)
            if depth >= state.max_depth:
                ends = torch.ones_like(ends)
            known = descending & (child >= 0)
            leaf = torch.where(known & ends, found, leaf)
            descending = known & ~ends
            node = torch.where(descending, found, node)
        state.parent_row[:num_roots] = last * state.shape[0] + root
        state.node_row[:num_roots] = (simulation + 1) * state.shape[0] + root
        state.leaf_action[:num_roots] = action
        state.path_length[root] = length
        state.leaf[root] = leaf
        if state.rules.value_prefix is None:
            return 0
        state.reset[:num_roots] = length % state.rules.value_prefix.horizon == 0
        return None  # not known without waiting for the device

    def _canonical(self, root: Tensor, node: Tensor) -> Tensor:
        if "canonical" not in self.state.entries:
            return node
        return self.state.entries["canonical"][root, node].long()

    def _visit(self, root: Tensor, node: Tensor, descending: Tensor, simulation: int) -> None:
        """Mark the node as visited and recompute its Q, if there are transpositions."""
        state, entries = self.state, self.state.entries
        if state.stamp is None:
            return
        root, node = root[descending], node[descending]
        state.stamp[root, node] = simulation
        child = entries["children"][root, node].long()
        known = child >= 0
        q = self._q(root.unsqueeze(-1), child.clamp_min(0))
        q = torch.where(known, q, entries["children_q"][root, node])
        entries["children_q"][root, node] = q
        entries["q_sum"][root, node] = in_order(torch.where(known, q, 0.0))

    def _q(self, root: Tensor, child: Tensor) -> Tensor:
        """reward + discount * value of children that were visited, float32."""
        entries, source = self.state.entries, self._canonical(root, child)
        mean = entries["value_sum"][root, source] / entries["visits"][root, source]
        reward, discount = entries["reward"][root, child], entries["discount"][root, child]
        return (reward.double() + discount.double() * mean).float()

    def _value(self, root: Tensor, node: Tensor) -> Tensor:
        names = ("visits", "value_sum", "raw_value")
        return mean_values(*[self.state.entries[name][root, node] for name in names])

    def backward(
        self, simulation: int, num_roots: int, output: RecurrentOutput, key: Tensor | None
    ) -> None:
        """Write the new nodes and add their values along the paths."""
        state, entries = self.state, self.state.entries
        root = state.order[:num_roots]
        leaf = state.leaf[root]
        new = leaf < 0
        fresh = torch.full_like(leaf, simulation + 1)
        self._check(simulation, root, new, output)
        self._expand(simulation, root[new], new, output)
        if key is not None:
            fresh[new] = self._same_state(simulation, root[new], key[new])
        raw = entries["raw_value"][root, torch.where(new, simulation + 1, leaf)]
        known = fresh != simulation + 1  # the new edge leads to an old state
        if state.stamp is not None:
            known = known | (~new & ~entries["ended"][root, leaf.clamp_min(0)])
        leaf = torch.where(new, fresh, leaf)
        gain = torch.where(known, self._value(root, leaf), raw).double()
        self._add_to_paths(root, leaf, gain)
        if state.select.normalize == "tree":
            self._whole_range(root)
        if state.select.root_in_range:
            self._widen(root, state.gamma[root] * self._value(root, torch.zeros_like(root)))

    def _check(self, simulation: int, root: Tensor, new: Tensor, output: RecurrentOutput) -> None:
        """Refuse NaN and infinity; -inf is allowed in logits."""
        ones = torch.ones_like(new)
        discount = output.discount
        fits = (
            torch.isfinite(output.reward),
            torch.isfinite(output.value),
            ~_unfit_logits(output.prior_logits, output.mask),
            ones if discount is None else torch.isfinite(discount) & (discount >= 0),
        )
        bad = new.unsqueeze(-1) & ~torch.stack(fits, -1)
        if bool(bad.any()):
            first = int(bad.any(-1).nonzero()[0])
            raise unfit(int(bad[first].nonzero()[0]), int(root[first]), simulation)

    def _expand(self, simulation: int, root: Tensor, new: Tensor, output: RecurrentOutput) -> None:
        """Write the new nodes of some roots; `new` marks their rows of the output."""
        state, entries, row = self.state, self.state.entries, simulation + 1
        last = state.path_length[root] - 1
        parent = state.path_node[root, last].long()
        action = state.path_action[root, last].long()
        logits = output.prior_logits[new]
        mask = None if output.mask is None else output.mask[new]
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf)
            entries["ended"][root, row] = ~mask.any(-1)
        if "mask" in entries:
            entries["mask"][root, row] = True if mask is None else mask
        if "prior_logits" in entries:
            entries["prior_logits"][root, row] = logits
        entries["prior"][root, row] = softmax(logits)
        entries["children"][root, row] = -1
        entries["children_visits"][root, row] = 0
        entries["children_q"][root, row] = 0.0
        depth = entries["depth"][root, parent]
        reward = output.reward[new]
        if "value_prefix" in entries:
            assert state.rules.value_prefix is not None
            horizon = state.rules.value_prefix.horizon
            entries["value_prefix"][root, row] = reward
            goes_on = (depth == 0) | (depth % horizon != 0)
            before = entries["value_prefix"][root, parent]
            reward = torch.where(goes_on, reward - before, reward)
        gamma = state.gamma[root] if output.discount is None else output.discount[new]
        if "to_play" in entries:
            before = entries["to_play"][root, parent]
            both = 3 - 2 * (entries["to_play"][root, 0] == 0).int()  # 1 + 2, or 0 + 1
            player = both - before if output.to_play is None else output.to_play[new]
            entries["to_play"][root, row] = player
            gamma = torch.where(player == before, gamma, -gamma)
        entries["raw_value"][root, row] = output.value[new]
        entries["reward"][root, row] = reward
        entries["discount"][root, row] = gamma
        entries["parent"][root, row] = parent.int()
        entries["action"][root, row] = action.int()
        entries["depth"][root, row] = depth + 1
        entries["children"][root, parent, action] = row

    def _same_state(self, simulation: int, root: Tensor, key: Tensor) -> Tensor:
        """The earliest node of each root with this key, else the new one."""
        entries, row = self.state.entries, simulation + 1
        entries["key"][root, row] = key
        entries["canonical"][root, row] = row
        rows = torch.arange(row + 1, device=root.device)
        same = entries["key"][root, : row + 1] == key.unsqueeze(-1)
        same &= entries["canonical"][root, : row + 1] == rows
        if "to_play" in entries:
            players = entries["to_play"][root, : row + 1]
            same &= players == players[:, -1:]
        found = same.int().argmax(-1)  # the first; the new row is always among them
        entries["canonical"][root, row] = found.int()
        return found

    def _add_to_paths(self, root: Tensor, leaf: Tensor, gain: Tensor) -> None:
        """Add the new values to the nodes of the paths, from the leaves to the roots."""
        state, entries = self.state, self.state.entries
        entries["visits"][root, leaf] += 1
        entries["value_sum"][root, leaf] += gain
        length = state.path_length[root]
        running = state.select.normalize == "running"
        for d in range(int(length.max()) - 1, -1, -1):
            on = (length > d).nonzero().squeeze(-1)
            b = root[on]
            node, action = state.path_node[b, d].long(), state.path_action[b, d].long()
            child = entries["children"][b, node, action].long()
            reward, discount = entries["reward"][b, child], entries["discount"][b, child]
            gain[on] = reward.double() + discount.double() * gain[on]
            q = self._q(b, child)
            first = entries["children_visits"][b, node, action] == 0
            entries["num_tried"][b, node] += first.int()
            entries["children_visits"][b, node, action] += 1
            old = entries["children_q"][b, node, action]
            entries["q_sum"][b, node] += q.double() - old.double()
            entries["children_q"][b, node, action] = q
            if running:
                self._widen(b, q)
            entries["visits"][b, node] += 1
            entries["value_sum"][b, node] += gain[on]

    def _widen(self, root: Tensor, q: Tensor) -> None:
        entries = self.state.entries
        entries["q_min"][root] = torch.minimum(entries["q_min"][root], q)
        entries["q_max"][root] = torch.maximum(entries["q_max"][root], q)

    def _whole_range(self, root: Tensor) -> None:
        """Set the tree's range of Q from its current Q."""
        entries = self.state.entries
        is_node = entries["parent"][root] >= 0
        is_node[:, 0] = True
        tried = (entries["children_visits"][root] > 0) & is_node.unsqueeze(-1)
        q = entries["children_q"][root]
        entries["q_min"][root] = torch.where(tried, q, torch.inf).amin((-1, -2))
        entries["q_max"][root] = torch.where(tried, q, -torch.inf).amax((-1, -2))


def _unfit_logits(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Whether the legal logits of a row contain NaN or inf, or are all -inf, [M] bool."""
    legal = torch.ones_like(logits, dtype=torch.bool) if mask is None else mask
    logits = logits.masked_fill(~legal, -torch.inf)
    nothing = legal.any(-1) & (logits == -torch.inf).all(-1)
    return nothing | torch.isnan(logits).any(-1) | (logits == torch.inf).any(-1)
