"""A run that is killed at random moments and resumed, over and over."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Kill(NamedTuple):
    """One kill: whether of a resume, seconds after its start, and how much it had written."""

    resumed: bool
    seconds: float
    written: int  # growth of the watched file since the command's start


class Report(NamedTuple):
    """The result of all sessions."""

    kills: list[Kill]
    num_sessions: int
    seconds: float
    output: str  # of the last session, which ended on its own

    @property
    def num_at_work(self) -> int:
        """The number of kills after something had been written."""
        return sum(kill.written > 0 for kill in self.kills)


def run_with_kills(
    first_argv: Sequence[str],
    resume_argv: Sequence[str],
    *,
    num_kills: int,
    seed: int,
    env: Mapping[str, str] | None = None,
    watched: str | os.PathLike[str] | Callable[[], int] | None = None,
    can_resume: Callable[[], bool] = lambda: True,
    at_work_seconds: float = 1.0,
    start_fraction: float = 0.2,
    limit_seconds: float = 60.0,
) -> Report:
    """Run a command to its end, with SIGKILL at random moments before.

    first_argv, resume_argv: the command that starts a run, and the one that resumes it.
    num_kills: fewer only if the command ended before.
    env: environment variables to add.
    watched: a file that grows when the command is at work, or a function whose value does. A kill
        comes up to `at_work_seconds` after it grew; but `start_fraction` of the kills come at any
        time from the start on, at the latest when it grows: a start may be quicker than the last.
    can_resume: whether there is something to resume; until then the first command is run again.
    limit_seconds: for one session. AssertionError with its output if it takes longer or fails.
    """
    draw, kills, start_time = random.Random(seed), [], time.monotonic()
    start_seconds = at_work_seconds  # how long the last session took until it wrote something
    sessions = 0
    while True:
        resumed = sessions > 0 and can_resume()
        sessions += 1
        with _Session(resume_argv if resumed else first_argv, env, watched, limit_seconds) as run:
            if len(kills) == num_kills:
                run.wait(lambda: False)
                break
            if watched is None or draw.random() < start_fraction:
                until = draw.uniform(0.0, start_seconds + at_work_seconds)
                ended = run.wait(lambda until=until: run.seconds >= until or run.written > 0)
            else:
                ended = run.wait(lambda: run.written > 0)
                start_seconds = run.seconds
                ended = ended or run.wait_seconds(draw.uniform(0.0, at_work_seconds))
            if ended:
                break
            kills.append(Kill(resumed, run.seconds, run.written))
    return Report(kills, sessions, time.monotonic() - start_time, run.output)


class _Session:
    """One process and its children, killed at the end of the `with`."""

    def __init__(self, argv, env, watched, limit_seconds):
        self.argv, self.watched, self.limit = [*map(str, argv)], watched, limit_seconds
        self._before, self._start_time = self._size(), time.monotonic()
        self.output = ""
        self.process = subprocess.Popen(
            self.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | dict(env or {}),
            start_new_session=True,  # so that its workers can be killed with it
        )
        os.set_blocking(self.process.stdout.fileno(), False)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # all of them have ended
        self.process.wait()
        self._read()
        self.process.stdout.close()

    @property
    def seconds(self):
        return time.monotonic() - self._start_time

    @property
    def written(self):
        """Growth since the start; truncated parts do not count."""
        self._before = min(self._before, self._size())
        return self._size() - self._before

    def _size(self):
        if callable(self.watched):
            return self.watched()
        path = None if self.watched is None else Path(self.watched)
        return path.stat().st_size if path is not None and path.exists() else 0

    def _read(self):
        while found := self.process.stdout.read(1 << 16):
            self.output += found.decode(errors="replace")

    def wait_seconds(self, seconds):
        """Wait so long; True if the command ended meanwhile."""
        until = time.monotonic() + seconds
        return self.wait(lambda: time.monotonic() >= until)

    def wait(self, until):
        """Wait until `until()`; True if the command ended before."""
        while not until():
            self._read()
            status = self.process.poll()
            if status is not None:
                self._read()
                assert status == 0, f"{self.argv} ended with {status}:\n{self.output}"
                return True
            assert self.seconds < self.limit, (
                f"{self.argv} was at work for {self.limit} s and longer:\n{self.output}"
            )
            time.sleep(0.002)
        return False
