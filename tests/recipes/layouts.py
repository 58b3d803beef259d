"""Runs with several layouts of workers, and their results."""

import hashlib
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from raffia.learner import Accumulate
from raffia.recipes import ALGORITHMS, run_experiment, train, workers
from raffia.recipes.efficientzero import PRESETS, EfficientZeroRun
from raffia.recipes.efficientzero import experiment as played
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.recipes.ilql.experiment import ILQLExperiment
from raffia.recipes.run_folder import write_config
from raffia.recipes.scale_config import ActorsConfig
from raffia.train import Checkpoints, TrainingSession
from tests.recipes.ilql_settings import WORDLE
from tests.recipes.runs import Quiet, rows, with_all

EFFICIENTZERO, ILQL = ALGORITHMS["efficientzero"], ALGORITHMS["ilql"]
SMOKE = with_all(
    PRESETS["smoke"],
    collect={"num_env_steps": 240, "random_env_steps": 80},
    evaluate={"every_env_steps": 120, "num_episodes": 2},
    checkpoint={"every_updates": 10, "keep": 1},
)
AHEAD = replace(SMOKE, actors=ActorsConfig(ahead=5, weights_every=2))
BATCHES = with_all(
    SMOKE,
    targets={"reanalyze_ratio": 0.5, "target_interval": 4},
    replay__capacity=120,
    collect__rollout_length=2,
)
SHARDS = with_all(BATCHES, replay__shards=2, env__num_envs=4, replay__capacity=140)
EVALUATED = with_all(
    SMOKE, seed=2, evaluate={"every_env_steps": 60, "num_episodes": 4}, checkpoint__every_updates=4
)
ALL = with_all(
    BATCHES,
    actors={"ahead": 8, "weights_every": 2},
    reanalyzers__ahead=7,
    evaluators__join_after=9,
    collect__num_env_steps=320,
)
PARTS = with_all(
    SMOKE,
    model={"norm_type": "LN", "projection_norm_type": "LN"},
    replay__batch_size=24,
    targets__reanalyze_ratio=0.5,
    collect__num_env_steps=160,
)
MANY = {"size": 4, "spread": 3.0, "parameters": 0.5}
MEMBERS = with_all(
    SMOKE,
    env__num_envs=4,
    population={**MANY, "ranges": ("learning_rate=1e-4..1", "batch_size=6..12")},
    replay__batch_size=8,
    targets={"reanalyze_ratio": 0.5, "target_interval": 7},
    collect__num_env_steps=140,
    evaluate__every_env_steps=44,
)
PAIR = with_all(
    BATCHES,
    replay__batch_size=12,
    population={"size": 2, "ranges": ("learning_rate=1e-4..1", "batch_size=8..16")},
    evaluate={"every_env_steps": 35, "num_episodes": 1},
    collect__num_env_steps=160,
)
RANGES = ("learning_rate=1e-5..1", "tau=0.5..0.95", "batch_size=3..8")
ILQL_MEMBERS = with_all(WORDLE, population={**MANY, "ranges": RANGES}, num_updates=9, num_threads=1)
ILQL_EVALUATED = with_all(WORDLE, num_updates=8, evaluate__every_updates=2, checkpoint__keep=1)

RUNS = {
    "act": SMOKE,
    "act ahead": AHEAD,
    "all ahead": ALL,
    "all ahead, soon over": with_all(ALL, collect__num_env_steps=140),
    "batches": BATCHES,
    "batches ahead": with_all(BATCHES, reanalyzers__ahead=7),
    "batches ahead, soon over": with_all(BATCHES, reanalyzers__ahead=7, collect__num_env_steps=140),
    "shards": SHARDS,
    "shards ahead": with_all(SHARDS, reanalyzers__ahead=7),
    "four shards": with_all(SHARDS, reanalyzers__ahead=7, replay__shards=4),
    "evaluate": EVALUATED,
    "evaluate later": with_all(EVALUATED, evaluators__join_after=20),
    "two halves": PARTS,
    "three thirds": PARTS,
    "halves of shards": with_all(PARTS, env__num_envs=4, replay__shards=2, reanalyzers__ahead=3),
    "members": MEMBERS,
    "members with replays": with_all(MEMBERS, population__replay="own", actors__ahead=3),
    "pair": PAIR,
    "pair ahead": with_all(PAIR, reanalyzers__ahead=7),
    "pair with replays": with_all(PAIR, population__replay="own"),
    "ilql halves": with_all(WORDLE, num_micro_batches=2),
    "ilql thirds": with_all(WORDLE, num_micro_batches=3),
    "ilql evaluate": ILQL_EVALUATED,
    "ilql evaluate later": with_all(ILQL_EVALUATED, evaluators__join_after=3),
    "ilql members": ILQL_MEMBERS,
}


