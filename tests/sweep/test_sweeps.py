"""Sweeps as a user calls them: the same runs by any engine, whoever dies."""

import json
import os
import signal
from pathlib import Path

import pytest

from raffia.cli import main
from raffia.cli.sweep import scores_of
from raffia.recipes.algorithm import find_algorithm
from raffia.recipes.run_folder import read_run
from raffia.report.folder import find_runs
from raffia.sweep import SweepSession, read_manifest
from raffia.sweep.progress import SweepView
from raffia.train.checkpoint import Checkpoints
from tests.processes import children, started, wait_for
from tests.recipes.runs import last_state, same
from tests.report.made_runs import config, write_run

ROOT = Path(__file__).parents[2]
DQN = f"{ROOT}/examples/own_algorithm.py:dqn"
SHORT = ["--num_env_steps", "240", "--random_env_steps", "100", "--evaluate_every", "120"]
TWO = [*SHORT, "--seeds", "0..1", "--grid", "learning_rate=1e-3,2e-3"]


def words(out, *more):
    return ["sweep", DQN, *(more or TWO), "--out", str(out)]


def row_of(update, mean):
    at = dict.fromkeys(("update", "env_step", "seconds"), update)
    return {"kind": "evaluate", **at, "mean_return": mean}


def digests(folder):
    """What the runs have come to, by name: rows without times, and the last checkpoint."""
    return {run.name: (rows(run), last_state(run)[1]) for run in find_runs(folder / "runs", 1)}


