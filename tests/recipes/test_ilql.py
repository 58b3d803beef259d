"""Whole short runs of ILQL: stopped, killed, resumed, refused, evaluated."""

import json
import random
import sys
from dataclasses import replace

import pytest
import torch

from raffia.algorithms.ilql.config import (
    DecodeConfig,
    ILQLLossConfig,
    ILQLModelConfig,
    TrunkConfig,
    method,
)
from raffia.lm.envs.wordle.game import WordleObservation
from raffia.lm.folder import save_gpt2
from raffia.lm.transformer import CausalLM
from raffia.recipes import efficientzero
from raffia.recipes.ilql import evaluate, load_agent, resume, train, with_sizes
from raffia.recipes.ilql.config import (
    DialogueDataConfig,
    ILQLEvaluateConfig,
    ILQLRun,
    ScriptsConfig,
    WordleConfig,
)
from raffia.recipes.ilql.data import make_corpus, play_games
from raffia.recipes.ilql.presets import ILQL_PRESETS, ILQL_SUMMARIES
from raffia.recipes.run_folder import read_run
from raffia.train.checkpoint import Checkpoints
from raffia.train.config import to_json
from raffia.train.experiment import RunError
from raffia.train.nan_guard import NonFiniteError
from tests.recipes.runs import Quiet, same, short, terminate
from tests.recipes.test_kills import PROGRAM, ROOT, newest_update, of_time, scalars
from tests.train.kills import run_with_kills


def brief(**changes) -> ILQLRun:
    """12 updates, saved after each 5, evaluated after each 4, with all that draws: dropout, too."""
    smoke = ILQL_PRESETS["ilql-smoke"]
    trunk = replace(smoke.model.trunk, dropout=0.1)
    return replace(
        smoke,
        **{
            "num_threads": 1,
            "model": replace(smoke.model, trunk=trunk, target="trunk"),
            "num_updates": 12,
            "batch_size": 8,
            "evaluate": ILQLEvaluateConfig(every_updates=4, num_episodes=6, adv_weights=(0.0,)),
            "checkpoint": replace(smoke.checkpoint, every_updates=5),
            **changes,
        },
    )


