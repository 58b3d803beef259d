"""Complete runs in environments whose values are known.

Each run has all parts of a long one: collecting, replay, targets, learner, checkpoint.
"""

import pytest
import torch

from raffia.envs import Box, Discrete, EnvConfig, EnvSpec, SerialBatch, TimeLimit
from raffia.envs.probe import PROBES, probe_values
from raffia.recipes.efficientzero import EfficientZeroRun, load_agent, train
from raffia.tensordict import TensorDict
from tests.recipes.runs import Quiet, with_all

GAMMA = 0.5
# Rewards of the best action, in each of the states of `probe_values`.
REWARDS = dict(value=[1.0], observation=[-1.0, 1.0], delay=[0.0, 1.0], action=[1.0])
REWARDS["policy"] = [1.0, 1.0]
NEVER = 10**9


SUPPORTS = dict.fromkeys(("reward_support_range", "value_support_range"), (-2.0, 3.0, 1.0))
NORMS = dict.fromkeys(("norm_type", "projection_norm_type"), "LN")
SIZES = dict.fromkeys(("latent_state_dim", "lstm_hidden_size"), 32)
SIZES |= dict.fromkeys(("proj_hid", "proj_out", "pred_hid", "pred_out"), 16)
# LayerNorm: batch statistics can't distinguish two steps whose rows are all equal
BASE = with_all(
    EfficientZeroRun(),
    model=SUPPORTS | NORMS | SIZES | {"head_hidden_channels": (16,), "res_connection": False},
    loss={"unroll_steps": 2, "lstm_horizon": 2, "consistency_weight": 0.2},
    targets={"discount": GAMMA, "n_step": 3, "target_interval": 10, "reanalyze_ratio": 0.0},
    optimizer={"name": "adamw", "learning_rate": 5e-3, "weight_decay": 0.0, "decay_rate": 0.2},
    search={"temperatures": (1.0, 0.0), "temperature_from": (0.0, 0.4), "num_simulations": 8},
    replay={"capacity": 200, "batch_size": 64, "alpha": 0.0},
    collect={"random_env_steps": 100, "updates_per_env_step": 1.0},
    evaluate={"every_env_steps": NEVER, "num_episodes": 1, "max_steps": 2},
    checkpoint__every_updates=NEVER,
)


def run_of(name, num_updates=240, **changes):
    """Exploring at first, then greedy, with a small replay that soon drops exploration:
    the values become those of the best policy."""
    return with_all(
        BASE,
        env=EnvConfig(id=name, num_envs=4),
        optimizer__decay_updates=num_updates * 2 // 3,
        collect__num_env_steps=100 + num_updates,
        **changes,
    )


def trained(config, folder, make=None):
    """The agent of a finished run, in an environment made by `make` in place of one by name."""

    def envs(env, *, num_envs=None, evaluation=False, render=False):
        num = env.num_envs if num_envs is None else num_envs
        return make(num)

    more = {} if make is None else {"make_env": envs}
    assert train(config, folder / "run", view=Quiet(), **more).reason == "finished"
    return load_agent(folder / "run", "newest", **more)


def predict(agent, state, action):
    """The value prefix and the value after one step, as in a search."""
    root = agent.planner.root(state)
    output, _ = agent.planner._snapshot.recurrent_fn(root.embedding, action)
    return output.reward, output.value


def states(observation, **entries):
    return TensorDict(observation=observation, **entries, batch_size=[len(observation)])


def assert_near(found, expected, atol=0.05):
    torch.testing.assert_close(found, torch.as_tensor(expected), atol=atol, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBES)
def test_values_rewards_and_actions_of_the_probes_are_learned(name, tmp_path):
    agent = trained(run_of(name), tmp_path)
    known = probe_values(PROBES[name](), GAMMA)
    state, best = states(known.observation), known.best_action
    assert_near(agent.planner.values(known.observation), known.value)
    reward, following = predict(agent, state, best.clamp_min(0))
    rewards = torch.tensor(REWARDS[name.removeprefix("probe/")])
    assert_near(reward, rewards)
    assert_near(following, (known.value - rewards) / GAMMA)
    prior, found = agent.planner.root(state).prior_logits, agent.act(state)
    for choice in (prior.argmax(-1), found["action"], found["policy"].argmax(-1)):
        assert torch.where(best < 0, best, choice).equal(best)


def ending(reward, ends):
    return dict(reward=reward, terminated=torch.tensor(ends), truncated=torch.tensor(False))


