"""Members of EfficientZero's populations that are divided among workers: the same bits by any."""

import json
from contextlib import closing
from functools import partial

import pytest

from raffia.distributed import ChaosEngine
from raffia.recipes.efficientzero import experiment as run_module
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.recipes.population_config import PopulationConfig
from raffia.recipes.run_folder import write_config
from raffia.recipes.running import resume_run
from raffia.train.session import TrainingSession
from tests.recipes.killing import KillingEngine
from tests.recipes.runs import Quiet
from tests.recipes.test_actors import EFFICIENTZERO, SMOKE, with_engine
from tests.recipes.test_efficientzero_learners import digest, trained
from tests.recipes.test_settings import with_all

FOUR = with_all(
    SMOKE,
    population=PopulationConfig(
        size=4,
        spread=3.0,
        parameters=0.5,
        ranges=("learning_rate=1e-4..1", "batch_size=6..12"),
    ),
    env__num_envs=4,
    replay__batch_size=8,
    targets__reanalyze_ratio=0.5,
    targets__target_interval=7,
    collect__num_env_steps=140,
    evaluate__every_env_steps=44,
)


def generations(folder):
    """The rows of generations, without the clock."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{**row, "seconds": 0} for row in rows if row["kind"] == "generation"]


@pytest.fixture(scope="module")
def each(tmp_path_factory):
    """Of one program in which each member learns by itself."""
    folder = tmp_path_factory.mktemp("each") / "run"
    with pytest.MonkeyPatch.context() as patch:
        made = run_module.Members

        def members(*arguments, **options):
            return made(*arguments, **{**options, "grads": "each"})

        patch.setattr(run_module, "Members", members)
        found = trained(FOUR, folder), generations(folder)
    assert len(found[1]) == 3
    return found


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_any_number_of_workers_learns_the_same_bits(workers, each, tmp_path):
    found = trained(FOUR, tmp_path / "run", population__workers=workers)
    assert (found, generations(tmp_path / "run")) == each


@pytest.mark.slow
def test_members_with_a_replay_of_their_own_and_actors_ahead(tmp_path):
    config = with_all(FOUR, population__replay="own", actors__ahead=3)
    one = trained(config, tmp_path / "one", population__workers=1)
    there = dict(population__workers=2, actors__num=2)
    assert trained(config, tmp_path / "two", **there) == one


@pytest.mark.slow
def test_workers_that_die_change_nothing(each, tmp_path, monkeypatch):
    engine = ChaosEngine(1, lost=0.05, wasted=0.05)
    with_engine(monkeypatch, engine)
    there = dict(population__workers=2, engine__max_restarts=50)
    found = trained(FOUR, tmp_path / "run", **there)
    assert (found, generations(tmp_path / "run")) == each
    assert engine.num_lost > 3


@pytest.mark.slow
def test_processes_that_are_killed_make_their_updates_again(each, tmp_path, monkeypatch):
    engine = KillingEngine("take", every=20, most=2)
    with_engine(monkeypatch, engine)
    found = trained(FOUR, tmp_path / "run", population__workers=2)
    assert (found, generations(tmp_path / "run")) == each
    assert engine.num_killed == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_ray_cluster_learns_the_same(each, tmp_path):
    found = trained(FOUR, tmp_path / "run", population__workers=2, engine__name="ray")
    assert (found, generations(tmp_path / "run")) == each


@pytest.mark.slow
def test_a_population_goes_on_with_other_workers(each, tmp_path):
    config, folder = with_all(FOUR, population__workers=2), tmp_path / "run"
    folder.mkdir()
    write_config(folder, config, "", (), EFFICIENTZERO)
    with closing(EfficientZeroExperiment(config, folder, Quiet())) as experiment:
        with closing(TrainingSession(experiment)) as session:
            stop = partial(next, iter([False] * 9), True)
            assert session.run(stop).reason == "stopped"
        row = experiment.extra_metrics(0)
        assert row["member_restarts"] == 0 and row["waited_for_members_seconds"] > 0
    other = with_all(FOUR, population__workers=4)
    assert resume_run(folder, EFFICIENTZERO, config=other, view=Quiet()).reason == "finished"
    assert (digest(folder), generations(folder)) == each


def test_what_can_not_be_divided_is_refused():
    with pytest.raises(ValueError, match=r"workers=3 .*size=4 .*: take population.size=6"):
        with_all(FOUR, population__workers=3)
    with pytest.raises(ValueError, match=r"engine.name=process and no workers: .* population.w"):
        with_all(FOUR, engine__name="process")
