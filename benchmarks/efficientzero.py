"""Where does the time of EfficientZero's training go, and how fast is it beside LightZero's?

    python -m benchmarks.efficientzero [--preset NAME] [--ops REGEX] [--rounds N] [--wall]
        [--conv-batch N] [--lightzero-python PATH] [--markdown FILE]

The first table is of a preset's own sizes: a turn of collecting, making a batch with all policies
as stored and with all of them reanalyzed, gradients, the optimiser's step. The second one is of
updates, of acting and of both together, at the sizes of LightZero's configurations; its column is
there where LightZero's environment is given, which benchmarks/README.md says how to make. Times are
CPU time of one thread, the medians of rounds in which all take turns.
"""

import argparse
import os
import platform
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run by its path: this folder heads sys.path, and tensordict.py hides the peer
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.search_models import NUM_ACTIONS
from benchmarks.search_report import digits, markdown_table
from benchmarks.search_worker import Case, Worker, clocked
from benchmarks.timing import Times, paired_ratio, take_turns

# The workers read these, LightZero's too, where raffia is not: import it in functions only.
IMAGE: dict[str, Any] = {"observation_shape": (4, 64, 64), "downsample": True}  # as for Atari
IMAGE_SUPPORT, IMAGE_ACTIONS, NUM_IMAGE_PARAMETERS = 101, 6, 11_099_072
MAX_EPISODE_STEPS = 200  # of CartPole-v0
TEMPERATURE = 0.25  # of actions
UPDATES_PER_ENV_STEP = 500 / 3_400  # as LightZero had made them when it reached a return of 200

