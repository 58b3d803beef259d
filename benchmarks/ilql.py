"""How fast does ILQL train and speak, and in how much memory, beside AgileRL's?

    python -m benchmarks.ilql [--ops REGEX] [--rounds N] [--gpt2-rounds N] [--wall]
        [--agilerl-python PATH] [--markdown FILE]

Updates of a small GPT and of one of GPT-2's shape, texts by sampling and by beam search, and the
peak of memory of processes that do nothing else. AgileRL's columns are there where
its environment is given, which benchmarks/README.md says how to make. Times are CPU time of one
thread, the medians of rounds in which both take turns.
"""

import argparse
import os
import platform
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

if not __package__:  # run by its path: this folder heads sys.path, and tensordict.py hides the peer
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.ilql_cases import SIZES, flops, generation, training
from benchmarks.search_report import digits, markdown_table
from benchmarks.search_worker import Case, Worker
from benchmarks.timing import Times, paired_ratio, take_turns

BLOCK = 0.5  # seconds
INSTALL = """agilerl is absent; its virtual environment is made with
    python3.11 -m venv ~/agilerl
    ~/agilerl/bin/pip install -r benchmarks/agilerl_requirements.txt
and passed by --agilerl-python ~/agilerl/bin/python"""


@dataclass(frozen=True)
class Operation:
    """A row of the table: ours and the peer's, which has one arrangement only."""

    name: str
    ours: Case
    peer: Case
    aim: float | None = None  # times the peer's speed; of memory, the share of the peer's
    memory: bool = False

    def of(self, side: str) -> Case:
        return self.ours if side == "ours" else self.peer

    @property
    def tokens(self) -> int:
        """That a call learns from, or makes."""
        if self.ours.policy.startswith("train"):
            return SIZES[self.ours.model].tokens
        return SIZES[self.ours.model].new * self.ours.batch  # of beam search the best beams count


def train(model: str, arrangement: str, aim: float | None, memory: bool = False) -> Operation:
    what = "peak memory" if memory else "training"
    name = f"{what}, {model}, {arrangement}"
    peer = training(model, "three trunks")
    return Operation(name, training(model, arrangement), peer, aim, memory)


def speak(
    model: str,
    num: int,
    beams: int,
    aim: float | None = None,
    arrangement: str = "shared",
    top_k: int = 0,
) -> Operation:
    how = f"beam {beams}" if beams else "sample"
    more = ", three trunks" if arrangement == "three trunks" else ""
    few = f", top-k {top_k}" if top_k else ""
    name = f"{how}, {model}, {num} prompt{'s'[: num > 1]}{few}{more}"
    ours = generation(model, num, beams, arrangement, top_k)
    return Operation(name, ours, generation(model, num, beams, "three trunks", top_k), aim)


# What is timed together, in new processes; whether it takes gigabytes and seconds.
GROUPS: list[tuple[list[Operation], bool]] = [
    ([train("small", "three trunks", 1.2), train("small", "shared", 2.5)], False),
    ([speak("small", 1, 0, 4.0), speak("small", 1, 4, 4.0)], False),
    ([speak("small", 8, 0, 2.0), speak("small", 8, 4, 2.0)], False),
    ([speak("small", 1, 0, None, "three trunks")], False),
    ([speak("small", 8, 0, None, "three trunks")], False),
    ([train("gpt2", "three trunks", 1.2), train("gpt2", "shared", 2.5)], True),
    ([speak("gpt2", 1, 0, 4.0), speak("gpt2", 1, 0, 4.0, top_k=50)], True),
]
MEMORY = [
    ([train("small", "three trunks", None, True), train("small", "shared", 0.6, True)], False),
    ([train("gpt2", "three trunks", None, True), train("gpt2", "shared", 0.6, True)], True),
]


