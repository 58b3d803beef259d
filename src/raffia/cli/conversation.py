"""Conversations of a person and an agent in the terminal: about data, or games of Wordle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TextIO

from raffia.cli.style import columns, filled, paint, printable
from raffia.cli.terminal import Terminal
from raffia.recipes.ilql.chat import Chat, Guessing, Piece, UnreadableText

MOST_ROWS = 24  # of a table of tokens
WIDEST_TOKEN = 16


def shade(advantage: float | None, weight: float) -> str:
    """The colour of a token, by how much its advantage moved the choice; "" if hardly at all.

    weight: of the advantage in the decoding, so that the product is in nats of its logit.

    >>> [shade(advantage, 2.0) for advantage in (0.4, 0.01, -0.2, -3.0, None)]
    ['green', '', 'yellow', 'red', '']
    """
    moved = 0.0 if advantage is None else weight * advantage
    if abs(moved) < 0.1:
        return ""
    if moved > 0:
        return "green"
    return "yellow" if moved > -1 else "red"


def values_table(pieces: Sequence[Piece], most: int = MOST_ROWS) -> str:
    """A table of values by token; of many, of those whose advantage was furthest from 0.

    >>> print(values_table([Piece("crane", "crane", 0.62, 0.31, -1.2)]))
      token  share      V  advantage
      crane   62 %  -1.20      +0.31
    """
    valued = [piece for piece in pieces if piece.v is not None]
    shown = sorted(range(len(valued)), key=lambda i: -abs(valued[i].advantage or 0.0))[:most]
    rows = [["token", "share", "V", "advantage"]]
    for i in sorted(shown):
        piece = valued[i]
        text = piece.text if piece.text == piece.text.strip() else repr(piece.text)
        rows.append(
            [
                printable(text or piece.name)[:WIDEST_TOKEN],
                f"{100 * piece.probability:.0f} %",
                f"{piece.v:.2f}",
                f"{piece.advantage or 0.0:+.2f}",
            ]
        )
    table = columns(rows, right=[1, 2, 3])
    left_out = len(valued) - len(shown)
    return f"{table}\n  and {left_out} more with smaller advantages" if left_out else table


class Session(Terminal):
    """The base of sessions: lines of a person, and an agent that answers.

    Words that begin with / are for the session; what else is typed, for the agent.

    >>> import io
    >>> class Echo(Session):
    ...     def on_text(self, line):
    ...         self.print_line(line.upper())
    >>> pieces = io.StringIO()
    >>> Echo(io.StringIO("hello\\n//quit\\n/quit\\nmore\\n"), pieces).run()
    >>> print(pieces.getvalue())
    you: hello
    HELLO
    you: //quit
    /QUIT
    you: /quit
    Goodbye.
    """

    help = "/quit: quit"

    def __init__(
        self, stdin: TextIO, stdout: TextIO, *, values: bool = False, weight: float = 1.0
    ) -> None:
        """values: whether to show values; weight: factor of the advantage, see `shade`."""
        super().__init__(stdin, stdout)
        self._values, self._weight = values, weight
        self.commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self.print_line(self.help),
            "/quit": lambda _: self.leave(),
        }

    def on_line(self, line: str) -> None:
        """Do what a word of the session asks for; hand on any other line."""
        word, _, rest = line.partition(" ")
        if word.lower() in self.commands:
            self.commands[word.lower()](rest.strip())
        elif word.startswith("/") and not word.startswith("//"):
            self.print_line(
                f"There is no command {word}; /help lists them. To send it as text: /{word}"
            )
        else:
            self.on_text(line.removeprefix("/"))

    def on_text(self, line: str) -> None:
        """Handle a line for the agent; it may be empty."""
        raise NotImplementedError

    def remark(self, text: str) -> None:
        """Show a line that belongs to neither side.

        >>> import sys
        >>> Session(sys.stdin, sys.stdout).remark("cut")
        (cut)
        """
        self.print_line(paint(f"({text})", "dim", self._stdout))

    def stream(self, who: str, answer: Iterable[Piece]) -> list[Piece]:
        """Print an answer as it comes, after its speaker; returns its tokens."""
        print(paint(who, "bold", self._stdout), end="", file=self._stdout, flush=True)
        pieces = []
        for piece in answer:
            pieces.append(piece)
            colour = shade(piece.advantage, self._weight) if self._values else ""
            text = printable(piece.text)
            text = paint(text, colour, self._stdout) if colour else text
            print(text, end="", file=self._stdout, flush=True)
        return pieces

    def show_values(self, pieces: Sequence[Piece]) -> None:
        """Print the table of an answer, if it is requested."""
        if self._values:
            self.print_line(values_table(pieces))


class Conversation(Session):
    """A conversation with an agent that has learnt from dialogues.

    >>> Conversation.question
    'you: '
    """

    help = """\
