"""Custom batches: numbers in place of booleans, optional entries, refused entries."""

import re

import pytest
import torch

from .agents import rows, small_agent, with_loss
from .small import batch_of


def batch_dict(agent, **changes):
    """A batch as a dict of tensors; None removes an entry."""
    entries = dict(agent.prepare_inputs(rows()).items()) | changes
    return {name: entry for name, entry in entries.items() if entry is not None}


def results_of(agent, batch):
    loss, _ = agent.get_loss(batch)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in agent.model.named_parameters()}
    agent.zero_grad()
    return loss.detach(), agent.get_qvs(batch)["advantage"], agent.get_weights(batch), grads


@pytest.fixture
def agent():
    return small_agent(net={"dropout": 0.0}, beta=0.5, transition_weight=0.3)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.uint8])
@pytest.mark.parametrize("mask", ["strict", "published"])
def test_masks_and_terminals_may_be_numbers(agent, mask, dtype):
    """As rows are written in files: terminals [0, 0, 1]."""
    agent, plain = with_loss(agent, mask=mask), batch_dict(agent)
    names = ("attn_mask", "terminals", "action_mask")
    numbers = {**plain, **{name: plain[name].to(dtype) for name in names}}
    for ours, theirs in zip(results_of(agent, numbers), results_of(agent, plain), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("per_token", [True, False])
def test_the_action_mask_follows_from_the_indices(per_token):
    agent = small_agent(per_token=per_token, net={"dropout": 0.0})
    whole = agent.prepare_inputs(rows())
    found = agent.prepare_inputs(batch_dict(agent, action_mask=None))
    assert torch.equal(found["action_mask"], whole["action_mask"])


@pytest.mark.parametrize("level", ["", "u_"])
def test_the_action_mask_of_unfinished_cut_and_empty_rows(level):
    agent = small_agent(net={"vocab_size": 35, "block_size": 64}, per_token=not level)
    batch = batch_of("B", level)
    found = agent.prepare_inputs({k: v for k, v in batch.items() if k != "action_mask"})
    assert torch.equal(found["action_mask"], batch["action_mask"])
    assert not batch["action_mask"].any(1).all() or level


@pytest.mark.parametrize(
    ("name", "cut", "shapes"),
    [
        ("rewards", slice(0, -1), "[12, {A1}], but must be [12, {A}]"),
        ("terminals", slice(0, -1), "[12, {A}], but must be [12, {A2}]"),
        ("state_idxs", slice(0, -1), "[12, {A}], but must be [12, {A2}]"),
        ("action_mask", slice(0, -1), "[12, {A1}], but must be [12, {A}]"),
        ("attn_mask", slice(1, None), "[12, {T1}], but must be [12, {T}]"),
    ],
)
def test_entries_of_unequal_length_are_refused(agent, name, cut, shapes):
    batch = batch_dict(agent)
    (_, length), (_, width) = batch["tokens"].shape, batch["action_idxs"].shape
    shapes = shapes.format(A=width, A1=width - 1, A2=width + 1, T=length, T1=length - 1)
    wrong = {**batch, name: batch[name][:, cut]}
    for call in (agent.get_loss, agent.learn):
        message = re.escape(f"{name} has shape {shapes}") + r".*dataset\.collate"
        with pytest.raises(ValueError, match=message):
            call(wrong)


def test_entries_with_other_numbers_of_rows_are_refused(agent):
    batch = batch_dict(agent)
    with pytest.raises(ValueError, match=r"rewards has shape \[11, .*must be \[12,"):
        agent.get_loss({**batch, "rewards": batch["rewards"][1:]})
    with pytest.raises(ValueError, match=r"tokens has shape \[.*\], but must be \[rows, tokens\]"):
        agent.get_loss({**batch, "tokens": batch["tokens"][0]})


INDICES = ("action_idxs", "state_idxs")


@pytest.mark.parametrize("per_token", [True, False])
def test_indices_outside_of_the_row_are_refused(per_token):
    agent = small_agent(per_token=per_token)
    batch = batch_dict(agent)
    length = batch["tokens"].shape[1]
    wrong = [(n, x, "and the rows have") for n in INDICES for x in (length, -1)]
    if per_token:  # the token after it would be the action
        wrong.append(("action_idxs", length - 1, ".*after that position"))
    for name, index, message in wrong:
        indices = batch[name].clone()
        indices[1, 0] = index
        with pytest.raises(ValueError, match=f"{name} holds {index}, {message}"):
            agent.get_loss({**batch, name: indices})


def test_tokens_beyond_the_vocabulary_are_refused(agent):
    tokens = batch_dict(agent)["tokens"].clone()
    tokens[2, 1] = 11
    for call in (agent.get_loss, agent.learn, agent.get_qvs, agent.get_scores):
        with pytest.raises(ValueError, match="token 11 is not in the vocabulary, 0 to 10"):
            call(batch_dict(agent, tokens=tokens))
