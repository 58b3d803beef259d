"""Shape operations: each acts on the batch dims as on a tensor of shape `batch_size`.

Every leaf row carries its own number, so `op(arange(numel).reshape(batch))` says which rows the
result must hold, whatever the trailing dims of the leaf are.
"""

import pytest
import torch

from raffia import (
    TensorDict,
    cat,
    is_tensor_collection,
    pad,
    pad_sequence,
    stack,
)

BATCH = (4, 3)
ROWS = torch.arange(12).reshape(BATCH)


def make(batch=BATCH, names=None, shift=0):
    """Leaves [*batch], [*batch, 2]; a nested container one batch dim longer: [*batch, 5]."""
    numel = torch.Size(batch).numel()
    return TensorDict(
        {
            "a": torch.arange(2.0 * numel).reshape(*batch, 2) + shift,
            "b": torch.arange(numel).reshape(batch) + shift,
            "n": TensorDict(
                {"c": torch.arange(10 * numel).reshape(*batch, 5, 2) + shift}, [*batch, 5]
            ),
            "m": {"k": {"d": torch.arange(numel).reshape(batch) % 5 == 0}},
        },
        batch,
        names=names,
    )


def leaves(td):
    return dict(td.items(include_nested=True, leaves_only=True))


def flat(value, ndim):
    """All batch dims of a leaf as one row dim."""
    return value.reshape(value.shape[:ndim].numel(), *value.shape[ndim:])


def check_rows(td, rows, source):
    """td holds exactly the `rows` of source, with every nested batch size following."""
    assert is_tensor_collection(td)
    assert td.batch_size == rows.shape
    assert set(leaves(td)) == set(leaves(source))
    for key, value in leaves(source).items():
        want = flat(value, source.ndim)[rows]
        torch.testing.assert_close(td[key], want, rtol=0, atol=0)
    assert td["n"].batch_size == (*rows.shape, 5)
    assert td["m"].batch_size == td["m", "k"].batch_size == rows.shape


def call(x, op, namespace=None):
    name, *args = op
    kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
    return (
        getattr(x, name)(*args, **kwargs)
        if namespace is None
        else getattr(namespace, name)(x, *args, **kwargs)
    )


def name_of(op):
    return f"{op[0]}({', '.join(map(repr, op[1:]))})"


def table(name, ops):
    return pytest.mark.parametrize(name, ops, ids=[name_of(op) for op in ops])


# (batch, op): result equals the same method on a tensor of that shape
VIEW_OPS = [
    ("view", 12),
    ("view", -1),
    ("view", 4, 3),
    ("view", 3, 4),
    ("view", 2, 2, 3),
    ("view", (2, 6)),
    ("view", [2, 6]),
    ("view", torch.Size([6, 2])),
    ("view", -1, 6),
    ("view", 4, -1, 1),
    ("view", 12, 1, 1),
    ("view", {"size": (2, 6)}),
    ("reshape", 12),
    ("reshape", -1),
    ("reshape", (3, 4)),
    ("reshape", torch.Size([2, 6])),
    ("reshape", 2, -1),
    ("reshape", 1, 4, 3, 1),
    ("flatten",),
    ("flatten", 0, 1),
    ("flatten", 0, -1),
    ("flatten", 1),
    ("flatten", -2, -1),
    ("flatten", 0, 0),
    ("flatten", {"start_dim": 0, "end_dim": 1}),
    ("unflatten", 0, (2, 2)),
    ("unflatten", 0, (2, -1)),
    ("unflatten", -1, (3, 1)),
    ("unflatten", 1, (1, 3, 1)),
    ("unsqueeze", 0),
    ("unsqueeze", 1),
    ("unsqueeze", 2),
    ("unsqueeze", -1),
    ("unsqueeze", -2),
    ("unsqueeze", -3),
    ("unsqueeze", {"dim": 1}),
    ("squeeze",),
    ("squeeze", 0),
    ("squeeze", -1),
    ("squeeze", {"dim": 1}),
    ("permute", 1, 0),
    ("permute", (1, 0)),
    ("permute", [1, 0]),
    ("permute", -1, 0),
    ("permute", 0, 1),
    ("permute", {"dims": (1, 0)}),
    ("transpose", 0, 1),
    ("transpose", 1, 0),
    ("transpose", -1, 0),
    ("transpose", 0, 0),
    ("transpose", {"dim0": 0, "dim1": 1}),
    ("swapaxes", 0, 1),
    ("swapdims", 0, -1),
    ("movedim", 0, 1),
    ("movedim", -1, 0),
    ("movedim", (0, 1), (1, 0)),
    ("moveaxis", 0, 1),
    ("expand", 4, 3),
    ("expand", 2, 4, 3),
    ("expand", (2, 4, 3)),
    ("expand", torch.Size([2, 4, 3])),
    ("expand", 2, -1, -1),
    ("expand", -1, -1),
    ("expand", 5, 1, 4, 3),
    ("broadcast_to", (2, 4, 3)),
    ("narrow", 0, 1, 2),
    ("narrow", 1, 0, 2),
    ("narrow", -1, 1, 2),
    ("narrow", 0, -2, 2),
    ("narrow", 0, 4, 0),
]
COPY_OPS = [
    ("repeat", 2, 1),
    ("repeat", (2, 1)),
    ("repeat", 1, 2),
    ("repeat", 2, 3),
    ("repeat", 0, 1),
    ("repeat_interleave", 2, {"dim": 0}),
    ("repeat_interleave", 2, {"dim": 1}),
    ("repeat_interleave", 2, {"dim": -1}),
    ("repeat_interleave", 2),
    ("repeat_interleave", torch.tensor([1, 0, 2, 1]), {"dim": 0}),
    ("tile", (2,)),
    ("tile", (2, 1)),
    ("tile", (1, 3)),
    ("roll", 1, 0),
    ("roll", -1, 1),
    ("roll", 5, 0),
    ("roll", 1),
    ("roll", (1, 2), (0, 1)),
    ("roll", {"shifts": 1, "dims": -1}),
    ("flip", 0),
    ("flip", -1),
    ("flip", (0, 1)),
    ("flip", [0]),
    ("fliplr",),
    ("flipud",),
    ("rot90",),
    ("rot90", 1, (0, 1)),
    ("rot90", 2),
    ("contiguous",),
    ("clone",),
]
OTHER_BATCHES = [
    ((4,), ("view", 2, 2)),
    ((4,), ("unsqueeze", -1)),
    ((4,), ("expand", 3, -1)),
    ((1, 3), ("squeeze",)),
    ((1, 3), ("squeeze", 0)),
    ((1, 3), ("squeeze", 1)),
    ((4, 1), ("squeeze", -1)),
    ((1, 1), ("squeeze", 0)),
    ((1, 2, 1, 3), ("squeeze",)),
    ((1, 2, 1, 3), ("squeeze", 2)),
    ((1, 2, 1, 3), ("squeeze", -4)),
    ((1, 3), ("expand", 4, 3)),
    ((1, 3), ("expand", 4, -1)),
    ((4, 1), ("expand", 2, 4, 3)),
    ((1,), ("expand", 2, 3)),
    ((1, 3), ("expand", -1, 3)),
    ((1, 3), ("broadcast_to", (4, 3))),
    ((2, 3, 4), ("permute", 2, 0, 1)),
    ((2, 3, 4), ("permute", (-1, 1, 0))),
    ((2, 3, 4), ("permute", 1, 2, 0)),
    ((2, 3, 4), ("transpose", 0, 2)),
    ((2, 3, 4), ("transpose", -2, -1)),
    ((2, 3, 4), ("movedim", 0, -1)),
    ((2, 3, 4), ("movedim", (0, 1), (-1, 0))),
    ((2, 3, 4), ("flatten", 0, 1)),
    ((2, 3, 4), ("flatten", 1, 2)),
    ((2, 3, 4), ("flatten", 1)),
    ((2, 3, 4), ("flatten", -3, -2)),
    ((2, 3, 4), ("unflatten", 2, (2, 2))),
    ((2, 3, 4), ("view", 6, -1)),
    ((2, 3, 4), ("roll", (1, -1), (0, 2))),
    ((2, 3, 4), ("flip", (0, 2))),
    ((2, 3, 4), ("repeat", 1, 2, 3)),
    ((0, 3), ("view", -1)),
    ((0, 3), ("view", 3, 0)),
    ((0, 3), ("view", -1, 3)),
    ((0, 3), ("reshape", -1)),
    ((0, 3), ("flatten",)),
    ((0, 3), ("unsqueeze", 0)),
    ((0, 3), ("permute", 1, 0)),
    ((0, 3), ("expand", 2, 0, 3)),
    ((0, 3), ("repeat", 2, 2)),
    ((0, 3), ("squeeze",)),
    ((0, 3), ("flip", 0)),
]
CASES = [(BATCH, op) for op in VIEW_OPS + COPY_OPS] + OTHER_BATCHES


