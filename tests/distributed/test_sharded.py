"""A sharded state learns the same as a full one."""

import json
import os
import signal

import pytest
import torch

from raffia.algorithms.ilql.loss import with_row_means
from raffia.distributed import Followers, Group, Lost, Rendezvous, RoleError, Sharded
from raffia.distributed.shards import cut, gathered, rows_of
from raffia.learner import Accumulate
from raffia.tensordict.tensordict import TensorDict
from tests.algorithms.ilql.small import batch_of, float32
from tests.distributed.learners import Small, ilql
from tests.distributed.test_engines import is_gone
from tests.distributed.test_gradients import SMALL, batches, members, small, trained


def close(found, expected, tolerance):
    """Compares states and metrics of two runs; a tolerance of 0 is to the bit."""
    near = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    (state, metrics), (other, other_metrics) = found, expected
    for tree, theirs in zip([state, *metrics], [other, *other_metrics], strict=True):
        assert set(tree.keys(True, True)) == set(theirs.keys(True, True))
        for key, value in theirs.items(True, True):
            torch.testing.assert_close(tree[key], value, **near)


class ByDoubles:
    """A learner of one process that clips by the norm in float64."""

    def __init__(self, learner):
        self.learner, self.init, self.apply = learner, learner.init, learner.apply

    def grads(self, state, batch):
        update, metrics = self.learner.grads(state, batch)
        leaves = list(update["grads"].values(True, True))
        squares = [leaf.double().square().sum() for leaf in leaves if leaf.is_floating_point()]
        norm = torch.stack(squares).sum().sqrt().float()
        # The norm in float32 is at most two units in the last place away.
        torch.testing.assert_close(metrics["grad_norm"], norm, rtol=2**-22, atol=0)
        return update.set("grad_norm", norm), metrics.set("grad_norm", norm)


def whole_of(learner, first=None, **options):
    """first: the initial state, for threads, which would draw it from one generator."""
    if first is not None:
        options["before"] = lambda update, state: state if update else first.clone()
    state, metrics = trained(learner, **options)
    return learner.whole(state), metrics


def nines(num):
    return batches(num, 9)


def numbers(tree):
    return sum(leaf.numel() for leaf in tree.values(True, True))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("norm", [False, True])
def test_any_number_of_shards_learns_the_same_as_the_full_state(size, norm):
    """The tensors have 7, 5 and 3 rows: not divisible, and fewer than processes."""
    rows = 12

    def make(num):
        return batches(num, rows)

    whole = Accumulate(small(norm=norm), size)
    expected, first = trained(ByDoubles(whole), make=make), small(norm=norm).init(0)

    def learns(group):
        return whole_of(Sharded(small(norm=norm), group), first, make=make)

    found = members(size, learns, sums="ordered")
    for state, metrics in found:
        if norm and size > 1:  # processes average statistics, `Accumulate` sees parts in turn
            assert set(state.keys(True, True)) == set(expected[0].keys(True, True))
            torch.testing.assert_close(metrics[0]["loss"], expected[1][0]["loss"])
        else:
            close((state, metrics), expected, 0)
        for key, value in found[0][0].items(True, True):
            assert torch.equal(state[key], value)


def test_a_state_is_cut_into_rows_and_gathered_again():
    torch.manual_seed(0)
    params = {"w": torch.randn(7, 3), "b": torch.randn(()), "few": torch.randn(2)}
    state = TensorDict(
        params=TensorDict(params, batch_size=[]).set("none", torch.randn(8, 0)),
        opt=TensorDict(
            m=TensorDict(w=torch.randn(7, 3).bfloat16(), flag=torch.randn(9) > 0),
            count=torch.tensor(4),
            big=torch.randn(30, 400_000),  # more than one message holds
        ),
        buffers=TensorDict(x=torch.randn(9)),
        step=torch.tensor(3),
    )
    rows = rows_of(state, 3)

    def round_trip(group):
        part = cut(state, rows, group.rank, 3)
        back = gathered(group, part.select("params", "opt"), rows)
        on_second = gathered(group, part.select("opt"), rows, is_kept=group.rank == 1)
        return part, back, on_second

    found = members(3, round_trip)
    for rank, (part, back, on_second) in enumerate(found):
        assert [len(part["params", "w"]), len(part["opt", "m", "w"])] == [[3, 2, 2][rank]] * 2
        assert part["params", "few"].shape == (2,) and part["opt", "count"] == 4
        assert part["params", "w"].untyped_storage().nbytes() < 7 * 3 * 4  # not a view of the whole
        assert torch.equal(part["buffers", "x"], state["buffers", "x"])
        for key, value in back.items(True, True):
            assert torch.equal(value, state[key]) and value.dtype is state[key].dtype
        assert torch.equal(on_second["opt", "big"], (state if rank == 1 else part)["opt", "big"])


def test_followers_hold_only_their_shard_and_learn_the_same_bits():
    first = small().init(0)
    expected = members(2, lambda g: whole_of(Sharded(small(), g), first))[0]
    states = []
    with Followers(SMALL, "{}", num=1) as group:
        learner = Sharded(small(), group)
        state, metrics = trained(learner, before=lambda _, state: states.append(state) or state)
        found = learner.whole(state), metrics
        assert learner.whole(found[0]) is found[0]  # a full state is returned unchanged
    for tree, theirs in zip([found[0], *metrics], [expected[0], *expected[1]], strict=True):
        for key, value in theirs.items(True, True):
            assert torch.equal(tree[key], value)
    first, then = states[0], states[1]
    # The first process has 4 of 7 rows and 2 of 3.
    assert [numbers(one.select("params", "opt")) for one in (first, then)] == [132, 80]


