"""Shape operations: each acts on the batch dims like on a tensor of shape `batch_size`."""

import pytest
import torch

import raffia
from raffia import TensorDict, pad, pad_sequence
from tests.tensordict.kinds import (
    BATCH,
    ROWS,
    apply_op,
    check_rows,
    check_same,
    each,
    every_kind,
    is_lazy,
    is_rows,
    leaves,
    make,
    ops,
    raises,
    refused,
    rows_of,
)

Size, S, TIMES = torch.Size, slice, torch.tensor([1, 0, 2, 1])
VIEWS = (
    ops(view=[12, -1, (4, 3), (2, 2, 3), ((2, 6),), [2, 6], (Size([6, 2]),), (-1, 6)])
    + ops(reshape=[12, ((3, 4),), (Size([2, 6]),), (2, -1), (1, 4, 3, 1)], squeeze=[(), 0, -1])
    + ops(flatten=[(), (0, 1), (0, -1), 1, (-2, -1), (0, 0), {"start_dim": 0, "end_dim": 1}])
    + ops(unflatten=[(0, (2, 2)), (0, (2, -1)), (-1, (3, 1)), (1, (1, 3, 1))])
    + ops(unsqueeze=[0, 1, 2, -1, -2, -3, {"dim": 1}], swapaxes=[(0, 1)], swapdims=[(0, -1)])
    + ops(permute=[(1, 0), ((1, 0),), [1, 0], (-1, 0), (0, 1), {"dims": (1, 0)}])
    + ops(transpose=[(0, 1), (-1, 0), (0, 0), {"dim0": 0, "dim1": 1}], moveaxis=[(0, 1)])
    + ops(movedim=[(0, 1), (-1, 0), ((0, 1), (1, 0))], broadcast_to=[((2, 4, 3),)])
    + ops(expand=[(4, 3), (2, 4, 3), ((2, 4, 3),), (Size([2, 4, 3]),), (2, -1, -1), (5, 1, 4, 3)])
    + ops(narrow=[(0, 1, 2), (1, 0, 2), (-1, 1, 2), (0, -2, 2), (0, 4, 0)])
)
COPIES = (
    ops(repeat=[(2, 1), ((2, 1),), (1, 2), (2, 3)], tile=[((2,),), ((2, 1),), ((1, 3),)])
    + ops(repeat_interleave=[2, *[(2, {"dim": dim}) for dim in (0, 1, -1)], (TIMES, {"dim": 0})])
    + ops(roll=[(1, 0), (-1, 1), (5, 0), 1, ((1, 2), (0, 1)), {"shifts": 1, "dims": -1}])
    + ops(flip=[0, -1, ((0, 1),), [0], {"dims": (0, 1)}], fliplr=[()], flipud=[()])
    + ops(rot90=[(), (1, (0, 1)), 2], clone=[()])
)
ATLEAST = ops(atleast_1d=[()], atleast_2d=[()], atleast_3d=[()])
TABLES = {"views": VIEWS, "copies": COPIES, "either": ops(contiguous=[()])}
# functions of torch that take a container as their first argument
TORCH = "reshape flatten unflatten unsqueeze squeeze permute transpose swapaxes swapdims movedim "
TORCH += "broadcast_to narrow tile roll flip rot90 repeat_interleave clone"
PARTS = ops(
    split=[2, 3, 10, (2, 1), (2, -1), [1, 3], [1, 0, 3], ([1, 2, 1], {"dim": 0}), ((1, 2), 1)],
    chunk=[1, 2, 3, 7, (2, 1), (2, -1), (2, {"dim": 1})],
    tensor_split=[2, 3, ((1, 3),), ([1], {"dim": 1}), torch.tensor([1, 2])],
    unbind=[0, 1, -1, {"dim": 1}],
)


def storage(value):
    return value.untyped_storage().data_ptr()


def torch_accepts(op):
    """Whether torch has a function that accepts the arguments of the method."""
    name, args = op
    one_tuple = len(args) == 1 and isinstance(args[0], (tuple, list))
    return name in TORCH.split() and (name not in ("reshape", "permute", "flip") or one_tuple)


