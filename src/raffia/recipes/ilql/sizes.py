"""Whether networks, tokens and a language model's folder fit together."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from raffia.lm.folder import weight_files
from raffia.lm.tokenizers.tokenizer import Tokenizer
from raffia.recipes.ilql.config import ILQLRun
from raffia.recipes.ilql.data import make_tokenizer
from raffia.recipes.ilql.evaluation import longest_game
from raffia.recipes.ilql.networks import shape_of
from raffia.train.experiment import RunError

LARGE = 10_000_000  # parameters of the layers, from which on more threads pay


def with_sizes(config: ILQLRun) -> ILQLRun:
    """The config with the sizes of the trunk as the language model's folder and the tokens require.

    >>> with_sizes(ILQLRun()).model.trunk.vocab_size
    274
    """
    trunk, lora, least = config.model.trunk, config.lora, 0
    if config.language_model:
        config = replace(config, language_model=os.path.abspath(config.language_model))
        shape = shape_of(config)
        weight_files(Path(config.language_model))
        shape["dropout"] = trunk.dropout
        trunk, least = replace(trunk, **shape), shape["vocab_size"]
    num_tokens = make_tokenizer(config).num_tokens
    if lora.rank and lora.learn_embeddings is None:
        lora = replace(lora, learn_embeddings=num_tokens > least)
    trunk = replace(trunk, vocab_size=max(least, num_tokens))
    return replace(config, model=replace(config.model, trunk=trunk), lora=lora)


def with_threads(config: ILQLRun) -> ILQLRun:
    """The config with a number of threads filled in if it was left open.

    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> with_threads(ILQL_PRESETS["wordle"]).num_threads
    1
    """
    if config.num_threads:
        return config
    trunk = config.model.trunk
    large = 12 * trunk.n_layer * trunk.n_embd**2 >= LARGE
    return replace(config, num_threads=torch.get_num_threads() if large else 1)


def refuse_unfit(config: ILQLRun, tokenizer: Tokenizer) -> None:
    """RunError unless the trunk has an embedding for each token, and room for a game.

    >>> from raffia.recipes.ilql.data import make_tokenizer
    >>> refuse_unfit(ILQLRun(), make_tokenizer(ILQLRun()))
    Traceback (most recent call last):
    ...
    raffia.train.experiment.RunError: model.trunk.vocab_size=50257, but there are 274 tokens: set it
    to 274, as `raffia.recipes.ilql.with_sizes(config)` does
    """
    trunk, num = config.model.trunk, tokenizer.num_tokens
    fits = trunk.vocab_size >= num if config.language_model else trunk.vocab_size == num
    if not fits:
        raise RunError(
            f"model.trunk.vocab_size={trunk.vocab_size}, but there are {num} tokens: set it to "
            f"{num}, as `raffia.recipes.ilql.with_sizes(config)` does"
        )
    if config.task == "wordle" and trunk.block_size < longest_game(config.wordle):
        raise RunError(
            f"model.trunk.block_size={trunk.block_size} is too short for a game: set it to "
            f"{longest_game(config.wordle)} or more"
        )
    if config.lora.rank and config.lora.learn_embeddings is None:
        raise RunError(
            "lora.learn_embeddings is not set: set it to True or False, or use "
            "`raffia.recipes.ilql.with_sizes(config)`, which checks whether tokens were added"
        )
