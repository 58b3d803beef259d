"""Effects of a run's settings from the command line, and errors for bad input."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from raffia.algorithms.ilql import ILQLLearner
from raffia.algorithms.ilql.config import TrunkConfig
from raffia.cli import main
from raffia.functional import global_norm
from raffia.lm import DialogueDataset, character_tokenizer
from raffia.lm.data.dialogue import DataPoint, Vocabulary
from raffia.recipes import read_run
from raffia.recipes.ilql import ILQL_PRESETS, resume, train, with_sizes
from raffia.recipes.ilql.data import make_corpus
from raffia.recipes.ilql.networks import with_threads
from raffia.train import RunError
from tests.recipes.ilql_runs import (
    last,
    of_file,
    with_trunk,
    write_chats,
    write_model,
    write_tokenizer,
)
from tests.recipes.runs import Quiet, same, terminate

SMOKE = "train ilql --preset ilql-smoke --num_updates 2 --batch_size 8 --evaluate.num_episodes 2"
TRUNK = "--model.trunk.n_layer 1 --model.trunk.n_embd 8 --model.trunk.n_head 2"


def params_after(args, folder):
    """The parameters after training a run."""
    assert main(f"{SMOKE} {args} --run {folder}".split()) == 0
    return last(Path(folder)).tensors("state")["params"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return params_after("", tmp_path_factory.mktemp("plain") / "run")


SAVINGS = [
    "--model.trunk.gradient_checkpointing",
    "--num_micro_batches 2 --model.trunk.gradient_checkpointing --optimizer.max_grad_norm 1e6",
    "--precision bfloat16",
    pytest.param("--compile", marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler, about torch
@pytest.mark.parametrize("args", SAVINGS)
def test_settings_that_save_memory_or_time_give_the_same_weights(args, plain, here):
    torch.compiler.reset()
    found = params_after(args, here / "run")
    if "bfloat16" in args:  # close, but not equal
        assert 0 < relative_distance(found, plain) < 0.01
        assert {tensor.dtype for tensor in found.values(True, True)} == {torch.float32}
    elif "max_grad_norm" in args:  # the gradients of these first updates are longer than 1
        assert relative_distance(found, plain) > 0
    else:
        assert_close(dict(found.items(True, True)), dict(plain.items(True, True)), **NEAR)


NEAR = {"rtol": 1e-3, "atol": 2e-5}


def relative_distance(one, other) -> float:
    return float(global_norm(one - other) / global_norm(other))


def test_dropout_of_a_separate_policy_is_reproducible_and_differs_by_row(here):
    config = of_file(write_chats(here / "chats.jsonl"), num_micro_batches=2)
    config = with_trunk(config, dropout=0.2)
    config = with_sizes(replace(config, model=replace(config.model, policy="separate")))
    train(config, here / "straight", view=Quiet())
    state = torch.get_rng_state()
    train(config, here / "run", view=Quiet({3: terminate}))
    resume(here / "run", view=Quiet())
    assert same(last(here / "run").tensors("state"), last(here / "straight").tensors("state"))
    assert torch.equal(torch.get_rng_state(), state)
    learner = ILQLLearner(config)
    batch = make_corpus(config, None).learnt.take(torch.tensor([3]).numpy())
    other = batch.copy().set("index", batch["index"] + 1)
    state, three = learner.init(0), (batch, batch, other)
    first, again, elsewhere = (learner.grads(state, each)[1]["loss"] for each in three)
    assert first == again != elsewhere


# -- files that change, files that are wrong


def test_changed_text_of_the_same_length_and_reward_is_noticed(here):
    data = Path(write_chats(here / "chats.jsonl"))
    config = with_sizes(of_file(str(data)))
    train(config, here / "run", view=Quiet({3: terminate}))
    data.write_text(data.read_text().replace('"3 ', '"4 '))
    with pytest.raises(RunError, match="was trained on other rows than the present ones"):
        resume(here / "run", view=Quiet())
    write_chats(data)
    assert resume(here / "run", view=Quiet()).reason == "finished"
    inside, on_disk = (make_corpus(config, folder) for folder in (None, here / "run"))
    assert inside.learnt.store.checksum == on_disk.learnt.store.checksum
    assert inside.digest() == on_disk.digest()


def write(name, *rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def dialogue_of(answer, *rewards):
    return {"utterances": ["say 1", answer], "rewards": [*rewards]}


BAD = {
    "ids": [{"tokens": [1, 99], "action_idxs": [0], "rewards": [1.0]}] * 3,
    "long": [dialogue_of("1 " * 30, None, 1.0)] * 3,
    "rewards": [dialogue_of("1", 1.0)] * 3,
    "one": [dialogue_of("1", None, 1.0)],
    "unpaid": [dialogue_of("1", None, 0.0)] * 3,
    "silent": [{"messages": [{"role": "user", "content": "say"}]}] * 3,
    "bots": [{"messages": [{"role": "bot", "content": "say"}]}] * 3,
    "scored": [{"chat": [{"role": "agent", "content": "1"}], "score": 1}] * 3,
}
WRONG = {  # wrong arguments, and the error message
    "ids.jsonl --data.tokenizer characters_": r"line 1: token 1 of the row is 99, .*, 0\.\.19",
    "ids.jsonl": "so their tokenizer must be given: --data.tokenizer FOLDER",
    "long.jsonl --model.trunk.block_size 24": "it has 69 tokens, more .* 24.*--data.max_len, ",
    "long.jsonl --language_model gpt2": "it has 36 tokens, more than the 24 of the context",
    "chats.jsonl --model.trunk.block_size 24 --data.max_len 30": "max_len=30 exceeds .* of 24 t",
    "rewards.jsonl": "line 1, 'rewards': there are 1 .* 2 utterances.*--data.malformed skip lea",
    "chats.jsonl --data.tokenizer gpt2": r"has no token <\|pad\|>.*--data.add_special_tokens",
    "chats.jsonl --language_model gone": "no folder /.*holds config.json and model",
    "chats.jsonl --language_model empty": "has no config.json.*copy it there",
    "chats.jsonl --language_model bare": "has no model.safetensors.*copy it there",
    "chats.jsonl --language_model mute": "the folder has no tokenizer.json. With transformers",
    "chats.jsonl --language_model torn": r"no tensor 'h.2\..*belong to different models",
    "chats.jsonl --data.tokenizer gone": "does not exist: give the folder of a tokenizer",
    "one.jsonl": "1 row cannot be split.*give 2 or more",
    "unpaid.jsonl": "none of the 3 .* a reward other than 0.*--data.columns score=reward",
    "silent.jsonl": "no message is the agent's.*--data.roles bot=agent",
    "long.jsonl --data.too_long cut --data.max_len 7": "all .* cut after 7 .* --data.max_len 8",
    "long.jsonl --data.too_long cut --data.max_len 8": "other than 0 in its first 8 tokens",
    "bots.jsonl": "'bot', but known roles are.*--data.roles bot=agent caller=environment",
    "scored.jsonl": r"it has \['chat', 'score'\].*--data.columns chat=messages",
    "bots.jsonl --data.roles bot": "roles: 'bot' is not NAME=MEANING",
    "bots.jsonl --data.roles bot=me": "must end in =agent or =environment",
    "chats.jsonl --preset wordle --evaluate.adv_weights 1": r"adv_weights=\(1.0,\) needs games",
}


def test_errors_name_the_fix(here, capsys):
    for name, rows in BAD.items():
        write(f"{name}.jsonl", *rows)
    write_chats(here / "chats.jsonl")
    character_tokenizer(["0123456789 say"]).save("characters_")
    write_model(here / "gpt2", "gpt2")
    break_models(here)
    for args, message in WRONG.items():
        sizes = "" if "--language_model " in args else TRUNK
        command = f"train ilql --data {args} {sizes} --num_updates 1 --batch_size 2"
        assert main(command.split()) in (1, 2), args
        error = " ".join(capsys.readouterr().err.split())
        assert error.startswith("error: ") and "Traceback" not in error
        assert re.search(message, error), error
        assert not Path("runs").exists() or not list(Path("runs").iterdir())


def break_models(here):
    """Make models with missing or damaged files."""
    for name in ("empty", "bare", "mute", "torn"):
        (here / name).mkdir()
    complete, config = here / "gpt2", (here / "gpt2" / "config.json").read_text()
    (here / "bare" / "config.json").write_text(config)
    for name in ("mute", "torn"):
        (here / name / "config.json").write_text(config)
        shutil.copy(complete / "model.safetensors", here / name)
    write_tokenizer(here / "torn")
    more = json.loads(config) | {"n_layer": 3}
    (here / "torn" / "config.json").write_text(json.dumps(more))


SMALL = f"{TRUNK} --num_updates 1 --batch_size 2 --evaluate.num_episodes 2 --run runs/a"


def test_other_names_and_roles_need_no_python(here, capsys):
    """The row's reward, renamed, is that of the last answer; `tokens` is ignored."""
    rows = []
    for n in range(8):
        messages = {"caller": f"say {n}", "bot": str(n)}
        chat = [{"role": role, "content": text} for role, text in messages.items()]
        rows.append({"chat": chat, "score": float(n % 2), "tokens": "many"})
    write("calls.jsonl", *rows)
    names = "--data.columns chat=messages score=reward tokens= --data.roles bot=agent caller="
    assert main(f"train ilql --data calls.jsonl {names}environment {SMALL}".split()) == 0
    corpus = make_corpus(read_run("runs/a"), None)
    found = [*corpus.learnt, *corpus.held_out]
    assert sorted(point.episode_return for point in found) == [0.0] * 4 + [1.0] * 4
    assert {len(point.utterance_rewards) for point in found} == {1}


