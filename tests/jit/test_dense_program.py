import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from raffia.functional.transforms import Support, categorical_to_scalar, signed_parabolic
from raffia.jit.dense_program import BLOCK, DenseProgram
from raffia.jit.tiles import PANEL

NAN = math.nan


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    return normal


def run(program, parameters, arrays, rows):
    program.load(parameters)
    program.bind(arrays)(rows)


def one_layer(x, weight, bias, **options):
    program, out = DenseProgram(), torch.empty(len(x), len(weight))
    inputs = program.read("x", x.shape[1])
    program.write(program.dense(inputs, len(weight), **options), "out")
    run(program, [weight, bias], {"x": x, "out": out}, len(x))
    return out


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, BLOCK, BLOCK + 1, 2 * BLOCK + 5])
@pytest.mark.parametrize(("depth", "columns"), [(7, 2), (1, PANEL), (130, 5 * PANEL - 3)])
def test_a_layer_is_linear(draw, rows, depth, columns):
    x, weight, bias = draw(rows, depth), draw(columns, depth), draw(columns)
    expected = x.double() @ weight.double().t() + bias
    torch.testing.assert_close(one_layer(x, weight, bias).double(), expected, rtol=1e-5, atol=1e-5)
    relu = one_layer(x, weight, bias, relu=True).double()
    torch.testing.assert_close(relu, expected.clamp_min(0), rtol=1e-5, atol=1e-5)


def test_sums_onto_looked_up_rows_and_an_addition(draw):
    x, weight, table = draw(5, 3), draw(20, 3), draw(20, 4)
    added, action, out = draw(5, 20), torch.tensor([3, 0, 1, 3, 2]), torch.empty(5, 20)
    program = DenseProgram()
    inputs, more = program.read("x", 3), program.read("added", 20)
    start = program.look_up(4, 20, index="action")
    program.write(program.dense(inputs, 20, relu=True, onto=start, added=more), "out")
    run(program, [table, weight], {"x": x, "added": added, "action": action, "out": out}, 5)
    expected = (x @ weight.t() + table.t()[action]).relu() + added
    torch.testing.assert_close(out, expected)


def test_rows_are_read_and_written_at_the_given_indices(draw):
    x, out = draw(6, 5), torch.full((7, 5), 9.0)
    program = DenseProgram()
    program.write(program.read("x", 5, index="from"), "out", index="to", zero="reset")
    arrays = {
        "x": x,
        "out": out,
        "from": torch.tensor([5, 0, 5]),
        "to": torch.tensor([2, 6, 0]),
        "reset": torch.tensor([False, True, False]),
    }
    run(program, [], arrays, 2)
    assert out[2].equal(x[5]) and out[6].eq(0).all()
    assert out[[0, 1, 3, 4, 5]].eq(9).all()  # the third row was not requested


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("width", [3, PANEL, PANEL + 5])
def test_layer_norm(draw, width, relu):
    x, added, out = draw(5, width) * 3 + 100, draw(5, width), torch.empty(5, width)
    norm = nn.LayerNorm(width, eps=1e-3)
    weight, bias = draw(width), draw(width)
    program = DenseProgram()
    more, values = program.read("added", width), program.read("x", width)
    program.norm(values, 1e-3, relu=relu, added=more)
    program.write(values, "out")
    run(program, [weight, bias], {"x": x, "out": out, "added": added}, 5)
    norm = nn.functional.layer_norm(x.double(), [width], weight.double(), bias.double(), 1e-3)
    expected = (norm.relu() if relu else norm) + added
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


def test_gelu(draw):
    x, added, out, sums = 3 * draw(5, 20), draw(5, 20), torch.empty(5, 20), torch.empty(5, 20)
    program = DenseProgram()
    values, others = program.read("x", 20), program.read("x", 20)
    program.gelu(values)
    program.write(values, "out")
    program.gelu(others, added=program.read("added", 20))
    program.write(others, "sums")
    run(program, [], {"x": x, "added": added, "out": out, "sums": sums}, 5)
    expected = nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(sums, expected + added)


