"""What does a step of a whole population cost, beside its members' steps one after the other?

    python -m benchmarks.population [--rounds N] [--quick] [--ops REGEX] [--cpu]
        [--agilerl-python PATH] [--markdown FILE]

A step is gradients of a shared batch and the optimiser's step. `one` is our own learner alone, `P
steps` are P of them with states of their own, `ours` is `Population` as it is and `vmap` the same
with all of it under `torch.vmap`. All take turns, ours in one process. AgileRL's column is there
where its environment is given, which benchmarks/README.md says how to make.
"""

import argparse
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # run by its path: this folder heads sys.path, and tensordict.py hides the peer
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.ilql import INSTALL
from benchmarks.population_cases import KINDS, Kind, one_after_the_other
from benchmarks.search_report import digits, markdown_table
from benchmarks.search_worker import Worker
from benchmarks.timing import paired_ratio, take_turns

if TYPE_CHECKING:  # imports what it measures
    from benchmarks.population_ours import Steps, Took

BLOCK = 0.1  # seconds
PATIENCE = 15.0  # CPU seconds for the rounds of one number of members
DEFAULT = "ours"  # what Population does by default: by this the aims are judged
THREADS = (1, 2)


@dataclass(frozen=True)
class Row:
    """A number of members on so many threads."""

    kind: Kind
    members: int
    threads: int
    clock: str
    took: dict[str, list["Took"]]  # of each side, one a round

    @property
    def name(self) -> str:
        return name_of(self.kind, self.members, self.threads)

    def seconds(self, side: str, clock: str = "") -> list[float]:
        """AgileRL's ILQL is of one model, and every other one takes as long."""
        found = [getattr(took, clock or self.clock) for took in self.took[side]]
        times = self.members if side == "agilerl" and self.kind.name == "gpt" else 1
        return [times * seconds for seconds in found]

    def ratio(self, side: str, to: str, clock: str = "") -> tuple[float, float]:
        return paired_ratio(self.seconds(side, clock), self.seconds(to, clock))

    def shown(self, side: str) -> str:
        if side not in self.took:
            return "-"
        return digits(1e3 * statistics.median(self.seconds(side)))

    def with_grads(self, side: str) -> str:
        """The time, with the gradients' fraction in brackets."""
        shares = [took.grads / took.wall for took in self.took[side]]
        return f"{self.shown(side)} ({statistics.median(shares):.0%})"

    def cells(self) -> list[str]:
        alone, spread = self.ratio(DEFAULT, "one")
        ratios = [
            f"{alone:.2f}",
            f"{spread:.2f}",
            f"{self.ratio('vmap', 'one')[0]:.2f}",
            f"{self.ratio(DEFAULT, 'one', 'cpu')[0]:.2f}",
            f"{self.ratio(DEFAULT, 'steps')[0]:.2f}",
        ]
        peer = f"{self.ratio('agilerl', DEFAULT)[0]:.2f}" if "agilerl" in self.took else "-"
        return [
            self.name,
            *(self.shown(side) for side in ("one", "steps")),
            *(self.with_grads(side) for side in ("ours", "vmap")),
            *ratios,
            self.shown("agilerl"),
            peer,
            self.verdict(),
        ]

    def verdict(self) -> str:
        if self.kind.aim is None or self.kind.aim[0] != self.members:
            return ""
        bound = self.kind.aim[1]
        reached, _ = self.ratio(DEFAULT, "steps" if self.kind.of_sum else "one")
        return f"{'pass' if reached <= bound else 'FAIL'} ({bound:g})"


HEADER = [
    *("members", "one ms", "P steps ms", "ours ms (gradients)", "vmap ms (same)"),
    *(
        "ours / one",
        "+-",
        "vmap / one",
        "ours / one, CPU",
        "ours / P steps",
        "AgileRL ms",
        "x AgileRL",
        "aim",
    ),
]
WIDTHS = [22, 9, 12, 21, 16, 12, 7, 12, 17, 16, 12, 11, 12]


