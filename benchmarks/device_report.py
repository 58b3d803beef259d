"""The battery's report: its table, what was not measured, and all of it as JSON."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks.device_agreement import Agreement
from benchmarks.device_constants import against_plans
from benchmarks.device_figures import Effort, Figure
from benchmarks.device_limits import Limits
from benchmarks.device_tests import Outcome
from benchmarks.search_report import digits

NAME, RATE = 52, 46  # characters
CHECK_HEADER = ["check", "compared", "difference", "allowed"]
FIGURE_HEADER = [
    *("figure", "each second", "ms a call", "TFLOP/s"),
    *("of products", "of copies", "operations", "us each"),
]


@dataclass
class Report:
    """What came of everything so far."""

    effort: Effort
    tests: Outcome | None = None
    agreements: list[Agreement] = field(default_factory=list)
    limits: Limits | None = None
    figures: list[Figure] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)  # why, by name

    @property
    def holds(self) -> bool:
        """Whether nothing failed, and nothing disagrees."""
        agree = all(agreement.holds for agreement in self.agreements)
        return agree and not self.failures and (self.tests is None or self.tests.hold)


def setting(device: torch.device) -> str:
    """The machine."""
    name = "no card"
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        name = f"{found.name}, {found.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    return (
        f"{name}; torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, load "
        f"{os.getloadavg()[0]:.1f}"
    )


def check_cells(agreement: Agreement) -> list[str]:
    """
    >>> check_cells(Agreement("update", "loss", 2.0, "1e-3 of each"))
    ['update', 'loss', '2 FAIL', '1e-3 of each']
    """
    shown = f"{agreement.difference:.2g}" + ("" if agreement.holds else " FAIL")
    return [agreement.check, agreement.what, shown, agreement.tolerance]


def figure_cells(figure: Figure, limits: Limits) -> list[str]:
    """
    >>> from benchmarks.device_cost import Cost
    >>> limits = Limits({"float32": 4e12}, 1e12)
    >>> figure_cells(Figure("x", 0.5, {"calls": 1}, Cost(1e12, 1e11, 1000)), limits)
    ['x', '2 calls', '500', '2', '50.0%', '20.0%', '1,000', '500']
    """
    rates = ", ".join(f"{amount(rate)} {unit}" for unit, rate in figure.each_second.items())
    cost, seconds = figure.cost, figure.seconds
    cells = [figure.name, rates, digits(seconds * 1e3)]
    if cost.flops:
        cells += [
            digits(cost.flops / seconds / 1e12),
            f"{limits.share_by_flops(cost, seconds, figure.precision):.1%}",
            f"{limits.share_by_bytes(cost, seconds):.1%}",
        ]
    else:
        cells += ["-", "-", "-"]
    if not cost.operations:
        return [*cells, "-", "-"]
    return [*cells, f"{cost.operations:,}", digits(seconds / cost.operations * 1e6)]


def amount(x: float) -> str:
    """
    >>> amount(12345.6), amount(1.234)
    ('12,346', '1.23')
    """
    return f"{x:,.0f}" if x >= 1000 else digits(x)


def check_line(cells: Sequence[str]) -> str:
    """A row of the first table."""
    return f"{cells[0]:<26}{cells[1]:<34}{cells[2]:>12}  {cells[3]}"


def figure_line(cells: Sequence[str]) -> str:
    """A row of the second one."""
    name, rates, *rest = cells
    return f"{name:<{NAME}}{rates:<{RATE}}" + "".join(f"{cell:>12}" for cell in rest)


def limit_line(limits: Limits) -> str:
    """
    >>> limit_line(Limits({"float32": 6e13, "bfloat16": 8e14}, 3e12))
    'limits: products of float32 60.0, bfloat16 800 TFLOP/s; copies 3000 GB/s'
    """
    products = ", ".join(f"{name} {digits(rate / 1e12)}" for name, rate in limits.flops.items())
    copies = digits(limits.bytes_per_second / 1e9)
    return f"limits: products of {products} TFLOP/s; copies {copies} GB/s"


def not_measured(report: Report) -> list[str]:
    """What a run without a GPU, or with small sizes, does not measure."""
    effort, tests, found = report.effort, report.tests, []
    if effort.device.type != "cuda":
        skipped = tests.counts.get("skipped", 0) if tests else 0
        found += [
            f"the tests that need a card{f': {skipped} were skipped' if skipped else ''}",
            "whether results on a card agree with the CPU's: both sides were this CPU",
            "page-locked memory, and copies that go on while the program does",
            "CUDA graphs: the convolutions were started one by one only",
            "the two rates of convolutions, by which larger runs are planned",
        ]
        if report.figures:
            names = "; ".join(figure.name for figure in report.figures)
            found.append(f"on a card, each of these figures: {names}")
    elif tests is None or not tests.ran:
        found.append("the tests that need a card: none ran")
    if effort.small:
        found.append("any figure at its own size: batches, searches and language models were small")
    return found


def summary(report: Report) -> str:
    """The last lines: what failed, what was not measured."""
    lines = [f"failed: {name}: {why}" for name, why in report.failures.items()]
    differ = [a for a in report.agreements if not a.holds]
    lines += [
        f"disagrees: {a.check}: {a.what}, {a.difference:.2g} of what is allowed" for a in differ
    ]
    if report.agreements:
        lines.append(f"{len(report.agreements) - len(differ)} of {len(report.agreements)} agree")
    if report.tests is not None:
        counts = ", ".join(f"{num} {outcome}" for outcome, num in report.tests.counts.items())
        lines.append(f"tests that need a card: {counts}")
    if report.effort.device.type == "cuda":
        lines += against_plans(report.figures)
    lines += [f"not measured: {what}" for what in not_measured(report)]
    return "\n".join(lines)


def as_json(report: Report, machine: str) -> str:
    """All of it."""
    limits, tests = report.limits, report.tests
    record: dict[str, Any] = {
        "setting": machine,
        "device": str(report.effort.device),
        "seconds": report.effort.seconds,
        "small": report.effort.small,
        "tests": None if tests is None else tests.counts,
        "checks": [asdict(a) | {"holds": a.holds} for a in report.agreements],
        "limits": None if limits is None else asdict(limits),
        "figures": [_figure(figure, limits) for figure in report.figures],
        "failures": report.failures,
        "not_measured": not_measured(report),
        "holds": report.holds,
    }
    return json.dumps(record, indent=1) + "\n"


def _figure(figure: Figure, limits: Limits | None) -> dict[str, Any]:
    found = asdict(figure) | {"each_second": figure.each_second}
    if limits is not None and figure.cost.flops:
        found["share_by_flops"] = limits.share_by_flops(
            figure.cost, figure.seconds, figure.precision
        )
        found["share_by_bytes"] = limits.share_by_bytes(figure.cost, figure.seconds)
    return found
