"""The loop and its tasks, with a learner of one number."""

import json

import pytest
import torch

from raffia.distributed.engine import InlineEngine
from raffia.distributed.pool import Pool
from raffia.tensordict.tensordict import TensorDict
from raffia.train import log as train_log
from raffia.train.checkpoint import CheckpointError, Checkpoints
from raffia.train.evaluate import Episodes
from raffia.train.evaluations import Evaluations
from raffia.train.experiment import Experiment, Plan
from raffia.train.log import Records
from raffia.train.loop import Ended, Evaluate, Save, train
from raffia.train.run_state import Recorded, RunState
from tests.recipes.runs import Quiet


def add(state):
    """An update that adds one."""
    x = state["x"] + 1
    return TensorDict(step=state["step"] + 1, x=x), TensorDict(loss=x)


def run(state=None, *, num_updates=5, every=(), stop=lambda: False):
    begin = TensorDict(step=torch.tensor(0), x=torch.tensor(10.0))
    return train(
        begin if state is None else state, add, num_updates=num_updates, every=every, stop=stop
    )


def test_a_stop_comes_between_updates_and_a_run_can_be_continued():
    calls = iter([False, False, True])
    state, reason = run(stop=lambda: next(calls))
    assert (int(state["step"]), reason) == (2, "stopped")
    state, reason = run(state)
    assert (int(state["step"]), float(state["x"]), reason) == (5, 15.0, "finished")


def test_tasks_come_after_each_update_and_may_change_the_state_or_end_the_run():
    updates = []

    def doubles(state, metrics):
        updates.append(int(state["step"]))
        return TensorDict(step=state["step"], x=state["x"] * 2)

    def ends(state, metrics):
        if int(state["step"]) == 3:
            raise Ended("target")

    state, reason = run(every=[doubles, ends])
    assert updates == [1, 2, 3]
    assert float(state["x"]) == ((10 + 1) * 2 + 1) * 4 + 2
    assert reason == "target"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda state: state, "two containers, .* return self.learn"),
        (lambda state: (state, {"loss": 1.0}), "two containers, .* return self.learn"),
        (lambda state: (state, TensorDict()), '"step" is 0, as many .* apply counts'),
    ],
)
def test_a_step_gives_two_containers_and_counts(wrong, why):
    with pytest.raises((TypeError, ValueError), match=why):
        train(TensorDict(step=torch.tensor(0)), wrong, num_updates=3)


def test_gradients_that_are_not_finite_are_not_applied(tmp_path):
    class Broken:
        def grads(self, state, batch):
            return TensorDict(grads=torch.tensor(1.0)), TensorDict(loss=torch.tensor(torch.nan))

    experiment = Experiment(tmp_path, Quiet(), seed=0)
    experiment.learner = Broken()  # it has no `apply`
    with pytest.raises(ArithmeticError, match="loss"):
        experiment.learn(state_at(0), TensorDict())


class Evaluated(Experiment):
    """An experiment whose evaluations are given."""

    def __init__(self, folder, found=(), *, counts_steps=True, every=10, target=None):
        super().__init__(folder, Quiet(), seed=0)
        self.found, self.steps = iter(found), 0 if counts_steps else None
        plan = {"title": "", "num_updates": 100, "num_simulations": 8, "save_every": 4}
        self.plan = Plan(**plan, evaluate_every=every, target_return=target)

    @property
    def num_env_steps(self):
        return self.steps

    def evaluate(self, state, stop):
        return next(self.found)


class Log:
    def __init__(self):
        self.evaluations, self.rows = [], []

    def evaluated(self, mean_return, best):
        self.evaluations.append((mean_return, best))

    def write(self, kind, **values):
        self.rows.append({"kind": kind, **values})


def evaluation(folder, returns, **options):
    folder.mkdir(exist_ok=True)
    experiment, log = Evaluated(folder, returns, **options), Log()
    return experiment, Evaluate(experiment, log, log), log


def of_returns(*returns):
    return Episodes([*returns], [5] * len(returns))


def state_at(update):
    return TensorDict(step=torch.tensor(update))


def test_evaluations_are_due_at_an_interval_and_the_best_is_known(tmp_path):
    found = [of_returns(1.0, 3.0), of_returns(1.0), of_returns(9.0)]
    experiment, task, log = evaluation(tmp_path, found)
    improved = []
    for update, experiment.steps in enumerate([5, 10, 15, 27, 31], 1):
        task.catch_up(state_at(update))
        improved.append(task.improved(update))
    assert log.evaluations == [(2.0, 2.0), (1.0, 2.0), (9.0, 9.0)]
    assert improved == [False, True, False, False, True]
    assert (task.score_of(5), task.score_of(4)) == (9.0, None)
    found = [(row["kind"], row["update"], row["env_step"]) for row in log.rows]
    assert found == [("evaluate", 2, 10), ("evaluate", 4, 27), ("evaluate", 5, 31)]
    episodes = {"returns": [1.0, 3.0], "lengths": [5, 5], "mean_return": 2.0}
    assert log.rows[0]["values"] == {**episodes, "num_simulations": 8}


def test_an_interrupted_evaluation_stays_due_and_reaching_the_target_ends_the_run(tmp_path):
    experiment, task, log = evaluation(tmp_path, [None, of_returns(4.0)], target=4.0)
    experiment.steps = 10
    task.catch_up(state_at(1))
    assert log.evaluations == [] and task.num_done == 0
    with pytest.raises(Ended, match="target"):
        task.catch_up(state_at(2))
    assert log.evaluations == [(4.0, 4.0)]


