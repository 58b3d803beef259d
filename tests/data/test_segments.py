"""Segments: which rows they read, and stacks of frames that lie on the same memory."""

import pytest
import torch

from raffia import jit
from raffia.data.segments import (
    Kinds,
    Ring,
    Segments,
    find_segments,
    find_segments_by_tensors,
    stacked,
    unstacked,
)

B, L, S = 2, 3, 4
KINDS = Kinds(torch.tensor([True, True, False]), torch.tensor([1.0, 0.0, 0.0]), closed=2)


def ring(newest=7):
    """Rows 0 1 2 are an episode with its closing row; 3 5 4 another one that goes on."""
    return Ring(
        preceding=torch.tensor([0, 0, 1, 3, 5, 3]),
        following=torch.tensor([1, 2, 2, 5, 4, 4]),
        kind=torch.tensor([0, 1, 2, 0, 0, 0], dtype=torch.uint8),
        newest=newest,
    )


@pytest.mark.parametrize("version", [find_segments, find_segments_by_tensors])
def test_windows_worked_by_hand(version):
    rows, found = version(ring(), KINDS, torch.tensor([0, 5]), before=2, length=3)
    assert rows.tolist() == [[0, 0, 0, 1, 2], [3, 3, 5, 4, 4]]
    # Eight items in six rows: rows 0 and 1 hold items 6 and 7, the others items 2 to 5.
    assert found.item.tolist() == [[6, 7, 2], [5, 4, -1]]
    assert found.valid.tolist() == [[True, True, True], [True, True, False]]
    assert found.valid_step.tolist() == [[True, True, False], [True, True, True]]
    assert found.mask.tolist() == [[True, True, False], [True, True, True]]
    assert found.discount.tolist() == [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]


@pytest.mark.skipif(not jit.available(), reason="the compiled loop needs numba")
@pytest.mark.parametrize(("before", "length"), [(0, 1), (0, 5), (3, 1), (2, 4)])
@pytest.mark.parametrize("num_segments", [0, 1, 7])
def test_the_compiled_loop_equals_the_tensor_operations(before, length, num_segments):
    rng = torch.Generator().manual_seed(0)
    num_rows = 11
    links = torch.randint(num_rows, (2, num_rows), generator=rng)
    kind = torch.randint(3, (num_rows,), generator=rng, dtype=torch.uint8)
    start = torch.randint(num_rows, (num_segments,), generator=rng)
    for newest in (10, 11, 12345):
        some = Ring(*links, kind=kind, newest=newest)
        expected = find_segments_by_tensors(some, KINDS, start, before=before, length=length)
        found = find_segments(some, KINDS, start, before=before, length=length)
        assert torch.equal(found[0], expected[0])
        for name, a, b in zip(Segments._fields, found[1], expected[1], strict=True):
            assert a.dtype is b.dtype and torch.equal(a, b), name


@pytest.mark.parametrize("version", [find_segments, find_segments_by_tensors])
def test_windows_are_written_into_what_is_given(version):
    out = Segments.empty(B, L)
    _, found = version(ring(), KINDS, torch.tensor([0, 5]), before=0, length=L, out=out)
    assert all(a is b for a, b in zip(found, out, strict=True))
    assert out.item.tolist() == [[6, 7, 2], [5, 4, -1]]


def test_stacks_are_the_newest_frames_and_a_view():
    frames = torch.arange(B * (L + S - 1) * 5).view(B, L + S - 1, 5)
    stacks = stacked(frames, S)
    assert stacks.shape == (B, L, S, 5)
    for k in range(L):
        assert torch.equal(stacks[:, k], frames[:, k : k + S])
    assert stacks.data_ptr() == frames.data_ptr()
    assert stacks.untyped_storage().nbytes() == frames.untyped_storage().nbytes()


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("shape", [(), (5,), (2, 5)])
def test_unstacked_finds_the_frames_under_stacks(length, shape):
    frames = torch.randn(B, length + S - 1, *shape)
    found = unstacked(stacked(frames, S))
    assert torch.equal(found, frames) and found.data_ptr() == frames.data_ptr()


def test_unstacked_knows_what_is_no_view_of_frames():
    stacks = stacked(torch.randn(B, L + S - 1, 5), S)
    assert unstacked(stacks.clone()) is None
    assert unstacked(stacks.transpose(2, 3)) is None
    assert unstacked(stacks[:, ::2]) is None
    assert unstacked(stacks[:, :1]) is None  # frames behind it are not its own
    assert unstacked(stacks[1:]) is not None
