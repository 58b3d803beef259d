"""How fast is raffia's container? Ours, the peer's (PyTorch's tensordict) and a floor by hand.

    python -m benchmarks.tensordict [--ops REGEX] [--rounds N] [--json FILE] [--markdown FILE]

The floor is the same work on plain dicts with raw torch. Figures are microseconds of CPU time per
call on one thread: medians over rounds in which the three take turns. `ours/peer` and `ours/floor`
are medians of the ratios within a round; `+-` is half the interquartile range of `ours/peer`.
Before an operation is timed, the three results are compared. The exit status is 1 if one differs
or fails.
"""

import argparse
import json
import math
import os
import platform
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

if not __package__:  # run by its path: this folder heads sys.path, and this file hides the peer
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks.alone import Workers
from benchmarks.operations import OPERATIONS, Operation
from benchmarks.results import bare, difference, plain
from benchmarks.timing import interleave, paired_ratio

PEER = "tensordict"
PEER_VERSION = "0.15.3"
AIM = 0.5  # of the peer's time, for the operations marked `twice`
COLUMNS = ("ours", "peer", "floor")

Packages = dict[str, ModuleType]  # ours and peer


@dataclass(frozen=True, kw_only=True)
class Effort:
    rounds: int = 21
    seconds: float = 0.008  # of one block
    generations: int = 3  # fresh data, or processes: where memory lies can cost a few per cent


QUICK = Effort(rounds=5, seconds=0.003, generations=1)


@dataclass(frozen=True)
class Row:
    name: str
    twice: bool
    microseconds: dict[str, float]  # by column: ours, peer, floor
    ours_to_peer: float
    spread: float
    ours_to_floor: float

    @property
    def aim(self) -> str:
        if not self.twice:
            return ""
        return "pass" if self.ours_to_peer <= AIM else "FAIL"

    def cells(self) -> list[str]:
        times = [f"{self.microseconds[column]:.2f}" for column in COLUMNS]
        ratios = [f"{self.ours_to_peer:.2f}", f"{self.spread:.2f}", f"{self.ours_to_floor:.1f}"]
        return [self.name, *times, *ratios, self.aim]


@dataclass(frozen=True)
class Failure:
    name: str
    twice: bool
    reason: str


HEADER = ["operation", "ours us", "peer us", "floor us", "ours/peer", "+-", "ours/floor", "aim"]


def load(module: str, hint: str) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise SystemExit(f"{module!r} is not installed here. To install it: {hint}") from None


def require_agreement(results: dict[str, dict[str, Any]]) -> None:
    if wrong := difference(results["ours"], results["peer"]):
        raise ValueError(f"ours and the peer's results differ: {wrong}")
    if wrong := difference(bare(results["ours"]), bare(results["floor"])):
        raise ValueError(f"ours and the floor's results differ: {wrong}")


def row(operation: Operation, times: dict[str, list[float]]) -> Row:
    ours_to_peer, spread = paired_ratio(times["ours"], times["peer"])
    ours_to_floor, _ = paired_ratio(times["ours"], times["floor"])
    medians = {column: statistics.median(t) * 1e6 for column, t in times.items()}
    return Row(operation.name, operation.twice, medians, ours_to_peer, spread, ours_to_floor)


def time_together(
    operation: Operation, packages: Packages, rounds: int, seconds: float
) -> dict[str, list[float]]:
    calls = {column: operation.make(package) for column, package in packages.items()}
    calls["floor"] = operation.floor()
    require_agreement({column: plain(call()) for column, call in calls.items()})
    return interleave(calls, rounds, seconds)


def time_alone(
    operation: Operation, packages: Packages, rounds: int, seconds: float
) -> dict[str, list[float]]:
    modules = {column: package.__name__ for column, package in packages.items()}
    with Workers(modules | {"floor": None}) as workers:
        require_agreement(workers.results(operation.name))
        return workers.interleave(operation.name, rounds, seconds)


def measure(operation: Operation, packages: Packages, effort: Effort) -> Row:
    time_once = time_alone if operation.alone else time_together
    rounds = math.ceil(effort.rounds / effort.generations)
    times: dict[str, list[float]] = {column: [] for column in COLUMNS}
    for _ in range(effort.generations):
        for column, more in time_once(operation, packages, rounds, effort.seconds).items():
            times[column] += more
    return row(operation, times)


