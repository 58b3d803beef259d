"""`InteractionType`: whether probabilistic modules take the mode, the mean or a sample."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, cast

from raffia.nn.modes import Mode, Setting
from raffia.tensordict.keys import nearest


class InteractionType(StrEnum):
    """Which value a probabilistic module takes from its distribution.

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


INTERACTION = Setting(None)  # None: each module's default


class set_interaction_type(Mode):
    """Which value all probabilistic modules take, in a block or in a decorated function.

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
        """What was asked for."""
        return cast("InteractionType | None", self.value)


def interaction_type() -> InteractionType | None:
    """The type that `set_interaction_type` set, or None where each module's default holds.

    >>> print(interaction_type())
    None
    """
    return cast("InteractionType | None", INTERACTION.get())


class set_interaction_mode(set_interaction_type):
    """`set_interaction_type` under its first name: the mode is given by its name.

    >>> with set_interaction_mode("random"):
    ...     interaction_mode()
    'random'
    """

    def __init__(self, mode: str | None = "mode", *, thread_local: bool = False) -> None:
        super().__init__(mode, thread_local=thread_local)


def interaction_mode() -> str | None:
    """`interaction_type` under its first name: the name of the mode that is set, or None.

    >>> print(interaction_mode())
    None
    """
    kind: Any = INTERACTION.get()
    return None if kind is None else cast("str", kind.value)
