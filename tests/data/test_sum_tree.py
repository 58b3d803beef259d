"""SumTree against cumulative sums in numpy, and its two ways of working against each other."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raffia import jit
from raffia.data import sum_tree
from raffia.data.sum_tree import SumTree

CAPACITIES = [1, 2, 15, 16, 17, 255, 256, 257, 4097]


class TensorOperations(SumTree):
    """A tree that never uses the compiled loops."""

    def _loops(self):
        return None


@pytest.fixture(params=[SumTree, TensorOperations])
def tree_class(request):
    return request.param


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


@pytest.mark.skipif(not jit.available(), reason="numba is not installed")
def test_the_loops_are_compiled_where_numba_is_installed():
    assert SumTree(3)._loops() is not None


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_both_ways_hold_the_same_bits_and_draw_the_same(capacity):
    compiled, tensors = SumTree(capacity), TensorOperations(capacity)
    for index, values in random_writes(capacity, seed=capacity):
        compiled.set(index, values)
        tensors.set(index, values)
        torch.testing.assert_close(compiled._sums, tensors._sums, rtol=0, atol=0)
        torch.testing.assert_close(compiled._minima, tensors._minima, rtol=0, atol=0)
        if compiled.total() > 0:
            u = torch.cat([uniform(500), torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)])
            for a, b in zip(compiled.draw(u), tensors.draw(u), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_sums_minima_and_draws_are_those_of_a_flat_array(tree_class, capacity):
    tree, model = tree_class(capacity), np.zeros(capacity)
    for index, values in random_writes(capacity, seed=capacity + 1):
        values = values.to(torch.float32).to(torch.float64)
        tree.set(index, values)
        for i, value in zip(index.tolist(), values.tolist(), strict=True):
            model[i] = value
        assert tree.get(torch.arange(capacity)).tolist() == model.tolist()
        assert tree.total() == pytest.approx(model.sum(), rel=1e-14)
        positive = model[model > 0]
        assert tree.minimum() == (positive.min() if len(positive) else np.inf)
        if len(positive):
            u = uniform(300)
            by_hand = np.searchsorted(np.cumsum(model), u.numpy() * model.sum(), side="right")
            assert tree.sample(u).tolist() == by_hand.tolist()


def test_what_counts_are_the_leaves_not_how_they_came_about(tree_class):
    once, often = tree_class(100), tree_class(100)
    rng = torch.Generator().manual_seed(0)
    for _ in range(50):
        index = torch.randint(0, 100, (7,), generator=rng)
        often.set(index, 1e12 * torch.rand(7, generator=rng))
    final = torch.rand(100, dtype=torch.float64, generator=rng)
    often.set(torch.arange(100), final)
    once.set(torch.arange(100), final)
    assert torch.equal(once._sums, often._sums)  # no drift: bit for bit
    assert torch.equal(once._minima, often._minima)


def test_a_leaf_of_zero_is_never_drawn_also_where_rounding_leads_to_one(tree_class):
    # 1 + 1e-17 is 1, so that a draw at the far end falls behind the last leaf that counts
    tree = tree_class(64)
    tree.set(torch.tensor([3, 7, 9, 20, 40]), torch.tensor([1e-17, 1.0, 1e-17, 0.1, 1e-17]))
    near_one = 1 - torch.arange(1, 200, dtype=torch.float64) * 2**-53
    drawn = tree.sample(torch.cat([uniform(1000), near_one, torch.zeros(1, dtype=torch.float64)]))
    assert set(drawn.tolist()) <= {3, 7, 9, 20, 40}


def test_the_first_and_the_last_leaf_are_drawn_at_the_ends(tree_class):
    tree = tree_class(300)
    tree.set(torch.arange(300), 1.0)
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert tree.sample(ends).tolist() == [0, 299]


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64])
def test_indices_of_any_integer_dtype_and_shape(tree_class, dtype):
    tree = tree_class(10)
    index = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=dtype)
    tree.set(index.T, index.T.float())  # strided
    assert tree.get(index).tolist() == [[1, 2, 3], [4, 5, 6]]
    tree.set(7, 2.5)
    assert tree.get(7).item() == 2.5
    tree.set(torch.tensor([], dtype=dtype), torch.tensor([]))
    assert tree.total() == 23.5


@pytest.mark.parametrize("index", [-1, 5, 10**7, -(2**62)])
def test_an_index_out_of_range_is_refused_and_nothing_changed(tree_class, index):
    tree = tree_class(5)
    tree.set(torch.arange(5), 1.0)
    with pytest.raises(IndexError, match=rf"index {index} is out of range: the tree has 5 leaves"):
        tree.set(torch.tensor([0, index]), torch.tensor([9.0, 9.0]))
    with pytest.raises(IndexError, match="out of range"):
        tree.get(torch.tensor([index]))
    assert tree.total() == 5.0


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), -float("inf"), 1e308])
def test_a_wrong_priority_is_refused_and_nothing_changed(tree_class, value):
    tree = tree_class(5)
    tree.set(torch.arange(5), 1.0)
    with pytest.raises(ValueError, match="must be finite and >= 0 .* Nothing was changed"):
        tree.set(torch.tensor([0, 1]), torch.tensor([9.0, value], dtype=torch.float64))
    assert tree.total() == 5.0
    assert tree.sample(uniform(3)).tolist() == (uniform(3) * 5).long().tolist()


def test_the_largest_priorities_do_not_overflow(tree_class):
    tree = tree_class(40)
    tree.set(torch.arange(40), tree.limit)
    assert tree.total() < float("inf")
    assert len(set(tree.sample(uniform(400)).tolist())) == 40


def test_other_mistakes_are_named(tree_class):
    tree = tree_class(5)
    with pytest.raises(ValueError, match="all priorities are zero. Set one first"):
        tree.sample(uniform(2))
    tree.set(1, 1.0)
    with pytest.raises(TypeError, match=r"torch.rand\(n, dtype=torch.float64\)"):
        tree.sample(torch.rand(2))
    for u in (-0.5, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"u must lie in \[0, 1\)"):
            tree.sample(torch.tensor([0.5, u], dtype=torch.float64))
    with pytest.raises(TypeError, match="indices are integers, got torch.float32"):
        tree.set(torch.tensor([1.0]), 1.0)
    with pytest.raises(TypeError, match="indices are integers, got torch.bool"):
        tree.set(torch.tensor([True]), 1.0)
    with pytest.raises(ValueError, match=r"indices of shape \[2\] need as many priorities"):
        tree.set(torch.tensor([0, 1]), torch.ones(3))
    with pytest.raises(ValueError, match=r"5 leaves, the state is of \[4\]"):
        tree.load_state({"priorities": torch.ones(4)})
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        tree_class(0)


def test_state_and_copies_stand_on_their_own(tree_class):
    tree, other = tree_class(37), tree_class(37)
    tree.set(torch.arange(37), uniform(37))
    state = tree.state()
    twin = copy.deepcopy(tree)
    tree.set(torch.arange(37), 0.0)
    assert tree.total() == 0.0
    other.load_state(state)
    assert torch.equal(other._sums, twin._sums)
    assert torch.equal(other.sample(uniform(50)), twin.sample(uniform(50)))


def test_draws_follow_the_priorities(tree_class):
    """Chi-square with 49 degrees of freedom: above 85.4 in 1 case of 1000."""
    tree, n = tree_class(50), 100_000
    priorities = uniform(50, seed=1) + 0.01
    tree.set(torch.arange(50), priorities)
    counts = torch.bincount(tree.sample(uniform(n, seed=2)), minlength=50)
    expected = n * priorities / priorities.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 85.4


writes = st.lists(
    st.tuples(st.integers(0, 39), st.sampled_from([0.0, 1e-300, 1e-9, 0.5, 1.0, 3.0, 1e12])),
    min_size=1,
    max_size=60,
)


@settings(max_examples=50, deadline=None)
@given(st.lists(writes, min_size=1, max_size=5))
def test_any_writes_give_the_leaves_of_a_list(batches):
    trees, model = (SumTree(40), TensorOperations(40)), [0.0] * 40
    for batch in batches:
        for tree in trees:
            tree.set(
                torch.tensor([i for i, _ in batch]),
                torch.tensor([value for _, value in batch], dtype=torch.float64),
            )
        for i, value in batch:
            model[i] = value
    for tree in trees:
        assert tree.get(torch.arange(40)).tolist() == model
        assert tree.minimum() == min([value for value in model if value], default=np.inf)
    assert torch.equal(trees[0]._sums, trees[1]._sums)


@pytest.mark.gpu
def test_on_a_gpu_it_holds_the_same_bits():
    here, there = SumTree(1000), SumTree(1000, device="cuda")
    for index, values in random_writes(1000, seed=3):
        here.set(index, values)
        there.set(index.cuda(), values.cuda())
        assert torch.equal(here._sums, there._sums.cpu())
        for a, b in zip(here.draw(uniform(500)), there.draw(uniform(500).cuda()), strict=True):
            assert torch.equal(a, b.cpu())


@pytest.mark.slow
def test_numba_is_not_imported_before_a_tree_is_used():
    code = """
import sys
from raffia.data.sum_tree import SumTree
tree = SumTree(10)
assert "numba" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_numba_the_tree_works(monkeypatch):
    monkeypatch.setattr(jit, "available", lambda: False)
    sum_tree.kernels.cache_clear()
    try:
        tree = SumTree(5)
        assert tree._loops() is None
        tree.set(3, 2.0)
        assert tree.sample(uniform(2)).tolist() == [3, 3]
    finally:
        sum_tree.kernels.cache_clear()
