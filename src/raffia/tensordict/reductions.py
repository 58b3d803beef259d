"""Sums, means and other reductions: over batch dimensions, an entry's own ones, or everything."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NamedTuple,
    Protocol,
    Self,
    TypeVar,
    overload,
)

import torch
from torch import Tensor

from raffia.tensordict.entries import NO_DEFAULT
from raffia.tensordict.keys import NestedKey
from raffia.tensordict.node import Entries, Node
from raffia.tensordict.views import entries_list, every

_DIM_TEXT = """
dim: batch dimension or tuple of them; "feature" for the entries' own dimensions; all dimensions of
    each entry if not given.
keepdim: keep reduced dimensions with size 1.
reduce: reduce over all entries too and return one tensor: they are joined along `dim`, which may
    then be a dimension of theirs, beyond the batch dimensions.
"""

Made = TypeVar("Made")


def _dims(td: Any, dim: Any, beyond: bool = False) -> tuple[int, ...] | None:
    """Batch dimensions as non-negative numbers; None for all dimensions of each leaf.

    beyond: numbers beyond them are accepted, too.
    """
    if dim is NO_DEFAULT or dim is None:
        return None
    ndim = len(td._batch_size)
    given = (dim,) if isinstance(dim, int) else tuple(dim)
    if isinstance(dim, str):
        raise ValueError(
            f"dim must be a batch dimension, a tuple of them or 'feature', got {dim!r}"
        )
    for d in given:
        if not (-ndim <= d < ndim or beyond and d >= ndim):
            raise IndexError(
                f"Incompatible dim {d} for tensordict with shape {td._batch_size}: it counts "
                "batch dimensions; dim='feature' stands for the entries' own"
            )
    # As for tensors, none of them is all.
    return tuple([d + ndim if d < 0 else d for d in given]) or None


def _reduced_size(size: torch.Size, dims: tuple[int, ...], keepdim: bool) -> torch.Size:
    if keepdim:
        return torch.Size([1 if i in dims else n for i, n in enumerate(size)])
    return torch.Size([n for i, n in enumerate(size) if i not in dims])


def reduced(
    td: Any, fn: Callable[..., Tensor], dim: Any, keepdim: Any, reduce: bool | None, **options: Any
) -> Any:
    """`fn(leaf, dim=..., keepdim=...)` for every leaf."""
    keep = keepdim is not NO_DEFAULT and bool(keepdim)
    ndim = len(td._batch_size)
    if reduce:
        return _over_entries(td, fn, dim, keep, options)
    if dim == "feature":

        def own(leaf: Tensor, ndim: int) -> Tensor:
            axes = tuple(range(ndim, leaf.dim()))
            return (
                fn(leaf, dim=axes, keepdim=keep, **options)
                if axes
                else fn(leaf.unsqueeze(-1), dim=-1, **options)
            )

        return mapped(td, own)
    dims = _dims(td, dim)
    if dims is None:
        if keep:
            return mapped(
                td,
                lambda leaf, _: fn(leaf, dim=tuple(range(leaf.dim())), keepdim=True, **options),
                lambda size: torch.Size([1] * len(size)),
                named=True,
            )
        return mapped(td, lambda leaf, _: fn(leaf, **options), torch.Size())
    size = _reduced_size(td._batch_size, dims, keep)
    names = td._names
    if names is not None and not keep:
        names = [name for i, name in enumerate(names) if i not in dims]
    at: Any = dims[0] if len(dims) == 1 else dims
    return td._batched(
        lambda leaf: fn(leaf, dim=at, keepdim=keep, **options), ndim, size, names, ("reduce",)
    )


def renamed(td: Made, key_transform: Callable[[str], NestedKey] | None) -> Made:
    """A container with its entries renamed by `key_transform`, at all levels."""
    if key_transform is None or not isinstance(td, Node) or td._is_data():
        return td
    out = td._plain._make({}, td._batch_size, td._device, td._names)
    for name, value in td._entries().items():
        out.set(key_transform(name), renamed(value, key_transform))
    return out


def mapped(
    td: Any,
    fn: Callable[[Tensor, int], Tensor],
    size: torch.Size | Callable[[torch.Size], torch.Size] | None = None,
    named: bool = False,
) -> Any:
    """A dense container of `fn(leaf, ndim)`; ndim: the batch dimensions of the node it is in.

    size: the batch size of all nodes, or what it is for one of a given batch size; None keeps it.
    named: keep the names of dimensions also with a size.
    """
    entries: Entries = {}
    mine = td._batch_size
    new = mine if size is None else size(mine) if callable(size) else size
    for name, value in td._entries().items():
        if not isinstance(value, Node):
            entries[name] = fn(value, len(mine))
        elif value._is_data():
            given = size(value._batch_size) if callable(size) else size
            names = value._names if named else None
            entries[name] = value if given is None else value._new({}, given, names)
        else:
            entries[name] = mapped(value, fn, size, named)
    return td._new(entries, new, td._names if size is None or named else None)


def _over_entries(
    td: Any, fn: Callable[..., Tensor], dim: Any, keep: bool, options: dict[str, Any]
) -> Tensor:
    """One tensor: reduced over all entries, and over the dimensions `dim` of each."""
    whole = dim is NO_DEFAULT or dim is None  # then it does not matter what is stacked
    leaves = td._leaves([]) if whole else _tensors(td)
    ndim = len(td._batch_size)
    if not leaves:
        raise ValueError("there are no tensor leaves to reduce")
    if dim == "feature":
        flat = torch.cat([leaf.reshape(*leaf.shape[:ndim], -1) for leaf in leaves], -1)
        return fn(flat, dim=-1, keepdim=keep, **options)
    dims = _dims(td, dim, beyond=True)
    if dims is None:
        flat = torch.cat([leaf.flatten() for leaf in leaves])
        return fn(flat, dim=0, **options)
    at = dims[0] if len(dims) == 1 else dims
    return fn(_joined(leaves, dims[0]), dim=at, keepdim=keep, **options)


def _tensors(td: Any) -> list[Tensor]:
    return [x for _, x in entries_list(td, True, True, None, False) if not isinstance(x, Node)]


def _joined(leaves: list[Tensor], dim: int) -> Tensor:
    try:
        return torch.cat(leaves, dim)
    except (RuntimeError, IndexError) as error:
        raise type(error)(
            f"reduce=True over dim={dim} joins the entries along that dimension, "
            f"so their other dimensions must be equal: {error}"
        ) from error


def _repeated(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a torch function of a single `dim` accept several, applied one after the other."""

    def call(x: Tensor, *, dim: Any = None, keepdim: bool = False, **options: Any) -> Tensor:
        if dim is None:
            return function(x, **options)
        if isinstance(dim, int):
            return function(x, dim, keepdim, **options)
        for d in sorted(dim, reverse=True):
            x = function(x, d, keepdim, **options)
        return x

    return call


