"""Arithmetic, comparisons, pointwise methods and reductions: as torch does on every leaf."""

import math
import operator

import pytest
import torch

from raffia import LazyStackedTensorDict, TensorDict, is_tensor_collection, lazy_stack

B, T, A = 2, 3, 5


def leaf(*shape, start=-1.7, stop=1.8):
    return torch.linspace(start, stop, math.prod(shape)).reshape(shape)


def make(kind="nested", start=-1.7, stop=1.8):
    """Containers with batch size [B, T], leaves of different rank."""
    if kind == "flat":
        return TensorDict({"a": leaf(B, T, A, start=start, stop=stop)}, batch_size=[B, T])
    if kind == "lazy":
        return lazy_stack([make("nested", start + i / 10, stop)[:, i] for i in range(T)], 1)
    return TensorDict(
        {
            "a": leaf(B, T, A, start=start, stop=stop),
            "n": {
                "b": leaf(B, T, start=start / 2, stop=stop),
                "m": {"c": leaf(B, T, 1, 2, start=stop, stop=start)},
            },
        },
        batch_size=[B, T],
    )


KINDS = ["flat", "nested", "lazy"]


def leaves(td):
    return dict(td.items(True, True))


def expand_right(tensor, like):
    """A tensor operand of the batch shape lines up with the leading dims of a leaf."""
    return tensor.reshape(tensor.shape + (1,) * (like.ndim - tensor.ndim))


def assert_leaves(result, expected):
    """`result` has exactly the leaves `expected` (a dict or a container)."""
    got = leaves(result)
    expected = expected if isinstance(expected, dict) else leaves(expected)
    assert set(got) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(
            got[key], value, equal_nan=True, msg=lambda m, k=key: f"{k}: {m}"
        )


def by_leaf(fn, td, *others):
    return {k: fn(v, *(o.get(k) for o in others)) for k, v in leaves(td).items()}


UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 "
    "neg reciprocal round sigmoid sign sin sinh sqrt tan tanh trunc"
).split()
TESTS = "isnan isfinite isposinf isneginf isreal".split()
BINARY = "add sub mul div pow maximum minimum clamp_max clamp_min".split()