@every_kind
@pytest.mark.parametrize("table", TABLES)
def test_equals_a_tensor_of_the_batch_shape(table, kind):
    views, copies = table == "views", table == "copies"

    def check(op):
        td = kind(make())
        out, rows = apply_op(td, op), apply_op(ROWS, op)
        check_rows(out, rows)
        check_rows(td, ROWS)
        assert out.names == [None] * out.ndim
        if torch_accepts(op):
            check_rows(apply_op(td, op, torch), rows)
        if views and not is_lazy(td) and not is_rows(td):
            assert all(storage(x) == storage(leaves(td)[key]) for key, x in leaves(out).items())
        shares = op[0] == "repeat_interleave" and is_lazy(td)  # its members, as test_lazy says
        if copies and not shares:
            out.zero_()
            check_rows(td, ROWS)
        if type(out) is TensorDict and out is not td and not out.is_locked:
            del out["a"]
            out["m", "k", "e"] = torch.zeros(out.batch_size)
            check_rows(td, ROWS)

    each(TABLES[table], check)


@pytest.mark.parametrize("batch", [(), (4,), (4, 3), (2, 3, 4)], ids=str)
def test_leading_dims_are_added(batch):
    def check(op):
        rows = rows_of(batch).reshape(*[1] * max(0, int(op[0][-2]) - len(batch)), *batch)
        for namespace in (None, torch):
            check_rows(apply_op(make(batch), op, namespace), rows, make(batch))

    each(ATLEAST, check)


@every_kind
def test_parts(kind):
    def check(op):
        td = kind(make())
        for got in (apply_op(td, op), apply_op(td, op, torch)):
            for part, rows in zip(got, apply_op(ROWS, op), strict=True):
                check_rows(part, rows)
        for part in apply_op(td, op):
            part.zero_()
        assert is_rows(td) or not any(value.any() for value in leaves(td).values())

    each(PARTS, check)


def test_class_device_and_values_follow():
    td = TensorDict({"a": torch.zeros(4, 3), "text": "hello"}, [4, 3], device="cpu")

    def check(op):
        out = apply_op(td, op)
        assert type(out) is TensorDict and out.device == torch.device("cpu")
        assert out.get("text").batch_size == out.batch_size
        assert out.get("text").data == "hello"

    each(VIEWS, check)
    x = torch.ones(4, 3, requires_grad=True)
    TensorDict({"a": x}, [4, 3]).permute(1, 0).flatten()[:4]["a"].sum().backward()
    assert x.grad.sum() == 4 and x.grad[:, 0].tolist() == [1] * 4
    check_rows(make().expand_as(torch.zeros(2, 4, 3)), ROWS.expand(2, 4, 3))
    plain = make((1, 3)).select("b").expand_as(make().select("b"))
    assert (plain["b"] == rows_of((1, 3)).expand(4, 3)).all()


def test_to_and_from_no_batch_dims():
    td = TensorDict(a=torch.arange(2)).repeat_interleave(3)
    assert td.batch_size == (3,) and td["a"].tolist() == [[0, 1]] * 3
    td = TensorDict(a=torch.ones(1, 2), batch_size=[1])
    assert td.reshape().batch_size == td.view().batch_size == ()
    assert TensorDict(a=torch.ones(2)).flatten().batch_size == (1,)
    assert TensorDict(a=torch.ones(2)).permute()["a"].shape == (2,)


# operations that are refused like those of a tensor, by the error
LIKE_TORCH = {
    IndexError: ops(unflatten=[(2, (3, 2))], squeeze=[2, -3], movedim=[(0, 2)], narrow=[(2, 0, 1)])
    + ops(flip=[2], roll=[(1, 2)], split=[(2, 2), (2, -3)], chunk=[(2, 5)], unbind=[2, -3])
    + ops(flatten=[(0, 2), (-3, -1)], repeat_interleave=[(2, {"dim": 2})], unsqueeze=[3, -4])
    + ops(transpose=[(0, 2), (-3, 0)], swapaxes=[(2, 0)]),
    RuntimeError: ops(
        view=[5, ((),), (-1, -1), (5, -1)], reshape=[(5, 2), 24, ()], flatten=[(1, 0)]
    )
    + ops(unflatten=[(0, (3, 2))], expand=[(4, 5), 3, (-1, 4, 3)], broadcast_to=[((5, 3),)])
    + ops(permute=[(0, 0), (0, 1, 2), (0, 2), (-3, 0), 0, ()], narrow=[(0, 3, 2)])
    + ops(repeat=[2, (2, 1, 1)], split=[0, -1, [], [1, 2], [3, 3]], chunk=[0]),
}


