"""Workers as actors of a Ray cluster, of this machine or of many. Only this file imports ray."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from raffia.distributed.arrays import pack, parts_of, unpack, unpack_parts
from raffia.distributed.engine import (
    ONE_CPU,
    Lost,
    Machine,
    Needs,
    RoleError,
    RoleHost,
    Workers,
    describe_error,
    find_role,
)
from raffia.distributed.ray_cluster import (
    SPARES,
    Cluster,
    ClusterLostError,
    Room,
    VersionError,
    num_that_fit,
    refuse_if_silent,
    require_room,
    silent,
    versions,
)
from raffia.distributed.ray_orphans import unwatch, watch
from raffia.functional.exact import request_exact_products
from raffia.tensordict.tensordict import TensorDict

__all__ = ["ClusterLostError", "RayEngine", "VersionError"]

# Of a cluster that is started here: a machine that is silent is noticed after about 5 s, and one
# whose connections break after 2; by its defaults Ray takes a minute and 13 s. Of any other:
# `RAY_health_check_period_ms=500 ... ray start --head`.
HEALTH_CHECK = {
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 4,
}

SPARE_SECONDS = 0.5  # in which an idle actor answers, if it is there and has loaded

MISSING = (
    "engine.name=ray needs Ray, which is not installed: pip install 'raffia[scale]'; or use "
    "engine.name=process, for processes of this machine"
)


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
    spares: idle actors, of each kind of needs, that have imported the roles of `require` and wait
        for the next start, such as after the end of a worker that died.
    message: is given a line for the user where a worker waits for room, after 10 seconds and each
        minute; None: it goes to standard error. Such a worker is waited for, however long.

    Raises ModuleNotFoundError without the extra `scale`, ConnectionError if no cluster answers, and
    VersionError from `take` if a worker's machine has other versions. Where the cluster's head or
    Ray on this machine dies, the next call raises `ClusterLostError` within seconds.
    """

    def __init__(
        self,
        address: str = "",
        *,
        num_cpus: float | None = None,
        spares: int = 0,
        message: Callable[[str], None] | None = None,
    ) -> None:
        os.environ.setdefault("RAY_TQDM_PATCH_PRINT", "0")  # else Ray replaces builtins.print
        self._ray = ray = _ray()
        if ray.is_initialized():  # by the program: its cluster is used, and goes on
            self._is_ours = False
        else:
            self._is_ours = True
            options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
            if address:
                refuse_if_silent(address)
                options["address"] = address
            else:
                # "local": else Ray joins a cluster of this machine, or of RAY_ADDRESS.
                options |= {"address": "local", "include_dashboard": False, "num_cpus": num_cpus}
                options["_system_config"] = HEALTH_CHECK
                os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            try:
                with _same_sigterm():
                    ray.init(**options)
            except Exception as error:
                if not address:
                    raise
                raise silent(address, error) from error
        self._watcher = watch() if self._is_ours and not address else 0
        self._cluster = Cluster(
            ray, "" if not address and self._is_ours else address or "auto", message
        )
        self._actor = ray.remote(max_restarts=0, max_task_retries=0)(_Actor)
        self._workers: list[RayWorker] = []
        self.spares, self._roles = spares, list[str]()
        self._idle: dict[Needs, list[_Spare]] = {}  # no role was made of them yet

    @property
    def host(self) -> str:
        """The address of this machine that the cluster's machines can connect to."""
        return self._cluster.own_host

    def require(self, workers: Sequence[Workers]) -> None:
        """Raise ValueError if there is never room for all of them together, RoleError if a machine
        can't import a role, VersionError if one has other versions; in each case nothing has been
        started.
        """
        self._cluster.require()
        machines = [node["Resources"] for node in self._cluster.machines()]
        kinds = {one.needs: one for one in workers}.values() if self.spares else ()
        spares = [one._replace(role=SPARES, num=self.spares) for one in kinds]
        require_room(machines, [*workers, *spares])
        for role in {one.role: 0 for one in workers}:
            self._cluster.probe(role)
            if role not in self._roles:
                self._roles.append(role)

    def start(self, role: str, config: str, index: int, needs: Needs = ONE_CPU) -> RayWorker:
        """An actor of this role, on any machine that has room for it."""
        self._cluster.require()
        handle, group = self._ready_spare(needs) or self._start(needs)
        handle.make.remote(role, config, index)
        name = f"{role.rpartition(':')[2]} {index}"
        worker = RayWorker(self._cluster, handle, index, Room(self._cluster, group, name, needs))
        self._workers = [one for one in self._workers if not one.is_closed]
        self._workers.append(worker)
        idle = self._idle.setdefault(needs, [])
        while len(idle) < self.spares:
            idle.append(self._start(needs, self._roles))
        return worker

    def _start(self, needs: Needs, roles: Sequence[str] = ()) -> _Spare:
        """An actor without a role, that imports these, and its room."""
        takes = {"CPU": needs.cpus, "GPU": needs.gpus}
        group = self._ray.util.placement_group([{name: n for name, n in takes.items() if n}])
        handle = self._actor.options(
            num_cpus=needs.cpus,
            num_gpus=needs.gpus,
            scheduling_strategy=self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                group, 0
            ),
        ).remote(max(1, int(needs.cpus)), roles)
        return _Spare(handle, group)

    def _ready_spare(self, needs: Needs) -> _Spare | None:
        """A spare that answers; those that do not are ended, as a worker may need their room."""
        found = None
        for one in self._idle.pop(needs, []):
            if found is None and self._answers(one):
                found = one
            elif found is None:
                self._end(one)
            else:
                self._idle.setdefault(needs, []).append(one)
        return found

    def _answers(self, spare: _Spare) -> bool:
        try:
            self._ray.get(spare.handle.greeting.remote(), timeout=SPARE_SECONDS)
        except (self._ray.exceptions.RayError, self._ray.exceptions.GetTimeoutError):
            return False
        return True

    def _end(self, spare: _Spare) -> None:
        self._ray.kill(spare.handle)
        self._ray.util.remove_placement_group(spare.group)

    def put(self, weights: TensorDict) -> object:
        """The weights in the object store."""
        self._cluster.require()
        parts = parts_of(weights)  # a name, so that its leaves live
        # One by one, so that Ray copies them from where they are.
        arrays = [np.frombuffer(one, dtype=np.uint8) for one in parts.arrays]
        ref: object = self._ray.put([parts.record, *arrays])
        return ref

    def get(self, ref: Any) -> TensorDict:
        """A copy of the weights in the object store."""
        return _over(self._ray.get(ref)).clone()

    def drop(self, ref: Any) -> None:
        """Drop the weights: the store frees what nothing refers to any more."""

    def resources(self) -> str:
        """Describe the cluster's resources in one line."""
        return self._cluster.resources()

    def machines(self, role: str) -> list[Machine]:
        """The resources and versions of each machine, and why this role cannot run there, if so."""
        return list(self._cluster.look(role))

    def room_for(self, needs: Needs) -> int:
        """The number of workers with these needs that the cluster can run together if nothing else
        runs.
        """
        return num_that_fit([node["Resources"] for node in self._cluster.machines()], needs)

    def close(self) -> None:
        """End all workers, and the cluster if it was started here."""
        for worker in self._workers:
            worker.close()
        idle = [one for some in self._idle.values() for one in some]
        if idle and self._cluster.is_there():
            for one in idle:
                self._end(one)
        self._workers, self._idle = [], {}
        if self._is_ours:
            with _same_sigterm():
                self._ray.shutdown()
        if self._watcher:
            unwatch(self._watcher)
            self._watcher = 0


