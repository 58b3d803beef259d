"""Loss terms against values computed by hand."""

import math
from dataclasses import replace

import pytest
import torch

from raffia.algorithms.ilql import ILQLConfig, method
from raffia.algorithms.ilql.config import ILQLLossConfig, ILQLModelConfig
from raffia.algorithms.ilql.terms import (
    advantage_weights,
    bellman_target,
    cql_loss,
    dm_loss,
    masks_of,
    token_loss,
    token_weights,
)
from raffia.functional import expectile_loss, masked_mean

from .small import TRUNK, batch_of, make_loss, numbers_of


def test_expectile_of_one_half_is_half_the_squared_error():
    error = torch.randn(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(expectile_loss(error, 0.5), error.square() / 2)
    samples = torch.tensor([0.0, 1.0, 10.0], dtype=torch.float64)
    grid = torch.linspace(0, 10, 10_001, dtype=torch.float64)
    losses = expectile_loss(samples[:, None] - grid, 0.9).sum(0)
    # tau (10 - m) = (1 - tau) (m + m - 1):  9 - 0.9 m = 0.2 m - 0.1
    assert grid[losses.argmin()].item() == pytest.approx(9.1 / 1.1, abs=1e-3)


def test_conservative_and_margin_losses_by_hand():
    q, action = torch.tensor([[1.0, 3.0, 0.0]]), torch.tensor([1])
    by_hand, one = math.log(math.exp(0.5) + math.exp(1.5) + 1) - 1.5, torch.tensor([True])
    assert cql_loss([q, q], action, one, 2.0).item() == pytest.approx(2 * by_hand)
    assert dm_loss([q], action, one, 2.5).item() == pytest.approx(0.5**2 + 2.5**2)


def test_masked_values_may_be_nan():
    values = torch.tensor([2.0, math.nan, 4.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    mean = masked_mean(values, mask)
    [grad] = torch.autograd.grad(mean, values)
    assert mean == 3
    assert grad.tolist() == [0.5, 0.0, 0.5]
    assert masked_mean(values, mask, torch.tensor(4.0)) == 1.5


def test_masks_of_finished_and_unfinished_rows():
    real = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    ended = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]]).bool()
    strict, published = masks_of(real, ended), masks_of(real, ended, "published")
    assert strict.values is real
    assert published.values.int().tolist() == [[1, 1, 0], [1, 1, 0], [1, 0, 0]]
    assert published.weights.int().tolist() == [[1, 1, 0], [1, 0, 0], [1, 0, 0]]


def test_weights_by_hand():
    advantage = torch.tensor([-2.0, 0.0, 1.0])
    assert advantage_weights(advantage, 0.0).tolist() == [1.0, 1.0, 1.0]
    expected = [math.exp(-1), 1.0, 1.5]
    assert advantage_weights(advantage, 0.5, clip_weight=1.5).tolist() == pytest.approx(expected)
    binary = advantage_weights(advantage, 0.9, exp_weights=False)
    assert binary.tolist() == pytest.approx([0.1, 0.1, 0.9])


def test_bellman_targets_end_at_a_terminal_and_take_no_gradient():
    v, ended = torch.ones(3, requires_grad=True), torch.tensor([False, False, True])
    target = bellman_target(torch.tensor([1.0, 0.0, 2.0]), v, ended, 0.5)
    assert target.tolist() == [1.5, 0.5, 2.0] and not target.requires_grad


def test_unlikely_tokens_have_a_finite_loss():
    logits = torch.tensor([[0.0, 500.0]], requires_grad=True)
    loss = token_loss(logits, torch.tensor([0]), torch.ones(1), torch.tensor([True]))
    loss.backward()
    assert loss.item() == pytest.approx(500) and logits.grad.tolist() == [[-1.0, 1.0]]


def test_utterances_spread_their_weight_over_their_tokens():
    mask = torch.tensor([[True, True], [False, False]])
    found = token_weights(
        torch.tensor([[2.0, 3.0], [7.0, 7.0]]), mask,
        torch.tensor([[1, 4], [0, 0]]), torch.tensor([[2, 6], [0, 0]]), 7,
    )  # fmt: skip
    assert found.tolist() == [[0, 2, 2, 0, 3, 3, 3], [0] * 7]


def test_methods_are_configurations():
    config = ILQLConfig(model=ILQLModelConfig(trunk=TRUNK), loss=ILQLLossConfig(tau=0.8, beta=1.0))
    assert method("ilql", config) is config
    bc = method("bc", config)
    assert (bc.loss.needs_values, bc.loss.awac_weight, bc.keep_best) == (False, 1.0, 1.0)
    assert not bc.decode.needs_values
    assert method("filtered_bc", config).keep_best == 0.1
    assert method("filtered_bc", replace(config, keep_best=0.3)).keep_best == 0.3
    assert method("single_step", config).loss == replace(config.loss, tau=0.5)
    cql = method("cql", config)
    assert (cql.loss.backup, cql.loss.cql_weight, cql.loss.v_weight) == ("max", 1.0, 0.0)
    assert not cql.decode.needs_policy
    with pytest.raises(ValueError, match="'bc', 'filtered_bc'"):
        method("clone", config)


def test_cloning_runs_no_head():
    loss = make_loss(policy="shared", **vars(method("bc", ILQLConfig()).loss))
    for head in (loss.model.v, loss.model.q1, loss.target.q1):
        head.forward = head.at = None  # a call would raise
    total, metrics = loss(batch_of("B"), numbers_of(loss.config))
    total.backward()
    assert set(metrics) == {"loss", "token_loss", "num_tokens"}
    trained = {name for name, p in loss.model.named_parameters() if p.grad is not None}
    assert trained and all(name.startswith("trunk.") for name in trained)
    plain = {"policy": "shared", "q_weight": 0.0, "v_weight": 0.0, "cql_weight": 0.0}
    whole, clipped = (
        loss(batch_of("B"), numbers_of(loss.config))[0]
        for loss in (make_loss(**plain, clip_weight=clip) for clip in (None, 0.25))
    )
    assert clipped.item() == pytest.approx(whole.item() / 4)
