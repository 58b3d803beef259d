"""Runs of populations: selected, stopped in the middle of a generation, resumed."""

import json
from dataclasses import replace

import pytest
import torch

from raffia.algorithms.ilql.learner import ILQLLearner
from raffia.evolution.traced import Traced
from raffia.lm.envs.wordle.game import WordleObservation
from raffia.recipes import efficientzero
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.recipes.efficientzero.presets import PRESETS
from raffia.recipes.ilql import evaluate, load_agent, member_config, resume, train
from raffia.recipes.ilql.config import ILQLEvaluateConfig
from raffia.recipes.ilql.presets import ILQL_PRESETS
from raffia.recipes.members import Members, best_of
from raffia.recipes.population_config import PopulationConfig
from raffia.tensordict.tensordict import TensorDict
from raffia.train.checkpoint import Checkpoints

from .runs import Quiet, last_state, same, short, terminate

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


@pytest.mark.slow
@pytest.mark.parametrize("at", [6, 8])
def test_a_resume_is_exact_within_a_generation_and_between_two(tmp_path, at):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(RUN, whole, view=Quiet())

    assert train(RUN, parts, view=Quiet({at: terminate})).reason == "stopped"
    assert resume(parts, view=Quiet()).update == 12
    assert same(state_of(whole), state_of(parts))
    told = [{k: v for k, v in row.items() if k != "seconds"} for row in rows(whole, "generation")]
    again = [{k: v for k, v in row.items() if k != "seconds"} for row in rows(parts, "generation")]
    assert told == again


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


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"tournament_size": 4}, "tournament_size=4 is more than the population has, which is 3"),
        ({"ranges": ("tau",)}, "NAME=LOW..HIGH"),
        ({"ranges": ("tau=0.9..0.5",)}, "low lies below high"),
        ({"ranges": ("tau=0.5..1.5",)}, "must lie in 0..1"),
        ({"hyper": 0.0, "no_mutation": 0.0, "parameters": 0.0}, "all probabilities are 0"),
    ],
)
def test_settings_that_cannot_be(settings, error):
    with pytest.raises(ValueError, match=error):
        replace(POPULATION, **settings)


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


@pytest.mark.slow
def test_batch_sizes_are_the_members_own(tmp_path):
    run = replace(RUN, population=replace(POPULATION, **SIZES), batch_size=8)
    train(run, tmp_path / "run", view=Quiet({6: terminate}))
    resume(tmp_path / "run", view=Quiet())
    train(run, tmp_path / "whole", view=Quiet())
    state = state_of(tmp_path / "run")
    assert same(state, state_of(tmp_path / "whole"))
    sizes = state["hyper", "batch_size"].tolist()
    assert len(set(sizes)) > 1 and all(2 <= size <= 12 for size in sizes)


def test_batch_sizes_and_parts_of_a_batch():
    with pytest.raises(ValueError, match="let batch_size be up to 12"):
        replace(RUN, population=replace(POPULATION, **SIZES), batch_size=8, num_micro_batches=2)


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
@pytest.mark.parametrize(
    ("at", "replay"),
    [
        pytest.param(9, "shared", marks=pytest.mark.slow),
        (14, "shared"),
        pytest.param(14, "own", marks=pytest.mark.slow),
    ],
)
def test_a_resume_of_a_population_that_plays_is_exact(tmp_path, at, replay):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    efficientzero.train(played(replay=replay), whole, view=Quiet())
    stopped = efficientzero.train(played(replay=replay), parts, view=Quiet({at: terminate}))
    assert stopped.reason == "stopped"
    efficientzero.resume(parts, view=Quiet())
    for one, other in zip(
        last_state(whole)[1].values(), last_state(parts)[1].values(), strict=True
    ):
        assert same(one, other)
    told, again = (
        [{k: v for k, v in row.items() if k != "seconds"} for row in rows(folder, "generation")]
        for folder in (whole, parts)
    )
    assert told == again and told


@pytest.mark.slow
def test_a_resume_is_exact_where_steps_are_recorded(tmp_path, monkeypatch):
    """Which begins after more steps in the one than in the other."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    efficientzero.train(played(), whole, view=Quiet())
    made = []

    def soon(function):
        made.append(Traced(function, after=2))
        return made[-1]

    monkeypatch.setattr("raffia.evolution.population.Traced", soon)
    efficientzero.train(played(), parts, view=Quiet({14: terminate}))
    efficientzero.resume(parts, view=Quiet())
    assert [traced.num_recorded for traced in made] == [1, 1]
    assert same(state_of(whole), state_of(parts))


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["shared", "own"])
def test_batch_sizes_of_members_that_play(tmp_path, replay):
    run = played(replay=replay)
    run = replace(
        run,
        population=replace(run.population, **SIZES),
        replay=replace(run.replay, batch_size=8),
    )
    efficientzero.train(run, tmp_path / "run", view=Quiet({9: terminate}))
    efficientzero.resume(tmp_path / "run", view=Quiet())
    efficientzero.train(run, tmp_path / "whole", view=Quiet())
    state = state_of(tmp_path / "run")
    assert same(state, state_of(tmp_path / "whole"))
    assert len(set(state["hyper", "batch_size"].tolist())) > 1


@pytest.mark.slow
def test_members_that_have_their_own_replay_learn_from_what_they_have_played(tmp_path):
    efficientzero.train(played(replay="own"), tmp_path / "run", view=Quiet())
    _, parts = last_state(tmp_path / "run")
    assert sorted(parts) == ["replay.0", "replay.1", "replay.2", "state", "stream"]
    replays = [parts[f"replay.{member}"] for member in range(3)]
    assert not same(replays[0], replays[1]) and not same(replays[1], replays[2])
    assert sorted(path.name for path in (tmp_path / "run" / "replay").iterdir()) == ["0", "1", "2"]


def test_dialogues_are_shared_by_all():
    with pytest.raises(ValueError, match="nothing is played here"):
        replace(RUN, population=replace(POPULATION, replay="own"))


def test_envs_that_cannot_be_shared_out():
    with pytest.raises(ValueError, match=r"not as many for each: take env\.num_envs=9"):
        replace(played(), env=replace(played().env, num_envs=7))


def test_a_population_and_compile():
    for run in (RUN, played()):
        with pytest.raises(ValueError, match="leave compile out"):
            replace(run, compile=True)


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
