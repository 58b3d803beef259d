"""Maps over the leaves of one or several containers, and torch functions on containers."""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor

from raffia.hints import check_choice
from raffia.tensordict import updates
from raffia.tensordict.build import as_device, as_size, batch_dim, mismatch, shape_of
from raffia.tensordict.entries import NO_DEFAULT
from raffia.tensordict.keys import is_key, missing
from raffia.tensordict.node import Container, Device, Node, hold
from raffia.tensordict.signatures import shows_options_of
from raffia.tensordict.unbatched import UnbatchedTensor
from raffia.tensordict.views import IsLeaf, paired

# ------------------------------------------------------------------------ apply


Result = TypeVar("Result")  # what a function of pieces gives


class ApplyOptions(TypedDict, total=False):
    """Options of `apply` and `named_apply`, for type checkers."""

    batch_size: Sequence[int] | None
    device: Device
    names: Sequence[str | None] | None
    inplace: bool
    default: Any
    call_on_nested: bool
    out: Any
    is_leaf: IsLeaf | None
    propagate_lock: bool


def applied(
    td: Container,
    fn: Callable[..., Any],
    named: bool,
    others: tuple[Any, ...],
    *,
    batch_size: Sequence[int] | None = None,
    device: Device = NO_DEFAULT,
    names: Sequence[str | None] | None = NO_DEFAULT,
    inplace: bool = False,
    default: Any = NO_DEFAULT,
    filter_empty: bool | None = None,
    call_on_nested: bool = False,
    out: Any = None,
    is_leaf: IsLeaf | None = None,
    propagate_lock: bool = False,
) -> Container | None:
    """`apply` and `named_apply`; named: `fn` gets the nested key first."""
    if inplace and (batch_size is not None or out is not None):
        raise ValueError(
            "apply: inplace=True keeps the batch size and writes into this container; "
            "drop batch_size and out"
        )
    size = None if batch_size is None else as_size(batch_size)
    if out is not None:
        _check_out(out, size, device)
    into = out if out is not None else td if inplace else None
    if is_leaf is None and call_on_nested:
        is_leaf = _everything
    run = _Apply(
        fn,
        named,
        size,
        default,
        filter_empty,
        is_leaf,
        device if device is NO_DEFAULT or device is None else as_device(device),
    )
    whole = out is None or (hasattr(out, "tensordicts") and out.batch_size == td.batch_size)
    if size is None and whole and td._member_wise(others, default):
        result = td._apply_members(run, others)
    else:
        result = run.node(td, others, ())
    if into is not None:
        if result is not None and (out is not None or not updates.written_at_once(into, result)):
            _write_back(into, result, out is not None)
        return into
    if result is None:
        return None
    if device is not NO_DEFAULT:
        result._set_device(None if device is None else as_device(device))
    if names is not NO_DEFAULT:
        result.names = names
    if propagate_lock and td._locked:
        result.lock_()
    return result


def _check_out(out: Any, size: torch.Size | None, device: Any) -> None:
    if size is not None and size != out._batch_size:
        raise RuntimeError(
            f"apply: batch_size={list(size)} is not that of out, {list(out._batch_size)}: leave "
            "it out"
        )
    given = None if device is None or device is NO_DEFAULT else as_device(device)
    if device is not NO_DEFAULT and given != out._device:
        raise RuntimeError(f"apply: device={given} is not that of out, {out._device}: leave it out")


@overload
def apply(
    td: Container,
    fn: Callable[..., Any],
    *others: Any,
    filter_empty: Literal[False] | None = None,
    **options: Unpack[ApplyOptions],
) -> Container: ...
@overload
def apply(
    td: Container,
    fn: Callable[..., Any],
    *others: Any,
    filter_empty: bool,
    **options: Unpack[ApplyOptions],
) -> Container | None: ...
@shows_options_of(applied)
def apply(td: Container, fn: Callable[..., Any], *others: Any, **options: Any) -> Container | None:
    """The container of `fn(leaf, *leaves of the others)`; where `fn` gives None, no entry.

    batch_size, device, names: those of the result, if `fn` changes them.
    inplace: write the results into this container's tensors.
    default: stands for entries that one of the others does not have (else KeyError).
    filter_empty: leave out nested containers without entries; None if nothing is left at all (the
        default if `fn` gave no result anywhere).
    call_on_nested: call `fn` on nested containers too, instead of descending.
    out: container that the results are written to.

    >>> from raffia import TensorDict
    >>> tens = TensorDict(a=10, b=dict(c=20))
    >>> TensorDict(a=1, b=dict(c=2)).apply(lambda x, y: x + y, tens).to_dict()
    {'a': tensor(11), 'b': {'c': tensor(22)}}
    """
    return applied(td, fn, False, others, **options)


