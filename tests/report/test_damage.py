"""Missing or damaged files: the page is still written, and names them."""

import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raffia.report import summarise, write_report
from raffia.report.folder import read_run
from raffia.report.groups import grouped
from raffia.report.plots import learning_panels, rate_panels, spent, time_panel, training_panels
from tests.marks import slow_among

from .made_runs import GIF, brief_rows, config, rows, write_checkpoint, write_run

pytest.importorskip("matplotlib")


def text_of(run):
    return write_report([run]).read_text(encoding="utf-8")


def test_an_empty_run(tmp_path):
    text = text_of(write_run(tmp_path / "run", [], config(), extras=False))
    for missing in [
        *("no rows yet", "metrics.jsonl has no rows yet", "No evaluation has been written yet"),
        *("No training row has been written yet", "No rates have been written yet"),
        *("No tree has been saved", "No episode has been recorded"),
        "The folder contains no checkpoint",
    ]:
        assert missing in text, missing


@pytest.mark.parametrize(
    "content", slow_among([None, "{", "[1]", "nul", "[" * 50_000, "\xff"], "{", "nul")
)
def test_a_missing_or_damaged_config_and_missing_metrics(tmp_path, content):
    run = write_run(tmp_path / "run", brief_rows(evaluations=1), extras=False)
    if content is not None:
        (run / "config.json").write_bytes(content.encode("latin-1"))
    text = text_of(run)
    assert "config.json" in text and summarise(run).preset == ""
    if content is None:
        assert "config.json could not be read: No such file" in text
        assert "has no readable config.json" in text
        (run / "config.json").write_text(json.dumps(config()))
        (run / "metrics.jsonl").unlink()
        assert "metrics.jsonl could not be read: No such file" in text_of(run)
        assert summarise(run).state == "empty"


@pytest.mark.parametrize("kind", ["start", "train", "episode", "evaluate", "end"])
def test_one_row_only(tmp_path, kind):
    only = next(row for row in brief_rows(evaluations=2) if row["kind"] == kind)
    text = text_of(write_run(tmp_path / "run", [only], config(), extras=False))
    assert ("<b>loss</b>" in text) == (kind == "train")
    assert ("Return over env steps" in text) == (kind in ("episode", "evaluate"))


def test_a_truncated_line_is_left_out(tmp_path):
    run = write_run(tmp_path / "run", brief_rows(evaluations=3), config())
    content = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(content[:-30])
    lines = content.count(b"\n")
    assert f"metrics.jsonl: the last line, {lines}, is cut off" in text_of(run)
    assert read_run(run).state == summarise(run).state == "running"  # its end was cut
    assert len(read_run(run).rows) == lines - 1


def test_damaged_lines_are_counted(tmp_path):
    run = write_run(tmp_path / "run", brief_rows(evaluations=1), config(), extras=False)
    good = (run / "metrics.jsonl").read_text().splitlines()
    bad = ["{]", "7", '{"loss": 1}', "\x00\x00", "[]", "{", '"x"']
    (run / "metrics.jsonl").write_text("\n".join([*good[:2], *bad, *good[2:], ""]))
    text = text_of(run)
    assert "metrics.jsonl: line 3 is not JSON" in text
    assert "line 5 is not a row with a &quot;kind&quot;" in text and "2 more such lines" in text
    assert len(read_run(run).rows) == len(good)


@pytest.mark.parametrize(
    "bad",
    slow_among([None, "NaN", float("nan"), float("inf"), True, [], 10**400], None, [], True),
)
def test_values_that_are_no_numbers_are_left_out(tmp_path, bad):
    rows = [row | {"odd_loss": None} for row in brief_rows(evaluations=3)]
    changed = [row for row in rows if row["kind"] == "train"][2]
    changed["loss"] = bad
    [row for row in rows if row["kind"] == "evaluate"][0]["mean_return"] = bad
    run = write_run(tmp_path / "run", rows, config(), extras=False)
    text = text_of(run)
    note = f"loss is not a number in 1 row of training, first at update {changed['update']}"
    assert note in text and "no numbers were logged for: odd loss" in text
    assert "<b>odd loss</b>" not in text  # it has no panel
    assert summarise(run).best_return == max(
        evaluation.mean for evaluation in read_run(run).evaluations
    )


