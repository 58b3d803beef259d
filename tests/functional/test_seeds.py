"""raffia.functional.seeds: stable, distinct, in range."""

import threading
from contextlib import suppress
from itertools import product

import numpy as np
import pytest
import torch

from raffia.functional.seeds import derive_seed, generator_for, global_draws


def test_stays_the_same_in_every_process_and_release():
    assert derive_seed(0) == 7552799593083971110
    assert derive_seed(0, "reset", 3) == 7493846445043555977
    assert derive_seed(2**70, "ü", -1) == 6158804537844327661


def test_order_bounds_and_kind_of_parts_count():
    parts = ["", "a", "b", "1", "ab", "a1", 0, 1, -1, 10, 2**64]
    calls = [(), *((p,) for p in parts), *product(parts, parts), ("a", "", 1), ("", "a", 1)]
    seeds = {derive_seed(seed, *call) for seed in (0, 1, -1) for call in calls}
    assert len(seeds) == 3 * len(calls)


def test_lies_in_63_bits_and_uses_them():
    seeds = [derive_seed(0, i) for i in range(2000)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    for bit in range(63):
        assert 850 < sum(seed >> bit & 1 for seed in seeds) < 1150, bit


def test_numbers_of_numpy_and_torch_are_numbers():
    assert (
        derive_seed(np.int64(4), np.int32(7))
        == derive_seed(4, 7)
        == derive_seed(4, torch.tensor(7))
    )


@pytest.mark.parametrize("call", [(0.5,), ("0",), (0, 1.0), (0, None), (0, b"a")])
def test_refuses_parts_that_are_neither_text_nor_integers(call):
    with pytest.raises(TypeError, match=r"string or an integer.*derive_seed\(0"):
        derive_seed(*call)


def test_generators():
    draws = {
        torch.randint(2**62, (), generator=generator_for(seed, *parts)).item()
        for seed in (0, 1)
        for parts in [("noise", 0), ("noise", 1), ("shift", 0)]
    }
    assert len(draws) == 6
    first, second = generator_for(3, "x"), generator_for(3, "x")
    torch.rand(5, generator=first)
    assert not torch.equal(torch.rand(3, generator=first), torch.rand(3, generator=second))


def test_draws_from_the_global_generator_are_of_one_thread():
    """Those of runs in threads were of each other's seeds."""
    drawn, both = {}, threading.Barrier(2)

    def draw(seed):
        with global_draws(seed):
            first = torch.rand(2)
            with suppress(threading.BrokenBarrierError):  # only one is here
                both.wait(0.5)
            drawn[seed] = torch.cat([first, torch.rand(2)])

    before = torch.default_generator.get_state()
    threads = [threading.Thread(target=draw, args=(seed,)) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert torch.default_generator.get_state().equal(before)
    for seed, found in drawn.items():
        assert found.equal(torch.rand(4, generator=torch.Generator().manual_seed(seed)))
