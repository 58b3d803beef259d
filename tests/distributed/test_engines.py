"""Engines keep the contract, and a pool continues whatever happens to its workers."""

import builtins
import errno
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from raffia.distributed import (
    Board,
    ChaosEngine,
    InlineEngine,
    Lost,
    Needs,
    Pool,
    ProcessEngine,
    RoleError,
    Workers,
    check_engine,
    process,
    ray_cluster,
)
from raffia.distributed import ray as ray_engine
from raffia.distributed.arrays import pack, parts_of, unpack
from raffia.distributed.check_engine import COUNTER
from raffia.distributed.process import END, _serve
from raffia.distributed.ray import RayEngine, VersionError
from raffia.distributed.ray_cluster import (
    Cluster,
    Room,
    require_room,
    require_versions,
    silent,
    versions,
)
from raffia.tensordict.tensordict import TensorDict
from raffia.train.signals import stop_on_signals
from tests.processes import descendants, environment, wait_for


def weights_of(number):
    return TensorDict(w=torch.tensor([float(number)]))


def test_a_version_is_a_copy_of_the_learners_weights():
    board, weights = Board(InlineEngine()), weights_of(1)
    board.publish(2, weights)
    weights["w"].add_(1)
    assert board.ref(2)["w"].tolist() == [1.0]


def kill(worker):
    os.kill(worker.pid, signal.SIGKILL)


def add(number):
    return TensorDict(add=torch.tensor(number))


def test_the_contract_is_kept_in_this_process():
    check_engine(InlineEngine)
    check_engine(partial(ChaosEngine, 3, lost=0.0, wasted=0.0))


@pytest.mark.slow
def test_the_contract_is_kept_by_processes():
    check_engine(ProcessEngine, kill)


def test_the_contract_is_kept_by_processes_with_spares():
    check_engine(partial(ProcessEngine, spares=1), kill)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("spares", [0, 1])
def test_the_contract_is_kept_by_ray(spares):
    check_engine(partial(RayEngine, num_cpus=4, spares=spares), kill)


def answer_of(worker):
    worker.ask(add(1))
    return int(worker.take(60.0)["total"])


def test_a_spare_that_never_got_a_role_leaves_without_an_error():
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, ()))
    process.start()
    ours.send_bytes(END)  # and the connection stays open
    process.join(60)
    assert process.exitcode == 0


def test_a_spare_becomes_the_next_started_worker():
    with closing(ProcessEngine(spares=1)) as engine:
        engine.require([Workers(COUNTER, 1)])
        first = engine.start(COUNTER, "{}", 0)
        (idle,) = engine._idle
        kill(first)
        second = engine.start(COUNTER, '{"start": 5}', 3)
        assert second is idle and second.index == 3 and answer_of(second) == 6
        (idle,) = engine._idle
        kill(idle)  # one that has died is none
        idle._process.join()
        third = engine.start(COUNTER, "{}", 0)
        assert third is not idle and answer_of(third) == 1
        (idle,) = engine._idle
    assert not idle.is_alive


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_spare_of_ray_becomes_the_next_started_worker():
    with closing(RayEngine(num_cpus=2, spares=1)) as engine:
        engine.require([Workers(COUNTER, 1)])
        with pytest.raises(ValueError, match="engine.spares"):
            engine.require([Workers(COUNTER, 2)])
        first = engine.start(COUNTER, "{}", 0)
        assert answer_of(first) == 1
        ((idle,),) = engine._idle.values()
        pid = engine._ray.get(idle.handle.greeting.remote())[1]
        kill(first)
        second = engine.start(COUNTER, '{"start": 5}', 3)
        assert second.pid == pid and answer_of(second) == 6