def test_ilql_learns_in_shards():
    """Clipped by the norm of all of the gradients."""

    def make(num):
        rows = torch.Generator().manual_seed(0)
        for _ in range(num):
            batch = float32(batch_of("B"))[torch.randint(5, (4,), generator=rows)]
            yield with_row_means(batch, "all")

    expected = trained(ByDoubles(Accumulate(ilql("{}", 0), 2)), num=4, make=make)
    first, learners = ilql("{}", 0).init(0), [ilql("{}", 0) for _ in range(2)]

    def learns(group, wrap=lambda learner: learner):
        learner = Sharded(wrap(learners[group.rank]), group)
        return whole_of(learner, first, num=4, make=make)

    found = members(2, learns)
    close(found[0], expected, 1e-7)  # AdamW rounds the ends of a vector otherwise than its middle
    assert any(float(metrics["grad_norm"]) > 0.5 for metrics in expected[1]), "something is clipped"
    cut_further = members(2, lambda group: learns(group, lambda within: Accumulate(within, 2)))
    whole = Accumulate(ilql("{}", 0), 4)
    close(cut_further[0], trained(ByDoubles(whole), num=4, make=make), 1e-7)


def test_a_state_that_was_changed_is_divided_again():
    """Evolution or a resume may change it between updates."""

    def other(update, state):
        return state if update != 3 else learner.whole(state).clone()

    with Followers(SMALL, "{}", num=1) as group:
        learner = Sharded(small(), group)
        plain = whole_of(learner)
        close(whole_of(learner, before=other), plain, 0)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["part", "apply", "sum"])
def test_a_shard_lost_with_its_process_is_an_error(phase, tmp_path):
    config = json.dumps({"die": [phase, 2, str(tmp_path / "died")]})
    with Followers(SMALL, config, num=2) as group:
        learner = Sharded(small(), group)
        states = []
        with pytest.raises(Lost, match="a process was lost, and with it its part .*continue"):
            trained(learner, make=nines, before=lambda u, s: states.append(s) or s)
        batch = next(batches(1, 9))
        with pytest.raises(
            ValueError, match="the other parts are gone: pass the newest one, or a whole"
        ):
            learner.grads(states[-1], batch)
        # A full state works again, with new followers.
        whole_of(learner, make=nines)


def test_a_follower_that_dies_before_it_has_a_shard_is_restarted(tmp_path):
    config = json.dumps({"die": ["join", 3, str(tmp_path / "died")]})
    with Followers(SMALL, config, num=1) as group:
        whole_of(Sharded(small(), group))
    with Followers(SMALL, json.dumps({"die": ["join", 3, ""]}), num=1, max_restarts=1) as group:
        with pytest.raises(Lost):
            Sharded(small(), group).grads(small().init(0), next(batches(1)))


def test_a_shard_lost_while_idle_is_an_error():
    with Followers(SMALL, "{}", num=1, patience=60.0) as group:
        learner = Sharded(small(), group)
        state = learner.init(0)
        learner.grads(state, next(batches(1)))
        pid = group.workers[0].pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(Lost):
            learner.grads(state, next(batches(1)))
        assert is_gone(pid)


def test_an_error_of_a_follower_is_raised_and_no_process_is_left():
    with Followers(SMALL, json.dumps({"fail": 1}), num=2) as group:
        learner = Sharded(small(), group)
        with pytest.raises(
            RoleError, match="follower [01] of .*Small: ValueError: this part fails"
        ):
            trained(learner, make=nines)
        with pytest.raises(RuntimeError, match=r"these followers are closed"):
            group.close()
            whole_of(learner, make=nines)


def test_calls_that_would_make_shards_inconsistent_are_refused():
    class Plain(Small):
        applies_shards = False

    def refused(message, call, *arguments):
        with pytest.raises(ValueError, match=message):
            call(*arguments)

    with Rendezvous() as rendezvous, Group(rendezvous.address, rank=0, size=1) as group:
        message = "Plain does not declare that its apply works on parts"
        refused(message, Sharded, Plain("{}", 0), group)
        learner, batch = Sharded(small(), group), next(batches(1))
        first = learner.init(0)
        update, _ = learner.grads(first, batch)
        not_last = "apply must be given the state and the update of the last"
        refused(not_last, learner.apply, first.copy(), update)
        refused(not_last, learner.apply, first, update.clone())
        update["grads", "0", "bias"].mul_(2)
        refused(not_last, learner.apply, first, update)
        update, _ = learner.grads(first, batch)
        part = learner.apply(first, update)
        part["params", "0", "bias"].mul_(2)
        changed = r"was mutated: change the whole .*pass that"
        refused(changed, learner.grads, part, batch)
        refused(changed, learner.whole, part)
        two = TensorDict(params=TensorDict(batch_size=[2]), batch_size=[2])
        refused("a state of 2 members cannot be divided", learner.grads, two, batch)
