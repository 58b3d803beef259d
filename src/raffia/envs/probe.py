"""Five tiny environments with exactly known values, which show what an agent fails to learn.

Each one needs one thing more than those before it, so the first that fails points at the mistake:

    ValueProbe         the value of one state                    the value's loss, the optimiser
    ObservationProbe   a value that depends on the observation   what feeds the network
    DelayProbe         a reward one step later                   discount, n-step returns, model
    ActionProbe        a reward that depends on the action       the policy's target and loss
    PolicyProbe        ... on action and observation             that the two belong together

The idea is Andy Jones's, "Debugging RL, Without the Agonizing Pain" (2021).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from raffia.envs.env import Discrete, EnvSpec
from raffia.functional.seeds import derive_seed
from raffia.tensordict.tensordict import TensorDict

NUM_ACTIONS = 2


@dataclass(frozen=True)
class Known:
    """The exact values of N states of an environment, under the best policy.

    `best_action` is -1 where both actions are as good.
    """

    observation: Tensor  # float32 [N, 1], all that there are
    value: Tensor  # float32 [N]
    action_value: Tensor  # float32 [N, 2]

    @property
    def best_action(self) -> Tensor:
        """int64 [N]; -1 where both actions are as good.

        >>> probe_values(ActionProbe(), discount=0.9).best_action
        tensor([1])
        """
        equal = self.action_value[:, 0] == self.action_value[:, 1]
        return torch.where(equal, -1, self.action_value.argmax(-1))


class _Probe:
    """The base of the five: one number as the observation, two actions, no picture."""

    spec: EnvSpec
    observation = 1.0

    def reset(self, seed: int) -> TensorDict:
        """Start the episode of this seed and return its first state []."""
        self.observation = self.first(seed)
        return TensorDict(observation=torch.tensor([self.observation], dtype=torch.float32))

    def step(self, action: Tensor) -> TensorDict:
        """Act: the state after it, with reward, terminated and truncated, []."""
        reward, following = self.outcome(int(action))
        ended = following is None
        self.observation = self.observation if following is None else following
        return TensorDict(
            observation=torch.tensor([self.observation], dtype=torch.float32),
            reward=torch.tensor(reward, dtype=torch.float32),
            terminated=torch.tensor(ended),
            truncated=torch.tensor(False),
        )

    def first(self, seed: int) -> float:
        """The first observation of an episode."""
        return 1.0

    def outcome(self, action: int) -> tuple[float, float | None]:
        """The reward, and the next observation; None at the end."""
        raise NotImplementedError

    def known(self, discount: float) -> Known:
        """The exact values of each state at this discount."""
        raise NotImplementedError

    def render(self) -> None:
        """Return None: probes have no picture."""

    def close(self) -> None:
        """Close the probe, which holds nothing."""


def _coin(seed: int) -> float:
    return 1.0 if derive_seed(seed, "probe") % 2 else -1.0


def _spec(name: str) -> EnvSpec:
    return EnvSpec(observation_shape=(1,), action=Discrete(NUM_ACTIONS), name=name)


class ValueProbe(_Probe):
    """One state, a reward of 1, the end: its value is 1 at any discount.

    >>> env = ValueProbe()
    >>> env.reset(0)["observation"], env.step(torch.tensor(0))["reward"]
    (tensor([1.]), tensor(1.))
    """

    spec = _spec("probe/value")

    def outcome(self, action: int) -> tuple[float, float | None]:
        """A reward of 1, and the end."""
        return 1.0, None

    def known(self, discount: float) -> Known:
        """Value 1.

        >>> ValueProbe().known(0.9).value
        tensor([1.])
        """
        return Known(torch.tensor([[1.0]]), torch.tensor([1.0]), torch.tensor([[1.0, 1.0]]))


class ObservationProbe(_Probe):
    """Two states with observations -1 and +1, which the seed draws; their reward is as much, then
    the end.

    >>> env = ObservationProbe()
    >>> float(env.reset(5)["observation"]) == float(env.step(torch.tensor(0))["reward"])
    True
    """

    spec = _spec("probe/observation")

    def first(self, seed: int) -> float:
        """-1 or +1."""
        return _coin(seed)

    def outcome(self, action: int) -> tuple[float, float | None]:
        """The observation as the reward, and the end."""
        return self.observation, None

    def known(self, discount: float) -> Known:
        """Values -1 and +1.

        >>> ObservationProbe().known(0.9).value
        tensor([-1.,  1.])
        """
        value = torch.tensor([-1.0, 1.0])
        return Known(value[:, None], value, value[:, None].expand(2, NUM_ACTIONS))


class DelayProbe(_Probe):
    """Two states in a row with observations -1 and +1; a reward of 1 after the second.

    >>> env = DelayProbe()
    >>> env.reset(0)["observation"]
    tensor([-1.])
    >>> [float(env.step(torch.tensor(0))["reward"]) for _ in range(2)]
    [0.0, 1.0]
    """

    spec = _spec("probe/delay")

    def first(self, seed: int) -> float:
        """-1."""
        return -1.0

    def outcome(self, action: int) -> tuple[float, float | None]:
        """A reward of 0 and the second state; then a reward of 1 and the end of the episode."""
        return (0.0, 1.0) if self.observation < 0 else (1.0, None)

    def known(self, discount: float) -> Known:
        """The discount, then 1.

        >>> DelayProbe().known(0.9).value
        tensor([0.9000, 1.0000])
        """
        value = torch.tensor([discount, 1.0])
        observation = torch.tensor([[-1.0], [1.0]])
        return Known(observation, value, value[:, None].expand(2, NUM_ACTIONS))


class ActionProbe(_Probe):
    """One state; action 1 gives a reward of +1, action 0 of -1, then the end.

    >>> env = ActionProbe()
    >>> _ = env.reset(0)
    >>> env.step(torch.tensor(0))["reward"]
    tensor(-1.)
    """

    spec = _spec("probe/action")

    def outcome(self, action: int) -> tuple[float, float | None]:
        """+1 or -1, and the end."""
        return (1.0 if action == 1 else -1.0), None

    def known(self, discount: float) -> Known:
        """Value 1, by action 1.

        >>> ActionProbe().known(0.9).action_value
        tensor([[-1.,  1.]])
        """
        return Known(torch.tensor([[1.0]]), torch.tensor([1.0]), torch.tensor([[-1.0, 1.0]]))


class PolicyProbe(_Probe):
    """A probe with two states, observations -1 and +1, drawn by the seed, each with one good
    action.

    +1 for action 0 in the first and action 1 in the second, -1 for the others, then the end.

    >>> env = PolicyProbe()
    >>> observation = env.reset(5)["observation"]
    >>> env.step((observation[0] > 0).long())["reward"]
    tensor(1.)
    """

    spec = _spec("probe/policy")

    def first(self, seed: int) -> float:
        """-1 or +1."""
        return _coin(seed)

    def outcome(self, action: int) -> tuple[float, float | None]:
        """+1 where the action belongs to the observation, else -1; then the end."""
        return (1.0 if action == (self.observation > 0) else -1.0), None

    def known(self, discount: float) -> Known:
        """Value 1, by action 0 in the first and action 1 in the second.

        >>> PolicyProbe().known(0.9).best_action
        tensor([0, 1])
        """
        observation = torch.tensor([[-1.0], [1.0]])
        return Known(observation, torch.ones(2), torch.tensor([[1.0, -1.0], [-1.0, 1.0]]))


PROBES: dict[str, type[_Probe]] = {
    kind.spec.name: kind
    for kind in (ValueProbe, ObservationProbe, DelayProbe, ActionProbe, PolicyProbe)
}


def probe_values(probe: _Probe, discount: float) -> Known:
    """The exact values of each state of a probe at this discount: [N] observations, values,
    actions.

    >>> known = probe_values(DelayProbe(), discount=0.5)
    >>> known.observation[:, 0], known.value, known.best_action
    (tensor([-1.,  1.]), tensor([0.5000, 1.0000]), tensor([-1, -1]))
    """
    return probe.known(discount)
