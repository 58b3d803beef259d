"""Dimension names: one per batch dimension or None, carried along by every operation."""

import copy
import pickle

import numpy as np
import pytest
import torch

from raffia import TensorDict, lazy_stack, pad

B, T, A = 2, 3, 4


def make(names=("x", "y", "z")):
    return TensorDict(
        {
            "a": torch.arange(120.0).reshape(B, T, A, 5),
            "b": {"c": torch.zeros(B, T, A), "d": {"e": torch.ones(B, T, A, 6)}},
        },
        [B, T, A],
        names=names,
    )


def check(td, expected):
    expected = list(expected)
    assert td.names == expected and len(expected) == td.ndim
    assert td["b"].names == expected and td["b", "d"].names == expected
    assert td["b"].batch_size == td["b", "d"].batch_size == td.batch_size


X, Y, Z, N = "x", "y", "z", None

OPS = [
    ("self", lambda td: td, [X, Y, Z]),
    ("[0]", lambda td: td[0], [Y, Z]),
    ("[-1]", lambda td: td[-1], [Y, Z]),
    ("[:, 0]", lambda td: td[:, 0], [X, Z]),
    ("[..., 0]", lambda td: td[..., 0], [X, Y]),
    ("[0, 0]", lambda td: td[0, 0], [Z]),
    ("[0, ..., 0]", lambda td: td[0, ..., 0], [Y]),
    ("[0, 0, 0]", lambda td: td[0, 0, 0], []),
    ("[:1]", lambda td: td[:1], [X, Y, Z]),
    ("[...]", lambda td: td[...], [X, Y, Z]),
    ("[None]", lambda td: td[None], [N, X, Y, Z]),
    ("[..., None]", lambda td: td[..., None], [X, Y, Z, N]),
    ("[:, None]", lambda td: td[:, None], [X, N, Y, Z]),
    ("[0, None]", lambda td: td[0, None], [N, Y, Z]),
    ("[:, 0, None]", lambda td: td[:, 0, None], [X, N, Z]),
    ("[tensor]", lambda td: td[torch.tensor([1, 0, 1])], [X, Y, Z]),
    ("[list]", lambda td: td[[0, 1]], [X, Y, Z]),
    ("[range]", lambda td: td[range(2)], [X, Y, Z]),
    ("[array]", lambda td: td[np.array([0, 1])], [X, Y, Z]),
    ("[:, tensor]", lambda td: td[:, torch.tensor([0, 1])], [X, Y, Z]),
    ("[0-d tensor]", lambda td: td[torch.tensor(0)], [Y, Z]),
    ("[2-d tensor]", lambda td: td[torch.tensor([[0, 1]])], [N, X, Y, Z]),
    ("[mask]", lambda td: td[torch.tensor([True, False])], [X, Y, Z]),
    ("[2-d mask]", lambda td: td[torch.ones(B, T, dtype=torch.bool)], [N, Z]),
    ("[:, 2-d mask]", lambda td: td[:, torch.ones(T, A, dtype=torch.bool)], [X, N]),
    ("[tensor, tensor]", lambda td: td[torch.tensor([0, 1]), torch.tensor([0, 1])], [N, Z]),
    ("unsqueeze(0)", lambda td: td.unsqueeze(0), [N, X, Y, Z]),
    ("unsqueeze(1)", lambda td: td.unsqueeze(1), [X, N, Y, Z]),
    ("unsqueeze(-1)", lambda td: td.unsqueeze(-1), [X, Y, Z, N]),
    ("squeeze(0) of 1", lambda td: td[:1].squeeze(0), [Y, Z]),
    ("squeeze() of 1, ours", lambda td: td[:1].squeeze(), [Y, Z]),
    ("squeeze() of two, ours", lambda td: td[:1, :, :1].squeeze(), [Y]),
    ("squeeze(-1) of 1", lambda td: td[..., :1].squeeze(-1), [X, Y]),
    ("squeeze of more", lambda td: td.squeeze(0), [X, Y, Z]),
    ("squeeze of unsqueeze", lambda td: td.unsqueeze(1).squeeze(1), [X, Y, Z]),
    ("permute", lambda td: td.permute(2, 0, 1), [Z, X, Y]),
    ("permute negative", lambda td: td.permute(-1, 0, 1), [Z, X, Y]),
    ("permute tuple", lambda td: td.permute((1, 0, 2)), [Y, X, Z]),
    ("permute dims=", lambda td: td.permute(dims=(1, 0, 2)), [Y, X, Z]),
    ("transpose", lambda td: td.transpose(0, 2), [Z, Y, X]),
    ("transpose negative", lambda td: td.transpose(-1, 0), [Z, Y, X]),
    ("movedim", lambda td: td.movedim(0, 2), [Y, Z, X]),
    ("swapaxes", lambda td: td.swapaxes(0, 1), [Y, X, Z]),
    ("flatten(0, 1)", lambda td: td.flatten(0, 1), [N, Z]),
    ("flatten(1, 2)", lambda td: td.flatten(1, 2), [X, N]),
    ("flatten()", lambda td: td.flatten(), [N]),
    ("unflatten", lambda td: td.unflatten(2, (2, 2)), [X, Y, N, Z]),
    ("unflatten of flatten", lambda td: td.flatten(0, 1).unflatten(0, (B, T)), [N, N, Z]),
    ("reshape(-1)", lambda td: td.reshape(-1), [N]),
    ("reshape", lambda td: td.reshape(6, 4), [N, N]),
    ("reshape to the same", lambda td: td.reshape(B, T, A), [X, Y, Z]),
    ("view(-1)", lambda td: td.view(-1), [N]),
    ("view", lambda td: td.view(6, 4), [N, N]),
    ("view to the same", lambda td: td.view(B, T, A), [X, Y, Z]),
    ("expand", lambda td: td.expand(7, B, T, A), [N, X, Y, Z]),
    ("expand of 1", lambda td: td[:1].expand(5, T, A), [X, Y, Z]),
    ("expand to the same", lambda td: td.expand(B, T, A), [X, Y, Z]),
    ("stack 0", lambda td: torch.stack([td, td.clone()], 0), [N, X, Y, Z]),
    ("stack 1", lambda td: torch.stack([td, td.clone()], 1), [X, N, Y, Z]),
    ("stack -1", lambda td: torch.stack([td, td.clone()], -1), [X, Y, Z, N]),
    ("lazy_stack", lambda td: lazy_stack([td, td.clone()], 1), [X, N, Y, Z]),
    (
        "lazy_stack, densified",
        lambda td: lazy_stack([td, td.clone()], 1).to_tensordict(),
        [X, N, Y, Z],
    ),
    ("lazy_stack[0]", lambda td: lazy_stack([td, td.clone()], 0)[0], [X, Y, Z]),
    ("lazy_stack[:, :, 0]", lambda td: lazy_stack([td, td.clone()], 1)[:, :, 0], [X, N, Z]),
    ("cat 0", lambda td: torch.cat([td, td], 0), [X, Y, Z]),
    ("cat 1", lambda td: torch.cat([td, td], 1), [X, Y, Z]),
    ("split", lambda td: td.split(1, 0)[1], [X, Y, Z]),
    ("split sizes", lambda td: td.split([1, 2], 1)[1], [X, Y, Z]),
    ("chunk", lambda td: td.chunk(2, 0)[0], [X, Y, Z]),
    ("unbind 0", lambda td: td.unbind(0)[1], [Y, Z]),
    ("unbind 1", lambda td: td.unbind(1)[1], [X, Z]),
    ("unbind -1", lambda td: td.unbind(-1)[1], [X, Y]),
    ("iteration", lambda td: list(td)[1], [Y, Z]),
    ("gather", lambda td: td.gather(0, torch.zeros(1, T, A, dtype=torch.long)), [X, Y, Z]),
    (
        "gather dim=",
        lambda td: td.gather(dim=1, index=torch.zeros(B, 1, A, dtype=torch.long)),
        [X, Y, Z],
    ),
    ("masked_select", lambda td: td.masked_select(torch.ones(B, T, A, dtype=torch.bool)), [N]),
    ("where", lambda td: td.where(torch.ones(B, T, A, dtype=torch.bool), td), [X, Y, Z]),
    ("pad", lambda td: pad(td, [0, 1, 0, 0, 0, 0]), [X, Y, Z]),
    ("clone", lambda td: td.clone(), [X, Y, Z]),
    ("clone(False)", lambda td: td.clone(False), [X, Y, Z]),
    ("copy.copy", lambda td: copy.copy(td), [X, Y, Z]),
    ("deepcopy", lambda td: copy.deepcopy(td), [X, Y, Z]),
    ("pickle", lambda td: pickle.loads(pickle.dumps(td)), [X, Y, Z]),
    ("to device", lambda td: td.to("meta"), [X, Y, Z]),
    ("to dtype", lambda td: td.to(torch.float64), [X, Y, Z]),
    ("detach", lambda td: td.detach(), [X, Y, Z]),
    ("contiguous", lambda td: td.contiguous(), [X, Y, Z]),
    ("lock_", lambda td: td.lock_(), [X, Y, Z]),
    ("apply", lambda td: td.apply(lambda x: x + 1), [X, Y, Z]),
    (
        "apply new batch",
        lambda td: td.apply(lambda x: x[0], batch_size=[T, A], names=["y", "z"]),
        [Y, Z],
    ),
    ("named_apply", lambda td: td.named_apply(lambda k, x: x + 1), [X, Y, Z]),
    ("+ scalar", lambda td: td + 1, [X, Y, Z]),
    ("+ td", lambda td: td + td, [X, Y, Z]),
    ("neg", lambda td: -td, [X, Y, Z]),
    ("zeros_like", lambda td: torch.zeros_like(td), [X, Y, Z]),
    ("mean(0)", lambda td: td.mean(0), [Y, Z]),
    ("sum(dim=1)", lambda td: td.sum(dim=1), [X, Z]),
    ("mean keepdim", lambda td: td.mean(0, keepdim=True), [X, Y, Z]),
    ("select", lambda td: td.select("a", "b"), [X, Y, Z]),
    ("exclude", lambda td: td.exclude("a"), [X, Y, Z]),
    ("flatten_keys round trip", lambda td: td.flatten_keys().unflatten_keys(), [X, Y, Z]),
    ("replace", lambda td: td.replace({"a": torch.ones(B, T, A)}), [X, Y, Z]),
    ("empty(recurse)", lambda td: td.empty(recurse=True), [X, Y, Z]),
]