class TestUnary:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("op", UNARY)
    def test_out_of_place(self, op, kind):
        td = make(kind)
        before = td.clone()
        result = getattr(td, op)()
        assert_leaves(result, by_leaf(getattr(torch, op), td))
        assert_leaves(td, before)
        assert result.batch_size == td.batch_size
        assert type(result) is type(td)

    @pytest.mark.parametrize("op", UNARY)
    def test_in_place(self, op):
        td = make()
        before, held = td.clone(), td["n", "b"]
        expected = by_leaf(getattr(torch, op), before)
        assert getattr(td, op + "_")() is td
        assert td["n", "b"] is held
        assert_leaves(td, expected)

    @pytest.mark.parametrize("op", ["sin", "abs", "neg", "sqrt"])
    def test_in_place_on_lazy_stack_writes_into_members(self, op):
        td = make("lazy")
        member = td.tensordicts[1]
        held = member["a"]
        expected = by_leaf(getattr(torch, op), td.clone())
        getattr(td, op + "_")()
        assert td.tensordicts[1]["a"] is held
        assert_leaves(td, expected)

    @pytest.mark.parametrize("op", UNARY)
    def test_torch_function(self, op):
        td = make()
        expected = by_leaf(getattr(torch, op), td)
        assert_leaves(getattr(torch, op)(td), expected)
        if hasattr(torch, op + "_"):
            assert getattr(torch, op + "_")(td) is td
            assert_leaves(td, expected)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("op", TESTS)
    def test_predicates(self, op, kind):
        td = make(kind)
        special = td.get("a").clone()
        special[0, 0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
        td = td.set("a", special)
        result = getattr(td, op)()
        assert_leaves(result, by_leaf(getattr(torch, op), td))
        assert all(v.dtype is torch.bool for v in leaves(result).values())
        assert result.batch_size == td.batch_size

    @pytest.mark.parametrize("op", TESTS)
    def test_predicate_torch_function(self, op):
        td = make()
        assert_leaves(getattr(torch, op)(td), by_leaf(getattr(torch, op), td))

    def test_operators(self):
        td = make()
        assert_leaves(-td, by_leaf(torch.neg, td))
        assert_leaves(abs(td), by_leaf(torch.abs, td))
        mask = td > 0
        assert_leaves(~mask, by_leaf(torch.logical_not, mask))

    def test_invert_needs_bool_or_int(self):
        with pytest.raises(TypeError):
            ~make()

    def test_gradients_flow(self):
        td = make("flat").requires_grad_()
        td.exp().sum(reduce=True).backward()
        torch.testing.assert_close(td["a"].grad, td["a"].detach().exp())


class TestBinaryMethods:
    @pytest.mark.parametrize("op", BINARY)
    @pytest.mark.parametrize("kind", KINDS)
    def test_container_operand(self, op, kind):
        td, other = make(kind, start=0.2), make(kind, start=0.6, stop=2.5)
        result = getattr(td, op)(other)
        fn = getattr(torch.Tensor, op)
        assert_leaves(result, by_leaf(fn, td, other))
        assert result.batch_size == td.batch_size
        assert type(result) is type(td)

    @pytest.mark.parametrize("op", BINARY)
    def test_container_operand_pairs_by_key_not_order(self, op):
        td = TensorDict({"a": leaf(B, T, start=0.1), "b": leaf(B, start=0.1)}, [B])
        other = TensorDict({"b": leaf(B, start=1), "a": leaf(B, T, start=0.5)}, [B])
        assert_leaves(getattr(td, op)(other), by_leaf(getattr(torch.Tensor, op), td, other))

    @pytest.mark.parametrize("scalar", [2, 0.5, torch.tensor(1.5)], ids=["int", "float", "0d"])
    @pytest.mark.parametrize("op", BINARY)
    def test_scalar_operand(self, op, scalar):
        td = make(start=0.2)
        fn = getattr(torch, op)
        operand = scalar
        if op in ("maximum", "minimum"):
            operand = torch.as_tensor(scalar, dtype=torch.float)
        elif op.startswith("clamp"):
            operand = float(scalar)
        assert_leaves(getattr(td, op)(scalar), by_leaf(lambda x: fn(x, operand), td))

    @pytest.mark.parametrize("kind", ["nested", "lazy"])
    @pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "pow", "maximum", "minimum"])
    def test_tensor_of_batch_shape_lines_up_with_batch_dims(self, op, kind):
        td, other = make(kind, start=0.2), leaf(B, T, start=0.6, stop=2.5)
        result = getattr(td, op)(other)
        assert_leaves(result, by_leaf(lambda x: getattr(torch, op)(x, expand_right(other, x)), td))
        assert result.batch_size == td.batch_size

    def test_tensor_broadcasts_from_the_right_of_the_batch(self):
        td, other = make(), leaf(T)
        assert_leaves(td + other, by_leaf(lambda x: x + expand_right(other.expand(B, T), x), td))

    def test_tensor_with_more_dims_grows_the_batch(self):
        td, other = make(), leaf(4, B, T)
        result = td * other
        assert result.batch_size == torch.Size([4, B, T])
        assert result["n"].batch_size == torch.Size([4, B, T])
        assert_leaves(result, by_leaf(lambda x: expand_right(other, x.expand(4, *x.shape)) * x, td))

    def test_tensor_that_does_not_broadcast(self):
        with pytest.raises(RuntimeError, match="broadcast"):
            make() + torch.ones(4)

    @pytest.mark.parametrize("op", BINARY)
    def test_in_place(self, op):
        for other in (make(start=0.6, stop=2.5), 2, torch.tensor(1.5), leaf(B, T, start=0.6)):
            td = make(start=0.2)
            held = td["n", "m", "c"]
            expected = getattr(td, op)(other)
            assert getattr(td, op + "_")(other) is td
            assert td["n", "m", "c"] is held
            assert_leaves(td, expected)

    @pytest.mark.parametrize("op", ["add", "mul", "div", "clamp_max"])
    def test_in_place_on_lazy_stack(self, op):
        td, other = make("lazy", start=0.2), make("lazy", start=0.9)
        held = td.tensordicts[0]["n", "b"]
        expected = getattr(td, op)(other)
        getattr(td, op + "_")(other)
        assert td.tensordicts[0]["n", "b"] is held
        assert_leaves(td, expected)

    @pytest.mark.parametrize("op", ["add", "sub", "rsub"])
    @pytest.mark.parametrize("other", ["container", "scalar"])
    def test_alpha(self, op, other):
        td = make()
        if other == "container":
            other = make(start=0.3)
            expected = by_leaf(lambda x, y: getattr(torch, op)(x, y, alpha=3), td, other)
        else:
            other = 2.0
            expected = by_leaf(lambda x: getattr(torch, op)(x, 2.0, alpha=3), td)
        assert_leaves(getattr(td, op)(other, alpha=3), expected)

    @pytest.mark.parametrize("op", ["add_", "sub_"])
    def test_alpha_in_place(self, op):
        td, other = make(), make(start=0.3)
        expected = by_leaf(lambda x, y: getattr(torch, op[:-1])(x, y, alpha=2), td.clone(), other)
        assert getattr(td, op)(other, alpha=2) is td
        assert_leaves(td, expected)

    def test_rsub(self):
        td = make()
        assert_leaves(td.rsub(1.0), by_leaf(lambda x: 1 - x, td))
        tensor = leaf(B, T)
        assert_leaves(td.rsub(tensor), by_leaf(lambda x: expand_right(tensor, x) - x, td))

    def test_rsub_of_whole_numbers_is_that_of_torch(self):
        for value in (torch.tensor([3], dtype=torch.uint8), torch.tensor([-128], dtype=torch.int8)):
            for other in (0.5, 2, torch.tensor(2.5)):
                expected = torch.rsub(value, other)
                assert_leaves(TensorDict(a=value).rsub(other), {"a": expected})
                assert_leaves(other - TensorDict(a=value), {"a": expected})
        with pytest.raises(RuntimeError, match="bool tensor is not supported"):
            TensorDict(a=torch.tensor([True])).rsub(0.5)

    def test_rsub_takes_its_default_from_where_an_entry_is_missing(self):
        one, two = TensorDict(a=3.0, x=5.0), TensorDict(a=10.0, y=7.0)
        expected = {"a": 4.0, "x": 1 - 2 * 5.0, "y": 7 - 2 * 1.0}
        result = one.rsub(two, default=1.0, alpha=2)
        assert_leaves(result, {key: torch.tensor(value) for key, value in expected.items()})

    @pytest.mark.parametrize("other", [3, torch.tensor(2), "tensor", "container"])
    def test_mod(self, other):
        td = TensorDict(
            {"a": torch.arange(B * T).reshape(B, T), "n": {"b": torch.arange(B) + 7}}, [B]
        )
        if isinstance(other, str) and other == "tensor":
            other = torch.tensor([2, 3])
            expected = by_leaf(lambda x: x % expand_right(other, x), td)
        elif isinstance(other, str):
            other = td + 3
            expected = by_leaf(operator.mod, td, other)
        else:
            expected = by_leaf(lambda x: x % other, td)
        assert_leaves(td.mod(other), expected)
        assert_leaves(td % other, expected)

    def test_bitwise_and(self):
        td = make(stop=9).int()
        other = td + 3
        assert_leaves(td.bitwise_and(other), by_leaf(torch.bitwise_and, td, other))
        assert_leaves(td.bitwise_and(3), by_leaf(lambda x: x & 3, td))
        tensor = torch.arange(B * T).reshape(B, T).int()
        assert_leaves(td.bitwise_and(tensor), by_leaf(lambda x: x & expand_right(tensor, x), td))

    def test_logical_and(self):
        td, other = make().round(), make(start=-0.6).round()
        assert_leaves(td.logical_and(other), by_leaf(torch.logical_and, td, other))
        tensor = torch.tensor([[True, False, True], [False, True, False]])
        assert_leaves(
            td.logical_and(tensor),
            by_leaf(lambda x: torch.logical_and(x, expand_right(tensor, x)), td),
        )

    @pytest.mark.parametrize(
        "op", ["add", "sub", "mul", "div", "pow", "maximum", "minimum", "rsub", "lerp"]
    )
    def test_torch_function(self, op):
        td, other = make(start=0.2), make(start=0.6)
        args = (other, 0.3) if op == "lerp" else (other,)
        assert_leaves(getattr(torch, op)(td, *args), getattr(td, op)(*args))

    def test_torch_function_needs_container_first(self):
        with pytest.raises(TypeError, match="first argument"):
            torch.add(torch.ones(B, T), make())

    def test_not_overridden_torch_function(self):
        with pytest.raises(TypeError):
            torch.nn.functional.relu(make())


