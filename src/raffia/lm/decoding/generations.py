"""The input of a decoding, `Request`, and its output, `Generations`: texts and scores.

A request says how the texts behind prompts are decoded and what ends them; generations have the
model's scores of them, by which they are put in order.

Legend: P prompts, G texts for each, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from raffia.lm.decoding.config import DecodeConfig
from raffia.lm.decoding.scorer import Choice, NextToken, Scorer
from raffia.lm.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class Stop:
    """The conditions that complete a text, in addition to a full context and `max_new_tokens`.

    tokens: those that end it, the agent's end of an utterance above all; they are part of it.
    condition: called after each token with all that were generated in this text.

    >>> Stop(tokens=(30,), condition=lambda tokens: tokens[-2:] == [7, 7]).tokens
    (30,)
    """

    tokens: Sequence[int] = ()
    condition: Callable[[list[int]], bool] | None = None

    def ended(
        self,
        token: Tensor,  # int64 [R], the newest of each text
        texts: Callable[[], list[list[int]]],  # all that were generated, R texts
    ) -> Tensor:  # bool [R]
        """A mask of the texts that are complete.

        >>> Stop(tokens=(30, 31)).ended(torch.tensor([30, 3, 31]), lambda: [])
        tensor([ True, False,  True])
        """
        done = self.ended_by_token(token)
        if self.condition is not None:
            wanted = [bool(self.condition(text)) for text in texts()]
            done |= torch.tensor(wanted, device=token.device)
        return done

    def ended_by_token(self, token: Tensor) -> Tensor:  # int64 [R] -> bool [R]
        """A mask of the texts that their newest token ends; the condition is not called.

        >>> Stop(tokens=(30,)).ended_by_token(torch.tensor([30, 3]))
        tensor([ True, False])
        """
        done = torch.zeros_like(token, dtype=torch.bool)
        for stop in self.tokens:
            done |= token == stop
        return done


@dataclass(frozen=True)
class Generations:
    """G texts for each of P prompts, and sums over their tokens.

    Entries are None where the decoding did not need the network: `report_all=True` has them made.

    >>> from raffia.lm.decoding.generations import Generations
    >>> Generations(tokens=[[[5, 30]]], log_prob=torch.tensor([[-1.5]]),
    ...             stopped=torch.tensor([[True]])).best()
    [[5, 30]]
    """

    tokens: list[list[list[int]]]  # [P][G][n]; no tokens: no such text (fewer than G beams)
    log_prob: Tensor  # [P, G] under the perturbed policy
    stopped: Tensor  # bool [P, G]: by `Stop`; else cut at the limit
    kl: Tensor | None = None  # [P, G] log-probability less that of the unperturbed policy
    advantage: Tensor | None = None  # [P, G] sum of min target Q - V
    value: Tensor | None = None  # [P, G] min target Q of the last token

    def best(self) -> list[list[int]]:
        """The first text of each prompt."""
        return [texts[0] for texts in self.tokens]

    def first(self, num: int) -> Generations:
        """The first texts of each prompt.

        >>> Generations(tokens=[[[5], [6]]], log_prob=torch.tensor([[-1.5, -2.0]]),
        ...             stopped=torch.tensor([[True, False]])).first(1).log_prob
        tensor([[-1.5000]])
        """
        return self.take(torch.arange(num).expand(len(self.tokens), num))

    def take(self, index: Tensor) -> Generations:  # int64 [P, K]
        """Select these texts of each prompt, in this order.

        >>> two = Generations(tokens=[[[5], [6]]], log_prob=torch.tensor([[-1.5, -2.0]]),
        ...                   stopped=torch.tensor([[True, False]]))
        >>> two.take(torch.tensor([[1, 0]])).tokens
        [[[6], [5]]]
        """
        index = index.to(self.log_prob.device)
        parts: dict[str, Any] = {part.name: getattr(self, part.name) for part in fields(self)}
        tokens = [
            [texts[number] for number in numbers]
            for texts, numbers in zip(parts.pop("tokens"), index.tolist(), strict=True)
        ]
        for name, part in parts.items():
            parts[name] = None if part is None else part.gather(-1, index)
        return Generations(tokens=tokens, **parts)


def rerank(
    generations: Generations,
    by: Literal["log_prob", "advantage", "value"],  # the sum or value that puts them in order
) -> Generations:
    """The texts of each prompt from the best to the worst.

    >>> two = Generations(tokens=[[[1], [2]]], log_prob=torch.tensor([[-3.0, -2.0]]),
    ...                   stopped=torch.tensor([[True, True]]))
    >>> rerank(two, "log_prob").tokens
    [[[2], [1]]]
    """
    scores: Tensor | None = getattr(generations, by)
    if scores is None:
        raise ValueError(
            f"these generations have no {by} to rank them by: create them with "
            f"DecodeConfig(rerank={by!r}), or with report_all=True"
        )
    missing = generations.log_prob == -torch.inf  # no such text: behind all others
    scores = scores.masked_fill(missing, -torch.inf)
    return generations.take(scores.argsort(dim=-1, descending=True, stable=True))


@dataclass(frozen=True)
class Request:
    """Texts that a scorer is asked for; `of` makes one of what a caller has.

    >>> from types import SimpleNamespace
    >>> model = SimpleNamespace(vocab_size=5, block_size=16, device="cpu")
    >>> config = DecodeConfig(max_new_tokens=10, num_generations=2)
    >>> Request.of(model, [[1], [1] * 12], config).limits(copies=2)
    tensor([10, 10,  4,  4])
    """

    scorer: Scorer
    prompts: Sequence[Sequence[int]]  # P
    config: DecodeConfig
    stop: Stop = Stop()
    forbidden: Tensor | None = None  # [V]: 0, and -inf for tokens that never come

    @classmethod
    def of(
        cls,
        scorer: Scorer,
        prompts: Sequence[Sequence[int]],
        config: DecodeConfig,
        *,
        tokenizer: Tokenizer | None = None,
        stop: Stop | None = None,  # None: the tokenizer's end; without one the limits only
        pad_token: int | None = None,  # never generated; None: the tokenizer's
    ) -> Request:
        """Complete a request with what a tokenizer knows; prompts that cannot be answered are
        refused.
        """
        check_prompts(prompts, scorer)
        num_tokens = None if tokenizer is None else tokenizer.num_tokens
        if tokenizer is not None:
            stop = Stop(tokens=(tokenizer.eoa_token_id,)) if stop is None else stop
            pad_token = tokenizer.pad_token_id if pad_token is None else pad_token
        return cls(scorer, prompts, config, stop or Stop(), forbid(pad_token, scorer, num_tokens))

    def limits(self, copies: int = 1) -> Tensor:  # int64 [P copies]
        """The maximal number of new tokens for each prompt, each repeated this many times in
        succession.
        """
        room = torch.tensor([self.scorer.block_size - len(prompt) for prompt in self.prompts])
        if self.config.max_new_tokens is not None:
            room = room.clamp_max(self.config.max_new_tokens)
        return room.repeat_interleave(copies).to(self.scorer.device)

    def choice(self, outputs: NextToken) -> Choice:
        """How likely each next token is; ValueError if the model's outputs are not finite."""
        choice = Choice.of(outputs, self.config, self.forbidden)
        # One NaN, or infinity, makes all log-probabilities of its row NaN.
        if math.isnan(choice.log_probs[:, 0].sum().item()):
            raise ValueError(
                "the scores of the next token are NaN or infinite: look at the model's weights, "
                "which may have diverged in training, and at adv_weight="
                f"{self.config.adv_weight:g}"
            )
        return choice


