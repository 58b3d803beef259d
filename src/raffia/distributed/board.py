"""Versions of weights: published once for all workers, held while a task may name them."""

from __future__ import annotations

from raffia.distributed.engine import Engine
from raffia.tensordict.tensordict import TensorDict


class Board:
    """Weights by the number of the update that they are the result of.

    A task names its version; nobody reads "the newest". The engine holds them: `publish` copies
    them there, once.

    >>> import torch
    >>> from raffia.distributed.engine import InlineEngine
    >>> board = Board(InlineEngine())
    >>> board.publish(4, TensorDict(w=torch.tensor(1.5)))
    >>> board.publish(6, TensorDict(w=torch.tensor(2.5)))
    >>> board.ref(4)["w"], board.versions
    (tensor(1.5000), [4, 6])
    >>> board.drop_below(6)
    >>> board.versions
    [6]
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._refs: dict[int, object] = {}

    @property
    def versions(self) -> list[int]:
        """The version numbers that are held, in ascending order."""
        return sorted(self._refs)

    def publish(self, version: int, weights: TensorDict) -> None:
        """Keep a copy of weights under this number; an existing copy is not replaced."""
        if version not in self._refs:
            self._refs[version] = self._engine.put(weights)

    def ref(self, version: int) -> object:
        """The weights of a version as the engine's workers take them."""
        if version not in self._refs:
            raise KeyError(
                f"version {version} of the weights is not available, only {self.versions}"
            )
        return self._refs[version]

    def drop_below(self, version: int) -> None:
        """Free what is older than this."""
        for number in [number for number in self._refs if number < version]:
            self._engine.drop(self._refs.pop(number))

    def clear(self) -> None:
        """Free all versions."""
        while self._refs:
            self._engine.drop(self._refs.popitem()[1])

    def state(self) -> TensorDict:
        """All versions as one tree, for a checkpoint."""
        return TensorDict(
            {str(number): self._engine.get(ref) for number, ref in self._refs.items()}
        )

    def load_state(self, state: TensorDict) -> None:
        """Keep these versions and no others."""
        self.clear()
        for name in state.keys():
            self.publish(int(name), state[name])
