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


# cases of the reference in the fast tests; the kernels run all
SAMPLE = ("small_no_reset_1", "legal_subset_1", "noise_legal_1", "reset_h3_2", "two_player_legal_2")


def param(name, backend, fast, *values):
    """A case; most cases of the reference are slow."""
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


def efficientzero(case, options, backend) -> Tree:
    """EfficientZero's search of a case, with our options."""
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
        value_prefix=ValuePrefix(case["horizon"], ("prefix",)),
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
    """For each root and each simulation, entries of the new node."""
    return torch.stack([tree.data[name][:, 1:] for name in names], -1).tolist()


@pytest.mark.parametrize(("case", "block", "backend"), BLOCKS)
def test_efficientzero_search_gives_the_recorded_visits_and_values(case, block, backend):
    tree, expected = efficientzero(case, OPTIONS[block], backend), case[block]
    visits = tree.visits_of_root()
    visits = [visits[b, actions].tolist() for b, actions in enumerate(case["legal"])]
    assert visits == [root["visits"] for root in expected]
    value = torch.tensor([root["root_value"] for root in expected])
    torch.testing.assert_close(tree.value(), value, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(("case", "backend"), TRACES)
def test_efficientzero_search_follows_the_recorded_path_in_every_simulation(case, backend):
    tree = efficientzero(case, OPTIONS["reset_fixed"], backend)
    assert trace(tree, "parent", "action", "depth") == case["trace"]


@pytest.mark.parametrize(("case", "backend"), POLICIES)
def test_mctx_policies_give_the_same_tree_target_and_action(case, backend):
    table, invalid, expected = table_of(case["table"]), case["invalid_actions"], case["expected"]
    mask = None if invalid is None else ~torch.tensor(invalid).bool()
    root = table.root(torch.tensor(case["roots"]), mask)
    options = {"discount": case["discount"], "root_value": "include", "backend": backend}
    if case["mode"] == "muzero":
        select = PUCT(count_own=True, normalize="siblings")
        options |= {"dirichlet_fraction": 0.0, "temperature": 0.0, "select": select}
        plan = muzero_policy(root, table, case["sims"], **options)
    else:
        options["root_gumbel"] = torch.tensor(case["root_gumbel"])
        options["max_considered"] = case["max_num_considered_actions"]
        plan = gumbel_policy(root, table, case["sims"], **options)
    assert plan.tree.visits_of_root().tolist() == expected["visits"]
    assert trace(plan.tree, "parent", "action") == expected["trace"]
    for found, name in (
        (plan.root_value, "root_value"),
        (plan.tree.value(), "root_value"),
        (plan.tree.qvalues(), "qvalues"),
        (plan.action_weights, "action_weights"),
    ):
        torch.testing.assert_close(
            found, torch.tensor(expected[name]), rtol=1e-5, atol=1e-5, msg=lambda m, n=name: n + m
        )
    if expected["action"] is not None:  # not recorded where it is drawn
        assert plan.action.tolist() == expected["action"]
