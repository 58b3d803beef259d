"""A Ray cluster of several nodes on this machine: nodes, the head or room are lost, or don't fit.

python -m tests.recipes.ray_machines NAME FOLDER prints one line of JSON, where NAME is workers,
machines, learners, head, room, unfit, doctor or sweeps. A program of its own: Ray keeps one cluster
in a process, and stores its address for the whole machine.
"""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from raffia.cli import main
from raffia.cli.doctor import Check, engine_checks, print_doctor
from raffia.distributed import Group, Pool, RoleError, Workers, ray_cluster
from raffia.distributed.check_engine import COUNTER
from raffia.distributed.ray import (
    HEALTH_CHECK,
    ClusterLostError,
    RayEngine,
    RayWorker,
    VersionError,
)
from raffia.recipes import resume, train
from raffia.recipes.efficientzero import PRESETS
from raffia.recipes.scale_config import EngineConfig
from raffia.sweep import Manifest, PlannedRun, read_manifest
from raffia.sweep.session import room_of
from raffia.tensordict import TensorDict
from tests.recipes.layouts import AHEAD, EFFICIENTZERO, PARTS, WORDLE, results_of, trained
from tests.recipes.runs import Quiet, with_all

OLDER = "_version.py", '__version__ = "0.0.1"'


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def name_of(pid):
    return Path(f"/proc/{pid}/comm").read_text().strip()


def children_of(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Killing:
    """Replaces `RayWorker.take`: after each `every` answers a worker's machine dies."""

    def __init__(self, cluster, nodes, every, num_kills):
        self.cluster, self.nodes, self.every, self.num_kills = cluster, nodes, every, num_kills
        self.take, self.num_taken, self.killed = RayWorker.take, 0, []
        self.frozen, self.longest, self.hangs = [], 0.0, True

    def __call__(self, worker, seconds):
        start_time = time.monotonic()
        try:
            answer = self.take(worker, seconds)
        finally:
            self.longest = max(self.longest, time.monotonic() - start_time)
        self.num_taken += 1
        is_due = self.num_taken >= self.every * (len(self.killed) + 1)
        raylet = parent_of(worker.pid) if Path(f"/proc/{worker.pid}").exists() else None
        # The worker of a killed machine may live for a moment, as an orphan.
        is_alive = raylet is not None and name_of(raylet) == "raylet"
        if is_due and is_alive and len(self.killed) < self.num_kills:
            # The last is silent, and its worker too.
            if self.hangs and len(self.killed) == self.num_kills - 1:
                self.frozen = [raylet, *children_of(raylet)]
                for pid in self.frozen:
                    os.kill(pid, signal.SIGSTOP)
            else:
                os.kill(raylet, signal.SIGKILL)
                os.kill(worker.pid, signal.SIGKILL)  # it would live for a moment
            self.killed.append(raylet)
            self.nodes.append(self.cluster.add_node(num_cpus=1))
        return answer


def cluster_of(num_machines):
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": HEALTH_CHECK}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(num_cpus=1) for _ in range(num_machines)]
    cluster.wait_for_nodes()
    return cluster, nodes


def with_cluster(cluster):
    return dict(
        actors__num=2, actors__cpus=0.5, engine__name="ray", engine__address=cluster.address
    )


def machines(folder):
    """Four machines are killed and one is silent."""
    cluster, nodes = cluster_of(2)
    kills = Killing(cluster, nodes, every=4, num_kills=5)
    RayWorker.take = lambda *arguments: kills(*arguments)
    try:
        found = trained(AHEAD, folder, **with_cluster(cluster))
    finally:
        for pid in kills.frozen:
            os.kill(pid, signal.SIGKILL)
    cluster.shutdown()
    return {"digest": found[:3], "num_killed": len(set(kills.killed)), "longest": kills.longest}


def learners(folder):
    """Processes that share batches, or a state, on two machines with addresses of their own."""
    cluster, nodes = cluster_of(0)
    nodes += [cluster.add_node(num_cpus=1, node_ip_address=f"127.0.0.{n}") for n in (2, 3)]
    cluster.wait_for_nodes()
    on_cluster = dict(engine__name="ray", engine__address=cluster.address)
    found = {"digests": [], "hosts": [], "num_killed": []}
    join = Group.__init__

    def recording(self, address, *arguments, **options):
        found["hosts"].append(address.rpartition(":")[0])
        join(self, address, *arguments, **options)

    Group.__init__ = recording
    for config, changes, every in (
        (PARTS, dict(learners__num=3, learners__sums="ordered"), 60),
        (WORDLE, dict(learners__num=2, learners__state="sharded", num_updates=6), 9),
    ):
        there = trained(config, folder / f"there{every}", **changes)
        kills = Killing(cluster, nodes, every=every, num_kills=2)
        kills.hangs = False
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RayWorker, "take", lambda *arguments, kills=kills: kills(*arguments))
            here = trained(config, folder / f"here{every}", **changes, **on_cluster)
        found["digests"].append([there[:3], here[:3]])
        found["num_killed"].append(len(set(kills.killed)))
    cluster.shutdown()
    return found


