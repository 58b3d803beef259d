"""Samplers: frequencies, order and weights of the drawn items."""

import copy
import json
from pathlib import Path

import pytest
import torch

from raffia.data.prioritized import PrioritizedSampler
from raffia.data.samplers import Draw, RandomSampler, Sampler, SamplerWithoutReplacement
from raffia.tensordict.tensordict import TensorDict

# Importance weights of batches out of a larger replay, as LightZero 9f717c80 gives them.
IMPORTANCE = json.loads((Path(__file__).parent / "importance_weights.json").read_text())


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def prioritized_sampler(priorities, alpha=1.0, beta=1.0, eps=0.0, **options):
    sampler = PrioritizedSampler(len(priorities), alpha, beta, eps, **options)
    sampler.added(range(len(priorities)))
    sampler.update_priority(torch.arange(len(priorities)), torch.as_tensor(priorities))
    return sampler


def is_plausible(items, expected):
    """Whether chi-square is below mean + 5 standard deviations, as it nearly always is."""
    n = len(expected)
    counts = torch.bincount(items, minlength=n)
    return ((counts - expected) ** 2 / expected).sum() < n + 5 * (2 * n) ** 0.5


def chance_of(sampler, n):
    """The probability of each of n items, from many stratified draws."""
    items = sampler.draw(100_000, range(n), rng()).items
    return (torch.bincount(items, minlength=n) / 100_000).tolist()


# ------------------------------------------------------------- with and without replacement


@pytest.mark.parametrize("n", [1, 3, 10, 15, 20])  # of 20: below half, above, all
def test_without_replacement_items_are_uniform_and_do_not_repeat(n):
    sampler, generator = RandomSampler(replacement=False), rng()
    batches = [sampler.draw(n, range(5, 25), generator).items - 5 for _ in range(2000)]
    assert all(len(batch.unique()) == n for batch in batches)
    assert is_plausible(torch.cat(batches), torch.full((20,), 2000 * n / 20))
    # and each position is uniform
    assert is_plausible(torch.stack(batches)[:, 0], torch.full((20,), 100.0))


def test_draws_come_from_the_generator_or_from_the_global_one():
    for sampler in (
        RandomSampler(),
        RandomSampler(replacement=False),
        SamplerWithoutReplacement(),
        prioritized_sampler([1.0, 2.0, 3.0]),
        prioritized_sampler([1.0, 2.0, 3.0], stratified=True),
    ):
        twin = copy.deepcopy(sampler)
        torch.manual_seed(7)
        by_global = [twin.draw(2, range(3)).items.tolist() for _ in range(5)]
        state, generator = torch.get_rng_state(), rng(7)
        by_generator = [sampler.draw(2, range(3), generator).items.tolist() for _ in range(5)]
        assert by_global == by_generator
        assert torch.equal(state, torch.get_rng_state())  # the global one was left alone


def test_added_items_are_drawn_in_the_next_epoch_and_overwritten_ones_never():
    sampler = SamplerWithoutReplacement(shuffle=False)
    for n, live, expected in [
        (2, range(0, 6), [0, 1]),
        (2, range(0, 8), [2, 3]),  # 6 and 7 are new
        (2, range(5, 11), [5]),  # 4 is overwritten
        (9, range(5, 11), [5, 6, 7, 8, 9, 10]),
        (2, range(20, 23), [20, 21]),
        (2, range(30, 33), [30, 31]),  # all rows were overwritten
        (40, range(30, 33), [32]),
        (40, range(30, 33), [30, 31, 32]),
    ]:
        assert sampler.draw(n, live).items.tolist() == expected


class Oldest(Sampler):
    def draw(self, n, live, generator=None):
        return Draw(torch.arange(live.start, live.start + n), {})


# ----------------------------------------------------------------------------------- by priority


