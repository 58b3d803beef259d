"""The events of a run of EfficientZero, recorded and as a plain loop expects them."""

import json
import math
from collections import Counter
from contextlib import ExitStack, closing

import pytest
import torch

from raffia.envs import make_env
from raffia.recipes.efficientzero import actors, reanalyzers
from raffia.recipes.efficientzero import evaluation as evaluation_module
from raffia.recipes.efficientzero import experiment as run_module
from raffia.recipes.efficientzero.actors import make_planner
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.train import Checkpoints, TrainingSession
from tests.recipes.runs import Quiet


class Diary:
    """A finished run with all its events, in order.

    events: ("random", env_step), ("act", env_step, weights, temperature, noise, simulations),
        ("batch", beta, weights of the targets' network, correction interval, size), ("rate", rate),
        ("evaluate", env_step, weights, temperature, noise, simulations), ("tree", env_step),
        ("save", update) and ("log", update). Weights are named by their update.
    """

    def __init__(self, config, folder, make_env=make_env):
        folder.mkdir()
        self.config, self.folder, self.events = config, folder, []
        self.states, self.segments, self.batches, self.metrics = [], [], [], []
        self.replayed = []  # extended rows, drawn rows, and new priorities
        with pytest.MonkeyPatch.context() as patch, ExitStack() as opened:
            self.run = run = EfficientZeroExperiment(config, folder, Quiet(), make_env, None)
            opened.callback(run.close)
            session = opened.enter_context(closing(TrainingSession(run)))
            self._watch_playing(patch)
            self._watch_replay(run.replay)
            self._watch_learning(run)
            self._watch_files(patch)
            self.result = session.run()
            self.last = session.checkpoints.newest().tensors("state")
        self._name_weights()

    def rows(self, kind):
        """Rows of the metrics file."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    def of(self, kind):
        """The events of this kind, without its name."""
        return [event[1:] for event in self.events if event[0] == kind]

    # -- watching

    def _watch_playing(self, patch):
        run = self.run

        def note_search(kind):
            def note(planner, state, **options):
                assert planner is run.actor
                self._note_search(kind, planner, **options)

            return note

        def note_random(*_, **__):
            self.events.append(("random", run.collector.num_env_steps))

        def note_batch(segments, planner, *, correction_interval, **_):
            assert planner is run.reanalyze_planner
            beta = run.replay.beta
            recorded = (-1.0 if beta is None else beta, self._fingerprint(planner))
            self.events.append(("batch", *recorded, correction_interval, len(segments)))
            self.segments.append(segments.clone())
            self.replayed.append(("drawn", segments["index"].tolist()))

        def note_tree(folder, name, planner, state):
            self.events.append(("tree", int(name)))

        _note_calls(patch, actors, "act", note_search("act"))
        _note_calls(patch, actors, "act_at_random", note_random)
        _note_calls(patch, reanalyzers, "make_batch", note_batch)
        _note_calls(patch, run_module, "save_tree", note_tree)
        _note_calls(patch, evaluation_module, "act", note_search("evaluate"))

    def _note_search(self, kind, planner, temperature, noise, num_simulations=None, seed=None):
        simulations = num_simulations or self.config.search.num_simulations
        step = self.run.collector.num_env_steps
        event = (kind, step, self._fingerprint(planner), temperature, noise, simulations)
        if kind == "act" or self.events[-1] != event:  # once for all steps of an evaluation
            self.events.append(event)

    def _watch_replay(self, replay):
        extend = replay.extend

        def recording_extend(steps):
            index = extend(steps)
            if self.config.population.size == 1:
                numbers = torch.arange(replay.storage.total)
                self.replayed.append(("extended", numbers[replay.contains(numbers)].tolist()))
            return index

        replay.extend = recording_extend

    def _watch_learning(self, run):
        learner, apply = run.learner, run.learner.apply
        diary = self

        class Watched:
            init = learner.init

            def grads(self, state, batch):
                diary.states.append(state.clone())
                update, metrics = learner.grads(state, batch)
                diary.batches.append(batch.clone())
                diary.metrics.append(metrics.clone())
                priorities = batch["index"].tolist(), metrics["priority"].tolist()
                diary.replayed.append(("prioritized", *priorities))
                return update, metrics

            def apply(self, state, update):
                before, grads = state["params"].clone(), update["grads"].clone()
                after = apply(state, update)
                diary.events.append(("rate", _rate(before, after["params"], grads)))
                return after

        run.learner = Watched()

    def _watch_files(self, patch):
        def note_save(checkpoints, update, *_, **__):
            self.events.append(("save", update))

        _note_calls(patch, Checkpoints, "save", note_save)

    # -- names of the weights

    def _fingerprint(self, planner):
        """Values of a planner's networks, which identify their weights."""
        spec = self.run.env.spec
        stack = self.config.env.frame_stack
        shape = (3, *([stack] if stack > 1 else []), *spec.observation_shape)
        draws = torch.Generator().manual_seed(5)
        size = self.config.population.size
        observation = torch.randn(shape, generator=draws).to(spec.observation_dtype)
        if size == 1:
            return tuple(planner.values(observation).tolist())
        observation = observation.repeat_interleave(size, 0)
        member = torch.arange(size).repeat(3)
        return tuple(planner.values(observation, member).tolist())

    def _name_weights(self):
        """Replace the fingerprints of weights by the number of their update."""
        planner = make_planner(self.run.networks, self.run.config, self.run.env.spec)
        names = {}
        for update, state in enumerate([*self.states, self.last]):
            planner.refresh(state)
            names.setdefault(self._fingerprint(planner), update)
        self.events = [
            tuple(names.get(part, "?") if isinstance(part, tuple) else part for part in event)
            for event in self.events
        ]


