"""raffia.functional.returns against plain loops, and against the paper's code (returns.json)."""

import json
from pathlib import Path

import pytest
import torch

from raffia.functional.returns import discounted_sum, lambda_return, n_step_return, value_prefix

ORACLE = json.loads((Path(__file__).parent / "returns.json").read_text())["cases"]
B, T = 5, 7


def sequences(seed=0):
    g = torch.Generator().manual_seed(seed)
    reward, value = torch.randn(2, B, T, generator=g, dtype=torch.float64)
    discount = 0.9 * (torch.rand(B, T, generator=g) > 0.2).double()
    ends = torch.rand(B, T, generator=g) > 0.7
    return reward, discount, value, ends


def n_step_by_hand(reward, discount, value, ends, n):
    out = []
    for start in range(len(reward)):
        total, weight = 0.0, 1.0
        for t in range(start, min(start + n, len(reward))):
            total += weight * reward[t]
            weight *= discount[t]
            last = t
            if ends[t]:
                break
        out.append(total + weight * value[last])
    return torch.stack(out)


def lambda_by_hand(reward, discount, value, ends, lambda_):
    """The weighted mean of the n-step returns, without the recursion."""
    out = []
    for start in range(len(reward)):
        end = next((t for t in range(start, len(reward)) if ends[t]), len(reward) - 1)
        num_left = end - start + 1
        total = 0.0
        for n in range(1, num_left + 1):
            weight = lambda_ ** (n - 1) * ((1 - lambda_) if n < num_left else 1)
            total += weight * n_step_by_hand(reward, discount, value, ends, n)[start]
        out.append(total)
    return torch.stack(out)


@pytest.mark.parametrize("with_ends", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 20])
def test_n_step_equals_a_loop(n, with_ends):
    reward, discount, value, ends = sequences(n)
    ends = ends & with_ends
    got = n_step_return(reward, discount, value, n, ends if with_ends else None)
    rows = zip(reward, discount, value, ends, strict=True)
    torch.testing.assert_close(got, torch.stack([n_step_by_hand(*row, n) for row in rows]))


def test_each_row_may_have_a_different_horizon():
    reward, discount, value, ends = sequences()
    n = torch.tensor([3, 1, 9, 2, 5])
    rows = zip(reward, discount, value, ends, n.tolist(), strict=True)
    want = torch.stack([n_step_by_hand(*row) for row in rows])
    for step in (n_step_return, torch.vmap(n_step_return)):
        torch.testing.assert_close(step(reward, discount, value, n, ends), want)


@pytest.mark.parametrize("case", ORACLE, ids=range(len(ORACLE)))
def test_targets_equal_the_papers_code(case):
    """Windows of K + 1 + n steps: behind the end of the game, rewards and values are 0."""
    width = case["unroll_steps"] + 1
    size = width + case["n"]
    reward, value, discount = torch.zeros(3, len(case["rows"]), size)
    for i, row in enumerate(case["rows"]):
        length = min(size, len(row["reward"]))
        reward[i, :length] = torch.tensor(row["reward"][:length])
        value[i, :length] = torch.tensor(row["value"][:length])
        discount[i, : len(row["reward"]) - 1] = case["discount"]  # 0: the game ends after it
    got = n_step_return(reward, discount, value, case["n"])[:, :width]
    want = torch.tensor([row["target"] for row in case["rows"]])
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)
    prefix = value_prefix(reward[:, :width], case["lstm_horizon"])
    want = torch.tensor([row["value_prefix"] for row in case["rows"]])[:, :-1]
    torch.testing.assert_close(prefix[:, :-1], want, atol=2e-5, rtol=1e-5)


def test_n_steps_of_two_players_alternate_the_sign():
    reward = torch.tensor([0.0, 0.0, 0.0, 1.0])  # the player of the last move wins
    value = torch.zeros(4)
    discount = torch.tensor([-1.0, -1.0, -1.0, 0.0])
    assert n_step_return(reward, discount, value, 4).tolist() == [-1, 1, -1, 1]
    assert n_step_return(reward, discount, value, 2).tolist() == [0, 0, -1, 1]


