"""Runs whose environments are played elsewhere: the same bits, whoever plays, and who dies."""

import hashlib
import sys
from contextlib import closing
from dataclasses import replace

import pytest

from raffia.algorithms.efficientzero.build import make_model
from raffia.distributed import ChaosEngine
from raffia.envs.env import Discrete, EnvSpec
from raffia.recipes.algorithm import ALGORITHMS
from raffia.recipes.efficientzero import experiment as run_module
from raffia.recipes.efficientzero import workers
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.recipes.efficientzero.presets import PRESETS
from raffia.recipes.engines import make_engine
from raffia.recipes.population_config import PopulationConfig
from raffia.recipes.run_folder import write_config
from raffia.recipes.running import resume_run, train_run
from raffia.recipes.scale_config import ActorsConfig, EngineConfig
from raffia.report import write_report
from raffia.report.folder import read_run
from raffia.report.plots import spent
from raffia.train.checkpoint import Checkpoints
from raffia.train.experiment import RunError
from raffia.train.session import TrainingSession
from tests.recipes.killing import KillingEngine
from tests.recipes.runs import Quiet
from tests.recipes.test_settings import BASES, VECTOR, changed, with_all

SMOKE = with_all(
    PRESETS["smoke"],
    collect__num_env_steps=240,
    collect__random_env_steps=80,
    evaluate__every_env_steps=120,
    evaluate__num_episodes=2,
    checkpoint__every_updates=10,
)
AHEAD = replace(SMOKE, actors=ActorsConfig(ahead=5, weights_every=2))
CARTPOLE = EnvSpec(observation_shape=(4,), action=Discrete(2))
EFFICIENTZERO = ALGORITHMS["efficientzero"]


def digest(folder):
    """Of the learner's state, the replay and what was written of evaluations."""
    found = Checkpoints(folder / "checkpoints").newest(print)
    code = hashlib.sha256()
    names = [name.removesuffix(".safetensors") for name in sorted(found.folder.files)]
    for part in ["state", *(name for name in names if name.startswith("replay"))]:
        for key, value in sorted(found.tensors(part).items(True, True), key=str):
            code.update(str(key).encode() + value.contiguous().numpy().tobytes())
    return found.update, found.extras["evaluate"], code.hexdigest()


