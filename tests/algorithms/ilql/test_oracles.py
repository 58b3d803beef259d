"""Losses, gradients, weights and targets of a small ILQL, against an independent restatement."""

import json

import pytest
import torch

from raffia.algorithms.ilql.terms import bellman_target, min_target_q
from raffia.algorithms.ilql.token_weights import advantage_weights, masks_of, token_weights
from raffia.functional.clipping import global_norm
from raffia.nn.params import target_copy, update_target

from .small import HERE, ORACLE, TOLERANCE, batch_of, make_loss, numbers_of

CASES = [
    (batch, kind, name)
    for batch, kind in (("A", "strict"), ("A", "published"), ("B", "strict"), ("B", "published"))
    for name in ORACLE["results"]["A"]
]
WEIGHTS = {
    {"token_loss": "awac_weight"}.get(name, name.replace("loss", "weight")): weight
    for name, weight in ORACLE["loss_weights"].items()
}


def result_of(batch, kind, name):
    block = {"strict": "B_strict", "published": "B_as_published"}[kind]
    return ORACLE["results"]["A" if batch == "A" else block][name]


def loss_of(kind, name, lean=True):
    case = result_of("A", "strict", name)
    options = {"tau": 0.7, **case["hp"]}
    target = "trunk" if options.pop("separate_target", True) else "heads"
    model_options = {k: options.pop(k) for k in list(options) if k.startswith("detach")}
    return make_loss(
        target=target,
        lean=lean,
        model_options=model_options,
        mask=kind,
        mc_returns=case["mc_returns"],
        **options,
        **WEIGHTS,
    )


@pytest.mark.parametrize(("batch", "kind", "name"), CASES)
@pytest.mark.parametrize("lean", [True, False])
def test_losses_and_gradients(batch, kind, name, lean):
    expected, loss = result_of(batch, kind, name), loss_of(kind, name, lean)
    total, metrics = loss(batch_of(batch), numbers_of(loss.config))
    total.backward()
    assert total.item() == pytest.approx(expected["total"], rel=1e-9)
    for term in ORACLE["loss_weights"]:
        assert metrics[term].item() == pytest.approx(expected[term], rel=1e-9), term
    for part, norm in expected["grad_norm"].items():
        grads = [p.grad for p in loss.model.get_submodule(part).parameters()]
        assert global_norm(grads).item() == pytest.approx(norm, rel=1e-9), part
    assert all(p.grad is None for p in loss.target.parameters())


@pytest.mark.parametrize(("batch", "kind", "name"), CASES)
def test_values_and_weights(batch, kind, name):
    expected, loss, data = result_of(batch, kind, name), loss_of(kind, name), batch_of(batch)
    said = loss.model(
        data["tokens"], data["state_idxs"], data["action_idxs"], data["attn_mask"],
        target=loss.target,
    )  # fmt: skip
    config = loss.config
    action = data["tokens"].gather(1, data["action_idxs"] + 1)
    q, slow = (
        [rows.gather(2, action.unsqueeze(2)).squeeze(2) for rows in heads]
        for heads in (said.q, said.target_q)
    )
    target_q = min_target_q(slow, config.value_min, config.value_max)
    found = {"vs": said.v, "q1": q[0], "q2": q[1], "target_q": target_q}
    found["logits_row0"] = said.logits[0, ::9]
    found["bellman_target"] = bellman_target(
        data["rewards"], said.v[:, 1:], data["terminals"][:, 1:], config.gamma
    )
    weights = advantage_weights(
        target_q - said.v[:, :-1],
        config.beta,
        exp_weights=config.exp_weights,
        clip_weight=config.clip_weight,
    )
    mask = masks_of(data["action_mask"], data["terminals"], kind).weights
    idxs = data["action_idxs"]
    found["weights"] = token_weights(
        weights, mask, idxs, idxs, data["tokens"].shape[1], config.transition_weight
    )
    compared = [key for key in found if key in expected]
    assert "weights" in compared
    for key in compared:
        wanted = torch.tensor(expected[key], dtype=torch.float64)
        got = found[key].detach()
        if key == "bellman_target":  # behind the end it means nothing
            real = ~data["terminals"][:, :-1]
            wanted, got = wanted * real, got * real
        torch.testing.assert_close(got, wanted, **TOLERANCE)


def test_oracles_can_fail():
    loss = loss_of("strict", "default")
    published = result_of("B", "published", "default")
    total, _ = loss(batch_of("B"), numbers_of(loss.config))
    assert total.item() != pytest.approx(published["total"], rel=1e-3)


def test_target_update():
    expected = json.loads((HERE / "target_update.json").read_text())
    loss = loss_of("strict", "default")
    for name, source in (("q1", "q1"), ("q2", "q2"), ("trunk", "trunk")):
        target, online = loss.target.get_submodule(name), loss.model.get_submodule(source)
        update_target(target, online, expected["alpha"])
    state = dict(loss.target.named_parameters())
    for name, total in expected["after_soft"].items():
        ours = name.replace("target_trunk", "trunk").replace("tq", "q")
        assert state[ours].sum().item() == pytest.approx(total, rel=1e-9), name
        norm = state[ours].norm().item()
        assert norm == pytest.approx(expected["frobenius"][name], rel=1e-9), name
    for name in ("q1", "q2", "trunk"):  # hard
        update_target(loss.target.get_submodule(name), loss.model.get_submodule(name))
    for name, parameter in loss.target.named_parameters():
        assert torch.equal(parameter, loss.model.get_parameter(name)), name
    assert not any(p.requires_grad for p in target_copy(loss.model.q1).parameters())