@pytest.mark.parametrize(
    "op, expected", [(op, e) for _, op, e in OPS], ids=[name for name, _, _ in OPS]
)
class TestPropagation:
    def test_named(self, op, expected):
        td = make()
        check(op(td), expected)
        check(td, "xyz")  # the source keeps its names
        check(op(make().lock_()), expected)

    def test_less_named(self, op, expected):
        new = op(make(None))
        if "y" in new.names:
            return  # the operation itself was told the names
        check(new, [None] * len(expected))
        check(op(make([None, "y", None])), [name if name == "y" else None for name in expected])


class TestLongerChild:
    """A nested container with a further batch dimension keeps the name of that one."""

    def td(self):
        n = TensorDict({"c": torch.ones(B, T, A)}, [B, T, A], names=["x", "y", "w"])
        return TensorDict({"n": n}, [B, T], names=["x", "y"])

    @pytest.mark.parametrize(
        "op, expected",
        [
            (lambda td: td, ["x", "y", "w"]),
            (lambda td: td[0], ["y", "w"]),
            (lambda td: td[:, 0], ["x", "w"]),
            (lambda td: td[None], [None, "x", "y", "w"]),
            (lambda td: td.unsqueeze(-1), ["x", "y", None, "w"]),
            (lambda td: td.permute(1, 0), ["y", "x", "w"]),
            (lambda td: td.unbind(0)[0], ["y", "w"]),
            (lambda td: td.split(1)[0], ["x", "y", "w"]),
            (lambda td: td.expand(5, B, T), [None, "x", "y", "w"]),
            (lambda td: torch.stack([td, td]), [None, "x", "y", "w"]),
            (lambda td: torch.cat([td, td]), ["x", "y", "w"]),
            (lambda td: td.clone(), ["x", "y", "w"]),
            (lambda td: td + 1, ["x", "y", "w"]),
        ],
        ids=[
            "self",
            "[0]",
            "[:, 0]",
            "[None]",
            "unsqueeze",
            "permute",
            "unbind",
            "split",
            "expand",
            "stack",
            "cat",
            "clone",
            "+",
        ],
    )
    def test_op(self, op, expected):
        new = op(self.td())
        assert new["n"].names == expected and new["n"].ndim == len(expected)


