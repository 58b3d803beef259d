"""Runs of populations whose heads change their form."""

from dataclasses import replace

import pytest

from raffia.algorithms.ilql.config import ILQLModelConfig
from raffia.algorithms.ilql.model import ILQLModel
from raffia.lm.envs.wordle.game import WordleObservation
from raffia.recipes import ilql
from raffia.recipes.efficientzero.presets import PRESETS
from raffia.recipes.ilql.config import ILQLEvaluateConfig
from raffia.recipes.ilql.export import export, load_exported
from raffia.recipes.ilql.presets import ILQL_PRESETS
from raffia.recipes.population_config import PopulationConfig

from .runs import Quiet, short
from .test_population_runs import rows

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


def kinds(folder):
    return {kind for row in rows(folder, "generation") for kind in row["kinds"]}


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


def test_heads_that_would_begin_larger_than_they_may_be_are_refused(tmp_path):
    smoke = ILQL_PRESETS["ilql-smoke"]
    model = ILQLModelConfig(trunk=smoke.model.trunk, evolvable_heads=True, max_head_nodes=8)
    with pytest.raises(ValueError, match="take max_head_nodes=32 or more, or None"):
        ilql.train(replace(smoke, model=model), tmp_path / "run", view=Quiet())
