"""A sweep in one call: planned, written and run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from raffia.environment import usable_cores
from raffia.files import make_folder
from raffia.recipes.algorithm import Algorithm
from raffia.recipes.run_folder import algorithm_of, claimed, require_config
from raffia.recipes.scale_config import EngineConfig
from raffia.sweep.manifest import Manifest, is_sweep, read_manifest, write_manifest
from raffia.sweep.plan import Range, plan_runs
from raffia.sweep.progress import SweepView
from raffia.sweep.search import Search, probes, require_optuna
from raffia.sweep.session import SweepResult, SweepSession, make_sweep_engine, room_of
from raffia.train.config import ConfigError
from raffia.train.experiment import RunError

PROCESSES = EngineConfig(name="process")


def sweep(
    config: Any,
    folder: str | Path,
    *,
    algorithm: Algorithm | None = None,
    seeds: Sequence[int] | None = None,
    grid: Mapping[str, Sequence[Any]] | None = None,
    ranges: Mapping[str, Range | Sequence[Any]] | None = None,
    num_draws: int = 0,
    num_trials: int | None = None,
    sweep_seed: int = 0,
    preset: str = "",
    workers: int = 0,
    engine: EngineConfig = PROCESSES,
    devices: Sequence[str] = (),
    view: SweepView | None = None,
) -> SweepResult:
    """Train a run for each seed, at each point of a grid of settings, or at drawn settings.

    config: settings of all runs, each of which has at most the threads that its worker has cores.
    folder: a new one. RunError if it has a sweep: `SweepSession(folder, algorithm).run()` goes on,
        with `trusted` names of own environments and networks.
    algorithm: one from outside the package; None: the one whose settings these are.
    seeds: None: that of the settings.
    grid: values of settings, by name; all combinations are trained.
    ranges, num_draws: so many draws of settings. num_trials: so many that Optuna suggests instead.
    workers: runs at a time; 0: as many as have room.
    devices: one worker for each.

    >>> import io, tempfile
    >>> from dataclasses import replace
    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> short = replace(ILQL_PRESETS["ilql-smoke"], num_updates=2)
    >>> here, rates = EngineConfig(name="inline"), {"optimizer.learning_rate": [1e-3, 2e-3]}
    >>> quiet = SweepView(io.StringIO())
    >>> with tempfile.TemporaryDirectory() as home:
    ...     sweep(short, f"{home}/sweep", grid=rates, engine=here, view=quiet).failed
    []
    """
    algorithm, folder = algorithm or algorithm_of(config), Path(folder)
    require_config(config, algorithm)
    view = view or SweepView()
    config = algorithm.settled(config, tell=view.message)
    config = with_fair_threads(config, workers or len(devices) or 1)
    manifest = planned(
        algorithm,
        config,
        seeds=[config.seed] if seeds is None else seeds,
        grid=grid,
        ranges=ranges,
        num_draws=num_draws,
        num_trials=num_trials,
        sweep_seed=sweep_seed,
        preset=preset,
    )
    manifest = placed(manifest, algorithm, workers=workers, engine=engine, devices=devices)
    return begin(folder, algorithm, manifest, view).run()


def with_fair_threads(config: Any, workers: int) -> Any:
    """The config with no more threads than each of so many workers has cores.

    >>> from raffia.recipes.efficientzero.presets import PRESETS
    >>> with_fair_threads(PRESETS["smoke"], 1000).num_threads
    1
    """
    part = max(1, usable_cores() // workers)
    return replace(config, num_threads=min(config.num_threads, part))


def planned(
    algorithm: Algorithm,
    base: Any,
    *,
    seeds: Sequence[int],
    grid: Mapping[str, Sequence[Any]] | None = None,
    ranges: Mapping[str, Range | Sequence[Any]] | None = None,
    num_draws: int = 0,
    num_trials: int | None = None,
    sweep_seed: int = 0,
    preset: str = "",
) -> Manifest:
    """The manifest of such a sweep; the arguments are as in `sweep`, and `base` is settled."""
    if isinstance(seeds, int):
        raise TypeError(f"seeds={seeds} must be several, such as range({seeds}) or [{seeds}]")
    if num_trials is None:
        runs = plan_runs(seeds, grid, ranges, num_draws, sweep_seed)
        return Manifest.of(algorithm, base, runs, preset=preset)
    if num_draws or grid:
        raise ConfigError(
            "--optuna chooses the values itself and cannot be combined with --random and --grid: "
            "give choices as ranges, such as --ranges env.frame_stack=1,4 (in Python num_trials; "
            "num_draws and grid; ranges={'env.frame_stack': [1, 4]})"
        )
    require_optuna()
    search = Search(num_trials=num_trials, ranges=ranges or {}, seeds=(*seeds,), seed=sweep_seed)
    manifest = Manifest.of(algorithm, base, [], preset=preset, search=search)
    manifest.with_runs(probes(search), algorithm)  # refuses settings at the ends of the ranges
    return manifest


def placed(
    manifest: Manifest,
    algorithm: Algorithm,
    *,
    workers: int = 0,
    engine: EngineConfig,
    devices: Sequence[str] = (),
) -> Manifest:
    """The manifest with an engine and workers: 0 are one for each device, or as many as have room.

    A new search has as many open trials as its workers have room for.
    """
    manifest = replace(manifest, devices=(*devices,), engine=engine)
    workers = workers or len(devices) or room_of(manifest, algorithm, usable_cores())
    workers = 1 if engine.name == "inline" else min(workers, manifest.num_runs)
    search = manifest.search
    if search is not None and not manifest.runs:
        search = replace(search, lag=-(-workers // len(search.seeds)))
    return replace(manifest, workers=workers, search=search)


def begin(
    folder: Path,
    algorithm: Algorithm,
    manifest: Manifest,
    view: SweepView,
    before: Manifest | None = None,
    trusted: Collection[str] = (),
) -> SweepSession:
    """A session of a sweep; a manifest that is new is written once there are workers for it.

    before: the manifest that the folder has; None: it has none, or RunError is raised.
    trusted: of a manifest that the folder has; see `SweepSession`.
    """
    if before is None:
        trusted = [name for of in manifest.named_outside(algorithm).values() for name in of]
    engine = make_sweep_engine(manifest, algorithm, view.message)
    if manifest != before:
        make_folder(folder)
        with claimed(folder):  # workers of a sweep that is running read its manifest
            if (read_manifest(folder) if is_sweep(folder) else None) != before:
                named = f" --algorithm {algorithm.reference}" if algorithm.reference else ""
                raise RunError(
                    f"{folder} holds another sweep, or one that another process began meanwhile: "
                    f"continue it with `raffia resume {folder}{named}`, or give another folder"
                )
            write_manifest(folder, manifest)
    return SweepSession(folder, algorithm, view=view, engine=engine, trusted=trusted)
