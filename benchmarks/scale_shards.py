"""What the process that leads does for a batch of Atari's size: for `benchmarks.scale`.

Two workers make batches of segments of 14 frames of 96x96x3 without searching them, so that what
is timed is drawing, sending, taking, and the new steps.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from raffia.distributed.pool import Pool
from raffia.envs.env import Discrete, EnvSpec
from raffia.recipes.efficientzero.actors import make_networks, make_planner, process_config
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.recipes.efficientzero.data import Replays
from raffia.recipes.efficientzero.presets import PRESETS
from raffia.recipes.efficientzero.reanalyzers import BatchMaking, ReanalyzeRole, ShardMaking
from raffia.recipes.scale_config import EngineConfig, ReanalyzersConfig
from raffia.recipes.workers import make_engine
from raffia.tensordict.tensordict import TensorDict
from raffia.train.ahead import BatchesAhead, BatchesOfShards, ShardMirrors
from raffia.train.config import from_json
from raffia.train.nan_guard import NaNGuard

SPEC = EnvSpec(
    observation_shape=(3, 96, 96), action=Discrete(4), observation_dtype=torch.uint8, name="Atari"
)
NUM_ENVS, BATCH, NUM_STEPS, AHEAD, FOREVER = 4, 128, 400, 2, 10**6


class MakesWithoutSearch(ReanalyzeRole):
    """A reanalyzer of the frames of Atari, without the game."""

    def __init__(self, config: str, index: int) -> None:
        self.config = run = from_json(EfficientZeroRun, json.loads(config)["run"])
        self.planner = make_planner(make_networks(run, SPEC), run, SPEC)
        self._version = 0  # its networks are never used
        self._mirrors = ShardMirrors()


def settings(shards: int, engine: str) -> EfficientZeroRun:
    """The paper's, smaller in numbers of steps and segments, nothing searched again."""
    run = PRESETS["atari100k"]
    return replace(
        run,
        device="cpu",
        env=replace(run.env, num_envs=NUM_ENVS),
        replay=replace(run.replay, capacity=NUM_ENVS * NUM_STEPS, batch_size=BATCH, shards=shards),
        targets=replace(run.targets, reanalyze_ratio=0.0, bootstrap="search"),
        reanalyzers=ReanalyzersConfig(num=2, ahead=AHEAD, cpus=0.5),
        engine=EngineConfig(name=engine),  # type: ignore[arg-type]
    )


def played(num_steps: int, draw: torch.Generator) -> TensorDict:
    """Steps [T, E] of random frames, in episodes that go on."""
    size = num_steps, NUM_ENVS
    no = torch.zeros(size, dtype=torch.bool)
    frames = torch.randint(0, 256, (*size, 3, 96, 96), dtype=torch.uint8, generator=draw)
    return TensorDict(
        observation=frames,
        action=torch.zeros(size, dtype=torch.int64),
        reward=torch.zeros(size),
        policy=torch.full((*size, 4), 0.25),
        value=torch.zeros(size),
        terminated=no,
        truncated=no,
        batch_size=size,
    )


class Leader:
    """The part of a run's loop that gets batches."""

    def __init__(self, folder: Path, shards: int, engine: str) -> None:
        run = settings(shards, engine)
        self.replays = Replays(run, SPEC, folder)
        self.draw = torch.Generator().manual_seed(0)
        self.replays.replay.extend(played(NUM_STEPS, self.draw))
        making = (ShardMaking if shards > 1 else BatchMaking)(run, self.replays, NaNGuard(folder))
        self.engine = make_engine(run.engine)
        of = BatchesOfShards if shards > 1 else BatchesAhead
        role = f"{__name__}:{MakesWithoutSearch.__name__}"
        pool = Pool(self.engine, role, process_config(run), 2)
        self.batches = of(pool, making, ahead=AHEAD, num_updates=FOREVER)
        target = TensorDict(params=TensorDict(), buffers=TensorDict())
        self.state = TensorDict(target=target, hyper=TensorDict(), step=torch.tensor(0))

    def __call__(self, num: int) -> float:
        """CPU seconds of the leading process for a batch."""
        steps, began = played(1, self.draw), time.process_time()
        for _ in range(num):
            self.replays.replay.extend(steps)
            self.batches.next(self.state, lambda update: self.replays.replay.sample(BATCH))
            self.state["step"] = self.state["step"] + 1
        return (time.process_time() - began) / num

    def close(self) -> None:
        """End the workers."""
        self.batches.close()
        self.engine.close()


def shards_ratio(engine: str, rounds: int) -> tuple[float, float]:
    """CPU seconds for a batch of shards in workers / of segments that the leader draws; of these
    the milliseconds."""
    torch.set_num_threads(1)
    seconds = []
    for shards in (1, 2):  # one after the other: a process has one Ray cluster at a time
        with tempfile.TemporaryDirectory() as folder:
            leader = Leader(Path(folder), shards, engine)
            try:
                leader(5)
                seconds.append(statistics.median([leader(10) for _ in range(rounds)]))
            finally:
                leader.close()
    drawn, held = seconds
    return held / drawn, 1e3 * drawn
