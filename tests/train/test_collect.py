"""Collecting: steps, stacked frames, and resumed collectors."""

from contextlib import closing

import pytest
import torch

from raffia.data.segment import SegmentReplayBuffer
from raffia.data.storage import TensorStorage
from raffia.envs.batch import SerialBatch
from raffia.envs.env import Discrete, EnvSpec
from raffia.envs.make import limited
from raffia.envs.workers import WorkerBatch
from raffia.functional.seeds import derive_seed
from raffia.nn.module import TensorDictModule
from raffia.train.collect import Collector
from tests.train.envs import CARRY, Count, RecordingActor, by_observation, counts, recurrent


def test_steps_are_consecutive_and_episodes_end_at_their_length():
    collector = Collector(counts(2, [3, 5]), seed=1)
    steps = collector.collect(by_observation, 7)
    assert steps.batch_size == (7, 2) and collector.num_env_steps == 14
    ends = steps["terminated"] | steps["truncated"]
    assert ends[:, 0].tolist() == [False, False, True, False, False, True, False]
    assert ends[:, 1].tolist() == [False] * 4 + [True] + [False] * 2
    observations, after = steps["observation"], steps["next", "observation"]
    assert torch.equal(after[:-1][~ends[:-1]], observations[1:][~ends[:-1]])
    assert (after[2, 0] - observations[2, 0]).item() == 1
    assert torch.equal(steps["reward"], steps["action"].float())
    ended, before = collector.take_ended(), steps.clone()
    assert [(episode.row, episode.length) for episode in ended] == [(0, 3), (1, 5), (0, 3)]
    assert ended[1].episode_return == steps["reward"][:5, 1].sum()
    assert collector.take_ended() == []
    collector.collect(by_observation, 9)
    assert (steps == before).all()  # returned steps do not change later


@pytest.mark.parametrize("frame_stack", [1, 2])
def test_a_keyed_module_which_writes_into_its_states_can_act(frame_stack):
    actor = TensorDictModule(
        lambda observation: observation.flatten(1).sum(1).long() % 3, ["observation"], ["action"]
    )
    steps, same = (
        Collector(counts(2, [3, 5]), seed=1, frame_stack=frame_stack).collect(act, 7)
        for act in (actor, by_observation)
    )
    assert sorted(steps.keys()) == sorted(same.keys()) and (steps == same).all()
    assert list(steps["next"].keys()) == ["observation"]


def test_what_an_actor_carries_begins_anew_with_each_episode():
    steps = Collector(counts(2, [3, 5]), seed=1, carry=CARRY).collect(recurrent, 7)
    assert steps["seen"].t().tolist() == [[1, 2, 3, 1, 2, 3, 1], [1, 2, 3, 4, 5, 1, 2]]
    assert steps["next", "seen"].equal(steps["seen"] + 1)
    total = steps["past", "total"]
    assert steps["next", "past", "total"].equal(total + steps["observation"])
    assert total[1:][steps["seen"][1:] == 1].eq(0).all()
    segments = SegmentReplayBuffer(TensorStorage(30), unroll_steps=2)
    index = segments.extend(steps)
    assert segments.read(index[1])["past", "total"][:, 0].equal(total[1])


def test_one_environment_is_no_batch():
    with pytest.raises(TypeError, match=r"Collector needs a batch .* not a Count: .* SerialBatch"):
        Collector(Count(), seed=1)


def test_an_actor_that_does_not_give_what_it_carries_is_told():
    collector = Collector(counts(2), seed=1, carry=CARRY)
    with pytest.raises(ValueError, match=r"'seen' .* \[2\] .* it gave nothing there: return Tens"):
        collector.collect(by_observation, 1)


class Motor(Count):
    """Breaks at its third action, or at its reset."""

    at_reset = False

    def reset(self, seed):
        if self.at_reset:
            raise RuntimeError("the motor is cold")
        return super().reset(seed)

    def step(self, action):
        if self.time == 2:
            raise RuntimeError("the motor is hot")
        return super().step(action)


@pytest.mark.parametrize("in_workers", [False, True])
def test_the_error_of_an_environment_has_a_note_that_reproduces_it(in_workers):
    make = [Count, Motor]
    env = WorkerBatch(make, 2) if in_workers else SerialBatch([make_one() for make_one in make])
    with closing(env):
        collector = Collector(env, seed=5, first_row=4)
        with pytest.raises(RuntimeError, match="the motor is hot") as caught:
            collector.collect(by_observation, 3)
    seed = derive_seed(5, "episode", 5, 0)
    note = f"the run's environment 5, after 2 actions since the reset with seed {seed}"
    assert caught.value.__notes__ == [note]


