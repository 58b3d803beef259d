"""Engines: where the parts of a run are computed. The contract, and the engine of this process.

A run's result does not depend on its engine. Three rules make that so. A task is a key and a pure
function of it: what it draws comes from the run's seed and the key, what weights it reads is named
by version. A worker's state follows from the tasks that it has done. Answers are taken in the order
of their keys, whenever they arrive.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from raffia.distributed.arrays import pack, unpack
from raffia.hints import error_text
from raffia.lazy import imported
from raffia.tensordict.tensordict import TensorDict

LOCALHOST = "127.0.0.1"
NUM_FRAMES = 5  # the innermost calls of a worker's traceback, which an error tells


class Lost(RuntimeError):
    """A worker ended, or does not answer: ask another worker for its open tasks.

    >>> raise Lost("worker 3 was killed by signal 9")
    Traceback (most recent call last):
    ...
    raffia.distributed.engine.Lost: worker 3 was killed by signal 9
    """


class RoleError(RuntimeError):
    """A role raised an error: asked again, the task would raise it again.

    >>> raise RoleError("ValueError: no such environment")
    Traceback (most recent call last):
    ...
    raffia.distributed.engine.RoleError: ValueError: no such environment
    """


class TaskError(RoleError):
    """A task of a `Pool` can't be done: its role raised, or each worker was lost at it.

    >>> raise TaskError("ActorRole 1, task 7: ValueError: no such environment")
    Traceback (most recent call last):
    ...
    raffia.distributed.engine.TaskError: ActorRole 1, task 7: ValueError: no such environment
    """


def describe_error(error: Exception) -> str:
    """An error in words for another process: its type, text and notes, and the lines it came from.

    >>> try:
    ...     raise ValueError("the motor is hot")
    ... except ValueError as error:
    ...     describe_error(error).splitlines()[:2]
    ['ValueError: the motor is hot', 'In the worker:']
    """
    lines = [one.rstrip() for one in traceback.format_tb(error.__traceback__)[-NUM_FRAMES:]]
    return "\n".join([error_text(error), "In the worker:", *lines])


class Role(Protocol):
    """The code that runs in a worker, made by `factory(config, index)` from JSON and the worker's
    number.

    A role draws from generators that it makes of the run's seed and the task's key, and keeps
    nothing that `load` and the tasks since do not give again.

    >>> class Double:
    ...     def load(self, state): pass
    ...     def do(self, task, weights):
    ...         return TensorDict(x=2 * task["x"])
    >>> import torch
    >>> Double().do(TensorDict(x=torch.tensor(3)), None)["x"]
    tensor(6)
    """

    def load(self, state: TensorDict) -> None:
        """Restore this state."""

    def do(self, task: TensorDict, weights: TensorDict | None) -> TensorDict:
        """Return the answer to a task; the task and the weights must not be changed."""


@dataclass(frozen=True)
class Needs:
    """The resources that a worker needs on its machine.

    >>> Needs(gpus=0.5).cpus
    1.0
    """

    cpus: float = 1.0
    gpus: float = 0.0


ONE_CPU = Needs()


class Workers(NamedTuple):
    """Workers that a run will start.

    >>> Workers("raffia.distributed.check_engine:Counter", 2).needs.cpus
    1.0
    """

    role: str
    num: int
    needs: Needs = ONE_CPU


class Machine(NamedTuple):
    """A machine of a cluster: its resources, and the versions that it runs.

    >>> Machine("10.0.0.1", {"CPU": 2.0, "memory": 2.0**33}, {"torch": "2.13.0"}).describe()
    '2 CPUs, 0 GPUs, 8.0 GiB of memory; torch 2.13.0'
    """

    name: str
    resources: dict[str, float]
    versions: dict[str, str]  # none: no worker can run there
    error: Exception | None = None  # why no worker of this program may

    def describe(self) -> str:
        """The machine's resources and versions on one line."""
        cpus, gpus = (f"{self.resources.get(kind, 0.0):g} {kind}s" for kind in ("CPU", "GPU"))
        memory = f"{self.resources.get('memory', 0.0) / 2**30:.1f} GiB of memory"
        runs = ", ".join(f"{name} {version}" for name, version in sorted(self.versions.items()))
        return f"{cpus}, {gpus}, {memory}; {runs or 'runs no workers'}"


