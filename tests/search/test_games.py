"""Problems whose answers are known are solved: bandits, needles in deep trees, TicTacToe."""

import functools

import pytest
import torch

from raffia.search import RecurrentOutput, RootOutput, gumbel_policy, muzero_policy
from tests.marks import slow_among

from . import tictactoe
from .table import BACKENDS

CALM = {"dirichlet_fraction": 0.0, "temperature": 0.0}
POLICIES = {
    "muzero": functools.partial(muzero_policy, **CALM),
    "gumbel": functools.partial(gumbel_policy, gumbel_scale=0.0),
}


# -- bandits


def bandit(pays: torch.Tensor, logits: torch.Tensor):
    """Root and model of one bandit a row: pays [B, A]; an episode is a single pull."""

    def model(embedding, action):
        rows = torch.arange(len(action))
        reward = embedding[rows, action]
        return RecurrentOutput(reward, 0 * reward, torch.zeros(embedding.shape)), embedding

    return RootOutput(logits, torch.zeros(len(pays)), pays), model


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_better_of_two_arms_is_found(policy, backend):
    pays = torch.tensor([[0.4, 0.6], [0.6, 0.4], [-5.0, -5.5], [0.0, 0.001], [100.0, 90.0]])
    pays = torch.cat([pays, torch.tensor([[0.0, 1.0], [1.0, 0.0]])])
    logits = torch.zeros(7, 2)
    logits[5, 0] = logits[6, 1] = 2.0  # a prior that gives the better arm 12 %
    root, model = bandit(pays, logits)
    plan = POLICIES[policy](root, model, 24, discount=0.0, backend=backend)
    assert plan.action.tolist() == pays.argmax(-1).tolist()
    torch.testing.assert_close(plan.tree.qvalues(), pays)
    assert (plan.action_weights.argmax(-1) == plan.action)[:5].all()


# -- TicTacToe

LOST, DRAWN = -1, 0
# Simulations after which no losing move is left, by the number of empty squares (from few squares
# on, a search visits all positions; from the empty board each move draws).
ENOUGH = {1: 50, 2: 50, 3: 50, 4: 100, 5: 200, 6: 600, 7: 1000, 8: 1600, 9: 200}


@functools.cache
def by_empty_squares() -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    boards, worth = tictactoe.positions()
    empty = (boards == 0).sum(-1)
    return {n: (boards[empty == n], worth[empty == n]) for n in range(1, 10)}


def mistakes(action, worth) -> tuple[int, int]:
    """The numbers of moves that lose where another does not, and that gain less than the best."""
    best, taken = worth.amax(-1), worth.gather(1, action.unsqueeze(-1)).squeeze(-1)
    assert (taken > -2).all()  # legal
    return int(((taken == LOST) & (best > LOST)).sum()), int((taken < best).sum())


def plan(policy, boards, num_simulations, **settings):
    root = tictactoe.root_of(boards)
    return POLICIES[policy](root, tictactoe.rules, num_simulations, discount=1.0, **settings)


def test_the_rules_equal_tictactoe():
    boards, worth = tictactoe.positions()
    value = tictactoe.solution()
    assert (len(boards), len(value), value[(0,) * 9]) == (4520, 5478, 0)
    assert torch.equal(worth > -2, tictactoe.legal(boards))
    assert len(tictactoe.code(boards).unique()) == len(boards)
    assert sum(len(boards) for boards, _ in by_empty_squares().values()) == 4520
    fork = torch.tensor([[1, 0, 0, 0, 2, 0, 0, 0, 1]])  # a corner would lose, an edge draws
    row = int((boards == fork).all(-1).nonzero())
    assert worth[row].tolist() == [-2, 0, -1, 0, -2, 0, -1, 0, -2]


@pytest.mark.slow
def test_no_losing_move_is_picked_in_any_position_of_tictactoe():
    num_positions = 0
    for empty, (boards, worth) in by_empty_squares().items():
        action = plan("muzero", boards, ENOUGH[empty]).action
        assert mistakes(action, worth) == (0, 0), empty
        num_positions += len(boards)
    assert num_positions == 4520
    boards, worth = by_empty_squares()[6]  # too few simulations do pick some
    assert mistakes(plan("muzero", boards, 50).action, worth)[0] > 20


@pytest.mark.parametrize("empty", slow_among([4, 5, 7], 5, 7))
def test_no_losing_move_with_gumbel_or_transpositions(empty):
    boards, worth = by_empty_squares()[empty]
    assert mistakes(plan("gumbel", boards, ENOUGH[empty]).action, worth)[0] == 0
    chosen = plan("muzero", boards, ENOUGH[empty], transpositions=tictactoe.code)
    assert mistakes(chosen.action, worth)[0] == 0


def test_roots_of_one_batch_may_have_different_numbers_of_simulations():
    groups = [by_empty_squares()[n] for n in range(1, 6)]
    boards, worth = (torch.cat(parts) for parts in zip(*groups, strict=True))
    order = torch.randperm(len(boards), generator=torch.Generator().manual_seed(0))
    boards, worth = boards[order][:600], worth[order][:600]
    empty = (boards == 0).sum(-1)
    budget = torch.tensor([0, *ENOUGH.values()])[empty]
    action = plan("muzero", boards, budget).action
    assert mistakes(action, worth) == (0, 0)
    for n in (2, 5):  # a root has the plan that it has among its like
        rows = empty == n
        assert torch.equal(action[rows], plan("muzero", boards[rows], ENOUGH[n]).action)
