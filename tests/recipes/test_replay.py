"""The replay of a run: sampling and importance weights."""

import json
from pathlib import Path

import pytest
import torch

from raffia.envs import Discrete, EnvSpec
from raffia.recipes.efficientzero import EfficientZeroRun
from raffia.recipes.efficientzero.config import ReplayConfig
from raffia.recipes.efficientzero.data import Replays, make_replay
from raffia.recipes.population_config import PopulationConfig
from raffia.tensordict import TensorDict

# Importance weights of batches out of a larger replay, as LightZero 9f717c80 gives them.
IMPORTANCE = json.loads((Path(__file__).parents[1] / "data/importance_weights.json").read_text())
SPEC = EnvSpec(observation_shape=(1,), action=Discrete(2))


def run_with(**settings):
    population = settings.pop("population", {})
    return EfficientZeroRun(
        replay=ReplayConfig(**settings), population=PopulationConfig(**population)
    )


def games(num, envs=1):
    """Games of one step each, so that all of them can be drawn."""
    yes = torch.ones(num, envs, dtype=torch.bool)
    observation = torch.zeros(num, envs, 1)
    state = {"observation": observation, "terminated": yes, "truncated": ~yes}
    return TensorDict({**state, "next": {"observation": observation}}, [num, envs])


@pytest.mark.parametrize("case", IMPORTANCE["cases"])
@pytest.mark.parametrize("kind", ["one", "shared", "own"])
def test_weights_are_those_of_efficientzero(kind, case, monkeypatch):
    priority = torch.tensor(case["priorities"], dtype=torch.float64)
    members = {} if kind == "one" else {"size": 2, "replay": kind}
    config = run_with(alpha=case["alpha"], beta=case["beta"], population=members)
    replays = Replays(config, SPEC, Path("nowhere"))
    envs = 2 if kind == "own" else 1
    index = replays.replay.extend(games(len(priority), envs))
    for member, buffer in enumerate(replays.buffers):
        buffer.update_priority(index[:, member], priority)
    chance, batch = priority ** case["alpha"], torch.tensor(case["batch"])
    middle = ((chance.cumsum(0) - chance / 2) / chance.sum())[batch]  # draws exactly these
    monkeypatch.setattr(torch, "rand", lambda n, **options: middle.clone())
    drawn = replays.replay.sample(len(batch))
    expected = torch.tensor(case["weights_of_the_batch"]).expand(drawn.batch_size)
    assert torch.equal(drawn["index"], index[batch, 0].expand(drawn.batch_size))
    torch.testing.assert_close(drawn["priority_weight"], expected, rtol=1e-4, atol=1e-6)


def test_one_priority_of_zero_does_not_lower_the_learning_rate():
    replay = make_replay(run_with(), SPEC, Path("nowhere"))
    index = replay.extend(games(1_000)).flatten()
    replay.update_priority(index, torch.ones(1_000))
    replay.update_priority(index[:1], 0.0)
    weights = torch.stack([replay.sample(8)["priority_weight"] for _ in range(20)])
    assert weights.mean() > 0.9


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_starts_are_drawn_without_replacement_where_there_are_enough(alpha):
    replay = make_replay(run_with(alpha=alpha), SPEC, Path("nowhere"))
    replay.extend(games(40))
    for num, distinct in ((40, 40), (39, 39), (41, None)):
        found = replay.sample(num)["index"]
        assert len(found) == num
        assert len(found.unique()) == distinct or distinct is None and len(found.unique()) < 41
