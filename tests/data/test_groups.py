"""groups: equal numbers of a batch, by the compiled loop and by tensor operations."""

import random

import pytest
import torch

from raffia.data.groups import groups

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def expected(values):
    distinct = list(dict.fromkeys(values))
    first = [values.index(value) for value in distinct]
    last = [len(values) - 1 - values[::-1].index(value) for value in distinct]
    return [distinct, [distinct.index(value) for value in values], first, last]


@pytest.mark.parametrize("device", DEVICES)
def test_groups_are_those_of_plain_lists(device):
    numbers = random.Random(0)
    for n in (0, 1, 2, 3, 4, 5, 8, 16, 17, 33, 100):
        for most in (1, 5, n + 1, 2**62):
            values = [numbers.randrange(-most, most) for _ in range(n)]
            found = groups(torch.tensor(values, dtype=torch.int64, device=device))
            assert [x.tolist() for x in found] == expected(values)


def test_values_without_repetition_are_given_back():
    values = torch.tensor([4, -1, 2**63 - 1, -(2**63)])
    assert groups(values).distinct is values
    assert groups(torch.tensor([4, 4])).distinct.tolist() == [4]


def test_numbers_of_one_home_are_told_apart():
    inverse = pow(0x9E3779B97F4A7C15, -1, 2**64)  # of the multiplier that gives a number its slot
    values = torch.tensor([(low * inverse + 2**63) % 2**64 - 2**63 for low in range(50)])
    values = torch.cat([values, values.flip(0)])
    assert [x.tolist() for x in groups(values)] == expected(values.tolist())


def test_values_may_have_any_strides():
    values = torch.tensor([[5, 0], [6, 0], [5, 0]])[:, 0]
    assert groups(values).group.tolist() == [0, 1, 0]