class Worker(Protocol):
    """A role at work, in this process or another; tasks are done in the order in which they are
    asked for.

    >>> worker: Worker = InlineEngine().start("raffia.distributed.check_engine:Counter", "{}", 0)
    >>> worker.close()
    """

    @property
    def is_alive(self) -> bool:
        """Whether it is not known to have ended."""

    def load(self, state: TensorDict) -> None:
        """Set the role's state before the tasks that are requested from now on."""

    def ask(self, task: TensorDict, weights: Any = None) -> None:
        """Ask for a task; weights: what `Engine.put` gave."""

    def take(self, seconds: float) -> TensorDict:
        """The answer to the oldest open task, waited for.

        Raises Lost if the worker is gone or gives none within this time, after which it is ended,
        and RoleError if the role raised an error.
        """

    def poll(self, seconds: float) -> bool:
        """Wait so long at most; whether `take` would give an answer, or an error, at once."""

    def close(self) -> None:
        """End the worker; what is open is dropped."""


class Engine(Protocol):
    """Starts workers and gives them weights; `check_engine` tests an engine against this contract.

    >>> engine: Engine = InlineEngine()
    >>> engine.close()
    """

    @property
    def host(self) -> str:
        """The address of this machine that workers can connect to."""

    def require(self, workers: Sequence[Workers]) -> None:
        """Raise an error for workers that can never run, before any is started.

        Raises ValueError where there never is room for all of them at once, and RoleError for a
        role that can't be imported where they would be.
        """

    def start(self, role: str, config: str, index: int, needs: Needs = ONE_CPU) -> Worker:
        """A worker of this role.

        role: an importable factory, "package.module:name", of (config, index).
        config: JSON that the factory reads.
        """

    def put(self, weights: TensorDict) -> object:
        """Publish the present weights once, for any worker's `ask`."""

    def resources(self) -> str:
        """Describe the resources for workers in one line."""

    def machines(self, role: str) -> Sequence[Machine]:
        """The machines of a cluster, and why this role can't run there; none where all workers are
        on this machine.
        """

    def room_for(self, needs: Needs) -> int:
        """The number of workers with these needs that can run together if nothing else runs."""

    def get(self, ref: Any) -> TensorDict:
        """A copy of the weights that were put, for this process."""

    def drop(self, ref: Any) -> None:
        """Free weights that no open task names, and none will any more: what a role still holds of
        them may change."""

    def close(self) -> None:
        """End all workers, and free all weights."""


def find_role(role: str) -> Callable[[str, int], Role]:
    """The factory that a role's name stands for; RoleError says what is wrong with the name.

    >>> find_role("raffia.distributed.check_engine:Counter").__name__
    'Counter'
    >>> find_role("raffia.distributed")
    Traceback (most recent call last):
    ...
    raffia.distributed.engine.RoleError: role='raffia.distributed' must have the form
    "package.module:name"
    """
    module, _, name = role.partition(":")
    if not module or not name:
        raise RoleError(f'role={role!r} must have the form "package.module:name"')
    try:
        found: Callable[[str, int], Role] = imported(role)
    except Exception as error:
        raise RoleError(
            f"the role {role!r} cannot be imported: {type(error).__name__}: {error}. Workers "
            "import it by this name: install its package, or set PYTHONPATH, wherever they run"
        ) from error
    return found


def make_role(role: str, config: str, index: int) -> Role:
    """Make the role of this name; raise RoleError if it cannot be imported.

    >>> make_role("raffia.distributed.check_engine:Counter", "{}", 0).total
    0
    """
    return find_role(role)(config, index)


