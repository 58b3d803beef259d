"""The worker of `benchmarks.ilql` that does AgileRL's part, in its own environment.

An update is put together as its training script has it: its loss, backward pass, its optimiser and
its soft update. Its beam search passes its model an argument that the model does not have and so
raises TypeError; `Tolerant` drops the argument, or there would be nothing to time. What it gives is
wrong all the same: its cached steps attend to the first key only.
"""

import resource
from importlib.metadata import version
from typing import Any

import torch
from agilerl.algorithms.ilql import ILQL, ILQL_Policy
from agilerl.data.rl_data import ConstantTokenReward, DataPoint, RL_Dataset
from agilerl.data.tokenizer import Tokenizer
from torch import nn

from benchmarks.ilql_cases import (
    ALPHA,
    CQL_WEIGHT,
    LEARNING_RATE,
    PROMPT,
    SIZES,
    Dialogue,
    dialogues,
    prompts,
)
from benchmarks.search_worker import Case, serve


class Words(Tokenizer):
    """One character for each token."""

    def __init__(self, num: int):
        super().__init__(
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            boa_token_id=3,
            eoa_token_id=4,
            eod_token_id=5,
        )
        self.words = [chr(0x4E00 + number) for number in range(num)]
        self.numbers = {word: number for number, word in enumerate(self.words)}

    def encode(self, str_: Any, **kwargs: Any) -> Any:
        if not isinstance(str_, str):
            pairs = [self.encode(text) for text in str_]
            return [tokens for tokens, _ in pairs], [mask for _, mask in pairs]
        return [self.numbers[word] for word in str_], [1] * len(str_)

    def decode(self, tokens: Any, **kwargs: Any) -> Any:
        if tokens and not isinstance(tokens[0], int):
            return [self.decode(row) for row in tokens]
        return "".join(self.words[token] for token in tokens)

    def num_tokens(self) -> int:
        return len(self.words)

    def id_to_token(self, id_: int) -> str:
        return self.words[id_]

    def token_to_id(self, token: str) -> int:
        return self.numbers[token]

    def get_vocab(self) -> list[str]:
        return self.words


class Rows(RL_Dataset):
    """The data set that gives its model sizes and tokens."""

    def __iter__(self) -> Any:
        return iter(())


class Tolerant(ILQL):
    """Its model, which does without an argument that its beam search passes."""

    def forward(self, *args: Any, is_causal: bool | None = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def make_model(case: Case) -> ILQL:
    torch.manual_seed(0)
    size = SIZES[case.model]
    longest = size.longest if case.policy.startswith("train") else PROMPT + size.new
    config = {
        "arch": "gpt",
        "vocab_size": size.vocab_size,
        "n_layer": size.num_layers,
        "n_embd": size.width,
        "n_head": size.num_heads,
        "dim_feedfwd": 4 * size.width,
        "block_size": size.block_size,
        "activation": "GELU",
        "dropout": 0.0,
        "layer_norm_eps": 1e-5,
        "min_layers": 1,
        "max_layers": 16,
        "bias": True,
    }
    rows = Rows(Words(size.vocab_size), ConstantTokenReward(0.0), longest)
    return Tolerant(rows, net_config=config, lr=LEARNING_RATE, alpha=ALPHA)


def point(row: Dialogue) -> DataPoint:
    """Whole utterances are not looked at."""
    terminals = [0] * len(row.actions) + [1]
    parts = row.states, row.actions, row.rewards, terminals
    return DataPoint("", row.tokens, *parts, *parts)


class Update:
    """case: its model's batch; see the head of this file."""

    def __init__(self, case: Case):
        self.model = make_model(case)
        self.model.train()
        self.batch = [point(row) for row in dialogues(case.model)]

    def __call__(self) -> Any:
        model = self.model
        loss, *_ = model.get_loss(
            self.batch,
            awac_weight=1.0,
            v_loss_weight=1.0,
            q_loss_weight=1.0,
            cql_loss_weight=CQL_WEIGHT,
        )
        model.optimizer.zero_grad()
        loss.backward()
        model.optimizer.step()
        model.soft_update()
        return loss.item()

    def shares(self) -> dict[str, float]:
        """All of it is the model."""
        return {"model": 1.0}


class Generation:
    """case: as "batch" the prompts, as "simulations" the beams, 0 to sample; top-k as "actions"."""

    def __init__(self, case: Case):
        self.model = make_model(case)
        self.model.eval()
        self.policy = ILQL_Policy(self.model, kind="beam" if case.simulations else "sample")
        tokens = torch.tensor(prompts(case.model, case.batch))
        places = torch.zeros(case.batch, 1, dtype=torch.long)
        self.inputs = tokens, torch.ones_like(tokens), places, places
        self.more: dict[str, Any] = {"exp_adv": True, "adv_weight": 1.0}
        if case.simulations:
            self.more["beam_width"] = case.simulations
        if case.actions:
            self.more["top_k"] = case.actions

    @torch.no_grad()
    def __call__(self) -> Any:
        make = self.policy.beam_raw if "beam_width" in self.more else self.policy.sample_raw
        texts, *_ = make(*self.inputs, lambda text: False, **self.more)
        return texts

    def shares(self) -> dict[str, float]:
        """All of it is the model."""
        return {"model": 1.0}


def prepare(case: Case) -> Any:
    return Update(case) if case.policy.startswith("train") else Generation(case)


def versions() -> dict[str, str]:
    """Versions of the timed packages."""
    return {name: version(name) for name in ("agilerl", "torch")}


def peak() -> list[int]:
    """Bytes that this process had at most, and those of the imports."""
    return [1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, IMPORTED]


def num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


if __name__ == "__main__":
    torch.set_num_threads(1)
    IMPORTED = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    serve(prepare, versions, peak=peak)
