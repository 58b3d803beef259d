"""How fast is raffia.data? Ours, the peer's (torchrl) and a floor by hand.

    python -m benchmarks.peer_extension    # once: the peer's compiled part, for our torch
    python -m benchmarks.data [--ops REGEX] [--quick] [--big] [--json FILE] [--markdown FILE]

The floor is what memory allows: xxh3 over the whole buffer, a copy, a random gather. Figures and
columns are those of `python -m benchmarks.tensordict`: CPU time per call on one thread, in
microseconds.
"""

import ctypes
import sys
from pathlib import Path

if not __package__:  # run by its path: this folder heads sys.path, and tensordict.py hides the peer
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.table import run

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # as glibc's malloc.h has them


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for later allocations instead of returning it.

    Whether a large result lies in new pages depends on what else has been freed before, by whom
    ever; on a virtual machine new pages can cost as much as all that is written into them.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(MMAP_MAX, 0)
        libc.mallopt(TRIM_THRESHOLD, 2**31 - 1)


if __name__ == "__main__":
    keep_freed_memory()
    raise SystemExit(run("benchmarks.data_operations", __doc__, peer="torchrl"))
