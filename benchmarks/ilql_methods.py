"""ILQL beside what it is compared with, each by each way of decoding: one table.

    python -m benchmarks.ilql_methods words             # 5 methods, 3 seeds; half an hour of a core
    python -m benchmarks.ilql_methods letters --methods bc ilql --seeds 0
    python -m benchmarks.ilql_methods letters --table   # of what was measured before

letters    the preset `wordle-letters`: 200 words as letters, 40 of which are guessed in the data
           but never the secret there; games with those are the figures "held out"
words      the preset `wordle`: 24 words, each a token
branching  the preset `wordle-branching`: games where one step of improvement misleads

Runs lie in --folder, each with what it reached in `decodings.json`; what is there is not made
again, so that a run that was interrupted goes on, and a new decoding is played alone. All play the
same games by the last checkpoint, without any choice among checkpoints. Intervals are of 95 %: over
seeds (Student's t) where there are two or more, else over games.

greedy     the best token each time; with values: the policy's logits, and 16 times the advantage
           where that is negative (adv_weight 16, adv_clip 0), as in the paper
sampled    drawn from the policy; with values: with 8 times the advantage, within top_p 0.95
beam       a beam search of 4, scores as in greedy
re-ranked  the best of 8 that were drawn as in sampled: by log-probability; with values: by Q
planned    with values: a tree search of 16 simulations before each token, its prior as in greedy

Three players have no network. Counting gives the most frequent reply in the data after the same
dialogue; where there was none, after the same last turns of it. Fair guesses any word that fits
the colours, the expert the most telling one: both know the rules and all words.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raffia.algorithms.ilql.config import Method, method
from raffia.files import write_json
from raffia.lm.decoding.config import DecodeConfig, TokenPlanConfig
from raffia.lm.envs.contract import LanguagePolicy
from raffia.lm.envs.wordle.game import Wordle, WordleObservation
from raffia.lm.envs.wordle.games import game_seeds, simulate
from raffia.lm.envs.wordle.play import WordleEvaluation, evaluate, evaluation_of
from raffia.lm.envs.wordle.policies import Fitting, InformationGain
from raffia.recipes.ilql import load_agent, resume, train
from raffia.recipes.ilql.config import ILQLRun
from raffia.recipes.ilql.data import make_wordle, play_games
from raffia.recipes.ilql.presets import ILQL_PRESETS
from raffia.train.view import PlainView

PRESETS = {"letters": "wordle-letters", "words": "wordle", "branching": "wordle-branching"}
METHODS: tuple[Method, ...] = ("bc", "filtered_bc", "single_step", "cql", "ilql")
NAMES = {
    "bc": "behaviour cloning",
    "filtered_bc": "... of the best tenth",
    "single_step": "one step of improvement",
    "cql": "CQL",
    "ilql": "**ILQL**",
}
ALONE = "policy alone, "  # of a method with values
T975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}  # Student's t by degrees of freedom
FOUND = "decodings.json"


@dataclass(frozen=True)
class Figure:
    """What came of games by one decoding."""

    mean_return: float
    low: float  # over games
    high: float
    share_won: float
    num_games: int

    @classmethod
    def of(cls, games: WordleEvaluation) -> Figure:
        low, high = games.interval
        return cls(games.mean_return, low, high, games.share_won, len(games.returns))


Figures = dict[str, Figure]  # by "decoding" and "decoding, held out"


def decodings(name: Method) -> dict[str, DecodeConfig]:
    """Each way of speaking."""
    drawn = DecodeConfig(include_adv=False)
    alone = {
        "greedy": replace(drawn, num_beams=1),
        "sampled": drawn,
        "beam": replace(drawn, num_beams=4),
        "re-ranked": replace(drawn, num_generations=8, rerank="log_prob"),
    }
    if name in ("bc", "filtered_bc"):
        return alone
    if name == "cql":  # no policy: by the values alone
        drawn = DecodeConfig(include_logits=False, adv_weight=8.0)
        best = replace(drawn, adv_weight=16.0)
    else:
        drawn = DecodeConfig(adv_weight=8.0, top_p=0.95)
        best = DecodeConfig(adv_weight=16.0, adv_clip=0.0)
    with_values = {
        "greedy": replace(best, num_beams=1),
        "sampled": drawn,
        "beam": replace(best, num_beams=4),
        "re-ranked": replace(drawn, num_generations=8, rerank="value"),
        "planned": replace(best, plan=TokenPlanConfig(num_simulations=16)),
    }
    if name == "ilql":
        with_values |= {ALONE + how: decode for how, decode in alone.items()}
    return with_values


class Counting:
    """Gives the most frequent reply after the same dialogue, or after the same end of it."""

    def __init__(self, games: Iterable[WordleObservation]) -> None:
        self.counts: dict[tuple[Any, ...], Counter[str]] = defaultdict(Counter)
        for game in games:
            for index, (guess, _) in enumerate(game.turns):
                for first in range(index + 1):
                    self.counts[first == 0, *game.turns[first:index]][guess] += 1

    def act(self, observation: WordleObservation) -> str:
        turns = observation.turns
        for first in range(len(turns) + 1):
            found = self.counts.get((first == 0, *turns[first:]))
            if found:
                return max(sorted(found), key=found.__getitem__)
        everything = sum(self.counts.values(), Counter[str]())
        return max(sorted(everything), key=everything.__getitem__)


def rules_of(config: ILQLRun) -> dict[str, Wordle]:
    """The games by what their figures are called: with secrets as in the data, and held out."""
    found = {"": make_wordle(config.wordle)}
    if config.wordle.num_held_out:
        found[", held out"] = make_wordle(config.wordle, held_out=True)
    return found


def without_networks(config: ILQLRun, num_games: int) -> dict[str, Figures]:
    """The players that learn nothing, or count."""
    games = [labelled.game for labelled in play_games(config.wordle)]
    best = sorted(games, key=lambda game: sum(game.rewards()), reverse=True)
    found: dict[str, Figures] = {"the data": {"": Figure.of(evaluation_of(games))}}
    players: dict[str, LanguagePolicy] = {
        "counting": Counting(games),
        "... of the best tenth": Counting(best[: len(best) // 10]),
    }
    seeds = game_seeds(0, num_games)
    for suffix, wordle in rules_of(config).items():
        for name, player in players.items():
            played = evaluate(player, wordle, num_games)
            found.setdefault(name, {})["greedy" + suffix] = Figure.of(played)
        for name, script in (("fair", Fitting()), ("expert", InformationGain())):
            played = evaluation_of(simulate(wordle, script, seeds))
            found.setdefault(name, {})[suffix] = Figure.of(played)
    return found


def measured(folder: Path, config: ILQLRun, name: Method, num_games: int, log: Path) -> Figures:
    """Train and evaluate what is missing; the run's folder gets the figures."""
    path = folder / FOUND
    found = read(path) if path.exists() else {}
    if not found:
        with open(log, "a") as file:
            view = PlainView(file)
            if (folder / "config.json").exists():
                resume(folder, view=view)
            else:
                train(config, folder, view=view, preset=folder.name.rpartition("-")[0])
    for how, decode in decodings(name).items():
        for suffix, wordle in rules_of(config).items():
            if how + suffix not in found:
                agent = load_agent(folder, "newest", decode=decode)
                found[how + suffix] = Figure.of(evaluate(agent, wordle, num_games))
                write_json(path, {how: asdict(one) for how, one in found.items()}, indent=1)
    return {
        how + suffix: found[how + suffix] for how in decodings(name) for suffix in rules_of(config)
    }