def trained(config, folder, **changes):
    result = train_run(EFFICIENTZERO, with_all(config, **changes), folder, view=Quiet())
    assert result.reason == "finished"
    return digest(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Of runs in one process: as it always was, and with turns that are asked for ahead."""
    folder = tmp_path_factory.mktemp("plain")
    found = {"now": trained(SMOKE, folder / "now"), "ahead": trained(AHEAD, folder / "ahead")}
    assert found["now"] != found["ahead"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 2, 4])
def test_how_many_actors_play_changes_nothing(num, plain, tmp_path):
    assert trained(SMOKE, tmp_path / "now", actors__num=num) == plain["now"]
    assert trained(AHEAD, tmp_path / "ahead", actors__num=num) == plain["ahead"]


def test_processes_play_the_same(plain, tmp_path):
    there = dict(actors__num=2, engine__name="process")
    assert trained(SMOKE, tmp_path / "now", **there) == plain["now"]
    assert trained(AHEAD, tmp_path / "ahead", **there) == plain["ahead"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_ray_cluster_plays_the_same(plain, tmp_path):
    there = dict(actors__num=2, engine__name="ray", actors__cpus=0.5)
    assert trained(AHEAD, tmp_path / "ahead", **there) == plain["ahead"]


def with_engine(monkeypatch, engine):
    monkeypatch.setattr(workers, "make_engine", lambda config, message: engine)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, pytest.param(range(2, 20), marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_actors_that_are_late_or_die_change_nothing(seed, plain, tmp_path, monkeypatch):
    for number in [seed] if isinstance(seed, int) else seed:
        engine = ChaosEngine(number, lost=0.05, wasted=0.05)
        with_engine(monkeypatch, engine)
        found = trained(AHEAD, tmp_path / f"{number}", actors__num=2, engine__max_restarts=50)
        assert found == plain["ahead"]
        assert engine.num_lost > 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_actors_that_are_killed_change_nothing(plain, tmp_path, monkeypatch):
    num_killed = 0
    for number in range(8):
        engine = KillingEngine("take", every=9)
        engine.spares = number % 3
        with_engine(monkeypatch, engine)
        assert trained(AHEAD, tmp_path / f"{number}", actors__num=2) == plain["ahead"]
        num_killed += engine.num_killed
    assert num_killed >= 50


@pytest.mark.slow
def test_spares_that_take_over_change_nothing(plain, tmp_path, monkeypatch):
    engine = KillingEngine("take", every=20, most=2)
    engine.spares = 1
    with_engine(monkeypatch, engine)
    assert trained(AHEAD, tmp_path / "run", actors__num=2) == plain["ahead"]
    assert engine.num_killed == 2 and not engine._idle  # all have left


@pytest.mark.slow
@pytest.mark.parametrize(("config", "name"), [(SMOKE, "now"), (AHEAD, "ahead")])
def test_engines_may_change_at_a_resume(config, name, plain, tmp_path):
    folder = tmp_path / "run"
    processes = with_all(config, actors__num=2, engine__name="process")
    stops = [processes, config, with_all(config, actors__num=4)]
    for number, settings in enumerate(stops):
        if number == 0:
            folder.mkdir()
            with closing(EfficientZeroExperiment(settings, folder, Quiet())) as experiment:
                with closing(TrainingSession(experiment)) as session:
                    stop = iter([False] * 17 + [True] * 9)
                    assert session.run(lambda stop=stop: next(stop)).reason == "stopped"
            write_config(folder, settings, "", (), EFFICIENTZERO)
        else:
            result = resume_run(folder, config=settings, view=Quiet())
            assert result.reason == "finished"
    assert digest(folder) == plain[name]


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 5])
def test_a_run_that_is_made_longer_goes_on_alike(ahead, tmp_path):
    """The weights of the first turns that are new were never published."""
    found = []
    for name, num in (("one", 1), ("two", 2)):
        folder, config = tmp_path / name, replace(SMOKE, actors=ActorsConfig(num=num, ahead=ahead))
        trained(config, folder)
        longer = with_all(config, collect__num_env_steps=320)
        assert resume_run(folder, config=longer, view=Quiet()).reason == "finished"
        found.append(digest(folder))
    assert found[0] == found[1]


@pytest.mark.slow
def test_members_play_the_same_elsewhere(tmp_path):
    members = with_all(
        SMOKE,
        population=PopulationConfig(size=2, ranges=("learning_rate=1e-4..1",)),
        collect__num_env_steps=160,
    )
    assert trained(members, tmp_path / "here") == trained(
        members, tmp_path / "there", actors__num=4
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "base", ["box", "board", "gumbel", pytest.param("stack", marks=pytest.mark.slow)]
)
def test_every_kind_of_environment_is_played_elsewhere(base, tmp_path):
    config = with_all(BASES[base], evaluate__num_episodes=2)
    num = config.env.num_envs
    assert trained(config, tmp_path / "here") == trained(
        config, tmp_path / "there", actors__num=num
    )


# -------------------------------------------------------------------------------- refusals


def test_actors_share_the_environments_evenly():
    with pytest.raises(ValueError, match=r"actors.num=3 .* take env.num_envs=6"):
        with_all(SMOKE, actors=ActorsConfig(num=3))
    with pytest.raises(ValueError, match=r"engine.name=process and no workers: set actors.num"):
        with_all(SMOKE, engine=EngineConfig(name="process"))
    with pytest.raises(ValueError, match=r"engine.address=auto is of a Ray cluster"):
        EngineConfig(name="process", address="auto")


@pytest.mark.parametrize("kind", ["actors", "reanalyzers", "evaluators"])
def test_devices_that_workers_can_not_have_are_refused(kind, tmp_path):
    with pytest.raises(ValueError, match=rf"{kind}.device=cuda and no {kind}: set {kind}.num=1"):
        with_all(SMOKE, **{f"{kind}__device": "cuda"})
    there = {f"{kind}__num": 1, f"{kind}__device": "cuda"}
    with pytest.raises(ValueError, match=rf"{kind}.gpus=0: it would give them no card"):
        with_all(SMOKE, **there, engine=EngineConfig(name="ray", address="auto"))
    there[f"{kind}__device"] = "gpu"
    with pytest.raises(RunError, match=rf"{kind}.device='gpu' can't be used: it knows no such"):
        train_run(EFFICIENTZERO, with_all(SMOKE, **there), tmp_path / "run", view=Quiet())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("given", ["make_env", "networks"])
def test_what_a_config_can_not_name_can_not_be_played_elsewhere(given, tmp_path):
    own = {"make_env": lambda *args, **options: run_module.MAKE_ENV(*args, **options)}
    own["networks"] = lambda: make_model(CARTPOLE, SMOKE.model)
    with pytest.raises(ValueError, match="actors are made from the config alone"):
        EfficientZeroExperiment(
            changed(SMOKE, "actors.num", 2), tmp_path, Quiet(), **{given: own[given]}
        )


def test_without_ray_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    config = with_all(SMOKE, actors=ActorsConfig(num=2), engine=EngineConfig(name="ray"))
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'raffia\[scale\]'"):
        train_run(EFFICIENTZERO, config, tmp_path / "run", view=Quiet())
    assert not (tmp_path / "run").exists()


def test_the_settings_of_the_engine_get_there(tmp_path):
    config = with_all(
        SMOKE,
        actors=ActorsConfig(num=2, cpus=0.5, gpus=0.25),
        engine=EngineConfig(max_restarts=7, patience_seconds=3.0),
    )
    with closing(EfficientZeroExperiment(config, tmp_path, Quiet())) as run:
        pool = run.collector.pool
        assert (pool.max_restarts, pool.patience) == (7, 3.0)
        assert (pool.needs.cpus, pool.needs.gpus) == (0.5, 0.25)


def test_the_address_of_a_cluster_gets_there(monkeypatch):
    given = []
    monkeypatch.setattr("raffia.distributed.ray.RayEngine", lambda *args, **kw: given.append(args))
    make_engine(EngineConfig(name="ray", address="auto"))
    assert given == [("auto",)]


def test_spares_get_there(monkeypatch):
    with closing(make_engine(EngineConfig(name="process", spares=2))) as engine:
        assert engine.spares == 2
    given = []
    monkeypatch.setattr("raffia.distributed.ray.RayEngine", lambda *args, **kw: given.append(kw))
    make_engine(EngineConfig(name="ray", spares=3))
    assert given[0]["spares"] == 3
    with pytest.raises(ValueError, match="engine.spares=1 are idle processes, and all workers are"):
        with_all(SMOKE, actors__num=2, engine__spares=1)


def test_by_default_the_loop_plays():
    assert not EfficientZeroRun().actors.play_elsewhere and VECTOR.actors == ActorsConfig()


def test_waiting_is_no_activity_beside_those_that_wait(tmp_path):
    """It is within "collect" and "targets" already, so the report must not add it to them."""
    trained(AHEAD, tmp_path / "run", actors__num=2, reanalyzers__ahead=3)
    run = read_run(tmp_path / "run")
    assert {"waited_for_actors_seconds", "waited_for_batches_seconds"} <= {*run.of("train")[-1]}
    assert spent(run) and not any("waited" in name for name in spent(run))


class Watching(Quiet):
    """Remembers what it was last shown."""

    def show(self, status):
        self.latest = status


@pytest.mark.slow
def test_what_workers_cost_is_shown_and_reported(tmp_path, monkeypatch):
    engine = ChaosEngine(2, lost=0.3)
    monkeypatch.setattr(workers, "make_engine", lambda config, message: engine)
    config = with_all(AHEAD, actors__num=2, engine__max_restarts=50)
    view = Watching()
    train_run(EFFICIENTZERO, config, tmp_path / "run", view=view)
    assert 0 < view.latest.waiting <= 1 and view.latest.staleness >= AHEAD.actors.ahead
    row = read_run(tmp_path / "run").of("train")[-1]
    assert view.latest.worker_restarts == row["actor_restarts"] > 0
    page = write_report([tmp_path / "run"]).read_text()
    assert "waited for actors" in page and f">{row['actor_restarts']:.0f}</td>" in page
