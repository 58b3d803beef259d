"""The environment factories here can be imported in any process: Raffia's and Gymnasium's."""

import os
import signal
import subprocess
import sys
import time
from functools import partial

import gymnasium
import pytest
import torch

from raffia.envs.batch import SerialBatch
from raffia.envs.config import EnvConfig
from raffia.envs.env import BatchEnv
from raffia.envs.gym import GymEnv
from raffia.envs.make import make_env
from raffia.envs.probe import PolicyProbe
from raffia.envs.workers import WorkerBatch, WorkerError
from tests.processes import are_gone, living, wait_for

CARTPOLE = partial(GymEnv, "CartPole-v1")
PENDULUM = partial(GymEnv, "Pendulum-v1", max_episode_steps=5)


@pytest.fixture
def workers():
    """Makes batches, and closes them after the test."""
    made = []

    def make(*args, **options):
        made.append(WorkerBatch(*args, **options))
        return made[-1]

    yield make
    for batch in made:
        batch.close()


def processes(batch):
    return [worker.process for worker in batch._workers]


def same(one, other):
    return set(one.keys()) == set(other.keys()) and all(
        torch.equal(one[key], other[key]) and one[key].dtype == other[key].dtype
        for key in one.keys()
    )


def actions_for(spec, num, generator):
    if spec.action.shape:
        return torch.rand(num, *spec.action.shape, generator=generator) * 2 - 1
    return torch.randint(spec.action.n, (num,), generator=generator)


def play(one, other, num_steps, generator, then=lambda step: None):
    """Both get the same seeds, actions and rows, and must give the same outputs."""
    num, seed = one.num_envs, one.num_envs
    assert same(one.reset(torch.arange(num)), other.reset(torch.arange(num)))
    for step in range(num_steps):
        rows = torch.randperm(num, generator=generator)[: num - step % 2]
        actions = actions_for(one.spec, len(rows), generator)
        then(step)
        mine, theirs = one.step(actions, rows), other.step(actions, rows)
        assert same(mine, theirs)
        ended = rows[mine["terminated"] | mine["truncated"]]
        seeds = torch.arange(len(ended)) + seed
        seed += len(ended)
        assert same(one.reset(seeds, ended), other.reset(seeds, ended))


@pytest.mark.parametrize(("make", "num_workers"), [(CARTPOLE, 2), (PENDULUM, 1), (PolicyProbe, 5)])
def test_outputs_equal_those_of_one_process_bit_for_bit(workers, make, num_workers):
    batch = workers([make] * 5, num_workers)
    assert isinstance(batch, BatchEnv) and batch.num_envs == 5
    generator = torch.Generator().manual_seed(3)
    play(batch, SerialBatch([make() for _ in range(5)]), 30, generator)


