"""Environments and buffers work in the CPU's memory, whatever torch's default device is.

The device "meta" has no memory: what is made there by mistake cannot be used.
"""

import pytest
import torch

from raffia import TensorDict
from raffia.data import (
    ListStorage,
    MCTSForest,
    PrioritizedReplayBuffer,
    RandomProjectionHash,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SegmentReplayBuffer,
    SliceSampler,
    TensorDictMap,
    TensorDictReplayBuffer,
    TensorStorage,
)
from raffia.data.torchrl_storages import LazyMemmapStorage, LazyTensorStorage
from raffia.envs import EnvConfig, make_env
from raffia.train import Collector, play_episodes

CPU = "cpu"


@pytest.fixture(autouse=True)
def another_default():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def steps(*shape):
    """Steps with an end each ten."""
    flags = torch.zeros(*shape, dtype=torch.bool, device=CPU)
    ends = flags.clone()
    ends[9::10] = True
    return TensorDict(
        observation=torch.ones(*shape, 3, device=CPU),
        action=torch.zeros(*shape, dtype=torch.int64, device=CPU),
        reward=torch.ones(*shape, device=CPU),
        terminated=ends,
        truncated=flags,
        batch_size=shape,
    )


BUFFERS = {
    "uniform": lambda: ReplayBuffer(storage=TensorStorage(30)),
    "in turn": lambda: ReplayBuffer(storage=TensorStorage(30), sampler=SamplerWithoutReplacement()),
    "prioritized": lambda: PrioritizedReplayBuffer(storage=TensorStorage(30), alpha=0.6, beta=0.4),
    "lists": lambda: ReplayBuffer(storage=ListStorage(30), collate_fn=torch.stack),
    "TorchRL's": lambda: TensorDictReplayBuffer(storage=LazyTensorStorage(30)),
    "on disk": lambda: TensorDictReplayBuffer(storage=LazyMemmapStorage(30)),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers(name):
    buffer = BUFFERS[name]()
    buffer.extend(steps(40))
    sample = buffer.sample(8)
    sample = sample[0] if isinstance(sample, tuple) else sample
    assert sample["reward"].device.type == CPU and sample["reward"].sum() == 8
    buffer.state_dict()


def test_slices():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(60),
        sampler=SliceSampler(slice_len=4, end_key="terminated"),
        batch_size=8,
    )
    buffer.extend(steps(40))
    assert buffer.sample()["reward"].sum() == 8


def test_segments_maps_and_forests():
    segments = SegmentReplayBuffer(TensorStorage(64), unroll_steps=3)
    played = steps(20, 2)
    played["next", "observation"] = played["observation"]
    segments.extend(played)
    assert segments.sample(4)["mask"].device.type == CPU
    states = TensorDict(observation=torch.arange(5, device=CPU)[:, None], batch_size=[5])
    values = TensorDict(value=torch.ones(5, device=CPU), batch_size=[5])
    known = TensorDictMap.from_tensordict_pair(states, values, in_keys=["observation"])
    known[states] = values
    assert known[states]["value"].sum() == 5
    path = states[:-1].update({"action": steps(4)["action"]})
    ends = {"reward": torch.ones(4, 1, device=CPU), "done": torch.zeros(4, 1, device=CPU).bool()}
    path["next"] = states[1:].update(ends)
    MCTSForest().extend(path)
    keys = RandomProjectionHash(n_components=4)(torch.ones(3, 20, device=CPU))
    assert keys[0] == keys[2]


@pytest.mark.parametrize(
    "name", ["CartPole-v1", "Pendulum-v1", "tictactoe", "minatar/breakout", "atari/pong"]
)
def test_environments_are_played(name):
    env = make_env(EnvConfig(id=name, num_envs=2))

    def act(states):
        shape = states.batch_size + getattr(env.spec.action, "shape", ())
        action = torch.zeros(shape, dtype=env.spec.action.dtype, device=CPU)
        if "action_mask" in states.keys():
            action = states["action_mask"].int().argmax(-1)
        return TensorDict(action=action, batch_size=states.batch_size)

    found = Collector(env, seed=0).collect(act, 6)
    assert {value.device.type for value in found.values(True, True)} == {CPU}
    if env.spec.num_players == 1:
        play_episodes(env, act, num_episodes=2, seed=0, max_steps=20)
