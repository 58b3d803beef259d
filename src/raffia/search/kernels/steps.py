"""One simulation's two halves, compiled: `walk` down to a leaf, `backup` of what the model said.

`run` is many of them around a compiled model, with no Python in between.

Each number is found by the operations, in the order and in the precision of the tensor version
(puct.py, gumbel.py, softmax.py, reference.py): the results are the same bit for bit. Names as in
raffia.search.tree; `e` is the place of a node's first edge.
"""

# Everything here is a number to numba: types would only repeat that.
from typing import Any

import numpy as np

from raffia.jit.arrays import (
    copy_bytes,
    get_f32,
    get_f64,
    get_i32,
    get_i64,
    get_u8,
    nearest,
    ordered,
    power_of_two,
    put_f32,
    put_f64,
    put_i32,
    put_i64,
    put_u8,
    zero_bytes,
)
from raffia.jit.calls import call_step
from raffia.jit.kernel import kernel
from raffia.search.draws import GOLDEN
from raffia.search.gumbel import LEAST_LOGIT, TINY
from raffia.search.kernels.layout import GUMBEL, REALS, RUNNING, SIBLINGS, TREE, WORDS
from raffia.search.softmax import COEFFICIENTS, LEAST, LN2_HIGH, LN2_LOW, LOG2_E

F0, F1 = np.float32(0.0), np.float32(1.0)
INFINITY = np.float32(np.inf)
GREATEST = np.float32(np.finfo(np.float32).max)
_LEAST, _LOG2_E = np.float32(LEAST), np.float32(LOG2_E)
_LN2_HIGH, _LN2_LOW = np.float32(LN2_HIGH), np.float32(LN2_LOW)
_C0, _C1, _C2, _C3, _C4, _C5 = (np.float32(c) for c in COEFFICIENTS)
_LEAST_LOGIT, _TINY = np.float32(LEAST_LOGIT), np.float32(TINY)
_EPSILON = np.float32(1e-8)
LEAST_INT = -(2**63)
LEAST_I32 = np.int32(-(2**31))
_GOLDEN = np.uint64(GOLDEN + 2**64)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

VISITS, VALUE_SUM, RAW_VALUE = WORDS["visits"], WORDS["value_sum"], WORDS["raw_value"]
REWARD, DISCOUNT, PARENT = WORDS["reward"], WORDS["discount"], WORDS["parent"]
ACTION, DEPTH, ENDED = WORDS["action"], WORDS["depth"], WORDS["ended"]
CHILDREN, CHILDREN_VISITS = WORDS["children"], WORDS["children_visits"]
CHILDREN_Q, PRIOR = WORDS["children_q"], WORDS["prior"]
NUM_TRIED, Q_SUM, Q_MIN, Q_MAX = (WORDS[n] for n in ("num_tried", "q_sum", "q_min", "q_max"))
MASK, PRIOR_LOGITS, TO_PLAY = WORDS["mask"], WORDS["prior_logits"], WORDS["to_play"]
VALUE_PREFIX, KEY, CANONICAL = WORDS["value_prefix"], WORDS["key"], WORDS["canonical"]
ORDER, PATH_NODE, PATH_ACTION = WORDS["order"], WORDS["path_node"], WORDS["path_action"]
PATH_LENGTH, LEAF, STAMP = WORDS["path_length"], WORDS["leaf"], WORDS["stamp"]
SCRATCH = WORDS["scratch"]
PARENT_ROW, NODE_ROW, MOVE = WORDS["parent_row"], WORDS["node_row"], WORDS["move"]
RESET = WORDS["reset"]
TABLE, TIE_SEED, GAMMA = WORDS["table"], WORDS["tie_seed"], WORDS["gamma"]
ROOT_GUMBEL, CONSIDERED = WORDS["root_gumbel"], WORDS["considered"]
ROWS, ACTIONS, KIND, NORMALIZE = (WORDS[n] for n in ("rows", "actions", "kind", "normalize"))
ROOT_IN_RANGE, HORIZON = WORDS["root_in_range"], WORDS["horizon"]
MAX_DEPTH, TABLE_WIDTH = WORDS["max_depth"], WORDS["table_width"]
PLAYERS, ROOTS = WORDS["players"], WORDS["roots"]
MIN_RANGE, MAXVISIT_INIT = REALS["min_range"], REALS["maxvisit_init"]
VALUE_SCALE = REALS["value_scale"]


