"""A run's agent is evaluated: here, or elsewhere by an `EvaluateRole`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from raffia.functional.seeds import derive_seed
from raffia.lazy import absolute
from raffia.recipes.ilql.config import ILQLRun
from raffia.recipes.ilql.data import make_corpus
from raffia.recipes.ilql.dialogues import scored_dialogues
from raffia.recipes.ilql.evaluation import (
    Evaluator,
    ILQLEvaluation,
    MakeLanguageEnv,
    evaluated,
    find_environment,
    with_estimate,
    with_member_decode,
)
from raffia.recipes.ilql.networks import Networks, keeps_model, making_of
from raffia.recipes.run_folder import visible_here
from raffia.recipes.running import threads
from raffia.tensordict.byte_tensors import bytes_to_tensor, tensor_to_bytes
from raffia.tensordict.tensordict import TensorDict
from raffia.train.config import from_json, to_json
from raffia.train.evaluations import Evaluated


def evaluate_networks(evaluator: Evaluator, seed: int) -> ILQLEvaluation:
    """Games where the task has some, else held-out rows; `Interrupted` if it is to stop."""
    held_out, found = evaluator.corpus.held_out, ILQLEvaluation()
    if held_out is not None:
        found = replace(found, held_out=evaluator.held_out_means(held_out))
    if held_out is None or evaluator.make_env is not None:
        found = replace(found, games=evaluator.play_games(seed))
    else:
        found = with_estimate(replace(found, replies=evaluator.logged_replies(held_out)))
    return replace(found, dialogues=scored_dialogues(evaluator))


def evaluate_agent(evaluator: Evaluator, state: TensorDict, seed: int) -> ILQLEvaluation:
    """Evaluate a learner's state, whose weights are loaded into the networks."""
    evaluator.networks.refresh(state)
    own = with_member_decode(evaluator.config, state["hyper"])
    return evaluate_networks(replace(evaluator, config=own), seed)


class EvaluateRole:
    """Plays an evaluation for each task; see `raffia.train.evaluations.Evaluations`.

    Data and a language model are read from the run's folder, which must be there, too.

    >>> from raffia.algorithms.ilql.learner import ILQLLearner
    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> run = replace(ILQL_PRESETS["ilql-smoke"], num_threads=1)
    >>> role = EvaluateRole(process_config(run, Path("nowhere")), 0)
    >>> weights = evaluator_weights(ILQLLearner(run).init(0))
    >>> outcome, dialogues = outcome_of(role.do(TensorDict(count=torch.tensor(5)), weights))
    >>> len(outcome.values["returns"]) == run.evaluate.num_episodes, sorted(dialogues)
    (True, ['data', 'dialogues', 'policy', 'values'])
    """

    def __init__(self, config: str, index: int) -> None:
        given = json.loads(config)
        run, folder = from_json(ILQLRun, given["run"]), Path(given["folder"])
        if run.task != "wordle" or keeps_model(run):
            folder = visible_here(folder)
        # Games follow from the config; of files the folder has the tokens.
        corpus = make_corpus(run, None if run.task == "wordle" else folder)
        environment = find_environment(run, given["env"], corpus.tokenizer)
        device = run.evaluators.device or run.device
        networks = Networks(run, device, making=making_of(run, folder))
        self.evaluator = Evaluator(networks, corpus, run, environment)

    def load(self, state: TensorDict) -> None:
        """Load nothing: this role has no state."""

    def do(self, task: TensorDict, weights: TensorDict | None) -> TensorDict:
        """Play the evaluation of these weights."""
        assert weights is not None
        run = self.evaluator.config
        with threads(run.num_threads):
            seed = derive_seed(run.seed, "evaluate", int(task["count"]))
            found = evaluate_agent(self.evaluator, weights, seed)
        outcome = evaluated(found)
        answer = [outcome.score, outcome.values, found.dialogues]
        return TensorDict(json=bytes_to_tensor(json.dumps(answer).encode()))


def process_config(
    config: ILQLRun, folder: Path, make_env: str | MakeLanguageEnv | None = None
) -> str:
    """The JSON that roles and learners of other processes are made from.

    folder: the run's, where tokens, and what its language model keeps, are read.
    make_env: as the caller of the run gave it; ValueError for one that workers can't import.

    >>> def make_env(): ...
    >>> process_config(ILQLRun(), Path("nowhere"), lambda: make_env())
    Traceback (most recent call last):
    ...
    ValueError: evaluators.* needs an environment that workers can import, not ...
    """
    env: Any = make_env
    if callable(make_env):
        home = getattr(make_env, "__module__", "__main__")
        name = getattr(make_env, "__qualname__", "<unnamed>")
        if home != "__main__" and "." not in home and PathFinder.find_spec(home) is None:
            # It came from a file, or from none.
            home = getattr(sys.modules.get(home), "__file__", None) or "__main__"
        if home == "__main__" or "<" in name:
            raise ValueError(
                f"evaluators.* needs an environment that workers can import, not {home}:{name}: "
                "move it into a module and give its class or 'file.py:Name', or leave "
                "evaluators.* out"
            )
        env = f"{home}:{name}"
    elif make_env is not None:
        env = absolute(make_env)
    return json.dumps({"run": to_json(config), "folder": str(folder.resolve()), "env": env})


def evaluator_weights(state: TensorDict) -> TensorDict:
    """The part of a learner's state that an evaluation needs."""
    names = ("params", "buffers", "target", "hyper")
    return state.select(*(name for name in names if name in state.keys()))


def outcome_of(answer: TensorDict) -> tuple[Evaluated, dict[str, Any]]:
    """Decode the answer of an `EvaluateRole`: the result, and the dialogues to be written.

    >>> outcome_of(TensorDict(json=bytes_to_tensor(b'[0.5, {"loss": 0.5}, {}]')))
    (Evaluated(score=0.5, values={'loss': 0.5}), {})
    """
    score, values, dialogues = json.loads(tensor_to_bytes(answer["json"]))
    return Evaluated(score, values), dialogues
