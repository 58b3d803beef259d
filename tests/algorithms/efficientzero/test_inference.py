"""Snapshots for search: they give the model's outputs in eval mode, compiled or not."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn

from raffia.algorithms.efficientzero import (
    EfficientZeroModel,
    EfficientZeroModelMLP,
    fold,
    inference,
)
from raffia.algorithms.efficientzero.model_mlp import GELU
from raffia.search import (
    GaussianSampler,
    SearchMemory,
    ValuePrefix,
    gumbel_policy,
    muzero_policy,
    sampled_policy,
)
from raffia.search.mcts import Workspace
from raffia.tensordict import TensorDict

from .small import IMAGE, conv, drawn, draws

SMALL = {"latent_state_dim": 20, "lstm_hidden_size": 12, "self_supervised_learning_loss": False}
MLPS = {
    "residual": {"res_connection_in_dynamics": True},
    "plain": {"discrete_action_encoding_type": "not_one_hot"},
    "layer_norm": {"norm_type": "LN", "res_connection_in_dynamics": True},
    "sizes": {"latent_state_dim": 128, "lstm_hidden_size": 41, "reward_support_range": (-5, 6, 1)},
    "numbers": {"categorical_distribution": False, "value_head_hidden_channels": (9, 7)},
    "muzero": {"lstm_hidden_size": 0, "res_connection_in_dynamics": True},
    "muzero_plain": {"lstm_hidden_size": 0, "norm_type": "LN"},
    "gelu": {"activation": GELU, "res_connection_in_dynamics": True},
    "gelu_ln": {"activation": GELU, "norm_type": "LN", "res_connection_in_dynamics": True},
    "no_hidden": dict(latent_state_dim=24, policy_head_hidden_channels=(), latent_norm="SimNorm"),
}
UNCOMPILED = {
    "state_norm": {"state_norm": True},
    "activation": {"activation": nn.Tanh()},
    "one_category": {"reward_support_range": (2, 3, 1)},
}
IMAGES = {
    "board": {},
    "board_ln": {"norm_type": "LN"},
    "large": {"shape": (3, 70, 64), "downsample": True},
    "image_state_norm": {"state_norm": True},
    "image_muzero": {"lstm_hidden_size": 0},
}


def make(name="residual", **more):
    if name in IMAGES:
        return drawn(conv(last_linear_layer_init_zero=False, **IMAGES[name]))
    options = {**SMALL, "last_linear_layer_init_zero": False, **(MLPS | UNCOMPILED)[name], **more}
    return drawn(EfficientZeroModelMLP(4, 5, **options))


@pytest.fixture
def draw():
    return partial(torch.randn, generator=draws())


def embeddings(model, rows, draw):
    """Embeddings as if from the middle of a search."""
    size = model.lstm_hidden_size
    state = TensorDict({"h": draw(rows, size).tanh(), "c": draw(rows, size)}, [rows])
    latent = draw(rows, *model.latent_shape)
    return TensorDict({"latent_state": latent, "reward_hidden_state": state}, [rows])


def memory(model, batch, draw):
    """A search's memory with three rows for each root: parent, new node, unused."""
    nine, rows = torch.full((batch,), 9.0), torch.arange(batch)
    entries = dict(parent_row=3 * rows, node_row=3 * rows + 1, action=rows * 7 % 5)
    entries |= dict(reset=rows % 3 == 1, reward=nine, value=nine.clone())
    entries["prior_logits"] = torch.full((batch, 5), 9.0)
    return SearchMemory(embeddings=embeddings(model, 3 * batch, draw), **entries)


def expected(model, embedding, action):
    """Outputs of the model itself in eval mode, decoded."""
    state = embedding["reward_hidden_state", "h"], embedding["reward_hidden_state", "c"]
    with torch.no_grad():
        output = model.eval().recurrent_inference(
            embedding["latent_state"], tuple(part.unsqueeze(0) for part in state), action
        )
    reward, value = model.decode_reward(output.value_prefix), model.decode_value(output.value)
    h, c = (part.squeeze(0) for part in output.reward_hidden_state)
    return reward, value, output.policy_logits, output.latent_state, h, c


def flat(output, embedding):
    state, latent = embedding["reward_hidden_state"], embedding["latent_state"]
    return output.reward, output.value, output.prior_logits, latent, state["h"], state["c"]


def written(memory):
    return flat(memory, memory.embeddings[memory.node_row])


