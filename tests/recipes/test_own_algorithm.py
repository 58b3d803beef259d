"""A custom algorithm: trained, resumed, evaluated, reported; and how it is found."""

import json
import shutil
from dataclasses import make_dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from raffia.cli import main
from raffia.recipes import Algorithm, RunError, find_algorithm, load_agent, read_run, resume, train
from raffia.train.config import ConfigError
from tests.marks import refusals
from tests.recipes.runs import Quiet, last_state, same, terminate

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_algorithm.py"
REFERENCE = f"{EXAMPLE}:dqn"


@pytest.fixture(scope="module")
def dqn():
    return find_algorithm(REFERENCE)


def short(dqn, **changes):
    defaults = dict(num_env_steps=240, random_env_steps=160, evaluate_every=120, batch_size=16)
    return dqn.config(**{**defaults, **changes})


@pytest.fixture(scope="module")
def finished(dqn, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "straight"
    result = train(short(dqn), folder, algorithm=dqn, view=Quiet())
    assert (result.reason, result.env_step, result.update) == ("finished", 240, 80)
    return folder


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 150


def test_a_stopped_and_resumed_run_is_the_same_run(dqn, finished, tmp_path):
    folder = tmp_path / "run"
    result = train(short(dqn), folder, algorithm=dqn, view=Quiet({40: terminate}))
    assert (result.reason, result.update) == ("stopped", 40)
    assert resume(folder, algorithm=dqn, view=Quiet()).reason == "finished"
    (_, expected), (_, again) = last_state(finished), last_state(folder)
    assert same(expected["state"], again["state"])


def test_the_loss_is_that_of_double_dqn(dqn):
    """The gradient of a batch against the formula by hand, for one row."""
    import torch
    from own_algorithm import DQNLearner  # where `dqn` was imported from

    from raffia import TensorDict
    from raffia.envs.env import Discrete, EnvSpec

    learner = DQNLearner(EnvSpec(observation_shape=(4,), action=Discrete(3)), short(dqn))
    state = learner.init(0)
    state["target"] = state["target"] * 0.5
    draws = torch.Generator().manual_seed(0)
    action, reward = torch.tensor([[1, 0], [2, 0]]), torch.tensor([[0.3, 9.0], [0.1, 9.0]])
    batch = TensorDict(action=action, reward=reward, batch_size=[2])
    batch["observation"] = torch.randn(2, 2, 4, generator=draws)
    batch["discount"] = torch.tensor([[1.0, 9.0], [0.0, 9.0]])
    _, metrics = learner.grads(state, batch)
    losses = []
    for row in range(2):
        observation, after = batch["observation"][row]
        value = learner.values(state["params"], observation[None])[0, batch["action"][row, 0]]
        best = int(learner.values(state["params"], after[None])[0].argmax())
        goal = batch["reward"][row, 0]
        if row == 0:  # the other one ends its episode
            goal = goal + 0.99 * learner.values(state["target"], after[None])[0, best]
        error = float((value - goal).abs())
        losses.append(error**2 / 2 if error < 1 else error - 0.5)
    assert float(metrics["loss"]) == pytest.approx(sum(losses) / 2, rel=1e-5)


def test_invalid_resumes_are_refused(dqn, finished):
    with pytest.raises(RunError, match="^learning_rate cannot be changed: .* was started with"):
        resume(finished, algorithm=dqn, config=short(dqn, learning_rate=1.0), view=Quiet())
    with pytest.raises(RunError, match="is a run of dqn"):
        resume(finished, algorithm=find_algorithm("ilql"), view=Quiet())
    with pytest.raises(TypeError, match="config is a DQNConfig, but ilql has a ILQLRun"):
        train(short(dqn), "nowhere", algorithm=find_algorithm("ilql"), view=Quiet())


def test_a_run_s_folder_cannot_import_a_file(finished, dqn):
    """A run may come from an untrusted source, and importing runs code."""
    with pytest.raises(RunError, match="If you trust it, name it: --algorithm .*own_algorithm.py"):
        read_run(finished)
    assert read_run(finished, dqn) == short(dqn)
    assert int(load_agent(finished, "newest", algorithm=dqn, device="cpu")["step"]) == 80


def test_a_run_s_folder_cannot_import_a_module_of_the_current_folder(
    finished, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("evil_module.py").write_text("raise SystemExit('imported')")
    shutil.copytree(finished, "run")
    config = json.loads(Path("run/config.json").read_text())
    config["run"]["reference"] = "evil_module:dqn"
    Path("run/config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match="name it: --algorithm evil_module:dqn"):
        read_run("run")


OTHERS = {  # a name, and words of the error
    "efficientzer": "did you mean efficientzero",
    "some/dqn.py": "Name the record in it: some/dqn.py:NAME",
    "no_such_package:dqn": "no_such_package:dqn cannot be imported",
    "no_such_file.py:dqn": "cannot be imported: .*No such file",
    f"{EXAMPLE}:dqnn": "has no attribute 'dqnn'",
    f"{EXAMPLE}:DQNConfig": "is a type, not a raffia.recipes.Algorithm",
}
NO_SEED = make_dataclass("NoSeed", [("device", str, "cpu"), ("num_threads", int, 1)])
LACKING = dict(name="lacking", make="nowhere:Experiment")
test_what_is_no_algorithm_is_refused = refusals(
    [
        *((partial(find_algorithm, name), ConfigError, words) for name, words in OTHERS.items()),
        (
            lambda: Algorithm(config=NO_SEED, **LACKING),
            TypeError,
            "NoSeed has no title and no seed,",
        ),
        (lambda: Algorithm(config={"seed": 0}, **LACKING), TypeError, "is not a dataclass"),
    ]
)


def test_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = "--num_env_steps 240 --random_env_steps 160 --evaluate_every 120 --batch_size 16"
    assert main(["train", REFERENCE, "--seed", "3", *flags.split()]) == 0
    assert f"raffia evaluate runs/dqn-3 --algorithm {REFERENCE}" in capsys.readouterr().out
    assert main(["resume", "runs/dqn-3"]) == 2
    said = capsys.readouterr().err
    assert f"name it: --algorithm {REFERENCE}" in said and "repair" not in said
    named = ["--algorithm", REFERENCE]
    assert main(["resume", "runs/dqn-3", *named]) == 0
    assert "there is nothing left to do" in capsys.readouterr().out
    assert main(["resume", "runs/dqn-3", *named, "--num_env_steps", "280"]) == 0
    assert "280 environment steps" in capsys.readouterr().out
    rows = Path("runs/dqn-3/metrics.jsonl")
    rows.write_text(rows.read_text().replace('"reason": "finished"', '"reason": "target"'))
    assert main(["resume", "runs/dqn-3", *named]) == 0
    assert f"resume runs/dqn-3 {' '.join(named)} --target_return none" in capsys.readouterr().out
    assert main(["resume", "runs/dqn-3", *named, "--discount", "0.9"]) == 2
    assert "discount shapes what is learnt" in capsys.readouterr().err
    assert main(["evaluate", "runs/dqn-3", *named, "--episodes", "2", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["returns"]) == 2
    assert main(["evaluate", "runs/dqn-3", *named, "--num-simulations", "2"]) == 2
    assert "runs/dqn-3 is a run of DQN" in capsys.readouterr().err
    assert main(["report", "runs/dqn-3"]) == 0
    page = Path("runs/dqn-3/report.html").read_text()
    assert "target of 475" in page
    assert f"raffia evaluate runs/dqn-3 --episodes 100 --algorithm {REFERENCE}" in page
    assert "--record" not in page and "searched tree" not in page and "simulations / s" not in page
    assert main(["train", REFERENCE, "--discount", "x"]) == 2
    assert f"\n  raffia train {REFERENCE} --help" in capsys.readouterr().err
    assert main(["train", REFERENCE, "--population", "4"]) == 2
    said = capsys.readouterr().err
    assert (
        "raffia.evolution.Population" in said and f"raffia sweep {REFERENCE} --seeds 0..3" in said
    )
    assert main(["play", "runs/dqn-3"]) != 0 and main(["chat", "runs/dqn-3"]) != 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_dqn_learns_cartpole(dqn, tmp_path):
    """With a margin: each of the seeds 0 to 5 reached it within 20,000 steps."""
    config = replace(dqn.config(seed=4), num_env_steps=40_000)
    result = train(config, tmp_path / "run", algorithm=dqn, view=Quiet())
    assert result.reason == "target" and result.best_return >= 475


def test_a_file_that_fails_to_import_is_read_again(tmp_path):
    file = tmp_path / "half_an_algorithm.py"
    file.write_text("own = None\nraise KeyError('not yet')\n")
    for _ in range(2):
        with pytest.raises(KeyError, match="not yet"):
            find_algorithm(f"{file}:own")
