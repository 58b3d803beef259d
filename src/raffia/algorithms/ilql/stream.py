"""`stream`: the tokens of one answer as they come, for chat and for the picture of the values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raffia.algorithms.ilql.generate import chooser
from raffia.algorithms.ilql.model import ILQLModel, ILQLTarget
from raffia.algorithms.ilql.model_scorer import ModelScorer, evaluating
from raffia.lm.decoding.config import DecodeConfig
from raffia.lm.decoding.generations import Stop
from raffia.lm.decoding.request import Request
from raffia.lm.decoding.steps import token_steps
from raffia.lm.tokenizers.tokenizer import Tokenizer


class StreamedToken(NamedTuple):
    """A token, and its scores; None where its networks were not run.

    >>> StreamedToken(token=5, log_prob=-0.1, advantage=0.5, v=1.0, value=1.5).token
    5
    """

    token: int
    log_prob: float  # under the perturbed policy
    advantage: float | None  # min target Q - V
    v: float | None  # V before the token
    value: float | None  # min target Q of the token


def stream(
    model: ILQLModel,
    target: ILQLTarget | None,  # None: no values are wanted (include_adv=False)
    prompt: Sequence[int],
    config: DecodeConfig,
    *,
    generator: torch.Generator | None = None,  # of sampling; None: torch's own
    tokenizer: Tokenizer | None = None,  # for the tokens of padding and of the end of an utterance
    stop: Stop | None = None,  # None: the tokenizer's end; without one the limits only
    pad_token: int | None = None,  # never generated; None: the tokenizer's
) -> Iterator[StreamedToken]:
    """The same tokens as `generate` gives at once; leave the loop to stop early.

    >>> from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
    >>> from raffia.algorithms.ilql.model import make_target
    >>> trunk = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
    >>> model = ILQLModel(ILQLModelConfig(trunk=trunk))
    >>> answer = stream(model, make_target(model), [1, 2], DecodeConfig(max_new_tokens=3))
    >>> len([step.token for step in answer])
    3
    """
    if config.num_beams is not None and config.num_beams > 1:
        raise ValueError(
            f"num_beams={config.num_beams}: which beam is the best is known at its end only; "
            "stream with num_beams=1 (greedy) or None (sampling)"
        )
    if config.rerank is not None or config.num_generations > 1:
        raise ValueError(
            f"num_generations={config.num_generations} and rerank={config.rerank!r} are of several "
            "texts, and a stream is one: use generate, or num_generations=1 and rerank=None"
        )
    request = Request.of(
        *(ModelScorer(model, target), [prompt], config),
        tokenizer=tokenizer,
        stop=stop,
        pad_token=pad_token,
    )
    return _stream(model, target, request, generator)


def _stream(
    model: ILQLModel,
    target: ILQLTarget | None,
    request: Request,
    generator: torch.Generator | None,
) -> Iterator[StreamedToken]:
    steps = token_steps(request, chooser(request, generator))
    with evaluating(model, target):
        for step in steps:
            yield StreamedToken(
                token=int(step.token),
                log_prob=float(step.log_prob),
                advantage=_number(step.advantage),
                v=_number(step.v),
                value=_number(step.value),
            )


def _number(entry: Tensor | None) -> float | None:
    return None if entry is None else float(entry)