def close(found, expected, tolerance=1e-4):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["plain", "image_state_norm"])
def test_a_copy_in_bfloat16_gives_nearly_the_same_outputs(name, draw):
    """States are stored in bfloat16; values and logits come out in float32."""
    model = make(name)
    precise, folded = fold(model), fold(drawn(make(name), 1), dtype=torch.bfloat16)
    folded.refresh(model)
    obs = draw(3, *((4,) if name in MLPS else IMAGES[name].get("shape", IMAGE)))
    exact, rounded = precise.root(obs), folded.root(obs)
    close((rounded.value, rounded.prior_logits), (exact.value, exact.prior_logits), 0.05)
    assert {leaf.dtype for leaf in rounded.embedding.values(True, True)} == {torch.bfloat16}
    action = torch.tensor([4, 0, 2])
    expected = precise.recurrent_fn(exact.embedding, action)
    found = folded.recurrent_fn(rounded.embedding, action)
    assert {leaf.dtype for leaf in found[1].values(True, True)} == {torch.bfloat16}
    close(flat(*found)[:3], flat(*expected)[:3], 0.05)
    close([part.float() for part in flat(*found)[3:]], flat(*expected)[3:], 0.05)


@pytest.mark.parametrize("name", ["residual", "layer_norm", "board", "large", "image_state_norm"])
def test_a_folded_model_gives_the_model_s_outputs_in_eval_mode(name, draw):
    model = make(name).train()
    folded = fold(model)
    embedding, action = embeddings(model, 3, draw), torch.tensor([4, 0, 2])
    before = flat(*folded.recurrent_fn(embedding, action))
    close(before, expected(model, embedding, action))
    shape = (4,) if name in MLPS else IMAGES[name].get("shape", IMAGE)
    obs = draw(3, *shape)
    mask, to_play = torch.tensor([[True] * 4 + [False]] * 3), torch.tensor([1, 2, 1])
    root = folded.root(obs, mask, to_play)
    assert root.mask is mask and root.to_play is to_play and root.embedding.batch_size == (3,)
    with torch.no_grad():
        output = model.initial_inference(obs)
    assert root.embedding["reward_hidden_state", "h"].eq(0).all()
    found = root.value, root.prior_logits, root.embedding["latent_state"]
    close(found, (model.decode_value(output.value), output.policy_logits, output.latent_state))
    assert folded.recurrent_fn.predicts_prefixes and not root.value.requires_grad

    drawn(model, seed=1)  # the snapshot shares no memory with it
    close(flat(*folded.recurrent_fn(embedding, action)), before, 0)
    folded.refresh(model)
    close(flat(*folded.recurrent_fn(embedding, action)), expected(model, embedding, action))


@pytest.mark.parametrize("name", MLPS)
@pytest.mark.parametrize("batch", [1, 2, 70])
def test_the_compiled_step_equals_the_call(name, batch, draw):
    model = make(name)
    folded = fold(model)
    shared = memory(model, batch, draw)
    before = shared.embeddings.clone()
    called = flat(*folded.recurrent_fn(before[shared.parent_row], shared.action))
    folded.recurrent_fn.bind(shared)(batch)
    keep = (~shared.reset)[:, None].float()
    close(written(shared), (*called[:4], called[4] * keep, called[5] * keep), 5e-5)
    for row in (0, 2):  # the parents and the unused rows are as they were
        assert shared.embeddings[row::3]["latent_state"].equal(before[row::3]["latent_state"])
    fewer_rows = (1, 2, 3, 5, 8, 33) if name == "residual" and batch == 70 else ()
    for fewer in fewer_rows:  # the same bits in a smaller batch
        part = memory(model, batch, draw)
        part.embeddings.update_(before)
        folded.recurrent_fn.bind(part)(fewer)
        assert part.value[fewer:].eq(9).all()
        for found, expected in zip(written(part), written(shared), strict=True):
            assert found[:fewer].equal(expected[:fewer])


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda folded: pickle.loads(pickle.dumps(folded))]
)
def test_a_copy_of_a_used_snapshot_is_independent(copied, draw):
    obs, action, second = draw(3, 4), torch.tensor([0, 1, 1]), drawn(make(), seed=1)
    folded = fold(make())

    def plan(model):
        options = {"value_prefix": ValuePrefix(), "dirichlet_fraction": 0.0}
        root = model.root(obs)
        tree = muzero_policy(root, model.recurrent_fn, 9, **options).tree
        return tree.data["raw_value"], model.recurrent_fn(root.embedding, action)[0].value

    before = plan(folded)  # compiles
    other = copied(folded)
    close(plan(other), before, 0)
    other.refresh(second)
    close(plan(other), plan(fold(second)), 0)
    close(plan(folded), before, 0)


