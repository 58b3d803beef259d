"""A Ray cluster of several machines on this one: they, the head or room go away, or do not fit.

python -m tests.recipes.ray_machines workers|machines|head|room|unfit FOLDER prints one line of
JSON. A program of its own: Ray keeps one cluster in a process, and writes down where it is for the
whole machine.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from raffia.distributed import Pool, RoleError, Workers, ray_cluster
from raffia.distributed.check_engine import COUNTER
from raffia.distributed.ray import (
    HEALTH_CHECK,
    ClusterLostError,
    RayEngine,
    RayWorker,
    VersionError,
)
from raffia.recipes.running import resume_run, train_run
from raffia.tensordict.tensordict import TensorDict
from tests.recipes.layouts import AHEAD, EFFICIENTZERO, left, trained
from tests.recipes.runs import Quiet, with_all


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def name_of(pid):
    return Path(f"/proc/{pid}/comm").read_text().strip()


def children_of(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Killing:
    """In place of `RayWorker.take`: after each `every` answers a worker's machine dies."""

    def __init__(self, cluster, nodes, every, num_kills):
        self.cluster, self.nodes, self.every, self.num_kills = cluster, nodes, every, num_kills
        self.take, self.num_taken, self.killed = RayWorker.take, 0, []
        self.frozen, self.longest = [], 0.0

    def __call__(self, worker, seconds):
        began = time.monotonic()
        try:
            answer = self.take(worker, seconds)
        finally:
            self.longest = max(self.longest, time.monotonic() - began)
        self.num_taken += 1
        is_due = self.num_taken >= self.every * (len(self.killed) + 1)
        raylet = parent_of(worker.pid) if Path(f"/proc/{worker.pid}").exists() else None
        # The worker of a machine that was killed may be there for a moment, as an orphan.
        is_there = raylet is not None and name_of(raylet) == "raylet"
        if is_due and is_there and len(self.killed) < self.num_kills:
            if len(self.killed) == self.num_kills - 1:  # the last is silent, and its worker too
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


def workers(folder):
    """Twenty workers are killed, each after an answer of its own."""
    take, killed = RayWorker.take, []

    def take_and_kill(worker, seconds):
        answer = take(worker, seconds)
        if len(killed) < 20 and worker.pid not in killed:  # answers that it had sent still come
            os.kill(worker.pid, signal.SIGKILL)
            killed.append(worker.pid)
        return answer

    RayWorker.take = take_and_kill
    there = dict(actors__num=2, actors__cpus=0.5, engine__name="ray")
    return {"digest": trained(AHEAD, folder, **there)[:3], "num_killed": len(set(killed))}


def head(folder):
    """The head is killed after some answers, and the run goes on in this process."""
    cluster, _ = cluster_of(1)
    gcs = next(
        one.process.pid
        for several in cluster.head_node.all_processes.values()
        for one in several
        if "gcs_server" in Path(f"/proc/{one.process.pid}/cmdline").read_text()
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
        train_run(EFFICIENTZERO, with_all(AHEAD, **with_cluster(cluster)), folder, view=Quiet())
    except ClusterLostError as error:
        told, seconds = str(error), time.monotonic() - times[23]
    RayWorker.take = take
    here = with_all(AHEAD, actors__num=2, engine__name="inline")
    result = resume_run(folder, config=here, view=Quiet())
    assert result.reason == "finished"
    return {"digest": left(folder)[:3], "told": told, "seconds": seconds}


def room(folder):
    """The only machine goes, and another comes once its lack has been said."""
    cluster, nodes = cluster_of(1)
    lines, came = [], threading.Event()

    def message(line):
        lines.append(line)
        came.set()

    ray_cluster.FIRST_WORD = 1.0
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
        came.wait(60)
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


def unfit(folder):
    """Errors of a run on a cluster that can't run it; nothing may have been written."""
    from raffia import __file__ as package

    folder.mkdir()
    refusals = {}

    def refused(what, error, call):
        try:
            call()
        except error as found:
            refusals[what] = str(found)
        assert not (folder / "run").exists()

    def train(**changes):
        config = with_all(AHEAD, **{**with_cluster(cluster), **changes})
        train_run(EFFICIENTZERO, config, folder / "run", view=Quiet())

    def add_machine(name, file, text):
        """One whose package raffia has this file in place of ours."""
        other = folder / name / "raffia"
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

    cluster, _ = cluster_of(2)
    refused("room", ValueError, lambda: train(actors__cpus=2.0))
    engine = RayEngine(cluster.address)
    (folder / "only_here.py").write_text("Role = dict")
    sys.path.append(str(folder))
    refused("role", RoleError, lambda: engine.require([Workers("only_here:Role", 1)]))
    engine.close()
    node = add_machine("older", "_version.py", '__version__ = "0.0.1"')
    refused("version", VersionError, train)
    cluster.remove_node(node)
    add_machine("broken", "__init__.py", "import nowhere_at_all")
    refused("package", RoleError, train)
    cluster.shutdown()
    return refusals


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](Path(sys.argv[2]))), flush=True)
