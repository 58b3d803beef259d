"""One simulation's two halves, compiled: `simulate` down to a leaf, `backup` of the model's output.

`run` is many of them around a compiled model, with no Python in between. Results as in
raffia.search.reference, bit for bit.
"""

# Everything here is a number to numba: types would only repeat that.
from typing import Any

import numpy as np

from raffia.jit.arrays import (
    copy_bytes,
    get_f32,
    get_i32,
    get_i64,
    get_u8,
    put_f32,
    put_f64,
    put_i32,
    put_i64,
    put_u8,
    zero_bytes,
)
from raffia.jit.calls import call_step
from raffia.jit.kernel import kernel
from raffia.search.kernels import layout as at
from raffia.search.kernels.numbers import F0, GREATEST, INFINITY, softmax, unfit
from raffia.search.kernels.select import gumbel, puct
from raffia.search.kernels.statistics import (
    backward,
    canonical_of,
    refresh,
    same_state,
    value_of,
    whole_range,
    widen,
)


@kernel
def edges(block: Any, row: Any, given: Any, mask: Any) -> Any:
    """Write a new node's edges; how many actions are legal, -1 if legal logits do not fit."""
    num = get_i64(block, at.ACTIONS)
    e = row * num
    prior, num_unfit = get_i64(block, at.PRIOR) + 4 * e, 0
    for a in range(num):
        num_unfit += not get_f32(given, a) <= GREATEST
    if num_unfit > 0 and mask != 0:
        for a in range(num):
            num_unfit -= get_u8(mask, a) == 0 and not get_f32(given, a) <= GREATEST
    if num_unfit > 0:
        return -1
    children, children_visits = (
        get_i64(block, at.CHILDREN) + 4 * e,
        get_i64(block, at.CHILDREN_VISITS),
    )
    for a in range(num):
        put_i32(children, a, np.int32(-1))
    zero_bytes(children_visits + 4 * e, 4 * num)
    zero_bytes(get_i64(block, at.CHILDREN_Q) + 4 * e, 4 * num)
    num_legal = num
    tree_mask = get_i64(block, at.MASK)
    if mask != 0:
        num_legal = 0
        for a in range(num):
            legal = get_u8(mask, a)
            put_u8(tree_mask, e + a, legal)
            num_legal += legal != 0
            x = get_f32(given, a)
            put_f32(prior, a, x if legal != 0 else -INFINITY)
    else:
        copy_bytes(prior, given, 4 * num)
        if tree_mask != 0:
            for a in range(num):
                put_u8(tree_mask, e + a, np.uint8(1))
    if get_i64(block, at.PRIOR_LOGITS) != 0:
        copy_bytes(get_i64(block, at.PRIOR_LOGITS) + 4 * e, prior, 4 * num)
    any_prior = softmax(prior, num)
    return num_legal if any_prior or num_legal == 0 else -1


@kernel
def instantiate(
    block: Any, num_roots: Any, value: Any, logits: Any, mask: Any, to_play: Any, counted: Any
) -> Any:
    """Set the values of trees with roots only.

    counted: what the root's own value counts, 0 (excluded), 1 (included), 2 (as a visit of 0).
    -1, or 8 * the first root whose value or logits do not fit + the field's number.
    """
    rows, num = get_i64(block, at.ROWS), get_i64(block, at.ACTIONS)
    size = num_roots * rows
    for name in (at.VISITS, at.RAW_VALUE, at.REWARD, at.DISCOUNT, at.DEPTH, at.NUM_TRIED):
        zero_bytes(get_i64(block, name), 4 * size)
    zero_bytes(get_i64(block, at.VALUE_SUM), 8 * size)
    zero_bytes(get_i64(block, at.Q_SUM), 8 * size)
    zero_bytes(get_i64(block, at.ENDED), size)
    for name in (at.VALUE_PREFIX, at.TO_PLAY):
        if get_i64(block, name) != 0:
            zero_bytes(get_i64(block, name), 4 * size)
    parent, action, stamp = (
        get_i64(block, at.PARENT),
        get_i64(block, at.ACTION),
        get_i64(block, at.STAMP),
    )
    for j in range(size):
        put_i32(parent, j, np.int32(-1))
        put_i32(action, j, np.int32(-1))
    if stamp != 0:
        zero_bytes(get_i64(block, at.KEY), 8 * size)
        for j in range(size):
            put_i32(stamp, j, np.int32(-1))
            put_i32(get_i64(block, at.CANONICAL), j, np.int32(-1 if j % rows else 0))
    for b in range(num_roots):
        row, x = b * rows, get_f32(value, b)
        if unfit(x):
            return 8 * b + 1
        if edges(block, row, logits + 4 * b * num, mask + b * num if mask != 0 else 0) < 0:
            return 8 * b + 2
        put_f32(get_i64(block, at.Q_MIN), b, INFINITY)
        put_f32(get_i64(block, at.Q_MAX), b, -INFINITY)
        put_f32(get_i64(block, at.RAW_VALUE), row, x)
        if counted != 0:
            put_i32(get_i64(block, at.VISITS), row, np.int32(1))
        if counted == 1:
            put_f64(get_i64(block, at.VALUE_SUM), row, np.float64(x))
        if to_play != 0:
            put_i32(get_i64(block, at.TO_PLAY), row, get_i32(to_play, b))
    return -1


