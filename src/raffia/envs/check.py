"""A conformance suite: whether an Env, a BatchEnv or a Gymnasium environment keeps the contract.

In a test of your own:

    check_env(MyEnv).require()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from raffia.envs import check_play as play
from raffia.envs.check_play import Bare, ContractError, ContractNote
from raffia.envs.env import BatchEnv, Box, Env, EnvSpec, FastForwardBatch
from raffia.files import shown
from raffia.hints import plural
from raffia.tensordict.tensordict import TensorDict

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    >>> Finding("rewards", "fails", "nan at step 3", "give finite rewards").lines()
    ['fails  rewards: nan at step 3', '       to fix it: give finite rewards']
    """

    name: str
    verdict: str  # "ok"; "note": worth a look; "fails"
    found: str
    fix: str = ""

    def lines(self) -> list[str]:
        """The text lines of the result."""
        fix = [f"{'':7}to fix it: {self.fix}"] if self.fix else []
        return [f"{self.verdict:<7}{self.name}: {self.found}", *fix]


@dataclass(frozen=True)
class Report:
    """The results of all checks; `print` it, or `require()` in a test that none failed.

    >>> report = Report("mine", (Finding("reset", "fails", "no 'observation'"),))
    >>> report.ok
    False
    >>> print(report)
    mine does not keep the contract
    fails  reset: no 'observation'
    """

    name: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return all(finding.verdict != "fails" for finding in self.findings)

    def lines(self) -> list[str]:
        """The text lines of the result."""
        head = f"{self.name} {'keeps' if self.ok else 'does not keep'} the contract"
        return [head, *(line for finding in self.findings for line in finding.lines())]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def require(self) -> None:
        """Raise an AssertionError that lists what failed, if something did.

        >>> Report("mine", ()).require()
        """
        if not self.ok:
            raise AssertionError(str(self))


def report_of(
    name: str,
    subject: Subject,
    first: Sequence[Callable[[Subject], str]],
    others: Sequence[Callable[[Subject], str]],
) -> Report:
    """The results of checks, named like their functions; after one of `first` fails, no more.

    >>> def _check_spec(subject):
    ...     raise ContractError(f"{subject} has none", "give it one")
    >>> print(report_of("mine", "it", [_check_spec], [lambda subject: "never called"]))
    mine does not keep the contract
    fails  spec: it has none
           to fix it: give it one
    """
    findings: list[Finding] = []
    for check in (*first, *others):
        findings.append(_finding(check, subject))
        if findings[-1].verdict == "fails" and check in first:
            break  # the others would only stumble over the same
    return Report(name, tuple(findings))


def _finding(check: Callable[[Subject], str], subject: Subject) -> Finding:
    name = check.__name__.removeprefix("_check_").replace("_", " ")
    try:
        return Finding(name, "ok", check(subject))
    except ContractNote as noted:
        return Finding(name, "note", noted.found, noted.fix)
    except ContractError as found:
        return Finding(name, "fails", found.found, found.fix)
    except Exception as error:  # the environment's own, which is a finding too
        return Finding(name, "fails", f"raised {type(error).__name__}: {error}")


def check_env(env: Any, *, seed: int = 0, num_steps: int = 200) -> Report:
    """Check that an environment keeps the contract, by playing in it with random actions.

    env: a function that makes an Env, a BatchEnv or an env of Gymnasium, which shows more; or one
        that is made already
    num_steps: to play in each row

    >>> from raffia.envs.probe import DelayProbe
    >>> report = check_env(DelayProbe)
    >>> report.ok
    True
    >>> print(report.lines()[1])
    ok     spec: observation float32 [1], 2 actions, one player
    """
    makes_more = not play.is_env(env)
    if makes_more and not callable(env):
        raise TypeError(
            f"check_env needs an environment, or a function that makes one, not {shown(env)}: such "
            "as lambda: GymEnv('CartPole-v1')"
        )
    first = env() if makes_more else env
    others = [env(), env()] if makes_more else []
    subject = EnvUnderTest(first, others, seed, num_steps)
    name = getattr(subject.spec, "name", "") or type(first).__name__
    report = report_of(name, subject, FIRST, CHECKS)
    for made in (first, *others):
        if hasattr(made, "close"):  # else a finding
            made.close()
    return report


