"""Runs of EfficientZero whose batches are shared by processes: the bits of a batch in parts."""

import hashlib
import os
import signal
from contextlib import closing

import pytest

from raffia.learner import Accumulate
from raffia.recipes.efficientzero import experiment as run_module
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.recipes.population_config import PopulationConfig
from raffia.recipes.run_folder import write_config
from raffia.recipes.running import resume_run, train_run
from raffia.train.checkpoint import Checkpoints
from raffia.train.session import TrainingSession
from tests.recipes.runs import Quiet
from tests.recipes.test_actors import EFFICIENTZERO, SMOKE
from tests.recipes.test_settings import with_all

# Without BatchNorm, of which parts have statistics of their own.
PLAIN = with_all(
    SMOKE,
    model__norm_type="LN",
    model__projection_norm_type="LN",
    replay__batch_size=24,
    targets__reanalyze_ratio=0.5,
    collect__num_env_steps=160,
)


def digest(folder):
    """Of the learner's state and all parts of the replay, and what was written of evaluations."""
    found = Checkpoints(folder / "checkpoints").newest(print)
    code = hashlib.sha256()
    for name in sorted(found.folder.files):
        if name.startswith(("state", "replay")):
            for key, value in sorted(found.tensors(name[:-12]).items(True, True), key=str):
                code.update(str(key).encode() + value.contiguous().numpy().tobytes())
    return found.update, found.extras["evaluate"], code.hexdigest()


def trained(config, folder, **changes):
    result = train_run(EFFICIENTZERO, with_all(config, **changes), folder, view=Quiet())
    assert result.reason == "finished"
    return digest(folder)


@pytest.fixture(scope="module")
def in_parts(tmp_path_factory):
    """The digest of a run in one process, each of whose batches is learnt from in so many parts."""
    found = {}

    def digest_of(num, **changes):
        key = num, *sorted(changes.items())
        if key not in found:
            folder = tmp_path_factory.mktemp("parts") / "run"
            with pytest.MonkeyPatch.context() as patch:
                make = run_module.make_networks

                def with_parts(*arguments):
                    networks = make(*arguments)
                    parts = Accumulate(networks, num)
                    networks.grads, parts.learner = parts.grads, Plain(networks.grads)
                    return networks

                patch.setattr(run_module, "make_networks", with_parts)
                found[key] = trained(PLAIN, folder, **changes)
        return found[key]

    class Plain:
        def __init__(self, grads):
            self.grads = grads

    return digest_of


def test_two_processes_learn_the_bits_of_two_parts(in_parts, tmp_path):
    assert trained(PLAIN, tmp_path / "shared", learners__num=2) == in_parts(2)
    assert trained(PLAIN, tmp_path / "one") != in_parts(2)


@pytest.mark.slow
def test_sums_in_order_are_those_of_any_number_of_parts(in_parts, tmp_path):
    there = dict(learners__num=3, learners__sums="ordered")
    assert trained(PLAIN, tmp_path / "shared", **there) == in_parts(3)


@pytest.mark.slow
def test_learners_shards_and_reanalyzers_go_together(in_parts, tmp_path):
    """With as many shards as learners each learns from the segments of one."""
    shards = dict(env__num_envs=4, replay__shards=2, reanalyzers__ahead=3)
    there = dict(**shards, learners__num=2, reanalyzers__num=2)
    assert trained(PLAIN, tmp_path / "shared", **there) == in_parts(2, **shards)


@pytest.mark.slow
def test_statistics_of_batch_norm_are_means_and_the_run_is_the_same_again(tmp_path):
    config = with_all(SMOKE, collect__num_env_steps=120, learners__num=2)
    first = trained(config, tmp_path / "first")
    assert trained(config, tmp_path / "again") == first


@pytest.mark.slow
def test_a_run_goes_on_whatever_dies_and_how_often_it_stops(in_parts, tmp_path):
    config, folder = with_all(PLAIN, learners__num=2), tmp_path / "shared"
    folder.mkdir()
    write_config(folder, config, "", (), EFFICIENTZERO)
    with closing(EfficientZeroExperiment(config, folder, Quiet())) as experiment:
        with closing(TrainingSession(experiment)) as session:
            calls = 0

            def stop():
                nonlocal calls
                calls += 1
                if calls in (2, 9):
                    os.kill(experiment.followers.workers[0].pid, signal.SIGKILL)
                return calls > 12

            assert session.run(stop).reason == "stopped"
        assert experiment.followers.num_restarts == 2
        metrics = experiment.extra_metrics(0)
        assert metrics["waited_for_learners_seconds"] > 0 and metrics["learner_restarts"] == 2
    assert resume_run(folder, view=Quiet()).reason == "finished"
    assert digest(folder) == in_parts(2)


def test_the_settings_of_the_engine_get_there(tmp_path):
    config = with_all(PLAIN, learners__num=2, engine__max_restarts=7, engine__patience_seconds=9.0)
    config = with_all(config, engine__spares=1)
    with closing(EfficientZeroExperiment(config, tmp_path, Quiet())) as experiment:
        followers = experiment.followers
        assert (followers.max_restarts, followers.patience, followers.num) == (7, 9.0, 1)
        assert followers._engine.spares == 1


def test_what_processes_can_not_share_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"batch_size=24 can't be shared evenly by learners.num=5"):
        with_all(PLAIN, learners__num=5)
    with pytest.raises(ValueError, match=r"learners.num=2 .* and population.size=2: leave one"):
        with_all(PLAIN, learners__num=2, population=PopulationConfig(size=2))
    with pytest.raises(ValueError, match=r"learners.num=2 .* and compile=True: leave one"):
        with_all(PLAIN, learners__num=2, compile=True)
    with pytest.raises(ValueError, match=r"learners.num=2 .* and learners.state=sharded: leave"):
        with_all(PLAIN, learners__num=2, learners__state="sharded")
    config = with_all(PLAIN, learners__num=2)
    with pytest.raises(ValueError, match=r"learners.\* with a make_env or networks of your own"):
        EfficientZeroExperiment(config, tmp_path, Quiet(), networks=lambda: None)
