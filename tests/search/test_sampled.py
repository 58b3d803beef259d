"""Search over sampled actions: continuous and large action spaces."""

import functools

import pytest
import torch
from torch.distributions import (
    AffineTransform,
    Independent,
    Normal,
    TanhTransform,
    TransformedDistribution,
)

from raffia import TensorClass, TensorDict
from raffia.search import (
    CategoricalSampler,
    GaussianSampler,
    RecurrentOutput,
    RootOutput,
    ValuePrefix,
    gumbel_policy,
    muzero_policy,
    sampled_policy,
    search,
    with_sampled_actions,
)

from .table import assert_same, random_table

QUIET = functools.partial(
    muzero_policy, num_simulations=24, dirichlet_fraction=0.0, temperature=0.0
)


def bandit(embedding, action):
    """The closer the action is to the state, the better."""
    rows = len(action)
    reward = -(action - embedding).square().sum(-1)
    return RecurrentOutput(reward, torch.zeros(rows), standard(rows)), embedding


def standard(rows):
    """Mean 0, standard deviation 1."""
    return torch.tensor([0.0, 1.0]).expand(rows, 2)


def bandit_root(optimum):
    rows = len(optimum)
    return RootOutput(standard(rows), torch.zeros(rows), optimum)


def walk(embedding, action):
    """A point in the plane that actions move; the nearer to (1, -1) the better. The policy leans
    towards where the point is."""
    after = embedding + action
    away = (after - torch.tensor([1.0, -1.0])).square().sum(-1)
    parameters = torch.cat([0.1 * after, torch.full_like(after, 0.4)], -1)
    return RecurrentOutput(-away, -0.5 * away, parameters), after


def walk_root(seed, rows=4):
    start = torch.randn(rows, 2, generator=torch.Generator().manual_seed(seed))
    return RootOutput(torch.cat([0.1 * start, start * 0 + 0.4], -1), torch.zeros(rows), start)


# ---------------------------------------------------------------------------- continuous


POLICIES = {
    "gumbel": functools.partial(gumbel_policy, num_simulations=30, gumbel_scale=0.0),
    # a uniform prior and unvisited actions that count as the mean: slow to try all of them
    "muzero": functools.partial(
        muzero_policy, num_simulations=200, dirichlet_fraction=0.0, temperature=0.0
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_more_samples_reduce_the_regret(name):
    root = bandit_root(torch.linspace(-1, 1, 64).unsqueeze(-1))
    policy = functools.partial(POLICIES[name], discount=0.0)

    def regret(num_samples):
        sampler, seed = GaussianSampler(num_samples), torch.arange(64)
        plan = sampled_policy(root, bandit, sampler=sampler, policy=policy, seed=seed)
        return (plan.action - root.embedding).abs().mean().item()

    one, four, sixteen = regret(1), regret(4), regret(16)
    assert one > 2 * four and four > 2 * sixteen and sixteen < 0.15


def test_the_action_is_the_chosen_sample_and_samples_of_a_node_differ():
    sampler = GaussianSampler(6)
    plan = sampled_policy(walk_root(0), walk, sampler=sampler, policy=QUIET, seed=torch.arange(4))
    samples = plan.tree.data["actions"]
    assert plan.action.shape == (4, 2) and samples.shape == (4, 25, 6, 2)
    best = plan.tree.visits_of_root().argmax(-1)
    assert plan.action.equal(samples[torch.arange(4), 0, best])
    assert plan.action_weights.shape == (4, 6)
    for data in plan.tree.data:
        visited = data["actions"][data["visits"] > 0].flatten()
        assert len(visited.unique()) == len(visited)


@pytest.mark.parametrize("sampler", [GaussianSampler(5), GaussianSampler(3, low=-0.5, high=0.5)])
def test_both_back_ends_give_the_same_tree(sampler):
    root, fn = with_sampled_actions(walk_root(2), walk, sampler, torch.arange(4))
    compiled = search(root, fn, num_simulations=30, backend="compiled")
    assert_same(search(root, fn, num_simulations=30, backend="reference"), compiled)


def test_gaussian_samples_have_the_policy_s_moments():
    parameters = torch.tensor([[1.0, -2.0, 1.0, 0.4]])
    actions = GaussianSampler(20000).sample(parameters, torch.tensor([3])).actions[0]
    torch.testing.assert_close(actions.mean(0), torch.tensor([1.0, -2.0]), atol=0.03, rtol=0)
    expected = torch.tensor([1.0, 0.4])
    torch.testing.assert_close(actions.std(0), expected, atol=0.02, rtol=0.02)
    seed, free = torch.tensor([3]), GaussianSampler(5)
    for std in (0.3, torch.tensor([0.3, 2.0])):  # a fixed one equals one from the policy
        fixed = GaussianSampler(5, std=std)
        both = torch.cat([parameters[:, :2], torch.as_tensor(std).expand(1, 2)], -1)
        actions = fixed.sample(parameters[:, :2], seed).actions
        assert actions.equal(free.sample(both, seed).actions)
        density = fixed.log_density(parameters[:, :2], actions)
        assert density.equal(free.log_density(both, actions))


def test_density_is_that_of_torch():
    parameters = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) + 0.1
    mean, std = parameters.requires_grad_().chunk(2, -1)
    normal = Normal(mean.unsqueeze(1), std.unsqueeze(1))
    seed = torch.arange(3)

    free = GaussianSampler(5)
    actions = free.sample(parameters.detach(), seed).actions
    density = free.log_density(parameters, actions)
    torch.testing.assert_close(density, Independent(normal, 1).log_prob(actions))

    low, high = torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 1.0])
    bounded = GaussianSampler(5, low=low, high=high)
    actions = bounded.sample(parameters.detach(), seed).actions
    assert (actions > low).all() and (actions < high).all()
    squash = [TanhTransform(), AffineTransform((low + high) / 2, (high - low) / 2)]
    expected = Independent(TransformedDistribution(normal, squash), 1).log_prob(actions)
    density = bounded.log_density(parameters, actions)
    torch.testing.assert_close(density, expected, rtol=1e-4, atol=1e-4)
    density.sum().backward()
    assert parameters.grad.isfinite().all() and (parameters.grad != 0).all()
    on_the_bounds = torch.stack([low, high]).expand(3, 2, 2)
    assert bounded.log_density(parameters, on_the_bounds).isfinite().all()


