"""Reading the weights of LightZero's EfficientZero and MuZero models, whose names are ours, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

# LightZero's networks of norm_type "LN" have BatchNorm in these layers all the same.
_BATCH_NORM_ALWAYS = (
    "dynamics_network.resblocks.",
    "dynamics_network.norm_value_prefix",
    "projection.",
    "prediction_head.",
)

# An entry of LightZero's weights, and what its absence (or presence) says of the model's options.
_WITHOUT = {
    "representation_network.norm.weight": "latent_norm='SimNorm'",
    "dynamics_network.lstm.weight_ih_l0": "lstm_hidden_size=0 (MuZero)",
    "representation_network.fc_representation.1.running_mean": "norm_type='LN'",
    "dynamics_network.fc_dynamics.0.weight": "res_connection_in_dynamics=True",
    "projection.0.weight": "self_supervised_learning_loss=False",
    "prediction_network.fc_policy_head.net.4.weight": "gaussian_head='mlp'",
}
_WITH = {
    "dynamics_network.fc_dynamics.0.weight": "res_connection_in_dynamics=False",
    "representation_network.downsample_net.conv1.weight": "downsample=True",
    "representation_network.fc_representation.1.running_mean": "norm_type='BN'",
    "projection.0.weight": "self_supervised_learning_loss=True",
    "prediction_network.fc_policy_head.net.4.weight": "gaussian_head='reparameterization'",
}


def read_lightzero(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Load `state_dict` into a model, or raise ValueError that names what does not fit.

    The policy head of Sampled EfficientZero has one layer for means and one for deviations, which
    are one layer of ours.

    Two things differ in networks with LayerNorm. Some of their layers are BatchNorm in LightZero:
    the model gets BatchNorm there, as the weights were trained with it. And LightZero's residual
    blocks normalise with one weight a channel, ours with one for each number of the image:
    the channel's is repeated, which computes the same.

    >>> from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
    >>> model, other = EfficientZeroModelMLP(4, 2), EfficientZeroModelMLP(4, 2)
    >>> read_lightzero(model, other.state_dict())
    >>> read_lightzero(model, EfficientZeroModelMLP(4, 3).state_dict())
    Traceback (most recent call last):
    ...
    ValueError: these weights do not fit EfficientZeroModelMLP:
    ...
    """
    _check_kind(state_dict)
    swapped = {
        path: _batch_norm(module)
        for path, module in model.named_modules()
        if isinstance(module, nn.LayerNorm)
        and path.startswith(_BATCH_NORM_ALWAYS)
        and f"{path}.running_mean" in state_dict
    }
    ours: dict[str, Tensor] = {
        name: value
        for name, value in model.state_dict().items()
        if name.rpartition(".")[0] not in swapped
    }
    for path, norm in swapped.items():
        ours |= {f"{path}.{name}": value for name, value in norm.state_dict().items()}
    theirs = {
        name: _per_pixel(value, ours[name]) if name in ours else value
        for name, value in _one_last_layer(state_dict).items()
    }
    _check_fit(type(model).__name__, ours, theirs)
    for path, norm in swapped.items():
        model.set_submodule(path, norm)
    model.load_state_dict(theirs)


def _check_kind(state_dict: Any) -> None:
    for name in ("model", "target_model"):
        if isinstance(state_dict, Mapping) and isinstance(state_dict.get(name), Mapping):
            raise ValueError(
                f"this is a whole checkpoint, with the entries {sorted(map(str, state_dict))}: "
                f"pass only the model's weights, load_lightzero(checkpoint[{name!r}])"
            )


def _batch_norm(norm: nn.LayerNorm) -> nn.Module:
    """BatchNorm that replaces a LayerNorm, on its device and of its type."""
    kind = nn.BatchNorm1d if len(norm.normalized_shape) == 1 else nn.BatchNorm2d
    batch_norm = kind(norm.normalized_shape[0]).to(norm.weight.device, norm.weight.dtype)
    return batch_norm.train(norm.training)


def _one_last_layer(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Weights whose Gaussian policy head, if there is one, has our layers: `net`."""
    head = "prediction_network.fc_policy_head."
    if f"{head}mu.weight" not in weights:
        return weights
    net = f"{head}net."
    found = {name.replace(f"{head}main.", net): value for name, value in weights.items()}
    # Each hidden layer has a weight and a bias, and each second layer is a ReLU.
    last = sum(name.startswith(net) for name in found)
    for kind in ("weight", "bias"):
        names = [f"{head}mu.{kind}", f"{head}log_sigma_layer.{kind}"]  # the second if conditioned
        if parts := [found.pop(name) for name in names if name in found]:
            found[f"{net}{last}.{kind}"] = torch.cat(parts)
    return found


def _per_pixel(value: Tensor, ours: Tensor) -> Tensor:
    """Reshape [C] to [C, H, W] if our parameter has this shape; else return it unchanged."""
    if value.dim() == 1 and ours.dim() == 3 and len(value) == len(ours):
        return value[:, None, None].expand(ours.shape)
    return value


def _check_fit(model: str, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    faults = [f"  {name} is missing" for name in ours if name not in theirs] + [
        f"  {name} is unknown" for name in theirs if name not in ours
    ]
    for name in ours.keys() & theirs.keys():
        if ours[name].shape != theirs[name].shape:
            faults.append(
                f"  {name} has shape {list(theirs[name].shape)}, but the model expects "
                f"{list(ours[name].shape)}"
            )
    if faults:
        options = [hint for name, hint in _WITHOUT.items() if name in ours.keys() - theirs.keys()]
        options += [hint for name, hint in _WITH.items() if name in theirs.keys() - ours.keys()]
        seem = f"; they seem to be of {', '.join(options)}" if options else ""
        if "prediction_network.conv1x1_policy.weight" in ours and any(
            ".fc_policy_head." in name for name in theirs
        ):
            seem += "; LightZero's Sampled EfficientZero for images cannot be read"
        raise ValueError(
            "\n".join([f"these weights do not fit {model}:", *faults])
            + f"\nbuild the model with the options that the weights were trained with{seem}"
        )
