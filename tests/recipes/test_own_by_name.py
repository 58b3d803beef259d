"""Own environments and networks by their names: in every process, and only if vouched for."""

import shutil
import sys
from pathlib import Path

import pytest

from raffia.cli import main
from raffia.envs import EnvConfig, make_env
from raffia.lazy import imported
from raffia.recipes import (
    ALGORITHMS,
    ILQL_PRESETS,
    RunError,
    evaluate,
    load_agent,
    resume,
    train,
)
from raffia.recipes.efficientzero import PRESETS
from raffia.report.folder import read_run
from raffia.sweep import Manifest, SweepSession
from raffia.sweep.search import Search
from raffia.train.config import ConfigError
from tests.marks import slow_among
from tests.recipes.runs import Quiet, last_state, rows, same, short, with_all

FILE = """
import gymnasium, numpy, torch
from gymnasium.spaces import Box, Discrete as Choice
from raffia import TensorDict
from raffia.algorithms.efficientzero import make_model
from raffia.envs import Discrete, Env, EnvSpec
from raffia.recipes import PRESETS

class Point(Env):
    spec = EnvSpec(observation_shape=(4,), action=Discrete(2), name="point")

    def reset(self, seed):
        self.time, self.seen = 0, torch.full((4,), seed % 7 / 7)
        return TensorDict(observation=self.seen)

    def step(self, action):
        self.time += 1
        flags = {"terminated": torch.tensor(False), "truncated": torch.tensor(self.time == 9)}
        return TensorDict(observation=self.seen + self.time / 9, reward=torch.tensor(1.0), **flags)

class Gym(gymnasium.Env):
    observation_space, action_space = Box(0, 1, (4,), numpy.float32), Choice(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def render(self):
        return numpy.zeros((8, 8, 3), numpy.uint8)

def needs(size):
    return Point()

def networks():
    model = make_model(Point.spec, PRESETS["smoke"].model)
    model.representation_network = torch.nn.Sequential(
        torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.LayerNorm(32)
    )
    return model
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("point_env.py").write_text(FILE)
    (tmp_path / "below").mkdir()
    return tmp_path


ENV, NETWORKS = "point_env.py:Point", "point_env.py:networks"
WRONG = {
    "point_env.py": "which environment of point_env.py",
    "point_env.py:Pont": "has no attribute 'Pont'",
    "point_env.py:networks": "(?s)makes EfficientZeroModelMLP.*it must name a class, or a function",
    "point_env.py:needs": "must name a class, or a function without arguments, .*'size'",
    "none_such.py:Point": "cannot be imported: .*No such file",
    "none_such:Point": "its module cannot be imported: No module named 'none_such'",
    "none_such:Point-v0": "its module cannot be imported",
    "point_env:Cart-v9": "'Cart-v9' in point_env, which has no such class",
    "math:tau": "must name a class, or a function",
}


def test_an_environment_is_found_by_the_name_of_its_class(here):
    for name in (ENV, "point_env:Point", "raffia.envs.probe:ValueProbe"):
        assert make_env(EnvConfig(id=name, num_envs=2)).num_envs == 2
    gym = make_env(EnvConfig(id="point_env.py:Gym", num_envs=1, max_episode_steps=5), render=True)
    assert (gym.max_episode_steps, gym.render(0).shape) == (5, (8, 8, 3))
    for name, message in WRONG.items():
        with pytest.raises((ValueError, ImportError), match=message):
            make_env(EnvConfig(id=name, num_envs=1))


@pytest.mark.parametrize(
    ("networks", "message"),
    [
        (ENV, "makes <point_env.*Point object"),
        ("math:tau", "is 6.28"),
        ("math:gcd", "makes 0; it must be"),
    ],
)
def test_what_makes_no_model_is_refused(networks, message, here):
    with pytest.raises(ConfigError, match=f"networks='{networks}' {message}"):
        train(with_all(own(), networks=networks), "run", view=Quiet())


def test_two_environments_are_refused(here, capsys):
    words = ["train", "efficientzero", "--preset", "smoke", "--env", ENV, "--env.id"]
    assert main([*words, "CartPole-v1"]) == 2
    assert "--env.id CartPole-v1 name two environments" in capsys.readouterr().err


def own(**changes):
    """A short run in the own environment, with own networks."""
    run = with_all(short(60), env={"id": ENV, "frame_stack": 1}, networks=NETWORKS, **changes)
    return with_all(run, model=PRESETS["smoke"].model)


WITHOUT = {"make_env": "env.id is point_env.py:Point, .* trust it, name it: --env point_env.py:Po"}
WITHOUT["networks"] = "networks is point_env.py:networks, .* trust it, name it: --networks point_"


def test_a_run_s_folder_runs_no_file_that_is_not_named_again(here, capsys, monkeypatch):
    """Wherever the file lies now."""
    train(own(), "run", view=Quiet())
    named, moved = {"make_env": ENV, "networks": NETWORKS}, {}
    monkeypatch.chdir(here / "below")
    for part, name in named.items():
        moved[part] = f"../{name}"
    for part, message in WITHOUT.items():
        given = {name: value for name, value in moved.items() if name != part}
        for call in (resume, load_agent, evaluate):
            with pytest.raises(ConfigError, match=message):
                call("../run", **given)
    longer = ["--collect.num_env_steps", "64"]
    config = ["train", "efficientzero", "--config", "../run/config.json", *longer]
    for words in (["evaluate", "../run"], ["resume", "../run", *longer], config):
        assert main(words) == 2 and "If you trust it, name it: --env" in capsys.readouterr().err
    assert evaluate("../run", episodes=2, **moved).returns == [9.0, 9.0]
    flags = ["--env", moved["make_env"], "--networks", moved["networks"]]
    assert main(["evaluate", "../run", "--episodes", "1", *flags]) == 0
    with pytest.raises(RunError, match="env.id cannot be changed"):
        resume("../run", make_env="../point_env.py:Gym", networks=moved["networks"])
    assert main(["resume", "../run", *longer, *flags]) == 0
    assert "raffia evaluate ../run --env ../point_env.py:Point --net" in capsys.readouterr().out
    assert rows(Path("../run"), "end")[-1]["env_step"] == 64
    assert main(["play", "../run"]) == 2  # no game


def test_a_run_s_folder_runs_no_module_beside_it(here, monkeypatch):
    """Even where Python looks for modules there, as it does for `python -c` and a script."""
    monkeypatch.syspath_prepend(str(here))
    train(with_all(own(), env__id="point_env:Point"), "run", view=Quiet())
    Path("point_env.py").write_text("raise SystemExit('imported')")
    sys.modules.pop("point_env", None)
    for call in (resume, load_agent, evaluate):
        with pytest.raises(ConfigError, match="name it: --env point_env:Point, in Python make_env"):
            call("run", networks="point_env.py:networks")
    assert read_run("run").call("resume") == (
        "raffia resume run --env point_env:Point --networks point_env.py:networks"
    )


def test_a_run_of_a_program_s_own_parts_goes_on_by_their_names(here, capsys):
    """As the command line needs it; the bits are the same."""
    parts = {"networks": imported(NETWORKS)}
    plain = with_all(own(), networks="", env__id="probe/value")
    train(plain, "run", view=Quiet(), **parts, make_env=lambda *a, **b: make_env(own().env, **b))
    assert main(["evaluate", "run"]) == 1
    assert "started with custom make_env and networks: pass" in capsys.readouterr().err
    shutil.copytree("run", "copy")
    longer = with_all(plain, collect__num_env_steps=80)
    envs = {"make_env": lambda *a, **b: make_env(own().env, **b)}
    resume("run", config=longer, view=Quiet(), **parts, **envs)
    resume("copy", config=longer, view=Quiet(), make_env=ENV, networks=NETWORKS)
    resume("copy", view=Quiet(), make_env=ENV, networks=NETWORKS)  # its settings name them now
    assert same(last_state(Path("run"))[1]["state"], last_state(Path("copy"))[1]["state"])


ELSEWHERE = {f"{kind}s__ahead": 2 for kind in ("actor", "reanalyzer")}
PROCESS = {**{f"{kind}s__num": 1 for kind in ("actor", "reanalyzer", "evaluator")},
           "engine__name": "process", "env__num_workers": 1}  # fmt: skip


@pytest.mark.parametrize("where", slow_among([{}, PROCESS], PROCESS))
def test_workers_make_what_is_named(where, here):
    result = train(own(**ELSEWHERE, **where), "run", view=Quiet())
    assert (result.reason, result.mean_return) == ("finished", 9.0)


@pytest.mark.parametrize("engine", slow_among(["inline", "process"], "process"))
def test_a_sweep_s_runs_make_what_is_named(engine, here, capsys, monkeypatch):
    flags = ["--env.id", ENV, "--networks", NETWORKS, "--collect.num_env_steps", "88"]
    words = ["--preset", "smoke", *flags, "--evaluate.num_episodes", "1", "--engine.name", engine]
    assert main(["sweep", "efficientzero", *words, "--seeds", "0..1", "--workers", "1"]) == 0
    assert "sweeps/Point: 2 finished" in capsys.readouterr().out
    monkeypatch.chdir(here / "below")
    assert main(["resume", "../sweeps/Point"]) == 2
    assert "If you trust it, name it: --env" in capsys.readouterr().err
    own_flags = ["--env", f"none.py:E,../{ENV}", "--networks", f"../{NETWORKS}"]
    assert main(["resume", "../sweeps/Point", *own_flags]) == 0
    sweep, one = "../sweeps/Point", ALGORITHMS["efficientzero"]
    run = next(Path(sweep, "runs").iterdir())
    config = (run / "config.json").read_text()
    (run / "config.json").write_text(config.replace(":Point", ":Gym"))  # its plan does not name it
    (run / "metrics.jsonl").unlink()
    assert main(["resume", sweep, *own_flags]) == 1
    assert "env.id cannot be changed" in capsys.readouterr().out
    (run / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=r"--networks .*, in Python SweepSession\(.*trusted=\['/"):
        SweepSession(sweep, one, trusted=[f"../{ENV}"])
    assert not SweepSession(sweep, one, trusted=[f"../{ENV}", f"../{NETWORKS}"]).run().failed


def test_a_sweep_whose_runs_choose_it_names_what_is_to_come(here):
    """A plan may come from elsewhere, too."""
    ilql, choices = ALGORITHMS["ilql"], {"evaluate.env": ["desk.py:A", "desk.py:B"]}
    search = Search(num_trials=2, ranges=choices, seeds=(0,), seed=0)
    base = with_all(ILQL_PRESETS["dialogue"], data__files=("chats.jsonl",))
    manifest = Manifest.of(ilql, base, [], search=search)
    names = [str(here / name) for name in choices["evaluate.env"]]
    assert manifest.named_outside(ilql) == {"make_env": names}
