"""raffia train: a new run."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from raffia.cli.errors import UsageError
from raffia.cli.parser import nearest
from raffia.cli.runs import HOME, free_folder, refuse_taken, state_of, summary_line
from raffia.cli.style import (
    call,
    columns,
    duration,
    filled,
    help_width,
    number,
    paint,
    width_of,
)
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.recipes.efficientzero.presets import PRESETS, SUMMARIES
from raffia.recipes.ilql.config import ILQLRun
from raffia.recipes.population_config import PopulationConfig
from raffia.report.folder import is_run
from raffia.train.config import from_command_line

if TYPE_CHECKING:
    from raffia.recipes.efficientzero import RunResult

ALGORITHMS = ("efficientzero", "ilql")
Config = TypeVar("Config", EfficientZeroRun, ILQLRun)
ENDS = {"target": "reached its target return", "finished": "finished", "stopped": "stopped"}
HELP = """\
usage: raffia train ALGORITHM (--preset NAME | --config FILE | --data FILE)
                    [--run FOLDER] [settings]

Train an agent in a new folder, and show how it goes. Ctrl-C saves and leaves; `raffia resume` goes
on. The folder holds settings, metrics (JSON lines and TensorBoard), checkpoints and recordings.

algorithms:
  efficientzero  plans with a learned model; its presets have MuZero, too
  ilql           learns to speak from logged dialogues with rewards

examples:
  raffia train efficientzero --preset cartpole           # into runs/cartpole-0
  raffia train efficientzero --preset cartpole --seed 1  # into runs/cartpole-1
  raffia train efficientzero --preset cartpole --help    # all settings
  raffia train ilql --preset wordle                      # into runs/wordle-0
  raffia train ilql --data chats.jsonl --model gpt2      # from a model's folder

`raffia list presets` says what each preset is."""
# tyro keeps the breaks of indented lines only.
ABOUT = """\
Train EfficientZero in a new folder, and show how it goes. Ctrl-C saves and
leaves.

the folder holds:
  config.json     all settings, versions and the seed
  metrics.jsonl   what was measured; TensorBoard files beside it
  checkpoints     from which `raffia resume` goes on, exactly
  episodes        recordings, where they are asked for

begin with:
  --preset NAME   one of the settings that have a name, below
  --config FILE   settings from .json or .yaml, such as a run's config.json;
                  together with --preset they change it
  --run FOLDER    where the run is kept; if not given, runs/NAME-SEED, or the
                  first of runs/NAME-SEED-2, -3 ... that is free

examples:
  raffia train efficientzero --preset cartpole --seed 1
  raffia train efficientzero --preset cartpole --search.num_simulations 50
  raffia train efficientzero --preset lunarlander --config mine.yaml
  raffia train efficientzero --preset atari100k --env.id atari/breakout

presets:
{presets}

