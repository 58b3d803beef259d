"""raffia evaluate: how good the agent of a run is."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raffia._version import __version__
from raffia.cli.errors import UsageError
from raffia.cli.parser import Parser
from raffia.cli.runs import add_checkpoint, chosen_run, config_of
from raffia.cli.style import call, columns, number, paint, waiting
from raffia.files import make_folder, write_json
from raffia.recipes.ilql.config import ILQLRun

ABOUT = """\
Play whole episodes with the agent of a run, without exploring: no noise at the root, the best
action always. Prints mean, standard error, minimum, median and maximum of the returns; of games of
two players the wins, draws and losses from either side. The same call gives the same episodes.

Of a run of ILQL: games by each decoding, with 95 % intervals; or its losses on held-out rows.

writes all figures as JSON into RUN/evaluations, and with --record
films of episodes, with what the agent thought, into RUN/episodes."""
FILMED = 3  # episodes
EXAMPLES = [
    "raffia evaluate runs/cartpole-0",
    "raffia evaluate runs/cartpole-0 --num-simulations 100  # thinks longer",
    "raffia evaluate runs/tictactoe-0 --opponent random --record 5 --format mp4",
    "raffia evaluate runs/cartpole-0 --json | jq .mean_return",
]


@dataclass(frozen=True)
class Spread:
    """Of returns.

    >>> spread_of([1.0, 2.0, 6.0])
    Spread(mean=3.0, standard_error=1.5275252316519468, minimum=1.0, median=2.0, maximum=6.0)
    """

    mean: float
    standard_error: float | None  # None: of one episode nothing can be said
    minimum: float
    median: float
    maximum: float


def evaluate(words: Sequence[str]) -> int:
    """`raffia evaluate RUN ...`

    >>> evaluate(["--episodes", "none"])
    Traceback (most recent call last):
        ...
    raffia.cli.errors.UsageError: --episodes: 'none' is no whole number above 0
    """
    args = _parser().read(_with_number(words))
    run = chosen_run(args.run, "evaluate")
    config = config_of(run)
    if isinstance(config, ILQLRun):
        from raffia.cli.evaluate_ilql import evaluate_ilql

        return evaluate_ilql(run, args)
    two_players = config.env.id in ("tictactoe", "connect4")
    if args.opponent and not two_players:
        raise UsageError(
            f"--opponent is for games of two players; {run} plays {config.env.id}",
            call("raffia", "evaluate", run),
        )

    waiting(f"playing {plural(args.episodes)} with {run} ...")
    from raffia.recipes.efficientzero import evaluate

    found = evaluate(
        run,
        episodes=args.episodes,
        checkpoint=args.checkpoint,
        seed=args.seed,
        num_simulations=args.num_simulations,
        record=args.record,
        suffix=args.format,
        opponent=args.opponent,
    )
    as_first = list(found.as_first or [])
    opponent = (args.opponent or config.evaluate.opponent) if two_players else None
    record = {
        "run": str(run),
        "checkpoint": args.checkpoint,
        "update": found.update,
        "seed": args.seed,
        "num_simulations": args.num_simulations,
        "opponent": opponent,
        "raffia": __version__,
        **_named(spread_of(found.returns)),
        "returns": list(found.returns),
        "lengths": list(found.lengths),
        **({"as_first": as_first} if as_first else {}),
        "files": [os.path.relpath(file, run) for file in found.files],
    }
    path = write_record(run / "evaluations" / file_name(args, found.update), record)
    if args.json:
        print(json.dumps(record))
        return 0
    played = plural(len(found.returns))
    against = f" against the {opponent} player" if opponent else ""
    print(f"{run}, {checkpoint_named(args.checkpoint, found.update)}: {played}{against}")
    print(table(found.returns, found.lengths, as_first))
    for file in [path, *found.files]:
        print(f"wrote {paint(str(file), 'cyan', sys.stdout)}")
    return 0


def plural(episodes: int) -> str:
    """So many of them.

    >>> plural(1), plural(2000)
    ('1 episode', '2,000 episodes')
    """
    return f"{number(episodes, 0)} episode{'' if episodes == 1 else 's'}"


def spread_of(returns: Sequence[float]) -> Spread:
    """Mean and spread; the standard error is that of the mean."""
    several = len(returns) > 1
    return Spread(
        mean=statistics.fmean(returns),
        standard_error=statistics.stdev(returns) / math.sqrt(len(returns)) if several else None,
        minimum=min(returns),
        median=statistics.median(returns),
        maximum=max(returns),
    )


def table(returns: Sequence[float], lengths: Sequence[int], as_first: Sequence[bool]) -> str:
    """What the terminal shows.

    >>> print(table([1.0, 1.0, -1.0, 0.0], [5, 6, 7, 9], [True, True, False, False]))
      as       wins  draws  losses
      first       2      0       0
      second      0      1       1
    <BLANKLINE>
              mean    +-   min  median  max
      return  0.25  0.48  -1.0     0.5  1.0
      length  6.75  0.85   5.0     6.5  9.0
    """
    parts = []
    if as_first:
        rows = [["as", "wins", "draws", "losses"]]
        for name, first in (("first", True), ("second", False)):
            own = [r for r, side in zip(returns, as_first, strict=True) if side is first]
            counts = (sum(r > 0 for r in own), sum(r == 0 for r in own), sum(r < 0 for r in own))
            rows.append([name, *map(str, counts)])
        parts.append(columns(rows, right=[1, 2, 3]))
    rows = [["", "mean", "+-", "min", "median", "max"]]
    for name, values in (("return", returns), ("length", lengths)):
        spread = spread_of([float(value) for value in values])
        extremes = (spread.minimum, spread.median, spread.maximum)
        digits = 0 if all(float(value).is_integer() for value in extremes) else 1
        fine = 2 if max(map(abs, values)) < 10 else 1
        rows.append(
            [
                name,
                number(spread.mean, fine),
                number(spread.standard_error, fine),
                *(number(value, digits) for value in extremes),
            ]
        )
    parts.append(columns(rows, right=[1, 2, 3, 4, 5]))
    return "\n\n".join(parts)


def checkpoint_named(asked: str, update: int | None) -> str:
    """Which checkpoint was meant, and which one that was: the newest may be damaged.

    >>> checkpoint_named("best", 300), checkpoint_named("300", 300)
    ('checkpoint best (update 300)', 'checkpoint 300')
    """
    return f"checkpoint {asked}" + ("" if asked == str(update) else f" (update {update:,})")


def file_name(args: argparse.Namespace, update: int | None) -> str:
    """Of a record: what else than these words was asked for would have other episodes.

    update: of the checkpoint that was found, whatever was asked for.

    >>> file_name(_parser().read(["--seed", "3", "--opponent", "rule"]), 300)
    'update-300-100-episodes-seed-3-rule.json'
    """
    thinks = f"-{args.num_simulations}-simulations" if args.num_simulations else ""
    against = f"-{args.opponent}" if args.opponent else ""
    return f"update-{update}-{args.episodes}-episodes-seed-{args.seed}{thinks}{against}.json"


def write_record(path: Path, record: dict[str, Any]) -> Path:
    """Write JSON all at once.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_record(Path(folder) / "evaluations" / "a.json", {"mean_return": 1.0}).name
    'a.json'
    """
    make_folder(path.parent)
    write_json(path, record, indent=1)
    return path


def _named(spread: Spread) -> dict[str, float | None]:
    return {
        "mean_return": spread.mean,
        "standard_error": spread.standard_error,
        "min_return": spread.minimum,
        "median_return": spread.median,
        "max_return": spread.maximum,
    }


def _parser() -> Parser:
    parser = Parser("raffia evaluate", ABOUT, EXAMPLES)
    parser.add_argument("run", metavar="RUN", nargs="?", help="folder of the run")
    parser.add_argument(
        "--episodes", type=_positive, default=100, metavar="N", help="how many; 100 if not given"
    )
    add_checkpoint(parser)
    parser.add_argument(
        "--num-simulations",
        type=_positive,
        metavar="N",
        help="of the search, for each move; as in the run's own evaluations if not given",
    )
    parser.add_argument(
        "--opponent",
        choices=["random", "rule", "perfect"],
        help="in games of two players; as in the run's settings if not given",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the episodes; 0")
    parser.add_argument(
        "--record",
        type=_positive,
        default=0,
        metavar="N",
        help=f"film the first N episodes; {FILMED} where no number follows",
    )
    parser.add_argument(
        "--format", choices=["gif", "mp4"], default="gif", help="of the films; gif if not given"
    )
    parser.add_argument("--json", action="store_true", help="print what is written, as one line")
    return parser


def _with_number(words: Sequence[str]) -> list[str]:
    """--record may stand alone, also before the run."""
    return [
        f"--record={FILMED}" if word == "--record" and not after.isdecimal() else word
        for word, after in zip(words, [*words[1:], ""], strict=False)
    ]


def _positive(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is no whole number above 0")
    return int(word)
