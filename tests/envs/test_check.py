"""An environment that keeps the contract passes; each broken one fails the right check."""

from functools import partial

import gymnasium
import pytest
import torch

from raffia.envs.batch import SerialBatch
from raffia.envs.check import check_env as check_at_length
from raffia.envs.env import Box, Discrete, EnvSpec
from raffia.envs.gym import GymEnv
from raffia.functional.seeds import generator_for
from raffia.tensordict.tensordict import TensorDict

GAME = {"action": Discrete(3), "masked": True, "num_players": 2}

check_env = partial(check_at_length, num_steps=50)


class Good:
    """A game of two with a mask, and a die: places add up to 12."""

    spec = EnvSpec(observation_shape=(2,), **GAME, name="mine")

    def reset(self, seed):
        self.generator = generator_for(seed, "die")
        self.place, self.turn = 0, 0
        return self.said()

    def step(self, action):
        self.place += 1 + int(action) + int(torch.randint(2, (), generator=self.generator))
        self.turn = 1 - self.turn
        ends = {"terminated": torch.tensor(self.place >= 12), "truncated": torch.tensor(False)}
        return self.said().update({"reward": self.reward(), **ends})

    def said(self):
        seen = {"observation": self.observation(), "action_mask": self.mask()}
        return TensorDict(**seen, to_play=torch.tensor(self.turn))

    def observation(self):
        return torch.tensor([self.place / 12, 1.0])

    def mask(self):
        return torch.tensor([True, True, self.place < 6])

    def reward(self):
        return torch.tensor(float(self.place >= 12))

    def render(self):
        return torch.zeros(4, 5, 3, dtype=torch.uint8)

    def close(self):
        pass


def with_said(**entries):
    """Says the entries of a good one, changed; by a function of it, or without one."""

    def said(self):
        values = {n: v(self) if callable(v) else v for n, v in entries.items()}
        told = Good.said(self).exclude(*[name for name, value in values.items() if value is None])
        return told.update({n: torch.as_tensor(v) for n, v in values.items() if v is not None})

    return {"said": said}


def raises(self, action):
    raise KeyError("door")


def both_ends(self, action):
    said = Good.step(self, action)
    return said.update({"truncated": said["terminated"].clone()})


def own_chance(self, seed):
    said = Good.reset(self, seed)
    self.generator = torch.Generator()
    self.generator.seed()
    return said


def remembers(self, seed):
    """Chance goes on from episode to episode."""
    before = getattr(self, "generator", None)
    said = Good.reset(self, seed)
    self.generator = before or self.generator
    return said


def same_memory(self):
    self.shown = getattr(self, "shown", torch.zeros(2))
    self.shown[0] = self.place
    return self.shown


def of_kind(name, **overrides):
    return type(name, (Good,), overrides)


EVERYWHERE = {"place": 0}  # one place for all environments, as a class attribute is
SharedPlace = of_kind(
    "SharedPlace",
    place=property(lambda self: EVERYWHERE["place"], lambda self, v: EVERYWHERE.update(place=v)),
)
SameMemory = of_kind("SameMemory", observation=same_memory)
IMAGE = EnvSpec(observation_shape=(8, 8, 3), action=Discrete(3), observation_dtype=torch.uint8)
BROKEN = {  # what is other than in a good one; the check that fails; what it says
    "no render": ({"render": property(lambda self: self.nothing)}, "spec", "no render"),
    "no spec": ({"spec": {}}, "spec", "spec is {.*\n.*make it an EnvSpec"),
    "channels last": ({"spec": IMAGE}, "spec", r"channels last\n.*permute\(2, 0, 1\)"),
    "forgets": (with_said(to_play=None), "reset", "no \\['to_play'\\]"),
    "says more": (with_said(lives=3), "reset", r"does not declare: \['lives'\]"),
    "no TensorDict": (
        {"reset": lambda self, seed: Good.reset(self, seed)["observation"]},
        "reset", "a Tensor\n.*return a TensorDict",
    ),
    "shape": (with_said(observation=[0.0] * 3), "reset", r"float32 \[3\].*\n.*float32 \[2\]"),
    "dtype": (
        with_said(observation=torch.zeros(2).double()),
        "reset", r"float64 \[2\].*\n.*float32 \[2\]",
    ),
    "whole reward": ({"reward": lambda self: torch.tensor(1)}, "step", r"'reward' is int64"),
    "raises": ({"step": raises}, "step", "raised KeyError: 'door'"),
    "not finite": (
        {"reward": lambda self: torch.tensor(float("nan") if self.place > 5 else 0.0)},
        "numbers", "'reward' is not finite after",
    ),
    "nothing legal": (
        {"mask": lambda self: torch.full((3,), self.place < 5)}, "step", "no action is legal"
    ),
    "player two": (
        with_said(to_play=lambda self: self.turn + 1), "players", r"to_play is \[2, 2\] after 1 st"
    ),
    "nobody else": (with_said(to_play=0), "players", "player 1 never has a turn"),
    "both ends": ({"step": both_ends}, "ends", "terminated and truncated are both set"),
    # Real chance: a short episode may be the same when it is played again, and differ in a row.
    "own chance": (
        {"reset": own_chance},
        "seeds repeat", "differs after .* steps, (played again|in row 1)",
    ),
    "remembers": ({"reset": remembers}, "seeds repeat", "differs after .* steps, played again"),
    "flat picture": (
        {"render": lambda self: torch.zeros(4, 5, dtype=torch.uint8)}, "render", r"uint8 \[4, 5\]"
    ),
}  # fmt: skip


