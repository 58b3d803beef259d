"""The causal language model: its numbers, and that no way of calling it changes them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.func import functional_call, stack_module_state
from torch.testing import assert_close

from raffia.lm.transformer import CausalLM

HERE = Path(__file__).parent
ORACLE = json.loads((HERE / "trunk_logits.json").read_text())
WEIGHTS = HERE.parent / "algorithms" / "ilql" / "ilql_small.safetensors"
EXACT = {"rtol": 1e-9, "atol": 1e-9}
BOTH = pytest.mark.parametrize("positions", ["learned", "rotary"])


def make(positions="learned", dtype=torch.float64, **options):
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 12, "block_size": 16, "dropout": 0.0}
    model = CausalLM(11, **(shape | options), positions=positions, dtype=dtype)
    for parameter in model.parameters():  # biases and norms say something, too
        torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


def some_tokens(rows=3, length=7, seed=0):
    return torch.randint(11, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(rows, left=False, width=None):
    """Rows of unlike length as one tensor, and its mask."""
    width = max(map(len, rows)) if width is None else width
    tokens, mask = torch.zeros(2, len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        place = slice(width - len(row), None) if left else slice(0, len(row))
        tokens[i, place], mask[i, place] = row, 1
    return tokens, mask.bool()


def of_lengths(lengths, width):
    """The mask of rows of so many tokens, padded at the right."""
    return torch.arange(width) < lengths[:, None]


ROWS = [some_tokens(1, n, seed=n)[0] for n in (5, 2, 7)]


# The numbers


@pytest.fixture(scope="module")
def known():
    """The policy of the numeric cases of ILQL: GPT-2's formulas, restated apart in float64."""
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "dim_feedfwd": 40, "block_size": 64}
    model = CausalLM(35, **shape, dtype=torch.float64).eval()
    stored = load_file(WEIGHTS)
    state = {n.removeprefix("policy."): w for n, w in stored.items() if n.startswith("policy.")}
    model.load_state_dict(state)
    return model


def test_logits_are_gpt2s(known):
    logits = known.logits(known(torch.tensor([ORACLE["tokens"]])))
    expected = torch.tensor(ORACLE["logits"], dtype=torch.float64)
    assert_close(logits[0, ORACLE["positions"]], expected, **EXACT)


def test_logits_of_any_shape_give_their_weight_a_gradient_of_its_own():
    """Not a view of another tensor: to such the look-ups' could not be added in place."""
    model = make()
    weight = model.wte.weight
    for shape in ((12,), (5, 12), (2, 3, 12), (0, 12)):
        hidden = torch.randn(shape, dtype=torch.float64)
        said = model.logits(hidden)
        assert_close(said, torch.nn.functional.linear(hidden, weight), **EXACT)
        assert said.is_contiguous()
        slope = torch.randn_like(said)
        (gradient,) = torch.autograd.grad(said, weight, slope)
        rows = slope.reshape(-1, 11), hidden.reshape(-1, 12)
        assert_close(gradient, rows[0].t() @ rows[1], **EXACT)
        assert gradient._base is None and gradient.is_contiguous()


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_next_tokens_of_a_batch_are_gpt2s(known, left, cached):
    rows = [torch.tensor(case["tokens"]) for case in ORACLE["prompts"]]
    tokens, mask = padded(rows, left)
    cache = known.new_cache(len(rows)) if cached else None
    with torch.no_grad():
        hidden = known(tokens, mask, cache=cache)
    last = torch.arange(tokens.shape[1]).where(mask, 0).amax(1)
    logits = known.logits(hidden[torch.arange(len(rows)), last])
    logits[:, ORACLE["pad_token_id"]] = -torch.inf
    expected = [
        [-torch.inf if number is None else number for number in case["next_log_probs"]]
        for case in ORACLE["prompts"]
    ]
    assert_close(logits.log_softmax(-1), torch.tensor(expected, dtype=torch.float64), **EXACT)


def test_greedy_continuation_with_a_cache_is_the_known_one(known):
    for case in ORACLE["prompts"]:
        cache, tokens, found = known.new_cache(1), torch.tensor([case["tokens"]]), []
        for _ in case["greedy"]:
            with torch.no_grad():
                logits = known.logits(known(tokens, cache=cache)[:, -1])
            logits[:, ORACLE["pad_token_id"]] = -torch.inf
            tokens = logits.argmax(-1, keepdim=True)
            found.append(int(tokens))
        assert found == case["greedy"]


