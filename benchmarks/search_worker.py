"""The processes that a benchmark of searches talks to, one per package and virtual environment.

A line of JSON goes in, a line of JSON comes out. This file imports nothing but the standard
library: it runs in every package's environment.
"""

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from benchmarks.timing import Call

ROOT = Path(__file__).resolve().parents[1]
# One thread each; memory is handed out as it is to any user.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}


@dataclass(frozen=True)
class Case:
    """What is searched: the same for every package.

    >>> Case("mlp", 8, 50, 2).name
    'mlp A=2 B=8 n=50'
    """

    model: str  # null, mlp, sampled (an MLP of continuous actions) or conv
    batch: int  # roots
    simulations: int
    actions: int  # to choose from, which may be sampled ones
    policy: str = "muzero"  # or gumbel

    @property
    def name(self) -> str:
        return f"{self.model} A={self.actions} B={self.batch} n={self.simulations}"


Shares = dict[str, float]  # of the CPU time: model, tree and glue


class Seconds(NamedTuple):
    cpu: float  # of all threads of the process
    wall: float


class Search(Protocol):
    """A package's search of one case, in its worker."""

    def __call__(self) -> Any:
        """A complete search: the root, then the simulations, up to actions, visits and values."""

    def shares(self) -> Shares:
        """Of one call."""


Prepare = Callable[[Case], Search]


def clocked(call: Call, num_calls: int) -> Seconds:
    cpu, wall = time.process_time_ns(), time.perf_counter_ns()
    for _ in range(num_calls):
        call()
    cpu_end, wall_end = time.process_time_ns(), time.perf_counter_ns()
    return Seconds((cpu_end - cpu) / num_calls / 1e9, (wall_end - wall) / num_calls / 1e9)


class Stopwatch:
    """Measures the fraction of a call's CPU time that its parts take.

    >>> watch = Stopwatch()
    >>> add = watch.timed("tree", sum)
    >>> shares = watch.shares(lambda: add(range(10**5)))
    >>> shares["tree"] > 0.5, round(sum(shares.values()), 6)
    (True, 1.0)
    """

    def __init__(self) -> None:
        self.clear()
        readings = 2000
        whole = clocked(self.timed("model", int), readings).cpu
        self.within = self.seconds["model"] / readings  # what reading the clock adds to a part
        self.around = whole - self.within  # and to what is around it

    def clear(self) -> None:
        self.seconds = {"model": 0.0, "tree": 0.0}
        self.readings = {"model": 0, "tree": 0}

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time_ns()
            result = call(*args, **kwargs)
            self.seconds[part] += (time.process_time_ns() - start) / 1e9
            self.readings[part] += 1
            return result

        return run

    def shares(self, call: Call, plain: Call | None = None) -> Shares:
        """Of `call`; the whole is that of `plain` where this does the same with other glue."""
        self.clear()
        whole = clocked(call, 1).cpu
        parts = {n: max(0.0, s - self.readings[n] * self.within) for n, s in self.seconds.items()}
        if plain is None:
            glue = whole - sum(self.seconds.values()) - sum(self.readings.values()) * self.around
        else:
            glue = clocked(plain, 1).cpu - sum(parts.values())
        parts["glue"] = max(0.0, glue)
        total = sum(parts.values())
        return {name: x / total for name, x in parts.items()}


def serve(
    prepare: Prepare, versions: Callable[[], dict[str, str]], **more: Callable[..., Any]
) -> None:
    """Answer until the input ends; what the package prints goes to the standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    searches: dict[str, Search] = {}
    gc.disable()

    def make(case: dict[str, Any]) -> float:
        key = json.dumps(case)
        if key not in searches:
            while len(searches) > 1:  # two policies search the same case in turns
                del searches[next(iter(searches))]
            gc.collect()
            searches[key] = prepare(Case(**case))
            searches[key]()  # compiles at first use
        return clocked(searches[key], 2).cpu

    def block(case: dict[str, Any], num_calls: int) -> Seconds:
        return clocked(searches[json.dumps(case)], num_calls)

    def shares(case: dict[str, Any]) -> Shares:
        return searches[json.dumps(case)].shares()

    known: dict[str, Callable[..., Any]] = {
        "make": make,
        "block": block,
        "shares": shares,
        "versions": versions,
        **more,
    }
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"answer": known[asked.pop("do")](**asked)}
        except Exception as error:  # sent to the caller, who decides
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


class Worker:
    """A package's process, as the command has it; `with` starts and ends it."""

    def __init__(self, module: str, python: str | Path = sys.executable, loud: bool = False):
        self.module = module
        self.python = python
        self.loud = loud  # what it and its package print shows

    def __enter__(self) -> "Worker":
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
        self.process = subprocess.Popen(
            [str(self.python), "-W", "ignore", "-m", self.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if self.loud else subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": path},
        )
        return self

    def __exit__(self, *error: Any) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()

    def ask(self, do: str, **what: Any) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps({"do": do, **what}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"{self.module} in {self.python} ended: status {self.process.wait()}"
            )
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["answer"]

    def make(self, case: Case) -> float:
        return self.ask("make", case=asdict(case))

    def block(self, case: Case, num_calls: int) -> Seconds:
        return Seconds(*self.ask("block", case=asdict(case), num_calls=num_calls))

    def shares(self, case: Case) -> Shares:
        return self.ask("shares", case=asdict(case))
