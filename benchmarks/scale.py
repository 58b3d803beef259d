"""Work in other processes against the same in one.

    OMP_NUM_THREADS=1 python -m benchmarks.scale                  # processes of this machine
    OMP_NUM_THREADS=1 python -m benchmarks.scale --engines process ray

Ratios of one run, by the CPU time of whichever process has the most: what wall time is where each
has a core, also while others are at work on the machine. CartPole's networks, 25 simulations, 16
environments in rollouts of 8 steps:

scale_actors    environment steps/s of two actors, nobody learning, / those of the loop
scale_turn      the loop's own CPU time for a rollout of actors / that of the same one in the loop,
                and how many ms that one takes; both rows again with 128 environments, the size from
                which on actors are for
scale_weights   a version of 32 MB to two workers / copying it once, by the clock
scale_recovery  seconds from kill -9 of an actor to the rollout that it had open, by the clock

of CartPole's networks, batches of 128 of which three quarters are searched again, so that making
a batch takes about as long as learning from it:

scale_ahead     an update with one reanalyzer, 8 updates ahead / in turn, in one process

of batches of 128 segments of 14 frames, 96x96x3, which two workers make without searching:

scale_shards    CPU time of the process that leads for a batch, frames of a shard with each worker /
                frames drawn and sent by the leader

and of 6.6 million weights, 512 rows, one thread in each process:

scale_gradients an update that two processes share / by one
scale_sharded   bytes of the state that one of two processes holds / of all of it; and the time of
                an update that they make of it / by one

and of ILQL's networks on Wordle, batches of 64, one thread in each process:

scale_members   a generation of four members, 30 updates, in two processes / in one

and of the process that leads alone, CPU time:

scale_off       updates/s of runs with nothing elsewhere / with searches that need not give a row
                same bits in any batch, which is what workers ask of the loop
scale_learner   share of time that CartPole's learner waits for one actor beside it
replay_out      a batch of 256 segments of frames of 96x96x3 / gathering these into reused memory
replay_update   writing what was searched again into the replay / writing its columns alone
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.scale_here import Updates, off_ratio, replay_ratios, waiting_share
from benchmarks.scale_here import settings as here
from benchmarks.scale_learner import DenseLearner, batch
from benchmarks.scale_shards import shards_ratio
from raffia.algorithms.efficientzero.actor import act
from raffia.distributed import DataParallel, Followers, Pool, Sharded
from raffia.envs.make import make_env
from raffia.learner import Learner
from raffia.recipes.efficientzero.actors import (
    ActorRole,
    acting_weights,
    make_networks,
    make_planner,
    process_config,
    row_seeds,
)
from raffia.recipes.efficientzero.config import EfficientZeroRun
from raffia.recipes.efficientzero.presets import PRESETS
from raffia.recipes.ilql.experiment import ILQLExperiment
from raffia.recipes.ilql.presets import ILQL_PRESETS
from raffia.recipes.population_config import PopulationConfig
from raffia.recipes.scale_config import ActorsConfig, EngineConfig, ReanalyzersConfig
from raffia.recipes.workers import make_engine
from raffia.tensordict.tensordict import TensorDict
from raffia.train.collect import Collector
from raffia.train.rollouts import ActorRollouts, Schedule
from raffia.train.view import PlainView

NUM_ENVS, ROLLOUT, NUM_ACTORS, AHEAD = (16, 128), 8, 2, 4
FOREVER = 10**9
REANALYZE_RATIO = 0.75
MEGABYTES = 32


def settings(num_envs: int) -> EfficientZeroRun:
    """CartPole's preset with longer rollouts, and no random steps at its start."""
    run = PRESETS["cartpole"]
    collect = replace(
        run.collect,
        random_env_steps=0,
        num_env_steps=FOREVER,
        rollout_length=ROLLOUT,
        updates_per_env_step=1 / (num_envs * ROLLOUT),
    )
    return replace(run, env=replace(run.env, num_envs=num_envs), collect=collect)


class Loop:
    """Plays a rollout as the loop of one process does."""

    def __init__(self, run: EfficientZeroRun, state: TensorDict) -> None:
        self.run, self.env = run, make_env(run.env)
        self.collector = Collector(self.env, seed=run.seed)
        networks = make_networks(run, self.env.spec)
        self.planner = make_planner(networks, run, self.env.spec)
        self.planner.refresh(state)

    def __call__(self) -> None:
        self.collector.collect(self._act, ROLLOUT)

    def _act(self, states: TensorDict) -> TensorDict:
        num_envs = self.env.num_envs
        step = self.collector.num_env_steps // num_envs
        seed = row_seeds(self.run.seed, "act", range(num_envs), step)
        return act(self.planner, states, temperature=1.0, noise=True, seed=seed)


