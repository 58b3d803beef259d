"""Whether an environment of language keeps the contract of contract.py: a check suite.

In a test of your own:

    check_language_environment(MyEnv, ["yes", "no"]).require()
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from raffia.envs.check import Finding, Report
from raffia.envs.check_play import ContractError as Seen
from raffia.envs.check_play import ContractNote as Noted
from raffia.lm.envs.contract import Language_Environment, Language_Observation, Utterance
from raffia.lm.envs.draws import Draws
from raffia.lm.tokenizers.tokenizer import Tokenizer

__all__ = ["check_language_environment"]

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

    >>> from raffia.lm.envs.wordle.env import WordleEnv
    >>> from raffia.lm.envs.wordle.game import Wordle
    >>> from raffia.lm.envs.wordle.vocabulary import Vocabulary
    >>> wordle = Wordle(vocabulary=Vocabulary(("crane", "crown", "slate")))
    >>> report = check_language_environment(lambda: WordleEnv(wordle), ["crane", "slate", "oops"])
    >>> report.ok
    True
    >>> print(report.lines()[2])
    ok     utterances: pairs of a text and a reward or None
    """
    if not actions:
        raise ValueError("actions is empty; give texts of the agent: ['yes', 'no']")
    subject = Subject(make_env, tuple(actions), tokenizer, seed, num_dialogues, max_steps)
    findings: list[Finding] = []
    for check in CHECKS:
        findings.append(_finding(check, subject))
        if findings[-1].verdict == "fails" and check in FIRST:
            break  # the others would only stumble over the same
    return Report(type(subject.env).__name__, tuple(findings))


class Subject:
    """What is looked at, and the dialogues that were played with it."""

    def __init__(
        self,
        make_env: MakeEnv,
        actions: tuple[str, ...],
        tokenizer: Tokenizer | None,
        seed: int,
        num_dialogues: int,
        max_steps: int,
    ) -> None:
        self.make_env, self.actions, self.tokenizer = make_env, actions, tokenizer
        self.max_steps = max_steps
        self.seeds = [seed + number for number in range(num_dialogues)]
        self.env = make_env()
        self.dialogues: list[Transcript] = []

    def play(self, env: Language_Environment, seed: int) -> Transcript:
        """A dialogue in which the agent's texts are drawn."""
        draws = Draws.for_rows(seed, [0], "check of a language environment")
        observations = [env.reset(seed)]
        dialogue = Transcript(seed, observations, [_snapshot(observations[0])])
        while not env.is_terminal() and len(dialogue.actions) < self.max_steps:
            drawn = float(draws.uniform(len(dialogue.actions))[0])
            action = self.actions[int(drawn * len(self.actions))]
            observation, reward, done = env.step(action)
            dialogue.add(action, observation, reward, done, env.is_terminal())
        return dialogue


@dataclass
class Transcript:
    """Its observations, and a snapshot of each at the time that it was made."""

    seed: int
    observations: list[Language_Observation]
    snapshots: list[Snapshot]

    def __post_init__(self) -> None:
        self.actions: list[str] = []
        self.rewards: list[Any] = []
        self.ends: list[tuple[Any, bool]] = []  # done, is_terminal()

    def add(
        self, action: str, observation: Language_Observation, reward: Any, done: Any, over: bool
    ) -> None:
        """A step."""
        self.actions.append(action)
        self.observations.append(observation)
        self.snapshots.append(_snapshot(observation))
        self.rewards.append(reward)
        self.ends.append((done, over))

    def where(self, step: int) -> str:
        """A step of it, in words."""
        return f"after step {step} with seed {self.seed}" if step else f"with seed {self.seed}"


def _snapshot(observation: Language_Observation) -> Snapshot:
    utterances, terminal = observation.to_sequence()
    return tuple(utterances), terminal, str(observation)


def _check_steps(subject: Subject) -> str:
    """steps"""
    for seed in subject.seeds:
        subject.dialogues.append(subject.play(subject.env, seed))
    steps = sum(len(dialogue.actions) for dialogue in subject.dialogues)
    return f"{steps} in {len(subject.dialogues)} dialogues"


def _check_utterances(subject: Subject) -> str:
    """utterances"""
    for dialogue in subject.dialogues:
        for step, (utterances, terminal, _) in enumerate(dialogue.snapshots):
            if type(terminal) is not bool:
                raise Seen(
                    f"terminal is {terminal!r} {dialogue.where(step)}",
                    "let to_sequence() give (utterances, terminal), terminal being True or False",
                )
            for utterance in utterances:
                _require_utterance(utterance, dialogue.where(step))
    return "pairs of a text and a reward or None"


def _require_utterance(utterance: Any, where: str) -> None:
    fix = 'make each utterance ("text", reward), or ("text", None) for one of the environment'
    if not isinstance(utterance, tuple | list) or len(utterance) != 2:
        raise Seen(f"an utterance is {utterance!r} {where}", fix)
    text, reward = utterance
    is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
    if not isinstance(text, str) or not (reward is None or is_number):
        raise Seen(f"an utterance is {utterance!r} {where}", fix)
    if reward is not None and not math.isfinite(reward):
        raise Seen(f"the reward of {text!r} is {reward} {where}", "give finite rewards")


