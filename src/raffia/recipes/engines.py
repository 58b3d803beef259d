"""Engines by their settings: where a run's workers are."""

from __future__ import annotations

import os

from raffia.distributed.engine import Engine, InlineEngine
from raffia.recipes.scale_config import EngineConfig

__all__ = ["describe_engine", "make_engine"]


def make_engine(config: EngineConfig) -> Engine:
    """The engine that a config names.

    Raises ModuleNotFoundError without the extra it needs, ConnectionError if its cluster does not
    answer.

    >>> type(make_engine(EngineConfig())).__name__
    'InlineEngine'
    """
    if config.name == "process":
        from raffia.distributed.process import ProcessEngine

        return ProcessEngine()
    if config.name == "ray":
        from raffia.distributed.ray import RayEngine

        return RayEngine(config.address)
    return InlineEngine()


def describe_engine(engine: Engine) -> str:
    """What there is for workers.

    >>> describe_engine(InlineEngine())
    'this process'
    """
    if isinstance(engine, InlineEngine):
        return "this process"
    resources = getattr(engine, "resources", None)
    if resources is None:
        return f"processes of this machine, which has {os.cpu_count()} processors"
    text: str = resources()
    return text
