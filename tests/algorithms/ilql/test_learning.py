"""Learning end to end: from random answers, an agent learns to give the rewarded one."""

import pytest

from raffia.algorithms.ilql import DecodeConfig, TopAdvantageNGrams
from raffia.lm import DialogueDataset
from raffia.lm.data.dialogue import DataPoint

from .agents import Utterances
from .test_agent_speaking import TOKENIZER, chat_agent


@pytest.mark.slow
def test_an_agent_learns_to_give_the_rewarded_answer():
    """The answers are four letters."""
    a, end = TOKENIZER.token_to_id("a"), TOKENIZER.eoa_token_id
    prompt = DataPoint.from_obs(Utterances([("b", None)]), TOKENIZER).tokens
    at, points = len(prompt) - 1, []
    for number in range(200):
        letter = TOKENIZER.encode("abcd"[number % 4])
        tokens = [*prompt, *letter, end, TOKENIZER.eod_token_id]
        points.append(DataPoint.from_tokens(tokens, [at, at + 1], [0.0, float(letter == [a])]))
    dataset = DialogueDataset.of_points(points, TOKENIZER)
    agent = chat_agent(
        dataset=dataset, batch_size=32, lr=1e-2, alpha=0.1, tau=0.7, net={"dropout": 0.0}
    )
    for _ in range(120):
        agent.learn()
    greedy = DecodeConfig(num_beams=1, adv_weight=8.0, max_new_tokens=4)
    assert agent.get_policy(TOKENIZER, greedy).act(Utterances([("b", None)])) == "a"
    best = TopAdvantageNGrams(end_of_action=end).evaluate(agent, points)[0]
    assert best.tokens == (a, end) and best.count == 50
