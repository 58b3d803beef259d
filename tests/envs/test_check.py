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

check_env = partial(check_at_length, num_steps=50)


class Good:
    """A game of two with a mask, and a die: places add up to 12."""

    spec = EnvSpec(
        observation_shape=(2,), action=Discrete(3), masked=True, num_players=2, name="mine"
    )

    def reset(self, seed):
        self.generator = generator_for(seed, "die")
        self.place, self.turn = 0, 0
        return self.said()

    def step(self, action):
        die = int(torch.randint(2, (), generator=self.generator))
        self.place += 1 + int(action) + die
        self.turn = 1 - self.turn
        return self.said().update(
            {
                "reward": self.reward(),
                "terminated": torch.tensor(self.place >= 12),
                "truncated": torch.tensor(False),
            }
        )

    def said(self):
        return TensorDict(
            observation=self.observation(),
            action_mask=self.mask(),
            to_play=torch.tensor(self.turn),
        )

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


class NoRender(Good):
    @property
    def render(self):
        raise AttributeError


class NoSpec(Good):
    spec = {"observation_shape": (2,)}


class ChannelsLast(Good):
    spec = EnvSpec(observation_shape=(8, 8, 3), action=Discrete(3), observation_dtype=torch.uint8)


class Forgets(Good):
    def said(self):
        return super().said().exclude("to_play")


class SaysMore(Good):
    def said(self):
        return super().said().update({"lives": torch.tensor(3)})


class NoTensorDict(Good):
    def reset(self, seed):
        return super().reset(seed)["observation"]


class OtherShape(Good):
    def observation(self):
        return torch.zeros(3)


class OtherDtype(Good):
    def observation(self):
        return torch.zeros(2, dtype=torch.float64)


class RewardOfInts(Good):
    def reward(self):
        return torch.tensor(1)


class Raises(Good):
    def step(self, action):
        raise KeyError("door")


class NotFinite(Good):
    def reward(self):
        return torch.tensor(float("nan") if self.place > 5 else 0.0)


class NothingLegal(Good):
    def mask(self):
        return torch.full((3,), self.place < 5)


class PlayerTwo(Good):
    def said(self):
        return super().said().update({"to_play": torch.tensor(self.turn + 1)})


class NobodyElse(Good):
    def said(self):
        return super().said().update({"to_play": torch.tensor(0)})


class BothEnds(Good):
    def step(self, action):
        said = super().step(action)
        return said.update({"truncated": said["terminated"].clone()})


class OwnChance(Good):
    def reset(self, seed):
        said = super().reset(seed)
        self.generator = torch.Generator()
        self.generator.seed()
        return said


class Remembers(Good):
    """Chance goes on from episode to episode."""

    def reset(self, seed):
        before = getattr(self, "generator", None)
        said = super().reset(seed)
        self.generator = before or self.generator
        return said


class SharedPlace(Good):
    """One place for all environments, as a class attribute is."""

    everywhere = {"place": 0}
    place = property(
        lambda self: self.everywhere["place"], lambda self, v: self.everywhere.update(place=v)
    )


class SameMemory(Good):
    def observation(self):
        self.shown = getattr(self, "shown", torch.zeros(2))
        self.shown[0] = self.place
        return self.shown


class FlatPicture(Good):
    def render(self):
        return torch.zeros(4, 5, dtype=torch.uint8)


BROKEN = {
    NoRender: ("spec", "no render"),
    NoSpec: ("spec", "spec is {.*\n.*make it an EnvSpec"),
    ChannelsLast: ("spec", r"channels last\n.*permute\(2, 0, 1\)"),
    Forgets: ("reset", "no \\['to_play'\\]"),
    SaysMore: ("reset", r"does not know: \['lives'\]"),
    NoTensorDict: ("reset", "a Tensor\n.*give a TensorDict"),
    OtherShape: ("reset", r"float32 \[3\].*\n.*float32 \[2\]"),
    OtherDtype: ("reset", r"float64 \[2\].*\n.*float32 \[2\]"),
    RewardOfInts: ("step", r"'reward' is int64"),
    Raises: ("step", "raised KeyError: 'door'"),
    NotFinite: ("numbers", "'reward' is not finite after"),
    NothingLegal: ("step", "no action is legal"),
    PlayerTwo: ("players", r"to_play is \[2, 2\] after 1 steps"),
    NobodyElse: ("players", "player 1 never comes"),
    BothEnds: ("ends", "terminated and truncated at once"),
    # Real chance: a short episode may be the same when it is played again, and differ in a row.
    OwnChance: ("seeds repeat", "differs after .* steps, (played again|in row 1)"),
    Remembers: ("seeds repeat", "differs after .* steps, played again"),
    FlatPicture: ("render", r"uint8 \[4, 5\]"),
}


def fails(report):
    return [finding.name for finding in report.findings if finding.verdict == "fails"]


def test_an_env_that_keeps_the_contract_passes():
    report = check_env(Good)
    report.require()
    assert report.ok and {finding.verdict for finding in report.findings} == {"ok"}, str(report)
    assert str(report).startswith("mine keeps the contract\nok     spec: ")


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_a_broken_env_is_found(kind):
    check, text = BROKEN[kind]
    report = check_env(kind)
    assert check in fails(report), str(report)
    with pytest.raises(
        AssertionError, match=rf"does not keep the contract(?s:.*)fails  {check}: .*{text}"
    ):
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


def test_pictures_that_were_cut_to_0_and_1_are_noted():
    class Cut(Good):
        spec = EnvSpec(
            observation_shape=(1, 2, 1),
            action=Discrete(3),
            observation_dtype=torch.uint8,
            masked=True,
            num_players=2,
        )

        def observation(self):
            return torch.ones(1, 2, 1, dtype=torch.uint8)

    assert "multiply by 255" in str(check_env(Cut))


def test_envs_of_gymnasium_can_be_given_as_they_are():
    report = check_env(gymnasium.make("CartPole-v1"))
    report.require()
    assert str(report).startswith("CartPole-v1 keeps the contract")
    check_env(lambda: gymnasium.make("CartPole-v1")).require()
    check_env(GymEnv("CartPole-v1")).require()


def test_lost_lives_are_no_ends_of_episodes():
    class Lives(Good):
        spec = EnvSpec(
            observation_shape=(2,), action=Discrete(3), masked=True, num_players=2, continues=True
        )

        def step(self, action):
            said = super().step(action)
            lost = torch.tensor(self.place == 6)
            return said.update({"terminated": said["terminated"] | lost, "continues": lost})

    check_env(Lives).require()
    check_env(lambda: SerialBatch([Lives(), Lives()])).require()
