"""SegmentReplayBuffer: windows by hand, eviction, priorities, mistakes, and going on later."""

import copy
import threading
import time

import pytest
import torch
from torch.testing import assert_close

from raffia import LazyStackedTensorDict, TensorDict
from raffia.data.memmap_storage import MemmapStorage
from raffia.data.segment import SegmentReplayBuffer
from raffia.data.storage import TensorStorage
from raffia.tensordict.memmap import DamagedFileError


def steps_of(num_steps, *, end=None, first_obs=0, shape=(), **entries):
    """Steps [T] of one environment, whose observations count up; `end` comes with the last one."""
    last = torch.arange(num_steps) == num_steps - 1
    obs = torch.arange(first_obs, first_obs + num_steps + 1)
    obs = obs.view(-1, *[1] * len(shape)).expand(-1, *shape)
    return TensorDict(
        obs=obs[:-1],
        action=torch.arange(1, num_steps + 1),
        reward=torch.arange(1.0, num_steps + 1),
        terminated=last & (end in ("terminated", "both")),
        truncated=last & (end in ("truncated", "both")),
        next={"obs": obs[1:]},
        **entries,
        batch_size=[num_steps],
    )


def make(num_rows=100, **options):
    options = {"unroll_steps": 2, "n_step": 1, "observation_keys": ["obs"]} | options
    return SegmentReplayBuffer(TensorStorage(num_rows), **options)


def filled(num_rows=100, num_episodes=3, num_steps=5, **options):
    buffer = make(num_rows, **options)
    for i in range(num_episodes):
        buffer.extend(steps_of(num_steps, end="terminated", first_obs=10 * i))
    return buffer


def drawable(buffer):
    """The numbers of all steps that can be drawn, as drawing gives them."""
    every = torch.arange(buffer.storage.total)
    found = every[buffer.contains(every)].tolist()
    if found:
        seen = buffer.sample(50 * len(found))["index"].unique().tolist()
        assert seen == found
    assert len(buffer) == len(found)
    return found


# ------------------------------------------------------------------------------- what windows hold


def test_windows_of_two_interleaved_environments_worked_by_hand():
    """Environment 0: three steps to a termination; environment 1: it begins anew after a cut-off.

    time  0   1   2   3         numbers   0 2 4 6   (environment 0)
    env0  10  11  12| 20                  1 3 5 7   (environment 1)
    env1  50  51| 60  61                  8 closes 50 51, 9 closes 10 11 12
    """
    buffer = make(frame_stack=3)
    no, yes = False, True
    numbers = buffer.extend(
        TensorDict(
            obs=torch.tensor([[10, 50], [11, 51], [12, 60], [20, 61]], dtype=torch.uint8),
            action=torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]]),
            reward=torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6], [0.7, 0.8]]),
            terminated=torch.tensor([[no, no], [no, no], [yes, no], [no, no]]),
            truncated=torch.tensor([[no, no], [no, yes], [no, no], [no, no]]),
            next={
                "obs": torch.tensor([[0, 0], [0, 52], [13, 0], [0, 0]], dtype=torch.uint8),
            },
            batch_size=[4, 2],
        )
    )
    assert numbers.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert drawable(buffer) == [0, 1, 2, 3, 4]  # 5, 6 and 7 wait for what follows

    window = buffer.read(torch.tensor([2, 1]))  # the second steps: L = 2 + 1 + 1 rows
    assert window["obs"].dtype is torch.uint8
    assert window["obs"].tolist() == [
        [[10, 10, 11], [10, 11, 12], [11, 12, 13], [12, 13, 13]],
        [[50, 50, 50], [50, 50, 51], [50, 51, 52], [51, 52, 52]],
    ]
    assert window["action"].tolist() == [[3, 5, 0, 0], [2, 4, 0, 0]]
    assert_close(window["reward"], torch.tensor([[0.3, 0.5, 0, 0], [0.2, 0.4, 0, 0]]))
    assert window["terminated"].tolist() == [[no, yes, yes, yes], [no, no, no, no]]
    assert window["truncated"].tolist() == [[no, no, no, no], [no, yes, yes, yes]]
    assert window["index"].tolist() == [2, 1]
    assert window["step_index"].tolist() == [[2, 4, 9, -1], [1, 3, 8, -1]]
    assert window["valid"].tolist() == [[yes, yes, yes, no], [yes, yes, yes, no]]
    assert window["valid_step"].tolist() == [[yes, yes, no, no], [yes, yes, no, no]]
    assert window["mask"].tolist() == [[yes, yes, yes, yes], [yes, yes, no, no]]
    assert window["discount"].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]
    assert window["priority_weight"].tolist() == [1, 1]
    assert window.batch_size == (2,)
    assert "next" not in window.keys()


@pytest.mark.parametrize(
    ("end", "absorb", "mask", "discount"),
    [
        ("terminated", ("terminated",), [True, True, True, True], [1, 0, 0, 0]),
        ("terminated", (), [True, True, False, False], [1, 0, 0, 0]),
        ("truncated", ("terminated",), [True, True, False, False], [1, 1, 0, 0]),
        ("truncated", ("truncated",), [True, True, True, True], [1, 0, 0, 0]),
        ("both", ("terminated",), [True, True, True, True], [1, 0, 0, 0]),
        ("both", ("truncated",), [True, True, False, False], [1, 0, 0, 0]),
    ],
)
def test_behind_an_end_rows_are_absorbing_or_masked(end, absorb, mask, discount):
    buffer = make(absorb=absorb)
    buffer.extend(steps_of(2, end=end))
    window = buffer.read(torch.tensor([0]))
    assert window["mask"][0].tolist() == mask
    assert window["discount"][0].tolist() == discount
    assert window["obs"][0].tolist() == [0, 1, 2, 2]


def test_a_step_can_be_drawn_once_all_it_looks_ahead_to_is_there():
    buffer = make(unroll_steps=2, n_step=1)
    counts = []
    for i in range(5):
        buffer.add(steps_of(1, first_obs=i)[0])
        counts.append(len(buffer))
    assert counts == [0, 0, 0, 1, 2]
    buffer.add(steps_of(1, first_obs=5, end="truncated")[0])
    assert len(buffer) == 6


def test_an_episode_of_one_step():
    buffer = make()
    buffer.extend(steps_of(1, end="terminated", first_obs=7))
    window = buffer.sample(3)
    assert window["obs"].tolist() == [[7, 8, 8, 8]] * 3
    assert window["valid"].tolist() == [[True, True, False, False]] * 3


def test_each_frame_is_stored_once_and_copied_once():
    buffer = make(num_rows=20, frame_stack=4)
    steps = steps_of(9, end="terminated", shape=(6, 5))
    steps["obs"], steps["next", "obs"] = steps["obs"].byte(), steps["next", "obs"].byte()
    buffer.extend(steps)
    assert str(buffer.storage.structure).startswith("obs uint8[6, 5]")
    assert len(buffer.storage) == 10  # nine steps and the closing row
    obs = buffer.sample(7)["obs"]
    assert obs.shape == (7, 4, 4, 6, 5)
    assert obs.untyped_storage().nbytes() == 7 * (4 + 3) * 6 * 5


