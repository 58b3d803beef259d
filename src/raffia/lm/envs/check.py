"""Whether an environment of language keeps the contract of contract.py: a check suite.

In a test of your own:

    check_language_environment(MyEnv, ["yes", "no"]).require()
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from raffia.envs.check import Report, report_of
from raffia.envs.check_play import ContractError, ContractNote
from raffia.lm.data.utterances import check_sequence
from raffia.lm.envs.contract import Language_Environment, Language_Observation, Utterance
from raffia.lm.envs.draws import Draws
from raffia.lm.tokenizers.tokenizer import Tokenizer

MakeEnv = Callable[[], Language_Environment]
Snapshot = tuple[tuple[Utterance, ...], bool, str]  # the utterances, terminal, as a person reads it


def check_language_environment(
    make_env: MakeEnv,
    actions: Sequence[str],
    *,
    tokenizer: Tokenizer | None = None,
    seed: int = 0,
    num_dialogues: int = 8,
    max_steps: int = 200,
) -> Report:
    """Step an environment with texts drawn from `actions`, and check that it keeps the contract.

    make_env: makes a new environment each time
    actions: texts of the agent; good ones and bad ones, so that dialogues end in different ways
    tokenizer: also check that it can encode all utterances

    >>> from raffia.lm.envs.wordle.game import Wordle, WordleEnv
    >>> from raffia.lm.envs.wordle.vocabulary import Vocabulary
    >>> wordle = Wordle(vocabulary=Vocabulary(("crane", "crown", "slate")))
    >>> report = check_language_environment(lambda: WordleEnv(wordle), ["crane", "slate", "oops"])
    >>> report.ok
    True
    >>> print(report.lines()[2])
    ok     utterances: pairs of a text and a reward or None
    """
    if not actions:
        raise ValueError("actions is empty; pass texts of the agent: ['yes', 'no']")
    subject = Subject(
        make_env, tuple(actions), tokenizer, range(seed, seed + num_dialogues), max_steps
    )
    return report_of(type(subject.env).__name__, subject, FIRST, CHECKS)


@dataclass
class Step:
    """An observation, a snapshot of it from the time it was made, and the action that led to it."""

    observation: Language_Observation
    snapshot: Snapshot
    where: str  # in words
    action: str = ""
    reward: Any = None
    done: Any = None
    over: bool = False  # is_terminal()


Transcript = list[Step]  # that of the reset first


@dataclass
class Subject:
    """The environment under test, and the dialogues that were played with it."""

    make_env: MakeEnv
    actions: tuple[str, ...]
    tokenizer: Tokenizer | None
    seeds: range
    max_steps: int
    dialogues: list[Transcript] = field(default_factory=list)  # one for each seed

    def __post_init__(self) -> None:
        self.env = self.make_env()

    def play(self, env: Language_Environment, seed: int) -> Transcript:
        """A dialogue in which the agent's texts are drawn."""
        draws = Draws.for_rows(seed, [0], "check of a language environment")
        first = env.reset(seed)
        dialogue = [Step(first, _snapshot(first), f"with seed {seed}")]
        while not env.is_terminal() and len(dialogue) <= self.max_steps:
            drawn = float(draws.uniform(len(dialogue) - 1)[0])
            action = self.actions[int(drawn * len(self.actions))]
            observation, reward, done = env.step(action)
            where = f"after step {len(dialogue)} with seed {seed}"
            snapshot, over = _snapshot(observation), env.is_terminal()
            dialogue.append(Step(observation, snapshot, where, action, reward, done, over))
        return dialogue

    def pairs(self) -> Iterator[tuple[Step, Step]]:
        """Pairs of successive steps within an episode: each step after a reset, with the one before
        it.
        """
        for dialogue in self.dialogues:
            yield from pairwise(dialogue)


def _snapshot(observation: Language_Observation) -> Snapshot:
    utterances, terminal = observation.to_sequence()
    return tuple(utterances), terminal, str(observation)


def _check_steps(subject: Subject) -> str:
    for seed in subject.seeds:
        subject.dialogues.append(subject.play(subject.env, seed))
    return f"{len(list(subject.pairs()))} in {len(subject.dialogues)} dialogues"


def _check_utterances(subject: Subject) -> str:
    for dialogue in subject.dialogues:
        for step in dialogue:
            utterances, terminal, _ = step.snapshot
            if type(terminal) is not bool:
                raise ContractError(
                    f"terminal is {terminal!r} {step.where}",
                    "let to_sequence() return (utterances, terminal), with terminal True or False",
                )
            try:
                check_sequence(utterances, terminal)
            except ValueError as error:
                what, _, fix = str(error).partition("; ")
                raise ContractError(f"{what} {step.where}", fix) from None
    return "pairs of a text and a reward or None"