def rows_of(batch):
    return torch.arange(torch.Size(batch).numel()).reshape(batch)


def cases(rows):
    return pytest.mark.parametrize(
        ("batch", "op"), rows, ids=[f"{batch} {name_of(op)}" for batch, op in rows]
    )


TORCH_FUNCTIONS = [
    ("reshape", (12,)),
    ("flatten",),
    ("flatten", 0, 1),
    ("unflatten", 0, (2, 2)),
    ("unsqueeze", 1),
    ("unsqueeze", {"dim": -1}),
    ("squeeze",),
    ("squeeze", 0),
    ("squeeze", {"dim": 0}),
    ("permute", (1, 0)),
    ("permute", {"dims": (1, 0)}),
    ("transpose", 0, 1),
    ("swapaxes", 0, 1),
    ("swapdims", 0, 1),
    ("movedim", 0, 1),
    ("broadcast_to", (2, 4, 3)),
    ("narrow", 0, 1, 2),
    ("tile", (2,)),
    ("roll", 1, 0),
    ("flip", (0,)),
    ("rot90",),
    ("repeat_interleave", 2, {"dim": 0}),
    ("clone",),
]


class TestOneToOne:
    @cases(CASES)
    def test_as_a_tensor_of_the_batch_shape(self, batch, op):
        td = make(batch)
        check_rows(call(td, op), call(rows_of(batch), op), td)
        check_rows(td, rows_of(batch), make(batch))

    @table("op", TORCH_FUNCTIONS)
    def test_torch_function(self, op):
        check_rows(call(make(), op, torch), call(ROWS, op, torch), make())

    @table("op", VIEW_OPS)
    def test_views_share_memory(self, op):
        td = make()
        out = call(td, op)
        for key, value in leaves(out).items():
            assert value.untyped_storage().data_ptr() == td[key].untyped_storage().data_ptr()

    @table("op", [op for op in COPY_OPS if op[0] != "contiguous"])
    def test_copies_do_not(self, op):
        td = make()
        call(td, op).zero_()
        check_rows(td, ROWS, make())

    @table(
        "op", [("view", 12), ("unsqueeze", 0), ("permute", 1, 0), ("expand", 2, 4, 3), ("flatten",)]
    )
    def test_structure_is_new(self, op):
        td = make()
        out = call(td, op)
        del out["a"]
        out["m", "k", "e"] = torch.zeros(out.batch_size)
        check_rows(td, ROWS, make())

    @cases([case for case in CASES if case[1][0] not in ("rot90", "fliplr", "flipud")])
    def test_empty_container(self, batch, op):
        td = TensorDict({"n": TensorDict({}, [*batch, 5])}, batch)
        out = call(td, op)
        want = call(rows_of(batch), op).shape
        assert out.batch_size == want
        assert out["n"].batch_size == (*want, 5)
        assert out.is_empty()

    def test_view_of_what_cannot_be_viewed(self):
        td = make().permute(1, 0)
        with pytest.raises(RuntimeError):
            td.view(-1)
        check_rows(td.reshape(-1), ROWS.T.reshape(-1), make())

    def test_device_and_class(self):
        td = TensorDict({"a": torch.zeros(4, 3)}, [4, 3], device="cpu")
        for op in VIEW_OPS + COPY_OPS:
            out = call(td, op)
            assert type(out) is TensorDict and out.device == torch.device("cpu"), op

    def test_non_tensors_follow(self):
        td = TensorDict({"a": torch.zeros(4, 3), "text": "hello"}, [4, 3])
        for op in VIEW_OPS:
            out = call(td, op)
            assert out.get("text").batch_size == out.batch_size, op
            if op[0] not in (
                "unsqueeze",
                "expand",
                "broadcast_to",
            ):  # these give one copy to each place
                assert out["text"] == "hello", op
        assert td.unsqueeze(0)[0, 1, 2]["text"] == td.expand(2, 4, 3)[1, 3, 2]["text"] == "hello"

    def test_gradient_flows(self):
        x = torch.ones(4, 3, requires_grad=True)
        TensorDict({"a": x}, [4, 3]).permute(1, 0).flatten()[:4]["a"].sum().backward()
        assert x.grad.sum() == 4 and x.grad[:, 0].tolist() == [1] * 4

    def test_expand_as(self):
        td = make()
        rows = ROWS.expand(2, 4, 3)
        check_rows(td.expand_as(torch.zeros(2, 4, 3)), rows, td)
        plain = make((1, 3)).select("b")
        assert (plain.expand_as(td.select("b"))["b"] == rows_of((1, 3)).expand(4, 3)).all()

    def test_squeeze_and_flatten_leave_the_extra_nested_dims(self):
        td = TensorDict({"n": TensorDict({"c": torch.zeros(4, 1, 1, 2)}, [4, 1, 1])}, [4, 1])
        assert td.squeeze()["n"].batch_size == (4, 1)
        assert td.squeeze(1)["n", "c"].shape == (4, 1, 2)
        assert td.squeeze(-1)["n"].batch_size == (4, 1)
        assert td.flatten()["n"].batch_size == (4, 1)
        assert td.permute(1, 0)["n"].batch_size == (1, 4, 1)
        assert td.unsqueeze(-1)["n"].batch_size == (4, 1, 1, 1)
        assert td.unsqueeze(-1)["n", "c"].shape == (4, 1, 1, 1, 2)

    def test_ours_squeeze_to_no_batch_dims(self):
        td = make((1, 1))
        check_rows(td.squeeze(), rows_of((1, 1)).squeeze(), td)