def test_nested_observations_of_which_some_are_stacked():
    buffer = make(
        observation_keys=[("obs", "pixels"), ("obs", "speed"), "legal"],
        n_step=0,
        frame_stack={
            ("obs", "pixels"): 2,
            ("obs", "speed"): 3,
        },
    )
    obs = torch.arange(1, 5)

    def state(x):
        return {"obs": {"pixels": x, "speed": x * 10.0}, "legal": torch.stack([x, -x], 1)}

    no = torch.zeros(3, dtype=torch.bool)
    steps = TensorDict(
        state(obs[:3]) | {"next": state(obs[1:]), "terminated": no, "truncated": no.clone()},
        batch_size=[3],
    )
    steps["terminated"][-1] = True
    buffer.extend(steps)
    window = buffer.read(torch.tensor([1]))
    assert window["obs", "pixels"].tolist() == [[[1, 2], [2, 3], [3, 4]]]
    assert window["obs", "speed"].tolist() == [[[10, 10, 20], [10, 20, 30], [20, 30, 40]]]
    assert window["legal"].tolist() == [[[2, -2], [3, -3], [4, -4]]]


def test_steps_of_several_environments_by_their_numbers():
    buffer = make(unroll_steps=1, n_step=0)
    both = torch.stack([steps_of(2, first_obs=0), steps_of(2, first_obs=50)], 1)  # [T, E]
    buffer.extend(both, env=[4, 1])
    buffer.extend(steps_of(1, first_obs=52), env=1)
    buffer.add(steps_of(1, first_obs=2)[0], env=4)
    assert buffer.read(torch.tensor([0, 2]))["obs"].tolist() == [[0, 1], [1, 2]]
    assert buffer.read(torch.tensor([1, 3]))["obs"].tolist() == [[50, 51], [51, 52]]


def test_steps_in_a_lazy_stack():
    buffer, other = make(), make()
    both = [steps_of(2, end="truncated"), steps_of(2, first_obs=50, end="terminated")]
    buffer.extend(LazyStackedTensorDict.lazy_stack(both, 1))
    other.extend(torch.stack(both, 1))
    index = torch.arange(4)
    for key, value in other.read(index).items():
        assert torch.equal(buffer.read(index)[key], value), key


def test_flags_with_a_last_dimension_of_one():
    buffer = make()
    steps = steps_of(3, end="terminated")
    steps["terminated"], steps["truncated"] = (
        steps["terminated"][:, None],
        steps["truncated"][:, None],
    )
    buffer.extend(steps)
    assert buffer.sample(2)["terminated"].shape == (2, 4, 1)


# ------------------------------------------------------------------------------------ the ring


def test_an_episode_is_lost_when_its_first_step_is_overwritten_and_no_other_one():
    """Eight episodes of 20 steps; three are dropped, and all 100 steps of the others stay."""
    buffer = make(num_rows=8 * 21, unroll_steps=5, n_step=5)
    for i in range(8):
        buffer.extend(steps_of(20, end="terminated", first_obs=100 * i))
    assert len(buffer) == 160
    buffer.extend(steps_of(2 * 21 + 1, first_obs=800))  # and the first step of the third one
    assert buffer.num_episodes == 5 + 1
    kept = [i for i in drawable(buffer) if i < 8 * 21]
    assert kept == [21 * episode + step for episode in range(3, 8) for step in range(20)]
    assert len(kept) == 100


def test_an_episode_longer_than_the_ring_loses_its_oldest_steps():
    buffer = make(num_rows=10, unroll_steps=1, n_step=0, frame_stack=3)
    buffer.extend(steps_of(13))
    assert len(buffer.storage) == 10
    # Steps 3 to 12 are here; 3 and 4 lack a frame before them, 12 the row after it.
    assert drawable(buffer) == list(range(5, 12))
    assert buffer.read(torch.tensor([5]))["obs"].tolist() == [[[3, 4, 5], [4, 5, 6]]]
    buffer.extend(steps_of(1, end="terminated", first_obs=13))
    assert drawable(buffer) == list(range(7, 14))
    buffer.extend(steps_of(1, first_obs=50))  # it has ended: now it is lost as a whole
    assert drawable(buffer) == []


def test_an_environment_that_is_left_alone_while_all_its_steps_are_overwritten():
    buffer = make(num_rows=6, unroll_steps=1, n_step=0, frame_stack=2)
    buffer.extend(steps_of(3), env=0)
    buffer.extend(steps_of(5, end="terminated", first_obs=50), env=1)
    assert buffer.num_episodes == 1
    buffer.extend(steps_of(3, first_obs=3), env=0)  # its first frame is not the episode's first
    assert drawable(buffer) == [10]
    assert buffer.read(torch.tensor([10]))["obs"].tolist() == [[[3, 4], [4, 5]]]


def test_more_steps_at_once_than_the_ring_holds():
    buffer = make(num_rows=12, unroll_steps=3, n_step=1)
    steps = torch.cat([steps_of(4, end="terminated", first_obs=10 * i) for i in range(6)])
    numbers = buffer.extend(steps)
    assert buffer.storage.total == 24 + 6
    assert drawable(buffer)[-4:] == numbers[-4:].tolist()
    assert buffer.read(numbers[-4:-2])["obs"].tolist() == [
        [50, 51, 52, 53, 54],
        [51, 52, 53, 54, 54],
    ]


def test_cut_makes_the_newest_steps_closing_rows():
    buffer = make()
    buffer.extend(steps_of(3), env=0)
    buffer.extend(steps_of(1, first_obs=50), env=1)
    buffer.extend(steps_of(2, first_obs=80), env=3)
    assert buffer.cut([0, 1]) == 2
    assert buffer.cut(0) == 0
    window = buffer.read(torch.tensor([0, 1]))
    assert window["obs"].tolist() == [[0, 1, 2, 2], [1, 2, 2, 2]]
    assert window["action"].tolist() == [[1, 2, 0, 0], [2, 0, 0, 0]]
    assert window["truncated"].tolist() == [[False, True, True, True], [True, True, True, True]]
    assert window["discount"].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0]]
    assert drawable(buffer) == [0, 1]
    buffer.extend(steps_of(2, first_obs=90, end="terminated"), env=0)
    assert buffer.read(torch.tensor([6]))["obs"].tolist() == [[90, 91, 92, 92]]
    assert buffer.cut() == 1  # that of environment 3


def test_cut_without_any_look_ahead():
    buffer = make(unroll_steps=0, n_step=0, alpha=1.0, beta=1.0, absorb=("truncated",))
    buffer.extend(steps_of(3))
    assert drawable(buffer) == [0, 1, 2]
    buffer.cut()
    assert drawable(buffer) == [0, 1]
    assert buffer.read(torch.tensor([0]), length=4)["discount"].tolist() == [[1, 0, 0, 0]]


def test_cut_of_an_episode_of_which_one_step_is_left():
    buffer = make(num_rows=6, unroll_steps=1, n_step=0)
    buffer.extend(steps_of(3), env=0)
    buffer.extend(steps_of(5, first_obs=50), env=1)  # over the first two of these, and on
    assert buffer.cut(0) == 1
    assert drawable(buffer) == [3, 4, 5, 6]
    window = buffer.read(torch.tensor([3]), length=5)
    assert not window["truncated"].any() and (window["discount"] == 1).all()


