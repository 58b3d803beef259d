"""Sweeps as a user calls them: the same runs with any engine and after kills."""

import json
import os
import signal
from pathlib import Path

import pytest

from raffia.cli import main
from raffia.cli.sweep import scores_of
from raffia.recipes import RunError
from raffia.recipes.algorithm import find_algorithm
from raffia.recipes.run_folder import claimed, read_run
from raffia.recipes.scale_config import EngineConfig
from raffia.report.folder import find_runs
from raffia.sweep import Manifest, SweepSession, plan_runs, read_manifest, sweep, write_manifest
from raffia.sweep.progress import SweepView
from raffia.train.checkpoint import Checkpoints
from tests.processes import children, started, wait_for
from tests.recipes.runs import last_state, same
from tests.report.made_runs import config, write_run

ROOT = Path(__file__).parents[2]
DQN = f"{ROOT}/examples/own_algorithm.py:dqn"
SHORT = ["--num_env_steps", "240", "--random_env_steps", "100", "--evaluate_every", "120"]
TWO = [*SHORT, "--seeds", "0..1", "--grid", "learning_rate=1e-3,2e-3"]


def sweep_args(out, *more):
    return ["sweep", DQN, *(more or TWO), "--out", str(out)]


def row_of(update, mean):
    counts = dict.fromkeys(("update", "env_step", "seconds"), update)
    return {"kind": "evaluate", **counts, "mean_return": mean}


def digests(folder):
    """The runs' results by name: rows without times, and the last checkpoint."""
    return {run.name: (rows(run), last_state(run)[1]) for run in find_runs(folder / "runs", 1)}


