import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn

from raffia.algorithms.efficientzero.inference import fold
from raffia.algorithms.efficientzero.model import EfficientZeroModel, EfficientZeroModelMLP
from raffia.search import (
    GaussianSampler,
    SearchMemory,
    ValuePrefix,
    gumbel_policy,
    muzero_policy,
    sampled_policy,
)
from raffia.tensordict.tensordict import TensorDict

SMALL = {"latent_state_dim": 20, "lstm_hidden_size": 12, "self_supervised_learning_loss": False}
MLPS = {
    "residual": {**SMALL, "res_connection_in_dynamics": True},
    "plain": {**SMALL, "discrete_action_encoding_type": "not_one_hot"},
    "layer_norm": {**SMALL, "norm_type": "LN", "res_connection_in_dynamics": True},
    "sizes": {"latent_state_dim": 128, "lstm_hidden_size": 41, "reward_support_range": (-5, 6, 1)},
    "numbers": {**SMALL, "categorical_distribution": False, "value_head_hidden_channels": (9, 7)},
    "no_hidden": {**SMALL, "policy_head_hidden_channels": (), "latent_norm": "SimNorm"},
}
MLPS["no_hidden"]["latent_state_dim"] = 24
UNCOMPILED = {
    "state_norm": {**SMALL, "state_norm": True},
    "activation": {**SMALL, "activation": nn.Tanh()},
}
IMAGES = {
    "board": {"observation_shape": (3, 5, 4)},
    "board_ln": {"observation_shape": (3, 5, 4), "norm_type": "LN"},
    "large": {"observation_shape": (3, 70, 64), "downsample": True},
    "state_norm": {"observation_shape": (3, 5, 4), "state_norm": True},
}
CHANNELS = dict.fromkeys(["reward_head_channels", "value_head_channels", "policy_head_channels"], 3)


def drawn(model, seed=0):
    """The model with all parameters and statistics as if after training."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer += torch.randn(buffer.shape, generator=generator)
        if name.endswith("running_var"):
            buffer *= 0.5 + torch.rand(buffer.shape, generator=generator)
    return model


def mlp(name="residual", **options):
    arguments = {**(MLPS | UNCOMPILED)[name], **options}
    return drawn(EfficientZeroModelMLP(4, 5, last_linear_layer_init_zero=False, **arguments))


def images(name):
    return drawn(
        EfficientZeroModel(
            action_space_size=5,
            num_channels=8,
            lstm_hidden_size=12,
            self_supervised_learning_loss=False,
            last_linear_layer_init_zero=False,
            **CHANNELS,
            **IMAGES[name],
        )
    )


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    return normal


def embeddings(model, rows, draw):
    """Embeddings as if from the middle of a search."""
    size = model.lstm_hidden_size
    state = TensorDict({"h": draw(rows, size).tanh(), "c": draw(rows, size)}, [rows])
    latent = draw(rows, *model.latent_shape)
    return TensorDict({"latent_state": latent, "reward_hidden_state": state}, [rows])


def memory(model, batch, draw, num_actions=5):
    """A search's memory with three rows for each root: parent, new node, unused."""
    return SearchMemory(
        embeddings=embeddings(model, 3 * batch, draw),
        parent_row=3 * torch.arange(batch),
        node_row=3 * torch.arange(batch) + 1,
        action=torch.arange(batch) * 7 % num_actions,
        reset=torch.arange(batch) % 3 == 1,
        reward=torch.full((batch,), 9.0),
        value=torch.full((batch,), 9.0),
        prior_logits=torch.full((batch, num_actions), 9.0),
    )


def expected(model, embedding, action):
    """What the model itself says in eval mode, decoded."""
    state = embedding["reward_hidden_state", "h"], embedding["reward_hidden_state", "c"]
    with torch.no_grad():
        output = model.eval().recurrent_inference(
            embedding["latent_state"], tuple(part.unsqueeze(0) for part in state), action
        )
    reward, value = model.decode_reward(output.value_prefix), model.decode_value(output.value)
    h, c = (part.squeeze(0) for part in output.reward_hidden_state)
    return reward, value, output.policy_logits, output.latent_state, h, c


