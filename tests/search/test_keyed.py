"""KeyedSearch: a planner that reads and writes entries, as any keyed module does."""

import functools

import pytest
import torch

from raffia import NonTensorData, TensorDict
from raffia.search import (
    FunctionModel,
    GaussianSampler,
    KeyedSearch,
    RecurrentOutput,
    RootOutput,
    dirichlet_noise,
    gumbel_noise,
    muzero_policy,
    sampled_policy,
)
from raffia.search.keyed import WRITTEN

from . import tictactoe
from .table import random_table

STATES, ACTIONS = 14, 5
TABLE = random_table(3, states=STATES, actions=ACTIONS)
QUIET = functools.partial(
    muzero_policy, num_simulations=12, dirichlet_fraction=0.0, temperature=0.0
)
NOISY = functools.partial(muzero_policy, num_simulations=12)


def table_root(observation, mask=None, to_play=None):
    return TABLE.root(observation, mask)._replace(to_play=to_play)


MODEL = FunctionModel(table_root, TABLE)


def states(*batch):
    numbers = torch.arange(torch.Size(batch).numel()) % STATES
    return TensorDict(observation=numbers.reshape(batch), batch_size=batch)


def test_other_keys_and_dropped_ones():
    keys = [("agent", "action"), "target", "_", "_", "_"]
    plan = KeyedSearch(MODEL, QUIET, in_keys=("state", "number"), out_keys=keys)
    assert plan.in_keys == [("state", "number")]
    td = TensorDict(state=dict(number=torch.arange(3)), batch_size=[3])
    plan(td)
    assert td["agent", "action"].shape == (3,) and td["target"].shape == (3, ACTIONS)
    assert set(td.keys()) == {"state", "agent", "target"}


@pytest.mark.parametrize("passed", [True, False])
def test_mask_and_player_apply_even_if_the_root_function_drops_them(passed):
    boards = tictactoe.positions()[0][:: tictactoe.positions()[0].shape[0] // 6][:6]
    td = TensorDict(
        observation=boards,
        action_mask=tictactoe.legal(boards),
        to_play=tictactoe.player(boards),
        batch_size=[6],
    )

    def root(observation, mask, to_play):
        fields = {"mask": mask, "to_play": to_play} if passed else {"mask": None, "to_play": None}
        return tictactoe.root_of(observation)._replace(**fields)

    plan = KeyedSearch(
        FunctionModel(root, tictactoe.rules), QUIET, mask_key="action_mask", to_play_key="to_play"
    )
    assert plan.in_keys == ["observation", "action_mask", "to_play"]
    direct = QUIET(tictactoe.root_of(boards), tictactoe.rules)
    assert plan(td)["visits"].equal(direct.tree.visits_of_root())
    assert not td["visits"][~td["action_mask"]].any()


def test_several_observations_and_containers_go_to_the_model():
    def root(number, extra):
        assert extra.batch_size == (6,)
        return TABLE.root((number + extra["shift"]) % STATES)

    td = states(2, 3)
    td["extra"] = TensorDict(shift=torch.ones(2, 3, dtype=torch.int64), batch_size=[2, 3])
    plan = KeyedSearch(FunctionModel(root, TABLE), QUIET, in_keys=["observation", "extra"])
    expected = KeyedSearch(MODEL, QUIET)(observation=(states(2, 3)["observation"].reshape(-1) + 1))
    assert plan(td)["action"].reshape(-1).equal(expected[0])


ENDED = torch.tensor([[False, True, False], [True, False, False]])


def with_ended_rows():
    td = states(2, 3)
    td["mask"] = ~ENDED.unsqueeze(-1) & (torch.arange(ACTIONS) != 1)
    td["dirichlet"] = dirichlet_noise(td["mask"])
    td["gumbel"] = gumbel_noise((2, 3, ACTIONS))
    td["budget"] = torch.tensor([[3, 4, 5], [6, 7, 8]])
    return td


def test_rows_that_have_ended_are_left_out():
    sizes = []

    def root(observation, mask):
        sizes.append(len(observation))
        return TABLE.root(observation, mask)

    keys = {"dirichlet": "dirichlet", "action_gumbel": "gumbel", "num_simulations": "budget"}
    model = FunctionModel(root, TABLE)
    plan = KeyedSearch(model, NOISY, mask_key="mask", policy_keys=keys, skip_ended=True)
    td = plan(with_ended_rows().clone())
    assert sizes == [4]
    for key in WRITTEN:
        assert (td[key][ENDED] == 0).all() and not td[key].isnan().any()
    assert td["visits"].sum(-1).equal(td["budget"].masked_fill(ENDED, 0))
    alone = plan(td.exclude(*WRITTEN)[0, 2].clone())
    for key in WRITTEN:
        assert alone[key].equal(td[0, 2][key])


def test_all_rows_have_ended():
    td, some = states(2, 3), KeyedSearch(MODEL, QUIET)(states(2, 3))
    td["mask"] = torch.zeros(2, 3, ACTIONS, dtype=torch.bool)
    KeyedSearch(MODEL, QUIET, mask_key="mask", skip_ended=True)(td)
    for key in WRITTEN:
        assert td[key].equal(torch.zeros_like(some[key])) and td[key].dtype == some[key].dtype


def test_sampled_actions_of_rows_that_have_ended():
    def root(observation, mask):
        rows = len(observation)
        return RootOutput(torch.ones(rows, 4), torch.zeros(rows), observation)

    def step(embedding, action):
        rows = len(action)
        return RecurrentOutput(action.sum(-1), torch.zeros(rows), torch.ones(rows, 4)), embedding

    policy = functools.partial(sampled_policy, sampler=GaussianSampler(3), policy=QUIET)
    plan = KeyedSearch(
        FunctionModel(root, step), policy, mask_key="mask", actions_key="sampled", skip_ended=True
    )
    mask = torch.tensor([[True], [False], [True]])
    td = plan(TensorDict(observation=torch.zeros(3, 1), mask=mask, batch_size=[3]))
    assert td["action"].shape == (3, 2) and td["sampled"].shape == (3, 3, 2)
    assert (td["sampled"] != 0).flatten(1).all(-1).tolist() == [True, False, True]


def test_a_seed_repeats_a_run():
    def run(generator, **entries):
        plan = KeyedSearch(MODEL, NOISY, generator=generator)
        assert plan.in_keys == ["observation"]
        td = states(5).update(entries)
        return torch.stack([plan(td)["action_weights"] for _ in range(2)]), td

    state = torch.get_rng_state()
    first = run(3)[0]
    assert first.equal(run(3)[0]) and not first.equal(run(4)[0]) and not first[0].equal(first[1])
    assert run(torch.Generator().manual_seed(3))[0].equal(first)
    (first, td), (second, other) = (run("seed", seed=NonTensorData(11)) for _ in range(2))
    assert first.equal(second) and not first[0].equal(first[1])
    assert td["seed"] == other["seed"] != 11  # one in an entry is used and replaced
    assert torch.get_rng_state().equal(state)
