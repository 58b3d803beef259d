"""Pages of runs on dialogues: curves over updates, coloured tokens, the table of methods."""

import re

import pytest
from hypothesis import HealthCheck, given, settings

from raffia.algorithms.ilql import method
from raffia.recipes.ilql.presets import ILQL_PRESETS
from raffia.report import summarise
from raffia.report.dialogue_files import read_dialogues
from raffia.report.dialogues import dialogues
from raffia.report.folder import read_run
from raffia.report.groups import flat as of_groups
from raffia.report.groups import grouped
from raffia.report.methods import method_of, methods, over, tables
from raffia.report.plots import decoding_panels, held_out_panels, learning_panels
from raffia.train.config import to_json

from . import made_dialogues as made
from .made_runs import brief_rows, write_run
from .made_runs import config as of_episodes
from .test_damage import anything
from .test_page import Page, report


def test_curves_have_the_intervals_of_the_rows_and_decodings_are_compared(run, tmp_path):
    groups = groups_of(run)
    over_updates, _ = learning_panels(groups)
    [line] = over_updates.lines
    assert (line.curve.x, line.curve.y) == ([100, 200, 300], [-4.0, -1.5, -2.0])
    assert line.curve.low == [-4.2, -1.7, -2.2] and line.curve.high == [-3.8, -1.3, -1.8]
    returns, won = decoding_panels(groups)
    assert [line.curve.y[-1] for line in returns.lines] == [-2.0, -3.0, -4.0]
    assert returns.lines[2].curve.low[-1] == -4.2 and len({x.tone for x in returns.lines}) == 3
    assert won.lines[0].curve.y == [50.0, 50.0, 50.0]
    second = write_run(tmp_path / "b", made.rows((-4, -3.5, -4)), made.config(1), extras=False)
    returns, _ = decoding_panels(groups_of(run, second))  # several seeds are averaged
    assert [line.curve.y[-1] for line in returns.lines] == [-3.0, -4.0, -5.0]
    assert returns.lines[0].curve.low[-1] == -4.0
    alone = made.rows(decodings=("decode",))
    cloned = write_run(tmp_path / "bc", alone, made.cloning(), extras=False)
    assert decoding_panels(groups_of(cloned)) == []
    assert "No dialogues have been written" in section(cloned)
    partly = [row for row in made.rows() if row.get("mean_return") != -1.5 or row.pop("decodings")]
    assert tables(groups_of(write_run(tmp_path / "c", partly, made.config(), extras=False))) == []


pytest.importorskip("matplotlib")


@pytest.fixture
def run(tmp_path):
    folder = write_run(tmp_path / "run", made.rows(), made.config(), extras=False)
    made.write_dialogues(folder, made.record())
    return folder


def groups_of(*folders):
    return grouped([read_run(folder) for folder in folders])


def section(run, notes=None):
    return dialogues(groups_of(run), [] if notes is None else notes)


def methods_text(*folders):
    return Page(methods(groups_of(*folders), [])).text


# -- evaluations


def test_a_run_without_environment_steps_is_shown_over_updates(run):
    page = Page(report(run))
    for part in [
        *("wordle", "best mean return −1.5 at 200 updates, 20 s", "last mean return −2 at 300"),
        *("updates 300 10 / s", "tokens / s 2,000", "games won 50.0 %", "Return over updates"),
        *("Return over wall time", "95 % interval of the mean", "token loss", "v mean"),
        *("Return by decoding", "Games won by decoding", "policy alone", "advantage × 2"),
        f"raffia evaluate {run} --episodes 1000",
    ]:
        assert part in page.text, part
    for part in [
        *("env step", "training episodes", "simulations", "searched tree", "--record"),
        "Missing or damaged",
    ]:
        assert part not in page.text, part


