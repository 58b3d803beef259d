"""Ensembles: copies of a keyed module with separate parameters, run in one call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Self, overload

import torch
from torch import Tensor, nn
from torch._C._functorch import _add_batch_dim, _remove_batch_dim
from torch._functorch.predispatch import lazy_load_decompositions
from torch._functorch.vmap import vmap_increment_nesting
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from raffia.functional.seeds import GLOBAL_DRAWS
from raffia.hints import check_range
from raffia.nn.base import TensorDictModuleBase, reset_layers, shown
from raffia.nn.dispatch import dispatch
from raffia.tensordict.access import leaves as leaves_of
from raffia.tensordict.access import with_leaves
from raffia.tensordict.copies import once_each
from raffia.tensordict.node import Container, Node
from raffia.tensordict.params import TensorDictParams
from raffia.tensordict.pytrees import flatten, unflatten
from raffia.tensordict.tensordict import TensorDict


class EnsembleModule(TensorDictModuleBase):
    """Copies of a keyed module that run as one, by `torch.vmap`; each has separate parameters.

    The parameters are stacked in `params_td`, of batch size `[num_copies]`, and drawn again for
    each copy by the `reset_parameters` of the layers; layers that have none start equal. Everything
    in the result has a leading dimension `num_copies`, the inputs as well; the container that came
    in is left as it is. The copies draw random numbers (dropout, samples) independently.

    module: the keyed module. It lends its code and its `train()` mode only: its own parameters are
        neither used nor changed, and are not parameters of the ensemble. Threads that call it take
        turns.
    num_copies: how many copies.
    expand_input: True gives all copies the same input; False gives copy `i` row `i` of it, such as
        the output of an ensemble before this one.
    Raises ValueError if `num_copies` is below one, or if the input of `expand_input=False` has
    another number of rows.

    >>> from torch import nn
    >>> from raffia.nn import EnsembleModule, TensorDictModule
    >>> critic = TensorDictModule(nn.Linear(3, 1), in_keys=["obs"], out_keys=["value"])
    >>> ensemble = EnsembleModule(critic, num_copies=4)
    >>> td = ensemble(TensorDict(obs=torch.zeros(2, 3), batch_size=[2]))
    >>> td.shape, td["value"].shape
    (torch.Size([4, 2]), torch.Size([4, 2, 1]))
    >>> [name for name, _ in ensemble.named_parameters()]
    ['params_td.module.weight', 'params_td.module.bias']
    """

    module: Any

    def __init__(self, module: Any, num_copies: int, expand_input: bool = True) -> None:
        super().__init__()
        if not self.is_tdmodule_compatible(module):
            raise TypeError(
                f"EnsembleModule takes a module with in_keys and out_keys, got "
                f"{type(module).__name__}: wrap it first, as in "
                "TensorDictModule(module, in_keys=[...], out_keys=[...])"
            )
        if not isinstance(num_copies, int):
            raise TypeError(f"num_copies must be an integer, got {num_copies!r}")
        check_range("num_copies", num_copies, 1)
        self.in_keys, self.out_keys = module.in_keys, module.out_keys
        # Not registered as a child: its parameters are never trained, so an optimiser, a state dict
        # and a gradient check must not see them.
        self.__dict__["module"] = module
        self.num_copies, self.expand_input = num_copies, expand_input
        self._quick = type(self).forward is EnsembleModule.forward
        self.params_td = TensorDictParams(_copies(module, num_copies), no_convert=True)
        if not self._redraw(self.params_td) and any(True for _ in self.parameters()):
            warnings.warn(
                f"no layer of {type(module).__name__} has a reset_parameters method, so the "
                f"{num_copies} copies start with the same parameters; change them in "
                "ensemble.params_td",
                stacklevel=2,
            )

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: Container) -> Container:
        """Run all copies; also callable with tensors, see `dispatch`."""
        return self._run(tensordict)

    def _run(self, tensordict: Any) -> Any:
        rows: tuple[list[Any], Any] = ([], None)
        if not self.expand_input:
            self._check_rows(tensordict)
            rows = _opened(tensordict)
        params, module = self.params_td, self.module
        # A module without parameters needs an entry that tells how many copies there are.
        leaves = leaves_of(params) or [torch.empty(self.num_copies)]
        number = len(leaves)
        form = None

        def member(*values: Any) -> tuple[Any, ...]:
            nonlocal form
            mine = _closed(values[number:], rows[1]) if rows[0] else tensordict
            own = with_leaves(params, values[:number])
            with own.to_module(module):  # what vmap shows is put in as it is
                outputs, form = _opened(module(mine.copy()))
            return tuple(outputs)

        # While the module has one ensemble's parameters, no other thread calls it. The lock is that
        # of draws, as members may draw: two locks could be taken in two orders.
        with nullcontext() if torch.compiler.is_compiling() else GLOBAL_DRAWS:
            outputs = _mapped(member, self.num_copies, [*leaves, *rows[0]])
        return _closed(outputs, form)

    def _check_rows(self, tensordict: Any) -> None:
        shapes = {"the input": tensordict.batch_size}
        if not tensordict.batch_size:
            entries = tensordict.items(True, True)
            shapes = {key: leaf.shape for key, leaf in entries if isinstance(leaf, Tensor)}
        for name, shape in shapes.items():
            if shape[:1] != (self.num_copies,):
                raise ValueError(
                    f"this ensemble has expand_input=False: the first dimension of its input must "
                    f"be its num_copies={self.num_copies}, and {name} has shape {tuple(shape)}. "
                    "With expand_input=True all copies get the same input"
                )

    # -- parameters

    def reset_parameters(self) -> None:
        """Draw the parameters of all copies again.

        >>> from torch import nn
        >>> from raffia.nn import EnsembleModule, TensorDictModule
        >>> critic = TensorDictModule(nn.Linear(3, 1), in_keys=["obs"], out_keys=["value"])
        >>> ensemble = EnsembleModule(critic, num_copies=4)
        >>> ensemble.params_td.zero_().sum(reduce=True).item()
        0.0
        >>> ensemble.reset_parameters()
        >>> ensemble.params_td["module", "weight"].any().item()
        True
        """
        self._redraw(self.params_td)

    @overload
    def reset_parameters_recursive(self, parameters: None = None) -> None: ...
    @overload
    def reset_parameters_recursive(self, parameters: Container) -> Container: ...

    def reset_parameters_recursive(self, parameters: Any = None) -> Node | None:
        """Draw given parameters of all copies again, inplace.

        parameters: tree of the structure and batch size of `params_td`; `params_td` itself resets
            the ensemble.
        Returns the tensors, which require gradients, over the same memory.
        Raises ValueError if they are not given or are for another number of copies.

        >>> from torch import nn
        >>> from raffia.nn import EnsembleModule, TensorDictModule
        >>> critic = TensorDictModule(nn.Linear(3, 1), in_keys=["obs"], out_keys=["value"])
        >>> ensemble = EnsembleModule(critic, num_copies=4)
        >>> other = ensemble.reset_parameters_recursive(ensemble.params_td.data.clone())
        >>> other["module", "weight"].shape
        torch.Size([4, 1, 3])
        """
        if parameters is None:
            raise ValueError(
                "Ensembles are functional and require passing a TensorDict of parameters to "
                "reset_parameters_recursive: ensemble.reset_parameters_recursive("
                "ensemble.params_td), or ensemble.reset_parameters()"
            )
        if parameters.batch_size[:1] != (self.num_copies,):
            raise ValueError(
                f"the parameters of {self.num_copies} copies must have batch size "
                f"[{self.num_copies}], got {list(parameters.batch_size)}; see ensemble.params_td"
            )
        parameters = parameters.apply(lambda leaf: leaf.detach().requires_grad_(_real(leaf)))
        self._redraw(parameters)
        return parameters

    def _redraw(self, params: Any) -> bool:
        """Reset the layers of every copy inplace; returns whether any layer can be reset."""
        stacked = leaves_of(params)
        found = False
        for i in range(self.num_copies):
            member = _rows(stacked, i)
            with torch.no_grad(), with_leaves(params, member).to_module(self.module):
                found = _reset(self.module)
                after = leaves_of(TensorDict.from_module(self.module))
                for leaf, old, new in zip(stacked, member, after, strict=True):
                    if new is not old:  # a layer that made itself a new parameter
                        leaf[i].copy_(new)
        return found

    # -- module

    def train(self, mode: bool = True) -> Self:
        """Set the training mode, also of the module that the copies are made of."""
        self.module.train(mode)
        return super().train(mode)

    def __repr__(self) -> str:
        return shown(self, [f"module={self.module!r}", f"params_td={self.params_td!r}"])


def _mapped(member: Callable[..., Any], num_copies: int, leaves: list[Any]) -> Sequence[Any]:
    """`torch.vmap` of a function from tensors to tensors, whose draws differ.

    For flat tensors its passes over the structure of arguments and results have nothing to find,
    and take three tenths of the time of eight small networks.
    """
    if torch.compiler.is_compiling() or not all([isinstance(leaf, Tensor) for leaf in leaves]):
        return torch.vmap(member, randomness="different")(*leaves)
    lazy_load_decompositions()
    with vmap_increment_nesting(num_copies, "different") as level:
        outputs = member(*[_add_batch_dim(leaf, 0, level) for leaf in leaves])
        form = None
        if not all([isinstance(out, Tensor) for out in outputs]):
            # containers of other kinds than `_opened` opens
            outputs, form = pytree.tree_flatten(outputs)
        values = [
            _remove_batch_dim(out, level, num_copies, 0) if isinstance(out, Tensor) else out
            for out in outputs
        ]
        return values if form is None else pytree.tree_unflatten(values, form)


def _opened(td: Any) -> tuple[list[Any], Any]:
    """The leaves of a container and how to put them together: `vmap` is quick with tensors only."""
    return flatten(td) if td.__class__ is TensorDict else ([td], None)


def _closed(values: Sequence[Any], form: Any) -> Any:
    return values[0] if form is None else unflatten(values, form)


def _real(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def _copies(module: nn.Module, num_copies: int) -> TensorDict:
    """The parameters and buffers of a module, repeated; what is tied in it stays tied."""

    def repeated(leaf: Tensor) -> Tensor:
        if is_lazy(leaf):
            raise RuntimeError(
                "a lazy layer has no parameters to copy yet: call the module once before "
                "EnsembleModule(module, num_copies)"
            )
        copies = leaf.detach().expand(num_copies, *leaf.shape).clone()
        is_parameter = isinstance(leaf, nn.Parameter)
        return nn.Parameter(copies, leaf.requires_grad) if is_parameter else copies

    return TensorDict.from_module(module).apply(once_each(repeated), batch_size=[num_copies])


def _rows(stacked: list[Tensor], i: int) -> list[Tensor]:
    """Row `i` of each tensor, over its memory; a parameter, where the tensor is trained."""

    def row(leaf: Tensor) -> Tensor:
        part = leaf.detach()[i]
        return nn.Parameter(part) if leaf.requires_grad else part

    return [*map(once_each(row), stacked)]


def _reset(module: Any) -> bool:
    """`reset_parameters` of a keyed module that has its own, and of all layers below."""
    own = getattr(type(module), "reset_parameters", None)  # not by attributes that are passed on
    if own is not None:
        own(module)
    return reset_layers(module) or own is not None
