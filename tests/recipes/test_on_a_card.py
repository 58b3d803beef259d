"""Runs whose networks learn, search and generate on a GPU, in one process and in several."""

import math
from contextlib import closing

import pytest
import torch

from raffia.recipes import ALGORITHMS, evaluate, resume, train
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.recipes.ilql.experiment import ILQLExperiment
from raffia.recipes.run_folder import write_config
from raffia.train import Checkpoints, TrainingSession
from tests.recipes.ilql_settings import WORDLE, make_bases
from tests.recipes.layouts import PARTS
from tests.recipes.runs import Quiet
from tests.recipes.test_settings import BASES, with_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the compiler, about torch
]

TWO = dict(learners__num=2)
KINDS = ("actors", "reanalyzers", "evaluators")
ON_CARD = {f"{kind}__{name}": on for kind in KINDS for name, on in (("num", 1), ("device", "cuda"))}
# For each algorithm: the run, and its changed settings.
SEARCHES = {
    **{name: (name, {}) for name in BASES},
    "graphs": ("vector", dict(cudagraphs=True)),
    "graphs of images": ("stack", dict(cudagraphs=True)),
    "graphs, continuous": ("box", dict(cudagraphs=True)),
    "graphs, gumbel": ("gumbel", dict(cudagraphs=True)),
    "bfloat16": ("stack", dict(precision="bfloat16")),
    "bfloat16, graphs": ("stack", dict(precision="bfloat16", cudagraphs=True)),
    "bfloat16, vectors": ("box", dict(precision="bfloat16", cudagraphs=True)),
    "bfloat16, compiled": ("image", dict(precision="bfloat16", compile=True)),
    "members, graphs": ("members", dict(cudagraphs=True)),
    "compiled": ("vector", dict(compile=True)),
    "compiled images": ("image", dict(compile=True)),
    "two learners, graphs": ("vector", TWO | dict(cudagraphs=True)),
    "two learners, compiled": ("vector", TWO | dict(compile=True)),
    "actors ahead": ("vector", dict(env__num_envs=4, actors__num=2, actors__ahead=2)),
    "replay shards": ("vector", dict(env__num_envs=4, replay__shards=2)),
    "members in workers": ("members", dict(population__workers=3)),
    "workers on the GPU": ("vector", ON_CARD),
}
TEXTS = {
    **{
        name: (name, {})
        for name in ("wordle", "planned", "forms", "file", "language", "lora", "members")
    },
    "compiled": ("wordle", dict(compile=True)),
    "compiled language": ("language", dict(compile=True)),
    "two learners": ("wordle", TWO),
    "two learners, compiled": ("wordle", TWO | dict(compile=True)),
    "a sharded state": ("wordle", TWO | {"learners__state": "sharded"}),
    "evaluated on the GPU": ("wordle", dict(evaluators__num=1, evaluators__device="cuda")),
    "members in workers": ("members", dict(population__workers=3)),
}


def state_of(folder):
    found = Checkpoints(folder / "checkpoints").newest(print).tensors("state")
    values = [value.flatten() for value in found["params"].values(True, True)]
    assert torch.cat(values).isfinite().all()
    return found


def train_to_end(algorithm, config, folder):
    """The last state of a finished run."""
    result = train(with_all(config, device="cuda"), folder, view=Quiet())
    assert result.reason == "finished"
    evaluate(folder, episodes=2, device="cuda")
    return state_of(folder)


@pytest.mark.parametrize("name", SEARCHES)
def test_efficientzero(name, tmp_path):
    base, changes = SEARCHES[name]
    config = with_all(BASES[base], device="cuda", **changes)
    train_to_end("efficientzero", config, tmp_path / "run")


@pytest.mark.parametrize("name", TEXTS)
def test_ilql(name, tmp_path):
    base, changes = TEXTS[name]
    train_to_end("ilql", with_all(make_bases(tmp_path)[base], **changes), tmp_path / "run")


@pytest.mark.parametrize("algorithm", ["efficientzero", "ilql"])
def test_two_learners_equal_micro_batches(algorithm, tmp_path):
    """Two processes on one GPU, with gradients summed over gloo; equal up to rounding."""
    if algorithm == "efficientzero":
        one = train_to_end(algorithm, with_all(PARTS, collect__num_env_steps=110), tmp_path / "one")
        two = train_to_end(
            algorithm, with_all(PARTS, collect__num_env_steps=110, **TWO), tmp_path / "two"
        )
        assert int(one["step"]) == int(two["step"]) > 0
        return
    short = with_all(WORDLE, num_updates=2)
    one = train_to_end(algorithm, with_all(short, num_micro_batches=2), tmp_path / "one")
    two = train_to_end(algorithm, with_all(short, **TWO), tmp_path / "two")
    for key, value in one["params"].items(True, True):
        if not key[-1].endswith("bias"):  # of keys in attention gradients are rounding alone
            torch.testing.assert_close(two["params"][key], value, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("algorithm", ["efficientzero", "ilql"])
def test_a_stopped_run_is_resumed(algorithm, tmp_path):
    make = {"efficientzero": EfficientZeroExperiment, "ilql": ILQLExperiment}[algorithm]
    config = {"efficientzero": BASES["vector"], "ilql": WORDLE}[algorithm]
    config, folder = with_all(config, device="cuda"), tmp_path / "run"
    folder.mkdir()
    write_config(folder, config, "", (), ALGORITHMS[algorithm])
    with (
        closing(make(config, folder, Quiet())) as experiment,
        closing(TrainingSession(experiment)) as session,
    ):
        assert session.run(lambda: session.log.status.update >= 3).reason == "stopped"
    stopped_at = int(state_of(folder)["step"])
    assert stopped_at >= 3
    assert resume(folder, view=Quiet()).reason == "finished"
    assert int(state_of(folder)["step"]) > stopped_at and math.isfinite(stopped_at)
