"""Two settings that programs written for older containers need; both are off by default."""

from __future__ import annotations

import contextlib
from typing import Any

stack_lazily: bool | None = None  # None: never set
get_raises = False


class set_lazy_legacy(contextlib.ContextDecorator):
    """Whether stacking containers gives a lazy stack, in a block, a function or, with `set()`, on.

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
        """Keep the setting from now on."""
        global stack_lazily
        stack_lazily = self.mode


def lazy_legacy(allow_none: bool = False) -> bool | None:
    """Whether stacking gives a lazy stack; `allow_none`: None if that was never set.

    >>> lazy_legacy(), lazy_legacy(allow_none=True)
    (False, None)
    """
    return stack_lazily if allow_none else bool(stack_lazily)


def set_get_defaults_to_none(set_to_none: bool = True) -> None:
    """Whether `get` of a missing key without a default gives None, or a KeyError.

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
    """Whether `get` gives None for a missing key; see `set_get_defaults_to_none`.

    >>> get_defaults_to_none()
    True
    """
    return not get_raises
