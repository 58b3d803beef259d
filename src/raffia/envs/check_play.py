"""Playing in an environment for check.py, and comparing its outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from raffia.envs.env import BatchEnv, Box, Env, EnvSpec, FastForwardEnv
from raffia.functional.seeds import generator_for
from raffia.tensordict.tensordict import TensorDict

REPEAT = (
    "take all randomness from a generator that reset(seed) creates, and forget earlier episodes"
)


class ContractError(Exception):
    """A broken contract: what was found, and how to fix it.

    >>> ContractError("a reward of nan", "look for a division by 0").found
    'a reward of nan'
    """

    def __init__(self, found: str, fix: str) -> None:
        super().__init__(found)
        self.found, self.fix = found, fix


class ContractNote(ContractError):
    """A finding that may be intended or wrong.

    >>> isinstance(ContractNote("no episode ended", ""), ContractError)
    True
    """


class Bare:
    """Environments as a BatchEnv that accepts all outputs: mistakes are to be found, not refused.

    >>> from raffia.envs.probe import ValueProbe
    >>> Bare([ValueProbe()]).reset(torch.tensor([0]))["observation"]
    tensor([[1.]])
    """

    def __init__(self, envs: Sequence[Env]) -> None:
        self.envs = list(envs)
        self.spec = cast(EnvSpec, getattr(envs[0], "spec", None))  # None is found by the check
        self.num_envs = len(envs)
        if isinstance(envs[0], FastForwardEnv):
            self.fast_forward = self._fast_forward

    def _fast_forward(
        self, seeds: Tensor, actions: Sequence[Tensor], rows: Tensor | None = None
    ) -> None:
        chosen = range(self.num_envs) if rows is None else rows.tolist()
        for row, seed, played in zip(chosen, seeds.tolist(), actions, strict=True):
            cast(FastForwardEnv, self.envs[row]).fast_forward(seed, played)

    def reset(self, seeds: Tensor, rows: Tensor | None = None) -> TensorDict:
        """The states of these seeds in these rows."""
        chosen = range(self.num_envs) if rows is None else rows.tolist()
        pairs = zip(chosen, seeds.tolist(), strict=True)
        return _stacked([self.envs[row].reset(seed) for row, seed in pairs])

    def step(self, action: Tensor, rows: Tensor | None = None) -> TensorDict:
        """The outputs of these rows after their actions."""
        chosen = range(self.num_envs) if rows is None else rows.tolist()
        return _stacked([self.envs[row].step(action[i]) for i, row in enumerate(chosen)])

    def render(self, row: int) -> Tensor | None:
        """A picture of one environment."""
        return self.envs[row].render()

    def close(self) -> None:
        """Close all environments."""
        for env in self.envs:
            env.close()


def _stacked(outputs: list[TensorDict]) -> TensorDict:
    for one in outputs:
        if not isinstance(one, TensorDict):
            raise ContractError(
                f"a {type(one).__name__}", "return a TensorDict: TensorDict(observation=...)"
            )
    if len(outputs) == 1:  # in the same memory, so that it shows when that is written again
        return outputs[0].unsqueeze(0)
    entries = {key: torch.stack([one[key] for one in outputs]) for key in outputs[0].keys()}
    return TensorDict(entries, batch_size=[len(outputs)])


@dataclass(frozen=True)
class PlayedMoment:
    """A reset or a step of some rows, and their outputs.

    >>> PlayedMoment(3, True, [0], TensorDict(), [5], None).where
    'after 3 steps'
    """

    number: int
    is_step: bool
    rows: list[int]
    outputs: TensorDict
    seeds: list[int]  # seeds of the episodes that run in these rows
    action: Tensor | None

    @property
    def where(self) -> str:
        """The row and step, in words."""
        return f"after {self.number} steps"


def is_env(env: Any) -> bool:
    """Whether this is an environment, rather than what makes one.

    >>> from raffia.envs.probe import ValueProbe
    >>> is_env(ValueProbe()), is_env(ValueProbe)
    (True, False)
    """
    return not isinstance(env, type) and (hasattr(env, "step") or hasattr(env, "reset"))


def bounds(env: Env | BatchEnv) -> tuple[Tensor, Tensor] | None:
    """The least and greatest numbers of an observation, where the environment gives them.

    >>> from raffia.envs.probe import ValueProbe
    >>> bounds(ValueProbe()) is None
    True
    """
    from raffia.envs.gym import GymEnv, observation_bounds

    return observation_bounds(env) if isinstance(env, GymEnv) else None


def as_env(env: Any) -> Env | BatchEnv:
    """An env of Gymnasium as an Env; others as they are.

    >>> from raffia.envs.probe import ValueProbe
    >>> as_env(ValueProbe()).spec.name
    'probe/value'
    """
    if hasattr(env, "observation_space") and hasattr(env, "action_space"):
        from raffia.envs.gym import GymEnv

        return GymEnv(env)
    return env


def kind(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """A tensor's dtype and shape, in words.

    >>> kind(torch.float32, (3, 4))
    'float32 [3, 4]'
    """
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def wanted(spec: EnvSpec) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The dtype and the shape that each entry must have.

    >>> from raffia.envs.env import Discrete
    >>> wanted(EnvSpec(observation_shape=(4,), action=Discrete(2)))["observation"]
    (torch.float32, (4,))
    """
    num_actions = 0 if isinstance(spec.action, Box) else spec.action.n
    return {
        "observation": (spec.observation_dtype, spec.observation_shape),
        "action_mask": (torch.bool, (num_actions,)),
        "to_play": (torch.int64, ()),
        "reward": (torch.float32, ()),
        "terminated": (torch.bool, ()),
        "truncated": (torch.bool, ()),
        "continues": (torch.bool, ()),
    }


