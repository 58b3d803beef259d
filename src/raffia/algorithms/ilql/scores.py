"""Scores of given texts: of actions, next tokens and whole utterances.

Legend: B rows, T tokens of a row, A actions of a row, V tokens of the vocabulary, P prompts, G
utterances for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from raffia.algorithms.ilql.loss import Loss, More, Values
from raffia.algorithms.ilql.model import ILQLModel, ILQLTarget
from raffia.algorithms.ilql.model_scorer import ModelScorer, evaluating
from raffia.algorithms.ilql.terms import Masks, Slots, bellman_target, masks_of
from raffia.lm.decoding.config import DecodeConfig
from raffia.lm.decoding.generations import Generations, forbid
from raffia.lm.decoding.scorer import Choice, Needs, advantage_term
from raffia.tensordict.tensordict import TensorDict


def qvs_of(
    loss: Loss,
    batch: TensorDict,
    trunk_kwargs: More = None,  # what else the trunk is called with
    target_kwargs: More = None,  # ... the target's, where it has one
) -> TensorDict:
    """Q and V at the actions, each [B, A]; 0 where padded. The policy is not run.

    >>> from raffia.algorithms.ilql.config import ILQLLossConfig, ILQLModelConfig, TrunkConfig
    >>> from raffia.algorithms.ilql.model import ILQLModel
    >>> from raffia.lm.data.dialogue import DataPoint, DialogueDataset, Vocabulary
    >>> trunk = TrunkConfig(vocab_size=6, n_layer=1, n_head=2, n_embd=8, block_size=16)
    >>> loss = Loss(ILQLModel(ILQLModelConfig(trunk=trunk)), ILQLLossConfig())
    >>> row = DataPoint.from_tokens([0, 3, 1, 5, 2], [2, 3], [0.0, 1.0])
    >>> qvs = qvs_of(loss, DialogueDataset.of_points([row], Vocabulary(6)).collate([row]))
    >>> qvs["next_v"][0, 1].item(), qvs["bellman_target"][0, 1].item()
    (0.0, 1.0)
    """
    config, masks = loss.config, masks_of(batch["action_mask"], batch["terminals"])
    values = _values(loss, batch, masks, trunk_kwargs, target_kwargs)

    def spread(entry: Tensor) -> Tensor:
        return torch.where(masks.values, values.slots.spread(entry), 0)

    v, target_q, ended = spread(values.v), spread(values.target_q), batch["terminals"][:, 1:]
    next_v = torch.where(ended, 0, spread(values.next_value))
    return TensorDict(
        {
            "v": v,
            "next_v": next_v,
            **{f"q{number}": spread(q) for number, q in enumerate(values.q, 1)},
            "target_q": target_q,
            "advantage": target_q - v,
            "bellman_target": bellman_target(batch["rewards"], next_v, ended, config.gamma),
            "rewards": batch["rewards"],
            "action_mask": batch["action_mask"],
        },
        batch_size=batch.batch_size,
    )


def weights_of(loss: Loss, batch: TensorDict) -> Tensor:  # [B, T]
    """How much the token behind each position counts for the policy.

    >>> from raffia.algorithms.ilql.config import ILQLLossConfig, ILQLModelConfig, TrunkConfig
    >>> from raffia.algorithms.ilql.model import ILQLModel
    >>> from raffia.lm.data.dialogue import DataPoint, DialogueDataset, Vocabulary
    >>> trunk = TrunkConfig(vocab_size=6, n_layer=1, n_head=2, n_embd=8, block_size=16)
    >>> loss = Loss(ILQLModel(ILQLModelConfig(trunk=trunk)), ILQLLossConfig(beta=0.0))
    >>> row = DataPoint.from_tokens([0, 3, 1, 5, 2], [2, 3], [0.0, 1.0])
    >>> weights_of(loss, DialogueDataset.of_points([row], Vocabulary(6)).collate([row]))
    tensor([[0., 0., 1., 1., 0.]])
    """
    config = loss.config
    masks = masks_of(batch["action_mask"], batch["terminals"], config.mask)
    advantage = torch.zeros_like(batch["rewards"])
    if config.beta != 0 or not config.exp_weights:
        values = _values(loss, batch, masks)
        advantage = values.slots.spread(values.target_q - values.v)
    return loss.spread(loss.weights(advantage, config.beta), batch, masks)


def _values(
    loss: Loss,
    batch: TensorDict,
    masks: Masks,
    trunk_kwargs: More = None,
    target_kwargs: More = None,
) -> Values:
    """The heads' outputs at the actions alone: nothing here looks at the Q of other tokens."""
    config = replace(loss.config, backup="expectile", cql_weight=0.0, dm_weight=0.0, q_weight=1.0)
    bare = Loss(loss.model, config, target=loss.target)
    of_trunk = bare.states(loss.model.trunk, batch, more=trunk_kwargs)
    of_target = bare.target_states(of_trunk, batch, more=target_kwargs)
    return bare.values(batch, masks, of_trunk, of_target)


