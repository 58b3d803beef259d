"""What is said of names that no environment has, and of legal actions that nobody reads."""

import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from raffia.envs.gym import GymEnv
from raffia.envs.make import unknown


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Cartpole-v1", "'CartPole-v1'"),
        ("pendelum", "'Pendulum-v1'"),
        ("pendulum-v7", "'Pendulum-v1'"),
        ("Nope-v0", None),  # its version alone is like that of others
        ("x-v5", None),
    ],
)
def test_the_nearest_name_is_found_without_the_version(name, hint):
    found = str(unknown(name))
    assert f"Did you mean {hint}?" in found if hint else "Did you mean" not in found


class Marked(gymnasium.Env):
    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {"action_mask": np.array([1, 0, 1], np.int8)}


def test_marks_of_legal_actions_that_are_not_read_are_named_once():
    env = GymEnv(Marked())
    with pytest.warns(UserWarning, match=r"Marked marks .*GymEnv\(env, masked=True\) reads them"):
        assert "action_mask" not in env.reset(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.reset(1)
        GymEnv(Marked(), masked=False).reset(0)
        assert GymEnv(Marked(), masked=True).reset(0)["action_mask"].tolist() == [True, False, True]