class EnvUnderTest:
    """The environment under test, and the moments played so far.

    >>> from raffia.envs.probe import ValueProbe
    >>> subject = EnvUnderTest(ValueProbe(), [ValueProbe(), ValueProbe()], seed=0, num_steps=5)
    >>> subject.batch.num_envs, subject.twin.num_envs
    (2, 1)
    """

    def __init__(self, env: Any, others: Sequence[Any], seed: int, num_steps: int) -> None:
        self.seed, self.num_steps = seed, num_steps
        self.is_batch = hasattr(env, "num_envs")
        adapted: list[Any] = [play.as_env(each) for each in (env, *others)]
        env, *others = adapted
        self.env = env
        self.batch: BatchEnv = env if self.is_batch else Bare([env, *others[:1]])
        self.twin: BatchEnv = self.batch
        if others:
            self.twin = others[0] if self.is_batch else Bare(others[1:])
        self.moments: list[play.PlayedMoment] = []  # of the play that looks at each step

    @property
    def spec(self) -> EnvSpec:
        """The spec of the environment."""
        return self.batch.spec

    @property
    def last_row(self) -> int:
        """The last row of the batch."""
        return self.batch.num_envs - 1


def _check_spec(subject: EnvUnderTest) -> str:
    kind = BatchEnv if subject.is_batch else Env
    names = ("spec", "num_envs") if subject.is_batch else ("spec",)
    methods = ("reset", "step", "render", "close")
    missing = [name for name in (*names, *methods) if not hasattr(subject.env, name)]
    if missing:
        raise ContractError(
            f"no {', '.join(missing)}", f"see raffia.envs.env.{kind.__name__} for the required form"
        )
    spec = subject.spec
    if not isinstance(spec, EnvSpec):
        raise ContractError(
            f"spec is {spec!r}", "make it an EnvSpec(observation_shape=..., action=...)"
        )
    shape = spec.observation_shape
    if len(shape) == 3 and shape[-1] in (1, 3, 4) and shape[0] > 4:
        raise ContractError(
            f"pictures of {list(shape)} have their channels last",
            "give [channels, height, width]: picture.permute(2, 0, 1)",
        )
    action = spec.action
    actions = f"{len(action.low)} numbers" if isinstance(action, Box) else f"{action.n} actions"
    players = "two players" if spec.num_players == 2 else "one player"
    return f"observation {play.kind(spec.observation_dtype, shape)}, {actions}, {players}"


def _check_reset(subject: EnvUnderTest) -> str:
    batch = subject.batch
    state = batch.reset(torch.arange(batch.num_envs) + subject.seed)
    play.require_entries(state, subject.spec, subject.spec.state_keys, batch.num_envs)
    return f"gives {', '.join(subject.spec.state_keys)}"


def _check_step(subject: EnvUnderTest) -> str:
    for moment in play.moments(subject.batch, subject.seed, subject.num_steps):
        keys = subject.spec.step_keys if moment.is_step else subject.spec.state_keys
        play.require_entries(moment.outputs, subject.spec, keys, len(moment.rows))
        subject.moments.append(moment)
    steps = sum(len(moment.rows) for moment in subject.moments if moment.is_step)
    return f"{steps} steps with random actions"


def _check_numbers(subject: EnvUnderTest) -> str:
    for moment in subject.moments:
        for key in ("observation", "reward"):
            value = moment.outputs.get(key, None)
            if value is not None and not value.isfinite().all():
                raise ContractError(
                    f"{key!r} is not finite {moment.where}", "look for a division by 0"
                )
    bounds = play.bounds(subject.env)
    for moment in subject.moments:
        observation = moment.outputs["observation"]
        if bounds and ((observation < bounds[0]) | (observation > bounds[1])).any():
            raise ContractNote(
                f"observations leave the bounds of observation_space {moment.where}",
                "widen its low and high, or clip; Raffia does not use them, but others may",
            )
    return "observations and rewards are finite"


