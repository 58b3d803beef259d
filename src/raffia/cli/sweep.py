"""raffia sweep: many runs over seeds and settings."""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raffia.cli.parser import UsageError
from raffia.cli.runs import print_next, refuse_taken, require_device, resume_call
from raffia.cli.style import call, columns, filled, help_width, printable, section
from raffia.cli.train import Asked, split_own
from raffia.hints import plural
from raffia.recipes.algorithm import Algorithm, flag_of
from raffia.train.config import ConfigError

if TYPE_CHECKING:
    from raffia.cli.algorithm import AlgorithmCommands
    from raffia.sweep import Manifest, SweepResult

USAGE = """\
usage: raffia sweep ALGORITHM (--preset NAME | --config FILE | --data FILE)
                    [--seeds 0..4] [--grid NAME=ONE,TWO ...]
                    [--random N | --optuna N  --ranges NAME=LOW..HIGH ...]
                    [--out FOLDER] [--workers N] [settings]
       raffia sweep --resume FOLDER"""
ABOUT = """\
Train {what} for each seed, at each point of a grid of settings, or at random or suggested settings.
Each run has a worker process and an ordinary run folder in FOLDER/runs. The settings of
`raffia train` can be given, too, and apply to all runs. The same command plans the same runs.
Ctrl-C saves all runs and stops; `raffia resume FOLDER` continues. A run that fails is reported, and
the others continue."""
VARIES = {
    "--seeds 0..4": "one run per seed; a list such as 0,1,7 works, too (default: the seed setting)",
    "--grid NAME=ONE,TWO ...": "values of settings; all combinations are trained",
    "--random N": "N random draws from --ranges, all different",
    "--optuna N": "N trials from --ranges, each suggested by Optuna from the scores of earlier "
    "trials (extra: sweep)",
    "--ranges NAME=LOW..HIGH ...": "ranges of settings, or choices: NAME=ONE,TWO. A range is "
    "logarithmic if LOW > 0 and HIGH >= 10 LOW, and integer if both ends are",
    "--sweep_seed N": "seed of the draws and trials (default: 0)",
}
WHERE = {
    "--out FOLDER": "folder of the sweep (default: sweeps/NAME)",
    "--workers N": "number of parallel runs (default: what the cores allow; on Ray, those of "
    "the whole cluster)",
    "--engine.name NAME": "engine of the sweep, not of its runs: process (default), ray, or inline "
    "for one run after the other in this process",
    "--engine.address ADDRESS": "address of a Ray cluster",
    "--devices cuda:0,cuda:1": "one worker per device; a run uses the device of its worker. On Ray "
    "each worker has a GPU to itself, whatever the number in its name",
}
EXAMPLES = {
    "efficientzero": """\
  raffia sweep efficientzero --preset cartpole --seeds 0..4
  raffia sweep efficientzero --preset cartpole --seeds 0..4 \\
      --grid optimizer.learning_rate=1e-3,2e-3 --out sweeps/lr --workers 2
  raffia sweep efficientzero --preset atari100k --seeds 0..4 \\
      --grid env.id=atari/pong,atari/breakout --devices cuda:0,cuda:1
  raffia sweep efficientzero --preset cartpole --optuna 40 --seeds 0..1 \\
      --ranges optimizer.learning_rate=1e-5..1e-2 replay.alpha=0.0..1.0""",
    "ilql": """\
  raffia sweep ilql --preset ilql-smoke --random 20 \\
      --ranges optimizer.learning_rate=1e-5..1e-2""",
    "": """\
  raffia report sweeps/lr    # all runs on one page, settings ranked by score
  raffia resume sweeps/lr""",
}
HOME = Path("sweeps")
HOW = ("--workers", "--engine.name", "--engine.address", "--devices")
OWN = ("--env", "--networks")  # whose names, joined by commas, a sweep may import
LISTS = ("--grid", "--ranges")
FLAGS = ("--seeds", "--random", "--optuna", "--sweep_seed", "--out", *HOW)


