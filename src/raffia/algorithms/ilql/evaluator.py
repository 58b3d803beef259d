"""`ILQL_Evaluator`: returns in an environment of text, and distance from another policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from raffia.algorithms.ilql.policy import ILQL_Policy, ModelAndTarget, Prompt
from raffia.functional.seeds import derive_seed, generator_for
from raffia.hints import check_range
from raffia.lm.data.data_point import DataPoint, TokenReward
from raffia.lm.decoding.config import DecodeConfig
from raffia.lm.decoding.generations import Generations
from raffia.lm.envs.contract import Language_Environment
from raffia.lm.envs.play import Played, play_dialogues
from raffia.lm.tokenizers.tokenizer import Tokenizer

MakeEnv = Callable[[], Language_Environment]


@dataclass(frozen=True)
class AgentEvaluation:
    """The results of some games: means over them, and estimates of KL and entropy.

    >>> game = Played(None, ("hi",), (1.0,), True)
    >>> AgentEvaluation((game,), (-0.5,), (0.1,), (1.2,)).token_reward
    -0.5
    """

    games: tuple[Played, ...]
    token_rewards: tuple[float, ...]  # of each game: by the `TokenReward` alone
    kls: tuple[float, ...]  # of each utterance: its log-probability less the policy's own
    surprises: tuple[float, ...]  # of each utterance: less its log-probability, in nats

    @property
    def env_reward(self) -> float:
        """The reward from the environment."""
        return _mean([game.episode_return for game in self.games])

    @property
    def token_reward(self) -> float:
        """The token rewards of the generated tokens."""
        return _mean(self.token_rewards)

    @property
    def kl(self) -> float:
        """The KL divergence between the distribution over utterances that was drawn from and the
        policy's own.

        An estimate by the generated tokens; of a beam search, how much likelier it made them.
        """
        return _mean(self.kls)

    @property
    def entropy(self) -> float:
        """The entropy of the distribution over utterances that was drawn from, which is estimated
        too.
        """
        return _mean(self.surprises)


class ILQL_Evaluator:
    """Lets an agent play, in evaluation mode and without gradients.

    make_env: an environment for each game.
    decode: how it generates.
    token_reward: what its tokens are worth by themselves; None for nothing.
    num_games, seed: the games, and all chance in them, follow from the seed.
    batch_size: games that are played together.

    >>> from raffia.algorithms.ilql.agent import ILQL
    >>> from raffia.lm.tokenizers.tokenizer import character_tokenizer
    >>> from raffia.lm.envs.wordle.game import Wordle, WordleEnv
    >>> from raffia.lm.envs.wordle.vocabulary import Vocabulary
    >>> wordle = Wordle(vocabulary=Vocabulary(("crane", "crown")))
    >>> tokenizer = character_tokenizer(["abcdefghijklmnopqrstuvwxyz<>"])
    >>> agent = ILQL(None, {"vocab_size": tokenizer.num_tokens, "n_layer": 1, "n_head": 2,
    ...                     "n_embd": 8, "block_size": 256})
    >>> evaluator = ILQL_Evaluator(lambda: WordleEnv(wordle), tokenizer,
    ...                            DecodeConfig(max_new_tokens=5), num_games=2)
    >>> evaluator.evaluate(agent).env_reward
    -6.0
    """

    def __init__(
        self,
        make_env: MakeEnv,
        tokenizer: Tokenizer,
        decode: DecodeConfig | None = None,
        *,
        token_reward: TokenReward | None = None,
        num_games: int = 32,
        seed: int = 0,
        batch_size: int = 256,
        max_steps: int = 1000,
    ) -> None:
        check_range("num_games", num_games, 1)
        self.make_env, self.tokenizer, self.token_reward = make_env, tokenizer, token_reward
        decode = DecodeConfig() if decode is None else decode
        # KL needs the policy's log-probabilities, which are there but for this
        self.decode = decode if decode.include_logits else replace(decode, report_all=True)
        self.num_games, self.seed = num_games, seed
        self.batch_size, self.max_steps = batch_size, max_steps

    def evaluate(self, agent: ModelAndTarget) -> AgentEvaluation:
        """Play; the same agent gets the same games and generates the same."""
        draws = generator_for(self.seed, "evaluation")
        policy = _NotingPolicy(agent, self.tokenizer, self.decode, generator=draws)
        policy.answers = []
        seeds = [derive_seed(self.seed, "game", number) for number in range(self.num_games)]
        games = play_dialogues(
            self.make_env, policy, seeds, max_steps=self.max_steps, batch_size=self.batch_size
        )
        return AgentEvaluation(
            games=tuple(games),
            token_rewards=tuple(self._token_reward(game) for game in games),
            kls=tuple(_of_best([answer.kl for answer in policy.answers])),
            surprises=tuple(-x for x in _of_best([answer.log_prob for answer in policy.answers])),
        )

    def _token_reward(self, game: Played) -> float:
        if self.token_reward is None:
            return 0.0
        row = DataPoint.from_obs(game.observation, self.tokenizer)
        earned = self.token_reward.get_token_reward(row.tokens)
        return math.fsum(earned[index + 1] for index in row.action_idxs)


class _NotingPolicy(ILQL_Policy):
    """A policy that notes the answers that it gives."""

    answers: list[Generations]

    def answer(self, observations: Sequence[Prompt]) -> Generations:
        self.answers.append(super().answer(observations))
        return self.answers[-1]


def _of_best(sums: Sequence[Tensor | None]) -> list[float]:  # each [P, G]
    """The numbers of the first text of each prompt."""
    return [number for one in sums if one is not None for number in one[:, 0].tolist()]


def _mean(numbers: Sequence[float]) -> float:
    return math.fsum(numbers) / len(numbers) if numbers else math.nan
