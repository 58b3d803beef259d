"""What goes wrong in another implementation of ILQL does not here; its faults by their effects."""

import math

import pytest
import torch

from raffia.algorithms.ilql.config import ILQLConfig, ILQLLossConfig, ILQLModelConfig
from raffia.algorithms.ilql.learner import ILQLLearner
from raffia.algorithms.ilql.model import ILQLModel, make_target
from raffia.algorithms.ilql.terms import monte_carlo_returns, token_loss

from .small import TRUNK, batch_of, float32, make_loss

KEYS = ("tokens", "state_idxs", "action_idxs", "attn_mask")


def outputs(loss, **more):
    batch = batch_of("A")
    return loss.model(*(batch[key] for key in KEYS), target=loss.target, **more)


def test_one_language_model_and_no_target_in_the_optimiser():
    """There: three of them, all run, and the targets take gradients and optimiser steps."""
    learner = ILQLLearner(ILQLConfig(model=ILQLModelConfig(trunk=TRUNK)))
    state = learner.init(0)
    model = ILQLModel(ILQLModelConfig(trunk=TRUNK))
    learns = sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for p in state["params"].values(True, True)) == learns
    assert sum(m.numel() for m in state["opt"].values(True, True)) == 2 * learns + 2  # 2 counts
    assert not any(p.requires_grad for p in make_target(model).parameters())
    target = state["target"].clone()
    update, _ = learner.grads(state, float32(batch_of("A")))
    assert set(update["grads"].keys()) == set(state["params"].keys())
    for key, value in state["target"].items(True, True):
        assert torch.equal(value, target[key])


def test_one_pass_where_all_is_shared():
    learner = ILQLLearner(ILQLConfig(model=ILQLModelConfig(trunk=TRUNK)))
    calls = []
    trunk = learner._loss.model.trunk
    trunk.ln_f.register_forward_hook(lambda *_: calls.append(1))
    learner.grads(learner.init(0), float32(batch_of("A")))
    assert len(calls) == 1


def test_masked_positions_are_not_attended_to():
    """There: logits do not change when positions are masked."""
    model = make_loss().model
    tokens = batch_of("A")["tokens"]
    mask = torch.ones_like(tokens, dtype=torch.bool)
    without = mask.clone()
    without[:, 2] = False
    state, action = torch.zeros(3, 2).long(), torch.zeros(3, 1).long()
    seen, unseen = (model(tokens, state, action, m).logits for m in (mask, without))
    torch.testing.assert_close(seen[:, :2], unseen[:, :2])
    assert (seen - unseen)[:, 3:].abs().amax((1, 2)).min() > 0.01


def test_policy_and_target_read_their_own_hidden_states():
    """There: the policy's logits come of the target's states, and the other way round."""

    def changed(part):
        loss = make_loss()
        before = outputs(loss)
        with torch.no_grad():
            loss.get_submodule(part).ln_f.weight.mul_(1.5)
        after = outputs(loss)
        told = {
            "v": (before.v, after.v), "q": (before.q[0], after.q[0]),
            "target": (before.target_q[1], after.target_q[1]),
            "logits": (before.logits, after.logits),
        }  # fmt: skip
        return {name for name, (old, new) in told.items() if not torch.equal(old, new)}

    assert changed("model.trunk") == {"v", "q"}
    assert changed("model.policy") == {"logits"}
    assert changed("target.trunk") == {"target"}


def test_unlikely_tokens_have_a_finite_loss():
    """There: the logarithm of a softmax that has underflowed to 0."""
    logits = torch.tensor([[0.0, 500.0]], requires_grad=True)
    loss = token_loss(logits, torch.tensor([0]), torch.ones(1), torch.tensor([True]))
    loss.backward()
    assert loss.item() == pytest.approx(500)
    assert logits.grad.tolist() == [[-1.0, 1.0]]


@pytest.mark.parametrize(("gamma", "length"), [(0.0, 3), (0.5, 3000)])
def test_returns_without_discount_factors_that_vanish(gamma, length):
    """There: NaN, from powers of gamma that are divided by each other."""
    found = monte_carlo_returns(torch.ones(1, length), gamma)
    assert found[0, 0].item() == pytest.approx(1 / (1 - gamma), rel=0.2)
    assert not math.isnan(found.sum().item())


def test_whole_utterances_are_another_model_and_loss():
    """There: the flag is accepted and ignored."""
    options = ILQLLossConfig(cql_weight=0.0)
    told = []
    for per_token, level in ((True, ""), (False, "u_")):
        model = ILQLModelConfig(trunk=TRUNK, per_token=per_token)
        learner = ILQLLearner(ILQLConfig(model=model, loss=options))
        state = learner.init(0)
        assert state["params", "q1", "2", "bias"].shape == ((35,) if per_token else (1,))
        told.append(learner.grads(state, float32(batch_of("A", level)))[1])
    assert told[0]["q_loss"] != told[1]["q_loss"]
