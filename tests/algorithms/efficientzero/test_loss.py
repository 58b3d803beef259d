"""The loss, against LightZero's and against slower forms of its terms."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from raffia.algorithms.efficientzero import EfficientZeroModel, EfficientZeroModelMLP
from raffia.algorithms.efficientzero.config import LossConfig
from raffia.algorithms.efficientzero.loss import (
    EfficientZeroLoss,
    StepBatchNorm,
    Steps,
    consistency,
    discrete_policy_loss,
    sampled_policy_loss,
    scalar_loss,
    scale_gradient,
    unroll,
)
from raffia.algorithms.efficientzero.observations import with_observations
from raffia.functional import Support, scalar_to_categorical, signed_hyperbolic, soft_cross_entropy
from raffia.search import GaussianSampler
from raffia.tensordict import TensorDict

from .small import PROJECTION, vector
from .test_learner import LINE, batch_of

HERE = Path(__file__).parent
CASE = json.loads((HERE / "train_step.json").read_text())
OF_TRAINING = ["num_unroll_steps", "lstm_horizon_len"]
OF_TRAINING += [f"{name}_loss_weight" for name in ("ssl", "policy", "value", "reward")]
SIZES = {k: v for k, v in CASE["config"].items() if k not in OF_TRAINING}
WEIGHTS = dict(policy=1.0, value=0.25, value_prefix=1.0, consistency=2.0, entropy=0.0)
WEIGHTS = TensorDict({f"{name}_weight": torch.tensor(w) for name, w in WEIGHTS.items()})


def small_model(**options):
    torch.manual_seed(0)
    supports = dict(reward_support_range=(-5, 6, 1), value_support_range=(-7, 8, 1))
    return vector(actions=3, **{**supports, "last_linear_layer_init_zero": False, **options})


def random_batch(size=7, num_unrolled=4):
    return with_observations(batch_of(size, num_unrolled=num_unrolled), LINE)


def peer_step(masked):
    """The model and the batch of the oracle; EfficientZero masks all terms, LightZero one."""
    tensors = load_file(HERE / "train_step.safetensors")
    model = EfficientZeroModelMLP(**SIZES)
    weights = {k.removeprefix("param/"): v for k, v in tensors.items() if k.startswith("param/")}
    model.load_lightzero(weights).train()
    num_unrolled = tensors["actions"].shape[1]
    obs = tensors["obs"].unflatten(1, (num_unrolled + 1, -1))
    inside, ones = tensors["mask"][:, :num_unrolled], torch.ones_like(tensors["mask"])
    batch = TensorDict({k: tensors[k] for k in ("target_policy", "target_value")}, [len(obs)])
    batch["observation"], batch["next_observation"] = obs[:, 0], obs[:, 1:]
    batch["action"], batch["weight"] = tensors["actions"], tensors["weights"]
    batch["target_value_prefix"] = tensors["target_value_prefix"][:, :num_unrolled]
    batch["policy_mask"], batch["consistency_mask"] = ones, inside
    batch["value_mask"] = torch.cat([ones[:, :1], inside], 1) if masked else ones
    batch["value_prefix_mask"] = inside if masked else ones[:, 1:]
    return model, batch


STEPS = [("lightzero", 1.0, False), ("with_half_gradient", 0.5, False)]
STEPS += [("with_half_gradient_and_masks", 0.5, True)]


@pytest.mark.parametrize("name, scale, masked", STEPS)
def test_losses_and_the_gradient_are_those_of_the_peers(name, scale, masked):
    model, batch = peer_step(masked)
    value, metrics = EfficientZeroLoss(model, LossConfig(gradient_scale=scale))(batch, WEIGHTS)
    gradients = torch.autograd.grad(value, list(model.parameters()))
    if name == "lightzero":
        names = [name for name, _ in model.named_parameters()]
        norms = {n: float(g.norm()) for n, g in zip(names, gradients, strict=True)}
        assert norms == pytest.approx(CASE["lightzero_grad_norms"], abs=1e-6)
        # the peer's values are 1e-5 of their size off, by cancellation in the inverse of h
        priority = pytest.approx(CASE["value_priority"], rel=2e-5, abs=5e-5)
        assert metrics["priority"].tolist() == priority
    expected = CASE[name]
    close = pytest.approx
    assert float(metrics["loss"]) == close(expected["weighted_total_loss"], abs=2e-6)
    for term in ("policy_loss", "value_loss", "value_prefix_loss"):
        assert float(metrics[term]) == close(expected[term], abs=2e-6)
    # theirs is of one step
    assert float(metrics["consistency_loss"]) / 5 == close(expected["consistency_loss"], abs=1e-7)
    assert float(torch.nn.utils.get_total_norm(gradients)) == close(expected["grad_norm"], abs=2e-6)


@pytest.mark.parametrize("horizon", [1, 2, 3, 9])
def test_the_lstm_restarts_after_each_horizon(horizon):
    model = small_model().eval()
    observation, action = torch.randn(5, 4), torch.randint(3, (5, 7))
    steps = unroll(model, observation, action, lstm_horizon=horizon)
    output = model.initial_inference(observation)
    state = zeros = output.reward_hidden_state
    for k in range(7):
        if k % horizon == 0:
            state = zeros
        output = model.recurrent_inference(output.latent_state, state, action[:, k])
        state = output.reward_hidden_state
        torch.testing.assert_close(steps.value_prefix[:, k], output.value_prefix)
        torch.testing.assert_close(steps.policy[:, k + 1], output.policy_logits)
        torch.testing.assert_close(steps.value[:, k + 1], output.value)
        torch.testing.assert_close(steps.latents[k], output.latent_state)


@pytest.mark.parametrize("kind", ["BN", "LN", "image", "one channel"])
def test_one_call_for_all_steps_equals_a_call_for_each(kind):
    torch.manual_seed(0)
    batch, config = random_batch(), LossConfig(unroll_steps=4)
    if kind == "image":
        sizes = dict(num_channels=4, lstm_hidden_size=5, proj_hid=6, proj_out=5, pred_hid=4)
        model = EfficientZeroModel((2, 5, 6), 3, pred_out=5, **sizes)
        batch["observation"] = torch.randn(7, 2, 5, 6)
        batch["next_observation"] = torch.randn(7, 4, 2, 5, 6)
    elif kind == "one channel":
        model = small_model(norm_type="BN", value_head_hidden_channels=(1,))
    else:
        model = small_model(norm_type=kind)
    batched, each = (EfficientZeroLoss(copy.deepcopy(model), config).train() for _ in range(2))
    assert batched.steps is not None
    each.steps = None
    found = []
    for loss in (batched, each):
        value, metrics = loss(batch, WEIGHTS)
        found.append((metrics, torch.autograd.grad(value, list(loss.parameters()))))
    torch.testing.assert_close(*found, atol=2e-6, rtol=1e-4)
    for buffer, other in zip(batched.buffers(), each.buffers(), strict=True):
        torch.testing.assert_close(buffer, other)
    if kind == "BN":  # without statistics each step is a call
        batched.model.projection[1] = torch.nn.BatchNorm1d(7, track_running_stats=False)
        assert EfficientZeroLoss(batched.model, config).steps is None


def test_batch_norm_of_one_segment_is_refused_with_the_way_out():
    loss = EfficientZeroLoss(small_model(norm_type="BN"), LossConfig(unroll_steps=4)).train()
    with pytest.raises(ValueError, match=r"use batches of 2 or more \(replay.batch_size"):
        loss(random_batch(1), WEIGHTS)
    one_image = StepBatchNorm(torch.nn.BatchNorm2d(2), Steps())  # has the pixels' statistics
    assert one_image.train()(torch.randn(1, 2, 3, 3)).isfinite().all()


def test_images_of_bytes_are_numbers_from_0_to_1():
    torch.manual_seed(0)
    sizes = dict(num_channels=4, lstm_hidden_size=5, **PROJECTION)
    model = EfficientZeroModel((2, 5, 6), 3, norm_type="LN", **sizes)
    image = torch.randint(256, (3, 2, 5, 6), dtype=torch.uint8)
    action = torch.randint(3, (3, 2))
    found = unroll(model, image, action, lstm_horizon=5)
    expected = unroll(model, image.float() / 255, action, lstm_horizon=5)
    torch.testing.assert_close(found, expected)
    images = image.unsqueeze(1).expand(-1, 2, -1, -1, -1)
    latents = [latent.detach().requires_grad_() for latent in found.latents]
    distance = consistency(model, latents, images)
    torch.testing.assert_close(distance, consistency(model, latents, images.float() / 255))
    assert distance.shape == (3, 2)
    distance.sum().backward()  # it teaches the imagined state only
    assert all(latent.grad.abs().sum() > 0 for latent in latents)
    assert all(p.grad is None for p in model.representation_network.parameters())


@pytest.mark.parametrize("support", [Support(-5, 6), Support(-2, 2.5, 0.5), Support(0, 1)])
def test_scalar_loss_is_cross_entropy_with_the_two_hot_target(support):
    torch.manual_seed(0)
    target = torch.cat([torch.randn(30) * 20, torch.tensor([0.0, 3.0, -1e6, 1e6])])
    logits = torch.randn(34, support.size, requires_grad=True)
    found = scalar_loss(logits, target, support)
    expected = soft_cross_entropy(logits, scalar_to_categorical(target, support))
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(x.sum(), logits)[0] for x in (found, expected)]
    torch.testing.assert_close(*gradients)
    output, target = torch.randn(2, 3, 1), torch.randn(2, 3)
    expected = (output[..., 0] - signed_hyperbolic(target)) ** 2
    torch.testing.assert_close(scalar_loss(output, target, None), expected)


def test_discrete_policy_loss_is_cross_entropy_and_entropy():
    logits, target = torch.randn(4, 5, 3), torch.randn(4, 5, 3).softmax(-1)
    loss, entropy = discrete_policy_loss(logits, target)
    torch.testing.assert_close(loss, soft_cross_entropy(logits, target))
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy())


def test_sampled_policy_loss_is_that_of_a_squashed_normal_distribution():
    torch.manual_seed(0)
    mean, std = torch.randn(2, 3, 2), torch.rand(2, 3, 2) + 0.5
    target, actions = torch.randn(2, 3, 6).softmax(-1), 3 * torch.rand(2, 3, 6, 2) - 1
    sampler = GaussianSampler(6, low=torch.tensor(-1.0), high=torch.tensor(2.0))
    parameters = torch.cat([mean, std], -1).requires_grad_()
    loss, entropy = sampled_policy_loss(parameters, target, actions, sampler.log_density)
    normal = torch.distributions.Normal(mean.unsqueeze(2), std.unsqueeze(2))
    squash = [torch.distributions.TanhTransform(), torch.distributions.AffineTransform(0.5, 1.5)]
    density = torch.distributions.TransformedDistribution(normal, squash)
    expected = -(target * density.log_prob(actions).sum(-1)).sum(-1)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy, torch.distributions.Normal(mean, std).entropy().sum(-1))


def test_the_entropy_bonus_counts_real_steps():
    model, batch = small_model(norm_type="LN"), random_batch()
    batch["weight"] = torch.ones(7)
    batch["policy_mask"][:, 2:] = 0
    loss, weights = EfficientZeroLoss(model, LossConfig(unroll_steps=4)), WEIGHTS.clone()
    _, without = loss(batch, weights)
    weights["entropy_weight"] = torch.tensor(0.1)
    _, found = loss(batch, weights)
    assert 0 < float(found["policy_entropy"]) <= math.log(3)  # of one step
    expected = without["loss"] - 0.1 * 2 * found["policy_entropy"]
    torch.testing.assert_close(found["loss"], expected)
    bare = small_model(self_supervised_learning_loss=False)
    with pytest.raises(ValueError, match="set consistency_weight=0"):
        EfficientZeroLoss(bare, LossConfig())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("support", [Support(-5, 6), None])
def test_a_target_that_is_not_finite_is_not_clipped(support, value):
    """The guard sees it in the loss; on the support's last number it would be learnt."""
    output = torch.zeros(2, 3, 11 if support else 1)
    target = torch.full((2, 3), 0.5)
    assert scalar_loss(output, target, support).isfinite().all()
    target[1, 2] = value
    found = scalar_loss(output, target, support).isfinite()
    assert not found[1, 2] and found.sum() == 5


