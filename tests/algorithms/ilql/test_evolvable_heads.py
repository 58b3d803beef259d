"""Heads whose form can change: at the start, grown, in the target, stacked, when decoding."""

from dataclasses import replace

import pytest
import torch

from raffia.algorithms.ilql import ILQL, ILQLConfig, ILQLModel, make_target
from raffia.algorithms.ilql.config import ILQLModelConfig
from raffia.algorithms.ilql.model import EvolvableHead, Head
from raffia.algorithms.ilql.model_scorer import CompiledHeads, ModelScorer, QHeads
from raffia.evolution import MutationConfig
from raffia.evolution.mutate import mutate
from raffia.lm.decoding.scorer import Needs
from raffia.recipes.ilql.networks import Networks

from .small import batch_of
from .test_learner import learner_of

EVOLVABLE = {"evolvable_heads": True, "max_head_nodes": 48}  # of 32 at the start
ANY = MutationConfig(
    no_mutation=0.0, activation=0.3, architecture=0.7, new_layer_prob=0.4, nodes=(3, 9)
)
GROWTH = {
    "a layer": replace(ANY, activation=0.0, new_layer_prob=1.0),
    "nodes": replace(ANY, activation=0.0, new_layer_prob=0.0),
}
ARRANGEMENTS = pytest.mark.parametrize(
    "arrangement",
    [{"target": "heads"}, {"target": "trunk", "policy": "separate"}, {"double_q": False}],
    ids=["heads", "trunk", "one Q"],
)


def draws(seed=0):
    return torch.Generator().manual_seed(seed)


def members(learner, size=3, generations=6, seed=0):
    """States of different forms, whose target networks differ from the online ones."""
    state = torch.stack([learner.init(seed + i) for i in range(size)])
    for leaf in state["target"].values(True, True):
        leaf += 0.1 * torch.rand(leaf.shape, generator=draws(seed))
    generator = draws(seed)
    for _ in range(generations):
        state, _ = mutate(state, ANY, generator)
    return state


def outputs(networks, state):
    """V, Q and target Q at all positions, from the networks of a state."""
    networks.refresh(state)
    batch = batch_of("B")
    with torch.no_grad():
        out = networks.model(
            *(batch[name] for name in ("tokens", "state_idxs", "action_idxs", "attn_mask")),
            target=networks.target,
            with_logits=False,
        )
    return {"v": out.v, **{f"{part}{i}": q for part in ("q", "target_q")
                           for i, q in enumerate(getattr(out, part))}}  # fmt: skip


def test_one_output_equals_that_entry_of_all_outputs():
    torch.manual_seed(0)
    for head in (Head(4, 10), EvolvableHead(4, 10, max_layers=2)):
        hidden, index = torch.randn(2, 3, 4), torch.randint(10, (2, 3))
        expected = head(hidden).gather(-1, index.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(head.at(hidden, index), expected)
        tokens = torch.randint(10, (2, 4))
        found = QHeads((head, head), hidden[:, 0]).of(tokens)
        torch.testing.assert_close(found, head(hidden[:, 0]).gather(-1, tokens))
    torch.testing.assert_close(EvolvableHead(4, 1).at(hidden).shape, hidden.shape[:-1])


@ARRANGEMENTS
@pytest.mark.parametrize("growth", list(GROWTH))
def test_growing_a_head_does_not_change_its_outputs(arrangement, growth):
    learner = learner_of(model={**EVOLVABLE, **arrangement})
    networks, state = Networks(learner.config), members(learner, generations=3)
    grown = 0
    for seed in range(4):
        after, changes = mutate(state, GROWTH[growth], draws(seed))
        for i, change in enumerate(changes):
            if " more" in change.what:
                before, later = outputs(networks, state[i]), outputs(networks, after[i])
                assert all(later[name].equal(value) for name, value in before.items())
                grown += 1
    assert grown > 3


def agent_with(config):
    net = {"vocab_size": 35, "n_layer": 1, "n_head": 2, "n_embd": 8, "max_layers": 2}
    agent = ILQL(None, net)
    settings = replace(config, model=replace(config.model, trunk=agent.config.model.trunk))
    model = ILQLModel(settings.model)
    agent.install(model, make_target(model), settings)
    return agent


def test_an_agent_loads_forms_and_keeps_them_when_its_language_model_changes():
    agent = agent_with(ILQLConfig(model=ILQLModelConfig(evolvable_heads=True)))
    state = torch.stack([agent.learner_state().clone()])
    for seed in range(4):
        state, _ = mutate(state, GROWTH["a layer"], draws(seed))
    agent.load_learner_state(state[0])
    forms = {name: getattr(agent.model, name).num_nodes for name in ("v", "q1", "q2")}
    assert any(nodes[1] for nodes in forms.values())
    for name in ("q1", "q2"):
        assert getattr(agent.target, name).num_nodes == forms[name]
    assert agent.reshape(1.0, [16], draws()) == "1 -> 2 layers"
    assert {name: getattr(agent.model, name).num_nodes for name in forms} == forms
    assert agent.target.q1.num_nodes == forms["q1"]


def test_invalid_forms_are_refused():
    with pytest.raises(ValueError, match="Set max_head_nodes=32 or more, or None"):
        learner_of(model={"evolvable_heads": True, "max_head_nodes": 31})
    for name in ("max_head_nodes", "max_head_layers"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            ILQLModelConfig(**{name: 0})


def test_decoding_without_the_compiled_call_gives_the_heads_outputs():
    learner = learner_of(model=EVOLVABLE)
    networks, needs = Networks(learner.config), Needs(policy=True, values=True)
    for state in members(learner).unbind(0):
        networks.refresh(state)
        model, target = networks.model, networks.target
        assert CompiledHeads.of(model, target) is None
        scorer = ModelScorer(model, target)
        with torch.no_grad():
            rows, _ = scorer.start([[1, 2, 3], [4, 5, 6]], needs, 5)
            found = rows.advance(torch.tensor([7, 8]))
            hidden = model.trunk(torch.tensor([[1, 2, 3, 7], [4, 5, 6, 8]]))[:, -1]
            q = torch.minimum(target.q1(hidden), target.q2(hidden))
        torch.testing.assert_close(found.target_q, q, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.v, model.value(hidden), rtol=1e-4, atol=1e-5)
