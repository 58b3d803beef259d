"""Commands about runs, with the recipe replaced by one that only records its calls."""

import io
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from raffia._version import __version__
from raffia.cli import main
from raffia.recipes.efficientzero.config import MAY_CHANGE, EfficientZeroRun
from raffia.recipes.efficientzero.presets import PRESETS
from raffia.recipes.ilql.presets import ILQL_PRESETS
from raffia.recipes.run_folder import algorithm_of
from raffia.report.folder import MANIFEST, summarise
from raffia.train.checkpoint import Checkpoints
from raffia.train.config import from_json, setting_names, to_json

POLE = PRESETS["cartpole"]


def make_run(folder, *, config=None, preset="cartpole", rows=(), **versions):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    data = to_json(config or POLE) | {"run": {"preset": preset, "torch": "2", **versions}}
    data["run"]["algorithm"] = algorithm_of(config or POLE).name
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
    """Stands for the functions that the commands call, and records the calls."""

    def __init__(self):
        self.calls, self.reason, self.error = [], "finished", None
        self.found = SimpleNamespace(
            update=300, returns=[1.0, 1.0, -1.0, 0.0], lengths=[5, 6, 7, 9], files=[], num_cut=0
        )
        self.found.as_first = [True, True, False, False]

    def result(self, folder):
        counts = {"update": 340, "env_step": 3400, "seconds": 95.0}
        returns = {"mean_return": 150.0, "best_return": 187.0}
        end = {"reason": self.reason, "signal": "SIGINT"}
        return SimpleNamespace(folder=folder, **counts, **returns, **end)

    def train(self, config, folder, *, view=None, preset="", algorithm=None, make_env=None):
        assert algorithm is None or type(config) is algorithm.config
        self.calls.append(("train", config, folder, preset))
        make_run(folder, config=config, preset=preset, rows=STOPPED)
        return self.result(folder)

    def resume(self, folder, *, algorithm, config, make_env=None):
        self.calls.append(("resume", folder, config))
        if self.error is not None:
            raise self.error
        return self.result(folder)

    def evaluate(self, folder, **options):
        self.calls.append(("evaluate", folder, options))
        return self.found


@pytest.fixture
def recipe(monkeypatch):
    recipe = Recipe()
    for name in ("efficientzero.train", "efficientzero.evaluate", "train", "resume"):
        monkeypatch.setattr(f"raffia.recipes.{name}", getattr(recipe, name.rpartition(".")[2]))
    return recipe


def error_of(args, capsys, status=2):
    assert main(args.split()) == status
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    return captured.err


# ---------------------------------------------------------------------------- refused calls


def mistakes(table):
    """Rows of a command's arguments and parts of its error; indented lines continue a row."""
    rows = re.sub(r"\n +", " ", table.strip()).splitlines()
    return pytest.mark.parametrize(("args", "texts"), [row.split(" => ") for row in rows])


def check(message, texts):
    """A suggested call must have its own line."""
    for text in texts.split(" | "):
        assert (f"\n  {text}\n" if text.startswith("raffia ") else text) in message


