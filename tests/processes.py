"""The command line in a process of its own, and processes that are looked at from outside."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

RAFFIA = [sys.executable, "-m", "raffia"]


def environment(**more):
    """Of a process that imports what this one can import, and computes with one thread."""
    paths = os.pathsep.join([path for path in sys.path if path])
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | more


def started(*words, **options):
    """A command that goes on in a session of its own; its output can be read, as one text."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | options
    command = [*RAFFIA, *map(str, words)]
    return subprocess.Popen(command, env=environment(), start_new_session=True, **options)


def wait_for(what, seconds=60.0, process=None):
    """What a call gives, once that is true; `process` is to live meanwhile."""
    until = time.monotonic() + seconds
    while not (found := what()):
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until, "it did not come to that"
        time.sleep(0.02)
    return found


class Process(NamedTuple):
    """What /proc tells of a process."""

    parent: int
    session: int


def living():
    """The processes that live, by their numbers."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        if state != "Z":
            found[int(stat.parent.name)] = Process(int(parent), int(session))
    return found


def children(parent):
    """The processes that this one has started."""
    return [pid for pid, one in living().items() if one.parent == parent]


def descendants(pid):
    """All processes below one."""
    return [one for child in children(pid) for one in (child, *descendants(child))]


def are_gone(pids):
    """Whether none of these lives."""
    return not living().keys() & {*pids}