def test_damaged_trees_and_evaluations_are_noted_and_large_recordings_are_linked(
    tmp_path, monkeypatch
):
    run = write_run(tmp_path / "run", brief_rows(evaluations=1), config())
    for name, content in (
        ("trees/6000.svg", "<svg><g>"),
        ("trees/6000.json", "[]"),
        ("evaluations/7.json", "[]"),
        ("evaluations/8.json", "{"),
    ):
        (run / name).write_text(content)
    monkeypatch.setattr("raffia.report.episodes.LARGEST", len(GIF) - 1)
    text = text_of(run)
    for part in [
        "trees/6000.svg is not shown: it is not XML",
        "trees/6000.json is not shown",
        "evaluations/7.json does not contain an object",
        "evaluations/8.json could not be read",
        'href="episodes/best-seed0-000.gif"',
    ]:
        assert part in text, part
    page = write_report([run], tmp_path / "page.html").read_text()
    assert 'href="run/episodes/best-seed0-000.gif"' in page and "data:image" not in page


KEYS = """update env_step seconds loss x_loss grad_norm returns mean_return as_first return low high
    decodings seconds_learn updates_per_second reason priority""".split()


def test_damaged_checkpoints_are_noted(tmp_path):
    run = write_run(tmp_path / "run", brief_rows(evaluations=1), config(), extras=False)
    write_checkpoint(run, 10, 5.0)
    short = write_checkpoint(run, 20, None)
    (short / "replay.raffia-0123456789ab.bin").write_bytes(b"2")
    missing = write_checkpoint(run, 30, 7.0)
    (missing / "learner.raffia-0123456789ab.safetensors").unlink()
    (write_checkpoint(run, 40, 7.0) / "manifest.json").write_text("{")
    outside = write_checkpoint(run, 50, 7.0)
    record = {"files": {"x": {"file": "../../../metrics.jsonl", "bytes": 1}}}
    (outside / "manifest.json").write_text(json.dumps(record))
    text = text_of(run)
    assert "complete" in text
    assert "damaged: replay.bin has 1 bytes, not 700" in text
    assert "damaged: learner.safetensors is missing" in text
    assert "manifest.json could not be read" in text
    assert "damaged: x does not name a file" in text


anything = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
row = st.fixed_dictionaries(
    {"kind": st.sampled_from(["start", "resume", "train", "episode", "evaluate", "end", "?"])},
    optional={key: st.one_of(st.floats(-10, 1e6), anything) for key in KEYS},
)


@pytest.mark.slow
@given(runs_of_rows=st.lists(st.lists(row, max_size=12), min_size=1, max_size=3), config=anything)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_rows_give_panels(tmp_path_factory, runs_of_rows, config):
    folder = tmp_path_factory.mktemp("runs")
    runs = []
    for i, rows_of_run in enumerate(runs_of_rows):
        run = write_run(folder / str(i), rows_of_run, config, extras=False)
        runs.append(read_run(run))
        full, quick = runs[-1], summarise(run)
        last = full.last.mean if full.last else None
        values = {"last_loss": last} if full.of_loss else {"last_return": last}
        assert quick.state == full.state
        assert {name: getattr(quick, name) for name in values} == values
    groups = grouped(runs)
    panels = [*learning_panels(groups), *training_panels(groups)[0], *rate_panels(groups)]
    panels += [time_panel(run, list(spent(run))) for run in runs]
    for panel in panels:
        assert all(len(line.curve.x) == len(line.curve.y) for line in panel.lines)


@pytest.mark.parametrize("seed", slow_among(range(2), 1))
def test_any_values_can_be_drawn(tmp_path, seed):
    draw = random.Random(seed)
    values = [None, "NaN", -1e38, 3e38, 0, -1, 1e-300, 10**30, 0.5, 1e12, True, {}, []]
    changed = rows(evaluations=4)
    for row in changed:
        for key in list(row):
            if key != "kind" and draw.random() < 0.3:
                row[key] = draw.choice(values)
    assert "</html>" in text_of(write_run(tmp_path / "run", changed, config(), extras=False))
