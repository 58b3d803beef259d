"""The whole page: its content, that it is self-contained, and that it is reproducible."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from raffia.report import write_report
from raffia.report.folder import read_run
from raffia.report.groups import grouped
from raffia.report.plots import learning_panels

from .made_runs import brief_rows, config, rows, write_run


def test_a_page_has_all_parts_of_a_run_and_is_self_contained(tmp_path):
    run = write_run(tmp_path / "run", rows(resumed_at=3000), config())
    text = report(run)
    page = Page(text)
    parts = [
        *("cartpole · CartPole-v1", "✓ finished", "seed 0", "2 threads", "torch 2.13.0"),
        *("best mean return", "1 restart", "Return over env steps", "Return over wall time"),
        *("policy loss", "value prefix loss", "policy entropy", "grad norm", "learning rate"),
        *("temperature", "simulations per second", "Wall time by activity", "targets"),
        *("return 200", "Actions at the root", "right 72 %", "num_simulations", "5,600"),
        *("raffia evaluate", "--episodes 100 --record", "std. dev.", "best-seed0-000.gif"),
    ]
    assert [part for part in parts if part not in page.text] == []
    assert "Missing or damaged" not in page.text
    assert "raffia resume" not in page.text  # it has finished
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert all(link.startswith(("data:", "#")) for link in page.links)
    assert "@import" not in text and "url(http" not in text
    inside = {link[1:] for link in page.links if link.startswith("#")}
    assert inside <= set(page.ids) and len(page.ids) == len(set(page.ids))
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(page.ids)
    assert len(text) < 1_500_000


pytest.importorskip("matplotlib")


class Page(HTMLParser):
    """Checks that tags are balanced; collects tags, links, ids and the text."""

    EMPTY = {"meta", "img", "br", "hr", "source"}

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words, self.links, self.ids = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        self.ids += [value for name, value in attrs if name == "id"]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.EMPTY:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))


def report(*folders, **options):
    return write_report(folders, **options).read_text(encoding="utf-8")


def test_empty_columns_are_left_out(tmp_path):
    configs = [(i, config(i, target=None)) for i in (0, 1)]
    runs = [write_run(tmp_path / f"{i}", brief_rows(seed=i), settings) for i, settings in configs]
    text = Page(report(*runs)).text
    assert "env steps/s" in text and "to target" not in text and "restarts" not in text
    another = write_run(
        tmp_path / "far", brief_rows(seed=2, resumed_at=3000), config(2, target=9e9)
    )
    text = Page(report(*runs, another)).text
    assert "to target" in text and "not reached" in text and "restarts" in text


def test_key_figures(tmp_path):
    times = [{"update": 50 * i, "env_step": 100 * i, "seconds": 10.0 * i} for i in range(5)]
    means = [None, 10.0, 195.5, 250.5, 120.0]
    rows = [
        {"kind": "start", **times[0]},
        *[{"kind": "evaluate", **times[i], "mean_return": means[i]} for i in (1, 2, 3, 4)],
        {"kind": "resume", **times[4]},
        {"kind": "end", **times[4], "reason": "stopped"},
    ]
    run = write_run(tmp_path / "run", rows, config(target=195.0), extras=False)
    text = Page(report(run)).text
    assert "■ stopped" in text and f"raffia resume {run}" in text
    assert "best mean return 250.5 at 300 env steps, 30 s" in text
    assert "last mean return 120 at 400 env steps, 40 s" in text
    assert "env steps to the target of 195, 20 s 200" in text
    assert "env steps 400 10 / s" in text and "updates 200 5 / s" in text
    assert "wall time 40 s 1 restart" in text


def test_the_same_files_give_the_same_bytes(tmp_path):
    folders = [write_run(tmp_path / f"{i}", brief_rows(seed=i), config(i)) for i in (0, 1)]
    first = write_report(folders, tmp_path / "first.html").read_bytes()
    os.utime(folders[0] / "metrics.jsonl", (0, 0))
    code = "import sys; from raffia.report import write_report as w; w(sys.argv[1:3], sys.argv[3])"
    args = [*folders, tmp_path / "second.html"]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"}
    command = [sys.executable, "-W", "error", "-c", code, *args]
    subprocess.run(command, check=True, env=environment, timeout=100)
    assert (tmp_path / "second.html").read_bytes() == first


def test_games_are_counted_by_side_and_their_outcomes_have_their_own_scale(tmp_path):
    """A game's outcomes lie in -1..1; in the same panel they would cut off all other returns."""
    row = {"kind": "evaluate", "update": 1, "env_step": 10, "seconds": 1.0, "mean_return": 0.2}
    row |= {"returns": [1, 1, 0, -1, 0], "as_first": [True, False, True, False, False]}
    rows = [{"kind": "start", "update": 0, "env_step": 0, "seconds": 0.0}, row]
    own, run = (
        write_run(tmp_path / name, rows, config(preset="tictactoe", target=None, env=env))
        for name, env in (("own", "chess.py:Chess"), ("run", "tictactoe"))
    )
    assert "raffia play" not in Page(report(own)).text
    text = Page(report(run)).text
    assert "run first 2 1 1 0" in text and "run second 3 1 1 1" in text
    assert f"raffia play {run}" in text
    pole = write_run(tmp_path / "pole", brief_rows(), config())
    of_game = config(env="tictactoe", target=None, preset="g")
    game = write_run(tmp_path / "game", brief_rows(game=True), of_game)
    text = Page(report(game)).text
    assert "20 of the last 20 not drawn" in text and "in the last 20" not in text
    assert "game of self-play (1: not drawn)" in text and "training episode " not in text
    panels = learning_panels(grouped([read_run(pole), read_run(game)]))
    limits = {panel.title: panel.y_limits for panel in panels}
    assert limits == {
        "Return over env steps: CartPole-v1": None,
        "Return over wall time: CartPole-v1": None,
        "Return over env steps: tictactoe": (-1.08, 1.08),
        "Return over wall time: tictactoe": (-1.08, 1.08),
    }
    highest = [max(max(line.curve.y) for line in panel.lines if line.curve.y) for panel in panels]
    assert highest[0] > 100 and highest[2] <= 1
    tones = [{line.tone for line in panel.lines if line.curve.y} for panel in panels]
    assert tones == [{"c0"}, {"c0"}, {"c1"}, {"c1"}]


