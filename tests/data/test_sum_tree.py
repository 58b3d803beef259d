"""SumTree, bit by bit against sums in numpy in the same order."""

import numpy as np
import pytest
import torch

from raffia.data.sum_tree import SumTree

CAPACITIES = [1, 2, 15, 16, 17, 255, 256, 257, 4097]


class Levels:
    """The tree's documented layout in numpy: its nodes level by level, and its draws."""

    def __init__(self, leaves):
        self.levels, self.minima = [np.array(leaves)], [np.where(leaves, leaves, np.inf)]
        while len(self.levels[-1]) > 1 or len(self.levels) == 1:
            blocks = np.pad(self.levels[-1], (0, -len(self.levels[-1]) % 16)).reshape(-1, 16)
            while blocks.shape[1] > 1:  # pairs, pairs of pairs
                blocks = blocks[:, 0::2] + blocks[:, 1::2]
            self.levels.append(blocks[:, 0])
            last = self.minima[-1]
            padded = np.pad(last, (0, -len(last) % 16), constant_values=np.inf)
            self.minima.append(padded.reshape(-1, 16).min(1))

    def draw(self, u):
        left, node = u * self.levels[-1][0], 0
        for level in self.levels[-2::-1]:
            ends = np.cumsum(np.pad(level, (0, 16))[16 * node : 16 * node + 16])
            child = int((ends[:15] <= left if left < ends[15] else ends[:15] < ends[15]).sum())
            left -= ends[child - 1] if child else 0.0
            node = 16 * node + child
        return node


def uniform(n, seed=0):
    return torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_writes(capacity, seed):
    """Indices with repetitions, and values of many sizes, a third of them zero."""
    rng = torch.Generator().manual_seed(seed)
    for n in (1, capacity // 2 + 1, 2 * capacity):
        index = torch.randint(0, capacity, (n,), generator=rng)
        scale = 10.0 ** torch.randint(-9, 9, (n,), generator=rng)
        values = torch.rand(n, dtype=torch.float64, generator=rng) * scale
        yield index, values * (torch.rand(n, generator=rng) > 1 / 3)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_bits_and_draws_equal_sums_in_the_documented_order(capacity):
    tree, model = SumTree(capacity), [0.0] * capacity
    for index, values in random_writes(capacity, seed=capacity):
        tree.set(index, values)
        for i, value in zip(index.tolist(), values.tolist(), strict=True):
            model[i] = value
        assert tree.get(torch.arange(capacity)).tolist() == model
        levels = Levels(tree.get(torch.arange(capacity)).numpy())
        assert tree.total() == levels.levels[-1][0] and tree.minimum() == levels.minima[-1][0]
        if tree.total() > 0:
            u = torch.cat([uniform(500), torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)])
            assert tree.sample(u).tolist() == [levels.draw(one) for one in u.tolist()]


def test_indices_of_any_integer_dtype_and_shape():
    for dtype in (torch.int32, torch.uint8, torch.int64):
        tree, index = SumTree(10), torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=dtype)
        tree.set(index.T, index.T.float())  # strided
        assert tree.get(index).tolist() == [[1, 2, 3], [4, 5, 6]]
        tree.set(7, 2.5)
        tree.set(torch.tensor([], dtype=dtype), torch.tensor([]))
        assert tree.get(7).item() == 2.5 and tree.total() == 23.5


F64, NAN, INF = torch.float64, float("nan"), float("inf")


def put(index, *values):
    return lambda tree: tree.set(torch.tensor(index), torch.tensor(values, dtype=F64))


def ask(*u):
    return lambda tree: tree.sample(torch.tensor([0.5, *u], dtype=F64))


FINITE, UNIT = "must be finite and >= 0 .* Nothing was changed", r"must be in \[0, 1\)"
MISTAKES = [
    (put([0, -1], 9.0, 9.0), IndexError, "index -1 is out of range: the tree has 5 leaves"),
    (put([0, 5], 9.0, 9.0), IndexError, "index 5 is out of range: the tree has 5 leaves"),
    (put([0, -(2**62)], 9.0, 9.0), IndexError, f"index {-(2**62)} is out of range"),
    (lambda tree: tree.get(torch.tensor([5])), IndexError, "out of range"),
    *[(put([0, 1], 9.0, x), ValueError, FINITE) for x in (-1.0, NAN, INF, 1e308)],
    (lambda tree: SumTree(5).sample(uniform(2)), ValueError, "all priorities are zero: set one"),
    (lambda tree: tree.sample(torch.rand(2)), TypeError, r"torch.rand\(n, dtype=torch.float64\)"),
    *[(ask(u), ValueError, UNIT) for u in (-0.5, 1.0, NAN)],
    (put([1.0], 1.0), TypeError, "indices must be integers; got torch.float32"),
    (put([0, 1], 1.0, 1.0, 1.0), ValueError, r"of shape \[2\] need priorities of that shape"),
    (lambda tree: tree.load_state({"priorities": torch.ones(4)}), ValueError, "the state has"),
    (lambda tree: SumTree(0), ValueError, "capacity=0 must be at least 1"),
]


@pytest.mark.parametrize(("call", "error", "match"), MISTAKES)
def test_invalid_calls_change_nothing(call, error, match):
    tree = SumTree(5)
    tree.set(torch.arange(5), 1.0)
    with pytest.raises(error, match=match):
        call(tree)
    assert tree.get(torch.arange(5)).tolist() == [1.0] * 5 and tree.total() == 5.0
    assert tree.sample(uniform(3)).tolist() == (uniform(3) * 5).long().tolist()
