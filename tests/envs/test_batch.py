"""Batches of environments: the outputs of each row, which rows may be stepped, errors."""

import numpy as np
import pytest
import torch

from raffia.envs.batch import SerialBatch, TimeLimit
from raffia.envs.env import BatchEnv, Box, Discrete, EnvSpec
from raffia.envs.probe import DelayProbe, ValueProbe
from raffia.envs.rows import EnvRows
from raffia.tensordict.tensordict import TensorDict


class Walk:
    """Cells 0, 1, 2 ...: the action is added; ends at 10; the observation has three numbers."""

    spec = EnvSpec(observation_shape=(3,), action=Discrete(5), name="walk")

    def reset(self, seed):
        self.cell = seed % 4
        return TensorDict(observation=self.observation())

    def step(self, action):
        self.cell += int(action)
        return TensorDict(
            observation=self.observation(),
            reward=torch.tensor(float(action)),
            terminated=torch.tensor(self.cell >= 10),
            truncated=torch.tensor(False),
        )

    def observation(self):
        return torch.tensor([self.cell, 1.0, 2.0])

    def render(self):
        return torch.full((2, 3, 3), self.cell, dtype=torch.uint8)

    def close(self):
        self.closed = True


@pytest.fixture
def walks():
    return SerialBatch([Walk() for _ in range(4)])


def cells(output):
    return output["observation"][:, 0].tolist()


def test_rows_equal_the_outputs_of_the_single_envs_and_are_never_overwritten(walks):
    state = walks.reset(torch.tensor([0, 1, 2, 3]))
    assert state.batch_size == (4,) and set(state.keys()) == {"observation"}
    after = walks.step(torch.tensor([4, 3, 2, 1]))
    assert cells(after) == [4, 4, 4, 4] and after["reward"].tolist() == [4, 3, 2, 1]
    assert (after["reward"].dtype, after["terminated"].dtype) == (torch.float32, torch.bool)
    part = walks.step(torch.tensor([4, 2]), rows=torch.tensor([3, 1]))  # in any order
    assert cells(part) == [8, 6]
    assert cells(walks.step(torch.zeros(4, dtype=int))) == [4, 6, 4, 8]
    assert cells(walks.reset(torch.tensor([2, 3]), torch.tensor([2, 0]))) == [2, 3]
    empty = torch.zeros(0, dtype=torch.int64)
    assert walks.step(empty, rows=empty).batch_size == (0,)
    assert (cells(state), cells(after), cells(part)) == ([0, 1, 2, 3], [4, 4, 4, 4], [8, 6])
    assert walks.render(2).shape == (2, 3, 3) and walks.render(2).max() == 2
    walks.close()
    assert all(env.closed for env in walks.envs)


def test_stepping_an_ended_row_names_the_call_that_works_and_changes_nothing(walks):
    with pytest.raises(RuntimeError, match=r"rows \[2\].*never started"):
        walks.step(torch.tensor([0]), rows=torch.tensor([2]))
    walks.reset(torch.tensor([3, 0, 0, 0]))
    for _ in range(2):
        after = walks.step(torch.tensor([4, 1, 0, 0]))
    assert after["terminated"].tolist() == [True, False, False, False]
    works = r"rows \[0\].*reset\(seeds, rows=torch.tensor\(\[0\]\)\)"
    with pytest.raises(RuntimeError, match=works):
        walks.step(torch.ones(4, dtype=torch.int64))
    assert walks.envs[1].cell == 2
    walks.reset(torch.tensor([1]), rows=torch.tensor([0]))
    assert cells(walks.step(torch.ones(4, dtype=torch.int64))) == [2, 3, 1, 1]


def test_an_env_that_raised_must_be_reset_and_the_others_continue(walks):
    walks.reset(torch.arange(4))
    walks.envs[1].cell = None
    with pytest.raises(TypeError):
        walks.step(torch.zeros(4, dtype=torch.int64))
    walks.step(torch.tensor([1]), rows=torch.tensor([2]))
    with pytest.raises(RuntimeError, match=r"rows \[1\]"):
        walks.step(torch.tensor([1, 1]), rows=torch.tensor([0, 1]))


class Echo(Walk):
    spec = EnvSpec(observation_shape=(2,), action=Box((-1.0, 0.0), (1.0, 8.0)))

    def reset(self, seed):
        self.cell = 0
        return TensorDict(observation=torch.zeros(2))

    def step(self, action):
        return super().step(torch.tensor(0)).set("observation", action)


class Game(Walk):
    spec = EnvSpec(observation_shape=(3,), action=Discrete(2), masked=True, num_players=2)

    def reset(self, seed):
        mask = torch.tensor([True, seed > 0])
        return super().reset(seed).update({"action_mask": mask, "to_play": torch.tensor(seed)})

    def step(self, action):
        more = {"action_mask": torch.tensor([True, True]), "to_play": 1 - action}
        return super().step(action).update(more)


class Lives(Walk):
    spec = EnvSpec(observation_shape=(3,), action=Discrete(5), continues=True)

    def step(self, action):
        output = super().step(action)
        output["continues"] = output["terminated"] & torch.tensor(self.cell < 12)
        return output


