"""Runs of EfficientZero that start with the weights of another run or of LightZero."""

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from raffia import merge_tensordicts
from raffia.algorithms.efficientzero import EfficientZeroLearner
from raffia.algorithms.efficientzero.config import ModelConfig
from raffia.cli import main
from raffia.envs import Box, EnvSpec, make_env
from raffia.recipes import read_run, resume, train
from raffia.recipes.efficientzero import EfficientZeroRun
from raffia.recipes.efficientzero.actors import make_networks
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.recipes.efficientzero.warm_start import warm_state
from raffia.recipes.ilql import ILQLRun
from raffia.recipes.population_config import PopulationConfig
from raffia.recipes.run_folder import create_run, find_checkpoint
from raffia.train import RunError
from tests.recipes.runs import Quiet, refused, same, short, terminate, with_all


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A run with another seed, to start from."""
    folder = tmp_path_factory.mktemp("other") / "run"
    train(short(60, seed=5), folder, view=Quiet())
    return folder


def learner_of(config):
    with closing(make_env(config.env)) as env:
        return make_networks(config, env.spec)


def weights_of(state):
    return state.select("params", "buffers")


def first_state(config, folder):
    with closing(EfficientZeroExperiment(config, folder, Quiet())) as experiment:
        return experiment.init()


def test_a_run_starts_with_another_run_s_weights_and_resumes_without_it(other, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(other, source)
    config = short(80, init_from=str(source))
    state, theirs = first_state(config, tmp_path), find_checkpoint(other, "best").tensors("state")
    assert same(weights_of(state), weights_of(theirs)) and same(state["target"], weights_of(state))
    fresh = first_state(short(80), tmp_path)
    assert not same(weights_of(fresh), weights_of(state))
    assert same(state.exclude("params", "buffers", "target"), fresh.select("opt", "hyper", "step"))

    view = Quiet()
    train(config, tmp_path / "straight", view=view)
    assert f"starting with the weights in {source}" in view.messages
    train(config, tmp_path / "run", view=Quiet({5: terminate}))
    shutil.rmtree(source)
    view = Quiet()
    assert resume(tmp_path / "run", view=view).reason == "finished"
    assert not [line for line in view.messages if "starting with" in line]
    ends = [find_checkpoint(tmp_path / name, "newest") for name in ("straight", "run")]
    assert same(*(end.tensors("state") for end in ends))
    assert read_run(tmp_path / "run").init_from == str(source)
    with pytest.raises(RunError, match="init_from"):
        resume(tmp_path / "run", config=short(200))


def test_members_start_with_the_same_weights(other, tmp_path):
    config = short(init_from=str(other), population=PopulationConfig(size=2))
    state = first_state(config, tmp_path)
    theirs = weights_of(find_checkpoint(other, "best").tensors("state"))
    assert all(same(weights_of(state[index]), theirs) for index in range(2))


def test_a_checkpoint_of_lightzero_is_loaded(tmp_path):
    config = short()
    learner = learner_of(config)
    theirs = learner.make_model(7)
    for found in ({"model": theirs.state_dict(), "last_iter": 3}, theirs.state_dict()):
        torch.save(found, tmp_path / "ckpt_best.pth.tar")
        state = warm_state(learner, str(tmp_path / "ckpt_best.pth.tar"), seed=0)
        assert same(state, learner.init(7))


def test_weights_of_sampled_efficientzero_are_read(tmp_path):
    of_networks = Path(__file__).parents[1] / "algorithms" / "efficientzero"
    recorded = load_file(of_networks / "sampled_mlp.safetensors")
    params = [name for name in recorded if name.startswith("param/")]
    weights = {name.removeprefix("param/"): recorded[name] for name in params}
    torch.save({"model": weights}, tmp_path / "ckpt_best.pth.tar")
    sizes = dict(latent_state_dim=8, lstm_hidden_size=6, head_hidden_channels=(8,))
    sizes |= dict(proj_hid=8, proj_out=8, pred_hid=4, pred_out=8)
    sizes |= dict.fromkeys(("reward_support_range", "value_support_range"), (-5.0, 6.0, 1.0))
    kinds = dict(latent_norm="SimNorm", activation="gelu", gaussian_head="reparameterization")
    model = ModelConfig(**sizes, **kinds)
    spec = EnvSpec(observation_shape=(4,), action=Box((-1.0, -1.0), (1.0, 1.0)))
    learner = EfficientZeroLearner(spec, EfficientZeroRun(model=model), num_updates=9)
    state = warm_state(learner, str(tmp_path / "ckpt_best.pth.tar"), seed=0)
    network = learner.make_model(1).eval()
    with merge_tensordicts(state["params"], state["buffers"]).to_module(network):
        found = network.initial_inference(recorded["obs"])
    assert_close(found.policy_logits, recorded["eval/policy0"])
    assert_close(found.value, recorded["eval/value0"])

    head = "prediction_network.fc_policy_head."
    del weights[f"{head}mu.bias"], weights[f"{head}log_sigma_layer.bias"]
    weights[f"{head}log_sigma_param"] = torch.zeros(1, 2)
    torch.save({"model": weights}, tmp_path / "other.pth.tar")
    message = r"(?s)net\.4\.bias is missing.*log_sigma_param is unknown"
    with pytest.raises(RunError, match=message):
        warm_state(learner, str(tmp_path / "other.pth.tar"), seed=0)

    other = EfficientZeroRun(model=replace(model, gaussian_head="mlp"))
    learner = EfficientZeroLearner(spec, other, num_updates=9)
    with pytest.raises(RunError, match="they seem to be of gaussian_head='reparameterization'"):
        warm_state(learner, str(tmp_path / "ckpt_best.pth.tar"), seed=0)


def invalid_sources(folder, config):
    """Invalid sources of weights, with the error message of each."""
    torch.save({"model": {}}, folder / "empty.pth")
    torch.save({"model": {"w": 1.0}}, folder / "numbers.pth")
    torch.save({"model": torch.nn.Linear(1, 1)}, folder / "pickled.pth")
    (folder / "text.pth").write_text("weights")
    wide = learner_of(with_all(config, model__latent_state_dim=10)).make_model(0)
    torch.save(wide.state_dict(), folder / "wide.pth")
    create_run(folder / "ilql", ILQLRun())
    create_run(folder / "new", config)
    return {
        "nowhere": "does not exist",
        "empty.pth": 'it holds no weights; a checkpoint of LightZero has them under "model"',
        "numbers.pth": "it holds no weights",
        "pickled.pth": "not a torch file that holds only tensors",
        "text.pth": "it is damaged, or it is not a torch file",
        "wide.pth": r"(?s)do not fit .* has shape \[.*settings model\.\*; .*--config RUN",
        ".": "is not a run folder",
        "ilql": "is a run of ilql",
        "new": "has no checkpoint yet",
    }


def test_invalid_sources_are_refused_and_leave_no_folder(tmp_path):
    for name, message in invalid_sources(tmp_path, short()).items():
        refused(short(init_from=str(tmp_path / name)), tmp_path, message)


def test_weights_with_another_meaning_are_refused(other, tmp_path):
    """Such as a support of equal size with another range: all shapes are the same."""
    for name, value in (("value_support_range", (-60.0, 61.0, 2.0)), ("state_norm", True)):
        config = with_all(short(init_from=str(other)), **{f"model__{name}": value})
        refused(config, tmp_path, rf"init_from=.* its model\.{name} is .*--config")


def test_batch_norm_outside_the_config_is_refused(tmp_path):
    learner = learner_of(with_all(short(), model__projection_norm_type="LN"))
    theirs, path = learner.make_model(0).state_dict(), "projection.1"
    num = len(theirs[f"{path}.weight"])
    theirs |= {f"{path}.running_{name}": torch.ones(num) for name in ("mean", "var")}
    theirs[f"{path}.num_batches_tracked"] = torch.tensor(1)
    torch.save(theirs, tmp_path / "ckpt.pth.tar")
    with pytest.raises(RunError, match="some layers .* are BatchNorm"):
        warm_state(learner, str(tmp_path / "ckpt.pth.tar"), seed=0)


def test_the_init_from_flag(other, tmp_path, capsys):
    def train_from(source, run):
        args = f"train efficientzero --config {other}/config.json --init-from {source}"
        return main([*args.split(), "--run", str(tmp_path / run)])

    assert train_from(other, "run") == 0
    assert read_run(tmp_path / "run").init_from == str(other)
    assert train_from(tmp_path / "nowhere", "no") != 0
    assert "does not exist" in capsys.readouterr().err
