"""The head of a page: what was run, its state, and the key figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from raffia.draw.markup import Html, el, join
from raffia.hints import plural
from raffia.report.folder import Run
from raffia.report.groups import Group, Groups
from raffia.report.markup import NONE, between, count, duration, figure, percent, table, toned
from raffia.report.panel import tone
from raffia.report.plots import is_game
from raffia.report.rows import EvaluationRow, number
from raffia.report.scores import scores

_STATES = {  # a sign that reads without colour, the text, the tone
    "finished": ("✓ finished", "good"),
    "target": ("✓ target reached", "good"),
    "stopped": ("■ stopped", "warn"),
    "failed": ("✗ failed", "warn"),
    "running": ("▶ running or interrupted", "warn"),
    "empty": ("no rows yet", "warn"),
}


def state_pill(run: Run) -> Html:
    """The state of a run, as a coloured label.

    >>> from pathlib import Path
    >>> "no rows yet" in state_pill(Run(Path("x")))
    True
    """
    text, kind = _STATES.get(run.state, (run.state, "warn"))
    return el(f"span.pill.{kind}", text)


def head(groups: Groups) -> Html:
    """Title, what was run, and key figures."""
    return _one(groups.runs[0]) if len(groups.runs) == 1 else _several(groups)


def rate(run: Run, key: str, total: float) -> float:
    """A rate over the whole run: the total over the wall time, or the mean over rows.

    >>> from pathlib import Path
    >>> rate(Run(Path("x"), rows=({"kind": "train", "seconds": 4},)), "updates_per_second", 8.0)
    2.0
    """
    if not math.isnan(total) and run.seconds > 0:
        return total / run.seconds
    rows = [(number(r.get("seconds")), number(r.get(key))) for r in run.of("train")]
    before, weighted, over = 0.0, 0.0, 0.0
    for end, value in rows:
        if math.isnan(end + value) or end <= before:
            continue
        weighted, over, before = weighted + (end - before) * value, over + end - before, end
    return weighted / over if over else math.nan


def _one(run: Run) -> Html:
    title = _title([run])
    best, last, reached = run.best, run.last, run.reached
    what = _measure([run])
    cards = [
        _card(f"best {what}", figure(best.mean) if best else NONE, _at(best)),
        _card(f"last {what}", figure(last.mean) if last else NONE, _at(last)),
    ]
    if not math.isnan(run.target_return):
        text = f"target of {figure(run.target_return)}"
        unit = "updates" if run.by_updates else "env steps"
        when = count(reached.progress) if reached else "not reached"
        after = f"{unit} to the {text}, {duration(reached.seconds)}" if reached else text
        cards.append(_card(after, when))
    else:
        cards.append(_card("evaluations", count(float(len(run.evaluations))), "no target was set"))
    cards.append(_card("wall time", duration(run.seconds), plural(run.num_restarts, "restart")))
    cards += _of_dialogues(run) if run.of_dialogues else _of_episodes(run)
    cards += _of_files(run)
    return join(
        [
            el("p.eyebrow", "Raffia · report of a run"),
            el("h1", f"{title} ", state_pill(run)),
            el("p.about", _about(run)),
            el("p.missing", f"It failed: {run.failure}") if run.failure else Html(""),
            el("div.cards", *cards),
        ]
    )


def _of_episodes(run: Run) -> list[Html]:
    episodes = [number(row.get("return")) for row in run.of("episode")]
    recent = [value for value in episodes if not math.isnan(value)][-20:]
    mean = figure(sum(recent) / len(recent)) if recent else NONE
    lately = f"return {mean} in the last 20"
    if is_game([run]):  # both sides are the agent: what one wins the other loses
        lately = f"{sum(value != 0 for value in recent)} of the last {len(recent)} not drawn"
    search = _card("simulations / s", _rate(run, "simulations"), "mean over the run")
    steps = _card("env steps", count(run.env_step), f"{_rate(run, 'env_steps')} / s")
    played = _card("training episodes", count(float(run.num_of("episode"))), lately)
    return [
        *([] if run.by_updates else [steps]),
        _card("updates", count(run.update), f"{_rate(run, 'updates')} / s"),
        *([search] if run.searches else []),
        *([] if run.by_updates else [played]),
    ]


def _of_files(run: Run) -> list[Html]:
    """The card of recorded episodes, where the run began with some."""
    found = next(iter(run.of("start")), {}).get("recorded")
    if not isinstance(found, dict):
        return []
    steps, mean = count(number(found.get("steps"))), figure(number(found.get("mean_return")))
    episodes = count(number(found.get("episodes")))
    return [_card("recorded episodes", episodes, f"{steps} steps, mean return {mean}")]


def _of_dialogues(run: Run) -> list[Html]:
    cards = [
        _card("updates", count(run.update), f"{_rate(run, 'updates')} / s"),
        _card("tokens / s", _rate(run, "tokens"), "read, mean over the run"),
    ]
    won = [one.share_won for one in run.best.decodings.values()][:1] if run.best else []
    if won and not math.isnan(won[0]):
        cards.append(_card("games won", percent(won[0]), "in the best evaluation"))
    held_out = run.best.held_out if run.best else {}
    if "estimated_return" in held_out:
        low, high, logged = (
            figure(held_out.get(name, math.nan))
            for name in ("estimated_low", "estimated_high", "logged_return")
        )
        rows = figure(held_out.get("effective_rows", math.nan))
        cards.append(
            _card(
                "return, estimated",
                figure(held_out["estimated_return"]),
                f"{low} to {high}, from {rows} dialogues; as logged {logged}",
            )
        )
    return cards


def _several(groups: Groups) -> Html:
    runs = groups.runs
    eyebrow = f"Raffia · report of {plural(len(runs), 'run')}"
    if len(groups) > 1:
        eyebrow += f" in {plural(len(groups), 'configuration')}"
    rows = [_run_row(index, run) for index, group in enumerate(groups) for run in group.runs]
    what = _measure(runs).removeprefix("mean ")
    heads = ["run", "seed", "state", f"best {what}", f"last {what}", "to target", "env steps"]
    heads += ["updates", "wall time", "env steps/s", "updates/s", "sims/s", "tokens/s", "restarts"]
    unsaid = ["to target", "env steps", "env steps/s", "sims/s", "tokens/s"]
    silent = {**dict.fromkeys(unsaid, NONE), "restarts": "0"}
    columns = dict(zip(heads, zip(*rows, strict=True), strict=True))
    without = [name for name in silent if {*columns[name]} == {silent[name]}]
    cards = [_group_card(index, group) for index, group in enumerate(groups)]
    cards += _range_cards(runs) if len(groups) == 1 else []
    return join(
        [
            el("p.eyebrow", eyebrow),
            el("h1", _title(runs)),
            el("p.about", " · ".join(dict.fromkeys([_machine(run) for run in runs]))),
            el("div.cards", *[card for card in cards if card]),
            table(heads, rows, numeric=range(3, len(heads)), without=without),
        ]
    )


def _title(runs: Sequence[Run]) -> str:
    names = list(dict.fromkeys([run.preset for run in runs if run.preset]))
    envs = list(dict.fromkeys([run.env for run in runs if run.env]))
    parts = [", ".join(some) for some in (names, envs) if some]
    parts = list(dict.fromkeys(parts))
    return " · ".join(parts) or ", ".join(dict.fromkeys(run.name for run in runs))


def _about(run: Run) -> str:
    seed = [f"seed {run.seed}"] if run.seed else []
    return " · ".join([str(run.folder), *seed, _machine(run)])


def _machine(run: Run) -> str:
    """Device, threads and versions, as far as files tell them."""
    start: dict[str, Any] = next(iter(run.of("start")), {})
    versions = run.about.get("versions")
    stated = {**start, **run.about, **(versions if isinstance(versions, dict) else {})}
    threads = run.config.get("num_threads", stated.get("num_threads"))
    parts = [str(run.config["device"])] if "device" in run.config else []
    parts += [plural(threads, "thread")] if threads is not None else []
    raffia = stated.get("raffia", stated.get("version"))
    parts += [f"raffia {raffia}"] if isinstance(raffia, str) else []
    known = ("torch", "numpy", "gymnasium", "python")
    parts += [f"{name} {stated[name]}" for name in known if isinstance(stated.get(name), str)]
    return " · ".join(parts) or "versions unknown"


def _card(label: str, value: str, below: str = "") -> Html:
    return el("div.card", el("span", label), el("b", value), el("span", below or Html("&nbsp;")))


def _at(found: EvaluationRow | None) -> str:
    if found is None:
        return "no evaluation yet"
    return f"at {count(found.progress)} {found.unit}, {duration(found.seconds)}"


def _measure(runs: Sequence[Run]) -> str:
    """The name of an evaluation's result."""
    kinds = {run.of_loss for run in runs if run.last}
    return "held-out loss" if kinds == {True} else "result" if len(kinds) > 1 else "mean return"


