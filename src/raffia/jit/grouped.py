"""Several programs of one form for the rows of one batch: each row by the program of its member.

Rows of a member that lie next to each other are worked on together, so a batch in which members
lie one after the other costs little more than one program would.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from raffia.jit import layers
from raffia.jit.dense_program import Bound, DenseProgram, scratch
from raffia.jit.kernel import kernel, step
from raffia.jit.records import I64s, Record, fields_at


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
                f"member must be contiguous {arrays[name].dtype} [rows], got {member.dtype} of "
                f"shape {list(member.shape)}"
            )
    bound = [program.bind(arrays) for program in programs]
    if any(each.addresses != bound[0].addresses for each in bound):
        raise ValueError(
            "the programs of a group must read and write the same arrays in the same order"
        )
    return _BoundGroup(bound, member=member, read=arrays[read], written=arrays[written])


class _BoundGroup:
    """Programs with the arrays that they work on."""

    def __init__(self, bound: Sequence[Bound], **members: Tensor) -> None:
        self._room = min(each.room for each in bound)
        self._size = max(each.size for each in bound)
        slots = bound[0].addresses
        reloaded = array("q", slots)
        records = [each.program(reloaded) for each in bound]
        self._referenced = bound, reloaded, records  # alive as long as their addresses are used
        self._group = GroupRecord(
            num_slots=len(slots),
            slots=torch.tensor(slots),
            steps=torch.tensor(bound[0].steps),
            reloaded=reloaded.buffer_info()[0],
            programs=torch.tensor([record.address for record in records]),
            **members,
        )

    def __call__(self, rows: int) -> None:
        if not 0 <= rows <= self._room:
            raise ValueError(f"the call asks for {rows} rows, but the arrays have {self._room}")
        run_group(self._group.address, scratch(self._size), rows)

    def native(self) -> tuple[int, int]:
        """The addresses of the compiled function and its argument, as those of a bound program: see
        raffia.jit.kernel."""
        self._group.update(scratch=scratch(self._size))
        return step(_run_as_step), self._group.address


class GroupRecord(Record):
    """Programs for the rows of one batch, and what tells which row is whose."""

    num_slots: int
    slots: I64s  # addresses of the caller's arrays
    steps: I64s  # bytes from a row to the next in each, 0 where rows are chosen
    reloaded: I64s  # room for as many addresses
    programs: I64s  # addresses of the programs' records
    member: I64s  # of what is chosen from
    read: I64s  # which of `member` a row belongs to
    written: I64s  # ... and in which it is noted
    scratch: int  # that of a step: see `run_group`


_group_at = fields_at(GroupRecord)


@kernel
def run_group(
    group: int,  # address of its record
    scratch: int,  # address of room for the buffers of one block of rows
    num_rows: int,
) -> None:
    """Carry each run of rows of one member through its program."""
    g, start = _group_at(group), 0
    while start < num_rows:
        who = g.member[g.read[start]]
        stop = start + 1
        while stop < num_rows and g.member[g.read[stop]] == who:
            stop += 1
        for row in range(start, stop):
            g.member[g.written[row]] = who
        for slot in range(g.num_slots):
            g.reloaded[slot] = g.slots[slot] + start * g.steps[slot]
        layers.run(g.programs[who], scratch, stop - start)
        start = stop


def _run_as_step(group: int, rows: int) -> None:
    run_group(group, _group_at(group).scratch, rows)
