"""Parts of a run that its config alone says how to make."""

from __future__ import annotations

import torch

from raffia.envs.env import EnvSpec
from raffia.learner import Learner
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.train.experiment import Plan, RunError

PICTURE = 48  # pixels: games of fewer are boards, and quick


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


def wants_a_gpu(config: EfficientZeroRun, spec: EnvSpec) -> str:
    """What is to be said of a run that would take days on a CPU; nothing of others.

    >>> from raffia.envs.env import Discrete
    >>> wants_a_gpu(EfficientZeroRun(), EnvSpec(observation_shape=(4,), action=Discrete(2)))
    ''
    """
    shape = spec.observation_shape
    pictures = len(shape) == 3 and min(shape[1:]) >= PICTURE and not config.model.flatten
    if config.device != "cpu" or not pictures:
        return ""
    height, width = shape[1:]
    return (
        f"pictures of {height}x{width} on a CPU: an update can take a minute, and this run has "
        f"{config.num_updates:,} of them. With a GPU: --device cuda"
    )


def compiled(learner: Learner) -> Learner:
    """The learner with its gradients compiled by torch.compile."""
    return _Compiled(learner)


class _Compiled:
    def __init__(self, learner: Learner) -> None:
        self.init, self.apply = learner.init, learner.apply
        self.grads = torch.compile(learner.grads)