def fails(report):
    return [finding.name for finding in report.findings if finding.verdict == "fails"]


def test_an_env_that_keeps_the_contract_passes():
    report = check_env(Good)
    report.require()
    assert report.ok and {finding.verdict for finding in report.findings} == {"ok"}, str(report)
    assert str(report).startswith("mine keeps the contract\nok     spec: ")


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_env_is_found(name):
    overrides, check, text = BROKEN[name]
    report = check_env(of_kind("Broken", **overrides))
    assert check in fails(report), str(report)
    words = rf"does not keep the contract(?s:.*)fails  {check}: .*{text}"
    with pytest.raises(AssertionError, match=words):
        report.require()


def test_envs_that_share_a_place_are_found():
    """Alone it keeps the contract: only others of its kind show it."""
    check_env(SharedPlace()).require()
    assert "rows" in fails(check_env(SharedPlace))


def test_memory_that_is_written_again_is_found():
    assert fails(check_env(SameMemory)) == ["memory"]
    assert fails(check_env(SameMemory())) == ["memory"]


def batch_of(kind):
    return lambda: kind([Good(), Good(), Good()])


class SameTensors(SerialBatch):
    """Gives the same tensors again and again."""

    def step(self, action, rows=None):
        said = super().step(action, rows)
        self.kept = getattr(self, "kept", {})
        old = self.kept.setdefault(len(said["reward"]), said)
        return old.update_(said) if old is not said else said


class GoesOn(SerialBatch):
    """Resets by itself when an ended row is stepped."""

    def step(self, action, rows=None):
        for row in range(self.num_envs) if rows is None else rows.tolist():
            if not self.rows.runs[row]:
                self.reset_row(row, 0)
        return super().step(action, rows)


class WrongOrder(SerialBatch):
    """Answers in the order of its rows, not of those that are asked for."""

    def step(self, action, rows=None):
        said = super().step(action, rows)
        return said if rows is None else said[rows.argsort()]


class Blocks(SerialBatch):
    """The seed of row 0 is taken for all."""

    def reset(self, seeds, rows=None):
        return super().reset(seeds if rows is None else seeds[:1].expand(len(seeds)), rows)


def test_a_batch_that_keeps_the_contract_passes():
    check_env(batch_of(SerialBatch)).require()
    check_env(SerialBatch([Good()])).require()


@pytest.mark.parametrize(
    ("kind", "check"),
    [(GoesOn, "ended rows"), (WrongOrder, "rows"), (Blocks, "rows"), (SameTensors, "memory")],
)
def test_a_broken_batch_is_found(kind, check):
    report = check_env(batch_of(kind))
    assert fails(report) == [check], str(report)


def test_notes_are_told_and_do_not_fail():
    class Endless(Good):
        spec = EnvSpec(observation_shape=(1, 4, 4), action=Box((-1.0,), (1.0,)))

        def reset(self, seed):
            return TensorDict(observation=torch.full((1, 4, 4), 200.0))

        def step(self, action):
            more = {name: torch.tensor(False) for name in ("terminated", "truncated")}
            return self.reset(0).update(more | {"reward": torch.tensor(0.0)})

    report = check_env(Endless, num_steps=10)
    report.require()
    notes = {finding.name for finding in report.findings if finding.verdict == "note"}
    assert notes == {"pictures", "ends", "seeds differ"}
    assert "no episode ended in 10 steps" in str(report)
    picture = torch.ones(1, 2, 1, dtype=torch.uint8)  # one that was cut to 0 and 1
    spec = EnvSpec(observation_shape=(1, 2, 1), observation_dtype=torch.uint8, **GAME)
    cut = of_kind("Cut", spec=spec, observation=lambda self: picture.clone())
    assert "multiply by 255" in str(check_env(cut))


def test_what_keeps_the_contract_otherwise():
    """Environments of Gymnasium as they are, and lost lives, which are no ends of episodes."""
    report = check_env(gymnasium.make("CartPole-v1"))
    report.require()
    assert str(report).startswith("CartPole-v1 keeps the contract")
    check_env(lambda: gymnasium.make("CartPole-v1")).require()
    check_env(GymEnv("CartPole-v1")).require()

    class Lives(Good):
        spec = EnvSpec(observation_shape=(2,), **GAME, continues=True)

        def step(self, action):
            said = super().step(action)
            lost = torch.tensor(self.place == 6)
            return said.update({"terminated": said["terminated"] | lost, "continues": lost})

    check_env(Lives).require()
    check_env(lambda: SerialBatch([Lives(), Lives()])).require()
