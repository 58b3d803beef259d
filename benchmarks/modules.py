"""How fast are raffia's keyed modules? Ours, the peer's (PyTorch's tensordict) and a floor by hand.

    python -m benchmarks.modules [--ops REGEX] [--rounds N] [--json FILE] [--markdown FILE]

The floor is the same work with torch.nn, torch.func and torch.distributions alone. Figures and
columns are those of `python -m benchmarks.tensordict`: CPU time per call, in microseconds.
"""

import sys
from pathlib import Path

if not __package__:  # run by its path: this folder heads sys.path, and tensordict.py hides the peer
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.table import run

if __name__ == "__main__":
    raise SystemExit(run("benchmarks.module_operations", __doc__))
