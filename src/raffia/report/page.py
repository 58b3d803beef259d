"""The page of a report: one file that needs nothing beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raffia.draw.markup import Html, el
from raffia.files import make_folder, write_atomically
from raffia.report import compared, dialogues, population, sections, settings, things
from raffia.report.folder import Run, read_run
from raffia.report.groups import grouped
from raffia.report.heads import head
from raffia.report.plots import bad_numbers
from raffia.report.scores import ranking
from raffia.report.style import STYLE


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
        sections.learning(groups, notes),
        ranking(groups),
        compared.methods(groups, notes),
        population.populations(groups, notes),
        dialogues.dialogues(groups, notes),
        sections.training(groups, notes),
        sections.speed(groups),
        things.played_sections(groups, path, notes),
        things.checkpoints(runs),
        settings.settings(groups, presets or {}),
        settings.commands(runs),
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
    Raises FileNotFoundError, with the runs nearby, if a folder is no run's.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows = '{"kind": "evaluate", "env_step": 9, "seconds": 2, "mean_return": 7}\\n'
    ...     _ = Path(folder, "metrics.jsonl").write_text(rows)
    ...     text = write_report([folder]).read_text()
    >>> "best mean return" in text, "<script" in text
    (True, False)
    """
    if not runs:
        raise ValueError("no run was named; raffia report RUN...")
    folders = list({Path(run).resolve(): Path(run) for run in runs}.values())
    found = [read_run(folder) for folder in folders]
    path = Path(out) if out is not None else _default(folders)
    text = page(found, path.resolve(), presets, missing)
    make_folder(path.parent)
    # All at once: whoever has the old page open never loads half of the new one.
    write_atomically(path, text.encode("utf-8", "replace"))  # of half a surrogate pair, "?"
    return path


_FOOTER = (
    "Every figure was read from the files of the runs. Wall time is that of all sessions together; "
    "rates are over all of it, evaluation included."
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
