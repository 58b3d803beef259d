"""Runs of ILQL whose batches are shared by processes: the bits of a batch in parts."""

import hashlib
import json
import os
import signal
from contextlib import closing

import pytest
import torch

from raffia.distributed.follow import Followers
from raffia.distributed.sharded import StateLost
from raffia.recipes.algorithm import ALGORITHMS
from raffia.recipes.ilql.experiment import ILQLExperiment
from raffia.recipes.population_config import PopulationConfig
from raffia.recipes.run_folder import write_config
from raffia.recipes.running import MOST_LOSSES, resume_run, train_run
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


@pytest.mark.slow
def test_two_processes_learn_the_bits_of_two_parts(tmp_path):
    parts = trained(WORDLE, tmp_path / "parts", num_micro_batches=2)
    assert trained(WORDLE, tmp_path / "shared", learners__num=2) == parts
    assert trained(WORDLE, tmp_path / "one") != parts


@pytest.mark.slow
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


@pytest.mark.slow
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
        metrics = experiment.extra_metrics(0)
        assert metrics["waited_for_learners_seconds"] > 0 and metrics["learner_restarts"] == 1
        assert experiment.followers.num_broadcasts == 2
    assert resume_run(folder, view=Quiet()).reason == "finished"
    assert digest(folder) == parts


def test_the_settings_of_the_engine_get_there(tmp_path):
    settings = dict(max_restarts=7, patience_seconds=9.0, spares=1)
    config = with_all(WORDLE, learners__num=2, **{f"engine__{k}": v for k, v in settings.items()})
    (tmp_path / "run").mkdir()
    with closing(ILQLExperiment(config, tmp_path / "run", Quiet())) as experiment:
        followers = experiment.followers
        assert (followers.max_restarts, followers.patience) == (7, 9.0)
        assert followers._engine.spares == 1


# ------------------------------------------------------------------------------- in parts

SHARDED = {"learners__num": 2, "learners__state": "sharded"}


def state_of(folder):
    return Checkpoints(folder / "checkpoints").newest(print).tensors("state")


@pytest.mark.parametrize("num", [2, 3])
@pytest.mark.parametrize("max_grad_norm", [None, 1e-3])
def test_a_state_in_parts_learns_what_a_whole_one_learns(num, max_grad_norm, tmp_path):
    """But for last bits: of the norm, and of Adam's kernel where a row begins elsewhere.

    Attention does not change with the bias of its keys, whose gradients are rounding alone; Adam
    makes steps of it.
    """
    config = with_all(WORDLE, optimizer__max_grad_norm=max_grad_norm)
    trained(config, tmp_path / "parts", num_micro_batches=num)
    sharded = {**SHARDED, "learners__num": num}
    first = trained(config, tmp_path / "sharded", **sharded)
    expected = state_of(tmp_path / "parts")
    for key, value in state_of(tmp_path / "sharded").items(True, True):
        there, (rows, *_) = expected[key], [*value.shape, 0]
        if key[-1] == "bias" and rows == 3 * WORDLE.model.trunk.n_embd:
            value, there = ([*one.chunk(3)][::2] for one in (value, there))
        torch.testing.assert_close(value, there, rtol=1e-5, atol=1e-5)
    if num == 2 and max_grad_norm:
        assert trained(config, tmp_path / "again", **sharded) == first


def test_each_process_holds_its_part_alone(tmp_path):
    config, folder = with_all(WORDLE, **SHARDED), tmp_path / "run"
    folder.mkdir()
    write_config(folder, config, "", (), ILQL)

    def size(state):
        return sum(leaf.nbytes for leaf in state.values(True, True))

    with closing(ILQLExperiment(config, folder, Quiet())) as experiment:
        state = whole = experiment.init()
        for number in range(2):
            update, _ = experiment.learner.grads(state, experiment.next_batch(state))
            state = experiment.learner.apply(state, update)
            assert size(state) < 0.55 * size(whole), number
        assert size(experiment.whole(state)) == size(whole)


