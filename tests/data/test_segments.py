"""Segments: which rows they read, and stacks of frames that lie on the same memory."""

import pytest
import torch

from raffia.data.ring import EpisodeRing
from raffia.data.segments import Kinds, Segments, find_segments, stacked, unstacked

B, L, S = 2, 3, 4
KINDS = Kinds(torch.tensor([True, True, True, False, False]), torch.tensor([1.0, 0, 1, 0, 0]))


def ring(look_back):
    """Six rows: 0 to 2 are an episode with its closing row; 3, 5, 4 another one that goes on."""
    ring, no = EpisodeRing(6, look_ahead=0, look_back=look_back), torch.tensor([[False]])
    for env, ends in ((0, no), (0, ~no), (1, no), (1, no), (1, no)):
        ring.append(ends, no, torch.tensor([env]))
    return ring


def test_segments_worked_by_hand():
    rows, found = find_segments(ring(2), KINDS, torch.tensor([0, 4]), length=3)
    assert rows.tolist() == [[0, 0, 0, 1, 2], [3, 3, 4, 5, 5]]
    assert found.item.tolist() == [[0, 1, 2], [4, 5, -1]]
    assert found.valid.tolist() == [[True, True, True], [True, True, False]]
    assert found.valid_step.tolist() == [[True, True, False], [True, True, True]]
    assert found.mask.tolist() == [[True, True, False], [True, True, True]]
    assert found.discount.tolist() == [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]


def test_items_of_rows_that_were_overwritten_count_on():
    full = ring(0)
    full.append(torch.tensor([[False]]), torch.tensor([[False]]), torch.tensor([1]))
    rows, found = find_segments(full, KINDS, torch.tensor([4]), length=3)
    assert rows.tolist() == [[4, 5, 0]] and found.item.tolist() == [[4, 5, 6]]


def test_segments_are_written_into_what_is_given():
    out = Segments.empty(B, L)
    _, found = find_segments(ring(0), KINDS, torch.tensor([0, 4]), length=L, out=out)
    assert all(a is b for a, b in zip(found, out, strict=True))
    assert out.item.tolist() == [[0, 1, 2], [4, 5, -1]]


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
