"""How fast is every public method of the container? Ours and the peer's, at three sizes.

    python -m benchmarks.methods [--ops REGEX] [--sizes 12 60] [--kinds dense] [--markdown FILE]

The rows are not chosen: they are all public names that the containers of both packages have, dense
and lazy, with the variants that `benchmarks/method_rules.py` adds; what is left out is printed with
the reason. A name that has no rule is called without arguments. The two take turns in one process;
figures are microseconds of CPU time per call, medians over the rounds, and `ours/peer` is the
median of the ratios within a round. The exit status is 1 if a row fails, or its results differ.
"""

import argparse
import contextlib
import gc
import io
import re
import statistics
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

if not __package__:  # run by its path: this folder heads sys.path, and its files hide the peer
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor

from benchmarks.method_rules import (
    FRESH,
    KINDS,
    LEFT_OUT,
    NOT_COMPARED,
    NOT_FOR,
    RULES,
    SIZES,
    Inputs,
    Rule,
)
from benchmarks.operation import PEER, two_digits
from benchmarks.results import difference, plain
from benchmarks.table import load, machine
from benchmarks.timing import paired_ratio

LIMIT = 1.1  # a row above it is named in the summary
ROUNDS, SECONDS, PREPARE, PATIENCE = 7, 0.002, 0.006, 0.3  # CPU seconds: of a block, making


@dataclass(frozen=True)
class Timed:
    name: str
    kind: str  # of container: dense or lazy
    size: int  # leaves
    ours: float  # microseconds
    peer: float
    ratio: float
    spread: float


@dataclass(frozen=True)
class Failed:
    name: str
    kind: str
    size: int
    reason: str


# ----------------------------------------------------------------------------------------- rows


def public_names(container: type) -> list[str]:
    return [name for name in dir(container) if not name.startswith("_")]


def base(row: str) -> str:
    """
    >>> base("update(inplace)"), base("update")
    ('update', 'update')
    """
    return row.partition("(")[0]


def row_names(kind: str, containers: Sequence[type]) -> list[str]:
    """All rows for the public names that all of these containers have, and for operators."""
    names = public_names(containers[0])
    shared = [n for n in names if all(hasattr(c, n) for c in containers) and n not in LEFT_OUT]
    special = [name for name in RULES if name.startswith("__")]
    variants = [name for name in RULES if "(" in name and base(name) in shared]
    rows = [*sorted({*shared, *variants}), *special]
    return [row for row in rows if row not in NOT_FOR[KINDS[kind]]]


def rule_of(row: str) -> Rule:
    """What a row calls: its rule, or the method without arguments; a property is read."""
    if row in RULES:
        return RULES[row]

    def plainly(td: Any, inputs: Inputs) -> Any:
        found = getattr(td, row)
        return found() if callable(found) else found

    return plainly


def containers_of(kind: str, packages: Iterable[ModuleType]) -> list[type]:
    return [getattr(package, kind) for package in packages]


# ------------------------------------------------------------------------ one row


def parts_of(result: Any) -> dict[str, Any]:
    """The part of a result that two packages must agree on."""
    if isinstance(result, bool | int | float | str | bytes | Tensor | dict):
        return plain(result)
    if hasattr(result, "batch_size") and hasattr(result, "to_dict"):
        return plain(result)
    if isinstance(result, list | tuple):
        found = {"@len": len(result)}
        for i, part in enumerate(result):
            found |= {f"{i}.{path}": value for path, value in parts_of(part).items()}
        return found
    return {}


def containers(row: str, inputs: Inputs, count: int) -> list[Any]:
    """What `count` calls get: the same container, or one each where a call changes its entries."""
    if row not in FRESH:
        return [inputs.td] * count
    if row == "unlock_":
        return [inputs.create().lock_() for _ in range(count)]
    return [inputs.create() for _ in range(count)]


def block(rule: Rule, inputs: Inputs, tds: list[Any]) -> float:
    """CPU seconds per call."""
    start = time.process_time_ns()
    for td in tds:
        rule(td, inputs)
    return (time.process_time_ns() - start) / len(tds) / 1e9


def count_of(row: str, rule: Rule, inputs: Inputs) -> int:
    """How many calls fill a block; fewer of those that need a new container each.

    Ten of these at least, where they are quick: of a few calls most is how cold the memory is.
    """
    start = time.process_time()
    tds = containers(row, inputs, 2)
    making = (time.process_time() - start) / 2
    took = min(block(rule, inputs, tds[:1]), block(rule, inputs, tds[1:]))
    count = round(SECONDS / max(took, 1e-7))
    if row in FRESH:
        count = min(count, max(10, round(PREPARE / making)))
    return max(2 if row in FRESH else 1, min(count, 10_000))


def agreement(row: str, rule: Rule, both: dict[str, Inputs]) -> str | None:
    """How the first results differ, or the containers afterwards; None where they agree."""
    found = []
    for inputs in both.values():
        (td,) = containers(row, inputs, 1)
        result = rule(td, inputs)
        found.append({f"result {k}": v for k, v in parts_of(result).items()} | parts_of(td))
    return difference(found[0], found[1])


def timed(row: str, both: dict[str, Inputs], rounds: int) -> tuple[list[float], list[float]]:
    rule = rule_of(row)
    different = None if row in NOT_COMPARED else agreement(row, rule, both)
    if different:
        raise ValueError(f"results differ: {different}")
    counts = {side: count_of(row, rule, inputs) for side, inputs in both.items()}
    if row in FRESH:
        counts = dict.fromkeys(counts, min(counts.values()))
    times: dict[str, list[float]] = {side: [] for side in both}
    start = time.process_time()
    for round_index in range(rounds):
        if round_index > 2 and time.process_time() - start > PATIENCE:
            break
        for side in list(both)[:: 1 if round_index % 2 else -1]:
            tds = containers(row, both[side], counts[side])
            times[side].append(block(rule, both[side], tds))
    return times["ours"], times["peer"]


