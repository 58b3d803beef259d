"""A simulation over sampled actions, compiled: the model is given the chosen one and answers with
the parameters of a normal policy, from which the new nodes' actions are drawn.

What `raffia.search.sampled` does in tensor operations, from the same seeds; up to rounding.
"""

import math
from typing import Any

import numpy as np

from raffia.jit.kernel import call_step, kernel, step
from raffia.jit.records import F32s, I64s, Record, exists, fields_at
from raffia.search.kernels.noise import child_seed, uniform
from raffia.search.kernels.numbers import F0, F1, unfit

_HALF = np.float32(0.5)

# AS 241's polynomials for `normal_quantile`: near the median, farther from it, and beyond.
_MIDDLE_OVER = (
    *(2509.0809287301226727, 33430.575583588128105, 67265.770927008700853),
    *(45921.953931549871457, 13731.693765509461125, 1971.5909503065514427),
    *(133.14166789178437745, 3.387132872796366608),
)
_MIDDLE_UNDER = (
    *(5226.495278852854561, 28729.085735721942674, 39307.89580009271061),
    *(21213.794301586595867, 5394.1960214247511077, 687.1870074920579083),
    *(42.313330701600911252, 1.0),
)
_SIDE_OVER = (
    *(7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177),
    *(1.27045825245236838258, 3.64784832476320460504, 5.7694972214606914055),
    *(4.6303378461565452959, 1.42343711074968357734),
)
_SIDE_UNDER = (
    *(1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966),
    *(0.14810397642748007459, 0.68976733498510000455, 1.6763848301838038494),
    *(2.05319162663775882187, 1.0),
)
_TAIL_OVER = (
    *(2.01033439929228813265e-7, 2.71155556874348757815e-5, 0.0012426609473880784386),
    *(0.026532189526576123093, 0.29656057182850489123, 1.7848265399172913358),
    *(5.4637849111641143699, 6.6579046435011037772),
)
_TAIL_UNDER = (
    *(2.04426310338993978564e-15, 1.4215117583164458887e-7, 1.8463183175100546818e-5),
    *(7.868691311456132591e-4, 0.0148753612908506148525, 0.13692988092273580531),
    *(0.59983220655588793769, 1.0),
)


class SamplingRecord(Record):
    """The arrays of a search over sampled actions: R rows of all nodes, B roots, K actions of D."""

    seed: I64s  # [R]
    actions: F32s  # [R, K, D]
    parent_row: I64s  # [B]
    node_row: I64s  # [B]
    choice: I64s  # [B]: which of the K the search took
    chosen: F32s  # [B, D], which the model reads
    parameters: F32s  # [B, P], which the model writes: means, then deviations where P = 2 D
    prior_logits: F32s  # [B, K]
    std: F32s  # [D]; not given: the deviations are parameters
    low: F32s  # [D]; not given: actions have no bounds
    width: F32s  # [D], between the bounds
    num_samples: int  # K
    size: int  # D
    model: int  # address of a step, see raffia.jit.kernel
    context: int  # what it is called with


record_at = fields_at(SamplingRecord)


@kernel
def run(address: int, num_rows: int) -> None:
    """Choose, ask the model, and draw, for the first `num_rows` rows of a simulation."""
    s = record_at(address)
    for i in range(num_rows):
        choose(s, i)
    call_step(s.model, s.context, num_rows)
    for i in range(num_rows):
        draw(s, i)


@kernel
def choose(s: Any, i: int) -> None:
    """Copy the chosen action for the model, and write the seed of the node that it leads to."""
    parent, size = s.parent_row[i], s.size
    first = parent * s.num_samples * size
    at = first + s.choice[i] * size
    for d in range(size):
        s.chosen[i * size + d] = s.actions[at + d]
    # Equal actions have the same child: that of the first of them.
    for k in range(s.num_samples):
        same = 0
        for d in range(size):
            same += s.actions[first + k * size + d] == s.actions[at + d]
        if same == size:
            s.seed[s.node_row[i]] = np.int64(child_seed(np.uint64(s.seed[parent]), k))
            break


@kernel
def draw(s: Any, i: int) -> None:
    """Draw the new node's actions, all of the same prior; NaN where the policy does not fit."""
    size, fixed = s.size, exists(s.std)
    means = i * size if fixed else 2 * i * size
    prior = F0
    for d in range(size):
        std = s.std[d] if fixed else s.parameters[means + size + d]
        if unfit(s.parameters[means + d]) or unfit(std) or not std > F0:
            prior = np.float32(np.nan)
    for k in range(s.num_samples):
        s.prior_logits[i * s.num_samples + k] = prior
    row = s.node_row[i]
    seed, at = np.uint64(s.seed[row]), row * s.num_samples * size
    for number in range(s.num_samples * size):
        d = number % size
        std = s.std[d] if fixed else s.parameters[means + size + d]
        noise = np.float32(normal_quantile(uniform(seed, number)))
        action = s.parameters[means + d] + std * noise
        if exists(s.low):
            action = s.low[d] + s.width[d] * (np.float32(math.tanh(action)) + F1) * _HALF
        s.actions[at + number] = action


@kernel
def normal_quantile(p: float) -> float:
    """The number below which a normal variable lies with probability p, relative error 1e-15.

    Source: Wichura (1988), "Algorithm AS 241: The percentage points of the normal distribution",
    Applied Statistics 37(3), PPND16.
    """
    q = p - 0.5
    if abs(q) <= 0.425:
        return q * ratio(0.180625 - q * q, _MIDDLE_OVER, _MIDDLE_UNDER)
    r = math.sqrt(-math.log(p if q < 0.0 else 1.0 - p))
    if r <= 5.0:
        return math.copysign(ratio(r - 1.6, _SIDE_OVER, _SIDE_UNDER), q)
    return math.copysign(ratio(r - 5.0, _TAIL_OVER, _TAIL_UNDER), q)


@kernel
def ratio(x: float, over: Any, under: Any) -> float:
    """The quotient of two polynomials, whose coefficients begin with that of the highest power."""
    above = below = 0.0
    for k in range(len(over)):
        above = above * x + over[k]
        below = below * x + under[k]
    return above / below


def step_address() -> int:
    """The address of `run` as a step: see raffia.jit.kernel."""
    return step(_run_as_step)


def _run_as_step(address: int, rows: int) -> None:
    run(address, rows)
