"""Runs of any algorithm: started, resumed, evaluated; one session with folder, signals and view."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from raffia.distributed.sharded import StateLost
from raffia.functional.exact import request_exact_products
from raffia.lazy import imported
from raffia.recipes.algorithm import Algorithm
from raffia.recipes.devices import require_defaults
from raffia.recipes.members import best_of
from raffia.recipes.run_folder import (
    claimed,
    create_run,
    find_checkpoint,
    given_back,
    read_record,
    read_run,
    refuse_without_checkpoints,
    refuse_without_own,
    require_config,
    write_config,
)
from raffia.train.config import changes_of
from raffia.train.experiment import Experiment, RunError, Stop
from raffia.train.live_view import make_view
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


def train_run(
    algorithm: Algorithm,
    config: Any,
    folder: str | Path,
    *,
    view: View | None = None,
    preset: str = "",
    own: Sequence[str] = (),
    make: Make | None = None,
    stop: Stop = lambda: False,
) -> RunResult:
    """Train in a new folder, until the end, the target return or a signal to stop.

    view: where progress is shown; None: the terminal.
    preset: the name of the config, for the report.
    own: names of what `make` has besides the config, without which there can be no resume.
    make: replaces the algorithm's.
    stop: asked after each update; once it is true, the run saves and stops.
    Raises RunError if the folder holds a run already, TypeError for what is not a config.

    >>> import io, tempfile
    >>> from raffia.recipes.algorithm import ALGORITHMS
    >>> from raffia.train.view import PlainView
    >>> ilql = ALGORITHMS["ilql"]
    >>> short = replace(ilql.presets["ilql-smoke"], num_updates=2)
    >>> with tempfile.TemporaryDirectory() as there:
    ...     train_run(ilql, short, f"{there}/run", view=PlainView(io.StringIO())).update
    2
    """
    require_config(config, algorithm)
    folder, config = Path(folder), algorithm.settled(config)
    made = make or imported(algorithm.make)
    create_run(folder, config, preset, own, algorithm)
    return _run_session(folder, made, config, view, stop=stop, is_new=True)


def resume_run(
    folder: str | Path,
    algorithm: Algorithm | None = None,
    *,
    config: Any = None,
    view: View | None = None,
    own: Sequence[str] = (),
    make: Make | None = None,
    stop: Stop = lambda: False,
) -> RunResult:
    """Continue from the newest checkpoint, as if the run had never been stopped.

    algorithm: of the run; None: the one that the run names.
    config: replaces the run's, which `read_run(folder)` gives: a longer run, another target.
    own, make, stop: as in `train_run`.
    Raises RunError if the config differs in what has shaped what was learnt.

    >>> import io, tempfile
    >>> from raffia.recipes.algorithm import ALGORITHMS
    >>> from raffia.train.view import PlainView
    >>> ilql = ALGORITHMS["ilql"]
    >>> short = replace(ilql.presets["ilql-smoke"], num_updates=2)
    >>> with tempfile.TemporaryDirectory() as there:
    ...     _ = train_run(ilql, short, f"{there}/run", view=PlainView(io.StringIO()))
    ...     longer = replace(short, num_updates=3)
    ...     resume_run(f"{there}/run", config=longer, view=PlainView(io.StringIO())).update
    3
    """
    folder = Path(folder)
    algorithm, before, made_by = read_record(folder, algorithm)
    if config is not None:
        require_config(config, algorithm)
    refuse_without_own(folder, own, algorithm)
    refuse_without_checkpoints(folder)
    after = algorithm.settled(before if config is None else config)
    changed = changes_of(before, after)
    fixed = [name for name in changed if not name.startswith(algorithm.may_change)]
    if fixed:
        raise RunError(
            f"{', '.join(fixed)} cannot be changed: {folder} was started with other values, which "
            f"shaped what was learnt. Only {', '.join(algorithm.may_change)} can be changed; to "
            "use other values, train again in another folder"
        )

    def on_start() -> None:
        if changed:
            write_config(folder, after, made_by["preset"], own, algorithm)

    made = make or imported(algorithm.make)
    return _run_session(folder, made, after, view, on_start, stop, changed)


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


@plain_arithmetic()
def evaluate_run(
    folder: str | Path,
    algorithm: Algorithm,
    *,
    episodes: int = 100,
    checkpoint: str = "best",
    seed: int = 0,
) -> Evaluation:
    """Play whole episodes with the agent of a run, by the algorithm's `play`.

    checkpoint: "best", "newest", or the number of one.
    Raises RunError if there is none, or if the algorithm has no `play`.

    >>> from raffia.recipes.algorithm import ALGORITHMS
    >>> evaluate_run("runs/chats", ALGORITHMS["ilql"])
    Traceback (most recent call last):
    ...
    raffia.train.experiment.RunError: the algorithm ilql has no `play`, which evaluation needs
    """
    if algorithm.play is None:
        raise RunError(f"the algorithm {algorithm.name} has no `play`, which evaluation needs")
    folder = Path(folder)
    config, found = read_run(folder, algorithm), find_checkpoint(folder, checkpoint)
    with threads(config.num_threads):
        played = imported(algorithm.play)(config, best_of(found), episodes, seed)
    return Evaluation(played.returns, played.lengths, played.as_first, [], found.update)


def _run_session(
    folder: Path,
    make: Make,
    config: Any,
    view: View | None,
    on_start: Callable[[], None] = lambda: None,
    stop: Stop = lambda: False,
    changed: Mapping[str, Any] | None = None,
    is_new: bool = False,
) -> RunResult:
    """A session of a run, until its end, its target or a signal to stop.

    on_start: called once the run is restored or initialised, before the first update.
    changed: settings that are others than before, for the row of the resume.
    is_new: whether its folder was made for it, and goes if it can't begin.
    """
    with (
        claimed(folder) as unclaimed,
        given_back(folder) if is_new else contextlib.nullcontext(),
        stop_on_signals() as signals,
        plain_arithmetic(),
        threads(config.num_threads) as is_exact,
        view or make_view() as shown,
    ):
        if unclaimed:
            shown.message(unclaimed)
        if not is_exact:
            shown.message(INEXACT)
        signals.announce = shown.message
        saved, losses = -1, 0
        while True:
            try:
                with (
                    contextlib.closing(make(config, folder, shown)) as experiment,
                    contextlib.closing(TrainingSession(experiment, changed=changed)) as session,
                ):
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
