"""Environments by name: a BatchEnv for a config."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from raffia.envs.config import AtariConfig, EnvConfig
from raffia.envs.env import BatchEnv, Env, EnvSpec
from raffia.files import shown
from raffia.hints import check_range, did_you_mean
from raffia.lazy import absolute, imported, named


def make_env(
    config: EnvConfig,
    *,
    evaluation: bool = False,
    render: bool = False,
    num_envs: int | None = None,
) -> BatchEnv:
    """A batch of the environments that a config names; the collector stacks their frames.

    evaluation: whole episodes with their true rewards: of Atari games a lost life is no end and the
        reward is not clipped
    render: pictures will be asked for; they cost time in Gymnasium's environments only
    num_envs: instead of the config's, and then no more workers than environments

    >>> batch = make_env(EnvConfig(id="probe/value", num_envs=3))
    >>> batch.num_envs, batch.spec.name
    (3, 'probe/value')
    >>> make_env(EnvConfig(id="CartPole-v1"), evaluation=True, num_envs=2).num_envs
    2
    """
    if not isinstance(config, EnvConfig):
        raise _no_config(config)
    num_workers = config.num_workers if num_envs is None else min(config.num_workers, num_envs)
    num_envs = config.num_envs if num_envs is None else num_envs
    check_range("num_envs", num_envs, 1)
    if (make_batch := whole_batch(config.id)) is not None:
        if num_workers:
            raise ValueError(
                f"num_workers={num_workers}: {config.id} steps all its environments together in "
                "this process, which is faster; set num_workers=0"
            )
        return limited(make_batch(num_envs), config.max_episode_steps)
    if (make := one_of_ours(config.id, config.atari, evaluation)) is not None:
        batch = spread(make, num_envs, num_workers, config.step_timeout_seconds)
        return limited(batch, config.max_episode_steps)
    from raffia.envs.gym import GymEnv, known_to_gymnasium

    if names_own(config.id):
        make = partial(own_env, absolute(config.id), render)
        batch = spread(make, num_envs, num_workers, config.step_timeout_seconds)
        return limited(batch, config.max_episode_steps)
    if not known_to_gymnasium(config.id):
        raise unknown(config.id)
    make = partial(GymEnv, config.id, max_episode_steps=config.max_episode_steps, render=render)
    return spread(make, num_envs, num_workers, config.step_timeout_seconds)


def names_own(name: str) -> bool:
    """Whether a name is that of an object, "module:name" or "file.py:name", and not of Gymnasium's
    "module:Name-v0", whose module, which is imported, registers it.

    >>> names_own("raffia.envs.probe:ValueProbe"), names_own("CartPole-v1")
    (True, False)
    """
    home, _, last = name.rpartition(":")
    if not home or home.endswith(".py"):
        return bool(home)
    try:
        module = imported(f"{home}:__dict__", here=True)
    except ImportError as error:
        raise ValueError(f"{name} is not there: its module cannot be imported: {error}") from error
    return last in module


def own_env(reference: str, render: bool = False) -> Env:
    """One environment by the name of its class, or of a function that makes it: "module:name" or
    "file.py:name". It is one of Raffia's contract, or of Gymnasium.

    >>> own_env("raffia.envs.probe:ValueProbe").spec.name
    'probe/value'
    """
    from raffia.envs.gym import as_env

    what = "a class, or a function without arguments, that makes an Env or one of Gymnasium's"
    make = named(reference, what)
    try:
        signature = inspect.signature(make)
        signature.bind()
    except TypeError as error:
        raise ValueError(f"{reference} must name {what}: {error}") from error
    if render and "render_mode" in signature.parameters:
        make = partial(make, render_mode="rgb_array")
    env = as_env(make)
    if not isinstance(getattr(env, "spec", None), EnvSpec):
        raise ValueError(f"{reference} makes {shown(env)}; it must name {what}")
    return env


def _no_config(given: object) -> TypeError:
    """The error for a name, or an environment, where its settings are wanted."""
    if isinstance(given, str):
        return TypeError(
            f"make_env({given!r}): an environment is made from a config, such as "
            f"make_env(EnvConfig(id={given!r}))"
        )
    return TypeError(
        f"make_env needs an EnvConfig, not a {type(given).__name__}. For an environment that you "
        "make yourself: env_factory(a_function_that_makes_one)"
    )


def require_env_factory(make_env: object) -> None:
    """Raise TypeError if an environment is given instead of a function that makes as many as
    wanted.

    >>> require_env_factory(make_env)
    >>> from raffia.envs.probe import ValueProbe
    >>> require_env_factory(ValueProbe())
    Traceback (most recent call last):
    ...
    TypeError: make_env is one environment, a ValueProbe, but a run plays and evaluates in several:
    pass make_env=env_factory(make), where make() returns a new one
    """
    if isinstance(make_env, type):
        name = make_env.__name__
        raise TypeError(f"make_env is the class {name}: pass make_env=env_factory({name})")
    if not callable(make_env):
        raise TypeError(
            f"make_env is one environment, a {type(make_env).__name__}, but a run plays and "
            "evaluates in several: pass make_env=env_factory(make), where make() returns a new one"
        )


def require_batch(env: object, by: str = "") -> None:
    """TypeError for the result of a function given as `make_env`, if it is not a BatchEnv.

    by: what it was given to instead, which does not render it.

    >>> from raffia.envs.probe import ValueProbe
    >>> require_batch(spread(ValueProbe, 2, 0))
    >>> require_batch(ValueProbe())
    Traceback (most recent call last):
    ...
    TypeError: make_env(config) returned a ValueProbe, which is not a batch of environments: pass
    make_env=env_factory(make), where make() returns one environment, or wrap them in a SerialBatch
    """
    needed = ("num_envs", "reset", "step", *([] if by else ["render"]))
    missing = [name for name in needed if not hasattr(env, name)]
    if missing or not isinstance(getattr(env, "spec", None), EnvSpec):
        if by:
            raise TypeError(
                f"{by} needs a batch of environments, not a {type(env).__name__}: such as "
                "make_env(EnvConfig(num_envs=1)), or SerialBatch([env]) of one Env or more"
            )
        raise TypeError(
            f"make_env(config) returned a {type(env).__name__}, which is not a batch of "
            "environments: pass make_env=env_factory(make), where make() returns one environment, "
            "or wrap them in a SerialBatch"
        )


def env_factory(make: Callable[[], Any]) -> Callable[..., BatchEnv]:
    """A function like `make_env` for a custom environment.

    It makes as many, in as many workers, as a config sets; the config's `id` only names them.

    make: makes one environment, an Env or one of Gymnasium. For worker processes it must be a
        class or a function of a module.

    >>> from raffia.envs.probe import ValueProbe
    >>> env_factory(ValueProbe)(EnvConfig(id="mine", num_envs=3)).num_envs
    3
    """

    if not callable(make):
        raise TypeError(
            f"env_factory(make) needs a function that makes an environment, not a "
            f"{type(make).__name__}: env_factory(lambda: ...), or a class"
        )

    def make_custom(
        config: EnvConfig,
        *,
        evaluation: bool = False,
        render: bool = False,
        num_envs: int | None = None,
    ) -> BatchEnv:
        num = config.num_envs if num_envs is None else num_envs
        from raffia.envs.gym import as_env

        num_workers = min(config.num_workers, num)
        batch = spread(partial(as_env, make), num, num_workers, config.step_timeout_seconds)
        return limited(batch, config.max_episode_steps)

    return make_custom


def env_names() -> list[str]:
    """The names that `make_env` knows: ours, then Gymnasium's.

    >>> {"tictactoe", "probe/value", "CartPole-v1"} <= set(env_names())
    True
    """
    from raffia.envs.atari import atari_games
    from raffia.envs.gym import gym_names
    from raffia.envs.minatar import GAMES
    from raffia.envs.probe import PROBES

    small = [*(f"minatar/{game}" for game in GAMES), *PROBES]
    return [
        *sorted(["connect4", "tictactoe", *small, *(f"atari/{game}" for game in atari_games())]),
        *gym_names(),
    ]


def spread(
    make: Callable[[], Env],
    num_envs: int,
    num_workers: int,
    step_timeout_seconds: float = 0.0,  # of worker processes; 0: none
) -> BatchEnv:
    """A batch of `num_envs` environments, in this process or in worker processes.

    >>> from raffia.envs.probe import ValueProbe
    >>> spread(ValueProbe, 2, num_workers=0).num_envs
    2
    """
    if num_workers:
        from raffia.envs.workers import WorkerBatch

        return WorkerBatch(
            [make] * num_envs, num_workers, step_timeout_seconds=step_timeout_seconds
        )
    from raffia.envs.batch import SerialBatch

    return SerialBatch([make() for _ in range(num_envs)])


def limited(batch: BatchEnv, max_episode_steps: int) -> BatchEnv:
    """The batch with a time limit in addition to its existing one, if a limit is requested.

    >>> from raffia.envs.probe import ValueProbe
    >>> limited(spread(ValueProbe, 2, 0), 7).max_episode_steps
    7
    """
    if not max_episode_steps:
        return batch
    from raffia.envs.batch import TimeLimit

    return TimeLimit(batch, max_episode_steps)


def whole_batch(name: str) -> Callable[[int], BatchEnv] | None:
    """The class of a batch that steps all its environments together, by name; None if unknown.

    >>> whole_batch("tictactoe")(2).num_envs
    2
    """
    if name in ("connect4", "tictactoe"):
        from raffia.envs.board import Connect4, TicTacToe

        return Connect4 if name == "connect4" else TicTacToe
    if name.startswith("minatar/"):
        from raffia.envs.minatar import GAMES

        return GAMES.get(name.removeprefix("minatar/"))
    return None


def one_of_ours(name: str, atari: AtariConfig, evaluation: bool) -> Callable[[], Env] | None:
    """A function that makes one of Raffia's single environments, by name; None: no such name.

    >>> one_of_ours("probe/delay", AtariConfig(), evaluation=False)().spec.name
    'probe/delay'
    """
    if name.startswith("probe/"):
        from raffia.envs.probe import PROBES

        return PROBES.get(name)
    if name.startswith("atari/"):
        from raffia.envs.atari import AtariEnv

        return partial(AtariEnv, name.removeprefix("atari/"), atari, evaluation=evaluation)
    return None


def unknown(name: str) -> ValueError:
    """The error about an unknown name, with the nearest known one.

    >>> unknown("Cartpole-v1")
    ValueError("there is no environment 'Cartpole-v1'. Did you mean 'CartPole-v1'? ...")
    """
    if name.endswith(".py"):
        return ValueError(f"which environment of {name}? Name its class in it: {name}:NAME")
    names = {_stem(known): known for known in env_names()}
    home, _, last = name.rpartition(":")
    hint = did_you_mean(_stem(last), names, " Did you mean {!r}?", cutoff=0.62)
    where = f" in {home}, which has no such class or function and registers none" if home else ""
    return ValueError(
        f"there is no environment {last!r}{where}.{hint} All names: `raffia list environments`, or "
        "raffia.envs.env_names() in Python; your own: 'file.py:Name' or 'its.module:Name', which "
        "name its class or a function that makes it"
    )


def _stem(name: str) -> str:
    """A name without its version, in lower case, to compare names of Gymnasium."""
    return re.sub(r"-v\d+$", "", name.lower())
