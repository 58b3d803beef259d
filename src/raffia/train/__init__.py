"""The loop that trains any learner; streams, checkpoints, metrics and views around it.

Names are imported when first asked for, so that `config.py` comes without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raffia.train.checkpoint import Checkpoint, CheckpointError, Checkpoints
    from raffia.train.collect import Collector
    from raffia.train.damage import Guard, NonFiniteError
    from raffia.train.evaluate import Episodes, play_episodes
    from raffia.train.loop import Ended, train
    from raffia.train.metrics import PhaseClock
    from raffia.train.stream import OfflineStream, OnlineStream

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Checkpoints",
    "Collector",
    "Ended",
    "Episodes",
    "Guard",
    "NonFiniteError",
    "OfflineStream",
    "OnlineStream",
    "PhaseClock",
    "play_episodes",
    "train",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    match name:
        case "Checkpoint" | "CheckpointError" | "Checkpoints":
            return getattr(import_module("raffia.train.checkpoint"), name)
        case "Collector":
            return import_module("raffia.train.collect").Collector
        case "Guard" | "NonFiniteError":
            return getattr(import_module("raffia.train.damage"), name)
        case "Episodes" | "play_episodes":
            return getattr(import_module("raffia.train.evaluate"), name)
        case "Ended" | "train":
            return getattr(import_module("raffia.train.loop"), name)
        case "PhaseClock":
            return import_module("raffia.train.metrics").PhaseClock
        case "OfflineStream" | "OnlineStream":
            return getattr(import_module("raffia.train.stream"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
