"""Workers in processes of this machine: forked from a server that has torch loaded already.

Messages and arrays go through a pipe, weights through shared memory, once for all workers. A worker
whose leader is gone leaves by itself.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.util import Finalize
from typing import Any, cast

import torch

from raffia.distributed.arrays import pack, parts_of, unpack, walk
from raffia.distributed.engine import (
    LOCALHOST,
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
from raffia.functional.exact import request_exact_products
from raffia.interrupts import ignore_terminal, interrupts_deferred
from raffia.tensordict.tensordict import TensorDict

# The first byte of a message; before a task stand the length and the name of its weights.
MAKE, LOAD, TASK, END, ANSWER, ERROR = b"M", b"L", b"T", b"Q", b"A", b"E"
NUM_WRITTEN = 1000  # parts at once: Linux takes 1,024
IS_A_FILE = sys.platform == "linux"  # whether shared memory can be written like one
NUM_STARTS = 3  # attempts to start a process
PAUSE = 2.0  # seconds before a spare loads, that whoever was started with it may load first


class ProcessEngine:
    """Workers in processes of this machine.

    A program that starts one is imported by its workers: what it runs stands under
    `if __name__ == "__main__":`.

    spares: processes that have imported the roles of `require` already and wait for the next
        start, such as after the end of a worker that died.

    >>> import torch
    >>> engine = ProcessEngine()
    >>> worker = engine.start("raffia.distributed.check_engine:Counter", "{}", 0)
    >>> worker.ask(TensorDict(add=torch.tensor(5)))
    >>> worker.take(60.0)["total"]
    tensor(5)
    >>> engine.close()
    """

    host = LOCALHOST

    def __init__(self, spares: int = 0) -> None:
        if "forkserver" not in multiprocessing.get_all_start_methods():
            raise OSError(
                f"workers in processes of this machine need Linux or macOS, and this is "
                f'{sys.platform}: leave engine.name at "inline"'
            )
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["raffia.distributed.process"])
        self.spares, self._roles = spares, list[str]()
        self._idle: list[ProcessWorker] = []  # no role was made of them yet
        self._workers: list[ProcessWorker] = []
        self._weights: dict[str, _Weights] = {}
        self._dropped: dict[str, _Weights] = {}  # the last that were, to be written over
        args = self._weights, self._dropped
        self._finalize = Finalize(self, _free, args=args, exitpriority=5)

    def require(self, workers: Sequence[Workers]) -> None:
        """Accept any number of workers: processes share the resources of this machine."""
        for one in workers:
            find_role(one.role)
            if one.role not in self._roles:
                self._roles.append(one.role)

    def start(self, role: str, config: str, index: int, needs: Needs = ONE_CPU) -> ProcessWorker:
        """A process with this role; what is wrong with the role comes with its first answer."""
        self._idle = [one for one in self._idle if one.is_alive]
        worker = self._idle.pop(0) if self._idle else ProcessWorker(self._context)
        worker.make(role, config, index, needs)
        self._workers = [one for one in self._workers if one.is_alive]
        self._workers.append(worker)
        while len(self._idle) < self.spares:
            self._idle.append(ProcessWorker(self._context, self._roles))
        return worker

    def put(self, weights: TensorDict) -> str:
        """The weights in shared memory; its name.

        Weights of the same form that were dropped before are written over: their memory is there,
        and workers have it mapped already.
        """
        if self._dropped:
            name, dropped = self._dropped.popitem()
            if dropped.overwrite(weights):
                self._weights[name] = dropped
                return name
            dropped.free()
        parts = parts_of(weights)
        size = sum([len(part) for part in parts.data])
        memory = SharedMemory(create=True, size=size)
        self._weights[memory.name] = _Weights(memory, parts.form)
        try:
            # On Linux as to a file: through a map, each new page costs more, and a page that there
            # is no room for would end this process.
            if IS_A_FILE:
                _write(memory._fd, parts.data)  # type: ignore[attr-defined]
            else:
                cast(memoryview, memory.buf)[:size] = b"".join(parts.data)
        except OSError as error:
            self._weights.pop(memory.name).free()
            raise MemoryError(
                f"shared memory has no room for weights of {size / 2**20:.0f} MiB beside "
                f"{len(self._weights)} other versions: give it more (docker run --shm-size), or "
                "lower actors.ahead, reanalyzers.ahead and evaluators.join_after"
            ) from error
        return memory.name

    def resources(self) -> str:
        """This machine's processors."""
        return f"processes of this machine, which has {os.cpu_count()} processors"

    def machines(self, role: str) -> Sequence[Machine]:
        """No machines: there is no cluster."""
        return ()

    def room_for(self, needs: Needs) -> int:
        """The number of workers that get processors of their own among those of this process."""
        bound = hasattr(os, "sched_getaffinity")
        num_cores = len(os.sched_getaffinity(0)) if bound else os.cpu_count() or 1
        return int(num_cores / needs.cpus)

    def get(self, ref: str) -> TensorDict:
        """A copy of these weights."""
        return unpack(bytearray(cast(memoryview, self._weights[ref].memory.buf)))

    def drop(self, ref: str) -> None:
        """Free these weights, or have the next ones written over them."""
        dropped = self._weights.pop(ref)
        _free(self._dropped)
        self._dropped[ref] = dropped

    def close(self) -> None:
        """End all workers and free all weights."""
        for worker in [*self._workers, *self._idle]:
            worker.close()
        self._workers, self._idle = [], []
        _free(self._weights, self._dropped)


