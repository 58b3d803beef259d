"""Readers over segments against plain loops over whole episodes, and by hand."""

import threading

import pytest
import torch

from raffia import TensorDict
from raffia.data import (
    HindsightReplay,
    SegmentReplayBuffer,
    TensorStorage,
    burn_in,
    n_step_transitions,
)

GAMMA = 0.9


def episode(length, end, first):
    """`length` steps whose positions count up from `first`; the goal is never reached."""
    x = torch.arange(first, first + length + 1)
    last = torch.arange(length) == length - 1
    obs = {"achieved_goal": x, "desired_goal": torch.full_like(x, -1)}
    return TensorDict(
        observation=TensorDict({k: v[:-1] for k, v in obs.items()}, batch_size=[length]),
        action=x[:-1] % 3,
        reward=torch.rand(length, generator=torch.Generator().manual_seed(first)),
        terminated=last & (end == "terminated"),
        truncated=last & (end == "truncated"),
        next=dict(observation=TensorDict({k: v[1:] for k, v in obs.items()}, batch_size=[length])),
        batch_size=[length],
    )


EPISODES = [(5, "terminated", 0), (7, "truncated", 100), (1, "terminated", 200), (6, None, 300)]
KEYS = [("observation", "achieved_goal"), ("observation", "desired_goal")]


def filled(**options):
    """A buffer of the episodes, and for each step number its episode and position."""
    buffer = SegmentReplayBuffer(TensorStorage(100), observation_keys=KEYS, **options)
    where = {}
    for one in EPISODES:
        steps = episode(*one)
        index = buffer.extend(steps)
        where |= {int(i): (steps, k) for k, i in enumerate(index)}
    return buffer, where


def drawable(buffer, where):
    index = torch.tensor(sorted(where))
    return index[buffer.contains(index)]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_n_step_transitions_equal_a_loop_over_the_episode(n):
    buffer, where = filled(unroll_steps=n)
    index = drawable(buffer, where)
    batch = buffer.read(index)
    found = n_step_transitions(batch, n, gamma=GAMMA, observation_keys=KEYS)
    batch["reward"] = batch["reward"].unsqueeze(-1)  # an extra dimension is kept
    unsqueezed = n_step_transitions(batch, n, gamma=GAMMA, observation_keys=KEYS)["reward"]
    assert torch.equal(unsqueezed, found["reward"].unsqueeze(-1))
    assert found.batch_size == (len(index),) and torch.equal(found["index"], index)
    for row, number in zip(found, index.tolist(), strict=True):
        steps, k = where[number]
        reward, discount, at = 0.0, 1.0, k
        while at < min(k + n, len(steps)):
            reward += discount * float(steps["reward"][at])
            discount *= GAMMA * (not steps["terminated"][at])
            at += 1
        assert row["reward"].item() == pytest.approx(reward)
        assert row["discount"].item() == pytest.approx(discount)
        assert row["next"]["observation", "achieved_goal"] == steps["next"][KEYS[0]][at - 1]
        assert row["action"] == steps["action"][k]


def test_n_step_transitions_of_whole_rewards_are_discounted():
    buffer, _ = filled(unroll_steps=3)
    batch = buffer.read(torch.tensor([0, 1]))
    rows = batch["reward"].shape
    found = []
    for dtype in (torch.int64, torch.float32):
        batch["reward"] = torch.arange(1, rows.numel() + 1, dtype=dtype).view(rows)
        found.append(n_step_transitions(batch, 3, gamma=GAMMA, observation_keys=KEYS)["reward"])
    torch.testing.assert_close(*found)


def test_burn_in_splits_only_the_rows():
    buffer, where = filled(unroll_steps=3, alpha=0.6, beta=0.4)
    batch = buffer.sample(5)
    warm_up, learn = burn_in(batch, 2)
    for key in ("action", "mask", "discount", *KEYS):
        assert torch.equal(torch.cat([warm_up[key], learn[key]], 1), batch[key])
        assert warm_up[key].shape[1] == 2 == learn[key].shape[1]
    for key in ("index", "priority_weight"):
        assert torch.equal(warm_up[key], batch[key]) and torch.equal(learn[key], batch[key])
    buffer = SegmentReplayBuffer(TensorStorage(50), unroll_steps=3, frame_stack=2)
    no = torch.zeros(9, dtype=torch.bool)
    steps = TensorDict(observation=torch.arange(9), terminated=no, truncated=no, batch_size=[9])
    buffer.extend(steps)
    warm_up, learn = burn_in(buffer.read(torch.tensor([3])), 1)  # stacked frames part by rows
    assert warm_up["observation"].tolist() == [[[2, 3]]]
    assert learn["observation"].tolist() == [[[3, 4], [4, 5], [5, 6]]]


def reached(achieved, desired):
    return (achieved == desired).float()


def hindsight(buffer, **options):
    return HindsightReplay(buffer, reached, generator=torch.Generator().manual_seed(0), **options)


