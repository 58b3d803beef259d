"""Whether the log-probabilities of several distributions are summed."""

from __future__ import annotations

import os

from raffia.nn.modes import Mode, Setting

ENVIRONMENT_NAME = "COMPOSITE_LP_AGGREGATE"
_TRUTH = dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True)
_TRUTH |= dict.fromkeys(("0", "false", "f", "no", "n", "off"), False)

_AGGREGATE = Setting(None)  # None: nobody has set it


class set_composite_lp_aggregate(Mode):
    """Whether composite distributions sum their log-probabilities and entropies in one tensor.

    A context manager and decorator; `.set()` keeps the value from now on, `.unset()` takes it back.
    Where nothing is set, the environment variable COMPOSITE_LP_AGGREGATE decides, else it is False.

    >>> from raffia.nn.distributions.aggregate import (
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

    >>> from raffia.nn.distributions.aggregate import (
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