@pytest.mark.parametrize("num_before", [0, 2, 4])
def test_after_an_error_the_steps_that_it_cut_off_are_played_again(num_before):
    def breaks(states):
        if len(times) == num_before + 3:
            raise KeyboardInterrupt
        times.append(0)
        return recurrent(states)

    times = []
    whole, broken = (Collector(counts(2, [3, 50]), seed=1, carry=CARRY) for _ in range(2))
    steps = whole.collect(recurrent, num_before + 9)
    if num_before:
        broken.collect(breaks, num_before)
    with pytest.raises(KeyboardInterrupt):
        broken.collect(breaks, 9)
    assert (broken.collect(recurrent, 9) == steps[num_before:]).all()
    assert broken.take_ended() == whole.take_ended()
    assert (broken.state() == whole.state()).all()


def test_the_error_of_a_reset_has_a_note_with_its_seed():
    env = SerialBatch([Count(), Motor(), Count()])
    collector = Collector(env, seed=5)
    env.envs[1].at_reset = True
    with pytest.raises(RuntimeError, match="the motor is cold") as caught:
        collector.now  # noqa: B018
    seed = derive_seed(5, "episode", 1, 0)
    assert caught.value.__notes__ == [f"the run's environment 1, at the reset with seed {seed}"]


def test_an_actor_gets_stacks_padded_with_the_first_frame():
    actor = RecordingActor()
    collector = Collector(counts(1), seed=3, frame_stack=3)
    steps = collector.collect(actor, 5)
    assert steps["observation"].shape == (5, 1, 1)  # the newest frame is what is stored
    first = steps["observation"][0, 0, 0]
    stacks = {0: [0, 0, 0], 1: [0, 0, 1], 3: [1, 2, 3]}
    assert {
        time: (actor.observations[time] - first).flatten().tolist() for time in stacks
    } == stacks
    again = steps["observation"][4, 0, 0]  # another episode
    assert (actor.observations[4] - again).flatten().tolist() == [0, 0, 0]


def test_the_replay_gives_the_stacks_that_the_actor_got():
    actor = RecordingActor()
    collector = Collector(counts(2, [6, 4]), seed=3, frame_stack=3)
    stacks = dict(observation_keys=["observation"], frame_stack={"observation": 3})
    replay = SegmentReplayBuffer(TensorStorage(60), unroll_steps=1, **stacks)
    index = replay.extend(collector.collect(actor, 11))
    for time in range(9):
        segments = replay.read(index[time])
        assert torch.equal(segments["observation"][:, 0], actor.observations[time])


@pytest.mark.parametrize("frame_stack", [1, 3])
@pytest.mark.parametrize("num_before", [0, 1, 7])
def test_a_resumed_collector_continues_exactly(frame_stack, num_before):
    uninterrupted = Collector(counts(3, [5, 2, 9]), seed=2, frame_stack=frame_stack)
    if num_before:
        uninterrupted.collect(by_observation, num_before)
    state = uninterrupted.state().clone()
    uninterrupted.take_ended()
    resumed = Collector(counts(3, [5, 2, 9]), seed=2, frame_stack=frame_stack)
    resumed.load_state(state)
    assert resumed.num_env_steps == uninterrupted.num_env_steps
    assert (uninterrupted.collect(by_observation, 10) == resumed.collect(by_observation, 10)).all()
    assert uninterrupted.take_ended() == resumed.take_ended()


@pytest.mark.parametrize("num_before", [0, 4])
def test_a_resumed_collector_carries_on(num_before):
    collector = Collector(counts(2, [3, 5]), seed=1, carry=CARRY)
    if num_before:
        collector.collect(recurrent, num_before)
    resumed = Collector(counts(2, [3, 5]), seed=1, carry=CARRY)
    resumed.load_state(collector.state().clone())
    assert (collector.collect(recurrent, 5) == resumed.collect(recurrent, 5)).all()


class Forwards(Count):
    """Can be played without showing it; counts the steps that it shows.

    lag: steps that it leaves out then; below 0 it breaks.
    """

    def __init__(self, length=9, lag=0):
        super().__init__(length)
        self.lag, self.num_shown, self.forwards = lag, 0, []

    def step(self, action):
        self.num_shown += 1
        return super().step(action)

    def fast_forward(self, seed, actions):
        if self.lag < 0:
            raise RuntimeError("the motor is rusty")
        self.forwards.append(actions.tolist())
        self.reset(seed)
        self.time = len(actions) - self.lag


class Steps:
    """A batch that has only what each must have."""

    def __init__(self, batch):
        self.spec, self.num_envs = batch.spec, batch.num_envs
        self.reset, self.step = batch.reset, batch.step


