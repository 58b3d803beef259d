"""The checks of `raffia doctor --engine.name`: a worker is started there, and called."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from raffia.cli.doctor import Check

if TYPE_CHECKING:
    from raffia.distributed.engine import Worker

__all__ = ["engine_checks"]

NUM_CALLS = 50
NUM_BYTES = 16 * 2**20


def engine_checks(name: str, address: str = "") -> list[Check]:
    """What an engine has room for, how soon a worker is there, and how long a call takes.

    >>> [check.verdict for check in engine_checks("inline")]
    ['ok', 'ok', 'ok', 'ok']
    """
    from raffia.recipes.engines import describe_engine, make_engine
    from raffia.recipes.scale_config import EngineConfig

    try:
        began = time.perf_counter()
        engine = make_engine(EngineConfig(name=name, address=address))  # type: ignore[arg-type]
    except (ImportError, OSError, ValueError) as error:
        return [Check("engine", "fails", f"{name}: {error}")]
    try:
        checks = [Check("engine", "ok", f"{name}: {describe_engine(engine)}")]
        worker = engine.start("raffia.distributed.check_engine:Echo", "{}", 0)
        checks += _calls(worker, began)
    except RuntimeError as error:
        checks = [Check("engine", "fails", f"{name}: {error}")]
    finally:
        engine.close()
    return checks


def _calls(worker: Worker, began: float) -> list[Check]:
    import torch

    from raffia.tensordict.tensordict import TensorDict

    small = TensorDict(x=torch.zeros(8))
    large = TensorDict(x=torch.zeros(NUM_BYTES, dtype=torch.uint8))

    def seconds(task: TensorDict, num: int) -> float:
        start = time.perf_counter()
        for _ in range(num):
            worker.ask(task)
            worker.take(60.0)
        return (time.perf_counter() - start) / num

    seconds(small, 1)
    first = time.perf_counter() - began
    call, copy = seconds(small, NUM_CALLS), seconds(large, 3)
    rate = 2 * NUM_BYTES / copy / 2**20
    return [
        Check("first worker", "ok", f"after {first:.1f} s"),
        Check("a call", "ok", f"{1e3 * call:.2f} ms there and back"),
        Check("arrays", "ok", f"{rate:,.0f} MiB/s there and back"),
    ]
