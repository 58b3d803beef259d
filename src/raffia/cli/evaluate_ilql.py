"""raffia evaluate, of a run of ILQL: games by each decoding, or losses on held-out rows."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raffia._version import __version__
from raffia.cli.errors import UsageError
from raffia.cli.style import call, columns, number, paint, waiting

if TYPE_CHECKING:
    from raffia.recipes.ilql import ILQLEvaluation

OF_SEARCH = {"num_simulations": "--num-simulations", "opponent": "--opponent", "record": "--record"}


def evaluate_ilql(run: Path, args: argparse.Namespace) -> int:
    """What `raffia evaluate` does with a run of ILQL.

    args: the words of the command, read.
    """
    from raffia.cli.evaluate import checkpoint_named, file_name, write_record

    for name, flag in OF_SEARCH.items():
        if getattr(args, name):
            raise UsageError(
                f"{flag} is for runs of EfficientZero; {run} is one of ILQL",
                call("raffia", "evaluate", run),
            )
    waiting(f"evaluating {run} ...")
    from raffia.recipes.ilql import evaluate
    from raffia.recipes.ilql.dialogues import write_dialogues

    found = evaluate(run, episodes=args.episodes, checkpoint=args.checkpoint, seed=args.seed)
    record = {
        "run": str(run),
        "checkpoint": args.checkpoint,
        "update": found.update,
        "seed": args.seed,
        "raffia": __version__,
        **figures(found),
    }
    path = write_record(run / "evaluations" / file_name(args, found.update), record)
    dialogues = write_dialogues(run, found.update, found.dialogues)
    if args.json:
        print(json.dumps(record))
        return 0
    print(f"{run}, {checkpoint_named(args.checkpoint, found.update)}")
    print(table(record))
    for file in (path, dialogues):
        print(f"wrote {paint(str(file), 'cyan', sys.stdout)}")
    return 0


def figures(found: ILQLEvaluation) -> dict[str, Any]:
    """All that was found, for JSON."""
    if found.held_out:
        return {"held_out": found.held_out}
    by_name = {}
    for name, games in found.games.items():
        low, high = games.interval if len(games.returns) > 1 else (None, None)
        by_name[name] = {
            "mean_return": games.mean_return,
            "low": low,
            "high": high,
            "share_won": games.share_won,
            "returns": list(games.returns),
        }
    return {"mean_return": by_name["decode"]["mean_return"], "decodings": by_name}


def table(record: dict[str, Any]) -> str:
    """What the terminal shows.

    >>> print(table({"held_out": {"loss": 0.5, "v_mean": -1.25, "score": -0.5}}))
      loss     0.500
      v_mean  -1.250
    These are losses and means on held-out rows: they do not say how well it speaks.
    No return is estimated: for that the policy has to be a cloning of the data (loss.beta 0), and
    decoding to use it.
    >>> one = {"mean_return": -2.5, "low": -3.0, "high": -2.0, "share_won": 0.75, "returns": [-2.5]}
    >>> print(table({"decodings": {"decode": one}}))
              return    low   high   won  games
      decode   -2.50  -3.00  -2.00  75 %      1
    """
    if "held_out" in record:
        return _held_out(record["held_out"])
    rows = [["", "return", "low", "high", "won", "games"]]
    for name, one in record["decodings"].items():
        returns = [number(one[key], 2) for key in ("mean_return", "low", "high")]
        rows.append([name, *returns, f"{100 * one['share_won']:.0f} %", str(len(one["returns"]))])
    return columns(rows, right=[1, 2, 3, 4, 5])


ESTIMATE = {
    "estimated_return": "return when decoding, estimated",
    "estimated_low": "... 95 % interval from",
    "estimated_high": "... to",
    "logged_return": "return of the same dialogues as logged",
    "effective_rows": "dialogues that the estimate rests on",
    "support": "share of what it would say that the data have",
}
FEW = 10  # dialogues, below which an estimate says next to nothing


def _held_out(told: dict[str, float]) -> str:
    hidden = {*ESTIMATE, "score", "gain_low"}
    losses = [[name, f"{value:.3f}"] for name, value in told.items() if name not in hidden]
    says = [
        columns(losses, right=[1]),
        "These are losses and means on held-out rows: they do not say how well it speaks.",
    ]
    if "estimated_return" not in told:
        says.append(
            "No return is estimated: for that the policy has to be a cloning of the data (loss.beta"
            " 0), and\ndecoding to use it."
        )
        return "\n".join(says)
    rows = [[spoken, f"{told[name]:.3f}"] for name, spoken in ESTIMATE.items()]
    says += ["", columns(rows, right=[1])]
    says.append(
        "The estimate weighs the held-out dialogues by how likely decoding would say their answers;"
        "\nwhat it would say beside the data counts as the worst dialogue. It is no game that was "
        "played."
    )
    if told["effective_rows"] < FEW:
        says.append(
            f"It rests on {told['effective_rows']:.1f} dialogues, which is too few to rely on: hold"
            " out more (--data.held_out),\nor judge by dialogues with the agent (raffia chat)."
        )
    return "\n".join(says)