def test_batches_of_box_actions_masks_players_and_lives():
    batch = SerialBatch([Echo(), Echo(), Echo()])
    batch.reset(torch.arange(3))
    action = torch.tensor([[0.5, 7.0], [-1.0, 8.0]])
    assert torch.equal(batch.step(action, rows=torch.tensor([2, 0]))["observation"], action)
    for bad in (1.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"must be in \(-1.0, 0.0\) .. \(1.0, 8.0\)"):
            batch.step(torch.tensor([[bad, 1.0]]), rows=torch.tensor([1]))

    batch = SerialBatch([Game(), Game()])
    state = batch.reset(torch.arange(2))
    assert state["action_mask"].tolist() == [[True, False], [True, True]]
    assert batch.step(torch.tensor([1, 0]))["to_play"].tolist() == [0, 1]

    batch = SerialBatch([Lives(), Lives()])
    batch.reset(torch.tensor([3, 3]))
    batch.step(torch.tensor([4, 4]))
    after = batch.step(torch.tensor([3, 4]))  # cells 10 and 11
    assert after["terminated"].tolist() == after["continues"].tolist() == [True, True]
    after = batch.step(torch.tensor([0, 1]))  # cells 10 and 12
    assert after["continues"].tolist() == [True, False]
    with pytest.raises(RuntimeError, match=r"rows \[1\]"):
        batch.step(torch.tensor([0, 0]))


def limited(envs, steps):
    return TimeLimit(SerialBatch(envs), max_episode_steps=steps)


REFUSED = [
    ("step", (torch.tensor([1, 2]),), ValueError, r"int64 \[4\].*int64 \[2\]"),
    ("step", (torch.tensor([1.0, 2, 3, 4]),), ValueError, r"torch.float32 \[4\]"),
    ("step", (torch.tensor([1, 5, 0, 0]),), ValueError, "must be in 0 .. 4"),
    ("step", (torch.tensor([1, -1, 0, 0]),), ValueError, "must be in 0 .. 4"),
    ("step", ([1, 2, 3, 4],), ValueError, r"got \[1, 2, 3, 4\], which is not a tensor"),
    ("reset", (torch.arange(2), torch.tensor([1, 1])), ValueError, "may be given only once"),
    ("reset", (torch.arange(1), torch.tensor([4])), IndexError, r"must be in 0 \.\. 3, the rows"),
    ("reset", (torch.arange(1), torch.tensor([-1])), IndexError, r"must be in 0 \.\. 3, the rows"),
    ("reset", (torch.arange(1), torch.tensor([0.5])), ValueError, r"torch.float32 \[1\]"),
    ("reset", (torch.arange(3),), ValueError, r"int64 \[4\].*int64 \[3\]"),
    ("reset", (torch.tensor([0, 1, 2, -3]),), ValueError, "must be at least 0"),
    ("reset", (7,), ValueError, r"not a tensor. Pass for instance torch.arange\(4\)"),
]


def test_invalid_calls_and_outputs_are_refused(walks):
    walks.reset(torch.arange(4))
    for name, arguments, kind, message in REFUSED:
        with pytest.raises(kind, match=message):
            getattr(walks, name)(*arguments)
    assert [env.cell for env in walks.envs] == [0, 1, 2, 3]
    start = "Wrong returned 'observation' as"
    for make, message in (
        (lambda: SerialBatch([Walk(), ValueProbe()]), "row 0 has .*walk.*row 1 has .*probe/value"),
        (lambda: SerialBatch([]), "at least one environment"),
        (lambda: SerialBatch([walks.envs[0]] * 2), "same environment in several rows"),
        (lambda: limited([Walk()], 0), "max_episode_steps=0 must be at least 1"),
        # This would broadcast.
        (lambda: shows(torch.zeros(1)), rf"{start} float32 \[1\], but its spec has float32 \[3\]"),
        (lambda: shows(torch.zeros(3, dtype=torch.float64)), rf"{start} float64 \[3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def shows(tensor):
    wrong = type("Wrong", (Walk,), {"observation": lambda self: tensor})
    return SerialBatch([wrong()]).reset(torch.tensor([0]))


def test_rows_are_written_into_the_given_memory():
    rows = EnvRows.for_spec(Walk.spec, 4)
    batch = SerialBatch([Walk(), Walk()], rows.part(1, 3))
    batch.reset(torch.tensor([2, 3]))
    assert np.array_equal(rows.observation[:, 0], [0, 2, 3, 0])


def test_each_row_is_truncated_at_its_own_number_of_steps():
    batch = limited([Walk() for _ in range(3)], 3)
    assert isinstance(batch, BatchEnv) and batch.num_envs == 3
    batch.reset(torch.zeros(3, dtype=torch.int64))
    batch.step(torch.tensor([0]), rows=torch.tensor([1]))
    zero = torch.zeros(3, dtype=torch.int64)
    assert not batch.step(zero)["truncated"].any()
    assert batch.step(zero)["truncated"].tolist() == [False, True, False]
    with pytest.raises(RuntimeError, match=r"rows \[1\] were truncated after 3 steps.*\[1\]"):
        batch.step(zero)
    batch.reset(torch.tensor([0]), torch.tensor([1]))
    after = batch.step(torch.tensor([4, 4, 4]))
    assert after["truncated"].tolist() == [True, False, True]
    ends = limited([DelayProbe()], 2)  # a termination at the limit is no truncation
    ends.reset(torch.tensor([0]))
    ends.step(torch.tensor([0]))
    after = ends.step(torch.tensor([0]))
    assert after["terminated"].tolist() == [True] and after["truncated"].tolist() == [False]
