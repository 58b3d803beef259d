"""One row of a table: compare what ours, the peer and the floor give, then time the three."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from benchmarks.alone import Comparable, Modules, Workers, comparable
from benchmarks.operation import Aim, Operation
from benchmarks.results import difference
from benchmarks.timing import Call, Times, block, block_length, paired_ratio, take_turns

COLUMNS = ("ours", "peer", "floor")

Packages = dict[str, ModuleType]  # ours and peer


@dataclass(frozen=True, kw_only=True)
class Effort:
    rounds: int = 21
    seconds: float = 0.008  # of one block
    generations: int = 3  # fresh data, or processes: where memory lies can cost a few per cent
    patience: float = 3.0  # CPU seconds for one operation, after which only the least is done:
    least_rounds: int = 3
    once: float = 3.0  # CPU seconds: what is not ours and takes longer is called a single time

    @property
    def rounds_per_generation(self) -> int:
        return math.ceil(self.rounds / self.generations)


QUICK = Effort(rounds=5, seconds=0.003, generations=1, patience=0.3, least_rounds=1, once=0.3)


@dataclass(frozen=True)
class Row:
    name: str
    aim: Aim | None
    microseconds: dict[str, float]  # by column
    ratios: dict[str, float]  # of ours to the peer and to the floor
    spreads: dict[str, float]  # of the ratios

    @property
    def compares(self) -> bool:
        """Whether the peer's column does the same; a first use that is in seconds has none such."""
        return not (self.aim and self.aim.of == "seconds")

    @property
    def reached(self) -> float:
        """What the aim is about: a ratio, or seconds."""
        assert self.aim
        if self.aim.of == "seconds":
            return self.microseconds["ours"] / 1e6
        return self.ratios[self.aim.of]

    @property
    def verdict(self) -> str:
        if not self.aim:
            return ""
        return "pass" if self.reached <= self.aim.share else "FAIL"


@dataclass(frozen=True)
class Failure:
    name: str
    aim: Aim | None
    reason: str


def require_agreement(results: dict[str, Comparable]) -> None:
    ours = results["ours"]
    if wrong := difference(ours["whole"], results["peer"]["whole"]):
        raise ValueError(f"ours and the peer's results differ: {wrong}")
    if wrong := difference(ours["read"], results["floor"]["read"]):
        raise ValueError(f"ours and the floor's results differ: {wrong}")


def row(operation: Operation, times: Times) -> Row:
    pairs = {other: paired_ratio(times["ours"], times[other]) for other in ("peer", "floor")}
    return Row(
        operation.name,
        operation.aim,
        microseconds={column: statistics.median(t) * 1e6 for column, t in times.items()},
        ratios={other: ratio for other, (ratio, _) in pairs.items()},
        spreads={other: spread for other, (_, spread) in pairs.items()},
    )


def failure(operation: Operation, error: Exception) -> Failure:
    reason = str(error).strip().partition("\n")[0]
    return Failure(operation.name, operation.aim, f"{type(error).__name__}: {reason}")


def calls_of(operation: Operation, packages: Packages) -> dict[str, Call]:
    made = {column: operation.make(package) for column, package in packages.items()}
    return made | {"floor": operation.floor()}


def first_calls(
    operation: Operation, calls: dict[str, Call]
) -> tuple[dict[str, Comparable], dict[str, float]]:
    """What each of them gave, and the CPU seconds that it took, by column."""
    results, seconds = {}, {}
    for column, call in calls.items():
        torch.manual_seed(0)
        start = time.process_time()
        result = call()
        seconds[column] = time.process_time() - start
        results[column] = comparable(operation, result, by_hand=column == "floor")
    return results, seconds


def time_together(operation: Operation, packages: Packages, effort: Effort) -> Times:
    calls = calls_of(operation, packages)
    results, firsts = first_calls(operation, calls)
    require_agreement(results)
    blocks = {c: block_of(c, call, firsts[c], effort) for c, call in calls.items()}
    return take_turns(blocks, effort.rounds_per_generation, effort.least_rounds, effort.patience)


def block_of(column: str, call: Call, first: float, effort: Effort) -> Callable[[], float]:
    """Gives seconds per call; `first` is what its very first call took."""
    if first > effort.once and column != "ours":  # ours may have compiled then
        return lambda: first
    length = block_length(call, effort.seconds, first)
    return lambda: block(call, length)


def time_alone(operation: Operation, workers: Workers, effort: Effort) -> Times:
    require_agreement(workers.results(operation.name))
    return workers.interleave(operation.name, effort.rounds_per_generation, effort.seconds)


def measure_together(operation: Operation, packages: Packages, effort: Effort) -> Row | Failure:
    times: Times = {column: [] for column in COLUMNS}
    start = time.process_time()
    try:
        for _ in range(effort.generations):
            for column, more in time_together(operation, packages, effort).items():
                times[column] += more
            if time.process_time() - start > effort.patience:
                break
    except Exception as error:  # one operation that fails must not hide the others
        return failure(operation, error)
    return row(operation, times)


def modules_of(packages: Packages) -> Modules:
    return {column: package.__name__ for column, package in packages.items()} | {"floor": None}


def measure_alone(
    operations: Sequence[Operation], modules: Modules, table: str, effort: Effort
) -> Iterator[Row | Failure]:
    """All of them in each generation of processes, since starting one takes seconds."""
    times: dict[str, Times] = {op.name: {column: [] for column in COLUMNS} for op in operations}
    failures: dict[str, Failure] = {}
    for _ in range(effort.generations if operations else 0):
        with Workers(modules, table) as workers:
            for op in (op for op in operations if op.name not in failures):
                try:
                    for column, more in time_alone(op, workers, effort).items():
                        times[op.name][column] += more
                except Exception as error:
                    failures[op.name] = failure(op, error)
    for op in operations:
        yield failures[op.name] if op.name in failures else row(op, times[op.name])


def measure_first(
    operation: Operation, packages: Packages, table: str, effort: Effort
) -> Row | Failure:
    modules = modules_of(packages)
    times: Times = {column: [] for column in COLUMNS}
    try:
        if operation.cached:
            operation.make(packages["ours"])()
        for _ in range(effort.generations):
            with Workers(modules, table) as workers:
                calls = workers.first_calls(operation.name)
            require_agreement({column: result for column, (_, result) in calls.items()})
            for column, (seconds, _) in calls.items():
                times[column].append(seconds)
    except Exception as error:
        return failure(operation, error)
    return row(operation, times)


def measure_all(
    operations: Sequence[Operation], packages: Packages, table: str, effort: Effort
) -> Iterator[Row | Failure]:
    for operation in operations:
        if not operation.alone and not operation.first:
            yield measure_together(operation, packages, effort)
    alone = [op for op in operations if op.alone]
    yield from measure_alone(alone, modules_of(packages), table, effort)
    for operation in operations:
        if operation.first:
            yield measure_first(operation, packages, table, effort)
