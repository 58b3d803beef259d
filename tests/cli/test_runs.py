"""Commands about runs, with the recipe replaced by one that only notes what it was asked for."""

import json
import os
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
from raffia.recipes.ilql.presets import ILQL_PRESETS
from raffia.report.folder import MANIFEST, summarise
from raffia.train.checkpoint import Checkpoints
from raffia.train.config import from_json, setting_names, to_json

POLE = PRESETS["cartpole"]


def make_run(folder, *, config=None, preset="cartpole", rows=(), **made_by):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    data = to_json(config or POLE) | {"run": {"preset": preset, "torch": "2", **made_by}}
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


# ------------------------------------------------------------------------------ what is refused

ALONE = [  # in an empty folder: the words, and what is said
    ("train", ["which algorithm?", "raffia train efficientzero\n"]),
    ("train --preset smoke", ["raffia train efficientzero --preset smoke\n"]),
    ("train effzero --seed 1", ["did you mean efficientzero?", "efficientzero --seed 1\n"]),
    ("train efficientzero", ["pass --preset NAME or --config FILE", "--preset cartpole\n"]),
    (
        "train efficientzero --preset=cartpol --seed 1",
        [
            "there is no preset 'cartpol'; did you mean cartpole?",
            "raffia list presets\n",
            "\n  raffia train efficientzero --preset=cartpole --seed 1\n",
        ],
    ),
    (
        "train efficientzero --preset cartpol --seed 1",
        ["\n  raffia train efficientzero --preset cartpole --seed 1\n"],
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
    ("train ilql", ["pass --preset NAME, --data FILE or --config FILE", "--preset wordle"]),
    ("train ilql --preset wordl", ["did you mean wordle?", "train ilql --preset wordle\n"]),
    ("train ilql --preset", ["--preset needs a value", "raffia train ilql --help"]),
    ("train ilql --preset wordle --loss.tua 1", ["did you mean --loss.tau?"]),
    ("train ilql --preset wordle --loss.tau 2", ["tau=2.0 must be in 0..1"]),
    (
        "train ilql --preset dialogue --model gpt --model.trunk.n_layer=3",
        ["--model.trunk.n_layer: the sizes are those of the model in gpt"],
    ),
    ("train ilq --preset wordle", ["did you mean ilql?"]),
    ("trian efficientzero", ["there is no command 'trian'; did you mean train?\n  raffia --help"]),
    ("list preset", ["presets"]),
    ("demo --sed 3", ["--seed"]),
    ("resume", ["--preset cartpole"]),
    ("resume gone", ["error: gone does not exist\n  raffia list\n"]),
    ("play", ["error: which run?\n  raffia train efficientzero --preset tictactoe\n"]),
    ("chat", ["which run?", "raffia train ilql --preset wordle\n"]),
    ("chat gone", ["gone does not exist"]),
    ("chat --checkpoint last", ["'last' must be best, newest, or the number"]),
    ("chat --temprature 1", ["did you mean --temperature?"]),
    ("export gone", ["gone does not exist"]),
    ("check-env", ["raffia check-env CartPole-v1"]),
]


@pytest.mark.parametrize(("words", "texts"), ALONE)
def test_mistakes_are_refused_before_anything_is_made(words, texts, here, capsys):
    said = fails(words, capsys)
    assert said.startswith("error: ")
    for text in texts:
        assert text in said
    assert list(here.iterdir()) == []


NEAREST = [
    ("runs/cartpole-1", "runs/cartpole-1 does not exist; did you mean runs/cartpole-0?"),
    ("cartpole-0", "cartpole-0 does not exist; did you mean runs/cartpole-0?"),
    ("runs", "runs holds no run; did you mean runs/cartpole-0?"),
    ("runs/cartpole-0/config.json", "config.json holds no run; did you mean runs/cartpole-0?"),
]
RUN = "runs/cartpole-0"
BESIDE = [  # beside a run that was stopped
    *(
        (f"{command} {given}", [text, f"\n  raffia {command} {RUN}\n"])
        for command in ("resume", "evaluate", "report")
        for given, text in NEAREST
    ),
    (f"resume {RUN} --collect.num_env_step 3", ["--collect.num_env_steps"]),
    (
        f"resume {RUN} --search.num_simulations 50 --collect.num_env_steps 900",
        [
            "search.num_simulations shapes what is learnt",
            f"  raffia resume {RUN}\n",
            f"  raffia train efficientzero --config {RUN}/config.json --search.num_simulations 50 "
            f"--collect.num_env_steps 900 --run {RUN}-new\n",
        ],
    ),
    ("resume runs/spoken --wordle.num_words 25", ["wordle.num_words shapes what is learnt"]),
    ("resume runs/damaged", ["damaged/config.json: there is no setting sead; did you mean seed?"]),
    (
        "resume runs/other",
        ["no setting sead", f"was written by raffia 9.8.7, and this is {__version__}"],
    ),
    (
        "evaluate runs/other",
        ["no setting sead", f"was written by raffia 9.8.7, and this is {__version__}"],
    ),
    (f"evaluate {RUN} --record 0", ["--record: '0' is not a whole number above 0"]),
    (f"evaluate {RUN} --episodes 0", ["--episodes: '0' is not a whole number above 0"]),
    (
        f"evaluate {RUN} --num-simulations x",
        ["--num-simulations: 'x' is not a whole number above 0"],
    ),
    (
        f"evaluate {RUN} --checkpoint worst",
        ["'worst' must be best, newest, or the number of an update"],
    ),
    (f"evaluate {RUN} --opponent friend", ["--opponent: invalid choice: 'friend'"]),
    (
        f"evaluate {RUN} --opponent random",
        [f"is for two-player games, but {RUN} plays CartPole-v1"],
    ),
    (f"evaluate {RUN} --episods 3", ["did you mean --episodes?", "raffia evaluate --help"]),
    (f"evaluate {RUN} --num_simulation=3", ["no --num-simulation=3; did you mean --num-simul"]),
    (f"evaluate {RUN} two", ["unexpected argument 'two'"]),
    (
        f"evaluate {RUN} --env echo.py:Echo",
        ["--env is only for runs of ILQL; runs/cartpole-0 is a run"],
    ),
    (f"report {RUN} --ot page.html", ["--out"]),
    (f"play {RUN} --secnd", ["--second"]),
    (
        f"play {RUN}",
        [
            f"{RUN} plays CartPole-v1; a person can play tictactoe and connect4",
            "\n  raffia train efficientzero --preset tictactoe\n",
        ],
    ),
    ("play", ["error: which run?\n  raffia play runs/game\n"]),
    (
        "chat runs/game",
        ["is not a run of ILQL but of EfficientZero on tictactoe", "raffia play runs"],
    ),
    ("export runs/game", ["is not a run of ILQL"]),
    (
        f"train efficientzero --preset cartpole --seed 0 --run {RUN}",
        [
            f"error: {RUN} already holds a run: stopped after 3,400 environment steps, best "
            f"return 187.0\n  raffia resume {RUN}\n"
            f"  raffia train efficientzero --preset cartpole --seed 0 --run {RUN}-3\n"
        ],
    ),
    (
        "train efficientzero --preset smoke --run mine",
        ["mine already exists and is not a run folder", "--run mine-2"],
    ),
    (
        "train efficientzero --preset smoke --run swept",
        ["swept already holds a sweep", "raffia resume swept", "--run swept-2"],
    ),
    (f"demo --out {RUN}", [f"raffia resume {RUN}\n", f"raffia demo --out {RUN}-3\n"]),
]


@pytest.mark.parametrize(("words", "texts"), BESIDE)
def test_mistakes_beside_runs_get_the_nearest_call(words, texts, here, capsys):
    make_run("runs/game", config=PRESETS["tictactoe"], rows=STOPPED)
    make_run("runs/spoken", config=ILQL_PRESETS["wordle"], algorithm="ilql")
    make_run("runs/damaged").joinpath("config.json").write_text('{"sead": 1}')
    made_by = {"preset": "cartpole", "raffia": "9.8.7"}
    other = {"sead": 1, "run": made_by}
    make_run("runs/other").joinpath("config.json").write_text(json.dumps(other))
    make_run(RUN, rows=STOPPED)  # the newest
    Path(f"{RUN}-2").mkdir()
    Path("mine").mkdir()
    Path("mine/thesis.tex").touch()
    Path("swept").mkdir()
    Path("swept", MANIFEST).write_text("{}")
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    said = fails(words, capsys)
    for text in texts:
        assert text in said
    assert before == {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("device", "why"),
    [("gpu", "no device has this name"), ("cuda:77", "cuda is not available here (")],
)
@pytest.mark.parametrize("words", ["train efficientzero --preset smoke", "resume runs/a"])
def test_a_device_that_is_not_there_is_told(device, why, words, here, recipe, capsys):
    make_run("runs/a", rows=STOPPED)
    assert main([*words.split(), "--device", device]) == 2
    said = capsys.readouterr().err
    assert f"error: torch cannot use --device {device}: {why}" in said
    assert said.endswith("\n  raffia doctor\n") and recipe.calls == []


def test_without_a_run_the_newest_are_offered(here, capsys):
    for number, name in enumerate(["a", "b", "c", "d"]):
        run = make_run(f"runs/{name}", rows=STOPPED)
        os.utime(run / "metrics.jsonl", (number, number))
    said = fails("evaluate", capsys).splitlines()
    assert said == ["error: which run?", *[f"  raffia evaluate runs/{name}" for name in "dcb"]]


# -------------------------------------------------------------------------------- train, resume

SEARCH = replace(POLE.search, num_simulations=7)
ACROBOT = replace(EfficientZeroRun().env, id="Acrobot-v1")
MINE = replace(
    PRESETS["smoke"],
    seed=6,
    search=replace(PRESETS["smoke"].search, num_simulations=9, max_considered=4),
)
EIGHT = replace(  # each has an environment
    POLE,
    env=replace(POLE.env, num_envs=8),
    population=replace(POLE.population, size=8),
)
TRAINED = [  # the words; the config, the folder and the preset
    (
        "--preset cartpole --seed 3 --search.num_simulations=7",
        (replace(POLE, seed=3, search=SEARCH), "runs/cartpole-3", "cartpole"),
    ),
    ("--config mine.yaml --seed 6 --preset smoke --run kept/here", (MINE, "kept/here", "smoke")),
    ("--config=mine.json", (replace(EfficientZeroRun(), env=ACROBOT), "runs/mine-0", "")),
    ("--config runs/a/config.json --run=b", (PRESETS["smoke"], "b", "")),
    ("--preset smoke --run empty", (PRESETS["smoke"], "empty", "smoke")),
    (
        "--preset cartpole --population 8",
        (EIGHT, "runs/cartpole-0", "cartpole"),
    ),
]


@pytest.mark.parametrize(("words", "asked"), TRAINED)
def test_settings_come_from_the_preset_then_the_file_then_the_flags(words, asked, here, recipe):
    Path("mine.yaml").write_text("{seed: 5, search: {num_simulations: 9, max_considered: 4}}")
    Path("mine.json").write_text('{"env": {"id": "Acrobot-v1"}}')
    Path("empty").mkdir()
    make_run("runs/a", config=PRESETS["smoke"])
    assert main(["train", "efficientzero", *words.split()]) == 0
    config, folder, preset = asked
    assert recipe.calls == [("train", config, Path(folder), preset)]


def test_training_says_where_it_begins_and_what_came_of_it(here, recipe, capsys):
    assert main("train efficientzero --preset cartpole --seed 3".split()) == 0
    begins, *said = capsys.readouterr().out.splitlines()
    assert begins == (
        "EfficientZero on CartPole-v1, seed 3, in runs/cartpole-3; Ctrl-C saves and stops"
    )
    assert said[0] == (
        "runs/cartpole-3 finished: 3,400 environment steps, 340 updates in 1 min 35 s; "
        "best mean return 187.0"
    )
    assert said[2].startswith("  raffia evaluate runs/cartpole-3")
    assert said[3].startswith("  raffia report runs/cartpole-3")
    recipe.reason = "stopped"
    assert main("train efficientzero --preset smoke".split()) == 130
    assert "\n  raffia resume runs/smoke-0 " in capsys.readouterr().out


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


LONGER = replace(POLE.collect, num_env_steps=30_000)
LENGTHENED = "--collect.num_env_steps 30000 --evaluate.target_return none --checkpoint.keep 5"
RESUMED = [  # the rows of a run and the words; the config that it goes on with, and what is said
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


@pytest.mark.parametrize(("rows", "words", "config", "texts"), RESUMED)
def test_a_run_goes_on(rows, words, config, texts, here, recipe, capsys):
    ended_with(make_run("runs/a", rows=rows))
    assert main(["resume", "runs/a", *words.split()]) == 0
    assert recipe.calls == ([] if config is None else [("resume", Path("runs/a"), config)])
    said = capsys.readouterr().out
    assert all(text in said for text in texts.split("|"))


def ended_with(run):
    """The checkpoint that a run has saved before it said that it had ended."""
    checkpoints = Checkpoints(run / "checkpoints")
    checkpoints.save(1, {"note": b"first"})
    return checkpoints.save(summarise(run).update or 2, {"note": b"last"})


def test_a_run_that_cannot_begin_with_new_settings_keeps_its_own(here, recipe, capsys):
    make_run("runs/a", rows=FINISHED)
    recipe.error = OSError("no memory for so many")
    assert main("resume runs/a --collect.num_env_steps 30000".split()) == 1
    assert "no memory for so many" in capsys.readouterr().err
    data = json.loads(Path("runs/a/config.json").read_text())
    assert data.pop("run")["preset"] == "cartpole"
    assert from_json(EfficientZeroRun, data) == POLE


def test_what_may_change_exists():
    names = setting_names(EfficientZeroRun)
    for start in MAY_CHANGE:
        assert any(name == start or name.startswith(start) for name in names)
        assert start.endswith(".") or start in names


def test_a_run_that_ended_and_whose_last_checkpoint_is_damaged_is_gone_on_with(
    here, recipe, capsys
):
    [file] = ended_with(make_run("runs/a", rows=FINISHED)).glob("note*")
    file.write_bytes(b"lost")
    assert main(["resume", "runs/a"]) == 0
    assert [name for name, *_ in recipe.calls] == ["resume"]
    said = capsys.readouterr().out
    assert "nothing left" not in said and "skipped" not in said  # which the resume itself says


def test_an_environment_of_any_name_can_be_printed(here, capsys):
    config = to_json(PRESETS["smoke"])
    config["env"]["id"] = "\ud800"
    Path("own.json").write_text(json.dumps(config))
    assert main(["train", "efficientzero", "--config", "own.json"]) != 0
    assert r"EfficientZero on \ud800, seed 0" in capsys.readouterr().out


# ------------------------------------------------------------------------------------- evaluate

EVALUATED = [  # the words, and the options that differ from those without any
    ("runs/a", {}),
    ("--record runs/a", {"record": 3}),
    ("runs/a --record", {"record": 3}),
    ("--record 7 runs/a", {"record": 7}),
    ("runs/a --record=7", {"record": 7}),
    ("runs/a --record --seed 1", {"record": 3, "seed": 1}),
    (
        "runs/t --episodes 4 --checkpoint 300 --seed 2 --opponent rule --record --format=mp4 "
        "--num-simulations 9",
        {"episodes": 4, "checkpoint": "300", "seed": 2, "opponent": "rule", "record": 3}
        | {"suffix": "mp4", "num_simulations": 9},
    ),
]


@pytest.mark.parametrize(("words", "options"), EVALUATED)
def test_an_evaluation_is_asked_for_as_the_words_say(words, options, here, recipe):
    make_run("runs/a", rows=STOPPED)
    make_run("runs/t", config=PRESETS["tictactoe"], rows=STOPPED)
    assert main(["evaluate", *words.split()]) == 0
    plain = {"episodes": 100, "checkpoint": "best", "seed": 0, "num_simulations": None}
    plain |= {"record": 0, "suffix": "gif", "opponent": None}
    [(_, _, asked)] = recipe.calls
    assert {name: asked.get(name) for name in plain} == plain | options


def test_an_evaluation_is_shown_and_kept(here, recipe, capsys):
    make_run("runs/t", config=PRESETS["tictactoe"], rows=STOPPED)
    words = "evaluate runs/t --episodes 4 --checkpoint 300 --seed 2 --opponent rule"
    assert main([*words.split(), "--num-simulations", "9"]) == 0
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


def test_an_evaluation_can_be_one_line_of_json_and_who_waits_is_told(
    here, recipe, capsys, monkeypatch
):
    make_run("runs/a", rows=STOPPED)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    recipe.found = SimpleNamespace(
        update=300, returns=[3.0], lengths=[3], as_first=[], files=["runs/a/e.gif"]
    )
    assert main("evaluate runs/a --episodes 1 --json".split()) == 0
    said = capsys.readouterr()
    data = json.loads(said.out)
    assert said.err == "playing 1 episode with runs/a ...\n"
    assert data["standard_error"] is None and data["files"] == ["e.gif"]
    assert "as_first" not in data


# ----------------------------------------------------------------------------------------- demo


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


@pytest.mark.parametrize(
    ("reason", "status", "text"),
    [
        ("stopped", 130, "\n  raffia resume mine "),
        (
            "finished",
            0,
            f"\n  raffia resume mine --collect.num_env_steps {2 * POLE.collect.num_env_steps} ",
        ),
        ("no matplotlib", 0, "pip install 'raffia[report]'; then raffia report mine\n"),
    ],
)
def test_a_demo_that_falls_short_says_how_to_go_on(
    reason, status, text, here, recipe, capsys, monkeypatch
):
    recipe.reason = "finished" if reason == "no matplotlib" else reason
    if reason == "no matplotlib":
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main("demo --out mine".split()) == status
    said = capsys.readouterr().out
    assert text in said and (status or "\n  raffia evaluate mine " in said)


# ---------------------------------------------------------------------- list, report, check-env


def test_presets_runs_and_environments_are_listed(here, capsys):
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


def test_an_environment_is_checked(monkeypatch, capsys):
    from raffia.envs.check import Finding, Report

    assert main("check-env probe/delay --steps 20".split()) == 0
    assert capsys.readouterr().out.startswith("probe/delay keeps the contract\nok ")
    assert "Did you mean 'CartPole-v1'?" in fails("check-env Cartpole-v1", capsys, status=1)
    found = Report("mine", (Finding("numbers", "fails", "nan at step 3", "give finite ones"),))
    monkeypatch.setattr("raffia.envs.check.check_env", lambda make, seed, num_steps: found)
    assert main(["check-env", "mine"]) == 1
    said = capsys.readouterr().out
    assert said.splitlines()[0] == "mine does not keep the contract"
    assert "fails  numbers: nan at step 3" in said
