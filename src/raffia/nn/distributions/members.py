"""Reading the arguments of a composite distribution: nested names, parameters, what is wrong."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NoReturn

from torch.distributions import Distribution

from raffia.hints import did_you_mean
from raffia.tensordict.keys import MissingKeyError, NestedKey, dotted, is_key, unravel_key
from raffia.tensordict.node import Node

Values = dict[NestedKey, Any]  # name of a distribution -> what belongs to it
_TREES = (dict, Node)  # what nested names may be given as; a composite is a member, not this


class CompositeTypeError(TypeError, RuntimeError):
    """An argument of a `CompositeDistribution` is of the wrong type.

    >>> from raffia.nn.distributions.composite import CompositeDistribution
    >>> CompositeDistribution(TensorDict(), {}, name_map=["action"])
    Traceback (most recent call last):
    ...
    raffia.nn.distributions.members.CompositeTypeError: name_map must be a dict, got list
    """


def node(what: str, value: Any) -> Any:
    """`value`, which must be a container."""
    if not isinstance(value, Node):
        raise CompositeTypeError(
            f"{what} must be a TensorDict, got {type(value).__name__}; "
            "to make one of a dict: TensorDict(entries, batch_size=[...])"
        )
    return value


def known(name: Any, names: Collection[NestedKey]) -> str:
    """The end of an error about a name that is not among `names`."""
    spelled = {dotted(n): n for n in names}
    hint = did_you_mean(dotted(name), spelled, ". Did you mean {!r}?") if is_key(name) else ""
    return f"; there are {sorted(names, key=str)}{hint}"


def leaves(
    argument: str, tree: Any, names: Collection[NestedKey] = (), path: tuple[Any, ...] = ()
) -> Iterator[tuple[NestedKey, Any]]:
    """The (name, value) pairs of nested dicts, down to the first part of a path in `names`."""
    keyed = isinstance(tree, (Mapping, Node))
    if not keyed:
        raise CompositeTypeError(f"{argument} must be a dict, got {type(tree).__name__}")
    for part, value in tree.items():
        if not is_key(part):
            raise CompositeTypeError(
                f"the names in {argument} are strings or tuples of strings, got {part!r}"
            )
        name = unravel_key((*path, part) if path else part)
        if isinstance(value, _TREES) and name not in names:
            yield from leaves(argument, value, names, (*path, part))
        else:
            yield name, value


def extras(extra_kwargs: Any, names: Collection[NestedKey]) -> Values:
    """The constants by the name of their distribution."""
    if extra_kwargs is None:
        return {}
    constants = dict(leaves("extra_kwargs", extra_kwargs, names))
    for name, kwargs in constants.items():
        if name not in names:
            raise MissingKeyError(
                f"extra_kwargs names {name!r}, which is no distribution{known(name, names)}"
            )
        if not isinstance(kwargs, _TREES):
            raise CompositeTypeError(
                f"extra_kwargs[{name!r}] must be a dict of keyword arguments, got {kwargs!r}"
            )
    return constants


def parameters(params: Any, name: NestedKey) -> Any:
    """The keyword arguments in `params` for the distribution `name`."""
    kwargs = node("params", params).get(name)
    if kwargs is None:
        raise_no_parameters(params, name)
    if not isinstance(kwargs, Node):
        raise CompositeTypeError(
            f"the parameters of {name!r} must be a container of keyword arguments, such as "
            f"{{'loc': ..., 'scale': ...}}, got a {type(kwargs).__name__}"
        )
    return kwargs


def raise_no_parameters(params: Any, name: NestedKey) -> NoReturn:
    """Raise an error that there is nothing for `name`, and what there is."""
    names = [key for key, value in params.items(True, False) if isinstance(value, Node)]
    raise MissingKeyError(f"no param {name!r} found in params{known(name, names)}")


def build(name: NestedKey, cls: Any, params: Any, extra: Any) -> Distribution:
    """One distribution; an error of its class is raised with the name."""
    if not callable(cls):
        raise CompositeTypeError(
            f"distribution_map[{name!r}] must be a class or a function that gives a distribution, "
            f"got {cls!r}"
        )
    try:
        return cls(**params, **extra)
    except ValueError as error:
        raise ValueError(f"distribution {name!r}: {error}") from error
    except TypeError as error:
        raise TypeError(f"distribution {name!r}: {error}") from error


def renamed(dists: Values, name_map: Any) -> Values:
    """The distributions by the key of their sample."""
    keys = dict(leaves("name_map", name_map))
    for name, key in keys.items():
        if not is_key(key):
            raise CompositeTypeError(
                f"name_map[{name!r}] must be a string or a tuple of strings, got {key!r}"
            )
    out: Values = {}
    for name, dist in dists.items():
        key = unravel_key(keys.get(name, name))
        if key in out:
            raise ValueError(f"two distributions would write their sample at {key!r}")
        out[key] = dist
    return out


def suffixed(name: NestedKey, suffix: str) -> NestedKey:
    """The key of a figure about the entry `name`: its last part with a suffix."""
    return name + suffix if isinstance(name, str) else (*name[:-1], name[-1] + suffix)
