"""For random settings: the loss, its gradients, weights, values and scores against a restatement
without padding, batches and shortcuts."""

import math
import random

import pytest
import torch

from raffia.algorithms.ilql import ILQL, ILQLConfig, make_target
from raffia.algorithms.ilql.config import (
    ILQLLossConfig,
    ILQLModelConfig,
    OptimizerConfig,
    TrunkConfig,
)
from raffia.lm import DialogueDataset
from raffia.lm.data.dialogue import DataPoint, Vocabulary

from .agents import with_loss
from .reference import reference

CLOSE = {"rtol": 1e-9, "atol": 1e-11}
END, NUM = 3, 20


def drawn_rows(draw, vocab_size):
    """Rows that are finished, unfinished, cut, without actions, or begin or end with one."""
    rows = []
    for _ in range(draw.randint(1, 5)):
        tokens, actions = [1], []
        for _ in range(draw.randint(0, 4)):
            utterance = [draw.randrange(4, vocab_size) for _ in range(draw.randint(0, 3))]
            if draw.random() < 0.6:
                actions += range(len(tokens) - 1, len(tokens) + len(utterance))
                tokens += [*utterance, END]
            else:
                tokens += [*utterance, 2]
        ended = draw.random() < 0.6
        tokens += [0] * ended
        rewards = [draw.uniform(-1, 1) * (draw.random() < 0.7) for _ in actions]
        point = DataPoint.from_tokens(tokens, actions, rewards, end_of_action=END, terminal=ended)
        rows.append(point.cut(draw.choice([None, None, draw.randint(2, 9)])))
    return [row for row in rows if len(row.tokens) > 1] or drawn_rows(draw, vocab_size)


def drawn_agent(seed):
    """An agent with random settings and sizes, and its rows."""
    draw = random.Random(seed)
    chance = lambda probability=0.5: draw.random() < probability  # noqa: E731
    exp_weights, per_token = chance(0.7), chance(0.75)
    low, high = sorted(draw.uniform(-0.3, 0.3) for _ in range(2))
    loss = ILQLLossConfig(
        gamma=draw.choice([0.0, 0.5, 0.99, 1.0]),
        tau=draw.choice([0.5, 0.7, 0.95]),
        beta=draw.choice([0.0, 0.3, 0.9]) if not exp_weights else draw.choice([0.0, 1.0, 6.0]),
        exp_weights=exp_weights,
        transition_weight=draw.choice([0.0, 0.0, 0.4, 2.0]),
        clip_weight=draw.choice([None, None, 0.5, 1.1]),
        value_min=draw.choice([None, low]),
        value_max=draw.choice([None, high]),
        awac_weight=draw.choice([1.0, 0.3]),
        v_weight=draw.choice([1.0, 0.5]),
        q_weight=draw.choice([1.0, 2.0]),
        cql_weight=draw.choice([0.0, 0.01, 1.0]) if per_token else 0.0,
        cql_temp=draw.choice([1.0, 0.5, 3.0]),
        dm_weight=draw.choice([0.0, 0.2]) if per_token else 0.0,
        dm_margin=draw.choice([0.0, 0.2]),
        mc_returns=chance(0.3),
        mask=draw.choice(["strict", "strict", "published"]),
    )
    n_head = draw.choice([1, 2])
    trunk = TrunkConfig(
        vocab_size=draw.randint(6, 12),
        n_layer=draw.randint(1, 2),
        n_head=n_head,
        n_embd=n_head * draw.choice([2, 4, 6]),
        block_size=24,
        positions=draw.choice(["learned", "learned", "rotary"]),
    )
    model = ILQLModelConfig(
        trunk=trunk,
        policy=draw.choice(["shared", "separate"]),
        target=draw.choice(["heads", "trunk"]),
        double_q=chance(0.7),
        detach_v=chance(0.3),
        detach_q=chance(0.3),
        detach_pi=chance(0.3),
        per_token=per_token,
    )
    config = ILQLConfig(model=model, loss=loss, optimizer=OptimizerConfig(max_grad_norm=None))
    rows = drawn_rows(draw, trunk.vocab_size)
    data = DialogueDataset.of_points(rows, Vocabulary(trunk.vocab_size, pad_token_id=0))
    agent = ILQL.from_config(config, data).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in agent.parameters():  # so target, policy and trunk all differ
        with torch.no_grad():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator).double())
    return agent, rows


