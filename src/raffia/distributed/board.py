"""Versions of weights: published once for all workers, kept while a task may name them."""

from __future__ import annotations

from typing import Any

from raffia.distributed.engine import Engine
from raffia.tensordict.tensordict import TensorDict


class Board:
    """Weights by the number of the update that they are the result of.

    A task names its version; nobody reads "the newest".

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
        self._weights: dict[int, TensorDict] = {}
        self._refs: dict[int, Any] = {}

    @property
    def versions(self) -> list[int]:
        """Those that there are, rising."""
        return sorted(self._weights)

    def publish(self, version: int, weights: TensorDict) -> None:
        """Keep a copy of weights under this number; one that is there stays as it is."""
        if version not in self._weights:
            self._weights[version] = weights.detach().to("cpu").clone()

    def ref(self, version: int) -> Any:
        """The weights of a version as the engine's workers take them."""
        if version not in self._weights:
            raise KeyError(f"no version {version} of the weights is kept, only {self.versions}")
        if version not in self._refs:
            self._refs[version] = self._engine.put(self._weights[version])
        return self._refs[version]

    def drop_below(self, version: int) -> None:
        """Free what is older than this."""
        for number in [number for number in self._weights if number < version]:
            del self._weights[number]
            if number in self._refs:
                self._engine.drop(self._refs.pop(number))

    def clear(self) -> None:
        """Free all versions."""
        for ref in self._refs.values():
            self._engine.drop(ref)
        self._weights, self._refs = {}, {}

    def state(self) -> TensorDict:
        """All versions, for a checkpoint."""
        return TensorDict({str(number): tree for number, tree in self._weights.items()})

    def load_state(self, state: TensorDict) -> None:
        """Keep these versions and no others."""
        self.clear()
        for name in state.keys():
            self.publish(int(name), state[name])