class Actors:
    """Takes a rollout of actors, with new weights for each."""

    def __init__(self, run: EfficientZeroRun, state: TensorDict, engine: str) -> None:
        run = replace(
            run,
            actors=ActorsConfig(num=NUM_ACTORS, ahead=AHEAD, cpus=0.5),
            engine=EngineConfig(name=engine),  # type: ignore[arg-type]
        )
        env, rollout_size = make_env(run.env, num_envs=1), run.env.num_envs * ROLLOUT
        schedule = Schedule(
            rollout_size=rollout_size,
            random_env_steps=0,
            num_env_steps=FOREVER,
            updates_per_env_step=1 / rollout_size,
            ahead=AHEAD,
        )
        self.rollouts = ActorRollouts(
            Pool(
                make_engine(run.engine),
                f"{ActorRole.__module__}:{ActorRole.__name__}",
                process_config(run),
                NUM_ACTORS,
            ),
            schedule,
            env.spec,
            run.env.num_envs,
            seed=run.seed,
            acting=acting_weights,
        )
        self.state, self.update = state.copy(), 0

    def __call__(self) -> None:
        self.state["step"] = torch.tensor(self.update)
        self.rollouts.prepare(self.state)
        self.rollouts.take(self.state)
        self.update += 1

    def recovery(self) -> float:
        """Seconds from the death of an actor to the rollout that it had open."""
        worker: Any = self.rollouts.pool.worker(1)
        began = time.perf_counter()
        os.kill(worker.pid, signal.SIGKILL)
        for _ in range(AHEAD + 1):  # those that were answered before come first
            self()
            if self.rollouts.pool.num_restarts:
                break
        return time.perf_counter() - began


def cpu_seconds(call: Callable[[], object], pids: Sequence[int] = ()) -> list[float]:
    """CPU seconds that a call takes, of this process and of others."""
    before = [cpu_of(pid) for pid in (os.getpid(), *pids)]
    call()
    return [cpu_of(pid) - then for pid, then in zip((os.getpid(), *pids), before, strict=True)]


def cpu_of(pid: int) -> float:
    """CPU seconds of a process so far, of all its threads that run."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in threads) / 1e9


def actors_row(engine: str, num_envs: int, rounds: int, turns: int) -> tuple[list[float], float]:
    """Of actors against the loop: their speed, the loop's own share of a rollout, ms of one in the
    loop; and the seconds to the rollout that a killed actor had open."""
    run = settings(num_envs)
    env = make_env(run.env, num_envs=1)
    state = make_networks(run, env.spec).init(0)
    loop, actors = Loop(run, state), Actors(run, state, engine)
    found = []
    try:
        times(actors, 5)(), times(loop, 5)()
        pids = pids_of(actors.rollouts.pool)
        for _ in range(rounds):
            (here,) = cpu_seconds(times(loop, turns))
            leader, *players = cpu_seconds(times(actors, turns), pids)
            found.append((here / max(leader, *players), leader / here, 1e3 * here / turns))
        recovery = actors.recovery()
    finally:
        actors.rollouts.close()
        actors.rollouts.pool.engine.close()
    return [statistics.median(column) for column in zip(*found, strict=True)], recovery


def times(call: Callable[[], object], num: int) -> Callable[[], None]:
    """So many calls."""

    def several() -> None:
        for _ in range(num):
            call()

    return several


def weights_ratio(engine_name: str) -> float:
    """A version to two workers, against a copy of it."""
    weights = TensorDict(w=torch.zeros(MEGABYTES * 2**18))
    engine = make_engine(EngineConfig(name=engine_name))  # type: ignore[arg-type]
    try:
        role = "raffia.distributed.check_engine:Counter"
        workers = [engine.start(role, "{}", index) for index in range(NUM_ACTORS)]
        task, found, copies = TensorDict(add=torch.tensor(0)), [], []
        for _ in range(6):
            began = time.perf_counter()
            ref = engine.put(weights)
            for worker in workers:
                worker.ask(task, ref)
            for worker in workers:
                worker.take(120.0)
            found.append(time.perf_counter() - began)
            engine.drop(ref)
            began = time.perf_counter()
            weights.clone()
            copies.append(time.perf_counter() - began)
        return statistics.median(found[1:]) / statistics.median(copies[1:])
    finally:
        engine.close()


def gradients_ratio(rounds: int) -> float:
    """An update by two processes, against one by one."""
    alone, rows = DenseLearner(), batch(512)
    with Followers("benchmarks.scale_learner:DenseLearner", "{}", num=1) as group:
        shared = DataParallel(alone, group)
        states = {learner: learner.init(0) for learner in (alone, shared)}
        ratios = []
        for number in range(rounds + 2):
            seconds = {learner: update_seconds(learner, states, rows, group) for learner in states}
            if number >= 2:  # else the followers are still being sent the state
                ratios.append(seconds[shared] / seconds[alone])
    return statistics.median(ratios)


def update_seconds(
    learner: Learner, states: dict[Any, TensorDict], rows: TensorDict, group: Followers
) -> float:
    """CPU seconds of an update, of the process that has the most."""

    def step() -> None:
        update, _ = learner.grads(states[learner], rows)
        states[learner] = learner.apply(states[learner], update)

    pids = [worker.pid for worker in group.workers if worker is not None]  # type: ignore[attr-defined]
    return max(cpu_seconds(step, pids))


def sharded_ratios(rounds: int) -> tuple[float, float]:
    """The bytes of a state in two parts, against all; and an update, against one by one process."""
    alone, rows = DenseLearner(), batch(512)
    with Followers("benchmarks.scale_learner:DenseLearner", "{}", num=1) as group:
        shared = Sharded(alone, group)
        states = {learner: learner.init(0) for learner in (alone, shared)}
        whole, ratios = nbytes(states[shared]), []
        for number in range(rounds + 2):
            seconds = {learner: update_seconds(learner, states, rows, group) for learner in states}
            if number >= 2:
                ratios.append(seconds[shared] / seconds[alone])
        return nbytes(states[shared]) / whole, statistics.median(ratios)


def nbytes(state: TensorDict) -> int:
    """Of all tensors."""
    return sum(leaf.nbytes for leaf in state.values(True, True))


def ahead_settings(reanalyzers: ReanalyzersConfig, engine: EngineConfig) -> EfficientZeroRun:
    """CartPole's, of which making a batch takes about as long as learning from it."""
    run = here("cartpole", reanalyzers=reanalyzers, engine=engine)
    targets = replace(run.targets, reanalyze_ratio=REANALYZE_RATIO)
    collect = replace(run.collect, random_env_steps=1_000, updates_per_env_step=1.0)
    return replace(run, targets=targets, collect=collect)