def exact_batch(agent, rows):
    """The batch with rewards in float64."""
    batch = agent.prepare_inputs(rows)
    batch["rewards"] = batch["rewards"].double()
    for index, row in enumerate(rows):
        rewards = row.rewards if agent.per_token else row.utterance_rewards
        batch["rewards"][index, : len(rewards)] = torch.tensor(rewards, dtype=torch.float64)
    return batch


def padded_left(batch):
    """The same rows with padding at the left, and their actions' indices shifted."""
    length = batch["attn_mask"].sum(1, keepdim=True)
    shift = batch["tokens"].shape[1] - length
    column = torch.arange(batch["tokens"].shape[1])
    moved = batch.copy()
    moved["attn_mask"] = column >= shift
    moved["tokens"] = batch["tokens"].gather(1, (column - shift).clamp_min(0))
    for name in ("action_idxs", "state_idxs"):
        moved[name] = batch[name] + shift
    return moved


@pytest.mark.parametrize("seed", range(NUM))
def test_padding_at_the_left_gives_the_same_results(seed):
    agent, rows = drawn_agent(seed)
    batch = exact_batch(agent, rows)
    left = padded_left(batch)
    if agent.config.loss.mask == "strict":  # else index 0 of the slot after the last action counts
        (loss, metrics), (expected, terms) = (agent.get_loss(b) for b in (left, batch))
        torch.testing.assert_close(loss, expected, **CLOSE)
        torch.testing.assert_close(dict(metrics), dict(terms), **CLOSE)
        weights = [agent.get_weights(b)[b["attn_mask"]] for b in (left, batch)]
        torch.testing.assert_close(*weights, **CLOSE)
    torch.testing.assert_close(dict(agent.get_qvs(left)), dict(agent.get_qvs(batch)), **CLOSE)
    if agent.per_token:
        scores = [agent.get_scores(b, include_logits=True) for b in (left, batch)]
        scores = [s[b["attn_mask"]] for s, b in zip(scores, (left, batch), strict=True)]
        torch.testing.assert_close(*scores, **CLOSE)