def rows(run):
    """Episodes, evaluations and the end; resumes do not count."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    chosen = [row for row in found if row["kind"] in ("evaluate", "episode", "end")]
    return [{key: row[key] for key in row if "seconds" not in key} for row in chosen]


def output_of(process, status=0):
    """The output of a process that ends with this status."""
    output, _ = process.communicate(timeout=100)
    assert process.returncode == status, output
    return output


def assert_equal(found, expected):
    assert found.keys() == expected.keys() and found
    for name in found:
        assert found[name][0] == expected[name][0], name
        parts, expected_parts = found[name][1], expected[name][1]
        assert parts.keys() == expected_parts.keys()
        assert all(same(parts[part], expected_parts[part]) for part in parts), name


@pytest.fixture(scope="module")
def inline(tmp_path_factory):
    """A sweep of four runs in this process."""
    folder = tmp_path_factory.mktemp("inline") / "lr"
    assert main(sweep_args(folder, *TWO, "--engine.name", "inline")) == 0
    return folder


@pytest.mark.slow
def test_processes_give_the_same_runs(inline, tmp_path, capsys):
    assert main(sweep_args(tmp_path / "lr", *TWO, "--workers", "2")) == 0
    output = capsys.readouterr().out
    assert "4 runs of DQN" in output and "2 at a time (process)" in output
    assert "4 finished" in output and "learning_rate=0.002" in output
    assert_equal(digests(tmp_path / "lr"), digests(inline))


@pytest.mark.slow
def test_actors_of_ray_give_the_same_runs(inline, tmp_path):
    pytest.importorskip("ray")
    out = tmp_path / "lr"
    leader = started(*sweep_args(out, *TWO, "--workers", "2", "--engine.name", "ray"))
    output_of(leader)
    assert_equal(digests(out), digests(inline))


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        ["ilql", "--preset", "ilql-smoke", "--num_updates", "3", "--population", "2"],
        ["efficientzero", "--preset", "smoke", "--population", "2", "--env.id", "probe/value"],
    ],
    ids=lambda args: args[0],
)
def test_populations_and_presets_of_either_agent(args, tmp_path, capsys):
    out = tmp_path / "of"
    more = [] if args[0] == "ilql" else ["--collect.num_env_steps", "100"]
    more += ["--random", "2", "--ranges", "optimizer.learning_rate=1e-4..1e-2"]
    assert main(["sweep", *args, *more, "--engine.name", "inline", "--out", str(out)]) == 0
    assert "2 finished" in capsys.readouterr().out
    assert {read_run(run).population.size for run in find_runs(out / "runs", 1)} == {2}


def leader_of(out):
    return started(*sweep_args(out, *LONG))


LONG = [
    *("--num_env_steps", "1300", "--random_env_steps", "100", "--evaluate_every", "200"),
    *("--seeds", "0..1", "--workers", "2"),
]


def command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def training(leader):
    """The workers that train a run which has a checkpoint to resume from."""
    servers = [pid for pid in children(leader) if "forkserver" in command(pid)]
    found = []
    for worker in (pid for server in servers for pid in children(server)):
        try:
            open_files = [Path(os.readlink(path)) for path in Path(f"/proc/{worker}/fd").iterdir()]
        except OSError:  # it has ended, or has closed a file meanwhile
            continue
        runs = [path.parent for path in open_files if path.name == "metrics.jsonl"]
        if any(is_saved(run) for run in runs):
            found.append(worker)
    return found


def is_saved(run):
    """Whether the run has a complete checkpoint."""
    return bool(Checkpoints(run / "checkpoints").available())


def has_saved_both(out):
    return len([run for run in out.glob("runs/*") if is_saved(run)]) == 2


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "lr"
    assert main(sweep_args(folder, *LONG)) == 0
    return folder


@pytest.mark.slow
def test_a_killed_worker_changes_nothing(undisturbed, tmp_path):
    out = tmp_path / "lr"
    leader = leader_of(out)
    os.kill(wait_for(lambda: training(leader.pid))[0], signal.SIGKILL)
    output_of(leader)
    kinds = [line for file in out.rglob("metrics.jsonl") for line in file.read_text().splitlines()]
    assert sum('"kind": "resume"' in line for line in kinds) == 1  # it was killed in a run
    assert_equal(digests(out), digests(undisturbed))


@pytest.mark.slow
def test_a_killed_leader_s_sweep_is_resumed(undisturbed, tmp_path):
    out = tmp_path / "lr"
    leader = leader_of(out)
    wait_for(lambda: has_saved_both(out))
    leader.kill()
    leader.communicate()
    output_of(started("resume", out, "--algorithm", DQN))
    assert_equal(digests(out), digests(undisturbed))


@pytest.mark.slow
def test_a_signal_saves_every_run_and_prints_the_resume_call(undisturbed, tmp_path):
    number = signal.SIGTERM
    out = tmp_path / "lr"
    leader = leader_of(out)
    wait_for(lambda: has_saved_both(out))
    leader.send_signal(number)
    output = output_of(leader, 128 + number)
    assert "2 stopped" in output and f"raffia resume {out} --algorithm" in output
    assert not (out / ".stop").exists()
    ends = [row["reason"] for run in find_runs(out / "runs", 1) for row in rows(run)[-1:]]
    assert ends == ["stopped", "stopped"]
    assert main(["resume", str(out), "--algorithm", DQN]) == 0
    found_runs, expected = (
        {name: (found[0][-1:], found[1]) for name, found in digests(folder).items()}
        for folder in (out, undisturbed)
    )
    assert_equal(found_runs, expected)


@pytest.mark.slow
def test_a_failed_run_does_not_end_the_others(tmp_path, capsys):
    """A run that fails in training, and one that fails before."""
    for out, grid, failed, *more in (
        (tmp_path / "lr", "learning_rate=1e-3,1e30", "1-learning_rate=1e+30-seed=0"),
        (tmp_path / "envs", "env.id=CartPole-v1,CartPol-v1", "CartPol-v1", "--engine.name=inline"),
    ):
        args = [*SHORT, "--seeds", "0", "--grid", grid, "--workers", "2", *more]
        assert main(sweep_args(out, *args)) == 1
        output = capsys.readouterr().out
        assert "1 finished, 1 failed" in output and ("not finite" in output or more)
        assert "The run failed after update" in output or more  # a note of the error
        assert len(read_manifest(out).errors) == 1
        assert main(["report", str(out)]) == 0
        assert failed in (out / "report.html").read_text()


def test_the_scores_of_configurations_are_in_their_columns(tmp_path):
    for name, means in (("a", [90, 20]), ("b", [80, 30]), ("c", [])):
        rows = [row_of(i, mean) for i, mean in enumerate(means)]
        write_run(tmp_path / "runs" / name, rows, config(simulations=len(name)), extras=False)
    head, line = scores_of(tmp_path).splitlines()
    assert head.split() == ["settings", "runs", "at", "the", "end", "95", "%", "interval", "best"]
    assert line.split()[-8:] == ["2", "of", "3", "25.00", "20.00", "to", "30.00", "90.00"]


@pytest.mark.slow
def test_runs_of_a_sweep_are_as_planned_and_have_a_common_report(inline, capsys):
    manifest, algorithm = read_manifest(inline), find_algorithm(DQN)
    names = [run.name for run in manifest.runs]
    assert names == [run.name for run in find_runs(inline / "runs", 1)]
    for run in manifest.runs:
        config = read_run(inline / "runs" / run.name, algorithm)
        assert config == manifest.config_of(run, algorithm)
        assert (config.seed, config.learning_rate) == (run.seed, run.settings["learning_rate"])
    run = str(inline / "runs" / names[0])
    assert main(["evaluate", run, "--algorithm", DQN, "--episodes", "2"]) == 0
    before = {path: path.stat().st_mtime_ns for path in inline.rglob("metrics.jsonl")}
    assert main(["resume", run, "--algorithm", DQN]) == 0
    assert "nothing left to do" in capsys.readouterr().out
    assert main(["resume", str(inline), "--algorithm", DQN]) == 0
    assert main(["sweep", "--resume", str(inline), "--algorithm", DQN]) == 0
    assert {path: path.stat().st_mtime_ns for path in inline.rglob("metrics.jsonl")} == before
    assert main(["report", str(inline)]) == 0
    page = (inline / "report.html").read_text()
    for text in ("Scores", "learning_rate=0.001", "95 % interval", "best evaluation", *names):
        assert text in page


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--grid", "learning_rat=1"], "did you mean"),
        (["--grid", "learning_rate=x"], "learning_rate"),
        (["--grid", "learning_rate=1,1.0"], "equal those of run 0-learning_rate=1-seed=0"),
        (["--seeds", "a"], "is not a seed"),
        (["--random", "3"], "must be given together"),
        (["--sweep_seed", "3"], "seed of --random N and --optuna N"),
        (["--workers", "0"], "--workers 0 must be a whole number of at least 1"),
        (["--engine.name", "cloud"], "cloud"),
        (["--devices", "tpu9"], "tpu9"),
        (["--learning_rat", "1"], "did you mean"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_is_written(more, text, tmp_path, capsys):
    assert main(sweep_args(tmp_path / "lr", *SHORT, *more)) == 2
    assert text in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_existing_files_are_not_overwritten(tmp_path, capsys):
    (tmp_path / "x").write_text("mine")
    assert main(sweep_args(tmp_path, "--grid", "rate=1,2", "--seeds", "0")) == 2
    errors = capsys.readouterr().err
    assert "already exists" in errors and f"--grid rate=1,2 --seeds 0 --out {tmp_path}-2" in errors
    (tmp_path / "sweep.json").write_text("{}")
    assert main(sweep_args(tmp_path)) == 2
    assert f"raffia resume {tmp_path}" in capsys.readouterr().err


def test_the_resume_calls_of_taken_folders_name_the_algorithm(inline, capsys):
    for folder in (inline, next((inline / "runs").iterdir())):
        assert main(sweep_args(folder)) == 2
        assert f"raffia resume {folder} --algorithm {DQN}\n" in capsys.readouterr().err
    assert main(["resume", str(inline), "--algorithm", DQN, "--seeds", "3"]) == 2
    assert f"raffia resume {inline} --algorithm {DQN}\n" in capsys.readouterr().err


@pytest.fixture
def planned(tmp_path):
    """The folder of a sweep that has not begun."""
    algorithm = find_algorithm(DQN)
    write_manifest(str(tmp_path), Manifest.of(algorithm, algorithm.config(), plan_runs([0, 1])))
    return tmp_path


def test_a_sweep_in_one_call(tmp_path):
    algorithm, folder, here = find_algorithm(DQN), f"{tmp_path}/lr", EngineConfig(name="inline")
    short = algorithm.config(num_env_steps=240, random_env_steps=100, evaluate_every=120)
    options = dict(algorithm=algorithm, seeds=[0, 1], grid={"learning_rate": [1e-3]}, engine=here)
    result = sweep(short, folder, **options)
    assert (list(result.states.values()), result.failed) == (["finished"] * 2, [])
    with pytest.raises(RunError, match=f"continue it with `raffia resume {folder} --algorithm"):
        sweep(short, folder, **options)


def test_a_second_process_is_kept_out(planned, capsys):
    before = (planned / "sweep.json").read_bytes()
    with claimed(planned):
        with pytest.raises(RunError, match="run by another process"):
            SweepSession(planned, find_algorithm(DQN), view=SweepView()).run()
        assert main(["resume", str(planned), "--algorithm", DQN, "--workers", "2"]) == 1
    assert "run by another process" in capsys.readouterr().err
    assert (planned / "sweep.json").read_bytes() == before


def test_of_two_that_start_in_a_folder_at_once_one_is_refused(planned, monkeypatch, capsys):
    before = (planned / "sweep.json").read_bytes()
    monkeypatch.setattr("raffia.cli.sweep.refuse_taken", lambda *args, **options: None)
    assert main(sweep_args(planned)) == 1  # the folder was free when it looked
    assert f"raffia resume {planned} --algorithm {DQN}" in capsys.readouterr().err.replace(
        "\n", " "
    )
    assert (planned / "sweep.json").read_bytes() == before