def rows(run):
    """Evaluations and the end; how often a run was resumed does not count."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [row for row in found if row["kind"] in ("evaluate", "episode", "end")]
    return [{key: row[key] for key in row if "seconds" not in key} for row in kept]


def ended(process, status=0):
    """What it said, once it has ended as it should."""
    shown, _ = process.communicate(timeout=100)
    assert process.returncode == status, shown
    return shown


def assert_equal(one, other):
    assert one.keys() == other.keys() and one
    for name in one:
        assert one[name][0] == other[name][0], name
        parts, others = one[name][1], other[name][1]
        assert parts.keys() == others.keys()
        assert all(same(parts[part], others[part]) for part in parts), name


@pytest.fixture(scope="module")
def inline(tmp_path_factory):
    """A sweep of four runs in this process."""
    folder = tmp_path_factory.mktemp("inline") / "lr"
    assert main(words(folder, *TWO, "--engine.name", "inline")) == 0
    return folder


@pytest.mark.slow
def test_processes_give_the_same_runs(inline, tmp_path, capsys):
    assert main(words(tmp_path / "lr", *TWO, "--workers", "2")) == 0
    shown = capsys.readouterr().out
    assert "4 runs of DQN" in shown and "2 at a time (process)" in shown
    assert "4 finished" in shown and "learning_rate=0.002" in shown
    assert_equal(digests(tmp_path / "lr"), digests(inline))


@pytest.mark.slow
def test_actors_of_ray_give_the_same_runs(inline, tmp_path):
    pytest.importorskip("ray")
    out = tmp_path / "lr"
    leader = started(*words(out, *TWO, "--workers", "2", "--engine.name", "ray"))
    ended(leader)
    assert_equal(digests(out), digests(inline))


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        ["ilql", "--preset", "ilql-smoke", "--num_updates", "3", "--population", "2"],
        ["efficientzero", "--preset", "smoke", "--population", "2", "--env.id", "probe/value"],
    ],
    ids=lambda given: given[0],
)
def test_populations_and_presets_of_either_agent(given, tmp_path, capsys):
    out = tmp_path / "of"
    more = [] if given[0] == "ilql" else ["--collect.num_env_steps", "100"]
    more += ["--random", "2", "--ranges", "optimizer.learning_rate=1e-4..1e-2"]
    assert main(["sweep", *given, *more, "--engine.name", "inline", "--out", str(out)]) == 0
    assert "2 finished" in capsys.readouterr().out
    assert {read_run(run).population.size for run in find_runs(out / "runs", 1)} == {2}


def leader_of(out):
    return started(*words(out, *LONG))


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
    """The workers whose runs have a checkpoint, from which they can be resumed, and go on."""
    servers = [pid for pid in children(leader) if "forkserver" in command(pid)]
    found = []
    for worker in (pid for server in servers for pid in children(server)):
        try:
            held = [Path(os.readlink(path)) for path in Path(f"/proc/{worker}/fd").iterdir()]
        except OSError:  # it has ended, or has closed one meanwhile
            continue
        runs = [path.parent for path in held if path.name == "metrics.jsonl"]
        if any(is_saved(run) for run in runs):
            found.append(worker)
    return found


def is_saved(run):
    """Whether it has a whole checkpoint; one that is being written is no use."""
    return bool(Checkpoints(run / "checkpoints").available())


def has_saved_both(out):
    return len([run for run in out.glob("runs/*") if is_saved(run)]) == 2


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "lr"
    assert main(words(folder, *LONG)) == 0
    return folder


@pytest.mark.slow
def test_a_killed_worker_changes_nothing(undisturbed, tmp_path):
    out = tmp_path / "lr"
    leader = leader_of(out)
    os.kill(wait_for(lambda: training(leader.pid))[0], signal.SIGKILL)
    ended(leader)
    kinds = [line for file in out.rglob("metrics.jsonl") for line in file.read_text().splitlines()]
    assert sum('"kind": "resume"' in line for line in kinds) == 1  # it was killed in a run
    assert_equal(digests(out), digests(undisturbed))


@pytest.mark.slow
def test_a_killed_leader_is_gone_on_with(undisturbed, tmp_path):
    out = tmp_path / "lr"
    leader = leader_of(out)
    wait_for(lambda: has_saved_both(out))
    leader.kill()
    leader.communicate()
    ended(started("resume", out, "--algorithm", DQN))
    assert_equal(digests(out), digests(undisturbed))


@pytest.mark.slow
def test_a_signal_saves_every_run_and_tells_how_to_go_on(undisturbed, tmp_path):
    number = signal.SIGTERM
    out = tmp_path / "lr"
    leader = leader_of(out)
    wait_for(lambda: has_saved_both(out))
    leader.send_signal(number)
    shown = ended(leader, 128 + number)
    assert "2 stopped" in shown and f"raffia resume {out} --algorithm" in shown
    ends = [row["reason"] for run in find_runs(out / "runs", 1) for row in rows(run)[-1:]]
    assert ends == ["stopped", "stopped"]
    assert main(["resume", str(out), "--algorithm", DQN]) == 0
    kept, wanted = (
        {name: (found[0][-1:], found[1]) for name, found in digests(folder).items()}
        for folder in (out, undisturbed)
    )
    assert_equal(kept, wanted)


@pytest.mark.slow
def test_a_run_that_fails_ends_no_other(tmp_path, capsys):
    """After it has begun, or before."""
    for out, grid, failed, *more in (
        (tmp_path / "lr", "learning_rate=1e-3,1e30", "1-learning_rate=1e+30-seed=0"),
        (tmp_path / "envs", "env.id=CartPole-v1,CartPol-v1", "CartPol-v1", "--engine.name=inline"),
    ):
        given = [*SHORT, "--seeds", "0", "--grid", grid, "--workers", "2", *more]
        assert main(words(out, *given)) == 1
        shown = capsys.readouterr().out
        assert "1 finished, 1 failed" in shown and ("not finite" in shown or more)
        assert len(read_manifest(out).errors) == 1
        assert main(["report", str(out)]) == 0
        assert failed in (out / "report.html").read_text()


def test_the_scores_of_configurations_stand_in_their_columns(tmp_path):
    for name, means in (("a", [90, 20]), ("b", [80, 30])):
        rows = [row_of(i, mean) for i, mean in enumerate(means)]
        write_run(tmp_path / "runs" / name, rows, config(simulations=len(name)), extras=False)
    head, line = scores_of(tmp_path).splitlines()
    assert head.split() == ["settings", "runs", "at", "the", "end", "95", "%", "interval", "best"]
    assert line.split()[-6:] == ["2", "25.0", "20.0", "to", "30.0", "90.0"]


@pytest.mark.slow
def test_the_runs_are_ordinary_and_as_planned_with_one_report_over_all(inline, capsys):
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
        (["--seeds", "a"], "is not a seed"),
        (["--random", "3"], "must be given together"),
        (["--workers", "0"], "--workers 0 must be a whole number of at least 1"),
        (["--engine.name", "cloud"], "cloud"),
        (["--devices", "tpu9"], "tpu9"),
        (["--learning_rat", "1"], "did you mean"),
    ],
)
def test_a_call_without_sense_is_refused_before_anything_is_written(more, text, tmp_path, capsys):
    assert main(words(tmp_path / "lr", *SHORT, *more)) == 2
    assert text in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_written_over(tmp_path, capsys):
    (tmp_path / "x").write_text("mine")
    assert main(words(tmp_path)) == 2
    assert "already exists" in capsys.readouterr().err
    (tmp_path / "sweep.json").write_text("{}")
    assert main(words(tmp_path)) == 2
    assert f"raffia resume {tmp_path}" in capsys.readouterr().err


def test_a_second_process_is_kept_out(tmp_path):
    from raffia.recipes import RunError
    from raffia.recipes.run_folder import claimed
    from raffia.sweep import Manifest, plan_runs, write_manifest

    algorithm = find_algorithm(DQN)
    write_manifest(tmp_path, Manifest.of(algorithm, algorithm.config(), plan_runs([0])))
    with claimed(tmp_path), pytest.raises(RunError, match="run by another process"):
        SweepSession(tmp_path, algorithm, view=SweepView()).run()