class Endless:
    """A reward of 1 at each step, for ever: its value is 1 / (1 - discount)."""

    spec = EnvSpec(observation_shape=(1,), action=Discrete(2))
    ends = False

    def reset(self, seed):
        return TensorDict(observation=torch.ones(1))

    def reward(self, action):
        return torch.tensor(1.0)

    def step(self, action):
        return TensorDict(observation=torch.ones(1), **ending(self.reward(action), self.ends))

    def render(self):
        return None

    def close(self):
        pass


class Ending(Endless):
    """The same, but it ends after the first step."""

    ends = True


class Aim(Ending):
    """The nearer an action comes to 0.4, the better; then the end."""

    spec = EnvSpec(observation_shape=(1,), action=Box((-1.0,), (1.0,)))

    def reward(self, action):
        return -(action[0] - 0.4).square()


@pytest.mark.slow
def test_a_time_limit_is_no_termination(tmp_path):
    agent = trained(run_of("endless"), tmp_path, lambda num: limited_to_1(Endless, num))
    assert_near(agent.planner.values(torch.ones(1, 1)), [1 / (1 - GAMMA)])
    assert_near(predict(agent, states(torch.ones(1, 1)), torch.tensor([0]))[0], [1.0])


def limited_to_1(kind, num):
    return TimeLimit(SerialBatch([kind() for _ in range(num)]), 1)


@pytest.mark.slow
def test_a_termination_at_the_time_limit_is_one(tmp_path):
    config = run_of("ending", num_updates=120)
    agent = trained(config, tmp_path, lambda num: limited_to_1(Ending, num))
    assert_near(agent.planner.values(torch.ones(1, 1)), [1.0])


class Duel(Endless):
    """The first player gives the second one a lost position (action 0) or a won one (action 1).

    Observed as 0 at first; then as -1, where the second player's only move loses, or as +1, where
    it wins.
    """

    spec = EnvSpec(observation_shape=(1,), action=Discrete(3), num_players=2, masked=True)
    legal = {0.0: [True, True, False], -1.0: [True, False, False], 1.0: [False, False, True]}

    def reset(self, seed):
        self.position, self.mover = 0.0, 0
        return self.state()

    def state(self):
        return TensorDict(
            observation=torch.tensor([self.position]),
            action_mask=torch.tensor(self.legal[self.position]),
            to_play=torch.tensor(self.mover),
        )

    def step(self, action):
        assert self.legal[self.position][int(action)], "an illegal move"
        reward, ended = self.position, self.mover == 1
        if not ended:
            self.position, self.mover = (1.0 if int(action) else -1.0), 1
        return self.state().update(ending(torch.tensor(reward), ended))


@pytest.mark.slow
def test_values_of_two_players_have_opposite_signs(tmp_path):
    config = run_of("duel", evaluate__opponent="random")
    agent = trained(config, tmp_path, lambda num: SerialBatch([Duel() for _ in range(num)]))
    observation = torch.tensor([[0.0], [-1.0], [1.0]])
    values = agent.planner.values(observation)
    assert_near(values[:2], [GAMMA, -1.0])
    assert_near(values[2], 1.0, atol=0.3)  # a greedy player does not reach it any more
    mask = torch.tensor([Duel.legal[float(x)] for x in observation])
    state = states(observation, action_mask=mask, to_play=torch.tensor([0, 1, 1]))
    reward, following = predict(agent, state, torch.tensor([0, 0, 2]))
    assert_near(reward[:2], [0.0, -1.0])
    assert_near(reward[2], 1.0, atol=0.3)
    assert_near(following, [-1.0, 0.0, 0.0])
    assert agent.act(state)["action"].tolist() == [0, 0, 2]


@pytest.mark.slow
def test_a_continuous_policy_converges_to_the_best_action(tmp_path):
    search = dict(search__num_simulations=16, search__num_sampled_actions=8)
    config = run_of("aim", num_updates=300, **search)
    agent = trained(config, tmp_path, lambda num: SerialBatch([Aim() for _ in range(num)]))
    state = states(torch.ones(1, 1))
    mean, _ = agent.planner.root(state).prior_logits[0]
    assert_near(mean.tanh(), 0.4, atol=0.15)
    assert_near(agent.act(state)["action"], [[0.4]], atol=0.35)  # one of eight samples
    for action in (-0.2, 0.4, 0.7):
        reward, following = predict(agent, state, torch.tensor([[action]]))
        assert_near(reward, [-((action - 0.4) ** 2)], atol=0.1)
        assert_near(following, [0.0])
