"""Functional modules: parameters are taken out and given at each call, as functorch did.

The other way, which changes no module, is `TensorDict.from_modules` and `to_module`; both are shown
side by side in docs/functional.md.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from raffia.tensordict.keys import nearest
from raffia.tensordict.modules import Undo, mismatch_text, put_back, swap_in
from raffia.tensordict.node import Node
from raffia.tensordict.tensordict import TensorDict

Module = TypeVar("Module", bound=nn.Module)
_SHAPES = "_shapes_taken"  # ... the shapes that its own tensors had
_FLAG = "_is_stateless"  # in the `__dict__` of a functional module: whether its tensors are out


@overload
def make_functional(
    module: nn.Module,
    funs_to_decorate: Iterable[str] | None = None,
    keep_params: bool = False,
    return_params: Literal[True] = True,
) -> TensorDict: ...
@overload
def make_functional(
    module: nn.Module,
    funs_to_decorate: Iterable[str] | None = None,
    keep_params: bool = False,
    *,
    return_params: Literal[False],
) -> None: ...


def make_functional(
    module: nn.Module,
    funs_to_decorate: Iterable[str] | None = None,
    keep_params: bool = False,
    return_params: bool = True,
) -> TensorDict | None:
    """Turn a module, inplace, into a function of its parameters, and return these.

    From then on the module and each layer in it are called as `module(x, params)` or
    `module(x, params=params)`, with a container or nested dict of the module's structure; what it
    lacks stays as it is in the module. Buffers are among the parameters, and what the module writes
    to them lands there. `repopulate_module` gives the tensors back; the module
    can still be called with others, by keyword.

    funs_to_decorate: methods of the module that take parameters, by default `forward`; layers in
        the module always have `forward`.
    keep_params: leave the tensors in the module too; then parameters are given by keyword.
    return_params: False returns None.
    Returns a locked container, nested like the module's layers, over the module's own tensors. A
    `TensorDictParams` in the module keeps its tensors, which are in the result too.
    Raises RuntimeError if there are no parameters to return: the module is stateless already.

    >>> from torch import nn
    >>> from raffia.nn.functional_modules import make_functional
    >>> layer = nn.Linear(3, 2)
    >>> params = make_functional(layer)
    >>> layer(torch.ones(3), params).shape
    torch.Size([2])
    >>> several = params.data.expand(5)  # one layer with five sets of parameters
    >>> torch.vmap(layer, (None, 0))(torch.ones(3), several).shape
    torch.Size([5, 2])
    """
    _require_module(module)
    names = _names(module, funs_to_decorate)
    stateless = module.__dict__.get(_FLAG, False)
    if stateless and return_params:
        raise RuntimeError(
            "Calling make_functional with return_params=True on a functional, stateless module: "
            "its parameters were returned by the first call. repopulate_module(module, params) "
            "gives them back to the module, return_params=False asks for none."
        )
    params = None
    if return_params:
        params = TensorDict.from_module(module, filter_empty=False, lock=True)
    for layer in module.modules():
        if not isinstance(layer, Node):
            _decorate(layer, names if layer is module else ["forward"])
    if not keep_params:
        _empty(module)
    return params


def get_functional(module: Module, funs_to_decorate: Iterable[str] | None = None) -> Module:
    """Make a module accept parameters by keyword, inplace; it has its own, too. Returns it.

    funs_to_decorate: as in `make_functional`.

    >>> from torch import nn
    >>> from raffia.nn.functional_modules import get_functional
    >>> layer = get_functional(nn.Linear(3, 2))
    >>> zeros = TensorDict.from_module(layer).apply(torch.zeros_like)
    >>> layer(torch.ones(3), params=zeros).tolist()
    [0.0, 0.0]
    >>> layer(torch.ones(3)).requires_grad  # its own parameters
    True
    """
    _require_module(module)
    if module.__dict__.get(_FLAG, False):
        raise RuntimeError(
            "get_functional gives a module that has its parameters, but this one is stateless: "
            "repopulate_module(module, params) gives it those that make_functional returned"
        )
    make_functional(module, funs_to_decorate, keep_params=True, return_params=False)
    return module


def is_functional(module: nn.Module) -> bool:
    """Whether `make_functional` or `get_functional` was called on a module or on one around it.

    >>> from torch import nn
    >>> from raffia.nn.functional_modules import get_functional, is_functional
    >>> is_functional(nn.Linear(3, 2)), is_functional(get_functional(nn.Linear(3, 2)))
    (False, True)
    """
    return _FLAG in module.__dict__


def repopulate_module(model: Module, tensordict: Any) -> Module:
    """Put parameters and buffers back into a module, inplace, and return it.

    It is called as any module again, and takes other parameters by keyword.

    tensordict: container or nested dict of the module's structure; its very tensors go in.
    Raises KeyError, before anything is changed, if the module has no such entry.

    >>> from torch import nn
    >>> from raffia.nn.functional_modules import make_functional, repopulate_module
    >>> layer = nn.Linear(3, 2)
    >>> weight = layer.weight
    >>> params = make_functional(layer)
    >>> repopulate_module(layer, params).weight is weight
    True
    """
    _require_module(model)
    undo: Undo = []
    _put_in(model, tensordict, undo)
    return model


def join_functional(module: nn.Module) -> None:
    """Make a module around functional ones accept parameters too, in the structure of its layers.

    It is stateless if one within it is.

    >>> from torch import nn
    >>> from raffia.nn import TensorDictModule
    >>> from raffia.nn.functional_modules import make_functional
    >>> net = nn.Linear(3, 2)
    >>> params = TensorDict(module=make_functional(net))
    >>> module = TensorDictModule(net, in_keys=["x"], out_keys=["y"])
    >>> module(TensorDict(x=torch.ones(3)), params=params)["y"].shape
    torch.Size([2])
    """
    for layer in module.modules():
        if not isinstance(layer, Node) and "forward" not in layer.__dict__:
            _decorate(layer, ["forward"])
            if "forward" in layer.__dict__:
                layer.__dict__["forward"].joined = True


def _any_stateless(module: nn.Module) -> bool:
    return any([layer.__dict__.get(_FLAG, False) for layer in module.modules()])


# ------------------------------------------------------------------------ calls


class Functional:
    """A method of a module that takes the module's parameters as one more argument."""

    joined: bool = False  # whether the module is around functional ones, and not so itself

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.own = module.__dict__.get(name)  # a method that was set on this very module
        self.__signature__, self.keyword = _with_params(inspect.signature(getattr(module, name)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        method = getattr(type(module), self.name).__get__(module) if self.own is None else self.own
        stateless = module.__dict__[_FLAG] or self.joined and _any_stateless(module)
        params = kwargs.pop(self.keyword, None)
        if params is None:
            if stateless:
                args, params = self._split(args, kwargs)
            elif [isinstance(arg, Node) for arg in args] == [True, True] and _is_keyed(module):
                args, params = args[:1], args[1]
        if args:
            _warn_of_containers(module, args[0])
        for value in kwargs.values():
            _warn_of_containers(module, value)
        if params is not None:
            return _called_with(module, params, method, args, kwargs)
        try:
            return method(*args, **kwargs)
        except TypeError as error:
            if args and _is_params(args[-1]) and not _fits(method, args, kwargs):
                raise TypeError(
                    "It seems you tried to provide the parameters as an argument to the module "
                    "when the module was not stateless. If this is the case, this error should "
                    f"vanish by giving them by keyword: module(..., {self.keyword}=params)"
                ) from error
            raise

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The positional arguments of a call of a stateless module: inputs, and parameters last."""
        module = self.module
        if not (args and _is_params(args[-1])) and not any(
            [layer.__dict__.get(_SHAPES) for layer in module.modules()]
        ):
            return args, None  # there is nothing to give back
        inputs_only = len(args) == 1 and not kwargs and _holds_inputs(module, args[0])
        if not args or not _is_params(args[-1]) or inputs_only:
            raise TypeError(
                f"this {type(module).__name__} is stateless, since make_functional took its "
                "parameters: give them last, module(..., params), or by keyword, "
                f"module(..., {self.keyword}=params); "
                "or give them back with repopulate_module(module, params)"
            )
        return args[:-1], args[-1]


def _called_with(
    module: nn.Module,
    params: Any,
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    undo: Undo = []
    given: Undo = []
    try:
        _put_in(module, params, undo)
        given = [(store, name, store[name]) for store, name, _ in undo]
        out = method(*args, **kwargs)
        _write_back(given)
    except Exception as error:
        note = _mismatch(module)
        if note:
            error.add_note(note)
        raise
    finally:
        put_back(undo)
    return out


def _mismatch(module: nn.Module) -> str:
    """The parameters missing in a module, and those whose shapes differ from the original ones."""
    missing: list[str] = []
    differing: dict[str, tuple[Any, Any]] = {}
    for path, layer in module.named_modules():
        for name, shape in layer.__dict__.get(_SHAPES, {}).items():
            value = layer._parameters.get(name, layer._buffers.get(name))
            where = f"{path}.{name}" if path else name
            if value is None:
                missing.append(where)
            elif value.shape != shape:
                differing[where] = value.shape, shape
    lacks = f"the parameters given to the module lack {', '.join(missing)}" if missing else ""
    return "; ".join([text for text in (lacks, mismatch_text(differing)) if text])


def _put_in(module: nn.Module, params: Any, undo: Undo) -> None:
    """Put parameters into a module, and make it and its layers stateful; all or nothing."""
    if not _is_params(params):
        raise TypeError(
            "parameters must be a container or nested dict, such as "
            f"TensorDict.from_module(module), got {type(params).__name__}"
        )
    node = params if isinstance(params, Node) else TensorDict(params)
    try:
        swap_in(node, module, undo, False, {})
    except BaseException as error:
        put_back(undo)
        undo.clear()
        if any("." in name for name in node.keys()):
            error.add_note("dotted names are nested by unflatten_keys('.')")
        raise
    for layer in module.modules():
        state = layer.__dict__
        if state.get(_FLAG, False):
            undo.append((state, _FLAG, True))
            state[_FLAG] = False


def _write_back(given: Undo) -> None:
    """Copy the new value of a tensor that the module has replaced into the tensor it was given."""
    for store, name, value in given:
        new = store.get(name)
        if new is value or not isinstance(value, Tensor) or not isinstance(new, Tensor):
            continue
        if new.shape != value.shape:
            raise RuntimeError(
                f"the module has replaced its {name!r} of shape {tuple(value.shape)} by one of "
                f"shape {tuple(new.shape)}, which can't be written into the parameters given to it"
            )
        with torch.no_grad():
            value.copy_(new)


def _warn_of_containers(module: nn.Module, value: Any) -> None:
    if isinstance(value, Node) and not _is_keyed(module):
        warnings.warn(
            "You are passing a tensordict/tensorclass instance to a module that does not inherit "
            "from TensorDictModuleBase. This may lead to unexpected behaviours with functional "
            f"calls: {type(module).__name__} takes the last positional container for its "
            "parameters. Give those by keyword, params=...",
            stacklevel=5,
        )


def _is_params(value: Any) -> bool:
    return isinstance(value, (Node, Mapping))


def _is_keyed(module: nn.Module) -> Any:
    return hasattr(module, "in_keys") and hasattr(module, "out_keys")


def _holds_inputs(module: nn.Module, value: Any) -> bool:
    """Whether the only argument of a stateless module is its input, and no parameters."""
    if _is_keyed(module):
        return bool(module.in_keys)
    if not isinstance(value, Node):
        return False
    names = set(value.keys())
    if not names or names & {*module._parameters, *module._buffers, *module._modules}:
        return False
    _warn_of_containers(module, value)
    return True


def _fits(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        inspect.signature(method).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


# ------------------------------------------------------------------------ changes to a module


def _decorate(layer: nn.Module, names: list[str]) -> None:
    state = layer.__dict__
    state.setdefault(_FLAG, False)
    for name in names:
        if name in state and isinstance(state[name], Functional):
            state[name].joined = False
        if name == "forward" and type(layer).forward is nn.Module.forward and name not in state:
            continue  # a list of layers: never called
        if not isinstance(state.get(name), Functional):
            state[name] = Functional(layer, name)


def _empty(module: nn.Module) -> None:
    """Remove the tensors from a module and its layers."""
    for layer in module.modules():
        if isinstance(layer, Node):
            continue
        layer.__dict__[_FLAG] = True
        shapes = layer.__dict__.setdefault(_SHAPES, {})
        for store in (layer._parameters, layer._buffers):
            for name, value in store.items():
                if isinstance(value, Tensor) and not is_lazy(value):
                    shapes[name] = value.shape
                store[name] = None
        if "_flat_weights" in layer.__dict__:  # recurrent layers keep a second list
            weights = layer.__dict__["_flat_weights"]
            layer.__dict__["_flat_weights"] = [None] * len(weights)


def _with_params(signature: inspect.Signature) -> tuple[inspect.Signature, str]:
    """The signature with one argument more, and the name of that argument."""
    arguments = list(signature.parameters.values())
    name = "params"
    while name in signature.parameters:
        name += "_"
    kinds = [argument.kind for argument in arguments]
    by_keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    position = next((i for i, kind in enumerate(kinds) if kind in by_keyword), len(kinds))
    spread = inspect.Parameter.VAR_POSITIONAL in kinds  # nothing positional can follow *args
    kind = by_keyword[0] if spread else inspect.Parameter.POSITIONAL_OR_KEYWORD
    arguments.insert(position, inspect.Parameter(name, kind, default=None))
    return signature.replace(parameters=arguments), name


def _names(module: nn.Module, funs_to_decorate: Iterable[str] | None) -> list[str]:
    names = ["forward"] if funs_to_decorate is None else list(funs_to_decorate)
    for name in names:
        if not callable(getattr(module, name, None)):
            raise AttributeError(
                f"{type(module).__name__} has no method {name!r} to decorate"
                f"{nearest(name, dir(module))}"
            )
    return names


def _require_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"only nn.Modules can be made functional, got {type(module).__name__}")
