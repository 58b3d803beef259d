"""The page of a report: one file that needs nothing beside it.

It ends with the configuration of its runs, and the commands to type next.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raffia.draw.markup import Html, el, join
from raffia.files import make_folder, write_atomically
from raffia.report.artifacts import checkpoints, played_sections
from raffia.report.dialogues import dialogues
from raffia.report.folder import PLAYED_BY_PEOPLE, Run, read_run
from raffia.report.groups import Groups, flat, grouped, preset_values, written
from raffia.report.heads import head
from raffia.report.markup import table, toned
from raffia.report.methods import methods
from raffia.report.panel import tone
from raffia.report.plots import bad_numbers
from raffia.report.population import populations
from raffia.report.scores import ranking
from raffia.report.sections import learning, speed, training
from raffia.report.style import STYLE

_MOST_SHOWN = 4  # runs of which commands are shown


def page(
    runs: Sequence[Run],
    path: Path,  # where the page will stand: links are relative to it
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    missing: Sequence[str] = (),
) -> str:
    """The HTML of a report; the same files give the same bytes."""
    groups = grouped(runs)
    notes: list[str] = list(missing)
    body = [
        learning(groups, notes),
        ranking(groups),
        methods(groups, notes),
        populations(groups, notes),
        dialogues(groups, notes),
        training(groups, notes),
        speed(groups),
        played_sections(groups, path, notes),
        checkpoints(runs),
        _settings(groups, presets or {}),
        _commands(runs),
    ]
    run_notes = [(run, note) for run in runs for note in (*run.notes, *bad_numbers(run))]
    several = len(runs) > 1
    notes = [f"{run.name}: {note}" if several else note for run, note in run_notes] + notes
    title = "Raffia: " + ", ".join(dict.fromkeys(run.name for run in runs))
    top = [
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", title),
        el("style", Html(STYLE)),
    ]
    main = el("main", head(groups), _notes(notes), *body, el("footer", _FOOTER))
    document = el("html", el("head", *top), el("body", main), lang="en")
    return f"<!DOCTYPE html>\n{document}\n"


def write_report(
    runs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str] | None = None,
    *,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    missing: Sequence[str] = (),
) -> Path:
    """Write the page of one run, or of several side by side; gives where it stands.

    out: the file. By default `report.html` in the run's folder; of several runs, in the folder that
        holds them all.
    presets: whole configs by the names of presets, to mark what a run has otherwise; not needed
        for runs that record it themselves.
    missing: further lines of what is missing, such as runs that have not begun.
    Raises FileNotFoundError, with the runs nearby, if a folder is not a run's.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows = '{"kind": "evaluate", "env_step": 9, "seconds": 2, "mean_return": 7}\\n'
    ...     _ = Path(folder, "metrics.jsonl").write_text(rows)
    ...     text = write_report([folder]).read_text()
    >>> "best mean return" in text, "<script" in text
    (True, False)
    """
    if not runs:
        raise ValueError("no runs were given: raffia report RUN...")
    folders = list({Path(run).resolve(): Path(run) for run in runs}.values())
    found = [read_run(folder) for folder in folders]
    path = Path(out) if out is not None else _default(folders)
    text = page(found, path.resolve(), presets, missing)
    make_folder(path.parent)
    # All at once: whoever has the old page open never loads half of the new one.
    write_atomically(path, text.encode("utf-8", "replace"))  # of half a surrogate pair, "?"
    return path


_FOOTER = (
    "All figures were read from the files of the runs. Wall time is the sum of all sessions; "
    "rates are averages over it, evaluation included."
)


def _default(folders: Sequence[Path]) -> Path:
    if len(folders) == 1:
        return folders[0] / "report.html"
    above = os.path.commonpath([folder.resolve().parent for folder in folders])
    return Path(os.path.relpath(above)) / "report.html"


def _notes(notes: Sequence[str]) -> Html:
    if not notes:
        return Html("")
    items = [el("li", note) for note in dict.fromkeys(notes)]
    return el("div.notes", el("b", "Missing or damaged"), el("ul", *items))


def _settings(groups: Groups, presets: Mapping[str, Mapping[str, Any]]) -> Html:
    """The whole config, with what differs from the preset marked."""
    parts = [el("h2", "Configuration")]
    for index, group in enumerate(groups):
        run = group.runs[0]
        if len(groups) > 1:
            parts.append(el("h3", toned(tone(index), group.label)))
        if group.settings is None:
            parts.append(el("p.missing", f"{run.name} has no readable config.json."))
            continue
        body = _setting_tables(run, preset_values(run, presets))
        if len(groups) > 1:
            body = el("details", el("summary", "All settings"), body)
        parts.append(body)
    return join(parts)


def _commands(runs: Sequence[Run]) -> Html:
    """The commands to type next."""
    lines = []
    for run in runs[:_MOST_SHOWN]:
        if run.state not in ("finished", "target"):
            lines.append(run.call("resume"))
        how = ["--episodes", "1000" if run.of_dialogues else "100"]
        records = run.records and not run.of_dialogues
        lines.append(run.call("evaluate", *how, *(["--record"] if records else [])))
        if run.env in PLAYED_BY_PEOPLE:
            lines.append(run.call("play"))
    lines.append("raffia report " + " ".join([shlex.quote(str(run.folder)) for run in runs]))
    return join([el("h2", "Commands"), el("pre", "\n".join(lines))])


def _setting_tables(run: Run, preset: Mapping[str, Any] | None) -> Html:
    if not run.preset:
        text = "The run was trained without a preset."
    elif preset is None:
        text = (
            f"The values of preset {run.preset} were not recorded, so differences are not marked."
        )
    elif preset:
        text = join(
            [
                el("mark", "Marked"),
                (f": differs from preset {run.preset}, whose value is shown below."),
            ]
        )
    else:
        text = f"As in preset {run.preset}."
    by_section: dict[str, list[list[str]]] = {}
    for name, value in flat(run.config).items():
        section, _, rest = name.rpartition(".")
        changed = preset is not None and name in preset
        shown = (
            join([el("mark", written(value)), f" ({written((preset or {})[name])})"])
            if changed
            else written(value)
        )
        by_section.setdefault(section or "run", []).append([el("code", rest), shown])
    tables = [table([], rows, caption=section) for section, rows in by_section.items()]
    return join([el("p.faint", text), el("div.settings", *tables)])
