"""The settings of `ILQL`: one config, of which the published names are parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from raffia.algorithms.ilql.config import ILQLConfig

__all__ = ["AgentSettings", "Setting"]


class Setting:
    """An attribute that is a number of the config: read there, and set there.

    >>> class Agent(AgentSettings):
    ...     def __init__(self):
    ...         self._config = ILQLConfig()
    >>> agent = Agent()
    >>> agent.tau = 0.8
    >>> agent.tau, agent.config.loss.tau
    (0.8, 0.8)
    """

    def __init__(self, part: str, name: str) -> None:
        self.part, self.name = part, name

    def __get__(self, agent: AgentSettings | None, owner: type) -> Any:
        if agent is None:
            return self
        return getattr(getattr(agent.config, self.part), self.name)

    def __set__(self, agent: AgentSettings, value: Any) -> None:
        changes: dict[str, Any] = {self.name: value}
        part: Any = getattr(agent.config, self.part)
        whole: dict[str, Any] = {self.part: replace(part, **changes)}
        agent.config = replace(agent.config, **whole)


class AgentSettings:
    """What of an agent can be read and set by the published names, and the config behind them.

    >>> class Agent(AgentSettings):
    ...     def __init__(self):
    ...         self._config = ILQLConfig()
    >>> Agent().lr, Agent().double_q
    (1e-05, True)
    """

    lr = Setting("optimizer", "learning_rate")
    weight_decay = Setting("optimizer", "weight_decay")
    max_grad_norm = Setting("optimizer", "max_grad_norm")
    alpha = Setting("target", "alpha")
    beta = Setting("loss", "beta")
    gamma = Setting("loss", "gamma")
    tau = Setting("loss", "tau")
    transition_weight = Setting("loss", "transition_weight")
    clip_weight = Setting("loss", "clip_weight")
    value_max = Setting("loss", "value_max")
    value_min = Setting("loss", "value_min")
    exp_weights = Setting("loss", "exp_weights")
    dm_margin = Setting("loss", "dm_margin")
    cql_temp = Setting("loss", "cql_temp")
    mc_returns = Setting("loss", "mc_returns")
    awac_weight = Setting("loss", "awac_weight")
    v_weight = Setting("loss", "v_weight")
    q_weight = Setting("loss", "q_weight")
    cql_weight = Setting("loss", "cql_weight")
    dm_weight = Setting("loss", "dm_weight")
    detach_v = Setting("model", "detach_v")
    detach_q = Setting("model", "detach_q")
    detach_pi = Setting("model", "detach_pi")
    double_q = Setting("model", "double_q")
    per_token = Setting("model", "per_token")

    _config: ILQLConfig

    # Those that are numbers and may differ between members of a population.
    hyper_names = tuple(
        "lr weight_decay max_grad_norm alpha beta gamma tau transition_weight clip_weight value_max"
        " value_min dm_margin cql_temp awac_weight v_weight q_weight cql_weight dm_weight"
        " batch_size".split()
    )

    @property
    def config(self) -> ILQLConfig:
        """All settings; others can be assigned, but for what the networks are made of."""
        return self._config

    @config.setter
    def config(self, config: ILQLConfig) -> None:
        if config.model != self._config.model:
            raise ValueError(
                "the networks are made as config.model says and stay so: make another agent, "
                "ILQL.from_config(config, agent.dataset)"
            )
        self._config = config
        self._changed()

    def _changed(self) -> None:
        """The config is another one."""
