"""What a tree knows of its nodes: values, Q and their range; compiled.

Results as in raffia.search.reference, bit for bit. `block` holds all addresses (layout.py), `b` is
a root, `row` a node of all roots' nodes, `e` the index of a node's first edge.
"""

# Everything here is a number to numba: types would only repeat that.
from typing import Any

import numpy as np

from raffia.jit.arrays import get_f32, get_f64, get_i32, get_i64, put_f32, put_f64, put_i32, put_i64
from raffia.jit.kernel import kernel
from raffia.search.kernels import layout as at
from raffia.search.kernels.numbers import INFINITY


@kernel
def total_visits(block: Any, e: Any) -> Any:
    visits, total = get_i64(block, at.CHILDREN_VISITS), np.int32(0)
    for a in range(get_i64(block, at.ACTIONS)):
        total += get_i32(visits, e + a)
    return total


@kernel
def value_of(block: Any, row: Any) -> Any:
    visits = get_i32(get_i64(block, at.VISITS), row)
    if visits > 0:
        return np.float32(get_f64(get_i64(block, at.VALUE_SUM), row) / visits)
    return get_f32(get_i64(block, at.RAW_VALUE), row)


@kernel
def canonical_of(block: Any, row: Any, node: Any) -> Any:
    canonical = get_i64(block, at.CANONICAL)
    return get_i32(canonical, row) if canonical != 0 else np.int32(node)


@kernel
def q_of(block: Any, b: Any, child: Any) -> Any:
    """reward + discount * value of a child that was visited."""
    base = b * get_i64(block, at.ROWS)
    source = base + canonical_of(block, base + child, child)
    mean = get_f64(get_i64(block, at.VALUE_SUM), source) / get_i32(
        get_i64(block, at.VISITS), source
    )
    reward = np.float64(get_f32(get_i64(block, at.REWARD), base + child))
    return np.float32(
        reward + np.float64(get_f32(get_i64(block, at.DISCOUNT), base + child)) * mean
    )


@kernel
def refresh(block: Any, b: Any, node: Any) -> None:
    """Recompute a node's Q: its children may have been reached by other ways meanwhile."""
    num, rows = get_i64(block, at.ACTIONS), get_i64(block, at.ROWS)
    row = b * rows + node
    e = row * num
    total = 0.0
    for a in range(num):
        child = get_i32(get_i64(block, at.CHILDREN), e + a)
        if child >= 0:
            q = q_of(block, b, child)
            put_f32(get_i64(block, at.CHILDREN_Q), e + a, q)
            total += np.float64(q)
    put_f64(get_i64(block, at.Q_SUM), row, total)


@kernel
def widen(block: Any, b: Any, q: Any) -> None:
    low, high = get_i64(block, at.Q_MIN), get_i64(block, at.Q_MAX)
    if q < get_f32(low, b):
        put_f32(low, b, q)
    if q > get_f32(high, b):
        put_f32(high, b, q)


@kernel
def whole_range(block: Any, b: Any, simulation: Any) -> None:
    """Set the tree's range of Q from its present Q."""
    rows, num = get_i64(block, at.ROWS), get_i64(block, at.ACTIONS)
    put_f32(get_i64(block, at.Q_MIN), b, INFINITY)
    put_f32(get_i64(block, at.Q_MAX), b, -INFINITY)
    for j in range(1, simulation + 2):
        parent = get_i32(get_i64(block, at.PARENT), b * rows + j)
        if parent >= 0:
            action = get_i32(get_i64(block, at.ACTION), b * rows + j)
            widen(
                block, b, get_f32(get_i64(block, at.CHILDREN_Q), (b * rows + parent) * num + action)
            )


@kernel
def same_state(block: Any, b: Any, simulation: Any, key: Any) -> Any:
    """The earlier node with this key, else the new one."""
    rows, keys = get_i64(block, at.ROWS), get_i64(block, at.KEY)
    base, canonical = b * rows, get_i64(block, at.CANONICAL)
    players = get_i64(block, at.TO_PLAY)
    put_i64(keys, base + simulation + 1, key)
    found = np.int32(simulation + 1)
    for j in range(simulation + 1):
        if get_i32(canonical, base + j) != j or get_i64(keys, base + j) != key:
            continue
        if players == 0 or get_i32(players, base + j) == get_i32(players, base + simulation + 1):
            found = np.int32(j)
            break
    put_i32(canonical, base + simulation + 1, found)
    return found


@kernel
def backward(block: Any, b: Any, leaf: Any, gain: Any) -> None:
    """Add what was found to the nodes of the path, from the leaf to the root."""
    rows, num = get_i64(block, at.ROWS), get_i64(block, at.ACTIONS)
    base = b * rows
    visits, value_sum = get_i64(block, at.VISITS), get_i64(block, at.VALUE_SUM)
    put_i32(visits, base + leaf, get_i32(visits, base + leaf) + np.int32(1))
    put_f64(value_sum, base + leaf, get_f64(value_sum, base + leaf) + gain)
    for d in range(get_i32(get_i64(block, at.PATH_LENGTH), b) - 1, -1, -1):
        row = base + get_i32(get_i64(block, at.PATH_NODE), base + d)
        e = row * num + get_i32(get_i64(block, at.PATH_ACTION), base + d)
        child = get_i32(get_i64(block, at.CHILDREN), e)
        reward = np.float64(get_f32(get_i64(block, at.REWARD), base + child))
        gain = reward + np.float64(get_f32(get_i64(block, at.DISCOUNT), base + child)) * gain
        q, n = q_of(block, b, child), get_i32(get_i64(block, at.CHILDREN_VISITS), e)
        if n == 0:
            tried = get_i64(block, at.NUM_TRIED)
            put_i32(tried, row, get_i32(tried, row) + np.int32(1))
        put_i32(get_i64(block, at.CHILDREN_VISITS), e, n + np.int32(1))
        q_sum, old = get_i64(block, at.Q_SUM), get_f32(get_i64(block, at.CHILDREN_Q), e)
        change = np.float64(q) - np.float64(old)
        put_f64(q_sum, row, get_f64(q_sum, row) + change)
        put_f32(get_i64(block, at.CHILDREN_Q), e, q)
        if get_i64(block, at.NORMALIZE) == at.RUNNING:
            widen(block, b, q)
        put_i32(visits, row, get_i32(visits, row) + np.int32(1))
        put_f64(value_sum, row, get_f64(value_sum, row) + gain)