@pytest.mark.parametrize("size", [1, 3, PANEL])
def test_normal_distributions(draw, size):
    x = 3 * draw(7, 2 * size)
    x[0, size], x[1, size], x[2, -1] = -90.0, 90.0, NAN
    mean, exponent = x.chunk(2, 1)
    of = {None: exponent.clamp(-20, 2).exp(), 0.3: torch.full_like(exponent, 0.3)}
    for fixed, deviation in of.items():
        program, out = DenseProgram(), torch.empty_like(x)
        values = program.read("x", 2 * size)
        program.gaussian(values, -20.0, 2.0, fixed=fixed)
        program.write(values, "out")
        run(program, [], {"x": x, "out": out}, 7)
        expected = torch.cat([mean, deviation], 1)
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize(("size", "hidden"), [(3, 5), (20, 8), (16, 24), (1, 40)])
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_lstm(draw, size, hidden, rows):
    x, h, c = draw(rows, size), draw(rows, hidden), draw(rows, hidden)
    lstm = nn.LSTM(size, hidden)
    weights = [lstm.weight_ih_l0, lstm.weight_hh_l0, lstm.bias_ih_l0 + lstm.bias_hh_l0]
    with torch.no_grad():
        _, (expected_h, expected_c) = lstm(x[None], (h[None], c[None]))
    program = DenseProgram()
    features, old, both = program.neighbours(size, hidden)
    program.read("x", size, out=features)
    program.read("h", hidden, out=old)
    memory = program.read("c", hidden)
    program.write(program.lstm(features, old, both, memory), "h")
    program.write(memory, "c")
    run(program, weights, {"x": x, "h": h, "c": c}, rows)
    torch.testing.assert_close(h, expected_h[0])
    torch.testing.assert_close(c, expected_c[0])


def decoded(logits, support):
    program, width = DenseProgram(), logits.shape[1]
    out, behind = torch.empty(len(logits)), -math.inf if support else 0.0
    inputs = program.read("x", width)
    program.decode(program.dense(inputs, width, behind=behind), "out")
    values = [support.values()] if support else []
    arrays = {"x": logits, "out": out}
    run(program, [torch.eye(width), torch.zeros(width), *values], arrays, len(out))
    return out


def test_nan_and_infinity_are_decoded(draw):
    assert decoded(torch.zeros(3, 601), Support(-300, 301)).tolist() == [0, 0, 0]
    number = torch.tensor([[-3.0], [0.0], [12.5]])  # a single number is decoded as itself
    torch.testing.assert_close(decoded(number, None), signed_parabolic(number[:, 0]))
    logits, x = draw(3, 11), draw(3, 3)
    logits[1, 4] = x[1, 2] = NAN
    assert decoded(logits, Support(-5, 6)).isnan().tolist() == [False, True, False]
    weight, bias = draw(4, 4)[:, :3], draw(8)[::2]  # views
    expected = nn.functional.linear(x, weight, bias).relu()
    torch.testing.assert_close(one_layer(x, weight, bias, relu=True), expected, equal_nan=True)


@pytest.mark.parametrize("support", [Support(-300, 301), Support(0, 5), Support(-2, 3, 0.5)])
def test_logits_stand_for_values(draw, support):
    logits = 4 * draw(9, support.size)
    expected = categorical_to_scalar(logits.double(), support)
    torch.testing.assert_close(decoded(logits, support).double(), expected, rtol=1e-4, atol=1e-5)
    assert decoded(torch.full((1, support.size), -1e30), support).isfinite().all()


