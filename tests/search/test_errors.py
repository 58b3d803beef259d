"""What does not fit is refused with what was seen and what is needed; nothing given is changed."""

import pytest
import torch

from raffia.search import (
    PUCT,
    Gumbel,
    RecurrentOutput,
    RootOutput,
    ValuePrefix,
    dirichlet_noise,
    gumbel_policy,
    muzero_policy,
    sample_visits,
    search,
)
from raffia.tensordict import TensorDict

from .table import random_table

B, A = 4, 3
STATES = torch.arange(B)
BACKENDS = ("reference", "compiled")


def run(root=None, model=None, **settings):
    table = random_table(0)
    settings = {"num_simulations": 6} | settings
    root = table.root(STATES) if root is None else root
    return search(root, table if model is None else model, **settings)


def root(**fields) -> RootOutput:
    return random_table(0).root(STATES)._replace(**fields)


# -- the root


@pytest.mark.parametrize("policy", [search, muzero_policy, gumbel_policy])
def test_a_root_without_a_legal_action(policy):
    mask = torch.ones(B, A, dtype=torch.bool)
    mask[1] = mask[3] = False
    with pytest.raises(ValueError, match=r"no legal action at roots \[1, 3\].*root\.mask"):
        policy(root(mask=mask), random_table(0), num_simulations=6)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("field", ["value", "prior_logits"])
def test_a_root_of_nan_or_infinity(field, wrong):
    tensor = getattr(root(), field).clone()
    tensor[2] = wrong
    with pytest.raises(ValueError, match=rf"root\.{field} is NaN or infinite for root 2"):
        run(root(**{field: tensor}))


def test_a_root_value_of_minus_infinity():
    value = torch.zeros(B)
    value[1] = -torch.inf
    with pytest.raises(ValueError, match=r"root\.value is NaN or infinite for root 1"):
        run(root(value=value))


def test_nan_logits_of_illegal_actions_are_no_matter():
    logits, mask = torch.zeros(B, A), torch.ones(B, A, dtype=torch.bool)
    logits[2, 1], mask[2, 1] = torch.nan, False
    for backend in BACKENDS:
        tree = run(root(prior_logits=logits, mask=mask), backend=backend)
        assert not tree.data["prior"].isnan().any()
        assert tree.visits_of_root()[2, 1] == 0


@pytest.mark.parametrize(
    ("field", "tensor", "match"),
    [
        ("prior_logits", torch.zeros(A), r"root\.prior_logits has shape \[3\].*unsqueeze\(0\)"),
        ("prior_logits", torch.zeros(0, A), r"root\.prior_logits has shape \[0, 3\]"),
        ("prior_logits", torch.zeros(B, 0), r"root\.prior_logits has shape \[4, 0\]"),
        ("value", torch.zeros(B, 1), r"root\.value has shape \[4, 1\].*\[4\]"),
        ("value", torch.zeros(B + 1), r"root\.value has shape \[5\].*\[4\]"),
        ("mask", torch.ones(B, A + 1).bool(), r"root\.mask has shape \[4, 4\].*\[4, 3\]"),
        ("mask", torch.ones(A).bool(), r"root\.mask has shape \[3\].*\[4, 3\]"),
        ("to_play", torch.ones(B, 1).long(), r"root\.to_play has shape \[4, 1\].*\[4\]"),
        ("actions", torch.ones(B, A + 2, 2), r"root\.actions has shape \[4, 5, 2\].*\[4, 3\]"),
        ("embedding", torch.zeros(B + 1, 2), r"embedding has shape \[5, 2\].*4 roots"),
        ("embedding", {"a": {"b": torch.zeros(1)}}, r"\['a'\]\['b'\].*shape \[1\].*4 roots"),
        ("embedding", torch.tensor(1.0), r"embedding has shape \[\].*4 roots"),
    ],
)
def test_a_root_s_field_of_another_shape(field, tensor, match):
    with pytest.raises(ValueError, match=match):
        run(root(**{field: tensor}))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
def test_a_mask_that_is_not_bool(dtype):
    with pytest.raises(TypeError, match=r"root\.mask is torch\..*mask\.bool\(\)"):
        run(root(mask=torch.ones(B, A, dtype=dtype)))