_prod, _any, _all = _repeated(torch.prod), _repeated(torch.any), _repeated(torch.all)


def _logsumexp(x: Tensor, *, dim: Any = None, keepdim: bool = False) -> Tensor:
    return torch.logsumexp(x, tuple(range(x.dim())) if dim is None else dim, keepdim)


def _quantile(
    x: Tensor, q: Any, *, dim: Any = None, keepdim: bool = False, interpolation: str = "linear"
) -> Tensor:
    if isinstance(dim, tuple):
        other_dims = [d for d in range(x.dim()) if d not in dim]
        flat = x.permute(*other_dims, *dim).reshape(*[x.shape[d] for d in other_dims], -1)
        out = torch.quantile(flat, q, dim=-1, interpolation=interpolation)
        if keepdim:
            for d in sorted(dim):
                out = out.unsqueeze(d)
        return out
    return torch.quantile(x, q, dim=dim, keepdim=keepdim, interpolation=interpolation)


Owner = TypeVar("Owner")  # the class of the container that is reduced
Result = TypeVar("Result", covariant=True)

if TYPE_CHECKING:
    Several = tuple[int, ...] | Literal["feature"] | None
    Dims = int | Several

    class BoundReduction(Protocol[Result]):
        """A reduction of a container, which returns one tensor with `reduce=True`."""

        @overload
        def __call__(
            self, dim: Dims = ..., keepdim: bool = ..., *, reduce: Literal[True], **options: Any
        ) -> Tensor: ...
        @overload
        def __call__(
            self, dim: Dims = ..., keepdim: bool = ..., *, reduce: None = ..., **options: Any
        ) -> Result: ...

    class Reduction:
        """The type of the methods made by `_reduction`, for type checkers."""

        def __get__(self, td: Owner, kind: Any) -> BoundReduction[Owner]: ...

    class Extremes(NamedTuple, Generic[Result]):
        """What `max` and its like return along a dimension, as torch does."""

        values: Result
        indices: Result

    class BoundExtreme(Protocol[Result]):
        """`max` or `min` of a container: along a `dim` a pair, else the values only."""

        @overload
        def __call__(
            self, dim: int, keepdim: bool = ..., *, return_indices: Literal[True] = ...
        ) -> Extremes[Result]: ...
        @overload
        def __call__(
            self, dim: int, keepdim: bool = ..., *, return_indices: Literal[False]
        ) -> Result: ...
        @overload
        def __call__(
            self, dim: int, keepdim: bool = ..., *, reduce: Literal[True]
        ) -> Extremes[Tensor]: ...
        @overload
        def __call__(
            self, dim: Several = ..., keepdim: bool = ..., *, return_indices: bool = ...
        ) -> Result: ...
        @overload
        def __call__(
            self, dim: Several = ..., keepdim: bool = ..., *, reduce: Literal[True]
        ) -> Tensor: ...

    class Extreme:
        """The type of `max` and `min`, for type checkers."""

        def __get__(self, td: Owner, kind: Any) -> BoundExtreme[Owner]: ...