def require_entries(outputs: Any, spec: EnvSpec, keys: Sequence[str], num_rows: int) -> None:
    """Require these entries, with their dtypes and shapes, and no other.

    >>> from raffia.envs.env import Discrete
    >>> spec = EnvSpec(observation_shape=(2,), action=Discrete(2))
    >>> require_entries(TensorDict(observation=torch.zeros(3, 2)), spec, ["observation"], 3)
    """
    if not isinstance(outputs, TensorDict):
        raise ContractError(
            f"a {type(outputs).__name__}", "return a TensorDict: TensorDict(observation=...)"
        )
    there = set(outputs.keys())
    if missing := set(keys) - there:
        raise ContractError(f"no {sorted(missing)}, only {sorted(there)}", f"give {list(keys)}")
    if extra := there - set(keys):
        raise ContractError(
            f"entries that the spec does not declare: {sorted(extra)}",
            "leave them out, or set masked=True, num_players=2 or continues=True in the spec",
        )
    for key in keys:
        dtype, shape = wanted(spec)[key]
        value = outputs[key]
        if value.dtype != dtype or tuple(value.shape[1:]) != shape or len(value) != num_rows:
            found = kind(value.dtype, value.shape[1:])
            raise ContractError(
                f"{key!r} is {found} for each of {len(value)} rows",
                f"return {kind(dtype, shape)} for each of {num_rows} rows, or change the spec",
            )


def ended(outputs: TensorDict) -> Tensor:
    """Rows where a reset must follow, bool [n].

    >>> ended(TensorDict(terminated=torch.tensor([True]), truncated=torch.tensor([False])))
    tensor([True])
    """
    if "terminated" not in outputs.keys():
        return torch.zeros(len(outputs["observation"]), dtype=torch.bool)
    over = outputs["terminated"] | outputs["truncated"]
    return over & ~outputs["continues"] if "continues" in outputs.keys() else over


def one_action(spec: EnvSpec, outputs: TensorDict, draw: int = 0, number: int = 0) -> Tensor:
    """An action [1, ...] that is legal for one row; a function of `draw` and `number` alone.

    >>> from raffia.envs.env import Discrete
    >>> spec = EnvSpec(observation_shape=(1,), action=Discrete(1))
    >>> one_action(spec, TensorDict(observation=torch.zeros(1, 1)))
    tensor([0])
    """
    generator = generator_for(draw, "check", number)
    if isinstance(spec.action, Box):
        low, high = torch.tensor([spec.action.low, spec.action.high], dtype=torch.float32)
        if number < 2:  # the bounds themselves are legal
            return (low if number == 0 else high)[None]
        drawn = torch.empty_like(low).uniform_(generator=generator)
        return (low + (high - low) * drawn)[None]
    legal = torch.ones(spec.action.n, dtype=torch.bool)
    if spec.masked:
        legal = outputs["action_mask"][0]
    if not legal.any():
        raise ContractError("no action is legal", "allow at least one while an episode is running")
    return torch.multinomial(legal.float(), 1, generator=generator)


def moments(batch: BatchEnv, seed: int, num_steps: int) -> Iterator[PlayedMoment]:
    """Play all rows with random actions and yield each moment; rows that have ended are reset.

    >>> from raffia.envs.probe import DelayProbe
    >>> [(moment.number, moment.is_step) for moment in moments(Bare([DelayProbe()]), 0, 2)]
    [(0, False), (1, True), (2, True), (2, False)]
    """
    num_envs = batch.num_envs
    seeds = [seed + row for row in range(num_envs)]
    outputs = batch.reset(torch.tensor(seeds)).clone()
    yield PlayedMoment(0, False, list(range(num_envs)), outputs, list(seeds), None)
    states = [outputs[row : row + 1] for row in range(num_envs)]
    next_seed = seed + num_envs
    for number in range(num_steps):
        actions = [
            one_action(batch.spec, states[row], seed * num_envs + row, number)
            for row in range(num_envs)
        ]
        outputs = batch.step(torch.cat(actions)).clone()
        yield PlayedMoment(
            number + 1, True, list(range(num_envs)), outputs, list(seeds), torch.cat(actions)
        )
        states = [outputs[row : row + 1] for row in range(num_envs)]
        rows = ended(outputs).nonzero().flatten()
        if not len(rows):
            continue
        for row in rows.tolist():
            seeds[row] = next_seed
            next_seed += 1
        own = [seeds[row] for row in rows.tolist()]
        outputs = batch.reset(torch.tensor(own), rows).clone()
        yield PlayedMoment(number + 1, False, rows.tolist(), outputs, own, None)
        for i, row in enumerate(rows.tolist()):
            states[row] = outputs[i : i + 1]


