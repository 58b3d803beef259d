"""Runs of ILQL that start from a language model: of any kind, all weights or LoRA."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raffia.lm.hf_trunk import HFTrunk
from raffia.lm.lora import merge_lora
from raffia.recipes import read_run
from raffia.recipes.ilql import evaluate, load_agent, resume, train, with_sizes
from raffia.recipes.ilql.config import DialogueDataConfig, LoRAConfig
from raffia.recipes.ilql.networks import Networks, starting_model
from raffia.tensordict import TensorDict
from raffia.train import RunError
from tests.marks import slow_among
from tests.recipes.ilql_runs import (
    NUM_TOKENS,
    OpenDialogue,
    last,
    of_file,
    with_trunk,
    write_chats,
    write_model,
)
from tests.recipes.runs import Quiet, refused, same, terminate


@pytest.fixture(scope="module")
def models_folder(tmp_path_factory):
    """Dialogues, and models of all kinds."""
    folder = tmp_path_factory.mktemp("models")
    write_chats(folder / "chats.jsonl")
    for kind in ("llama", "gpt_neox", "qwen2", "gpt2"):
        write_model(folder / kind, kind)
    return folder


def config_of(models_folder, kind, **changes):
    return with_sizes(
        of_file(str(models_folder / "chats.jsonl"), str(models_folder / kind), **changes)
    )


def numel(tree: TensorDict) -> int:
    return sum(tensor.numel() for tensor in tree.values(True, True))


def assert_resumes_exactly(config, tmp_path):
    """A run stopped and resumed without the model's folder is the same run. Returns its folder."""
    uninterrupted, folder = tmp_path / "straight", tmp_path / "run"
    assert train(config, uninterrupted, view=Quiet()).reason == "finished"
    train(config, folder, view=Quiet({3: terminate}))
    model_folder = Path(config.language_model)
    model_folder.rename(tmp_path / "elsewhere")
    try:
        assert resume(folder, view=Quiet()).reason == "finished"
        found = evaluate(folder, episodes=4).held_out
        assert found["loss"] == pytest.approx(evaluate(uninterrupted, episodes=4).held_out["loss"])
        assert isinstance(load_agent(folder).act(OpenDialogue()), str)
    finally:
        (tmp_path / "elsewhere").rename(model_folder)
    assert same(last(folder).tensors("state"), last(uninterrupted).tensors("state"))
    return folder


@pytest.mark.parametrize("kind", slow_among(["gpt_neox", "qwen2"], "qwen2"))
def test_a_model_of_transformers_is_trained_and_resumed_without_its_folder(
    kind, models_folder, tmp_path
):
    config = with_trunk(config_of(models_folder, kind), dropout=0.1)
    trunk = config.model.trunk
    assert (trunk.kind, trunk.vocab_size, trunk.block_size) == ("transformers", NUM_TOKENS, 24)
    assert Path(config.language_model).is_absolute()
    folder = assert_resumes_exactly(config, tmp_path)
    assert read_run(folder) == config
    state = last(folder).tensors("state")
    assert "dropout_seed" in state.keys()
    assert set(state["params"].keys()) == {"trunk", "v", "q1", "q2"}
    theirs = HFTrunk.from_folder(models_folder / kind)
    pairs = [(state["params", "trunk", *n.split(".")], p) for n, p in theirs.named_parameters()]
    moved = max(float((ours[: len(p)] - p.detach()).abs().max()) for ours, p in pairs)
    assert 0 < moved < 0.05  # it started from these weights, and learned
    agent = load_agent(folder).agent
    assert type(agent.model.trunk).__name__ == "HFTrunk"
    assert {agent.model.trunk.model.config.model_type} == {kind}


def test_dropout_is_the_run_s_and_not_the_model_s(models_folder, tmp_path):
    config = config_of(models_folder, "gpt_neox", num_updates=1)  # its folder has 0.5
    train(config, tmp_path / "run", view=Quiet())
    trunk = load_agent(tmp_path / "run").agent.model.trunk
    assert trunk.model.config.hidden_dropout == 0.0
    assert "dropout_seed" not in last(tmp_path / "run").tensors("state").keys()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_lora_is_trained_and_the_base_model_is_stored_once(kind, models_folder, tmp_path):
    lora = LoRAConfig(rank=2, dropout=0.2, learn_embeddings=False)
    config = config_of(models_folder, kind, lora=lora)
    config = replace(config, model=replace(config.model, policy="separate", target="trunk"))
    folder = assert_resumes_exactly(with_trunk(config, dropout=0.1), tmp_path)
    names = {path.name.partition(".")[0] for path in (folder / "language_model").iterdir()}
    assert names == {"manifest", "fixed"} | ({"config"} if kind == "llama" else set())
    state = last(folder).tensors("state")
    for tree in (state["params", "trunk"], state["params", "policy"], state["target", "trunk"]):
        assert {key[-1] for key in tree.keys(True, True)} == {"up", "down"}
    [fixed] = (folder / "language_model").glob("fixed*")
    base = TensorDict.load(fixed)
    full = HFTrunk.from_folder(models_folder / kind, vocab_size=NUM_TOKENS)
    assert set(base.keys()) == {"trunk"}
    assert numel(base) == sum(p.numel() for p in full.parameters())
    assert numel(state["buffers"]) < 100  # frequencies of positions at most

    agent = load_agent(folder).agent
    frozen = [tensor for name, tensor in named(agent.model.trunk) if name.endswith("base.weight")]
    for other in (agent.model.policy, agent.target.trunk):
        again = [tensor for name, tensor in named(other) if name.endswith("base.weight")]
        assert all(a.data_ptr() == b.data_ptr() for a, b in zip(frozen, again, strict=True))
    tokens = torch.tensor([[1, 10, 3]])
    with torch.no_grad():
        before = [trunk(tokens) for trunk in (agent.model.trunk, agent.model.policy)]
        merge_lora(agent.model)
        after = [trunk(tokens) for trunk in (agent.model.trunk, agent.model.policy)]
    torch.testing.assert_close(after, before)
    assert (before[0] - before[1]).abs().max() > 0