def measure_all(
    operations: Iterable[Operation], packages: Packages, effort: Effort
) -> Iterator[Row | Failure]:
    for operation in operations:
        try:
            yield measure(operation, packages, effort)
        except Exception as error:  # one operation that fails must not hide the others
            reason = str(error).strip().partition("\n")[0]
            yield Failure(operation.name, operation.twice, f"{type(error).__name__}: {reason}")


def line(cells: Sequence[str]) -> str:
    return f"{cells[0]:<38}" + "".join(f"{cell:>11}" for cell in cells[1:])


def markdown_table(rows: Iterable[Row]) -> str:
    table = [HEADER, ["---"] + ["---:"] * (len(HEADER) - 2) + ["---"]]
    table += [[f"`{r.name}`", *r.cells()[1:]] for r in rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in table)


def named(rows: Iterable[Row]) -> str:
    return ", ".join(f"{r.name} {r.ours_to_peer:.2f}" for r in rows) or "none"


def summary(rows: Sequence[Row], failures: Sequence[Failure]) -> str:
    lines = [f"failed: {f.name}: {f.reason}" for f in failures]
    if rows:
        ranked = sorted(rows, key=lambda r: -r.ours_to_peer)
        ratios = [r.ours_to_peer for r in ranked]
        beyond = [r for r in ranked if r.ours_to_peer - r.spread > 1]
        missed = [r for r in ranked if r.aim == "FAIL"]
        passed, failed = sum(r.aim == "pass" for r in rows), sum(f.twice for f in failures)
        lines += [
            f"ours/peer over {len(rows)} operations: geometric mean "
            f"{statistics.geometric_mean(ratios):.2f}, median {statistics.median(ratios):.2f}; "
            f"at least twice as fast: {sum(ratio <= AIM for ratio in ratios)}",
            f"slower than the peer: {sum(ratio > 1 for ratio in ratios)}, of which by more than "
            f"the spread {len(beyond)}: {named(beyond)}",
            f"worst five: {named(ranked[:5])}",
            f"aim (ours/peer at most {AIM}): {passed} of {passed + len(missed) + failed} pass; "
            f"missed: {named(missed)}",
        ]
    return "\n".join(lines)


def json_report(
    setting: str, effort: Effort, rows: Sequence[Row], failures: Sequence[Failure]
) -> str:
    record = {
        "setting": setting,
        "effort": asdict(effort),
        "operations": [asdict(r) | {"aim": r.aim} for r in rows],
        "failures": [asdict(f) for f in failures],
        "summary": summary(rows, failures),
    }
    return json.dumps(record, indent=2) + "\n"


def machine(packages: Packages) -> str:
    load_1min = os.getloadavg()[0]
    versions = ", ".join(f"{c} {p.__name__} {version(p)}" for c, p in packages.items())
    return (
        f"{versions}; torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, {os.cpu_count()} cores, load {load_1min:.1f}"
    )


def version(package: ModuleType) -> str:
    return str(getattr(package, "__version__", "of unknown version"))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", metavar="REGEX", default="", help="only operations that match")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"default {Effort.rounds}")
    parser.add_argument("--quick", action="store_true", help="few and short rounds: a rough look")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument(
        "--ours",
        metavar="MODULE",
        default="raffia",
        help=f"what to time as ours; `--ours {PEER}` holds the peer against itself: the noise",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    effort = QUICK if args.quick else Effort()
    if args.rounds:
        effort = Effort(**asdict(effort) | {"rounds": args.rounds})
    operations = [op for op in OPERATIONS if re.search(args.ops, op.name)]
    if not operations:
        raise SystemExit(f"no operation matches --ops {args.ops!r}; parentheses need a backslash")
    packages = {
        "ours": load(args.ours, "pip install -e ."),
        "peer": load(PEER, "pip install 'raffia[bench]'"),
    }
    torch.set_num_threads(1)
    setting = machine(packages)
    print(setting)
    if version(packages["peer"]) != PEER_VERSION:
        print(f"Beware: the aims were set against {PEER} {PEER_VERSION}.")
    print(line(HEADER))
    rows, failures = [], []
    for outcome in measure_all(operations, packages, effort):
        if isinstance(outcome, Row):
            rows.append(outcome)
            print(line(outcome.cells()), flush=True)
        else:
            failures.append(outcome)
            print(f"{outcome.name:<38} {outcome.reason}", flush=True)
    print(summary(rows, failures))
    if args.json:
        args.json.write_text(json_report(setting, effort, rows, failures))
    if args.markdown:
        args.markdown.write_text(
            f"{setting}\n\n{markdown_table(rows)}\n{summary(rows, failures)}\n"
        )
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
