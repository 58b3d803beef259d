"""The learner's contract: pure, stackable, by microbatches; targets; frozen parameters."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from raffia.algorithms.ilql import ILQLConfig, ILQLLearner, ILQLModel, with_row_means
from raffia.algorithms.ilql.config import (
    ILQLLossConfig,
    ILQLModelConfig,
    OptimizerConfig,
    TargetConfig,
    TrunkConfig,
)
from raffia.functional import global_norm
from raffia.learner import Accumulate
from tests.marks import refusals

from .small import TRUNK, batch_of, float32

LOSS = ILQLLossConfig(beta=0.5, dm_weight=0.1, dm_margin=0.1, cql_weight=0.2, clip_weight=3.0)


def learner_of(*, model=None, loss=LOSS, trunk=TRUNK, **options):
    factory = options.pop("model_factory", None)
    num_updates = options.pop("num_updates", None)
    options.setdefault("optimizer", OptimizerConfig(learning_rate=1e-3))
    config = ILQLConfig(model=ILQLModelConfig(trunk=trunk, **(model or {})), loss=loss, **options)
    return ILQLLearner(config, model_factory=factory, num_updates=num_updates)


def assert_equal(found, expected, **tolerance):
    assert set(found.keys(True, True)) == set(expected.keys(True, True))
    tolerance = tolerance or {"rtol": 0, "atol": 0}
    for key, value in expected.items(True, True):
        torch.testing.assert_close(found[key], value, **tolerance, msg=str(key))


def test_same_seed_same_bits_and_gradients_are_pure():
    learner, batch = learner_of(), float32(batch_of("A"))
    state = learner.init(3)
    assert_equal(state, learner.init(3))
    original, random = state.clone(), torch.get_rng_state()
    first, second = learner.grads(state, batch), learner.grads(state, batch)
    assert_equal(first[0], second[0])
    assert_equal(state, original)
    assert torch.equal(torch.get_rng_state(), random)


def test_accumulated_gradients_with_row_means_equal_those_of_the_whole_batch():
    learner, batch = learner_of(), float32(batch_of("B"))
    batch = batch[[0, 2, 3, 0, 1, 4, 4, 1]]
    state = learner.init(0)
    whole, expected = learner.grads(state, batch)
    parts = Accumulate(learner, 4)
    found, metrics = parts.grads(state, with_row_means(batch))
    assert_equal(found["grads"], whole["grads"], rtol=1e-4, atol=1e-6)
    assert metrics["loss"].item() == pytest.approx(expected["loss"].item(), rel=1e-5)
    found, _ = parts.grads(state, batch)  # parts with few actions weigh more
    distance = global_norm(found["grads"] - whole["grads"]) / global_norm(whole["grads"])
    assert distance > 0.01


def test_hard_updates_at_an_interval():
    learner = learner_of(target=TargetConfig(alpha=1.0, interval=2))
    state, batch = learner.init(0), float32(batch_of("A"))
    start = state["target"].clone()
    for step in range(1, 3):
        state = learner.apply(state, learner.grads(state, batch)[0])
        if step == 1:
            assert_equal(state["target"], start)
    assert_equal(state["target"], state["params"].select("q1", "q2"))
    changed = state["params", "q1", "0", "weight"] - start["q1", "0", "weight"]
    assert changed.abs().max() > 0


def test_the_values_can_have_their_own_learning_rate():
    def moved(value_rate):
        optimizer = OptimizerConfig(learning_rate=1e-3, value_rate=value_rate)
        learner, batch = learner_of(optimizer=optimizer), float32(batch_of("A"))
        state = learner.init(0)
        start = state["params"].clone()
        state = learner.apply(state, learner.grads(state, batch)[0])
        change = state["params"] - start
        return [change[name, *rest].abs().max().item() for name, *rest in (
            ("trunk", "wpe", "weight"), ("v", "0", "weight"), ("q2", "2", "bias"),
        )]  # fmt: skip

    assert moved(1.0) == pytest.approx([1e-3, 1e-3, 1e-3], rel=1e-3)
    assert moved(4.0) == pytest.approx([1e-3, 4e-3, 4e-3], rel=1e-3)


def test_learning_rates_over_a_run():
    options = {"learning_rate": 1.0, "warmup_updates": 10, "final_share": 0.2}
    linear = learner_of(optimizer=OptimizerConfig(decay="linear", **options), num_updates=110)
    assert [linear.learning_rate(step) for step in (5, 10, 60, 110, 200)] == pytest.approx(
        [0.5, 1.0, 0.6, 0.2, 0.2]
    )
    cosine = learner_of(optimizer=OptimizerConfig(decay="cosine", **options), num_updates=110)
    assert cosine.learning_rate(60) == pytest.approx(0.6)
    with pytest.raises(ValueError, match=r"ILQLLearner\(config, num_updates=...\)"):
        learner_of(optimizer=OptimizerConfig(decay="linear"))


def test_dropout_draws_by_update_and_leaves_the_generator_alone():
    learner = learner_of(trunk=replace(TRUNK, dropout=0.3))
    state, batch = learner.init(0), float32(batch_of("A"))
    random = torch.get_rng_state()
    first, again = learner.grads(state, batch)[0], learner.grads(state, batch)[0]
    assert_equal(first, again)
    assert torch.equal(torch.get_rng_state(), random)
    later = learner.grads(state.copy().set("step", torch.tensor(1)), batch)[0]
    assert global_norm(later["grads"] - first["grads"]) > 0.01
    with pytest.raises(ValueError, match=r"set dropout=0\.0"):
        torch.vmap(learner.grads, (0, None))(torch.stack([state, state]), batch)


def test_a_batch_without_any_action():
    learner, batch = learner_of(), float32(batch_of("B"))[4:]
    update, metrics = learner.grads(learner.init(0), batch)
    assert metrics["loss"] == 0
    assert metrics["grad_norm"] == 0
    assert all(grad.isfinite().all() for grad in update["grads"].values(True, True))


@pytest.mark.slow
def test_compiled_gradients_are_the_same():
    torch.compiler.reset()
    learner, batch = learner_of(), float32(batch_of("A"))
    state = learner.init(0)
    compiled = torch.compile(learner.grads, backend="eager", fullgraph=True)
    found, metrics = compiled(state, batch)
    expected, expected_metrics = learner.grads(state, batch)
    assert_equal(found["grads"], expected["grads"], rtol=1e-4, atol=1e-6)
    assert_equal(metrics, expected_metrics, rtol=1e-4, atol=1e-5)
    torch.compiler.reset()


INVALID = [  # a call, and words of its error
    (lambda: TrunkConfig(n_embd=10, n_head=4), "n_head can be one of"),
    (lambda: ILQLLossConfig(tau=1.5), "must be in 0..1"),
    (lambda: ILQLConfig(model=ILQLModelConfig(per_token=False)), "set cql_weight=0"),
    (lambda: ILQLModelConfig(policy="share"), "did you mean 'shared'"),
    (lambda: ILQLModel(ILQLModelConfig(), policy=nn.Identity()), 'policy="separate"'),
]
test_invalid_settings_are_refused = refusals(INVALID)