@mistakes("""
train => which algorithm? | raffia train efficientzero
train effzero --seed 1 => did you mean efficientzero? | raffia train efficientzero --seed 1
train efficientzero => pass --preset NAME or --config FILE
    | raffia train efficientzero --preset cartpole
train efficientzero --preset=cartpol --seed 1 => no preset 'cartpol'; did you mean cartpole?
    | raffia list presets | raffia train efficientzero --preset=cartpole --seed 1
train efficientzero --preset cartpol --seed 1
    => raffia train efficientzero --preset cartpole --seed 1
train efficientzero --preset => --preset needs a value
train efficientzero --preset smoke --run --seed 1 => --run needs a value
train efficientzero --preset smoke --config gone.json => there is no file gone.json
train efficientzero --preset smoke --search.num_sims 1 => did you mean --search.num_simulations?
train efficientzero --preset smoke --search.num_simulations 0 => raffia train efficientzero --help
    | search: num_simulations=0 must be at least 1
train ilql => pass --preset NAME, --data FILE or --config FILE | --preset wordle
train ilql --preset wordl => did you mean wordle? | raffia train ilql --preset wordle
train ilql --preset => --preset needs a value | raffia train ilql --help
train ilql --preset wordle --loss.tau 2 => tau=2.0 must be in 0..1
train ilql --preset dialogue --language_model gpt --model.trunk.n_layer=3 =>
    --model.trunk.n_layer: the sizes are those of the model in gpt
train ilql --preset wordle --method bcc => --method='bcc' must be one of
train ilql --config a.json --method bc => --method sets numbers that --config sets, too
train ilql --preset wordle --model.trunk.vocab_size 7 => it follows from the tokens; leave it out
train ilql --preset language-model --data a.jsonl => starts from a language model: give its folder
    | raffia train ilql --preset language-model --data a.jsonl --language_model FOLDER
trian efficientzero => there is no command 'trian'; did you mean train? | raffia --help
list preset => presets
demo --sed 3 => --seed
resume => --preset cartpole
sweep --resume => --resume needs a value | raffia sweep --help
sweep ilql --preset => --preset needs a value | raffia sweep ilql --help
resume gone => error: gone does not exist | raffia list
play => error: which run? | raffia train efficientzero --preset tictactoe
chat => which run? | raffia train ilql --preset wordle
chat gone => gone does not exist
chat --checkpoint last => 'last' must be best, newest, or the number
chat --temprature 1 => did you mean --temperature?
export gone => gone does not exist
check-env => raffia check-env CartPole-v1
""")
def test_mistakes_are_refused_before_anything_is_made(args, texts, here, capsys):
    message = error_of(args, capsys)
    assert message.startswith("error: ")
    check(message, texts)
    assert list(here.iterdir()) == []


RUN = "runs/cartpole-0"


@mistakes("""
resume runs/cartpole-1 => runs/cartpole-1 does not exist; did you mean runs/cartpole-0?
    | raffia resume runs/cartpole-0
evaluate cartpole-0 => cartpole-0 does not exist; did you mean runs/cartpole-0?
    | raffia evaluate runs/cartpole-0
report runs => runs holds no run; did you mean runs/cartpole-0? | raffia report runs/cartpole-0
resume runs/cartpole-0/config.json => config.json holds no run; did you mean runs/cartpole-0?
resume runs/cartpole-0 --collect.num_env_step 3 => --collect.num_env_steps
resume runs/cartpole-0 --search.num_simulations 50 --collect.num_env_steps 900
    => search.num_simulations shapes what is learnt | raffia resume runs/cartpole-0
    | raffia train efficientzero --config runs/cartpole-0/config.json --search.num_simulations 50
    --collect.num_env_steps 900 --run runs/cartpole-0-new
resume runs/wordle --wordle.num_words 25 => wordle.num_words shapes what is learnt
resume runs/damaged => damaged/config.json: there is no setting sead; did you mean seed?
resume runs/other => no setting sead | was written by raffia 9.8.7, and this is VERSION
evaluate runs/other => no setting sead | was written by raffia 9.8.7, and this is VERSION
evaluate runs/cartpole-0 --record 0 => --record: '0' is not a whole number of at least 1
evaluate runs/cartpole-0 --episodes 0 => --episodes: '0' is not a whole number of at least 1
evaluate runs/cartpole-0 --num-simulations x => --num-simulations: 'x' is not a whole number of at
evaluate runs/cartpole-0 --checkpoint worst => 'worst' must be best, newest, or the number
evaluate runs/cartpole-0 --opponent friend => --opponent: invalid choice: 'friend'
evaluate runs/cartpole-0 --opponent random => is for two-player games, but runs
evaluate runs/cartpole-0 --episods 3 => did you mean --episodes? | raffia evaluate --help
evaluate runs/cartpole-0 --num_simulation=3 => no --num-simulation=3; did you mean --num-simul
evaluate runs/cartpole-0 two => unexpected argument 'two'
evaluate runs/wordle --networks a.py:b => --networks is only for runs of EfficientZero; runs/wordle
evaluate runs/cartpole-0 --format mp4 => --format is that of the videos of --record
    | raffia evaluate runs/cartpole-0 --record --format mp4
report runs/cartpole-0 --ot page.html => --out
report runs/cartpole-0 --out mine => --out mine is a folder | runs/cartpole-0 --out mine/report.html
list runs --in gone => --in gone is not a folder | raffia list runs
list runs/cartpole-0 => is a folder, not a kind of things | raffia list runs --in runs/cartpole-0
check-env CartPole-v1 --seed -1 => --seed: '-1' is not a whole number of at least 0
play runs/game --num-simulations 0 => --num-simulations: '0' is not a whole number of at least 1
play runs/cartpole-0 --secnd => --second
play runs/cartpole-0 => runs/cartpole-0 plays CartPole-v1; a person can play tictactoe and connect4
    | raffia train efficientzero --preset tictactoe
play => error: which run? | raffia play runs/game
chat runs/game => is not a run of ILQL but of EfficientZero on tictactoe | raffia play runs/game
export runs/game => is not a run of ILQL
train efficientzero --preset cartpole --seed 0 --run runs/cartpole-0
    => error: runs/cartpole-0 already holds a run: stopped after 3,400 environment steps, best
    | raffia resume runs/cartpole-0
    | raffia train efficientzero --preset cartpole --seed 0 --run runs/cartpole-0-3
train efficientzero --preset smoke --run mine => mine already exists and is not a run folder
    | --run mine-2
train efficientzero --preset smoke --run swept => swept already holds a sweep | raffia resume swept
    | --run swept-2
demo --out runs/cartpole-0 --seed 3 => raffia resume runs/cartpole-0
    | raffia demo --seed 3 --out runs/cartpole-0-3
""")
def test_errors_about_runs_suggest_the_nearest_call(args, texts, here, capsys):
    make_run("runs/game", config=PRESETS["tictactoe"], rows=STOPPED)
    make_run("runs/wordle", config=ILQL_PRESETS["wordle"], algorithm="ilql")
    make_run("runs/damaged").joinpath("config.json").write_text('{"sead": 1}')
    other = {"sead": 1, "run": {"preset": "cartpole", "raffia": "9.8.7"}}
    make_run("runs/other").joinpath("config.json").write_text(json.dumps(other))
    make_run(RUN, rows=STOPPED)  # the newest
    for folder in (f"{RUN}-2", "mine", "swept"):
        Path(folder).mkdir()
    Path("mine/thesis.tex").touch()
    Path("swept", MANIFEST).write_text("{}")
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    check(error_of(args, capsys), texts.replace("VERSION", __version__))
    assert before == {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("args", "device", "why"),
    [
        ("train efficientzero --preset smoke", "gpu", "no device has this name"),
        ("resume runs/a", "cuda:77", "cuda is not available here ("),
    ],
)
def test_an_unknown_device_is_refused(args, device, why, here, recipe, capsys):
    make_run("runs/a", rows=STOPPED)
    assert main([*args.split(), "--device", device]) == 2
    message = capsys.readouterr().err
    assert f"error: torch cannot use --device {device}: {why}" in message
    assert message.endswith("\n  raffia doctor\n") and recipe.calls == []


