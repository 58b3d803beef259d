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
    """A game for two players with an action mask and a die: counts up to 12."""

    spec = EnvSpec(observation_shape=(2,), **GAME, name="mine")

    def reset(self, seed):
        self.generator = generator_for(seed, "die")
        self.count, self.player = 0, 0
        return self.outputs()

    def step(self, action):
        self.count += 1 + int(action) + int(torch.randint(2, (), generator=self.generator))
        self.player = 1 - self.player
        ends = {"terminated": torch.tensor(self.count >= 12), "truncated": torch.tensor(False)}
        return self.outputs().update({"reward": self.reward(), **ends})

    def outputs(self):
        entries = {"observation": self.observation(), "action_mask": self.mask()}
        return TensorDict(**entries, to_play=torch.tensor(self.player))

    def observation(self):
        return torch.tensor([self.count / 12, 1.0])

    def mask(self):
        return torch.tensor([True, True, self.count < 6])

    def reward(self):
        return torch.tensor(float(self.count >= 12))

    def render(self):
        return torch.zeros(4, 5, 3, dtype=torch.uint8)

    def close(self):
        pass


def replaced(**entries):
    """Replaces entries of the outputs by values or functions of the env; None removes one."""

    def outputs(self):
        values = {n: v(self) if callable(v) else v for n, v in entries.items()}
        good = Good.outputs(self).exclude(
            *[name for name, value in values.items() if value is None]
        )
        return good.update({n: torch.as_tensor(v) for n, v in values.items() if v is not None})

    return {"outputs": outputs}


def raises(self, action):
    raise KeyError("door")


def ends_twice(self, action):
    after = Good.step(self, action)
    return after.update({"truncated": after["terminated"].clone()})


def unseeded(self, seed):
    state = Good.reset(self, seed)
    self.generator = torch.Generator()
    self.generator.seed()
    return state


def same_draws(self, seed):
    """The generator is not seeded again by a reset."""
    before = getattr(self, "generator", None)
    state = Good.reset(self, seed)
    self.generator = before or self.generator
    return state


def same_memory(self):
    self.shown = getattr(self, "shown", torch.zeros(2))
    self.shown[0] = self.count
    return self.shown


def of_kind(name, **overrides):
    return type(name, (Good,), overrides)


