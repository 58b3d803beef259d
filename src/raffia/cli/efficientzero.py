"""EfficientZero on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from raffia.cli.algorithm import FOLDER, POPULATION, AlgorithmCommands
from raffia.cli.figures import show_evaluation
from raffia.cli.parser import UsageError
from raffia.cli.style import call, number, waiting
from raffia.hints import plural
from raffia.recipes.algorithm import flag_of
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.recipes.population_config import PopulationConfig


class EfficientZeroCommands(AlgorithmCommands[EfficientZeroRun]):
    """EfficientZero's part of `raffia train`, `resume` and `evaluate`."""

    train_flags = {"--population": POPULATION}
    vouched_flags = {
        "--env": (
            "WHERE",
            "your own environment, as --env.id: package.module:name or file.py:name, of its class "
            "or of a function that makes it",
        ),
        "--networks": ("WHERE", "your own networks: ... of a function that returns the model"),
    }
    folder = {**FOLDER, "episodes": "recorded episodes, with --evaluate.record gif or mp4"}
    examples = (
        "raffia train efficientzero --preset cartpole --seed 1",
        "raffia train efficientzero --preset cartpole --search.num_simulations 50",
        "raffia train efficientzero --preset lunarlander --config mine.yaml",
        "raffia train efficientzero --preset atari100k --env.id atari/breakout",
        "raffia train efficientzero --preset cartpole --init-from runs/cartpole-0",
    )
    outside: Mapping[str, str] = MappingProxyType({})  # flags that name what is not installed
    no_preset = "default values, the paper's for Atari"

    def start_with(
        self, flags: Mapping[str, str], words: Sequence[str]
    ) -> tuple[str, EfficientZeroRun]:
        """The preset, with the environment and the networks that are named."""
        preset, config = super().start_with(flags, words)
        return preset, self.given(config, flags)

    def given(self, config: EfficientZeroRun, flags: Mapping[str, str]) -> EfficientZeroRun:
        """The config with the environment and the networks that are named."""
        config, _ = self.algorithm.with_named(config, self.parts(flags))
        self._note(config)
        return config

    def parts(self, flags: Mapping[str, str]) -> dict[str, Any]:
        """The environment and the networks that are named, for which the user vouches."""
        given = {part: flags.get(flag_of(part)) for part in self.algorithm.names}
        return {part: name for part, name in given.items() if name}

    def named_for_calls(self) -> list[str]:
        """The flags that name what no installed package has."""
        return [word for pair in self.outside.items() for word in pair]

    def run_name(self, flags: Mapping[str, str], preset: str, config: EfficientZeroRun) -> str:
        """Name of a new run's folder: the preset's, or that of another environment than its."""
        if preset and config.env.id != self.algorithm.presets[preset].env.id:
            return config.env.name.replace("/", "-")
        return super().run_name(flags, preset, config)

    def _note(self, config: EfficientZeroRun) -> None:
        found = self.algorithm.named_outside(config)
        self.outside = {flag_of(part): name for part, name in found.items()}

    def with_population(
        self, config: EfficientZeroRun, population: PopulationConfig
    ) -> EfficientZeroRun:
        """The config with as many environments for each member."""
        num_envs = -(-config.env.num_envs // population.size) * population.size
        env = replace(config.env, num_envs=num_envs)
        return replace(config, population=population, env=env)

    def check(
        self, config: Any, flags: Mapping[str, str], settings: Sequence[str], words: Sequence[str]
    ) -> None:
        """Raise UsageError if no environment is named, or two."""
        if "--preset" not in flags and "--config" not in flags:
            example = call("raffia", "train", self.name, "--preset", "cartpole", *words)
            raise UsageError(
                "nothing to train was given: pass --preset NAME or --config FILE", example
            )
        if self.algorithm.with_named(config, self.parts(flags))[0] != config:
            raise UsageError(
                f"--env {flags['--env']} and --env.id {config.env.id} name two environments: leave "
                "one of them out"
            )
        self._note(config)

    def preset_rows(self) -> list[list[str]]:
        """Name, environment and summary of each preset."""
        presets, summaries = self.algorithm.presets, self.algorithm.summaries
        return [[name, config.env.id, summaries[name]] for name, config in presets.items()]

    def listed(self, config: EfficientZeroRun) -> list[str]:
        """The environment and steps of a preset."""
        return [config.env.id, number(config.collect.num_env_steps, 0)]

    def longer(self, config: EfficientZeroRun) -> list[str]:
        """Flags that make a run twice as long: in steps, or where none are played in updates."""
        if not config.is_offline:
            return super().longer(config)
        more = config.data.num_updates + 2 * config.collect.extra_updates
        return ["--collect.extra_updates", str(more)]

    def evaluate(self, run: Path, config: EfficientZeroRun, args: argparse.Namespace) -> int:
        """Evaluate: episodes without noise, in games of two players against an opponent."""
        self.refuse_special(run, args)
        waiting(f"playing {plural(args.episodes, 'episode')} with {run} ...")
        from raffia.recipes.efficientzero import evaluate
        from raffia.recipes.efficientzero.actors import spec_of
        from raffia.recipes.efficientzero.api import read_with
        from raffia.recipes.efficientzero.evaluation import cut_line

        parts = self.parts({"--env": args.env, "--networks": args.networks})
        if args.opponent:
            config, make_env, _ = read_with(run, **parts)
            self._note(config)
            if spec_of(config.env, make_env).num_players != 2:
                raise UsageError(
                    f"--opponent is for two-player games, but {run} plays {config.env.id}",
                    call("raffia", "evaluate", run, *self.named_for_calls()),
                )
        found = evaluate(
            run,
            episodes=args.episodes,
            checkpoint=args.checkpoint,
            seed=args.seed,
            device=args.device,
            num_simulations=args.num_simulations,
            record=args.record,
            suffix=args.format or "gif",
            opponent=args.opponent,
            **parts,
        )
        opponent = (args.opponent or config.evaluate.opponent) if found.as_first else None
        more = {"num_simulations": args.num_simulations, "opponent": opponent}
        against = f" against the {opponent} player" if opponent else ""
        num, of = found.num_cut, len(found.returns)
        cut = cut_line(num, of, config.evaluate.max_steps) if num else ""
        return show_evaluation(run, args, found, more, against, cut)