class TestClampLerpAddc:
    def test_clamp(self):
        td, low, high = make(), make().sub(0.2), make().add(0.4)
        assert_leaves(td.clamp(-0.5, 0.5), by_leaf(lambda x: x.clamp(-0.5, 0.5), td))
        assert_leaves(td.clamp(min=0.1), by_leaf(lambda x: x.clamp(min=0.1), td))
        assert_leaves(td.clamp(max=0.1), by_leaf(lambda x: x.clamp(max=0.1), td))
        assert_leaves(td.neg().clamp(low, high), by_leaf(torch.clamp, td.neg(), low, high))
        assert_leaves(torch.clamp(td, -1, 1), td.clamp(-1, 1))

    def test_clamp_refuses_mixed_bounds(self):
        with pytest.raises(ValueError, match="Mixed"):
            make().clamp(make(), 3)

    def test_clamp_without_bounds(self):
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            make().clamp()

    @pytest.mark.parametrize("kind", KINDS)
    def test_lerp(self, kind):
        td, end = make(kind), make(kind, start=0.5)
        weight = make(kind, start=0.0, stop=1.0)
        assert_leaves(td.lerp(end, 0.25), by_leaf(lambda x, y: x.lerp(y, 0.25), td, end))
        assert_leaves(
            td.lerp(end, torch.tensor(0.25)), by_leaf(lambda x, y: x.lerp(y, 0.25), td, end)
        )
        assert_leaves(td.lerp(end, weight), by_leaf(torch.lerp, td, end, weight))

    def test_lerp_tensor_weight_lines_up_with_batch(self):
        td, end, weight = make(), make(start=0.5), torch.rand(B, T)
        assert_leaves(
            td.lerp(end, weight),
            by_leaf(lambda x, y: x.lerp(y, expand_right(weight, x).expand_as(x)), td, end),
        )

    def test_lerp_in_place(self):
        """A polyak update of target parameters."""
        target, online = make(), make(start=0.5)
        held, expected = target["a"], target.lerp(online, 0.1)
        assert target.lerp_(online, 0.1) is target
        assert target["a"] is held
        assert_leaves(target, expected)

    @pytest.mark.parametrize("op", ["addcmul", "addcdiv"])
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("value", [None, 2, -0.5])
    def test_addc(self, op, kind, value):
        td, x, y = make(kind), make(kind, start=0.5), make(kind, start=0.3)
        kwargs = {} if value is None else {"value": value}
        fn = getattr(torch, op)
        assert_leaves(
            getattr(td, op)(x, y, **kwargs), by_leaf(lambda *o: fn(*o, **kwargs), td, x, y)
        )

    @pytest.mark.parametrize("op", ["addcmul", "addcdiv"])
    def test_addc_in_place(self, op):
        td, x, y = make(), make(start=0.5), make(start=0.3)
        held, expected = td["a"], getattr(td, op)(x, y, value=3)
        assert getattr(td, op + "_")(x, y, value=3) is td
        assert td["a"] is held
        assert_leaves(td, expected)
        assert_leaves(getattr(torch, op)(td, x, y), getattr(td, op)(x, y))

    def test_adam_like_step(self):
        """The optimiser pattern that the foreach methods are there for."""
        params, grads = make(), make(start=0.4)
        m, v = params.mul(0), params.mul(0)
        m.lerp_(grads, 0.1)
        v.mul_(0.9).addcmul_(grads, grads, value=0.1)
        params.addcdiv_(m, v.sqrt().add_(1e-8), value=-0.01)
        for k, g in leaves(grads).items():
            expected = leaves(make())[k] - 0.01 * (0.1 * g) / ((0.1 * g * g).sqrt() + 1e-8)
            torch.testing.assert_close(params.get(k), expected)