class Broken(InlineEngine):
    """Engines that break the contract."""

    def __init__(self, defect):
        self.defect, self.processes = defect, []

    def start(self, *arguments):
        worker = super().start(*arguments)
        ask = worker.ask
        if self.defect == "last in, first out":
            worker.ask = lambda *task: (ask(*task), worker._open.rotate(1))
        if self.defect == "leaves a process":
            command = [sys.executable, "-c", "import time; time.sleep(60)"]
            self.processes.append(subprocess.Popen(command))
        if self.defect == "newest weights":
            worker.ask = lambda task, ref=None: ask(task, None if ref is None else self.newest)
        return worker

    def put(self, weights):
        self.newest = weights if self.defect == "no copy" else super().put(weights)
        return self.newest

    def room_for(self, needs):
        return 0 if self.defect == "no room" else super().room_for(needs)


BROKEN = {
    "last in, first out": "tasks are done in the order in which they were asked",
    "newest weights": "a task reads the weights that it names",
    "no copy": "a task reads the weights that it names",
    "no room": "room for 0 workers",
    "leaves a process": "a closed engine must leave no process behind, but it left .*sleep",
}


@pytest.mark.parametrize("defect", BROKEN)
def test_engines_that_break_the_contract_are_found(defect, monkeypatch):
    monkeypatch.setattr(sys.modules["raffia.distributed.check_engine"], "LEAVE_SECONDS", 0.1)
    made = []

    def make():
        made.append(Broken(defect))
        return made[-1]

    try:
        with pytest.raises(AssertionError, match=BROKEN[defect]):
            check_engine(make)
    finally:
        for process in made[0].processes:
            process.kill()
            process.wait()


# ------------------------------------------------------------------------------------- pools


def sums(engine, num_tasks=12, num_open=4):
    """The answers of two workers that add up; each gets its sum back when it is lost."""
    totals, found, num_asked = [0, 0], [], 0
    states = {"state_of": lambda worker: TensorDict(total=torch.tensor(totals[worker]))}
    pool = Pool(engine, COUNTER, "{}", 2, **states, max_restarts=100)
    for key in range(num_tasks):
        while num_asked < min(num_tasks, key + num_open):
            for worker in (0, 1):
                pool.ask(worker, num_asked, add(num_asked * (worker + 1)))
            num_asked += 1
        for worker in (0, 1):
            totals[worker] = int(pool.take(worker, key)["total"])
        found.append(tuple(totals))
    pool.close()
    return found, pool.num_restarts


def test_late_lost_and_dead_workers_change_no_answer():
    expected, _ = sums(InlineEngine())
    assert expected[-1] == (66, 132)
    num_lost = 0
    for seed in range(100):
        engine = ChaosEngine(seed, lost=0.15, wasted=0.15)
        assert sums(engine) == (expected, engine.num_lost)
        num_lost += engine.num_lost
    assert num_lost > 300


def test_a_pool_that_forgets_the_state_would_be_noticed():
    engine = ChaosEngine(1, lost=0.3)
    pool = Pool(engine, COUNTER, "{}", 1, max_restarts=100)
    found = []
    for key in range(9):
        pool.ask(0, key, add(1))
        found.append(int(pool.take(0, key)["total"]))
    assert engine.num_lost and found != list(range(1, 10))


def test_a_worker_that_is_lost_too_often_is_an_error():
    pool = Pool(ChaosEngine(0, lost=1.0), COUNTER, "{}", 1, max_restarts=2)
    pool.ask(0, 7, add(1))
    with pytest.raises(RoleError, match=r"Counter was lost 3 times at task 7.*: worker 0 is gone"):
        pool.take(0, 7)


def test_tasks_are_answered_in_the_order_of_their_keys():
    pool = Pool(InlineEngine(), COUNTER, "{}", 1)
    pool.ask(0, 4, add(1))
    with pytest.raises(ValueError, match="asked for after task 4, but keys must increase"):
        pool.ask(0, 4, add(1))
    pool.ask(0, 5, add(1))
    with pytest.raises(ValueError, match="task 5 is not its oldest open task"):
        pool.take(0, 5)
    with pytest.raises(ValueError, match="num_workers=0 must be at least 1"):
        Pool(InlineEngine(), COUNTER, "{}", 0)


