"""The loop that trains any learner; experiments, checkpoints, metrics and views around it.

An algorithm brings an `Experiment`, which a `TrainingSession` trains, evaluates and saves.
"""

from typing import TYPE_CHECKING

from raffia.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from raffia.train.checkpoint import Checkpoint as Checkpoint
    from raffia.train.checkpoint import CheckpointError as CheckpointError
    from raffia.train.checkpoint import Checkpoints as Checkpoints
    from raffia.train.collect import Collector as Collector
    from raffia.train.config import read_config as read_config
    from raffia.train.evaluate import Episodes as Episodes
    from raffia.train.evaluate import play_episodes as play_episodes
    from raffia.train.evaluations import Evaluated as Evaluated
    from raffia.train.experiment import Experiment as Experiment
    from raffia.train.experiment import Plan as Plan
    from raffia.train.experiment import RunError as RunError
    from raffia.train.loop import Ended as Ended
    from raffia.train.loop import train as train
    from raffia.train.metrics import PhaseClock as PhaseClock
    from raffia.train.nan_guard import NaNGuard as NaNGuard
    from raffia.train.nan_guard import NonFiniteError as NonFiniteError
    from raffia.train.replay_log import ReplayLog as ReplayLog
    from raffia.train.rollouts import Schedule as Schedule
    from raffia.train.run_state import RunState as RunState
    from raffia.train.session import RunResult as RunResult
    from raffia.train.session import TrainingSession as TrainingSession
    from raffia.train.view import PlainView as PlainView

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = _lazy_names(__name__)
