"""Atari games: what is seen and told of them, against the emulator and ale-py's preprocessing."""

import builtins
import importlib.util
import inspect
import subprocess
import sys

import numpy as np
import pytest
import torch

from raffia.envs.batch import SerialBatch
from raffia.envs.check import check_env
from raffia.envs.config import AtariConfig
from raffia.envs.env import Env

ale_py = pytest.importorskip("ale_py", reason="extra atari is not installed")

from raffia.envs.atari import AtariEnv, atari_games, game_name  # noqa: E402

SMALL = AtariConfig(size=64, colour=False)


def actions(env, num, seed=0):
    draws = torch.Generator().manual_seed(seed)
    return torch.randint(0, env.spec.action.n, (num,), generator=draws)


def game_goes_on(said):
    ended = said["terminated"] | said["truncated"]
    return not ended or bool(said.get("continues", torch.tensor(False)))


def play(env, seed, num, draw_seed=0):
    """The steps of a game, until it is over or there were so many."""
    steps = [env.reset(seed)]
    for action in actions(env, num, draw_seed):
        steps.append(env.step(action))
        if not game_goes_on(steps[-1]):
            break
    return steps


def same(first, second, keys=("observation", "reward", "terminated", "truncated")):
    assert len(first) == len(second)
    for one, other in zip(first[1:], second[1:], strict=True):
        assert all(torch.equal(one[key], other[key]) for key in keys)
    return torch.equal(first[0]["observation"], second[0]["observation"])


@pytest.mark.parametrize(
    ("size", "colour", "shape"), [(64, False, (1, 64, 64)), (96, True, (3, 96, 96))]
)
def test_what_is_said(size, colour, shape):
    env = AtariEnv("pong", AtariConfig(size=size, colour=colour))
    assert isinstance(env, Env)
    assert (env.spec.observation_shape, env.spec.observation_dtype) == (shape, torch.uint8)
    assert env.spec.name == "atari/pong" and env.spec.action.n == len(env.action_names) == 6
    state = env.reset(0)
    after = env.step(torch.tensor(0))
    assert state.batch_size == after.batch_size == ()
    for said in (state, after):
        assert (said["observation"].shape, said["observation"].dtype) == (shape, torch.uint8)
    assert after["reward"].dtype == torch.float32
    assert after["terminated"].dtype == after["continues"].dtype == torch.bool
    assert env.render().shape == (210, 160, 3) and env.render().dtype == torch.uint8


@pytest.mark.parametrize("evaluation", [True, False])
def test_the_contract(evaluation):
    env = AtariEnv("breakout", SMALL, evaluation=evaluation)
    assert env.spec.continues is not evaluation
    check_env(env, num_steps=60).require()


def test_earlier_observations_keep_their_memory():
    env = AtariEnv("breakout", SMALL)
    first = env.reset(0)["observation"]
    kept = first.clone()
    play(env, 1, 20)
    assert torch.equal(first, kept)


def test_full_action_space():
    env = AtariEnv("pong", SMALL, full_action_space=True)
    assert env.spec.action.n == 18 and env.action_names[:3] == ("NOOP", "FIRE", "UP")


@pytest.mark.parametrize("game", ["breakout", "pitfall2", "tetris"])
def test_an_episode_is_made_of_its_seed_and_its_actions(game):
    # Pitfall II begins otherwise after a game than at first if it is only reset; Tetris shows
    # otherwise if its state is only restored.
    sticky = AtariConfig(size=64, colour=False, sticky=0.3)
    env = AtariEnv(game, sticky)
    first = play(env, 5, 60)
    play(env, 6, 150, draw_seed=1)
    assert same(first, play(env, 5, 60))
    assert same(first, play(AtariEnv(game, sticky), 5, 60))


def digest():  # stands alone: another process runs its text
    import hashlib

    import torch

    from raffia.envs.atari import AtariEnv
    from raffia.envs.config import AtariConfig

    env = AtariEnv("ms_pacman", AtariConfig(size=64, colour=False, sticky=0.25))
    seen = [env.reset(2**62)["observation"]]
    seen += [env.step(torch.tensor(t % 9))["observation"] for t in range(100)]
    return hashlib.sha256(torch.stack(seen).numpy().tobytes()).hexdigest()


@pytest.mark.slow
def test_an_episode_is_the_same_in_another_process():
    command = [sys.executable, "-c", inspect.getsource(digest) + "print(digest())"]
    there = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert there.stdout.strip() == digest()
    assert there.stderr == ""  # the emulator is silent


