"""Runs of populations: selection, replacement, evolving heads, and their agents."""

from dataclasses import replace

import pytest
import torch

from raffia.algorithms.ilql import ILQLLearner, ILQLModel
from raffia.algorithms.ilql.config import ILQLModelConfig
from raffia.lm.envs.wordle import WordleObservation
from raffia.recipes import efficientzero, ilql
from raffia.recipes.efficientzero import PRESETS
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.recipes.ilql import ILQL_PRESETS
from raffia.recipes.ilql.config import ILQLEvaluateConfig
from raffia.recipes.ilql.export import export, load_exported
from raffia.recipes.members import Members, best_of
from raffia.recipes.population_config import PopulationConfig
from raffia.tensordict import TensorDict
from raffia.train import Checkpoints
from raffia.train.run_state import RunState
from tests.recipes.runs import Quiet, last_state, refused, rows, same, short, with_all

POPULATION = PopulationConfig(
    size=3, spread=30.0, parameters=0.5, ranges=("learning_rate=1e-6..1", "tau=0.5..0.95")
)
SEED = 19  # with it one member gets a rate of 1e30
EVALUATE = ILQLEvaluateConfig(every_updates=4, num_episodes=4)
RUN = with_all(ILQL_PRESETS["ilql-smoke"], num_updates=12, evaluate=EVALUATE)
RUN = replace(RUN, population=POPULATION)
SIZES = {"ranges": ("batch_size=2..12",), "spread": 2.0, "parameters": 0.0, "hyper": 1.0}
CHANCES = dict(no_mutation=0.1, hyper=0.0, parameters=0.3, activation=1.0, architecture=1.0)
FORMS = PopulationConfig(size=3, **CHANCES, new_layer_prob=0.5)


def efficientzero_config(**changes):
    """Three members in six environments, with reanalyze, priorities and target networks."""
    return short(
        env=replace(PRESETS["smoke"].env, num_envs=6, frame_stack=2),
        population=PopulationConfig(size=3, spread=30.0, parameters=0.5, **changes),
    )


def efficientzero_forms():
    return with_all(efficientzero_config(), model__evolvable_heads=True, population=FORMS)


def ilql_forms(**model):
    smoke, evaluate = ILQL_PRESETS["ilql-smoke"], {"every_updates": 2, "num_episodes": 4}
    changes = dict(population=FORMS, num_updates=12, evaluate=ILQLEvaluateConfig(**evaluate))
    model = replace(smoke.model, evolvable_heads=True, max_head_nodes=48, **model)
    return replace(smoke, model=model, **changes)


def newest(folder):
    return Checkpoints(folder / "checkpoints").newest(print)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("population") / "run"
    result = ilql.train(RUN, folder, view=Quiet())
    assert (result.reason, result.update) == ("finished", 12)
    return folder


@pytest.mark.slow
def test_a_run_is_selected_after_each_evaluation_but_the_last(finished):
    generations = rows(finished, "generation")
    assert [(row["generation"], row["update"]) for row in generations] == [(1, 4), (2, 8)]
    for row, evaluated in zip(generations, rows(finished, "evaluate"), strict=False):
        assert row["fitness"] == evaluated["fitness"] and len(row["fitness"]) == 3
        assert row["fitness"][row["parents"][0]] == max(row["fitness"])
        assert row["kinds"][0] == "none"  # the elite
        assert evaluated["mean_return"] == max(evaluated["fitness"])
    state = newest(finished).tensors("state")
    assert state.batch_size == (3,) and state["step"].tolist() == [12] * 3
    rates = state["hyper", "learning_rate"]
    assert torch.allclose(rates, torch.tensor(generations[-1]["hyper"]["learning_rate"]))
    assert len(set(rates.tolist())) > 1


@pytest.mark.slow
def test_the_agent_of_a_population_is_its_best_member(finished):
    found = newest(finished)
    index = found.extras["population"]["best"]
    state = found.tensors("state")
    best, another = state[index], state[(index + 1) % 3]
    assert same(best_of(found), best) and not same(best, another)
    assert isinstance(ilql.load_agent(finished, "newest").act(WordleObservation()), str)
    assert ilql.evaluate(finished, episodes=3).games["decode"].returns


