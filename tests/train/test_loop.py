"""The loop and its tasks, with a learner of one number."""

import json
from itertools import repeat

import pytest
import torch

from raffia.tensordict.tensordict import TensorDict
from raffia.train.evaluate import Episodes
from raffia.train.loop import Ended, train
from raffia.train.metrics import PhaseClock
from raffia.train.records import Records
from raffia.train.stream import OfflineStream
from raffia.train.tasks import Evaluate, Save


class Adds:
    """Adds the batch's mean to a number."""

    def init(self, seed):
        return TensorDict(step=torch.tensor(0), x=torch.tensor(float(seed)))

    def grads(self, state, batch):
        mean = batch["x"].mean()
        return TensorDict(grads=mean), TensorDict(loss=mean)

    def apply(self, state, update):
        return TensorDict(step=state["step"] + 1, x=state["x"] + update["grads"])


def ones():
    return OfflineStream(lambda update: repeat(TensorDict(x=torch.ones(2), batch_size=[2])))


def go(state=None, *, num_updates=5, tasks=(), stop=lambda: False, on_metrics=lambda metrics: None):
    learner = Adds()
    return train(
        learner,
        learner.init(10) if state is None else state,
        ones(),
        num_updates=num_updates,
        clock=PhaseClock(),
        check=lambda *seen: None,
        on_metrics=on_metrics,
        tasks=tasks,
        stop=stop,
    )


def test_it_updates_as_often_as_asked_and_tells_of_each():
    told = []
    state, reason = go(on_metrics=lambda metrics: told.append(float(metrics["loss"])))
    assert (int(state["step"]), float(state["x"]), reason) == (5, 15.0, "finished")
    assert told == [1.0] * 5


def test_a_stop_comes_between_updates_and_the_rest_can_follow():
    calls = iter([False, False, True])
    state, reason = go(stop=lambda: next(calls))
    assert (int(state["step"]), reason) == (2, "stopped")
    state, reason = go(state)
    assert (int(state["step"]), float(state["x"]), reason) == (5, 15.0, "finished")


def test_tasks_come_after_each_update_and_may_change_the_state_or_end_the_run():
    seen = []

    def doubles(state):
        seen.append(int(state["step"]))
        return TensorDict(step=state["step"], x=state["x"] * 2)

    def ends(state):
        if int(state["step"]) == 3:
            raise Ended("target")

    state, reason = go(tasks=[doubles, ends])
    assert seen == [1, 2, 3]
    assert float(state["x"]) == ((10 + 1) * 2 + 1) * 4 + 2
    assert reason == "target"


def test_what_is_not_finite_is_not_applied():
    applied = []

    class Watched(Adds):
        def apply(self, state, update):
            applied.append(1)
            return super().apply(state, update)

    def check(state, batch, update, metrics):
        raise ArithmeticError("not finite")

    with pytest.raises(ArithmeticError):
        train(
            Watched(),
            Watched().init(0),
            ones(),
            num_updates=3,
            clock=PhaseClock(),
            check=check,
            on_metrics=lambda metrics: None,
        )
    assert applied == []


class Told:
    def __init__(self):
        self.seen = []

    def evaluated(self, mean_return, best):
        self.seen.append((mean_return, best))


class Kept:
    def __init__(self):
        self.rows = []

    def write(self, kind, *, update, env_step, values):
        self.rows.append({"kind": kind, "update": update, "env_step": env_step, **values})


def evaluation(returns, steps, *, every=10, target=None):
    results, log, kept = iter(returns), Told(), Kept()
    log.rows = kept.rows
    task = Evaluate(
        lambda state, env_step: next(results),
        kept,
        log,
        every=every,
        env_steps=lambda: steps[0],
        target=target,
        num_simulations=8,
    )
    return task, log


def at(update):
    return TensorDict(step=torch.tensor(update))


def test_evaluations_are_due_each_so_many_steps_and_the_best_is_known():
    steps = [0]
    found = [Episodes([1.0, 3.0], [5, 5]), Episodes([1.0], [5]), Episodes([9.0], [5])]
    task, log = evaluation(found, steps)
    improved = []
    for update, steps[0] in enumerate([5, 10, 15, 27, 31], 1):
        task(at(update))
        improved.append(task.improved(update))
    assert log.seen == [(2.0, 2.0), (1.0, 2.0), (9.0, 9.0)]
    assert improved == [False, True, False, False, True]
    assert (task.score_of(5), task.score_of(4)) == (9.0, None)
    rows = log.rows
    assert [(row["kind"], row["update"], row["env_step"]) for row in rows] == [
        ("evaluate", 2, 10),
        ("evaluate", 4, 27),
        ("evaluate", 5, 31),
    ]
    assert rows[0]["returns"] == [1.0, 3.0] and rows[0]["mean_return"] == 2.0


def test_an_interrupted_evaluation_stays_due():
    task, log = evaluation([None, Episodes([4.0], [5])], [10])
    task(at(1))
    assert log.seen == [] and task.num_done == 0
    task(at(2))
    assert log.seen == [(4.0, 4.0)]


def test_reaching_the_target_ends_the_run():
    task, log = evaluation([Episodes([4.0], [5])], [10], target=4.0)
    with pytest.raises(Ended, match="target"):
        task(at(1))
    assert log.seen == [(4.0, 4.0)]


def test_an_evaluation_resumes_where_it_stood():
    task, _ = evaluation([Episodes([4.0], [5])], [10])
    task(at(1))
    again, log = evaluation([Episodes([3.0], [5])], [20])
    again.load_state(json.loads(json.dumps(task.state())))
    again(at(2))
    assert log.seen == [(3.0, 4.0)]


def test_checkpoints_come_each_so_many_updates_and_where_it_is_worth_it():
    saved = []

    def save(state):
        saved.append(int(state["step"]))
        return True

    task = Save(save, every=4, worth=lambda update: update == 3)
    for update in range(1, 10):
        task(at(update))
    task.now(at(9))
    task.now(at(9))
    assert saved == [3, 4, 8, 9]


def test_a_save_that_failed_is_tried_again():
    saved = []

    def save(state):
        saved.append(int(state["step"]))
        return len(saved) > 1

    task = Save(save, every=4)
    task(at(4))
    task.now(at(4))
    task.now(at(4))
    assert saved == [4, 4]


def test_records_take_back_what_came_after_a_checkpoint(tmp_path):
    records = Records(tmp_path)
    records.write("train", update=1, env_step=8, values={"loss": 1.0})
    state = records.state()
    records.write("train", update=2, env_step=16, values={"loss": 2.0})
    records.close()
    records = Records(tmp_path)
    records.rewind(json.loads(json.dumps(state)))
    records.write("train", update=2, env_step=16, values={"loss": 3.0})
    records.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["update"], row["loss"]) for row in rows] == [(1, 1.0), (2, 3.0)]
    assert rows[1]["seconds"] >= rows[0]["seconds"]
