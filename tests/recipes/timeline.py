"""All that a run does as a list of events, in which two runs can be compared."""

import hashlib
from contextlib import suppress

import pytest
import torch

from raffia.recipes import efficientzero, ilql
from raffia.recipes.efficientzero import actors, reanalyzers
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.recipes.ilql.experiment import ILQLExperiment
from raffia.tensordict import TensorDict
from raffia.train import Checkpoints
from raffia.train.evaluate import EpisodeBatch
from tests.recipes.runs import Quiet


def digest(value):
    """A digest of tensors, containers and plain values; equal for bitwise equal values."""
    hasher = hashlib.sha256()
    _feed(hasher, value)
    return hasher.hexdigest()[:12]


def _feed(hasher, value):
    if isinstance(value, torch.Tensor):
        hasher.update(f"{value.dtype}{list(value.shape)}".encode())
        hasher.update(value.detach().cpu().contiguous().numpy().tobytes())
    elif isinstance(value, TensorDict):
        for key in sorted(value.keys(True, True), key=str):
            hasher.update(str(key).encode())
            _feed(hasher, value[key])
    elif isinstance(value, (list, tuple)):
        for part in value:
            _feed(hasher, part)
    else:
        hasher.update(repr(value).encode())


def first_difference(one, other):
    """The kind of the first event that differs; the second timeline's, if both have one."""
    for (kind, *digests), (other_kind, *other_digests) in zip(one, other, strict=False):
        if (kind, digests) != (other_kind, other_digests):
            return other_kind
    longer = max(one, other, key=len)
    shorter = min(len(one), len(other))
    return longer[shorter][0] if len(one) != len(other) else None


class Differs(Exception):
    """Ends a run at the first difference."""


class Events(list):
    """Events: kinds, each with digests of its data.

    against: the events of another run; once some differ, this run ends at its next update.
    """

    def __init__(self, against=None):
        super().__init__()
        self.against = against

    def record(self, kind, *things):
        self.append((kind, *(digest(thing) for thing in things)))
        if kind == "step" and self.against is not None and self != self.against[: len(self)]:
            raise Differs

    def recorded(self, kind, function):
        """The function, with its results recorded."""

        def call(*args, **options):
            done = function(*args, **options)
            self.record(kind, done)
            return done

        return call

    def of(self, experiment, record_rest):
        """The experiment's class with common events recorded; `record_rest` records the others."""
        events = self

        class Recorded(experiment):
            def __init__(self, *args, **options):
                super().__init__(*args, **options)
                record_rest(self)
                self.learner = _learner(self.learner, events.record)

            def init(self):
                state = super().init()
                shapes = [(str(k), list(v.shape)) for k, v in state.items(True, True)]
                events.record("shapes", shapes)
                events.record("weights", state.select("params", "buffers"))
                return state

            def evolve(self, state):
                changed = super().evolve(state)
                if changed is not None:
                    row = {k: v for k, v in changed[1].items() if k != "seconds"}
                    events.record("generation", row)
                return changed

        return Recorded

    def watch_saves(self, patch):
        save = Checkpoints.save

        def saves(checkpoints, update, *args, **options):
            path = save(checkpoints, update, *args, **options)
            self.record("save", sorted(p.name for p in path.parent.iterdir()))
            return path

        patch.setattr(Checkpoints, "save", saves)


def timeline(config, folder, against=None):
    """Train, and write down:

    layout: what numbers do not show: storage of rows, number of workers and threads
    shapes, weights: of the first state
    random, act: actions, and stored search results; stepped: results of the environments
    drawn: segments and their weights; targets: the batch
    gradient, step: of the update
    evaluate: returns and lengths; save: checkpoints after it; generation; end
    """
    events = Events(against)
    make_batch = reanalyzers.make_batch

    def record_layout(run):
        events.record("layout", *_layout_of(run))
        run.env.step = events.recorded("stepped", run.env.step)

    def recording_make_batch(segments, planner, **options):
        events.record("drawn", segments["index"], segments["priority_weight"])
        batch, reanalyzed = make_batch(segments, planner, **options)
        events.record("targets", batch, reanalyzed)
        return batch, reanalyzed

    with pytest.MonkeyPatch.context() as patch:
        recorded = events.of(EfficientZeroExperiment, record_layout)
        patch.setattr("raffia.recipes.efficientzero.experiment.EfficientZeroExperiment", recorded)
        for module, kind, name in (
            (actors, "act", "act"),
            (actors, "random", "act_at_random"),
            (EpisodeBatch, "evaluate", "play"),
        ):
            patch.setattr(module, name, events.recorded(kind, getattr(module, name)))
        patch.setattr(reanalyzers, "make_batch", recording_make_batch)
        events.watch_saves(patch)
        with suppress(Differs):
            result = efficientzero.train(config, folder, view=Quiet())
            videos = sorted(path.name for path in folder.glob("episodes/*"))
            events.record("end", result.reason, videos)
    return events


def ilql_timeline(config, folder, against=None):
    """The same for a run of ILQL, which learns from "data", its rows, in batches."""
    events = Events(against)

    def record_layout(run):
        training, held_out = run.corpus.learnt, run.corpus.held_out
        kinds = [type(run.learner).__name__, run.config.device, torch.get_num_threads()]
        events.record("layout", kinds, run.config.compile)
        num_held_out = None if held_out is None else len(held_out)
        events.record("data", run.corpus.digest(), num_held_out, len(training))

    class Recorded(events.of(ILQLExperiment, record_layout)):
        def _batches(self, update):
            for batch in super()._batches(update):
                events.record("batch", batch)
                yield batch

        def _evaluate_one(self, state, update, stop):
            found = super()._evaluate_one(state, update, stop)
            events.record("evaluate", found.dialogues)
            return found

        def evaluate(self, state, stop):
            found = super().evaluate(state, stop)
            events.record("evaluate", found.score, sorted(found.values.items()))
            return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raffia.recipes.ilql.experiment.ILQLExperiment", Recorded)
        events.watch_saves(patch)
        with suppress(Differs):
            events.record("end", ilql.train(config, folder, view=Quiet()).reason)
    return events


def _layout_of(run):
    """Properties of a run that do not show in its learning."""
    env, storage = run.env, run.steps.buffers[0].storage
    kinds = [type(each).__name__ for each in (run.learner, env, storage)]
    nums = len(getattr(env, "_workers", [])), env.num_envs, len(run.steps.buffers)
    return torch.get_num_threads(), run.config.device, kinds, nums


def _learner(learner, note):
    class Recorded:
        init = learner.init

        def grads(self, state, batch):
            update, metrics = learner.grads(state, batch)
            note("gradient", update["grads"])
            return update, metrics

        def apply(self, state, update):
            after = learner.apply(state, update)
            note("step", after.select("params", "target"))
            return after

    return Recorded()