@kernel
def clear_unused(block: Any, num_roots: Any) -> None:
    """Clear the edges of rows that never became nodes."""
    rows, num = get_i64(block, at.ROWS), get_i64(block, at.ACTIONS)
    for b in range(num_roots):
        for j in range(1, rows):
            row = b * rows + j
            if get_i32(get_i64(block, at.PARENT), row) < 0:
                for name in (at.CHILDREN_VISITS, at.CHILDREN_Q, at.PRIOR, at.PRIOR_LOGITS):
                    if get_i64(block, name) != 0:
                        zero_bytes(get_i64(block, name) + 4 * row * num, 4 * num)
                for a in range(row * num, (row + 1) * num):
                    put_i32(get_i64(block, at.CHILDREN), a, np.int32(-1))
                    if get_i64(block, at.MASK) != 0:
                        put_u8(get_i64(block, at.MASK), a, np.uint8(1))


@kernel
def simulate(block: Any, reals: Any, simulation: Any, num_roots: Any) -> Any:
    """Descend from each root to an untried action, or to a node that ends the simulation.

    How many of the new nodes are resets.
    """
    rows, num = get_i64(block, at.ROWS), get_i64(block, at.ACTIONS)
    children, ended = get_i64(block, at.CHILDREN), get_i64(block, at.ENDED)
    stamp, horizon = get_i64(block, at.STAMP), get_i64(block, at.HORIZON)
    max_depth, resets, roots = get_i64(block, at.MAX_DEPTH), 0, get_i64(block, at.ROOTS)
    path_node, path_action = get_i64(block, at.PATH_NODE), get_i64(block, at.PATH_ACTION)
    for i in range(num_roots):
        b = get_i64(get_i64(block, at.ORDER), i)
        base, depth, carry, leaf = b * rows, 0, 0.0, np.int32(-1)
        node: Any = 0
        while True:
            if stamp != 0:
                put_i32(stamp, base + node, np.int32(simulation))
                refresh(block, b, node)
            if get_i64(block, at.KIND) == at.GUMBEL:
                action = gumbel(block, reals, b, node, depth == 0)
            else:
                action, carry = puct(block, reals, b, node, depth == 0, carry, simulation)
            put_i32(path_node, b * rows + depth, np.int32(node))
            put_i32(path_action, b * rows + depth, np.int32(action))
            depth += 1
            child = get_i32(children, (base + node) * num + action)
            if child < 0:
                break
            found = canonical_of(block, base + child, child)
            visited = stamp != 0 and get_i32(stamp, base + found) == simulation
            if visited or depth >= max_depth or get_u8(ended, base + found) != 0:
                leaf = found
                break
            node = np.int64(found)
        put_i64(get_i64(block, at.PARENT_ROW), i, node * roots + b)
        put_i64(get_i64(block, at.NODE_ROW), i, (simulation + 1) * roots + b)
        put_i64(get_i64(block, at.LEAF_ACTION), i, action)
        put_i32(get_i64(block, at.PATH_LENGTH), b, np.int32(depth))
        put_i32(get_i64(block, at.LEAF), b, leaf)
        reset = horizon > 0 and depth % horizon == 0
        put_u8(get_i64(block, at.RESET), i, np.uint8(reset))
        resets += reset
    return resets