class TestNoBatchDims:
    @table(
        "op",
        [
            ("view", 1),
            ("view", ()),
            ("view", -1),
            ("reshape", 1, 1),
            ("reshape", ()),
            ("flatten",),
            ("unsqueeze", 0),
            ("unsqueeze", -1),
            ("squeeze",),
            ("expand", 2),
            ("expand", 2, 3),
            ("expand", ()),
            ("broadcast_to", (2,)),
            ("contiguous",),
        ],
    )
    def test_as_a_scalar_tensor(self, op):
        td = make(())
        check_rows(call(td, op), call(torch.tensor(0), op), td)

    @table(
        "op",
        [
            ("unbind", 0),
            ("split", 1),
            ("squeeze", 0),
            ("flip", 0),
            ("chunk", 2),
            ("narrow", 0, 0, 1),
        ],
    )
    def test_nothing_to_act_on(self, op):
        with pytest.raises(IndexError):
            call(make(()), op)

    def test_transpose_and_repeat(self):
        with pytest.raises((ValueError, IndexError)):
            make(()).transpose(0, 1)
        with pytest.raises(ValueError, match="repeat"):
            make(()).repeat(2)


class TestAtLeast:
    @pytest.mark.parametrize("batch", [(), (4,), (4, 3), (2, 3, 4)], ids=str)
    @pytest.mark.parametrize("name", ["atleast_1d", "atleast_2d", "atleast_3d"])
    def test_leading_dims_are_added(self, name, batch):
        td = make(batch)
        missing = max(0, int(name[-2]) - len(batch))
        rows = rows_of(batch).reshape(*[1] * missing, *batch)
        check_rows(getattr(td, name)(), rows, td)
        check_rows(getattr(torch, name)(td), rows, td)


class TestOneToOneErrors:
    @table(
        "op",
        [
            ("unflatten", 2, (3, 2)),
            ("squeeze", 2),
            ("squeeze", -3),
            ("movedim", 0, 2),
            ("narrow", 2, 0, 1),
            ("flip", 2),
            ("roll", 1, 2),
            ("split", 2, 2),
            ("split", 2, -3),
            ("chunk", 2, 5),
            ("unbind", 2),
            ("unbind", -3),
        ],
    )
    def test_dim_out_of_range(self, op):
        td = make()
        with pytest.raises(IndexError):
            call(ROWS, op)
        with pytest.raises(IndexError):
            call(td, op)
        check_rows(td, ROWS, make())

    @table(
        "op",
        [
            ("flatten", 0, 2),
            ("flatten", -3, -1),
            ("repeat_interleave", 2, {"dim": 2}),
        ],
    )
    def test_ours_dim_beyond_the_batch(self, op):
        td = make().select("a", "n")  # every leaf has a third dim, which is none of our business
        with pytest.raises(IndexError):
            call(td, op)

    @table("op", [("unsqueeze", 3), ("unsqueeze", -4)])
    def test_unsqueeze_out_of_range(self, op):
        with pytest.raises((RuntimeError, IndexError), match="dim"):
            call(make(), op)

    @table("op", [("permute", 0, 0), ("permute", 0, 1, 2), ("permute", 0, 2), ("permute", -3, 0)])
    def test_not_a_permutation(self, op):
        with pytest.raises((ValueError, IndexError, RuntimeError), match="permut|[Dd]im"):
            call(make(), op)

    def test_ours_permutation_too_short(self):
        with pytest.raises((ValueError, IndexError, RuntimeError), match="permut|[Dd]im"):
            make().permute(0)

    @table("op", [("transpose", 0, 2), ("transpose", -3, 0), ("swapaxes", 2, 0)])
    def test_transpose_out_of_range(self, op):
        with pytest.raises((ValueError, IndexError), match="dim"):
            call(make(), op)

    @table(
        "op",
        [
            ("view", 5),
            ("view", ()),
            ("view", -1, -1),
            ("view", 5, -1),
            ("reshape", 5, 2),
            ("reshape", 24),
            ("unflatten", 0, (3, 2)),
            ("expand", 4, 5),
            ("expand", 3),
            ("expand", -1, 4, 3),
            ("broadcast_to", (5, 3)),
            ("narrow", 0, 3, 2),
        ],
    )
    def test_wrong_size(self, op):
        with pytest.raises(RuntimeError):
            call(ROWS, op)
        with pytest.raises(RuntimeError):
            call(make(), op)

    @table("op", [("flatten", 1, 0), ("repeat", 2), ("repeat", 2, 1, 1)])
    def test_value_error(self, op):
        with pytest.raises((ValueError, RuntimeError)):
            call(make(), op)

    def test_only_batch_dims(self):
        td = make()
        assert td["a"].ndim == 3
        for op in (("unflatten", 2, (1, 2)), ("unbind", 2), ("squeeze", 2), ("narrow", 2, 0, 1)):
            with pytest.raises(IndexError):
                call(td, op)


