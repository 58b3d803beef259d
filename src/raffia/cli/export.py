"""raffia export: the agent of a run of ILQL as a folder that transformers loads."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from raffia.cli.parser import Parser, UsageError
from raffia.cli.runs import add_checkpoint, chosen_run, config_of_algorithm, free_folder
from raffia.cli.style import call, columns, paint, waiting

OUT = "export"  # in the run's folder
ABOUT = """\
Write the language model of a run of ILQL as a folder that transformers loads, with tokenizer and
card. What LoRA changed is put into the weights.

the folder holds:
  config.json, model.safetensors, generation_config.json
                        AutoModelForCausalLM.from_pretrained(FOLDER): the policy
  tokenizer.json, tokenizer_config.json, chat_template.jinja
                        AutoTokenizer.from_pretrained(FOLDER): the run's tokens
  value_heads.safetensors, raffia_ilql.json
                        V and Q, which transformers knows nothing of;
                        raffia.recipes.ilql.export.load_exported(FOLDER)
                        speaks by them
  README.md             what it learnt from, how, and how good it is

`raffia train ilql --model FOLDER --data FILE` trains on from there."""
EXAMPLES = [
    "raffia export runs/wordle-0",
    "raffia export runs/chats-0 --out models/chats --checkpoint newest",
]


def export(words: Sequence[str]) -> int:
    """`raffia export RUN`

    >>> export(["--checkpoint", "last"])
    Traceback (most recent call last):
        ...
    raffia.cli.parser.UsageError: --checkpoint: 'last' is neither best nor newest nor the number ...
    """
    parser = Parser("raffia export", ABOUT, EXAMPLES)
    parser.add_argument("run", metavar="RUN", nargs="?", help="folder of the run")
    parser.add_argument(
        "--out", metavar="FOLDER", help=f"not there yet, or empty; RUN/{OUT} if not given"
    )
    add_checkpoint(parser)
    args = parser.read(words)
    start = "raffia train ilql --preset wordle"
    run = chosen_run(args.run, "export", lambda run: run.algorithm == "ilql", start)
    config_of_algorithm("ilql", run, call("raffia", "evaluate", run))
    out = Path(args.out) if args.out else run / OUT
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        other = call("raffia", "export", run, "--out", free_folder(out))
        raise UsageError(f"{out} is there already, and is not empty", other)

    waiting(f"writing the agent of {run} ...")
    from raffia.recipes.ilql.export import export

    done = export(run, out, args.checkpoint)
    print(f"wrote {paint(str(out), 'cyan', sys.stdout)}, of update {done.update}")
    ways = [["AutoModelForCausalLM.from_pretrained", "transformers: the policy"]]
    if done.with_values:
        ways.append(["raffia.recipes.ilql.export.load_exported", "with the values"])
    ways.append([call("raffia", "train", "ilql", "--model", out, "--data", "FILE"), "to train on"])
    print(columns(ways))
    return 0
