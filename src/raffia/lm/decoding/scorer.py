"""The protocol of models for decoding: scores of the next token, for rows of text that grow.

A score is the policy's logit, filtered, and the advantage on top of it: `perturb`.

Shapes: R rows, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from raffia.lm.decoding.config import DecodeConfig


class Needs(NamedTuple):
    """The scores that are needed; networks that contribute to none of them are not run.

    >>> Needs.of(DecodeConfig(include_adv=False))
    Needs(policy=True, values=False, num_candidates=None)
    """

    policy: bool
    values: bool
    num_candidates: int | None = None  # tokens of a row of which Q may be asked; None: all

    @classmethod
    def of(cls, config: DecodeConfig) -> Needs:
        num = config.top_k if config.include_logits else None
        return cls(config.needs_policy, config.needs_values, num)


class SomeQ(Protocol):
    """Target Q of the tokens that are asked for: of 50,000 tokens, few can follow.

    >>> class Doubled:
    ...     def of(self, tokens):
    ...         return 2.0 * tokens
    ...     def at(self, rows):
    ...         return self
    >>> Doubled().of(torch.tensor([[3, 4]]))
    tensor([[6., 8.]])
    """

    def of(self, tokens: Tensor) -> Tensor:
        """Target Q of these tokens of each row: int64 [R, K] -> [R, K]."""

    def at(self, rows: Tensor) -> SomeQ:
        """Q of these rows alone: int64 [R']."""


class NextToken(NamedTuple):
    """A model's outputs for the next token of each row.

    >>> outputs = NextToken(torch.zeros(2, 5), torch.ones(2, 5), torch.zeros(2))
    >>> outputs.advantage().shape
    torch.Size([2, 5])
    """

    logits: Tensor | None  # [R, V] of the policy
    target_q: Tensor | None  # [R, V], the smaller one of both target heads
    v: Tensor | None  # [R]
    some_q: SomeQ | None = None  # instead of target_q

    def advantage(self) -> Tensor | None:
        """The advantage, target Q - V [R, V], if values are computed."""
        if self.target_q is None or self.v is None:
            return None
        return self.target_q - self.v.unsqueeze(-1)

    def at(self, rows: Tensor) -> NextToken:
        """The outputs for these rows: int64 [R']."""
        logits, target_q, v = (None if part is None else part[rows] for part in self[:3])
        some_q = None if self.some_q is None else self.some_q.at(rows)
        return NextToken(logits, target_q, v, some_q)


class Rows(Protocol):
    """R texts of a model, which grow by a token at a time; only the new tokens are computed.

    >>> class Parrot:  # wants the last token again
    ...     def advance(self, tokens):
    ...         return NextToken(10.0 * torch.nn.functional.one_hot(tokens, 5), None, None)
    ...     def reorder(self, rows):
    ...         pass
    >>> Parrot().advance(torch.tensor([3])).logits.argmax(-1)
    tensor([3])
    """

    def advance(self, tokens: Tensor) -> NextToken:
        """Append a token to each row: int64 [R]."""

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes the text that row rows[i] was: int64 [R']; drops and repeats."""

    @property
    def room(self) -> int:
        """How many further tokens each row has room for; asked for by planning only."""

    def ahead(self, rows: Tensor, tokens: Tensor, lengths: Tensor) -> NextToken:
        """The outputs behind further tokens [M, T] of these rows [M], of which `lengths` [M] count.

        The rows stay unchanged. Asked for by planning only.
        """


class Scorer(Protocol):
    """A model that rows of text can be started with.

    >>> from raffia.lm.decoding.scorer import Scorer
    >>> class Constant:
    ...     vocab_size, block_size, device = 5, 16, torch.device("cpu")
    ...     def start(self, prompts, needs, max_new_tokens):
    ...         return self, NextToken(torch.zeros(len(prompts), 5), None, None)
    >>> scorer: Scorer = Constant()
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def block_size(self) -> int:
        """The most tokens that a text may have."""

    @property
    def device(self) -> torch.device: ...

    def start(
        self, prompts: Sequence[Sequence[int]], needs: Needs, max_new_tokens: int
    ) -> tuple[Rows, NextToken]:
        """Start one row for each prompt, with room for this many new tokens."""


class Choice(NamedTuple):
    """The next token of R rows: how likely each is, before and after the advantage.

    >>> outputs = NextToken(torch.zeros(1, 4), torch.tensor([[0., 0., 0., 9.]]), torch.zeros(1))
    >>> choice = Choice.of(outputs, DecodeConfig(), None)
    >>> log_prob, kl, value, advantage = choice.of_token(torch.tensor([3]))
    >>> bool(kl > 1), advantage
    (True, tensor([9.]))
    """

    log_probs: Tensor  # [R, V] of the perturbed policy
    logits: Tensor | None  # [R, V] of the policy, -inf where a token never comes
    target_q: Tensor | None  # [R, V]; any number where a token cannot follow
    v: Tensor | None  # [R]

    @classmethod
    def of(cls, outputs: NextToken, config: DecodeConfig, forbidden: Tensor | None) -> Choice:
        """forbidden [V]: 0, and -inf for tokens that never come."""
        logits = outputs.logits
        if logits is not None and forbidden is not None:
            logits = logits + forbidden
        if outputs.some_q is not None:
            assert logits is not None and config.top_k is not None
            # As `perturb` filters them: dividing makes some logits of few digits equal.
            candidates = (logits / config.temperature).topk(config.top_k, dim=-1).indices
            q = outputs.some_q.of(candidates).to(logits.dtype)
            outputs = outputs._replace(
                target_q=torch.zeros_like(logits).scatter_(-1, candidates, q)
            )
        advantage = outputs.advantage() if config.shifts else None
        log_probs = perturb(logits, advantage, config, forbidden)
        return cls(log_probs, logits, outputs.target_q, outputs.v)

    def at(self, rows: Tensor) -> Choice:
        """The choices of these rows: int64 [R']."""
        log_probs, *parts = self
        return Choice(log_probs[rows], *(None if part is None else part[rows] for part in parts))

    def of_token(
        self,
        token: Tensor,  # int64 [R]
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # each [R]
        """For a token: its log-probability, that without perturbation, its target Q, and Q - V."""
        log_prob = _at(self.log_probs, token)
        kl = value = advantage = None
        if self.logits is not None:
            kl = log_prob - _at(self.logits, token) + self.logits.logsumexp(-1)
        if self.target_q is not None:
            value = _at(self.target_q, token)
        if value is not None and self.v is not None:
            advantage = value - self.v
        return log_prob, kl, value, advantage


def _at(scores: Tensor, token: Tensor) -> Tensor:
    return scores.gather(-1, token.unsqueeze(-1)).squeeze(-1)


_FEW = 1024  # tokens


def perturb(
    logits: Tensor | None,  # [..., V] of the policy; -inf: never. None without include_logits
    advantage: Tensor | None,  # [..., V] min target Q - V; None where the config needs no values
    config: DecodeConfig,
    forbidden: Tensor | None = None,  # [V]: 0, and -inf for tokens that never come (padding)
) -> Tensor:  # [..., V]
    """Log-probabilities of the next token.

        log_softmax( top_p(top_k(logits / temperature)) + min(term(Q - V), adv_clip) )

    The filters look at the policy's logits only, before the advantage comes.
    Source: Snell et al. (2022), section 4.3.

    >>> config = DecodeConfig(adv_weight=2.0)
    >>> perturb(torch.zeros(1, 2), torch.tensor([[0.0, 0.5]]), config).exp()
    tensor([[0.2689, 0.7311]])
    """
    parts: list[Tensor] = [] if forbidden is None else [forbidden]
    if config.include_logits:
        assert logits is not None
        if forbidden is not None:
            logits = logits + forbidden  # before the filters: these tokens count for none of them
        if config.temperature != 1:
            logits = logits / config.temperature
        if config.top_k is not None:
            logits = keep_top_k(logits, config.top_k)
        logits = keep_top_p(logits, config.effective_top_p)
        parts = [logits]
    if config.shifts:
        assert advantage is not None
        parts.append(advantage_term(advantage, config))
    return reduce(torch.add, parts).log_softmax(-1)


def advantage_term(advantage: Tensor, config: DecodeConfig) -> Tensor:
    """The advantage's contribution to the scores: Q - V [..., V] -> [..., V].

    >>> config = DecodeConfig(exp_adv=False, adv_weight=0.9)
    >>> advantage_term(torch.tensor([-1.0, 0.0, 1.0]), config).exp()  # 0.9 where it is positive
    tensor([0.1000, 0.1000, 0.9000])
    """
    weight = config.adv_weight
    if config.exp_adv:
        term = advantage if weight == 1 else weight * advantage
    else:
        sign = advantage.new_tensor([1 - weight, weight]).log()
        term = torch.where(advantage > 0, sign[1], sign[0])
    return term if config.adv_clip is None else term.clamp_max(config.adv_clip)


def keep_top_k(
    logits: Tensor,  # [..., V]
    k: int,  # at least 1; above the vocabulary: all stay
) -> Tensor:
    """-inf for all but the k largest; of equal ones as many as fit.

    >>> keep_top_k(torch.tensor([1.0, 3.0, 2.0]), 2)
    tensor([-inf, 3., 2.])
    """
    if k >= logits.shape[-1]:
        return logits
    largest, index = logits.topk(k, dim=-1)
    return torch.full_like(logits, -torch.inf).scatter_(-1, index, largest)


def keep_top_p(
    logits: Tensor,  # [..., V]
    p: float,  # 0..1
) -> Tensor:
    """-inf for all but the likeliest tokens that reach probability p together, the last included.

    The likeliest token always stays; of equal ones all or none.
    Source: Holtzman et al. (2020), "The curious case of neural text degeneration".

    >>> keep_top_p(torch.tensor([0.1, 0.6, 0.3]).log(), 0.7).exp()
    tensor([0.0000, 0.6000, 0.3000])
    """
    if p >= 1:
        return logits
    num, total = logits.shape[-1], logits.logsumexp(-1, keepdim=True)
    # A few tokens mostly reach p, and to sort a large vocabulary takes long.
    largest = logits.topk(min(num, _FEW), dim=-1).values
    if num > _FEW and bool(((largest - total).exp().sum(-1) <= p).any()):
        largest = logits.sort(dim=-1, descending=True).values
    likelier = (largest - total).exp().cumsum(-1).roll(1, -1)  # of those before each
    likelier[..., 0] = 0.0
    last = (likelier <= p).sum(-1, keepdim=True) - 1
    return logits.masked_fill(logits < largest.gather(-1, last), -torch.inf)