class _Option(NamedTuple):
    annotation: str
    default: Any
    text: str = ""


_OPTIONS = {  # those after dim and keepdim, in the order of signatures
    "dtype": _Option("torch.dtype | None", None),
    "correction": _Option("int", 1),
    "reduce": _Option("bool | None", None),
    "return_indices": _Option("bool", True, "False gives the values only."),
    "key_transform": _Option(
        "Callable[[str], NestedKey] | None", None, "maps the name of each entry to its new name."
    ),
}


def _signed(method: Any, name: str, options: str, text: str, example: str, keep: Any) -> Any:
    """Set the name, signature (dim, keepdim and these options) and docstring of a method."""
    chosen = {option: _OPTIONS[option] for option in options.split()}
    either, by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter("self", either),
        inspect.Parameter("dim", either, default=NO_DEFAULT, annotation="Dims"),
        inspect.Parameter("keepdim", either, default=keep, annotation="bool"),
        *[
            inspect.Parameter(option, by_name, default=of.default, annotation=of.annotation)
            for option, of in chosen.items()
        ],
    ]
    texts = [f"{option}: {of.text}\n" for option, of in chosen.items() if of.text]
    lines = f"{text}\n{_DIM_TEXT}{''.join(texts)}\n>>> from raffia import TensorDict\n{example}\n"
    method.__doc__ = textwrap.indent(lines, "        ").strip() + "\n        "
    method.__name__, method.__qualname__ = name, f"Reductions.{name}"
    method.__signature__ = inspect.Signature(parameters, return_annotation="Self | Tensor")
    return method


def _reduction(
    name: str,
    function: Callable[..., Tensor],
    options: str,
    text: str,
    example: str,
    keep: Any = NO_DEFAULT,
) -> Callable[..., Any]:
    """The method that reduces by `function`, with those of the options of its signature."""
    allowed = frozenset(options.split())

    def method(
        self: Any,
        dim: Any = NO_DEFAULT,
        keepdim: Any = keep,
        *,
        reduce: bool | None = None,
        key_transform: Callable[[str], NestedKey] | None = None,
        **given: Any,
    ) -> Any:
        if given or key_transform is not None:
            named = {} if key_transform is None else {"key_transform": None}
            for option in (given | named).keys() - allowed:
                raise TypeError(f"{name}() got an unexpected keyword argument {option!r}")
        return renamed(reduced(self, function, dim, keepdim, reduce, **given), key_transform)

    signed: Callable[..., Any] = _signed(method, name, options, text, example, keep)
    return signed


def _extreme(name: str, text: str, example: str) -> Callable[..., Any]:
    """`max` or `min`."""
    function, values_only = getattr(torch, name), getattr(torch, "a" + name)

    def method(
        self: Any,
        dim: Any = NO_DEFAULT,
        keepdim: bool = False,
        *,
        reduce: bool | None = None,
        return_indices: bool = True,
    ) -> Any:
        if not return_indices or dim in (NO_DEFAULT, None, "feature") or isinstance(dim, tuple):
            return reduced(self, values_only, dim, keepdim, reduce)
        if reduce:
            return _over_entries(self, function, dim, keepdim, {})
        over: Any = (dim, keepdim, None)
        vals = reduced(self, lambda leaf, **options: function(leaf, **options).values, *over)
        where = reduced(self, lambda leaf, **options: function(leaf, **options).indices, *over)
        return result(name, vals, where)

    signed: Callable[..., Any] = _signed(
        method, name, "reduce return_indices", text, example, False
    )
    return signed


_PAIR = ">>> TensorDict(a=torch.tensor([1.0, 3.0]), batch_size=[2])"
_NAN = ">>> TensorDict(a=torch.tensor([1.0, torch.nan]), batch_size=[2])"