def test_the_best_member_need_not_be_the_first(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    state = TensorDict(w=torch.tensor([0.5, 1.5, 2.5]), batch_size=[3])
    checkpoints.save(7, {"state": state}, {"population": {"best": 2}})
    checkpoints.save(8, {"state": state})
    assert best_of(checkpoints.available()[0])["w"] == 2.5
    assert best_of(checkpoints.available()[1])["w"].shape == (3,)  # no population's


def test_a_diverged_member_is_replaced(tmp_path):
    """A rate that makes weights NaN: the others continue."""
    wild = replace(POPULATION, ranges=("learning_rate=1e-6..1e30",), spread=1e36, parameters=0.0)
    run = replace(RUN, population=wild, seed=SEED)
    result = ilql.train(run, tmp_path / "run", view=Quiet())
    assert result.reason == "finished"
    fitness = [row["fitness"] for row in rows(tmp_path / "run", "evaluate")]
    generations = rows(tmp_path / "run", "generation")
    assert None in fitness[0] and fitness[0].index(None) not in generations[0]["parents"]
    found = newest(tmp_path / "run")
    best = found.tensors("state")[found.extras["population"]["best"]]
    assert all(x.isfinite().all() for x in best["params"].values(True, True))


def test_invalid_populations_are_refused_before_training(tmp_path):
    narrow = ILQLModelConfig(trunk=RUN.model.trunk, evolvable_heads=True, max_head_nodes=8)
    for run, words in (
        (with_all(RUN, population__ranges=("learning_rate=0.5..1",)), "starts at 0.001, outs"),
        (replace(RUN, population=PopulationConfig(), model=narrow), "Set max_head_nodes=32 or"),
    ):
        refused(run, tmp_path, words, ValueError)


def test_a_member_decodes_with_its_own_hyperparameters(tmp_path):
    ranges = ("temperature=0.1..10", "adv_weight=0.1..10")
    run = replace(RUN, population=replace(POPULATION, ranges=ranges, parameters=0.0))
    ilql.train(run, tmp_path / "run", view=Quiet())
    found = newest(tmp_path / "run")
    hyper = best_of(found)["hyper"]
    decode = ilql.load_agent(tmp_path / "run", "newest").config
    assert decode.temperature == pytest.approx(float(hyper["temperature"]))
    assert decode.adv_weight == pytest.approx(float(hyper["adv_weight"]))
    config = ilql.member_config(tmp_path / "run", "newest")
    assert config.decode.adv_weight == decode.adv_weight
    assert len(set(found.tensors("state")["hyper", "temperature"].tolist())) > 1


@pytest.mark.slow
def test_members_play_in_one_search_and_are_selected(tmp_path):
    result = efficientzero.train(efficientzero_config(replay="own"), tmp_path / "run", view=Quiet())
    assert result.reason == "finished"
    generations, evaluated = (rows(tmp_path / "run", kind) for kind in ("generation", "evaluate"))
    assert [row["generation"] for row in generations] == [1, 2, 3]
    assert all(row["mean_return"] == max(row["fitness"]) for row in evaluated)
    state = newest(tmp_path / "run").tensors("state")
    assert state.batch_size == (3,)
    assert len(set(state["hyper", "learning_rate"].tolist())) > 1
    agent = efficientzero.load_agent(tmp_path / "run")
    observation = torch.zeros(2, 2, 4)  # two environments, two frames
    assert agent.act(TensorDict(observation=observation, batch_size=[2]))["action"].shape == (2,)
    assert efficientzero.evaluate(tmp_path / "run", episodes=2).returns
    # With their own replay, members learn from their own episodes.
    _, parts = last_state(tmp_path / "run")
    assert sorted(parts) == ["replay.0", "replay.1", "replay.2", "state", "stream"]
    replays = [parts[f"replay.{member}"] for member in range(3)]
    assert not same(replays[0], replays[1]) and not same(replays[1], replays[2])
    assert sorted(path.name for path in (tmp_path / "run" / "replay").iterdir()) == ["0", "1", "2"]


@pytest.mark.parametrize("elitism", [True, False])
@pytest.mark.parametrize("method", ["tournament", "truncation"])
@pytest.mark.parametrize("seed", range(2))
def test_the_best_member_is_known_after_selection(method, seed, elitism, tmp_path):
    """A checkpoint has it as it was evaluated, also where it was changed or left out."""
    config = PopulationConfig(size=4, method=method, hyper=1.0, no_mutation=0.0, elitism=elitism)
    learner = ILQLLearner(RUN)
    members = Members(config, learner, seed)
    state = members.begin(torch.stack([learner.init(number) for number in range(4)]))
    members.evaluated([0.0, 1.0, 3.0, 2.0])
    best = state[members.best].clone()
    state, row = members.evolve(state)
    parts = {"population": members, "champion": members.champion}
    Checkpoints(tmp_path).save(1, *RunState(tmp_path, parts).save(state))
    found = Checkpoints(tmp_path).newest()
    assert same(best_of(found), best)
    assert found.has("champion") != elitism
    if elitism:
        assert row["kinds"][members.best] == "none"
        assert same(state[members.best], best)


def test_only_checkpoints_of_evaluations_have_a_champion(tmp_path):
    run = with_all(RUN, population={"elitism": False, "no_mutation": 0.0}, num_updates=6)
    run = with_all(run, checkpoint={"every_updates": 1, "keep": 9}, evaluate__every_updates=2)
    ilql.train(run, tmp_path / "run", view=Quiet())
    saved = Checkpoints(tmp_path / "run" / "checkpoints").available()
    assert [one.update for one in saved if one.has("champion")] == [2, 4]
    assert len(saved) == 6 and ilql.resume(tmp_path / "run", view=Quiet()).update == 6


def test_evolved_members_are_reanalyzed_with_their_own_targets(tmp_path, monkeypatch):
    calls = []

    def record(name):
        method = getattr(EfficientZeroExperiment, name)

        def recording(self, *args):
            index = len(calls)
            calls.append(name)
            found = method(self, *args)
            if name == "evolve" and found is None:
                del calls[index]
            return found

        monkeypatch.setattr(EfficientZeroExperiment, name, recording)

    for name in ("evolve", "_refresh_reanalyze", "_make_batch"):
        record(name)
    config = short(120, population=PopulationConfig(size=2, parameters=1.0))
    config = with_all(config, targets__target_interval=1_000)
    efficientzero.train(config, tmp_path / "run", view=Quiet())
    after = [calls[index + 1 : index + 3] for index, name in enumerate(calls) if name == "evolve"]
    assert after and all(names == ["_make_batch", "_refresh_reanalyze"] for names in after)
    assert calls.count("_refresh_reanalyze") == 1 + len(after)


@pytest.mark.slow
def test_an_agent_is_exported_with_the_form_of_its_heads(tmp_path):
    all_change = replace(FORMS, elitism=False, no_mutation=0.0, parameters=0.0)
    run = replace(ilql_forms(target="trunk"), population=all_change)
    ilql.train(run, tmp_path / "run", view=Quiet())
    kinds = {kind for row in rows(tmp_path / "run", "generation") for kind in row["kinds"]}
    assert {"activation", "architecture"} <= kinds
    agent = ilql.load_agent(tmp_path / "run", "newest")
    export(tmp_path / "run", tmp_path / "model", "newest")
    again = load_exported(tmp_path / "model")
    for part in ("model", "target"):
        expected, other = (getattr(policy.agent, part).state_dict() for policy in (agent, again))
        heads = [name for name in expected if name.startswith(("v.", "q1.", "q2."))]
        assert all(other[name].equal(expected[name]) for name in heads)
    initial, exported = (dict(m.named_buffers()) for m in (ILQLModel(run.model), again.agent.model))
    assert initial.keys() == exported.keys()
    assert not all(initial[n].equal(exported[n]) for n in exported)
    assert isinstance(again.act(WordleObservation()), str)
