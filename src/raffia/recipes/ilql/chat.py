"""A person and an agent of ILQL in a dialogue, or in a game of Wordle: what a terminal shows."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

from raffia.algorithms.ilql.generate import stream
from raffia.algorithms.ilql.policy import ILQL_Policy
from raffia.lm.data.dialogue_rows import Dialogue
from raffia.lm.data.utterances import Observation
from raffia.lm.envs.contract import Utterance
from raffia.lm.envs.wordle.game import (
    ALL_BLACK,
    Turn,
    Wordle,
    WordleObservation,
    code_of,
    colors,
    colors_of,
)

HALF_READ = "\ufffd"  # what a tokenizer gives for the first bytes of a character


class UnreadableText(ValueError):
    """A text of the person that the agent can't read; the message is for that person.

    >>> raise UnreadableText("there is no token for 'é'")
    Traceback (most recent call last):
    ...
    raffia.recipes.ilql.chat.UnreadableText: there is no token for 'é'
    """


class Piece(NamedTuple):
    """A token of an answer as it comes, with the agent's values; None where it has none.

    >>> Piece("cr", "cr", 0.5, advantage=0.25, v=-1.0).text
    'cr'
    """

    text: str  # what it adds to the answer; nothing if it ends it, or is half a character
    name: str  # the token itself
    probability: float  # its probability, the advantage counted in
    advantage: float | None  # target Q - V
    v: float | None  # before the token


class Reply:
    """An answer while it is given: its pieces, and then whether it was cut.

    >>> from raffia.recipes.ilql.data import make_tokenizer
    >>> from raffia.recipes.ilql.networks import Networks
    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> config = ILQL_PRESETS["ilql-smoke"]
    >>> policy = ILQL_Policy(Networks(config), make_tokenizer(config), config.decode)
    >>> reply = Reply(policy, [policy.tokenizer.boa_token_id])
    >>> "".join(piece.text for piece in reply) == reply.text
    True
    """

    def __init__(self, policy: ILQL_Policy, prompt: list[int]) -> None:
        self._policy, self._prompt = policy, prompt
        self.tokens: list[int] = []

    def __iter__(self) -> Iterator[Piece]:
        policy, tokenizer = self._policy, self._policy.tokenizer
        end, shown = tokenizer.eoa_token_id, ""
        steps = stream(
            policy.agent.model,
            policy.agent.target,
            self._prompt,
            policy.config,
            generator=policy.generator,
            tokenizer=tokenizer,
        )
        for step in steps:
            self.tokens.append(step.token)
            text, name = self.text, tokenizer.id_to_token(step.token)
            new = ""
            if text.startswith(shown) and (step.token == end or not text.endswith(HALF_READ)):
                new = text[len(shown) :]
            shown += new
            yield Piece(new, name, math.exp(step.log_prob), step.advantage, step.v)

    @property
    def text(self) -> str:
        """The text of the conversation up to now."""
        return self._policy.tokenizer.decode(self.tokens)

    @property
    def cut(self) -> str:
        """Why it has no end; nothing if it has one."""
        if self.tokens[-1] == self._policy.tokenizer.eoa_token_id:
            return ""
        block_size = self._policy.block_size
        if len(self._prompt) + len(self.tokens) >= block_size:
            return f"its context of {block_size} tokens is full"
        return f"it may generate {len(self.tokens)} tokens at a time"


class Chat:
    """A dialogue with an agent, of any length: what the context has no room for is forgotten.

    A prompt is made as the rows of the data are, so the agent reads what it was trained on.

    >>> from raffia.recipes.ilql.data import make_tokenizer
    >>> from raffia.recipes.ilql.networks import Networks
    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> config = ILQL_PRESETS["ilql-smoke"]
    >>> policy = ILQL_Policy(Networks(config), make_tokenizer(config), config.decode)
    >>> chat = Chat(policy)
    >>> chat.send("<b><b><g><b><y>")
    >>> len(list(chat.answer())) > 0, len(chat.utterances)
    (True, 2)
    """

    def __init__(self, policy: ILQL_Policy) -> None:
        self.policy = policy
        self.utterances: list[Utterance] = []  # with a number where it is the agent's
        self.num_forgotten = 0  # of the utterances, at the last answer
        self.cut = ""  # why the last answer has no end

    @property
    def block_size(self) -> int:
        """Tokens of the context."""
        return self.policy.block_size

    def send(self, text: str) -> None:
        """Add an utterance of the person; `UnreadableText` if the agent could not read it."""
        with _readable():
            alone = self.policy.tokens(Dialogue([(text, None)], terminal=False))
        room = self.policy.room
        if len(alone) + room > self.block_size:
            raise UnreadableText(
                f"the text has {len(alone)} tokens, but with an answer the agent's context of "
                f"{self.block_size} has room for {self.block_size - room}: send a shorter one"
            )
        self.utterances.append((text, None))

    def answer(self) -> Iterator[Piece]:
        """The agent's next utterance, piece by piece; it is added once the last piece has come."""
        reply = Reply(self.policy, self._prompt())
        yield from reply
        self.cut = reply.cut
        self.utterances.append((reply.text, 0.0))

    def take_back(self) -> bool:
        """Forget the agent's last answer; False if the last utterance is not the agent's."""
        if not self.utterances or self.utterances[-1][1] is None:
            return False
        self.utterances.pop()
        return True

    def _prompt(self) -> list[int]:
        """The utterances that fit the context: whole ones, the last."""
        dialogue = Dialogue(self.utterances, terminal=False)
        with _readable():
            prompt, self.num_forgotten = self.policy.fit(dialogue, self.policy.room)
        return prompt


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError) as error:  # what a tokenizer raises for what it lacks
        raise UnreadableText(str(error.args[0]).partition(";")[0]) from error