@pytest.mark.parametrize("error", LIKE_TORCH)
def test_refused(error):
    """Although every leaf has a third dim, which is not a batch dim."""
    table = [(lambda td, op=op: apply_op(td, op), ANY, "") for op in LIKE_TORCH[error]]
    if error is IndexError:
        table = [(function, (error, ValueError, RuntimeError), "") for function, *_ in table]
    each(dict(zip(map(str, LIKE_TORCH[error]), table, strict=True)), refused(make))
    scalar = ops(unbind=[0], split=[1], squeeze=[0], flip=[0], chunk=[2], narrow=[(0, 0, 1)])
    scalar += ops(transpose=[(0, 1)], repeat=[2])
    for op in scalar:
        with pytest.raises((IndexError, ValueError)):
            apply_op(make(()), op)
    for call in (lambda: make().permute(1, 0).view(-1), lambda: make((4,)).rot90()):
        pytest.raises(RuntimeError, call)


ANY = (IndexError, ValueError, RuntimeError)

# ------------------------------------------------------------------------------ from parts


def pair():
    """Two containers and one with the rows of both."""
    one, two = make(), make(shift=1000)
    both = TensorDict(batch_size=[8, 3])
    for key, value in leaves(one).items():
        both[key] = torch.cat([value, two[key]])
    both["n"].batch_size = [8, 3, 5]
    return one, two, both


JOINS = {
    name: (getattr(torch, name), getattr(raffia, name), getattr(TensorDict, name))
    for name in ("stack", "cat")
}


@pytest.mark.parametrize("name", JOINS)
@every_kind
def test_joining_equals_torch(kind, name):
    one, two, both = pair()
    parts, rows = [kind(one), kind(two)], [ROWS, ROWS + 12]
    plain = getattr(torch, name)
    for dim in range(-2 - (name == "stack"), 2 + (name == "stack")):
        for function in JOINS[name]:
            check_rows(function(parts, dim), plain(rows, dim), both)
    check_rows(plain(tuple(parts)), plain(rows), both)
    check_rows(plain(parts, dim=1), plain(rows, 1), both)
    check_rows(plain(parts[:1]), plain(rows[:1]), both)
    plain([make(), make()]).zero_()
    out = plain([make(), make()])
    leaf = out["b"]
    assert plain(parts, out=out) is out and out["b"] is leaf
    check_rows(out, plain(rows), both)


def changed(key, value):
    return make().set(key, value)


K, R = (KeyError, RuntimeError), RuntimeError
WIDE = changed("a", torch.ones(4, 3, 4))
# function, its argument, error, words
NOT_JOINED = [
    (torch.stack, [make(), make().exclude("b")], K, "keys"),
    (torch.stack, [make().exclude("b"), make()], K, "keys"),
    (torch.stack, [make(), changed(("n", "c"), torch.ones(4, 3, 5, 4))], R, "shapes of.*c"),
    (torch.cat, [make(), make().exclude("n")], K, "keys"),
    (torch.cat, [make(), WIDE], R, "'a', of shapes"),
    (torch.stack, [make(), make((4, 2))], R, "batch.size"),
    (torch.cat, [make(), make((4, 2))], R, ""),
    (lambda x: torch.stack(x, 3), [make(), make()], IndexError, ""),
    (torch.cat, [make(()), make(())], ANY, ""),
    (torch.stack, [make(), torch.zeros(4, 3)], TypeError, ""),
    (lambda x: torch.stack(x, out=make()), [make(), make()], R, "batch.size"),
    (lambda x: pad(x, [0, 1, 0]), make(), R, "pad_size"),
    (lambda x: pad(x, [0, 1] * 3), make(), R, "pad_size"),
    (pad_sequence, [], R, "empty"),
    (pad_sequence, [TensorDict(a=torch.ones(2, n), batch_size=[2]) for n in (3, 4)], R, "a"),
]


def test_invalid_joins_are_refused():
    each([(lambda f=f, x=x: f(x), *row) for f, x, *row in NOT_JOINED], raises)
    with pytest.raises(RuntimeError, match="squeeze"), make((1, 3)).squeeze() as td:
        td["new"] = torch.zeros(3)


# ---------------------------------------------------------------- new containers like another

LIKE = {  # arguments, and a property of every leaf
    torch.zeros_like: ((), lambda x: (x == 0).all()),
    torch.ones_like: ((), lambda x: (x == 1).all()),
    torch.full_like: ((3,), lambda x: (x == 3).all()),
    torch.empty_like: ((), lambda x: True),
    torch.rand_like: ((), lambda x: ((x >= 0) & (x < 1)).all() and x.unique().numel() > 1),
    torch.randn_like: ((), lambda x: x.unique().numel() > 1),
}


