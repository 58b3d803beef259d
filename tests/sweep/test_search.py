"""Sweeps that Optuna searches: the plan follows from scores alone, however they are run."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from raffia.cli import main
from raffia.recipes.algorithm import find_algorithm
from raffia.sweep import Manifest, Range, Search, SweepSession, read_manifest, write_manifest
from raffia.sweep.plan import PlannedRun
from raffia.sweep.search import next_trial, probes, suggest
from raffia.train.config import ConfigError

pytest.importorskip("optuna")

BOWL = f"{Path(__file__).with_name('bowl.py')}:bowl"
RANGES = {"rate": Range(1e-4, 1.0), "width": Range(1, 6), "layers": [[], [1], [2, 3]]}
WORDS = ["rate=1e-4..1.0", "width=1..6", "layers=[],[1],[2,3]"]


def searched(folder, algorithm, engine="inline", workers=1, session=SweepSession, **changes):
    """A sweep of twelve trials with two seeds, two trials at a time."""
    search = Search(num_trials=12, ranges=RANGES, seeds=(0, 1), lag=2)
    base = replace(algorithm.config(), **changes)
    made = Manifest.of(algorithm, base, [], search=search, workers=workers)
    write_manifest(folder, replace(made, engine=replace(made.engine, name=engine)))
    return session(folder, algorithm).run()


@pytest.fixture(scope="module")
def algorithm():
    return find_algorithm(BOWL)


@pytest.fixture(scope="module")
def plain(algorithm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "sweep"
    assert searched(folder, algorithm).failed == []
    return read_manifest(folder)


def test_the_plan_grows_to_its_end_and_scores_are_those_of_the_runs(plain):
    assert len(plain.runs) == plain.num_runs == 24 and len(plain.search.scores) == 12
    assert [run.seed for run in plain.runs] == [0, 1] * 12
    names = [run.name for run in plain.runs]
    assert names == sorted(names) and len(set(names)) == 24
    for trial, score in enumerate(plain.search.scores):
        run = plain.runs[2 * trial].settings
        far = abs(run["width"] - 3) + sum(run["layers"])
        assert -score >= far - 0.001


@pytest.mark.slow
def test_workers_of_processes_plan_the_same(plain, algorithm, tmp_path):
    """Also where a later trial ends before an earlier one."""
    searched(tmp_path / "sweep", algorithm, "process", workers=3, jitter=0.3)
    found = read_manifest(tmp_path / "sweep")
    assert found.search == plain.search
    assert [run.settings for run in found.runs] == [run.settings for run in plain.runs]


@pytest.mark.parametrize("stop_at", [1, 7])
def test_a_search_that_was_broken_off_goes_on_as_if_it_never_was(
    stop_at, plain, algorithm, tmp_path
):
    """After so many of its runs, by a leader that dies."""
    ended = []

    class Dying(SweepSession):
        def _note(self, name, how):
            super()._note(name, how)
            ended.append(name)
            if len(ended) == stop_at:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        searched(tmp_path, algorithm, session=Dying)
    assert len(read_manifest(tmp_path).runs) < 24
    SweepSession(tmp_path, algorithm).run()
    found = read_manifest(tmp_path)
    assert (found.runs, found.search) == (plain.runs, plain.search)


def test_a_trial_that_fails_is_told_as_failed_and_the_search_goes_on(algorithm, tmp_path):
    search = Search(num_trials=6, ranges={"width": [7, 3]})
    made = Manifest.of(algorithm, algorithm.config(), [], search=search)
    write_manifest(tmp_path, replace(made, engine=replace(made.engine, name="inline")))
    result = SweepSession(tmp_path, algorithm).run()
    found = read_manifest(tmp_path)
    widths = [run.settings["width"] for run in found.runs]
    assert 7 in widths and 3 in widths
    assert [score is None for score in found.search.scores] == [width == 7 for width in widths]
    assert len(result.failed) == widths.count(7)
    SweepSession(tmp_path, algorithm).run()  # tries those again; scores that were reported stay
    assert read_manifest(tmp_path).search == found.search


def bowl_of(settings):
    far = (math.log10(settings["rate"]) + 2) ** 2 + abs(settings["width"] - 3)
    return -far - sum(settings["layers"])


def suggested(num, seed, lag=1):
    search, found = Search(num_trials=num, ranges=RANGES, seed=seed, lag=lag), []
    for _ in range(num):
        done = found[: max(0, len(found) - lag + 1)]
        search = replace(search, scores=tuple(bowl_of(one) for one in done))
        found.append(suggest(search, found))
    return [bowl_of(one) for one in found]


def test_it_learns_from_scores():
    """Its last third is better than its first, of draws; both are random without scores."""
    first, last = 0.0, 0.0
    for seed in range(3):
        scores = suggested(30, seed, lag=1 + seed)
        first, last = first + sum(scores[:10]) / 30, last + sum(scores[-10:]) / 30
    assert last > 0.6 * first  # both are below 0
    search = Search(num_trials=9, ranges=RANGES)
    one = replace(search, scores=(1.0,))
    before = [{"rate": 0.1, "width": 1, "layers": []}]
    assert suggest(one, before) == suggest(one, before)
    assert suggest(one, before) != suggest(replace(one, seed=1), before)
    assert suggest(one, before) != suggest(one, before * 2)


def test_ends_of_ranges_are_probed():
    runs = probes(Search(num_trials=1, ranges=RANGES, seeds=(4,)))
    assert {run.settings["rate"] for run in runs} == {1e-4, 1.0}
    assert [2, 3] in [run.settings["layers"] for run in runs]
    search = Search(num_trials=3, ranges={"rate": Range(1, 5)}, seeds=(4, 5))
    made = next_trial(search, [PlannedRun("0", {"rate": 2}, 4), PlannedRun("1", {"rate": 2}, 5)])
    assert [run.name[:2] for run in made] == ["2-", "3-"] and [run.seed for run in made] == [4, 5]


# ------------------------------------------------------------------------------- the command


def sweep(out, *more):
    return ["sweep", BOWL, "--optuna", "3", "--ranges", *WORDS, "--out", str(out), *more]


@pytest.mark.slow
def test_the_command_searches_resumes_and_reports(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(sweep(out, "--seeds", "0..1", "--engine.name", "inline")) == 0
    said = capsys.readouterr().out
    assert "6 runs of bowl" in said and "6 finished" in said
    assert len(json.loads((out / "sweep.json").read_text())["search"]["scores"]) == 3
    assert main(["resume", str(out), "--algorithm", BOWL]) == 0
    assert main(["report", str(out)]) == 0


def test_open_trials_are_as_many_as_workers_have_room_for(tmp_path):
    more = ["--seeds", "0..1", "--workers", "3", "--engine.name", "process"]
    assert main(sweep(tmp_path / "out", *more)) == 0
    assert read_manifest(tmp_path / "out").search.lag == 2


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ("--random 3", "--optuna chooses the values itself and cannot be combined with --random"),
        ("--grid seed=1,2", "--optuna chooses the values itself"),
        ("--ranges width=1..200", "width=200 is more than 100"),
        ("--ranges seed=1..200", "seeds are varied by --seeds"),
        ("--ranges nothing=1..200", "nothing"),
        ("--optuna 0", "--optuna N and --ranges NAME=LOW..HIGH must be given together"),
    ],
)
def test_a_search_without_sense_is_refused_before_anything_is_written(more, text, tmp_path, capsys):
    given = {"--optuna": ["3"], "--ranges": WORDS}
    name, *values = more.split()
    given[name] = values
    words = [word for name, values in given.items() for word in (name, *values)]
    assert main(["sweep", BOWL, *words, "--out", str(tmp_path / "out")]) in (1, 2)
    assert text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    for num, ranges in ((0, RANGES), (3, {})):
        with pytest.raises(ConfigError, match="--optuna N and --ranges"):
            Search(num_trials=num, ranges=ranges)


def test_without_optuna_the_extra_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(sweep(tmp_path / "out")) == 1
    assert "pip install 'raffia[sweep]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