def test_of_what_nobody_can_play_no_game_is_suggested(here, capsys):
    make_run("runs/a", rows=STOPPED)
    assert error_of("chat runs/a", capsys).splitlines()[1:] == ["  raffia evaluate runs/a"]


def test_without_a_run_the_newest_are_offered(here, capsys):
    for number, name in enumerate(["a", "b", "c", "d"]):
        run = make_run(f"runs/{name}", rows=STOPPED)
        os.utime(run / "metrics.jsonl", (number, number))
    lines = error_of("evaluate", capsys).splitlines()
    assert lines == ["error: which run?", *[f"  raffia evaluate runs/{name}" for name in "dcb"]]


# -------------------------------------------------------------------------------- train, resume

SEARCH = replace(POLE.search, num_simulations=7)
ACROBOT = replace(EfficientZeroRun().env, id="Acrobot-v1")
MINE = replace(
    PRESETS["smoke"],
    seed=6,
    search=replace(PRESETS["smoke"].search, num_simulations=9, max_considered=4),
)
EIGHT = replace(  # each has an environment
    POLE, env=replace(POLE.env, num_envs=8), population=replace(POLE.population, size=8)
)
TRAINED = [  # the arguments; the config, the folder and the preset
    ("--preset cartpole --seed 3 --search.num_simulations=7",
     (replace(POLE, seed=3, search=SEARCH), "runs/cartpole-3", "cartpole")),
    ("--config mine.yaml --seed 6 --preset smoke --run other/run", (MINE, "other/run", "smoke")),
    ("--config=mine.json", (replace(EfficientZeroRun(), env=ACROBOT), "runs/mine-0", "")),
    ("--config runs/a/config.json --run=b", (PRESETS["smoke"], "b", "")),
    ("--preset smoke --run empty", (PRESETS["smoke"], "empty", "smoke")),
    ("--preset cartpole --population 8", (EIGHT, "runs/cartpole-0", "cartpole")),
]  # fmt: skip


