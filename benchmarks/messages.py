"""Containers sent to another process and summed by two, against PyTorch's tensordict.

    OMP_NUM_THREADS=1 python -m benchmarks.messages

Ratios of times, ours / theirs, of one run in which both take turns; over gloo, on this machine:

send        there and back, into entries that are there
all_reduce  a sum in both processes; "theirs, packed": with their `bucket_bytes` of 25 MiB
broadcast   to a process that has no container yet
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIZES = [(12, 64), (60, 64), (300, 64), (12, 2**18)]  # leaves, numbers in each
BUCKET = 25 * 2**20


def calls(package: Any, num: int, length: int, rank: int) -> dict[str, Callable[[], Any]]:
    """What is timed; each is called by both processes."""
    entries = {f"k{i}": torch.ones(length) for i in range(num // 2)}
    nested = {f"k{i}": torch.ones(length) for i in range(num - num // 2)}
    td = package.TensorDict({**entries, "n": package.TensorDict(nested)})

    def send() -> None:
        if rank == 0:
            td.send(1)
            td.recv(1)
        else:
            td.recv(0)
            td.send(0)

    return {
        "send": send,
        "all_reduce": td.all_reduce,
        "all_reduce, theirs packed": lambda: td.all_reduce(
            bucket_bytes=BUCKET if package.__name__ == "tensordict" else None
        ),
        "broadcast": lambda: (td if rank == 0 else package.TensorDict()).broadcast(0),
    }


def compare(rank: int, store: str, repeats: int) -> None:
    import tensordict

    import raffia

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    for num, length in SIZES:
        ours, theirs = [calls(p, num, length, rank) for p in (raffia, tensordict)]
        for name in ours:
            times: list[list[float]] = [[], []]
            for _ in range(repeats + 3):
                for at, call in enumerate((ours[name], theirs[name])):
                    dist.barrier()
                    began = time.perf_counter()
                    call()
                    times[at].append(time.perf_counter() - began)
            mine, others = [statistics.median(found[3:]) for found in times]
            if rank == 0:
                print(
                    f"{num:4d} leaves of {length:6d}  {name:26s} {mine / others:5.2f}  "
                    f"{mine * 1e6:7.0f} us",
                    flush=True,
                )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=60)
    repeats = parser.parse_args().repeats
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        processes = [context.Process(target=compare, args=(r, store, repeats)) for r in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any([process.exitcode for process in processes]):
        raise SystemExit("a process failed")


if __name__ == "__main__":
    main()
