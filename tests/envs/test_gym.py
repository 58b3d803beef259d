import sys

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import TransformAction

from raffia.envs.batch import SerialBatch
from raffia.envs.env import Box, Discrete, Env
from raffia.envs.gym import GymEnv, made


def test_action_masks_are_read_on_request_and_otherwise_mentioned_once():
    env = GymEnv(Masked(), masked=True)
    assert env.reset(0)["action_mask"].tolist() == [True, False, False]
    assert env.step(torch.tensor(0))["action_mask"].tolist() == [False, False, True]
    assert "action_mask" not in GymEnv(Masked(), masked=False).reset(0)
    for marks in ([[1, 0]], [[]]):
        with pytest.raises(ValueError, match=r"info.\"action_mask\".* of shape .*needs \[3\]"):
            GymEnv(Masked(marks), masked=True).reset(0)
    with pytest.raises(ValueError, match='ShownEnv returned an info without "action_mask"'):
        GymEnv(ShownEnv(), masked=True).reset(0)
    one = ShownEnv()
    with pytest.raises(ValueError, match="same environment in several rows"):
        SerialBatch([GymEnv(one), GymEnv(one)])
    env = GymEnv(Masked())
    with pytest.warns(UserWarning, match=r"Masked marks .*GymEnv\(env, masked=True\) reads them"):
        assert "action_mask" not in env.reset(0)
    env.reset(1)  # warnings are errors


VECTOR = spaces.Box(-1, 1, (2,), np.float32)


class ShownEnv(gymnasium.Env):
    """Shows the given observation, and records the last action."""

    def __init__(self, shown=None, space=VECTOR, action_space=None, ends=(False, False)):
        self.observation_space = space
        self.action_space = spaces.Discrete(2) if action_space is None else action_space
        self.shown = space.sample() if shown is None else shown
        self.ends = ends

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed = seed
        return self.shown, {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.taken = action
        return self.shown, 1, *self.ends, {}


def observation_of(shown, space):
    env = GymEnv(ShownEnv(shown, space))
    observation = env.reset(0)["observation"]
    assert observation.shape == env.spec.observation_shape
    assert observation.dtype == env.spec.observation_dtype
    return observation


@pytest.mark.parametrize(
    ("shape", "shown_as"),
    [
        ((5, 4, 3), (3, 5, 4)),
        ((3, 5, 4), (3, 5, 4)),
        ((6, 5, 1), (1, 6, 5)),
        ((4, 84, 84), (4, 84, 84)),
        ((3, 3, 3), (3, 3, 3)),
        ((5, 4), (1, 5, 4)),
    ],
)
def test_pictures_have_their_channels_first(shape, shown_as):
    shown = np.arange(np.prod(shape), dtype=np.int64).astype(np.uint8).reshape(shape)
    picture = observation_of(shown, spaces.Box(0, 255, shape, np.uint8))
    assert picture.shape == shown_as and picture.dtype == torch.uint8
    last = len(shape) == 3 and shape[-1] <= shape[0]
    wanted = np.transpose(shown, (2, 0, 1)) if last else shown.reshape(shown_as)
    assert np.array_equal(picture, wanted)
    floats = observation_of(np.float32(shown) / 255, spaces.Box(0, 1, shape, np.float32))
    assert len(shape) == 2 or torch.equal(floats, torch.from_numpy(np.float32(wanted) / 255))


TWO, UINT8 = spaces.Discrete(2), np.uint8


@pytest.mark.parametrize(
    ("space", "shown", "vector"),
    [
        (spaces.Discrete(3), 2, [0, 0, 1]),
        (spaces.Discrete(3, start=-1), -1, [1, 0, 0]),
        (spaces.MultiDiscrete([2, 3]), np.array([1, 2]), [0, 1, 0, 0, 1]),
        (spaces.MultiBinary(3), np.array([1, 0, 1], np.int8), [1, 0, 1]),
        (spaces.Tuple([TWO, VECTOR]), (1, np.float32([0.5, 0])), [0, 1, 0.5, 0]),
        (spaces.Dict(a=TWO, b=VECTOR), {"a": 0, "b": np.float32([0, 1])}, [1, 0, 0, 1]),
        (spaces.Box(-1, 1, (), np.float32), np.float32(0.5), [0.5]),
        (spaces.Box(-1, 1, (2,), np.float64), np.array([0.5, -1.0], np.float64), [0.5, -1.0]),
        (spaces.Box(0, 255, (2,), UINT8), np.array([7, 200], UINT8), [7, 200]),
        (spaces.Box(0, 9, (2, 3), np.int64), np.arange(6).reshape(2, 3), [0, 1, 2, 3, 4, 5]),
    ],
)
def test_spaces_are_flattened_to_one_vector(space, shown, vector):
    assert observation_of(shown, space).tolist() == vector


@pytest.mark.parametrize(
    ("space", "shown", "text"),
    [
        (VECTOR, np.zeros(1), r"of shape \[1\]"),
        (VECTOR, np.float32(0.5), r"of shape \[\]"),
        (spaces.Box(0, 1, (2, 3), np.float32), np.zeros((3, 2)), r"of shape \[3, 2\]"),
        (spaces.Box(0, 255, (6, 6, 1), UINT8), np.zeros((6, 6), UINT8), r"of shape \[6, 6\]"),
        (spaces.Box(0, 255, (6, 6, 3), UINT8), np.full((6, 6, 3), 0.5), "picture with 0.5"),
        (spaces.Box(0, 255, (6, 6), UINT8), np.full((6, 6), 300), "picture with 300"),
        (spaces.Discrete(3, start=1), 0, "observation 0, which"),
        (spaces.MultiDiscrete([2, 3]), np.array([2, 0]), r"observation array\(\[2, 0\]\), which"),
        (spaces.Tuple([TWO, VECTOR]), (-1, np.zeros(2)), "observation -1, which"),
        (spaces.Dict(a=TWO, b=VECTOR), {"a": 0}, "observation {'a': 0}, which"),
    ],
)
def test_observations_outside_their_space_are_refused(space, shown, text):
    with pytest.raises(ValueError, match=f"^ShownEnv returned .*{text}"):
        observation_of(shown, space)


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        ((None, False, False), "reward=None"),
        ((np.ones(1), False, False), r"reward=array\(\[1.\]\)"),
        ((1.0, None, False), "terminated=None"),
        ((1.0, False, {"a": True}), "truncated={'a': True}"),
    ],
)
def test_outcomes_that_are_no_numbers_are_refused(outcome, text):
    class Odd(ShownEnv):
        def step(self, action):
            return self.shown, *outcome, {}

    env = GymEnv(Odd(np.zeros(2, np.float32), VECTOR))
    env.reset(0)
    with pytest.raises(ValueError, match=f"^Odd returned {text}, but it must be one number"):
        env.step(torch.tensor(0))


