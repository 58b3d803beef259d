"""Stacks of frames that share memory."""

import pytest
import torch

from raffia.data.segment_batches import stacked, unstacked

B, L, S = 2, 3, 4


@pytest.mark.parametrize("shape", [(), (5,), (2, 5)])
def test_stacks_are_views_of_the_newest_frames_and_can_be_undone(shape):
    frames = torch.randn(B, L + S - 1, *shape)
    stacks = stacked(frames, S)
    assert stacks.shape == (B, L, S, *shape) and stacks.data_ptr() == frames.data_ptr()
    assert stacks.untyped_storage().nbytes() == frames.untyped_storage().nbytes()
    for k in range(L):
        assert torch.equal(stacks[:, k], frames[:, k : k + S])
    for some in (frames, frames[:, :S].clone()):
        found = unstacked(stacked(some, S))
        assert torch.equal(found, some) and found.data_ptr() == some.data_ptr()


def test_unstacked_recognises_other_tensors():
    stacks = stacked(torch.randn(B, L + S - 1, 5), S)
    assert unstacked(stacks.clone()) is None
    assert unstacked(stacks.transpose(2, 3)) is None
    assert unstacked(stacks[:, ::2]) is None
    assert unstacked(stacks[:, :1]) is None  # frames behind it are not its own
    assert unstacked(stacks[1:]) is not None
