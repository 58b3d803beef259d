"""What a run of EfficientZero does and when, as it did it and as a plain loop says it should."""

import json
import math
from collections import Counter
from contextlib import ExitStack, closing

import pytest
import torch

from raffia.envs import make_env
from raffia.recipes.efficientzero import evaluation as evaluation_module
from raffia.recipes.efficientzero import experiment as run_module
from raffia.recipes.efficientzero import reanalyzers
from raffia.recipes.efficientzero.actors import make_planner
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.train import Checkpoints, TrainingSession
from tests.recipes.runs import Quiet


class Diary:
    """A run that is played to its end, with all that it did written down in order.

    events: ("random", env_step), ("act", env_step, weights, temperature, noise, simulations),
        ("batch", beta, weights of the targets' network, correction interval, size), ("rate", rate),
        ("evaluate", env_step, weights, temperature, noise, simulations), ("tree", env_step),
        ("save", update) and ("log", update). Weights are known by the update they came of.
    """

    def __init__(self, config, folder, make_env=make_env):
        folder.mkdir()
        self.config, self.folder, self.events = config, folder, []
        self.states, self.windows, self.batches, self.metrics, self.updates = [], [], [], [], []
        self.replayed = []  # what can be drawn, what was, and which priorities it got
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
        """Of the metrics' file."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    def of(self, kind):
        """The events of this kind, without its name."""
        return [event[1:] for event in self.events if event[0] == kind]

    # -- watching

    def _watch_playing(self, patch):
        run, act, at_random = self.run, run_module.act, run_module.act_at_random
        make_batch, save_tree = reanalyzers.make_batch, run_module.save_tree

        def noted(kind):
            def acts(planner, state, **options):
                assert planner is run.actor
                self._note_search(kind, planner, **options)
                return act(planner, state, **options)

            return acts

        def acts_at_random(*args, **options):
            self.events.append(("random", run.collector.num_env_steps))
            return at_random(*args, **options)

        def makes_batch(windows, planner, *, correction_interval, **options):
            assert planner is run.reanalyze_planner
            beta = run.replay.beta
            noted = (-1.0 if beta is None else beta, self._seen_by(planner))
            self.events.append(("batch", *noted, correction_interval, len(windows)))
            self.windows.append(windows.clone())
            self.replayed.append(("drawn", windows["index"].tolist()))
            return make_batch(windows, planner, correction_interval=correction_interval, **options)

        def saves_tree(folder, name, planner, state):
            self.events.append(("tree", int(name)))
            save_tree(folder, name, planner, state)

        patch.setattr(run_module, "act", noted("act"))
        patch.setattr(run_module, "act_at_random", acts_at_random)
        patch.setattr(reanalyzers, "make_batch", makes_batch)
        patch.setattr(run_module, "save_tree", saves_tree)
        patch.setattr(evaluation_module, "act", noted("evaluate"))

    def _note_search(self, kind, planner, temperature, noise, num_simulations=None, seed=None):
        simulations = num_simulations or self.config.search.num_simulations
        step = self.run.collector.num_env_steps
        event = (kind, step, self._seen_by(planner), temperature, noise, simulations)
        if kind == "act" or self.events[-1] != event:  # once for all steps of an evaluation
            self.events.append(event)

    def _watch_replay(self, replay):
        extend = replay.extend

        def extends(steps):
            index = extend(steps)
            if self.config.population.size == 1:
                numbers = torch.arange(replay.storage.total)
                self.replayed.append(("extended", numbers[replay.contains(numbers)].tolist()))
            return index

        replay.extend = extends

    def _watch_learning(self, run):
        learner, apply = run.learner, run.learner.apply
        outer = self

        class Watched:
            init = learner.init

            def grads(self, state, batch):
                outer.states.append(state.clone())
                update, metrics = learner.grads(state, batch)
                outer.batches.append(batch.clone())
                outer.metrics.append(metrics.clone())
                outer.updates.append(update["grads"].clone())
                told = batch["index"].tolist(), metrics["priority"].tolist()
                outer.replayed.append(("told", *told))
                return update, metrics

            def apply(self, state, update):
                before, grads = state["params"].clone(), update["grads"].clone()
                after = apply(state, update)
                outer.events.append(("rate", _rate(before, after["params"], grads)))
                return after

        run.learner = Watched()

    def _watch_files(self, patch):
        save = Checkpoints.save

        def saves(checkpoints, update, *args, **options):
            self.events.append(("save", update))
            return save(checkpoints, update, *args, **options)

        patch.setattr(Checkpoints, "save", saves)

    # -- whose weights they were

    def _seen_by(self, planner):
        """What the networks of a planner say, by which they are known."""
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
        """The number of the update in place of what the networks said."""
        planner = make_planner(self.run.networks, self.run.config, self.run.env.spec)
        names = {}
        for update, state in enumerate([*self.states, self.last]):
            planner.refresh(state)
            names.setdefault(self._seen_by(planner), update)
        self.events = [
            tuple(names.get(part, "?") if isinstance(part, tuple) else part for part in event)
            for event in self.events
        ]


def _rate(before, after, grads):
    """Of plain gradient descent: how far it went along the gradient."""
    moved = sum(float(((after[key] - before[key]) * grads[key]).sum()) for key in keys_of(grads))
    length = sum(float(grads[key].square().sum()) for key in keys_of(grads))
    return -moved / length if length else 0.0


def keys_of(tree):
    """Of all tensors in it."""
    return list(tree.keys(True, True))


def expected(config, returns):
    """The events of such a run, by a loop that knows nothing but the config.

    returns: what its evaluations gave, in order; they decide what is saved besides.
    """
    collect, targets, search = config.collect, config.targets, config.search
    optimizer, evaluate = config.optimizer, config.evaluate
    played, num_updates = collect.num_env_steps - collect.random_env_steps, 0
    if played > 0:
        num_updates = round(played * collect.updates_per_env_step)
    num_updates += collect.extra_updates
    events, step, num_evaluated, best = [], 0, 0, -math.inf
    returns, at, saved = iter(returns), None, -1

    def look(update):
        nonlocal num_evaluated, best, at
        found = next(returns)
        simulations = evaluate.num_simulations or search.num_simulations
        events.append(("evaluate", step, update, 0.0, False, simulations))
        events.append(("tree", step))
        num_evaluated, at = step // evaluate.every_env_steps, (update, step)
        better, best = found > best, max(best, found)
        return better

    for update in range(num_updates):
        due = collect.random_env_steps + math.ceil((update + 1) / collect.updates_per_env_step)
        while step < min(due, collect.num_env_steps):
            for _ in range(collect.rollout_length):
                # A turn is begun with what was known before it.
                if _turn_begins(step, config) < collect.random_env_steps:
                    events.append(("random", step))
                else:
                    share = min(1.0, _turn_begins(step, config) / collect.num_env_steps)
                    temperature = None
                    for start, value in zip(
                        search.temperature_from, search.temperatures, strict=True
                    ):
                        if share >= start:
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
            interval = round(targets.horizon_fraction * collect.num_env_steps)
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
            better = look(done)
        if better or done % config.checkpoint.every_updates == 0:
            events.append(("save", done))
            saved = done
    if at is None or at[1] != step or num_updates - at[0] > 10:
        look(num_updates)
        saved = -1
    if saved != num_updates:
        events.append(("save", num_updates))
    return events


def _turn_begins(step, config):
    """The step at which the turn begins that this step is of."""
    return step - step % (config.env.num_envs * config.collect.rollout_length)


def assert_same(found, wanted):
    """Event by event, rates and betas up to rounding: a rate is measured by what it changes."""
    for place, (one, other) in enumerate(zip(found, wanted, strict=False)):
        assert one[0] == other[0], f"event {place}: {one}, not {other}"
        assert one[1:] == pytest.approx(other[1:], rel=2e-3, abs=1e-8), (
            f"event {place}: {one}, not {other}"
        )
    assert Counter(event[0] for event in found) == Counter(event[0] for event in wanted)


def plain_weights(diary):
    """The importance weights of each batch, by a dict of priorities that a loop keeps.

    A new step has the largest priority that any had when it could first be drawn.
    """
    alpha, eps = diary.config.replay.alpha, 1e-8
    known, largest, beta, found = {}, 1.0, iter(diary.of("batch")), []
    said = False
    for kind, *seen in diary.replayed:
        if kind == "extended":
            for number in seen[0]:
                known.setdefault(number, largest)
        elif kind == "drawn":
            (exponent, *_), chances = next(beta), [(known[i] + eps) ** alpha for i in seen[0]]
            found.append([(chance / min(chances)) ** -exponent for chance in chances])
        else:
            for number, priority in zip(*seen, strict=True):
                known[number] = priority
            largest, said = max([*seen[1], *([largest] if said else [])]), True
    return found
