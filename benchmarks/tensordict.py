"""How fast is raffia's container? Ours, the peer's (PyTorch's tensordict) and a floor by hand.

    python -m benchmarks.tensordict [--ops REGEX] [--rounds N] [--json FILE] [--markdown FILE]

The floor is the same work on plain dicts with raw torch. Figures are microseconds of CPU time per
call on one thread: medians over rounds in which the three take turns. `ours/peer` and `ours/floor`
are medians of the ratios within a round; `+-` is half their interquartile range. Before an
operation is timed, the three results are compared. The exit status is 1 if one differs or fails.
"""

import sys
from pathlib import Path

if not __package__:  # run by its path: this folder heads sys.path, and this file hides the peer
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.table import run

if __name__ == "__main__":
    raise SystemExit(run("benchmarks.operations", __doc__))