@pytest.mark.parametrize("bad", [0, torch.tensor([1, 0, 2, 3, 4])])
def test_a_horizon_below_one_is_refused(bad):
    reward, discount, value, _ = sequences()
    with pytest.raises(ValueError, match="n=0 must be at least 1"):
        n_step_return(reward, discount, value, bad)


def test_discounted_sum_equals_a_loop():
    reward, discount, _, _ = sequences()
    bootstrap = torch.arange(B, dtype=torch.float64)
    want = torch.zeros(B, T, dtype=torch.float64)
    for i in range(B):
        following = bootstrap[i]
        for t in reversed(range(T)):
            following = want[i, t] = reward[i, t] + discount[i, t] * following
    torch.testing.assert_close(discounted_sum(reward, discount, bootstrap), want)
    torch.testing.assert_close(torch.vmap(discounted_sum)(reward, discount, bootstrap), want)


@pytest.mark.parametrize("with_ends", [False, True])
@pytest.mark.parametrize("lambda_", [0.0, 0.3, 1.0])
def test_lambda_return_is_the_weighted_mean_of_n_step_returns(lambda_, with_ends):
    reward, discount, value, ends = sequences(3)
    ends = ends & with_ends
    rows = zip(reward, discount, value, ends, strict=True)
    want = torch.stack([lambda_by_hand(*row, lambda_) for row in rows])
    got = lambda_return(reward, discount, value, lambda_, ends if with_ends else None)
    torch.testing.assert_close(got, want)
    over_rows = torch.vmap(lambda r, g, v, e: lambda_return(r, g, v, lambda_, e))
    torch.testing.assert_close(over_rows(reward, discount, value, ends), want)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_whole_rewards_are_discounted_as_others(dtype):
    """A fraction in the type of such rewards would be 0."""
    reward, value = torch.tensor([1, 0, 1]).to(dtype), torch.tensor([0.0, 0.0, 8.0])
    for of in (
        lambda r: discounted_sum(r, 0.5),
        lambda r: discounted_sum(r, torch.full((3,), 0.5), torch.tensor(3.0)),
        lambda r: n_step_return(r, 0.5, value, 2),
        lambda r: lambda_return(r, 0.5, value, 0.75),
    ):
        torch.testing.assert_close(of(reward), of(reward.float()))


@pytest.mark.parametrize("horizon", [1, 2, 3, 7, 9])
def test_value_prefix_equals_a_loop(horizon):
    reward, _, _, _ = sequences()
    want = torch.zeros(B, T, dtype=torch.float64)
    for i in range(B):
        total = 0.0
        for k in range(T):
            total = reward[i, k] + (0 if k % horizon == 0 else total)
            want[i, k] = total
    torch.testing.assert_close(value_prefix(reward, horizon), want)
    torch.testing.assert_close(value_prefix(reward[0], horizon), want[0])
    torch.testing.assert_close(torch.vmap(lambda r: value_prefix(r, horizon))(reward), want)


def test_value_prefix_needs_a_horizon():
    with pytest.raises(ValueError, match="horizon=0"):
        value_prefix(torch.zeros(3), 0)


def test_lambda_returns_of_float64_have_its_precision_where_ends_are_given():
    reward, discount, value, ends = sequences()
    fractions = torch.full_like(reward, 0.95)
    found = lambda_return(reward, discount, value, 0.95, ends)
    assert found.equal(lambda_return(reward, discount, value, fractions, ends))


def test_sequences_of_no_steps_have_returns_of_no_steps():
    nothing = torch.zeros(2, 0)
    for found in (
        discounted_sum(nothing, 0.5),
        n_step_return(nothing, 0.5, nothing, 3),
        lambda_return(nothing, 0.5, nothing, 0.5),
        value_prefix(nothing, 3),
    ):
        assert found.shape == (2, 0)


def test_a_column_for_what_is_one_number_of_each_sequence_is_refused():
    reward = torch.zeros(2, 3)
    with pytest.raises(
        ValueError, match=r"bootstrap has shape \[2, 1\].* rewards \[2, 3\].*: \[2\]"
    ):
        discounted_sum(reward, 0.5, torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"n has shape \[2, 1\]"):
        n_step_return(reward, 0.5, reward, torch.ones(2, 1, dtype=torch.int64))
