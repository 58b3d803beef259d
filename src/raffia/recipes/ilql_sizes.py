"""Whether networks, tokens and a language model's folder fit together."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import torch

from raffia.algorithms.ilql.config import TrunkConfig
from raffia.algorithms.ilql.model import ILQLModel
from raffia.envs.text.tokenizer import Tokenizer
from raffia.nn.lm_folder import gpt2_settings, load_gpt2
from raffia.recipes.ilql_config import ILQLRun
from raffia.recipes.ilql_data import make_tokenizer
from raffia.recipes.ilql_evaluation import longest_game
from raffia.recipes.run_folder import RunError

__all__ = ["begin_with", "fitted", "refuse_unfit"]


def fitted(config: ILQLRun) -> ILQLRun:
    """The config with the sizes of the trunk as the language model's folder and the tokens ask.

    >>> fitted(ILQLRun()).model.trunk.vocab_size
    274
    """
    trunk = config.model.trunk
    least = 0
    if config.language_model:
        shape = gpt2_settings(config.language_model)
        shape["dropout"] = trunk.dropout
        trunk, least = replace(trunk, **shape), shape["vocab_size"]
    trunk = replace(trunk, vocab_size=max(least, make_tokenizer(config).num_tokens))
    return replace(config, model=replace(config.model, trunk=trunk))


def refuse_unfit(config: ILQLRun, tokenizer: Tokenizer) -> None:
    """RunError unless the trunk has a place for each token, and room for a game.

    >>> from raffia.recipes.ilql_data import make_tokenizer
    >>> refuse_unfit(ILQLRun(), make_tokenizer(ILQLRun()))
    Traceback (most recent call last):
    ...
    raffia.recipes.run_folder.RunError: model.trunk.vocab_size=50257, and there are 274 tokens: ...
    """
    trunk, num = config.model.trunk, tokenizer.num_tokens
    fits = trunk.vocab_size >= num if config.language_model else trunk.vocab_size == num
    if not fits:
        raise RunError(
            f"model.trunk.vocab_size={trunk.vocab_size}, and there are {num} tokens: set it to "
            f"{num}, as `raffia.recipes.ilql.fitted(config)` does"
        )
    if config.task == "wordle" and trunk.block_size < longest_game(config.wordle):
        raise RunError(
            f"model.trunk.block_size={trunk.block_size} is too short for a game: set it to "
            f"{longest_game(config.wordle)} or more"
        )


def begin_with(model: ILQLModel, folder: Path) -> None:
    """Give the trunk, and a policy of its own, the weights of a language model's folder.

    Tokens that the folder's vocabulary lacks keep the fresh weights that they have.
    """
    shape, state = load_gpt2(folder)
    trunk = model.config.trunk
    ours = {field.name: getattr(trunk, field.name) for field in fields(TrunkConfig)}
    ours["dim_feedfwd"] = trunk.dim_feedfwd or 4 * trunk.n_embd
    free = ("dropout", "vocab_size")
    unlike = [name for name in shape if name not in free and shape[name] != ours[name]]
    if unlike or trunk.vocab_size < shape["vocab_size"]:
        name = (unlike or ["vocab_size"])[0]
        raise RunError(
            f"model.trunk.{name}={ours[name]}, and {folder} holds a model with {shape[name]}: "
            "`raffia.recipes.ilql.fitted(config)` takes all sizes from there"
        )
    own = dict(model.named_parameters())
    with torch.no_grad():
        for part in ("trunk", "policy") if model.config.policy == "separate" else ("trunk",):
            for name, tensor in state.items():
                own[f"{part}.{name}"][: len(tensor)] = tensor
