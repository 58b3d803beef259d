"""The dialogue files of a run, and their section of the report."""

import json
from dataclasses import replace

import pytest
import torch

from raffia.algorithms.ilql import method
from raffia.algorithms.ilql.config import DecodeConfig
from raffia.algorithms.ilql.scores import qvs_of
from raffia.lm import DataPoint, character_tokenizer
from raffia.recipes.ilql import ILQL_PRESETS, ILQLRun, evaluate, train, with_sizes
from raffia.recipes.ilql import experiment as ilql_run
from raffia.recipes.ilql.config import DialogueDataConfig, ILQLEvaluateConfig
from raffia.recipes.ilql.data import make_corpus
from raffia.recipes.ilql.dialogues import (
    _add_others,
    data_summary,
    pieces,
    scored_dialogues,
    write_dialogues,
)
from raffia.recipes.ilql.evaluation import Evaluator
from raffia.recipes.ilql.networks import Interrupted, Networks
from tests.recipes.runs import Quiet, with_all


def brief(**changes) -> ILQLRun:
    smoke = ILQL_PRESETS["ilql-smoke"]
    evaluate = ILQLEvaluateConfig(every_updates=4, num_episodes=4)
    return replace(smoke, **{"num_updates": 8, "batch_size": 8, "evaluate": evaluate, **changes})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dialogues") / "run"
    train(brief(), folder, view=Quiet(), preset="ilql-smoke")
    return folder


def scored(config, corpus=None, networks=None, **options):
    """The scored dialogues of a run of this config, with new networks."""
    corpus = corpus or make_corpus(config, None)
    return scored_dialogues(Evaluator(networks or Networks(config), corpus, config, **options))


def files(folder):
    return {path.name: path.read_text() for path in (folder / "dialogues").iterdir()}


def test_each_evaluation_writes_games_and_rows(run):
    found = files(run)
    assert sorted(found) == ["000000004.json", "000000008.json"]
    record = json.loads(found["000000008.json"])
    shown = record["dialogues"]
    assert [dialogue["source"] for dialogue in shown] == ["own"] * 4 + ["logged"] * 4
    returns = [dialogue["return"] for dialogue in shown[4:]]
    assert returns == sorted(returns) and returns[0] == -6.0 and returns[-1] == 0.0
    assert record["data"]["num_rows"] == 200 and 0 < record["data"]["share_won"] < 1
    before = json.loads(found["000000004.json"])["dialogues"]
    assert all(x["tokens"] == y["tokens"] for x, y in zip(before[4:], shown[4:], strict=True))
    assert before[4]["v"] != shown[4]["v"]


def test_the_page_shows_dialogues(run):
    pytest.importorskip("matplotlib")
    from raffia.report import summarise, write_report

    text = write_report([run]).read_text()
    assert text.count('<svg class="values"') == 16  # of the best evaluation and another
    for part in ["Return over updates", "ILQL", "the data, 200 dialogues", 'class="tok up"']:
        assert part in text, part
    assert "Missing or damaged" not in text and "nan" not in text.lower().replace("dominant", "")
    assert summarise(run).best_return is not None


def test_numbers_are_those_of_the_networks(run):
    config = replace(brief(), loss=replace(brief().loss, value_max=-0.01))
    corpus, networks = make_corpus(config, None), Networks(config)
    game = scored(config, corpus, networks)["dialogues"][4]
    data = corpus.learnt
    texts = [pieces(corpus.tokenizer, data[n].tokens) for n in range(len(data))]
    point = data[texts.index(game["tokens"])]
    batch = data.collate([point])
    qvs = qvs_of(networks.loss, batch)
    for name, key in (("target_q", "q"), ("v", "v"), ("advantage", "advantage")):
        expected = [action[key] for action in game["actions"]]
        torch.testing.assert_close(qvs[name][0], torch.tensor(expected), atol=1e-4, rtol=1e-4)
    assert game["v"][:-1] == [action["v"] for action in game["actions"]] and game["v"][-1] is None
    assert [action["reward"] for action in game["actions"]] == point.rewards
    logits = networks.model.policy_trunk(batch["tokens"], batch["attn_mask"])
    log_probs = networks.model.logits(logits)[0].log_softmax(-1)
    for action in game["actions"]:
        token = point.tokens[action["last"]]
        assert action["first"] == action["last"]
        row = log_probs[action["last"] - 1]
        assert action["log_prob"] == pytest.approx(float(row[token]), abs=1e-3)
        best = [n for n in row.argsort(descending=True).tolist() if n != token][0]
        other = action["others"][0]
        assert other["token"] == corpus.tokenizer.id_to_token(best)
        assert other["log_prob"] == pytest.approx(float(row[best]), abs=1e-3)
        assert len(action["others"]) == 3


def test_the_files_depend_on_checkpoint_and_config_alone(run, tmp_path):
    found = evaluate(run, episodes=3, checkpoint="newest", seed=7)
    write_dialogues(tmp_path, found.update, found.dialogues)
    name = f"{found.update:09}.json"
    assert files(tmp_path) == {name: files(run)[name]}
    again = evaluate(run, episodes=3, checkpoint="newest", seed=8)
    assert again.dialogues == found.dialogues


def test_values_that_are_not_learnt_are_left_out():
    """A policy alone has no values, and values alone no log-probabilities."""
    for name in ("bc", "cql"):
        config = method(name, brief())
        record = scored(config)
        assert record["values"] == (name == "cql")
        for dialogue in record["dialogues"]:
            assert ("v" in dialogue) == (name == "cql")
            for action in dialogue["actions"]:
                keys = {key for other in action["others"] for key in other}
                if name == "bc":
                    assert action["log_prob"] < 0 and not {"q", "advantage"} & {*action}
                    assert keys == {"token", "log_prob"}
                else:
                    q = [other["q"] for other in action["others"]]
                    assert "log_prob" not in action and keys == {"token", "q"}
                    assert q == sorted(q, reverse=True)


