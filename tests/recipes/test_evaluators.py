"""Evaluations that are played elsewhere: the same bits, whoever plays, and who dies."""

import json
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from raffia.distributed import ChaosEngine, InlineEngine
from raffia.distributed.engine import RoleError
from raffia.recipes.efficientzero import evaluators
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.recipes.population_config import PopulationConfig
from raffia.recipes.run_folder import write_config
from raffia.recipes.running import resume_run, train_run
from raffia.recipes.scale_config import EngineConfig, EvaluatorsConfig
from raffia.report.folder import read_run
from raffia.tensordict import TensorDict
from raffia.train import checkpoint
from raffia.train.checkpoint import Checkpoints
from raffia.train.nan_guard import NonFiniteError
from raffia.train.record import EpisodeRecorder
from raffia.train.session import TrainingSession
from tests.recipes.killing import KillingEngine
from tests.recipes.runs import Quiet
from tests.recipes.test_actors import EFFICIENTZERO, SMOKE, digest, trained, with_engine
from tests.recipes.test_settings import BASES, with_all

# With a seed by which the best is the first, and no two are alike.
NOW = with_all(
    SMOKE,
    seed=2,
    evaluate__every_env_steps=60,
    evaluate__num_episodes=4,
    checkpoint__every_updates=4,
    checkpoint__keep=1,
)
LATE = with_all(NOW, evaluators__join_after=20)


def rows(folder, kind="evaluate"):
    """Of metrics.jsonl, without when."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in row.items() if key not in ("seconds", "time")}
        for row in found
        if row["kind"] == kind
    ]


def scores(folder):
    """Of the checkpoints that are there, by update."""
    return {one.update: one.score for one in Checkpoints(folder / "checkpoints").available()}


def seen(folder):
    return digest(folder), rows(folder), scores(folder)


def stopped(config, folder, num_updates):
    """A run that is stopped after so many updates; how many evaluations are open then."""
    folder.mkdir()
    with closing(EfficientZeroExperiment(config, folder, Quiet())) as experiment:
        with closing(TrainingSession(experiment)) as session:
            stop = iter([False] * num_updates)
            assert session.run(lambda: next(stop, True)).reason == "stopped"
            return len(session.evaluate.open)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Of runs in one process: evaluated at once, and joined later."""
    folder = tmp_path_factory.mktemp("plain")
    trained(NOW, folder / "now")
    trained(LATE, folder / "late")
    return {name: seen(folder / name) for name in ("now", "late")}


def test_what_is_joined_later_is_the_row_of_the_update_that_was_evaluated(plain):
    (_, now, _), (_, late, _) = plain["now"], plain["late"]
    assert len(now) > 2
    assert now == late


def test_the_best_checkpoint_is_of_the_update_that_was_evaluated(plain):
    """Also where its score was known only later."""
    best = {name: max((v, u) for u, v in found[2].items() if v) for name, found in plain.items()}
    assert best["now"] == best["late"]
    by_update = {row["update"]: row["mean_return"] for row in plain["late"][1]}
    score, update = best["late"]
    assert by_update[update] == score == max(by_update.values())
    assert update == min(by_update) and len({*by_update.values()}) == len(by_update)


@pytest.mark.parametrize("num", [1, 2])
def test_how_many_evaluators_play_changes_nothing(num, plain, tmp_path):
    trained(LATE, tmp_path / "late", evaluators__num=num)
    assert seen(tmp_path / "late") == plain["late"]
    trained(NOW, tmp_path / "now", evaluators__num=num)
    assert seen(tmp_path / "now") == plain["now"]