@overload
def named_apply(
    td: Container,
    fn: Callable[..., Any],
    *others: Any,
    nested_keys: bool = False,
    filter_empty: Literal[False] | None = None,
    **options: Unpack[ApplyOptions],
) -> Container: ...
@overload
def named_apply(
    td: Container,
    fn: Callable[..., Any],
    *others: Any,
    nested_keys: bool = False,
    filter_empty: bool,
    **options: Unpack[ApplyOptions],
) -> Container | None: ...
@shows_options_of(applied)
def named_apply(
    td: Container,
    fn: Callable[..., Any],
    *others: Any,
    nested_keys: bool = False,
    **options: Any,
) -> Container | None:
    """Like `apply`, but `fn` receives the name of the entry as its first argument.

    nested_keys: the whole nested key instead of its last part.

    >>> from raffia import TensorDict
    >>> TensorDict(a=1, b=dict(c=2)).named_apply(lambda key, x: x if key == "c" else None).to_dict()
    {'b': {'c': tensor(2)}}
    """
    pick = (
        fn
        if nested_keys
        else lambda key, *leaves: fn(key if key.__class__ is str else key[-1], *leaves)
    )
    return applied(td, pick, True, others, **options)


def _everything(cls: type) -> bool:
    return True


def _write_back(td: Any, result: Any, replace: bool) -> None:
    """Write results into the tensors of `td`, or replace them."""
    for node, name, mine, value in paired(td, result):
        if isinstance(mine, UnbatchedTensor) and isinstance(value, Tensor):
            mine._write(value)
        elif isinstance(mine, Node) and isinstance(value, Node):
            continue
        elif replace or mine is None or isinstance(value, Node):
            node._set_str(name, value)
        elif mine is not value:
            node.set_(name, value)


@dataclass(slots=True)
class _Apply:
    """One run of `apply`: what stays the same at all nodes."""

    fn: Callable[..., Any]
    named: bool  # whether `fn` gets the nested key first
    size: torch.Size | None
    default: Any
    filter_empty: bool | None
    is_leaf: IsLeaf | None
    device: Any

    def node(self, td: Any, others: tuple[Any, ...], prefix: tuple[str, ...]) -> Node | None:
        """The result for one node; None if it has no entries and there was something to map."""
        fn, is_leaf = self.fn, self.is_leaf
        entries: dict[str, Any] = {}
        dropped = False
        for name, value in td._entries().items():
            theirs = [self.entry(other, name) for other in others] if others else ()
            if self.size is not None and isinstance(value, UnbatchedTensor):
                entries[name] = value.empty_like(self.size)
                continue
            if (
                isinstance(value, Node)
                and not isinstance(value, UnbatchedTensor)
                and not (is_leaf is not None and is_leaf(type(value)))
            ):
                if value._is_data():
                    if self.size is not None:
                        value = value.empty_like(self.size)
                    elif self.device is not NO_DEFAULT:
                        value = value.copy()
                    entries[name] = value
                    continue
                below = (*prefix, name)
                if self.size is None and value._member_wise(tuple(theirs), self.default):
                    result = value._apply_members(self, tuple(theirs), below)
                else:
                    result = self.node(value, tuple(theirs), below)
            else:
                result = (
                    fn((*prefix, name) if prefix else name, value, *theirs)
                    if self.named
                    else fn(value, *theirs)
                )
            if result is None:
                dropped = True
            elif isinstance(value, UnbatchedTensor) and isinstance(result, Tensor):
                entries[name] = UnbatchedTensor(result, td._batch_size)
            else:
                made = isinstance(result, Node) and result is not value
                entries[name] = result if made else self.fitting(result, td, name)
                if made:
                    hold(result)
        if not entries and (dropped or self.filter_empty) and self.filter_empty is not False:
            return None
        size = td._batch_size if self.size is None else self.size
        return td._new(entries, size, td._names if self.size is None else None)

    def fitting(self, result: Any, td: Any, name: str) -> Tensor | Node:
        """The stored form of a result of `fn`, after the checks of `set`."""
        if self.device is not NO_DEFAULT and self.device is not None and isinstance(result, Tensor):
            result = result.to(self.device)
        size = td._batch_size if self.size is None else self.size
        if isinstance(result, Tensor):
            if size and shape_of(result)[: len(size)] != size:
                raise mismatch(size, result, name)
            return result
        if isinstance(result, Node):
            return result
        return td._plain._make({}, size, td._device)._accept(name, result, True)

    def entry(self, other: Any, name: str) -> Any:
        if other is self.default:
            return other
        value = other._get_str(name)
        if value is None:
            if self.default is NO_DEFAULT:
                raise missing(name, other)
            return self.default
        return value