@dataclass(frozen=True)
class Row:
    operation: Operation
    figures: Times  # seconds of a call, or bytes, of each side that there is, one a round
    floor: float | None = None  # seconds that the products alone would take
    before: dict[str, float] = field(default_factory=dict)  # bytes of each side after its imports

    def cells(self) -> list[str]:
        ratio, spread = self.ratio()
        shown = [self.shown(side) for side in ("ours", "agilerl")]
        floor = "-" if self.floor is None else self.rate(self.floor)
        shown_ratio = ["-", ""] if ratio is None else [f"{ratio:.2f}", f"{spread:.2f}"]
        return [self.operation.name, *shown, floor, *shown_ratio, self.verdict(ratio)]

    def rate(self, seconds: float) -> str:
        per_second = self.operation.tokens / seconds
        return f"{per_second:,.0f}" if per_second >= 100 else digits(per_second)

    def shown(self, side: str) -> str:
        if side not in self.figures:
            return "-"
        median = statistics.median(self.figures[side])
        if not self.operation.memory:
            return self.rate(median)
        more = (median - self.before[side]) / 2**20
        return f"{median / 2**20:,.0f} ({more:,.0f}) MiB"

    def ratio(self) -> tuple[float | None, float]:
        """How many times as fast ours is, or the share of memory; and the spread."""
        if len(self.figures) < 2:
            return None, 0.0
        ours, peer = self.figures["ours"], self.figures["agilerl"]
        return paired_ratio(ours, peer) if self.operation.memory else paired_ratio(peer, ours)

    def verdict(self, ratio: float | None) -> str:
        aim = self.operation.aim
        if aim is None:
            return ""
        if ratio is None:
            return f"not measured ({aim:g})"
        reached = ratio <= aim if self.operation.memory else ratio >= aim
        return f"{'pass' if reached else 'FAIL'} ({aim:g})"


HEADER = ["tokens/s, or peak memory", "ours", "AgileRL", "floor", "ratio", "+-", "aim"]
WIDTHS = [42, 22, 22, 10, 8, 7, 14]


def line(cells: Sequence[str]) -> str:
    first, *rest = (
        cell.ljust(width) if cell is cells[0] else cell.rjust(width)
        for cell, width in zip(cells, WIDTHS, strict=True)
    )
    return first + "".join(rest)


def start(pythons: dict[str, Path], loud: bool, exits: ExitStack) -> dict[str, Worker]:
    """New processes, one per package."""
    return {
        name: exits.enter_context(Worker(f"benchmarks.ilql_{name}", python, loud))
        for name, python in pythons.items()
    }


def measure(
    operations: Sequence[Operation], workers: dict[str, Worker], rounds: int, clock: str
) -> tuple[list[Row], list[str]]:
    """Rows, and what failed, which must not hide the rest."""
    blocks: dict[tuple[str, Case], Callable[[], float]] = {}
    failures: list[str] = []
    for side, worker in workers.items():
        for case in dict.fromkeys(operation.of(side) for operation in operations):
            try:
                num_calls = max(1, round(BLOCK / worker.make(case)))
            except RuntimeError as error:
                failures.append(f"failed: {case.policy} {case.model}, {side}: {error}")
                continue

            def block(worker: Worker = worker, case: Case = case, num: int = num_calls) -> float:
                return getattr(worker.block(case, num), clock)

            blocks[side, case] = block
    rates: list[float] = []

    def rate() -> float:
        rates.append(workers["ours"].ask("rate"))
        return 0.0

    names = {f"{side} {number}": key for number, (key) in enumerate(blocks) for side in key[:1]}
    times = take_turns({name: blocks[key] for name, key in names.items()} | {"rate": rate}, rounds)
    found = {key: times[name] for name, key in names.items()}
    rows = []
    for operation in operations:
        figures = {
            side: found[side, operation.of(side)]
            for side in workers
            if (side, operation.of(side)) in found
        }
        if figures:
            rows.append(Row(operation, figures, flops(operation.ours) / statistics.median(rates)))
    return rows, failures