def test_losses_of_held_out_rows(tmp_path):
    config = made.config(task="data", preset="dialogue")
    folder = write_run(tmp_path / "run", made.held_out_rows(), config, extras=False)
    found, groups = summarise(folder), groups_of(folder)
    assert (found.last_loss, found.best_loss) == (2.0, 1.0)
    assert (found.last_return, found.best_return, found.update) == (None, None, 300)
    titles = [panel.title for panel in learning_panels(groups)]
    assert titles == ["Held-out loss over updates", "Held-out loss over wall time"]
    assert [panel.title for panel in held_out_panels(groups)] == ["v mean", "token loss"]
    text = Page(report(folder)).text
    assert "best held-out loss 1 at 200 updates" in text
    assert "ILQL 1 1 −1 0.5" in text  # runs, loss, v mean, token loss at the best evaluation


def test_the_best_of_held_out_rows_is_the_newest_of_the_highest_score(tmp_path):
    rows = made.held_out_rows()
    estimate = {"estimated_low": -1.5, "estimated_high": 2.5, "logged_return": 0.25}
    estimate |= {"estimated_return": 0.75, "effective_rows": 12.0}
    for row, score in zip(rows[1:], (0, 0.5, 0.5), strict=True):
        row |= {"score": score, **estimate}
    config = made.config(task="data", preset="dialogue")
    folder = write_run(tmp_path / "run", rows, config, extras=False)
    [group] = groups_of(folder)
    assert group.runs[0].best.update == 300 and group.runs[0].best.mean == 2.0
    text = Page(report(folder)).text
    assert "return, estimated 0.75 −1.5 to 2.5, from 12 dialogues; as logged 0.25" in text
    assert "do not measure how well the agent speaks" in text


def test_runs_of_all_kinds_are_on_one_page(run, tmp_path):
    data = made.config(task="data", preset="dialogue")
    chats = write_run(tmp_path / "chats", made.held_out_rows(), data, extras=False)
    cartpole = write_run(tmp_path / "cartpole", brief_rows(), of_episodes())
    panels = learning_panels(groups_of(run, chats, cartpole))
    shown = {panel.title: sum(bool(line.curve.x) for line in panel.lines) for panel in panels}
    over = ["Return over env steps: CartPole-v1", "Return over wall time: CartPole-v1"]
    over += ["Return over updates: wordle", "Return over wall time: wordle"]
    over += ["Held-out loss over updates", "Held-out loss over wall time"]
    assert shown == dict.fromkeys(over, 1)
    text = Page(report(run, chats, cartpole)).text
    for part in ["A searched tree", "return 200", "Dialogues", "Methods", "best result"]:
        assert part in text, part
    assert re.search(r"In \d+ settings", text)  # in which algorithms differ: folded


def test_an_agent_without_values_has_no_colours_and_a_whole_utterance_is_one_decision(tmp_path):
    folder = write_run(tmp_path / "bc", made.rows(decodings=("decode",)), made.cloning(), False)
    actions = [{"first": 1, "last": 1, "reward": 0.0, "log_prob": -0.5}]
    made.write_dialogues(folder, made.record(made.dialogue(actions=actions, v=[])))
    text = section(folder)
    assert "no values, so tokens are not coloured" in text and "probability 60.7 %" in text
    assert not re.search(r'class="(?:tok|mark) (?:up|down)"', text)
    assert '<svg class="values"' not in text
    folder = write_run(tmp_path / "run", made.rows(), made.config(), extras=False)
    action = {"first": 1, "last": 2, "reward": 2.0, "v": 0.0, "q": 1.0, "advantage": 1.0}
    made.write_dialogues(folder, made.record(made.dialogue(actions=[action], states=[0, 5])))
    text = section(folder)
    assert text.count('title="crane&lt;/a&gt;: advantage 1, Q 1, V 0, reward 2"') == 2
    assert text.count("<sup>+2</sup>") == 1  # the reward is shown once


# -- dialogues


def test_tokens_have_the_colour_of_their_advantage(run):
    text = section(run)
    found = re.findall(r'<span class="(tok|mark) (up|down)" style="([^"]*)" title="([^"]*)"', text)
    assert [token[:3] for token in found] == [
        ("tok", "up", "--s:1.00"),
        ("mark", "down", "--s:0.50"),
    ]
    assert found[0][3] == (
        "crane: advantage 0.5, Q −1.5, V −2, probability 60.7 %\ninstead: slate (Q −3.25, 22.3 %)"
    )
    page = Page(text)
    assert "agent <a> crane </a> −1 env bbbbb </s> </eod>" in page.text
    assert "game of its own · return −1" in page.text
    assert "After 200 updates (dialogues/000000200.json)." in page.text