@pytest.mark.parametrize("end", [None, "terminated", "truncated"])
@pytest.mark.parametrize("length", range(1, 9))
def test_windows_behind_the_newest_step_of_an_episode_that_goes_on_are_refused(end, length):
    buffer = make(unroll_steps=1, n_step=0)
    buffer.extend(steps_of(5, end=end))
    before = buffer.sample(3)
    if end is None and length > 5 - 2:  # from step 2 on there are the steps 2, 3 and 4
        with pytest.raises(IndexError, match=f"length={length}: .* length=3 can be read"):
            buffer.read(torch.tensor([0, 2]), length=length)
        if length <= 5:
            assert buffer.read(torch.tensor([0]), length=length)["valid"].all()
    else:
        window = buffer.read(torch.tensor([0, 2]), length=length)
        steps, rows = 5, 5 + (end is not None)
        for i, start in enumerate((0, 2)):
            assert window["valid"][i].sum() == min(length, rows - start)
            assert window["reward"][i].count_nonzero() == min(length, steps - start)
    assert buffer.sample(3).keys() == before.keys()


# -------------------------------------------------------------------------------- priorities


def test_draws_and_weights_follow_priorities():
    buffer = make(alpha=0.5, beta=1.0, eps=0.0, generator=torch.Generator().manual_seed(0))
    buffer.extend(steps_of(4, end="terminated"), priority=torch.tensor([1.0, 4.0, 9.0, 4.0]))
    batch = buffer.sample(8000)
    counts = batch["index"].bincount(minlength=4)
    assert_close(counts / 8000, torch.tensor([1, 2, 3, 2]) / 8, atol=0.02, rtol=0)
    weights = batch["priority_weight"]
    assert_close(weights, torch.tensor([1, 1 / 2, 1 / 3, 1 / 2])[batch["index"]])
    buffer.beta = 0.0
    assert buffer.sample(5)["priority_weight"].tolist() == [1.0] * 5


def test_weights_can_be_those_of_the_batch():
    priority = torch.tensor([1.0, 4.0, 9.0, 100.0])
    options = {"alpha": 0.5, "beta": 1.0, "eps": 0.0, "importance": "batch"}
    for replacement in (True, False):
        buffer = make(replacement=replacement, **options)
        buffer.extend(steps_of(4, end="terminated"), priority=priority)
        for _ in range(20):
            batch = buffer.sample(2)
            chance = priority[batch["index"]].sqrt()
            assert_close(batch["priority_weight"], chance.min() / chance)
    with pytest.raises(ValueError, match='importance is "batch"'):
        make(alpha=0.5, beta=1.0, importance="all")


def test_starts_differ_where_there_are_enough_if_replacement_is_none():
    buffer = make(alpha=1.0, beta=1.0, replacement=None)
    buffer.extend(steps_of(4, end="terminated"))
    assert buffer.sample(4)["index"].sort().values.tolist() == [0, 1, 2, 3]
    assert len(buffer.sample(9)["index"]) == 9
    for _ in range(20):  # in one go they are different once in ten times
        assert len(buffer.sample(4)["index"].unique()) == 4
    with pytest.raises(ValueError, match="no 9 different steps among 4.*replacement=True, or with"):
        strict = make(replacement=False)
        strict.extend(steps_of(4, end="terminated"))
        strict.sample(9)


def test_new_steps_have_the_largest_priority_so_far():
    buffer = make(alpha=1.0, beta=1.0, eps=0.0, replacement=False)
    buffer.extend(steps_of(2, end="terminated"))
    assert buffer.sample(2)["priority_weight"].tolist() == [1.0, 1.0]
    assert buffer.update_priority(torch.tensor([0]), torch.tensor([0.25])) == 0
    buffer.extend(steps_of(1, end="terminated"))  # 0.25 is the largest that was given
    assert buffer.sample(3)["priority_weight"].sort().values.tolist() == [0.25, 1.0, 1.0]
    buffer.extend(steps_of(1, end="terminated"), priority=torch.tensor([0.5]))
    assert buffer.sample(4)["priority_weight"].sort().values.tolist() == [0.25, 0.5, 1.0, 1.0]


def test_priorities_given_before_a_step_can_be_drawn_are_kept_for_it():
    buffer = make(alpha=1.0, beta=1.0, eps=0.0, replacement=False, unroll_steps=1, n_step=0)
    buffer.add(steps_of(1)[0], priority=torch.tensor(4.0))
    buffer.add(steps_of(1, first_obs=1)[0], priority=torch.tensor(1.0))
    buffer.extend(steps_of(1, first_obs=2, end="terminated"))
    weights = buffer.sample(3)
    order = weights["index"].argsort()
    assert weights["priority_weight"][order].tolist() == [0.25, 1.0, 0.25]


def test_priorities_of_steps_that_are_gone_are_ignored_and_counted():
    buffer = filled(num_rows=12, num_episodes=2, alpha=1.0, beta=1.0)
    batch = buffer.sample(30)
    buffer.extend(steps_of(5, end="terminated"))  # in the place of the first episode
    num_gone = int((batch["index"] < 6).sum())
    assert 0 < num_gone < 30
    assert buffer.update_priority(batch["index"], torch.ones(30)) == num_gone
    assert buffer.num_ignored == num_gone
    # A number whose row another step has now: its priority is left alone.
    before = buffer.state_dict()["buffer"]["priorities"]["chances"]
    assert buffer.update_priority(torch.tensor([0, 1]), 50.0) == 2
    assert torch.equal(before, buffer.state_dict()["buffer"]["priorities"]["chances"])


def test_of_two_priorities_for_one_step_the_last_counts():
    buffer = filled(num_episodes=1, alpha=1.0, beta=1.0, eps=0.0, replacement=False)
    buffer.update_priority(torch.tensor([0, 1, 2, 3, 4, 0]), torch.tensor([9.0, 2, 2, 2, 2, 1]))
    batch = buffer.sample(5)
    assert batch["priority_weight"][batch["index"].argsort()].tolist() == [1, 0.5, 0.5, 0.5, 0.5]


def test_without_replacement_the_first_draw_follows_the_priorities():
    options = {"alpha": 1.0, "beta": 0.0, "eps": 0.0, "replacement": False}
    buffer = make(**options, generator=torch.Generator().manual_seed(0))
    buffer.extend(steps_of(3, end="terminated"), priority=torch.tensor([1.0, 2.0, 5.0]))
    batches = torch.stack([buffer.sample(2)["index"] for _ in range(600)])
    assert (batches[:, 0] != batches[:, 1]).all()
    first = batches[:, 0].bincount() / 600
    assert_close(first, torch.tensor([1, 2, 5]) / 8, atol=0.05, rtol=0)
    second = batches[batches[:, 0] == 2, 1].bincount(minlength=3).float()
    assert_close(second / second.sum(), torch.tensor([1 / 3, 2 / 3, 0]), atol=0.07, rtol=0)
    with pytest.raises(ValueError, match="no 4 different steps among 3"):
        buffer.sample(4)


