"""`AlgorithmCommands`: an algorithm's part of the command line, with what fits any by default."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from raffia.cli.figures import show_evaluation
from raffia.cli.parser import UsageError
from raffia.cli.runs import end_line, exit_status, print_next
from raffia.cli.style import call, section, waiting
from raffia.hints import nearest, plural
from raffia.lazy import imported
from raffia.recipes.algorithm import Algorithm
from raffia.recipes.population_config import PopulationConfig
from raffia.train.config import AnyConfig, setting_names

if TYPE_CHECKING:
    from raffia.recipes import RunResult

Config = TypeVar("Config", bound=AnyConfig)
# Flags of `raffia evaluate` that not every algorithm has.
SPECIAL = {
    **dict.fromkeys(("--num-simulations", "--opponent", "--record"), ("EfficientZero",)),
    "--env": ("EfficientZero", "ILQL"),
    "--networks": ("EfficientZero",),
}
# What a run's folder holds, and the flags of `raffia train` that set no setting: rows of help.
FOLDER = {
    "config.json": "all settings, versions and the seed",
    "metrics.jsonl": "the metrics; TensorBoard files are next to it",
    "checkpoints": "`raffia resume` continues from them exactly",
}
PRESET = ("--preset NAME", "one of the presets below")
CONFIG = (
    "--config FILE",
    "settings from a .json or .yaml file, such as a run's config.json; with --preset they "
    "override the preset's",
)
RUN = (
    "--run FOLDER",
    "folder of the run (default: runs/NAME-SEED, or the first free one of runs/NAME-SEED-2, -3 "
    "...)",
)
POPULATION = (
    "N",
    "train a population of N members, in which better members replace worse ones; see the "
    "population settings",
)


class AlgorithmCommands(Generic[Config]):
    """The part of `raffia train`, `resume` and `evaluate` of one algorithm; subclasses add more.

    >>> from raffia.recipes.algorithm import ALGORITHMS
    >>> commands_of(ALGORITHMS["ilql"]).uses(Path("runs/chats-0"))[-1]
    ['raffia chat runs/chats-0', 'talk to the agent']
    """

    # Flags of `raffia train` besides --preset, --config and --run, each with its value and help;
    # and those of train, sweep, resume and evaluate that name what is imported.
    train_flags: Mapping[str, tuple[str, str]] = {}
    vouched_flags: Mapping[str, tuple[str, str]] = {}
    folder: Mapping[str, str] = FOLDER  # what a run's folder holds
    examples: Sequence[str] = ()  # of `raffia train`; one with the algorithm's name if empty
    note = ""  # a paragraph of help
    no_preset = "default values"  # which help shows without a preset

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.name = algorithm.reference or algorithm.name  # in calls

    def start_with(self, flags: Mapping[str, str], words: Sequence[str]) -> tuple[str, Config]:
        """The preset's name, or nothing, and the config that settings then change.

        flags: "--preset" and the `train_flags` that were given.
        words: behind the algorithm's name, for errors.
        """
        preset = flags.get("--preset", "")
        config: Any = self.preset(preset, words) if preset else self.algorithm.config()
        is_asked = any(word.partition("=")[0] == "--population" for word in words)
        if is_asked and not hasattr(config, "population"):
            raise UsageError(
                "--population is for EfficientZero and ILQL, whose environments and data know of "
                "members. Any learner can be stacked from Python: raffia.evolution.Population, see "
                "docs/evolution.md. Several seeds train by",
                call("raffia", "sweep", self.name, "--seeds", "0..3"),
            )
        if "--population" in flags:
            population = self._population(config.population, flags["--population"])
            config = self.with_population(config, population)
        return preset, config

    def preset(self, name: str, words: Sequence[str]) -> Config:
        """The preset of this name; UsageError, with the nearest in the call, if there is none.

        >>> from raffia.recipes.algorithm import ALGORITHMS
        >>> commands_of(ALGORITHMS["efficientzero"]).preset("smoke", []).env.id
        'CartPole-v1'
        """
        presets = self.algorithm.presets
        if name in presets:
            found: Config = presets[name]
            return found
        near, calls = nearest(name, presets), ["raffia list presets"]
        if near is not None:
            typed = {name: near, f"--preset={name}": f"--preset={near}"}
            meant = [typed.get(word, word) for word in words]
            calls.insert(0, call("raffia", "train", self.name, *meant))
        hint = "" if near is None else f"; did you mean {near}?"
        raise UsageError(f"there is no preset {name!r}{hint}", *calls)

    def with_population(self, config: Config, population: PopulationConfig) -> Config:
        """The config with a population of so many members."""
        return replace(config, population=population)

    def _population(self, config: PopulationConfig, text: str) -> PopulationConfig:
        """The population with as many members as `--population` sets."""
        try:
            return replace(config, size=int(text))
        except ValueError as error:
            raise UsageError(
                f"--population {text} must be a number of members, such as 8 ({error})",
                f"raffia train {self.name} --help",
            ) from None

    def check(
        self, config: Any, flags: Mapping[str, str], settings: Sequence[str], words: Sequence[str]
    ) -> None:
        """Raise UsageError for a wrong call, before anything is made.

        settings: the words that are not flags of the command's own, and so name settings.
        """

    def given(self, config: Config, flags: Mapping[str, str]) -> Config:
        """Apply the flags of `raffia resume`, the `vouched_flags`, to the config."""
        return config

    def parts(self, flags: Mapping[str, str]) -> dict[str, Any]:
        """What `raffia.recipes.train` and `resume` take besides the settings, by the flags."""
        return {}

    def run_name(self, flags: Mapping[str, str], preset: str, config: Config) -> str:
        """Name of a new run's folder, without the seed."""
        stem = Path(flags["--config"]).stem if "--config" in flags else self.algorithm.name
        return preset or stem

    def help(self, preset: str) -> str:
        """The text of `raffia train NAME --help` above the settings."""
        about = (
            f"Train {self.algorithm.title} in a new run folder and show its progress. Ctrl-C saves "
            "a checkpoint and stops; `raffia resume FOLDER` continues."
        )
        examples = self.examples or [f"raffia train {self.name} --seed 1"]
        return "\n\n".join(
            [
                about,
                section("the folder holds", list(self.folder.items())),
                section("start from", [PRESET, *self._flag_rows(), CONFIG, RUN]),
                *([self.note] if self.note else []),
                section("examples", [[example] for example in examples]),
                self.settings_help(preset),
            ]
        )

    def help_of_sweep(self, preset: str, blocks: Sequence[str], examples: str) -> str:
        """The text of `raffia sweep NAME --help` above the settings.

        blocks: about sweeps and the flags of the command itself.
        examples: indented calls.
        """
        start = section("start from", [PRESET, *self._flag_rows(), CONFIG])
        return "\n\n".join([*blocks, start, f"examples:\n{examples}", self.settings_help(preset)])

    def _flag_rows(self) -> list[tuple[str, str]]:
        flags = {**self.train_flags, **self.vouched_flags}
        return [(f"{flag} {value}", text) for flag, (value, text) in flags.items()]

    def settings_help(self, preset: str) -> str:
        """The presets, and whose values help shows as defaults."""
        shown = f"values of --preset {preset}" if preset else self.no_preset
        presets = section("presets", self.preset_rows() or [["none"]])
        return f"{presets}\n\nAll settings, with the {shown}:"

    def preset_rows(self) -> list[list[str]]:
        """Name and summary of each preset."""
        summaries = self.algorithm.summaries
        return [[name, summaries.get(name, "")] for name in self.algorithm.presets]

    def listed(self, config: Config) -> list[str]:
        """The environment or task, and the environment steps, of a preset in `raffia list
        presets`."""
        return [self.algorithm.name, ""]

    def uses(self, run: Path) -> list[list[str]]:
        """Calls that use the agent of a run, and what for."""
        named = self.named_for_calls()
        return [
            [call("raffia", "evaluate", run, *named), "play episodes without exploration"],
            [call("raffia", "report", run), "learning curves on one page"],
        ]

    def print_end(self, result: RunResult) -> int:
        """Print how a session ended and the next calls; returns the exit status."""
        print(end_line(result))
        calls = self.uses(result.folder)
        if result.reason == "stopped":
            resume = call("raffia", "resume", result.folder, *self.named_for_calls())
            calls.insert(0, [resume, "continue from where it stopped"])
        print_next(calls)
        return exit_status(result)

    def named_for_calls(self) -> list[str]:
        """The flag that names where the algorithm is imported from; see `recorded_algorithm`."""
        return ["--algorithm", self.name] if self.algorithm.reference else []

    def longer(self, config: Config) -> list[str]:
        """Flags that make a run twice as long."""
        return [f"--{self.algorithm.length}", str(2 * self.algorithm.length_of(config))]

    def without_target(self) -> list[str]:
        """Flags of a run that does not end at a mean return; none without a setting for it."""
        names = setting_names(self.algorithm.config)
        found = [name for name in names if name.rpartition(".")[2] == "target_return"]
        return [f"--{found[0]}", "none"] if found else []

    # -- evaluation

    def evaluate(self, run: Path, config: Config, args: argparse.Namespace) -> int:
        """`raffia evaluate`: play episodes, write the figures, show them."""
        self.refuse_special(run, args)
        waiting(f"playing {plural(args.episodes, 'episode')} with {run} ...")
        from raffia.recipes import evaluate

        found = evaluate(
            run,
            algorithm=self.algorithm,
            episodes=args.episodes,
            checkpoint=args.checkpoint,
            seed=args.seed,
            device=args.device,
        )
        return show_evaluation(run, args, found)

    def refuse_special(self, run: Path, args: argparse.Namespace) -> None:
        """Raise UsageError for flags that only another algorithm has."""
        for flag, titles in SPECIAL.items():
            given = getattr(args, flag.removeprefix("--").replace("-", "_"))
            if given and self.algorithm.title not in titles:
                raise UsageError(
                    f"{flag} is only for runs of {' and '.join(titles)}; {run} is a run of "
                    f"{self.algorithm.title}",
                    call("raffia", "evaluate", run, *self.named_for_calls()),
                )


def commands_of(algorithm: Algorithm) -> AlgorithmCommands[Any]:
    """The part of the command line that an algorithm has.

    >>> from raffia.recipes.algorithm import ALGORITHMS
    >>> type(commands_of(ALGORITHMS["efficientzero"])).__name__
    'EfficientZeroCommands'
    """
    found: AlgorithmCommands[Any] = imported(algorithm.commands)(algorithm)
    return found
