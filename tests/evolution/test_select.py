"""Who goes on: the best, how often each, and what is refused."""

import pytest
import torch

from raffia.evolution.config import SelectionConfig
from raffia.evolution.select import mean_fitness, tournament, truncation

NAN, INF = float("nan"), float("inf")


def draws(seed=0):
    return torch.Generator().manual_seed(seed)


def shares(parents, size):
    return torch.bincount(parents, minlength=size) / len(parents)


def many(select, fitness, times=4000, **options):
    draw = draws()
    return torch.stack([select(fitness, generator=draw, **options) for _ in range(times)])


# ---------------------------------------------------------------------------- tournament


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_wins_as_often_as_its_rank_says(size):
    """The best of k, drawn with replacement: P(rank <= r of P) = (r / P)^k."""
    fitness = torch.tensor([0.3, -5.0, 9.0, 0.2, 0.4])
    places = 20000
    parents = tournament(
        fitness, tournament_size=size, elitism=False, population_size=places, generator=draws()
    )
    assert parents.shape == (places,) and parents.dtype == torch.int64
    upto = (torch.arange(6) / 5.0) ** size
    expected = torch.empty(5)
    expected[fitness.argsort()] = upto.diff()
    error = 5 * (0.25 / places) ** 0.5  # five standard deviations
    torch.testing.assert_close(shares(parents, 5), expected, rtol=0, atol=error)
    wrong = torch.full((5,), 0.2)  # the guard's guard
    assert (size == 1) == bool(((shares(parents, 5) - wrong).abs() < error).all())


def test_the_elite_has_the_first_place_and_no_other_for_certain():
    fitness = torch.tensor([1.0, 2.0, 9.0, 3.0])
    found = many(tournament, fitness, tournament_size=2)
    assert (found[:, 0] == 2).all()
    expected = (torch.arange(5) / 4.0).square().diff()[fitness.argsort().argsort()]
    for place in (1, 2, 3):
        torch.testing.assert_close(shares(found[:, place], 4), expected, rtol=0, atol=0.04)
    free = many(tournament, fitness, tournament_size=2, elitism=False)
    torch.testing.assert_close(shares(free[:, 0], 4), expected, rtol=0, atol=0.04)


def test_what_is_no_number_is_the_worst():
    fitness = torch.tensor([NAN, -1e30, NAN])
    found = many(tournament, fitness, times=500, tournament_size=2)
    assert (found[:, 0] == 1).all()
    # it wins where a tournament is of such alone: 4 of 9
    lost = (found[:, 1:] != 1).float().mean()
    assert lost == pytest.approx(4 / 9, abs=0.08)
    assert tournament(torch.tensor([NAN, NAN]), generator=draws())[0] in (0, 1)
    best = tournament(torch.tensor([1.0, INF, NAN]), generator=draws())
    assert best[0] == 1


def test_same_draws_same_parents():
    fitness = torch.rand(7, generator=draws(3))
    for select in (tournament, truncation):
        one, two, other = (select(fitness, generator=draws(seed)) for seed in (1, 1, 2))
        assert one.equal(two)
        assert select is truncation or not one.equal(other)


def test_other_numbers_of_places():
    fitness = torch.tensor([1.0, 3.0, 2.0])
    assert len(tournament(fitness, population_size=8, generator=draws())) == 8
    assert tournament(fitness, population_size=1, generator=draws()).tolist() == [1]
    with pytest.raises(ValueError, match="population_size=0: there is at least one slot"):
        tournament(fitness, population_size=0, generator=draws())


# ---------------------------------------------------------------------------- truncation


def test_the_worst_give_way_to_the_best():
    fitness = torch.tensor([5.0, 1.0, 7.0, 2.0, 3.0, 9.0, 4.0, 6.0])
    found = many(truncation, fitness, fraction=0.25)
    kept = [0, 2, 4, 5, 6, 7]
    assert (found[:, kept] == torch.tensor(kept)).all()
    for place in (1, 3):
        among = shares(found[:, place], 8)
        assert among[[2, 5]].sum() == 1
        torch.testing.assert_close(among[[2, 5]], torch.tensor([0.5, 0.5]), rtol=0, atol=0.04)


@pytest.mark.parametrize("share, size, gone", [(0.5, 4, 2), (0.5, 5, 2), (0.1, 5, 1), (0.3, 10, 3)])
def test_how_many_give_way(share, size, gone):
    found = truncation(torch.arange(float(size)), fraction=share, generator=draws())
    assert (found != torch.arange(size)).sum() == gone
    assert (found[:gone] >= size - gone).all()


def test_of_truncation_what_is_no_number_goes_first():
    found = many(truncation, torch.tensor([2.0, NAN, 3.0, -INF]), times=50, fraction=0.25)
    assert (found == torch.tensor([0, 1, 2, 2])).all() or (found[:, 1] == 2).all()
    assert (truncation(torch.tensor([NAN, 2.0]), generator=draws()) == 1).all()


def test_one_alone_stays():
    assert truncation(torch.tensor([1.0]), generator=draws()).tolist() == [0]
    assert tournament(
        torch.tensor([1.0]), tournament_size=1, elitism=False, generator=draws()
    ).tolist() == [0]


# -------------------------------------------------------------------------------- fitness


def test_fitness_is_the_mean_of_the_last():
    history = torch.tensor([[100.0, 0.0, 5.0], [1.0, 4.0, NAN], [3.0, 8.0, 1.0]])
    assert mean_fitness(history, 1).tolist() == [3, 8, 1]
    assert mean_fitness(history, 2).tolist() == [2, 6, -INF]
    assert mean_fitness(history, 9).tolist() == pytest.approx([104 / 3, 4, -INF])
    assert mean_fitness(torch.tensor([[INF], [-INF]]), 2).tolist() == [-INF]
    with pytest.raises(ValueError, match="eval_loop=0"):
        mean_fitness(history, 0)


# ------------------------------------------------------------------------------- mistakes


def test_what_can_not_be_is_refused():
    fitness = torch.tensor([1.0, 2.0])
    with pytest.raises(ValueError, match="tournament_size=3 is more .* which is 2: take 2 or"):
        tournament(fitness, tournament_size=3, generator=draws())
    with pytest.raises(ValueError, match="tournament_size=0: a tournament has at least one"):
        tournament(fitness, tournament_size=0, generator=draws())
    with pytest.raises(ValueError, match="elitism keeps the best of a population of one"):
        tournament(fitness[:1], tournament_size=1, generator=draws())
    for share in (0.0, 0.6, -0.1, NAN):
        with pytest.raises(
            ValueError, match=f"truncation_fraction={share}: the worst are replaced"
        ):
            truncation(fitness, fraction=share, generator=draws())


def test_a_config_refuses_what_can_not_be():
    with pytest.raises(ValueError, match="method='roulette': it is 'tournament' or"):
        SelectionConfig(method="roulette")
    with pytest.raises(ValueError, match="eval_loop=0"):
        SelectionConfig(eval_loop=0)
    with pytest.raises(ValueError, match=r"truncation_fraction=0\.7"):
        SelectionConfig(truncation_fraction=0.7)
    SelectionConfig(elitism=False, tournament_size=1).check(1)
    for method in ("tournament", "truncation"):
        with pytest.raises(ValueError, match="elitism keeps the best of a population of one"):
            SelectionConfig(method=method, tournament_size=1).check(1)
    with pytest.raises(ValueError, match="tournament_size=5 is more than the population has"):
        SelectionConfig(tournament_size=5).check(4)
    SelectionConfig(method="truncation", tournament_size=5).check(4)
