"""Short runs of ILQL: files, refusals, evaluation, and learning from dialogue files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raffia.algorithms.ilql import method
from raffia.algorithms.ilql.config import DecodeConfig, TrunkConfig
from raffia.lm import CausalLM, save_gpt2
from raffia.lm.envs.wordle import WordleObservation
from raffia.recipes import efficientzero, read_run
from raffia.recipes.ilql import (
    ILQL_PRESETS,
    ILQLRun,
    evaluate,
    load_agent,
    resume,
    train,
    with_sizes,
)
from raffia.recipes.ilql.config import DialogueDataConfig, ILQLEvaluateConfig, WordleConfig
from raffia.recipes.ilql.data import make_corpus, play_games
from raffia.recipes.ilql.presets import ILQL_SUMMARIES
from raffia.train import Checkpoints, RunError
from tests.recipes.ilql_runs import OpenDialogue, brief, last, write_chats
from tests.recipes.runs import Quiet, refused, rows, short, terminate, with_all
from tests.recipes.test_resumes import assert_same_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder, statuses = tmp_path_factory.mktemp("straight") / "run", []

    class RecordingView(Quiet):
        def show(self, status):
            statuses.append(status)

    result = train(brief(), folder, view=RecordingView(), preset="ilql-smoke")
    assert (result.reason, result.update, result.env_step) == ("finished", 12, None)
    assert result.mean_return is not None
    assert statuses[-1].title == "ILQL on wordle, seed 0"
    assert {(status.env_step, status.num_env_steps) for status in statuses} == {(None, None)}
    assert statuses[-1].env_steps_per_second is None and statuses[-1].evaluated_return is not None
    return folder


def test_a_run_writes_its_files_without_environment_steps(finished):
    names = {path.name for path in finished.iterdir()}
    assert {"config.json", "metrics.jsonl", "checkpoints", "tokenizer"} <= names
    assert not names & {"replay", "trees", "tokens"} and read_run(finished) == brief()
    assert json.loads((finished / "config.json").read_text())["run"]["algorithm"] == "ilql"
    text = (finished / "metrics.jsonl").read_text()
    assert "env_step" not in text and "simulations" not in text
    _, row = rows(finished, "train")  # after 10 updates, and at the end
    names = ("loss", "q_loss", "v_loss", "token_loss", "advantage_mean", "learning_rate")
    assert all(isinstance(row[name], float) for name in names)
    *_, row = evaluations = rows(finished, "evaluate")
    assert [row["update"] for row in evaluations] == [4, 8, 12]
    assert list(row["decodings"]) == ["decode", "adv_weight=0"]
    assert row["mean_return"] == row["decodings"]["decode"]["mean_return"]
    assert len(row["returns"]) == 6 and all(-6 <= r <= 0 for r in row["returns"])
    assert row["low"] <= row["mean_return"] <= row["high"] and 0 <= row["share_won"] <= 1


def test_micro_batches_make_the_same_update(tmp_path):
    games = WordleConfig(num_words=12, num_games=8)  # all in one batch: some short, some long
    config = with_all(brief(num_updates=2, wordle=games), model__trunk__dropout=0.0)
    for num in (4, 1):
        train(with_all(config, num_micro_batches=num), tmp_path / f"{num}", view=Quiet())
    one, other = (last(tmp_path / name).tensors("state")["params"] for name in ("4", "1"))
    for key in one.keys(True, True):
        torch.testing.assert_close(one[key], other[key], atol=1e-5, rtol=1e-4)


def test_changes_of_learning_settings_are_refused_at_a_resume(tmp_path):
    folder = tmp_path / "run"
    train(brief(num_updates=5), folder, view=Quiet())
    for name, value in (("loss__tau", 0.9), ("batch_size", 4), ("seed", 1)):
        message = f"{name.replace('__', '.')} cannot be .* Only num_updates, .* can be changed"
        with pytest.raises(RunError, match=message):
            resume(folder, config=with_all(brief(), **{name: value}), view=Quiet())
    assert read_run(folder) == brief(num_updates=5)
    other = brief(num_updates=7, decode=DecodeConfig(num_beams=1))
    assert resume(folder, config=other, view=Quiet()).update == 7
    assert read_run(folder) == other
    changed = replace(other, num_updates=9, decode=DecodeConfig(adv_weight=3.0, temperature=0.5))
    resume(folder, config=changed, view=Quiet())
    assert load_agent(folder, "newest").config == replace(changed.decode, max_new_tokens=2)
    [row] = [row for row in rows(folder, "evaluate") if row["update"] == 9]
    again = evaluate(folder, episodes=6, checkpoint="newest", seed=1)
    explicit = evaluate(folder, episodes=6, checkpoint="newest", seed=1, decode=changed.decode)
    assert again.games == explicit.games and len(row["returns"]) == 6


def test_a_run_of_another_algorithm_is_refused(finished, tmp_path):
    with pytest.raises(RunError, match=r"is a run of ilql: the functions of raffia.recipes "):
        efficientzero.load_agent(finished)
    efficientzero.train(short(60), tmp_path / "other", view=Quiet())
    with pytest.raises(RunError, match="is a run of efficientzero"):
        load_agent(tmp_path / "other")
    file = tmp_path / "other" / "config.json"
    file.write_text(file.read_text().replace('"efficientzero"', '"ilqll"'))
    with pytest.raises(RunError, match="algorithm 'ilqll', .*did you mean ilql"):
        read_run(tmp_path / "other")


def test_an_agent_answers_and_evaluations_repeat(finished, monkeypatch):
    agent = load_agent(finished)
    observations = [WordleObservation(), WordleObservation((("crane", "bbbbb"),))]
    assert [type(text) for text in agent.act_batch(observations)] == [str, str]
    greedy = load_agent(finished, "newest", decode=DecodeConfig(num_beams=1))
    assert greedy.act(observations[0]) == greedy.act(observations[0])
    first, again = (evaluate(finished, episodes=5, seed=3) for _ in range(2))
    assert first == again and len(first.games["decode"].returns) == 5
    with pytest.raises(RunError, match="has no checkpoint '999'"):
        load_agent(finished, "999")
    with pytest.raises(RunError, match="device='gpu' cannot be used"):
        evaluate(finished, device="gpu")
    monkeypatch.setattr("raffia.recipes.ilql.api.require_device", lambda name: None)
    assert load_agent(finished, device="meta").agent.model.v[0].weight.is_meta


def test_train_fills_in_sizes_and_refuses_others_without_a_folder(tmp_path):
    config = brief(wordle=WordleConfig(num_words=13, num_games=100), num_updates=1)
    assert config.model.trunk.vocab_size == 262
    train(config, tmp_path / "filled", view=Quiet())
    assert read_run(tmp_path / "filled").model.trunk.vocab_size == 263
    longer = replace(config, num_updates=2)
    assert resume(tmp_path / "filled", config=longer, view=Quiet()).update == 2
    letters = with_sizes(brief(wordle=WordleConfig(num_words=12, layout="letters")))
    refused(letters, tmp_path, "block_size=32 .* longest game has 79 tokens: set it to 79")


def test_games_by_letters_and_of_all_kinds(tmp_path):
    config = brief(wordle=WordleConfig(num_words=8, num_games=60, layout="letters"), num_updates=2)
    config = with_sizes(with_all(config, model__trunk__block_size=80))
    train(config, tmp_path / "run", view=Quiet())
    assert len(rows(tmp_path / "run", "evaluate")[-1]["returns"]) == 6
    names = {game.policy for game in play_games(WordleConfig(num_games=200))}
    assert names == {"expert", "fair", "random", "wrong", "stuck", "non_word"}
    assert len(play_games(WordleConfig(num_words=10, games="branching"))) == 70


def test_filtered_cloning_learns_from_the_best_games_alone(tmp_path):
    config = brief(evaluate=ILQLEvaluateConfig(every_updates=10, num_episodes=4))
    filtered = method("filtered_bc", config)
    full, best = (make_corpus(c, None).learnt for c in (config, filtered))
    assert (len(full), len(best)) == (200, 20)
    assert best.statistics().mean_return > full.statistics().mean_return + 1
    train(replace(filtered, num_updates=2), tmp_path / "run", view=Quiet())
    assert "q_loss" not in rows(tmp_path / "run", "train")[-1]


def test_presets_have_summaries_and_consistent_settings():
    assert ILQL_PRESETS.keys() == ILQL_SUMMARIES.keys()
    for name, config in ILQL_PRESETS.items():
        if config.task == "wordle":
            assert with_sizes(config) == config, name
    assert TrunkConfig().vocab_size == ILQLRun().model.trunk.vocab_size


# -- files


@pytest.fixture
def chats(tmp_path):
    """Two files, of 30 dialogues and of 10."""
    numbers = {"one": range(30), "two": range(30, 40)}
    return tuple(write_chats(tmp_path / f"{name}.jsonl", ns) for name, ns in numbers.items())


def of_chats(chats, **changes) -> ILQLRun:
    evaluate = ILQLEvaluateConfig(every_updates=5, num_episodes=7, batch_size=3)
    data = DialogueDataConfig(files=chats, held_out=0.2)
    return with_sizes(brief(**{"task": "data", "data": data, "evaluate": evaluate, **changes}))


def test_runs_on_files_hold_out_rows_and_refuse_changed_files(chats, tmp_path):
    config = of_chats(chats)
    uninterrupted, folder = tmp_path / "straight", tmp_path / "run"
    result = train(config, uninterrupted, view=Quiet())
    assert (result.reason, result.mean_return, result.best_return) == ("finished", None, None)
    corpus = make_corpus(config, uninterrupted)
    assert (len(corpus.learnt), len(corpus.held_out)) == (32, 8)
    assert corpus.learnt.origin == "folder" and corpus.held_out.origin == "folder"
    assert not set(corpus.learnt.rows) & set(corpus.held_out.rows)
    *_, row = evaluated = rows(uninterrupted, "evaluate")
    names = ("loss", "token_loss", "q_loss", "v_mean", "q_mean", "advantage_mean")
    assert all(isinstance(row[name], float) for name in names) and "mean_return" not in row
    best = Checkpoints(uninterrupted / "checkpoints").best()
    assert best.score == max(row["score"] for row in evaluated)
    assert isinstance(load_agent(uninterrupted).act(OpenDialogue()), str)
    train(config, folder, view=Quiet({7: terminate}))
    before = Path(chats[1]).read_text()
    Path(chats[1]).write_text(2 * before)
    with pytest.raises(RunError, match="was trained on other rows than the present ones"):
        resume(folder, view=Quiet())
    Path(chats[1]).write_text(before)
    resume(folder, view=Quiet())
    assert_same_run(uninterrupted, folder)


@pytest.mark.slow
def test_losses_of_held_out_rows_do_not_depend_on_how_they_are_batched(chats, tmp_path):
    train(of_chats(chats, num_updates=3), tmp_path / "run", view=Quiet())
    found = evaluate(tmp_path / "run", episodes=8).held_out
    with torch.inference_mode(), torch.autocast("cpu"):
        assert evaluate(tmp_path / "run", episodes=8).held_out == found
    path = tmp_path / "run" / "config.json"
    data = json.loads(path.read_text())
    data["evaluate"]["batch_size"] = 8
    path.write_text(json.dumps(data))
    assert evaluate(tmp_path / "run", episodes=8).held_out == pytest.approx(found, rel=1e-5)


def test_whole_utterances_as_actions(chats, tmp_path):
    config = of_chats(chats, num_updates=3, decode=DecodeConfig(include_adv=False))
    config = with_all(config, loss__cql_weight=0.0, model__per_token=False)
    train(config, tmp_path / "run", view=Quiet())
    assert rows(tmp_path / "run", "evaluate")[-1]["q_loss"] > 0


def test_wrong_files_are_refused_and_leave_no_folder(chats, tmp_path):
    config = of_chats(chats)
    with open(chats[1], "a") as file:
        file.write('{"messages": [{"role": "robot", "content": "hi"}]}\n')
    for files, words, error in (
        (chats, "two.jsonl: line 11", ValueError),
        ((), "data.files is empty, .* nothing to learn from: give --data.files", RunError),
        (("gone.jsonl",), "gone.jsonl", FileNotFoundError),
    ):
        refused(with_all(config, data__files=files), tmp_path, words, error)
    skips = with_all(config, data__malformed="skip", num_updates=1)
    assert train(skips, tmp_path / "run", view=Quiet()).update == 1


def test_a_run_starts_from_a_language_model(chats, tmp_path):
    torch.manual_seed(0)
    theirs = CausalLM(12, n_layer=1, n_head=2, n_embd=8, block_size=40)
    save_gpt2(tmp_path / "gpt", theirs.settings(), theirs.state_dict())
    data = DialogueDataConfig(files=chats, held_out=0.2, tokenizer="characters")
    config = of_chats(chats, language_model=str(tmp_path / "gpt"), data=data, num_updates=1)
    trunk = config.model.trunk
    assert (trunk.n_embd, trunk.block_size, trunk.dropout) == (8, 40, 0.1)
    frozen = with_all(config, optimizer__learning_rate=0.0)
    train(frozen, tmp_path / "run", view=Quiet({1: terminate}))
    state = last(tmp_path / "run").tensors("state")
    for name, tensor in theirs.state_dict().items():
        assert state[("params", "trunk", *name.split("."))][: len(tensor)].equal(tensor), name
    (tmp_path / "gpt").rename(tmp_path / "moved")  # it is in the checkpoint now
    longer = replace(frozen, num_updates=2)
    assert resume(tmp_path / "run", config=longer, view=Quiet()).update == 2