def workers(folder):
    """Twenty workers are killed, each after one of its answers."""
    take, killed = RayWorker.take, []

    def take_and_kill(worker, seconds):
        answer = take(worker, seconds)
        if len(killed) < 20 and worker.pid not in killed:  # answers that it had sent still arrive
            os.kill(worker.pid, signal.SIGKILL)
            killed.append(worker.pid)
        return answer

    RayWorker.take = take_and_kill
    settings = dict(actors__num=2, actors__cpus=0.5, engine__name="ray")
    return {"digest": trained(AHEAD, folder, **settings)[:3], "num_killed": len(set(killed))}


def head(folder):
    """The head is killed after some answers, and the run is resumed in this process."""
    cluster, _ = cluster_of(1)
    gcs = next(
        info.process.pid
        for infos in cluster.head_node.all_processes.values()
        for info in infos
        if "gcs_server" in Path(f"/proc/{info.process.pid}/cmdline").read_text()
    )
    take, times = RayWorker.take, []

    def take_and_kill(worker, seconds):
        answer = take(worker, seconds)
        times.append(time.monotonic())
        if len(times) == 24:
            os.kill(gcs, signal.SIGKILL)
        return answer

    RayWorker.take = take_and_kill
    try:
        train(with_all(AHEAD, **with_cluster(cluster)), folder, view=Quiet())
    except ClusterLostError as error:
        message, seconds = str(error), time.monotonic() - times[23]
    RayWorker.take = take
    resumed = with_all(AHEAD, actors__num=2, engine__name="inline")
    result = resume(folder, config=resumed, view=Quiet())
    assert result.reason == "finished"
    return {"digest": results_of(folder)[:3], "message": message, "seconds": seconds}


def room(folder):
    """The only machine is removed, and another added after the message about missing room."""
    cluster, nodes = cluster_of(1)
    lines, has_message = [], threading.Event()

    def message(line):
        lines.append(line)
        has_message.set()

    assert (ray_cluster.FIRST_MESSAGE, ray_cluster.MESSAGE_EVERY) == (10.0, 60.0)
    ray_cluster.FIRST_MESSAGE, ray_cluster.MESSAGE_EVERY = 1.0, 8.0
    engine = RayEngine(cluster.address, message=message)
    pool = Pool(engine, COUNTER, "{}", 1, patience=20.0, max_restarts=0)
    one = TensorDict(add=torch.tensor(1))
    pool.ask(0, 0, one)
    pool.take(0, 0)
    cluster.remove_node(nodes[0], allow_graceful=False)
    pool.drop(0)
    address, environment = cluster.address, dict(os.environ)
    ray = str(Path(sys.executable).with_name("ray"))

    def add_machine():
        has_message.wait(60)
        time.sleep(21)  # longer than the worker's patience
        command = [ray, "start", "--address", address, "--num-cpus", "1"]
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)

    thread = threading.Thread(target=add_machine)
    thread.start()
    pool.ask(0, 1, one)
    answer = pool.take(0, 1)
    thread.join()
    pool.close()
    engine.close()
    cluster.shutdown()
    return {"total": int(answer["total"]), "lines": lines, "num_restarts": pool.num_restarts}