class TestReadAndWrite:
    def test_default(self):
        assert TensorDict().names == [] and make(None).names == [None] * 3
        assert TensorDict(batch_size=[2]).names == [None]

    def test_constructor(self):
        check(make(), "xyz")
        check(make(["x", None, "z"]), ["x", None, "z"])
        assert TensorDict(batch_size=[2], names=["time"]).names == ["time"]

    @pytest.mark.parametrize(
        "names",
        [["p", "q", "r"], ("p", "q", "r"), ["p", None, "r"], [None] * 3, ["z", "y", "x"]],
        ids=str,
    )
    def test_setter(self, names):
        td = make()
        td.names = names
        check(td, names)
        assert type(td.names) is list

    def test_setter_none_forgets(self):
        td = make()
        td.names = None
        check(td, [None] * 3)

    @pytest.mark.parametrize(
        "names", [["p", "q"], ["p", "q", "r", "s"], [], ["p", "p", "q"]], ids=str
    )
    def test_setter_refuses(self, names):
        td = make()
        with pytest.raises((ValueError, RuntimeError)):
            td.names = names
        check(td, "xyz")

    def test_the_list_is_a_copy(self):
        td = make()
        td.names[0] = "other"
        names = ["p", "q", "r"]
        td.names = names
        names[0] = "other"
        check(td, "pqr")

    def test_a_copy_has_its_own_names(self):
        td = make()
        for new in (td.clone(), td.clone(False), td[0:2, 0:3], td + 1):
            new.names = ["p", "q", "r"]
        check(td, "xyz")


