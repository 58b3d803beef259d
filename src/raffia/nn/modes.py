"""Modes that are context managers and decorators, or set for good with `set()`.

`set_interaction_type`: whether probabilistic modules take the mode, the mean or a sample.
`set_composite_lp_aggregate`: whether the log-probabilities of several distributions are summed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import StrEnum
from threading import get_ident
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

from torch.utils._contextlib import _DecoratorContextManager

from raffia.tensordict.keys import nearest

Value = TypeVar("Value")


class Setting(Generic[Value]):
    """One value for the whole process, which a thread may override for itself.

    >>> loud = Setting(False)
    >>> loud.get()
    False
    """

    def __init__(self, default: Value) -> None:
        self.everywhere = default
        self.by_thread: dict[int, Value] = {}

    def get(self) -> Value:
        """The current value, in this thread."""
        if self.by_thread:
            return self.by_thread.get(get_ident(), self.everywhere)
        return self.everywhere

    def put(self, value: Value, thread_local: bool = False) -> Callable[[], None]:
        """Change the value; returns the function that restores the previous one.

        In a thread that overrides the value, its override changes.
        """
        if not (thread_local or self.by_thread and get_ident() in self.by_thread):
            before, self.everywhere = self.everywhere, value

            def undo() -> None:
                self.everywhere = before

            return undo
        thread, by_thread = get_ident(), self.by_thread
        earlier = {thread: by_thread[thread]} if thread in by_thread else {}
        by_thread[thread] = value

        def undo_here() -> None:
            by_thread.pop(thread, None)  # None: undone in another order
            by_thread.update(earlier)

        return undo_here


class Mode(_DecoratorContextManager):
    """A context manager and decorator that sets a `Setting`; `set()` sets it permanently.

    Blocks of one object may be nested, and a decorated function may call itself. It decorates as
    `torch.no_grad` does: in a generator function the value holds while that runs, not between its
    steps; of a class, which warns, it holds while an instance is made.
    """

    setting: ClassVar[Setting[Any]]

    def __init__(self, value: Any, *, thread_local: bool = False) -> None:
        self.value, self.thread_local = value, thread_local
        # What was there, alone in a tuple; or the call that puts it back.
        self._undo: list[Any] = []

    def set(self) -> None:
        """Set the value permanently; `unset()` restores the previous one."""
        setting = self.setting
        if self.thread_local or setting.by_thread:
            self._undo.append(setting.put(self.value, self.thread_local))
        else:  # as `put`, but without making a function
            self._undo.append((setting.everywhere,))
            setting.everywhere = self.value

    def unset(self) -> None:
        """Restore the value before the last `set()`; without one nothing happens."""
        if self._undo:
            undo = self._undo.pop()
            if undo.__class__ is tuple:
                (self.setting.everywhere,) = undo
            else:
                undo()

    def clone(self) -> Self:
        """A new object with the same mode."""
        new = self.__class__.__new__(self.__class__)
        new.__dict__.update(self.__dict__)
        new._undo = []
        return new

    def __enter__(self) -> None:
        self.set()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.unset()


class InteractionType(StrEnum):
    """The kind of value that a probabilistic module takes from its distribution.

    `RANDOM` is a draw, by `rsample` where the distribution has it, else by `sample`. `MODE`,
    `MEDIAN` and `MEAN` are as named; a mean without a formula is estimated from draws.
    `DETERMINISTIC` is the distribution's own `deterministic_sample` if it has one, else its mode
    where its values can be counted, else its mean.

    >>> InteractionType("Random"), InteractionType.RANDOM == "random"
    (<InteractionType.RANDOM: 'random'>, True)
    """

    MODE = "mode"
    MEDIAN = "median"
    MEAN = "mean"
    RANDOM = "random"
    DETERMINISTIC = "deterministic"

    @classmethod
    def from_str(cls, type_str: str) -> InteractionType:
        """The type of this name, in upper or lower case.

        >>> InteractionType.from_str("Mode")
        <InteractionType.MODE: 'mode'>
        """
        return cls(type_str.lower())

    @classmethod
    def _missing_(cls, value: object) -> InteractionType:
        if isinstance(value, str):
            for member in cls:
                if member.value == value.lower():
                    return member
        hint = nearest(value.lower(), cls) if isinstance(value, str) else ""
        raise ValueError(
            f"{value!r} is not a valid InteractionType; the types are "
            f"{', '.join(repr(member.value) for member in cls)}{hint}"
        )


INTERACTION = Setting[InteractionType | None](None)  # None: each module's default


class set_interaction_type(Mode):
    """Set which value all probabilistic modules take, in a block or in a decorated function.

    type: an `InteractionType` or its name; None: each module's own default.
    thread_local: for this thread only.

    >>> from torch.distributions import Normal
    >>> from raffia.nn import ProbabilisticTensorDictModule, set_interaction_type
    >>> act = ProbabilisticTensorDictModule(["loc", "scale"], ["act"], distribution_class=Normal)
    >>> td = TensorDict(loc=torch.zeros(3), scale=torch.ones(3))
    >>> with set_interaction_type("random"):
    ...     bool(act(td)["act"].any())
    True
    >>> bool(act(td)["act"].any())  # the mean again
    False
    """

    setting = INTERACTION

    def __init__(
        self,
        type: InteractionType | str | None = InteractionType.DETERMINISTIC,
        *,
        thread_local: bool = False,
    ) -> None:
        if type is not None and type.__class__ is not InteractionType:
            type = InteractionType(type)
        self.value, self.thread_local, self._undo = type, thread_local, []  # as `Mode`, faster

    @property
    def type(self) -> InteractionType | None:
        """The interaction type that was requested."""
        return cast("InteractionType | None", self.value)


def interaction_type() -> InteractionType | None:
    """The type that `set_interaction_type` set, or None where each module's default holds.

    >>> print(interaction_type())
    None
    """
    return INTERACTION.get()


class set_interaction_mode(set_interaction_type):
    """Set the interaction type by its name; the older name of `set_interaction_type`.

    >>> with set_interaction_mode("random"):
    ...     interaction_mode()
    'random'
    """

    def __init__(self, mode: str | None = "mode", *, thread_local: bool = False) -> None:
        super().__init__(mode, thread_local=thread_local)


def interaction_mode() -> str | None:
    """The name of the interaction type that is set, or None; the older name of `interaction_type`.

    >>> print(interaction_mode())
    None
    """
    kind = INTERACTION.get()
    return None if kind is None else kind.value


ENVIRONMENT_NAME = "COMPOSITE_LP_AGGREGATE"
_TRUTH = dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True)
_TRUTH |= dict.fromkeys(("0", "false", "f", "no", "n", "off"), False)

_AGGREGATE = Setting[bool | None](None)  # None: nobody has set it


class set_composite_lp_aggregate(Mode):
    """Set whether composite distributions sum their log-probabilities and entropies in one tensor.

    A context manager and decorator; `.set()` keeps the value from now on, `.unset()` takes it back.
    Where nothing is set, the environment variable COMPOSITE_LP_AGGREGATE decides, else it is False.

    >>> from raffia.nn.modes import (
    ...     composite_lp_aggregate,
    ...     set_composite_lp_aggregate,
    ... )
    >>> with set_composite_lp_aggregate(True):
    ...     composite_lp_aggregate()
    True
    """

    setting = _AGGREGATE

    def __init__(self, mode: bool = True, *, thread_local: bool = False) -> None:
        super().__init__(bool(mode), thread_local=thread_local)
        self.mode = mode


def composite_lp_aggregate(nowarn: bool = False) -> bool:
    """Whether composite distributions sum their log-probabilities and entropies in one tensor.

    nowarn: changes nothing, there is no warning; older programs pass it.

    >>> from raffia.nn.modes import (
    ...     composite_lp_aggregate,
    ...     set_composite_lp_aggregate,
    ... )
    >>> set_composite_lp_aggregate(False)(composite_lp_aggregate)()
    False
    """
    value = _AGGREGATE.get()
    return _from_environment() if value is None else value


def _from_environment() -> bool:
    text = os.environ.get(ENVIRONMENT_NAME, "0")
    if text.lower() not in _TRUTH:
        raise ValueError(
            f"the environment variable {ENVIRONMENT_NAME} is {text!r}; set it to 0 or 1"
        )
    return _TRUTH[text.lower()]