EVERYWHERE = {"count": 0}  # one count for all environments, as a class attribute is
SharedCount = of_kind(
    "SharedCount",
    count=property(lambda self: EVERYWHERE["count"], lambda self, v: EVERYWHERE.update(count=v)),
)
SameMemory = of_kind("SameMemory", observation=same_memory)
IMAGE = EnvSpec(observation_shape=(8, 8, 3), action=Discrete(3), observation_dtype=torch.uint8)
BROKEN = {  # overrides of Good; the check that fails; its message
    "no render": ({"render": property(lambda self: self.nothing)}, "spec", "no render"),
    "no close": ({"close": property(lambda self: self.nothing)}, "spec", "no close"),
    "no spec": ({"spec": {}}, "spec", "spec is {.*\n.*make it an EnvSpec"),
    "channels last": ({"spec": IMAGE}, "spec", r"channels last\n.*permute\(2, 0, 1\)"),
    "missing key": (replaced(to_play=None), "reset", "no \\['to_play'\\]"),
    "undeclared key": (replaced(lives=3), "reset", r"does not declare: \['lives'\]"),
    "no TensorDict": (
        {"reset": lambda self, seed: Good.reset(self, seed)["observation"]},
        "reset", "a Tensor\n.*return a TensorDict",
    ),
    "shape": (replaced(observation=[0.0] * 3), "reset", r"float32 \[3\].*\n.*float32 \[2\]"),
    "dtype": (
        replaced(observation=torch.zeros(2).double()),
        "reset", r"float64 \[2\].*\n.*float32 \[2\]",
    ),
    "whole reward": ({"reward": lambda self: torch.tensor(1)}, "step", r"'reward' is int64"),
    "raises": ({"step": raises}, "step", "raised KeyError: 'door'"),
    "not finite": (
        {"reward": lambda self: torch.tensor(float("nan") if self.count > 5 else 0.0)},
        "numbers", "'reward' is not finite after",
    ),
    "nothing legal": (
        {"mask": lambda self: torch.full((3,), self.count < 5)}, "step", "no action is legal"
    ),
    "player two": (
        replaced(to_play=lambda self: self.player + 1), "players", r"to_play is \[2, 2\] after 1 st"
    ),
    "one player": (replaced(to_play=0), "players", "player 1 never has a turn"),
    "ends twice": ({"step": ends_twice}, "ends", "terminated and truncated are both set"),
    # A short episode may come out the same when played again, and differ in a row.
    "unseeded": (
        {"reset": unseeded},
        "seeds repeat", "differs after .* steps, (played again|in row 1)",
    ),
    "no reseed": ({"reset": same_draws}, "seeds repeat", "differs after .* steps, played again"),
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
    message = rf"does not keep the contract(?s:.*)fails  {check}: .*{text}"
    with pytest.raises(AssertionError, match=message):
        report.require()


def test_envs_that_share_state_are_found():
    """Alone it keeps the contract: it shows only beside others of its class."""
    check_env(SharedCount()).require()
    assert "rows" in fails(check_env(SharedCount))


def test_an_observation_that_is_overwritten_is_found():
    assert fails(check_env(SameMemory)) == ["memory"]
    assert fails(check_env(SameMemory())) == ["memory"]


class Forwards(Good):
    """Can be played without showing it."""

    def fast_forward(self, seed, actions):
        self.reset(seed)
        for action in actions:
            self.forward(action)

    def forward(self, action):
        self.count += 1 + int(action) + int(torch.randint(2, (), generator=self.generator))
        self.player = 1 - self.player


class ForgetsPlayer(Forwards):
    def forward(self, action):
        super().forward(action)
        self.player = 0


def test_a_fast_forward_must_end_in_the_same_state_as_the_steps():
    report = check_env(Forwards)
    report.require()
    assert "ok     fast forward: leads to where the steps do" in report.lines()
    assert "ok     fast forward: not offered" in check_env(Good).lines()
    check_env(batch_of(SerialBatch)).require()
    report = check_env(ForgetsPlayer)
    assert fails(report) == ["fast forward"]
    assert "'to_play' differs after 0 steps, behind a fast forward over 1 steps" in str(report)
    assert fails(check_env(lambda: SerialBatch([ForgetsPlayer()]))) == ["fast forward"]


def batch_of(kind):
    return lambda: kind([Good(), Good(), Good()])


class SameTensors(SerialBatch):
    """Returns the same tensors each time."""

    def step(self, action, rows=None):
        after = super().step(action, rows)
        self.returned = getattr(self, "returned", {})
        old = self.returned.setdefault(len(after["reward"]), after)
        return old.update_(after) if old is not after else after


class AutoReset(SerialBatch):
    """Resets by itself when an ended row is stepped."""

    def step(self, action, rows=None):
        for row in range(self.num_envs) if rows is None else rows.tolist():
            if not self.rows.runs[row]:
                self.reset_row(row, 0)
        return super().step(action, rows)


class WrongOrder(SerialBatch):
    """Returns its own order of rows, not that of the argument."""

    def step(self, action, rows=None):
        after = super().step(action, rows)
        return after if rows is None else after[rows.argsort()]


class Blocks(SerialBatch):
    """Uses the seed of row 0 for all rows."""

    def reset(self, seeds, rows=None):
        return super().reset(seeds if rows is None else seeds[:1].expand(len(seeds)), rows)


def test_a_batch_that_keeps_the_contract_passes():
    check_env(batch_of(SerialBatch)).require()
    check_env(SerialBatch([Good()])).require()


@pytest.mark.parametrize(
    ("kind", "check"),
    [(AutoReset, "ended rows"), (WrongOrder, "rows"), (Blocks, "rows"), (SameTensors, "memory")],
)
def test_a_broken_batch_is_found(kind, check):
    report = check_env(batch_of(kind))
    assert fails(report) == [check], str(report)


def test_notes_are_reported_and_do_not_fail():
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

    class Wide(gymnasium.ObservationWrapper):
        def observation(self, observation):
            return observation * 100

    report = check_env(lambda: Wide(gymnasium.make("CartPole-v1")))
    report.require()
    assert "note   numbers: observations leave the bounds of observation_space" in str(report)


def test_gymnasium_envs_and_lost_lives_keep_the_contract():
    """Lost lives are no ends of episodes."""
    report = check_env(gymnasium.make("CartPole-v1"))
    report.require()
    assert str(report).startswith("CartPole-v1 keeps the contract")
    check_env(lambda: gymnasium.make("CartPole-v1")).require()
    check_env(GymEnv("CartPole-v1")).require()

    class Lives(Good):
        spec = EnvSpec(observation_shape=(2,), **GAME, continues=True)

        def step(self, action):
            after = super().step(action)
            lost = torch.tensor(self.count == 6)
            return after.update({"terminated": after["terminated"] | lost, "continues": lost})

    check_env(Lives).require()
    check_env(lambda: SerialBatch([Lives(), Lives()])).require()
