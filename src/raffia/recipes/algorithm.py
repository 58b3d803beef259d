"""`Algorithm`: what run folders and commands know of an algorithm; `ALGORITHMS`: those built in."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from raffia._version import __version__
from raffia.hints import did_you_mean
from raffia.lazy import imported, is_outside, named
from raffia.recipes.efficientzero.config import MAY_CHANGE as EFFICIENTZERO_MAY_CHANGE
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.recipes.efficientzero.presets import PRESETS, SUMMARIES
from raffia.recipes.ilql.config import MAY_CHANGE as ILQL_MAY_CHANGE
from raffia.recipes.ilql.config import ILQLRun
from raffia.recipes.ilql.presets import ILQL_PRESETS, ILQL_SUMMARIES
from raffia.train.config import ConfigError, with_settings

if TYPE_CHECKING:
    from pathlib import Path

    from raffia.tensordict.tensordict import TensorDict
    from raffia.train.evaluate import Episodes
    from raffia.train.experiment import Experiment
    from raffia.train.view import View


Config = TypeVar("Config")
NEEDED = ("title", "seed", "device", "num_threads")  # of every algorithm's settings


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """An algorithm by its settings and functions, as `raffia train` and run folders use it.

    A function may be given as "module:name", which is imported when it is first called.

    name: on the command line and in config.json.
    config: the dataclass of its settings, all with defaults. It has at least `title` (such as "DQN
        on CartPole-v1"), `seed`, `device` and `num_threads`; TypeError if it lacks one.
    make: from settings, the run's folder and a view to the `Experiment`.
    play: from settings, a learner's state (of a population the best member's), a number of episodes
        and a seed to `Episodes`, for `evaluate`; None: evaluated another way, or not at all.
    uses: the module with an `evaluate` and a `load_agent` of its own; "": by `play`.
    parts: keyword arguments of `train` that `make` takes; True: no settings hold it, so that a
        resume needs the same.
    names: settings, by the `parts` which they can name as "file.py:name" or "module:name"; `make`
        gets such a part, too, where no resume needs it.
    length: name of the setting with the length of a run.
    may_change: names of settings, or beginnings of them, that a resumed run may have other values
        of; all others shaped what was learnt.
    settle: a function as `settled`.
    commands: the class of its part of the command line; see `raffia.cli.algorithm`.
    reference: where one from outside the package was found, as "module:name" or "file.py:name".

    >>> ALGORITHMS["ilql"].title, ALGORITHMS["ilql"].presets["wordle"].task
    ('ILQL', 'wordle')
    """

    name: str
    config: type[Any]
    make: str | Callable[[Any, Path, View], Experiment]
    play: str | Callable[[Any, TensorDict, int, int], Episodes | None] | None = None
    uses: str = ""
    parts: Mapping[str, bool] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    title: str = ""  # in sentences; the name if none is given
    summary: str = ""  # one line of help
    presets: Mapping[str, Any] = field(default_factory=dict)
    summaries: Mapping[str, str] = field(default_factory=dict)  # of the presets
    length: str = "num_env_steps"
    may_change: tuple[str, ...] = (
        *("num_updates", "num_env_steps", "target_return", "evaluate", "checkpoint", "device"),
        *("num_threads", "compile"),
    )
    settle: str | Callable[..., Any] | None = None
    commands: str = "raffia.cli.algorithm:AlgorithmCommands"
    reference: str = ""

    def __post_init__(self) -> None:
        if not is_dataclass(self.config):
            raise TypeError(
                f"config={self.config!r} is not a dataclass with the settings as fields"
            )
        names = {setting.name for setting in fields(self.config)}
        lacks = [name for name in NEEDED if name not in names and not hasattr(self.config, name)]
        if lacks:
            raise TypeError(
                f"{self.config.__name__} has no {' and no '.join(lacks)}, which every run needs: "
                "title: str (a property will do), seed: int = 0, device: str = 'cpu', "
                "num_threads: int = 1"
            )
        if not self.title:
            object.__setattr__(self, "title", self.name)

    def length_of(self, config: Any) -> int:
        """The length of a run with these settings, in the unit that `length` names."""
        return int(self._value(config, self.length))

    def _value(self, config: Any, setting: str) -> Any:
        return functools.reduce(getattr, setting.split("."), config)

    def with_named(self, config: Config, parts: Mapping[str, Any]) -> tuple[Config, dict[str, Any]]:
        """The config with the names of parts that its settings can hold, and the other parts.

        parts: None for those that are not given.

        >>> one = ALGORITHMS["efficientzero"]
        >>> config, others = one.with_named(one.config(), {"make_env": "own.py:Own"})
        >>> config.env.id, others
        ('own.py:Own', {})
        """
        others = {part: given for part, given in parts.items() if given is not None}
        held = {part: name for part, name in others.items() if isinstance(name, str)}
        held = {part: name for part, name in held.items() if part in self.names}
        found: Any = config
        found = with_settings(found, {self.names[part]: name for part, name in held.items()})
        needed = [part for part in held if self.parts[part]]
        return found, {part: given for part, given in others.items() if part not in needed}

    def named_outside(self, config: Any) -> dict[str, str]:
        """The parts that settings name by a file, or by a module of no installed package.

        >>> one = ALGORITHMS["efficientzero"]
        >>> one.named_outside(with_settings(one.config(), {"env.id": "own.py:Own"}))
        {'make_env': 'own.py:Own'}
        """
        found = {part: str(self._value(config, setting)) for part, setting in self.names.items()}
        return {part: name for part, name in found.items() if is_outside(name)}

    def refuse_unnamed(self, config: Any, given: Collection[str]) -> None:
        """Raise ConfigError if settings name code that may come from elsewhere, and the caller has
        not named it himself.

        given: the parts that he has named, or given otherwise.

        >>> one = ALGORITHMS["efficientzero"]
        >>> config = with_settings(one.config(), {"env.id": "own.py:Own"})
        >>> one.refuse_unnamed(config, ["make_env"])
        >>> one.refuse_unnamed(config, [])
        Traceback (most recent call last):
        ...
        raffia.train.settings.ConfigError: its env.id is own.py:Own, which is not part of an
        installed package. If you trust it, name it: --env own.py:Own, in Python
        make_env='own.py:Own'
        """
        for part, name in self.named_outside(config).items():
            if part not in given:
                raise ConfigError(
                    f"its {self.names[part]} is {name}, which is not part of an installed package. "
                    f"If you trust it, name it: {flag_of(part)} {name}, in Python {part}={name!r}"
                )

    def settled(self, config: Config, like: Config | None = None, **more: Any) -> Config:
        """The settings, with values for all that they leave open.

        like: settings of a run with the same data and networks, such as the run that is resumed.
        more: `parts`, and `tell`, which gets a line now and then while files are read.
        """
        if self.settle is None:
            return config
        settled: Config = imported(self.settle)(config, like, **more)
        return settled


ALGORITHMS = {
    "efficientzero": Algorithm(
        name="efficientzero",
        title="EfficientZero",
        summary="plans with a learned model; MuZero is among its presets",
        config=EfficientZeroRun,
        make="raffia.recipes.efficientzero.experiment:EfficientZeroExperiment",
        uses="raffia.recipes.efficientzero.api",
        parts={"make_env": True, "networks": True},
        names={"make_env": "env.id", "networks": "networks"},
        presets=PRESETS,
        summaries=SUMMARIES,
        length="collect.num_env_steps",
        may_change=EFFICIENTZERO_MAY_CHANGE,
        commands="raffia.cli.efficientzero:EfficientZeroCommands",
    ),
    "ilql": Algorithm(
        name="ilql",
        title="ILQL",
        summary="offline RL on logged dialogues with rewards",
        config=ILQLRun,
        make="raffia.recipes.ilql.experiment:ILQLExperiment",
        uses="raffia.recipes.ilql.api",
        parts={"make_env": False},
        names={"make_env": "evaluate.env"},
        settle="raffia.recipes.ilql.experiment:settled",
        presets=ILQL_PRESETS,
        summaries=ILQL_SUMMARIES,
        length="num_updates",
        may_change=ILQL_MAY_CHANGE,
        commands="raffia.cli.ilql:ILQLCommands",
    ),
}


def flag_of(part: str) -> str:
    """The flag of the command line that names a part of a run.

    >>> flag_of("make_env"), flag_of("networks")
    ('--env', '--networks')
    """
    return f"--{part.removeprefix('make_')}"


def find_algorithm(name: str) -> Algorithm:
    """The algorithm of this name, or from outside the package as "module:name" or "file.py:name".

    Modules are looked for in the current folder, too. Raises ConfigError if there is none.

    >>> find_algorithm("ilql").config.__name__
    'ILQLRun'
    >>> find_algorithm("iqll")
    Traceback (most recent call last):
    ...
    raffia.train.settings.ConfigError: there is no algorithm 'iqll'; did you mean ilql?
    """
    if ":" not in name:
        if name in ALGORITHMS:
            return ALGORITHMS[name]
        if name.endswith(".py"):
            raise ConfigError(f"which algorithm of {name}? Name the record in it: {name}:NAME")
        raise ConfigError(f"there is no algorithm {name!r}{_near(name)}")
    found = given_name(name, "a raffia.recipes.Algorithm")
    if not isinstance(found, Algorithm):
        raise ConfigError(f"{name} is a {type(found).__name__}, not a raffia.recipes.Algorithm")
    return replace(found, reference=name)


def recorded_algorithm(made_by: Mapping[str, Any]) -> Algorithm:
    """The algorithm that a run's config.json names under "run".

    A run may come from elsewhere, so what it names is imported only from packages that are
    installed: a file of Python, or a module of the current folder, the user has to name again.
    Raises ConfigError if it is none of `ALGORITHMS` and can't be imported so.

    >>> recorded_algorithm({"algorithm": "ilql"}).title
    'ILQL'
    >>> recorded_algorithm({"algorithm": "dqn", "reference": "dqn.py:dqn"})
    Traceback (most recent call last):
    ...
    raffia.train.settings.ConfigError: its algorithm is dqn.py:dqn, which is not part of an
    installed package. If you trust it, name it: --algorithm dqn.py:dqn
    """
    name, reference = str(made_by["algorithm"]), str(made_by.get("reference", ""))
    if not reference:
        if name in ALGORITHMS:
            return ALGORITHMS[name]
        raise ConfigError(
            f"it belongs to the algorithm {name!r}, but the known ones are "
            f"{', '.join(ALGORITHMS)}{_near(name)} The run was written by raffia "
            f"{made_by.get('raffia', '?')}, and this is {__version__}"
        )
    found = recorded_name(reference)
    if not isinstance(found, Algorithm):
        raise ConfigError(
            f"its algorithm is {reference}, which is not part of an installed package. If you "
            f"trust it, name it: --algorithm {reference}"
        )
    return replace(found, reference=reference)


def _near(name: str) -> str:
    return did_you_mean(name, ALGORITHMS.keys(), "; did you mean {}?")


def given_name(reference: Any, what: str) -> Any:
    """`raffia.lazy.named`, for a reference among settings: ConfigError if it cannot be imported.

    >>> given_name("math:tau", "a number")
    6.283185307179586
    >>> given_name("maths:tau", "a number")
    Traceback (most recent call last):
    ...
    raffia.train.settings.ConfigError: maths:tau cannot be imported: No module named 'maths'. It
    must be package.module:name or path/file.py:name, and name a number
    """
    try:
        return named(reference, what)
    except ImportError as error:
        raise ConfigError(str(error)) from error


def recorded_name(reference: str) -> object:
    """Import an object by the reference in a run's folder if it belongs to an installed package;
    else return None.

    A folder may come from elsewhere, so files, and modules of the current folder or of a script's,
    are not run.
    Raises ConfigError if the package is installed and fails to be imported.

    >>> recorded_name("math:tau"), recorded_name("own.py:tau"), recorded_name("not_there:tau")
    (6.283185307179586, None, None)
    """
    home = reference.rpartition(":")[0]
    if not home or is_outside(reference):
        return None
    try:
        found: object = imported(reference)
        return found
    except (ImportError, AttributeError, SyntaxError) as error:
        is_missing = isinstance(error, ModuleNotFoundError) and f"{home}.".startswith(
            f"{error.name}."
        )
        if is_missing or (isinstance(error, AttributeError) and home in sys.modules):
            return None
        raise ConfigError(f"{reference} cannot be imported: {error}") from error
