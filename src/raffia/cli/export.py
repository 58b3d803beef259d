"""raffia export: the agent of a run of ILQL as a folder that transformers loads."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from raffia.cli.parser import UsageError
from raffia.cli.runs import chosen_run, config_of_kind, free_folder, run_parser
from raffia.cli.style import call, columns, paint, waiting
from raffia.recipes.ilql.config import ILQLRun

OUT = "export"  # in the run's folder
ABOUT = """\
Export the language model of an ILQL run to a folder that transformers can load, with tokenizer and
model card. LoRA weights are merged.

the folder holds:
  config.json, model.safetensors, generation_config.json
                        AutoModelForCausalLM.from_pretrained(FOLDER): the policy
  tokenizer.json, tokenizer_config.json, chat_template.jinja
                        AutoTokenizer.from_pretrained(FOLDER): the run's tokens
  value_heads.safetensors, raffia_ilql.json
                        the V and Q heads, which transformers does not use;
                        raffia.recipes.ilql.export.load_exported(FOLDER)
                        decodes with them
  README.md             model card: data, training, evaluation

`raffia train ilql --language_model FOLDER --data FILE` continues training from the folder."""
EXAMPLES = [
    "raffia export runs/wordle-0",
    "raffia export runs/chats-0 --out models/chats --checkpoint newest",
]


def export(words: Sequence[str]) -> int:
    """`raffia export RUN`

    >>> export(["--checkpoint", "last"])
    Traceback (most recent call last):
        ...
    raffia.cli.parser.UsageError: --checkpoint: 'last' must be best, newest, or the number ...
    """
    parser = run_parser("export", ABOUT, EXAMPLES)
    parser.flag("--out FOLDER", f"folder to write, new or empty (default: RUN/{OUT})")
    args = parser.read(words)
    start = "raffia train ilql --preset wordle"
    run = chosen_run(args.run, "export", lambda run: run.algorithm == "ilql", start)
    config_of_kind(ILQLRun, run, call("raffia", "evaluate", run))
    out = Path(args.out) if args.out else run / OUT
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        other = call("raffia", "export", run, "--out", free_folder(out))
        raise UsageError(f"{out} already exists and is not empty", other)

    waiting(f"writing the agent of {run} ...")
    from raffia.recipes.ilql.export import export

    done = export(run, out, args.checkpoint)
    print(f"wrote {paint(str(out), 'cyan', sys.stdout)}, of update {done.update}")
    ways = [["AutoModelForCausalLM.from_pretrained", "transformers: the policy"]]
    if done.with_values:
        ways.append(["raffia.recipes.ilql.export.load_exported", "the policy with its values"])
    ways.append(
        [
            call("raffia", "train", "ilql", "--language_model", out, "--data", "FILE"),
            "train further",
        ]
    )
    print(columns(ways))
    return 0
