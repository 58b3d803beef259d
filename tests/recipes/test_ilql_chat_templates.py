"""Runs of ILQL in the format of a chat model: its tokens, its template, exactly resumed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raffia.lm import ChatTokenizer
from raffia.lm.data.dialogue_rows import Dialogue
from raffia.recipes.ilql import load_agent, resume, train, with_sizes
from raffia.recipes.ilql.chat import Chat
from raffia.recipes.ilql.config import DialogueDataConfig, ILQLRun, LoRAConfig
from raffia.recipes.ilql.data import describe_template
from raffia.recipes.ilql.export import export, load_exported
from raffia.train import RunError
from tests.lm.chat_models import write_tokenizer
from tests.recipes.ilql_runs import last, of_file, with_trunk, write_chats
from tests.recipes.runs import Quiet, same, terminate

transformers = pytest.importorskip("transformers")

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say 3"}]
DIALOGUE = Dialogue([(m["content"], None) for m in MESSAGES], False, [m["role"] for m in MESSAGES])


@pytest.fixture(scope="module")
def models_folder(tmp_path_factory):
    """Small Llamas with tokenizers like ChatML's and Llama 2's, and dialogues."""
    folder = tmp_path_factory.mktemp("chat")
    write_chats(folder / "chats.jsonl")
    for kind in ("chatml", "llama-2"):
        home = write_tokenizer(folder / kind, kind)
        torch.manual_seed(0)
        size = {"vocab_size": ChatTokenizer(home).num_tokens, "hidden_size": 16}
        size |= {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20}
        config = transformers.LlamaConfig(**size, max_position_embeddings=96)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(home)
    return folder


def config_of(models_folder, kind="chatml", **changes):
    config = of_file(str(models_folder / "chats.jsonl"), str(models_folder / kind), **changes)
    data = replace(config.data, chat_template=True)
    return with_sizes(replace(config, data=data))


def test_a_run_in_the_model_s_format_adds_no_token_and_resumes_without_the_model_s_folder(
    models_folder, tmp_path
):
    config = config_of(models_folder, lora=LoRAConfig(rank=2))
    num_tokens = ChatTokenizer(models_folder / "chatml").num_tokens
    assert (config.model.trunk.vocab_size, config.lora.learn_embeddings) == (num_tokens, False)
    uninterrupted, folder = tmp_path / "straight", tmp_path / "run"
    messages = Quiet()
    assert train(config, uninterrupted, view=messages).reason == "finished"
    train(config, folder, view=Quiet({3: terminate}))
    with pytest.raises(RunError, match="chat_template"):
        resume(folder, config=replace(config, data=replace(config.data, chat_template=False)))
    model_folder = Path(config.language_model)
    model_folder.rename(tmp_path / "elsewhere")
    try:
        assert resume(folder, view=Quiet()).reason == "finished"
        agent = load_agent(folder)
    finally:
        (tmp_path / "elsewhere").rename(model_folder)
    assert same(last(folder).tensors("state"), last(uninterrupted).tensors("state"))
    their = transformers.AutoTokenizer.from_pretrained(models_folder / "chatml")
    prompt = their.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert agent.prompt(DIALOGUE) == prompt
    path = folder / "tokenizer" / "raffia_tokenizer.json"
    assert "add_generation_prompt" in json.loads(path.read_text())["chat_template"]
    assert describe_template(config, agent.tokenizer) == ""


@pytest.mark.parametrize("kind", ["chatml", pytest.param("llama-2", marks=pytest.mark.slow)])
def test_generation_stops_at_the_end_of_a_turn_and_chats_exceed_the_context(
    kind, models_folder, tmp_path
):
    config = with_trunk(config_of(models_folder, kind, num_updates=80, batch_size=8), dropout=0.0)
    optimizer = replace(config.optimizer, learning_rate=0.02)
    decode = replace(config.decode, include_adv=False, num_beams=1)
    config = replace(config, optimizer=optimizer, decode=decode)
    train(config, tmp_path / "run", view=Quiet())
    agent = load_agent(tmp_path / "run", "newest")
    answer = agent.answer([DIALOGUE]).best()[0]
    assert answer[-1] == agent.tokenizer.eoa_token_id and len(answer) < 24
    chat, end = Chat(agent), agent.tokenizer.id_to_token(agent.tokenizer.eoa_token_id)
    while not chat.num_forgotten:  # until the context is full
        chat.send("say 3")
        pieces = list(chat.answer())
        assert pieces[-1].name == end or chat.cut
        assert end not in chat.utterances[-1][0] and len(chat.utterances) < 25


def test_an_export_keeps_the_template(models_folder, tmp_path):
    train(config_of(models_folder, num_updates=1), tmp_path / "run", view=Quiet())
    out = export(tmp_path / "run", tmp_path / "out", "newest").folder
    agent = load_exported(out)
    their = transformers.AutoTokenizer.from_pretrained(out)
    prompt = their.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert agent.prompt(DIALOGUE) == prompt == load_agent(tmp_path / "run").prompt(DIALOGUE)
    generation = json.loads((out / "generation_config.json").read_text())
    assert their.convert_ids_to_tokens(generation["eos_token_id"]) == "<|im_end|>"
    card = (out / "README.md").read_text()
    assert "by the chat template of the model" in card and "apply_chat_template(" in card
    assert "</eod>" not in card
    assert isinstance(agent.tokenizer, ChatTokenizer)
    again = replace(of_file(str(models_folder / "chats.jsonl"), str(out)), num_updates=1)
    assert with_sizes(again).model.trunk.vocab_size == agent.tokenizer.num_tokens


def test_errors_name_the_settings_that_fix_them(models_folder, tmp_path):
    words = "chat_template=True needs the tokenizer of a Hugging Face model"
    with pytest.raises(ValueError, match=words):
        ILQLRun(task="data", data=DialogueDataConfig(chat_template=True))
    with pytest.raises(ValueError, match=words):
        DialogueDataConfig(chat_template=True, tokenizer="words")
    bare = write_tokenizer(tmp_path / "bare", None)
    config = config_of(models_folder)
    for folder, message in ((bare, "has no chat template"), (tmp_path / "no", "does not exist")):
        data = replace(config.data, tokenizer=str(folder))
        with pytest.raises(RunError, match=message):
            with_sizes(replace(config, data=data))
    (bare / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    data = replace(config.data, tokenizer=str(bare))
    with pytest.raises(RunError, match=r"chat template of .*bare .*--data.no_chat_template"):
        with_sizes(replace(config, data=data))
