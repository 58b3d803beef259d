"""Models of transformers as trunks: the face of our own, and their own numbers."""

import builtins
import copy

import pytest
import torch
from torch.func import functional_call
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from raffia.lm.folder import gpt2
from raffia.lm.hf_trunk import HFTrunk

EXACT = {"rtol": 1e-9, "atol": 1e-9}
TOKENS = torch.randint(11, (3, 7), generator=torch.Generator().manual_seed(0))
LENGTHS = [5, 2, 7]


def make_gpt2():
    config = GPT2Config(vocab_size=11, n_layer=2, n_head=2, n_embd=12, n_positions=16)
    return GPT2LMHeadModel(config)


def make_llama():
    size = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(vocab_size=11, **size, **heads, pad_token_id=0))


def make_opt():
    size = {"hidden_size": 12, "ffn_dim": 20, "num_hidden_layers": 2, "word_embed_proj_dim": 12}
    heads = {"num_attention_heads": 2, "max_position_embeddings": 16, "pad_token_id": 0}
    return OPTForCausalLM(OPTConfig(vocab_size=11, **size, **heads))


@pytest.fixture(params=[make_gpt2, make_llama, make_opt], ids=["gpt2", "llama", "opt"])
def trunk(request, tmp_path):
    torch.manual_seed(0)
    model = request.param()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(tmp_path)
    return HFTrunk.from_folder(tmp_path, dtype=torch.float64).eval()


def left_padded():
    tokens, mask = torch.zeros_like(TOKENS), torch.zeros_like(TOKENS)
    for i, n in enumerate(LENGTHS):
        tokens[i, 7 - n :], mask[i, 7 - n :] = TOKENS[i, :n], 1
    return tokens, mask.bool()


def test_logits_are_the_models_own(trunk):
    assert_close(trunk.logits(trunk(TOKENS)), trunk.model(TOKENS).logits, **EXACT)


def test_padded_rows_are_those_alone(trunk):
    tokens, mask = left_padded()
    hidden, right = trunk(tokens, mask), torch.arange(7) < torch.tensor(LENGTHS)[:, None]
    found = trunk(TOKENS, right)
    for i, n in enumerate(LENGTHS):
        alone = trunk(TOKENS[i : i + 1, :n])[0]
        assert_close(hidden[i, 7 - n :], alone, **EXACT)
        assert_close(found[i, :n], alone, **EXACT)


def test_cached_is_uncached(trunk):
    tokens, mask = left_padded()
    more, cache = TOKENS.flip(1)[:, :4], trunk.new_cache(3)
    with torch.no_grad():
        trunk(tokens, mask, cache=cache)
        steps = torch.cat([trunk(step, cache=cache) for step in more.split([1, 1, 2], 1)], 1)
    assert cache.length == 11
    for i, n in enumerate(LENGTHS):
        whole = trunk(torch.cat([TOKENS[i, :n], more[i]])[None])[0]
        assert_close(steps[i], whole[n:], **EXACT)


def test_rows_of_a_cache(trunk):
    tokens, mask = left_padded()
    step = torch.tensor([[4], [4], [4]])
    with torch.no_grad():
        cache = trunk.new_cache(3)
        trunk(tokens, mask, cache=cache)
        twice, chosen = cache.expand(2), cache.select(torch.tensor([2, 0]))
        before = trunk(step, cache=cache)
        assert_close(trunk(step.repeat(2, 1), cache=twice), before.repeat_interleave(2, 0), **EXACT)
        assert_close(trunk(step[:2], cache=chosen), before[[2, 0]], **EXACT)
        cache.reorder(torch.tensor([2, 2, 1]))
        after = trunk(step, cache=cache)
        assert_close(after[0], after[1], **EXACT)
        assert (after[0] - after[2]).abs().max() > 1e-3
    with pytest.raises(ValueError, match=r"2 rows of tokens for a cache of 3"):
        trunk(step[:2], cache=cache)


def test_columns_of_a_cache(trunk):
    tokens, mask = left_padded()
    step = torch.tensor([[4], [4]])
    with torch.no_grad():
        cache = trunk.new_cache(3)
        trunk(tokens, mask, cache=cache)
        short = cache.select(torch.tensor([1, 0]), start=2)
        assert (cache.length, short.length) == (7, 5)
        before = trunk(step, cache=short)
        short.length = 5  # forgotten, and read again
        assert_close(trunk(step, cache=short), before, **EXACT)
    for found, n, row in zip(before, (2, 5), (1, 0), strict=True):
        whole = torch.cat([TOKENS[row, :n], step[0]])[None]
        assert_close(found, trunk(whole)[0, -1:], **EXACT)
    with pytest.raises(ValueError, match="a cache of 8 columns that holds 7 has no room for 2"):
        full = trunk.new_cache(3, capacity=8)
        with torch.no_grad():
            trunk(tokens, mask, cache=full)
        trunk(tokens[:, :2], cache=full)


def test_a_prefix(trunk):
    prefix = trunk.model.get_input_embeddings()(TOKENS[:, :2])
    hidden = trunk(TOKENS[:, 2:], prefix_embs=prefix)
    assert_close(hidden, trunk(TOKENS)[:, 2:], **EXACT)
    masked = trunk(
        TOKENS[:, 2:], prefix_embs=prefix, prefix_attn_mask=torch.tensor([[0, 1]]).expand(3, 2)
    )
    assert_close(masked, trunk(TOKENS[:, 1:])[:, 1:], **EXACT)


