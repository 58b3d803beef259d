"""Machines of a Ray cluster that die, fall silent or are missing change no bit of a run."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest

from tests.recipes.layouts import AHEAD, trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return list(trained(AHEAD, tmp_path_factory.mktemp("plain") / "run")[:3])


@pytest.fixture
def on_a_cluster(tmp_path):
    """Run a function of `ray_machines`; afterwards all its processes are killed."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # short: Ray's sockets lie in it

        def call(name):
            environment = os.environ | {"RAY_TMPDIR": folder}
            program = [sys.executable, "-m", "tests.recipes.ray_machines"]
            command = [*program, name, str(tmp_path / "run")]
            ended = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=900, check=False
            )
            assert ended.returncode == 0, ended.stderr[-4000:]
            return json.loads(ended.stdout.splitlines()[-1])

        try:
            yield call
        finally:
            for pid in filter(str.isdigit, os.listdir("/proc")):
                try:
                    if folder.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                        os.kill(int(pid), signal.SIGKILL)
                except (FileNotFoundError, ProcessLookupError):
                    pass  # it has ended


def test_workers_that_are_killed_change_nothing(undisturbed, on_a_cluster):
    found = on_a_cluster("workers")
    assert found["num_killed"] == 20
    assert found["digest"] == json.loads(json.dumps(undisturbed))


def test_machines_that_die_or_fall_silent_change_nothing(undisturbed, on_a_cluster):
    found = on_a_cluster("machines")
    assert found["num_killed"] == 5
    assert found["longest"] < 40  # where Ray's own health check takes over a minute
    assert found["digest"] == json.loads(json.dumps(undisturbed))


def test_learners_and_shards_of_a_state_are_on_any_machine_and_die_with_it(on_a_cluster):
    found = on_a_cluster("learners")
    for in_processes, on_machines in found["digests"]:
        assert in_processes == on_machines
    assert found["num_killed"] == [2, 2]
    own, reachable = sorted(set(found["hosts"]))  # in processes, and from other machines
    assert own == "127.0.0.1" and not reachable.startswith("127.")


def test_a_head_that_dies_is_an_error_within_seconds_and_the_run_is_resumed(
    undisturbed, on_a_cluster
):
    found = on_a_cluster("head")
    assert re.search(
        r"the Ray cluster at .* is gone.*`raffia resume RUN` continues", found["message"]
    )
    assert found["seconds"] < 15
    assert found["digest"] == json.loads(json.dumps(undisturbed))


def test_a_worker_without_room_is_waited_for_with_a_message(on_a_cluster):
    found = on_a_cluster("room")
    assert found["total"] == 1 and found["num_restarts"] == 0
    assert re.search(
        r"Counter 0 has waited \d+ s for room: 1 CPUs, on one machine", found["lines"][0]
    )
    assert "`ray start --address=" in found["lines"][0]
    waited = [int(re.search(r"waited (\d+) s", line)[1]) for line in found["lines"]]
    assert waited[0] < 8 and 2 <= len(waited) <= 5
    assert all(8 <= after - before < 12 for before, after in pairwise(waited))


def test_a_cluster_that_can_not_run_it_is_refused_before_anything_is_written(on_a_cluster):
    found = on_a_cluster("unfit")
    assert re.search(r"2 workers of 2 CPUs each \(ActorRole\) do not fit .*1 CPUs", found["room"])
    assert re.search(r"the machine .*'only_here:Role' cannot be imported", found["role"])
    assert re.search(r"the machine .* has raffia 0.0.1 \(here \d", found["version"])
    assert re.search(r"the machine .* cannot run raffia .*nowhere_at_all", found["package"])


def test_doctor_checks_each_machine(on_a_cluster):
    fit, unfit = on_a_cluster("doctor")
    machines = [check for check in fit if check["name"].startswith("machine ")]
    expected = [
        r"0 CPUs, 0 GPUs, .* of memory; runs no workers",
        r"1 CPUs, 0 GPUs, .* of memory; processor .*, python 3\..*, raffia .*, torch 2\.",
        r"2 CPUs, 3 GPUs, .* of memory; processor .*, python 3\..*, raffia .*, torch 2\.",
    ]
    found = sorted(check["found"] for check in machines)
    assert all(re.match(*pair) for pair in zip(expected, found, strict=True)), found
    names = [check["name"] for check in fit if check not in machines]
    assert names == ["engine", "first worker", "a call", "arrays"]
    assert {check["verdict"] for check in fit} == {"ok"}
    (other,) = [check for check in unfit if check["verdict"] == "fails"]
    assert "raffia 0.0.1" in other["found"] and "has raffia 0.0.1 (here" in other["fix"]
    assert "a call" not in {check["name"] for check in unfit}


def test_a_sweep_uses_the_resources_of_the_cluster_and_not_of_its_leader(on_a_cluster):
    """The GPUs exist for Ray alone here: the runs find none, but each requests the one it gets."""
    found = on_a_cluster("sweeps")
    assert found["room_of"] == 3 and found["card"]["workers"] == 2
    (error,) = found["card"]["errors"]
    assert "device='cuda' cannot be used: cuda is not available here" in error
    assert found["room"]["workers"] is None
    assert "do not fit" in found["room"]["stderr"]
    assert "A sweep has --workers" in found["room"]["stderr"]
    assert "actors" not in found["room"]["stderr"]
    assert "gpu: no device has this name" in found["nothing"]["stderr"]
