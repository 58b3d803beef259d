"""The learner: its state, its gradients, its update; one by one, stacked, and compiled."""

import dataclasses

import pytest
import torch

from raffia.algorithms.efficientzero.config import (
    EfficientZeroConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    SearchConfig,
    TargetConfig,
)
from raffia.algorithms.efficientzero.learner import EfficientZeroLearner
from raffia.algorithms.efficientzero.model_mlp import EfficientZeroModelMLP
from raffia.algorithms.efficientzero.observations import draw_augmentation, with_observations
from raffia.algorithms.efficientzero.planning import Planner
from raffia.envs.env import Box, Discrete, EnvSpec
from raffia.functional.augment import random_shift
from raffia.learner import Accumulate, Learner
from raffia.tensordict.tensordict import TensorDict

LINE = EnvSpec(observation_shape=(4,), action=Discrete(3))
CONFIG = EfficientZeroConfig(
    model=ModelConfig(
        latent_state_dim=12,
        lstm_hidden_size=10,
        num_channels=4,
        downsample=False,
        head_hidden_channels=(8,),
        reward_support_range=(-5, 6, 1),
        value_support_range=(-7, 8, 1),
        proj_hid=14,
        proj_out=16,
        pred_hid=6,
        pred_out=16,
    ),
    loss=LossConfig(unroll_steps=3),
    targets=TargetConfig(target_interval=3),
    optimizer=OptimizerConfig(learning_rate=0.05, warmup_fraction=0.0),
)


def learner_of(spec=LINE, num_updates=100, frame_stack=1, **parts):
    changed = {
        name: dataclasses.replace(getattr(CONFIG, name), **options)
        for name, options in parts.items()
    }
    config = dataclasses.replace(CONFIG, **changed)
    return EfficientZeroLearner(spec, config, num_updates=num_updates, frame_stack=frame_stack)