def test_v_is_drawn_along_the_text(run):
    svg = re.search(r'<svg class="values".*?</svg>', section(run), re.DOTALL)[0]
    assert svg.count("<circle") == 2  # the state after the end has no V
    assert svg.count("<polygon") == 2 and svg.count('class="q up"') == 2
    assert svg.count('class="own"') == 2 and svg.count('class="tick"') == 6
    assert re.search(r'<text class="reward"[^>]*>−1<', svg)
    numbers = [float(x) for x in re.findall(r'(?:cx|cy|x1|x2|y1|y2)="([^"]*)"', svg)]
    width, height = map(float, re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups())
    assert all(0 <= x <= max(width, height) for x in numbers)


def test_the_dialogues_of_the_best_evaluation_are_shown(run):
    for update in (100, 300):
        other = made.dialogue(tokens=["<a>", f"word{update}", "</a>", "x", "</s>", "</eod>"])
        made.write_dialogues(run, made.record(other, update=update))
    text = Page(section(run)).text
    assert "crane" in text and "word300" not in text
    other_part = text.index("The same after 100 updates")
    assert text.index("word100") > other_part > text.index("crane")
    (run / "dialogues/000000200.json").unlink()
    assert "After 300 updates" in Page(section(run)).text  # the newest, as the best is missing


def test_tokens_are_escaped_and_blanks_made_visible(run):
    tokens = ["<a>", "<script>alert(1)</script>", "a\nb\t", "bbbbb", "</s>", "</eod>"]
    others = [{"token": "<script>", "q": 1.0}]
    dialogue = made.dialogue(tokens=tokens, source="<script>")
    dialogue["actions"][0]["others"] = others
    made.write_dialogues(run, made.record(dialogue))
    text = report(run)
    assert "<script" not in text and "&lt;script" in text
    assert "a↵\nb⇥" in text
    Page(text)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "Expecting property name"),
        ("[]", "it does not contain a list"),
        ('{"dialogues": {}}', "it does not contain a list"),
        ('{"dialogues": [{"tokens": "abc"}]}', "of texts"),
        ('{"dialogues": [{"tokens": [1]}]}', "of texts"),
    ],
)
def test_damaged_files_are_noted(run, content, why):
    (run / "dialogues/000000200.json").write_text(content)
    notes = []
    assert "<h2>Dialogues</h2>" in section(run, notes)
    assert notes[0].startswith("dialogues/000000200.json is not shown: ") and why in notes[0]


def test_invalid_positions_are_left_out(run):
    invalid = made.dialogue(
        states=[0, 99, -1], v=["x", 1.0, 2.0], marks=["a"], **{"return": None, "ended": 3}
    )
    invalid["actions"] += [{"first": 5, "last": 99}, {"first": -1, "last": 0}, {"first": 1.5}, 7]
    found = read_dialogues(made.write_dialogues(run, made.record(invalid))).dialogues[0]
    assert len(found.actions) == 2 and found.marks == frozenset()
    assert len(found.states) == 1 and found.states[0][0] == 0
    assert "return –" in Page(section(run)).text


@given(value=anything)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_entries_give_a_page_or_a_note(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, made.rows(), made.config(), extras=False)
    for name in made.dialogue():
        dialogue = made.dialogue(**{name: value})
        made.write_dialogues(folder, made.record(dialogue, made.dialogue([], actions=[dialogue])))
        assert "<h2>Dialogues</h2>" in section(folder)


# -- methods


def test_methods_are_named_by_their_config():
    def flat(**changes):
        loss = {"tau": 0.8, "v_weight": 1.0, "q_weight": 1.0, "awac_weight": 1.0, **changes}
        best = {"keep_best": loss.pop("keep_best", 1.0)}
        return {f"loss.{name}": value for name, value in loss.items()} | best

    only_q = flat(v_weight=0.0, awac_weight=0.0, backup="max", cql_weight=1.0)
    assert method_of(only_q) == "conservative Q-learning"
    names = {name: method_of(of_groups(to_json(config))) for name, config in ILQL_PRESETS.items()}
    assert names["wordle"] == names["wordle-branching"] == names["dialogue"] == "ILQL"
    for name, expected in (
        ("bc", "behaviour cloning"),
        ("filtered_bc", "behaviour cloning of the best 10 %"),
        ("single_step", "one step (SARSA)"),
    ):
        by_method = method(name, ILQL_PRESETS["dialogue"])
        assert method_of(of_groups(to_json(by_method))) == expected


