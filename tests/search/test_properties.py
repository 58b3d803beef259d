"""Invariants of any search: visits add up, batches and threads change nothing, draws repeat."""

import itertools

import pytest
import torch

from raffia.search import (
    PUCT,
    Gumbel,
    ValuePrefix,
    gumbel_noise,
    gumbel_policy,
    muzero_policy,
    sample_visits,
    search,
)
from raffia.search.selection import considered_visits

from .table import BACKENDS, GAME, Table, equal, random_table

STATES = torch.arange(6)


def selections(seed=0, batch=6, actions=4):
    noise = gumbel_noise((batch, actions), torch.Generator().manual_seed(seed))
    seeds = torch.arange(batch) * 7919 + seed
    return {
        "puct": PUCT(),
        "ties": PUCT(first_visit="value", ties="random", tie_seed=seeds),
        "gumbel": Gumbel(root_gumbel=noise, max_considered=3),
    }


def part(select, rows):
    """A selection for some of its roots."""
    if isinstance(select, Gumbel):
        return Gumbel(root_gumbel=select.root_gumbel[rows], max_considered=select.max_considered)
    if select.tie_seed is not None:
        return PUCT(first_visit="value", ties="random", tie_seed=select.tie_seed[rows])
    return select


# -- independence of the batch


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["puct", "ties", "gumbel"])
def test_the_tree_of_a_root_does_not_depend_on_the_batch(kind, backend):
    table, order = random_table(1, **GAME), torch.tensor([4, 2, 0, 5, 1, 3])
    select = selections()[kind]
    budget = torch.tensor([5, 15, 9, 15, 1, 12])
    settings = {"num_simulations": budget, "discount": torch.linspace(0.5, 1, 6)}
    tree = search(table.root(STATES), table, select=select, backend=backend, **settings)
    settings = {name: value[order] for name, value in settings.items()}
    other = search(
        table.root(order), table, select=part(select, order), backend=backend, **settings
    )
    assert equal(tree[order], other) and not equal(tree, other)
    settings = {"num_simulations": 15, "backend": backend}
    tree = search(table.root(STATES), table, select=select, **settings)
    for b in (0, 3, 5):
        one = torch.tensor([b])
        alone = search(table.root(one), table, select=part(select, one), **settings)
        assert equal(tree[b], alone)


# -- draws


@pytest.mark.parametrize("policy", [muzero_policy, gumbel_policy])
def test_a_generator_makes_a_plan_repeatable(policy):
    table = random_table(4, actions=4)

    def plan(seed):
        return policy(table.root(STATES), table, 12, generator=torch.Generator().manual_seed(seed))

    one, same, other = plan(0), plan(0), plan(1)
    assert torch.equal(one.action, same.action)
    assert torch.equal(one.action_weights, same.action_weights)
    assert equal(one.tree, same.tree) and not equal(one.tree, other.tree)


def test_actions_are_drawn_from_the_visits_by_temperature():
    visits = torch.tensor([[1, 3, 0, 6]]).repeat(4000, 1)
    noise = gumbel_noise((4000, 4), torch.Generator().manual_seed(0))
    for temperature in (1.0, 0.5):
        frequency = sample_visits(visits, temperature, noise).bincount(minlength=4) / 4000
        expected = (visits[0] / 10.0) ** (1 / temperature)
        torch.testing.assert_close(frequency, expected / expected.sum(), rtol=0, atol=0.03)
    heat = torch.tensor([0.0, 1e-3]).repeat_interleave(2000)
    assert (sample_visits(visits, heat, noise) == 3).all()
    visits, noise = torch.tensor([[1, 2], [5, 4]]), torch.tensor([[0.0, 0.0], [0.0, 9.0]])
    assert sample_visits(visits, torch.tensor([float("nan"), 1.0]), noise)[1] == 1
    assert sample_visits(visits[:0], torch.ones(0), noise[:0]).shape == (0,)


def test_paths_lead_from_the_root_to_the_nodes():
    table = random_table(4)
    tree = search(table.root(STATES), table, num_simulations=12, keep_embeddings=True)
    for b in range(6):
        for row in range(13):
            state = b
            for action in tree.path_to(b, row):
                state = int(table.next[state, action])
            assert tree.embeddings["state"][b, row] == state
            assert len(tree.path_to(b, row)) == tree.data["depth"][b, row]
        assert tree.best_path(b)[0] == tree.visits_of_root()[b].argmax()