class Guessing:
    """A game of Wordle in which an agent guesses the word that a person holds.

    >>> from raffia.recipes.ilql.data import make_tokenizer, make_wordle
    >>> from raffia.recipes.ilql.networks import Networks
    >>> from raffia.recipes.ilql.presets import ILQL_PRESETS
    >>> config = ILQL_PRESETS["ilql-smoke"]
    >>> policy = ILQL_Policy(Networks(config), make_tokenizer(config), config.decode)
    >>> game = Guessing(policy, make_wordle(config.wordle))
    >>> text = "".join(piece.text for piece in game.think())
    >>> game.guess == text
    True
    >>> game.answer("bbbbb")
    >>> game.guess is None, len(game.turns)
    (True, 1)
    """

    def __init__(self, policy: ILQL_Policy, wordle: Wordle, secret: str | None = None) -> None:
        self.policy, self.wordle = policy, wordle
        self.secret = secret  # None: the person answers
        self.turns: tuple[Turn, ...] = ()
        self.guess: str | None = None  # that waits for its colours

    def new_game(self, secret: str | None = None) -> Guessing:
        """Start another game with the same agent."""
        return type(self)(self.policy, self.wordle, secret)

    @property
    def observation(self) -> WordleObservation:
        """The observation of the agent."""
        return WordleObservation(self.turns, self.wordle.num_tries)

    @property
    def words(self) -> tuple[str, ...]:
        """The words that the agent was trained on."""
        return self.wordle.vocabulary.words

    @property
    def words_left(self) -> tuple[str, ...]:
        """The words of the agent that are consistent with the colours up to now."""
        return self.wordle.words_left(self.turns)

    @property
    def is_word(self) -> bool:
        """Whether the guess is one; any other gets five times black, as in training."""
        return self.guess is not None and self.wordle.is_valid(self.guess)

    def think(self) -> Iterator[Piece]:
        """The next guess, piece by piece, or another instead of the one that waits."""
        observation: Observation = self.observation
        reply = Reply(self.policy, self.policy.prompt(observation))
        yield from reply
        self.guess = reply.text

    def row_of(self, guess: str) -> str | None:
        """The colours of a guess if they are known: from the secret, or as it is not a word."""
        if not self.wordle.is_valid(guess):
            return colors_of(ALL_BLACK)
        return None if self.secret is None else colors(self.secret, guess, self.wordle.rule)

    def answer(self, row: str) -> None:
        """The guess gets its colours, such as "gybbb"."""
        code_of(row)  # raises an error for what is wrong with it
        if self.guess is None:
            raise ValueError("no guess is waiting for colours: it is the agent's turn, `think()`")
        self.turns = (*self.turns, (self.guess, row))
        self.guess = None

    def take_back(self) -> bool:
        """The last colours that a word got were wrong; False if there are none."""
        words = [at for at, (guess, _) in enumerate(self.turns) if self.wordle.is_valid(guess)]
        if not words:
            return False
        self.guess = self.turns[words[-1]][0]
        self.turns = self.turns[: words[-1]]
        return True

    def reveal(self, secret: str) -> None:
        """Reveal the person's word; raises ValueError if earlier colours contradict it."""
        for guess, row in self.turns:
            right = colors(secret, guess, self.wordle.rule) if self.wordle.is_valid(guess) else row
            if right != row:
                raise ValueError(f"for {secret}, {guess} gets {right}, but got {row}")
        self.secret = secret
