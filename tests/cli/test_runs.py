"""Commands about runs, with the recipe replaced by one that only notes what it was asked for."""

import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from raffia._version import __version__
from raffia.cli import main
from raffia.recipes.efficientzero.config import MAY_CHANGE, EfficientZeroRun
from raffia.recipes.efficientzero.presets import PRESETS
from raffia.report.summary import summarise
from raffia.train.checkpoint import Checkpoints
from raffia.train.config import from_json, setting_names, to_json


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_run(folder, *, config=None, preset="cartpole", rows=()):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    data = to_json(config or PRESETS["cartpole"]) | {"run": {"preset": preset, "torch": "2"}}
    (folder / "config.json").write_text(json.dumps(data))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


STOPPED = [
    {"kind": "start", "update": 0, "env_step": 0, "seconds": 0},
    {"kind": "evaluate", "update": 300, "env_step": 3000, "seconds": 80, "mean_return": 187.0},
    {"kind": "end", "update": 340, "env_step": 3400, "seconds": 95.0, "reason": "stopped"},
]
FINISHED = [*STOPPED[:2], STOPPED[2] | {"env_step": 15000, "reason": "finished"}]
REACHED = [*STOPPED[:2], STOPPED[2] | {"reason": "target"}]


class Recipe:
    """What the commands call, and how they called it."""

    def __init__(self):
        self.calls = []
        self.reason, self.error = "finished", None
        self.found = SimpleNamespace(
            update=300,
            returns=[1.0, 1.0, -1.0, 0.0],
            lengths=[5, 6, 7, 9],
            as_first=[True, True, False, False],
            files=[],
        )

    def result(self, folder):
        return SimpleNamespace(
            folder=folder,
            reason=self.reason,
            update=340,
            env_step=3400,
            mean_return=150.0,
            best_return=187.0,
            seconds=95.0,
            signal="SIGINT",
        )

    def train(self, config, folder, *, view=None, preset=""):
        self.calls.append(("train", config, folder, preset))
        make_run(folder, config=config, preset=preset, rows=STOPPED)
        return self.result(folder)

    def train_run(self, algorithm, config, folder, *, preset, make=None):
        assert type(config) is algorithm.config
        return self.train(config, folder, preset=preset)

    def resume_run(self, folder, algorithm, *, config, make=None):
        self.calls.append(("resume", folder, config))
        if self.error is not None:
            raise self.error
        return self.result(folder)

    def evaluate(self, folder, **options):
        self.calls.append(("evaluate", folder, options))
        return self.found


@pytest.fixture
def recipe(monkeypatch):
    recipe, module = Recipe(), types.ModuleType("raffia.recipes.efficientzero")
    module.train, module.evaluate = recipe.train, recipe.evaluate
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("raffia.recipes.running.train_run", recipe.train_run)
    monkeypatch.setattr("raffia.recipes.running.resume_run", recipe.resume_run)
    return recipe


def fails(words, capsys, status=2):
    assert main(words.split()) == status
    said = capsys.readouterr()
    assert said.out == "" and "Traceback" not in said.err
    return said.err


# -- train


def test_a_preset_is_trained_in_a_folder_of_its_name_and_seed(here, recipe, capsys):
    words = "train efficientzero --preset cartpole --seed 3 --search.num_simulations=7"
    assert main(words.split()) == 0
    config = PRESETS["cartpole"]
    config = replace(config, seed=3, search=replace(config.search, num_simulations=7))
    assert recipe.calls == [("train", config, Path("runs/cartpole-3"), "cartpole")]
    begins, *said = capsys.readouterr().out.splitlines()
    assert begins == (
        "EfficientZero on CartPole-v1, seed 3, in runs/cartpole-3; Ctrl-C saves and leaves"
    )
    assert said[0] == (
        "runs/cartpole-3 finished: 3,400 environment steps, 340 updates in 1 min 35 s; "
        "best mean return 187.0"
    )
    assert said[2].startswith("  raffia evaluate runs/cartpole-3")
    assert said[3].startswith("  raffia report runs/cartpole-3")


