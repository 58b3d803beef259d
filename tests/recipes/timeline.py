"""All that a run does as one list of events, of which two runs share the first ones."""

import hashlib
from contextlib import suppress

import pytest
import torch

from raffia.recipes import efficientzero, ilql
from raffia.recipes.efficientzero import evaluation, reanalyzers
from raffia.recipes.efficientzero import experiment as run_module
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.recipes.ilql.experiment import ILQLExperiment
from raffia.tensordict import TensorDict
from raffia.train import Checkpoints
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


class Differs(Exception):
    """What was to be found has been found."""


class Notes(list):
    """Events: their kinds, each with digests of what belongs to it.

    against: the events of another run; once some differ, this run ends at its next update.
    """

    def __init__(self, against=None):
        super().__init__()
        self.against = against

    def note(self, kind, *things):
        self.append((kind, *(digest(thing) for thing in things)))
        if kind == "step" and self.against is not None and self != self.against[: len(self)]:
            raise Differs

    def noted(self, kind, function):
        """The function, whose results are noted."""

        def call(*args, **options):
            done = function(*args, **options)
            self.note(kind, done)
            return done

        return call

    def of(self, experiment, made):
        """The class of an experiment, noting what is the same for all; `made` notes the rest."""
        notes = self

        class Noted(experiment):
            def __init__(self, *args, **options):
                super().__init__(*args, **options)
                made(self)
                self.learner = _learner(self.learner, notes.note)

            def init(self):
                state = super().init()
                shapes = [(str(k), list(v.shape)) for k, v in state.items(True, True)]
                notes.note("shapes", shapes)
                notes.note("weights", state.select("params", "buffers"))
                return state

            def evolve(self, state):
                changed = super().evolve(state)
                if changed is not None:
                    row = {k: v for k, v in changed[1].items() if k != "seconds"}
                    notes.note("generation", row)
                return changed

        return Noted

    def watch_saves(self, patch):
        save = Checkpoints.save

        def saves(checkpoints, update, *args, **options):
            path = save(checkpoints, update, *args, **options)
            self.note("save", sorted(p.name for p in path.parent.iterdir()))
            return path

        patch.setattr(Checkpoints, "save", saves)


def timeline(config, folder, against=None):
    """Train, and write down:

    made: what does not show in numbers: where rows lie, how many workers and threads there are
    shapes, weights: of the first state
    random, act: what was chosen, and what of the search is kept; stepped: what the environments
    said
    drawn: which windows, and their weights; targets: the batch
    gradient, step: of the update
    evaluate: returns and lengths; save: which checkpoints there are then; generation; end
    """
    events = Notes(against)
    make_batch = reanalyzers.make_batch

    def made(run):
        events.note("made", *_made(run))
        run.env.step = events.noted("stepped", run.env.step)

    def makes_batch(windows, planner, **options):
        events.note("drawn", windows["index"], windows["priority_weight"])
        batch, fresh = make_batch(windows, planner, **options)
        events.note("targets", batch, fresh)
        return batch, fresh

    with pytest.MonkeyPatch.context() as patch:
        noted = events.of(EfficientZeroExperiment, made)
        patch.setattr("raffia.recipes.efficientzero.api.EfficientZeroExperiment", noted)
        for module, kind, name in (
            (run_module, "act", "act"),
            (run_module, "random", "act_at_random"),
            (evaluation, "evaluate", "play_members"),
        ):
            patch.setattr(module, name, events.noted(kind, getattr(module, name)))
        patch.setattr(reanalyzers, "make_batch", makes_batch)
        events.watch_saves(patch)
        with suppress(Differs):
            result = efficientzero.train(config, folder, view=Quiet())
            films = sorted(path.name for path in folder.glob("episodes/*"))
            events.note("end", result.reason, films)
    return events


def ilql_timeline(config, folder, against=None):
    """The same of a run of ILQL, which learns from "data", its rows, in a "batch" each time."""
    events = Notes(against)

    def made(run):
        learnt, held_out = run.corpus.learnt, run.corpus.held_out
        kinds = [type(run.learner).__name__, run.config.device, torch.get_num_threads()]
        events.note("made", kinds, run.config.compile)
        num_held_out = None if held_out is None else len(held_out)
        events.note("data", run.corpus.digest(), num_held_out, len(learnt))

    class Noted(events.of(ILQLExperiment, made)):
        def _batches(self, update):
            for batch in super()._batches(update):
                events.note("batch", batch)
                yield batch

        def _evaluate_one(self, state, update, stop):
            found = super()._evaluate_one(state, update, stop)
            events.note("evaluate", found.dialogues)
            return found

        def evaluate(self, state, stop):
            found = super().evaluate(state, stop)
            events.note("evaluate", found.score, sorted(found.values.items()))
            return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raffia.recipes.ilql.api.ILQLExperiment", Noted)
        events.watch_saves(patch)
        with suppress(Differs):
            events.note("end", ilql.train(config, folder, view=Quiet()).reason)
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
