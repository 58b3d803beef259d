"""Populations whose members are divided among workers: the bits of one program."""

import json
from contextlib import closing

import pytest

from raffia.distributed import Pool
from raffia.recipes.algorithm import ALGORITHMS
from raffia.recipes.ilql.experiment import ILQLExperiment
from raffia.recipes.population_config import PopulationConfig
from raffia.recipes.run_folder import write_config
from raffia.recipes.running import resume_run
from raffia.train.session import TrainingSession
from tests.recipes.killing import KillingEngine
from tests.recipes.runs import Quiet
from tests.recipes.test_ilql_all_settings import WORDLE, make_bases
from tests.recipes.test_learners import digest, trained
from tests.recipes.test_settings import with_all

ILQL = ALGORITHMS["ilql"]
FOUR = with_all(
    WORDLE,
    population=PopulationConfig(
        size=4,
        spread=3.0,
        parameters=0.5,
        ranges=("learning_rate=1e-5..1", "tau=0.5..0.95", "batch_size=3..8"),
    ),
    num_updates=9,
    num_threads=1,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The digest of the population in one program, and its generations."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    found = trained(FOUR, folder), generations(folder)
    assert len(found[1]) == 2
    return found


def rows_of(folder, kind):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == kind]


def generations(folder):
    """The rows of generations, without the clock."""
    return [
        {**row, "seconds": 0}
        for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        if row["kind"] == "generation"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_any_number_of_workers_learns_the_bits_of_one_program(tmp_path, whole, workers):
    found = trained(FOUR, tmp_path / "run", population__workers=workers)
    assert (found, generations(tmp_path / "run")) == whole


def test_rows_of_means_tell_of_the_workers(tmp_path):
    trained(FOUR, tmp_path / "run", population__workers=2, num_updates=2)
    means = rows_of(tmp_path / "run", "train")
    assert means[-1]["member_restarts"] == 0
    assert means[-1]["waited_for_members_seconds"] > 0


def play(config, folder, engine, stop_at=None):
    """The run by this engine, up to this update."""
    with closing(ILQLExperiment(config, folder, Quiet())) as experiment:
        if engine is not None:
            experiment.across.pool.engine = engine
        with closing(TrainingSession(experiment)) as session:
            reason = session.run(lambda: session.log.status.update == stop_at).reason
        if engine is not None:
            experiment.across.close()
            engine.close()
            return reason, experiment.across.pool.num_restarts
        return reason


def begin(config, folder):
    folder.mkdir()
    write_config(folder, config, "", (), ILQL)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [3, 5])  # in an evaluation, and between two
def test_a_population_goes_on_with_other_workers_wherever_it_stops(tmp_path, whole, stop_at):
    config = with_all(FOUR, population__workers=2)
    folder = begin(config, tmp_path / "run")
    assert play(config, folder, None, stop_at=stop_at) == "stopped"
    other = with_all(FOUR, population__workers=4)
    assert resume_run(folder, ILQL, config=other, view=Quiet()).reason == "finished"
    assert (digest(folder), generations(folder)) == whole


@pytest.mark.slow
@pytest.mark.parametrize(("at", "every"), [("ask", 5), ("take", 7)])
def test_killed_workers_change_no_bit(tmp_path, whole, at, every):
    config = with_all(FOUR, population__workers=2, engine__name="process")
    folder = begin(config, tmp_path / "run")
    reason, restarts = play(config, folder, KillingEngine(at, every))
    assert reason == "finished"
    assert restarts > 3
    assert (digest(folder), generations(folder)) == whole


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_ray_cluster_learns_the_same(tmp_path, whole):
    found = trained(FOUR, tmp_path / "run", population__workers=2, engine__name="ray")
    assert (found, generations(tmp_path / "run")) == whole


@pytest.mark.slow
def test_a_process_that_is_killed_makes_its_updates_again(tmp_path, whole):
    config = with_all(FOUR, population__workers=2, engine__name="process")
    folder = begin(config, tmp_path / "run")
    engine = KillingEngine("take", 4, most=1)
    assert play(config, folder, engine) == ("finished", 1)
    assert engine.num_killed == 1
    assert (digest(folder), generations(folder)) == whole


def test_changes_of_a_language_model_are_learnt_in_workers(tmp_path):
    """What does not learn is read from the run's folder; batches come in parts."""
    lora = with_all(
        make_bases(tmp_path)["lora"],
        population=PopulationConfig(size=2, spread=3.0),
        batch_size=4,
        num_micro_batches=2,
    )
    found = trained(lora, tmp_path / "whole")
    assert trained(lora, tmp_path / "across", population__workers=2) == found


def test_the_settings_of_the_engine_get_there(tmp_path):
    changes = {"engine__max_restarts": 7, "engine__patience_seconds": 9.0}
    config = with_all(FOUR, population__workers=2, **changes)
    with closing(ILQLExperiment(config, begin(config, tmp_path / "run"), Quiet())) as experiment:
        pool: Pool = experiment.across.pool
        assert (pool.num_workers, pool.max_restarts, pool.patience) == (2, 7, 9.0)


def test_what_can_not_be_divided_is_refused():
    with pytest.raises(ValueError, match=r"workers=3 .*size=4 .*: take population.size=6"):
        with_all(FOUR, population__workers=3)
    with pytest.raises(ValueError, match=r"workers=2 .*size=1 .*: take population.size=2"):
        with_all(WORDLE, population__workers=2)
    with pytest.raises(ValueError, match=r"workers=-1"):
        with_all(FOUR, population__workers=-1)
    with pytest.raises(ValueError, match=r"engine.name=process and no workers: set population"):
        with_all(WORDLE, engine__name="process")
