"""Agents as folders of transformers: the same logits, the same tokens, and the way back."""

import copy
import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from raffia.algorithms.ilql import method
from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
from raffia.files import DamagedFileError
from raffia.lm.data.dialogue_rows import Dialogue
from raffia.lm.envs.wordle import WordleObservation
from raffia.recipes.efficientzero import EfficientZeroRun
from raffia.recipes.ilql import ILQL_PRESETS, ILQLRun, load_agent, train, with_sizes
from raffia.recipes.ilql.config import DialogueDataConfig, LoRAConfig
from raffia.recipes.ilql.export import export, load_exported
from raffia.recipes.run_folder import create_run
from raffia.train import RunError
from tests.recipes.ilql_runs import write_chats, write_tokenizer
from tests.recipes.runs import Quiet, with_all

transformers = pytest.importorskip("transformers")

SMOKE = ILQL_PRESETS["ilql-smoke"]
SMALL = TrunkConfig(n_layer=2, n_head=2, n_embd=8, block_size=48)
NEAR = {"rtol": 0, "atol": 1e-4}
DIALOGUE = Dialogue([("say 3", None), ("3", 0.0), ("say 5", None)], terminal=False)


def run_of(folder, **changes):
    """A run of one update with a large learning rate, on games or on chats."""
    config = with_all(SMOKE, num_updates=1, batch_size=4, evaluate__num_episodes=4)
    config = with_sizes(replace(with_all(config, optimizer__learning_rate=0.05), **changes))
    train(config, folder, view=Quiet())
    return config


def of_chats(folder, tokenizer="characters", **changes):
    chats = write_chats(folder / "chats.jsonl", range(10))
    data = DialogueDataConfig(files=(chats,), tokenizer=str(tokenizer), add_special_tokens=True)
    changes = {"model": ILQLModelConfig(trunk=SMALL), **changes}
    return run_of(folder / "run", task="data", data=data, **changes)


def letters():
    wordle = replace(SMOKE.wordle, layout="letters")
    trunk = replace(SMOKE.model.trunk, block_size=96)
    return {"wordle": wordle, "model": replace(SMOKE.model, trunk=trunk)}


def exported(folder, observation):
    """Export the run; what transformers loads, and an agent again, answer as the run's agent does.

    Returns the agent, the model of transformers, its tokenizer, and the model card.
    """
    out = export(folder / "run", folder / "out", "newest").folder
    agent = load_agent(folder / "run", "newest")
    model = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    prompt = agent.prompt(observation)
    sequence = observation.to_sequence()[0]
    if sequence:
        roles = ["user" if reward is None else "assistant" for _, reward in sequence]
        pairs = zip(roles, sequence, strict=True)
        chat = [{"role": role, "content": text} for role, (text, _) in pairs]
        assert tokenizer.apply_chat_template(chat, return_dict=False) == prompt
        assert tokenizer(sequence[0][0]).input_ids == agent.tokenizer.encode(sequence[0][0])
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        ours = agent.agent.model.policy_trunk
        assert_close(model(tokens).logits, ours.logits(ours(tokens)), **NEAR)
    assert len(tokenizer) == agent.tokenizer.num_tokens
    same_answers(agent, load_exported(out), observation)
    assert load_exported(out, device="meta").agent.model.v[0].weight.is_meta
    return agent, model, tokenizer, (out / "README.md").read_text()


def same_answers(before, after, observation):
    assert after.config == before.config
    values = after.agent.model is not None and after.config.include_adv
    config = replace(before.config, report_all=values, max_new_tokens=3)
    before, after = (copy.copy(agent) for agent in (before, after))
    before.config = after.config = config
    expected, found = (agent.answer([observation] * 2) for agent in (before, after))
    assert expected.tokens == found.tokens
    for name in ("log_prob", "advantage", "value") if values else ("log_prob",):
        assert_close(getattr(found, name), getattr(expected, name), **NEAR)


@pytest.mark.parametrize("changes", [{}, letters()], ids=["words", "letters"])
def test_wordle(changes, tmp_path):
    run_of(tmp_path / "run", **changes)
    observation = WordleObservation((("crane", "bbybb"), ("", "bbbbb")))
    agent, model, tokenizer, card = exported(tmp_path, observation)
    torch.manual_seed(0)
    tokens = model.generate(**tokenizer("<a>", return_tensors="pt"))[0].tolist()
    assert 1 < len(tokens) <= 1 + agent.config.max_new_tokens
    assert tokenizer.pad_token_id not in tokens
    assert "implicit language Q-learning (ILQL, tau 0.6)" in card
    assert "200 games of Wordle with 12 words by scripted players (15 % expert" in card
    assert "- as it decodes in the run: mean return -" in card and "needs the value heads" in card


def test_the_code_of_the_model_card_runs(tmp_path, monkeypatch, capsys):
    run_of(tmp_path / "run")
    export(tmp_path / "run", tmp_path / "FOLDER", "newest")
    monkeypatch.chdir(tmp_path)
    blocks = Path("FOLDER/README.md").read_text().split("```python\n")[1:]
    assert len(blocks) == 2
    Path("program.py").write_text("".join(block.partition("```")[0] for block in blocks))
    runpy.run_path("program.py", {"observation": WordleObservation()})
    assert capsys.readouterr().out.count("\n") >= 2


@pytest.mark.parametrize("tokenizer", ["characters", "words"])
def test_dialogues(tokenizer, tmp_path):
    of_chats(tmp_path, tokenizer)
    *_, card = exported(tmp_path, DIALOGUE)
    assert "`chats.jsonl`" in card and "On held-out rows: loss" in card


