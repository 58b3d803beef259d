"""Noise of roots: compiled draws equal those in tensor operations."""

import pytest
import torch

from raffia.functional.draws import child_seed, draw_seeds, seeded_dirichlet, seeded_gumbel
from raffia.search.policies import root_dirichlet, root_gumbel

SEEDS = draw_seeds(5_000, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("choice", [0, 2])
def test_gumbel_noise_follows_the_seeds(choice):
    expected = seeded_gumbel(child_seed(SEEDS, torch.tensor(choice)), 7)
    torch.testing.assert_close(root_gumbel(SEEDS, 7, choice), expected)
    assert not root_gumbel(SEEDS, 7, choice + 1).equal(expected)


@pytest.mark.parametrize("alpha", [0.03, 0.3, 2.0])
def test_dirichlet_noise_follows_the_seeds(alpha):
    mask = torch.rand(len(SEEDS), 7, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[:, 3] = True
    for legal in (mask, None):
        over = torch.ones_like(mask) if legal is None else legal
        expected = seeded_dirichlet(child_seed(SEEDS, torch.tensor(1)), over, alpha)
        found = root_dirichlet(SEEDS, 7, alpha, legal, 1)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
        assert not found[~over].any()
    with pytest.raises(ValueError, match="alpha=0 must be above 0"):
        root_dirichlet(SEEDS, 7, 0)
