"""The networks of `ILQL` as a keyed module: what they say of data, and the loss of it.

Legend: B rows, T tokens of a row, A actions of a row, V tokens of the vocabulary, P embeddings put
before the tokens, d numbers of a hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from raffia.algorithms.ilql.agent_inputs import Items, batch_of
from raffia.algorithms.ilql.agent_settings import AgentSettings
from raffia.algorithms.ilql.agent_values import qvs_of, weights_of
from raffia.algorithms.ilql.config import ILQLConfig
from raffia.algorithms.ilql.learner import hyper_of
from raffia.algorithms.ilql.loss import Loss
from raffia.algorithms.ilql.model import ILQLModel, ILQLOutputs, ILQLTarget
from raffia.algorithms.ilql.net_config import described
from raffia.algorithms.ilql.scores import get_scores
from raffia.lm.data.rl_dataset import RL_Dataset
from raffia.nn.base import TensorDictModuleBase
from raffia.nn.params import update_target
from raffia.tensordict.node import Node
from raffia.tensordict.tensordict import TensorDict

__all__ = ["AgentNetworks"]

Kwargs = Mapping[str, Any]


def _also_keyed(method: Callable[..., ILQLOutputs]) -> Callable[..., Any]:
    """`forward(tokens, ...)` that can be given a container, too, as keyed modules are."""

    @wraps(method)
    def forward(self: AgentNetworks, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Node):
            return self._read_and_write(args[0])
        return method(self, *args, **kwargs)

    return forward


class AgentNetworks(AgentSettings, TensorDictModuleBase):
    """The half of `ILQL` that does not change itself, but for the slow copy.

    >>> from raffia.algorithms.ilql.agent import ILQL
    >>> agent = ILQL(None, {"vocab_size": 6, "n_layer": 1, "n_head": 2, "n_embd": 8}, alpha=0.5)
    >>> isinstance(agent, AgentNetworks), agent.in_keys
    (True, ['tokens', 'state_idxs', 'action_idxs', 'attn_mask'])
    """

    model: ILQLModel
    target: ILQLTarget
    dataset: RL_Dataset | None
    layer_bounds: dict[str, int]  # "min_layers", "max_layers", where given
    _loss_of: tuple[Loss] | None

    def install(self, model: ILQLModel, target: ILQLTarget, config: ILQLConfig) -> None:
        """Take other networks, and the config that they are made by."""
        self.model, self.target, self._config = model, target, config
        heads = ["q1", "q2"] if config.model.double_q else ["q1"]
        self.in_keys = ["tokens", "state_idxs", "action_idxs", "attn_mask"]
        self.out_keys = ["v", *heads, *(f"target_{name}" for name in heads), "logits"]
        self._changed()

    @property
    def net_config(self) -> dict[str, Any]:
        """What the networks are, as the constructor is told of them."""
        return described(self.config.model, self.layer_bounds)

    @property
    def device(self) -> torch.device:
        """Where the networks are."""
        return next(self.model.parameters()).device

    @_also_keyed
    def forward(
        self,
        tokens: Tensor,  # int64 [B, T]
        state_idxs: Tensor,  # int64 [B, A + 1]
        action_idxs: Tensor,  # int64 [B, A]
        attn_mask: Tensor | None = None,  # bool [B, T]
        prefix_embs: Tensor | None = None,  # [B, P, d], put before the tokens
        prefix_attn_mask: Tensor | None = None,  # bool [B, P]
        remove_prefix_position_embs: bool = False,  # the prefix has its positions in it already
        qv_kwargs: Kwargs | None = None,  # what else the trunk is called with, such as a cache
        policy_kwargs: Kwargs | None = None,  # ... the policy, where it is separate
        target_kwargs: Kwargs | None = None,  # ... the target's trunk, where it has one
        skip_policy_on_train: bool = False,  # in training mode no logits
        detach_full_policy: bool = False,  # the logits without gradients
    ) -> ILQLOutputs:
        """V, Q, target Q and logits of whole rows; or, given a container, into that."""
        self._check_kwargs(policy_kwargs, target_kwargs)
        kwargs = {"trunk": qv_kwargs, "policy": policy_kwargs, "target": target_kwargs}
        outputs: ILQLOutputs = self.model(
            tokens,
            state_idxs,
            action_idxs,
            attn_mask,
            prefix_embs=prefix_embs,
            prefix_attn_mask=prefix_attn_mask,
            remove_prefix_position_embs=remove_prefix_position_embs,
            target=self.target,
            with_logits=not (skip_policy_on_train and self.training),
            detach_policy=detach_full_policy,
            trunk_kwargs={name: more for name, more in kwargs.items() if more},
        )
        return outputs

    def _read_and_write(self, tensordict: Any) -> Any:
        *needed, mask = self.in_keys
        *written, logits = self.out_keys_source
        outputs: ILQLOutputs = self.model(
            *(tensordict[key] for key in needed),
            tensordict.get(mask, None),
            target=self.target,
            with_logits=logits in self.out_keys,
        )
        entries = (outputs.v, *outputs.q, *outputs.target_q)
        for key, entry in zip(written, entries, strict=True):
            tensordict.set(key, entry)
        return tensordict if outputs.logits is None else tensordict.set(logits, outputs.logits)

    def get_qvs(
        self,
        items: Items,
        prefix_embs: Tensor | None = None,  # [B, P, d]
        prefix_attn_mask: Tensor | None = None,  # bool [B, P]
        remove_prefix_position_embs: bool = False,
        qv_kwargs: Kwargs | None = None,
        target_kwargs: Kwargs | None = None,
    ) -> TensorDict:
        """Q and V at the actions of the data, each [B, A] and 0 where padded.

        "v", "next_v" (0 where the dialogue ended), "q1", "q2" (with double_q), "target_q" (the
        smaller one, within bounds), "advantage" = target_q - v, "bellman_target" = r + gamma
        next_v; and of the batch "rewards" and "action_mask". The policy is not run.
        """
        self._check_kwargs(None, target_kwargs)
        prefix: dict[str, Any] = {}
        if prefix_embs is not None:
            prefix = {
                "prefix_embs": prefix_embs,
                "prefix_attn_mask": prefix_attn_mask,
                "remove_prefix_position_embs": remove_prefix_position_embs,
            }
        of_trunk, of_target = (
            {**prefix, **({} if more is None else more)} for more in (qv_kwargs, target_kwargs)
        )
        return qvs_of(self._loss, self.prepare_inputs(items), of_trunk, of_target)

    def get_weights(self, items: Items) -> Tensor:  # [B, T]
        """How much the token behind each position counts for the policy."""
        return weights_of(self._loss, self.prepare_inputs(items))

    def get_scores(
        self,
        items: Items,
        *,
        beta: float = 1.0,
        exp_weights: bool = True,
        clip_weight: float | None = None,
        include_advantage: bool = True,
        include_logits: bool = False,
        logit_temp: float = 1.0,
    ) -> Tensor:  # [B, T, V]
        """What each token of the vocabulary would be worth behind each token, see `scores.py`."""
        batch = self.prepare_inputs(items)
        return get_scores(
            self.model,
            self.target,
            batch["tokens"],
            batch["action_idxs"],
            attn_mask=batch["attn_mask"],
            action_mask=batch["action_mask"],
            beta=beta,
            exp_weights=exp_weights,
            clip_weight=clip_weight,
            include_advantage=include_advantage,
            include_logits=include_logits,
            logit_temp=logit_temp,
        )

    def prepare_inputs(self, items: Items) -> TensorDict:
        """A batch [B] of these rows, where the networks are.

        items: rows, which the data set puts together; or what it made of them, as a container or
            as a dict.
        """
        return batch_of(items, self.dataset, self.config.model).to(self.device)

    def get_loss(self, items: Items) -> tuple[Tensor, TensorDict]:
        """The loss [] with the graph of its gradients, and what `learn` tells of it."""
        loss, told = self._loss(self.prepare_inputs(items), self._hyper)
        return loss, TensorDict(told)

    def soft_update(self) -> None:
        """Move the slow copy: target <- (1 - alpha) target + alpha online. `learn` does it, too."""
        self._move_target(self.alpha)

    def hardUpdate(self) -> None:
        """Copy what is trained to the slow copy."""
        self._move_target(1.0)

    def _move_target(self, rate: float) -> None:
        for name, module in self.target.named_children():
            update_target(module, self.model.get_submodule(name), rate)

    @property
    def _hyper(self) -> TensorDict:
        return hyper_of(self.config, next(self.model.parameters()))

    @property
    def _loss(self) -> Loss:
        """Around the same networks: within a tuple they are not modules of this one twice."""
        if self._loss_of is None:
            config = self.config
            self._loss_of = (
                Loss(self.model, config.loss, precision=config.precision, target=self.target),
            )
        return self._loss_of[0]

    def _changed(self) -> None:
        self._loss_of = None

    def _check_kwargs(self, policy: Kwargs | None, target: Kwargs | None) -> None:
        if policy and self.config.model.policy == "shared":
            raise ValueError(
                'policy_kwargs: with policy="shared" the logits come of the one trunk, which is '
                "called with qv_kwargs"
            )
        if target and self.target.trunk is None:
            raise ValueError(
                'target_kwargs: with target="heads" the target has no trunk; the one there is is '
                "called with qv_kwargs"
            )
