"""Prefetched batches equal those drawn without, and no thread is left behind."""

import gc
import threading
import time

import pytest
import torch

from raffia import TensorDict
from raffia.data.prioritized import PrioritizedSampler
from raffia.data.replay import ReplayBuffer
from raffia.data.samplers import RandomSampler, SamplerWithoutReplacement
from raffia.data.storage import TensorStorage


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def steps(first, n):
    number = torch.arange(first, first + n)
    return TensorDict(obs=number.float(), next=dict(reward=number * 0.5), batch_size=[n])


SAMPLERS = {
    "uniform": RandomSampler,
    "distinct": lambda: RandomSampler(replacement=False),
    "epochs": SamplerWithoutReplacement,
    "drop last": lambda: SamplerWithoutReplacement(drop_last=True),
    "prioritized": lambda: PrioritizedSampler(20, 0.6, 0.4),
}


def make(kind, prefetch, **options):
    options |= {"batch_size": 4, "prefetch": prefetch, "generator": rng()}
    buffer = ReplayBuffer(storage=TensorStorage(20), sampler=SAMPLERS[kind](), **options)
    buffer.extend(steps(0, 10))
    return buffer


def pause(buffer):
    """Gives the thread time to prefetch fully, a little, or not at all."""
    pause.calls += 1
    time.sleep((0.0, 0.002, 0.01)[pause.calls % 3])


pause.calls = 0


def script(buffer):
    """All calls that affect later draws, between draws; returns the batches."""
    out, total = [], 10

    def draw(batch_size=None):
        batch, info = buffer.sample(batch_size, return_info=True)
        out.append([value.tolist() for value in (batch["obs"], *info.values())])
        pause(buffer)
        return info["index"]

    for i in range(6):
        for _ in range(3):
            draw()
        if i % 2:
            buffer.extend(steps(total, 3))
            buffer.add(steps(total + 3, 1)[0])
            total += 4
        index = draw(2 + i)
        if isinstance(buffer.sampler, PrioritizedSampler):
            buffer.update_priority(index, index + 1.0)
            draw()
            buffer.sampler.beta += 0.1  # not by way of the buffer
            draw()
            buffer.sampler.alpha *= 0.9
    state = buffer.state_dict()
    sampler_state = buffer.sampler.state_dict()
    draw()
    buffer.sampler.load_state_dict(sampler_state)  # not by way of the buffer
    draw()
    buffer.load_state_dict(state)
    draw()
    buffer.generator = rng(5)
    draw()
    buffer.empty()
    buffer.extend(steps(0, 9))
    draw()
    out.append([batch["obs"].tolist() for batch, _ in zip(buffer, range(5), strict=False)])
    return [*out, buffer.state_dict()["generator"].tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [True, 3])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_batches_are_the_same_as_without(kind, prefetch):
    assert script(make(kind, prefetch)) == script(make(kind, 0))


def wait_for(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.001)


def test_items_written_directly_into_the_storage_are_drawn():
    buffer, plain = make("uniform", 3), make("uniform", 0)
    for _ in range(6):
        for each in (buffer, plain):
            each.storage.extend(steps(each.storage.total, 4))
        assert (buffer.sample() == plain.sample()).all()
        pause(buffer)


class Fails(RandomSampler):
    """A sampler that fails at its third draw only."""

    def draw(self, n, live, generator=None):
        self.drawn = getattr(self, "drawn", 0) + 1
        if self.drawn == 3:
            raise RuntimeError("no such luck")
        return super().draw(n, live, generator)


@pytest.mark.parametrize("where", ["draw", "collate"])
def test_an_error_in_the_thread_is_raised_by_the_sample_it_belongs_to(where):
    plain, made = make("uniform", 0), []
    expected = [plain.sample()["obs"].tolist() for _ in range(5)]

    def collate(batch):
        made.append(1)
        if where == "collate" and batch["obs"].tolist() == expected[2]:
            raise RuntimeError("no such luck")
        return batch

    options = {"collate_fn": collate, "batch_size": 4, "prefetch": 2, "generator": rng()}
    sampler = Fails() if where == "draw" else RandomSampler()
    buffer = ReplayBuffer(storage=plain.storage, sampler=sampler, **options)
    for i in range(5):
        if i == 2:
            with pytest.raises(RuntimeError, match="no such luck"):
                buffer.sample()
            continue
        found = buffer.sample()["obs"].tolist()
        assert len(found) == 4
        if where == "collate":
            assert found == expected[i]
            wait_for(lambda i=i: len(made) == i + 3)


def test_prefetched_batches_do_not_share_memory():
    buffer, plain = make("prioritized", 3), make("prioritized", 0)
    first, expected = buffer.sample(), plain.sample()
    for _ in range(5):
        buffer.sample()["obs"].zero_()
        plain.sample()
    assert (first == expected).all()
    assert buffer.sample(out=first) is first and (first == plain.sample()).all()
    time.sleep(0.02)  # the state counts only batches that were returned
    assert torch.equal(buffer.state_dict()["generator"], plain.state_dict()["generator"])
    with pytest.raises(ValueError, match="prefetch needs its own generator"):
        buffer.generator = None


@pytest.mark.slow
def test_the_thread_ends_with_the_buffer():
    def threads():
        return [t for t in threading.enumerate() if t.name == "raffia-prefetch"]

    gc.collect()  # garbage of other tests
    wait_for(lambda: not threads())
    buffer = make("uniform", 2)
    assert not threads()  # it begins with the first batch
    buffer.sample()
    assert len(threads()) == 1
    gc.disable()
    del buffer  # no cycle keeps it alive
    wait_for(lambda: not threads())
    gc.enable()


@pytest.mark.slow
def test_the_thread_ends_with_the_buffer_even_with_an_error_pending():
    calls = []

    def fails_late(batch):
        calls.append(1)
        assert len(calls) < 2, "an error that is never raised"
        return batch

    buffer = make("uniform", 2, collate_fn=fails_late)
    buffer.sample()
    wait_for(lambda: len(calls) == 3)
    thread = buffer._ahead._thread
    del buffer
    wait_for(lambda: gc.collect() >= 0 and not thread.is_alive())
