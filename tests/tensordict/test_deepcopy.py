"""A deep copy shares memory like its source, and none with its source."""

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raffia import LazyStackedTensorDict, TensorDict, lazy_stack, tensorclass
from raffia.tensordict.node import Node

VIEWS = {
    "whole": lambda x: x,
    "again": lambda x: x.view(3, 4),
    "flat": lambda x: x.flatten(),
    "row": lambda x: x[1],
    "tail": lambda x: x[1:],
    "columns": lambda x: x[:, ::2],
    "turned": lambda x: x.t(),
    "one": lambda x: x[2, 3],
    "rows": lambda x: x[:1].expand(3, 4),
    "none": lambda x: x[:0],
    "detached": lambda x: x.detach(),
    "negative": lambda x: torch._neg_view(x)[1:],
    "parts": lambda x: torch.view_as_complex(x.view(3, 2, 2)),
    "conjugate": lambda x: torch.view_as_complex(x.view(3, 2, 2)).conj(),
    "bits": lambda x: x.view(torch.int32),
    "learned": lambda x: x.detach().requires_grad_(),
    "parameter": lambda x: torch.nn.Parameter(x.detach(), requires_grad=False),
}
COPIED_ALONE = {"parameter"}  # nn.Parameter clones its values, wherever they are
CHANGED = {"negative", "conjugate"}  # which torch copies to separate memory


@tensorclass
class Pair:
    left: Any
    right: Any


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, LazyStackedTensorDict):
        return leaves(value.tensordicts)
    if isinstance(value, Pair):
        return leaves([value.left, value.right])
    parts = value.values() if isinstance(value, dict | Node) else value
    return [leaf for part in parts for leaf in leaves(part)]


def container(parts: list[Any]) -> TensorDict:
    return TensorDict({f"k{i}": part for i, part in enumerate(parts)})


def stack(parts: list[Any]) -> LazyStackedTensorDict:
    return lazy_stack([TensorDict(a=part) for part in parts])


def pair(parts: list[Any]) -> Any:
    return Pair(left=parts[0], right=parts[-1])


def of_containers(children: Any) -> Any:
    parts = st.lists(children, min_size=1, max_size=3)
    return st.one_of(parts.map(container), parts.map(stack), parts.map(pair))


def of_any(children: Any) -> Any:
    parts = st.lists(children, min_size=1, max_size=3)
    named = parts.map(lambda p: {f"k{i}": part for i, part in enumerate(p)})
    return st.one_of(parts, parts.map(tuple), named)


@st.composite
def structures(draw: Any) -> Any:
    sources = [torch.arange(12.0).view(3, 4), torch.arange(12.0, 24).view(3, 4)]
    made = [
        (name, view(source)) for source in sources for name, view in VIEWS.items()
    ]  # each view once, so that a second draw is the same tensor
    tensors = st.sampled_from(made).map(lambda entry: entry[1])
    inner = st.recursive(tensors, of_containers, max_leaves=4)
    names = {id(tensor): name for name, tensor in made}
    return draw(st.recursive(inner, of_any, max_leaves=6)), names, made


def memory(leaf: torch.Tensor) -> int:
    return leaf.untyped_storage()._cdata


@settings(max_examples=50, deadline=None)
@given(structures())
def test_a_deep_copy_shares_what_its_source_shares(drawn):
    source, names, _ = drawn
    before = leaves(source)
    values = [leaf.detach().clone() for leaf in before]
    after, torchs = leaves(copy.deepcopy(source)), copy.deepcopy(leaves(source))
    assert len(after) == len(before)
    rows = list(zip(before, after, torchs, strict=True))
    for (x, new_x, theirs_x), (y, new_y, theirs_y) in itertools.product(rows, repeat=2):
        assert (memory(new_x) == memory(new_y)) == (memory(theirs_x) == memory(theirs_y))
        assert (new_x is new_y) == (theirs_x is theirs_y)
        if {names[id(x)], names[id(y)]} & (COPIED_ALONE | CHANGED):
            continue
        assert (new_x is new_y) == (x is y)
        assert (memory(new_x) == memory(new_y)) == (memory(x) == memory(y))
        assert memory(new_x) != memory(y)
    for x, new, value in zip(before, after, values, strict=True):
        assert torch.equal(new, value) and torch.equal(x, value)
        assert (new.requires_grad, new.dtype, type(new)) == (x.requires_grad, x.dtype, type(x))
        if names[id(x)] not in COPIED_ALONE | CHANGED:
            assert (new.stride(), new.storage_offset()) == (x.stride(), x.storage_offset())


def test_one_memory_under_two_keys_stays_one():
    x = torch.arange(6.0)
    for parts in ([x, x.view(2, 3)], [x, {"nested": x.view(6)}]):
        first, second = leaves(copy.deepcopy(TensorDict(dict(zip("ab", parts, strict=True)))))
        assert memory(first) == memory(second) != memory(x)


def with_attribute(x: torch.Tensor) -> torch.Tensor:
    x.unit = ["metres"]
    return x


ALONE = {  # an entry beside plain ones, which is copied as torch copies it
    "plain": lambda x: x,
    "learned": lambda x: x.requires_grad_(),
    "with an attribute": with_attribute,
    "a row": lambda x: x[1],
    "the first rows": lambda x: x[:2],
    "turned": lambda x: x.t(),
    "conjugate": lambda x: torch.view_as_complex(x.view(3, 2, 2)).conj(),
    "overlapping": lambda x: x.as_strided((3, 4), (1, 2)),
    "of nothing": lambda x: torch.zeros(0),
    "sparse": lambda x: x.to_sparse(),
    "parameter": lambda x: torch.nn.Parameter(x),
    "frozen parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "meta": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("kind", [container, stack])
def test_one_special_entry_beside_plain_ones_is_copied_as_torch_does(name, kind):
    parts = [torch.ones(2), ALONE[name](torch.arange(12.0).view(3, 4)), torch.zeros(3)]
    mine = leaves(copy.deepcopy(kind(parts)))
    for x, out, theirs in zip(parts, mine, copy.deepcopy(parts), strict=True):
        assert type(out) is type(theirs) and out is not x
        for attribute in ("requires_grad", "__dict__", "layout"):
            assert getattr(out, attribute) == getattr(theirs, attribute)
        if x.layout is torch.strided:
            assert out.stride() == theirs.stride()
            assert out.storage_offset() == theirs.storage_offset()
            assert out.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
            assert x.is_meta or memory(out) != memory(x)
        assert x.is_meta or torch.equal(out.to_dense(), theirs.to_dense())
    assert "unit" not in vars(mine[1]) or mine[1].unit is not parts[1].unit


@pytest.mark.parametrize("kind", [container, stack])
def test_entries_copied_later_share_the_memory_of_those_copied_together(kind):
    x, y = torch.arange(12.0).view(3, 4), torch.ones(2)
    for view in (x, x[1], x.t(), x.view(4, 3), x.untyped_storage(), kind([x[1], y[:1]])):
        td, later, again = copy.deepcopy((kind([x, y]), view, kind([x, y, x.view(4, 3)])))
        first, second = leaves(td)
        one, two, three = leaves(again)
        assert first is one and second is two and torch.equal(first, x)
        part = later if isinstance(later, torch.Tensor | torch.UntypedStorage) else leaves(later)[0]
        address = part._cdata if isinstance(part, torch.UntypedStorage) else memory(part)
        assert address == memory(first) == memory(three) != memory(x)
