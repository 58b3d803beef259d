"""Runs of ILQL on data that are evaluated in a custom environment."""

import functools
import importlib
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from raffia.cli import main
from raffia.lm.envs.wordle import WordleEnv
from raffia.recipes import read_run
from raffia.recipes.ilql import evaluate, resume, train, with_sizes
from raffia.recipes.run_folder import RunError
from raffia.train.config import ConfigError
from tests.recipes.ilql_runs import of_file, write_chats
from tests.recipes.runs import Quiet

ENV = '''
from raffia.lm import Language_Environment
from raffia.lm.data.dialogue import Dialogue


class Echo(Language_Environment):
    """Asks for a number, drawn by the seed; any answer is rewarded with that number."""

    def reset(self, seed):
        self.utterances, self.ended = [(f"say {seed % 10}", None)], False
        return Dialogue(self.utterances, terminal=False)

    def step(self, action):
        reward = float(self.utterances[0][0].split()[1])
        self.ended = True
        return Dialogue([*self.utterances, (action, reward)], terminal=True), reward, True

    def is_terminal(self):
        return self.ended


class Other:
    pass


class Stranger(Echo):
    def reset(self, seed):
        return Dialogue([("sprich 3", None)], terminal=False)
'''
SMALL = "--num_updates 2 --evaluate.every_updates 2 --evaluate.num_episodes 4 --batch_size 4"
TRUNK = "--model.trunk.n_layer 1 --model.trunk.n_embd 8 --model.trunk.n_head 2"


def make(name):
    """The environment of this name, of the file in the current folder."""
    return getattr(importlib.import_module("echo_env"), name)()


def make_echo():
    return make("Echo")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("echo_env.py").write_text(ENV)
    Path("broken.py").write_text("import json\nclass Echo\n")
    write_chats(tmp_path / "chats.jsonl")
    yield tmp_path
    sys.modules.pop("echo_env", None)


@pytest.fixture
def installed(here, monkeypatch):
    """The modules of the folder as those of a package that is installed."""
    monkeypatch.setenv("PYTHONPATH", str(here))
    (here / "below").mkdir()
    monkeypatch.chdir(here / "below")
    return here


def run(args, capsys):
    assert main(args.split()) == 0
    return capsys.readouterr().out


def error_of(args, capsys):
    assert main(args.split()) in (1, 2)
    return capsys.readouterr().err


def test_a_custom_environment_in_training_resuming_and_evaluation(here, capsys):
    flags = f"{SMALL} {TRUNK} --evaluate.adv_weights 0 --evaluate.target_return 99"
    output = run(f"train ilql --data chats.jsonl --env echo_env.py:Echo {flags}", capsys)
    assert "raffia evaluate runs/chats-0 --env echo_env.py:Echo" in output
    assert "best mean return" in output
    rows = map(json.loads, Path("runs/chats-0/metrics.jsonl").read_text().splitlines())
    [row] = [row for row in rows if "returns" in row]
    assert sorted(row["decodings"]) == ["adv_weight=0", "decode"]
    assert len(row["returns"]) == 4 and row["mean_return"] == sum(row["returns"]) / 4
    assert "share_won" not in row and "loss" in row
    dialogues = json.loads(next(Path("runs/chats-0/dialogues").iterdir()).read_text())
    assert [dialogue["source"] for dialogue in dialogues["dialogues"]].count("own") == 4

    refused = error_of("resume runs/chats-0 --num_updates 3", capsys)
    assert "If you trust it, name it: --env echo_env.py:Echo" in refused
    assert "--env echo_env.py:Echo" in error_of("evaluate runs/chats-0", capsys)
    run("resume runs/chats-0 --num_updates 3 --env echo_env.py:Echo", capsys)
    output = run("evaluate runs/chats-0 --env echo_env.py:Echo --episodes 5", capsys)
    assert "adv_weight=0" in output and "won" not in output.split("wrote")[0]
    [path] = Path("runs/chats-0/evaluations").iterdir()
    assert path.name == "update-3-5-episodes-seed-0-echo_env.py-Echo.json"
    record = json.loads(path.read_text())
    assert len(record["decodings"]["decode"]["returns"]) == 5 and "loss" in record["held_out"]


def test_a_sweep_is_evaluated_in_a_custom_environment(here, capsys):
    words = f"--engine.name inline {SMALL} {TRUNK}"
    run(f"sweep ilql --data chats.jsonl --env echo_env.py:Echo {words}", capsys)
    again = "resume sweeps/chats --engine.name inline"
    assert f"--env {here}/echo_env.py:Echo" in error_of(again, capsys)
    assert "ILQL has no --networks" in error_of(f"{again} --networks echo_env.py:Echo", capsys)
    shutil.rmtree(next(Path("sweeps/chats/runs").iterdir()))
    output = run(f"{again} --env echo_env.py:Echo", capsys)
    assert "1 finished" in output and "no run has been evaluated" not in output


