"""Sections about a run's files: episodes, evaluations, searched trees, checkpoints."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raffia.draw.markup import Html, clean_svg, el, join
from raffia.hints import plural
from raffia.report import episodes
from raffia.report.episodes import natural
from raffia.report.folder import Run, content, entries, read_json
from raffia.report.groups import Groups, leading
from raffia.report.markup import NONE, count, figure, percent, size, table
from raffia.report.rows import number, numbers

_MOST_SHOWN = 4  # runs of which episodes and trees are shown

_MOST_ACTIONS = 12  # in the table
_LARGEST = 600_000  # bytes of a picture


def played_sections(groups: Groups, page: Path, notes: list[str]) -> Html:
    """The sections of episodes, searched trees and evaluations, of runs whose agents plan and
    play."""
    runs = [run for run in groups.runs if not run.of_dialogues]
    if not runs:
        return Html("")
    parts = [el("h2", "Episodes")]
    shown_runs = [run for run in leading(groups) if run in runs][:_MOST_SHOWN]
    if len(runs) > 1:
        text = "Episodes and search trees are from the best run of each configuration"
        more = f", of the first {_MOST_SHOWN}" if len(groups) > _MOST_SHOWN else ""
        parts.append(el("p.faint", f"{text}{more}."))
    evaluations = []
    pictures = []
    for run in runs:
        found, missing = episodes.read_evaluations(run.folder)
        notes += missing
        evaluations += [(run, one) for one in found]
        recording = episodes.best_recording(run, found)
        if recording is not None and run in shown_runs:
            shown = episodes.shown(recording, page)
            pictures.append(join([el("h3", run.name), shown]) if len(runs) > 1 else shown)
    if pictures:
        parts.append(el("div.panels", *[el("div", one) for one in pictures]))
    if not pictures:
        call = el("code", shown_runs[0].call("evaluate", "--episodes", "5", "--record"))
        hint = ["; ", call, " records some."] if shown_runs[0].records else ["."]
        parts.append(el("p.missing", "No episode has been recorded", *hint))
    if evaluations:
        parts += [el("h3", "Evaluations"), _evaluation_table(evaluations, len(runs) > 1)]
    if any(run.searches for run in shown_runs):
        parts += [el("h2", "A searched tree"), *_trees(shown_runs, notes)]
    return join(parts)


def checkpoints(runs: Sequence[Run]) -> Html:
    """The section of checkpoints, which can be resumed and evaluated."""
    rows = [row for run in runs for row in _checkpoint_rows(run)]
    parts = [el("h2", "Checkpoints")]
    if not rows:
        return join([*parts, el("p.missing", "The folder contains no checkpoint.")])
    heads = ["run", "update", "env step", "score", "size", "state"]
    without = [] if len(runs) > 1 else ["run"]
    without += ["env step"] if all(run.by_updates for run in runs) else []
    return join([*parts, table(heads, rows, numeric=range(1, 5), without=without)])


def _evaluation_table(found: Sequence[tuple[Run, episodes.EvaluationFile]], several: bool) -> Html:
    rows = []
    for run, one in found:
        returns, lengths = one.returns, numbers(one.data.get("lengths"))
        spread = statistics.stdev(returns) if len(returns) > 1 else math.nan
        rows.append(
            [
                run.name,
                one.name,
                str(one.data.get("checkpoint", NONE)),
                str(one.data.get("opponent") or NONE),
                count(number(one.data.get("num_simulations"))),
                count(float(len(returns))),
                figure(statistics.fmean(returns)) if returns else NONE,
                figure(spread),
                figure(min(returns, default=math.nan)),
                figure(max(returns, default=math.nan)),
                figure(statistics.fmean(lengths)) if lengths else NONE,
            ]
        )
    heads = ["run", "evaluation", "checkpoint", "opponent", "simulations", "episodes"]
    heads += ["mean return", "std. dev.", "least", "greatest", "mean length"]
    return table(heads, rows, numeric=range(4, 11), without=[] if several else ["run"])


def _trees(runs: Sequence[Run], notes: list[str]) -> list[Html]:
    parts = []
    for run in runs:
        found = _tree_files(run.folder)
        if not found:
            continue
        unit = "updates" if run.by_updates else "env steps"
        newest, missing = _shown_tree(found[-1], unit)
        parts.append(join([el("h3", run.name), newest]) if len(runs) > 1 else newest)
        notes += missing
        if len(found) > 1:
            first, missing = _shown_tree(found[0], unit)
            parts.append(el("details", el("summary", "The first tree of the run"), first))
            notes += missing
    return parts or [el("p.missing", "No tree has been saved.")]


def _checkpoint_rows(run: Run) -> list[list[str]]:
    found = sorted(entries(run.folder, "checkpoints"))
    at = {  # manifests need not have it
        f"{number(row.get('update')):09.0f}": number(row.get("env_step")) for row in run.rows
    }
    rows = []
    for path in found:
        if not path.is_dir() or path.is_symlink():
            continue
        extras, num_bytes, state = _checkpoint(path)
        score = number(extras.get("score"))
        rows.append(
            [
                run.name,
                count(float(path.name)) if path.name.isdecimal() else path.name,
                count(at.get(path.name, math.nan)),
                figure(score),
                size(num_bytes) if num_bytes else NONE,
                state,
            ]
        )
    return rows


def _checkpoint(path: Path) -> tuple[dict[str, Any], float, str]:
    """Extras, bytes and state of a checkpoint: complete, or which files are missing or of another
    size.

    Checksums are not computed: whoever resumes does that.
    """
    try:
        manifest: Any = read_json(path / "manifest.json")
    except ValueError as error:
        return {}, 0, f"manifest.json could not be read: {error}"
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict):
        return {}, 0, "manifest.json does not list any files"
    extras = manifest.get("extras")
    total, state = 0.0, "complete"
    for name, entry in files.items():
        stored = entry.get("file") if isinstance(entry, dict) else None
        wanted = number(entry.get("bytes")) if isinstance(entry, dict) else math.nan
        if not isinstance(stored, str) or Path(stored).name != stored:
            state = f"damaged: {name} does not name a file"
            continue
        there = path / stored
        if not there.is_file():
            state = f"damaged: {name} is missing"
        elif there.stat().st_size != wanted:
            state = f"damaged: {name} has {there.stat().st_size:,} bytes, not {count(wanted)}"
        total += 0 if math.isnan(wanted) else wanted
    return extras if isinstance(extras, dict) else {}, total, state


def _tree_files(run: Path) -> list[list[Path]]:
    """The files of each tree of a run, which are named after the environment step, oldest first;
    of each the picture first.
    """
    found: dict[str, list[Path]] = {}
    for path in sorted(entries(run, "trees"), key=natural):
        if path.suffix in (".svg", ".json"):
            found.setdefault(path.stem, []).append(path)
    return [sorted(files, key=lambda path: path.suffix, reverse=True) for files in found.values()]


def _shown_tree(files: Sequence[Path], unit: str) -> tuple[Html, list[str]]:
    """Picture and table of a tree, and what is wrong with its files; unit: what its name counts."""
    parts: list[Html] = []
    notes: list[str] = []
    for path in files:
        try:
            if path.suffix == ".svg":
                drawing = content(path, _LARGEST).decode()
                parts.append(el("div.wide.tree", clean_svg(drawing)))
            else:
                parts.append(_root_table(read_json(path)))
        except ValueError as error:  # UnicodeDecodeError is one
            notes.append(f"trees/{path.name} is not shown: {error}")
    name = files[0].stem
    at = f"after {count(float(name))} {unit}" if name.isdecimal() else name
    return el("figure", el("figcaption", f"Searched {at}"), *parts), notes


def _root_table(data: Any) -> Html:
    edges = data.get("edges") if isinstance(data, dict) else None
    nodes = data.get("nodes") if isinstance(data, dict) else None
    if not isinstance(edges, list) or not isinstance(nodes, list):
        raise ValueError('it does not contain the lists "nodes" and "edges"')
    first = [edge for edge in edges if isinstance(edge, dict) and edge.get("source") == 0]
    first.sort(key=lambda edge: -number(edge.get("visits")))
    rows = [
        [
            str(edge.get("name", edge.get("action", ""))),
            count(number(edge.get("visits"))),
            _bar(number(edge.get("share"))),
            figure(number(edge.get("q"))),
            percent(number(edge.get("prior")), 0),
            figure(number(edge.get("reward"))),
        ]
        for edge in first[:_MOST_ACTIONS]
    ]
    caption = f"Actions at the root ({plural(len(nodes), 'node')} in the tree)"
    if len(first) > _MOST_ACTIONS:
        caption += f", the {_MOST_ACTIONS} most visited of {len(first):,}"
    heads = ["action", "visits", "share", "Q", "prior", "reward"]
    return table(heads, rows, numeric=[1, 3, 4, 5], caption=caption)


def _bar(fraction: float) -> Html:
    width = 0.0 if fraction != fraction else min(max(fraction, 0.0), 1.0)
    return el("span.bar", el("i", style=f"width:{118 * width:.0f}px"), percent(fraction, 0))
