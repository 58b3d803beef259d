"""Settings for the text that a container prints, in a block of code or permanently."""

from __future__ import annotations

import contextlib
import textwrap
from contextvars import ContextVar, Token
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from raffia.tensordict.build import shape_of
from raffia.tensordict.node import Node

DEFAULTS: dict[str, Any] = dict(
    show_batch_size=True,
    show_device=True,
    show_is_shared=True,
    show_shape=True,
    show_field_device=True,
    show_dtype=True,
    show_field_is_shared=True,
    show_grad=False,
    show_is_contiguous=False,
    show_is_view=False,
    show_storage_size=False,
    sort_keys="alphabetical",
    compact=False,
)
_DETAILS = ("show_device", "show_is_shared", "show_field_device", "show_dtype")
_options: ContextVar[dict[str, Any]] = ContextVar("raffia_printoptions", default=DEFAULTS)


def get_printoptions() -> dict[str, Any]:
    """The settings of `set_printoptions`, as a dict.

    >>> get_printoptions()["show_dtype"]
    True
    """
    return dict(_options.get())


class set_printoptions(contextlib.ContextDecorator):
    """Set what the text of containers shows, in a block, a function or, with `set()`, permanently.

    verbose: False hides the devices, dtypes and sharing that are not asked for.
    Of the container: `show_batch_size`, `show_device`, `show_is_shared`; of its tensors:
    `show_shape`, `show_field_device`, `show_dtype`, `show_field_is_shared`, `show_grad`,
    `show_is_contiguous`, `show_is_view`, `show_storage_size` (in bytes). `sort_keys` is
    "alphabetical", or False for the order of the entries; `compact` writes each tensor as its dtype
    and the dimensions after the batch size.
    Raises TypeError for another setting.

    >>> import torch
    >>> from raffia import TensorDict
    >>> with set_printoptions(compact=True):
    ...     TensorDict(a=torch.zeros(2, 3), n=dict(b=torch.ones(2)), batch_size=[2])
    TensorDict(batch_size=[2], fields={a: f32[3], n: {b: f32[]}})
    """

    def __init__(self, *, verbose: bool = True, **kwargs: Any) -> None:
        if unknown := kwargs.keys() - DEFAULTS.keys():
            raise TypeError(
                f"set_printoptions has no setting {sorted(unknown)}; its settings are "
                f"{sorted(DEFAULTS)}"
            )
        quiet = {} if verbose else dict.fromkeys([*_DETAILS, "show_field_is_shared"], False)
        self.changes = {**quiet, **kwargs}
        self.tokens: list[Token[dict[str, Any]]] = []

    def __enter__(self) -> None:
        self.tokens.append(_options.set(_options.get() | self.changes))

    def __exit__(self, *error: Any) -> None:
        _options.reset(self.tokens.pop())

    def set(self) -> None:
        """Keep the settings from now on."""
        _options.set(_options.get() | self.changes)


def shown() -> dict[str, Any] | None:
    """The settings; None where nobody has changed them."""
    options = _options.get()
    return None if options is DEFAULTS else options


def compact(td: Any, options: dict[str, Any]) -> str:
    """A container on one line, its entries as dtype and own dimensions."""
    parts = []
    if options["show_batch_size"]:
        parts.append(f"batch_size={list(td.batch_size)}")
    if options["show_device"] and td.device is not None:
        parts.append(f"device={td.device}")
    parts.append("fields=" + _fields(td, options))
    return f"{type(td).__name__}({', '.join(parts)})"


def _fields(td: Any, options: dict[str, Any]) -> str:
    names = sorted(td.keys()) if options["sort_keys"] == "alphabetical" else list(td.keys())
    return "{" + ", ".join([f"{name}: {_entry(td, name, options)}" for name in names]) + "}"


