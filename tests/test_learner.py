"""raffia.learner: a learner made of another; the toy here is a regression."""

import pytest
import torch
from torch.func import functional_call

from raffia.functional.gradients import global_norm, value_and_grad
from raffia.functional.optim import adamw
from raffia.learner import Accumulate, Learner
from raffia.tensordict.tensordict import TensorDict


class Regression:
    """Fits y by a small network; gives the errors as priorities."""

    def __init__(self, norm: bool = False) -> None:
        layers = [torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)]
        self.net = torch.nn.Sequential(*layers[:1], torch.nn.BatchNorm1d(5), *layers[1:])
        if not norm:
            self.net = torch.nn.Sequential(*layers)
        self.optimizer = adamw()

    def init(self, seed: int) -> TensorDict:
        g = torch.Generator().manual_seed(seed)
        params = {k: torch.randn(p.shape, generator=g) for k, p in self.net.named_parameters()}
        buffers = TensorDict({k: b.clone() for k, b in self.net.named_buffers()})
        return TensorDict(
            params=TensorDict(params),
            buffers=buffers,
            opt=self.optimizer.init(TensorDict(params)),
            step=torch.tensor(0),
        )

    def grads(self, state, batch):
        def loss(params):
            buffers = state["buffers"].clone()
            out = functional_call(
                self.net, dict(params.items()) | dict(buffers.items()), batch["x"]
            )
            error = out.squeeze(-1) - batch["y"]
            return error.square().mean(), {"error": error.abs(), "buffers": buffers}

        grads, (value, aux) = value_and_grad(loss, state["params"])
        metrics = TensorDict(
            {
                "loss": value,
                "priority": aux["error"],
                "grad_norm": global_norm(grads),
                "size": {"largest": aux["error"].max()},
            }
        )
        return TensorDict(grads=grads, buffers=aux["buffers"]), metrics

    def apply(self, state, update):
        params, opt = self.optimizer.update(
            state["params"], update["grads"], state["opt"], learning_rate=0.01
        )
        return TensorDict(params=params, opt=opt, buffers=update["buffers"], step=state["step"] + 1)


def batch_of(*size: int, seed: int = 1) -> TensorDict:
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(*size, 3, generator=g), torch.randn(*size, generator=g)
    return TensorDict(x=x, y=y, batch_size=size)


def assert_close(a: TensorDict, b: TensorDict, **tolerance):
    assert set(a.keys(True, True)) == set(b.keys(True, True))
    for key in a.keys(True, True):
        torch.testing.assert_close(
            a[key], b[key], msg=lambda m, key=key: f"{key}: {m}", **tolerance
        )


@pytest.mark.parametrize("num", [1, 2, 3, 6])
def test_parts_give_what_one_batch_gives(num):
    learner: Learner = Regression()
    state, batch = learner.init(0), batch_of(6)
    update, metrics = learner.grads(state, batch)
    parts, told = Accumulate(learner, num).grads(state, batch)
    assert_close(parts, update)
    largest = ("size", "largest")
    assert_close(told.exclude(largest), metrics.exclude(largest))
    want = metrics["priority"].reshape(num, -1).amax(1).mean()
    torch.testing.assert_close(told[largest], want)


def test_the_norm_is_of_the_mean_gradient_not_the_mean_of_norms():
    learner = Regression()
    state, batch = learner.init(0), batch_of(6)
    update, told = Accumulate(learner, 3).grads(state, batch)
    norms = [learner.grads(state, part)[1]["grad_norm"] for part in batch.split(2)]
    torch.testing.assert_close(told["grad_norm"], global_norm(update["grads"]))
    assert told["grad_norm"] < torch.stack(norms).mean() - 0.01


def test_statistics_of_batchnorm_go_from_part_to_part():
    learner = Regression(norm=True)
    state, batch = learner.init(0), batch_of(8)
    before = state.clone()
    update, _ = Accumulate(learner, 2).grads(state, batch)
    first, _ = learner.grads(state, batch[:4])
    halfway = state.copy().set("buffers", first["buffers"])
    second, _ = learner.grads(halfway, batch[4:])
    assert_close(update["buffers"], second["buffers"], rtol=0, atol=0)
    assert update["buffers", "1.num_batches_tracked"] == 2
    assert_close(update["grads"], (first["grads"] + second["grads"]) / 2)
    assert_close(state, before, rtol=0, atol=0)


def test_wrappers_nest_and_train():
    plain, nested = Regression(), Accumulate(Accumulate(Regression(), 2), 3)
    states = [plain.init(3), nested.init(3)]
    for step in range(4):
        for i, learner in enumerate((plain, nested)):
            update, _ = learner.grads(states[i], batch_of(12, seed=step))
            states[i] = learner.apply(states[i], update)
    assert_close(*states)
    assert states[1]["step"] == 4


def test_over_stacked_states():
    learner = Accumulate(Regression(norm=True), 2)
    states, batch = [learner.init(seed) for seed in range(3)], batch_of(3, 8)
    update, metrics = torch.vmap(learner.grads, randomness="error")(torch.stack(states), batch)
    for i, state in enumerate(states):
        one, told = learner.grads(state, batch[i])
        assert_close(update[i], one, rtol=1e-5, atol=1e-5)
        assert_close(metrics[i], told, rtol=1e-5, atol=1e-5)


def test_uneven_parts_are_refused():
    with pytest.raises(ValueError, match=r"batch of 6 cannot be split into 4 .*\[1, 2, 3, 6\]"):
        Accumulate(Regression(), 4).grads(Regression().init(0), batch_of(6))
    with pytest.raises(ValueError, match="num_micro_batches=0"):
        Accumulate(Regression(), 0)
