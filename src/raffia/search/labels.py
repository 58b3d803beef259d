"""How figures and names of actions are written in a tree's summary and picture."""

import math
from collections.abc import Callable, Iterable


def figures(values: Iterable[float]) -> Callable[[float], str]:
    """A way to write these numbers: three digits of the greatest, as many decimals of the others.

    >>> write = figures([0.5, -12.25])
    >>> write(0.5), write(-12.25), write(-0.01)
    ('+0.5', '-12.2', '+0.0')
    """
    greatest = max([abs(value) for value in values], default=0.0)
    if greatest >= 1e6 or 0 < greatest < 1e-4:
        return lambda value: f"{value:+.2e}"
    digits = max(2 - math.floor(math.log10(greatest)), 0) if greatest else 2
    return lambda value: f"{round(value, digits) + 0.0:+.{digits}f}"  # + 0.0: no "-0.0"


def percent(share: float) -> str:
    """A fraction in percent, with two digits or more.

    >>> percent(1.0), percent(0.25), percent(0.031)
    ('100%', '25%', '3.1%')
    """
    return f"{share:.0%}" if share >= 0.0995 or share == 0 else f"{share:.1%}"


def shown_name(text: str, width: int) -> str:
    """A name on one line of at most `width` characters; what cannot be printed is a question mark.

    >>> shown_name("turn left", 6), shown_name("a" + chr(7), 6)
    ('turn …', 'a?')
    """
    text = "".join([char if char.isprintable() else "?" for char in text])
    return text if len(text) <= width else text[: width - 1] + "…"