def sweep(words: Sequence[str]) -> int:
    """`raffia sweep ALGORITHM ...`

    >>> sweep(["efficientzero", "--preset", "smoke", "--seeds", "0-4"])
    Traceback (most recent call last):
        ...
    raffia.train.settings.ConfigError: --seeds 0-4: '0-4' is not a seed; write 0..4, or 0,1,7
    """
    if words and words[0] in ("-h", "--help"):
        examples = "\n".join(["examples:", *EXAMPLES.values()])
        print("\n\n".join([USAGE, *_help_blocks("an agent"), examples]))
        return 0
    if words and words[0].partition("=")[0] == "--resume":
        flags, others = split_own(words, ["--resume"], "raffia sweep")
        return resume_sweep(Path(flags["--resume"]), others)
    lists, others = _lists(words)
    asked = Asked.of(others, "sweep", FLAGS, _help_text)
    flags = asked.flags
    from raffia.sweep import read_choices, read_ranges, read_seeds

    seeds = read_seeds(flags.get("--seeds", str(asked.config.seed)))
    ranges, grid = read_ranges(lists["--ranges"]), read_choices(lists["--grid"])
    if "--sweep_seed" in flags and not ranges:
        raise ConfigError("--sweep_seed is the seed of --random N and --optuna N; pass one of them")
    name = asked.commands.run_name(flags, asked.preset, asked.config)
    folder = Path(flags.get("--out", HOME / name))
    words = split_own(words, ["--out"], "raffia sweep")[1]
    refuse_taken(folder, "sweep", *words, flag="--out", what="sweep")
    from raffia.sweep.api import planned, with_fair_threads

    base = asked.algorithm.settled(asked.config, tell=partial(print, flush=True))
    if not any(word.startswith(("--num_threads", "--num-threads")) for word in asked.settings):
        at_once = _whole(flags, "--workers", 0) or flags.get("--devices", "").count(",") + 1
        base = with_fair_threads(base, at_once)
    manifest = planned(
        asked.algorithm,
        base,
        seeds=seeds,
        grid=grid,
        ranges=ranges,
        num_draws=_whole(flags, "--random", 0),
        num_trials=_whole(flags, "--optuna", 0) if "--optuna" in flags else None,
        sweep_seed=_whole(flags, "--sweep_seed", 0),
        preset=asked.preset,
    )
    manifest = _where(manifest, flags, asked.algorithm)
    for device in _devices(manifest, asked.algorithm):
        require_device(device, is_here=manifest.engine.name != "ray")
    return _run(folder, asked.algorithm, manifest, before=None)


def _help_blocks(what: str) -> list[str]:
    """Help on what a sweep of this algorithm does, and on the command's own flags."""
    return [
        filled(ABOUT.format(what=what), help_width()),
        section("what varies", list(VARIES.items())),
        section("where it runs", list(WHERE.items())),
    ]


def _help_text(commands: AlgorithmCommands[Any], preset: str) -> str:
    """The text of `raffia sweep NAME --help` above the settings."""
    examples = EXAMPLES.get(commands.name, f"  raffia sweep {commands.name} --seeds 0..4")
    return commands.help_of_sweep(preset, _help_blocks(commands.algorithm.title), examples)


def resume_sweep(folder: Path, words: Sequence[str]) -> int:
    """Continue a sweep: `raffia resume FOLDER`."""
    from raffia.sweep import is_sweep, read_manifest

    flags, others = split_own(words, ["--algorithm", *OWN, *HOW], "raffia resume")
    if others:
        raise UsageError(
            f"{others[0]} cannot be changed when a sweep is resumed; only {', '.join(HOW)} can",
            resume_call(folder),
        )
    if not is_sweep(folder):
        raise UsageError(f"{folder} is not the folder of a sweep", "raffia sweep --help")
    manifest = read_manifest(folder)
    algorithm = manifest.find_algorithm(flags.get("--algorithm", ""))
    if algorithm.name != manifest.algorithm:
        raise UsageError(f"{folder} is a sweep of {manifest.algorithm}, not of {algorithm.name}")
    changed = _where(manifest, flags, algorithm) if flags.keys() & set(HOW) else manifest
    known = [flag_of(part) for part in algorithm.names]
    for flag in flags.keys() & set(OWN):
        if flag not in known:
            raise UsageError(f"{algorithm.title} has no {flag}: leave it out", resume_call(folder))
    trusted = [name for flag in OWN for name in flags.get(flag, "").split(",") if name]
    return _run(folder, algorithm, changed, before=manifest, trusted=trusted)


