"""Nested dataclasses from the command line, JSON and YAML, and into JSON. Imports no torch.

A config is a dataclass whose fields are int, float, bool, str, Literal, tuples of these, one of
them or None, or further dataclasses. A setting has one name everywhere: search.num_simulations is
`--search.num_simulations 25` on the command line and `{"search": {"num_simulations": 25}}` in a
file. Files may leave settings out.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from raffia.files import DEEPEST, DamagedFileError, brief, parse_json
from raffia.train.flags import grouped, print_help, read_flag
from raffia.train.settings import (
    AnyConfig,
    ConfigError,
    as_json,
    nearest_name,
    setting_names,
    settings,
    type_hints,
    unknown_setting,
    value_from_json,
)

__all__ = [
    "AnyConfig",
    "ConfigError",
    "from_command_line",
    "from_json",
    "nearest_name",
    "read_config",
    "setting_names",
    "to_json",
]

Config = TypeVar("Config", bound=AnyConfig)
LARGEST = 1_000_000  # bytes of a file
MOST_VALUES = 10_000
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")


def to_json(config: AnyConfig) -> dict[str, Any]:
    """Convert a config to JSON values; numbers that JSON lacks ("inf", "nan") become strings.

    >>> from raffia.algorithms.efficientzero.config import SearchConfig
    >>> to_json(SearchConfig(num_simulations=25))["temperatures"]
    [1.0, 0.5, 0.25]
    """
    return {name: _value_to_json(getattr(config, name)) for name in type_hints(type(config))}


def from_json(kind: type[Config], data: object, *, base: Config | None = None) -> Config:
    """A config from JSON; settings that it leaves out are as in `base`, or by default.

    >>> from raffia.recipes.efficientzero.config import EfficientZeroRun
    >>> run = from_json(EfficientZeroRun, {"env": {"id": "Acrobot-v1"}, "seed": 3})
    >>> run.env.id, run.env.num_envs, run.seed
    ('Acrobot-v1', 8, 3)
    >>> from_json(EfficientZeroRun, to_json(run)) == run
    True
    """
    names = setting_names(kind)
    return _config_from_json(kind, _with_new_names(kind, data), base, "", names)


def _with_new_names(kind: type[Config], data: object) -> object:
    """Rename settings of earlier versions in the data to their present names, by `kind.RENAMED`.

    RENAMED: by section and name, the new name.
    """
    renamed: Mapping[tuple[str, str], str] = getattr(kind, "RENAMED", {})
    for (section, old), new in renamed.items():
        part = data.get(section) if isinstance(data, Mapping) else None
        if isinstance(data, Mapping) and isinstance(part, Mapping) and old in part:
            part = {new if name == old else name: value for name, value in part.items()}
            data = {**data, section: part}
    return data


def changes_of(before: Config, after: Config) -> dict[str, Any]:
    """The settings that differ, with their values after the change, as JSON values.

    >>> from raffia.recipes.efficientzero.config import EfficientZeroRun
    >>> changes_of(EfficientZeroRun(), EfficientZeroRun(seed=1))
    {'seed': 1}
    """
    old, new = to_json(before), to_json(after)
    names = setting_names(type(before))
    return {name: _at(new, name) for name in names if _at(old, name) != _at(new, name)}


def with_settings(config: Config, values: Mapping[str, object]) -> Config:
    """The config with new values, given as JSON values by the dotted names of settings.

    >>> from raffia.recipes.efficientzero.presets import PRESETS
    >>> with_settings(PRESETS["smoke"], {"search.num_simulations": 50}).search.num_simulations
    50
    """
    data: dict[str, Any] = {}
    for name, value in values.items():
        *outer, last = name.split(".")
        table = data
        for part in outer:
            table = table.setdefault(part, {})
        table[last] = value
    return from_json(type(config), data, base=config)


def _at(data: object, name: str) -> object:
    for part in name.split("."):
        assert isinstance(data, dict)
        data = data[part]
    return data


def read_config(kind: type[Config], path: str | Path, *, base: Config | None = None) -> Config:
    """A config from a .json, .yaml or .yml file; what it leaves out is as `from_json` has it.

    The config.json of a run may be given: its entries under "run" are of that run and left aside.

    >>> import pathlib, tempfile
    >>> from raffia.recipes.efficientzero.config import EfficientZeroRun
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "mine.yaml")
    ...     written = file.write_text("optimizer: {name: adamw, learning_rate: 1e-3}")
    ...     read_config(EfficientZeroRun, file).optimizer.learning_rate
    0.001
    """
    path = Path(path)
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise ConfigError(f"{path} must end with .json, .yaml or .yml")
    try:
        if path.stat().st_size > LARGEST:
            raise ConfigError(f"{path} is too large for a config: more than {LARGEST:,} bytes")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    data = _parse_json(text, path) if path.suffix == ".json" else _parse_yaml(text, path)
    if isinstance(data, dict) and "run" not in type_hints(kind):
        data = {name: value for name, value in data.items() if name != "run"}
    try:
        is_empty = data is None and path.suffix != ".json"  # an empty file is YAML, too
        return from_json(kind, {} if is_empty else data, base=base)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def from_command_line(
    default: Config, argv: Sequence[str], *, prog: str, description: str
) -> Config:
    """The config that these words of a command line describe: `--config FILE` changes the default,
    other flags change both.

    Flags are `--name value`, `--name=value`, `--name` and `--no_name` for what is true or false,
    `--name one two` for tuples, and `--name none`; hyphens may stand for underscores. With --help
    among the words it prints all settings and leaves.

    >>> from raffia.recipes.efficientzero.config import EfficientZeroRun
    >>> words = ["--search.num_simulations", "25", "--no_compile"]
    >>> run = from_command_line(EfficientZeroRun(), words, prog="train", description="")
    >>> run.search.num_simulations, run.compile
    (25, False)
    """
    if "--help" in argv or "-h" in argv:
        print_help(default, prog, description)
        raise SystemExit(0)
    kind, given = type(default), grouped(argv)
    for flag, words in given:
        if flag == "config":
            if len(words) != 1:
                raise ConfigError("--config needs a file: --config FILE.json or FILE.yaml")
            default = read_config(kind, words[0], base=default)
    hints = dict(settings(kind))
    flags = [(flag, words) for flag, words in given if flag != "config"]
    return with_settings(default, dict(read_flag(flag, words, hints) for flag, words in flags))


def _value_to_json(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(value)
    if isinstance(value, tuple):
        return [_value_to_json(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _config_from_json(
    kind: type[Config], data: object, base: Config | None, path_here: str, names: Sequence[str]
) -> Config:
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{path_here or 'a config'} must be a table of settings; got {as_json(data)}"
        )
    hints, values = type_hints(kind), {}
    for name, value in data.items():
        path = f"{path_here}.{name}" if path_here else str(name)
        if name not in hints:
            raise _unknown_entry(path, str(name), path_here, names)
        hint = hints[name]
        if is_dataclass(hint) and isinstance(hint, type):
            part = None if base is None else getattr(base, name)
            values[name] = _config_from_json(hint, value, part, path, names)
        else:
            values[name] = value_from_json(hint, value, path)
    try:
        return kind(**values) if base is None else replace(base, **values)
    except ValueError as error:
        raise ConfigError(f"{path_here}: {error}" if path_here else str(error)) from None


def _unknown_entry(path: str, name: str, path_here: str, names: Sequence[str]) -> ConfigError:
    if path in names and "." in name:  # right, but files have tables
        outer, _, inner = name.rpartition(".")
        where = f"in {path_here}, " if path_here else ""
        return ConfigError(
            f"{where}{name} is written {outer.replace('.', ': {')}: {{{inner}: ...}}"
        )
    return unknown_setting(path, names)


def _parse_json(text: str, path: Path) -> object:
    try:
        return parse_json(path, text)
    except DamagedFileError as error:
        raise ConfigError(str(error)) from None


def _parse_yaml(text: str, path: Path) -> object:
    import yaml

    try:
        depth = 0
        for event in yaml.parse(text, yaml.SafeLoader):  # what follows is recursive, and slow
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise ConfigError(f"{path} is nested more than {DEEPEST} levels deep")
        node = yaml.compose(text, yaml.SafeLoader)
        if node is None:
            return None
        _fix_yaml(node, path, set())
        _refuse_large(node, path)
        return yaml.constructor.SafeConstructor().construct_document(node)
    except ConfigError:
        raise
    except Exception as error:  # the library raises all kinds, at numbers and dates that are none
        raise ConfigError(f"{path} is not valid YAML: {brief(error)}") from None


def _refuse_large(top: Any, path: Path) -> None:
    """Aliases make much of little: nine lines may stand for billions of values, or for a loop."""
    sizes: dict[int, int] = {}  # of each node, with all that its aliases stand for; 0: begun

    def size(node: Any) -> int:
        if id(node) in sizes:
            if not sizes[id(node)]:
                raise ConfigError(f"{path} contains an alias of a value that contains it")
            return sizes[id(node)]
        sizes[id(node)] = 0
        parts = node.value if isinstance(node.value, list) else []
        inner = [one for part in parts for one in (part if isinstance(part, tuple) else (part,))]
        sizes[id(node)] = found = 1 + sum([size(one) for one in inner])
        return found

    if size(top) > MOST_VALUES:
        raise ConfigError(f"{path} expands to more than {MOST_VALUES:,} values through its aliases")


def _fix_yaml(node: Any, path: Path, visited: set[int]) -> None:
    """Read YAML as YAML 1.2: `1e-3` is a number, and a name stands once."""
    if id(node) in visited:  # an alias, maybe of what it lies in
        return
    visited.add(id(node))
    parts: list[Any] = []
    if node.id == "mapping":
        names = Counter(name.value for name, _ in node.value if isinstance(name.value, str))
        for name, times in names.items():
            if times > 1:
                raise ConfigError(f"{path}: {name} occurs twice")
        parts = [value for _, value in node.value]
    elif node.id == "sequence":
        parts = node.value
    elif not node.style and _EXPONENT.match(node.value):
        node.tag = "tag:yaml.org,2002:float"
    for part in parts:
        _fix_yaml(part, path, visited)
