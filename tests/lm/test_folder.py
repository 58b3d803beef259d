"""Folders with GPT-2's weights: the loaded model gives the logits of transformers."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from raffia.files import DamagedFileError, write_manifest
from raffia.lm.folder import gpt2, load_gpt2, save_gpt2
from raffia.lm.transformer import CausalLM

SHAPE = {"vocab_size": 17, "n_layer": 2, "n_head": 3, "n_embd": 12, "n_positions": 20}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [16, 0, 2, 7, 1, 8, 2, 8]])


def their_model(**options):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**(SHAPE | options))).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def folder(tmp_path):
    their_model().save_pretrained(tmp_path)
    return tmp_path


def change_config(folder, **entries):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "gone"}))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_inner": 20, "activation_function": "gelu_pytorch_tanh"},
        *({"activation_function": name} for name in ("relu", "silu", "leaky_relu", "tanh")),
    ],
)
def test_logits_are_those_of_transformers(tmp_path, options):
    """A defect of a peer: with GPT-2's weights, other logits than GPT-2's."""
    theirs = their_model(**options)
    theirs.save_pretrained(tmp_path)
    ours = gpt2(tmp_path).eval()
    with torch.no_grad():
        assert_close(ours.logits(ours(TOKENS)), theirs(TOKENS).logits, rtol=0, atol=1e-4)
    exact = gpt2(tmp_path, dtype=torch.float64).eval()
    with torch.no_grad():
        expected = theirs.double()(TOKENS).logits
        assert_close(exact.logits(exact(TOKENS)), expected, rtol=1e-9, atol=1e-9)


def test_weights_without_the_prefix_and_with_old_masks(folder):
    """GPT-2's own folder has such weights."""
    before = gpt2(folder).state_dict()
    tensors = {n.removeprefix("transformer."): t for n, t in tensors_of(folder).items()}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 20, 20)}
    store(folder, {**tensors, **masks, "lm_head.weight": tensors["wte.weight"].clone()})
    change_config(folder, resid_pdrop=0.25, layer_norm_epsilon=1e-5)
    config, _ = load_gpt2(folder)
    assert config == {
        **{"vocab_size": 17, "n_layer": 2, "n_head": 3, "n_embd": 12, "block_size": 20},
        **{"dim_feedfwd": 48, "dropout": 0.25, "layer_norm_eps": 1e-5, "bias": True},
        **{"positions": "learned", "activation": "GELU"},
    }
    for name, tensor in gpt2(folder).state_dict().items():
        assert torch.equal(tensor, before[name])


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def store(folder, tensors):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def other_head(folder):
    tensors = tensors_of(folder)
    store(folder, {**tensors, "lm_head.weight": tensors["transformer.wte.weight"] + 1})


def with_config(**entries):
    return lambda folder: change_config(folder, **entries)


def with_text(name, text):
    return lambda folder: (folder / name).write_text(text)


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (with_config(n_embd=15), ValueError, r"'wte.weight' is \[17, 12\], but according"),
        (with_config(n_layer=3), ValueError, "no tensor 'h.2.ln_1.weight', which a GPT-2 of 3 lay"),
        (with_config(n_layer=1), ValueError, r"tensor 'h\.1\..*' does not belong to a GPT-2"),
        (with_config(n_layer="gone"), ValueError, "config.json lacks 'n_layer', which"),
        (with_config(activation_function="mish"), ValueError, r"n': 'mish'}. Use HFTrunk"),
        (with_config(scale_attn_by_inverse_layer_idx=True), ValueError, "layer_idx': True}"),
        (with_config(model_type="llama"), ValueError, "='llama', but only 'gpt2' .* HFTrunk"),
        (other_head, ValueError, "lm_head.weight differs from wte.weight"),
        (with_text("model.safetensors", "12345678"), ValueError, "it is damaged, or not a"),
        (pickled, FileNotFoundError, r"no model.safetensors.*save_pretrained\(folder\)"),
        (with_text("config.json", "{"), ValueError, "config.json: it is not JSON"),
        (with_text("config.json", "[1]"), ValueError, "config.json: it is not a JSON obj"),
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            FileNotFoundError,
            r"no model.safetensors, only \['config.json'.*cop",
        ),
        (
            lambda folder: (folder / "config.json").unlink(),
            FileNotFoundError,
            "has no config.json with the model's sizes",
        ),
        (shutil.rmtree, FileNotFoundError, "no folder .*: a model's folder holds"),
    ],
)
def test_folders_of_other_models_and_damaged_ones_are_refused(folder, change, kind, message):
    change(folder)
    with pytest.raises(kind, match=message):
        load_gpt2(folder)


def test_a_state_that_lacks_weights_is_not_saved(tmp_path):
    model = CausalLM(7, n_layer=1, n_head=1, n_embd=4)
    state = model.state_dict()
    del state["h.0.fc.bias"]
    with pytest.raises(ValueError, match="the state has no 'h.0.fc.bias': pass all"):
        save_gpt2(tmp_path, model.settings(), state)


def test_weights_in_several_files(folder):
    before = gpt2(folder).state_dict()
    for entry in folder.iterdir():
        if entry.suffix == ".safetensors":
            entry.unlink()
    their_model().save_pretrained(folder, max_shard_size="4KB")
    shards = sorted(entry.name for entry in folder.glob("*.safetensors"))
    assert len(shards) > 2
    for name, tensor in gpt2(folder).state_dict().items():
        assert torch.equal(tensor, before[name])
    (folder / shards[1]).unlink()
    with pytest.raises(FileNotFoundError, match=rf"lacks \['{shards[1]}'\], which .*index.json"):
        load_gpt2(folder)


@pytest.mark.parametrize("bias", [True, False])
def test_a_saved_model_is_one_of_transformers(tmp_path, bias):
    ours = CausalLM(17, n_layer=2, n_head=3, n_embd=12, block_size=20, dim_feedfwd=31, bias=bias)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save_gpt2(tmp_path / "new", ours.settings(), ours.state_dict(), extra={"eos_token_id": 4})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()
    assert (type(theirs).__name__, theirs.config.eos_token_id) == ("GPT2LMHeadModel", 4)
    with torch.no_grad():
        logits = ours.logits(ours.eval()(TOKENS))
        assert_close(logits, theirs(TOKENS).logits, rtol=0, atol=1e-4)
    again = gpt2(tmp_path / "new").eval()
    assert_close(again.logits(again(TOKENS)), logits, rtol=0, atol=1e-6)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_weights_that_differ_from_the_manifest_are_damaged(folder):
    write_manifest(folder, [path.name for path in folder.iterdir()])
    assert gpt2(folder) is not None
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-2] ^= 1  # in a weight: the length stays
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(DamagedFileError, match="model.safetensors: its content is not what"):
        gpt2(folder)
