"""The command line in its own process, and information about processes."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

RAFFIA = [sys.executable, "-m", "raffia"]
DIED = "died"


def environment(**more):
    """The environment of a process with this one's import paths and one thread."""
    paths = os.pathsep.join([path for path in sys.path if path])
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | more


def started(*args, **options):
    """Start a command in its own session; its output can be read as one text."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | options
    command = [*RAFFIA, *map(str, args)]
    return subprocess.Popen(command, env=environment(), start_new_session=True, **options)


def results_of(serve, arguments):
    """What `serve(pipe, *of_one)` sends in a new process for each of the arguments; `DIED` where it
    died without a word. An exception that is sent is an error."""
    context, workers, found = multiprocessing.get_context("spawn"), [], []
    for of_one in arguments:
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(there, *of_one), daemon=True)
        process.start()
        there.close()
        workers.append((process, here))
    try:
        for _, pipe in workers:
            assert pipe.poll(90), "a process is silent"
            try:
                found.append(pipe.recv())
            except EOFError:
                found.append(DIED)
    finally:
        for process, _ in workers:
            process.join(10)
            process.kill()
    errors = [one for one in found if isinstance(one, Exception)]
    assert not errors, errors
    return found


def wait_for(condition, seconds=60.0, process=None):
    """The result of `condition()` once it is true; `process` must live meanwhile."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)
    return found


class Process(NamedTuple):
    """Entries of /proc of a process."""

    parent: int
    session: int


def living():
    """The living processes by their ids."""
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
    return [pid for pid, process in living().items() if process.parent == parent]


def descendants(pid):
    """All processes below one."""
    return [one for child in children(pid) for one in (child, *descendants(child))]


def are_gone(pids):
    """Whether none of these lives."""
    return not living().keys() & {*pids}
