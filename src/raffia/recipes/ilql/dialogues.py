"""Scores of a few dialogues by a run's agent, token by token, for a page that shows them.

They are the same at every evaluation: games of the same secrets, rows from the worst to the best.
So one sees how values grow, and a file depends on the checkpoint and the config alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raffia.algorithms.ilql.terms import min_target_q
from raffia.files import make_folder, write_atomically
from raffia.functional.seeds import derive_seed
from raffia.lm.data.data_point import DataPoint
from raffia.lm.data.dialogue import DialogueDataset
from raffia.lm.envs.play import play_dialogues
from raffia.lm.envs.wordle.game import WordleEnv
from raffia.lm.envs.wordle.games import game_seeds
from raffia.lm.tokenizers.tokenizer import Tokenizer
from raffia.recipes.ilql.config import ILQLRun
from raffia.recipes.ilql.data import Corpus, make_wordle
from raffia.recipes.ilql.evaluation import Evaluator

NUM_OF_EACH = 4  # games of its own, and rows
MOST_TOKENS = 300  # of a dialogue; what comes behind is not looked at
NUM_OTHERS = 3  # tokens that were not chosen, of each decision
_Z95 = 1.959964  # of the normal distribution, both sides
Record = dict[str, Any]  # for JSON


def scored_dialogues(evaluator: Evaluator) -> Record:
    """Dialogues held by the agent, if it plays, and logged rows, with Q and V, as JSON values.

    Raises `Interrupted` if the evaluator is to stop.

    >>> from raffia.recipes.ilql.data import make_corpus
    >>> from raffia.recipes.ilql.networks import Networks
    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> config = ILQL_PRESETS["ilql-smoke"]
    >>> found = scored_dialogues(Evaluator(Networks(config), make_corpus(config, None), config))
    >>> [one["source"] for one in found["dialogues"]][3:5], found["data"]["num_rows"]
    (['own', 'logged'], 200)
    """
    corpus, config, shown = evaluator.corpus, evaluator.config, []
    if config.task == "wordle" or evaluator.make_env is not None:
        shown += [("own", game) for game in _own_games(evaluator)]
    rows = corpus.learnt if corpus.held_out is None else corpus.held_out
    source = "logged" if corpus.held_out is None else "held out"
    shown += [(source, rows[number]) for number in _worst_to_best(rows)]
    # A game that is over can be longer than what the agent ever had to read of it.
    most = min(MOST_TOKENS, config.model.trunk.block_size)
    return {
        "values": config.loss.needs_values,
        "policy": config.loss.awac_weight > 0,
        "data": data_summary(corpus, config),
        "dialogues": [
            {"source": source, **_scored(evaluator, point.cut(most))} for source, point in shown
        ],
    }


def data_summary(corpus: Corpus, config: ILQLRun) -> Record:
    """Statistics of the logged dialogues: of all of them, and of those used for learning.

    >>> from raffia.recipes.ilql.data import make_corpus
    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> config = ILQL_PRESETS["wordle-branching"]
    >>> found = data_summary(make_corpus(config, None), config)
    >>> found["num_rows"], found["learnt"]["num_rows"]
    (168, 168)
    """
    learnt = corpus.learnt
    returns = learnt.store.summary.episode_return
    error = float(np.std(returns, ddof=1)) / math.sqrt(len(returns)) if len(returns) > 1 else 0.0
    mean = float(np.mean(returns))
    found: Record = {
        "num_rows": len(returns),
        "mean_return": mean,
        "low": mean - _Z95 * error,
        "high": mean + _Z95 * error,
        "learnt": {
            "num_rows": len(learnt),
            "mean_return": float(np.mean(returns[learnt.rows])),
        },
    }
    if config.task == "wordle":  # each guess but the winning one costs 1
        found["share_won"] = float(np.mean(returns > -make_wordle(config.wordle).num_tries))
    return found


def write_dialogues(folder: str | Path, update: int, record: Mapping[str, Any]) -> Path:
    """Write `dialogues/<update>.json` of a run atomically; returns its path.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as there:
    ...     write_dialogues(there, 500, {"dialogues": []}).name
    '000000500.json'
    """
    path = Path(folder) / "dialogues" / f"{update:09}.json"
    make_folder(path.parent)
    text = json.dumps({"update": update, **record}, ensure_ascii=False, allow_nan=False)
    write_atomically(path, (text + "\n").encode())
    return path


# -- which


def _own_games(evaluator: Evaluator) -> list[DataPoint]:
    config, make_env = evaluator.config, evaluator.make_env
    if make_env is None:
        make_env = partial(WordleEnv, make_wordle(config.wordle))
    policy = evaluator.policy(config.decode, config.seed, "dialogues")
    seeds = game_seeds(derive_seed(config.wordle.data_seed, "dialogues"), NUM_OF_EACH)
    played = play_dialogues(make_env, policy, seeds)
    return [DataPoint.from_obs(game.observation, evaluator.corpus.tokenizer) for game in played]


def _worst_to_best(data: DialogueDataset) -> list[int]:
    """Numbers of rows that are spread evenly in the order of their returns."""
    order = np.argsort(data.store.summary.episode_return[data.rows], kind="stable")
    indices = np.linspace(0, len(order) - 1, min(NUM_OF_EACH, len(order))).round().astype(np.int64)
    found: list[int] = order[indices].tolist()
    return found


# -- the record of one


def _scored(evaluator: Evaluator, point: DataPoint) -> Record:
    tokenizer, per_token = evaluator.corpus.tokenizer, evaluator.config.model.per_token
    own = point.decisions(per_token)
    lasts = [at + 1 for at in own.action_idxs] if per_token else own.action_idxs
    actions: list[Record] = [
        {"first": state + 1, "last": last, "reward": _short(reward)}
        for state, last, reward in zip(own.state_idxs, lasts, own.rewards, strict=True)
    ]
    record: Record = {
        "return": _short(point.episode_return),
        "ended": point.terminal,
        "cut": point.was_cut,
        "tokens": pieces(tokenizer, point.tokens),
        "marks": [at for at, token in enumerate(point.tokens) if not tokenizer.decode([token])],
        "actions": actions,
        "states": [*own.state_idxs, own.last_state],
    }
    if actions:
        record |= _scores(evaluator, point, actions)
    return record


@torch.no_grad()
def _scores(
    evaluator: Evaluator,
    point: DataPoint,
    actions: list[Record],  # to which their scores are added
) -> Record:
    """V at the states; None behind the end."""
    model, target = evaluator.networks.model, evaluator.networks.target
    loss, per_token = evaluator.config.loss, evaluator.config.model.per_token
    device = next(model.parameters()).device
    own = point.decisions(per_token)

    def row(numbers: Sequence[int]) -> Tensor:  # [1, n]
        return torch.tensor([list(numbers)], device=device)

    out = model(
        row(point.tokens),
        row([*own.state_idxs, own.last_state]),
        row(own.action_idxs),
        target=target if loss.needs_values else None,
        with_logits=loss.awac_weight > 0,
    )
    log_probs = None
    if out.logits is not None:
        log_probs = out.logits[0, point.action_idxs].float().log_softmax(-1)  # [own tokens, V]
        positions = [at + 1 for at in point.action_idxs]
        of_token = log_probs.gather(1, row([point.tokens[at] for at in positions]).T).squeeze(1)
        by_position = dict(zip(positions, of_token.tolist(), strict=True))
        for action in actions:
            within = range(action["first"], action["last"] + 1)
            action["log_prob"] = _short(math.fsum(by_position[at] for at in within))
    target_q = None
    v: list[float | None] = []
    if loss.needs_values:
        rows = [q[0].float() for q in out.target_q]
        target_q = min_target_q(rows, loss.value_min, loss.value_max)  # [A, V], or [A, 1]
        v = [_short(value) for value in out.v[0].tolist()]
        for action, value, q_row in zip(actions, v, target_q, strict=False):
            token = point.tokens[action["last"]] if per_token else 0
            action["q"], action["v"] = _short(float(q_row[token])), value
            action["advantage"] = _short(float(q_row[token]) - (value or 0.0))
        if point.terminal:
            v[-1] = None
    if per_token:
        _add_others(evaluator.corpus.tokenizer, point, actions, log_probs, target_q)
    return {"v": v} if v else {}


def _add_others(
    tokenizer: Tokenizer,
    point: DataPoint,
    actions: list[Record],
    log_probs: Tensor | None,  # [A, V]
    target_q: Tensor | None,  # [A, V]
) -> None:
    """Alternatives to each action: the policy's likeliest; without one, the highest Q."""
    order = target_q if log_probs is None else log_probs
    if order is None:
        return
    order = order[:, : tokenizer.num_tokens]  # a model may have more, which are no text
    likeliest = order.topk(min(NUM_OTHERS + 1, order.shape[-1]), dim=-1).indices.tolist()
    for row, (action, tokens) in enumerate(zip(actions, likeliest, strict=True)):
        others = [token for token in tokens if token != point.tokens[action["last"]]]
        action["others"] = [
            {
                "token": pieces(tokenizer, [token])[0],
                **({} if log_probs is None else {"log_prob": _short(log_probs[row, token])}),
                **({} if target_q is None else {"q": _short(target_q[row, token])}),
            }
            for token in others[:NUM_OTHERS]
        ]


def pieces(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """The text of each token, such that those of an utterance concatenate to its text.

    >>> from raffia.lm.tokenizers.tokenizer import WordTokenizer
    >>> words = WordTokenizer.from_texts(["the cat"])
    >>> pieces(words, [words.bos_token_id, 1, 0, words.eos_token_id])
    ['<s>', 'the', ' cat', '</s>']
    """
    found: list[str] = []
    current: list[int] = []  # the utterance so far
    text = ""
    for token in tokens:
        alone = tokenizer.decode([token])
        if not alone:  # a mark between utterances
            found.append(tokenizer.id_to_token(token))
            current, text = [], ""
            continue
        current.append(token)
        whole = tokenizer.decode(current)
        # A letter of several tokens is not there before the last of them.
        found.append(whole[len(text) :] if whole.startswith(text) else alone)
        text = whole
    return found


def _short(value: float | Tensor) -> float | None:
    """A number rounded to the digits that are worth reading; None if it is not finite."""
    number = float(value)
    return float(f"{number:.5g}") if math.isfinite(number) else None
