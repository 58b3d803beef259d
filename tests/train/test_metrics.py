import json
import math

import pytest
import torch

from raffia.tensordict.tensordict import TensorDict
from raffia.train.metrics import PhaseClock, RunningMeans


@pytest.mark.parametrize("num", [1, 255, 256, 257, 700])
def test_means_are_those_of_all_values(num):
    losses = torch.rand(num, generator=torch.Generator().manual_seed(0))
    means = RunningMeans()
    for i, loss in enumerate(losses):
        means.add(TensorDict(loss=loss, priority=torch.stack([loss, loss + 1])))
        if i % 2 == 0:
            means.add({"length": i})
    found = means.take()
    assert found["loss"] == pytest.approx(float(losses.double().mean()), abs=1e-12)
    assert found["priority"] == pytest.approx(found["loss"] + 0.5, abs=1e-6)
    assert found["length"] == sum(range(0, num, 2)) / len(range(0, num, 2))
    assert means.take() == {}


def test_a_nan_shows_in_one_mean_and_does_not_stay():
    means = RunningMeans()
    means.add({"loss": torch.tensor(float("nan"))})
    means.add({"loss": torch.tensor(1.0)})
    assert math.isnan(means.take()["loss"])
    means.add({"loss": torch.tensor(1.0)})
    assert means.take() == {"loss": 1.0}


def test_means_continue_after_a_resume():
    values = torch.rand(40, generator=torch.Generator().manual_seed(0))
    uninterrupted, resumed = RunningMeans(), RunningMeans()
    for i, value in enumerate(values):
        uninterrupted.add({"loss": value})
        resumed.add({"loss": value})
        if i == 17:
            uninterrupted.state()  # a checkpoint does so in an uninterrupted run, too
            resumed, state = RunningMeans(), json.loads(json.dumps(resumed.state()))
            resumed.load_state(state)
    assert uninterrupted.take() == resumed.take()


# -- times


def test_nested_phases_are_subtracted_and_end_with_an_error():
    now = [0.0]
    clock = PhaseClock(now=lambda: now[0])
    with clock.phase("learn"):
        now[0] += 1
        with pytest.raises(KeyError), clock.phase("targets"):
            now[0] += 2
            with clock.phase("learn"):
                now[0] += 4
            raise KeyError
        now[0] += 8
    now[0] += 100  # in no phase
    with clock.phase("collect"):
        now[0] += 16
        expected = {"seconds_learn": 13.0, "seconds_targets": 2.0, "seconds_collect": 16.0}
        assert clock.take() == expected
        now[0] += 32
    assert clock.take() == dict.fromkeys(expected, 0.0) | {"seconds_collect": 32.0}