@pytest.mark.parametrize(("args", "expected"), TRAINED)
def test_settings_come_from_the_preset_then_the_file_then_the_flags(args, expected, here, recipe):
    Path("mine.yaml").write_text("{seed: 5, search: {num_simulations: 9, max_considered: 4}}")
    Path("mine.json").write_text('{"env": {"id": "Acrobot-v1"}}')
    Path("empty").mkdir()
    make_run("runs/a", config=PRESETS["smoke"])
    assert main(["train", "efficientzero", *args.split()]) == 0
    config, folder, preset = expected
    assert recipe.calls == [("train", config, Path(folder), preset)]


def test_training_prints_its_folder_and_results(here, recipe, capsys):
    assert main("train efficientzero --preset cartpole --seed 3".split()) == 0
    begins, end, _, *calls = capsys.readouterr().out.splitlines()
    assert begins.startswith("EfficientZero on CartPole-v1, seed 3, in runs/cartpole-3; Ctrl-C sa")
    counts = "3,400 environment steps, 340 updates in 1 min 35 s; best mean return 187.0"
    assert end == f"runs/cartpole-3 finished: {counts}"
    assert calls[0].startswith("  raffia evaluate runs/cartpole-3")
    assert calls[1].startswith("  raffia report runs/cartpole-3")
    recipe.reason = "stopped"
    assert main("train efficientzero --preset smoke".split()) == 130
    assert "\n  raffia resume runs/smoke-0 " in capsys.readouterr().out
    assert main("train efficientzero --preset smoke --env.id minatar/freeway".split()) == 130
    assert ", seed 0, in runs/minatar-freeway-0; " in capsys.readouterr().out


@pytest.mark.parametrize("algorithm", ["efficientzero --preset cartpole", "ilql --preset wordle"])
def test_without_a_folder_a_second_run_gets_the_first_free_one(here, recipe, capsys, algorithm):
    name = algorithm.rpartition(" ")[2]
    make_run(f"runs/{name}-0", rows=STOPPED)
    (here / f"runs/{name}-0-2").mkdir()
    assert main(f"train {algorithm}".split()) == 0
    assert [folder for _, _, folder, _ in recipe.calls] == [Path(f"runs/{name}-0-3")]
    output = capsys.readouterr().out
    assert (
        f"runs/{name}-0 stopped after 3,400" in output and f"raffia resume runs/{name}-0" in output
    )


LONGER = replace(POLE.collect, num_env_steps=30_000)
LENGTHENED = "--collect.num_env_steps 30000 --evaluate.target_return none --checkpoint.keep 5"
RESUMED = [  # a run's rows, arguments, the config of the resume, and parts of the output
    (STOPPED, "", POLE, "seed 0, in runs/a, resumed; Ctrl-C|runs/a finished"),
    (STOPPED, f"--search.num_simulations {POLE.search.num_simulations}", POLE, ""),
    (
        FINISHED,
        LENGTHENED,
        replace(POLE, collect=LONGER, checkpoint=replace(POLE.checkpoint, keep=5)),
        "runs/a finished",
    ),
    (FINISHED, "", None, "nothing left to do|raffia resume runs/a --collect.num_env_steps 30000"),
    (REACHED, "", None, "nothing left to do|raffia resume runs/a --evaluate.target_return none"),
]


@pytest.mark.parametrize(("rows", "args", "config", "texts"), RESUMED)
def test_a_run_is_resumed(rows, args, config, texts, here, recipe, capsys):
    save_last_checkpoint(make_run("runs/a", rows=rows))
    assert main(["resume", "runs/a", *args.split()]) == 0
    assert recipe.calls == ([] if config is None else [("resume", Path("runs/a"), config)])
    output = capsys.readouterr().out
    assert all(text in output for text in texts.split("|"))


def save_last_checkpoint(run):
    """Save the checkpoint that a run saves before its end row."""
    checkpoints = Checkpoints(run / "checkpoints")
    checkpoints.save(1, {"note": b"first"})
    return checkpoints.save(summarise(run).update or 2, {"note": b"last"})