def test_settings_come_from_the_preset_then_the_file_then_the_flags(here, recipe):
    Path("mine.yaml").write_text("{seed: 5, search: {num_simulations: 9, max_considered: 4}}")
    words = "train efficientzero --config mine.yaml --seed 6 --preset smoke --run kept/here"
    assert main(words.split()) == 0
    [(_, config, folder, preset)] = recipe.calls
    assert (config.seed, config.search.num_simulations, config.search.max_considered) == (6, 9, 4)
    assert config.replay == PRESETS["smoke"].replay
    assert (folder, preset) == (Path("kept/here"), "smoke")


def test_a_file_alone_changes_the_defaults_and_names_the_folder(here, recipe):
    Path("mine.json").write_text('{"env": {"id": "Acrobot-v1"}}')
    assert main("train efficientzero --config=mine.json".split()) == 0
    [(_, config, folder, preset)] = recipe.calls
    assert config == replace(
        EfficientZeroRun(), env=replace(EfficientZeroRun().env, id="Acrobot-v1")
    )
    assert (folder, preset) == (Path("runs/mine-0"), "")


def test_a_runs_own_config_can_be_trained_again(here, recipe):
    run = make_run("runs/a", config=PRESETS["smoke"])
    assert main(["train", "efficientzero", "--config", str(run / "config.json"), "--run=b"]) == 0
    assert recipe.calls[0][1] == PRESETS["smoke"]


def test_a_run_that_is_there_is_not_trained_over(here, recipe, capsys):
    make_run("runs/cartpole-0", rows=STOPPED)
    (here / "runs/cartpole-0-2").mkdir()
    words = "train efficientzero --preset cartpole --seed 0 --run runs/cartpole-0"
    said = fails(words, capsys)
    assert said == (
        "error: runs/cartpole-0 holds a run already: stopped after 3,400 environment steps, best "
        "return 187.0\n"
        "  raffia resume runs/cartpole-0\n"
        "  raffia train efficientzero --preset cartpole --seed 0 --run runs/cartpole-0-3\n"
    )
    assert recipe.calls == []


@pytest.mark.parametrize("algorithm", ["efficientzero --preset cartpole", "ilql --preset wordle"])
def test_without_a_folder_a_second_run_gets_the_first_one_that_is_free(
    here, recipe, capsys, algorithm
):
    name = algorithm.rpartition(" ")[2]
    make_run(f"runs/{name}-0", rows=STOPPED)
    (here / f"runs/{name}-0-2").mkdir()
    assert main(f"train {algorithm}".split()) == 0
    assert [folder for _, _, folder, _ in recipe.calls] == [Path(f"runs/{name}-0-3")]
    said = capsys.readouterr().out
    assert f"runs/{name}-0 stopped after 3,400" in said and f"raffia resume runs/{name}-0" in said


def test_a_folder_of_something_else_is_left_alone(here, recipe, capsys):
    (here / "mine").mkdir()
    (here / "mine" / "thesis.tex").touch()
    said = fails("train efficientzero --preset smoke --run mine", capsys)
    assert "mine is there already, and is no run" in said and "--run mine-2" in said
    (here / "mine" / "thesis.tex").unlink()
    assert main("train efficientzero --preset smoke --run mine".split()) == 0


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        ("train", ["which algorithm?", "raffia train efficientzero\n"]),
        ("train --preset smoke", ["raffia train efficientzero --preset smoke\n"]),
        ("train effzero --seed 1", ["did you mean efficientzero?", "efficientzero --seed 1\n"]),
        ("train efficientzero", ["Give --preset NAME or --config FILE", "--preset cartpole\n"]),
        (
            "train efficientzero --preset=cartpol --seed 1",
            ["there is no preset 'cartpol'; did you mean cartpole?", "raffia list presets\n"],
        ),
        ("train efficientzero --preset", ["--preset needs a value"]),
        ("train efficientzero --preset smoke --run --seed 1", ["--run needs a value"]),
        ("train efficientzero --preset smoke --config gone.json", ["there is no file gone.json"]),
        (
            "train efficientzero --preset smoke --search.num_sims 1",
            ["there is no --search.num_sims; did you mean --search.num_simulations?"],
        ),
        (
            "train efficientzero --preset smoke --search.num_simulations 0",
            ["search: num_simulations=0 must be at least 1", "raffia train efficientzero --help"],
        ),
    ],
)
def test_mistakes_in_training_are_refused_before_anything_is_made(
    words, texts, here, recipe, capsys
):
    said = fails(words, capsys)
    for text in texts:
        assert text in said
    assert recipe.calls == [] and list(here.iterdir()) == []


