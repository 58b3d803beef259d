"""The rows of benchmarks.scale that need no other process."""

import contextlib
import math
from pathlib import Path

import pytest
import torch

from benchmarks import rates
from benchmarks.scale_here import any_rows, off_ratio, replay_ratios
from raffia.algorithms.efficientzero import inference
from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP


def test_rows_are_padded_except_within_the_block():
    """Otherwise `scale_off` would compare a run with itself."""
    sizes, model = [], EfficientZeroModelMLP(4, 2)

    def recording(model, rows):
        sizes.append(len(rows))
        return (rows,)

    for block in (contextlib.nullcontext, any_rows):
        with block():
            (found,) = inference._in_blocks(recording, model, torch.zeros(3, 4))
        assert len(found) == 3
    assert sizes == [inference.BLOCK, 3]


def test_the_table_of_estimates_is_in_the_docs():
    docs = (Path(__file__).parents[1] / "docs" / "scale.md").read_text()
    assert "\n".join(rates.table()) in docs


@pytest.mark.slow
def test_the_rows_of_the_leader_are_measured():
    assert 0 < off_ratio("smoke", rounds=1, num=2) < math.inf
    out, update, *_ = replay_ratios(1)
    assert out > 0 and update > 0
