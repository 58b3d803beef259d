"""Learners whose populations are tested, and batches for them."""

import torch

from raffia.algorithms.efficientzero.config import (
    EfficientZeroConfig,
    LossConfig,
    ModelConfig,
    TargetConfig,
)
from raffia.algorithms.efficientzero.config import OptimizerConfig as EfficientZeroOptimizer
from raffia.algorithms.efficientzero.learner import EfficientZeroLearner
from raffia.algorithms.ilql.config import (
    ILQLConfig,
    ILQLLossConfig,
    ILQLModelConfig,
    OptimizerConfig,
    TrunkConfig,
)
from raffia.algorithms.ilql.learner import ILQLLearner
from raffia.envs.env import Discrete, EnvSpec
from raffia.functional.gradients import global_norm, value_and_grad
from raffia.functional.optim import adamw
from raffia.tensordict.tensordict import TensorDict


def by_name(named):
    """A tree of tensors, by their dotted names."""
    return TensorDict(dict(named)).unflatten_keys(".").detach().clone()


P, B, K, A = 3, 8, 2, 3


class Regression:
    """Fits y by a network that may have BatchNorm; its priorities are the errors."""

    def __init__(self, norm: bool = True) -> None:
        layers = [torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Tanh()]
        if not norm:
            layers.pop(1)
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(5, 1))
        self.optimizer = adamw()

    def init(self, seed):
        draw = torch.Generator().manual_seed(seed)
        params = by_name(self.net.named_parameters())
        params = params.apply(lambda p: torch.randn(p.shape, generator=draw))
        hyper = TensorDict(learning_rate=torch.tensor(0.01), scale=torch.tensor(1.0))
        state = {"params": params, "buffers": by_name(self.net.named_buffers()), "hyper": hyper}
        return TensorDict(**state, opt=self.optimizer.init(params), step=torch.tensor(0))

    def grads(self, state, batch):
        def loss(params):
            buffers = state["buffers"].clone()
            named = {**params.flatten_keys("."), **buffers.flatten_keys(".")}
            out = torch.func.functional_call(self.net, named, batch["x"]).squeeze(-1)
            error = state["hyper", "scale"] * (out - batch["y"])
            return error.square().mean(), {"error": error.abs(), "buffers": buffers}

        grads, (value, aux) = value_and_grad(loss, state["params"])
        metrics = TensorDict(loss=value, priority=aux["error"], grad_norm=global_norm(grads))
        metrics["of"] = TensorDict(largest=aux["error"].max())
        return TensorDict(grads=grads, buffers=aux["buffers"]), metrics

    def apply(self, state, update):
        rate = state["hyper", "learning_rate"]
        trees = state["params"], update["grads"], state["opt"]
        params, opt = self.optimizer.update(*trees, learning_rate=rate)
        new = {"params": params, "opt": opt, "buffers": update["buffers"]}
        return TensorDict({**new, "hyper": state["hyper"], "step": state["step"] + 1})


def regression_batch(*size, seed=1):
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(*size, 3, generator=draw), torch.randn(*size, generator=draw)
    return TensorDict(x=x, y=y, batch_size=size)


def efficientzero(norm_type="BN", optimizer="adamw"):
    sizes = {"latent_state_dim": 6, "lstm_hidden_size": 5, "num_channels": 4}
    heads = {"head_hidden_channels": (4,), "proj_hid": 7, "proj_out": 8, "pred_hid": 6}
    values = {"reward_support_range": (-3, 4, 1), "value_support_range": (-4, 5, 1)}
    norms = {"norm_type": norm_type, "projection_norm_type": norm_type}
    config = EfficientZeroConfig(
        model=ModelConfig(**sizes, **heads, **values, **norms, downsample=False, pred_out=8),
        loss=LossConfig(unroll_steps=K),
        targets=TargetConfig(target_interval=2),
        optimizer=EfficientZeroOptimizer(name=optimizer, learning_rate=0.02, warmup_fraction=0.0),
    )
    spec = EnvSpec(observation_shape=(4,), action=Discrete(A))
    return EfficientZeroLearner(spec, config, num_updates=50)


def efficientzero_batch(*size, seed=1):
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*size, *shape, generator=draw)

    masks = ("policy_mask", "value_mask", "value_prefix_mask", "consistency_mask")
    return TensorDict(
        frames=normal(1 + K, 4),
        action=torch.randint(A, (*size, K), generator=draw),
        target_policy=normal(K + 1, A).softmax(-1),
        target_value=3 * normal(K + 1),
        target_value_prefix=normal(K),
        weight=torch.rand(size, generator=draw),
        index=torch.arange(size[-1]).expand(size),
        **{m: torch.ones(*size, K + (m in ("policy_mask", "value_mask"))) for m in masks},
        batch_size=size,
    )


def ilql():
    sizes = {"vocab_size": 11, "n_layer": 1, "n_head": 2, "n_embd": 8, "dim_feedfwd": 12}
    trunk = TrunkConfig(**sizes, block_size=10, dropout=0.0)
    config = ILQLConfig(
        model=ILQLModelConfig(trunk=trunk),
        loss=ILQLLossConfig(beta=0.5, cql_weight=0.2, dm_weight=0.1, dm_margin=0.1),
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )
    return ILQLLearner(config)


def ilql_batch(*size, seed=1):
    """Whole rows of 7 tokens, of which every second one is an action."""
    draw = torch.Generator().manual_seed(seed)
    actions = torch.tensor([0, 2, 4])
    return TensorDict(
        tokens=torch.randint(11, (*size, 7), generator=draw),
        attn_mask=torch.ones(*size, 7, dtype=torch.bool),
        action_idxs=actions.expand(*size, 3),
        state_idxs=torch.tensor([0, 2, 4, 6]).expand(*size, 4),
        rewards=torch.randn(*size, 3, generator=draw),
        terminals=torch.tensor([False, False, False, True]).expand(*size, 4),
        action_mask=torch.ones(*size, 3, dtype=torch.bool),
        index=torch.arange(size[-1]).expand(size),
        batch_size=size,
    )


LEARNERS = {
    "batch_norm": (Regression, regression_batch),
    "efficientzero": (efficientzero, efficientzero_batch),
    "ilql": (ilql, ilql_batch),
}
