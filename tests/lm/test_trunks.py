"""Language models, ours and those of transformers: all ways of calling one give equal outputs."""

import copy
import functools
import sys

import pytest
import torch
from torch.func import functional_call
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    BambaForCausalLM,
    CohereConfig,
    FalconH1Config,
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from raffia.lm.folder import gpt2
from raffia.lm.hf_models import hf_sizes
from raffia.lm.hf_trunk import HFTrunk
from raffia.lm.transformer import CausalLM

HALF = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 16}


SMALL = {"hidden_size": 12, "intermediate_size": 20, "num_key_value_heads": 1, **HALF}


GPT2 = GPT2Config(vocab_size=11, n_layer=2, n_head=2, n_embd=12, n_positions=16)


LLAMA = LlamaConfig(vocab_size=11, **SMALL, pad_token_id=0)


MISTRAL = MistralConfig(vocab_size=11, **SMALL, sliding_window=4)  # in columns; it stores no others


SIZES = {"hidden_size": 12, "ffn_dim": 20, "word_embed_proj_dim": 10, "pad_token_id": 0}


OPT = OPTConfig(vocab_size=11, **SIZES, **HALF)

STATE = {"mamba_n_heads": 2, "mamba_d_head": 12, "mamba_d_state": 4, "mamba_n_groups": 1}


BAMBA = BambaConfig(vocab_size=11, **SMALL, **STATE, attn_layer_indices=[1])  # a state, attention


EXACT = {"rtol": 1e-9, "atol": 1e-9}


def ours(positions):
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 12, "block_size": 16}
    return CausalLM(11, **shape, positions=positions, dtype=torch.float64)


TRUNKS = {
    "learned": lambda: ours("learned"),
    "rotary": lambda: ours("rotary"),
    "gpt2": lambda: HFTrunk(GPT2LMHeadModel(GPT2).double()),
    "llama": lambda: HFTrunk(LlamaForCausalLM(LLAMA).double()),
    "mistral": lambda: HFTrunk(MistralForCausalLM(MISTRAL).double()),
    "opt": lambda: HFTrunk(OPTForCausalLM(OPT).double()),
}


def prompted(trunk, left=True):
    """A cache that holds the prompts."""
    tokens, mask = padded(ROWS, left)
    cache = trunk.new_cache(3)
    trunk(tokens, mask, cache=cache)
    return cache


@pytest.fixture(scope="module", params=TRUNKS)
def trunk(request):
    torch.manual_seed(0)
    model = TRUNKS[request.param]()
    for parameter in model.parameters():  # so biases and norms matter, too
        torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


theirs = pytest.mark.parametrize("trunk", ["gpt2", "llama", "opt"], indirect=True)


WHOLE = torch.randint(1, 11, (3, 7), generator=torch.Generator().manual_seed(0))
MORE = torch.randint(1, 11, (3, 4), generator=torch.Generator().manual_seed(5))
LENGTHS = (5, 2, 7)
ROWS = [row[:n] for row, n in zip(WHOLE, LENGTHS, strict=True)]


