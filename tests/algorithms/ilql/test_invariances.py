"""What must not matter: padding at the left, the order and company of rows, single precision."""

import json
import math

import pytest
import torch

from raffia.algorithms.ilql.loss import with_row_means
from raffia.tensordict.tensordict import TensorDict

from .agents import oracle_agent, small_agent
from .small import HERE, ORACLE, batch_of, collate, float32, result_of
from .test_agent import BATCHES, KEYS, NAMES, agent_of

ARRANGEMENTS = [
    {"policy": policy, "target": target}
    for policy in ("shared", "separate")
    for target in ("heads", "trunk")
]
OPTIONS = {
    "default": {},
    "beta": {"beta": 0.7, "clip_weight": 1.2, "dm_weight": 0.5},
    "all tokens": {"beta": 0.7, "transition_weight": 0.3},
    "returns": {"mc_returns": True, "exp_weights": False, "beta": 0.8, "cql_weight": 0.0},
}


def told(agent, batch):
    agent.zero_grad()
    loss, terms = agent.get_loss(batch)
    loss.backward()
    grads = {n: p.grad for n, p in agent.model.named_parameters() if p.grad is not None}
    return loss.detach(), {n: t for n, t in terms.items() if n.endswith("loss")}, grads


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


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_padding_at_the_left_is_as_padding_at_the_right(arrangement, name):
    agent, batch = oracle_agent(**arrangement, **OPTIONS[name]), batch_of("B")
    left = padded_left(batch)
    assert not torch.equal(left["tokens"], batch["tokens"])
    torch.testing.assert_close(told(agent, left), told(agent, batch), rtol=1e-9, atol=1e-11)
    real, with_token = batch["action_mask"], batch["attn_mask"]
    with torch.no_grad():
        ours, theirs = agent.get_qvs(left), agent.get_qvs(batch)
        torch.testing.assert_close(dict(ours), dict(theirs), rtol=1e-9, atol=1e-11)
        weights = [agent.get_weights(b)[b["attn_mask"]] for b in (left, batch)]
        torch.testing.assert_close(*weights, rtol=1e-9, atol=1e-11)
        said, wanted = (agent(*(b[key] for key in KEYS)) for b in (left, batch))
    torch.testing.assert_close(said.v[:, :-1][real], wanted.v[:, :-1][real])
    torch.testing.assert_close(said.target_q[0][real], wanted.target_q[0][real])
    torch.testing.assert_close(said.logits[left["attn_mask"]], wanted.logits[with_token])


def test_left_padded_scores_are_the_unpadded_ones():
    agent, batch = oracle_agent(), batch_of("B")
    left = padded_left(batch)
    scores = [agent.get_scores(b, include_logits=True) for b in (left, batch)]
    torch.testing.assert_close(scores[0][left["attn_mask"]], scores[1][batch["attn_mask"]])


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_rows_do_not_see_each_other(arrangement):
    """Values of a row are those it has alone; losses are means over all actions or tokens."""
    agent, batch = oracle_agent(**arrangement, beta=0.5), batch_of("B")
    together, loss = agent.get_qvs(batch), agent.get_loss(batch)[0]
    counts = batch["action_mask"].sum(1), batch["attn_mask"][:, 1:].sum(1)
    of_terms = torch.zeros(2).double()
    for row in range(len(batch["tokens"])):
        num = int(counts[0][row])
        if num == 0:  # it has no share in any sum
            continue
        alone = collate([ORACLE["batches"]["B"][row]], ORACLE["pad_id"])
        found = agent.get_qvs(alone)
        for name in ("v", "q1", "q2", "target_q", "bellman_target"):
            torch.testing.assert_close(found[name][0, :num], together[name][row, :num])
        terms = agent.get_loss(alone)[1]
        values = terms["v_loss"] + terms["q_loss"] + agent.cql_weight * terms["cql_loss"]
        of_terms += torch.stack([values * num, terms["token_loss"] * counts[1][row]])
    wanted = of_terms[0] / counts[0].sum() + of_terms[1] / counts[1].sum()
    torch.testing.assert_close(loss.detach(), wanted)
    shuffled = batch[torch.tensor([3, 0, 4, 2, 1])]
    torch.testing.assert_close(agent.get_loss(shuffled)[0], loss)
    parts = with_row_means(batch)
    mean = (agent.get_loss(parts[:2])[0] * 2 + agent.get_loss(parts[2:])[0] * 3) / 5
    torch.testing.assert_close(mean, loss)


# ---------------------------------------------------------------------------- single precision


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("batch", "kind"), BATCHES)
def test_the_recorded_cases_in_single_precision(batch, kind, name):
    expected, agent = result_of(batch, kind, name), agent_of(kind, name).float()
    rows = float32(batch_of(batch))
    loss, terms = agent.get_loss(rows)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected["total"], rel=1e-4)
    for term in ORACLE["loss_weights"]:
        assert terms[term].item() == pytest.approx(expected[term], rel=1e-4), term
    loss.backward()
    for part, norm in expected["grad_norm"].items():
        grads = [p.grad for p in agent.model.get_submodule(part).parameters()]
        assert math.hypot(*(g.norm().item() for g in grads)) == pytest.approx(norm, rel=1e-4)
    with torch.no_grad():
        weights = agent.get_weights(rows)
    torch.testing.assert_close(weights, torch.tensor(expected["weights"]), rtol=1e-4, atol=1e-5)


def test_a_target_update_in_single_precision():
    expected = json.loads((HERE / "target_update.json").read_text())
    agent = oracle_agent().float()
    agent.alpha = expected["alpha"]
    agent.soft_update()
    state = dict(agent.target.named_parameters())
    for name, norm in expected["frobenius"].items():
        ours = name.replace("target_trunk", "trunk").replace("tq", "q")
        assert state[ours].norm().item() == pytest.approx(norm, rel=1e-5), name


# ---------------------------------------------------------------------------- ways of being given


def test_a_container_of_ones_own_kind_is_a_batch():
    agent = small_agent(net={"dropout": 0.0})
    from .agents import rows

    batch = agent.prepare_inputs(rows())
    bare = TensorDict({key: batch[key] for key in batch.keys() if key != "index"}, [12])
    assert torch.equal(agent.get_loss(bare)[0], agent.get_loss(rows())[0])
