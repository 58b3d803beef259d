"""The contract of engines as checks that anyone's engine can be put through."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from raffia.distributed.engine import Engine, Lost, Needs, RoleError, Worker, Workers
from raffia.distributed.pool import Pool
from raffia.tensordict.tensordict import TensorDict

COUNTER = f"{__name__}:Counter"
LEAVE_SECONDS = 10.0  # in which the processes of an engine that was closed are gone
SERVERS = b"multiprocessing.forkserver", b"multiprocessing.resource_tracker"


class Counter:
    """A role that adds up: tasks {"add"}, answers {"total", "index", "weight"}; for checks.

    A task with "fail" raises, one with "sleep" takes so many seconds.
    """

    def __init__(self, config: str, index: int) -> None:
        self.index = index
        self.total = int(json.loads(config).get("start", 0))

    def load(self, state: TensorDict) -> None:
        """Set the sum up to now."""
        self.total = int(state["total"])

    def do(self, task: TensorDict, weights: TensorDict | None) -> TensorDict:
        """Add, and answer with the sum."""
        if "fail" in task.keys():
            raise ValueError("this task fails")
        if "sleep" in task.keys():
            time.sleep(float(task["sleep"]))
        self.total += int(task["add"])
        weight = torch.tensor(0.0) if weights is None else weights["w"].sum()
        return TensorDict(
            total=torch.tensor(self.total), index=torch.tensor(self.index), weight=weight
        )


def check_engine(make: Callable[[], Engine], kill: Callable[[Worker], None] | None = None) -> None:
    """Put an engine through the contract; AssertionError says what does not hold.

    make: a new engine.
    kill: ends a worker from outside as an accident would; None: that is not tried.

    Processes are counted before and after, where the system tells of them as Linux does.

    >>> from raffia.distributed.engine import InlineEngine
    >>> check_engine(InlineEngine)
    """
    if not __debug__:
        raise RuntimeError("check_engine checks by assert, which python -O leaves out: run without")
    before, during = processes_below(), dict[int, str]()
    engine = make()
    try:
        _there_is_room(engine)
        engine.require([Workers(COUNTER, 1)])
        _what_is_not_there_is_refused(engine)
        _answers_come_in_order(engine)
        _weights_are_those_of_the_version(engine)
        _what_is_given_is_copied(engine)
        _errors_are_distinguished(engine)
        _an_answer_can_be_waited_for(engine)
        _empty_trees_travel(engine)
        if kill is not None:
            _a_killed_worker_is_lost(engine, kill)
            _a_pool_goes_on(engine, kill)
        engine.start(COUNTER, "{}", 0).ask(_add(1))  # closed with the engine, whatever it does
        during = processes_below()
    finally:
        engine.close()
    _nothing_is_left(before, during)


def processes_below() -> dict[int, str]:
    """The processes that this one has started, and those that they have, with their commands.

    Without the two servers that `multiprocessing` keeps until its program ends.

    >>> isinstance(processes_below(), dict)
    True
    """
    parents, commands = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        try:
            parent, command = _parent_of(pid), (folder / "cmdline").read_bytes()
        except OSError:
            continue
        parents[pid], commands[pid] = parent, command
    below, newest = set[int](), {os.getpid()}
    while newest:
        newest = {pid for pid, parent in parents.items() if parent in newest}
        below |= newest
    return {
        pid: commands[pid].replace(b"\0", b" ").decode(errors="replace")
        for pid in below
        if parents[pid] != os.getpid() or not any(name in commands[pid] for name in SERVERS)
    }


def _nothing_is_left(before: dict[int, str], during: dict[int, str]) -> None:
    """Check that all processes that the engine started have ended, orphans too."""
    until = time.monotonic() + LEAVE_SECONDS
    while True:
        left = [
            command
            for pid, command in {**during, **processes_below()}.items()
            if pid not in before and _runs(pid)
        ]
        if not left:
            return
        assert time.monotonic() < until, (
            f"a closed engine must leave no process behind, but it left {left}"
        )
        time.sleep(0.05)


def _parent_of(pid: int) -> int:
    """The parent of a process; OSError if it has ended."""
    state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    if state == "Z":
        raise ProcessLookupError(pid)
    return int(parent)


def _runs(pid: int) -> bool:
    try:
        _parent_of(pid)
    except OSError:
        return False
    return True


def _there_is_room(engine: Engine) -> None:
    assert engine.resources(), "an engine says what resources its workers have"
    one, two = engine.room_for(Needs(cpus=1.0)), engine.room_for(Needs(cpus=2.0))
    assert one >= max(1, two), f"there is room for {one} workers of one CPU, and {two} of two"
    for machine in engine.machines(COUNTER):
        assert machine.error is None, f"{machine.name}: {machine.error}"


def _what_is_not_there_is_refused(engine: Engine) -> None:
    try:
        engine.require([Workers(f"{__name__}:Nobody", 1)])
    except RoleError as error:
        assert "Nobody" in str(error), "the error names the role that cannot be imported"
    else:
        raise AssertionError("a role that cannot be imported is refused before a worker starts")


def _add(number: int) -> TensorDict:
    return TensorDict(add=torch.tensor(number))


def _answers_come_in_order(engine: Engine) -> None:
    workers = [engine.start(COUNTER, '{"start": 10}', index) for index in range(2)]
    for number in (1, 2, 3):
        for worker in workers:
            worker.ask(_add(number))
    for total in (11, 13, 16):
        for index, worker in enumerate(workers):
            found = worker.take(60.0)
            assert int(found["total"]) == total, (
                "tasks are done in the order in which they were asked for"
            )
            assert int(found["index"]) == index, "a worker knows its own index"
    workers[0].load(TensorDict(total=torch.tensor(100)))
    workers[0].ask(_add(1))
    assert int(workers[0].take(60.0)["total"]) == 101, (
        "a load is done before the tasks that follow it"
    )
    for worker in workers:
        worker.close()


def _weights_are_those_of_the_version(engine: Engine) -> None:
    worker = engine.start(COUNTER, "{}", 0)
    weights = TensorDict(w=torch.tensor([1.0, 2.0]))
    old = engine.put(weights)
    weights["w"].fill_(50.0)  # what was put stays as it was
    new = engine.put(weights)
    for ref in (old, new, old):
        worker.ask(_add(0), ref)
    found = [float(worker.take(60.0)["weight"]) for _ in range(3)]
    assert found == [3.0, 100.0, 3.0], f"a task reads the weights that it names; got {found}"
    given = engine.get(old)["w"]
    assert given.tolist() == [1.0, 2.0], f"weights that were put can be read again; got {given}"
    given.fill_(7.0)
    worker.ask(_add(0), old)
    assert float(worker.take(60.0)["weight"]) == 3.0, "what get gives is a copy"
    engine.drop(old)
    worker.ask(_add(0), new)
    assert float(worker.take(60.0)["weight"]) == 100.0, "dropping one version keeps the others"
    worker.close()


def _what_is_given_is_copied(engine: Engine) -> None:
    worker, task = engine.start(COUNTER, "{}", 0), _add(1)
    worker.ask(task)
    task["add"].fill_(1000)
    assert int(worker.take(60.0)["total"]) == 1, (
        "a task has the values that it had when it was asked for"
    )
    worker.close()


def _errors_are_distinguished(engine: Engine) -> None:
    worker = engine.start(COUNTER, "{}", 0)
    worker.ask(_add(1).set("fail", torch.tensor(True)))
    worker.ask(_add(2))
    try:
        worker.take(60.0)
    except RoleError as error:
        assert "ValueError: this task fails" in str(error), "the role's error is reported"
    else:
        raise AssertionError("a role's error comes as a RoleError")
    assert int(worker.take(60.0)["total"]) == 2, "a worker continues after an error of its role"
    worker.close()


def _an_answer_can_be_waited_for(engine: Engine) -> None:
    worker = engine.start(COUNTER, "{}", 0)
    worker.ask(_add(1).set("sleep", torch.tensor(0.2)))
    while not worker.poll(5.0):
        pass
    assert int(worker.take(60.0)["total"]) == 1, "an answer that was waited for is available"
    worker.close()


def _empty_trees_travel(engine: Engine) -> None:
    worker = engine.start(f"{__name__}:Echo", "{}", 0)
    tree = TensorDict(a=TensorDict(batch_size=[2]), b=torch.empty(0, 3), c=torch.tensor(True))
    worker.ask(tree)
    found = worker.take(60.0)
    assert found["a"].batch_size == torch.Size([2]) and found["b"].shape == (0, 3)
    assert bool(found["c"]), "trees arrive unchanged"
    worker.close()


class Echo:
    """A role that answers with its task; for checks."""

    def __init__(self, config: str, index: int) -> None:
        pass

    def load(self, state: TensorDict) -> None:
        """Load nothing: this role has no state."""

    def do(self, task: TensorDict, weights: TensorDict | None) -> TensorDict:
        """The task."""
        return task


class MeanLearner:
    """A learner whose parameter moves to where the data are; for checks.

    >>> learner = MeanLearner("{}", 0)
    >>> batch = TensorDict(x=torch.arange(4.0), batch_size=[4])
    >>> learner.grads(learner.init(0), batch)[0]["grads", "w"]
    tensor(-1.5000)
    """

    applies_shards = True

    def __init__(self, config: str, index: int) -> None:
        pass

    def init(self, seed: int) -> TensorDict:
        """An initial state without any random draw."""
        return TensorDict(params=TensorDict(w=torch.zeros(())), buffers=TensorDict())

    def grads(self, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, TensorDict]:
        """The gradients of half the squared distance."""
        error = state["params", "w"] - batch["x"]
        update = TensorDict(grads=TensorDict(w=error.mean()), buffers=state["buffers"])
        return update, TensorDict(loss=error.square().mean() / 2, priority=error.abs())

    def apply(self, state: TensorDict, update: TensorDict) -> TensorDict:
        """A step of the whole gradient."""
        return state.replace(params=state["params"] - update["grads"])


def _a_killed_worker_is_lost(engine: Engine, kill: Callable[[Worker], None]) -> None:
    worker = engine.start(COUNTER, "{}", 0)
    worker.ask(_add(1))
    worker.take(60.0)
    worker.ask(_add(1).set("sleep", torch.tensor(30.0)))
    kill(worker)
    began = time.monotonic()
    try:
        worker.take(60.0)
    except Lost:
        assert time.monotonic() - began < 20, "a death is noticed before the time limit"
    else:
        raise AssertionError("a worker that was killed is Lost")
    worker.close()


def _a_pool_goes_on(engine: Engine, kill: Callable[[Worker], None]) -> None:
    totals = {0: 0, 1: 0}
    pool = Pool(
        engine, COUNTER, "{}", 2,
        state_of=lambda index: TensorDict(total=torch.tensor(totals[index])),
    )  # fmt: skip
    for first in (0, 3):
        for key in range(first, first + 3):
            for worker in (0, 1):
                pool.ask(worker, key, _add(key))
        for key in range(first, first + 3):
            for worker in (0, 1):
                totals[worker] = int(pool.take(worker, key)["total"])
                assert totals[worker] == sum(range(key + 1)), (
                    "a lost worker does not change the answers"
                )
        if first == 0:
            found = pool.worker(1)
            assert found is not None
            kill(found)
    assert pool.num_restarts == 1
    pool.close()
