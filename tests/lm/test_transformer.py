"""The causal language model: its outputs, and that all ways of calling it agree."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.func import functional_call, stack_module_state
from torch.testing import assert_close

from raffia.lm.transformer import CausalLM
from tests.lm.test_trunks import EXACT, ROWS, padded
from tests.lm.test_trunks import WHOLE as TOKENS

HERE = Path(__file__).parent
ORACLE = json.loads((HERE / "trunk_logits.json").read_text())
WEIGHTS = HERE.parent / "algorithms" / "ilql" / "ilql_small.safetensors"


def make(positions="learned", dtype=torch.float64, **options):
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 12, "block_size": 16, "dropout": 0.0}
    model = CausalLM(11, **(shape | options), positions=positions, dtype=dtype)
    for parameter in model.parameters():  # so biases and norms matter, too
        torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


@pytest.fixture(scope="module")
def oracle_model():
    """The policy of ILQL's numeric cases: GPT-2's formulas, restated independently in float64."""
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "dim_feedfwd": 40, "block_size": 64}
    model = CausalLM(35, **shape, dtype=torch.float64).eval()
    stored = load_file(WEIGHTS)
    state = {n.removeprefix("policy."): w for n, w in stored.items() if n.startswith("policy.")}
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("cached", [False, True])
@torch.no_grad()
def test_next_tokens_of_a_batch_are_gpt2s(oracle_model, left, cached):
    rows = [torch.tensor(case["tokens"]) for case in ORACLE["prompts"]]
    tokens, mask = padded(rows, left, max(map(len, rows)))
    hidden = oracle_model(tokens, mask, cache=oracle_model.new_cache(len(rows)) if cached else None)
    last = torch.arange(tokens.shape[1]).where(mask, 0).amax(1)
    logits = oracle_model.logits(hidden[torch.arange(len(rows)), last])
    recorded = torch.tensor(ORACLE["logits"], dtype=torch.float64)
    all_logits = oracle_model.logits(oracle_model(torch.tensor([ORACLE["tokens"]])))
    assert_close(all_logits[0, ORACLE["positions"]], recorded, **EXACT)
    logits[:, ORACLE["pad_token_id"]] = -torch.inf
    expected = [[-torch.inf if x is None else x for x in case["next_log_probs"]]
                for case in ORACLE["prompts"]]  # fmt: skip
    assert_close(logits.log_softmax(-1), torch.tensor(expected, dtype=torch.float64), **EXACT)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_padding_and_unwanted_positions_have_zero_outputs_and_no_gradients(positions):
    model, (tokens, mask) = make(positions), padded(ROWS, width=9)
    wanted = torch.zeros_like(mask)
    wanted[0, [0, 3]] = wanted[2, 5] = wanted[1, 8] = True  # the last is padding
    chosen, full = wanted & mask, tokens[2:]
    dense, some = model(tokens, mask), model(tokens, mask, wanted=wanted)
    assert_close(some[chosen], dense[chosen], **EXACT)
    assert (some[~chosen] == 0).all()
    column = torch.arange(9)[None] == 5
    assert_close(model(full, wanted=column)[column], model(full)[column], **EXACT)
    plain = model(tokens)  # without a mask: nothing attends to padding at the right
    assert (dense[~mask] == 0).all() and (plain[~mask] != 0).any()
    parameters = list(model.parameters())
    gradients = [
        torch.autograd.grad(hidden[chosen].square().sum(), parameters, retain_graph=True)
        for hidden in (some, dense, plain)
    ]
    for mine, other, unmasked in zip(*gradients, strict=True):
        assert_close(mine, other, **EXACT)
        assert_close(mine, unmasked, **EXACT)


@pytest.mark.filterwarnings("error")
def test_stacked_models_are_the_models_one_by_one():
    models, (tokens, mask) = [make(), make()], padded(ROWS)
    models[1].wte.weight.data.mul_(1.5)
    stacked, _ = stack_module_state(models)
    for args in ((tokens,), (tokens, mask)):
        found = torch.vmap(lambda p, args=args: functional_call(models[0], p, args))(stacked)
        for model, hidden in zip(models, found, strict=True):
            assert_close(hidden[mask], model(tokens)[mask], **EXACT)


def test_checkpointing_saves_fewer_activations():
    model = make(n_layer=4)

    def num_saved(again):
        sizes = []
        model.gradient_checkpointing = again
        record = lambda tensor: sizes.append(tensor.numel()) or tensor  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
            model(TOKENS.repeat(3, 2))
        return sum(sizes)

    assert num_saved(True) < 0.5 * num_saved(False)


@torch.no_grad()
def test_wrong_arguments_are_refused():
    model, zeros, short = make(), torch.zeros, TOKENS[:1].repeat(1, 3)
    full = model.new_cache(1, capacity=40)
    model(short[:, :16], cache=full)
    prefix = {"prefix_embs": zeros(3, 2, 12), "prefix_attn_mask": zeros(3, 1)}
    for call, message in (
        (lambda: model(TOKENS[0]), r"for a single row pass tokens\[None\]"),
        (lambda: model(TOKENS, zeros(3, 6)), r"attn_mask \[3, 6\] must have the shape of tokens"),
        (
            lambda: model(TOKENS, prefix_embs=zeros(3, 2, 8)),
            r"\[3, 2, 8\] must be .* \[3, any, 12\]",
        ),
        (lambda: model(TOKENS, prefix_attn_mask=zeros(3, 2)), "needs prefix_embs"),
        (lambda: model(TOKENS, **prefix), r"prefix_attn_mask \[3, 1\] must be \[batch, length\]"),
        (
            lambda: model(short[:, :10], prefix_embs=zeros(1, 8, 12)),
            r"18 tokens \(8 of the prefix\)",
        ),
        (lambda: model(short[:, :1], cache=full), r"17 tokens \(16 in the cache\) are longer"),
        (lambda: CausalLM(5, n_head=4, n_embd=10), "n_embd=10 must be a mult.*n_head=4.*n_embd=12"),
        (lambda: CausalLM(5, positions="absolute"), "e' must be one of 'learned', 'rotary'"),
        (lambda: CausalLM(5, n_head=2, n_embd=6, positions="rotary"), "positions rotate pairs"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@torch.no_grad()
def test_greedy_continuation_with_a_cache_is_the_recorded_one(oracle_model):
    for case in ORACLE["prompts"]:
        cache, tokens, found = oracle_model.new_cache(1), torch.tensor([case["tokens"]]), []
        for _ in case["greedy"]:
            logits = oracle_model.logits(oracle_model(tokens, cache=cache)[:, -1])
            logits[:, ORACLE["pad_token_id"]] = -torch.inf
            tokens = logits.argmax(-1, keepdim=True)
            found.append(int(tokens))
        assert found == case["greedy"]
