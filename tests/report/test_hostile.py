"""Run folders from elsewhere: links, pipes, devices, escapes, rows and keys without end."""

import json
import os
import sys
import time
import tracemalloc

import pytest

from raffia.cli import main
from raffia.cli.conversation import Piece, Session, values_table
from raffia.cli.style import printable
from raffia.report import write_report
from raffia.report.folder import read_run, summarise
from raffia.report.plots import spent
from raffia.report.rows import counted_rows


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [
        {"kind": "start", "update": 0, "env_step": 0, "seconds": 0},
        {"kind": "evaluate", "update": 2, "env_step": 9, "seconds": 2, "mean_return": 7.0},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_links_are_not_followed(run, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text('{"returns": [1], "checkpoint": "the secret"}')
    for name, link in (
        ("episodes", "best.gif"),
        ("evaluations", "a.json"),
        ("dialogues", "000000001.json"),
        ("trees", "1.json"),
        ("trees", "2.svg"),
        ("checkpoints/000000001", "manifest.json"),
    ):
        (run / name).mkdir(parents=True, exist_ok=True)
        os.symlink(secret, run / name / link)
    page = write_report([run]).read_text()
    assert "the secret" not in page and "data:image" not in page and "best.gif" not in page
    assert "evaluations/a.json could not be read: it is not a regular file" in page


def test_folders_that_are_links_are_not_read(run, tmp_path):
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    (outside / "a.json").write_text('{"returns": [1], "checkpoint": "the secret"}')
    os.symlink(outside, run / "evaluations")
    assert "the secret" not in write_report([run]).read_text()


def test_a_run_that_is_reached_by_a_link_is_read(run, tmp_path):
    os.symlink(run, tmp_path / "link")
    assert summarise(tmp_path / "link").best_return == 7.0


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "trees/1.json", "trees/1.svg"])
def test_pipes_and_devices_do_not_block(run, name, tmp_path):
    (run / "trees").mkdir()
    for make in (lambda path: os.mkfifo(path), lambda path: os.symlink("/dev/zero", path)):
        (run / name).unlink(missing_ok=True)
        make(run / name)
        if name != "metrics.jsonl":
            write_report([run])
        else:
            (run / "config.json").write_text("{}")
            assert "not a regular file" in " ".join(read_run(run).notes)
            assert "not a regular file" in " ".join(summarise(run).notes)


@pytest.mark.slow
def test_many_rows_take_little_memory(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with open(folder / "metrics.jsonl", "w") as file:
        file.write('{"kind": "start"}\n')
        for n in range(60_000):
            start = {"kind": "train", "update": n, "env_step": n, "seconds": n / 10}
            file.write(
                json.dumps({**start, "seconds_learn": 0.02, **{f"m{i}": n / 7 for i in range(7)}})
                + "\n"
            )
            if n % 3 == 0:
                file.write(json.dumps({"kind": "episode", "env_step": n, "return": n}) + "\n")
        file.write('{"kind": "end", "reason": "finished"}\n')
    tracemalloc.start()
    found = read_run(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30e6  # all rows: 66 MB
    assert found.num_of("train") == 60_000 and found.num_of("episode") == 20_000
    assert len(found.of("train")) < 4100 and found.state == "finished"
    assert found.update == 59_999  # the last ones are always read
    last = [row["return"] for row in found.of("episode")][-20:]
    assert last == list(range(59_997 - 57, 59_998, 3))
    assert spent(found) == pytest.approx({"learn": 1199.98, "other": 4799.92})
    assert any("of 60,000 rows of train only every 16th was read" in note for note in found.notes)
    updates = [row["update"] for row in found.of("train")]
    assert updates == sorted(updates)


@pytest.mark.slow
def test_rows_of_many_keys_and_kinds_are_limited(run):
    with open(run / "metrics.jsonl", "a") as file:
        keys = {f"key{i}": i for i in range(20_000)}
        file.write(json.dumps({"kind": "train", "update": 3, "seconds": 3, **keys}) + "\n")
        file.write('{"kind": "train", "update": 4, "x": "' + "y" * 5_000_000 + '"}\n')
        for i in range(100):
            file.write(json.dumps({"kind": f"kind{i}"}) + "\n")
    rows, faults, counts = counted_rows(run / "metrics.jsonl")
    assert max(map(len, rows)) <= 401 and len(counts) == 40
    notes = " ".join(faults)
    assert "line 3 has more than 400 entries" in notes and "line 4 is longer than" in notes
    start = time.process_time()
    write_report([run])
    assert time.process_time() - start < 60  # an earlier version did not end


def test_half_a_surrogate_pair_does_not_end_the_report(run):
    (run / "config.json").write_text('{"env": {"id": "\\ud800"}, "run": {"preset": "\\udfff"}}')
    assert "best mean return" in write_report([run]).read_text()


# -- terminals

CLEAR = "\x1b[2J\x1b]0;title\x07"


def test_terminal_escapes_are_printed_as_text(run, capsys, monkeypatch, tmp_path):
    assert printable(f"a{CLEAR}\x9b\u202e\ud800\tb\n") == (
        "a\\x1b[2J\\x1b]0;title\\x07\\x9b\\u202e\\ud800\tb\n"
    )
    (run / "config.json").write_text(json.dumps({"env": {"id": CLEAR}, "seed": CLEAR}))
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "end", "reason": CLEAR}) + "\n")
    monkeypatch.chdir(tmp_path)
    assert main(["list", "runs", "--in", "."]) == 0
    assert main(["evaluate", CLEAR]) != 0
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err and "\\x1b[2J" in captured.out


def test_terminal_escapes_of_a_model_are_removed(capsys):
    piece = Piece(CLEAR, CLEAR, 0.6, 0.3, -1.0)
    Session(None, sys.stdin, sys.stdout).stream("it: ", [piece])
    assert "\x1b" not in capsys.readouterr().out
    assert "\x1b" not in values_table([piece])
