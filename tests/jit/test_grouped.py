"""Programs of one structure, each for the rows of its member."""

import pytest
import torch

from raffia.jit.dense_program import DenseProgram, bind_group


def make(seed, *, other=False):
    draws = torch.Generator().manual_seed(seed)
    program = DenseProgram()
    x = program.read("x", 3, index="from")
    hidden = program.dense(x, 5, relu=True)
    if other:
        program.write(hidden, "hidden")
    program.write(program.dense(hidden, 3), "x", index="to", zero="reset")
    program.write(hidden, "hidden")
    shapes = [(5, 3), (5,), (3, 5), (3,)]
    program.load([torch.rand(shape, generator=draws) for shape in shapes])
    return program


def arrays(num=200):
    return {
        "x": torch.rand(2 * num, 3),
        "from": torch.arange(num),
        "to": torch.arange(num, 2 * num),
        "reset": torch.arange(num) % 7 == 0,
        "hidden": torch.zeros(num, 5),
    }


@pytest.mark.parametrize("rows", [0, 1, 77, 200])
def test_each_row_equals_its_members_program(rows):
    programs, data = [make(seed) for seed in range(3)], arrays()
    owner = (torch.arange(200) // 50) % 3  # members return; a run is longer than a block
    member = torch.cat([owner, torch.full((200,), -1)])
    alone = []
    for program in programs:
        expected = {name: array.clone() for name, array in data.items()}
        program.bind(expected)(rows)
        alone.append(expected)
    bind_group(programs, data, member, read="from", written="to")(rows)
    for row in range(rows):
        wanted = alone[owner[row]]
        assert torch.equal(data["x"][200 + row], wanted["x"][200 + row])
        assert torch.equal(data["hidden"][row], wanted["hidden"][row])
    assert data["hidden"][rows:].count_nonzero() == 0
    assert torch.equal(member[200 : 200 + rows], owner[:rows])
    assert bool((member[200 + rows :] == -1).all())


def test_weights_may_change_after_binding():
    weight, data = torch.ones(3, 3), arrays(2)
    program = DenseProgram()
    x = program.read("x", 3, index="from")
    program.write(program.dense(x, 3), "x", index="to")
    program.load([weight, torch.zeros(3)])
    step = bind_group([program], data, torch.zeros(4, dtype=torch.int64), read="from", written="to")
    weight.mul_(2)
    program.reload()
    step(2)
    torch.testing.assert_close(data["x"][2:], 2 * data["x"][:2].sum(1, keepdim=True).expand(2, 3))


def test_mismatched_arguments_are_refused():
    data, member = arrays(), torch.zeros(400, dtype=torch.int64)
    step = bind_group([make(0), make(1)], data, member, read="from", written="to")
    with pytest.raises(ValueError, match="201 rows, but the arrays have 200"):
        step(201)
    with pytest.raises(ValueError, match=r"member must be contiguous torch.int64 \[rows\]"):
        bind_group([make(0)], data, member.int(), read="from", written="to")
    with pytest.raises(ValueError, match="the same arrays in the same order"):
        bind_group([make(0), make(1, other=True)], data, member, read="from", written="to")
