"""ILQL on a maze that is talked through: data in which nobody ever went the best way.

    python -m benchmarks.ilql_maze                  # 5 methods, 3 seeds; two hours of one core
    python -m benchmarks.ilql_maze --methods ilql bc --seeds 0
    python -m benchmarks.ilql_maze --exact          # without networks: what each method comes to

Four rows of six cells; the lowest row is a gap, with the start of the far way at its left and the
goal at its right:

    . . . . . .
    . . . . . .
    . . . . . .
    . x x x x G

The environment names the cell, the agent says up, down, left or right. Each step costs 1, the
one into the goal nothing, a fall into the gap (x) 10 and the walk; 20 steps end it. Dialogues begin
at any cell. Logged walkers stumble about: they say up a fifth of the time out of habit, else
anything. So what they say most often leads nowhere, their best tenth began beside the goal, and
near the gap their values are low, because they fall: who improves on them once goes round about.
Only values that take the best step for granted lead along the gap. This is the argument of Snell
et al. (2022), figure 1, on a task whose values are known.

The exact returns are of the same methods without networks, over an endless walk with discount.
Decodings are those of `benchmarks.ilql_methods`. Intervals are of 95 % over seeds.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from benchmarks.ilql_methods import METHODS, NAMES, Figure, Figures, cell, decodings, read
from raffia.algorithms.ilql.config import (
    ILQLConfig,
    ILQLLossConfig,
    ILQLModelConfig,
    Method,
    OptimizerConfig,
    TargetConfig,
    TrunkConfig,
    method,
)
from raffia.algorithms.ilql.learner import ILQLLearner
from raffia.algorithms.ilql.model import ILQLModel, ILQLTarget, make_target
from raffia.algorithms.ilql.policy import ILQL_Policy
from raffia.lm.data.dialogue import Dialogue, DialogueDataset, ObservationDialogues
from raffia.lm.envs.contract import Language_Environment
from raffia.lm.envs.play import play_dialogues
from raffia.lm.envs.tabular import expectile
from raffia.lm.tokenizers.tokenizer import WordTokenizer

ROWS, COLUMNS, LIMIT = 4, 6, 20
STEP, FALL = -1.0, -10.0
HABIT, SHARE = "up", 0.2
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
GOAL = (ROWS - 1, COLUMNS - 1)
STARTS = [(row, column) for row in range(ROWS - 1) for column in range(COLUMNS)] + [(ROWS - 1, 0)]
GAMMA, TAU = 0.99, 0.9

Position = tuple[int, int]
NAME_OF = {position: f"r{position[0]}c{position[1]}" for position in STARTS}
TOKENIZER = WordTokenizer.from_texts([" ".join(NAME_OF.values()), " ".join(MOVES)])
BASE = ILQLConfig(
    model=ILQLModelConfig(
        trunk=TrunkConfig(
            vocab_size=TOKENIZER.num_tokens, n_layer=2, n_head=4, n_embd=48, block_size=96
        )
    ),
    loss=ILQLLossConfig(gamma=GAMMA, tau=TAU, cql_weight=0.0),
    target=TargetConfig(alpha=0.05),
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_updates=100, decay="cosine"),
)


def stepped(position: Position, move: str) -> tuple[Position | None, float]:
    """Where a move leads, None: it is over; and the reward."""
    row, column = (at + by for at, by in zip(position, MOVES[move], strict=True))
    if (row, column) == GOAL:
        return None, 0.0
    if row == ROWS - 1 and 0 < column < COLUMNS - 1:
        return None, FALL
    if not (0 <= row < ROWS and 0 <= column < COLUMNS):
        return position, STEP
    return (row, column), STEP


class Maze(Language_Environment):
    """The walk as a dialogue; other texts than moves cost a step."""

    def reset(self, seed: int) -> Dialogue:
        self.position: Position = random.Random(seed).choice(STARTS)
        self.turns: list[tuple[str, float | None]] = [(NAME_OF[self.position], None)]
        self.num_steps, self.done = 0, False
        return Dialogue(self.turns, terminal=False)

    def step(self, action: str) -> tuple[Dialogue, float, bool]:
        if self.done:
            raise RuntimeError("the walk is over; call reset(seed)")
        position, reward = (
            stepped(self.position, action) if action in MOVES else (self.position, STEP)
        )
        self.num_steps += 1
        self.turns = [*self.turns, (action if action in MOVES else HABIT, reward)]
        self.done = position is None or self.num_steps == LIMIT
        if position is not None:
            self.position = position
            self.turns.append((NAME_OF[position], None))
        # A walk at the limit is not terminal: its last state keeps its value.
        return Dialogue(self.turns, terminal=position is None), reward, self.done

    def is_terminal(self) -> bool:
        return self.done


class Walker:
    """The policy that made the data."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def act(self, observation: Dialogue) -> str:
        return HABIT if self.random.random() < SHARE else self.random.choice(list(MOVES))


@cache
def dataset() -> DialogueDataset:
    """4,000 walks."""
    walks = play_dialogues(Maze, Walker(0), range(4_000))
    return DialogueDataset.build(
        ObservationDialogues([walk.observation for walk in walks]), TOKENIZER
    )


