"""How fast is raffia.data? Ours, the peer's (torchrl) and a floor by hand.

    python -m benchmarks.peer_extension    # once: the peer's compiled part, for our torch
    python -m benchmarks.data [--ops REGEX] [--quick] [--big] [--json FILE] [--markdown FILE]

The floor is what memory allows: xxh3 over the whole buffer, a copy, a random gather. Figures and
columns are those of `python -m benchmarks.tensordict`: CPU time per call on one thread, in
microseconds.
"""

import sys
from pathlib import Path

if not __package__:  # run by its path: this folder heads sys.path, and tensordict.py hides the peer
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.table import run

if __name__ == "__main__":
    raise SystemExit(run("benchmarks.data_operations", __doc__, peer="torchrl"))
