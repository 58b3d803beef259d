"""Trees as a sequence of roots, of batches of any rank, and on disk."""

import functools
from itertools import islice

import pytest
import torch

from raffia.search import (
    FunctionModel,
    KeyedSearch,
    RecurrentOutput,
    RootOutput,
    Tree,
    muzero_policy,
    search,
)
from raffia.tensordict.memmap import DamagedFileError
from raffia.tensordict.tensordict import TensorDict

SIMULATIONS, ACTIONS = 7, 5


def outputs(state):
    """States are whole numbers; the logits depend on them, so that no two roots are equal."""
    logits = (state[:, None] * torch.arange(1.0, ACTIONS + 1)).sin()
    return RootOutput(logits, logits.mean(-1), state)


def move(state, action):
    after = 3 * state + action + 1
    at = outputs(after)
    return RecurrentOutput((action == 2).float(), at.value, at.prior_logits), after


def grown(num_roots=3, **options):
    return search(outputs(torch.arange(num_roots)), move, num_simulations=SIMULATIONS, **options)


def grown_with_container():
    """The embeddings are a TensorDict [B, N]."""

    def step(state, action):
        output, after = move(state["state"], action)
        return output, TensorDict(state=after, batch_size=after.shape)

    state = torch.arange(3)
    root = outputs(state)._replace(embedding=TensorDict(state=state, batch_size=[3]))
    return search(root, step, num_simulations=SIMULATIONS, keep_embeddings=True)


def same(a, b):
    """Equal entries, NaNs and infinities included."""
    assert a.batch_size == b.batch_size and set(a.data.keys()) == set(b.data.keys())
    for name, entry in a.data.items():
        torch.testing.assert_close(entry, b.data[name], rtol=0, atol=0, equal_nan=True)
    return True


# ------------------------------------------------------------------------ roots


def test_iteration_gives_the_roots():
    tree = grown(keep_embeddings=True)
    ones = list(islice(tree, 10))
    assert [len(one) for one in ones] == [1, 1, 1]
    for root, one in enumerate(ones):
        assert same(one, tree[root : root + 1])
        assert one.embeddings.equal(tree.embeddings[root : root + 1])


def test_an_empty_tree_can_be_shown_and_queried():
    tree = grown(keep_embeddings=True)[3:]
    assert repr(tree) == "Tree(0 roots, 7 simulations, 5 actions)"
    assert tree.value().shape == (0,) and tree.qvalues().shape == (0, 5) and list(tree) == []
    with pytest.raises(IndexError, match="root 0 is out of range: this tree has 0 roots"):
        tree[0]
    with pytest.raises(IndexError, match="root=0: this tree has 0 roots$"):
        tree.summary()
    assert repr(grown(1)).startswith("Tree(1 root, 7 simulations, 5 actions, deepest node ")


# ------------------------------------------------------------------------ batches of any rank


def test_a_batch_of_two_dimensions_is_read_as_its_rows():
    policy = functools.partial(
        muzero_policy, num_simulations=SIMULATIONS, dirichlet_fraction=0.0, temperature=0.0
    )
    plan = KeyedSearch(FunctionModel(outputs, move), policy, tree_key="tree")
    td = plan(TensorDict(observation=torch.arange(6).reshape(2, 3), batch_size=[2, 3]))
    tree = Tree(td["tree"])
    assert td["tree"].batch_size == (2, 3) and tree.batch_size == (6,)
    assert same(tree, Tree(td["tree"].reshape(-1)))
    assert tree.visits_of_root().equal(td["visits"].reshape(6, ACTIONS))
    assert tree.value().equal(td["root_value"].reshape(6))
    assert tree.qvalues().shape == (6, ACTIONS) and tree.node_values().shape == (6, 8)
    assert tree[4].summary() == Tree(td["tree"][1, 1:2]).summary()


@pytest.mark.parametrize("make", [lambda: grown(6, keep_embeddings=True), grown_with_container])
def test_embeddings_follow_the_batch(make):
    tree = make()
    half = len(tree) // 3
    data, embeddings = tree.data.reshape(half, 3), tree.embeddings.reshape(half, 3, SIMULATIONS + 1)
    again = Tree(data, embeddings)
    assert same(again, tree) and (again.embeddings == tree.embeddings).all()
    assert again.embeddings.shape == tree.embeddings.shape


# ------------------------------------------------------------------------ on disk


@pytest.mark.parametrize("name", ["tree.safetensors", "folder"])
@pytest.mark.parametrize("make", [grown, lambda: grown(keep_embeddings=True), grown_with_container])
def test_a_saved_tree_is_loaded(tmp_path, name, make):
    tree = make()
    tree.save(tmp_path / name)
    loaded = Tree.load(tmp_path / name)
    assert same(loaded, tree) and loaded.summary(2) == tree.summary(2)
    assert type(loaded.embeddings) is type(tree.embeddings) or name == "folder"
    if tree.embeddings is None:
        assert loaded.embeddings is None
    else:
        assert (loaded.embeddings == tree.embeddings).all()
        assert loaded.embeddings.shape == tree.embeddings.shape
        assert loaded[1:].embeddings.shape == (2, SIMULATIONS + 1)
    assert not tree.data.is_locked  # the saved tree is unchanged
    Tree.load(tmp_path / name)[1].save(tmp_path / "one.safetensors")
    assert same(Tree.load(tmp_path / "one.safetensors"), tree[1])


def test_other_embeddings_are_not_saved(tmp_path):
    tree = Tree(grown().data, embeddings=(torch.zeros(3, 8),))
    with pytest.raises(TypeError, match=r"embeddings are a tuple, .* tree\.data\.save\(path\)"):
        tree.save(tmp_path / "tree.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_files_without_a_saved_tree_are_refused(tmp_path):
    grown().data.save(tmp_path / "data.safetensors")
    with pytest.raises(ValueError, match=r"not written by Tree\.save; .* Tree\(TensorDict\.load"):
        Tree.load(tmp_path / "data.safetensors")
    with pytest.raises(FileNotFoundError):
        Tree.load(tmp_path / "nothing")
    (tmp_path / "broken.safetensors").write_bytes(b"\x08")
    with pytest.raises(DamagedFileError):
        Tree.load(tmp_path / "broken.safetensors")
