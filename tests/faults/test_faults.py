"""Faults and losses of power at the libc calls of runs and saves: nothing is lost.

Below Python: a library that is loaded before libc counts each call about a file, kills the process
at it, fails it, or cuts it short; and writes down what was written, synced and renamed, from which
all the states are made that a loss of power may leave.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SECONDS = {  # for faults, for losses of power
    "efficientzero": (7, 6),
    "members": (7, 6),
    "dialogues": (6, 5),
    "rows": (3, 3),
    "saved": (2, 1),
    "mapped": (2, 1),
}


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        pytest.skip("no compiler of C, or a system that has no LD_PRELOAD")
    out = tmp_path_factory.mktemp("shim") / "shim.so"
    command = [compiler, "-O1", "-fPIC", "-shared", "-o", out, HERE / "shim.c", "-ldl", "-lpthread"]
    subprocess.run([*map(str, command)], check=True, timeout=60)
    return out


def swept(shim, case, of_faults, of_losses, seed=0):
    """The result of a sweep."""
    done = subprocess.run(
        [sys.executable, str(HERE / "sweep.py"), case, str(seed), str(of_faults), str(of_losses)],
        env=os.environ | {"LD_PRELOAD": str(shim), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", SECONDS)
def test_nothing_is_lost(shim, case):
    found = swept(shim, case, *SECONDS[case])
    assert found["num_calls"] > 20, found
    for kind in ("faults", "losses"):
        assert not found[kind]["failures"], "\n\n".join(found[kind]["failures"][:3])
        assert found[kind]["num_trials"] >= 3, found
    print(case, {kind: found[kind]["num_trials"] for kind in ("faults", "losses")})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_sweep_finds_a_careless_writer(shim):
    found = swept(shim, "careless", 20, 6)  # enough for both kinds, also on a busy machine
    lines = found["faults"]["failures"]
    assert any("kill" in line for line in lines) and any("afterwards" in line for line in lines)
    assert any("power lost" in line for line in found["losses"]["failures"])
