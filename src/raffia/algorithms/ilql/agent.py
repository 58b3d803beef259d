"""`ILQL`: networks, their slow copies, the optimiser's state and the settings as one object.

It is the public face of the pure parts beside it: the loss is that of `loss.py`, an update that of
`learner.py`, texts come from `generate.py`.

Legend: B rows, T tokens of a row, A actions of a row, V tokens of the vocabulary.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from raffia.algorithms.ilql.agent_files import load_agent, save_agent, saved_config
from raffia.algorithms.ilql.agent_inputs import Items, Stream, as_dataset, check_dataset
from raffia.algorithms.ilql.agent_networks import AgentNetworks
from raffia.algorithms.ilql.agent_shape import reshaped, why_fixed
from raffia.algorithms.ilql.agent_state import become, shared_state, take_over
from raffia.algorithms.ilql.config import (
    ILQLConfig,
    ILQLLossConfig,
    ILQLModelConfig,
    OptimizerConfig,
    TargetConfig,
)
from raffia.algorithms.ilql.evaluator import ILQL_Evaluator, MakeEnv
from raffia.algorithms.ilql.generate import generate
from raffia.algorithms.ilql.learner import ILQLLearner
from raffia.algorithms.ilql.model import ILQLModel, ILQLTarget, make_target
from raffia.algorithms.ilql.net_config import (
    GPT2,
    NetConfig,
    networks_of,
    trunk_config_of,
)
from raffia.algorithms.ilql.places import Trunk
from raffia.algorithms.ilql.policy import ILQL_Policy
from raffia.lm.data.rl_dataset import RL_Dataset
from raffia.lm.decoding.config import DecodeConfig
from raffia.lm.decoding.generations import Generations
from raffia.lm.tokenizers.tokenizer import Tokenizer
from raffia.tensordict.tensordict import TensorDict

__all__ = ["ILQL"]


class ILQL(AgentNetworks):
    """Implicit Language Q-Learning: learns from logged dialogues, and speaks better than they do.

    dataset: the dialogues, a `DialogueDataset` or any `torch.utils.data.Dataset` of `DataPoint`s;
        None where nothing is learnt from them any more.
    net_config: entries of a GPT as `GPT2` has them; a folder with a language model; or one itself.
    index: number of this agent, among others.
    batch_size: rows of an update.
    lr, weight_decay: of AdamW. Gradients are not clipped unless `max_grad_norm` is set.
    alpha: how far the slow copy moves in each update, see `soft_update`.
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
    everything else that `config` has; what the networks are made of can't be set.

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
    >>> loss, told = agent.get_loss([right, wrong])
    >>> loss.backward()
    >>> agent.get_qvs([right])["q1"].shape, agent.get_weights([right])
    (torch.Size([1, 2]), tensor([[0., 0., 1., 1., 0.]]))
    >>> agent.get_scores([right], beta=2.0).shape, agent.clone(index=3).index
    (torch.Size([1, 5, 6]), 3)
    """

    opt: TensorDict | None  # the optimiser's moments, from the first update on
    _learner_of: ILQLLearner | None

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
        networks = networks_of(net_config)
        model = ILQLModelConfig(
            trunk=networks.trunk_config,
            double_q=double_q,
            detach_v=detach_v,
            detach_q=detach_q,
            detach_pi=detach_pi,
            per_token=per_token,
            **networks.arrangement,
        )
        loss = ILQLLossConfig(
            gamma=gamma,
            tau=tau,
            beta=beta,
            exp_weights=exp_weights,
            transition_weight=transition_weight,
            clip_weight=clip_weight,
            value_min=value_min,
            value_max=value_max,
            cql_weight=0.01 if per_token else 0.0,  # it compares tokens
            cql_temp=cql_temp,
            dm_margin=dm_margin,
        )
        optimizer = OptimizerConfig(learning_rate=lr, weight_decay=weight_decay, max_grad_norm=None)
        config = ILQLConfig(
            model=model, loss=loss, target=TargetConfig(alpha=alpha), optimizer=optimizer
        )
        self._set_up(
            config, networks.trunk, dataset, index, batch_size, mutation, networks.bounds, device
        )

    @classmethod
    def from_config(
        cls,
        config: ILQLConfig,
        dataset: RL_Dataset | None = None,
        *,
        trunk: Trunk | None = None,
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
        agent._set_up(config, trunk, dataset, index, batch_size, None, {}, device)
        return agent

    def _set_up(
        self,
        config: ILQLConfig,
        trunk: Trunk | None,
        dataset: RL_Dataset | None,
        index: int,
        batch_size: int,
        mutation: str | None,
        layer_bounds: dict[str, int],
        device: torch.device | str,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: an update has at least one row")
        dataset = as_dataset(dataset, config.model.trunk.vocab_size)
        check_dataset(dataset, config.model)
        self.dataset, self.index, self.batch_size = dataset, index, batch_size
        self.mutation, self.layer_bounds = mutation, layer_bounds
        self.fitness: list[float] = []  # what `test` found
        self.step = 0  # updates that were made
        self.seed = 0  # of the order of the data, and of dropout
        self._stream = Stream()
        model = ILQLModel(config.model, trunk)
        self.install(model, make_target(model), config)
        self.to(device)

    def install(self, model: ILQLModel, target: ILQLTarget, config: ILQLConfig) -> None:
        """Take other networks, and the config that they are made by; the optimiser begins anew."""
        super().install(model, target, config)
        self.opt = None

    def learn(self, items: Items | None = None) -> TensorDict:
        """One update: of the weights, and by `alpha` of the slow copy; gives what there is to tell.

        items: None for the next `batch_size` rows of the data set, which follow from `seed` and
            `step`; so an agent that was saved and loaded goes on as if nothing had been.

        The metrics are those of `ILQLLearner.grads`. Dropout draws from a generator of its own.
        """
        if items is None:
            if self.dataset is None:
                raise ValueError("an agent without a data set learns from what it is given")
            items = self._stream.take(
                *(self.dataset, self.seed, self.step, self.batch_size), per_token=self.per_token
            )
        batch, learner = self.prepare_inputs(items), self._learner
        if self.opt is None:
            self.opt = learner.state_of(self.model)["opt"]
        state = shared_state(self, self._hyper)
        update, metrics = learner.grads(state, batch)
        take_over(self, learner.apply(state, update))
        return metrics

    # -- speaking

    def get_policy(
        self,
        tokenizer: Tokenizer,
        decode: DecodeConfig | None = None,  # None: the config's
        *,
        generator: torch.Generator | None = None,  # of sampling; None: torch's own
    ) -> ILQL_Policy:
        """Who says this agent's part in a dialogue; it speaks with the weights as they then are."""
        decode = self.config.decode if decode is None else decode
        return ILQL_Policy(self, tokenizer, decode, generator=generator)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],  # tokens; of unlike length
        tokenizer: Tokenizer,  # whose end of the agent's utterance ends a text
        decode: DecodeConfig | None = None,  # None: the config's
        *,
        generator: torch.Generator | None = None,  # of sampling; None: torch's own
    ) -> Generations:
        """What the agent says after the prompts, up to the end of its utterance."""
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
        """Mean return of so many games; it is put behind `fitness`."""
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

    # -- as a member of a population, see `raffia.evolution.agents`

    def learner_state(self) -> TensorDict:
        """What learning changes, in the memory of this agent.

        Before the first update "opt" is empty.
        """
        return shared_state(self, self._hyper)

    def load_learner_state(self, state: TensorDict) -> None:
        """Become what the state is; the settings stay. Its "opt" may be used as it is."""
        become(self, state)

    def why_fixed(self) -> str | None:
        """Why the networks can't get layers or nodes; None: they can."""
        return why_fixed(self)

    def reshape(self, new_layer_prob: float, nodes: Sequence[int], draw: torch.Generator) -> str:
        """A layer more or less, or nodes; gives what was done.

        What is new changes nothing at first.
        """
        return reshaped(self, new_layer_prob, nodes, draw)

    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Write a folder, at once: weights, slow copy, optimiser, settings; the data set is not.

        Safetensors and JSON only. A checkpoint that is there is replaced, anything else refused.
        """
        save_agent(self, path)

    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Become the agent that was saved; the data set and the device stay.

        Raises ValueError, and changes nothing, if it has a language model that can't be made from
        the checkpoint, such as one of `transformers`, and this agent has no such one.
        """
        load_agent(self, path)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        dataset: RL_Dataset | None = None,
        *,
        trunk: Trunk | None = None,
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

    @property
    def _learner(self) -> ILQLLearner:
        """For the networks as they are, whose shape it copies, not their weights."""
        if self._learner_of is None:
            model = self.model
            own = {id(parameter): parameter for parameter in model.parameters()}  # not copied
            self._learner_of = ILQLLearner(
                self.config, model_factory=lambda: copy.deepcopy(model, dict(own))
            )
        return self._learner_of

    def _changed(self) -> None:
        super()._changed()
        self._learner_of = None

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes over."""
        return {**self.__dict__, "_loss_of": None, "_learner_of": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """The optimiser's moments go where the weights go."""
        super()._apply(fn, recurse)
        if self.opt is not None:
            self.opt = self.opt.apply(fn)
        return self
