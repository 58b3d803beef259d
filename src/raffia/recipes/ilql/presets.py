"""Runs of ILQL by name. Imports no torch: help comes at once.

Each is a whole `ILQLRun`; what it does not name has the paper's value.
"""

from __future__ import annotations

from dataclasses import replace

from raffia.algorithms.ilql.config import (
    DecodeConfig,
    ILQLLossConfig,
    ILQLModelConfig,
    Method,
    OptimizerConfig,
    TargetConfig,
    TrunkConfig,
    method,
)
from raffia.recipes.efficientzero.config import CheckpointConfig
from raffia.recipes.ilql.config import ILQLEvaluateConfig, ILQLRun, ScriptsConfig, WordleConfig
from raffia.train.settings import Presets

MORE_TOKENS = 250  # of Wordle beside the words: 243 rows of colours, six marks, one for non-words


def of_words(num_words: int, *, n_layer: int, n_head: int, n_embd: int) -> ILQLModelConfig:
    """A small GPT for games with this vocabulary size, in which a word is one token.

    >>> of_words(24, n_layer=2, n_head=4, n_embd=64).trunk.vocab_size
    274
    """
    trunk = TrunkConfig(
        vocab_size=num_words + MORE_TOKENS,
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        block_size=32,
    )
    return ILQLModelConfig(trunk=trunk)


SMOKE = ILQLRun(
    model=of_words(12, n_layer=1, n_head=2, n_embd=16),
    optimizer=OptimizerConfig(learning_rate=1e-3),
    wordle=WordleConfig(num_words=12, num_games=200),
    num_updates=40,
    batch_size=16,
    evaluate=ILQLEvaluateConfig(every_updates=20, num_episodes=16),
    checkpoint=CheckpointConfig(every_updates=20),
)

PLAYERS = ScriptsConfig(
    expert=0.3, fair=0.25, random=0.15, wrong=0.05, stuck=0.2, non_word=0.05
)  # a mean return of -3.2, where the experts have -1.0
WORDLE = ILQLRun(
    model=of_words(24, n_layer=2, n_head=4, n_embd=64),
    # Below tau 0.8 the values are more of the players in the data than of the best of them.
    loss=ILQLLossConfig(tau=0.8),
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup_updates=100, decay="cosine"),
    decode=DecodeConfig(adv_weight=8.0),
    # With a fifth of these games the networks learn them by heart, and not the game.
    wordle=WordleConfig(num_words=24, num_games=20_000, scripts=PLAYERS),
    num_updates=5_000,
    batch_size=64,
    evaluate=ILQLEvaluateConfig(every_updates=1_000, adv_weights=(0.0, 2.0, 32.0)),
    checkpoint=CheckpointConfig(every_updates=1_000),
)

BRANCHING = replace(
    WORDLE,
    wordle=replace(WORDLE.wordle, games="branching"),
    num_updates=3_000,
    evaluate=replace(WORDLE.evaluate, every_updates=500),
    checkpoint=CheckpointConfig(every_updates=500),
)

# No expert: one who always plays the same is copied by what is most frequent, and even where
# few games are an expert's nothing is left for values to bring. Mean return: -4.1.
FALLIBLE = ScriptsConfig(expert=0.0, fair=0.5, random=0.15, wrong=0.05, stuck=0.25, non_word=0.05)
LETTERS = replace(  # the paper's setting: letters, more words, greedy, advantages that only forbid
    WORDLE,
    model=ILQLModelConfig(
        trunk=TrunkConfig(vocab_size=35, n_layer=2, n_head=4, n_embd=64, block_size=80)
    ),
    # A guess is six tokens: at 0.005 a reward would need all of the run to reach the first.
    target=TargetConfig(alpha=0.05),
    decode=DecodeConfig(num_beams=1, adv_weight=16.0, adv_clip=0.0),
    wordle=WordleConfig(
        num_words=200,
        num_held_out=40,
        layout="letters",
        num_games=50_000,
        scripts=FALLIBLE,
    ),
    evaluate=ILQLEvaluateConfig(every_updates=1_000, adv_weights=(0.0,)),
)

DIALOGUE = ILQLRun(
    model=ILQLModelConfig(trunk=TrunkConfig(n_layer=4, n_head=4, n_embd=128, block_size=512)),
    loss=ILQLLossConfig(tau=0.8),
    # A reward moves back by a token in about 1 / alpha updates, and answers have dozens of them.
    target=TargetConfig(alpha=0.05),
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup_updates=100, decay="cosine"),
    decode=DecodeConfig(adv_weight=8.0),
    task="data",
    num_updates=3_000,
    batch_size=32,
    evaluate=ILQLEvaluateConfig(every_updates=500, num_episodes=1_000, batch_size=32),
)

# `with_sizes` sets the sizes. As in the paper the policy is a model of its own, which imitates
# the data and nothing else; the heads are new, and their gradients go into the other trunk.
LANGUAGE_MODEL = replace(
    DIALOGUE,
    model=replace(DIALOGUE.model, policy="separate"),
    optimizer=replace(DIALOGUE.optimizer, learning_rate=1e-4, value_rate=10.0),
)

# With a line each.
_NAMED: dict[str, tuple[ILQLRun, str]] = {
    "ilql-smoke": (SMOKE, "tiny networks, a few seconds: a smoke test"),
    "wordle": (WORDLE, "24 words, from 20,000 games of good and bad players"),
    "wordle-branching": (BRANCHING, "games that mislead one step of improvement"),
    "wordle-letters": (LETTERS, "200 words in letters, 40 of the secrets held out"),
    "dialogue": (DIALOGUE, "your dialogues (--data FILE), from scratch"),
    "language-model": (
        LANGUAGE_MODEL,
        "... starting from a model (--language_model FOLDER)",
    ),
}
ILQL_PRESETS: Presets[ILQLRun] = Presets({name: run for name, (run, _) in _NAMED.items()})
ILQL_SUMMARIES = {name: summary for name, (_, summary) in _NAMED.items()}


def with_method(name: Method, run: ILQLRun) -> ILQLRun:
    """The run by `raffia.algorithms.ilql.method`; without V, no weights of advantages are compared.

    >>> with_method("bc", ILQL_PRESETS["wordle"]).evaluate.adv_weights
    ()
    """
    if name in ("bc", "filtered_bc", "cql"):
        run = replace(run, evaluate=replace(run.evaluate, adv_weights=()))
    return method(name, run)
