"""Replay buffers against lists, for all operations in any order."""

import tempfile

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raffia import TensorDict
from raffia.data.prioritized import PrioritizedSampler
from raffia.data.replay import ReplayBuffer
from raffia.data.samplers import RandomSampler, SamplerWithoutReplacement
from raffia.data.storage import TensorStorage
from tests.tensordict.invariants import sound

ALPHA, BETA, EPS = 0.6, 0.5, 0.01
PRIORITIES = st.sampled_from([0.0, 1e-6, 0.5, 1.0, 7.0, 1e9])


class Against(RuleBasedStateMachine):
    """A buffer beside a list of its items; each item has a distinct value."""

    prefetch = 0

    def sampler(self):
        return RandomSampler()

    @initialize(size=st.integers(1, 20))
    def start(self, size):
        self.size = size
        self.items = []  # values of all items since the buffer was last empty
        self.next_value = 0
        self.buffer = self.make()

    def make(self):
        return ReplayBuffer(
            storage=TensorStorage(self.size),
            sampler=self.sampler(),
            prefetch=self.prefetch,
            generator=torch.Generator().manual_seed(0),
        )

    @property
    def live(self):
        return range(max(0, len(self.items) - self.size), len(self.items))

    def new(self, n):
        values = torch.arange(self.next_value, self.next_value + n)
        self.next_value += n
        self.items += values.tolist()
        return TensorDict(x=values, nested=dict(y=-values.double()), batch_size=[n])

    @rule(n=st.integers(0, 45))
    def extend(self, n):
        first = len(self.items)
        assert self.buffer.extend(self.new(n)).tolist() == list(range(first, first + n))
        self.on_added(first)

    @rule()
    def add(self):
        first = len(self.items)
        assert self.buffer.add(self.new(1)[0]) == first
        self.on_added(first)

    def on_added(self, first):
        pass

    @precondition(lambda self: self.items)
    @rule(n=st.integers(1, 12))
    def sample(self, n):
        batch, info = self.buffer.sample(n, return_info=True)
        assert sound(batch)
        index = batch["index"].tolist()
        assert batch["x"].tolist() == [self.items[i] for i in index]
        assert torch.equal(batch["nested", "y"], -batch["x"].double())
        assert all(i in self.live for i in index)
        self.on_sampled(n, index, info)

    def on_sampled(self, n, index, info):
        assert len(index) == n

    @rule()
    def empty(self):
        self.buffer.empty()
        self.items.clear()
        self.on_empty()

    def on_empty(self):
        pass

    @rule(to_folder=st.booleans())
    def reload(self, to_folder):
        other = self.make()
        if to_folder:
            with tempfile.TemporaryDirectory() as folder:
                self.buffer.save(folder)
                other.load(folder)
        else:
            other.load_state_dict(self.buffer.state_dict())
        if self.items:  # both continue the same
            before = self.buffer.state_dict()
            assert torch.equal(self.buffer.sample(3)["index"], other.sample(3)["index"])
            self.buffer.load_state_dict(before)
            other.load_state_dict(before)
        self.buffer = other

    @invariant()
    def equals_the_list(self):
        if not hasattr(self, "buffer"):
            return
        assert len(self.buffer) == len(self.live)
        if self.live:
            assert self.buffer[:]["x"].tolist() == [self.items[i] for i in self.live]


class EpochsAgainst(Against):
    """Also: no item is drawn twice in an epoch."""

    def sampler(self):
        return SamplerWithoutReplacement()

    @initialize()
    def start_epochs(self):
        self.drawn, self.known = set(), set()

    def on_sampled(self, n, index, info):
        assert len(set(index)) == len(index)
        again = self.drawn & set(index)
        left = self.known - self.drawn
        if again or not left & set(self.live):
            assert not left & set(self.live), "the epoch was not over"
            self.drawn, self.known = set(), set(self.live)
        assert set(index) <= self.known - self.drawn
        assert len(index) == min(n, len((self.known - self.drawn) & set(self.live)))
        self.drawn |= set(index)

    def on_empty(self):  # numbers start again, and with them an epoch
        self.drawn, self.known = set(), set()


class PrioritiesAgainst(Against):
    """Also: weights follow the formula, and only items with a priority are drawn."""

    def sampler(self):
        return PrioritizedSampler(self.size, ALPHA, BETA, EPS)

    @initialize()
    def start_priorities(self):
        self.priority = {}
        self.largest = None

    def on_added(self, first):
        for i in range(first, len(self.items)):
            self.priority[i] = 1.0 if self.largest is None else self.largest

    def on_empty(self):
        self.priority.clear()
        self.largest = None

    @precondition(lambda self: self.items)
    @rule(data=st.data(), n=st.integers(1, 10))
    def update(self, data, n):
        index = data.draw(st.lists(st.integers(0, len(self.items) - 1), min_size=n, max_size=n))
        priority = data.draw(st.lists(PRIORITIES, min_size=n, max_size=n))
        late = [i for i in index if i not in self.live]
        values = torch.tensor(priority, dtype=torch.float64)
        assert self.buffer.update_priority(torch.tensor(index), values) == len(late)
        for i, p in zip(index, priority, strict=True):
            if i in self.live:
                self.priority[i] = p
                self.largest = p if self.largest is None else max(p, self.largest)

    @precondition(lambda self: self.items)
    @rule(
        index=st.sampled_from(["newest", "unknown", "negative"]),
        priority=st.sampled_from([1.0, -1.0, float("nan"), float("inf")]),
    )
    def update_wrongly(self, index, priority):
        number = {"newest": len(self.items) - 1, "unknown": len(self.items), "negative": -1}[index]
        if index == "newest" and priority == 1.0:
            return
        with pytest.raises((ValueError, IndexError)):
            self.buffer.update_priority(torch.tensor([0, number]), torch.tensor([5.0, priority]))

    def on_sampled(self, n, index, info):
        assert len(index) == n
        least = min((self.priority[i] + EPS) ** ALPHA for i in self.live)
        by_hand = [((self.priority[i] + EPS) ** ALPHA / least) ** -BETA for i in index]
        torch.testing.assert_close(info["priority_weight"], torch.tensor(by_hand))


class PrefetchAgainst(PrioritiesAgainst):
    prefetch = 2


class RoomAgainst(PrioritiesAgainst):
    """Also: the sampler may have room for more items than the storage."""

    def sampler(self):
        return PrioritizedSampler(self.size + 3, ALPHA, BETA, EPS)


def few(machine):
    case = machine.TestCase
    case.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
    return case


TestUniform = few(Against)
TestEpochs = few(EpochsAgainst)
TestPriorities = few(PrioritiesAgainst)
TestPrefetch = few(PrefetchAgainst)
TestRoom = few(RoomAgainst)