@pytest.mark.parametrize("function", LIKE)
@every_kind
def test_like(kind, function):
    args, holds = LIKE[function]
    td = kind(make(names=["x", "y"]).float())
    out = function(td, *args)
    assert out.batch_size == BATCH and out.get("n").batch_size == (4, 3, 5)
    assert out.names == ["x", "y"]
    for key, value in leaves(out).items():
        assert value.shape == leaves(td)[key].shape and value.dtype == torch.float32
        assert holds(value) and storage(value) != storage(leaves(td)[key]), key
    check_same(td, make().float())
    out = function(kind(make()), *args, dtype=torch.float64)
    assert {value.dtype for value in leaves(out).values()} == {torch.float64}
    assert all(holds(value) for value in leaves(out).values())
    out = function(make().float(), *args, device="meta")
    assert out.device == torch.device("meta")
    assert {value.device.type for value in leaves(out).values()} == {"meta"}


# ------------------------------------------------------------------- views that are written back

BLOCKS = ops(view=[12, (2, 6), (4, 3)], unsqueeze=[0, 1, -1], squeeze=[0], permute=[(1, 0)])
BLOCKS += ops(transpose=[(0, 1)], swapaxes=[(0, 1)], movedim=[(0, 1)], flatten=[(0, 1)])
BLOCKS += ops(unflatten=[(0, (2, 2))])


def test_entries_written_in_a_block_are_written_back():
    def check(op):
        td = make()
        nested = td["n"]
        with apply_op(td, op) as view:
            rows = apply_op(ROWS, op)
            assert view.batch_size == rows.shape
            view["new"] = rows.clone()
            view["b"] = view["b"] + 1000
            view["a"] = torch.ones(*rows.shape, 7)
            view["n", "e"] = torch.ones(*rows.shape, 5)
            view["m", "k", "d"].zero_()
        assert td.batch_size == BATCH and (td["new"] == ROWS).all()
        assert (td["b"] == ROWS + 1000).all() and td["a"].shape == (4, 3, 7)
        assert td["n"] is nested and nested.batch_size == (4, 3, 5)
        assert td["n", "e"].shape == (4, 3, 5) and not td["m", "k", "d"].any()

    each(BLOCKS, check)
    td = TensorDict({"a": torch.zeros(4, 1)}, [4, 1])
    with td.squeeze(1) as view:
        view["q"] = torch.ones(4, 2)
    assert td.batch_size == (4, 1) and td["q"].shape == (4, 1, 2)


def test_blocks_of_keys_errors_and_locks():
    td = make()
    nested = td["n"]
    with td.flatten_keys(".") as view:
        view.update({"n.e": torch.ones(4, 3, 5), "p.q": torch.ones(4, 3), "new": torch.zeros(4, 3)})
    assert td["n"] is nested and nested.batch_size == (4, 3, 5)
    assert set(td.keys(True, True)) == {*leaves(make()), ("n", "e"), ("p", "q"), "new"}
    td = TensorDict({"a.b": torch.zeros(4)}, [4])
    with td.unflatten_keys(".") as view:
        view["a", "c"] = torch.ones(4)
    assert set(td.keys()) == {"a.b", "a.c"}
    td = make()
    with pytest.raises(ValueError, match="boom"), td.view(12) as view:
        view["new"] = torch.zeros(12)
        raise ValueError("boom")
    td.view(12)["new"] = torch.zeros(12)  # not written back without a block
    td.flatten_keys(".")["new"] = torch.zeros(4, 3)
    check_rows(td, ROWS)
    td = make().lock_()
    with td.view(12) as view:
        assert view.is_locked
        view["b"].zero_()
    assert td.is_locked and (td["b"] == 0).all()


# ------------------------------------------------------------------------------------ padding


@pytest.mark.parametrize("value", [0, -1.0])
def test_pad(value):
    def check(size):
        td, lo = make().select("a", "b", "n"), [*size[0::2], 0][:2]
        batch = [n + a + b for n, a, b in zip(BATCH, lo, [*size[1::2], 0], strict=False)]
        out = pad(td, size, value=value)
        assert out.batch_size == tuple(batch) and out["n"].batch_size == (*batch, 5)
        middle = tuple(S(start, start + n) for start, n in zip(lo, BATCH, strict=True))
        for key, leaf in leaves(td).items():
            want = torch.full((*batch, *leaf.shape[2:]), value).to(leaf.dtype)
            want[middle] = leaf
            assert (out[key] == want).all(), key
        assert (td["b"] == ROWS).all()

    each({str(size): size for size in ([1, 2], [0, 2], [0, 0, 1, 1], [1, 0, 0, 2], [0, 0])}, check)
    padded = pad(TensorDict({"a": torch.ones(2), "text": "hello"}, [2]), [0, 1])
    assert padded[0]["text"] == "hello" and padded[-1]["text"] is None