class TestRename:
    def test_by_map(self):
        td = make()
        new = td.rename(x="w")
        check(new, "wyz")
        check(td, "xyz")
        assert new is not td and new["a"] is td["a"]
        assert td.rename_(x="w") is td
        check(td, "wyz")

    def test_by_list(self):
        td = make()
        check(td.rename("p", "q", "r"), "pqr")
        check(td, "xyz")
        check(td.rename_("p", "q", "r"), "pqr")
        check(td.rename(None), [None] * 3)
        check(td.rename(None, "q", None), [None, "q", None])

    def test_swap(self):
        check(make().rename_(x="y", y="x"), "yxz")

    def test_names_a_nameless(self):
        check(make(None).rename_("p", "q", "r"), "pqr")

    @pytest.mark.parametrize("method", ["rename", "rename_"])
    @pytest.mark.parametrize(
        "args, kwargs",
        [((), {"q": "w"}), (("p", "q"), {}), (("p", "q", "r"), {"x": "w"}), ((), {"x": "y"})],
        ids=["unknown", "too few", "both", "duplicate"],
    )
    def test_refused(self, method, args, kwargs):
        td = make()
        with pytest.raises((ValueError, RuntimeError)):
            getattr(td, method)(*args, **kwargs)
        check(td, "xyz")

    def test_unknown_of_a_nameless(self):
        with pytest.raises((ValueError, RuntimeError), match="x"):
            make(None).rename_(x="y")


class TestRefineNames:
    @pytest.mark.parametrize(
        "before, args, after",
        [
            (None, ("x", "y", "z"), "xyz"),
            (None, ("x", None, None), ["x", None, None]),
            (None, (..., "z"), [None, None, "z"]),
            (None, ("x", ...), ["x", None, None]),
            (None, ("x", ..., "z"), ["x", None, "z"]),
            ([None, "y", None], ("x", "y", None), ["x", "y", None]),
            ([None, "y", None], ("x", ...), ["x", "y", None]),
            (["x", "y", "z"], ("x", "y", "z"), "xyz"),
            (["x", "y", "z"], (..., "z"), "xyz"),
        ],
        ids=str,
    )
    def test_adds_in_place(self, before, args, after):
        td = make(before)
        assert td.refine_names(*args) is td
        check(td, after)

    @pytest.mark.parametrize(
        "before, args",
        [
            (["x", "y", "z"], ("x", "y", "q")),
            ([None, "y", None], ("x", "q", None)),
            (["x", "y", "z"], ("x", "y")),
            (None, ("x", "x", "y")),
            ([None, "y", None], ("y", "y", None)),
        ],
        ids=str,
    )
    def test_refused(self, before, args):
        td = make(before)
        with pytest.raises((RuntimeError, ValueError)):
            td.refine_names(*args)
        check(td, before or [None] * 3)


