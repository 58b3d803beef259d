"""Groups of runs that differ only in the seed, and how their configurations differ."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from raffia.report.folder import Run

_SHORT = 44  # characters of a label


@dataclass(frozen=True)
class Group:
    """The runs of one configuration.

    >>> Group("A", ()).runs
    ()
    """

    label: str
    runs: tuple[Run, ...]
    settings: Mapping[str, Any] | None = None  # flat, without the seed; None: no file has them


class Groups(tuple[Group, ...]):
    """The configurations of a page, in the order in which each came first."""

    @cached_property
    def runs(self) -> list[Run]:
        """The runs of all groups."""
        return [run for group in self for run in group.runs]


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names.

    >>> flat({"seed": 0, "env": {"id": "x", "sizes": [1, 2]}})
    {'seed': 0, 'env.id': 'x', 'env.sizes': [1, 2]}
    """
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def written(value: Any) -> str:
    """A setting as a page shows it.

    >>> written([1, 0.5]), written(True), written("grey"), written(None)
    ('1, 0.5', 'yes', 'grey', 'none')
    """
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        big = isinstance(value, int) and abs(value) >= 10_000
        return f"{value:,}" if big else f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, list):
        return ", ".join([written(one) for one in value]) or "none"
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def grouped(runs: Sequence[Run]) -> Groups:
    """The runs by configuration, in the order in which each came first.

    >>> from pathlib import Path
    >>> configs = [{"seed": 0, "size": 1}, {"seed": 1, "size": 1}, {"seed": 0, "size": 2}]
    >>> runs = [Run(Path("x"), config) for config in configs]
    >>> [(group.label, len(group.runs)) for group in grouped(runs)]
    [('size=1', 2), ('size=2', 1)]
    """
    members: dict[str, list[Run]] = {}
    for run in runs:
        settings = _compared(run)
        # A run without a config stands for itself: nothing tells that it is like another.
        key = json.dumps(settings, sort_keys=True) if settings else f"no config: {run.folder}"
        members.setdefault(key, []).append(run)
    groups = [Group("", tuple(equal), _compared(equal[0])) for equal in members.values()]
    labels = _labels(groups)
    return Groups([replace(one, label=label) for label, one in zip(labels, groups, strict=True)])


def _compared(run: Run) -> dict[str, Any] | None:
    """What tells a run's configuration from others: its algorithm, and its settings without the
    seed; None where no file has them. Of cuda:1 it is cuda: the workers of a sweep have a card
    each.
    """
    settings = flat(run.config)
    settings.pop("seed", None)
    if "device" in settings:
        settings["device"] = str(settings["device"]).partition(":")[0]
    return {"algorithm": run.algorithm, **settings} if settings else None


def differing(groups: Sequence[Group]) -> list[str]:
    """Names of the settings in which the groups differ.

    >>> differing([Group("A", (), {"x": 1, "y": 2}), Group("B", (), {"x": 1, "y": 3, "z": 0})])
    ['y', 'z']
    """
    known = [group.settings for group in groups if group.settings is not None]
    names = list(dict.fromkeys(name for settings in known for name in settings))
    missing = object()
    return [
        name
        for name in names
        if any(settings.get(name, missing) != known[0].get(name, missing) for settings in known)
    ]


def leading(groups: Sequence[Group]) -> list[Run]:
    """The best run of each configuration, for what is shown of one run only.

    >>> leading([])
    []
    """
    return [max(group.runs, key=_best) for group in groups]


def _best(run: Run) -> float:
    return run.best.score if run.best else -math.inf


def preset_values(run: Run, presets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """The preset's values of the settings that were changed; None if they are unknown.

    The run's own record counts ("changed" beside "preset": name -> the preset's value), for presets
    may be others by now; else `presets`, whole configs by their names.

    >>> from pathlib import Path
    >>> run = Run(Path("x"), {"seed": 1, "size": 2}, {"preset": "small"})
    >>> preset_values(run, {"small": {"seed": 0, "size": 1}}), preset_values(run, {})
    ({'size': 1}, None)
    >>> own = Run(Path("x"), {"size": 2}, {"preset": "small", "reference": "dqn.py:dqn"})
    >>> preset_values(own, {"small": {"seed": 0, "size": 1}})
    """
    recorded = run.about.get("changed")
    if isinstance(recorded, dict):
        return flat(recorded)
    if run.about.get("reference") or run.preset not in presets:  # another algorithm's of this name
        return None
    settings, missing = flat(run.config), object()
    preset = {name: value for name, value in flat(presets[run.preset]).items() if name != "seed"}
    # tuples became lists on their way through JSON
    preset = {name: list(v) if isinstance(v, tuple) else v for name, v in preset.items()}
    return {n: v for n, v in preset.items() if n in settings and settings.get(n, missing) != v}


def _labels(groups: Sequence[Group]) -> list[str]:
    if len(groups) == 1:
        run = groups[0].runs[0]
        return [run.preset or run.env or run.name]
    names = differing(groups)
    presets = [group.runs[0].preset for group in groups]
    if all(presets) and len(set(presets)) == len(groups):
        return presets
    labels = []
    for group in groups:
        settings = group.settings
        if settings is None:
            labels.append(f"{group.runs[0].name} (no config)")
            continue
        parts = [f"{n.rpartition('.')[2]}={written(settings[n])}" for n in names if n in settings]
        labels.append(", ".join(parts[:2]))
    unique = len(set(labels)) == len(labels)
    if unique and all(label and len(label) <= _SHORT for label in labels):
        return labels
    return [f"{_letter(i)}: {group.runs[0].name}" for i, group in enumerate(groups)]


def _letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else f"A{index}"
