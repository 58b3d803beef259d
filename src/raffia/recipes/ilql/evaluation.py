"""How good a run's agent is: by games that it plays, or by rows that were held out.

A run on data may be evaluated in an environment of the user's own (`find_environment`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from raffia.algorithms.ilql.learner import hyper_of
from raffia.algorithms.ilql.off_policy import action_log_probs, off_policy_return
from raffia.algorithms.ilql.policy import ILQL_Policy
from raffia.algorithms.ilql.terms import masks_of
from raffia.functional.seeds import derive_seed, generator_for
from raffia.lm.data.data_point import DataPoint
from raffia.lm.data.dialogue import DialogueDataset
from raffia.lm.decoding.config import DecodeConfig
from raffia.lm.envs.contract import Language_Environment
from raffia.lm.envs.play import DialogueReturns, play_dialogues
from raffia.lm.envs.wordle.play import WordleEvaluation
from raffia.lm.envs.wordle.play import evaluate as play
from raffia.lm.tokenizers.tokenizer import Tokenizer
from raffia.recipes.algorithm import given_name, recorded_name
from raffia.recipes.ilql.config import ILQLRun
from raffia.recipes.ilql.data import Corpus, for_games, make_wordle
from raffia.recipes.ilql.networks import Interrupted, Networks, Stoppable
from raffia.tensordict.tensordict import TensorDict
from raffia.train.config import ConfigError
from raffia.train.evaluations import Evaluated
from raffia.train.experiment import RunError

MakeLanguageEnv = Callable[[], Language_Environment]


AS_SET = "decode"  # the name of the decoding that the config has
HELD_OUT = "decode, held-out secrets"  # ... in games whose secrets are never those of the data
Stop = Callable[[], bool]


class Replies(NamedTuple):
    """Log-probabilities of the logged answers: N held-out dialogues of A actions at most.

    >>> Replies(*[torch.zeros(2, 3)] * 3, torch.ones(2, 3, dtype=torch.bool), -1.0).fit
    0.0
    """

    decoded: Tensor  # [N, A] log-probability when decoding
    policy: Tensor  # [N, A] ... of the policy alone
    rewards: Tensor  # [N, A]
    mask: Tensor  # bool [N, A]
    worst: float  # the least return of all logged dialogues

    @property
    def fit(self) -> float:
        """How well the policy knows the data: its mean log-probability of their actions."""
        return float(self.policy[self.mask].mean()) if self.mask.any() else 0.0


@dataclass(frozen=True)
class ILQLEvaluation:
    """The result of an evaluation: games by decoding, means over held-out rows, or both.

    >>> ILQLEvaluation(held_out={"loss": 0.5}).games
    {}
    """

    games: Mapping[str, DialogueReturns] = field(default_factory=dict)
    held_out: dict[str, float] = field(default_factory=dict)  # losses; `with_estimate` adds to it
    replies: Replies | None = field(default=None, repr=False, compare=False)
    dialogues: dict[str, Any] = field(default_factory=dict)  # see `ilql_dialogues`
    update: int = 0  # after which the agent was asked


def decodings(config: ILQLRun) -> dict[str, DecodeConfig]:
    """The decodings that are compared, the config's first.

    >>> from raffia.recipes.ilql.config import ILQLEvaluateConfig
    >>> list(decodings(ILQLRun(evaluate=ILQLEvaluateConfig(adv_weights=(0.0, 4.0)))))
    ['decode', 'adv_weight=0', 'adv_weight=4']
    """
    found = {AS_SET: config.decode}
    for weight in config.evaluate.adv_weights:
        found[f"adv_weight={weight:g}"] = (
            replace(config.decode, include_adv=True, adv_weight=weight)
            if weight
            else replace(config.decode, include_adv=False, include_logits=True)
        )
    return found


def with_member_decode(config: ILQLRun, hyper: TensorDict) -> ILQLRun:
    """The config with the decoding of one member of a population, which has its own numbers where
    these have ranges. All others are the config's, which a resumed run may have changed.

    >>> from raffia.recipes.population_config import PopulationConfig
    >>> hyper = TensorDict(temperature=torch.tensor(0.5), adv_weight=torch.tensor(7.0))
    >>> some = ILQLRun(population=PopulationConfig(size=2, ranges=("temperature=0.1..2",)))
    >>> decode = with_member_decode(some, hyper).decode
    >>> decode.temperature, decode.adv_weight == ILQLRun().decode.adv_weight
    (0.5, True)
    """
    own, population = {}, config.population
    ranges = population.hyper_ranges() if population.size > 1 else {}
    for name in {"temperature", "adv_weight"} & ranges.keys():
        number = hyper[name].cpu()
        if number != torch.tensor(getattr(config.decode, name), dtype=number.dtype):
            own[name] = number.item()
    return replace(config, decode=replace(config.decode, **own)) if own else config


@dataclass(frozen=True)
class Evaluator:
    """What an evaluation needs: the networks, the data, the config, and where games are played.

    make_env: makes the environment of a run on data; None: Wordle, or no games.
    stop: asked now and then; once it is true, an evaluation raises `Interrupted`.
    """

    networks: Networks
    corpus: Corpus
    config: ILQLRun
    make_env: MakeLanguageEnv | None = None
    stop: Stop = lambda: False

    def policy(self, decode: DecodeConfig, seed: int, *purpose: str) -> Stoppable:
        """The agent with this decoding; in Wordle it ends an utterance that is no longer a guess.

        seed, purpose: of the draws.
        """
        if self.make_env is None:
            decode = for_games(decode, self.config.wordle)
        draws = generator_for(seed, *purpose)
        policy = ILQL_Policy(self.networks, self.corpus.tokenizer, decode, generator=draws)
        return Stoppable(policy, self.stop)

    def play_games(self, seed: int) -> dict[str, DialogueReturns]:
        """Dialogues of each decoding in the environment, or games of Wordle; all meet the same
        chances.

        Of Wordle with secrets that are held out there are games with these besides.
        """
        config, make_env = self.config, self.make_env
        own, ways = config.evaluate, decodings(config)
        if make_env is None and config.wordle.num_held_out:
            ways[HELD_OUT] = config.decode
        wordle = make_wordle(config.wordle) if make_env is None else None
        found: dict[str, DialogueReturns] = {}
        for name, decode in ways.items():
            policy = self.policy(decode, seed, "decode", name)
            if wordle is not None:
                game = make_wordle(config.wordle, held_out=True) if name == HELD_OUT else wordle
                found[name] = play(policy, game, own.num_episodes, seed, batch_size=own.batch_size)
            elif make_env is not None:
                seeds = [derive_seed(seed, "dialogue", i) for i in range(own.num_episodes)]
                played = play_dialogues(make_env, policy, seeds, batch_size=own.batch_size)
                found[name] = DialogueReturns(tuple(one.episode_return for one in played))
        return found

    def held_out_means(self, data: DialogueDataset) -> dict[str, float]:
        """The losses of all these rows as of one batch, and the means of V, Q and the advantage.

        By the weights, tau and gamma of the config: what a member of a population has of its own
        changes how it learns, and not what it is measured by.
        """
        networks, config, rows = self.networks, self.config, self._rows_of(data)
        num, like = len(rows), next(networks.model.parameters())
        size, device = config.evaluate.batch_size, like.device
        numbers = hyper_of(config, like).to(device)
        batches = []
        for start in range(0, num, size):
            batch = data.take(rows[start : start + size], per_token=config.model.per_token)
            mask = masks_of(batch["action_mask"], batch["terminals"], config.loss.mask).values
            batches.append((batch, int(mask.sum()), int(batch["attn_mask"][:, 1:].sum())))
        actions, tokens = (sum(counts) for counts in list(zip(*batches, strict=True))[1:])
        means: dict[str, float] = {}
        for batch, own_actions, _ in batches:
            self._stop_if_asked()
            # Losses are divided by what rows have in the mean over all of them, so that the mean
            # over the rows of all batches is that of one batch.
            for name, total in (("actions_per_row", actions), ("next_tokens_per_row", tokens)):
                batch[name] = torch.full((len(batch),), max(total, 1) / num)
            with torch.no_grad():
                _, metrics = networks.loss(batch.to(device), numbers)
            for name, value in metrics.items():
                if name == "num_tokens":
                    continue
                of_actions = name.endswith("_mean")
                weight = own_actions / max(actions, 1) if of_actions else len(batch) / num
                means[name] = means.get(name, 0.0) + weight * float(value)
        return means

    def logged_replies(self, data: DialogueDataset) -> Replies | None:
        """Log-probabilities of these rows' answers; None where they can't be known.

        The policy stands for whoever made the data, so it has to be a cloning of them, of tokens.
        """
        networks, config = self.networks, self.config
        loss, decode = config.loss, config.decode
        cloned = loss.awac_weight > 0 and not loss.needs_advantage
        values = not decode.shifts or (loss.needs_values and config.model.per_token)
        if not (cloned and decode.include_logits and values):
            return None
        rows, size = self._rows_of(data), config.evaluate.batch_size
        device = next(networks.model.parameters()).device
        parts: list[tuple[Tensor, ...]] = []
        for start in range(0, len(rows), size):
            self._stop_if_asked()
            batch = data.take(rows[start : start + size]).to(device)
            both = action_log_probs(
                *(networks.model, networks.target, batch, decode),
                pad_token=data.vocabulary.pad_token_id,
                num_tokens=data.vocabulary.num_tokens,
            )
            parts.append(tuple(t.cpu() for t in (*both, batch["rewards"], batch["action_mask"])))
        most = max(part[0].shape[1] for part in parts)
        decoded, policy, rewards, mask = (
            torch.cat([F.pad(entry, (0, most - entry.shape[1])) for entry in entries])
            for entries in zip(*parts, strict=True)
        )
        worst = float(data.store.summary.episode_return.min())
        return Replies(decoded, policy, rewards.double(), mask, worst)

    def _rows_of(self, data: DialogueDataset) -> npt.NDArray[np.int64]:
        num = min(len(data), self.config.evaluate.num_episodes)
        return np.linspace(0, len(data) - 1, num).round().astype(np.int64)

    def _stop_if_asked(self) -> None:
        if self.stop():
            raise Interrupted


def with_estimate(found: ILQLEvaluation, made_the_data: Replies | None = None) -> ILQLEvaluation:
    """Add an estimate of the return of this decoding and of its certain gain over the data.

    made_the_data: of the agent whose policy knows the data best, of several; None: its own

    The score is the estimated gain over the logged dialogues where the 95 % interval leaves no
    room for none, and else 0: then the newest checkpoint is as good as any. Not the least gain: an
    agent that learns generates less and less of what the data have, its interval grows, and the
    best checkpoint would be an early one. Without an estimate it is minus the loss.

    >>> with_estimate(ILQLEvaluation(held_out={"loss": 0.5})).held_out["score"]
    -0.5
    """
    replies, metrics = found.replies, dict(found.held_out)
    if replies is None:
        return replace(found, held_out=metrics | {"score": -metrics["loss"]})
    reference = (made_the_data or replies).policy
    one = off_policy_return(replies.decoded - reference, replies.rewards, replies.worst)
    metrics |= {
        "score": one.gain if one.gain_low > 0 else 0.0,
        "estimated_return": one.mean_return,
        "estimated_low": one.low,
        "estimated_high": one.high,
        "logged_return": one.logged_return,
        "gain_low": one.gain_low,
        "effective_rows": one.effective_rows,
        "support": one.support,
    }
    return replace(found, held_out=metrics)


def fitness_of(found: ILQLEvaluation) -> float:
    """The fitness by which members of a population are chosen.

    >>> fitness_of(ILQLEvaluation(held_out={"score": 0.0, "gain_low": -0.5}))
    -0.5
    """
    if found.games:
        return found.games[AS_SET].mean_return
    return found.held_out.get("gain_low", found.held_out["score"])


def evaluated(found: ILQLEvaluation) -> Evaluated:
    """The metrics row of an evaluation.

    >>> evaluated(ILQLEvaluation(held_out={"loss": 0.5, "score": 0.25})).score
    0.25
    """
    if not found.games:
        return Evaluated(found.held_out["score"], found.held_out)
    by_name = {name: figures_of(games) for name, games in found.games.items()}
    first = found.games[AS_SET]
    values = {
        **found.held_out,
        **by_name[AS_SET],
        "returns": list(first.returns),
        "decodings": by_name,
    }
    return Evaluated(first.mean_return, values)


def figures_of(games: DialogueReturns) -> dict[str, Any]:
    """The mean return of games with its 95 % interval, None of one game, and the fraction won.

    >>> figures_of(DialogueReturns((1.0,)))
    {'mean_return': 1.0, 'low': None, 'high': None}
    """
    low, high = games.interval if len(games.returns) > 1 else (None, None)
    found = {"mean_return": games.mean_return, "low": low, "high": high}
    return found | ({"share_won": games.share_won} if isinstance(games, WordleEvaluation) else {})


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
    """Return the factory of the environment of a run on data; None if it has none.

    given: by the caller, who vouches for it: the name of a file may be given, or a module of the
        current folder. None: as the config names it, which may come from elsewhere, so only
        from an installed package.
    Raises RunError if it is not there, or if the tokenizer cannot encode how its dialogues begin.

    >>> config = with_env(ILQLRun(task="data"), "haggle.py:Haggle")
    >>> find_environment(config, None, None)
    Traceback (most recent call last):
    ...
    raffia.train.experiment.RunError: its environment is haggle.py:Haggle, which is not a class of
    an installed package. If you trust it, name it: --env haggle.py:Haggle, in Python
    make_env=Haggle
    """
    name = config.evaluate.env
    if not name:
        return None
    if given is not None:
        make_env: Any = given_name(given, "a Language_Environment")
    else:
        make_env = recorded_name(name)
        # Nothing else is called on a folder's word: it could name any function.
        if not (isinstance(make_env, type) and issubclass(make_env, Language_Environment)):
            home, _, last = name.rpartition(":")
            call = f"name it: --env {name}, in Python make_env={last}"
            if "<" in last or home == "__main__":
                call = "pass make_env=... again in Python, as when the run was started"
            raise RunError(
                f"its environment is {name}, which is not a class of an installed package. If you "
                f"trust it, {call}"
            )
    of_another_kind = isinstance(make_env, type) and not issubclass(make_env, Language_Environment)
    env = make_env() if callable(make_env) and not of_another_kind else make_env
    if not isinstance(env, Language_Environment) or env is make_env:
        raise ConfigError(
            f"{name} is {env!r}; it must be a class, or a function, that returns a "
            "raffia.lm.Language_Environment when called without arguments"
        )
    try:
        DataPoint.from_obs(env.reset(0), tokenizer)
    except ValueError as error:
        raise RunError(
            f"the first utterance of {name} cannot be encoded with the tokens of the data: "
            f"{error}. Learn from dialogues of this environment, or use --data.tokenizer FOLDER"
        ) from error
    return make_env