def test_the_gradient_scale_reaches_all_that_a_latent_state_is_used_for():
    model, batch = small_model(norm_type="LN"), random_batch(num_unrolled=1)
    first = [model.dynamics_network.fc_dynamics[0].weight]  # makes the latent state of step 1
    weights = WEIGHTS.clone()

    def gradient(scale):
        loss = EfficientZeroLoss(model, LossConfig(unroll_steps=1, gradient_scale=scale))
        return torch.autograd.grad(loss(batch, weights)[0], first)[0]

    for name in ("policy", "value", "value_prefix", "consistency"):
        weights.zero_()
        weights[f"{name}_weight"] = torch.tensor(1.0)
        full = gradient(1.0)
        assert full.norm() > 0, name
        assert scale_gradient(full, 0.5).equal(full)
        torch.testing.assert_close(gradient(0.5), full / 2)


def test_the_loss_is_the_weighted_mean_over_segments():
    model, batch = small_model(norm_type="LN"), random_batch()
    loss = EfficientZeroLoss(model, LossConfig(unroll_steps=4))
    _, metrics = loss(batch, WEIGHTS)
    each = [loss(batch[i : i + 1], WEIGHTS)[1]["loss"] for i in range(len(batch))]
    torch.testing.assert_close(metrics["loss"], torch.stack(each).mean())
    plain = batch.clone()
    plain["weight"] = torch.ones(7)
    _, found = loss(plain, WEIGHTS)
    terms = ("policy", "value", "value_prefix", "consistency")
    expected = sum(WEIGHTS[f"{name}_weight"] * found[f"{name}_loss"] for name in terms)
    torch.testing.assert_close(found["loss"], expected)
