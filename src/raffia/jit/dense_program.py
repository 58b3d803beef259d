"""Small networks in float32 as tables that one compiled call works through, row by row.

A `DenseProgram` gets the layers once, with their sizes; `load` copies weights in, as often as
they change; what `bind` returns reads the caller's arrays, computes, and writes the caller's
arrays. A call costs a microsecond and the arithmetic, and a row's result is the same to the bit in
every batch.

>>> from raffia.jit.dense_program import DenseProgram
>>> program = DenseProgram()
>>> hidden = program.dense(program.read("x", 3), 5, relu=True)
>>> program.write(program.dense(hidden, 2), "y")
>>> program.load([torch.ones(5, 3), torch.zeros(5), torch.ones(2, 5), torch.ones(2)])
>>> x, y = torch.ones(4, 3), torch.empty(4, 2)
>>> step = program.bind({"x": x, "y": y})
>>> step(4)
>>> y[0]
tensor([16., 16.])
"""

import math
import threading
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from raffia.jit import layers, packing
from raffia.jit.kernel import step
from raffia.jit.records import Record
from raffia.jit.tiles import PANEL
from raffia.jit.vectors import WIDTH

BLOCK = 48  # rows together: what a layer reads stays near, and weights are fetched rarely
_NONE = -1

_local = threading.local()


class ColumnBuffer(NamedTuple):
    """Columns of the rows that a program works on, in its own memory."""

    start: int  # columns in memory before this buffer's, whose rows are separate
    first: int  # first column in its memory
    width: int
    stride: int  # columns from a row to the next

    @property
    def layout(self) -> tuple[int, int]:
        """Bytes before the first row, and bytes from a row to the next."""
        return 4 * (BLOCK * self.start + self.first), 4 * self.stride


class _PackedParameter(NamedTuple):
    """A parameter's position in the packed weights, see `raffia.jit.packing.pack`."""

    start: int  # float32 before the first panel
    shape: tuple[int, ...]  # [columns, depth] or [columns]
    depth: int  # depth of the panels
    first: int = 0
    chunk: int = PANEL
    spacing: int = PANEL
    gates: int = 1  # parts of the columns, which alternate by chunks

    def pieces(self, parameter: Tensor) -> list[tuple[int, ...]]:
        """The copies that pack this parameter, see `raffia.jit.packing.pack`."""
        if (
            parameter.shape != self.shape
            or parameter.dtype != torch.float32
            or parameter.device.type != "cpu"
        ):
            raise ValueError(
                f"this parameter must be float32 of shape {list(self.shape)} on the CPU, got "
                f"{parameter.dtype} of shape {list(parameter.shape)} on {parameter.device}"
            )
        columns, depth = self.shape[0] // self.gates, (*self.shape, 1)[1]
        column_step, depth_step = (4 * step for step in (*parameter.stride(), 0)[:2])
        source = parameter.data_ptr()
        out = 4 * (self.start + self.first * PANEL)
        return [
            (
                source + gate * columns * column_step,
                columns,
                column_step,
                depth,
                depth_step,
                out,
                self.depth,
                gate * self.chunk,
                self.chunk,
                self.spacing,
            )
            for gate in range(self.gates)
        ]


class _ArraySlot(NamedTuple):
    """One of the caller's arrays: its number, dtype and the shape of a row."""

    number: int
    dtype: torch.dtype
    row: tuple[int, ...]  # [width], or [] for one number
    chosen: bool  # its rows are chosen by an index

    def check(self, name: str, array: Tensor) -> None:
        if (
            array.dtype != self.dtype
            or array.dim() != 1 + len(self.row)
            or array.shape[1:] != self.row
            or not array.is_cpu
            or not array.is_contiguous()
        ):
            shape = f"[{', '.join(['rows', *map(str, self.row)])}]"
            raise ValueError(
                f"{name!r} must be a contiguous {self.dtype} array {shape} on the CPU, got "
                f"{array.dtype} of shape {list(array.shape)}, strides {array.stride()}, on "
                f"{array.device}"
            )


