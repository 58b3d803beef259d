"""The tests that need a GPU, in their own process."""

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARK = "mark.gpu"


@dataclass(frozen=True)
class Outcome:
    """What became of them.

    >>> Outcome({"passed": 3}, "").hold
    True
    """

    counts: dict[str, int]  # by outcome: passed, failed, skipped, error
    output: str  # where some failed

    @property
    def hold(self) -> bool:
        """Whether none failed."""
        return not (self.counts.get("failed") or self.counts.get("error"))

    @property
    def ran(self) -> bool:
        """Whether any ran."""
        return bool(self.counts.get("passed") or not self.hold)


def gpu_tests() -> Outcome:
    """`pytest -m gpu`, of the files that have such tests, in several processes where cores are."""
    files = [file for file in sorted(ROOT.glob("tests/**/test_*.py")) if MARK in file.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    # Another torch than the one of the constraints warns of other things.
    command += ["-o", "filterwarnings=default"]
    if (cores := os.cpu_count() or 1) >= 8 and importlib.util.find_spec("xdist"):
        # A plugin for timing, where there is one, warns of other processes.
        command += ["-n", str(min(12, cores - 2)), "-p", "no:benchmark"]
    done = subprocess.run(
        [*command, *map(str, files)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    counts = counted(done.stdout)
    if not counts:  # pytest is not here, or its own error
        counts = {"error": 1}
    failed = bool(counts.get("failed") or counts.get("error"))
    return Outcome(counts, f"{done.stdout}{done.stderr}" if failed else "")


def counted(output: str) -> dict[str, int]:
    """From the last line of pytest's output.

    >>> counted("F..s\\n1 failed, 2 passed, 1 skipped, 7 deselected in 3.21s")
    {'failed': 1, 'passed': 2, 'skipped': 1}
    """
    last = output.strip().splitlines()[-1:] or [""]
    found = re.findall(r"(\d+) (passed|failed|skipped|error|xfailed)", last[0])
    return {outcome: int(num) for num, outcome in found}
