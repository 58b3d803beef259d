"""What kills whole runs is tested on a command that does nothing but count."""

import os
import sys

import pytest

from tests.train.kills import run_with_kills

COUNTING = """
import os, sys, time
folder, command, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
if command == "begin":
    n = 0
else:
    with open(folder + "/state") as file:
        n = int(file.read())
with open(folder + "/log", "ab", buffering=0) as log:
    while n < last:
        n += 1
        log.write(b"x")
        with open(folder + "/new", "w") as file:
            file.write(str(n))
        os.replace(folder + "/new", folder + "/state")
        time.sleep(0.001)
print("done", n)
"""


def counting(folder, command, last):
    return [sys.executable, "-S", "-c", COUNTING, str(folder), command, str(last)]


def test_a_command_that_is_killed_comes_to_its_end(tmp_path):
    report = run_with_kills(
        counting(tmp_path, "begin", 400),
        counting(tmp_path, "resume", 400),
        num_kills=6,
        seed=3,
        watched=tmp_path / "log",
        can_resume=lambda: (tmp_path / "state").exists(),
        at_work_seconds=0.05,
    )
    assert report.output == "done 400\n" and len(report.kills) == 6
    assert report.num_sessions == 7 and report.num_at_work >= 3
    assert sum(kill.resumed for kill in report.kills) >= 3
    assert 400 <= os.path.getsize(tmp_path / "log") <= 420  # a kill loses one at most


def test_a_failure_shows_what_was_said(tmp_path):
    argv = [sys.executable, "-S", "-c", "print('what went wrong'); raise SystemExit(3)"]
    with pytest.raises(AssertionError, match="ended with 3:\nwhat went wrong"):
        run_with_kills(argv, argv, num_kills=1, seed=0, watched=tmp_path / "log")