def test_noop_starts_are_drawn_from_the_seed():
    env = AtariEnv("breakout", AtariConfig(noop_max=4))
    idle = ale_py.Action.NOOP
    starts = set()
    for seed in range(40):
        env.reset(seed)
        starts.add(env._ale.getEpisodeFrameNumber())
    fresh = AtariEnv("breakout", AtariConfig(noop_max=0))
    fresh.reset(0)
    begin = fresh._ale.getEpisodeFrameNumber()
    assert starts == {begin + n for n in (1, 2, 3, 4)}
    fresh._ale.act(idle)
    assert fresh._ale.getEpisodeFrameNumber() == begin + 1


@pytest.mark.parametrize("grey", [True, False])
@pytest.mark.parametrize("game", ["breakout", "pong"])
def test_preprocessing_against_ale_py(game, grey):
    from ale_py.vector_env import AtariVectorEnv

    config = AtariConfig(
        size=84,
        colour=not grey,
        noop_max=0,
        clip_reward=False,
        max_frames=100_000,
        press_fire=False,
    )
    ours = AtariEnv(game, config)
    theirs = AtariVectorEnv(
        game,
        1,
        num_threads=1,
        noop_max=0,
        stack_num=1,
        grayscale=grey,
        reward_clipping=False,
        use_fire_reset=False,
    )

    def far(mine, frames):  # theirs are channels last
        other = frames[0, 0][None] if grey else np.moveaxis(frames[0, 0], -1, 0)
        return np.abs(mine.numpy().astype(int) - other).max()

    frames, info = theirs.reset(seed=0)
    assert far(ours.reset(0)["observation"], frames) <= 1  # halves may be rounded otherwise
    lives, num_lost, total = info["lives"][0], 0, 0.0
    for action in actions(ours, 220, seed=3):
        said = ours.step(action)
        frames, reward, over, _, info = theirs.step(np.array([int(action)]))
        lost = bool(info["lives"][0] < lives) and not over[0]
        lives = info["lives"][0]
        num_lost += lost
        total += abs(float(reward[0]))
        assert float(said["reward"]) == reward[0]
        assert bool(said["continues"]) == lost
        assert bool(said["terminated"]) == (lost or bool(over[0]))
        if over[0]:
            break
        assert far(said["observation"], frames) <= 1
    theirs.close()
    assert total > 0 and num_lost == {"breakout": 4, "pong": 0}[game]


def test_the_maximum_of_the_last_two_frames_is_seen():
    from raffia.envs.resize import area

    env = AtariEnv("asteroids", AtariConfig(size=64, noop_max=0))  # flickers
    env.reset(0)
    watched, act = [], env._ale.act

    class Watched:
        def __getattr__(self, name):
            return getattr(ale, name)

        def act(self, action):
            reward = act(action)
            watched.append(ale.getScreenRGB())
            return reward

    ale, env._ale = env._ale, Watched()
    differ = 0
    for _ in range(5):
        watched.clear()
        seen = env.step(torch.tensor(0))["observation"]
        assert len(watched) == 4
        differ += not np.array_equal(watched[2], watched[3])
        expected = torch.from_numpy(np.maximum(watched[2], watched[3]))
        assert torch.equal(seen, area(expected, 64, 64))
        assert torch.equal(env.render(), torch.from_numpy(watched[3]))
    assert differ


def test_one_frame_is_shown_as_it_is():
    from raffia.envs.resize import area

    env = AtariEnv("asteroids", AtariConfig(size=64, noop_max=0, frame_skip=1))
    env.reset(0)
    for _ in range(4):
        assert torch.equal(env.step(torch.tensor(0))["observation"], area(env.render(), 64, 64))


def test_a_lost_life_ends_the_learners_episode_and_the_game_goes_on():
    training = play(AtariEnv("breakout", SMALL), 3, 400)
    whole = play(AtariEnv("breakout", SMALL, evaluation=True), 3, 400)
    keys = ("observation", "reward")  # breakout's first rewards are 1: clipping changes nothing
    assert same(training, whole, keys)
    ends = [bool(said["terminated"]) for said in training[1:]]
    goes_on = [bool(said["continues"]) for said in training[1:]]
    assert sum(ends) == 5 and sum(goes_on) == 4  # five lives
    assert ends[-1] and not goes_on[-1]
    assert [bool(said["terminated"]) for said in whole[1:]] == [False] * (len(whole) - 2) + [True]
    assert not any(said["truncated"] for said in training[1:] + whole[1:])
    assert "continues" not in whole[1]


