"""The learner: its state, its gradients, its update; one by one, stacked, and compiled."""

import dataclasses

import pytest
import torch

from raffia.algorithms.efficientzero import EfficientZeroConfig, EfficientZeroLearner, Planner, loss
from raffia.algorithms.efficientzero.config import (
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    TargetConfig,
)
from raffia.algorithms.efficientzero.model_mlp import EfficientZeroModelMLP
from raffia.algorithms.efficientzero.observations import with_observations
from raffia.envs import Box, Discrete, EnvSpec
from raffia.learner import Accumulate, Learner
from raffia.tensordict import TensorDict

from .small import SIZES, assert_close, configured

LINE = EnvSpec(observation_shape=(4,), action=Discrete(3))
LARGER = dict(latent_state_dim=12, lstm_hidden_size=10, head_hidden_channels=(8,))
LARGER |= dict(reward_support_range=(-5, 6, 1), value_support_range=(-7, 8, 1))
LARGER |= dict(proj_hid=14, proj_out=16, pred_hid=6, pred_out=16)
CONFIG = EfficientZeroConfig(
    model=ModelConfig(**SIZES | LARGER),
    loss=LossConfig(unroll_steps=3),
    targets=TargetConfig(target_interval=3),
    optimizer=OptimizerConfig(learning_rate=0.05, warmup_fraction=0.0),
)


def learner_of(spec=LINE, num_updates=100, frame_stack=1, precision="float32", **parts):
    config = configured(dataclasses.replace(CONFIG, precision=precision), **parts)
    return EfficientZeroLearner(spec, config, num_updates=num_updates, frame_stack=frame_stack)


def batch_of(size=9, spec=LINE, seed=0, num_unrolled=3, num_sampled=5, num_frames=1):
    torch.manual_seed(seed)
    continuous = isinstance(spec.action, Box)
    num_choices = num_sampled if continuous else spec.action.n
    shape = spec.observation_shape

    def observations(*lead):
        if spec.observation_dtype == torch.uint8:
            return torch.randint(256, (*lead, *shape), dtype=torch.uint8)
        return torch.randn(*lead, *shape)

    batch = TensorDict(
        frames=observations(size, num_frames + num_unrolled),
        action=torch.rand(size, num_unrolled, *spec.action.shape)
        if continuous
        else torch.randint(spec.action.n, (size, num_unrolled)),
        target_policy=torch.randn(size, num_unrolled + 1, num_choices).softmax(-1),
        target_value=3 * torch.randn(size, num_unrolled + 1),
        target_value_prefix=torch.randn(size, num_unrolled),
        policy_mask=torch.ones(size, num_unrolled + 1),
        value_mask=torch.ones(size, num_unrolled + 1),
        value_prefix_mask=torch.ones(size, num_unrolled),
        consistency_mask=torch.ones(size, num_unrolled),
        weight=torch.rand(size),
        index=torch.arange(size),
        batch_size=[size],
    )
    if continuous:
        drawn = torch.rand(size, num_unrolled + 1, num_sampled, *spec.action.shape)
        batch["sampled_actions"] = drawn
    return batch


def update(learner, state, batch):
    return learner.apply(state, learner.grads(state, batch)[0])


def test_a_state_depends_on_its_seed_alone():
    learner: Learner = learner_of(loss={"value_weight": 0.75})
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one, same, other = (learner.init(seed) for seed in (5, 5, 6))
    assert torch.get_rng_state().equal(before)
    assert_close(one, same)
    key = ("params", "dynamics_network", "lstm", "weight_hh_l0")
    assert not one[key].equal(other[key])
    assert sorted(one.keys()) == ["buffers", "hyper", "opt", "params", "step", "target"]
    assert_close(one["target", "params"], one["params"])
    own = {value.data_ptr() for value in one["params"].values(True, True)}
    assert not own & {value.data_ptr() for value in one["target"].values(True, True)}
    assert {value.dtype for value in one["hyper"].values()} == {torch.float32}
    assert one["hyper", "value_weight"] == 0.75