def test_an_embedding_that_holds_no_tensors():
    with pytest.raises(TypeError, match=r"\['a'\] of root\.embedding is a list|is a str|is a int"):
        run(root(embedding={"a": 3}))


# -- settings


@pytest.mark.parametrize("number", [0, -1, torch.tensor([6, 6, 0, 6])])
def test_no_simulations(number):
    with pytest.raises(ValueError, match="num_simulations=.*at least 1"):
        run(num_simulations=number)


@pytest.mark.parametrize("number", [2.5, 3.0, True, torch.tensor([1.0, 2.0, 3.0, 4.0])])
def test_simulations_that_are_no_whole_number(number):
    with pytest.raises(TypeError, match="num_simulations is torch.*whole number"):
        run(num_simulations=number)


@pytest.mark.parametrize("shape", [(1,), (B + 1,), (B, 1)])
def test_per_root_settings_of_another_shape(shape):
    seen = rf"\[{', '.join(map(str, shape))}\].*4 roots"
    with pytest.raises(ValueError, match="num_simulations has shape " + seen):
        run(num_simulations=torch.ones(shape, dtype=torch.long))
    with pytest.raises(ValueError, match="discount has shape " + seen):
        run(discount=torch.ones(shape))


@pytest.mark.parametrize(
    "discount", [-0.1, 1.001, torch.nan, torch.tensor([0.9, 0.9, 2.0, 0.9]), torch.inf]
)
def test_a_discount_outside_0_to_1(discount):
    with pytest.raises(ValueError, match=r"discount=.* must lie in 0\.\.1"):
        run(discount=discount)


@pytest.mark.parametrize("depth", [0, -3])
def test_no_depth(depth):
    with pytest.raises(ValueError, match=f"max_depth={depth} must be at least 1"):
        run(max_depth=depth)


def test_names_of_options_that_do_not_exist():
    with pytest.raises(ValueError, match="root_value='mean' is none of 'exclude'"):
        run(root_value="mean")
    with pytest.raises(ValueError, match="backend='numba' is none of 'auto'"):
        run(backend="numba")
    with pytest.raises(ValueError, match=r"first_visit='random' is none of.*PUCT\("):
        PUCT(first_visit="random")
    with pytest.raises(ValueError, match="normalize='min_max' is none of"):
        PUCT(normalize="min_max")
    with pytest.raises(ValueError, match="ties='first' is none of"):
        PUCT(ties="first")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"c_base": 0.0}, "c_base=0.0"),
        ({"min_range": -1.0}, "min_range=-1.0"),
        ({"min_range": float("nan")}, "min_range=nan"),
        ({"root_in_range": True, "normalize": "tree"}, "normalize='running'"),
        ({"ties": "random"}, "tie_seed"),
        ({"tie_seed": torch.zeros(B, dtype=torch.long)}, "ties='lowest'.*tie_seed"),
    ],
)
def test_options_of_puct_that_do_not_go_together(options, match):
    with pytest.raises(ValueError, match=match):
        PUCT(**options)


def test_draws_of_another_size():
    with pytest.raises(ValueError, match=r"tie_seed has shape \(5,\).*4 roots"):
        run(select=PUCT(ties="random", tie_seed=torch.zeros(5, dtype=torch.long)))
    with pytest.raises(ValueError, match=r"root_gumbel has shape \(4, 2\).*\[4, 3\]"):
        run(select=Gumbel(root_gumbel=torch.zeros(B, 2)))
    with pytest.raises(ValueError, match=r"root_gumbel has shape \(4, 2\).*\[4, 3\]"):
        gumbel_policy(root(), random_table(0), 4, root_gumbel=torch.zeros(B, 2))
    for name in ("dirichlet", "action_gumbel"):
        with pytest.raises(ValueError, match=rf"{name} has shape \[3, 3\].*\[4, 3\]"):
            muzero_policy(root(), random_table(0), 4, **{name: torch.zeros(3, 3)})


