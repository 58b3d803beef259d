"""Arithmetic, comparisons, pointwise methods and reductions: equal to torch's on every leaf."""

import functools
import itertools
import math
import operator

import pytest
import torch

from raffia import NonTensorData, TensorDict, TensorDictParams, lazy_stack, tensorclass
from tests.tensordict.invariants import sound
from tests.tensordict.kinds import BATCH, each, every_kind, is_lazy, is_rows, leaves

B, T = BATCH
KEYS = ["a", "b", ("n", "c"), ("m", "k", "d")]
SHAPES = [(B, T, 5), BATCH, (B, T, 1, 2), BATCH]
HALF = torch.arange(12).reshape(BATCH) % 2 == 0


def leaf(*shape, start=-1.7, stop=1.8):
    return torch.linspace(start, stop, math.prod(shape)).reshape(shape)


def make(start=-1.7, stop=1.8):
    """Leaves of different rank and values."""
    values = [leaf(*shape, start=start, stop=stop + i / 5) for i, shape in enumerate(SHAPES)]
    return TensorDict(dict(zip(KEYS, values, strict=True)), BATCH)


def line_up(tensor, like):
    """A tensor of the batch shape lines up with the leading dims of a leaf."""
    return tensor.reshape(tensor.shape + (1,) * (like.ndim - tensor.ndim))


def assert_leaves(result, expected):
    """`result` has exactly the leaves `expected` (a dict or a container)."""
    got, expected = leaves(result), expected if isinstance(expected, dict) else leaves(expected)
    assert sound(result) and set(got) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, equal_nan=True, check_stride=False)


def lined_up(other, key, x):
    """The operand for one leaf: its leaf, rows broadcast along the leading dims, or a number."""
    if hasattr(other, "batch_size"):
        return leaves(other)[key]
    return line_up(other, x) if isinstance(other, torch.Tensor) and other.ndim else other


def by_leaf(fn, td, *others, **options):
    """The results of a function on every leaf, with other operands."""
    return {
        key: fn(x, *[lined_up(other, key, x) for other in others], **options)
        for key, x in leaves(td).items()
    }


def same_class(result, td):
    plain = isinstance(td, TensorDictParams) or is_rows(td)
    assert type(result) is (TensorDict if plain else type(td))
    assert not is_lazy(td) or result.stack_dim == td.stack_dim
    return True


def memory(td):
    """The addresses of the leaves of a container."""
    members = td.tensordicts if is_lazy(td) else [td._parent] if is_rows(td) else [td]
    return [value.data_ptr() for member in members for value in leaves(member).values()]


def in_place(td, write, expected):
    """The call returns the container itself, with the leaves `expected` in the same memory."""
    before = memory(td)
    assert write(td) is td and memory(td) == before
    assert_leaves(td, expected)


UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 "
    "neg reciprocal round sigmoid sign sin sinh sqrt tan tanh trunc"
).split()
TESTS = "isnan isfinite isposinf isneginf isreal".split()
BINARY = "add sub mul div pow maximum minimum clamp_max clamp_min".split()
SIGNS = "add sub mul truediv pow mod".split()
COMPARE = "eq ne lt le gt ge".split()
LOGIC = "and_ or_ xor".split()


def operands(kind):
    positive = dict(start=0.6, stop=2.5)
    return kind(make(0.6, 2.5)), make(0.6, 2.5), 2, 0.5, torch.tensor(1.5), leaf(*BATCH, **positive)


def rows_of_numbers(value):
    return isinstance(value, torch.Tensor) and value.ndim > 0


def calls(kind):
    """Methods that are functions of torch, their other operands, options at the end."""
    end, other, rows = kind(make(0.5)), kind(make(0.3)), torch.rand(BATCH)
    return [
        *[(op,) for op in UNARY + TESTS],
        *itertools.product(BINARY, operands(kind)),
        *itertools.product(("add", "sub", "rsub"), (other, 2.0), ({"alpha": 3},)),
        *(("rsub", 1.0), ("rsub", rows), ("clamp", {"min": 0.1}), ("clamp", {"max": 0.1})),
        *(("clamp", -0.5, 0.5), ("clamp", kind(make(-1.9)), kind(make(-1.5, 2.0)))),
        *[("lerp", end, to) for to in (0.25, torch.tensor(0.25), kind(make(0.0, 1.0)), rows)],
        *itertools.product(("addcmul", "addcdiv"), (end,), (other,), ({}, {"value": -0.5})),
    ]