@pytest.mark.parametrize("norm_type", ["BN", "LN"])
def test_gradients_and_statistics_are_those_of_the_module(norm_type):
    learner, batch = learner_of(model={"norm_type": norm_type}), batch_of()
    state = learner.init(0)
    before = state.clone(), batch.clone()
    found, metrics = learner.grads(state, batch)
    assert_close(state, before[0])
    assert_close(batch, before[1])
    assert not any(x.requires_grad for x in (*found.values(True, True), *metrics.values()))
    assert metrics["priority"].shape == (9,)
    model = learner.make_model(0)
    loss = type(learner._loss)(model, learner.config.loss).train()
    value, expected = loss(with_observations(batch, LINE), state["hyper"])
    gradients = torch.autograd.grad(value, list(model.parameters()))
    for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(found["grads"][tuple(name.split("."))], gradient)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(found["buffers"][tuple(name.split("."))], buffer)
    for name, number in expected.items():
        torch.testing.assert_close(metrics[name], number)
    norm = torch.nn.utils.get_total_norm(gradients)
    torch.testing.assert_close(metrics["grad_norm"], norm)
    assert {*expected.keys(), "grad_norm"} == {*metrics.keys()}


def test_draws_of_custom_networks_follow_from_the_update_alone():
    """So a resumed run repeats them, whatever else was drawn in its process."""

    def make():
        model = learner_of().make_model(0)
        model.projection.append(torch.nn.Dropout(0.5))
        return model

    learner = EfficientZeroLearner(LINE, CONFIG, num_updates=9, model_factory=make)
    state, batch = learner.init(0), batch_of()

    def gradients(step, rows=slice(None)):
        state["step"] = torch.tensor(step)
        update, _ = learner.grads(state, batch[rows])
        return update["grads", "projection", "0", "weight"]

    torch.manual_seed(1)
    before, first = torch.random.get_rng_state(), gradients(step=4)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(5)
    assert torch.equal(gradients(step=4), first) and not torch.equal(gradients(step=5), first)
    halves = [gradients(4, rows) for rows in (slice(0, 4), slice(4, 8))]  # draw each their own
    batch["index"] = torch.zeros_like(batch["index"])
    assert torch.equal(gradients(4, slice(0, 4)), halves[0])
    assert not torch.equal(gradients(4, slice(4, 8)), halves[1])


def test_the_target_follows_after_each_interval():
    learner, batch = learner_of(optimizer={"name": "adamw"}), batch_of()
    state, again = learner.init(0), learner.init(0)
    address = state["params", "projection", "0", "weight"].data_ptr()
    for step in range(1, 8):
        old = state["target"].clone()
        state, again = (update(learner, one, batch) for one in (state, again))
        assert_close(state, again)  # equal seeds learn the same bits
        assert state["step"] == step
        if step % 3 == 0:
            assert_close(state["target", "params"], state["params"])
            assert_close(state["target", "buffers"], state["buffers"])
        else:
            assert_close(state["target"], old)
    assert state["params", "projection", "0", "weight"].data_ptr() == address  # in place


def test_the_rate_rises_and_falls_and_gradients_are_clipped():
    schedule = {"warmup_fraction": 0.2, "decay_updates": 4, "decay_rate": 0.5}
    plain = {"momentum": 0.0, "weight_decay": 0.01, "max_grad_norm": 1.0}
    learner = learner_of(num_updates=10, optimizer=schedule | plain)
    state, factors = learner.init(0), [0.5, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25]
    grads = state["params"].apply(torch.ones_like)
    key = ("projection", "0", "weight")
    count = sum(tensor.numel() for tensor in grads.values(True, True))
    for factor in factors:
        before = state["params"][key].clone()
        state = learner.apply(state, TensorDict(grads=grads, buffers=state["buffers"]))
        expected = before - 0.05 * factor * (count**-0.5 + 0.01 * before)
        torch.testing.assert_close(state["params"][key], expected)