def test_models_without_a_compiled_step(draw):
    for name in (*UNCOMPILED, "board"):
        model = make(name)
        assert fold(model).recurrent_fn.bind(memory(model, 2, draw)) is None
    double = make().double()
    shared = memory(double, 2, draw)
    assert fold(double).recurrent_fn.bind(shared) is None
    zeros = torch.zeros(2, 4)
    assert fold(double).root(zeros.double()).value.dtype == torch.float64
    latent, bind = shared.embeddings["latent_state"], fold(make()).recurrent_fn.bind
    for other in (shared.embeddings.to(torch.float64), latent, TensorDict({"latent": latent}, [6])):
        assert bind(SearchMemory(**vars(shared) | {"embeddings": other})) is None
    with pytest.raises(TypeError, match="EfficientZeroModelMLP; got a Linear: pass"):
        fold(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="got the class EfficientZeroModel: pass"):
        fold(EfficientZeroModel)


def test_off_the_cpu_root_batches_are_padded_to_a_few_sizes(monkeypatch):
    """cuDNN plans convolutions for each number of images."""
    plain, sizes = inference.root_rows, []
    monkeypatch.setattr(
        inference, "root_rows", lambda model, x: (sizes.append(len(x)), plain(model, x))[1]
    )
    folded = fold(make("board").to("meta"))
    for num in (1, 5, 6, 13):
        root = folded.root(torch.zeros(num, *IMAGE, device="meta"))
        assert len(root.value) == len(root.embedding) == num
    assert sizes == [1, 6, 6, 16]


CONTINUOUS = {
    "conditioned": {},
    "fixed": {"sigma_type": "fixed", "norm_type": "LN", "res_connection_in_dynamics": True},
    "muzero": {"lstm_hidden_size": 0},
    "as in LightZero": {"gaussian_head": "reparameterization", "activation": GELU},
}
SAMPLERS = {
    "bounds": GaussianSampler(6, low=torch.tensor([-1.0, 0.5, 0.0]), high=2.0),
    "no bounds": GaussianSampler(4),
}


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("search", [muzero_policy, gumbel_policy])
def test_compiled_and_called_searches_sample_the_same_actions(name, kind, search):
    options = {**SMALL, "last_linear_layer_init_zero": False, **CONTINUOUS[name]}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = drawn(EfficientZeroModelMLP(4, 3, continuous_action_space=True, **options))
    folded, seed, obs = fold(model), torch.arange(70), torch.randn(70, 4, generator=draws())
    horizon = ValuePrefix(5 if model.lstm_hidden_size else 1)
    close([folded.root(obs).prior_logits], [model.initial_inference(obs).policy_logits])
    settings = {"num_simulations": 12, "value_prefix": horizon}
    quiet = {"dirichlet_fraction": 0.0, "temperature": 0.0}
    settings |= quiet if search is muzero_policy else {"gumbel_scale": 0.0}

    def plan(rows, recurrent_fn, num_threads=1, workspace=None):
        policy = partial(search, num_threads=num_threads, workspace=workspace, **settings)
        root, sampler = folded.root(obs[rows]), SAMPLERS[kind]
        return sampled_policy(root, recurrent_fn, sampler=sampler, policy=policy, seed=seed[rows])

    def called(embedding, action):  # which can't be bound
        return folded.recurrent_fn(embedding, action)

    called.predicts_prefixes = True
    plans = [plan(slice(None), model) for model in (folded.recurrent_fn, called)]
    found, expected = [each.tree.data for each in plans]
    # Where two choices are as good up to rounding, either may be taken.
    same = (found["children"] == expected["children"]).flatten(1).all(1)
    assert same.float().mean() > 0.9
    for entry in expected.keys():
        mine, theirs = found[entry][same], expected[entry][same]
        torch.testing.assert_close(mine, theirs, rtol=5e-3, atol=5e-3)
    mine, theirs = (each.action[same] for each in plans)
    assert torch.isclose(mine, theirs, rtol=1e-3, atol=1e-3).all(1).float().mean() > 0.9
    workspace = Workspace()
    for num_threads in (1, 1, 2):  # the second works in the memory of the first
        again = plan(slice(None), folded.recurrent_fn, num_threads, workspace)
        assert (again.tree.data == found).all()
    few = plan(slice(3, 5), folded.recurrent_fn)
    assert (few.tree.data == found[3:5]).all()
