"""Ends what is left of a Ray cluster of this machine when the process that started it is killed.

Ray's own processes leave then, but for two agents: they try for a minute to tell it to a head that
is gone as well. `watch` starts this file as a program, which imports neither raffia nor torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

POLL = 0.5  # seconds between two looks
GRACE = 2.0  # seconds that Ray's processes have to leave by themselves


def watch() -> int:
    """Start the program for the raylets of this process; its number, 0 where there is no /proc."""
    if not Path("/proc/self/task").exists():
        return 0
    nowhere = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0)
    both = [(os.POSIX_SPAWN_DUP2, 0, file) for file in (1, 2)]
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    # In a process group of its own, as Ctrl-C is for the leader to act upon.
    return os.posix_spawn(
        sys.executable, command, os.environ, file_actions=[nowhere, *both], setpgroup=0
    )


def unwatch(pid: int) -> None:
    """End the program that `watch` started."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it has ended
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def end_orphans(leader: int) -> None:
    """Wait until the parent, this leader, is gone; end what its raylets have left."""
    found: dict[int, str] = {}  # when each process began, as a number may be used again
    while os.getppid() == leader:
        found = {**_below_raylets(leader), **{pid: at for pid, at in found.items() if _is(pid, at)}}
        time.sleep(POLL)
    until = time.monotonic() + GRACE
    while time.monotonic() < until and any(_is(pid, at) for pid, at in found.items()):
        time.sleep(POLL / 10)
    for pid, at in found.items():
        if _is(pid, at):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _below_raylets(leader: int) -> dict[int, str]:
    raylets = [pid for pid in _children(leader) if _stat(pid)[:1] == ["raylet"]]
    return {pid: _stat(pid)[-1] for raylet in raylets for pid in _children(raylet) if _stat(pid)}


def _children(pid: int) -> list[int]:
    try:
        files = list(Path(f"/proc/{pid}/task").glob("*/children"))
        return [int(child) for file in files for child in file.read_text().split()]
    except OSError:
        return []  # it has ended


def _is(pid: int, began: str) -> bool:
    found = _stat(pid)
    return found != [] and found[-1] == began and found[1] != "Z"


def _stat(pid: int) -> list[str]:
    """The name, the state and the beginning of a process; nothing if it has ended."""
    try:
        before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return []
    fields = after.split()
    return [before.partition("(")[2], fields[0], fields[19]]


if __name__ == "__main__":
    end_orphans(int(sys.argv[1]))
