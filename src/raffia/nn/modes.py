"""Modes that are context managers and decorators, or set for good with `set()`."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any, ClassVar, Self

from torch.utils._contextlib import _DecoratorContextManager


class Setting:
    """One value for the whole process, which a thread may override for itself.

    >>> loud = Setting(False)
    >>> loud.get()
    False
    """

    def __init__(self, default: Any) -> None:
        self.everywhere = default
        self.by_thread: dict[int, Any] = {}

    def get(self) -> Any:
        """The value that holds here and now."""
        if self.by_thread:
            return self.by_thread.get(get_ident(), self.everywhere)
        return self.everywhere

    def put(self, value: Any, thread_local: bool = False) -> Callable[[], None]:
        """Change the value; returns the call that puts back what was there.

        A thread that has a value of its own changes that one.
        """
        if not (thread_local or self.by_thread and get_ident() in self.by_thread):
            before, self.everywhere = self.everywhere, value

            def undo() -> None:
                self.everywhere = before

            return undo
        thread, by_thread = get_ident(), self.by_thread
        overrode, earlier = thread in by_thread, by_thread.get(thread)
        by_thread[thread] = value

        def undo_here() -> None:
            if overrode:
                by_thread[thread] = earlier
            else:
                del by_thread[thread]

        return undo_here


class Mode(_DecoratorContextManager):
    """A context manager and decorator that gives a `Setting` a value; `set()` gives it for good.

    Blocks of one object may be nested, and a decorated function may call itself. It decorates as
    `torch.no_grad` does: in a generator function the value holds while that runs, not between its
    steps; of a class, which warns, it holds while an instance is made.
    """

    setting: ClassVar[Setting]

    def __init__(self, value: Any, *, thread_local: bool = False) -> None:
        self.value, self.thread_local = value, thread_local
        # What was there, alone in a tuple; or the call that puts it back.
        self._undo: list[Any] = []

    def set(self) -> None:
        """Keep the value from now on; `unset()` puts back what was there."""
        setting = self.setting
        if self.thread_local or setting.by_thread:
            self._undo.append(setting.put(self.value, self.thread_local))
        else:  # as `put`, but without making a function
            self._undo.append((setting.everywhere,))
            setting.everywhere = self.value

    def unset(self) -> None:
        """Put back what was there before the last `set()`; without one nothing happens."""
        if self._undo:
            undo = self._undo.pop()
            if undo.__class__ is tuple:
                (self.setting.everywhere,) = undo
            else:
                undo()

    def clone(self) -> Self:
        """The same mode as a new object."""
        new = self.__class__.__new__(self.__class__)
        new.__dict__.update(self.__dict__)
        new._undo = []
        return new

    def __enter__(self) -> None:
        self.set()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.unset()
