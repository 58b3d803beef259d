"""A benchmark as a command: choose operations, measure them, print the table and a summary."""

import argparse
import json
import os
import platform
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

from benchmarks.measure import COLUMNS, QUICK, Effort, Failure, Packages, Row, measure_all
from benchmarks.operation import PEER, two_digits

PEER_VERSIONS = {"tensordict": "0.15.3", "torchrl": "0.14.1"}
EXTRAS = {"tensordict": "bench", "torchrl": "bench-data"}  # of the package, that install them
HEADER = [
    "operation", "ours us", "peer us", "floor us", "ours/peer", "+-", "ours/floor", "+-", "aim"
]  # fmt: skip


def load(module: str, hint: str) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise SystemExit(f"{module!r} is not installed here. To install it: {hint}") from None


def in_words(microseconds: float) -> str:
    """
    >>> in_words(12.345), in_words(4.2e6)
    ('12.35', '4.20 s')
    """
    return f"{microseconds:.2f}" if microseconds < 1e5 else f"{microseconds / 1e6:.2f} s"


def with_spread(row: Row, other: str) -> tuple[str, str]:
    if not row.compares:
        return "", ""
    ratio, spread = row.ratios[other], row.spreads[other]
    return two_digits(ratio), f"{spread:.2f}" if ratio >= 0.1 else f"{spread:.1g}"


def cells(row: Row) -> list[str]:
    times = [in_words(row.microseconds[column]) for column in COLUMNS]
    pairs = [x for other in ("peer", "floor") for x in with_spread(row, other)]
    aim = f"{row.verdict} ({row.aim})" if row.aim else ""
    return [row.name, *times, *pairs, aim]


def line(cells: Sequence[str]) -> str:
    *figures, aim = cells[1:]
    return f"{cells[0]:<48}" + "".join(f"{figure:>11}" for figure in figures) + f"  {aim}"


def markdown_table(rows: Iterable[Row]) -> str:
    table = [HEADER, ["---"] + ["---:"] * (len(HEADER) - 2) + ["---"]]
    table += [[f"`{r.name}`", *cells(r)[1:]] for r in rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in table)


def named(rows: Iterable[Row], of: str = "peer") -> str:
    return ", ".join(f"{r.name} {two_digits(r.ratios[of])}" for r in rows) or "none"


def summary(rows: Sequence[Row], failures: Sequence[Failure]) -> str:
    lines = [f"failed: {f.name}: {f.reason}" for f in failures]
    if compared := [r for r in rows if r.compares]:
        ranked = sorted(compared, key=lambda r: -r.ratios["peer"])
        ratios = [r.ratios["peer"] for r in ranked]
        beyond = [r for r in ranked if r.ratios["peer"] - r.spreads["peer"] > 1]
        lines += [
            f"ours/peer over {len(compared)} operations: geometric mean "
            f"{statistics.geometric_mean(ratios):.2f}, median {statistics.median(ratios):.2f}; "
            f"at least twice as fast: {sum(ratio <= 0.5 for ratio in ratios)}",
            f"slower than the peer: {sum(ratio > 1 for ratio in ratios)}, of which by more than "
            f"the spread {len(beyond)}: {named(beyond)}",
            f"worst five: {named(ranked[:5])}",
        ]
    if rows:
        lines.append(verdicts(rows, failures))
    return "\n".join(lines)


def verdicts(rows: Sequence[Row], failures: Sequence[Failure]) -> str:
    missed = [r for r in rows if r.verdict == "FAIL"]
    passed = sum(r.verdict == "pass" for r in rows)
    num_aims = passed + len(missed) + sum(f.aim is not None for f in failures)
    listed = ", ".join(f"{r.name} {two_digits(r.reached)} (aim {r.aim})" for r in missed)
    return f"aims: {passed} of {num_aims} pass; missed: {listed or 'none'}"


def json_report(
    setting: str, effort: Effort, rows: Sequence[Row], failures: Sequence[Failure]
) -> str:
    record = {
        "setting": setting,
        "effort": asdict(effort),
        "operations": [asdict(r) | {"verdict": r.verdict} for r in rows],
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


def parse(description: str, argv: Sequence[str] | None, peer: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", metavar="REGEX", default="", help="only operations that match")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"default {Effort.rounds}")
    parser.add_argument("--quick", action="store_true", help="a rough look: few, short rounds")
    parser.add_argument("--big", action="store_true", help="also what takes gigabytes of memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument(
        "--ours",
        metavar="MODULE",
        default="raffia",
        help=f"what to time as ours; `--ours {peer}` holds the peer against itself: the noise",
    )
    return parser.parse_args(argv)


def run(table: str, description: str, argv: Sequence[str] | None = None, peer: str = PEER) -> int:
    """The command for the OPERATIONS of the module named `table`; returns the exit status.

    The module may say in SETTING what all of its operations share: sizes, for example.
    """
    args = parse(description, argv, peer)
    effort = QUICK if args.quick else Effort()
    if args.rounds:
        effort = Effort(**asdict(effort) | {"rounds": args.rounds})
    packages = {
        "ours": load(args.ours, "pip install -e ."),
        "peer": load(peer, f"pip install 'raffia[{EXTRAS[peer]}]'"),
    }
    chosen = import_module(table)
    operations = [op for op in chosen.OPERATIONS if re.search(args.ops, op.name)]
    operations = [op for op in operations if args.big or not op.big]
    if args.quick and not args.ops:
        operations = [op for op in operations if not op.cached]  # a process each, seconds to start
    if not operations:
        raise SystemExit(f"no operation matches --ops {args.ops!r}; parentheses need a backslash")
    torch.set_num_threads(1)
    setting = machine(packages) + getattr(chosen, "SETTING", "")
    print(setting)
    if version(packages["peer"]) != PEER_VERSIONS[peer]:
        print(f"Beware: the aims were set against {peer} {PEER_VERSIONS[peer]}.")
    print(line(HEADER))
    rows, failures = [], []
    for outcome in measure_all(operations, packages, table, effort):
        if isinstance(outcome, Row):
            rows.append(outcome)
            print(line(cells(outcome)), flush=True)
        else:
            failures.append(outcome)
            print(f"{outcome.name:<48} {outcome.reason}", flush=True)
    print(summary(rows, failures))
    if args.json:
        args.json.write_text(json_report(setting, effort, rows, failures))
    if args.markdown:
        args.markdown.write_text(
            f"{setting}\n\n{markdown_table(rows)}\n{summary(rows, failures)}\n"
        )
    return 1 if failures else 0