class TestKeyMismatch:
    """Operands must have the same leaves, unless `default=` says what a missing one is worth."""

    def both(self):
        one = TensorDict(
            {"a": leaf(B, T, start=0.5), "x": leaf(B, start=1.5), "n": {"b": leaf(B, 1)}}, [B]
        )
        two = TensorDict(
            {"a": leaf(B, T, start=0.2), "y": leaf(B, start=2.5), "n": {"b": leaf(B, 1)}}, [B]
        )
        return one, two

    OPS = [*BINARY, "bitwise_and", "logical_and", "rsub"]

    @pytest.mark.parametrize("op", [*OPS, "mod"])
    def test_raises(self, op):
        one, two = self.both()
        with pytest.raises(KeyError, match="keys in tensordicts mismatch"):
            getattr(one, op)(two)

    @pytest.mark.parametrize(
        "op", ["__add__", "__sub__", "__mul__", "__truediv__", "__pow__", "__mod__"]
    )
    def test_operator_raises(self, op):
        one, two = self.both()
        with pytest.raises(KeyError, match="mismatch"):
            getattr(one, op)(two)

    @pytest.mark.parametrize("op", ["__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"])
    def test_comparison_raises_and_names_the_keys(self, op):
        one, two = self.both()
        with pytest.raises(KeyError, match="'x'.*'y'"):
            getattr(one, op)(two)

    def test_lerp_addc_raise(self):
        one, two = self.both()
        with pytest.raises(KeyError):
            one.lerp(two, 0.5)
        with pytest.raises(KeyError):
            one.addcmul(two, two)

    def test_in_place_raises_when_a_key_is_missing(self):
        one, two = self.both()
        with pytest.raises(KeyError):
            one.add_(two)

    @pytest.mark.parametrize("op", OPS)
    def test_intersection(self, op):
        one, two = self.both()
        if op == "bitwise_and":
            one, two = one.int(), two.int()
        result = getattr(one, op)(two, default="intersection")
        fn = torch.rsub if op == "rsub" else getattr(torch.Tensor, op)
        assert_leaves(result, {k: fn(one.get(k), two.get(k)) for k in ("a", ("n", "b"))})

    @pytest.mark.parametrize(
        "op", "add sub mul div pow maximum minimum clamp_max clamp_min".split()
    )
    def test_tensor_default_stands_for_missing_leaves_on_both_sides(self, op):
        one, two = self.both()
        default = torch.tensor(2.0)
        fn = getattr(torch.Tensor, op)
        result = getattr(one, op)(two, default=default)
        expected = {k: fn(one.get(k), two.get(k)) for k in ("a", ("n", "b"))}
        expected["x"] = fn(one["x"], default)
        expected["y"] = fn(default.expand(B), two["y"])
        assert_leaves(result, expected)
        assert result.batch_size == one.batch_size

    @pytest.mark.parametrize("op", "add sub mul div maximum minimum".split())
    def test_number_default_ours(self, op):
        one, two = self.both()
        assert_leaves(
            getattr(one, op)(two, default=2.0), getattr(one, op)(two, default=torch.tensor(2.0))
        )

    def test_default_unused_when_keys_match(self):
        one = self.both()[0]
        for default in ("intersection", torch.tensor(0.0)):
            assert_leaves(one.add(one, default=default), one + one)


ARITHMETIC = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "**": operator.pow,
    "%": operator.mod,
}
COMPARE = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
INPLACE = {
    "+": operator.iadd,
    "-": operator.isub,
    "*": operator.imul,
    "/": operator.itruediv,
    "**": operator.ipow,
}


class TestOperators:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("sign", ARITHMETIC)
    def test_with_container(self, sign, kind):
        op, td, other = ARITHMETIC[sign], make(kind, start=0.2), make(kind, start=0.6)
        result = op(td, other)
        assert_leaves(result, by_leaf(op, td, other))
        assert type(result) is type(td)

    @pytest.mark.parametrize("sign", ARITHMETIC)
    def test_with_number_and_tensor(self, sign):
        op, td, tensor = ARITHMETIC[sign], make(start=0.2), leaf(B, T, start=0.5)
        assert_leaves(op(td, 2), by_leaf(lambda x: op(x, 2), td))
        assert_leaves(op(td, 0.5), by_leaf(lambda x: op(x, 0.5), td))
        assert_leaves(op(td, tensor), by_leaf(lambda x: op(x, expand_right(tensor, x)), td))

    @pytest.mark.parametrize("sign", ["+", "-", "*", "/"])
    def test_reflected(self, sign):
        op, td, tensor = ARITHMETIC[sign], make(start=0.2), leaf(B, T, start=0.5)
        assert_leaves(op(2, td), by_leaf(lambda x: op(2, x), td))
        assert_leaves(op(0.5, td), by_leaf(lambda x: op(0.5, x), td))
        assert_leaves(op(tensor, td), by_leaf(lambda x: op(expand_right(tensor, x), x), td))

    def test_reflected_pow_is_refused(self):
        with pytest.raises((NotImplementedError, TypeError)):
            2 ** make()

    @pytest.mark.parametrize("sign", INPLACE)
    @pytest.mark.parametrize("other", ["number", "tensor", "container"])
    @pytest.mark.parametrize("locked", [False, True])
    def test_in_place(self, sign, other, locked):
        td = make(start=0.2)
        other = {"number": 2, "tensor": leaf(B, T, start=0.5), "container": make(start=0.4)}[other]
        expected = ARITHMETIC[sign](td, other)
        if locked:
            td.lock_()
        same, held = td, td["n", "b"]
        td = INPLACE[sign](td, other)
        assert td is same
        assert td["n", "b"] is held
        assert_leaves(td, expected)
        assert td.is_locked is locked

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("op", COMPARE, ids=lambda f: f.__name__)
    def test_compare(self, op, kind):
        td = make(kind).round()
        other = make(kind, start=-0.9).round()
        result = op(td, other)
        assert is_tensor_collection(result)
        assert_leaves(result, by_leaf(op, td, other))
        assert_leaves(op(td, 1), by_leaf(lambda x: op(x, 1), td))
        tensor = leaf(B, T).round()
        assert_leaves(op(td, tensor), by_leaf(lambda x: op(x, expand_right(tensor, x)), td))
        assert result.batch_size == td.batch_size

    @pytest.mark.parametrize("op", COMPARE, ids=lambda f: f.__name__)
    def test_compare_reflected(self, op):
        td, tensor = make().round(), leaf(B, T).round()
        assert_leaves(op(1, td), by_leaf(lambda x: op(1, x), td))
        assert_leaves(op(tensor, td), by_leaf(lambda x: op(expand_right(tensor, x), x), td))

    def test_compare_with_dict(self):
        td = make()
        assert (td == td.to_dict()).all()
        assert not (td != td.to_dict()).any()

    @pytest.mark.parametrize(
        "other", [None, "text", [1, 2], object()], ids=["None", "str", "list", "object"]
    )
    def test_equality_with_foreign_things_is_a_plain_bool(self, other):
        td = make()
        assert (td == other) is False
        assert (td != other) is True

    def test_batch_sizes_must_broadcast(self):
        td = make()
        with pytest.raises(RuntimeError):
            operator.eq(td, td.clone().auto_batch_size_(1))

    @pytest.mark.parametrize(
        "op", [operator.and_, operator.or_, operator.xor], ids=["and", "or", "xor"]
    )
    @pytest.mark.parametrize("kind", KINDS)
    def test_logic(self, op, kind):
        td, other = make(kind) > 0, make(kind, start=-0.3) > 0.5
        assert_leaves(op(td, other), by_leaf(op, td, other))
        assert_leaves(op(td, True), by_leaf(lambda x: op(x, True), td))
        assert_leaves(op(False, td), by_leaf(lambda x: op(False, x), td))

    @pytest.mark.parametrize("op", [operator.or_, operator.xor], ids=["or", "xor"])
    def test_logic_with_tensor(self, op):
        td, mask = make() > 0, torch.tensor([[True, False, True], [False, True, False]])
        assert_leaves(op(td, mask), by_leaf(lambda x: op(x, expand_right(mask, x)), td))

    def test_and_with_tensor_ours(self):
        td, mask = make() > 0, torch.tensor([[True, False, True], [False, True, False]])
        assert_leaves(td & mask, by_leaf(lambda x: x & expand_right(mask, x), td))

    @pytest.mark.parametrize("other", ["text", None])
    def test_arithmetic_with_foreign_things_raises(self, other):
        with pytest.raises(TypeError):
            make() + other

    def test_bool_is_ambiguous_and_hash_is_refused(self):
        with pytest.raises(RuntimeError):
            bool(make() == make())
        with pytest.raises(TypeError):
            hash(make())

    def test_sum_of_list(self):
        tds = [make(start=s / 10) for s in range(3)]
        assert_leaves(sum(tds), tds[0] + tds[1] + tds[2])