class Reductions:
    """Reductions of a container; see the module."""

    if TYPE_CHECKING:  # made from the table below
        sum = nansum = mean = nanmean = prod = std = var = amax = amin = Reduction()
        max = min = Extreme()

    def quantile(
        self,
        q: float | Tensor,
        dim: Any = NO_DEFAULT,
        keepdim: Any = NO_DEFAULT,
        *,
        interpolation: str = "linear",
        reduce: bool | None = None,
        key_transform: Callable[[str], NestedKey] | None = None,
    ) -> Self:
        """The value below which a fraction `q` (0 to 1) of the values falls.

        dim, keepdim, reduce, key_transform: as for `mean`.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.tensor([1.0, 3.0]), batch_size=[2]).quantile(0.5, 0)["a"]
        tensor(2.)
        """

        def at(x: Tensor, **options: Any) -> Tensor:
            return _quantile(x, q, **options)

        num = len(q) if isinstance(q, Tensor) and q.dim() else 0
        several = num > 0 and not reduce
        if several and not isinstance(dim, str) and _dims(self, dim) is not None:
            dims, keep = _dims(self, dim), keepdim is not NO_DEFAULT and bool(keepdim)
            over: Any = dims[0] if len(dims) == 1 else dims  # type: ignore[arg-type,index]
            options: Any = dict(dim=over, keepdim=keep, interpolation=interpolation)

            def sized(size: torch.Size) -> torch.Size:
                return torch.Size((num, *_reduced_size(size, dims, keep)))  # type: ignore[arg-type]

            return renamed(mapped(self, lambda leaf, _: at(leaf, **options), sized), key_transform)
        out = reduced(self, at, dim, keepdim, reduce, interpolation=interpolation)
        out = renamed(out, key_transform)
        if several:
            return mapped(out, lambda leaf, _: leaf, lambda size: torch.Size((num, *size)))
        return out

    @overload
    def cummax(
        self, dim: int, *, reduce: None = None, return_indices: Literal[True] = True
    ) -> Extremes[Self]: ...
    @overload
    def cummax(self, dim: int, *, reduce: None = None, return_indices: Literal[False]) -> Self: ...

    def cummax(
        self, dim: int, *, reduce: bool | None = None, return_indices: bool = True
    ) -> Extremes[Self] | Self:
        """The cumulative maximum along a batch dimension, and where: a pair `values` and `indices`.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.tensor([1.0, 3.0, 2.0]), batch_size=[3]).cummax(0).values["a"]
        tensor([1., 3., 3.])
        """
        return cumulative(self, torch.cummax, "cummax", dim, reduce, return_indices)

    @overload
    def cummin(
        self, dim: int, *, reduce: None = None, return_indices: Literal[True] = True
    ) -> Extremes[Self]: ...
    @overload
    def cummin(self, dim: int, *, reduce: None = None, return_indices: Literal[False]) -> Self: ...

    def cummin(
        self, dim: int, *, reduce: bool | None = None, return_indices: bool = True
    ) -> Extremes[Self] | Self:
        """The cumulative minimum along a batch dimension, and where: a pair `values` and `indices`.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.tensor([3.0, 1.0, 2.0]), batch_size=[3]).cummin(0).values["a"]
        tensor([3., 1., 1.])
        """
        return cumulative(self, torch.cummin, "cummin", dim, reduce, return_indices)

    @overload
    def any(self, dim: None = None) -> bool: ...
    @overload
    def any(self, dim: int) -> Self: ...

    def any(self, dim: int | None = None) -> bool | Self:
        """Whether any value is true: a bool, or a container along `dim`.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.tensor([False, True])).any()
        True
        """
        return truth(self, _any, dim)

    @overload
    def all(self, dim: None = None) -> bool: ...
    @overload
    def all(self, dim: int) -> Self: ...

    def all(self, dim: int | None = None) -> bool | Self:
        """Whether all values are true: a bool, or a container along `dim`.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.tensor([False, True])).all()
        False
        """
        return truth(self, _all, dim)

    def norm(
        self,
        *,
        out: Any = None,
        dtype: torch.dtype | None = None,
        key_transform: Callable[[str], str] | None = None,
    ) -> Self:
        """The 2-norm of each entry.

        key_transform: gives each part of a key its name in the result.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.tensor([3.0, 4.0])).norm(key_transform=str.upper)["A"]
        tensor(5.)
        """
        result = mapped(
            self, lambda leaf, _: torch.linalg.vector_norm(leaf, dtype=dtype), torch.Size()
        )
        result = renamed(result, key_transform)
        return result if out is None else out.update(result)

    def logsumexp(
        self,
        dim: int | tuple[int, ...] | None = None,
        keepdim: bool = False,
        *,
        out: Any = None,
    ) -> Self:
        """The logarithm of the sum of exponentials over batch dimensions; over all without `dim`.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.zeros(4), batch_size=[4]).logsumexp(0)["a"]
        tensor(1.3863)
        """
        dims = tuple(range(self.batch_dims)) if dim is None else dim  # type: ignore[attr-defined]
        result = reduced(self, _logsumexp, dims, keepdim, None)
        return result if out is None else out.update(result)

    def softmax(self, dim: int, dtype: torch.dtype | None = None) -> Self:
        """Softmax along a batch dimension.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.zeros(2), batch_size=[2]).softmax(0)["a"]
        tensor([0.5000, 0.5000])
        """
        at = _dims(self, dim)[0]  # type: ignore[index]
        return mapped(self, lambda leaf, _: torch.softmax(leaf, at, dtype=dtype))


