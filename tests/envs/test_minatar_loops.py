"""MinAtar's games share their loops, and each finds its compiled ones on disk."""

import os
import subprocess
import sys

import pytest

from raffia.envs.minatar import breakout, freeway, space_invaders

FIRST_STEP = """
import torch
from raffia.envs.minatar.breakout import MinAtarBreakout
from raffia.envs.minatar.freeway import MinAtarFreeway
for kind in (MinAtarBreakout, MinAtarFreeway):
    game = kind(2)
    game.reset(torch.tensor([0, 1]))
    game.step(torch.tensor([0, 1]))
    loops = (game.begin_rows, game.step_rows)
    print([sum(loop.stats.cache_hits.values()) for loop in loops])
"""


def test_each_game_has_loops_with_distinct_names():
    kinds = (breakout.MinAtarBreakout, freeway.MinAtarFreeway, space_invaders.MinAtarSpaceInvaders)
    loops = [loop.py_func for kind in kinds for loop in (kind.begin_rows, kind.step_rows)]
    assert len({loop.__qualname__ for loop in loops}) == len(loops)
    assert len({loop.__globals__["draw"] for loop in loops}) == len(kinds)
    assert not any(loop.__closure__ for loop in loops)


@pytest.mark.slow
def test_a_second_process_compiles_no_loop(tmp_path):
    found = []
    for _ in range(2):
        env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        call = [sys.executable, "-c", FIRST_STEP]
        done = subprocess.run(call, env=env, capture_output=True, text=True, check=True)
        found.append(done.stdout.split("\n")[:2])
    assert found == [["[0, 0]", "[0, 0]"], ["[1, 1]", "[1, 1]"]]
