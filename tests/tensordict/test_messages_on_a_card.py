"""Containers on a card that processes send and sum: over NCCL by one alone, else over gloo."""

import multiprocessing
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from raffia import TensorDict, lazy_stack

pytestmark = pytest.mark.gpu

NCCL, GLOO = ("nccl", 1), ("gloo", 2)


def tree(fill):
    """Entries of several dtypes, nested, large and empty, on the card; a value."""
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
    """All that lies on the card, added up by name."""
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
    if rank == 0:
        td.send(1)
        return numbers(td)
    td.recv(0)
    return numbers(td)


def gather_and_stack(rank):
    td = torch.stack([tree(0)] * 2)[:1].clone() if rank == 0 else tree(rank + 1)
    found = td.gather_and_stack(0)
    return numbers(found) if rank == 0 else None


def serve(pipe, program, rank, num, backend, store):
    torch.cuda.set_device(0)
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
    """What the program gives in each of so many processes, which share the card."""
    context, workers = multiprocessing.get_context("spawn"), []
    for rank in range(num):
        here, there = context.Pipe()
        arguments = (there, program, rank, num, backend, str(folder / "store"))
        process = context.Process(target=serve, args=arguments, daemon=True)
        process.start()
        workers.append((process, here))
    try:
        found = []
        for _, pipe in workers:
            assert pipe.poll(90), "a process is silent"
            found.append(pipe.recv())
    finally:
        for process, _ in workers:
            process.join(10)
            process.kill()
    errors = [one for one in found if isinstance(one, Exception)]
    assert not errors, errors
    return found


def sums(fill):
    return {"a": 6.0 * fill, "('n', 'b')": 2.0 * fill, "large": 100_000.0 * fill}


@pytest.mark.parametrize(("backend", "num"), [NCCL, GLOO])
def test_all_sum(backend, num, tmp_path):
    total = {1: 1, 2: 3}[num]
    expected = (sums(total), [[float(total)] * 2, [float(total)] * 3])
    assert run(all_reduce, backend, num, tmp_path) == [expected] * num


@pytest.mark.parametrize(("backend", "num"), [NCCL, GLOO])
def test_one_sums(backend, num, tmp_path):
    assert run(reduce, backend, num, tmp_path)[0] == sums({1: 1, 2: 3}[num])


@pytest.mark.parametrize(("backend", "num"), [NCCL, GLOO])
def test_all_have_what_one_has(backend, num, tmp_path):
    assert run(broadcast, backend, num, tmp_path) == [sums(1)] * num


@pytest.mark.parametrize(("backend", "num"), [NCCL, GLOO])
def test_all_have_what_each_has(backend, num, tmp_path):
    expected = [("a", sums(rank + 1)) for rank in range(num)]
    assert run(all_gather, backend, num, tmp_path) == [expected] * num


def test_one_has_what_another_sends(tmp_path):
    assert run(send_and_receive, *GLOO, tmp_path) == [sums(1)] * 2


def test_one_has_the_rows_of_others(tmp_path):
    assert run(gather_and_stack, *GLOO, tmp_path)[0] == sums(2)