@BOTH
def test_no_token_sees_a_later_one(positions):
    model, tokens = make(positions), some_tokens()
    other = tokens.clone()
    other[:, 4:] = (other[:, 4:] + 1) % 11
    before, after = model(tokens), model(other)
    assert_close(before[:, :4], after[:, :4], **EXACT)
    assert (before[:, 4:] - after[:, 4:]).abs().amax(-1).min() > 1e-3


@BOTH
def test_order_matters(positions):
    model, tokens = make(positions), torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]])
    first, second = model(tokens)[:, -1]
    assert (first - second).abs().max() > 1e-3


# Padding and masks


@BOTH
@pytest.mark.parametrize("left", [False, True])
def test_a_batch_is_its_rows_one_by_one(positions, left):
    model = make(positions)
    tokens, mask = padded(ROWS, left, width=9)
    hidden = model(tokens, mask)
    for row, its_hidden, its_mask in zip(ROWS, hidden, mask, strict=True):
        assert_close(its_hidden[its_mask], model(row[None])[0], **EXACT)


@BOTH
def test_masked_tokens_are_not_attended_to(positions):
    """Peers' defect: the mask changed nothing."""
    model, tokens = make(positions), some_tokens()
    mask = torch.ones_like(tokens)
    mask[:, 2] = 0
    hidden = model(tokens, mask)
    assert (hidden[:, 3:] - model(tokens)[:, 3:]).abs().amax(-1).min() > 1e-3
    # ... and are as if they had never been there, positions included.
    kept = [0, 1, 3, 4, 5, 6]
    assert_close(hidden[:, kept], model(tokens[:, kept]), **EXACT)


@BOTH
def test_what_stands_at_masked_places_is_all_the_same(positions):
    model = make(positions)
    for left in (False, True):
        tokens, mask = padded(ROWS, left)
        assert_close(model(tokens.where(mask, 9), mask)[mask], model(tokens, mask)[mask], **EXACT)


def test_masks_of_any_type_mean_the_same():
    model, (tokens, mask) = make(), padded(ROWS)
    for kind in (torch.int64, torch.float32, torch.uint8):
        assert_close(model(tokens, mask.to(kind)), model(tokens, mask), **EXACT)


@pytest.mark.parametrize("left", [False, True])
def test_a_row_without_any_token_harms_nobody(left):
    model = make()
    tokens, mask = padded([ROWS[0], ROWS[0][:0], ROWS[2]], left)
    hidden = model(tokens, mask)
    assert hidden.isfinite().all()
    assert_close(hidden[0][mask[0]], model(ROWS[0][None])[0], **EXACT)
    nothing = torch.zeros_like(mask)
    assert model(tokens, nothing).isfinite().all()


# Without padding


@BOTH
def test_padding_at_the_right_is_left_out_with_its_gradients(positions):
    model, (tokens, mask) = make(positions), padded(ROWS, width=9)
    packed = model(tokens, mask)
    # Nothing attends to padding at the right: with no mask at all, real tokens come out the same.
    plain = model(tokens)
    assert (packed[~mask] == 0).all() and (plain[~mask] != 0).any()
    assert_close(packed[mask], plain[mask], **EXACT)
    parameters = list(model.parameters())
    weight = torch.randn(plain.shape, generator=torch.Generator().manual_seed(1)).double()
    ours, theirs = (
        torch.autograd.grad((hidden * weight)[mask].sum(), parameters) for hidden in (packed, plain)
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other, **EXACT)


@BOTH
def test_what_is_not_wanted_is_left_out_of_the_last_layer(positions):
    model, (tokens, mask) = make(positions), padded(ROWS, width=9)
    wanted = torch.zeros_like(mask)
    wanted[0, [0, 3]] = wanted[2, 5] = wanted[1, 8] = True  # the last is padding
    chosen, full = wanted & mask, tokens[2:]
    whole, some = model(tokens, mask), model(tokens, mask, wanted=wanted)
    assert_close(some[chosen], whole[chosen], **EXACT)
    assert (some[~chosen] == 0).all()
    at = torch.arange(9)[None] == 5
    assert_close(model(full, wanted=at)[at], model(full)[at], **EXACT)
    parameters = list(model.parameters())
    gradients = [
        torch.autograd.grad(hidden[chosen].square().sum(), parameters) for hidden in (some, whole)
    ]
    for mine, other in zip(*gradients, strict=True):
        assert_close(mine, other, **EXACT)


