"""raffia chat: a talk with the agent of a run of ILQL; conversation.py has the lines of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from raffia.cli.parser import Parser, UsageError
from raffia.cli.runs import add_device, chosen_run, config_of_kind, run_parser
from raffia.cli.style import call, waiting
from raffia.recipes.ilql.config import ILQLRun
from raffia.report.folder import PLAYED_BY_PEOPLE, summarise

ABOUT = """\
Talk to a trained ILQL agent in the terminal. You play the part of its environment, and it answers
token by token. With a Wordle agent, you choose a word and it guesses. Nothing is written.

/help lists the commands of the conversation; /quit, Ctrl-D or Ctrl-C end it. Input can also be
piped."""
EXAMPLES = [
    "raffia train ilql --preset wordle  # train an agent",
    "raffia chat runs/wordle-0",
    "raffia chat runs/wordle-0 --values --adv-weight 0  # the policy alone",
    "printf 'hello\\n/again\\n' | raffia chat runs/chats-0 --top-k 20",
]


def chat(words: Sequence[str]) -> int:
    """`raffia chat RUN`

    >>> chat(["--temprature", "0.5"])
    Traceback (most recent call last):
        ...
    raffia.cli.parser.UsageError: raffia chat has no --temprature; did you mean --temperature?
    """
    args = _parser().read(words)
    start = "raffia train ilql --preset wordle"
    run = chosen_run(args.run, "chat", lambda run: run.algorithm == "ilql", start)
    plays = ["play"] if summarise(run).env in PLAYED_BY_PEOPLE else []
    calls = [call("raffia", command, run) for command in (*plays, "evaluate")]
    config = config_of_kind(ILQLRun, run, *calls)
    if config.population.size > 1:  # whose best member may speak with numbers of its own
        waiting(f"looking at the best member of {run} ...")
        from raffia.recipes.ilql import member_config

        config = member_config(run, args.checkpoint)
    config, notices = decoding_settings(config, args, run)

    waiting(f"loading the agent of {run} ...")
    return talk(
        run,
        config,
        checkpoint=args.checkpoint,
        seed=args.seed,
        device=args.device,
        values=args.values,
        notices=notices,
    )


def decoding_settings(
    config: ILQLRun, args: argparse.Namespace, run: Path
) -> tuple[ILQLRun, list[str]]:
    """The run's settings with the decoding that the words ask for, and notices about it.

    >>> args = _parser().read(["--adv_weight", "0", "--temperature", "0.5"])
    >>> config, notices = decoding_settings(ILQLRun(), args, Path("runs/a"))
    >>> config.decode.temperature, config.decode.include_adv, notices
    (0.5, False, [])
    """
    decode, notices = config.decode, list[str]()
    learns = config.loss.needs_values and config.model.per_token
    flags = {"--values": args.values, "--adv-weight": args.adv_weight}
    asked = [flag for flag, wanted in flags.items() if wanted]
    if asked and not learns:
        what = "no values" if not config.loss.needs_values else "values of whole utterances only"
        raise UsageError(
            f"{' and '.join(asked)}: {run} has learnt {what}, so its tokens have no values",
            call("raffia", "chat", run),
        )
    one = decode
    if (decode.num_beams or 1) > 1 or decode.num_generations > 1 or decode.rerank:
        beams = None if decode.num_beams is None else 1
        one = replace(decode, num_beams=beams, num_generations=1, rerank=None)
        how = "samples it" if beams is None else "always takes the best token"
        notices.append(f"The run chooses among several texts; here the agent gives one, and {how}.")
    cold = args.temperature == 0  # as others call it
    if cold and one.plans:
        one = replace(one, plan=replace(one.plan, num_simulations=0))
        notices.append(
            "The run plans its answers; at temperature 0 the agent takes the best token instead."
        )
    temperature = one.temperature if args.temperature is None or cold else args.temperature
    weight = one.adv_weight if args.adv_weight is None else args.adv_weight
    shifts = one.include_adv if args.adv_weight is None else weight > 0
    try:
        one = replace(
            one,
            temperature=temperature,
            num_beams=1 if cold else one.num_beams,
            top_k=one.top_k if args.top_k is None else args.top_k,
            top_p=one.top_p if args.top_p is None else args.top_p,
            adv_weight=weight,
            include_adv=shifts and learns,
            include_logits=one.include_logits or not (shifts and learns),
            report_all=args.values,
        )
    except ValueError as error:
        raise UsageError(str(error), "raffia chat --help") from None
    return replace(config, decode=one, evaluate=replace(config.evaluate, adv_weights=())), notices


def _parser() -> Parser:
    parser = run_parser("chat", ABOUT, EXAMPLES)
    add_device(parser)
    parser.flag("--seed N", "seed of the sampling", int, 0)
    parser.flag("--temperature X", "sampling temperature; 0 takes the best token", float)
    parser.flag("--adv-weight X", "weight of the advantages; 0: the policy alone", float)
    parser.flag("--top-k K", "sample from the K likeliest tokens only", int)
    parser.flag(
        "--top-p P",
        "sample from the likeliest tokens up to this total probability only (default with values: "
        "0.95)",
        float,
    )
    parser.add_argument(
        "--values",
        action="store_true",
        help="show V and the advantage of each token, in colour if the terminal supports it",
    )
    return parser


def talk(
    folder: Path,
    config: ILQLRun,  # the run's, with the decoding that is wanted
    *,
    checkpoint: str = "best",
    seed: int = 0,
    device: str = "cpu",
    values: bool = False,
    notices: Sequence[str] = (),  # texts to print first
) -> int:
    """Talk with the agent of a run until the person has enough; the exit status."""
    from raffia.cli.conversation import Conversation, Game, Session
    from raffia.recipes.ilql import load_agent
    from raffia.recipes.ilql.chat import Chat, Guessing
    from raffia.recipes.ilql.data import make_wordle

    policy = load_agent(folder, checkpoint, device=device, decode=config.decode, seed=seed)
    weight = config.decode.adv_weight if config.decode.shifts else 1.0
    session: Session[Chat] | Session[Guessing]
    if config.task == "wordle":
        game = Guessing(policy, make_wordle(config.wordle))
        session = Game(game, sys.stdin, sys.stdout, values=values, weight=weight)
    else:
        session = Conversation(Chat(policy), sys.stdin, sys.stdout, values=values, weight=weight)
    for notice in notices:
        session.print_line(notice)
    session.run()
    return 0
