"""The networks of a learner's state, for inspection and decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from raffia.algorithms.ilql.config import ILQLConfig
from raffia.algorithms.ilql.learner import load_networks, named_tensors
from raffia.algorithms.ilql.loss import Loss
from raffia.algorithms.ilql.model import ILQLModel
from raffia.algorithms.ilql.policy import ILQL_Policy
from raffia.lm.data.utterances import Observation
from raffia.recipes.ilql.language_model import Making
from raffia.tensordict.tensordict import TensorDict


class Interrupted(Exception):
    """Raised by an agent that was asked to stop.

    >>> raise Interrupted
    Traceback (most recent call last):
    ...
    raffia.recipes.ilql.networks.Interrupted
    """


class Networks:
    """The networks of a learner's state, for inspection and decoding.

    making: of a run's, which may go on from a language model; None for those of the config alone.

    >>> from raffia.algorithms.ilql.config import ILQLModelConfig, TrunkConfig
    >>> from raffia.algorithms.ilql.learner import ILQLLearner
    >>> trunk = TrunkConfig(vocab_size=10, n_layer=1, n_head=2, n_embd=8, block_size=16)
    >>> config = ILQLConfig(model=ILQLModelConfig(trunk=trunk))
    >>> state = ILQLLearner(config).init(seed=3)
    >>> networks = Networks(config)
    >>> networks.refresh(state)
    >>> torch.equal(networks.model.v[0].weight, state["params", "v", "0", "weight"])
    True
    """

    def __init__(
        self, config: ILQLConfig, device: str = "cpu", *, making: Making | None = None
    ) -> None:
        with torch.random.fork_rng(devices=[]):  # drawn weights are replaced in any case
            model = ILQLModel(config.model) if making is None else making.fresh()
        self.loss = Loss(model, config.loss, precision=config.precision).to(device).eval()
        self.loss.requires_grad_(False)
        self.model, self.target = model, self.loss.target
        self._fixed: dict[str, Tensor] = {}
        if making is not None and making.fixed is not None:
            self._fixed = named_tensors(TensorDict(), TensorDict(), making.fixed.to(device))
        for name, parameter in self.loss.named_parameters():
            if name in self._fixed:  # the same memory, wherever it is needed
                parameter.data = self._fixed[name]

    def refresh(self, state: TensorDict) -> None:
        """Take over the weights of a learner's state."""
        load_networks(self.loss, state, without=self._fixed)


class Stoppable:
    """A policy that raises `Interrupted` instead of an answer, once it is to stop.

    >>> from raffia.recipes.ilql.data import make_tokenizer
    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> config = ILQL_PRESETS["ilql-smoke"]
    >>> policy = ILQL_Policy(Networks(config), make_tokenizer(config), config.decode)
    >>> Stoppable(policy, lambda: True).act_batch([])
    Traceback (most recent call last):
    ...
    raffia.recipes.ilql.networks.Interrupted
    """

    def __init__(self, policy: ILQL_Policy, stop: Callable[[], bool]) -> None:
        self.policy, self._stop = policy, stop

    def act(self, observation: Observation) -> str:
        """The next utterance in a dialogue."""
        return self.act_batch([observation])[0]

    def act_batch(self, observations: Sequence[Observation]) -> list[str]:
        """The next utterance in each of the dialogues."""
        if self._stop():
            raise Interrupted
        return self.policy.act_batch(observations)
