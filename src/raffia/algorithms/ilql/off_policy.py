"""Off-policy estimates of a decoding's return from logged dialogues: weighted importance sampling.

Legend: N dialogues, A actions of a dialogue, B rows of a batch, T tokens, M actions of a batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from raffia.algorithms.ilql.model import ILQLModel, ILQLTarget
from raffia.algorithms.ilql.model_scorer import ModelScorer, evaluating
from raffia.algorithms.ilql.terms import Slots
from raffia.lm.decoding.config import DecodeConfig
from raffia.lm.decoding.generations import forbid
from raffia.lm.decoding.scorer import Choice, Needs
from raffia.tensordict.tensordict import TensorDict

_Z95 = 1.959964  # of the normal distribution, both sides
_MOST = 1 << 24  # most numbers of a table [M, V]


@dataclass(frozen=True)
class OffPolicyEstimate:
    """The return that a decoding would have, as estimated from logs.

    >>> one = OffPolicyEstimate(1.0, 0.5, 1.5, logged_return=0.0, gain=1.0, gain_low=0.6,
    ...                         effective_rows=40.0, support=1.0)
    >>> one.gain_low > 0
    True
    """

    mean_return: float  # what leaves the data counts as the worst dialogue
    low: float  # 95 %, by jackknife over the dialogues
    high: float
    logged_return: float  # of the same dialogues as they are
    gain: float  # mean_return less that
    gain_low: float
    effective_rows: float  # of so many dialogues the estimate is
    support: float  # 0..1: how much of what would be generated is in the data


def action_log_probs(
    model: ILQLModel,
    target: ILQLTarget | None,  # None: no values are wanted
    batch: TensorDict,  # "tokens" [B, T], "attn_mask", "action_idxs" [B, A], "action_mask"
    config: DecodeConfig,
    *,
    pad_token: int | None = None,
    num_tokens: int | None = None,  # of the tokenizer; None: as many as the model has
) -> tuple[Tensor, Tensor]:  # [B, A] each, 0 where padded
    """Log-probability of each logged action when decoding, and of the policy alone.

    Where beams choose, decoding is taken as greedy: 0 for the best token, -inf for every other.

    >>> from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
    >>> from raffia.lm.data.dialogue import DataPoint, DialogueDataset, Vocabulary
    >>> trunk = TrunkConfig(vocab_size=6, n_layer=1, n_head=2, n_embd=8, block_size=16)
    >>> row = DataPoint.from_tokens([0, 3, 1, 5, 2], [2, 3], [0.0, 1.0])
    >>> batch = DialogueDataset.of_points([row], Vocabulary(6)).collate([row])
    >>> decoded, policy = action_log_probs(
    ...     ILQLModel(ILQLModelConfig(trunk=trunk)), None, batch, DecodeConfig(include_adv=False))
    >>> decoded.shape, torch.allclose(decoded, policy, atol=1e-6)
    (torch.Size([1, 2]), True)
    """
    scorer = ModelScorer(model, target)
    tokens, mask = batch["tokens"], batch["action_mask"]
    position = Slots.of(mask).flat(batch["action_idxs"], tokens.shape[1])  # int64 [M]
    token = tokens.flatten()[position + 1]
    forbidden = forbid(pad_token, scorer, num_tokens)
    decoded, policy = [], []
    with evaluating(model, target), torch.no_grad():
        needs = Needs(policy=True, values=config.shifts)
        hidden = scorer.read(tokens, batch["attn_mask"], needs)
        for start in range(0, len(position), size := max(1, _MOST // scorer.vocab_size)):
            part = slice(start, start + size)
            choice = Choice.of(scorer.next_token(hidden, needs, position[part]), config, forbidden)
            assert choice.logits is not None
            here = token[part].unsqueeze(-1)
            if config.num_beams is None:
                decoded.append(choice.log_probs.gather(-1, here).double().squeeze(-1))
            else:
                best = choice.log_probs.argmax(-1) == token[part]
                decoded.append(torch.where(best, 0.0, -math.inf).double())
            logits = choice.logits.double()
            policy.append(
                (logits.gather(-1, here) - logits.logsumexp(-1, keepdim=True)).squeeze(-1)
            )
    nothing = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    if not decoded:
        return nothing, nothing
    return nothing.masked_scatter(mask, torch.cat(decoded)), nothing.masked_scatter(
        mask, torch.cat(policy)
    )


def off_policy_return(
    log_ratio: Tensor,  # [N, A]: log-probability of each action when decoding, less that of the
    # policy that made the data; 0 where padded
    rewards: Tensor,  # [N, A], 0 where padded
    worst: float,  # return of what leaves the data
) -> OffPolicyEstimate:
    """The return of decoding by per-decision weighted importance sampling, and how sure it is.

        w_it = prod_{u <= t} pi(a_iu) / mu(a_iu),   s = min(1, mean_i w_iT)
        return = s sum_t sum_i w_it r_it / sum_i w_it + (1 - s) worst

    The ratio of sums is within the returns that were logged, so nothing that a value network
    believes can lift it; but it lacks what decoding generates and the data never have. That
    fraction, 1 - s, counts as the worst dialogue.

    Source: Precup, Sutton & Singh (2000), "Eligibility traces for off-policy policy evaluation";
    the fraction outside of the data is an addition.

    >>> log_ratio = torch.log(torch.tensor([[2.0], [0.01]])).repeat(50, 1)  # the first of two
    >>> found = off_policy_return(log_ratio, torch.tensor([[1.0], [0.0]]).repeat(50, 1), worst=0.0)
    >>> round(found.mean_return, 3), found.logged_return, found.gain_low > 0.3
    (0.995, 0.5, True)
    """
    log_ratio, rewards = log_ratio.double(), rewards.double()
    num = len(log_ratio)
    if num == 0:
        raise ValueError("no dialogues were given: pass at least one")
    returns = rewards.sum(-1)
    weights = log_ratio.cumsum(-1)
    whole = weights[:, -1].clamp_max(700.0).exp()  # [N]: what float64 holds
    top = weights.amax(0).nan_to_num(neginf=0.0)
    weights = (weights - top).exp()  # [N, A], each column by its largest

    def value(moved: Tensor, total: Tensor, mass: Tensor, rows: int) -> Tensor:
        """The estimate from sums over dialogues: [*, A], [*, A], [*] -> [*]."""
        within = torch.where(total > 0, moved / total, 0.0).sum(-1)
        fraction = (mass / rows).clamp_max(1.0)
        return fraction * within + (1 - fraction) * worst

    earned = weights * rewards
    mean = value(earned.sum(0), weights.sum(0), whole.sum(), num)
    gain = mean - returns.mean()
    of_mean = of_gain = math.inf
    if num > 1:
        left = num - 1  # without each of the dialogues in turn
        without = value(_of_others(earned), _of_others(weights), _of_others(whole), left)
        gains = without - (returns.sum() - returns) / left
        of_mean, of_gain = (
            _Z95 * math.sqrt(left / num * float((x - x.mean()).square().sum()))
            for x in (without, gains)
        )
    # It may be beyond the returns, as it may keep the beginning of a dialogue and not its end.
    least, most = min(worst, float(returns.min())), float(returns.max())
    total = float(whole.sum())
    logged = float(returns.mean())
    return OffPolicyEstimate(
        mean_return=float(mean),
        low=min(float(mean), max(least, float(mean) - of_mean)),
        high=max(float(mean), min(most, float(mean) + of_mean)),
        logged_return=logged,
        gain=float(gain),
        gain_low=min(float(gain), max(least - logged, float(gain) - of_gain)),
        effective_rows=total**2 / float(whole.square().sum()) if total > 0 else 0.0,
        support=min(1.0, total / num),
    )


def _of_others(x: Tensor) -> Tensor:  # [N, *] -> [N, *]
    """The sums over all dialogues but each; to subtract it would round away the smaller ones."""
    none = torch.zeros_like(x[:1])
    before, after = torch.cat([none, x[:-1]]), torch.cat([x[1:], none])
    return before.cumsum(0) + after.flip(0).cumsum(0).flip(0)