# --- names -------------------------------------------------------------------------------------

NAMED = [
    (("permute", 1, 0), ["y", "x"]),
    (("transpose", 0, 1), ["y", "x"]),
    (("movedim", 0, 1), ["y", "x"]),
    (("view", 12), [None]),
    (("reshape", 12), [None]),
    (("flatten", 0, 1), [None]),
    (("unsqueeze", 0), [None, "x", "y"]),
    (("unsqueeze", -1), ["x", "y", None]),
    (("squeeze",), ["x", "y"]),
    (("expand", 2, 4, 3), [None, "x", "y"]),
    (("expand", 4, 3), ["x", "y"]),
    (("repeat", 2, 1), ["x", "y"]),
    (("repeat_interleave", 2, {"dim": 0}), ["x", "y"]),
    (("roll", 1, 0), ["x", "y"]),
    (("flip", 0), ["x", "y"]),
    (("narrow", 0, 0, 1), ["x", "y"]),
    (("clone",), ["x", "y"]),
]


class TestNames:
    @pytest.mark.parametrize(("op", "names"), NAMED, ids=[name_of(op) for op, _ in NAMED])
    def test_follow(self, op, names):
        assert call(make(names=["x", "y"]), op).names == names

    @table("op", VIEW_OPS + COPY_OPS)
    def test_none_stay_none(self, op):
        out = call(make(), op)
        assert out.names == [None] * out.ndim

    def test_squeeze(self):
        assert make((1, 3), names=["x", "y"]).squeeze(0).names == ["y"]
        assert make((1, 3), names=["x", "y"]).squeeze().names == ["y"]

    def test_parts(self):
        td = make(names=["x", "y"])
        assert td.split(2)[0].names == td.chunk(2)[0].names == ["x", "y"]
        assert td.unbind(0)[0].names == ["y"]
        assert td.unbind(1)[0].names == ["x"]

    def test_stack_and_cat(self):
        td = make(names=["x", "y"])
        assert torch.stack([td, td]).names == [None, "x", "y"]
        assert torch.stack([td, td], -1).names == ["x", "y", None]
        assert torch.cat([td, td]).names == ["x", "y"]
        assert torch.stack([td, make()]).names == [None] * 3


# --- into parts --------------------------------------------------------------------------------

PART_OPS = [
    ("split", 2),
    ("split", 3),
    ("split", 10),
    ("split", 2, 1),
    ("split", 2, -1),
    ("split", [1, 3]),
    ("split", [1, 0, 3]),
    ("split", [1, 2, 1], {"dim": 0}),
    ("split", (1, 2), 1),
    ("chunk", 1),
    ("chunk", 2),
    ("chunk", 3),
    ("chunk", 7),
    ("chunk", 2, 1),
    ("chunk", 2, -1),
    ("chunk", 2, {"dim": 1}),
    ("tensor_split", 2),
    ("tensor_split", 3),
    ("tensor_split", (1, 3)),
    ("tensor_split", [1], {"dim": 1}),
    ("tensor_split", torch.tensor([1, 2])),
    ("unbind", 0),
    ("unbind", 1),
    ("unbind", -1),
    ("unbind", {"dim": 1}),
]


class TestParts:
    @table("op", PART_OPS)
    def test_as_torch(self, op):
        td = make()
        for got in (call(td, op), call(td, op, torch)):
            wanted = call(ROWS, op)
            assert isinstance(got, (tuple, list))
            assert len(got) == len(wanted)
            for part, rows in zip(got, wanted, strict=True):
                check_rows(part, rows, td)

    @table("op", PART_OPS)
    def test_parts_are_views(self, op):
        td = make()
        for part in call(td, op):
            part.zero_()
        assert (td["a"] == 0).all() and (td["n", "c"] == 0).all()

    def test_first_dim_of_size_zero(self):
        td = make((0, 3))
        assert td.unbind(0) == ()
        assert [part.batch_size for part in td.unbind(1)] == [(0,)] * 3
        assert [part.batch_size for part in td.split(2)] == [(0, 3)]
        assert [part.batch_size for part in td.split(2, 1)] == [(0, 2), (0, 1)]

    @pytest.mark.parametrize(
        "op", [("split", 2), ("chunk", 3), ("unbind", 1), ("tensor_split", 3)], ids=name_of
    )
    def test_empty_container(self, op):
        td = TensorDict({}, BATCH)
        assert [part.batch_size for part in call(td, op)] == [part.shape for part in call(ROWS, op)]

    @table(
        "op",
        [
            ("split", 0),
            ("split", -1),
            ("split", []),
            ("split", [1, 2]),
            ("split", [3, 3]),
            ("chunk", 0),
        ],
    )
    def test_errors(self, op):
        with pytest.raises((ValueError, RuntimeError)):
            call(make(), op)

    @pytest.mark.parametrize("dim", [0, 1, -1])
    def test_round_trips(self, dim):
        td = make()
        check_rows(torch.stack(td.unbind(dim), dim), ROWS, td)
        check_rows(torch.cat(td.split(2, dim), dim), ROWS, td)
        check_rows(torch.cat(td.chunk(2, dim), dim), ROWS, td)
        check_rows(torch.cat(td.tensor_split(2, dim), dim), ROWS, td)


