"""Runs of populations: selected, stopped in the middle of a generation, resumed."""

import json
from dataclasses import replace

import pytest
import torch

from raffia.algorithms.ilql.learner import ILQLLearner
from raffia.lm.envs.wordle.game import WordleObservation
from raffia.recipes import efficientzero
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.recipes.efficientzero.presets import PRESETS
from raffia.recipes.ilql import evaluate, load_agent, member_config, train
from raffia.recipes.ilql.config import ILQLEvaluateConfig
from raffia.recipes.ilql.presets import ILQL_PRESETS
from raffia.recipes.members import Members, best_of
from raffia.recipes.population_config import PopulationConfig
from raffia.tensordict.tensordict import TensorDict
from raffia.train.checkpoint import Checkpoints

from .runs import Quiet, last_state, same, short

POPULATION = PopulationConfig(
    size=3, spread=30.0, parameters=0.5, ranges=("learning_rate=1e-6..1", "tau=0.5..0.95")
)
SEED = 19  # whose draws give one member a rate of 1e30
RUN = replace(
    ILQL_PRESETS["ilql-smoke"],
    population=POPULATION,
    num_updates=12,
    evaluate=ILQLEvaluateConfig(every_updates=4, num_episodes=4),
)


def rows(folder, kind):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def state_of(folder):
    return Checkpoints(folder / "checkpoints").newest(print).tensors("state")


@pytest.mark.slow
def test_a_run_is_selected_after_each_evaluation_but_the_last(tmp_path):
    result = train(RUN, tmp_path / "run", view=Quiet())
    assert (result.reason, result.update) == ("finished", 12)
    born = rows(tmp_path / "run", "generation")
    assert [(row["generation"], row["update"]) for row in born] == [(1, 4), (2, 8)]
    for row, evaluated in zip(born, rows(tmp_path / "run", "evaluate"), strict=False):
        assert row["fitness"] == evaluated["fitness"] and len(row["fitness"]) == 3
        assert row["fitness"][row["parents"][0]] == max(row["fitness"])
        assert row["kinds"][0] == "none"  # the elite
        assert evaluated["mean_return"] == max(evaluated["fitness"])
    state = state_of(tmp_path / "run")
    assert state.batch_size == (3,) and state["step"].tolist() == [12] * 3
    rates = state["hyper", "learning_rate"]
    assert torch.allclose(rates, torch.tensor(born[-1]["hyper"]["learning_rate"]))
    assert len(set(rates.tolist())) > 1


def test_the_best_member_need_not_be_the_first(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    state = TensorDict(w=torch.tensor([0.5, 1.5, 2.5]), batch_size=[3])
    checkpoints.save(7, {"state": state}, {"population": {"best": 2}})
    checkpoints.save(8, {"state": state})
    assert best_of(checkpoints.available()[0])["w"] == 2.5
    assert best_of(checkpoints.available()[1])["w"].shape == (3,)  # no population's


@pytest.mark.slow
def test_the_agent_of_a_population_is_its_best_member(tmp_path):
    train(RUN, tmp_path / "run", view=Quiet())
    found = Checkpoints(tmp_path / "run" / "checkpoints").newest(print)
    place = found.extras["population"]["best"]
    state = found.tensors("state")
    best, another = state[place], state[(place + 1) % 3]
    assert same(best_of(found), best) and not same(best, another)
    assert isinstance(load_agent(tmp_path / "run", "newest").act(WordleObservation()), str)
    assert evaluate(tmp_path / "run", episodes=3).games["decode"].returns


def test_a_member_that_comes_to_grief_is_replaced(tmp_path):
    """A rate that makes numbers that are no numbers any more: the others go on."""
    wild = replace(POPULATION, ranges=("learning_rate=1e-6..1e30",), spread=1e36, parameters=0.0)
    run = replace(RUN, population=wild, seed=SEED)
    result = train(run, tmp_path / "run", view=Quiet())
    assert result.reason == "finished"
    fitness = [row["fitness"] for row in rows(tmp_path / "run", "evaluate")]
    born = rows(tmp_path / "run", "generation")
    assert None in fitness[0] and fitness[0].index(None) not in born[0]["parents"]
    state = state_of(tmp_path / "run")
    best = Checkpoints(tmp_path / "run" / "checkpoints").newest(print).extras["population"]["best"]
    assert all(x.isfinite().all() for x in state[best]["params"].values(True, True))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"ranges": ("learning_rat=1e-6..1",)}, "did you mean 'learning_rate'"),
        ({"ranges": ("learning_rate=0.5..1",)}, "begins at 0.001, outside of its range"),
    ],
)
def test_ranges_that_do_not_fit_are_refused_before_anything_is_learnt(tmp_path, change, error):
    run = replace(RUN, population=replace(POPULATION, **change))
    with pytest.raises(ValueError, match=error):
        train(run, tmp_path / "run", view=Quiet())
    assert not (tmp_path / "run").exists()


