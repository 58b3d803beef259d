"""Numbers of the JSON files are LightZero's, see their "source"."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from raffia.functional.losses import (
    conservative_loss,
    negative_cosine_similarity,
    soft_cross_entropy,
)
from raffia.functional.transforms import Support, scalar_to_categorical

HERE = Path(__file__).parent
TRANSFORM = json.loads((HERE / "scalar_transform.json").read_text())
COSINE = json.loads((HERE / "misc.json").read_text())["negative_cosine"]


@pytest.mark.parametrize("case", TRANSFORM["logits"], ids=["601", "21"])
def test_cross_entropy_with_two_hot_equals_the_oracle(case):
    support = Support(case["start"], case["stop_exclusive"])
    target = scalar_to_categorical(torch.tensor(case["ce_targets_raw"]), support)
    loss = soft_cross_entropy(torch.tensor(case["logits"]), target)
    torch.testing.assert_close(loss, torch.tensor(case["cross_entropy"]), rtol=1e-5, atol=1e-4)


def test_cross_entropy_equals_torch():
    logits, target = torch.randn(2, 3, 5), torch.randn(2, 3, 5).softmax(-1)
    want = cross_entropy(logits.flatten(0, 1), target.flatten(0, 1), reduction="none")
    torch.testing.assert_close(soft_cross_entropy(logits, target), want.reshape(2, 3))


def test_illegal_actions_without_target_have_no_loss():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    loss = soft_cross_entropy(logits, torch.tensor([[0.5, 0.5, 0.0]]))
    loss.sum().backward()
    assert loss.item() == pytest.approx(0.693147) and logits.grad.isfinite().all()
    assert soft_cross_entropy(logits, torch.tensor([[0.5, 0.0, 0.5]])).item() == torch.inf


def test_a_target_of_zeros_has_no_loss_and_nan_is_not_hidden():
    zeros = torch.zeros(1, 3)
    assert soft_cross_entropy(torch.randn(1, 3), zeros).item() == 0
    assert soft_cross_entropy(torch.tensor([[torch.nan, 0, 0]]), zeros + 1 / 3).isnan()


def test_negative_cosine_equals_the_oracle():
    got = negative_cosine_similarity(torch.tensor(COSINE["a"]), torch.tensor(COSINE["b"]))
    torch.testing.assert_close(got, torch.tensor(COSINE["out"]), rtol=0, atol=1e-5)


def test_a_short_vector_counts_as_eps_long():
    x, y = torch.tensor([[1e-6, 0]]), torch.tensor([[1.0, 0]])
    assert negative_cosine_similarity(x, y).item() == pytest.approx(-0.1)
    assert negative_cosine_similarity(0 * x, y).item() == 0


def test_the_conservative_loss_of_one_row_is_that_of_many():
    q = torch.tensor([[1.0, 3.0, 0.5]])
    assert conservative_loss(q[0], torch.tensor(1)) == conservative_loss(q, torch.tensor([1]))
