"""Playing many dialogues with a policy, whatever the environment, and dialogues as JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from raffia.files import write_atomically
from raffia.hints import check_range
from raffia.lm.envs.contract import Language_Environment, Language_Observation, LanguagePolicy

_Z95 = 1.959964  # of the normal distribution, both sides


@dataclass(frozen=True)
class DialogueReturns:
    """The returns of N dialogues that were played, with their mean and its interval.

    >>> DialogueReturns((1.0, 3.0)).mean_return
    2.0
    """

    returns: tuple[float, ...]

    @property
    def mean_return(self) -> float:
        """The mean over the dialogues."""
        return sum(self.returns) / len(self.returns)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the mean return by the normal approximation, for many
        dialogues.
        """
        if len(self.returns) < 2:
            return -math.inf, math.inf
        error = float(np.std(self.returns, ddof=1)) / math.sqrt(len(self.returns))
        return self.mean_return - _Z95 * error, self.mean_return + _Z95 * error


@dataclass(frozen=True)
class Played:
    """A dialogue that was played.

    >>> from raffia.lm.envs.wordle.game import WordleObservation
    >>> Played(WordleObservation(), ("crane", "crown"), (-1.0, 0.0), True).episode_return
    -1.0
    """

    observation: Language_Observation  # the last
    actions: tuple[str, ...]
    rewards: tuple[float, ...]  # of each action
    done: bool  # False: it was stopped after `max_steps`

    @property
    def episode_return(self) -> float:
        """The sum of the rewards."""
        return sum(self.rewards)


def play_dialogues(
    make_env: Callable[[], Language_Environment],
    policy: LanguagePolicy,
    seeds: Sequence[int],
    *,
    max_steps: int = 1000,
    batch_size: int = 256,
) -> list[Played]:
    """Play a dialogue for each seed.

    A policy that has `act_batch(observations) -> texts` plays `batch_size` dialogues together: it
    is asked for all that have not ended, so their number falls. Any other plays one after the
    other.

    >>> from raffia.lm.envs.wordle.game import Wordle, WordleEnv
    >>> from raffia.lm.envs.wordle.vocabulary import Vocabulary
    >>> wordle = Wordle(vocabulary=Vocabulary(("crane", "crown")))
    >>> class Stubborn:
    ...     def act(self, observation):
    ...         return "crown"
    >>> played = play_dialogues(lambda: WordleEnv(wordle), Stubborn(), seeds=[0, 1, 2])
    >>> [dialogue.episode_return for dialogue in played]
    [0.0, -6.0, -6.0]
    """
    check_range("max_steps", max_steps, 1)
    check_range("batch_size", batch_size, 1)
    many: Any = getattr(policy, "act_batch", None)
    at_once = batch_size if many else 1
    act = many or (lambda observations: [policy.act(observation) for observation in observations])
    played: list[Played] = []
    for start in range(0, len(seeds), at_once):
        dialogues = [_Running(make_env(), seed) for seed in seeds[start : start + at_once]]
        for _ in range(max_steps):
            running = [dialogue for dialogue in dialogues if not dialogue.done]
            if not running:
                break
            texts = act([dialogue.observation for dialogue in running])
            if len(texts) != len(running):
                raise ValueError(
                    f"act_batch returned {len(texts)} texts for {len(running)} dialogues"
                )
            for dialogue, text in zip(running, texts, strict=True):
                dialogue.step(text)
        played += [dialogue.played() for dialogue in dialogues]
    return played


class _Running:
    def __init__(self, env: Language_Environment, seed: int) -> None:
        self.env = env
        self.observation = env.reset(seed)
        self.done = env.is_terminal()
        self.actions: list[str] = []
        self.rewards: list[float] = []

    def step(self, text: str) -> None:
        self.observation, reward, self.done = self.env.step(text)
        self.actions.append(text)
        self.rewards.append(float(reward))

    def played(self) -> Played:
        return Played(self.observation, tuple(self.actions), tuple(self.rewards), self.done)


def dialogue_row(observation: Language_Observation) -> dict[str, Any]:
    """A dialogue as an object of JSON.

    >>> from raffia.lm.envs.wordle.game import WordleObservation
    >>> dialogue_row(WordleObservation((("crane", "ggggg"),)))
    {'sequence': [['crane', 0.0], ['<g><g><g><g><g>', None]], 'terminal': True,
     'metadata': {'won': True, 'num_guesses': 1}}
    """
    utterances, terminal = observation.to_sequence()
    return {
        "sequence": [[text, reward] for text, reward in utterances],
        "terminal": terminal,
        "metadata": observation.metadata(),
    }


def write_dialogues(path: str | Path, dialogues: Iterable[Language_Observation]) -> int:
    """Write dialogues to a file atomically, one on each line; returns their number.

    >>> import pathlib, tempfile
    >>> from raffia.lm.envs.wordle.game import WordleObservation
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "games.jsonl")
    ...     number = write_dialogues(path, [WordleObservation((("crane", "ggggg"),))])
    ...     print(number, path.read_text()[:44])
    1 {"sequence": [["crane", 0.0], ["<g><g><g><g>
    """
    num_dialogues = 0

    def write(file: BinaryIO) -> None:
        nonlocal num_dialogues
        for dialogue in dialogues:
            row = json.dumps(dialogue_row(dialogue), allow_nan=False, ensure_ascii=False)
            file.write(f"{row}\n".encode())
            num_dialogues += 1

    write_atomically(path, write)
    return num_dialogues