def get_scores(
    model: ILQLModel,
    target: ILQLTarget | None,  # None: without include_advantage
    tokens: Tensor,  # int64 [B, T]
    action_idxs: Tensor,  # int64 [B, A]: where the next token is the agent's
    *,
    attn_mask: Tensor | None = None,  # bool [B, T]; None: all are tokens
    action_mask: Tensor | None = None,  # bool [B, A]: real actions; None: all are
    beta: float = 0.0,
    exp_weights: bool = True,  # beta (Q - V); else log(beta) or log(1 - beta), by sign
    clip_weight: float | None = None,  # the advantage's part is never above
    include_advantage: bool = True,  # at the agent's tokens
    include_logits: bool = False,  # log-probabilities of the policy, at all tokens
    logit_temp: float = 1.0,  # divides the policy's logits
) -> Tensor:  # [B, T, V]
    """The score of each token of the vocabulary behind each token; 0 at padding.

        score = term(min target Q - V) + log_softmax(logits / logit_temp)

    Source: the published `get_scores`; summed in logarithms, where no probability rounds to 0.

    >>> from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
    >>> from raffia.algorithms.ilql.model import make_target
    >>> trunk = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
    >>> model = ILQLModel(ILQLModelConfig(trunk=trunk))
    >>> scores = get_scores(model, make_target(model), torch.tensor([[1, 2, 3]]),
    ...                     torch.tensor([[1]]), beta=2.0)
    >>> scores.shape, (scores != 0).any(-1)
    (torch.Size([1, 3, 10]), tensor([[False,  True, False]]))
    """
    if include_advantage and not model.config.per_token:
        raise ValueError(
            "with per_token=False Q is one number for a whole utterance: score utterances with "
            "score_utterances, or single tokens with include_advantage=False"
        )
    config = DecodeConfig(
        temperature=logit_temp,
        exp_adv=exp_weights,
        adv_weight=beta,
        adv_clip=clip_weight,
        include_adv=include_advantage,
    )
    scorer = ModelScorer(model, target)
    with evaluating(model, target), torch.no_grad():
        needs = Needs(policy=include_logits, values=include_advantage)
        hidden = scorer.read(tokens, attn_mask, needs)
        shape = (*tokens.shape, scorer.vocab_size)
        scores = next(model.v.parameters()).new_zeros(shape)
        if include_advantage:
            real = torch.ones_like(action_idxs) if action_mask is None else action_mask
            index = Slots.of(real.bool()).flat(action_idxs, tokens.shape[1])
            advantage = scorer.next_token(hidden, needs._replace(policy=False), index).advantage()
            assert advantage is not None
            scores.view(-1, shape[-1])[index] = advantage_term(advantage, config).to(scores.dtype)
        if include_logits:
            logits = scorer.next_token(hidden, needs._replace(values=False)).logits
            assert logits is not None
            logits = logits.view(shape)
            log_probs = (logits / logit_temp).log_softmax(-1)
            if attn_mask is not None:
                log_probs = log_probs.masked_fill(~attn_mask.bool().unsqueeze(-1), 0)
            scores = scores + log_probs
    return scores