# -- two players


@pytest.mark.parametrize("backend", BACKENDS)
def test_players_take_turns_unless_the_model_names_the_player(backend):
    """The states are doubled, one for each player."""
    one = random_table(3, illegal=0.3, over=0.2)
    num = len(one.next)
    table = Table(
        next=torch.cat([one.next + num, one.next]),
        reward=one.reward.repeat(2, 1),
        value=one.value.repeat(2),
        logits=one.logits.repeat(2, 1),
        mask=one.mask.repeat(2, 1),
        player=torch.arange(2 * num) // num + 1,
    )

    def silent(embedding, action):
        output, after = table(embedding, action)
        return output._replace(to_play=None), after

    roots = torch.tensor([0, 1, num, num + 1])
    settings = {"num_simulations": 20, "backend": backend}
    tree = search(table.root(roots), table, **settings)
    assert equal(tree, search(table.root(roots), silent, **settings))
    assert tree.visits_of_root()[:2].tolist() == tree.visits_of_root()[2:].tolist()
    depth, player = tree.data["depth"], tree.data["to_play"]
    made = tree.data["visits"] > 0
    expected = (roots // num).unsqueeze(-1).add(depth).remainder(2) + 1
    assert torch.equal(player[made], expected[made].int())
    numbers = torch.tensor([1, 0, 2])  # a player's number does not depend on the batch
    start = one.root(torch.arange(3))._replace(to_play=numbers)
    several = search(start, one, **settings)
    assert several.data["to_play"][:, 1].tolist() == [2, 1, 1]
    for b in range(3):
        alone = one.root(torch.tensor([b]))._replace(to_play=numbers[b : b + 1])
        assert equal(several[b], search(alone, one, **settings))


# -- value prefixes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("horizon", [1, 2, 5])
def test_an_exact_prefix_gives_the_tree_of_the_rewards(horizon, backend):
    """Rewards of eighths, so that sums and differences of them are exact."""
    trees = []
    for prefixed in (True, False):
        table = random_table(7, prefixed=prefixed)
        table.reward.mul_(8).round_().div_(8)
        prefix = ValuePrefix(horizon, ("prefix",)) if prefixed else None
        settings = {"num_simulations": 20, "value_prefix": prefix, "backend": backend}
        trees.append(search(table.root(STATES), table, **settings))
    del trees[0].data["value_prefix"]
    assert trees[0].data["depth"].max() > 2
    assert equal(*trees)


# -- threads


@pytest.mark.parametrize("num_threads", [2, 16])
@pytest.mark.parametrize("kind", ["puct", "ties", "gumbel"])
def test_threads_change_nothing(kind, num_threads):
    table, select = random_table(1, **GAME), selections()[kind]
    budget = torch.tensor([5, 15, 9, 15, 1, 12])
    settings = {"num_simulations": budget, "select": select, "keep_embeddings": True}
    one = search(table.root(STATES), table, **settings)
    many = search(table.root(STATES), table, num_threads=num_threads, **settings)
    assert equal(one, many)
    for name, leaf in one.embeddings.items():
        assert torch.equal(many.embeddings[name], leaf), name


def test_errors_and_masks_of_the_model_in_threads():
    table = random_table(1, **GAME)
    root = table.root(STATES)._replace(mask=None)
    one = search(root, table, num_simulations=15)
    assert not one.data["mask"].all()
    for _ in range(5):
        assert equal(one, search(root, table, num_simulations=15, num_threads=6))
    table.value[:] = torch.nan
    root = root._replace(value=torch.zeros(6))
    with pytest.raises(ValueError, match="value is NaN"):
        search(root, table, num_simulations=4, num_threads=3)


def test_sequential_halving_visits_the_remaining_actions_equally():
    """In each round the remaining actions are visited equally often."""
    for num_considered, num_simulations in itertools.product(range(1, 20), (1, 2, 7, 16, 50, 200)):
        schedule = considered_visits(num_considered, num_simulations)
        assert len(schedule) == num_simulations
        if num_considered == 1:
            assert schedule == tuple(range(num_simulations))
            continue
        assert all(0 <= b - a <= 1 for a, b in itertools.pairwise(schedule))
        assert schedule.count(0) == min(num_considered, num_simulations)
