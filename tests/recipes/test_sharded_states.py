"""Runs whose learner's state is in parts: what they learn, and what becomes of a part's loss."""

import os
import signal

import pytest
import torch

from raffia.distributed import Followers, StateLost
from raffia.recipes import resume_run, train_run
from raffia.recipes.ilql.experiment import ILQLExperiment
from tests.recipes.ilql_runs import last
from tests.recipes.layouts import ILQL, WORDLE, experiment, left, trained
from tests.recipes.runs import Quiet, rows, with_all

SHARDED = {"learners__num": 2, "learners__state": "sharded"}


@pytest.mark.parametrize(
    ("num", "max_grad_norm"), [(2, 1e-3), pytest.param(3, None, marks=pytest.mark.slow)]
)
def test_a_state_in_parts_learns_what_a_whole_one_learns(num, max_grad_norm, tmp_path):
    """But for last bits: of the norm, and of Adam's kernel where a row begins elsewhere.

    Attention does not change with the bias of its keys, whose gradients are rounding alone; Adam
    makes steps of it.
    """
    config = with_all(WORDLE, optimizer__max_grad_norm=max_grad_norm)
    trained(config, tmp_path / "parts", num_micro_batches=num)
    sharded = {**SHARDED, "learners__num": num}
    first = trained(config, tmp_path / "sharded", **sharded)
    expected, found = (last(tmp_path / name).tensors("state") for name in ("parts", "sharded"))
    for key, value in found.items(True, True):
        there, (rows, *_) = expected[key], [*value.shape, 0]
        if key[-1] == "bias" and rows == 3 * WORDLE.model.trunk.n_embd:
            value, there = ([*one.chunk(3)][::2] for one in (value, there))
        torch.testing.assert_close(value, there, rtol=1e-5, atol=1e-5)
    if max_grad_norm:
        assert trained(config, tmp_path / "again", **sharded) == first


def test_each_process_holds_its_part_alone(tmp_path):
    def size(state):
        return sum(leaf.nbytes for leaf in state.values(True, True))

    with experiment(WORDLE, tmp_path / "run", **SHARDED) as run:
        state = whole = run.init()
        for number in range(2):
            update, _ = run.learner.grads(state, run.next_batch(state))
            state = run.learner.apply(state, update)
            assert size(state) < 0.55 * size(whole), number
        assert size(run.whole(state)) == size(whole)


def test_how_sums_are_made_gets_there_and_parts_may_be_cut_further(tmp_path, monkeypatch):
    given, made = [], Followers.__init__

    def noted(self, *arguments, **options):
        given.append(options["sums"])
        made(self, *arguments, **options)

    monkeypatch.setattr(Followers, "__init__", noted)
    config = with_all(WORDLE, batch_size=8, num_updates=3, num_micro_batches=2)
    there = dict(learners__num=2, learners__sums="ordered")
    assert trained(config, tmp_path / "shared", **there).update == 3
    assert given == ["ordered"]


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
    deaths, view, made = [1, 4, 8, 4, 8], Quiet(), []

    def dies(step):
        is_due = deaths[:1] == [step]
        del deaths[: int(is_due)]
        return is_due

    folder = tmp_path / "killed"
    result = train_run(ILQL, config, folder, view=view, make=deadly(dies, made))
    assert result.reason == "finished" and left(folder).code == plain.code
    assert len(made) == 4 and deaths == [4, 8]
    said = "continue from the last checkpoint, which happens automatically"
    assert sum(said in text for text in view.said) == 3 and not rows(folder, "error")

    folder, calls = tmp_path / "stopped", []
    train_run(ILQL, config, folder, view=Quiet(), stop=lambda: calls.append(0) or len(calls) > 4)
    assert resume_run(folder, view=Quiet()).reason == "finished"
    assert left(folder).code == plain.code


@pytest.mark.slow
def test_parts_that_are_lost_again_and_again_end_the_run(tmp_path):
    made = []
    config = with_all(WORDLE, **SHARDED, engine__max_restarts=2)
    with pytest.raises(StateLost, match="continue from the last checkpoint"):
        make = deadly(lambda step: step == 1, made)
        train_run(ILQL, config, tmp_path / "run", view=Quiet(), make=make)
    assert len(made) == 1 + config.engine.max_restarts
    for num, state, updates in ((1, "whole", 5), (3, "sharded", 7)):
        shared = {"num": num, "state": state}  # at once: neither goes alone
        other = with_all(config, learners__num=shared, num_updates=updates)
        assert resume_run(tmp_path / "run", config=other, view=Quiet()).update == updates
