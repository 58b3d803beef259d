"""Dimension names: one per batch dimension or None, kept by every operation."""

import copy
import pickle

import numpy as np
import pytest
import torch

from raffia import TensorDict, lazy_stack, pad
from tests.tensordict.invariants import sound
from tests.tensordict.kinds import apply_op, each, ops

B, T, A = 2, 3, 4
MASK = torch.ones(B, T, A, dtype=torch.bool)
ZEROS = torch.zeros(B, T, A, dtype=torch.long)
I, T01 = np.s_, torch.tensor([0, 1])  # noqa: E741


def make(names="xyz"):
    entries = {"a": torch.arange(120.0).reshape(B, T, A, 5)}
    entries["b"] = {"c": torch.zeros(B, T, A), "d": {"e": torch.ones(B, T, A, 6)}}
    return TensorDict(entries, [B, T, A], names=spelled(names))


def spelled(names):
    """The list of names for the letters of a word; "." is a dimension without a name."""
    return None if names is None else [None if name == "." else name for name in names]


def check(td, expected):
    expected = spelled(expected)
    assert td.names == expected and len(expected) == td.ndim and sound(td)
    assert td["b"].names == td["b", "d"].names == expected
    assert td["b"].batch_size == td["b", "d"].batch_size == td.batch_size


# names of the result, by the index or the call
INDICES = {
    **{"yz": [0, -1, torch.tensor(0)], "xz": [I[:, 0]], "xy": [I[..., 0]], "z": [I[0, 0]]},
    **{"y": [I[0, ..., 0]], "": [I[0, 0, 0]], "xyz.": [I[..., None]], "x.yz": [I[:, None]]},
    "xyz": [I[:1], ..., T01, [0, 1], range(2), np.array([0, 1]), I[:, T01], T01 == 0],
    ".xyz": [None, torch.tensor([[0, 1]]), True, torch.tensor(True)],
    **{".yz": [I[0, None]], "x.z": [I[:, 0, None], I[:, 0, True]]},
    **{"x.": [I[:, MASK[0]]], ".": [MASK]},
    ".z": [MASK[..., 0], I[T01, T01], I[[0, 1], [0, 1]]],
    ".y": [I[T01, :, T01]],
    **{".x.yz": [I[:, True, None, True], I[True, :, None, True]]},
    "..yz": [T01.expand(2, 2), [[0, 1], [1, 0]], torch.tensor([[0]])],
}


def pair(function, dim):
    return lambda td: function([td, td.clone()], dim)


CALLS = {
    "xyz": ops(squeeze=[0], reshape=[(B, T, A)], view=[(B, T, A)], expand=[(B, T, A)])
    + ops(repeat=[(2, 1, 1)], repeat_interleave=[(2, {"dim": 0})], roll=[(1, 0), 1], flip=[0])
    + ops(narrow=[(0, 0, 1)], gather=[(0, ZEROS[:1]), {"dim": 1, "index": ZEROS[:, :1]}])
    + ops(clone=[(), False], to=["meta", torch.float64], detach=[()], contiguous=[()], lock_=[()])
    + ops(apply=[torch.neg], named_apply=[lambda key, x: x + 1], add=[1], mean=[(0, True)])
    + ops(select=[("a", "b")], replace=[{"a": torch.ones(B, T, A)}], empty=[True]),
    ".xyz": ops(unsqueeze=[0], expand=[(7, B, T, A)]),
    "x.yz": ops(unsqueeze=[1]),
    "xyz.": ops(unsqueeze=[-1]),
    "yz": ops(mean=[0], sum=[0]),
    "xz": ops(sum=[{"dim": 1}]),
    "zxy": ops(permute=[(2, 0, 1), ((-1, 0, 1),)]),
    "yxz": ops(permute=[{"dims": (1, 0, 2)}], swapaxes=[(0, 1)]),
    "zyx": ops(transpose=[(-1, 0), (0, 2)]),
    "yzx": ops(movedim=[(0, 2)]),
    ".z": ops(flatten=[(0, 1)]),
    "x.": ops(flatten=[(1, 2)]),
    ".": ops(flatten=[()], reshape=[-1], view=[-1], masked_select=[MASK]),
    "..": ops(reshape=[(6, 4)], view=[(6, 4)]),
    "xy.z": ops(unflatten=[(2, (2, 2))]),
}
FUNCTIONS = {
    "xyz": [copy.copy, copy.deepcopy, lambda td: pickle.loads(pickle.dumps(td)), lambda td: td + td]
    + [lambda td: td.where(MASK, td), lambda td: pad(td, [0, 1, 0, 0, 0, 0])]
    + [lambda td: td.unsqueeze(1).squeeze(1), lambda td: td[:1].expand(5, T, A)]
    + [lambda td: torch.cat([td, td], 1), lambda td: lazy_stack([td, td.clone()], 0)[0]]
    + [lambda td: td.split([1, 2], 1)[1], lambda td: td.chunk(2, 0)[0]]
    + [lambda td: td.flatten_keys().unflatten_keys()],
    ".xyz": [pair(torch.stack, 0)],
    "x.yz": [pair(torch.stack, 1), pair(lazy_stack, 1)]
    + [lambda td: lazy_stack([td, td.clone()], 1).to_tensordict()],
    "xyz.": [pair(torch.stack, -1)],
    "yz": [lambda td: td[:1].squeeze(0), lambda td: td[:1].squeeze(), lambda td: list(td)[1]]
    + [lambda td: td.unbind(0)[1]],
    "xz": [lambda td: td.unbind(1)[1]],
    "xy": [lambda td: td.unbind(-1)[1], lambda td: td[..., :1].squeeze(-1)],
    "y": [lambda td: td[:1, :, :1].squeeze()],
    "..z": [lambda td: td.flatten(0, 1).unflatten(0, (B, T))],
    "x.z": [lambda td: lazy_stack([td, td.clone()], 1)[:, :, 0]],
}