def of_torch(op, x, *others, **options):
    """The function of torch, for operands that it may not accept as numbers."""
    if op in ("maximum", "minimum", "pow"):
        others = [torch.as_tensor(other, dtype=x.dtype) for other in others]
    return getattr(torch, op)(x, *others, **options)


@every_kind
def test_each_leaf_equals_torch(kind):
    def check(row):
        op, *others = row
        options = others.pop() if others and isinstance(others[-1], dict) else {}
        if op.startswith("clamp_") and rows_of_numbers(others[0]):
            return
        dense = make(0.2 if others else -1.7)
        if not others and not options:
            dense["a"][0, 0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
        td = kind(dense.clone())
        expected = by_leaf(functools.partial(of_torch, op), dense, *others, **options)
        numbers = op in ("maximum", "minimum") and isinstance(others[0], int | float)
        methods_only = numbers or op.startswith("clamp_") or op == "rsub" or "alpha" in options
        for namespace in (type(td), *[torch] * (not methods_only)):
            result = getattr(namespace, op)(td, *others, **options)
            assert_leaves(result, expected)
            assert result.batch_size == BATCH and same_class(result, td)
            assert_leaves(td, dense)
            write = None if op in ("clamp", "rsub") else getattr(namespace, op + "_", None)
            if write:
                in_place(
                    kind(dense.clone()), lambda td, w=write: w(td, *others, **options), expected
                )

    each(calls(kind), check)


@every_kind
def test_operators(kind):
    def check(row):
        sign, other = row
        op, td = getattr(operator, sign), kind(make(0.2))
        expected = by_leaf(op, td, other)
        result = op(td, other)
        assert_leaves(result, expected)
        assert sign in COMPARE or same_class(result, td)
        if sign not in ("pow", "mod"):
            assert_leaves(op(other, td), by_leaf(lambda x, y: op(y, x), td, other))
        if sign in SIGNS and sign != "mod":
            in_place(td, lambda td: getattr(operator, "i" + sign)(td, other), expected)

    each(list(itertools.product(SIGNS + COMPARE, operands(kind))), check)


@every_kind
def test_logic(kind):
    truth, whole = kind(make()) > 0, kind(make(1, 9).int())
    rows = torch.arange(1, 13).reshape(BATCH)
    for sign, other in itertools.product(LOGIC, (kind(make(-0.3)) > 0.5, True, HALF)):
        op = getattr(operator, sign)
        assert_leaves(op(truth, other), by_leaf(op, truth, other))
        assert_leaves(op(False, truth), by_leaf(lambda x, op=op: op(False, x), truth))
    for op, td in ((operator.inv, truth), (operator.neg, whole), (operator.abs, kind(make()))):
        assert_leaves(op(td), by_leaf(op, td))
    for other in (whole + 3, 3, torch.tensor(2), rows):
        bits = torch.as_tensor(other).int() if not hasattr(other, "batch_size") else other
        assert_leaves(whole.bitwise_and(bits), by_leaf(torch.bitwise_and, whole, bits))
        for result in (whole.mod(other), whole % other):
            assert_leaves(result, by_leaf(operator.mod, whole, other))
    td = kind(make().round())
    for other in (make(-0.6).round(), HALF):
        assert_leaves(td.logical_and(other), by_leaf(torch.logical_and, td, other))


def test_rsub_of_integers_equals_torch():
    for value in (torch.tensor([3], dtype=torch.uint8), torch.tensor([-128], dtype=torch.int8)):
        for other in (0.5, 2, torch.tensor(2.5)):
            for result in (TensorDict(a=value).rsub(other), other - TensorDict(a=value)):
                assert_leaves(result, {"a": torch.rsub(value, other)})
    one, two = TensorDict(a=3.0, x=5.0), TensorDict(a=10.0, y=7.0)
    want = {"a": 4.0, "x": 1 - 2 * 5.0, "y": 7 - 2 * 1.0}
    result = one.rsub(two, default=1.0, alpha=2)
    assert_leaves(result, {key: torch.tensor(value) for key, value in want.items()})


# ----------------------------------------------------------------- keys that only one operand has


def both():
    one = {"a": leaf(B, T, start=0.5), "x": leaf(B, start=1.5), "n": {"b": leaf(B, 1, start=0.1)}}
    two = {"a": leaf(B, T, start=0.2), "y": leaf(B, start=2.5), "n": {"b": leaf(B, 1, start=0.2)}}
    return TensorDict(one, [B]), TensorDict(two, [B])


def test_keys_that_differ():
    one, two = both()

    def check(op):
        with pytest.raises(KeyError, match="mismatch"):
            getattr(one, op)(two)

    each([*BINARY, "bitwise_and", "logical_and", "rsub", "mod", "add_"], check)
    each([f"__{sign}__" for sign in [*SIGNS, *COMPARE]], check)
    with pytest.raises(KeyError, match="'x'.*'y'"):
        one == two  # noqa: B015
    for call in (lambda: one.lerp(two, 0.5), lambda: one.addcmul(two, two)):
        pytest.raises(KeyError, call)


def test_default_for_keys_that_differ():
    one, two = both()
    shared, default = ("a", ("n", "b")), torch.tensor(2.0)

    def check(op):
        left, right = (one.int(), two.int()) if op == "bitwise_and" else (one, two)
        fn = torch.rsub if op == "rsub" else getattr(torch, op)
        expected = {k: fn(left.get(k), right.get(k)) for k in shared}
        assert_leaves(getattr(left, op)(right, default="intersection"), expected)
        if op in BINARY:
            expected["x"], expected["y"] = fn(one["x"], default), fn(default.expand(B), two["y"])
            result = getattr(one, op)(two, default=default)
            assert_leaves(result, expected)
            assert result.batch_size == one.batch_size
            if op != "pow" and not op.startswith("clamp"):
                assert_leaves(getattr(one, op)(two, default=2.0), expected)

    each([*BINARY, "bitwise_and", "logical_and", "rsub"], check)
    for default in ("intersection", torch.tensor(0.0)):
        assert_leaves(one.add(one, default=default), one + one)
    stack = lazy_stack([one, one]), lazy_stack([two, two])
    for default in ("intersection", 0.5):
        result = stack[0].add(stack[1], default=default)
        assert type(result) is type(stack[0])
        assert_leaves(result[1], one.add(two, default=default))


# -------------------------------------------------------------------------------------- errors

FOREIGN = (TypeError, ValueError, RuntimeError, NotImplementedError)
REFUSED = {
    "broadcast": (lambda td: td + torch.ones(5), RuntimeError, "broadcast"),
    "container first": (lambda td: torch.add(torch.ones(BATCH), td), TypeError, "first argument"),
    "mixed bounds": (lambda td: td.clamp(td, 3), ValueError, "Mixed"),
    "no bounds": (lambda td: td.clamp(), FOREIGN, ""),
    "2 **": (lambda td: 2**td, FOREIGN, ""),
    "None": (lambda td: td + None, TypeError, ""),
    "different leaves": (lambda td: td.sum(dim=0, reduce=True), RuntimeError, ""),
    "nothing": (lambda td: TensorDict({}, [B]).sum(reduce=True), ValueError, "no tensor leaves"),
    "shapes": (lambda td: TensorDict(a=td["a"]) + TensorDict(a=td["a"][1:]), RuntimeError, "size"),
    "rsub": (lambda td: TensorDict(a=torch.tensor([True])).rsub(0.5), RuntimeError, "bool tensor"),
    "reduction": (
        lambda td: torch.nn.functional.mse_loss(td, td, reduction="bad"),
        ValueError,
        "reduction",
    ),
    "any of 2": (lambda td: td.any(dim=2), RuntimeError, "dim must be"),
}


def test_refused():
    def check(row):
        function, error, match = row
        with pytest.raises(error, match=match or None):
            function(make())

    each(REFUSED, check)
    for other in (None, "text", [1, 2], object()):
        assert (make() == other) is False and (make() != other) is True


# ------------------------------------------------------------------------------------ metadata


def test_metadata_and_values_are_kept():
    td = TensorDict({"a": leaf(B, T), "s": "text"}, BATCH, names=["b", "t"], device="cpu")
    for result in (td + 1, td * td, td.sin(), -td):
        assert result.names == ["b", "t"] and result.device == torch.device("cpu")
        assert result["s"] == "text"
    td = make()
    assert (td + td.to("cpu")).device is None and (td.to("cpu") + td).device is not None
    td = TensorDict({"a": leaf(B, T), "n": TensorDict({"b": leaf(B, T)}, [B, T])}, [B])
    for result in (td + 1, td + td, td.exp(), td == 1, td + torch.ones(B), td.isnan()):
        assert result.batch_size == (B,) and result["n"].batch_size == BATCH
    td = TensorDict({}, [B])
    for result in (td + 1, td + TensorDict({}, [B]), td.sin(), td == td, 2 * td, td.add_(1)):
        assert result.is_empty() and result.batch_size == (B,)
    td = make().lock_()
    assert all(result.is_locked for result in (td + 1, td * td, td.abs(), td.isfinite()))
    assert not (td == td).is_locked and not td.sum(0).is_locked
    assert (make() == make().to_dict()).all() and not (make() != make().to_dict()).any()


def test_shapes_and_dtypes_follow_torch():
    td = make()
    assert_leaves(td + leaf(T), by_leaf(lambda x: x + line_up(leaf(T).expand(BATCH), x), td))
    other = leaf(7, B, T)
    result = td * other
    assert result.batch_size == result["n"].batch_size == (7, B, T)
    assert_leaves(result, by_leaf(lambda x: line_up(other, x.expand(7, *x.shape)) * x, td))
    td = TensorDict({"i": torch.arange(B), "f": leaf(B), "d": leaf(B).double()}, [B])
    kinds = [torch.float32, torch.float32, torch.float64]
    assert [value.dtype for value in leaves(td + 0.5).values()] == kinds
    assert (td / td)["i"].dtype is torch.float32
    turned = TensorDict(dict(reversed(list(td.items()))), [B]) * 3  # pairs by key, not order
    assert_leaves(td + turned, {key: value * 4 for key, value in td.items()})
    tds = [make(i / 10) for i in range(3)]
    assert_leaves(sum(tds), tds[0] + tds[1] + tds[2])
    td = lazy_stack([TensorDict({"a": leaf(n)}, []) for n in (2, 3)])
    for result, n in ((td + 1, 0), (td * td, 1), (td.exp(), 2)):
        for got, source in zip(result.unbind(0), td.unbind(0), strict=True):
            x = source["a"]
            torch.testing.assert_close(got["a"], (x + 1, x * x, x.exp())[n])


def test_optimiser_step_and_gradients():
    """The optimiser pattern of the foreach methods."""
    params, grads = make(), make(0.4)
    m, v = params.mul(0), params.mul(0)
    m.lerp_(grads, 0.1)
    v.mul_(0.9).addcmul_(grads, grads, value=0.1)
    params.addcdiv_(m, v.sqrt().add_(1e-8), value=-0.01)
    step = by_leaf(lambda g: 0.01 * (0.1 * g) / ((0.1 * g * g).sqrt() + 1e-8), grads)
    assert_leaves(params, {key: value - step[key] for key, value in leaves(make()).items()})
    td = make().requires_grad_()
    out = td.pow(2)
    grads = torch.autograd.grad(out, td, out.detach() * 0 + 1)
    assert_leaves(grads, by_leaf(lambda x: 2 * x.detach(), td))
    assert grads.batch_size == BATCH
    td.mean(reduce=True).backward()
    total = sum(value.numel() for value in leaves(td).values())
    for value in leaves(td).values():
        torch.testing.assert_close(value.grad, torch.full_like(value, 1 / total))
    td = make().requires_grad_()
    td.exp().sum(reduce=True).backward()
    torch.testing.assert_close(td["a"].grad, td["a"].detach().exp())


# ------------------------------------------------------------------------------- reductions

REDUCE = "mean sum nanmean nansum prod std var amin amax quantile".split()
TUPLES = "mean sum nanmean nansum std var logsumexp".split()  # of several dims too
NO_KEEPDIM = "prod amin amax".split()  # without a dim


def reduce(td, op, *args, **options):
    return getattr(td, op)(*((0.25, *args) if op == "quantile" else args), **options)


def reduce_leaf(x, op, **options):
    return getattr(torch, op)(x, *((0.25,) if op == "quantile" else ()), **options)


def batch_dim(dim):
    """Negative dims count from the end of the batch."""
    return tuple(d % 2 for d in dim) if isinstance(dim, tuple) else dim % 2


def flat(td):
    return torch.cat([value.flatten() for value in leaves(td).values()])


def batched():
    return TensorDict({"a": leaf(B, T, start=0.2), "n": {"b": leaf(B, T, start=0.7)}}, BATCH)


@pytest.mark.parametrize("op", [*REDUCE, "logsumexp"])
@every_kind
def test_reductions(kind, op):
    td = kind(make(0.5))
    dims = [0, 1, -1] + [(0, 1), (1,), (-1, 0)] * (op in TUPLES)
    for dim, keepdim in itertools.product(dims, (False, True)):
        at, options = batch_dim(dim), {"keepdim": keepdim}
        expected = by_leaf(lambda x, at=at, o=options: reduce_leaf(x, op, dim=at, **o), td)
        result = reduce(td, op, dim=dim, keepdim=keepdim)
        assert_leaves(result, expected)
        shape = torch.ones(BATCH).sum(at, keepdim=keepdim).shape
        assert result.batch_size == result.get(("m", "k")).batch_size == shape
        assert_leaves(reduce(td, op, dim, **options), expected)
    if op == "logsumexp":
        assert_leaves(td.logsumexp(), by_leaf(lambda x: x.logsumexp((0, 1)), td))
        return
    whole = by_leaf(lambda x: reduce_leaf(x, op), td)
    for options in ({}, {"dim": None}, {"reduce": False}):
        result = reduce(td, op, **options)
        assert_leaves(result, whole)
        assert result.batch_size == () and type(result).__name__ in ("TensorDict", "Fields")
    if op not in NO_KEEPDIM:
        result = reduce(td, op, keepdim=True)
        assert result.batch_size == (1, 1)
        assert_leaves(result, {k: v.reshape((1,) * leaves(td)[k].ndim) for k, v in whole.items()})
    torch.testing.assert_close(reduce(td, op, reduce=True), reduce_leaf(flat(td), op))


@pytest.mark.parametrize("op", REDUCE)
def test_reductions_of_features_and_to_one_tensor(op):
    """ "feature": all dims after the batch; a leaf without any is unchanged."""
    td = make(0.5)
    rows = [value.reshape(B, T, -1) for value in leaves(td).values()]
    result = reduce(td, op, dim="feature", reduce=True)
    torch.testing.assert_close(result, reduce_leaf(torch.cat(rows, -1), op, dim=-1))
    if op in ("std", "var"):
        td = td.exclude("b", "m")
    if op not in ("amin", "amax"):
        result = reduce(td, op, dim="feature")
        assert result.batch_size == BATCH
        assert_leaves(result, by_leaf(lambda x: reduce_leaf(x.reshape(B, T, -1), op, dim=-1), td))
    for dim in (0, 1):
        joined = torch.cat([batched()["a"], batched()["n", "b"]], dim)
        for td in (batched(), TensorDict(batched().to_dict(), [B])):  # also beyond the batch
            result = reduce(td, op, dim=dim, reduce=True)
            torch.testing.assert_close(result, reduce_leaf(joined, op, dim=dim))
    with pytest.raises(IndexError, match="Incompatible dim 2"):
        reduce(make(), op, dim=2)


def test_options_of_reductions():
    for op, options in itertools.product("mean sum nanmean nansum prod".split(), ({}, {"dim": 0})):
        td = make() if op == "nanmean" else make().int()
        result = reduce(td, op, dtype=torch.float64, **options)
        double = td.double()
        assert_leaves(result, by_leaf(lambda x, op=op, o=options: getattr(x, op)(**o), double))
    td = make().exclude("b", "m")
    for op, n in itertools.product(("std", "var"), (0, 1, 2)):
        fn = getattr(torch, op)
        expected = by_leaf(lambda x, fn=fn, n=n: fn(x, dim=1, correction=n), td)
        assert_leaves(getattr(td, op)(dim=1, correction=n), expected)
        whole = getattr(td, op)(correction=n, reduce=True)
        torch.testing.assert_close(whole, fn(flat(td), correction=n))
    td = make()
    for mode in ("linear", "lower", "higher", "nearest", "midpoint"):
        expected = by_leaf(lambda x, mode=mode: x.quantile(0.3, dim=1, interpolation=mode), td)
        assert_leaves(td.quantile(0.3, dim=1, interpolation=mode), expected)
    q = torch.tensor([0.1, 0.5, 0.9, 1.0, 0.0])
    result = td.quantile(q, dim=0)
    assert result.batch_size == (5, T)
    assert_leaves(result, by_leaf(lambda x: x.quantile(q, dim=0), td))
    nan = TensorDict({"a": torch.tensor([[1.0, math.nan, 3.0], [4.0, 5.0, math.nan]])}, [2])
    for op in ("nanmean", "nansum"):
        assert_leaves(getattr(nan, op)(), by_leaf(getattr(torch, op), nan))
        assert not getattr(nan, op)(dim=0).isnan().any()
    for op in ("mean", "sum", "std", "var"):
        for args, options in (((), {}), ((), {"dim": 0}), ((0,), {"keepdim": True})):
            result = getattr(torch, op)(td, *args, **options)
            assert_leaves(result, getattr(td, op)(*args, **options))


@pytest.mark.parametrize("batch_size", [BATCH, (B,), ()])
def test_no_dimensions_are_all_dimensions(batch_size):
    td = TensorDict(dict(make().items()), batch_size)
    for name in "sum mean prod std var nansum nanmean amax amin logsumexp".split():
        for keepdim in (False, True):
            out = getattr(td, name)(dim=(), keepdim=keepdim)
            want = td.sum(keepdim=keepdim) if keepdim else td.sum()
            assert out.batch_size == want.batch_size and sound(out)
            assert {k: v.shape for k, v in leaves(out).items()} == {
                k: v.shape for k, v in leaves(want).items()
            }
    assert torch.equal(td.sum(dim=(), reduce=True), td.sum(reduce=True))


def test_metadata_of_reductions():
    td = TensorDict({"a": leaf(B, T)}, BATCH, names=["b", "t"], device="cpu")
    assert td.sum(0).names == td.any(0).names == ["t"]
    assert td.mean(dim=1, keepdim=True).names == ["b", "t"] and td.mean(0).device is not None
    assert td.sum(keepdim=True).names == td.amax(keepdim=True).names == ["b", "t"]
    assert td.quantile(torch.tensor([0.1, 0.9]), dim=0).names == [None, None]
    td = TensorDict(s="x", w=["p", "q"], batch_size=[2], names=["t"]).sum(keepdim=True)
    assert td.get("s").names == td.get("w").names == ["t"] and sound(td)
    td = TensorDict({"a": leaf(B, T), "n": TensorDict({"b": leaf(B, T)}, [B, T])}, [B])
    results = (td.mean(0), td.sum(), td.sum(0, keepdim=True), td.sum("feature"))
    sizes = [tuple(result["n"].batch_size) for result in results]
    assert sizes == [(T,), (), (1, T), (B, T)]
    assert TensorDict({}, [B]).sum().is_empty() and TensorDict({}, [B]).mean(0).is_empty()


def test_keys_of_reductions():
    td = TensorDict({"a": leaf(B, T), "n": {"x": leaf(B)}}, [B])
    for name in ("sum", "mean", "std", "var", "quantile"):
        out = reduce(td, name, 0, key_transform=lambda key, name=name: f"{name}_{key}")
        assert set(out.keys(True, True)) == {f"{name}_a", (f"{name}_n", f"{name}_x")}
        assert torch.equal(out[f"{name}_a"], reduce(td, name, 0)["a"])
        assert out.batch_size == out[f"{name}_n"].batch_size == ()
    td = TensorDict({"a": leaf(B, T)}, [B])
    assert td.sum(key_transform=lambda key: (key, "sum"))["a", "sum"].shape == ()
    assert isinstance(td.sum(reduce=True, key_transform=str), torch.Tensor)
    value = NonTensorData("text", batch_size=[2])
    for method in (value.sum, value.norm):
        assert method(key_transform=str.upper).data == "text"


@every_kind
def test_min_max_softmax_norm(kind):
    td = kind(make())
    for op in ("min", "max"):
        fn, method = getattr(torch, op), getattr(td, op)
        for options in ({}, {"dim": None}, {"return_indices": False}):
            assert_leaves(method(**options), by_leaf(fn, td))
        torch.testing.assert_close(method(reduce=True), fn(flat(td)))
        assert_leaves(method([0]).indices, method(0).indices)
        expected = fn(torch.cat([batched()["a"], batched()["n", "b"]], 0), 0)
        result = getattr(batched(), op)(dim=0, reduce=True)
        torch.testing.assert_close(result.values, expected.values)
        torch.testing.assert_close(result.indices, expected.indices)
        joined = torch.cat([batched()["a"], batched()["n", "b"]], 1)
        expected = getattr(torch, f"cum{op}")(joined, 1)
        method = getattr(TensorDict(batched().to_dict(), [B]), f"cum{op}")
        assert method(1, reduce=True).values.equal(expected.values)
        assert method(1, reduce=True).indices.equal(expected.indices)
        assert method(1, reduce=True, return_indices=False).equal(expected.values)
    for dim, keep in itertools.product((0, 1, -1), ({}, {"keepdim": True})):
        for op in ("min", "max", "cummin", "cummax"):
            if keep and op.startswith("cum"):
                continue
            fn, method, at = getattr(torch, op), getattr(td, op), dim % 2
            values, indices = result = method(dim=dim, **keep)
            assert values is result.values and indices is result.indices
            assert_leaves(values, by_leaf(lambda x, f=fn, at=at, k=keep: f(x, at, **k)[0], td))
            assert_leaves(indices, by_leaf(lambda x, f=fn, at=at, k=keep: f(x, at, **k)[1], td))
            assert values.batch_size == fn(torch.ones(BATCH), at, **keep)[0].shape
            assert_leaves(method(dim, **keep, return_indices=False), values)
        for options in ({}, {"dtype": torch.float64}):
            result = td.softmax(dim, **options)
            assert_leaves(result, by_leaf(lambda x, d=dim, o=options: x.softmax(d % 2, **o), td))
            assert result.batch_size == BATCH
    for op in ("min", "max", "cummin", "cummax", "softmax"):
        with pytest.raises(IndexError, match="Incompatible dim 2"):
            getattr(td, op)(dim=2)
    assert_leaves(td.norm(), by_leaf(lambda x: x.norm(), td))
    assert_leaves(td.norm(dtype=torch.float64), by_leaf(lambda x: x.double().norm(), td))
    assert td.norm().batch_size == ()
    renamed = td.norm(key_transform=lambda name: f"2{name}").flatten_keys(".").keys()
    assert {name.replace("2", "") for name in renamed} == {*td.norm().flatten_keys(".").keys()}
    assert all(name.count("2") == name.count(".") + 1 for name in renamed)


@every_kind
def test_any_all(kind):
    td = kind(make()) > 0
    assert td.any() is True and td.all() is False
    assert (td | ~td).all() is True and (td & ~td).any() is False
    for op, dim in itertools.product(("any", "all"), (0, 1, -1, -2)):
        result = getattr(td, op)(dim)
        expected = by_leaf(lambda x, op=op, d=dim: getattr(torch, op)(x, dim=d % 2), td)
        assert_leaves(result, expected)
        assert result.batch_size == BATCH[1 - dim % 2 : 2 - dim % 2]
    assert TensorDict({}, [B]).any() is False and TensorDict({}, [B]).all() is True
    td = TensorDict({"a": torch.tensor([0.0, 2.0]), "label": "text"}, [2])
    assert td.any() is True and td.all() is False and td.exclude("a").any() is False


@every_kind
def test_losses(kind):
    td, target = kind(make()), kind(make(0.3))
    losses = [getattr(torch.nn.functional, f"{name}_loss") for name in ("mse", "l1", "smooth_l1")]
    for loss, mode in itertools.product(losses, ("none", "mean", "sum")):
        result = loss(td, target, reduction=mode)
        expected = by_leaf(lambda x, y, f=loss, mode=mode: f(x, y, reduction=mode), td, target)
        assert_leaves(result, expected)
        assert result.batch_size == (BATCH if mode == "none" else ())


def test_jagged_tensors_with_plain_ones():
    rows = torch.nested.nested_tensor([leaf(2), leaf(3, start=0.5)], layout=torch.jagged)
    td = TensorDict(r=rows, b=leaf(2, start=0.5), batch_size=[2])

    def check(function):
        got = function(td.clone())
        assert torch.equal(got["b"], function(td["b"].clone()))
        assert torch.equal(got["r"].values(), function(rows.clone()).values())

    calls = [lambda x: x + 1, lambda x: 2 - x, lambda x: x * x, lambda x: -x, lambda x: x.abs()]
    calls += [lambda x: x.clamp(0, 1), lambda x: x.add_(2), lambda x: x.mul_(x), lambda x: x.exp()]
    each(calls, check)
    with pytest.raises(NotImplementedError):  # torch's own
        td.addcmul(td, td)


def test_integers_with_a_gradient():
    td = TensorDict(w=torch.ones(2, requires_grad=True), i=torch.tensor([1, -2]))
    calls = [lambda x: x + 1, lambda x: x * 2, lambda x: -x, lambda x: x.abs(), lambda x: x * x]

    def check(function):
        got = function(td)
        assert torch.equal(got["i"], function(td["i"])) and not got["i"].is_floating_point()
        assert torch.equal(got["w"], function(td["w"])) and got["w"].requires_grad

    each([*calls, lambda x: x.clamp(0, 1), lambda x: x.maximum(x)], check)


@pytest.mark.parametrize("wrap", [lambda td: td, lambda td: lazy_stack(list(td.unbind(0)))])
def test_entries_without_tensors_may_be_in_one_operand_only(wrap):
    def plain():
        return wrap(TensorDict(a=torch.ones(2), batch_size=[2]))

    texts = wrap(TensorDict(a=torch.ones(2), s="x", n={"t": "y", "e": {}}, batch_size=[2]))
    calls = [lambda x, y: x + y, lambda x, y: x.lerp(y, 0.5), lambda x, y: x.addcmul(y, y)]
    calls += [lambda x, y: x.clamp(y, y), lambda x, y: x.clone().mul_(y)]
    calls += [lambda x, y: x.where(torch.tensor([True, False]), y)]

    def check(call):
        want = call(plain(), plain())["a"]
        for td in (call(texts, plain()), call(texts, texts)):
            assert torch.equal(td["a"], want) and td["s"] == texts["s"] and td["n", "t"]
        assert torch.equal(call(plain(), texts)["a"], want)

    each(calls, check)
    assert list((plain() + texts).keys()) == ["a"]
    other = texts.replace({"b": torch.ones(2)})
    for left, right in ((plain(), other), (other, plain()), (texts, other), (other, texts)):
        with pytest.raises(KeyError, match=r"mismatch.*'b'"):
            left + right
    with pytest.raises(KeyError, match="mismatch"):
        operator.eq(texts, plain())  # a comparison is of everything


def test_a_typed_container_and_a_plain_one_of_its_tensors():
    @tensorclass
    class Point:
        x: torch.Tensor
        label: str = "label"

    point, plain = Point(torch.ones(2), batch_size=[2]), TensorDict(x=torch.ones(2), batch_size=[2])
    assert (point + plain).x.tolist() == [2, 2] and (point + plain).label == "label"
    assert (plain + point)["x"].tolist() == [2, 2]