Then every setting can be given; shown are the values of {shown}."""


def train(words: Sequence[str]) -> int:
    """`raffia train ALGORITHM ...`

    >>> train(["efficientzero", "--preset", "cartpol"])
    Traceback (most recent call last):
        ...
    raffia.cli.errors.UsageError: there is no preset 'cartpol'; did you mean cartpole?
    """
    if words and words[0] in ("-h", "--help"):
        print(filled(HELP, help_width()))
        return 0
    if not words or words[0].startswith("-"):
        raise UsageError("which algorithm?", call("raffia", "train", "efficientzero", *words))
    if words[0] not in ALGORITHMS:
        raise UsageError(
            f"there is no algorithm {words[0]!r}{nearest(words[0], ALGORITHMS)}",
            call("raffia", "train", "efficientzero", *words[1:]),
        )
    if words[0] == "ilql":
        from raffia.cli.train_ilql import train_ilql

        return train_ilql(words[1:])
    return train_efficientzero(words[1:])


def train_efficientzero(words: Sequence[str]) -> int:
    """The words after `raffia train efficientzero`: settle the settings, then train."""
    own, settings = split_own(words, ["--preset", "--run", "--population"])
    preset, files = own.get("--preset", ""), split_own(words, ["--config"])[0]
    begun = preset_of(PRESETS, preset, "efficientzero", words) if preset else EfficientZeroRun()
    if "--population" in own:
        begun = _with_members(begun, own["--population"])
    config = from_command_line(
        begun,
        settings,
        prog="raffia train efficientzero",
        description=_about(preset),
    )
    if not preset and not files:
        example = call("raffia", "train", "efficientzero", "--preset", "cartpole", *words)
        raise UsageError("train what? Give --preset NAME or --config FILE", example)
    name = preset or Path(files["--config"]).stem
    named = [word for flag in own if flag != "--run" for word in (flag, own[flag])]
    folder = new_folder(
        own.get("--run"), f"{name}-{config.seed}", "efficientzero", *named, *settings
    )

    tell_start(config, folder)
    from raffia.recipes.efficientzero import train

    require_device(config.device)
    return tell_end(train(config, folder, preset=preset))


def new_folder(given: str | None, name: str, *words: str) -> Path:
    """Where a new run is kept: the folder that was given, or runs/NAME, or the first that is free.

    words: of the call, behind `raffia train`. UsageError if the folder given holds something.

    >>> new_folder(None, "cartpole-0", "efficientzero")
    PosixPath('runs/cartpole-0')
    """
    if given is not None:
        refuse_taken(Path(given), "train", *words)
        return Path(given)
    wanted = HOME / name
    folder = free_folder(wanted)
    if folder != wanted and is_run(wanted):
        print(f"{wanted} {summary_line(state_of(wanted))}")
        tell_next([[call("raffia", "resume", wanted), "goes on with it; this run is a new one"]])
    return folder


def _with_members(config: EfficientZeroRun, text: str) -> EfficientZeroRun:
    """With environments for each of them."""
    members = members_of(config.population, text, "efficientzero")
    num = -(-config.env.num_envs // members.size) * members.size
    return replace(config, population=members, env=replace(config.env, num_envs=num))


def tell_start(config: EfficientZeroRun | ILQLRun, folder: Path, remark: str = "") -> None:
    """Say what begins, before seconds go into loading torch.

    >>> tell_start(PRESETS["smoke"], Path("runs/a"))
    EfficientZero on CartPole-v1, seed 0, in runs/a; Ctrl-C saves and leaves
    """
    what = f"{config.title}, seed {config.seed}, in {folder}{remark}"
    print(f"{what}; Ctrl-C saves and leaves", flush=True)


def require_device(name: str) -> None:
    """UsageError where torch cannot compute there.

    >>> require_device("cpu")
    >>> require_device("gpu")
    Traceback (most recent call last):
        ...
    raffia.cli.errors.UsageError: torch cannot compute on --device gpu: it knows no such device
    """
    from raffia.recipes.parts import device_trouble

    if why := device_trouble(name):
        raise UsageError(f"torch cannot compute on --device {name}: {why}", "raffia doctor")


def tell_end(result: RunResult) -> int:
    """Say how a session ended and what can be done next; gives the exit status."""
    print(end_line(result))
    calls = uses(result.folder, speaks=result.env_step is None)
    if result.reason == "stopped":
        calls.insert(0, [call("raffia", "resume", result.folder), "go on where it was stopped"])
    tell_next(calls)
    return exit_status(result)


def uses(run: Path, speaks: bool) -> list[list[str]]:
    """Calls that use an agent, and what for; one that speaks can be talked to.

    >>> uses(Path("runs/chats-0"), speaks=True)[-1]
    ['raffia chat runs/chats-0', 'talk to it']
    """
    evaluation, report = "play episodes without exploring", "learning curves on one page"
    if speaks:
        evaluation, report = (
            "how good it is now",
            "curves, and dialogues with what it thinks of them",
        )
    calls = [
        [call("raffia", "evaluate", run), evaluation],
        [call("raffia", "report", run), report],
    ]
    return [*calls, [call("raffia", "chat", run), "talk to it"]] if speaks else calls


def end_line(result: RunResult) -> str:
    """How a session ended: why, after how much, how good."""
    played = result.env_step is not None
    steps = f"{number(result.env_step, 0)} environment steps, " if played else ""
    plural = "" if result.update == 1 else "s"
    updates = f"{number(result.update, 0)} update{plural} in {duration(result.seconds)}"
    best = "" if result.best_return is None else f"; best mean return {number(result.best_return)}"
    return f"{result.folder} {ENDS[result.reason]}: {steps}{updates}{best}"


def exit_status(result: RunResult) -> int:
    """0, or 128 and the number of the signal that stopped the run, as shells have it."""
    if result.reason != "stopped":
        return 0
    return 128 + signal.Signals[result.signal].value


def tell_next(calls: Sequence[Sequence[str]]) -> None:
    """Calls to copy, with what each does."""
    print(paint("next", "bold", sys.stdout))
    print(columns(calls, width=width_of(sys.stdout)))


def split_own(
    words: Sequence[str], flags: Sequence[str], algorithm: str = "efficientzero"
) -> tuple[dict[str, str], list[str]]:
    """The values of these flags, and the other words.

    >>> split_own(["--seed", "1", "--run=a"], ["--run"])
    ({'--run': 'a'}, ['--seed', '1'])
    """
    own, others, rest = {}, [], iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag in flags:
            found = value if equals else next(rest, "")
            if not found or found.startswith("--"):
                raise UsageError(f"{flag} needs a value", f"raffia train {algorithm} --help")
            own[flag] = found
        else:
            others.append(word)
    return own, others


def members_of(config: PopulationConfig, text: str, algorithm: str) -> PopulationConfig:
    """The population with as many members as `--population` says.

    >>> members_of(PopulationConfig(), "8", "ilql").size
    8
    """
    try:
        return replace(config, size=int(text))
    except ValueError as error:
        raise UsageError(
            f"--population {text}: it is a number of members, such as 8 ({error})",
            f"raffia train {algorithm} --help",
        ) from None


def preset_of(
    presets: Mapping[str, Config], name: str, algorithm: str, words: Sequence[str]
) -> Config:
    """The preset of this name; UsageError, with the nearest in the call, if there is none.

    >>> preset_of(PRESETS, "smoke", "efficientzero", []).env.id
    'CartPole-v1'
    """
    if name in presets:
        return presets[name]
    hint = nearest(name, list(presets))
    calls = ["raffia list presets"]
    if hint:
        near = hint.removeprefix("; did you mean ").removesuffix("?")
        typed = {name: near, f"--preset={name}": f"--preset={near}"}
        meant = [typed.get(word, word) for word in words]
        calls.insert(0, call("raffia", "train", algorithm, *meant))
    raise UsageError(f"there is no preset {name!r}{hint}", *calls)


def _about(preset: str) -> str:
    rows = [[name, config.env.id, SUMMARIES[name]] for name, config in PRESETS.items()]
    presets = columns(rows, width=help_width())
    shown = f"--preset {preset}" if preset else "no preset: the paper's, for Atari"
    return ABOUT.format(presets=presets, shown=shown)