You type for the agent's environment; the agent answers.
  /again      another answer to the same text
  /go         let the agent answer without a text from you, at the start or once more
  /add TEXT   add a text without an answer yet
  /new        start over
  /quit       quit, as do Ctrl-D and Ctrl-C
  //TEXT      send a text that begins with /"""

    def __init__(
        self,
        chat: Chat,
        stdin: TextIO,
        stdout: TextIO,
        *,
        values: bool = False,
        weight: float = 1.0,
    ) -> None:
        super().__init__(stdin, stdout, values=values, weight=weight)
        self.chat = chat
        self._forgotten = 0  # tokens whose loss was reported
        self.commands |= {
            "/again": lambda _: self._again(),
            "/go": lambda _: self._answer(),
            "/add": self._add,
            "/new": lambda _: self._new(),
        }

    def begin(self) -> None:
        """Print what the person needs to know."""
        self.print_line("Type a text; /help lists the commands, /quit quits.")

    def on_text(self, line: str) -> None:
        """Send a line, and let the agent answer; nothing for an empty line."""
        if line and self._sent(line):
            self._answer()

    def _add(self, text: str) -> None:
        if text:
            self._sent(text)

    def _sent(self, text: str) -> bool:
        try:
            self.chat.send(text)
        except UnreadableText as error:
            self.remark(f"the agent can't read this: {error}")
            return False
        return True

    def _answer(self) -> None:
        pieces = self.stream("agent: ", self.chat.answer())
        self.print_line("")
        if self.chat.cut:
            self.remark(f"cut here: {self.chat.cut}")
        if self.chat.num_forgotten > self._forgotten:
            self._forgotten = self.chat.num_forgotten
            dropped = "utterance" if self._forgotten == 1 else f"{self._forgotten} utterances"
            self.remark(
                f"its context of {self.chat.block_size} tokens is full: it no longer sees the "
                f"first {dropped}; /new starts over"
            )
        self.show_values(pieces)

    def _again(self) -> None:
        if not self.chat.take_back():
            self.remark("there is no answer to repeat")
            return
        if self.chat.policy.config.num_beams is not None:
            self.remark("the agent always takes the best token, so this is the same")
        self._answer()

    def _new(self) -> None:
        self.chat.utterances.clear()
        self._forgotten = 0
        self.remark("starting over")


OF_COLOURS = {"g": "green", "y": "yellow", "b": "dim"}


class Game(Session):
    """A session of games, one after the other.

    >>> Game.question
    'your word, or Enter: '
    """

    question = "your word, or Enter: "
    help = """\
Type your word, and the agent plays the whole game. Or press Enter, keep the word secret, and
answer each guess with five letters: g right position, y elsewhere in the word, b not in it. You
can still type the word later.
  /again   another guess instead of the current one; after a game, the same word again
  /undo    take back your last colours
  /words   the words that the agent knows, and those that still fit
  /new     another game
  /quit    quit, as do Ctrl-D and Ctrl-C"""

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
            "/new": lambda _: self._start_over(None),
        }

    def begin(self) -> None:
        """Print what the person needs to know."""
        self.print_line(
            f"Think of one of the {len(self.game.words)} words that the agent knows (/words lists "
            "them, /help says\nmore). Type it, and the agent plays the whole game; or press Enter, "
            "and enter colours for each guess."
        )

    def on_text(self, line: str) -> None:
        """Handle a line: a word, or colours, or neither."""
        word = line.lower()
        waits = self.game.guess is not None
        if waits and len(word) == 5 and set(word) <= set("gyb"):
            self._colours(word)
        elif not word and not waits:
            self._start_over(None)
            self._play()
        elif len(word) == 5 and word.isascii() and word.isalpha():
            self._word(word)
        elif waits:
            guess = self.game.guess
            self.print_line(
                f"{line!r} is not an answer to {guess}: type five letters of g, y and b, such as "
                "gybbb, or your word."
            )
        else:
            self.print_line(f"{line!r} is not a word of five letters a to z.")

    def _word(self, word: str) -> None:
        """Set the person's word: at the start, or during a game."""
        guess = self.game.guess
        if guess is None:
            self._start_over(word)
        else:
            try:
                self.game.reveal(word)
            except ValueError as error:
                self.print_line(f"That can't be your word: {error}. /undo takes colours back.")
                return
        if word not in self.game.words:
            self.remark(
                f"{word} is not one of the {len(self.game.words)} words that the agent knows, so "
                "it is unlikely to guess it"
            )
        if guess is not None:
            self._show_colours("   ", guess)
        self._play()

    def _play(self) -> None:
        """Let the agent guess until the person must answer or the game is over."""
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
            self.remark("not a word; it counts as a guess, all black")
        self.show_values(pieces)
        return guess

    def _show_colours(self, before: str, guess: str) -> None:
        """End the line of a guess with its colours, if they are known."""
        row = self.game.row_of(guess)
        text = f"{before}{printable(guess)}" if before else ""
        self.print_line(text + (f"  {self._painted(row)}" if row else ""))

    def _colours(self, row: str) -> None:
        """The person's answer to the guess that waits."""
        self.game.answer(row)
        if not self.game.words_left:
            self.remark(
                "no word that the agent knows fits all these colours; /undo takes them back"
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
            self.remark("there is no guess to repeat")

    def _undo(self) -> None:
        if self.game.secret is not None or not self.game.take_back():
            self.remark("you have no colours to take back")
            return
        self._play()

    def _words(self) -> None:
        self.print_line(filled(" ".join(self.game.words), 76))
        if self.game.turns:
            left = self.game.words_left
            self.print_line(filled(f"{len(left)} still fit: {' '.join(left)}", 76))

    def _start_over(self, secret: str | None) -> None:
        self.game = self.game.new_game(secret)
        self.question = Game.question