@pytest.mark.parametrize("make", [InlineEngine, ProcessEngine])
def test_a_role_s_error_names_the_task_and_the_line(make):
    message = r"(?s)^Counter 1, task 3: ValueError: this task fails\n.*check_engine.py\", line \d+"
    with closing(make()) as engine:
        pool = Pool(engine, COUNTER, "{}", 2)
        pool.ask(1, 3, add(1).set("fail", torch.tensor(True)))
        with pytest.raises(RoleError, match=message):
            pool.take(1, 3)


def test_versions_are_saved_and_loaded_as_a_state():
    board, other = Board(InlineEngine()), Board(InlineEngine())
    for version in (3, 5, 8):
        board.publish(version, weights_of(version))
    board.drop_below(5)
    other.publish(1, weights_of(1))
    other.load_state(board.state())
    assert other.versions == [5, 8] and other.ref(8)["w"].tolist() == [8.0]
    with pytest.raises(KeyError, match=r"3 of the weights is not available, only \[5, 8\]"):
        other.ref(3)
    other.clear()
    assert other.versions == []


# --------------------------------------------------------------------------------- processes


def test_weights_arrive_where_shared_memory_is_no_file(monkeypatch):
    monkeypatch.setattr(process, "IS_A_FILE", False)
    monkeypatch.setattr(process, "_write", None)
    tree = TensorDict({str(at): torch.arange(at) for at in range(5)})
    with closing(ProcessEngine()) as engine:
        found = engine.get(engine.put(tree))
    assert all(found[key].equal(value) for key, value in tree.items())


def test_weights_that_are_written_in_parts_arrive_complete(monkeypatch):
    """A system call may write only a part of its data."""
    tree = TensorDict({str(at): torch.arange(at) for at in range(5)})
    with closing(ProcessEngine()) as engine:
        writev = os.writev
        monkeypatch.setattr(os, "writev", lambda file, parts: writev(file, [b"".join(parts)[:13]]))
        found = engine.get(engine.put(tree))
    assert all(found[key].equal(value) for key, value in tree.items())


def test_new_weights_reuse_the_memory_of_dropped_ones_of_the_same_form():
    weights = TensorDict(w=torch.ones(3), empty=TensorDict(x=torch.zeros(0)))
    with closing(ProcessEngine()) as engine:
        worker = engine.start(COUNTER, "{}", 0)

        def weight_of(ref):
            worker.ask(TensorDict(add=torch.tensor(1)), ref)
            return float(worker.take(60.0)["weight"])

        stored, first = engine.put(weights), engine.put(weights * 2)
        assert weight_of(first) == 6.0
        engine.drop(first)
        turned = TensorDict(w=torch.arange(6.0).view(3, 2)[:, 1], empty=weights["empty"])
        second = engine.put(turned)  # strided: its numbers are copied, not its memory
        assert second == first and weight_of(second) == 9.0 and weight_of(stored) == 3.0
        assert engine.get(second)["w"].tolist() == [1.0, 3.0, 5.0]
        for other in (TensorDict(w=torch.ones(4)), TensorDict(w=torch.ones(3).double())):
            engine.drop(second)
            second, before = engine.put(other), second
            assert second != before and weight_of(second) == other["w"].sum()
            assert not Path("/dev/shm", before).exists()  # its memory is free
        engine.drop(second)
    assert not Path("/dev/shm", second).exists()


def test_full_shared_memory_is_a_clear_error(monkeypatch):
    def full(file, parts):
        raise OSError(errno.ENOSPC, "No space left on device")

    with closing(ProcessEngine()) as engine:
        monkeypatch.setattr(os, "writev", full)
        with pytest.raises(MemoryError, match="no room for weights of 0 MiB beside 0 other"):
            engine.put(TensorDict(w=torch.zeros(2)))