def test_a_preset_of_games_takes_a_file_and_describes_it_at_the_start(here, capsys):
    """Without settings that only games have; the number of threads is stored in the run."""
    write_chats(here / "chats.jsonl")
    assert main(f"train ilql --preset wordle --data chats.jsonl {SMALL}".split()) == 0
    config = read_run("runs/a")
    assert (config.task, config.evaluate.adv_weights, config.num_threads) == ("data", (), 1)
    output = " ".join(capsys.readouterr().out.split())
    corpus = make_corpus(config, None)
    statistics = corpus.learnt.statistics()
    counts = f"{len(corpus.learnt)} dialogues, {statistics.num_utterances} answers, "
    assert f"learning from {counts}{statistics.num_tokens:,} tokens" in output
    assert f"return {statistics.mean_return:.4g} (0 to 2)" in output
    assert f"{len(corpus.held_out)} more held out" in output
    assert main("resume runs/a --num_updates 2".split()) == 0


def test_cloning_needs_no_rewards(here, capsys):
    write("unpaid.jsonl", *[dialogue_of(str(n), None, 0.0) for n in range(6)])
    assert main(f"train ilql --data unpaid.jsonl --method bc {SMALL}".split()) == 0
    config = read_run("runs/a")
    assert (config.loss.needs_values, config.decode.include_adv) == (False, False)


