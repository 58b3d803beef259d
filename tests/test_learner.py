"""raffia.learner: a learner that wraps another; the inner one is a regression."""

import pytest
import torch

from raffia.functional.gradients import global_norm
from raffia.learner import Accumulate, Learner
from raffia.tensordict.tensordict import TensorDict
from tests.evolution.learners import Regression
from tests.evolution.learners import regression_batch as batch_of


def make(norm=False):
    return Regression(norm)


def assert_close(a: TensorDict, b: TensorDict, **tolerance):
    assert set(a.keys(True, True)) == set(b.keys(True, True))
    for key in a.keys(True, True):
        torch.testing.assert_close(
            a[key], b[key], msg=lambda m, key=key: f"{key}: {m}", **tolerance
        )


@pytest.mark.parametrize("num", [1, 2, 3, 6])
def test_micro_batches_equal_one_batch(num):
    learner: Learner = make()
    state, batch = learner.init(0), batch_of(6)
    update, metrics = learner.grads(state, batch)
    parts, found_metrics = Accumulate(learner, num).grads(state, batch)
    assert_close(parts, update)
    largest = ("of", "largest")
    assert_close(found_metrics.exclude(largest), metrics.exclude(largest))
    expected = metrics["priority"].reshape(num, -1).amax(1).mean()
    torch.testing.assert_close(found_metrics[largest], expected)
    norm = global_norm(update["grads"])  # of the mean gradient, not the mean of norms
    torch.testing.assert_close(found_metrics["grad_norm"], norm)
    norms = [learner.grads(state, part)[1]["grad_norm"] for part in batch.split(6 // num)]
    assert num == 1 or norm < torch.stack(norms).mean() - 0.01


def test_statistics_of_batchnorm_pass_through_the_micro_batches():
    learner = make(norm=True)
    state, batch = learner.init(0), batch_of(8)
    before = state.clone()
    update, _ = Accumulate(learner, 2).grads(state, batch)
    first, _ = learner.grads(state, batch[:4])
    halfway = state.copy().set("buffers", first["buffers"])
    second, _ = learner.grads(halfway, batch[4:])
    assert_close(update["buffers"], second["buffers"], rtol=0, atol=0)
    assert update["buffers", "1", "num_batches_tracked"] == 2
    assert_close(update["grads"], (first["grads"] + second["grads"]) / 2)
    assert_close(state, before, rtol=0, atol=0)


def test_wrappers_nest_and_train():
    plain, nested = make(), Accumulate(Accumulate(make(), 2), 3)
    states = [plain.init(3), nested.init(3)]
    for step in range(4):
        for i, learner in enumerate((plain, nested)):
            update, _ = learner.grads(states[i], batch_of(12, seed=step))
            states[i] = learner.apply(states[i], update)
    assert_close(*states)
    assert states[1]["step"] == 4


def test_wrappers_work_over_stacked_states():
    learner = Accumulate(make(norm=True), 2)
    states, batch = [learner.init(seed) for seed in range(3)], batch_of(3, 8)
    update, metrics = torch.vmap(learner.grads, randomness="error")(torch.stack(states), batch)
    for i, state in enumerate(states):
        expected, expected_metrics = learner.grads(state, batch[i])
        assert_close(update[i], expected, rtol=1e-5, atol=1e-5)
        assert_close(metrics[i], expected_metrics, rtol=1e-5, atol=1e-5)


def test_uneven_micro_batches_are_refused():
    with pytest.raises(ValueError, match=r"batch of 6 cannot be split into 4 .*\[1, 2, 3, 6\]"):
        Accumulate(make(), 4).grads(make().init(0), batch_of(6))
    with pytest.raises(ValueError, match="num_micro_batches=0"):
        Accumulate(make(), 0)
