"""The state of a Ray cluster: whether it answers, its room, and what its machines run."""

from __future__ import annotations

import platform
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from raffia._version import __version__
from raffia.distributed.engine import LOCALHOST, Machine, Needs, RoleError, Workers, find_role
from raffia.distributed.group import address_towards

LOOK = 0.25  # seconds between two looks at whether the cluster is there, while waiting
SILENT = 3.0  # seconds without an answer after which the cluster is gone
FIRST_MESSAGE = 10.0  # seconds of waiting for room until it is reported
MESSAGE_EVERY = 60.0  # seconds until it is reported again
SPARES = "of spares"  # instead of a role, of workers that wait for one
PROBE_SECONDS = 120.0  # in which a machine answers what it runs: it loads torch first


class VersionError(RuntimeError):
    """A machine of the cluster has another raffia, torch or Python than this one.

    >>> raise VersionError("worker 0 has torch 2.12.0, and this process 2.13.0")
    Traceback (most recent call last):
    ...
    raffia.distributed.ray_cluster.VersionError: worker 0 has torch 2.12.0, and this process 2.13.0
    """


class ClusterLostError(ConnectionError):
    """The head of the Ray cluster is gone, or Ray on this machine: no worker can be reached.

    >>> raise ClusterLostError("the Ray cluster at 10.0.0.1:6379 is gone")
    Traceback (most recent call last):
    ...
    raffia.distributed.ray_cluster.ClusterLostError: the Ray cluster at 10.0.0.1:6379 is gone
    """


PROCESSOR = "processor"  # may differ, and only the last bits of results depend on it


def versions() -> dict[str, str]:
    """The versions that must be equal on all machines of a cluster, and the kind of processor.

    >>> sorted(versions())
    ['processor', 'python', 'raffia', 'torch']
    """
    python = ".".join(map(str, sys.version_info[:3]))
    theirs = {"python": python, "raffia": __version__, "torch": torch.__version__}
    return {**theirs, PROCESSOR: _processor()}


