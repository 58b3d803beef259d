"""Containers with entries of all kinds, to be stored or copied; and their content, to compare."""

import enum
import io
import json
import pathlib

import numpy as np
import torch
from torch import Tensor, nn

from raffia import NonTensorData, NonTensorStack, TensorClass, TensorDict, lazy_stack, tensorclass
from raffia.tensordict.memmap import DTYPES

nested_tensor = torch.nested.nested_tensor


@tensorclass
class Pair:
    x: Tensor
    y: Tensor = None
    tag: str = ""


@tensorclass(frozen=True)
class Fixed:
    x: Tensor


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


def through_torch(value, **options):
    """The value after `torch.save` and `torch.load`."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def sample(fill=1.0):
    """A small container with an entry of each kind."""
    rows = [TensorDict(v=torch.full((2, i + 1), fill), s=str(i), batch_size=[2]) for i in range(2)]
    return TensorDict(
        a=torch.full((2, 3), fill),
        n=TensorDict(b=torch.full((2, 4), fill, dtype=torch.float64), batch_size=[2, 4]),
        z=lazy_stack(rows, 1),
        c=Pair(x=torch.full((2,), fill), tag="t", batch_size=[2]),
        f=Fixed(x=torch.full((2,), fill), batch_size=[2]),
        p=nn.Parameter(torch.full((2,), fill)),
        s="hi",
        o=NonTensorData({"k": (1, [None])}, batch_size=[2]),
        w=["p", "q"],
        batch_size=[2],
        names=["t"],
    )


def content(value):
    """The content of a container, a tensor or another value, in a comparable form."""
    if isinstance(value, Tensor):
        return _of_nested(value) if value.is_nested else _of_tensor(value)
    if isinstance(value, (NonTensorData, NonTensorStack)):
        return value.batch_size, content(value.tolist())
    if isinstance(value, TensorClass):
        lazy = hasattr(value._td, "tensordicts")
        return type(value), content(value._td if lazy else value.to_tensordict())
    if hasattr(value, "tensordicts"):
        return value.stack_dim, [content(member) for member in value.tensordicts]
    if hasattr(value, "batch_size"):
        entries = {name: content(value.get(name)) for name in value.keys()}
        return value.batch_size, value.names, entries
    if isinstance(value, np.ndarray):
        # as text, in which NaN is NaN
        return value.dtype.str, value.shape, repr(value.tolist()), value.flags.writeable
    if isinstance(value, dict):
        return dict, tuple([(content(key), content(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(content, value))
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(content, value))
    return type(value), repr(value)


def _of_tensor(x):
    plain = x.detach().as_subclass(Tensor).resolve_conj().resolve_neg().contiguous()
    # The bytes: they distinguish NaNs and work for any dtype.
    return x.dtype, tuple(x.shape), bytes(plain.clone().reshape(-1).view(torch.uint8).tolist())


def _of_nested(x):
    structure = None
    if x.layout is torch.jagged:
        lengths = None if x.lengths() is None else content(x.lengths())
        structure = x._ragged_idx, content(x.offsets()), lengths, content(x.values())
    return x.dtype, x.layout, structure, [content(row) for row in x.detach().unbind()]


# ---------------------------------------------------------------------------- nested tensors


def jagged():
    rows = [torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)]
    return nested_tensor(rows, layout=torch.jagged)


def with_holes(offsets=torch.int64):
    return torch.nested.nested_tensor_from_jagged(
        torch.arange(20.0).view(10, 2),
        offsets=torch.tensor([0, 4, 10], dtype=offsets),
        lengths=torch.tensor([2, 5], dtype=offsets),
    )


def strided():
    return nested_tensor([torch.arange(6.0).view(2, 3), torch.arange(20.0).view(4, 5)])


def _of_memory(numbers, start):
    rows = torch.tensor([[2, 3], [4, 1]]), torch.tensor([[3, 1], [1, 1]]), torch.tensor(start)
    return torch._nested_view_from_buffer(torch.arange(float(numbers)), *rows)


def _of_dtype(dtype, layout):
    values = _bits(dtype).view(6, 3)
    if layout is torch.jagged:
        return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 6]))
    # Some dtypes can't be made row by row.
    rows = torch.tensor([[2, 3], [4, 3]]), torch.tensor([[3, 1], [3, 1]]), torch.tensor([0, 6])
    return torch._nested_view_from_buffer(values.reshape(-1), *rows)


def _bits(dtype):
    return (torch.arange(18 * dtype.itemsize, dtype=torch.uint8) % 2).view(dtype)


NESTED = {
    "jagged": jagged,
    "transposed": lambda: jagged().transpose(1, 2),
    "not contiguous": lambda: torch.nested.nested_tensor_from_jagged(
        torch.arange(18.0).view(3, 6).t(), torch.tensor([0, 2, 6])
    ),
    "with holes": with_holes,
    "int32 offsets": lambda: with_holes(torch.int32),
    "one empty row": lambda: nested_tensor(
        [torch.zeros(0, 3), torch.ones(2, 3)], layout=torch.jagged
    ),
    "a gradient": lambda: jagged().requires_grad_(),
    "strided": strided,
    "strided, transposed": lambda: strided().transpose(1, 2),
    "strided, of a larger memory": lambda: _of_memory(30, [5, 20]),
    "strided, in another order": lambda: _of_memory(10, [4, 0]),
    "strided, empty rows": lambda: nested_tensor([torch.zeros(0, 3), torch.ones(5, 0)]),
    "strided, numbers": lambda: nested_tensor([torch.tensor(1.0), torch.tensor(2.0)]),
}


# ----------------------------------------------------------------------- stored containers

KEYS = [
    *("a.b", "a/b", "/abs", "../x", "..", ".", "a b", " ", "é木", "meta", "meta.json", "a.memmap"),
    *("_tensordict", "%2F", "a\\b", "a\nb", "con:", "~", "*", '"q"', "", "x" * 250, "é" * 200),
    *("x" * 200 + "/", "\ud800", "." * 250, "CON", "con", "a" * 4000, "shape", "device", "_type"),
    *("_class", "dtype", "data", "type", "_names", "batch_size", "names", "stack_dim", "0"),
    *("__metadata__", "_format_version", "non_tensor", "entries", "file", "raffia"),
]
VALUES = [
    *(None, True, 1.5, -0.0, 7, 2**70, "text", "é\n\0", "", [1, 2, "x"], ["a", ["b"]], (), set()),
    *((1, ("a",)), {"a": {"b": [None]}}, {"$tuple": [1]}, {"$dict": {}}, {"$a": 1, "b": ()}),
    *([{"$tuple": ()}], {"$array": [1], "$enum": "not one"}, b"\x00\xff", 2 - 3j, {1, 2, 3}),
    *(frozenset({"a", "b"}), {("a", 1), ("b", 2)}, {1: "one", (2, 3): [None], "text": {4: 5}}),
    *({None: 0, True: 1.5}, pathlib.Path("folder/file.txt"), Colour.RED, Level.HIGH),
    {"infos": np.ones(2), "level": Level.LOW, "tags": {"x"}},
    *(np.arange(6, dtype=np.int16).reshape(2, 3), np.zeros((0, 2)), np.array(2.5)),
    *(np.array(["text", "more"]), np.array([b"a", b"bc"])),
    *(np.array(["2020-01-02"], dtype="datetime64[D]"), np.float32(1.5), np.bool_(True)),
]


def keys():
    entries = {key: {key: torch.full((i % 3,), i), "t": "text"} for i, key in enumerate(KEYS)}
    entries |= {"0" + key: torch.full((2,), i) for i, key in enumerate(KEYS)}
    paths = [
        "n.b",
        ("n", "b"),
        "n/b",
        ("n.b.c", "d"),
        ("n", "b.c", "d"),
        "n.c.d",
        ("n.memmap", "a"),
    ]
    other_case = {"A": torch.ones(1), "N": {"X": torch.ones(2), "x": torch.zeros(2)}}
    paths = {key: torch.ones(i + 1) for i, key in enumerate(paths)}
    return TensorDict({"all": entries, "paths": paths, "case": other_case})


def values():
    td = TensorDict(batch_size=[2])
    for i, value in enumerate(VALUES):
        td.set_non_tensor(f"{i}", value)
        td.set_non_tensor(("n", f"{i}"), value)
    td["rows"] = torch.stack([NonTensorData(np.ones(1)), NonTensorData(Colour.BLUE)])
    td["words"] = ["p", "q"]
    td["m"] = TensorDict(w=[["a", "b", "c"], ["d", "e", "f"]], batch_size=[2, 3])
    return td


def shapes():
    t, wave = torch.arange(12.0).reshape(3, 4), torch.tensor([1 + 2j, 3 - 4j])
    bits = torch.tensor([0x7FC00001, 0x7F800000, -1, -(2**31), 1, 0], dtype=torch.int32)
    return TensorDict(
        scalar=torch.tensor(3.0),
        empty=torch.zeros(0, 4),
        turned=t.T,
        wide=torch.ones(1, 3).expand(4, 3),
        strided=t[:, ::2],
        row=t[1],
        whole=t,
        again=t,
        n=TensorDict(tied=t, grad=nn.Parameter(t)),
        special=bits.view(torch.float32),
        conjugate=wave.conj(),
        negative=wave.conj().imag,
        requires=torch.zeros(3, requires_grad=True),
    )


def stacks():
    rows = [TensorDict(a=torch.full((4,), float(i)), s=str(i), batch_size=[4]) for i in range(2)]
    return TensorDict(
        p=Pair(x=torch.ones(4), tag="m", batch_size=[4]),
        lazy=lazy_stack(rows, 1),
        uneven=lazy_stack([TensorDict(v=torch.zeros(i + 1), u=f"{i}") for i in range(4)]),
        empty=TensorDict(e=TensorDict(batch_size=[4]), batch_size=[4]),
        batch_size=[4],
    )


def _with_dtypes():
    made = {name: _bits(dtype).view(2, 9) for name, dtype in DTYPES.items()}
    return TensorDict(
        made | {f"no {n}": torch.empty(2, 0, dtype=d) for n, d in DTYPES.items()}, [2]
    )


def _with_nested(make):
    def made():
        x = make()
        nested = TensorDict({"y": x * 2, "c": torch.ones(2, 3)}, [2])
        return TensorDict({"x": x, "b": torch.arange(2), "n": nested, "text": "t"}, [2])

    return made


PLAIN = {
    "an entry of each kind": sample,
    "nothing": TensorDict,
    "no tensors": lambda: TensorDict(s="x", n=TensorDict(e=TensorDict())),
    "a batch of nothing": lambda: TensorDict(batch_size=[5]),
    "dtypes": _with_dtypes,
    "keys": keys,
    "values": values,
    "shapes": shapes,
    "stacks": stacks,
}
RAGGED = {name: _with_nested(make) for name, make in NESTED.items()} | {
    f"dtypes, {layout}": lambda layout=layout: TensorDict(
        {name: _of_dtype(dtype, layout) for name, dtype in DTYPES.items()}, [2]
    )
    for layout in (torch.jagged, torch.strided)
}


def edit(folder, change):
    """Changes the record of a folder."""
    record = json.loads((folder / "meta.json").read_text())
    change(record)
    (folder / "meta.json").write_text(json.dumps(record))