def test_a_call_for_a_misspelt_preset_can_be_copied(here, capsys):
    said = fails("train efficientzero --preset cartpol --seed 1", capsys)
    assert "\n  raffia train efficientzero --preset cartpole --seed 1\n" in said
    said = fails("train efficientzero --preset=cartpol --seed 1", capsys)
    assert "\n  raffia train efficientzero --preset=cartpole --seed 1\n" in said


def test_a_stopped_run_says_how_to_go_on(here, recipe, capsys):
    recipe.reason = "stopped"
    assert main("train efficientzero --preset smoke".split()) == 130
    assert "\n  raffia resume runs/smoke-0 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("device", "why"),
    [("gpu", "it knows no such device"), ("cuda:77", "there is no cuda for it here (")],
)
@pytest.mark.parametrize("words", ["train efficientzero --preset smoke", "resume runs/a"])
def test_a_device_that_is_not_there_is_told(device, why, words, here, recipe, capsys):
    make_run("runs/a", rows=STOPPED)
    assert main([*words.split(), "--device", device]) == 2
    said = capsys.readouterr().err
    assert f"error: torch cannot compute on --device {device}: {why}" in said
    assert said.endswith("\n  raffia doctor\n") and recipe.calls == []


# -- resume


def test_a_run_goes_on(here, recipe, capsys):
    make_run("runs/a", rows=STOPPED)
    assert main(["resume", "runs/a"]) == 0
    assert recipe.calls == [("resume", Path("runs/a"), PRESETS["cartpole"])]
    assert "runs/a finished" in capsys.readouterr().out


def test_a_run_may_be_lengthened(here, recipe):
    make_run("runs/a", rows=FINISHED)
    words = "resume runs/a --collect.num_env_steps 30000 --evaluate.target_return none"
    assert main([*words.split(), "--checkpoint.keep", "5"]) == 0
    ((_, folder, config),) = recipe.calls
    assert folder == Path("runs/a")
    before = PRESETS["cartpole"]
    assert config.collect == replace(before.collect, num_env_steps=30_000)
    assert config.checkpoint == replace(before.checkpoint, keep=5)
    assert replace(config, collect=before.collect, checkpoint=before.checkpoint) == before


def test_a_run_that_cannot_begin_with_new_settings_keeps_its_own(here, recipe, capsys):
    make_run("runs/a", rows=FINISHED)
    recipe.error = OSError("no memory for so many")
    assert main("resume runs/a --collect.num_env_steps 30000".split()) == 1
    assert "no memory for so many" in capsys.readouterr().err
    data = json.loads(Path("runs/a/config.json").read_text())
    assert data.pop("run")["preset"] == "cartpole"
    assert from_json(EfficientZeroRun, data) == PRESETS["cartpole"]


def test_what_shaped_the_learning_stays(here, recipe, capsys):
    make_run("runs/a", rows=STOPPED)
    text = Path("runs/a/config.json").read_text()
    said = fails("resume runs/a --search.num_simulations 50 --collect.num_env_steps 900", capsys)
    assert "search.num_simulations shapes what is learnt" in said
    assert "  raffia resume runs/a\n" in said
    assert (
        "  raffia train efficientzero --config runs/a/config.json --search.num_simulations 50 "
        "--collect.num_env_steps 900 --run runs/a-new\n"
    ) in said
    assert recipe.calls == [] and Path("runs/a/config.json").read_text() == text
    same = str(PRESETS["cartpole"].search.num_simulations)
    assert main(["resume", "runs/a", "--search.num_simulations", same]) == 0


def test_what_may_change_exists():
    names = setting_names(EfficientZeroRun)
    for start in MAY_CHANGE:
        assert any(name == start or name.startswith(start) for name in names)
        assert start.endswith(".") or start in names


