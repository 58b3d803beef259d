"""Whatever the settings: the loss, its gradients, weights, values and scores against a restatement
that knows no padding, no batch and no shortcut."""

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
    """Rows that end, go on, were cut, have no action, end with one, or begin with one."""
    rows = []
    for _ in range(draw.randint(1, 5)):
        tokens, actions = [1], []
        for _ in range(draw.randint(0, 4)):
            said = [draw.randrange(4, vocab_size) for _ in range(draw.randint(0, 3))]
            if draw.random() < 0.6:
                actions += range(len(tokens) - 1, len(tokens) + len(said))
                tokens += [*said, END]
            else:
                tokens += [*said, 2]
        ended = draw.random() < 0.6
        tokens += [0] * ended
        rewards = [draw.uniform(-1, 1) * (draw.random() < 0.7) for _ in actions]
        point = DataPoint.from_tokens(tokens, actions, rewards, end_of_action=END, terminal=ended)
        rows.append(point.cut(draw.choice([None, None, draw.randint(2, 9)])))
    return [row for row in rows if len(row.tokens) > 1] or drawn_rows(draw, vocab_size)


def drawn_agent(seed):
    """An agent of drawn settings and sizes, its rows, and what drew them."""
    draw = random.Random(seed)
    yes = lambda share=0.5: draw.random() < share  # noqa: E731
    exp_weights, per_token = yes(0.7), yes(0.75)
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
        mc_returns=yes(0.3),
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
        double_q=yes(0.7),
        detach_v=yes(0.3),
        detach_q=yes(0.3),
        detach_pi=yes(0.3),
        per_token=per_token,
    )
    config = ILQLConfig(model=model, loss=loss, optimizer=OptimizerConfig(max_grad_norm=None))
    rows = drawn_rows(draw, trunk.vocab_size)
    data = DialogueDataset.of_points(rows, Vocabulary(trunk.vocab_size, pad_token_id=0))
    agent = ILQL.from_config(config, data).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in agent.parameters():  # the target, the policy and the trunk all unlike
        with torch.no_grad():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator).double())
    return agent, rows


def exact_batch(agent, rows):
    """In float64, as the rewards are."""
    batch = agent.prepare_inputs(rows)
    batch["rewards"] = batch["rewards"].double()
    for at, row in enumerate(rows):
        rewards = row.rewards if agent.per_token else row.utterance_rewards
        batch["rewards"][at, : len(rewards)] = torch.tensor(rewards, dtype=torch.float64)
    return batch


def padded_left(batch):
    """The same rows, which end together, and so do their actions' places."""
    length = batch["attn_mask"].sum(1, keepdim=True)
    by = batch["tokens"].shape[1] - length
    column = torch.arange(batch["tokens"].shape[1])
    moved = batch.copy()
    moved["attn_mask"] = column >= by
    moved["tokens"] = batch["tokens"].gather(1, (column - by).clamp_min(0))
    for name in ("action_idxs", "state_idxs"):
        moved[name] = batch[name] + by
    return moved