def test_a_worker_that_hangs_is_ended():
    engine = ProcessEngine()
    worker = engine.start(COUNTER, "{}", 0)
    worker.ask(add(1))
    assert worker.take(60.0)["total"] == 1
    worker.ask(add(1).set("sleep", torch.tensor(60.0)))
    with pytest.raises(Lost, match="worker 0 did not answer in 0.2 s, and was stopped"):
        worker.take(0.2)
    with pytest.raises(Lost, match="worker 0 was stopped by SIGKILL"):
        worker.take(60.0)
    engine.close()


@pytest.mark.parametrize("num_killed", [2, 3])
def test_a_worker_is_forked_again_if_the_server_that_forks_is_killed(num_killed, monkeypatch):
    read, calls = forkserver.read_signed, []

    def read_of_killed(file):
        calls.append(file)
        if len(calls) <= num_killed:
            raise EOFError
        return read(file)

    monkeypatch.setattr(forkserver, "read_signed", read_of_killed)
    with closing(ProcessEngine()) as engine:
        if num_killed == 3:
            with pytest.raises(Lost, match="forks workers ended 3 times .* use fewer workers"):
                engine.start(COUNTER, "{}", 0)
        else:
            assert answer_of(engine.start(COUNTER, "{}", 0)) == 1


def test_an_unknown_role_is_refused():
    engine = ProcessEngine()
    with pytest.raises(RoleError, match=r"nowhere:Role' cannot be imported: ModuleNotFoundError"):
        Pool(engine, "raffia.distributed.nowhere:Role", "{}", 1)
    worker = engine.start("raffia.distributed.nowhere:Role", "{}", 0)
    worker.ask(add(1))
    with pytest.raises(RoleError, match="ModuleNotFoundError: .*raffia.distributed.nowhere"):
        worker.take(60.0)
    worker = engine.start(COUNTER, "{}", 0)
    worker.load(TensorDict())
    worker.ask(add(1))
    with pytest.raises(RoleError, match="its state could not be loaded: .*total"):
        worker.take(60.0)
    engine.close()


def test_large_messages_in_both_directions_do_not_deadlock():
    """A pipe holds 64 kB: a leader that sends while its worker sends must not wait for ever."""
    engine = ProcessEngine()
    worker = engine.start("raffia.distributed.check_engine:Echo", "{}", 0)
    for number in range(6):
        worker.ask(TensorDict(x=torch.full((1_000_000,), float(number))))
    for number in range(6):
        assert worker.take(60.0)["x"][-1] == number
    engine.close()


LEADER = """
import os, time, torch
from raffia.distributed import ProcessEngine
from raffia.distributed.check_engine import COUNTER
from raffia.distributed.ray import RayEngine
from raffia.tensordict.tensordict import TensorDict

if __name__ == "__main__":
    engine = ENGINE
    ref = engine.put(TensorDict(w=torch.ones(10)))
    workers = [engine.start(COUNTER, "{}", index) for index in range(2)]
    for worker in workers:
        worker.ask(TensorDict(add=torch.tensor(1)), ref)
        worker.take(60.0)
    workers[0].ask(TensorDict(add=torch.tensor(1), sleep=torch.tensor(60.0)))
    idle = engine._idle if isinstance(engine, ProcessEngine) else []
    print(ref, *[worker.pid for worker in [*workers, *idle]], flush=True)
    time.sleep(60)
"""


def is_gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split()[2] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


