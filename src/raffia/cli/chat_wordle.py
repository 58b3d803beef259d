"""Wordle in the terminal: a person holds a word, and an agent guesses it."""

from __future__ import annotations

from typing import TextIO

from raffia.cli.conversation import Session
from raffia.cli.style import filled, paint, printable
from raffia.recipes.ilql.chat import Guessing

OF_COLOURS = {"g": "green", "y": "yellow", "b": "dim"}


class Game(Session):
    """A session of games, one after the other.

    >>> Game.question
    'your word, or Enter: '
    """

    question = "your word, or Enter: "
    help = """\
Type your word, and the agent plays by itself. Or press Enter, keep it to yourself, and answer
each guess with five letters: g right position, y elsewhere in the word, b not in it. The word
itself can be typed later, too.
  /again   another guess instead of the open one; behind a game, the same word again
  /undo    take your last colours back
  /words   those that the agent knows, and which fit so far
  /new     another game
  /quit    leave, as do Ctrl-D and Ctrl-C"""

    def __init__(
        self,
        game: Guessing,
        stdin: TextIO,
        stdout: TextIO,
        *,
        values: bool = False,
        weight: float = 1.0,
    ) -> None:
        super().__init__(stdin, stdout, values=values, weight=weight)
        self.game = game
        self.commands |= {
            "/again": lambda _: self._again(),
            "/undo": lambda _: self._undo(),
            "/words": lambda _: self._words(),
            "/new": lambda _: self._anew(None),
        }

    def begin(self) -> None:
        """Print what the person needs to know."""
        self.print_line(
            f"Think of one of the {len(self.game.words)} words that the agent knows: /words shows "
            "them, /help tells\nmore. Type it, and the agent plays by itself; or press Enter, and "
            "give each guess its colours."
        )

    def heard(self, line: str) -> None:
        """Handle a line: a word, or colours, or neither."""
        word = line.lower()
        waits = self.game.guess is not None
        if waits and len(word) == 5 and set(word) <= set("gyb"):
            self._colours(word)
        elif not word and not waits:
            self._anew(None)
            self._play()
        elif len(word) == 5 and word.isascii() and word.isalpha():
            self._word(word)
        elif waits:
            guess = self.game.guess
            self.print_line(
                f"{line!r} is no answer to {guess}: five letters of g, y and b, such as gybbb; or "
                "your word."
            )
        else:
            self.print_line(f"{line!r} is no word of five letters a to z.")

    def _word(self, word: str) -> None:
        """Take the person's word: at the beginning, or amid a game."""
        guess = self.game.guess
        if guess is None:
            self._anew(word)
        else:
            try:
                self.game.reveal(word)
            except ValueError as error:
                self.print_line(f"That can't be your word: {error}. /undo takes colours back.")
                return
        if word not in self.game.words:
            self.remark(
                f"{word} is none of the {len(self.game.words)} words that the agent knows: it will "
                "hardly guess it"
            )
        if guess is not None:
            self._show_colours("   ", guess)
        self._play()

    def _play(self) -> None:
        """Let the agent guess, until the person is asked or the game is over."""
        game = self.game
        while not game.observation.terminal:
            guess = game.guess or self._guess()
            row = game.row_of(guess)
            if row is None:
                self.question = f"colours of {printable(guess)}: "
                return
            game.answer(row)
        self._ended()

    def _guess(self) -> str:
        """Show the next guess."""
        game = self.game
        pieces = self.stream(f"{len(game.turns) + 1}. ", game.think())
        guess = "".join(piece.text for piece in pieces)
        self._show_colours("", guess)
        if not game.is_word:
            self.remark("no word; it counts as a try, all black")
        self.show_values(pieces)
        return guess

    def _show_colours(self, before: str, guess: str) -> None:
        """End the line of a guess with its colours, where they are known."""
        row = self.game.row_of(guess)
        text = f"{before}{printable(guess)}" if before else ""
        self.print_line(text + (f"  {self._painted(row)}" if row else ""))

    def _colours(self, row: str) -> None:
        """The person's answer to the guess that waits."""
        self.game.answer(row)
        if not self.game.words_left:
            self.remark(
                "no word that the agent knows gets all these colours; /undo takes them back"
            )
        self._play()

    def _ended(self) -> None:
        game, number = self.game, len(self.game.turns)
        if game.observation.won:
            self.print_line(f"Found in {number} guess{'es' if number > 1 else ''}.")
        else:
            was = f"; it was {game.secret}" if game.secret else ""
            self.print_line(f"Not found in {number} guesses{was}.")
        self.question = Game.question

    def _painted(self, row: str) -> str:
        return "".join(paint(letter, OF_COLOURS[letter], self._stdout) for letter in row)

    def _again(self) -> None:
        if self.game.guess is not None:
            self.game.guess = None
            self._play()
        elif self.game.secret is not None:
            self._word(self.game.secret)
        else:
            self.remark("there is no guess to make again")

    def _undo(self) -> None:
        if self.game.secret is not None or not self.game.take_back():
            self.remark("there are no colours of yours to take back")
            return
        self._play()

    def _words(self) -> None:
        self.print_line(filled(" ".join(self.game.words), 76))
        if self.game.turns:
            left = self.game.words_left
            self.print_line(filled(f"{len(left)} fit so far: {' '.join(left)}", 76))

    def _anew(self, secret: str | None) -> None:
        self.game = self.game.new_game(secret)
        self.question = Game.question