def check_prompts(prompts: Sequence[Sequence[int]], scorer: Scorer) -> None:
    """Refuse prompts without tokens, with unknown tokens, or without room for an answer.

    >>> from types import SimpleNamespace
    >>> check_prompts([[1, 7]], SimpleNamespace(vocab_size=5, block_size=16))
    Traceback (most recent call last):
    ...
    ValueError: prompt 0 contains token 7, but the model's vocabulary has 5 tokens, 0..4: encode it
    with the tokenizer that the model was trained with
    """
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(
                f"prompt {number} has no tokens: pass at least one, for example the tokenizer's "
                "bos_token_id"
            )
        least, most = min(prompt), max(prompt)
        if least < 0 or most >= scorer.vocab_size:
            wrong = least if least < 0 else most
            raise ValueError(
                f"prompt {number} contains token {wrong}, but the model's vocabulary has "
                f"{scorer.vocab_size} tokens, 0..{scorer.vocab_size - 1}: encode it with the "
                "tokenizer that the model was trained with"
            )
        if len(prompt) >= scorer.block_size:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens, but the model's context holds "
                f"{scorer.block_size}, which leaves no room for an answer: use only the last "
                f"ones, prompt[-{scorer.block_size // 2}:], or a model with a larger block_size"
            )


def forbid(
    pad_token: int | None,
    scorer: Scorer,
    num_tokens: int | None = None,  # of the tokenizer; None: as many as the model has
) -> Tensor | None:
    """The bias added to the scores [V] so that neither padding nor what is no token of the
    tokenizer is ever generated: -inf for these, 0 elsewhere.

    >>> from types import SimpleNamespace
    >>> forbid(1, SimpleNamespace(vocab_size=4, device="cpu"), num_tokens=3)
    tensor([0., -inf, 0., -inf])
    """
    known = scorer.vocab_size if num_tokens is None else num_tokens
    if pad_token is None and known >= scorer.vocab_size:
        return None
    forbidden = torch.zeros(scorer.vocab_size, device=scorer.device)
    forbidden[known:] = -torch.inf
    if pad_token is None:
        return forbidden
    if not 0 <= pad_token < scorer.vocab_size:
        raise ValueError(
            f"pad_token={pad_token} is not among the model's {scorer.vocab_size} tokens; pass the "
            "tokenizer's pad_token_id, or None if it has none"
        )
    forbidden[pad_token] = -torch.inf
    return forbidden
