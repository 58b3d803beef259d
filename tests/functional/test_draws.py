"""Draws from seeds: they have their distribution, whatever else is drawn beside them."""

import pytest
import torch

from raffia.functional.draws import dirichlet_noise, draw_seeds, seeded_dirichlet


def distance(one, other):
    """The largest distance of two empirical distributions (Kolmogorov and Smirnov)."""
    one, other = one.sort().values, other.sort().values
    points = torch.cat([one, other])
    below = [torch.searchsorted(x, points, right=True) / len(x) for x in (one, other)]
    return (below[0] - below[1]).abs().max()


@pytest.mark.parametrize("alpha", [0.03, 1.0, 3.0])
def test_seeded_dirichlet_noise_has_the_distribution_of_torch_s(alpha):
    num = 20_000
    mask = torch.tensor([True, False, True, True]).expand(num, 4)
    drawn = seeded_dirichlet(torch.arange(num), mask, alpha)
    expected = dirichlet_noise(mask, alpha, torch.Generator().manual_seed(0))
    assert not drawn[:, 1].any()
    torch.testing.assert_close(drawn.sum(1), torch.ones(num))
    critical = 1.63 * (2 / num) ** 0.5  # one in a hundred is farther
    for column in (0, 2, 3):
        assert distance(drawn[:, column], expected[:, column]) < critical
    assert distance(drawn[:, 0], expected[:, 0] ** 1.1) > critical  # it can distinguish them


def test_a_seed_s_noise_does_not_depend_on_the_others():
    seeds, mask = draw_seeds(9, torch.Generator().manual_seed(0)), torch.ones(9, 5).bool()
    together = seeded_dirichlet(seeds, mask)
    assert len(together.unique(dim=0)) == 9
    for chosen in ([3], [8, 0]):
        assert seeded_dirichlet(seeds[chosen], mask[chosen]).equal(together[chosen])


def test_a_concentration_of_zero_is_refused():
    with pytest.raises(ValueError, match="alpha=0 must be above 0"):
        seeded_dirichlet(torch.tensor([1]), torch.ones(1, 2).bool(), 0)
