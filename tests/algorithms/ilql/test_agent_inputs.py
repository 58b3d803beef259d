"""Custom batches: numbers in place of booleans, optional entries, refused entries."""

import pytest
import torch

from .agents import rows, small_agent


def batch_dict(agent, **changes):
    """A batch as a dict of tensors; None removes an entry."""
    entries = dict(agent.prepare_inputs(rows()).items()) | changes
    return {name: entry for name, entry in entries.items() if entry is not None}


@pytest.fixture
def agent():
    return small_agent(net={"dropout": 0.0}, beta=0.5, transition_weight=0.3)


@pytest.mark.parametrize("per_token", [True, False])
def test_the_action_mask_follows_from_the_indices(per_token):
    agent = small_agent(per_token=per_token, net={"dropout": 0.0})
    whole = agent.prepare_inputs(rows())
    found = agent.prepare_inputs(batch_dict(agent, action_mask=None))
    assert torch.equal(found["action_mask"], whole["action_mask"])


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