def padded(rows, left=False, width=7):
    """Rows of different lengths as one tensor, and its mask."""
    tokens, mask = torch.zeros(2, len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        columns = slice(width - len(row), None) if left else slice(0, len(row))
        tokens[i, columns], mask[i, columns] = row, 1
    return tokens, mask.bool()


def embeddings(trunk, tokens):
    return (trunk.model.get_input_embeddings() if isinstance(trunk, HFTrunk) else trunk.wte)(tokens)


def embs(trunk, tokens, mask=None):
    return {"prefix_embs": embeddings(trunk, tokens), "prefix_attn_mask": mask}


def real(hidden, mask, rows):
    return [(h[m], row) for h, m, row in zip(hidden, mask, rows, strict=True) if len(row)]


def padding(trunk, left, width=7, rows=ROWS, kind=torch.bool, filler=0):
    tokens, mask = padded(rows, left, width)
    return real(trunk(tokens.where(mask, filler), mask.to(kind)), mask, rows)


def in_pieces(trunk, *pieces):
    cache = trunk.new_cache(3)
    found = torch.cat([trunk(part, cache=cache) for part in WHOLE.split(pieces, 1)], 1)
    assert cache.length == 7
    return zip(found, WHOLE, strict=True)


def steps_after_prompts(trunk, left, change=lambda cache: cache, rows=(0, 1, 2)):
    """The cache of the prompts is changed; then these rows are continued."""
    cache, rows = change(prompted(trunk, left)), list(rows)
    found = torch.cat([trunk(step, cache=cache) for step in MORE[rows].split([1, 1, 2], 1)], 1)
    return [(found[i], torch.cat([ROWS[row], MORE[row]])) for i, row in enumerate(rows)]


def without_columns(cache):
    short = cache.select(torch.tensor([1, 0]), start=2)  # padding that neither has
    assert (cache.length, short.length) == (7, 5)
    return short


def read_again(trunk):
    cache = prompted(trunk)
    trunk(MORE[:, 2:], cache=cache)
    cache.length = 7  # later columns are dropped
    found = trunk(MORE[:, :1], cache=cache)
    return [(found[i], torch.cat([row, MORE[i, :1]])) for i, row in enumerate(ROWS)]


def selected(*rows):
    return lambda trunk: steps_after_prompts(
        trunk, True, lambda c: c.select(torch.tensor(rows)), rows
    )


def reordered(*rows):
    def change(cache):
        cache.reorder(torch.tensor(rows))
        return cache

    return lambda trunk: steps_after_prompts(trunk, True, change, rows)


def expanded(trunk):
    return steps_after_prompts(trunk, True, lambda cache: cache.expand(2), (0, 0, 1, 1, 2, 2))


def a_row_pauses(trunk):
    cache, mask = trunk.new_cache(3), torch.ones(3, 7, dtype=torch.bool)
    mask[0, 3] = False
    for column in range(7):
        step = slice(column, column + 1)
        hidden = trunk(WHOLE[:, step], mask[:, step], cache=cache)
    rows = [torch.cat([WHOLE[0, :3], WHOLE[0, 4:]]), *WHOLE[1:]]
    return zip(hidden, rows, strict=True)


def masked_in_the_middle(trunk):
    """Masked tokens are as if absent, also in the positions."""
    mask, columns = torch.ones_like(WHOLE), [0, 1, 3, 4, 5, 6]
    mask[:, 2] = 0
    return zip(trunk(WHOLE, mask)[:, columns], WHOLE[:, columns], strict=True)


def after_a_prefix(trunk, mask=None):
    mask = mask and torch.tensor([mask]).expand(3, 2)
    found = trunk(WHOLE[:, 2:], **embs(trunk, WHOLE[:, :2], mask))
    return zip(found, WHOLE if mask is None else WHOLE[:, 1:], strict=True)


def after_a_prefix_padded(trunk):
    tokens, mask = padded(ROWS, True)
    hidden = trunk(tokens, mask, **embs(trunk, MORE[:, :2]))
    rows = [torch.cat([MORE[i, :2], row]) for i, row in enumerate(ROWS)]
    return real(hidden, mask, rows)


def after_a_prefix_cached(trunk):
    cache = trunk.new_cache(3)
    first = trunk(WHOLE[:, 2:4], **embs(trunk, WHOLE[:, :2]), cache=cache)
    found = torch.cat([first, trunk(WHOLE[:, 4:], cache=cache)], 1)
    assert cache.length == 7
    return zip(found, WHOLE, strict=True)


WAYS = {  # each gives pairs: the outputs of a way of calling for a row's last tokens, and the row
    "padded at the right": lambda trunk: padding(trunk, False),
    "padded at the left": lambda trunk: padding(trunk, True),
    "padded more than needed": lambda trunk: padding(trunk, False, width=12),
    "anything as padding": lambda trunk: padding(trunk, True, filler=9),
    "mask of numbers": lambda trunk: padding(trunk, False, kind=torch.float32),
    "a row of nothing": lambda trunk: padding(trunk, True, rows=[ROWS[0], ROWS[0][:0], ROWS[2]]),
    "masked in the middle": masked_in_the_middle,
    "one by one": lambda trunk: in_pieces(trunk, *[1] * 7),
    "in pieces": lambda trunk: in_pieces(trunk, 3, 1, 3),
    "after prompts": lambda trunk: steps_after_prompts(trunk, True),
    "after prompts padded at the right": lambda trunk: steps_after_prompts(trunk, False),
    "chosen rows": selected(2, 0),
    "rows that trade places": reordered(2, 2, 1),
    "each row twice": expanded,
    "columns that are left out": lambda trunk: steps_after_prompts(
        trunk, True, without_columns, (1, 0)
    ),
    "columns that are forgotten": read_again,
    "a row that pauses": a_row_pauses,
    "a prefix": after_a_prefix,
    "a prefix with a mask": lambda trunk: after_a_prefix(trunk, [0, 1]),
    "a prefix and padding": after_a_prefix_padded,
    "a prefix and a cache": after_a_prefix_cached,
}


NOT_MISTRAL = [name for name in TRUNKS if name != "mistral"]


ONLY = {  # only ours can pause, and a window of columns counts padding
    "a row that pauses": ("learned", "rotary"),
    "masked in the middle": NOT_MISTRAL,
    "after prompts padded at the right": NOT_MISTRAL,
    "a prefix and padding": NOT_MISTRAL,
}


@pytest.mark.parametrize(
    ("trunk", "way"),
    [(trunk, way) for trunk in TRUNKS for way in WAYS if trunk in ONLY.get(way, TRUNKS)],
    indirect=["trunk"],
)
@torch.no_grad()
def test_rows_have_the_outputs_of_each_alone(trunk, way):
    pairs = list(WAYS[way](trunk))
    assert len(pairs) > 1
    for found, row in pairs:
        assert found.isfinite().all()
        assert_close(found, trunk(row[None])[0, -len(found) :], **EXACT)


@torch.no_grad()
def test_wrong_tokens_rows_and_columns_are_refused(trunk):
    wrong, full = WHOLE.clone(), trunk.new_cache(3, capacity=8)
    wrong[1, 3] = 11
    trunk(WHOLE, cache=full)
    unknown = "token 11 is not in the vocabulary, 0 to 10: encode the text with the tokenizer"
    for call, message in (
        (lambda: trunk(wrong), unknown),
        (lambda: trunk(wrong, wrong > 0), unknown),
        (lambda: trunk(wrong, cache=trunk.new_cache(3)), unknown),
        (lambda: trunk(wrong - 12), "token -"),
        (lambda: trunk(WHOLE[:, :1].expand(3, 17)), "17 tokens are longer than block_size=16"),
        (lambda: trunk(WHOLE[:2, :1], cache=full), "2 rows of tokens, but the .* batch_size=3"),
        (lambda: trunk(WHOLE[:, :2], cache=full), "8 columns that holds 7 has no room for 2"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_prefix_with_its_own_positions():
    model, gpt = ours("learned").eval(), TRUNKS["gpt2"]().eval()
    for trunk, table in ((model, model.wpe), (gpt, gpt.model.transformer.wpe)):
        prefix = embeddings(trunk, WHOLE[:, :2]) + table.weight[:2]
        hidden = trunk(WHOLE[:, 2:], prefix_embs=prefix, remove_prefix_position_embs=True)
        assert_close(hidden, trunk(WHOLE)[:, 2:], **EXACT)
    for kind, message in (
        ("rotary", "rotary positions are not added to an embedding"),
        ("llama", "LlamaForCausalLM has no position table"),
    ):
        with pytest.raises(ValueError, match=message):
            TRUNKS[kind]()(WHOLE, prefix_embs=prefix, remove_prefix_position_embs=True)


@torch.no_grad()
def test_layers_with_a_state_of_all_tokens_decode_and_forget_none(tmp_path):
    torch.manual_seed(0)
    BambaForCausalLM(BAMBA).save_pretrained(tmp_path)  # whose config.json has an infinity
    trunk = HFTrunk.from_folder(tmp_path, dtype=torch.float64).eval()
    cuts = ("columns that are forgotten", *(way for way in WAYS if way in ONLY))
    for way in WAYS.keys() - cuts:
        for found, row in WAYS[way](trunk):
            whole = trunk(row[None])[0, -len(found) :]
            assert_close(found, whole, rtol=1e-5, atol=1e-5, msg=lambda text, way=way: way + text)
    with pytest.raises(ValueError, match="a LinearAttentionLayer cannot forget the last tokens"):
        read_again(trunk)


class Odd(GPT2LMHeadModel):
    """A model that differs from causal language models."""

    names = staticmethod(functools.wraps)  # the names of its body's arguments

    def __init__(self, config):
        super().__init__(config)
        self.body = self.transformer.forward
        changed = lambda *args, **options: self.changed(*args, **options)  # noqa: E731
        self.transformer.forward = self.names(self.body)(changed)


# Those of transformers


@theirs
def test_logits_are_the_models_own_and_padding_is_not_computed(trunk, monkeypatch):
    assert_close(trunk.logits(trunk(WHOLE)), trunk.model(WHOLE).logits, **EXACT)
    widths, body = [], trunk._body.forward

    def recording(*args, **options):
        widths.append(options["input_ids"].shape[1])
        return body(*args, **options)

    monkeypatch.setattr(trunk._body, "forward", recording)
    assert trunk(*padded(ROWS, width=16)).shape == (3, 16, trunk.n_embd) and widths == [7]


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(vocab_size=11, head_dim=6, final_logit_softcapping=0.5, **SMALL),
        GraniteConfig(vocab_size=11, logits_scaling=8.0, **SMALL),
        CohereConfig(vocab_size=11, logit_scale=0.25, **SMALL),
        FalconH1Config(vocab_size=11, lm_head_multiplier=0.25, mamba_d_ssm=24, **STATE, **SMALL),
    ],
    ids=lambda config: config.model_type,
)
@torch.no_grad()
def test_logits_are_scaled_and_bounded_as_the_model_s(config):
    trunk = HFTrunk(AutoModelForCausalLM.from_config(config)).eval()
    for parameter in trunk.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    logits = trunk.logits(trunk(WHOLE))
    assert_close(logits, trunk.model(WHOLE).logits)
    assert not torch.allclose(logits, trunk.model.lm_head(trunk(WHOLE)), rtol=0.1)


@theirs
def test_gradient_checkpointing_gives_the_same_gradients(trunk):
    options = {"dtype": torch.float64, "dropout": 0.2}
    config = trunk.model.config.to_dict()
    again = HFTrunk.from_config(config, gradient_checkpointing=True, **options)
    plain = HFTrunk.from_config(config, **options)
    rates = [v for n, v in vars(plain.model.config).items() if "drop" in n and type(v) is float]
    assert 0.2 in rates and set(rates) <= {0.0, 0.2}
    assert HFTrunk.from_config(config, vocab_size=13).vocab_size == 13
    plain.load_state_dict(trunk.state_dict())
    for parameter in again.parameters():  # the module's own are not used
        torch.nn.init.constant_(parameter, 7.0)
    named = {f"0.{n}": p.detach().requires_grad_() for n, p in plain.named_parameters()}
    found = []
    for model in (plain, again, copy.deepcopy(again)):
        torch.manual_seed(1)
        hidden = functional_call(torch.nn.Sequential(model.train()), named, (WHOLE,))
        found.append(torch.autograd.grad(hidden.square().sum(), named.values(), allow_unused=True))
    for others in found[1:]:
        for other, expected in zip(others, found[0], strict=True):
            assert (other is None) == (expected is None)
            assert expected is None or torch.allclose(other, expected, **EXACT)


@theirs
@torch.no_grad()
def test_folders_are_loaded_as_saved_and_tokens_may_be_added(trunk, tmp_path):
    trunk.model.save_pretrained(tmp_path)
    assert hf_sizes(tmp_path)["n_embd"] == trunk(WHOLE).shape[-1]
    again = HFTrunk.from_folder(tmp_path, dtype=torch.float64)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for mine, other in zip(again.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, other)
    grown = HFTrunk.from_folder(tmp_path, vocab_size=13, dtype=torch.float64).eval()
    assert_close(grown(WHOLE), trunk(WHOLE), **EXACT)
    assert grown.vocab_size == 13 and grown.logits(grown(WHOLE + 2)).shape == (3, 7, 13)
    assert_close(grown.logits(grown(WHOLE))[..., :11], trunk.logits(trunk(WHOLE)), **EXACT)
    if isinstance(trunk.model, GPT2LMHeadModel):
        assert_close(gpt2(tmp_path, dtype=torch.float64).eval()(WHOLE), trunk(WHOLE), **EXACT)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="pickled weights are not read"):
        HFTrunk.from_folder(tmp_path)


