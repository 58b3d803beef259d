"""MinAtar's games against trajectories of the original package, and the contract of a BatchEnv.

minatar_recorded.json tells how it was recorded. The games were also compared with the original in
thousands of random positions; these are whole episodes.
"""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from raffia.envs.minatar import (
    GAMES,
    asterix,
    breakout,
    freeway,
    game,
    seaquest,
    space_invaders,
)

RECORDED = json.loads((Path(__file__).parent / "minatar_recorded.json").read_text())["games"]
EPISODES = [
    pytest.param(name, episode, id=f"{name}-{episode['seed']}")
    for name, episodes in RECORDED.items()
    for episode in episodes
]


def digest(planes: torch.Tensor) -> str:
    bits = np.packbits(planes.numpy() > 0)
    return f"{zlib.crc32(bits.tobytes()) & 0xFFFF:04x}"


def make(name: str, num_envs: int, **options):
    if name != "seaquest":  # all of its actions do something
        options["all_actions"] = True
    return GAMES[name](num_envs, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "episode"), EPISODES)
def test_games_equal_the_originals_step_by_step(name, episode):
    ramping = {key: episode[key] for key in ["difficulty_ramping"] if key in episode}
    game = make(name, 1, **ramping)
    state = game.reset(torch.tensor([episode["seed"]]))
    digests, rewards = digest(state["observation"][0]), ""
    for action in episode["actions"]:
        state = game.step(torch.tensor([int(action)]))
        digests += digest(state["observation"][0])
        rewards += f"{int(state['reward']):x}"
        if digests[-4:] != episode["seen"][len(digests) - 4 : len(digests)]:
            pytest.fail(f"after step {len(rewards)} the field is another\n{state['observation']}")
    assert rewards == episode["rewards"]
    assert bool(state["terminated"] | state["truncated"]) == episode["ended"]
    assert bool(state["truncated"]) == (name == "freeway")


@pytest.mark.parametrize(("struck", "reward", "row"), [(0, 1, 2), (1, 0, 3)])
def test_a_ball_that_has_just_struck_flies_through_the_next_brick(struck, reward, row):
    ball = np.zeros(breakout._WORDS, np.int64)
    ball[[breakout._X, breakout._Y, breakout._DX, breakout._DY]] = 4, 2, 1, 1
    ball[breakout._STRUCK] = struck
    ball[breakout._BRICKS + 2] = 1 << 5  # in row 3, where the ball goes
    assert breakout._act(ball, game.NONE, False) == reward
    assert ball[breakout._Y] == row and ball[breakout._X] == 5
    assert ball[breakout._BRICKS + 2] == (0 if reward else 1 << 5)


def test_random_numbers_have_the_right_frequencies():
    numbers = np.array([11, 12, 13, 14])
    drawn = np.array([game.next_word(numbers) for _ in range(4000)], dtype=np.float64) / 2**32
    assert 0 <= drawn.min() and drawn.max() < 1
    assert np.abs(np.histogram(drawn, 10, (0, 1))[0] - 400).max() < 80  # 4 standard deviations
    counts = np.bincount([game.below(numbers, 3) for _ in range(3000)], minlength=3)
    assert len(counts) == 3 and np.abs(counts - 1000).max() < 110


MODULES = {
    m.__name__.split(".")[-1]: m for m in (asterix, breakout, freeway, seaquest, space_invaders)
}


@pytest.mark.parametrize("name", GAMES)
def test_plain_python_and_compiled_code_give_the_same_games(name, monkeypatch):
    draws = torch.Generator().manual_seed(248)  # of a long game of Seaquest
    actions = torch.randint(GAMES[name](1).spec.action.n, (150, 2), generator=draws)

    def play():
        game = GAMES[name](2)
        states = [game.reset(torch.tensor([3, 4]))["observation"]]
        live = torch.arange(2)
        for action in actions:
            after = game.step(action[live], live)
            states.append(after["observation"])
            live = live[~after["terminated"]]
            if not len(live):
                break
        return torch.cat(states)

    compiled = play()
    module = MODULES[name]
    for home in (game, module):
        for key, function in list(vars(home).items()):
            if hasattr(function, "py_func"):
                monkeypatch.setattr(home, key, function.py_func)
    for key in ("begin_rows", "step_rows"):
        loop = getattr(GAMES[name], key).py_func
        for part in ("begin", "act", "draw"):
            monkeypatch.setitem(loop.__globals__, part, getattr(module, f"_{part}"))
        monkeypatch.setitem(loop.__globals__, "stuck_action", game.stuck_action)
        monkeypatch.setattr(GAMES[name], key, staticmethod(loop))
    assert not hasattr(GAMES[name].step_rows, "py_func")
    assert torch.equal(play(), compiled)


def test_invalid_calls_are_refused():
    game = asterix.MinAtarAsterix(2)
    game.reset(torch.tensor([0]), torch.tensor([1]))
    with pytest.raises(RuntimeError, match=r"rows \[0\] have no running episode"):
        game.step(torch.tensor([0, 0]))
    for call, message in (
        (lambda: game.step(torch.tensor([5]), torch.tensor([1])), r"must be in 0 \.\. 4"),
        (lambda: asterix.MinAtarAsterix(1, sticky_actions=1.5), "=1.5 must be in 0..1"),
        (lambda: asterix.MinAtarAsterix(0), "num_envs=.* must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