def measure_memory(
    operations: Sequence[Operation], pythons: dict[str, Path], loud: bool
) -> tuple[list[Row], list[str]]:
    """Of processes that make three updates each, one for each case."""
    found: dict[tuple[str, Case], tuple[float, float]] = {}  # the peak, and that of the imports
    failures = []
    for side, python in pythons.items():
        for case in dict.fromkeys(operation.of(side) for operation in operations):
            with Worker(f"benchmarks.ilql_{side}", python, loud) as worker:
                try:
                    worker.make(case)
                    found[side, case] = worker.ask("peak")
                except RuntimeError as error:
                    failures.append(f"failed: memory {case.policy} {case.model}, {side}: {error}")
    rows = []
    for operation in operations:
        keys = [(s, operation.of(s)) for s in pythons if (s, operation.of(s)) in found]
        if keys:
            figures = {key[0]: [found[key][0]] for key in keys}
            rows.append(Row(operation, figures, before={key[0]: found[key][1] for key in keys}))
    return rows, failures


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", metavar="REGEX", default="", help="only the rows that match")
    parser.add_argument("--rounds", type=int, metavar="N", default=7)
    parser.add_argument(
        "--gpt2-rounds", type=int, metavar="N", default=3, help="0: without what takes gigabytes"
    )
    parser.add_argument("--wall", action="store_true", help="wall time in place of CPU time")
    parser.add_argument("--agilerl-python", type=Path, metavar="PATH", help="of its environment")
    parser.add_argument("--loud", action="store_true", help="show what the packages print")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    return parser.parse_args(argv)


def pythons_of(args: argparse.Namespace) -> dict[str, Path]:
    """Versions of each installed package."""
    pythons = {"ours": Path(sys.executable)}
    if args.agilerl_python is None:
        print(INSTALL)
    elif not args.agilerl_python.exists():
        raise SystemExit(f"--agilerl-python {args.agilerl_python}: no such file")
    else:
        pythons["agilerl"] = args.agilerl_python.absolute()
    return pythons


def setting(pythons: dict[str, Path], args: argparse.Namespace) -> str:
    with ExitStack() as exits:
        workers = start(pythons, args.loud, exits)
        found = {name: worker.ask("versions") for name, worker in workers.items()}
        rate = workers["ours"].ask("rate")
    versions = "; ".join(
        f"{name}: {', '.join(f'{package} {v}' for package, v in packages.items())}"
        for name, packages in found.items()
    )
    return (
        f"{versions}; Python {platform.python_version()}, {platform.machine()}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {rate / 1e9:.0f} GFLOP/s; "
        f"{'wall' if args.wall else 'CPU'} time, medians of {args.rounds} rounds"
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    pythons = pythons_of(args)
    where = setting(pythons, args)
    print(where, line(HEADER), sep="\n", flush=True)
    rows: list[Row] = []
    failures: list[str] = []

    def report(found: list[Row], failed: list[str]) -> None:
        print("\n".join([*(line(row.cells()) for row in found), *failed]), flush=True)
        rows.extend(found)
        failures.extend(failed)

    for operations, big in GROUPS:
        chosen = [op for op in operations if re.search(args.ops, op.name)]
        rounds = args.gpt2_rounds if big else args.rounds
        if chosen and rounds:
            with ExitStack() as exits:  # new processes: a worker keeps no more than two cases
                workers = start(pythons, args.loud, exits)
                report(*measure(chosen, workers, rounds, "wall" if args.wall else "cpu"))
    for operations, big in MEMORY:
        chosen = [op for op in operations if re.search(args.ops, op.name)]
        if chosen and (args.gpt2_rounds or not big):
            report(*measure_memory(chosen, pythons, args.loud))
    if args.markdown:
        table = markdown_table([HEADER, *(row.cells() for row in rows)])
        args.markdown.write_text("\n\n".join([where, table.strip(), *failures]) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
