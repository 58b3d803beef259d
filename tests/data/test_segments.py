"""Stacks of frames that lie on the same memory."""

import pytest
import torch

from raffia.data.segment_batches import stacked, unstacked

B, L, S = 2, 3, 4


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
