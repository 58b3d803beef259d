"""Sweeps searched by Optuna: the plan depends on scores alone, with any engine."""

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
RANGE_ARGS = ["rate=1e-4..1.0", "width=1..6", "layers=[],[1],[2,3]"]


def run_search(folder, algorithm, engine="inline", workers=1, session=SweepSession, **changes):
    """A sweep of twelve trials with two seeds, two trials at a time."""
    search = Search(num_trials=12, ranges=RANGES, seeds=(0, 1), lag=2)
    base = replace(algorithm.config(), **changes)
    manifest = Manifest.of(algorithm, base, [], search=search, workers=workers)
    write_manifest(folder, replace(manifest, engine=replace(manifest.engine, name=engine)))
    return session(folder, algorithm).run()


@pytest.fixture(scope="module")
def algorithm():
    return find_algorithm(BOWL)


@pytest.fixture(scope="module")
def undisturbed(algorithm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "sweep"
    assert run_search(folder, algorithm).failed == []
    return read_manifest(folder)


def test_the_plan_is_completed_with_the_scores_of_its_runs(undisturbed):
    assert (
        len(undisturbed.runs) == undisturbed.num_runs == 24 and len(undisturbed.search.scores) == 12
    )
    assert [run.seed for run in undisturbed.runs] == [0, 1] * 12
    names = [run.name for run in undisturbed.runs]
    assert names == sorted(names) and len(set(names)) == 24
    for trial, score in enumerate(undisturbed.search.scores):
        run = undisturbed.runs[2 * trial].settings
        distance = abs(run["width"] - 3) + sum(run["layers"])
        assert -score >= distance - 0.001


@pytest.mark.slow
def test_worker_processes_give_the_same_plan(undisturbed, algorithm, tmp_path):
    """Also if a later trial ends before an earlier one."""
    run_search(tmp_path / "sweep", algorithm, "process", workers=3, jitter=0.3)
    found = read_manifest(tmp_path / "sweep")
    assert found.search == undisturbed.search
    assert [run.settings for run in found.runs] == [run.settings for run in undisturbed.runs]


@pytest.mark.parametrize("trial", [10, 11])  # the first ten are random
def test_trials_that_end_together_give_the_same_plan(trial, undisturbed):
    """All scores before a trial may be known when it is suggested."""
    search, runs = undisturbed.search, undisturbed.runs
    known = replace(search, scores=search.scores[:trial])
    assert (
        suggest(known, [run.settings for run in runs[: 2 * trial : 2]]) == runs[2 * trial].settings
    )


@pytest.mark.parametrize("stop_at", [1, 7])
def test_an_interrupted_search_resumes_exactly(stop_at, undisturbed, algorithm, tmp_path):
    """The leader dies after `stop_at` runs."""
    ended = []

    class Dying(SweepSession):
        def _note(self, name, how):
            super()._note(name, how)
            ended.append(name)
            if len(ended) == stop_at:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_search(tmp_path, algorithm, session=Dying)
    assert len(read_manifest(tmp_path).runs) < 24
    SweepSession(tmp_path, algorithm).run()
    found = read_manifest(tmp_path)
    assert (found.runs, found.search) == (undisturbed.runs, undisturbed.search)


def test_a_failed_trial_is_reported_and_the_search_continues(algorithm, tmp_path):
    search = Search(num_trials=6, ranges={"width": [7, 3]})
    manifest = Manifest.of(algorithm, algorithm.config(), [], search=search)
    write_manifest(tmp_path, replace(manifest, engine=replace(manifest.engine, name="inline")))
    result = SweepSession(tmp_path, algorithm).run()
    found = read_manifest(tmp_path)
    widths = [run.settings["width"] for run in found.runs]
    assert 7 in widths and 3 in widths
    assert [score is None for score in found.search.scores] == [width == 7 for width in widths]
    assert len(result.failed) == widths.count(7)
    SweepSession(tmp_path, algorithm).run()  # retries the failed ones; reported scores stay
    assert read_manifest(tmp_path).search == found.search


def bowl_of(settings):
    distance = (math.log10(settings["rate"]) + 2) ** 2 + abs(settings["width"] - 3)
    return -distance - sum(settings["layers"])


def suggested(num, seed, lag=1):
    search, found = Search(num_trials=num, ranges=RANGES, seed=seed, lag=lag), []
    for _ in range(num):
        done = found[: max(0, len(found) - lag + 1)]
        search = replace(search, scores=tuple(bowl_of(settings) for settings in done))
        found.append(suggest(search, found))
    return [bowl_of(settings) for settings in found]


def test_suggestions_improve_with_scores():
    """The last third is better than the first, random third."""
    first, last = 0.0, 0.0
    for seed in range(3):
        scores = suggested(30, seed, lag=1 + seed)
        first, last = first + sum(scores[:10]) / 30, last + sum(scores[-10:]) / 30
    assert last > 0.6 * first  # both are below 0
    search = Search(num_trials=9, ranges=RANGES)
    scored = replace(search, scores=(1.0,))
    before = [{"rate": 0.1, "width": 1, "layers": []}]
    assert suggest(scored, before) == suggest(scored, before)
    assert suggest(scored, before) != suggest(replace(scored, seed=1), before)
    assert suggest(scored, before) != suggest(scored, before * 2)


@pytest.mark.parametrize("lag", [1, 3])
def test_no_trial_repeats_another_while_new_ones_are_left(lag):
    search = Search(num_trials=16, ranges={"width": Range(1, 8), "layers": [[], [1]]}, lag=lag)
    found = []
    for trial in range(16):
        scores = tuple(-float(settings["width"]) for settings in found[: max(0, trial - lag + 1)])
        found.append(suggest(replace(search, scores=scores), found))
    assert len({json.dumps(settings) for settings in found}) == 16
    assert suggest(replace(search, scores=(0.0,) * 16), found) in found


def test_ends_of_ranges_are_probed():
    runs = probes(Search(num_trials=1, ranges=RANGES, seeds=(4,)))
    assert {run.settings["rate"] for run in runs} == {1e-4, 1.0}
    assert [2, 3] in [run.settings["layers"] for run in runs]
    search = Search(num_trials=3, ranges={"rate": Range(1, 5)}, seeds=(4, 5))
    runs_of_trial = next_trial(
        search, [PlannedRun("0", {"rate": 2}, 4), PlannedRun("1", {"rate": 2}, 5)]
    )
    assert [run.name[:2] for run in runs_of_trial] == ["2-", "3-"] and [
        run.seed for run in runs_of_trial
    ] == [4, 5]


# ------------------------------------------------------------------------------- the command


def sweep(out, *more):
    return ["sweep", BOWL, "--optuna", "3", "--ranges", *RANGE_ARGS, "--out", str(out), *more]


@pytest.mark.slow
def test_the_command_searches_resumes_and_reports(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(sweep(out, "--seeds", "0..1", "--engine.name", "inline")) == 0
    output = capsys.readouterr().out
    assert "6 runs of bowl" in output and "6 finished" in output
    assert len(json.loads((out / "sweep.json").read_text())["search"]["scores"]) == 3
    assert main(["resume", str(out), "--algorithm", BOWL]) == 0
    assert main(["report", str(out)]) == 0


def test_as_many_trials_are_open_as_the_workers_can_run(tmp_path):
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
def test_an_invalid_search_is_refused_before_anything_is_written(more, text, tmp_path, capsys):
    options = {"--optuna": ["3"], "--ranges": RANGE_ARGS}
    name, *values = more.split()
    options[name] = values
    args = [arg for name, values in options.items() for arg in (name, *values)]
    assert main(["sweep", BOWL, *args, "--out", str(tmp_path / "out")]) in (1, 2)
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
