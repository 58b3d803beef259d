"""One simulation, compiled: `simulate` down to a leaf, `expand` it, `backward` along the path.

`run` is many of them around a compiled model, with no Python in between. Results as in
raffia.search.reference, bit for bit. `search` and `output` are addresses of records; within the
kernels `s` is the search's and `out` the model's.
"""

from typing import Any

import numpy as np

from raffia.jit.kernel import call_step, kernel, load_i64
from raffia.jit.records import Numbers, clear, copy, exists, tail
from raffia.search.base import DISCOUNT, PRIOR_LOGITS, REWARD, VALUE
from raffia.search.kernels.numbers import F0, GREATEST, INFINITY, softmax, unfit
from raffia.search.kernels.record import TREE, OutputRecord, SearchRecord, output_at, search_at
from raffia.search.kernels.select import select
from raffia.search.kernels.statistics import (
    add_to_path,
    canonical_of,
    refresh,
    same_state,
    value_of,
    whole_range,
    widen,
)


@kernel
def fill(array: Numbers, num: int, number: Any) -> None:
    """Set the first `num` elements of an array to a number."""
    for i in range(num):
        array[i] = number


@kernel
def instantiate(search: int, output: int, root_visits: int, root_value: int) -> int:
    """Set the values of trees with roots only.

    root_visits, root_value: how often the root's own value counts as a visit, and in its sum.
    -1, or 8 * the first root whose value or logits do not fit + the field's number.
    """
    s, out = search_at(search), output_at(output)
    size = s.roots * s.rows
    for counts in (s.visits, s.depth, s.num_tried, s.to_play):
        clear(counts, size)
    for numbers in (s.raw_value, s.reward, s.discount, s.value_prefix):
        clear(numbers, size)
    for sums in (s.value_sum, s.q_sum):
        clear(sums, size)
    clear(s.ended, size)
    clear(s.key, size)
    fill(s.parent, size, -1)
    fill(s.action, size, -1)
    if exists(s.stamp):
        fill(s.stamp, size, -1)
        fill(s.canonical, size, -1)
    for b in range(s.roots):
        row = b * s.rows
        if unfit(out.value[b]):
            return 8 * b + VALUE
        if write_edges(s, row, out, b) < 0:
            return 8 * b + PRIOR_LOGITS
        s.q_min[b], s.q_max[b] = INFINITY, -INFINITY
        s.raw_value[row] = out.value[b]
        s.visits[row] = root_visits
        if root_value:
            s.value_sum[row] = np.float64(out.value[b])
        if exists(out.to_play):
            s.to_play[row] = out.to_play[b]
        if exists(s.canonical):
            s.canonical[row] = 0
    return -1


@kernel
def write_edges(s: SearchRecord, row: int, out: OutputRecord, i: int) -> int:
    """Write a new node's edges; returns the number of legal actions, -1 for unfit legal logits."""
    num, e = s.actions, row * s.actions
    logits, mask = tail(out.prior_logits, i * num), tail(out.mask, i * num)
    prior, tree_mask = tail(s.prior, e), tail(s.mask, e)
    num_unfit = 0
    for a in range(num):
        num_unfit += not logits[a] <= GREATEST
    if num_unfit > 0 and exists(mask):
        for a in range(num):
            num_unfit -= mask[a] == 0 and not logits[a] <= GREATEST
    if num_unfit > 0:
        return -1
    fill(tail(s.children, e), num, -1)
    clear(tail(s.children_visits, e), num)
    clear(tail(s.children_q, e), num)
    num_legal = num
    if exists(mask):
        num_legal = 0
        for a in range(num):
            legal, x = mask[a], logits[a]
            tree_mask[a] = legal
            num_legal += legal != 0
            prior[a] = x if legal != 0 else -INFINITY
    else:
        copy(prior, logits, num)
        if exists(tree_mask):
            fill(tree_mask, num, 1)
    if exists(s.prior_logits):
        copy(tail(s.prior_logits, e), prior, num)
    any_prior = softmax(prior, num)
    return num_legal if any_prior or num_legal == 0 else -1


@kernel
def clear_unused(search: int) -> None:
    """Clear the edges of rows that never became nodes."""
    s = search_at(search)
    for row in range(s.roots * s.rows):
        if row % s.rows == 0 or s.parent[row] >= 0:
            continue
        e = row * s.actions
        clear(tail(s.children_visits, e), s.actions)
        for numbers in (s.children_q, s.prior, s.prior_logits):
            clear(tail(numbers, e), s.actions)
        fill(tail(s.children, e), s.actions, -1)
        if exists(s.mask):
            fill(tail(s.mask, e), s.actions, 1)