# The cache


@BOTH
@pytest.mark.parametrize("pieces", [[1] * 7, [3, 1, 3], [6, 1], [7]])
def test_cached_is_uncached(positions, pieces):
    """Peers' defect: a step attended to the first key only."""
    model, tokens = make(positions), some_tokens()
    cache = model.new_cache(3)
    with torch.no_grad():
        found = torch.cat([model(part, cache=cache) for part in tokens.split(pieces, 1)], 1)
    assert_close(found, model(tokens), **EXACT)
    assert cache.length == 7


@BOTH
@pytest.mark.parametrize("left", [False, True])
def test_cached_steps_after_unlike_prompts(positions, left):
    model, (tokens, mask) = make(positions), padded(ROWS, left)
    more, cache = some_tokens(3, 4, seed=5), model.new_cache(3)
    with torch.no_grad():
        model(tokens, mask, cache=cache)
        steps = [model(step, cache=cache) for step in more.split([1, 1, 2], 1)]
    for i, row in enumerate(ROWS):
        whole = model(torch.cat([row, more[i]])[None])[0]
        assert_close(torch.cat(steps, 1)[i], whole[len(row) :], **EXACT)


def test_a_row_may_pause():
    """Padding among steps: a row that is done waits for the others."""
    model, tokens = make(), some_tokens(2, 5)
    cache, mask = model.new_cache(2), torch.ones(2, 5, dtype=torch.bool)
    mask[0, 3] = False
    with torch.no_grad():
        for column in range(5):
            step = slice(column, column + 1)
            hidden = model(tokens[:, step], mask[:, step], cache=cache)
    assert_close(hidden[0, -1], model(tokens[:1, [0, 1, 2, 4]])[0, -1], **EXACT)
    assert_close(hidden[1, -1], model(tokens[1:])[0, -1], **EXACT)


# Embeddings before the tokens


@BOTH
def test_a_prefix_is_read_and_not_given_back(positions):
    """Peers' defect: the prefix stayed in the results, and its mask raised."""
    model, tokens = make(positions), some_tokens()
    prefix = model.wte(tokens[:, :2])  # so that the right result is known
    hidden = model(tokens[:, 2:], prefix_embs=prefix)
    assert_close(hidden, model(tokens)[:, 2:], **EXACT)
    masked = model(
        tokens[:, 2:], prefix_embs=prefix, prefix_attn_mask=torch.tensor([[0, 1]]).expand(3, 2)
    )
    assert_close(masked, model(tokens[:, 1:])[:, 1:], **EXACT)
    assert (masked - hidden).abs().max() > 1e-3


def test_a_prefix_and_padded_tokens():
    model, (tokens, mask) = make(), padded(ROWS, left=True)
    prefix = model.wte(torch.tensor([[3, 8]])).expand(3, -1, -1)
    hidden = model(tokens, mask, prefix_embs=prefix)
    for i, row in enumerate(ROWS):
        alone = model(torch.cat([torch.tensor([3, 8]), row])[None])[0, 2:]
        assert_close(hidden[i][mask[i]], alone, **EXACT)


def test_a_prefix_with_positions_of_its_own():
    model, tokens = make(), some_tokens()
    prefix = model.wte(tokens[:, :2]) + model.wpe.weight[:2]
    hidden = model(tokens[:, 2:], prefix_embs=prefix, remove_prefix_position_embs=True)
    assert_close(hidden, model(tokens)[:, 2:], **EXACT)
    with pytest.raises(ValueError, match="rotary positions are added to no embedding"):
        make("rotary")(tokens, prefix_embs=prefix, remove_prefix_position_embs=True)


def test_a_prefix_in_front_of_a_cache():
    model, tokens = make(), some_tokens()
    cache, prefix = model.new_cache(3), model.wte(tokens[:, :2]).detach()
    with torch.no_grad():
        first = model(tokens[:, 2:4], prefix_embs=prefix, cache=cache)
        second = model(tokens[:, 4:], cache=cache)
    assert_close(torch.cat([first, second], 1), model(tokens)[:, 2:], **EXACT)
    assert cache.length == 7


