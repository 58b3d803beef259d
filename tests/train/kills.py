"""A run that is killed at random moments and resumed, over and over."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress


def run_with_kills(
    first_argv: Sequence[str],
    resume_argv: Sequence[str],
    *,
    num_kills: int,
    seed: int,
    env: Mapping[str, str],
    progress: Callable[[], int],
    can_resume: Callable[[], bool],
    at_work_seconds: float,
    limit_seconds: float,
) -> list[int]:
    """Run a command to its end, with SIGKILL at random moments before.

    first_argv, resume_argv: the command that starts a run, and the one that resumes it.
    num_kills: fewer only if the command ended before.
    env: environment variables to add.
    progress: a number that grows while the command is at work. A kill comes up to `at_work_seconds`
        after it grew; but a fifth of the kills come at any time from the start on, at the latest
        when it grows: a start may be quicker than the last.
    can_resume: whether there is something to resume; until then the first command is run again.
    limit_seconds: for one session. AssertionError with its output if it takes longer or fails.

    Returns the progress that each killed session had made.
    """
    draw, kills, argv = random.Random(seed), [], first_argv
    start_seconds = at_work_seconds  # how long the last session took until it made progress
    while True:
        with _Session(argv, env, progress, limit_seconds) as run:
            if len(kills) == num_kills:
                run.wait(lambda: False)
                return kills
            if draw.random() < 0.2:
                until = draw.uniform(0.0, start_seconds + at_work_seconds)
                ended = run.wait(lambda: run.seconds >= until or run.made > 0)  # noqa: B023
            else:
                ended, start_seconds = run.wait(lambda: run.made > 0), run.seconds
                until = start_seconds + draw.uniform(0.0, at_work_seconds)
                ended = ended or run.wait(lambda: run.seconds >= until)  # noqa: B023
            if ended:
                return kills
            kills.append(run.made)
        argv = resume_argv if can_resume() else first_argv


class _Session:
    """One process and its children, killed at the end of the `with`."""

    def __init__(self, argv, env, progress, limit_seconds):
        self.argv, self.progress, self.limit = [*map(str, argv)], progress, limit_seconds
        self._before, self._start_time, self.output = progress(), time.monotonic(), ""
        streams = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        streams["start_new_session"] = True  # so that its workers can be killed with it
        self.process = subprocess.Popen(self.argv, env=os.environ | dict(env), **streams)
        os.set_blocking(self.process.stdout.fileno(), False)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    @property
    def seconds(self):
        return time.monotonic() - self._start_time

    @property
    def made(self):
        """Progress since the start, or since the number was smaller."""
        self._before = min(self._before, self.progress())
        return self.progress() - self._before

    def wait(self, until):
        """Wait until `until()`; True if the command ended before."""
        while not until():
            status = self.process.poll()
            while found := self.process.stdout.read(1 << 16):
                self.output += found.decode(errors="replace")
            if status is not None:
                assert status == 0, f"{self.argv} ended with {status}:\n{self.output}"
                return True
            assert self.seconds < self.limit, (
                f"{self.argv} was at work for {self.limit} s and longer:\n{self.output}"
            )
            time.sleep(0.002)
        return False