# --- from parts --------------------------------------------------------------------------------


def pair():
    """Two containers and one that holds the rows of both."""
    one, two = make(), make(shift=1000)
    both = TensorDict(batch_size=[8, 3])
    for key, value in leaves(one).items():
        both[key] = torch.cat([value, two[key]])
    both["n"].batch_size = [8, 3, 5]
    return one, two, both


STACKERS = {
    "torch.stack": torch.stack,
    "stack": stack,
    "TensorDict.stack": TensorDict.stack,
}
CATTERS = {"torch.cat": torch.cat, "cat": cat, "TensorDict.cat": TensorDict.cat}


class TestStack:
    @pytest.mark.parametrize("function", STACKERS.values(), ids=STACKERS)
    @pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
    def test_as_torch(self, function, dim):
        one, two, both = pair()
        out = function([one, two], dim)
        assert type(out) is TensorDict
        check_rows(out, torch.stack([ROWS, ROWS + 12], dim), both)

    def test_default_dim_tuple_and_keyword(self):
        one, two, both = pair()
        check_rows(torch.stack((one, two)), torch.stack([ROWS, ROWS + 12]), both)
        check_rows(torch.stack((one, two), dim=1), torch.stack([ROWS, ROWS + 12], 1), both)
        check_rows(torch.stack((one,)), ROWS[None], both)

    def test_copies(self):
        one, two, _ = pair()
        torch.stack([one, two]).zero_()
        check_rows(one, ROWS, make())

    def test_key_order_does_not_matter(self):
        one = TensorDict(x=torch.tensor(1), y=torch.tensor(2))
        two = TensorDict(y=torch.tensor(4), x=torch.tensor(3))
        out = torch.stack([one, two])
        assert out["x"].tolist() == [1, 3] and out["y"].tolist() == [2, 4]

    def test_no_batch_dims(self):
        out = torch.stack([make(()), make((), shift=7)])
        assert out.batch_size == (2,)
        assert out["b"].tolist() == [0, 7]
        assert out["n"].batch_size == (2, 5)

    def test_empty_containers(self):
        out = torch.stack([TensorDict({}, [3]), TensorDict({}, [3])], 1)
        assert out.batch_size == (3, 2) and out.is_empty()

    def test_out(self):
        one, two, both = pair()
        out = torch.stack([one, one])
        b = out["b"]
        assert torch.stack([one, two], out=out) is out
        assert out["b"] is b
        check_rows(out, torch.stack([ROWS, ROWS + 12]), both)

    def test_out_of_wrong_batch_size(self):
        with pytest.raises(RuntimeError, match="batch.size"):
            torch.stack([make(), make()], out=make())

    def test_keys_differ(self):
        with pytest.raises((RuntimeError, KeyError), match="keys"):
            torch.stack([make(), make().exclude("b")])
        with pytest.raises((RuntimeError, KeyError), match="keys"):
            torch.stack([make().exclude("b"), make()])

    def test_nested_keys_differ(self):
        with pytest.raises((RuntimeError, KeyError), match="keys"):
            torch.stack([make(), make().exclude(("n", "c"))])

    @pytest.mark.parametrize("key", ["a", ("n", "c")], ids=str)
    def test_shapes_differ_names_the_key(self, key):
        other = make()
        other[key] = torch.cat([other[key]] * 2, -1)
        with pytest.raises(RuntimeError, match=rf"[\s'\",]{key[-1]}\b"):
            torch.stack([make(), other])

    def test_batch_sizes_differ(self):
        with pytest.raises(RuntimeError, match="batch.size"):
            torch.stack([make(), make((4, 2))])

    def test_nothing_to_stack(self):
        with pytest.raises(RuntimeError):
            torch.stack([])

    @pytest.mark.parametrize("dim", [3, -4])
    def test_ours_dim_out_of_range(self, dim):
        with pytest.raises(IndexError):
            torch.stack([make(), make()], dim)

    def test_ours_only_containers(self):
        for other in (make().to_dict(), torch.zeros(4, 3)):
            with pytest.raises(TypeError):
                torch.stack([make(), other])

    def test_ours_leaf_against_container(self):
        other = make()
        other["n"] = torch.zeros(4, 3)
        with pytest.raises((RuntimeError, TypeError), match="n"):
            torch.stack([make(), other])

    def test_non_tensors(self):
        same = TensorDict({"text": "hello", "x": torch.zeros(3)}, [3])
        out = torch.stack([same, same.clone()])
        assert out.get("text").batch_size == (2, 3)
        assert out[0]["text"] == out[1, 2]["text"] == "hello"
        unlike = torch.stack([same, same.clone().set("text", "bye")])
        assert unlike[0, 1]["text"] == "hello" and unlike[1, 2]["text"] == "bye"
        assert torch.cat([same, same])["text"] == "hello"

    def test_gradient_flows(self):
        x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        out = torch.stack([TensorDict(a=x), TensorDict(a=y)])
        (out["a"][0].sum() + 2 * out["a"][1].sum()).backward()
        assert x.grad.tolist() == [1] * 3 and y.grad.tolist() == [2] * 3