# Transforms, types, memory


@BOTH
@pytest.mark.filterwarnings("error")
def test_stacked_models_are_the_models_one_by_one(positions):
    models = [make(positions) for _ in range(3)]
    for i, model in enumerate(models):
        for parameter in model.parameters():
            parameter.data.add_(0.1 * i)
    stacked, _ = stack_module_state(models)
    tokens, mask = padded(ROWS)

    def read(parameters, masked):
        model = models[0]
        if masked:
            return functional_call(model, parameters, (tokens, mask))
        return functional_call(model, parameters, (tokens,))

    for masked in (False, True):
        found = torch.vmap(lambda p, m=masked: read(p, m))(stacked)
        for model, its_hidden in zip(models, found, strict=True):
            assert_close(its_hidden[mask], model(tokens)[mask], **EXACT)


def test_gradients_of_stacked_models_and_batches_of_their_own():
    models = [make(), make()]
    models[1].wte.weight.data.mul_(1.5)
    stacked, _ = stack_module_state(models)
    tokens = torch.stack([some_tokens(seed=0), some_tokens(seed=1)])
    lengths = torch.tensor([[5, 2, 7], [1, 7, 3]])
    index = torch.tensor([[0, 0], [1, 0], [2, 1]])

    def loss(model, tokens, lengths):
        hidden = model(tokens, of_lengths(lengths, 7))
        return model.logits(hidden[torch.arange(3)[:, None], index]).logsumexp(-1).sum()

    class Module(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, *args):
            return loss(self.model, *args)

    module = Module(models[0])

    def call(parameters, *args):
        return functional_call(module, {f"model.{n}": p for n, p in parameters.items()}, args)

    found = torch.vmap(torch.func.grad(call))(stacked, tokens, lengths)
    for i, model in enumerate(models):
        expected = torch.autograd.grad(loss(model, tokens[i], lengths[i]), list(model.parameters()))
        for (name, _), right in zip(model.named_parameters(), expected, strict=True):
            assert_close(found[name][i], right, **EXACT)


def test_compiled_in_one_piece():
    model, (tokens, mask) = make(), padded(ROWS)

    @torch.compile(backend="eager", fullgraph=True)
    def read(tokens, mask):
        return model(tokens, mask), model(tokens)

    for hidden in read(tokens, mask):
        assert_close(hidden[mask], model(tokens)[mask], **EXACT)


def test_bfloat16_by_autocast():
    model, (tokens, mask) = make(dtype=torch.float32), padded(ROWS, left=True)
    exact = model(tokens, mask)[mask]
    cache = model.new_cache(3)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(model(tokens, mask)[mask].float(), exact, rtol=0.1, atol=0.1)
        model(tokens, of_lengths(torch.tensor([5, 2, 7]), 7)).sum().backward()
        with torch.no_grad():
            cached = model(tokens, mask, cache=cache)[mask]
            model(tokens[:, :1], cache=cache)
    assert_close(cached.float(), exact, rtol=0.1, atol=0.1)
    assert model.wte.weight.grad.dtype == torch.float32


def test_bfloat16_weights():
    model = make("rotary", dtype=torch.bfloat16)
    assert model(some_tokens()).dtype == torch.bfloat16
    assert model.new_cache(1).keys(0).dtype == torch.bfloat16


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_changes_no_gradient(dropout):
    model, (tokens, mask) = make(dropout=dropout).train(), padded(ROWS)
    other = {n: p.detach() * 1.1 for n, p in model.named_parameters()}

    def gradients(again):
        """Of parameters that are put in for the call alone, as a learner does."""
        model.gradient_checkpointing = again
        leaves = {n: p.clone().requires_grad_() for n, p in other.items()}
        torch.manual_seed(3)
        hidden = functional_call(model, leaves, (tokens, mask))
        return torch.autograd.grad(hidden.square().sum(), list(leaves.values()))

    for plain, saved in zip(gradients(False), gradients(True), strict=True):
        assert_close(saved, plain, **EXACT)


def test_checkpointing_keeps_less():
    model, tokens = make(n_layer=4), some_tokens(8, 16)

    def kept(again):
        sizes = []
        model.gradient_checkpointing = again

        def note(tensor):
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(tokens)
        return sum(sizes)

    assert kept(True) < 0.5 * kept(False)


