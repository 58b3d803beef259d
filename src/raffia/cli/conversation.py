"""Conversations of a person and an agent in the terminal: about data, or games of Wordle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TextIO, TypeVar

from raffia.cli.style import columns, filled, paint, printable
from raffia.cli.terminal import Terminal
from raffia.recipes.ilql.chat import Chat, Guessing, Piece, UnreadableText

Agent = TypeVar("Agent")  # as a session knows it
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


def values_table(pieces: Sequence[Piece]) -> str:
    """A table of values by token; of many, of those whose advantage was furthest from 0.

    >>> print(values_table([Piece("crane", "crane", 0.62, 0.31, -1.2)]))
      token  share      V  advantage
      crane   62 %  -1.20      +0.31
    """
    valued = [piece for piece in pieces if piece.v is not None]
    shown = sorted(range(len(valued)), key=lambda i: -abs(valued[i].advantage or 0.0))[:MOST_ROWS]
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


class Session(Terminal, Generic[Agent]):
    """The base of sessions: lines of a person, and an agent that answers.

    A word that begins with / is for the session, whose method `do_WORD` does it; what else is
    typed, for the agent.

    >>> import io
    >>> class Echo(Session):
    ...     def on_text(self, line):
    ...         self.print_line(line.upper())
    >>> pieces = io.StringIO()
    >>> Echo(None, io.StringIO("hello\\n//quit\\n/quit\\nmore\\n"), pieces).run()
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
        self,
        agent: Agent,
        stdin: TextIO,
        stdout: TextIO,
        *,
        values: bool = False,
        weight: float = 1.0,
    ) -> None:
        """values: whether to show values; weight: factor of the advantage, see `shade`."""
        super().__init__(stdin, stdout)
        self.agent, self._values, self._weight = agent, values, weight

    def do_help(self, text: str) -> None:
        """/help lists the words of the session."""
        self.print_line(self.help)

    def do_quit(self, text: str) -> None:
        """/quit ends the session."""
        self.leave()

    def on_line(self, line: str) -> None:
        """Do what a word of the session asks for; hand on any other line."""
        word, _, rest = line.partition(" ")
        command = getattr(self, f"do_{word[1:].lower()}", None) if word[:1] == "/" else None
        if command is not None:
            command(rest.strip())
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
        >>> Session(None, sys.stdin, sys.stdout).remark("cut")
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


class Conversation(Session[Chat]):
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

    _forgotten = 0  # utterances whose loss was reported

    def begin(self) -> None:
        """Print what the person needs to know."""
        self.print_line("Type a text; /help lists the commands, /quit quits.")

    def on_text(self, line: str) -> None:
        """Send a line, and let the agent answer; nothing for an empty line."""
        if line and self._sent(line):
            self.do_go()

    def do_add(self, text: str) -> None:
        """/add TEXT adds a text that is not answered yet."""
        if text:
            self._sent(text)

    def _sent(self, text: str) -> bool:
        try:
            self.agent.send(text)
        except UnreadableText as error:
            self.remark(f"the agent can't read this: {error}")
            return False
        return True

    def do_go(self, text: str = "") -> None:
        """/go lets the agent answer."""
        pieces = self.stream("agent: ", self.agent.answer())
        self.print_line("")
        if self.agent.cut:
            self.remark(f"cut here: {self.agent.cut}")
        if self.agent.num_forgotten > self._forgotten:
            self._forgotten = self.agent.num_forgotten
            dropped = "utterance" if self._forgotten == 1 else f"{self._forgotten} utterances"
            self.remark(
                f"its context of {self.agent.block_size} tokens is full: it no longer sees the "
                f"first {dropped}; /new starts over"
            )
        self.show_values(pieces)

    def do_again(self, text: str) -> None:
        """/again replaces the last answer by another one."""
        if not self.agent.take_back():
            self.remark("there is no answer to repeat")
            return
        if self.agent.policy.config.num_beams is not None:
            self.remark("the agent always takes the best token, so this is the same")
        self.do_go()

    def do_new(self, text: str) -> None:
        """/new starts over."""
        self.agent.utterances.clear()
        self._forgotten = 0
        self.remark("starting over")


