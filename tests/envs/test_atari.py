"""Atari games: observations, rewards and flags, against the emulator and ale-py's preprocessing."""

import builtins
import importlib.util
import inspect
import subprocess
import sys

import numpy as np
import pytest
import torch

from raffia.envs.check import check_env
from raffia.envs.config import AtariConfig
from raffia.envs.env import Env
from raffia.envs.resize import area
from tests.marks import slow_among

ale_py = pytest.importorskip("ale_py", reason="extra atari is not installed")

from raffia.envs.atari import AtariEnv, atari_games, game_name  # noqa: E402


def small(**options):
    return AtariConfig(size=64, colour=False, **options)


def game_of(name, evaluation=False, **options):
    return AtariEnv(name, small(**options), evaluation=evaluation)


def actions(env, num, seed=0):
    draws = torch.Generator().manual_seed(seed)
    return torch.randint(0, env.spec.action.n, (num,), generator=draws)


def play(env, seed, taken):
    """The steps of a game, until it is over or the actions run out."""
    steps = [env.reset(seed)]
    for action in taken:
        steps.append(output := env.step(torch.as_tensor(action)))
        ended = output["terminated"] | output["truncated"]
        if ended and not output.get("continues", torch.tensor(False)):
            break
    return steps


def flags(steps, name):
    return [bool(output[name]) for output in steps[1:]]


def same(first, second, keys=("observation", "reward", "terminated", "truncated")):
    assert len(first) == len(second)
    for one, other in zip(first[1:], second[1:], strict=True):
        assert all(torch.equal(one[key], other[key]) for key in keys)
    return torch.equal(first[0]["observation"], second[0]["observation"])


class Watched:
    """Wraps an environment's emulator, and records its actions and screens."""

    def __init__(self, env):
        self.ale, self.acted, self.rewards, self.screens = env._ale, [], [], []
        env._ale = self

    def __getattr__(self, name):
        return getattr(self.ale, name)

    def act(self, action):
        self.acted.append(action.value)
        self.rewards.append(self.ale.act(action))
        self.screens.append(self.ale.getScreenRGB())
        return self.rewards[-1]


@pytest.mark.parametrize(
    ("size", "colour", "shape"), [(64, False, (1, 64, 64)), (96, True, (3, 96, 96))]
)
def test_spec_and_outputs(size, colour, shape):
    config, evaluation = AtariConfig(size=size, colour=colour), not colour
    env = AtariEnv("pong", config, evaluation=evaluation, full_action_space=colour)
    assert isinstance(env, Env) and env.spec.continues is not evaluation
    assert (env.spec.observation_shape, env.spec.observation_dtype) == (shape, torch.uint8)
    assert env.spec.name == "atari/pong" and env.action_names[:2] == ("NOOP", "FIRE")
    assert env.spec.action.n == len(env.action_names) == (18 if colour else 6)
    check_env(env, num_steps=30).require()
    env.reset(0)
    assert env.render().shape == (210, 160, 3) and env.render().dtype == torch.uint8


@pytest.mark.parametrize("game", slow_among(["breakout", "pitfall2", "tetris"], "pitfall2"))
def test_seed_and_actions_determine_the_episode(game):
    # Pitfall II starts differently after a game if it is only reset; Tetris shows
    # something else if its state is only restored.
    env = game_of(game, sticky=0.3)
    taken = actions(env, 60)
    first = play(env, 5, taken)
    between = play(env, 6, actions(env, 150, seed=1))
    assert any(flags(between, "continues")) == (game == "breakout")  # left in a later life
    assert same(first, play(env, 5, taken))
    assert same(first, play(game_of(game, sticky=0.3), 5, taken))