def apply_(td: Container, fn: Callable[..., Any], *others: Any, **options: Any) -> Container:
    """`apply` with `inplace=True`.

    >>> from raffia import TensorDict
    >>> TensorDict(a=torch.ones(2)).apply_(lambda x: x + 1)["a"]
    tensor([2., 2.])
    """
    return apply(td, fn, *others, inplace=True, **options)


def map(
    td: Container,
    fn: Callable[[Container], Result],
    dim: int = 0,
    num_workers: int | None = None,
    *,
    generator: torch.Generator | None = None,
    chunksize: int | None = None,
    num_chunks: int | None = None,
    pool: Any = None,
    out: Any = None,
    max_tasks_per_child: int | None = None,
    worker_threads: int = 1,
    index_with_generator: bool = False,
    pbar: bool = False,
    mp_start_method: str | None = None,
) -> Result:
    """`fn` of consecutive pieces of the container, in worker processes; the results are joined.

    dim: dimension along which the container is cut.
    num_workers: processes (default: one for each core); 0 calls `fn` in this one.
    generator: draws the seed that each worker process starts with.
    chunksize: rows in a piece (0: each row without that dimension); num_chunks: pieces.
    pool: a `multiprocessing.Pool` to use.
    out: container of the size of the result, into which the results are written.
    max_tasks_per_child: pieces for each worker process before it is replaced by a new one.
    worker_threads: threads of torch in each worker process.
    index_with_generator: cut each piece when it is asked for, instead of all at first.
    pbar: show on the terminal (stderr) how far it is.
    mp_start_method: how worker processes start: "fork", "spawn" or "forkserver".

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=torch.arange(4), batch_size=[4])
    >>> td.map(lambda piece: piece + 1, num_workers=0, chunksize=2)["a"]
    tensor([1, 2, 3, 4])
    """
    found = map_iter(
        td,
        fn,
        dim,
        num_workers,
        generator=generator,
        chunksize=chunksize,
        num_chunks=num_chunks,
        pool=pool,
        max_tasks_per_child=max_tasks_per_child,
        worker_threads=worker_threads,
        index_with_generator=index_with_generator,
        pbar=pbar,
        mp_start_method=mp_start_method,
    )
    results: list[Any] = [result for result in found if result is not None]
    if out is not None:
        lead, at = [slice(None)] * (dim % len(td._batch_size)), 0
        for result in results:
            rows = at if chunksize == 0 else slice(at, at + result.shape[dim])
            out[(*lead, rows)] = result
            at += 1 if chunksize == 0 else result.shape[dim]
        return out
    joined: Any = None
    if results:
        joined = torch.stack(results, dim) if chunksize == 0 else torch.cat(results, dim)
    return joined