OF_COLOURS = {"g": "green", "y": "yellow", "b": "dim"}


class Game(Session[Guessing]):
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

    def begin(self) -> None:
        """Print what the person needs to know."""
        self.print_line(
            f"Think of one of the {len(self.agent.words)} words that the agent knows (/words lists "
            "them, /help says\nmore). Type it, and the agent plays the whole game; or press Enter, "
            "and enter colours for each guess."
        )

    def on_text(self, line: str) -> None:
        """Handle a line: a word, or colours, or neither."""
        word = line.lower()
        waits = self.agent.guess is not None
        if waits and len(word) == 5 and set(word) <= set("gyb"):
            self._colours(word)
        elif not word and not waits:
            self._start_over(None)
            self._play()
        elif len(word) == 5 and word.isascii() and word.isalpha():
            self._word(word)
        elif waits:
            guess = self.agent.guess
            self.print_line(
                f"{line!r} is not an answer to {guess}: type five letters of g, y and b, such as "
                "gybbb, or your word."
            )
        else:
            self.print_line(f"{line!r} is not a word of five letters a to z.")

    def _word(self, word: str) -> None:
        """Set the person's word: at the start, or during a game."""
        guess = self.agent.guess
        if guess is None:
            self._start_over(word)
        else:
            try:
                self.agent.reveal(word)
            except ValueError as error:
                self.print_line(f"That can't be your word: {error}. /undo takes colours back.")
                return
        if word not in self.agent.words:
            self.remark(
                f"{word} is not one of the {len(self.agent.words)} words that the agent knows, so "
                "it is unlikely to guess it"
            )
        if guess is not None:
            self._show_colours("   ", guess)
        self._play()

    def _play(self) -> None:
        """Let the agent guess until the person must answer or the game is over."""
        game = self.agent
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
        game = self.agent
        pieces = self.stream(f"{len(game.turns) + 1}. ", game.think())
        guess = "".join(piece.text for piece in pieces)
        self._show_colours("", guess)
        if not game.is_word:
            self.remark("not a word; it counts as a guess, all black")
        self.show_values(pieces)
        return guess

    def _show_colours(self, before: str, guess: str) -> None:
        """End the line of a guess with its colours, if they are known."""
        row = self.agent.row_of(guess)
        text = f"{before}{printable(guess)}" if before else ""
        self.print_line(text + (f"  {self._painted(row)}" if row else ""))

    def _colours(self, row: str) -> None:
        """The person's answer to the guess that waits."""
        self.agent.answer(row)
        if not self.agent.words_left:
            self.remark(
                "no word that the agent knows fits all these colours; /undo takes them back"
            )
        self._play()

    def _ended(self) -> None:
        game, number = self.agent, len(self.agent.turns)
        if game.observation.won:
            self.print_line(f"Found in {number} guess{'es' if number > 1 else ''}.")
        else:
            was = f"; it was {game.secret}" if game.secret else ""
            self.print_line(f"Not found in {number} guesses{was}.")
        self.question = Game.question

    def _painted(self, row: str) -> str:
        return "".join(paint(letter, OF_COLOURS[letter], self._stdout) for letter in row)

    def do_again(self, text: str) -> None:
        """/again asks for another guess, or plays the same word again."""
        if self.agent.guess is not None:
            self.agent.guess = None
            self._play()
        elif self.agent.secret is not None:
            self._word(self.agent.secret)
        else:
            self.remark("there is no guess to repeat")

    def do_undo(self, text: str) -> None:
        """/undo takes back the last colours."""
        if self.agent.secret is not None or not self.agent.take_back():
            self.remark("you have no colours to take back")
            return
        self._play()

    def do_words(self, text: str) -> None:
        """/words prints the words that the agent knows."""
        self.print_line(filled(" ".join(self.agent.words), 76))
        if self.agent.turns:
            left = self.agent.words_left
            self.print_line(filled(f"{len(left)} still fit: {' '.join(left)}", 76))

    def do_new(self, text: str) -> None:
        """/new starts another game."""
        self._start_over(None)

    def _start_over(self, secret: str | None) -> None:
        self.agent = self.agent.new_game(secret)
        self.question = Game.question