class _Weights:
    """Weights in shared memory.

    form: what `walk` says of them.
    """

    def __init__(self, memory: SharedMemory, form: list[Any]) -> None:
        self.memory, self._form = memory, form
        self._leaves: list[torch.Tensor] = []  # over the memory, once they are needed

    @torch.no_grad()
    def overwrite(self, weights: TensorDict) -> bool:
        """Copy weights of the same form there; False if their form is another."""
        form, leaves = walk(weights)
        if form != self._form:
            return False
        if not self._leaves:
            file = self.memory._fd  # type: ignore[attr-defined]
            self._leaves = walk(unpack(mmap.mmap(file, self.memory.size)))[1]
        torch._foreach_copy_(self._leaves, leaves)
        return True

    def free(self) -> None:
        """Free the memory once nobody has it mapped."""
        self.memory.close()
        self.memory.unlink()


def _free(*several: dict[str, _Weights]) -> None:
    for weights in several:
        while weights:
            weights.popitem()[1].free()


def _write(file: int, parts: list[Any]) -> None:
    """Write parts one behind the other; OSError where there is no room."""
    first = 0
    while first < len(parts):
        written = os.writev(file, parts[first : first + NUM_WRITTEN])
        while first < len(parts) and written >= len(parts[first]):
            written -= len(parts[first])
            first += 1
        if written:
            parts[first] = memoryview(parts[first])[written:]


class ProcessWorker:
    """A worker in another process of this machine; see `ProcessEngine`.

    roles: what it imports before it gets a role.
    """

    def __init__(self, context: Any, roles: Sequence[str] = ()) -> None:
        self.index = -1
        self._connection, self._process = _started(context, roles)
        self._finalize = Finalize(
            self, _end, args=(self._connection, self._process), exitpriority=10
        )

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return bool(self._process.is_alive())

    @property
    def pid(self) -> int:
        """The number of the process."""
        found: int = self._process.pid
        return found

    def make(self, role: str, config: str, index: int, needs: Needs) -> None:
        """Make the role in the worker."""
        self.index = index
        made_of = json.dumps([role, config, index, needs.cpus])
        try:
            self._send(MAKE, bytearray(b" " + made_of.encode()))
        except Lost:
            pass  # found out, with its last words, by whoever asks

    def load(self, state: TensorDict) -> None:
        """Set the role's state before the next task."""
        self._send(LOAD, pack(state, room=1))

    def ask(self, task: TensorDict, weights: str | None = None) -> None:
        """Put the task behind those that are open."""
        name = (weights or "").encode()
        data = pack(task, room=2 + len(name))
        data[1] = len(name)
        data[2 : 2 + len(name)] = name
        self._send(TASK, data)

    def _send(self, kind: bytes, data: bytearray) -> None:
        data[:1] = kind
        try:
            self._connection.send_bytes(data)
        except OSError:
            raise Lost(self._last_words()) from None

    def take(self, seconds: float) -> TensorDict:
        """The oldest answer; Lost if the process ends or is silent for this long."""
        try:
            if not wait([self._connection], seconds):
                self._process.kill()
                raise Lost(f"worker {self.index} did not answer in {seconds:g} s, and was stopped")
            data = self._connection.recv_bytes()
        except (EOFError, OSError):
            raise Lost(self._last_words()) from None
        if data[:1] == ERROR:
            raise RoleError(data[1:].decode())
        return unpack(bytearray(data), room=1)

    def poll(self, seconds: float) -> bool:
        """Wait for an answer, or for the end of the process."""
        return bool(wait([self._connection], seconds))

    def _last_words(self) -> str:
        self._process.join(5)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"worker {self.index} was stopped by {signal.Signals(-code).name}"
        return (
            f"worker {self.index} ended with exit status {code}; what it printed is above. A "
            "script must be a file, and its start must be under if __name__ == '__main__':"
        )

    def close(self) -> None:
        """End the process."""
        self._finalize()