@kernel
def _exp(x: Any) -> Any:
    kept = x if x > _LEAST else _LEAST
    whole = nearest(kept * _LOG2_E)
    r = kept - whole * _LN2_HIGH
    r = r - whole * _LN2_LOW
    y = _C0
    y = y * r + _C1
    y = y * r + _C2
    y = y * r + _C3
    y = y * r + _C4
    y = y * r + _C5
    y = y * (r * r)
    y = y + r
    y = y + F1
    y = y * power_of_two(np.int32(whole))
    return y if x >= _LEAST else F0


@kernel
def _greatest(numbers: Any, num: Any) -> Any:
    """The place of the first of the greatest numbers."""
    top = LEAST_I32
    for a in range(num):
        x = ordered(get_f32(numbers, a) + F0)  # -0.0 counts as 0.0
        top = x if x > top else top
    for a in range(num):
        if ordered(get_f32(numbers, a) + F0) == top:
            return a
    return 0


@kernel
def _softmax(numbers: Any, num: Any) -> None:
    """Logits become their softmax, in place: with a second address loops would not be vectors."""
    top = get_f32(numbers, _greatest(numbers, num))
    if top == -INFINITY:
        for a in range(num):
            put_f32(numbers, a, F0)
        return
    for a in range(num):
        put_f32(numbers, a, _exp(get_f32(numbers, a) - top))
    total = 0.0
    for a in range(num):
        total += np.float64(get_f32(numbers, a))
    divisor = np.float32(total)
    for a in range(num):
        put_f32(numbers, a, get_f32(numbers, a) / divisor)


