"""Copies of networks for inference: BatchNorm within the weights before it, an LSTM as one product.

    BN(W x + b) = s W x + s (b - mean) + shift,    s = gain / sqrt(var + eps)

BatchNorm counts as in eval mode, by its running statistics, whatever mode the network is in.
LayerNorm depends on each input and stays; so does a BatchNorm that no linear layer stands before.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from raffia.algorithms.efficientzero.latent_model import LatentModel
from raffia.algorithms.efficientzero.networks import (
    DownSample,
    DynamicsNetwork,
    PredictionNetwork,
    RepresentationNetwork,
)
from raffia.algorithms.efficientzero.row_invariant import in_blocks, row_invariant
from raffia.nn.blocks import LSTMStep, has_hooks, run_directly

_LINEAR = (nn.Linear, nn.Conv2d)
_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d)

# Of networks that name their layers: which normalisation stands behind which layer.
_NAMED: dict[type[nn.Module], list[tuple[str, str]]] = {
    RepresentationNetwork: [("conv", "norm")],
    DownSample: [("conv1", "norm1")],
    DynamicsNetwork: [("conv", "norm_common"), ("conv1x1_reward", "norm_reward")],
    PredictionNetwork: [("conv1x1_value", "norm_value"), ("conv1x1_policy", "norm_policy")],
}


class JointLSTM(nn.Module):
    """`LSTMStep` as one product of the input and h side by side.

    >>> step = LSTMStep(4, 3)
    >>> joint = JointLSTM(4, 3)
    >>> joint.refresh(step)
    >>> x, state = torch.ones(2, 4), (torch.ones(2, 3), torch.ones(2, 3))
    >>> torch.testing.assert_close(joint(x, state), step(x, state))
    """

    weight: Tensor  # [4 hidden_size, input_size + hidden_size], gates i, f, g, o
    bias: Tensor  # [4 hidden_size]

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.register_buffer("weight", torch.empty(4 * hidden_size, input_size + hidden_size))
        self.register_buffer("bias", torch.empty(4 * hidden_size))

    def refresh(self, step: LSTMStep) -> None:
        """Copy the parameters of an `LSTMStep`."""
        with torch.no_grad():
            torch.cat([step.weight_ih_l0, step.weight_hh_l0], 1, out=self.weight)
            torch.add(step.bias_ih_l0, step.bias_hh_l0, out=self.bias)

    def forward(
        self,
        x: Tensor,  # [B, input_size]
        state: tuple[Tensor, Tensor],  # h, c: each [B, hidden_size]
    ) -> tuple[Tensor, Tensor]:
        """The next h, which is the output, and c."""
        h, c = state
        product = partial(torch.addmm, self.bias, mat2=self.weight.t())
        both = torch.cat([x, h], 1)
        gates = in_blocks(product, both) if x.device.type == "cpu" else product(both)
        i, f, g, o = gates.chunk(4, 1)
        c = torch.addcmul(f.sigmoid_() * c, i.sigmoid_(), g.tanh_())
        return o.sigmoid_() * c.tanh(), c


class _Pair(NamedTuple):
    """The names of a linear layer and of the BatchNorm behind it."""

    linear: str
    norm: str


class Folding:
    """A model's copy for inference, and how to renew it.

    dtype: of the copy; None for the model's.

    >>> from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
    >>> model = EfficientZeroModelMLP(4, 2, latent_state_dim=8, lstm_hidden_size=6).eval()
    >>> folding = Folding(model)
    >>> obs = torch.ones(3, 4)
    >>> output, expected = folding.model.initial_inference(obs), model.initial_inference(obs)
    >>> torch.testing.assert_close(output.policy_logits, expected.policy_logits)
    """

    def __init__(self, model: LatentModel, dtype: torch.dtype | None = None) -> None:
        self._entries = _entries(model, _modules(model))
        # A search needs no projection; for the copy these two are None already.
        left_out = {id(part): None for part in (model.projection, model.prediction_head)}
        self.model = copy.deepcopy(model, left_out).eval().requires_grad_(False)
        self._pairs = list(_pairs(self.model))
        self._steps = [name for name, part in self.model.named_modules() if type(part) is LSTMStep]
        for pair in self._pairs:
            _without_norm(self.model, pair)
        for name in self._steps:
            step = cast(LSTMStep, self.model.get_submodule(name))
            joint = JointLSTM(step.input_size, step.hidden_size).to(step.weight_ih_l0)
            self.model.set_submodule(name, joint)
        self.model.to(dtype=dtype)
        first = next(self.model.parameters())
        if first.device.type == "cpu":
            row_invariant(self.model)
        if first.device.type == "cpu" or first.dtype == torch.bfloat16:
            # On the CPU 3 to 10 % faster, also where images come in the other order
            for parameter in self.model.parameters():
                if parameter.dim() == 4:
                    parameter.data = parameter.contiguous(memory_format=torch.channels_last)
        run_directly(self.model)
        self._modules = _modules(self.model)
        computed = [pair.linear for pair in self._pairs] + self._steps
        self._copied = [
            (name, key)
            for name, part in self._modules.items()
            if name not in computed
            for key in [*part._parameters, *part._buffers]
            if getattr(part, key) is not None
        ]
        self.refresh(model)

    def refresh(self, model: LatentModel) -> None:
        """Copy the present parameters and statistics of a model with the same layers.

        ValueError if it has others; the copy stays as it is then.
        """
        self.copy(self.source(model))

    def source(self, model: LatentModel) -> dict[str, nn.Module]:
        """The modules of a model by name; ValueError if its layers are not the same."""
        given = _modules(model)
        _check_same(self._entries, _entries(model, given))
        return given

    @torch.no_grad()
    def copy(self, given: dict[str, nn.Module]) -> None:
        """Copy the present parameters and statistics of modules of the same layers."""
        own: dict[str, Any] = self._modules
        if pairs := self._pairs:
            _fold(
                [given[pair.linear] for pair in pairs],
                [given[pair.norm] for pair in pairs],
                [own[pair.linear] for pair in pairs],
            )
        for name in self._steps:
            cast(JointLSTM, own[name]).refresh(cast(LSTMStep, given[name]))
        targets = [cast(Tensor, getattr(own[name], key)) for name, key in self._copied]
        sources = [cast(Tensor, getattr(given[name], key)) for name, key in self._copied]
        torch._foreach_copy_(targets, sources)


def _modules(model: LatentModel) -> dict[str, nn.Module]:
    """The modules by name, but the projection's."""
    parts = {
        "representation_network": model.representation_network,
        "dynamics_network": model.dynamics_network,
        "prediction_network": model.prediction_network,
        "action_encoding": model.action_encoding,
    }
    return {
        name: module
        for prefix, part in parts.items()
        for name, module in part.named_modules(prefix=prefix)
    }