def _entry(td: Any, name: str, options: dict[str, Any]) -> str:
    try:
        value = td._get_str(name)
    except RuntimeError:  # tensors of unlike shapes in a lazy stack
        return "unlike shapes"
    if isinstance(value, Tensor):
        ndim = 0 if isinstance(value, Node) else len(td.batch_size)
        kind = str(value.dtype).removeprefix("torch.") if options["show_dtype"] else ""
        for word, letter in (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u")):
            kind = kind.replace(word, letter)
        kind = kind.replace("int", "i") if not kind.startswith("u") else kind
        return f"{kind}{list(value.shape[ndim:])}"
    if value._is_data():
        return type(getattr(value, "_data", value.tolist())).__name__
    plain = type(value).__name__ == "TensorDict"
    return ("" if plain else type(value).__name__) + _fields(value, options)


def tensor_parts(value: Any, shape: Any, shared: bool, options: dict[str, Any]) -> list[str]:
    """The shown properties of a tensor."""
    try:
        storage = 0 if value.is_meta else value.untyped_storage().nbytes()
    except (RuntimeError, ValueError):  # as in `in_shared_memory`
        storage = 0
    texts = {
        "show_shape": f"shape={shape}",
        "show_field_device": f"device={value.device}",
        "show_dtype": f"dtype={value.dtype}",
        "show_field_is_shared": f"is_shared={shared}",
        "show_grad": f"requires_grad={value.requires_grad}",
        "show_is_contiguous": f"is_contiguous={value.is_contiguous()}",
        "show_is_view": f"is_view={value._is_view()}",
        "show_storage_size": f"storage_size={storage}",
    }
    return [text for name, text in texts.items() if options[name]]


def show(td: Any) -> str:
    """The text of a container: entries in alphabetical order, nested ones indented."""
    options = shown() or DEFAULTS
    if options["compact"]:
        return compact(td, options)
    names = sorted(td.keys()) if options["sort_keys"] == "alphabetical" else td.keys()
    lines = [f"{name}: {_describe(td, name)}" for name in names]
    fields = ",\n".join([indented(line) for line in lines])
    body = ["fields={" + ("\n" + fields + "}" if lines else "\n}"), *td._extra_lines()]
    texts = {
        "show_batch_size": f"batch_size={td.batch_size}",
        "show_device": f"device={td.device}",
        "show_is_shared": f"is_shared={td.is_shared()}",
    }
    body += [*[text for name, text in texts.items() if options[name]], *td._last_lines()]
    return f"{type(td).__name__}(\n" + indented(",\n".join(body)) + ")"


def indented(text: str) -> str:
    """`text` indented by four columns, except for blank lines."""
    if "\n\n" in text:
        return textwrap.indent(text, "    ")
    return "    " + text.replace("\n", "\n    ")


def _describe(td: Any, name: str) -> str:
    try:
        value = td._get_str(name)
    except RuntimeError:
        return td._describe_unlike(name)
    return describe_tensor(value) if isinstance(value, Tensor) else repr(value)


def in_shared_memory(tensor: Tensor) -> bool:
    """Whether a tensor's memory is shared with other processes; False if it has no memory.

    >>> in_shared_memory(torch.eye(2)), in_shared_memory(torch.eye(2).to_sparse())
    (False, False)
    """
    try:  # torch counts all memory of a GPU as shared; the device is asked last, which takes longer
        return tensor.untyped_storage().is_shared() and (tensor.is_cpu or tensor.is_cuda)
    except (RuntimeError, ValueError):  # sparse, within vmap, a parameter without shape
        return False


def describe_tensor(value: Any) -> str:
    """One line for a tensor: class, shape, device, dtype, sharing."""
    if not isinstance(value, Tensor):
        return repr(value)
    kind = "Parameter" if isinstance(value, nn.Parameter) else type(value).__name__
    shared = in_shared_memory(value)
    shape = "not known yet" if is_lazy(value) else shape_of(value)
    options = shown()
    if options is not None:
        return f"{kind}({', '.join(tensor_parts(value, shape, shared, options))})"
    return f"{kind}(shape={shape}, device={value.device}, dtype={value.dtype}, is_shared={shared})"
