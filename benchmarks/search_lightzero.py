"""The worker of `benchmarks.search` that plans with LightZero's EfficientZero and its C++ tree.

Runs in the virtual environment that LightZero lives in. The work is what LightZero's policy does
when it collects: initial inference, decoding, Dirichlet noise, the search, visits and values; not
the choice of an action for each root, whose entropies alone take LightZero longer than the tree.
"""

from collections.abc import Callable
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from easydict import EasyDict
from lzero.mcts.tree_search import mcts_ctree, mcts_ctree_sampled
from lzero.model.common import EZNetworkOutput
from lzero.model.efficientzero_model import EfficientZeroModel
from lzero.model.efficientzero_model_mlp import EfficientZeroModelMLP
from lzero.model.sampled_efficientzero_model_mlp import SampledEfficientZeroModelMLP
from lzero.policy import InverseScalarTransform
from torch import Tensor, nn

from benchmarks.search_models import (
    CONV,
    DISCOUNT,
    HORIZON,
    LATENT,
    LSTM,
    MLP,
    NUM_ACTIONS,
    NUM_PARAMETERS,
    OBSERVATION,
    SAMPLED,
    SUPPORT,
)
from benchmarks.search_worker import Case, Shares, Stopwatch, serve

ALPHA, NOISE_WEIGHT = 0.3, 0.25
CALLS = ("batch_traverse", "batch_backpropagate", "Roots", "MinMaxStatsList", "ResultsWrapper")
ROOTS_CALLS = ("prepare", "get_distributions", "get_values")


class NullModel(nn.Module):
    """Says the same of every state, and keeps latent and LSTM state as they are."""

    def __init__(self, batch: int, actions: int):
        super().__init__()
        self.outputs = (torch.zeros(batch, 1), torch.zeros(batch, 1), torch.zeros(batch, actions))
        self.latent = torch.zeros(batch, LATENT)
        self.hidden = (torch.zeros(1, batch, LSTM), torch.zeros(1, batch, LSTM))

    def initial_inference(self, obs: Tensor) -> EZNetworkOutput:
        value, _, policy_logits = self.outputs
        return EZNetworkOutput(value, [0.0] * len(obs), policy_logits, self.latent, self.hidden)

    def recurrent_inference(self, latent: Tensor, hidden: Any, action: Tensor) -> EZNetworkOutput:
        return EZNetworkOutput(*self.outputs, latent, hidden)


class NormalisedRepresentation(nn.Module):
    """The MLP's representation as the repository has it since; release 0.2.0 ends in a SimNorm."""

    def __init__(self, released: nn.Module, width: int):
        super().__init__()
        self.fc_representation = released.fc_representation
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc_representation(x))


def mlp_model(**sizes: Any) -> nn.Module:
    model = EfficientZeroModelMLP(**sizes)
    if not hasattr(model.representation_network, "norm"):
        model.representation_network = NormalisedRepresentation(
            model.representation_network, sizes["latent_state_dim"]
        )
    return model


def model_of(case: Case) -> nn.Module:
    torch.manual_seed(0)
    if case.model == "null":
        return NullModel(case.batch, case.actions)
    if case.model == "sampled":
        return SampledEfficientZeroModelMLP(
            **SAMPLED,
            action_space_size=1,
            num_of_sampled_actions=case.actions,
            last_linear_layer_init_zero=False,
        ).eval()
    make, sizes = (mlp_model, MLP) if case.model == "mlp" else (EfficientZeroModel, CONV)
    # Heads that start at zero would give the null model's tree.
    model = make(**sizes, action_space_size=case.actions, last_linear_layer_init_zero=False)
    num_parameters = sum(p.numel() for p in model.parameters())
    if case.actions == NUM_ACTIONS[case.model] and num_parameters != NUM_PARAMETERS[case.model]:
        raise ValueError(f"{num_parameters} parameters, not {NUM_PARAMETERS[case.model]}")
    return model.eval()


