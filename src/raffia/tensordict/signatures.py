"""Signatures of functions that stand for others, as `help`, `inspect` and editors show them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])
Arguments = ParamSpec("Arguments")

if TYPE_CHECKING:
    Kind = TypeVar("Kind")  # the class of containers that a method is called on
    Value = TypeVar("Value")  # what a property is ...
    Given = TypeVar("Given")  # ... and what it can be set to

    class Attribute(Generic[Value]):
        """The type of a property made of functions, for type checkers."""

        def __get__(self, td: Any, kind: Any) -> Value: ...

    class Assigned(Attribute[Value], Generic[Value, Given]):
        """The type of a property made of functions that can be assigned, for type checkers."""

        def __set__(self, td: Any, value: Given) -> None: ...

    class ClassMethod(Generic[Arguments]):
        """The type of class methods that give a container of their class, for type checkers."""

        def __get__(self, td: Any, kind: type[Kind]) -> Callable[Arguments, Kind]: ...


def attribute(read: Callable[[Any], Value]) -> Attribute[Value]:
    """The property that a function reads."""
    made: Any = property(read)
    return made


def assigned(
    read: Callable[[Any], Value], write: Callable[[Any, Given], None]
) -> Assigned[Value, Given]:
    """The property that a function reads, and another one writes."""
    made: Any = property(read, write)
    return made


def class_method(function: Callable[Concatenate[Any, Arguments], Any]) -> ClassMethod[Arguments]:
    """The class method that a function of a class is; it gives a container of that class."""
    method: Any = classmethod(function)
    return method


def documented_as(function: Callable[..., Any]) -> Callable[[Function], Function]:
    """Give a method the docstring and signature of the function that it is a fast path for."""

    def documented(method: Function) -> Function:
        method.__doc__ = function.__doc__
        method.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return method

    return documented


def shows_options_of(
    function: Callable[..., Any], without: str = ""
) -> Callable[[Function], Function]:
    """Show, instead of a function's `**options`, those of the one that it hands them on to.

    without: names of options that are not shown.
    """

    def signed(caller: Function) -> Function:
        *own, _ = inspect.signature(caller).parameters.values()
        hidden = {*without.split(), *[parameter.name for parameter in own]}
        options = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(function).parameters.values()
            if parameter.default is not inspect.Parameter.empty and parameter.name not in hidden
        ]
        shown = inspect.signature(caller).replace(parameters=[*own, *options])
        caller.__signature__ = shown  # type: ignore[attr-defined]
        return caller

    return signed


def by_method(method: Function, module: str) -> Function:
    """The function that calls, of the container that it is given, the method of the same name.

    module: where the function is found, for pickles of it.
    """
    name, signature = method.__name__, inspect.signature(method)

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        if not args:
            signature.bind(**options)  # TypeError without the container
            args = (options.pop(next(iter(signature.parameters))),)
        return getattr(args[0], name)(*args[1:], **options)

    call.__module__ = module
    return cast(Function, call)


def with_signature_of(function: Function) -> Callable[[Callable[..., Any]], Function]:
    """Give a function the signature of another one, for type checkers as well."""

    def signed(caller: Callable[..., Any]) -> Function:
        caller.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return cast(Function, caller)

    return signed
