"""Runs of populations whose heads change their form."""

from dataclasses import replace

import pytest

from raffia.algorithms.ilql.config import ILQLModelConfig
from raffia.algorithms.ilql.model import ILQLModel
from raffia.lm.envs.wordle.game import WordleObservation
from raffia.recipes import efficientzero, ilql
from raffia.recipes.efficientzero.presets import PRESETS
from raffia.recipes.ilql.config import ILQLEvaluateConfig
from raffia.recipes.ilql.export import export, load_exported
from raffia.recipes.ilql.presets import ILQL_PRESETS
from raffia.recipes.population_config import PopulationConfig

from .runs import Quiet, last_state, same, short, terminate
from .test_population_runs import rows, state_of

FORMS = PopulationConfig(
    size=3,
    no_mutation=0.1,
    hyper=0.0,
    parameters=0.3,
    activation=1.0,
    architecture=1.0,
    new_layer_prob=0.5,
)


def spoken(**model):
    smoke = ILQL_PRESETS["ilql-smoke"]
    return replace(
        smoke,
        model=replace(smoke.model, evolvable_heads=True, max_head_nodes=48, **model),
        population=FORMS,
        num_updates=12,
        evaluate=ILQLEvaluateConfig(every_updates=2, num_episodes=4),
    )


def played(**changes):
    smoke = PRESETS["smoke"]
    return short(
        env=replace(smoke.env, num_envs=6, frame_stack=2),
        model=replace(smoke.model, evolvable_heads=True),
        population=FORMS,
        **changes,
    )


def told(folder):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows(folder, "generation")]


def kinds(folder):
    return {kind for row in rows(folder, "generation") for kind in row["kinds"]}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["heads", "trunk"])
def test_a_resume_of_a_run_of_ilql_is_exact(tmp_path, target):
    run, whole, parts = spoken(target=target), tmp_path / "whole", tmp_path / "parts"
    ilql.train(run, whole, view=Quiet())
    assert {"activation", "architecture"} <= kinds(whole)
    assert ilql.train(run, parts, view=Quiet({7: terminate})).reason == "stopped"
    assert ilql.resume(parts, view=Quiet()).update == 12
    assert same(state_of(whole), state_of(parts))
    assert told(whole) == told(parts)


@pytest.mark.slow
def test_a_resume_of_a_run_that_plays_is_exact(tmp_path):
    run, whole, parts = played(), tmp_path / "whole", tmp_path / "parts"
    efficientzero.train(run, whole, view=Quiet())
    assert {"activation", "architecture"} <= kinds(whole)
    assert efficientzero.train(run, parts, view=Quiet({14: terminate})).reason == "stopped"
    efficientzero.resume(parts, view=Quiet())
    states = (last_state(folder)[1].values() for folder in (whole, parts))
    assert all(same(one, other) for one, other in zip(*states, strict=True))
    assert told(whole) == told(parts)
    assert efficientzero.evaluate(whole, episodes=2).returns


@pytest.mark.slow
@pytest.mark.parametrize("target", ["heads", "trunk"])
def test_an_agent_is_exported_with_the_form_of_its_heads(tmp_path, target):
    all_change = replace(FORMS, elitism=False, no_mutation=0.0, parameters=0.0)
    run = replace(spoken(target=target), population=all_change)
    ilql.train(run, tmp_path / "run", view=Quiet())
    agent = ilql.load_agent(tmp_path / "run", "newest")
    export(tmp_path / "run", tmp_path / "model", "newest")
    again = load_exported(tmp_path / "model")
    for part in ("model", "target"):
        own, other = (getattr(policy.agent, part).state_dict() for policy in (agent, again))
        heads = [name for name in own if name.startswith(("v.", "q1.", "q2."))]
        assert all(other[name].equal(own[name]) for name in heads)
    began, now = ILQLModel(run.model), again.agent.model
    forms = [dict(model.named_buffers()) for model in (began, now)]
    assert forms[0].keys() == forms[1].keys()
    assert not all(form.equal(forms[1][name]) for name, form in forms[0].items())
    assert isinstance(again.act(WordleObservation()), str)


@pytest.mark.parametrize("kind", ["activation", "architecture"])
def test_plain_heads_can_not_change_and_the_setting_is_named(kind):
    population = PopulationConfig(size=2, **{kind: 0.5})
    for run in (ILQL_PRESETS["ilql-smoke"], PRESETS["smoke"]):
        error = rf"population\.{kind}=0\.5 .* set model\.evolvable_heads=True .*{kind}=0"
        with pytest.raises(ValueError, match=error):
            replace(run, population=population)
        replace(run, population=replace(population, size=1))
        replace(run, population=population, model=replace(run.model, evolvable_heads=True))


def test_settings_of_forms_that_can_not_be():
    for options in ({"activation": -1.0}, {"architecture": -0.5}, {"new_layer_prob": 1.5}):
        with pytest.raises(ValueError, match=next(iter(options))):
            PopulationConfig(size=2, **options)
    config = PopulationConfig(size=2, architecture=0.5, activation=0.25, new_layer_prob=0.75)
    mutations = config.mutations()
    assert (mutations.architecture, mutations.activation) == (0.5, 0.25)
    assert mutations.new_layer_prob == 0.75


def test_heads_that_would_begin_larger_than_they_may_be_are_refused(tmp_path):
    smoke = ILQL_PRESETS["ilql-smoke"]
    model = ILQLModelConfig(trunk=smoke.model.trunk, evolvable_heads=True, max_head_nodes=8)
    with pytest.raises(ValueError, match="take max_head_nodes=32 or more, or None"):
        ilql.train(replace(smoke, model=model), tmp_path / "run", view=Quiet())
