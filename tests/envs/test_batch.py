import numpy as np
import pytest
import torch

from raffia.envs.batch import SerialBatch
from raffia.envs.env import BatchEnv, Box, Discrete, EnvSpec
from raffia.envs.gym import GymEnv
from raffia.envs.probe import DelayProbe, ValueProbe
from raffia.envs.rows import EnvRows
from raffia.envs.timelimit import TimeLimit
from raffia.tensordict.tensordict import TensorDict


class Walk:
    """Places 0, 1, 2 ...: the action's number is added; ends at 10; three numbers are seen."""

    spec = EnvSpec(observation_shape=(3,), action=Discrete(5), name="walk")

    def reset(self, seed):
        self.place = seed % 4
        return TensorDict(observation=self.seen())

    def step(self, action):
        self.place += int(action)
        return TensorDict(
            observation=self.seen(),
            reward=torch.tensor(float(action)),
            terminated=torch.tensor(self.place >= 10),
            truncated=torch.tensor(False),
        )

    def seen(self):
        return torch.tensor([self.place, 1.0, 2.0])

    def render(self):
        return torch.full((2, 3, 3), self.place, dtype=torch.uint8)

    def close(self):
        self.closed = True


@pytest.fixture
def walks():
    return SerialBatch([Walk() for _ in range(4)])


def test_rows_are_what_the_envs_say_one_by_one(walks):
    state = walks.reset(torch.tensor([0, 1, 2, 3]))
    assert state.batch_size == (4,) and set(state.keys()) == {"observation"}
    after = walks.step(torch.tensor([4, 3, 2, 1]))
    assert after["observation"][:, 0].tolist() == [4, 4, 4, 4]
    assert after["reward"].tolist() == [4, 3, 2, 1]
    assert (after["reward"].dtype, after["terminated"].dtype) == (torch.float32, torch.bool)


def test_a_subset_of_rows_in_any_order_leaves_the_others(walks):
    walks.reset(torch.arange(4))
    after = walks.step(torch.tensor([4, 2]), rows=torch.tensor([3, 1]))
    assert after["observation"][:, 0].tolist() == [7, 3]
    assert walks.step(torch.zeros(4, dtype=torch.int64))["observation"][:, 0].tolist() == [
        0,
        3,
        2,
        7,
    ]
    assert walks.reset(torch.tensor([2, 3]), torch.tensor([2, 0]))["observation"][
        :, 0
    ].tolist() == [
        2,
        3,
    ]
    empty = torch.zeros(0, dtype=torch.int64)
    assert walks.step(empty, rows=empty).batch_size == (0,)


def test_an_ended_row_is_refused_with_the_call_that_works_and_nothing_moves(walks):
    walks.reset(torch.tensor([3, 0, 0, 0]))
    for _ in range(2):
        after = walks.step(torch.tensor([4, 1, 0, 0]))
    assert after["terminated"].tolist() == [True, False, False, False]
    with pytest.raises(
        RuntimeError, match=r"rows \[0\].*reset\(seeds, rows=torch.tensor\(\[0\]\)\)"
    ):
        walks.step(torch.ones(4, dtype=torch.int64))
    assert walks.envs[1].place == 2
    walks.reset(torch.tensor([1]), rows=torch.tensor([0]))
    assert walks.step(torch.ones(4, dtype=torch.int64))["observation"][:, 0].tolist() == [
        2,
        3,
        1,
        1,
    ]


def test_a_row_that_never_began_is_refused(walks):
    with pytest.raises(RuntimeError, match=r"rows \[2\].*never begun"):
        walks.step(torch.tensor([0]), rows=torch.tensor([2]))


