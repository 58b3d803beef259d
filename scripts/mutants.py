"""Judge the tests: break one line of the source at a time, and see that a test fails.

Each mutant of scripts/mutants.toml is a line of src/ that a user would miss, broken, and the tests
of which one must fail then. All work is done in copies of the tree in a temporary folder: the tree
itself is only read.

    python scripts/mutants.py                  # all
    python scripts/mutants.py --sample 6       # six of them: the same for the same commit
    python scripts/mutants.py --only NAME      # one; may be given several times

It ends with 0 if each was killed: by a failed test, or as it ran too long. It ends with 1 if one is
alive (no test failed), does not apply (its old text is not in the file exactly once), or broke the
module so that tests could not be collected; and with 2 if the tests fail on the source as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

LIST = "scripts/mutants.toml"
NOT_COPIED = {"build", "dist", "runs", "sweeps"}  # of the root; and what is hidden, but .ci
PYTEST = [*("-m", "pytest", "-q", "-rfE", "--no-header", "--tb=no"), "-p", "no:cacheprovider"]
BASE_SECONDS = 900.0  # for the tests on the source as it is; kernels may have to be compiled
FAILED, NOTHING_COLLECTED = 1, (2, 4, 5)  # exit statuses of pytest
FIRST_FAILURE = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """A line of the source, broken, and the tests that should see it."""

    name: str
    file: str  # below src/
    old: str  # is there exactly once
    new: str
    tests: tuple[str, ...]  # files, or test ids as pytest takes them


@dataclass(frozen=True)
class Result:
    """What became of a mutant."""

    mutant: Mutant
    end: str  # "killed", "killed by time", "alive", "does not apply", "broken"
    by: str = ""  # the test that failed, or why
    seconds: float = 0.0

    @property
    def is_killed(self) -> bool:
        """Whether the tests saw it."""
        return self.end.startswith("killed")


class BrokenBaseError(RuntimeError):
    """The tests fail on the source as it is, so that a failure proves nothing."""


def read_mutants(root: Path) -> list[Mutant]:
    """The list of a tree."""
    with open(root / LIST, "rb") as file:
        given = tomllib.load(file)["mutant"]
    found = [Mutant(**{**one, "tests": tuple(one["tests"])}) for one in given]
    names = [mutant.name for mutant in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{LIST}: the names {', '.join(twice)} stand there twice")
    return found


def mutated(mutant: Mutant, root: Path) -> str:
    """The text of the mutant's file with the fault.

    ValueError if its old text is not there once.
    """
    path = root / "src" / mutant.file
    if not path.is_file():
        raise ValueError(f"there is no src/{mutant.file}")
    text = path.read_text()
    if (count := text.count(mutant.old)) != 1:
        raise ValueError(f"its old text is there {count} times in src/{mutant.file}, not once")
    if mutant.old == mutant.new:
        raise ValueError("its new text is its old text")
    return text.replace(mutant.old, mutant.new)


class Copy:
    """A copy of the tree, in which one mutant at a time is applied and its tests are run."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder, self._root = folder / "tree", folder
        self._num_written = 0
        # With the compiled code beside the source, and the times of files, by which it is known.
        shutil.copytree(root, self.folder, symlinks=True, ignore=_left_out(root))

    def run(self, tests: Sequence[str], seconds: float, *flags: str, fresh: bool = False) -> _Run:
        """Run tests on the source of this copy.

        fresh: with no kernel that was compiled before.
        """
        env = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
        env |= {"PYTHONPATH": str(self.folder / "src"), "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryDirectory(dir=self._root, ignore_cleanup_errors=True) as place:
            if fresh:
                env["NUMBA_CACHE_DIR"] = f"{place}/numba"
            return _finished(
                [*(sys.executable, *PYTEST, *flags), f"--basetemp={place}/tmp", *tests],
                self.folder,
                env,
                seconds,
            )

    def check_is_imported(self) -> None:
        """RuntimeError if tests here would import the package from elsewhere."""
        source = (self.folder / "src").resolve()
        package = next(path.parent.name for path in sorted(source.glob("*/__init__.py")))
        say = f"import importlib.util as u; print(u.find_spec({package!r}).origin)"
        env = {**os.environ, "PYTHONPATH": str(source)}
        done = _finished([sys.executable, "-c", say], self.folder, env, 60)
        if not Path(done.output.strip()).is_relative_to(source):
            raise RuntimeError(f"{package} would be imported from {done.output.strip()}")

    def judge(self, mutant: Mutant, seconds: float) -> Result:
        """Apply a mutant, run its tests, take it back."""
        began = time.monotonic()
        try:
            with self._applied(mutant) as is_kernel:
                done = self.run(mutant.tests, seconds, "-x", fresh=is_kernel)
        except ValueError as error:
            return Result(mutant, "does not apply", str(error))
        took = time.monotonic() - began
        found = FIRST_FAILURE.search(done.output)
        by = found[1] if found else ""
        if done.status is None:
            return Result(mutant, "killed by time", by or f"over {seconds:g} s", took)
        if done.status == 0:
            return Result(mutant, "alive", done.output.strip().splitlines()[-1], took)
        if done.status < 0:
            return Result(mutant, "killed", f"died by {signal.Signals(-done.status).name}", took)
        if done.status == FAILED and by:
            return Result(mutant, "killed", by, took)
        return Result(mutant, "broken", by or f"pytest ended with {done.status}", took)

    @contextlib.contextmanager
    def _applied(self, mutant: Mutant) -> Iterator[bool]:
        """Within this the file holds the fault; gives whether kernels are made of the file."""
        path, text = self.folder / "src" / mutant.file, mutated(mutant, self.folder)
        before, times = path.read_bytes(), path.stat()
        self._num_written += 1
        try:
            path.write_text(text)
            # Compiled code counts as that of a file by its time in seconds: each gets another.
            later = int(times.st_mtime) + 10 * self._num_written
            os.utime(path, (later, later))
            yield "jit" in path.parts or "@kernel" in text
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _left_out(root: Path) -> object:
    def left_out(folder: str, names: list[str]) -> set[str]:
        if Path(folder) != root:
            return {name for name in names if name == ".git"}
        return {
            name
            for name in names
            if (name.startswith(".") and name != ".ci")
            or name in NOT_COPIED
            or (root / name / "pyvenv.cfg").exists()
        }

    return left_out


# ---------------------------------------------------------------------------------------- processes


@dataclass(frozen=True)
class _Run:
    status: int | None  # None: it ran too long, and was ended
    output: str


_RUNNING: set[subprocess.Popen[str]] = set()
_CHANGES = threading.Lock()


def _finished(command: Sequence[str], folder: Path, env: dict[str, str], seconds: float) -> _Run:
    """Run a program in a session of its own, and end all of it when the time is over."""
    with tempfile.TemporaryFile("w+") as output:  # a pipe would be held open by its children
        with subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            with _CHANGES:
                _RUNNING.add(process)
            status: int | None = None
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(seconds)
            finally:
                with _CHANGES:
                    _RUNNING.discard(process)
                _end(process)
        output.seek(0)
        return _Run(status, output.read())


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of them have left
        os.killpg(process.pid, signal.SIGKILL)


# ---------------------------------------------------------------------------------------------- all


def judge_all(
    root: Path, mutants: Sequence[Mutant], jobs: int, seconds: float, folder: Path
) -> list[Result]:
    """Judge mutants, several at a time; BrokenBaseError if their tests fail without them."""
    copies: SimpleQueue[Copy] = SimpleQueue()
    jobs = max(1, min(jobs, len(mutants)))
    with ThreadPoolExecutor(jobs) as pool:
        try:
            making = [pool.submit(Copy, root, folder / str(i)) for i in range(jobs)]
            made = [one.result() for one in making]
            made[0].check_is_imported()
            _check_base(pool, made, mutants)
            for copy in made:
                copies.put(copy)

            def judged(mutant: Mutant) -> Result:
                copy = copies.get()
                try:
                    return copy.judge(mutant, seconds)
                finally:
                    copies.put(copy)

            return _told(pool, [pool.submit(judged, mutant) for mutant in mutants])
        except BaseException:  # such as Ctrl-C
            pool.shutdown(wait=False, cancel_futures=True)
            with _CHANGES:
                for process in _RUNNING:
                    _end(process)
            raise


def _check_base(
    pool: ThreadPoolExecutor, copies: Sequence[Copy], mutants: Sequence[Mutant]
) -> None:
    """The tests of all mutants on the source as it is; those of a file by the same copy."""
    of_file: dict[str, list[str]] = {}
    for test in dict.fromkeys([test for mutant in mutants for test in mutant.tests]):
        of_file.setdefault(test.partition("::")[0], []).append(test)
    parts: list[list[str]] = [[] for _ in copies]
    for tests in sorted(of_file.values(), key=len, reverse=True):
        min(parts, key=len).extend(tests)
    print(f"the tests of {len(mutants)} mutants, without a fault ...", flush=True)
    began = time.monotonic()
    runs = [
        pool.submit(copy.run, part, BASE_SECONDS)
        for copy, part in zip(copies, parts, strict=True)
        if part
    ]
    for run in runs:
        done = run.result()
        if done.status != 0:
            what = "took too long" if done.status is None else f"ended with {done.status}"
            raise BrokenBaseError(f"the tests {what} on the source as it is:\n{done.output}")
    print(f"passed in {time.monotonic() - began:.0f} s", flush=True)


def _told(pool: ThreadPoolExecutor, judging: Sequence[Future[Result]]) -> list[Result]:
    """Wait for all, with a line for each."""
    began, left, num = time.monotonic(), set(judging), 0
    while left:
        done, left = wait(left, timeout=1.0, return_when=FIRST_EXCEPTION)
        for one in sorted(done, key=judging.index):
            num, found = num + 1, one.result()
            rest = (time.monotonic() - began) / num * (len(judging) - num)
            print(
                f"[{num:>{len(str(len(judging)))}}/{len(judging)}] {found.end}: "
                f"{found.mutant.name}, {found.seconds:.0f} s; about {_minutes(rest)} left",
                flush=True,
            )
    return [one.result() for one in judging]


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def table(results: Sequence[Result]) -> str:
    """What became of each, those that no test saw last."""
    order = sorted(results, key=lambda one: not one.is_killed)
    wide = max(len(one.mutant.name) for one in order)
    ends = max(len(one.end) for one in order)
    return "\n".join(f"{one.mutant.name:<{wide}}  {one.end:<{ends}}  {one.by}" for one in order)


def default_seed(root: Path) -> str:
    """The commit, so that other commits are judged by other samples; without git the date."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        asked = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    return datetime.date.today().isoformat()


def _chosen(mutants: list[Mutant], args: argparse.Namespace) -> list[Mutant]:
    if args.only:
        known = {mutant.name: mutant for mutant in mutants}
        if unknown := [name for name in args.only if name not in known]:
            raise SystemExit(f"no mutant is called {', '.join(unknown)}; --list shows all")
        return [known[name] for name in args.only]
    if args.sample is None:
        return mutants
    seed = default_seed(args.root) if args.seed is None else args.seed
    print(f"a sample of {args.sample} of {len(mutants)} mutants, --seed {seed}")
    return random.Random(seed).sample(mutants, min(args.sample, len(mutants)))


def main(words: Sequence[str] | None = None) -> int:
    """Judge what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sample", type=int, metavar="N", help="judge N of them, drawn at random")
    parser.add_argument("--seed", metavar="S", help="of the draw; the commit, if not given")
    parser.add_argument("--only", action="append", metavar="NAME", help="judge this one")
    parser.add_argument("--list", action="store_true", help="print them, judge none")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="at a time; 2")
    parser.add_argument("--seconds", type=float, default=100.0, metavar="S", help="for each; 100")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="of the tree")
    args = parser.parse_args(words)
    args.root = args.root.resolve()
    chosen = _chosen(read_mutants(args.root), args)
    if args.list:
        for mutant in chosen:
            print(f"{mutant.name}  src/{mutant.file}")
        return 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="raffia-mutants-", ignore_cleanup_errors=True) as place:
        try:
            results = judge_all(args.root, chosen, args.jobs, args.seconds, Path(place))
        except BrokenBaseError as error:
            print(error, file=sys.stderr)
            return 2
    print(f"\n{table(results)}\n")
    killed = sum(one.is_killed for one in results)
    took = _minutes(time.monotonic() - began)
    print(f"{killed} of {len(results)} mutants were killed, in {took}")
    return 0 if killed == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