# --------------------------------------------------------------------------- reading and writing


def test_out_is_filled_and_nothing_else():
    buffer = filled(frame_stack=2, generator=torch.Generator().manual_seed(0))
    other = filled(frame_stack=2, generator=torch.Generator().manual_seed(0))
    out = buffer.sample(4)
    addresses = {key: value.data_ptr() for key, value in out.items()}
    assert buffer.sample(4, out=out) is out
    assert {key: value.data_ptr() for key, value in out.items()} == addresses
    other.sample(4)
    expected = other.sample(4)
    for key, value in expected.items():
        assert torch.equal(value, out[key]), key


def test_memory_is_reused_where_that_is_asked_for():
    """The same draws as without, each in the memory of the one before if it is of as many."""
    options = [dict(reuse_memory=reuse, frame_stack=2) for reuse in (True, False)]
    reused, plain = (
        filled(generator=torch.Generator().manual_seed(0), **option) for option in options
    )
    addresses = []
    for size in (4, 4, 4, 5, 5):
        found, expected = reused.sample(size), plain.sample(size)
        for key, value in expected.items():
            assert torch.equal(value, found[key]), key
        addresses.append({key: value.data_ptr() for key, value in found.items()})
        found["obs"] = torch.zeros(size)  # which is not drawn into then
        assert copy.deepcopy(reused).sample(size)["obs"].data_ptr() != addresses[-1]["obs"]
    assert addresses[0] == addresses[1] == addresses[2] and addresses[3] == addresses[4]
    other = make(frame_stack=2, generator=torch.Generator())
    other.extend(steps_of(5, end="terminated").set("more", torch.arange(5)))
    reused.load_state_dict(other.state_dict())
    assert reused.sample(5)["more"].shape == (5, 4)  # a sample of before has no such entry


@pytest.mark.parametrize("options", [dict(prefetch=1), dict(device="cpu")])
def test_memory_is_not_reused_by_samples_that_are_made_ahead_or_moved(options):
    with pytest.raises(ValueError, match="have memory of their own"):
        make(reuse_memory=True, **options)


def test_out_that_can_not_be_filled_is_refused_before_anything_is_drawn():
    rng = torch.Generator().manual_seed(0)
    buffer = filled(frame_stack=2, generator=rng)
    out = buffer.sample(4)
    state = rng.get_state()
    with pytest.raises(ValueError, match="entry 'obs' is not that of a sample.*not a copy"):
        buffer.sample(4, out=out.clone())
    with pytest.raises(ValueError, match="out can't be filled"):
        buffer.sample(5, out=out)
    with pytest.raises(ValueError, match="'discount' is not that of a sample, torch.float32"):
        buffer.sample(4, out=out.copy().set("discount", out["discount"].double()))
    with pytest.raises(KeyError, match="reward"):
        buffer.sample(4, out=out.exclude("reward"))
    assert torch.equal(rng.get_state(), state)


def test_read_gives_windows_of_another_length():
    buffer = filled()
    assert buffer.read(torch.tensor([7, 3]), length=2)["obs"].tolist() == [[11, 12], [3, 4]]
    long = buffer.read(torch.tensor([0]), length=8)
    assert long["obs"].tolist() == [[0, 1, 2, 3, 4, 5, 5, 5]]
    assert long["step_index"].tolist() == [[0, 1, 2, 3, 4, 5, -1, -1]]


def test_read_refuses_what_can_not_be_drawn():
    buffer = filled(num_rows=12)  # the first of three episodes is overwritten
    buffer.extend(steps_of(1))  # and then the second
    assert buffer.contains(torch.tensor([0, 6, 12, 16, 17, 18, 99])).tolist() == [
        False,
        False,
        True,
        True,
        False,
        False,
        False,
    ]
    for wrong in (0, 6, 17, 18, 99, -1):
        with pytest.raises(IndexError, match=f"step {wrong} .and 0 more. can't be read"):
            buffer.read(torch.tensor([12, wrong]))
    with pytest.raises(ValueError, match=r"index has the shape \[B\]"):
        buffer.read(torch.tensor([[12]]))
    with pytest.raises(TypeError, match="numbers are integers, got torch.float32"):
        buffer.read(torch.tensor([12.0]))


def test_update_writes_what_is_known_better_later():
    buffer = make(observation_keys=["obs", "value"], n_step=0)
    steps = steps_of(3, end="terminated", value=torch.zeros(3), policy=torch.zeros(3, 2))
    steps["next", "value"] = torch.zeros(3)
    buffer.extend(steps)
    window = buffer.read(torch.tensor([2, 1]))  # rows 2, closing, padding; rows 1, 2, closing
    assert window["step_index"].tolist() == [[2, 3, -1], [1, 2, 3]]
    better = TensorDict(
        value=torch.tensor([[0.2, 0.3, 0.4], [1.1, 1.2, 1.3]]),
        policy=torch.tensor([[1, 2, 3], [4, 5, 6]])[..., None].expand(2, 3, 2).float(),
        batch_size=[2, 3],
    )
    assert buffer.update(window["step_index"], better) == 0
    window = buffer.read(torch.tensor([0]), length=4)
    assert_close(window["value"], torch.tensor([[0, 1.1, 1.2, 1.3]]))  # the last of two counts
    assert window["policy"][0, :, 0].tolist() == [0, 4, 5, 0]  # a closing row has no policy
    assert window["reward"].tolist() == [[1, 2, 3, 0]]


def test_update_ignores_and_counts_what_is_gone():
    buffer = filled(num_rows=12, num_episodes=2)
    buffer.extend(steps_of(1, first_obs=50))
    entries = TensorDict(reward=torch.tensor([9.0, 8.0, 7.0, 6.0]), batch_size=[4])
    assert buffer.update(torch.tensor([0, 3, 12, -1]), entries) == 2
    assert buffer.num_ignored == 2
    assert buffer.storage.get(0)["reward"] == 7.0  # of item 12, which took its row
    assert buffer.storage.get(3)["reward"] == 4.0


@pytest.mark.parametrize(
    ("index", "entries", "error", "match"),
    [
        ([0], {"rewards": torch.zeros(1)}, KeyError, "entry 'rewards' is not stored; what can be"),
        ([0], {"truncated": torch.ones(1).bool()}, KeyError, "marks where an episode ends"),
        ([0], {"reward": torch.zeros(1, 2)}, ValueError, r"torch.float32 \[2\], and float32\[\]"),
        (
            [0],
            {"action": torch.zeros(1)},
            ValueError,
            r"torch.float32 \[\], and int64\[\] is stored",
        ),
        ([99], {"reward": torch.zeros(1)}, IndexError, "there never was a step 99: 18 rows came"),
        ([-2], {"reward": torch.zeros(1)}, IndexError, "there never was a step -2"),
        ([[0]], {"reward": torch.zeros(1)}, ValueError, r"shape \[1, 1\], and entries .* \[1\]"),
    ],
)
def test_mistakes_in_an_update_change_nothing(index, entries, error, match):
    buffer = filled()
    before = buffer.state_dict()
    right = {"obs": torch.tensor([5])}
    with pytest.raises(error, match=match):
        buffer.update(torch.tensor(index), TensorDict(right | entries, batch_size=[1]))
    assert_same(before, buffer.state_dict())


