"""Several programs of one form for the rows of one batch: each row by the program of its member.

Rows of a member that lie next to each other are worked on together, so a batch in which members
lie one after the other costs little more than one program would.
"""

import functools
from array import array
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from raffia.jit import dense
from raffia.jit.calls import step
from raffia.jit.dense_program import BLOCK, DenseProgram, scratch
from raffia.jit.kernel import kernel, load_i64, store_i64


def bind_group(
    programs: Sequence[DenseProgram],  # P, which read and write the same arrays
    arrays: Mapping[str, Tensor],  # as `DenseProgram.bind` takes them
    member: Tensor,  # int64 [rows of what is chosen from], each in 0..P-1; written to
    *,
    read: str,  # of the arrays: which row of `member` a row belongs to
    written: str,  # ... and in which it is noted
) -> Callable[[int], None]:
    """The group bound to these arrays; a call works on their first `rows` rows.

    >>> from raffia.jit.dense_program import DenseProgram
    >>> import torch
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
                f"member is contiguous {arrays[name].dtype} [rows], got {member.dtype} of shape "
                f"{list(member.shape)}"
            )
    return _BoundGroup(programs, arrays, member, arrays[read], arrays[written])


class _BoundGroup:
    """Programs with the arrays that they work on."""

    def __init__(
        self,
        programs: Sequence[DenseProgram],
        arrays: Mapping[str, Tensor],
        member: Tensor,
        read: Tensor,
        written: Tensor,
    ) -> None:
        bound = [program.bind(arrays) for program in programs]
        self._referenced = bound, member, read, written  # alive as long as their addresses are used
        self._room = min(each.room for each in bound)
        self._size = max(each.size for each in bound)
        self._programs = array("q", [word for each in bound for word in each.fixed])
        self._slots = array("q", bound[0].addresses)
        self._steps = array("q", bound[0].steps)
        if any(each.addresses != self._slots for each in bound):
            raise ValueError("programs of a group read and write the same arrays in the same order")
        self._reloaded = array("q", self._slots)
        self._fixed = (
            len(self._slots),
            *(words.buffer_info()[0] for words in (self._slots, self._steps, self._reloaded)),
            self._programs.buffer_info()[0],
            *(tensor.data_ptr() for tensor in (member, read, written)),
        )

    def __call__(self, rows: int) -> None:
        if not 0 <= rows <= self._room:
            raise ValueError(f"{rows} rows, where the arrays have {self._room}")
        run_group(*self._fixed, scratch(self._size), BLOCK, rows)

    def native(self) -> tuple[int, int]:
        """The addresses of the compiled function and its argument, as those of a bound program: see
        raffia.jit.calls."""
        self._context = array("q", (*self._fixed, scratch(self._size), BLOCK))
        return _step_address(), self._context.buffer_info()[0]


@kernel
def run_group(
    num_slots: int,
    slots: int,  # address of the addresses of the caller's arrays
    steps: int,  # ... of the bytes from a row to the next in each, 0 where rows are chosen
    reloaded: int,  # ... of room for as many addresses
    programs: int,  # ... of three words for each program: see `dense.run`
    member: int,  # ... of whole numbers
    read: int,
    written: int,
    room: int,  # address of room for the buffers of one block of rows
    block: int,  # rows at once
    num_rows: int,
) -> None:
    """Carry each run of rows of one member through its program."""
    start = 0
    while start < num_rows:
        who = load_i64(member + 8 * load_i64(read + 8 * start))
        stop = start + 1
        while stop < num_rows and load_i64(member + 8 * load_i64(read + 8 * stop)) == who:
            stop += 1
        for row in range(start, stop):
            store_i64(member + 8 * load_i64(written + 8 * row), who)
        for slot in range(num_slots):
            at = load_i64(slots + 8 * slot) + start * load_i64(steps + 8 * slot)
            store_i64(reloaded + 8 * slot, at)
        program = programs + 24 * who
        dense.run(
            load_i64(program),
            load_i64(program + 8),
            load_i64(program + 16),
            room,
            reloaded,
            stop - start,
            block,
        )
        start = stop


def _run_from(context: int, rows: int) -> None:
    """`run_group` with its other arguments in ten words at an address."""
    run_group(
        load_i64(context),
        load_i64(context + 8),
        load_i64(context + 16),
        load_i64(context + 24),
        load_i64(context + 32),
        load_i64(context + 40),
        load_i64(context + 48),
        load_i64(context + 56),
        load_i64(context + 64),
        load_i64(context + 72),
        rows,
    )


@functools.cache
def _step_address() -> int:
    return step(_run_from)