@pytest.mark.parametrize("seed", range(NUM))
def test_the_loss_and_its_gradients(seed):
    agent, rows = drawn_agent(seed)
    if agent.per_token and seed % 3 == 0:
        agent = with_loss(agent, backup="max")
    loss, metrics = agent.get_loss(exact_batch(agent, rows))
    expected, terms, _ = reference(agent.model, agent.target, agent.config.loss, rows)
    torch.testing.assert_close(loss, expected, **CLOSE)
    for name, term in terms.items():
        if f"{name}_loss" in metrics.keys():
            torch.testing.assert_close(metrics[f"{name}_loss"], term.detach(), **CLOSE)
    parameters = dict(agent.model.named_parameters())
    ours, theirs = (
        torch.autograd.grad(value, list(parameters.values()), materialize_grads=True)
        for value in (loss, expected)
    )
    for name, mine, other in zip(parameters, ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, **CLOSE, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("seed", range(NUM))
def test_weights_and_values(seed):
    agent, rows = drawn_agent(seed)
    batch = exact_batch(agent, rows)
    with torch.no_grad():
        weights, found = agent.get_weights(batch), agent.get_qvs(batch)
        _, _, by_row = reference(agent.model, agent.target, agent.config.loss, rows)
    for index, (row, (expected, slots)) in enumerate(zip(rows, by_row, strict=True)):
        num = len(row.action_idxs if agent.per_token else row.utterance_action_idxs)
        values = weights[index, : len(row.tokens) - 1].tolist()
        assert values == pytest.approx(expected[:-1], rel=1e-9)
        for slot, (v, following, q, target_q) in enumerate(slots[:num]):
            names = ["v", "next_v", "target_q", *(f"q{n + 1}" for n in range(len(q)))]
            values = [found[name][index, slot].item() for name in names]
            assert values == pytest.approx(
                [v.item(), following.item(), target_q, *map(float, q)], rel=1e-9
            )
            bellman = found["rewards"][index, slot] + agent.gamma * following
            assert found["bellman_target"][index, slot].item() == pytest.approx(bellman.item())
        assert not found["v"][index, num:].any() and not found["target_q"][index, num:].any()


def test_the_random_agents_cover_all_settings():
    """The seeds above cover all settings."""
    drawn = [drawn_agent(seed) for seed in range(NUM)]
    configs = [agent.config for agent, _ in drawn]
    for name in ("policy", "target", "double_q", "detach_v", "detach_q", "detach_pi", "per_token"):
        assert len({getattr(config.model, name) for config in configs}) == 2, name
    for name in ("exp_weights", "mc_returns", "mask"):
        assert len({getattr(config.loss, name) for config in configs}) == 2, name
    for name in ("beta", "transition_weight", "clip_weight", "value_min", "cql_weight"):
        assert sum(bool(getattr(config.loss, name)) for config in configs) > 3, name
    rows = [row for _, of_agent in drawn for row in of_agent]
    assert any(not row.action_idxs for row in rows) and any(row.was_cut for row in rows)
    assert any(row.action_idxs and not row.terminals[-1] for row in rows)
    assert any(row.action_idxs[:1] == [0] for row in rows)


@pytest.mark.parametrize("seed", range(8))
def test_an_update_moves_the_target_by_alpha(seed):
    agent, rows = drawn_agent(seed)
    agent.alpha = 0.3
    before = make_target(agent.model).requires_grad_(False)
    before.load_state_dict(agent.target.state_dict())
    agent.learn(rows)
    for name, parameter in agent.target.named_parameters():
        online = agent.model.get_parameter(name)
        expected = 0.7 * before.get_parameter(name) + 0.3 * online
        torch.testing.assert_close(parameter.detach(), expected.detach(), **CLOSE)


@pytest.mark.parametrize("seed", range(20))
def test_scores(seed):
    agent, rows = drawn_agent(seed)
    if not agent.per_token:
        agent, rows = drawn_agent(100 + seed)
    if not agent.per_token:
        return
    draw = random.Random(seed)
    exp_weights, temperature = draw.random() < 0.6, draw.choice([1.0, 0.5])
    beta, clip = draw.choice([0.3, 0.9]), draw.choice([None, 0.1])
    with_values, with_logits = draw.choice([(True, True), (True, False), (False, True)])
    scores = agent.get_scores(
        rows, beta=beta, exp_weights=exp_weights, clip_weight=clip, logit_temp=temperature,
        include_advantage=with_values, include_logits=with_logits,
    )  # fmt: skip
    for index, row in enumerate(rows):
        expected = plain_scores(agent, row, beta, exp_weights, clip, temperature,
                              with_values, with_logits)  # fmt: skip
        torch.testing.assert_close(scores[index, : len(row.tokens)], expected, **CLOSE)
        assert with_logits or not scores[index, len(row.tokens) :].any()


@torch.no_grad()
def plain_scores(agent, row, beta, exp_weights, clip, temperature, with_values, with_logits):
    tokens, model, target = torch.tensor([row.tokens]), agent.model, agent.target
    hidden = model.trunk(tokens)[0]
    target_hidden = hidden if target.trunk is None else target.trunk(tokens)[0]
    found = torch.zeros(len(row.tokens), model.trunk.vocab_size).double()
    if with_values:
        for position in row.action_idxs:
            q = torch.stack([head(target_hidden[position]) for head in target.q_heads]).amin(0)
            advantage = q - model.v(hidden[position])
            for token, a in enumerate(advantage.tolist()):
                term = beta * a
                if not exp_weights:
                    term = math.log(beta if a > 0 else 1 - beta)
                found[position, token] = term if clip is None else min(term, clip)
    if with_logits:
        policy_hidden = hidden if model.config.policy == "shared" else model.policy(tokens)[0]
        found += (model.policy_trunk.logits(policy_hidden) / temperature).log_softmax(-1)
    return found