# ------------------------------------------------------------------------------------ mistakes


def assert_same(a, b):
    assert a.keys() == b.keys()
    for key, value in a.items():
        if isinstance(value, dict):
            assert_same(value, b[key])
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value, b[key]), key
        else:
            assert value == b[key], key


def without(key):
    return lambda steps: steps.exclude(key)


def with_entry(key, value):
    return lambda steps: steps.set(key, value)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (without("terminated"), KeyError, '"terminated" not found'),
        (without("truncated"), KeyError, 'key "truncated" not found.*Did you mean "t'),
        (without("obs"), KeyError, "no entry 'obs', which observation_keys names"),
        (without("next"), KeyError, "there is no entry .'next', 'obs'. of the observation"),
        (without("reward"), ValueError, "entry 'reward' is missing"),
        (with_entry("extra", torch.zeros(3)), ValueError, "entry 'extra' is not stored here"),
        (
            with_entry("terminated", torch.zeros(3)),
            ValueError,
            r"torch.float32 \[\] of each step; it marks whether",
        ),
        (with_entry("reward", torch.zeros(3, 2)), ValueError, "entry 'reward' has rows float32.2."),
        (with_entry("action", torch.zeros(3)), ValueError, "entry 'action' has rows float32"),
        (
            with_entry(("next", "obs"), torch.zeros(3)),
            ValueError,
            "these should have one dtype and shape",
        ),
        (
            with_entry(("next", "obs"), torch.zeros(3, 2).long()),
            ValueError,
            "should have one dtype and shape",
        ),
        (lambda steps: steps.to_dict(), TypeError, "a TensorDict .T. or .T, E., not a dict"),
        (lambda steps: steps[0], ValueError, r"\[T\] or \[T, E\], got \[\]: buffer.add"),
    ],
)
def test_mistakes_in_steps_change_nothing(change, error, match):
    buffer = filled(alpha=0.6, beta=0.4)
    before = buffer.state_dict()
    with pytest.raises(error, match=match):
        buffer.extend(change(steps_of(3, end="terminated")))
    assert_same(before, buffer.state_dict())


def test_next_is_needed_only_where_an_episode_ends():
    buffer = make()
    buffer.extend(steps_of(3).exclude("next"))
    buffer.extend(steps_of(3, first_obs=3, end="terminated"))
    assert len(buffer) == 6


@pytest.mark.parametrize(
    ("env", "match"),
    [
        ([0], r"of 2 environment\(s\), and env=\[0\] names 1"),
        ([0, 1, 2], "names 3"),
        ([1, 1], "different numbers from 0 on are needed"),
        ([0, -1], "different numbers from 0 on"),
    ],
)
def test_mistakes_in_the_numbers_of_environments(env, match):
    buffer = make()
    with pytest.raises(ValueError, match=match):
        buffer.extend(torch.stack([steps_of(3), steps_of(3)], 1), env)
    assert buffer.storage.total == 0


@pytest.mark.parametrize(
    ("priority", "match"),
    [
        (torch.tensor([1.0, float("nan"), 1.0]), "finite and >= 0 .*, got nan"),
        (torch.tensor([1.0, -0.5, 1.0]), "got -0.5; for errors with a sign"),
        (torch.tensor([1.0, float("inf"), 1.0]), "got inf"),
        (torch.ones(2), r"steps \[3\] need as many priorities, got \[2\]"),
    ],
)
def test_mistakes_in_priorities_change_nothing(priority, match):
    buffer = filled(alpha=2.0, beta=0.4)
    before = buffer.state_dict()
    with pytest.raises(ValueError, match=match):
        buffer.extend(steps_of(3), priority=priority)
    with pytest.raises(ValueError, match="finite|needs priorities of that shape"):
        buffer.update_priority(torch.arange(3), priority)
    with pytest.raises(IndexError, match="there never was a step 18"):
        buffer.update_priority(torch.tensor([0, 18]), torch.ones(2))
    assert_same(before, buffer.state_dict())


def test_a_buffer_without_priorities_says_so():
    buffer = filled()
    with pytest.raises(TypeError, match="no priorities; make it with alpha and beta"):
        buffer.update_priority(torch.tensor([0]), torch.ones(1))
    with pytest.raises(TypeError, match="no priorities"):
        buffer.extend(steps_of(3), priority=torch.ones(3))
    with pytest.raises(ValueError, match="there are no weights"):
        buffer.beta = 0.5
    assert buffer.beta is None


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"alpha": 0.6}, "alpha=0.6 and beta=None go together"),
        ({"alpha": -1.0, "beta": 0.4}, "alpha must be finite and >= 0"),
        ({"unroll_steps": -1}, "unroll_steps=-1 and n_step=1 must be at least 0"),
        ({"absorb": "terminated"}, "should be a collection of some of"),
        ({"absorb": ("done",)}, "'terminated', 'truncated'"),
        ({"frame_stack": {"pixels": 4}}, "'pixels': 4 should be one of observation_keys=.'obs'."),
        ({"frame_stack": 0}, "'obs': 0 should be one of"),
        (
            {"frame_stack": 4, "observation_keys": ["obs", "turn"]},
            "Name them: frame_stack={'obs': 4}",
        ),
        ({"batch_size": 0}, "a batch has at least one item"),
    ],
)
def test_mistakes_in_options(options, match):
    with pytest.raises(ValueError, match=match):
        make(**options)


def test_storages_that_do_not_fit():
    with pytest.raises(ValueError, match="needs a storage with a max_size"):
        SegmentReplayBuffer(TensorStorage(), observation_keys=["obs"], unroll_steps=1)
    storage = TensorStorage(10)
    buffer = SegmentReplayBuffer(storage, observation_keys=["obs"], unroll_steps=1)
    buffer.extend(steps_of(3))
    storage.extend(steps_of(3).exclude("next"))
    with pytest.raises(
        RuntimeError, match="6 items were appended .* knows of 3: a storage belongs"
    ):
        buffer.extend(steps_of(3))
    with pytest.raises(ValueError, match="6 environments can end at once, and take 12 rows"):
        make(num_rows=10).add(torch.stack([steps_of(1)[0]] * 6))


def test_names_that_samples_use_are_refused():
    buffer = make()
    with pytest.raises(ValueError, match="yours other than 'mask', such as 'step_mask'"):
        buffer.extend(steps_of(3, mask=torch.ones(3)))
    assert buffer.storage.total == 0


def test_nothing_to_draw_yet():
    buffer = make()
    with pytest.raises(ValueError, match="0 rows came in, and a step needs 3 rows after it"):
        buffer.sample(2)
    buffer.extend(steps_of(3))
    with pytest.raises(ValueError, match="3 rows came in"):
        buffer.sample(2)
    with pytest.raises(ValueError, match="how many segments.*batch_size=256"):
        buffer.sample()


class FullDisk(TensorStorage):
    """It fails at the closing rows."""

    def append(self, structure, leaves):
        if self.total and len(leaves[0]) == 1:
            raise OSError(28, "No space left on device")
        return super().append(structure, leaves)