class TestStructure:
    """What the result keeps besides the values."""

    def test_names_and_device_stay(self):
        td = TensorDict({"a": leaf(B, T)}, [B, T], names=["b", "t"], device="cpu")
        for result in (td + 1, td * td, td.sin(), -td):
            assert result.names == ["b", "t"]
            assert result.device == torch.device("cpu")

    def test_device_is_that_of_the_left_operand(self):
        free, fixed = make(), make().to("cpu")
        assert (free + fixed).device is None
        assert (fixed + free).device == torch.device("cpu")

    def test_nested_batch_sizes_stay(self):
        td = TensorDict({"a": leaf(B, T), "n": TensorDict({"b": leaf(B, T)}, [B, T])}, [B])
        for result in (td + 1, td + td, td.exp(), td == 1, td + torch.ones(B), td.isnan()):
            assert result.batch_size == torch.Size([B])
            assert result["n"].batch_size == torch.Size([B, T])

    def test_empty(self):
        td = TensorDict({}, [B])
        for result in (td + 1, td + TensorDict({}, [B]), td.sin(), td == td, 2 * td, td.add_(1)):
            assert result.is_empty()
            assert result.batch_size == torch.Size([B])

    def test_non_tensor_entries_pass_through(self):
        td = TensorDict({"a": leaf(B), "label": "text"}, [B])
        for result in (td + 1, td + td, td.sin(), -td):
            assert result["label"] == "text"
        assert_leaves((td * 2).exclude("label"), {"a": td["a"] * 2})

    def test_locked_source(self):
        td = make().lock_()
        for result in (td + 1, td * td, td.abs(), td.isfinite()):
            assert result.is_locked
        assert not (td == td).is_locked
        assert not td.sum(0).is_locked

    def test_lazy_with_dense(self):
        td = lazy_stack([make(start=0.1), make(start=0.3)])
        dense = TensorDict(leaves(td), td.batch_size)
        left, right = td + dense, dense + td
        assert type(left) is LazyStackedTensorDict
        assert type(right) is TensorDict
        assert_leaves(left, right)

    def test_lazy_stack_dim_1(self):
        tds = [TensorDict({"a": leaf(B, A, start=i)}, [B]) for i in range(T)]
        td, other = lazy_stack(tds, 1), leaf(B, T)
        result = td + other
        assert result.stack_dim == 1
        assert result.batch_size == torch.Size([B, T])
        torch.testing.assert_close(result["a"], td["a"] + other[..., None])

    def test_heterogeneous_lazy_stack(self):
        td = lazy_stack([TensorDict({"a": leaf(n)}, []) for n in (2, 3)])
        for result, fn in (
            (td + 1, lambda x: x + 1),
            (td * td, lambda x: x * x),
            (td.exp(), torch.exp),
        ):
            for got, source in zip(result.unbind(0), td.unbind(0), strict=True):
                torch.testing.assert_close(got["a"], fn(source["a"]))

    def test_dtype_promotion_follows_torch(self):
        td = TensorDict({"i": torch.arange(B), "f": leaf(B), "d": leaf(B).double()}, [B])
        assert {k: v.dtype for k, v in leaves(td + 0.5).items()} == {
            "i": torch.float32,
            "f": torch.float32,
            "d": torch.float64,
        }
        assert (td / td)["i"].dtype is torch.float32


REDUCE = "mean sum nanmean nansum prod std var amin amax quantile".split()
DIMS = [0, 1, -1, (0, 1), (1,), (-1, 0)]
TUPLES = "mean sum nanmean nansum std var".split()


def reduce(td, op, *args, **kwargs):
    return getattr(td, op)(*((0.25, *args) if op == "quantile" else args), **kwargs)