@pytest.mark.parametrize("strategy", ["future", "final"])
def test_hindsight_goals_are_later_states_of_the_episode_with_their_rewards(strategy):
    buffer, where = filled(unroll_steps=3)
    index = drawable(buffer, where).repeat(50)
    before = buffer.read(index)
    found = hindsight(buffer, fraction=0.5, strategy=strategy).relabel(before)
    goals = {}
    num_changed = 0
    for row, old, number in zip(found, before, index.tolist(), strict=True):
        steps, k = where[number]
        states = torch.cat([steps[KEYS[0]], steps["next"][KEYS[0]][-1:]])
        if not bool(steps["terminated"][-1] | steps["truncated"][-1]):
            states = states[:-1]  # the state after the newest step is unknown
        goal = row[KEYS[1]]
        assert len(goal.unique()) == 1
        if int(goal[0]) == -1:
            assert torch.equal(row["reward"], old["reward"])
            continue
        num_changed += 1
        goals.setdefault(number, set()).add(int(goal[0]))
        for r in range(4):
            expected = 0.0
            if r < 3 and k + r < len(steps) and k + r + 1 < len(states):
                expected = float(states[k + r + 1] == goal[0])
            assert float(row["reward"][r]) == expected, (number, r)
        for key in ("action", "discount", "mask", "valid", KEYS[0]):
            assert torch.equal(row[key], old[key])
        later = {int(x) for x in states[k + 1 :]}
        assert goals[number] <= (later if strategy == "future" else {int(states[-1])})
        if strategy == "future":
            where[number] = steps, k
    assert 0.4 < num_changed / len(index) < 0.6
    if strategy == "future":  # of a few states each is drawn sooner or later
        assert goals[0] == {1, 2, 3, 4, 5}


def test_fractions_of_a_reward_replace_whole_ones():
    buffer, _ = filled(unroll_steps=2)
    segments = buffer.read(torch.tensor([0, 1]))
    segments["reward"] = torch.full_like(segments["reward"], -1, dtype=torch.int64)
    for fraction, rewards in ((1.0, [-0.5, -0.5, 0.0]), (0.0, [-1.0] * 3)):
        hindsight = HindsightReplay(
            buffer, lambda achieved, desired: torch.full(achieved.shape, -0.5), fraction=fraction
        )
        assert hindsight.relabel(segments)["reward"].tolist() == [rewards] * 2


def test_goals_are_drawn_uniformly_and_the_replay_is_unchanged():
    buffer, where = filled(unroll_steps=1)
    replay, index = hindsight(buffer, fraction=1.0), drawable(buffer, where)
    before = buffer.read(index)
    sample = replay.sample(8)
    assert (sample[KEYS[1]] >= 0).all()
    goals = replay.relabel(buffer.read(torch.zeros(5000, dtype=torch.int64)))[KEYS[1]][:, 0]
    assert torch.allclose(goals.bincount()[1:] / 5000, torch.tensor(0.2), atol=0.03)  # all equal
    after = buffer.read(index)
    assert all(torch.equal(value, after[key]) for key, value in before.items(True, True))
    assert len(next(iter(HindsightReplay(filled(unroll_steps=1, batch_size=3)[0], reached)))) == 3


def mistakes():
    buffer, _ = filled(unroll_steps=2)
    batch = buffer.read(torch.tensor([0]))
    f = torch.tensor([0.0], dtype=torch.float64)
    return [
        (lambda: n_step_transitions(batch, 3, gamma=GAMMA), ValueError, "n=3 .* unroll_steps=3"),
        (lambda: n_step_transitions(batch, 0, gamma=GAMMA), ValueError, "n=0"),
        (lambda: burn_in(batch, 3), ValueError, "leaves no rows to learn from .* unroll_steps=4"),
        (lambda: HindsightReplay(buffer, reached, fraction=2), ValueError, "fraction=2 must be in"),
        (lambda: HindsightReplay(buffer, reached, strategy="all"), ValueError, "one of"),
        (lambda: buffer.later(torch.tensor([5]), f), IndexError, "step 5 .* cannot be read"),
        (lambda: buffer.entry("action", torch.tensor([99])), IndexError, "row 99"),
    ]


def test_invalid_calls_are_refused():
    for call, error, match in mistakes():
        with pytest.raises(error, match=match):
            call()


def test_steps_that_another_thread_overwrites_are_relabelled_before():
    buffer = SegmentReplayBuffer(TensorStorage(8), observation_keys=KEYS, unroll_steps=1)
    steps = episode(7, "terminated", 0)
    buffer.extend(steps)
    writers, later = [], buffer.later

    def later_after_a_write(*arguments):
        writers.append(threading.Thread(target=buffer.extend, args=(steps,)))
        writers[0].start()
        writers[0].join(0.05)
        return later(*arguments)

    buffer.later = later_after_a_write
    assert (hindsight(buffer, fraction=1.0).sample(4)[KEYS[1]] >= 0).all()
    writers[0].join()
    assert buffer.storage.total == 16