def test_names_follow():
    def check_row(row):
        call, names = row
        td = make()
        check(call(td), names)
        check(td, "xyz")  # the source keeps its names
        check(call(make().lock_()), names)
        check(call(make(None)), "." * len(names))
        check(call(make(".y.")), ["y" if name == "y" else "." for name in names])

    for names, indices in INDICES.items():
        each([(lambda td, i=i: td[i], names) for i in indices], check_row)
    for names, table in CALLS.items():
        each({str(op): (lambda td, op=op: apply_op(td, op), names) for op in table}, check_row)
    for names, functions in FUNCTIONS.items():
        each([(function, names) for function in functions], check_row)
    td = make().apply(lambda x: x[0], batch_size=[T, A], names=["y", "z"])
    check(td, "yz")
    assert torch.stack([make(), make(None)]).names == [None] * 4


def test_read_and_write():
    assert TensorDict().names == [] and TensorDict(batch_size=[2]).names == [None]
    for names in ("pqr", "p.r", "...", "zyx"):
        td = make()
        td.names = tuple(spelled(names))
        check(td, names)
        check(make(names), names)
    assert type(td.names) is list
    td.names = None
    check(td, "...")
    td = make()
    td.names[0] = "other"
    for new in (td.clone(), td.clone(False), td[0:2, 0:3], td + 1):
        new.names = names = ["p", "q", "r"]
        names[0] = "other"
        check(new, "pqr")
    check(td, "xyz")
    for bad in (["p", "q"], ["p", "q", "r", "s"], [], ["p", "p", "q"]):
        with pytest.raises((ValueError, RuntimeError)):
            td.names = bad
        with pytest.raises((ValueError, RuntimeError)):
            TensorDict(batch_size=[B, T, A], names=bad)
    check(td, "xyz")


def test_rename():
    td = make()
    new = td.rename(x="w")
    check(new, "wyz")
    assert new is not td and new["a"] is td["a"]
    check(td.rename("p", "q", "r"), "pqr")
    check(td, "xyz")
    assert td.rename_(x="y", y="x") is td
    check(td, "yxz")
    check(make(None).rename_("p", "q", "r"), "pqr")
    for args, options in (((), {"q": "w"}), (("p", "q"), {}), (("p", "q", "r"), {"x": "w"})):
        for method in ("rename", "rename_"):
            with pytest.raises((ValueError, RuntimeError)):
                getattr(td, method)(*args, **options)
    with pytest.raises((ValueError, RuntimeError)):
        td.rename_(x="y")
    check(td, "yxz")
    with pytest.raises((ValueError, RuntimeError), match="x"):
        make(None).rename_(x="y")


REFINED = [  # before, names of the call, after; None: refused
    *((None, "x..", "x.."), (None, ["x", ..., "z"], "x.z"), (".y.", "xy.", "xy.")),
    *((".y.", ["x", ...], "xy."), ("xyz", "xyz", "xyz"), ("xyz", [..., "z"], "xyz")),
    *(("xyz", "xyq", None), (".y.", "xq.", None), ("xyz", "xy", None), (None, "xxy", None)),
    (".y.", "yy.", None),
]


def test_refine_names():
    for before, names, after in REFINED:
        td = make(before)
        if after:
            assert td.refine_names(*spelled(names)) is td
        else:
            with pytest.raises((RuntimeError, ValueError)):
                td.refine_names(*spelled(names))
        check(td, after or before or "...")


