"""The networks of an `ILQL`, the config that they are made by, and what learning changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from raffia.algorithms.ilql.config import ILQLConfig
from raffia.algorithms.ilql.learner import ILQLLearner, hyper_of, load_networks, networks_state
from raffia.algorithms.ilql.loss import Loss
from raffia.algorithms.ilql.model import ILQLModel, ILQLTarget
from raffia.nn.base import TensorDictModuleBase
from raffia.tensordict.tensordict import TensorDict


class AgentNetworks(TensorDictModuleBase):
    """Networks that learn by `ILQLLearner`; `install` puts them in."""

    model: ILQLModel
    target: ILQLTarget
    mutation: str | None  # what made this agent of another one
    layer_bounds: dict[str, int]  # "min_layers", "max_layers", where given
    fitness: list[float]  # what `test` found
    step: int  # updates that were made
    seed: int  # of the order of the data, and of dropout
    opt: TensorDict | None  # the optimiser's moments, from the first update on
    _learner_of: ILQLLearner | None

    def install(self, model: ILQLModel, target: ILQLTarget, config: ILQLConfig) -> None:
        """Take other networks, and the config that they are made by; the optimiser begins again."""
        self.model, self.target, self._config = model, target, config
        heads = ["q1", "q2"] if config.model.double_q else ["q1"]
        self.in_keys = ["tokens", "state_idxs", "action_idxs", "attn_mask"]
        self.out_keys = ["v", *heads, *(f"target_{name}" for name in heads), "logits"]
        self.opt = self._learner_of = None

    @property
    def config(self) -> ILQLConfig:
        """All settings; others can be assigned, but for what the networks are made of."""
        return self._config

    @config.setter
    def config(self, config: ILQLConfig) -> None:
        if config.model != self._config.model:
            raise ValueError(
                "the networks are made by config.model and stay so: make another agent, "
                "ILQL.from_config(config, agent.dataset)"
            )
        self._config, self._learner_of = config, None

    @property
    def device(self) -> torch.device:
        """Where the networks are."""
        return next(self.model.parameters()).device

    def learner_state(self) -> TensorDict:
        """What learning changes, in the memory of this agent, as `ILQLLearner` has it.

        Before the first update "opt" is empty.
        """
        state = networks_state(self.model, self.target)
        state["opt"] = TensorDict() if self.opt is None else self.opt
        state["hyper"] = self._hyper
        state["step"], state["dropout_seed"] = torch.tensor(self.step), torch.tensor(self.seed)
        return state

    def load_learner_state(self, state: TensorDict) -> None:
        """Become what the state is; the settings stay. Its "opt" may be used as it is."""
        load_networks(self, state)
        self.opt = state["opt"] if len(state["opt"].keys()) else None
        self.step = int(state["step"])

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

    @property
    def _hyper(self) -> TensorDict:
        return hyper_of(self.config, next(self.model.parameters()))

    @property
    def _loss(self) -> Loss:
        """Around the same networks."""
        config = self.config
        return Loss(self.model, config.loss, precision=config.precision, target=self.target)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """The optimiser's moments go where the weights go."""
        super()._apply(fn, recurse)
        if self.opt is not None:
            self.opt = self.opt.apply(fn)
        return self
