"""raffia play: a game of a person against an agent in the terminal: questions, answers, boards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from raffia.cli.parser import UsageError, whole
from raffia.cli.runs import add_device, chosen_run, config_of_kind, run_parser
from raffia.cli.style import call, waiting
from raffia.cli.terminal import Terminal
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.report.folder import PLAYED_BY_PEOPLE

if TYPE_CHECKING:
    from raffia.recipes.efficientzero.match import BoardPlayer, Match, Thought


ABOUT = """\
Play TicTacToe or Connect4 against a trained agent, in the terminal. Nothing is written."""
EXAMPLES = [
    "raffia train efficientzero --preset tictactoe  # train an agent",
    "raffia play runs/tictactoe-0",
    "raffia play runs/connect4-0 --second --num-simulations 400  # it moves first",
]


def play(words: Sequence[str]) -> int:
    """`raffia play RUN`

    >>> play(["--secnd"])
    Traceback (most recent call last):
        ...
    raffia.cli.parser.UsageError: raffia play has no --secnd; did you mean --second?
    """
    parser = run_parser("play", ABOUT, EXAMPLES)
    parser.add_argument("--second", action="store_true", help="let the agent move first")
    parser.flag("--num-simulations N", "simulations of the agent's search per move", whole(1))
    add_device(parser)
    parser.flag("--networks WHERE", "your own networks: package.module:name or file.py:name")
    args = parser.read(words)
    first = call("raffia", "train", "efficientzero", "--preset", PLAYED_BY_PEOPLE[0])
    run = chosen_run(args.run, "play", lambda run: run.env in PLAYED_BY_PEOPLE, first)
    talk = call("raffia", "chat", run), call("raffia", "evaluate", run)
    game = config_of_kind(EfficientZeroRun, run, *talk).env.id
    if game not in PLAYED_BY_PEOPLE:
        raise UsageError(
            f"{run} plays {game}; a person can play {' and '.join(PLAYED_BY_PEOPLE)}",
            first,
            call("raffia", "evaluate", run, "--record"),
        )

    waiting(f"loading the agent of {run} ...")
    return play_against(
        run,
        checkpoint=args.checkpoint,
        device=args.device,
        num_simulations=args.num_simulations,
        second=args.second,
        networks=args.networks,
    )


def play_against(
    folder: str | Path,
    *,
    checkpoint: str = "best",
    device: str = "cpu",
    num_simulations: int | None = None,
    second: bool = False,  # the agent begins
    networks: str | None = None,
    stdin: TextIO | None = None,
    stdout: TextIO | None = None,
) -> int:
    """Play against the agent of a run until the person has enough; the exit status."""
    from raffia.recipes.efficientzero.match import load_player

    own = {} if networks is None else {"networks": networks}
    more: dict[str, Any] = {"num_simulations": num_simulations, **own}
    agent = load_player(Path(folder), checkpoint, device=device, **more)
    Table(agent, int(second), stdin or sys.stdin, stdout or sys.stdout).run()
    return 0


def move_named(text: str, names: Sequence[str]) -> int | None:
    """The action that a person means: by its name, turned round too, or by its number from 1.

    >>> names = [column + row for row in "123" for column in "abc"]
    >>> move_named("B2", names), move_named("2b", names), move_named("5", names)
    (4, 4, 4)
    >>> move_named("d4", names) is None
    True
    """
    text = "".join(text.lower().split())
    for spelling in (text, text[::-1]):
        if spelling in names:
            return list(names).index(spelling)
    if text.isascii() and text.isdigit() and 1 <= int(text) <= len(names):
        return int(text) - 1
    return None


def policy_text(policy: Sequence[float], names: Sequence[str], columns: int) -> str:
    """Fractions of actions as per cents, laid out as on the board; a dot where there is none.

    >>> print(policy_text([0.25, 0, 0.746, 0.004], ["a1", "b1", "a2", "b2"], columns=2))
          a    b
    1   25%    .
    2   75%  <1%
    >>> print(policy_text([0.1, 0.9], ["1", "2"], columns=2))
          1    2
        10%  90%
    """
    cells = [f"{_percent(fraction):>5}" for fraction in policy]
    rows = ["".join(cells[i : i + columns]) for i in range(0, len(cells), columns)]
    head = "".join(f"{name[0]:>5}" for name in names[:columns])
    labels = [str(i + 1) for i in range(len(rows))] if len(rows) > 1 else [" "]
    return "\n".join([f" {head}", *map("".join, zip(labels, rows, strict=True))])


def _percent(fraction: float) -> str:
    if fraction <= 0:
        return "."
    return "<1%" if fraction < 0.005 else f"{fraction:.0%}"


class Table(Terminal):
    """A table where a person and an agent play. It reads lines, and works without a terminal.

    >>> import io
    >>> from raffia.envs.board import TicTacToe
    >>> class First:  # always the first free square
    ...     spec = TicTacToe(1).spec
    ...     def act(self, state):
    ...         policy = torch.nn.functional.one_hot(state["action_mask"].int().argmax(-1), 9)
    ...         return TensorDict(action=policy.argmax(-1), policy=policy.float(),
    ...                           value=torch.zeros(len(policy)), batch_size=state.shape)
    >>> output = io.StringIO()
    >>> Table(First(), 0, io.StringIO("b2\\nc1\\na3\\n"), output).run()
    >>> "You have won." in output.getvalue()
    True
    """

    def __init__(self, agent: BoardPlayer, person: int, stdin: TextIO, stdout: TextIO) -> None:
        """person: 0 if the person begins, 1 if the agent does."""
        super().__init__(stdin, stdout)
        self.agent, self.person = agent, person
        self.match: Match  # the current one: `begin` makes the first
        self._commands: dict[str, Callable[[], None]] = {
            **dict.fromkeys(("help", "h", "?"), self._help),
            **dict.fromkeys(("undo", "u"), self._undo),
            **dict.fromkeys(("new", "n", "again", "yes", "y"), self.begin),
            **dict.fromkeys(("quit", "q", "exit", "no"), self.leave),
        }

    @property
    def question(self) -> str:  # type: ignore[override]
        """The prompt of the next line."""
        return "new, undo or quit: " if self.match.ended else "your move: "

    def turn(self) -> None:
        """The person's turn, or the agent's."""
        if self.match.ended or self.match.to_play == self.person:
            super().turn()
        else:
            self._agent_moves()

    def begin(self) -> None:
        """Begin a game."""
        from raffia.recipes.efficientzero.match import Match

        self.match = Match(self.agent)
        mine, its = self.match.game.symbols[self.person], self.match.game.symbols[1 - self.person]
        begins = "you begin" if self.person == 0 else "the agent begins"
        self.print_line(f"You are {mine}, the agent is {its}; {begins}.")
        self._help()
        self._show()

    def _help(self) -> None:
        names = self.match.game.action_names
        if len(names) == self.match.game.columns:
            moves = f"Drop a stone into a column, {names[0]} to {names[-1]}."
        else:
            moves = f"Put a stone on a square, {names[0]} to {names[-1]}, or 1 to {len(names)}."
        self.print_line(f"{moves}\nOther commands: undo, new, help, quit.")

    def _undo(self) -> None:
        """Undo moves up to the one before the person's last."""
        made = len(self.match.actions)
        own = [ply for ply in range(made) if ply % 2 == self.person]
        if not own:
            self.print_line("You have no move to take back.")
            return
        self.match.take_back(made - own[-1])
        self._show()

    def on_line(self, line: str) -> None:
        """Execute a line: a command, or a move."""
        word = line.lower()
        if word in self._commands:
            self._commands[word]()
        elif word and self.match.ended:
            self.print_line("This game is over. Type new, undo or quit.")
        elif word:
            self._move(word)

    def _move(self, word: str) -> None:
        names = self.match.game.action_names
        action = move_named(word, names)
        free = " ".join(names[legal] for legal in self.match.legal)
        if action is None:
            self.print_line(
                f"{word!r} is not a move; type help for the moves.\nYou can play {free}."
            )
        elif action not in self.match.legal:
            taken = "full" if len(names) == self.match.game.columns else "taken"
            self.print_line(f"{names[action]} is {taken}. You can play {free}.")
        else:
            self.match.play(action)
            self._show()

    def _agent_moves(self) -> None:
        thought = self.match.think()
        self.match.play(thought.action)
        self.print_line(self._thought_text(thought))
        self._show()

    def _thought_text(self, thought: Thought) -> str:
        game = self.match.game
        return (
            f"The agent plays {game.action_names[thought.action]}. It values the position at "
            f"{thought.value:+.2f} for itself\n(1: win, -1: loss). Visits of its search:\n"
            f"{policy_text(thought.policy, game.action_names, game.columns)}"
        )

    def _show(self) -> None:
        self.print_line(f"\n{self.match.text()}\n")
        if self.match.ended:
            if self.match.winner is None:
                self.print_line("A draw.")
            else:
                won = self.match.winner == self.person
                self.print_line("You have won." if won else "The agent has won.")