def sequences(lengths=(2, 4, 1)):
    numbers = [torch.arange(1.0, n + 1) for n in lengths]
    entries = [{"a": x, "b": torch.ones(len(x), 2), "n": {"c": x.long()}} for x in numbers]
    return [TensorDict(d, [len(x)]) for d, x in zip(entries, numbers, strict=True)]


def test_pad_sequence():
    out = pad_sequence(sequences())
    assert out.batch_size == out["n"].batch_size == (3, 4)
    right = [[1, 2, 0, 0], [1, 2, 3, 4], [1, 0, 0, 0]]
    assert out["a"].tolist() == out["n", "c"].tolist() == right
    assert out["b"].shape == (3, 4, 2) and out["b"].sum((1, 2)).tolist() == [4, 8, 2]
    assert pad_sequence(sequences(), padding_value=-1)["a"][2].tolist() == [1, -1, -1, -1]
    left = pad_sequence(sequences(), padding_side="left")["a"].tolist()
    assert left == [[0, 0, 1, 2], [1, 2, 3, 4], [0, 0, 0, 1]]
    assert (pad_sequence(sequences((3, 3))) == torch.stack(sequences((3, 3)))).all()
    parts = [TensorDict({"a": torch.ones(3, n), "text": "hello"}, [3]) for n in (2, 4, 1)]
    out = pad_sequence(parts, pad_dim=1)
    assert out.batch_size == (3, 3) and out["a"].shape == (3, 3, 4) and "text" in out.keys()
    assert out["a"].sum((1, 2)).tolist() == [6, 12, 3]


def test_masks_of_padding():
    want = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]).bool()
    for flag, key in ((True, "masks"), ("m", "m"), (("x", "y"), ("x", "y"))):
        masks = leaves(pad_sequence(sequences(), return_mask=flag)[key])
        assert set(masks) == {"a", "b", ("n", "c")}
        assert all(x.dtype == torch.bool and (x == want).all() for x in masks.values())
    td = make()  # the masks have the batch size of the result, also beside longer nested ones
    masks = pad_sequence([td, td[:2]], return_mask=True)["masks"]
    assert masks["n", "c"].shape == masks["a"].shape == (2, *BATCH)
    assert masks["n"].batch_size == (2, *BATCH)
    assert masks["a"].all(-1).tolist() == [[True] * 4, [True, True, False, False]]


# ----------------------------------------------------------------------------------- in place

IN_PLACE = ops(flatten=[(0, 1)], unflatten=[(0, (2, -1))], repeat=[(2, 1)], pad=[[1, 0]])
IN_PLACE += ops(repeat_interleave=[(2, 1)], roll=[(1, 0)], reshape=[12, (-1, 2)])
IN_PLACE += ops(gather=[(1, torch.tensor([[0, 2], [1, 2], [2, 2], [0, 0]]))])
IN_PLACE += ops(repeat_interleave=[(2, 1)], roll=[(1, 0)])


def test_in_place():
    """The same rows, in the same container and nested containers."""

    def check(op):
        name, args = op
        td = make(names=["x", "y"])
        nested, want = (td["n"], td["m", "k"]), getattr(td, name)(*args)
        assert getattr(td, name)(*args, inplace=True) is td
        assert td["n"] is nested[0] and td["m", "k"] is nested[1] and td.names == want.names
        check_same(td, want)
        with pytest.raises(RuntimeError, match="locked"):
            getattr(make().lock_(), name)(*args, inplace=True)
        td = make().set("stack", make().to_lazystack())
        for lazy, match in ((td, "LazyStackedTensorDict"), (td["stack"], "makes a new container")):
            with pytest.raises(NotImplementedError, match=match):
                getattr(lazy, name)(*args, inplace=True)
        assert td.batch_size == BATCH and td["n"].batch_size == (*BATCH, 5)

    each(IN_PLACE, check)
    td = make()
    with pytest.raises(ValueError, match="not both"):
        td.gather(0, torch.zeros(BATCH, dtype=torch.int64), out=td, inplace=True)
    assert td.pad([0, 1], safe=False).batch_size == (5, 3)


def test_the_oracle_can_fail():
    """check_rows must fail for the result of another operation."""
    for wrong in ops(view=[(3, 4)], transpose=[(0, 1)], roll=[(1, 0)], flip=[1]):
        with pytest.raises(AssertionError):
            check_rows(make(), apply_op(ROWS, wrong))
        with pytest.raises(AssertionError):
            check_rows(apply_op(make(), wrong), ROWS)
    with pytest.raises(AssertionError, match="second: ValueError"):
        each({"first": 1, "second": 2}, lambda n: int("x" if n == 2 else "1"))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refused(make)((len, RuntimeError, ""))