def test_an_env_that_raises_must_be_reset_and_the_rest_goes_on(walks):
    walks.reset(torch.arange(4))
    walks.envs[1].place = None
    with pytest.raises(TypeError):
        walks.step(torch.zeros(4, dtype=torch.int64))
    walks.step(torch.tensor([1]), rows=torch.tensor([2]))
    with pytest.raises(RuntimeError, match=r"rows \[1\]"):
        walks.step(torch.tensor([1, 1]), rows=torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (torch.tensor([1, 2]), r"int64 \[4\].*int64 \[2\]"),
        (torch.tensor([1.0, 2, 3, 4]), r"torch.float32 \[4\]"),
        (torch.tensor([1, 5, 0, 0]), r"lie in 0 .. 4"),
        (torch.tensor([1, -1, 0, 0]), r"lie in 0 .. 4"),
        ([1, 2, 3, 4], r"int64 \[4\].* here \[1, 2, 3, 4\], which is no tensor"),
    ],
)
def test_actions_of_another_kind_are_refused(walks, action, text):
    walks.reset(torch.arange(4))
    with pytest.raises(ValueError, match=text):
        walks.step(action)


@pytest.mark.parametrize(
    ("rows", "kind", "text"),
    [
        ([1, 1], ValueError, "may be named once"),
        ([4], IndexError, r"rows 0 \.\. 3"),
        ([-1], IndexError, r"rows 0 \.\. 3"),
        ([0.5], ValueError, r"torch.float32 \[1\]"),
        ([True, False], ValueError, "torch.bool"),
    ],
)
def test_rows_that_are_not_there_are_refused(walks, rows, kind, text):
    with pytest.raises(kind, match=text):
        walks.reset(torch.arange(len(rows)), torch.tensor(rows))


@pytest.mark.parametrize(
    ("seeds", "text"),
    [
        (torch.arange(3), r"int64 \[4\].*int64 \[3\]"),
        (torch.zeros(4), "torch.float32"),
        (torch.tensor([0, 1, 2, -3]), "must not be negative"),
        (7, r"here 7, which is no tensor; pass for instance torch.arange\(4\)"),
    ],
)
def test_seeds_of_another_kind_are_refused(walks, seeds, text):
    with pytest.raises(ValueError, match=text):
        walks.reset(seeds)


def test_what_was_given_stays_as_it_was(walks):
    state = walks.reset(torch.arange(4))
    part = walks.reset(torch.arange(2), torch.tensor([0, 1]))
    walks.step(torch.tensor([4, 4, 4, 4]))
    assert state["observation"][:, 0].tolist() == [0, 1, 2, 3]
    assert part["observation"][:, 0].tolist() == [0, 1]


def test_box_actions_of_a_row_reach_its_env():
    class Echo(Walk):
        spec = EnvSpec(observation_shape=(2,), action=Box((-1.0, 0.0), (1.0, 8.0)))

        def reset(self, seed):
            return TensorDict(observation=torch.zeros(2))

        def step(self, action):
            return TensorDict(
                observation=action,
                reward=torch.tensor(0.0),
                terminated=torch.tensor(False),
                truncated=torch.tensor(False),
            )

    batch = SerialBatch([Echo(), Echo(), Echo()])
    batch.reset(torch.arange(3))
    action = torch.tensor([[0.5, 7.0], [-1.0, 8.0]])
    said = batch.step(action, rows=torch.tensor([2, 0]))
    assert torch.equal(said["observation"], action)
    for bad in (1.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"must lie in \(-1.0, 0.0\) .. \(1.0, 8.0\)"):
            batch.step(torch.tensor([[bad, 1.0]]), rows=torch.tensor([1]))


def test_masks_and_turns_are_rows_too():
    class Game(Walk):
        spec = EnvSpec(observation_shape=(3,), action=Discrete(2), masked=True, num_players=2)

        def reset(self, seed):
            mask = torch.tensor([True, seed > 0])
            return super().reset(seed).update({"action_mask": mask, "to_play": torch.tensor(seed)})

        def step(self, action):
            more = {"action_mask": torch.tensor([True, True]), "to_play": 1 - action}
            return super().step(action).update(more)

    batch = SerialBatch([Game(), Game()])
    state = batch.reset(torch.arange(2))
    assert state["action_mask"].tolist() == [[True, False], [True, True]]
    assert batch.step(torch.tensor([1, 0]))["to_play"].tolist() == [0, 1]