def score_utterances(
    model: ILQLModel,
    target: ILQLTarget | None,  # None: no values are wanted
    prompts: Sequence[Sequence[int]],  # P
    utterances: Sequence[Sequence[Sequence[int]]],  # [P][G][n], with their end tokens
    config: DecodeConfig,
    *,
    pad_token: int | None = None,  # never generated
) -> Generations:
    """The sums that `generate` would return for these utterances, for ranking them.

    One pass of each network. With `per_token=False` the value is that of the whole utterance, Q at
    its last token, and the advantage that less V before its first.

    >>> from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
    >>> from raffia.algorithms.ilql.model import make_target
    >>> trunk = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
    >>> model = ILQLModel(ILQLModelConfig(trunk=trunk))
    >>> both = score_utterances(model, make_target(model), [[1, 2]], [[[3, 9], [4, 5, 9]]],
    ...                         DecodeConfig())
    >>> both.log_prob.shape, both.value.shape
    (torch.Size([1, 2]), torch.Size([1, 2]))
    """
    num = _check_utterances(prompts, utterances)
    rows = [
        ([*prompt, *utterance], len(prompt))
        for prompt, those in zip(prompts, utterances, strict=True)
        for utterance in those
    ]
    scorer = ModelScorer(model, target)
    shape = len(prompts), num
    with evaluating(model, target), torch.no_grad():
        sums = _sums(scorer, rows, config, forbid(pad_token, scorer))
    log_prob, kl, advantage, value = (None if part is None else part.view(shape) for part in sums)
    assert log_prob is not None
    return Generations(
        tokens=[[list(utterance) for utterance in those] for those in utterances],
        log_prob=log_prob,
        stopped=torch.ones(shape, dtype=torch.bool, device=log_prob.device),
        kl=kl,
        advantage=advantage,
        value=value,
    )


def _sums(
    scorer: ModelScorer,
    rows: list[tuple[list[int], int]],  # tokens, and how many of them are the prompt's
    config: DecodeConfig,
    forbidden: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Log-probability, KL, advantage, value of each row, each [R]."""
    device = scorer.device
    lengths = torch.tensor([len(tokens) for tokens, _ in rows], device=device)
    starts = torch.tensor([start for _, start in rows], device=device)
    longest = int(lengths.max())
    padded = torch.tensor([row + [0] * (longest - len(row)) for row, _ in rows], device=device)
    column = torch.arange(longest, device=device)
    mask = column < lengths.unsqueeze(-1)
    per_token = scorer.model.config.per_token
    needs = Needs(policy=True, values=scorer.target is not None)
    hidden = scorer.read(padded, mask, needs)
    # The state before each token of an utterance, and the row that it is in
    before = (column >= starts.unsqueeze(-1) - 1) & (column < lengths.unsqueeze(-1) - 1)
    index = before.flatten().nonzero().squeeze(-1)
    row = index // longest
    token = padded.flatten()[index + 1]
    outputs = scorer.next_token(hidden, needs._replace(values=needs.values and per_token), index)
    log_prob, kl, value, advantage = Choice.of(outputs, config, forbidden).of_token(token)

    def total(part: Tensor | None) -> Tensor | None:
        return None if part is None else part.new_zeros(len(rows)).index_add_(0, row, part)

    first_column = torch.arange(len(rows), device=device) * longest
    last = first_column + lengths - 1
    if value is not None:
        of_last = (lengths - starts).cumsum(0) - 1
        value, advantage = value[of_last], total(advantage)
    elif needs.values:
        values = needs._replace(policy=False)
        q = scorer.next_token(hidden, values, last).target_q
        v = scorer.next_token(hidden, values, first_column + starts - 1).v
        assert q is not None and v is not None
        value, advantage = q.squeeze(-1), q.squeeze(-1) - v
    summed = total(log_prob)
    assert summed is not None
    return summed, total(kl), advantage, value


def _check_utterances(
    prompts: Sequence[Sequence[int]], utterances: Sequence[Sequence[Sequence[int]]]
) -> int:
    """How many there are for each prompt."""
    counts = sorted({len(those) for those in utterances})
    if len(utterances) != len(prompts) or len(counts) != 1 or counts[0] < 1:
        raise ValueError(
            f"{len(prompts)} prompts, but utterances for {len(utterances)}, {counts} for each: "
            "pass one list for each prompt, all of the same length, with at least one utterance"
        )
    for number, those in enumerate(utterances):
        if not all(len(utterance) for utterance in those) or not len(prompts[number]):
            raise ValueError(f"prompt {number}, or an utterance for it, has no tokens")
    return counts[0]
