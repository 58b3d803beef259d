"""What does not fit is refused with what was seen and what is needed; nothing given is changed."""

import pytest
import torch

from raffia.search import (
    PUCT,
    Gumbel,
    ValuePrefix,
    dirichlet_noise,
    gumbel_policy,
    muzero_policy,
    sample_visits,
    search,
)
from raffia.tensordict import TensorDict

from .table import BACKENDS, A, B, random_table, root, run

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
    with pytest.raises(ValueError, match=rf"root\.{field} is NaN.* for root 2"):
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
@pytest.mark.parametrize("policy", [search, muzero_policy, gumbel_policy])
def test_a_root_s_field_of_another_shape(field, tensor, match, policy):
    with pytest.raises(ValueError, match=match):
        policy(root(**{field: tensor}), random_table(0), num_simulations=6)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
@pytest.mark.parametrize("policy", [search, muzero_policy, gumbel_policy])
def test_a_mask_that_is_not_bool(dtype, policy):
    mask = torch.ones(B, A, dtype=dtype)
    with pytest.raises(TypeError, match=r"root\.mask is torch\..*mask\.bool\(\)"):
        policy(root(mask=mask), random_table(0), num_simulations=6)


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
    for temperature in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=f"temperature={temperature} must not be negative"):
            muzero_policy(root(), random_table(0), 4, temperature=temperature)
    with pytest.raises(ValueError, match=r"temperature has shape \[3\].*4 roots"):
        muzero_policy(root(), random_table(0), 4, temperature=torch.ones(3))
    with pytest.raises(ValueError, match="alpha=0.0 must be above 0"):
        dirichlet_noise(torch.ones(B, A, dtype=torch.bool), 0.0)
    with pytest.raises(ValueError, match=r"gumbel=gumbel_noise\(shape\)"):
        sample_visits(torch.ones(B, A), 1.0)


def test_transpositions_over_value_prefixes():
    with pytest.raises(ValueError, match="transpositions and value_prefix exclude each other"):
        run(transpositions=lambda e: e["state"], value_prefix=ValuePrefix(5, ("prefix",)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("key", "match"),
    [
        (lambda e: e["state"].float(), r"\[4\], torch.float32 for 4 embeddings.*torch.int64"),
        (lambda e: e["state"].int(), r"\[4\], torch.int32 for 4 embeddings.*torch.int64"),
        (lambda e: e["state"][:1], r"\[1\], torch.int64 for 4 embeddings.*\[4\]"),
        (lambda e: e["state"].unsqueeze(-1), r"\[4, 1\], torch.int64 for 4 embeddings.*\[4\]"),
    ],
)
def test_keys_of_states_that_do_not_fit(key, match, backend):
    with pytest.raises(ValueError, match="transpositions gave " + match):
        run(transpositions=key, backend=backend)
    calls = []

    def late(embedding):  # the root's is as it should be
        calls.append(1)
        return embedding["state"] if len(calls) == 1 else key(embedding)

    with pytest.raises(ValueError, match="transpositions gave " + match):
        run(transpositions=late, backend=backend)


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