@pytest.mark.parametrize(
    ("rows", "call"),
    [
        (FINISHED, "raffia resume runs/a --collect.num_env_steps 30000"),
        (REACHED, "raffia resume runs/a --evaluate.target_return none"),
    ],
)
def test_of_a_run_that_ended_there_is_nothing_to_do(rows, call, here, recipe, capsys):
    ended_with(make_run("runs/a", rows=rows))
    assert main(["resume", "runs/a"]) == 0
    assert recipe.calls == []
    said = capsys.readouterr().out
    assert "there is nothing left to do" in said and call in said


def ended_with(run):
    """The checkpoint that a run has saved before it said that it had ended."""
    checkpoints = Checkpoints(run / "checkpoints")
    checkpoints.save(1, {"note": b"first"})
    return checkpoints.save(summarise(run).update or 2, {"note": b"last"})


def test_a_run_that_ended_and_whose_last_checkpoint_is_damaged_is_gone_on_with(
    here, recipe, capsys
):
    [file] = ended_with(make_run("runs/a", rows=FINISHED)).glob("note*")
    file.write_bytes(b"lost")
    assert main(["resume", "runs/a"]) == 0
    assert [name for name, *_ in recipe.calls] == ["resume"]
    said = capsys.readouterr().out
    assert "nothing left" not in said and "passed over" not in said  # which the resume itself says


def test_an_environment_of_any_name_can_be_printed(here, capsys):
    config = to_json(PRESETS["smoke"])
    config["env"]["id"] = "\ud800"
    Path("own.json").write_text(json.dumps(config))
    assert main(["train", "efficientzero", "--config", "own.json"]) != 0
    assert r"EfficientZero on \ud800, seed 0" in capsys.readouterr().out


# -- which run


def test_without_a_run_the_newest_are_offered(here, capsys):
    import os

    for number, name in enumerate(["a", "b", "c", "d"]):
        run = make_run(f"runs/{name}", rows=STOPPED)
        os.utime(run / "metrics.jsonl", (number, number))
    said = fails("evaluate", capsys).splitlines()
    assert said == ["error: which run?", *[f"  raffia evaluate runs/{name}" for name in "dcb"]]


@pytest.mark.parametrize("command", ["resume", "evaluate", "report"])
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("runs/cartpole-1", "runs/cartpole-1 does not exist; did you mean runs/cartpole-0?"),
        ("cartpole-0", "cartpole-0 does not exist; did you mean runs/cartpole-0?"),
        ("runs", "runs holds no run; did you mean runs/cartpole-0?"),
        ("runs/cartpole-0/config.json", "config.json holds no run; did you mean runs/cartpole-0?"),
    ],
)
def test_a_run_that_is_none_gets_the_nearest(command, given, text, here, recipe, capsys):
    make_run("runs/cartpole-0", rows=STOPPED)
    said = fails(f"{command} {given}", capsys)
    assert text in said and f"\n  raffia {command} runs/cartpole-0\n" in said


def test_without_any_run_the_way_to_one_is_told(here, capsys):
    assert "--preset cartpole" in fails("resume", capsys)
    said = fails("resume gone", capsys)
    assert "error: gone does not exist\n  raffia list\n" in said


def test_a_damaged_config_is_named(here, recipe, capsys):
    run = make_run("runs/a", rows=STOPPED)
    (run / "config.json").write_text('{"sead": 1}')
    assert "runs/a/config.json: there is no setting sead; did you mean seed?" in fails(
        "resume runs/a", capsys
    )


def test_a_run_of_another_version_is_told_as_such(here, recipe, capsys):
    run = make_run("runs/a", rows=STOPPED)
    made_by = {"preset": "cartpole", "raffia": "9.8.7"}
    (run / "config.json").write_text(json.dumps({"sead": 1, "run": made_by}))
    for command in ("resume", "evaluate"):
        said = fails(f"{command} runs/a", capsys)
        assert "there is no setting sead" in said
        assert f"The run is of raffia 9.8.7, this is {__version__}" in said


# -- evaluate


