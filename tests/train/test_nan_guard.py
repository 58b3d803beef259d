import json
import os

import pytest
import torch

from raffia.tensordict.tensordict import TensorDict
from raffia.train.nan_guard import NaNGuard, NonFiniteError, all_finite, non_finite
from tests.marks import slow_among

NAN, INF = float("nan"), float("inf")


def learner():
    """A state, a batch [4], an update, and metrics: all finite."""
    weight = dict(body=dict(weight=torch.ones(3, 2)))
    batch = dict(observation=torch.ones(4, 2, 3), image=torch.full((4, 2), 255, dtype=torch.uint8))
    metrics = dict(loss=torch.tensor(0.5), policy_loss=torch.tensor(0.25), priority=torch.ones(4))
    return (
        TensorDict(params=weight, step=torch.tensor(11)),
        TensorDict(batch, batch_size=[4]),
        TensorDict(grads=weight).clone(),
        TensorDict(metrics),
    )


NO_LOSS = ("loss", torch.tensor(NAN))


def stopped(folder, **changes):
    """The error of a guard when these entries are set."""
    parts = dict(zip(("state", "batch", "update", "metrics"), learner(), strict=True))
    for name, (key, value) in changes.items():
        parts[name][key] = value
    with pytest.raises(NonFiniteError) as error:
        NaNGuard(folder, seed=3)(*parts.values())
    return error.value


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("key", ["loss", "policy_loss", "priority"])
def test_a_metric_is_found_by_its_name(tmp_path, key, value):
    bad = torch.tensor([1.0, 1.0, value, value] if key == "priority" else value)
    error = stopped(tmp_path, metrics=(key, bad))
    assert [(finding.where, finding.key) for finding in error.found] == [("metrics", key)]
    assert error.update == 12 and f"metrics {key}: {value}" in str(error)
    assert error.found[0].rows == ((2, 3) if key == "priority" else ())


def test_an_observation_is_found_by_key_and_row(tmp_path):
    observation = torch.ones(4, 2, 3)
    observation[1, 0, 2] = observation[3, 1, 1] = NAN
    error = stopped(tmp_path, batch=("observation", observation), metrics=NO_LOSS)
    assert "batch observation: nan in rows 1, 3 (2 of 24 numbers); metrics loss: nan" in str(error)
    saved = TensorDict.load(f"{error.path}/batch.safetensors")
    assert saved["observation"].isnan().nonzero().tolist() == [[1, 0, 2], [3, 1, 1]]
    assert torch.equal(saved["image"], torch.full((4, 2), 255, dtype=torch.uint8))


def test_the_report_has_all_findings(tmp_path):
    NaNGuard(tmp_path / "run", seed=3)(*learner())
    assert os.listdir(tmp_path) == []  # finite values pass, and nothing is written
    for _ in range(2):  # it can happen again
        error = stopped(tmp_path / "run" / "nan_dump", metrics=NO_LOSS)
    assert os.listdir(tmp_path / "run" / "nan_dump") == ["000000012"]
    assert error.path == str(tmp_path / "run" / "nan_dump" / "000000012")
    assert sorted(os.listdir(error.path)) == ["batch.safetensors", "report.json"]
    with open(f"{error.path}/report.json") as file:
        report = json.load(file, parse_constant=lambda name: pytest.fail(name))
    assert report["update"] == 12 and report["seeds"] == {"seed": 3}
    assert report["metrics"] == {"loss": "nan", "policy_loss": 0.25}
    found = {"where": "metrics", "key": "loss", "num": 1, "of": 1, "rows": [], "value": "nan"}
    assert report["found"] == [found]


def test_steps_of_envs_can_be_checked(tmp_path):
    steps = TensorDict(observation=torch.ones(4, 3), reward=torch.zeros(4), batch_size=[4])
    guard = NaNGuard(tmp_path)
    guard.check(steps, update=5)
    steps["reward"][2] = -INF
    message = "update 5 is not finite: batch reward: -inf in rows 2"
    with pytest.raises(NonFiniteError, match=message):
        guard.check(steps, update=5)


def test_a_dump_that_cannot_be_written_does_not_hide_the_error(tmp_path):
    (tmp_path / "nan_dump").write_text("a file in the way")
    error = stopped(tmp_path / "nan_dump", metrics=NO_LOSS)
    assert "metrics loss: nan. The batch could not be saved in" in str(error)


# -- in little memory


def test_checking_a_state_takes_little_memory():
    import resource

    state = TensorDict(a=torch.ones(3000, 5000), b=torch.ones(2000, 5000).t(), c=torch.ones(3))
    assert all_finite(state)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    half = torch.empty(12_500_000).fill_(1)  # so that the peak from before is the present use
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    del half
    assert all_finite(state)
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - max(before, used)
    assert more < 30_000  # kilobytes; the state has 100 MB, and joined it took 250 MB more


@pytest.mark.parametrize("value", slow_among([NAN, INF, -INF], INF))
@pytest.mark.parametrize("shape", [(), (3,), (200, 101), (3, 1 << 20), (2, 3, 1 << 19)])
def test_one_number_is_found_in_entries_of_any_size(shape, value):
    finite = {"i": torch.arange(3), "small": torch.ones(2), "none": torch.ones(0)}
    for transposed in (False, True):
        leaf = torch.ones(shape)
        leaf = leaf.transpose(0, -1) if transposed and leaf.dim() > 1 else leaf
        assert all_finite(TensorDict(**finite, leaf=leaf))
        for position in (0, -1):
            bad = leaf.clone()
            index = tuple([position] * bad.dim())
            bad[index] = value
            assert not all_finite(TensorDict(**finite, leaf=bad))
            for dtype in (torch.float64, torch.bfloat16, torch.complex64):
                assert not all_finite(TensorDict(leaf=bad.to(dtype)))
    assert all_finite(TensorDict()) and all_finite(TensorDict(i=torch.arange(3)))
    (finding,) = non_finite("b", TensorDict(b=torch.tensor([1.0, value])))
    assert finding.rows == (1,)
