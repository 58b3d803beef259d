"""The small networks and batches of the numeric cases, and batches drawn at random.

`ilql_small.json`, `ilql_small.safetensors` and `target_update.json` come from an independent
restatement in float64 of the formulas of Snell et al. (2022), held against their own code. Three
language models have three different weights, so that a mixed-up one shows.
"""

import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence

from raffia.algorithms.ilql import ILQLModel, Loss
from raffia.algorithms.ilql.config import ILQLLossConfig, ILQLModelConfig, TrunkConfig
from raffia.tensordict import TensorDict

HERE = Path(__file__).parent
ORACLE = json.loads((HERE / "ilql_small.json").read_text())
WEIGHTS = {  # of the terms of the loss
    {"token_loss": "awac_weight"}.get(name, name.replace("loss", "weight")): weight
    for name, weight in ORACLE["loss_weights"].items()
}
TRUNK = TrunkConfig(
    vocab_size=35, n_layer=2, n_head=2, n_embd=16, dim_feedfwd=40, block_size=64, dropout=0.0
)
TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}
PARTS = {"target.trunk": "target_trunk", "target.q1": "tq1", "target.q2": "tq2"}


def result_of(batch: str, kind: str, name: str) -> dict:
    """The recorded results of a case with one of the masks."""
    block = {"strict": "B_strict", "published": "B_as_published"}[kind]
    return ORACLE["results"]["A" if batch == "A" else block][name]


@cache
def stored_weights() -> dict[str, torch.Tensor]:
    return load_file(HERE / "ilql_small.safetensors")


def make_loss(*, policy="separate", target="trunk", model_options=None, **options) -> Loss:
    """The loss with the networks of the oracle."""
    config = ILQLModelConfig(trunk=TRUNK, policy=policy, target=target, **(model_options or {}))
    loss = Loss(ILQLModel(config), ILQLLossConfig(**options)).double()
    weights = stored_weights()
    filled = {}
    for name in loss.state_dict():
        part, plain = name.split("."), name.removeprefix("model.")
        head = ".".join(part[:2])
        source = ".".join([PARTS[head], *part[2:]]) if head in PARTS else plain
        filled[name] = weights[source]
    loss.load_state_dict(filled)
    return loss


def numbers_of(config: ILQLLossConfig) -> TensorDict:
    """The numbers of the config that the learner stores in its state."""
    names = "gamma tau beta awac_weight v_weight q_weight cql_weight dm_weight"
    return TensorDict(
        {name: torch.tensor(getattr(config, name), dtype=torch.float64) for name in names.split()}
    )


def collate(rows: list, pad: int, level: str = "") -> TensorDict:
    """Rows of one level ("" for tokens, "u_" for utterances), right-padded."""

    def padded(name, dtype, fill):
        each = [torch.tensor(row[name], dtype=dtype) for row in rows]
        return pad_sequence(each, True, padding_value=fill)

    tokens = padded("tokens", torch.int64, pad)
    lengths = torch.tensor([len(row["tokens"]) for row in rows])
    num_actions = torch.tensor([len(row[level + "rewards"]) for row in rows])
    action_idxs = padded(level + "action_idxs", torch.int64, 0)
    entries = {"tokens": tokens, "action_idxs": action_idxs, "index": torch.arange(len(rows))}
    entries["attn_mask"] = torch.arange(tokens.shape[1]) < lengths[:, None]
    entries["action_mask"] = torch.arange(action_idxs.shape[1]) < num_actions[:, None]
    entries["state_idxs"] = padded(level + "state_idxs", torch.int64, 0)
    entries["rewards"] = padded(level + "rewards", torch.float64, 0.0)
    entries["terminals"] = padded(level + "terminals", torch.bool, True)
    return TensorDict(entries, batch_size=[len(rows)])


def batch_of(name: str, level: str = "") -> TensorDict:
    rows = [row for row in ORACLE["batches"][name] if level + "rewards" in row]
    return collate(rows, ORACLE["pad_id"], level)


def float32(batch: TensorDict) -> TensorDict:
    return batch.copy().set("rewards", batch["rewards"].float())