def test_text_from_files_is_escaped(tmp_path):
    evil = "<script>alert(1)</script>"
    settings = config(preset=evil, env=evil)
    settings["search"][evil] = evil
    settings["run"]["versions"] = {"torch": evil}
    changed = brief_rows(evaluations=2)
    for row in changed:
        if row["kind"] == "train":
            row |= {f"{evil}_loss": 1.0, f"seconds_{evil}": 0.1, f"{evil}_per_second": 2.0}
    changed[-1]["reason"] = evil
    run = write_run(tmp_path / "a <b> & c", changed, settings)
    evaluation = '{"returns": [1], "checkpoint": "<script>", "opponent": "<script>"}'
    (run / "evaluations" / "<script>.json").write_text(evaluation)
    text = report(run)
    assert "<script" not in text and "&lt;script" in text
    Page(text)


def test_a_changed_setting_is_marked(tmp_path):
    recorded = config()
    recorded["run"]["changed"] = {"search.num_simulations": 50, "env": {"num_envs": 4}}
    text = report(write_run(tmp_path / "a", brief_rows(evaluations=1), recorded))
    assert re.findall(r"<mark>(\d+)</mark> \((\d+)\)", text) == [("8", "4"), ("25", "50")]

    presets = {"cartpole": {**config(seed=9, simulations=12), "run": {}}}
    run = write_run(tmp_path / "b", brief_rows(evaluations=1), config())
    text = report(run, presets=presets)
    assert re.findall(r"<mark>(\d+)</mark> \((\d+)\)", text) == [("25", "12")]
    assert "The values of preset cartpole were not recorded" in report(run)


def test_a_page_is_written_to_the_given_path(tmp_path):
    run = write_run(tmp_path / "run", brief_rows(evaluations=1), config(), extras=False)
    assert write_report([run]) == run / "report.html"
    page = tmp_path / "pages" / "one.html"
    assert write_report([run, f"{run}/"], page) == page  # the same run twice is one run
    assert "report of a run" in page.read_text()
    assert [path.name for path in page.parent.iterdir()] == ["one.html"]
    with pytest.raises(ValueError, match="raffia report RUN"):
        write_report([])


def test_settings_of_matplotlib_are_neither_used_nor_changed(tmp_path):
    import matplotlib

    run = write_run(tmp_path / "run", brief_rows(evaluations=2), config(), extras=False)
    plain = report(run)
    with matplotlib.rc_context({"font.size": 30, "axes.grid": False}):
        before = dict(matplotlib.rcParams)
        assert report(run) == plain
        assert dict(matplotlib.rcParams) == before


def test_without_matplotlib_the_error_names_the_extra(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", brief_rows(evaluations=1), config())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'raffia\[report\]'"):
        write_report([run])
    assert not (run / "report.html").exists()