def test_a_prefix_with_positions_of_its_own():
    trunk = HFTrunk(make_gpt2().double()).eval()
    table = trunk.model.transformer
    prefix = table.wte(TOKENS[:, :2]) + table.wpe.weight[:2]
    hidden = trunk(TOKENS[:, 2:], prefix_embs=prefix, remove_prefix_position_embs=True)
    assert_close(hidden, trunk(TOKENS)[:, 2:], **EXACT)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no table of positions"):
        HFTrunk(make_llama())(TOKENS, prefix_embs=prefix, remove_prefix_position_embs=True)


def test_padding_behind_the_longest_row_is_not_computed(trunk, monkeypatch):
    widths = []
    body = trunk._body.forward

    def looked_at(*args, **options):
        widths.append(options["input_ids"].shape[1])
        return body(*args, **options)

    monkeypatch.setattr(trunk._body, "forward", looked_at)
    tokens = torch.cat([TOKENS, torch.zeros(3, 9, dtype=torch.int64)], 1)
    mask = torch.arange(16) < torch.tensor(LENGTHS)[:, None]
    wide = trunk(tokens, mask)
    assert widths == [7] and wide.shape == (3, 16, 12)
    assert_close(wide[mask], trunk(TOKENS)[mask[:, :7]], **EXACT)


def test_activations_that_are_computed_again_give_the_same_gradients(trunk):
    again = HFTrunk.from_config(
        trunk.model.config.to_dict(), dtype=torch.float64, dropout=0.2, gradient_checkpointing=True
    )
    plain = HFTrunk.from_config(trunk.model.config.to_dict(), dtype=torch.float64, dropout=0.2)
    plain.load_state_dict(trunk.state_dict())
    for parameter in again.parameters():  # those of the module are not used
        torch.nn.init.constant_(parameter, 7.0)
    named = {f"0.{n}": p.detach().requires_grad_() for n, p in plain.named_parameters()}
    found = []
    for model in (plain, again, copy.deepcopy(again)):
        torch.manual_seed(1)
        hidden = functional_call(torch.nn.Sequential(model.train()), named, (TOKENS,))
        found.append(torch.autograd.grad(hidden.square().sum(), named.values(), allow_unused=True))
    for others in found[1:]:
        for other, expected in zip(others, found[0], strict=True):
            assert (other is None) == (expected is None)
            if expected is not None:
                assert_close(other, expected, **EXACT)


def test_fresh_weights_and_tokens_that_are_added(trunk, tmp_path):
    fresh = HFTrunk.from_config(trunk.model.config.to_dict(), vocab_size=13, dropout=0.2)
    assert fresh.vocab_size == 13 and fresh.logits(fresh(TOKENS + 2)).shape == (3, 7, 13)
    grown = HFTrunk.from_folder(tmp_path, vocab_size=13, dtype=torch.float64).eval()
    assert_close(grown(TOKENS), trunk(TOKENS), **EXACT)
    assert_close(grown.logits(grown(TOKENS))[..., :11], trunk.logits(trunk(TOKENS)), **EXACT)
    rates = [v for n, v in vars(fresh.model.config).items() if "drop" in n and type(v) is float]
    assert 0.2 in rates and set(rates) <= {0.0, 0.2}


def test_a_model_that_looks_ahead_is_refused():
    class Both(GPT2LMHeadModel):
        def forward(self, *args, **options):
            return super().forward(*args, **options)

    model = Both(make_gpt2().config).requires_grad_(False).apply(_loud)
    forward = model.transformer.forward

    def mixed(*args, **options):
        out = forward(*args, **options)
        out.last_hidden_state = out.last_hidden_state + out.last_hidden_state.flip(1)
        return out

    model.transformer.forward = mixed
    with pytest.raises(ValueError, match="Both attends to later tokens, too"):
        HFTrunk(model)


def test_both_ways_to_read_a_folder_agree(tmp_path):
    make_gpt2().save_pretrained(tmp_path)
    ours, theirs = gpt2(tmp_path).eval(), HFTrunk.from_folder(tmp_path).eval()
    assert_close(ours(TOKENS), theirs(TOKENS), rtol=0, atol=1e-4)


def test_mistakes(trunk, tmp_path):
    with pytest.raises(ValueError, match="token 11 is not in the vocabulary, 0 to 10"):
        trunk(TOKENS + 1 * (TOKENS == TOKENS.max()) * (11 - TOKENS))
    with pytest.raises(ValueError, match="17 tokens are longer than block_size=16"):
        trunk(torch.zeros(1, 17, dtype=torch.int64))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="pickled weights are not read"):
        HFTrunk.from_folder(tmp_path)


def test_without_the_extra(tmp_path, monkeypatch):
    make_llama().save_pretrained(tmp_path)
    real = builtins.__import__

    def refuse(name, *args, **options):
        if name == "transformers":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"'llama'.*pip install 'raffia\[hf\]'"):
        HFTrunk.from_folder(tmp_path)


def test_a_model_that_changes_its_logits_is_refused():
    class Cooled(GPT2LMHeadModel):
        def forward(self, *args, **options):
            out = super().forward(*args, **options)
            out.logits = out.logits / 2
            return out

    with pytest.raises(ValueError, match="Cooled does more to its logits than its output layer"):
        HFTrunk(Cooled(make_gpt2().config).requires_grad_(False).apply(_loud))


def _loud(module):
    for parameter in module.parameters(recurse=False):
        torch.nn.init.normal_(parameter)


def test_it_is_loaded_as_it_was_saved(tmp_path):
    model = make_gpt2()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    trunk = HFTrunk.from_folder(tmp_path)
    for (name, ours), theirs in zip(
        trunk.model.named_parameters(), again.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
