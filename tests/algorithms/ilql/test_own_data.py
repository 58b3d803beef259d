"""Custom data sets, indexed or sampled: learning from them and resuming."""

import pytest
import torch

from raffia.algorithms.ilql import ILQL
from raffia.lm.data.dialogue import DataPoint, Iterable_RL_Dataset, List_RL_Dataset, Vocabulary

from .agents import rows, same, small_agent, tensors_of


class Listed(List_RL_Dataset):
    def size(self):
        return 12

    def get_item(self, index):
        return rows()[index]


class Drawn(Iterable_RL_Dataset):
    def sample_item(self, generator):
        return rows()[int(torch.randint(12, (), generator=generator))]


class Long(Iterable_RL_Dataset):
    def sample_item(self, generator):
        return DataPoint.from_tokens([1] * 40, [0], [1.0])


VOCABULARY = Vocabulary(11, pad_token_id=0)


@pytest.mark.parametrize("kind", [Listed, Drawn])
def test_an_agent_learns_from_a_custom_data_set_and_resumes(tmp_path, kind):
    agent = small_agent(kind(VOCABULARY), net={"dropout": 0.0})
    before = agent.get_loss(rows())[0].item()
    for _ in range(4):
        agent.learn()
    agent.save_checkpoint(tmp_path)
    again = ILQL.from_checkpoint(tmp_path, kind(VOCABULARY))
    for _ in range(8):
        agent.learn(), again.learn()
    assert same(tensors_of(again), tensors_of(agent))
    assert agent.get_loss(rows())[0].item() < before


def test_errors_for_rows_that_are_too_long_name_the_fix():
    with pytest.raises(
        ValueError, match=r"rows have 40 tokens, .* context holds 32: .*point\.cut\(32\)"
    ):
        small_agent(Long(VOCABULARY)).learn()
    with pytest.raises(ValueError, match=r"40 tokens, more than the 32 .* point\.cut\(32\)"):
        small_agent(Long(VOCABULARY, max_len=32)).learn()