@kernel
def simulate(search: int, simulation: int, num_roots: int) -> int:
    """Descend from each root to an untried action, or to a node that ends the simulation.

    How many of the new nodes are resets.
    """
    s, resets = search_at(search), 0
    for i in range(num_roots):
        b = s.order[i]
        base, depth, carry, leaf = b * s.rows, 0, 0.0, -1
        node = 0
        while True:
            if exists(s.stamp):
                s.stamp[base + node] = simulation
                refresh(s, b, node)
            action, carry = select(s, b, node, depth == 0, carry, simulation)
            s.path_node[base + depth], s.path_action[base + depth] = node, action
            depth += 1
            child = s.children[(base + node) * s.actions + action]
            if child < 0:
                break
            found = canonical_of(s, base + child, child)
            visited = exists(s.stamp) and s.stamp[base + found] == simulation
            if visited or depth >= s.max_depth or s.ended[base + found] != 0:
                leaf = found
                break
            node = found
        s.parent_row[i], s.node_row[i] = node * s.roots + b, (simulation + 1) * s.roots + b
        s.leaf_action[i], s.path_length[b], s.leaf[b] = action, depth, leaf
        reset = s.horizon > 0 and depth % s.horizon == 0
        s.reset[i] = reset
        resets += reset
    return resets


@kernel
def expand(s: SearchRecord, b: int, simulation: int, out: OutputRecord, i: int) -> int:
    """Write the new node; returns -1, or the number of the field that holds NaN or infinity."""
    row, base = b * s.rows + simulation + 1, b * s.rows
    last = base + s.path_length[b] - 1
    parent, action = s.path_node[last], s.path_action[last]
    reward, gamma = out.reward[i], s.gamma[b]
    if unfit(reward):
        return REWARD
    if unfit(out.value[i]):
        return VALUE
    if exists(out.discount):
        gamma = out.discount[i]
        if unfit(gamma) or gamma < F0:
            return DISCOUNT
    num_legal = write_edges(s, row, out, i)
    if num_legal < 0:
        return PRIOR_LOGITS
    depth = s.depth[base + parent]
    if s.horizon > 0:
        s.value_prefix[row] = reward
        if depth == 0 or depth % s.horizon != 0:
            reward = reward - s.value_prefix[base + parent]
    if exists(s.to_play):
        before = s.to_play[base + parent]
        # 1 and 2 take turns, or 0 and 1: the root's player tells which
        both = 1 if s.to_play[base] == 0 else 3
        player = out.to_play[i] if exists(out.to_play) else np.int32(both - before)
        s.to_play[row] = player
        if player != before:
            gamma = -gamma
    s.visits[row], s.value_sum[row], s.raw_value[row] = 0, 0.0, out.value[i]
    s.reward[row], s.discount[row] = reward, gamma
    s.parent[row], s.action[row], s.depth[row] = parent, action, depth + 1
    s.ended[row] = num_legal == 0
    s.children[(base + parent) * s.actions + action] = simulation + 1
    return -1


@kernel
def backward(search: int, simulation: int, num_roots: int, output: int) -> int:
    """Write the new nodes and add their values along the paths.

    -1, or 8 * the index of the first root whose model output does not fit + the field's number.
    """
    s, out = search_at(search), output_at(output)
    for i in range(num_roots):
        b = s.order[i]
        base = b * s.rows
        leaf = s.leaf[b]
        if leaf < 0:
            unfit_field = expand(s, b, simulation, out, i)
            if unfit_field >= 0:
                return 8 * i + unfit_field
            leaf = simulation + 1
            if exists(out.key):
                leaf = same_state(s, b, simulation, out.key[i])
            known = leaf != simulation + 1  # the new edge leads to an old state
        else:
            known = exists(s.stamp) and s.ended[base + leaf] == 0
        gain = value_of(s, base + leaf) if known else s.raw_value[base + leaf]
        add_to_path(s, b, leaf, np.float64(gain))
        if s.normalize == TREE:
            whole_range(s, b, simulation)
        if s.root_in_range:
            widen(s, b, s.gamma[b] * value_of(s, base))
    return -1


@kernel
def run(
    search: int,
    output: int,
    first: int,  # simulation
    searched: int,  # address of int64: how many roots take part in each of these simulations
    num_simulations: int,
    model: int,  # address of a step, see raffia.jit.kernel
    context: int,
) -> int:
    """Run simulations with a compiled model.

    -1, or what `backward` answered and 2**40 times the simulation.
    """
    for i in range(num_simulations):
        num_roots = load_i64(searched + 8 * i)
        simulate(search, first + i, num_roots)
        call_step(model, context, num_roots)
        unfit_at = backward(search, first + i, num_roots, output)
        if unfit_at >= 0:
            return unfit_at + (first + i) * 2**40
    return -1