def test_saturated_actions_lie_within_bounds_of_any_float32_numbers():
    """high - low and low + (high - low) are rounded: one of three such sums is above high."""
    generator = torch.Generator().manual_seed(0)
    low = 10 * torch.rand(500, generator=generator) - 5
    high = low + 9 * torch.rand(500, generator=generator) + 0.01
    parameters = torch.cat([torch.full((500,), 50.0), torch.ones(500)]).unsqueeze(0)
    sampler = GaussianSampler(1, low=low, high=high)
    [[action]] = sampler.sample(parameters, torch.tensor([0])).actions
    assert bool((action <= high).all())
    torch.testing.assert_close(action, high)
    numbers = sampler.numbers(500)  # of the compiled step
    assert bool((numbers["low"] + numbers["width"] <= high).all())


# ------------------------------------------------------------------------------ discrete


TABLE = random_table(5, actions=4)


def test_sampling_all_actions_equals_the_plain_search():
    states = torch.arange(7)
    plain = search(TABLE.root(states), TABLE, num_simulations=30)
    for prior in ("sampling", "density"):
        root, fn = with_sampled_actions(
            TABLE.root(states), TABLE, CategoricalSampler(9), torch.arange(7), prior=prior
        )
        tree = search(root, fn, num_simulations=30)
        assert tree.data["actions"][:, 0].equal(torch.arange(4).expand(7, 4))
        assert tree.data["children"].equal(plain.data["children"])
        assert tree.data["children_visits"].equal(plain.data["children_visits"])


@pytest.mark.parametrize("num", [1, 2, 3, 5])
def test_weights_correct_the_samples_to_the_policy(num):
    policy = torch.tensor([0.4, 0.3, 0.2, 0.07, 0.03])
    score = torch.tensor([1.0, -2.0, 3.0, 10.0, -20.0])
    samples = CategoricalSampler(num).sample(policy.log().expand(40000, 5), torch.arange(40000))
    estimate = (samples.log_weight.exp() * score[samples.actions]).sum(-1).mean()
    torch.testing.assert_close(estimate, (policy * score).sum(), atol=0.12, rtol=0)


def test_value_prefixes_and_dtypes_of_the_model_are_kept():
    class Prefixes:
        predicts_prefixes = True

        def __call__(self, embedding, action):
            return walk(embedding, action)

    for model, expected in ((Prefixes(), True), (walk, False)):
        _, fn = with_sampled_actions(walk_root(0), model, GaussianSampler(2), torch.arange(4))
        assert fn.predicts_prefixes is expected
    root = bandit_root(torch.zeros(4, 1))
    root = root._replace(prior_logits=root.prior_logits.double())
    match = r"root.prior_logits.*float64.*recurrent_fn returns.*float32"
    with pytest.raises(TypeError, match=match):
        sampled_policy(root, bandit, sampler=GaussianSampler(2), policy=QUIET)


# ---------------------------------------------------------------------------- containers


def test_value_prefixes_reset_by_name():
    def fn(embedding, action):
        assert set(embedding.keys()) == {"x", "reward_hidden_state"}
        output, after = walk(embedding["x"], action)
        memory = embedding["reward_hidden_state"] + 1.0
        after = TensorDict(x=after, reward_hidden_state=memory, batch_size=[len(after)])
        return output._replace(reward=memory.squeeze(-1)), after

    base = walk_root(3)
    start = TensorDict(x=base.embedding, reward_hidden_state=torch.zeros(4, 1), batch_size=[4])
    root, fn = with_sampled_actions(
        base._replace(embedding=start), fn, GaussianSampler(2), torch.arange(4)
    )
    tree = search(root, fn, num_simulations=30, value_prefix=ValuePrefix(2))
    made = tree.data["parent"] >= 0
    assert tree.data["depth"].max() > 2
    assert (tree.data["reward"][made] == 1.0).all()


class Position(TensorClass):
    x: torch.Tensor


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda x: Position(x, batch_size=x.shape[:1]), lambda e: e.x),
        (lambda x: TensorDict(x=x, batch_size=x.shape), lambda e: e["x"]),
    ],
    ids=["tensorclass", "more batch dimensions"],
)
def test_containers_that_cannot_take_further_entries_are_carried_as_they_are(wrap, unwrap):
    base, sampler, seed = walk_root(3), GaussianSampler(3), torch.arange(4)

    def fn(embedding, action):
        output, after = walk(unwrap(embedding), action)
        return output, wrap(after)

    greedy = functools.partial(gumbel_policy, num_simulations=6, gumbel_scale=0.0)
    wrapped = base._replace(embedding=wrap(base.embedding))
    plan = sampled_policy(wrapped, fn, sampler=sampler, policy=greedy, seed=seed)
    plain = sampled_policy(base, walk, sampler=sampler, policy=greedy, seed=seed)
    assert plan.action.equal(plain.action) and plan.action_weights.equal(plain.action_weights)
