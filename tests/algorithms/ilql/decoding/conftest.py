"""The small model of the oracle: three language models with different weights, so a mix-up shows.

`decode.json` and `scores.json` come from an independent restatement in
float64 of the formulas of Snell et al. (2022).
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from raffia.algorithms.ilql import ILQLModel, ILQLTarget
from raffia.lm.decoding.scorer import NextToken

from ..small import make_loss

HERE = Path(__file__).parent


@dataclass
class Oracle:
    model: ILQLModel
    target: ILQLTarget
    decode: list  # next-token scores, greedy and beam continuations
    utterances: list  # sums of forced utterances
    scores: dict  # of whole rows

    def evaluate(self, rows):
        """Outputs of the networks at the last token of each row, one by one, without a cache."""
        outputs = []
        for row in rows:
            tokens = torch.tensor([row])
            with torch.no_grad():
                trunk, policy = self.model.trunk(tokens)[:, -1], self.model.policy(tokens)[:, -1]
                target = self.target.trunk(tokens)[:, -1]
                q = torch.minimum(self.target.q1(target), self.target.q2(target))
                logits = self.model.policy.logits(policy)
                outputs.append((logits, q, self.model.v(trunk).squeeze(-1)))
        return NextToken(*(torch.cat(part) for part in zip(*outputs, strict=True)))


class Uncached:
    """A scorer that runs each text from its start for every token, one row at a time."""

    vocab_size, block_size, device = 35, 64, torch.device("cpu")

    def __init__(self, oracle):
        self.oracle, self.rows = oracle, []

    def start(self, prompts, needs, max_new_tokens):
        rows = Uncached(self.oracle)
        rows.rows = [list(prompt) for prompt in prompts]
        return rows, self.oracle.evaluate(rows.rows)

    def advance(self, tokens):
        for row, token in zip(self.rows, tokens.tolist(), strict=True):
            row.append(token)
        return self.oracle.evaluate(self.rows)

    def reorder(self, rows):
        self.rows = [list(self.rows[row]) for row in rows.tolist()]


@pytest.fixture(scope="session")
def oracle():
    loss = make_loss()  # three language models with different weights
    decode = json.loads((HERE / "decode.json").read_text())
    scores = json.loads((HERE / "scores.json").read_text())
    return Oracle(loss.model.eval(), loss.target, decode["decode"], decode["utterances"], scores)


@pytest.fixture
def uncached(oracle):
    return Uncached(oracle)
