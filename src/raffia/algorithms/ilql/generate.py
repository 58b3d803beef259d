"""The texts of the agent after prompts: drawn, greedily, by beam search or planned.

`stream` gives the tokens of one answer as they come, for chat and for the picture of the values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from raffia.algorithms.ilql.model import ILQLModel, ILQLTarget
from raffia.algorithms.ilql.model_scorer import ModelScorer, evaluating
from raffia.algorithms.ilql.token_planning import planned
from raffia.lm.decoding.beam import beam_search
from raffia.lm.decoding.config import DecodeConfig
from raffia.lm.decoding.generations import Generations, Request, Stop, rerank
from raffia.lm.decoding.sampling import (
    Choose,
    best_token,
    drawing,
    gathered,
    new_seeds,
    token_steps,
)
from raffia.lm.tokenizers.tokenizer import Tokenizer


def generate(
    model: ILQLModel,
    target: ILQLTarget | None,  # None: no values are wanted (include_adv=False)
    prompts: Sequence[Sequence[int]],  # tokens; of different lengths
    config: DecodeConfig,
    *,
    generator: torch.Generator | None = None,  # of sampling; None: torch's own
    num_generations: int | None = None,  # None: the config's
    tokenizer: Tokenizer | None = None,  # for the tokens of padding and of the end of an utterance
    stop: Stop | None = None,  # None: the tokenizer's end; without one the limits only
    pad_token: int | None = None,  # never generated; None: the tokenizer's
) -> Generations:
    """The agent's texts after the prompts; the model is not changed, and its mode is as before.

    With `config.plan` a token costs one step of the networks and `num_simulations` further ones, in
    which all rows go together; the tokens of `stop` end a branch of the tree, its condition only
    the text.

    >>> from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
    >>> from raffia.algorithms.ilql.model import make_target
    >>> trunk = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
    >>> model = ILQLModel(ILQLModelConfig(trunk=trunk))
    >>> config = DecodeConfig(adv_weight=4.0, max_new_tokens=5)
    >>> texts = generate(model, make_target(model), [[1, 2, 3], [4]], config, num_generations=2,
    ...                  stop=Stop(tokens=(9,)), generator=torch.Generator().manual_seed(0))
    >>> texts.log_prob.shape, len(texts.best())
    (torch.Size([2, 2]), 2)
    """
    if num_generations is not None:
        config = replace(config, num_generations=num_generations)
    with evaluating(model, target), torch.no_grad():
        request = Request.of(
            *(ModelScorer(model, target), prompts, config),
            tokenizer=tokenizer,
            stop=stop,
            pad_token=pad_token,
        )
        return decode(request, generator)


def decode(request: Request, generator: torch.Generator | None = None) -> Generations:
    """The texts of a request to any scorer.

    >>> from raffia.lm.decoding.scorer import NextToken
    >>> class Parrot:  # wants the last token again, and has nothing to remember
    ...     vocab_size, block_size, device = 5, 4, torch.device("cpu")
    ...     def start(self, prompts, needs, max_new_tokens):
    ...         return self, self.advance(torch.tensor([prompt[-1] for prompt in prompts]))
    ...     def advance(self, tokens):
    ...         logits = 10.0 * torch.nn.functional.one_hot(tokens, 5)
    ...         return NextToken(logits, None, None)
    ...     def reorder(self, rows):
    ...         pass
    >>> greedy = DecodeConfig(include_adv=False, num_beams=1)
    >>> decode(Request(Parrot(), [[3], [1, 4]], greedy)).best()
    [[3, 3, 3], [4, 4]]
    """
    config, num = request.config, len(request.prompts)
    if not num:
        nothing = torch.zeros(0, config.num_generations)
        return Generations(tokens=[], log_prob=nothing, stopped=nothing.bool())
    if config.num_beams is not None and config.num_beams > 1:
        texts = beam_search(request).first(config.num_generations)
    else:
        steps = token_steps(request, chooser(request, generator))
        texts = gathered(list(steps), num, config.num_generations)
    return texts if config.rerank is None else rerank(texts, config.rerank)


def chooser(request: Request, generator: torch.Generator | None = None) -> Choose:
    """Draws; the best token where the config wants one beam; what a search finds where it plans.

    >>> chooser(Request(None, [[1]], DecodeConfig(num_beams=1))) is best_token
    True
    """
    config = request.config
    if config.num_beams is not None:
        return best_token
    seeds = new_seeds(len(request.prompts) * config.num_generations, generator)
    seeds = seeds.to(request.scorer.device)
    return planned(request, seeds) if config.plans else drawing(seeds, int(request.limits().max()))


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
    """Yield the tokens that `generate` would return together; leave the loop to stop early.

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
            f"num_beams={config.num_beams} cannot be streamed, because the best beam is known "
            "only at the end: stream with num_beams=1 (greedy) or None (sampling)"
        )
    if config.rerank is not None or config.num_generations > 1:
        raise ValueError(
            f"num_generations={config.num_generations} and rerank={config.rerank!r} produce "
            "several texts, but a stream is one: call generate, or set num_generations=1 and "
            "rerank=None"
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