class RoleHost:
    """A role in the process of a worker, made when it is first needed.

    A state that can't be loaded is the error of each task, until another is.

    >>> host = RoleHost("raffia.distributed.check_engine:Echo", "{}", 0)
    >>> host.do(TensorDict(), None).is_empty()
    True
    """

    def __init__(self, role: str, config: str, index: int) -> None:
        self._made_of = role, config, index
        self._role: Role | None = None
        self._failed = ""

    def _made(self) -> Role:
        if self._role is None:
            self._role = make_role(*self._made_of)
        return self._role

    def load(self, state: TensorDict) -> None:
        """Load a state."""
        try:
            self._made().load(state)
            self._failed = ""
        except Exception as error:
            self._failed = f"its state could not be loaded: {describe_error(error)}"

    def do(self, task: TensorDict, weights: TensorDict | None) -> TensorDict:
        """Return the role's answer, or raise its error."""
        if self._failed:
            raise RuntimeError(self._failed)
        return self._made().do(task, weights)

    def close(self) -> None:
        """Close the role, if it was made and can be closed."""
        if close := getattr(self._role, "close", None):
            close()


class InlineEngine:
    """Workers in this process: each task is done when its answer is taken.

    The engine that all others are compared with. Weights and answers are copied as between
    processes, so that nothing is shared that could not be elsewhere.

    >>> engine = InlineEngine()
    >>> worker = engine.start("raffia.distributed.check_engine:Counter", "{}", 0)
    >>> import torch
    >>> worker.ask(TensorDict(add=torch.tensor(5)))
    >>> worker.take(1.0)["total"]
    tensor(5)
    """

    host = LOCALHOST

    def require(self, workers: Sequence[Workers]) -> None:
        """Accept any number of workers, since all are in this process."""
        for one in workers:
            find_role(one.role)

    def start(self, role: str, config: str, index: int, needs: Needs = ONE_CPU) -> Worker:
        """A role in this process."""
        return InlineWorker(make_role(role, config, index))

    def put(self, weights: TensorDict) -> TensorDict:
        """A copy of the weights."""
        return unpack(pack(weights))

    def resources(self) -> str:
        """Describe this process."""
        return "this process"

    def machines(self, role: str) -> Sequence[Machine]:
        """No machines: there is no cluster."""
        return ()

    def room_for(self, needs: Needs) -> int:
        """One worker: tasks are done one after the other."""
        return 1

    def get(self, ref: TensorDict) -> TensorDict:
        """Another copy of the weights."""
        return ref.clone()

    def drop(self, ref: TensorDict) -> None:
        """Free nothing but memory, which Python does by itself."""

    def close(self) -> None:
        """Stop nothing: no process is running."""


class InlineWorker:
    """A worker in this process; see `InlineEngine`."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._open: deque[tuple[str, TensorDict, TensorDict | None]] = deque()
        self._is_closed = False

    @property
    def is_alive(self) -> bool:
        """Whether it was not closed."""
        return not self._is_closed

    def load(self, state: TensorDict) -> None:
        """Set the role's state before the next task."""
        self._open.append(("load", unpack(pack(state)), None))

    def ask(self, task: TensorDict, weights: TensorDict | None = None) -> None:
        """Put the task behind those that are open."""
        if self._is_closed:
            raise Lost("the worker was closed")
        self._open.append(("do", unpack(pack(task)), weights))

    def take(self, seconds: float) -> TensorDict:
        """Do the oldest task now."""
        if self._is_closed:
            raise Lost("the worker was closed")
        while self._open:
            kind, given, weights = self._open.popleft()
            try:
                if kind == "do":
                    return unpack(pack(self._role.do(given, weights)))
                self._role.load(given)
            except Exception as error:
                raise RoleError(describe_error(error)) from error
        raise RuntimeError("no task is open: call ask before take")

    def poll(self, seconds: float) -> bool:
        """True: the task is done when its answer is taken."""
        return True

    def close(self) -> None:
        """Drop what is open."""
        self._open.clear()
        self._is_closed = True
        if close := getattr(self._role, "close", None):
            close()
