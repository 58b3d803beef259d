"""What the networks of `ILQL` are made of: a description, a folder, or a language model itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
from raffia.algorithms.ilql.places import Trunk
from raffia.lm.folder import gpt2, read_config
from raffia.lm.hf_trunk import HFTrunk
from raffia.tensordict.keys import nearest

__all__ = ["GPT2", "NetConfig", "Networks", "described", "networks_of", "trunk_config_of"]

NetConfig: TypeAlias = Mapping[str, Any] | str | os.PathLike[str] | nn.Module

# Entry of a description -> whether it says something of the trunk, or else of the arrangement.
TRUNK = [field.name for field in fields(TrunkConfig) if field.name != "kind"]
ARRANGEMENT = "policy target".split()
BOUNDS = "min_layers max_layers".split()
FIXED = {"arch": "gpt"}

GPT2: Mapping[str, Any] = MappingProxyType(
    {
        "arch": "gpt",
        "vocab_size": 50257,
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "dim_feedfwd": 3072,
        "block_size": 1024,
        "activation": "GELU",
        "dropout": 0.1,
        "layer_norm_eps": 1e-5,
        "min_layers": 8,
        "max_layers": 16,
        "bias": True,
    }
)


class Networks(NamedTuple):
    """What a `NetConfig` says.

    >>> Networks(TrunkConfig(), None, {}, {}).trunk is None
    True
    """

    trunk_config: TrunkConfig
    trunk: Trunk | None  # with its weights; None: drawn anew, as the config has it
    arrangement: dict[str, Any]  # "policy" and "target" of `ILQLModelConfig`, where given
    bounds: dict[str, int]  # "min_layers" and "max_layers", where given


def networks_of(net_config: NetConfig) -> Networks:
    """Read a description of a GPT, a folder of weights, or a language model that is there.

    A description has the entries of `GPT2`, all but `vocab_size` with GPT-2's number where left
    out; but dropout is 0 there, as values take its noise for chances. It may have "positions",
    "gradient_checkpointing", "policy" and "target", see `TrunkConfig` and `ILQLModelConfig`; an
    "activation" is one of `raffia.lm.transformer_block.ACTIVATIONS`. `min_layers` and `max_layers`
    bound what is made of the network later.
    A folder is that of a GPT-2, or, with the extra `hf`, any causal model of `transformers`.

    >>> networks_of({"vocab_size": 35, "n_layer": 4, "n_embd": 128, "n_head": 4}).trunk_config.bias
    True
    >>> networks_of({"vocab_size": 35, "n_layers": 4})
    Traceback (most recent call last):
    ...
    ValueError: net_config has the unknown entry 'n_layers'. Did you mean "n_layer"?
    """
    if isinstance(net_config, nn.Module):
        trunk: Any = net_config
        return Networks(trunk_config_of(trunk), trunk, {}, {})
    if isinstance(net_config, Mapping):
        return _described(net_config)
    folder = Path(net_config)
    found: Any = (
        gpt2(folder)
        if read_config(folder).get("model_type") == "gpt2"
        else HFTrunk.from_folder(folder)
    )
    return Networks(trunk_config_of(found), found, {}, {})


def described(config: ILQLModelConfig, bounds: Mapping[str, int]) -> dict[str, Any]:
    """The other way round: a description of networks that are there.

    >>> again = described(ILQLModelConfig(trunk=TrunkConfig(vocab_size=35)), {"max_layers": 16})
    >>> again["arch"], again["vocab_size"], again["policy"], again["max_layers"]
    ('gpt', 35, 'shared', 16)
    """
    trunk = {name: getattr(config.trunk, name) for name in TRUNK}
    arrangement = {name: getattr(config, name) for name in ARRANGEMENT}
    return {**FIXED, **trunk, **arrangement, **bounds}


def trunk_config_of(trunk: Trunk) -> TrunkConfig:
    """The description of a language model; of one that is not ours, what decoding asks of it.

    >>> from raffia.lm.transformer import CausalLM
    >>> trunk_config_of(CausalLM(35, n_layer=2, n_head=2, n_embd=8)).n_layer
    2
    """
    settings = getattr(trunk, "settings", None)
    if settings is not None:
        checkpointing: bool = getattr(trunk, "gradient_checkpointing", False)
        return TrunkConfig(**settings(), gradient_checkpointing=checkpointing)
    # Its layers are its own affair: one of one head stands for whatever there is.
    block_size: int = getattr(trunk, "block_size")  # noqa: B009, as `Trunk` does not promise it
    return TrunkConfig(
        vocab_size=trunk.vocab_size,
        n_embd=trunk.n_embd,
        block_size=block_size,
        n_layer=1,
        n_head=1,
    )


def _described(net_config: Mapping[str, Any]) -> Networks:
    known = [*FIXED, *TRUNK, *BOUNDS, *ARRANGEMENT]
    unknown = [name for name in net_config if name not in known]
    if unknown:
        raise ValueError(
            f"net_config has the unknown entry {unknown[0]!r}{nearest(unknown[0], known)}"
        )
    for name, value in FIXED.items():
        if net_config.get(name, value) != value:
            raise ValueError(
                f"net_config[{name!r}]={net_config[name]!r}: only {value!r} is known. For another "
                "kind of model pass its folder, as net_config, and it is read with transformers"
            )
    if "vocab_size" not in net_config:
        raise ValueError(
            "net_config lacks 'vocab_size', the number of tokens: "
            "{'vocab_size': tokenizer.num_tokens, ...}"
        )
    _check_bounds(net_config)
    unsaid = {**GPT2, "dropout": 0.0}
    if "n_embd" in net_config:
        unsaid["dim_feedfwd"] = None  # four times as wide
    entries = {**unsaid, **net_config}
    trunk = TrunkConfig(**{name: entries[name] for name in TRUNK if name in entries})
    arrangement, bounds = (
        {name: net_config[name] for name in names if name in net_config}
        for names in (ARRANGEMENT, BOUNDS)
    )
    return Networks(trunk, None, arrangement, bounds)


def _check_bounds(net_config: Mapping[str, Any]) -> None:
    least = net_config.get("min_layers", 1)
    most = net_config.get("max_layers", least)
    if not 1 <= least <= most:
        raise ValueError(
            f"min_layers={least} and max_layers={most} bound the number of layers: "
            "1 <= min_layers <= max_layers"
        )
