"""ILQL on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raffia.cli.algorithm import FOLDER, POPULATION, AlgorithmCommands
from raffia.cli.figures import show_figures
from raffia.cli.parser import UsageError
from raffia.cli.style import call, columns, number, waiting
from raffia.recipes.ilql.config import ILQLRun
from raffia.recipes.ilql.presets import with_method

if TYPE_CHECKING:
    from raffia.recipes.ilql import ILQLEvaluation

TRUNK = "--model.trunk."
FREE = (
    "kind",
    "dropout",
    "gradient_checkpointing",
)  # of the trunk, whatever the model's folder sets


class ILQLCommands(AlgorithmCommands[ILQLRun]):
    """ILQL's part of `raffia train`, `resume` and `evaluate`."""

    train_flags = {
        "--data": (
            "FILE",
            "your own dialogues: .jsonl, .json, .jsonl.gz or .parquet; for several files use "
            "--data.files",
        ),
        "--language_model": (
            "FOLDER",
            "start from a causal language model in the Hugging Face format, such as GPT-2 (extra: "
            "hf); with --lora.rank 8 its weights are frozen and a low-rank change is learnt; with "
            "--data.chat_template dialogues are in its own format",
        ),
        "--method": (
            "NAME",
            "another method with the same networks and data: bc (behaviour cloning), filtered_bc "
            "(of the best tenth of the dialogues), single_step (one step of improvement), cql",
        ),
        "--population": POPULATION,
    }
    vouched_flags = {
        "--env": (
            "WHERE",
            "evaluate in your own environment: package.module:name or file.py:name; see "
            "docs/ilql.md",
        ),
    }
    folder = {
        **FOLDER,
        "tokenizer": "the tokenizer",
        "tokens": "the data files as tokens",
        "dialogues": "dialogues of the evaluations, for the report",
        "language_model": "with --language_model: what checkpoints leave out of the model",
    }
    examples = (
        "raffia train ilql --preset wordle --seed 1",
        "raffia train ilql --preset wordle --method bc",
        "raffia train ilql --preset wordle --wordle.num_words 48 --loss.tau 0.9",
        "raffia train ilql --data chats.jsonl --language_model models/gpt2 --num_updates 20000",
        "raffia train ilql --data chats.jsonl --language_model models/qwen --data.chat_template",
    )
    note = (
        "The trunk's vocab_size follows from the tokens; with --language_model all sizes follow "
        "from the model."
    )
    env = ""  # what `given` found

    def start_with(self, flags: Mapping[str, str], words: Sequence[str]) -> tuple[str, ILQLRun]:
        """The preset, which --data and --language_model may imply, with what these flags change."""
        implied = "language-model" if "--language_model" in flags else "dialogue"
        if "--data" in flags:
            flags = {"--preset": implied, **flags}
        config: ILQLRun
        preset, config = super().start_with(flags, words)
        if "--data" in flags:
            data = replace(config.data, files=(flags["--data"],))
            # A preset's settings of games are not wanted here.
            evaluate = replace(config.evaluate, adv_weights=(), target_return=None)
            config = replace(config, task="data", data=data, evaluate=evaluate)
        if "--language_model" in flags:
            config = replace(config, language_model=flags["--language_model"])
        if "--method" in flags:
            config = self._by_method(flags["--method"], config, flags)
        return preset, self.given(config, flags)

    def _by_method(self, name: Any, config: ILQLRun, flags: Mapping[str, str]) -> ILQLRun:
        """The config with the numbers of a method."""
        if "--config" in flags:
            raise UsageError("--method sets numbers that --config sets, too: leave one of them out")
        try:
            return with_method(name, config)
        except ValueError as error:
            raise UsageError(f"--{error}", f"raffia train {self.name} --help") from None

    def given(self, config: ILQLRun, flags: Mapping[str, str]) -> ILQLRun:
        """The config with the environment that --env names."""
        self.env = flags.get("--env", config.evaluate.env)
        try:
            return replace(config, evaluate=replace(config.evaluate, env=self.env))
        except ValueError as error:
            raise UsageError(str(error), "raffia train ilql --help") from error

    def named_for_calls(self) -> list[str]:
        """The flag that names the environment, if one was given, or recorded."""
        return ["--env", self.env] if self.env else []

    def parts(self, flags: Mapping[str, str]) -> dict[str, Any]:
        """The environment named by --env, for which the user vouches."""
        return {"make_env": flags.get("--env")}

    def check(
        self, config: Any, flags: Mapping[str, str], settings: Sequence[str], words: Sequence[str]
    ) -> None:
        """Raise UsageError if no data is named, or if sizes contradict a model."""
        if not {"--preset", "--data", "--config"} & set(flags):
            raise UsageError(
                "nothing to train on was given: pass --preset NAME, --data FILE or --config FILE",
                call("raffia", "train", self.name, "--preset", "wordle", *words),
                call("raffia", "train", self.name, "--data", "chats.jsonl", *words),
            )
        if flags.get("--preset") == "language-model" and not config.language_model:
            raise UsageError(
                "the preset language-model starts from a language model: give its folder, or train "
                "a small model from scratch",
                call("raffia", "train", self.name, *words, "--language_model", "FOLDER"),
                call("raffia", "train", self.name, "--preset", "dialogue", "--data", "FILE"),
            )
        own = [flag.partition("=")[0] for flag in _plain(settings) if flag.startswith(TRUNK)]
        fixed = [flag for flag in own if flag.removeprefix(TRUNK).removeprefix("no_") not in FREE]
        if config.language_model and fixed:
            raise UsageError(
                f"{', '.join(fixed)}: the sizes are those of the model in {config.language_model}; "
                "leave them out, or leave out the model"
            )
        if f"{TRUNK}vocab_size" in own:
            raise UsageError(f"{TRUNK}vocab_size: it follows from the tokens; leave it out")

    def run_name(self, flags: Mapping[str, str], preset: str, config: ILQLRun) -> str:
        """Name of a new run's folder: that of the data, if they were given."""
        name = super().run_name(flags, preset, config)
        if "--data" in flags:
            name = Path(flags["--data"]).name.partition(".")[0]
        return f"{name}-{flags['--method']}" if "--method" in flags else name

    def listed(self, config: ILQLRun) -> list[str]:
        """The task; no environment steps are played."""
        return [f"{self.algorithm.name}: {config.task}", ""]

    def uses(self, run: Path) -> list[list[str]]:
        """Calls that use the agent: it can be talked to."""
        return [
            [call("raffia", "evaluate", run, *self.named_for_calls()), "evaluate the agent"],
            [call("raffia", "report", run), "learning curves, and dialogues with their values"],
            [call("raffia", "chat", run), "talk to the agent"],
        ]

    def evaluate(self, run: Path, config: ILQLRun, args: argparse.Namespace) -> int:
        """Evaluate: games by each decoding, or losses on held-out rows."""
        self.refuse_special(run, args)
        waiting(f"evaluating {run} ...")
        from raffia.recipes.ilql import evaluate
        from raffia.recipes.ilql.dialogues import write_dialogues

        found = evaluate(
            run,
            episodes=args.episodes,
            checkpoint=args.checkpoint,
            seed=args.seed,
            device=args.device,
            make_env=args.env or None,
        )
        dialogues = write_dialogues(run, found.update, found.dialogues)
        record = figures(found)
        return show_figures(run, args, found.update, record, table(record), [dialogues])