@pytest.mark.parametrize(
    ("game", "options"),
    slow_among(
        [("breakout", {"sticky": 0.25}), ("demon_attack", {"frame_skip": 1}), ("pitfall2", {})],
        ("breakout", {"sticky": 0.25}),
        ("pitfall2", {}),
    ),
)
def test_a_game_stepped_without_rendering_is_the_same(game, options):
    env = game_of(game, **options)
    taken = actions(env, 150)
    shown = play(env, 5, taken)
    taken = taken[: len(shown) - 1]
    for num in (1, len(taken) // 2, len(taken) - 1):
        for other in (env, game_of(game, **options)):
            before = np.stack(other._frames)
            other.fast_forward(5, taken[:num])
            assert (np.stack(other._frames) == before).all()  # it has not looked
            again = [other.step(action) for action in taken[num:]]
            assert same(shown[num + 1 :], again)
    with pytest.raises(RuntimeError, match="no game is running"):
        game_of(game, max_frames=8).fast_forward(5, torch.zeros(9, dtype=torch.int64))


def digest():  # self-contained: another process runs its source
    import hashlib

    import torch

    from raffia.envs.atari import AtariEnv
    from raffia.envs.config import AtariConfig

    env = AtariEnv("ms_pacman", AtariConfig(size=64, colour=False, sticky=0.25))
    observations = [env.reset(2**62)["observation"]]
    observations += [env.step(torch.tensor(t % 9))["observation"] for t in range(100)]
    return hashlib.sha256(torch.stack(observations).numpy().tobytes()).hexdigest()


@pytest.mark.slow
def test_an_episode_is_the_same_in_another_process():
    command = [sys.executable, "-c", inspect.getsource(digest) + "print(digest())"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert child.stdout.strip() == digest()
    assert child.stderr == ""  # the emulator is silent


def frames_at_start(seeds=(0,), game="breakout", **options):
    env = game_of(game, **options)

    def frame_at_start(seed):
        env.reset(seed)
        return env._ale.getEpisodeFrameNumber()

    return [frame_at_start(seed) for seed in seeds]


def test_games_start_with_noops_drawn_from_the_seed_and_with_fire_where_they_have_it():
    [begin] = frames_at_start(noop_max=0)
    starts = {*frames_at_start(range(16), noop_max=4)}
    assert starts == {begin + n for n in (1, 2, 3, 4)}
    for game, has_fire in (("breakout", True), ("pong", True), ("ms_pacman", False)):
        [with_fire], [without] = (
            frames_at_start(game=game, noop_max=0, press_fire=press) for press in (True, False)
        )
        assert with_fire - without == (4 if has_fire else 0)


@pytest.mark.parametrize(
    ("game", "grey", "lives_lost"),
    slow_among([("breakout", True, 4), ("pong", False, 0)], ("pong", False, 0)),
)
def test_preprocessing_against_ale_py(game, grey, lives_lost):
    from ale_py.vector_env import AtariVectorEnv

    plain = dict(noop_max=0, clip_reward=False, max_frames=100_000, press_fire=False)
    ours = AtariEnv(game, AtariConfig(size=84, colour=not grey, **plain))
    plain = dict(noop_max=0, reward_clipping=False, use_fire_reset=False, stack_num=1)
    theirs = AtariVectorEnv(game, 1, num_threads=1, grayscale=grey, **plain)

    def far(mine, frames):  # theirs are channels last
        other = frames[0, 0][None] if grey else np.moveaxis(frames[0, 0], -1, 0)
        return np.abs(mine.numpy().astype(int) - other).max()

    frames, info = theirs.reset(seed=0)
    assert far(ours.reset(0)["observation"], frames) <= 1  # halves may be rounded otherwise
    lives, num_lost, total = info["lives"][0], 0, 0.0
    for action in actions(ours, 220, seed=3):
        output = ours.step(action)
        frames, reward, over, _, info = theirs.step(np.array([int(action)]))
        lost = bool(info["lives"][0] < lives) and not over[0]
        lives = info["lives"][0]
        num_lost += lost
        total += abs(float(reward[0]))
        assert float(output["reward"]) == reward[0]
        assert bool(output["continues"]) == lost
        assert bool(output["terminated"]) == (lost or bool(over[0]))
        if over[0]:
            break
        assert far(output["observation"], frames) <= 1
    theirs.close()
    assert total > 0 and num_lost == lives_lost


@pytest.mark.slow
def test_fire_is_pressed_after_a_lost_life_and_its_rewards_are_not_lost():
    """After a lost life the frames of FIRE belong to the step that lost it."""
    idle = [0] * 400
    for evaluation in (True, False):
        lost = play(game_of("breakout", evaluation), 0, idle)
        assert lost[-1]["terminated"]  # all balls
        waits = play(game_of("breakout", evaluation, press_fire=False), 0, idle)
        assert len(waits) == 401 and not waits[-1]["terminated"]
    env = game_of("breakout", evaluation=True, noop_max=0)
    taken = actions(env, 300)
    length = len(play(env, 0, taken)) - 1
    env.reset(0)
    watched, total, lengths = Watched(env), 0.0, []
    for action in taken[:length]:
        before = len(watched.rewards)
        total += float(env.step(action)["reward"])
        lengths.append(len(watched.rewards) - before)
    assert total == sum(watched.rewards) > 0
    assert lengths.count(8) == 4 and set(lengths) == {4, 8}  # the fifth life is the last


@pytest.mark.parametrize("frame_skip", [1, 4])
def test_the_observation_is_the_maximum_of_the_last_two_frames(frame_skip):
    env = AtariEnv("asteroids", AtariConfig(size=64, noop_max=0, frame_skip=frame_skip))  # flickers
    env.reset(0)
    watched, differ = Watched(env), 0
    for _ in range(5):
        watched.screens.clear()
        observation = env.step(torch.tensor(0))["observation"]
        assert len(watched.screens) == frame_skip
        before, last = watched.screens[-min(2, frame_skip)], watched.screens[-1]
        differ += not np.array_equal(before, last)
        assert torch.equal(observation, area(torch.from_numpy(np.maximum(before, last)), 64, 64))
        assert torch.equal(env.render(), torch.from_numpy(last))
    assert bool(differ) == (frame_skip > 1)


def test_a_lost_life_ends_the_learners_episode_but_not_the_game():
    taken = actions(game_of("breakout"), 400)
    training = play(game_of("breakout"), 3, taken)
    whole = play(game_of("breakout", evaluation=True), 3, taken)
    keys = ("observation", "reward")  # breakout's first rewards are 1: clipping changes nothing
    assert same(training, whole, keys)
    ends, continues = flags(training, "terminated"), flags(training, "continues")
    assert sum(ends) == 5 and sum(continues) == 4  # five lives
    assert ends[-1] and not continues[-1]
    assert flags(whole, "terminated") == [False] * (len(whole) - 2) + [True]
    assert not any(flags(training, "truncated") + flags(whole, "truncated"))
    assert "continues" not in whole[1]

    first = continues.index(True) + 1  # a life that is lost where the frames are over
    env = game_of("breakout", max_frames=4 * first)
    last = play(env, 3, taken)[-1]
    assert last["terminated"] and not last["truncated"] and not last["continues"]
    with pytest.raises(RuntimeError, match="no game is running"):
        env.step(torch.tensor(0))


def test_rewards_are_clipped_in_training_only():
    taken = actions(game_of("ms_pacman"), 120)
    clipped, true = (
        torch.stack([output["reward"] for output in play(game_of("ms_pacman", e), 0, taken)[1:]])
        for e in (False, True)
    )
    assert true.max() >= 10 and torch.equal(clipped, true.sign())


@pytest.mark.parametrize(("evaluation", "num"), [(True, 20), (False, 100)])
def test_the_limit_of_frames_truncates(evaluation, num):
    limits = {"max_frames": 397, "evaluation_frames": 80}
    env = game_of("breakout", evaluation, press_fire=False, **limits)
    steps = play(env, 0, [0] * 200)
    assert flags(steps, "truncated") == [False] * (num - 1) + [True]
    assert not any(flags(steps, "terminated"))
    with pytest.raises(RuntimeError, match=r"call reset\(seed\)"):
        env.step(torch.tensor(0))
    assert game_of("pong", evaluation).max_frames == 12_000  # 3,000 searches


def test_sticky_actions_are_drawn_for_each_frame():
    env = game_of("pong", sticky=0.25, noop_max=0, press_fire=False)
    env.reset(0)
    watched, num_repeated, before = Watched(env), 0, 0
    for t in range(150):
        wanted = 2 + t % 2  # RIGHT and LEFT alternately
        env.step(torch.tensor(wanted))
        of_step = watched.acted[-4:]
        now = env._actions[wanted].value
        first_new = of_step.index(now) if now in of_step else 4
        assert of_step == [before] * first_new + [now] * (4 - first_new)
        num_repeated += first_new
        before = of_step[-1]
    # Old actions at the start of a step: 0.25 + 0.25^2 + ... = 0.332 of the frames, so 50 +- 8.
    assert 25 < num_repeated < 75


def test_names():
    for name in ("ms_pacman", "MsPacman", "ALE/MsPacman-v5", "mspacman"):
        assert game_name(name) == "ms_pacman"
    games = atari_games()
    assert games == sorted(games)
    gymnasium = pytest.importorskip("gymnasium")
    gymnasium.register_envs(ale_py)
    known = {spec.kwargs["game"] for spec in gymnasium.registry.values() if "ALE/" in spec.id}
    assert set(games) == known


def test_invalid_calls_and_settings_are_refused():
    env = game_of("pong")
    with pytest.raises(RuntimeError, match=r"call reset\(seed\)"):
        env.step(torch.tensor(0))
    env.reset(0)
    with pytest.raises(ValueError, match=r"action 6 must be in 0 \.\. 5"):
        env.step(torch.tensor(6))
    # combat is for two players: the emulator would end the process
    for name, options, message in (
        ("pongg", {}, "no Atari game 'pongg'. Did you mean 'pong'"),
        ("combat", {}, r"no Atari game 'combat'.*atari_games\(\)"),
        ("pong", {"frame_skip": 0}, "frame_skip=0 must be at least 1"),
        ("pong", {"noop_max": -1}, "noop_max=-1"),
        ("pong", {"sticky": 1.0}, r"sticky=1.0 must be below 1"),
        ("pong", {"max_frames": 3}, "max_frames=3 must be at least frame"),
        ("pong", {"evaluation_frames": 3}, "evaluation_frames=3 must be in fra"),
        ("pong", {"evaluation_frames": 108_001}, "evaluation_frames=108001 must"),
    ):
        with pytest.raises(ValueError, match=message):
            game_of(name, **options)


@pytest.mark.parametrize("state", ["missing", "broken"])
def test_without_ale_py(monkeypatch, state):
    find, original = importlib.util.find_spec, builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "ale_py":
            raise ImportError("a library is missing")
        return original(name, *args, **kwargs)

    if state == "broken":
        monkeypatch.setattr(builtins, "__import__", refuse)
    else:
        found = lambda name: None if name == "ale_py" else find(name)  # noqa: E731
        monkeypatch.setattr(importlib.util, "find_spec", found)
        assert atari_games() == []
    with pytest.raises(ImportError, match=r"pip install 'raffia\[atari\]'"):
        AtariEnv("pong")
