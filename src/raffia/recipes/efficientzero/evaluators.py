"""How a run's evaluations are played elsewhere: `EvaluateRole`, and what its answers mean."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from raffia.functional.seeds import derive_seed
from raffia.recipes.efficientzero.actors import configured_run, make_networks, make_planner
from raffia.recipes.efficientzero.evaluation import EpisodeFilms, Evaluator
from raffia.recipes.running import threads
from raffia.tensordict.byte_tensors import bytes_to_tensor
from raffia.tensordict.tensordict import TensorDict
from raffia.train.evaluate import Episodes
from raffia.train.nan_guard import all_finite


class EvaluateRole:
    """Plays an evaluation for each task; see `raffia.train.evaluations.Evaluations`.

    >>> from raffia.algorithms.efficientzero.learner import EfficientZeroLearner
    >>> from raffia.recipes.efficientzero.actors import acting_weights, actor_config
    >>> from raffia.recipes.efficientzero.presets import PRESETS
    >>> run = PRESETS["smoke"]
    >>> role = EvaluateRole(actor_config(run), 0)
    >>> weights = acting_weights(make_networks(run, role.evaluator.env.spec).init(0))
    >>> answer = role.do(TensorDict(count=torch.tensor(0)), weights)
    >>> len(episodes_of(answer).returns) == run.evaluate.num_episodes
    True
    >>> role.close()
    """

    def __init__(self, config: str, index: int) -> None:
        self.config = run = configured_run(config)
        self._records = run.evaluate.record != "none"
        self.evaluator = Evaluator(run, record=self._records)
        spec = self.evaluator.env.spec
        there = run.on(run.evaluators.device)
        self.planner = make_planner(make_networks(run, spec), there, spec)

    def load(self, state: TensorDict) -> None:
        """It has no state."""

    def do(self, task: TensorDict, weights: TensorDict | None) -> TensorDict:
        """Play the evaluation of these weights."""
        assert weights is not None
        self.planner.refresh(weights)
        seed = derive_seed(self.config.seed, "evaluate", int(task["count"]))
        try:
            with threads(self.config.num_threads):
                return self._recorded(seed) if self._records else self._played(seed, None)
        except _NotFinite as error:
            return TensorDict(not_finite=error.outputs)

    def _recorded(self, seed: int) -> TensorDict:
        """The answer with a film; with a warning, where there is no room for it."""
        warnings: list[str] = []
        suffix = self.config.evaluate.record
        with tempfile.TemporaryDirectory() as folder:
            films = EpisodeFilms(
                Path(folder), lambda _: "film", num=1, suffix=suffix, warn=warnings.append
            )
            answer = self._played(seed, films)
            for path in films.files:
                answer["film"] = bytes_to_tensor(path.read_bytes())
        for text in warnings:
            answer["warning"] = bytes_to_tensor(text.encode())
        return answer

    def _played(self, seed: int, films: EpisodeFilms | None) -> TensorDict:
        before = self.planner.num_simulations
        found = self.evaluator.play(self.planner, seed=seed, recording=films, check=_require_finite)
        assert found is not None  # nothing asks it to stop
        return TensorDict(
            returns=torch.tensor(found.returns, dtype=torch.float64),
            lengths=torch.tensor(found.lengths),
            as_first=torch.tensor(found.as_first, dtype=torch.bool),
            num_simulations=torch.tensor(self.planner.num_simulations - before),
        )

    def close(self) -> None:
        """Close the environments."""
        self.evaluator.close()


class _NotFinite(Exception):
    """Ends an evaluation, whose last outputs of the environments are its answer."""

    def __init__(self, outputs: TensorDict) -> None:
        super().__init__("an environment's outputs are not finite")
        self.outputs = outputs


def _require_finite(outputs: TensorDict) -> None:
    if not all_finite(outputs):
        raise _NotFinite(outputs)


def episodes_of(answer: TensorDict) -> Episodes:
    """The episodes that an `EvaluateRole` answered with.

    >>> episodes_of(TensorDict(returns=torch.tensor([1.0]), lengths=torch.tensor([5]),
    ...                        as_first=torch.tensor([], dtype=torch.bool)))
    Episodes(returns=[1.0], lengths=[5], as_first=[])
    """
    return Episodes(*(answer[name].tolist() for name in ("returns", "lengths", "as_first")))
