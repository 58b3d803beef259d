"""The state of a segment buffer besides the rows of its storage, as tensors and as a file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from raffia.data.buffer import check_same_generator
from raffia.data.ring import EpisodeRing
from raffia.data.segment_batches import SegmentMaker
from raffia.data.step_priorities import StepPriorities
from raffia.files.folder import Content, Folder
from raffia.tensordict.safetensors_file import save_file
from raffia.tensordict.tensordict import TensorDict

FILE = "buffer.safetensors"


class BufferState:
    """The state of a segment buffer: episodes, priorities, and the generator, if there is one.

    >>> from raffia.data.segment import SegmentReplayBuffer
    >>> from raffia.data.storage import TensorStorage
    >>> buffer = SegmentReplayBuffer(TensorStorage(100), unroll_steps=1)
    >>> sorted(buffer.state_dict()["buffer"])
    ['episodes', 'priorities']
    """

    def __init__(
        self, episodes: EpisodeRing, priorities: StepPriorities, maker: SegmentMaker
    ) -> None:
        self.episodes, self.priorities, self.maker = episodes, priorities, maker

    def state(self) -> dict[str, Any]:
        """A copy of the state, as nested dicts of tensors."""
        state: dict[str, Any] = {
            "episodes": self.episodes.state(),
            "priorities": self.priorities.state(),
        }
        if self.maker.generator is not None:
            state["generator"] = {"state": self.maker.generator.get_state()}
        return state

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless `load(state)` is possible."""
        check_entries(state, ("episodes", "priorities"), "the buffer state")
        check_entries(state["episodes"], self.episodes.ENTRIES, "the episodes")
        check_entries(state["priorities"], self.priorities.ENTRIES, "the priorities")
        self.episodes.check_state(state["episodes"])
        self.priorities.check_state(state["priorities"])
        check_same_generator(state, self.maker.generator)

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state of `state()`."""
        self.episodes.load_state(state["episodes"])
        self.priorities.load_state(state["priorities"])
        if self.maker.generator is not None:
            self.maker.generator.set_state(state["generator"]["state"])

    def files(self) -> dict[str, Content]:
        """The state as it is now, as a file for `write_folder`."""
        state = TensorDict(self.state())
        return {FILE: lambda path: save_file(state, path)}

    def read(self, folder: Folder) -> dict[str, Any]:
        """The state in a folder."""
        return TensorDict.load(folder.path(FILE)).to_dict()


def check_entries(state: Mapping[str, Any], names: Collection[str], what: str) -> None:
    """Raise ValueError for a state that lacks any of these.

    >>> check_entries({"storage": 1}, ("buffer", "storage"), "a segment buffer")
    Traceback (most recent call last):
    ...
    ValueError: the state of a segment buffer lacks ['buffer'], it has ['storage']: pass what ...
    """
    missing = [name for name in names if name not in state]
    if missing:
        raise ValueError(
            f"the state of {what} lacks {missing}, it has {sorted(state)}: pass what "
            "buffer.state_dict() gave. Nothing was changed"
        )