def test_parts_of_a_batch_add_up_to_it():
    norms = {"norm_type": "LN", "projection_norm_type": "LN"}
    learner, batch = learner_of(model=norms), batch_of(size=8)
    state = learner.init(0)
    whole, parts = (each.grads(state, batch) for each in (learner, Accumulate(learner, 4)))
    for found, expected in zip(parts, whole, strict=True):
        assert_close(found, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.slow
def test_compiled_gradients_are_the_same():
    torch.compiler.reset()
    learner, batch = learner_of(loss={"unroll_steps": 1}), batch_of(num_unrolled=1)
    state = learner.init(0)
    compiled = torch.compile(learner.grads, backend="eager", fullgraph=True)
    for found, expected in zip(compiled(state, batch), learner.grads(state, batch), strict=True):
        assert_close(found, expected)
    torch.compiler.reset()


@pytest.mark.parametrize("policy", ["muzero", "gumbel"])
def test_muzero_is_a_configuration(policy):
    """Single rewards, no consistency, nothing reanalyzed; custom networks."""

    def make_wide():
        sizes = dict(latent_state_dim=20, lstm_hidden_size=7)
        return EfficientZeroModelMLP(4, 3, self_supervised_learning_loss=False, **sizes)

    config = learner_of(
        loss={"lstm_horizon": 1, "consistency_weight": 0.0},
        targets={"reanalyze_ratio": 0.0},
        search={"policy": policy, "num_simulations": 4},
    ).config
    learner = EfficientZeroLearner(LINE, config, num_updates=10, model_factory=make_wide)
    state = learner.init(0)
    assert state["params", "dynamics_network", "lstm", "weight_hh_l0"].shape == (28, 7)
    batch = batch_of().exclude("consistency_mask")
    found, metrics = learner.grads(state, batch)
    assert "consistency_loss" not in metrics.keys()
    # the LSTM never sees a state that it made, so what it makes of one is not learnt
    assert not found["grads", "dynamics_network", "lstm", "weight_hh_l0"].any()
    planner = Planner(learner.make_model(9), LINE, learner.config)
    planner.refresh(state)
    env_state = TensorDict(observation=torch.randn(2, 4), batch_size=[2])
    plan = planner.plan(env_state, noise=False, temperature=0.0)
    # the improved policy, not visits
    assert (plan.action_weights > 0).all() or policy == "muzero"
    assert not planner.values(batch["frames"][:, 0]).any()  # they start at 0
    planner.refresh(learner.apply(state, found))
    assert planner.values(batch["frames"][:, 0]).any()


VECTORS = {"observation_shape": (4,), "action": Discrete(2)}


def test_observations_that_the_networks_do_not_take_are_refused():
    for env, changes, message in [
        ({"observation_shape": (4, 4)}, {}, "model_factory"),
        ({"observation_dtype": torch.float64}, {}, "=torch.float64 is not supported"),
        ({}, {"augmentation": ("shift",)}, r"needs images \[C, H, W\], but .* shape \[4\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            learner_of(EnvSpec(**VECTORS | env), loss=changes)


@pytest.mark.parametrize("kind", ["vectors", "images", "large images", "LN", "continuous"])
def test_bfloat16_is_used_in_matrix_products_alone(kind, monkeypatch):
    """Gradients are near those of float32; gradients and state stay float32, with their strides."""
    spec = LINE
    if kind.endswith("images"):
        spec = dataclasses.replace(LINE, observation_shape=(2, 6, 6))
        monkeypatch.setattr(loss, "AT_ONCE", 0 if kind == "large images" else loss.AT_ONCE)
    if kind == "continuous":
        spec = dataclasses.replace(LINE, action=Box([-1.0] * 2, [1.0] * 2))
    precise, mixed = (
        learner_of(spec, model={"norm_type": "LN" if kind == "LN" else "BN"}, precision=precision)
        for precision in ("float32", "bfloat16")
    )
    state, batch = precise.init(0), batch_of(64, spec)
    expected, metrics = precise.grads(state, batch)
    found, mixed_metrics = mixed.grads(state, batch)
    torch.testing.assert_close(mixed_metrics["loss"], metrics["loss"], rtol=0.02, atol=0.0)
    torch.testing.assert_close(mixed_metrics["priority"], metrics["priority"], rtol=0.05, atol=0.05)
    exact, rounded = (
        torch.cat([grad.flatten() for grad in update["grads"].values(True, True, sort=True)])
        for update in (expected, found)
    )
    assert 0.95 < torch.cosine_similarity(exact, rounded, dim=0) and not exact.equal(rounded)
    for key, leaf in state["params"].items(True, True):
        grad = found["grads", key]
        assert (grad.dtype, grad.stride()) == (torch.float32, leaf.stride())
    later = mixed.apply(state, found)
    assert {leaf.dtype for leaf in later.values(True, True)} == {torch.float32, torch.int64}