@pytest.mark.parametrize("masked", [None, True])
def test_an_info_that_is_no_dict_is_refused(masked):
    class Silent(ShownEnv):
        def reset(self, **options):
            return self.shown, None

    env = GymEnv(Silent(np.zeros(2, np.float32), VECTOR), masked=masked)
    with pytest.raises(ValueError, match="^Silent returned info=None, but .* {}, will do"):
        env.reset(0)


def test_pictures_need_a_maker_that_takes_a_render_mode(monkeypatch):
    def make():
        return ShownEnv(np.zeros(2, np.float32), VECTOR)

    monkeypatch.setitem(gymnasium.registry, "Unseen-v0", EnvSpec("Unseen-v0", entry_point=make))
    with pytest.raises(TypeError, match="^pictures of Unseen-v0 need a render_mode"):
        GymEnv("Unseen-v0", render=True)
    assert GymEnv("Unseen-v0").render() is None


def test_other_spaces_are_refused_by_name():
    obs, acts = "ShownEnv has the observations .*", "ShownEnv has the actions .*"
    picture = spaces.Box(0, 255, (4, 4, 3), np.uint8)
    endless = spaces.Box(-np.inf, np.inf, (2,))
    for options, message in (
        ({"space": spaces.Dict(a=picture, b=VECTOR)}, f"{obs}choose one with"),
        ({"space": spaces.Box(0, 1, (2, 3, 4, 5), np.float32)}, f"{obs}have three axes"),
        ({"space": spaces.Text(5)}, f"{obs}cannot be flattened"),
        ({"space": spaces.Sequence(VECTOR)}, f"{obs}cannot be flattened"),
        ({"action_space": spaces.MultiDiscrete([2, 2])}, f"{acts}Discrete and Box.*TransformAct"),
        ({"action_space": spaces.MultiBinary(2)}, f"{acts}only Discrete and Box"),
        ({"action_space": endless}, f"{acts}bounds must be finite.*TransformAction"),
    ):
        with pytest.raises(ValueError, match=message):
            GymEnv(ShownEnv(**options))
    unbounded = ShownEnv(action_space=endless)  # the call that the error names
    bounded = TransformAction(unbounded, lambda action: action, spaces.Box(-1, 1, (2,)))
    assert GymEnv(bounded).spec.action == Box((-1.0, -1.0), (1.0, 1.0))


