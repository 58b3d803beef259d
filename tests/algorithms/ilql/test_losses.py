"""Terms by hand, arrangements against one another, chosen slots against all of them."""

import math
from dataclasses import replace

import pytest
import torch
from torch.func import functional_call

from raffia.algorithms.ilql.config import ILQLConfig, ILQLLossConfig, ILQLModelConfig, method
from raffia.algorithms.ilql.loss import Loss
from raffia.algorithms.ilql.model import ILQLModel
from raffia.algorithms.ilql.terms import (
    advantage_weights,
    cql_loss,
    dm_loss,
    monte_carlo_returns,
    q_loss,
    token_loss,
    token_weights,
)
from raffia.functional.losses import conservative_loss, expectile_loss, margin_loss, masked_mean

from .small import TOLERANCE, TRUNK, batch_of, make_loss, numbers_of


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
    by_hand = math.log(math.exp(0.5) + math.exp(1.5) + 1) - 1.5
    assert conservative_loss(q, action, temperature=2.0).item() == pytest.approx(by_hand)
    assert margin_loss(q, action, margin=2.5).item() == pytest.approx(0.5**2 + 2.5**2)
    one = torch.tensor([True])
    assert cql_loss([q, q], action, one, 2.0).item() == pytest.approx(2 * by_hand)
    assert dm_loss([q], action, one, 2.5).item() == pytest.approx(0.5**2 + 2.5**2)


def test_what_does_not_count_may_be_anything():
    values = torch.tensor([2.0, math.nan, 4.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    mean = masked_mean(values, mask)
    [grad] = torch.autograd.grad(mean, values)
    assert mean == 3
    assert grad.tolist() == [0.5, 0.0, 0.5]
    assert masked_mean(values, mask, torch.tensor(4.0)) == 1.5


def test_weights_by_hand():
    advantage = torch.tensor([-2.0, 0.0, 1.0])
    assert advantage_weights(advantage, 0.0).tolist() == [1.0, 1.0, 1.0]
    expected = [math.exp(-1), 1.0, 1.5]
    assert advantage_weights(advantage, 0.5, clip_weight=1.5).tolist() == pytest.approx(expected)
    binary = advantage_weights(advantage, 0.9, exp_weights=False)
    assert binary.tolist() == pytest.approx([0.1, 0.1, 0.9])


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


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.99, 1.0])
def test_returns_are_finite_for_all_discounts_and_lengths(gamma):
    rewards = torch.zeros(2, 5000)
    rewards[0, -1], rewards[1, 0] = 4.0, -1.0
    found = monte_carlo_returns(rewards, gamma)
    assert found.isfinite().all()
    assert found[0, -3:].tolist() == pytest.approx([4 * gamma**2, 4 * gamma, 4.0])
    assert found[1, :2].tolist() == [-1.0, 0.0]


OPTIONS = {
    "default": {},
    "beta": {"beta": 0.7, "clip_weight": 1.2},
    "transition": {"beta": 0.7, "transition_weight": 0.3, "dm_weight": 0.5, "dm_margin": 0.2},
    "clipped": {"clip_weight": 0.4, "transition_weight": 0.6},
    "binary": {"beta": 0.8, "exp_weights": False, "cql_temp": 2.0, "mc_returns": True},
    "plain": {"cql_weight": 0.0, "value_min": -0.2, "value_max": 0.3},
    "max": {"backup": "max", "v_weight": 0.0, "awac_weight": 0.0},
    "cloning": {"v_weight": 0.0, "q_weight": 0.0, "cql_weight": 0.0},
}
ARRANGEMENTS = [
    ("separate", "trunk"), ("shared", "trunk"), ("separate", "heads"), ("shared", "heads"),
]  # fmt: skip


def gradients(loss, batch):
    loss.zero_grad()
    total, metrics = loss(batch, numbers_of(loss.config))
    total.backward()
    named = loss.model.named_parameters()
    return total.detach(), metrics, {n: p.grad for n, p in named if p.grad is not None}


def traced_gradients(loss, batch):
    """The same as in a program whose shapes depend on no data, where all slots are computed."""
    learns = {n: p.detach()[None] for n, p in loss.named_parameters() if p.requires_grad}

    def total(parameters):
        found, metrics = functional_call(loss, parameters, (batch, numbers_of(loss.config)))
        return found, (found, metrics)

    grads, (found, metrics) = torch.vmap(torch.func.grad(total, has_aux=True))(learns)
    named = {n.removeprefix("model."): grad[0] for n, grad in grads.items()}
    return found[0], {n: metric[0] for n, metric in metrics.items()}, named


