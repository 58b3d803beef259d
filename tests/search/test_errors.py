"""Errors name the value received and the value needed, by tables of calls."""

import functools

import pytest
import torch
from torch import nn

from raffia import TensorDict
from raffia.search import (
    PUCT,
    CategoricalSampler,
    FunctionModel,
    GaussianSampler,
    Gumbel,
    KeyedSearch,
    ValuePrefix,
    dirichlet_noise,
    gumbel_policy,
    muzero_policy,
    sample_visits,
    sampled_policy,
    search,
    with_sampled_actions,
)
from raffia.search.policies import root_dirichlet, root_gumbel

from .table import BACKENDS, STATES, A, B, random_table, root, run

NAN, INF = torch.nan, torch.inf
PLANS = (search, muzero_policy, gumbel_policy)
TABLE = random_table(0)
SEEDS, TWO = torch.arange(B), GaussianSampler(2)
QUIET = functools.partial(muzero_policy, num_simulations=4, dirichlet_fraction=0.0, temperature=0.0)


def bools(*shape):
    return torch.ones(shape, dtype=torch.bool)


def but(tensor, index, number):
    """The tensor with another number at one index."""
    tensor = tensor.clone()
    tensor[index] = number
    return tensor


def refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


# -- fields of a root, in all ways to plan

ROOTS = [
    (dict(mask=but(bools(B, A), [1, 3], False)), r"no legal action at roots \[1, 3\].*root\.mask"),
    (dict(prior_logits=torch.zeros(A)), r"root\.prior_logits has shape \[3\].*unsqueeze\(0\)"),
    (dict(prior_logits=torch.zeros(0, A)), r"root\.prior_logits has shape \[0, 3\]"),
    (dict(prior_logits=torch.zeros(B, 0)), r"root\.prior_logits has shape \[4, 0\]"),
    (dict(value=torch.zeros(B, 1)), r"root\.value has shape \[4, 1\].*\[4\]"),
    (dict(mask=bools(A)), r"root\.mask has shape \[3\].*\[4, 3\]"),
    (dict(to_play=torch.ones(B, 1).long()), r"root\.to_play has shape \[4, 1\].*\[4\]"),
    (dict(actions=torch.ones(B, A + 2, 2)), r"root\.actions has shape \[4, 5, 2\].*\[4, 3\]"),
    (dict(embedding={"a": {"b": torch.zeros(1)}}), r"\['a'\]\['b'\].*shape \[1\].*4 roots"),
    (dict(embedding=torch.tensor(1.0)), r"embedding has shape \[\].*4 roots"),
    (dict(value=torch.zeros(B).to("meta")), "root.value lies on meta and root.prior_logits on cpu"),
    (dict(to_play=torch.ones(B).to("meta")), "root.to_play lies on meta and root.prior_logits on"),
    *((dict(to_play=but(torch.ones(B), 1, n)), "pass to_play=None") for n in (-1, 3)),
]


@pytest.mark.parametrize(("fields", "match"), ROOTS)
def test_root_fields_that_do_not_fit_together_are_refused(fields, match):
    for plan in PLANS:
        refused(lambda plan=plan: plan(root(**fields), TABLE, num_simulations=6), ValueError, match)


def test_a_mask_that_is_not_bool_is_refused():
    here = root(mask=torch.ones(B, A, dtype=torch.uint8))
    for plan in PLANS:
        match = r"root\.mask is torch\..*mask\.bool\(\)"
        refused(lambda plan=plan: plan(here, TABLE, num_simulations=6), TypeError, match)


UNFIT_ROOTS = [
    (dict(value=but(torch.zeros(B), 2, NAN)), r"root\.value is NaN.* for root 2"),
    (dict(value=but(torch.zeros(B), 1, -INF)), r"root\.value is NaN or infinite for root 1"),
    (dict(prior_logits=but(torch.zeros(B, A), 2, INF)), r"root\.prior_logits is NaN.* for root 2"),
    (dict(prior_logits=torch.full((B, A), -INF)), "prior_logits is NaN, inf or -inf for all legal"),
]