def test_an_evaluation_is_shown_and_kept(here, recipe, capsys):
    make_run("runs/t", config=PRESETS["tictactoe"], rows=STOPPED)
    words = "evaluate runs/t --episodes 4 --checkpoint 300 --seed 2 --opponent rule --record"
    assert main([*words.split(), "--format=mp4", "--num-simulations", "9"]) == 0
    options = {"episodes": 4, "checkpoint": "300", "seed": 2, "num_simulations": 9}
    assert recipe.calls == [
        (
            "evaluate",
            Path("runs/t"),
            {**options, "record": 3, "suffix": "mp4", "opponent": "rule"},
        )
    ]
    said = capsys.readouterr().out
    assert "first      2      0       0" in said and "second     0      1       1" in said
    assert "return  0.25  0.48  -1.0     0.5  1.0" in said
    path = Path("runs/t/evaluations/update-300-4-episodes-seed-2-9-simulations-rule.json")
    assert f"wrote {path}" in said
    data = json.loads(path.read_text())
    assert data["returns"] == [1.0, 1.0, -1.0, 0.0] and data["as_first"][2] is False
    assert (data["mean_return"], data["median_return"]) == (0.25, 0.5)
    # by hand: deviations .75 .75 -1.25 -.25, squares sum to 2.75; sqrt(2.75 / 3) / sqrt(4)
    assert data["standard_error"] == pytest.approx(0.478714)
    assert (data["checkpoint"], data["opponent"], data["seed"]) == ("300", "rule", 2)


def test_who_waits_for_an_evaluation_is_told(here, recipe, capsys, monkeypatch):
    make_run("runs/a", rows=STOPPED)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert main("evaluate runs/a --episodes 1 --json".split()) == 0
    said = capsys.readouterr()
    assert said.err == "playing 1 episode with runs/a ...\n" and json.loads(said.out)


def test_an_evaluation_can_be_one_line_of_json(here, recipe, capsys):
    make_run("runs/a", rows=STOPPED)
    recipe.found = SimpleNamespace(
        update=300, returns=[3.0], lengths=[3], as_first=[], files=["runs/a/e.gif"]
    )
    assert main("evaluate runs/a --json".split()) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["standard_error"] is None and data["files"] == ["e.gif"]
    assert "as_first" not in data
    assert recipe.calls[0][2]["episodes"] == 100 and recipe.calls[0][2]["checkpoint"] == "best"


@pytest.mark.parametrize(
    ("words", "record"),
    [
        ("runs/a", 0),
        ("--record runs/a", 3),
        ("runs/a --record", 3),
        ("--record 7 runs/a", 7),
        ("runs/a --record=7", 7),
        ("runs/a --record --seed 1", 3),
    ],
)
def test_films_may_be_counted_or_not(words, record, here, recipe):
    make_run("runs/a", rows=STOPPED)
    assert main(["evaluate", *words.split()]) == 0
    assert recipe.calls[0][2]["record"] == record


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--record 0", "--record: '0' is no whole number above 0"),
        ("--episodes 0", "--episodes: '0' is no whole number above 0"),
        ("--num-simulations x", "--num-simulations: 'x' is no whole number above 0"),
        ("--checkpoint worst", "'worst' is neither best nor newest nor the number of an update"),
        ("--opponent friend", "--opponent: invalid choice: 'friend'"),
        ("--opponent random", "is for games of two players; runs/a plays CartPole-v1"),
    ],
)
def test_mistakes_in_evaluating_are_told(words, text, here, recipe, capsys):
    make_run("runs/a", rows=STOPPED)
    assert text in fails(f"evaluate runs/a {words}", capsys)
    assert recipe.calls == []


# -- demo


def test_the_demo_trains_reports_and_says_what_to_try_next(here, recipe, capsys):
    pytest.importorskip("matplotlib")
    recipe.reason = "target"
    assert main("demo --seed 4".split()) == 0
    [(_, config, folder, preset)] = recipe.calls
    assert (config.seed, config.evaluate.target_return) == (4, 200.0)
    assert config.env.id == "CartPole-v1" and preset == "cartpole"
    assert folder == Path("runs/demo")
    said = capsys.readouterr().out
    assert "until a mean return of 200; Ctrl-C" in said.splitlines()[0]
    assert "runs/demo reached its target return: 3,400 environment steps, 340 updates in" in said
    assert f"report: {here / 'runs/demo/report.html'}" in said
    for call in ["resume runs/demo", "evaluate runs/demo", "play runs/tictactoe-0"]:
        assert f"\n  raffia {call}" in said
    assert main(["demo"]) == 0
    assert recipe.calls[1][2] == Path("runs/demo-2")