def test_lives_in_a_batch():
    env = AtariEnv("breakout", SMALL)
    alone = play(env, 3, 400)
    batch = SerialBatch([AtariEnv("breakout", SMALL), env])
    batch.reset(torch.tensor([4, 3]))
    row = torch.tensor([1])
    steps = [batch.step(action[None], row)[0] for action in actions(env, len(alone) - 1)]
    assert same(alone, [alone[0], *steps], env.spec.step_keys)


def test_reset_after_a_lost_life_begins_the_game_of_its_seed():
    env = AtariEnv("breakout", SMALL)
    begin = play(env, 8, 10)
    steps = [env.reset(3)]
    for action in actions(env, 400):
        steps.append(env.step(action))
        if steps[-1]["continues"]:
            break
    assert steps[-1]["continues"]
    assert same(begin, play(env, 8, 10))


def test_a_resume_in_a_later_life():
    env = AtariEnv("breakout", SMALL)
    steps = play(env, 3, 60)
    assert sum(bool(said["continues"]) for said in steps[1:]) >= 2
    again = AtariEnv("breakout", SMALL)
    again.reset(3)
    taken = actions(env, 60)
    for action in taken[:40]:  # all that is known: the seed, and the actions since
        again.step(action)
    rest = [again.step(action) for action in taken[40:]]
    keys = ("observation", "reward", "terminated", "continues")
    same([steps[0], *steps[41:]], [steps[0], *rest], keys)


def test_rewards_are_clipped_in_training_only():
    def rewards(**options):
        env = AtariEnv("ms_pacman", SMALL, **options)
        return torch.stack([said["reward"] for said in play(env, 0, 120)[1:]])

    clipped, true = rewards(), rewards(evaluation=True)
    assert true.max() >= 10 and torch.equal(clipped, true.sign())


def test_the_limit_of_frames_truncates():
    env = AtariEnv("pong", AtariConfig(size=64, colour=False, max_frames=43))
    steps = play(env, 0, 50)
    assert len(steps) - 1 == 11  # 44 frames
    assert steps[-1]["truncated"] and not steps[-1]["terminated"]
    with pytest.raises(RuntimeError, match=r"call reset\(seed\)"):
        env.step(torch.tensor(0))
    assert AtariEnv("pong", SMALL, evaluation=True).max_frames == 12_000


def test_a_life_lost_at_the_limit_does_not_go_on():
    steps = play(AtariEnv("breakout", SMALL), 3, 400)
    at = next(t for t, said in enumerate(steps) if t and said["continues"])
    cut = AtariConfig(size=64, colour=False, max_frames=4 * at)
    env = AtariEnv("breakout", cut)
    last = play(env, 3, 400)[-1]
    assert last["terminated"] and not last["truncated"] and not last["continues"]
    with pytest.raises(RuntimeError, match="no game runs"):
        env.step(torch.tensor(0))


def test_sticky_actions_are_drawn_for_each_frame():
    env = AtariEnv("pong", AtariConfig(size=64, sticky=0.25, noop_max=0, press_fire=False))
    env.reset(0)
    acted, act = [], env._ale.act

    class Watched:
        def __getattr__(self, name):
            return getattr(ale, name)

        def act(self, action):
            acted.append(action.value)
            return act(action)

    ale, env._ale = env._ale, Watched()
    num, kept = 150, 0
    before = 0
    for t in range(num):
        wanted = 2 + t % 2  # RIGHT and LEFT in turn
        env.step(torch.tensor(wanted))
        of_step = acted[-4:]
        now = env._actions[wanted].value
        first_new = of_step.index(now) if now in of_step else 4
        assert of_step == [before] * first_new + [now] * (4 - first_new)
        kept += first_new
        before = of_step[-1]
    # Frames kept at the start of a step: 0.25 + 0.25^2 + ... = 0.332 of them, so 50 +- 8.
    assert 25 < kept < 75


@pytest.mark.parametrize("game", ["ms_pacman", "MsPacman", "ALE/MsPacman-v5", "mspacman"])
def test_names(game):
    assert game_name(game) == "ms_pacman"


