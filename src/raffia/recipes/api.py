"""Runs of any algorithm from Python: train, resume, evaluate, act."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from raffia.lazy import imported
from raffia.recipes.algorithm import Algorithm, find_algorithm
from raffia.recipes.devices import require_device
from raffia.recipes.members import best_of
from raffia.recipes.run_folder import (
    algorithm_of,
    create_run,
    find_checkpoint,
    own_parts,
    read_record,
    read_run,
    refuse_without_checkpoints,
    refuse_without_own,
    require_config,
    write_config,
)
from raffia.recipes.running import Evaluation, Make, plain_arithmetic, run_session, threads
from raffia.train.config import changes_of
from raffia.train.experiment import RunError, Stop
from raffia.train.live_view import make_view

if TYPE_CHECKING:
    from raffia.algorithms.efficientzero.learner import ModelFactory
    from raffia.algorithms.ilql.policy import ILQL_Policy
    from raffia.recipes.efficientzero.api import Agent
    from raffia.recipes.efficientzero.evaluation import MakeEnv
    from raffia.recipes.ilql.evaluation import ILQLEvaluation, MakeLanguageEnv
    from raffia.tensordict.tensordict import TensorDict
    from raffia.train.log import OnRow
    from raffia.train.session import RunResult
    from raffia.train.view import View

Name = Literal["efficientzero", "ilql"]


def train(
    config: Any,
    folder: str | Path,
    *,
    algorithm: Algorithm | str | None = None,
    view: View | None = None,
    preset: str = "",
    make_env: MakeEnv | MakeLanguageEnv | str | None = None,
    networks: ModelFactory | str | None = None,
    stop: Stop = lambda: False,
    on_row: OnRow | None = None,
) -> RunResult:
    """Train in a new folder, until the end, the target return or a signal to stop.

    config: settings, such as `PRESETS["cartpole"]`; what they leave open is filled in.
    algorithm: one from outside the package, or its name; None: the one whose settings these are.
    view: where progress is shown; None: the terminal.
    preset: the name of the config, to be shown in the report.
    make_env: of EfficientZero, instead of the environment that the config names: a function like
        `raffia.envs.make_env`, which a resume needs, too; or the name "file.py:name" of one
        environment's class, as in the setting `env.id`. Of ILQL on data, a `Language_Environment`
        in which the agent is evaluated: its class, a function, or "file.py:name".
    networks: of EfficientZero, instead of those that the config describes: a function that returns
        the model, which a resume needs, too; or its name, as in the setting `networks`.
    stop: asked after each update; once it is true, the run saves and stops.
    on_row: called with each row of `metrics.jsonl` when it is written, a dict; `Ended` that it
        raises ends the run, and an error fails it, after the update, which is saved.
    Raises RunError if the folder holds a run already, TypeError for what is not a config.

    >>> import io, tempfile
    >>> from dataclasses import replace
    >>> from raffia.recipes import ILQL_PRESETS
    >>> from raffia.train.view import PlainView
    >>> short = replace(ILQL_PRESETS["ilql-smoke"], num_updates=3)
    >>> with tempfile.TemporaryDirectory() as there:
    ...     result = train(short, f"{there}/run", view=PlainView(io.StringIO()))
    >>> result.reason, result.update, result.env_step
    ('finished', 3, None)
    """
    algorithm, folder = _given(algorithm) or algorithm_of(config), Path(folder)
    require_config(config, algorithm)
    config, parts = algorithm.with_named(config, {"make_env": make_env, "networks": networks})
    own, make = _made_with(algorithm, parts)
    shown = view or make_view()
    config = algorithm.settled(config, tell=shown.message, **parts)
    create_run(folder, config, preset, own, algorithm)
    return run_session(folder, make, config, shown, stop=stop, on_row=on_row, is_new=True)


def resume(
    folder: str | Path,
    *,
    algorithm: Algorithm | str | None = None,
    config: Any = None,
    view: View | None = None,
    make_env: MakeEnv | MakeLanguageEnv | str | None = None,
    networks: ModelFactory | str | None = None,
    stop: Stop = lambda: False,
    on_row: OnRow | None = None,
) -> RunResult:
    """Continue from the newest checkpoint, as if the run had never been stopped.

    algorithm: one that is not part of an installed package, or its name; None: the one that the
        run names.
    config: replaces the run's, which `read_run(folder)` gives: a longer run, another target. What
        depends on the fraction of training that is done, as temperatures do, follows it.
    make_env, networks, view, stop, on_row: as in `train`. ILQL needs no `make_env` of an installed
        package.
    Raises RunError if the config differs in what has shaped what was learnt.

    >>> import io, tempfile
    >>> from dataclasses import replace
    >>> from raffia.recipes import ILQL_PRESETS
    >>> from raffia.train.view import PlainView
    >>> short = replace(ILQL_PRESETS["ilql-smoke"], num_updates=2)
    >>> with tempfile.TemporaryDirectory() as there:
    ...     _ = train(short, f"{there}/run", view=PlainView(io.StringIO()))
    ...     longer = replace(short, num_updates=3)
    ...     resume(f"{there}/run", config=longer, view=PlainView(io.StringIO())).update
    3
    """
    folder = Path(folder)
    algorithm, before, made_by = read_record(folder, _given(algorithm))
    if config is not None:
        require_config(config, algorithm)
    given = {"make_env": make_env, "networks": networks}
    after, parts = algorithm.with_named(before if config is None else config, given)
    own, make = _made_with(algorithm, parts)
    named = [part for part, one in given.items() if one is not None]
    refuse_without_own(folder, named, algorithm)
    refuse_without_checkpoints(folder)
    after = algorithm.settled(after, before, **parts)
    changed = changes_of(before, after)
    # A file may lie elsewhere now, and what only the program had may have a name.
    moved = {
        part
        for part, name in algorithm.named_outside(before).items()
        if str(given[part]).rpartition(":")[2] == name.rpartition(":")[2]
    }
    own_before = moved.union(own_parts(made_by)).intersection(named, algorithm.names)
    free = [algorithm.names[part] for part in own_before]
    fixed = [name for name in changed if not name.startswith((*algorithm.may_change, *free))]
    if fixed:
        raise RunError(
            f"{', '.join(fixed)} cannot be changed: {folder} was started with other values, which "
            f"shaped what was learnt. Only {', '.join(algorithm.may_change)} can be changed; to "
            "use other values, train again in another folder"
        )

    def on_start() -> None:
        if changed:
            write_config(folder, after, made_by["preset"], own, algorithm)

    return run_session(folder, make, after, view or make_view(), on_start, stop, changed, on_row)


def _made_with(algorithm: Algorithm, parts: Mapping[str, Any]) -> tuple[list[str], Make]:
    """The names of the parts that no settings hold, and what makes the run with all of them."""
    other = [name for name in parts if name not in algorithm.parts]
    if other:
        takes = ", ".join(algorithm.parts) or "neither make_env nor networks"
        raise TypeError(f"{', '.join(other)}: {algorithm.title} takes {takes}")
    own = [name for name in parts if algorithm.parts[name]]
    return own, partial(imported(algorithm.make), **parts)


@overload
def load_agent(
    folder: str | Path,
    checkpoint: str | int = ...,
    *,
    algorithm: Literal["efficientzero"],
    device: str = ...,
    **more: Any,
) -> Agent: ...
@overload
def load_agent(
    folder: str | Path,
    checkpoint: str | int = ...,
    *,
    algorithm: Literal["ilql"],
    device: str = ...,
    **more: Any,
) -> ILQL_Policy: ...
@overload
def load_agent(
    folder: str | Path,
    checkpoint: str | int = ...,
    *,
    algorithm: Algorithm | None = ...,
    device: str = ...,
    **more: Any,
) -> Any: ...


@plain_arithmetic()
def load_agent(
    folder: str | Path,
    checkpoint: str | int = "best",
    *,
    algorithm: Algorithm | Name | None = None,
    device: str = "cpu",
    **more: Any,
) -> Agent | ILQL_Policy | TensorDict:
    """The agent of a run: of its "best" or "newest" checkpoint, or of one by its number.

    algorithm: the name of a built-in one, for type checkers; or one that is not part of an
        installed package, of which this is the learner's state. None: the one that the run names.
    device: of the networks, such as "cuda".
    more: of `raffia.recipes.efficientzero.load_agent` or `raffia.recipes.ilql.load_agent`.

    >>> import io, tempfile
    >>> from dataclasses import replace
    >>> from raffia.lm.envs.wordle.game import WordleObservation
    >>> from raffia.recipes import ILQL_PRESETS
    >>> from raffia.train.view import PlainView
    >>> short = replace(ILQL_PRESETS["ilql-smoke"], num_updates=2)
    >>> with tempfile.TemporaryDirectory() as there:
    ...     _ = train(short, f"{there}/run", view=PlainView(io.StringIO()))
    ...     agent = load_agent(f"{there}/run")
    >>> type(agent.act(WordleObservation())).__name__
    'str'
    """
    found = _algorithm_of_run(folder, algorithm)
    if found.uses:
        load: Any = imported(f"{found.uses}:load_agent")
        agent: Agent | ILQL_Policy = load(folder, checkpoint, device=device, **more)
        return agent
    return _state_of(Path(folder), found, checkpoint, device, **more)[1]


@overload
def evaluate(
    folder: str | Path, *, algorithm: Literal["efficientzero"], device: str = ..., **more: Any
) -> Evaluation: ...
@overload
def evaluate(
    folder: str | Path, *, algorithm: Literal["ilql"], device: str = ..., **more: Any
) -> ILQLEvaluation: ...
@overload
def evaluate(
    folder: str | Path, *, algorithm: Algorithm | None = ..., device: str = ..., **more: Any
) -> Any: ...


def evaluate(
    folder: str | Path, *, algorithm: Algorithm | Name | None = None, **more: Any
) -> Evaluation | ILQLEvaluation:
    """Play whole episodes with the agent of a run, or take its losses on held-out dialogues.

    algorithm: as in `load_agent`; with one from outside the package its `play` is called.
    more: `episodes`, `checkpoint`, `seed`, `device`, and those of
        `raffia.recipes.efficientzero.evaluate` or `raffia.recipes.ilql.evaluate`.

    >>> import io, tempfile
    >>> from dataclasses import replace
    >>> from raffia.recipes import ILQL_PRESETS
    >>> from raffia.train.view import PlainView
    >>> short = replace(ILQL_PRESETS["ilql-smoke"], num_updates=2)
    >>> with tempfile.TemporaryDirectory() as there:
    ...     _ = train(short, f"{there}/run", view=PlainView(io.StringIO()))
    ...     len(evaluate(f"{there}/run", episodes=3).games["decode"].returns)
    3
    """
    found = _algorithm_of_run(folder, algorithm)
    if not found.uses:
        return _play(Path(folder), found, **more)
    result: Evaluation | ILQLEvaluation = imported(f"{found.uses}:evaluate")(folder, **more)
    return result


def _algorithm_of_run(folder: str | Path, given: Algorithm | Name | None) -> Algorithm:
    return _given(given) or read_record(folder).algorithm


def _given(algorithm: Algorithm | str | None) -> Algorithm | None:
    return find_algorithm(algorithm) if isinstance(algorithm, str) else algorithm


@plain_arithmetic()
def _play(
    folder: Path,
    algorithm: Algorithm,
    *,
    episodes: int = 100,
    checkpoint: str | int = "best",
    seed: int = 0,
    device: str = "cpu",
) -> Evaluation:
    """Episodes by the algorithm's `play`."""
    if algorithm.play is None:
        raise RunError(f"the algorithm {algorithm.name} has no `play`, which evaluation needs")
    config, state, update = _state_of(folder, algorithm, checkpoint, device)
    with threads(config.num_threads):
        played = imported(algorithm.play)(config, state, episodes, seed)
    return Evaluation(played.returns, played.lengths, played.as_first, [], update)


def _state_of(
    folder: Path, algorithm: Algorithm, checkpoint: str | int, device: str
) -> tuple[Any, TensorDict, int]:
    """The settings, the best member's state, and its update, of a run on this device."""
    require_device(device)
    config, found = read_run(folder, algorithm), find_checkpoint(folder, checkpoint)
    if device != config.device:
        config = replace(config, device=device)
    return config, best_of(found, torch.device(device)), found.update