class Both(Odd):
    """Attends to later tokens, and its forward has no named arguments."""

    names = staticmethod(lambda body: lambda changed: changed)

    def changed(self, *args, **options):
        out = self.body(*args, **options)
        out.last_hidden_state = out.last_hidden_state + out.last_hidden_state.flip(1)
        return out


class Forgetful(Odd):
    """Ignores the cache."""

    def changed(self, *args, past_key_values=None, cache=None, **options):
        return self.body(*args, **options)


class Wide(Odd):
    def changed(self, *args, **options):
        out = self.body(*args, **options)
        out.last_hidden_state = out.last_hidden_state.repeat(1, 1, 2)
        return out


class Cooled(GPT2LMHeadModel):
    def forward(self, *args, **options):
        out = super().forward(*args, **options)
        out.logits = out.logits / 2
        return out


class Capped(GPT2LMHeadModel):
    """Its bound is far from the logits that it begins with."""

    def forward(self, *args, **options):
        out = super().forward(*args, **options)
        out.logits = out.logits.clamp(-80, 80)
        return out


class Whole(GPT2LMHeadModel):
    base_model_prefix = "no such part"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Both, "Both also attends to later tokens"),
        (Forgetful, "Forgetful cannot read a token behind padding and others"),
        (Wide, "Wide gives hidden states of 24 numbers, where its config has 12"),
        (Cooled, "Cooled changes its logits after the output layer"),
        (Capped, r"Capped changes .* layer \(by 20 where the largest is 100\)"),
        (Whole, "Whole does not tell which part of it comes before the output layer"),
    ],
)
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")  # one without named arguments
def test_models_of_other_kinds_are_refused(kind, message):
    model = kind(GPT2)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    with pytest.raises(ValueError, match=message):
        HFTrunk(model)


def test_without_the_extra(tmp_path, monkeypatch):
    LlamaForCausalLM(LLAMA).save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"'llama'.*pip install 'raffia\[hf\]'"):
        HFTrunk.from_folder(tmp_path)