def batch_of(size=9, spec=LINE, seed=0, num_unrolled=3, num_sampled=5, num_frames=1):
    torch.manual_seed(seed)
    continuous = isinstance(spec.action, Box)
    num_choices = num_sampled if continuous else spec.action.n
    shape = spec.observation_shape

    def seen(*lead):
        if spec.observation_dtype == torch.uint8:
            return torch.randint(256, (*lead, *shape), dtype=torch.uint8)
        return torch.randn(*lead, *shape)

    batch = TensorDict(
        frames=seen(size, num_frames + num_unrolled),
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


def assert_equal(one, two, **tolerances):
    pairs = dict(two.items(True, True))
    for key, value in one.items(True, True):
        torch.testing.assert_close(
            value, pairs.pop(key), msg=lambda text, key=key: f"{key}: {text}", **tolerances
        )
    assert not pairs


# ---------------------------------------------------------------------------------- a state


def test_a_state_is_made_of_its_seed_alone():
    learner: Learner = learner_of()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    states = [learner.init(seed) for seed in (5, 5, 6)]
    assert torch.get_rng_state().equal(before)
    assert_equal(states[0], states[1], atol=0, rtol=0)
    assert not states[0]["params", "dynamics_network", "lstm", "weight_hh_l0"].equal(
        states[2]["params", "dynamics_network", "lstm", "weight_hh_l0"]
    )


def test_the_target_is_a_copy():
    state = learner_of().init(0)
    assert_equal(state["target", "params"], state["params"])
    assert_equal(state["target", "buffers"], state["buffers"])
    own = {value.data_ptr() for value in state["params"].values(True, True)}
    assert not own & {value.data_ptr() for value in state["target"].values(True, True)}


def test_rates_and_weights_are_numbers_of_the_state():
    hyper = learner_of(loss={"value_weight": 0.75}).init(0)["hyper"]
    assert {value.dtype for value in hyper.values()} == {torch.float32}
    assert {value.shape for value in hyper.values()} == {()}
    assert hyper["value_weight"] == 0.75 and hyper["learning_rate"] == torch.tensor(0.05)


# -------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("norm_type", ["BN", "LN"])
def test_gradients_and_statistics_are_those_of_the_module(norm_type):
    learner, batch = learner_of(model={"norm_type": norm_type}), batch_of()
    state = learner.init(0)
    found, metrics = learner.grads(state, batch)
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


def test_gradients_change_nothing_that_is_given():
    learner, batch = learner_of(), batch_of()
    state = learner.init(0)
    before = state.clone(), batch.clone()
    found, metrics = learner.grads(state, batch)
    assert_equal(state, before[0], atol=0, rtol=0)
    assert_equal(batch, before[1], atol=0, rtol=0)
    told = [*found.values(True, True), *metrics.values()]
    assert not any(tensor.requires_grad for tensor in told)
    assert metrics["priority"].shape == (9,)
    means = {"loss", "policy_loss", "value_loss", "value_prefix_loss", "consistency_loss"}
    assert {*metrics.keys()} == means | {"policy_entropy", "grad_norm", "priority"}


# --------------------------------------------------------------------------------- updates


def test_the_target_follows_after_each_interval():
    learner, batch = learner_of(), batch_of()
    state = learner.init(0)
    for step in range(1, 8):
        old = state["target"].clone()
        state = update(learner, state, batch)
        assert state["step"] == step
        if step % 3 == 0:
            assert_equal(state["target", "params"], state["params"])
            assert_equal(state["target", "buffers"], state["buffers"])
        else:
            assert_equal(state["target"], old, atol=0, rtol=0)


def test_an_update_writes_into_the_memory_of_the_state():
    learner, batch = learner_of(optimizer={"name": "adamw"}), batch_of()
    state = learner.init(0)
    key = ("params", "projection", "0", "weight")
    before, where = state[key].clone(), state[key].data_ptr()
    state = update(learner, state, batch)
    assert state[key].data_ptr() == where and not state[key].equal(before)
    assert sorted(state.keys()) == ["buffers", "hyper", "opt", "params", "step", "target"]


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


def test_equal_seeds_learn_the_same_bits():
    finals = []
    for _ in range(2):
        learner = learner_of(optimizer={"name": "adamw"})
        state = learner.init(0)
        for seed in range(4):
            state = update(learner, state, batch_of(seed=seed))
        finals.append(state)
    assert_equal(*finals, atol=0, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("norm_type", ["BN", "LN"])
def test_a_small_batch_is_learnt_by_heart(norm_type):
    learner = learner_of(
        model={"norm_type": norm_type, "head_hidden_channels": (32,)},
        loss={"consistency_weight": 0.5, "value_weight": 1.0},
        optimizer={
            "name": "adamw",
            "learning_rate": 0.01,
            "weight_decay": 0.0,
            "decay_updates": 110,
        },
    )
    batch = batch_of(size=12)
    batch["weight"] = torch.ones(12)
    batch["target_policy"] = torch.eye(3)[batch["target_policy"].argmax(-1)]
    on_support = torch.tensor([-2.0, 0.0, 1.0, 3.0])
    steps = on_support.sign() * ((on_support.abs() + 1) ** 2 - 1)  # h of these is near a number
    batch["target_value"] = steps[torch.randint(4, (12, 4))]
    batch["target_value_prefix"] = steps[torch.randint(4, (12, 3))]
    state = learner.init(0)
    first = learner.grads(state, batch)[1]
    for _ in range(160):
        found, metrics = learner.grads(state, batch)
        state = learner.apply(state, found)
    assert metrics["policy_loss"] < 0.1 * first["policy_loss"]
    assert metrics["value_loss"] < 0.1 * first["value_loss"]
    assert metrics["value_prefix_loss"] < 0.1 * first["value_prefix_loss"]
    assert metrics["consistency_loss"] < -2  # of -3
    assert metrics["priority"].mean() < 0.05 * first["priority"].mean()


def test_parts_of_a_batch_add_up_to_it():
    learner, batch = (
        learner_of(model={"norm_type": "LN", "projection_norm_type": "LN"}),
        batch_of(size=8),
    )
    state = learner.init(0)
    whole, parts = (one.grads(state, batch) for one in (learner, Accumulate(learner, 4)))
    assert_equal(parts[0], whole[0], atol=1e-6, rtol=1e-4)
    assert_equal(parts[1], whole[1], atol=1e-6, rtol=1e-4)


# ----------------------------------------------------------------- stacked, and compiled


def two_members(learner):
    states = [learner.init(0), learner.init(1)]
    other = {"learning_rate": 0.02, "value_weight": 1.5, "weight_decay": 0.1, "entropy_weight": 0.1}
    for name, number in other.items():
        states[1]["hyper"][name] = torch.tensor(number)
    return [in_float64(state) for state in states]


def in_float64(tree):
    return tree.apply(lambda x: x.double() if x.is_floating_point() else x)


@pytest.mark.slow
@pytest.mark.parametrize("norm_type, optimizer", [("BN", "sgd"), ("LN", "adamw"), ("BN", "adamw")])
def test_stacked_states_learn_as_each_does_by_itself(norm_type, optimizer):
    # in float64: Adam makes steps of rounding errors where a gradient is zero, as before BatchNorm
    learner = learner_of(model={"norm_type": norm_type}, optimizer={"name": optimizer})
    alone, stacked = two_members(learner), torch.stack(two_members(learner))
    for step in range(4):
        batches = [in_float64(batch_of(seed=2 * step + member)) for member in range(2)]
        both = torch.stack(batches)
        told = [learner.grads(state, batch) for state, batch in zip(alone, batches, strict=True)]
        alone = [learner.apply(state, t[0]) for state, t in zip(alone, told, strict=True)]
        found, metrics = torch.vmap(learner.grads, randomness="error")(stacked, both)
        stacked = torch.vmap(learner.apply, randomness="error")(stacked, found)
        assert_equal(stacked, torch.stack(alone), atol=2e-6, rtol=1e-5)
        assert_equal(metrics, torch.stack([t[1] for t in told]), atol=1e-5, rtol=1e-5)
    assert stacked["step"].tolist() == [4, 4]


def test_members_can_share_a_batch():
    learner, batch = learner_of(), in_float64(batch_of())
    alone, stacked = two_members(learner), torch.stack(two_members(learner))
    found = torch.vmap(learner.grads, in_dims=(0, None), randomness="error")(stacked, batch)
    expected = torch.stack([learner.grads(state, batch)[0] for state in alone])
    assert_equal(found[0], expected, atol=1e-7, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("norm_type", ["BN", "LN"])
def test_compiled_gradients_are_the_same(norm_type):
    torch.compiler.reset()
    learner = learner_of(model={"norm_type": norm_type}, loss={"unroll_steps": 1})
    batch = batch_of(num_unrolled=1)
    state = learner.init(0)
    compiled = torch.compile(learner.grads, backend="eager", fullgraph=True)
    found, metrics = compiled(state, batch)
    expected = learner.grads(state, batch)
    assert_equal(found, expected[0])
    assert_equal(metrics, expected[1])
    torch.compiler.reset()


# ------------------------------------------------------------------------------ its kinds


def test_muzero_is_a_configuration():
    """Single rewards, no consistency, nothing searched anew."""
    learner = learner_of(
        loss={"lstm_horizon": 1, "consistency_weight": 0.0}, targets={"reanalyze_ratio": 0.0}
    )
    state = learner.init(0)
    assert not any("proj" in name or "prediction_head" in name for name in state["params"].keys())
    batch = batch_of().exclude("consistency_mask")
    found, metrics = learner.grads(state, batch)
    assert "consistency_loss" not in metrics.keys()
    # the LSTM never sees a state that it made, so what it makes of one is not learnt
    assert not found["grads", "dynamics_network", "lstm", "weight_hh_l0"].any()
    assert learner_of().grads(learner_of().init(0), batch_of())[0][
        "grads", "dynamics_network", "lstm", "weight_ih_l0"
    ].shape == (40, 12)


def test_gumbel_muzero_is_a_configuration():
    parts = dict(
        loss={"lstm_horizon": 1, "consistency_weight": 0.0},
        targets={"reanalyze_ratio": 0.0},
        search={"policy": "gumbel", "num_simulations": 4},
    )
    learner = learner_of(**parts)
    state = learner.init(0)
    planner = Planner(learner.make_model(0), LINE, learner.config)
    planner.refresh(state)
    seen = TensorDict(observation=torch.randn(2, 4), batch_size=[2])
    plan = planner.plan(seen, noise=False, temperature=0.0)
    assert (plan.action_weights > 0).all()  # the improved policy, not visits
    batch = batch_of().exclude("consistency_mask")
    assert update(learner, state, batch)["step"] == 1


def test_images_are_learnt_from():
    spec = EnvSpec(observation_shape=(2, 4, 5), action=Discrete(3), observation_dtype=torch.uint8)
    learner = learner_of(spec)
    state = update(learner, learner.init(0), batch_of(spec=spec))
    assert ("params", "representation_network", "conv", "weight") in state.keys(True)
    stacked = learner_of(spec, frame_stack=2)
    state = stacked.init(0)
    assert state["params", "representation_network", "conv", "weight"].shape[1] == 4
    assert update(stacked, state, batch_of(spec=spec, num_frames=2))["step"] == 1


@pytest.mark.parametrize("frame_stack", [1, 2])
def test_augmentation_is_of_the_batch_s_numbers(frame_stack):
    """Shifted by the learner, or shifted before: the same gradients, bit for bit."""
    spec = EnvSpec(observation_shape=(2, 6, 5), action=Discrete(3), observation_dtype=torch.uint8)
    learner = learner_of(spec, frame_stack=frame_stack)
    state, batch = learner.init(0), batch_of(spec=spec, num_frames=frame_stack)
    draws = torch.Generator().manual_seed(1)
    batch["augmentation"] = draw_augmentation(9, ["shift"], 2, draws)
    # In time the shift of the first stack and that of the later ones differ; one that is the
    # same for both can be made of the frames.
    batch["augmentation", "shift"][:, 1] = batch["augmentation", "shift"][:, 0]
    before = batch.exclude("augmentation")
    before["frames"] = random_shift(batch["frames"], batch["augmentation", "shift"][:, 0])
    assert not before["frames"].equal(batch["frames"])
    assert_equal(learner.grads(state, batch)[0], learner.grads(state, before)[0], atol=0, rtol=0)


@pytest.mark.slow
def test_continuous_policies_are_learnt_from_sampled_actions():
    spec = EnvSpec(observation_shape=(4,), action=Box((-1.0, -1.0), (1.0, 2.0)))
    learner = learner_of(
        spec,
        model={"norm_type": "LN"},
        loss={"entropy_weight": 0.005},
        optimizer={"name": "adamw", "learning_rate": 0.02},
    )
    batch = batch_of(spec=spec, size=12)
    batch["sampled_actions"] = torch.tensor([0.5, -0.5]).expand(12, 4, 5, 2)
    batch["sampled_actions"] = batch["sampled_actions"] + 0.1 * torch.randn(12, 4, 5, 2)
    state = learner.init(0)
    for _ in range(150):
        state = update(learner, state, batch)
    planner = Planner(learner.make_model(0), spec, learner.config)
    planner.refresh(state)
    policy = planner.root(with_observations(batch, spec)).prior_logits
    low, high = torch.tensor(spec.action.low), torch.tensor(spec.action.high)
    middle = low + (high - low) * (policy[:, :2].tanh() + 1) / 2
    assert (middle.mean(0) - torch.tensor([0.5, -0.5])).abs().max() < 0.1


def test_networks_of_ones_own():
    class Wide(EfficientZeroModelMLP):
        def __init__(self):
            super().__init__(4, 3, latent_state_dim=20, lstm_hidden_size=7)

    learner = EfficientZeroLearner(LINE, CONFIG, num_updates=10, model_factory=Wide)
    state = update(learner, learner.init(0), batch_of())
    assert state["params", "dynamics_network", "lstm", "weight_hh_l0"].shape == (28, 7)


def test_envs_without_networks_for_them_are_refused():
    spec = EnvSpec(observation_shape=(4, 4), action=Discrete(2))
    with pytest.raises(ValueError, match="model_factory"):
        EfficientZeroLearner(spec, CONFIG, num_updates=10)


def test_observations_that_no_network_takes_are_refused():
    spec = EnvSpec(observation_shape=(4,), observation_dtype=torch.float64, action=Discrete(2))
    with pytest.raises(ValueError, match="observation_dtype=torch.float64: the networks take"):
        EfficientZeroLearner(spec, CONFIG, num_updates=10)


def test_vectors_are_not_augmented():
    with pytest.raises(ValueError, match=r"is of images \[C, H, W\], and .* shows \[4\]"):
        learner_of(loss={"augmentation": ("shift",)})


def test_a_planner_takes_what_was_learnt():
    learner, batch = learner_of(), batch_of()
    state = update(learner, learner.init(0), batch)
    planner = Planner(learner.make_model(9), LINE, learner.config)
    planner.refresh(state["target"])
    before = planner.values(batch["frames"][:, 0])
    assert not before.any()  # values start at 0
    planner.refresh(state)
    assert planner.values(batch["frames"][:, 0]).any()


def test_searches_are_configured_apart():
    assert learner_of(search={"num_simulations": 3}).config.search == SearchConfig(
        num_simulations=3
    )


@pytest.mark.parametrize("norm_type", ["BN", "LN"])
def test_steps_one_after_the_other_are_learnt_from_as_all_at_once(norm_type, monkeypatch):
    learner = learner_of(model={"norm_type": norm_type})
    state, batch = learner.init(0), batch_of()
    together, told = learner.grads(state, batch)
    monkeypatch.setattr("raffia.algorithms.efficientzero.loss.AT_ONCE", 0)
    apart, told_apart = learner.grads(state, batch)
    assert_equal(together, apart, atol=1e-5, rtol=1e-4)
    assert_equal(told, told_apart, atol=1e-5, rtol=1e-4)
