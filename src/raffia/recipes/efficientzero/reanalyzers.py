"""How a run's batches are made: in the loop, or ahead by workers that search stored steps again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from raffia.algorithms.efficientzero.observations import frames_of
from raffia.algorithms.efficientzero.planning import Planner
from raffia.algorithms.efficientzero.targets import make_batch
from raffia.data.segment import SegmentReplayBuffer
from raffia.data.segment_batches import stacked
from raffia.data.segment_shards import ReplayShards
from raffia.evolution.config import BATCH_SIZE
from raffia.functional.seeds import generator_for
from raffia.learner import step_of
from raffia.recipes.efficientzero.actors import (
    PlannerRole,
    configured_run,
    reason_of,
    spec_of,
)
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.recipes.efficientzero.data import SEARCHED, Replays
from raffia.recipes.members import Members, weights_of_each
from raffia.tensordict.stack import cat
from raffia.tensordict.tensordict import TensorDict
from raffia.train.ahead import ShardMirrors
from raffia.train.nan_guard import NaNGuard

CHANGING = (*SEARCHED, "priority_weight", "total")  # of segments, from when they were drawn


def batch_of(
    config: EfficientZeroRun,
    planner: Planner,  # refreshed with `reanalyze_weights`
    segments: TensorDict,
    update: int,
    total: int | Tensor,  # rows that the replay ever stored
    shard: int | None = None,  # of whose segments it is the part; None: of all
) -> tuple[TensorDict, TensorDict | None]:
    """The batch of an update, and the steps that were searched again for it, or None."""
    targets = config.targets
    horizon = targets.horizon_fraction * config.collect.num_env_steps
    # Where nothing is played no step is older than another.
    corrects = targets.correct_horizon and not config.is_offline
    return make_batch(
        segments,
        planner,
        generator=generator_for(
            config.seed, "targets", update, *([] if shard is None else [shard])
        ),
        total=total,
        correction_interval=max(int(horizon > 0), round(horizon)) if corrects else 0,
    )


def batch_of_shards(
    config: EfficientZeroRun,
    planner: Planner,
    parts: Sequence[TensorDict],  # segments of each of these shards
    update: int,
    shards: Sequence[int],
) -> tuple[TensorDict, TensorDict | None]:
    """Like `batch_of`, for shards: each shard's part is independent of which process makes it."""
    made = [
        batch_of(config, planner, part, update, part["total"], shard)
        for part, shard in zip(parts, shards, strict=True)
    ]
    return joined([batch for batch, _ in made], [fresh for _, fresh in made])


def joined(
    batches: Sequence[TensorDict], fresh: Sequence[TensorDict | None]
) -> tuple[TensorDict, TensorDict | None]:
    """Parts of a batch, and what was searched again for them, as one."""
    found = [one for one in fresh if one is not None]
    return cat(batches), cat(found) if found else None


def reanalyze_weights(state: TensorDict) -> TensorDict:
    """The part of a learner's state that searches of stored steps need: the target network."""
    weights: TensorDict = state["target"].copy()
    return weights.set("hyper", state["hyper"])


