"""Invalid outputs of a model are refused, with the root and the simulation."""

import pytest
import torch

from raffia.search import RecurrentOutput, RootOutput
from raffia.tensordict import TensorDict

from .table import BACKENDS, STATES, A, B, random_table, root, run


def spoiled(change, *, at=0, table=None):
    """A model whose output is changed from simulation `at` on."""
    table, calls = random_table(0) if table is None else table, []

    def model(embedding, action):
        output, after = table(embedding, action)
        calls.append(len(action))
        return change(output, after) if len(calls) > at else (output, after)

    return model


def with_field(name, tensor):
    return lambda output, after: (output._replace(**{name: tensor}), after)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("reward", torch.nan),
        ("value", -torch.inf),
        ("prior_logits", torch.inf),
        ("prior_logits", torch.nan),
        ("discount", torch.inf),
        ("discount", -0.5),
    ],
)
def test_nan_or_infinity_of_the_model_is_named_by_root_and_simulation(field, wrong, backend):
    def change(output, after):
        tensor = getattr(output, field).clone()
        tensor.view(B, -1)[2, -1] = wrong
        return output._replace(**{field: tensor}), after

    table = random_table(0, discounts=True)
    is_what = {"discount": "NaN, infinite or negative", "prior_logits": "NaN, inf"}.get(
        field, "NaN"
    )
    match = f"the model's {field} is {is_what}.* for root 2 in simulation 3"
    with pytest.raises(ValueError, match=match):
        run(model=spoiled(change, at=3, table=table), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_where_no_output_is_needed_is_ignored(backend):
    """Beyond the end of a game the model is called, but its outputs are ignored."""

    def model(embedding, action):
        rows = len(action)
        value = torch.where(embedding > 0, torch.nan, 1.0)
        mask = torch.zeros(rows, A, dtype=torch.bool)
        return RecurrentOutput(value, value, torch.zeros(rows, A), mask=mask), embedding + 1

    start = RootOutput(torch.zeros(B, A), torch.zeros(B), torch.zeros(B))
    tree = run(start, model, num_simulations=12, backend=backend)
    assert tree.visits_of_root().tolist() == [[4, 4, 4]] * B
    assert not tree.value().isnan().any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("field", "tensor", "match"),
    [
        ("reward", torch.zeros(()), r"reward \[\] \(needed \[4\]\)"),
        ("value", torch.zeros(B + 1), r"value \[5\] \(needed \[4\]\)"),
        ("prior_logits", torch.zeros(A, B), r"prior_logits \[3, 4\] \(needed \[4, 3\]\)"),
        ("discount", torch.ones(1), r"discount \[1\] \(needed \[4\]\)"),
        ("mask", torch.ones(1, A).bool(), r"mask \[1, 3\] \(needed \[4, 3\]\)"),
        ("to_play", torch.ones(B, 1).long(), r"to_play \[4, 1\] \(needed \[4\]\)"),
        ("actions", torch.ones(1, A).long(), r"actions \[1, 3\].*\(needed \[4, 3\]"),
        ("actions", torch.ones(B, A), r"actions \[4, 3\], torch.float32 \(needed.*int64"),
    ],
)
def test_an_output_of_another_shape_is_refused(field, tensor, match, backend):
    extra = {"to_play": {"players": True}, "actions": {"labels": True}}.get(field, {})
    table = random_table(0, **extra)
    model = spoiled(with_field(field, tensor), at=1, table=table)
    with pytest.raises(ValueError, match=match):
        run(table.root(STATES), model, backend=backend)
    with pytest.raises(TypeError, match=r"mask.*bool"):
        run(model=spoiled(with_field("mask", torch.ones(B, A))), backend=backend)


def test_players_and_sampled_actions_must_be_in_root_and_outputs():
    for name, kind in (("to_play", "players"), ("actions", "labels")):
        table = random_table(0, **{kind: True})
        with pytest.raises(ValueError, match=f"output has {name}, but the root does not"):
            run(table.root(STATES)._replace(**{name: None}), table)
    model = spoiled(with_field("actions", None), table=table)
    with pytest.raises(ValueError, match="the root has actions, but the model's output does not"):
        run(table.root(STATES), model)


KINDS = [
    (lambda out, emb: (emb["prefix"], out), "returned a Tensor instead of a RecurrentOutput"),
    (lambda out, emb: (tuple(out)[:3], emb), "returned a tuple instead of a RecurrentOutput"),
    (lambda out, emb: out, "it must return two things"),
    (lambda out, emb: None, "returned a NoneType; it must return two things"),
    (lambda out, emb: (out._replace(reward=1.0), emb), "has reward a float"),
    (lambda out, emb: (out._replace(value=None), emb), "has value a NoneType"),
    (lambda out, emb: (out._replace(mask=[True]), emb), "has mask a list"),
]


@pytest.mark.parametrize(("change", "match"), KINDS)
def test_outputs_of_a_wrong_type_are_refused(change, match):
    with pytest.raises(TypeError, match=match):
        run(model=spoiled(change))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("embedding", "match"),
    [
        (torch.zeros(B), "is a Tensor and the root's a dict"),
        ({"prefix": torch.zeros(B), "other": torch.zeros(B)}, "structures differ"),
        ({name: torch.zeros(B) for name in ("state", "prefix", "more")}, "structures differ"),
        (
            {"state": torch.zeros(B), "prefix": torch.zeros(B)},
            r"given 4 rows.*\['state'\].*torch.float32, cpu \(needed \[4\], torch.int64",
        ),
        (
            {"state": torch.zeros(1).long(), "prefix": torch.zeros(1)},
            r"given 4 rows.*\['state'\] of shape \[1\]",
        ),
        (
            {"state": torch.zeros(B).long(), "prefix": torch.zeros(B, device="meta")},
            r"torch.float32, meta \(needed \[4\], torch.float32, cpu",
        ),
    ],
)
def test_an_embedding_of_another_kind_is_refused(embedding, match, backend):
    def change(output, after):
        return output, embedding

    with pytest.raises(ValueError, match=match):
        run(model=spoiled(change, at=2), backend=backend)


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_an_entry_too_many_is_refused_wherever_it_is(kind):
    def embedding(num):
        inner = [torch.zeros(B)] * num
        return {"a": dict(enumerate(inner)) if kind is dict else kind(inner), "b": torch.zeros(B)}

    def model(_, action):
        rows = len(action)
        output = RecurrentOutput(torch.zeros(rows), torch.zeros(rows), torch.zeros(rows, A))
        return output, embedding(given)

    given = 2
    run(root(embedding=embedding(2)), model)
    given = 3
    with pytest.raises(ValueError, match="structures differ"):
        run(root(embedding=embedding(2)), model)


def test_a_tensordict_that_lacks_an_entry():
    here = TensorDict(a=torch.zeros(B), b=torch.zeros(B), batch_size=[B])

    def model(embedding, action):
        rows = len(action)
        output = RecurrentOutput(torch.zeros(rows), torch.zeros(rows), torch.zeros(rows, A))
        return output, embedding.select("a")

    with pytest.raises(ValueError, match=r"lacks \[.*'b'.*\].*entries are.*a"):
        run(root(embedding=here), model)
