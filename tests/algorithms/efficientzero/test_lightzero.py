"""Networks with LightZero's weights give LightZero's numbers.

The safetensors files hold what LightZero's networks gave; model.json says which version of it. They
were recorded by running it, with parameters drawn at random.
"""

import pytest
import torch

from raffia.algorithms.efficientzero import (
    EfficientZeroModel,
    EfficientZeroModelMLP,
)
from raffia.algorithms.efficientzero.model_mlp import GELU

from .small import PROJECTION


def build(name, config):
    if "activation" in config:  # Sampled EfficientZero's, in all networks
        config = config | {"activation": GELU}
    return (EfficientZeroModelMLP if "mlp" in name else EfficientZeroModel)(**config)


def outputs(model, obs, actions):
    out = model.initial_inference(obs)
    assert torch.equal(out.value_prefix, torch.zeros(len(obs)))
    found = {"value0": out.value, "policy0": out.policy_logits, "latent0": out.latent_state}
    for i in (1, 2):
        state = out.reward_hidden_state
        out = model.recurrent_inference(out.latent_state, state, actions[:, i - 1])
        found |= {f"value{i}": out.value, f"policy{i}": out.policy_logits}
        found |= {f"value_prefix{i}": out.value_prefix, f"latent{i}": out.latent_state}
        if model.lstm_hidden_size:  # MuZero's networks have none
            found |= {f"h{i}": out.reward_hidden_state[0], f"c{i}": out.reward_hidden_state[1]}
    found["project_grad"] = model.project(out.latent_state, with_grad=True)
    found["project_nograd"] = model.project(out.latent_state, with_grad=False)
    return found


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_outputs_equal_lightzero_s(oracle, mode):
    name, config, weights, tensors = oracle
    model = build(name, config).load_lightzero(weights).train(mode == "train")
    # Norms over a batch of a few rows divide by small numbers: CPUs differ in more digits there.
    tolerance = 1e-4 if mode == "train" else 1e-5
    for key, found in outputs(model, tensors["obs"], tensors["actions"]).items():
        expected = tensors[f"{mode}/{key}"]
        assert found.shape == expected.shape
        torch.testing.assert_close(
            found, expected, rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
        )
    after = {k.removeprefix("after/"): v for k, v in tensors.items() if k.startswith("after/")}
    for key, expected in after.items() if mode == "train" else ():
        torch.testing.assert_close(model.state_dict()[key], expected, rtol=1e-5, atol=1e-5)


def test_another_weight_gives_other_numbers(oracle):
    name, config, weights, tensors = oracle
    key = next(k for k in weights if k.startswith("dynamics_network.") and k.endswith("weight"))
    model = build(name, config).load_lightzero(weights | {key: weights[key].flip(0)}).eval()
    found = outputs(model, tensors["obs"], tensors["actions"])["latent1"]
    assert not torch.allclose(found, tensors["eval/latent1"], rtol=1e-5, atol=1e-5)


def small(**options):
    sizes = {"latent_state_dim": 8, "lstm_hidden_size": 6, **PROJECTION}
    return EfficientZeroModelMLP(4, 3, **sizes | options)


def test_entries_that_do_not_fit_are_named_and_nothing_is_loaded():
    model = small()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    weights = small().state_dict()
    lstm = "dynamics_network.lstm.weight_ih"
    weights[f"{lstm}_l1"] = weights.pop(f"{lstm}_l0")
    weights["projection.0.bias"] = torch.zeros(9)
    with pytest.raises(ValueError, match="do not fit EfficientZeroModelMLP") as error:
        model.load_lightzero(weights)
    assert str(error.value).splitlines()[1:-1] == [
        f"  {lstm}_l0 is missing",
        f"  {lstm}_l1 is unknown",
        "  projection.0.bias has shape [9], but the model expects [7]",
    ]
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())

    checkpoint = {"model": weights, "target_model": {}, "last_iter": 7}
    with pytest.raises(ValueError, match=r"checkpoint.*load_lightzero\(checkpoint\['model'\]"):
        model.load_lightzero(checkpoint)
    with pytest.raises(ValueError, match="fc_dynamics.1.running_mean is unknown"):
        small(norm_type="LN").load_lightzero(small().state_dict())
    ours, other = (small(norm_type="LN", state_norm=True) for _ in range(2))
    other.load_lightzero(ours.state_dict())  # our own are read as they are
    assert all(torch.equal(other.state_dict()[k], v) for k, v in ours.state_dict().items())


POINTED = [
    ({"latent_norm": "SimNorm"}, "latent_norm='SimNorm'"),
    ({"norm_type": "LN"}, "norm_type='LN'"),
    ({"res_connection_in_dynamics": True}, "res_connection_in_dynamics=True"),
    (
        {"self_supervised_learning_loss": False, "lstm_hidden_size": 0},
        r"lstm_hidden_size=0 \(MuZero\), self_supervised_learning_loss=False",
    ),
]


@pytest.mark.parametrize(("options", "message"), POINTED)
def test_options_that_the_weights_point_to_are_named(options, message):
    with pytest.raises(ValueError, match=f"they seem to be of {message}$"):
        small().load_lightzero(small(**options).state_dict())
