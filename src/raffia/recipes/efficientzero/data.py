"""The replay of a run, and recorded episodes as steps of it, before the first update.

A recorded step was not searched. Its policy is the action that was taken, until reanalyze searches
the step; its value is 0, which no target is made of, as `targets.bootstrap=search` is refused.

Source: Schrittwieser et al. (2021), "Online and Offline Reinforcement Learning by Planning with a
Learned Model".

Legend: T steps of one episode, A actions or N sampled ones of D numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from raffia.data.memmap_storage import MemmapStorage
from raffia.data.readers import MalformedDataError, read_episodes
from raffia.data.segment import SegmentReplayBuffer
from raffia.data.segment_shards import ReplayShards
from raffia.data.storage import TensorStorage
from raffia.envs.check_play import wanted
from raffia.envs.env import Box, EnvSpec
from raffia.functional.seeds import generator_for
from raffia.hints import plural
from raffia.recipes.efficientzero.config import EfficientZeroRun, RecordedDataConfig
from raffia.tensordict.keys import unravel_key
from raffia.tensordict.tensordict import TensorDict
from raffia.train.experiment import RunError
from raffia.train.member_replay import OwnReplays, SharedReplay

SEARCHED = ("policy", "value", "sampled_actions")  # what reanalyze writes again into the replay


# Of a continuous action's range: so far outside its bounds it may be, and is clipped.
OUTSIDE = 1e-3  # of a box's extent: how far outside of it a recorded action may lie


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
        """Close the replay, so that the next session of this process can open its files."""
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


@dataclass(frozen=True)
class RecordedEpisodes:
    """Statistics of the recorded episodes that were read.

    >>> RecordedEpisodes(("a.jsonl",), num_steps=30, returns=(10.0, 20.0)).describe()
    '2 episodes of 30 steps from a.jsonl, mean return 15 (10 to 20)'
    """

    files: tuple[str, ...]
    num_steps: int
    returns: tuple[float, ...]

    @property
    def mean_return(self) -> float:
        """The mean return over all episodes."""
        return sum(self.returns) / len(self.returns)

    def describe(self) -> str:
        """Describe the recorded episodes in one line."""
        named = self.files[0] if len(self.files) == 1 else plural(len(self.files), "file")
        return (
            f"{plural(len(self.returns), 'episode')} of {plural(self.num_steps, 'step')} from "
            f"{named}, mean return {self.mean_return:.4g} "
            f"({min(self.returns):.4g} to {max(self.returns):.4g})"
        )

    def row(self) -> dict[str, Any]:
        """The figures for a run's rows."""
        return {
            "files": [*self.files],
            "episodes": len(self.returns),
            "steps": self.num_steps,
            "mean_return": self.mean_return,
            "least_return": min(self.returns),
            "best_return": max(self.returns),
        }


