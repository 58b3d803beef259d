"""Reading run folders: summaries, suggestions, groups, and the recorded episode to show."""

import json
import subprocess
import sys

import pytest

from raffia.report import find_runs, summarise
from raffia.report.episodes import best_recording, read_evaluations
from raffia.report.folder import read_run
from raffia.report.groups import differing, grouped
from raffia.report.rows import read_rows

from .made_runs import GIF, brief_rows, config, rows, write_run


def test_states(tmp_path):
    finished = rows(evaluations=1, end="target")
    assert summarise(write_run(tmp_path / "a", finished)).state == "target"
    again = [*finished, finished[0] | {"kind": "resume"}]
    assert summarise(write_run(tmp_path / "b", again)).state == "running"
    assert summarise(write_run(tmp_path / "c", rows(end="stopped"))).state == "stopped"
    assert summarise(write_run(tmp_path / "d")).state == "empty"


def test_a_summary_needs_neither_matplotlib_nor_torch(tmp_path):
    run = write_run(tmp_path / "run", brief_rows(evaluations=1))
    pytest.importorskip("matplotlib")
    for call, absent in (
        ("report.summarise(sys.argv[1])", ["torch", "numpy", "matplotlib"]),
        ("report.write_report(sys.argv[1:])", ["torch", "matplotlib.pyplot"]),
    ):
        code = f"import sys; from raffia import report; {call}; "
        code += f"assert not {{*{absent}}} & set(sys.modules)"
        subprocess.run([sys.executable, "-c", code, str(run)], check=True, timeout=60)


def test_runs_are_found_below_a_folder(tmp_path):
    for name in ("b/two", "a", "b/one", ".hidden/run", "b/one/inner"):
        write_run(tmp_path / name, extras=False)
    names = [str(run.relative_to(tmp_path)) for run in find_runs(tmp_path)]
    assert names == ["a", "b/one", "b/two"]


def test_the_error_for_other_folders_suggests_runs(tmp_path):
    for name in ("runs/cartpole-1", "runs/pendulum", "far/sweep/runs/deep"):
        write_run(tmp_path / name, extras=False)
    (tmp_path / "runs/notes.txt").write_text("x")
    (tmp_path / "runs/qqqq").mkdir()
    for name, message in (
        ("runs/cartpole1", r"does not exist; did you mean .*/cartpole-1\?"),
        ("", r"it contains far, runs, and neither .*did you mean .*pendulum"),
        ("far", r"did you mean .*runs/deep\?"),
        ("runs/notes.txt", r"a file; pass the folder.*runs near it: .*cart"),
        ("runs/qqqq", "it contains nothing"),
        ("nowhere/at/all", "there are no runs near it"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            summarise(tmp_path / name)


def test_runs_that_differ_in_the_seed_alone_are_grouped(tmp_path):
    configs = [config(0), config(1), config(0, simulations=50), config(1, preset="other"), None]
    configs += [None, config(2) | {"device": "cpu:0"}, config(0) | {"run": {"algorithm": "own"}}]
    runs = [
        read_run(write_run(tmp_path / str(i), config=settings, extras=False))
        for i, settings in enumerate(configs)
    ]
    groups = grouped(runs)
    # a preset is a name, not a setting, and a worker's device is one of several: the runs with
    # others belong to the same group
    names = [[run.name for run in group.runs] for group in groups]
    assert names == [["0", "1", "3", "6"], ["2"], ["4"], ["5"], ["7"]]
    assert [group.label for group in groups[2:4]] == ["4 (no config)", "5 (no config)"]
    assert differing(groups[:2]) == ["search.num_simulations"]
    assert differing([groups[0], groups[4]]) == ["algorithm"]


def shown_episode(run):
    found = best_recording(read_run(run), read_evaluations(run)[0])
    return found and found.path.name


def test_the_best_recorded_episode_is_shown(tmp_path):
    all_rows = rows(evaluations=3)
    for row, mean in zip([r for r in all_rows if r["kind"] == "evaluate"], [5, 9, 9], strict=True):
        row["mean_return"] = mean
    run = write_run(tmp_path / "run", all_rows, config(), extras=False)
    assert shown_episode(run) is None
    folder = run / "episodes"
    folder.mkdir()
    for name in ("000000500.gif", "000001500.gif", "000001000.mp4", "notes.txt"):
        (folder / name).write_bytes(GIF)
    assert shown_episode(run) == "000001500.gif"  # of the best means the newest
    for name in ("best-seed0-2.gif", "best-seed0-10.gif", "newest-seed0-0.gif"):
        (folder / name).write_bytes(GIF)
    assert shown_episode(run) == "best-seed0-10.gif"
    (run / "evaluations").mkdir()
    content = (
        '{"returns": [3, 8, 9], "files": ["best-seed0-10.gif", "best-seed0-2.gif", "gone.gif"]}'
    )
    (run / "evaluations/1.json").write_text(content)
    assert shown_episode(run) == "best-seed0-2.gif"


def test_rows_that_are_left_out_give_their_times_to_the_next(tmp_path):
    num = 9_000
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for update in range(num):
            times = {"seconds_learn": 0.5, **({"seconds_save": 0.25} if update % 2 else {})}
            file.write(json.dumps({"kind": "train", "update": update, **times}) + "\n")
    found, notes = read_rows(tmp_path / "metrics.jsonl")
    assert len(found) < 5_000 and "every 4th was read" in notes[0]
    assert sum(row["seconds_learn"] for row in found) == 0.5 * num
    assert sum(row.get("seconds_save", 0.0) for row in found) == 0.25 * (num // 2)