def _run_row(index: int, run: Run) -> list[str]:
    best, last, reached = run.best, run.last, run.reached
    missed = NONE if math.isnan(run.target_return) else "not reached"
    return [
        toned(tone(index), run.name),
        run.seed or NONE,
        state_pill(run),
        figure(best.mean) if best else NONE,
        figure(last.mean) if last else NONE,
        f"{count(reached.progress)} ({duration(reached.seconds)})" if reached else missed,
        count(run.env_step),
        count(run.update),
        duration(run.seconds),
        *(_rate(run, what) for what in ("env_steps", "updates", "simulations", "tokens")),
        str(run.num_restarts),
    ]


def _group_card(index: int, group: Group) -> Html | None:
    found = scores([group])
    if not found:
        return None
    num, what = found[0].num_runs, _measure(group.runs).removeprefix("mean ")
    below = f"last {what}, IQM of {num} runs, 95 %: {between(found[0].low, found[0].high)}"
    if num == 1:
        below = f"last {what}, 1 run"
    return _card(toned(tone(index), group.label), figure(found[0].last), below)


def _range_cards(runs: Sequence[Run]) -> list[Html]:
    """Cards of the medians and ranges over runs of one configuration."""
    ranges: list[tuple[str, list[float], Callable[[float], str]]] = [
        (f"best {_measure(runs)}", [run.best.mean for run in runs if run.best], figure),
        ("env steps / s", [_mean_rate(run, "env_steps") for run in runs], figure),
        ("tokens / s", [_mean_rate(run, "tokens") for run in runs], figure),
        ("wall time", [run.seconds for run in runs], duration),
    ]
    cards = []
    for label, found, write in ranges:
        values = sorted([value for value in found if not math.isnan(value)])
        if values:
            below = f"median; {write(values[0])} to {write(values[-1])}"
            cards.append(_card(label, write(statistics.median(values)), below))
    return cards


def _mean_rate(run: Run, what: str) -> float:
    """A rate over the whole run by what is counted."""
    total = {"env_steps": run.env_step, "updates": run.update}.get(what, math.nan)
    return rate(run, f"{what}_per_second", total)


def _rate(run: Run, what: str) -> str:
    return figure(_mean_rate(run, what))
