"""The networks of an `ILQL`, what learning changes in them, and how they change their shape.

They are made of a description, a folder, or a language model itself. Later a layer more or less, or
nodes in the dense layers: a new layer adds nothing to the hidden state and a new node is not read,
until they have learnt. Legend: F nodes of a dense layer.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor, nn

from raffia.algorithms.ilql.config import ILQLConfig, ILQLModelConfig, TrunkConfig
from raffia.algorithms.ilql.learner import ILQLLearner, hyper_of, load_networks, networks_state
from raffia.algorithms.ilql.loss import Loss
from raffia.algorithms.ilql.model import ILQLModel, ILQLTarget, make_target
from raffia.functional.seeds import global_draws
from raffia.lm.folder import gpt2, read_config
from raffia.lm.hf_trunk import HFTrunk
from raffia.lm.model import LanguageModel
from raffia.nn.base import TensorDictModuleBase
from raffia.tensordict.keys import nearest
from raffia.tensordict.tensordict import TensorDict


class AgentNetworks(TensorDictModuleBase):
    """Networks that learn by `ILQLLearner`; `install` puts them in."""

    model: ILQLModel
    target: ILQLTarget
    mutation: str | None  # what made this agent of another one
    layer_bounds: dict[str, int]  # "min_layers", "max_layers", where given
    fitness: list[float]  # what `test` found
    step: int  # updates that were made
    seed: int  # of the order of the data, and of dropout
    opt: TensorDict | None  # the optimiser's moments, from the first update on
    _learner_of: ILQLLearner | None

    def install(self, model: ILQLModel, target: ILQLTarget, config: ILQLConfig) -> None:
        """Replace the networks and their config; the optimiser starts again."""
        self.model, self.target, self._config = model, target, config
        heads = ["q1", "q2"] if config.model.double_q else ["q1"]
        self.in_keys = ["tokens", "state_idxs", "action_idxs", "attn_mask"]
        self.out_keys = ["v", *heads, *(f"target_{name}" for name in heads), "logits"]
        self.opt = self._learner_of = None

    @property
    def config(self) -> ILQLConfig:
        """All settings; those that do not determine the networks can be assigned."""
        return self._config

    @config.setter
    def config(self, config: ILQLConfig) -> None:
        if config.model != self._config.model:
            raise ValueError(
                "the networks were built from config.model and cannot be replaced: create another "
                "agent with ILQL.from_config(config, agent.dataset)"
            )
        self._config, self._learner_of = config, None

    @property
    def device(self) -> torch.device:
        """The device of the networks."""
        return next(self.model.parameters()).device

    def learner_state(self) -> TensorDict:
        """The state that learning changes, sharing this agent's memory, as `ILQLLearner` defines
        it.

        Before the first update "opt" is empty.
        """
        state = networks_state(self.model, self.target)
        state["opt"] = TensorDict() if self.opt is None else self.opt
        state["hyper"] = self._hyper
        state["step"], state["dropout_seed"] = torch.tensor(self.step), torch.tensor(self.seed)
        return state

    def load_learner_state(self, state: TensorDict) -> None:
        """Load a learner's state and keep the settings. Its "opt" may be used without a copy."""
        load_networks(self, state)
        self.opt = state["opt"] if len(state["opt"].keys()) else None
        self.step = int(state["step"])

    @property
    def _learner(self) -> ILQLLearner:
        """A learner for networks of the present shapes; the weights are not copied."""
        if self._learner_of is None:
            model = self.model
            own = {id(parameter): parameter for parameter in model.parameters()}  # not copied
            self._learner_of = ILQLLearner(
                self.config, model_factory=lambda: copy.deepcopy(model, dict(own))
            )
        return self._learner_of

    @property
    def _hyper(self) -> TensorDict:
        return hyper_of(self.config, next(self.model.parameters()))

    @property
    def _loss(self) -> Loss:
        """Around the same networks."""
        config = self.config
        return Loss(self.model, config.loss, precision=config.precision, target=self.target)

    # -- as a member of a population, see `raffia.evolution.agents`

    def why_fixed(self) -> str | None:
        """The reason why the networks cannot be mutated; None if they can.

        >>> from raffia.algorithms.ilql.agent import ILQL
        >>> agent = ILQL(None, {"vocab_size": 6, "n_layer": 1, "n_head": 2, "n_embd": 8})
        >>> agent.why_fixed()
        >>> agent.model.trunk.wte.requires_grad_(False)
        Embedding(6, 8)
        >>> agent.why_fixed()
        'part of its language model is frozen'
        """
        if not all(parameter.requires_grad for parameter in self.model.parameters()):
            return "part of its language model is frozen"
        config = self.config.model
        if config.trunk.kind == "gpt":
            with torch.device("meta"):
                made = ILQLModel(config)
            if _shapes(made) == _shapes(self.model):
                return None
        return "its language model cannot be built from a description"

    def reshape(self, new_layer_prob: float, nodes: Sequence[int], draw: torch.Generator) -> str:
        """Add or remove a layer, or nodes, of the networks; gives what was done.

        nodes: of which one is the change of F, in all layers.

        The target and the optimiser's moments change, too; what is new changes nothing at first.
        The number of layers stays within `layer_bounds`; the last is added, any removed.

        >>> from raffia.algorithms.ilql.agent import ILQL
        >>> small = {"vocab_size": 6, "n_layer": 1, "n_head": 2, "n_embd": 8, "max_layers": 2}
        >>> agent, draw = ILQL(None, small), torch.Generator().manual_seed(0)
        >>> agent.reshape(1.0, [16], draw), agent.net_config["n_layer"]
        ('1 -> 2 layers', 2)
        >>> agent.reshape(0.0, [16], draw), agent.net_config["dim_feedfwd"]
        ('32 -> 48 nodes', 48)
        """
        of_layer, more, at = torch.rand(3, generator=draw, dtype=torch.float64).tolist()
        count = nodes[int(torch.randint(len(nodes), (), generator=draw))]
        seed = int(torch.randint(2**62, (), generator=draw))
        trunk = self.config.model.trunk
        if of_layer < new_layer_prob:
            shape, gone = _with_layers(trunk, self.layer_bounds, more < 0.5, at)
            what = f"{trunk.n_layer} -> {shape.n_layer} layers"
        else:
            old = trunk.dim_feedfwd or 4 * trunk.n_embd
            new = old + count if more < 0.5 or old == 1 else max(1, old - count)
            shape, gone = replace(trunk, dim_feedfwd=new), trunk.n_layer
            what = f"{old} -> {new} nodes"
        if shape != trunk:
            self._take_shape(shape, gone, seed)
        return what

    @torch.no_grad()
    def _take_shape(self, trunk: TrunkConfig, gone: int, seed: int) -> None:
        settings = replace(self.config, model=replace(self.config.model, trunk=trunk))
        old, training, opt = self.learner_state(), self.training, self.opt
        with global_draws(seed):
            model = ILQLModel(settings.model)
        model.to(self.device, next(self.model.parameters()).dtype)
        self.install(model, make_target(model), settings)
        self.train(training)
        if opt is not None:
            self.opt = ILQLLearner(settings).state_of(model)["opt"]
        new = self.learner_state()
        for part in ("params", "buffers", "target", "opt"):
            _carry(old[part].flatten_keys("."), new[part].flatten_keys("."), gone)
        load_networks(self, new)  # what the target has of the buffers

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """The optimiser's moments go where the weights go."""
        super()._apply(fn, recurse)
        if self.opt is not None:
            self.opt = self.opt.apply(fn)
        return self


