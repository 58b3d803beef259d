"""EfficientZero on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from raffia.cli.algorithm import FOLDER, POPULATION, AlgorithmCommands
from raffia.cli.figures import show_evaluation
from raffia.cli.parser import UsageError
from raffia.cli.style import call, number, waiting
from raffia.hints import plural
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.recipes.population_config import PopulationConfig


class EfficientZeroCommands(AlgorithmCommands[EfficientZeroRun]):
    """EfficientZero's part of `raffia train`, `resume` and `evaluate`."""

    train_flags = {"--population": POPULATION}
    folder = {**FOLDER, "episodes": "recorded episodes, with --evaluate.record gif or mp4"}
    examples = (
        "raffia train efficientzero --preset cartpole --seed 1",
        "raffia train efficientzero --preset cartpole --search.num_simulations 50",
        "raffia train efficientzero --preset lunarlander --config mine.yaml",
        "raffia train efficientzero --preset atari100k --env.id atari/breakout",
        "raffia train efficientzero --preset cartpole --init-from runs/cartpole-0",
    )
    no_preset = "default values, the paper's for Atari"

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
        """Raise UsageError if no environment is named."""
        if "--preset" not in flags and "--config" not in flags:
            example = call("raffia", "train", self.name, "--preset", "cartpole", *words)
            raise UsageError(
                "nothing to train was given: pass --preset NAME or --config FILE", example
            )

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
        from raffia.recipes.efficientzero.evaluation import cut_line

        two_players = spec_of(config.env).num_players == 2
        if args.opponent and not two_players:
            raise UsageError(
                f"--opponent is for two-player games, but {run} plays {config.env.id}",
                call("raffia", "evaluate", run),
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
        )
        opponent = (args.opponent or config.evaluate.opponent) if two_players else None
        more = {"num_simulations": args.num_simulations, "opponent": opponent}
        against = f" against the {opponent} player" if opponent else ""
        num, of = found.num_cut, len(found.returns)
        cut = cut_line(num, of, config.evaluate.max_steps) if num else ""
        return show_evaluation(run, args, found, more, against, cut)