def test_a_run_that_fails_to_resume_keeps_its_settings(here, recipe, capsys):
    make_run("runs/a", rows=FINISHED)
    recipe.error = OSError("no memory for so many")
    assert main("resume runs/a --collect.num_env_steps 30000".split()) == 1
    assert "no memory for so many" in capsys.readouterr().err
    data = json.loads(Path("runs/a/config.json").read_text())
    assert data.pop("run")["preset"] == "cartpole"
    assert from_json(EfficientZeroRun, data) == POLE
    names = setting_names(EfficientZeroRun)
    for start in MAY_CHANGE:  # what may change exists
        assert any(name == start or name.startswith(start) for name in names)
        assert start.endswith(".") or start in names


def test_a_finished_run_with_a_damaged_last_checkpoint_is_resumed(here, recipe, capsys):
    [file] = save_last_checkpoint(make_run("runs/a", rows=FINISHED)).glob("note*")
    file.write_bytes(b"lost")
    assert main(["resume", "runs/a"]) == 0 and len(recipe.calls) == 1
    output = capsys.readouterr().out
    assert "nothing left" not in output and "skipped" not in output  # the resume itself prints it


def test_an_environment_of_any_name_can_be_printed(here, capsys):
    config = to_json(PRESETS["smoke"])
    config["env"]["id"] = "\ud800"
    Path("own.json").write_text(json.dumps(config))
    assert main(["train", "efficientzero", "--config", "own.json"]) != 0
    assert r"EfficientZero on \ud800, seed 0" in capsys.readouterr().out


def test_letters_that_the_output_has_not_are_written_out(here, monkeypatch):
    Path("ü").mkdir()
    with io.TextIOWrapper(io.BytesIO(), encoding="ascii") as output:
        monkeypatch.setattr("sys.stdout", output)
        assert main(["list", "runs", "--in", "ü"]) == 0
        assert rb"below \xfc" in output.buffer.getvalue()


# ------------------------------------------------------------------------------------- evaluate

EVALUATED = [  # the arguments, and the options that differ from the defaults
    ("runs/a", {}),
    ("--record runs/a", {"record": 3}),
    ("--record 7 runs/a", {"record": 7}),
    ("runs/a --record --seed 1", {"record": 3, "seed": 1}),
    ("runs/t --episodes 4 --checkpoint 300 --opponent rule --record=2 --format=mp4",
     {"episodes": 4, "checkpoint": "300", "opponent": "rule", "record": 2, "suffix": "mp4"}),
    ("runs/a --num-simulations 9 --device cuda:1", {"num_simulations": 9, "device": "cuda:1"}),
]  # fmt: skip


@pytest.mark.parametrize(("args", "options"), EVALUATED)
def test_evaluate_is_called_with_the_options_of_its_arguments(args, options, here, recipe):
    make_run("runs/a", rows=STOPPED)
    make_run("runs/t", config=PRESETS["tictactoe"], rows=STOPPED)
    assert main(["evaluate", *args.split()]) == 0
    defaults = {"episodes": 100, "checkpoint": "best", "seed": 0, "num_simulations": None}
    defaults |= {"device": "cpu", "record": 0, "suffix": "gif", "opponent": None}
    [(_, _, given)] = recipe.calls
    assert {name: given.get(name) for name in defaults} == defaults | options


def test_an_evaluation_is_printed_and_saved(here, recipe, capsys):
    make_run("runs/t", config=PRESETS["tictactoe"], rows=STOPPED)
    args = "evaluate runs/t --episodes 4 --checkpoint 300 --seed 2 --opponent rule"
    assert main([*args.split(), "--num-simulations", "9"]) == 0
    output = capsys.readouterr().out
    assert "first      2      0       0" in output and "second     0      1       1" in output
    assert "return  0.25  0.48  -1.00    0.50  1.00" in output
    path = Path("runs/t/evaluations/update-300-4-episodes-seed-2-9-simulations-rule.json")
    assert f"wrote {path}" in output
    data = json.loads(path.read_text())
    # by hand: deviations .75 .75 -1.25 -.25, squares sum to 2.75; sqrt(2.75 / 3) / sqrt(4)
    assert data.pop("standard_error") == pytest.approx(0.478714)
    expected = {"mean_return": 0.25, "median_return": 0.5, "returns": recipe.found.returns}
    expected |= {"as_first": recipe.found.as_first, "checkpoint": "300", "opponent": "rule"}
    assert data | expected == data and data["seed"] == 2


