"""Sums, means and other reductions: over batch dimensions, an entry's own ones, or everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from raffia.tensordict.entries import NO_DEFAULT, every, some
from raffia.tensordict.keys import NestedKey
from raffia.tensordict.node import Entries, Node

_DIM_TEXT = """
        dim: batch dimension or tuple of them; "feature" for the entries' own dimensions; all
            dimensions of each entry if not given.
        keepdim: keep reduced dimensions with size 1.
        reduce: reduce over all entries too and return one tensor.
"""


def _dims(td: Any, dim: Any) -> tuple[int, ...] | None:
    """Batch dimensions as non-negative numbers; None for all dimensions of each leaf."""
    if dim is NO_DEFAULT or dim is None:
        return None
    ndim = len(td._batch_size)
    given = (dim,) if isinstance(dim, int) else tuple(dim)
    if isinstance(dim, str):
        raise ValueError(f"dim is a batch dimension, a tuple of them or 'feature', got {dim!r}")
    for d in given:
        if not -ndim <= d < ndim:
            raise IndexError(
                f"Incompatible dim {d} for tensordict with shape {td._batch_size}: it counts "
                "batch dimensions; dim='feature' stands for the entries' own"
            )
    return tuple([d % ndim for d in given])


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

        return _own_mapped(td, own)
    dims = _dims(td, dim)
    if dims is None:
        if keep:
            return mapped(
                td,
                lambda leaf: fn(leaf, dim=tuple(range(leaf.dim())), keepdim=True, **options),
                lambda size: torch.Size([1] * len(size)),
            )
        return mapped(td, lambda leaf: fn(leaf, **options), torch.Size())
    size = _reduced_size(td._batch_size, dims, keep)
    names = td._names
    if names is not None and not keep:
        names = [name for i, name in enumerate(names) if i not in dims]
    at: Any = dims[0] if len(dims) == 1 else dims
    return td._batched(
        lambda leaf: fn(leaf, dim=at, keepdim=keep, **options), ndim, size, names, ("reduce",)
    )


def renamed(td: Any, key_transform: Callable[[str], NestedKey] | None) -> Any:
    """A container whose entries have the names that `key_transform` gives, at all levels."""
    if key_transform is None or not isinstance(td, Node):
        return td
    out = td._plain._make({}, td._batch_size, td._device, td._names)
    for name, value in td._entries().items():
        below = isinstance(value, Node) and not value._is_data()
        out.set(key_transform(name), renamed(value, key_transform) if below else value)
    return out


def dense_leaves(td: Any, out: list[Tensor]) -> list[Tensor]:
    """The leaves with lazy stacks stacked."""
    for value in td._entries().values():
        if isinstance(value, Node):
            dense_leaves(value, out)
        else:
            out.append(value)
    return out


def mapped(
    td: Any,
    fn: Callable[[Tensor], Tensor],
    size: torch.Size | Callable[[torch.Size], torch.Size] | None = None,
) -> Any:
    """A dense container of `fn(leaf)`.

    size: the batch size of all nodes, or what it is for one of a given batch size; None keeps it.
    """
    entries: Entries = {}
    mine = td._batch_size
    new = mine if size is None else size(mine) if callable(size) else size
    for name, value in td._entries().items():
        if not isinstance(value, Node):
            entries[name] = fn(value)
        elif value._is_data():
            given = size(value._batch_size) if callable(size) else size
            entries[name] = value if given is None else value._new({}, given)
        else:
            entries[name] = mapped(value, fn, size)
    return td._new(entries, new, td._names if size is None else None)


def _own_mapped(td: Any, fn: Callable[[Tensor, int], Tensor]) -> Any:
    """A dense container of `fn(leaf, ndim)`; ndim: the batch dimensions of the node it is in."""
    ndim = len(td._batch_size)
    entries: Entries = {}
    for name, value in td._entries().items():
        if not isinstance(value, Node):
            entries[name] = fn(value, ndim)
        else:
            entries[name] = value if value._is_data() else _own_mapped(value, fn)
    return td._new(entries, td._batch_size, td._names)


def _over_entries(
    td: Any, fn: Callable[..., Tensor], dim: Any, keep: bool, options: dict[str, Any]
) -> Tensor:
    """One tensor: reduced over all entries, and over their dimensions as `dim` says."""
    whole = dim is NO_DEFAULT or dim is None  # then it does not matter what is stacked
    leaves = td._leaves([]) if whole else dense_leaves(td, [])
    ndim = len(td._batch_size)
    if not leaves:
        raise ValueError("there are no tensor leaves to reduce")
    if dim == "feature":
        flat = torch.cat([leaf.reshape(*leaf.shape[:ndim], -1) for leaf in leaves], -1)
        return fn(flat, dim=-1, keepdim=keep, **options)
    dims = _dims(td, dim)
    if dims is None:
        flat = torch.cat([leaf.flatten() for leaf in leaves])
        return fn(flat, dim=0, **options)
    try:
        joined = torch.cat(leaves, dims[0])
    except RuntimeError as error:
        raise RuntimeError(
            f"reduce=True over dim={dim} joins the entries along that dimension, "
            f"so their other dimensions must be equal: {error}"
        ) from error
    return fn(joined, dim=dims[0] if len(dims) == 1 else dims, keepdim=keep, **options)


def _repeated(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let a torch function that takes a single `dim` take several, one after the other."""

    def call(x: Tensor, *, dim: Any = None, keepdim: bool = False, **options: Any) -> Tensor:
        if dim is None:
            return function(x, **options)
        if isinstance(dim, int):
            return function(x, dim, keepdim, **options)
        for d in sorted(dim, reverse=True):
            x = function(x, d, keepdim, **options)
        return x

    return call


