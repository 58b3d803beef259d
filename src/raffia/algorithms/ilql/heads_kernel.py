"""Outputs of the heads for a few rows in one compiled call: float32, addresses in bytes."""

import math

from raffia.jit.dots import dots
from raffia.jit.kernel import kernel, load_i64
from raffia.jit.records import floats_at

OF_HEAD = 4  # addresses of a head: weight and bias of its two layers


@kernel
def heads_step(
    table: int,  # addresses: of the output weight, then of the heads V, Q1 and Q2
    num_q: int,  # 1 or 2
    rows: int,
    depth: int,  # numbers of a hidden state
    inner: int,  # of a head's first layer
    num_tokens: int,
    of_policy: int,  # hidden states [rows, depth] that logits are wanted of; 0: none are
    of_v: int,  # ... V
    of_q: int,  # ... the smaller Q
    scratch: int,  # room for rows * (inner + num_tokens) numbers
    logits: int,  # [rows, num_tokens]
    v: int,  # [rows]
    q: int,  # [rows, num_tokens]
) -> None:
    """Write the logits, V and the smaller Q of each token, as far as they are requested."""
    step, tokens_step = 4 * depth, 4 * num_tokens
    if of_policy:
        weight = load_i64(table)
        dots(
            rows, of_policy, step, depth, num_tokens, weight, 0, -math.inf, 0, 0, logits,
            tokens_step,
        )  # fmt: skip
    if of_v:
        head(rows, of_v, depth, inner, 1, table + 8, scratch, v)
    if of_q:
        head(rows, of_q, depth, inner, num_tokens, table + 8 * (1 + OF_HEAD), scratch, q)
    if of_q and num_q > 1:
        other = scratch + 4 * rows * inner
        head(rows, of_q, depth, inner, num_tokens, table + 8 * (1 + 2 * OF_HEAD), scratch, other)
        smaller, others = floats_at(q), floats_at(other)
        for k in range(rows * num_tokens):
            if not others[k] >= smaller[k]:  # so that what is not a number stays
                smaller[k] = others[k]


@kernel
def head(
    rows: int,
    states: int,  # [rows, depth]
    depth: int,
    inner: int,
    outputs: int,
    weights: int,  # address of the addresses of weight, bias, weight, bias
    scratch: int,  # room for rows * inner numbers
    out: int,  # [rows, outputs]
) -> None:
    """Two dense layers."""
    first, last = load_i64(weights), load_i64(weights + 16)
    dots(
        rows, states, 4 * depth, depth, inner, first, load_i64(weights + 8), 0.0, 0, 0, scratch,
        4 * inner,
    )  # fmt: skip
    dots(
        rows, scratch, 4 * inner, inner, outputs, last, load_i64(weights + 24), -math.inf, 0, 0,
        out, 4 * outputs,
    )  # fmt: skip