def test_the_evaluation_task_resumes(tmp_path):
    experiment, task, _ = evaluation(tmp_path, [of_returns(4.0)])
    experiment.steps = 10
    task.catch_up(state_at(1))
    experiment, again, log = evaluation(tmp_path, [of_returns(3.0)])
    experiment.steps = 20
    again.load_state(json.loads(json.dumps(task.state())))
    again.catch_up(state_at(2))
    assert log.evaluations == [(3.0, 4.0)]


def saving(folder, found=()):
    experiment, evaluate, _ = evaluation(folder, found, counts_steps=False, every=3)
    checkpoints = Checkpoints(folder / "checkpoints", keep=99)
    state = RunState(folder, {"evaluate": evaluate, "note": Recorded(7)})
    return experiment, evaluate, checkpoints, Save(experiment, checkpoints, state, evaluate)


def test_checkpoints_are_saved_at_an_interval_and_for_the_best_states(tmp_path):
    found = [of_returns(score) for score in (1.0, 0.0, 2.0)]
    _, evaluate, checkpoints, save = saving(tmp_path / "run", found)
    for update in range(1, 10):
        evaluate(state_at(update), TensorDict())
        save(state_at(update), TensorDict())
    saved = [(checkpoint.update, checkpoint.score) for checkpoint in checkpoints.available()]
    assert saved == [(3, 1.0), (4, None), (8, None), (9, 2.0)]
    assert checkpoints.newest().extras["note"] == 7


@pytest.mark.parametrize("join_after", [None, 1])
def test_the_best_checkpoint_is_the_newest_of_equal_scores(join_after, tmp_path):
    """Whatever else is saved, and whether an evaluation is played elsewhere."""
    found = [of_returns(score) for score in (1.0, 0.0, 1.0)]
    experiment, evaluate, checkpoints, save = saving(tmp_path / "run", found)
    if join_after is not None:
        experiment.evaluations = Evaluations(
            Pool(InlineEngine(), "tests.train.test_evaluations:Weigh", "{}", 1),
            join_after=join_after,
            acting=lambda state: TensorDict(w=state["step"]),
            outcome=lambda *_: next(experiment.found),
        )
    for update in range(1, 11):
        evaluate(state_at(update), TensorDict())
        save(state_at(update), TensorDict())
    assert (checkpoints.best().update, checkpoints.best().score) == (9, 1.0)


def test_rates_are_of_the_updates_since_the_first_of_a_session(tmp_path):
    """Not of that one, whose time is not known: a row that comes with it has none."""
    experiment, records = Evaluated(tmp_path, counts_steps=False), Records(tmp_path)
    log = train_log.Log(experiment, records)
    for update in (10, 15, 20):
        log(state_at(update), TensorDict(loss=torch.tensor(0.0)))
        records._begun -= 2.0
    records.close()
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert "updates_per_second" not in first
    assert second["updates_per_second"] == pytest.approx(10 / 4.0, rel=0.1)


def test_a_save_that_failed_is_tried_again(tmp_path, monkeypatch):
    experiment, _, checkpoints, save = saving(tmp_path / "run")
    original = Checkpoints.save

    def fails(self, *args, **kwargs):
        raise CheckpointError("run", "was not saved")

    monkeypatch.setattr(Checkpoints, "save", fails)
    save(state_at(4), TensorDict())
    assert save.last == -1 and experiment.view.messages == ["update 4: run was not saved."]
    monkeypatch.setattr(Checkpoints, "save", original)
    save(state_at(4), TensorDict())
    assert save.last == 4 and [checkpoint.update for checkpoint in checkpoints.available()] == [4]


def test_a_tree_of_parts_is_one_file_and_empty_parts_have_none(tmp_path):
    class Part:
        def __init__(self, state):
            self.now = state

        def state(self):
            return self.now

        def load_state(self, state):
            self.now = state

    def tree(*states):
        full, empty, alone = map(Part, states)
        return {"both": {"full": full, "empty": empty}, "alone": alone}, (full, empty, alone)

    x = TensorDict(x=torch.arange(3))
    parts, _ = tree(x, TensorDict(), TensorDict())
    files, extras = RunState(tmp_path, parts).save(state_at(5))
    assert list(files) == ["state", "both"] and list(files["both"].keys()) == ["full"]
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(5, files, extras)
    parts, (full, empty, alone) = tree(TensorDict(), x, x)
    RunState(tmp_path, parts).restore(checkpoints.newest())
    with pytest.raises(CheckpointError, match="holds both, which this run does not have"):
        RunState(tmp_path, {"alone": alone}).restore(checkpoints.newest())
    assert (full.now == x).all() and empty.now.is_empty() and alone.now.is_empty()


def test_records_after_a_checkpoint_are_dropped_at_a_resume(tmp_path):
    records = Records(tmp_path)
    records.write("train", update=1, env_step=8, values={"loss": 1.0})
    state = records.state()
    records.write("train", update=2, env_step=16, values={"loss": 2.0})
    records.close()
    records = Records(tmp_path)
    records.load_state(json.loads(json.dumps(state)))
    records.write("train", update=2, env_step=16, values={"loss": 3.0})
    records.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["update"], row["loss"]) for row in rows] == [(1, 1.0), (2, 3.0)]
    assert rows[1]["seconds"] >= rows[0]["seconds"]
