"""Workers as actors of a Ray cluster, of this machine or of many. Only this file imports ray."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections import deque
from typing import Any

import numpy as np
import torch

from raffia._version import __version__
from raffia.distributed.arrays import pack, unpack
from raffia.distributed.engine import ONE_CPU, Lost, Needs, Role, RoleError, make_role
from raffia.functional.exact import request_exact_products
from raffia.tensordict.tensordict import TensorDict

__all__ = ["RayEngine", "VersionError"]

MISSING = (
    "engine.name=ray needs Ray, which is not installed: pip install 'raffia[scale]'; or "
    "engine.name=process, for processes of this machine"
)


class VersionError(RuntimeError):
    """A machine of the cluster has another raffia, torch or Python than this one.

    >>> raise VersionError("worker 0 has torch 2.12.0, and this process 2.13.0")
    Traceback (most recent call last):
    ...
    raffia.distributed.ray.VersionError: worker 0 has torch 2.12.0, and this process 2.13.0
    """


def versions() -> dict[str, str]:
    """What must be equal on all machines of a cluster.

    >>> sorted(versions())
    ['python', 'raffia', 'torch']
    """
    python = ".".join(map(str, sys.version_info[:3]))
    return {"python": python, "raffia": __version__, "torch": torch.__version__}


def _ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ModuleNotFoundError(MISSING, name="ray") from None
    return ray


class RayEngine:
    """Workers as actors of a Ray cluster, weights in its object store.

    address: of a cluster that runs, such as "auto" or "ray://head:10001"; "": one of this machine,
        which ends with the engine. Where the program has called `ray.init`, that cluster is used.
    num_cpus: of a cluster of this machine; None: as many as it has.

    Raises ModuleNotFoundError without the extra `scale`, ConnectionError if no cluster answers, and
    VersionError from `start` if a worker's machine has other versions.
    """

    def __init__(self, address: str = "", *, num_cpus: float | None = None) -> None:
        os.environ.setdefault("RAY_TQDM_PATCH_PRINT", "0")  # else Ray replaces builtins.print
        self._ray = ray = _ray()
        if ray.is_initialized():  # by the program: its cluster is used, and goes on
            self._is_ours = False
        else:
            self._is_ours = True
            options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
            if address:
                _refuse_if_silent(address)
                options["address"] = address
            else:
                options |= {"include_dashboard": False, "num_cpus": num_cpus}
                os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            try:
                ray.init(**options)
            except Exception as error:
                if not address:
                    raise
                raise _silent(address, error) from error
        self._actor = ray.remote(max_restarts=0, max_task_retries=0)(_Actor)
        self._workers: list[RayWorker] = []

    def require_room(self, num_workers: int, needs: Needs) -> None:
        """ValueError if the whole cluster has less than so many workers take."""
        whole = self._ray.cluster_resources()
        for name, each in (("CPU", needs.cpus), ("GPU", needs.gpus)):
            if num_workers * each > whole.get(name, 0) + 1e-6:
                raise ValueError(
                    f"{num_workers} workers of {each:g} {name}s each find no room in the Ray "
                    f"cluster, which has {whole.get(name, 0):g}: take fewer, give each less "
                    "(actors.cpus, evaluators.cpus), or add machines"
                )

    def start(self, role: str, config: str, index: int, needs: Needs = ONE_CPU) -> RayWorker:
        """An actor of this role, on any machine that has room for it."""
        handle = self._actor.options(num_cpus=needs.cpus, num_gpus=needs.gpus).remote(
            role, config, index, max(1, int(needs.cpus))
        )
        worker = RayWorker(self._ray, handle, index)
        self._workers = [one for one in self._workers if not one.is_closed]
        self._workers.append(worker)
        return worker

    def put(self, weights: TensorDict) -> Any:
        """The weights in the object store."""
        return self._ray.put(np.frombuffer(pack(weights), dtype=np.uint8))

    def drop(self, ref: Any) -> None:
        """The store frees what nothing refers to any more."""

    def resources(self) -> str:
        """What the cluster has, in a line."""
        whole, free = self._ray.cluster_resources(), self._ray.available_resources()
        num = sum(bool(node["Alive"]) for node in self._ray.nodes())
        return (
            f"{num} machine{'s' if num > 1 else ''}, {free.get('CPU', 0):g} of "
            f"{whole.get('CPU', 0):g} processors and {free.get('GPU', 0):g} of "
            f"{whole.get('GPU', 0):g} GPUs free"
        )

    def close(self) -> None:
        """End all workers, and the cluster if it was started here."""
        for worker in self._workers:
            worker.close()
        self._workers = []
        if self._is_ours:
            self._ray.shutdown()


def _refuse_if_silent(address: str) -> None:
    """Ray itself tries for two minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError as error:
            raise _silent(address, error) from None


