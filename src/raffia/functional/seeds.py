"""Seeds by name: one for each use, derived from the run's seed and what it is for.

A stream of random numbers that is drawn this way needs no saved state: its position is a counter,
and drawing more for one purpose changes nothing of any other.
"""

import functools
import hashlib
import operator
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def lock_of_threads() -> Any:
    """A lock that its thread may take again, and that is free in a forked child, unless the thread
    that forked holds it.

    >>> with (lock := lock_of_threads()), lock:
    ...     pass
    """
    lock: Any = threading.RLock()

    def free_in_child() -> None:
        if lock.acquire(blocking=False):  # free, or held by the thread that forked
            lock.release()
        else:  # another thread held it, which the child does not have
            lock._at_fork_reinit()

    if hasattr(os, "register_at_fork"):  # Windows cannot fork
        os.register_at_fork(after_in_child=free_in_child)
    return lock


# Held by who sets the state of torch's global generator for a while.
GLOBAL_DRAWS = lock_of_threads()


def derive_seed(seed: int, *parts: int | str) -> int:
    """Derive a seed in 0..2**63 - 1 from a seed and names; the same on every machine and release.

    parts: names and numbers of what the draw is for. Their order, their bounds and whether
        one is a number or a text all count.

    The first 63 bits of BLAKE2b over the parts, each with its kind and its length before it.

    >>> derive_seed(0, "reset", 3)
    7493846445043555977
    >>> len({derive_seed(0, "a", 1), derive_seed(0, "a1"), derive_seed(0, "a", "1")})
    3
    """
    code = hashlib.blake2b(_coded(_integer(seed)), digest_size=8)
    for part in parts:
        code.update(_coded(part))
    return int.from_bytes(code.digest(), "little") >> 1


def derive_seeds(seed: int, purpose: str, rows: Iterable[int], *parts: int | str) -> list[int]:
    """`derive_seed(seed, purpose, row, *parts)` of each row, in half the time.

    >>> derive_seeds(0, "reset", [3], 7) == [derive_seed(0, "reset", 3, 7)]
    True
    """
    before = hashlib.blake2b(_coded(_integer(seed)) + _coded(purpose), digest_size=8)
    after, seeds = b"".join(map(_coded, parts)), []
    for row in rows:
        code = before.copy()
        code.update(_coded(row) + after)
        seeds.append(int.from_bytes(code.digest(), "little") >> 1)
    return seeds


def generator_for(
    seed: int, *parts: int | str, device: torch.device | str = "cpu"
) -> torch.Generator:
    """A fresh generator, seeded by `derive_seed`.

    >>> first = torch.rand(2, generator=generator_for(0, "noise", 7))
    >>> torch.equal(first, torch.rand(2, generator=generator_for(0, "noise", 7)))
    True
    """
    return torch.Generator(device).manual_seed(derive_seed(seed, *parts))


@contextmanager
def global_draws(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Draw from torch's global generator of the CPU as seeded, within the block, in one thread at
    a time; its state is the same afterwards.

    For what takes no generator, as the first weights of `torch.nn`.

    device: a GPU whose global generator is seeded and restored, too.

    >>> with global_draws(seed=3):
    ...     a = torch.rand(2)
    >>> with global_draws(seed=3):
    ...     torch.equal(a, torch.rand(2))
    True
    """
    on_gpu = device is not None and device.type == "cuda"
    with GLOBAL_DRAWS, torch.random.fork_rng(devices=[device] if on_gpu else []):
        if on_gpu:
            torch.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)  # those of other devices stay as they are
        yield


@functools.lru_cache(4096, typed=True)
def _coded(part: int | str) -> bytes:
    """A part with its kind and its length before it."""
    kind, text = (b"s", part) if isinstance(part, str) else (b"i", str(_integer(part)))
    data = text.encode()
    return kind + len(data).to_bytes(8, "little") + data


def _integer(part: int) -> int:
    try:
        return operator.index(part)
    except TypeError:
        raise TypeError(
            f"a part of a seed must be a string or an integer, got {part!r}; for example "
            'derive_seed(0, "noise", 7)'
        ) from None
