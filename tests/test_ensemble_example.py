"""The parts of examples/ensemble.py, against known results for cart-pole and ensembles."""

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raffia import TensorDict, from_modules

EXAMPLE = Path(__file__).parents[1] / "examples" / "ensemble.py"


def load_example():
    spec = importlib.util.spec_from_file_location("example_ensemble", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


example = load_example()

SMALL = example.EnsembleConfig(
    num_members=2, num_transitions=32, hidden_size=7, num_updates=3, batch_size=5
)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def test_a_resting_cart_pushed_at_the_top():
    # By hand: angle 0, so w_dot = -(F / m) / (l (4/3 - mp / m)), v_dot = F / m - mp l w_dot / m.
    push = 1.1 / 1.1
    w_dot = -push / (0.5 * (4 / 3 - 0.1 / 1.1))
    v_dot = push - 0.1 * 0.5 * w_dot / 1.1
    after = example.cart_pole_step(torch.zeros(1, 4, dtype=torch.float64), torch.tensor([1.1]))[0]
    # The first Euler step moves the velocities only; over five, angle stays small: within 2 %.
    assert after[1].item() == pytest.approx(0.1 * v_dot, rel=0.02)
    assert after[3].item() == pytest.approx(0.1 * w_dot, rel=0.02)
    assert after[0].item() == pytest.approx(10 * 0.02**2 * v_dot, rel=0.02)  # 0 + 1 + ... + 4 = 10


def test_a_hanging_pole_stays_at_rest():
    hanging = torch.tensor([[0.0, 0.0, math.pi, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(example.cart_pole_step(hanging, torch.zeros(1)), hanging)


def test_stacked_prediction_equals_each_member_s():
    members = example.make_members(SMALL)
    params = from_modules(*members)
    shared = torch.randn(3, 5, generator=generator(0))
    separate = torch.randn(2, 3, 5, generator=generator(1))
    expected = torch.stack([member(shared) for member in members])
    torch.testing.assert_close(example.predict(members[0], params, shared), expected)
    expected = torch.stack([member(x) for member, x in zip(members, separate, strict=True)])
    torch.testing.assert_close(example.predict(members[0], params, separate), expected)


def trained(config, data):
    members = example.make_members(config)
    params = from_modules(*members)
    return params, list(example.fit(members[0], params, data, config, generator(5)))


def test_same_seed_same_run_and_the_loss_falls():
    config = replace(SMALL, num_updates=60, learning_rate=1e-2)
    data = example.make_transitions(32, 0.0, generator(0))
    params, losses = trained(config, data)
    again, _ = trained(config, data)
    assert (params == again).all()
    assert losses[0].shape == (2,)
    assert (torch.stack(losses[-5:]).mean(0) < torch.stack(losses[:5]).mean(0)).all()


def test_members_do_not_change_the_global_random_state():
    state = torch.get_rng_state()
    one, two = example.make_members(SMALL), example.make_members(SMALL)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one[1][0].weight, two[1][0].weight)
    assert not torch.equal(one[0][0].weight, one[1][0].weight)


def test_run_prints_its_progress_and_writes_a_file(tmp_path):
    lines = []
    example.run(SMALL, tmp_path, lines.append)
    assert "update  3/3 | loss" in "\n".join(lines)
    assert lines[-2].endswith("equal: True")
    saved = TensorDict.load(tmp_path / "ensemble.safetensors")
    assert saved.batch_size == (2,)
    assert saved["0", "weight"].shape == (2, 7, 5)


@pytest.mark.slow
def test_the_mean_of_the_members_beats_the_best_of_them():
    config = example.EnsembleConfig()
    params, _ = trained(config, example.make_transitions(512, config.noise, generator(0)))
    error = example.ensemble_errors(
        example.make_members(config)[0], params, example.make_transitions(512, 0.0, generator(1))
    )
    assert error["mean"] < error["best"] < error["one"]
    assert error["agree"] < error["differ"]