def test_an_addition_that_fails_half_way_leaves_whole_episodes():
    buffer = SegmentReplayBuffer(FullDisk(30), observation_keys=["obs"], unroll_steps=1)
    buffer.extend(steps_of(3))
    with pytest.raises(OSError, match="No space left"):
        buffer.extend(steps_of(4, first_obs=3, end="terminated"))
    # What came in before is an episode that was cut; numbers go on behind what is in the storage.
    assert drawable(buffer) == [0, 1]
    assert buffer.extend(steps_of(5, first_obs=50)).tolist() == [7, 8, 9, 10, 11]
    assert buffer.read(torch.tensor([7]))["obs"].tolist() == [[50, 51]]


def test_the_entry_of_a_state_is_called_observation_unless_observation_keys_names_others():
    buffer = SegmentReplayBuffer(TensorStorage(30), unroll_steps=1)
    with pytest.raises(
        KeyError, match=r"no entry 'observation', which observation_keys names.*'obs'"
    ):
        buffer.extend(steps_of(4))
    steps = steps_of(4, end="truncated").rename_key_("obs", "observation")
    steps["next"] = TensorDict(observation=steps["next", "obs"], batch_size=[4])
    buffer.extend(steps)
    assert buffer.read(torch.tensor([3]))["observation"].tolist() == [[3, 4]]


# ----------------------------------------------------------------------------- going on later


def play(buffer, seed, num_batches=4):
    """Some training: batches, priorities, new steps; all that was drawn."""
    drawn = []
    for i in range(num_batches):
        batch = buffer.sample(5)
        drawn.append(batch)
        if buffer.beta is not None:
            buffer.update_priority(batch["index"], batch["obs"].sum((1, 2)) % (7 + seed) * 0.1)
        buffer.extend(steps_of(4, end="truncated" if i % 2 else None, first_obs=7 * i))
    return torch.stack(drawn)


@pytest.mark.parametrize("priorities", [{}, {"alpha": 0.6, "beta": 0.4}])
@pytest.mark.parametrize("way", ["state_dict", "folder"])
def test_a_run_that_was_stopped_and_resumed_draws_the_same(priorities, way, tmp_path):
    def new(seed):
        rng = torch.Generator().manual_seed(seed)
        return filled(num_rows=25, num_episodes=0, frame_stack=2, generator=rng, **priorities)

    straight = new(0)
    straight.extend(steps_of(6))
    play(straight, 0)
    if priorities:
        straight.beta = 0.7
    stopped = new(1)
    if way == "state_dict":
        stopped.load_state_dict(straight.state_dict())
    else:
        straight.save(tmp_path / "replay")
        stopped.load(tmp_path / "replay")
    expected, found = play(straight, 1), play(stopped, 1)
    for key, value in expected.items():
        assert torch.equal(value, found[key]), key
    assert len(straight) == len(stopped)


def test_the_same_seed_gives_the_same_samples():
    first, second = filled(alpha=0.6, beta=0.4), filled(alpha=0.6, beta=0.4)
    torch.manual_seed(5)
    expected = first.sample(6)["index"]
    torch.manual_seed(5)
    assert torch.equal(second.sample(6)["index"], expected)


def test_rows_that_a_storage_on_disk_keeps_itself(tmp_path):
    def new(storage):
        return SegmentReplayBuffer(storage, observation_keys=["obs"], unroll_steps=1, frame_stack=2)

    with MemmapStorage(20, tmp_path / "rows") as storage:
        buffer = new(storage)
        for i in range(3):
            buffer.extend(steps_of(3, end="terminated", first_obs=10 * i))
        buffer.extend(steps_of(4, first_obs=50))
        buffer.save(tmp_path / "buffer", rows=False)
        expected, state = drawable(buffer), buffer.state_dict()
    assert not any("storage" in path.name for path in (tmp_path / "buffer").iterdir())
    with MemmapStorage.open(tmp_path / "rows") as storage:
        buffer = new(storage)
        with pytest.raises(RuntimeError, match=r"needs buffer.load\(folder\) first"):
            buffer.extend(steps_of(3))
        buffer.load(tmp_path / "buffer")
        assert_same(buffer.state_dict(), state)
        assert drawable(buffer) == expected
        # Steps that came after the save: they are lost, and what they overwrote.
        buffer.extend(steps_of(5, first_obs=54))
        buffer.extend(steps_of(1, first_obs=59, end="terminated"))
    with MemmapStorage.open(tmp_path / "rows") as storage:
        buffer = new(storage)
        buffer.load(tmp_path / "buffer")
        assert buffer.num_episodes == 3
        assert drawable(buffer) == [4, 5, 6, 8, 9, 10, 12, 13, 14]
        window = buffer.read(torch.tensor([14]))
        assert window["obs"].tolist() == [[[51, 52], [52, 53]]]
        assert window["truncated"].tolist() == [[True, True]]
        assert buffer.extend(steps_of(1)).tolist() == [23]
    other = SegmentReplayBuffer(
        TensorStorage(20), observation_keys=["obs"], unroll_steps=1, frame_stack=2
    )
    with pytest.raises(ValueError, match="to this storage 0 were appended"):
        other.load(tmp_path / "buffer")
    with pytest.raises(ValueError, match="keeps its rows in memory only"):
        other.save(tmp_path / "other", rows=False)


def test_a_buffer_on_disk_that_was_killed_before_its_first_save_can_start_over(tmp_path):
    with MemmapStorage(20, tmp_path / "rows") as storage:
        SegmentReplayBuffer(storage, observation_keys=["obs"], unroll_steps=1).extend(steps_of(4))
    with MemmapStorage.open(tmp_path / "rows") as storage:
        buffer = SegmentReplayBuffer(storage, observation_keys=["obs"], unroll_steps=1)
        with pytest.raises(RuntimeError, match=r"if there was none.*buffer.empty\(\) starts over"):
            buffer.extend(steps_of(3, end="terminated"))
        assert storage.total == 4
        buffer.empty()
        assert buffer.extend(steps_of(3, end="terminated")).tolist() == [0, 1, 2]
        assert drawable(buffer) == [0, 1, 2]


