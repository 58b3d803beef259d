"""ILQL's evaluations that are played elsewhere: the same bits, whoever plays, and who dies."""

import json
from contextlib import closing
from dataclasses import replace

import pytest

from raffia.distributed import ChaosEngine
from raffia.lazy import imported
from raffia.recipes.algorithm import ALGORITHMS
from raffia.recipes.ilql import experiment as run_module
from raffia.recipes.ilql import train
from raffia.recipes.ilql.evaluators import EvaluateRole, evaluator_config
from raffia.recipes.ilql.experiment import ILQLExperiment
from raffia.recipes.population_config import PopulationConfig
from raffia.recipes.run_folder import write_config
from raffia.recipes.running import resume_run, train_run
from raffia.recipes.scale_config import EvaluatorsConfig
from raffia.train.checkpoint import Checkpoints
from raffia.train.nan_guard import NonFiniteError
from raffia.train.session import TrainingSession
from tests.recipes.killing import KillingEngine
from tests.recipes.runs import Quiet
from tests.recipes.test_ilql_all_settings import WORDLE, make_bases
from tests.recipes.test_ilql_own_environment import ENV
from tests.recipes.test_learners import digest, trained
from tests.recipes.test_settings import with_all

ILQL = ALGORITHMS["ilql"]
NOW = with_all(WORDLE, num_updates=8, evaluate__every_updates=2, checkpoint__keep=1)
LATE = with_all(NOW, evaluators__join_after=3)


def rows(folder):
    """Of evaluations, without when."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in row.items() if key not in ("seconds", "time")}
        for row in found
        if row["kind"] == "evaluate"
    ]


def seen(folder):
    """All that an evaluation leaves, and the learner's state."""
    scores = {one.update: one.score for one in Checkpoints(folder / "checkpoints").available()}
    dialogues = {path.name: path.read_bytes() for path in (folder / "dialogues").iterdir()}
    return digest(folder), rows(folder), scores, dialogues


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Of runs in one process: evaluated at once, and joined later."""
    folder = tmp_path_factory.mktemp("plain")
    trained(NOW, folder / "now")
    trained(LATE, folder / "late")
    return {name: seen(folder / name) for name in ("now", "late")}


def test_what_is_joined_later_is_of_the_update_that_was_evaluated(plain):
    (now_digest, now, _, now_dialogues), (late_digest, late, _, dialogues) = plain.values()
    assert len(now) == 4 and now == late
    assert now_dialogues == dialogues and len(dialogues) == 4
    assert now_digest[2] == late_digest[2]


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 2])
def test_how_many_evaluators_play_changes_nothing(num, plain, tmp_path):
    trained(LATE, tmp_path / "late", evaluators__num=num)
    assert seen(tmp_path / "late") == plain["late"]
    trained(NOW, tmp_path / "now", evaluators__num=num)
    assert seen(tmp_path / "now") == plain["now"]


@pytest.mark.slow
def test_processes_play_the_same(plain, tmp_path):
    trained(LATE, tmp_path / "late", evaluators__num=2, engine__name="process")
    assert seen(tmp_path / "late") == plain["late"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_ray_cluster_plays_the_same(plain, tmp_path):
    there = dict(evaluators__num=2, evaluators__cpus=0.5, engine__name="ray")
    trained(LATE, tmp_path / "late", **there)
    assert seen(tmp_path / "late") == plain["late"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_evaluators_that_die_change_nothing(seed, plain, tmp_path, monkeypatch):
    engine = ChaosEngine(seed, lost=0.4, wasted=0.3)
    monkeypatch.setattr(run_module, "make_engine", lambda config, message: engine)
    trained(LATE, tmp_path / "late", evaluators__num=2, engine__max_restarts=50)
    assert seen(tmp_path / "late") == plain["late"]
    assert engine.num_lost


@pytest.mark.slow
def test_evaluators_that_are_killed_change_nothing(plain, tmp_path, monkeypatch):
    engine = KillingEngine("ask", every=1, most=2)
    monkeypatch.setattr(run_module, "make_engine", lambda config, message: engine)
    trained(LATE, tmp_path / "late", evaluators__num=1)
    assert seen(tmp_path / "late") == plain["late"]
    assert engine.num_killed == 2


@pytest.mark.parametrize("after", [LATE, replace(LATE, evaluators=EvaluatorsConfig())])
def test_a_resume_joins_what_was_open(after, plain, tmp_path):
    """Asked again of others, or, where no evaluators are left, played in this process."""
    folder, settings = tmp_path / "run", with_all(LATE, evaluators__num=2)
    folder.mkdir()
    with closing(ILQLExperiment(settings, folder, Quiet())) as experiment:
        with closing(TrainingSession(experiment)) as session:
            stop = iter([False] * 5)
            assert session.run(lambda: next(stop, True)).reason == "stopped"
            assert session.evaluate.open == [2, 4]
    write_config(folder, settings, "", (), ILQL)
    assert resume_run(folder, config=after, view=Quiet()).reason == "finished"
    assert rows(folder) == plain["now"][1]
    assert digest(folder)[2] == plain["now"][0][2]


@pytest.mark.slow
@pytest.mark.parametrize("base", ["file", "lora"])
def test_rows_and_language_models_are_read_from_the_run_s_folder(base, tmp_path):
    config = with_all(make_bases(tmp_path)[base], evaluate__num_episodes=4)
    trained(config, tmp_path / "here")
    trained(config, tmp_path / "there", evaluators__num=1, engine__name="process")
    assert seen(tmp_path / "here") == seen(tmp_path / "there")
    assert rows(tmp_path / "here")


@pytest.mark.slow
def test_a_state_in_parts_is_whole_where_it_is_evaluated(tmp_path):
    shared = dict(learners__num=2, learners__state="sharded", num_updates=4)
    trained(NOW, tmp_path / "here", **shared)
    trained(NOW, tmp_path / "there", **shared, evaluators__num=1)
    assert seen(tmp_path / "here") == seen(tmp_path / "there")


def test_weights_that_are_not_finite_end_the_run_before_they_are_sent(tmp_path):
    config = with_all(LATE, evaluators__num=1, optimizer__learning_rate=1e38)
    with pytest.raises(NonFiniteError):
        train_run(ILQL, config, tmp_path / "run", view=Quiet())


@pytest.fixture
def echo(tmp_path):
    """An environment of one's own: a file, and a run on data that is evaluated in it."""
    (tmp_path / "echo.py").write_text(ENV)
    return tmp_path / "echo.py", with_all(make_bases(tmp_path)["file"], evaluators__num=1)


