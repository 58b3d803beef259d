"""Batches of shards: assignment to workers, requests, and the state of a replacement."""

from contextlib import closing

import pytest
import torch

from raffia.data.row_feed import RowFeed
from raffia.data.storage import TensorStorage
from raffia.distributed import ChaosEngine, InlineEngine
from raffia.distributed.pool import Pool
from raffia.tensordict import TensorDict
from raffia.train.ahead import BatchesOfShards, ShardMirrors, holds

NUM_UPDATES, NUM_ROWS, SHARDS = 12, 5, 4


class Reader:
    """A role that answers with the requested rows of its mirrors."""

    def __init__(self, config, index):
        self.mirrors = ShardMirrors()

    def load(self, state):
        self.mirrors.load(state)

    def do(self, task, weights):
        self.mirrors.append(task)
        pairs = zip(task["shards"].tolist(), task["at"], strict=True)
        return TensorDict(
            x=torch.cat([self.mirrors.read(shard, index.view(1)) for shard, index in pairs])
        )


class BatchMaker:
    def __init__(self):
        self.storages = [TensorStorage(NUM_ROWS) for _ in range(SHARDS)]
        self.feeds = [RowFeed(storage, ("x",)) for storage in self.storages]

    def add(self, num):
        for shard, (storage, feed) in enumerate(zip(self.storages, self.feeds, strict=True)):
            feed.before_extend(num)
            items = torch.arange(storage.total, storage.total + num)
            storage.extend(TensorDict(x=100 * items + shard, batch_size=[num]))

    def weights(self, state):
        return 0, TensorDict(w=torch.tensor(0.0))

    def task(self, at):
        return at

    save = load = task

    def part(self, task, shards):
        index = task["at"][shards.start : shards.stop]
        return task.copy().set("at", index).set("shards", torch.tensor([*shards]))

    def join(self, answers):
        return TensorDict(x=torch.cat([answer["x"] for answer in answers]))

    def batch(self, state, task, answer):
        return answer


@pytest.mark.parametrize("num", [1, 2, 4, 8])
@pytest.mark.parametrize("ahead", [0, 3])
def test_a_batch_has_the_rows_at_its_draw_and_unneeded_rows_are_dropped(num, ahead):
    with closing(Loop(num, ahead=ahead)) as loop:
        for update in range(NUM_UPDATES):
            loop.run([update])
            stored = {feed.num_bytes_stored for feed in loop.maker.feeds}
            assert stored <= {8 * num for num in range(2 * (ahead + 1) + 1)}
            assert max(stored) > 0 or not ahead or update != 7
            assert loop.batches.metrics()["mib_kept_for_reanalyzers"] >= 0.0
        assert len(loop.expected) == NUM_UPDATES
        assert loop.batches.metrics()["batches_open"] == 0.0


class Loop:
    """Each update adds two items to each shard; a batch reads one row of each."""

    def __init__(self, num, engine=None, ahead=3):
        self.maker, self.expected = BatchMaker(), {}
        self.maker.add(3)
        pool = Pool(engine or InlineEngine(), f"{__name__}:Reader", "{}", num, max_restarts=100)
        self.batches = BatchesOfShards(pool, self.maker, ahead=ahead, num_updates=NUM_UPDATES)

    def close(self):
        self.batches.close()

    def draw(self, update):
        """From shard s, the item that is s items older than the newest."""
        total = self.maker.storages[0].total
        items = total - 1 - torch.arange(SHARDS).clamp_max(2)
        self.expected[update] = (100 * items + torch.arange(SHARDS)).tolist()
        return TensorDict(at=items % NUM_ROWS)

    def run(self, updates=range(NUM_UPDATES)):
        for update in updates:
            self.maker.add(2)
            batch = self.batches.next(TensorDict(step=torch.tensor(update)), self.draw)
            assert batch["x"].tolist() == self.expected[update]


@pytest.mark.parametrize("num", [1, 2, 8])
@pytest.mark.parametrize("seed", range(3))
def test_workers_that_die_get_their_rows_again(seed, num):
    engine = ChaosEngine(seed, lost=0.25, wasted=0.25)
    with closing(Loop(num, engine)) as loop:
        loop.run()
    assert engine.num_lost >= 2


def test_shards_are_assigned_and_more_workers_than_shards_alternate():
    assert [list(holds(worker, 2, 6)) for worker in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert [list(holds(worker, 6, 3)) for worker in range(6)] == [[0], [1], [2]] * 2
    with pytest.raises(ValueError, match="4 shards cannot be .* equally among 3 workers: use 4"):
        Loop(3)
    requests = []

    class Recording(InlineEngine):
        def start(self, *arguments):
            worker = super().start(*arguments)
            ask = worker.ask

            def recording(task, weights):
                requests.append((int(task["update"]), arguments[2]))
                ask(task, weights)

            worker.ask = recording
            return worker

    with closing(Loop(8, Recording(), ahead=0)) as loop:
        loop.run(range(3))
    assert requests == [(u, (u % 2) * 4 + shard) for u in range(3) for shard in range(4)]


def test_loading_a_state_drops_open_batches_and_mirrored_rows():
    """Workers get the current rows at their next task."""
    with closing(Loop(2)) as loop:
        loop.run(range(5))
        loop.batches.load_state(TensorDict())
        assert not any(feed.is_started for feed in loop.maker.feeds)
        loop.maker.add(9)  # as of another checkpoint
        loop.run(range(5, NUM_UPDATES))
