"""A language model's compiled step, against the model; its activation, against torch's."""

import math
from functools import partial

import pytest
import torch
from torch.nn.functional import gelu as torch_gelu
from torch.testing import assert_close

from raffia.lm.decoding.one_token import CompiledLM, TokenReader, compiles
from raffia.lm.transformer import CausalLM
from raffia.lm.transformer_block import Block, gelu

pytest.importorskip("numba")

NEAR = {"rtol": 1e-4, "atol": 1e-5}


def make_model(**more):
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 24, "dropout": 0.0}
    return CausalLM(13, **sizes | more).eval()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 5])
@torch.no_grad()
def test_compiled_steps_equal_the_model_s(rows, bias):
    model = make_model(bias=bias, dim_feedfwd=96)
    for parameter in model.parameters():  # biases and gains that differ
        parameter += 0.05 * torch.randn_like(parameter)
    compiled, tokens = CompiledLM.of(model), torch.randint(13, (rows, 20))
    cache, expected_cache = model.new_cache(rows), model.new_cache(rows)
    for column in range(20):
        found = compiled.read(tokens[:, column], cache)
        assert_close(
            found, model(tokens[:, column : column + 1], cache=expected_cache)[:, 0], **NEAR
        )
    assert_close(cache.keys(1), expected_cache.keys(1), **NEAR)
    assert_close(cache.values(1), expected_cache.values(1), **NEAR)
    model.h[0].fc.weight.mul_(3.0)  # weights are read in place
    empty, other = model.new_cache(1), model.new_cache(1)
    token = torch.tensor([3])
    assert_close(compiled.read(token, empty), model(token[None], cache=other)[:, 0], **NEAR)


@torch.no_grad()
def test_padding_at_the_left_and_other_rows_change_nothing():
    model = make_model()
    compiled, tokens = CompiledLM.of(model), torch.randint(13, (3, 9))
    padding = torch.tensor([0, 4, 2])
    mask = torch.arange(5) >= padding[:, None]
    cache = model.new_cache(3)
    model(tokens[:, :5], mask, cache=cache)
    batched = [compiled.read(tokens[:, column], cache, padding) for column in range(5, 9)]
    for row, columns in enumerate(padding.tolist()):
        alone = model.new_cache(1)
        model(tokens[row : row + 1, columns:5], cache=alone)
        for column in range(5, 9):
            found = compiled.read(tokens[row : row + 1, column], alone)
            assert_close(batched[column - 5][row : row + 1], found, **NEAR)


@torch.no_grad()
def test_a_row_has_the_same_bits_whatever_the_other_rows():
    model = make_model()
    compiled, tokens = CompiledLM.of(model), torch.randint(13, (6, 8))
    cache, alone = model.new_cache(6), model.new_cache(1)
    for column in range(8):
        batched = compiled.read(tokens[:, column], cache)
        assert torch.equal(compiled.read(tokens[4:5, column], alone)[0], batched[4])


@torch.no_grad()
def test_bad_calls_are_refused_and_change_nothing():
    model = make_model()
    compiled, cache = CompiledLM.of(model), model.new_cache(2, capacity=1)
    with pytest.raises(ValueError, match="token 13 is not in the vocabulary, 0 to 12"):
        compiled.read(torch.tensor([1, 13]), cache)
    assert cache.length == 0
    with pytest.raises(ValueError, match="1 rows of tokens, but the cache has batch_size=2"):
        compiled.read(torch.tensor([1]), cache)
    compiled.read(torch.tensor([1, 2]), cache)
    with pytest.raises(ValueError, match="a cache of 1 columns that holds 1 has no room"):
        compiled.read(torch.tensor([1, 2]), cache)


@pytest.mark.parametrize(
    "model",
    [
        make_model(positions="rotary"),
        make_model(n_embd=24),
        make_model().double(),
        torch.nn.Linear(2, 2),
    ],
)
def test_other_models_are_left_to_torch(model):
    assert not compiles(model) and CompiledLM.of(model) is None
    model = make_model()  # with a layer of another kind
    fc = torch.nn.Sequential(model.h[1].fc)
    fc.out_features, fc.weight, fc.bias = 256, fc[0].weight, fc[0].bias
    model.h[1].fc = fc
    assert not compiles(model)


@pytest.mark.parametrize("n_embd", [8, 64])  # read by torch's operations; compiled
@pytest.mark.parametrize("kind", ["hook", "block"])
def test_changed_blocks_are_read_as_the_model_reads_them(kind, n_embd):
    """Hooks steer a model; a block of another class may compute anything."""
    torch.manual_seed(0)
    model = CausalLM(10, n_layer=2, n_head=2, n_embd=n_embd, block_size=6).eval()

    class Doubled(Block):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    assert compiles(model) == (n_embd == 64)
    if kind == "hook":
        model.h[0].register_forward_hook(lambda module, given, found: 2 * found)
    else:
        model.h[0].__class__ = Doubled
    assert not compiles(model)
    reader, cache, other = TokenReader(model), model.new_cache(2), model.new_cache(2)
    with torch.no_grad():
        for token in torch.tensor([[1, 2], [3, 4]]):
            want = model(token[:, None], cache=other)[:, 0]
            assert_close(reader.read(token, cache), want)


def test_gelu_and_its_derivative_are_torchs():
    x = (3 * torch.randn(64, 128)).requires_grad_()
    grad = torch.randn(64, 128)
    theirs = partial(torch_gelu, approximate="tanh")
    expected = theirs(x)
    assert_close(gelu(x), expected, rtol=1e-5, atol=1e-6)
    (found,), (expected_grad,) = (torch.autograd.grad(y, x, grad) for y in (gelu(x), expected))
    assert_close(found, expected_grad, rtol=1e-5, atol=1e-5)

    def second(function):
        (first,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    assert_close(second(gelu), second(theirs))
    extreme = torch.tensor([math.nan, math.inf, 1e20, -1e4, -100.0, 0.0, 100.0, 1e4]).repeat(512)
    assert_close(gelu(extreme), theirs(extreme), equal_nan=True)
    # Also in transforms, and for other dtypes.
    x = torch.randn(4, 64, 32)
    assert_close(torch.vmap(gelu)(x), gelu(x), rtol=1e-5, atol=1e-6)
    assert gelu(x.double()).dtype == torch.float64
    assert_close(gelu(x.transpose(0, 1)), gelu(x).transpose(0, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("compiled", "options"),
    [
        (True, {}),
        (False, {"n_embd": 8}),  # by `read_token`
        (False, {"positions": "rotary"}),  # by the model itself
    ],
)
def test_a_reader_s_outputs_equal_the_model_s(compiled, options):
    model = make_model(**options)
    reader, cache, tokens = TokenReader(model), model.new_cache(3), torch.randint(13, (3, 6))
    assert reader.compiles(3) is compiled
    with torch.no_grad():
        steps = [reader.read(token, cache) for token in tokens.unbind(1)]
        assert torch.allclose(torch.stack(steps, 1), model(tokens), atol=1e-5)
