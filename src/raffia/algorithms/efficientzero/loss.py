"""EfficientZero's loss of a batch of segments.

Legend: B segments, K unrolled steps, T = K + 1 latent states of a segment, A actions (or N sampled
ones of D numbers), P parameters of a policy, F numbers of a support.

    loss = sum_{k=0..K} [w_p CE(pi_k, policy target) + w_v CE(V_k, phi(h(z_k)))]
         + sum_{k=1..K} [w_r CE(prefix_k, phi(h(prefix target))) + w_c consistency_k]

Source: Ye, Liu, Kurutach, Abbeel & Gao (2021), "Mastering Atari Games with Limited Data", section 4
and appendix A.

BatchNorm has statistics of each step (`StepBatchNorm`). The segments of a batch are drawn at
random, whereas the steps of one follow from each other and behind each other go further from the
observations. So statistics are taken over the segments, for each step apart, as if the network were
called step by step; but the layers before and behind see all rows in one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from raffia.algorithms.efficientzero.config import LossConfig
from raffia.algorithms.efficientzero.latent_model import (
    LatentModel,
    for_convolutions,
    imagine,
    represent,
)
from raffia.algorithms.efficientzero.observations import as_input
from raffia.functional.constants import constant
from raffia.functional.losses import negative_cosine_similarity
from raffia.functional.transforms import Support, precise, signed_hyperbolic
from raffia.tensordict.tensordict import TensorDict


class Unrolled(NamedTuple):
    """The networks' outputs along the actions of B segments."""

    policy: Tensor  # [B, T, A] logits; of continuous actions [B, T, 2 D], means and deviations
    value: Tensor  # [B, T, F] logits
    value_prefix: Tensor  # [B, K, F'] logits
    latents: tuple[Tensor, ...]  # K of [B, ...], imagined latent states


def unroll(
    model: LatentModel,
    observation: Tensor,  # [B, *O]
    action: Tensor,  # [B, K] or [B, K, D]
    *,
    lstm_horizon: int,  # the LSTM's state is zeroed after each so many steps
    gradient_scale: float = 1.0,  # of what flows back into each imagined latent state
    steps: Steps | None = None,  # of `step_norms`: predict all steps in one call
) -> Unrolled:
    """The networks' predictions from an observation along real actions."""
    latent = represent(model.representation_network, as_input(observation), model.state_norm)
    latents, prefixes = [latent], []
    zeros = latent.new_zeros(1, len(latent), model.lstm_hidden_size)
    memory = (zeros, zeros)
    for k, code in enumerate(action.unbind(1)):
        if k % lstm_horizon == 0:
            memory = (zeros, zeros)
        latent, memory, prefix = imagine(
            model.dynamics_network, latent, model.action_encoding(code), memory, model.state_norm
        )
        latent = scale_gradient(latent, gradient_scale)
        latents.append(latent)
        prefixes.append(prefix)
    policy, value = _at_each_step(model.prediction_network, latents, steps)
    prefix = precise(torch.stack(prefixes, 1))
    return Unrolled(precise(policy), precise(value), prefix, tuple(latents[1:]))


def scale_gradient(x: Tensor, scale: float) -> Tensor:
    """Multiply the gradient of x by `scale`; returns x itself.

    In contrast to a scaled copy, what was computed from x before this call counts, too: the
    reward's path within the dynamics network.

    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> y = 2 * x
    >>> before = 5 * y
    >>> torch.autograd.grad(before + scale_gradient(y, 0.5), x)
    (tensor(6.),)
    """
    if scale != 1 and x.requires_grad:
        x.register_hook(lambda gradient: gradient * scale)
    return x


def consistency(
    model: LatentModel,
    latents: Sequence[Tensor],  # K of [B, ...], imagined latent states
    next_observation: Tensor,  # [B, K, *O]
    steps: Steps | None = None,  # of `step_norms`
) -> Tensor:  # [B, K]
    """Distance in direction between imagined and observed latent states.

    -cos(head(projection(latent_k)), stop_gradient(projection(representation(o_{t+k}))))
    """

    def observed_projection(observation: Tensor) -> tuple[Tensor]:
        found = represent(model.representation_network, as_input(observation), model.state_norm)
        return (model.project(found, with_grad=False),)

    with torch.no_grad():
        [target] = _at_each_step(observed_projection, next_observation.unbind(1), steps)
    [imagined] = _at_each_step(lambda x: (model.project(x),), latents, steps)
    return negative_cosine_similarity(precise(imagined), precise(target).detach())