def test_children_get_the_names():
    td, full = make(), torch.ones(B, T, A)
    inner = TensorDict({"q": full}, [B])
    td["n"], td["d"], td["promoted"] = TensorDict({"q": full}, [B, T, A]), {"q": full}, inner
    td["l", "m"] = full
    td.create_nested("e")
    assert all(td[key].names == ["x", "y", "z"] for key in ("n", "d", "l", "e", "promoted"))
    assert inner.names == [None] and td.pop("b").names == ["x", "y", "z"]
    td["other"] = other = TensorDict({"q": full}, [B, T, A], names=["i", "j", "k"])
    assert other.names == ["i", "j", "k"] and td["other"].names == td.names == ["x", "y", "z"]


def unnamed(full):
    return TensorDict(full=full, n=TensorDict(c=full, batch_size=[B, T]), batch_size=[B, T])


def test_a_container_without_names_gets_those_of_a_child():
    full = torch.ones(B, T, A)

    def check_row(store):
        td, n = unnamed(full), TensorDict(c=full, batch_size=[B, T])
        td["n"] = n
        made = store(td, TensorDict({"q": full}, [B, T, A], names=["i", "j", "k"]))
        td = td if made is None else made
        assert td.names == td["n"].names == ["i", "j"] and sound(td)
        assert n.names == [None] * 2  # another holder's names stay
        assert td["m"].names == ["i", "j", "k"]

    calls = {
        "set": lambda td, m: td.set("m", m),
        "an item": lambda td, m: td.__setitem__("m", m),
        "update": lambda td, m: td.update({"m": m}),
        "constructor": lambda td, m: TensorDict({"m": m, "n": td["n"]}, [B, T]),
        "constructor, last": lambda td, m: TensorDict(n=td["n"], m=m, batch_size=[B, T]),
    }
    each(calls, check_row)
    td, n = unnamed(full), TensorDict(c=full, batch_size=[B, T])
    assert TensorDict({"n": n}, [B, T], names=["x", "y"])["n"].names == ["x", "y"]
    assert n.names == [None] * 2
    td["m"] = TensorDict({"q": full}, [B, T, A], names=[None, None, "k"])
    assert td.names == [None] * 2


def test_lazy_stacks():
    for dim in (0, 1, 3):
        td, names = lazy_stack([make(), make()], dim), ["i", "j", "k", "l"]
        td.names = names
        assert td.names == td["b"].names == names
        rest = names[:dim] + names[dim + 1 :]
        assert all(m.names == m["b"].names == rest for m in td.tensordicts)
    inner = lazy_stack([TensorDict(a=torch.ones(B)) for _ in range(2)]).auto_batch_size_()
    td = lazy_stack([TensorDict(rows=inner.to_lazystack(0), batch_size=[2])])
    td.names = ["x", "y"]
    assert all([sound(part) and part["rows"].names[:2] == td.names for part in td.split([1, 0])])
    for names, calls in {
        ".yz": (lambda td: td[0], lambda td: td.unbind(0)[0]),
        "xyz": (lambda td: td[:, 0], lambda td: td.unbind(1)[0]),
        ".xyz": (lambda td: td.transpose(0, 1),),
        "z.yx": (lambda td: td.permute(3, 1, 2, 0),),
        ".x.yz": (lambda td: td.unsqueeze(0),),
        "x.yz": (torch.clone, lambda td: td.contiguous(), lambda td: td.split(1, 1)[1]),
        "w.yz": (lambda td: td.rename_(x="w"),),
    }.items():
        for call in calls:
            check(call(lazy_stack([make(), make()], 1)), names)


def test_names_after_comparisons_and_logic():
    td = TensorDict(
        a=torch.ones(B, T, dtype=torch.int64), n={"b": torch.ones(B, T)}, batch_size=[B, T]
    )
    td, other = td.bool().rename("x", "y"), td.bool()
    full, scalar = torch.ones(B, T, dtype=torch.bool), torch.ones((), dtype=torch.bool)
    for out in (
        td & td,
        td | other,
        td ^ td,
        td & True,
        td | full,
        full & td,
        td == full,
        td > full,
    ):
        assert out.names == out["n"].names == ["x", "y"] and sound(out)
    for out in (td == td, td != 1, td == scalar, other & td):
        assert out.names == out["n"].names == [None, None]
    stack = lazy_stack([td, td], 1)
    stack.names = ["x", "z", "y"]
    assert (stack & stack).names == ["x", "z", "y"] and (stack == stack).names == [None] * 3