def reduce_leaf(x, op, dim=None, **kwargs):
    """The torch function on one leaf; without a dim, over all of it."""
    extra = (0.25,) if op == "quantile" else ()
    if dim is None:
        return getattr(torch, op)(x, *extra, **kwargs)
    return getattr(torch, op)(x, *extra, dim=dim, **kwargs)


def batch_dim(dim, ndim):
    """Negative dims count from the end of the batch."""
    return tuple(d % ndim for d in dim) if isinstance(dim, tuple) else dim % ndim


class TestReductions:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("op", REDUCE)
    def test_all_dims(self, op, kind):
        td = make(kind)
        for result in (reduce(td, op), reduce(td, op, dim=None), reduce(td, op, reduce=False)):
            assert_leaves(result, by_leaf(lambda x: reduce_leaf(x, op), td))
            assert result.batch_size == torch.Size([])
            assert type(result) is TensorDict

    @pytest.mark.parametrize("keepdim", [False, True])
    @pytest.mark.parametrize(
        ("op", "dim"),
        [(o, d) for o in REDUCE for d in DIMS if o in TUPLES or isinstance(d, int)],
        ids=str,
    )
    def test_dim(self, op, dim, keepdim):
        td = make()
        result = reduce(td, op, dim=dim, keepdim=keepdim)
        dims = batch_dim(dim, 2)
        assert_leaves(result, by_leaf(lambda x: reduce_leaf(x, op, dim=dims, keepdim=keepdim), td))
        expected = torch.ones(B, T).sum(dims, keepdim=keepdim).shape
        assert result.batch_size == expected
        assert result["n", "m"].batch_size == expected

    @pytest.mark.parametrize("op", REDUCE)
    def test_dim_positional_and_lazy(self, op):
        td = make("lazy")
        assert_leaves(reduce(td, op, 0), by_leaf(lambda x: reduce_leaf(x, op, dim=0), td))
        assert_leaves(reduce(td, op, 1), by_leaf(lambda x: reduce_leaf(x, op, dim=1), td))

    @pytest.mark.parametrize("op", [*REDUCE, "min", "max", "cummin", "cummax", "softmax"])
    def test_dim_beyond_the_batch(self, op):
        with pytest.raises(IndexError, match="Incompatible dim 2"):
            reduce(make(), op, dim=2)

    @pytest.mark.parametrize("op", ["mean", "sum", "nanmean", "nansum", "std", "var", "quantile"])
    def test_keepdim_without_dim(self, op):
        td = make()
        result = reduce(td, op, keepdim=True)
        assert result.batch_size == torch.Size([1, 1])
        expected = by_leaf(lambda x: reduce_leaf(x, op).reshape((1,) * x.ndim), td)
        assert_leaves(result, expected)

    @pytest.mark.parametrize("op", ["mean", "sum", "nanmean", "nansum", "prod", "amin", "amax"])
    def test_reduce_true_over_everything(self, op):
        td = make(start=0.5)
        result = reduce(td, op, reduce=True)
        assert isinstance(result, torch.Tensor)
        torch.testing.assert_close(
            result, reduce_leaf(torch.cat([v.flatten() for v in leaves(td).values()]), op)
        )

    @pytest.mark.parametrize("op", ["std", "var", "quantile"])
    def test_reduce_true_statistics_are_those_of_all_elements(self, op):
        td = make()
        result = reduce(td, op, reduce=True)
        torch.testing.assert_close(
            result, reduce_leaf(torch.cat([v.flatten() for v in leaves(td).values()]), op)
        )

    @pytest.mark.parametrize("op", REDUCE)
    @pytest.mark.parametrize("dim", [0, 1])
    def test_reduce_true_along_dim_joins_the_leaves_there(self, op, dim):
        td = TensorDict({"a": leaf(B, T, start=0.2), "n": {"b": leaf(B, T, start=0.7)}}, [B, T])
        joined = torch.cat([td["a"], td["n", "b"]], dim)
        torch.testing.assert_close(
            reduce(td, op, dim=dim, reduce=True), reduce_leaf(joined, op, dim=dim)
        )

    @pytest.mark.parametrize("op", ["mean", "sum"])
    def test_reduce_true_along_dim_of_unlike_leaves(self, op):
        with pytest.raises(RuntimeError):
            reduce(make(), op, dim=0, reduce=True)

    @pytest.mark.parametrize("op", ["mean", "sum", "nanmean", "nansum", "prod", "quantile"])
    def test_feature(self, op):
        """All dims after the batch, whatever their number; a leaf without any is its own result."""
        td = make()
        result = reduce(td, op, dim="feature")
        assert result.batch_size == td.batch_size
        expected = by_leaf(lambda x: reduce_leaf(x.reshape(B, T, -1), op, dim=-1), td)
        assert_leaves(result, expected)

    @pytest.mark.parametrize("op", ["std", "var"])
    def test_feature_statistics(self, op):
        td = make().exclude(("n", "b"))
        expected = by_leaf(lambda x: reduce_leaf(x.reshape(B, T, -1), op, dim=-1), td)
        assert_leaves(reduce(td, op, dim="feature"), expected)

    @pytest.mark.parametrize("op", REDUCE)
    def test_feature_reduce_true_gives_one_tensor_of_the_batch_shape(self, op):
        td = make(start=0.5)
        joined = torch.cat([v.reshape(B, T, -1) for v in leaves(td).values()], -1)
        result = reduce(td, op, dim="feature", reduce=True)
        assert result.shape == (B, T)
        torch.testing.assert_close(result, reduce_leaf(joined, op, dim=-1))

    @pytest.mark.parametrize("op", ["mean", "sum", "nanmean", "nansum", "prod"])
    def test_dtype(self, op):
        td = make() if op == "nanmean" else make().int()
        for kwargs in ({}, {"dim": 0}):
            result = reduce(td, op, dtype=torch.float64, **kwargs)
            assert {v.dtype for v in leaves(result).values()} == {torch.float64}
            assert_leaves(
                result, {k: reduce_leaf(v.double(), op, **kwargs) for k, v in leaves(td).items()}
            )

    def test_mean_of_ints_is_refused(self):
        with pytest.raises(RuntimeError, match="dtype"):
            make().int().mean()

    @pytest.mark.parametrize("op", ["std", "var"])
    @pytest.mark.parametrize("correction", [0, 1, 2])
    def test_correction(self, op, correction):
        td = make().exclude(("n", "b"))
        fn = getattr(torch, op)
        assert_leaves(
            getattr(td, op)(dim=1, correction=correction),
            by_leaf(lambda x: fn(x, dim=1, correction=correction), td),
        )
        torch.testing.assert_close(
            getattr(td, op)(correction=correction, reduce=True),
            fn(torch.cat([v.flatten() for v in leaves(td).values()]), correction=correction),
        )

    @pytest.mark.parametrize("op", ["nanmean", "nansum"])
    def test_nan_is_skipped(self, op):
        td = TensorDict({"a": torch.tensor([[1.0, math.nan, 3.0], [4.0, 5.0, math.nan]])}, [B])
        assert_leaves(getattr(td, op)(), by_leaf(getattr(torch, op), td))
        assert not getattr(td, op)(dim=0).isnan().any()

    @pytest.mark.parametrize("interpolation", ["linear", "lower", "higher", "nearest", "midpoint"])
    def test_quantile_interpolation(self, interpolation):
        td = make()
        result = td.quantile(0.3, dim=1, interpolation=interpolation)
        assert_leaves(
            result, by_leaf(lambda x: x.quantile(0.3, dim=1, interpolation=interpolation), td)
        )

    def test_quantile_of_several(self):
        td, q = make(), torch.tensor([0.1, 0.5, 0.9, 1.0])
        result = td.quantile(q, dim=0)
        assert result.batch_size == torch.Size([4, T])
        assert_leaves(result, by_leaf(lambda x: x.quantile(q, dim=0), td))

    @pytest.mark.parametrize("op", ["mean", "sum", "std", "var"])
    def test_torch_function(self, op):
        td, fn = make(), getattr(torch, op)
        assert_leaves(fn(td), getattr(td, op)())
        assert_leaves(fn(td, dim=0), getattr(td, op)(dim=0))
        assert_leaves(fn(td, 0, keepdim=True), getattr(td, op)(0, keepdim=True))

    def test_names(self):
        td = TensorDict({"a": leaf(B, T)}, [B, T], names=["b", "t"])
        assert td.sum(0).names == ["t"]
        assert td.mean(dim=1, keepdim=True).names == ["b", "t"]
        assert td.any(0).names == ["t"]

    def test_nested_batch_sizes(self):
        td = TensorDict({"a": leaf(B, T), "n": TensorDict({"b": leaf(B, T)}, [B, T])}, [B])
        assert td.mean(0)["n"].batch_size == torch.Size([T])
        assert td.sum()["n"].batch_size == torch.Size([])
        assert td.sum(0, keepdim=True)["n"].batch_size == torch.Size([1, T])
        assert td.sum("feature")["n"].batch_size == torch.Size([B, T])

    def test_empty(self):
        td = TensorDict({}, [B])
        assert td.sum().is_empty()
        assert td.mean(0).is_empty()
        with pytest.raises(ValueError, match="no tensor leaves"):
            td.sum(reduce=True)

    def test_device_stays(self):
        assert make().to("cpu").mean(0).device == torch.device("cpu")

    def test_gradient(self):
        td = make().requires_grad_()
        td.mean(reduce=True).backward()
        total = sum(v.numel() for v in leaves(td).values())
        for value in leaves(td).values():
            torch.testing.assert_close(value.grad, torch.full_like(value, 1 / total))


