"""All that a run does as one list of events, of which two runs share the first ones."""

import hashlib
from contextlib import ExitStack

import pytest
import torch

from raffia.recipes import efficientzero, ilql
from raffia.recipes.efficientzero import evaluation, reanalyzers
from raffia.recipes.efficientzero import experiment as run_module
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.recipes.ilql.experiment import ILQLExperiment
from raffia.tensordict.tensordict import TensorDict
from raffia.train.checkpoint import Checkpoints
from tests.recipes.runs import Quiet


def digest(thing):
    """Of tensors, containers and plain things: equal for what is equal bit for bit."""
    found = hashlib.sha256()
    _feed(found, thing)
    return found.hexdigest()[:12]


def _feed(found, thing):
    if isinstance(thing, torch.Tensor):
        found.update(f"{thing.dtype}{list(thing.shape)}".encode())
        found.update(thing.detach().cpu().contiguous().numpy().tobytes())
    elif isinstance(thing, TensorDict):
        for key in sorted(thing.keys(True, True), key=str):
            found.update(str(key).encode())
            _feed(found, thing[key])
    elif isinstance(thing, (list, tuple)):
        for part in thing:
            _feed(found, part)
    else:
        found.update(repr(thing).encode())


def first_difference(one, other):
    """What is unlike first in two timelines: its kind, in the second where it is in both."""
    for (kind, *seen), (others, *also) in zip(one, other, strict=False):
        if (kind, seen) != (others, also):
            return others
    longer = max(one, other, key=len)
    shorter = min(len(one), len(other))
    return longer[shorter][0] if len(one) != len(other) else None


def timeline(config, folder):
    """Train, and write down:

    made: what does not show in numbers: where rows lie, how many workers and threads there are
    shapes, weights: of the first state
    random, act: what was chosen, and what of the search is kept; stepped: what the environments
    said
    drawn: which windows, and their weights; targets: the batch
    gradient, step: of the update
    evaluate: returns and lengths; save: which checkpoints there are then; generation; end
    """
    events = []

    def note(kind, *things):
        events.append((kind, *(digest(thing) for thing in things)))

    with pytest.MonkeyPatch.context() as patch, ExitStack():

        class Noted(EfficientZeroExperiment):
            def __init__(self, *args, **options):
                super().__init__(*args, **options)
                note("made", *_made(self))
                self.learner = _learner(self.learner, note)

            def init(self):
                state = super().init()
                note("shapes", [(str(k), list(v.shape)) for k, v in state.items(True, True)])
                note("weights", state.select("params", "buffers"))
                _watch_envs(self, note)
                return state

            def evolve(self, state):
                changed = super().evolve(state)
                if changed is not None:
                    note("generation", {k: v for k, v in changed[1].items() if k != "seconds"})
                return changed

        def noted(kind, function):
            def call(*args, **options):
                done = function(*args, **options)
                note(kind, done)
                return done

            return call

        act = run_module.act
        make_batch = reanalyzers.make_batch
        play, play_members = evaluation.play_episodes, evaluation.play_members
        save = Checkpoints.save

        def makes_batch(windows, planner, **options):
            note("drawn", windows["index"], windows["priority_weight"])
            batch, fresh = make_batch(windows, planner, **options)
            note("targets", batch, fresh if fresh is not None else None)
            return batch, fresh

        def saves(checkpoints, update, *args, **options):
            path = save(checkpoints, update, *args, **options)
            note("save", sorted(p.name for p in path.parent.iterdir()))
            return path

        patch.setattr("raffia.recipes.efficientzero.api.EfficientZeroExperiment", Noted)
        patch.setattr(run_module, "act", noted("act", act))
        patch.setattr(run_module, "act_at_random", noted("random", run_module.act_at_random))
        patch.setattr(reanalyzers, "make_batch", makes_batch)
        patch.setattr(evaluation, "play_episodes", noted("evaluate", play))
        patch.setattr(evaluation, "play_members", noted("evaluate", play_members))
        patch.setattr(Checkpoints, "save", saves)
        result = efficientzero.train(config, folder, view=Quiet())
    films = sorted(path.name for path in folder.glob("episodes/*"))
    note("end", result.reason, films)
    return events


def ilql_timeline(config, folder):
    """The same of a run of ILQL, which learns from "data", its rows, in a "batch" each time."""
    events = []

    def note(kind, *things):
        events.append((kind, *(digest(thing) for thing in things)))

    class Noted(ILQLExperiment):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            corpus = self.corpus
            learnt, held_out = corpus.learnt, corpus.held_out
            kinds = [type(self.learner).__name__, self.config.device, torch.get_num_threads()]
            note("made", kinds, self.config.compile)
            note("data", corpus.digest(), None if held_out is None else len(held_out), len(learnt))
            self.learner = _learner(self.learner, note)

        def init(self):
            state = super().init()
            note("shapes", [(str(k), list(v.shape)) for k, v in state.items(True, True)])
            note("weights", state["params"])
            return state

        def _batches(self, update):
            for batch in super()._batches(update):
                note("batch", batch)
                yield batch

        def _evaluate_one(self, state, update, stop):
            found = super()._evaluate_one(state, update, stop)
            note("evaluate", found.dialogues)
            return found

        def evaluate(self, state, stop):
            found = super().evaluate(state, stop)
            note("evaluate", found.score, sorted(found.values.items()))
            return found

        def evolve(self, state):
            changed = super().evolve(state)
            if changed is not None:
                note("generation", {k: v for k, v in changed[1].items() if k != "seconds"})
            return changed

    save = Checkpoints.save

    def saves(checkpoints, update, *args, **options):
        path = save(checkpoints, update, *args, **options)
        note("save", sorted(p.name for p in path.parent.iterdir()))
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raffia.recipes.ilql.api.ILQLExperiment", Noted)
        patch.setattr(Checkpoints, "save", saves)
        result = ilql.train(config, folder, view=Quiet())
    note("end", result.reason)
    return events


def _made(run):
    """What of a run does not show in what it learns."""
    env, storage = run.env, run.steps.buffers[0].storage
    return (
        torch.get_num_threads(),
        run.config.device,
        type(run.learner).__name__,
        type(env).__name__,
        len(getattr(env, "_workers", [])),
        env.num_envs,
        type(storage).__name__,
        len(run.steps.buffers),
    )


def _watch_envs(run, note):
    env, step = run.env, run.env.step

    def steps(action, rows=None):
        after = step(action) if rows is None else step(action, rows)
        note("stepped", after)
        return after

    env.step = steps


def _learner(learner, note):
    class Noted:
        init = learner.init

        def grads(self, state, batch):
            update, metrics = learner.grads(state, batch)
            note("gradient", update["grads"])
            return update, metrics

        def apply(self, state, update):
            after = learner.apply(state, update)
            note("step", after.select("params", "target"))
            return after

    return Noted()
