"""The inputs of `ILQL`: rows, batches of them, or the next ones of its data set.

Legend: B rows, T tokens of a row, A actions of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from raffia.algorithms.ilql.config import ILQLModelConfig
from raffia.functional.trees import is_traced
from raffia.lm.data.data_point import DataPoint
from raffia.lm.data.rl_dataset import List_RL_Dataset, RL_Dataset, Vocabulary
from raffia.tensordict.node import Node
from raffia.tensordict.tensordict import TensorDict

Items = Sequence[DataPoint] | TensorDict | Mapping[str, Tensor]
ENTRIES = "tokens attn_mask action_idxs state_idxs rewards terminals".split()
FLAGS = "attn_mask terminals action_mask".split()
FIX = "dataset.collate(points) makes batches of the right form"


def batch_of(items: Items, dataset: RL_Dataset | None, config: ILQLModelConfig) -> TensorDict:
    """A batch [B] as `Loss` describes it.

    items: rows, which the data set puts together; or what it made of them, as a container or dict,
        where masks and terminals may be numbers, and "action_mask" may be left out.

    >>> batch_of({"tokens": None}, None, ILQLModelConfig())
    Traceback (most recent call last):
    ...
    ValueError: the batch lacks ['attn_mask', 'action_idxs', 'state_idxs', 'rewards', 'terminals'];
    dataset.collate(points) makes complete batches
    """
    if isinstance(items, Node | Mapping):
        batch = _whole(dict(items.items()), config)
    elif dataset is None:
        raise ValueError(
            "an agent without a dataset cannot collate rows: pass a batch, or set agent.dataset"
        )
    else:
        batch = dataset.collate(items, per_token=config.per_token)
    block_size, length = config.trunk.block_size, batch["tokens"].shape[1]
    if length > block_size:
        raise ValueError(
            f"the rows have {length} tokens, but the model's context holds {block_size}: cut them "
            f"with point.cut({block_size}), or use a model with a larger block_size"
        )
    return batch


def _whole(entries: dict[str, Any], config: ILQLModelConfig) -> TensorDict:
    """Check a batch that was assembled by the caller."""
    missing = [name for name in ENTRIES if name not in entries]
    if missing:
        raise ValueError(
            f"the batch lacks {missing}; dataset.collate(points) makes complete batches"
        )
    if "action_mask" not in entries:  # only positions behind an action are above 0
        entries["action_mask"] = entries["state_idxs"][:, 1:] > 0
    _check_shapes(entries)
    for name in FLAGS:  # ~ of a number is not what is meant
        entries[name] = entries[name].bool()
    if not is_traced():
        _check_positions(entries, config)
    return TensorDict(entries, batch_size=[len(entries["tokens"])])


def _check_shapes(entries: Mapping[str, Tensor]) -> None:
    tokens = entries["tokens"]
    if tokens.dim() != 2:
        raise ValueError(
            f"tokens has shape {list(tokens.shape)}, but must be [rows, tokens]: {FIX}"
        )
    rows, length = tokens.shape
    actions = entries["action_idxs"].shape[-1]
    widths = {
        "attn_mask": length,
        "action_idxs": actions,
        "state_idxs": actions + 1,
        "rewards": actions,
        "terminals": actions + 1,
        "action_mask": actions,
    }
    for name, width in widths.items():
        if entries[name].shape != (rows, width):
            raise ValueError(
                f"{name} has shape {list(entries[name].shape)}, but must be {[rows, width]}, as "
                f"tokens is {[rows, length]} and action_idxs is "
                f"{list(entries['action_idxs'].shape)}: {FIX}"
            )


def _check_positions(entries: Mapping[str, Tensor], config: ILQLModelConfig) -> None:
    length = entries["tokens"].shape[1]
    for name in ("action_idxs", "state_idxs"):
        outside = (entries[name] < 0) | (entries[name] >= length)
        why = f"the rows have {length} tokens, 0 to {length - 1}"
        if name == "action_idxs" and config.per_token:
            outside |= entries["action_mask"] & (entries[name] >= length - 1)
            why += ", where the action is the token after that position"
        if bool(outside.any()):
            raise ValueError(f"{name} holds {int(entries[name][outside][0])}, and {why}: {FIX}")


class PlainDataset(List_RL_Dataset):
    """A `torch.utils.data.Dataset`, or a list, of DataPoints.

    >>> points = [DataPoint.from_tokens([1, token], [0], [0.0]) for token in (5, 6)]
    >>> len(PlainDataset(points, num_tokens=9))
    2
    """

    def __init__(self, dataset: Any, num_tokens: int) -> None:
        name = type(dataset).__name__
        # torch's own classes have a __getitem__ that raises, and no __len__.
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise TypeError(
                f"the dataset, a {name}, has no __len__ and no __getitem__: pass one that gives "
                "rows by number, DialogueDataset.build(...), or one that draws them, "
                "Iterable_RL_Dataset"
            )
        if not len(dataset):
            raise ValueError(f"the dataset has no rows: len({name}) is 0")
        if not isinstance(dataset[0], DataPoint):
            raise TypeError(
                f"row 0 of the dataset is a {type(dataset[0]).__name__}, not a DataPoint: create "
                "rows with DataPoint.from_obs(observation, tokenizer) or "
                "DataPoint.from_tokens(...)"
            )
        super().__init__(Vocabulary(num_tokens))  # what fills rows up is never looked at
        self.rows = dataset

    def size(self) -> int:
        """The number of rows."""
        return len(self.rows)

    def get_item(self, index: int) -> DataPoint:
        """The row of a number."""
        point: DataPoint = self.rows[index]
        return point


def as_dataset(dataset: Any, num_tokens: int) -> RL_Dataset | None:
    """The data set that an agent learns from, whichever way its rows are stored.

    >>> as_dataset(None, 9) is None
    True
    """
    if dataset is None or isinstance(dataset, RL_Dataset):
        return dataset
    return PlainDataset(dataset, num_tokens)


def check_dataset(dataset: RL_Dataset | None, config: ILQLModelConfig) -> None:
    """Refuse a data set whose rows the networks cannot read.

    >>> check_dataset(None, ILQLModelConfig())
    """
    if dataset is None:
        return
    trunk, num_tokens = config.trunk, dataset.vocabulary.num_tokens
    if num_tokens > trunk.vocab_size:
        raise ValueError(
            f"the dataset has {num_tokens} tokens, but the model has {trunk.vocab_size}: pass "
            f"net_config={{'vocab_size': {num_tokens}, ...}}"
        )
    if dataset.max_len is not None and dataset.max_len > trunk.block_size:
        raise ValueError(
            f"the dataset has rows of up to max_len={dataset.max_len} tokens, but the model's "
            f"context is block_size={trunk.block_size}: make both equal"
        )