def test_large_networks_have_all_threads_and_small_ones_one(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    small = ILQL_PRESETS["wordle"]
    large = with_trunk(small, n_layer=12, n_embd=512)
    for config, threads in ((small, 1), (large, 3), (replace(small, num_threads=2), 2)):
        assert with_threads(config).num_threads == threads
    assert small.num_threads == 0


def test_value_losses_do_not_change_the_policy_of_a_language_model():
    """In the preset, the policy's weights get gradients of the policy's loss only."""
    preset = ILQL_PRESETS["language-model"]
    assert preset.model.policy == "separate"
    small = TrunkConfig(vocab_size=12, n_layer=1, n_head=2, n_embd=8, block_size=16)
    config = replace(preset, model=replace(preset.model, trunk=small))
    learner = ILQLLearner(config, num_updates=3)
    state = learner.init(0)
    points = [DataPoint.from_tokens([0, 3, 1, 5, 2], [2, 3], [0.0, 1.0])]
    batch = DialogueDataset.of_points(points, Vocabulary(12)).collate(points)
    grads = []
    for weight in (1.0, 100.0):
        state["hyper", "q_weight"].fill_(weight)
        grads.append(learner.grads(state, batch)[0]["grads"])
    assert same(grads[0]["policy"], grads[1]["policy"])
    assert not same(grads[0]["trunk"], grads[1]["trunk"])
