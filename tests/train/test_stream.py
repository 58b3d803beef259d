"""When steps are played and batches drawn, online and from a data set."""

import pytest
import torch

from raffia.data.segment import SegmentReplayBuffer
from raffia.data.storage import TensorStorage
from raffia.tensordict.tensordict import TensorDict
from raffia.train.collect import Collector
from raffia.train.metrics import PhaseClock
from raffia.train.stream import OfflineStream, OnlineStream
from tests.train.envs import by_observation, counts


def online(*, seed=0, ratio=0.5, first=6, last=20, alpha=None, log=None):
    log = [] if log is None else log

    def begin_rollout(state):
        log.append(("turn", int(state["step"])))
        return by_observation

    def act_first(states):
        log.append(("first", None))
        return by_observation(states)

    replay = SegmentReplayBuffer(
        TensorStorage(100),
        unroll_steps=1,
        observation_keys=["observation"],
        alpha=alpha,
        beta=None if alpha is None else 0.4,
        generator=torch.Generator().manual_seed(seed),
    )
    return OnlineStream(
        Collector(counts(2), seed=seed),
        replay,
        begin_rollout=begin_rollout,
        act_first=act_first,
        make_batch=lambda state, windows: windows,
        batch_size=4,
        updates_per_env_step=ratio,
        random_env_steps=first,
        num_env_steps=last,
        rollout_length=1,
        clock=PhaseClock(),
        beta=None if alpha is None else lambda update: 0.4 + 0.1 * update,
    )


def at(update):
    return TensorDict(step=torch.tensor(update))


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(0.5, [8, 10, 12, 14, 16, 18, 20, 20]), (2.0, [8, 8, 8, 8, 10, 10, 10, 10])],
)
def test_updates_follow_steps_by_their_ratio_until_the_last_step(ratio, expected):
    stream = online(ratio=ratio)
    played = []
    for update in range(8):
        stream.next(at(update))
        played.append(stream.num_env_steps)
    # after update u there are at least first + (u + 1) / ratio steps, of two environments each time
    assert played == expected


def test_the_first_steps_are_played_without_the_learner():
    log = []
    stream = online(log=log)
    stream.next(at(0))
    assert log == [("first", None)] * 3 + [("turn", 0)]
    stream.next(at(1))
    assert log[4:] == [("turn", 1)]


def test_it_plays_on_until_something_can_be_drawn():
    stream = online(first=0, ratio=1.0)
    stream.next(at(0))
    assert stream.num_env_steps == 4  # the first step of a window of two needs the second


def test_priorities_go_back_and_their_weight_rises():
    stream = online(alpha=1.0)
    batch = stream.next(at(0))
    assert stream.replay.beta == pytest.approx(0.4)
    stream.on_update(batch, TensorDict(priority=torch.zeros(4)))
    after = stream.next(at(3))
    assert stream.replay.beta == pytest.approx(0.7)
    assert len(after) == 4
    assert not torch.isin(after["index"], batch["index"]).any()  # as their priority is 0 now


def test_a_resumed_stream_plays_the_same_steps():
    straight = online(seed=3)
    for update in range(3):
        straight.next(at(update))
    state, kept = straight.state().clone(), straight.replay.state_dict()
    resumed = online(seed=3)
    resumed.load_state(state)
    resumed.replay.load_state_dict(kept)
    for update in range(3, 6):
        assert (straight.next(at(update)) == resumed.next(at(update))).all()


def test_a_data_set_goes_on_at_the_update():
    def batches(update):
        while True:
            yield TensorDict(x=torch.tensor([update]), batch_size=[1])
            update += 1

    stream = OfflineStream(batches)
    assert [int(stream.next(at(u))["x"]) for u in range(3)] == [0, 1, 2]
    resumed = OfflineStream(batches)
    resumed.load_state(stream.state())
    assert int(resumed.next(at(3))["x"]) == 3
    assert resumed.num_env_steps == 0