NetConfig: TypeAlias = Mapping[str, Any] | str | os.PathLike[str] | nn.Module

# Entry of a description -> whether it is of the trunk, or else of the arrangement.
TRUNK = [field.name for field in fields(TrunkConfig) if field.name != "kind"]
ARRANGEMENT = "policy target".split()
BOUNDS = "min_layers max_layers".split()
FIXED = {"arch": "gpt"}

LAYER = re.compile(r"\bh\.(\d+)\.")
WRITES = ("proj.weight", "proj.bias", "out.weight", "out.bias")  # into the residual stream

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
    """The networks of a `NetConfig`.

    >>> Networks(TrunkConfig(), None, {}, {}).trunk is None
    True
    """

    trunk_config: TrunkConfig
    trunk: LanguageModel | None  # with its weights; None: drawn by the config
    arrangement: dict[str, Any]  # "policy" and "target" of `ILQLModelConfig`, where given
    bounds: dict[str, int]  # "min_layers" and "max_layers", where given


def networks_of(net_config: NetConfig) -> Networks:
    """Make networks from a description of a GPT, a folder of weights, or an existing language
    model.

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
    """Describe existing networks, the inverse of building them.

    >>> again = described(ILQLModelConfig(trunk=TrunkConfig(vocab_size=35)), {"max_layers": 16})
    >>> again["arch"], again["vocab_size"], again["policy"], again["max_layers"]
    ('gpt', 35, 'shared', 16)
    """
    trunk = {name: getattr(config.trunk, name) for name in TRUNK}
    arrangement = {name: getattr(config, name) for name in ARRANGEMENT}
    return {**FIXED, **trunk, **arrangement, **bounds}


def trunk_config_of(trunk: LanguageModel) -> TrunkConfig:
    """The description of a language model; of a foreign one, what decoding needs.

    >>> from raffia.lm.transformer import CausalLM
    >>> trunk_config_of(CausalLM(35, n_layer=2, n_head=2, n_embd=8)).n_layer
    2
    """
    settings = getattr(trunk, "settings", None)
    if settings is not None:
        checkpointing: bool = getattr(trunk, "gradient_checkpointing", False)
        return TrunkConfig(**settings(), gradient_checkpointing=checkpointing)
    # Its layers are unknown: one of one head stands for them.
    sizes = {name: getattr(trunk, name) for name in ("vocab_size", "n_embd", "block_size")}
    return TrunkConfig(**sizes, n_layer=1, n_head=1)


def _with_layers(
    trunk: TrunkConfig,
    bounds: Mapping[str, int],
    more: bool,
    at: float,  # 0 to 1: which layer goes
) -> tuple[TrunkConfig, int]:
    """The shape with a layer more or less, and which layer goes: `n_layer` for none.

    Where the bounds forbid one of the changes it is the other; where they forbid both, no change.
    """
    num = trunk.n_layer
    may_grow = num < bounds.get("max_layers", num + 1)
    may_shrink = num > bounds.get("min_layers", 1)
    if may_grow and (more or not may_shrink):
        return replace(trunk, n_layer=num + 1), num
    if not may_shrink:
        return trunk, num
    return replace(trunk, n_layer=num - 1), int(at * num)


def _carry(old: TensorDict, new: TensorDict, gone: int) -> None:
    """Copy old tensors into new ones; new weights that write into the residual stream are 0.

    gone: the layer that is left out; those behind it move up.
    An optimiser's moments are 0 where they are new.
    """
    for name, tensor in new.items():
        if name.endswith(WRITES):
            tensor.zero_()
        was = old.get(LAYER.sub(lambda h: f"h.{int(h[1]) + (int(h[1]) >= gone)}.", name), None)
        if was is None:
            continue
        common = tuple(slice(min(sizes)) for sizes in zip(was.shape, tensor.shape, strict=True))
        tensor[common] = was[common]


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


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
                f"net_config[{name!r}]={net_config[name]!r} is not supported; only {value!r} is. "
                "For another kind of model pass its folder as net_config: it is read with "
                "transformers"
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
            f"min_layers={least} and max_layers={most} must satisfy 1 <= min_layers <= max_layers"
        )
