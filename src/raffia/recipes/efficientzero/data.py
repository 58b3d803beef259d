"""The replay of a run, and its part of checkpoints."""

from __future__ import annotations

from pathlib import Path

from raffia.data.memmap_storage import MemmapStorage
from raffia.data.segment import SegmentReplayBuffer
from raffia.data.segment_shards import ReplayShards
from raffia.data.storage import TensorStorage
from raffia.envs.env import EnvSpec
from raffia.functional.seeds import generator_for
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.tensordict.tensordict import TensorDict
from raffia.train.member_replay import OwnReplays, SharedReplay

SEARCHED = ("policy", "value", "sampled_actions")  # what reanalyze writes again into the replay


class Replays:
    """The replay of a run: one, or one for each member of a population, or of several shards.

    folder: of the run.

    >>> from raffia.envs.env import Discrete
    >>> spec = EnvSpec(observation_shape=(4,), action=Discrete(2))
    >>> type(Replays(EfficientZeroRun(), spec, Path("nowhere")).replay).__name__
    'SegmentReplayBuffer'
    """

    def __init__(self, config: EfficientZeroRun, spec: EnvSpec, folder: Path) -> None:
        size = config.population.size
        own = config.population.replay == "own" and size > 1
        num_shards = config.replay.shards
        parts: list[int | None] = [None]
        if own or num_shards > 1:
            parts = [*range(max(size, num_shards))]
        self.buffers = [make_replay(config, spec, folder, part) for part in parts]
        names = ["replay" if part is None else f"replay.{part}" for part in parts]
        self.by_name = dict(zip(names, self.buffers, strict=True))
        self.replay: SegmentReplayBuffer | ReplayShards | SharedReplay | OwnReplays
        self.replay = self.buffers[0]
        if num_shards > 1:
            self.replay = ReplayShards(self.buffers, reuse_memory=True)
        elif own:
            self.replay = OwnReplays(self.buffers)
        elif size > 1:
            self.replay = SharedReplay(self.buffers[0], size)

    def update(self, fresh: TensorDict, best: int) -> None:
        """Write reanalyzed entries to the replay; where members share their rows, those of the
        best."""
        if isinstance(self.replay, SegmentReplayBuffer | ReplayShards):
            self.replay.update(fresh["step_index"], fresh.exclude("step_index"))
        else:
            self.replay.update(fresh, best)

    def close(self) -> None:
        """Close the replay: the next session of this process would be refused its files else."""
        for buffer in self.buffers:
            if isinstance(buffer.storage, MemmapStorage):
                buffer.storage.close()


def make_replay(
    config: EfficientZeroRun,
    spec: EnvSpec,
    folder: Path,
    part: int | None = None,  # whose it is, of members or shards; None: of the whole run
) -> SegmentReplayBuffer:
    """The replay buffer of a run; on disk in the run's folder, where that is set.

    >>> from raffia.envs.env import Discrete
    >>> spec = EnvSpec(observation_shape=(4,), action=Discrete(2))
    >>> make_replay(EfficientZeroRun(), spec, Path("nowhere")).length
    11
    """
    replay, stack = config.replay, config.env.frame_stack
    # Of the capacity alone, so that a run can be made longer. Each of the environments can end at
    # once, and needs a closing row besides its step then.
    rows = -(-replay.capacity // replay.shards) + 2 * config.env.num_envs // replay.shards
    at = folder / "replay" / ("" if part is None else str(part)) / "rows"
    key: list[int | str] = [part] if part else []
    if replay.shards > 1:
        assert part is not None
        key = ["shard", part]
    return SegmentReplayBuffer(
        MemmapStorage(rows, at) if replay.on_disk else TensorStorage(rows),
        unroll_steps=config.loss.unroll_steps,
        n_step=config.targets.n_step,
        observation_keys=spec.state_keys,
        frame_stack={"observation": stack} if stack > 1 else 1,
        absorb=config.loss.absorb,
        alpha=replay.alpha or None,
        beta=replay.beta if replay.alpha else None,
        importance="batch",
        replacement=None,  # as the paper draws, but for the first batches of a short run
        reuse_memory=replay.shards == 1,  # shards draw into memory that they share
        pin_memory=config.device.startswith("cuda"),
        generator=generator_for(config.seed, "replay", *key),
    )