class TestMinMax:
    @pytest.mark.parametrize("op", ["min", "max"])
    def test_all_dims(self, op):
        td = make()
        for result in (
            getattr(td, op)(),
            getattr(td, op)(dim=None),
            getattr(td, op)(return_indices=False),
        ):
            assert_leaves(result, by_leaf(getattr(torch, op), td))
        everything = torch.cat([v.flatten() for v in leaves(td).values()])
        torch.testing.assert_close(getattr(td, op)(reduce=True), getattr(everything, op)())

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("keepdim", [False, True])
    @pytest.mark.parametrize("dim", [0, 1, -1])
    @pytest.mark.parametrize("op", ["min", "max"])
    def test_dim(self, op, dim, keepdim, kind):
        td, fn = make(kind), getattr(torch, op)
        d = dim % 2
        result = getattr(td, op)(dim=dim, keepdim=keepdim)
        assert_leaves(result.values, by_leaf(lambda x: fn(x, d, keepdim=keepdim).values, td))
        assert_leaves(result.indices, by_leaf(lambda x: fn(x, d, keepdim=keepdim).indices, td))
        assert result.values.batch_size == torch.ones(B, T).sum(d, keepdim=keepdim).shape
        values, indices = result
        assert values is result.values and indices is result.indices
        assert_leaves(getattr(td, op)(dim, keepdim, return_indices=False), result.values)

    @pytest.mark.parametrize("op", ["cummin", "cummax"])
    @pytest.mark.parametrize("dim", [0, 1, -1])
    def test_cumulative(self, op, dim):
        td, fn, d = make(), getattr(torch, op), dim % 2
        result = getattr(td, op)(dim)
        assert_leaves(result.values, by_leaf(lambda x: fn(x, d).values, td))
        assert_leaves(result.indices, by_leaf(lambda x: fn(x, d).indices, td))
        assert result.values.batch_size == td.batch_size
        assert_leaves(getattr(td, op)(dim=dim, return_indices=False), result.values)

    @pytest.mark.parametrize("op", ["min", "max"])
    def test_reduce_true_along_dim(self, op):
        td = TensorDict({"a": leaf(B, T, start=0.2), "n": {"b": leaf(B, T, start=0.7)}}, [B, T])
        expected = getattr(torch, op)(torch.cat([td["a"], td["n", "b"]], 0), 0)
        result = getattr(td, op)(dim=0, reduce=True)
        torch.testing.assert_close(result.values, expected.values)
        torch.testing.assert_close(result.indices, expected.indices)


