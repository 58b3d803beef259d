"""Off-policy estimates of decoding's return: against exact returns, and their limits."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.ilql_exact import policy
from benchmarks.ilql_exact_task import TOKENIZER, dataset, exact_return, solution
from raffia.algorithms.ilql import ILQLModel, make_target
from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
from raffia.algorithms.ilql.off_policy import action_log_probs, off_policy_return
from raffia.lm.decoding.config import DecodeConfig

from .test_exact_task import best_of, by_share

POINTS = list(dataset())
LONGEST = max(len(point.action_idxs) for point in POINTS)


def log_probs(next_token):
    """[80, A] log-probabilities of the actions of the 80 games, whose frequencies are exact."""
    found = torch.zeros(len(POINTS), LONGEST, dtype=torch.float64)
    known = {}
    for row, point in enumerate(POINTS):
        for index, position in enumerate(point.action_idxs):
            state = tuple(point.tokens[: position + 1])
            if state not in known:
                known[state] = next_token(state)
            prob = known[state][point.tokens[position + 1]]
            found[row, index] = math.log(prob) if prob else -math.inf
    return found


def rewards():
    found = torch.zeros(len(POINTS), LONGEST, dtype=torch.float64)
    for row, point in enumerate(POINTS):
        found[row, : len(point.rewards)] = torch.tensor(point.rewards, dtype=torch.float64)
    return found


LOGGED, REWARDS = log_probs(by_share), rewards()


def between(one, other, fraction):
    return lambda state: [
        fraction * a + (1 - fraction) * b for a, b in zip(one(state), other(state), strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("tau", "fraction"), [(0.5, 0.0), (0.5, 1.0), (0.9, 0.5)])
def test_estimates_are_the_exact_returns_where_the_frequencies_are_exact(tau, fraction):
    policy = between(best_of(solution(0.99, tau)), by_share, fraction)
    found = off_policy_return(log_probs(policy) - LOGGED, REWARDS, worst=-2.0)
    assert found.logged_return == pytest.approx(-0.17375)
    assert found.support == pytest.approx(1.0)
    assert found.mean_return == pytest.approx(exact_return(policy), abs=1e-7)
    assert found.low <= found.mean_return <= found.high
    if fraction == 0:  # the data's own policy
        assert found.gain == pytest.approx(0, abs=1e-12) and found.gain_low <= 1e-12
        assert found.effective_rows == pytest.approx(80)
    else:
        assert found.effective_rows < 70


def test_actions_outside_the_data_count_as_the_worst_dialogue():
    log_ratio = log_probs(by_share)
    log_ratio[:, 0] += math.log(0.4)  # the remaining probability is on answers outside the data
    found = off_policy_return(log_ratio - LOGGED, REWARDS, worst=-2.0)
    assert found.support == pytest.approx(0.4)
    assert found.mean_return == pytest.approx(0.4 * -0.17375 + 0.6 * -2.0)
    assert found.gain_low < 0
    nothing = off_policy_return(torch.full_like(LOGGED, -math.inf), REWARDS, worst=-2.0)
    assert (nothing.mean_return, nothing.support, nothing.effective_rows) == (-2.0, 0.0, 0.0)


@given(
    st.lists(
        st.tuples(*[st.floats(-30, 30) | st.just(-math.inf)] * 3, *[st.floats(-5, 5)] * 3),
        min_size=1, max_size=6,
    )
)  # fmt: skip
@example([(0.0, -math.inf, -math.inf, -1.0, 0.0, 1.0), (0.0,) * 6])  # a prefix without its end
@settings(max_examples=100, deadline=None)
def test_an_estimate_stays_within_the_logged_rewards_and_is_finite(rows):
    table = torch.tensor(rows, dtype=torch.float64)
    ratio, earned = table[:, :3], table[:, 3:]
    worst = float(earned.sum(-1).min())
    found = off_policy_return(ratio, earned, worst)
    most = float(earned.clamp_min(0).amax(0).sum())  # the best reward at each position
    assert min(worst, float(earned.amin(0).sum())) - 1e-9 <= found.mean_return <= most + 1e-9
    assert found.low <= found.mean_return <= found.high and found.gain_low <= found.gain
    assert all(math.isfinite(number) for number in vars(found).values())
    assert 0 <= found.support <= 1 and found.effective_rows <= len(rows) + 1e-9


def test_one_dialogue_is_never_surely_better():
    """All the weight on one lucky dialogue is no evidence, however lucky it was."""
    ratio = torch.full((50, 1), -8.0)
    ratio[3] = math.log(50.0)
    earned = torch.zeros(50, 1)
    earned[3] = 10.0
    found = off_policy_return(ratio, earned, worst=0.0)
    assert found.mean_return > 9 and found.effective_rows < 1.1
    assert found.gain_low <= 0
    other = off_policy_return(torch.tensor([[50.0], [10.0]]), torch.tensor([[1.0], [-3.0]]), -5.0)
    assert other.low == pytest.approx(1 - 2 * 1.959964)  # without the first there is the second
    with pytest.raises(ValueError, match="no dialogues"):
        off_policy_return(torch.zeros(0, 2), torch.zeros(0, 2), 0.0)


DECODINGS = [
    DecodeConfig(adv_weight=3.0),
    DecodeConfig(adv_weight=3.0, temperature=0.5, top_p=1.0),
    DecodeConfig(adv_weight=3.0, num_beams=1, top_p=1.0),
    DecodeConfig(include_adv=False),
]


@pytest.mark.parametrize("config", DECODINGS)
def test_log_probabilities_are_those_of_decoding(config):
    torch.manual_seed(0)
    size = TrunkConfig(
        vocab_size=TOKENIZER.num_tokens, n_layer=2, n_head=2, n_embd=8, block_size=16
    )
    model = ILQLModel(ILQLModelConfig(trunk=size)).double()
    target = make_target(model)
    for head in (model.v, *target.q_heads):
        torch.nn.init.normal_(head[2].weight)
    batch = dataset().take([0, 30, 60, 79])
    pad = TOKENIZER.pad_token_id
    decoded, plain = action_log_probs(model, target, batch, config, pad_token=pad)
    decoding = policy(model, target, config)
    by_logits = policy(model, target, DecodeConfig(include_adv=False))
    for row, point in enumerate(POINTS[index] for index in (0, 30, 60, 79)):
        for index, position in enumerate(point.action_idxs):
            state, token = tuple(point.tokens[: position + 1]), point.tokens[position + 1]
            assert decoded[row, index].exp().item() == pytest.approx(decoding(state)[token])
            assert plain[row, index].exp().item() == pytest.approx(by_logits(state)[token])
        assert not decoded[row, len(point.action_idxs) :].any()
    assert not torch.equal(decoded, plain) or not config.include_adv
    assert torch.isfinite(plain).all()
