"""Short runs for the tests of recipes."""

import io
import json
import os
import signal
from dataclasses import is_dataclass, replace
from functools import reduce
from pathlib import Path

import pytest

from raffia.algorithms.efficientzero.config import OptimizerConfig
from raffia.recipes import efficientzero, ilql
from raffia.recipes.efficientzero import PRESETS, EfficientZeroRun
from raffia.train import Checkpoints, RunError
from raffia.train.view import PlainView


def short(num_env_steps=160, **changes) -> EfficientZeroRun:
    """The smoke preset, shorter, with all that has a state: priorities, reanalyze, frame stacks."""
    smoke = PRESETS["smoke"]
    return replace(
        smoke,
        **{
            "env": replace(smoke.env, num_envs=4, frame_stack=2),
            "search": replace(smoke.search, num_simulations=4),
            "replay": replace(smoke.replay, batch_size=16),
            "targets": replace(smoke.targets, n_step=5, reanalyze_ratio=0.25, target_interval=20),
            "collect": replace(smoke.collect, num_env_steps=num_env_steps, random_env_steps=40),
            "evaluate": replace(smoke.evaluate, every_env_steps=50, num_episodes=2, max_steps=20),
            "checkpoint": replace(smoke.checkpoint, every_updates=7),
            **changes,
        },
    )


WIDTHS = dict.fromkeys(("latent_state_dim", "lstm_hidden_size"), 16)
TINY = WIDTHS | dict.fromkeys(("proj_hid", "proj_out", "pred_hid", "pred_out"), 8)
TINY["num_channels"] = 4


def tiny(**changes):
    """Ten updates with tiny networks, in four environments."""
    base = PRESETS["smoke"]
    run = short(
        80,
        env=replace(base.env, num_envs=4, num_workers=0),
        model=replace(base.model, **TINY),
        targets=replace(base.targets, n_step=5, discount=0.997, target_interval=5),
        optimizer=OptimizerConfig(name="adamw", learning_rate=3e-3),
        evaluate=replace(base.evaluate, every_env_steps=10**9, num_episodes=1, max_steps=9),
    )
    return with_all(run, **changes)


class Quiet(PlainView):
    """A view that shows nothing; calls in `at` are made at their update."""

    def __init__(self, at=None):
        super().__init__(io.StringIO())
        self.at, self.messages = at or {}, []

    def show(self, status):
        if status.update in self.at:
            self.at.pop(status.update)()

    def message(self, line):
        self.messages.append(line)


def changed(config, name, value):
    """The config with another value of one setting, such as "search.num_simulations".

    A dict gives several settings of the config of this name.
    """
    outer, _, inner = name.rpartition(".")
    part = reduce(getattr, outer.split("."), config) if outer else config
    new = {inner: value}
    if isinstance(value, dict):
        current = getattr(part, inner)
        new = {inner: replace(current, **value)} if is_dataclass(current) else value
    part = replace(part, **new)
    return changed(config, outer, part) if outer else part


def with_all(config, **settings):
    for name, value in settings.items():
        config = changed(config, name.replace("__", "."), value)
    return config


def refused(config, folder, words, error=RunError, **options):
    """A run is refused with these words, and leaves no folder."""
    module = efficientzero if isinstance(config, EfficientZeroRun) else ilql
    with pytest.raises(error, match=words):
        module.train(config, folder / "run", view=Quiet(), **options)
    assert not (folder / "run").exists(), words


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def rows(folder, *kinds):
    """Rows of these kinds (all but start and resume by default), without times."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if not of_time(name)}
        for row in found
        if row["kind"] in kinds or (not kinds and row["kind"] not in ("start", "resume"))
    ]


def of_time(name):
    return name.startswith("seconds") or name.endswith("_per_second")


def last_state(folder):
    """The last checkpoint of a run: its tensors."""
    found = Checkpoints(Path(folder) / "checkpoints").newest()
    parts = [file.removesuffix(".safetensors") for file in sorted(found.folder.files)]
    return found, {name: found.tensors(name) for name in parts}


def same(one, other):
    """Whether two containers are equal bit for bit; NaN counts as unequal."""
    keys, others = (set(found.keys(True, True)) for found in (one, other))
    assert keys == others
    return all(one[key].dtype == other[key].dtype and one[key].equal(other[key]) for key in keys)