def _median_free(function: Callable[..., Any]) -> Callable[..., Tensor]:
    return lambda x, **options: function(x, **options)


_prod, _any, _all = _repeated(torch.prod), _repeated(torch.any), _repeated(torch.all)


def _quantile(
    x: Tensor, q: Any, *, dim: Any = None, keepdim: bool = False, interpolation: str = "linear"
) -> Tensor:
    if isinstance(dim, tuple):
        kept = [d for d in range(x.dim()) if d not in dim]
        flat = x.permute(*kept, *dim).reshape(*[x.shape[d] for d in kept], -1)
        out = torch.quantile(flat, q, dim=-1, interpolation=interpolation)
        if keepdim:
            for d in sorted(dim):
                out = out.unsqueeze(d)
        return out
    return torch.quantile(x, q, dim=dim, keepdim=keepdim, interpolation=interpolation)


class Reductions:
    """Reductions of a container; see the module."""

    def sum(
        self,
        dim: Any = NO_DEFAULT,
        keepdim: Any = NO_DEFAULT,
        *,
        dtype: Any = None,
        reduce: bool | None = None,
        key_transform: Callable[[str], NestedKey] | None = None,
    ) -> Any:
        """Sum.
        {dims}
        key_transform: says what the name of each entry becomes.

        >>> from raffia import TensorDict
        >>> td = TensorDict(a=torch.ones(2, 3), batch_size=[2])
        >>> td.sum(0)["a"], td.sum(dim="feature")["a"], td.sum(reduce=True)
        (tensor([2., 2., 2.]), tensor([3., 3.]), tensor(6.))
        """
        return renamed(reduced(self, torch.sum, dim, keepdim, reduce, dtype=dtype), key_transform)

    def nansum(
        self,
        dim: Any = NO_DEFAULT,
        keepdim: Any = NO_DEFAULT,
        *,
        dtype: Any = None,
        reduce: bool | None = None,
    ) -> Any:
        """Sum of what is not NaN.
        {dims}
        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.tensor([1.0, torch.nan]), batch_size=[2]).nansum(0)["a"]
        tensor(1.)
        """
        return reduced(self, torch.nansum, dim, keepdim, reduce, dtype=dtype)

    def mean(
        self,
        dim: Any = NO_DEFAULT,
        keepdim: Any = NO_DEFAULT,
        *,
        dtype: Any = None,
        reduce: bool | None = None,
        key_transform: Callable[[str], NestedKey] | None = None,
    ) -> Any:
        """Mean.
        {dims}
        key_transform: says what the name of each entry becomes.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.tensor([1.0, 3.0]), batch_size=[2]).mean(0)["a"]
        tensor(2.)
        """
        return renamed(reduced(self, torch.mean, dim, keepdim, reduce, dtype=dtype), key_transform)

    def nanmean(
        self,
        dim: Any = NO_DEFAULT,
        keepdim: Any = NO_DEFAULT,
        *,
        dtype: Any = None,
        reduce: bool | None = None,
    ) -> Any:
        """Mean of what is not NaN.
        {dims}
        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.tensor([1.0, torch.nan]), batch_size=[2]).nanmean(0)["a"]
        tensor(1.)
        """
        return reduced(self, torch.nanmean, dim, keepdim, reduce, dtype=dtype)

    def prod(
        self,
        dim: Any = NO_DEFAULT,
        keepdim: Any = NO_DEFAULT,
        *,
        dtype: Any = None,
        reduce: bool | None = None,
    ) -> Any:
        """Product.
        {dims}
        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.tensor([2.0, 3.0]), batch_size=[2]).prod(0)["a"]
        tensor(6.)
        """
        return reduced(self, _prod, dim, keepdim, reduce, dtype=dtype)

    def std(
        self,
        dim: Any = NO_DEFAULT,
        keepdim: Any = NO_DEFAULT,
        *,
        correction: int = 1,
        reduce: bool | None = None,
        key_transform: Callable[[str], NestedKey] | None = None,
    ) -> Any:
        """Standard deviation; `correction` is taken off the number of values that is divided by.
        {dims}
        key_transform: says what the name of each entry becomes.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.tensor([1.0, 3.0]), batch_size=[2]).std(0, correction=0)["a"]
        tensor(1.)
        """
        return renamed(
            reduced(self, torch.std, dim, keepdim, reduce, correction=correction), key_transform
        )

    def var(
        self,
        dim: Any = NO_DEFAULT,
        keepdim: Any = NO_DEFAULT,
        *,
        correction: int = 1,
        reduce: bool | None = None,
        key_transform: Callable[[str], NestedKey] | None = None,
    ) -> Any:
        """Variance; `correction` is taken off the number of values that is divided by.
        {dims}
        key_transform: says what the name of each entry becomes.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.tensor([1.0, 3.0]), batch_size=[2]).var(0, correction=0)["a"]
        tensor(1.)
        """
        return renamed(
            reduced(self, torch.var, dim, keepdim, reduce, correction=correction), key_transform
        )

    def quantile(
        self,
        q: float | Tensor,
        dim: Any = NO_DEFAULT,
        keepdim: Any = NO_DEFAULT,
        *,
        interpolation: str = "linear",
        reduce: bool | None = None,
        key_transform: Callable[[str], NestedKey] | None = None,
    ) -> Any:
        """The value below which a part `q` (0 to 1) of the values lies.
        {dims}
        key_transform: says what the name of each entry becomes.

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

            return renamed(mapped(self, lambda leaf: at(leaf, **options), sized), key_transform)
        out = reduced(self, at, dim, keepdim, reduce, interpolation=interpolation)
        out = renamed(out, key_transform)
        if several:
            return mapped(out, lambda leaf: leaf, lambda size: torch.Size((num, *size)))
        return out

    def amax(
        self, dim: Any = NO_DEFAULT, keepdim: bool = False, *, reduce: bool | None = None
    ) -> Any:
        """Largest value.
        {dims}
        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.tensor([1.0, 3.0]), batch_size=[2]).amax(0)["a"]
        tensor(3.)
        """
        return reduced(self, torch.amax, dim, keepdim, reduce)

    def amin(
        self, dim: Any = NO_DEFAULT, keepdim: bool = False, *, reduce: bool | None = None
    ) -> Any:
        """Smallest value.
        {dims}
        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.tensor([1.0, 3.0]), batch_size=[2]).amin(0)["a"]
        tensor(1.)
        """
        return reduced(self, torch.amin, dim, keepdim, reduce)

    def max(
        self,
        dim: Any = NO_DEFAULT,
        keepdim: bool = False,
        *,
        reduce: bool | None = None,
        return_indices: bool = True,
    ) -> Any:
        """Largest value and, along a `dim`, where it stands: a pair of `values` and `indices`.
        {dims}
        return_indices: False gives the values only.

        >>> from raffia import TensorDict
        >>> result = TensorDict(a=torch.tensor([1.0, 3.0]), batch_size=[2]).max(0)
        >>> result.values["a"], result.indices["a"]
        (tensor(3.), tensor(1))
        """
        return extreme(self, torch.max, torch.amax, "max", dim, keepdim, reduce, return_indices)

    def min(
        self,
        dim: Any = NO_DEFAULT,
        keepdim: bool = False,
        *,
        reduce: bool | None = None,
        return_indices: bool = True,
    ) -> Any:
        """Smallest value and, along a `dim`, where it stands: a pair of `values` and `indices`.
        {dims}
        return_indices: False gives the values only.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.tensor([1.0, 3.0]), batch_size=[2]).min(0).values["a"]
        tensor(1.)
        """
        return extreme(self, torch.min, torch.amin, "min", dim, keepdim, reduce, return_indices)

    def cummax(self, dim: int, *, reduce: bool | None = None, return_indices: bool = True) -> Any:
        """Largest value so far along a batch dimension, and where: a pair `values` and `indices`.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.tensor([1.0, 3.0, 2.0]), batch_size=[3]).cummax(0).values["a"]
        tensor([1., 3., 3.])
        """
        return cumulative(self, torch.cummax, "cummax", dim, reduce, return_indices)

    def cummin(self, dim: int, *, reduce: bool | None = None, return_indices: bool = True) -> Any:
        """Smallest value so far along a batch dimension, and where: a pair `values` and `indices`.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.tensor([3.0, 1.0, 2.0]), batch_size=[3]).cummin(0).values["a"]
        tensor([3., 1., 1.])
        """
        return cumulative(self, torch.cummin, "cummin", dim, reduce, return_indices)

    def any(self, dim: int | None = None) -> Any:
        """Whether any value is true: a bool, or a container along `dim`.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.tensor([False, True])).any()
        True
        """
        return truth(self, _any, dim)

    def all(self, dim: int | None = None) -> Any:
        """Whether all values are true: a bool, or a container along `dim`.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.tensor([False, True])).all()
        False
        """
        return truth(self, _all, dim)

    def norm(self, *, out: Any = None, dtype: Any = None) -> Any:
        """The 2-norm of each entry.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.tensor([3.0, 4.0])).norm()["a"]
        tensor(5.)
        """
        result = mapped(
            self, lambda leaf: torch.linalg.vector_norm(leaf, dtype=dtype), torch.Size()
        )
        return result if out is None else out.update(result)

    def logsumexp(self, dim: Any = None, keepdim: bool = False, *, out: Any = None) -> Any:
        """The logarithm of the sum of exponentials over batch dimensions; over all without `dim`.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.zeros(4), batch_size=[4]).logsumexp(0)["a"]
        tensor(1.3863)
        """
        dims = tuple(range(self.batch_dims)) if dim is None else dim  # type: ignore[attr-defined]
        result = reduced(self, torch.logsumexp, dims, keepdim, None)
        return result if out is None else out.update(result)

    def softmax(self, dim: int, dtype: Any = None) -> Any:
        """Softmax along a batch dimension.

        >>> from raffia import TensorDict
        >>> TensorDict(a=torch.zeros(2), batch_size=[2]).softmax(0)["a"]
        tensor([0.5000, 0.5000])
        """
        at = _dims(self, dim)[0]  # type: ignore[index]
        return mapped(self, lambda leaf: torch.softmax(leaf, at, dtype=dtype))


def truth(td: Any, fn: Callable[..., Tensor], dim: Any) -> Any:
    if dim is None:
        if fn is _all:
            return every(td, Tensor.all)
        return some(td, Tensor.any)
    ndim = len(td._batch_size)
    if not -ndim <= dim < ndim:
        raise RuntimeError(
            f"dim must be greater than or equal to {-ndim} and smaller than {ndim}, "
            f"the number of batch dims; got {dim}"
        )
    return reduced(td, fn, dim, False, None)


def extreme(
    td: Any,
    fn: Callable[..., Any],
    values_only: Any,
    name: str,
    dim: Any,
    keepdim: bool,
    reduce: bool | None,
    indices: bool,
) -> Any:
    if (
        dim is NO_DEFAULT
        or dim is None
        or not indices
        or dim == "feature"
        or isinstance(dim, tuple)
    ):
        return reduced(td, values_only, dim, keepdim, reduce)
    if reduce:
        return _over_entries(td, fn, dim, keepdim, {})
    vals = reduced(td, lambda leaf, **options: fn(leaf, **options).values, dim, keepdim, None)
    where = reduced(td, lambda leaf, **options: fn(leaf, **options).indices, dim, keepdim, None)
    return result(name, vals, where)


def cumulative(
    td: Any, fn: Callable[..., Any], name: str, dim: Any, reduce: bool | None, indices: bool
) -> Any:
    if reduce:
        raise ValueError(
            f"{name} keeps all rows, so there is nothing to reduce over entries; leave reduce out"
        )
    at = _dims(td, dim)[0]  # type: ignore[index]
    vals = mapped(td, lambda leaf: fn(leaf, at).values)
    if not indices:
        return vals
    return result(name, vals, mapped(td, lambda leaf: fn(leaf, at).indices))


def result(name: str, values: Any, indices: Any) -> Any:
    """What the torch function of this name returns, of containers: `values` and `indices`."""
    return getattr(torch.return_types, name)((values, indices))


for _method in vars(Reductions).values():
    if getattr(_method, "__doc__", None) and "{dims}" in _method.__doc__:
        _method.__doc__ = _method.__doc__.replace("        {dims}\n", _DIM_TEXT + "\n")
