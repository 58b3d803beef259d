"""Rows without their padding, positions as angles, and the cache by itself."""

import pytest
import torch
from torch.testing import assert_close

from raffia.lm.attention import View, attend
from raffia.lm.checks import check_room
from raffia.lm.kv_cache import KeyValueCache
from raffia.lm.packing import Packing
from raffia.lm.rotary import rotate, rotation

LENGTHS = torch.tensor([3, 0, 4, 1])


def test_packing_keeps_real_tokens_in_order():
    x = torch.arange(40.0).view(4, 5, 2)
    packing = Packing.of(LENGTHS, 5)
    packed = packing.pack(x)
    assert_close(packed, torch.cat([x[0, :3], x[2, :4], x[3, :1]]))
    assert packing.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 0]


def test_packed_rows_come_back():
    x = torch.randn(4, 5, 2)
    packing = Packing.of(LENGTHS, 5)
    real = (torch.arange(5) < LENGTHS[:, None])[..., None]
    assert_close(packing.unpack(packing.pack(x)), x * real)
    assert_close(packing.joined(packing.parts(packing.pack(x))), packing.pack(x))
    dense = Packing.of(torch.tensor([5, 5, 5, 5]), 5)
    assert dense.index is None
    assert_close(dense.unpack(dense.pack(x)), x)
    chosen = torch.tensor([2, 5])
    for some, at in ((packing, ([0, 2], [2, 2])), (dense, ([0, 1], [2, 0]))):
        found = some.unpack(some.pack(x)[chosen], chosen)
        assert_close(found[at], x[at])
        assert found.count_nonzero() == 4


def test_rows_of_similar_length_are_put_together():
    lengths = torch.tensor([40, 3, 0, 37, 16, 64])
    packing, x = Packing.of(lengths, 70), torch.arange(6 * 70.0).view(6, 70, 1)
    parts = packing.parts(packing.pack(x))
    assert [part.shape[:2] for part in parts] == [(2, 16), (2, 40), (1, 64)]
    assert_close(parts[1][:, :37, 0], x[[0, 3], :37, 0])
    assert_close(parts[1][1, 37:, 0], x[3, 36].expand(3))  # the last real token again
    assert_close(packing.joined(parts), packing.pack(x))


@pytest.mark.parametrize("lengths", [[2, 6], [-1, 3], [0, 0]])
def test_lengths_that_do_not_fit(lengths):
    with pytest.raises(ValueError, match="lengths must lie in 0..width, and at least one row"):
        Packing.of(torch.tensor(lengths), 5)


def test_turning_is_a_product_of_complex_numbers():
    x, positions = torch.randn(2, 3, 7, 8, dtype=torch.float64), torch.randint(50, (2, 1, 7))
    turned = rotate(x, rotation(positions, 8, torch.float64))
    angle = positions[..., None] / 10000 ** (torch.arange(4.0, dtype=torch.float64) / 4)
    right = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    assert_close(turned, torch.cat([right.real, right.imag], -1))


def test_attention_sees_distances():
    query, key = torch.randn(2, 8, dtype=torch.float64)

    def score(i, j):
        turns = [rotation(torch.tensor(p), 8, torch.float64) for p in (i, j)]
        return rotate(query, turns[0]) @ rotate(key, turns[1])

    assert_close(score(9, 4), score(105, 100))
    assert abs(score(9, 4) - score(9, 5)) > 1e-3


def test_angles_of_far_positions_in_bfloat16():
    cosine, _ = rotation(torch.tensor(501), 4, torch.bfloat16)
    assert_close(cosine[0].double(), torch.tensor(501.0).double().cos(), atol=0.01, rtol=0)


def filled(length=3, rows=4, attended=None):
    cache = KeyValueCache(num_layers=2, batch_size=rows, num_heads=1, capacity=5, head_dim=2)
    for layer in range(2):
        columns = torch.randn(rows, 1, length, 2)
        cache.put(layer, columns, -columns)
    cache.advance(length, attended)
    return cache


