"""CUDA graphs of functions and keyed modules: all kernels are replayed in one call.

Source: CUDA graphs as in torch.cuda.graph; the interface is that of tensordict.nn.CudaGraphModule.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from raffia.nn.base import listed
from raffia.nn.dispatch import dispatch
from raffia.nn.modes import InteractionType, interaction_type
from raffia.nn.probabilistic_module import ProbabilisticTensorDictModule
from raffia.tensordict.keys import NestedKey
from raffia.tensordict.node import Node


class CudaGraphModule:
    """Records a function, or a keyed module, as a CUDA graph, and replays it at each later call.

    The first `warmup - 1` calls run it on a side stream, the next one records it, and from then on
    a call copies its inputs into the graph's memory, replays the graph and returns copies of its
    outputs. So the function has to do the same at each call: no branch on values, no other shapes.
    What it writes into its inputs does not reach those of the caller. Inputs and outputs take no
    gradient: tensors that do, such as parameters, are read from the scope, and a step of an
    optimiser belongs into the function. Without a GPU each call runs the function as it is, and
    the constructor warns.

    It is not an `nn.Module`: an optimiser takes the parameters of the wrapped module.

    module: a function of tensors, or of a container if it has `in_keys` or these are given.
    warmup: which call records, from 1; a compiled function needs some to finish compiling.
    in_keys, out_keys: the keys that a function of containers reads and writes; `[]`: a container
        must be given. A module's own ones are used instead, with a warning if they differ.
    device: where the streams are; the current GPU by default.
    Raises ValueError for a `warmup` below 1, and at a call, once recorded, for other shapes, other
    constants or tensors that are not on a GPU; KeyError for missing entries; RuntimeError for
    inputs that require gradients.

    >>> import warnings
    >>> from raffia.nn import CudaGraphModule, TensorDictModule
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")  # without a GPU
    ...     add = CudaGraphModule(TensorDictModule(lambda x: x + 1, ["x"], ["y"]))
    >>> add(TensorDict(x=torch.zeros(2)))["y"], add(x=torch.ones(2))
    (tensor([1., 1.]), tensor([2., 2.]))
    """

    def __init__(
        self,
        module: Callable[..., Any],
        warmup: int = 2,
        in_keys: list[NestedKey] | None = None,
        out_keys: list[NestedKey] | None = None,
        device: torch.device | None = None,
    ) -> None:
        if not isinstance(warmup, int) or warmup < 1:
            raise ValueError(f"warmup must be an integer greater than 0, got {warmup!r}")
        self.module, self.device = module, device
        self.counter = 0  # calls until the recording; stays 0 without a GPU
        self._warmup = warmup
        self._card = Card(device) if torch.cuda.is_available() else None
        if self._card is None:
            warnings.warn(
                "there is no GPU here: this CudaGraphModule runs its function at each call, "
                "without any gain in speed",
                stacklevel=2,
            )
        self.in_keys = _own_keys(module, "in_keys", in_keys)
        self.out_keys = _own_keys(module, "out_keys", out_keys)
        if self.in_keys is not None and self.out_keys is None:
            self.out_keys = []
        self._replay: Callable[[], None] | None = None
        self._given: Any = None  # the graph's own inputs: a container, or tensors and constants
        self._output: Any = None  # the graph's own output
        self._constants: Any = None  # what else was given to a keyed module
        self._writes_input = False  # whether a keyed module gives back the container it got
        self._kinds: list[InteractionType | None] = []
        self._call: Callable[..., Any] = self._on_tensors
        if self.in_keys is not None:
            by_tensors = dispatch(source=self.in_keys, dest=self.out_keys, auto_batch_size=False)
            self._call = by_tensors(self._on_container)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run, record or replay the function."""
        return self._call(*args, **kwargs)

    # -- functions of tensors

    def _on_tensors(self, *args: Any, **kwargs: Any) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        for leaf in leaves:
            _require_no_gradient(leaf)
        if self._card is None:
            return self.module(*args, **kwargs)
        if self._replay is not None:
            given, recorded = self._given
            if form != recorded:
                raise ValueError(
                    "this CudaGraphModule was recorded with arguments of the structure "
                    f"{recorded}, got {form}"
                )
            _copy_in(given, leaves)
            return self._replayed()
        if self._is_warming_up():
            return self._card.warm(lambda: self.module(*args, **kwargs))
        own = [self._own(leaf) for leaf in leaves]
        args, kwargs = form.unflatten(own)
        self._record(lambda: self.module(*args, **kwargs))
        self._given = own, form
        return self._replayed()

    def _replayed(self) -> Any:
        assert self._replay is not None
        self._replay()
        return tree_map(_copied, self._output)

    # -- functions of a container

    def _on_container(
        self, tensordict: Any, *args: Any, tensordict_out: Any = None, **kwargs: Any
    ) -> Any:
        td, options = tensordict, dict(kwargs)
        if tensordict_out is not None:
            options["tensordict_out"] = tensordict_out
        for leaf in td.values(True, True):
            _require_no_gradient(leaf)
        if self._card is None:
            return self.module(td, *args, **options)
        if any([isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))]):
            raise ValueError("tensors are given to a CudaGraphModule as entries of the container")
        if self._replay is None:
            if self._is_warming_up():
                return self._card.warm(lambda: self.module(td, *args, **options))
            self._given = td.apply(self._own)
            self._constants = args, kwargs
            self._record(lambda: self._run_on_own(args, kwargs))
            self._kinds = self._interaction_types()
            if not (self._output is None or isinstance(self._output, Node)):
                self._replay = None
                raise RuntimeError(
                    "a function with in_keys returns a container or None, got "
                    f"{type(self._output).__name__}"
                )
        else:
            self._fill(td, args, kwargs)
        assert self._replay is not None
        self._replay()
        return self._handed_over(td, tensordict_out)

    def _run_on_own(self, args: Any, kwargs: Any) -> Any:
        work = self._given.copy()  # the graph reads the entries as they were given
        output = self.module(work, *args, **kwargs)
        self._writes_input = output is work
        return output

    def _fill(self, td: Any, args: Any, kwargs: Any) -> None:
        """Copy the entries of a container into the graph's own."""
        if (args, kwargs) != self._constants:
            raise ValueError(
                f"this CudaGraphModule was recorded with {self._constants} and can only be called "
                f"with the same, got {(args, kwargs)}"
            )
        if td.batch_size != self._given.batch_size:
            raise ValueError(
                f"this CudaGraphModule was recorded with batch_size={self._given.batch_size}, "
                f"got batch_size={td.batch_size}"
            )
        if self._interaction_types() != self._kinds:
            warnings.warn(
                f"this CudaGraphModule was recorded with the interaction types {self._kinds}, "
                f"which it replays, but now they are {self._interaction_types()}",
                stacklevel=5,
            )
        own, new = [], []
        for key, leaf in self._given.items(True, True):
            value = td.get(key, None)
            if value is not None:
                own.append(leaf)
                new.append(value)
            elif any([key == k or key[: len(k)] == k for k in self.in_keys or ()]):
                raise KeyError(f"the container lacks the entry {key!r} that the graph reads")
        _copy_in(own, new)

    def _handed_over(self, td: Any, tensordict_out: Any) -> Any:
        """Copies of what the graph wrote, where the module would have put them."""
        if self._output is None:
            return None
        if not self._writes_input and tensordict_out is None:
            return self._output.clone()
        dest = td if tensordict_out is None else tensordict_out
        for key, leaf in self._output.items(True, True):
            if leaf is not self._given.get(key, None):
                dest.set(key, _copied(leaf))
        return dest

    def _interaction_types(self) -> list[InteractionType | None]:
        module, kind = self.module, interaction_type()
        layers = module.modules() if isinstance(module, nn.Module) else ()
        drawing = [m for m in layers if isinstance(m, ProbabilisticTensorDictModule)]
        return [m.default_interaction_type if kind is None else kind for m in drawing]

    # -- recording

    def _is_warming_up(self) -> bool:
        self.counter += 1
        return self.counter < self._warmup

    def _record(self, run: Callable[[], Any]) -> None:
        assert self._card is not None
        output, replay = self._card.record(run)
        for leaf in tree_leaves(output):
            _require_no_gradient(leaf)
        self._output, self._replay = output, replay

    def _own(self, leaf: Any) -> Any:
        """The graph's own copy of an input."""
        assert self._card is not None
        if isinstance(leaf, Tensor) and not self._card.holds(leaf):
            raise ValueError(
                f"inputs of a CudaGraphModule must be on a GPU, got one on {leaf.device}"
            )
        return _copied(leaf)

    # -- what is in it

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The state dict of the wrapped module; empty for a function."""
        module = self.module
        return module.state_dict(*args, **kwargs) if isinstance(module, nn.Module) else {}

    def load_state_dict(self, *args: Any, **kwargs: Any) -> tuple[list[str], list[str]] | None:
        """Load a state dict into the memory of the wrapped module, which the graph reads."""
        module = self.module
        return module.load_state_dict(*args, **kwargs) if isinstance(module, nn.Module) else None

    def __repr__(self) -> str:
        lines = [f"module={self.module!r}", f"warmup={self._warmup}"]
        lines += [f"in_keys={self.in_keys}", f"out_keys={self.out_keys}"]
        body = ",\n".join(lines).replace("\n", "\n    ")
        return f"{type(self).__name__}(\n    {body}\n)"


Result = TypeVar("Result")


class Card:
    """The streams of a GPU on which functions are warmed up and recorded."""

    def __init__(self, device: torch.device | None) -> None:
        self.warming = torch.cuda.Stream(device)
        self.recording = torch.cuda.Stream(device)

    def warm(self, run: Callable[[], Result]) -> Result:
        """Run a function on a side stream, in order with the current stream."""
        here = torch.cuda.current_stream(self.warming.device)
        self.warming.wait_stream(here)
        with torch.cuda.stream(self.warming):
            output = run()
        here.wait_stream(self.warming)
        return output

    def record(self, run: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """Record a function without running it; returns its output to be, and the call that fills
        it.
        """
        graph = torch.cuda.CUDAGraph()
        # What other threads do is not recorded, and no reason to fail.
        with torch.cuda.graph(graph, stream=self.recording, capture_error_mode="thread_local"):
            output = run()
        return output, graph.replay

    def holds(self, tensor: Tensor) -> bool:
        """Whether a graph can read a tensor where it is."""
        return tensor.is_cuda


def copy_each(to: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Copy tensors into others: by one kernel for those of one dtype, by one for each if mixed.

    >>> x = [torch.zeros(2), torch.zeros(1, dtype=torch.int64), torch.zeros(1)]
    >>> copy_each(x, [torch.ones(2), torch.tensor([3]), torch.tensor([4.0])])
    >>> x
    [tensor([1., 1.]), tensor([3]), tensor([4.])]
    """
    groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for own, new in zip(to, given, strict=True):
        mine, theirs = groups.setdefault((own.dtype, new.dtype), ([], []))
        mine.append(own)
        theirs.append(new)
    for mine, theirs in groups.values():
        torch._foreach_copy_(mine, theirs)


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _copy_in(own: list[Any], new: list[Any]) -> None:
    """Copy values into the graph's tensors; what is not a tensor has to be as it was."""
    mine, theirs = [], []
    for leaf, value in zip(own, new, strict=True):
        if isinstance(leaf, Tensor) and isinstance(value, Tensor):
            if leaf.shape != value.shape:
                raise ValueError(
                    "this CudaGraphModule was recorded with a tensor of shape "
                    f"{tuple(leaf.shape)}, got {tuple(value.shape)}"
                )
            _require_no_gradient(value)
            mine.append(leaf)
            theirs.append(value)
        elif isinstance(leaf, Tensor) or isinstance(value, Tensor) or not leaf == value:
            raise ValueError(
                "only tensors can change from call to call: this CudaGraphModule was recorded "
                f"with {leaf!r}, got {value!r}"
            )
    copy_each(mine, theirs)


def _require_no_gradient(leaf: Any) -> None:
    if isinstance(leaf, Tensor) and leaf.requires_grad:
        raise RuntimeError(
            "CudaGraphModule cannot be part of an autograd graph: its inputs and outputs are "
            "detached. Let the function take tensors that require gradients, such as parameters, "
            "from its scope: def step(x, weight=weight)"
        )


def _own_keys(module: Any, name: str, keys: Any) -> Any:
    """The keys of the module, else those that were given."""
    if not hasattr(module, name):
        return keys
    own = getattr(module, name)
    if keys and listed(list(keys) if isinstance(keys, set) else keys, name) != listed(own, name):
        warnings.warn(
            f"CudaGraphModule ignores {name}={keys} because the module has its own {name}={own}",
            stacklevel=3,
        )
    return own
