"""Settings for a block or permanently: how non-tensor values are stored, and older behaviour."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar, Token
from typing import Any

import torch

_lists: ContextVar[bool] = ContextVar("raffia_list_to_stack", default=True)
_capture: ContextVar[bool] = ContextVar("raffia_capture_non_tensor_stack", default=False)
_latest = {"raffia_list_to_stack": True, "raffia_capture_non_tensor_stack": False}
# ... as last set: torch.compile can't read a ContextVar, but looks whether a value has changed


class _Option(contextlib.ContextDecorator):
    """A setting for a block of code, a decorated function or, with `set()`, permanently."""

    variable: ContextVar[bool]
    default: bool

    def __init__(self, mode: bool | None) -> None:
        self.mode = self.default if mode is None else bool(mode)
        self.tokens: list[Token[bool]] = []

    def __enter__(self) -> None:
        self.tokens.append(self.variable.set(self.mode))
        _latest[self.variable.name] = self.mode

    def __exit__(self, *error: Any) -> None:
        self.variable.reset(self.tokens.pop())
        _latest[self.variable.name] = self.variable.get()

    def set(self) -> None:
        """Set it permanently."""
        self.variable.set(self.mode)
        _latest[self.variable.name] = self.mode


class set_list_to_stack(_Option):
    """Set whether a list that is not a tensor is stored as a value per row (the default), or as one
    value.

    >>> from raffia import TensorDict
    >>> with set_list_to_stack(False):
    ...     td = TensorDict(words=["a", "b"], batch_size=[2])
    >>> td.get("words").batch_size, td[0]["words"]
    (torch.Size([2]), ['a', 'b'])
    """

    variable, default = _lists, True


class set_capture_non_tensor_stack(_Option):
    """Set whether stacking equal values gives one value for all rows or (the default) one per row.

    >>> from raffia import NonTensorData
    >>> with set_capture_non_tensor_stack(True):
    ...     type(torch.stack([NonTensorData("a"), NonTensorData("a")])).__name__
    'NonTensorData'
    """

    variable, default = _capture, False


def list_to_stack(allow_none: bool = False) -> bool:
    """Whether lists are stored as a value per row; see `set_list_to_stack`.

    >>> list_to_stack()
    True
    """
    compiling = torch.compiler.is_compiling()
    return _latest["raffia_list_to_stack"] if compiling else _lists.get()


def capture_non_tensor_stack(allow_none: bool = False) -> bool:
    """Whether stacking equal values results in one value; see `set_capture_non_tensor_stack`.

    >>> capture_non_tensor_stack()
    False
    """
    compiling = torch.compiler.is_compiling()
    return _latest["raffia_capture_non_tensor_stack"] if compiling else _capture.get()


stack_lazily: bool | None = None  # None: never set
get_raises = False


class set_lazy_legacy(contextlib.ContextDecorator):
    """Set whether stacking makes lazy stacks, in a block, a function or, with `set()`, permanently.

    Views (`unsqueeze`, `permute` ...) are containers over the same memory in either mode.

    >>> import torch
    >>> from raffia import TensorDict
    >>> with set_lazy_legacy(True):
    ...     type(torch.stack([TensorDict(a=1), TensorDict(a=2)])).__name__
    'LazyStackedTensorDict'
    """

    def __init__(self, mode: bool) -> None:
        self.mode = bool(mode)
        self.before: list[bool | None] = []

    def __enter__(self) -> None:
        self.before.append(stack_lazily)
        self.set()

    def __exit__(self, *error: Any) -> None:
        global stack_lazily
        stack_lazily = self.before.pop()

    def set(self) -> None:
        """Set it permanently."""
        global stack_lazily
        stack_lazily = self.mode


def lazy_legacy(allow_none: bool = False) -> bool | None:
    """Whether stacking makes a lazy stack; with `allow_none`, None if that was never set.

    >>> lazy_legacy(), lazy_legacy(allow_none=True)
    (False, None)
    """
    return stack_lazily if allow_none else bool(stack_lazily)


def set_get_defaults_to_none(set_to_none: bool = True) -> None:
    """Set whether `get` of a missing key without a default returns None or raises a KeyError.

    >>> from raffia import TensorDict
    >>> set_get_defaults_to_none(False)
    >>> TensorDict().get("a")
    Traceback (most recent call last):
    ...
    raffia.tensordict.keys.MissingKeyError: key "a" not found in TensorDict with keys []
    >>> set_get_defaults_to_none(True)
    """
    global get_raises
    get_raises = not set_to_none


def get_defaults_to_none() -> bool:
    """Whether `get` returns None for a missing key; see `set_get_defaults_to_none`.

    >>> get_defaults_to_none()
    True
    """
    return not get_raises