UNROLLED, SIMULATIONS = 5, 25
WHOLE_STEPS = 100  # of the environments, in a block of training: about so many
AIM = 3.0  # times LightZero's speed, end to end
BLOCK = 0.5  # seconds
CONV_ROUNDS = 3
INSTALL = """lightzero is absent: its virtual environment is made as for benchmarks.search, and then
    ~/lightzero/bin/pip install --no-deps gymnasium==1.4.0 Farama-Notifications==0.0.6
and passed by --lightzero-python ~/lightzero/bin/python"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    from raffia.recipes.efficientzero.presets import PRESETS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="cartpole", help="of the first table")
    parser.add_argument("--ops", metavar="REGEX", default="", help="only what matches, 'parts' too")
    parser.add_argument("--rounds", type=int, metavar="N", default=7)
    parser.add_argument("--wall", action="store_true", help="wall time in place of CPU time")
    parser.add_argument(
        "--conv-batch", type=int, metavar="N", default=256, help="smaller is quicker; 0: none"
    )
    parser.add_argument("--lightzero-python", type=Path, metavar="PATH", help="of its environment")
    parser.add_argument("--loud", action="store_true", help="show what the packages print")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there")
    return parser.parse_args(argv)


# -- the first table


def parts_table(preset: str, rounds: int, clock: str) -> list[list[str]]:
    """Where the time of a preset goes."""
    import torch

    from benchmarks.efficientzero_ours import Parts  # imports what it measures

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        parts = Parts(preset, Path(folder))
        calls: dict[str, Callable[[], object]] = {
            "collect": parts.collect,
            "targets": lambda: parts.targets(0.0),
            "targets, all reanalyzed": lambda: parts.targets(1.0),
            "gradients": parts.grads,
            "optimiser": parts.apply,
        }
        searched = {  # the first calls, which compile
            "collect": parts.simulations(parts.run.actor, calls["collect"]),
            "targets, all reanalyzed": parts.simulations(
                parts.reanalyze_planners[1.0], calls["targets, all reanalyzed"]
            ),
        }
        times = take_turns(
            {
                name: lambda call=call: getattr(clocked(call, 1), clock)
                for name, call in calls.items()
            },
            rounds,
        )
        parts.run.close()
    seconds = {name: statistics.median(found) for name, found in times.items()}
    config = parts.config
    steps = config.env.num_envs * config.collect.rollout_length
    table = [[f"`{preset}`", "ms", "each second"]]
    for name, taken in seconds.items():
        rates = [f"{steps / taken:,.0f} env steps" if name == "collect" else f"{1 / taken:,.1f}"]
        if name in searched:
            rates.append(f"{searched[name] / taken:,.0f} simulations")
        table.append([name, digits(1e3 * taken), ", ".join(rates)])
    share = config.targets.reanalyze_ratio
    extra = seconds["targets, all reanalyzed"] - seconds["targets"]
    update = seconds["targets"] + share * extra + seconds["gradients"] + seconds["optimiser"]
    whole = seconds["collect"] / steps + config.collect.updates_per_env_step * update
    return [
        *table,
        [f"an update (reanalyze {share})", digits(1e3 * update), f"{1 / update:,.1f}"],
        ["an env step with all that goes with it", digits(1e3 * whole), f"{1 / whole:,.0f}"],
    ]


# -- the second table

Share = tuple[Case, float]  # ... of how many calls for one update, or one environment step


@dataclass(frozen=True)
class Operation:
    """A row of the table: the cases that make up a unit, on each side."""

    name: str
    ours: tuple[Share, ...]
    lightzero: tuple[Share, ...]
    unit: str = "env steps/s"  # or ms
    aim: float | None = None

    def of(self, side: str) -> tuple[Share, ...]:
        return {"ours": self.ours, "lightzero": self.lightzero}[side]


@dataclass(frozen=True)
class Row:
    operation: Operation
    seconds: Times  # of a unit, of each side that there is, one a round

    def shown(self, side: str) -> str:
        if side not in self.seconds:
            return "-"
        median = statistics.median(self.seconds[side])
        return digits(1e3 * median if self.operation.unit == "ms" else 1 / median)

    def ratio(self) -> tuple[float, float] | None:
        """How many times as fast ours is, and the spread."""
        if len(self.seconds) < 2:
            return None
        return paired_ratio(self.seconds["lightzero"], self.seconds["ours"])

    def cells(self) -> list[str]:
        ratio = self.ratio()
        ratios = [f"{ratio[0]:.2f}", f"{ratio[1]:.2f}"] if ratio else ["-", ""]
        name, unit, aim = self.operation.name, self.operation.unit, self.operation.aim
        verdict = ""
        if aim is not None:
            verdict = f"{self.verdict(ratio, aim)} ({aim:g})"
        return [name, unit, self.shown("ours"), self.shown("lightzero"), *ratios, verdict]

    @staticmethod
    def verdict(ratio: tuple[float, float] | None, aim: float) -> str:
        if ratio is None:
            return "not measured"
        return "pass" if ratio[0] >= aim else "FAIL"


HEADER = ["operation", "unit", "ours", "LightZero", "x LightZero", "+-", "aim"]


def act(num_envs: int) -> Case:
    return Case("mlp", num_envs, SIMULATIONS, NUM_ACTIONS["mlp"], policy="act")


UPDATE = Case("mlp", 256, UNROLLED, NUM_ACTIONS["mlp"], policy="update")


def update(name: str, case: Case) -> Operation:
    return Operation(f"update, {name}, batch {case.batch}", ((case, 1),), ((case, 1),), "ms")


def acting(num_envs: int) -> Operation:
    share = (act(num_envs), 1 / num_envs)
    return Operation(f"acting, {num_envs} environments", (share,), (share,))


def training(policy: str, name: str, updates_per_env_step: float) -> Operation:
    """Ours is the loop itself, LightZero's is put together."""
    num_updates = round(WHOLE_STEPS * updates_per_env_step)
    if policy == "train":  # a block is of whole turns: 20 updates and 136 steps in 8 environments
        num_updates = 20
    case = Case("mlp", 0, num_updates, NUM_ACTIONS["mlp"], policy=policy)
    steps = num_updates / updates_per_env_step
    theirs = ((act(8), 1 / 8), (UPDATE, UPDATES_PER_ENV_STEP))
    return Operation(f"end to end, {name}", ((case, 1 / steps),), theirs, aim=AIM)


