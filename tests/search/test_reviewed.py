"""What users get wrong, or may expect: each of these once went wrong without a word."""

import pytest
import torch

from raffia.search import (
    RecurrentOutput,
    RootOutput,
    ValuePrefix,
    search,
)
from raffia.search.gumbel import considered_visits

BACKENDS = ["reference", "compiled"]


def root_of(batch=2, actions=3, **fields):
    given = {
        "prior_logits": torch.zeros(batch, actions),
        "value": torch.zeros(batch),
        "embedding": torch.zeros(batch, 1),
    }
    return RootOutput(**(given | fields))


def model(embedding, action):
    rows = len(action)
    return RecurrentOutput(action.float(), torch.zeros(rows), torch.zeros(rows, 3)), embedding


def run(root=None, recurrent_fn=model, **options):
    return search(root or root_of(), recurrent_fn, **({"num_simulations": 8} | options))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_embedding_may_not_change_its_device(backend):
    def moving(embedding, action):
        output, embedding = model(embedding, action)
        return output, embedding.to("meta")

    with pytest.raises(ValueError, match="torch.float32, meta .needed .2, 1., torch.float32, cpu"):
        run(recurrent_fn=moving, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_signs_and_conjugates_that_are_yet_to_come_are_minded(backend):
    def turned(embedding, action):
        rows = len(action)
        value = torch.complex(torch.zeros(rows), torch.full((rows,), 2.0)).conj().imag
        assert value.is_neg()
        return RecurrentOutput(value * 0, value, torch.zeros(rows, 3)), embedding.conj()

    embedding = torch.full((1, 1), 1 + 2j)
    tree = run(root_of(1, embedding=embedding), turned, backend=backend, keep_embeddings=True)
    assert tree.data["raw_value"][0, 1] == -2
    assert tree.embeddings[0, 1, 0] == 1 - 2j


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sign_that_is_yet_to_come_is_minded_at_the_root(backend):
    value = torch.complex(torch.zeros(1), torch.full((1,), 2.0)).conj().imag
    assert value.is_neg()
    tree = run(root_of(1, value=value), backend=backend, root_value="include")
    assert tree.data["raw_value"][0, 0] == -2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_player_s_number_does_not_depend_on_the_batch(backend):
    players = torch.tensor([1, 0, 2])
    tree = run(root_of(3, to_play=players), backend=backend)
    assert tree.data["to_play"][:, 1].tolist() == [2, 1, 1]
    for root, player in enumerate(players):
        alone = run(root_of(1, to_play=player[None]), backend=backend)
        assert torch.equal(alone.data["to_play"][0], tree.data["to_play"][root])


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_are_the_same_only_with_the_same_player_to_move(backend):
    def stay(embedding, action):
        return model(embedding, action)

    tree = run(
        root_of(to_play=torch.ones(2).long()),
        stay,
        num_simulations=20,
        transpositions=lambda embedding: torch.zeros(len(embedding), dtype=torch.int64),
        backend=backend,
    )
    canonical, players = tree.data["canonical"].long(), tree.data["to_play"]
    met = canonical >= 0
    assert torch.equal(players.gather(1, canonical.clamp_min(0))[met], players[met])
    assert canonical.unique().tolist() in ([0, 1], [-1, 0, 1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_actions_without_any_prior_are_an_error(backend):
    def none(embedding, action):
        output, embedding = model(embedding, action)
        return output._replace(prior_logits=output.prior_logits - torch.inf), embedding

    with pytest.raises(
        ValueError, match="prior_logits is NaN, inf or -inf .* root 0 in simulation 0"
    ):
        run(recurrent_fn=none, backend=backend)


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (lambda out, emb: (emb, out), "gave a Tensor instead of a RecurrentOutput"),
        (lambda out, emb: (tuple(out)[:3], emb), "gave a tuple instead of a RecurrentOutput"),
        (lambda out, emb: out, "it must return two things"),
        (lambda out, emb: None, "gave a NoneType; it must return two things"),
        (lambda out, emb: (out._replace(reward=1.0), emb), "has reward a float"),
        (lambda out, emb: (out._replace(value=None), emb), "has value a NoneType"),
        (lambda out, emb: (out._replace(mask=[True]), emb), "has mask a list"),
    ],
)
def test_answers_of_a_wrong_kind(answer, match):
    with pytest.raises(TypeError, match=match):
        run(recurrent_fn=lambda embedding, action: answer(*model(embedding, action)))


def test_a_dict_may_come_back_in_another_order():
    def other(embedding, action):
        output, _ = model(embedding["a"], action)
        return output, {"b": embedding["b"], "a": embedding["a"] + 1}

    start = {"a": torch.zeros(2, 1), "b": torch.ones(2, 4)}
    tree = run(root_of(embedding=start), other, keep_embeddings=True)
    assert torch.equal(tree.embeddings["a"].squeeze(-1), tree.data["depth"].float())


def test_a_model_of_value_prefixes():
    def prefixes(embedding, action):
        return model(embedding, action)

    prefixes.predicts_prefixes = True
    start = root_of(embedding={"reward_hidden_state": torch.zeros(2, 1)})
    assert len(run(start, prefixes, value_prefix=ValuePrefix())) == 2


def test_discounts_may_be_given_as_a_list():
    one, other = run(discount=[0.5, 0.9]), run(discount=torch.tensor([0.5, 0.9]))
    assert torch.equal(one.data["value_sum"], other.data["value_sum"])


def test_halving_considers_each_action_in_turn():
    """As a tournament: those that are left are visited equally often in each round."""
    for num_considered in range(1, 20):
        for num_simulations in (1, 2, 7, 16, 50, 200):
            turns = considered_visits(num_considered, num_simulations)
            assert len(turns) == num_simulations
            if num_considered == 1:
                assert turns == tuple(range(num_simulations))
                continue
            assert all(
                0 <= after - before <= 1 for before, after in zip(turns, turns[1:], strict=False)
            )
            assert turns.count(0) == min(num_considered, num_simulations)
