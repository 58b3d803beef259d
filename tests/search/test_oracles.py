"""Searches on tables, recorded from LightZero's C++ trees and from mctx.

Recorded with LightZero 9f717c80 (blocks without its defects were computed apart; where it has
none, both agree) and mctx 0.0.71. A `trace` says for each simulation the node it started from,
its action and, in the first file, its depth.
"""

import json
import pathlib

import pytest
import torch

from raffia.search import PUCT, Tree, ValuePrefix, gumbel_policy, muzero_policy

from .table import BACKENDS, table_of

FOLDER = pathlib.Path(__file__).parent / "oracles"
EFFICIENTZERO = json.loads((FOLDER / "puct_efficientzero.json").read_text())["cases"]
MCTX = json.loads((FOLDER / "mctx_search.json").read_text())["cases"]

OPTIONS = {
    "reset_fixed": {"first_visit": "value", "root_in_range": True},
    "paper_minmax": {"first_visit": "value", "normalize": "tree"},
    "prior_first": {"root_in_range": True},
    "two_player_fixed": {"first_visit": "value"},
}


# what the reference is held to in the fast tests; the kernels are held to all
SAMPLE = ("small_no_reset_1", "legal_subset_1", "noise_legal_1", "reset_h3_2", "two_player_legal_2")


def param(name, backend, fast, *values):
    """A case; of those for the reference all but a few are slow."""
    marks = [] if backend == "compiled" or fast else [pytest.mark.slow]
    return pytest.param(*values, backend, id=f"{name}-{backend}", marks=marks)


BLOCKS = [
    param(f"{case['name']}-{block}", backend, case["name"] in SAMPLE, case, block)
    for case in EFFICIENTZERO
    for block in OPTIONS
    for backend in BACKENDS
    if case[block] is not None
]
TRACES = [
    param(case["name"], backend, case["name"] in SAMPLE, case)
    for case in EFFICIENTZERO
    for backend in BACKENDS
    if case["trace"] is not None
]
POLICIES = [
    param(case["name"], backend, case["sims"] <= 16, case) for case in MCTX for backend in BACKENDS
]


def efficientzero(case, options, backend, reset_keys=("prefix",)) -> Tree:
    """EfficientZero's search as the case has it, with options of ours."""
    states, players = torch.tensor(case["roots"]), torch.tensor(case["to_play"])
    two_players = bool((players > 0).any())
    table = table_of(case["table"], two_players=two_players, prefixed=True)
    if two_players:
        states = states + (players - 1) * len(case["table"]["next"])
    mask = torch.zeros(len(states), table.next.shape[1], dtype=torch.bool)
    noise = torch.zeros(mask.shape)
    for b, actions in enumerate(case["legal"]):
        mask[b, actions] = True
        if case["noise"]:
            noise[b, actions] = torch.tensor(case["noise"][b])
    return muzero_policy(
        table.root(states, mask),
        table,
        case["sims"],
        discount=case["discount"],
        value_prefix=ValuePrefix(case["horizon"], reset_keys),
        dirichlet=noise if case["noise"] else None,
        dirichlet_fraction=case["noise_weight"],
        temperature=0.0,
        root_value="zero",
        backend=backend,
        select=PUCT(
            c_init=case["pb_c_init"],
            c_base=case["pb_c_base"],
            **{"min_range": case["value_delta_max"]} | options,
        ),
    ).tree


def trace(tree: Tree, *names: str) -> list:
    """For each root and each simulation, entries of the node that it made."""
    return torch.stack([tree.data[name][:, 1:] for name in names], -1).tolist()


def visits_of_legal(tree: Tree, case) -> list:
    visits = tree.visits_of_root()
    return [visits[b, actions].tolist() for b, actions in enumerate(case["legal"])]