class TestCat:
    @pytest.mark.parametrize("function", CATTERS.values(), ids=CATTERS)
    @pytest.mark.parametrize("dim", [0, 1, -1, -2])
    def test_as_torch(self, function, dim):
        one, two, both = pair()
        out = function([one, two], dim)
        assert type(out) is TensorDict
        check_rows(out, torch.cat([ROWS, ROWS + 12], dim), both)

    def test_default_dim_tuple_and_keyword(self):
        one, two, both = pair()
        check_rows(torch.cat((one, two)), torch.cat([ROWS, ROWS + 12]), both)
        check_rows(torch.cat((one, two), dim=1), torch.cat([ROWS, ROWS + 12], 1), both)
        check_rows(torch.cat((one,)), ROWS, both)

    def test_unlike_sizes(self):
        one, two, both = pair()
        check_rows(torch.cat([one, two[:, :2]], 1), torch.cat([ROWS, ROWS[:, :2] + 12], 1), both)
        check_rows(torch.cat([one[:0], two[1:]], 0), ROWS[1:] + 12, both)

    def test_copies(self):
        one, two, _ = pair()
        torch.cat([one, two]).zero_()
        check_rows(one, ROWS, make())

    def test_empty_containers(self):
        out = torch.cat([TensorDict({}, [3]), TensorDict({}, [2])], 0)
        assert out.batch_size == (5,) and out.is_empty()

    def test_out(self):
        one, two, both = pair()
        out = torch.cat([one, one])
        b = out["b"]
        assert torch.cat([one, two], out=out) is out
        assert out["b"] is b
        check_rows(out, torch.cat([ROWS, ROWS + 12]), both)

    def test_out_of_wrong_batch_size(self):
        with pytest.raises(RuntimeError, match="batch.size"):
            torch.cat([make(), make()], out=make())

    @pytest.mark.parametrize("other", ["a", "b", "n"])
    def test_keys_differ(self, other):
        with pytest.raises((KeyError, RuntimeError), match="keys"):
            torch.cat([make(), make().exclude(other)])

    def test_sizes_differ_elsewhere(self):
        with pytest.raises(RuntimeError):
            torch.cat([make(), make((4, 2))], 0)
        with pytest.raises(RuntimeError):
            torch.cat(
                [
                    TensorDict(a=torch.zeros(3, 2), batch_size=[3]),
                    TensorDict(a=torch.zeros(3, 4), batch_size=[3]),
                ]
            )

    @pytest.mark.parametrize("dim", [2, 3, -3])
    def test_ours_dim_out_of_range(self, dim):
        with pytest.raises((RuntimeError, IndexError)):
            torch.cat([make(), make()], dim)

    def test_ours_no_batch_dims(self):
        with pytest.raises((RuntimeError, IndexError)):
            torch.cat([make(()), make(())])


# --- torch functions that make a like container -----------------------------------------------

LIKE = [
    (torch.zeros_like, (), lambda x: (x == 0).all()),
    (torch.ones_like, (), lambda x: (x == 1).all()),
    (torch.full_like, (3,), lambda x: (x == 3).all()),
    (torch.empty_like, (), lambda x: True),
    (torch.rand_like, (), lambda x: ((x >= 0) & (x < 1)).all() and x.unique().numel() > 1),
    (torch.randn_like, (), lambda x: x.unique().numel() > 1),
]


@pytest.mark.parametrize(
    ("function", "args", "holds"), LIKE, ids=[case[0].__name__ for case in LIKE]
)
class TestLike:
    def test_values_and_structure(self, function, args, holds):
        td = make(names=["x", "y"]).float()
        out = function(td, *args)
        assert out.batch_size == BATCH and out["n"].batch_size == (4, 3, 5)
        assert out.names == ["x", "y"]
        assert set(leaves(out)) == set(leaves(td))
        for key, value in leaves(out).items():
            assert value.shape == td[key].shape and value.dtype == torch.float32
            assert holds(value), key
        assert out["a"].data_ptr() != td["a"].data_ptr()

    def test_dtype(self, function, args, holds):
        out = function(make(), *args, dtype=torch.float64)
        assert {value.dtype for value in leaves(out).values()} == {torch.float64}
        assert all(holds(value) for value in leaves(out).values())

    def test_device(self, function, args, holds):
        out = function(make().float(), *args, device="meta")
        assert out.device == torch.device("meta")
        assert {value.device.type for value in leaves(out).values()} == {"meta"}

    def test_source_unchanged(self, function, args, holds):
        td = make().float()
        function(td, *args)
        assert (td == make().float()).all()


def test_like_keeps_each_dtype():
    out = torch.zeros_like(make())
    assert {key: value.dtype for key, value in leaves(out).items()} == {
        "a": torch.float32,
        "b": torch.int64,
        ("n", "c"): torch.int64,
        ("m", "k", "d"): torch.bool,
    }


def test_like_keeps_non_tensors():
    assert torch.zeros_like(TensorDict({"a": torch.ones(2), "text": "hello"}))["text"] == "hello"


class TestNew:
    @pytest.mark.parametrize(
        ("args", "batch"),
        [((3,), (3,)), (((),), ()), ((2, 6), (2, 6)), (((2, 6),), (2, 6))],
        ids=str,
    )
    def test_new_batch_size(self, args, batch):
        for name, fill in (("new_zeros", 0), ("new_ones", 1), ("new_empty", None)):
            out = getattr(make(), name)(*args)
            assert out.batch_size == batch and out["n"].batch_size == (*batch, 5)
            assert out["a"].shape == (*batch, 2) and out["n", "c"].shape == (*batch, 5, 2)
            assert out["b"].dtype == torch.int64
            assert fill is None or all((value == fill).all() for value in leaves(out).values())

    def test_new_full(self):
        out = make().select("a", "b").new_full((2,), 7)
        assert (out["a"] == 7).all() and out["b"].tolist() == [7, 7]


def test_clone_function():
    td = make()
    out = torch.clone(td)
    check_rows(out, ROWS, td)
    assert out["a"].data_ptr() != td["a"].data_ptr()


# --- context managers --------------------------------------------------------------------------

WRITE_BACK = [
    ("view", 12),
    ("view", -1),
    ("view", 2, 6),
    ("view", 4, 3),
    ("unsqueeze", 0),
    ("unsqueeze", 1),
    ("unsqueeze", -1),
    ("squeeze", 0),
    ("permute", 1, 0),
    ("transpose", 0, 1),
    ("swapaxes", 0, 1),
    ("movedim", 0, 1),
    ("flatten", 0, 1),
    ("unflatten", 0, (2, 2)),
]


