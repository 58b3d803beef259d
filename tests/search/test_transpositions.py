"""Nodes with the same state share statistics."""

import pytest
import torch

from raffia import TensorDict
from raffia.data import QueryModule
from raffia.search import RecurrentOutput, RootOutput, search, state_key

from . import tictactoe


def some_positions(num, empty):
    """Positions with `empty` empty squares, whose moves differ in value."""
    boards, worth = tictactoe.positions()
    best = worth.max(-1, keepdim=True).values
    open_ones = ((boards == 0).sum(-1) == empty) & ((worth < best) & (worth > -2)).any(-1)
    boards, worth = boards[open_ones], worth[open_ones]
    chosen = torch.randperm(len(boards), generator=torch.Generator().manual_seed(0))[:num]
    return boards[chosen], worth[chosen]


def plan(boards, key, simulations, backend="auto"):
    return search(
        tictactoe.root_of(boards),
        tictactoe.rules,
        num_simulations=simulations,
        discount=1.0,
        transpositions=key,
        backend=backend,
    )


def test_statistics_are_of_states_not_of_nodes():
    tree = plan(torch.zeros(1, 9, dtype=torch.int64), state_key(), 600)
    data = tree.data[0]
    made = torch.cat([torch.ones(1).bool(), data["parent"][1:] >= 0])
    num_states, num_nodes = len(data["key"][made].unique()), int(made.sum())
    counted = made & (data["canonical"] == torch.arange(601))
    assert num_states < 0.9 * num_nodes and int(counted.sum()) == num_states
    # each canonical row is the first of its key, and only those gather visits
    for row in made.nonzero().flatten().tolist():
        first = int((data["key"][: row + 1] == data["key"][row]).nonzero()[0])
        assert int(data["canonical"][row]) == first
        assert played(tree, row).equal(played(tree, first))
    assert not data["visits"][made & ~counted].any()


def test_both_backends_all_codes_and_repeated_roots_give_the_same_trees():
    boards, _ = some_positions(6, empty=7)
    first = plan(boards, state_key(), 100, "reference")
    for other in (
        plan(boards, state_key(), 100, "compiled"),
        plan(boards.repeat(2, 1), state_key(), 100)[6:],  # roots do not share with each other
        plan(boards, tictactoe.code, 100),
    ):
        for name in first.data.keys():
            assert first.data[name].equal(other.data[name]) or name == "key", name


def played(tree, node):
    board = torch.zeros(1, 9, dtype=torch.int64)
    for action in tree.path_to(0, node):
        board = tictactoe.play(board, torch.tensor([action]))
    return board


def ring(embedding, action):
    """Seven positions in a ring; one step to the left or right; position 3 pays 1 on entering."""
    position = (embedding + 2 * action - 1) % 7
    rows = len(position)
    return RecurrentOutput(
        (position == 3).float(), torch.zeros(rows), torch.zeros(rows, 2)
    ), position


def one_position(embedding, action):
    """A game whose position never changes; action 1 leaves the move to the same player."""
    player, position = embedding.unbind(-1)
    player = torch.where(action == 1, player, 3 - player)
    output = RecurrentOutput(
        reward=torch.zeros(len(action)),
        value=0.25 * player,
        prior_logits=torch.zeros(len(action), 3),
        to_play=player,
    )
    return output, torch.stack([player, position], -1)


@pytest.mark.parametrize("backend", ["reference", "compiled"])
def test_a_position_is_another_state_when_the_other_player_moves(backend):
    root = RootOutput(
        torch.zeros(1, 3), torch.zeros(1), torch.tensor([[1, 5]]), to_play=torch.tensor([1])
    )
    tree = search(
        *(root, one_position),
        num_simulations=30,
        discount=0.9,
        transpositions=lambda embedding: embedding[:, 1].clone(),  # the board without the player
        backend=backend,
    )
    data = tree.data[0]
    made = data["parent"] >= 0
    made[0] = True
    players, canonical = data["to_play"][made], data["canonical"][made].long()
    assert players.unique().tolist() == [1, 2] and canonical.unique().numel() == 2
    assert data["to_play"][canonical].equal(players)


@pytest.mark.parametrize("backend", ["reference", "compiled"])
def test_cycles_end(backend):
    root = RootOutput(torch.zeros(3, 2), torch.zeros(3), torch.tensor([0, 3, 5]))
    tree = search(
        root, ring, num_simulations=120, discount=1.0, transpositions=state_key(), backend=backend
    )
    assert (tree.visits_of_root().sum(-1) == 120).all()
    assert tree.value().isfinite().all() and (tree.value() <= 120).all()
    num_states = [len(row.unique()) for row in tree.data["key"]]
    assert all(num <= 8 for num in num_states)  # seven states, and 0 without a node
    assert tree.visits_of_root()[2].argmax() == 0  # from 5 to 3: two steps to the left


# ----------------------------------------------------------------------------------- keys


def partition(keys):
    """The partition into equal rows."""
    return keys.unsqueeze(0) == keys.unsqueeze(1)


def test_all_kinds_of_state_keys_find_the_same_equal_states():
    boards = tictactoe.positions()[0][:200].repeat(2, 1)
    td = TensorDict(
        board=boards, nested=TensorDict(ply=boards.sum(-1), batch_size=[400]), batch_size=[400]
    )
    expected = partition(tictactoe.code(boards))
    query = QueryModule(in_keys=["board"])
    for key, embedding in (
        (state_key(), boards),
        (state_key(), td),
        (state_key(), (boards, {"also": boards.float()})),
        (state_key("board"), td),
        (state_key("board"), {"board": boards}),
        (state_key("board", ("nested", "ply")), td),
        (state_key("board", ("nested", "ply")), {"board": boards, "nested": {"ply": boards[:, 0]}}),
        (state_key(query), td),
        (state_key(QueryModule(in_keys=["board"], exact=True)), td),
    ):
        keys = key(embedding)
        assert keys.dtype == torch.int64 and keys.shape == (400,) and keys.is_contiguous()
        assert partition(keys).equal(expected)
    assert len(query.hash_to_int) == 0  # only hashes were requested


def test_invalid_state_keys_are_refused():
    with pytest.raises(TypeError, match="state_key takes the names of entries or one QueryModule"):
        state_key("board", QueryModule(in_keys=["ply"]))
    with pytest.raises(TypeError, match=r"names an entry.*Tensor.*state_key\(\)"):
        state_key("board")(torch.zeros(3))
    with pytest.raises(KeyError, match='key "board" not found'):
        state_key("board")(TensorDict(bord=torch.zeros(3), batch_size=[3]))
    with pytest.raises(KeyError, match="holds no entry 'board'; it holds"):
        state_key("board")({"bord": torch.zeros(3)})