@pytest.mark.parametrize(("fields", "match"), UNFIT_ROOTS)
def test_a_root_with_nan_or_infinity_is_refused(fields, match):
    for backend in BACKENDS:
        refused(lambda backend=backend: run(root(**fields), backend=backend), ValueError, match)


# -- everything else: (call, error, match)


def prefixes(embedding, action):
    return TABLE(embedding, action)


prefixes.predicts_prefixes = True
MASKED = root(mask=torch.tensor([[True, False, True]] * B))
KEYED = FunctionModel(lambda observation, mask=None: TABLE.root(observation, mask), TABLE)
TUPLES = FunctionModel(lambda observation: tuple(TABLE.root(observation)), TABLE)
TWO_ROWS = FunctionModel(lambda observation: TABLE.root(observation[:2]), TABLE)


class Always:
    """A selection of a user that chooses one action everywhere."""

    needs_logits, root_in_range = False, False

    def __init__(self, action, normalize="running"):
        self.action, self.normalize = action, normalize

    def prepare(self, num_legal, budget, num_actions, device):
        return self

    def __call__(self, nodes, carry):
        return torch.full_like(nodes.root, self.action), carry


def chosen(action, carry=None):
    """A search with a selection that always returns this."""
    answer = action if carry == "alone" else (action, carry)
    return lambda: run(MASKED, select=lambda nodes, carry: answer)


def muzero(**options):
    return lambda: muzero_policy(root(), TABLE, 4, **options)


def gumbel(**options):
    return lambda: gumbel_policy(root(), TABLE, 4, **options)


def sampled(here=None, sampler=TWO, seed=SEEDS, **options):
    here = walk_root() if here is None else here
    return lambda: with_sampled_actions(here, TABLE, sampler, seed, **options)


def walk_root(index=None, number=0.0):
    """Two means and two deviations for each root, one of them replaced."""
    parameters = torch.full((B, 4), 0.4)
    return root(prior_logits=parameters if index is None else but(parameters, index, number))


def keyed(model=KEYED, policy=QUIET, td=None, **options):
    """A planner that is made, and called if a container is given."""

    def call():
        plan = KeyedSearch(model, policy, **options)
        return plan if td is None else plan(td)

    return call


def states(num=B, **entries):
    return TensorDict(observation=STATES[:num], batch_size=[num], **entries)


def efficientzero():
    from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP

    KeyedSearch(
        EfficientZeroModelMLP(
            4, 3, latent_state_dim=8, lstm_hidden_size=6, self_supervised_learning_loss=False
        ),
        QUIET,
    )


class LinearModel(nn.Module):
    root = recurrent_fn = None


