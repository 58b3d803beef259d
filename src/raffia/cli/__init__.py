"""The command line. A command imports what it needs when it runs, so that help comes at once."""

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path

from raffia._version import __version__

__all__ = ["main"]


def _demo(args: argparse.Namespace) -> None:
    import torch

    from raffia.recipes.dynamics import DynamicsConfig, run

    torch.set_num_threads(1)  # these networks are too small for two threads to gain anything
    print(f"raffia demo: an ensemble learns how a cart-pole moves, seed {args.seed}", flush=True)
    run(DynamicsConfig(seed=args.seed), args.out, lambda line: print(line, flush=True))


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="raffia",
        description="Keyed trees of tensors, and learning with them.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"raffia {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)

    shown = commands.add_parser(
        "demo",
        allow_abbrev=False,
        help="train an ensemble of small networks as one tree of parameters (seconds)",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    shown.add_argument("--seed", type=int, default=0, help="data, first weights and batches")
    shown.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the result")
    shown.set_defaults(handler=_demo)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.  argv: the words after `raffia`.

    >>> main(["demo", "--sede=3"])
    Traceback (most recent call last):
        ...
    SystemExit: 2
    """
    parser = _build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [f"--{name}" for name in vars(args)]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"see raffia {args.command} --help"
        parser.error(f"{args.command} has no {unknown[0]}; {hint}")
    try:
        args.handler(args)
    except KeyboardInterrupt:
        parser.exit(130, "\nstopped\n")
    except OSError as error:
        parser.exit(1, f"raffia {args.command}: {error}\n")
    return 0
