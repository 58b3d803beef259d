"""The environment of one's own in which a run of ILQL on data is evaluated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from raffia.lm.data.data_point import DataPoint
from raffia.lm.envs.contract import Language_Environment
from raffia.lm.tokenizers.tokenizer import Tokenizer
from raffia.recipes.ilql.config import ILQLRun
from raffia.recipes.named import given_name, recorded_name
from raffia.train.config import ConfigError
from raffia.train.experiment import RunError

MakeLanguageEnv = Callable[[], Language_Environment]


def with_env(config: ILQLRun, make_env: str | MakeLanguageEnv | None) -> ILQLRun:
    """The config with the name of the environment that the caller gave, if one was given.

    >>> with_env(ILQLRun(task="data"), "haggle.py:Haggle").evaluate.env
    'haggle.py:Haggle'
    """
    if make_env is None:
        return config
    if callable(make_env):
        name = getattr(make_env, "__qualname__", f"<{type(make_env).__qualname__}>")
        make_env = f"{make_env.__module__}:{name}"
    return replace(config, evaluate=replace(config.evaluate, env=make_env))


def find_environment(
    config: ILQLRun, given: str | MakeLanguageEnv | None, tokenizer: Tokenizer
) -> MakeLanguageEnv | None:
    """What makes the environment of a run on data; None if it has none.

    given: by the caller, who vouches for it: the name of a file may be given, or a module of the
        current folder. None: as the config names it, which may come from elsewhere, so only
        from an installed package.
    Raises RunError if it is not there, or if the tokenizer cannot encode how its dialogues begin.

    >>> config = with_env(ILQLRun(task="data"), "haggle.py:Haggle")
    >>> find_environment(config, None, None)
    Traceback (most recent call last):
    ...
    raffia.train.experiment.RunError: its environment is haggle.py:Haggle, which is no class of an
    installed package: if you trust it, name it: --env haggle.py:Haggle, in Python make_env=Haggle
    """
    name = config.evaluate.env
    if not name:
        return None
    if given is not None:
        make_env = given_name(given, "a Language_Environment")
    else:
        make_env = recorded_name(name)
        # Nothing else is called on a folder's word: it could name any function.
        if not (isinstance(make_env, type) and issubclass(make_env, Language_Environment)):
            home, _, last = name.rpartition(":")
            call = f"name it: --env {name}, in Python make_env={last}"
            if "<" in last or home == "__main__":
                call = "give it again: make_env=... in Python, where it was made"
            raise RunError(
                f"its environment is {name}, which is no class of an installed package: if you "
                f"trust it, {call}"
            )
    of_another_kind = isinstance(make_env, type) and not issubclass(make_env, Language_Environment)
    env = make_env() if callable(make_env) and not of_another_kind else make_env
    if not isinstance(env, Language_Environment) or env is make_env:
        raise ConfigError(
            f"{name} gives {env!r}; it must be a class, or a function, that gives a "
            "raffia.lm.Language_Environment when it is called without arguments"
        )
    try:
        DataPoint.from_obs(env.reset(0), tokenizer)
    except ValueError as error:
        raise RunError(
            f"what {name} says first cannot be encoded with the tokens of the data: {error}. "
            "Learn from dialogues of this environment, or take --data.tokenizer FOLDER"
        ) from error
    return make_env