def _started(context: Any, roles: Sequence[str]) -> tuple[Connection, Any]:
    """A process and the pipe to it; others, if the server that forks it is killed meanwhile."""
    for _ in range(NUM_STARTS):
        connection, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, roles), name="raffia worker")
        # Ctrl-C must not end the server that is started here, while it loads.
        with theirs, interrupts_deferred():
            try:
                process.start()
                return connection, process
            except (EOFError, ConnectionError):
                connection.close()  # one that was forked nevertheless leaves
                time.sleep(0.1)  # until the end of the server is noticed
    raise Lost(
        f"a worker could not be started: the process that forks workers ended {NUM_STARTS} times "
        "meanwhile. If it was stopped for lack of memory, use fewer workers"
    )


def _end(connection: Connection, process: Any) -> None:
    """Ask the process to leave; end it if it does not."""
    try:
        connection.send_bytes(END)
    except OSError:
        pass  # it has left already
    connection.close()
    process.join(2)
    if process.is_alive():
        process.kill()
        process.join()


# -- in the worker


def _serve(connection: Connection, roles: Sequence[str]) -> None:
    """Do tasks until asked to leave, or until the leader is gone."""
    ignore_terminal()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    request_exact_products()
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    # Read at any time, so that a leader that asks never waits for a worker that answers.
    threading.Thread(target=_read, args=(connection, messages), daemon=True).start()
    _wait(messages, PAUSE if roles else 0.0)
    for name in roles:
        with contextlib.suppress(RoleError):  # raised when it is to be made
            find_role(name)
    host = RoleHost("", "", 0)  # a spare may be asked to leave before it gets a role
    weights: tuple[str, TensorDict | None] = "", None
    while (data := messages.get())[:1] != END:
        try:
            if data[:1] == MAKE:
                *made_of, cpus = json.loads(data[1:])
                host = RoleHost(*made_of)
                torch.set_num_threads(max(1, int(cpus)))
                continue
            if data[:1] == LOAD:
                host.load(unpack(bytearray(data), room=1))
                continue
            length = data[1]
            name = data[2 : 2 + length].decode()
            if name != weights[0]:
                weights = name, _attached(name) if name else None
            answer = host.do(unpack(bytearray(data), room=2 + length), weights[1])
            packed = pack(answer, room=1)
            packed[:1] = ANSWER
        except Exception as error:
            packed = bytearray(ERROR + describe_error(error).encode())
        try:
            connection.send_bytes(packed)
        except OSError:
            os._exit(0)  # the leader is gone, or has closed its end: as in `_read`
    host.close()


def _wait(messages: queue.SimpleQueue[bytes], seconds: float) -> None:
    """Wait, if nothing has come yet."""
    until = time.monotonic() + seconds
    while messages.empty() and time.monotonic() < until:
        time.sleep(0.01)


def _read(connection: Connection, messages: queue.SimpleQueue[bytes]) -> None:
    while True:
        try:
            messages.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)  # the leader is gone, or has closed its end


def _attached(name: str) -> TensorDict:
    """The weights of this name, over the shared memory; what is written to is copied first."""
    memory = SharedMemory(name=name)
    try:
        # It lives as long as a tensor over it, also when the leader has freed its name.
        file = memory._fd  # type: ignore[attr-defined]
        return unpack(mmap.mmap(file, memory.size, mmap.MAP_PRIVATE))
    finally:
        memory.close()