def test_a_row_goes_on_where_its_env_says_that_it_continues():
    class Lives(Walk):
        spec = EnvSpec(observation_shape=(3,), action=Discrete(5), continues=True)

        def step(self, action):
            said = super().step(action)
            said["continues"] = said["terminated"] & torch.tensor(self.place < 12)
            return said

    batch = SerialBatch([Lives(), Lives()])
    batch.reset(torch.tensor([3, 3]))
    batch.step(torch.tensor([4, 4]))
    after = batch.step(torch.tensor([3, 4]))  # places 10 and 11
    assert after["terminated"].tolist() == after["continues"].tolist() == [True, True]
    after = batch.step(torch.tensor([0, 1]))  # places 10 and 12
    assert after["continues"].tolist() == [True, False]
    with pytest.raises(RuntimeError, match=r"rows \[1\]"):
        batch.step(torch.tensor([0, 0]))


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        (torch.zeros(1), r"float32 \[1\]; its spec has float32 \[3\]"),  # would broadcast
        (torch.zeros(3, dtype=torch.float64), r"float64 \[3\]"),
    ],
)
def test_an_env_that_says_other_than_its_spec_is_named(observation, text):
    class Wrong(Walk):
        def seen(self):
            return observation

    with pytest.raises(ValueError, match=f"Wrong gave 'observation' as {text}"):
        SerialBatch([Wrong()]).reset(torch.tensor([0]))


def test_envs_of_two_kinds_and_none_are_refused():
    with pytest.raises(ValueError, match="row 0 is .*walk.*row 1 is .*probe/value"):
        SerialBatch([Walk(), ValueProbe()])
    with pytest.raises(ValueError, match="one environment or more"):
        SerialBatch([])


def test_pictures_and_closing_reach_the_envs(walks):
    walks.reset(torch.arange(4))
    assert walks.render(2).shape == (2, 3, 3) and walks.render(2).max() == 2
    walks.close()
    assert all(env.closed for env in walks.envs)


def test_rows_lie_in_the_memory_that_is_given():
    rows = EnvRows.for_spec(Walk.spec, 4)
    batch = SerialBatch([Walk(), Walk()], rows.part(1, 3))
    batch.reset(torch.tensor([2, 3]))
    assert np.array_equal(rows.observation[:, 0], [0, 2, 3, 0])


# TimeLimit


def test_a_limit_truncates_rows_by_their_own_count():
    batch = TimeLimit(SerialBatch([Walk() for _ in range(3)]), max_episode_steps=3)
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


def test_an_end_of_the_task_at_the_limit_is_no_truncation():
    batch = TimeLimit(SerialBatch([DelayProbe()]), max_episode_steps=2)
    batch.reset(torch.tensor([0]))
    batch.step(torch.tensor([0]))
    after = batch.step(torch.tensor([0]))
    assert after["terminated"].tolist() == [True] and after["truncated"].tolist() == [False]
    with pytest.raises(ValueError, match="max_episode_steps=0 must be at least 1"):
        TimeLimit(batch, 0)


def test_gym_rows_equal_gym_envs_alone():
    batch, alone = SerialBatch([GymEnv("CartPole-v1") for _ in range(3)]), GymEnv("CartPole-v1")
    seen = [batch.reset(torch.arange(3))["observation"]]
    actions = torch.tensor([[0, 1, 1], [1, 0, 1], [0, 0, 1]])
    seen += [batch.step(action)["observation"] for action in actions]
    for row in range(3):
        mine = [alone.reset(row)] + [alone.step(action) for action in actions[:, row]]
        assert all(torch.equal(a["observation"], b[row]) for a, b in zip(mine, seen, strict=True))