def groups(conv_batch: int) -> list[tuple[list[Operation], int]]:
    """What is timed together, and in how many rounds at most."""
    from raffia.recipes.efficientzero.presets import PRESETS

    ratio = PRESETS["cartpole"].collect.updates_per_env_step
    conv = Case("conv", conv_batch, UNROLLED, IMAGE_ACTIONS, policy="update")
    whole = [
        training("train", "the same sizes", UPDATES_PER_ENV_STEP),
        training("preset", "preset `cartpole`", ratio),
    ]
    return [
        ([update("MLP", UPDATE)], sys.maxsize),
        ([update("4x64x64", conv)] if conv_batch else [], CONV_ROUNDS),
        ([acting(8)], sys.maxsize),
        ([acting(32)], sys.maxsize),
        (whole, sys.maxsize),
    ]


def measure(
    operations: Sequence[Operation], workers: dict[str, Worker], rounds: int, clock: str
) -> tuple[list[Row], list[str]]:
    """Rows, and what failed, which must not hide the rest."""
    cases = dict.fromkeys((s, case) for op in operations for s in workers for case, _ in op.of(s))
    blocks: dict[Any, Callable[[], float]] = {}
    failures = []
    for side, case in cases:
        try:
            num_calls = max(1, round(BLOCK / workers[side].make(case)))
        except RuntimeError as error:
            failures.append(f"failed: {case.policy} {case.name}, {side}: {error}")
            continue

        def block(worker: Worker = workers[side], case: Case = case, num: int = num_calls) -> float:
            return getattr(worker.block(case, num), clock)

        blocks[side, case] = block
    times: dict[Any, list[float]] = take_turns(blocks, rounds) if blocks else {}
    rows = []
    for operation in operations:
        seconds = {
            side: [
                sum(weight * times[side, case][turn] for case, weight in operation.of(side))
                for turn in range(rounds)
            ]
            for side in workers
            if all((side, case) in times for case, _ in operation.of(side))
        }
        rows.append(Row(operation, seconds))
    return rows, failures


def pythons_of(args: argparse.Namespace) -> dict[str, Path]:
    """Versions of each installed package."""
    pythons = {"ours": Path(sys.executable)}
    if args.lightzero_python is None:
        print(INSTALL)
    elif not args.lightzero_python.exists():
        raise SystemExit(f"--lightzero-python {args.lightzero_python}: no such file")
    else:
        pythons["lightzero"] = args.lightzero_python.absolute()
    return pythons


def start(pythons: dict[str, Path], loud: bool, exits: ExitStack) -> dict[str, Worker]:
    """New processes, one per package."""
    return {
        name: exits.enter_context(Worker(f"benchmarks.efficientzero_{name}", python, loud))
        for name, python in pythons.items()
    }


def setting(pythons: dict[str, Path], args: argparse.Namespace) -> str:
    with ExitStack() as exits:
        found = {n: w.ask("versions") for n, w in start(pythons, args.loud, exits).items()}
    versions = "; ".join(
        f"{name}: {', '.join(f'{package} {v}' for package, v in packages.items())}"
        for name, packages in found.items()
    )
    return (
        f"{versions}; Python {platform.python_version()}, {platform.machine()}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {'wall' if args.wall else 'CPU'} "
        f"time, medians of {args.rounds} rounds"
    )


def line(cells: Sequence[str]) -> str:
    return cells[0].ljust(36) + "".join(cell.rjust(14) for cell in cells[1:])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    clock = "wall" if args.wall else "cpu"
    pythons = pythons_of(args)
    where = setting(pythons, args)
    print(where, flush=True)
    texts = [where]
    if re.search(args.ops, "parts"):
        texts.append(markdown_table(parts_table(args.preset, args.rounds, clock)))
        print(texts[-1], flush=True)
    print(line(HEADER), flush=True)
    rows: list[Row] = []
    failures: list[str] = []
    for operations, most in groups(args.conv_batch):
        chosen = [op for op in operations if re.search(args.ops, op.name)]
        if not chosen:
            continue
        with ExitStack() as exits:  # new processes: a worker keeps no more than two cases
            workers = start(pythons, args.loud, exits)
            found, failed = measure(chosen, workers, min(args.rounds, most), clock)
        print("\n".join([line(row.cells()) for row in found] + failed), flush=True)
        rows += found
        failures += failed
    if rows:
        texts.append(markdown_table([HEADER, *(row.cells() for row in rows)]))
    if args.markdown:
        args.markdown.write_text("\n\n".join(text.strip() for text in texts + failures) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