def test_an_evaluation_can_be_one_line_of_json_with_progress_on_stderr(
    here, recipe, capsys, monkeypatch
):
    make_run("runs/a", rows=STOPPED)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    found = {"returns": [3.0], "lengths": [3], "as_first": [], "files": ["runs/a/e.gif"]}
    recipe.found = SimpleNamespace(update=300, num_cut=0, **found)
    assert main("evaluate runs/a --episodes 1 --json".split()) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert captured.err == "playing 1 episode with runs/a ...\n"
    assert data["standard_error"] is None and data["files"] == ["e.gif"]
    assert "as_first" not in data


# ----------------------------------------------------------------------------------------- demo


def test_the_demo_trains_reports_and_suggests_next_calls(here, recipe, capsys):
    pytest.importorskip("matplotlib")
    recipe.reason = "target"
    assert main("demo --seed 4".split()) == 0
    [(_, config, folder, preset)] = recipe.calls
    assert (config.seed, config.evaluate.target_return, config.env.id) == (4, 200.0, "CartPole-v1")
    assert (folder, preset) == (Path("runs/demo"), "cartpole")
    output = capsys.readouterr().out
    assert "until a mean return of 200; Ctrl-C" in output.splitlines()[0]
    assert "runs/demo reached its target return: 3,400 environment steps, 340 updates in" in output
    assert f"report: {here / 'runs/demo/report.html'}" in output
    for call in ["resume runs/demo", "evaluate runs/demo", "play runs/tictactoe-0"]:
        assert f"\n  raffia {call}" in output
    assert main(["demo"]) == 0
    assert recipe.calls[1][2] == Path("runs/demo-2")


TWICE = 2 * POLE.collect.num_env_steps


@pytest.mark.parametrize(
    ("reason", "status", "text"),
    [
        ("stopped", 130, "\n  raffia resume mine "),
        ("finished", 0, f"\n  raffia resume mine --collect.num_env_steps {TWICE} "),
        ("no matplotlib", 0, "pip install 'raffia[report]'; then raffia report mine\n"),
    ],
)
def test_a_demo_that_misses_its_target_suggests_how_to_continue(
    reason, status, text, here, recipe, capsys, monkeypatch
):
    recipe.reason = reason
    if reason == "no matplotlib":
        recipe.reason = "finished"
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main("demo --out mine".split()) == status
    output = capsys.readouterr().out
    assert text in output and (status or "\n  raffia evaluate mine " in output)


# ---------------------------------------------------------------------- list, report, check-env


def test_presets_runs_and_environments_are_listed(here, capsys):
    later = {"kind": "evaluate", "update": 320, "env_step": 3200, "seconds": 90, "mean_return": 150}
    rows = [*STOPPED[:2], later, STOPPED[2]]
    make_run("runs/a", config=replace(PRESETS["smoke"], seed=7), rows=rows)
    make_run("runs/new")
    make_run("sweeps/a/runs/0-seed=0")
    assert main(["list"]) == 0
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 110
    for name, config in PRESETS.items():
        assert f"\n  {name} " in output and f"{config.collect.num_env_steps:,}" in output
    line = next(line for line in output.splitlines() if line.startswith("  runs/a "))
    args = ["runs/a", "CartPole-v1", "7", "stopped", "3,400", "340", "1", "min", "35", "s"]
    assert line.split() == [*args, "150.0", "187.0"]  # the latest, the best
    assert "empty" in next(line for line in output.splitlines() if "runs/new" in line)
    assert "\n  sweeps/a/runs/0-seed=0 " in output
    Path("bare").mkdir()
    assert main(["list", "runs", "--in", "bare"]) == 0
    assert "none yet" in capsys.readouterr().out
    assert main(["list", "environments"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert {"CartPole-v1", "tictactoe", "minatar/breakout"} <= set(names)


def test_an_environment_is_checked(monkeypatch, capsys):
    from raffia.envs.check import Finding, Report

    assert main("check-env probe/delay --steps 20".split()) == 0
    assert capsys.readouterr().out.startswith("probe/delay keeps the contract\nok ")
    assert "Did you mean 'CartPole-v1'?" in error_of("check-env Cartpole-v1", capsys, status=1)
    found = Report("mine", (Finding("numbers", "fails", "nan at step 3", "give finite ones"),))
    monkeypatch.setattr("raffia.envs.check.check_env", lambda make, seed, num_steps: found)
    assert main(["check-env", "mine"]) == 1
    output = capsys.readouterr().out
    assert output.splitlines()[0] == "mine does not keep the contract"
    assert "fails  numbers: nan at step 3" in output
