"""What `ILQL` tells of the data: V, Q and the weights at their actions.

Legend: B rows, T tokens of a row, A actions of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from raffia.algorithms.ilql.loss import Loss, Values
from raffia.algorithms.ilql.places import HiddenStates, Trunk, hidden_states
from raffia.algorithms.ilql.terms import bellman_target
from raffia.algorithms.ilql.token_weights import Masks, advantage_weights, masks_of
from raffia.functional.trees import is_traced
from raffia.tensordict.tensordict import TensorDict

__all__ = ["qvs_of", "weights_of"]

Kwargs = Mapping[str, Any]


def qvs_of(
    loss: Loss,
    batch: TensorDict,
    trunk_kwargs: Kwargs | None = None,  # what else the trunk is called with
    target_kwargs: Kwargs | None = None,  # ... the target's, where it has one
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
        return torch.where(masks.values, values.places.spread(entry), 0)

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
        advantage = values.places.spread(values.target_q - values.v)
    weights = advantage_weights(
        advantage, config.beta, exp_weights=config.exp_weights, clip_weight=config.clip_weight
    )
    return loss.spread(weights, batch, masks)


def _values(
    loss: Loss,
    batch: TensorDict,
    masks: Masks,
    trunk_kwargs: Kwargs | None = None,
    target_kwargs: Kwargs | None = None,
) -> Values:
    """What the heads say, of the actions alone: nothing here looks at the Q of other tokens."""

    def states(trunk: Trunk, more: Kwargs | None) -> HiddenStates:
        return hidden_states(trunk, batch["tokens"], batch["attn_mask"], packed=True, more=more)

    of_trunk = slow = states(loss.model.trunk, trunk_kwargs)
    if loss.target.trunk is not None:
        with torch.no_grad():
            slow = states(loss.target.trunk, target_kwargs)
    config = replace(loss.config, backup="expectile", cql_weight=0.0, dm_weight=0.0, q_weight=1.0)
    bare = Loss(loss.model, config, target=loss.target)
    return bare.values(batch, masks, of_trunk, slow, lean=not is_traced())
