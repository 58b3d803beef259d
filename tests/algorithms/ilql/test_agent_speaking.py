"""`ILQL` in dialogues: its policy, its evaluation, and which n-grams it values."""

from collections import defaultdict

import pytest
import torch

from raffia.algorithms.ilql import DecodeConfig, ILQL_Evaluator, ILQL_Policy, TopAdvantageNGrams
from raffia.algorithms.ilql.generate import generate
from raffia.lm import ConstantTokenReward, character_tokenizer
from raffia.lm.decoding.generations import Stop
from tests.marks import refusals

from .agents import END, SMALL, Letters, Utterances, rows, same, small_agent, tensors_of

TOKENIZER = character_tokenizer(["abcde"])  # 5 letters and 6 marks
NET = {"vocab_size": TOKENIZER.num_tokens, "dropout": 0.5}


def chat_agent(**options):
    return small_agent(net={**NET, "block_size": 48, **options.pop("net", {})}, **options)


QUESTION = Utterances([("ab", None)])
SHORT = DecodeConfig(max_new_tokens=6, num_beams=1)


DECODINGS = [
    *(dict(num_beams=1), dict(num_beams=4), dict(top_k=99)),  # more than there are tokens
    *(dict(exp_adv=False, adv_weight=0.9), dict(num_generations=3, rerank="value")),
]