def test_packages_that_are_missing_are_named(monkeypatch):
    pytest.importorskip("pygame")
    env = GymEnv("CartPole-v1", render=True)
    env.reset(0)
    picture = env.render()
    assert picture.shape == (400, 600, 3) and picture.dtype == torch.uint8
    env.close()
    monkeypatch.setitem(sys.modules, "pygame", None)
    env = GymEnv("CartPole-v1", render=True)
    env.reset(0)
    message = r"pictures of CartPole-v1 need .*: pip install 'raffia\[video\]'"
    with pytest.raises(ImportError, match=message):
        env.render()
    monkeypatch.setitem(sys.modules, "Box2D", None)
    for module in [name for name in sys.modules if name.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ImportError, match=r"LunarLander-v3 .*: pip install 'raffia\[box2d\]'$"):
        GymEnv("LunarLander-v3")

    def make(*args, **options):
        raise gymnasium.error.DependencyNotInstalled("pip install thing")

    monkeypatch.setattr(gymnasium, "make", make)
    with pytest.raises(ImportError, match="Thing-v0 needs a package.*pip install thing"):
        made("Thing-v0")


@pytest.mark.parametrize(
    ("method", "text"), [("reset", "returned 3 values"), ("step", "returned 4 values")]
)
def test_envs_of_the_old_gym_are_refused(method, text):
    class Old(ShownEnv):
        def reset(self, **options):
            return self.shown if method == "reset" else (self.shown, {})

        def step(self, action):
            return self.shown, 1.0, False, {}

    env = GymEnv(Old(np.zeros(3, np.float32), spaces.Box(-1, 1, (3,))))
    with pytest.raises(ValueError, match=f"{method} of Old {text}, but Gymnasium's returns"):
        env.reset(0)
        env.step(torch.tensor(0))


@pytest.mark.parametrize("start", [0, 1, -2])
def test_discrete_actions_count_from_0(start):
    inner = ShownEnv(action_space=spaces.Discrete(3, start=start))
    env = GymEnv(inner)
    assert env.spec.action == Discrete(3)
    env.reset(0)
    for action in range(3):
        env.step(torch.tensor(action))
        assert inner.taken == action + start


class Masked(ShownEnv):
    """Of its three actions the first is legal, and after it the last."""

    def __init__(self, marks=((1, 0, 0), (0, 0, 1))):
        super().__init__(action_space=spaces.Discrete(3), ends=(False, True))
        self.marks = [{"action_mask": np.array(mark, np.int8)} for mark in marks]

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], self.marks[0]

    def step(self, action):
        return *super().step(action)[:4], self.marks[1]


def test_actions_of_whole_numbers_are_the_nearest():
    inner = ShownEnv(action_space=spaces.Box(-3, 3, (4,), np.int32))
    env = GymEnv(inner)
    env.reset(0)
    env.step(torch.tensor([-2.9, -0.6, 0.4, 3.0]))
    assert inner.taken.tolist() == [-3, -1, 0, 3] and inner.taken.dtype == np.int32


def test_episodes_and_limits_equal_gymnasiums_of_the_same_seed():
    env, theirs = GymEnv("CartPole-v1"), gymnasium.make("CartPole-v1")
    assert isinstance(env, Env) and env.gym.spec.max_episode_steps == 500
    for seed in (0, 5):
        mine, (wanted, _) = env.reset(seed), theirs.reset(seed=seed)
        assert np.array_equal(mine["observation"], wanted)
        for action in (0, 1, 1, 0, 1):
            after, (wanted, reward, *ends, _) = env.step(torch.tensor(action)), theirs.step(action)
            assert np.array_equal(after["observation"], wanted) and after["reward"] == reward
            assert [bool(after["terminated"]), bool(after["truncated"])] == ends
    env = GymEnv("CartPole-v1", max_episode_steps=3)
    env.reset(0)
    cut = [bool(env.step(torch.tensor(step % 2))["truncated"]) for step in range(3)]
    assert cut == [False, False, True]
    with pytest.raises(ValueError, match="_steps and render can only be given with an id"):
        GymEnv(ShownEnv(), max_episode_steps=3)