def _run(
    folder: Path,
    algorithm: Any,
    manifest: Manifest,
    before: Manifest | None,
    trusted: Collection[str] = (),
) -> int:
    """Run what is not done; a manifest that is new is written once there are workers for it.

    before: the manifest that the folder has; None: it has none.
    trusted: see `SweepSession`.
    """
    from raffia.sweep.api import begin
    from raffia.sweep.progress import SweepView

    session = begin(folder, algorithm, manifest, SweepView(), before, trusted)
    num, where = manifest.workers, manifest.engine.name
    print(
        f"{plural(manifest.num_runs, 'run')} of {algorithm.title} in {folder}, {num} at a time "
        f"({where}); Ctrl-C saves and stops",
        flush=True,
    )
    return _print_end(session.run(), manifest, algorithm)


def _print_end(result: SweepResult, manifest: Manifest, algorithm: Algorithm) -> int:
    folder, states = result.folder, list(result.states.values())
    counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    print(f"{folder}: {', '.join(counts)}")
    print(printable(scores_of(folder)))
    named = ["--algorithm", manifest.reference] if manifest.reference else []
    for part, names in manifest.named_outside(algorithm).items():
        named += [flag_of(part), ",".join(names)]
    calls = [[call("raffia", "report", folder), "all runs on one page"]]
    if any(state not in ("finished", "target") for state in states):
        what = "retry the failed runs" if result.failed else "continue the unfinished runs"
        calls.insert(0, [call("raffia", "resume", folder, *named), what])
    print_next(calls)
    if result.signal:
        return 128 + signal.Signals[result.signal].value
    return 1 if any(state not in ("finished", "target") for state in states) else 0


def scores_of(folder: Path) -> str:
    """The settings of a sweep by their scores, as a table.

    >>> scores_of(Path("no such sweep"))
    'no run has been evaluated yet'
    """
    from raffia.report.folder import find_runs, read_key_rows
    from raffia.report.groups import grouped
    from raffia.report.markup import MINUS, NONE, between, column_format
    from raffia.report.scores import scores

    found = scores(grouped([read_key_rows(run) for run in find_runs(folder / "runs", 1)]))
    if not found:
        return "no run has been evaluated yet"
    write = column_format([one.last for one in found])
    rows = [["settings", "runs", "at the end", "95 % interval", "best"]]
    for one in found:
        interval = between(one.low, one.high, write)
        rows.append([one.group.label, one.of_runs, write(one.last), interval, write(one.best)])
    return columns(rows, right=[1, 2, 4]).replace(MINUS, "-").replace(NONE, "-")


def _where(manifest: Manifest, flags: dict[str, str], algorithm: Any) -> Manifest:
    """The manifest with workers, engine and devices as the flags have them."""
    from raffia.recipes.scale_config import EngineConfig
    from raffia.sweep.api import placed

    devices = tuple(filter(None, flags.get("--devices", "").split(","))) or manifest.devices
    engine = manifest.engine
    if "--engine.name" in flags or "--engine.address" in flags:
        try:
            engine = EngineConfig(
                name=flags.get("--engine.name", engine.name),  # type: ignore[arg-type]
                address=flags.get("--engine.address", ""),
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
    workers = _whole(flags, "--workers", 1, least=1) if "--workers" in flags else 0
    return placed(manifest, algorithm, workers=workers, engine=engine, devices=devices)


def _devices(manifest: Manifest, algorithm: Any) -> list[str]:
    used = [manifest.config_of(run, algorithm).device for run in manifest.runs]
    return list(dict.fromkeys(manifest.devices or used))


def _lists(words: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The words of flags that take several, and the others."""
    found: dict[str, list[str]] = {flag: [] for flag in LISTS}
    others, at = [], ""
    for word in words:
        flag, equals, value = word.partition("=")
        if word.startswith("--"):
            at = flag if flag in LISTS else ""
            if at and equals:
                found[at].append(value)
            elif not at:
                others.append(word)
        elif at:
            found[at].append(word)
        else:
            others.append(word)
    return found, others


def _whole(flags: dict[str, str], flag: str, default: int, least: int = 0) -> int:
    text = flags.get(flag, str(default))
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{flag} {text} must be a whole number of at least {least}")
    return int(text)