AT_ONCE = 2**17  # numbers of a step: with more, all steps together cost more memory than they save


def _at_each_step(
    network: Callable[[Tensor], tuple[Tensor, ...]],
    each: Sequence[Tensor],  # T of [B, ...]
    steps: Steps | None,
) -> tuple[Tensor, ...]:  # [B, T, ...]
    """A network's outputs for all steps, as if it was called step by step."""
    if steps is None or each[0].numel() > AT_ONCE:
        found = [network(x) for x in each]
        return tuple(torch.stack(outputs, 1) for outputs in zip(*found, strict=True))
    together = torch.stack(list(each), 1)
    with steps.of(len(each)):
        outputs = network(for_convolutions(together.flatten(0, 1)))
    return tuple(output.unflatten(0, together.shape[:2]) for output in outputs)


def scalar_loss(
    output: Tensor,  # [*, F] logits, or [*, 1]
    target: Tensor,  # [*]
    support: Support | None,
) -> Tensor:  # [*]
    """Cross entropy with the two neighbours of h(target) on the support.

        log sum exp(logits) - (1 - p) logits_i - p logits_{i+1},  i + p = the position of h(target)

    Without a support the squared error in h(target). A target that is infinite, or NaN, gives NaN.

    >>> scalar_loss(torch.zeros(1, 5), torch.tensor([1.0]), Support(-2, 3))
    tensor([1.6094])
    """
    scaled = signed_hyperbolic(target)
    if support is None:
        return (output.squeeze(-1) - scaled).square()
    position = (scaled.clamp(support.start, support.last) - support.start) / support.step
    low = position.floor().clamp_max(support.size - 2 if support.size > 1 else 0)
    fraction = position - low
    index = low.nan_to_num(0.0).long()  # NaN has no index; the result is NaN all the same
    both = output.gather(-1, torch.stack([index, index + 1], -1).clamp_max(support.size - 1))
    expected = torch.lerp(both[..., 0], both[..., 1], fraction)
    # An infinite target has no position: NaN, which stops the run, where clamping would hide it.
    return output.logsumexp(-1) - expected + (scaled - scaled)


