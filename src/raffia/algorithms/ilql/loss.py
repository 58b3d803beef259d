"""ILQL's loss of a batch of dialogues.

Legend: B rows, T tokens of a row, A actions of a row, V tokens of the vocabulary; M slots that are
computed, of the B A actions.

    loss = awac_weight token + v_weight V + q_weight Q + cql_weight CQL + dm_weight DM

The terms and the weights of tokens are in `terms.py`. Heads are computed at
actions only, the logits where a token can have a weight, the trunk on what is not padding; where
shapes must not depend on data (`torch.vmap`, `torch.compile`), everywhere, with equal results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from raffia.algorithms.ilql.config import ILQLLossConfig
from raffia.algorithms.ilql.model import ILQLModel, ILQLTarget, make_target
from raffia.algorithms.ilql.terms import (
    Masks,
    Slots,
    advantage_weights,
    bellman_target,
    cql_loss,
    dm_loss,
    masks_of,
    min_target_q,
    q_loss,
    token_loss,
    token_weights,
    v_loss,
)
from raffia.functional.losses import masked_mean
from raffia.functional.returns import discounted_sum
from raffia.functional.transforms import precise
from raffia.functional.trees import is_traced
from raffia.lm.model import LanguageModel
from raffia.tensordict.tensordict import TensorDict

Terms = dict[str, Tensor]  # by name, []
More = Mapping[str, Any] | None  # what else a trunk is called with


class Values(NamedTuple):
    """Outputs of the heads at the M slots.

    >>> x = torch.zeros(4)
    >>> Values(Slots((2, 2), None), x, x, (x, x), (), x, x.long()).next_value.shape
    torch.Size([4])
    """

    slots: Slots  # of the M slots in [B, A]
    v: Tensor  # [M]
    next_value: Tensor  # [M], behind the action; anything where the dialogue ended
    q: tuple[Tensor, ...]  # each [M]
    q_rows: tuple[Tensor, ...]  # each [M, V], where a term looks at all tokens; else none
    target_q: Tensor  # [M], the smaller one, within bounds
    action: Tensor  # int64 [M]


class Loss(nn.Module):
    """The loss of a batch, as a module around the networks and their target:
    `torch.func.functional_call` provides the parameters, "model. ..." and "target. ...".

    precision: of the matrix products; values and losses stay as precise as the parameters.
    target: the target network; None for a fresh one.

    It is called with a batch [B], right-padded:

        tokens [B, T] int64        attn_mask [B, T] bool
        action_idxs [B, A] int64   state_idxs [B, A + 1] int64   0 where padded
        action_mask [B, A] bool    terminals [B, A + 1] bool     True where padded
        rewards [B, A]

    and with numbers [], "tau", "gamma", "beta" and the weights of the terms. A term whose weight is
    0 in the config is not computed, whatever the number.

    >>> from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
    >>> trunk = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
    >>> loss = Loss(ILQLModel(ILQLModelConfig(trunk=trunk)), ILQLLossConfig())
    >>> loss.target.q1[0].weight.requires_grad
    False
    """

    def __init__(
        self,
        model: ILQLModel,
        config: ILQLLossConfig,
        *,
        precision: Literal["float32", "bfloat16"] = "float32",
        target: ILQLTarget | None = None,
    ) -> None:
        super().__init__()
        self.model, self.target = model, make_target(model) if target is None else target
        self.config, self.precision = config, precision

    def forward(self, batch: TensorDict, numbers: TensorDict) -> tuple[Tensor, Terms]:
        """The loss to differentiate, and the metrics."""
        device, mixed = batch["tokens"].device.type, self.precision == "bfloat16"
        with torch.autocast(device, torch.bfloat16, enabled=mixed):
            terms, metrics = self._terms(batch, numbers)
        weights = {name: numbers[f"{'awac' if name == 'token' else name}_weight"] for name in terms}
        loss = sum((weights[name] * term for name, term in terms.items()), torch.zeros(()))
        losses = {f"{name}_loss": term.detach() for name, term in terms.items()}
        return loss, {"loss": loss.detach(), **losses, **metrics}

    def _terms(self, batch: TensorDict, numbers: TensorDict) -> tuple[Terms, Terms]:
        config, model = self.config, self.model
        masks = masks_of(batch["action_mask"], batch["terminals"], config.mask)
        wanted = self._wanted(batch, masks) if not is_traced() else None
        states: Tensor | None = None
        if config.needs_values or model.config.policy == "shared":
            states = self.states(model.trunk, batch, wanted)
        terms: Terms = {}
        metrics = {"num_tokens": batch["attn_mask"].sum().to(torch.float32)}
        advantage = torch.zeros_like(batch["rewards"])  # if not known, all are equal
        if config.needs_values:
            assert states is not None
            of_target = self.target_states(states, batch, wanted)
            values = self.values(batch, masks, states, of_target)
            terms |= self._value_terms(values, batch, masks, numbers)
            metrics |= _means(values, values.slots.take(masks.values))
            advantage = values.slots.spread(values.target_q - values.v)
        if config.awac_weight > 0:
            weights = self.weights(advantage, numbers["beta"])
            if model.config.policy == "separate":
                states = self.states(model.policy, batch, wanted)
            assert states is not None
            terms["token"] = self._token_loss(batch, masks, weights, states)
        return terms, metrics

    def _wanted(self, batch: TensorDict, masks: Masks) -> Tensor | None:
        """The positions whose hidden states are needed, bool [B, T]; None for all."""
        if self.config.awac_weight > 0 and not self._at_actions_only:
            return None
        uses = torch.zeros_like(batch["attn_mask"], dtype=torch.int64)
        mask = masks.values | masks.weights
        nothing = torch.zeros_like(mask[:, :1])
        states = torch.cat([mask, nothing], 1) | torch.cat([nothing, mask], 1)
        uses.scatter_add_(1, batch["state_idxs"], states.long())
        uses.scatter_add_(1, batch["action_idxs"], mask.long())
        return uses > 0

    @property
    def _at_actions_only(self) -> bool:
        """Whether only tokens that are actions have a weight in the policy's loss."""
        return self.model.config.per_token and self.config.transition_weight == 0

    def states(
        self,
        trunk: LanguageModel,
        batch: TensorDict,
        wanted: Tensor | None = None,
        more: More = None,
    ) -> Tensor:  # [B, T, d]
        """One pass of a trunk.

        wanted: bool [B, T], where its states will be used; None: everywhere.
        more: what else it is called with.
        """
        mask: Tensor | None = batch["attn_mask"]
        hint: dict[str, Any] = {}
        if is_traced() and not more:
            mask = None  # all padding is at the right, where causal attention does without
        if getattr(trunk, "skips", False):
            hint = {"wanted": wanted}
        return trunk(batch["tokens"], mask, **hint, **(more or {}))

    @torch.no_grad()
    def target_states(
        self,
        states: Tensor,
        batch: TensorDict,
        wanted: Tensor | None = None,
        more: More = None,
    ) -> Tensor:  # [B, T, d]
        """The target's: those of the trunk, `states`, where it has no separate trunk."""
        trunk = self.target.trunk
        return states if trunk is None else self.states(trunk, batch, wanted, more)

    def values(
        self,
        batch: TensorDict,
        masks: Masks,
        states: Tensor,  # [B, T, d], of the trunk
        of_target: Tensor,  # [B, T, d]
    ) -> Values:
        """The heads at the actions, and what the states behind them are worth."""
        config, model = self.config, self.model
        mask = masks.values | masks.weights
        slots = Slots.of(mask)
        goes_on = mask & ~batch["terminals"][:, 1:]
        nothing = torch.zeros_like(mask[:, :1])
        needed = torch.cat([mask, nothing], 1) | torch.cat([nothing, goes_on], 1)
        state_slots = Slots.of(needed)

        v = state_slots.spread(model.value(state_slots.gather(states, batch["state_idxs"])))
        at_actions = slots.gather(states, batch["action_idxs"])
        action = torch.zeros_like(batch["action_idxs"])  # whole utterances have one number only
        if model.config.per_token:
            action = next_tokens(batch)
        action = slots.take(action)
        q, q_rows = self._q(model.q_input(at_actions), action)
        with torch.no_grad():
            x = slots.gather(of_target, batch["action_idxs"])
            target_q = self._bounded([head.at(x, action) for head in self.target.q_heads])
            following = v
            if config.backup == "max":
                x = state_slots.gather(of_target, batch["state_idxs"])
                rows = self._bounded([head(x) for head in self.target.q_heads])
                following = state_slots.spread(rows.amax(-1).to(v.dtype))
        own_v, next_value = slots.take(v[:, :-1]), slots.take(following[:, 1:])
        return Values(slots, own_v, next_value, q, q_rows, target_q, action)

    def _q(self, x: Tensor, action: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The Q values of the actions, and those of all tokens if a term needs them."""
        heads = self.model.q_heads
        if self.config.cql_weight == 0 and self.config.dm_weight == 0:
            return tuple(head.at(x, action) for head in heads), ()
        rows = tuple(precise(head(x)) for head in heads)
        if self.precision == "bfloat16":
            return tuple(head.at(x, action) for head in heads), rows
        return tuple(row.gather(1, action.unsqueeze(1)).squeeze(1) for row in rows), rows

    def _bounded(self, target_q: list[Tensor]) -> Tensor:
        return min_target_q(target_q, self.config.value_min, self.config.value_max)

    def _value_terms(
        self, values: Values, batch: TensorDict, masks: Masks, numbers: TensorDict
    ) -> Terms:
        config, take = self.config, values.slots.take
        mask, count = take(masks.values), _count(batch, "actions_per_row")
        rewards = batch["rewards"].to(values.v.dtype)
        terms: Terms = {}
        if config.v_weight > 0:
            target = values.target_q
            if config.mc_returns:
                target = take(discounted_sum(rewards, numbers["gamma"]))
            terms["v"] = v_loss(values.v, target, mask, numbers["tau"], count)
        if config.q_weight > 0:
            ended = take(batch["terminals"][:, 1:])
            target = bellman_target(take(rewards), values.next_value, ended, numbers["gamma"])
            terms["q"] = q_loss(values.q, target, mask, count)
        if config.cql_weight > 0:
            terms["cql"] = cql_loss(values.q_rows, values.action, mask, config.cql_temp, count)
        if config.dm_weight > 0:
            terms["dm"] = dm_loss(values.q_rows, values.action, mask, config.dm_margin, count)
        return terms

    def _token_loss(
        self,
        batch: TensorDict,
        masks: Masks,
        weights: Tensor,  # [B, A]
        states: Tensor,  # [B, T, d], of the policy
    ) -> Tensor:
        """The policy's loss: over the actions where nothing else can have a weight."""
        config = self.config
        attended, tokens = batch["attn_mask"], batch["tokens"]
        count = _count(batch, "next_tokens_per_row")
        next_ones = attended[:, 1:] & attended[:, :-1]
        count = next_ones.sum() if count is None else count
        if self._at_actions_only:
            position, token, weight, mask = (
                batch["action_idxs"], next_tokens(batch), weights, masks.weights
            )  # fmt: skip
            if config.mask == "published":  # a row of one token has no next one
                mask = mask & attended[:, :2].all(1, keepdim=True)
        else:
            weight = self.spread(weights, batch, masks)[:, :-1]
            position = torch.arange(weight.shape[1], device=tokens.device).expand_as(weight)
            token, mask = tokens[:, 1:], next_ones
        if not is_traced():
            mask = mask & (weight != 0)
        slots = Slots.of(mask)
        logits = precise(self.model.logits(slots.gather(states, position)))
        take = slots.take
        return token_loss(logits, take(token), take(weight), take(mask), count)

    def weights(self, advantage: Tensor, beta: Tensor | float) -> Tensor:
        """How much actions count for the policy, by their advantage [*]."""
        by_size, most = self.config.exp_weights, self.config.clip_weight
        return advantage_weights(advantage, beta, exp_weights=by_size, clip_weight=most)

    def spread(self, weights: Tensor, batch: TensorDict, masks: Masks) -> Tensor:
        """The weights of all tokens [B, T], from those of the actions [B, A]."""
        config = self.config
        first, last = batch["action_idxs"], batch["action_idxs"]
        if not self.model.config.per_token:  # from the state to the end token's own position
            first, last = batch["state_idxs"][:, :-1], last - 1
        others = config.transition_weight
        if config.clip_weight is not None:
            others = min(others, config.clip_weight)
        return token_weights(weights, masks.weights, first, last, batch["tokens"].shape[1], others)


def with_row_means(
    batch: TensorDict, mask: Literal["strict", "published"] = "strict"
) -> TensorDict:
    """A batch with the counts by which the mean over its parts is the loss of the whole batch.

    Losses are sums over actions and tokens, divided by how many a batch has. Parts of a batch have
    more or fewer, so that the mean over parts is not the mean over the batch: it weighs the
    actions of a part with few of them more. This adds what a row has of both in the mean, by which
    the parts then divide.

    mask: which slots count, as the config of the loss has it.

    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> ends = torch.tensor([[False, False, True], [False, True, True]])
    >>> batch = TensorDict(action_mask=mask, attn_mask=mask, terminals=ends, batch_size=[2])
    >>> with_row_means(batch)["actions_per_row"]
    tensor([1.5000, 1.5000])
    """
    counted = masks_of(batch["action_mask"], batch["terminals"], mask).values
    actions = counted.sum(1).to(torch.float32)
    attended = batch["attn_mask"]
    others = (attended[:, 1:] & attended[:, :-1]).sum(1).to(torch.float32)
    batch = batch.copy()
    batch["actions_per_row"] = actions.mean().expand_as(actions)
    batch["next_tokens_per_row"] = others.mean().expand_as(others)
    return batch


def _count(batch: TensorDict, name: str) -> Tensor | None:
    """The divisor of sums, if the batch is a part of a larger one."""
    return batch[name].sum() if name in batch.keys() else None


def next_tokens(batch: TensorDict) -> Tensor:
    """The token behind each action's position [B, A].

    >>> tokens, actions = torch.tensor([[7, 8, 9]]), torch.tensor([[0, 1]])
    >>> next_tokens(TensorDict(tokens=tokens, action_idxs=actions, batch_size=[1]))
    tensor([[8, 9]])
    """
    last = batch["tokens"].shape[1] - 1
    return batch["tokens"].gather(1, (batch["action_idxs"] + 1).clamp_max(last))


def _means(values: Values, mask: Tensor) -> Terms:
    means = {
        "v_mean": values.v,
        "q_mean": torch.stack(values.q).mean(0),
        "advantage_mean": values.target_q - values.v,
    }
    return {name: masked_mean(mean.detach(), mask) for name, mean in means.items()}
