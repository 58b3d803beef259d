"""`ILQL`: a config, a learner and its state as one object, with the published names.

Settings are fields of `ILQLConfig`, learning is `ILQLLearner.grads` and `apply` on a state in the
memory of the networks; scores of data come of `scores.py`, texts of `generate.py`.

Legend: B rows, T tokens of a row, A actions of a row, V tokens of the vocabulary, P embeddings put
before the tokens, d numbers of a hidden state.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, Literal, Self, get_type_hints

import torch
from torch import Tensor

from raffia.algorithms.ilql.agent_files import load_agent, save_agent, saved_config
from raffia.algorithms.ilql.agent_inputs import (
    Items,
    as_dataset,
    batch_of,
    check_dataset,
)
from raffia.algorithms.ilql.agent_networks import (
    GPT2,
    AgentNetworks,
    NetConfig,
    described,
    networks_of,
    trunk_config_of,
)
from raffia.algorithms.ilql.config import (
    ILQLConfig,
    ILQLLossConfig,
    ILQLModelConfig,
    OptimizerConfig,
    TargetConfig,
)
from raffia.algorithms.ilql.evaluator import ILQL_Evaluator, MakeEnv
from raffia.algorithms.ilql.generate import generate
from raffia.algorithms.ilql.model import ILQLModel, ILQLOutputs, make_target
from raffia.algorithms.ilql.policy import ILQL_Policy
from raffia.algorithms.ilql.scores import get_scores, qvs_of, weights_of
from raffia.hints import check_range
from raffia.lm.data.rl_dataset import RL_Dataset
from raffia.lm.decoding.config import DecodeConfig
from raffia.lm.decoding.generations import Generations
from raffia.lm.model import LanguageModel
from raffia.lm.tokenizers.tokenizer import Tokenizer
from raffia.nn.params import update_target
from raffia.tensordict.node import Node
from raffia.tensordict.tensordict import TensorDict

Kwargs = Mapping[str, Any]
PARTS: dict[str, type] = {
    "model": ILQLModelConfig,
    "loss": ILQLLossConfig,
    "target": TargetConfig,
    "optimizer": OptimizerConfig,
}
NETWORKS = ("trunk", "policy", "target")  # which networks there are, not how they act
SETTINGS = {  # attribute -> part of the config, field, type
    "lr" if name == "learning_rate" else name: (part, name, hint)
    for part, kind in PARTS.items()
    for name, hint in get_type_hints(kind).items()
    if name not in NETWORKS
}


def _also_keyed(method: Callable[..., ILQLOutputs]) -> Callable[..., Any]:
    """`forward(tokens, ...)` that can be given a container, too, as keyed modules are."""

    @wraps(method)
    def forward(self: ILQL, *args: Any, **kwargs: Any) -> ILQLOutputs | Node:
        if args and isinstance(args[0], Node):
            return self._read_and_write(args[0])
        return method(self, *args, **kwargs)

    return forward


class ILQL(AgentNetworks):
    """Implicit Language Q-Learning: learns from logged dialogues, and generates better ones.

    dataset: the dialogues, a `DialogueDataset` or any `torch.utils.data.Dataset` of `DataPoint`s;
        None where nothing is learnt from them any more.
    net_config: entries of a GPT as `GPT2` has them; a folder with a language model; or one itself.
    index: number of this agent, among others.
    batch_size: rows of an update.
    lr, weight_decay: of AdamW. Gradients are not clipped unless `max_grad_norm` is set.
    alpha: how far the target network moves in each update, see `soft_update`.
    beta, exp_weights, clip_weight: how much more better tokens count for the policy.
    gamma: discount per token.
    tau: expectile of V, 0.5 to 1.
    mutation: what made this agent of another one.
    transition_weight: of tokens that are not the agent's, for the policy.
    value_min, value_max: bounds of target Q.
    detach_v, detach_q, detach_pi: no gradient from that head into the language model.
    double_q: two Q heads, of whose targets the smaller counts.
    per_token: an action is a token; else it is a whole utterance.
    dm_margin, cql_temp: of the losses of that name, whose weights are `dm_weight`, `cql_weight`.

    All of this can be read and set afterwards, too, with the weights of the losses, and with
    everything else that `config` has; what the networks are made of cannot be set.

    As a keyed module it reads `in_keys` and writes `out_keys`: "v" [B, A + 1], "q1", "q2",
    "target_q1", "target_q2" [B, A, V], "logits" [B, T, V].

    Source: Snell, Kostrikov, Su, Yang & Levine (2022), "Offline RL for Natural Language Generation
    with Implicit Language Q Learning", arXiv 2206.11871.

    >>> from raffia.lm.data.dialogue import DataPoint, DialogueDataset, Vocabulary
    >>> right = DataPoint.from_tokens([0, 3, 1, 5, 2], [2, 3], [0.0, 1.0])
    >>> wrong = DataPoint.from_tokens([0, 3, 1, 4, 2], [2, 3], [0.0, 0.0])
    >>> data = DialogueDataset.of_points([right, wrong], Vocabulary(6))
    >>> small = {"vocab_size": 6, "n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 16}
    >>> agent = ILQL(data, small, batch_size=2, lr=1e-3)
    >>> losses = [agent.learn()["loss"].item() for _ in range(20)]
    >>> losses[-1] < losses[0], agent.step
    (True, 20)
    >>> loss, metrics = agent.get_loss([right, wrong])
    >>> loss.backward()
    >>> agent.get_qvs([right])["q1"].shape, agent.get_weights([right])
    (torch.Size([1, 2]), tensor([[0., 0., 1., 1., 0.]]))
    >>> agent.get_scores([right], beta=2.0).shape, agent.clone(index=3).index
    (torch.Size([1, 5, 6]), 3)
    """

    dataset: RL_Dataset | None

    # Those that are numbers and may differ between members of a population.
    hyper_names = (
        *(name for name, (_, _, hint) in SETTINGS.items() if hint in (float, float | None)),
        "batch_size",
    )

    # Settings, which are read from the config and set there.
    double_q: bool
    detach_v: bool
    detach_q: bool
    detach_pi: bool
    per_token: bool
    evolvable_heads: bool
    max_head_layers: int
    max_head_nodes: int | None
    gamma: float
    tau: float
    beta: float
    exp_weights: bool
    transition_weight: float
    clip_weight: float | None
    value_min: float | None
    value_max: float | None
    awac_weight: float
    v_weight: float
    q_weight: float
    cql_weight: float
    cql_temp: float
    dm_weight: float
    dm_margin: float
    mc_returns: bool
    backup: Literal["expectile", "max"]
    mask: Literal["strict", "published"]
    alpha: float
    interval: int
    lr: float
    value_rate: float
    weight_decay: float
    beta1: float
    beta2: float
    max_grad_norm: float | None
    warmup_updates: int
    decay: Literal["constant", "linear", "cosine"]
    final_share: float

    def __init__(
        self,
        dataset: Any,
        net_config: NetConfig = GPT2,
        index: int = 0,
        batch_size: int = 64,
        lr: float = 1e-5,
        alpha: float = 0.005,
        beta: float = 0.0,
        gamma: float = 0.99,
        tau: float = 0.6,
        mutation: str | None = None,
        transition_weight: float = 0.0,
        clip_weight: float | None = None,
        value_max: float | None = None,
        value_min: float | None = None,
        detach_v: bool = False,
        detach_q: bool = False,
        detach_pi: bool = False,
        double_q: bool = True,
        per_token: bool = True,
        exp_weights: bool = True,
        dm_margin: float = 0.0,
        cql_temp: float = 1.0,
        weight_decay: float = 0.0,
        device: torch.device | str = "cpu",
    ) -> None:
        given = locals()  # by the names of the attributes
        networks = networks_of(net_config)
        parts: dict[str, dict[str, Any]] = {
            "model": {"trunk": networks.trunk_config, **networks.arrangement},
            "loss": {"cql_weight": 0.01 if per_token else 0.0},  # it compares tokens
            "target": {},
            "optimizer": {"max_grad_norm": None},
        }
        for name, (part, field, _) in SETTINGS.items():
            if name in given:
                parts[part][field] = given[name]
        config = ILQLConfig(**{part: kind(**parts[part]) for part, kind in PARTS.items()})
        self._set_up(config, networks.trunk, dataset, index, batch_size, device)
        self.mutation, self.layer_bounds = mutation, networks.bounds

    @classmethod
    def from_config(
        cls,
        config: ILQLConfig,
        dataset: RL_Dataset | None = None,
        *,
        trunk: LanguageModel | None = None,
        index: int = 0,
        batch_size: int = 64,
        device: torch.device | str = "cpu",
    ) -> Self:
        """The agent that a whole config describes.

        trunk: a language model with its weights; None for a fresh one. Its shape counts, not that
            of the config.

        >>> from raffia.algorithms.ilql.config import TrunkConfig
        >>> trunk = TrunkConfig(vocab_size=6, n_layer=1, n_head=2, n_embd=8, block_size=16)
        >>> model = ILQLModelConfig(trunk=trunk, policy="separate", target="trunk")
        >>> agent = ILQL.from_config(ILQLConfig(model=model))
        >>> sorted(name for name, _ in agent.model.named_children())
        ['policy', 'q1', 'q2', 'trunk', 'v']
        """
        if trunk is not None:
            shape = replace(config.model, trunk=trunk_config_of(trunk))
            config = replace(config, model=shape)
        agent = cls.__new__(cls)
        agent._set_up(config, trunk, dataset, index, batch_size, device)
        return agent

    def _set_up(
        self,
        config: ILQLConfig,
        trunk: LanguageModel | None,
        dataset: RL_Dataset | None,
        index: int,
        batch_size: int,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        check_range("batch_size", batch_size, 1)
        dataset = as_dataset(dataset, config.model.trunk.vocab_size)
        check_dataset(dataset, config.model)
        self.dataset, self.index, self.batch_size = dataset, index, batch_size
        self.mutation, self.layer_bounds, self.fitness = None, {}, []
        self.step = 0  # updates that were made
        self.seed = 0  # of the order of the data, and of dropout
        self._upcoming: Any = (None, 0, None)  # order, update, and its batches from there on
        model = ILQLModel(config.model, trunk)
        self.install(model, make_target(model), config)
        self.to(device)

    @property
    def net_config(self) -> dict[str, Any]:
        """The description of the networks that the constructor takes."""
        return described(self.config.model, self.layer_bounds)

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

    def _read_and_write(self, tensordict: Node) -> Node:
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
        prefix: dict[str, Any] = {
            "prefix_embs": prefix_embs,
            "prefix_attn_mask": prefix_attn_mask,
            "remove_prefix_position_embs": remove_prefix_position_embs,
        }
        given = {} if prefix_embs is None else prefix
        kwargs = ({**given, **(more or {})} for more in (qv_kwargs, target_kwargs))
        return qvs_of(self._loss, self.prepare_inputs(items), *kwargs)

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
        """The scores of each token of the vocabulary after each token; see `scores.py`."""
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
        """The loss [] with the graph of its gradients, and its metrics, as `learn` has them."""
        loss, metrics = self._loss(self.prepare_inputs(items), self._hyper)
        return loss, TensorDict(metrics)

    def soft_update(self) -> None:
        """Move the target: target <- (1 - alpha) target + alpha online. `learn` does it, too."""
        self._move_target(self.alpha)

    def hardUpdate(self) -> None:
        """Copy what is trained to the target network."""
        self._move_target(1.0)

    def _move_target(self, rate: float) -> None:
        for name, module in self.target.named_children():
            update_target(module, self.model.get_submodule(name), rate)

    def learn(self, items: Items | None = None) -> TensorDict:
        """One update: of the weights, and by `alpha` of the target network; gives metrics.

        items: None for the next `batch_size` rows of the data set, which follow from `seed` and
            `step`; so an agent that was saved and loaded learns as if it had not been.

        The metrics are those of `ILQLLearner.grads`. Dropout draws from a separate generator.
        """
        if items is None:
            items = self._next_rows()
        batch, learner = self.prepare_inputs(items), self._learner
        if self.opt is None:
            self.opt = learner.state_of(self.model)["opt"]
        state = self.learner_state()
        update, metrics = learner.grads(state, batch)
        self.load_learner_state(learner.apply(state, update))
        return metrics

    def _next_rows(self) -> TensorDict:
        """The batch of this update, which follows from the seed; quick for one after the other."""
        if self.dataset is None:
            raise ValueError(
                "an agent without a dataset cannot draw batches itself: pass a batch, learn(batch)"
            )
        order = self.dataset, self.seed, self.batch_size, self.per_token
        if self._upcoming[:2] != (order, self.step):
            batches = self.dataset.batches(
                self.seed, self.step, self.batch_size, per_token=self.per_token
            )
        else:
            batches = self._upcoming[2]
        self._upcoming = order, self.step + 1, batches
        return next(batches)

    # -- speaking

    def get_policy(
        self,
        tokenizer: Tokenizer,
        decode: DecodeConfig | None = None,  # None: the config's
        *,
        generator: torch.Generator | None = None,  # of sampling; None: torch's own
    ) -> ILQL_Policy:
        """The policy of this agent in a dialogue, by the weights at the time of each answer."""
        decode = self.config.decode if decode is None else decode
        return ILQL_Policy(self, tokenizer, decode, generator=generator)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],  # tokens; of different lengths
        tokenizer: Tokenizer,  # whose end of the agent's utterance ends a text
        decode: DecodeConfig | None = None,  # None: the config's
        *,
        generator: torch.Generator | None = None,  # of sampling; None: torch's own
    ) -> Generations:
        """The texts of the agent after the prompts, up to the end of its utterance."""
        return generate(
            *(self.model, self.target, prompts, self.config.decode if decode is None else decode),
            generator=generator,
            tokenizer=tokenizer,
        )

    def test(
        self,
        make_env: MakeEnv,
        tokenizer: Tokenizer,
        *,
        num_games: int = 32,
        decode: DecodeConfig | None = None,  # None: the config's
        seed: int = 0,
    ) -> float:
        """The mean return of this many games, which is appended to `fitness`."""
        decode = self.config.decode if decode is None else decode
        evaluator = ILQL_Evaluator(make_env, tokenizer, decode, num_games=num_games, seed=seed)
        self.fitness.append(evaluator.evaluate(self).env_reward)
        return self.fitness[-1]

    # -- copies

    def clone(self, index: int | None = None) -> Self:
        """An agent like this one, its optimiser's state included, which shares but the data set.

        index: its number; None for the same.
        """
        new = copy.deepcopy(self, {id(self.dataset): self.dataset})
        new.index = self.index if index is None else index
        return new

    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Write a folder atomically: weights, target, optimiser and settings, without the data set.

        Safetensors and JSON only. A checkpoint that is there is replaced, anything else refused.
        """
        save_agent(self, path)

    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Load a saved agent into this one, which keeps its data set and device.

        Raises ValueError, and changes nothing, if it has a language model that cannot be made from
        the checkpoint, such as one of `transformers`, and this agent has no such one.
        """
        load_agent(self, path)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        dataset: RL_Dataset | None = None,
        *,
        trunk: LanguageModel | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """The agent that was saved.

        trunk: a language model of the same kind, needed only where the agent's was not made from a
            description: one of `transformers`, or with low-rank changes. Its weights are replaced.

        >>> import tempfile
        >>> agent = ILQL(None, {"vocab_size": 6, "n_layer": 1, "n_head": 2, "n_embd": 8}, index=7)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     agent.save_checkpoint(folder)
        ...     ILQL.from_checkpoint(folder).index
        7
        """
        config = saved_config(path)
        agent = cls.from_config(config, dataset, trunk=trunk, device=device)
        agent.load_checkpoint(path)
        return agent

    def _check_kwargs(self, policy: Kwargs | None, target: Kwargs | None) -> None:
        if policy and self.config.model.policy == "shared":
            raise ValueError(
                'policy_kwargs cannot be passed with policy="shared": there the logits come from '
                "the shared trunk, which is called with qv_kwargs"
            )
        if target and self.target.trunk is None:
            raise ValueError(
                'target_kwargs cannot be passed with target="heads": there the target has no '
                "separate trunk, and the shared trunk is called with qv_kwargs"
            )

    def __getstate__(self) -> dict[str, Any]:
        """The attributes that a copy takes over."""
        return {**self.__dict__, "_learner_of": None, "_upcoming": (None, 0, None)}


def _setting(part: str, field: str) -> property:
    """An attribute that is a field of the config: read there, and set there."""

    def read(agent: ILQL) -> object:
        return getattr(getattr(agent.config, part), field)

    def write(agent: ILQL, value: object) -> None:
        changed: Any = replace(getattr(agent.config, part), **{field: value})
        agent.config = replace(agent.config, **{part: changed})

    return property(read, write, doc=f"`config.{part}.{field}`")


for _name, (_part, _field, _) in SETTINGS.items():
    setattr(ILQL, _name, _setting(_part, _field))