class EfficientZeroLoss(nn.Module):
    """The loss of a batch, as a module around the networks: `torch.func.functional_call` gives it
    the parameters.

    model: its BatchNorm layers are replaced by `StepBatchNorm`, of the same names and parameters.
    log_density: of sampled actions under a policy's parameters; None for discrete actions.
    precision: of the networks' convolutions and products, by autocast; the losses are of float32.

    It is called with a batch [B], as `raffia.algorithms.efficientzero.targets` makes it, and with
    weights [], "policy_weight", "value_weight", "value_prefix_weight", "entropy_weight" and, where
    the config has it, "consistency_weight".
    """

    def __init__(
        self,
        model: LatentModel,
        config: LossConfig,
        log_density: LogDensity | None = None,
        *,
        precision: Literal["float32", "bfloat16"] = "float32",
    ) -> None:
        super().__init__()
        if config.consistency_weight > 0 and model.projection is None:
            raise ValueError(
                f"consistency_weight={config.consistency_weight} needs a model with a projection: "
                "build it with self_supervised_learning_loss=True, or set consistency_weight=0"
            )
        self.model, self.config, self.log_density = model, config, log_density
        self.precision = precision
        self.steps = step_norms(model)

    def forward(self, batch: TensorDict, weights: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss divided by K, which is differentiated; and the metrics."""
        with self._mixed(batch["observation"].device):
            steps = unroll(
                self.model,
                batch["observation"],
                batch["action"],
                lstm_horizon=self.config.lstm_horizon,
                gradient_scale=self.config.gradient_scale,
                steps=self.steps,
            )
        terms, entropy = self._terms(steps, batch)
        loss = -weights["entropy_weight"] * entropy
        for name, term in terms.items():
            loss = loss + weights[f"{name}_weight"] * term
        loss = (batch["weight"] * loss).mean()
        with torch.no_grad():
            metrics = {f"{name}_loss": term.mean() for name, term in terms.items()}
            num_policies = batch["policy_mask"].sum().clamp_min(1)
            metrics["policy_entropy"] = entropy.sum() / num_policies
            value = self.model.decode_value(steps.value[:, 0])
            metrics["priority"] = (value - batch["target_value"][:, 0]).abs()
        return loss / batch["action"].shape[1], {"loss": loss.detach(), **metrics}

    def _terms(self, steps: Unrolled, batch: TensorDict) -> tuple[dict[str, Tensor], Tensor]:
        """The terms of the loss by name, and the entropy of the policies: sums over steps, [B]."""
        model = self.model
        policy, entropy = self._policy(steps.policy, batch)
        value = scalar_loss(steps.value, batch["target_value"], model.value_support)
        prefix = scalar_loss(steps.value_prefix, batch["target_value_prefix"], model.reward_support)
        terms = {
            "policy": _sum(policy, batch["policy_mask"]),
            "value": _sum(value, batch["value_mask"]),
            "value_prefix": _sum(prefix, batch["value_prefix_mask"]),
        }
        if self.config.consistency_weight > 0:
            with self._mixed(steps.value.device):
                distance = consistency(model, steps.latents, batch["next_observation"], self.steps)
            terms["consistency"] = _sum(distance, batch["consistency_mask"])
        return terms, _sum(entropy, batch["policy_mask"])

    def _mixed(self, device: torch.device) -> AbstractContextManager[object]:
        """Autocast, if the networks compute in bfloat16; else what holds outside."""
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(device.type, torch.bfloat16)

    def _policy(self, policy: Tensor, batch: TensorDict) -> tuple[Tensor, Tensor]:
        target = batch["target_policy"]
        if self.log_density is None:
            return discrete_policy_loss(policy, target)
        return sampled_policy_loss(policy, target, batch["sampled_actions"], self.log_density)


def _sum(
    steps: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
) -> Tensor:  # [B]
    """The sum over the steps that count."""
    return (steps * mask).sum(1)


# parameters [M, P], actions [M, N, D] -> log densities [M, N], as of a `Sampler`
LogDensity = Callable[[Tensor, Tensor], Tensor]


def discrete_policy_loss(
    logits: Tensor,  # [*, A]
    target: Tensor,  # [*, A]; zeros cost nothing
) -> tuple[Tensor, Tensor]:  # [*], [*]
    """Cross entropy with the target, and the entropy of the policy itself, in nats.

    >>> discrete_policy_loss(torch.zeros(1, 4), torch.tensor([[0.5, 0.5, 0.0, 0.0]]))
    (tensor([1.3863]), tensor([1.3863]))
    """
    log_policy = logits.log_softmax(-1)
    return -(target * log_policy).sum(-1), -(log_policy.exp() * log_policy).sum(-1)


def sampled_policy_loss(
    parameters: Tensor,  # [*, P]: means, then standard deviations
    target: Tensor,  # [*, N]: fractions of the visits; zeros cost nothing
    actions: Tensor,  # [*, N, D]: those that were sampled at the root
    log_density: LogDensity,
) -> tuple[Tensor, Tensor]:  # [*], [*]
    """Cross entropy with the visits of sampled actions, and the entropy of the Gaussian.

        -sum_i target_i log pi(a_i)

    The density is not rescaled to the N actions: these were drawn from the policy, so with visits
    that prefer none of them the policy stays, where softmax_i log pi(a_i) would widen it. It is a
    density, so the loss can be negative. The entropy is of the normal distribution, before it is
    squashed into bounds.
    Source: Hubert et al. (2021), "Learning and Planning in Complex Action Spaces", section 5.

    >>> from raffia.search import GaussianSampler
    >>> parameters, actions = torch.tensor([[0.0, 1.0]]), torch.tensor([[[0.0], [1.0]]])
    >>> target = torch.tensor([[0.5, 0.5]])
    >>> sampled_policy_loss(parameters, target, actions, GaussianSampler(2).log_density)
    (tensor([1.1689]), tensor([1.4189]))
    """
    lead = parameters.shape[:-1]
    flat = parameters.flatten(0, -2), actions.flatten(0, -3)
    log_prob = log_density(*flat).unflatten(0, lead)
    deviation = parameters.chunk(2, -1)[1]
    entropy = (deviation.log() + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)
    return -(target * log_prob).sum(-1), entropy


class Steps:
    """The number of steps of each segment that rows are, which all layers of a network read.

    >>> steps = Steps()
    >>> with steps.of(3):
    ...     steps.num
    3
    """

    def __init__(self) -> None:
        self.num = 1

    @contextmanager
    def of(self, num: int) -> Iterator[None]:
        """Set the number of steps to `num` within the context."""
        self.num = num
        try:
            yield
        finally:
            self.num = 1


class StepBatchNorm(_BatchNorm):
    """BatchNorm of rows [B * T, C, ...] in which the T steps of a segment stand together.

    layer: whose parameters and buffers it is from now on.

    >>> torch.manual_seed(0)
    <torch._C.Generator ...>
    >>> x, steps = torch.randn(4, 3, 2), Steps()
    >>> layer = StepBatchNorm(nn.BatchNorm1d(2), steps)
    >>> with steps.of(3):
    ...     found = layer(x.flatten(0, 1)).unflatten(0, (4, 3))
    >>> torch.testing.assert_close(found[:, 1], nn.BatchNorm1d(2)(x[:, 1]))
    """

    def __init__(self, layer: _BatchNorm, steps: Steps) -> None:
        super().__init__(layer.num_features, layer.eps, layer.momentum)
        self.weight, self.bias = layer.weight, layer.bias
        for name, buffer in layer.named_buffers():
            setattr(self, name, buffer)
        self.steps = steps
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B * T, C, ...] -> the same."""
        if not self.training:
            return super().forward(x)
        num = self.steps.num
        # T steps of C channels are T * C channels of B rows: the same memory
        wide = x.reshape(len(x) // num, num * self.num_features, *x.shape[2:])
        if len(wide) == 1 and wide.dim() == 2:
            raise ValueError(
                "BatchNorm has no statistics of a batch of one segment: use batches of 2 or more "
                "(replay.batch_size, in each process of learners.num), or layer normalisation "
                "(model.norm_type and model.projection_norm_type 'LN')"
            )
        mean, var = _times(self.running_mean, num), _times(self.running_var, num)
        weight, bias = _times(self.weight, num), _times(self.bias, num)
        if num == 1:
            mean, var = mean.clone(), var.clone()
        # with a momentum of 1 the statistics of these rows replace what stood there; the running
        # ones themselves would be saved for backward, and the next call writes into them
        out = batch_norm(wide, mean, var, weight, bias, True, 1.0, self.eps)
        self._remember(mean, var, num)
        return out.reshape(x.shape)

    @torch.no_grad()
    def _remember(self, mean: Tensor, var: Tensor, num: int) -> None:
        """Move the running statistics by those of T steps, one after the other."""
        assert self.momentum is not None and self.num_batches_tracked is not None
        assert self.running_mean is not None and self.running_var is not None
        keep = 1 - self.momentum
        if num == 1:
            self.running_mean.mul_(keep).add_(mean, alpha=self.momentum)
            self.running_var.mul_(keep).add_(var, alpha=self.momentum)
        else:
            weights = [self.momentum * keep**k for k in reversed(range(num))]
            weight = constant(weights, mean)
            self.running_mean.mul_(keep**num).add_(weight @ mean.view(num, -1))
            self.running_var.mul_(keep**num).add_(weight @ var.view(num, -1))
        self.num_batches_tracked.add_(num)

    def _check_input_dim(self, input: Tensor) -> None:
        """Allow any number of dimensions."""


def _times(channels: Tensor | None, num: int) -> Tensor:  # [C] -> [num * C]
    assert channels is not None
    return channels if num == 1 else channels.repeat(num)


def step_norms(model: nn.Module) -> Steps | None:
    """Replace each BatchNorm by `StepBatchNorm`, under the same names; returns the number of steps
    to set.

    None, and nothing is changed, if there is one that cannot be replaced: without parameters or
    running statistics, or of another kind.

    >>> model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    >>> names = list(model.state_dict())
    >>> step_norms(model) is not None, list(model.state_dict()) == names
    (True, True)
    """
    found = {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}
    if not all(map(_is_plain, found.values())):
        return None
    steps = Steps()
    for name, layer in found.items():
        model.set_submodule(name, StepBatchNorm(layer, steps))
    return steps


def _is_plain(layer: _BatchNorm) -> bool:
    known = type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d)
    return known and bool(layer.affine and layer.track_running_stats) and layer.momentum is not None
