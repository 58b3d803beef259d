"""A task of two turns whose V and Q are known exactly: one batch of 80 rows is all of its data.

`exact_task.json` has its 14 distinct dialogues with their counts and, for some gamma and tau, the
values at which every expectile and Bellman equation of the data holds. A state is the prefix of
tokens at a decision; Q is by state and token.
"""

import json

import pytest
import torch

from raffia.algorithms.ilql.config import (
    ILQLConfig,
    ILQLLossConfig,
    ILQLModelConfig,
    OptimizerConfig,
    TargetConfig,
    TrunkConfig,
)
from raffia.algorithms.ilql.learner import ILQLLearner
from raffia.algorithms.ilql.terms import bellman_target, q_loss, v_loss

from .small import HERE, collate, float32

TASK = json.loads((HERE / "exact_task.json").read_text())
ROWS = [row for row in TASK["rows"] for _ in range(row["count"])]


def prefix(row, position):
    return " ".join(map(str, row["tokens"][: position + 1]))


def gathered(solution, rows=ROWS):
    """V [B, A + 1] and Q [B, A] of the solution at the places of the batch; 0 elsewhere."""
    batch = collate(rows, TASK["pad"])
    v = torch.zeros(batch["state_idxs"].shape, dtype=torch.float64)
    q = torch.zeros(batch["action_idxs"].shape, dtype=torch.float64)
    for i, row in enumerate(rows):
        for t, position in enumerate(row["action_idxs"]):
            state = prefix(row, position)
            v[i, t] = solution["v"][state]
            q[i, t] = solution["q"][state][str(row["tokens"][position + 1])]
    return batch, v, q


def summed_by_state(grad, batch, rows, with_token):
    """What moves one number of a table: the gradients of all places that read it."""
    sums = {}
    for i, row in enumerate(rows):
        for t, position in enumerate(row["action_idxs"]):
            key = prefix(row, position + with_token)
            sums[key] = sums.get(key, 0.0) + grad[i, t].item()
    return sums


@pytest.mark.parametrize("name", TASK["solutions"])
def test_the_exact_values_are_where_the_losses_rest(name):
    solution = TASK["solutions"][name]
    batch, v, q = gathered(solution)
    v.requires_grad_()
    q.requires_grad_()
    mask = batch["action_mask"]
    target = bellman_target(
        batch["rewards"], v[:, 1:], batch["terminals"][:, 1:], solution["gamma"]
    )
    loss = q_loss([q, q], target, mask) + v_loss(v[:, :-1], q, mask, solution["tau"])
    v_grad, q_grad = torch.autograd.grad(loss, (v, q))
    for grad, with_token in ((v_grad, False), (q_grad, True)):
        sums = summed_by_state(grad, batch, ROWS, with_token)
        assert len(sums) >= 28
        assert max(map(abs, sums.values())) < 1e-12
    moved = v_loss(v[:, :-1] + 0.01, q, mask, solution["tau"])  # this test can fail
    [v_grad] = torch.autograd.grad(moved, v)
    assert max(map(abs, summed_by_state(v_grad, batch, ROWS, False).values())) > 1e-4


def learnt(solution, num_updates, seed=0):
    """Root mean squares of the errors of V and Q of a small language model, all shared."""
    trunk = TrunkConfig(
        vocab_size=TASK["vocab_size"], n_layer=2, n_head=2, n_embd=32, block_size=16
    )
    config = ILQLConfig(
        model=ILQLModelConfig(trunk=trunk),
        loss=ILQLLossConfig(gamma=solution["gamma"], tau=solution["tau"], cql_weight=0.0),
        target=TargetConfig(alpha=0.05),
        optimizer=OptimizerConfig(learning_rate=3e-3, decay="cosine", final_share=0.02),
    )
    learner = ILQLLearner(config, num_updates=num_updates)
    batch = float32(collate(ROWS, TASK["pad"]))
    state = learner.init(seed)
    for _ in range(num_updates):
        state = learner.apply(state, learner.grads(state, batch)[0])
    model = learner.make_model(seed)
    state["params"].to_module(model)
    distinct, v, q = gathered(solution, TASK["rows"])
    keys = ("tokens", "state_idxs", "action_idxs", "attn_mask")
    with torch.no_grad():
        said = model(*(distinct[key] for key in keys))
    token = distinct["tokens"].gather(1, distinct["action_idxs"] + 1).unsqueeze(2)
    found_q = torch.stack([head.gather(2, token).squeeze(2) for head in said.q]).mean(0)
    real = distinct["action_mask"]
    errors = (said.v - v)[:, :-1][real], (found_q - q)[real]
    return [error.square().mean().sqrt().item() for error in errors]


@pytest.mark.slow
def test_a_language_model_learns_the_exact_values():
    rms_v, rms_q = learnt(TASK["solutions"]["0.99 tau_0.9"], num_updates=1500)
    assert rms_v <= 0.05
    assert rms_q <= 0.05