def named(module):
    return sorted(module.named_parameters())


def test_embeddings_learn_where_tokens_were_added(models_folder, tmp_path):
    lora = LoRAConfig(rank=2, layers=("q_proj", "up_proj"))
    config = config_of(models_folder, "llama", lora=lora, num_updates=2)
    assert config.lora.learn_embeddings is True
    train(config, tmp_path / "run", view=Quiet())
    keys = set(last(tmp_path / "run").tensors("state")["params", "trunk"].keys(True, True))
    names = {".".join(key[-2:]) for key in keys}
    changes = {f"{layer}.{part}" for layer in lora.layers for part in ("up", "down")}
    assert names == changes | {"embed_tokens.weight", "lm_head.weight"}
    full = write_model(tmp_path / "full", "llama", vocab_size=NUM_TOKENS)
    other = of_file(str(models_folder / "chats.jsonl"), full, lora=LoRAConfig(rank=2))
    assert with_sizes(other).lora.learn_embeddings is False
    data = DialogueDataConfig(files=config.data.files)  # the tokens are the model's by themselves
    assert with_sizes(replace(config, data=data)).model.trunk == config.model.trunk


def test_the_stored_model_is_checked(models_folder, tmp_path):
    config = config_of(models_folder, "llama", lora=LoRAConfig(rank=2))
    folder = tmp_path / "run"
    train(config, folder, view=Quiet({3: terminate}))
    [fixed] = (folder / "language_model").glob("fixed*")
    content = fixed.read_bytes()
    fixed.write_bytes(content[:-1] + b"x")
    with pytest.raises(RunError, match="Restore .*language_model as it was"):
        resume(folder, view=Quiet())
    shutil.rmtree(folder / "language_model")
    with pytest.raises(FileNotFoundError, match="language_model"):
        evaluate(folder)
    other = replace(config, language_model=write_model(tmp_path / "other", "llama"))
    change_weights(Path(other.language_model))
    path = folder / "config.json"
    path.write_text(path.read_text().replace(config.language_model, other.language_model))
    with pytest.raises(RunError, match="holds changes to another language model"):
        resume(folder, view=Quiet())


def change_weights(folder):
    trunk = HFTrunk.from_folder(folder)
    with torch.no_grad():
        for parameter in trunk.parameters():
            parameter.add_(1.0)
    trunk.model.save_pretrained(folder)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_gradient_checkpointing_changes_nothing(kind, models_folder, tmp_path):
    config = config_of(models_folder, kind, num_updates=2, lora=LoRAConfig(rank=2, dropout=0.1))
    states = []
    for checkpointing in (False, True):
        changed = with_trunk(config, gradient_checkpointing=checkpointing, dropout=0.1)
        train(changed, tmp_path / f"{checkpointing}", view=Quiet())
        states.append(last(tmp_path / f"{checkpointing}").tensors("state")["params"])
    for key in states[0].keys(True, True):
        torch.testing.assert_close(states[1][key], states[0][key], rtol=1e-4, atol=1e-6)


def test_networks_of_another_kind_are_refused(models_folder, tmp_path):
    config = config_of(models_folder, "gpt2", lora=LoRAConfig(rank=2), num_updates=1)
    train(config, tmp_path / "run", view=Quiet())
    with pytest.raises(ValueError, match="Networks\\(config, making=making_of"):
        Networks(config).refresh(last(tmp_path / "run").tensors("state"))
    with pytest.raises(ValueError, match="cannot be built from sizes alone"):
        Networks(config_of(models_folder, "llama"))


def test_invalid_settings_are_refused(models_folder, tmp_path):
    layers = with_trunk(config_of(models_folder, "llama"), n_layer=3)
    settled = config_of(models_folder, "llama", lora=LoRAConfig(rank=2))
    assert with_sizes(replace(settled, lora=LoRAConfig(rank=2))) == settled
    wrong = config_of(models_folder, "llama", lora=LoRAConfig(rank=2, layers=("qkv",)))
    with pytest.raises(RunError, match="n_layer=3, but .* holds a model with 2"):
        starting_model(layers)
    refused(wrong, tmp_path, r"no linear layer \['qkv'\]; the linear .* are", ValueError)


def test_models_that_do_not_generate_text_are_refused(models_folder, tmp_path):
    from transformers import T5Config

    gpt2 = json.loads((models_folder / "gpt2" / "config.json").read_text())
    for base, settings, error, message in [
        ("llama", T5Config().to_dict(), ValueError, "'t5', which does not generate token by tok"),
        ("llama", {"model_type": "gpt9"}, ValueError, "'gpt9', which transformers .* not know"),
        ("gpt2", gpt2 | {"activation_function": "mish"}, RunError, "trunk.kind transformers"),
    ]:
        folder = tmp_path / settings["model_type"]
        shutil.copytree(models_folder / base, folder)
        (folder / "config.json").write_text(json.dumps(settings))
        config = of_file(str(models_folder / "chats.jsonl"), str(folder))
        with pytest.raises(error, match=message):
            with_sizes(config)
    assert with_sizes(with_trunk(config, kind="transformers")).model.trunk.n_layer == 2
