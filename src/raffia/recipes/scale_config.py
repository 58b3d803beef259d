"""Settings of workers and engines. Imports no torch, so that `--help` is fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raffia.envs.checked import (
    Checked,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

# Settings that have tasks requested ahead where they are above these numbers.
AHEAD = {"num": 0, "ahead": 0, "join_after": 0, "weights_every": 1}


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Checked):
    """The engine that runs the workers; it does not change a bit of a run.

    >>> EngineConfig(name="process").max_restarts
    3
    """

    # Workers in this process, in processes of this machine, or on a Ray cluster.
    name: Literal["inline", "process", "ray"] = "inline"
    # Address of a Ray cluster, such as auto; empty: start one on this machine for this run.
    address: str = ""
    # Restarts of a worker without a finished task in between; more are an error.
    max_restarts: NonNegativeInt = 3
    # Idle processes that are ready to replace a worker that dies; on Ray this many of each kind.
    spares: NonNegativeInt = 0
    # Seconds without an answer after which a worker counts as dead. A process that ends is noticed
    # immediately; a first rollout may compile kernels for half a minute.
    patience_seconds: PositiveFloat = 300.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.address and self.name != "ray":
            raise ValueError(
                f"engine.address={self.address} is the address of a Ray cluster, but engine.name "
                f"is {self.name}: set engine.name=ray, or leave the address out"
            )


@dataclass(frozen=True, kw_only=True)
class WorkersConfig(Checked):
    """Workers of one kind, in a run's settings of that name.

    >>> ActorsConfig(device="cuda")
    Traceback (most recent call last):
    ...
    ValueError: actors.device=cuda has no effect without actors: set actors.num=1, or leave
    actors.device out
    """

    num: NonNegativeInt = 0  # workers; 0: the loop does their tasks
    device: str = "cpu"  # device of their networks; "": the run's
    cpus: PositiveFloat = 1.0  # processors of each worker on Ray
    # GPUs of each worker on Ray; a fraction lets several compute on one card.
    gpus: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device not in ("", "cpu") and not self.play_elsewhere:
            kind = type(self).__name__.removesuffix("Config").lower()
            raise ValueError(
                f"{kind}.device={self.device} has no effect without {kind}: set {kind}.num=1, or "
                f"leave {kind}.device out"
            )

    @property
    def play_elsewhere(self) -> bool:
        """Whether tasks are requested ahead; otherwise the loop does them when they are due."""
        return any(getattr(self, name, least) > least for name, least in AHEAD.items())


@dataclass(frozen=True, kw_only=True)
class ActorsConfig(WorkersConfig):
    """Workers that play the environments.

    >>> ActorsConfig(num=2, ahead=8).weights_every
    1
    """

    num: NonNegativeInt = 0  # workers, among which the environments are divided; 0: the loop plays
    # Updates between requesting a rollout and learning from it; changes the run.
    ahead: NonNegativeInt = 0
    # Updates between versions of the actors' weights; changes the run.
    weights_every: PositiveInt = 1


@dataclass(frozen=True, kw_only=True)
class ReanalyzersConfig(WorkersConfig):
    """Workers that make batches: they search stored steps again and compute targets.

    >>> ReanalyzersConfig(num=2, ahead=8).play_elsewhere
    True
    """

    num: NonNegativeInt = 0  # workers; 0: the loop makes the batches
    device: str = ""  # device of their searches; "": the run's
    # Updates between drawing a batch and learning from it; changes the run.
    ahead: NonNegativeInt = 0


@dataclass(frozen=True, kw_only=True)
class EvaluatorsConfig(WorkersConfig):
    """Workers that play the evaluations.

    >>> EvaluatorsConfig(num=1, join_after=500).play_elsewhere
    True
    """

    num: NonNegativeInt = 0  # workers; 0: the loop plays the evaluations
    # Updates after which the loop waits for the result of an open evaluation.
    join_after: NonNegativeInt = 0


def check_workers(run: Any, kinds: Sequence[str]) -> None:
    """Raise ValueError for workers that are impossible or cannot be combined.

    kinds: those that its algorithm has besides workers of a population.

    >>> from types import SimpleNamespace as Run
    >>> check_workers(Run(engine=EngineConfig(name="process"), evaluators=EvaluatorsConfig(),
    ...     population=Run(workers=0, size=1), learners=LearnersConfig(), device="cpu"),
    ...     ["evaluators"])
    Traceback (most recent call last):
    ...
    ValueError: engine.name=process has no effect without workers: set evaluators.num, such as
    evaluators.num=2, or learners.num or population.workers, or leave engine.name out
    """
    engine, workers = run.engine, {kind: getattr(run, kind) for kind in kinds}
    used = {k: (one.device or run.device, one) for k, one in workers.items() if one.play_elsewhere}
    if run.learners.num > 1:
        used["learners"] = run.device, run.learners
    for kind, (where, one) in used.items():
        if engine.address and where.startswith("cuda") and not one.gpus:
            raise ValueError(
                f"{kind} on device {where} of a Ray cluster need {kind}.gpus, because Ray gives "
                f"no GPU with {kind}.gpus=0: set {kind}.gpus, such as {kind}.gpus=1"
            )
    if engine.spares and engine.name == "inline" and run.learners.num == 1:
        raise ValueError(
            f"engine.spares={engine.spares} are idle processes, but all workers are in this "
            "process: set engine.name=process or ray, or learners.num, or leave engine.spares out"
        )
    nums = [run.population.workers, *(one.num for one in workers.values()), run.learners.num - 1]
    if engine.name != "inline" and not any(nums):
        others = ", ".join([f"{kind}.num" for kind in [*kinds[1:], "learners"]])
        raise ValueError(
            f"engine.name={engine.name} has no effect without workers: set {kinds[0]}.num, "
            f"such as {kinds[0]}.num=2, or {others} or population.workers, "
            "or leave engine.name out"
        )
    if run.evaluators.play_elsewhere and run.population.size > 1:
        raise ValueError(
            f"evaluators.* cannot be combined with population.size={run.population.size}: a "
            "population evolves by its evaluations, so the main process plays them. Leave "
            "evaluators.* out"
        )


@dataclass(frozen=True, kw_only=True)
class LearnersConfig(Checked):
    """Processes that share each batch, on Ray wherever there is room, else on this machine.

    >>> LearnersConfig(num=2).sums
    'ring'
    """

    num: PositiveInt = 1  # processes, with the leading one; other numbers differ in the last bits
    # How gradients are summed: each process sums a part of the numbers, or each sums all of them in
    # order, which gives the bits of num_micro_batches for any number of processes.
    sums: Literal["ring", "ordered"] = "ring"
    # What each process holds: the whole state, or its rows of weights, target and optimizer, for
    # models that are too large for one process; gradients are then summed in order.
    state: Literal["whole", "sharded"] = "whole"
    # GPUs of each on Ray but for the leading one, which takes device's.
    gpus: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.state == "sharded" and self.num == 1:
            raise ValueError(
                "learners.state=sharded divides the state among processes, but there is only one: "
                "set learners.num=2, or leave learners.state out"
            )