# Ray: two agents of its raylet have other names, and would try for a minute to reach its
# head; a program of ours ends them.
NAMES = {"ProcessEngine": {"python"}, "RayEngine": {"raylet", "ray::DashboardA", "ray::RuntimeEnv"}}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["ProcessEngine(spares=1)", "RayEngine(num_cpus=2)"])
def test_workers_leave_when_their_leader_is_killed(engine, tmp_path):
    program = tmp_path / "leader.py"
    program.write_text(LEADER.replace("ENGINE", engine))
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # short: Ray's sockets lie in it
        leader = subprocess.Popen(
            [sys.executable, program],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"RAY_TMPDIR": folder},
        )
        memory, *pids = leader.stdout.readline().split()
        time.sleep(1.0)  # a process that was just started is listed by now
        others = descendants(leader.pid)
        names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in others}
        assert set(map(int, pids)) <= set(others) and len(others) >= 5
        assert NAMES[engine.partition("(")[0]] <= set(names.values())
        leader.kill()
        leader.wait()
        leader.stdout.close()
        # The idle worker, the busy one, and Ray's own processes.
        wait_for(lambda: all(map(is_gone, others)) and not os.path.exists(f"/dev/shm/{memory}"), 10)


def workers(num, cpus, gpus=0.0):
    return Workers("a:Role", num, Needs(cpus=cpus, gpus=gpus))


INTERRUPTED = """
import os, signal
from functools import partial
from raffia.distributed import ProcessEngine
from raffia.envs import GymEnv, WorkerBatch

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)  # from before the worker loads until it has
    START
    signal.setitimer(signal.ITIMER_REAL, 0)
"""
OF_ENGINE = 'ProcessEngine().start("raffia.distributed.check_engine:Counter", "{}", 0).poll(2)'
OF_ENVIRONMENTS = 'WorkerBatch([partial(GymEnv, "CartPole-v1")], 1).close()'


@pytest.mark.slow
@pytest.mark.parametrize("start", [OF_ENGINE, OF_ENVIRONMENTS], ids=["engine", "environments"])
def test_ctrl_c_is_the_leader_s_also_while_workers_load(start, tmp_path):
    program = tmp_path / "leader.py"
    program.write_text(INTERRUPTED.replace("START", start))
    done = subprocess.run(
        [sys.executable, program],
        capture_output=True,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


ENDS_EARLY = """
import time, torch
from raffia.distributed import ProcessEngine
from raffia.tensordict.tensordict import TensorDict

if __name__ == "__main__":
    engine = ProcessEngine()
    for number in range(12):
        worker = engine.start("raffia.distributed.check_engine:Echo", "{}", number)
        for _ in range(2):
            worker.ask(TensorDict(x=torch.zeros(8_000_000)))
        worker.take(60.0)
        worker.poll(60.0)  # the second answer is on its way, and larger than a pipe
        worker.close()
    engine.close()
"""


@pytest.mark.slow
def test_an_unread_answer_is_no_error(tmp_path):
    program = tmp_path / "leader.py"
    program.write_text(ENDS_EARLY)
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=110)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


# --------------------------------------------------------------------------------------- ray


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'raffia\[scale\]'"):
        RayEngine()


class Doubler:
    """A role that doubles its weights: a copy of them, or these."""

    def __init__(self, config, index):
        pass

    def do(self, task, weights):
        w = weights["a", "w"]
        return TensorDict(w=w.mul_(2) if task["add"] else w * 2)


def test_a_role_on_ray_that_changes_its_weights_is_refused(monkeypatch):
    """They are the object store's memory, which all workers of a machine share."""
    monkeypatch.setattr(
        "raffia.distributed.engine.make_role", lambda role, config, index: Doubler(config, index)
    )
    actor = ray_engine._Actor(torch.get_num_threads(), [])
    actor.make("Doubler", "{}", 0)
    parts = parts_of(TensorDict(a=TensorDict(w=torch.tensor([1.0, 2.0]), none=torch.empty(0))))
    stored = [parts.record, *(np.frombuffer(one, np.uint8) for one in parts.arrays)]
    stored[1].flags.writeable = False  # as Ray gives it
    for _ in range(2):
        answer = actor.do(pack(add(0)), "first", stored)
        assert unpack(bytearray(answer))["w"].tolist() == [2.0, 4.0]
    answer = actor.do(pack(add(1)), "first", stored)
    assert "the role changed ('a', 'w') of its weights" in answer and "weights.clone()" in answer


