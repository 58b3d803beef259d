"""raffia play: the words of the command; the game itself is in play.py."""

from __future__ import annotations

from collections.abc import Sequence

from raffia.cli.errors import UsageError
from raffia.cli.parser import Parser
from raffia.cli.runs import chosen_run, config_of_algorithm
from raffia.cli.style import call, waiting

ABOUT = """\
Play TicTacToe or Connect4 against the agent of a run, in the terminal. It writes nothing."""
EXAMPLES = [
    "raffia train efficientzero --preset tictactoe  # first, an agent",
    "raffia play runs/tictactoe-0",
    "raffia play runs/connect4-0 --second --num-simulations 400  # it begins",
]


def play(words: Sequence[str]) -> int:
    """`raffia play RUN`

    >>> play(["--secnd"])
    Traceback (most recent call last):
        ...
    raffia.cli.errors.UsageError: raffia play has no --secnd; did you mean --second?
    """
    parser = Parser("raffia play", ABOUT, EXAMPLES)
    parser.add_argument("run", metavar="RUN", nargs="?", help="folder of the run")
    parser.add_argument("--second", action="store_true", help="the agent begins")
    parser.add_argument(
        "--checkpoint", default="best", metavar="WHICH", help="best, newest, or a number"
    )
    parser.add_argument(
        "--num-simulations", type=int, metavar="N", help="of its search, for each move"
    )
    args = parser.read(words)
    from raffia.recipes.efficientzero.match import GAMES

    first = call("raffia", "train", "efficientzero", "--preset", next(iter(GAMES)))
    run = chosen_run(args.run, "play", lambda run: run.env in GAMES, first)
    talk = call("raffia", "chat", run), call("raffia", "evaluate", run)
    game = config_of_algorithm("efficientzero", run, *talk).env.id
    if game not in GAMES:
        raise UsageError(
            f"{run} plays {game}; a person can play {' and '.join(GAMES)}",
            first,
            call("raffia", "evaluate", run, "--record"),
        )

    waiting(f"loading the agent of {run} ...")
    from raffia.cli.play import play

    return play(
        run,
        checkpoint=args.checkpoint,
        num_simulations=args.num_simulations,
        second=args.second,
    )