def _check_growth(subject: Subject) -> str:
    for last, step in subject.pairs():
        before, after = last.snapshot[0], step.snapshot[0]
        if after[: len(before)] != before:
            raise ContractError(
                f"earlier utterances are gone or have changed {step.where}",
                "let an observation hold the whole dialogue so far",
            )
        new = after[len(before) :]
        if not new or new[0][0] != step.action or new[0][1] is None:
            raise ContractError(
                f"the action was {step.action!r}, but {list(new)} was added {step.where}",
                "add (action, reward) first, then the environment's answer with None",
            )
        if any(reward is not None for _, reward in new[1:]):
            raise ContractError(
                f"one step added two utterances of the agent {step.where}", "add one"
            )
    return "each step adds the action, then the answer"


def _check_rewards(subject: Subject) -> str:
    for _, step in subject.pairs():
        own = [reward for _, reward in step.snapshot[0] if reward is not None][-1]
        if own != step.reward:
            raise ContractError(
                f"step returned the reward {step.reward!r}, but to_sequence() has {own!r} "
                f"{step.where}",
                "let both return the same number",
            )
    return "rewards of steps and sequences agree"


def _check_ends(subject: Subject) -> str:
    for _, step in subject.pairs():
        terminal = step.snapshot[1]
        if not bool(step.done) == step.over == terminal:
            raise ContractError(
                f"done={step.done!r}, is_terminal()={step.over!r}, terminal={terminal!r} "
                f"{step.where}",
                "let all three be True when the dialogue has ended",
            )
    num_ended = sum(dialogue[-1].over for dialogue in subject.dialogues)
    if not num_ended:
        raise ContractNote(
            f"no dialogue ended within {subject.max_steps} steps",
            "pass actions that lead to an end, or end a dialogue after a number of turns",
        )
    return f"{num_ended} dialogues ended"


def _check_after_the_end(subject: Subject) -> str:
    dialogue = subject.play(subject.env, subject.seeds[0])
    if not subject.env.is_terminal():
        raise ContractNote("no dialogue ended, so nothing was checked", "raise max_steps")
    try:
        subject.env.step(subject.actions[0])
    except Exception:
        subject.env.reset(subject.seeds[0])
        if subject.env.is_terminal() != dialogue[0].snapshot[1]:
            raise ContractError(
                "is_terminal() is True after a reset",
                "clear the old dialogue in reset",
            ) from None
        return "a step after the end is refused, and a reset starts over"
    raise ContractError(
        "a step after the end raised no error",
        ("raise one that mentions reset(seed), because the caller missed the end"),
    )


def _check_seeds_repeat(subject: Subject) -> str:
    for env, how in ((subject.env, "again"), (subject.make_env(), "in another environment")):
        for seed, dialogue in zip(subject.seeds, subject.dialogues, strict=True):
            again = subject.play(env, seed)
            if [step.snapshot for step in again] != [step.snapshot for step in dialogue]:
                raise ContractError(
                    f"the dialogue with seed {seed} was different when played {how}",
                    "let all random choices depend on the seed of reset",
                )
    return "the same seed and actions give the same dialogue"


def _check_memory(subject: Subject) -> str:
    for dialogue in subject.dialogues:
        if any(_snapshot(step.observation) != step.snapshot for step in dialogue):
            raise ContractError(
                "an earlier observation was changed by a later step or reset",
                "create a new one in each step; tuples cannot be changed",
            )
    return "earlier observations stay unchanged"


def _check_metadata(subject: Subject) -> str:
    for dialogue in subject.dialogues:
        for step in dialogue:
            try:
                json.dumps(step.observation.metadata(), allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ContractError(
                    f"{step.observation.metadata()!r} is not JSON: {error}",
                    "use texts, finite numbers, lists and dicts",
                ) from None
    return "can be written as JSON"


def _check_tokens(subject: Subject) -> str:
    if subject.tokenizer is None:
        return "no tokenizer was given"
    for dialogue in subject.dialogues:
        for text, _ in dialogue[-1].snapshot[0]:
            try:
                back = subject.tokenizer.decode(subject.tokenizer.encode(text))
            except ValueError as error:
                raise ContractError(
                    str(error), "give the tokenizer tokens for all utterances"
                ) from None
            if back != text:
                raise ContractNote(
                    f"{text!r} came back as {back!r}", "fine if nothing depends on the difference"
                )
    return "all utterances are decoded to the same text"


FIRST = (_check_steps, _check_utterances, _check_growth)
CHECKS = (
    _check_rewards,
    _check_ends,
    _check_after_the_end,
    _check_seeds_repeat,
    _check_memory,
    _check_metadata,
    _check_tokens,
)
