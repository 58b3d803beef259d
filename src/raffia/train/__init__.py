"""The loop that trains any learner; streams, checkpoints, metrics and views around it.

An algorithm brings an `Experiment`, which a `TrainingSession` trains, evaluates and saves.
"""

from typing import TYPE_CHECKING

from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia.train.checkpoint import Checkpoint, CheckpointError, Checkpoints
    from raffia.train.collect import Collector
    from raffia.train.evaluate import Episodes, play_episodes
    from raffia.train.experiment import CheckpointPayload, Experiment, Plan, RunError
    from raffia.train.loop import Ended, train
    from raffia.train.metrics import PhaseClock
    from raffia.train.nan_guard import NaNGuard, NonFiniteError
    from raffia.train.outcome import Evaluated
    from raffia.train.replay_log import ReplayLog
    from raffia.train.session import RunResult, TrainingSession
    from raffia.train.stream import OfflineStream, OnlineStream

_NAMES = {
    "checkpoint": ["Checkpoint", "CheckpointError", "Checkpoints"],
    "collect": ["Collector"],
    "evaluate": ["Episodes", "play_episodes"],
    "experiment": ["CheckpointPayload", "Experiment", "Plan", "RunError"],
    "loop": ["Ended", "train"],
    "metrics": ["PhaseClock"],
    "nan_guard": ["NaNGuard", "NonFiniteError"],
    "outcome": ["Evaluated"],
    "replay_log": ["ReplayLog"],
    "session": ["RunResult", "TrainingSession"],
    "stream": ["OfflineStream", "OnlineStream"],
}
_HOMES = {name: f"{__name__}.{home}" for home, names in _NAMES.items() for name in names}
__getattr__, __dir__ = _lazy_names(__name__, _HOMES)

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointPayload",
    "Checkpoints",
    "Collector",
    "Ended",
    "Episodes",
    "Evaluated",
    "Experiment",
    "NaNGuard",
    "NonFiniteError",
    "OfflineStream",
    "OnlineStream",
    "PhaseClock",
    "Plan",
    "ReplayLog",
    "RunError",
    "RunResult",
    "TrainingSession",
    "play_episodes",
    "train",
]
