"""Rows by value and by length; batches of samples for a DataLoader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack, overload

import torch
from torch import Tensor

from raffia.tensordict import entries
from raffia.tensordict.collection import TensorDictBase
from raffia.tensordict.keys import NestedKey, unravel_key, unravel_key_to_tuple
from raffia.tensordict.lazy import LazyStackedTensorDict, lazy_stack
from raffia.tensordict.node import Container, Node
from raffia.tensordict.stack import maybe_dense_stack, pad_sequence
from raffia.tensordict.tensordict import TensorDict
from raffia.tensordict.values import flat
from raffia.tensordict.views import entries_list


def group_by(
    tensordict: Container, key: NestedKey
) -> tuple[Tensor | list[Any], tuple[Container, ...]]:
    """The sorted values of an entry, and for each of them the rows that have it, in their order.

    key: a tensor, or a non-tensor entry with values that can be hashed and sorted. The values come
        as a tensor or a list.
    Raises ValueError without batch dimensions, KeyError without such an entry, TypeError for a
    nested container or values that can't be sorted.

    >>> steps = TensorDict(agent=[2, 0, 2], reward=[1.0, 2.0, 3.0], batch_size=[3])
    >>> agents, groups = group_by(steps, "agent")
    >>> agents, [group["reward"].tolist() for group in groups]
    (tensor([0, 2]), [[2.0], [1.0, 3.0]])
    """
    size = tensordict.batch_size
    if not size:
        raise ValueError(
            "group_by groups rows along the first batch dimension, but this container has none"
        )
    value = tensordict.get(key, None)
    if value is None:
        value = entries.getitem_key(getattr(tensordict, "_td", tensordict), key)
    values: Any
    if isinstance(value, Tensor):
        values, row_group = torch.unique(value, dim=0, return_inverse=True)
    elif isinstance(value, Node) and not value._is_data():
        raise TypeError(f"group_by: the entry {key!r} is a container; name one of its entries")
    else:
        rows = value.tolist() if isinstance(value, Node) else value
        rows = rows if isinstance(rows, list) and len(rows) == size[0] else [rows] * size[0]
        rows = [tuple(flat(row, len(size) - 1)) if len(size) > 1 else row for row in rows]
        try:
            values = sorted(set(rows))
        except TypeError as error:
            raise TypeError(
                f"group_by: the values of {key!r} can't be hashed and sorted: {error}"
            ) from None
        position = {value: i for i, value in enumerate(values)}
        row_group = torch.tensor([position[row] for row in rows], dtype=torch.int64)
    row_group = row_group.to(tensordict.device or "cpu")
    counts = torch.bincount(row_group, minlength=len(values)).tolist()
    gathered = tensordict[torch.argsort(row_group, stable=True)]
    return values, tuple(gathered.split(counts, 0)) if counts else ()


def isin(input: Any, reference: Any, key: NestedKey, dim: int = 0) -> Tensor:
    """Check which slices along `dim` have an entry equal to that of a slice of another container.

    Raises ValueError for a `dim` that is not a batch dimension or for other numbers of batch
    dimensions, KeyError without such an entry, RuntimeError for entries of other shapes.

    >>> known = TensorDict(at=torch.tensor([2, 5]), batch_size=[2])
    >>> isin(TensorDict(at=torch.tensor([5, 1, 5]), batch_size=[3]), known, "at")
    tensor([ True, False,  True])
    """
    ndims = len(input.batch_size), len(reference.batch_size)
    if ndims[0] != ndims[1]:
        raise ValueError(
            f"isin: both containers need the same number of batch dimensions, got {ndims[0]} and "
            f"{ndims[1]}"
        )
    ours, theirs = _slices(input, key, dim, "isin"), _slices(reference, key, dim, "isin")
    if ours.shape[1:] != theirs.shape[1:]:
        raise RuntimeError(
            f"isin: slices of {key!r} along dimension {dim} have shapes {tuple(ours.shape[1:])} "
            f"and {tuple(theirs.shape[1:])}, and can't be compared"
        )
    group = torch.unique(torch.cat([ours, theirs]), dim=0, return_inverse=True)[1]
    return torch.isin(group[: len(ours)], group[len(ours) :])


def remove_duplicates(
    input: Any, key: NestedKey, dim: int = 0, *, return_indices: bool = False
) -> Any:
    """A container with the first of the slices along `dim` that have equal entries, sorted by them.

    return_indices: give also which slice of the result stands for each slice of `input`.
    Raises ValueError for a `dim` that is not a batch dimension, KeyError without such an entry.

    >>> steps = TensorDict(at=torch.tensor([5, 1, 5]), n=torch.arange(3), batch_size=[3])
    >>> out, which = remove_duplicates(steps, "at", return_indices=True)
    >>> out["at"], out["n"], which
    (tensor([1, 5]), tensor([1, 0]), tensor([1, 0, 1]))
    """
    slices = _slices(input, key, dim, "remove_duplicates")
    values, which = torch.unique(slices, dim=0, return_inverse=True)
    at = torch.arange(len(which), device=which.device)
    first = at.new_full((len(values),), len(which)).scatter_reduce(0, which, at, "amin")
    out = input[(slice(None),) * (dim % len(input.batch_size)) + (first,)]
    return (out, which) if return_indices else out


def _slices(td: Any, key: NestedKey, dim: int, what: str) -> Tensor:
    """An entry with the batch dimension `dim` in front."""
    ndim = len(td.batch_size)
    if not -ndim <= dim < ndim:
        raise ValueError(f"{what}: dim must be one of the {ndim} batch dimensions, got {dim}")
    value: Tensor = td[key]
    return value.movedim(dim % ndim, 0)


def unpad_sequence(
    padded: Node, mask: Node | Tensor | None = None, *, pad_dim: int = 0
) -> LazyStackedTensorDict:
    """The samples that `pad_sequence` has padded, as a lazy stack; their entries are views.

    mask: where the samples are: a container with a mask for each entry, or a boolean tensor
        `[samples, length]` for all; the entry "masks" if not given.
    pad_dim: the dimension that was padded, counted from the first of each sample's entries.
    Raises ValueError for masks that are missing, of another shape or with gaps, KeyError for an
    entry without mask.

    >>> rows = [TensorDict(a=torch.arange(n), batch_size=[n]) for n in (2, 3)]
    >>> samples = unpad_sequence(pad_sequence(rows, return_mask=True))
    >>> [sample["a"].tolist() for sample in samples.tensordicts]
    [[0, 1], [0, 1, 2]]
    """
    size = padded.batch_size
    if not size:
        raise ValueError(
            "unpad_sequence needs samples along the first batch dimension, but this container has "
            "none"
        )
    if mask is None:
        mask = padded.get("masks", None)
        if mask is None:
            raise ValueError(
                "unpad_sequence: there is no entry 'masks': pad with return_mask=True, or pass mask"
            )
        padded = padded.exclude("masks")
    ndim = len(size) - 1
    leaves = entries_list(padded, True, True, None, False)
    samples = []
    spans = {key: _spans(mask, key, leaf, size[0], pad_dim, ndim) for key, leaf in leaves}
    for i in range(size[0]):
        batch = list(size[1:])
        parts: dict[Any, Any] = {}
        for key, leaf in leaves:
            start, length = spans[key][i]
            parts[key] = leaf[i].narrow(pad_dim, start, length)
            if pad_dim < ndim:
                batch[pad_dim] = length
        sample = padded[i]
        if pad_dim < ndim:
            start = next(iter(spans.values()))[i][0] if spans else 0
            sample = sample[(slice(None),) * pad_dim + (slice(start, start + batch[pad_dim]),)]
        samples.append(_with(sample, parts))
    return lazy_stack(samples, 0)


def _with(td: Any, parts: Mapping[Any, Tensor]) -> Any:
    out = td.copy()
    for key, part in parts.items():
        node = out
        *path, name = unravel_key_to_tuple(key)
        for step in path:
            node = node._get_str(step)
        node._replace_str(name, part) if node.__class__ is TensorDict else node.set(name, part)
    return out


def _spans(
    mask: Any, key: NestedKey, leaf: Tensor, count: int, pad_dim: int, ndim: int
) -> list[tuple[int, int]]:
    """The start and the length of each sample in an entry."""
    if isinstance(mask, Node):
        one: Any = entries.get(mask, key, None)
        if one is None:
            raise KeyError(f"unpad_sequence: there is no mask for the entry {key!r}")
        one = one.movedim(min(pad_dim, ndim) + 1, 1).flatten(2)[..., 0] if one.dim() > 2 else one
    else:
        one = mask
        if one.shape != (count, leaf.shape[pad_dim + 1]):
            raise ValueError(
                f"unpad_sequence: the mask has shape {tuple(one.shape)}, the entry {key!r} needs "
                f"{(count, leaf.shape[pad_dim + 1])}: [samples, length]"
            )
    lengths = one.sum(1)
    starts = one.int().argmax(1)
    for i, (row, start, length) in enumerate(
        zip(one, starts.tolist(), lengths.tolist(), strict=True)
    ):
        if not bool(row[start : start + length].all()):
            raise ValueError(f"unpad_sequence: the mask of {key!r} has a gap in sample {i}")
    return list(zip(starts.tolist(), lengths.tolist(), strict=True))


class CollateOptions(TypedDict, total=False):
    """Options of `collate`, for type checkers."""

    pad_keys: Mapping[NestedKey, float] | None
    nested_keys: Sequence[NestedKey] | None
    mask_key: NestedKey | None


@overload
def collate(
    batch: list[TensorDictBase], **options: Unpack[CollateOptions]
) -> TensorDict | LazyStackedTensorDict: ...
@overload
def collate(batch: Any, **options: Unpack[CollateOptions]) -> Any: ...
def collate(
    batch: Any,
    *,
    pad_keys: Mapping[NestedKey, float] | None = None,
    nested_keys: Sequence[NestedKey] | None = None,
    mask_key: NestedKey | None = None,
) -> Any:
    """Samples as one batch, as the `collate_fn` of a `torch.utils.data.DataLoader`.

    Containers are stacked, lazily where their keys or shapes differ; tuples and dicts part by part;
    what is not a list, such as rows that were read in one call, stays.

    pad_keys: entries that are padded along their first dimension, each with what to pad it with.
    nested_keys: entries that become nested tensors (`torch.jagged`).
    mask_key: where the masks of the padded entries go.
    Raises KeyError for keys that a sample lacks, ValueError for options that don't go together.

    >>> rows = [TensorDict(a=torch.ones(n)) for n in (1, 2)]
    >>> collate(rows, pad_keys={"a": 0.0}, mask_key="m")["a"].tolist()
    [[1.0, 0.0], [1.0, 1.0]]
    """
    if mask_key is not None and not pad_keys:
        raise ValueError(
            "collate: mask_key is for the masks of pad_keys, but no pad_keys were passed"
        )
    if not isinstance(batch, list) or not batch:
        return batch
    first = batch[0]
    options: dict[str, Any] = dict(pad_keys=pad_keys, nested_keys=nested_keys, mask_key=mask_key)
    if isinstance(first, Node):
        pads = {unravel_key(key): fill for key, fill in (pad_keys or {}).items()}
        nested = [unravel_key(key) for key in nested_keys or ()]
        return _collated(batch, pads, nested, mask_key)
    if isinstance(first, Tensor):
        return torch.stack(batch)
    if isinstance(first, Mapping):
        return {key: collate([sample[key] for sample in batch], **options) for key in first}
    if isinstance(first, tuple):
        parts = [collate(list(part), **options) for part in zip(*batch, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    return torch.utils.data.default_collate(batch)


def _collated(rows: list[Any], pads: dict[Any, float], nested: list[Any], mask_key: Any) -> Any:
    if twice := [key for key in nested if key in pads]:
        raise ValueError(f"collate: {twice} are in both pad_keys and nested_keys")
    if pads and rows[0].batch_size:
        raise ValueError(
            "collate: pad_keys takes samples without batch dimensions, got "
            f"{tuple(rows[0].batch_size)}"
        )
    for key in [*pads, *nested]:
        for i, row in enumerate(rows):
            if row.get(key, None) is None:
                raise KeyError(f"collate: sample {i} has no entry {key!r}")
    if mask_key is not None and rows[0].get(mask_key, None) is not None:
        raise ValueError(
            f"collate: mask_key={mask_key!r} is already an entry of the samples; choose another key"
        )
    if not pads and not nested:
        return maybe_dense_stack(rows)
    named = {key: [row.get(key) for row in rows] for key in [*pads, *nested]}
    bare = [row.exclude(*named) for row in rows]
    out: Any = torch.stack(bare) if nested else maybe_dense_stack(bare)
    masks = TensorDict(batch_size=out.batch_size)
    for key, fill in pads.items():
        cut = [TensorDict(x=leaf) for leaf in named[key]]
        padded = pad_sequence(cut, padding_value=fill, return_mask=True)
        out.set(key, padded["x"])
        masks.set(key, padded["masks", "x"])
    for key in nested:
        out.set(key, torch.nested.nested_tensor(named[key], layout=torch.jagged))
    if mask_key is not None:
        out.set(mask_key, masks)
    return out
