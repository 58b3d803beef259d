"""Packing rows without padding, rotary positions, and the key-value cache."""

import pytest
import torch
from torch.testing import assert_close

from raffia.lm.attention import View, attend, rotate, rotation
from raffia.lm.kv_cache import KeyValueCache
from raffia.lm.model import check_room
from raffia.lm.packing import Packing


def test_rows_of_similar_length_are_grouped():
    lengths = torch.tensor([40, 3, 0, 37, 16, 64])
    packing, x = Packing.of(lengths, 70), torch.arange(6 * 70.0).view(6, 70, 1)
    parts = packing.parts(packing.pack(x))
    assert [part.shape[:2] for part in parts] == [(2, 16), (2, 40), (1, 64)]
    assert_close(parts[1][:, :37, 0], x[[0, 3], :37, 0])
    assert_close(parts[1][1, 37:, 0], x[3, 36].expand(3))  # the last real token again
    assert_close(packing.joined(parts), packing.pack(x))


def filled(length=3, rows=4, attended=None):
    cache = KeyValueCache(num_layers=2, batch_size=rows, num_heads=1, capacity=5, head_dim=2)
    for layer in range(2):
        columns = torch.randn(rows, 1, length, 2)
        cache.put(layer, columns, -columns)
    cache.advance(length, attended)
    return cache


def test_reordering_over_many_steps_equals_copying_all():
    """Only columns that rows do not share are moved; the reference copies all."""
    generator = torch.Generator().manual_seed(0)
    cache = KeyValueCache(num_layers=1, batch_size=2, num_heads=1, capacity=40, head_dim=1)
    rows = torch.randn(2, 1, 3, 1, generator=generator)
    cache.put(0, rows, -rows)
    cache.advance(3, None)
    cache, rows = cache.expand(3), rows.repeat_interleave(3, 0)
    for step in range(30):
        new = torch.randn(6, 1, 1, 1, generator=generator)
        cache.put(0, new, -new)
        cache.advance(1, None)
        rows = torch.cat([rows, new], 2)
        if step % 7 == 5:  # some are done, and their rows go to others of the same prompt
            index = torch.tensor([0, 1, 1, 3, 3, 5])
            cache, rows = cache.select(index), rows[index]
        index = torch.randint(3, (6,), generator=generator) + torch.tensor([0, 0, 0, 3, 3, 3])
        rows = rows[index]
        cache.reorder(index)
        assert torch.equal(cache.keys(0), rows)
        assert torch.equal(cache.values(0), -rows)
    chosen = cache.select(torch.tensor([1, 0]), start=1)  # a cache with its own memory
    assert torch.equal(chosen.keys(0), rows[[1, 0], :, 1:])
    chosen.keys(0).zero_()
    assert torch.equal(cache.keys(0), rows)


def test_columns_behind_the_length_are_overwritten():
    cache = filled(rows=2).expand(2)
    for columns, index in ((2, [1, 1, 3, 2]), (1, [1, 1, 2, 3])):
        cache.length = 3
        new = torch.randn(4, 1, columns, 2)
        for layer in range(2):
            cache.put(layer, new, new)
        cache.advance(columns, None)
        cache.reorder(torch.tensor(index))
        assert_close(cache.keys(1)[:, :, 3:], new[index])
    with pytest.raises(ValueError, match=r"a cache of 4 columns cannot be cut to 5, only to 0..4"):
        cache.length = 5


def test_rotary_attention_depends_on_distances_alone():
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 6, 3 * 16, generator=generator)

    def attended(first):
        positions = torch.arange(first, first + 6)[None]
        cosine, sine = rotation(positions, 8, torch.float32)
        return attend(qkv, View(rotation=(cosine[:, None], sine[:, None])), num_heads=2)

    assert_close(attended(40), attended(0), rtol=1e-4, atol=1e-5)
    assert (attended(0) - attend(qkv, View(), num_heads=2)).abs().max() > 0.01


def test_wrong_arguments_are_refused():
    cache, zeros = filled(), torch.zeros(4, 1, 1, 2)
    check_room(cache, 4, 2)
    for call, kind, message in (
        (lambda: check_room(cache, 4, 3), ValueError, r"holds 3 has no room for 3 more.*=6\)"),
        (lambda: check_room(cache, 2, 1), ValueError, r"2 rows of tok.*=4: .*select\(index\)"),
        (lambda: Packing.of(torch.tensor([2, 6]), 5), ValueError, "lengths must be in 0..width"),
        (lambda: Packing.of(torch.tensor([-1, 3]), 5), ValueError, "lengths must be in 0..width"),
        (lambda: Packing.of(torch.tensor([0, 0]), 5), ValueError, "and at least one row"),
        (lambda: cache.put(0, zeros.requires_grad_(), zeros), RuntimeError, r"torch.no_grad\(\)"),
    ):
        with pytest.raises(kind, match=message):
            call()


def test_rotation_is_a_product_of_complex_numbers():
    x, positions = torch.randn(2, 3, 7, 8, dtype=torch.float64), torch.randint(50, (2, 1, 7))
    rotated = rotate(x, rotation(positions, 8, torch.float64))
    angle = positions[..., None] / 10000 ** (torch.arange(4.0, dtype=torch.float64) / 4)
    expected = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    assert_close(rotated, torch.cat([expected.real, expected.imag], -1))
