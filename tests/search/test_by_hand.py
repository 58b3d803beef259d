"""A tree worked out on paper."""

import pytest
import torch

from raffia.search import PUCT, RecurrentOutput, RootOutput, search

from .table import BACKENDS


def pull(embedding, action):
    """Arm 0 pays 0, arm 1 pays 1; then the same two arms again. A state's value is 0.4."""
    rows = len(action)
    return RecurrentOutput(action.float(), torch.full((rows,), 0.4), prior(rows)), embedding


def prior(rows):
    return torch.tensor([0.6, 0.4]).log().repeat(rows, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_four_simulations_of_a_bandit_equal_those_by_hand(backend):
    """With discount 0.5, c = 1 and P = (0.6, 0.4); s = c sqrt(N + 1).

    1. Root, N=0, s=1: 0 + 0.6 > 0 + 0.4, arm 0 makes node 1.
       Back: Q(0) = 0 + 0.5 * 0.4 = 0.2. The range holds only 0.2, so Q counts as it is.
    2. Root, N=1, s=1.4142, mean of tried Q 0.2:
       0.2 + 1.4142 * 0.6 / 2 = 0.624 < 0.2 + 1.4142 * 0.4 = 0.766, arm 1 makes node 2.
       Back: Q(1) = 1 + 0.5 * 0.4 = 1.2. The range is 0.2..1.2.
    3. Root, N=2, s=1.7321: 0 + 1.7321 * 0.6 / 2 = 0.520 < 1 + 1.7321 * 0.4 / 2 = 1.346, arm 1.
       Node 2, N=0, s=1: both arms count the mean (0.7 + 0) / 1 = 0.7, so 0.6 > 0.4 decides:
       arm 0 makes node 3.
       Back: node 2 gains 0.2, V = (0.4 + 0.2) / 2 = 0.3, the root's Q(1) = 1 + 0.5 * 0.3 = 1.15;
       the root gains 1 + 0.5 * 0.2 = 1.1.
    4. Root, N=3, s=2: 0 + 2 * 0.6 / 2 = 0.6 < (1.15 - 0.2) / 1 + 2 * 0.4 / 3 = 1.217, arm 1.
       Node 2, N=1, s=1.4142: the mean is ((0.2 + 1.15) / 2 + 0.2) / 2 = 0.4375;
       0 + 1.4142 * 0.6 / 2 = 0.424 < (0.4375 - 0.2) / 1 + 1.4142 * 0.4 = 0.803,
       arm 1 makes node 4.
       Back: node 2 gains 1.2, V = (0.4 + 0.2 + 1.2) / 3 = 0.6, the root's Q(1) = 1.3;
       the root gains 1 + 0.5 * 1.2 = 1.6.
    The root's value: (0.2 + 1.2 + 1.1 + 1.6) / 4 = 1.025.
    """
    root = RootOutput(prior(1), torch.zeros(1), torch.zeros(1, 1))
    select = PUCT(c_init=1.0, c_base=1e9)  # the logarithm adds nothing
    tree = search(root, pull, num_simulations=4, discount=0.5, select=select, backend=backend)
    assert tree.data["parent"].tolist() == [[-1, 0, 0, 2, 2]]
    assert tree.data["action"].tolist() == [[-1, 0, 1, 0, 1]]
    assert tree.visits_of_root().tolist() == [[1, 3]]
    assert tree.data["children_visits"][0, 2].tolist() == [1, 1]
    torch.testing.assert_close(tree.qvalues(), torch.tensor([[0.2, 1.3]]))
    torch.testing.assert_close(tree.node_values(), torch.tensor([[1.025, 0.4, 0.6, 0.4, 0.4]]))
    torch.testing.assert_close(tree.data["q_min"], torch.tensor([0.2]))
    torch.testing.assert_close(tree.data["q_max"], torch.tensor([1.3]))
    sums = torch.tensor([[4.1, 0.4, 1.8, 0.4, 0.4]], dtype=torch.float64)
    torch.testing.assert_close(tree.data["value_sum"], sums, rtol=1e-6, atol=0)