def test_dropout_is_for_training_only():
    model, tokens = make(dropout=0.5), some_tokens()
    assert_close(model(tokens), model(tokens), **EXACT)
    model.train()
    assert (model(tokens) - model(tokens)).abs().max() > 1e-3


def test_fresh_weights():
    model = CausalLM(500, n_layer=8, n_head=2, n_embd=64)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif parameter.dim() == 1:
            assert (parameter == 1).all()
        else:
            right = 0.02 / 4 if name.endswith(("proj.weight", "out.weight")) else 0.02
            assert 0.9 < float(parameter.detach().std()) / right < 1.1, name


def test_output_layer_is_the_table_of_embeddings():
    names = {name for name, _ in make().named_parameters()}
    assert {"wte.weight", "wpe.weight", "h.0.qkv.weight", "h.1.out.bias", "ln_f.weight"} <= names
    assert not any("head" in name for name in names)
    assert "wpe.weight" not in dict(make("rotary").named_parameters())


def test_without_biases():
    model = make(bias=False)
    assert not any(name.endswith("bias") for name, _ in model.named_parameters())
    assert model(some_tokens()).shape == (3, 7, 12)


def test_settings_make_the_same_model():
    model = make("rotary", bias=False, dim_feedfwd=20)
    again = CausalLM(**model.settings(), dtype=torch.float64).eval()
    again.load_state_dict(model.state_dict())
    assert_close(again(some_tokens()), model(some_tokens()), **EXACT)


# Mistakes


@pytest.mark.parametrize("bad", [11, 400, -1])
def test_tokens_beyond_the_vocabulary(bad):
    model, tokens = make(), some_tokens()
    tokens[1, 3] = bad
    message = rf"token {bad} is not in the vocabulary, 0 to 10: encode the text with the tokenizer"
    with pytest.raises(ValueError, match=message):
        model(tokens)
    with pytest.raises(ValueError, match=message):
        model(tokens, of_lengths(torch.tensor([5, 5, 5]), 7))
    with pytest.raises(ValueError, match=message), torch.no_grad():
        model(tokens, cache=model.new_cache(3))


def test_rows_longer_than_the_context():
    model = make()
    with pytest.raises(ValueError, match="17 tokens are longer than block_size=16: cut them"):
        model(some_tokens(1, 17))
    with pytest.raises(ValueError, match=r"18 tokens \(8 of the prefix\) are longer"):
        model(some_tokens(1, 10), prefix_embs=torch.zeros(1, 8, 12))
    cache = model.new_cache(1, capacity=40)
    with torch.no_grad():
        model(some_tokens(1, 16), cache=cache)
        with pytest.raises(ValueError, match=r"17 tokens \(16 in the cache\) are longer"):
            model(some_tokens(1, 1), cache=cache)


def test_shapes_that_do_not_go_together():
    model, tokens = make(), some_tokens()
    with pytest.raises(ValueError, match=r"a single row is tokens\[None\]"):
        model(tokens[0])
    with pytest.raises(ValueError, match=r"attn_mask \[3, 6\] must have the shape of tokens"):
        model(tokens, torch.ones(3, 6))
    with pytest.raises(ValueError, match=r"prefix_embs \[3, 2, 8\] must be .* \[3, any, 12\]"):
        model(tokens, prefix_embs=torch.zeros(3, 2, 8))
    with pytest.raises(ValueError, match="prefix_attn_mask needs the prefix_embs"):
        model(tokens, prefix_attn_mask=torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"prefix_attn_mask \[3, 1\] must be \[batch, length\]"):
        model(tokens, prefix_embs=torch.zeros(3, 2, 12), prefix_attn_mask=torch.ones(3, 1))


def test_sizes_that_make_no_model():
    with pytest.raises(ValueError, match="n_embd=10 must be a multiple of n_head=4; .* n_embd=12"):
        CausalLM(5, n_head=4, n_embd=10)
    with pytest.raises(ValueError, match="positions='absolute' is unknown: choose 'learned'"):
        CausalLM(5, positions="absolute")
    with pytest.raises(ValueError, match="rotary positions rotate pairs"):
        CausalLM(5, n_head=2, n_embd=6, positions="rotary")
