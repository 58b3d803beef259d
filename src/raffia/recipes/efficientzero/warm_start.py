"""Weights that a run starts with: another run's, or a checkpoint of LightZero's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raffia.algorithms.efficientzero.learner import EfficientZeroLearner
from raffia.files import DamagedFileError, foreign_reader
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.recipes.members import best_of
from raffia.recipes.run_folder import find_checkpoint, read_run_of
from raffia.tensordict.tensordict import TensorDict
from raffia.train.experiment import RunError


def warm_state(learner: EfficientZeroLearner, path: str, seed: int) -> TensorDict:
    """The state before the first update, with the weights in a run's folder or a file.

    The optimiser is reset, and target networks equal the others. Raises RunError, with what does
    not fit, and loads nothing then.

    >>> from raffia.envs.env import Discrete, EnvSpec
    >>> spec = EnvSpec(observation_shape=(4,), action=Discrete(2))
    >>> learner = EfficientZeroLearner(spec, EfficientZeroRun(), num_updates=9)
    >>> warm_state(learner, "ckpt_best.pth.tar", seed=0)
    Traceback (most recent call last):
    ...
    raffia.train.experiment.RunError: init_from=ckpt_best.pth.tar does not exist
    """
    if Path(path).is_dir():
        _check_model(learner, path)
    model = learner.make_model(seed)
    layers = list(model.state_dict())
    try:
        model.load_lightzero(weights_in(Path(path), layers))
    except ValueError as error:
        raise RunError(
            f"init_from={path}: {error}. These are the settings model.*; the settings of a run "
            "are in its config.json: --config RUN/config.json"
        ) from error
    if list(model.state_dict()) != layers:
        raise RunError(
            f"init_from={path}: some layers of LightZero's networks with norm_type LN are "
            "BatchNorm, which the config does not record, so the run could not be resumed. Start "
            "it from Python, with networks="
        )
    return learner.state_of(model)


def _check_model(learner: EfficientZeroLearner, path: str) -> None:
    """RunError for a run whose networks mean something else by weights of the same shapes."""
    theirs, ours = read_run_of(EfficientZeroRun, path).model, learner.config.model
    for field in fields(ours):
        own, other = getattr(ours, field.name), getattr(theirs, field.name)
        if own != other:
            raise RunError(
                f"init_from={path}: its model.{field.name} is {other}, and this run's is {own}: "
                f"take the settings model.* of its config.json: --config {path}/config.json"
            )


def weights_in(path: Path, layers: list[str]) -> dict[str, Tensor]:
    """The weights in a run's folder or in a file, by the names of a model's layers.

    layers: the names that the model saves; constants of a run beside them are left out.
    """
    if not path.exists():
        raise RunError(f"init_from={path} does not exist")
    if path.is_dir():
        state = best_of(find_checkpoint(path, "best"), torch.device("cpu"))
        params: dict[str, Tensor] = dict(state["params"].flatten_keys(".").items())
        buffers = dict(state["buffers"].flatten_keys(".").items())
        constants = buffers.keys() - set(layers) if params.keys() <= set(layers) else set()
        return params | {name: buffers[name] for name in buffers.keys() - constants}
    try:
        with foreign_reader(
            path, "it is damaged, or it is not a torch file that holds only tensors"
        ):
            found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except DamagedFileError as error:
        raise RunError(f"init_from={error}") from error
    if isinstance(found, Mapping) and isinstance(found.get("model"), Mapping):
        found = found["model"]
    if not (isinstance(found, Mapping) and found and all(map(torch.is_tensor, found.values()))):
        raise RunError(
            f"init_from={path}: it holds no weights; a checkpoint of LightZero has them under "
            '"model"'
        )
    return {str(name): tensor for name, tensor in found.items()}
