"""raffia resume: go on with a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from raffia.cli.errors import UsageError
from raffia.cli.runs import chosen_run, config_of, state_of, summary_line
from raffia.cli.style import call, filled, width_of
from raffia.cli.train import require_device, tell_end, tell_next, tell_start
from raffia.recipes.config import EfficientZeroRun
from raffia.train.config import from_command_line, setting_names, to_json

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

Any other setting shaped what was learnt, and needs a run of its own.

examples:
  raffia resume runs/cartpole-0
  raffia resume runs/cartpole-0 --collect.num_env_steps 30000
  raffia resume runs/demo --evaluate.target_return none"""

MAY_CHANGE = (
    "collect.num_env_steps",
    "collect.extra_updates",
    "evaluate.",
    "checkpoint.",
    "device",
    "num_threads",
    "compile",
    "env.num_workers",
)


def resume(words: Sequence[str]) -> int:
    """`raffia resume RUN ...`

    >>> resume(["--help"])  # doctest: +ELLIPSIS
    usage: raffia resume RUN [settings]
    ...
    0
    """
    if "--help" in words or "-h" in words:
        print(filled(HELP, width_of(sys.stdout)))
        return 0
    given = words[0] if words and not words[0].startswith("-") else None
    run = chosen_run(given, "resume")
    before = config_of(run)
    after = from_command_line(before, words[1:], prog="raffia resume", description="")
    changed = changes(before, after)
    fixed = [name for name in changed if not name.startswith(MAY_CHANGE)]
    if fixed:
        _refuse(run, fixed, words[1:])
    state = state_of(run)
    if not changed and state.state in ("finished", "target"):
        return _nothing_to_do(run, before, state.state)

    tell_start(after, run, " again")
    from raffia.recipes.efficientzero import resume

    require_device(after.device)
    return tell_end(resume(run, config=after))


def changes(before: EfficientZeroRun, after: EfficientZeroRun) -> list[str]:
    """The names of the settings that differ.

    >>> changes(EfficientZeroRun(), EfficientZeroRun(seed=1))
    ['seed']
    """
    old, new = to_json(before), to_json(after)
    return [name for name in setting_names(type(before)) if _at(old, name) != _at(new, name)]


def _at(data: object, name: str) -> object:
    for part in name.split("."):
        assert isinstance(data, dict)
        data = data[part]
    return data


def _refuse(run: Path, fixed: Sequence[str], words: Sequence[str]) -> None:
    verb = "shapes" if len(fixed) == 1 else "shape"
    raise UsageError(
        f"{', '.join(fixed)} {verb} what is learnt, and {run} has begun without. Keep it as it is, "
        "or train anew with its settings and yours:",
        call("raffia", "resume", run),
        call(
            *("raffia", "train", "efficientzero", "--config", run / "config.json"),
            *(*words, "--run", f"{run}-new"),
        ),
    )


def _nothing_to_do(run: Path, config: EfficientZeroRun, state: str) -> int:
    print(f"{run} {summary_line(state_of(run))}; there is nothing left to do")
    steps = str(2 * config.collect.num_env_steps)
    target = ["--evaluate.target_return", "none"]
    flags = target if state == "target" else ["--collect.num_env_steps", steps]
    tell_next(
        [
            [call("raffia", "resume", run, *flags), "go on all the same"],
            [call("raffia", "evaluate", run), "play episodes without exploring"],
        ]
    )
    return 0
