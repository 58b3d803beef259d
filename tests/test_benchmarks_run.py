"""Benchmarks run to their end on small cases, whatever they measure there."""

import subprocess
import sys

import pytest

from tests.processes import environment

SMALL = [
    "efficientzero --preset smoke --rounds 1 --conv-batch 0 --ops parts",
    "ilql --rounds 1 --gpt2-rounds 0 --ops small.*train",
    "population --cpu --quick --rounds 1 --ops dqn",
    "search --quick --rounds 1 --only mlp",
    "messages --repeats 1",
]


@pytest.mark.slow
@pytest.mark.parametrize("command", SMALL)
def test_a_benchmark_runs(command):
    ended = subprocess.run(
        [sys.executable, "-m", *f"benchmarks.{command}".split()],
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=110,
    )
    # The status of an aim that is not met is 1, as that of an error is.
    assert ended.returncode in (0, 1) and "Traceback" not in ended.stderr, ended.stderr[-2000:]
    assert ended.stdout.count("\n") > 3