def _silent(address: str, error: Exception) -> ConnectionError:
    return ConnectionError(
        f"no Ray cluster answers at {address}: start one with `ray start --head`, or leave "
        f"engine.address out for one of this machine ({error})"
    )


class RayWorker:
    """See `RayEngine`."""

    def __init__(self, ray: Any, handle: Any, index: int) -> None:
        self._ray, self._handle, self.index = ray, handle, index
        self._open: deque[Any] = deque()
        self._greeting: Any = handle.greeting.remote()
        self._pid: int | None = None
        self.is_closed = False

    @property
    def pid(self) -> int:
        """The number of the actor's process on its machine; waits until it runs."""
        if self._pid is None:
            self._greet(60.0)
        assert self._pid is not None
        return self._pid

    def load(self, state: TensorDict) -> None:
        """Stand there before the next task."""
        self._handle.load.remote(np.frombuffer(pack(state), dtype=np.uint8))

    def ask(self, task: TensorDict, weights: Any = None) -> None:
        """Put the task behind those that are open."""
        name = "" if weights is None else weights.hex()
        data = np.frombuffer(pack(task), dtype=np.uint8)
        self._open.append(self._handle.do.remote(data, name, weights))

    def take(self, seconds: float) -> TensorDict:
        """The oldest answer; Lost if the actor dies or is silent for this long."""
        errors = self._ray.exceptions
        if not self._open:
            raise RuntimeError("no task is open: ask for one before its answer is taken")
        try:
            if self._pid is None:
                self._greet(seconds)
            answer = self._ray.get(self._open[0], timeout=seconds)
        except errors.GetTimeoutError:
            self.close()
            raise Lost(
                f"worker {self.index} gave no answer in {seconds:g} s, and was ended"
            ) from None
        except (errors.RayActorError, errors.ObjectLostError, errors.WorkerCrashedError) as error:
            first = str(error).strip().splitlines()[0]
            raise Lost(f"worker {self.index} is gone: {first}") from None
        self._open.popleft()
        if isinstance(answer, str):
            raise RoleError(answer)
        return unpack(bytearray(memoryview(answer)))

    def poll(self, seconds: float) -> bool:
        """Wait for an answer, or for the end of the actor."""
        return bool(self._ray.wait([self._open[0]], timeout=seconds)[0])

    def _greet(self, seconds: float) -> None:
        theirs, pid = self._ray.get(self._greeting, timeout=seconds)
        ours = versions()
        differ = [name for name in ours if ours[name] != theirs[name]]
        if differ:
            seen = ", ".join(f"{name} {theirs[name]}, and here {ours[name]}" for name in differ)
            raise VersionError(
                f"worker {self.index} of the Ray cluster has {seen}: install the same on all "
                "machines, or results would differ by who computes them"
            )
        self._pid = pid

    def close(self) -> None:
        """End the actor."""
        if not self.is_closed:
            self.is_closed = True
            self._open.clear()
            self._ray.kill(self._handle)


class _Actor:
    """A role in a process of Ray's; errors of the role are answers."""

    def __init__(self, role: str, config: str, index: int, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        request_exact_products()
        self._made_of = role, config, index
        self._role: Role | None = None
        self._failed = ""
        self._weights: tuple[str, TensorDict | None] = "", None

    def greeting(self) -> tuple[dict[str, str], int]:
        return versions(), os.getpid()

    def load(self, data: Any) -> None:
        try:
            self._made().load(unpack(bytearray(memoryview(data))))
            self._failed = ""
        except Exception as error:
            self._failed = f"its state could not be loaded: {type(error).__name__}: {error}"

    def do(self, data: Any, name: str, weights: Any) -> Any:
        try:
            if self._failed:
                raise RuntimeError(self._failed)
            if name != self._weights[0]:
                found = unpack(bytearray(memoryview(weights))) if name else None
                self._weights = name, found
            answer = self._made().do(unpack(bytearray(memoryview(data))), self._weights[1])
            return np.frombuffer(pack(answer), dtype=np.uint8)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def _made(self) -> Role:
        if self._role is None:
            self._role = make_role(*self._made_of)
        return self._role