def test_games():
    games = atari_games()
    assert games == sorted(games) and {"pong", "space_invaders", "montezuma_revenge"} <= set(games)
    gymnasium = pytest.importorskip("gymnasium")
    gymnasium.register_envs(ale_py)
    known = {spec.kwargs["game"] for spec in gymnasium.registry.values() if "ALE/" in spec.id}
    assert set(games) == known


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frame_skip": 0}, "frame_skip=0 must be at least 1"),
        ({"noop_max": -1}, "noop_max=-1"),
        ({"sticky": 1.0}, r"sticky=1.0 must lie in 0\.\.1"),
        ({"max_frames": 3}, "max_frames=3 must be at least frame_skip=4"),
    ],
)
def test_wrong_configs(options, message):
    with pytest.raises(ValueError, match=message):
        AtariEnv("pong", AtariConfig(**options))


def test_errors():
    with pytest.raises(ValueError, match="no Atari game 'pongg'. Did you mean 'pong'"):
        AtariEnv("pongg")
    with pytest.raises(ValueError, match=r"no Atari game 'combat'.*atari_games\(\)"):
        AtariEnv("combat")  # for two players: the emulator would end the process
    env = AtariEnv("pong", SMALL)
    with pytest.raises(RuntimeError, match=r"call reset\(seed\)"):
        env.step(torch.tensor(0))
    env.reset(0)
    with pytest.raises(ValueError, match=r"action 6 must lie in 0 \.\. 5"):
        env.step(torch.tensor(6))


def test_without_ale_py(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ale_py" else find(name)
    )
    assert atari_games() == []
    with pytest.raises(ImportError, match=r"pip install 'raffia\[atari\]'"):
        AtariEnv("pong")


def test_with_a_broken_ale_py(monkeypatch):
    original = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "ale_py":
            raise ImportError("a library is missing")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"pip install 'raffia\[atari\]'"):
        AtariEnv("pong")


def idle(env, seed, num):
    """A game in which NOOP is all that the agent does: its length, and whether it was over."""
    env.reset(seed)
    for time in range(1, num + 1):
        after = env.step(torch.tensor(0))
        if not game_goes_on(after):
            return time, bool(after["terminated"])
    return num, False


@pytest.mark.parametrize("evaluation", [True, False])
def test_a_game_that_waits_for_fire_goes_on_without_the_agent_pressing_it(evaluation):
    pressed = AtariEnv("breakout", SMALL, evaluation=evaluation)
    assert idle(pressed, 0, 400)[1]  # all five balls are lost
    waits = AtariConfig(size=64, colour=False, press_fire=False)
    assert idle(AtariEnv("breakout", waits, evaluation=evaluation), 0, 400) == (400, False)


def test_fire_is_pressed_where_the_game_has_it():
    for game, has in (("breakout", True), ("pong", True), ("ms_pacman", False)):
        frames = []
        for press in (True, False):
            env = AtariEnv(game, AtariConfig(size=64, noop_max=0, press_fire=press))
            env.reset(0)
            frames.append(env._ale.getEpisodeFrameNumber())
        assert frames[0] - frames[1] == (4 if has else 0)


def test_rewards_while_fire_is_pressed_are_not_lost():
    """After a lost life the frames of FIRE belong to the step that lost it."""
    config = AtariConfig(size=64, colour=False, noop_max=0)
    env = AtariEnv("breakout", config, evaluation=True)
    env.reset(0)
    total, scores = 0.0, []
    act = env._ale.act

    def counted(action):
        scores.append(act(action))
        return scores[-1]

    class Counts:
        def __getattr__(self, name):
            return counted if name == "act" else getattr(ale, name)

    ale, env._ale = env._ale, Counts()
    lengths = []
    for action in actions(env, 300):
        before = len(scores)
        after = env.step(action)
        lengths.append(len(scores) - before)
        total += float(after["reward"])
        if not game_goes_on(after):
            break
    assert total == sum(scores) > 0
    assert lengths.count(8) == 4 and set(lengths) == {4, 8}  # the fifth life is the last


def test_an_evaluation_ends_after_its_own_number_of_frames():
    config = AtariConfig(size=64, max_frames=400, evaluation_frames=80, press_fire=False)
    for evaluation, num in ((True, 20), (False, 100)):
        env = AtariEnv("breakout", config, evaluation=evaluation)
        env.reset(0)
        said = [env.step(torch.tensor(0)) for _ in range(num)]
        assert [bool(after["truncated"]) for after in said] == [False] * (num - 1) + [True]
    assert AtariConfig().evaluation_frames == AtariConfig().max_frames == 12_000  # 3,000 searches


def test_settings_of_games_in_evaluations_that_can_not_be():
    for frames in (3, 108_001):
        with pytest.raises(ValueError, match=f"evaluation_frames={frames} must lie in frame_skip="):
            AtariEnv("pong", AtariConfig(evaluation_frames=frames))
