"""raffia train ilql: a new run on Wordle, or on dialogues of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from raffia.cli.errors import UsageError
from raffia.cli.style import call, columns, help_width
from raffia.cli.train import (
    members_of,
    new_folder,
    preset_of,
    require_device,
    split_own,
    tell_end,
    tell_start,
)
from raffia.recipes.ilql.config import DialogueDataConfig, ILQLRun
from raffia.recipes.ilql.presets import ILQL_PRESETS, ILQL_SUMMARIES
from raffia.train.config import from_command_line

OWN = ["--preset", "--run", "--data", "--model", "--population"]
TRUNK = "--model.trunk."
FREE = (
    "kind",
    "dropout",
    "gradient_checkpointing",
)  # of the trunk, whatever the model's folder says
ABOUT = """\
Train ILQL in a new folder, on logged dialogues with rewards, and show how it
goes. Ctrl-C saves and leaves.

the folder holds:
  config.json     all settings, versions and the seed
  metrics.jsonl   what was measured; TensorBoard files beside it
  checkpoints     from which `raffia resume` goes on, exactly
  tokenizer       and, of files, what it made of them in tokens
  language_model  of one to go on from, what the checkpoints do not hold

begin with:
  --preset NAME   one of the settings that have a name, below
  --data FILE     dialogues of your own: .jsonl, .json, .jsonl.gz or .parquet;
                  with --data.files several
  --model FOLDER  a causal language model as Hugging Face keeps it, to go on
                  from: a GPT-2, or any that transformers knows (extra: hf); with
                  --lora.rank 8 its weights stay, and small changes are learnt
  --population N  N members that learn side by side, of whom the better go on,
                  with other hyper-parameters: --population.ranges and so on
  --config FILE   settings from .json or .yaml, such as a run's config.json
  --run FOLDER    where the run is kept; if not given, runs/NAME-SEED, or the
                  first of runs/NAME-SEED-2, -3 ... that is free

The trunk's vocab_size, and with --model all its sizes, follow from tokens and
model.

examples:
  raffia train ilql --preset wordle --seed 1
  raffia train ilql --preset wordle --wordle.num_words 48 --loss.tau 0.9
  raffia train ilql --data chats.jsonl --model models/gpt2 --num_updates 20000

presets:
{presets}

Then every setting can be given; shown are the values of {shown}."""


def train_ilql(words: Sequence[str]) -> int:
    """The words after `raffia train ilql`: settle the settings, then train.

    >>> train_ilql(["--preset", "wordl"])
    Traceback (most recent call last):
        ...
    raffia.cli.errors.UsageError: there is no preset 'wordl'; did you mean wordle?
    """
    own, settings = split_own(words, OWN, "ilql")
    files, _ = split_own(words, ["--config"], "ilql")
    preset = own.get("--preset", "")
    if not preset and "--data" in own:
        preset = "language-model" if "--model" in own else "dialogue"
    config = from_command_line(
        _begun_with(own, preset, words),
        settings,
        prog="raffia train ilql",
        description=_about(preset),
    )
    if not preset and not files:
        raise UsageError(
            "train on what? Give --preset NAME, --data FILE or --config FILE",
            call("raffia", "train", "ilql", "--preset", "wordle", *words),
            call("raffia", "train", "ilql", "--data", "chats.jsonl", *words),
        )
    _refuse_sizes(config, settings)
    name = Path(own["--data"]).name.partition(".")[0] if "--data" in own else preset
    name = f"{name or Path(files['--config']).stem}-{config.seed}"
    folder = new_folder(own.get("--run"), name, "ilql", *_without_run(words))

    tell_start(config, folder)
    from raffia.recipes.ilql import fitted, train

    require_device(config.device)
    if not any(flag.startswith(f"{TRUNK}vocab_size") for flag in _plain(settings)):
        config = fitted(config)
    return tell_end(train(config, folder, preset=preset))


def _begun_with(own: dict[str, str], preset: str, words: Sequence[str]) -> ILQLRun:
    """What flags then change."""
    config = preset_of(ILQL_PRESETS, preset, "ilql", words) if preset else ILQLRun()
    if "--data" in own:
        data = replace(config.data, files=(own["--data"],))
        # What is of games is the preset's, where one of games is taken: no user has asked for it.
        evaluate = replace(config.evaluate, adv_weights=(), target_return=None)
        config = replace(config, task="data", data=data, evaluate=evaluate)
    if "--population" in own:
        config = replace(
            config, population=members_of(config.population, own["--population"], "ilql")
        )
    if "--model" in own:
        config = replace(config, language_model=own["--model"])
        if config.data == replace(DialogueDataConfig(), files=config.data.files):
            # The model's own tokens, where nothing else is said.
            data = replace(config.data, tokenizer=own["--model"], add_special_tokens=True)
            config = replace(config, data=data)
    return config


def _refuse_sizes(config: ILQLRun, settings: Sequence[str]) -> None:
    own = [flag.partition("=")[0] for flag in _plain(settings) if flag.startswith(TRUNK)]
    fixed = [flag for flag in own if flag.removeprefix(TRUNK).removeprefix("no_") not in FREE]
    if config.language_model and fixed:
        raise UsageError(
            f"{', '.join(fixed)}: the sizes are those of the model in {config.language_model}; "
            "leave them out, or leave out the model"
        )


def _plain(words: Sequence[str]) -> list[str]:
    """With underscores, as hyphens may stand for them."""
    return [f"--{word[2:].replace('-', '_')}" for word in words if word.startswith("--")]


def _without_run(words: Sequence[str]) -> list[str]:
    return split_own(words, ["--run"], "ilql")[1]


def _about(preset: str) -> str:
    rows = [[name, ILQL_SUMMARIES[name]] for name in ILQL_PRESETS]
    shown = f"--preset {preset}" if preset else "no preset"
    return ABOUT.format(presets=columns(rows, width=help_width()), shown=shown)
