"""Agents around the networks of the numeric cases, and small agents."""

from dataclasses import replace

import torch

from raffia.algorithms.ilql import ILQL, ILQLConfig
from raffia.algorithms.ilql.config import OptimizerConfig, TargetConfig
from raffia.lm import DialogueDataset, Language_Environment, Language_Observation
from raffia.lm.data.dialogue import DataPoint, Vocabulary

from .small import make_loss

SMALL = {"vocab_size": 11, "n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 32}
END = 3


class Utterances(Language_Observation):
    def __init__(self, utterances, terminal=False):
        self.utterances, self.terminal = utterances, terminal

    def to_sequence(self):
        return list(self.utterances), self.terminal

    def __str__(self):
        return " / ".join(text for text, _ in self.utterances)


class Letters(Language_Environment):
    """Two answers, each rewarded by its number of a's, less a half."""

    def reset(self, seed):
        self.observation = Utterances([("abcd"[seed % 4], None)])
        return self.observation

    def step(self, action):
        reward = action.count("a") - 0.5
        utterances = [*self.observation.utterances, (action, reward)]
        done = len(utterances) > 3
        self.observation = Utterances(utterances if done else [*utterances, ("b", None)], done)
        return self.observation, reward, done

    def is_terminal(self):
        return self.observation.terminal


def oracle_agent(**options) -> ILQL:
    """An agent with the networks of `make_loss` and its options."""
    loss = make_loss(**options)
    parts = dict(optimizer=OptimizerConfig(max_grad_norm=None), target=TargetConfig(alpha=0.3))
    config = ILQLConfig(model=loss.model.config, loss=loss.config, **parts)
    agent = ILQL.from_config(config).double()
    agent.install(loss.model, loss.target, config)
    return agent


def rows(num=12, seed=0) -> list[DataPoint]:
    """Dialogues of one or two utterances of the agent, of different lengths."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high, size=()):
        return torch.randint(high, size, generator=generator)

    points = []
    for _ in range(num):
        tokens, actions = [1, *(5 + draw(6, (2,))).tolist(), 2], []
        for _ in range(1 + int(draw(2))):
            utterance = [*(5 + draw(6, (1 + int(draw(4)),))).tolist(), END]
            actions += range(len(tokens) - 1, len(tokens) - 1 + len(utterance))
            tokens += [*utterance, 6, 2]
        rewards = [float(draw(3)) - 0.5 if tokens[at + 1] == END else 0.0 for at in actions]
        ends = dict(end_of_action=END, terminal=bool(draw(2)))
        points.append(DataPoint.from_tokens(tokens, actions, rewards, **ends))
    return points


def data(**more) -> DialogueDataset:
    return DialogueDataset.of_points(rows(), Vocabulary(11, pad_token_id=0), **more)


def small_agent(dataset=None, **options) -> ILQL:
    """An agent on a data set of 12 rows; `net` changes the options of its networks."""
    net = {**SMALL, **options.pop("net", {})}
    torch.manual_seed(options.pop("seed", 0))
    options = {"batch_size": 4, "lr": 1e-2, **options}
    return ILQL(data() if dataset is None else dataset, net, **options)


def tensors_of(agent) -> dict[str, torch.Tensor]:
    found = dict(agent.named_parameters())
    if agent.opt is not None:
        found |= {".".join(map(str, key)): leaf for key, leaf in agent.opt.items(True, True)}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def same(one, other) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def with_loss(agent, **options) -> ILQL:
    agent.config = replace(agent.config, loss=replace(agent.config.loss, **options))
    return agent