def test_draws_that_cannot_be():
    with pytest.raises(ValueError, match="root_gumbel holds NaN or infinity"):
        run(select=Gumbel(root_gumbel=torch.full((B, A), torch.inf)))
    with pytest.raises(ValueError, match="max_considered=0 must be at least 1"):
        gumbel_policy(root(), random_table(0), 4, max_considered=0)
    with pytest.raises(ValueError, match=r"dirichlet_fraction=1\.5 must lie in 0\.\.1"):
        muzero_policy(root(), random_table(0), 4, dirichlet_fraction=1.5)
    with pytest.raises(ValueError, match="dirichlet is given and dirichlet_fraction=0"):
        noise = torch.full((B, A), 1 / A)
        muzero_policy(root(), random_table(0), 4, dirichlet_fraction=0.0, dirichlet=noise)
    with pytest.raises(ValueError, match="temperature=-1.0 must not be negative"):
        muzero_policy(root(), random_table(0), 4, temperature=-1.0)
    with pytest.raises(ValueError, match="alpha=0.0 must be above 0"):
        dirichlet_noise(torch.ones(B, A, dtype=torch.bool), 0.0)
    with pytest.raises(ValueError, match=r"gumbel=gumbel_noise\(shape\)"):
        sample_visits(torch.ones(B, A), 1.0)


def test_transpositions_over_value_prefixes():
    with pytest.raises(ValueError, match="transpositions and value_prefix exclude each other"):
        run(transpositions=lambda e: e["state"], value_prefix=ValuePrefix(5, ("prefix",)))


def test_value_prefixes_that_cannot_be_reset():
    with pytest.raises(ValueError, match="horizon=0 must be at least 1"):
        ValuePrefix(horizon=0)
    with pytest.raises(KeyError, match=r"resets .*reward_hidden_state.*state.*prefix"):
        run(value_prefix=ValuePrefix(5))
    embedding = TensorDict(latent=torch.zeros(B, 2), batch_size=[B])
    with pytest.raises(KeyError, match=r"resets .*reward_hidden_state.*latent"):
        run(root(embedding=embedding), value_prefix=ValuePrefix(5))


def test_kernels_for_a_selection_of_one_s_own():
    def select(nodes, carry):
        return nodes.prior.argmax(-1), carry

    with pytest.raises(ValueError, match="backend='compiled'.*PUCT.*Gumbel.*backend='auto'"):
        run(select=select, backend="compiled")
    assert run(select=select, backend="auto").visits_of_root().sum() == 6 * B


# -- the model


