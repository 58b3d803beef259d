"""What is wanted of a decoding: texts behind which prompts, decoded how, until what ends them.

Legend: P prompts, G texts for each, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raffia.lm.decoding.config import DecodeConfig
from raffia.lm.decoding.generations import Stop
from raffia.lm.decoding.scorer import Choice, NextToken, Scorer
from raffia.lm.tokenizers.tokenizer import Tokenizer


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
        """With what a tokenizer knows; prompts that can't be answered are refused."""
        check_prompts(prompts, scorer)
        if tokenizer is not None:
            stop = Stop(tokens=(tokenizer.eoa_token_id,)) if stop is None else stop
            pad_token = tokenizer.pad_token_id if pad_token is None else pad_token
        return cls(scorer, prompts, config, stop or Stop(), forbid(pad_token, scorer))

    def limits(self, copies: int = 1) -> Tensor:  # int64 [P copies]
        """How many tokens each prompt may be answered with, so many times one after the other."""
        room = torch.tensor([self.scorer.block_size - len(prompt) for prompt in self.prompts])
        if self.config.max_new_tokens is not None:
            room = room.clamp_max(self.config.max_new_tokens)
        return room.repeat_interleave(copies).to(self.scorer.device)

    def choice(self, outputs: NextToken) -> Choice:
        """How likely each next token is."""
        return Choice.of(outputs, self.config, self.forbidden)


def check_prompts(prompts: Sequence[Sequence[int]], scorer: Scorer) -> None:
    """Refuse prompts without tokens, with unknown tokens, or without room for an answer.

    >>> from types import SimpleNamespace
    >>> check_prompts([[1, 7]], SimpleNamespace(vocab_size=5, block_size=16))
    Traceback (most recent call last):
    ...
    ValueError: prompt 0 holds token 7, and the model's vocabulary has 5 tokens, 0..4: encode it
    with the tokenizer that the model was trained with
    """
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(
                f"prompt {number} has no tokens: begin with at least one, for example the "
                "tokenizer's bos_token_id"
            )
        least, most = min(prompt), max(prompt)
        if least < 0 or most >= scorer.vocab_size:
            wrong = least if least < 0 else most
            raise ValueError(
                f"prompt {number} holds token {wrong}, and the model's vocabulary has "
                f"{scorer.vocab_size} tokens, 0..{scorer.vocab_size - 1}: encode it with the "
                "tokenizer that the model was trained with"
            )
        if len(prompt) >= scorer.block_size:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens and the model's context "
                f"{scorer.block_size}, which leaves no room for an answer: keep the last ones, "
                f"prompt[-{scorer.block_size // 2}:], or take a model with a larger block_size"
            )


def forbid(pad_token: int | None, scorer: Scorer) -> Tensor | None:
    """What is added to the scores [V] so that padding is never generated: 0, and -inf for it.

    >>> from types import SimpleNamespace
    >>> forbid(1, SimpleNamespace(vocab_size=3, device="cpu"))
    tensor([0., -inf, 0.])
    """
    if pad_token is None:
        return None
    if not 0 <= pad_token < scorer.vocab_size:
        raise ValueError(
            f"pad_token={pad_token} is none of the model's {scorer.vocab_size} tokens; pass the "
            "tokenizer's pad_token_id, or None if it has none"
        )
    forbidden = torch.zeros(scorer.vocab_size, device=scorer.device)
    forbidden[pad_token] = -torch.inf
    return forbidden