def flat(output, embedding):
    state = embedding["reward_hidden_state"]
    latent = embedding["latent_state"]
    return output.reward, output.value, output.prior_logits, latent, state["h"], state["c"]


def written(memory):
    new = memory.embeddings[memory.node_row]
    return flat(memory, new)


def close(found, expected, tolerance=1e-4):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


MODELS = [(mlp, name) for name in MLPS | UNCOMPILED] + [(images, name) for name in IMAGES]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "name"), MODELS)
def test_a_folded_model_says_what_the_model_says_in_eval_mode(make, name, draw):
    model = make(name).train()
    folded = fold(model)
    embedding, action = embeddings(model, 3, draw), torch.tensor([4, 0, 2])
    found = flat(*folded.recurrent_fn(embedding, action))
    close(found, expected(model, embedding, action))
    obs = draw(3, 4) if make is mlp else draw(3, *IMAGES[name]["observation_shape"])
    root = folded.root(obs)
    with torch.no_grad():
        output = model.initial_inference(obs)
    h = root.embedding["reward_hidden_state", "h"]
    assert h.eq(0).all() and h.shape == (3, 12 if model.lstm_hidden_size == 12 else 41)
    found = root.value, root.prior_logits, root.embedding["latent_state"]
    close(found, (model.decode_value(output.value), output.policy_logits, output.latent_state))


def test_nothing_of_a_root_is_lost():
    mask, to_play = torch.tensor([[True] * 4 + [False]] * 2), torch.tensor([1, 2])
    root = fold(mlp()).root(torch.zeros(2, 4), mask, to_play)
    assert root.mask is mask and root.to_play is to_play
    assert root.embedding.batch_size == (2,)


@pytest.mark.parametrize("name", MLPS)
@pytest.mark.parametrize("batch", [1, 2, 70])
def test_the_compiled_step_does_what_the_call_does(name, batch, draw):
    model = mlp(name)
    folded = fold(model)
    shared = memory(model, batch, draw)
    before = shared.embeddings.clone()
    called = flat(*folded.recurrent_fn(before[shared.parent_row], shared.action))
    folded.recurrent_fn.bind(shared)(batch)
    keep = (~shared.reset)[:, None].float()
    wanted = *called[:4], called[4] * keep, called[5] * keep
    close(written(shared), wanted, 5e-5)
    for row in (0, 2):  # the parents and the unused rows are as they were
        assert shared.embeddings[row::3]["latent_state"].equal(before[row::3]["latent_state"])


def test_only_so_many_rows_are_written(draw):
    model = mlp()
    shared = memory(model, 5, draw)
    fold(model).recurrent_fn.bind(shared)(3)
    assert shared.value[3:].eq(9).all() and not shared.value[:3].eq(9).any()


def test_a_row_is_the_same_to_the_bit_in_every_batch(draw):
    model = mlp()
    folded = fold(model)
    whole = memory(model, 70, draw)
    rows = whole.embeddings.clone()
    folded.recurrent_fn.bind(whole)(70)
    for batch in (1, 2, 3, 5, 8, 33):
        part = memory(model, batch, draw)
        part.embeddings.update_(rows[: 3 * batch])
        part.reset[:] = whole.reset[:batch]
        folded.recurrent_fn.bind(part)(batch)
        for found, wanted in zip(written(part), written(whole), strict=True):
            assert found.equal(wanted[:batch])


def test_roots_are_the_same_to_the_bit_in_every_batch(draw):
    folded, obs = fold(mlp()), draw(70, 4)
    whole = folded.root(obs)
    for batch in (1, 4, 9):
        part = folded.root(obs[:batch])
        assert part.value.equal(whole.value[:batch])
        assert part.prior_logits.equal(whole.prior_logits[:batch])