@contextlib.contextmanager
def _same_sigterm() -> Iterator[None]:
    """Keep the program's own handler of SIGTERM: Ray's would end a run that is to be saved."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


class _Spare(NamedTuple):
    """An actor of Ray's without a role, and the room that it has."""

    handle: Any
    group: Any


class RayWorker:
    """A worker that is an actor of a Ray cluster; see `RayEngine`."""

    def __init__(self, cluster: Cluster, handle: Any, index: int, room: Room) -> None:
        self._cluster, self._handle, self.index, self._room = cluster, handle, index, room
        self._ray = cluster.ray
        self._open: deque[Any] = deque()
        self._greeting: Any = handle.greeting.remote()
        self._pid: int | None = None
        self.is_closed = False

    @property
    def is_alive(self) -> bool:
        """Whether it was not closed: an actor that has ended is noticed where it is asked."""
        return not self.is_closed

    @property
    def pid(self) -> int:
        """The number of the actor's process on its machine; waits until it runs."""
        if self._pid is None:
            self._greet(60.0)
        assert self._pid is not None
        return self._pid

    def load(self, state: TensorDict) -> None:
        """Set the role's state before the next task."""
        self._cluster.require()
        self._handle.load.remote(np.frombuffer(pack(state), dtype=np.uint8))

    def ask(self, task: TensorDict, weights: Any = None) -> None:
        """Put the task behind those that are open."""
        self._cluster.require()
        name = "" if weights is None else weights.hex()
        data = np.frombuffer(pack(task), dtype=np.uint8)
        self._open.append(self._handle.do.remote(data, name, weights))

    def take(self, seconds: float) -> TensorDict:
        """The oldest answer; Lost if the actor dies or is silent for this long.

        Before that, however long it takes until a machine has room for the actor.
        """
        errors = self._ray.exceptions
        if not self._open:
            raise RuntimeError("no task is open: call ask before take")
        try:
            if self._pid is None:
                self._greet(seconds)
            answer = self._cluster.get(self._open[0], seconds)
        except errors.GetTimeoutError:
            self.close()
            raise Lost(
                f"worker {self.index} did not answer in {seconds:g} s, and was stopped"
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
        self._cluster.require()
        if self._ray.wait([self._open[0]], timeout=seconds)[0]:
            return True
        if self._pid is None:
            self._room.report()
        return False

    def _greet(self, seconds: float) -> None:
        self._room.wait()
        theirs, pid = self._cluster.get(self._greeting, seconds)
        self._cluster.compare(theirs, f"worker {self.index}")  # its machine may have come later
        self._pid = pid

    def close(self) -> None:
        """End the actor."""
        if not self.is_closed:
            self.is_closed = True
            self._open.clear()
            if self._cluster.is_there():  # else Ray would wait for its head, and end this process
                self._ray.kill(self._handle)
                self._room.leave()


class _Actor:
    """A role in a process of Ray's; errors of the role are answers."""

    def __init__(self, num_threads: int, roles: Sequence[str]) -> None:
        torch.set_num_threads(num_threads)
        request_exact_products()
        for name in roles:
            with contextlib.suppress(RoleError):  # raised when it is to be made
                find_role(name)
        self._host: RoleHost
        self._weights: tuple[str, TensorDict | None] = "", None

    def make(self, role: str, config: str, index: int) -> None:
        self._host = RoleHost(role, config, index)

    def greeting(self) -> tuple[dict[str, str], int]:
        return versions(), os.getpid()

    def load(self, data: Any) -> None:
        self._host.load(unpack(bytearray(memoryview(data))))

    def do(self, data: Any, name: str, weights: Any) -> npt.NDArray[np.uint8] | str:
        try:
            if name != self._weights[0]:
                self._weights = name, _over(weights) if name else None
            given = self._weights[1]
            answer = self._host.do(unpack(bytearray(memoryview(data))), given)
            if given is not None:
                _refuse_if_changed(given)
            return np.frombuffer(pack(answer), dtype=np.uint8)
        except Exception as error:
            return describe_error(error)


def _over(weights: list[Any]) -> TensorDict:
    """Weights over the object store's memory, which all workers of a machine share."""
    record, *arrays = weights
    return unpack_parts(record, [_writable(array) for array in arrays])


def _writable(array: Any) -> Any:
    """The memory of an array as torch takes it without a warning, though it is read-only."""
    memory = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    memory.owner = array  # keeps the object in the store
    return memory


def _refuse_if_changed(weights: TensorDict) -> None:
    for key, leaf in weights.items(True, True):
        if leaf._version:  # torch counts what is written
            raise RuntimeError(
                f"the role changed {key!r} of its weights, which all workers of this machine share:"
                " change a copy, weights.clone()"
            )
