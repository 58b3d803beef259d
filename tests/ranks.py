"""Processes that run a program together over gloo, as ranks of `torch.distributed`.

They are started once and used for all programs, from a server that has imported torch, which
takes long. Nothing waits forever: a group gives up after `PATIENCE` seconds, and ranks that are
not done in time, or died, are killed; the next program gets new ones.
"""

import importlib
import multiprocessing
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

PATIENCE = 20.0  # seconds that a rank waits for another within a program


class Ranks:
    """Processes; `run(program, num, *args)` calls `program(rank, *args)` in `num` of them."""

    def __init__(self, most=4):
        self.most = most
        self.workers = []

    def start(self):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["raffia.distributed.process"])  # as that module does
        for _ in range(self.most - len(self.workers)):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def run(self, program, num=2, *args, seconds=60.0):
        """The program's result in each rank, in order; an exception is a result, too."""
        self.start()
        name = (program.__module__, program.__qualname__)
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, pipe) in enumerate(self.workers[:num]):
                pipe.send((name, args, rank, num, str(Path(folder, "store"))))
            limit = time.monotonic() + seconds
            found = []
            for rank, (process, pipe) in enumerate(self.workers[:num]):
                try:
                    if not pipe.poll(max(0.0, limit - time.monotonic())):
                        raise AssertionError(f"rank {rank} is not done after {seconds} seconds")
                    found.append(pipe.recv())
                except (EOFError, ConnectionError, AssertionError) as error:
                    process.join(0.2)
                    code = process.exitcode
                    self.close()
                    raise AssertionError(f"rank {rank}, exit code {code}: {error!r}") from None
        return found

    def close(self):
        for process, pipe in self.workers:
            process.kill()
            process.join()
            pipe.close()
        self.workers = []


def serve(pipe):
    """Run programs until the pipe is closed."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    while True:
        try:
            (module, name), args, rank, num, store = pipe.recv()
        except EOFError:
            return
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, num),
            rank=rank,
            world_size=num,
            timeout=timedelta(seconds=PATIENCE),
        )
        try:
            found = getattr(importlib.import_module(module), name)(rank, *args)
        except Exception as error:
            found = error
        dist.destroy_process_group()
        try:
            pipe.send(found)
        except Exception as error:  # such as an error that can't be pickled
            pipe.send(RuntimeError(f"{type(found).__name__}: {found} ({error})"))