def _check_pictures(subject: EnvUnderTest) -> str:
    if len(subject.spec.observation_shape) != 3:
        return "none are observed"
    most = max(float(moment.outputs["observation"].max()) for moment in subject.moments)
    if subject.spec.observation_dtype == torch.uint8 and most <= 1:
        raise ContractNote(
            "uint8, but no value above 1 was found: was a picture of 0..1 cast to integers?",
            "multiply by 255 before the cast; planes of 0 and 1 are better as float32",
        )
    if subject.spec.observation_dtype != torch.uint8 and most > 2:
        raise ContractNote(
            f"numbers up to {most:g}", "give uint8 of 0..255, or planes of about 0..1"
        )
    return f"numbers up to {most:g}"


def _check_legal_actions(subject: EnvUnderTest) -> str:
    if not subject.spec.masked:
        return "all are legal, always"
    for moment in subject.moments:
        none = ~moment.outputs["action_mask"].any(-1) & ~play.ended(moment.outputs)
        if none.any():
            raise ContractError(
                f"none in row {moment.rows[int(none.nonzero()[0])]} {moment.where}",
                "allow at least one, such as an action that passes, or set terminated",
            )
    return "at least one while an episode runs"


def _check_players(subject: EnvUnderTest) -> str:
    if subject.spec.num_players == 1:
        return "one"
    for moment in subject.moments:
        turn = moment.outputs["to_play"]
        if not ((turn == 0) | (turn == 1)).all():
            raise ContractError(
                f"to_play is {turn.tolist()} {moment.where}", "number the players 0 and 1"
            )
    if all((moment.outputs["to_play"] == 0).all() for moment in subject.moments):
        raise ContractError(
            "player 1 never has a turn", "set 'to_play' to the player who acts next"
        )
    return "two"


def _check_ends(subject: EnvUnderTest) -> str:
    num_ended = 0
    for moment in subject.moments:
        if not moment.is_step:
            continue
        if (moment.outputs["terminated"] & moment.outputs["truncated"]).any():
            raise ContractError(
                f"terminated and truncated are both set {moment.where}",
                "set truncated only if the episode could have continued: truncated & ~terminated",
            )
        num_ended += int(play.ended(moment.outputs).sum())
    if not num_ended:
        raise ContractNote(
            f"no episode ended in {subject.num_steps} steps",
            "set max_episode_steps, unless episodes are meant to be this long",
        )
    return f"{plural(num_ended, 'episode')} ended"


def _check_ended_rows(subject: EnvUnderTest) -> str:
    if not subject.is_batch:
        return "a SerialBatch does this"
    last = play.first_end(subject.moments)
    if last is None:
        raise ContractNote(
            "no episode ended, so no end was checked", "check_env(..., num_steps=10_000)"
        )
    row, seed, actions = last
    rows = torch.tensor([row])
    outputs = play.replay(subject.batch, row, seed, actions)
    if not play.ended(outputs[-1]).any():
        raise ContractError(
            "an episode did not end at the same step when it was played again", play.REPEAT
        )
    try:
        subject.batch.step(play.one_action(subject.spec, outputs[0]), rows)
    except Exception:
        subject.batch.reset(torch.tensor([seed]), rows)
        return "rows that ended refuse a step, and can be reset"
    raise ContractError(
        f"row {row} was stepped after its end without an error",
        "raise an error that names reset(seeds, rows): the caller has missed an end",
    )


def _check_seeds_repeat(subject: EnvUnderTest) -> str:
    batch, seed, steps = subject.batch, subject.seed, subject.num_steps
    once = play.episode(batch, 0, seed, steps)
    play.episode(batch, 0, seed + 1, steps)
    play.require_same(once, play.episode(batch, 0, seed, steps), "played again")
    last = subject.last_row
    if last:
        play.require_same(once, play.episode(batch, last, seed, steps), f"in row {last}")
    twin = subject.twin
    if twin is not batch:
        play.require_same(once, play.episode(twin, 0, seed, steps), "in another environment")
    return "the same seed and actions give the same episode"


