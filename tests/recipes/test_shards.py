"""Runs whose replay is in shards: the same bits, whoever holds the shards, and who dies."""

import hashlib
from contextlib import closing
from itertools import pairwise

import pytest
import torch

from raffia import TensorDict
from raffia.data.segment import SegmentReplayBuffer
from raffia.data.segment_shards import ReplayShards
from raffia.distributed import ChaosEngine, InlineEngine
from raffia.recipes.efficientzero import reanalyzers
from raffia.recipes.efficientzero.config import ReplayConfig
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.recipes.population_config import PopulationConfig
from raffia.recipes.run_folder import write_config
from raffia.recipes.running import resume_run, train_run
from raffia.search.errors import UnfitOutputError
from raffia.train.checkpoint import Checkpoints
from raffia.train.experiment import RunError
from raffia.train.nan_guard import NonFiniteError
from raffia.train.session import TrainingSession
from tests.recipes.killing import KillingEngine
from tests.recipes.runs import Quiet
from tests.recipes.test_actors import EFFICIENTZERO, with_engine
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


@pytest.mark.slow
def test_by_default_there_is_one_buffer_as_ever(tmp_path):
    with made(ONE, tmp_path / "one") as run:
        assert type(run.replay) is SegmentReplayBuffer and run.replay.reuse_memory
        assert list(run.replays) == ["replay"]
    assert trained_whole(with_all(ONE, replay__shards=1), tmp_path / "1") == trained_whole(
        ONE, tmp_path / "0"
    )


def test_shards_divide_capacity_and_environments_and_draw_by_generators_of_their_own(tmp_path):
    with made(with_all(NOW, replay__capacity=141), tmp_path / "run") as run:
        assert type(run.replay) is ReplayShards and run.replay.reuse_memory
        assert [shard.storage.max_size for shard in run.replay.shards] == [71 + 4] * 2
        assert list(run.replays) == ["replay.0", "replay.1"]
        states = [shard.state_dict()["buffer"]["generator"]["state"] for shard in run.replay.shards]
        assert not torch.equal(*states)


@pytest.mark.slow
def test_another_number_of_shards_is_another_run(plain, tmp_path):
    found = trained(NOW, tmp_path / "four", replay__shards=4)
    assert found[2] == 5 and found[1] != [] and found[3] != plain["now"][3]
    one = with_all(NOW, replay__shards=1)
    assert trained(one, tmp_path / "one")[3] != plain["now"][3]


def test_each_part_of_each_batch_is_made_with_a_generator_of_its_own(tmp_path, monkeypatch):
    seeds, make_batch = [], reanalyzers.make_batch

    def seen(*arguments, generator, **options):
        seeds.append(generator.initial_seed())
        return make_batch(*arguments, generator=generator, **options)

    monkeypatch.setattr(reanalyzers, "make_batch", seen)
    trained(NOW, tmp_path / "run")
    assert len(seeds) == len(set(seeds)) == 2 * NOW.num_updates


def test_the_same_run_twice_is_the_same(plain, tmp_path):
    assert trained(NOW, tmp_path / "now") == plain["now"]


# -------------------------------------------------------------------- shards with the workers


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("name", ["now", "late"])
def test_who_holds_the_shards_changes_nothing(name, num, plain, tmp_path):
    config = {"now": NOW, "late": LATE}[name]
    assert trained(config, tmp_path / "run", reanalyzers__num=num) == plain[name]


@pytest.mark.slow
def test_four_shards_with_two_workers(tmp_path):
    config = with_all(LATE, replay__shards=4)
    assert trained(config, tmp_path / "run", reanalyzers__num=2) == trained(config, tmp_path / "0")


def test_workers_are_sent_numbers_of_rows_and_new_steps(tmp_path, monkeypatch):
    """No task has the frames of segments; each row is sent once to each worker."""
    tasks, sent = [], []

    class Seen(InlineEngine):
        def start(self, *arguments):
            worker = super().start(*arguments)
            ask, load = worker.ask, worker.load

            def seen(task, weights):
                tasks.append(set(task["segments"].keys()))
                sent.extend((arguments[2], name, new) for name, new in task["rows"].items())
                ask(task, weights)

            def loaded(state):
                sent.extend((arguments[2], name, new) for name, new in state["rows"].items())
                load(state)

            worker.ask, worker.load = seen, loaded
            return worker

    with_engine(monkeypatch, Seen())
    trained(LATE, tmp_path / "run", reanalyzers__num=2)
    assert len(tasks) == 80 and all("frame_rows" in names for names in tasks)
    assert not any("observation" in names for names in tasks)
    for worker in range(2):
        spans = [
            (int(new["first"]), int(new["first"]) + len(new["rows"]))
            for index, name, new in sent
            if (index, name) == (worker, str(worker))
        ]
        assert all(stop == first for (_, stop), (first, _) in pairwise(spans))
        assert len({index for index, name, _ in sent if name == str(worker)}) == 1
        assert spans[-1][1] > 75  # more than the ring has