@pytest.mark.parametrize(("case", "block", "backend"), BLOCKS)
def test_efficientzero_search_gives_the_recorded_visits_and_values(case, block, backend):
    tree = efficientzero(case, OPTIONS[block], backend)
    expected = case[block]
    assert visits_of_legal(tree, case) == [root["visits"] for root in expected]
    value = torch.tensor([root["root_value"] for root in expected])
    torch.testing.assert_close(tree.value(), value, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(("case", "backend"), TRACES)
def test_efficientzero_search_takes_the_recorded_path_in_every_simulation(case, backend):
    tree = efficientzero(case, OPTIONS["reset_fixed"], backend)
    assert trace(tree, "parent", "action", "depth") == case["trace"]


def differing(block, options, reset_keys=("prefix",)) -> int:
    """How many of the recorded cases of a block a search with other options misses."""
    return sum(
        visits_of_legal(efficientzero(c, options, "compiled", reset_keys), c)
        != [root["visits"] for root in c[block]]
        for c in EFFICIENTZERO
        if c[block] is not None
    )


@pytest.mark.parametrize(
    ("block", "wrong"),
    [
        ("reset_fixed", {"first_visit": "value"}),
        ("reset_fixed", {"first_visit": "value", "normalize": "tree"}),
        ("reset_fixed", {"root_in_range": True}),
        ("reset_fixed", {"first_visit": "value", "root_in_range": True, "min_range": 1.0}),
        ("paper_minmax", {"first_visit": "value"}),
        ("paper_minmax", {"normalize": "tree"}),
        ("prior_first", {"first_visit": "value", "root_in_range": True}),
        ("two_player_fixed", {}),
    ],
)
def test_the_recorded_cases_tell_the_options_apart(block, wrong):
    assert differing(block, OPTIONS[block]) == 0
    assert differing(block, wrong) > 0


def test_the_recorded_cases_tell_whether_the_prefix_is_reset():
    assert differing("reset_fixed", OPTIONS["reset_fixed"], reset_keys=()) > 0


def mctx(case, backend, **options):
    """mctx's policy as the case has it."""
    table = table_of(case["table"])
    invalid = case["invalid_actions"]
    mask = None if invalid is None else ~torch.tensor(invalid).bool()
    root = table.root(torch.tensor(case["roots"]), mask)
    common = {"discount": case["discount"], "root_value": "include", "backend": backend} | options
    if case["mode"] == "muzero":
        select = PUCT(count_own=True, normalize="siblings")
        common = {"dirichlet_fraction": 0.0, "temperature": 0.0, "select": select} | common
        return muzero_policy(root, table, case["sims"], **common)
    return gumbel_policy(
        root,
        table,
        case["sims"],
        **{
            "root_gumbel": torch.tensor(case["root_gumbel"]),
            "max_considered": case["max_num_considered_actions"],
        }
        | common,
    )


@pytest.mark.parametrize(("case", "backend"), POLICIES)
def test_mctx_policies_are_met_in_tree_target_and_action(case, backend):
    plan, expected = mctx(case, backend), case["expected"]
    assert plan.tree.visits_of_root().tolist() == expected["visits"]
    assert trace(plan.tree, "parent", "action") == expected["trace"]
    for seen, name in (
        (plan.root_value, "root_value"),
        (plan.tree.value(), "root_value"),
        (plan.tree.qvalues(), "qvalues"),
        (plan.action_weights, "action_weights"),
    ):
        torch.testing.assert_close(
            seen, torch.tensor(expected[name]), rtol=1e-5, atol=1e-5, msg=lambda m, n=name: n + m
        )
    if expected["action"] is not None:  # not recorded where it is drawn
        assert plan.action.tolist() == expected["action"]


WRONG = {
    "gumbel": (
        {"root_value": "exclude"},
        {"max_considered": 3},
        {"value_scale": 0.2},
        {"maxvisit_init": 40.0},
        {"root_gumbel": None, "gumbel_scale": 0.0},
        {"discount": 0.5},
    ),
    "muzero": (
        {"root_value": "zero"},
        {"select": PUCT(count_own=True, normalize="siblings", first_visit="value")},
        {"select": PUCT(count_own=True)},
        {"discount": 0.5},
    ),
}


@pytest.mark.parametrize(
    ("mode", "wrong"), [(mode, wrong) for mode in WRONG for wrong in WRONG[mode]]
)
def test_the_recorded_policies_tell_the_options_apart(mode, wrong):
    cases = [c for c in MCTX if c["mode"] == mode and len(c["table"]["value"]) <= 64]

    def fits(case) -> bool:
        plan, expected = mctx(case, "compiled", **wrong), case["expected"]
        value = torch.tensor(expected["root_value"])
        weights = torch.tensor(expected["action_weights"])
        return (
            trace(plan.tree, "parent", "action") == expected["trace"]
            and torch.allclose(plan.root_value, value, rtol=1e-5, atol=1e-5)
            and torch.allclose(plan.action_weights, weights, rtol=1e-5, atol=1e-5)
        )

    assert not all(fits(case) for case in cases)