def name_of(kind: Kind, members: int, threads: int) -> str:
    """
    >>> name_of(KINDS[0], 8, 1)
    'cartpole 8, 1 thread'
    """
    return f"{kind.name} {members}, {threads} thread{'s'[: threads > 1]}"


def line(cells: Sequence[str], widths: Sequence[int] = WIDTHS) -> str:
    rest = "".join(cell.rjust(w) for cell, w in zip(cells[1:], widths[1:], strict=True))
    return cells[0].ljust(widths[0]) + rest


def measure(
    kind: Kind,
    members: int,
    all_threads: Sequence[int],
    worker: Worker | None,
    rounds: int,
    clock: str,
) -> Iterator[Row]:
    """A row for each number of threads; the states are the same ones."""
    import torch

    from benchmarks.population_ours import steps_of

    sides = steps_of(kind.name, members)
    case = one_after_the_other(kind.name, members)
    for threads in all_threads:
        torch.set_num_threads(threads)
        blocks: dict[str, Callable[[], Any]] = {}
        for side, steps in sides.items():
            steps()  # compiles at first use
            blocks[side] = partial(steps.timed, calls_of(steps.timed(1).wall))
        if worker is not None:
            worker.ask("threads", num=threads)
            blocks["agilerl"] = partial(worker.block, case, calls_of(worker.make(case)))
        took: dict[str, list[Any]] = take_turns(blocks, rounds, least=2, patience=PATIENCE)
        yield Row(kind, members, threads, clock, took)
    torch.set_num_threads(1)


def calls_of(seconds: float) -> int:
    """That fill a block."""
    return max(1, round(BLOCK / seconds))


# -- kernels

KERNEL_HEADER = ["kernels", "members", "one", "P steps", "ours", "vmap", "vmap / one", "estimate"]


def kernels(kind: Kind) -> list[str]:
    """Of a step: what a GPU has to start, and what that would give where starting is what counts.

    An estimate: the operations that reach the CPU here are not all those that a GPU would see, and
    it holds as long as a kernel of all members takes no longer than it takes to start the next.
    """
    from benchmarks.population_ours import count_kernels, steps_of

    members = kind.aim[0] if kind.aim else 8
    sides: dict[str, Steps] = steps_of(kind.name, members)
    num = {side: count_kernels(steps) for side, steps in sides.items()}
    ratio = num["vmap"] / num["one"]
    counts = [f"{num[side]:,}" for side in ("one", "steps", "ours", "vmap")]
    faster = f"{num['steps'] / num['vmap']:.1f}x P steps' speed"
    return [kind.name, str(members), *counts, f"{ratio:.2f}", faster]


# -- acting

ACTING_HEADER = [
    *("acting, 8 members", "one member ms", "one search ms", "8 searches ms", "vmap ms"),
    *("8 searches / one search", "one search / one member"),
]
ACTING_ROWS = (1, 8, 32)  # environments of each member


def acting_table(args: argparse.Namespace) -> list[list[str]]:
    """A move of all members, of 25 simulations: CPU time on one thread."""
    from benchmarks.population_ours import Searches

    table = [ACTING_HEADER]
    for rows in ACTING_ROWS:
        if not re.search(args.ops, f"acting {rows}") or args.quick:
            continue
        sides = Searches(8, rows)
        named = [sides.alone, sides.one_search, sides.searches, sides.vmapped]
        took: list[list[float]] = [[] for _ in named]
        for number in range(args.rounds + 1):
            for call, seconds in zip(named, took, strict=True):
                start = time.process_time()
                call()
                if number:  # the first is compiled
                    seconds.append(time.process_time() - start)
        alone, one, each, _ = took
        table.append(
            [
                f"{rows} environments each",
                *(digits(1e3 * statistics.median(seconds)) for seconds in took),
                f"{paired_ratio(each, one)[0]:.2f}",
                f"{paired_ratio(one, alone)[0]:.2f}",
            ]
        )
        if len(table) == 2:
            print(*ACTING_HEADER, sep=" | ")
        print(*table[-1], sep=" | ", flush=True)
    return table if len(table) > 1 else []


