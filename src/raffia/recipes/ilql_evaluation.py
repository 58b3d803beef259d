"""How good a run's agent is: by games that it plays, or by rows that were held out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from raffia.algorithms.ilql.decode_config import DecodeConfig
from raffia.algorithms.ilql.policy import ILQL_Policy
from raffia.algorithms.ilql.token_weights import masks_of
from raffia.data.dialogue import DialogueDataset
from raffia.envs.text.tokenizer import Tokenizer
from raffia.envs.text.wordle.game import Wordle
from raffia.envs.text.wordle.play import WordleEvaluation
from raffia.envs.text.wordle.play import evaluate as play
from raffia.functional.seeds import generator_for
from raffia.recipes.ilql_config import ILQLRun, WordleConfig
from raffia.recipes.ilql_networks import Interrupted, Networks, Stoppable
from raffia.tensordict.tensordict import TensorDict
from raffia.train.tasks import Evaluated

__all__ = ["ILQLEvaluation", "decodings", "evaluated", "for_games", "held_out_means", "play_wordle"]

AS_SET = "decode"  # the name of the decoding that the config has
GUESS = {"words": 2, "letters": 7}  # tokens of the longest guess in the data, with its end
Stop = Callable[[], bool]


@dataclass(frozen=True)
class ILQLEvaluation:
    """What came of an evaluation: games by decoding, or means over rows that were held out.

    >>> ILQLEvaluation(held_out={"loss": 0.5}).games
    {}
    """

    games: dict[str, WordleEvaluation] = field(default_factory=dict)
    held_out: dict[str, float] = field(default_factory=dict)
    dialogues: dict[str, Any] = field(default_factory=dict)  # see `ilql_dialogues`
    update: int = 0  # after which the agent was asked


def decodings(config: ILQLRun) -> dict[str, DecodeConfig]:
    """The ways of speaking that are compared, the config's first.

    >>> from raffia.recipes.ilql_config import ILQLEvaluateConfig
    >>> list(decodings(ILQLRun(evaluate=ILQLEvaluateConfig(adv_weights=(0.0, 4.0)))))
    ['decode', 'adv_weight=0', 'adv_weight=4']
    """
    found = {AS_SET: config.decode}
    for weight in config.evaluate.adv_weights:
        found[f"adv_weight={weight:g}"] = (
            replace(config.decode, include_adv=True, adv_weight=weight)
            if weight
            else replace(config.decode, include_adv=False, include_logits=True)
        )
    return found


def spoken(config: ILQLRun, hyper: TensorDict) -> ILQLRun:
    """The config with the decoding of a member of a population, who may have its own numbers.

    >>> hyper = TensorDict(temperature=torch.tensor(0.5), adv_weight=torch.tensor(1.0))
    >>> decode = spoken(ILQLRun(), hyper).decode
    >>> decode.temperature, decode.adv_weight == ILQLRun().decode.adv_weight
    (0.5, True)
    """
    own = {}
    for name in ("temperature", "adv_weight"):
        number = hyper[name].cpu()
        if number != torch.tensor(getattr(config.decode, name), dtype=number.dtype):
            own[name] = number.item()
    return replace(config, decode=replace(config.decode, **own)) if own else config


def for_games(decode: DecodeConfig, config: WordleConfig) -> DecodeConfig:
    """The decoding with an end to what is no guess any more.

    >>> for_games(DecodeConfig(), WordleConfig()).max_new_tokens
    2
    """
    most = GUESS[config.layout]
    return replace(decode, max_new_tokens=min(most, decode.max_new_tokens or most))


def longest_game(config: WordleConfig) -> int:
    """Tokens that a game may have: those of the data, and what the agent may see.

    >>> longest_game(WordleConfig()), longest_game(WordleConfig(layout="letters"))
    (28, 80)
    """
    colours = {"words": 1, "letters": 5}[config.layout] + 1  # with their end
    guess = GUESS[config.layout]
    # A guess that was cut where it had no end gets one when it is read again.
    return max(1 + 6 * (guess + colours) + 1, 1 + 5 * (guess + 1 + colours) + guess)


def play_wordle(
    networks: Networks,
    tokenizer: Tokenizer,
    wordle: Wordle,
    config: ILQLRun,
    *,
    seed: int,
    stop: Stop = lambda: False,
) -> dict[str, WordleEvaluation]:
    """Games of each decoding, which all meet the same chances."""
    found = {}
    for name, decode in decodings(config).items():
        policy = ILQL_Policy(
            networks,
            tokenizer,
            for_games(decode, config.wordle),
            generator=generator_for(seed, "decode", name),
        )
        found[name] = play(
            Stoppable(policy, stop),
            wordle,
            config.evaluate.num_episodes,
            seed,
            batch_size=config.evaluate.batch_size,
        )
    return found


def held_out_means(
    networks: Networks,
    data: DialogueDataset,
    config: ILQLRun,
    numbers: TensorDict,  # "hyper" of the learner's state
    *,
    stop: Stop = lambda: False,
) -> dict[str, float]:
    """The losses of all these rows as of one batch, and the means of V, Q and the advantage."""
    num = min(len(data), config.evaluate.num_episodes)
    rows = np.linspace(0, len(data) - 1, num).round().astype(np.int64)
    size, device = config.evaluate.batch_size, numbers["tau"].device
    batches = []
    for start in range(0, num, size):
        batch = data.take(rows[start : start + size], per_token=config.model.per_token)
        mask = masks_of(batch["action_mask"], batch["terminals"], config.loss.mask).values
        batches.append((batch, int(mask.sum()), int(batch["attn_mask"][:, 1:].sum())))
    actions, tokens = (sum(counts) for counts in list(zip(*batches, strict=True))[1:])
    means: dict[str, float] = {}
    for batch, own_actions, _ in batches:
        if stop():
            raise Interrupted
        # Losses are divided by what rows have in the mean over all of them, so that the mean over
        # the rows of all batches is that of one batch.
        for name, total in (("actions_per_row", actions), ("next_tokens_per_row", tokens)):
            batch[name] = torch.full((len(batch),), max(total, 1) / num)
        with torch.no_grad():
            _, told = networks.loss(batch.to(device), numbers)
        for name, value in told.items():
            if name == "num_tokens":
                continue
            of_actions = name.endswith("_mean")
            share = own_actions / max(actions, 1) if of_actions else len(batch) / num
            means[name] = means.get(name, 0.0) + share * float(value)
    return means


def evaluated(found: ILQLEvaluation) -> Evaluated:
    """The row that tells of an evaluation.

    >>> evaluated(ILQLEvaluation(held_out={"loss": 0.5})).score
    -0.5
    """
    if found.held_out:
        return Evaluated(-found.held_out["loss"], found.held_out)
    by_name = {name: _figures(games) for name, games in found.games.items()}
    first = found.games[AS_SET]
    values = {**by_name[AS_SET], "returns": list(first.returns), "decodings": by_name}
    return Evaluated(first.mean_return, values)


def _figures(games: WordleEvaluation) -> dict[str, Any]:
    low, high = games.interval
    return {
        "mean_return": games.mean_return,
        "low": low,
        "high": high,
        "share_won": games.share_won,
    }