def _entries(model: LatentModel, modules: dict[str, nn.Module]) -> dict[str, object]:
    """The type of each layer, the shape of each tensor, and how outputs are read."""
    entries: dict[str, object] = {}
    for name, part in modules.items():
        entries[name] = type_before_parametrizations(part)  # of which each layer has its own class
        for tensors in (part._parameters, part._buffers):
            for key, tensor in tensors.items():
                entries[f"{name}.{key}"] = None if tensor is None else tensor.shape
    for name in ("reward_support", "value_support", "state_norm"):
        entries[name] = getattr(model, name)
    return entries


def _check_same(own: dict[str, object], given: dict[str, object]) -> None:
    if own == given:
        return
    name = next(name for name in own | given if own.get(name, "") != given.get(name, ""))
    raise ValueError(
        f"this model differs from the one that was folded: {name} is {_shown(given, name)} here "
        f"and {_shown(own, name)} there. Call fold(model) to make a new one"
    )


def _shown(entries: dict[str, object], name: str) -> str:
    if name not in entries:
        return "missing"
    entry = entries[name]
    if isinstance(entry, torch.Size):
        return f"of shape {list(entry)}"
    return entry.__qualname__ if isinstance(entry, type) else str(entry)


def _pairs(model: nn.Module) -> Iterator[_Pair]:
    for name, part in model.named_modules():
        prefix = f"{name}." if name else ""
        named = _NAMED.get(type(part), [])
        if type(part) is nn.Sequential:
            names = list(part._modules)
            named = list(zip(names, names[1:], strict=False))
        for linear, norm in named:
            layers: list[Any] = [part._modules.get(linear), part._modules.get(norm)]
            # Subclasses and layers with hooks may compute something else.
            if type(layers[0]) not in _LINEAR or type(layers[1]) not in _BATCH_NORM:
                continue
            if any(map(has_hooks, layers)) or layers[1].running_mean is None:
                continue
            yield _Pair(prefix + linear, prefix + norm)


def _without_norm(model: nn.Module, pair: _Pair) -> None:
    linear = model.get_submodule(pair.linear)
    weight = cast(Tensor, linear.weight)
    if linear.bias is None:
        linear.bias = nn.Parameter(weight.new_empty(len(weight)), requires_grad=False)
    model.set_submodule(pair.norm, nn.Identity())


def _fold(linears: list[Any], norms: list[Any], outs: list[Any]) -> None:
    """Fold all layers in a few foreach calls: an update may come after every few searches."""
    variances = torch._foreach_add(
        [norm.running_var for norm in norms], [norm.eps for norm in norms]
    )
    scales = torch._foreach_rsqrt(variances)
    gains = [_or(norm.weight, scale, 1.0) for norm, scale in zip(norms, scales, strict=True)]
    torch._foreach_mul_(scales, gains)
    for linear, scale, out in zip(linears, scales, outs, strict=True):
        weight = linear.weight
        torch.mul(weight, scale.view(-1, *[1] * (weight.dim() - 1)), out=out.weight.data)
    biases = [_or(linear.bias, scale, 0.0) for linear, scale in zip(linears, scales, strict=True)]
    shifts = [_or(norm.bias, scale, 0.0) for norm, scale in zip(norms, scales, strict=True)]
    centred = torch._foreach_sub(biases, [norm.running_mean for norm in norms])
    results = torch._foreach_addcmul(shifts, centred, scales)
    torch._foreach_copy_([out.bias for out in outs], results)


def _or(parameter: Tensor | None, like: Tensor, number: float) -> Tensor:
    return torch.full_like(like, number) if parameter is None else parameter
