"""Batches drawn ahead of time in a thread, which are those that would be drawn without it.

A batch is made in two steps: `draw`, under the lock, chooses rows and copies them; `finish`,
without it, does the rest. Each batch drawn ahead remembers where the generator and the sampler
stood before it. If anything changes before it is asked for, it is thrown away, they are put back
there, and the batch is drawn again.
"""

import os
import threading
import weakref
from collections import deque
from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from raffia.data.processes import ByValue
from raffia.data.storage import Storage

Drawn = TypeVar("Drawn")
Batch = TypeVar("Batch")
Data = TypeVar("Data")


@dataclass(eq=False)
class BatchSource(ByValue, Generic[Drawn, Batch]):
    """The source of a buffer's batches. The fields are documented in `ReplayBuffer`."""

    storage: Storage
    generator: torch.Generator | None
    pin_memory: bool
    device: torch.device | str | None

    def draw(self, batch_size: int) -> Drawn:
        """Choose a batch and copy it; called under the lock."""
        raise NotImplementedError

    def finish(self, drawn: Drawn) -> Batch:
        """Make a batch of what was drawn; called without the lock, in either thread."""
        raise NotImplementedError

    def version(self) -> Hashable:
        """A value that stays equal as long as `draw` would return the same."""
        raise NotImplementedError

    def mark(self) -> object:
        """The state of drawing, for `rewind`."""
        return None if self.generator is None else self.generator.get_state()

    def rewind(self, mark: Any) -> None:
        """Restore the state of drawing that `mark` gave."""
        if self.generator is not None:
            self.generator.set_state(mark)

    def moved(self, data: Data, device: torch.device | str | None) -> Data:
        """A tensor or container, pinned where that is to be, and on a device."""
        found: Any = data
        if self.pin_memory and (found.device or self.storage.device).type == "cpu":
            found = found.pin_memory()
        if device is not None:
            # From page-locked memory the copy continues while the program does.
            found = found.to(device, non_blocking=self.pin_memory)
        moved: Data = found
        return moved


class Ahead(Generic[Drawn, Batch]):
    """A batch that was drawn and is being made."""

    def __init__(self, source: BatchSource[Drawn, Batch], batch_size: int) -> None:
        self.version = source.version(), batch_size
        self.mark = source.mark()
        self.batch: Future[Batch] = Future()
        try:
            self.drawn = source.draw(batch_size)
        except Exception as error:  # for whoever asks for this batch
            self.batch.set_exception(error)

    def finish(self, source: BatchSource[Drawn, Batch]) -> None:
        if self.batch.done():
            return
        try:
            self.batch.set_result(source.finish(self.drawn))
        except Exception as error:
            self.batch.set_exception(error)


class Signal:
    """The only object that the thread holds while it waits, so that it keeps nothing else alive."""

    def __init__(self, lock: Any) -> None:
        self.changed = threading.Condition(lock)
        self.work = False  # whether there is something to do

    def set(self, work: bool) -> None:
        with self.changed:
            self.work = work
            self.changed.notify()


class Prefetcher(Generic[Drawn, Batch]):
    """Keeps up to `depth` batches of a source ready.

    lock: an RLock, held by callers that change the source; they call `drop` before the change.

    The thread starts with the first batch that is asked for, and ends with this object. It works
    ahead at the batch size that was asked for last, and not at all between a `drop` and the next
    batch.
    """

    def __init__(self, source: BatchSource[Drawn, Batch], depth: int, lock: Any) -> None:
        self._source = source
        self.depth = depth
        self._waiting: deque[Ahead[Drawn, Batch]] = deque()
        self._batch_size: int | None = None  # None: nothing is to be drawn ahead
        self._signal = Signal(lock)
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        weakref.finalize(self, self._signal.set, True)

    def next(self, batch_size: int) -> Batch:
        """The next batch; an error from its making is raised here."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "this process was forked from the one that created the buffer, and the "
                "prefetching thread does not exist here: use prefetch=0, or create the buffer in "
                "this process"
            )
        with self._signal.changed:
            version = self._source.version(), batch_size
            if self._waiting and self._waiting[0].version != version:
                self.drop()
            ready = bool(self._waiting)
            ahead = self._waiting.popleft() if ready else Ahead(self._source, batch_size)
            self._batch_size = batch_size
            self._signal.set(True)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=work,
                    args=(weakref.ref(self), self._signal),
                    name="raffia-prefetch",
                    daemon=True,
                )
                self._thread.start()
        if not ready:
            ahead.finish(self._source)
        try:
            return ahead.batch.result()
        finally:
            del ahead  # an error of its own would hold it, and it the error

    def drop(self) -> None:
        """Undo the draws of batches that were not asked for yet; the caller holds the lock."""
        self._batch_size = None
        self._signal.work = False
        if self._waiting:
            self._source.rewind(self._waiting[0].mark)
            self._waiting.clear()

    def draw_ahead(self) -> Ahead[Drawn, Batch] | None:
        """The next batch to be made, if there is room for one; the caller holds the lock."""
        room = self.depth - len(self._waiting)
        self._signal.work = self._batch_size is not None and room > 1
        if self._batch_size is None or room < 1:
            return None
        ahead = Ahead(self._source, self._batch_size)
        self._waiting.append(ahead)
        return ahead

    def finish(self, ahead: Ahead[Drawn, Batch]) -> None:
        """Make a batch that was drawn; without the lock."""
        ahead.finish(self._source)


def work(prefetcher_of: "weakref.ref[Prefetcher[Drawn, Batch]]", signal: Signal) -> None:
    """The thread's loop: draw ahead if there is room, wait otherwise."""
    while True:
        with signal.changed:
            signal.changed.wait_for(lambda: signal.work)
            prefetcher = prefetcher_of()
            if prefetcher is None:
                return
            ahead = prefetcher.draw_ahead()
        if ahead is not None:
            prefetcher.finish(ahead)
        del prefetcher, ahead
