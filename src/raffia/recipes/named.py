"""What users and run folders name as "module:name" or "file.py:name"."""

from __future__ import annotations

import sys
from typing import Any

from raffia.lazy import imported
from raffia.train.config import ConfigError


def given_name(reference: Any, what: str) -> Any:
    """What the user names, who vouches for it: also of a file, or of a module in this folder.

    what: is named so, such as "a raffia.recipes.Algorithm"; for the error.
    Raises ConfigError if it can't be imported.

    >>> given_name("math:tau", "a number")
    6.283185307179586
    >>> given_name("maths:tau", "a number")
    Traceback (most recent call last):
    ...
    raffia.train.settings.ConfigError: maths:tau can't be imported: No module named 'maths'. It is
    package.module:name or path/file.py:name, of a number
    """
    try:
        return imported(reference, here=True)
    except (ImportError, AttributeError, OSError, SyntaxError) as error:
        raise ConfigError(
            f"{reference} can't be imported: {error}. It is package.module:name or "
            f"path/file.py:name, of {what}"
        ) from error


def recorded_name(reference: str) -> Any:
    """What a run's folder names, if that lies in an installed package; else None.

    A folder may come from elsewhere, so files, and modules of the current folder, are not run.
    Raises ConfigError if the package is installed and fails to be imported.

    >>> recorded_name("math:tau"), recorded_name("own.py:tau"), recorded_name("not_there:tau")
    (6.283185307179586, None, None)
    """
    home = reference.rpartition(":")[0]
    if not home or home.endswith(".py"):
        return None
    try:
        return imported(reference)
    except (ImportError, AttributeError, SyntaxError) as error:
        is_missing = isinstance(error, ModuleNotFoundError) and f"{home}.".startswith(
            f"{error.name}."
        )
        if is_missing or (isinstance(error, AttributeError) and home in sys.modules):
            return None
        raise ConfigError(f"{reference} can't be imported: {error}") from error
