"""The choice of an action at a node, compiled: results as in selection.py, bit for bit.

`s` is the search's record, `row` a node among all roots' nodes. What a node knows of its actions
begins at its first edge, `row * A`.
"""

from typing import Any

import numpy as np

from raffia.functional.draws import GOLDEN
from raffia.jit.kernel import kernel
from raffia.jit.records import Numbers, exists, tail
from raffia.search.kernels.numbers import F0, F1, GREATEST, INFINITY, greatest, mix, softmax
from raffia.search.kernels.record import GUMBEL, SIBLINGS, SearchRecord
from raffia.search.kernels.statistics import value_of
from raffia.search.selection import LEAST_LOGIT, TINY

EPSILON = np.float32(1e-8)
LEAST_INT = -(2**63)
_LEAST_LOGIT, _TINY = np.float32(LEAST_LOGIT), np.float32(TINY)
_GOLDEN = np.uint64(GOLDEN + 2**64)


@kernel
def select(
    s: SearchRecord, b: int, node: int, at_root: bool, carry: float, simulation: int
) -> tuple[int, float]:
    """Choose an action; returns it, and the carry for the child that it leads to."""
    row = b * s.rows + node
    if s.kind == GUMBEL:
        score_gumbel(s, b, row, at_root)
    else:
        carry = score_puct(s, b, row, at_root, carry)
    best = best_of(s.scores, tail(s.mask, row * s.actions), s.actions)
    if exists(s.tie_seed):
        best = break_ties(s, b, node, simulation, best)
    return best, carry


@kernel
def best_of(scores: Numbers, mask: Numbers, num: int) -> int:
    """The first legal action of the highest score; illegal scores become -inf, others finite."""
    if exists(mask):
        for a in range(num):
            x = scores[a]
            x = x if x > -GREATEST else -GREATEST
            scores[a] = x if mask[a] != 0 else -INFINITY
    return greatest(scores, num)


@kernel
def break_ties(s: SearchRecord, b: int, node: int, simulation: int, best: int) -> int:
    """The action that its hash ranks first among the legal actions that tie with the best one."""
    top = s.scores[best]
    state = np.uint64(s.tie_seed[b]) + np.uint64(simulation) * _GOLDEN
    state = mix(state) + np.uint64(node) * _GOLDEN
    most: Any = LEAST_INT
    for a in range(s.actions):
        if s.scores[a] != top:
            continue
        draw = np.int64(mix(state + np.uint64(a) * _GOLDEN))
        if draw > most:
            best, most = a, draw
    return best


@kernel
def score_puct(s: SearchRecord, b: int, row: int, at_root: bool, carry: float) -> float:
    """Write PUCT's scores to s.scores; returns the node's mean Q, from which its children start."""
    visits = tail(s.children_visits, row * s.actions)
    total = 0
    for a in range(s.actions):
        total += visits[a]
    scale = s.exploration[total]
    tried = s.num_tried[row]
    if at_root:
        carry = s.q_sum[row] / max(tried, 1)
    else:
        carry = (carry + s.q_sum[row]) / (1 + tried)
    if s.normalize == SIBLINGS:
        score_among_siblings(s, row, scale)
    else:
        score_in_range(s, row, scale, np.float32(carry), s.q_min[b], s.q_max[b])
    return carry


@kernel
def score_in_range(s: SearchRecord, row: int, scale: Any, mean: Any, low: Any, high: Any) -> None:
    scores, e = s.scores, row * s.actions
    q, prior, visits = tail(s.children_q, e), tail(s.prior, e), tail(s.children_visits, e)
    if high > low:
        width = high - low
        least = np.float32(s.min_range)
        width = width if width > least else least
    else:
        low, width = F0, F1  # q stays as it is
    for a in range(s.actions):
        n, x = visits[a], q[a]
        x = ((x if n > 0 else mean) - low) / width
        x = x if x > F0 else F0
        x = x if x < F1 else F1
        scores[a] = x + (scale * prior[a]) / np.float32(n + np.int32(1))


@kernel
def score_among_siblings(s: SearchRecord, row: int, scale: Any) -> None:
    num, scores, e = s.actions, s.scores, row * s.actions
    q, prior, visits = tail(s.children_q, e), tail(s.prior, e), tail(s.children_visits, e)
    low = high = value_of(s, row)
    for a in range(num):
        x = q[a]
        x = x if visits[a] > 0 else low  # which changes nothing
        low = x if x < low else low
        high = x if x > high else high
    width = high - low
    width = width if width > EPSILON else EPSILON
    for a in range(num):
        n, x = visits[a], q[a]
        x = ((x if n > 0 else low) - low) / width
        scores[a] = x + (scale * prior[a]) / np.float32(n + np.int32(1))


@kernel
def score_gumbel(s: SearchRecord, b: int, row: int, at_root: bool) -> None:
    """Write Gumbel MuZero's scores to s.scores."""
    num, scores, e = s.actions, s.scores, row * s.actions
    logits, visits = tail(s.prior_logits, e), tail(s.children_visits, e)
    total = sigma(s, row)
    if at_root:
        gumbel, turn = tail(s.root_gumbel, b * num), s.considered[b * (s.rows - 1) + total]
        top = logits[greatest(logits, num)]
        for a in range(num):
            x = (gumbel[a] + (logits[a] - top)) + scores[a]
            x = x if x > _LEAST_LOGIT else _LEAST_LOGIT
            scores[a] = x if visits[a] == turn else -INFINITY
    else:
        for a in range(num):
            scores[a] = logits[a] + scores[a]
        softmax(scores, num)
        total_visits = np.float32(np.int32(1) + total)
        for a in range(num):
            scores[a] = scores[a] - np.float32(visits[a]) / total_visits


@kernel
def sigma(s: SearchRecord, row: int) -> np.int32:
    """Write sigma of the completed Q to s.scores; returns the node's total of visits."""
    num, out, e = s.actions, s.scores, row * s.actions
    q, prior, visits = tail(s.children_q, e), tail(s.prior, e), tail(s.children_visits, e)
    weight, weighted = 0.0, 0.0
    total, most = np.int32(0), np.int32(0)
    for a in range(num):
        n = visits[a]
        if n > 0:
            p = prior[a]
            p64 = np.float64(p if p > _TINY else _TINY)
            weight += p64
            weighted += p64 * np.float64(q[a])
            total += n
            most = n if n > most else most
    weighted = weighted / (weight if weight > 0 else 1.0)
    raw = np.float64(s.raw_value[row])
    mixed = np.float32((raw + np.float64(total) * weighted) / np.float64(total + np.int32(1)))
    low, high = INFINITY, -INFINITY
    for a in range(num):
        x = q[a]
        x = x if visits[a] > 0 else mixed
        low = x if x < low else low
        high = x if x > high else high
    width = high - low
    width = width if width > EPSILON else EPSILON
    scale = np.float32((s.maxvisit_init + np.float64(most)) * s.value_scale)
    for a in range(num):
        x = q[a]
        x = x if visits[a] > 0 else mixed
        out[a] = scale * ((x - low) / width)
    return total
