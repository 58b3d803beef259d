"""The loop that trains any learner; experiments, checkpoints, metrics and views around it.

An algorithm brings an `Experiment`, which a `TrainingSession` trains, evaluates and saves.
"""

from typing import TYPE_CHECKING

from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia.train.checkpoint import Checkpoint, CheckpointError, Checkpoints
    from raffia.train.collect import Collector
    from raffia.train.evaluate import Episodes, play_episodes
    from raffia.train.evaluations import Evaluated
    from raffia.train.experiment import Experiment, Plan, RunError
    from raffia.train.loop import Ended, train
    from raffia.train.metrics import PhaseClock
    from raffia.train.nan_guard import NaNGuard, NonFiniteError
    from raffia.train.replay_log import ReplayLog
    from raffia.train.rollouts import Schedule
    from raffia.train.run_state import RunState
    from raffia.train.session import RunResult, TrainingSession

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Checkpoints",
    "Collector",
    "Ended",
    "Episodes",
    "Evaluated",
    "Experiment",
    "NaNGuard",
    "NonFiniteError",
    "PhaseClock",
    "Plan",
    "ReplayLog",
    "RunError",
    "RunResult",
    "RunState",
    "Schedule",
    "TrainingSession",
    "play_episodes",
    "train",
]

__getattr__, __dir__ = _lazy_names(__name__)
