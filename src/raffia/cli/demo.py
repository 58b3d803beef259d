"""raffia demo: from nothing to a trained agent."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from raffia.cli.parser import Parser
from raffia.cli.report import write_page
from raffia.cli.runs import (
    HOME,
    end_line,
    exit_status,
    free_folder,
    print_next,
    print_start,
    refuse_taken,
)
from raffia.cli.style import call, paint
from raffia.cli.train import split_own
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.recipes.efficientzero.presets import PRESETS

TARGET = 200.0  # mean return: the pole stands for 200 steps, the limit of CartPole's first version
ABOUT = f"""\
Train EfficientZero on CartPole, live, to a mean return of {TARGET:.0f}, and write a report. The
agent starts from scratch: it learns a model of the environment, plans with the model, and learns
from the results of planning. Ctrl-C saves a checkpoint and stops.

Writes runs/demo, an ordinary run folder, and report.html in it."""
EXAMPLES = ["raffia demo", "raffia demo --seed 3 --out /tmp/demo"]


def demo(words: Sequence[str]) -> int:
    """`raffia demo`

    >>> demo(["--sede=3"])
    Traceback (most recent call last):
        ...
    raffia.cli.parser.UsageError: raffia demo has no --sede=3; did you mean --seed?
    """
    parser = Parser("raffia demo", ABOUT, EXAMPLES)
    parser.flag("--seed N", "seed of the run", int, 0)
    about = "folder of the run (default: runs/demo, or runs/demo-2 ...)"
    parser.flag("--out FOLDER", about, Path)
    args = parser.read(words)
    folder = free_folder(HOME / "demo") if args.out is None else args.out
    refuse_taken(folder, "demo", *split_own(words, ["--out"], "raffia demo")[1], flag="--out")

    config = demo_config(args.seed)
    print_start(config, folder, f", until a mean return of {TARGET:.0f}")
    from raffia.recipes.efficientzero import train

    result = train(config, folder, preset="cartpole")
    print(end_line(result))
    if result.reason == "stopped":
        print_next([[call("raffia", "resume", folder), "continue from where it stopped"]])
        return exit_status(result)
    try:
        print(f"report: {paint(str(write_page([folder]).resolve()), 'cyan', sys.stdout)}")
    except ImportError as missing:  # no reason to take back what was learnt
        print(f"no report: {missing}; then {call('raffia', 'report', folder)}")
    on = ["--evaluate.target_return", "none"]
    if result.reason == "finished":  # without having reached it: there are no steps left
        on = ["--collect.num_env_steps", str(2 * config.collect.num_env_steps)]
    print_next(
        [
            [call("raffia", "resume", folder, *on), "train on, up to the limit of 500 steps"],
            [call("raffia", "evaluate", folder, "--record"), "play 100 episodes, and record three"],
            [
                "raffia train efficientzero --preset tictactoe",
                "train in another environment; see raffia list",
            ],
            ["raffia play runs/tictactoe-0", "play against that agent once it is trained"],
        ]
    )
    return 0


def demo_config(seed: int) -> EfficientZeroRun:
    """The settings of the demo.

    >>> demo_config(3).evaluate.target_return
    200.0
    """
    cartpole = PRESETS["cartpole"]
    return replace(cartpole, seed=seed, evaluate=replace(cartpole.evaluate, target_return=TARGET))