def measure(row: str, kind: str, both: dict[str, Inputs], rounds: int) -> Timed | Failed:
    size = both["ours"].num_leaves
    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")  # the peer's about what it will change
            ours, peer = timed(row, both, rounds)
    except Exception as error:  # one row that fails must not hide the others
        reason = str(error).strip().partition("\n")[0]
        return Failed(row, KINDS[kind], size, f"{type(error).__name__}: {reason}"[:150])
    finally:
        gc.enable()
    ratio, spread = paired_ratio(ours, peer)
    medians = [statistics.median(times) * 1e6 for times in (ours, peer)]
    return Timed(row, KINDS[kind], size, *medians, ratio, spread)


def measure_all(
    packages: dict[str, ModuleType],
    kinds: Sequence[str],
    sizes: Sequence[int],
    pattern: str,
    rounds: int,
) -> Iterator[Timed | Failed]:
    for kind in kinds:
        rows = row_names(kind, containers_of(kind, packages.values()))
        for size in sizes:
            for row in rows:
                if re.search(pattern, row):
                    both = {side: Inputs(p, kind, size) for side, p in packages.items()}
                    yield measure(row, kind, both, rounds)
                    for inputs in both.values():
                        inputs.close()


# ------------------------------------------------------------------------ the table


def line(row: Timed) -> str:
    return (
        f"{row.name:<30}{row.kind:>7}{row.size:>5}{row.ours:>12.2f}{row.peer:>12.2f}"
        f"{two_digits(row.ratio):>8}{row.spread:>7.2f}"
    )


def geometric_means(rows: Sequence[Timed]) -> list[str]:
    lines = []
    for kind, size in dict.fromkeys((row.kind, row.size) for row in rows):
        ratios = [row.ratio for row in rows if (row.kind, row.size) == (kind, size)]
        lines.append(
            f"{kind}, {size} leaves: {len(ratios)} rows, geometric mean of ours/peer "
            f"{two_digits(statistics.geometric_mean(ratios))}, above {LIMIT}: "
            f"{sum(ratio > LIMIT for ratio in ratios)}"
        )
    return lines


def left_out(packages: dict[str, ModuleType], kinds: Sequence[str]) -> list[str]:
    lines = [f"left out: {name}: {reason}" for name, reason in LEFT_OUT.items()]
    for kind, unfit in NOT_FOR.items():
        lines += [f"left out, {kind}: {name}: {reason}" for name, reason in unfit.items()]
    for kind in kinds:
        names = {side: {*public_names(getattr(p, kind))} for side, p in packages.items()}
        for side, other in (("ours", "peer"), ("peer", "ours")):
            if only := sorted(names[side] - names[other]):
                lines.append(f"only in {side}, {KINDS[kind]}: {', '.join(only)}")
    return lines


def markdown(rows: Sequence[Timed]) -> str:
    """One line a row and kind, the sizes beside each other, the largest ratio first."""
    sizes = sorted({row.size for row in rows})
    found: dict[tuple[str, str], dict[int, Timed]] = {}
    for row in rows:
        found.setdefault((row.name, row.kind), {})[row.size] = row
    head = ["method", "of", *[f"ours us, {n}" for n in sizes], *[f"ours/peer, {n}" for n in sizes]]
    table = [head, ["---"] * 2 + ["---:"] * (2 * len(sizes))]
    for (name, kind), row in sorted(
        found.items(), key=lambda pair: -max(timed.ratio for timed in pair[1].values())
    ):
        figures = [f"{row[n].ours:.1f}" if n in row else "" for n in sizes]
        ratios = [two_digits(row[n].ratio) if n in row else "" for n in sizes]
        table.append([f"`{name}`", kind, *figures, *ratios])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in table)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", metavar="REGEX", default="", help="only rows that match")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="LEAVES")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS.values()], default=[*KINDS.values()])
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument("--ours", metavar="MODULE", default="raffia", help=f"or {PEER}: the noise")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    packages = {
        "ours": load(args.ours, "pip install -e ."),
        "peer": load(PEER, "pip install 'raffia[bench]'"),
    }
    kinds = [kind for kind, short in KINDS.items() if short in args.kinds]
    torch.set_num_threads(1)
    gc.freeze()  # imported objects are not traversed again before each row
    print(setting := machine(packages))
    outcomes = []
    for outcome in measure_all(packages, kinds, args.sizes, args.ops, args.rounds):
        outcomes.append(outcome)
        print(f"{len(outcomes)} rows", end="\r", file=sys.stderr, flush=True)
    rows = sorted(
        [row for row in outcomes if isinstance(row, Timed)], key=lambda row: (-row.ratio, row.name)
    )
    failed = [row for row in outcomes if isinstance(row, Failed)]
    head = ("row", "of", "n", "ours us", "peer us", "ratio", "+-")
    print("{:<30}{:>7}{:>5}{:>12}{:>12}{:>8}{:>7}".format(*head))
    for row in rows:
        print(line(row))
    means = geometric_means(rows)
    above = [f"{row.name} ({row.kind}, {row.size}) {two_digits(row.ratio)}" for row in rows
             if row.ratio > LIMIT]  # fmt: skip
    means.append(f"above {LIMIT}: {', '.join(above) or 'none'}")
    trouble = [f"failed: {f.name} ({f.kind}, {f.size}): {f.reason}" for f in failed]
    notes = left_out(packages, kinds)
    print("\n".join([*notes, *trouble, *means]))
    if args.markdown:
        text = "\n\n".join([setting, markdown(rows), *means, *trouble, *notes])
        args.markdown.write_text(text + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
