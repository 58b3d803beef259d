"""`RunState`: everything that a resumed run needs, as one tree that a checkpoint holds.

    {"state": the learner's tensors,
     "replay": rows, of which each is written once,
     "stream": {"collector": environments as seeds and actions, "ahead": open batches},
     "evaluate", "log", "records": counters, sums, lengths of files}

Between two updates the learner's tensors are the one value that the loop moves. All other parts
are mutated, and their state is asked for when a checkpoint is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from raffia.data.segment import SegmentReplayBuffer
from raffia.tensordict.tensordict import TensorDict
from raffia.train.checkpoint import Checkpoint, CheckpointError, Part
from raffia.train.replay_log import ReplayLog

LEARNER = "state"  # the learner's file in a checkpoint


class Stateful(Protocol):
    """A part of a run that is mutated.

    After `load_state(state)` it is what it was when `state()` gave that, or a resumed run is
    another one. A `TensorDict` becomes a file of the checkpoint; anything else is what JSON holds.
    """

    def state(self) -> object:
        """The present state; an empty TensorDict if there is nothing to save."""

    def load_state(self, state: Any) -> None:
        """Restore what `state` returned; an empty TensorDict means that nothing was saved."""


Tree = Mapping[str, "Stateful | Tree"]


class Recorded:
    """A value that each checkpoint records and nothing has to restore.

    >>> Recorded({"rows": 7}).state()
    {'rows': 7}
    """

    def __init__(self, value: object) -> None:
        self.value = value

    def state(self) -> object:
        """The value."""
        return self.value

    def load_state(self, state: Any) -> None:
        """Restore nothing: the value is constant."""


class RunState:
    """The tree of a run.

    folder: of the run; rows of a replay "replay.0" lie in "replay/0" of it.
    parts: by name, `Stateful` ones or trees of them; a tree becomes one file of tensors.
    replays: replay buffers by name. They are restored before the parts.

    >>> from raffia.train.metrics import RunningMeans
    >>> means = RunningMeans()
    >>> means.add({"loss": 0.5})
    >>> files, extras = RunState(Path("nowhere"), {"means": means}).save(TensorDict())
    >>> list(files), extras
    (['state'], {'means': {'loss': [0.5, 1]}})
    """

    def __init__(
        self, folder: Path, parts: Tree, replays: Mapping[str, SegmentReplayBuffer] | None = None
    ) -> None:
        self.parts = parts
        self.replays = [
            (ReplayLog(folder / name.replace(".", "/"), name=name), buffer)
            for name, buffer in (replays or {}).items()
        ]

    def save(self, learner: TensorDict) -> tuple[dict[str, Part], dict[str, Any]]:
        """The files and the extras of a checkpoint; new rows of the replays are written."""
        files: dict[str, Part] = {LEARNER: learner}
        extras: dict[str, Any] = {}
        for log, buffer in self.replays:
            logged = log.files(buffer)
            files |= logged.parts
            extras[log.name] = logged.extras
        for name, part in self.parts.items():
            saved = _saved(part)
            if not isinstance(saved, TensorDict):
                extras[name] = saved
            elif not saved.is_empty():
                files[name] = saved
        return files, extras

    def restore(self, found: Checkpoint) -> None:
        """Restore all but the learner's tensors, which the checkpoint has under "state".

        Raises CheckpointError, and changes nothing, if it holds what this run has no part for.
        """
        known = {LEARNER, *self.parts, *[log.name for log, _ in self.replays]}
        saved = {*found.extras, *[name.removesuffix(".safetensors") for name in found.folder.files]}
        if unknown := saved - known:
            raise CheckpointError(
                found.root,
                f"holds {', '.join(sorted(unknown))}, which this run does not have: it was saved "
                "by another version of its algorithm",
            )
        for log, buffer in self.replays:
            log.restore(found, buffer)
        for name, part in self.parts.items():
            if name in found.extras:
                _load(part, found.extras[name])
            else:
                _load(part, found.tensors(name) if found.has(name) else TensorDict())

    def check(self, found: Checkpoint) -> None:
        """Raise DamagedFileError for a checkpoint whose files outside its folder are not whole."""
        for log, _ in self.replays:
            log.check(found)

    def prune(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Remove whatever none of these checkpoints, which are all that exist, needs."""
        for log, _ in self.replays:
            log.prune(checkpoints)


def _saved(part: Stateful | Tree) -> Any:
    if not isinstance(part, Mapping):
        return part.state()
    saved = {name: _saved(inner) for name, inner in part.items()}
    return TensorDict({name: state for name, state in saved.items() if not state.is_empty()})


def _load(part: Stateful | Tree, state: Any) -> None:
    if not isinstance(part, Mapping):
        part.load_state(state)
        return
    for name, inner in part.items():
        _load(inner, state[name] if name in state.keys() else TensorDict())