@pytest.mark.parametrize("seed", range(NUM))
def test_padding_at_the_left_is_as_padding_at_the_right(seed):
    agent, rows = drawn_agent(seed)
    batch = exact_batch(agent, rows)
    left = padded_left(batch)
    if agent.config.loss.mask == "strict":  # else index 0 of what is behind the last action counts
        (loss, told), (wanted, terms) = (agent.get_loss(b) for b in (left, batch))
        torch.testing.assert_close(loss, wanted, **CLOSE)
        torch.testing.assert_close(dict(told), dict(terms), **CLOSE)
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
    loss, told = agent.get_loss(exact_batch(agent, rows))
    wanted, terms, _ = reference(agent.model, agent.target, agent.config.loss, rows)
    torch.testing.assert_close(loss, wanted, **CLOSE)
    for name, term in terms.items():
        if f"{name}_loss" in told.keys():
            torch.testing.assert_close(told[f"{name}_loss"], term.detach(), **CLOSE)
    parameters = dict(agent.model.named_parameters())
    ours, theirs = (
        torch.autograd.grad(value, list(parameters.values()), materialize_grads=True)
        for value in (loss, wanted)
    )
    for name, mine, other in zip(parameters, ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, **CLOSE, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("seed", range(NUM))
def test_weights_and_values(seed):
    agent, rows = drawn_agent(seed)
    batch = exact_batch(agent, rows)
    with torch.no_grad():
        weights, found = agent.get_weights(batch), agent.get_qvs(batch)
        _, _, told = reference(agent.model, agent.target, agent.config.loss, rows)
    for at, (row, (wanted, said)) in enumerate(zip(rows, told, strict=True)):
        num = len(row.action_idxs if agent.per_token else row.utterance_action_idxs)
        got = weights[at, : len(row.tokens) - 1].tolist()
        assert got == pytest.approx(wanted[:-1], rel=1e-9)
        for place, (v, following, q, target_q) in enumerate(said[:num]):
            names = ["v", "next_v", "target_q", *(f"q{n + 1}" for n in range(len(q)))]
            got = [found[name][at, place].item() for name in names]
            assert got == pytest.approx(
                [v.item(), following.item(), target_q, *map(float, q)], rel=1e-9
            )
            bellman = found["rewards"][at, place] + agent.gamma * following
            assert found["bellman_target"][at, place].item() == pytest.approx(bellman.item())
        assert not found["v"][at, num:].any() and not found["target_q"][at, num:].any()


def test_the_draws_have_all_kinds():
    """What the seeds above are there for is among them."""
    drawn = [drawn_agent(seed) for seed in range(NUM)]
    configs = [agent.config for agent, _ in drawn]
    for name in ("policy", "target", "double_q", "detach_v", "detach_q", "detach_pi", "per_token"):
        assert len({getattr(config.model, name) for config in configs}) == 2, name
    for name in ("exp_weights", "mc_returns", "mask"):
        assert len({getattr(config.loss, name) for config in configs}) == 2, name
    for name in ("beta", "transition_weight", "clip_weight", "value_min", "cql_weight"):
        assert sum(bool(getattr(config.loss, name)) for config in configs) > 3, name
    rows = [row for _, some in drawn for row in some]
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
    for name, slow in agent.target.named_parameters():
        online = agent.model.get_parameter(name)
        wanted = 0.7 * before.get_parameter(name) + 0.3 * online
        torch.testing.assert_close(slow.detach(), wanted.detach(), **CLOSE)


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
    for at, row in enumerate(rows):
        wanted = plain_scores(agent, row, beta, exp_weights, clip, temperature,
                              with_values, with_logits)  # fmt: skip
        torch.testing.assert_close(scores[at, : len(row.tokens)], wanted, **CLOSE)
        assert with_logits or not scores[at, len(row.tokens) :].any()


@torch.no_grad()
def plain_scores(agent, row, beta, exp_weights, clip, temperature, with_values, with_logits):
    tokens, model, target = torch.tensor([row.tokens]), agent.model, agent.target
    hidden = model.trunk(tokens)[0]
    slow = hidden if target.trunk is None else target.trunk(tokens)[0]
    found = torch.zeros(len(row.tokens), model.trunk.vocab_size).double()
    if with_values:
        for position in row.action_idxs:
            q = torch.stack([head(slow[position]) for head in target.q_heads]).amin(0)
            advantage = q - model.v(hidden[position])
            for token, a in enumerate(advantage.tolist()):
                term = beta * a
                if not exp_weights:
                    term = math.log(beta if a > 0 else 1 - beta)
                found[position, token] = term if clip is None else min(term, clip)
    if with_logits:
        spoken = hidden if model.config.policy == "shared" else model.policy(tokens)[0]
        found += (model.policy_trunk.logits(spoken) / temperature).log_softmax(-1)
    return found
