"""Append logs: complete records only, whatever a crash has left of the last one."""

import json
import os
import resource
import signal
import time

import pytest
import torch

from raffia.files import JsonLines


def rows_of(path):
    lines = path.read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_rows_are_lines_of_json_that_can_be_read_at_once(path):
    nan, inf = float("nan"), float("inf")
    with JsonLines(path) as file:
        for update in range(3):
            row = {"kind": "evaluate", "update": update, "returns": [1.5, -1.0], "as_first": [True]}
            file.write(row)
            assert rows_of(path)[-1] == row  # nothing waits in this process
        assert file.position() == os.path.getsize(path)
        with pytest.raises(TypeError, match=r"Tensor .* such as float\(loss\)"):
            file.write({"loss": torch.tensor(1.0)})
    with JsonLines(path) as file:
        file.write({"kind": "end", "name": "two\nlines, é"})
        file.write({"loss": nan, "more": [inf, -inf, 1.0], "deep": {"x": (nan,)}})
    assert len(rows_of(path)) == 5 and rows_of(path)[3]["name"] == "two\nlines, é"
    assert rows_of(path)[-1] == {"loss": None, "more": [None, None, 1.0], "deep": {"x": [None]}}


def test_rewinding_keeps_the_rows_before_it(path):
    with JsonLines(path) as file:
        file.write({"update": 1})
        position = file.position()
        file.write({"update": 2})
        file.sync()
        assert file.rewind(position) == len('{"update": 2}\n')
        file.write({"update": 3})
        assert file.rewind(10_000) == 0
    assert rows_of(path) == [{"update": 1}, {"update": 3}]
    with JsonLines(path) as file:
        file.rewind(position + 5)  # not where a row ended: the file was edited
        assert rows_of(path) == [{"update": 1}]
        file.rewind(0)
        assert os.path.getsize(path) == 0


@pytest.mark.parametrize(
    "tail", [b'{"update": 2', b"\0" * 5000, b'{"update": 2}', b"\xff\xfe\n", b"[1]\n", b"\n\n\0\n"]
)
@pytest.mark.parametrize("before", [0, 1, 3])
def test_an_incomplete_last_row_is_removed_when_the_log_is_opened(path, tail, before):
    rows = [{"update": i, "long": "x" * 40_000 * i} for i in range(before)]
    with JsonLines(path) as file:
        for row in rows:
            file.write(row)
    with open(path, "ab") as raw:
        raw.write(tail)
    with JsonLines(path) as file:
        assert rows_of(path) == rows
        file.write({"update": "new"})
    assert rows_of(path) == [*rows, {"update": "new"}]


def test_a_row_that_does_not_fit_on_the_disk_leaves_no_part_of_it(path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with JsonLines(path) as file:
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
            file = JsonLines(path)
            for update in range(10**9):
                file.write({"update": update})
        finally:
            os._exit(1)
    while not os.path.exists(path) or os.path.getsize(path) < 1000:
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    JsonLines(path).close()
    assert [row["update"] for row in rows_of(path)] == [*range(len(rows_of(path)))]