def test_a_member_speaks_with_its_own_numbers(tmp_path):
    ranges = ("temperature=0.1..10", "adv_weight=0.1..10")
    run = replace(RUN, population=replace(POPULATION, ranges=ranges, parameters=0.0))
    train(run, tmp_path / "run", view=Quiet())
    found = Checkpoints(tmp_path / "run" / "checkpoints").newest(print)
    hyper = best_of(found)["hyper"]
    decode = load_agent(tmp_path / "run", "newest").config
    assert decode.temperature == pytest.approx(float(hyper["temperature"]))
    assert decode.adv_weight == pytest.approx(float(hyper["adv_weight"]))
    assert member_config(tmp_path / "run", "newest").decode.adv_weight == decode.adv_weight
    state = state_of(tmp_path / "run")
    assert len(set(state["hyper", "temperature"].tolist())) > 1


SIZES = {"ranges": ("batch_size=2..12",), "spread": 2.0, "parameters": 0.0, "hyper": 1.0}


# ------------------------------------------------------------------------------ EfficientZero


def played(**changes):
    """Three members in six environments, with reanalyze, priorities and old target networks."""
    return short(
        env=replace(PRESETS["smoke"].env, num_envs=6, frame_stack=2),
        population=PopulationConfig(size=3, spread=30.0, parameters=0.5, **changes),
    )


@pytest.mark.slow
def test_members_play_in_one_search_and_are_selected(tmp_path):
    result = efficientzero.train(played(), tmp_path / "run", view=Quiet())
    assert result.reason == "finished"
    born = rows(tmp_path / "run", "generation")
    assert [row["generation"] for row in born] == [1, 2, 3]
    evaluated = rows(tmp_path / "run", "evaluate")
    assert all(row["mean_return"] == max(row["fitness"]) for row in evaluated)
    state = state_of(tmp_path / "run")
    assert state.batch_size == (3,)
    assert len(set(state["hyper", "learning_rate"].tolist())) > 1
    agent = efficientzero.load_agent(tmp_path / "run")
    observation = torch.zeros(2, 2, 4)  # two environments, two frames
    assert agent.act(TensorDict(observation=observation, batch_size=[2]))["action"].shape == (2,)
    assert efficientzero.evaluate(tmp_path / "run", episodes=2).returns


@pytest.mark.slow
def test_members_that_have_their_own_replay_learn_from_what_they_have_played(tmp_path):
    efficientzero.train(played(replay="own"), tmp_path / "run", view=Quiet())
    _, parts = last_state(tmp_path / "run")
    assert sorted(parts) == ["replay.0", "replay.1", "replay.2", "state", "stream"]
    replays = [parts[f"replay.{member}"] for member in range(3)]
    assert not same(replays[0], replays[1]) and not same(replays[1], replays[2])
    assert sorted(path.name for path in (tmp_path / "run" / "replay").iterdir()) == ["0", "1", "2"]


@pytest.mark.parametrize("method", ["tournament", "truncation"])
@pytest.mark.parametrize("seed", range(6))
def test_who_was_the_best_is_known_after_selection(method, seed):
    config = PopulationConfig(size=4, method=method, hyper=1.0, no_mutation=0.0)
    learner = ILQLLearner(RUN)
    members = Members(config, learner, seed)
    state = members.begin(torch.stack([learner.init(number) for number in range(4)]))
    members.evaluated([0.0, 1.0, 3.0, 2.0])
    best = state[members.best].clone()
    state, row = members.evolve(state)
    assert row["kinds"][members.best] == "none"
    assert same(state[members.best], best)


def test_members_that_evolved_are_searched_again_with_their_own_targets(tmp_path, monkeypatch):
    done = []

    def note(name):
        method = getattr(EfficientZeroExperiment, name)

        def noted(self, *given):
            at = len(done)
            done.append(name)
            found = method(self, *given)
            if name == "evolve" and found is None:
                del done[at]
            return found

        monkeypatch.setattr(EfficientZeroExperiment, name, noted)

    for name in ("evolve", "_refresh_reanalyze", "_make_batch"):
        note(name)
    config = short(120, population=PopulationConfig(size=2, parameters=1.0))
    targets = replace(config.targets, target_interval=1_000)
    efficientzero.train(replace(config, targets=targets), tmp_path / "run", view=Quiet())
    after = [done[at + 1 : at + 3] for at, name in enumerate(done) if name == "evolve"]
    assert after and all(names == ["_make_batch", "_refresh_reanalyze"] for names in after)
    assert done.count("_refresh_reanalyze") == 1 + len(after)
