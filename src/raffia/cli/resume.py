"""raffia resume: continue a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raffia.cli.algorithm import AlgorithmCommands, commands_of
from raffia.cli.parser import UsageError
from raffia.cli.runs import (
    chosen_run,
    config_of,
    print_next,
    print_start,
    require_device,
    summary_line,
)
from raffia.cli.style import call, filled, help_width
from raffia.cli.train import split_own
from raffia.report.folder import MANIFEST, RunSummary, summarise
from raffia.train.config import changes_of, from_command_line

HELP = """\
usage: raffia resume RUN [settings]

Continue a run from its newest checkpoint. On the CPU, a run that was stopped at any moment, even by
kill -9, ends with the same bits as one that was never stopped. A damaged checkpoint is reported,
and the one before it is used.

Settings for length, intervals and device may be changed; the run records the new values:

  --collect.num_env_steps N    length; schedules over the whole run stretch
  --collect.extra_updates N    updates after the last step
  --evaluate.target_return X   stop at this mean return; `none`: do not stop
  --evaluate.* --checkpoint.*  how often, and how much
  --device --num_threads --compile --env.num_workers
                               where it runs; results are equal up to rounding
  --env.step_timeout_seconds   time limit of a worker for one step

  --env --networks             as for train: runs import no file by themselves

For ILQL runs:

  --num_updates N              length
  --decode.* --evaluate.* --checkpoint.*
                               decoding in evaluations, how often, how much
  --num_micro_batches --learners.* --device --num_threads --compile
                               where it runs
  --env file.py:name           the same as for train; see docs/ilql.md

All other settings affect what is learnt: to change them, train a new run.

For the folder of a sweep: finished runs stay, interrupted ones are resumed, missing ones started,
and failed ones tried again. --workers, --engine.name, --engine.address and --devices may change;
--env and --networks take the names of all runs, joined by commas.

examples:
  raffia resume runs/cartpole-0
  raffia resume runs/cartpole-0 --collect.num_env_steps 30000
  raffia resume runs/demo --evaluate.target_return none
  raffia resume sweeps/lr --workers 4"""


def resume(words: Sequence[str]) -> int:
    """`raffia resume RUN ...`

    >>> resume(["--help"])  # doctest: +ELLIPSIS
    usage: raffia resume RUN [settings]
    ...
    0
    """
    if "--help" in words or "-h" in words:
        print(filled(HELP, help_width()))
        return 0
    given = words[0] if words and not words[0].startswith("-") else None
    if given is not None and (Path(given) / MANIFEST).is_file():
        from raffia.cli.sweep import resume_sweep

        return resume_sweep(Path(given), words[1:])
    run = chosen_run(given, "resume")
    flags, settings = split_own(words[1:], ["--algorithm"], "raffia resume")
    algorithm, before = config_of(run, flags.get("--algorithm", ""))
    commands = commands_of(algorithm)
    flags, settings = split_own(settings, list(commands.vouched_flags), "raffia resume")
    named = commands.given(before, flags)
    after = from_command_line(named, settings, prog="raffia resume", description="")
    changed = changes_of(before, after)
    by_words = changes_of(named, after)
    fixed = [name for name in by_words if not name.startswith(algorithm.may_change)]
    if fixed:
        _refuse(run, commands, fixed, settings)
    state = summarise(run)
    if not changed and state.state in ("finished", "target") and _is_saved(run, state):
        _print_finished(run, commands, before, state.state)
        return 0
    print_start(after, run, ", resumed")
    require_device(after.device)
    from raffia.recipes import resume as resume_in

    more = {"algorithm": algorithm, "config": after, **commands.parts(flags)}
    return commands.print_end(resume_in(run, **more))


def _is_saved(run: Path, state: RunSummary) -> bool:
    """Whether the last checkpoint of a run is whole; if not, its updates are made again."""
    from raffia.recipes.run_folder import is_saved

    return is_saved(run, state.update or 0, lambda text: None)  # the resume tells of damaged ones


def _refuse(
    run: Path, commands: AlgorithmCommands[Any], fixed: Sequence[str], words: Sequence[str]
) -> None:
    verb = "shapes" if len(fixed) == 1 else "shape"
    raise UsageError(
        f"{', '.join(fixed)} {verb} what is learnt, and {run} was started with other values. "
        "Resume it as it is, or train a new run with its settings and yours:",
        call("raffia", "resume", run, *commands.named_for_calls()),
        call(
            *("raffia", "train", commands.name, "--config", run / "config.json"),
            *(*words, "--run", f"{run}-new"),
        ),
    )


def _print_finished(run: Path, commands: AlgorithmCommands[Any], config: Any, state: str) -> None:
    print(f"{run} {summary_line(summarise(run))}; there is nothing left to do")
    flags = commands.without_target() if state == "target" else commands.longer(config)
    again = call("raffia", "resume", run, *commands.named_for_calls(), *flags)
    print_next([*([[again, "continue anyway"]] if flags else []), *commands.uses(run)])
