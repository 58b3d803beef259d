"""Compiled statistics of the nodes of a tree: values, Q and their range.

Results as in raffia.search.reference, bit for bit. `s` is the search's record, `b` a root, `row` a
node among all roots' nodes, `e` the index of a node's first edge.
"""

import numpy as np

from raffia.jit.kernel import kernel
from raffia.jit.records import exists
from raffia.search.kernels.numbers import INFINITY
from raffia.search.kernels.record import RUNNING, SearchRecord


@kernel
def value_of(s: SearchRecord, row: int) -> np.float32:
    """Mean of the backed-up values; the model's value before the first backup."""
    visits = s.visits[row]
    return np.float32(s.value_sum[row] / visits) if visits > 0 else s.raw_value[row]


@kernel
def canonical_of(s: SearchRecord, row: int, node: int) -> np.int32:
    """The node whose statistics count for this one."""
    return s.canonical[row] if exists(s.canonical) else np.int32(node)


@kernel
def q_of(s: SearchRecord, b: int, child: int) -> np.float32:
    """reward + discount * value of a child that was visited."""
    row = b * s.rows + child
    source = b * s.rows + canonical_of(s, row, child)
    mean = s.value_sum[source] / s.visits[source]
    return np.float32(np.float64(s.reward[row]) + np.float64(s.discount[row]) * mean)


@kernel
def refresh(s: SearchRecord, b: int, node: int) -> None:
    """Recompute a node's Q: its children may have been reached by other paths since."""
    row = b * s.rows + node
    total = 0.0
    for e in range(row * s.actions, (row + 1) * s.actions):
        child = s.children[e]
        if child >= 0:
            q = q_of(s, b, child)
            s.children_q[e] = q
            total += np.float64(q)
    s.q_sum[row] = total


@kernel
def widen(s: SearchRecord, b: int, q: np.float32) -> None:
    """Widen the Q range of the root's tree to include `q`."""
    if q < s.q_min[b]:
        s.q_min[b] = q
    if q > s.q_max[b]:
        s.q_max[b] = q


@kernel
def whole_range(s: SearchRecord, b: int, simulation: int) -> None:
    """Set the tree's range of Q from its current Q."""
    s.q_min[b], s.q_max[b] = INFINITY, -INFINITY
    for row in range(b * s.rows + 1, b * s.rows + simulation + 2):
        parent = s.parent[row]
        if parent >= 0:
            widen(s, b, s.children_q[(b * s.rows + parent) * s.actions + s.action[row]])


@kernel
def same_state(s: SearchRecord, b: int, simulation: int, key: int) -> int:
    """The earlier node with this key, else the new one."""
    base, canonical, keys = b * s.rows, s.canonical, s.key
    new = base + simulation + 1
    keys[new] = key
    found = simulation + 1
    for j in range(simulation + 1):
        if canonical[base + j] != j or keys[base + j] != key:
            continue
        if not exists(s.to_play) or s.to_play[base + j] == s.to_play[new]:
            found = j
            break
    canonical[new] = found
    return found


@kernel
def add_to_path(s: SearchRecord, b: int, leaf: int, gain: float) -> None:
    """Add the new values to the nodes of the path, from the leaf to the root."""
    base = b * s.rows
    s.visits[base + leaf] += 1
    s.value_sum[base + leaf] += gain
    for d in range(s.path_length[b] - 1, -1, -1):
        row = base + s.path_node[base + d]
        e = row * s.actions + s.path_action[base + d]
        child = s.children[e]
        reward, discount = s.reward[base + child], s.discount[base + child]
        gain = np.float64(reward) + np.float64(discount) * gain
        q = q_of(s, b, child)
        s.num_tried[row] += s.children_visits[e] == 0
        s.children_visits[e] += 1
        s.q_sum[row] += np.float64(q) - np.float64(s.children_q[e])
        s.children_q[e] = q
        if s.normalize == RUNNING:
            widen(s, b, q)
        s.visits[row] += 1
        s.value_sum[row] += gain