def layout(engine="inline", members=0, cpus=None, **nums):
    """Settings for this number of workers of each kind."""
    found = {f"{kind}__num": num for kind, num in nums.items()}
    if members:
        found["population__workers"] = members
    if engine != "inline":
        found["engine__name"] = engine
    if cpus is not None:
        found |= {f"{kind}__cpus": cpus for kind in nums if kind != "learners"}
    return found


class RunResult(NamedTuple):
    """All results of a run, which may depend on its seed and learning settings alone."""

    update: int
    evaluate: Any
    code: str  # digest of the learner's state and the replay
    rows: list[dict[str, Any]]
    episodes: list[dict[str, Any]]
    scores: dict[int, float | None]
    files: dict[str, bytes]


def results_of(folder):
    checkpoints = Checkpoints(folder / "checkpoints")
    found, code = checkpoints.newest(print), hashlib.sha256()
    for name in sorted(found.folder.files):
        if name.startswith(("state", "replay")):
            part = name.removesuffix(".safetensors")
            for key, value in sorted(found.tensors(part).items(True, True), key=str):
                code.update(str((part, key)).encode() + value.contiguous().numpy().tobytes())
    kinds, evaluated = ("dialogues", "episodes", "trees"), found.extras["evaluate"]
    files = {path.name: path.read_bytes() for kind in kinds for path in folder.glob(f"{kind}/*")}
    scores = {checkpoint.update: checkpoint.score for checkpoint in checkpoints.available()}
    rows_of = rows(folder, "evaluate", "generation"), rows(folder, "episode")
    return RunResult(found.update, evaluated, code.hexdigest(), *rows_of, scores, files)


def algorithm_of(config):
    return EFFICIENTZERO if isinstance(config, EfficientZeroRun) else ILQL


def trained(config, folder, **changes):
    """The results of a finished run."""
    result = train(with_all(config, **changes), folder, view=Quiet())
    assert result.reason == "finished"
    return results_of(Path(folder))


def experiment(config, folder, **changes):
    """An experiment that has not started; it is closed at the end of the `with`."""
    config = with_all(config, **changes)
    folder.mkdir(exist_ok=True)
    write_config(folder, config, "", (), algorithm_of(config))
    make = ILQLExperiment if algorithm_of(config) is ILQL else EfficientZeroExperiment
    return closing(make(config, folder, Quiet()))


def stopped(config, folder, num_calls, **changes):
    """Run until the `num_calls`-th call of `stop`; the newest checkpoint."""
    with experiment(config, folder, **changes) as run, closing(TrainingSession(run)) as session:
        stop = partial(next, iter([False] * num_calls), True)
        assert session.run(stop).reason == "stopped"
    return Checkpoints(folder / "checkpoints").newest(print)


def with_engine(monkeypatch, engine):
    """Let workers be made by this engine in place of that of the settings."""
    monkeypatch.setattr(workers, "make_engine", lambda config, message: engine)


class Plain:
    def __init__(self, grads):
        self.grads = grads


def reference(name, folder):
    """The run's results in one process, with the arithmetic of its workers."""
    with pytest.MonkeyPatch.context() as patch:
        make_networks, make_members = played.make_networks, run_experiment.Members

        def in_parts(num, *arguments):
            networks = make_networks(*arguments)
            parts = Accumulate(networks, num)
            networks.grads, parts.learner = parts.grads, Plain(networks.grads)
            return networks

        def each_alone(*arguments, **options):
            return make_members(*arguments, **{**options, "grads": "each"})

        if RUNS[name] is PARTS or name == "halves of shards":
            parts = 3 if name == "three thirds" else 2
            patch.setattr(played, "make_networks", partial(in_parts, parts))
        if RUNS[name].population.size == 4:
            patch.setattr(run_experiment, "Members", each_alone)
        return trained(RUNS[name], folder)
