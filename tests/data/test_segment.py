"""SegmentReplayBuffer: content of windows, draws, errors, and resuming.

Any operations in any order, against lists of episodes, are in test_segment_properties.py.
"""

import copy
import functools
import itertools
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from torch.testing import assert_close

from raffia import TensorDict
from raffia.data.memmap_storage import MemmapStorage
from raffia.data.row_feed import RowMirror
from raffia.data.segment import SegmentReplayBuffer
from raffia.data.storage import TensorStorage
from raffia.tensordict.memmap import DamagedFileError

BY_PRIORITY = {"alpha": 0.6, "beta": 0.4}


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def steps_of(num_steps, *, end=None, first_obs=0, shape=()):
    """Steps [T] of one environment, whose observations count up; `end` comes with the last one."""
    last = torch.arange(num_steps) == num_steps - 1
    obs = torch.arange(first_obs, first_obs + num_steps + 1)
    obs = obs.view(-1, *[1] * len(shape)).expand(-1, *shape)
    return TensorDict(
        obs=obs[:-1],
        action=torch.arange(1, num_steps + 1),
        reward=torch.arange(1.0, num_steps + 1),
        terminated=last & (end == "terminated"),
        truncated=last & (end == "truncated"),
        next={"obs": obs[1:]},
        batch_size=[num_steps],
    )


def make(num_rows=100, storage=None, **options):
    options = {"unroll_steps": 2, "n_step": 1, "observation_keys": ["obs"]} | options
    return SegmentReplayBuffer(storage or TensorStorage(num_rows), **options)


def filled(num_rows=100, num_episodes=3, num_steps=5, **options):
    buffer = make(num_rows, **options)
    for i in range(num_episodes):
        buffer.extend(steps_of(num_steps, end="terminated", first_obs=10 * i))
    return buffer


def drawable(buffer):
    """The numbers of all steps that can be drawn, in the order of draws."""
    every = torch.arange(buffer.storage.total)
    found = every[buffer.contains(every)].tolist()
    if found:
        assert buffer.sample(50 * len(found))["index"].unique().tolist() == found
    assert len(buffer) == len(found)
    return found


def same_samples(found, expected):
    assert found.keys() == expected.keys()
    return all(torch.equal(found[key], expected[key]) for key in expected.keys(True, True))


def same_states(a, b):
    assert a.keys() == b.keys()
    for key, value in a.items():
        if isinstance(value, dict):
            same_states(value, b[key])
        else:
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(b[key])), key
    return True


# -------------------------------------------------------------------------- content of windows


