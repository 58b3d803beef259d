"""Batches that are made elsewhere and ahead: the same bits, whoever makes them, and who dies."""

from contextlib import closing

import pytest

from raffia.distributed import ChaosEngine, InlineEngine
from raffia.distributed.engine import RoleError
from raffia.recipes.efficientzero import reanalyzers
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.recipes.population_config import PopulationConfig
from raffia.recipes.run_folder import write_config
from raffia.recipes.running import resume_run
from raffia.recipes.scale_config import EngineConfig, ReanalyzersConfig
from raffia.search.errors import UnfitOutputError
from raffia.train.checkpoint import Checkpoints
from raffia.train.experiment import RunError
from raffia.train.nan_guard import NonFiniteError
from raffia.train.session import TrainingSession
from tests.recipes.killing import KillingEngine
from tests.recipes.runs import Quiet
from tests.recipes.test_actors import EFFICIENTZERO, SMOKE, digest, trained, with_engine
from tests.recipes.test_settings import BASES, with_all

# The ring is overwritten while batches are open, and the target network is copied meanwhile.
NOW = with_all(
    SMOKE,
    targets__reanalyze_ratio=0.5,
    targets__target_interval=4,
    replay__capacity=120,
    collect__rollout_length=2,
)
LATE = with_all(NOW, reanalyzers__ahead=7)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Of runs in one process: made when they are due, and drawn ahead."""
    folder = tmp_path_factory.mktemp("plain")
    found = {"now": trained(NOW, folder / "now"), "late": trained(LATE, folder / "late")}
    assert found["now"] != found["late"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 2, 3])
def test_how_many_reanalyzers_there_are_changes_nothing(num, plain, tmp_path):
    assert trained(NOW, tmp_path / "now", reanalyzers__num=num) == plain["now"]
    assert trained(LATE, tmp_path / "late", reanalyzers__num=num) == plain["late"]


@pytest.mark.slow
def test_processes_make_the_same(plain, tmp_path):
    there = dict(reanalyzers__num=2, engine__name="process", actors__num=2, evaluators__num=1)
    assert trained(LATE, tmp_path / "late", **there) == plain["late"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_ray_cluster_makes_the_same(plain, tmp_path):
    there = dict(reanalyzers__num=2, engine__name="ray", reanalyzers__cpus=0.5)
    assert trained(LATE, tmp_path / "late", **there) == plain["late"]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_reanalyzers_that_die_change_nothing(seed, plain, tmp_path, monkeypatch):
    engine = ChaosEngine(seed, lost=0.15, wasted=0.15)
    with_engine(monkeypatch, engine)
    there = dict(reanalyzers__num=2, engine__max_restarts=50)
    assert trained(LATE, tmp_path / "late", **there) == plain["late"]
    assert engine.num_lost > 3


@pytest.mark.slow
@pytest.mark.parametrize("every", [20, pytest.param(11, marks=pytest.mark.slow)])
@pytest.mark.timeout(300)
def test_reanalyzers_that_are_killed_change_nothing(every, plain, tmp_path, monkeypatch):
    engine = KillingEngine("ask", every)
    with_engine(monkeypatch, engine)
    assert trained(LATE, tmp_path / "late", reanalyzers__num=2) == plain["late"]
    assert engine.num_killed >= 2


def test_one_that_dies_each_time_ends_the_run(tmp_path, monkeypatch):
    with_engine(monkeypatch, KillingEngine("ask", every=1))
    with pytest.raises(RoleError, match=r"ReanalyzeRole was lost 2 times at task 0, .*SIGKILL"):
        trained(LATE, tmp_path / "late", reanalyzers__num=1, engine__max_restarts=1)


def stopped(config, folder, num_updates):
    """Of a run that is stopped: its update, and what the checkpoint has of open batches."""
    folder.mkdir()
    with closing(EfficientZeroExperiment(config, folder, Quiet())) as experiment:
        with closing(TrainingSession(experiment)) as session:
            stop = iter([False] * num_updates)
            assert session.run(lambda: next(stop, True)).reason == "stopped"
    write_config(folder, config, "", (), EFFICIENTZERO)
    found = Checkpoints(folder / "checkpoints").newest(print)
    return found.update, found.tensors("stream")["ahead", "drawn"]


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [3, 19, 40, pytest.param(50, marks=pytest.mark.slow)])
def test_a_resume_asks_again_for_what_was_drawn(stop_at, plain, tmp_path):
    """With the weights of then and the values that the replay had then, and by others.

    After 19 the steps that the next update plays overwrite some that were drawn before.
    """
    folder = tmp_path / "run"
    update, drawn = stopped(with_all(LATE, reanalyzers__num=2), folder, stop_at)
    assert sorted(map(int, drawn.keys())) == [*range(update, min(40, update + 7))]
    whole = ["observation" in drawn[name, "task", "segments"].keys() for name in drawn.keys()]
    assert any(whole) == (stop_at >= 40)  # of what was overwritten since
    assert resume_run(folder, config=LATE, view=Quiet()).reason == "finished"
    assert digest(folder) == plain["late"]


# Generations come after updates that no copy of the target network comes after.
MEMBERS = with_all(
    NOW,
    population=PopulationConfig(size=2, ranges=("learning_rate=1e-4..1", "batch_size=8..16")),
    evaluate__every_env_steps=35,
    evaluate__num_episodes=1,
    replay__batch_size=12,
    collect__num_env_steps=160,
)


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["shared", "own"])
@pytest.mark.timeout(300)
def test_batches_of_a_population_are_made_elsewhere(replay, tmp_path, monkeypatch):
    now = with_all(MEMBERS, population__replay=replay)
    here = trained(now, tmp_path / "here")
    late = with_all(now, reanalyzers__ahead=7)
    stopped(late, tmp_path / "late", 11)
    assert resume_run(tmp_path / "late", view=Quiet()).reason == "finished"
    with_engine(monkeypatch, ChaosEngine(3, lost=0.15, wasted=0.15))
    there = {"reanalyzers__num": 2, "engine__max_restarts": 50}
    assert trained(now, tmp_path / "there", **there) == here
    assert trained(late, tmp_path / "there late", **there) == digest(tmp_path / "late") != here


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_members_may_learn_elsewhere_too(tmp_path):
    """Members who learn in workers have other last bits than in one program: any number the same.

    The loop has their weights only where it asks for them.
    """
    late = with_all(MEMBERS, reanalyzers__ahead=7)
    found = [
        trained(
            late, tmp_path / f"{workers}{num}", population__workers=workers, reanalyzers__num=num
        )
        for workers, num in ((1, 0), (2, 2))
    ]
    assert found[0] == found[1]


def test_the_lead_can_not_change_at_a_resume(tmp_path):
    stopped(LATE, tmp_path / "run", 5)
    with pytest.raises(RunError, match=r"reanalyzers.ahead: .* was started with other values"):
        resume_run(tmp_path / "run", config=NOW, view=Quiet())


@pytest.mark.slow
@pytest.mark.parametrize(
    "base",
    ["box", "stack", *(pytest.param(name, marks=pytest.mark.slow) for name in ("board", "gumbel"))],
)
@pytest.mark.parametrize("ahead", [0, 3])
def test_every_kind_of_batch_is_made_elsewhere(base, ahead, tmp_path):
    config = with_all(BASES[base], evaluate__num_episodes=2, reanalyzers__ahead=ahead)
    assert trained(config, tmp_path / "here") == trained(
        config, tmp_path / "there", reanalyzers__num=2
    )


@pytest.mark.slow
def test_stacks_are_read_again_at_a_resume(tmp_path):
    config = with_all(BASES["stack"], evaluate__num_episodes=2, reanalyzers__ahead=4)
    _, drawn = stopped(config, tmp_path / "run", 2)
    assert not any("observation" in drawn[name, "task", "segments"].keys() for name in drawn.keys())
    assert resume_run(tmp_path / "run", config=config, view=Quiet()).reason == "finished"
    assert digest(tmp_path / "run") == trained(config, tmp_path / "whole")


def test_simulations_are_counted_wherever_they_are(tmp_path):
    counts = []
    for num in (0, 2):
        config, folder = with_all(NOW, reanalyzers__num=num), tmp_path / str(num)
        folder.mkdir()
        with closing(EfficientZeroExperiment(config, folder, Quiet())) as experiment:
            with closing(TrainingSession(experiment)) as session:
                stop = iter([False] * 5)
                session.run(lambda stop=stop: next(stop, True))
            counts.append(experiment.counters()["simulations"])
    assert counts[0] == counts[1] > 0


def test_what_is_not_finite_stops_the_run_as_in_the_loop(tmp_path, monkeypatch):
    def broken(*arguments, **options):
        raise UnfitOutputError("root.value is NaN")

    monkeypatch.setattr(reanalyzers, "make_batch", broken)
    for num in (0, 1):
        with pytest.raises(NonFiniteError, match=r"update 1 is not finite: root.value is NaN"):
            trained(NOW, tmp_path / str(num), reanalyzers__num=num)
        assert (tmp_path / str(num) / "nan_dump" / "000000001").is_dir()


# -------------------------------------------------------------------------------- refusals


def test_settings_that_can_not_be_are_refused():
    with pytest.raises(ValueError, match=r"ahead=-1"):
        ReanalyzersConfig(ahead=-1)
    with pytest.raises(ValueError, match=r"no workers: set actors.num, .* or reanalyzers.num"):
        with_all(SMOKE, engine=EngineConfig(name="process"))


def test_workers_find_room_together(tmp_path, monkeypatch):
    asked = []

    class Small(InlineEngine):
        def require(self, workers):
            asked.extend((one.num, one.needs.cpus, one.needs.gpus) for one in workers)
            raise ValueError("no room")

    with_engine(monkeypatch, Small())
    there = dict(reanalyzers__num=2, reanalyzers__cpus=2.0, reanalyzers__gpus=0.25, actors__num=1)
    with pytest.raises(ValueError, match="no room"):
        trained(NOW, tmp_path / "run", **there)
    assert asked == [(1, 1.0, 0.0), (2, 2.0, 0.25)]


def test_the_settings_of_reanalyzers_get_there(tmp_path):
    reanalyzers = ReanalyzersConfig(num=2, ahead=7, cpus=0.25, gpus=0.5)
    config = with_all(LATE, reanalyzers=reanalyzers, engine__patience_seconds=9.0)
    with closing(EfficientZeroExperiment(config, tmp_path, Quiet())) as run:
        pool = run.ahead.pool
        assert (pool.num_workers, run.ahead.ahead, pool.patience) == (2, 7, 9.0)
        assert (pool.needs.cpus, pool.needs.gpus) == (0.25, 0.5)


def test_by_default_the_loop_makes_them():
    assert not SMOKE.reanalyzers.play_elsewhere
