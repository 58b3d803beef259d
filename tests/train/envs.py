"""Small environments and actors for the tests of collecting and evaluating."""

import torch

from raffia.envs.batch import SerialBatch
from raffia.envs.env import Discrete, EnvSpec
from raffia.tensordict.tensordict import TensorDict


class Count:
    """Counts its steps from the seed's remainder on; ends after `length` steps, terminated on odd
    seeds and truncated on even ones. The reward is the action."""

    spec = EnvSpec(observation_shape=(1,), action=Discrete(3), name="count")

    def __init__(self, length=4):
        self.length = length

    def reset(self, seed):
        self.terminates, self.time, self.first = bool(seed % 2), 0, float(seed % 7)
        return TensorDict(observation=torch.tensor([self.first]))

    def step(self, action):
        self.time += 1
        ended = self.time == self.length
        return TensorDict(
            observation=torch.tensor([self.first + self.time]),
            reward=action.float(),
            terminated=torch.tensor(ended and self.terminates),
            truncated=torch.tensor(ended and not self.terminates),
        )

    def render(self):
        return torch.full((2, 2, 3), self.time, dtype=torch.uint8)

    def close(self):
        pass


def counts(num, lengths=None):
    return SerialBatch([Count((lengths or [4] * num)[i]) for i in range(num)])


def by_observation(states):
    """An actor whose action depends on the whole observation."""
    total = states["observation"].flatten(1).sum(1)
    return TensorDict(action=total.long() % 3, batch_size=[len(states)])


class RecordingActor:
    """The same actor, which records its observations."""

    def __init__(self):
        self.observations = []

    def __call__(self, states):
        self.observations.append(states["observation"].clone())
        return by_observation(states)


CARRY = TensorDict(seen=torch.tensor(1), past=TensorDict(total=torch.zeros(2)))


def recurrent(states):
    """An actor that remembers: the number and the sum of the observations of an episode."""
    total = states["past", "total"] + states["observation"]
    states["past", "total"] = torch.full_like(total, -1.0)  # its own copy, as keyed modules write
    action = (total[:, 0].long() + states["seen"]) % 3
    after = dict(seen=states["seen"] + 1, past=dict(total=total))
    return states.update(dict(action=action, next=after))