CALLS = [
    # kinds of roots and models
    (lambda: search({"value": 1}, TABLE, num_simulations=1), TypeError, "root is a dict; it must"),
    (lambda: run(root(value=[0.0])), TypeError, "root.value is a list; it must be a tensor"),
    (lambda: run(root(embedding={"a": 3})), TypeError, r"\['a'\] of root\.embedding is a int"),
    (lambda: run(model=prefixes), ValueError, r"pass value_prefix=ValuePrefix\(horizon=...\)"),
    # options of a search
    *(
        (lambda n=n: run(num_simulations=n), ValueError, "num_simulations=.*at least 1")
        for n in (0, torch.tensor([6, 6, 0, 6]))
    ),
    *(
        (lambda n=n: run(num_simulations=n), TypeError, "num_simulations has dtype torch.*integer")
        for n in (2.5, True, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    ),
    *(
        (
            lambda name=name, value=value: run(**{name: value}),
            ValueError,
            rf"{name} has shape \[{', '.join(map(str, value.shape))}\].*4 roots",
        )
        for name, value in (
            ("num_simulations", torch.ones(B + 1, dtype=torch.long)),
            ("discount", torch.ones(B, 1)),
        )
    ),
    *(
        (lambda n=n: run(discount=n), ValueError, r"discount=.* must be in 0\.\.1")
        for n in (-0.1, 1.001, NAN, torch.tensor([0.9, 0.9, 2.0, 0.9]))
    ),
    (lambda: run(max_depth=0), ValueError, "max_depth=0 must be at least 1"),
    (lambda: run(max_depth=1.5), TypeError, "max_depth=1.5 must be a whole number"),
    (lambda: run(root_value="mean"), ValueError, "root_value='mean' must be one of 'exclude'"),
    (lambda: run(backend="numba"), ValueError, "backend='numba' must be one of 'auto'"),
    (lambda: run(num_threads=0), ValueError, "num_threads=0 must be at least 1"),
    (lambda: run(value_prefix=5), TypeError, "value_prefix=5 must be a ValuePrefix"),
    (
        lambda: run(transpositions=lambda e: e["state"], value_prefix=ValuePrefix(5, ("prefix",))),
        *(ValueError, "transpositions and value_prefix cannot be combined"),
    ),
    (lambda: ValuePrefix(horizon=0), ValueError, "horizon=0 must be at least 1"),
    (lambda: ValuePrefix(5, "lstm"), TypeError, r"reset_keys=\('lstm',\)"),
    (
        lambda: run(value_prefix=ValuePrefix(5)),
        *(KeyError, r"resets .*reward_hidden_state.*state.*prefix"),
    ),
    (
        lambda: run(
            root(embedding=TensorDict(latent=torch.zeros(B, 2), batch_size=[B])),
            value_prefix=ValuePrefix(5),
        ),
        *(KeyError, r"resets .*reward_hidden_state.*latent"),
    ),
    # selections
    (lambda: PUCT(first_visit="no"), ValueError, r"first_visit='no' must be one of.*PUCT\("),
    (lambda: PUCT(normalize="min_max"), ValueError, "normalize='min_max' must be one of"),
    (lambda: PUCT(ties="first"), ValueError, "ties='first' must be one of"),
    (lambda: PUCT(c_base=0.0), ValueError, "c_base=0.0"),
    (lambda: PUCT(c_base=INF), ValueError, "c_base=inf .* c_base finite"),
    (lambda: PUCT(c_init=NAN), ValueError, "c_init=nan"),
    (lambda: PUCT(min_range=-1.0), ValueError, "min_range=-1.0"),
    (lambda: PUCT(root_in_range=True, normalize="tree"), ValueError, "normalize='running'"),
    (lambda: PUCT(ties="random"), ValueError, "tie_seed"),
    (lambda: PUCT(tie_seed=SEEDS), ValueError, "ties='lowest'.*tie_seed"),
    (
        lambda: run(select=PUCT(ties="random", tie_seed=torch.zeros(5, dtype=torch.long))),
        *(ValueError, r"tie_seed is torch.int64 \[5\].*4 roots"),
    ),
    (
        lambda: run(select=PUCT(ties="random", tie_seed=torch.zeros(4))),
        *(ValueError, r"tie_seed is torch.float32 \[4\].*pass an int64 tensor \[4\]"),
    ),
    (lambda: root_gumbel(SEEDS.int(), 3), ValueError, r"torch.int32 \[4\]; it must be int64"),
    (lambda: root_dirichlet(SEEDS.int(), 3, 0.3), ValueError, r"torch.int32 \[4\]; it must be"),
    (lambda: run(select=Gumbel(root_gumbel=torch.zeros(B, 2))), ValueError, r"\(4, 2\).*\[4, 3\]"),
    (
        lambda: run(select=Gumbel(root_gumbel=torch.full((B, A), INF))),
        *(ValueError, "root_gumbel holds NaN or infinity"),
    ),
    (
        lambda: run(select=lambda nodes, carry: nodes.prior.argmax(-1), backend="compiled"),
        *(ValueError, "backend='compiled'.*PUCT.*Gumbel.*backend='auto'"),
    ),
    (chosen(torch.zeros(B).long(), "alone"), TypeError, "must return .action, carry."),
    (chosen(torch.zeros(B)), TypeError, "float32 as actions"),
    (chosen(torch.zeros(1).long()), ValueError, "for 4 nodes"),
    (chosen(torch.full((B,), -1)), ValueError, "be in 0..2"),
    (chosen(torch.full((B,), 1)), ValueError, "some of which are illegal"),
    (lambda: run(MASKED, select=Always(1)), ValueError, "some of which are illegal"),
    (lambda: run(select=Always(-1)), ValueError, "be in 0..2"),
    (lambda: run(select=Always(0, "sibling")), ValueError, "did you mean 'siblings'"),
    (lambda: run(select=PUCT), TypeError, r"the class PUCT; pass PUCT\(...\)"),
    # policies and their noise
    (gumbel(max_considered=0), ValueError, "max_considered=0 must be at least 1"),
    (gumbel(max_considered=2.5), TypeError, "max_considered=2.5 must be a whole number"),
    (gumbel(gumbel_scale=torch.ones(A)), ValueError, r"gumbel_scale has shape \[3\].*4 roots"),
    (lambda: gumbel_policy({}, TABLE, 4), TypeError, "root is a dict; it must be a RootOutput"),
    (gumbel(value_scale=NAN), ValueError, "value_scale=nan"),
    (muzero(dirichlet=torch.zeros(3, 3)), ValueError, r"dirichlet has shape \[3, 3\].*\[4, 3\]"),
    (muzero(action_gumbel=torch.zeros(3, 3)), ValueError, r"action_gumbel has shape \[3, 3\].*\[4"),
    (muzero(action_gumbel=torch.full((B, A), NAN)), ValueError, "action_gumbel holds NaN"),
    (muzero(dirichlet_fraction=1.5), ValueError, r"dirichlet_fraction=1\.5 must be in 0\.\.1"),
    (
        muzero(dirichlet_fraction=0.0, dirichlet=torch.full((B, A), 1 / A)),
        *(ValueError, "dirichlet was passed, but dirichlet_fraction=0"),
    ),
    *(
        (muzero(dirichlet=noise), ValueError, "sum to 1 over the legal actions")
        for noise in (torch.tensor([[5.0, -4.0, 0.0]] * B), torch.ones(B, A))
    ),
    *(
        (muzero(temperature=n), ValueError, "temperature=.* must be finite and not negative")
        for n in (NAN, INF, torch.tensor([1.0, 0.0, INF, 1.0]))
    ),
    (muzero(temperature=torch.ones(3)), ValueError, r"temperature has shape \[3\].*4 roots"),
    (lambda: dirichlet_noise(bools(B, A), 0.0), ValueError, "alpha=0.0 must be above 0"),
    (lambda: sample_visits(torch.ones(B, A), 1.0), ValueError, r"gumbel=gumbel_noise\(shape\)"),
    # sampled actions
    (sampled(seed=torch.zeros(B)), ValueError, r"torch.float32 \[4\]; it must be int64 \[4\]"),
    (sampled(seed=torch.arange(3)), ValueError, r"torch.int64 \[3\]; it must be int64 \[4\]"),
    (sampled(prior="dense"), ValueError, "'dense' must be one of 'sampling'"),
    (lambda: with_sampled_actions(*sampled()(), TWO, SEEDS), ValueError, "sampled already"),
    (lambda: TWO.sample(torch.zeros(B, 3), SEEDS), ValueError, r"an odd number.*std="),
    (
        lambda: GaussianSampler(3).sample(torch.ones(B, 4), SEEDS, bools(B, 4)),
        *(ValueError, r"shape \[4, 4\].*\[rows, 1\]"),
    ),
    (
        lambda: GaussianSampler(5, std=torch.ones(2)).sample(torch.zeros(1, 3), SEEDS[:1]),
        *(ValueError, r"std has shape \[2\].*has 3 parameters"),
    ),
    (lambda: GaussianSampler(0), ValueError, "must be at least 1"),
    (lambda: CategoricalSampler(0), ValueError, "must be at least 1"),
    (lambda: GaussianSampler(2, low=1.0), ValueError, "pass both"),
    (lambda: GaussianSampler(2, low=1.0, high=torch.tensor([2.0, 1.0])), ValueError, "must lie"),
    (lambda: GaussianSampler(2, std=torch.tensor([1.0, 0.0])), ValueError, "must be above 0"),
    *(
        (sampled(walk_root((2, 3), std)), ValueError, r"of row 2 are \[0.4.*must be above 0")
        for std in (0.0, NAN)
    ),
    *(
        (sampled(walk_root((2, 0), NAN), sampler), ValueError, "means of row 2 .*must be finite")
        for sampler in (TWO, GaussianSampler(2, low=-1.0, high=1.0))
    ),
    *(
        (sampled(sampler=s), TypeError, f"sampler is {what}; pass an instance")
        for s, what in ((GaussianSampler, "the class GaussianSampler"), (20, "20"))
    ),
    # planners as modules
    (keyed(skip_ended=True), ValueError, "pass mask_key=..., and no tree_key"),
    (keyed(skip_ended=True, mask_key="mask", tree_key="tree"), ValueError, "pass mask_key="),
    (
        keyed(skip_ended=True, mask_key="mask", td=states(mask=torch.ones(B, A))),
        *(ValueError, r"float32 \[4, 3\].*needs a bool mask \[rows, actions\]"),
    ),
    (
        keyed(
            policy=functools.partial(sampled_policy, sampler=CategoricalSampler(3), policy=QUIET),
            **dict(skip_ended=True, mask_key="mask", td=states(mask=~bools(B, A))),
        ),
        *(ValueError, "all 4 rows have ended, and the shapes of sampled"),
    ),
    (keyed(mask_key="mask", td=states(mask=~bools(B, A))), ValueError, "no legal action"),
    (keyed(td=states(0)), ValueError, r"size \[0\] has no row to plan from"),
    (
        keyed(mask_key="action_mask", td=states(action_msk=bools(B, A))),
        *(KeyError, "KeyedSearch reads 'action_mask'.*Did you mean"),
    ),
    (keyed(generator="rng", td=states()), KeyError, "reads 'rng', which is not there"),
    (keyed(actions_key="sampled", td=states()), ValueError, "policy samples none"),
    (keyed(nn.Linear(3, 4)), TypeError, r"Linear has no root and no recurrent_fn.*FunctionModel"),
    (keyed(policy=50), TypeError, r"policy is a int.*functools.partial"),
    (keyed(out_keys=["action", "visits"]), ValueError, "2 keys; it must have one for each of"),
    (efficientzero, TypeError, r"EfficientZeroModelMLP is a network.*fold\(model\)"),
    (keyed(LinearModel), TypeError, r"model is the class LinearModel; .*LinearModel\(...\)"),
    (keyed(tree_key="visits"), ValueError, r"\['visits'\] would be written twice"),
    (keyed(TUPLES, td=states()), TypeError, "root returned a tuple; it must"),
    (keyed(TWO_ROWS, td=states()), ValueError, r"shape \[2, 3\] for 4 rows of observations"),
    (
        keyed(policy=functools.partial(search, num_simulations=3), td=states()),
        *(TypeError, "policy returned a Tree; it must return a PolicyOutput"),
    ),
]


@pytest.mark.parametrize(("call", "error", "match"), CALLS)
def test_invalid_calls_are_refused(call, error, match):
    refused(call, error, match)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("key", "match"),
    [
        (lambda e: e["state"].int(), r"\[4\], torch.int32 for 4 embeddings.*torch.int64"),
        (lambda e: e["state"][:1], r"\[1\], torch.int64 for 4 embeddings.*\[4\]"),
    ],
)
def test_invalid_keys_of_states_are_refused(key, match, backend):
    calls = []

    def late(embedding):  # the root's key is valid
        calls.append(1)
        return embedding["state"] if len(calls) == 1 else key(embedding)

    for keys in (key, late):
        refused(
            lambda keys=keys: run(transpositions=keys, backend=backend),
            *(ValueError, "transpositions returned " + match),
        )