# -- the command


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ops", metavar="REGEX", default="", help="only what matches: 'dqn 32', 'kernels', ..."
    )
    parser.add_argument("--rounds", type=int, metavar="N", default=5)
    parser.add_argument(
        "--quick", action="store_true", help="a rough look: the numbers with an aim, one thread"
    )
    parser.add_argument("--cpu", action="store_true", help="CPU time in place of wall time")
    parser.add_argument("--agilerl-python", type=Path, metavar="PATH", help="of its environment")
    parser.add_argument("--loud", action="store_true", help="show what AgileRL prints")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there")
    return parser.parse_args(argv)


def check_peer(python: Path | None) -> None:
    if python is None:
        print(INSTALL)
    elif not python.exists():
        raise SystemExit(f"--agilerl-python {python}: no such file")


def setting(args: argparse.Namespace) -> str:
    import torch

    peer = ""
    if args.agilerl_python is not None:
        with Worker("benchmarks.population_agilerl", args.agilerl_python.absolute()) as worker:
            found = worker.ask("versions")
        peer = "agilerl: " + ", ".join(f"{name} {v}" for name, v in found.items()) + "; "
    return (
        f"ours: torch {torch.__version__}; {peer}Python {platform.python_version()}, "
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; "
        f"{'CPU' if args.cpu else 'wall'} time, medians of {args.rounds} rounds"
    )


def chosen(args: argparse.Namespace) -> Iterator[tuple[Kind, int, list[int]]]:
    """Kinds, numbers of members and of threads."""
    for kind in KINDS:
        for members in kind.members:
            if args.quick and (kind.aim is None or kind.aim[0] != members):
                continue
            threads = [
                num
                for num in (THREADS[:1] if args.quick else THREADS)
                if re.search(args.ops, name_of(kind, members, num))
            ]
            if threads:
                yield kind, members, threads


def kernel_table(args: argparse.Namespace) -> list[list[str]]:
    wanted = [kind for kind in KINDS if re.search(args.ops, f"kernels {kind.name}")]
    if wanted:
        print(*KERNEL_HEADER, sep=" | ")
    rows = [KERNEL_HEADER] if wanted else []
    for kind in wanted:
        rows.append(kernels(kind))
        print(*rows[-1], sep=" | ", flush=True)
    return rows


def peer_of(kind: Kind, args: argparse.Namespace, exits: ExitStack) -> Worker | None:
    """A new process of AgileRL's, where it has such a learner."""
    if not kind.peer or args.agilerl_python is None:
        return None
    python = args.agilerl_python.absolute()
    return exits.enter_context(Worker("benchmarks.population_agilerl", python, args.loud))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    check_peer(args.agilerl_python)
    where = setting(args)
    print(where, line(HEADER), sep="\n", flush=True)
    rows: list[Row] = []
    failures: list[str] = []
    clock = "cpu" if args.cpu else "wall"
    for kind, members, threads in chosen(args):
        with ExitStack() as exits:
            worker = peer_of(kind, args, exits)
            try:
                for row in measure(kind, members, threads, worker, args.rounds, clock):
                    rows.append(row)
                    print(line(row.cells()), flush=True)
            except RuntimeError as error:  # which must not hide the rest
                failures.append(f"failed: {kind.name} {members}: {error}")
                print(failures[-1], flush=True)
    texts = [where]
    if rows:
        texts.append(markdown_table([HEADER, *(row.cells() for row in rows)]))
    if table := kernel_table(args):
        texts.append(markdown_table(table))
    if table := acting_table(args):
        texts.append(markdown_table(table))
    load = f"load at the end {os.getloadavg()[0]:.1f}"
    print(load)
    if args.markdown:
        args.markdown.write_text("\n\n".join(text.strip() for text in [*texts, load, *failures]))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
