"""The table of searches and the summary of aims: as text, as Markdown, as JSON."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from benchmarks.search_cases import Aim
from benchmarks.search_row import COMPARED, SIDES, Row

HEADER = [
    "search",
    *("ours ms (model/tree/glue)", "LightZero ms (same)", "mctx ms (model/tree)"),
    *("x LightZero", "+-", "x mctx", "+-"),
    *("Gumbel: ours ms", "mctx ms", "x mctx", "+-"),
]
WIDTHS = [20, 27, 27, 24, 12, 6, 8, 6, 17, 9, 8, 6]
PARTS = {"ours": ("model", "tree", "glue"), "lightzero": ("model", "tree", "glue")}

Reached = Sequence[tuple[Row, Aim]]


def digits(x: float) -> str:
    """
    >>> digits(0.1234), digits(1.234), digits(123.4)
    ('0.123', '1.23', '123')
    """
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.3g}"


def milliseconds(row: Row, side: str, parts: Iterable[str] = ()) -> str:
    if not row.seconds.get(side):
        return "-"
    whole = row.median(side) * 1e3
    shown = "/".join(digits(row.share(side, part) * whole) for part in parts)
    return f"{digits(whole)} ({shown})" if shown else digits(whole)


def parts_of(row: Row, side: str) -> tuple[str, ...]:
    """The parts that are told apart: with sampled actions all is one compiled call, here."""
    if row.case.model == "sampled" and side == "ours":
        return ()
    return ("model", "tree", "glue")


def times_as_fast(row: Row, peer: str) -> tuple[str, str]:
    ratio = row.ratio(peer)
    return (f"{ratio[0]:.2f}", f"{ratio[1]:.2f}") if ratio else ("-", "")


def cells(row: Row) -> list[str]:
    return [
        row.case.name,
        milliseconds(row, "ours", parts_of(row, "ours")),
        milliseconds(row, "lightzero", parts_of(row, "lightzero")),
        milliseconds(row, "mctx", ("model", "tree") if row.case.model != "null" else ()),
        *times_as_fast(row, "lightzero"),
        *times_as_fast(row, "mctx"),
        milliseconds(row, "ours gumbel"),
        milliseconds(row, "mctx gumbel"),
        *times_as_fast(row, "mctx gumbel"),
    ]


def line(cells: Sequence[str]) -> str:
    return cells[0].ljust(WIDTHS[0]) + "".join(
        cell.rjust(width) for cell, width in zip(cells[1:], WIDTHS[1:], strict=True)
    )


def verdict(row: Row, aim: Aim) -> list[str]:
    """Aim, bound, measured and whether it holds."""
    measured = aim.measured(row)
    percent = aim.at_most  # a share
    bound = f"<= {aim.bound:.0%}" if percent else f">= {aim.bound:g}"
    if measured is None:
        return [f"{row.case.name}: {aim.name}", bound, "-", "not measured"]
    shown = f"{measured:.1%}" if percent else f"{measured:.2f}"
    return [f"{row.case.name}: {aim.name}", bound, shown, "pass" if aim.holds(measured) else "FAIL"]


def summary(rows: Sequence[Row], reached: Reached) -> str:
    lines = [f"failed: {r.case.name}, {s}: {why}" for r in rows for s, why in r.failures.items()]
    verdicts = [verdict(row, aim) for row, aim in reached]
    if verdicts:
        shown = [["aim", "bound", "measured", "pass"], *verdicts]
        lines += ["", *(f"{a:<48}{b:>9}{c:>10}  {d}" for a, b, c, d in shown)]
        counts = Counter(v[-1] for v in verdicts)
        num_measured = len(verdicts) - counts["not measured"]
        lines.append(f"aims: {counts['pass']} of {num_measured} measured ones pass")
    waits = [seconds.wall / seconds.cpu for r in rows for s in r.seconds.values() for seconds in s]
    if waits:
        lines.append(f"wall time over CPU time, at most {max(waits):.2f}")
    return "\n".join(lines)


def markdown_table(table: Sequence[Sequence[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(table[0]) - 1)
    return "".join(f"| {' | '.join(row)} |\n" for row in [table[0], rule, *table[1:]])


def markdown(setting: str, rows: Sequence[Row], reached: Reached) -> str:
    figures = markdown_table([HEADER, *map(cells, rows)])
    verdicts = [["aim", "bound", "measured", "pass"], *(verdict(r, aim) for r, aim in reached)]
    return f"{setting}\n\n{figures}\n{markdown_table(verdicts)}"


def as_json(setting: str, rows: Sequence[Row], reached: Reached) -> str:
    record = {
        "setting": setting,
        "sides": {name: asdict(side) for name, side in SIDES.items()},
        "searches": [asdict(row) | {"times_as_fast_as": row.speed} for row in rows],
        "compared": COMPARED,
        "aims": [verdict(row, aim) for row, aim in reached],
    }
    return json.dumps(record, indent=1) + "\n"
