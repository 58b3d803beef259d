"""The choice of an action at a node, compiled: results as in puct.py and gumbel.py, bit for bit.

`block` and `reals` hold all addresses and numbers (layout.py); `e` is the index of a node's first
edge.
"""

# Everything here is a number to numba: types would only repeat that.
from typing import Any

import numpy as np

from raffia.functional.draws import GOLDEN
from raffia.jit.arrays import get_f32, get_f64, get_i32, get_i64, get_u8, put_f32
from raffia.jit.kernel import kernel
from raffia.search.gumbel import LEAST_LOGIT, TINY
from raffia.search.kernels import layout as at
from raffia.search.kernels.numbers import F0, F1, GREATEST, INFINITY, greatest, mix, softmax
from raffia.search.kernels.statistics import total_visits, value_of

EPSILON = np.float32(1e-8)
LEAST_INT = -(2**63)
_LEAST_LOGIT, _TINY = np.float32(LEAST_LOGIT), np.float32(TINY)
_GOLDEN = np.uint64(GOLDEN + 2**64)


@kernel
def best_of(scores: Any, mask: Any, first: Any, num: Any) -> Any:
    """The first legal action of the highest score; illegal scores become -inf, others finite.

    `mask` is 0 where all are legal.
    """
    if mask != 0:
        for a in range(num):
            x = get_f32(scores, a)
            x = x if x > -GREATEST else -GREATEST
            put_f32(scores, a, x if get_u8(mask, first + a) != 0 else -INFINITY)
    return greatest(scores, num)


@kernel
def untie(block: Any, b: Any, node: Any, simulation: Any, best: Any) -> Any:
    """Of the legal actions that score as the best one, the one that its hash puts first."""
    num = get_i64(block, at.ACTIONS)
    scores, seed = get_i64(block, at.SCRATCH), get_i64(block, at.TIE_SEED)
    top = get_f32(scores, best)
    state = np.uint64(get_i64(seed, b)) + np.uint64(simulation) * _GOLDEN
    state = mix(state) + np.uint64(node) * _GOLDEN
    most: Any = LEAST_INT
    for a in range(num):
        if get_f32(scores, a) != top:
            continue
        draw = np.int64(mix(state + np.uint64(a) * _GOLDEN))
        if draw > most:
            best, most = a, draw
    return best


@kernel
def score_in_range(
    block: Any, reals: Any, e: Any, scale: Any, mean: Any, low: Any, high: Any
) -> None:
    num, scores = get_i64(block, at.ACTIONS), get_i64(block, at.SCRATCH)
    q, prior = get_i64(block, at.CHILDREN_Q) + 4 * e, get_i64(block, at.PRIOR) + 4 * e
    visits = get_i64(block, at.CHILDREN_VISITS) + 4 * e
    if high > low:
        width = high - low
        least = np.float32(get_f64(reals, at.MIN_RANGE))
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
def score_among_siblings(block: Any, row: Any, e: Any, scale: Any) -> None:
    num, scores = get_i64(block, at.ACTIONS), get_i64(block, at.SCRATCH)
    q, prior = get_i64(block, at.CHILDREN_Q) + 4 * e, get_i64(block, at.PRIOR) + 4 * e
    visits = get_i64(block, at.CHILDREN_VISITS) + 4 * e
    low = high = value_of(block, row)
    for a in range(num):
        x = get_f32(q, a)
        x = x if get_i32(visits, a) > 0 else low  # which changes nothing
        low = x if x < low else low
        high = x if x > high else high
    width = high - low
    width = width if width > EPSILON else EPSILON
    for a in range(num):
        n = get_i32(visits, a)
        x = get_f32(q, a)
        x = ((x if n > 0 else low) - low) / width
        put_f32(scores, a, x + (scale * get_f32(prior, a)) / np.float32(n + np.int32(1)))


