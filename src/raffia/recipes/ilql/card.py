"""The card of an exported agent: what it is, what it learnt from, how good it is, how to use it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from raffia._version import __version__
from raffia.recipes.ilql.config import ILQLRun

METRICS = "metrics.jsonl"
ALONE = "adv_weight=0"  # the decoding that the advantage has no part in
TemplateKind = Literal["none", "marks", "own"]  # of chats: for Raffia's marks, or the model's
SCORES = ("loss", "token_loss", "v_mean", "q_mean", "advantage_mean")  # of held-out rows

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [raffia, offline-rl{tag}]
---

# {title}

A causal language model, trained with raffia {version}.

- method: {method}
- training data: {source}
- updates: {update} of {num_updates}, {batch_size} dialogues each
- seed: {seed}

## Evaluation

{scores}

## Usage

{prompts}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
{example}
answer = model.generate(**prompt)[0, prompt["input_ids"].shape[1]:]
print(tokenizer.decode(answer, skip_special_tokens=True))
```
{template}{values}
## Further training

`raffia train ilql --language_model FOLDER --data chats.jsonl` continues training from these
weights, with the tokens of this folder.
"""
BETWEEN_MARKS = """\
A prompt is the dialogue so far: it begins with `{bos}` if the environment comes first and with
`{boa}` if the agent does; each utterance is followed by its end, `{eos}` for the environment's and
`{eoa}` for the agent's. An answer ends with `{eoa}`, so this is the `eos_token` of `transformers`;
`{eod}` ends a finished dialogue, and `{pad}` is padding."""
BY_TEMPLATE = """\
A prompt is the dialogue so far, written by the chat template of the model that training started
from, with the generation prompt at its end. An answer ends with `{eoa}`."""
CHAT = """\
messages = [{"role": "user", "content": "Hello"}]
prompt = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)"""
TEMPLATE = """
`tokenizer.apply_chat_template(messages)` makes the same prompts from messages, where `user` is the
environment and `assistant` the agent.
"""
VALUES = """
## Values

`transformers` runs only the policy. This agent has also learnt values: the expected return of the
dialogue so far (V), and that of each next token (Q). It decodes from logits to which the advantage
Q - V is added, which needs the value heads: they are in `value_heads.safetensors`, described by
`raffia_ilql.json`. Raffia loads the complete agent:

```python
from raffia.recipes.ilql.export import load_exported

agent = load_exported("FOLDER")  # decodes as it did in the run: {decode}
print(agent.act(observation))  # anything with to_sequence(): utterances and rewards so far
```
"""
NO_VALUES = """
This agent has learnt no values: the policy is the complete agent, and `transformers` runs it.
"""
NO_POLICY = """
This method does not train the policy's own logits: `generate` of `transformers` returns noise, and
the agent decodes from the values below.
"""


def model_card(
    config: ILQLRun,
    *,
    update: int,  # of the checkpoint
    scores: Mapping[str, Any],  # as `scores_at` gives them
    names: Mapping[str, str],  # special tokens by their roles
    template: TemplateKind,
) -> str:
    """The text of README.md.

    >>> names = {role: role for role in ("pad", "bos", "boa", "eos", "eoa", "eod")}
    >>> card = model_card(ILQLRun(num_updates=3000), update=2500, scores={"mean_return": -2.5},
    ...                   names=names, template="marks")
    >>> "- updates: 2500 of 3000" in card and "mean return -2.50" in card
    True
    """
    learns = config.loss.needs_values
    decode = config.decode
    weight = f"adv_weight {decode.adv_weight:g}" if decode.include_adv else "no advantage"
    values = VALUES.format(decode=f"temperature {decode.temperature:g}, {weight}")
    parts = values if learns else NO_VALUES
    if config.loss.awac_weight == 0:
        parts = NO_POLICY + parts
    opening = names["boa"] if config.task == "wordle" else f"{names['bos']}Hello{names['eos']}"
    return CARD.format(
        tag=", ilql" if learns else "",
        title=f"{config.title} (seed {config.seed})",
        method=method_of(config),
        version=__version__,
        source=_source(config),
        update=update,
        num_updates=config.num_updates,
        batch_size=config.batch_size,
        seed=config.seed,
        scores=_summary_of(scores),
        prompts=(BY_TEMPLATE if template == "own" else BETWEEN_MARKS).format(**names),
        example=CHAT
        if template == "own"
        else f'prompt = tokenizer({opening!r}, return_tensors="pt")',
        template=TEMPLATE if template == "marks" else "",
        values=parts,
    )


def method_of(config: ILQLRun) -> str:
    """The name of the method that a config's numbers amount to.

    >>> from raffia.algorithms.ilql.config import method
    >>> method_of(ILQLRun()), method_of(method("filtered_bc", ILQLRun()))
    ('implicit language Q-learning (ILQL, tau 0.6)', 'behaviour cloning of the best 10 %')
    """
    loss = config.loss
    if not loss.needs_values:
        best = f" of the best {100 * config.keep_best:g} %" if config.keep_best < 1 else ""
        return f"behaviour cloning{best}"
    if loss.backup == "max":
        return "conservative Q-learning (CQL)"
    if loss.tau == 0.5:
        return "one step of policy improvement (values of the data's own policy, tau 0.5)"
    return f"implicit language Q-learning (ILQL, tau {loss.tau:g})"


def scores_at(folder: Path, update: int) -> dict[str, Any]:
    """The scores of a run's last evaluation at this update; empty if there was none.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as there:
    ...     row = '{"kind": "evaluate", "update": 7, "mean_return": -2.0}'
    ...     _ = Path(there, "metrics.jsonl").write_text(row)
    ...     scores_at(Path(there), 7)["mean_return"]
    -2.0
    """
    found: dict[str, Any] = {}
    try:
        lines = (folder / METRICS).read_text("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return found
    for line in lines:
        if '"evaluate"' not in line:
            continue
        try:
            row = json.loads(line)
        except ValueError:  # the last line of a run that was killed
            continue
        if row.get("kind") == "evaluate" and row.get("update") == update:
            found = row
    return found


def _source(config: ILQLRun) -> str:
    own = config.wordle
    if config.task == "data":
        return ", ".join(f"`{Path(file).name}`" for file in config.data.files)
    words = f"{own.num_words} words" if own.num_words else "all words"
    if own.games == "branching":
        return f"games of Wordle with {words}, where one step of improvement misleads"
    players = ", ".join(
        f"{100 * fraction:.0f} % {name}" for name, fraction in own.scripts.fractions().items()
    )
    return f"{own.num_games} games of Wordle with {words} by scripted players ({players})"


def _summary_of(scores: Mapping[str, Any]) -> str:
    if "mean_return" in scores:
        lines = [f"- as it decodes in the run: {_figures(scores)}"]
        alone = (scores.get("decodings") or {}).get(ALONE)
        if alone:
            lines.append(f"- the policy alone, as `transformers` runs it: {_figures(alone)}")
        return "\n".join(lines)
    if "loss" in scores:
        means = [f"{name} {scores[name]:.3f}" for name in SCORES if name in scores]
        return f"On held-out rows: {', '.join(means)}."
    return "No evaluation was made at this update."


def _figures(scores: Mapping[str, Any]) -> str:
    ends = ""
    if scores.get("low") is not None and scores.get("high") is not None:
        ends = f" (95 %: {scores['low']:.2f} to {scores['high']:.2f})"
    won = f", {100 * scores['share_won']:.0f} % won" if "share_won" in scores else ""
    games = f", {len(scores['returns'])} games" if "returns" in scores else ""
    return f"mean return {scores['mean_return']:.2f}{ends}{won}{games}"