@kernel
def expand(
    block: Any,
    b: Any,
    i: Any,
    simulation: Any,
    parent: Any,
    action: Any,
    reward: Any,
    value: Any,
    logits: Any,
    discount: Any,
    mask: Any,
    to_play: Any,
) -> Any:
    """Write the new node; 0, or 1 + the number of the field that holds NaN or infinity."""
    rows, num = get_i64(block, at.ROWS), get_i64(block, at.ACTIONS)
    row, parent_row = b * rows + simulation + 1, b * rows + parent
    if unfit(get_f32(reward, i)):
        return 1
    if unfit(get_f32(value, i)):
        return 2
    gamma = get_f32(get_i64(block, at.GAMMA), b)
    if discount != 0:
        gamma = get_f32(discount, i)
        if unfit(gamma) or gamma < F0:
            return 4
    num_legal = edges(block, row, logits + 4 * i * num, mask + i * num if mask != 0 else 0)
    if num_legal < 0:
        return 3
    depth = get_i32(get_i64(block, at.DEPTH), parent_row)
    gain = get_f32(reward, i)
    horizon = get_i64(block, at.HORIZON)
    if horizon > 0:
        prefixes = get_i64(block, at.VALUE_PREFIX)
        put_f32(prefixes, row, gain)
        if depth == 0 or depth % horizon != 0:
            gain = gain - get_f32(prefixes, parent_row)
    players = get_i64(block, at.TO_PLAY)
    if players != 0:
        before = get_i32(players, parent_row)
        # 1 and 2 take turns, or 0 and 1: the root's player tells which
        both = np.int32(1) if get_i32(players, b * rows) == 0 else np.int32(3)
        player = both - before
        if to_play != 0:
            player = get_i32(to_play, i)
        put_i32(players, row, np.int32(player))
        if player != before:
            gamma = -gamma
    put_i32(get_i64(block, at.VISITS), row, np.int32(0))
    put_f64(get_i64(block, at.VALUE_SUM), row, 0.0)
    put_f32(get_i64(block, at.RAW_VALUE), row, get_f32(value, i))
    put_f32(get_i64(block, at.REWARD), row, gain)
    put_f32(get_i64(block, at.DISCOUNT), row, gamma)
    put_i32(get_i64(block, at.PARENT), row, np.int32(parent))
    put_i32(get_i64(block, at.ACTION), row, np.int32(action))
    put_i32(get_i64(block, at.DEPTH), row, depth + np.int32(1))
    put_u8(get_i64(block, at.ENDED), row, np.uint8(num_legal == 0))
    put_i32(get_i64(block, at.CHILDREN), parent_row * num + action, np.int32(simulation + 1))
    return 0


@kernel
def backup(
    block: Any,
    simulation: Any,
    num_roots: Any,
    reward: Any,
    value: Any,
    logits: Any,
    discount: Any,
    mask: Any,
    to_play: Any,
    key: Any,
) -> Any:
    """Write the new nodes and add their values along the paths.

    -1, or 8 * the index of the first root whose model output does not fit + the field's number.
    """
    rows = get_i64(block, at.ROWS)
    for i in range(num_roots):
        b = get_i64(get_i64(block, at.ORDER), i)
        base = b * rows
        last = base + get_i32(get_i64(block, at.PATH_LENGTH), b) - 1
        leaf = get_i32(get_i64(block, at.LEAF), b)
        if leaf < 0:
            parent = np.int64(get_i32(get_i64(block, at.PATH_NODE), last))
            action = np.int64(get_i32(get_i64(block, at.PATH_ACTION), last))
            unfit = expand(
                block,
                b,
                i,
                simulation,
                parent,
                action,
                reward,
                value,
                logits,
                discount,
                mask,
                to_play,
            )
            if unfit != 0:
                return 8 * i + unfit - 1
            leaf = np.int32(simulation + 1)
            if key != 0:
                leaf = same_state(block, b, simulation, get_i64(key, i))
            gain = np.float64(get_f32(value, i))
            if leaf != simulation + 1:
                gain = np.float64(value_of(block, base + leaf))
        elif get_i64(block, at.STAMP) != 0 and get_u8(get_i64(block, at.ENDED), base + leaf) == 0:
            gain = np.float64(value_of(block, base + leaf))
        else:
            gain = np.float64(get_f32(get_i64(block, at.RAW_VALUE), base + leaf))
        backward(block, b, leaf, gain)
        if get_i64(block, at.NORMALIZE) == at.TREE:
            whole_range(block, b, simulation)
        if get_i64(block, at.ROOT_IN_RANGE) != 0:
            widen(block, b, get_f32(get_i64(block, at.GAMMA), b) * value_of(block, base))
    return -1


@kernel
def run(
    block: Any,
    reals: Any,
    first: Any,
    searched: Any,
    num_simulations: Any,
    model: Any,
    context: Any,
    reward: Any,
    value: Any,
    logits: Any,
) -> Any:
    """Simulations from `first` on; `searched[i]` roots take part in the i-th of them.

    -1, or what backup answered and 2**40 times the simulation.
    """
    for i in range(num_simulations):
        num_roots = get_i64(searched, i)
        simulate(block, reals, first + i, num_roots)
        call_step(model, context, num_roots)
        unfit = backup(block, first + i, num_roots, reward, value, logits, 0, 0, 0, 0)
        if unfit >= 0:
            return unfit + (first + i) * 2**40
    return -1