# -- exactly


def behaviour(position: Position) -> dict[str, float]:
    """How often walkers take each move."""
    return {move: (1 - SHARE) / len(MOVES) + SHARE * (move == HABIT) for move in MOVES}


def exact_q(tau: float, gamma: float) -> dict[Position, dict[str, float]]:
    """Q of every position and move; gamma of a step."""
    shares = list(behaviour(STARTS[0]).values())
    v = dict.fromkeys(STARTS, 0.0)
    q: dict[Position, dict[str, float]] = {}
    for _ in range(600):
        for position in STARTS:
            q[position] = {}
            for move in MOVES:
                after, reward = stepped(position, move)
                q[position][move] = reward + (0.0 if after is None else gamma * v[after])
        v = {position: expectile(list(q[position].values()), shares, tau) for position in STARTS}
    return q


def exact_return(policy: Callable[[Position], dict[str, float]]) -> float:
    """The mean return over all starts, with the limit of steps."""
    left = dict.fromkeys(STARTS, 0.0)
    for _ in range(LIMIT):
        new = {}
        for position in STARTS:
            new[position] = 0.0
            for move, share in policy(position).items():
                after, reward = stepped(position, move)
                new[position] += share * (reward + (0.0 if after is None else left[after]))
        left = new
    return float(np.mean(list(left.values())))


def exact() -> dict[str, float]:
    """Exact returns of the methods."""

    def greedy(q: dict[Position, dict[str, float]]) -> Callable[[Position], dict[str, float]]:
        return lambda position: {max(q[position], key=q[position].__getitem__): 1.0}

    of_step = GAMMA**2  # a move is two tokens
    always = dict.fromkeys(STARTS, behaviour(STARTS[0]))
    return {
        "the walkers": exact_return(behaviour),
        "their most frequent move": exact_return(greedy(always)),
        "one step of improvement (tau 0.5)": exact_return(greedy(exact_q(0.5, of_step))),
        f"ILQL (tau {TAU})": exact_return(greedy(exact_q(TAU, of_step))),
        "the best there is": exact_return(greedy(exact_q(1.0, 1.0))),
    }


# -- with networks


@dataclass(frozen=True)
class Trained:
    """A trained agent."""

    model: ILQLModel
    target: ILQLTarget


def train(config: ILQLConfig, num_updates: int, seed: int) -> Trained:
    """Networks after so many updates."""
    learner = ILQLLearner(config, num_updates=num_updates)
    state = learner.init(seed)
    data = dataset() if config.keep_best == 1 else dataset().best(config.keep_best)
    batches: Iterator = data.batches(seed, 0, 64)
    for _ in range(num_updates):
        state = learner.apply(state, learner.grads(state, next(batches))[0])
    model = learner.make_model(seed)
    state["params"].to_module(model)
    target = make_target(model)
    state["target"].to_module(target)
    return Trained(model.eval(), target)


def measured(name: Method, seed: int, num_updates: int, num_games: int, file: Path) -> Figures:
    """Train, unless that was done, and play by each decoding; the figures are written to a file."""
    if file.exists():
        return read(file)
    config = method(name, BASE)
    agent = train(config, num_updates, seed)
    found: Figures = {}
    for how, decode in decodings(name).items():
        draws = torch.Generator().manual_seed(seed)
        policy = ILQL_Policy(agent, TOKENIZER, replace(decode, max_new_tokens=2), generator=draws)
        walks = play_dialogues(Maze, policy, range(10_000, 10_000 + num_games))
        returns = np.array([walk.episode_return for walk in walks])
        half = 1.959964 * returns.std(ddof=1) / np.sqrt(len(returns))
        arrived = float(np.mean([walk.rewards[-1] == 0 for walk in walks]))
        mean = float(returns.mean())
        found[how] = Figure(mean, mean - half, mean + half, arrived, len(walks))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({how: asdict(one) for how, one in found.items()}, indent=1) + "\n")
    return found


def table(by_method: dict[Method, list[Figures]]) -> str:
    """Markdown: a row for each method and decoding."""
    lines = ["| method | decoding | seeds | mean return, walks that arrive |", "|---|---|---|---|"]
    for name, ones in by_method.items():
        for how in ones[0] if ones else ():
            row = (NAMES[name], how, str(len(ones)), cell([one[how] for one in ones]))
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--num-updates", type=int, default=4_000)
    parser.add_argument("--games", type=int, default=500, help="of each decoding")
    parser.add_argument("--folder", type=Path, default=Path("runs/maze"), help="of what was found")
    parser.add_argument("--exact", action="store_true", help="only what needs no network")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name, value in exact().items():
        print(f"{name}: {value:.2f}")
    if options.exact:
        return
    by_method: dict[Method, list[Figures]] = {name: [] for name in options.methods}
    for seed in options.seeds:
        for name in options.methods:
            file = options.folder / f"{name}-{seed}.json"
            found = measured(name, seed, options.num_updates, options.games, file)
            by_method[name].append(found)
            means = {how: round(one.mean_return, 2) for how, one in found.items()}
            print(name, seed, means, file=sys.stderr, flush=True)
    print(table(by_method))


if __name__ == "__main__":
    main()
