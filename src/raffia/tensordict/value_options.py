"""Settings for values that are no tensors: whether lists, and stacks of one value, become rows."""

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
    """A setting for a block of code, a decorated function or, with `set()`, from now on."""

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
        """Keep the setting from now on."""
        self.variable.set(self.mode)
        _latest[self.variable.name] = self.mode


class set_list_to_stack(_Option):
    """Whether a list that is no tensor is stored as a value per row (the default), or as one value.

    >>> from raffia import TensorDict
    >>> with set_list_to_stack(False):
    ...     td = TensorDict(words=["a", "b"], batch_size=[2])
    >>> td.get("words").batch_size, td[0]["words"]
    (torch.Size([2]), ['a', 'b'])
    """

    variable, default = _lists, True


class set_capture_non_tensor_stack(_Option):
    """Whether stacking equal values gives one value for all rows, or (the default) a value per row.

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
    """Whether stacking equal values gives one value; see `set_capture_non_tensor_stack`.

    >>> capture_non_tensor_stack()
    False
    """
    compiling = torch.compiler.is_compiling()
    return _latest["raffia_capture_non_tensor_stack"] if compiling else _capture.get()
