"""A dialogue of your own, learnt from logs: a seller who does better than all who were logged.

A buyer has a limit that the seller does not know, and patience for three prices; a price that is
far too high makes him say so. Logged sellers name prices without much thought. ILQL finds what to
say first, and what to say after each answer. Half a minute on one core.
"""

import random

import torch

from raffia.algorithms.ilql import ILQL, DecodeConfig
from raffia.lm import (
    DialogueDataset,
    Language_Environment,
    Language_Observation,
    ObservationDialogues,
    WordTokenizer,
    check_language_environment,
    play_dialogues,
)


class Talk(Language_Observation):
    """A conversation: prices, which earn what is paid, and the buyer's answers."""

    def __init__(self, turns=(), terminal=False):
        self.turns, self.terminal = tuple(turns), terminal

    def to_sequence(self):
        return list(self.turns), self.terminal

    def __str__(self):
        return " - ".join(text for text, _ in self.turns)


class Haggle(Language_Environment):
    """Sell at a price from 1 to 9."""

    def reset(self, seed):
        self.limit, self.talk = random.Random(seed).randint(1, 9), Talk([("how much?", None)])
        return self.talk

    def step(self, action):
        if self.talk.terminal:
            raise RuntimeError("the buyer has gone: start over with reset(seed)")
        price = int(action) if action.isdigit() else 99
        sold = price <= self.limit
        answer = "deal" if sold else "far too much" if price > self.limit + 3 else "too much"
        reward = float(price) if sold else 0.0
        turns = [*self.talk.turns, (action, reward), (answer, None)]
        self.talk = Talk(turns, terminal=sold or len(turns) == 7)
        return self.talk, reward, self.talk.terminal

    def is_terminal(self):
        return self.talk.terminal


class Logged:
    """Names any price below the last one."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def act(self, talk):
        prices = [int(text) for text, _ in talk.turns if text.isdigit()]
        return str(self.random.randint(1, max(1, min(prices, default=10) - 1)))


def mean_return(played):
    return sum(game.episode_return for game in played) / len(played)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)  # of the first weights
    assert check_language_environment(Haggle, ["5", "3"]).ok
    logs = play_dialogues(Haggle, Logged(0), range(20_000))
    print(f"logged sellers earn {mean_return(logs):.2f}, as in: {logs[0].observation}")

    tokenizer = WordTokenizer.from_texts(text for log in logs for text, _ in log.observation.turns)
    data = DialogueDataset.build(ObservationDialogues([log.observation for log in logs]), tokenizer)
    small = {"vocab_size": tokenizer.num_tokens, "n_embd": 32, "n_layer": 2, "n_head": 2}
    agent = ILQL(data, small, batch_size=128, tau=0.7, alpha=0.02)
    num_updates = 1_000
    for update in range(1, num_updates + 1):
        agent.lr = 3e-3 * (1 - update / num_updates)
        metrics = agent.learn()
        if update % 250 == 0:
            print(
                f"{update} updates: Q loss {metrics['q_loss']:.2f}, V loss {metrics['v_loss']:.3f}"
            )

    for name, decode in {
        "the logs imitated": DecodeConfig(include_adv=False, max_new_tokens=2),
        "... and ILQL's values": DecodeConfig(adv_weight=4.0, max_new_tokens=2),
    }.items():
        policy = agent.get_policy(tokenizer, decode, generator=torch.Generator().manual_seed(0))
        games = play_dialogues(Haggle, policy, range(10_000, 11_000))
        print(f"{name}: {mean_return(games):.2f}, as in: {games[1].observation}")
