"""Non-tensor values of memory-mapped containers: changed on disk, too, and shared if that is asked.

A record is replaced by another file whenever a value in it is changed, under a lock of its folder.
A process that shares values keeps open the file that it read last: no other can have its number
then, so one look at the number tells whether there is anything new to read.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from raffia.files import TemporaryFolder, locked
from raffia.tensordict.node import Container, Node
from raffia.tensordict.record import (
    META,
    VALUE_CLASSES,
    Reader,
    Record,
    open_record,
    read_record,
    titled,
    value_class,
    value_node,
    value_record,
    write_record,
)

# attribute in which a node has its value -> where it is while other processes change it, too
SHARED = {"_data": "_shared_data", "tensordicts": "_shared_tensordicts"}


class ReadAgain:
    """An attribute that each node stores itself, except that a shared value is read again here.

    Python looks for it here last, so that what isn't shared takes no longer for it.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, node: Any, owner: Any = None) -> Any:
        if node is None:
            return self
        if SHARED[self.name] not in node.__dict__:
            raise AttributeError(f"{type(node).__name__} has no attribute {self.name!r} yet")
        node._home.refresh()
        return node.__dict__[SHARED[self.name]]


def value_attribute(node: Any, name: str) -> str:
    """The attribute in which the value of a node is, which is called `name` if it isn't shared."""
    return SHARED[name] if SHARED[name] in node.__dict__ else name


class Home:
    """The location on disk of a non-tensor entry's value: a folder, and an entry of its record.

    name: of the entry; None if the record is that of the value itself.
    is_shared: other processes change the value, too: what is read is what the record holds now.
    """

    def __init__(self, folder: str | TemporaryFolder, name: str | None, is_shared: bool) -> None:
        self._keeps = folder  # a temporary one is removed with the last home in it
        self.folder, self.name, self.is_shared = os.fspath(folder), name, is_shared
        self._top: Any = lambda: None  # a weak reference to the whole entry
        self._lock, self._busy = threading.RLock(), False
        self._read: tuple[int, int] | None = None  # device and number of the file read last
        self._close: Any = None  # closes it

    def give_to(self, top: Any) -> None:
        """Make this the home of an entry, and of the rows of which it consists."""
        self._top = weakref.ref(top)
        nodes = [top]
        for node in nodes:  # grows on the way
            self.hold(node)
            nodes += node._children()

    def hold(self, node: Any) -> None:
        """Make this the home of a node: of the entry, or of a row."""
        node._home, state = self, node.__dict__
        for name, shared in SHARED.items():
            before, after = (name, shared) if self.is_shared else (shared, name)
            if before in state:  # it is never missing, for another thread may read it
                state[after] = state[before]
                del state[before]

    def is_of(self, node: Any) -> bool:
        """Whether a node is the whole entry, not one of its rows."""
        return self._top() is node

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A block that changes the value; then it is changed on disk. If that fails, it is not."""
        with self._lock:
            top = self._top()
            if self._busy or top is None:
                yield
                return
            with locked(self.folder):
                self._busy = True
                try:
                    if self.is_shared:
                        self._take(top)
                    yield
                    self._write(top)
                except BaseException:
                    with suppress(Exception):  # the error above is raised
                        self._read = None
                        self._take(top)
                    raise
                finally:
                    self._busy = False

    def refresh(self) -> None:
        """Read the value again if another process has changed it."""
        if self._is_known():
            return
        with self._lock:
            top = self._top()
            if top is not None and not self._busy:
                self._busy = True
                try:
                    self._take(top)
                finally:
                    self._busy = False

    def moved_to(self, value: Any) -> None:
        """Write what is about to stand instead of the entry, in a container that is locked."""
        if isinstance(value, Node) and value._is_data():
            with locked(self.folder):
                self._write(value)

    def _is_known(self) -> bool:
        if self._read is None:
            return False
        try:
            found = os.stat(f"{self.folder}/{META}")
        except OSError:  # reading it raises the error
            return False
        return (found.st_dev, found.st_ino) == self._read

    def _take(self, top: Any) -> None:
        """Read the value, unless it is known."""
        if self._is_known():
            return
        with open_record(self.folder) as file:
            found = os.fstat(file.fileno())
            entry = self._entry(read_record(self.folder, file))
            reader = Reader(f"{self.folder}/{META}", top._device, False)
            new = value_node(reader, entry) if entry else None
            if new is None or form(new) != form(top):
                what = "the values" if self.name is None else f"entry {self.name!r}"
                raise RuntimeError(
                    f"another process has saved {what} in another form in {self.folder}: "
                    "td.memmap_refresh_() loads it"
                )
            top._put(new)
            self.give_to(top)
            if self._close is not None:
                self._close()
            self._close = weakref.finalize(self, os.close, os.dup(file.fileno()))
            self._read = found.st_dev, found.st_ino

    def _entry(self, record: Record) -> Record:
        listed = record if self.name is None else record.get("entries")
        entry = listed if self.name is None or type(listed) is not dict else listed.get(self.name)
        return entry if type(entry) is dict and entry.get("class") in VALUE_CLASSES else {}

    def _write(self, top: Any) -> None:
        record, value = read_record(self.folder), value_record(top, (self.name or "",))
        if self.is_shared:
            value["shared"] = True
        if self.name is None:
            record.update(value)
        else:
            record["entries"][self.name] = value
        write_record(self.folder, record)
        self.give_to(top)  # rows may have been replaced


def form(node: Any) -> tuple[Any, ...]:
    """The properties that distinguish kinds of entries; they stay while values change."""
    return value_class(node), node._batch_size, getattr(node, "stack_dim", None)


def share(node: Any, folder: str | None, name: str | None) -> None:
    """Share a non-tensor entry of a container that is mapped; without a folder, by a temporary one.

    The record of the folder holds it already.
    """
    if folder is not None:
        Home(folder, name, True).give_to(node)
        return
    home = Home(TemporaryFolder(), "value", True)
    record = titled({"class": "TensorDict", "batch_size": [], "entries": {}})
    record["entries"]["value"] = {**value_record(node, ()), "shared": True}
    write_record(home.folder, record)
    home.give_to(node)


def reopened(node: Container, folder: str, name: str | None) -> Container:
    """Restore a pickled shared value in another process, which then shares it with this one."""
    Home(folder, name, True).give_to(node)
    return node


def left_alone(node: Container, folder: str, name: str | None) -> Container:
    """Restore a shared value in `torch.load`, no longer tied to its folder."""
    return node