@pytest.mark.parametrize("options", DECODINGS, ids=str)
def test_a_policy_answers_as_generate_does(options):
    """In AgileRL beam search raises, and so does a top-k above the vocabulary."""
    agent, config = chat_agent(), DecodeConfig(max_new_tokens=6, **options)
    policy = agent.get_policy(TOKENIZER, config, generator=torch.Generator().manual_seed(1))
    prompt = policy.prompt(QUESTION)
    assert prompt == [TOKENIZER.bos_token_id, *TOKENIZER.encode("ab"), TOKENIZER.eos_token_id]
    texts = generate(
        agent.model, agent.target, [prompt], config, stop=Stop((TOKENIZER.eoa_token_id,)),
        pad_token=TOKENIZER.pad_token_id, generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    assert policy.act(QUESTION) == TOKENIZER.decode(texts.best()[0])
    for said in ("ab", [{"role": "user", "content": "ab"}]):
        assert policy.prompt(said) == prompt
    assert agent.get_policy(TOKENIZER).config == agent.config.decode and policy.agent is agent
    dialogues = [Utterances([("abcd"[:n], None)]) for n in (1, 3, 2)]
    with torch.autocast("cpu", torch.bfloat16):
        assert isinstance(policy.act(QUESTION), str)
    if config == SHORT:
        assert policy.act_batch(dialogues) == [policy.act(one) for one in dialogues]


def test_better_tokens_are_likelier_with_the_sign_of_the_advantage_alone():
    """In AgileRL it is reversed: better tokens are never chosen."""
    agent = chat_agent()
    with torch.no_grad():
        for module in (agent.model.v, agent.target.q1, agent.target.q2):
            module[2].weight.zero_(), module[2].bias.fill_(-1.0)
        agent.model.v[2].bias.zero_()
        for head in (agent.target.q1, agent.target.q2):
            head[2].bias[TOKENIZER.token_to_id("c")] = 1.0
    binary = DecodeConfig(exp_adv=False, adv_weight=0.999, num_beams=1, max_new_tokens=3)
    assert agent.get_policy(TOKENIZER, binary).act(QUESTION) == "ccc"


ENDED, BY_UTTERANCE = Utterances([("a", 0.0)], terminal=True), {"per_token": False}
WRONG = [  # a call, and words of its error
    (lambda: ILQL_Policy(small_agent(), character_tokenizer(["abcdef"])), "has 12 tokens, b"),
    (lambda: chat_agent().get_policy(TOKENIZER).act(ENDED), "has ended"),
    (lambda: chat_agent().get_policy(TOKENIZER).act(["ab"]), "must be .*role"),
    (lambda: chat_agent(**BY_UTTERANCE).get_policy(TOKENIZER).act(QUESTION), "score_utteranc"),
    (lambda: ILQL_Evaluator(Letters, TOKENIZER, num_games=0), "num_games=0"),
    (lambda: TopAdvantageNGrams(0), "n=0"),
    (lambda: TopAdvantageNGrams(2).evaluate(small_agent(**BY_UTTERANCE), rows()), "only whole utt"),
]
test_wrong_arguments_are_refused = refusals(WRONG)


def test_evaluation_uses_neither_dropout_nor_gradients():
    """AgileRL evaluates in training mode, with autograd on."""
    agent, modes = chat_agent(), []
    agent.model.trunk.ln_f.register_forward_hook(
        lambda module, _, out: modes.append(
            (agent.model.trunk.training, torch.is_grad_enabled(), out.requires_grad)
        )
    )
    before = tensors_of(agent)
    evaluator = ILQL_Evaluator(Letters, TOKENIZER, SHORT, num_games=4)
    found, again = evaluator.evaluate(agent), evaluator.evaluate(agent)
    assert set(modes) == {(False, False, False)}
    assert agent.training and same(tensors_of(agent), before)
    assert [game.actions for game in found.games] == [game.actions for game in again.games]
    assert (found.kls, found.surprises) == (again.kls, again.surprises)


def test_rewards_are_those_of_the_games():
    agent = chat_agent()
    config = DecodeConfig(max_new_tokens=6)
    evaluator = ILQL_Evaluator(
        Letters, TOKENIZER, config, num_games=5, token_reward=ConstantTokenReward(-0.25)
    )
    found = evaluator.evaluate(agent)
    assert len(found.games) == 5 and len(found.kls) == len(found.surprises) == 10
    total = sum(text.count("a") - 0.5 for game in found.games for text in game.actions)
    assert found.env_reward == pytest.approx(total / 5)
    tokens = sum(len(text) + 1 for game in found.games for text in game.actions)  # and the end
    assert found.token_reward == pytest.approx(-0.25 * tokens / 5)
    assert agent.test(Letters, TOKENIZER, num_games=5, decode=config) == found.env_reward
    assert agent.fitness == [found.env_reward]
    other = ILQL_Evaluator(Letters, TOKENIZER, config, num_games=5, seed=1).evaluate(agent)
    assert other.games != found.games and other.token_reward == 0.0


def test_kl_and_entropy_are_those_of_one_token():
    agent = chat_agent()
    with torch.no_grad():
        agent.model.trunk.wte.weight.mul_(20.0)  # so that the policy is not uniform
    one = DecodeConfig(max_new_tokens=1, adv_weight=8.0)
    found = ILQL_Evaluator(Letters, TOKENIZER, one, num_games=1500, batch_size=1500).evaluate(agent)
    agent.eval()
    exact = torch.zeros(2)
    with torch.no_grad():
        for letter in "abcd":
            prompt = agent.get_policy(TOKENIZER).prompt(Utterances([(letter, None)]))
            last = torch.tensor([[len(prompt) - 1]])
            output = agent(torch.tensor([prompt]), last, last)
            logits = output.logits[0, -1].clone()
            logits[TOKENIZER.pad_token_id] = -torch.inf
            p = logits.log_softmax(-1)
            advantage = torch.minimum(*output.target_q)[0, 0] - output.v[0, 0]
            q = (logits + 8 * advantage).log_softmax(-1)
            terms = torch.stack([q.exp() * (q - p), -q.exp() * q]).nan_to_num()
            exact += terms.sum(1) / 4
    # The first answers of all games come before the second ones
    kls, surprises = found.kls[:1500], found.surprises[:1500]
    assert sum(kls) / 1500 == pytest.approx(exact[0].item(), abs=0.1)
    assert sum(surprises) / 1500 == pytest.approx(exact[1].item(), abs=0.1)
    for part, is_changed in (("adv", False), ("logits", True)):  # without it
        alone = DecodeConfig(max_new_tokens=1, **{f"include_{part}": False})
        kl = ILQL_Evaluator(Letters, TOKENIZER, alone).evaluate(agent).kl
        assert kl > 0 if is_changed else kl == pytest.approx(0, abs=1e-6)


def by_hand(agent, n):
    """The mean advantage of each n-gram's tokens, over all its occurrences."""
    found = defaultdict(list)
    agent.eval()
    for row in rows():
        advantage = agent.get_qvs([row])["advantage"][0].tolist()
        utterances, start = [], 0
        for index, position in enumerate(row.action_idxs):
            if row.tokens[position + 1] == END:
                utterances.append(range(start, index + 1))
                start = index + 1
        for indices in utterances:
            size = n or len(indices)
            for first in range(len(indices) - size + 1):
                part = indices[first : first + size]
                tokens = tuple(row.tokens[row.action_idxs[index] + 1] for index in part)
                found[tokens].append(sum(advantage[index] for index in part) / size)
    agent.train()
    return {tokens: (sum(means) / len(means), len(means)) for tokens, means in found.items()}


@pytest.mark.parametrize("n", [1, 2, None])
def test_n_grams_by_their_mean_advantage(n):
    """AgileRL returns nothing."""
    agent = small_agent(net={**SMALL, "dropout": 0.3})
    expected, counter = by_hand(agent, n), TopAdvantageNGrams(n, end_of_action=END)
    counter.add(agent, rows()[:5])
    found = counter.evaluate(agent, rows()[5:])
    assert {gram.tokens for gram in found} == set(expected)
    for gram in found:
        mean, count = expected[gram.tokens]
        assert gram.advantage == pytest.approx(mean, abs=1e-5) and gram.count == count
    advantages = [gram.advantage for gram in found]
    assert advantages == sorted(advantages, reverse=True) and len(counter.top(3)) == 3
    assert agent.training and str(found[0].tokens) in str(found[0])


def test_n_grams_of_an_agent_with_utterance_values():
    agent = small_agent(per_token=False, net={"dropout": 0.0})
    found = {gram.tokens: gram for gram in TopAdvantageNGrams().evaluate(agent, rows())}
    row = rows()[0]
    begin, end = row.utterance_state_idxs[0], row.utterance_action_idxs[0]
    gram = found[tuple(row.tokens[begin + 1 : end + 1])]
    assert gram.count == 1
    assert gram.advantage == pytest.approx(agent.get_qvs([row])["advantage"][0, 0].item(), abs=1e-6)
