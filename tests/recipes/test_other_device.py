"""Networks on another device than the search trees: a GPU, or a device implemented in Python."""

import copy
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raffia.algorithms.efficientzero import EfficientZeroConfig, Planner, make_model
from raffia.algorithms.efficientzero.config import ModelConfig, SearchConfig
from raffia.algorithms.efficientzero.stacked import StackedPlanner
from raffia.envs import Box, Discrete, EnvSpec, make_env
from raffia.recipes.efficientzero.actors import ActorRole, process_config
from raffia.recipes.efficientzero.evaluation import EvaluateRole
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.recipes.efficientzero.reanalyzers import MembersMaking, ReanalyzeRole
from raffia.tensordict import TensorDict
from raffia.train import TrainingSession
from tests import elsewhere
from tests.recipes.runs import Quiet
from tests.recipes.test_settings import VECTOR, with_all

ACTIONS = {"discrete": Discrete(3), "continuous": Box((-2.0, -1.0), (2.0, 1.0))}
CASES = [
    (kind, policy, size) for kind in ACTIONS for policy in ("muzero", "gumbel") for size in (1, 2)
]


def assert_same_plans(kind, policy, size, device):
    """Compare searches with the networks on this device and on the CPU."""
    spec = EnvSpec(observation_shape=(4,), action=ACTIONS[kind])
    sizes = {"latent_state_dim": 8, "lstm_hidden_size": 6, "proj_hid": 8, "proj_out": 8}
    search = SearchConfig(
        policy=policy, num_simulations=12, num_sampled_actions=4, max_considered=4
    )
    model = ModelConfig(norm_type="LN", pred_hid=8, pred_out=8, **sizes)
    config = EfficientZeroConfig(model=model, search=search)
    torch.manual_seed(0)
    model = make_model(spec, config.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    state = TensorDict(observation=torch.arange(24.0).view(6, 4) / 20, batch_size=[6])
    found = []
    for each_device in ("cpu", device):
        network = copy.deepcopy(model).to(each_device)
        make = Planner if size == 1 else lambda *parts: StackedPlanner(*parts, size=2)
        draws = torch.Generator().manual_seed(1)
        plan = make(network, spec, config).plan(state, temperature=1.0, generator=draws)
        found.append(plan)
    expected, found_plan = found
    assert torch.equal(expected.tree.visits_of_root(), found_plan.tree.visits_of_root())
    for name, close in (("action", 1e-4), ("action_weights", 1e-3), ("root_value", 1e-3)):
        one, other = (getattr(plan, name) for plan in found)
        torch.testing.assert_close(one, other, rtol=close, atol=close)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "policy", "size"), CASES)
def test_networks_on_a_gpu_plan_as_those_on_the_cpu(kind, policy, size):
    assert_same_plans(kind, policy, size, "cuda")


@pytest.mark.slow
def test_networks_on_a_python_device_plan_as_those_on_the_cpu():
    """In its own process, as the device changes the whole process."""
    if not elsewhere.is_available():
        pytest.skip("this torch has no devices of Python's")
    path = Path(__file__).resolve()
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)], cwd=path.parents[2], timeout=100,
        env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal"] * 4


def test_networks_and_states_lie_on_the_device(tmp_path):
    """Environments and replay stay on the CPU."""
    config = replace(VECTOR, device="meta")
    with closing(EfficientZeroExperiment(config, tmp_path, Quiet(), make_env, None)) as run:
        with closing(TrainingSession(run)) as session:
            state = session.start()
        assert {value.device.type for value in state.values(True, True)} == {"meta"}
        assert run.actor.device.type == run.reanalyze_planner.device.type == "meta"
        assert run.collector.collect(run.player.act_first, 1)["observation"].device.type == "cpu"


@pytest.mark.parametrize("role", [ActorRole, ReanalyzeRole, EvaluateRole])
@pytest.mark.parametrize("device", ["meta", ""])
def test_workers_search_on_their_device(role, device):
    """With an empty device they use the run's."""
    kinds = {ActorRole: "actors", ReanalyzeRole: "reanalyzers", EvaluateRole: "evaluators"}
    settings = {f"{kinds[role]}__num": 1, f"{kinds[role]}__device": device}
    config = with_all(VECTOR, device="cpu" if device else "meta", **settings)
    with closing(role(process_config(config), 0)) as worker:
        assert worker.planner.device.type == "meta"


def test_batches_ahead_of_members_with_their_own_batch_sizes_lie_on_the_device():
    config = with_all(VECTOR, device="meta", population__size=3)
    making = MembersMaking(config, None, None, None, whole=lambda state: state)
    state = TensorDict(hyper=TensorDict({"batch_size": torch.tensor([2, 1, 2])}))
    batch = TensorDict(weight=torch.ones(6), batch_size=[6])
    answer = TensorDict(batch=batch, num_simulations=torch.tensor(0))
    weight = making.batch(state, TensorDict(), answer)["weight"]
    assert weight.device.type == "meta" and weight.shape == (3, 2)


if __name__ == "__main__":
    registered = elsewhere.register()
    for case in CASES:
        if case[-1] == 1:  # the device has no batched products, which members need
            assert_same_plans(*case, elsewhere.NAME)
            print("equal")
