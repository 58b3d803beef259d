"""What the runs of ILQL have learnt: evaluate, load an agent that generates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from raffia.algorithms.ilql.policy import ILQL_Policy
from raffia.functional.seeds import generator_for
from raffia.lm.decoding.config import DecodeConfig
from raffia.recipes.devices import require_device
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
from raffia.recipes.ilql.networks import Networks, making_of, with_threads
from raffia.recipes.members import best_of
from raffia.recipes.run_folder import find_checkpoint, read_run_of
from raffia.recipes.running import plain_arithmetic, threads


def member_config(folder: str | Path, checkpoint: str | int = "best") -> ILQLRun:
    """The settings of a run with the decoding of its best member, which may have its own numbers.

    >>> import io, tempfile
    >>> from raffia.recipes import train
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
    checkpoint: str | int = "best",
    *,
    device: str = "cpu",  # of the networks, such as "cuda"
    decode: DecodeConfig | None = None,  # how it decodes; None: as in the run
    seed: int = 0,  # of what is drawn
) -> ILQL_Policy:
    """The agent of a run: of its "best" or "newest" checkpoint, or of one by its number.

    >>> import io, tempfile
    >>> from raffia.recipes import train
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
    require_device(device)
    folder = Path(folder)
    config = read_run_of(ILQLRun, folder)
    networks = Networks(config, device, making=making_of(config, folder))
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
    checkpoint: str | int = "best",
    seed: int = 0,
    device: str = "cpu",
    decode: DecodeConfig | None = None,
    adv_weights: tuple[float, ...] | None = None,
    make_env: str | MakeLanguageEnv | None = None,
) -> ILQLEvaluation:
    """Play games with the agent of a run, by each decoding; or its losses on held-out rows.

    episodes: games, or rows at most.
    decode, adv_weights: instead of the run's.
    make_env: as in `train`; None: the run's, which is imported if it is of an installed package.

    >>> import io, tempfile
    >>> from raffia.recipes import train
    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> from raffia.train.view import PlainView
    >>> short = replace(ILQL_PRESETS["ilql-smoke"], num_updates=2)
    >>> with tempfile.TemporaryDirectory() as there:
    ...     _ = train(short, f"{there}/run", view=PlainView(io.StringIO()))
    ...     found = evaluate(f"{there}/run", episodes=3, adv_weights=(0.0,))
    >>> {name: len(games.returns) for name, games in found.games.items()}
    {'decode': 3, 'adv_weight=0': 3}
    """
    require_device(device)
    folder = Path(folder)
    config = with_env(read_run_of(ILQLRun, folder), make_env)
    own = replace(config.evaluate, num_episodes=episodes)
    if adv_weights is not None:
        own = replace(own, adv_weights=adv_weights)
    saved = find_checkpoint(folder, checkpoint)
    state = best_of(saved, torch.device("cpu"))
    decode = decode or with_member_decode(config, state["hyper"]).decode
    config = with_threads(replace(config, evaluate=own, decode=decode))
    networks = Networks(config, device, making=making_of(config, folder))
    networks.refresh(state)
    with threads(config.num_threads):
        corpus = make_corpus(config, folder)
        environment = find_environment(config, make_env, corpus.tokenizer)
        evaluator = Evaluator(networks, corpus, config, environment)
        found = evaluate_networks(evaluator, seed)
    return replace(found, update=saved.update)
