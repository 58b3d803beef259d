"""Runs of ILQL whose batches are shared by processes: the bits of a batch in parts."""

import hashlib
import os
import signal
from contextlib import closing

import pytest

from raffia.distributed.follow import Followers
from raffia.recipes.algorithm import ALGORITHMS
from raffia.recipes.ilql.experiment import ILQLExperiment
from raffia.recipes.population_config import PopulationConfig
from raffia.recipes.run_folder import write_config
from raffia.recipes.running import resume_run, train_run
from raffia.train.checkpoint import Checkpoints
from raffia.train.session import TrainingSession
from tests.recipes.runs import Quiet
from tests.recipes.test_ilql_all_settings import WORDLE, make_bases
from tests.recipes.test_settings import with_all

ILQL = ALGORITHMS["ilql"]


def digest(folder):
    """Of the learner's state, and what was written of evaluations."""
    found = Checkpoints(folder / "checkpoints").newest(print)
    code = hashlib.sha256()
    for key, value in sorted(found.tensors("state").items(True, True), key=str):
        code.update(str(key).encode() + value.contiguous().numpy().tobytes())
    return found.update, found.extras["evaluate"], code.hexdigest()


def trained(config, folder, **changes):
    result = train_run(ILQL, with_all(config, **changes), folder, view=Quiet())
    assert result.reason == "finished"
    return digest(folder)


def test_two_processes_learn_the_bits_of_two_parts(tmp_path):
    parts = trained(WORDLE, tmp_path / "parts", num_micro_batches=2)
    assert trained(WORDLE, tmp_path / "shared", learners__num=2) == parts
    assert trained(WORDLE, tmp_path / "one") != parts


def test_sums_in_order_are_those_of_any_number_of_parts(tmp_path, monkeypatch):
    given = []
    made = Followers.__init__

    def noted(self, *arguments, **options):
        given.append(options["sums"])
        made(self, *arguments, **options)

    monkeypatch.setattr(Followers, "__init__", noted)
    parts = trained(WORDLE, tmp_path / "parts", num_micro_batches=3)
    shared = trained(WORDLE, tmp_path / "shared", learners__num=3, learners__sums="ordered")
    assert shared == parts
    assert given == ["ordered"]


def test_each_process_may_cut_its_part_further(tmp_path):
    config = with_all(WORDLE, batch_size=8, num_updates=3, num_micro_batches=2)
    assert trained(config, tmp_path / "shared", learners__num=2)[0] == 3


def test_changes_of_a_language_model_with_dropout_are_shared(tmp_path):
    """What does not learn is read from the run's folder."""
    lora = with_all(make_bases(tmp_path)["lora"], batch_size=4)
    parts = trained(lora, tmp_path / "parts", num_micro_batches=2)
    assert trained(lora, tmp_path / "shared", learners__num=2) == parts


def test_a_run_goes_on_whatever_dies_and_how_often_it_stops(tmp_path):
    parts = trained(WORDLE, tmp_path / "parts", num_micro_batches=2)
    config, folder = with_all(WORDLE, learners__num=2), tmp_path / "shared"
    folder.mkdir()
    write_config(folder, config, "", (), ILQL)
    with closing(ILQLExperiment(config, folder, Quiet())) as experiment:
        assert experiment.followers is not None
        with closing(TrainingSession(experiment)) as session:
            calls = 0

            def stop():
                nonlocal calls
                calls += 1
                if calls == 2:
                    os.kill(experiment.followers.workers[0].pid, signal.SIGKILL)
                return calls > 3

            assert session.run(stop).reason == "stopped"
        assert experiment.followers.num_restarts == 1
        assert experiment.followers.num_broadcasts == 2
    assert resume_run(folder, view=Quiet()).reason == "finished"
    assert digest(folder) == parts


def test_what_processes_can_not_share_is_refused():
    with pytest.raises(ValueError, match=r"batch_size=6 can't be shared evenly by learners.num=4"):
        with_all(WORDLE, learners__num=4)
    with pytest.raises(ValueError, match=r"take a batch_size that 4 divides"):
        with_all(WORDLE, learners__num=2, num_micro_batches=2)
    with pytest.raises(ValueError, match=r"learners.num=2 .* and population.size=2: leave one"):
        with_all(WORDLE, learners__num=2, population=PopulationConfig(size=2))
    with pytest.raises(ValueError, match=r"learners.num=2 .* and device=cuda: leave one"):
        with_all(WORDLE, learners__num=2, device="cuda")
    with pytest.raises(ValueError, match=r"learners.num=2 .* and compile=True: leave one"):
        with_all(WORDLE, learners__num=2, compile=True)
    with pytest.raises(ValueError, match=r"num=0"):
        with_all(WORDLE, learners__num=0)
