"""Planning over tokens: the search gets the right outputs and finds what one step does not."""

import pytest
import torch

from raffia.algorithms.ilql.generate import generate
from raffia.algorithms.ilql.model_scorer import ModelScorer
from raffia.algorithms.ilql.token_planning import planned
from raffia.lm.decoding.config import DecodeConfig, TokenPlanConfig
from raffia.lm.decoding.generations import Request, Stop
from raffia.lm.decoding.sampling import gathered, token_steps
from raffia.lm.decoding.scorer import Needs, NextToken

PAD = 29
ALL = Needs(policy=True, values=True)
PROMPTS = [[33, 0, 17, 14, 18, 4], [32], [33, 27, 27, 31, 4, 4, 4, 4, 2]]
PLANS = {
    "gumbel": TokenPlanConfig(num_simulations=6, num_candidates=4),
    "muzero": TokenPlanConfig(num_simulations=6, num_candidates=4, policy="muzero"),
    "noisy": TokenPlanConfig(num_simulations=6, num_candidates=4, noise=1.0),
    "implied": TokenPlanConfig(num_simulations=6, num_candidates=4, inner_reward="implied"),
}


def draws():
    return torch.Generator().manual_seed(5)


def assert_outputs_close(one, other):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


def test_ahead_equals_advance_and_leaves_the_rows_unchanged(oracle):
    scorer = ModelScorer(oracle.model, oracle.target)
    rows, _ = scorer.start(PROMPTS, ALL, 12)
    rows.advance(torch.tensor([1, 2, 3]))
    texts = [[*prompt, last] for prompt, last in zip(PROMPTS, (1, 2, 3), strict=True)]
    further = torch.tensor([[7, 8, 9], [5, 0, 0], [6, 4, 0]])
    lengths = torch.tensor([3, 1, 2])
    for index in (torch.tensor([0, 1, 2]), torch.tensor([2, 0, 0])):
        outputs = rows.ahead(index, further, lengths)
        longer = [
            texts[row] + further[number, : lengths[number]].tolist()
            for number, row in enumerate(index.tolist())
        ]
        assert_outputs_close(outputs, oracle.evaluate(longer))
    room = rows.room
    assert_outputs_close(
        rows.advance(torch.tensor([4, 5, 6])),
        oracle.evaluate([[*text, token] for text, token in zip(texts, (4, 5, 6), strict=True)]),
    )
    assert rows.room == room - 1


@pytest.mark.parametrize("name", PLANS)
def test_batched_equals_one_by_one(oracle, name):
    config = DecodeConfig(max_new_tokens=3, num_generations=2, plan=PLANS[name])
    options = dict(stop=Stop(tokens=(20, 15)), pad_token=PAD)
    arguments = oracle.model, oracle.target
    one_by_one = draws()
    batch = generate(*arguments, PROMPTS, config, generator=draws(), **options)
    for index, prompt in enumerate(PROMPTS):
        alone = generate(*arguments, [prompt], config, generator=one_by_one, **options)
        assert alone.tokens[0] == batch.tokens[index]


class Table:
    """A language of four tokens, of which 3 ends a text, with values in a table.

    A text that begins with 0 looks better (V 1.0), but all its ends are bad; 1 2 3 is the best.
    """

    vocab_size, block_size, device = 4, 8, torch.device("cpu")

    def __init__(self, texts=(), room=6):
        self.texts, self.room = [list(text) for text in texts], room

    def start(self, prompts, needs, max_new_tokens):
        rows = Table([[] for _ in prompts], max_new_tokens)
        return rows, rows.outputs_of(rows.texts)

    def outputs_of(self, texts):
        q = torch.full((len(texts), 4), -1.0)
        for row, text in enumerate(texts):
            for token in range(3):
                q[row, token] = self.value([*text, token])
            q[row, 3] = {(1, 2): 3.0, (1, 1): 0.5}.get(tuple(text), -2.0)
        v = torch.tensor([self.value(text) for text in texts])
        return NextToken(torch.zeros(len(texts), 4), q, v)

    def value(self, text):
        return {(): 0.2, (0,): 1.0, (1,): 0.3, (1, 2): 0.4}.get(tuple(text), -1.0)

    def ahead(self, rows, tokens, lengths):
        texts = [
            self.texts[row] + tokens[number, : lengths[number]].tolist()
            for number, row in enumerate(rows.tolist())
        ]
        return self.outputs_of(texts)

    def advance(self, tokens):
        self.texts = [
            [*text, token] for text, token in zip(self.texts, tokens.tolist(), strict=True)
        ]
        self.room -= 1
        return self.outputs_of(self.texts)

    def reorder(self, rows):
        self.texts = [self.texts[row] for row in rows.tolist()]


@pytest.mark.parametrize("policy", ["gumbel", "muzero"])
def test_a_plan_finds_what_one_step_does_not(policy):
    plan = TokenPlanConfig(num_simulations=40, num_candidates=4, policy=policy, discount=1.0)
    config = DecodeConfig(max_new_tokens=5, plan=plan)

    def text(choose):
        steps = token_steps(Request(Table(), [[0]], config, stop), choose)
        return gathered(list(steps), 1).best()[0]

    stop = Stop(tokens=(3,))
    request = Request(Table(), [[0]], config, stop)
    assert text(lambda now: now.choice.log_probs.argmax(-1))[0] == 0
    assert text(planned(request, torch.tensor([1]))) == [1, 2, 3]
