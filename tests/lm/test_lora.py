"""LoRA: the same function at first, few trained parameters, and the same function when merged."""

import pytest
import torch
from torch.testing import assert_close
from transformers import GPT2Config, GPT2LMHeadModel

from raffia.lm.hf_trunk import HFTrunk
from raffia.lm.lora import LoRA, add_lora, attention_layers, merge_lora
from raffia.lm.transformer import CausalLM

TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def ours():
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 12, "block_size": 8}
    return CausalLM(11, **shape, dtype=torch.float64).eval()


def theirs():
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 12, "n_positions": 8}
    return HFTrunk(GPT2LMHeadModel(GPT2Config(vocab_size=11, **shape)).double().eval())


MODELS = pytest.mark.parametrize(
    "make, layers", [(ours, ["qkv", "out"]), (theirs, ["c_attn", "c_fc"])]
)


def learn(model):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        model.logits(model(TOKENS)).logsumexp(-1).sum().backward()
        optimizer.step()


@MODELS
def test_adding_lora_changes_nothing_and_merging_keeps_what_is_learnt(make, layers):
    model = make()
    before, num_parameters = model(TOKENS), sum(p.numel() for p in model.parameters())
    names = add_lora(model, rank=2, alpha=6.0, layers=layers)
    assert len(names) == 4
    assert torch.equal(model(TOKENS), before)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"{name}.{part}" for name in names for part in ("down", "up")}
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) < 0.2 * num_parameters
    fixed = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    learn(model)
    for name, parameter in model.named_parameters():
        assert name not in fixed or torch.equal(parameter, fixed[name])
    after = model(TOKENS)
    assert (after - before).abs().max() > 1e-3
    merged = merge_lora(model)
    assert_close(merged(TOKENS), after, rtol=1e-9, atol=1e-9)
    assert {name for name, _ in merged.named_parameters()} == {
        name for name, _ in make().named_parameters()
    }
    assert all(p.requires_grad for p in merged.parameters())


def test_the_update_is_that_of_the_paper():
    layer = LoRA(torch.nn.Linear(3, 5), rank=2, alpha=6.0)
    torch.nn.init.normal_(layer.up)
    x = torch.randn(4, 3)
    assert_close(layer(x), layer.base(x) + 3.0 * x @ layer.down.T @ layer.up.T)
    layer = LoRA(torch.nn.Linear(3, 5), rank=2, dropout=0.5)  # dropout of the update, in training
    torch.nn.init.normal_(layer.up)
    torch.manual_seed(0)
    found = layer(x)
    torch.manual_seed(0)
    dropped = torch.nn.functional.dropout(x, 0.5)
    assert_close(found, layer.base(x) + 8.0 * dropped @ layer.down.T @ layer.up.T)
    assert_close(layer.eval()(x), layer.merged()(x))


def test_layers_that_cannot_be_changed_are_refused():
    assert attention_layers(theirs()) == ["c_attn"]
    linear = torch.nn.Linear
    two = torch.nn.Sequential(linear(2, 2), linear(2, 2))
    unknown = r"no linear layer \['q'\]; the linear layers are \['fc', 'out', 'proj', 'qkv'"
    for call, kind, message in (
        (lambda: attention_layers(two), ValueError, r"name some of \['0', '1'\]"),
        (lambda: add_lora(ours(), layers=["qkv", "q"]), ValueError, unknown),
        (lambda: add_lora(ours(), rank=13), ValueError, "=13 must be in 1..12 .* of size 12 to 36"),
        (
            lambda: LoRA(torch.nn.Embedding(3, 4)),
            TypeError,
            "linear layers, but this is a Embedding",
        ),
    ):
        with pytest.raises(kind, match=message):
            call()
