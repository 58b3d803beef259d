"""Interleaved timing: several calls take turns, so that the machine's load affects all equally."""

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

Call = Callable[[], Any]
Times = dict[str, list[float]]  # of each call, one figure a round


def block(call: Call, num_calls: int) -> float:
    """CPU seconds per call over one block of `num_calls` calls."""
    start = time.process_time_ns()
    for _ in itertools.repeat(None, num_calls):
        call()
    return (time.process_time_ns() - start) / num_calls / 1e9


def block_length(call: Call, seconds: float, first: float = 0.0) -> int:
    """How many calls fill a block of `seconds`; the trial blocks warm the call up.

    `first` is the time of the very first call: if it and a second are slow, no more are needed.
    """
    if min(first, block(call, 1)) > 4 * seconds:
        return 1
    block(call, 1)  # compiled code may be compiled again for entries that the first call wrote
    num_calls = 1
    while (per_call := block(call, num_calls)) * num_calls < seconds / 4:
        num_calls *= 4
    return max(1, round(seconds / per_call))


def take_turns(
    blocks: dict[str, Callable[[], float]], rounds: int, least: int = 1, patience: float = math.inf
) -> Times:
    """Every block once a round; each round starts one further, so that no one is always first.

    The garbage collector rests. After `patience` CPU seconds no round starts but the `least`.
    """
    names = list(blocks)
    times: Times = {name: [] for name in names}
    start = time.process_time()
    gc.collect()
    gc.disable()
    try:
        for round_index in range(rounds):
            if round_index >= least and time.process_time() - start > patience:
                break
            first = round_index % len(names)
            for name in names[first:] + names[:first]:
                times[name].append(blocks[name]())
    finally:
        gc.enable()
    return times


def paired_ratio(times: list[float], reference: list[float]) -> tuple[float, float]:
    """Median of the per-round ratios, and their spread: half the interquartile range.

    >>> paired_ratio([1., 2., 3., 4.], [2., 4., 6., 8.])
    (0.5, 0.0)
    """
    ratios = [a / b for a, b in zip(times, reference, strict=True)]
    if len(ratios) < 2:
        return ratios[0], 0.0
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return middle, (high - low) / 2