class TestWriteBack:
    @table("op", WRITE_BACK)
    def test_new_and_replaced_entries(self, op):
        td = make()
        nested = td["n"]
        with call(td, op) as v:
            shape = call(ROWS, op).shape
            assert v.batch_size == shape
            v["new"] = call(ROWS, op).clone()
            v["b"] = v["b"] + 1000
            v["a"] = torch.ones(*shape, 7)
            v["n", "e"] = torch.ones(*shape, 5)
        assert td.batch_size == BATCH
        assert (td["new"] == ROWS).all()
        assert (td["b"] == ROWS + 1000).all()
        assert td["a"].shape == (4, 3, 7)
        assert td["n"] is nested
        assert td["n"].batch_size == (4, 3, 5) and td["n", "e"].shape == (4, 3, 5)

    @table("op", WRITE_BACK)
    def test_in_place(self, op):
        td = make()
        with call(td, op) as v:
            v["b"].zero_()
        assert (td["b"] == 0).all()

    def test_squeezed_dim_comes_back(self):
        td = TensorDict({"a": torch.zeros(4, 1)}, [4, 1])
        with td.squeeze(1) as v:
            v["q"] = torch.ones(4, 2)
        assert td.batch_size == (4, 1) and td["q"].shape == (4, 1, 2)

    def test_three_dims(self):
        td = TensorDict({"a": torch.arange(24).reshape(2, 3, 4)}, [2, 3, 4])
        with td.permute(2, 0, 1) as v:
            v["q"] = v["a"] * 2
        assert (td["q"] == td["a"] * 2).all()
        with td.transpose(0, 2) as v:
            v["q"] = v["a"] * 3
        assert (td["q"] == td["a"] * 3).all()
        with td.flatten(1, 2) as v:
            v["q"] = v["a"] * 4
        assert (td["q"] == td["a"] * 4).all()

    def test_flatten_keys(self):
        td = make()
        nested = td["n"]
        with td.flatten_keys(".") as v:
            assert "n.c" in v.keys()
            v["n.e"] = torch.ones(4, 3, 5)
            v["p.q"] = torch.ones(4, 3)
            v["new"] = torch.zeros(4, 3)
        assert td["n"] is nested and td["n"].batch_size == (4, 3, 5)
        assert set(td.keys(True, True)) == {*leaves(make()), ("n", "e"), ("p", "q"), "new"}

    def test_unflatten_keys(self):
        td = TensorDict({"a.b": torch.zeros(4)}, [4])
        with td.unflatten_keys(".") as v:
            v["a", "c"] = torch.ones(4)
        assert set(td.keys()) == {"a.b", "a.c"}

    def test_nothing_written_after_an_error(self):
        td = make()
        with pytest.raises(ValueError, match="boom"):
            with td.view(12) as v:
                v["new"] = torch.zeros(12)
                raise ValueError("boom")
        check_rows(td, ROWS, make())

    def test_without_with_nothing_is_written(self):
        td = make()
        td.view(12)["new"] = torch.zeros(12)
        td.flatten_keys(".")["new"] = torch.zeros(4, 3)
        assert "new" not in td.keys()

    def test_second_use(self):
        td = make()
        for i in range(2):
            with td.view(12) as v:
                v[f"new{i}"] = torch.zeros(12)
        assert {"new0", "new1"} <= set(td.keys())

    def test_locked_source_takes_in_place_writes(self):
        td = make().lock_()
        with td.view(12) as v:
            assert v.is_locked
            v["b"].zero_()
        assert td.is_locked and (td["b"] == 0).all()

    def test_implicit_squeeze_cannot_be_undone(self):
        with pytest.raises(RuntimeError, match="squeeze"):
            with make((1, 3)).squeeze() as v:
                v["new"] = torch.zeros(3)


# --- padding -----------------------------------------------------------------------------------


class TestPad:
    @pytest.mark.parametrize("size", [[1, 2], [0, 2], [0, 0, 1, 1], [1, 0, 0, 2], [0, 0]], ids=str)
    @pytest.mark.parametrize("value", [0, -1.0])
    def test_each_batch_dim_has_its_pair(self, size, value):
        td = make().select("a", "b", "n")
        before, after = size[0::2], size[1::2]
        batch = [n + lo + hi for n, lo, hi in zip(BATCH, before + [0], after + [0], strict=False)]
        out = pad(td, size, value=value)
        assert out.batch_size == tuple(batch)
        assert out["n"].batch_size == (*batch, 5)
        lo = [*before, 0][:2]
        middle = tuple(slice(start, start + n) for start, n in zip(lo, BATCH, strict=True))
        for key, leaf in leaves(td).items():
            want = torch.full((*batch, *leaf.shape[2:]), value).to(leaf.dtype)
            want[middle] = leaf
            assert (out[key] == want).all(), key
        assert (td["b"] == ROWS).all()

    def test_method(self):
        assert make().select("b").pad([0, 1])["b"][-1].tolist() == [0, 0, 0]

    @pytest.mark.parametrize("size", [[1], [0, 1, 0], [0, 1] * 3], ids=str)
    def test_wrong_size(self, size):
        with pytest.raises(RuntimeError, match="pad_size"):
            pad(make(), size)


def sequences(lengths=(2, 4, 1)):
    return [
        TensorDict(
            {
                "a": torch.arange(1.0, n + 1),
                "b": torch.ones(n, 2),
                "n": {"c": torch.arange(1, n + 1)},
            },
            [n],
        )
        for n in lengths
    ]


