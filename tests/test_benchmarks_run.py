"""Benchmarks run to their end on small cases, whatever they measure there."""

import subprocess
import sys

import pytest

from tests.processes import environment

SMALL = [  # the arguments, and the beginning of a line of the table
    (
        "efficientzero --preset smoke --rounds 1 --conv-batch 0 --ops parts",
        "| an env step with",
    ),
    ("ilql --rounds 1 --gpt2-rounds 0 --ops ^training,.small,.shared$", "training, small, shared"),
    ("ilql --rounds 1 --gpt2-rounds 0 --ops ^sample,.small,.1.prompt$", "sample, small, 1 prompt"),
    ("population --cpu --quick --rounds 1 --ops dqn", "dqn 32, 1 thread"),
    ("search --quick --rounds 1 --only mlp", "mlp A=2 B=8 n=50"),
    ("messages --repeats 1", "  12 leaves of 262144  all_reduce"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "line"), SMALL)
def test_a_benchmark_runs(command, line):
    ended = subprocess.run(
        [sys.executable, "-m", *f"benchmarks.{command}".split()],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=110,
    )
    # The status of an aim that is not met is 1, as that of an error is.
    assert ended.returncode in (0, 1) and "Traceback" not in ended.stderr, ended.stderr[-2000:]
    assert f"\n{line}" in ended.stdout
