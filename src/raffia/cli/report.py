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
Write one HTML page about a run or several: learning curves with seeds and confidence band, losses,
rates, an episode, a searched tree, the settings. Of runs of ILQL also dialogues, each token in the
colour of its advantage, and methods and decodings in a table. Every figure is read from the files
of the runs, also while they train. The folder of a sweep stands for all its runs: settings by
their scores, and each run. The page holds all it needs: send it, open it anywhere.

writes RUN/report.html; of several runs, report.html in the folder that holds them; or --out."""
EXAMPLES = [
    "raffia report runs/cartpole-0",
    "raffia report runs/cartpole-*  # seeds become one curve with a band",
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
    parser.add_argument("runs", metavar="RUN", nargs="*", help="folders of runs, or of sweeps")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the page is written")
    args = parser.read(words)
    runs, missing, out = [], [], args.out
    for given in args.runs or [None]:
        sweep = None if given is None else runs_of_sweep(given)
        if sweep is None:
            runs.append(chosen_run(given, "report"))
            continue
        if not sweep[0]:
            raise UsageError(f"no run of {given} has begun", call("raffia", "resume", given))
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
    FileNotFoundError: gone is no run: it does not exist...
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
