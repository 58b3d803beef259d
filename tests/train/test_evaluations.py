"""Open evaluations: their weights, when they are joined, and after a resume."""

from contextlib import closing

import pytest
import torch

from raffia.distributed import InlineEngine
from raffia.distributed.pool import Pool
from raffia.tensordict import TensorDict
from raffia.train.evaluations import Evaluated, Evaluations
from tests.train.roles import Stateless


def test_a_stop_leaves_evaluations_open_and_an_empty_state_drops_them():
    with closing(make_evaluations()) as evaluations:
        evaluations.begin(state(2), 20)
        assert evaluations.join(lambda: True) is None
        assert evaluations.updates == [2]
        assert evaluations.metrics()["evaluations_open"] == 1.0
        assert joined(evaluations) == EXPECTED[:1]
        evaluations.begin(state(2), 20)
        evaluations.load_state(TensorDict())
        assert evaluations.updates == [] and evaluations.board.versions == []


class Weigh(Stateless):
    """A role whose score is its weights and the count."""

    def do(self, task, weights):
        return TensorDict(score=weights["w"] + task["count"] / 1000)


def make_evaluations(**settings):
    return Evaluations(
        Pool(InlineEngine(), f"{__name__}:Weigh", "{}", settings.pop("num", 2)),
        join_after=settings.pop("join_after", 5),
        acting=lambda state: state.select("w"),
        outcome=lambda update, count, answer: Evaluated(float(answer["score"]), {"count": count}),
    )


def state(update):
    return TensorDict(step=torch.tensor(update), w=torch.tensor(float(update)))


def joined(evaluations):
    found = []
    while evaluations.updates:
        evaluation = evaluations.join()
        found.append((evaluation.update, evaluation.at, evaluation.outcome.score))
    return found


EXPECTED = [
    (2, 20, pytest.approx(2.02)),
    (4, 40, pytest.approx(4.04)),
    (9, 90, pytest.approx(9.09)),
]


@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("resumed", [False, True])
def test_each_evaluation_has_the_weights_of_its_update(num, resumed):
    with closing(make_evaluations(num=num)) as evaluations:
        for update in (2, 4, 9):
            current = state(update)
            evaluations.begin(current, 10 * update)
            current["w"].fill_(100.0)  # as a learner writes into its state
        if resumed:
            saved = evaluations.state()
            evaluations = make_evaluations(num=1)
            evaluations.load_state(saved)
        assert (evaluations.updates, evaluations.latest_count) == ([2, 4, 9], 90)
        assert joined(evaluations) == EXPECTED
        assert evaluations.board.versions == [] and evaluations.state().is_empty()


def test_evaluations_are_due_in_order():
    with closing(make_evaluations()) as evaluations:
        assert not evaluations.is_due(100)
        evaluations.begin(state(2), 20)
        evaluations.begin(state(4), 40)
        assert [evaluations.is_due(update) for update in (6, 7, 8)] == [False, True, True]
        evaluations.join()
        assert [evaluations.is_due(update) for update in (8, 9)] == [False, True]