@kernel
def puct(
    block: Any, reals: Any, b: Any, node: Any, at_root: Any, carry: Any, simulation: Any
) -> Any:
    num = get_i64(block, at.ACTIONS)
    row = b * get_i64(block, at.ROWS) + node
    e = row * num
    scale = get_f32(get_i64(block, at.TABLE), total_visits(block, e))
    tried = get_i32(get_i64(block, at.NUM_TRIED), row)
    q_sum = get_f64(get_i64(block, at.Q_SUM), row)
    if at_root:
        carry = q_sum / (tried if tried > 0 else np.int32(1))
    else:
        carry = (carry + q_sum) / (np.int32(1) + tried)
    if get_i64(block, at.NORMALIZE) == at.SIBLINGS:
        score_among_siblings(block, row, e, scale)
    else:
        low, high = get_f32(get_i64(block, at.Q_MIN), b), get_f32(get_i64(block, at.Q_MAX), b)
        score_in_range(block, reals, e, scale, np.float32(carry), low, high)
    best = best_of(get_i64(block, at.SCRATCH), get_i64(block, at.MASK), e, num)
    if get_i64(block, at.TIE_SEED) != 0:
        best = untie(block, b, node, simulation, best)
    return best, carry


@kernel
def sigma(block: Any, reals: Any, row: Any, e: Any, out: Any) -> Any:
    """sigma of the completed Q -> out; the node's total of visits."""
    num = get_i64(block, at.ACTIONS)
    q, prior = get_i64(block, at.CHILDREN_Q) + 4 * e, get_i64(block, at.PRIOR) + 4 * e
    visits = get_i64(block, at.CHILDREN_VISITS) + 4 * e
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
    raw = np.float64(get_f32(get_i64(block, at.RAW_VALUE), row))
    mixed = np.float32((raw + np.float64(total) * weighted) / np.float64(total + np.int32(1)))
    low, high = INFINITY, -INFINITY
    for a in range(num):
        x = get_f32(q, a)
        x = x if get_i32(visits, a) > 0 else mixed
        low = x if x < low else low
        high = x if x > high else high
    width = high - low
    width = width if width > EPSILON else EPSILON
    scale = (get_f64(reals, at.MAXVISIT_INIT) + np.float64(most)) * get_f64(reals, at.VALUE_SCALE)
    scale32 = np.float32(scale)
    for a in range(num):
        x = get_f32(q, a)
        x = x if get_i32(visits, a) > 0 else mixed
        put_f32(out, a, scale32 * ((x - low) / width))
    return total


@kernel
def gumbel(block: Any, reals: Any, b: Any, node: Any, at_root: Any) -> Any:
    num = get_i64(block, at.ACTIONS)
    row = b * get_i64(block, at.ROWS) + node
    e = row * num
    scores = get_i64(block, at.SCRATCH)
    logits = get_i64(block, at.PRIOR_LOGITS) + 4 * e
    visits = get_i64(block, at.CHILDREN_VISITS) + 4 * e
    total = sigma(block, reals, row, e, scores)
    if at_root:
        gumbel = get_i64(block, at.ROOT_GUMBEL) + 4 * b * num
        slot = b * get_i64(block, at.TABLE_WIDTH) + total
        turn = get_i32(get_i64(block, at.CONSIDERED), slot)
        top = get_f32(logits, greatest(logits, num))
        for a in range(num):
            x = (get_f32(gumbel, a) + (get_f32(logits, a) - top)) + get_f32(scores, a)
            x = x if x > _LEAST_LOGIT else _LEAST_LOGIT
            put_f32(scores, a, x if get_i32(visits, a) == turn else -INFINITY)
    else:
        for a in range(num):
            put_f32(scores, a, get_f32(logits, a) + get_f32(scores, a))
        softmax(scores, num)
        total_visits = np.float32(np.int32(1) + total)
        for a in range(num):
            put_f32(scores, a, get_f32(scores, a) - np.float32(get_i32(visits, a)) / total_visits)
    return best_of(scores, get_i64(block, at.MASK), e, num)