def read(path: Path) -> Figures:
    """What `measured` has written."""
    return {how: Figure(**one) for how, one in json.loads(path.read_text()).items()}


def config_of(task: str, name: Method, seed: int, num_updates: int | None) -> ILQLRun:
    """The run of a method; its own evaluations are few, as the games are played at the end."""
    base = ILQL_PRESETS[PRESETS[task]]
    few = replace(base.evaluate, adv_weights=(), num_episodes=128)
    base = replace(base, evaluate=few, seed=seed, num_updates=num_updates or base.num_updates)
    if name == "cql":  # a clip of advantages is against the policy's logits, which it has none of
        base = replace(base, decode=replace(base.decode, adv_clip=None, top_p=None))
    return method(name, base)


def cell(figures: Sequence[Figure]) -> str:
    """Mean, interval and games won."""
    means = np.array([one.mean_return for one in figures])
    if len(means) > 1:
        half = T975[len(means) - 1] * means.std(ddof=1) / math.sqrt(len(means))
        low, high = means.mean() - half, means.mean() + half
    else:
        low, high = figures[0].low, figures[0].high
    won = float(np.mean([one.share_won for one in figures]))
    return f"{means.mean():.2f} ({low:.2f} to {high:.2f}), {100 * won:.0f} %"


def table(bare: dict[str, Figures], by_method: dict[str, list[Figures]]) -> str:
    """Markdown: a row for each method and decoding."""
    of_all = [*({"x": one} for ones in by_method.values() for one in ones), bare]
    held_out = any(", held out" in how for one in of_all for own in one.values() for how in own)
    head = ["method", "decoding", "seeds", "mean return, games won"]
    rows = [[*head, "held-out secrets"] if held_out else head]
    everyone = [(name, "", [figures]) for name, figures in bare.items()]
    everyone += [(NAMES[name], str(len(ones)), ones) for name, ones in by_method.items() if ones]
    for name, seeds, ones in everyone:
        for how in (how for how in ones[0] if not how.endswith(", held out")):
            row = [name, how, seeds, cell([one[how] for one in ones])]
            beside = how + ", held out"
            if held_out:
                row.append(cell([one[beside] for one in ones]) if beside in ones[0] else "")
            rows.append(row)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=PRESETS)
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--games", type=int, default=500, help="of each decoding")
    parser.add_argument("--num-updates", type=int, default=None, help="in place of the preset's")
    parser.add_argument("--folder", type=Path, default=Path("runs/methods"))
    parser.add_argument("--table", action="store_true", help="train and play nothing more")
    parser.add_argument("--markdown", type=Path, default=None, help="write the table there, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    by_method: dict[str, list[Figures]] = {name: [] for name in options.methods}
    for seed in options.seeds:
        for name in options.methods:
            config = config_of(options.task, name, seed, options.num_updates)
            folder = options.folder / f"{options.task}-{name}-{seed}"
            if options.table and not (folder / FOUND).exists():
                continue
            log = options.folder / "log.txt"
            by_method[name].append(measured(folder, config, name, options.games, log))
            means = {how: round(one.mean_return, 2) for how, one in by_method[name][-1].items()}
            print(folder.name, means, file=sys.stderr, flush=True)
    base = config_of(options.task, "ilql", 0, None)
    text = table(without_networks(base, options.games), by_method)
    print(text)
    if options.markdown is not None:
        options.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main()
