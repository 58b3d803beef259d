"""Configurations ordered by their scores, with their runs' results."""

import re
from pathlib import Path

import numpy as np

from raffia.report.folder import Run
from raffia.report.groups import grouped
from raffia.report.heads import head
from raffia.report.panel import bootstrap_band
from raffia.report.scores import ranking, scores


def run(name, rate, seed, *means, loss=False):
    key = "loss" if loss else "mean_return"
    rows = [
        {"kind": "evaluate", "update": i, "env_step": 10 * i, "seconds": i, key: mean}
        for i, mean in enumerate(means)
    ]
    return Run(Path(name), {"seed": seed, "rate": rate}, rows=tuple(rows))


def test_the_best_configuration_is_first_by_its_newest_evaluations():
    low = [run(f"a{seed}", 0.1, seed, 90.0, 1.0 + seed) for seed in range(5)]
    high = [run(f"b{seed}", 0.2, seed, 5.0, 10.0 + seed) for seed in range(5)]
    first, second = scores(grouped([*low, *high]))
    assert [first.group.label, second.group.label] == ["rate=0.2", "rate=0.1"]
    assert first.last == 12.0  # of 10 .. 14, without the least and the largest
    expected = bootstrap_band(np.arange(10.0, 15.0))
    assert (first.low, first.high) == tuple(map(float, expected))
    assert (first.best, second.best) == (14.0, 90.0)


def test_runs_without_an_evaluation_do_not_count():
    runs = [run("a", 0.1, 0, 3.0), run("b", 0.1, 1), run("c", 0.2, 0)]
    [only] = scores(grouped(runs))
    assert only.last == 3.0 and np.isnan(only.low)
    page = ranking(grouped(runs))
    assert "1 of 2" in page and all(name in page for name in ("a", "b", "c"))


def columns(html):
    """The first row of the first table, by the heads of its columns."""
    heads, first = re.findall(r"<tr>(.*?)</tr>", html, re.DOTALL)[:2]
    names = re.findall(r"<th[^>]*>(.*?)</th>", heads, re.DOTALL)
    return dict(zip(names, re.findall(r"<td[^>]*>(.*?)</td>", first, re.DOTALL), strict=True))


def test_each_number_is_in_its_column():
    runs = [
        run(f"{name}{seed}", rate, seed, 90.0, rate * 100 + seed)
        for name, rate in (("a", 0.1), ("b", 0.2))
        for seed in range(2)
    ]
    shown = columns(ranking(grouped(runs)))
    assert (shown["runs"], shown["at the end"], shown["best evaluation"]) == ("2", "20.50", "90.00")
    assert shown["95 % interval"] == "20.00 to 21.00"
    shown = columns(head(grouped(runs)))
    assert (shown["seed"], shown["best return"], shown["last return"]) == ("0", "90", "10")