def _note_calls(patch, owner, name, note):
    """Call `note` with the arguments of each call, before it."""
    function = getattr(owner, name)

    def noted(*args, **options):
        note(*args, **options)
        return function(*args, **options)

    patch.setattr(owner, name, noted)


def _rate(before, after, grads):
    """The learning rate of plain gradient descent: the step along the gradient."""
    moved = sum(float(((after[key] - before[key]) * grads[key]).sum()) for key in keys_of(grads))
    length = sum(float(grads[key].square().sum()) for key in keys_of(grads))
    return -moved / length if length else 0.0


def keys_of(tree):
    """Keys of all tensors."""
    return list(tree.keys(True, True))


def expected(config, returns):
    """The events of such a run, by a loop over its config.

    returns: those of its evaluations, in order; they decide which best states are saved.
    """
    collect, targets, search = config.collect, config.targets, config.search
    optimizer, evaluate = config.optimizer, config.evaluate
    num_learning_steps, num_updates = collect.num_env_steps - collect.random_env_steps, 0
    if num_learning_steps > 0:
        num_updates = round(num_learning_steps * collect.updates_per_env_step)
    num_updates += collect.extra_updates
    events, step, num_evaluated, best = [], 0, 0, -math.inf
    returns, evaluated_at, last_saved = iter(returns), None, -1

    def evaluate_at(update):
        nonlocal num_evaluated, best, evaluated_at
        found = next(returns)
        simulations = evaluate.num_simulations or search.num_simulations
        events.append(("evaluate", step, update, 0.0, False, simulations))
        events.append(("tree", step))
        num_evaluated, evaluated_at = step // evaluate.every_env_steps, (update, step)
        better, best = found >= best, max(best, found)
        return better

    for update in range(num_updates):
        due = collect.random_env_steps + math.ceil((update + 1) / collect.updates_per_env_step)
        while step < min(due, collect.num_env_steps):
            for _ in range(collect.rollout_length):
                # A rollout uses the settings of its first step.
                if _rollout_start(step, config) < collect.random_env_steps:
                    events.append(("random", step))
                else:
                    progress = min(1.0, _rollout_start(step, config) / collect.num_env_steps)
                    temperature = None
                    for start, value in zip(
                        search.temperature_from, search.temperatures, strict=True
                    ):
                        if progress >= start:
                            temperature = value
                    simulations = search.num_simulations
                    events.append(("act", step, update, temperature, True, simulations))
                step += config.env.num_envs
        beta = -1.0  # none
        if config.replay.alpha:
            beta = config.replay.beta + (1 - config.replay.beta) * update / num_updates
        copied = update - update % targets.target_interval
        interval = 0
        if targets.correct_horizon:
            horizon = targets.horizon_fraction * collect.num_env_steps
            interval = max(int(horizon > 0), round(horizon))
        events.append(("batch", beta, copied, interval, config.replay.batch_size))
        rate = optimizer.learning_rate
        for _ in range(update // optimizer.decay_updates):
            rate *= optimizer.decay_rate
        warm = optimizer.warmup_fraction * num_updates
        if update + 1 < warm:
            rate *= (update + 1) / warm
        events.append(("rate", rate))
        done, better = update + 1, False
        if step // evaluate.every_env_steps > num_evaluated:
            better = evaluate_at(done)
        if better or done % config.checkpoint.every_updates == 0:
            events.append(("save", done))
            last_saved = done
    if evaluated_at is None or evaluated_at[1] != step or num_updates - evaluated_at[0] > 10:
        evaluate_at(num_updates)
        last_saved = -1
    if last_saved != num_updates:
        events.append(("save", num_updates))
    return events


def _rollout_start(step, config):
    """The first step of the rollout that this step belongs to."""
    return step - step % (config.env.num_envs * config.collect.rollout_length)


def assert_same(found, expected):
    """Compare event by event, rates and betas up to rounding: a rate is measured by its step."""
    for index, (found_event, expected_event) in enumerate(zip(found, expected, strict=False)):
        assert found_event[0] == expected_event[0], (
            f"event {index}: {found_event}, not {expected_event}"
        )
        assert found_event[1:] == pytest.approx(expected_event[1:], rel=2e-3, abs=1e-8), (
            f"event {index}: {found_event}, not {expected_event}"
        )
    assert Counter(event[0] for event in found) == Counter(event[0] for event in expected)


def plain_weights(diary):
    """The importance weights of each batch, from priorities in a dict.

    A new step gets the largest priority at the time when it can first be drawn.
    """
    alpha, eps = diary.config.replay.alpha, 1e-8
    known, largest, beta, found = {}, 1.0, iter(diary.of("batch")), []
    has_priorities = False
    for kind, *values in diary.replayed:
        if kind == "extended":
            for number in values[0]:
                known.setdefault(number, largest)
        elif kind == "drawn":
            (exponent, *_), chances = next(beta), [(known[i] + eps) ** alpha for i in values[0]]
            found.append([(chance / min(chances)) ** -exponent for chance in chances])
        else:
            for number, priority in zip(*values, strict=True):
                known[number] = priority
            largest = max([*values[1], *([largest] if has_priorities else [])])
            has_priorities = True
    return found