def chats(tmp_path, long=False):
    path = tmp_path / "chats.jsonl"
    rows = [
        {"utterances": [f"say {n}", "no " * (200 if long else n % 3) + str(n)]}
        | {"rewards": [None, float(n)]}
        for n in range(10)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    trunk = replace(brief().model.trunk, block_size=800)
    config = brief(
        task="data",
        data=DialogueDataConfig(files=(str(path),), held_out=0.5),
        model=replace(brief().model, trunk=trunk),
    )
    return with_sizes(config)


def test_held_out_rows_are_shown_where_there_are_no_games(tmp_path):
    record = scored(chats(tmp_path))
    assert [dialogue["source"] for dialogue in record["dialogues"]] == ["held out"] * 4
    assert record["data"]["mean_return"] == 4.5 and "share_won" not in record["data"]
    dialogue = record["dialogues"][-1]
    assert "".join(dialogue["tokens"]).startswith("<s>say ")
    assert dialogue["actions"][-1]["reward"] == dialogue["return"]
    marks = [dialogue["tokens"][index] for index in dialogue["marks"]]
    assert marks == ["<s>", "</s>", "</a>", "</eod>"]
    assert dialogue["ended"] and dialogue["v"][-1] is None


def test_the_reading_of_files_is_told(tmp_path, monkeypatch):
    config, lines = chats(tmp_path), []
    make_corpus(config, None, lines.append)
    assert not lines
    monkeypatch.setattr("raffia.recipes.ilql.data.PAUSE", 0.0)
    with_sizes(config, lines.append)
    assert len(lines) == 10 and lines[1].startswith("reading dialogues: 2 rows so far, ")
    train(replace(config, num_updates=1), tmp_path / "run", view=(view := Quiet()))
    for what in ("reading", "encoding"):
        assert any(line.startswith(f"{what} dialogues: 10 rows so far, ") for line in view.messages)


def test_whole_utterances_are_one_decision_each(tmp_path):
    config = with_all(chats(tmp_path), decode=DecodeConfig(include_adv=False))
    config = with_all(config, loss__cql_weight=0.0, model__per_token=False)
    corpus, networks = make_corpus(config, None), Networks(config)
    dialogue = scored(config, corpus, networks)["dialogues"][-1]
    (action,) = dialogue["actions"]
    tokens = dialogue["tokens"][action["first"] : action["last"] + 1]
    assert tokens[-1] == "</a>" and "".join(tokens[:-1]).endswith(f"{dialogue['return']:.0f}")
    data = corpus.held_out
    points = [data[n] for n in range(len(data))]
    texts = [pieces(corpus.tokenizer, point.tokens) for point in points]
    batch = data.collate([points[texts.index(dialogue["tokens"])]], per_token=False)
    qvs = qvs_of(networks.loss, batch)
    assert action["q"] == pytest.approx(qvs["target_q"].item(), abs=1e-4)
    assert action["v"] == pytest.approx(qvs["v"].item(), abs=1e-4)
    assert action["log_prob"] < -len(tokens) and "others" not in action


def test_long_dialogues_are_cut(tmp_path):
    for dialogue in scored(chats(tmp_path, long=True))["dialogues"]:
        assert len(dialogue["tokens"]) == 300 and dialogue["cut"] and len(dialogue["actions"]) < 300
        assert not dialogue["ended"] and isinstance(dialogue["v"][-1], float)  # of its last state


def test_the_summary_names_the_best_rows_where_only_they_are_learnt_from():
    config = method("filtered_bc", brief())
    data = data_summary(make_corpus(config, None), config)
    assert (data["num_rows"], data["learnt"]["num_rows"]) == (200, 20)
    assert data["learnt"]["mean_return"] > data["mean_return"] + 1
    assert data["low"] < data["mean_return"] < data["high"]


def test_pieces_join_to_the_text_of_the_utterance():
    class Halves:  # every letter is two tokens, of which the first alone is no letter
        def decode(self, ids):
            letters = "".join("é" if n % 2 else "\ufffd" for n in ids if n > 0)
            return letters.replace("\ufffdé", "é")

        def id_to_token(self, number):
            return "<mark>"

    assert pieces(Halves(), [0, 2, 1, 0]) == ["<mark>", "\ufffd", "é", "<mark>"]
    letters = character_tokenizer(["abc"])
    point = DataPoint.from_tokens([letters.bos_token_id, 0, 1, letters.eos_token_id], [], [])
    assert pieces(letters, point.tokens) == ["<s>", "a", "b", "</s>"]


def test_scoring_can_be_interrupted():
    with pytest.raises(Interrupted):
        scored(brief(), stop=lambda: True)


def test_a_full_disk_does_not_end_the_run(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(ilql_run, "write_dialogues", full)
    view = Quiet()
    assert train(brief(num_updates=4), tmp_path / "run", view=view).reason == "finished"
    assert "update 4: no dialogues were written: No space left on device" in view.messages


def test_tokens_that_only_the_model_has_are_no_alternatives():
    tokenizer = character_tokenizer(["abc"])
    point, actions = DataPoint.from_tokens([0, 1], [0], [0.0]), [{"last": 1}]
    scores = torch.arange(tokenizer.num_tokens + 5.0)[None]
    _add_others(tokenizer, point, actions, scores.log_softmax(-1), None)
    assert len(actions[0]["others"]) == 3
