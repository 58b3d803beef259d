"""raffia evaluate: evaluate the agent of a run."""

from __future__ import annotations

from collections.abc import Sequence

from raffia.cli.algorithm import commands_of
from raffia.cli.parser import Parser, UsageError, whole
from raffia.cli.runs import add_algorithm, add_device, chosen_run, config_of, run_parser
from raffia.cli.style import call

ABOUT = """\
Play whole episodes with a trained agent, without exploration: no noise at the root, and always the
best action. Prints mean, standard error, minimum, median and maximum of the returns; for two-player
games, wins, draws and losses as first and as second player. The same call plays the same episodes.

For ILQL runs: games with each decoding, with 95 % intervals; or losses on held-out rows and, with
--env, dialogues in your own environment.

Writes all figures as JSON to RUN/evaluations and, with --record, videos of episodes with the
agent's search results to RUN/episodes."""
FILMED = 3  # episodes
EXAMPLES = [
    "raffia evaluate runs/cartpole-0",
    "raffia evaluate runs/cartpole-0 --num-simulations 100  # search longer",
    "raffia evaluate runs/tictactoe-0 --opponent random --record 5 --format mp4",
    "raffia evaluate runs/chats-0 --env desk.py:Desk",
    "raffia evaluate runs/Corridor-0 --env corridor.py:Corridor",
    "raffia evaluate runs/cartpole-0 --json | jq .mean_return",
]


def evaluate(words: Sequence[str]) -> int:
    """`raffia evaluate RUN ...`

    >>> evaluate(["--episodes", "none"])
    Traceback (most recent call last):
        ...
    raffia.cli.parser.UsageError: --episodes: 'none' is not a whole number of at least 1
    """
    args = _parser().read(_with_number(words))
    run = chosen_run(args.run, "evaluate")
    if args.format and not args.record:
        with_videos = call("raffia", "evaluate", run, "--record", "--format", args.format)
        raise UsageError("--format is that of the videos of --record", with_videos)
    algorithm, config = config_of(run, args.algorithm)
    return commands_of(algorithm).evaluate(run, config, args)


def _parser() -> Parser:
    parser = run_parser("evaluate", ABOUT, EXAMPLES)
    parser.flag("--episodes N", "number of episodes", whole(1), 100)
    add_algorithm(parser)
    add_device(parser)
    about = "simulations of each search (default: as in the run's own evaluations)"
    parser.flag("--num-simulations N", about, whole(1))
    about = "opponent in two-player games (default: as in the run's settings)"
    parser.flag("--opponent", about, choices=["random", "rule", "perfect"])
    about = "your own environment: package.module:name or file.py:name"
    parser.flag("--env WHERE", about, default="")
    parser.flag("--networks WHERE", "your own networks, in the same way", default="")
    parser.flag("--seed N", "seed of the episodes", int, 0)
    about = f"record the first N episodes; {FILMED} if N is left out"
    parser.flag("--record N", about, whole(1), 0)
    parser.flag("--format", "format of the videos (default: gif)", choices=["gif", "mp4"])
    parser.add_argument("--json", action="store_true", help="print the figures as one line of JSON")
    return parser


def _with_number(words: Sequence[str]) -> list[str]:
    """The words with a number for --record, which may stand alone, also before the run."""
    return [
        f"--record={FILMED}" if word == "--record" and not after.isdecimal() else word
        for word, after in zip(words, [*words[1:], ""], strict=False)
    ]