class TestAnyAll:
    @pytest.mark.parametrize("kind", KINDS)
    def test_without_dim_gives_a_bool(self, kind):
        td = make(kind) > 0
        assert td.any() is True
        assert td.all() is False
        assert (td | ~td).all() is True
        assert (td & ~td).any() is False

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("op", ["any", "all"])
    @pytest.mark.parametrize("dim", [0, 1, -1, -2])
    def test_dim(self, op, dim, kind):
        td = make(kind) > 0
        result = getattr(td, op)(dim)
        assert_leaves(result, by_leaf(lambda x: getattr(torch, op)(x, dim=dim % 2), td))
        assert result.batch_size == td.batch_size[1 - dim % 2 : 2 - dim % 2]

    @pytest.mark.parametrize("op", ["any", "all"])
    def test_dim_out_of_range(self, op):
        for dim in (2, -3):
            with pytest.raises(RuntimeError, match="dim must be"):
                getattr(make(), op)(dim=dim)

    def test_empty(self):
        assert TensorDict({}, [B]).any() is False
        assert TensorDict({}, [B]).all() is True

    def test_non_tensor_entries_do_not_count(self):
        td = TensorDict({"a": torch.ones(B), "label": "text"}, [B])
        assert td.any() is True
        assert td.all() is True

    def test_numbers_count_as_truth(self):
        assert TensorDict({"a": torch.tensor([0.0, 2.0])}, [B]).any() is True
        assert TensorDict({"a": torch.tensor([0.0, 2.0])}, [B]).all() is False


class TestNormSoftmaxLogsumexp:
    @pytest.mark.parametrize("kind", KINDS)
    def test_norm_of_each_leaf(self, kind):
        td = make(kind)
        result = td.norm()
        assert_leaves(result, by_leaf(lambda x: x.norm(), td))
        assert result.batch_size == torch.Size([])
        assert_leaves(td.norm(dtype=torch.float64), by_leaf(lambda x: x.double().norm(), td))

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("dim", [0, 1, -1])
    def test_softmax(self, dim, kind):
        td = make(kind)
        result = td.softmax(dim)
        assert_leaves(result, by_leaf(lambda x: x.softmax(dim % 2), td))
        assert result.batch_size == td.batch_size

    def test_softmax_dtype(self):
        td = make()
        assert_leaves(
            td.softmax(dim=0, dtype=torch.float64),
            by_leaf(lambda x: x.softmax(0, dtype=torch.float64), td),
        )

    @pytest.mark.parametrize("keepdim", [False, True])
    @pytest.mark.parametrize("dim", DIMS, ids=str)
    def test_logsumexp(self, dim, keepdim):
        td, dims = make(), batch_dim(dim, 2)
        result = td.logsumexp(dim, keepdim)
        assert_leaves(result, by_leaf(lambda x: x.logsumexp(dims, keepdim), td))
        assert result.batch_size == torch.ones(B, T).sum(dims, keepdim=keepdim).shape

    def test_logsumexp_default_is_over_the_batch(self):
        td = make()
        assert_leaves(td.logsumexp(), by_leaf(lambda x: x.logsumexp((0, 1)), td))
        assert td.logsumexp().batch_size == torch.Size([])


class TestLosses:
    LOSSES = ["mse_loss", "l1_loss", "smooth_l1_loss"]

    @pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
    @pytest.mark.parametrize("name", LOSSES)
    def test_leaf_by_leaf(self, name, reduction):
        loss, td, target = getattr(torch.nn.functional, name), make(), make(start=0.3)
        result = loss(td, target, reduction=reduction)
        assert_leaves(result, by_leaf(lambda x, y: loss(x, y, reduction=reduction), td, target))
        assert result.batch_size == (td.batch_size if reduction == "none" else torch.Size([]))

    @pytest.mark.parametrize("name", LOSSES)
    def test_wrong_reduction(self, name):
        with pytest.raises(ValueError, match="reduction"):
            getattr(torch.nn.functional, name)(make(), make(), reduction="bad")


class TestAutogradGrad:
    def test_gradient_container(self):
        td = make().requires_grad_()
        out = td.pow(2)
        grads = torch.autograd.grad(out, td, out.detach() * 0 + 1)
        assert_leaves(grads, by_leaf(lambda x: 2 * x.detach(), td))
        assert grads.batch_size == td.batch_size


class TestKeyTransform:
    CALLS = ["sum", "mean", "std", "var", "quantile"]

    @pytest.mark.parametrize("name", CALLS)
    def test_names_of_the_result(self, name):
        args = (0.5,) if name == "quantile" else ()
        td = TensorDict({"a": leaf(B, T), "n": {"x": leaf(B)}}, [B])
        out = getattr(td, name)(*args, 0, key_transform=lambda key: f"{name}_{key}")
        want = getattr(td, name)(*args, 0)
        assert set(out.keys(True, True)) == {f"{name}_a", (f"{name}_n", f"{name}_x")}
        assert torch.equal(out[f"{name}_a"], want["a"])
        assert out.batch_size == out[f"{name}_n"].batch_size == ()

    def test_nested_names_and_one_tensor(self):
        td = TensorDict({"a": leaf(B, T)}, [B])
        assert td.sum(key_transform=lambda key: (key, "sum"))["a", "sum"].shape == ()
        assert isinstance(td.sum(reduce=True, key_transform=str), torch.Tensor)
