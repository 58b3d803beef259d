"""Groups whose members have a GPU each sum over NCCL; others, and those that share one, over gloo.

Several processes need as many GPUs, or NCCL 2.30 and its setting that lets them share one.
"""

import json
import os
import signal
import time

import pytest
import torch

from raffia.distributed import DataParallel, Followers, Group, Lost, Rendezvous, Sharded, nccl
from raffia.distributed.group import device_of
from raffia.distributed.nccl import SHARES_A_GPU, can_use_nccl, may_share_a_gpu
from raffia.environment import environment
from raffia.learner import Accumulate
from tests.distributed.learners import Small
from tests.distributed.test_gradients import SMALL, batches
from tests.processes import DIED, results_of

CAN_JOIN = may_share_a_gpu() or torch.cuda.device_count() >= 2
two = pytest.mark.skipif(not CAN_JOIN, reason="NCCL needs a GPU for each process")
SIZES = [1, pytest.param(2, marks=two)]


def test_members_that_share_a_gpu_do_not_use_nccl(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.delenv(SHARES_A_GPU, raising=False)
    one, other = torch.zeros(32), torch.ones(32)
    assert can_use_nccl([one, other]) and not can_use_nccl([one, other, one])
    monkeypatch.setenv(SHARES_A_GPU, "1")
    assert can_use_nccl([one, one])


def test_variables_of_the_environment_are_as_before(monkeypatch):
    monkeypatch.setenv("RAFFIA_A", "1")
    monkeypatch.delenv("RAFFIA_B", raising=False)
    with environment({"RAFFIA_A": "2", "RAFFIA_B": "3"}):
        assert (os.environ["RAFFIA_A"], os.environ["RAFFIA_B"]) == ("2", "3")
    assert os.environ["RAFFIA_A"] == "1" and "RAFFIA_B" not in os.environ


# ---------------------------------------------------------------------------------- on GPUs


def draws(rank):
    generator = torch.Generator().manual_seed(rank)
    sizes = [(), (3, 4), (0,), (4_000_000,), (5_000_000,)]  # more than one bucket
    tensors = [torch.randn(size, generator=generator) for size in sizes]
    return [*tensors, torch.randn(9, generator=generator).bfloat16()]


def calls(group):
    """All that members do together, of tensors on their GPU; what they get, on the CPU."""
    device = device_of("cuda", group.rank)
    means = group.mean([tensor.to(device) for tensor in draws(group.rank)])
    gathered = group.gather_flat(torch.full((5,), group.rank, device=device))
    parts = [torch.full((3,), 10.0 * group.rank + to, device=device) for to in range(group.size)]
    exchanged = group.exchange(parts)
    assert {tensor.device for tensor in (*means, *gathered, *exchanged)} == {device}
    norm = group.gather_flat(torch.tensor([1.5]))  # as it lies on the CPU
    return group.backend, [tensor.cpu() for tensor in (*means, *gathered, *exchanged, *norm)]


def dies(group):
    """The last member is killed within a collective that all others have begun."""
    nccl.SECONDS = 3.0
    tensor = torch.ones(1_000, device=device_of("cuda", group.rank))
    assert group.mean([tensor])[0].sum() == 1_000
    if group.rank:
        meet = group._nccl._meet
        group._nccl._meet = lambda: (meet(), os.kill(os.getpid(), signal.SIGKILL))
    try:
        group.mean([tensor])
    except Lost as error:
        assert (tensor * 2).sum() == 2_000  # the GPU can still be used
        return str(error)


def leaves(group):
    """The last member goes before a collective that all others begin."""
    tensor = torch.ones(1_000, device=device_of("cuda", group.rank))
    group.mean([tensor])
    if group.rank:
        return None
    began = time.monotonic()
    try:
        group.mean([tensor])
    except Lost as error:
        return str(error), time.monotonic() - began


def serve(pipe, program, address, rank, size, sums):
    try:
        with Group(address, rank, size, sums=sums, device=device_of("cuda", rank)) as group:
            pipe.send(program(group))
    except Exception as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


def run(program, size, sums="ring"):
    """The result in each of the processes, or `DIED` where one was killed."""
    with Rendezvous() as rendezvous:
        return results_of(
            serve, [(program, rendezvous.address, rank, size, sums) for rank in range(size)]
        )


@pytest.mark.gpu
@pytest.mark.parametrize("sums", ["ring", "ordered"])
@pytest.mark.parametrize("size", SIZES)
def test_calls_give_what_they_give_on_the_cpu(size, sums):
    found = run(calls, size, sums)
    members = [draws(rank) for rank in range(size)]
    means = [sum(parts[1:], parts[0]) / size for parts in zip(*members, strict=True)]
    for rank, (backend, tensors) in enumerate(found):
        assert backend == "nccl"
        gathered = [torch.full((5,), other) for other in range(size)]
        exchanged = [torch.full((3,), 10.0 * other + rank) for other in range(size)]
        expected = [*means, *gathered, *exchanged, *[torch.tensor([1.5])] * size]
        for tensor, value in zip(tensors, expected, strict=True):
            assert torch.equal(tensor, value) and tensor.dtype is value.dtype


@two
@pytest.mark.gpu
def test_a_member_killed_within_a_collective_is_noticed():
    message, other = run(dies, 2)
    assert other == DIED and "member 0 of 2 lost another while it summed" in message
    assert "did not answer for 3 seconds" in message


@two
@pytest.mark.gpu
def test_a_member_that_leaves_is_noticed_at_once():
    (message, seconds), _ = run(leaves, 2)
    assert "member 0 of 2 lost another while it summed" in message and seconds < 10


# ---------------------------------------------------- learners, on one GPU or on several


class OnGPU:
    """`Small`, whose first state is on the GPU."""

    def __init__(self, learner):
        self.learner = learner

    def __getattr__(self, name):
        return getattr(self.learner, name)

    def init(self, seed):
        return self.learner.init(seed).to("cuda")


def trained(learner, num=6):
    state = learner.init(0)
    for batch in batches(num):
        update, _ = learner.grads(state, batch.to("cuda"))
        state = learner.apply(state, update)
    return learner.whole(state) if isinstance(learner, Sharded) else state


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "phase"), [(DataParallel, None), (DataParallel, "sum"), (Sharded, None)]
)
def test_two_processes_equal_two_parts(kind, phase, tmp_path):
    config = {"die": [phase, 3, str(tmp_path / "dead")]} if phase else {}
    own = OnGPU(Small("{}", -1))
    expected = trained(Accumulate(own, 2))
    with Followers(SMALL, json.dumps(config), 1, device="cuda", sums="ordered") as group:
        found = trained(kind(own, group))
        assert group.num_restarts == len(config)
        assert group._group.backend == ("nccl" if CAN_JOIN else "gloo")
    for key, value in expected.items(True, True):
        assert found[key].device.type == "cuda"
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-7)