def ahead_ratio(engine: str, rounds: int) -> float:
    """An update whose batch a worker made, against one whose batch was made in turn."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
        loops = []
        for name, num in (("here", 0), ("there", 1)):
            path = Path(folder) / name
            workers = ReanalyzersConfig(num=num, ahead=8 * num, cpus=0.5)
            at = EngineConfig(name=engine if num else "inline")  # type: ignore[arg-type]
            loops.append(Updates(ahead_settings(workers, at), path))
            opened.callback(loops[-1].run.close)
            loops[-1](20)
        inline, ahead = loops
        assert ahead.run.ahead is not None
        pids = pids_of(ahead.run.ahead.pool)
        ratios = [
            max(cpu_seconds(lambda: ahead(50), pids)) / max(cpu_seconds(lambda: inline(50)))
            for _ in range(rounds)
        ]
    return statistics.median(ratios)


def pids_of(pool: Pool) -> list[int]:
    """The processes of its workers."""
    workers: list[Any] = [pool.worker(index) for index in range(pool.num_workers)]
    return [worker.pid for worker in workers if worker is not None]


def members_ratio(rounds: int) -> float:
    """The updates of a generation of four members by two workers, against one program."""
    preset = ILQL_PRESETS["wordle"]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
        runs = []
        for workers in (0, 2):
            path = Path(folder) / str(workers)
            path.mkdir()
            run = replace(
                preset,
                num_threads=1,
                wordle=replace(preset.wordle, num_games=2_000),
                population=PopulationConfig(size=4, workers=workers),
                engine=EngineConfig(name="process" if workers else "inline"),
            )
            runs.append(ILQLExperiment(run, path, PlainView(io.StringIO())))
            opened.callback(runs[-1].close)

        def generation(run: ILQLExperiment) -> None:
            """From the state of a new generation to all that it has become."""
            state = run.init()
            for _ in range(30):
                update, _ = run.learner.grads(state, run.next_batch(state))
                state = run.learner.apply(state, update)
            run.whole(state)

        def seconds(run: ILQLExperiment) -> float:
            pids = [] if run.across is None else pids_of(run.across.pool)
            return max(cpu_seconds(lambda: generation(run), pids))

        for made in runs:
            generation(made)
        one, several = runs
        return statistics.median([seconds(several) / seconds(one) for _ in range(rounds)])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", default=["process"], choices=["process", "ray"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=60, help="of each measurement")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for engine in args.engines:
        for num_envs in NUM_ENVS:
            found, recovery = actors_row(engine, num_envs, args.rounds, args.turns)
            speed, turn, milliseconds = found
            print(f"{engine}, {num_envs} environments: scale_actors {speed:.2f}, ", end="")
            print(f"scale_turn {turn:.3f} (of {milliseconds:.0f} ms), ", end="")
            print(f"scale_recovery {recovery:.1f} s")
        print(f"{engine}: scale_weights {weights_ratio(engine):.1f}, ", end="")
        print(f"scale_ahead {ahead_ratio(engine, args.rounds):.2f}")
    for engine in args.engines:
        ratio, drawn = shards_ratio(engine, args.rounds)
        print(f"scale_shards {ratio:.2f} ({engine}; of {drawn:.0f} ms)")
    print(f"scale_gradients {gradients_ratio(10 * args.rounds):.2f}")
    share, seconds = sharded_ratios(10 * args.rounds)
    print(f"scale_sharded {share:.2f} of the bytes, {seconds:.2f} of the time")
    print(f"scale_members {members_ratio(args.rounds):.2f}")
    for preset, num in (("cartpole", 60), ("pendulum", 40)):
        print(f"scale_off {off_ratio(preset, args.rounds, num):.2f} ({preset})")
    print(f"scale_learner {waiting_share('process', 200):.2f}")
    out, update = replay_ratios(args.rounds)
    print(f"replay_out {out:.2f}, replay_update {update:.1f}")


if __name__ == "__main__":
    main()
