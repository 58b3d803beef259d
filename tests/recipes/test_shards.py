"""Runs whose replay is in shards: the same bits, whoever holds the shards, and who dies."""

import hashlib
from contextlib import closing

import pytest
import torch

from raffia.data.segment import SegmentReplayBuffer
from raffia.data.segment_shards import ReplayShards
from raffia.recipes.efficientzero.config import ReplayConfig
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.recipes.population_config import PopulationConfig
from raffia.recipes.run_folder import write_config
from raffia.recipes.running import resume_run, train_run
from raffia.train.checkpoint import Checkpoints
from raffia.train.experiment import RunError
from raffia.train.session import TrainingSession
from tests.recipes.runs import Quiet
from tests.recipes.test_actors import EFFICIENTZERO
from tests.recipes.test_actors import trained as trained_whole
from tests.recipes.test_reanalyzers import NOW as ONE
from tests.recipes.test_reanalyzers import stopped
from tests.recipes.test_settings import BASES, VECTOR, with_all

# Four environments; the rings are overwritten while batches are open.
NOW = with_all(ONE, replay__shards=2, env__num_envs=4, replay__capacity=140)
LATE = with_all(NOW, reanalyzers__ahead=7)


def digest(folder):
    """Of the learner's state, all shards, and what was written of evaluations."""
    found = Checkpoints(folder / "checkpoints").newest(print)
    code = hashlib.sha256()
    names = sorted(file.removesuffix(".safetensors") for file in found.folder.files)
    parts = ["state", *(name for name in names if name.startswith("replay"))]
    for part in parts:
        for key, value in sorted(found.tensors(part).items(True, True), key=str):
            code.update(str((part, key)).encode() + value.contiguous().numpy().tobytes())
    return found.update, found.extras["evaluate"], len(parts), code.hexdigest()


def trained(config, folder, **changes):
    result = train_run(EFFICIENTZERO, with_all(config, **changes), folder, view=Quiet())
    assert result.reason == "finished"
    return digest(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Of runs in one process: made when they are due, and drawn ahead."""
    folder = tmp_path_factory.mktemp("plain")
    found = {"now": trained(NOW, folder / "now"), "late": trained(LATE, folder / "late")}
    assert found["now"] != found["late"] and found["now"][2] == 3
    return found


def made(config, folder):
    folder.mkdir()
    return closing(EfficientZeroExperiment(config, folder, Quiet()))


def test_by_default_there_is_one_buffer_as_ever(tmp_path):
    with made(ONE, tmp_path / "one") as run:
        assert type(run.replay) is SegmentReplayBuffer and run.replay.reuse_memory
        assert [log.name for log, _ in run.replays] == ["replay"]
    assert trained_whole(with_all(ONE, replay__shards=1), tmp_path / "1") == trained_whole(
        ONE, tmp_path / "0"
    )


def test_shards_divide_capacity_and_environments_and_draw_by_generators_of_their_own(tmp_path):
    with made(with_all(NOW, replay__capacity=141), tmp_path / "run") as run:
        assert type(run.replay) is ReplayShards and run.replay.reuse_memory
        assert [shard.storage.max_size for shard in run.replay.shards] == [71 + 4] * 2
        assert [log.name for log, _ in run.replays] == ["replay.0", "replay.1"]
        states = [shard.state_dict()["books"]["generator"]["state"] for shard in run.replay.shards]
        assert not torch.equal(*states)


def test_another_number_of_shards_is_another_run(plain, tmp_path):
    found = trained(NOW, tmp_path / "four", replay__shards=4)
    assert found[2] == 5 and found[1] != [] and found[3] != plain["now"][3]
    one = with_all(NOW, replay__shards=1)
    assert trained(one, tmp_path / "one")[3] != plain["now"][3]


def test_the_same_run_twice_is_the_same(plain, tmp_path):
    assert trained(NOW, tmp_path / "now") == plain["now"]


@pytest.mark.parametrize("stop_at", [3, 19, 40])
@pytest.mark.parametrize("name", ["now", "late"])
def test_a_resume_goes_on_bit_for_bit(name, stop_at, plain, tmp_path):
    config, folder = {"now": NOW, "late": LATE}[name], tmp_path / "run"
    folder.mkdir()
    with closing(EfficientZeroExperiment(config, folder, Quiet())) as experiment:
        with closing(TrainingSession(experiment)) as session:
            stop = iter([False] * stop_at)
            assert session.run(lambda: next(stop, True)).reason == "stopped"
    write_config(folder, config, "", (), EFFICIENTZERO)
    assert resume_run(folder, config=config, view=Quiet()).reason == "finished"
    assert digest(folder) == plain[name]


def test_the_number_of_shards_can_not_change_at_a_resume(tmp_path):
    stopped(LATE, tmp_path / "run", 5)
    other = with_all(LATE, replay__shards=1)
    with pytest.raises(RunError, match=r"replay.shards: .* was started with other values"):
        resume_run(tmp_path / "run", config=other, view=Quiet())


def test_rows_on_disk_are_the_same(plain, tmp_path):
    assert trained(NOW, tmp_path / "run", replay__on_disk=True) == plain["now"]
    assert sorted(path.name for path in (tmp_path / "run/replay").iterdir()) == ["0", "1"]


@pytest.mark.parametrize(
    "base",
    ["box", "stack", *(pytest.param(name, marks=pytest.mark.slow) for name in ("board", "gumbel"))],
)
def test_every_kind_of_batch_is_drawn_from_shards(base, tmp_path):
    """And resumed; without priorities, too."""
    config = with_all(
        BASES[base],
        env__num_envs=2,
        replay__shards=2,
        replay__alpha=0.0 if base == "box" else 0.6,
        evaluate__num_episodes=2,
        reanalyzers__ahead=3,
    )
    whole = trained(config, tmp_path / "whole")
    update, drawn = stopped(config, tmp_path / "run", 2)
    assert sorted(map(int, drawn.keys())) == [*range(update, update + 3)]
    assert resume_run(tmp_path / "run", config=config, view=Quiet()).reason == "finished"
    assert digest(tmp_path / "run") == whole


# -------------------------------------------------------------------------------- refusals


def test_settings_that_can_not_be_are_refused():
    with pytest.raises(ValueError, match="shards=0"):
        ReplayConfig(shards=0)
    with pytest.raises(ValueError, match=r"batch_size=256 .* replay.shards=3: .*batch_size=258"):
        ReplayConfig(shards=3)
    with pytest.raises(ValueError, match=r"shards=2 .* env.num_envs=3 .*take env.num_envs=4"):
        with_all(VECTOR, replay__shards=2)
    with pytest.raises(ValueError, match=r"shards=2 with population.size=2: .*leave replay.shards"):
        with_all(NOW, population=PopulationConfig(size=2))