@kernel
def _mix(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


@kernel
def _best(scores: Any, mask: Any, first: Any, num: Any) -> Any:
    """The first legal action of the highest score; illegal scores become -inf, others finite.

    `mask` is 0 where all are legal.
    """
    if mask != 0:
        for a in range(num):
            x = get_f32(scores, a)
            x = x if x > -GREATEST else -GREATEST
            put_f32(scores, a, x if get_u8(mask, first + a) != 0 else -INFINITY)
    return _greatest(scores, num)


@kernel
def _untie(block: Any, b: Any, node: Any, simulation: Any, best: Any) -> Any:
    """Of the legal actions that score as the best one, the one that its hash puts first."""
    num = get_i64(block, ACTIONS)
    scores, seed = get_i64(block, SCRATCH), get_i64(block, TIE_SEED)
    top = get_f32(scores, best)
    place = np.uint64(get_i64(seed, b)) + np.uint64(simulation) * _GOLDEN
    place = _mix(place) + np.uint64(node) * _GOLDEN
    most: Any = LEAST_INT
    for a in range(num):
        if get_f32(scores, a) != top:
            continue
        draw = np.int64(_mix(place + np.uint64(a) * _GOLDEN))
        if draw > most:
            best, most = a, draw
    return best


@kernel
def _total_visits(block: Any, e: Any) -> Any:
    visits, total = get_i64(block, CHILDREN_VISITS), np.int32(0)
    for a in range(get_i64(block, ACTIONS)):
        total += get_i32(visits, e + a)
    return total


@kernel
def _value(block: Any, row: Any) -> Any:
    visits = get_i32(get_i64(block, VISITS), row)
    if visits > 0:
        return np.float32(get_f64(get_i64(block, VALUE_SUM), row) / visits)
    return get_f32(get_i64(block, RAW_VALUE), row)


@kernel
def _score_in_range(
    block: Any, reals: Any, e: Any, scale: Any, mean: Any, low: Any, high: Any
) -> None:
    num, scores = get_i64(block, ACTIONS), get_i64(block, SCRATCH)
    q, prior = get_i64(block, CHILDREN_Q) + 4 * e, get_i64(block, PRIOR) + 4 * e
    visits = get_i64(block, CHILDREN_VISITS) + 4 * e
    if high > low:
        width = high - low
        least = np.float32(get_f64(reals, MIN_RANGE))
        width = width if width > least else least
    else:
        low, width = F0, F1  # q stays as it is
    for a in range(num):
        n = get_i32(visits, a)
        x = get_f32(q, a)
        x = ((x if n > 0 else mean) - low) / width
        x = x if x > F0 else F0
        x = x if x < F1 else F1
        put_f32(scores, a, x + (scale * get_f32(prior, a)) / np.float32(n + np.int32(1)))


@kernel
def _score_among_siblings(block: Any, row: Any, e: Any, scale: Any) -> None:
    num, scores = get_i64(block, ACTIONS), get_i64(block, SCRATCH)
    q, prior = get_i64(block, CHILDREN_Q) + 4 * e, get_i64(block, PRIOR) + 4 * e
    visits = get_i64(block, CHILDREN_VISITS) + 4 * e
    low = high = _value(block, row)
    for a in range(num):
        x = get_f32(q, a)
        x = x if get_i32(visits, a) > 0 else low  # which changes nothing
        low = x if x < low else low
        high = x if x > high else high
    width = high - low
    width = width if width > _EPSILON else _EPSILON
    for a in range(num):
        n = get_i32(visits, a)
        x = get_f32(q, a)
        x = ((x if n > 0 else low) - low) / width
        put_f32(scores, a, x + (scale * get_f32(prior, a)) / np.float32(n + np.int32(1)))


@kernel
def _puct(
    block: Any, reals: Any, b: Any, node: Any, at_root: Any, carry: Any, simulation: Any
) -> Any:
    num = get_i64(block, ACTIONS)
    row = b * get_i64(block, ROWS) + node
    e = row * num
    scale = get_f32(get_i64(block, TABLE), _total_visits(block, e))
    tried = get_i32(get_i64(block, NUM_TRIED), row)
    q_sum = get_f64(get_i64(block, Q_SUM), row)
    if at_root:
        carry = q_sum / (tried if tried > 0 else np.int32(1))
    else:
        carry = (carry + q_sum) / (np.int32(1) + tried)
    if get_i64(block, NORMALIZE) == SIBLINGS:
        _score_among_siblings(block, row, e, scale)
    else:
        low, high = get_f32(get_i64(block, Q_MIN), b), get_f32(get_i64(block, Q_MAX), b)
        _score_in_range(block, reals, e, scale, np.float32(carry), low, high)
    best = _best(get_i64(block, SCRATCH), get_i64(block, MASK), e, num)
    if get_i64(block, TIE_SEED) != 0:
        best = _untie(block, b, node, simulation, best)
    return best, carry


@kernel
def _sigma(block: Any, reals: Any, row: Any, e: Any, out: Any) -> Any:
    """sigma of the completed Q -> out; the node's total of visits."""
    num = get_i64(block, ACTIONS)
    q, prior = get_i64(block, CHILDREN_Q) + 4 * e, get_i64(block, PRIOR) + 4 * e
    visits = get_i64(block, CHILDREN_VISITS) + 4 * e
    weight, weighted = 0.0, 0.0
    total, most = np.int32(0), np.int32(0)
    for a in range(num):
        n = get_i32(visits, a)
        if n > 0:
            p = get_f32(prior, a)
            p64 = np.float64(p if p > _TINY else _TINY)
            weight += p64
            weighted += p64 * np.float64(get_f32(q, a))
            total += n
            most = n if n > most else most
    weighted = weighted / (weight if weight > 0 else 1.0)
    raw = np.float64(get_f32(get_i64(block, RAW_VALUE), row))
    mixed = np.float32((raw + np.float64(total) * weighted) / np.float64(total + np.int32(1)))
    low, high = INFINITY, -INFINITY
    for a in range(num):
        x = get_f32(q, a)
        x = x if get_i32(visits, a) > 0 else mixed
        low = x if x < low else low
        high = x if x > high else high
    width = high - low
    width = width if width > _EPSILON else _EPSILON
    scale = (get_f64(reals, MAXVISIT_INIT) + np.float64(most)) * get_f64(reals, VALUE_SCALE)
    scale32 = np.float32(scale)
    for a in range(num):
        x = get_f32(q, a)
        x = x if get_i32(visits, a) > 0 else mixed
        put_f32(out, a, scale32 * ((x - low) / width))
    return total


@kernel
def _gumbel(block: Any, reals: Any, b: Any, node: Any, at_root: Any) -> Any:
    num = get_i64(block, ACTIONS)
    row = b * get_i64(block, ROWS) + node
    e = row * num
    scores = get_i64(block, SCRATCH)
    logits = get_i64(block, PRIOR_LOGITS) + 4 * e
    visits = get_i64(block, CHILDREN_VISITS) + 4 * e
    total = _sigma(block, reals, row, e, scores)
    if at_root:
        gumbel = get_i64(block, ROOT_GUMBEL) + 4 * b * num
        place = b * get_i64(block, TABLE_WIDTH) + total
        turn = get_i32(get_i64(block, CONSIDERED), place)
        top = get_f32(logits, _greatest(logits, num))
        for a in range(num):
            x = (get_f32(gumbel, a) + (get_f32(logits, a) - top)) + get_f32(scores, a)
            x = x if x > _LEAST_LOGIT else _LEAST_LOGIT
            put_f32(scores, a, x if get_i32(visits, a) == turn else -INFINITY)
    else:
        for a in range(num):
            put_f32(scores, a, get_f32(logits, a) + get_f32(scores, a))
        _softmax(scores, num)
        share = np.float32(np.int32(1) + total)
        for a in range(num):
            put_f32(scores, a, get_f32(scores, a) - np.float32(get_i32(visits, a)) / share)
    return _best(scores, get_i64(block, MASK), e, num)


@kernel
def _refresh(block: Any, b: Any, node: Any) -> None:
    """Work out a node's Q anew: its children may have been reached by other ways meanwhile."""
    num, rows = get_i64(block, ACTIONS), get_i64(block, ROWS)
    row = b * rows + node
    e = row * num
    total = 0.0
    for a in range(num):
        child = get_i32(get_i64(block, CHILDREN), e + a)
        if child >= 0:
            q = _q(block, b, child)
            put_f32(get_i64(block, CHILDREN_Q), e + a, q)
            total += np.float64(q)
    put_f64(get_i64(block, Q_SUM), row, total)


@kernel
def _canonical(block: Any, row: Any, node: Any) -> Any:
    canonical = get_i64(block, CANONICAL)
    return get_i32(canonical, row) if canonical != 0 else np.int32(node)


@kernel
def _q(block: Any, b: Any, child: Any) -> Any:
    """reward + discount * value of a child that was visited."""
    base = b * get_i64(block, ROWS)
    source = base + _canonical(block, base + child, child)
    mean = get_f64(get_i64(block, VALUE_SUM), source) / get_i32(get_i64(block, VISITS), source)
    reward = np.float64(get_f32(get_i64(block, REWARD), base + child))
    return np.float32(reward + np.float64(get_f32(get_i64(block, DISCOUNT), base + child)) * mean)


@kernel
def _unfit(x: Any) -> Any:
    return not (x <= GREATEST and x >= -GREATEST)


@kernel
def _edges(block: Any, row: Any, given: Any, mask: Any) -> Any:
    """Write a new node's edges; how many actions are legal, -1 if a legal logit does not fit."""
    num = get_i64(block, ACTIONS)
    e = row * num
    prior, num_unfit = get_i64(block, PRIOR) + 4 * e, 0
    for a in range(num):
        num_unfit += not get_f32(given, a) <= GREATEST
    if num_unfit > 0 and mask != 0:
        for a in range(num):
            num_unfit -= get_u8(mask, a) == 0 and not get_f32(given, a) <= GREATEST
    if num_unfit > 0:
        return -1
    children, children_visits = get_i64(block, CHILDREN) + 4 * e, get_i64(block, CHILDREN_VISITS)
    for a in range(num):
        put_i32(children, a, np.int32(-1))
    zero_bytes(children_visits + 4 * e, 4 * num)
    zero_bytes(get_i64(block, CHILDREN_Q) + 4 * e, 4 * num)
    num_legal = num
    tree_mask = get_i64(block, MASK)
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
    if get_i64(block, PRIOR_LOGITS) != 0:
        copy_bytes(get_i64(block, PRIOR_LOGITS) + 4 * e, prior, 4 * num)
    _softmax(prior, num)
    return num_legal


@kernel
def plant(
    block: Any, num_roots: Any, value: Any, logits: Any, mask: Any, to_play: Any, counted: Any
) -> Any:
    """Set the values of trees that hold their roots only.

    counted: what the root's own value counts, 0 (excluded), 1 (included), 2 (as a visit of 0).
    -1, or 8 * the first root whose value or logits do not fit + the field's number.
    """
    rows, num = get_i64(block, ROWS), get_i64(block, ACTIONS)
    size = num_roots * rows
    for name in (VISITS, RAW_VALUE, REWARD, DISCOUNT, DEPTH, NUM_TRIED):
        zero_bytes(get_i64(block, name), 4 * size)
    zero_bytes(get_i64(block, VALUE_SUM), 8 * size)
    zero_bytes(get_i64(block, Q_SUM), 8 * size)
    zero_bytes(get_i64(block, ENDED), size)
    for name in (VALUE_PREFIX, TO_PLAY):
        if get_i64(block, name) != 0:
            zero_bytes(get_i64(block, name), 4 * size)
    parent, action, stamp = get_i64(block, PARENT), get_i64(block, ACTION), get_i64(block, STAMP)
    for j in range(size):
        put_i32(parent, j, np.int32(-1))
        put_i32(action, j, np.int32(-1))
    if stamp != 0:
        zero_bytes(get_i64(block, KEY), 8 * size)
        for j in range(size):
            put_i32(stamp, j, np.int32(-1))
            put_i32(get_i64(block, CANONICAL), j, np.int32(-1 if j % rows else 0))
    for b in range(num_roots):
        row, x = b * rows, get_f32(value, b)
        if _unfit(x):
            return 8 * b + 1
        if _edges(block, row, logits + 4 * b * num, mask + b * num if mask != 0 else 0) < 0:
            return 8 * b + 2
        put_f32(get_i64(block, Q_MIN), b, INFINITY)
        put_f32(get_i64(block, Q_MAX), b, -INFINITY)
        put_f32(get_i64(block, RAW_VALUE), row, x)
        if counted != 0:
            put_i32(get_i64(block, VISITS), row, np.int32(1))
        if counted == 1:
            put_f64(get_i64(block, VALUE_SUM), row, np.float64(x))
        if to_play != 0:
            put_i32(get_i64(block, TO_PLAY), row, get_i32(to_play, b))
    return -1


@kernel
def finish(block: Any, num_roots: Any) -> None:
    """Clear the edges of rows that never became nodes."""
    rows, num = get_i64(block, ROWS), get_i64(block, ACTIONS)
    for b in range(num_roots):
        for j in range(1, rows):
            row = b * rows + j
            if get_i32(get_i64(block, PARENT), row) < 0:
                for name in (CHILDREN_VISITS, CHILDREN_Q, PRIOR, PRIOR_LOGITS):
                    if get_i64(block, name) != 0:
                        zero_bytes(get_i64(block, name) + 4 * row * num, 4 * num)
                for a in range(row * num, (row + 1) * num):
                    put_i32(get_i64(block, CHILDREN), a, np.int32(-1))
                    if get_i64(block, MASK) != 0:
                        put_u8(get_i64(block, MASK), a, np.uint8(1))


@kernel
def walk(block: Any, reals: Any, simulation: Any, num_roots: Any) -> Any:
    """From each root down to an action that was not tried, or to a node that ends the walk.

    How many of the new nodes are resets.
    """
    rows, num = get_i64(block, ROWS), get_i64(block, ACTIONS)
    children, ended = get_i64(block, CHILDREN), get_i64(block, ENDED)
    stamp, horizon = get_i64(block, STAMP), get_i64(block, HORIZON)
    max_depth, resets, roots = get_i64(block, MAX_DEPTH), 0, get_i64(block, ROOTS)
    path_node, path_action = get_i64(block, PATH_NODE), get_i64(block, PATH_ACTION)
    for i in range(num_roots):
        b = get_i64(get_i64(block, ORDER), i)
        base, depth, carry, leaf = b * rows, 0, 0.0, np.int32(-1)
        node: Any = 0
        while True:
            if stamp != 0:
                put_i32(stamp, base + node, np.int32(simulation))
                _refresh(block, b, node)
            if get_i64(block, KIND) == GUMBEL:
                action = _gumbel(block, reals, b, node, depth == 0)
            else:
                action, carry = _puct(block, reals, b, node, depth == 0, carry, simulation)
            put_i32(path_node, b * rows + depth, np.int32(node))
            put_i32(path_action, b * rows + depth, np.int32(action))
            depth += 1
            child = get_i32(children, (base + node) * num + action)
            if child < 0:
                break
            found = _canonical(block, base + child, child)
            met = stamp != 0 and get_i32(stamp, base + found) == simulation
            if met or depth >= max_depth or get_u8(ended, base + found) != 0:
                leaf = found
                break
            node = np.int64(found)
        put_i64(get_i64(block, PARENT_ROW), i, node * roots + b)
        put_i64(get_i64(block, NODE_ROW), i, (simulation + 1) * roots + b)
        put_i64(get_i64(block, MOVE), i, action)
        put_i32(get_i64(block, PATH_LENGTH), b, np.int32(depth))
        put_i32(get_i64(block, LEAF), b, leaf)
        reset = horizon > 0 and depth % horizon == 0
        put_u8(get_i64(block, RESET), i, np.uint8(reset))
        resets += reset
    return resets


@kernel
def _expand(
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
    rows, num = get_i64(block, ROWS), get_i64(block, ACTIONS)
    row, parent_row = b * rows + simulation + 1, b * rows + parent
    if _unfit(get_f32(reward, i)):
        return 1
    if _unfit(get_f32(value, i)):
        return 2
    gamma = get_f32(get_i64(block, GAMMA), b)
    if discount != 0:
        gamma = get_f32(discount, i)
        if _unfit(gamma) or gamma < F0:
            return 4
    num_legal = _edges(block, row, logits + 4 * i * num, mask + i * num if mask != 0 else 0)
    if num_legal < 0:
        return 3
    depth = get_i32(get_i64(block, DEPTH), parent_row)
    gain = get_f32(reward, i)
    horizon = get_i64(block, HORIZON)
    if horizon > 0:
        prefixes = get_i64(block, VALUE_PREFIX)
        put_f32(prefixes, row, gain)
        if depth == 0 or depth % horizon != 0:
            gain = gain - get_f32(prefixes, parent_row)
    players = get_i64(block, TO_PLAY)
    if players != 0:
        before = get_i32(players, parent_row)
        player = np.int32(get_i64(block, PLAYERS)) - before
        if to_play != 0:
            player = get_i32(to_play, i)
        put_i32(players, row, np.int32(player))
        if player != before:
            gamma = -gamma
    put_i32(get_i64(block, VISITS), row, np.int32(0))
    put_f64(get_i64(block, VALUE_SUM), row, 0.0)
    put_f32(get_i64(block, RAW_VALUE), row, get_f32(value, i))
    put_f32(get_i64(block, REWARD), row, gain)
    put_f32(get_i64(block, DISCOUNT), row, gamma)
    put_i32(get_i64(block, PARENT), row, np.int32(parent))
    put_i32(get_i64(block, ACTION), row, np.int32(action))
    put_i32(get_i64(block, DEPTH), row, depth + np.int32(1))
    put_u8(get_i64(block, ENDED), row, np.uint8(num_legal == 0))
    put_i32(get_i64(block, CHILDREN), parent_row * num + action, np.int32(simulation + 1))
    return 0


@kernel
def _same_state(block: Any, b: Any, simulation: Any, key: Any) -> Any:
    """The earlier node with this key, else the new one."""
    rows, keys = get_i64(block, ROWS), get_i64(block, KEY)
    base, canonical = b * rows, get_i64(block, CANONICAL)
    put_i64(keys, base + simulation + 1, key)
    found = np.int32(simulation + 1)
    for j in range(simulation + 1):
        if get_i32(canonical, base + j) == j and get_i64(keys, base + j) == key:
            found = np.int32(j)
            break
    put_i32(canonical, base + simulation + 1, found)
    return found


@kernel
def _widen(block: Any, b: Any, q: Any) -> None:
    low, high = get_i64(block, Q_MIN), get_i64(block, Q_MAX)
    if q < get_f32(low, b):
        put_f32(low, b, q)
    if q > get_f32(high, b):
        put_f32(high, b, q)


@kernel
def _whole_range(block: Any, b: Any, simulation: Any) -> None:
    """The range of the Q of now."""
    rows, num = get_i64(block, ROWS), get_i64(block, ACTIONS)
    put_f32(get_i64(block, Q_MIN), b, INFINITY)
    put_f32(get_i64(block, Q_MAX), b, -INFINITY)
    for j in range(1, simulation + 2):
        parent = get_i32(get_i64(block, PARENT), b * rows + j)
        if parent >= 0:
            action = get_i32(get_i64(block, ACTION), b * rows + j)
            _widen(
                block, b, get_f32(get_i64(block, CHILDREN_Q), (b * rows + parent) * num + action)
            )


@kernel
def _backward(block: Any, b: Any, leaf: Any, gain: Any) -> None:
    """Add what was found to the nodes of the path, from the leaf to the root."""
    rows, num = get_i64(block, ROWS), get_i64(block, ACTIONS)
    base = b * rows
    visits, value_sum = get_i64(block, VISITS), get_i64(block, VALUE_SUM)
    put_i32(visits, base + leaf, get_i32(visits, base + leaf) + np.int32(1))
    put_f64(value_sum, base + leaf, get_f64(value_sum, base + leaf) + gain)
    for d in range(get_i32(get_i64(block, PATH_LENGTH), b) - 1, -1, -1):
        row = base + get_i32(get_i64(block, PATH_NODE), base + d)
        e = row * num + get_i32(get_i64(block, PATH_ACTION), base + d)
        child = get_i32(get_i64(block, CHILDREN), e)
        reward = np.float64(get_f32(get_i64(block, REWARD), base + child))
        gain = reward + np.float64(get_f32(get_i64(block, DISCOUNT), base + child)) * gain
        q, n = _q(block, b, child), get_i32(get_i64(block, CHILDREN_VISITS), e)
        if n == 0:
            tried = get_i64(block, NUM_TRIED)
            put_i32(tried, row, get_i32(tried, row) + np.int32(1))
        put_i32(get_i64(block, CHILDREN_VISITS), e, n + np.int32(1))
        q_sum, old = get_i64(block, Q_SUM), get_f32(get_i64(block, CHILDREN_Q), e)
        change = np.float64(q) - np.float64(old)
        put_f64(q_sum, row, get_f64(q_sum, row) + change)
        put_f32(get_i64(block, CHILDREN_Q), e, q)
        if get_i64(block, NORMALIZE) == RUNNING:
            _widen(block, b, q)
        put_i32(visits, row, get_i32(visits, row) + np.int32(1))
        put_f64(value_sum, row, get_f64(value_sum, row) + gain)


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

    -1, or 8 * the place of the first root whose model output does not fit + the field's number.
    """
    rows = get_i64(block, ROWS)
    for i in range(num_roots):
        b = get_i64(get_i64(block, ORDER), i)
        base = b * rows
        last = base + get_i32(get_i64(block, PATH_LENGTH), b) - 1
        leaf = get_i32(get_i64(block, LEAF), b)
        if leaf < 0:
            parent = np.int64(get_i32(get_i64(block, PATH_NODE), last))
            action = np.int64(get_i32(get_i64(block, PATH_ACTION), last))
            unfit = _expand(
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
                leaf = _same_state(block, b, simulation, get_i64(key, i))
            gain = np.float64(get_f32(value, i))
            if leaf != simulation + 1:
                gain = np.float64(_value(block, base + leaf))
        elif get_i64(block, STAMP) != 0 and get_u8(get_i64(block, ENDED), base + leaf) == 0:
            gain = np.float64(_value(block, base + leaf))
        else:
            gain = np.float64(get_f32(get_i64(block, RAW_VALUE), base + leaf))
        _backward(block, b, leaf, gain)
        if get_i64(block, NORMALIZE) == TREE:
            _whole_range(block, b, simulation)
        if get_i64(block, ROOT_IN_RANGE) != 0:
            _widen(block, b, get_f32(get_i64(block, GAMMA), b) * _value(block, base))
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
        walk(block, reals, first + i, num_roots)
        call_step(model, context, num_roots)
        unfit = backup(block, first + i, num_roots, reward, value, logits, 0, 0, 0, 0)
        if unfit >= 0:
            return unfit + (first + i) * 2**40
    return -1
