"""What the process that leads pays by itself: for `benchmarks.scale`."""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from raffia.data.segment import SegmentReplayBuffer
from raffia.data.storage import TensorStorage
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.recipes.efficientzero.presets import PRESETS
from raffia.recipes.scale_config import ActorsConfig, EngineConfig
from raffia.tensordict.tensordict import TensorDict
from raffia.train.view import PlainView

FOREVER = 10**9
ROWS = "raffia.algorithms.efficientzero"
BATCH, FRAMES, NUM_STEPS, UNROLL = 256, (3, 96, 96), 1_500, 5


def settings(preset: str, **changes: Any) -> EfficientZeroRun:
    """A preset's run that never ends, with a small replay and few random steps."""
    run = PRESETS[preset]
    collect = replace(run.collect, num_env_steps=FOREVER, random_env_steps=500)
    replay = replace(run.replay, capacity=10_000)
    return replace(run, collect=collect, replay=replay, **changes)


class Updates:
    """The updates of a run without its tasks."""

    def __init__(self, run: EfficientZeroRun, folder: Path) -> None:
        folder.mkdir()
        self.run = EfficientZeroExperiment(run, folder, PlainView(io.StringIO()))
        self.state = self.run.init()

    def __call__(self, num: int) -> tuple[float, float]:
        """Seconds of so many updates, and CPU seconds of this process."""
        run, began, cpu = self.run, time.perf_counter(), time.process_time()
        for _ in range(num):
            batch = run.next_batch(self.state)
            update, metrics = run.learner.grads(self.state, batch)
            self.state = run.learner.apply(self.state, update)
            run.prioritize(batch, metrics)
        return time.perf_counter() - began, time.process_time() - cpu


def _in_one_batch(function: Callable[..., Any], model: Any, *rows: Any, on_gpu: int = 1) -> Any:
    return function(model, *rows)


@contextlib.contextmanager
def any_rows() -> Iterator[None]:
    """Searches as they were before a row had to be the same bits in any batch."""
    with (
        patch(f"{ROWS}.folding.row_invariant", lambda network: None),
        patch(f"{ROWS}.inference._in_blocks", _in_one_batch),
    ):
        yield


def off_ratio(preset: str, rounds: int, num: int) -> float:
    """Updates a second with nothing elsewhere / without what workers need of the loop."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
        as_it_is = Updates(settings(preset), Path(folder) / "as it is")
        opened.callback(as_it_is.run.close)
        with any_rows():
            plain = Updates(settings(preset), Path(folder) / "plain")
            opened.callback(plain.run.close)
            plain(num)
        as_it_is(num)
        ratios = []
        for _ in range(rounds):
            _, seconds = as_it_is(num)
            with any_rows():
                ratios.append(plain(num)[1] / seconds)
        return statistics.median(ratios)


def waiting_share(engine: str, num: int) -> float:
    """The fraction of time that a learner waits for one actor beside it."""
    with tempfile.TemporaryDirectory() as folder:
        actors = ActorsConfig(num=1, ahead=16, cpus=0.5)
        at = EngineConfig(name=engine)  # type: ignore[arg-type]
        run = settings("cartpole", actors=actors, engine=at)
        updates = Updates(run, Path(folder) / "run")
        try:
            updates(num // 4)
            before = updates.run.extra_metrics(0)
            seconds, _ = updates(num)
            after = updates.run.extra_metrics(0)
        finally:
            updates.run.close()
    name = "waited_for_actors_seconds"
    return (after[name] - before[name]) / seconds


def frames_buffer() -> SegmentReplayBuffer:
    """A replay of frames of 96x96x3, which draws into memory that is used again."""
    buffer = SegmentReplayBuffer(
        TensorStorage(2 * NUM_STEPS),
        unroll_steps=UNROLL,
        n_step=5,
        batch_size=BATCH,
        reuse_memory=True,
        generator=torch.Generator().manual_seed(0),
    )
    draw, no = torch.Generator().manual_seed(0), torch.zeros(NUM_STEPS, dtype=torch.bool)
    buffer.extend(
        TensorDict(
            observation=torch.randint(
                0, 256, (NUM_STEPS, *FRAMES), dtype=torch.uint8, generator=draw
            ),
            action=torch.zeros(NUM_STEPS, dtype=torch.int64),
            reward=torch.zeros(NUM_STEPS),
            value=torch.zeros(NUM_STEPS),
            policy=torch.full((NUM_STEPS, 4), 0.25),
            terminated=no,
            truncated=no,
            batch_size=[NUM_STEPS],
        )
    )
    return buffer


def replay_ratios(rounds: int) -> tuple[float, float]:
    """A batch out of the replay / gathering its frames into reused memory; and writing what was
    searched again / writing the columns alone."""
    buffer = frames_buffer()
    steps = buffer.sample()["observation"].shape[1]
    frames = torch.randint(0, 256, (NUM_STEPS, *FRAMES), dtype=torch.uint8)
    reused = torch.empty(BATCH * steps, *FRAMES, dtype=torch.uint8)
    rows = torch.randint(0, NUM_STEPS, (BATCH * steps,))
    index = torch.randperm(NUM_STEPS - 20)[:BATCH]
    new = TensorDict(value=torch.ones(BATCH), policy=torch.ones(BATCH, 4), batch_size=[BATCH])
    columns = {"value": torch.zeros(NUM_STEPS), "policy": torch.zeros(NUM_STEPS, 4)}

    def gather() -> None:
        torch.index_select(frames, 0, rows, out=reused)

    def write_columns() -> None:
        for name, column in columns.items():
            column[index] = new[name]

    found = []
    for call, floor in (
        (lambda: buffer.sample(), gather),
        (lambda: buffer.update(index, new), write_columns),
    ):
        found.append(statistics.median([_cpu(call) / _cpu(floor) for _ in range(3 * rounds)]))
    return found[0], found[1]


def _cpu(call: Callable[[], object]) -> float:
    """CPU seconds of a call, of as many as take a twentieth of a second."""
    call()
    began, num = time.process_time(), 0
    while time.process_time() - began < 0.05:
        call()
        num += 1
    return (time.process_time() - began) / num