def test_rows_trade_places():
    cache, index = filled(attended=torch.rand(4, 3) > 0.5), torch.tensor([2, 1, 0, 0])
    keys, values, attended = cache.keys(1).clone(), cache.values(0).clone(), cache.attended.clone()
    assert cache.reorder(index) is cache
    assert_close(cache.keys(1), keys[index])
    assert_close(cache.values(0), values[index])
    assert_close(cache.attended, attended[index])


def test_beams_of_many_steps_are_as_if_all_were_copied():
    """Only what rows do not have in common is moved; here all is, beside it."""
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
        if step % 7 == 5:  # some are done, and their places go to others of the same prompt
            index = torch.tensor([0, 1, 1, 3, 3, 5])
            cache, rows = cache.select(index), rows[index]
        index = torch.randint(3, (6,), generator=generator) + torch.tensor([0, 0, 0, 3, 3, 3])
        rows = rows[index]
        cache.reorder(index)
        assert torch.equal(cache.keys(0), rows)
        assert torch.equal(cache.values(0), -rows)


def test_beams_move_only_what_they_do_not_have_in_common():
    cache = filled(rows=2).expand(2)
    new = torch.randn(4, 1, 1, 2)
    for layer in range(2):
        cache.put(layer, new, new)
    cache.advance(1, None)
    marked = cache.keys(0)[:, :, :3]
    marked[1] = 7.0  # what the first two have in common is taken for the same
    cache.reorder(torch.tensor([1, 0, 2, 2]))
    assert (cache.keys(0)[1, :, :3] == 7).all()
    assert not (cache.keys(0)[0, :, :3] == 7).any()
    assert_close(cache.keys(0)[:, :, 3], new[[1, 0, 2, 2]][:, :, 0])


def test_chosen_rows_are_a_cache_of_their_own():
    cache = filled(attended=torch.rand(4, 3) > 0.5)
    chosen, index = cache.select(torch.tensor([3, 3, 1])), [3, 3, 1]
    assert (chosen.batch_size, chosen.length, chosen.capacity) == (3, 3, 5)
    assert_close(chosen.values(1), cache.values(1)[index])
    assert_close(chosen.attended, cache.attended[index])
    before = cache.keys(0).clone()
    chosen.keys(0).zero_()
    assert_close(cache.keys(0), before)
    assert_close(cache.expand(2).keys(0), before.repeat_interleave(2, 0))


def test_padding_that_no_row_has_is_left_out():
    attended = torch.tensor([[0, 0, 1], [0, 1, 1], [0, 1, 0], [1, 1, 1]]).bool()
    cache = filled(attended=attended)
    chosen = cache.select(torch.tensor([2, 0]), start=1)
    assert chosen.length == 2
    assert_close(chosen.keys(0), cache.keys(0)[[2, 0], :, 1:])
    assert chosen.attended.tolist() == [[True, False], [False, True]]
    chosen.advance(1, None)
    assert chosen.attended[:, -1].all()


def test_what_is_forgotten_is_written_over():
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


def test_a_cache_that_is_full_or_of_other_rows():
    cache = filled()
    with pytest.raises(ValueError, match=r"5 columns that holds 3 has no room for 3 more.*=6\)"):
        check_room(cache, 4, 3)
    with pytest.raises(ValueError, match=r"2 rows of tokens for a cache of 4: .*select\(index\)"):
        check_room(cache, 2, 1)
    check_room(cache, 4, 2)


def test_a_cache_keeps_no_gradients():
    cache = filled()
    with pytest.raises(RuntimeError, match=r"call the model under torch.no_grad\(\)"):
        cache.put(0, torch.zeros(4, 1, 1, 2, requires_grad=True), torch.zeros(4, 1, 1, 2))


def test_rotary_attention_depends_on_distances_alone():
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 6, 3 * 16, generator=generator)

    def attended(first):
        at = torch.arange(first, first + 6)[None]
        cosine, sine = rotation(at, 8, torch.float32)
        return attend(qkv, View(rotation=(cosine[:, None], sine[:, None])), num_heads=2)

    assert_close(attended(40), attended(0), rtol=1e-4, atol=1e-5)
    assert (attended(0) - attend(qkv, View(), num_heads=2)).abs().max() > 0.01
