"""Batches ahead: when each is drawn, with which weights, and after a resume."""

from contextlib import closing

import pytest
import torch

from raffia.distributed import InlineEngine
from raffia.distributed.pool import Pool
from raffia.tensordict import TensorDict
from raffia.train.ahead import BatchesAhead
from tests.train.roles import Stateless

NUM_UPDATES = 12


class Echo(Stateless):
    """A role that answers with its task and weights."""

    def do(self, task, weights):
        return task.copy().set("weights", weights["w"].clone())


class Drawn:
    """Every second update has new weights; a segment is the drawn number."""

    def weights(self, state):
        version = int(state["step"]) // 2 * 2
        return version, TensorDict(w=torch.tensor(float(version)))

    def task(self, segments):
        return TensorDict(segments=segments)

    def batch(self, state, task, answer):
        assert task["segments", "x"] == answer["segments", "x"]
        return answer

    def save(self, task):
        return TensorDict(stored=task["segments", "x"])

    def load(self, saved):
        return TensorDict(segments=TensorDict(x=saved["stored"]))


class Loop:
    """The drawing part of a run's loop: `drawn` lists at which update each batch was drawn."""

    def __init__(self, num=2, ahead=3):
        pool = Pool(InlineEngine(), f"{__name__}:Echo", "{}", num, max_restarts=50)
        self.ahead = BatchesAhead(pool, Drawn(), ahead=ahead, num_updates=NUM_UPDATES)
        self.drawn, self.num_drawn, self.update = [], 0, 0

    def close(self):
        self.ahead.close()

    def draw(self, number):
        self.drawn.append((self.update, number))
        self.num_drawn += 1
        return TensorDict(x=torch.tensor(self.num_drawn))

    def run(self, until=NUM_UPDATES):
        """(drawn number, update of the batch, version of the weights) for each update."""
        found = []
        while self.update < until:
            batch = self.ahead.next(TensorDict(step=torch.tensor(self.update)), self.draw)
            found.append([float(batch[key]) for key in (("segments", "x"), "update", "weights")])
            self.update += 1
        return found


def expected(ahead):
    return [[update + 1, update, max(0, update - ahead) // 2 * 2] for update in range(NUM_UPDATES)]


@pytest.mark.parametrize("num", [1, 2, 5])
@pytest.mark.parametrize("ahead", [0, 1, 3, 40])
def test_a_batch_is_drawn_ahead_and_made_with_the_weights_of_that_update(num, ahead):
    with closing(Loop(num=num, ahead=ahead)) as loop:
        found = []
        for update in range(1, NUM_UPDATES + 1):
            found += loop.run(update)  # only versions of open batches are stored
            assert len(loop.ahead.board.versions) <= (ahead + 1) // 2 + 1
            num_open = loop.ahead.metrics()["batches_open"]
            assert num_open == min(ahead, NUM_UPDATES - update)
        assert found == expected(ahead)
        assert loop.drawn == [(max(0, number - ahead), number) for number in range(NUM_UPDATES)]
        assert len(loop.ahead.board.versions) == 1
        metrics = loop.ahead.metrics()
        assert metrics["reanalyzer_restarts"] == 0.0 <= metrics["waited_for_batches_seconds"]
        assert loop.ahead.state().is_empty()


@pytest.mark.parametrize("stop", [1, 5, 11])
@pytest.mark.parametrize("saved_again", [False, True])
def test_a_resume_requests_the_drawn_batches_again(stop, saved_again):
    with closing(Loop(num=2)) as before:
        found = before.run(stop)
        saved = before.ahead.state()
    if saved_again:  # before any update
        with closing(Loop(num=1)) as between:
            between.ahead.load_state(saved)
            saved = between.ahead.state()
    with closing(Loop(num=3)) as loop:
        # The order of a checkpoint's entries is not that of the updates.
        backwards = TensorDict(dict(reversed([*saved["drawn"].items()])))
        loop.ahead.load_state(saved.copy().set("drawn", backwards))
        loop.update, loop.num_drawn = stop, before.num_drawn
        assert found + loop.run() == expected(3)
        assert [number for _, number in before.drawn + loop.drawn] == [*range(NUM_UPDATES)]