def _processor() -> str:
    """The maker of the processor, and the instructions that torch uses of it."""
    try:
        maker = re.search(r"^vendor_id\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:  # not Linux
        maker = None
    name = maker[1] if maker else platform.machine()
    return f"{name} {torch.backends.cpu.get_cpu_capability()}"


def require_versions(theirs: dict[str, str], who: str) -> None:
    """Raise VersionError unless these versions equal those of this process.

    >>> require_versions({**versions(), "torch": "1.0"}, "worker 0")
    Traceback (most recent call last):
    ...
    raffia.distributed.ray_cluster.VersionError: worker 0 of the Ray cluster has torch 1.0 (here
    ...
    """
    ours = versions()
    if differ := [name for name in ours if ours[name] != theirs.get(name) and name != PROCESSOR]:
        others = ", ".join(f"{name} {theirs[name]} (here {ours[name]})" for name in differ)
        raise VersionError(
            f"{who} of the Ray cluster has {others}: install the same versions on all machines, "
            "because results would otherwise depend on which machine computes them"
        )


def require_room(machines: Sequence[dict[str, float]], workers: Sequence[Workers]) -> None:
    """Raise ValueError if machines with these CPUs and GPUs never have room for all workers
    together.

    >>> two = [{"CPU": 2.0}, {"CPU": 2.0}]
    >>> require_room(two, [Workers("a:B", 4, Needs(cpus=1.0))])
    >>> require_room(two, [Workers("a:B", 1, Needs(cpus=3.0))])
    Traceback (most recent call last):
    ...
    ValueError: 1 workers of 3 CPUs each (B) do not fit into the Ray cluster, whose machines have 2
    CPUs; 2 CPUs: use fewer, give each less, or add machines
    """
    left = [dict(machine) for machine in machines]
    for role, num, needs in sorted(workers, key=lambda one: (-one.needs.gpus, -one.needs.cpus)):
        takes = _takes(needs)
        for _ in range(num):
            fits = (m for m in left if all(m.get(k, 0.0) + 1e-6 >= n for k, n in takes.items()))
            machine = next(fits, None)
            if machine is None:
                kinds = ("CPU", "GPU") if needs.gpus else ("CPU",)
                spares = (
                    " (also for engine.spares)"
                    if any(one.role == SPARES for one in workers)
                    else ""
                )
                have = [" and ".join(f"{m.get(k, 0.0):g} {k}s" for k in kinds) for m in machines]
                raise ValueError(
                    f"{num} workers of {_several(takes)} each ({role.rpartition(':')[2]}) do not "
                    f"fit into the Ray cluster, whose machines have {'; '.join(have) or 'none'}: "
                    f"use fewer{spares}, give each less, or add machines"
                )
            for name, number in takes.items():
                machine[name] -= number


def num_that_fit(machines: Sequence[dict[str, float]], needs: Needs) -> int:
    """How many workers with such needs machines of so many CPUs and GPUs have room for at once.

    >>> num_that_fit([{"CPU": 5.0, "GPU": 2.0}, {"CPU": 8.0}], Needs(cpus=2.0))
    6
    >>> num_that_fit([{"CPU": 5.0, "GPU": 2.0}, {"CPU": 8.0}], Needs(cpus=1.0, gpus=1.0))
    2
    """
    takes = _takes(needs)
    each = [[int((m.get(kind, 0.0) + 1e-6) / n) for kind, n in takes.items()] for m in machines]
    return sum([min(counts) for counts in each])


def _takes(needs: Needs) -> dict[str, float]:
    return {name: n for name, n in (("CPU", needs.cpus), ("GPU", needs.gpus)) if n}


def _several(takes: dict[str, float]) -> str:
    return " and ".join(f"{number:g} {name}s" for name, number in takes.items())


class Cluster:
    """A Ray cluster: whether it answers, and its resources.

    ray: the package, connected to it.
    address: as it was given; "": one of this machine, which needs no look at other machines.
    """

    def __init__(self, ray: Any, address: str, message: Callable[[str], None] | None) -> None:
        self.ray, self.message = ray, message or _print
        self.is_lost, self.is_of_this_machine = False, not address
        self._answered_at = 0.0
        self._probed: set[tuple[str, str]] = set()  # machines and roles
        self._processors = list[str]()  # other kinds that were reported
        if address.startswith("ray://"):  # the rest may not be reached from here
            self.address = address.removeprefix("ray://")
            self._doors = [_door(self.address)]
            return
        context = ray.get_runtime_context()
        self.address = context.gcs_address
        self._doors = [_door(self.address)]
        for node in ray.nodes():  # Ray ends this process when it is called without its raylet
            if node["NodeID"] == context.get_node_id():
                self._doors.append((node["NodeManagerAddress"], node["NodeManagerPort"]))

    def require(self) -> None:
        """Return if the cluster answers; raises ClusterLostError after some silent seconds."""
        if not self.is_lost and time.monotonic() - self._answered_at < LOOK / 5:
            return
        began = time.monotonic()
        while True:
            try:
                for door in self._doors:
                    socket.create_connection(door, timeout=SILENT).close()
            except OSError as error:
                if self.is_lost or time.monotonic() - began >= SILENT:
                    self.is_lost = True
                    raise ClusterLostError(
                        f"the Ray cluster at {self.address} is gone: its head, or Ray on this "
                        f"machine, has not answered for {SILENT:g} s ({error}). Start a cluster "
                        "again; `raffia resume RUN` continues there, with --engine.address if its "
                        "address differs"
                    ) from None
                time.sleep(LOOK)
            else:
                self._answered_at = time.monotonic()
                return

    @property
    def own_host(self) -> str:
        """The address of this machine by which it reaches the cluster's head."""
        return LOCALHOST if self.is_of_this_machine else address_towards(self._doors[0][0])

    def is_there(self) -> bool:
        """Whether the cluster answers now."""
        self._answered_at = 0.0
        try:
            self.require()
        except ClusterLostError:
            return False
        return True

    def get(self, ref: Any, seconds: float) -> Any:
        """Like `ray.get`, for as long as the cluster answers."""
        until = time.monotonic() + seconds
        while True:
            self.require()
            left = until - time.monotonic()
            try:
                return self.ray.get(ref, timeout=max(0.0, min(LOOK, left)))
            except self.ray.exceptions.GetTimeoutError:
                if left <= LOOK:
                    raise

    def machines(self) -> list[dict[str, Any]]:
        """The machines of the cluster that are alive, as Ray describes them."""
        return [node for node in self.ray.nodes() if node["Alive"]]

    def resources(self) -> str:
        """Describe the cluster's resources in one line."""
        whole, free = self.ray.cluster_resources(), self.ray.available_resources()
        num = len(self.machines())
        return (
            f"{num} machine{'s' if num > 1 else ''}, {free.get('CPU', 0):g} of "
            f"{whole.get('CPU', 0):g} processors and {free.get('GPU', 0):g} of "
            f"{whole.get('GPU', 0):g} GPUs free"
        )

    def probe(self, role: str) -> None:
        """Make each machine report its versions and import a role, before anything else is done.

        Raises VersionError, or RoleError for a role that is not there or a machine without raffia.
        """
        if self.is_of_this_machine:
            find_role(role)
            return
        for machine in self.look(role):
            if machine.error is not None:
                raise machine.error
            if machine.versions:  # else no worker can run there
                self.compare(machine.versions, f"the machine {machine.name}")

    def look(self, role: str) -> Iterator[Machine]:
        """Each machine that was not asked for this role yet, with what it runs."""
        at = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        task = self.ray.remote(num_cpus=0, max_retries=0)(_look)
        asked = {}
        for node in self.machines():
            key = node["NodeID"], role
            if key not in self._probed:
                where = task.options(scheduling_strategy=at(key[0], False))
                has_room = bool(node["Resources"].get("CPU"))
                asked[key] = node, where.remote(role) if has_room else None
        for key, (node, ref) in asked.items():
            found = Machine(node["NodeManagerAddress"], node["Resources"], {})
            if ref is not None:
                found = self._answer(found, ref)
            if found.error is None:
                self._probed.add(key)
            yield found

    def compare(self, theirs: dict[str, str], who: str) -> None:
        """Raise VersionError for other versions; report a kind of processor once."""
        require_versions(theirs, who)
        kind, ours = theirs[PROCESSOR], _processor()
        if kind not in (ours, *self._processors):
            self._processors.append(kind)
            self.message(
                f"note: {who} of the Ray cluster has another kind of processor, {kind} (here "
                f"{ours}), so that the last bits of results depend on which machine computes them"
            )

    def _answer(self, machine: Machine, ref: Any) -> Machine:
        """The machine with what it answered, or why it can't be used."""
        name = f"the machine {machine.name}"
        try:
            theirs, missing = self.get(ref, PROBE_SECONDS)
        except self.ray.exceptions.GetTimeoutError:
            return machine._replace(
                error=RoleError(
                    f"{name} of the Ray cluster did not answer in {PROBE_SECONDS:g} s: check that "
                    "raffia starts there (`raffia doctor`), or remove it from the cluster"
                )
            )
        except self.ray.exceptions.RayError as error:
            last = str(error).strip().splitlines()[-1]
            text = f"{name} of the Ray cluster cannot run raffia {__version__}: {last}"
            return machine._replace(error=RoleError(text))
        machine = machine._replace(versions=theirs)
        try:
            require_versions(theirs, name)
        except VersionError as error:
            return machine._replace(error=error)
        if missing:
            return machine._replace(error=RoleError(f"{name} of the Ray cluster: {missing}"))
        return machine


def _look(role: str) -> tuple[dict[str, str], str]:
    """Report, on a machine of the cluster, its versions and what is wrong with a role there."""
    try:
        find_role(role)
    except RoleError as error:
        return versions(), str(error)
    return versions(), ""


class Room:
    """A worker's part of a machine, which may have to be waited for."""

    def __init__(self, cluster: Cluster, group: Any, name: str, needs: Needs) -> None:
        self._cluster, self._group, self._name, self._needs = cluster, group, name, needs
        self._began = time.monotonic()
        self._next_message = self._began + FIRST_MESSAGE

    def wait(self) -> None:
        """Wait until the cluster answers, however long, and report the waiting now and then."""
        while not self._group.wait(1):  # whole seconds: Ray leaves out the rest
            self._cluster.require()
            self.report()

    def report(self) -> None:
        """Report that it is waited for, if that was not reported for a while."""
        now = time.monotonic()
        if now < self._next_message or self._group.wait(1):  # with 0 Ray may not look
            return
        self._next_message = now + MESSAGE_EVERY
        self._cluster.message(
            f"{self._name} has waited {now - self._began:.0f} s for room: "
            f"{_several(_takes(self._needs))}, on one machine of the Ray cluster at "
            f"{self._cluster.address} ({self._cluster.resources()}). It continues when there is "
            f"room: `ray start --address={self._cluster.address}` adds a machine"
        )

    def leave(self) -> None:
        """Release the resources that were reserved on the cluster."""
        self._cluster.ray.util.remove_placement_group(self._group)


def refuse_if_silent(address: str) -> None:
    """Raise ConnectionError if nothing answers at an address; Ray would try for two minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError as error:
            raise silent(address, error) from None


def silent(address: str, error: Exception) -> Exception:
    """The error of a cluster that cannot be joined."""
    if "ersion mismatch" in str(error):  # of Ray or Python, which Ray compares
        text = " ".join(str(error).split())
        return VersionError(f"the Ray cluster at {address} has other versions: {text}")
    return ConnectionError(
        f"no Ray cluster answers at {address}: start one with `ray start --head`, set "
        "RAY_AUTH_MODE=token if this one asks for a token, or leave engine.address out for one of "
        f"this machine ({error})"
    )


def _door(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
