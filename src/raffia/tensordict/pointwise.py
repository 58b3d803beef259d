"""Maths leaf by leaf, made from the tables in this file.

All leaves go through one `torch._foreach_*` call where there is one; inside a functorch transform
(vmap, grad), which has no rules for these, through the plain function.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from raffia.tensordict import kinds
from raffia.tensordict.node import Container, Node, has_tensors
from raffia.tensordict.unbatched import UnbatchedTensor
from raffia.tensordict.views import completed

UNARY = """abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p
log2 neg reciprocal round sigmoid sign sin sinh sqrt tan tanh trunc""".split()
TESTS = "isnan isfinite isposinf isneginf isreal".split()
BINARY = (
    "add sub mul div pow maximum minimum clamp_max clamp_min".split()
)  # with foreach, inplace and not
PLAIN = dict(mod=torch.remainder, bitwise_and=torch.bitwise_and, logical_and=torch.logical_and)
COMPARISONS = "eq ne lt le gt ge".split()
OPERATORS = dict(  # operator -> method; those marked with r swap their operands
    add="add", sub="sub", mul="mul", truediv="div", pow="pow", mod="mod",
    radd="add", rsub="rsub", rmul="mul", rtruediv="rdiv", rpow="rpow",
    floordiv="floordiv", iadd="add_", isub="sub_", imul="mul_", itruediv="div_", ipow="pow_",
)  # fmt: skip
LOGIC = "xor or_ and_".split()
NUMBERS: Any = (bool, int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)


def each(
    foreach: Any, single: Callable[..., Tensor], leaves: list[Tensor], *others: Any, **options: Any
) -> Sequence[Tensor]:
    """Call `foreach` on all leaves together, or `single` on one after the other.

    Operands are lists, or the same for all.
    """
    if not leaves:
        return leaves
    if foreach is not None and torch._C._functorch.peek_interpreter_stack() is None:
        try:
            return foreach(leaves, *others, **options)
        except RuntimeError as error:
            jagged = isinstance(error, NotImplementedError) and any([x.is_nested for x in leaves])
            if not jagged and "Autograd not support dtype" not in str(error):
                raise  # else the function of one tensor can: of integers, next to a gradient
    columns = [other if other.__class__ is list else [other] * len(leaves) for other in others]
    return [single(*operands, **options) for operands in zip(leaves, *columns, strict=True)]


def rebuilt(td: Container, leaves: Iterable[Any]) -> Container:
    out: Container = td._rebuild(iter(leaves))
    return out.lock_() if td._locked else out


def paired(mine: Any, theirs: Any, out: list[Any], exact: bool) -> None:
    """Append the leaves of `theirs` that stand at the keys of `mine`.

    exact: KeyError also if `theirs` has keys that `mine` has not. What holds no tensors, such as a
        text, may be in one of them only.
    """
    if mine.__class__ is kinds.SubTensorDict:  # its leaves are those of what it reads
        mine = mine._rows()
    pairs = mine._pairs(theirs)
    if len(pairs) == 1 and pairs[0][0] is mine and hasattr(mine, "tensordicts"):
        parts = broadcast_parts(mine, theirs)  # since its leaves are those of its members
        pairs = list(zip(mine.tensordicts, parts, strict=True))
    for a, b in pairs:
        if a is not mine:
            paired(a, b, out, exact)
            continue
        left, right = a._entries(), b._entries()
        same_keys = len(left) == len(right)
        for name, value in left.items():
            other = right.get(name)
            if other is None:
                if has_tensors(value):
                    raise key_mismatch(left, right)
                same_keys = False
                continue
            if isinstance(value, UnbatchedTensor):
                out.append(other._plain_tensor() if isinstance(other, UnbatchedTensor) else other)
            elif isinstance(value, Node):
                if not value._is_data():
                    paired(value, other, out, exact)
            else:
                out.append(other)
        if exact and not same_keys:
            if any([name not in left and has_tensors(value) for name, value in right.items()]):
                raise key_mismatch(left, right)


def broadcast_parts(stack: Any, other: Any) -> Sequence[Any]:
    """The broadcast operand for each member of a lazy stack, aligned at the last dimension."""
    num = len(stack.tensordicts)
    dim = stack.stack_dim - len(stack._batch_size) + len(other._batch_size)
    if dim < 0:
        return [other] * num
    size = other._batch_size[dim]
    if size not in (1, num):
        raise RuntimeError(
            f"a container of batch size {tuple(other._batch_size)} can't be broadcast to "
            f"{tuple(stack._batch_size)}"
        )
    parts = other.unbind(dim)
    return parts if size == num else parts * num


def key_mismatch(left: dict[str, Any], right: dict[str, Any]) -> KeyError:
    first = sorted(k for k in left if k not in right)
    second = sorted(k for k in right if k not in left)
    text = "keys in tensordicts mismatch."
    if first:
        text += f" The first has {first}, which the second does not have."
    if second:
        text += f" The second has {second}, which the first does not have."
    return KeyError(
        text + " Pass default=value or default='intersection' where the operation takes it."
    )


def operand(td: Any, other: Any, leaves: list[Tensor], exact: bool = True) -> Any:
    """The other operand as `each` takes it: a number, or a list with a tensor for each leaf."""
    if isinstance(other, Node):
        out: list[Any] = []
        paired(td, other, out, exact)
        return out
    if isinstance(other, Tensor):
        if other.dim() == 0:
            return [other] * len(leaves)
        return td._spread(other, [])
    return other


def broadcast(td: Any, other: Any) -> tuple[Any, Any]:
    """Expand both operands to a common batch size; for a tensor, it is the shape."""
    if isinstance(other, Node):
        if other._batch_size != td._batch_size:
            size = _common_size(td, other._batch_size, "a container of batch size")
            td = td if size == td._batch_size else td.expand(size)
    elif isinstance(other, Tensor) and other.dim() and other.shape != td._batch_size:
        size = _common_size(td, other.shape, "a tensor of shape")
        if size != td._batch_size:
            td = td.expand(size)
        other = other.expand(size)
    return td, other


def _common_size(td: Any, shape: torch.Size, what: str) -> torch.Size:
    try:
        return torch.broadcast_shapes(shape, td._batch_size)
    except RuntimeError as error:
        raise RuntimeError(
            f"{what} {tuple(shape)} does not broadcast with the batch size "
            f"{tuple(td._batch_size)}; td.apply(lambda x: ...) computes with tensors that have "
            "the shape of the entries"
        ) from error


def binary(td: Container, name: str, other: Any, default: Any = None, **options: Any) -> Container:
    """A binary operation that gives a new container."""
    foreach, single = _FOREACH.get(name), _SINGLE[name]
    if default is not None and isinstance(other, Node):
        td, other = completed(td, other, _filler(default))
    if foreach is not None and isinstance(other, NUMBERS) and "alpha" in options:
        other = other * options.pop("alpha")
    td, other = broadcast(td, other)
    leaves = td._leaves([])
    return rebuilt(td, each(foreach, single, leaves, operand(td, other, leaves), **options))


def binary_(td: Container, name: str, other: Any, **options: Any) -> Container:
    """A binary operation that writes into the leaves (inplace)."""
    if isinstance(other, NUMBERS) and "alpha" in options:
        other = other * options.pop("alpha")
    if isinstance(other, Tensor) and other.dim():
        other = other.expand(td._batch_size)
    leaves = td._leaves([])
    each(
        _FOREACH[name + "_"],
        _SINGLE[name + "_"],
        leaves,
        operand(td, other, leaves, exact=False),
        **options,
    )
    return td


def _filler(default: Any) -> Callable[[Tensor], Any] | None:
    """What `default` gives for an entry that only one container has; None to leave that out."""
    if isinstance(default, str) and default == "intersection":
        return None
    if isinstance(default, NUMBERS):
        return lambda leaf: torch.full_like(leaf, default)
    return lambda leaf: default


_NAMES = (*BINARY, "lerp", "addcmul", "addcdiv")
_SINGLE: dict[str, Any] = {name: getattr(torch, name) for name in _NAMES}
_SINGLE |= {f"{name}_": getattr(Tensor, f"{name}_", None) for name in _NAMES}
_SINGLE["maximum_"] = lambda x, y: x.copy_(torch.maximum(x, y))
_SINGLE["minimum_"] = lambda x, y: x.copy_(torch.minimum(x, y))
_SINGLE |= PLAIN | {"rsub": torch.rsub}  # which have no function of many tensors
_FOREACH: dict[str, Any] = {
    name: getattr(torch, f"_foreach_{name}") for stem in _NAMES for name in (stem, f"{stem}_")
}


def _scalar_bound(name: str, single: Any) -> Callable[..., Tensor]:
    """`maximum` and `minimum` with a number are `clamp_min` and `clamp_max`."""
    number = torch.clamp_min if name == "maximum" else torch.clamp_max
    return lambda x, y: single(x, y) if isinstance(y, Tensor) else number(x, y)


for _name in ("maximum", "minimum"):
    _SINGLE[_name] = _scalar_bound(_name, _SINGLE[_name])


def compared(td: Any, other: Any, compare: Callable[[Any, Any], Any]) -> Any:
    """A container of truth values; False for what is neither container, tensor nor number."""
    if isinstance(other, Node):
        return (
            td._compared(other, compare) if td._is_data() else _compared_nodes(td, other, compare)
        )
    if isinstance(other, Tensor):
        td, other = broadcast(td, other)
        leaves = td._leaves([])
        operands = operand(td, other, leaves)
        out = td._rebuild(iter([compare(a, b) for a, b in zip(leaves, operands, strict=True)]))
        return out if other.dim() else unnamed(out)
    if isinstance(other, Mapping):
        return _compared_nodes(td, td._plain(other, batch_size=td._batch_size), compare)
    if not isinstance(other, NUMBERS):
        return NotImplemented
    return unnamed(td._rebuild(iter([compare(leaf, other) for leaf in td._leaves([])])))


def unnamed(td: Container) -> Container:
    """Remove the names of dimensions, which comparisons of containers do not keep."""
    if td._names is not None:
        named: Any = td
        named.names = None
    return td


def _compared_nodes(mine: Any, theirs: Any, compare: Callable[[Any, Any], Any]) -> Any:
    """The comparison of two containers; batch sizes that differ broadcast as their leaves do."""
    size, same_size = mine._batch_size, mine._batch_size == theirs._batch_size
    if same_size:
        pairs = mine._pairs(theirs)
        if len(pairs) != 1 or pairs[0][0] is not mine:
            return mine._of_members([_compared_nodes(a, b, compare) for a, b in pairs])
    else:
        size = _compared_size(mine, theirs)
    left, right = mine._entries(), theirs._entries()
    if left.keys() != right.keys():
        if any([isinstance(node, kinds.TensorClass) for node in (mine, theirs)]):
            left, right = _without_none(left), _without_none(right)
        if left.keys() != right.keys():
            raise key_mismatch(left, right)
    entries = {}
    for name, a in left.items():
        b = right[name]
        if not isinstance(a, Node):
            out = compare(a, b)
        elif not a._is_data():
            out = _compared_nodes(a, b, compare)
        else:
            if not same_size:
                a = a.expand(torch.broadcast_shapes(a._batch_size, b.shape))
            out = a._compared(b, compare)
        if not same_size and out.shape[: len(size)] != size:
            raise RuntimeError(
                f"containers of batch sizes {mine._batch_size} and {theirs._batch_size} can't be "
                f"compared: what comes out for entry {name!r} has the shape {tuple(out.shape)}"
            )
        entries[name] = out
    return mine._new(entries, size)


def _without_none(entries: dict[str, Any]) -> dict[str, Any]:
    """The entries that are not None, which as the field of a tensorclass is not an entry."""
    data = kinds.NonTensorData
    return {k: v for k, v in entries.items() if not isinstance(v, data) or v.data is not None}


def _compared_size(mine: Any, theirs: Any) -> torch.Size:
    try:
        return torch.broadcast_shapes(mine._batch_size, theirs._batch_size)
    except RuntimeError as error:
        raise RuntimeError(
            f"containers of batch sizes {mine._batch_size} and {theirs._batch_size} "
            f"can't be compared: {error}"
        ) from error


Operand = Node | Tensor | float  # with the same keys, or what broadcasts with the batch size
Default = float | Tensor | str | None  # for entries that only one operand has


class Pointwise:
    """Maths leaf by leaf; the methods are made from the tables above."""

    if TYPE_CHECKING:  # what `_install` makes
        # fmt: off
        def abs(self) -> Self: ...
        acos = asin = atan = ceil = cos = cosh = erf = erfc = exp = expm1 = floor = frac = abs
        lgamma = log = log10 = log1p = log2 = neg = reciprocal = round = sigmoid = sign = sin = abs
        sinh = sqrt = tan = tanh = trunc = isnan = isfinite = isposinf = isneginf = isreal = abs
        abs_ = acos_ = asin_ = atan_ = ceil_ = cos_ = cosh_ = erf_ = erfc_ = exp_ = expm1_ = abs
        floor_ = frac_ = lgamma_ = log_ = log10_ = log1p_ = log2_ = neg_ = reciprocal_ = abs
        round_ = sigmoid_ = sign_ = sin_ = sinh_ = sqrt_ = tan_ = tanh_ = trunc_ = abs
        def add(
            self, other: Operand, *, alpha: float | None = None, default: Default = None
        ) -> Self: ...
        sub = add
        def mul(self, other: Operand, default: Default = None) -> Self: ...
        div = pow = maximum = minimum = clamp_max = clamp_min = bitwise_and = logical_and = mul
        def add_(self, other: Operand, alpha: float | None = None) -> Self: ...
        sub_ = add_
        def mul_(self, other: Operand) -> Self: ...
        div_ = pow_ = maximum_ = minimum_ = clamp_max_ = clamp_min_ = mul_
        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = mul_
        __rtruediv__ = __floordiv__ = __pow__ = __mod__ = __iadd__ = __isub__ = __imul__ = mul_
        __itruediv__ = __ipow__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = mul_
        __lt__ = __le__ = __gt__ = __ge__ = mul_
        def __eq__(self, other: object) -> Self: ...  # type: ignore[override]
        def __ne__(self, other: object) -> Self: ...  # type: ignore[override]
        # fmt: on

    def rsub(self, other: Operand, *, alpha: float | None = None, default: Default = None) -> Self:
        """`other - alpha * self`, leaf by leaf.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.ones(2)).rsub(3.0)["a"]
        tensor([2., 2.])
        """
        td: Any = self
        return binary(td, "rsub", other, default, **({} if alpha is None else {"alpha": alpha}))

    def lerp(self, end: Operand, weight: Operand) -> Self:
        """Linear interpolation, leaf by leaf: `self + weight * (end - self)`.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.zeros(2)).lerp(TensorDict(a=torch.ones(2)), 0.25)["a"]
        tensor([0.2500, 0.2500])
        """
        return _ternary(self, "lerp", end, weight)

    def lerp_(self, end: Operand, weight: Operand) -> Self:
        """The inplace form of `lerp`.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.zeros(2)).lerp_(TensorDict(a=torch.ones(2)), 0.25)["a"]
        tensor([0.2500, 0.2500])
        """
        return _ternary(self, "lerp", end, weight, True)

    def addcmul(self, other1: Operand, other2: Operand, *, value: float | None = 1) -> Self:
        """`self + value * other1 * other2`, leaf by leaf.

        >>> from raffia import TensorDict
        >>> one = TensorDict(a=torch.ones(2))
        >>> one.addcmul(one, one, value=3)["a"]
        tensor([4., 4.])
        """
        return _ternary(self, "addcmul", other1, other2, value=value)

    def addcmul_(self, other1: Operand, other2: Operand, *, value: float | None = 1) -> Self:
        """The inplace form of `addcmul`.

        >>> from raffia import TensorDict
        >>> one = TensorDict(a=torch.ones(2))
        >>> one.clone().addcmul_(one, one)["a"]
        tensor([2., 2.])
        """
        return _ternary(self, "addcmul", other1, other2, True, value=value)

    def addcdiv(self, other1: Operand, other2: Operand, value: float | None = 1) -> Self:
        """`self + value * other1 / other2`, leaf by leaf.

        >>> from raffia import TensorDict
        >>> one = TensorDict(a=torch.ones(2))
        >>> one.addcdiv(one, one * 2)["a"]
        tensor([1.5000, 1.5000])
        """
        return _ternary(self, "addcdiv", other1, other2, value=value)

    def addcdiv_(self, other1: Operand, other2: Operand, *, value: float | None = 1) -> Self:
        """The inplace form of `addcdiv`.

        >>> from raffia import TensorDict
        >>> one = TensorDict(a=torch.ones(2))
        >>> one.clone().addcdiv_(one, one)["a"]
        tensor([2., 2.])
        """
        return _ternary(self, "addcdiv", other1, other2, True, value=value)

    def clamp(
        self, min: Operand | None = None, max: Operand | None = None, *, out: Any = None
    ) -> Self:
        """Values limited to `min` and `max`: numbers, or containers.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.tensor([-1.0, 5.0])).clamp(0, 1)["a"]
        tensor([0., 1.])
        """
        if min is None and max is None:
            raise TypeError("clamp needs min, max or both")
        if min is not None and max is not None and isinstance(min, Node) != isinstance(max, Node):
            raise ValueError(
                "clamp: Mixed tensordict and non-tensordict min/max values are not authorized."
            )
        result: Any = self
        if min is not None:
            result = binary(result, "clamp_min", min)
        if max is not None:
            result = binary(result, "clamp_max", max)
        return result if out is None else out.update_(result)

    def mod(self, other: Operand) -> Self:
        """`torch.remainder` leaf by leaf.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.tensor([5.0])).mod(3)["a"]
        tensor([2.])
        """
        td: Any = self
        return binary(td, "mod", other)

    def __invert__(self) -> Self:
        """Apply not (`~`) to each leaf.

        >>> from raffia import TensorDict
        >>> (~TensorDict(a=torch.tensor([True, False])))["a"]
        tensor([False,  True])
        """
        td: Any = self
        return rebuilt(td, [~leaf for leaf in td._leaves([])])

    def __neg__(self) -> Self:
        return self.neg()

    def __abs__(self) -> Self:
        return self.abs()


def _ternary(
    td: Any, name: str, first: Any, second: Any, inplace: bool = False, **options: Any
) -> Any:
    leaves, name = td._leaves([]), name + "_" * inplace
    operands = [operand(td, other, leaves, not inplace) for other in (first, second)]
    found = each(_FOREACH[name], _SINGLE[name], leaves, *operands, **options)
    return td if inplace else rebuilt(td, found)


# ------------------------------------------------------------------------ methods from the tables


def _unary(name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    foreach, single = getattr(torch, "_foreach_" + name), getattr(torch, name)
    foreach_, single_ = getattr(torch, "_foreach_" + name + "_"), getattr(Tensor, name + "_")

    def method(self: Container) -> Container:
        return rebuilt(self, each(foreach, single, self._leaves([])))

    def method_(self: Container) -> Container:
        each(foreach_, single_, self._leaves([]))
        return self

    example = (
        "td = TensorDict(a=torch.tensor([0.25, 0.5]))\n"
        f">>> torch.equal(td.{name}()['a'], torch.{name}(td['a']))\nTrue"
    )
    yield name, _documented(method, name, f"`torch.{name}` leaf by leaf.", example)
    example = (
        "td = TensorDict(a=torch.tensor([0.25, 0.5]))\n"
        f">>> torch.equal(td.clone().{name}_()['a'], td.{name}()['a'])\nTrue"
    )
    yield f"{name}_", _documented(method_, f"{name}_", f"Inplace form of `{name}`.", example)


def _test(name: str) -> Callable[..., Any]:
    single = getattr(torch, name)

    def method(self: Container) -> Container:
        return rebuilt(self, [single(leaf) for leaf in self._leaves([])])

    example = f"TensorDict(a=torch.zeros(2)).{name}()['a'].dtype\ntorch.bool"
    return _documented(method, name, f"`torch.{name}` leaf by leaf.", example)


def _binary(name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    if name in ("add", "sub"):

        def method(
            self: Container, other: Operand, *, alpha: float | None = None, default: Default = None
        ) -> Container:
            return binary(self, name, other, default, **({} if alpha is None else {"alpha": alpha}))

        def method_(self: Container, other: Operand, alpha: float | None = None) -> Container:
            return binary_(self, name, other, **({} if alpha is None else {"alpha": alpha}))

    else:

        def method(  # type: ignore[misc]
            self: Container, other: Operand, default: Default = None
        ) -> Container:
            return binary(self, name, other, default)

        def method_(self: Container, other: Operand) -> Container:  # type: ignore[misc]
            return binary_(self, name, other)

    text = (
        f"`torch.{name}` leaf by leaf.\n\n"
        "other: container with the same keys, tensor that broadcasts with the batch size, "
        "or number.\n"
        "default: stands for entries that only one container has; 'intersection' leaves them out."
    )
    values = "[1, 2]" if name in PLAIN else "[1.0, 2.0]"
    example = (
        f"td = TensorDict(a=torch.tensor({values}))\n"
        f">>> torch.equal(td.{name}(td)['a'], torch.{name}(td['a'], td['a']))\nTrue"
    )
    yield name, _documented(method, name, text, example)
    if name not in PLAIN:
        example = (
            "td = TensorDict(a=torch.tensor([1.0, 2.0]))\n"
            f">>> torch.equal(td.clone().{name}_(td)['a'], td.{name}(td)['a'])\nTrue"
        )
        yield f"{name}_", _documented(method_, f"{name}_", f"Inplace form of `{name}`.", example)


def _documented(method: Any, name: str, text: str, example: str) -> Any:
    lines = [
        *text.split("\n"),
        "",
        ">>> from raffia import TensorDict",
        *(">>> " + example).split("\n"),
    ]
    method.__doc__ = "\n        ".join(lines).rstrip() + "\n        "
    method.__name__, method.__qualname__ = name, f"Pointwise.{name}"
    return method


def _compares(name: str, example: str) -> Callable[..., Any]:
    """The method by which `operator.NAME` compares, or joins truth values."""
    function, answer = getattr(operator, name), {"eq": False, "ne": True}.get(name, NotImplemented)

    def method(self: Any, other: Any) -> Any:
        result = compared(self, other, function)
        if result is NotImplemented:
            return answer
        if name in LOGIC and self._names is not None and result._batch_size == self._batch_size:
            result.names = self._names
        return result

    plain = name.rstrip("_")
    return _documented(method, f"__{plain}__", f"`{plain}` leaf by leaf.", example)


def _install() -> None:
    for name in UNARY:
        for attribute, method in _unary(name):
            setattr(Pointwise, attribute, method)
    for name in TESTS:
        setattr(Pointwise, name, _test(name))
    for name in (*BINARY, *PLAIN):
        if name == "mod":
            continue
        for attribute, method in _binary(name):
            setattr(Pointwise, attribute, method)
    example = "(TensorDict(a=torch.ones(2)) == 1)['a']\ntensor([True, True])"
    for name in COMPARISONS:
        setattr(Pointwise, f"__{name}__", _compares(name, example))
    example = "td = TensorDict(a=torch.tensor([True]))\n>>> (td & td)['a']\ntensor([True])"
    for name in LOGIC:
        method, plain = _compares(name, example), name.rstrip("_")
        setattr(Pointwise, f"__{plain}__", method)
        setattr(Pointwise, f"__r{plain}__", method)


def _operator(method_name: str) -> Callable[..., Any]:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (Node, Tensor, *NUMBERS)):
            return NotImplemented
        return getattr(self, method_name)(other)

    return method


def _rdiv(self: Any, other: Any) -> Any:
    return binary(self.reciprocal(), "mul", other)


def _rpow(self: Any, other: Any) -> Any:
    raise NotImplementedError(
        "number ** container is not defined; td.apply(lambda x: number ** x) computes it"
    )


def _floordiv(self: Any, other: Any) -> Any:
    td, other = broadcast(self, other)
    leaves = td._leaves([])
    return rebuilt(td, each(None, torch.floor_divide, leaves, operand(td, other, leaves)))


_install()
for _symbol, _target in OPERATORS.items():
    _function = {"rdiv": _rdiv, "rpow": _rpow, "floordiv": _floordiv}.get(_target) or _operator(
        _target
    )
    setattr(Pointwise, f"__{_symbol}__", _function)
Pointwise.__hash__ = None  # type: ignore[assignment]
