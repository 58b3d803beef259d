"""raffia resume: go on with a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from raffia.cli.errors import UsageError
from raffia.cli.runs import chosen_run, config_of, state_of, summary_line
from raffia.cli.style import call, filled, help_width
from raffia.cli.train import require_device, tell_end, tell_next, tell_start, uses
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.recipes.ilql.config import MAY_CHANGE as MAY_CHANGE_ILQL
from raffia.recipes.ilql.config import ILQLRun
from raffia.report.summary import RunSummary
from raffia.train.config import changed_settings, from_command_line

HELP = """\
usage: raffia resume RUN [settings]

Go on with a run at its newest checkpoint. A run that was stopped at any moment, even by kill -9,
ends on the CPU as if it had never been stopped, bit for bit. A checkpoint that is damaged is named,
and the one before it is used.

What says how long, how often and where may be changed; the run remembers it:

  --collect.num_env_steps N    its length; schedules over all of it stretch
  --collect.extra_updates N    updates after the last step
  --evaluate.target_return X   end at this mean return; `none` goes on behind it
  --evaluate.* --checkpoint.*  how often, how much
  --device --num_threads --compile --env.num_workers
                               where it runs: then equal but for rounding
  --env.step_timeout_seconds   how long a worker may take for a step

Of runs of ILQL:

  --num_updates N              its length
  --decode.* --evaluate.* --checkpoint.*
                               how it speaks when evaluated, how often, how much
  --num_micro_batches --device --num_threads --compile
                               where it runs

Any other setting shaped what was learnt, and needs a run of its own.

examples:
  raffia resume runs/cartpole-0
  raffia resume runs/cartpole-0 --collect.num_env_steps 30000
  raffia resume runs/demo --evaluate.target_return none"""

Config = TypeVar("Config", EfficientZeroRun, ILQLRun)
MAY_CHANGE = (
    "collect.num_env_steps",
    "collect.extra_updates",
    "evaluate.",
    "checkpoint.",
    "device",
    "num_threads",
    "compile",
    "env.num_workers",
    "env.step_timeout_seconds",
)


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
    run = chosen_run(given, "resume")
    before = config_of(run)
    if isinstance(before, ILQLRun):
        return _resume_ilql(run, before, words[1:])
    after = from_command_line(before, words[1:], prog="raffia resume", description="")
    if _is_done(run, before, after, MAY_CHANGE, words[1:]):
        return 0
    tell_start(after, run, " again")
    from raffia.recipes.efficientzero import resume

    require_device(after.device)
    return tell_end(resume(run, config=after))


def _resume_ilql(run: Path, before: ILQLRun, words: Sequence[str]) -> int:
    after = from_command_line(before, words, prog="raffia resume", description="")
    if _is_done(run, before, after, MAY_CHANGE_ILQL, words):
        return 0
    tell_start(after, run, " again")
    from raffia.recipes.ilql import resume

    require_device(after.device)
    return tell_end(resume(run, config=after))


def _is_done(
    run: Path, before: Config, after: Config, may_change: tuple[str, ...], words: Sequence[str]
) -> bool:
    """Whether nothing is left to do, which is told; UsageError if it must not go on like this."""
    changed = changed_settings(before, after)
    fixed = [name for name in changed if not name.startswith(may_change)]
    if fixed:
        _refuse(run, before, fixed, words)
    state = state_of(run)
    if changed or state.state not in ("finished", "target") or not _is_saved(run, state):
        return False
    _tell_done(run, before, state.state)
    return True


def _is_saved(run: Path, state: RunSummary) -> bool:
    """Whether what a run ended with is there and whole; if not, what is lacking is learnt anew."""
    from raffia.recipes.run_folder import is_saved

    return is_saved(run, state.update or 0, print)


def _refuse(
    run: Path, before: EfficientZeroRun | ILQLRun, fixed: Sequence[str], words: Sequence[str]
) -> None:
    algorithm = "ilql" if isinstance(before, ILQLRun) else "efficientzero"
    verb = "shapes" if len(fixed) == 1 else "shape"
    raise UsageError(
        f"{', '.join(fixed)} {verb} what is learnt, and {run} has begun without. Keep it as it is, "
        "or train anew with its settings and yours:",
        call("raffia", "resume", run),
        call(
            *("raffia", "train", algorithm, "--config", run / "config.json"),
            *(*words, "--run", f"{run}-new"),
        ),
    )


def _tell_done(run: Path, config: EfficientZeroRun | ILQLRun, state: str) -> None:
    print(f"{run} {summary_line(state_of(run))}; there is nothing left to do")
    if state == "target":
        flags = ["--evaluate.target_return", "none"]
    elif isinstance(config, ILQLRun):
        flags = ["--num_updates", str(2 * config.num_updates)]
    else:
        flags = ["--collect.num_env_steps", str(2 * config.collect.num_env_steps)]
    tell_next(
        [
            [call("raffia", "resume", run, *flags), "go on all the same"],
            *uses(run, speaks=isinstance(config, ILQLRun)),
        ]
    )
