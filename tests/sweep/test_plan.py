"""The plan of a sweep depends on its arguments alone."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raffia.files import DamagedFileError
from raffia.recipes.algorithm import ALGORITHMS
from raffia.sweep import (
    MANIFEST,
    Manifest,
    PlannedRun,
    Range,
    plan_runs,
    read_choices,
    read_manifest,
    read_ranges,
    read_seeds,
    write_manifest,
)
from raffia.train.config import ConfigError

ILQL = ALGORITHMS["ilql"]
SMOKE = ILQL.presets["ilql-smoke"]
NAMES = st.sampled_from(["a", "b.c", "optimizer.learning_rate", "x.y.z"])
GRIDS = st.dictionaries(
    NAMES, st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True), max_size=3
)
SEEDS = st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True)


@given(seeds=SEEDS, grid=GRIDS, num=st.integers(0, 4), seed=st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_every_draw_is_combined_with_every_grid_point_and_seed_once(seeds, grid, num, seed):
    ranges = {"draw": Range(1e-5, 1.0)} if num else {}
    runs = plan_runs(seeds, grid, ranges, num, seed)
    assert runs == plan_runs(seeds, grid, ranges, num, seed)
    size = len(seeds) * max(1, num) * math.prod(map(len, grid.values()))
    assert len(runs) == size == len({run.name for run in runs})
    kinds = [json.dumps([run.settings, run.seed], sort_keys=True) for run in runs]
    assert len(set(kinds)) == size
    assert [run.name for run in runs] == sorted(run.name for run in runs)
    if num:  # more draws begin with the same
        more = plan_runs(seeds, grid, ranges, num + 2, seed)[:size]
        pairs = zip(more, runs, strict=True)
        assert all((a.settings, a.seed) == (b.settings, b.seed) for a, b in pairs)
        assert plan_runs(seeds, grid, ranges, num, seed + 1) != runs


MANY = {f"s{number}": range(10) for number in range(12)}


@given(st.floats(1e-8, 1e3), st.floats(1.001, 1e6), st.integers(0, 99), st.booleans())
@settings(max_examples=100, deadline=None)
def test_draws_lie_in_their_range(low, ratio, seed, whole):
    low, high = (int(low), int(low * ratio) + 1) if whole else (low, low * ratio)
    if low >= high:
        return
    runs = plan_runs([0], ranges={"x": Range(low, high)}, num_draws=2, seed=seed)
    values = [run.settings["x"] for run in runs]
    assert all(low <= value <= high for value in values) and values[0] != values[1]
    assert all(isinstance(value, int if whole else float) for value in values)


def test_a_wide_range_is_drawn_by_its_logarithm():
    runs = plan_runs([0], ranges={"x": Range(1e-5, 1e-1)}, num_draws=400)
    small = sum(run.settings["x"] < 1e-3 for run in runs)
    assert 150 < small < 250
    runs = plan_runs([0], ranges={"x": Range(1.0, 9.0)}, num_draws=400)
    assert 150 < sum(run.settings["x"] < 5 for run in runs) < 250


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: read_seeds("0-4"), r"--seeds 0-4: '0-4' is not a seed; write 0..4, or 0,1,7"),
        (lambda: read_seeds("4..0"), "'4..0' is not a range of seeds"),
        (lambda: read_seeds("1,0..3"), "a seed occurs twice"),
        (lambda: read_choices(["lr"]), "--grid lr: write NAME=ONE,TWO"),
        (lambda: read_choices(["lr=1", "lr=2"]), "--grid: lr occurs twice"),
        (lambda: read_choices(["lr=1,1"]), "a value occurs twice"),
        (lambda: read_ranges(["lr=2..1"]), "2..1: the first number must be smaller than the sec"),
        (lambda: read_ranges(["lr=1e999..2"]), "must be smaller than the second"),
        (lambda: plan_runs([0], {"search": [1], "search.x": [2]}), "contains search.x: vary only"),
        (lambda: plan_runs([0], {"a.b.c": [1]}, {"a.b": [2]}, 1), "a.b contains a.b.c: vary"),
        (lambda: plan_runs([0], num_draws=3), "--random N and --ranges .* must be given together"),
        (lambda: plan_runs([0], ranges={"x": [1]}), "must be given together"),
        (lambda: plan_runs([0], {"x": [1]}, {"x": [1]}, 1), "x: given in --grid and in --ranges"),
        (lambda: plan_runs([0], {"seed": [1]}), "seeds are varied by --seeds"),
        (lambda: plan_runs([0], ranges={"x": [1, 2], "y": Range(1, 2)}, num_draws=5), "only 4 dif"),
        (lambda: plan_runs(range(1000), {"x": range(1000)}), "this makes 1,000,000 runs"),
        (lambda: plan_runs([0], MANY), "1,000,000,000,000 runs, but a sweep can have 1 to"),
    ],
)
def test_invalid_plans_are_refused(call, text):
    with pytest.raises(ConfigError, match=text):
        call()


def test_values_are_read_as_json_and_numbers_in_common_forms():
    found = read_choices(["a=1e-3,none,true,atari/pong,.5,007", "b-c=[1, 0.5],[2]"])
    assert found == {"a": [0.001, None, True, "atari/pong", 0.5, "007"], "b_c": [[1, 0.5], [2]]}
    found = read_ranges(["a=.5..1.", "b=+1..007", "c=1e-3..1"])
    assert found == {"a": Range(0.5, 1.0), "b": Range(1, 7), "c": Range(1e-3, 1)}


def test_a_run_has_its_own_settings_and_those_of_the_sweep(tmp_path):
    runs = plan_runs([3, 4], {"optimizer.learning_rate": [0.25]})
    write_manifest(tmp_path, Manifest.of(ILQL, SMOKE, runs, preset="ilql-smoke"))
    found = read_manifest(tmp_path)
    configs = [found.config_of(run, ILQL) for run in found.runs]
    assert [config.seed for config in configs] == [3, 4]
    assert {config.optimizer.learning_rate for config in configs} == {0.25}
    assert {config.num_updates for config in configs} == {SMOKE.num_updates}
    assert all(config.num_threads for config in configs)  # settled


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"optimizer.learning_rat": 1.0}, r"run 0: .*did you mean .*learning_rate"),
        ({"optimizer.learning_rate": "fast"}, "run 0: optimizer.learning_rate"),
        ({"num_updates": -1}, "run 0: .*num_updates"),
    ],
)
def test_invalid_settings_are_refused_with_their_run(settings, text):
    with pytest.raises(ConfigError, match=text):
        Manifest.of(ILQL, SMOKE, [PlannedRun("0", settings, 0)])


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("runs"),
        lambda data: data["runs"][0].update(name="../../elsewhere"),
        lambda data: data["runs"][0].update(name=".."),
        lambda data: data.update(more=1),
        lambda data: data["engine"].update(name="cloud"),
    ],
)
def test_a_manifest_that_was_altered_is_refused(change, tmp_path):
    write_manifest(tmp_path, Manifest.of(ILQL, SMOKE, plan_runs([0])))
    data = json.loads((tmp_path / MANIFEST).read_text())
    change(data)
    (tmp_path / MANIFEST).write_text(json.dumps(data))
    with pytest.raises(DamagedFileError, match="it is not the manifest of a sweep"):
        read_manifest(tmp_path)
