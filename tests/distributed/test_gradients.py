"""Gradients over several processes equal those of one to the bit, whichever process dies."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from raffia.algorithms.ilql.loss import with_row_means
from raffia.distributed import (
    DataParallel,
    Followers,
    Group,
    InlineEngine,
    Lost,
    Rendezvous,
    RoleError,
    data_parallel,
    follow,
)
from raffia.distributed.data_parallel import mean_over, part_of
from raffia.distributed.ray import RayEngine
from raffia.learner import Accumulate
from raffia.tensordict.tensordict import TensorDict
from tests.algorithms.ilql.small import batch_of, float32
from tests.distributed.learners import Small, ilql
from tests.distributed.test_engines import is_gone
from tests.processes import children, environment, wait_for

SMALL = "tests.distributed.learners:Small"


def members(num, do, **options):
    """The result of `do(group)` in each of `num` threads, or its error."""
    found = [None] * num

    def run(rank):
        try:
            with Group(rendezvous.address, rank, num, **options) as group:
                found[rank] = do(group)
        except Exception as error:
            found[rank] = error

    with Rendezvous() as rendezvous:
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found


def batches(num, rows=8):
    generator = torch.Generator().manual_seed(1)
    for _ in range(num):
        x, y = torch.randn(rows, 8, generator=generator).split([5, 3], 1)
        yield TensorDict(x=x, y=y, batch_size=[rows])


def trained(learner, num=6, before=lambda update, state: state, make=batches):
    """The last state, and all metrics."""
    state, metrics = learner.init(0), []
    for number, batch in enumerate(make(num)):
        state = before(number, state)
        update, new = learner.grads(state, batch)
        metrics.append(new)
        state = learner.apply(state, update)
    return state, metrics


def same(found, expected):
    (state, metrics), (other, other_metrics) = found, expected
    for tree, theirs in zip([state, *metrics], [other, *other_metrics], strict=True):
        assert list(tree.keys(True, True)) == list(theirs.keys(True, True))
        if not all(torch.equal(tree[key], value) for key, value in theirs.items(True, True)):
            return False
    return True


def small(**config):
    return Small(json.dumps(config), -1)


# ------------------------------------------------------------------------------------ groups


@pytest.mark.parametrize("sums", ["ring", "ordered"])
def test_means_have_the_same_bits_in_all_members(sums):
    def mean(group):
        torch_generator = torch.Generator().manual_seed(group.rank)
        sizes = [(), (3, 4), (0,), (4_000_000,), (5_000_000,), (7,)]  # more than one bucket
        tensors = [torch.randn(size, generator=torch_generator) for size in sizes]
        tensors.insert(2, torch.randn(9, generator=torch_generator).to(torch.bfloat16))
        return tensors, group.mean([*tensors[:1], tensors[1].t(), *tensors[2:]])

    found = members(3, mean, sums=sums)
    for at in range(7):
        parts = [tensors[at] for tensors, _ in found]
        means = [mean[at].t() if at == 1 else mean[at] for _, mean in found]
        assert torch.equal(means[0], means[1]) and torch.equal(means[0], means[2])
        if sums == "ordered":
            assert torch.equal(means[0], (parts[0] + parts[1] + parts[2]) / 3)
        torch.testing.assert_close(means[0], (parts[0] + parts[1] + parts[2]) / 3)
        assert means[0].shape == parts[0].shape and means[0].dtype is parts[0].dtype


def test_trees_of_different_sizes_are_gathered_and_the_first_is_broadcast():
    def both(group):
        own = TensorDict(x=torch.full((group.rank + 1,), group.rank))
        first = TensorDict(z=torch.zeros(2), a=TensorDict(w=torch.ones(3, dtype=torch.bool)))
        return group.gather(own), group.broadcast(first if group.rank == 0 else None)

    for gathered, first in members(3, both):
        assert [tree["x"].tolist() for tree in gathered] == [[0], [1, 1], [2, 2, 2]]
        assert list(first.keys(True, True)) == ["z", ("a", "w")]
        assert first["a", "w"].all()


@pytest.mark.slow
def test_a_member_that_leaves_is_noticed_at_once_and_a_silent_one_after_the_timeout():
    def leaves(group):
        group.mean([torch.ones(1)])
        if group.rank == 1:
            return None
        began = time.monotonic()
        with pytest.raises(Lost, match="member 0 of 2 lost another while it summed: "):
            group.mean([torch.ones(1)])
        assert not group.is_open
        with pytest.raises(Lost, match="the group is closed; make a new one"):
            group.mean([torch.ones(1)])
        return time.monotonic() - began

    seconds, other = members(2, leaves, timeout=60.0)
    assert other is None and seconds < 10

    def is_silent(group):
        if group.rank == 1:
            time.sleep(2)
            return None
        with pytest.raises(Lost, match="member 0 of 2 lost another .* summed: "):
            group.mean([torch.ones(1)])
        return "done"

    assert members(2, is_silent, timeout=0.5)[0] == "done"


def test_waiting_for_a_member_that_never_joins_ends():
    with Rendezvous() as rendezvous:
        began = time.monotonic()
        with pytest.raises(Lost, match="member 0 of 2 lost another while it waited for the others"):
            Group(rendezvous.address, 0, 2, timeout=0.5)
        assert time.monotonic() - began < 20


def test_invalid_groups_are_refused():
    for arguments, options, message in (
        (("127.0.0.1:1", 2, 2), {}, "rank=2 must be in 0..1, for 2 members"),
        (("127.0.0.1:1", 0, 2), {"sums": "tree"}, "sums='tree' must be one of ring, ordered"),
        (("127.0.0.1:1", 0, 2), {"timeout": 0}, "timeout=0 must be above 0"),
        (("localhost", 0, 2), {}, "address='localhost' must be host:port"),
    ):
        with pytest.raises(ValueError, match=message):
            Group(*arguments, **options)
    with Rendezvous() as rendezvous, Group(rendezvous.address, 0, 1) as group:
        with pytest.raises(TypeError, match="a mean of torch.int64 is not defined"):
            group.mean([torch.ones(2, dtype=torch.int64)])
        with pytest.raises(ValueError, match="member 0 must pass the tree, and all others None"):
            group.broadcast(None)


# ------------------------------------------------------------ members that all run the loop


@pytest.mark.parametrize(("num", "sums"), [(2, "ring"), (2, "ordered"), (4, "ordered")])
def test_members_that_all_run_the_loop(num, sums):
    first = small().init(0)  # torch's own generator is shared by threads

    def shared(group):
        learner = DataParallel(small(), group)
        learner.init = lambda seed: first.clone()
        return trained(learner)

    expected = trained(Accumulate(small(), num))
    for one in members(num, shared, sums=sums):
        assert same(one, expected)


def test_batches_of_stacked_members_are_split_along_the_rows():
    class Stacked:
        def grads(self, state, batch):
            error = state["params", "w"] - batch["x"].mean(-1)
            update = TensorDict(grads=TensorDict(w=error), buffers=TensorDict())
            return update, TensorDict(priority=batch["x"], grad_norm=error)

    params = TensorDict(w=torch.zeros(3))
    state = TensorDict(params=params, buffers=TensorDict()).auto_batch_size_(1)
    batch = TensorDict(x=torch.arange(12.0).view(3, 4), batch_size=[3, 4])
    expected, expected_metrics = Accumulate(Stacked(), 2).grads(state, batch)
    found = members(2, lambda group: DataParallel(Stacked(), group).grads(state, batch))
    for update, metrics in found:
        assert torch.equal(update["grads", "w"], expected["grads", "w"])
        assert torch.equal(metrics["priority"], batch["x"])
        assert torch.equal(metrics["grad_norm"], expected_metrics["grad_norm"])


def test_statistics_of_batches_are_means():
    learner = small(norm=True)
    state, batch = learner.init(0), next(batches(1, rows=9))
    parts = [learner.grads(state, part)[0]["buffers"] for part in batch.split(3)]

    def shared(group):
        found = small(norm=True).grads(state, part_of(batch, group.rank, 3))
        return mean_over(group, state, *found)

    for update, _ in members(3, shared):
        buffers = update["buffers"]
        for name in ("1.running_mean", "1.running_var"):
            mean = torch.stack([part[name] for part in parts]).mean(0)
            torch.testing.assert_close(buffers[name], mean, rtol=1e-6, atol=1e-7)
        assert buffers["1.num_batches_tracked"] == 1
        # A third of 0.1 thrice is not 0.1.
        assert torch.equal(buffers["never"], state["buffers", "never"])


def test_four_processes_repeat_their_bits_and_ordered_sums_equal_four_parts():
    expected = trained(Accumulate(small(), 4))
    with Followers(SMALL, "{}", 3) as group:
        learner = DataParallel(small(), group)
        found = trained(learner)
        assert same(trained(learner), found) and group.num_broadcasts == 2
    ring, parts = (dict(one[0]["params"].items(True, True)) for one in (found, expected))
    torch.testing.assert_close(ring, parts)
    with Followers(SMALL, "{}", 3, sums="ordered") as group:
        assert same(trained(DataParallel(small(), group)), expected)


def test_a_state_other_than_the_last_one_is_broadcast():
    """After a resume, after a generation, or when somebody has written to it."""

    def changed(update, state):
        if update == 2:
            state["params", "0", "bias"].mul_(2)
        return state.clone() if update == 4 else state

    expected = trained(Accumulate(small(), 2), before=changed)
    with Followers(SMALL, "{}", 1) as group:
        assert same(trained(DataParallel(small(), group), before=changed), expected)
        assert group.num_broadcasts == 3


def test_a_follower_that_is_killed_while_idle_changes_nothing():
    expected = trained(Accumulate(small(), 2))

    def kill(update, state):
        if update == 3:
            pid = group.workers[0].pid
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: is_gone(pid))
        return state

    with Followers(SMALL, "{}", 1) as group:
        assert same(trained(DataParallel(small(), group), before=kill), expected)
        assert group.num_restarts == 1


def test_followers_are_replaced_if_the_process_that_forked_them_is_killed():
    with Followers(SMALL, "{}", 1) as group:
        for pid in children(os.getpid()):
            if b"forkserver import main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not group.workers[0].is_alive)
        learner = DataParallel(small(), group)
        assert same(trained(learner), trained(Accumulate(small(), 2)))
        assert group.num_restarts == 1


def test_an_error_of_leader_or_follower_is_raised_and_the_next_update_works():
    first, second = batches(2)
    expected = trained(Accumulate(small(), 2), num=2)
    with Followers(SMALL, json.dumps({"fail": 1}), 1) as group:
        learner = DataParallel(small(), group)
        state = learner.init(0)
        state = learner.apply(state, learner.grads(state, first)[0])
        with pytest.raises(RoleError, match="follower 0 of .*Small: ValueError: this part fails"):
            learner.grads(state, second)
        state["step"] = torch.tensor(0)
        update, metrics = learner.grads(state, second)
        assert torch.equal(metrics["loss"], expected[1][1]["loss"])
    with Followers(SMALL, "{}", 1) as group:
        learner = DataParallel(small(fail=1), group)
        state = learner.init(0)
        state = learner.apply(state, learner.grads(state, first)[0])
        with pytest.raises(ValueError, match="this part fails"):
            learner.grads(state, second)
        assert same(trained(DataParallel(small(), group), num=2), expected)


# --------------------------------------------------------------------------------- followers


@pytest.mark.parametrize("sums", ["ring", "ordered"])
def test_two_processes_equal_two_parts_to_the_bit(sums):
    with Followers(SMALL, "{}", 1, sums=sums) as group:
        learner = DataParallel(small(), group)
        assert same(trained(learner), trained(Accumulate(small(), 2)))
        assert group.num_broadcasts == 1 and group.num_restarts == 0


def ilql_batches(num):
    rows = torch.Generator().manual_seed(0)
    for _ in range(num):
        batch = float32(batch_of("B"))[torch.randint(5, (4,), generator=rows)]
        yield with_row_means(batch)


@pytest.mark.parametrize("num", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ilql_learns_the_same_bits(num):
    expected = trained(Accumulate(ilql("{}", 0), num), make=ilql_batches)
    sums = "ring" if num == 2 else "ordered"
    with Followers("tests.distributed.learners:ilql", "{}", num - 1, sums=sums) as group:
        found = trained(DataParallel(ilql("{}", 0), group), make=ilql_batches)
        assert same(found, expected)
        assert group.num_broadcasts == 1


def test_an_update_that_was_changed_before_it_is_applied():
    def run(learner):
        state = learner.init(0)
        for number, batch in enumerate(batches(4)):
            update, metrics = learner.grads(state, batch)
            if number == 1:
                update["grads"] = update["grads"] * 2
            state = learner.apply(state, update)
        return state, [metrics]

    with Followers(SMALL, "{}", 1) as group:
        assert same(run(DataParallel(small(), group)), run(Accumulate(small(), 2)))
        assert group.num_broadcasts == 2


# -- defects that must be found


def test_parts_that_all_are_the_first_would_be_noticed(monkeypatch):
    def first(batch, rank, size, members=0):
        return part_of(batch, 0, size, members)

    monkeypatch.setattr(follow, "part_of", first)
    with Followers(SMALL, "{}", 1) as group:
        assert not same(trained(DataParallel(small(), group)), trained(Accumulate(small(), 2)))


def test_followers_with_an_old_state_would_be_noticed(monkeypatch):
    def changed(update, state):
        state["params", "0", "bias"].mul_(2 if update == 2 else 1)
        return state

    monkeypatch.setattr(follow, "is_unchanged", lambda marks, tree: marks is not None)
    expected = trained(Accumulate(small(), 2), before=changed)
    with Followers(SMALL, "{}", 1) as group:
        assert not same(trained(DataParallel(small(), group), before=changed), expected)


def test_sums_out_of_order_would_be_noticed(monkeypatch):
    gathered = Group.gather_flat
    monkeypatch.setattr(Group, "gather_flat", lambda self, flat: gathered(self, flat)[::-1])
    parts = [torch.tensor([1e8]), torch.tensor([-1e8]), torch.tensor([1.0])]
    found = members(3, lambda group: group.mean([parts[group.rank]])[0], sums="ordered")
    assert found[0] != (parts[0] + parts[1] + parts[2]) / 3


# -- deaths


@pytest.mark.slow
@pytest.mark.parametrize("num", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("phase", ["part", "sum", "apply"])
def test_a_follower_that_is_killed_changes_nothing(phase, num, tmp_path):
    expected = trained(Accumulate(small(), num))
    config = json.dumps({"die": [phase, 3, str(tmp_path / "died")]})
    with Followers(SMALL, config, num - 1, sums="ordered") as group:
        assert same(trained(DataParallel(small(), group)), expected)
        assert (tmp_path / "died").exists()
        assert group.num_restarts == 1 and group.num_broadcasts == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_followers_on_ray_equal_processes_and_a_death_changes_nothing():
    expected = trained(Accumulate(small(), 2))
    with closing(RayEngine(num_cpus=1)) as engine:
        with Followers(SMALL, "{}", 1, engine=engine, num_threads=1) as group:
            learner = DataParallel(small(), group)
            assert same(trained(learner), expected)
            os.kill(group.workers[0].pid, signal.SIGKILL)
            assert same(trained(learner), expected)
            assert group.num_restarts == 1
        other = engine.start(SMALL, "{}", 0)  # the engine outlives its followers
        assert other.pid


def test_followers_with_gpus_of_their_own_compute_on_these_alone():
    started = []

    class Recording(InlineEngine):
        def start(self, role, config, index, needs):
            started.append((needs.gpus, json.loads(config)["device"]))
            return super().start(role, config, index, needs)

    for device in ("cuda:3", "cpu"):
        Followers(SMALL, "{}", 1, device=device, gpus=0.5, engine=Recording())
    assert started == [(0.5, "cuda"), (0.5, "cpu")]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_twenty_kills_at_any_time_change_nothing():
    expected = trained(Accumulate(small(), 2), num=60)
    config = json.dumps({"sleep": 0.02})
    # Rarely gloo does not notice a death while it sends, and the sum ends after the timeout.
    with Followers(SMALL, config, 1, patience=30.0, max_restarts=25) as group:
        killed, ended = [], threading.Event()

        def kill():
            while not ended.wait(0.05 + 0.03 * len(killed)) and len(killed) < 20:
                worker = group.workers[0]
                if worker is not None and worker.pid not in killed:
                    killed.append(worker.pid)
                    os.kill(worker.pid, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            found = trained(DataParallel(small(sleep=0.02), group), num=60)
            while not ended.is_set() and len(killed) < 20:
                found = trained(DataParallel(small(sleep=0.02), group), num=60)
        finally:
            ended.set()
            thread.join()
        assert same(found, expected)
        assert len(killed) == 20


def test_a_follower_that_is_killed_while_it_joins_does_not_block(tmp_path):
    config = json.dumps({"die": ["join", 3, str(tmp_path / "died")]})
    with Followers(SMALL, config, 2, sums="ordered") as group:
        began = time.monotonic()
        found = trained(DataParallel(small(), group), make=nines)
        assert same(found, trained(Accumulate(small(), 3), make=nines))
        assert group.num_restarts == 1 and time.monotonic() - began < 15


def nines(num):
    return batches(num, rows=9)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["part", "sum"])
def test_a_follower_that_hangs_is_replaced(phase, tmp_path):
    config = json.dumps({"die": [phase, 1, str(tmp_path / "hung")], "signal": "SIGSTOP"})
    with Followers(SMALL, config, 1, patience=3.0) as group:
        learner = DataParallel(small(), group)
        assert same(trained(learner, num=3), trained(Accumulate(small(), 2), num=3))
        assert group.num_restarts == 1


def test_a_follower_that_keeps_dying_is_an_error():
    config = json.dumps({"die": ["part", 1, ""]})
    with Followers(SMALL, config, 1, max_restarts=1) as group:
        learner = DataParallel(small(), group)
        first, second = batches(2)
        state = learner.init(0)
        state = learner.apply(state, learner.grads(state, first)[0])
        with pytest.raises(Lost, match="Small were lost 2 times .* stopped by SIGKILL"):
            learner.grads(state, second)
        assert group.num_restarts == 1


# -- errors


def test_followers_with_a_different_learner_are_refused():
    with Followers("tests.distributed.learners:Wider", "{}", 1) as group:
        learner = DataParallel(small(), group)
        with pytest.raises((ValueError, RoleError), match="has gradients of other names or shapes"):
            learner.grads(learner.init(0), next(batches(1)))


def test_invalid_calls_are_refused():
    for role, num, options, message in (
        (SMALL, 0, {}, "num=0 followers must be at least 1: to use none, use"),
        (SMALL, 1, {"sums": "tree"}, "sums='tree' must be one of ring, ordered"),
        (SMALL, 1, {"patience": 0}, "patience=0 must be above 0"),
        (NOBODY, 1, {}, f"'{NOBODY}' cannot be imported"),
    ):
        with pytest.raises((ValueError, RoleError), match=message):
            Followers(role, "{}", num, **options)
    with Followers(SMALL, "{}", 1) as group:
        learner = DataParallel(small(), group)
        state = learner.init(0)
        with pytest.raises(ValueError, match="of 7 cannot be divided equally among 2 processes"):
            learner.grads(state, next(batches(1, rows=7)))
        with pytest.raises(ValueError, match="this state is on meta"):
            learner.grads(state.to("meta"), next(batches(1)))
    with pytest.raises(RuntimeError, match="these followers are closed; make new ones"):
        learner.grads(state, next(batches(1)))


# -- the leader

LEADER = """
import json, sys
from tests.distributed.test_gradients import DataParallel, Followers, SMALL, batches, small

