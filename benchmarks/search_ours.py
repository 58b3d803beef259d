"""The worker of `benchmarks.search` that plans with raffia."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
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
)
from benchmarks.search_worker import Case, Shares, Stopwatch, serve
from raffia.algorithms.efficientzero.inference import fold
from raffia.algorithms.efficientzero.model import EfficientZeroModel, EfficientZeroModelMLP
from raffia.search import (
    GaussianSampler,
    RecurrentOutput,
    RootOutput,
    ValuePrefix,
    compiled,
    gumbel_policy,
    muzero_policy,
    sampled_policy,
)
from raffia.search.base import SearchMemory
from raffia.tensordict.tensordict import TensorDict

KERNELS = compiled.kernels
OBSERVATIONS = {"conv": CONV["observation_shape"], "sampled": (SAMPLED["observation_shape"],)}
SAMPLED_HERE: dict[str, Any] = {
    "action_space_size": 1,
    "activation": nn.GELU("tanh"),  # LightZero's default
    "last_linear_layer_init_zero": False,
}
POLICIES = {"muzero": muzero_policy, "gumbel": gumbel_policy}


class NullModel:
    """Says the same of every state, and keeps latent and LSTM state as they are."""

    def __init__(self, batch: int, actions: int):
        zeros, policy_logits = torch.zeros(batch), torch.zeros(batch, actions)
        self.output = RecurrentOutput(zeros, zeros, policy_logits)
        self.embedding = TensorDict(
            {
                "latent_state": torch.zeros(batch, LATENT),
                "reward_hidden_state": {
                    "h": torch.zeros(batch, LSTM),
                    "c": torch.zeros(batch, LSTM),
                },
            },
            batch_size=[batch],
        )

    def root(self, obs: Tensor) -> RootOutput:
        return RootOutput(self.output.prior_logits, self.output.value, self.embedding)

    def recurrent_fn(self, embedding: Any, action: Tensor) -> tuple[RecurrentOutput, Any]:
        return self.output, embedding


def model_of(case: Case) -> Any:
    torch.manual_seed(0)
    if case.model == "null":
        return NullModel(case.batch, case.actions)
    if case.model == "sampled":
        return fold(EfficientZeroModelMLP(**SAMPLED, **SAMPLED_HERE).eval())
    make, sizes = (
        (EfficientZeroModelMLP, MLP) if case.model == "mlp" else (EfficientZeroModel, CONV)
    )
    # Heads that start at zero would give the null model's tree.
    model = make(**sizes, action_space_size=case.actions, last_linear_layer_init_zero=False)
    num_parameters = sum(p.numel() for p in model.parameters())
    if case.actions == NUM_ACTIONS[case.model] and num_parameters != NUM_PARAMETERS[case.model]:
        raise ValueError(f"{num_parameters} parameters, not {NUM_PARAMETERS[case.model]}")
    return fold(model.eval())


class Watched:
    """A recurrent function, timed, also where it works in the search's memory."""

    def __init__(self, recurrent_fn: Any, watch: Stopwatch):
        self.recurrent_fn, self.watch = recurrent_fn, watch
        self.call = watch.timed("model", recurrent_fn)

    def __call__(self, embedding: Any, action: Tensor) -> tuple[RecurrentOutput, Any]:
        return self.call(embedding, action)

    def bind(self, memory: SearchMemory) -> Callable[[int], None] | None:
        if not hasattr(self.recurrent_fn, "bind"):
            return None
        step = self.recurrent_fn.bind(memory)
        return step and self.watch.timed("model", step)


class OurSearch:
    def __init__(self, case: Case):
        self.case = case
        self.model = model_of(case)
        shape = OBSERVATIONS.get(case.model, (OBSERVATION,))
        self.obs = torch.rand(case.batch, *shape, generator=torch.Generator().manual_seed(0))
        self.generator = torch.Generator().manual_seed(0)
        plan = self()
        visits = plan.tree.visits_of_root()
        if not (visits.sum(-1) == case.simulations).all() or not plan.root_value.isfinite().all():
            raise ValueError(f"visits {visits[:2].tolist()}, values {plan.root_value[:2].tolist()}")

    def __call__(self) -> Any:
        return self.search(self.model.root, self.model.recurrent_fn)

    def search(self, root: Callable[[Tensor], RootOutput], recurrent_fn: Any) -> Any:
        policy = partial(
            POLICIES[self.case.policy],
            num_simulations=self.case.simulations,
            discount=DISCOUNT,
            value_prefix=ValuePrefix(HORIZON),
            generator=self.generator,
        )
        with torch.no_grad():
            if self.case.model == "sampled":
                sampler, generator = GaussianSampler(self.case.actions), self.generator
                return sampled_policy(
                    root(self.obs),
                    recurrent_fn,
                    sampler=sampler,
                    policy=policy,
                    generator=generator,
                )
            return policy(root(self.obs), recurrent_fn)

    def shares(self) -> Shares:
        watch = Stopwatch()
        root = watch.timed("model", self.model.root)
        recurrent_fn = Watched(self.model.recurrent_fn, watch)
        steps = {
            name: watch.timed("tree", kernel)
            for name, kernel in vars(KERNELS.steps).items()
            if callable(kernel) and not name.startswith("_")
        }
        watched = SimpleNamespace(steps=SimpleNamespace(**steps), record=KERNELS.record)
        with mock.patch.object(compiled, "kernels", watched):
            # Watched, the simulations are a loop in Python; else, with the MLP, a compiled one.
            return watch.shares(lambda: self.search(root, recurrent_fn), plain=self.plainly)

    def plainly(self) -> Any:
        with mock.patch.object(compiled, "kernels", KERNELS):
            return self()


def versions() -> dict[str, str]:
    import raffia

    return {"raffia": raffia.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(OurSearch, versions)
