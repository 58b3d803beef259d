"""A `TensorDictMap` as named tensors, and as a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from raffia.data.hash import SipHash
from raffia.data.lru import LRUOrder
from raffia.data.query import QueryModule
from raffia.data.rows import RowLayout, unpacked
from raffia.data.structure import RowStructure
from raffia.data.table import CapacityError, HashTable
from raffia.files.folder import Folder, write_folder
from raffia.tensordict.byte_tensors import bytes_to_tensor, tensor_to_bytes
from raffia.tensordict.collection import TensorCollection
from raffia.tensordict.entries import UNSET
from raffia.tensordict.tensordict import TensorDict

KIND, VERSION = "raffia.TensorDictMap", 1
FUNCTIONS = ("collate_fn", "write_fn")
KEYS = ("keys.hashes", "keys.free", "keys.content", "keys.recency")


class SavedMap(Protocol):
    """The attributes of a `TensorDictMap` that are saved and loaded."""

    in_keys: list[Any]
    query_module: QueryModule
    storage: Any
    max_size: int | None
    evict: Any
    collate_fn: Callable[[Any], Any] | None
    write_fn: Callable[..., Any] | None
    _stored_keys: list[Any] | None
    _keeps_some: bool
    _layouts: list[RowLayout] | None
    _table: HashTable
    _lru: LRUOrder

    @property
    def device(self) -> torch.device: ...
    def __len__(self) -> int: ...
    def values(self) -> TensorCollection: ...
    def clear(self) -> None: ...


Map = TypeVar("Map", bound=SavedMap)


def tensors_of(mapping: SavedMap) -> dict[str, Tensor]:
    """The contents of a map as tensors; their meaning is JSON in the bytes of `meta`.

    >>> from raffia.data.map import TensorDictMap
    >>> sorted(tensors_of(TensorDictMap(in_keys=["x"])))
    ['keys.content', 'keys.free', 'keys.hashes', 'keys.recency', 'meta']
    """
    leaves: list[Tensor] = []
    structure: Any = None
    if mapping.storage.structure is not None:
        structure = RowStructure.of(mapping.storage.empty(0))
        values = mapping.values() if len(mapping) else mapping.storage.empty(0)
        leaves, _ = structure.leaves(values, 1)
    meta = {
        "in_keys": mapping.in_keys,
        "layouts": [layout.to_json() for layout in mapping._layouts or ()],
        "values": structure and structure.to_json(),
        "num_values": len(leaves),
        "out_keys": mapping._stored_keys,
        "keeps_some": mapping._keeps_some,
    }
    state = mapping._table.state()
    content = state.get("content", torch.empty(len(mapping), 0, dtype=torch.int64, device="cpu"))
    return {
        "keys.hashes": state["hashes"],
        "keys.free": state["free"],
        "keys.content": content,
        "keys.recency": mapping._lru.state(),
        **{f"values.{i}": leaf for i, leaf in enumerate(leaves)},
        "meta": bytes_to_tensor(json.dumps(meta).encode()),
    }


def missing(tensors: dict[str, Tensor]) -> list[str]:
    """The names that are missing among the tensors of a map."""
    names = [*KEYS, "meta"]
    if "meta" in tensors:
        names += [f"values.{i}" for i in range(_meta(tensors)["num_values"])]
    return [name for name in names if name not in tensors]


def _meta(tensors: dict[str, Tensor]) -> dict[str, Any]:
    try:
        meta = json.loads(tensor_to_bytes(tensors["meta"]))
        lacks = {"in_keys", "layouts", "values", "num_values", "out_keys", "keeps_some"} - {*meta}
    except (ValueError, TypeError) as error:
        raise ValueError(f"meta is not in the format of a map: {error}") from error
    if lacks:
        raise ValueError(f"meta is not in the format of a map: it lacks {sorted(lacks)}")
    return meta


def fill(mapping: SavedMap, tensors: dict[str, Tensor]) -> None:
    """Load the tensors of a map; nothing is changed if they do not fit.

    Raises ValueError then.
    """
    meta = _meta(tensors)
    in_keys = as_keys(meta["in_keys"])
    if in_keys != mapping.in_keys:
        raise ValueError(
            f"the saved map has the in_keys {in_keys}, but this one has {mapping.in_keys}"
        )
    layouts = [RowLayout.from_json(layout) for layout in meta["layouts"]]
    table = HashTable(
        words=tensors["keys.content"].shape[1] if layouts else None, device=mapping.device
    )
    state = {name: tensors[f"keys.{name}"] for name in ("hashes", "free")}
    table.load_state(state | ({"content": tensors["keys.content"]} if layouts else {}))
    limit = mapping.max_size
    if limit is not None and table.high > limit:
        raise CapacityError(
            f"the saved map has {table.high} rows, but this one has max_size={limit}"
        )
    live = table.live()
    if layouts:
        check_hashes(mapping.query_module, table, live[:64], layouts)
    order = tensors["keys.recency"]
    if len(order) and not torch.equal(order.sort().values.cpu(), live.cpu()):
        raise ValueError("the order of use does not match the rows")
    values: Any = None
    if meta["values"] is not None:
        leaves = [tensors[f"values.{i}"] for i in range(meta["num_values"])]
        structure = RowStructure.from_json(meta["values"])
        values = structure.build(leaves, live.shape, mapping.device)
        mapping.storage.check(values)
    elif len(live):
        raise ValueError(f"there are {len(live)} keys but no values")
    mapping.clear()
    if values is not None:
        mapping.storage.allocate(values)
        mapping.storage.set(live, values)
    mapping._table, mapping._layouts = table, layouts or None
    mapping._stored_keys = as_keys(meta["out_keys"])
    mapping._keeps_some = meta["keeps_some"] is True
    if mapping.evict:
        mapping._lru.load_state(order if len(order) else live)


def check_hashes(
    query: QueryModule, table: HashTable, rows: Tensor, layouts: list[RowLayout]
) -> None:
    """Raise ValueError if a query module would not find the stored rows."""
    if len(rows):
        hashes = query.combined(unpacked(table.content[rows], layouts))
        if not torch.equal(hashes.to(table.device), table.hashes[rows]):
            raise ValueError(
                "the query module hashes differently from the one that the map was saved with: "
                "pass query_module= with the same hash modules, keys and states"
            )


def save(mapping: SavedMap, folder: Any) -> None:
    """Write the map into a folder, atomically."""
    tensors = TensorDict(dict(tensors_of(mapping)))
    extras = {
        "max_size": mapping.max_size,
        "evict": mapping.evict,
        "in_keys": mapping.in_keys,
        "hash": plain_hash(mapping.query_module),
        "functions": [name for name in FUNCTIONS if getattr(mapping, name) is not None],
    }
    write_folder(folder, KIND, VERSION, {"map.safetensors": tensors.save}, extras=extras)


def loaded(
    cls: Callable[..., Map],
    found: Folder,
    query: QueryModule | None,
    storage: Any,
    functions: dict[str, Any],  # by the names of FUNCTIONS
) -> Map:
    """The map in a folder that `save` wrote."""
    manifest = found.extras
    for name in manifest["functions"]:
        if functions[name] is UNSET:
            raise ValueError(
                f"the map in {found.root} was saved with a {name}, and functions are not saved: "
                f"pass {name}=, or {name}=None to continue without it"
            )
    if query is None:
        if manifest["hash"] is None:
            raise ValueError(
                f"the map in {found.root} was saved with hash modules other than SipHash, which "
                "are not saved: pass query_module="
            )
        hashers = [
            SipHash(key=tuple(h["key"]), rounds=tuple(h["rounds"]), normalize=h["normalize"])
            for h in manifest["hash"]
        ]
        query = QueryModule(as_keys(manifest["in_keys"]), hash_module=hashers[:-1])
        query.aggregator = hashers[-1]
    mapping = cls(
        query_module=query,
        storage=storage,
        **{name: None if value is UNSET else value for name, value in functions.items()},
        max_size=manifest["max_size"],
        evict=manifest["evict"],
    )
    fill(mapping, dict(TensorDict.load(found.path("map.safetensors")).items()))
    return mapping


def plain_hash(query: QueryModule) -> list[dict[str, Any]] | None:
    """How a query module hashes, if it does so with SipHash only: of each key, then of all."""
    hashers = [*query._hashers, query.aggregator]
    plain = [h for h in hashers if isinstance(h, SipHash) and h.__class__ is SipHash]
    if len(plain) < len(hashers) or not all(h.as_tensor for h in plain):
        return None
    return [{"key": h.key, "rounds": h.rounds, "normalize": h.normalize} for h in plain]


def as_keys(keys: Any) -> Any:
    """Keys of entries as they were before JSON made lists of their tuples; None of none."""
    return keys and [tuple(key) if isinstance(key, list) else key for key in keys]
