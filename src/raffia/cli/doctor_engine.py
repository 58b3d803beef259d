"""The checks of `raffia doctor --engine.name`: a worker is started there, and called."""

from __future__ import annotations

from raffia.cli.doctor import Check


def engine_checks(name: str, address: str = "") -> list[Check]:
    """What an engine has room for, how soon a worker is there, and how long a call takes.

    >>> [check.verdict for check in engine_checks("inline")]
    ['ok', 'ok', 'ok', 'ok']
    """
    from raffia.recipes.engines import try_engine

    try:
        found = try_engine(name, address)
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        return [Check("engine", "fails", f"{name}: {error}")]
    return [
        Check("engine", "ok", f"{name}: {found.description}"),
        Check("first worker", "ok", f"after {found.seconds_to_first:.1f} s"),
        Check("a call", "ok", f"{1e3 * found.seconds_of_call:.2f} ms there and back"),
        Check("arrays", "ok", f"{found.mib_per_second:,.0f} MiB/s there and back"),
    ]