def test_a_model_without_training_says_exactly_zero(draw):
    model = EfficientZeroModelMLP(4, 5, **MLPS["residual"])
    folded, shared = fold(model), memory(model, 3, draw)
    folded.recurrent_fn.bind(shared)(3)
    assert shared.value.eq(0).all() and shared.reward.eq(0).all()
    assert folded.root(draw(3, 4)).value.eq(0).all()


def test_what_is_no_number_stays_none(draw):
    model = mlp()
    shared = memory(model, 3, draw)
    shared.embeddings["latent_state"][3, 7] = torch.nan  # the parent of the second row
    fold(model).recurrent_fn.bind(shared)(3)
    assert shared.value.isnan().tolist() == [False, True, False]
    assert shared.prior_logits.isnan().all(1).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("make", "name"), [(mlp, "residual"), (mlp, "layer_norm"), (images, "board")]
)
def test_a_snapshot_changes_when_it_is_refreshed(make, name, draw):
    model = make(name)
    folded = fold(model)
    embedding, action = embeddings(model, 3, draw), torch.tensor([4, 0, 2])
    before = flat(*folded.recurrent_fn(embedding, action))
    drawn(model, seed=1)
    close(flat(*folded.recurrent_fn(embedding, action)), before, 0)
    folded.refresh(model)
    close(flat(*folded.recurrent_fn(embedding, action)), expected(model, embedding, action))


def test_what_is_bound_is_refreshed_too(draw):
    model = mlp()
    folded, shared, obs = fold(model), memory(model, 3, draw), draw(3, 4)
    step = folded.recurrent_fn.bind(shared)
    step(3)
    first = shared.value.clone()
    assert not folded.root(obs).value.eq(0).any()
    folded.refresh(drawn(model, seed=1))
    step(3)
    fresh = fold(model)
    assert fresh.root(obs).value.equal(folded.root(obs).value)
    again = memory(model, 3, draw)
    again.embeddings.update_(shared.embeddings)
    fresh.recurrent_fn.bind(again)(3)
    assert again.value.equal(shared.value) and not shared.value.eq(first).any()


def test_a_folded_model_shares_nothing_with_the_model():
    model = mlp()
    folded = fold(model)
    before = folded.root(torch.ones(1, 4)).value
    model.train()
    for parameter in model.parameters():
        parameter.data.zero_()
    assert folded.root(torch.ones(1, 4)).value.equal(before)
    assert not before.requires_grad and before.ne(0).all()


@pytest.mark.parametrize("name", UNCOMPILED)
def test_no_compiled_step_for_other_layers(name, draw):
    model = mlp(name)
    assert fold(model).recurrent_fn.bind(memory(model, 2, draw)) is None


def test_no_compiled_step_for_images_other_precision_or_no_numba(draw, monkeypatch):
    model = images("board")
    assert fold(model).recurrent_fn.bind(memory(model, 2, draw)) is None
    double = mlp().double()
    folded = fold(double)
    shared = memory(double, 2, draw)
    assert folded.recurrent_fn.bind(shared) is None
    assert folded.root(torch.zeros(2, 4, dtype=torch.float64)).value.dtype == torch.float64
    single = fold(mlp())
    single.recurrent_fn.bind(shared)
    halved = shared.embeddings.to(torch.float64)
    assert single.recurrent_fn.bind(SearchMemory(**{**vars(shared), "embeddings": halved})) is None
    monkeypatch.setattr("raffia.jit.available", lambda: False)
    without = fold(mlp())
    assert without.recurrent_fn.bind(shared) is None
    assert without.root(torch.zeros(2, 4)).value.shape == (2,)


def test_no_compiled_step_for_another_embedding(draw):
    model = mlp()
    shared = memory(model, 2, draw)
    other = SearchMemory(**{**vars(shared), "embeddings": shared.embeddings["latent_state"]})
    assert fold(model).recurrent_fn.bind(other) is None
    renamed = TensorDict({"latent": shared.embeddings["latent_state"]}, [6])
    assert (
        fold(model).recurrent_fn.bind(SearchMemory(**{**vars(shared), "embeddings": renamed}))
        is None
    )