@pytest.mark.parametrize("make", [CARTPOLE, PENDULUM])
def test_killed_workers_are_replaced_without_changing_any_output(workers, make):
    warnings = []
    batch = workers([make] * 5, 2, warn=warnings.append)

    def kill(step):
        if step % 7 == 3:
            process = processes(batch)[step // 7 % 2]
            os.kill(process.pid, signal.SIGKILL)
            process.join()

    play(batch, SerialBatch([make() for _ in range(5)]), 24, torch.Generator().manual_seed(1), kill)
    assert batch.num_restarts == len(warnings) == 3
    assert warnings[0] == (
        "worker 0 (rows 0..1) died, killed by SIGKILL; it is started again and replays its episodes"
    )


def test_a_worker_that_dies_in_the_midst_of_a_step_is_replaced(workers):
    batch, serial = workers([CARTPOLE] * 4, 2), SerialBatch([CARTPOLE() for _ in range(4)])
    for each in (batch, serial):
        each.reset(torch.arange(4))
    process = processes(batch)[1]
    os.kill(process.pid, signal.SIGSTOP)  # it has the message, and dies of it
    command = f"sleep 0.2; kill -KILL {process.pid}"
    with subprocess.Popen(["sh", "-c", command]):
        assert same(batch.step(torch.ones(4, dtype=int)), serial.step(torch.ones(4, dtype=int)))
    assert batch.num_restarts == 1


@pytest.mark.parametrize("make", [CARTPOLE, PENDULUM])
def test_a_fast_forward_gives_the_same_rows_even_if_workers_die(workers, make):
    batch, serial = workers([make] * 5, 2), SerialBatch([make() for _ in range(5)])
    generator = torch.Generator().manual_seed(1)
    lengths, seeds, rows = (4, 0, 3, 1), torch.arange(4), torch.tensor([0, 4, 2, 1])
    played = [actions_for(batch.spec, num, generator) for num in lengths]
    for each in (serial, batch):
        each.reset(torch.tensor([9]), torch.tensor([3]))
    serial.fast_forward(seeds, played, rows)
    before, amidst = processes(batch)
    os.kill(before.pid, signal.SIGKILL)
    os.kill(amidst.pid, signal.SIGSTOP)  # it has the message, and dies of it
    with subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -KILL {amidst.pid}"]):
        batch.fast_forward(seeds, played, rows)
    assert batch.num_restarts == 2
    last = actions_for(batch.spec, 5, generator)
    assert same(batch.step(last), serial.step(last))
    os.kill(processes(batch)[0].pid, signal.SIGKILL)  # unreturned steps are replayed, too
    rows = torch.tensor([1, 3])
    assert same(batch.step(last[rows], rows), serial.step(last[rows], rows))


def test_an_unexpected_end_in_a_fast_forward_names_its_row(workers):
    batch, serial = workers([PENDULUM] * 3, 2), SerialBatch([PENDULUM() for _ in range(3)])
    seeds, rows = torch.arange(3), torch.tensor([0, 2, 1])
    played = [torch.zeros(num, 1) for num in (2, 6, 6)]
    for each, raised in ((batch, WorkerError), (serial, RuntimeError)):
        with pytest.raises(raised, match="have no running episode") as found:
            each.fast_forward(seeds, played, rows)
        assert found.value.row == 2
        assert each.step(torch.zeros(1, 1), torch.tensor([0]))["reward"] < 0  # the others run
        with pytest.raises(ValueError, match=r"float32 \[2, 1\]"):
            each.fast_forward(seeds[:1], [torch.zeros(2, 3)], rows[:1])


def test_without_restarts_a_death_is_an_error_and_closes_the_batch(workers):
    batch = workers([CARTPOLE] * 3, 2, max_restarts=0)
    batch.reset(torch.arange(3))
    left = processes(batch)[0]
    os.kill(processes(batch)[1].pid, signal.SIGKILL)
    start = time.monotonic()
    message = r"worker 1 \(rows 1..2\) died, killed by SIGKILL, 1 times"
    with pytest.raises(WorkerError, match=message):
        batch.step(torch.tensor([0, 1, 0]))
    assert time.monotonic() - start < 1
    with pytest.raises(RuntimeError, match="closed; make a new one"):
        batch.reset(torch.arange(3))
    with pytest.raises(ValueError, match="process object is closed"):
        left.is_alive()  # its exit was noticed


NO_SUCH = partial(GymEnv, "NoSuchEnv-v0")


def test_users_mistakes_give_the_same_errors_as_in_one_process(workers):
    for numbers, message in (
        ({"num_workers": 4}, r"num_workers=4 must be in 1..3"),
        ({"num_workers": 2, "max_restarts": -1}, "max_restarts=-1"),
        ({"num_workers": 1, "step_timeout_seconds": -1}, "=-1 must be at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            workers([CARTPOLE] * 3, **numbers)
    config = EnvConfig(id="CartPole-v1", num_envs=3, num_workers=2)
    batch = make_env(config)
    assert isinstance(batch, WorkerBatch)
    pids = [process.pid for process in processes(batch)]
    batch.close()
    batch.close()
    assert len(pids) == 2 and are_gone(pids)
    batch = workers([CARTPOLE] * 3, 2)
    with pytest.raises(RuntimeError, match=r"rows \[0, 1, 2\] have no running .* in others"):
        batch.step(torch.tensor([0, 0, 0]))
    batch.reset(torch.arange(3))
    with pytest.raises(ValueError, match=r"must be in 0 .. 1"):
        batch.step(torch.tensor([0, 2, 0]))
    with pytest.raises(IndexError, match=r"must be in 0 .. 2, the rows"):
        batch.reset(torch.tensor([0]), torch.tensor([3]))
    assert batch.step(torch.tensor([0, 1, 0]))["reward"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("makes", "kind", "text"),
    [
        ([lambda: GymEnv("CartPole-v1")], TypeError, "cannot be sent.*functools.partial"),
        ([CARTPOLE, NO_SUCH], WorkerError, r"row 1 \(worker 0\): .*NoSuchEnv"),
        ([CARTPOLE, PENDULUM], WorkerError, "must have equal specs"),
        ([partial(gymnasium.make, "CartPole-v1")], TypeError, "is not an Env.*GymEnv"),
    ],
)
def test_envs_that_cannot_be_made_are_reported(makes, kind, text):
    with pytest.raises(kind, match=text):
        WorkerBatch(makes, 1)


def test_an_interrupt_between_question_and_answer_closes_the_batch(workers):
    batch = workers([CARTPOLE] * 2, 1)
    batch.reset(torch.arange(2))
    os.kill(processes(batch)[0].pid, signal.SIGSTOP)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            batch.step(torch.tensor([0, 1]))
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(RuntimeError, match="closed"):
        batch.step(torch.tensor([0, 1]))


def test_workers_render_frames(workers):
    pytest.importorskip("pygame")
    make = partial(GymEnv, "CartPole-v1", render=True)
    batch, serial = workers([make] * 2, 1), SerialBatch([make(), make()])
    for each in (batch, serial):
        each.reset(torch.arange(2))
    assert torch.equal(batch.render(1), serial.render(1))
    assert workers([CARTPOLE], 1).render(0) is None
    with pytest.raises(IndexError):
        batch.render(2)


SCRIPT = """
import os, signal, sys, time, torch
from functools import partial
from raffia.envs.gym import GymEnv
from raffia.envs.workers import WorkerBatch

if __name__ == "__main__":
    batch = WorkerBatch([partial(GymEnv, "CartPole-v1")] * 2, 2)
    batch.reset(torch.arange(2))
    print(*(worker.process.pid for worker in batch._workers), flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_exit_silently_with_their_parent(tmp_path, signal_number):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    options = {"stdout": -1, "stderr": -1, "text": True, "start_new_session": True}
    with subprocess.Popen([sys.executable, path], **options) as script:
        pids = [int(pid) for pid in script.stdout.readline().split()]
        assert len(pids) == 2 and {*pids} <= living().keys()
        # A terminal interrupts all.
        (os.killpg if signal_number == signal.SIGINT else os.kill)(script.pid, signal_number)
        _, stderr = script.communicate(timeout=30)
    wait_for(lambda: are_gone(pids), 5)
    assert stderr.count("Traceback") == (1 if signal_number == signal.SIGINT else 0), stderr


@pytest.mark.slow
def test_a_worker_that_hangs_is_named_and_ends_the_call():
    limits = {"num_envs": 3, "num_workers": 2, "step_timeout_seconds": 0.5}
    batch = make_env(EnvConfig(id="CartPole-v1", **limits))
    batch.reset(torch.arange(3))
    stopped = processes(batch)[1].pid
    os.kill(stopped, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(WorkerError, match=rf"worker 1 \(rows 1..2, process {stopped}\) .* hangs"):
        batch.step(torch.tensor([0, 1, 0]))
    assert time.monotonic() - start < 10
    with pytest.raises(RuntimeError, match="closed"):
        batch.step(torch.tensor([0, 1, 0]))
    with pytest.raises(ValueError, match="step_timeout_seconds=-1 must be at least 0"):
        EnvConfig(step_timeout_seconds=-1)


@pytest.mark.slow
def test_a_worker_that_hangs_during_a_replay_is_named(workers):
    batch = workers([CARTPOLE] * 2, 1, step_timeout_seconds=0.5)
    batch.reset(torch.arange(2))
    batch.step(torch.tensor([0, 1]))
    started, ready = batch._started, batch._wait_until_ready

    def stopped_when_ready(*rows):
        worker = started(*rows)
        ready(worker)
        os.kill(worker.process.pid, signal.SIGSTOP)
        return worker

    batch._workers[0].process.kill()
    batch._wait_until_ready = lambda worker: None  # the worker is ready already
    batch._started = stopped_when_ready
    with pytest.raises(WorkerError, match="hangs"):
        batch.step(torch.tensor([1, 0]))
