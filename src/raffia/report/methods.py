"""The section of a page that compares methods, decodings, and the data."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raffia.draw.markup import Html, el, join
from raffia.hints import plural
from raffia.report.dialogue_files import best_file, read_dialogues
from raffia.report.episodes import EvaluationFile, read_evaluations
from raffia.report.folder import Run
from raffia.report.groups import Group, Groups, flat
from raffia.report.markup import (
    NONE,
    between,
    column_format,
    count,
    decoding_label,
    figure,
    percent,
    table,
    toned,
)
from raffia.report.panel import tone
from raffia.report.rows import Decoding, decodings_of, number, result_of

_Z = 1.959964  # of the normal distribution, 95 %, both sides
# ... of Student's t, by degrees of freedom from 1 on.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)
_VALUES = ("v_weight", "q_weight", "cql_weight", "dm_weight")

_WIDTH = 170  # pixels of the drawn interval


def methods(groups: Groups, notes: list[str]) -> Html:
    """Methods, decodings and data in a table; nothing of runs that compare none."""
    found = tables(groups)
    held_out = _held_out(groups)
    if not found and not held_out:
        return Html("")
    parts = [el("h2", "Methods")]
    for name, rows in found:
        if len(found) > 1:
            parts.append(el("h3", name))
        parts.append(_table(rows))
    if found:
        parts.append(el("p.faint", _explained([row for _, rows in found for row in rows])))
    if held_out:
        parts.append(held_out)
    files = _files(groups.runs, notes)
    return join([*parts, files])


def _table(rows: Sequence[MethodRow]) -> Html:
    heads = ["method", "decoding", "mean return", "95 % interval", "", "games won", "runs", "of"]
    sources = list(dict.fromkeys([row.source for row in rows if row.num_runs]))
    without = [*([] if max(row.num_runs for row in rows) > 1 else ["runs"])]
    without += [] if len(sources) > 1 else ["of"]
    ends = [x for row in rows for x in (row.score.mean, row.score.low, row.score.high)]
    known = [x for x in ends if not math.isnan(x)]
    write = column_format(known)
    level = next((row.score.mean for row in rows if not row.num_runs), math.nan)
    body = [
        [
            toned(tone(row.tone), row.method) if row.num_runs else join([el("i.chip"), row.method]),
            row.decoding or NONE,
            write(row.score.mean),
            between(row.score.low, row.score.high, write),
            _drawn(row, min(known), max(known), level),
            percent(row.score.share_won),
            str(row.num_runs) if row.num_runs else NONE,
            row.source or NONE,
        ]
        for row in rows
    ]
    shown = table(heads, body, numeric=[2, 5, 6], without=without)
    return shown if len(sources) > 1 else join([shown, el("p.faint", f"Of {sources[0]}.")])


def _drawn(row: MethodRow, low: float, high: float, level: float) -> Html:
    """The interval as a line with the mean on it; dashed, the return of the data."""
    span = max(high - low, 1e-9)

    def x(value: float) -> str:
        return f"{4 + (_WIDTH - 8) * (value - low) / span:.1f}"

    parts = []
    if not math.isnan(level):
        parts.append(el("line.level", x1=x(level), x2=x(level), y1="0", y2="20"))
    if not math.isnan(row.score.low + row.score.high):
        parts.append(el("line", x1=x(row.score.low), x2=x(row.score.high), y1="10", y2="10"))
    parts.append(el("circle", cx=x(row.score.mean), cy="10", r="3.6"))
    colour = tone(row.tone) if row.num_runs else "muted"
    text = f"{figure(row.score.mean)}, {between(row.score.low, row.score.high)}"
    size = {"width": str(_WIDTH), "height": "20", "viewBox": f"0 0 {_WIDTH} 20"}
    return el(
        "svg.interval", *parts, role="img", aria_label=text, style=f"color:var(--{colour})", **size
    )


def _explained(rows: Sequence[MethodRow]) -> str:
    several, alone = (any(t(row.num_runs) for row in rows) for t in ((1).__lt__, (1).__eq__))
    text = []
    if several:
        text.append("Intervals over several runs are for the mean of the runs (Student's t).")
    if alone:
        text.append("Intervals of one run are over its games, and say nothing about other seeds.")
    if any("in training" in row.source for row in rows):
        text.append(
            "Figures from training are from the best evaluation of each run, which is optimistic; "
            "raffia evaluate RUN --episodes 1000 plays other games, whose figures are then shown "
            "instead."
        )
    if any(not row.num_runs for row in rows):
        text.append("The dashed line is the return of the logged dialogues.")
    return " ".join(text)


def _held_out(groups: Groups) -> Html:
    """Losses and values on held-out rows at the best evaluation, by configuration."""
    found = [
        (index, group, [dict(run.best.held_out) for run in group.runs if run.best and run.of_loss])
        for index, group in enumerate(groups)
    ]
    found = [one for one in found if one[2]]
    if not found:
        return Html("")
    names = list(dict.fromkeys([name for *_, runs in found for means in runs for name in means]))
    rows = []
    for index, group, runs in found:
        name = method_of(group.settings or {})
        label = group.label if len(found) > 1 and group.label != name else ""
        title = " · ".join([part for part in (name, label) if part])
        means = [_mean(runs, key) for key in names]
        rows.append([toned(tone(index), title), str(len(runs)), *means])
    heads = ["method", "runs", *[name.replace("_", " ") for name in names]]
    text = "Held-out rows, at the best evaluation of each run"
    return table(heads, rows, range(1, len(heads)), text)


def _mean(runs: Sequence[dict[str, float]], name: str) -> str:
    found = [means[name] for means in runs if name in means]
    if not found:
        return NONE
    score = over(found)
    error = "" if math.isnan(score.high) else f" ± {figure(score.high - score.mean)}"
    return f"{figure(score.mean)}{error}"


def _files(runs: Sequence[Run], notes: list[str]) -> Html:
    """The files that `raffia evaluate` left."""
    rows = []
    write = column_format([10.0])
    for run in [run for run in runs if run.of_dialogues]:
        files, missing = read_evaluations(run.folder)
        notes += missing
        for file in files:
            for name, one in decodings_of(file.data.get("decodings")).items():
                interval = between(one.low, one.high, write)
                rows.append(
                    [run.name, file.name, decoding_label(name), count(float(len(one.returns)))]
                    + [write(one.mean), interval, percent(one.share_won)]
                )
    if not rows:
        return Html("")
    heads = ["run", "evaluation", "decoding", "games", "mean return", "95 % interval", "games won"]
    text = f"{plural(len({(row[0], row[1]) for row in rows}), 'file')} by raffia evaluate"
    return el("details", el("summary", text), table(heads, rows, [3, 4, 6]))


@dataclass(frozen=True)
class MethodRow:
    """A row of the table of methods.

    >>> MethodRow("ILQL", "as set", Decoding(-2.0)).score.share_won
    nan
    """

    method: str
    decoding: str
    score: Decoding
    num_runs: int = 0  # 0: the data themselves
    source: str = ""  # the episodes it was measured on
    tone: int = 0  # the group's tone


def method_of(settings: Mapping[str, Any]) -> str:
    """The method that a config of ILQL amounts to; nothing if it is no such config.

    settings: flat, under dotted names.

    >>> loss = {"loss.tau": 0.8, "loss.q_weight": 1.0, "loss.v_weight": 1.0}
    >>> method_of(loss), method_of({**loss, "loss.tau": 0.5}), method_of({"loss.tau": 0.8})
    ('ILQL', 'one step (SARSA)', 'behaviour cloning')
    >>> method_of({"loss.tau": 0.8, "keep_best": 0.1}), method_of({"env.id": "CartPole-v1"})
    ('behaviour cloning of the best 10 %', '')
    """
    if "loss.tau" not in settings:
        return ""

    def weight(name: str) -> float:
        value = number(settings.get(f"loss.{name}"))
        return 0.0 if math.isnan(value) else value

    fraction = number(settings.get("keep_best", 1.0))
    best = f" of the best {100 * fraction:.3g} %" if fraction < 1 else ""
    weighs = weight("beta") != 0 or settings.get("loss.exp_weights") is False
    if not any(weight(name) > 0 for name in _VALUES) and not (weighs and weight("awac_weight")):
        return f"behaviour cloning{best}"
    if settings.get("loss.backup") == "max" and weight("awac_weight") == 0:
        return f"conservative Q-learning{best}"
    if number(settings["loss.tau"]) == 0.5:
        return f"one step (SARSA){best}"
    return f"ILQL{best}"


def _own(settings: Mapping[str, Any], name: str) -> bool:
    """Whether this number may differ between members of a population."""
    ranges = settings.get("population.ranges")
    if not number(settings.get("population.size")) > 1 or not isinstance(ranges, list):
        return False
    return any(str(text).startswith(f"{name}=") for text in ranges)


def decoding_of(name: str, settings: Mapping[str, Any]) -> str:
    """The name of a decoding, with the settings of the config's own.

    >>> decoding_of("decode", {"decode.include_adv": True, "decode.adv_weight": 8.0})
    'as set: advantage × 8'
    >>> decoding_of("decode", {"decode.include_adv": False, "decode.num_beams": 1})
    'as set: policy alone, greedy'
    >>> members = {"population.size": 4, "population.ranges": ["adv_weight=1..9"]}
    >>> decoding_of("decode", {"decode.include_adv": True, "decode.adv_weight": 8.0, **members})
    "as set: advantage × the member's own weight"
    """
    if name != "decode" or "decode.include_adv" not in settings:
        return decoding_label(name)
    weight = number(settings.get("decode.adv_weight"))
    shifted = settings["decode.include_adv"] is True and not weight == 0
    how = "policy alone" if not shifted else f"advantage × {weight:g}"
    if shifted and _own(settings, "adv_weight"):
        how = "advantage × the member's own weight"
    if settings.get("decode.include_logits") is False:
        how = "advantage alone"
    beams = number(settings.get("decode.num_beams"))
    if not math.isnan(beams):
        how += ", greedy" if beams == 1 else f", {beams:.0f} beams"
    return f"{decoding_label(name)}: {how}"


def tables(groups: Groups) -> list[tuple[str, list[MethodRow]]]:
    """For each dialogue data set, its description and the rows of the methods trained on it.

    >>> tables([])
    []
    """
    by_data: dict[str, list[tuple[int, Group]]] = {}
    for index, group in enumerate(groups):
        if any(run.best and run.best.decodings for run in group.runs):
            by_data.setdefault(_data_key(group), []).append((index, group))
    found = []
    for some in by_data.values():
        names = [method_of(group.settings or {}) for _, group in some]
        rows, data = [], _data_rows(Groups([group for _, group in some]))
        for (index, group), name in zip(some, names, strict=True):
            label = group.label if not name or names.count(name) > 1 else ""
            title = " · ".join([part for part in (name, label) if part])
            rows += _rows(group, title, index)
        rows.sort(key=lambda row: -row.score.mean)
        found.append((_data_name(some[0][1]), [*rows, *data]))
    return found


def over(values: Sequence[float]) -> Decoding:
    """The mean over seeds, with the 95 % interval of Student's t.

    >>> found = over([-2.0, -1.0, -3.0])
    >>> found.mean, found.low, found.high
    (-2.0, -4.4843..., 0.4843...)
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Decoding(mean)
    freedom = len(values) - 1
    # Beyond the table the first terms of its expansion are right to a thousandth.
    terms = (_Z, (_Z**3 + _Z) / 4, (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96)
    expansion = sum(term / freedom**power for power, term in enumerate(terms))
    quantile = _T[freedom - 1] if freedom <= len(_T) else expansion
    error = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return Decoding(mean, mean - error, mean + error)


# -- of one configuration


def _rows(group: Group, title: str, index: int) -> list[MethodRow]:
    by_run, source = _measured(group)
    names = list(dict.fromkeys([name for found in by_run for name in found]))
    rows = []
    for name in names:
        found = [one[name] for one in by_run if name in one]
        fractions = [one.share_won for one in found if not math.isnan(one.share_won)]
        score = over([one.mean for one in found])
        if fractions:
            score = replace(score, share_won=statistics.fmean(fractions))
        if len(found) == 1:
            score = _of_episodes(found[0])
        rows.append(
            MethodRow(
                method=title,
                decoding=decoding_of(name, group.settings or {}),
                score=score,
                num_runs=len(found),
                source=source,
                tone=index,
            )
        )
    return rows


def _of_episodes(one: Decoding) -> Decoding:
    if not math.isnan(one.low + one.high) or len(one.returns) < 2:
        return one
    error = _Z * statistics.stdev(one.returns) / math.sqrt(len(one.returns))
    return replace(one, low=one.mean - error, high=one.mean + error)


def _measured(group: Group) -> tuple[list[dict[str, Decoding]], str]:
    """Scores of each run by decoding: from files of `raffia evaluate` if all runs have one that
    counts.

    A file counts whose episodes are not fewer than those of the evaluations in training.
    """
    runs = [run for run in group.runs if run.best and run.best.decodings]
    files = [_largest(run) for run in runs]
    if all(files):
        found = [decodings_of(file.data.get("decodings")) for file in files if file]
        which = {str(file.data.get("checkpoint", NONE)) for file in files if file}
        return found, f"{_games(found)} by raffia evaluate, {', '.join(sorted(which))}"
    found = [dict(run.best.decodings) for run in runs if run.best]
    for one, run in zip(found, runs, strict=True):
        first = next(iter(one))
        if run.best and not one[first].returns:  # the row has those of the first alone
            one[first] = replace(one[first], returns=run.best.returns)
    return found, f"{_games(found)} in training"


def _games(found: Sequence[Mapping[str, Decoding]]) -> str:
    numbers = [len(next(iter(one.values())).returns) for one in found if one]
    least, most = min(numbers, default=0), max(numbers, default=0)
    each = " each" if len(found) > 1 else ""
    return f"{least:,}{f' to {most:,}' if most > least else ''} games{each}"


def _largest(run: Run) -> EvaluationFile | None:
    """The evaluation file with the most episodes, preferably one of the best checkpoint."""
    assert run.best is not None
    files, _ = read_evaluations(run.folder)
    fit: list[tuple[bool, int, int, EvaluationFile]] = []
    for file in files:
        found = decodings_of(file.data.get("decodings"))
        episodes = len(next(iter(found.values())).returns) if found else 0
        if episodes and episodes >= len(run.best.returns):
            # By their index in the list the newest of equals, never by their content.
            fit.append((file.data.get("checkpoint") == "best", episodes, len(fit), file))
    return max(fit)[-1] if fit else None


# -- of the data


def _data_key(group: Group) -> str:
    return json.dumps(_data_settings(group), sort_keys=True)


def _data_settings(group: Group) -> dict[str, Any]:
    task = (group.settings or {}).get("task")
    settings = flat(dict(group.settings or {}))
    return {n: v for n, v in settings.items() if n == "task" or n.startswith(f"{task}.")}


def _data_name(group: Group) -> str:
    settings = _data_settings(group)
    task = str(settings.get("task") or "dialogues")
    games = settings.get(f"{task}.games")
    return f"{task}, {games}" if isinstance(games, str) else task


def _data_rows(groups: Groups) -> list[MethodRow]:
    """Rows of the logged dialogues' own returns, where a file has them."""
    found: dict[str, MethodRow] = {}
    for run in groups.runs:
        data = _data_of(run)
        whole, rows = result_of(data), number(data.get("num_rows"))
        if whole is None or math.isnan(rows):
            continue
        name = f"the data, {count(rows)} dialogues"
        found.setdefault(name, MethodRow(name, "", whole))
        learnt = data.get("learnt") or {}
        part = result_of(learnt)
        if part is not None and (best := number(learnt.get("num_rows"))) < rows:
            name = f"the best {count(best)} of them"
            found.setdefault(name, MethodRow(name, "", part))
    return list(found.values())


def _data_of(run: Run) -> dict[str, Any]:
    path = best_file(run)
    try:
        return dict(read_dialogues(path).data) if path else {}
    except ValueError:  # reported where the dialogues are shown
        return {}