def _check_fast_forward(subject: EnvUnderTest) -> str:
    batch = subject.twin
    if not isinstance(batch, FastForwardBatch):
        return "not offered"
    seed, row = subject.seed, torch.tensor([0])
    shown = [batch.reset(torch.tensor([seed]), row).clone()]
    actions: list[Tensor] = []
    while len(actions) < subject.num_steps and not play.ended(shown[-1]).any():
        actions.append(play.one_action(subject.spec, shown[-1], seed, len(actions)))
        shown.append(batch.step(actions[-1], row).clone())
    for num in range(1, len(actions), max(1, len(actions) // 3)):  # none of them the last
        play.episode(batch, 0, seed + 1, 3)
        batch.fast_forward(torch.tensor([seed]), [torch.cat(actions[:num])], row)
        again = [batch.step(action, row).clone() for action in actions[num:]]
        play.require_same(
            shown[num + 1 :],
            again,
            f"behind a fast forward over {num} steps",
            "do in fast_forward all that reset and step do, but for what they return",
        )
    return "leads to where the steps do"


def _check_seeds_differ(subject: EnvUnderTest) -> str:
    seeds = [subject.seed + number for number in range(8)]
    played = [play.episode(subject.batch, 0, seed, 20, draw=0) for seed in seeds]
    if all(play.difference(played[0], other) is None for other in played[1:]):
        raise ContractNote(
            "8 seeds gave the same steps", "this is fine if the environment has no randomness"
        )
    return "different seeds give different episodes"


def _check_rows(subject: EnvUnderTest) -> str:
    batch, steps = subject.batch, subject.num_steps
    last = subject.last_row
    if not last:
        return "there is only one row"
    seeds = {0: subject.seed, last: subject.seed + 1}
    apart = {row: play.episode(batch, row, seed, steps) for row, seed in seeds.items()}
    together = play.together(batch, [last, 0], [seeds[last], seeds[0]], steps)
    for row in (0, last):
        play.require_same(
            apart[row],
            together[row],
            f"in row {row}, stepped with rows [{last}, 0]",
            "keep an environment's state in its own row, and answer in the order of `rows`",
        )
    return "each row has its own episode, and answers follow the order of `rows`"


def _check_memory(subject: EnvUnderTest) -> str:
    batch, row = subject.batch, torch.tensor([0])
    state = batch.reset(torch.tensor([subject.seed]), row)
    given: list[TensorDict] = [state]
    for _ in range(3):
        if play.ended(given[-1]).any():
            break
        given.append(batch.step(play.one_action(subject.spec, given[-1]), row))
    before_calls = [outputs.clone() for outputs in given]
    play.episode(batch, 0, subject.seed + 1, 10)
    for before, after in zip(before_calls, given, strict=True):
        for key in before.keys():
            if not play.equal(before[key], after[key]):
                raise ContractError(
                    f"{key!r} of an earlier step changed in a later one",
                    "return a copy: torch.from_numpy(array.copy()), or tensor.clone()",
                )
    return "returned tensors are not changed later"


def _check_render(subject: EnvUnderTest) -> str:
    picture: Tensor | None = subject.batch.render(0)
    if picture is None:
        return "no picture"
    if picture.dtype != torch.uint8 or picture.ndim != 3 or picture.shape[-1] != 3:
        raise ContractError(
            f"a picture of {play.kind(picture.dtype, tuple(picture.shape))}",
            "return uint8 [height, width, 3], or None",
        )
    return f"pictures of {picture.shape[1]} x {picture.shape[0]}"


Check = Callable[[EnvUnderTest], str]

FIRST: tuple[Check, ...] = (_check_spec, _check_reset, _check_step)
CHECKS: tuple[Check, ...] = (
    _check_numbers,
    _check_pictures,
    _check_legal_actions,
    _check_players,
    _check_ends,
    _check_ended_rows,
    _check_seeds_repeat,
    _check_fast_forward,
    _check_seeds_differ,
    _check_rows,
    _check_memory,
    _check_render,
)