def full_program(draw):
    """A program with every kind of layer, its parameters, and its inputs."""
    program = DenseProgram()
    x = program.read("x", 19)
    hidden = program.dense(x, 40, relu=True)
    program.norm(hidden, 1e-5)
    program.gelu(hidden)
    features, h, both = program.neighbours(21, 12)
    program.dense(hidden, 21, out=features)
    program.read("h", 12, out=h)
    c = program.read("h", 12)
    out = program.lstm(features, h, both, c)
    program.decode(program.dense(out, 33, behind=-math.inf), "value")
    program.write(program.dense(hidden, 5), "out")
    shapes = [(40, 19), (40,), (40,), (40,), (21, 40), (21,), (48, 21), (48, 12), (48,), (33, 12)]
    program.load([draw(*shape) for shape in [*shapes, (33,), (33,), (5, 40), (5,)]])
    return program


def answers(program, x, h):
    arrays = {"x": x, "h": h, "value": torch.empty(len(x)), "out": torch.empty(len(x), 5)}
    program.bind(arrays)(len(x))
    return torch.cat([arrays["value"][:, None], arrays["out"]], 1)


def test_a_row_is_the_same_to_the_bit_in_every_batch(draw):
    program = full_program(draw)
    x, h = draw(70, 19), draw(70, 12)
    alone = torch.cat([answers(program, x[i : i + 1], h[i : i + 1]) for i in range(70)])
    for rows in range(1, 71):
        assert answers(program, x[:rows], h[:rows]).equal(alone[:rows])
    order = torch.arange(6).repeat(BLOCK)  # in several blocks, at all positions in a tile
    assert answers(program, x[order], h[order]).equal(alone[order])


def test_threads_do_not_interfere(draw):
    program = full_program(draw)
    x, h = draw(8, 70, 19), draw(8, 70, 12)
    expected = [answers(program, *inputs) for inputs in zip(x, h, strict=True)]

    def work(number):
        return [answers(program, x[number], h[number]) for _ in range(50)][-1]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(8)))
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))


def test_a_bound_program_uses_new_parameters(draw):
    program, x, out = DenseProgram(), draw(2, 3), torch.empty(2, 4)
    program.write(program.dense(program.read("x", 3), 4), "out")
    program.load([torch.zeros(4, 3), torch.zeros(4)])
    step = program.bind({"x": x, "out": out})
    step(2)
    assert out.eq(0).all()
    weight, bias = draw(4, 3), draw(4)
    program.load([weight, bias])
    step(2)
    torch.testing.assert_close(out, x @ weight.t() + bias)


def test_buffers_are_reused(draw):
    program, x, out = DenseProgram(), draw(2, 3), torch.empty(2, 2)
    first = program.dense(program.read("x", 3), 40)
    second = program.dense(first, 33)
    program.reuse(first)
    third = program.dense(second, 35)
    assert third.layout == first.layout != second.layout
    program.write(program.dense(third, 2), "out")
    sizes = [(3, 40), (40, 33), (33, 35), (35, 2)]
    layers = [(draw(b, a), draw(b)) for a, b in sizes]
    run(program, [tensor for layer in layers for tensor in layer], {"x": x, "out": out}, 2)
    for weight, bias in layers:
        x = x @ weight.t() + bias
    torch.testing.assert_close(out, x, rtol=1e-4, atol=1e-4)


def test_mismatched_arguments_are_refused():
    program = DenseProgram()
    program.write(program.dense(program.read("x", 3), 4), "out")
    with pytest.raises(ValueError, match=r"float32 of shape \[4, 3\] .*, got .* shape \[3, 4\]"):
        program.load([torch.zeros(3, 4), torch.zeros(4)])
    with pytest.raises(ValueError, match="takes 2 parameters, got 1"):
        program.load([torch.zeros(4, 3)])
    program.load([torch.zeros(4, 3), torch.zeros(4)])
    for x in (torch.zeros(2, 3).double(), torch.zeros(3, 2).t(), torch.zeros(2, 4)):
        with pytest.raises(ValueError, match=r"'x' must be .*float32.* \[rows, 3\] .*, got"):
            program.bind({"x": x, "out": torch.zeros(2, 4)})