def test_processes_hold_the_same(plain, tmp_path):
    there = dict(reanalyzers__num=2, engine__name="process", actors__num=2, evaluators__num=1)
    assert trained(LATE, tmp_path / "late", **there) == plain["late"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_ray_cluster_holds_the_same(plain, tmp_path):
    there = dict(reanalyzers__num=2, engine__name="ray", reanalyzers__cpus=0.5)
    assert trained(LATE, tmp_path / "late", **there) == plain["late"]


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_workers_that_die_change_nothing(seed, num, plain, tmp_path, monkeypatch):
    engine = ChaosEngine(seed, lost=0.15, wasted=0.15)
    with_engine(monkeypatch, engine)
    there = dict(reanalyzers__num=num, engine__max_restarts=50)
    assert trained(LATE, tmp_path / "late", **there) == plain["late"]
    assert engine.num_lost > 3


@pytest.mark.slow
@pytest.mark.parametrize("every", [30, pytest.param(11, marks=pytest.mark.slow)])
@pytest.mark.timeout(300)
def test_workers_that_are_killed_change_nothing(every, plain, tmp_path, monkeypatch):
    engine = KillingEngine("ask", every)
    with_engine(monkeypatch, engine)
    assert trained(LATE, tmp_path / "late", reanalyzers__num=2) == plain["late"]
    assert engine.num_killed >= 2


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [3, 19, 40])
@pytest.mark.parametrize(("first", "then"), [(2, 0), (0, 2), (4, 1)])
def test_who_holds_the_shards_may_change_at_a_resume(first, then, stop_at, plain, tmp_path):
    folder = tmp_path / "run"
    update, drawn = stopped(with_all(LATE, reanalyzers__num=first), folder, stop_at)
    assert sorted(map(int, drawn.keys())) == [*range(update, min(40, update + 7))]
    whole = ["observation" in drawn[name, "task", "segments"].keys() for name in drawn.keys()]
    assert any(whole) == (stop_at >= 40)  # of what was overwritten since
    assert not any("frame_rows" in drawn[name, "task", "segments"].keys() for name in drawn.keys())
    config = with_all(LATE, reanalyzers__num=then)
    assert resume_run(folder, config=config, view=Quiet()).reason == "finished"
    assert digest(folder) == plain["late"]


def test_what_is_not_finite_stops_the_run_with_its_frames(tmp_path, monkeypatch):
    def broken(segments, *arguments, **options):
        if int(segments["index"][0]) % 2:
            raise UnfitOutputError("root.value is NaN")
        return make_batch(segments, *arguments, **options)

    make_batch = reanalyzers.make_batch
    monkeypatch.setattr(reanalyzers, "make_batch", broken)
    for num in (0, 2):
        with pytest.raises(NonFiniteError, match=r"update 1 is not finite: root.value is NaN"):
            trained(LATE, tmp_path / str(num), reanalyzers__num=num)
        assert (tmp_path / str(num) / "nan_dump" / "000000001").is_dir()
    dumps = [
        TensorDict.load(tmp_path / str(num) / "nan_dump" / "000000001" / "batch.safetensors")
        for num in (0, 2)
    ]
    assert torch.equal(*(dump["observation"] for dump in dumps))


def test_little_is_kept_for_workers_that_may_die(tmp_path):
    with made(with_all(LATE, reanalyzers__num=2), tmp_path / "run") as run:
        with closing(TrainingSession(run)) as session:
            stop, kept = iter([False] * 35), []

            def stops():
                kept.append(run.ahead.metrics()["mib_kept_for_reanalyzers"] * 2**20)
                return next(stop, True)

            session.run(stops)
        # Of 7 updates' steps, 4 numbers each, no more; rounded as metrics are.
        rows = [feed.num_bytes_kept / 16 for feed in run.ahead._making.feeds]
        assert 0 < max(rows) <= 7 * 2 * 2 + 16
        assert max(kept) <= 2**20 * 0.01


@pytest.mark.slow
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


@pytest.mark.slow
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
    there = with_all(config, reanalyzers__num=2)
    assert resume_run(tmp_path / "run", config=there, view=Quiet()).reason == "finished"
    assert digest(tmp_path / "run") == whole


# -------------------------------------------------------------------------------- refusals


def test_settings_that_can_not_be_are_refused():
    with pytest.raises(ValueError, match="shards=0"):
        ReplayConfig(shards=0)
    with pytest.raises(ValueError, match=r"batch_size=256 .* replay.shards=3: .*batch_size=258"):
        ReplayConfig(shards=3)
    with pytest.raises(ValueError, match=r"shards=2 .* env.num_envs=3 .*take env.num_envs=4"):
        with_all(VECTOR, replay__shards=2)
    with pytest.raises(
        ValueError, match=r"num=3 .*hold as many .*shards=2 .*take reanalyzers.num=2"
    ):
        with_all(NOW, reanalyzers__num=3)
    with pytest.raises(ValueError, match=r"shards=2 with population.size=2: .*leave replay.shards"):
        with_all(NOW, population=PopulationConfig(size=2))