if __name__ == "__main__":
    with Followers(SMALL, json.dumps({"sleep": float(sys.argv[1])}), 2) as group:
        learner = DataParallel(small(), group)
        state = learner.init(0)
        print(*[worker.pid for worker in group.workers], flush=True)
        for batch in batches(10_000, rows=9):
            state = learner.apply(state, learner.grads(state, batch)[0])
            print("update", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sleep", [0.0, 30.0])
def test_followers_leave_when_their_leader_is_killed(sleep, tmp_path):
    """In the midst of sums, or of long parts."""
    program = tmp_path / "leader.py"
    program.write_text(LEADER)
    leader = subprocess.Popen(
        [sys.executable, program, str(sleep)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(),
    )
    pids = leader.stdout.readline().split()
    if sleep:
        time.sleep(5)
    else:
        for _ in range(20):
            leader.stdout.readline()
    assert len(pids) == 2 and not any(is_gone(pid) for pid in pids)
    leader.kill()
    leader.wait()
    leader.stdout.close()
    wait_for(lambda: all(is_gone(pid) for pid in pids), 10)


NOBODY = "tests.distributed.learners:Nobody"


def test_attributes_of_the_wrapped_learner_are_passed_on():
    """`DataParallel` has the flags of the learner it wraps."""
    learner = small()
    learner.applies_stacks = learner.learns_faster_alone = True
    with Rendezvous() as rendezvous, Group(rendezvous.address, 0, 1) as group:
        wrapped = data_parallel.DataParallel(learner, group)
        assert wrapped.applies_stacks and wrapped.learns_faster_alone
