"""Evaluation episodes: their number, seeds, first players, limits and stops."""

from functools import partial

import pytest
import torch

from raffia.envs.board import TicTacToe
from raffia.envs.opponents import PerfectTicTacToe, RandomOpponent
from raffia.functional.seeds import derive_seed
from raffia.tensordict.tensordict import TensorDict
from raffia.train.evaluate import EpisodeBatch, play_episodes
from tests.train.envs import CARRY, RecordingActor, by_observation, counts, recurrent


def test_a_weak_player_loses_a_strong_one_wins_and_the_first_player_alternates():
    perfect, random = PerfectTicTacToe(), RandomOpponent()

    def first_legal(states):
        action = states["action_mask"].float().argmax(-1)
        return TensorDict(action=action, batch_size=[len(states)])

    lost = play_episodes(TicTacToe(4), first_legal, num_episodes=8, seed=0, opponent=perfect)
    assert min(lost.returns) == -1 and max(lost.returns) <= 0
    won = play_episodes(TicTacToe(4), best_for(perfect), num_episodes=40, seed=0, opponent=random)
    assert min(won.returns) >= 0 and won.mean_return > 0.7
    settings = {"num_episodes": 6, "seed": 0, "opponent": perfect, "max_steps": 9}
    found = EpisodeBatch(TicTacToe(3), best_for(perfect), members=[0, 1], **settings).play()
    found["alone"] = play_episodes(TicTacToe(4), best_for(perfect), **settings)
    for drawn in found.values():
        assert drawn.returns == [0.0] * 6 and drawn.as_first == [True, False] * 3
        assert drawn.lengths == [9] * 6
    with pytest.raises(ValueError, match="num_episodes=0 must be at least 1"):
        play_episodes(counts(1), by_observation, num_episodes=0, seed=0)
    with pytest.raises(ValueError, match="has two players: pass opponent=RandomOpponent()"):
        play_episodes(TicTacToe(1), by_observation, num_episodes=1, seed=0)


@pytest.mark.parametrize("num_envs", [1, 2, 5, 9])
def test_returns_do_not_depend_on_the_number_of_envs(num_envs):
    found = play_episodes(counts(num_envs), by_observation, num_episodes=7, seed=4)
    firsts = [derive_seed(4, "evaluate", i) % 7 for i in range(7)]
    expected = [float(sum((first + t) % 3 for t in range(4))) for first in firsts]
    assert found.returns == expected and found.lengths == [4] * 7
    assert found.mean_return == pytest.approx(sum(expected) / 7)


@pytest.mark.parametrize("num_envs", [1, 2, 5])
def test_what_an_agent_carries_begins_anew_with_each_episode(num_envs):
    env = counts(num_envs, [4, 2, 4, 2, 4][:num_envs])
    found = play_episodes(env, recurrent, num_episodes=7, seed=4, carry=CARRY)
    expected = []
    for i, length in enumerate(found.lengths):
        seen = [derive_seed(4, "evaluate", i) % 7 + t for t in range(length)]
        expected.append(float(sum((sum(seen[: t + 1]) + t + 1) % 3 for t in range(length))))
    assert found.returns == expected

    def keeps(states):
        given.append(states["seen"])
        was.append(states["seen"].clone())
        return recurrent(states)

    given, was = [], []
    play_episodes(env, keeps, num_episodes=3, seed=4, carry=CARRY)
    assert torch.cat(given).equal(torch.cat(was))


def test_an_action_may_have_dimensions_that_the_spec_does_not_name():
    class Pairs(type(counts(1))):
        def step(self, action, rows=None):
            return super().step(action.sum(-1), rows)

    def both(states):
        one = by_observation(states)["action"] // 2
        return TensorDict(action=torch.stack([one, one], -1), batch_size=states.batch_size)

    env = Pairs(counts(2).envs)
    assert play_episodes(env, both, num_episodes=3, seed=0).lengths == [4, 4, 4]


def test_lengths_limits_and_stops():
    play = partial(play_episodes, counts(3, [2, 7, 3]), by_observation, seed=0)
    lengths = play(num_episodes=10).lengths
    assert len(lengths) == 10 and set(lengths) == {2, 3, 7}
    assert play(num_episodes=3, max_steps=2).lengths == [2, 2, 2]
    assert play(num_episodes=3, stop=iter([False, False, True]).__next__) is None
    settings = {"num_episodes": 3, "seed": 0, "stop": lambda: True}
    assert EpisodeBatch(counts(2), of_member, members=[0], **settings).play() is None


def test_actors_get_stacks_as_when_collecting():
    actor = RecordingActor()
    play_episodes(counts(1), actor, num_episodes=2, seed=0, frame_stack=3)
    stacks = [(stack - stack[:, :1]).flatten().tolist() for stack in actor.observations]
    assert (stacks[0], stacks[2], stacks[4]) == ([0, 0, 0], [0, 1, 2], [0, 0, 0])


def test_episodes_can_be_watched():
    class Watcher:
        def __init__(self):
            self.frames, self.ends = {}, {}

        def on_step(self, env, episode, row, chosen):
            time = int(env.render(row)[0, 0, 0])
            self.frames.setdefault(episode, []).append((time, chosen is not None))

        def ended(self, episode, episode_return):
            self.ends[episode] = episode_return

    watcher = Watcher()
    found = play_episodes(counts(2), by_observation, num_episodes=3, seed=0, watch=watcher)
    shown = [(0, True), (1, True), (2, True), (3, True), (4, False)]
    assert watcher.frames == {0: shown, 1: shown, 2: shown}
    assert [watcher.ends[i] for i in range(3)] == found.returns


def best_for(opponent):
    def choose(states):
        return TensorDict(action=opponent.act(states, torch.Generator()), batch_size=[len(states)])

    return choose


def of_member(states):
    """An actor whose actions differ by member."""
    action = (states["observation"].flatten(1)[:, -1].long() + states["member"]) % 3
    return TensorDict(action=action, batch_size=[len(states)])


def actor_of(member):
    def choose(states):
        return of_member(states.copy().set("member", torch.full((len(states),), member)))

    return choose


@pytest.mark.parametrize("num_envs", [1, 4, 20])
@pytest.mark.parametrize("frame_stack", [1, 3])
def test_members_play_the_same_episodes_as_alone(num_envs, frame_stack):
    lengths = [2, 7, 3, 4] * 5
    settings = {"num_episodes": 5, "seed": 4, "frame_stack": frame_stack}
    envs = counts(num_envs, lengths[:num_envs]) if num_envs > 1 else counts(1)
    found = EpisodeBatch(envs, of_member, members=[0, 2, 1], **settings).play()
    assert list(found) == [0, 2, 1]
    for member, episodes in found.items():
        assert len(episodes.returns) == 5
        if num_envs == 1:  # environments of other lengths come in another order
            assert episodes == play_episodes(counts(1), actor_of(member), **settings)
    assert num_envs > 1 or found[0] != found[1]


def test_only_the_named_members_play_and_one_is_watched():
    episodes, ends = [], []

    class Watcher:
        def on_step(self, env, episode, row, chosen):
            episodes.append(episode)

        def ended(self, episode, episode_return):
            ends.append((episode, episode_return))

    members = set()

    def choose(states):
        members.update(states["member"].tolist())
        return of_member(states)

    settings = dict(num_episodes=2, seed=0, watch=Watcher(), watched=3)
    found = EpisodeBatch(counts(4), choose, members=[1, 3], **settings).play()
    assert members == {1, 3} == set(found)
    assert sorted(ends) == list(enumerate(found[3].returns)) and set(episodes) == {0, 1}
