import pytest
import torch

from raffia.envs.probe import PROBES, probe_values


def best_return(kind, seed, discount, actions=()):
    """The observation after these actions, and the value of each action there, by trying all."""
    env = kind()
    state = env.reset(seed)
    for action in actions:
        state = env.step(torch.tensor(action))
    values = []
    for action in range(env.spec.action.n):
        env = kind()
        env.reset(seed)
        for earlier in actions:
            env.step(torch.tensor(earlier))
        after = env.step(torch.tensor(action))
        more = 0.0
        if not after["terminated"]:
            more = max(best_return(kind, seed, discount, (*actions, action))[1])
        values.append(float(after["reward"]) + discount * more)
    return float(state["observation"]), values


def all_states(kind, discount):
    """observation -> the value of each action, for all reachable states."""
    found = {}
    for seed in range(16):
        observation, values = best_return(kind, seed, discount)
        found[observation] = values
        after = (env := kind()).reset(seed)
        after = env.step(torch.tensor(0))
        if not after["terminated"]:
            observation, values = best_return(kind, seed, discount, (0,))
            found[observation] = values
    return found


@pytest.mark.parametrize("kind", PROBES.values(), ids=PROBES)
def test_known_values_equal_exhaustive_search(kind):
    known = probe_values(kind(), discount=0.8)
    tried = all_states(kind, discount=0.8)
    assert sorted(tried) == sorted(known.observation[:, 0].tolist())
    for i, observation in enumerate(known.observation[:, 0].tolist()):
        torch.testing.assert_close(known.action_value[i], torch.tensor(tried[observation]))
        torch.testing.assert_close(known.value[i], known.action_value[i].max())


def test_best_actions_are_recorded_for_states_with_a_choice():
    best = {name: kind().known(0.9).best_action.tolist() for name, kind in PROBES.items()}
    assert best == {
        "probe/value": [-1],
        "probe/observation": [-1, -1],
        "probe/delay": [-1, -1],
        "probe/action": [1],
        "probe/policy": [0, 1],
    }
