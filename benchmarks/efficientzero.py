"""Where does the time of EfficientZero's training go, and how fast is an update beside LightZero's?

    python -m benchmarks.efficientzero [--preset NAME] [--rounds N] [--lightzero-python PATH]

The first table is of a preset's own sizes, one thread: a turn of collecting, making a batch with
all policies as stored and with all of them searched anew, gradients, the optimiser's step. The
second one, made where LightZero's environment is given (benchmarks/README.md says how to make it),
is a whole update at the sizes of its CartPole configuration. Times are CPU time, the median of
rounds in which all take turns.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

if not __package__:  # run by its path: this folder heads sys.path, and tensordict.py hides the peer
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks.search_models import NUM_ACTIONS
from benchmarks.search_worker import Case, Worker
from benchmarks.timing import block, paired_ratio, take_turns
from raffia.algorithms.efficientzero.planning import Planner
from raffia.algorithms.efficientzero.targets import make_batch
from raffia.envs.make import make_env
from raffia.recipes.presets import PRESETS
from raffia.recipes.run import Run
from raffia.tensordict.tensordict import TensorDict
from raffia.train.view import PlainView

UPDATE = Case("mlp", batch=256, simulations=5, actions=NUM_ACTIONS["mlp"])  # 5 steps unrolled


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="cartpole")
    parser.add_argument("--rounds", type=int, metavar="N", default=7)
    parser.add_argument("--lightzero-python", type=Path, metavar="PATH", help="of its environment")
    return parser.parse_args(argv)


class Parts:
    """A run of a preset, with a filled replay, taken apart."""

    def __init__(self, preset: str, folder: Path):
        config = PRESETS[preset]
        self.config = replace(config, replay=replace(config.replay, on_disk=False))
        with open(os.devnull, "w") as nowhere:
            self.run = Run(self.config, folder, PlainView(nowhere), make_env, None)
        self.state = self.run.networks.init(0)
        run, num = self.run, self.config.env.num_envs
        run.replay.extend(run.collector.collect(run._act_first, max(64, 1024 // num)))
        self.analysts = {ratio: self._analyst(ratio) for ratio in (0.0, 1.0)}
        self.batch = self.targets(0.0)
        self.update, _ = self.grads()

    def _analyst(self, ratio: float) -> Planner:
        config = replace(self.config, targets=replace(self.config.targets, reanalyse_ratio=ratio))
        stack = config.env.frame_stack
        model = self.run.networks.make_model(0)
        planner = Planner(model, self.run.env.spec, config, frame_stack=stack)
        planner.refresh(self.state["target"])
        return planner

    def collect(self) -> None:
        """A turn: the newest weights, then so many steps in each world, put into the replay."""
        run = self.run
        act = run._begin_turn(self.state)
        run.replay.extend(run.collector.collect(act, self.config.collect.steps_per_turn))

    def targets(self, ratio: float) -> TensorDict:
        """A batch, of which this share of policies is searched anew and put back."""
        replay = self.run.replay
        windows = replay.sample(self.config.replay.batch_size)
        draws = torch.Generator().manual_seed(0)
        batch, fresh = make_batch(windows, self.analysts[ratio], generator=draws)
        if fresh is not None:
            replay.update(fresh["step_index"], fresh.exclude("step_index"))
        return batch

    def grads(self) -> tuple[TensorDict, TensorDict]:
        """Of one batch."""
        return self.run.networks.grads(self.state, self.batch)

    def apply(self) -> None:
        """The optimiser's step."""
        self.state = self.run.networks.apply(self.state, self.update)

    def simulations(self, planner: Planner, call: Callable[[], object]) -> int:
        """How many simulations a call makes."""
        before = planner.num_simulations
        call()
        return planner.num_simulations - before


def parts_table(preset: str, rounds: int) -> list[str]:
    """Where the time of a preset goes, as lines of Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        parts = Parts(preset, Path(folder))
        calls: dict[str, Callable[[], object]] = {
            "collect": parts.collect,
            "targets": lambda: parts.targets(0.0),
            "targets, all searched anew": lambda: parts.targets(1.0),
            "gradients": parts.grads,
            "optimiser": parts.apply,
        }
        searched = {  # the first calls, which compile
            "collect": parts.simulations(parts.run.planner, calls["collect"]),
            "targets, all searched anew": parts.simulations(
                parts.analysts[1.0], calls["targets, all searched anew"]
            ),
        }
        times = take_turns(
            {name: lambda call=call: block(call, 1) for name, call in calls.items()}, rounds
        )
        parts.run.close()
    seconds = {name: statistics.median(found) for name, found in times.items()}
    config = parts.config
    steps = config.env.num_envs * config.collect.steps_per_turn
    lines = ["| part | ms | each second |", "|---|---|---|"]
    for name, taken in seconds.items():
        rates = [f"{1 / taken:,.1f}"]
        if name == "collect":
            rates = [f"{steps / taken:,.0f} env steps"]
        if name in searched:
            rates.append(f"{searched[name] / taken:,.0f} simulations")
        lines.append(f"| {name} | {1e3 * taken:.1f} | {', '.join(rates)} |")
    share = config.targets.reanalyse_ratio
    extra = seconds["targets, all searched anew"] - seconds["targets"]
    update = seconds["targets"] + share * extra + seconds["gradients"] + seconds["optimiser"]
    whole = seconds["collect"] / steps + config.collect.updates_per_env_step * update
    lines.append(f"| an update (reanalyse {share}) | {1e3 * update:.1f} | {1 / update:,.1f} |")
    lines.append(
        f"| an env step with all that goes with it | {1e3 * whole:.1f} | {1 / whole:,.0f} |"
    )
    return lines


def peer_table(python: Path, rounds: int) -> list[str]:
    """Our update and LightZero's at its CartPole sizes, in turns."""
    if not python.exists():
        raise SystemExit(f"--lightzero-python {python}: no such file")
    pythons = {"ours": Path(sys.executable), "lightzero": python.absolute()}
    with ExitStack() as exits:
        workers = {
            name: exits.enter_context(Worker(f"benchmarks.efficientzero_{name}", path))
            for name, path in pythons.items()
        }
        for worker in workers.values():
            worker.make(UPDATE)
        times = take_turns(
            {name: lambda w=worker: w.block(UPDATE, 2).cpu for name, worker in workers.items()},
            rounds,
        )
        versions = {name: worker.ask("versions") for name, worker in workers.items()}
    ratio, spread = paired_ratio(times["lightzero"], times["ours"])
    lines = [f"{versions}", "| update, batch 256, K=5, projection 1024 | ms |", "|---|---|"]
    lines += [f"| {name} | {1e3 * statistics.median(found):.0f} |" for name, found in times.items()]
    return [*lines, f"| LightZero's time / ours | {ratio:.2f} +- {spread:.2f} |"]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print("\n".join([f"{args.preset}:", *parts_table(args.preset, args.rounds)]), flush=True)
    if args.lightzero_python is None:
        print("no LightZero: pass --lightzero-python PATH")
    else:
        print("\n".join(peer_table(args.lightzero_python, args.rounds)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