def first_end(played: Sequence[PlayedMoment]) -> tuple[int, int, list[Tensor]] | None:
    """The row, the seed and the actions of the first episode that ended; None if none did.

    >>> from raffia.envs.probe import DelayProbe
    >>> row, seed, actions = first_end(list(moments(Bare([DelayProbe()]), 7, 2)))
    >>> row, seed, len(actions)
    (0, 7, 2)
    """
    for index, moment in enumerate(played):
        over = ended(moment.outputs)
        if over.any():
            row = int(over.nonzero()[0])
            steps = (each.action for each in played[: index + 1] if each.action is not None)
            return row, moment.seeds[row], [action[row : row + 1] for action in steps]
    return None


def replay(batch: BatchEnv, row: int, seed: int, actions: Sequence[Tensor]) -> list[TensorDict]:
    """The outputs of a row for a seed and actions [1, ...].

    >>> from raffia.envs.probe import DelayProbe
    >>> outputs = replay(Bare([DelayProbe()]), 0, 7, [torch.tensor([0]), torch.tensor([1])])
    >>> [float(each["observation"]) for each in outputs]
    [-1.0, 1.0, 1.0]
    """
    rows = torch.tensor([row])
    outputs = [batch.reset(torch.tensor([seed]), rows).clone()]
    return outputs + [batch.step(action, rows).clone() for action in actions]


def episode(
    batch: BatchEnv, row: int, seed: int, num_steps: int, draw: int | None = None
) -> list[TensorDict]:
    """The outputs of one row during an episode, for at most `num_steps` steps.

    draw: of the actions; None: the seed's

    >>> from raffia.envs.probe import DelayProbe
    >>> len(episode(Bare([DelayProbe()]), row=0, seed=7, num_steps=5))  # a reset and two steps
    3
    """
    return together(batch, [row], [seed], num_steps, draw)[row]


def together(
    batch: BatchEnv, rows: list[int], seeds: list[int], num_steps: int, draw: int | None = None
) -> dict[int, list[TensorDict]]:
    """The outputs of some rows in an episode each, which are stepped together.

    >>> from raffia.envs.probe import DelayProbe, ValueProbe
    >>> outputs_of = together(Bare([DelayProbe(), ValueProbe()]), [1, 0], [5, 6], num_steps=5)
    >>> len(outputs_of[0]), len(outputs_of[1])
    (3, 2)
    """
    state = batch.reset(torch.tensor(seeds), torch.tensor(rows)).clone()
    outputs_of = {row: [state[i : i + 1]] for i, row in enumerate(rows)}
    draws = {row: seed if draw is None else draw for row, seed in zip(rows, seeds, strict=True)}
    running = list(rows)
    for number in range(num_steps):
        actions = [
            one_action(batch.spec, outputs_of[row][-1], draws[row], number) for row in running
        ]
        outputs = batch.step(torch.cat(actions), torch.tensor(running)).clone()
        for i, row in enumerate(running):
            outputs_of[row].append(outputs[i : i + 1])
        running = [row for row in running if not ended(outputs_of[row][-1]).any()]
        if not running:
            break
    return outputs_of


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether all numbers are the same, NaN as NaN.

    >>> equal(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    True
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def difference(one: Sequence[TensorDict], other: Sequence[TensorDict]) -> str | None:
    """The first difference of two episodes, in words; None if they are equal.

    >>> difference([TensorDict(a=torch.tensor(1))], [TensorDict(a=torch.tensor(2))])
    "'a' differs after 0 steps"
    """
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        for key in a.keys():
            if not equal(a[key], b[key]):
                return f"{key!r} differs after {number} steps"
    if len(one) != len(other):
        return f"it ended after {len(other) - 1} steps, not {len(one) - 1}"
    return None


def require_same(
    one: Sequence[TensorDict], other: Sequence[TensorDict], where: str, fix: str = REPEAT
) -> None:
    """Require that two episodes are equal.

    >>> require_same([TensorDict(a=torch.tensor(1))], [TensorDict(a=torch.tensor(1))], "again")
    """
    if (found := difference(one, other)) is not None:
        raise ContractError(f"{found}, {where}", fix)
