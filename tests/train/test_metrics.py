import json
import math
import os
import resource
import signal
import time

import pytest
import torch

from raffia.tensordict.tensordict import TensorDict
from raffia.train.metrics import MetricsFile, PhaseClock, RunningMeans


def rows_of(path):
    with open(path) as file:
        return [
            json.loads(line, parse_constant=lambda name: pytest.fail(name))
            for line in file.read().splitlines()
        ]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


# -- rows


def test_rows_are_lines_of_json_that_are_there_at_once(path):
    with MetricsFile(path) as file:
        for update in range(3):
            row = {"kind": "evaluate", "update": update, "returns": [1.5, -1.0], "as_first": [True]}
            file.write(row)
            assert rows_of(path)[-1] == row  # nothing waits in this process
        assert file.position() == os.path.getsize(path)
    with MetricsFile(path) as file:
        file.write({"kind": "end", "name": "two\nlines, é"})
    assert [row["kind"] for row in rows_of(path)] == ["evaluate"] * 3 + ["end"]
    assert rows_of(path)[-1]["name"] == "two\nlines, é"


def test_what_json_lacks_is_null(path):
    with MetricsFile(path) as file:
        nan, inf = float("nan"), float("inf")
        file.write({"loss": nan, "more": [inf, -inf, 1.0], "deep": {"x": (nan,)}})
    assert rows_of(path) == [{"loss": None, "more": [None, None, 1.0], "deep": {"x": [None]}}]


def test_a_row_that_json_can_not_hold_is_refused_as_a_whole(path):
    with MetricsFile(path) as file:
        file.write({"loss": 0.5})
        with pytest.raises(TypeError, match=r"Tensor .* such as float\(loss\)"):
            file.write({"loss": torch.tensor(1.0)})
    assert rows_of(path) == [{"loss": 0.5}]


def test_rewinding_leaves_what_was_written_before(path):
    with MetricsFile(path) as file:
        file.write({"update": 1})
        position = file.position()
        file.write({"update": 2})
        file.sync()
        assert file.rewind(position) == len('{"update": 2}\n')
        file.write({"update": 3})
        assert file.rewind(10_000) == 0
    assert rows_of(path) == [{"update": 1}, {"update": 3}]
    with MetricsFile(path) as file:
        file.rewind(position + 5)  # not where a row ended: the file was edited
        assert rows_of(path) == [{"update": 1}]
        file.rewind(0)
        assert os.path.getsize(path) == 0


@pytest.mark.parametrize(
    "tail", [b'{"update": 2', b"\0" * 5000, b'{"update": 2}', b"\xff\xfe\n", b"[1]\n", b"\n\n\0\n"]
)
@pytest.mark.parametrize("before", [0, 1, 3])
def test_what_a_crash_cut_off_is_removed_when_it_is_opened(path, tail, before):
    rows = [{"update": i, "long": "x" * 40_000 * i} for i in range(before)]
    with MetricsFile(path) as file:
        for row in rows:
            file.write(row)
    with open(path, "ab") as raw:
        raw.write(tail)
    with MetricsFile(path) as file:
        assert rows_of(path) == rows
        file.write({"update": "new"})
    assert rows_of(path) == [*rows, {"update": "new"}]


def test_a_row_that_does_not_fit_on_the_disk_leaves_no_part_of_it(path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsFile(path) as file:
        file.write({"update": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, (40, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                file.write({"update": "x" * 100})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert rows_of(path) == [{"update": 1}]
        file.write({"update": 2})
    assert rows_of(path) == [{"update": 1}, {"update": 2}]


def test_a_kill_loses_no_row_that_was_written(path):
    pid = os.fork()
    if not pid:
        try:
            file = MetricsFile(path)
            for update in range(10**9):
                file.write({"update": update})
        finally:
            os._exit(1)
    while not os.path.exists(path) or os.path.getsize(path) < 1000:
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    MetricsFile(path).close()
    assert [row["update"] for row in rows_of(path)] == [*range(len(rows_of(path)))]


# -- means


@pytest.mark.parametrize("num", [1, 255, 256, 257, 700])
def test_means_are_those_of_all_values(num):
    losses = torch.rand(num, generator=torch.Generator().manual_seed(0))
    means = RunningMeans()
    for i, loss in enumerate(losses):
        means.add(TensorDict(loss=loss, priority=torch.stack([loss, loss + 1])))
        if i % 2 == 0:
            means.add({"length": i})
    found = means.take()
    assert found["loss"] == pytest.approx(float(losses.double().mean()), abs=1e-12)
    assert found["priority"] == pytest.approx(found["loss"] + 0.5, abs=1e-6)
    assert found["length"] == sum(range(0, num, 2)) / len(range(0, num, 2))
    assert means.take() == {}


def test_what_is_added_may_change_afterwards():
    means, loss = RunningMeans(), torch.tensor(1.0, requires_grad=True)
    means.add({"loss": loss})
    with torch.no_grad():
        loss.fill_(100.0)
    assert means.take() == {"loss": 1.0}


def test_a_nan_is_seen_and_does_not_stay():
    means = RunningMeans()
    means.add({"loss": torch.tensor(float("nan"))})
    means.add({"loss": torch.tensor(1.0)})
    assert math.isnan(means.take()["loss"])
    means.add({"loss": torch.tensor(1.0)})
    assert means.take() == {"loss": 1.0}


def test_means_go_on_after_a_resume():
    values = torch.rand(40, generator=torch.Generator().manual_seed(0))
    never, one = RunningMeans(), RunningMeans()
    for i, value in enumerate(values):
        never.add({"loss": value})
        one.add({"loss": value})
        if i == 17:
            never.state()  # as a checkpoint does, in a run that is never stopped too
            one, state = RunningMeans(), json.loads(json.dumps(one.state()))
            one.load_state(state)
    assert never.take() == one.take()


# -- times


def test_a_phase_within_another_takes_its_time_away():
    now = [0.0]
    clock = PhaseClock(now=lambda: now[0])
    with clock.phase("learn"):
        now[0] += 1
        with clock.phase("targets"):
            now[0] += 2
            with clock.phase("learn"):
                now[0] += 4
        now[0] += 8
    now[0] += 100  # in no phase
    with clock.phase("collect"):
        now[0] += 16
        assert clock.take() == {
            "seconds_learn": 13.0,
            "seconds_targets": 2.0,
            "seconds_collect": 16.0,
        }
        now[0] += 32
    assert clock.take() == {
        "seconds_learn": 0.0,
        "seconds_targets": 0.0,
        "seconds_collect": 32.0,
    }


def test_a_phase_ends_with_an_error_too():
    now = [0.0]
    clock = PhaseClock(now=lambda: now[0])
    with pytest.raises(KeyError), clock.phase("learn"):
        now[0] += 1
        raise KeyError
    now[0] += 5
    assert clock.take() == {"seconds_learn": 1.0}