@pytest.mark.parametrize("stratified", [False, True])
@pytest.mark.parametrize(("alpha", "eps"), [(1.0, 0.0), (0.6, 0.5), (0.0, 1e-8), (2.0, 0.1)])
def test_items_are_drawn_in_proportion_to_their_priority(alpha, eps, stratified):
    priorities = torch.tensor([0.5, 1.0, 0.0, 4.0, 2.0, 3.0], dtype=torch.float64)
    sampler = prioritized_sampler(priorities, alpha, eps=eps, stratified=stratified)
    items = sampler.draw(60_000, range(6), rng()).items
    chance = (priorities + eps) ** alpha
    expected = 60_000 * chance / chance.sum()
    if chance[2] == 0:
        assert not (items == 2).any()
        items, expected = items[items != 2], expected.index_fill(0, torch.tensor([2]), 1e-9)
    assert is_plausible(items, expected)
    if stratified:
        sampler = prioritized_sampler(torch.ones(64), stratified=True)
        for seed in range(20):  # one item from each part
            items = sampler.draw(16, range(64), rng(seed)).items
            assert (items // 4).tolist() == list(range(16))


def test_weights_follow_the_formula():
    """w_i = (p_i / p_min)^-beta; by hand for p = 1, 4, 9, 0.25, alpha = 0.5 and beta = 0.5:
    p^alpha = 1, 2, 3, 0.5, so w = 2^-.5, 4^-.5, 6^-.5, 1."""
    sampler = prioritized_sampler([1.0, 4.0, 9.0, 0.25], alpha=0.5, beta=0.5)
    draw = sampler.draw(200, range(4), rng())
    by_hand = torch.tensor([2**-0.5, 0.5, 6**-0.5, 1.0])
    assert set(draw.items.tolist()) == {0, 1, 2, 3}
    assert draw.info["priority_weight"].dtype is torch.float32
    torch.testing.assert_close(draw.info["priority_weight"], by_hand[draw.items])
    sampler.beta = 0.0
    assert sampler.draw(9, range(4), rng()).info["priority_weight"].tolist() == [1.0] * 9


@pytest.mark.parametrize("case", IMPORTANCE["cases"])
def test_weights_by_the_batch_rule_equal_efficientzero_s(case, monkeypatch):
    """Batches of a replay of 40, 900 and 12 items, with the weights that LightZero gives them."""
    options = {"alpha": case["alpha"], "beta": case["beta"]}
    sampler = prioritized_sampler(case["priorities"], importance="batch", **options)
    chance = torch.tensor(case["priorities"], dtype=torch.float64) ** case["alpha"]
    batch = torch.tensor(case["batch"])
    middle = ((chance.cumsum(0) - chance / 2) / chance.sum())[batch]  # draws just these items
    monkeypatch.setattr(torch, "rand", lambda n, **options: middle.clone())
    draw = sampler.draw(len(batch), range(len(chance)))
    assert draw.items.tolist() == case["batch"]
    expected = torch.tensor(case["weights_of_the_batch"])
    torch.testing.assert_close(draw.info["priority_weight"], expected, rtol=2e-5, atol=1e-6)
    by_buffer = prioritized_sampler(case["priorities"], **options)
    weight = by_buffer.draw(len(batch), range(len(chance))).info["priority_weight"]
    is_equal = case["batch"] == list(range(len(chance)))  # where the batch is the whole replay
    assert torch.allclose(weight, expected, rtol=2e-5, atol=1e-6) == is_equal


def test_a_changed_alpha_applies_to_all_items():
    sampler = prioritized_sampler([1.0, 16.0, 81.0], alpha=0.5, stratified=True)
    sampler.alpha = 0.25
    assert chance_of(sampler, 3) == pytest.approx([1 / 6, 2 / 6, 3 / 6], abs=1e-3)
    sampler.update_priority(torch.tensor([0]), 16.0)
    assert chance_of(sampler, 3) == pytest.approx([2 / 7, 2 / 7, 3 / 7], abs=1e-3)
    sampler.alpha = 0.0
    assert chance_of(sampler, 3) == pytest.approx([1 / 3] * 3, abs=1e-3)
    with pytest.raises(ValueError, match="start with a small alpha, such as 0.001"):
        sampler.alpha = 0.5
    assert sampler.alpha == 0.0


def test_priorities_of_several_steps_become_one():
    steps = torch.tensor([[[1.0], [2.0], [9.0]], [[3.0], [3.0], [3.0]]])  # [2, 3, 1]
    by_hand = {"max": (9, 3), "min": (1, 3), "mean": (4, 3), "median": (2, 3)}
    for reduction, (a, b) in by_hand.items():
        sampler = PrioritizedSampler(2, 1.0, 1.0, 0.0, reduction=reduction, stratified=True)
        sampler.added(range(2))
        sampler.update_priority(torch.tensor([0, 1]), steps)
        assert chance_of(sampler, 2) == pytest.approx([a / (a + b), b / (a + b)], abs=1e-3)


def test_items_that_were_overwritten_are_left_out_and_counted():
    sampler = PrioritizedSampler(4, alpha=1.0, beta=1.0, eps=0.0)
    sampler.added(range(6))  # 2, 3, 4, 5 are here
    index = torch.tensor([0, 2, 1, 5, 0])
    priority = torch.tensor([1000.0, 3.0, 1000.0, 7.0, 1000.0])
    assert sampler.update_priority(index, priority) == 3
    assert sampler.update_priority(torch.tensor([1]), 50.0) == 1
    assert sampler.num_ignored == 4  # updates that are all late count as well
    assert set(sampler.draw(400, range(2, 6), rng()).items.tolist()) == {2, 3, 4, 5}
    sampler.added(range(6, 7))  # has 7, not 1000
    draw = sampler.draw(400, range(3, 7), rng())
    weights = draw.info["priority_weight"].tolist()
    weight = dict(zip(draw.items.tolist(), weights, strict=True))
    assert weight == pytest.approx({3: 1.0, 4: 1.0, 5: 1 / 7, 6: 1 / 7})


def update(index, priority):
    priorities = torch.tensor([9.0, priority], dtype=torch.float64)
    return lambda s: s.update_priority(torch.tensor([1, index]), priorities)


def exponent(**options):
    return lambda s: PrioritizedSampler(3, **{"alpha": 1.0, "beta": 1.0, **options})


def loaded(state):
    return lambda s: SamplerWithoutReplacement().load_state_dict(state)


five, distinct = prioritized_sampler([1.0] * 5), RandomSampler(replacement=False)
full = SamplerWithoutReplacement(drop_last=True)
NEGATIVE = "must be finite and >= 0; got -0.5"
MISTAKES = [
    (update(0, -1.0), ValueError, r"finite and >= 0 .*got -1. .*error.abs\(\)"),
    (update(0, float("nan")), ValueError, "got nan"),
    (update(0, 1e308), ValueError, "at most"),
    (update(3, 1.0), IndexError, "there is no item 3: only 3 have been added so far"),
    (update(-1, 1.0), IndexError, "there is no item -1"),
    (lambda s: s.update_priority(torch.arange(2), torch.ones(3)), ValueError, r"shape \[2\] needs"),
    (lambda s: s.update_priority(torch.tensor([0.5]), 1.0), TypeError, "indices must be integers"),
    (exponent(alpha=-0.5), ValueError, f"alpha {NEGATIVE}"),
    (exponent(importance="max"), ValueError, "importance='max' must be one of 'buffer', 'batch'"),
    (exponent(reduction="sum"), ValueError, "reduction='sum' must be one of 'max', 'min', 'mean',"),
    (lambda s: setattr(s, "beta", -1.0), ValueError, "beta must be finite"),
    (lambda s: s.draw(2, range(5)), ValueError, "knows the items 0..2, but the buffer holds 0..4"),
    (lambda s: s.added(range(5, 6)), ValueError, "items from 5 on do not follow the last known"),
    (lambda s: s.load_state_dict({}), ValueError, "not belong to a PrioritizedSampler: it has no"),
    (lambda s: s.load_state_dict(five.state_dict()), ValueError, "max_capacity=5, but this one"),
    *[
        (loaded(x), ValueError, "not belong to a SamplerWithoutReplacement: .* order")
        for x in ({}, {1: 2}, {("a", "b"): 2}, TensorDict(x=torch.ones(2), batch_size=[2]))
    ],
    (lambda s: prioritized_sampler([0.0, 0.0]).draw(1, range(2)), ValueError, "all priorities are"),
    (lambda s: distinct.draw(4, range(3)), ValueError, "4 different items cannot be drawn from 3"),
    (lambda s: full.draw(40, range(10)), ValueError, "10 items do not fill a batch of 40, and"),
    (lambda s: Oldest().update_priority(0, 1.0), TypeError, "Oldest has no priorities; use Prio"),
    (lambda s: Sampler().draw(2, range(3)), NotImplementedError, "Sampler must define draw"),
]


@pytest.mark.parametrize(("call", "error", "match"), MISTAKES)
def test_invalid_calls_change_nothing(call, error, match):
    sampler = prioritized_sampler([1.0, 2.0, 5.0])
    before, version = sampler.draw(50, range(3), rng()), sampler.version
    with pytest.raises(error, match=match):
        call(sampler)
    after = sampler.draw(50, range(3), rng())
    assert torch.equal(before.items, after.items) and sampler.version == version
    assert torch.equal(before.info["priority_weight"], after.info["priority_weight"])