def _plain(words: Sequence[str]) -> list[str]:
    """A name with underscores, as hyphens may replace them."""
    return [f"--{word[2:].replace('-', '_')}" for word in words if word.startswith("--")]


def figures(found: ILQLEvaluation) -> dict[str, Any]:
    """The figures of an evaluation, for JSON."""
    held_out = {"held_out": found.held_out} if found.held_out else {}
    if not found.games:
        return held_out
    from raffia.recipes.ilql.evaluation import figures_of

    by_name = {
        name: {**figures_of(games), "returns": list(games.returns)}
        for name, games in found.games.items()
    }
    return {**held_out, "mean_return": by_name["decode"]["mean_return"], "decodings": by_name}


def table(record: dict[str, Any]) -> str:
    """The figures as the terminal shows them.

    >>> print(table({"held_out": {"loss": 0.5, "v_mean": -1.25, "score": -0.5}}))
      loss     0.500
      v_mean  -1.250
    These are losses and means on held-out rows; they do not measure how well it speaks.
    No return is estimated: this requires a policy that imitates the data (loss.beta 0), and
    decoding from that policy.
    >>> one = {"mean_return": -2.5, "low": -3.0, "high": -2.0, "share_won": 0.75, "returns": [-2.5]}
    >>> print(table({"decodings": {"decode": one}}))
              return    low   high   won  games
      decode   -2.50  -3.00  -2.00  75 %      1
    """
    if "decodings" not in record:
        return _held_out(record["held_out"])
    shares = all("share_won" in one for one in record["decodings"].values())
    rows = [["", "return", "low", "high", *(["won"] if shares else []), "games"]]
    for name, one in record["decodings"].items():
        returns = [number(one[key], 2) for key in ("mean_return", "low", "high")]
        won = [f"{100 * one['share_won']:.0f} %"] if shares else []
        rows.append([name, *returns, *won, str(len(one["returns"]))])
    return columns(rows, right=[1, 2, 3, 4, 5])


ESTIMATE = {
    "estimated_return": "estimated return when decoding",
    "estimated_low": "... 95 % interval from",
    "estimated_high": "... to",
    "logged_return": "return of the same dialogues as logged",
    "effective_rows": "effective number of dialogues behind the estimate",
    "support": "fraction of its answers that are in the data",
}
FEW = 10  # dialogues, below which an estimate is hardly worth anything


def _held_out(means: dict[str, float]) -> str:
    hidden = {*ESTIMATE, "score", "gain_low"}
    losses = [[name, f"{value:.3f}"] for name, value in means.items() if name not in hidden]
    lines = [
        columns(losses, right=[1]),
        "These are losses and means on held-out rows; they do not measure how well it speaks.",
    ]
    if "estimated_return" not in means:
        lines.append(
            "No return is estimated: this requires a policy that imitates the data (loss.beta 0), "
            "and\ndecoding from that policy."
        )
        return "\n".join(lines)
    rows = [[label, f"{means[name]:.3f}"] for name, label in ESTIMATE.items()]
    lines += ["", columns(rows, right=[1])]
    lines.append(
        "The estimate weights the held-out dialogues by the probability of their answers in "
        "decoding;\nanswers that are not in the data count as the worst dialogue. No episode was "
        "played for it."
    )
    if means["effective_rows"] < FEW:
        lines.append(
            f"It is based on {means['effective_rows']:.1f} dialogues, which is too few to rely on: "
            "hold out more (--data.held_out),\nor judge by dialogues with the agent (raffia chat)."
        )
    return "\n".join(lines)
