"""Selection: frequencies by rank, elitism, truncation, errors."""

import pytest
import torch

from raffia.evolution.config import HyperRange, MutationConfig, SelectionConfig
from raffia.evolution.generation import mean_fitness, tournament, truncation

NAN, INF = float("nan"), float("inf")


def draws(seed=0):
    return torch.Generator().manual_seed(seed)


def frequencies(parents, size):
    return torch.bincount(parents, minlength=size) / len(parents)


def many(select, fitness, times=4000, **options):
    draw = draws()
    return torch.stack([select(fitness, generator=draw, **options) for _ in range(times)])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_tournament_selects_by_rank(size):
    """The best of k, drawn with replacement: P(rank <= r of P) = (r / P)^k."""
    fitness = torch.tensor([0.3, -5.0, 9.0, 0.2, 0.4])
    num_slots = 20000
    parents = tournament(
        fitness, tournament_size=size, elitism=False, population_size=num_slots, generator=draws()
    )
    assert parents.shape == (num_slots,) and parents.dtype == torch.int64
    upto = (torch.arange(6) / 5.0) ** size
    expected = torch.empty(5)
    expected[fitness.argsort()] = upto.diff()
    error = 5 * (0.25 / num_slots) ** 0.5  # five standard deviations
    torch.testing.assert_close(frequencies(parents, 5), expected, rtol=0, atol=error)
    wrong = torch.full((5,), 0.2)  # the guard's guard
    assert (size == 1) == bool(((frequencies(parents, 5) - wrong).abs() < error).all())


def test_the_elite_is_sure_of_the_first_slot_only():
    fitness = torch.tensor([1.0, 2.0, 9.0, 3.0])
    found = many(tournament, fitness, tournament_size=2)
    assert (found[:, 0] == 2).all()
    expected = (torch.arange(5) / 4.0).square().diff()[fitness.argsort().argsort()]
    for slot in (1, 2, 3):
        torch.testing.assert_close(frequencies(found[:, slot], 4), expected, rtol=0, atol=0.04)
    free = many(tournament, fitness, tournament_size=2, elitism=False)
    torch.testing.assert_close(frequencies(free[:, 0], 4), expected, rtol=0, atol=0.04)


def test_nan_is_the_worst_fitness():
    fitness = torch.tensor([NAN, -1e30, NAN])
    found = many(tournament, fitness, times=500, tournament_size=2)
    assert (found[:, 0] == 1).all()
    # it wins where a tournament is of such alone: 4 of 9
    lost = (found[:, 1:] != 1).float().mean()
    assert lost == pytest.approx(4 / 9, abs=0.08)
    assert tournament(torch.tensor([NAN, NAN]), generator=draws())[0] in (0, 1)
    best = tournament(torch.tensor([1.0, INF, NAN]), generator=draws())
    assert best[0] == 1


def test_truncation_replaces_the_worst_by_the_best():
    fitness = torch.tensor([5.0, 1.0, 7.0, 2.0, 3.0, 9.0, 4.0, 6.0])
    found = many(truncation, fitness, fraction=0.25)
    survivors = [0, 2, 4, 5, 6, 7]
    assert (found[:, survivors] == torch.tensor(survivors)).all()
    for slot in (1, 3):
        among = frequencies(found[:, slot], 8)
        assert among[[2, 5]].sum() == 1
        torch.testing.assert_close(among[[2, 5]], torch.tensor([0.5, 0.5]), rtol=0, atol=0.04)
    for fraction, size, num_replaced in ((0.5, 4, 2), (0.5, 5, 2), (0.1, 5, 1), (0.3, 10, 3)):
        found = truncation(torch.arange(float(size)), fraction=fraction, generator=draws())
        assert (found != torch.arange(size)).sum() == num_replaced
        assert (found[:num_replaced] >= size - num_replaced).all()


def test_fitness_is_the_mean_of_the_last():
    history = torch.tensor([[100.0, 0.0, 5.0], [1.0, 4.0, NAN], [3.0, 8.0, 1.0]])
    assert mean_fitness(history, 1).tolist() == [3, 8, 1]
    assert mean_fitness(history, 2).tolist() == [2, 6, -INF]
    assert mean_fitness(history, 9).tolist() == pytest.approx([104 / 3, 4, -INF])
    assert mean_fitness(torch.tensor([[INF], [-INF]]), 2).tolist() == [-INF]


REFUSED = [
    (lambda: chosen(tournament, 2, population_size=0), "population_size=0 must be at least 1"),
    (lambda: chosen(tournament, 2, tournament_size=3), "=3 is larger .* of 2: pass 2 or"),
    (lambda: chosen(tournament, 2, tournament_size=0), "tournament_size=0 must be at least 1"),
    (lambda: chosen(tournament, 1, tournament_size=1), "so a population of one would never change"),
    (lambda: chosen(truncation, 2, fraction=0.0), "truncation_fraction=0.0 must be above 0"),
    (lambda: chosen(truncation, 2, fraction=0.6), "truncation_fraction=0.6 must be above 0"),
    (lambda: chosen(truncation, 2, fraction=NAN), "truncation_fraction=nan must be above 0"),
    (lambda: mean_fitness(torch.ones(2, 2), 0), "eval_loop=0"),
    (lambda: SelectionConfig(method="roulette"), "='roulette' must be one of 'tournament', 'tru"),
    (lambda: SelectionConfig(eval_loop=0), "eval_loop=0"),
    (lambda: SelectionConfig(truncation_fraction=0.7), r"truncation_fraction=0\.7"),
    (lambda: SelectionConfig(tournament_size=1).check(1), "a population of one would never change"),
    (lambda: SelectionConfig(method="truncation", tournament_size=1).check(1), "population of one"),
    (lambda: SelectionConfig(tournament_size=5).check(4), "=5 is larger than the population"),
    (lambda: SelectionConfig(eval_loop=None), "=None must be"),
    (lambda: MutationConfig(mutated_fraction=None), "=None must be"),
    (lambda: HyperRange(0.1, 1.0, resample=None), "=None must be"),
]


def chosen(select, size, seed=0, **options):
    return select(torch.arange(float(size)), generator=draws(seed), **options)


def test_other_population_sizes_and_invalid_calls():
    for call, match in REFUSED:
        with pytest.raises(ValueError, match=match):
            call()
    SelectionConfig(elitism=False, tournament_size=1).check(1)
    SelectionConfig(method="truncation", tournament_size=5).check(4)
    assert len(chosen(tournament, 3, population_size=8)) == 8
    assert chosen(tournament, 3, population_size=1).tolist() == [2]
    assert chosen(truncation, 1).tolist() == [0]
    assert chosen(tournament, 1, tournament_size=1, elitism=False).tolist() == [0]
    assert (truncation(torch.tensor([NAN, 2.0]), generator=draws()) == 1).all()
    for select in (tournament, truncation):
        one, two, other = (chosen(select, 7, seed) for seed in (1, 1, 2))
        assert one.equal(two) and (select is truncation or not one.equal(other))
