"""A toy run whose actors, reanalyzers and evaluators are late, lost or dead, by a seed.

Its learner's state is an integer that depends on all its inputs so far.
"""

from contextlib import ExitStack, closing

import pytest
import torch

from raffia.distributed import Board, ChaosEngine, InlineEngine, Pool
from raffia.functional.seeds import generator_for
from raffia.tensordict import TensorDict
from raffia.train.ahead import BatchesAhead
from raffia.train.evaluations import Evaluated, Evaluations
from tests.train.roles import Stateless

NUM_UPDATES, AHEAD, JOIN_AFTER, MODULUS = 10, 3, 4, 1_000_003


class Actor:
    """Adds up its draws, seeded by the task's key, and the weights of its tasks."""

    def __init__(self, config, index):
        self.index, self.total = index, 0

    def load(self, state):
        self.total = int(state["total"])

    def draw(self, key):
        return generator_for(0, "act", self.index, key)

    def do(self, task, weights):
        drawn = int(torch.randint(100, (), generator=self.draw(int(task["key"]))))
        self.total = (3 * self.total + drawn + int(weights["w"])) % MODULUS
        return TensorDict(total=torch.tensor(self.total))


class OwnGenerator(Actor):
    """A broken actor that draws from a generator outside its state."""

    def __init__(self, config, index):
        super().__init__(config, index)
        self.generator = generator_for(0, "act", index)

    def draw(self, key):
        return self.generator


class Score(Stateless):
    """Answers with its task times the weights."""

    def do(self, task, weights):
        return TensorDict(score=weights["w"] * next(iter(task.values())) % MODULUS)


class BatchMaker:
    """Batches whose weights are those of every third update."""

    def __init__(self):
        self.state = {}

    def weights(self, state):
        version = int(state["step"]) // 3 * 3
        return version, TensorDict(w=self.state.setdefault(version, state["w"].clone()))

    def task(self, segments):
        return segments.copy()

    def batch(self, state, task, answer):
        return answer


class ByArrival(Pool):
    """A broken pool that takes the first finished answer, whichever worker's it is."""

    def take(self, worker, key):
        due = [each for each in range(self.num_workers) if self.is_oldest(each, key)]
        finished = [each for each in due if getattr(self.worker(each), "_done", None)]
        return super().take((finished or due)[0], key)

    def is_oldest(self, worker, key):
        return bool(self._open[worker]) and self._open[worker][0].key == key


def history(engine, actor="Actor", pool=Pool):
    """The learner's state after each update, and the scores of its evaluations."""
    totals, w, values, requested = [0, 0], 7, [], 0
    options = {"max_restarts": 100}
    with ExitStack() as opened:
        board, state_of = Board(engine), lambda at: TensorDict(total=torch.tensor(totals[at]))
        actors = pool(engine, f"{__name__}:{actor}", "{}", 2, state_of=state_of, **options)
        role = f"{__name__}:Score"
        makers, evaluators = (Pool(engine, role, "{}", num, **options) for num in (2, 1))
        batches = BatchesAhead(makers, BatchMaker(), ahead=AHEAD, num_updates=NUM_UPDATES)
        evaluations = Evaluations(
            evaluators,
            join_after=JOIN_AFTER,
            acting=lambda state: state.select("w"),
            outcome=lambda update, count, answer: Evaluated(float(answer["score"]), {}),
        )
        for part in (actors, batches, evaluations):
            opened.enter_context(closing(part))
        for update in range(NUM_UPDATES):
            state = TensorDict(step=torch.tensor(update), w=torch.tensor(w))
            board.publish(update, state.select("w"))
            while requested < min(NUM_UPDATES, update + 1 + AHEAD):
                for worker in (0, 1):
                    task = TensorDict(key=torch.tensor(requested))
                    actors.ask(worker, requested, task, board.ref(update))
                requested += 1
            for worker in (0, 1):
                totals[worker] = int(actors.take(worker, update)["total"])
            board.drop_below(max(0, update - AHEAD))
            drawn = torch.tensor(sum(totals))
            batch = batches.next(state, lambda number, drawn=drawn: TensorDict(x=drawn + number))
            w = (31 * w + sum(totals) + int(batch["score"])) % MODULUS
            values.append(w)
            if update % 2 == 0:
                evaluations.begin(TensorDict(step=torch.tensor(update), w=torch.tensor(w)), update)
            while evaluations.is_due(update):
                values.append(evaluations.join().outcome.score)
    return values


@pytest.fixture(scope="module")
def undisturbed():
    return history(InlineEngine())


@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 1_000), marks=pytest.mark.slow)]
)
@pytest.mark.timeout(600)
def test_a_run_is_the_same_with_late_lost_and_dead_workers(seeds, undisturbed):
    num_lost = 0
    for seed in seeds:
        engine = ChaosEngine(seed, lost=0.1, wasted=0.1)
        assert history(engine) == undisturbed, seed
        num_lost += engine.num_lost
    assert num_lost > 5 * len(seeds)


def test_a_pool_that_takes_answers_by_arrival_gives_another_run(undisturbed):
    assert history(InlineEngine(), pool=ByArrival) == undisturbed
    others = [history(ChaosEngine(seed), pool=ByArrival) for seed in range(5)]
    assert any(found != undisturbed for found in others)


def test_a_role_with_a_generator_outside_its_state_gives_another_run():
    undisturbed = history(InlineEngine(), "OwnGenerator")
    assert any(history(ChaosEngine(seed), "OwnGenerator") != undisturbed for seed in range(5))