def deadly(deaths, made):
    """Makes experiments whose first follower is killed before the updates after these steps."""

    def make(config, folder, view):
        experiment = ILQLExperiment(config, folder, view)
        grads = experiment.learner.grads

        def killing(state, batch):
            if deaths(int(state["step"])):
                os.kill(experiment.followers.workers[0].pid, signal.SIGKILL)
            return grads(state, batch)

        experiment.learner.grads = killing
        made.append(experiment)
        return experiment

    return make


@pytest.mark.slow
def test_a_run_in_parts_goes_on_by_itself_when_a_part_is_lost(tmp_path):
    """A part that is lost is lost: it goes on from the newest checkpoint, or begins again."""
    config = with_all(WORDLE, num_updates=9, checkpoint__every_updates=3, **SHARDED)
    plain = trained(config, tmp_path / "plain")
    deaths, said, made = [1, 4, 8, 4, 8], [], []

    class Telling(Quiet):
        def message(self, text):
            said.append(text)

    def dies(step):
        is_due = deaths[:1] == [step]
        del deaths[: int(is_due)]
        return is_due

    folder = tmp_path / "killed"
    make = deadly(dies, made)
    result = train_run(ILQL, config, folder, view=Telling(), make=make)
    assert result.reason == "finished" and digest(folder) == plain
    assert len(made) == 4 and deaths == [4, 8]
    assert sum("go on from what was saved last; it does so by itself" in text for text in said) == 3
    read = (folder / "metrics.jsonl").read_text()
    kinds = [json.loads(row)["kind"] for row in read.splitlines()]
    assert "error" not in kinds

    stopped, calls = tmp_path / "stopped", []
    train_run(ILQL, config, stopped, view=Quiet(), stop=lambda: calls.append(0) or len(calls) > 4)
    assert resume_run(stopped, view=Quiet()).reason == "finished"
    assert digest(stopped) == plain


@pytest.mark.slow
def test_parts_that_are_lost_again_and_again_end_the_run(tmp_path):
    made = []
    config = with_all(WORDLE, **SHARDED)
    with pytest.raises(StateLost, match="go on from what was saved last"):
        make = deadly(lambda step: step == 1, made)
        train_run(ILQL, config, tmp_path / "run", view=Quiet(), make=make)
    assert len(made) == 1 + MOST_LOSSES
    whole = with_all(config, learners__state="whole", learners__num=1)
    assert resume_run(tmp_path / "run", config=whole, view=Quiet()).reason == "finished"


@pytest.mark.slow
def test_a_run_may_be_resumed_whole_or_in_parts(tmp_path):
    first = with_all(WORDLE, num_updates=3, **SHARDED)
    train_run(ILQL, first, tmp_path / "run", view=Quiet())
    whole = with_all(first, num_updates=5, learners__state="whole", learners__num=1)
    assert resume_run(tmp_path / "run", config=whole, view=Quiet()).update == 5
    three = with_all(first, num_updates=7, learners__num=3)
    assert resume_run(tmp_path / "run", config=three, view=Quiet()).update == 7


def test_what_processes_can_not_share_is_refused():
    with pytest.raises(ValueError, match=r"state=sharded .* there is one: set learners.num=2"):
        with_all(WORDLE, learners__state="sharded")
    with pytest.raises(ValueError, match=r"state='halved' is none of"):
        with_all(WORDLE, learners__num=2, learners__state="halved")
    with pytest.raises(ValueError, match=r"batch_size=6 can't be shared evenly by learners.num=4"):
        with_all(WORDLE, learners__num=4)
    with pytest.raises(ValueError, match=r"take a batch_size that 4 divides"):
        with_all(WORDLE, learners__num=2, num_micro_batches=2)
    with pytest.raises(ValueError, match=r"learners.num=2 .* and population.size=2: leave one"):
        with_all(WORDLE, learners__num=2, population=PopulationConfig(size=2))
    with pytest.raises(ValueError, match="learners.state=sharded on device=cuda: leave one"):
        with_all(WORDLE, **SHARDED, device="cuda")
    with pytest.raises(ValueError, match=r"learners.num=2 .* and compile=True: leave one"):
        with_all(WORDLE, learners__num=2, compile=True)
    with pytest.raises(ValueError, match=r"num=0"):
        with_all(WORDLE, learners__num=0)
