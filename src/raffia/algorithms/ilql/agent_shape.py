"""A layer more or less in an agent's language models, or nodes in their dense layers.

A new layer adds nothing to the hidden state and a new node is not read, until they have learnt.
Legend: F nodes of a dense layer, d numbers of a hidden state.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
from raffia.algorithms.ilql.learner import ILQLLearner, load_networks
from raffia.algorithms.ilql.model import ILQLModel, make_target
from raffia.tensordict.tensordict import TensorDict

if TYPE_CHECKING:
    from raffia.algorithms.ilql.agent import ILQL

__all__ = ["reshaped", "why_fixed"]

Rename = Callable[[str], str]  # a tensor's name in the new networks -> its name in the old ones
LAYER = re.compile(r"\bh\.(\d+)\.")
WRITES = ("proj.weight", "proj.bias", "out.weight", "out.bias")  # into the residual stream


def why_fixed(agent: ILQL) -> str | None:
    """What keeps its networks from changing; None: nothing.

    >>> from raffia.algorithms.ilql.agent import ILQL
    >>> agent = ILQL(None, {"vocab_size": 6, "n_layer": 1, "n_head": 2, "n_embd": 8})
    >>> why_fixed(agent)
    >>> agent.model.trunk.wte.requires_grad_(False)
    Embedding(6, 8)
    >>> why_fixed(agent)
    'a part of its language model does not learn'
    """
    if not all(parameter.requires_grad for parameter in agent.model.parameters()):
        return "a part of its language model does not learn"
    config = agent.config.model
    if config.trunk.kind == "gpt":
        with torch.device("meta"):
            made = ILQLModel(config)
        if _shapes(made) == _shapes(agent.model):
            return None
    return "its language model is not one that a description makes"


def reshaped(
    agent: ILQL, new_layer_prob: float, nodes: Sequence[int], draw: torch.Generator
) -> str:
    """Change an agent's networks, target and optimiser's moments; gives what was done.

    nodes: of which one says by how many F changes, in all layers.

    The number of layers stays within the agent's `layer_bounds`; the last is added, any removed.

    >>> from raffia.algorithms.ilql.agent import ILQL
    >>> small = {"vocab_size": 6, "n_layer": 1, "n_head": 2, "n_embd": 8, "max_layers": 2}
    >>> agent, draw = ILQL(None, small), torch.Generator().manual_seed(0)
    >>> reshaped(agent, 1.0, [16], draw), agent.net_config["n_layer"]
    ('1 -> 2 layers', 2)
    >>> reshaped(agent, 0.0, [16], draw), agent.net_config["dim_feedfwd"]
    ('32 -> 48 nodes', 48)
    """
    of_layer, more, at = torch.rand(3, generator=draw, dtype=torch.float64).tolist()
    count = nodes[int(torch.randint(len(nodes), (), generator=draw))]
    seed = int(torch.randint(2**62, (), generator=draw))
    trunk = agent.config.model.trunk
    if of_layer < new_layer_prob:
        shape, rename = _with_layers(trunk, agent.layer_bounds, more < 0.5, at)
        what = f"{trunk.n_layer} -> {shape.n_layer} layers"
    else:
        old = trunk.dim_feedfwd or 4 * trunk.n_embd
        new = old + count if more < 0.5 or old == 1 else max(1, old - count)
        shape, rename = replace(trunk, dim_feedfwd=new), _same
        what = f"{old} -> {new} nodes"
    if shape != trunk:
        _install(agent, replace(agent.config.model, trunk=shape), rename, seed)
    return what


def _with_layers(
    trunk: TrunkConfig,
    bounds: Mapping[str, int],
    more: bool,
    at: float,  # 0 to 1: which layer goes
) -> tuple[TrunkConfig, Rename]:
    num = trunk.n_layer
    may_grow = num < bounds.get("max_layers", num + 1)
    may_shrink = num > bounds.get("min_layers", 1)
    if may_grow and (more or not may_shrink):
        return replace(trunk, n_layer=num + 1), _same
    if not may_shrink:
        return trunk, _same
    gone = int(at * num)

    def rename(name: str) -> str:
        return LAYER.sub(lambda found: f"h.{int(found[1]) + (int(found[1]) >= gone)}.", name)

    return replace(trunk, n_layer=num - 1), rename


def _same(name: str) -> str:
    return name


@torch.no_grad()
def _install(agent: ILQL, config: ILQLModelConfig, rename: Rename, seed: int) -> None:
    settings, old = replace(agent.config, model=config), agent.learner_state()
    dtype, training, opt = next(agent.model.parameters()).dtype, agent.training, agent.opt
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ILQLModel(config).to(agent.device, dtype)
    agent.install(model, make_target(model), settings)
    agent.train(training)
    if opt is not None:
        agent.opt = ILQLLearner(settings).state_of(model)["opt"]
    new = agent.learner_state()
    for part in ("params", "buffers", "target", "opt"):
        _carry(old[part].flatten_keys("."), new[part].flatten_keys("."), rename)
    load_networks(model, agent.target, new)  # what the target has of the buffers


def _carry(old: TensorDict, new: TensorDict, rename: Rename) -> None:
    """Write what was into what is; of what is new, what writes into the residual stream is 0.

    An optimiser's moments are 0 where they are new.
    """
    for name, tensor in new.items():
        if name.endswith(WRITES):
            tensor.zero_()
        was = old.get(rename(name), None)
        if was is None:
            continue
        common = tuple(slice(min(sizes)) for sizes in zip(was.shape, tensor.shape, strict=True))
        tensor[common] = was[common]


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}
