"""Means of gradients between two processes: over NCCL between GPUs, and over the CPU's memory."""

import multiprocessing
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection

import torch

from benchmarks.device_cost import synchronise
from benchmarks.device_figures import Effort, Figure, Group, Measure
from raffia.distributed import Group as Members
from raffia.distributed import Rendezvous
from raffia.distributed.group import device_of
from raffia.distributed.nccl import may_share_a_gpu

NUMBERS, FEW = 124_000_000, 1_000_000  # GPT-2's
CALLS, SECONDS = 5, 120.0


def sums(effort: Effort) -> Iterator[tuple[str, Measure]]:
    """The mean of as many numbers as a model of GPT-2's shape has, in float32."""
    numbers = FEW if effort.small else NUMBERS
    ways = ["gloo"]
    if effort.device.type == "cuda" and (torch.cuda.device_count() > 1 or may_share_a_gpu()):
        ways.append("nccl")
    for way in ways:
        name = f"mean of {numbers * 4 // 10**6} MB of 2 processes, {way}"
        yield name, partial(_mean, name, way, numbers, effort)


def _mean(name: str, way: str, numbers: int, effort: Effort) -> Figure:
    context = multiprocessing.get_context("spawn")
    with Rendezvous() as rendezvous:
        here, there = context.Pipe()
        arguments = (way, numbers, effort.device.type, rendezvous.address)
        processes = [
            context.Process(target=_member, args=(there, rank, *arguments), daemon=True)
            for rank in (0, 1)
        ]
        for process in processes:
            process.start()
        try:
            if not here.poll(SECONDS):
                raise RuntimeError(f"no answer after {SECONDS:g} seconds")
            backend, seconds = here.recv()
        finally:
            for process in processes:
                process.join(10)
                process.kill()
    if backend != way:
        raise RuntimeError(f"these processes sum over {backend}")
    return Figure(name, seconds, {"means": 1.0})


def _member(
    pipe: Connection, rank: int, way: str, numbers: int, device_type: str, address: str
) -> None:
    """One of both processes, of which the first gives the least time of some calls."""
    device = device_of(device_type, rank)
    tensors = [torch.ones(numbers // 100, device=device) for _ in range(100)]
    joins = device if way == "nccl" else "cpu"
    with Members(address, rank, 2, device=joins) as group:
        times = []
        for _ in range(CALLS):
            synchronise(device)
            start = time.perf_counter()
            group.mean(tensors)
            synchronise(device)
            times.append(time.perf_counter() - start)
        if rank == 0:
            pipe.send((group.backend, min(times)))


GROUPS: dict[str, Group] = {"figures, sums of two processes": sums}
