"""Runs with a sharded learner state: equal learning, and the loss of a shard."""

import os
import signal
from dataclasses import replace

import pytest
import torch

from raffia.distributed import Followers, StateLost
from raffia.recipes import resume, train
from raffia.recipes.ilql.experiment import ILQLExperiment
from tests.recipes.ilql_runs import last
from tests.recipes.layouts import ILQL, WORDLE, experiment, results_of, trained
from tests.recipes.runs import Quiet, rows, with_all

SHARDED = {"learners__num": 2, "learners__state": "sharded"}


@pytest.mark.parametrize(
    ("num", "max_grad_norm"), [(2, 1e-3), pytest.param(3, None, marks=pytest.mark.slow)]
)
def test_a_sharded_state_learns_as_a_whole_one(num, max_grad_norm, tmp_path):
    """Up to rounding: of the norm, and of Adam's kernel with other alignment.

    The bias of attention's keys has no effect: its gradients are rounding errors, which Adam
    amplifies.
    """
    config = with_all(WORDLE, optimizer__max_grad_norm=max_grad_norm)
    trained(config, tmp_path / "parts", num_micro_batches=num)
    sharded = {**SHARDED, "learners__num": num}
    first = trained(config, tmp_path / "sharded", **sharded)
    expected, found = (last(tmp_path / name).tensors("state") for name in ("parts", "sharded"))
    for key, value in found.items(True, True):
        wanted, (rows, *_) = expected[key], [*value.shape, 0]
        if key[-1] == "bias" and rows == 3 * WORDLE.model.trunk.n_embd:
            value, wanted = ([*each.chunk(3)][::2] for each in (value, wanted))
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-5)
    if max_grad_norm:
        assert trained(config, tmp_path / "again", **sharded) == first


def test_each_process_has_its_shard_alone(tmp_path):
    def size(state):
        return sum(leaf.nbytes for leaf in state.values(True, True))

    with experiment(WORDLE, tmp_path / "run", **SHARDED) as run:
        state = full = run.init()
        for number in range(2):
            update, _ = run.learner.grads(state, run.next_batch(state))
            state = run.learner.apply(state, update)
            assert size(state) < 0.55 * size(full), number
        assert size(run.whole(state)) == size(full)


def test_followers_get_the_kind_of_sums_and_micro_batches_may_be_split(tmp_path, monkeypatch):
    kinds, original = [], Followers.__init__

    def recording(self, *arguments, **options):
        kinds.append(options["sums"])
        original(self, *arguments, **options)

    monkeypatch.setattr(Followers, "__init__", recording)
    config = with_all(WORDLE, batch_size=8, num_updates=3, num_micro_batches=2)
    settings = dict(learners__num=2, learners__sums="ordered")
    assert trained(config, tmp_path / "shared", **settings).update == 3
    assert kinds == ["ordered"]


def make_killing(deaths, experiments):
    """Make experiments whose first follower is killed before the updates after these steps."""

    def make(config, folder, view):
        experiment = ILQLExperiment(config, folder, view)
        grads = experiment.learner.grads

        def killing(state, batch):
            if deaths(int(state["step"])):
                os.kill(experiment.followers.workers[0].pid, signal.SIGKILL)
            return grads(state, batch)

        experiment.learner.grads = killing
        experiments.append(experiment)
        return experiment

    return make


@pytest.mark.slow
def test_a_sharded_run_restarts_itself_when_a_shard_is_lost(tmp_path):
    """A shard cannot be restored: the run continues from the newest checkpoint, or starts again."""
    config = with_all(WORDLE, num_updates=9, checkpoint__every_updates=3, **SHARDED)
    undisturbed = trained(config, tmp_path / "plain")
    deaths, view, experiments = [1, 4, 8, 4, 8], Quiet(), []

    def dies(step):
        is_due = deaths[:1] == [step]
        del deaths[: int(is_due)]
        return is_due

    folder = tmp_path / "killed"
    result = train(
        config, folder, view=view, algorithm=replace(ILQL, make=make_killing(dies, experiments))
    )
    assert result.reason == "finished" and results_of(folder).code == undisturbed.code
    assert len(experiments) == 4 and deaths == [4, 8]
    message = "continue from the last checkpoint, which happens automatically"
    assert sum(message in text for text in view.messages) == 3 and not rows(folder, "error")

    folder, calls = tmp_path / "stopped", []
    train(config, folder, view=Quiet(), stop=lambda: calls.append(0) or len(calls) > 4)
    assert resume(folder, view=Quiet()).reason == "finished"
    assert results_of(folder).code == undisturbed.code


@pytest.mark.slow
def test_shards_that_are_lost_repeatedly_end_the_run(tmp_path):
    experiments = []
    config = with_all(WORDLE, **SHARDED, engine__max_restarts=2)
    with pytest.raises(StateLost, match="continue from the last checkpoint"):
        make = make_killing(lambda step: step == 1, experiments)
        train(config, tmp_path / "run", view=Quiet(), algorithm=replace(ILQL, make=make))
    assert len(experiments) == 1 + config.engine.max_restarts
    for num, state, updates in ((1, "whole", 5), (3, "sharded", 7)):
        shared = {"num": num, "state": state}  # both together: neither is valid alone
        other = with_all(config, learners__num=shared, num_updates=updates)
        assert resume(tmp_path / "run", config=other, view=Quiet()).update == updates