def compared_rows(*folders):
    """The rows of the one table of these runs."""
    [(_, rows)] = tables(groups_of(*folders))
    return rows


def test_intervals_over_seeds_are_students():
    # of -1, -2, -3: standard deviation 1, t of 2 degrees of freedom 4.303
    found = over([-1.0, -2.0, -3.0])
    assert (found.mean, found.high) == (-2.0, pytest.approx(-2 + 4.303 / 3**0.5, abs=1e-4))
    for num, t in ((14, 2.1604), (40, 2.0227)):  # of 13 and 39 degrees of freedom
        many = over([0.0, 1.0] * (num // 2))
        error = 0.5 * (num / (num - 1)) ** 0.5 / num**0.5
        assert (many.high - many.mean) / error == pytest.approx(t, rel=1e-3)


def test_one_run_has_its_decodings_and_its_data_in_the_table(run):
    ((name, rows),) = tables(groups_of(run))
    assert name == "wordle, scripts"
    found = [(row.method, row.decoding, row.score.mean, row.score.low) for row in rows]
    assert found == [
        ("ILQL", "as set: advantage × 8", -1.5, -1.7),
        ("ILQL", "policy alone", -2.5, -2.7),
        ("ILQL", "advantage × 2", -3.5, -3.7),
        ("the data, 4,000 dialogues", "", -3.5, -3.6),
    ]
    text = methods_text(run)
    assert "ILQL as set: advantage × 8 −1.50 −1.70 to −1.30 50.0 %" in text
    assert "Of 2 games in training." in text and "say nothing about other seeds" in text


def seeds(tmp_path, means, config, name, decodings=made.DECODINGS):
    return [
        write_run(tmp_path / f"{name}-{i}", made.rows([mean], decodings), config(i), extras=False)
        for i, mean in enumerate(means)
    ]


def test_methods_of_several_seeds_are_compared(tmp_path):
    folders = seeds(tmp_path, (-1.0, -2.0, -3.0), made.config, "ilql")
    folders += seeds(tmp_path, (-4.0, -4.5), made.cloning, "bc", ("decode",))
    ((_, rows),) = tables(groups_of(*folders))
    found = [(row.method, row.decoding, row.score.mean, row.num_runs) for row in rows]
    assert found == [
        ("ILQL", "as set: advantage × 8", -2.0, 3),
        ("ILQL", "policy alone", -3.0, 3),
        ("ILQL", "advantage × 2", -4.0, 3),
        ("behaviour cloning", "as set: policy alone", -4.25, 2),
    ]
    assert rows[0].score.high == pytest.approx(0.484, abs=1e-3)
    text = methods_text(*folders)
    assert "Student's t" in text and "Of 2 games each in training." in text


def test_results_of_raffia_evaluate_take_precedence(run):
    made.write_evaluation(run, [-9.0], name="few")
    made.write_evaluation(run, [-1.0, -2.0, -3.0], checkpoint="newest", name="newest")
    assert compared_rows(run)[0].source == "3 games by raffia evaluate, newest"
    made.write_evaluation(run, [-1.0, -1.5], name="best")
    row = compared_rows(run)[0]
    assert (row.score.mean, row.source) == (-1.25, "2 games by raffia evaluate, best")
    text = methods_text(run)
    assert "3 files by raffia evaluate" in text and "in training" not in text


def test_the_best_rows_are_named_where_only_they_are_learnt_from(run):
    record = made.record()
    record["data"]["learnt"] = {"num_rows": 400, "mean_return": -0.5}
    made.write_dialogues(run, record)
    row = compared_rows(run)[-1]
    assert (row.method, row.score.mean) == ("the best 400 of them", -0.5)