class DenseProgram:
    """A program of layers, which run in the order in which they are added here.

    The methods' docstrings name the parameters that each layer takes of those that `load` is given.
    Names of arrays are free; `bind` takes arrays under these names: float32 rows of the layer's
    width, or where rows are chosen or named, int64 numbers of rows.
    """

    def __init__(self) -> None:
        self._slots: dict[str, _ArraySlot] = {}
        self._layers: list[Record] = []
        self._packed: list[_PackedParameter] = []
        self._fills: list[tuple[int, int, float]] = []
        self._free: list[ColumnBuffer] = []
        self._size = self._columns = 0
        self._parameters: list[Tensor] = []
        self._table = self._weights = self._pieces = torch.empty(0)

    def buffer(self, width: int) -> ColumnBuffer:
        """A buffer for rows; a layer that is given none makes its own."""
        for buffer in self._free:
            if buffer.stride == _up(width):
                self._free.remove(buffer)
                return buffer._replace(width=width)
        return self.neighbours(width)[0]

    def reuse(self, buffer: ColumnBuffer) -> None:
        """Free a buffer whose contents are no longer needed."""
        self._free.append(buffer)

    def neighbours(self, *widths: int) -> tuple[ColumnBuffer, ...]:
        """Allocate adjacent buffers, and one that spans all; columns of zeros may separate them."""
        padded = [_up(width) for width in widths]
        starts = [sum(padded[:i]) for i in range(len(widths))]
        start, stride = self._columns, sum(padded)
        self._columns += stride
        apart = (
            ColumnBuffer(start, at, width, stride) for at, width in zip(starts, widths, strict=True)
        )
        return *apart, ColumnBuffer(start, 0, starts[-1] + widths[-1], stride)

    def read(
        self, array: str, width: int, *, index: str | None = None, out: ColumnBuffer | None = None
    ) -> ColumnBuffer:
        """Copy rows of an array; `index` names an array that tells which."""
        out = out or self.buffer(width)
        slot, rows = self._slot(array, width=width, chosen=index is not None), self._index(index)
        self._add(layers.READ, slot, rows, width, _up(width), *out.layout)
        return out

    def look_up(self, rows: int, width: int, *, index: str) -> ColumnBuffer:
        """Columns of a parameter, the weight [width, rows] of a layer with a one-hot input."""
        out = self.buffer(width)
        weights = self._parameter((width, rows), rows)
        panels = _up(width) // PANEL
        self._add(layers.LOOK_UP, weights, self._index(index), rows, panels, *out.layout)
        return out

    def dense(
        self,
        inputs: ColumnBuffer,
        width: int,
        *,
        relu: bool = False,
        onto: ColumnBuffer | None = None,
        added: ColumnBuffer | None = None,
        out: ColumnBuffer | None = None,
        behind: float = 0.0,
    ) -> ColumnBuffer:
        """out = max(0, inputs @ weight.T + bias) + added. Parameters: weight, bias.

        onto: what the product is added to instead of a bias, and where the result is written.
        behind: what stands in the buffer behind the last column.
        """
        out = onto or out or self.buffer(width)
        panels = _up(width) // PANEL
        weights = self._parameter((width, inputs.width), inputs.width)
        bias = _NONE if onto else self._parameter((width,), behind=behind)
        self._add(
            layers.DENSE,
            *inputs.layout,
            inputs.width,
            panels,
            weights,
            bias,
            0.0 if relu else -math.inf,
            *(added.layout if added else (_NONE, 0)),
            *out.layout,
        )
        return out

    def lstm(
        self, features: ColumnBuffer, h: ColumnBuffer, both: ColumnBuffer, c: ColumnBuffer
    ) -> ColumnBuffer:
        """A step of an LSTM: overwrites c and returns the next h. `both`: features, h side by side.

        Parameters, as of `torch.nn.LSTM`: weight_ih, weight_hh, the two biases' sum.
        """
        out, gates = self.buffer(h.width), self.buffer(4 * PANEL)
        groups = -(-h.width // WIDTH)
        depth = both.width
        columns = 4 * h.width
        weights = self._parameter((columns, features.width), depth, gates=4)
        # the second weight lies behind the first one in the same panels
        gates_of_h = self._packed[-1]._replace(shape=(columns, h.width), first=h.first)
        self._packed.append(gates_of_h)
        bias = self._parameter((columns,), gates=4)
        self._add(
            layers.LSTM,
            *both.layout,
            depth,
            groups,
            weights,
            bias,
            *c.layout,
            *out.layout,
            gates.layout[0],
        )
        return out

    def norm(
        self,
        values: ColumnBuffer,
        eps: float,
        *,
        relu: bool = False,
        added: ColumnBuffer | None = None,
    ) -> None:
        """Layer normalisation inplace, as in `dense` floored and added to. Parameters: weight,
        bias."""
        gain, bias = (self._parameter((values.width,)) for _ in range(2))
        self._add(
            layers.NORM,
            *values.layout,
            values.width,
            gain,
            bias,
            eps,
            0.0 if relu else -math.inf,
            *(added.layout if added else (_NONE, 0)),
        )

    def gelu(self, values: ColumnBuffer, *, added: ColumnBuffer | None = None) -> None:
        """GELU inplace, as approximated by tanh, and added to."""
        addition = added.layout if added else (_NONE, 0)
        self._add(layers.GELU, *values.layout, values.width, *addition)

    def gaussian(
        self, values: ColumnBuffer, least: float, most: float, *, fixed: float | None = None
    ) -> None:
        """Normal distributions: the means stay, behind them come their standard deviations.

        The second half of the columns holds exponents, which are clamped to least .. most; or
        anything, where the deviation is fixed.
        """
        size = values.width // 2
        self._add(layers.GAUSSIAN, *values.layout, size, least, most, fixed or 0.0)

    def decode(self, logits: ColumnBuffer, array: str, *, eps: float = 1e-3) -> None:
        """Write the value that logits stand for, see `categorical_to_scalar`.

        Parameter: the support's values, where there is more than one logit; the layer before must
        leave minus infinity behind the last.
        """
        padded, support = 0, 0
        if logits.width > 1:
            padded = _up(logits.width)
            support = self._parameter((logits.width,))
        slot = self._slot(array)
        self._add(layers.DECODE, *logits.layout, 4 * padded, support, eps, slot)

    def write(
        self, values: ColumnBuffer, array: str, *, index: str | None = None, zero: str | None = None
    ) -> None:
        """Copy rows to an array, zeros where the array named by `zero` (bool) is true."""
        slot = self._slot(array, width=values.width, chosen=index is not None)
        rows, zeros = self._index(index), self._index(zero, torch.bool)
        self._add(layers.WRITE, slot, rows, values.width, *values.layout, zeros)

    def load(self, parameters: Sequence[Tensor]) -> None:
        """Copy parameters in; bound programs use them from then on."""
        if len(parameters) != len(self._packed):
            raise ValueError(
                f"this program takes {len(self._packed)} parameters, got {len(parameters)}"
            )
        pieces = [
            piece
            for packed, parameter in zip(self._packed, parameters, strict=True)
            for piece in packed.pieces(parameter)
        ]
        if not len(self._weights):
            self._weights = torch.zeros(self._size, dtype=torch.float32, device="cpu")
            for start, stop, behind in self._fills:
                self._weights[start:stop] = behind
            self._table = torch.tensor([layer.address for layer in self._layers], device="cpu")
        self._parameters = list(parameters)  # the pieces hold their addresses
        self._pieces = torch.tensor(pieces, dtype=torch.int64, device="cpu")
        self.reload()

    def reload(self) -> None:
        """Copy the same tensors as before, which were changed inplace: much faster."""
        packing.pack(self._pieces.data_ptr(), len(self._pieces), self._weights.data_ptr())

    def bind(self, arrays: Mapping[str, Tensor]) -> "Bound":
        """The program bound to these arrays; a call works on their first `rows` rows.

        Numbers of rows in arrays that choose are not checked. Rows are worked on in blocks: a row
        that is written where another is read may be written before.
        """
        return Bound([self], arrays)

    def run(self, arrays: Mapping[str, Tensor], rows: int) -> None:
        """`bind(arrays)(rows)` once, for arrays that were made for it: they are not checked."""
        memory = scratch(BLOCK * self._columns)
        addresses = self.addresses(arrays)
        record = self.record(addresses)  # a name, so that it lives
        layers.run(record.address, memory, rows)

    def addresses(self, arrays: Mapping[str, Tensor]) -> "array[int]":
        """The addresses of the arrays that the program works on, in its order."""
        return array("q", [arrays[name].data_ptr() for name in self._slots])

    def record(self, addresses: "array[int]") -> layers.ProgramRecord:
        """The program as the kernel reads it, on arrays at these addresses."""
        table, weights = self._table.data_ptr(), self._weights.data_ptr()
        record = layers.ProgramRecord()
        record.set(table, len(self._layers), weights, addresses.buffer_info()[0], BLOCK)
        return record

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a DenseProgram holds memory addresses, so it cannot be copied or pickled: build "
            "another one, then load the parameters"
        )

    def _slot(
        self,
        name: str,
        dtype: torch.dtype = torch.float32,
        *,
        width: int = 0,
        chosen: bool = False,
    ) -> int:
        row = (width,) if width else ()
        slot = self._slots.setdefault(name, _ArraySlot(len(self._slots), dtype, row, chosen))
        if (slot.dtype, slot.row) != (dtype, row):
            raise ValueError(
                f"the array {name!r} was first used with rows of {list(slot.row)} {slot.dtype}, "
                f"and now with {list(row)} {dtype}"
            )
        self._slots[name] = slot._replace(chosen=slot.chosen and chosen)
        return slot.number

    def _index(self, name: str | None, dtype: torch.dtype = torch.int64) -> int:
        return _NONE if name is None else self._slot(name, dtype)

    def _parameter(
        self, shape: tuple[int, ...], depth: int = 1, *, gates: int = 1, behind: float = 0.0
    ) -> int:
        """Reserve room for a parameter in panels; returns the bytes before it."""
        start = self._size
        if gates == 1:
            packed, columns = _PackedParameter(start, shape, depth), _up(shape[0])
        else:
            packed = _PackedParameter(start, shape, depth, 0, WIDTH, gates * WIDTH, gates)
            columns = -(-shape[0] // (gates * WIDTH)) * gates * WIDTH
        self._size += columns * depth
        self._packed.append(packed)
        if behind:
            self._fills.append((start, self._size, behind))
        return 4 * start

    def _add(self, kind: int, *fields: float) -> None:
        layer = layers.KINDS[kind]()
        layer.set(kind, *fields)
        self._layers.append(layer)


class Bound:
    """A program with the arrays that it works on; or several, each for the rows of its member."""

    def __init__(
        self,
        programs: Sequence[DenseProgram],
        arrays: Mapping[str, Tensor],
        members: Sequence[Tensor] = (),  # `member`, `read`, `written` of a `BoundRecord`
    ) -> None:
        steps, rooms = [], []  # bytes from a row to the next in each array; how many rows
        for program in programs:
            for name, slot in program._slots.items():
                slot.check(name, arrays[name])
                steps.append(0 if slot.chosen else slot.dtype.itemsize * math.prod(slot.row))
                rooms += [] if slot.chosen else [len(arrays[name])]
        addresses = programs[0].addresses(arrays)
        if any(program.addresses(arrays) != addresses for program in programs[1:]):
            raise ValueError(
                "the programs of a group must read and write the same arrays in the same order"
            )
        self._room = min(rooms, default=0)
        self._size = BLOCK * max(program._columns for program in programs)  # float32 of scratch
        num, reloaded = len(addresses), addresses[:]
        records = [program.record(reloaded) for program in programs]
        ours = [record.address for record in records]
        table = array("q", [*addresses, *steps[:num], *ours])
        at = table.buffer_info()[0]
        self._fields = (  # in the order of a `BoundRecord`
            at + 16 * num,
            *([member.data_ptr() for member in members] or [0, 0, 0]),
            *(num, at, at + 8 * num, reloaded.buffer_info()[0]),
        )
        # alive as long as the addresses are used
        self._referenced = programs, dict(arrays), members, table, reloaded, records
        self._bound = layers.BoundRecord()
        self._bound.set(*self._fields, 0)

    def __call__(self, rows: int) -> None:
        if not 0 <= rows <= self._room:
            raise ValueError(f"the call asks for {rows} rows, but the arrays have {self._room}")
        layers.run_bound(self._bound.address, scratch(self._size), rows)

    def native(self) -> tuple[int, int]:
        """The addresses of a compiled function and of what it is to be called with, and the rows.

        See raffia.jit.kernel. They hold in this thread, until another program is called in it; rows
        are not checked.
        """
        self._bound.set(*self._fields, scratch(self._size))
        return step(layers.run_as_step), self._bound.address


def bind_group(
    programs: Sequence[DenseProgram],  # P, which read and write the same arrays
    arrays: Mapping[str, Tensor],  # as `DenseProgram.bind` takes them
    member: Tensor,  # int64 [rows of what is chosen from], each in 0..P-1; written to
    *,
    read: str,  # of the arrays: which row of `member` a row belongs to
    written: str,  # ... and in which it is noted
) -> Bound:
    """Several programs of one form for the rows of one batch: each row by that of its member.

    Rows of a member that lie next to each other are worked on together, so a batch in which members
    lie one after the other costs little more than one program would.

    >>> programs = []
    >>> for number in (2.0, 3.0):
    ...     program = DenseProgram()
    ...     x = program.read("x", 1, index="from")
    ...     program.write(program.dense(x, 1), "x", index="to")
    ...     program.load([torch.full((1, 1), number), torch.zeros(1)])
    ...     programs.append(program)
    >>> x, member = torch.ones(4, 1), torch.tensor([0, 1, 0, 0])
    >>> arrays = {"x": x, "from": torch.tensor([0, 1]), "to": torch.tensor([2, 3])}
    >>> bind_group(programs, arrays, member, read="from", written="to")(2)
    >>> x.squeeze(1), member
    (tensor([1., 1., 2., 3.]), tensor([0, 1, 0, 1]))
    """
    for name in (read, written):
        if member.dim() != 1 or member.dtype != arrays[name].dtype or not member.is_contiguous():
            raise ValueError(
                f"member must be contiguous {arrays[name].dtype} [rows], got {member.dtype} of "
                f"shape {list(member.shape)}"
            )
    return Bound(programs, arrays, [member, arrays[read], arrays[written]])


def _up(width: int) -> int:
    return -(-width // PANEL) * PANEL


def scratch(size: int) -> int:
    """The address of memory that belongs to this thread; nothing there survives a call."""
    memory: Tensor | None = getattr(_local, "scratch", None)
    if memory is None or memory.size(0) < size:
        memory = _local.scratch = torch.zeros(size, dtype=torch.float32, device="cpu")
    return memory.data_ptr()
