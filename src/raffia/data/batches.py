"""The making of a replay buffer's batches: choose items, copy them, collate, pin and move."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from raffia.data.prefetch import BatchSource
from raffia.data.samplers import Draw, Sampler
from raffia.data.torchrl_storages import ListStorage
from raffia.tensordict.lazy import LazyStackedTensorDict
from raffia.tensordict.node import Node
from raffia.tensordict.tensordict import TensorDict

RETRIES = 100  # where items are overwritten by another process while they are read


class Batch(NamedTuple):
    """A batch made of one draw."""

    data: Any
    info: dict[Any, Tensor]  # "index", and the sampler's entries about each item
    ends_epoch: bool


@dataclass(eq=False)
class BatchMaker(BatchSource[tuple[Draw, Any], Batch]):
    """Makes batches of a storage's items, in two steps.

    `draw` and `draw_into` are called under the lock of the buffer, `finish` is not.
    """

    sampler: Sampler
    collate_fn: Callable[[Any], Any] | None

    @property
    def plain(self) -> bool:
        """Whether a batch is what was read, so that `draw_into` can make it."""
        return self.collate_fn is None and self.device is None and not self.pin_memory

    def follow(self) -> range:
        """The live items, passed on to the sampler; ValueError if it knows of more."""
        live = self.storage.live
        self.sampler.follow(live)
        return live

    def rows(self, items: Tensor) -> Tensor:
        """The items' rows in the storage."""
        size = self.storage.max_size
        return items if size is None or self.storage.total <= size else items % size

    def draw_into(self, batch_size: int, out: Any) -> Batch:
        """Choose items and copy them right into a batch; for those that need no `finish`."""
        draw, _ = self.draw(batch_size, out)
        info = {"index": draw.items, **draw.info}
        if isinstance(out, TensorDict):
            for name, value in info.items():
                out.set(name, _of_batch(value, out.batch_size), inplace=name in out.keys(True))
        return Batch(out, info, draw.ends_epoch)

    def draw(self, batch_size: int, out: Any = None) -> tuple[Draw, Any]:
        """Choose items and copy them as of the same moment, even while another process writes."""
        for _ in range(RETRIES):
            draw = self._choose(batch_size)
            into = out
            if isinstance(out, TensorDict):
                paths = self.storage.structure.paths if self.storage.structure else ()
                into = out.exclude("index", *[name for name in draw.info if name not in paths])
            rows = self.rows(draw.items)
            if self.collate_fn is not None and isinstance(self.storage, ListStorage):
                data: Any = self.storage.get(rows)
            else:
                data = self.storage.read(rows, out=into)
            if self.storage.holds_items(draw.items):
                return draw, data
        raise _overtaken()

    def item(self, ages: Callable[[range], Tensor]) -> Any:
        """Copies of the items of these numbers, which `ages` finds among the live ones."""
        for _ in range(RETRIES):
            items = ages(self.storage.live)
            data = self.storage.read(self.rows(items))
            if self.storage.holds_items(items):
                return data
        raise _overtaken()

    def finish(self, drawn: tuple[Draw, Any]) -> Batch:
        """A batch of the drawn items: collated, moved, and with the items' numbers."""
        draw, data = drawn
        info = {"index": draw.items, **draw.info}
        if self.collate_fn is not None:
            data = self.collate_fn(data)
        if self.pin_memory or self.device is not None:
            data, info = self._all_moved(data), self._all_moved(info)
        if isinstance(data, TensorDict):
            for name, value in info.items():
                data.set(name, _of_batch(value, data.batch_size))
        elif isinstance(data, LazyStackedTensorDict):  # of items of different shapes
            for name, value in info.items():
                for item, one in zip(data.unbind(0), value.unbind(0), strict=True):
                    item.set(name, one.expand(item.batch_size).contiguous())
        return Batch(data, info, draw.ends_epoch)

    def _choose(self, batch_size: int) -> Draw:
        live = self.storage.live
        if not live:
            raise RuntimeError("the buffer is empty: call buffer.extend(data) before sample()")
        self.sampler.follow(live)
        return self.sampler.draw(batch_size, live, self.generator)

    def _all_moved(self, data: Any) -> Any:
        """Tensors and containers moved, whatever dicts and tuples are around them."""
        moved = partial(self.moved, device=self.device)
        return pytree.tree_map(moved, data, is_leaf=lambda part: isinstance(part, Node))

    # for the prefetcher

    def version(self) -> Hashable:
        return self.storage.total, self.sampler.version

    def mark(self) -> object:
        return super().mark(), self.sampler.mark()

    def rewind(self, mark: Any) -> None:
        state, sampler = mark
        super().rewind(state)
        self.sampler.rewind(sampler)


def _overtaken() -> RuntimeError:
    return RuntimeError(
        "items are overwritten by the writing process faster than a batch of them can be read: "
        "use a storage with a larger max_size, or smaller batches"
    )


def _of_batch(value: Tensor, batch: torch.Size) -> Tensor:
    """Per-item entries [n], expanded to a batch of the items: [n, *batch of an item]."""
    if len(batch) < 2:
        return value
    return value.view(-1, *[1] * (len(batch) - 1)).expand(batch).contiguous()
