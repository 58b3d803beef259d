"""A task of two turns whose V and Q are known exactly: one batch of 80 rows is all of its data.

`exact_task.json` has its 14 distinct dialogues with their counts and, for some gamma and tau, the
values at which every expectile and Bellman equation of the data holds. A state is the prefix of
tokens at a decision; Q is by state and token.
"""

import json
from functools import cache

import pytest
import torch

from benchmarks.ilql_exact import in_order, result_of
from benchmarks.ilql_exact_task import TOKENIZER, dataset, exact_return, solution
from raffia.algorithms.ilql.terms import bellman_target, q_loss, v_loss

from .small import HERE, collate

TASK = json.loads((HERE / "exact_task.json").read_text())
ROWS = [row for row in TASK["rows"] for _ in range(row["count"])]


def prefix(row, position):
    return " ".join(map(str, row["tokens"][: position + 1]))


def gathered(solution, rows=ROWS):
    """V [B, A + 1] and Q [B, A] of the solution at the batch's positions; 0 elsewhere."""
    batch = collate(rows, TASK["pad"])
    v = torch.zeros(batch["state_idxs"].shape, dtype=torch.float64)
    q = torch.zeros(batch["action_idxs"].shape, dtype=torch.float64)
    for i, row in enumerate(rows):
        for t, position in enumerate(row["action_idxs"]):
            state = prefix(row, position)
            v[i, t] = solution["v"][state]
            q[i, t] = solution["q"][state][str(row["tokens"][position + 1])]
    return batch, v, q


def summed_by_state(grad, batch, rows, with_token):
    """The gradient of each number of a table: summed over all positions that read it."""
    sums = {}
    for i, row in enumerate(rows):
        for t, position in enumerate(row["action_idxs"]):
            key = prefix(row, position + with_token)
            sums[key] = sums.get(key, 0.0) + grad[i, t].item()
    return sums


@pytest.mark.parametrize("name", TASK["solutions"])
def test_the_losses_have_zero_gradient_at_the_exact_values(name):
    solution = TASK["solutions"][name]
    batch, v, q = gathered(solution)
    v.requires_grad_()
    q.requires_grad_()
    mask = batch["action_mask"]
    target = bellman_target(
        batch["rewards"], v[:, 1:], batch["terminals"][:, 1:], solution["gamma"]
    )
    loss = q_loss([q, q], target, mask) + v_loss(v[:, :-1], q, mask, solution["tau"])
    v_grad, q_grad = torch.autograd.grad(loss, (v, q))
    for grad, with_token in ((v_grad, False), (q_grad, True)):
        sums = summed_by_state(grad, batch, ROWS, with_token)
        assert len(sums) >= 28
        assert max(map(abs, sums.values())) < 1e-12
    moved = v_loss(v[:, :-1] + 0.01, q, mask, solution["tau"])  # this test can fail
    [v_grad] = torch.autograd.grad(moved, v)
    assert max(map(abs, summed_by_state(v_grad, batch, ROWS, False).values())) > 1e-4


NUMBERS = [
    *("<|pad|>", "<s>", "</s>", "</a>", "</eod>", "g", "h", "k", "l", "m", "n", "r", "x", "y"),
    *("a", "b", "0", "1", "2", "3", "4", "8", "9", "q"),
]  # of the record's tokens


def recorded(state):
    """A state of the benchmark in the record's token numbers."""
    return " ".join(str(NUMBERS.index(TOKENIZER.id_to_token(token))) for token in state)


@pytest.mark.parametrize("name", TASK["solutions"])
def test_the_benchmarks_task_is_the_recorded_one(name):
    expected = TASK["solutions"][name]
    found = solution(expected["gamma"], expected["tau"])
    assert {recorded(s): v for s, v in found.v.items()} == pytest.approx(expected["v"], abs=1e-12)
    for state, actions in found.q.items():
        by_token = {recorded((token,)): q for token, q in actions.items()}
        assert by_token == pytest.approx(expected["q"][recorded(state)], abs=1e-12)
    assert (len(found.v), found.range) == (28, pytest.approx(3.0))
    rows = sorted(recorded(point.tokens) for point in dataset())
    assert rows == sorted(" ".join(map(str, row["tokens"])) for row in ROWS)


@cache
def points():
    return list(dataset())


def by_share(state):
    """A policy that acts as the data do."""
    counts = [0.0] * TOKENIZER.num_tokens
    for point in points():
        if tuple(point.tokens[: len(state)]) == state:
            counts[point.tokens[len(state)]] += 1
    return [count / sum(counts) for count in counts]


def best_of(exact):
    def next_token(state):
        actions = exact.q[state]
        return [float(t == max(actions, key=actions.get)) for t in range(TOKENIZER.num_tokens)]

    return next_token


def test_exact_returns_of_known_policies():
    assert exact_return(by_share) == pytest.approx(-0.17375)
    for tau, expected in ((0.5, 0.325), (0.7, 0.325), (0.8, 2.0), (0.99, 2.0), (1.0, 2.0)):
        assert exact_return(best_of(solution(0.99, tau))) == pytest.approx(expected)
    uniform = [1 / TOKENIZER.num_tokens] * TOKENIZER.num_tokens
    assert -2 < exact_return(lambda state: uniform) < -1.99
    end = TOKENIZER.eoa_token_id
    assert exact_return(lambda state: [float(t == end) for t in range(len(uniform))]) == -2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_values_are_exact_and_only_multi_step_backups_find_the_best():
    """Errors in percent of the range of the exact values; returns are exact expectations."""
    results = [result_of(name, seed=0) for name in ("bc", "single_step", "ilql")]
    cloned, one_step, multi_step = results
    for found in (one_step, multi_step):
        assert max(found.errors.rms_v, found.errors.rms_q) < 1
        assert found.errors.largest < 2
    assert cloned.errors is None
    # -0.099 if it has not yet learnt that the second answer depends on the reply
    assert cloned.sampled == pytest.approx(-0.174, abs=0.1)
    assert 0.2 < one_step.sampled < 0.33
    assert one_step.greedy == pytest.approx(0.325)
    assert 1.6 < multi_step.sampled < 2.0
    assert multi_step.greedy == pytest.approx(2.0)
    assert in_order(results)
