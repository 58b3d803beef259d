"""Stacks of frames that lie on the same memory."""

import pytest
import torch

from raffia.data.segment_batches import stacked, unstacked

B, L, S = 2, 3, 4


@pytest.mark.parametrize("shape", [(), (5,), (2, 5)])
def test_stacks_are_the_newest_frames_and_a_view_that_is_undone(shape):
    frames = torch.randn(B, L + S - 1, *shape)
    stacks = stacked(frames, S)
    assert stacks.shape == (B, L, S, *shape) and stacks.data_ptr() == frames.data_ptr()
    assert stacks.untyped_storage().nbytes() == frames.untyped_storage().nbytes()
    for k in range(L):
        assert torch.equal(stacks[:, k], frames[:, k : k + S])
    for some in (frames, frames[:, :S].clone()):
        found = unstacked(stacked(some, S))
        assert torch.equal(found, some) and found.data_ptr() == some.data_ptr()


def test_unstacked_knows_what_is_no_view_of_frames():
    stacks = stacked(torch.randn(B, L + S - 1, 5), S)
    assert unstacked(stacks.clone()) is None
    assert unstacked(stacks.transpose(2, 3)) is None
    assert unstacked(stacks[:, ::2]) is None
    assert unstacked(stacks[:, :1]) is None  # frames behind it are not its own
    assert unstacked(stacks[1:]) is not None
