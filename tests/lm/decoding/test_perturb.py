"""The order of operations, computed by hand, and edge cases of the filters."""

import math
import random
from typing import NamedTuple

import pytest
import torch

from raffia.lm.decoding.config import DecodeConfig, TokenPlanConfig
from raffia.lm.decoding.scorer import Choice, NextToken, keep_top_p, perturb

INF = math.inf


def scores(logits, advantage, forbidden=None, **options):
    inputs = (logits, advantage, forbidden)
    rows = [None if x is None else torch.tensor([x], dtype=torch.float64) for x in inputs]
    mask = None if rows[2] is None else rows[2][0]
    return perturb(rows[0], rows[1], DecodeConfig(**options), mask)[0].exp().tolist()


def test_top_p_of_a_large_vocabulary_equals_that_of_all_tokens_sorted():
    torch.manual_seed(0)
    for scale in (4.0, 0.1):  # a few tokens reach top_p; nearly all are needed for it
        logits = scale * torch.randn(3, 3000)
        order = logits.argsort(-1, descending=True)
        before = logits.softmax(-1).gather(-1, order).cumsum(-1).roll(1, -1)
        before[:, 0] = 0
        expected = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before <= 0.9)
        assert torch.equal(keep_top_p(logits, 0.9).isfinite(), expected)
        assert 1 < expected.sum(-1).min() and expected.sum(-1).max() < 3000
    assert torch.equal(keep_top_p(logits, 1.0), logits)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(temperature=0.0), "pass num_beams=1"),
        (dict(temperature=-1.0), "temperature=-1.0 must be above 0"),
        (dict(top_k=0), "top_k=0 must be at least 1"),
        (dict(top_p=1.5), "top_p=1.5 must be in 0..1"),
        (dict(exp_adv=False), "adv_weight=1.0 must be between 0 and 1 with exp_adv=False"),
        (dict(include_logits=False, include_adv=False), "leave nothing to choose tokens by"),
        (dict(include_logits=False, adv_weight=0.0), "leave nothing to choose tokens by"),
        (dict(num_beams=2, num_generations=3), "pass num_beams=3"),
        (dict(rerank="values"), "='values' must be one of None, 'log_prob', 'advantage', 'value'"),
        (dict(max_new_tokens=0), "max_new_tokens=0 must be at least 1"),
        (dict(num_candidates=1), "num_candidates=1 must be at least 2"),
        (dict(policy="puct"), "policy='puct' must be one of 'muzero', 'gumbel'"),
    ],
)
def test_invalid_settings_are_refused(options, message):
    kind = TokenPlanConfig if {*options} & {"num_candidates", "policy"} else DecodeConfig
    with pytest.raises(ValueError, match=message):
        kind(**options)


def plain_perturb(logits, advantage, config, forbidden):
    """The order of operations on lists: padding, temperature, top-k, top-p, advantage, softmax."""
    scores = [0.0 if not config.include_logits else x for x in logits]
    scores = [x + f for x, f in zip(scores, forbidden, strict=True)]
    if config.include_logits:
        scores = [x / config.temperature for x in scores]
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        if config.top_k is not None:
            allowed = set(order[: config.top_k])
            scores = [x if i in allowed else -INF for i, x in enumerate(scores)]
        if config.effective_top_p < 1:
            total, before, allowed = sum(map(math.exp, scores)), 0.0, set()
            for i in order:
                if before / total <= config.effective_top_p:
                    allowed.add(i)
                before += math.exp(scores[i])
            scores = [x if i in allowed else -INF for i, x in enumerate(scores)]
    if config.include_adv and config.adv_weight > 0:
        for i, a in enumerate(advantage):
            term = config.adv_weight * a
            if not config.exp_adv:
                term = math.log(config.adv_weight if a > 0 else 1 - config.adv_weight)
            if config.adv_clip is not None:
                term = min(term, config.adv_clip)
            scores[i] += term
    total = sum(map(math.exp, scores))
    return [math.exp(x) / total for x in scores]


@pytest.mark.parametrize("seed", range(40))
def test_random_settings_agree_with_lists(seed):
    """Temperature before the filters, these before the advantage, and padding before all."""
    draw = random.Random(seed)
    num = draw.randint(3, 9)
    logits, advantage = ([draw.gauss(0, 2) for _ in range(num)] for _ in range(2))
    forbidden = [0.0] * num
    if draw.random() < 0.5:
        forbidden[draw.randrange(num)] = -INF
    exp_adv = draw.random() < 0.7
    options = dict(
        temperature=draw.choice([0.5, 1.0, 1.7]), top_k=draw.choice([None, 1, 3, 99]),
        top_p=draw.choice([None, 0.0, 0.5, 0.9, 1.0]), exp_adv=exp_adv,
        adv_weight=draw.choice([0.5, 4.0, 0.0]) if exp_adv else draw.choice([0.3, 0.9]),
        adv_clip=draw.choice([None, 0.0, 0.5]), include_adv=draw.random() < 0.8,
    )  # fmt: skip
    if options["include_adv"] and options["adv_weight"]:
        options["include_logits"] = draw.random() < 0.8
    expected = plain_perturb(logits, advantage, DecodeConfig(**options), forbidden)
    assert scores(logits, advantage, forbidden, **options) == pytest.approx(expected, abs=1e-12)


def test_values_are_computed_for_the_filtered_tokens_alone():
    """Also with logits of few digits, some of which become equal when divided."""

    class Few(NamedTuple):
        q: torch.Tensor

        def of(self, tokens):
            return self.q.gather(-1, tokens)

    drawn = torch.randn(2, 3000, 60, generator=torch.Generator().manual_seed(0))
    logits, q = drawn.bfloat16()
    v = torch.zeros(3000, dtype=torch.bfloat16)
    config = DecodeConfig(top_k=5, temperature=1.7)
    full = Choice.of(NextToken(logits, q, v), config, None)
    few = Choice.of(NextToken(logits, None, v, Few(q)), config, None)
    assert torch.equal(full.log_probs, few.log_probs)