def config(case: Case) -> EasyDict:
    return EasyDict(
        num_simulations=case.simulations,
        discount_factor=DISCOUNT,
        lstm_horizon_len=HORIZON,
        device="cpu",
        env_type="not_board_games",
        model={"support_scale": SUPPORT // 2, "categorical_distribution": case.model != "null"},
    )


class LightZeroSearch:
    tree, calls = mcts_ctree, "tree_efficientzero"

    def __init__(self, case: Case):
        self.case = case
        self.model = model_of(case)
        observations = {"conv": CONV["observation_shape"], "sampled": (3,)}
        shape = observations.get(case.model, (OBSERVATION,))
        self.obs = torch.rand(case.batch, *shape, generator=torch.Generator().manual_seed(0))
        self.action_mask = [[1] * case.actions] * case.batch
        self.to_play = [-1] * case.batch
        self.cfg = config(case)
        self.mcts = self.make_search()
        self.decode = InverseScalarTransform(
            self.cfg.model.support_scale, "cpu", self.cfg.model.categorical_distribution
        )

    def make_search(self) -> Any:
        return mcts_ctree.EfficientZeroMCTSCtree(self.cfg)

    def make_roots(self) -> Any:
        legal = [[a for a, x in enumerate(mask) if x == 1] for mask in self.action_mask]
        return self.mcts.roots(self.case.batch, legal)

    def results(self, roots: Any, calls: Any) -> Any:
        return calls.get_distributions(), calls.get_values()

    def __call__(self) -> Any:
        return self.search(self.model, self.decode, lambda roots: roots)

    def search(self, model: Any, decode: Any, watched: Callable[[Any], Any]) -> Any:
        batch = self.case.batch
        with torch.no_grad():
            output = model.initial_inference(self.obs)
            values = decode(output.value).detach().cpu().numpy()
            latents = output.latent_state.detach().cpu().numpy()
            hidden = tuple(x.detach().cpu().numpy() for x in output.reward_hidden_state)
            policy_logits = output.policy_logits.detach().cpu().numpy().tolist()
            noises = [
                np.random.dirichlet([ALPHA] * self.case.actions).astype(np.float32).tolist()
                for _ in range(batch)
            ]
            roots = self.make_roots()
            calls = watched(roots)
            calls.prepare(NOISE_WEIGHT, noises, output.value_prefix, policy_logits, self.to_play)
            self.mcts.search(roots, model, latents, hidden, self.to_play)
            return *self.results(roots, calls), values

    def shares(self) -> Shares:
        watch = Stopwatch()
        model = SimpleNamespace(
            eval=self.model.eval,
            initial_inference=watch.timed("model", self.model.initial_inference),
            recurrent_inference=watch.timed("model", self.model.recurrent_inference),
        )
        tree = SimpleNamespace(
            **{n: watch.timed("tree", getattr(getattr(self.tree, self.calls), n)) for n in CALLS}
        )

        def watched(roots: Any) -> SimpleNamespace:
            calls = {name: watch.timed("tree", getattr(roots, name)) for name in ROOTS_CALLS}
            return SimpleNamespace(**calls)

        decode = watch.timed("model", self.decode)
        with (
            mock.patch.object(self.tree, self.calls, tree),
            mock.patch.object(self.mcts, "inverse_scalar_transform_handle", decode),
        ):
            return watch.shares(lambda: self.search(model, decode, watched))


class LightZeroSampledSearch(LightZeroSearch):
    """Sampled EfficientZero's, over actions of one number that are drawn at each node."""

    tree, calls = mcts_ctree_sampled, "tree_sampled_efficientzero"

    def make_search(self) -> Any:
        self.cfg.model.continuous_action_space = True
        return mcts_ctree_sampled.SampledEfficientZeroMCTSCtree(self.cfg)

    def make_roots(self) -> Any:
        num = self.case.actions
        return self.mcts.roots(self.case.batch, [[-1] * num] * self.case.batch, 1, num, True)

    def results(self, roots: Any, calls: Any) -> Any:
        return calls.get_distributions(), calls.get_values(), roots.get_sampled_actions()


def prepare(case: Case) -> LightZeroSearch:
    if case.policy != "muzero":
        raise ValueError(f"LightZero's EfficientZero has no {case.policy} policy")
    return LightZeroSampledSearch(case) if case.model == "sampled" else LightZeroSearch(case)


def as_lists(x: Tensor) -> dict[str, Any]:
    return {"dtype": str(x.dtype).removeprefix("torch."), "data": x.tolist()}


def reference(kind: str, sizes: dict[str, Any], released: bool) -> dict[str, Any]:
    """A small model with traces of training, and what it gives: all as lists.

    released: of MLPs, the representation as in release 0.2.0.
    """
    torch.manual_seed(0)
    make = {"conv": EfficientZeroModel, "mlp": EfficientZeroModelMLP if released else mlp_model}
    model = make[kind](**sizes, last_linear_layer_init_zero=False)
    shape, batch = sizes["observation_shape"], 5
    size = [batch, *shape] if kind == "conv" else [batch, shape]
    action = [torch.arange(batch) % sizes["action_space_size"] for _ in range(2)]
    with torch.no_grad():
        for _ in range(3):  # means and variances that normalisation remembers
            start = model.initial_inference(torch.rand(size))
            step = model.recurrent_inference(
                start.latent_state, start.reward_hidden_state, action[0]
            )
            model.project(step.latent_state)
        model.eval()
        obs = torch.rand(size)
        root = model.initial_inference(obs)
        first = model.recurrent_inference(root.latent_state, root.reward_hidden_state, action[0])
        second = model.recurrent_inference(
            first.latent_state, first.reward_hidden_state, action[1].flip(0)
        )
        projected = model.project(second.latent_state)
    results = {"projection": projected}
    for name, output in (("root", root), ("first", first), ("second", second)):
        h, c = output.reward_hidden_state
        results |= {f"{name} latent": output.latent_state, f"{name} h": h, f"{name} c": c}
        results |= {f"{name} value": output.value, f"{name} policy": output.policy_logits}
    results |= {f"{n} prefix": o.value_prefix for n, o in (("first", first), ("second", second))}
    return {
        "state": {name: as_lists(x) for name, x in model.state_dict().items()},
        "obs": as_lists(obs),
        "actions": [as_lists(action[0]), as_lists(action[1].flip(0))],
        "results": {name: as_lists(x) for name, x in results.items()},
    }


def versions() -> dict[str, str]:
    names = ("LightZero", "DI-engine", "torch", "numpy")
    return {name: version(name) for name in names}


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(prepare, versions, reference=reference)