class TestNested:
    def test_a_nameless_child_takes_the_names(self):
        td = make()
        td["n"] = TensorDict({"q": torch.ones(B, T, A)}, [B, T, A])
        td["d"] = {"q": torch.ones(B, T, A)}
        td["l", "m"] = torch.ones(B, T, A)
        td.create_nested("e")
        for key in ("n", "d", "l", "e"):
            assert td[key].names == ["x", "y", "z"]

    def test_a_promoted_child_takes_the_names_in_a_copy(self):
        inner = TensorDict({"q": torch.ones(B, T, A)}, [B])
        td = make()
        td["n"] = inner
        assert td["n"].names == ["x", "y", "z"] and inner.names == [None]

    def test_a_child_of_other_names_is_refused_or_renamed_in_a_copy(self):
        inner = TensorDict({"q": torch.ones(B, T, A)}, [B, T, A], names=["i", "j", "k"])
        td = make()
        try:
            td["n"] = inner
        except RuntimeError:
            assert "n" not in td
        else:
            assert td["n"].names == ["x", "y", "z"]
        assert inner.names == ["i", "j", "k"] and td.names == ["x", "y", "z"]

    def test_names_set_on_the_parent_reach_the_children(self):
        td = make(None)
        td.names = ["p", "q", "r"]
        check(td, "pqr")

    def test_a_popped_child_keeps_its_names(self):
        assert make().pop("b").names == ["x", "y", "z"]


class TestBatchSize:
    def test_shrinking_and_growing(self):
        td = make()
        td.batch_size = [B, T]
        assert td.names == ["x", "y"] and td["b"].names == ["x", "y", "z"]
        td.batch_size = [B, T, A]
        assert td.names == ["x", "y", None]

    def test_auto_batch_size(self):
        td = TensorDict({"a": torch.ones(B, T)}, [B], names=["x"]).auto_batch_size_()
        assert td.names == ["x", None]


class TestLazyStack:
    @pytest.mark.parametrize("dim", [0, 1, 3])
    def test_setter_reaches_the_members(self, dim):
        td = lazy_stack([make(), make()], dim)
        td.names = ["i", "j", "k", "l"]
        member = ["i", "j", "k", "l"]
        del member[dim]
        assert td.names == td["b"].names == ["i", "j", "k", "l"]
        assert all(m.names == m["b"].names == member for m in td.tensordicts)

    @pytest.mark.parametrize(
        "op, expected",
        [
            (lambda td: td[0], [None, "y", "z"]),
            (lambda td: td[:, 0], ["x", "y", "z"]),
            (lambda td: td.transpose(0, 1), [None, "x", "y", "z"]),
            (lambda td: td.permute(3, 1, 2, 0), ["z", None, "y", "x"]),
            (lambda td: td.unsqueeze(0), [None, "x", None, "y", "z"]),
            (lambda td: td.clone(), ["x", None, "y", "z"]),
            (lambda td: td.contiguous(), ["x", None, "y", "z"]),
            (lambda td: td.rename_(x="w"), ["w", None, "y", "z"]),
            (lambda td: td.unbind(1)[0], ["x", "y", "z"]),
            (lambda td: td.unbind(0)[0], [None, "y", "z"]),
        ],
        ids=[
            "[0]",
            "[:, 0]",
            "transpose",
            "permute",
            "unsqueeze",
            "clone",
            "contiguous",
            "rename_",
            "unbind 1",
            "unbind 0",
        ],
    )
    def test_ops(self, op, expected):
        assert op(lazy_stack([make(), make()], 1)).names == expected