@pytest.mark.slow
def test_processes_play_the_same(plain, tmp_path):
    there = dict(evaluators__num=2, engine__name="process", actors__num=2)
    trained(LATE, tmp_path / "late", **there)
    assert seen(tmp_path / "late") == plain["late"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_ray_cluster_plays_the_same(plain, tmp_path):
    there = dict(evaluators__num=1, engine__name="ray", evaluators__cpus=0.5)
    trained(LATE, tmp_path / "late", **there)
    assert seen(tmp_path / "late") == plain["late"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_evaluators_that_die_change_nothing(seed, plain, tmp_path, monkeypatch):
    engine = ChaosEngine(seed, lost=0.3, wasted=0.3)
    with_engine(monkeypatch, engine)
    trained(LATE, tmp_path / "late", evaluators__num=2, engine__max_restarts=50)
    assert seen(tmp_path / "late") == plain["late"]
    assert engine.num_lost


@pytest.mark.slow
def test_evaluators_that_are_killed_change_nothing(plain, tmp_path, monkeypatch):
    with_engine(monkeypatch, KillingEngine("ask", every=1, most=2))
    trained(LATE, tmp_path / "late", evaluators__num=1)
    assert seen(tmp_path / "late") == plain["late"]


def test_one_that_dies_each_time_ends_the_run(tmp_path, monkeypatch):
    with_engine(monkeypatch, KillingEngine("ask", every=1))
    with pytest.raises(RoleError, match=r"EvaluateRole was lost 3 times at task \d+, .*SIGKILL"):
        trained(LATE, tmp_path / "late", evaluators__num=1, engine__max_restarts=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "stop_at",
    [17, pytest.param(9, marks=pytest.mark.slow), pytest.param(30, marks=pytest.mark.slow)],
)
def test_a_resume_asks_again_for_what_was_open(stop_at, plain, tmp_path):
    """With the weights that it was asked for with, and by others."""
    folder = tmp_path / "run"
    settings = with_all(LATE, evaluators__num=2, evaluators__join_after=100)
    assert stopped(settings, folder, stop_at) > 1 or stop_at < 17
    write_config(folder, settings, "", (), EFFICIENTZERO)
    assert resume_run(folder, config=LATE, view=Quiet()).reason == "finished"
    assert seen(folder) == plain["late"]


@pytest.mark.slow
def test_a_resume_without_evaluators_joins_what_was_open(plain, tmp_path):
    folder = tmp_path / "run"
    assert stopped(LATE, folder, 17)
    write_config(folder, LATE, "", (), EFFICIENTZERO)
    without = replace(LATE, evaluators=EvaluatorsConfig())
    assert resume_run(folder, config=without, view=Quiet()).reason == "finished"
    assert rows(folder) == plain["now"][1]


def test_a_target_ends_the_run_when_it_is_joined(plain, tmp_path):
    first = plain["now"][1][0]
    config = with_all(LATE, evaluate__target_return=first["mean_return"])
    result = train_run(EFFICIENTZERO, config, tmp_path / "run", view=Quiet())
    assert (result.reason, result.update) == ("target", first["update"] + 20)
    best = Checkpoints(tmp_path / "run" / "checkpoints").best()
    assert (best.update, best.score) == (first["update"], first["mean_return"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "base", ["box", *(pytest.param(name, marks=pytest.mark.slow) for name in ("board", "gumbel"))]
)
def test_every_kind_of_environment_is_evaluated_elsewhere(base, tmp_path):
    config = with_all(BASES[base], evaluate__num_episodes=2, evaluate__record="gif")
    trained(config, tmp_path / "here")
    trained(config, tmp_path / "there", evaluators__num=1)
    assert seen(tmp_path / "here") == seen(tmp_path / "there")
    for name in ("episodes", "trees"):
        files = sorted((tmp_path / "here" / name).iterdir())
        assert files
        for path in files:
            assert path.read_bytes() == (tmp_path / "there" / name / path.name).read_bytes()


def test_what_is_not_finite_is_dumped_as_in_the_loop(tmp_path, monkeypatch):
    """By the update whose evaluation met it."""
    play = evaluators.Evaluator.play

    def with_nan(self, planner, *, check, **settings):
        check(TensorDict(reward=torch.tensor([1.0, float("nan")]), batch_size=[2]))
        return play(self, planner, check=check, **settings)

    monkeypatch.setattr(evaluators.Evaluator, "play", with_nan)
    with pytest.raises(NonFiniteError, match=r"update 1 is not finite: batch reward: nan"):
        trained(LATE, tmp_path / "run", evaluators__num=1)
    assert (tmp_path / "run" / "nan_dump" / "000000001").is_dir()


def test_a_film_without_room_is_no_failure(tmp_path, monkeypatch):
    def full(self, name):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(EpisodeRecorder, "save", full)
    messages, view = [], Quiet()
    view.message = messages.append
    config = with_all(NOW, evaluate__record="gif", evaluators__num=1)
    assert train_run(EFFICIENTZERO, config, tmp_path / "run", view=view).reason == "finished"
    assert any("an episode was not recorded" in text for text in messages)


@pytest.mark.slow
def test_a_score_that_found_no_room_is_written_later(plain, tmp_path, monkeypatch):
    replace_extras, failures = checkpoint.replace_extras, iter([True])

    def full_at_first(*arguments):
        if next(failures, False):
            raise OSError(28, "No space left on device")
        return replace_extras(*arguments)

    monkeypatch.setattr(checkpoint, "replace_extras", full_at_first)
    trained(LATE, tmp_path / "late")
    assert seen(tmp_path / "late") == plain["late"]


def test_a_summary_of_a_run_does_not_go_back(plain, tmp_path):
    folder = tmp_path / "run"
    stopped(LATE, folder, 32)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    cut = len(kinds) - kinds[::-1].index("evaluate")
    (folder / "metrics.jsonl").write_text("\n".join(lines[:cut]) + "\n")
    assert read_run(folder).update == 30  # of the row of means, not of the evaluation behind it


# -------------------------------------------------------------------------------- refusals


def test_actors_and_evaluators_find_room_together(tmp_path, monkeypatch):
    asked = []

    class Small(InlineEngine):
        def require(self, workers):
            asked.append(sum(one.num * one.needs.cpus for one in workers))
            if asked[-1] > 2:
                raise ValueError("no room")

    with_engine(monkeypatch, Small())
    with pytest.raises(ValueError, match="no room"):
        trained(LATE, tmp_path / "run", actors__num=2, evaluators__num=1)
    assert asked == [pytest.approx(3.0)]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_settings_that_can_not_be_are_refused():
    with pytest.raises(ValueError, match=r"join_after=-1"):
        EvaluatorsConfig(join_after=-1)
    with pytest.raises(ValueError, match=r"evaluators.* with population.size=2: a population evol"):
        with_all(
            SMOKE, population=PopulationConfig(size=2), evaluators=EvaluatorsConfig(join_after=5)
        )
    with pytest.raises(ValueError, match=r"no workers: set actors.num, .* evaluators.num or"):
        with_all(SMOKE, engine=EngineConfig(name="process"))


def test_the_settings_of_evaluators_get_there(tmp_path):
    config = with_all(LATE, evaluators=EvaluatorsConfig(num=2, join_after=7, cpus=0.25, gpus=0.5))
    with closing(EfficientZeroExperiment(config, tmp_path, Quiet())) as run:
        pool = run.evaluations.pool
        assert (pool.num_workers, run.evaluations.join_after) == (2, 7)
        assert (pool.needs.cpus, pool.needs.gpus) == (0.25, 0.5)