def fill_replay(replays: Replays, config: EfficientZeroRun, spec: EnvSpec) -> RecordedEpisodes:
    """Add the recorded episodes to empty replays: each to the shard with the fewest rows; of a
    population's members with replays of their own to each.

    Raises RunError for episodes that don't fit the environment, for files without any, where they
    are more than `replay.capacity`, and where a run can't learn from them alone.
    """
    data, num_shards = config.data, config.replay.shards
    limit = -(-config.replay.capacity // num_shards)
    rows = [0] * len(replays.buffers)  # of each buffer, with a closing row for each episode
    generator = generator_for(config.seed, "recorded")
    returns: list[float] = []
    num_steps, is_rewarded = 0, False
    for path in data.files:
        before = len(returns)
        for number, episode in enumerate(_episodes(path, data)):
            steps = recorded_steps(
                episode, config, spec, generator, where=f"{path}, episode {number}"
            )
            least = rows.index(min(rows))
            for index in [least] if num_shards > 1 else range(len(rows)):
                rows[index] += len(steps) + 1
                if rows[index] <= limit:  # else all are counted, and none is added
                    replays.buffers[index].extend(steps)
            num_steps += len(steps)
            returns.append(float(episode["reward"].double().sum()))
            is_rewarded = is_rewarded or bool(episode["reward"].any())
        if len(returns) == before:
            raise RunError(f"{path} holds no episodes: leave it out of data.files")
    found = RecordedEpisodes(data.files, num_steps, tuple(returns))
    if max(rows) > limit:
        raise RunError(
            f"{found.describe()}, which do not fit into replay.capacity={config.replay.capacity} "
            f"with one more row for each end: set --replay.capacity {max(rows) * num_shards} or "
            "more"
        )
    if config.is_offline and len(replays.replay) < config.replay.batch_size:
        raise RunError(
            f"{found.describe()}: these are fewer steps than a batch has, and none are played: "
            f"set --replay.batch_size {max(1, num_steps // num_shards) * num_shards} or less, or "
            "give more files"
        )
    if config.is_offline and not is_rewarded:
        raise RunError(
            f"{found.describe()}: without a reward other than 0 there is nothing to learn from "
            "files alone. If the rewards have another name: --data.columns score=reward"
        )
    return found


def _episodes(path: str, data: RecordedDataConfig) -> Iterator[TensorDict]:
    """The episodes of one of the files; errors name the settings that correct them."""
    pairs = [pair.partition("=") for pair in data.columns]
    columns = {_key(name): _key(meaning) if meaning else None for name, _, meaning in pairs}
    try:
        yield from read_episodes(path, columns=columns, complete=data.complete)
    except MalformedDataError as error:
        if not any(hint in error.why for hint in ("columns={", "truncate_unf", "is missing")):
            raise
        fix = "For a run: --data.columns state=obs infos=, or --data.complete"
        raise MalformedDataError(error.path, error.where, f"{error.why}. {fix}") from error
    except (FileNotFoundError, IsADirectoryError, ImportError) as error:
        raise RunError(f"data.files: {error}") from error


def _key(name: str) -> Any:
    return unravel_key(tuple(name.split("/")))


def recorded_steps(
    episode: TensorDict,  # [T], as readers give it
    config: EfficientZeroRun,
    spec: EnvSpec,
    generator: torch.Generator,  # of the sampled actions besides the one that was taken
    *,
    where: str = "the episode",  # of what errors are about
) -> TensorDict:  # [T]
    """A recorded episode in the form in which a `Collector` and an actor return one.

    Numbers become those of the environment where they are the same; frames [H, W, C] become
    [C, H, W]. Rewards of Atari are clipped as the environment's are.

    >>> from raffia.envs.env import Discrete
    >>> spec = EnvSpec(observation_shape=(1,), action=Discrete(3))
    >>> no = torch.tensor([False, False])
    >>> episode = TensorDict(
    ...     obs=torch.tensor([4.0, 5.0]), action=torch.tensor([2, 0]), reward=torch.ones(2),
    ...     terminated=no, truncated=torch.tensor([False, True]),
    ...     next=dict(obs=torch.tensor([5.0, 6.0])), batch_size=[2])
    >>> steps = recorded_steps(episode, EfficientZeroRun(), spec, torch.Generator())
    >>> steps["observation"], steps["policy"]
    (tensor([[4.],
            [5.]]), tensor([[0., 0., 1.],
            [1., 0., 0.]]))
    """
    layouts = wanted(spec)
    states: list[dict[str, Tensor]] = []
    for found in (episode, episode["next"]):
        own = {}
        for key in spec.state_keys:
            name = "obs" if key == "observation" else key
            if name not in found.keys():
                raise RunError(
                    f"{where} has no {name!r}, which the states of the environment have: "
                    f"--data.columns NAME={name}, with as many rows as observations"
                )
            own[key] = _fitting(_only(found[name], where), *layouts[key], name, where)
        states.append(own)
    chosen = _chosen(_only(episode["action"], where), config, spec, generator, where)
    if spec.masked and not states[0]["action_mask"][chosen["policy"] > 0].all():
        raise RunError(f"{where} has actions that its 'action_mask' marks as illegal")
    reward = episode["reward"].float()
    if config.env.clips_reward:
        reward = reward.sign()
    return TensorDict(
        {
            **states[0],
            **chosen,
            "value": torch.zeros(len(reward)),
            "reward": reward,
            "terminated": episode["terminated"],
            "truncated": episode["truncated"],
            "next": TensorDict(states[1], [len(reward)]),
        },
        [len(reward)],
    )


def _chosen(
    taken: Tensor, config: EfficientZeroRun, spec: EnvSpec, generator: torch.Generator, where: str
) -> dict[str, Tensor]:
    """The actions that were taken, and the policy which took just them."""
    action = _fitting(taken, spec.action.dtype, spec.action.shape, "action", where)
    if not isinstance(spec.action, Box):
        low, high, num = int(action.min()), int(action.max()), spec.action.n
        if low < 0 or high >= num:
            raise RunError(
                f"{where}: its actions are from {low} to {high}, but {config.env.id} has {num}, "
                f"from 0 to {num - 1}"
            )
        return {"action": action, "policy": one_hot(action, num).float()}
    lowest, highest = torch.tensor(spec.action.low), torch.tensor(spec.action.high)
    extent = highest - lowest
    is_out = (action < lowest - OUTSIDE * extent) | (action > highest + OUTSIDE * extent)
    if is_out.any():
        raise RunError(
            f"{where}: its actions are from {action.amin(0).tolist()} to "
            f"{action.amax(0).tolist()}, but those of {config.env.id} are from {lowest.tolist()} "
            f"to {highest.tolist()}"
        )
    action = action.clamp(lowest, highest)
    shape = (len(action), config.search.num_sampled_actions, *spec.action.shape)
    sampled = lowest + extent * torch.rand(shape, generator=generator)
    sampled[:, 0] = action
    policy = torch.zeros(shape[:2])
    policy[:, 0] = 1.0
    return {"action": action, "sampled_actions": sampled, "policy": policy}


def _only(values: Any, where: str) -> Tensor:
    """The tensor that an entry is, or has as its one part."""
    if isinstance(values, Tensor):
        return values
    parts = list(values.items(True, True))
    if len(parts) > 1:
        names = ", ".join(repr(name) for name, _ in parts)
        raise RunError(
            f"{where} has parts {names}, but observations of the environment are one tensor: "
            "choose one, for example --data.columns observations/state=obs observations/goal="
        )
    found: Tensor = parts[0][1]
    return found


def _fitting(
    values: Tensor, dtype: torch.dtype, shape: tuple[int, ...], name: str, where: str
) -> Tensor:  # [T, *shape]
    """An entry converted to the environment's layout; raises RunError if that is impossible."""
    found = tuple(values.shape[1:])
    if len(shape) == 3 and found != shape and found == (*shape[1:], shape[0]):
        values = values.movedim(-1, 1)
    elif [size for size in found if size != 1] == [size for size in shape if size != 1]:
        values = values.reshape(len(values), *shape)  # [T, 1] for [T]
    if tuple(values.shape[1:]) != shape:
        raise RunError(
            f"{where}: {name!r} has rows of shape {list(found)}, but the environment has "
            f"{list(shape)}"
        )
    cast = values.to(dtype)
    is_same = dtype.is_floating_point or bool(cast.to(values.dtype).equal(values))
    if not torch.can_cast(values.dtype, dtype) or not is_same:
        raise RunError(
            f"{where}: {name!r} has dtype {values.dtype}, but the environment has {dtype}, which "
            "cannot represent these numbers"
        )
    return cast.contiguous()
