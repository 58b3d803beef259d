"""Rollouts of actors: when they are requested, and that a ledger tracks the environments' state."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raffia.envs.config import EnvConfig
from raffia.envs.env import Discrete
from raffia.envs.make import make_env
from raffia.functional.seeds import generator_for
from raffia.tensordict.stack import stack
from raffia.tensordict.tensordict import TensorDict
from raffia.train.collect import Collector
from raffia.train.ledger import Ledger, rows_of
from raffia.train.rollouts import Schedule
from tests.marks import slow_among

SCHEDULES = {
    "rollout_size": st.integers(1, 40),
    "random_env_steps": st.integers(0, 60),
    "updates_per_env_step": st.sampled_from([0.1, 0.2, 1 / 3, 0.5, 0.7, 1.0, 2.0, 3.7]),
    "ahead": st.integers(0, 9),
    "weights_every": st.integers(1, 4),
}


@given(st.fixed_dictionaries(SCHEDULES), st.integers(1, 200))
@settings(max_examples=300, deadline=None)
def test_a_schedule_equals_a_loop_that_counts_steps(options, num_steps):
    begin, ratio = options["random_env_steps"], options["updates_per_env_step"]
    ahead, every = options["ahead"], options["weights_every"]
    schedule = Schedule(**options, num_env_steps=begin + num_steps)
    num_played, rollout = 0, 0
    for update in range(math.ceil(num_steps * ratio) + 2):
        while num_played < min(begin + num_steps, begin + math.ceil((update + 1) / ratio)):
            assert schedule.due(rollout) == update
            version = schedule.version(rollout)
            assert version % every == 0 and max(0, update - ahead) - version in range(every)
            num_played, rollout = num_played + options["rollout_size"], rollout + 1
    assert schedule.due(rollout) is None and schedule.version(rollout) is None


# ------------------------------------------------------------------------------------ ledgers


def play(env_id, num_steps, cut, **config):
    """Steps of a collector, and its state after `cut` of them."""
    env = make_env(EnvConfig(id=env_id, num_envs=3, **config))
    collector = Collector(env, seed=5)
    steps, state = [], None

    def choose(states):
        draws = generator_for(7, "act", collector.num_env_steps)
        if isinstance(env.spec.action, Discrete):
            mask = states["action_mask"] if env.spec.masked else torch.ones(3, env.spec.action.n)
            action = torch.multinomial(mask.float(), 1, generator=draws)[:, 0]
        else:
            action = torch.rand(3, *env.spec.action.shape, generator=draws)
        return TensorDict(action=action, batch_size=[3])

    for number in range(num_steps):
        if number == cut:
            state = collector.state()
        steps.append(collector.collect(choose, 1)[0])
    ended, last = collector.take_ended(), collector.state()
    env.close()
    return env.spec, steps, state, ended, last


ENVS = "CartPole-v1 Pendulum-v1 tictactoe connect4 minatar/breakout atari/breakout".split()


@pytest.mark.parametrize("env_id", slow_among(ENVS, ENVS[-1]))
def test_a_ledger_has_the_collector_s_state(env_id):
    if env_id.startswith("atari"):
        pytest.importorskip("ale_py")
    config = {"max_episode_steps": 11} if env_id == "Pendulum-v1" else {}
    num_steps = 120 if env_id.startswith("atari") else 60
    spec, steps, middle, ended, last = play(env_id, num_steps, 23, **config)
    ledger = Ledger(3, spec, seed=5)
    rows = torch.arange(3)
    ledger.begin(rows)
    for number, step in enumerate(steps):
        if number == 23:
            found, early = ledger.state(), ledger.take_ended()
            assert all(found[key].equal(middle[key]) for key in found.keys())
            ledger = Ledger(3, spec, seed=5)  # another ledger continues
            ledger.load_state(found)
        ledger.begin(ledger.count(rows, step["action"], step))
    by_rollouts = Ledger(3, spec, seed=5)
    for first in range(0, num_steps, 20):
        by_rollouts.count_all(stack(steps[first : first + 20], 0))
    found = ledger.state()
    assert all(found[key].equal(value) for key, value in by_rollouts.state().items())
    assert by_rollouts.take_ended() == ended
    assert {*found.keys(), "checksums"} == set(last.keys())
    assert all(found[key].equal(last[key]) for key in found.keys())
    assert early + ledger.take_ended() == ended and ended
    seeds = [rows_of(found, row, 1)["episode"].item() for row in range(3)]
    assert seeds == found["episode"].tolist()
