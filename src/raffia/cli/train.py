"""raffia train: a new run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raffia.cli.algorithm import AlgorithmCommands, commands_of
from raffia.cli.parser import UsageError
from raffia.cli.runs import (
    HOME,
    free_folder,
    print_next,
    print_start,
    refuse_taken,
    require_device,
    resume_call,
    summary_line,
)
from raffia.cli.style import call, filled, help_width
from raffia.recipes.algorithm import ALGORITHMS, Algorithm, find_algorithm, flag_of
from raffia.report.folder import is_run, summarise
from raffia.train.config import ConfigError, from_command_line

HELP = """\
usage: raffia train ALGORITHM (--preset NAME | --config FILE | --data FILE)
                    [--run FOLDER] [settings]

Train an agent in a new run folder and show its progress. Ctrl-C saves a checkpoint and stops;
`raffia resume FOLDER` continues. The folder holds settings, metrics (JSON Lines and TensorBoard),
checkpoints and recorded episodes.

algorithms:
{algorithms}
  package:name   your own algorithm, or file.py:name; see docs/own_algorithm.md

examples:
  raffia train efficientzero --preset cartpole           # into runs/cartpole-0
  raffia train efficientzero --preset cartpole --seed 1  # into runs/cartpole-1
  raffia train efficientzero --preset cartpole --help    # all settings
  raffia train ilql --preset wordle                      # into runs/wordle-0
  raffia train ilql --data chats.jsonl --language_model gpt2  # fine-tunes gpt2

`raffia list presets` lists all presets."""


def train(words: Sequence[str]) -> int:
    """`raffia train ALGORITHM ...`

    >>> train(["efficientzero", "--preset", "cartpol"])
    Traceback (most recent call last):
        ...
    raffia.cli.parser.UsageError: there is no preset 'cartpol'; did you mean cartpole?
    """
    if words and words[0] in ("-h", "--help"):
        rows = [f"  {name:<14} {one.summary}" for name, one in ALGORITHMS.items()]
        print(filled(HELP.format(algorithms="\n".join(rows)), help_width()))
        return 0
    asked = Asked.of(words, "train", ["--run"], _help_text)
    name, config, commands, flags = asked.name, asked.config, asked.commands, asked.flags
    folder = new_folder(
        flags.get("--run"),
        f"{commands.run_name(flags, asked.preset, config)}-{config.seed}",
        name,
        *split_own(words[1:], ["--run"], f"raffia train {name}")[1],
    )

    print_start(config, folder)
    require_device(config.device)
    from raffia.recipes import train as train_in

    more = {"algorithm": asked.algorithm, "preset": asked.preset, **commands.parts(flags)}
    return commands.print_end(train_in(config, folder, **more))


def _help_text(commands: AlgorithmCommands[Any], preset: str) -> str:
    return commands.help(preset)


@dataclass(frozen=True)
class Asked:
    """The request in the words after `raffia train` or `raffia sweep`.

    >>> words = ["efficientzero", "--preset", "smoke", "--seed", "3"]
    >>> Asked.of(words, "train", [], AlgorithmCommands.help).config.seed
    3
    """

    name: str  # of the algorithm, as it was given
    algorithm: Algorithm
    commands: AlgorithmCommands[Any]
    flags: dict[str, str]  # of the command and of the algorithm, that name no settings
    settings: list[str]  # the other words
    preset: str
    config: Any

    @classmethod
    def of(
        cls,
        words: Sequence[str],
        command: str,
        own: Sequence[str],
        help_text: Callable[[AlgorithmCommands[Any], str], str],
    ) -> Asked:
        """Read the words; UsageError or ConfigError with the call that works.

        own: flags of the command itself, each with a value.
        help_text: the help above the settings, of an algorithm with one of its presets or none.
        """
        first = next(iter(ALGORITHMS))
        if not words or words[0].startswith("-"):
            raise UsageError("which algorithm?", call("raffia", command, first, *words))
        name, words = words[0], words[1:]
        try:
            algorithm = find_algorithm(name)
        except ConfigError as error:
            help_of, other = f"raffia {command} --help", call("raffia", command, first, *words)
            raise UsageError(str(error), help_of if ":" in name else other) from error
        commands = commands_of(algorithm)
        prog = f"raffia {command} {name}"
        own = ["--preset", *own, *commands.train_flags, *commands.vouched_flags]
        flags, settings = split_own(words, own, prog)
        flags |= split_own(words, ["--config"], prog)[0]
        preset, config = commands.start_with(flags, words)
        config = from_command_line(
            config,
            settings,
            prog=prog,
            description=help_text(commands, preset),
        )
        commands.check(config, flags, settings, words)
        if "--config" in flags:  # a file may come from elsewhere: it runs no code by itself
            algorithm.refuse_unnamed(config, _named(algorithm, flags, settings))
        return cls(name, algorithm, commands, flags, settings, preset, config)


def _named(algorithm: Algorithm, flags: Mapping[str, str], settings: Sequence[str]) -> list[str]:
    """The parts that the words name: by a flag of their own, or by the setting that holds them."""
    given = {word.partition("=")[0].replace("-", "_") for word in (*settings, *flags)}
    by_words = {part: (f"__{setting}", flag_of(part)) for part, setting in algorithm.names.items()}
    return [
        part
        for part, names in by_words.items()
        if any(name.replace("-", "_") in given for name in names)
    ]


def new_folder(given: str | None, name: str, *words: str) -> Path:
    """The folder of a new run: the folder that was given, or runs/NAME, or the first that is free.

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
        print(f"{wanted} {summary_line(summarise(wanted))}")
        print_next([[resume_call(wanted), "continue that run; this one is new"]])
    return folder


def split_own(
    words: Sequence[str], flags: Sequence[str], prog: str
) -> tuple[dict[str, str], list[str]]:
    """The values of these flags, and the other words.

    prog: the command, for the error.

    >>> split_own(["--seed", "1", "--run=a"], ["--run"], "raffia train")
    ({'--run': 'a'}, ['--seed', '1'])
    >>> split_own(["--sweep-seed", "1"], ["--sweep_seed"], "raffia sweep")
    ({'--sweep_seed': '1'}, [])
    """
    own, others, rest = {}, [], iter(words)
    known = {flag.replace("-", "_"): flag for flag in flags}
    for word in rest:
        given, equals, value = word.partition("=")
        if flag := known.get(given.replace("-", "_")):
            found = value if equals else next(rest, "")
            if not found or found.startswith("--"):
                raise UsageError(f"{flag} needs a value", f"{prog} --help")
            own[flag] = found
        else:
            others.append(word)
    return own, others