def rows(folder, *kinds):
    """What was written down, without the sessions and without times."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if not of_time(name)}
        for row in found
        if row["kind"] in kinds or (not kinds and row["kind"] not in ("start", "resume"))
    ]


def last(folder):
    return Checkpoints(folder / "checkpoints").newest(print)


def assert_same_run(one, other):
    left, right = last(one), last(other)
    assert left.update == right.update and left.extras["data"] == right.extras["data"]
    assert same(left.tensors("state"), right.tensors("state"))
    assert rows(one) == rows(other)
    assert scalars(one) == scalars(other)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight") / "run"
    result = train(brief(), folder, view=Quiet(), preset="ilql-smoke")
    assert (result.reason, result.update, result.env_step) == ("finished", 12, None)
    assert result.mean_return is not None
    return folder


def test_a_run_leaves_what_is_needed_and_speaks_of_no_environment_steps(straight):
    names = {path.name for path in straight.iterdir()}
    assert {"config.json", "metrics.jsonl", "checkpoints", "tokenizer"} <= names
    assert not names & {"replay", "trees", "tokens"}
    assert read_run(straight) == brief()
    assert json.loads((straight / "config.json").read_text())["run"]["algorithm"] == "ilql"
    text = (straight / "metrics.jsonl").read_text()
    assert "env_step" not in text and "simulations" not in text
    _, row = rows(straight, "train")  # after 10 updates, and at the end
    for name in ("loss", "q_loss", "v_loss", "token_loss", "advantage_mean", "learning_rate"):
        assert isinstance(row[name], float), name
    assert [row["update"] for row in rows(straight, "evaluate")] == [4, 8, 12]


def test_an_evaluation_compares_decodings(straight):
    row = rows(straight, "evaluate")[-1]
    assert list(row["decodings"]) == ["decode", "adv_weight=0"]
    assert row["mean_return"] == row["decodings"]["decode"]["mean_return"]
    assert len(row["returns"]) == 6 and all(-6 <= r <= 0 for r in row["returns"])
    assert row["low"] <= row["mean_return"] <= row["high"] and 0 <= row["share_won"] <= 1


def test_the_view_says_updates_and_no_steps(tmp_path):
    seen = []

    class Looks(Quiet):
        def show(self, status):
            seen.append(status)

    train(brief(num_updates=10), tmp_path / "run", view=Looks())
    assert seen[-1].title == "ILQL on wordle, seed 0"
    assert (
        {status.env_step for status in seen} == {status.num_env_steps for status in seen} == {None}
    )
    assert seen[-1].env_steps_per_second is None and seen[-1].evaluated_return is not None


@pytest.mark.parametrize("stops", [[1], [4, 5, 11]])
def test_a_run_that_is_stopped_and_resumed_is_the_same_run(straight, tmp_path, stops):
    folder = tmp_path / "run"
    result = train(brief(), folder, view=Quiet({stops[0]: terminate}))
    assert (result.reason, result.update, result.signal) == ("stopped", stops[0], "SIGTERM")
    for update in stops[1:]:
        assert resume(folder, view=Quiet({update: terminate})).update == update
    assert resume(folder, view=Quiet()).reason == "finished"
    assert_same_run(straight, folder)


def die():
    raise MemoryError("killed")


def test_a_run_that_dies_at_random_updates_goes_on_at_its_last_checkpoint(straight, tmp_path):
    folder, draw = tmp_path / "run", random.Random(0)
    with pytest.raises(MemoryError):
        train(brief(), folder, view=Quiet({draw.randint(1, 12): die}))
    for _ in range(2):
        start = 5 * (last(folder).update // 5) + 1 if last(folder) else 1
        with pytest.raises(MemoryError):
            resume(folder, view=Quiet({draw.randint(start, 12): die}))
    assert resume(folder, view=Quiet()).reason == "finished"
    assert_same_run(straight, folder)


def test_an_evaluation_that_is_broken_off_is_made_up_for(straight, tmp_path, monkeypatch):
    from raffia.recipes.ilql import evaluation as ilql_evaluation

    play, calls = ilql_evaluation.play, []

    def stopped(*args, **kwargs):
        calls.append(0)
        if len(calls) == 3:  # the first decoding after update 8
            terminate()
        return play(*args, **kwargs)

    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(ilql_evaluation, "play", stopped)
        result = train(brief(), folder, view=Quiet())
    assert (result.reason, result.update) == ("stopped", 8)
    assert [row["update"] for row in rows(folder, "evaluate")] == [4]
    assert resume(folder, view=Quiet()).reason == "finished"
    assert_same_run(straight, folder)


def test_parts_of_a_batch_make_the_same_update(straight, tmp_path):
    games = WordleConfig(num_words=12, num_games=8)  # all in one batch: some short, some long
    config = brief(num_micro_batches=4, num_updates=2, wordle=games)
    config = replace(
        config, model=replace(config.model, trunk=replace(config.model.trunk, dropout=0.0))
    )
    train(config, tmp_path / "parts", view=Quiet())
    train(replace(config, num_micro_batches=1), tmp_path / "whole", view=Quiet())
    one, other = (last(tmp_path / name).tensors("state")["params"] for name in ("parts", "whole"))
    for key in one.keys(True, True):
        torch.testing.assert_close(one[key], other[key], atol=1e-5, rtol=1e-4)


def test_nan_stops_the_run_before_it_is_saved(tmp_path):
    config = brief()
    config = replace(config, optimizer=replace(config.optimizer, learning_rate=1e30))
    with pytest.raises(NonFiniteError, match="update 2 is not finite: .*Nothing of it was saved"):
        train(config, tmp_path / "run", view=Quiet())
    assert (tmp_path / "run" / "nan_dump").exists() and last(tmp_path / "run") is None


def test_a_run_ends_at_its_target(tmp_path):
    config = brief()
    config = replace(config, evaluate=replace(config.evaluate, target_return=-6.0))
    result = train(config, tmp_path / "run", view=Quiet())
    assert (result.reason, result.update) == ("target", 4)


def test_settings_that_shaped_what_was_learnt_are_refused(tmp_path):
    folder = tmp_path / "run"
    train(brief(num_updates=5), folder, view=Quiet())
    config = brief()
    for other, name in [
        (replace(config, loss=replace(config.loss, tau=0.9)), "loss.tau"),
        (replace(config, batch_size=4), "batch_size"),
        (replace(config, seed=1), "seed"),
    ]:
        with pytest.raises(RunError, match=f"{name}: .* only num_updates, .* may change"):
            resume(folder, config=other, view=Quiet())
    assert read_run(folder) == brief(num_updates=5)
    other = brief(num_updates=7, decode=DecodeConfig(num_beams=1))
    assert resume(folder, config=other, view=Quiet()).update == 7
    assert read_run(folder) == other


def test_a_run_of_another_algorithm_is_named(straight, tmp_path):
    for call in (efficientzero.resume, efficientzero.load_agent):
        with pytest.raises(RunError, match=r"is a run of ilql: use the functions of .*\.ilql"):
            call(straight)
    efficientzero.train(short(60), tmp_path / "other", view=Quiet())
    with pytest.raises(RunError, match="is a run of efficientzero"):
        resume(tmp_path / "other", view=Quiet())
    file = tmp_path / "other" / "config.json"
    file.write_text(file.read_text().replace('"efficientzero"', '"ilqll"'))
    with pytest.raises(RunError, match="algorithm 'ilqll', .*did you mean ilql"):
        read_run(tmp_path / "other")


def test_an_agent_speaks_and_is_evaluated_alike_each_time(straight):
    agent = load_agent(straight)
    seen = [WordleObservation(), WordleObservation((("crane", "bbbbb"),))]
    assert [type(text) for text in agent.act_batch(seen)] == [str, str]
    greedy = load_agent(straight, "newest", decode=DecodeConfig(num_beams=1))
    assert greedy.act(seen[0]) == greedy.act(seen[0])
    first, again = (evaluate(straight, episodes=5, seed=3) for _ in range(2))
    assert first == again and len(first.games["decode"].returns) == 5
    with pytest.raises(RunError, match="has no checkpoint '999'"):
        load_agent(straight, "999")


def test_sizes_that_do_not_fit_are_refused_and_leave_no_folder(tmp_path):
    config = brief(wordle=WordleConfig(num_words=13, num_games=100))
    with pytest.raises(RunError, match="vocab_size=262, and there are 263 tokens: set it to 263"):
        train(config, tmp_path / "run", view=Quiet())
    assert not (tmp_path / "run").exists()
    assert with_sizes(config).model.trunk.vocab_size == 263
    letters = with_sizes(brief(wordle=WordleConfig(num_words=12, layout="letters")))
    with pytest.raises(ValueError, match="more than the 32 of the context"):
        train(letters, tmp_path / "run", view=Quiet())
    with pytest.raises(ValueError, match="this agent learns none: set decode.include_adv=False"):
        brief(loss=ILQLLossConfig(v_weight=0, q_weight=0, cql_weight=0))
    with pytest.raises(ValueError, match="can't be cut into num_micro_batches=3"):
        brief(num_micro_batches=3)


def test_games_by_letters_and_of_all_kinds(tmp_path):
    config = brief(wordle=WordleConfig(num_words=8, num_games=60, layout="letters"), num_updates=2)
    trunk = replace(config.model.trunk, block_size=80)
    config = with_sizes(replace(config, model=replace(config.model, trunk=trunk)))
    train(config, tmp_path / "run", view=Quiet())
    assert len(rows(tmp_path / "run", "evaluate")[-1]["returns"]) == 6
    names = {game.policy for game in play_games(WordleConfig(num_games=200))}
    assert names == {"expert", "fair", "random", "wrong", "stuck", "non_word"}
    branching = play_games(WordleConfig(num_words=10, games="branching"))
    assert len(branching) == 70
    with pytest.raises(ValueError, match="nobody plays"):
        ScriptsConfig(expert=0, fair=0, random=0, wrong=0, stuck=0, non_word=0)


def test_filtered_cloning_learns_from_the_best_games_alone(tmp_path):
    config = replace(brief(), evaluate=ILQLEvaluateConfig(every_updates=10, num_episodes=4))
    filtered = method("filtered_bc", config)
    whole, best = (make_corpus(c, None).learnt for c in (config, filtered))
    assert (len(whole), len(best)) == (200, 20)
    assert best.statistics().mean_return > whole.statistics().mean_return + 1
    train(replace(filtered, num_updates=2), tmp_path / "run", view=Quiet())
    assert "q_loss" not in rows(tmp_path / "run", "train")[-1]


# -- files


def chat(number, text):
    return {
        "messages": [
            {"role": "user", "content": f"say {number}"},
            {"role": "assistant", "content": text, "reward": float(number % 3)},
        ]
    }


@pytest.fixture
def chats(tmp_path):
    """Two files, of 30 dialogues and of 10."""
    paths = []
    for name, numbers in (("one", range(30)), ("two", range(30, 40))):
        paths.append(tmp_path / f"{name}.jsonl")
        lines = [
            json.dumps(chat(number, f"{number % 7} " * (number % 4 + 1))) for number in numbers
        ]
        paths[-1].write_text("\n".join(lines) + "\n")
    return tuple(map(str, paths))


def of_chats(chats, **changes) -> ILQLRun:
    config = brief(
        **{
            "task": "data",
            "data": DialogueDataConfig(files=chats, held_out=0.2),
            "evaluate": ILQLEvaluateConfig(every_updates=5, num_episodes=7, batch_size=3),
            **changes,
        }
    )
    return with_sizes(config)


def test_files_are_learnt_from_and_some_rows_held_out(chats, tmp_path):
    config = of_chats(chats)
    straight, folder = tmp_path / "straight", tmp_path / "run"
    result = train(config, straight, view=Quiet())
    assert (result.reason, result.mean_return, result.best_return) == ("finished", None, None)
    corpus = make_corpus(config, straight)
    assert (len(corpus.learnt), len(corpus.held_out)) == (32, 8)
    assert corpus.learnt.origin == "folder" and corpus.held_out.origin == "folder"
    assert not set(corpus.learnt.rows) & set(corpus.held_out.rows)
    row = rows(straight, "evaluate")[-1]
    for name in ("loss", "token_loss", "q_loss", "v_mean", "q_mean", "advantage_mean"):
        assert isinstance(row[name], float), name
    assert "mean_return" not in row
    best = Checkpoints(straight / "checkpoints").best()
    assert best.score == max(row["score"] for row in rows(straight, "evaluate"))
    train(config, folder, view=Quiet({7: terminate}))
    resume(folder, view=Quiet())
    assert_same_run(straight, folder)
    assert (
        load_agent(folder).act(type("Asked", (), {"to_sequence": lambda _: ([], False)})())
        is not None
    )


@pytest.mark.slow
def test_losses_of_held_out_rows_do_not_depend_on_how_they_are_batched(chats, tmp_path):
    config = of_chats(chats, num_updates=3)
    train(config, tmp_path / "run", view=Quiet())
    found = evaluate(tmp_path / "run", episodes=8).held_out
    path = tmp_path / "run" / "config.json"
    data = json.loads(path.read_text())
    data["evaluate"]["batch_size"] = 8
    path.write_text(json.dumps(data))
    assert evaluate(tmp_path / "run", episodes=8).held_out == pytest.approx(found, rel=1e-5)


def test_a_run_does_not_go_on_with_other_rows(chats, tmp_path):
    config = of_chats(chats)
    train(config, tmp_path / "run", view=Quiet({7: terminate}))
    with open(chats[1], "a") as file:
        file.write(json.dumps(chat(2, "2")) + "\n")
    with pytest.raises(RunError, match="has learnt from other rows than those that are there now"):
        resume(tmp_path / "run", view=Quiet())


def test_whole_utterances_as_actions(chats, tmp_path):
    config = of_chats(chats, num_updates=3)
    config = replace(
        config,
        model=replace(config.model, per_token=False),
        loss=replace(config.loss, cql_weight=0.0),
        decode=DecodeConfig(include_adv=False),
    )
    train(config, tmp_path / "run", view=Quiet())
    assert rows(tmp_path / "run", "evaluate")[-1]["q_loss"] > 0


def test_what_is_wrong_with_files_is_said_and_leaves_no_folder(chats, tmp_path):
    config = of_chats(chats)
    with open(chats[1], "a") as file:
        file.write('{"messages": [{"role": "robot", "content": "hi"}]}\n')
    for other, message in [
        (config, "two.jsonl: line 11"),
        (replace(config, data=DialogueDataConfig()), "no files to learn from: give --data.files"),
        (replace(config, data=DialogueDataConfig(files=("gone.jsonl",))), "gone.jsonl"),
    ]:
        with pytest.raises((ValueError, RunError, FileNotFoundError), match=message):
            train(other, tmp_path / "run", view=Quiet())
        assert not (tmp_path / "run").exists()
    skips = replace(config, data=replace(config.data, malformed="skip"), num_updates=1)
    assert train(skips, tmp_path / "run", view=Quiet()).update == 1
    with pytest.raises(ValueError, match="held_out=0 must lie between 0 and 1"):
        DialogueDataConfig(held_out=0)


def test_a_language_model_is_begun_with(chats, tmp_path):
    torch.manual_seed(0)
    theirs = CausalLM(20, n_layer=1, n_head=2, n_embd=8, block_size=40)
    save_gpt2(tmp_path / "gpt", theirs.settings(), theirs.state_dict())
    config = of_chats(chats, language_model=str(tmp_path / "gpt"), num_updates=1)
    trunk = config.model.trunk
    assert (trunk.n_embd, trunk.block_size, trunk.dropout) == (8, 40, 0.1)
    still = replace(config, optimizer=replace(config.optimizer, learning_rate=0.0))
    train(still, tmp_path / "run", view=Quiet({1: terminate}))
    state = last(tmp_path / "run").tensors("state")
    for name, tensor in theirs.state_dict().items():
        assert state[("params", "trunk", *name.split("."))][: len(tensor)].equal(tensor), name
    (tmp_path / "gpt").rename(tmp_path / "moved")  # it is in the checkpoint now
    longer = replace(still, num_updates=2)
    assert resume(tmp_path / "run", config=longer, view=Quiet()).update == 2
    unlike = replace(config, language_model=str(tmp_path / "moved"))
    unlike = replace(unlike, model=ILQLModelConfig(trunk=replace(trunk, n_layer=2)))
    with pytest.raises(RunError, match="n_layer=2, and .*moved holds a model with 1"):
        train(unlike, tmp_path / "other", view=Quiet())


def test_presets_have_a_line_each_and_are_what_they_say():
    assert ILQL_PRESETS.keys() == ILQL_SUMMARIES.keys()
    for name, config in ILQL_PRESETS.items():
        if config.task == "wordle":
            assert with_sizes(config) == config, name
    assert not ILQL_PRESETS["wordle-bc"].loss.needs_values
    assert ILQL_PRESETS["wordle-filtered-bc"].keep_best == 0.1
    assert ILQL_PRESETS["wordle-single-step"].loss.tau == 0.5
    assert TrunkConfig().vocab_size == ILQLRun().model.trunk.vocab_size


@pytest.mark.slow
def test_kills_change_nothing(tmp_path):
    config = brief(num_updates=60, checkpoint=replace(brief().checkpoint, every_updates=2))
    config = replace(config, evaluate=replace(config.evaluate, every_updates=9))
    straight, folder = tmp_path / "straight", tmp_path / "killed"
    train(config, straight, view=Quiet())
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps(to_json(config)))
    raffia = [sys.executable, "-c", PROGRAM]
    report = run_with_kills(
        [*raffia, "train", "ilql", "--config", settings, "--run", folder],
        [*raffia, "resume", folder],
        num_kills=5,
        seed=1,
        env={"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        watched=lambda: newest_update(folder / "checkpoints"),
        can_resume=lambda: (folder / "config.json").exists(),
        at_work_seconds=0.4,
    )
    assert len(report.kills) == 5, "the run ended before: make it longer"
    assert_same_run(straight, folder)