def small(here, env="", **evaluate):
    config = with_sizes(of_file(str(here / "chats.jsonl"), num_updates=2))
    return replace(config, evaluate=replace(config.evaluate, env=env, **evaluate))


def test_a_run_may_name_an_environment_of_an_installed_package(installed):
    """A class may be passed in place of its name."""
    from echo_env import Echo

    train(small(installed), "run", view=Quiet(), make_env=Echo)
    assert read_run("run").evaluate.env == "echo_env:Echo"
    found = evaluate("run", episodes=6)
    assert len(found.games["decode"].returns) == 6 and found.held_out["loss"] > 0
    longer = replace(read_run("run"), num_updates=3)
    assert resume("run", config=longer, view=Quiet()).update == 3


def test_a_run_cannot_import_a_module_of_the_current_folder(here):
    """Even where Python looks for modules there, as it does for `python -c` and a script."""
    shutil.copy("echo_env.py", "echo_elsewhere.py")
    config = small(here, "echo_elsewhere:Echo")
    with pytest.raises(RunError, match="name it: --env echo_elsewhere:Echo"):
        train(config, "run", view=Quiet())
    assert "echo_elsewhere" not in sys.modules and not Path("run").exists()
    result = train(config, "run", view=Quiet(), make_env="echo_elsewhere:Echo")
    assert result.update == 2
    del sys.modules["echo_elsewhere"]


def test_the_error_of_a_failed_import_has_its_cause(installed):
    (installed / "needs_more.py").write_text("import not_installed_at_all\n")
    with pytest.raises(ConfigError, match="needs_more:Echo .*No module named 'not_installed_at_a"):
        train(small(installed, "needs_more:Echo"), "run", view=Quiet())


MAKES = [
    (functools.partial(make, "Echo"), "pass make_env="),
    (make_echo, "name it: --env .*:make_echo"),
]


@pytest.mark.parametrize(("make_env", "call"), MAKES)
def test_an_environment_passed_by_a_program_must_be_passed_again(make_env, call, here):
    """It is no class that could be found by its name."""
    train(small(here), "run", view=Quiet(), make_env=make_env)
    longer = replace(read_run("run"), num_updates=3)
    with pytest.raises(RunError, match=call):
        resume("run", config=longer, view=Quiet())
    assert resume("run", config=longer, view=Quiet(), make_env=make_env).update == 3


def test_a_run_cannot_call_other_functions_than_environments(here):
    for name in ("os:abort", "json:loads"):
        with pytest.raises(RunError, match=f"name it: --env {name}"):
            train(small(here, name), "run", view=Quiet())


def test_other_objects_than_environments_are_refused_and_leave_no_folder(here, capsys):
    for name, text in {
        "echo_env.py:Ecco": "has no attribute 'Ecco'",
        "broken.py:Echo": "broken.py:Echo cannot be imported: expected ':' (broken.py, line 2)",
        "echo_env.py:Other": "it must be a class, or a function, that returns a raffia.lm.Lan",
        "echo_env.py:Stranger": "first utterance of echo_env.py:Stranger cannot be encoded",
        "echo_env.py": "must be package.module:name or file.py:name",
    }.items():
        message = error_of(f"train ilql --data chats.jsonl --env {name} {SMALL} {TRUNK}", capsys)
        assert text in " ".join(message.split()) and not Path("runs/chats-0").exists()


def test_runs_without_data_use_their_own_environment(here, capsys):
    message = error_of("train ilql --preset wordle --env echo_env.py:Echo", capsys)
    assert "wordle is evaluated in its own games" in message
    with pytest.raises(ValueError, match="name an environment with --env file.py:name"):
        small(here, target_return=1.0)
    with pytest.raises(ConfigError, match=r"is .*WordleEnv"):
        train(small(here), "run", view=Quiet(), make_env=lambda: WordleEnv)
    run(f"train ilql --preset ilql-smoke {SMALL}", capsys)
    message = error_of("evaluate runs/ilql-smoke-0 --env echo_env.py:Echo", capsys)
    assert "wordle is evaluated in its own games" in message
    run(f"train ilql --data chats.jsonl {SMALL} {TRUNK}", capsys)
    assert "estimated" in run("evaluate runs/chats-0", capsys)  # without an environment, as before