def machine_with(cluster, folder, file, text):
    """Add a machine whose package raffia has this file in place of ours."""
    from raffia import __file__ as package

    other = folder / "raffia"
    other.mkdir(parents=True)
    for path in Path(package).parent.iterdir():
        if path.name != file:
            (other / path.name).symlink_to(path)
    (other / file).write_text(text)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(other.parent), prepend=":")
        node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    return node


def unfit(folder):
    """Errors of a run on a cluster that can't run it; nothing may be written."""
    folder.mkdir()
    refusals = {}

    def record_error(name, error, call):
        try:
            call()
        except error as found:
            refusals[name] = str(found)
        assert not (folder / "run").exists()

    def begin(**changes):
        config = with_all(AHEAD, **{**with_cluster(cluster), **changes})
        train(config, folder / "run", view=Quiet())

    cluster, _ = cluster_of(2)
    record_error("room", ValueError, lambda: begin(actors__cpus=2.0))
    engine = RayEngine(cluster.address)
    (folder / "only_here.py").write_text("Role = dict")
    sys.path.append(str(folder))
    record_error("role", RoleError, lambda: engine.require([Workers("only_here:Role", 1)]))
    engine.close()
    node = machine_with(cluster, folder / "older", *OLDER)
    record_error("version", VersionError, begin)
    cluster.remove_node(node)
    machine_with(cluster, folder / "broken", "__init__.py", "import nowhere_at_all")
    record_error("package", RoleError, begin)
    cluster.shutdown()
    return refusals


def doctor(folder):
    """Checks of `raffia doctor` on two machines, and when one has another raffia."""
    cluster, _ = cluster_of(1)
    cluster.add_node(num_cpus=2, num_gpus=3)
    cluster.wait_for_nodes()
    found = []
    for is_fit in (True, False):
        if not is_fit:
            machine_with(cluster, folder / "older", *OLDER)
        found.append([asdict(check) for check in engine_checks("ray", cluster.address)])
        stream = io.StringIO()
        status = print_doctor(stream, lambda: [Check(**entries) for entries in found[-1]])
        assert status == (0 if is_fit else 1)
    cluster.shutdown()
    return found


def sweeps(folder):
    """Sweeps from a leader without a GPU, on a machine with two GPUs and three CPUs."""
    cluster, nodes = cluster_of(1)
    cluster.add_node(num_cpus=3, num_gpus=2)
    cluster.remove_node(nodes[0])
    cluster.wait_for_nodes()
    smoke, engine = PRESETS["smoke"], EngineConfig(name="ray", address=cluster.address)
    planned = PlannedRun("0", {"num_threads": 1}, 0)
    manifest = Manifest.of(EFFICIENTZERO, smoke, [planned], engine=engine)
    found = {"room_of": room_of(manifest, EFFICIENTZERO, num_cores=1)}

    def sweep(name, *args):
        run = ["efficientzero", "--preset", "smoke", "--num_threads", "1", "--seeds", "0..2"]
        engine_args = ["--engine.name", "ray", "--engine.address", cluster.address]
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            status = main(["sweep", *run, *args, *engine_args, "--out", str(folder / name)])
        exists = (folder / name / "sweep.json").exists()
        manifest = read_manifest(folder / name) if exists else None
        found[name] = {
            "status": status,
            "stderr": stderr.getvalue(),
            "workers": manifest and manifest.workers,
            "errors": sorted(set(manifest.errors.values())) if manifest else None,
        }

    sweep("card", "--device", "cuda:1")
    sweep("room", "--device", "cuda", "--workers", "3")
    sweep("nothing", "--device", "gpu")
    cluster.shutdown()
    return found


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](Path(sys.argv[2]))), flush=True)
