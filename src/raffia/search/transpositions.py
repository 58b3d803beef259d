"""`state_key`: which nodes stand for the same state, by the content of their embeddings."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from raffia.data.query import QueryModule
from raffia.data.siphash import siphash
from raffia.search.base import StateKey
from raffia.tensordict.keys import (
    NestedKey,
    raise_missing,
    unravel_key,
    unravel_key_to_tuple,
)
from raffia.tensordict.node import Node


def state_key(*content: NestedKey | QueryModule) -> StateKey:
    """A key function for `search(..., transpositions=)`: equal embeddings [M] get equal int64 [M].

    content: the entries that make up the state, where the embedding is a TensorDict or a dict; or
        one `raffia.data.QueryModule`, which names them; nothing: all tensors of the embedding.

    Content is compared by its bytes (-0.0 counts as 0.0, all NaNs as one), so this is for states
    that are computed exactly: a game's board and the player to move. Learnt latent states that are
    reached in two ways differ in their last bits and do not meet; round them in a function of your
    own, if that is what you mean.

    The keys are 64-bit hashes: among the n nodes of one tree two different states collide with
    probability below n^2 / 2^65, 3e-14 for 1000 nodes. A `QueryModule(..., exact=True)` excludes
    that too: its indices are the keys, and it keeps a copy of each distinct state.

    >>> from raffia.search import state_key
    >>> key = state_key("board")
    >>> boards = TensorDict(board=torch.tensor([[1, 0], [0, 1], [1, 0]]), ply=torch.arange(3),
    ...                     batch_size=[3])
    >>> a, b, c = key(boards)
    >>> bool(a == c), bool(a == b)
    (True, False)
    >>> key(dict(board=boards["board"])).equal(key(boards))
    True
    >>> state_key()(boards["board"]).equal(key(boards))  # a tensor is its own content
    True
    """
    if len(content) == 1 and isinstance(content[0], QueryModule):
        return _by_query(content[0])
    keys = [unravel_key(key) for key in content if not isinstance(key, QueryModule)]
    if len(keys) != len(content):
        raise TypeError(
            "state_key takes the names of entries or one QueryModule, which names them itself: "
            "state_key('board', 'to_play') or state_key(query_module)"
        )
    if not keys:
        return lambda embedding: _hashed(_tensors(embedding))
    return lambda embedding: _hashed([_entry(embedding, key) for key in keys])


def _by_query(query: QueryModule) -> StateKey:
    if query.exact:
        return lambda embedding: query(embedding, clone=True, write_hash=False)[query.index_key]
    return query.hash


def _hashed(tensors: list[Tensor]) -> Tensor:
    """One number for each row; a search's rows all have the dtypes and shapes of its root."""
    hashes = [siphash(rows) for rows in tensors]
    return hashes[0] if len(hashes) == 1 else siphash(torch.stack(hashes, -1))


def _entry(embedding: Any, key: NestedKey) -> Tensor:
    """An entry of a TensorDict or of nested dicts."""
    if isinstance(embedding, Node):
        entry = embedding.get(key, None)
        if entry is None:
            raise_missing(key, embedding)
    elif isinstance(embedding, dict):
        entry = embedding
        for part in unravel_key_to_tuple(key):
            if not isinstance(entry, dict) or part not in entry:
                raise KeyError(f"the embedding holds no entry {key!r}; it holds {list(embedding)}")
            entry = entry[part]
    else:
        raise TypeError(
            f"state_key({key!r}) names an entry, but the embedding is a "
            f"{type(embedding).__name__}, which has none: state_key() uses all its tensors"
        )
    if not isinstance(entry, Tensor):
        raise TypeError(f"the embedding's entry {key!r} is a {type(entry).__name__}, not a tensor")
    return entry


def _tensors(embedding: Any) -> list[Tensor]:
    """The tensors of a container, in an order that does not depend on how it was put together."""
    if isinstance(embedding, Tensor):
        return [embedding]
    if isinstance(embedding, Node):
        return [_entry(embedding, key) for key in sorted(embedding.keys(True, True), key=str)]
    leaves, _ = pytree.tree_flatten_with_path(embedding)
    return [leaf for _, leaf in sorted(leaves, key=lambda item: pytree.keystr(item[0]))]
