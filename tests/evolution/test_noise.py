"""Noise on weights of networks that use only some of them."""

import pytest

from raffia.evolution.mutate import mutate

from .test_mutate import FIRST, SECOND, N, changed, draws, only, population

SHAPES = {  # which weights are active, by mask [L, N] and gate [L]
    "inner_weight": lambda mask, gate: mask[:, :, None],
    "inner_bias": lambda mask, gate: mask,
    "outer_weight": lambda mask, gate: mask[:, None],
    "outer_bias": lambda mask, gate: gate[:, None],
}


@pytest.mark.parametrize("flat", [False, True])
def test_inactive_weights_get_no_noise(flat):
    paths = ((),) if flat else (FIRST, SECOND)
    state = population(paths=paths, num_layers=2)
    state, _ = mutate(state, only("architecture", nodes=(1, 2)), draws(1))
    checked = set()
    for seed in range(12):
        config = only("parameters", mutated_fraction=0.5, reset_fraction=0.5)
        after, changes = mutate(state, config, draws(seed))
        for i, change in enumerate(changes):
            total = 0
            for key, where in changed(state[i], after[i]).items():
                form = state["buffers", *key[1:-1]] if key[-1] in SHAPES else None
                if form is not None:
                    mask, gate = form["width_mask"][i], form["layer_gate"][i]
                    active = SHAPES[key[-1]](mask * gate[:, None], gate).bool().expand(where.shape)
                    assert not where[~active].any()
                    assert where[active].sum() <= max(1, round(0.5 * active.sum().item()))
                total += int(where.sum())
                checked.add(key[-1])
            assert total <= int(change.what.split()[0])
    assert checked >= {"inner_weight", "outer_weight"}


def test_redrawn_weights_are_scaled_by_the_active_ones():
    """With the spread of the weights that the network uses."""
    state = population(paths=((),), num_layers=1, num_nodes=N)
    for name in ("inner_weight", "inner_bias", "outer_weight", "outer_bias"):
        state["params", name][:, 1:] = 1e6
    config = only("parameters", mutated_fraction=1.0, strong_fraction=0.0, reset_fraction=1.0)
    after, _ = mutate(state, config, draws())
    for name in ("inner_weight", "inner_bias", "outer_weight"):
        assert after["params", name][:, 0].abs().max() < 100
        assert after["params", name][:, 1:].eq(1e6).all()
