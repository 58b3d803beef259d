"""Containers on a GPU that processes send and sum, over NCCL and over gloo.

NCCL needs a GPU for each process, or NCCL 2.30 and its setting that lets several share one.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from raffia import TensorDict, lazy_stack
from raffia.distributed.nccl import may_share_a_gpu
from tests.processes import results_of

pytestmark = pytest.mark.gpu


def tree(fill):
    """Entries of several dtypes, nested, large and empty, on the GPU; a value."""
    td = TensorDict(
        a=torch.full((2, 3), float(fill)),
        n=TensorDict(b=torch.full((2,), fill), zero=torch.zeros(2, 0), batch_size=[2]),
        large=torch.full((2, 50_000), float(fill)),
        batch_size=[2],
        device="cuda",
    )
    td["text"] = "a"
    return td


def ragged(fill):
    rows = [torch.full((length,), float(fill), device="cuda") for length in (2, 3)]
    return lazy_stack([TensorDict(a=row, batch_size=[]) for row in rows])


def numbers(td):
    """The sums of all tensors on the GPU, by name."""
    assert {leaf.device.type for leaf in td.values(True, True) if torch.is_tensor(leaf)} == {"cuda"}
    return {str(key): float(td.get(key).double().sum()) for key in ("a", ("n", "b"), "large")}


def all_reduce(rank):
    td, lazy = tree(rank + 1), ragged(rank + 1)
    td.all_reduce()
    lazy.all_reduce()
    return numbers(td), [one["a"].tolist() for one in lazy.tensordicts]


def reduce(rank):
    td = tree(rank + 1)
    td.reduce(0)
    return numbers(td) if rank == 0 else None


def broadcast(rank):
    return numbers(tree(rank + 1).broadcast(0, device="cuda"))


def all_gather(rank):
    found = tree(rank + 1).all_gather()  # over gloo it lies on the CPU
    return [(one["text"], numbers(one.to("cuda"))) for one in found]


def send_and_receive(rank):
    td = tree(rank + 1)
    td.recv(0) if rank else td.send(1)
    return numbers(td)


def gather_and_stack(rank):
    td = tree(rank + 1) if rank else torch.stack([tree(0)] * 2)[:1].clone()
    found = td.gather_and_stack(0)
    return None if rank else numbers(found)


def serve(pipe, program, rank, num, backend, store):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, num),
        rank=rank,
        world_size=num,
        timeout=timedelta(seconds=60),
    )
    try:
        pipe.send(program(rank))
    except Exception as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
    dist.destroy_process_group()


def run(program, backend, num, folder):
    """The result of the program in each of `num` processes."""
    store = str(folder / "store")
    return results_of(serve, [(program, rank, num, backend, store) for rank in range(num)])


def sums(fill):
    return {"a": 6.0 * fill, "('n', 'b')": 2.0 * fill, "large": 100_000.0 * fill}


def total(num):
    return num * (num + 1) // 2


# the results of `num` processes, whose trees are filled with 1, 2, ...
EXPECTED = {
    all_reduce: lambda n: [(sums(total(n)), [[1.0 * total(n)] * size for size in (2, 3)])] * n,
    reduce: lambda n: [sums(total(n)), *[None] * (n - 1)],
    broadcast: lambda n: [sums(1)] * n,
    all_gather: lambda n: [[("a", sums(rank + 1)) for rank in range(n)]] * n,
    send_and_receive: lambda n: [sums(1)] * n,
    gather_and_stack: lambda n: [sums(n), None],
}
ALONE = [all_reduce, reduce, broadcast, all_gather]
CAN_JOIN = may_share_a_gpu() or torch.cuda.device_count() >= 2
JOINED = pytest.mark.skipif(not CAN_JOIN, reason="NCCL needs a GPU for each process")


@pytest.mark.parametrize(
    ("program", "backend", "num"),
    [
        *((one, "nccl", 1) for one in ALONE),
        *((one, "gloo", 2) for one in EXPECTED),
        *(pytest.param(one, "nccl", 2, marks=JOINED) for one in EXPECTED),
    ],
)
def test_all_processes_have_the_expected_result(program, backend, num, tmp_path):
    assert run(program, backend, num, tmp_path) == EXPECTED[program](num)