def test_windows_of_two_interleaved_environments_worked_by_hand():
    """Environment 0: three steps to a termination; environment 1: a truncation after two steps.

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
            next={"obs": torch.tensor([[0, 0], [0, 52], [13, 0], [0, 0]], dtype=torch.uint8)},
            batch_size=[4, 2],
        )
    )
    assert numbers.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert drawable(buffer) == [0, 1, 2, 3, 4]  # 5, 6 and 7 wait for later steps

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
    assert window.batch_size == (2,) and "next" not in window.keys()


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


@pytest.mark.parametrize("end", [None, "terminated", "truncated"])
def test_windows_of_any_length_end_at_the_last_known_step(end):
    buffer = make(unroll_steps=1, n_step=0)
    buffer.extend(steps_of(5, end=end))
    for length in range(1, 9):
        if end is None and length > 5 - 2:  # from step 2 on only the steps 2, 3 and 4 are known
            with pytest.raises(IndexError, match=f"length={length}: .* length=3 can be read"):
                buffer.read(torch.tensor([0, 2]), length=length)
            if length <= 5:
                assert buffer.read(torch.tensor([0]), length=length)["valid"].all()
            continue
        window = buffer.read(torch.tensor([0, 2]), length=length)
        for i, start in enumerate((0, 2)):
            assert window["valid"][i].sum() == min(length, 5 + (end is not None) - start)
            assert window["reward"][i].count_nonzero() == min(length, 5 - start)


# --------------------------------------------------------------------------- reading and writing


def test_memory_is_reused_on_request():
    """The same draws as without, each in the memory of the previous one if it has the same size."""
    reused, plain = (
        filled(generator=rng(), reuse_memory=reuse, frame_stack=2) for reuse in (True, False)
    )
    addresses = []
    for size in (4, 4, 4, 5, 5):
        found = reused.sample(size)
        assert same_samples(found, plain.sample(size))
        addresses.append({key: value.data_ptr() for key, value in found.items()})
        assert copy.deepcopy(reused).sample(size)["obs"].data_ptr() != addresses[-1]["obs"]
    assert addresses[0] == addresses[1] == addresses[2] and addresses[3] == addresses[4]
    other = make(frame_stack=2, generator=rng())
    other.extend(steps_of(5, end="terminated").set("more", torch.arange(5)))
    reused.load_state_dict(other.state_dict())
    assert reused.sample(5)["more"].shape == (5, 4)  # a sample of before has no such entry


def test_out_is_filled_or_refused_before_anything_is_drawn():
    generator = rng()
    buffer, other = (filled(frame_stack=2, generator=g) for g in (generator, rng()))
    out = buffer.sample(4)
    addresses = {key: value.data_ptr() for key, value in out.items()}
    assert buffer.sample(4, out=out) is out
    assert {key: value.data_ptr() for key, value in out.items()} == addresses
    other.sample(4)
    assert same_samples(out, other.sample(4))
    state = generator.get_state()
    double = out.copy().set("discount", out["discount"].double())
    for n, wrong, error, match in [
        (4, out.clone(), ValueError, "entry 'obs' must be as in a sample.*not a copy"),
        (5, out, ValueError, "out cannot be filled"),
        (4, double, ValueError, "'discount' must be as in a sample, torch.float32"),
        (4, out.exclude("reward"), KeyError, "reward"),
    ]:
        with pytest.raises(error, match=match):
            buffer.sample(n, out=wrong)
    assert torch.equal(generator.get_state(), state)


# ------------------------------------------------------------------------------------ mistakes


def update(index, **entries):
    td = TensorDict({"obs": torch.tensor([5])} | entries, batch_size=[1])
    return lambda buffer: buffer.update(torch.tensor(index), td)


def extend(change, *args, **options):
    return lambda buffer: buffer.extend(change(steps_of(3, end="terminated")), *args, **options)


def with_entry(key, value):
    return extend(lambda steps: steps.set(key, value))


def without(key):
    return extend(lambda steps: steps.exclude(key))


def with_pixels():
    def instead(steps):
        pixels = steps.select("obs").rename_key_("obs", "pixels")
        return steps.exclude("obs").update(pixels).set("next", pixels)

    return extend(instead)


def env(*numbers):
    return extend(lambda steps: torch.stack([steps, steps], 1), list(numbers))


def read(*numbers):
    return lambda buffer: buffer.read(torch.tensor(numbers))


def priority(*values):
    return extend(lambda steps: steps, priority=torch.tensor(values))


def better(*numbers):
    return lambda buffer: buffer.update_priority(torch.tensor([0, *numbers]), torch.ones(2))


NAN = float("nan")
X = torch.zeros(1)
ENV = "must name environments by integers"
MISTAKES = {
    "rewards": (update([0], rewards=X), KeyError, "entry 'rewards' is not in the storage; entries"),
    "an end": (update([0], truncated=X.bool()), KeyError, "marks where an episode ends"),
    "a shape": (update([0], reward=X[None]), ValueError, r"torch.float32 \[1\], but float32\[\]"),
    "no such step": (update([99], reward=X), IndexError, "is no step 99: only 18 rows have"),
    "a matrix": (update([[0]], reward=X), ValueError, r"shape \[1, 1\], but entries .* \[1\]"),
    "no terminated": (without("terminated"), KeyError, '"terminated" not found'),
    "no obs": (without("obs"), KeyError, "no entry 'obs', which observation_keys names"),
    "another obs": (with_pixels(), KeyError, r"keys=\['pixels'\]\) names the observation"),
    "no next": (without("next"), KeyError, "no entry .'next', 'obs'. with the observation"),
    "no reward": (without("reward"), ValueError, "entry 'reward' is missing"),
    "extra": (with_entry("extra", torch.zeros(3)), ValueError, "entry 'extra' is not stored here"),
    "mask": (with_entry("mask", torch.ones(3)), ValueError, "rename your 'mask', for example to"),
    "float flag": (with_entry("terminated", torch.zeros(3)), ValueError, r"torch.float32 \[\] for"),
    "reward's shape": (with_entry("reward", torch.zeros(3, 2)), ValueError, "rows float32.2."),
    "next's dtype": (with_entry(("next", "obs"), torch.zeros(3)), ValueError, "they must have the"),
    "dict": (extend(lambda steps: steps.to_dict()), TypeError, "a TensorDict .T. or .T, E.; got"),
    "one step": (extend(lambda steps: steps[0]), ValueError, r"\[T, E\]; got \[\]: .* call"),
    "one of two": (env(0), ValueError, r"from 2 environment\(s\), but env=\[0\] names 1"),
    "twice": (env(1, 1), ValueError, "must be different numbers of 0 or more"),
    "env of 1.5": (extend(lambda steps: steps, 1.5), TypeError, ENV),
    "env of 2**63": (extend(lambda steps: steps, 2**63), TypeError, ENV),
    "env of None": (extend(lambda steps: steps, [[None]]), TypeError, ENV),
    "cut": (lambda buffer: buffer.cut(env="a"), TypeError, ENV),
    "nan": (priority(1.0, NAN, 1.0), ValueError, "finite and >= 0 .*; got nan"),
    "a sign": (priority(1.0, -0.5, 1.0), ValueError, "got -0.5. For errors with a sign"),
    "two": (priority(1.0, 1.0), ValueError, r"steps \[3\] need priorities of the same shape; got"),
    "update 18": (better(18), IndexError, "there is no step 18"),
    "update shape": (better(0, 1, 2), ValueError, "needs priorities of that shape"),
    **{
        f"read {n}": (read(12, n), IndexError, f"step {n} .and 0 more. cannot be read")
        for n in (5, 17, 18, 99, -1)
    },
    "read a matrix": (read([12]), ValueError, r"index must have shape \[B\]"),
    "read floats": (read(12.0), TypeError, "numbers must be integers; got torch.float32"),
    "how many": (lambda b: b.sample(), ValueError, "number of segments to draw is"),
}


def test_one_step_of_priority_0_leaves_the_weights_of_the_others():
    buffer = filled(**BY_PRIORITY)
    buffer.update_priority(torch.tensor([0]), 0.0)
    assert buffer.sample(9)["priority_weight"].tolist() == [1.0] * 9


@pytest.mark.parametrize("kind", MISTAKES)
def test_invalid_calls_change_nothing(kind):
    buffer = filled(**BY_PRIORITY)
    before, (call, error, match) = buffer.state_dict(), MISTAKES[kind]
    with pytest.raises(error, match=match):
        call(buffer)
    assert same_states(before, buffer.state_dict())


REFUSED = [
    ({"alpha": 0.6}, ValueError, "alpha=0.6 and beta=None must be given together"),
    ({"alpha": -1.0, "beta": 0.4}, ValueError, "alpha must be finite and >= 0"),
    ({**BY_PRIORITY, "importance": "all"}, ValueError, "importance='all' must be one of 'buffer',"),
    ({"unroll_steps": -1}, ValueError, "unroll_steps=-1 must be at least 0"),
    ({"n_step": 2.0}, TypeError, "n_step=2.0"),
    ({"num_rows": 6, "unroll_steps": 4, "n_step": 2}, ValueError, "= 7 rows does not fit .*size=6"),
    ({"absorb": "terminated"}, ValueError, "must be a collection of some of"),
    ({"absorb": ("done",)}, ValueError, "'terminated', 'truncated'"),
    ({"frame_stack": {"pixels": 4}}, ValueError, "'pixels': 4 must be one of observation_keys="),
    (
        {"frame_stack": 4, "observation_keys": ["obs", "turn"]},
        ValueError,
        "pass frame_stack={'obs': 4}",
    ),
    ({"observation_keys": [("next", "obs")]}, ValueError, "before an action"),
    ({"batch_size": 0}, ValueError, "batch_size=0 must be at least 1"),
    ({"reuse_memory": True, "prefetch": 1}, ValueError, "need their own memory"),
    ({"reuse_memory": True, "device": "cpu"}, ValueError, "need their own memory"),
    ({"num_rows": None}, ValueError, "its storage needs a max_size"),
    ({"num_rows": True}, TypeError, "max_size=True must be a whole number"),
    ({"storage": 100}, TypeError, "such as TensorStorage"),
    ({"observation_keys": "obs"}, TypeError, "a list or a tuple of keys"),
]


def test_invalid_options_are_refused():
    for options, error, match in REFUSED:
        with pytest.raises(error, match=match):
            make(**options)


def test_other_invalid_calls_are_refused():
    buffer, empty, few = filled(), make(), filled(replacement=False, **BY_PRIORITY)
    six = torch.stack([steps_of(1)[0]] * 6)
    index, ones = torch.tensor([0]), torch.ones(3)
    for call, error, match in [
        (lambda: buffer.update_priority(index, 1.0), TypeError, "no priorities; create it with al"),
        (lambda: buffer.extend(steps_of(3), priority=ones), TypeError, "no priorities"),
        (lambda: setattr(buffer, "beta", 0.5), ValueError, "so samples have no weights"),
        (lambda: few.sample(19), ValueError, "19 different steps cannot be .* 15.*replacement=Tr"),
        (lambda: make(num_rows=10).add(six), ValueError, "6 environments can .* takes 12 rows"),
        (lambda: empty.sample(2), ValueError, "0 rows have been added, and a step needs 3 rows"),
    ]:
        with pytest.raises(error, match=match):
            call()
    assert buffer.beta is None and (empty or make()) is empty
    empty.extend(steps_of(3))
    with pytest.raises(ValueError, match="3 rows have been added"):
        empty.sample(2)
    buffer.storage.extend(steps_of(3).exclude("next"))
    with pytest.raises(RuntimeError, match="21 items have been appended .* knows of 18: a storage"):
        buffer.extend(steps_of(3))


class FullDisk(TensorStorage):
    """A storage that fails at the closing rows."""

    def append(self, structure, leaves):
        if self.total and len(leaves[0]) == 1:
            raise OSError(28, "No space left on device")
        return super().append(structure, leaves)


def test_a_failed_addition_leaves_complete_episodes():
    buffer = make(storage=FullDisk(30), unroll_steps=1, n_step=0)
    buffer.extend(steps_of(3))
    with pytest.raises(OSError, match="No space left"):
        buffer.extend(steps_of(4, first_obs=3, end="terminated"))
    # The steps added before form a truncated episode; numbers continue behind the storage's.
    assert drawable(buffer) == [0, 1]
    assert buffer.extend(steps_of(5, first_obs=50)).tolist() == [7, 8, 9, 10, 11]
    assert buffer.read(torch.tensor([7]))["obs"].tolist() == [[50, 51]]


# ------------------------------------------------------------------------------------ resuming


def play(buffer, seed, num_batches=4):
    """Some training: batches, priorities, new steps; returns the batches."""
    drawn = []
    for i in range(num_batches):
        batch = buffer.sample(5)
        drawn.append(batch)
        if buffer.beta is not None:
            buffer.update_priority(batch["index"], batch["obs"].sum((1, 2)) % (7 + seed) * 0.1)
        buffer.extend(steps_of(4, end="truncated" if i % 2 else None, first_obs=7 * i))
    return torch.stack(drawn)


@pytest.mark.parametrize("priorities", [{}, BY_PRIORITY])
@pytest.mark.parametrize("way", ["state_dict", "folder", "seed"])
def test_a_run_that_was_stopped_and_resumed_draws_the_same(priorities, way, tmp_path):
    def new(seed):
        generator = None if way == "seed" else rng(seed)
        options = {"frame_stack": 2, "generator": generator, **priorities}
        return filled(num_rows=25, num_episodes=0, **options)

    straight = new(0)
    straight.extend(steps_of(6))
    play(straight, 0)
    if priorities:
        straight.beta = 0.7
    stopped = new(1)
    if way == "folder":
        straight.save(tmp_path / "replay")
        stopped.load(tmp_path / "replay")
    else:
        stopped.load_state_dict(straight.state_dict())
    torch.manual_seed(5)
    expected = play(straight, 1)
    torch.manual_seed(5)
    assert same_samples(play(stopped, 1), expected) and len(straight) == len(stopped)


def on_disk(storage, **options):
    return make(storage=storage, unroll_steps=1, n_step=0, **options)


def test_a_storage_on_disk_keeps_its_rows_itself(tmp_path):
    rows, saved = tmp_path / "rows", tmp_path / "buffer"

    @contextmanager
    def reopened():
        with MemmapStorage.open(rows) as storage:
            yield on_disk(storage, frame_stack=2)

    with MemmapStorage(20, rows) as storage:
        buffer = on_disk(storage, frame_stack=2)
        for i in range(3):
            buffer.extend(steps_of(3, end="terminated", first_obs=10 * i))
        buffer.extend(steps_of(4, first_obs=50))
        buffer.save(saved, rows=False)
        expected, state = drawable(buffer), buffer.state_dict()
    assert not any("storage" in path.name for path in saved.iterdir())
    for call in (lambda: buffer.sample(2), lambda: buffer.extend(steps_of(3))):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    with reopened() as buffer:
        with pytest.raises(RuntimeError, match=r"call buffer.load\(folder\) first"):
            buffer.extend(steps_of(3))
        buffer.load(saved)
        assert same_states(buffer.state_dict(), state) and drawable(buffer) == expected
        # Steps added after the save are lost, and so are the rows they overwrote.
        buffer.extend(steps_of(5, first_obs=54))
        buffer.extend(steps_of(1, first_obs=59, end="terminated"))
    with reopened() as buffer:
        buffer.load(saved)
        assert buffer.num_episodes == 3
        assert drawable(buffer) == [4, 5, 6, 8, 9, 10, 12, 13, 14]
        window = buffer.read(torch.tensor([14]))
        assert window["obs"].tolist() == [[[51, 52], [52, 53]]]
        assert window["truncated"].tolist() == [[True, True]]
        assert buffer.extend(steps_of(1)).tolist() == [23]
    with reopened() as buffer:  # killed before a first save
        with pytest.raises(RuntimeError, match=r"never saved, start over with buffer.empty\(\)"):
            buffer.extend(steps_of(3, end="terminated"))
        assert buffer.storage.total == 24
        buffer.empty()
        assert buffer.extend(steps_of(3, end="terminated")).tolist() == [0, 1, 2]
    other = on_disk(TensorStorage(20), frame_stack=2)
    with pytest.raises(ValueError, match="0 have been appended to this storage"):
        other.load(saved)
    with pytest.raises(ValueError, match="holds its rows in memory only"):
        other.save(tmp_path / "other", rows=False)


def test_damaged_and_lost_rows(tmp_path):
    with MemmapStorage(30, tmp_path / "rows") as storage:
        buffer = on_disk(storage, **BY_PRIORITY)
        for i in range(2):
            buffer.extend(steps_of(3, end="terminated", first_obs=10 * i))
        buffer.extend(steps_of(4), env=1)
        buffer.extend(steps_of(4), env=0)
        buffer.save(tmp_path / "saved", rows=False)
    path = tmp_path / "rows" / "leaf-0.bin"
    data = bytearray(path.read_bytes())
    data[5 * len(data) // 30] ^= 1  # of row 5
    path.write_bytes(data)
    with MemmapStorage.open(tmp_path / "rows") as storage:
        buffer = on_disk(storage, **BY_PRIORITY)
        buffer.load(tmp_path / "saved")
        assert buffer.read(torch.tensor([0]))["obs"].tolist() == [[0, 1]]
        for draw in (lambda: buffer.read(torch.tensor([0, 4])), lambda: buffer.sample(100)):
            with pytest.raises(DamagedFileError, match=r"rows \[5\]"):
                draw()
        storage.erase(torch.tensor([1, 9, 5]))  # as a loss of power does to rows not yet flushed
        buffer.load(tmp_path / "saved")
        assert drawable(buffer) == [12, 13, 14]
        buffer.extend(steps_of(2, first_obs=50), env=1)  # a new episode, as the old one is lost
        assert drawable(buffer) == [12, 13, 14, 16] and buffer.num_episodes == 2


def test_a_state_of_a_buffer_with_other_options_is_refused(tmp_path):
    saved = filled(**BY_PRIORITY)
    saved.save(tmp_path / "replay")
    for options, match in [
        ({"unroll_steps": 4}, "segments look 3 ahead and 0 back, but here these are 100, 5 and 0"),
        ({"frame_stack": 2}, "here these are 100, 3 and 1"),
        ({"alpha": None, "beta": None}, "alpha=0.6, but this buffer has alpha=None"),
        ({"generator": torch.Generator()}, "the buffer has a generator, but the state has none"),
    ]:
        other = filled(**BY_PRIORITY | {"num_episodes": 1} | options)
        before = other.state_dict()
        calls = (other.load_state_dict, saved.state_dict()), (other.load, tmp_path / "replay")
        for load, state in calls:
            with pytest.raises(ValueError, match=match):
                load(state)
        assert same_states(before, other.state_dict())
    path = next(path for path in (tmp_path / "replay").iterdir() if "buffer" in path.name)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DamagedFileError):
        saved.load(tmp_path / "replay")


DAMAGE = {  # entry of the episodes' state -> its defect
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
LACKS = {
    (): "buffer",
    ("buffer",): "episodes",
    ("buffer", "episodes"): "window",
    ("buffer", "priorities"): "chances",
}


@pytest.mark.parametrize("what", [*DAMAGE, *LACKS], ids=str)
def test_a_damaged_state_is_refused(what):
    buffer = filled()
    buffer.extend(steps_of(3))  # an unfinished episode
    before, state = buffer.state_dict(), buffer.state_dict()
    if what in DAMAGE:
        match = "links between rows do not form episodes"
        DAMAGE[what](state["buffer"]["episodes"][what])
    else:
        match = f"it has no .*{LACKS[what]}"
        del functools.reduce(dict.__getitem__, what, state)[LACKS[what]]
    with pytest.raises(ValueError, match=match):
        buffer.load_state_dict(state)
    assert same_states(buffer.state_dict(), before)
    buffer.load_state_dict(before)


# ------------------------------------------------------------------------- threads and devices


def test_prefetched_batches_equal_those_without():
    def new(prefetch):
        options = {**BY_PRIORITY, "frame_stack": 2, "generator": rng(), "batch_size": 3}
        return filled(**options, num_rows=30, prefetch=prefetch)

    plain, ahead = new(0), new(2)
    for i in range(12):
        expected = plain.sample()
        assert same_samples(ahead.sample(), expected)
        if i % 3 == 2:
            for buffer in (plain, ahead):
                buffer.update_priority(expected["index"], expected["obs"][:, 0, 0] + 0.5)
                buffer.extend(steps_of(4, end="terminated", first_obs=7 * i))
    out = ahead.sample()
    assert same_samples(out, plain.sample()) and same_samples(ahead.sample(out=out), plain.sample())
    assert same_samples(next(iter(ahead)), next(iter(plain)))
    time.sleep(0.05)  # the thread draws ahead, which the state doesn't show
    assert same_states(plain.state_dict(), ahead.state_dict())


def test_windows_are_consistent_while_another_thread_adds_steps():
    buffer = filled(num_rows=60, unroll_steps=4)
    stop = threading.Event()

    def add():
        for first in itertools.count(100, 10):
            buffer.extend(steps_of(5, end="terminated", first_obs=first))
            if stop.is_set():
                return

    thread = threading.Thread(target=add)
    thread.start()
    try:
        for _ in range(100):
            batch = buffer.sample(16)
            start, length = batch["obs"][:, :1], batch["valid"].sum(1, keepdim=True)
            expected = start + torch.arange(6).clamp(max=length - 1)
            assert torch.equal(batch["obs"], expected)
    finally:
        stop.set()
        thread.join()


@pytest.mark.gpu
@pytest.mark.parametrize("stored_on", ["cpu", "cuda"])
@pytest.mark.parametrize("pin_memory", [False, True])
def test_samples_on_a_gpu_equal_those_on_the_cpu(stored_on, pin_memory):
    def new(storage, **options):
        options |= {"unroll_steps": 2, "n_step": 1, "frame_stack": 3, "generator": rng()}
        buffer = SegmentReplayBuffer(storage, observation_keys=["obs"], **options)
        buffer.extend(steps_of(9, end="terminated", shape=(2,)))
        return buffer

    plain = new(TensorStorage(50))
    on_gpu = new(TensorStorage(50, device=stored_on), device="cuda", pin_memory=pin_memory)
    out = None
    for _ in range(3):
        expected, out = plain.sample(4), on_gpu.sample(4, out=out)
        for key, value in expected.items():
            assert out[key].device.type == "cuda"
            assert torch.equal(value, out[key].cpu()), key


# ---------------------------------------------------------------------- flags under "next"

UNDER_NEXT = {"terminated_key": ("next", "terminated"), "truncated_key": ("next", "truncated")}
AFTER = ("reward", "terminated", "truncated")


def under_next(steps):
    """The same steps, with their results under "next"."""
    found = steps.exclude(*AFTER)
    for key in AFTER:
        found.set(("next", key), steps[key])
    return found


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_flags_under_next_give_the_same_windows(end):
    here, nested = make(8, frame_stack=2), make(8, frame_stack=2, **UNDER_NEXT)

    def check():
        assert drawable(nested) == drawable(here)
        if len(here):
            index = torch.tensor(drawable(here))
            expected, found = here.read(index), nested.read(index)
            assert set(found["next"].keys()) == set(AFTER)
            for key in AFTER:
                found.set(key, found["next", key])
            assert same_samples(found.exclude("next"), expected)

    calls = [steps_of(3), steps_of(2, end=end, first_obs=3), steps_of(4, first_obs=20)]
    for i, steps in enumerate(calls):
        moved = under_next(steps)
        if i == 0:  # the next observation is needed only where an episode ends
            moved = moved.exclude(("next", "obs"))
        assert_close(nested.extend(moved), here.extend(steps))
        check()
    assert nested.cut() == here.cut() == 1
    check()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e8m0fnu])
@pytest.mark.parametrize("on_disk", [False, True])
def test_entries_of_dtypes_that_torch_cannot_index(dtype, on_disk, tmp_path):
    storage = MemmapStorage(100, tmp_path) if on_disk else None
    buffer = make(storage=storage, frame_stack=2, unroll_steps=1, n_step=0)
    feed = buffer.give_rows_of("depth")
    feed.start()
    steps = steps_of(4, end="terminated")
    number = torch.tensor([1, 2, 4, 8, 16]).to(dtype)
    steps["obs"], steps["depth"], steps["next", "obs"] = number[:-1], number[:-1], number[1:]
    buffer.extend(steps)
    sample = buffer.sample(3)
    index = buffer.sample(3, out=sample)["index"]
    assert sample["obs"][:, 0, 1].int().tolist() == [2**i for i in index]
    mirror = RowMirror()
    mirror.load(feed.as_of(buffer.storage.total))
    assert mirror.read(torch.tensor([3, 0])).int().tolist() == [8, 1]
    rows = torch.tensor([1, 4])
    new = TensorDict(obs=number[3:], action=torch.tensor([7, 7]), batch_size=[2])
    assert buffer.update(rows, new) == 0
    found = buffer.read(torch.tensor([1, 3]))
    assert found["obs"][:, 0, 1].int().tolist() == [8, 8] and found["action"][1].tolist() == [4, 0]
    assert found["obs"][1, 1].int().tolist() == [8, 16]


def test_samples_do_not_depend_on_the_default_dtype_of_torch():
    def samples():
        buffer = filled(num_episodes=2, generator=rng(), **BY_PRIORITY)
        return buffer.sample(6), buffer.read(drawable(buffer))

    expected = samples()
    torch.set_default_dtype(torch.float64)
    try:
        found = samples()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, expected, strict=True):
        one["reward"] = one["reward"].float()  # those of the test's steps
        for key, value in other.items():
            assert one[key].dtype == value.dtype and one[key].equal(value), key