@pytest.mark.slow
def test_continuous_actions_are_planned_with_by_sampling_them():
    model = drawn(EfficientZeroModelMLP(4, 2, continuous_action_space=True, **SMALL)).eval()
    folded, obs, seed = fold(model), torch.randn(5, 4), torch.arange(5)
    root = folded.root(obs)
    torch.testing.assert_close(
        root.prior_logits, model.initial_inference(obs).policy_logits, rtol=1e-4, atol=1e-4
    )
    policy = partial(gumbel_policy, num_simulations=12, value_prefix=ValuePrefix())
    sampler = GaussianSampler(6, low=-1.0, high=1.0)
    plan = sampled_policy(root, folded.recurrent_fn, sampler=sampler, policy=policy, seed=seed)
    assert plan.action.shape == (5, 2) and plan.action_weights.shape == (5, 6)
    assert bool((plan.action.abs() <= 1).all())
    assert plan.tree.visits_of_root().sum(-1).tolist() == [12] * 5


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
def test_a_search_is_the_same_with_the_compiled_step_and_with_the_call(batch, draw):
    folded = fold(mlp())
    root = folded.root(draw(batch, 4))

    def plan(recurrent_fn):
        generator = torch.Generator().manual_seed(3)
        prefix = ValuePrefix(horizon=3)
        return muzero_policy(root, recurrent_fn, 16, value_prefix=prefix, generator=generator)

    bound = plan(folded.recurrent_fn)
    called = plan(lambda embedding, action: folded.recurrent_fn(embedding, action))
    assert bound.tree.data["visits"].equal(called.tree.data["visits"])
    torch.testing.assert_close(bound.root_value, called.root_value, rtol=1e-4, atol=1e-4)


def test_a_folded_model_says_that_it_predicts_prefixes():
    assert fold(mlp()).recurrent_fn.predicts_prefixes


def test_what_cannot_be_folded():
    with pytest.raises(TypeError, match="EfficientZeroModelMLP; got a Linear: pass"):
        fold(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="got the class EfficientZeroModel: pass"):
        fold(EfficientZeroModel)


@pytest.mark.parametrize(
    ("make", "shape"), [(mlp, (3, 4)), (lambda: images("board"), (2, 3, 5, 4))]
)
def test_observations_of_another_dtype(make, shape):
    folded = fold(make())
    with pytest.raises(TypeError, match="float64 and the weights torch.float32: pass"):
        folded.root(torch.zeros(shape, dtype=torch.float64))
    with torch.autocast("cpu"):
        assert folded.root(torch.zeros(shape, dtype=torch.bfloat16)).value.isfinite().all()


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda folded: pickle.loads(pickle.dumps(folded))]
)
def test_a_copy_of_a_used_snapshot_is_a_snapshot_of_its_own(copied):
    obs, action = torch.randn(3, 4), torch.tensor([0, 1, 1])
    first, second = (
        drawn(EfficientZeroModelMLP(4, 2, **SMALL), seed=seed).eval() for seed in (0, 1)
    )
    folded = fold(first)

    def plan(model):
        root = model.root(obs)
        tree = muzero_policy(
            root, model.recurrent_fn, 9, value_prefix=ValuePrefix(), dirichlet_fraction=0.0
        ).tree
        return tree.data["raw_value"], model.recurrent_fn(root.embedding, action)[0].value

    before = plan(folded)  # compiles
    other = copied(folded)
    torch.testing.assert_close(plan(other), before, rtol=0, atol=0)
    other.refresh(second)
    torch.testing.assert_close(plan(other), plan(fold(second)), rtol=0, atol=0)
    torch.testing.assert_close(plan(folded), before, rtol=0, atol=0)
