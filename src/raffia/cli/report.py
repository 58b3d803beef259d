"""raffia report: runs on one page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from raffia.cli.parser import Parser, UsageError
from raffia.cli.runs import chosen_run
from raffia.cli.style import call, paint
from raffia.report.folder import runs_of_sweep

ABOUT = """\
Write one HTML page about one or more runs: learning curves over seeds with confidence bands,
losses, rates, an episode, a search tree, and the settings. For ILQL runs also dialogues, with
tokens coloured by advantage, and a table of methods and decodings. All figures are read from the
run folders, also during training. For the folder of a sweep, the page ranks the settings by score
and lists each run. The page is self-contained.

Writes RUN/report.html for one run, report.html in the common folder for several, or --out."""
EXAMPLES = [
    "raffia report runs/cartpole-0",
    "raffia report runs/cartpole-*  # one curve with a band over the seeds",
    "raffia report runs/cartpole-0 runs/cartpole-gumbel-0 --out compared.html",
    "raffia report sweeps/lr  # all runs of a sweep",
    "raffia report runs/wordle-*  # ILQL, behaviour cloning ... in one table",
]


def report(words: Sequence[str]) -> int:
    """`raffia report RUN...`

    >>> report(["--outt=page.html"])
    Traceback (most recent call last):
        ...
    raffia.cli.parser.UsageError: raffia report has no --outt=page.html; did you mean --out?
    """
    parser = Parser("raffia report", ABOUT, EXAMPLES)
    parser.add_argument("runs", metavar="RUN", nargs="*", help="folders of runs or sweeps")
    parser.flag("--out FILE", "file to write", Path)
    args = parser.read(words)
    runs, missing, out = [], [], args.out
    if out is not None and out.is_dir():
        page = call("raffia", "report", *args.runs, "--out", out / "report.html")
        raise UsageError(f"--out {out} is a folder; name the file to write", page)
    for given in args.runs or [None]:
        sweep = None if given is None else runs_of_sweep(given)
        if sweep is None:
            runs.append(chosen_run(given, "report"))
            continue
        if not sweep[0]:
            raise UsageError(f"no run in {given} has started yet", call("raffia", "resume", given))
        runs += sweep[0]
        missing += sweep[1]
        if len(args.runs) == 1:
            out = out or Path(given) / "report.html"
    print(f"wrote {paint(str(write_page(runs, out, missing)), 'cyan', sys.stdout)}")
    return 0


def write_page(runs: Sequence[Path], out: Path | None = None, missing: Sequence[str] = ()) -> Path:
    """The page of these runs; what they have otherwise than their presets is marked.

    >>> write_page([Path("gone")])
    Traceback (most recent call last):
        ...
    FileNotFoundError: gone is not a run folder: it does not exist...
    """
    from raffia.recipes.algorithm import ALGORITHMS
    from raffia.report.page import write_report
    from raffia.train.config import to_json

    presets = {
        name: to_json(config)
        for algorithm in ALGORITHMS.values()
        for name, config in algorithm.presets.items()
    }
    return write_report(runs, out, presets=presets, missing=missing)
