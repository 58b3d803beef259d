"""The score of the next token: the policy's logits, filtered, and the advantage on top of them.

Shapes: R rows of text, V tokens of the vocabulary.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from raffia.lm.decoding.config import DecodeConfig

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
    """What the advantage adds to the scores: Q - V [..., V] -> [..., V].

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
    k: int,  # at least 1; above the vocabulary: all are kept
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