SIZES = dict(vocab_size=12, num_hidden_layers=2, num_attention_heads=2, hidden_size=8)
GPT2 = dict(vocab_size=12, n_layer=2, n_head=2, n_embd=8, n_positions=48)
LLAMA = SIZES | dict(intermediate_size=12, num_key_value_heads=1, max_position_embeddings=48)
THEIRS = {
    "GPT2LMHeadModel": lambda: transformers.GPT2Config(**GPT2),
    "LlamaForCausalLM": lambda: transformers.LlamaConfig(**LLAMA, pad_token_id=0),
}


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("name", THEIRS)
def test_hugging_face_models_and_tokenizers_with_and_without_lora(name, rank, tmp_path):
    torch.manual_seed(1)
    getattr(transformers, name)(THEIRS[name]()).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    config = of_chats(tmp_path, tmp_path, language_model=str(tmp_path), lora=LoRAConfig(rank=rank))
    assert config.model.trunk.kind == ("gpt" if "GPT2" in name else "transformers")
    _, model, _, _ = exported(tmp_path, DIALOGUE)
    assert type(model).__name__ == name
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.tensor([[0, 5, 7]])
    with torch.no_grad():  # the trained weights are exported
        assert (before(tokens).logits - model(tokens).logits[..., :12]).abs().max() > 1e-3


def test_separate_networks_have_their_own_folders(tmp_path):
    model = ILQLModelConfig(trunk=replace(SMALL, bias=False), policy="separate", target="trunk")
    of_chats(tmp_path, model=replace(model, double_q=False))
    exported(tmp_path, DIALOGUE)
    for name in ("value_trunk", "target_trunk"):
        assert (tmp_path / "out" / name / "model.safetensors").exists()


def test_tokens_that_are_no_text_are_never_generated(tmp_path):
    """Models have more tokens than their tokenizers, for a round number."""
    config = transformers.LlamaConfig(**LLAMA | {"vocab_size": 64}, pad_token_id=0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    of_chats(tmp_path, tmp_path, language_model=str(tmp_path))
    agent, *_ = exported(tmp_path, DIALOGUE)
    found = json.loads((tmp_path / "out/generation_config.json").read_text())
    pad, num_tokens = agent.tokenizer.pad_token_id, agent.tokenizer.num_tokens
    assert num_tokens < 20 and found["suppress_tokens"] == [pad, *range(num_tokens, 64)]


def test_cloning_has_no_values(tmp_path):
    config = method("filtered_bc", SMOKE)
    run_of(tmp_path / "run", loss=config.loss, decode=config.decode, keep_best=config.keep_best)
    *_, card = exported(tmp_path, WordleObservation())
    assert not (tmp_path / "out" / "value_heads.safetensors").exists()
    assert "behaviour cloning of the best 10 %" in card and "learnt no values" in card


def test_training_continues_from_an_export(tmp_path):
    of_chats(tmp_path)
    out = str(export(tmp_path / "run", tmp_path / "out", "newest").folder)
    data = DialogueDataConfig(files=(str(tmp_path / "chats.jsonl"),), tokenizer=out)
    frozen = replace(SMOKE.optimizer, learning_rate=1e-12)
    run_of(tmp_path / "more", task="data", data=data, language_model=out, optimizer=frozen)
    before, after = (load_agent(tmp_path / name, "newest") for name in ("run", "more"))
    assert before.prompt(DIALOGUE) == after.prompt(DIALOGUE)
    tokens = torch.tensor([before.prompt(DIALOGUE)])
    trunks = [policy.agent.model.policy_trunk for policy in (before, after)]
    with torch.no_grad():
        assert_close(*(trunk.logits(trunk(tokens)) for trunk in trunks), **NEAR)


# -- refusals


def test_nothing_is_overwritten_and_failures_leave_nothing(tmp_path, monkeypatch):
    run_of(tmp_path / "run")
    for name in ("full", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(RunError, match="full already exists and is not empty"):
        export(tmp_path / "run", tmp_path / "full")
    export(tmp_path / "run", tmp_path / "empty")
    assert (tmp_path / "empty" / "README.md").exists()

    def fails(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("raffia.recipes.ilql.export.save_file", fails)
    with pytest.raises(OSError, match="disk full"):
        export(tmp_path / "run", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full", "run"]


def test_runs_that_cannot_be_exported_are_refused(tmp_path):
    rotary = ILQLRun(model=ILQLModelConfig(trunk=replace(SMALL, positions="rotary")))
    for name, config, message in (
        ("rotary", rotary, r"rotary positions.*--model.trunk.positions learned"),
        ("efficientzero", EfficientZeroRun(), "is a run of efficientzero"),
        ("fresh", SMOKE, "has no checkpoint yet"),
    ):
        create_run(tmp_path / name, config)
        with pytest.raises(RunError, match=message):
            export(tmp_path / name, tmp_path / "out")


def test_a_damaged_export_is_refused(tmp_path):
    run_of(tmp_path / "run")
    out = export(tmp_path / "run", tmp_path / "out").folder
    (out / "value_heads.safetensors").rename(tmp_path / "away")
    with pytest.raises(DamagedFileError, match="value_heads.* is missing: restore it"):
        load_exported(out)
    path = out / "raffia_ilql.json"
    path.write_text(path.read_text().replace('"temperature"', '"heat"'))
    words = "raffia_ilql.json: it is damaged, or from another release"
    with pytest.raises(ValueError, match=words):
        load_exported(out)
