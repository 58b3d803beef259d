"""Engines by their settings: where a run's workers are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from raffia.distributed.engine import Engine, InlineEngine, Machine, Workers
from raffia.recipes.scale_config import EngineConfig
from raffia.tensordict.tensordict import TensorDict

ECHO = "raffia.distributed.check_engine:Echo"
NUM_CALLS = 50
NUM_BYTES = 16 * 2**20


def make_engine(config: EngineConfig, message: Callable[[str], None] | None = None) -> Engine:
    """The engine that a config names.

    message: is given lines for the user, such as that a worker waits for room.
    Raises ModuleNotFoundError without the extra it needs, ConnectionError if its cluster does not
    answer.

    >>> type(make_engine(EngineConfig())).__name__
    'InlineEngine'
    """
    if config.name == "process":
        from raffia.distributed.process import ProcessEngine

        return ProcessEngine(config.spares)
    if config.name == "ray":
        from raffia.distributed.ray import RayEngine

        return RayEngine(config.address, spares=config.spares, message=message)
    return InlineEngine()


def engine_for(
    config: EngineConfig,
    workers: Sequence[Workers],
    message: Callable[[str], None] | None = None,
    *,
    remark: str,
) -> Engine:
    """The engine that a config names, once it is certain that these workers can run there.

    remark: is added to the ValueError where there is no room for them.
    """
    engine = make_engine(config, message)
    try:
        engine.require(workers)
    except BaseException as error:
        engine.close()
        if isinstance(error, ValueError):
            error.add_note(remark)
        raise
    return engine


def where(engine: EngineConfig, num: int = 1) -> str:
    """Describe in words where an engine's workers run.

    num: how many they are; without any, the loop does their tasks.

    >>> where(EngineConfig(name="process")), where(EngineConfig(name="process"), num=0)
    ('in processes of this machine', 'in this process')
    """
    if not num:
        return "in this process"
    return {
        "inline": "in this process",
        "process": "in processes of this machine",
        "ray": f"on the Ray cluster {engine.address or 'of this machine'}",
    }[engine.name]


@dataclass(frozen=True)
class Speed:
    """How fast a worker started and answered."""

    seconds_to_first: float  # from nothing to the first answer
    seconds_of_call: float  # of a small task and its answer
    mib_per_second: float  # of a large one, there and back


@dataclass(frozen=True)
class TriedEngine:
    """A report on an engine: the resources for workers, and how fast one of them was.

    >>> TriedEngine("this process", (), None).description
    'this process'
    """

    description: str
    machines: Sequence[Machine]  # of a cluster
    speed: Speed | None  # None: a machine can't run workers of this program, so none was started


def try_engine(name: str, address: str = "") -> TriedEngine:
    """Check the machines of an engine; start a worker that answers with its task, and call it.

    >>> try_engine("inline").description
    'this process'
    """
    began = time.perf_counter()
    engine = make_engine(EngineConfig(name=name, address=address))  # type: ignore[arg-type]
    try:
        machines = engine.machines(ECHO)
        if any(machine.error is not None for machine in machines):
            return TriedEngine(engine.resources(), machines, None)
        worker = engine.start(ECHO, "{}", 0)

        def seconds(task: TensorDict, num: int) -> float:
            start = time.perf_counter()
            for _ in range(num):
                worker.ask(task)
                worker.take(60.0)
            return (time.perf_counter() - start) / num

        small = TensorDict(x=torch.zeros(8))
        large = TensorDict(x=torch.zeros(NUM_BYTES, dtype=torch.uint8))
        seconds(small, 1)
        first = time.perf_counter() - began
        call, copy = seconds(small, NUM_CALLS), seconds(large, 3)
        rate = 2 * NUM_BYTES / copy / 2**20
        return TriedEngine(engine.resources(), machines, Speed(first, call, rate))
    finally:
        engine.close()