def test_a_demo_that_is_stopped_says_how_to_go_on(here, recipe, capsys):
    recipe.reason = "stopped"
    assert main("demo --out mine".split()) == 130
    assert "\n  raffia resume mine " in capsys.readouterr().out
    said = fails("demo --out mine", capsys)
    assert "raffia resume mine\n" in said and "raffia demo --out mine-2\n" in said


def test_a_demo_that_falls_short_can_go_on(here, recipe, capsys):
    assert main("demo --out mine".split()) == 0
    steps = 2 * PRESETS["cartpole"].collect.num_env_steps
    said = capsys.readouterr().out
    assert f"\n  raffia resume mine --collect.num_env_steps {steps} " in said


def test_a_demo_without_what_draws_the_report_is_not_lost(here, recipe, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main("demo --out mine".split()) == 0
    said = capsys.readouterr().out
    assert "pip install 'raffia[report]'; then raffia report mine\n" in said
    assert "\n  raffia evaluate mine " in said


# -- list, report, check-env


def test_presets_and_runs_are_listed(here, capsys):
    later = {"kind": "evaluate", "update": 320, "env_step": 3200, "seconds": 90, "mean_return": 150}
    rows = [*STOPPED[:2], later, STOPPED[2]]
    make_run("runs/a", config=replace(PRESETS["smoke"], seed=7), rows=rows)
    make_run("runs/new")
    assert main(["list"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 110
    for name, config in PRESETS.items():
        assert f"\n  {name} " in said and f"{config.collect.num_env_steps:,}" in said
    line = next(line for line in said.splitlines() if line.startswith("  runs/a "))
    words = ["runs/a", "CartPole-v1", "7", "stopped", "3,400", "340", "1", "min", "35", "s"]
    assert line.split() == [*words, "150.0", "187.0"]  # the latest, the best
    assert "empty" in next(line for line in said.splitlines() if "runs/new" in line)
    assert main(["list", "runs", "--in", "gone"]) == 0
    assert "none yet" in capsys.readouterr().out


def test_environments_are_listed_bare(capsys):
    assert main(["list", "environments"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert {"CartPole-v1", "tictactoe", "minatar/breakout"} <= set(names)


def test_a_report_is_written(here, capsys):
    pytest.importorskip("matplotlib")
    make_run("runs/a", rows=STOPPED)
    make_run("runs/b", rows=FINISHED)
    assert main("report runs/a".split()) == 0
    assert capsys.readouterr().out == "wrote runs/a/report.html\n"
    assert main("report runs/a runs/b --out both.html".split()) == 0
    assert "<html" in Path("both.html").read_text()


def test_a_env_is_checked(capsys):
    assert main("check-env probe/delay --steps 20".split()) == 0
    said = capsys.readouterr().out
    assert said.startswith("probe/delay keeps the contract\nok ")


def test_a_env_that_fails_is_told_by_the_exit_status(monkeypatch, capsys):
    from raffia.envs.check import Finding, Report

    found = Report("mine", (Finding("numbers", "fails", "nan at step 3", "give finite ones"),))
    monkeypatch.setattr(
        "raffia.recipes.environments.check_env_id", lambda name, seed, num_steps: found
    )
    assert main(["check-env", "mine"]) == 1
    said = capsys.readouterr().out
    assert said.splitlines()[0] == "mine does not keep the contract"
    assert "fails  numbers: nan at step 3" in said


def test_an_unknown_env_gets_the_nearest(capsys):
    assert "Did you mean 'CartPole-v1'?" in fails("check-env Cartpole-v1", capsys, status=1)
    assert "raffia check-env CartPole-v1" in fails("check-env", capsys)


# -- play


def test_only_games_can_be_played(here, capsys):
    make_run("runs/a", rows=STOPPED)
    said = fails("play runs/a", capsys)
    assert "runs/a plays CartPole-v1; a person can play tictactoe and connect4" in said
    assert "\n  raffia train efficientzero --preset tictactoe\n" in said
    made = PRESETS["tictactoe"]
    said = fails("play", capsys)
    assert said == "error: which run?\n  raffia train efficientzero --preset tictactoe\n"
    make_run("runs/b", config=made, rows=STOPPED)
    assert fails("play", capsys) == "error: which run?\n  raffia play runs/b\n"