def map_iter(
    td: Container,
    fn: Callable[[Container], Result],
    dim: int = 0,
    num_workers: int | None = None,
    *,
    shuffle: bool = False,
    generator: torch.Generator | None = None,
    chunksize: int | None = None,
    num_chunks: int | None = None,
    pool: Any = None,
    max_tasks_per_child: int | None = None,
    worker_threads: int = 1,
    index_with_generator: bool = True,
    pbar: bool = False,
    mp_start_method: str | None = None,
) -> Iterator[Result]:
    """The results of `map` one after the other.

    shuffle: take the rows in random order.
    generator: draws that order, and the seed that each worker process starts with.

    >>> from raffia import TensorDict
    >>> td = TensorDict(a=torch.arange(4), batch_size=[4])
    >>> [part.sum().item() for part in td.map_iter(lambda td: td["a"], num_workers=0, num_chunks=2)]
    [1, 5]
    """
    if chunksize is not None and num_chunks is not None:
        raise ValueError("map: pass chunksize or num_chunks, not both")
    dim = batch_dim(td, dim)
    rows = td._batch_size[dim]
    if shuffle:
        td = td[(*[slice(None)] * dim, torch.randperm(rows, generator=generator))]
    if num_chunks is None and chunksize is None:
        num_chunks = min(rows, num_workers or torch.multiprocessing.cpu_count())
    if num_chunks is not None:
        if num_chunks < 1:
            raise RuntimeError(f"map: num_chunks must be at least 1, got {num_chunks}")
        chunksize = max(1, -(-rows // num_chunks))
    step: int = chunksize  # type: ignore[assignment]
    starts = range(0, rows, step or 1)
    if index_with_generator:
        lead = [slice(None)] * dim
        cuts = (at if step == 0 else slice(at, at + step) for at in starts)
        parts: Any = (td[(*lead, cut)] for cut in cuts)
    else:
        node: Any = td
        parts = node.unbind(dim) if step == 0 else node.split(step, dim)
    shown = _counted(len(starts), pbar)
    if pool is not None:
        yield from shown(pool.imap(fn, parts))
    elif num_workers == 0:
        yield from shown(fn(part) for part in parts)
    else:
        context = torch.multiprocessing.get_context(mp_start_method)
        seed = context.Value("q", int(torch.randint(2**62, (), generator=generator)))
        num_workers = num_workers or torch.multiprocessing.cpu_count()
        num = None if max_tasks_per_child is None else num_workers * max_tasks_per_child
        args = (num_workers, _seeded, (seed, worker_threads))
        yield from shown(_by_pools(lambda: context.Pool(*args), fn, iter(parts), num))


def _by_pools(
    make: Callable[[], Any], fn: Callable[[Any], Any], parts: Iterator[Any], num: int | None
) -> Iterator[Any]:
    """The results of a pool of processes, of a new one after `num` parts.

    A pool's own way to end workers after some tasks loses results: their memory is handed over by
    the process that made it, which then waits for nobody.
    """
    rest = None if num is None else num - 1
    for first in parts:
        with make() as workers:
            share = itertools.chain([first], itertools.islice(parts, rest))
            yield from workers.imap(fn, share)


def _counted(total: int, pbar: bool) -> Callable[[Any], Any]:
    """A wrapper of an iterator that shows on the terminal how many results are done, if `pbar`."""
    if not pbar:
        return iter

    def counted(results: Any) -> Iterator[Any]:
        for done, result in enumerate(results, 1):
            end = "\n" if done == total else ""
            print(f"\rmap: {done}/{total}", end=end, file=sys.stderr, flush=True)
            yield result

    return counted


def _seeded(seed: Any, num_threads: int) -> None:
    """First act of a worker process: take the next seed, and let the pool end this process.

    A fork has its parent's handlers and mask. Where SIGTERM is only noted, as in a training that
    stops between two updates, or taken by SDL, as once a picture was drawn, the pool would wait for
    ever for the end of a worker.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    torch.set_num_threads(num_threads)
    with seed.get_lock():
        seed.value += 1
        torch.manual_seed(seed.value)


def to_pytree(td: Any) -> Any:
    """The structure that `from_pytree` made the container from; one made otherwise as it is.

    >>> from raffia import TensorDict
    >>> TensorDict.from_pytree([torch.zeros(1), {"a": torch.ones(1)}]).to_pytree()
    [tensor([0.]), {'a': tensor([1.])}]
    """
    skeleton = td.__dict__.get("_skeleton")
    return td if skeleton is None else _shaped(td.to_dict(), skeleton)


def _shaped(tree: Any, skeleton: Any) -> Any:
    """Nested dicts in the form of the pytree they came from, as far as their keys still fit."""
    if not isinstance(tree, dict) or skeleton is None:
        return tree
    if isinstance(skeleton, dict):
        keys = {key if is_key(key) else str(key): key for key in skeleton}
        return {
            keys.get(name, name): _shaped(value, skeleton.get(keys.get(name)))
            for name, value in tree.items()
        }
    names = list(getattr(skeleton, "_fields", [str(i) for i in range(len(skeleton))]))
    if sorted(names) != sorted(tree):
        return tree
    parts = [_shaped(tree[name], below) for name, below in zip(names, skeleton, strict=True)]
    return type(skeleton)(*parts) if hasattr(skeleton, "_fields") else type(skeleton)(parts)


# ------------------------------------------------------------------------ torch functions

OVERRIDES: dict[Any, Callable[..., Any]] = {}  # torch function -> what it does on containers


def torch_function(
    cls: Any,
    func: Any,
    types: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    override = OVERRIDES.get(func)
    if override is None:
        return NotImplemented
    return override(*args, **kwargs) if kwargs else override(*args)


def override(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def enter(implementation: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            OVERRIDES[function] = implementation
        return implementation

    return enter


# functions that are the method of the same name
METHODS = """view_as_real squeeze unsqueeze permute transpose swapaxes swapdims movedim moveaxis
flatten unflatten reshape broadcast_to repeat_interleave tile roll flip fliplr flipud rot90 narrow
split tensor_split chunk unbind gather
clone detach masked_select masked_fill where atleast_1d atleast_2d atleast_3d
numel is_floating_point
add sub rsub mul div true_divide pow maximum minimum clamp clamp_min clamp_max lerp
addcmul addcdiv logical_and bitwise_and
eq ne lt le gt ge
abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg
reciprocal round sigmoid sign sin sinh sqrt tan tanh trunc isnan isfinite isreal isneginf isposinf
sum nansum mean nanmean prod std var any all amin amax min max cummin cummax
norm logsumexp softmax quantile
abs_ acos_ asin_ atan_ ceil_ cos_ cosh_ erf_ erfc_ exp_ expm1_ floor_ frac_ lgamma_
log_ log10_ log1p_ log2_ neg_ reciprocal_ round_ sigmoid_ sign_ sin_ sinh_ sqrt_ tan_ tanh_
trunc_ clamp_min_ clamp_max_""".split()


def _by_method(name: str) -> Callable[..., Any]:
    def call(input: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(input, Node):
            raise TypeError(
                f"torch.{name} takes a container as its first argument, got {type(input).__name__}"
            )
        return getattr(input, name)(*args, **kwargs)

    return call


for _name in METHODS:
    if hasattr(torch, _name):
        OVERRIDES[getattr(torch, _name)] = _by_method(_name)
OVERRIDES[Tensor.split] = _by_method("split")

REFLECTED = dict(
    add="__radd__", mul="__rmul__", sub="__rsub__", div="__rtruediv__", pow="__rpow__",
    bitwise_and="__rand__", bitwise_or="__ror__", bitwise_xor="__rxor__",
    eq="__eq__", ne="__ne__", lt="__gt__", gt="__lt__", le="__ge__", ge="__le__",
)  # fmt: skip


def _operand(reflected: str) -> Callable[..., Any]:
    """A tensor's method whose other operand is a container."""
    return lambda tensor, td: getattr(td, reflected)(tensor)


for _name, _reflected in REFLECTED.items():
    for _function in {
        getattr(Tensor, _name),
        getattr(Tensor, _reflected.replace("__r", "__"), None),
    } - {None}:
        OVERRIDES[_function] = _operand(_reflected)
OVERRIDES[torch.nn.functional.pad] = OVERRIDES[torch.constant_pad_nd] = _by_method("pad")


@override(torch.where)
def _where(condition: Tensor, input: Any, other: Any, *, out: Any = None) -> Any:
    if isinstance(input, Node):
        return input.where(condition, other, out=out)
    return other.where(~condition, input, out=out)


@override(torch.gather)
def _gather(
    input: Any, dim: int, index: Tensor, *, sparse_grad: bool = False, out: Any = None
) -> Any:
    if sparse_grad:
        raise NotImplementedError(
            "gather on a container has no sparse gradients; leave sparse_grad=False"
        )
    return input.gather(dim, index, out=out)


def _loss(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def call(input: Any, target: Any, *args: Any, reduction: str = "mean", **kwargs: Any) -> Any:
        check_choice("reduction", reduction, ("none", "mean", "sum"))
        out = input.apply(
            lambda a, b: function(a, b, *args, reduction=reduction, **kwargs),
            target,
            batch_size=None if reduction == "none" else [],
        )
        return out

    return call


for _function in (
    torch.nn.functional.mse_loss,
    torch.nn.functional.l1_loss,
    torch.nn.functional.smooth_l1_loss,
):
    OVERRIDES[_function] = _loss(_function)


@override(torch.autograd.grad)
def _autograd_grad(outputs: Any, inputs: Any, grad_outputs: Any = None, **kwargs: Any) -> Any:
    """Gradients of tensors or a container with respect to `inputs`, and in their form."""
    given = [
        x[0] if isinstance(x, tuple) and len(x) == 1 else x for x in (outputs, inputs, grad_outputs)
    ]
    leaves = [x._leaves([]) if isinstance(x, Node) else x for x in given]
    grads = torch.autograd.grad(leaves[0], leaves[1], leaves[2], **kwargs)
    return given[1]._rebuild(iter(grads)) if isinstance(given[1], Node) else grads


def _like(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def call(input: Any, *args: Any, **kwargs: Any) -> Any:
        out = input._map(lambda leaf: function(leaf, *args, **kwargs))
        if kwargs.get("device") is not None:
            out._set_device(as_device(kwargs["device"]))
        return out.lock_() if input._locked else out

    return call


for _function in (
    torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like,
    torch.rand_like, torch.randn_like, torch.randint_like,
):  # fmt: skip
    OVERRIDES[_function] = _like(_function)