def spoiled(change, *, at=0, table=None):
    """A model whose answer is changed from simulation `at` on."""
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
        (field, wrong)
        for field in ("reward", "value", "prior_logits", "discount")
        for wrong in (torch.nan, torch.inf, -torch.inf)
        if (field, wrong) != ("prior_logits", -torch.inf)  # an action without prior
    ],
)
def test_nan_or_infinity_of_the_model_is_named_by_root_and_simulation(field, wrong, backend):
    def change(output, after):
        tensor = getattr(output, field).clone()
        tensor.view(B, -1)[2, -1] = wrong
        return output._replace(**{field: tensor}), after

    table = random_table(0, discounts=True)
    match = f"the model's {field} is NaN or infinite for root 2 in simulation 3"
    with pytest.raises(ValueError, match=match):
        run(model=spoiled(change, at=3, table=table), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_root_named_is_the_caller_s_where_roots_are_searched_in_another_order(backend):
    def change(output, after):
        value = torch.full_like(output.value, torch.nan)
        return output._replace(value=value), after

    with pytest.raises(ValueError, match="for root 2 in simulation 4"):
        model = spoiled(change, at=4)
        run(model=model, num_simulations=torch.tensor([2, 1, 6, 3]), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_where_no_answer_is_needed_is_no_matter(backend):
    """Beyond the end of a game the model is asked, but not heard."""

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
        ("reward", torch.zeros(B, 1), r"reward \[4, 1\] \(needed \[4\]\)"),
        ("reward", torch.zeros(()), r"reward \[\] \(needed \[4\]\)"),
        ("value", torch.zeros(B + 1), r"value \[5\] \(needed \[4\]\)"),
        ("prior_logits", torch.zeros(B, A + 1), r"prior_logits \[4, 4\] \(needed \[4, 3\]\)"),
        ("prior_logits", torch.zeros(A, B), r"prior_logits \[3, 4\] \(needed \[4, 3\]\)"),
        ("discount", torch.ones(1), r"discount \[1\] \(needed \[4\]\)"),
        ("mask", torch.ones(1, A).bool(), r"mask \[1, 3\] \(needed \[4, 3\]\)"),
        ("to_play", torch.ones(B, 1).long(), r"to_play \[4, 1\] \(needed \[4\]\)"),
        ("actions", torch.ones(B, A + 1).long(), r"actions \[4, 4\].*\(needed \[4, 3\]"),
        ("actions", torch.ones(1, A).long(), r"actions \[1, 3\].*\(needed \[4, 3\]"),
        ("actions", torch.ones(B, A), r"actions \[4, 3\], torch.float32 \(needed.*int64"),
    ],
)
def test_an_answer_of_another_shape(field, tensor, match, backend):
    extra = {"to_play": {"players": True}, "actions": {"labels": True}}.get(field, {})
    table = random_table(0, **extra)
    model = spoiled(with_field(field, tensor), at=1, table=table)
    with pytest.raises(ValueError, match=match):
        run(table.root(STATES), model, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_of_the_model_that_is_not_bool(backend):
    model = spoiled(with_field("mask", torch.ones(B, A)))
    with pytest.raises(TypeError, match=r"mask.*bool"):
        run(model=model, backend=backend)


def test_players_of_the_model_only():
    table = random_table(0, players=True)
    with pytest.raises(ValueError, match="the model's answer has to_play and the root has not"):
        run(table.root(STATES)._replace(to_play=None), table)


def test_sampled_actions_in_one_place_only():
    table = random_table(0, labels=True)
    model = spoiled(with_field("actions", None), table=table)
    with pytest.raises(ValueError, match="the root has actions and the model's answer has not"):
        run(table.root(STATES), model)
    model = spoiled(with_field("actions", torch.zeros(B, A).long()))
    with pytest.raises(ValueError, match="the model's answer has actions and the root has not"):
        run(model=model)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("embedding", "match"),
    [
        (torch.zeros(B), "is a Tensor and the root's a dict"),
        ({"state": torch.zeros(B).long()}, "hold other parts"),
        ({"prefix": torch.zeros(B), "other": torch.zeros(B)}, "hold other parts"),
        (
            {"state": torch.zeros(B), "prefix": torch.zeros(B)},
            r"given 4 rows.*\['state'\].*torch.float32 \(needed \[4\], torch.int64\)",
        ),
        (
            {"state": torch.zeros(B).long(), "prefix": torch.zeros(B, 2)},
            r"\['prefix'\] of shape \[4, 2\], torch.float32 \(needed \[4\]",
        ),
        (
            {"state": torch.zeros(1).long(), "prefix": torch.zeros(1)},
            r"given 4 rows.*\['state'\] of shape \[1\]",
        ),
    ],
)
def test_an_embedding_of_another_kind(embedding, match, backend):
    def change(output, after):
        return output, embedding

    with pytest.raises(ValueError, match=match):
        run(model=spoiled(change, at=2), backend=backend)


def test_a_tensordict_that_lacks_an_entry():
    here = TensorDict(a=torch.zeros(B), b=torch.zeros(B), batch_size=[B])

    def model(embedding, action):
        rows = len(action)
        output = RecurrentOutput(torch.zeros(rows), torch.zeros(rows), torch.zeros(rows, A))
        return output, embedding.select("a")

    with pytest.raises(ValueError, match=r"lacks \[.*'b'.*\].*entries are.*a"):
        run(root(embedding=here), model)


def test_a_search_that_failed_has_changed_nothing_that_was_given():
    here = random_table(0).root(STATES)
    before = [t.clone() for t in (here.prior_logits, here.value, *here.embedding.values())]

    def change(output, after):
        after["state"].fill_(99)
        return output._replace(value=torch.full((B,), torch.nan)), after

    select = Gumbel(root_gumbel=torch.zeros(B, A))
    for backend in BACKENDS:
        with pytest.raises(ValueError, match="simulation 2"):
            run(here, spoiled(change, at=2), select=select, backend=backend)
        after = (here.prior_logits, here.value, *here.embedding.values())
        assert all(map(torch.equal, before, after))
        assert select.considered is None
        tree = run(here, select=select, backend=backend)  # and the same things can be used again
        assert tree.visits_of_root().sum() == 6 * B
