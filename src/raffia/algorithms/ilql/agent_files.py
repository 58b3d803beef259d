"""Checkpoints of `ILQL`: a folder of safetensors and JSON, written atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any, get_type_hints

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from raffia.algorithms.ilql.agent_networks import AgentNetworks
from raffia.algorithms.ilql.config import ILQLConfig
from raffia.algorithms.ilql.loss import Loss
from raffia.algorithms.ilql.model import ILQLModel
from raffia.files import foreign_reader
from raffia.files.folder import Folder, load_folder, write_folder
from raffia.tensordict.tensordict import TensorDict

KIND, VERSION = "ILQL agent", 1
WEIGHTS, OPTIMISER = "weights.safetensors", "optimiser.safetensors"
NUMBERS = ("index", "batch_size", "mutation", "fitness", "step", "seed", "layer_bounds")
Path = str | os.PathLike[str]


def save_agent(agent: AgentNetworks, path: Path) -> None:
    """Write an agent; what is there of this kind is replaced once all is on disk.

    >>> import tempfile
    >>> from raffia.algorithms.ilql.agent import ILQL
    >>> agent = ILQL(None, {"vocab_size": 6, "n_layer": 1, "n_head": 2, "n_embd": 8}, beta=2.0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     agent.save_checkpoint(folder)
    ...     saved_config(folder).loss.beta
    2.0
    """
    tensors = {name: _plain(tensor) for name, tensor in _tensors(agent).items()}
    files: dict[str, Any] = {WEIGHTS: lambda file: save_file(tensors, file)}
    if agent.opt is not None:
        opt = agent.opt.apply(_plain)
        files[OPTIMISER] = lambda file: opt.save(file)
    extras = {name: getattr(agent, name) for name in NUMBERS}
    whole = asdict(agent.config)  # a run's config has more
    config = {field.name: whole[field.name] for field in fields(ILQLConfig)}
    extras |= {"config": config, "training": agent.training}
    write_folder(path, KIND, VERSION, files, extras=extras)


def saved_config(path: Path) -> ILQLConfig:
    """The settings of an agent that was saved.

    >>> saved_config("no/such/folder")
    Traceback (most recent call last):
    ...
    FileNotFoundError: ...
    """
    return load_folder(path, KIND, VERSION, _config)


def load_agent(agent: AgentNetworks, path: Path) -> None:
    """Make an agent the one that was saved, where that can be; else it stays as it is.

    >>> import tempfile
    >>> from raffia.algorithms.ilql.agent import ILQL
    >>> small = {"vocab_size": 6, "n_layer": 1, "n_head": 2, "n_embd": 8}
    >>> agent, other = ILQL(None, small), ILQL(None, small)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     agent.save_checkpoint(folder)
    ...     other.load_checkpoint(folder)
    >>> torch.equal(other.model.q2[0].weight, agent.model.q2[0].weight)
    True
    """
    config, extras, tensors, opt = load_folder(path, KIND, VERSION, _content)
    networks: AgentNetworks | Loss = agent
    if config.model != agent.config.model or _difference(_tensors(agent), tensors):
        networks = Loss(ILQLModel(config.model), config.loss)
    mine, device = _tensors(networks), agent.device
    odd = _difference(mine, tensors)
    if odd:
        raise ValueError(
            f"the language model of the agent in {os.fspath(path)} cannot be built from its "
            f"description: {odd}. Pass one of its kind, ILQL.from_checkpoint(path, dataset, "
            "trunk=HFTrunk.from_folder(folder))"
        )
    for name, tensor in mine.items():
        # A copy: within the file's memory tensors are not aligned, and sums differ in the last bit.
        tensor.data = tensors[name].to(device, copy=True)
    agent.install(networks.model, networks.target, config)
    agent.opt = None if opt is None else opt.apply(lambda leaf: leaf.to(device))
    for name in NUMBERS:
        setattr(agent, name, extras[name])
    agent.train(extras["training"])


def _content(
    folder: Folder,
) -> tuple[ILQLConfig, dict[str, Any], dict[str, Tensor], TensorDict | None]:
    with foreign_reader(folder.path(WEIGHTS), "it is not a safetensors file"):
        tensors = load_file(folder.path(WEIGHTS))
    opt = TensorDict.load(folder.path(OPTIMISER)) if OPTIMISER in folder.files else None
    return _config(folder), folder.extras, tensors, opt


def _config(folder: Folder) -> ILQLConfig:
    config: ILQLConfig = _made(ILQLConfig, folder.extras["config"])
    return config


def _made(kind: Any, entries: Mapping[str, Any]) -> Any:
    """Build a dataclass from the dict that `dataclasses.asdict` made of it."""
    hints = get_type_hints(kind)
    known = {field.name for field in fields(kind)}
    unknown = sorted(entries.keys() - known)
    if unknown:
        raise ValueError(
            f"the checkpoint has settings that {kind.__name__} does not have: "
            f"{json.dumps(unknown)}. It was written by a later release"
        )
    return kind(
        **{
            name: _made(hints[name], value) if is_dataclass(hints[name]) else value
            for name, value in entries.items()
        }
    )


def _tensors(networks: nn.Module) -> dict[str, Tensor]:
    """The tensors of "model" and "target", each once: tied ones are one tensor with two names."""
    return {**dict(networks.named_parameters()), **dict(networks.named_buffers())}


def _difference(mine: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> str:
    """Describe the differences in names and shapes; empty if they are equal."""
    odd = sorted(mine.keys() ^ saved.keys())
    if odd:
        return f"{odd[0]!r} is only in the {'checkpoint' if odd[0] in saved else 'networks'}"
    for name, tensor in mine.items():
        if tensor.shape != saved[name].shape:
            return (
                f"{name!r} has shape {list(saved[name].shape)} in the checkpoint and "
                f"{list(tensor.shape)} in the networks"
            )
    return ""


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()
