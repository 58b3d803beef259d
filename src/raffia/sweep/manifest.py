"""The manifest of a sweep's folder: the plan of all runs, and how they are to be run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from raffia._version import __version__
from raffia.files import foreign_reader, make_folder, parse_json, write_atomically
from raffia.lazy import absolute
from raffia.recipes.algorithm import Algorithm, find_algorithm, recorded_algorithm
from raffia.recipes.scale_config import EngineConfig
from raffia.report.folder import MANIFEST
from raffia.sweep.plan import PlannedRun, Range
from raffia.sweep.search import Search, probes
from raffia.train.config import ConfigError, changes_of, from_json, to_json, with_settings

__all__ = ["MANIFEST", "Manifest", "is_sweep", "read_manifest", "write_manifest"]

RUNS = "runs"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A sweep: its algorithm, the config that its runs share, the runs, and where they run.

    >>> from raffia.recipes.algorithm import ALGORITHMS
    >>> ilql = ALGORITHMS["ilql"]
    >>> runs = [PlannedRun("0", {"num_updates": 3}, 1)]
    >>> made = Manifest.of(ilql, ilql.presets["ilql-smoke"], runs)
    >>> made.config_of(made.runs[0], ilql).num_updates, made.config_of(made.runs[0], ilql).seed
    (3, 1)
    """

    algorithm: str
    config: Mapping[str, Any]  # all settings, as JSON
    runs: tuple[PlannedRun, ...]
    reference: str = ""  # where an algorithm from outside the package was found
    preset: str = ""
    workers: int = 1
    engine: EngineConfig = EngineConfig(name="process")
    devices: tuple[str, ...] = ()  # of the workers, in turn; none: as the settings have it
    errors: Mapping[str, str] = field(default_factory=dict)  # by run: what ended it
    search: Search | None = None  # whose trials become runs as those before them end

    @classmethod
    def of(
        cls, algorithm: Algorithm, base: Any, runs: Sequence[PlannedRun], **more: Any
    ) -> Manifest:
        """The manifest of these runs, each with its settings instead of the base's.

        Raises ConfigError, with the run's name, for settings that are refused, and for those of
        another run: the same result twice would count as two samples.
        """
        made = cls(
            algorithm=algorithm.name,
            reference=algorithm.reference,
            config=to_json(_absolute(base, algorithm)),
            runs=(),
            **more,
        )
        made, names = made.with_runs(runs, algorithm), dict[str, str]()
        for run in made.runs:
            first = names.setdefault(json.dumps(run.changed, sort_keys=True), run.name)
            if first != run.name:
                raise ConfigError(
                    f"run {run.name}: its settings and seed equal those of run {first}: leave one "
                    "of the two out"
                )
        return made

    def with_runs(self, runs: Sequence[PlannedRun], algorithm: Algorithm) -> Manifest:
        """The manifest with more runs behind those that it has; ConfigError as of `of`."""
        base, planned = from_json(algorithm.config, self.config), [*self.runs]
        for run in runs:
            try:
                config = with_settings(base, {**run.settings, "seed": run.seed})
                config = _absolute(algorithm.settled(config, base), algorithm)
            except (ConfigError, ValueError) as error:
                raise ConfigError(f"run {run.name}: {error}") from None
            planned.append(replace(run, changed=changes_of(base, config)))
        return replace(self, runs=tuple(planned))

    @property
    def num_runs(self) -> int:
        """The number of all runs of the sweep, including those that are not planned yet."""
        return len(self.runs) if self.search is None else self.search.num_runs

    def config_of(self, run: PlannedRun, algorithm: Algorithm) -> Any:
        """The whole config of a run."""
        return with_settings(from_json(algorithm.config, self.config), run.changed or {})

    def configs(self, algorithm: Algorithm) -> list[Any]:
        """The configs of all runs; where none is planned yet, the one that they share."""
        base = from_json(algorithm.config, self.config)
        return [with_settings(base, run.changed or {}) for run in self.runs] or [base]

    def named_outside(self, algorithm: Algorithm) -> dict[str, list[str]]:
        """The parts that `Algorithm.named_outside` gives, each with its names in all runs."""
        later = [] if self.search is None else probes(self.search)  # have each choice
        configs = self.with_runs(later, algorithm).configs(algorithm)
        found = [algorithm.named_outside(config) for config in configs]
        parts = [part for part in algorithm.names if any(part in named for named in found)]
        return {p: list(dict.fromkeys(one[p] for one in found if p in one)) for p in parts}

    def find_algorithm(self, given: str = "") -> Algorithm:
        """The algorithm; `given` names one that is not an installed package."""
        if given:
            return find_algorithm(given)
        return recorded_algorithm({"algorithm": self.algorithm, "reference": self.reference})


def _absolute(config: Any, algorithm: Algorithm) -> Any:
    """The config with whole paths of the files that it names: workers may run in another folder."""
    parts = {part: absolute(name) for part, name in algorithm.named_outside(config).items()}
    return algorithm.with_named(config, parts)[0]


def is_sweep(folder: str | Path) -> bool:
    """Whether a folder is a sweep's.

    >>> is_sweep("no such folder")
    False
    """
    return (Path(folder) / MANIFEST).is_file()


def write_manifest(folder: str | Path, manifest: Manifest) -> None:
    """Write the manifest atomically, and make the folder if it does not exist.

    >>> import tempfile
    >>> made = Manifest(algorithm="ilql", config={}, runs=())
    >>> with tempfile.TemporaryDirectory() as there:
    ...     write_manifest(Path(there), made)
    ...     is_sweep(there)
    True
    """
    data = {"raffia": __version__, **asdict(manifest)}
    make_folder(Path(folder))
    write_atomically(Path(folder) / MANIFEST, json.dumps(data, indent=1).encode())


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of a sweep; DamagedFileError or ConfigError if it can't be read.

    >>> import tempfile
    >>> made = Manifest(algorithm="ilql", config={}, runs=(PlannedRun("0", {"x": 1}, 2),))
    >>> with tempfile.TemporaryDirectory() as there:
    ...     write_manifest(Path(there), made)
    ...     read_manifest(there) == made
    True
    """
    path = Path(folder) / MANIFEST
    data: Any = parse_json(path, path.read_bytes())
    with foreign_reader(path, "it is not the manifest of a sweep"):
        data.pop("raffia")
        runs = tuple(PlannedRun(**_plain_name(run)) for run in data.pop("runs"))
        engine, devices = EngineConfig(**data.pop("engine")), tuple(data.pop("devices"))
        search = _search(data.pop("search", None))
        return Manifest(runs=runs, engine=engine, devices=devices, search=search, **data)


def _search(data: dict[str, Any] | None) -> Search | None:
    if data is None:
        return None
    ranges = {
        name: Range(**kind) if isinstance(kind, dict) else kind
        for name, kind in data.pop("ranges").items()
    }
    seeds, scores = tuple(data.pop("seeds")), tuple(data.pop("scores"))
    return Search(ranges=ranges, seeds=seeds, scores=scores, **data)


def _plain_name(run: dict[str, Any]) -> dict[str, Any]:
    """A run whose name leads nowhere else; a sweep's folder may come from elsewhere."""
    name = run["name"]
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is not the name of a run folder")
    return run
