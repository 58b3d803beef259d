"""Random operations on random containers: each leaves every container in it sound.

What an operation gives may be right where it is looked at and wrong below: `sound` looks at all of
it. An operation that is refused must leave the container sound too.
"""

import copy
import operator
import pickle
import weakref

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

import raffia
from raffia import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    lazy_stack,
    tensorclass,
)
from tests.tensordict.invariants import all_sound, problems, sound

examples = settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
REFUSED = (RuntimeError, KeyError, ValueError, IndexError, TypeError, AttributeError)


@tensorclass
class Pair:
    first: torch.Tensor
    label: str = "none"


def tensor(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def pair(batch):
    return Pair(first=tensor(*batch, 2), label="p", batch_size=batch)


def nested(batch, names=None):
    inner = TensorDict(b=tensor(*batch, 2, 3), word="w", batch_size=[*batch, 2])
    deep = TensorDict(c=tensor(*batch), inner=inner, batch_size=batch)
    return TensorDict(deep=deep, other=TensorDict(batch_size=[*batch, 2]), batch_size=batch)


PARTS = {
    "a": lambda batch: tensor(*batch),
    "wide": lambda batch: tensor(*batch, 4),
    "integer": lambda batch: tensor(*batch).long(),
    "text": lambda batch: NonTensorData("x", batch),
    "words": lambda batch: (
        NonTensorStack(*[NonTensorData(str(i), batch[1:]) for i in range(batch[0])])
        if batch
        else NonTensorData("y", batch)
    ),
    "nested": nested,
    "longer": lambda batch: TensorDict(
        {"d": tensor(*batch, 5, 2), "note": NonTensorData("n", [*batch, 5])}, [*batch, 5]
    ),
    "lazy": lambda batch: lazy_stack(
        [TensorDict(e=tensor(*batch), f="f", batch_size=batch) for _ in range(2)], len(batch)
    ),
    "rows": lambda batch: (
        lazy_stack(
            [TensorDict(g=tensor(*batch[1:]), batch_size=batch[1:]) for _ in range(batch[0])], 0
        )
        if batch
        else TensorDict()
    ),
    "pair": pair,
}
BATCHES = st.sampled_from([(), (2,), (2, 3), (1, 2), (3, 1, 2)])


@st.composite
def containers(draw):
    batch = draw(BATCHES)
    kind = draw(st.sampled_from(["plain", "plain", "lazy", "pair", "mixed"]))
    names = draw(st.lists(st.sampled_from(sorted(PARTS)), unique=True, max_size=5))

    def plain(batch):
        return TensorDict({name: PARTS[name](batch) for name in names}, batch)

    if kind == "plain" or not batch:
        td = plain(batch)
    elif kind == "pair":
        td = pair(batch)
    else:
        dim = draw(st.integers(0, len(batch) - 1))
        rest = (*batch[:dim], *batch[dim + 1 :])
        members = [plain(rest) for _ in range(batch[dim])]
        if kind == "mixed":
            members[0]["only"] = tensor(*rest)
            members[-1]["wide"] = tensor(*rest, 7)
        td = lazy_stack(members, dim)
    if draw(st.booleans()):
        td.names = [f"t{i}" for i in range(len(batch))]
    state = draw(st.sampled_from(["open", "open", "locked", "consolidated", "device"]))
    if state == "locked":
        td.lock_()
    elif state == "consolidated":
        td = td.consolidate(metadata=True)
    elif state == "device":
        td = td.to("cpu")
    return td


def mask(td):
    return torch.arange(td.batch_size.numel()).reshape(td.batch_size) % 2 == 0


def first_key(td):
    return next(iter(td.keys()), "none")


def doubled(leaf):
    return leaf * 2


def entered(method, *args):
    """A `with` block over a shape operation, in which an entry is added."""

    def run(td):
        with getattr(td, method)(*args) as view:
            view["added"] = torch.zeros(*view.batch_size)
        return td

    return run


def written(index, value):
    def run(td):
        td[index] = value(td[index])
        return td

    return run


def opened(td):
    with td.unlock_():
        td["added"] = torch.zeros(td.batch_size)
        all_sound(td)
    return td


def resized(td):
    td.batch_size = td.batch_size[:1]
    return td


def renamed(td):
    td.names = [f"n{i}" for i in range(td.batch_dims)]
    return td


def mapped(in_dim, out_dim):
    def run(td):
        return torch.vmap(lambda row: row, (in_dim,), out_dim)(td)

    return run


def grown(td):
    return torch.vmap(lambda row: row.apply(lambda x: x + 1), (0,), 1)(td)


def gathered(td):
    index = torch.zeros(td.batch_size, dtype=torch.int64)
    return td.gather(0, index)


def appended(td):
    td.append(td[0].clone())
    return td


def stored(td):
    outer = TensorDict(batch_size=td.batch_size[:1])
    outer["held"] = td
    outer.lock_()
    sound(outer)
    return outer


def removed(td):
    del td[first_key(td)]
    return td


OPS = {
    "view": lambda td: td.view(-1),
    "reshape": lambda td: td.reshape(-1),
    "flatten": lambda td: td.flatten(0, -1),
    "unflatten": lambda td: td.unflatten(0, (1, -1)),
    "unsqueeze 0": lambda td: td.unsqueeze(0),
    "unsqueeze -1": lambda td: td.unsqueeze(-1),
    "squeeze": lambda td: td.squeeze(),
    "squeeze 0": lambda td: td.squeeze(0),
    "permute": lambda td: td.permute(*reversed(range(td.ndim))),
    "transpose": lambda td: td.transpose(0, -1),
    "expand": lambda td: td.expand(2, *td.batch_size),
    "repeat": lambda td: td.repeat(*[2] * td.ndim),
    "repeat_interleave": lambda td: td.repeat_interleave(2, dim=0),
    "roll": lambda td: td.roll(1, 0),
    "flip": lambda td: td.flip(0),
    "narrow": lambda td: td.narrow(0, 0, 1),
    "pad": lambda td: td.pad([0, 1] * td.ndim),
    "split": lambda td: td.split(1, 0),
    "chunk": lambda td: td.chunk(2, -1),
    "unbind": lambda td: td.unbind(0),
    "unbind -1": lambda td: td.unbind(-1),
    "gather": gathered,
    "row": lambda td: td[0],
    "rows": lambda td: td[:1],
    "ellipsis": lambda td: td[..., 0],
    "new dim": lambda td: td[None],
    "list": lambda td: td[[0, 0]],
    "mask": lambda td: td[mask(td)],
    "no rows": lambda td: td[:0],
    "masked_select": lambda td: td.masked_select(mask(td)),
    "masked_fill": lambda td: td.masked_fill(mask(td), 1),
    "where": lambda td: td.where(mask(td), td.clone()),
    "where 0": lambda td: td.where(mask(td), 0),
    "clone": lambda td: td.clone(),
    "copy": lambda td: td.copy(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda td: pickle.loads(pickle.dumps(td)),
    "to": lambda td: td.to("cpu"),
    "to dtype": lambda td: td.to(torch.float64),
    "double": lambda td: td.double(),
    "detach": lambda td: td.detach(),
    "data": lambda td: td.data,
    "contiguous": lambda td: td.contiguous(),
    "densify": lambda td: td.densify(),
    "to_tensordict": lambda td: td.to_tensordict(),
    "to_lazystack": lambda td: td.to_lazystack(),
    "empty": lambda td: td.empty(),
    "empty recurse": lambda td: td.empty(recurse=True),
    "apply": lambda td: td.apply(doubled),
    "apply lock": lambda td: td.apply(doubled, propagate_lock=True),
    "apply size": lambda td: td.apply(lambda x: x.sum(), batch_size=[]),
    "apply_": lambda td: td.apply_(doubled),
    "named_apply": lambda td: td.named_apply(lambda name, x: x if name != "a" else None),
    "add": lambda td: td + 1,
    "add td": lambda td: td + td,
    "eq": lambda td: td == td.clone(),
    "neg": lambda td: -td,
    "add_": lambda td: td.add_(1),
    "exp": lambda td: td.exp(),
    "sum": lambda td: td.sum(),
    "sum 0": lambda td: td.sum(0),
    "sum keepdim": lambda td: td.sum(keepdim=True),
    "sum 0 keepdim": lambda td: td.sum(0, keepdim=True),
    "sum feature": lambda td: td.sum(dim="feature"),
    "mean feature keepdim": lambda td: td.mean(dim="feature", keepdim=True),
    "max": lambda td: td.max(0),
    "amax": lambda td: td.amax(-1),
    "cummax": lambda td: td.cummax(0),
    "quantile": lambda td: td.quantile(torch.tensor([0.2, 0.8]), dim=0),
    "quantile all": lambda td: td.quantile(torch.tensor([0.2, 0.8])),
    "softmax": lambda td: td.softmax(0),
    "norm": lambda td: td.norm(),
    "all": lambda td: td.all(0),
    "logsumexp": lambda td: td.logsumexp(0),
    "stack": lambda td: torch.stack([td, td.clone()], 0),
    "stack -1": lambda td: torch.stack([td, td.clone()], -1),
    "cat": lambda td: torch.cat([td, td.clone()], 0),
    "lazy_stack": lambda td: lazy_stack([td, td.clone()], 0),
    "lazy_stack -1": lambda td: lazy_stack([td, td.clone()], -1),
    "zeros_like": torch.zeros_like,
    "new_zeros": lambda td: td.new_zeros(4),
    "new_full": lambda td: td.new_full([1, 2], 3),
    "new_tensor": lambda td: td.new_tensor(td),
    "select": lambda td: td.select(first_key(td)),
    "select inplace": lambda td: td.select(first_key(td), inplace=True),
    "exclude": lambda td: td.exclude(first_key(td)),
    "exclude inplace": lambda td: td.exclude(first_key(td), inplace=True),
    "split_keys": lambda td: td.split_keys([first_key(td)]),
    "flatten_keys": lambda td: td.flatten_keys("."),
    "flatten_keys inplace": lambda td: td.flatten_keys(".", inplace=True),
    "unflatten_keys": lambda td: td.flatten_keys(".").unflatten_keys("."),
    "filter_non_tensor_data": lambda td: td.filter_non_tensor_data(),
    "rename_key_": lambda td: td.rename_key_(first_key(td), ("moved", "here")),
    "rename_keys": lambda td: td.rename_keys({first_key(td): "moved"}),
    "replace": lambda td: td.replace(a=torch.zeros(td.batch_size)),
    "set": lambda td: td.set("added", torch.ones(td.batch_size)),
    "set nested": lambda td: td.set(("nested", "added"), torch.ones(td.batch_size)),
    "set text": lambda td: td.set("words", "text"),
    "set container": lambda td: td.set("held", TensorDict(a=torch.ones(td.batch_size))),
    "set_": lambda td: td.set_("a", torch.ones(td.batch_size)),
    "set_at_": lambda td: td.set_at_("a", 7, 0),
    "set_at_ text": lambda td: td.set_at_("text", "new", 0),
    "del": removed,
    "pop": lambda td: (td, td.pop(first_key(td))),
    "popitem": lambda td: (td, td.popitem()),
    "clear": lambda td: td.clear(),
    "create_nested": lambda td: td.create_nested("fresh"),
    "update": lambda td: td.update({"a": torch.zeros(td.batch_size), "text": "changed"}),
    "update td": lambda td: td.update(td.clone().apply(doubled)),
    "update inplace": lambda td: td.update(td.clone(), inplace=True),
    "update size": lambda td: td.update(td.clone()[:1], update_batch_size=True),
    "update_": lambda td: td.update_(td.clone()),
    "update_at_": lambda td: td.update_at_(td.clone()[0], 0),
    "copy_at_": lambda td: td.copy_at_(td.clone()[0], 0),
    "set row": written(0, lambda row: row.clone()),
    "set rows": written(slice(1), lambda rows: rows.apply(doubled)),
    "set row 0": written(0, lambda row: 0),
    "set row dict": written(0, lambda row: {"a": torch.zeros(row.batch_size), "text": "one"}),
    "set last": written((Ellipsis, -1), lambda rows: rows.clone()),
    "lock_": lambda td: td.lock_(),
    "unlock_": lambda td: td.unlock_(),
    "with unlock_": opened,
    "batch_size": resized,
    "auto_batch_size_": lambda td: td.auto_batch_size_(),
    "auto_batch_size_ 1": lambda td: td.auto_batch_size_(1, keep_compliant_size=True),
    "names": renamed,
    "rename": lambda td: td.rename(*[f"r{i}" for i in range(td.ndim)]),
    "refine_names": lambda td: td.refine_names(..., "last"),
    "consolidate": lambda td: td.consolidate(),
    "consolidate metadata": lambda td: td.consolidate(metadata=True),
    "consolidate inplace": lambda td: td.consolidate(inplace=True, metadata=True),
    "to inplace": lambda td: td.to(torch.float64, inplace=True),
    "share_memory_": lambda td: td.share_memory_(),
    "memmap": lambda td: td.memmap(),
    "memmap_": lambda td: td.memmap_(),
    "memmap_like": lambda td: td.memmap_like(),
    "make_memmap": lambda td: (td.make_memmap("added", (*td.batch_size, 2)), td),
    "state_dict": lambda td: td.clone().load_state_dict(td.state_dict()),
    "load_state_dict": lambda td: TensorDict().load_state_dict(td.state_dict(), strict=False),
    "tree_map": lambda td: pytree.tree_map(doubled, td),
    "tree_map shape": lambda td: pytree.tree_map(lambda x: x.sum(), td),
    "vmap 0": mapped(0, 0),
    "vmap 1": mapped(1, 0),
    "vmap 0 1": mapped(0, 1),
    "vmap -1": mapped(-1, 0),
    "vmap 2": mapped(2, 0),
    "vmap apply": grown,
    "view with": entered("view", -1),
    "unsqueeze with": entered("unsqueeze", 0),
    "permute with": entered("transpose", 0, -1),
    "flatten_keys with": entered("flatten_keys", "."),
    "get": lambda td: td.get(first_key(td)),
    "get nested": lambda td: td.get("nested"),
    "get longer": lambda td: td.get("longer"),
    "get lazy": lambda td: td.get("lazy"),
    "get pair": lambda td: td.get("pair"),
    "get words": lambda td: td.get("words"),
    "append": appended,
    "insert": lambda td: (td.insert(0, td[0].clone()), td)[1],
    "extend": lambda td: (td.extend([td[0].clone()]), td)[1],
    "store": stored,
    "requires_grad_": lambda td: td.requires_grad_(),
    "device": lambda td: td.clear_device_(),
    "auto_device_": lambda td: td.auto_device_(),
    "items": lambda td: [list(td.items(True, True)), list(td.keys(True)), td][-1],
    "from_any": lambda td: TensorDict.from_any({"a": td}),
    "from_dict": lambda td: TensorDict.from_dict(td.to_dict(), auto_batch_size=True),
    "params": lambda td: raffia.TensorDictParams(td),
    "fill_": lambda td: td.fill_("a", 1),
    "zero_": lambda td: td.zero_(),
    "cat_tensors": lambda td: td.cat_tensors("wide", out_key="joined", dim=-1),
    "stack_tensors": lambda td: td.stack_tensors("a", "a", out_key="joined", dim=-1),
    "separates": lambda td: (td, td.separates(first_key(td))),
    "filter_empty_": lambda td: td.filter_empty_(),
    "tensor_split": lambda td: td.tensor_split(2),
    "swapaxes": lambda td: td.swapaxes(0, -1),
    "atleast_2d": lambda td: td.atleast_2d(),
    "rot90": lambda td: td.rot90(),
    "tile": lambda td: td.tile((2,)),
    "bool": lambda td: td.bool(),
    "grad": lambda td: td.grad,
    "numpy": lambda td: td.numpy(),
    "as_tensor": lambda td: td.as_tensor(),
}


def follow(td, steps):
    """Do the steps one after the other, each on the result of the last; all stays sound."""
    sound(td)
    for step in steps:
        try:
            result = OPS[step](td)
        except REFUSED:
            result = td
        assert all_sound(result) and all_sound(td)
        if isinstance(result, raffia.TensorCollection):
            td = result


@examples
@given(containers(), st.lists(st.sampled_from(sorted(OPS)), min_size=1, max_size=4))
def test_operations_leave_containers_sound(td, steps):
    follow(td, steps)