def test_windows_of_damaged_rows_are_refused(tmp_path):
    with MemmapStorage(20, tmp_path / "rows") as storage:
        buffer = SegmentReplayBuffer(storage, observation_keys=["obs"], unroll_steps=1)
        buffer.extend(steps_of(6, end="terminated"))
        buffer.save(tmp_path / "saved", rows=False)
    path = tmp_path / "rows" / "leaf-0.bin"
    data = bytearray(path.read_bytes())
    data[4 * len(data) // 20] ^= 1  # of row 4
    path.write_bytes(data)
    with MemmapStorage.open(tmp_path / "rows") as storage:
        buffer = SegmentReplayBuffer(storage, observation_keys=["obs"], unroll_steps=1)
        buffer.load(tmp_path / "saved")
        assert buffer.read(torch.tensor([1]))["obs"].tolist() == [[1, 2]]
        with pytest.raises(DamagedFileError, match=r"rows \[4\]"):
            buffer.read(torch.tensor([1, 3]))
        with pytest.raises(DamagedFileError, match=r"rows \[4\]"):
            buffer.sample(100)


def test_episodes_of_which_the_storage_lost_rows_are_lost(tmp_path):
    with MemmapStorage(30, tmp_path / "rows") as storage:
        buffer = SegmentReplayBuffer(
            storage, observation_keys=["obs"], unroll_steps=1, alpha=0.6, beta=0.4
        )
        for i in range(2):
            buffer.extend(steps_of(3, end="terminated", first_obs=10 * i))
        buffer.extend(steps_of(4), env=1)
        buffer.extend(steps_of(4), env=0)
        buffer.save(tmp_path / "buffer", rows=False)
        storage.erase(torch.tensor([1, 9]))  # as a loss of power does to rows not yet flushed
        buffer.load(tmp_path / "buffer")
        assert drawable(buffer) == [4, 5, 6, 12, 13, 14]
        buffer.extend(steps_of(2, first_obs=50), env=1)  # a new episode, as the old one is lost
        assert drawable(buffer) == [4, 5, 6, 12, 13, 14, 16]
        assert buffer.num_episodes == 3


def test_a_storage_on_disk_that_was_closed_says_so(tmp_path):
    with MemmapStorage(20, tmp_path / "rows") as storage:
        buffer = SegmentReplayBuffer(storage, observation_keys=["obs"], unroll_steps=1)
        buffer.extend(steps_of(3))
    with pytest.raises(RuntimeError, match="closed"):
        buffer.sample(2)
    with pytest.raises(RuntimeError, match="closed"):
        buffer.extend(steps_of(3))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"unroll_steps": 4}, "segments look 3 ahead and 0 back, here it is 100, 5 and 0"),
        ({"frame_stack": 2}, "here it is 100, 3 and 1"),
        ({"num_rows": 50}, "here it is 50, 3 and 0"),
        ({"alpha": None, "beta": None}, "alpha=0.6, this one has alpha=None"),
        ({"alpha": 0.7}, "alpha=0.6, this one has alpha=0.7"),
        ({"generator": torch.Generator()}, "the buffer has a generator and the state has none"),
    ],
)
def test_a_state_of_a_buffer_that_was_made_another_way_is_refused(options, match, tmp_path):
    saved = filled(alpha=0.6, beta=0.4)
    saved.save(tmp_path / "replay")
    other = filled(**{"alpha": 0.6, "beta": 0.4, "num_episodes": 1} | options)
    before = other.state_dict()
    with pytest.raises(ValueError, match=match):
        other.load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match=match):
        other.load(tmp_path / "replay")
    assert_same(before, other.state_dict())


def test_a_damaged_file_is_refused(tmp_path):
    buffer = filled()
    buffer.save(tmp_path / "replay")
    path = next(path for path in (tmp_path / "replay").iterdir() if "buffer" in path.name)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    before = buffer.state_dict()
    with pytest.raises(DamagedFileError):
        buffer.load(tmp_path / "replay")
    assert_same(before, buffer.state_dict())


def test_empty_forgets_all():
    buffer = filled(alpha=0.6, beta=0.4)
    buffer.extend(steps_of(2))
    buffer.empty()
    assert (len(buffer), buffer.num_episodes, len(buffer.storage)) == (0, 0, 0)
    assert buffer.extend(steps_of(4, end="terminated")).tolist() == [0, 1, 2, 3]
    assert drawable(buffer) == [0, 1, 2, 3]


# ------------------------------------------------------------------------- threads and devices


def test_batches_drawn_ahead_are_those_drawn_without():
    def new(prefetch):
        rng = torch.Generator().manual_seed(0)
        options = {"alpha": 0.6, "beta": 0.4, "frame_stack": 2}
        return filled(**options, num_rows=30, prefetch=prefetch, generator=rng, batch_size=3)

    plain, ahead = new(0), new(2)
    for i in range(12):
        expected, found = plain.sample(), ahead.sample()
        for key, value in expected.items():
            assert torch.equal(value, found[key]), key
        if i % 3 == 2:
            for buffer in (plain, ahead):
                buffer.update_priority(expected["index"], expected["obs"][:, 0, 0] + 0.5)
                buffer.extend(steps_of(4, end="terminated", first_obs=7 * i))
    out = ahead.sample()
    expected = plain.sample(), plain.sample()
    assert torch.equal(out["obs"], expected[0]["obs"])
    assert torch.equal(ahead.sample(out=out)["obs"], expected[1]["obs"])
    assert torch.equal(next(iter(ahead))["index"], next(iter(plain))["index"])
    time.sleep(0.05)  # the thread draws ahead, which the state doesn't show
    assert_same(plain.state_dict(), ahead.state_dict())


def test_windows_are_whole_while_another_thread_adds_steps():
    buffer = filled(num_rows=60, unroll_steps=4)
    stop, failed = threading.Event(), []

    def add():
        first = 100
        while not stop.is_set():
            buffer.extend(steps_of(5, end="terminated", first_obs=first))
            first += 10

    thread = threading.Thread(target=add)
    thread.start()
    try:
        for _ in range(100):
            batch = buffer.sample(16)
            start, length = batch["obs"][:, :1], batch["valid"].sum(1, keepdim=True)
            expected = start + torch.arange(6).clamp(max=length - 1)
            failed.append(not torch.equal(batch["obs"], expected))
    finally:
        stop.set()
        thread.join()
    assert not any(failed)


@pytest.mark.gpu
@pytest.mark.parametrize("stored_on", ["cpu", "cuda"])
@pytest.mark.parametrize("pin_memory", [False, True])
def test_samples_on_a_gpu_are_those_on_the_cpu(stored_on, pin_memory):
    def new(storage, **options):
        sizes = {"observation_keys": ["obs"], "unroll_steps": 2, "n_step": 1, "frame_stack": 3}
        rng = torch.Generator().manual_seed(0)
        buffer = SegmentReplayBuffer(storage, generator=rng, **sizes, **options)
        buffer.extend(steps_of(9, end="terminated", shape=(2,)))
        return buffer

    plain = new(TensorStorage(50))
    there = new(TensorStorage(50, device=stored_on), device="cuda", pin_memory=pin_memory)
    out = None
    for _ in range(3):
        expected, out = plain.sample(4), there.sample(4, out=out)
        for key, value in expected.items():
            assert out[key].device.type == "cuda"
            assert torch.equal(value, out[key].cpu()), key


# ------------------------------------------------------------------- flags and rewards under "next"

UNDER_NEXT = {"terminated_key": ("next", "terminated"), "truncated_key": ("next", "truncated")}


