"""The worker of `benchmarks.ilql` that does our part."""

import resource
import time
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from benchmarks.ilql_cases import (
    ALPHA,
    CQL_WEIGHT,
    LEARNING_RATE,
    SIZES,
    dialogues,
    prompts,
)
from benchmarks.search_worker import Case, serve
from raffia.algorithms.ilql.config import (
    DecodeConfig,
    ILQLConfig,
    ILQLLossConfig,
    ILQLModelConfig,
    OptimizerConfig,
    TargetConfig,
    TrunkConfig,
)
from raffia.algorithms.ilql.generate import generate
from raffia.algorithms.ilql.learner import ILQLLearner
from raffia.algorithms.ilql.model import ILQLModel, make_target
from raffia.tensordict.tensordict import TensorDict


def networks(case: Case) -> ILQLModelConfig:
    size = SIZES[case.model]
    trunk = TrunkConfig(
        vocab_size=size.vocab_size,
        n_layer=size.num_layers,
        n_head=size.num_heads,
        n_embd=size.width,
        block_size=size.block_size,
    )
    config = ILQLModelConfig(trunk=trunk)
    if case.policy.endswith("three trunks"):
        config = replace(config, policy="separate", target="trunk")
    return config


def batch_of(model: str) -> TensorDict:
    """The dialogues, padded at the right."""
    rows = dialogues(model)

    def padded(parts: list[Tensor], fill: float | bool = 0) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=fill)

    none = torch.zeros(1, dtype=torch.bool)
    ends = [torch.cat([torch.zeros(len(row.actions), dtype=torch.bool), ~none]) for row in rows]
    return TensorDict(
        tokens=padded([torch.tensor(row.tokens) for row in rows]),
        attn_mask=padded([torch.ones(len(row.tokens), dtype=torch.bool) for row in rows]),
        action_idxs=padded([torch.tensor(row.actions) for row in rows]),
        state_idxs=padded([torch.tensor(row.states) for row in rows]),
        rewards=padded([torch.tensor(row.rewards) for row in rows]),
        terminals=padded(ends, fill=True),
        action_mask=padded([torch.ones(len(row.actions), dtype=torch.bool) for row in rows]),
        index=torch.arange(len(rows)),
        batch_size=[len(rows)],
    )


class Update:
    """case: its model's batch. The gradient's norm is a metric; nothing is clipped by it."""

    def __init__(self, case: Case):
        config = ILQLConfig(
            model=networks(case),
            loss=ILQLLossConfig(cql_weight=CQL_WEIGHT),
            target=TargetConfig(alpha=ALPHA),
            optimizer=OptimizerConfig(
                learning_rate=LEARNING_RATE, weight_decay=0.0, max_grad_norm=None
            ),
        )
        self.learner = ILQLLearner(config)
        self.state = self.learner.init(0)
        self.batch = batch_of(case.model)

    def __call__(self) -> Any:
        update, metrics = self.learner.grads(self.state, self.batch)
        self.state = self.learner.apply(self.state, update)
        return metrics["loss"].item()

    def shares(self) -> dict[str, float]:
        """All of it is the model."""
        return {"model": 1.0}


class Generation:
    """case: as "batch" the prompts, as "simulations" the beams, 0 to sample; top-k as "actions"."""

    def __init__(self, case: Case):
        torch.manual_seed(0)
        self.model = ILQLModel(networks(case))
        self.target = make_target(self.model)
        self.prompts = prompts(case.model, case.batch)
        self.config = DecodeConfig(
            max_new_tokens=SIZES[case.model].new,
            num_beams=case.simulations or None,
            num_generations=case.simulations or 1,
            top_k=case.actions or None,
        )
        self.draws = torch.Generator().manual_seed(0)

    def __call__(self) -> Any:
        texts = generate(
            self.model, self.target, self.prompts, self.config, generator=self.draws, pad_token=0
        )
        return texts.tokens

    def shares(self) -> dict[str, float]:
        """All of it is the model."""
        return {"model": 1.0}


def prepare(case: Case) -> Any:
    return Update(case) if case.policy.startswith("train") else Generation(case)


def versions() -> dict[str, str]:
    """Versions of the timed packages."""
    return {name: version(name) for name in ("torch",)}


def peak() -> list[int]:
    """Bytes that this process had at most, and those of the imports."""
    return [1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, IMPORTED]


def rate(rows: int = 1840, width: int = 512, depth: int = 512) -> float:
    """Products and sums of a matrix product in a CPU second: what a floor is reckoned by."""
    x, y = torch.rand(rows, depth), torch.rand(depth, width)
    start = time.process_time()
    for _ in range(10):
        x @ y
    return 10 * 2 * rows * width * depth / (time.process_time() - start)


if __name__ == "__main__":
    torch.set_num_threads(1)
    IMPORTED = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    serve(prepare, versions, peak=peak, rate=rate)