def _check_growth(subject: Subject) -> str:
    """growth"""
    for dialogue in subject.dialogues:
        for step, action in enumerate(dialogue.actions, 1):
            before, after = dialogue.snapshots[step - 1][0], dialogue.snapshots[step][0]
            where = dialogue.where(step)
            if after[: len(before)] != before:
                raise Seen(
                    f"earlier utterances are gone or have changed {where}",
                    "let an observation hold the whole dialogue so far",
                )
            new = after[len(before) :]
            if not new or new[0][0] != action or new[0][1] is None:
                raise Seen(
                    f"the action was {action!r}, and {list(new)} was added {where}",
                    "add (action, reward) first, then what the environment answers with None",
                )
            if any(reward is not None for _, reward in new[1:]):
                raise Seen(f"one step added two utterances of the agent {where}", "add one")
    return "each step adds the action, then the answer"


def _check_rewards(subject: Subject) -> str:
    """rewards"""
    for dialogue in subject.dialogues:
        for step, reward in enumerate(dialogue.rewards, 1):
            own = [r for _, r in dialogue.snapshots[step][0] if r is not None][-1]
            if own != reward:
                raise Seen(
                    f"step gave the reward {reward!r} and to_sequence() has {own!r} "
                    f"{dialogue.where(step)}",
                    "let both give the same number",
                )
    return "those of steps and sequences agree"


def _check_ends(subject: Subject) -> str:
    """ends"""
    num_ended = 0
    for dialogue in subject.dialogues:
        for step, (done, over) in enumerate(dialogue.ends, 1):
            terminal = dialogue.snapshots[step][1]
            if not bool(done) == over == terminal:
                raise Seen(
                    f"done={done!r}, is_terminal()={over!r}, terminal={terminal!r} "
                    f"{dialogue.where(step)}",
                    "let all three be True where the dialogue has ended",
                )
        num_ended += bool(dialogue.ends) and dialogue.ends[-1][1]
    if not num_ended:
        raise Noted(
            f"no dialogue ended in {subject.max_steps} steps",
            "give actions that lead to an end, or end a dialogue after so many turns",
        )
    return f"{num_ended} dialogues ended"


def _check_after_end(subject: Subject) -> str:
    """after the end"""
    dialogue = subject.play(subject.env, subject.seeds[0])
    if not subject.env.is_terminal():
        raise Noted("no dialogue ended, so nothing was checked", "raise max_steps")
    try:
        subject.env.step(subject.actions[0])
    except Exception:
        subject.env.reset(dialogue.seed)
        if subject.env.is_terminal() != dialogue.snapshots[0][1]:
            raise Seen(
                "after a reset is_terminal() is True",
                "forget the old dialogue in reset",
            ) from None
        return "a step is refused, and a reset starts over"
    raise Seen(
        "a step after the end gave no error", "raise one that names reset(seed): a caller missed it"
    )


def _check_repeats(subject: Subject) -> str:
    """seeds repeat"""
    for env, how in ((subject.env, "again"), (subject.make_env(), "in another environment")):
        for dialogue in subject.dialogues:
            if subject.play(env, dialogue.seed).snapshots != dialogue.snapshots:
                raise Seen(
                    f"the dialogue with seed {dialogue.seed} was another one when played {how}",
                    "let all that chance decides follow from the seed of reset",
                )
    return "the same seed and actions give the same dialogue"


def _check_memory(subject: Subject) -> str:
    """memory"""
    for dialogue in subject.dialogues:
        if [_snapshot(observation) for observation in dialogue.observations] != dialogue.snapshots:
            raise Seen(
                "an observation that was given changed in a later step or reset",
                "make a new one in each step; tuples cannot be changed",
            )
    return "what was given stays as it was"


def _check_metadata(subject: Subject) -> str:
    """metadata"""
    for dialogue in subject.dialogues:
        for observation in dialogue.observations:
            try:
                json.dumps(observation.metadata(), allow_nan=False)
            except (TypeError, ValueError) as error:
                raise Seen(
                    f"{observation.metadata()!r} is not JSON: {error}",
                    "use texts, finite numbers, lists and dicts",
                ) from None
    return "can be written as JSON"


def _check_tokens(subject: Subject) -> str:
    """tokens"""
    if subject.tokenizer is None:
        return "no tokenizer was given"
    for dialogue in subject.dialogues:
        for text, _ in dialogue.snapshots[-1][0]:
            try:
                back = subject.tokenizer.decode(subject.tokenizer.encode(text))
            except ValueError as error:
                raise Seen(str(error), "give the tokenizer tokens for all utterances") from None
            if back != text:
                raise Noted(f"{text!r} came back as {back!r}", "fine where nothing hangs on it")
    return "all utterances are decoded to the same text"


def _finding(check: Callable[[Subject], str], subject: Subject) -> Finding:
    name = check.__doc__ or ""
    try:
        return Finding(name, "ok", check(subject))
    except Noted as note:
        return Finding(name, "note", note.found, note.fix)
    except Seen as seen:
        return Finding(name, "fails", seen.found, seen.fix)
    except Exception as error:  # the environment's own, which is a finding too
        return Finding(name, "fails", f"{type(error).__name__}: {error}", "see contract.py")


FIRST = (_check_steps, _check_utterances, _check_growth)
CHECKS = (
    _check_steps,
    _check_utterances,
    _check_growth,
    _check_rewards,
    _check_ends,
    _check_after_end,
    _check_repeats,
    _check_memory,
    _check_metadata,
    _check_tokens,
)