def assert_same(first, second):
    torch.testing.assert_close(first[0], second[0], **TOLERANCE)
    torch.testing.assert_close(dict(first[1]), dict(second[1]), **TOLERANCE)
    zeros = {n: torch.zeros_like(g) for n, g in (first[2] | second[2]).items()}
    torch.testing.assert_close(zeros | first[2], zeros | second[2], **TOLERANCE)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("policy", "target", "mask"),
    [*((*both, "strict") for both in ARRANGEMENTS), ("shared", "heads", "published")],
)
def test_what_is_left_out_changes_nothing(policy, target, name, mask):
    loss = make_loss(policy=policy, target=target, mask=mask, **OPTIONS[name])
    assert_same(gradients(loss, batch_of("B")), traced_gradients(loss, batch_of("B")))


def test_whole_utterances_by_hand():
    torch.manual_seed(0)
    config = ILQLModelConfig(trunk=TRUNK, per_token=False)
    options = ILQLLossConfig(cql_weight=0.0, beta=0.5, gamma=0.9, tau=0.8)
    model, batch = ILQLModel(config).double(), batch_of("A", "u_")
    assert model.q1[2].out_features == 1
    loss = Loss(model, options)
    _, told, _ = gradients(loss, batch)
    q_error = v_error = token = 0.0
    for row in range(3):
        hidden = model.trunk(batch["tokens"][row : row + 1], batch["attn_mask"][row : row + 1])[0]
        log_prob = model.logits(hidden).log_softmax(-1)
        v = model.v(hidden).squeeze(-1)
        for u in range(int(batch["action_mask"][row].sum())):
            state, end = (int(batch[name][row, u]) for name in ("state_idxs", "action_idxs"))
            assert batch["tokens"][row, end] == 30  # </a>
            last = bool(batch["terminals"][row, u + 1])
            after = 0 if last else v[batch["state_idxs"][row, u + 1]]
            target = batch["rewards"][row, u] + 0.9 * after
            q_error += sum((target - head(hidden[end])) ** 2 for head in model.q_heads)
            slow = min(head(hidden[end]) for head in loss.target.q_heads)
            d = slow - v[state]
            v_error += abs(0.8 - float(d < 0)) * d**2
            said = batch["tokens"][row, state + 1 : end + 1]
            chosen = log_prob[state:end].gather(1, said[:, None])
            token -= (0.5 * d).exp() * chosen.sum()
    count, next_tokens = batch["action_mask"].sum(), batch["attn_mask"][:, 1:].sum()
    assert told["q_loss"].item() == pytest.approx((q_error / count).item())
    assert told["v_loss"].item() == pytest.approx((v_error / count).item())
    assert told["token_loss"].item() == pytest.approx((token / next_tokens).item())


def test_methods_are_numbers():
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


def test_a_population_may_differ_in_beta():
    """The number in the state counts where values are learnt, also if the config's is 0."""
    by_number, by_config = make_loss(beta=0.0), make_loss(beta=0.8)
    numbers = numbers_of(by_config.config)
    found, expected = (loss(batch_of("B"), numbers)[0] for loss in (by_number, by_config))
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_cloning_runs_no_head():
    loss = make_loss(policy="shared", **vars(method("bc", ILQLConfig()).loss))
    for head in (loss.model.v, loss.model.q1, loss.target.q1):
        head.forward = head.at = None  # a call would raise
    _, told, grads = gradients(loss, batch_of("B"))
    assert set(told) == {"loss", "token_loss", "num_tokens"}
    assert all(name.startswith("trunk.") for name in grads)
    plain = {"policy": "shared", "q_weight": 0.0, "v_weight": 0.0, "cql_weight": 0.0}
    whole, clipped = (
        gradients(make_loss(**plain, clip_weight=clip), batch_of("B"))[0] for clip in (None, 0.25)
    )
    assert clipped.item() == pytest.approx(whole.item() / 4)


def test_the_largest_target_as_backup():
    loss = make_loss(target="heads", backup="max", gamma=0.5, v_weight=0.0, cql_weight=0.0)
    batch = batch_of("B")
    _, told, _ = gradients(loss, batch)
    hidden = loss.model.trunk(batch["tokens"], batch["attn_mask"])
    rows = torch.minimum(*(head(hidden) for head in loss.target.q_heads)).amax(-1)
    following = rows.gather(1, batch["state_idxs"][:, 1:])
    target = batch["rewards"] + 0.5 * following * ~batch["terminals"][:, 1:]
    said = loss.model(*(batch[key] for key in ("tokens", "state_idxs", "action_idxs", "attn_mask")))
    action = batch["tokens"].gather(1, batch["action_idxs"] + 1).unsqueeze(2)
    q = [head.gather(2, action).squeeze(2) for head in said.q]
    expected = q_loss(q, target, batch["action_mask"])
    assert told["q_loss"].item() == pytest.approx(expected.item())
