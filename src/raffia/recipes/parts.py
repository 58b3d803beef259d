"""Parts of a run that its config alone says how to make."""

from __future__ import annotations

from pathlib import Path

import torch

from raffia.data.memmap_storage import MemmapStorage
from raffia.data.segment import SegmentReplayBuffer
from raffia.data.storage import TensorStorage
from raffia.envs.env import EnvSpec
from raffia.functional.seeds import generator_for
from raffia.learner import Learner
from raffia.recipes.config import EfficientZeroRun
from raffia.recipes.run_folder import RunError
from raffia.train.sitting import Plan


def plan_of(config: EfficientZeroRun) -> Plan:
    """How long a run is, and what is done how often.

    >>> plan_of(EfficientZeroRun(seed=3)).title
    'EfficientZero on CartPole-v1, seed 3'
    """
    return Plan(
        title=f"{config.title}, seed {config.seed}",
        num_updates=config.num_updates,
        num_env_steps=config.collect.num_env_steps,
        evaluate_every=config.evaluate.every_env_steps,
        num_simulations=config.evaluate.num_simulations or config.search.num_simulations,
        target_return=config.evaluate.target_return,
        save_every=config.checkpoint.every_updates,
        keep=config.checkpoint.keep,
        device=config.device,
        num_threads=config.num_threads,
    )


def make_replay(config: EfficientZeroRun, spec: EnvSpec, folder: Path) -> SegmentReplayBuffer:
    """Where a run keeps its steps; on disk in the folder, where that is asked for.

    >>> from pathlib import Path
    >>> from raffia.envs.env import Discrete
    >>> spec = EnvSpec(observation_shape=(4,), action=Discrete(2))
    >>> make_replay(EfficientZeroRun(), spec, Path("nowhere")).length
    11
    """
    replay, stack = config.replay, config.env.frame_stack
    # Of the capacity alone, so that a run can be made longer. Each of the worlds can end at once,
    # and needs a closing row besides its step then.
    rows = replay.capacity + 2 * config.env.num_envs
    on_disk = replay.on_disk
    return SegmentReplayBuffer(
        MemmapStorage(rows, folder / "replay" / "rows") if on_disk else TensorStorage(rows),
        unroll_steps=config.loss.unroll_steps,
        n_step=config.targets.n_step,
        obs_keys=spec.state_keys,
        frame_stack={"observation": stack} if stack > 1 else 1,
        absorb=config.loss.absorb,
        alpha=replay.alpha or None,
        beta=replay.beta if replay.alpha else None,
        generator=generator_for(config.seed, "replay"),
    )


def device_trouble(name: str) -> str:
    """Why torch cannot compute on this device; nothing where it can.

    >>> device_trouble("cpu"), device_trouble("gpu")
    ('', 'it knows no such device')
    """
    try:
        kind = torch.device(name).type
    except RuntimeError:
        return "it knows no such device"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return f"there is no {kind} for it here ({str(error).splitlines()[0]})"
    return ""


def require_device(name: str) -> None:
    """RunError unless torch can use this device here.

    >>> require_device("cpu")
    """
    if why := device_trouble(name):
        raise RunError(
            f"device={name!r} can't be used: {why}. Take cpu, or cuda where torch sees a GPU"
        )


def close_replay(replay: SegmentReplayBuffer) -> None:
    """On disk, the next sitting of this process would be refused its files else.

    >>> from raffia.envs.env import Discrete
    >>> spec = EnvSpec(observation_shape=(4,), action=Discrete(2))
    >>> close_replay(make_replay(EfficientZeroRun(), spec, Path("nowhere")))
    """
    if isinstance(replay.storage, MemmapStorage):
        replay.storage.close()


def compiled(learner: Learner) -> Learner:
    """The learner with its gradients compiled by torch.compile."""
    return _Compiled(learner)


class _Compiled:
    def __init__(self, learner: Learner) -> None:
        self.init, self.apply = learner.init, learner.apply
        self.grads = torch.compile(learner.grads)
