"""How fast is a whole search: ours, LightZero's with its C++ tree, mctx's compiled by jax?

    python -m benchmarks.search [--only null|mlp|sampled|conv] [--ops REGEX] [--quick] [--wall]
        [--lightzero-python PATH] [--mctx-python PATH] [--json FILE] [--markdown FILE]
    python -m benchmarks.search --check-lightzero --lightzero-python PATH

Times are those of root and simulations together, in milliseconds of CPU time on one thread, and in
brackets what of it is model/tree/glue. The peers need other packages than we do, so each has a
virtual environment of its own; benchmarks/README.md says how to make them.
"""

import argparse
import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

if not __package__:  # run by its path: this folder heads sys.path, and tensordict.py hides the peer
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.search_cases import BATCHES, aims_of, cases, rough
from benchmarks.search_report import HEADER, as_json, cells, line, markdown, summary
from benchmarks.search_row import QUICK, Effort, Row, measure
from benchmarks.search_worker import Worker

INSTALL = {  # README.md says more
    "lightzero": """lightzero is absent. To install it, with Python 3.11:
    python3.11 -m venv ~/lightzero && ~/lightzero/bin/pip install torch==2.13.0
    ~/lightzero/bin/pip install --no-deps -r benchmarks/lightzero_requirements.txt
and pass --lightzero-python ~/lightzero/bin/python""",
    "mctx": """mctx is absent. To install it:
    python3.11 -m venv ~/mctx && ~/mctx/bin/pip install mctx==0.0.71 jax==0.10.2
and pass --mctx-python ~/mctx/bin/python""",
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=tuple(BATCHES), help="searches with this model")
    parser.add_argument("--ops", metavar="REGEX", default="", help="only searches that match")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"default {Effort.rounds}")
    parser.add_argument("--quick", action="store_true", help="a rough look: few cases, few rounds")
    parser.add_argument("--wall", action="store_true", help="wall time in place of CPU time")
    parser.add_argument("--lightzero-python", type=Path, metavar="PATH", help="of its environment")
    parser.add_argument("--mctx-python", type=Path, metavar="PATH", help="of its environment")
    parser.add_argument("--loud", action="store_true", help="show what the packages print")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument(
        "--check-lightzero",
        action="store_true",
        help="no timing: hold our models against LightZero's, after loading its weights",
    )
    return parser.parse_args(argv)


def start(args: argparse.Namespace, exits: ExitStack) -> dict[str, Worker]:
    """One process per installed package."""
    pythons = {
        "ours": Path(sys.executable),
        "lightzero": args.lightzero_python,
        "mctx": args.mctx_python,
    }
    workers = {}
    for name, python in pythons.items():
        if python is None:
            print(INSTALL[name])
        elif not python.exists():
            raise SystemExit(f"--{name}-python {python}: no such file")
        else:
            worker = Worker(f"benchmarks.search_{name}", python.absolute(), args.loud)
            workers[name] = exits.enter_context(worker)
    return workers


def setting(workers: dict[str, Worker]) -> str:
    found = {k: v for w in workers.values() for k, v in w.ask("versions").items()}
    versions = ", ".join(f"{package} {version}" for package, version in found.items())
    return (
        f"{versions}; Python {platform.python_version()}, {platform.machine()}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )


def measured(args: argparse.Namespace, workers: dict[str, Worker]) -> Iterator[Row]:
    effort = QUICK if args.quick else Effort()
    if args.rounds:
        effort = Effort(args.rounds, effort.seconds, effort.patience)
    chosen = [c for c in cases() if args.only in (None, c.model) and re.search(args.ops, c.name)]
    if args.quick:
        chosen = [c for c in chosen if rough(c)]
    if not chosen:
        raise SystemExit(f"no search matches --ops {args.ops!r}; try --ops 'mlp.*n=50'")
    for case in chosen:
        yield measure(case, workers, effort, "wall" if args.wall else "cpu")


def check_lightzero(args: argparse.Namespace) -> int:
    from benchmarks.search_check import check  # imports what it checks

    if args.lightzero_python is None:
        raise SystemExit(INSTALL["lightzero"])
    python = args.lightzero_python.absolute()
    with Worker("benchmarks.search_lightzero", python, args.loud) as worker:
        return check(worker)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.check_lightzero:
        return check_lightzero(args)
    rows = []
    with ExitStack() as exits:
        workers = start(args, exits)
        where = setting(workers)
        print(where)
        print(line(HEADER))
        for row in measured(args, workers):
            rows.append(row)
            print(line(cells(row)), flush=True)
    reached = [(row, aim) for row in rows for aim in aims_of(row.case)]
    print(summary(rows, reached))
    if args.json:
        args.json.write_text(as_json(where, rows, reached))
    if args.markdown:
        args.markdown.write_text(markdown(where, rows, reached))
    return 1 if any(row.failures for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
