"""A session of a run of any algorithm, with its folder, signals and view."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from raffia.distributed.sharded import StateLost
from raffia.functional.exact import request_exact_products
from raffia.recipes.devices import require_defaults
from raffia.recipes.run_folder import claimed, given_back
from raffia.train.experiment import Experiment, Stop
from raffia.train.log import OnRow
from raffia.train.session import RunResult, TrainingSession
from raffia.train.signals import stop_on_signals
from raffia.train.view import View

INEXACT = (
    "note: this program multiplied matrices before the run, so on this processor the last bits of "
    "products depend on memory addresses: a resume, or more processes, may give other bits. To "
    "avoid this, at no cost, set MKL_CBWR=AUTO in the program's environment"
)

Make = Callable[[Any, Path, View], Experiment]


@contextlib.contextmanager
def plain_arithmetic() -> Iterator[None]:
    """Gradients and precision as without the caller's `inference_mode`, `no_grad`, `autocast`.

    Nor does a loss's own `autocast` lie in another: it would keep each update's casts of weights.
    Raises RunError where torch's defaults are not those that runs need.

    >>> with torch.no_grad(), plain_arithmetic():
    ...     torch.is_grad_enabled()
    True
    """
    require_defaults()
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    with torch.inference_mode(False), torch.enable_grad():
        depth = torch.autocast_increment_nesting()
        for _ in range(depth):
            torch.autocast_decrement_nesting()
        for kind in kinds:
            torch.set_autocast_enabled(kind, False)
        try:
            yield
        finally:
            for kind in kinds:
                torch.set_autocast_enabled(kind, True)
            for _ in range(depth - 1):
                torch.autocast_increment_nesting()


@dataclass(frozen=True)
class Evaluation:
    """Returns and lengths of the episodes that an agent of a run played.

    >>> Evaluation([1.0, 0.0], [9, 9]).files
    []
    """

    returns: list[float]
    lengths: list[int]
    as_first: list[bool] = field(default_factory=list)  # games of two: whether the agent began
    files: list[Path] = field(default_factory=list)  # recordings
    update: int | None = None  # of the checkpoint whose agent played
    num_cut: int = 0  # episodes that were broken off at evaluate.max_steps


def run_session(
    folder: Path,
    make: Make,
    config: Any,
    view: View,
    on_start: Callable[[], None] = lambda: None,
    stop: Stop = lambda: False,
    changed: Mapping[str, Any] | None = None,
    on_row: OnRow | None = None,
    is_new: bool = False,
) -> RunResult:
    """A session of a run, until its end, its target or a signal to stop.

    on_start: called once the run is restored or initialised, before the first update.
    changed, on_row: as of `TrainingSession`.
    is_new: whether its folder was made for it, and goes if it can't begin.
    """
    with (
        claimed(folder) as unclaimed,
        given_back(folder) if is_new else contextlib.nullcontext(),
        stop_on_signals() as signals,
        plain_arithmetic(),
        threads(config.num_threads) as is_exact,
        view as shown,
    ):
        if unclaimed:
            shown.message(unclaimed)
        if not is_exact:
            shown.message(INEXACT)
        signals.announce = shown.message
        saved, losses = -1, 0
        while True:
            try:
                with contextlib.ExitStack() as opened:
                    experiment = opened.enter_context(
                        contextlib.closing(make(config, folder, shown))
                    )
                    session = TrainingSession(experiment, changed=changed, on_row=on_row)
                    opened.enter_context(contextlib.closing(session))
                    result = session.run(lambda: signals.requested or stop(), on_start)
                return replace(result, signal=signals.name)
            except StateLost as error:
                # As a resume would, and as often as there is a newer checkpoint.
                found = session.checkpoints.available()
                newest = found[-1].update if found else 0
                saved, losses = newest, losses + 1 if newest == saved else 1
                if losses > config.engine.max_restarts:
                    raise
                shown.message(f"{error}, which happens automatically")


@contextlib.contextmanager
def threads(num: int) -> Iterator[bool]:
    """Compute with this number of threads: one or two differ in the last bits of results.

    It gives whether products are exact, see `request_exact_products`.

    >>> with threads(1):
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield request_exact_products()
    finally:
        torch.set_num_threads(before)