class TestPadSequence:
    def test_right_with_zeros(self):
        out = pad_sequence(sequences())
        assert out.batch_size == (3, 4) and out["n"].batch_size == (3, 4)
        assert out["a"].tolist() == [[1, 2, 0, 0], [1, 2, 3, 4], [1, 0, 0, 0]]
        assert out["b"].shape == (3, 4, 2) and out["b"].sum((1, 2)).tolist() == [4, 8, 2]
        assert out["n", "c"].tolist() == [[1, 2, 0, 0], [1, 2, 3, 4], [1, 0, 0, 0]]

    def test_value(self):
        assert pad_sequence(sequences(), padding_value=-1)["a"][2].tolist() == [1, -1, -1, -1]

    def test_left(self):
        assert pad_sequence(sequences(), padding_side="left")["a"].tolist() == [
            [0, 0, 1, 2],
            [1, 2, 3, 4],
            [0, 0, 0, 1],
        ]

    @pytest.mark.parametrize(
        ("flag", "key"), [(True, "masks"), ("m", "m"), (("x", "y"), ("x", "y"))], ids=str
    )
    def test_mask(self, flag, key):
        out = pad_sequence(sequences(), return_mask=flag)
        want = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]).bool()
        assert set(out[key].keys(True, True)) == {"a", "b", ("n", "c")}
        for name in ("a", "b", ("n", "c")):
            assert out[key][name].dtype == torch.bool
            assert (out[key][name] == want).all()

    def test_pad_dim(self):
        parts = [TensorDict({"a": torch.ones(3, n)}, [3]) for n in (2, 4, 1)]
        out = pad_sequence(parts, pad_dim=1)
        assert out.batch_size == (3, 3) and out["a"].shape == (3, 3, 4)
        assert out["a"].sum((1, 2)).tolist() == [6, 12, 3]

    def test_equal_lengths_is_stack(self):
        parts = sequences((3, 3))
        assert (pad_sequence(parts) == torch.stack(parts)).all()

    def test_errors(self):
        with pytest.raises(RuntimeError, match="empty"):
            pad_sequence([])
        with pytest.raises(RuntimeError, match="a"):
            pad_sequence(
                [TensorDict({"a": torch.ones(2, 3)}, [2]), TensorDict({"a": torch.ones(2, 4)}, [2])]
            )

    def test_non_tensors_are_kept(self):
        parts = [TensorDict({"a": torch.ones(n), "text": "hello"}, [n]) for n in (2, 3)]
        assert "text" in pad_sequence(parts).keys()


@pytest.mark.parametrize(
    "wrong", [("view", 3, 4), ("transpose", 0, 1), ("roll", 1, 0), ("flip", 1)], ids=name_of
)
def test_the_oracle_can_fail(wrong):
    """Handed another operation's result, check_rows must object."""
    with pytest.raises(AssertionError):
        check_rows(make(), call(ROWS, wrong), make())
    with pytest.raises(AssertionError):
        check_rows(call(make(), wrong), ROWS, make())


class TestInPlace:
    """`inplace=True` gives the same rows, in the container and the nested ones that are there."""

    CALLS = [
        ("flatten", 0, 1),
        ("unflatten", 0, (2, -1)),
        ("repeat", 2, 1),
        ("repeat_interleave", 2, 1),
        ("roll", 1, 0),
        ("pad", [1, 0]),
    ]

    @pytest.mark.parametrize("op", CALLS, ids=name_of)
    def test_same_rows_in_the_same_containers(self, op):
        name, *args = op
        td = make(names=["x", "y"])
        nested, want = (td["n"], td["m", "k"]), getattr(td, name)(*args)
        assert getattr(td, name)(*args, inplace=True) is td
        assert td["n"] is nested[0] and td["m", "k"] is nested[1]
        assert td.batch_size == want.batch_size and td.names == want.names
        for key in ["n", "m", ("m", "k")]:
            assert td[key].batch_size == want[key].batch_size
        for key, value in leaves(want).items():
            torch.testing.assert_close(td[key], value, rtol=0, atol=0)

    @pytest.mark.parametrize("op", CALLS, ids=name_of)
    def test_refused_for_locked_ones_and_stacks(self, op):
        name, *args = op
        with pytest.raises(RuntimeError, match="locked"):
            getattr(make().lock_(), name)(*args, inplace=True)
        td = make().set("stack", make().to_lazystack())
        with pytest.raises(NotImplementedError, match="LazyStackedTensorDict"):
            getattr(td, name)(*args, inplace=True)
        assert td.batch_size == BATCH and td["n"].batch_size == (*BATCH, 5)

    def test_function(self):
        td = make()
        assert pad(td, [0, 1], inplace=True) is td and td.batch_size == (5, 3)


class TestToAndFromNoBatchDims:
    def test_repeat_interleave_makes_one(self):
        td = TensorDict(a=torch.arange(2)).repeat_interleave(3)
        assert td.batch_size == (3,) and td["a"].tolist() == [[0, 1]] * 3

    def test_reshape_and_view_to_no_dims(self):
        td = TensorDict(a=torch.ones(1, 2), batch_size=[1])
        assert td.reshape().batch_size == td.view().batch_size == ()
        with pytest.raises(RuntimeError, match="invalid shape"):
            make().reshape()

    def test_permute_without_dims(self):
        assert TensorDict(a=torch.ones(2)).permute()["a"].shape == (2,)
        with pytest.raises(ValueError, match="permutation"):
            make().permute()


def test_roll_over_all_dims_keeps_the_names():
    td = make(names=["x", None])
    assert td.roll(1).names == ["x", None]


def test_masks_of_padding_cover_the_whole_batch():
    """Padding of the first of two batch dims: the masks have the batch size of the result."""
    td = TensorDict(a=torch.ones(2, 3, 4), n=dict(b=torch.ones(2, 3)), batch_size=[2, 3])
    masks = pad_sequence([td, td[:1]], return_mask=True)["masks"]
    for key in ["a", ("n", "b")]:
        assert masks[key].shape == (2, 2, 3)
        assert masks[key].all(-1).tolist() == [[True, True], [True, False]]


def test_masks_of_padding_beside_longer_nested_batches():
    td = make()
    masks = pad_sequence([td, td[:2]], return_mask=True)["masks"]
    assert masks["n", "c"].shape == masks["a"].shape == (2, *BATCH)
    assert masks["n"].batch_size == (2, *BATCH)
