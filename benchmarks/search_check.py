"""Holds our EfficientZero models against LightZero's, with its weights loaded into ours."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.search_worker import Worker
from raffia.algorithms.efficientzero.model import EfficientZeroModel, EfficientZeroModelMLP

TOLERANCE = 1e-5
NARROW = {"proj_hid": 16, "proj_out": 16, "pred_hid": 8, "pred_out": 16}
VECTOR = {"observation_shape": 4, "latent_state_dim": 16, "lstm_hidden_size": 16} | NARROW
IMAGE = {"num_channels": 8, "lstm_hidden_size": 16, "downsample": True} | NARROW
BOARD = IMAGE | {"observation_shape": [3, 6, 6], "downsample": False}
SUPPORT = 21

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "MLP, residual": ("mlp", VECTOR | {"res_connection_in_dynamics": True}),
    "MLP": ("mlp", VECTOR | {"discrete_action_encoding_type": "not_one_hot"}),
    "MLP of release 0.2.0 (SimNorm)": ("mlp", VECTOR | {"res_connection_in_dynamics": True}),
    "images 96x96": ("conv", IMAGE | {"observation_shape": [12, 96, 96]}),
    "images 64x64, two blocks": (
        "conv",
        IMAGE
        | {"observation_shape": [4, 64, 64], "num_res_blocks": 2, "state_norm": True}
        | {"discrete_action_encoding_type": "not_one_hot"},
    ),
    "boards": ("conv", BOARD),
    "boards, LayerNorm": ("conv", BOARD | {"norm_type": "LN"}),
}


def tensor(lists: dict[str, Any]) -> Tensor:
    return torch.tensor(lists["data"], dtype=getattr(torch, lists["dtype"]))


def results_of(model: Any, obs: Tensor, actions: list[Tensor]) -> dict[str, Tensor]:
    outputs = {"root": model.initial_inference(obs)}
    for name, last, action in (("first", "root", actions[0]), ("second", "first", actions[1])):
        before = outputs[last]
        outputs[name] = model.recurrent_inference(
            before.latent_state, before.reward_hidden_state, action
        )
    found = {"projection": model.project(outputs["second"].latent_state)}
    for name, output in outputs.items():
        h, c = output.reward_hidden_state
        found |= {f"{name} latent": output.latent_state, f"{name} h": h, f"{name} c": c}
        found |= {f"{name} value": output.value, f"{name} policy": output.policy_logits}
        found[f"{name} prefix"] = output.value_prefix
    return found


def farthest(name: str, worker: Worker) -> tuple[float, str]:
    """The largest difference of all outputs, and which output has it."""
    kind, sizes = MODELS[name]
    released = "0.2.0" in name
    theirs = worker.ask(
        "reference",
        kind=kind,
        sizes=sizes
        | {"action_space_size": 3, "reward_support_size": SUPPORT, "value_support_size": SUPPORT},
        released=released,
    )
    bounds = (-(SUPPORT // 2), SUPPORT // 2 + 1, 1)
    options: dict[str, Any] = sizes | {"latent_norm": "SimNorm"} if released else sizes
    ours = (EfficientZeroModelMLP if kind == "mlp" else EfficientZeroModel)(
        action_space_size=3, reward_support_range=bounds, value_support_range=bounds, **options
    )
    ours.load_lightzero({key: tensor(value) for key, value in theirs["state"].items()}).eval()
    with torch.no_grad():
        found = results_of(ours, tensor(theirs["obs"]), [tensor(a) for a in theirs["actions"]])
    return max(
        ((found[key] - tensor(value)).abs().max().item(), key)
        for key, value in theirs["results"].items()
    )


def check(worker: Worker) -> int:
    """Print how far each model's outputs are from LightZero's; returns the exit status."""
    failed = False
    for name in MODELS:
        try:
            distance, output = farthest(name, worker)
            verdict = "pass" if distance <= TOLERANCE else "FAIL"
            print(f"{name:<34} {verdict}: {distance:.1e} ({output})")
        except (RuntimeError, ValueError, TypeError) as error:
            verdict = "FAIL"
            print(f"{name:<34} {verdict}: {error}")
        failed |= verdict == "FAIL"
    return int(failed)