def test_an_address_that_does_not_answer_is_an_error_soon():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ConnectionError, match=f"no Ray cluster answers at {address}: start one"):
        RayEngine(address)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_signals_are_the_program_s_while_ray_runs_and_after():
    with stop_on_signals() as stop:
        with closing(RayEngine(num_cpus=1)):
            signal.raise_signal(signal.SIGTERM)
            assert stop.name == "SIGTERM"
        with pytest.raises(SystemExit, match="143"):
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cluster_without_room_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # of another cluster, which is not asked for
    before = print
    engine = RayEngine(num_cpus=1)
    try:
        assert builtins.print is before  # which Ray replaces, if it is let
        Pool(engine, COUNTER, "{}", 2, needs=Needs(cpus=0.5))
        with pytest.raises(
            ValueError, match=r"2 workers of 1 CPUs each \(Counter\) do not fit .* have 1 CPUs: "
        ):
            Pool(engine, COUNTER, "{}", 2, needs=Needs(cpus=1.0))
        with pytest.raises(ValueError, match=r"1 workers of 1 CPUs and 0.5 GPUs each"):
            Pool(engine, COUNTER, "{}", 1, needs=Needs(gpus=0.5))
    finally:
        engine.close()


@pytest.mark.parametrize(
    "too_much",
    [
        [workers(1, 5.0)],
        [workers(2, 3.0)],
        [workers(1, 1.0, 2.0)],
        [workers(6, 1.0), workers(1, 0.5)],
        [workers(3, 0.1, 0.5)],
    ],
)
def test_room_is_counted_for_each_machine(too_much):
    machines = [{"CPU": 2.0}, {"CPU": 4.0, "GPU": 1.0}]
    require_room(machines, [workers(3, 1.0), workers(2, 0.5, 0.5), workers(1, 2.0)])
    require_room(machines, [workers(1, 4.0), workers(1, 2.0)])
    with pytest.raises(ValueError, match="do not fit into the Ray cluster, whose machines"):
        require_room(machines, too_much)
    with pytest.raises(ValueError, match="whose machines have none"):
        require_room([], too_much)


def test_a_worker_that_has_room_is_not_reported_to_wait_for_it(monkeypatch):
    monkeypatch.setattr(ray_cluster, "FIRST_MESSAGE", -1.0)
    lines = []
    cluster = SimpleNamespace(message=lines.append, address="head:1", resources=lambda: "none free")
    for has_room in (True, False):
        # As Ray's, which with 0 seconds says of a group with room now and then that it has none.
        group = SimpleNamespace(wait=lambda seconds, has_room=has_room: has_room and seconds > 0)
        Room(cluster, group, "Role 0", Needs()).report()
        assert len(lines) == (not has_room)
    assert "Role 0 has waited 0 s for room: 1 CPUs" in lines[0]


def test_versions_of_a_cluster_are_compared():
    assert versions()["torch"] == torch.__version__
    for name in ("raffia", "torch", "python"):
        with pytest.raises(VersionError, match=rf"worker 3 of .* has {name} 0.1 \(here"):
            require_versions({**versions(), name: "0.1"}, "worker 3")
    lines = []
    cluster = SimpleNamespace(_processors=[], message=lines.append)
    for kind in ("ARM DEFAULT", versions()["processor"], "ARM DEFAULT"):
        Cluster.compare(cluster, {**versions(), "processor": kind}, "worker 3")
    assert len(lines) == 1 and "another kind of processor, ARM DEFAULT (here" in lines[0]
    mismatch = RuntimeError("Version mismatch: The cluster was started with:\n    Python: 3.8.0")
    assert isinstance(silent("head:1", mismatch), VersionError)
    assert "Python: 3.8.0" in str(silent("head:1", mismatch))