@pytest.mark.slow
def test_an_environment_of_one_s_own_is_played_elsewhere(echo, tmp_path, monkeypatch):
    file, config = echo
    monkeypatch.chdir(tmp_path)
    process = with_all(config, engine__name="process")
    train(process, "there", view=Quiet(), make_env="echo.py:Echo")
    here = replace(config, evaluators=EvaluatorsConfig())
    train(here, "here", view=Quiet(), make_env=f"{file}:Echo")
    assert seen(tmp_path / "there") == seen(tmp_path / "here")
    found = imported(f"{file}:Echo")
    assert json.loads(evaluator_config(config, tmp_path, found))["env"] == f"{file}:Echo"
    assert len(rows(tmp_path / "here")[0]["returns"]) == 4


def test_what_workers_can_not_import_is_refused(echo, tmp_path):
    file, config = echo
    found = imported(f"{file}:Echo")
    with pytest.raises(ValueError, match="environment that workers can't import, .*<lambda>"):
        train(config, tmp_path / "run", view=Quiet(), make_env=lambda: found())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("home", ["__main__", "of_no_file"])
def test_a_class_of_a_module_without_file_is_one_that_workers_can_not_import(tmp_path, home):
    made = type("Made", (), {"__module__": home})
    with pytest.raises(ValueError, match="workers can't import, __main__:Made"):
        evaluator_config(NOW, tmp_path, made)


def test_settings_that_can_not_be_are_refused():
    with pytest.raises(ValueError, match=r"evaluators.* with population.size=2: a population evol"):
        with_all(NOW, population=PopulationConfig(size=2), evaluators__num=1)
    with pytest.raises(ValueError, match=r"no workers: set .*, or evaluators.num=1, or leave"):
        with_all(NOW, engine__name="process")
    with_all(NOW, evaluators__num=1, engine__name="ray")


def test_the_settings_of_evaluators_get_there(tmp_path):
    config = with_all(LATE, evaluators__num=2, evaluators__cpus=0.5, evaluators__gpus=0.25)
    config = with_all(config, engine__max_restarts=7)
    (tmp_path / "run").mkdir()
    with closing(ILQLExperiment(config, tmp_path / "run", Quiet())) as experiment:
        evaluations = experiment.evaluations
        pool = evaluations.pool
        assert (pool.num_workers, pool.max_restarts) == (2, 7)
        assert (pool.needs.cpus, pool.needs.gpus) == (0.5, 0.25)
        assert evaluations.join_after == 3 and "evaluations_open" in experiment.extra_metrics(0)


def test_evaluators_compute_on_their_device(tmp_path):
    config = with_all(LATE, evaluators__num=1, evaluators__device="meta")
    role = EvaluateRole(evaluator_config(config, tmp_path, None), 0)
    assert {one.device.type for one in role.networks.model.parameters()} == {"meta"}
    with pytest.raises(ValueError, match=r"evaluators.device=cuda and no evaluators"):
        with_all(NOW, evaluators__device="cuda")