def under_next(steps):
    """The same steps, with what they led to under "next"."""
    led_to = {("next", key): steps[key] for key in ("reward", "terminated", "truncated")}
    found = steps.exclude("reward", "terminated", "truncated")
    for key, value in led_to.items():
        found.set(key, value)
    return found


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_flags_under_next_give_the_same_windows(end):
    here, there = make(8, frame_stack=2), make(8, frame_stack=2, **UNDER_NEXT)
    calls = [steps_of(3), steps_of(2, end=end, first_obs=3), steps_of(4, first_obs=20)]
    for i, steps in enumerate(calls):
        moved = under_next(steps)
        if i == 0:  # what is seen after a step is needed where an episode ends only
            moved = moved.exclude(("next", "obs"))
        assert_close(there.extend(moved), here.extend(steps))
        assert drawable(there) == drawable(here)
        if len(here):
            index = torch.tensor(drawable(here))
            expected, found = here.read(index), there.read(index)
            assert set(found["next"].keys()) == {"reward", "terminated", "truncated"}
            for key in ("obs", "action", "valid", "valid_step", "mask", "discount", "step_index"):
                assert_close(found[key], expected[key])
            for key in ("reward", "terminated", "truncated"):
                assert_close(found["next", key], expected[key])
    assert there.cut() == here.cut() == 1
    index = torch.tensor(drawable(here))
    expected, found = here.read(index), there.read(index)
    assert_close(found["next", "truncated"], expected["truncated"])
    assert_close(found["next", "reward"], expected["reward"])
    again = there.sample(4)
    assert there.sample(4, out=again) is again


def test_flags_under_next_of_several_environments_with_a_trailing_one():
    buffer = make(observation_keys=[("seen", "pixels")], **UNDER_NEXT)
    obs = torch.arange(6.0).view(3, 2, 1)
    ends = torch.tensor([[False, False], [False, True], [False, False]]).unsqueeze(-1)
    led_to = TensorDict(
        seen=TensorDict(pixels=obs + 10, batch_size=[3, 2, 1]),
        reward=obs * 2,
        terminated=ends,
        truncated=torch.zeros_like(ends),
        batch_size=[3, 2, 1],
    )
    steps = TensorDict({"seen": {"pixels": obs}, "next": led_to}, batch_size=[3, 2])
    assert buffer.extend(steps).tolist() == [[0, 1], [2, 3], [4, 5]]
    window = buffer.read(torch.tensor([1]), length=4)
    assert window["seen", "pixels"].flatten().tolist() == [1, 3, 13, 13]
    assert window["next", "reward"].flatten().tolist() == [2, 6, 0, 0]
    assert window["next", "terminated"].flatten().tolist() == [False, True, True, True]
    assert window["discount"].tolist() == [[1, 0, 0, 0]]
    rewards = TensorDict({"next": {"reward": torch.full((1, 1), 7.0)}}, batch_size=[1])
    assert buffer.update(torch.tensor([3]), rewards) == 0
    assert buffer.read(torch.tensor([3]))["next", "reward"][0, 0].item() == 7
    with pytest.raises(KeyError, match="marks where an episode ends"):
        buffer.update(torch.tensor([3]), TensorDict({"next": {"terminated": ends[0, :1]}}, [1]))


def test_observations_are_not_named_under_next():
    with pytest.raises(ValueError, match="before an action"):
        make(observation_keys=[("next", "obs")])


# ------------------------------------------------------------------- environments of any numbers


def test_numbers_of_environments_may_be_large_and_sparse():
    sparse, dense = make(12, frame_stack=2), make(12, frame_stack=2)
    names = torch.tensor([10**12, 7, 10**9, 2**63 - 1])
    order = [[0], [2], [1, 0], [3], [2, 3, 1, 0], [1], [0, 2], [3, 0]]
    for i, envs in enumerate(order):
        steps = steps_of(2, first_obs=10 * i, end="truncated" if i in (3, 6) else None)
        both = torch.stack([steps] * len(envs), 1)
        assert_close(sparse.extend(both, env=names[envs]), dense.extend(both, env=envs))
        assert drawable(sparse) == drawable(dense)
        assert sparse.num_episodes == dense.num_episodes
        index = torch.tensor(drawable(dense), dtype=torch.int64)
        if len(index):
            assert_close(sparse.read(index).to_dict(), dense.read(index).to_dict())
        if i == 4:
            assert sparse.cut(env=10**9) == dense.cut(env=2) == 1
            other = make(12, frame_stack=2)
            other.load_state_dict(sparse.state_dict())
            sparse = other
    assert sparse.cut() == dense.cut()


def test_numbers_of_environments_may_have_strides():
    buffer = make()
    both = torch.stack([steps_of(2)] * 2, 1)
    for _ in range(2):
        buffer.extend(both, env=torch.arange(4)[::2])
    assert buffer.num_episodes == 2


@pytest.mark.parametrize("env", ["a", 1.5, 2**63, [[None]]])
def test_an_environment_that_is_no_number_is_refused(env):
    buffer = make()
    for call in (lambda: buffer.extend(steps_of(2), env=env), lambda: buffer.cut(env=env)):
        with pytest.raises(TypeError, match="environments are named by integers"):
            call()
    assert buffer.storage.total == 0


# ------------------------------------------------------------------- what does not fit


def test_a_window_longer_than_the_ring_is_refused():
    make(6, unroll_steps=3, n_step=2)
    with pytest.raises(ValueError, match=r"= 7 rows does not fit .*max_size=6"):
        make(6, unroll_steps=4, n_step=2)


@pytest.mark.parametrize("name", ["unroll_steps", "n_step"])
def test_half_steps_are_refused(name):
    with pytest.raises(TypeError, match=f"{name}=2.0"):
        make(**{name: 2.0})


@pytest.mark.parametrize(
    ("path", "lacks"),
    [
        ((), ["buffer", "storage"]),
        (("buffer",), ["episodes", "priorities"]),
        (("buffer", "episodes"), ["window", "env"]),
        (("buffer", "priorities"), ["chances"]),
    ],
)
def test_a_state_that_lacks_something_is_refused(path, lacks):
    buffer = filled()
    before = buffer.state_dict()
    state = filled(num_episodes=2).state_dict()
    part = state
    for name in path:
        part = part[name]
    for name in lacks:
        del part[name]
    with pytest.raises(ValueError, match=f"lacks .*{lacks[0]}"):
        buffer.load_state_dict(state)
    assert_close(buffer.state_dict()["buffer"], before["buffer"])
    assert buffer.storage.total == before["buffer"]["episodes"]["total"]


DAMAGE = {  # entry of the episodes' state -> what is wrong in it
    "preceding": lambda x: x.fill_(10**6),
    "following": lambda x: x.copy_(x.flip(0)),
    "episode": lambda x: x.add_(1),
    "owner": lambda x: x.fill_(3),
    "kind": lambda x: x.fill_(9),
    "drawable": lambda x: x.resize_(2),
    "last": lambda x: x.fill_(10**6),
    "name": lambda x: x.sub_(1),
    "num_waiting": lambda x: x.fill_(100),
    "waiting": lambda x: x.fill_(-1),
    "num_ended": lambda x: x.fill_(10**6),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_links_that_form_no_episodes_are_refused(name):
    buffer = filled()
    buffer.extend(steps_of(3))  # an episode that goes on
    before, state = buffer.state_dict(), buffer.state_dict()
    DAMAGE[name](state["buffer"]["episodes"][name])
    with pytest.raises(ValueError, match="links between rows do not form episodes"):
        buffer.load_state_dict(state)
    assert_close(buffer.state_dict()["buffer"], before["buffer"])
    buffer.load_state_dict(before)


def test_an_empty_buffer_is_not_false():
    buffer = make()
    assert (buffer or make()) is buffer
