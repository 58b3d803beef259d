"""ILQL from data to an agent that generates: train, resume, evaluate, load."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from raffia.algorithms.ilql.policy import ILQL_Policy
from raffia.functional.seeds import generator_for
from raffia.lm.decoding.config import DecodeConfig
from raffia.recipes.algorithm import ALGORITHMS
from raffia.recipes.ilql.config import ILQLRun
from raffia.recipes.ilql.data import find_tokenizer, for_games, make_corpus
from raffia.recipes.ilql.evaluation import (
    Evaluator,
    ILQLEvaluation,
    MakeLanguageEnv,
    find_environment,
    with_env,
    with_member_decode,
)
from raffia.recipes.ilql.evaluators import evaluate_networks
from raffia.recipes.ilql.experiment import ILQLExperiment
from raffia.recipes.ilql.networks import Networks, making_of, with_threads
from raffia.recipes.members import best_of
from raffia.recipes.run_folder import find_checkpoint, read_run_of, require_config
from raffia.recipes.running import plain_arithmetic, resume_run, threads, train_run
from raffia.train.session import RunResult
from raffia.train.view import View


def train(
    config: ILQLRun,
    folder: str | Path,
    *,
    view: View | None = None,
    preset: str = "",
    make_env: str | MakeLanguageEnv | None = None,
) -> RunResult:
    """Train in a new folder, until the end, the target return or a signal to stop.

    view: where progress is shown; None: the terminal.
    preset: the name of the config, to be shown in the report.
    make_env: of data, a `Language_Environment` in which the agent is evaluated: its class, a
        function, or "file.py:name".
    Raises RunError if the folder holds a run already, TypeError for what is not a config.

    >>> import io, tempfile
    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> from raffia.train.view import PlainView
    >>> short = replace(ILQL_PRESETS["ilql-smoke"], num_updates=3)
    >>> with tempfile.TemporaryDirectory() as there:
    ...     result = train(short, f"{there}/run", view=PlainView(io.StringIO()))
    >>> result.reason, result.update, result.env_step
    ('finished', 3, None)
    """
    if make_env is not None:
        require_config(config, ALGORITHMS["ilql"])
    return train_run(
        *(ALGORITHMS["ilql"], with_env(config, make_env), folder),
        view=view,
        preset=preset,
        make=partial(ILQLExperiment, make_env=make_env),
    )


def resume(
    folder: str | Path,
    *,
    config: ILQLRun | None = None,
    view: View | None = None,
    make_env: str | MakeLanguageEnv | None = None,
) -> RunResult:
    """Continue from the newest checkpoint, as if the run had never been stopped.

    config: instead of the run's, which `read_run(folder)` gives: a longer run, other evaluations.
        A learning rate that falls over the run follows its length.
    make_env: as in `train`; None: the run's, which is imported if it is of an installed package.
    Raises RunError if the config differs in what has shaped what was learnt.

    >>> import io, tempfile
    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> from raffia.train.view import PlainView
    >>> short = replace(ILQL_PRESETS["ilql-smoke"], num_updates=2)
    >>> longer = replace(short, num_updates=3)
    >>> with tempfile.TemporaryDirectory() as there:
    ...     first = train(short, f"{there}/run", view=PlainView(io.StringIO()))
    ...     then = resume(f"{there}/run", config=longer, view=PlainView(io.StringIO()))
    >>> first.update, then.update
    (2, 3)
    """
    if make_env is not None:
        config = with_env(config or read_run_of(ILQLRun, folder), make_env)
    return resume_run(
        *(folder, ALGORITHMS["ilql"]),
        config=config,
        view=view,
        make=partial(ILQLExperiment, make_env=make_env),
    )


def member_config(folder: str | Path, checkpoint: str = "best") -> ILQLRun:
    """The settings of a run with the decoding of its best member, which may have its own numbers.

    >>> import io, tempfile
    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> from raffia.train.view import PlainView
    >>> short = replace(ILQL_PRESETS["ilql-smoke"], num_updates=2)
    >>> with tempfile.TemporaryDirectory() as there:
    ...     _ = train(short, f"{there}/run", view=PlainView(io.StringIO()))
    ...     member_config(f"{there}/run").decode == short.decode
    True
    """
    state = best_of(find_checkpoint(Path(folder), checkpoint))
    return with_member_decode(read_run_of(ILQLRun, Path(folder)), state["hyper"])


@plain_arithmetic()
def load_agent(
    folder: str | Path,
    checkpoint: str = "best",
    *,
    decode: DecodeConfig | None = None,  # how it decodes; None: as in the run
    seed: int = 0,  # of what is drawn
) -> ILQL_Policy:
    """The agent of a run: of its "best" or "newest" checkpoint, or of one by its number.

    >>> import io, tempfile
    >>> from raffia.lm.envs.wordle.game import WordleObservation
    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> from raffia.train.view import PlainView
    >>> short = replace(ILQL_PRESETS["ilql-smoke"], num_updates=2)
    >>> with tempfile.TemporaryDirectory() as there:
    ...     _ = train(short, f"{there}/run", view=PlainView(io.StringIO()))
    ...     agent = load_agent(f"{there}/run")
    >>> type(agent.act(WordleObservation())).__name__
    'str'
    """
    folder = Path(folder)
    config = read_run_of(ILQLRun, folder)
    networks = Networks(config, making=making_of(config, folder))
    state = best_of(find_checkpoint(folder, checkpoint))
    networks.refresh(state)
    decode = decode or with_member_decode(config, state["hyper"]).decode
    return ILQL_Policy(
        networks,
        find_tokenizer(config, folder),
        for_games(decode, config.wordle) if config.task == "wordle" else decode,
        generator=generator_for(seed, "speak"),
    )


@plain_arithmetic()
def evaluate(
    folder: str | Path,
    *,
    episodes: int = 1000,
    checkpoint: str = "best",
    seed: int = 0,
    decode: DecodeConfig | None = None,
    adv_weights: tuple[float, ...] | None = None,
    make_env: str | MakeLanguageEnv | None = None,
) -> ILQLEvaluation:
    """Play games with the agent of a run, by each decoding; or its losses on held-out rows.

    episodes: games, or rows at most.
    decode, adv_weights: instead of the run's.
    make_env: as in `train`; None: the run's, which is imported if it is of an installed package.

    >>> import io, tempfile
    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> from raffia.train.view import PlainView
    >>> short = replace(ILQL_PRESETS["ilql-smoke"], num_updates=2)
    >>> with tempfile.TemporaryDirectory() as there:
    ...     _ = train(short, f"{there}/run", view=PlainView(io.StringIO()))
    ...     found = evaluate(f"{there}/run", episodes=3, adv_weights=(0.0,))
    >>> {name: len(games.returns) for name, games in found.games.items()}
    {'decode': 3, 'adv_weight=0': 3}
    """
    folder = Path(folder)
    config = with_env(read_run_of(ILQLRun, folder), make_env)
    own = replace(config.evaluate, num_episodes=episodes)
    if adv_weights is not None:
        own = replace(own, adv_weights=adv_weights)
    saved = find_checkpoint(folder, checkpoint)
    state = best_of(saved, torch.device("cpu"))
    decode = decode or with_member_decode(config, state["hyper"]).decode
    config = with_threads(replace(config, evaluate=own, decode=decode))
    networks = Networks(config, making=making_of(config, folder))
    networks.refresh(state)
    with threads(config.num_threads):
        corpus = make_corpus(config, folder)
        environment = find_environment(config, make_env, corpus.tokenizer)
        evaluator = Evaluator(networks, corpus, config, environment)
        found = evaluate_networks(evaluator, seed)
    return replace(found, update=saved.update)