@pytest.mark.parametrize(("frame_stack", "limit"), [(1, 0), (3, 0), (3, 7)])
def test_a_resume_shows_no_more_states_than_a_stack_holds(frame_stack, limit):
    def collector(wrap=lambda batch: batch, **options):
        envs = [Forwards(length, **options) for length in (9, 2, 50)]
        made = Collector(wrap(limited(SerialBatch(envs), limit)), seed=2, frame_stack=frame_stack)
        return envs, made

    _, straight = collector()
    straight.collect(by_observation, 5)
    state = straight.state().clone()
    envs, resumed = collector()
    resumed.load_state(state)
    assert [env.num_shown for env in envs] == [frame_stack, 1, frame_stack]
    taken = state["actions"].split(state["num_actions"].tolist())
    assert envs[2].forwards == [taken[2][: 5 - frame_stack].tolist()] and not envs[1].forwards
    assert (resumed.state() == state).all() and set(resumed.state().keys()) == set(state.keys())
    lags = collector(lag=1)[1]
    with pytest.warns(UserWarning, match=r"deterministic: .* of 2 rows \(0, 2\) came to other"):
        lags.load_state(state)
    with pytest.raises(RuntimeError, match="rusty") as found:
        collector(lag=-1)[1].load_state(state)
    (words,) = found.value.__notes__
    assert f"environment 0, after {5 - frame_stack} actions since the reset with seed" in words
    envs, shows = collector(Steps)  # nothing to go forward with
    shows.load_state(state)
    assert [env.num_shown for env in envs] == [5, 1, 5]
    envs, counts_again = collector()  # the state of a version that saved no returns
    counts_again.load_state(state.exclude("episode_return", "episode_length"))
    assert [env.num_shown for env in envs] == [5, 1, 5]
    straight.take_ended()
    steps = straight.collect(by_observation, 20)
    ended = straight.take_ended()
    for other in (resumed, shows, counts_again):
        assert (other.collect(by_observation, 20) == steps).all()
        assert other.take_ended() == ended and ended
    assert not (lags.collect(by_observation, 20) == steps).all()


class Lives(Count):
    """Loses a life after each third step; the game is over after the eighth.

    flag: the entry that marks a lost life.
    """

    def __init__(self, flag="terminated"):
        super().__init__()
        self.flag = flag

    spec = EnvSpec(observation_shape=(1,), action=Discrete(3), name="lives", continues=True)

    def reset(self, seed):
        self.length = 8
        return super().reset(seed)

    def step(self, action):
        after = super().step(action)
        lost = self.time % 3 == 0
        over = after["terminated"] | after["truncated"]
        after["continues"] = torch.tensor(lost) & ~over
        after[self.flag] = after[self.flag] | lost
        return after


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
@pytest.mark.parametrize("num_before", [2, 3, 4, 7, 9])
def test_a_game_continues_after_a_lost_life(num_before, flag):
    actor = RecordingActor()
    envs = lambda: SerialBatch([Lives(flag) for _ in range(2)])  # noqa: E731
    collector = Collector(envs(), seed=1, frame_stack=3)
    steps = collector.collect(actor, 9)
    first = steps["observation"][0, :, 0]
    assert (steps["observation"][:8, 0, 0] - first[0]).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert steps[flag][:8, 0].nonzero().flatten().tolist()[:2] == [2, 5]
    assert (actor.observations[3][0, :, 0] - first[0]).tolist() == [3, 3, 3]  # no frame from before
    assert (actor.observations[5][0, :, 0] - first[0]).tolist() == [3, 4, 5]
    assert [episode.length for episode in collector.take_ended()] == [8, 8]

    carried = Collector(envs(), seed=1, carry=CARRY).collect(recurrent, 9)
    assert carried["seen"][:8, 0].tolist() == [1, 2, 3, 1, 2, 3, 1, 2]

    uninterrupted = Collector(envs(), seed=1, frame_stack=3)
    uninterrupted.collect(by_observation, num_before)
    resumed = Collector(envs(), seed=1, frame_stack=3)
    resumed.load_state(uninterrupted.state().clone())
    assert torch.equal(uninterrupted.now["observation"], resumed.now["observation"])
    assert (uninterrupted.collect(by_observation, 10) == resumed.collect(by_observation, 10)).all()


def test_a_state_of_other_envs_is_refused():
    state = Collector(counts(3), seed=2).state()
    with pytest.raises(ValueError, match="3 environments, but there are 2: set env.num_envs"):
        Collector(counts(2), seed=2).load_state(state)