_OF_SPREAD = "correction reduce key_transform"
_CORRECTED = "`correction` is subtracted from the number of values in the divisor."
_REDUCTIONS: list[tuple[Any, ...]] = [  # name, function, options, text, result of the example
    ("sum", torch.sum, "dtype reduce key_transform", "Sum.", "4."),
    ("nansum", torch.nansum, "dtype reduce", "Sum of the values that are not NaN.", "1."),
    ("mean", torch.mean, "dtype reduce key_transform", "Mean.", "2."),
    ("nanmean", torch.nanmean, "dtype reduce", "Mean of the values that are not NaN.", "1."),
    ("prod", _prod, "dtype reduce", "Product.", "3."),
    ("std", torch.std, _OF_SPREAD, f"Standard deviation; {_CORRECTED}", "1.4142"),
    ("var", torch.var, _OF_SPREAD, f"Variance; {_CORRECTED}", "2."),
    ("amax", torch.amax, "reduce", "Largest value.", "3."),
    ("amin", torch.amin, "reduce", "Smallest value.", "1."),
]
_SUM = """>>> td = TensorDict(a=torch.ones(2, 3), batch_size=[2])
>>> td.sum(0)["a"], td.sum(dim="feature")["a"], td.sum(reduce=True)
(tensor([2., 2., 2.]), tensor([3., 3.]), tensor(6.))"""
for _name, _function, _options, _text, _value in _REDUCTIONS:
    _source = _NAN if _name.startswith("nan") else _PAIR
    _example = _SUM if _name == "sum" else f'{_source}.{_name}(0)["a"]\ntensor({_value})'
    _keep = False if _name in ("amax", "amin") else NO_DEFAULT
    setattr(Reductions, _name, _reduction(_name, _function, _options, _text, _example, _keep))
for _name, _which, _value in (
    ("max", "Largest", "[tensor(3.), tensor(1)]"),
    ("min", "Smallest", "[tensor(1.), tensor(0)]"),
):
    _text = f"{_which} value and, along a `dim`, its position: a pair of `values` and `indices`."
    _example = f'>>> [found["a"] for found in {_PAIR[4:]}.{_name}(0)]\n{_value}'
    setattr(Reductions, _name, _extreme(_name, _text, _example))


def truth(td: Any, fn: Callable[..., Tensor], dim: Any) -> Any:
    if dim is None:
        if fn is _all:
            return every(td, Tensor.all)
        return not every(td, lambda leaf: not leaf.any())
    ndim = len(td._batch_size)
    if not -ndim <= dim < ndim:
        raise RuntimeError(
            f"dim must be greater than or equal to {-ndim} and smaller than {ndim}, "
            f"the number of batch dims; got {dim}"
        )
    return reduced(td, fn, dim, False, None)


def cumulative(
    td: Any, fn: Callable[..., Any], name: str, dim: Any, reduce: bool | None, indices: bool
) -> Any:
    if reduce:
        at = _dims(td, dim, beyond=True)[0]  # type: ignore[index]
        found = fn(_joined(_tensors(td), at), at)
        return found if indices else found.values
    at = _dims(td, dim)[0]  # type: ignore[index]
    vals = mapped(td, lambda leaf, _: fn(leaf, at).values)
    if not indices:
        return vals
    return result(name, vals, mapped(td, lambda leaf, _: fn(leaf, at).indices))


def result(name: str, values: Any, indices: Any) -> tuple[Any, ...]:
    """The torch return type of this name, holding the containers `values` and `indices`."""
    return getattr(torch.return_types, name)((values, indices))
