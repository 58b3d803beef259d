"""Invariants of every container, as one check: `assert sound(td)`.

It reads private state, because an error there shows in public only later: in the shape
of an index, in a container that unlocks alone, in what a pickle holds.
"""

import torch
from torch import Tensor

from raffia.tensordict.lazy import LazyStackedTensorDict
from raffia.tensordict.node import Node
from raffia.tensordict.nontensor import NonTensorData, NonTensorStack
from raffia.tensordict.params import TensorDictParams
from raffia.tensordict.sub import SubTensorDict
from raffia.tensordict.unbatched import UnbatchedTensor
from raffia.tensordict.views import entries_list, keys_list


def sound(td):
    """True; AssertionError with all problems of a container and the nested ones."""
    wrong = problems(td)
    assert not wrong, "\n".join(wrong)
    return True


def all_sound(value):
    """`sound` of each container among the results of an operation."""
    if isinstance(value, Node):
        return sound(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return True
    return all([all_sound(item) for item in value])


def problems(td):
    """The problems of a container, as lines of text."""
    out = []
    _node(_bare(td), "td", out)
    return out


def _bare(node):
    """The container that a tensorclass or a module of parameters wraps."""
    if isinstance(node, TensorDictParams):
        return node._tree
    return vars(node).get("_td", node)


def _node(node, where, out):
    def wrong(what):
        out.append(f"{where}, a {type(node).__name__} of batch size {tuple(size)}: {what}")

    size, names = node._batch_size, node._names
    if type(size) is not torch.Size:
        wrong(f"the batch size is a {type(size).__name__}")
    if names is not None:
        present = [name for name in names if name is not None]
        if len(names) != len(size):
            wrong(f"the names are {names}")
        if len(set(present)) < len(present):
            wrong(f"a name occurs twice in {names}")
    if isinstance(node, LazyStackedTensorDict):
        _stack(node, wrong)
        below = {str(i): member for i, member in enumerate(node.tensordicts)}
    elif isinstance(node, (NonTensorData, UnbatchedTensor)):
        below = {}
    else:
        below = _entries(node, wrong)
    if not isinstance(node, SubTensorDict):  # its lock is its parent's
        _lock(node, list(below.values()), wrong)
    _block(node, wrong)
    for name, value in below.items():
        if isinstance(value, Node):
            _node(_bare(value), f"{where}[{name!r}]", out)


def _entries(node, wrong):
    """The batch size, device and names of the entries of a dense container."""
    size, ndim, entries = node._batch_size, len(node._batch_size), node._entries()
    for name, value in entries.items():
        if type(name) is not str:
            wrong(f"the key {name!r} is no string")
        if not isinstance(value, (Tensor, Node)):
            wrong(f"the entry {name!r} is a {type(value).__name__}")
            continue
        if getattr(value, "is_nested", False):
            if value.size(0) != size[0]:
                wrong(f"the entry {name!r} is a nested tensor of {value.size(0)} tensors")
        elif isinstance(value, UnbatchedTensor):
            if value._batch_size[:ndim] != size:
                wrong(f"the entry {name!r} is for the batch size {tuple(value._batch_size)}")
        elif value.shape[:ndim] != size:
            wrong(f"the entry {name!r} has the shape {tuple(value.shape)}")
        if node._device is not None and value.device != node._device:
            wrong(f"it is on {node._device}, the entry {name!r} on {value.device}")
        if node._names is not None and isinstance(value, Node) and not isinstance(value, Tensor):
            theirs = _bare(value)._names or [None] * ndim
            if theirs[:ndim] != node._names:
                wrong(f"its names are {node._names}, those of {name!r} {theirs}")
    return entries


def _stack(node, wrong):
    """The batch size, device and names of a lazy stack, which are those of its members."""
    members, dim, size = [_bare(td) for td in node.tensordicts], node.stack_dim, node._batch_size
    if not 0 <= dim < len(size):
        wrong(f"the stack dimension is {dim}")
        return
    if size[dim] != len(members):
        wrong(f"it has {len(members)} members")
    rest = (*size[:dim], *size[dim + 1 :])
    sizes = [td._batch_size for td in members]
    if any([len(theirs) != len(rest) for theirs in sizes]):
        wrong(f"the members have the batch sizes {sizes}")
    elif sizes:
        common = [column[0] if len(set(column)) == 1 else -1 for column in zip(*sizes, strict=True)]
        if list(rest) != common:
            wrong(f"the members have the batch sizes {sizes}")
    if node._device is not None and any([td._device != node._device for td in members]):
        wrong(f"it is on {node._device}, a member is not")
    if isinstance(node, NonTensorStack) and not all([td._is_data() for td in members]):
        wrong("a member holds no value")
    if node._names is not None:
        names = [*node._names[:dim], *node._names[dim + 1 :]]
        for td in members:
            if (td._names or [None] * len(rest)) != names:
                wrong(f"its names are {node._names}, those of a member {td._names}")


def _lock(node, values, wrong):
    """A locked container has locked exactly its nested containers, and they refer to it."""
    locked = node._own_lock if isinstance(node, LazyStackedTensorDict) else node._locked
    children = [_bare(value) for value in values if isinstance(value, Node)]
    for child in children:
        knows = any([ref() is node for ref in child._parents or ()])
        if locked and not child._locked:
            wrong("it is locked, and a container in it is not")
        if locked != knows:
            wrong(f"locked: {locked}; a container in it says {knows}")
    if locked and node._kids is not None:
        if sorted(map(id, map(_bare, node._kids))) != sorted(map(id, children)):
            wrong("what it has locked is not what is in it")
    if not locked and node._kids is not None:
        wrong("it is not locked and knows of containers that it has locked")
    if node._cache and "home" not in node._cache:
        if not locked:
            wrong("it remembers a listing and is not locked")
        for flags, listing in node._cache.items():
            keys_only = flags[0] == "keys"
            *which, sort = flags[1:] if keys_only else flags
            if keys_only:
                fresh = keys_list(node, *which)
                same = sorted(map(str, fresh)) == sorted(map(str, listing))
            else:
                fresh = entries_list(node, *which, sort)
                same = [(k, id(v)) for k, v in fresh] == [(k, id(v)) for k, v in listing]
            if not same:
                wrong("it remembers a listing that is not true any more")


def _block(node, wrong):
    """The leaves of a consolidated container lie in its buffer."""
    buffer = node._buffer
    if buffer is None or not node._locked:  # read from a file
        return
    start, stop, leaves = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes, node._leaves([])
    offsets = [leaf.data_ptr() - start for leaf in leaves]
    for leaf, at in zip(leaves, offsets, strict=True):
        if leaf.numel() and not 0 <= at <= at + leaf.nbytes <= stop - start:
            wrong("a leaf does not lie in its buffer")
