"""The operations of `benchmarks.data`, a thousand times smaller: all run, ours as the peer's."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# In its own process, since the peer patches torch. argv: import names of ours and the peer.
RUN_ALL = """
import json, sys
from importlib import import_module
import torch
from benchmarks.data_operations import operations
from benchmarks.measure import calls_of, first_calls, require_agreement

def outcome(operation, packages):
    try:
        operation.make(packages["ours"])()
        if "peer" in packages:
            results, _ = first_calls(operation, calls_of(operation, packages))
            require_agreement(results)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ran"

torch.set_num_threads(1)
packages = dict(zip(("ours", "peer"), map(import_module, sys.argv[1:])))
print(json.dumps({op.name: outcome(op, packages) for op in operations(scale=1e-3) if not op.big}))
"""


def run_all(*packages: str) -> dict[str, str]:
    """The outcome of each operation, by its name."""
    result = subprocess.run(
        [sys.executable, "-c", RUN_ALL, *packages],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "0"},  # so the peer's hashes equal ours
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_all_operations_run_and_ours_agrees_with_the_peer():
    has_peer = importlib.util.find_spec("torchrl") and importlib.util.find_spec("xxhash")
    outcomes = run_all("raffia", "torchrl") if has_peer else run_all("raffia")
    failed = {name: outcome for name, outcome in outcomes.items() if outcome != "ran"}
    not_built = {name for name, outcome in failed.items() if "benchmarks.peer_extension" in outcome}
    assert failed.keys() == not_built, failed
    assert all(re.search("prioritized|SumTree", name, re.IGNORECASE) for name in not_built)
    assert len(outcomes) > 40
