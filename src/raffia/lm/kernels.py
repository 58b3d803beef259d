"""The compiled inner steps of language models: one token more for each row, and GELU.

    gelu(x) = x s(u),  u = 2 sqrt(2 / pi) (x + 0.044715 x^3),  s(u) = 1 / (1 + exp(-u))
    gelu'(x) = s(u) + x s(u) (1 - s(u)) u'(x)

Source: Hendrycks & Gimpel (2016), arXiv 1606.08415, section 2.
"""

import math

from raffia.jit.dots import dots
from raffia.jit.kernel import kernel, load_f32, load_i64, store_f32
from raffia.jit.layers import gelu
from raffia.jit.vectors import (
    WIDTH,
    exp,
    gated,
    greatest,
    load_floats,
    multiply_add,
    spread,
    store_floats,
    total,
)

VECTOR_BYTES = 4 * WIDTH
OF_MODEL = 4  # addresses at the table's beginning: embeddings, positions, the last norm's two
OF_LAYER = 12  # ... of each layer: norm, qkv, proj, norm, fc, out; weight and bias, 0 for none


@kernel
def token_step(
    table: int,  # address of the addresses of the parameters
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    size: int,  # d, a multiple of WIDTH, as is d / num_heads
    inner: int,  # of the dense layers, a multiple of WIDTH
    eps: float,
    rows: int,
    tokens: int,  # int64 [rows]
    padding: int,  # int64 [rows]: columns at the left that are not tokens; 0: no row has any
    slot: int,  # the column of these tokens
    keys: int,  # rows [heads, columns, d / num_heads] of each layer
    values: int,  # likewise
    layer_step: int,
    row_step: int,
    head_step: int,
    scratch: int,  # room for rows * (5 * d + inner) + slot + 1 + WIDTH numbers
    out: int,  # [rows, d]
) -> int:
    """Hidden states after the last norm; the tokens' keys and values are put at `slot`.

    Returns the first row whose token is not in the vocabulary, and does nothing then; or -1.
    """
    for row in range(rows):
        if not 0 <= load_i64(tokens + 8 * row) < vocab_size:
            return row
    step, inner_step = 4 * size, 4 * inner
    part = 4 * (size // num_heads)
    x = scratch
    y = x + rows * step
    qkv = y + rows * step
    wide = qkv + rows * 3 * step
    scores = wide + rows * inner_step
    for row in range(rows):
        first = load_i64(padding + 8 * row) if padding else 0
        token = load_i64(table) + step * load_i64(tokens + 8 * row)
        position = load_i64(table + 8) + step * (slot - first)
        for k in range(0, step, VECTOR_BYTES):
            store_floats(x + row * step + k, load_floats(token + k) + load_floats(position + k))
    for layer in range(num_layers):
        of = table + 8 * (OF_MODEL + layer * OF_LAYER)
        layer_keys, layer_values = keys + layer * layer_step, values + layer * layer_step
        normed(rows, x, size, load_i64(of), load_i64(of + 8), eps, y)
        linear(rows, y, size, 3 * size, load_i64(of + 16), load_i64(of + 24), 0, qkv)
        for row in range(rows):
            first = load_i64(padding + 8 * row) if padding else 0
            for head in range(num_heads):
                query = qkv + row * 3 * step + head * part
                start = row * row_step + head * head_step
                copied(query + step, part, layer_keys + start + slot * part)
                copied(query + 2 * step, part, layer_values + start + slot * part)
                start += first * part
                gathered(
                    query, layer_keys + start, layer_values + start, slot + 1 - first, part,
                    scores, y + row * step + head * part,
                )  # fmt: skip
        linear(rows, y, size, size, load_i64(of + 32), load_i64(of + 40), x, x)
        normed(rows, x, size, load_i64(of + 48), load_i64(of + 56), eps, y)
        linear(rows, y, size, inner, load_i64(of + 64), load_i64(of + 72), 0, wide)
        gelu(rows, wide, inner_step, inner)
        linear(rows, wide, inner, size, load_i64(of + 80), load_i64(of + 88), x, x)
    normed(rows, x, size, load_i64(table + 16), load_i64(table + 24), eps, out)
    return -1


@kernel
def linear(
    rows: int,
    inputs: int,  # [rows, depth]
    depth: int,
    outputs: int,
    weight: int,
    bias: int,
    added: int,  # [rows, outputs]; 0: nothing is added
    out: int,  # [rows, outputs]
) -> None:
    """inputs @ weight.T + bias + added."""
    step = 4 * outputs
    dots(
        rows, inputs, 4 * depth, depth, outputs, weight, bias, -math.inf, added, step, out, step
    )  # fmt: skip


@kernel
def normed(
    rows: int,
    values: int,  # [rows, size]
    size: int,
    gain: int,
    bias: int,  # 0: none
    eps: float,
    out: int,  # [rows, size]
) -> None:
    """Layer normalisation."""
    step = 4 * size
    for row in range(rows):
        at, to = values + row * step, out + row * step
        sums = spread(0.0)
        for k in range(0, step, VECTOR_BYTES):
            sums = sums + load_floats(at + k)
        mean = spread(total(sums) / size)
        squares = spread(0.0)
        for k in range(0, step, VECTOR_BYTES):
            deviation = load_floats(at + k) - mean
            squares = multiply_add(deviation, deviation, squares)
        scale = spread(1.0 / math.sqrt(total(squares) / size + eps))
        for k in range(0, step, VECTOR_BYTES):
            result = (load_floats(at + k) - mean) * scale * load_floats(gain + k)
            if bias:
                result = result + load_floats(bias + k)
            store_floats(to + k, result)


@kernel
def gathered(
    query: int,
    keys: int,  # [columns, part]
    values: int,  # [columns, part]
    columns: int,
    part: int,  # bytes of a head's numbers
    scores: int,  # room for columns and WIDTH more
    out: int,
) -> None:
    """Attention of one head of one row."""
    dots(1, query, 0, part // 4, columns, keys, 0, -math.inf, 0, 0, scores, 0)
    padded = -(-columns // WIDTH) * VECTOR_BYTES
    for k in range(4 * columns, padded, 4):
        store_f32(scores + k, -math.inf)
    largest = load_floats(scores)
    top = greatest(largest)
    for k in range(VECTOR_BYTES, padded, VECTOR_BYTES):
        top = max(top, greatest(load_floats(scores + k)))
    scale, shift = spread(1.0 / math.sqrt(part // 4)), spread(top)
    sums = spread(0.0)
    for k in range(0, padded, VECTOR_BYTES):
        weight = exp((load_floats(scores + k) - shift) * scale)  # e**-87 for what is not a column
        sums = sums + weight
        store_floats(scores + k, weight)
    scale = spread(1.0 / total(sums))
    for k in range(0, part, VECTOR_BYTES):
        even, odd = spread(0.0), spread(0.0)
        for column in range(0, columns - 1, 2):
            weight, at = scores + 4 * column, values + column * part + k
            even = multiply_add(spread(load_f32(weight)), load_floats(at), even)
            odd = multiply_add(spread(load_f32(weight + 4)), load_floats(at + part), odd)
        if columns % 2:
            weight, at = scores + 4 * (columns - 1), values + (columns - 1) * part + k
            even = multiply_add(spread(load_f32(weight)), load_floats(at), even)
        store_floats(out + k, (even + odd) * scale)


@kernel
def copied(source: int, num_bytes: int, target: int) -> None:
    """Copy whole vectors."""
    for k in range(0, num_bytes, VECTOR_BYTES):
        store_floats(target + k, load_floats(source + k))


LINEAR = 2.0 * math.sqrt(2.0 / math.pi)
CUBIC = LINEAR * 0.044715


@kernel
def gelu_forward(num: int, x: int, out: int) -> None:
    """num: a multiple of WIDTH; x, out: addresses."""
    linear, cubic = spread(LINEAR), spread(CUBIC)
    for k in range(0, 4 * num, VECTOR_BYTES):
        value = load_floats(x + k)
        store_floats(out + k, gated(value * multiply_add(value * value, cubic, linear), value))


@kernel
def gelu_backward(num: int, x: int, grad: int, out: int) -> None:
    """Writes grad f'(x); out may be where grad is."""
    linear, cubic, one = spread(LINEAR), spread(CUBIC), spread(1.0)
    three = spread(3.0 * CUBIC)
    for k in range(0, 4 * num, VECTOR_BYTES):
        value = load_floats(x + k)
        square = value * value
        gate = gated(value * multiply_add(square, cubic, linear), one)
        slope = value * multiply_add(square, three, linear)  # x u'(x)
        rest = multiply_add(gate * (one - gate), slope, gate)
        store_floats(out + k, load_floats(grad + k) * rest)
