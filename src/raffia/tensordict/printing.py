"""Settings for the text that a container prints, in a block of code or permanently."""

from __future__ import annotations

import contextlib
import functools
import itertools
import textwrap
from contextvars import ContextVar, Token
from typing import Any

import torch
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
    and the dimensions after the batch size (-1 where the members of a lazy stack differ), and all
    on one line if it fits into 80 columns.
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


_WIDTH = 80  # columns of the compact text
_Text = str | tuple[str, list[tuple[str, Any]]]  # of an entry; of a container: what it begins with


def compact(td: Any, options: dict[str, Any]) -> str:
    """A container with its entries as dtype and own dimensions; on one line if it fits there."""
    parts = []
    if options["show_batch_size"]:
        parts.append(f"batch_size={_sizes(td.batch_size)}")
    if options["show_device"] and td.device is not None:
        parts.append(f"device={td.device}")
    own: list[tuple[str, _Text]] = []
    if _is_stack(td) and not hasattr(td, "_td"):  # not shown for a tensorclass over one
        parts.append(f"stack_dim={td.stack_dim}")
        pairs = enumerate(zip(td.tensordicts, td._exclusive(), strict=True))
        own = [(f"{i}", ("", _fields(m, options, names))) for i, (m, names) in pairs if names]
    out = f"{type(td).__name__}(" + "".join([f"{part}, " for part in parts]) + "fields="
    tail = len(", exclusive_fields={") if own else 0
    out += _wrapped(("", _fields(td, options)), "", len(out), 1 + tail)
    if own:
        out += ", exclusive_fields="
        out += _wrapped(("", own), "", len(out.rsplit("\n", 1)[-1]), 1)
    return out + ")"


def _is_stack(td: Any) -> bool:
    return bool(getattr(td, "tensordicts", ()))


def _sizes(shape: Any) -> str:
    return f"[{','.join(map(str, shape))}]"


def _fields(td: Any, options: dict[str, Any], names: Any = None) -> list[tuple[str, _Text]]:
    """The entries and their texts, in alphabetical order; fields of a tensorclass without value."""
    fields = getattr(td, "__dataclass_fields__", {})
    td = getattr(td, "_td", td)
    names = list(td.keys()) if names is None else names
    empty = [name for name in fields if name not in names and fields[name].repr]
    names = [name for name in names if name not in fields or fields[name].repr]
    texts = [(name, _entry(td, name, options)) for name in names]
    if options["sort_keys"] == "alphabetical":
        texts.sort(key=lambda text: f"{text[0]}: {_on_one_line(text[1])}")
    return texts + [(name, "None") for name in empty]


def _entry(td: Any, name: str, options: dict[str, Any]) -> _Text:
    leaves = _members_with(td, name)
    value = leaves[0][1]
    if isinstance(value, Tensor):
        return _tensor(td, [pair for pair in leaves if isinstance(pair[1], Tensor)], options)
    if value._is_data():
        return "NonTensorStack" if _is_stack(value) else type(value._unwrapped()).__name__
    inner = td._get_str(name)
    kind = type(inner if inner is value or not _is_stack(td) else value).__name__
    more = inner._batch_size[len(td._batch_size) :]
    prefix = ("" if kind == "TensorDict" else kind) + (_sizes(more) if more else "")
    return prefix, _fields(inner, options)


def _members_with(td: Any, name: str) -> list[tuple[Any, Any]]:
    """The containers that hold an entry, which are several in a lazy stack, and what they hold."""
    if not _is_stack(td):
        return [(td, td._get_str(name))]
    return [pair for member in td.tensordicts for pair in _members_with(member, name)]


def _tensor(td: Any, leaves: list[tuple[Any, Tensor]], options: dict[str, Any]) -> str:
    """A tensor, or that of all members: -1 for sizes that differ, the dtype of their stack."""
    shapes = {
        (-1,)
        if is_lazy(leaf)
        else tuple(shape_of(leaf)[0 if isinstance(leaf, Node) else len(member._batch_size) :])
        for member, leaf in leaves
    }
    columns = itertools.zip_longest(*shapes)
    text = _sizes([column[0] if len({*column}) == 1 else -1 for column in columns])
    if options["show_dtype"]:
        dtype = functools.reduce(torch.promote_types, {leaf.dtype for _, leaf in leaves})
        kind = str(dtype).removeprefix("torch.")
        for word, letter in (("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i")):
            kind = kind.replace(word, letter)
        text = kind + text
    devices = sorted({str(leaf.device) for _, leaf in leaves})
    return text if td.device is not None or devices == ["cpu"] else f"{text}@{','.join(devices)}"


def _on_one_line(text: _Text) -> str:
    if isinstance(text, str):
        return text
    return text[0] + "{" + ", ".join([f"{k}: {_on_one_line(t)}" for k, t in text[1]]) + "}"


def _wrapped(text: _Text, indent: str, used: int, tail: int) -> str:
    """The text, one entry per line where a line would have more than 80 columns.

    used, tail: columns before and after it.
    """
    line = _on_one_line(text)
    if isinstance(text, str) or not text[1] or used + len(line) + tail <= _WIDTH:
        return line
    indent += " " * 4
    ends = [1] * (len(text[1]) - 1) + [tail + 1]
    lines = [
        f"{indent}{name}: " + _wrapped(inner, indent, len(indent) + len(name) + 2, end)
        for (name, inner), end in zip(text[1], ends, strict=True)
    ]
    return text[0] + "{\n" + ",\n".join(lines) + "}"


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
        return td._describe_differences(name)
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
