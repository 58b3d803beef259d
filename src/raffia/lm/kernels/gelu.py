"""GELU, as approximated by tanh, and its derivative, over float32 numbers side by side.

    f(x) = x s(u),  u = 2 sqrt(2 / pi) (x + 0.044715 x^3),  s(u) = 1 / (1 + exp(-u))
    f'(x) = s(u) + x s(u) (1 - s(u)) u'(x)

Source: Hendrycks & Gimpel (2016), arXiv 1606.08415, section 2.
"""

import math

from raffia.jit.kernel import kernel
from raffia.jit.vectors import WIDTH, gated, load_floats, multiply_add, spread, store_floats

VECTOR_BYTES = 4 * WIDTH
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
