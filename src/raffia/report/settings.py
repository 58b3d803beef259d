"""The configuration of runs, and the commands to type next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from raffia.draw.markup import Html, el, join
from raffia.report.folder import Run
from raffia.report.groups import Group, flat, preset_values, written
from raffia.report.markup import table, toned
from raffia.report.panel import tone
from raffia.report.plots import is_game

_MOST_SHOWN = 4  # runs of which commands are shown


def settings(groups: Sequence[Group], presets: Mapping[str, Mapping[str, Any]]) -> Html:
    """The whole config, with what differs from the preset marked."""
    parts = [el("h2", "Configuration")]
    for index, group in enumerate(groups):
        run = group.runs[0]
        if len(groups) > 1:
            parts.append(el("h3", toned(tone(index), group.label)))
        if group.settings is None:
            parts.append(el("p.missing", f"{run.name} has no config.json that could be read."))
            continue
        body = _setting_tables(run, preset_values(run, presets))
        if len(groups) > 1:
            body = el("details", el("summary", "All settings"), body)
        parts.append(body)
    return join(parts)


def commands(runs: Sequence[Run]) -> Html:
    """The commands to type next."""
    lines = []
    for run in runs[:_MOST_SHOWN]:
        if run.state not in ("finished", "target"):
            lines.append(run.call("resume"))
        how = ["--episodes", "1000" if run.of_dialogues else "100"]
        records = run.records and not run.of_dialogues
        lines.append(run.call("evaluate", *how, *(["--record"] if records else [])))
        if is_game([run]):
            lines.append(run.call("play"))
    lines.append("raffia report " + " ".join([shlex.quote(str(run.folder)) for run in runs]))
    return join([el("h2", "Commands"), el("pre", "\n".join(lines))])


def _setting_tables(run: Run, preset: Mapping[str, Any] | None) -> Html:
    if not run.preset:
        text = "No preset was named."
    elif preset is None:
        text = f"What preset {run.preset} sets is not recorded, so nothing is marked."
    elif preset:
        text = join(
            [el("mark", "Marked"), f": other than in preset {run.preset}, which has it below."]
        )
    else:
        text = f"As preset {run.preset} has it."
    sections: dict[str, list[list[str]]] = {}
    for name, value in flat(run.config).items():
        section, _, rest = name.rpartition(".")
        changed = preset is not None and name in preset
        shown = (
            join([el("mark", written(value)), f" ({written((preset or {})[name])})"])
            if changed
            else written(value)
        )
        sections.setdefault(section or "run", []).append([el("code", rest), shown])
    tables = [table([], rows, caption=section) for section, rows in sections.items()]
    return join([el("p.faint", text), el("div.settings", *tables)])