class ReanalyzeRole(PlannerRole):
    """Makes a batch for each task; see `raffia.train.ahead.BatchesAhead`.

    >>> from raffia.recipes.efficientzero.actors import process_config
    >>> from raffia.recipes.efficientzero.presets import PRESETS
    >>> role = ReanalyzeRole(process_config(PRESETS["smoke"]), 0)
    >>> role.planner.spec.action.n
    2
    """

    def __init__(self, config: str, index: int) -> None:
        run = configured_run(config)
        super().__init__(run, spec_of(run.env), run.reanalyzers.device)
        self._mirrors = ShardMirrors()

    def load(self, state: TensorDict) -> None:
        """Load the frames of this worker's shards of the replay, if it has any."""
        self._mirrors.load(state)

    def _answer(self, task: TensorDict, weights: TensorDict | None) -> TensorDict:
        """Make the batch of an update."""
        self._refresh(int(task["version"]), weights)
        if "rows" in task.keys():
            self._mirrors.append(task)
        batch, fresh = self._made(task)
        answer = TensorDict(batch=batch)
        return (answer if fresh is None else answer.set("fresh", fresh)).to("cpu")

    def _made(self, task: TensorDict) -> tuple[TensorDict, TensorDict | None]:
        run, update, segments = self.config, int(task["update"]), task["segments"]
        if run.replay.shards == 1:
            whole = _with_stacks(segments, run.env.frame_stack)
            total = int(task["total"]) if "total" in task.keys() else segments["total"]
            return batch_of(run, self.planner, whole, update, total)
        shards: list[int] = task["shards"].tolist()
        parts = segments.split(len(segments) // len(shards))
        with_frames = [
            self._with_frames(part, shard) for part, shard in zip(parts, shards, strict=True)
        ]
        return batch_of_shards(run, self.planner, with_frames, update, shards)

    def _with_frames(self, part: TensorDict, shard: int) -> TensorDict:
        """A shard's part as the replay would have given it."""
        if "frame_rows" in part.keys():
            frames = self._mirrors.read(shard, part["frame_rows"])
            part = part.exclude("frame_rows").set("observation", frames)
        return _with_stacks(part, self.config.env.frame_stack)


class BatchMaking:
    """Draws, sends, receives and saves batches that are made ahead: a `raffia.train.ahead.Making`.

    replays: the run's, of one agent.
    guard: stops the run where a search met NaN.
    """

    def __init__(self, config: EfficientZeroRun, replays: Replays, guard: NaNGuard) -> None:
        self._config, self._replays, self._guard = config, replays, guard
        self.num_simulations = 0  # of all batches that were taken

    @property
    def _best(self) -> int:
        """The member whose searched steps are written back, where members share a replay."""
        return 0

    def _numbers(self, index: Tensor) -> Tensor:
        """The numbers of steps as the replay takes them."""
        return index

    def weights(self, state: TensorDict) -> tuple[int, TensorDict]:
        """The target network, and the update after which it was copied."""
        interval = self._config.targets.target_interval
        return step_of(state) // interval * interval, reanalyze_weights(state)

    def task(self, segments: TensorDict) -> TensorDict:
        """The segments, each frame once."""
        flat = self.flat(segments)
        own = flat.exclude("observation").clone()
        self._take_frames(own, flat["observation"])
        task, replay = TensorDict(segments=own), self._replays.replay
        if isinstance(replay, SegmentReplayBuffer):  # else each segment has its own "total"
            task["total"] = torch.tensor(replay.storage.total)
        elif isinstance(replay, ReplayShards):
            task["shards"] = torch.arange(self._config.replay.shards)
        return task

    def flat(self, segments: TensorDict) -> TensorDict:
        """The segments as one search takes them."""
        return segments

    def _take_frames(self, own: TensorDict, frames: Tensor) -> None:
        own["observation"] = frames_of(frames, frames.shape[1], self._config.env.frame_stack)

    def batch(self, state: TensorDict, task: TensorDict, answer: TensorDict) -> TensorDict:
        """The batch of an answer, in which no search met NaN or infinity."""
        if (why := reason_of(answer)) is not None:
            self._guard.searched(state, self._whole(task["segments"]), why)
        self.num_simulations += int(answer["num_simulations"])
        return self.finished(state, answer["batch"], answer.get("fresh", None))

    def finished(
        self, state: TensorDict, batch: TensorDict, fresh: TensorDict | None
    ) -> TensorDict:
        """The batch on the learner's device; what was searched is written to the replay."""
        if fresh is not None:
            self._replays.update(fresh, self._best)
        return batch.to(self._config.device)

    def _whole(self, segments: TensorDict) -> TensorDict:
        """The segments with their frames."""
        return segments

    def save(self, task: TensorDict) -> TensorDict:
        """The starts, and what may change in the replay; all, where steps were overwritten."""
        segments = task["segments"]
        if self._replays.replay.contains(self._numbers(segments["index"])).all():
            changing = [key for key in CHANGING if key in segments.keys()]
            segments = segments.select("index", *changing)
        else:
            segments = self._whole(segments)
        return task.copy().set("segments", segments)

    def load(self, saved: TensorDict) -> TensorDict:
        """The task, its segments read again where the replay still has them."""
        task, segments = saved.copy(), saved["segments"].copy()
        segments.batch_size = segments["index"].shape
        if "observation" not in segments.keys():
            read = self._replays.replay.read(self._numbers(segments["index"]))
            segments = self.task(read)["segments"].update(segments)
        return task.set("segments", segments)


class MembersMaking(BatchMaking):
    """Batch making for a population: each batch is for all members, in one search of their
    segments.

    whole: of a learner's state, what workers have of it.

    Legend: P members, B segments of each. Tasks have segments [P * B] with "member".
    """

    def __init__(
        self,
        config: EfficientZeroRun,
        replays: Replays,
        guard: NaNGuard,
        members: Members,
        whole: Callable[[TensorDict], TensorDict],
    ) -> None:
        super().__init__(config, replays, guard)
        self._members, self._whole_state = members, whole
        self._is_changed = True  # there may be other networks than those of the version before
        self._version, self._weights = -1, TensorDict()

    def networks_changed(self) -> None:
        """Note that a generation has changed the target networks, between two of their copies."""
        self._is_changed = True

    def weights(self, state: TensorDict) -> tuple[int, TensorDict]:
        """The target networks, and the update after which they became what they are."""
        update = step_of(state)
        is_copied = update % self._config.targets.target_interval == 0 and update != self._version
        if self._is_changed or is_copied:
            self._weights = reanalyze_weights(self._whole_state(state)).clone()
            self._version, self._is_changed = update, False
        return self._version, self._weights

    def flat(self, segments: TensorDict) -> TensorDict:  # [P, B] -> [P * B]
        """The segments of all members; each has its own "total"."""
        flat = segments.reshape(-1)
        flat["member"] = torch.arange(len(segments)).repeat_interleave(segments.shape[1])
        return flat

    def finished(
        self, state: TensorDict, batch: TensorDict, fresh: TensorDict | None
    ) -> TensorDict:
        """The batch [P, B]."""
        batch = batch.reshape(self._config.population.size, -1)
        if BATCH_SIZE in state["hyper"].keys():
            batch["weight"] = weights_of_each(batch["weight"], state["hyper", BATCH_SIZE])
        return super().finished(state, batch, fresh)

    @property
    def _best(self) -> int:
        return self._members.best

    def _numbers(self, index: Tensor) -> Tensor:  # [P * B] -> [P, B]
        return index.view(self._config.population.size, -1)


class ShardMaking(BatchMaking):
    """Batch making for a replay in shards, whose frames workers hold: a `MakingOfShards`.

    Tasks have "frame_rows" instead of frames: int64 [B, L+S-1], of the segment's shard.
    """

    def __init__(self, config: EfficientZeroRun, replays: Replays, guard: NaNGuard) -> None:
        super().__init__(config, replays, guard)
        assert isinstance(replays.replay, ReplayShards)
        self.feeds = replays.replay.give_rows_of("observation")

    def _take_frames(self, own: TensorDict, frames: Tensor) -> None:
        own["frame_rows"] = frames.clone()

    def part(self, task: TensorDict, shards: range) -> TensorDict:
        """The segments of these shards."""
        each = len(task["segments"]) // len(self.feeds)
        part = task["segments"][shards.start * each : shards.stop * each]
        return task.copy().set("segments", part).set("shards", torch.tensor([*shards]))

    def join(self, answers: Sequence[TensorDict]) -> TensorDict:
        """The whole batch, and all that was searched again."""
        failed = [answer for answer in answers if "not_finite" in answer.keys()]
        if failed:
            return failed[0]
        fresh = [answer["fresh"] if "fresh" in answer.keys() else None for answer in answers]
        batch, found = joined([answer["batch"] for answer in answers], fresh)
        simulations = torch.stack([answer["num_simulations"] for answer in answers]).sum()
        answer = TensorDict(batch=batch, num_simulations=simulations)
        return answer if found is None else answer.set("fresh", found)

    def _whole(self, segments: TensorDict) -> TensorDict:
        if "frame_rows" not in segments.keys():
            return segments
        each, size = len(segments) // len(self.feeds), len(self.feeds)
        rows, totals = segments["frame_rows"].split(each), segments["total"].split(each)
        frames = [
            feed.read(own, (total // size).unsqueeze(1))
            for feed, own, total in zip(self.feeds, rows, totals, strict=True)
        ]
        return segments.exclude("frame_rows").set("observation", torch.cat(frames))


def _with_stacks(segments: TensorDict, frame_stack: int) -> TensorDict:
    """The segments as the replay gave them, stacks over the frames that travelled."""
    if frame_stack == 1:
        return segments
    return segments.copy().set("observation", stacked(segments["observation"], frame_stack))
