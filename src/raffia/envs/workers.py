"""Several environments as one BatchEnv, spread over worker processes."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raffia.envs.batch import outputs_of, spec_of
from raffia.envs.env import Env
from raffia.envs.rows import checked_actions, checked_seeds, chosen_rows, raised_in, refuse_ended
from raffia.envs.worker_loop import SharedArrays, numbers, work
from raffia.hints import check_range
from raffia.interrupts import interrupts_deferred
from raffia.tensordict.tensordict import TensorDict

_START_SECONDS = 120.0  # for a process to start and import, at least
_PATIENCE_SECONDS = 5.0  # for a process that was asked to leave


class WorkerError(RuntimeError):
    """An environment raised an error in its worker, or a worker process ended.

    >>> WorkerError("row 3 (worker 1): ValueError: too cold")
    WorkerError('row 3 (worker 1): ValueError: too cold')
    """


@dataclass
class _Episode:
    """The seed and actions that reproduce an episode."""

    seed: int
    actions: list[Any]


@dataclass(frozen=True)
class _WorkerProcess:
    """A process, and the rows first .. stop - 1 that are its own."""

    first: int
    stop: int
    process: BaseProcess
    connection: Connection

    def send(self, letter: bytes, *values: int, data: bytes = b"") -> None:
        """Send the worker a command; that it is dead shows when its answer is awaited."""
        with suppress(OSError):
            self.connection.send_bytes(letter + np.array(values, dtype=np.int64).tobytes() + data)

    def kill(self) -> None:
        """Kill the process, if it has not left."""
        if not self.connection.closed:
            self.process.kill()

    def end(self) -> str:
        """Wait for the process to leave, kill it if it does not; returns how it ended, once."""
        if self.connection.closed:
            return ""
        self.connection.close()
        self.process.join(_PATIENCE_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        code = self.process.exitcode or 0
        self.process.close()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class WorkerBatch:
    """E environments of one kind in worker processes, with a SerialBatch's results bit for bit.

    The functions that make the environments must be importable in another process: a class, a
    function of a module, a `functools.partial` of one; not a lambda. A script that is run must
    start under `if __name__ == "__main__":`, since its file is read by each worker.

    A worker that dies, as when the system kills it for its memory, is started again, and its rows
    play their episodes once more up to where they were: seed and actions are all that is needed.

    >>> from functools import partial
    >>> from raffia.envs.gym import GymEnv
    >>> batch = WorkerBatch([partial(GymEnv, "CartPole-v1")] * 3, num_workers=2)
    >>> batch.reset(torch.arange(3))["observation"].shape
    torch.Size([3, 4])
    >>> batch.step(torch.tensor([0, 1]), rows=torch.tensor([2, 0]))["reward"]
    tensor([1., 1.])
    >>> batch.close()
    """

    def __init__(
        self,
        makes: Sequence[Callable[[], Env]],
        num_workers: int,
        *,
        max_restarts: int = 3,
        step_timeout_seconds: float = 0.0,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """makes: each gives one environment. The first is called here too, once, to learn the spec.
        max_restarts: of one worker within one call; more is an error. 0: the first death is one
        step_timeout_seconds: for one answer of a worker to a step, a reset or a picture; one that
            takes longer hangs, and is an error. Starting, and playing episodes once more, may take
            longer: so much for each action. 0: no limit
        warn: called with a text about each restart
        """
        check_range("num_workers", num_workers, 1, len(makes))
        check_range("max_restarts", max_restarts, 0)
        first = makes[0]()
        self.spec = spec_of(first)
        first.close()
        self.num_envs = len(makes)
        self.num_restarts = 0  # so far
        check_range("step_timeout_seconds", step_timeout_seconds, 0)
        self._max_restarts = max_restarts
        self._timeout = step_timeout_seconds
        self._warn = warn
        self._makes = list(makes)
        self._shared = SharedArrays.over(self.spec, self.num_envs, None)
        self._tensors = self._shared.rows.tensors(self.spec.step_keys)
        self._episodes: list[_Episode | None] = [None] * self.num_envs
        self._context = _context()
        self._open = True
        bounds = [self.num_envs * number // num_workers for number in range(num_workers + 1)]
        self._number_of = np.repeat(np.arange(num_workers), np.diff(bounds)).tolist()
        self._workers: list[_WorkerProcess] = []
        with self._closing_if_broken():
            for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
                self._workers.append(self._started(start, stop))
            for number, worker in enumerate(self._workers):
                try:
                    self._wait_until_ready(worker)
                except (EOFError, ConnectionError) as error:
                    raise WorkerError(
                        f"worker {number} ended before it was ready, {worker.end()}; what it "
                        "printed is above. The start of a script must be under if __name__ == "
                        "'__main__':"
                    ) from error

    def reset(self, seeds: Tensor, rows: Tensor | None = None) -> TensorDict:
        """Start episodes from these seeds [n] in these rows [n] (None: all); return states [n]."""
        chosen = chosen_rows(rows, self.num_envs)
        for row, seed in zip(chosen, checked_seeds(seeds, len(chosen)), strict=True):
            self._shared.seeds[row] = seed

        def note(row: int) -> None:
            self._episodes[row] = _Episode(int(self._shared.seeds[row]), [])

        self._command(b"r", chosen, note)
        return outputs_of(self._tensors, self.spec.state_keys, rows, len(chosen))

    def step(self, action: Tensor, rows: Tensor | None = None) -> TensorDict:
        """Act in these rows [n] (None: all), action [n, ...]: the states after it, [n]."""
        chosen = chosen_rows(rows, self.num_envs)
        actions = checked_actions(action, self.spec, len(chosen))
        refuse_ended([row for row in chosen if not self._shared.rows.runs[row]])
        if actions:
            self._shared.actions[chosen] = actions

        def note(row: int) -> None:
            self._episode(row).actions.append(self._shared.actions[row].copy())

        self._command(b"s", chosen, note)
        return outputs_of(self._tensors, self.spec.step_keys, rows, len(chosen))

    def fast_forward(
        self, seeds: Tensor, actions: Sequence[Tensor], rows: Tensor | None = None
    ) -> None:
        """Start episodes from seeds [n] in rows [n] (None: all), and play the actions of each."""
        chosen = chosen_rows(rows, self.num_envs)
        pairs = zip(checked_seeds(seeds, len(chosen)), actions, strict=True)
        episodes = [_Episode(seed, checked_actions(a, self.spec, len(a))) for seed, a in pairs]
        episode_of = dict(zip(chosen, episodes, strict=True))
        for together in zip_longest(*self._by_worker(chosen).values()):  # a row of each worker
            rows_now = [row for row in together if row is not None]
            for row in rows_now:
                self._episodes[row] = episode_of[row]
            self._command(b"p", rows_now, lambda row: None)

    def render(self, row: int) -> Tensor | None:
        """A picture of one environment, uint8 [H, W, 3]; None where it has no picture."""
        (number,) = chosen_rows(torch.tensor([row], device="cpu"), self.num_envs)
        with self._closing_if_broken():
            self._message(self._number_of[number], b"v", [row])
            answer = self._answer(self._number_of[number], b"v", [row])
        if answer[:1] == b"e":
            raise self._failure(row, answer)
        if len(answer) == 1:
            return None
        picture = np.frombuffer(answer[25:], dtype=np.uint8).copy()
        return torch.from_numpy(picture.reshape(numbers(answer[1:25])))

    def close(self) -> None:
        """Make the workers close their environments and exit; a second call does nothing."""
        if self._open:
            for worker in self._workers:
                worker.send(b"c")
            self._end()

    def _end(self) -> None:
        self._open = False
        for worker in self._workers:
            worker.end()

    def _command(self, letter: bytes, rows: list[int], note: Callable[[int], None]) -> None:
        """Run a command for these rows, each in its worker, in parallel; `note` is called for
        each."""
        rows_of = self._by_worker(rows)
        failures: dict[int, bytes] = {}  # row -> answer
        with self._closing_if_broken():
            for number, own in rows_of.items():
                self._message(number, letter, own)
            for number, own in rows_of.items():
                answer = self._answer(number, letter, own)
                failed = answer[:1] == b"e"
                num_done = numbers(answer[1:9])[0] if failed else len(own)
                for row in own[:num_done]:
                    note(row)
                if failed:
                    self._episodes[own[num_done]] = None
                    failures[own[num_done]] = answer
        if failures:
            row = next(row for row in rows if row in failures)
            raise self._failure(row, failures[row])

    def _by_worker(self, rows: list[int]) -> dict[int, list[int]]:
        rows_of: dict[int, list[int]] = {}
        for row in rows:
            rows_of.setdefault(self._number_of[row], []).append(row)
        return rows_of

    def _message(self, number: int, letter: bytes, rows: list[int]) -> None:
        worker = self._workers[number]
        own, data = [row - worker.first for row in rows], b""
        if letter == b"p":  # one row
            episode = self._episode(rows[0])
            own.append(episode.seed)
            data = np.array(episode.actions, dtype=self._shared.actions.dtype).tobytes()
        worker.send(letter, *own, data=data)

    def _episode(self, row: int) -> _Episode:
        episode = self._episodes[row]
        assert episode is not None  # it runs
        return episode

    def _answer(self, number: int, letter: bytes, rows: list[int]) -> bytes:
        """A worker's answer to a command; if it dies, the answer of its replacement."""
        deaths = 0
        while True:
            worker = self._workers[number]
            try:
                if deaths:
                    self._wait_until_ready(worker)
                    self._replay(worker)
                    self._message(number, letter, rows)
                num_actions = len(self._episode(rows[0]).actions) if letter == b"p" else 0
                return self._heard(number, worker, len(rows) + num_actions)
            except (EOFError, ConnectionError) as error:
                deaths += 1
                what = f"worker {number} (rows {worker.first}..{worker.stop - 1}) died"
                how = worker.end()
                if deaths > self._max_restarts:
                    raise WorkerError(
                        f"{what}, {how}, {deaths} times in one call; the batch is closed. If "
                        "memory is short, use fewer workers or environments"
                    ) from error
                if self._warn is not None:
                    self._warn(f"{what}, {how}; it is started again and replays its episodes")
                self.num_restarts += 1
                self._workers[number] = self._started(worker.first, worker.stop)

    def _heard(self, number: int, worker: _WorkerProcess, num_calls: int) -> bytes:
        """A worker's message; WorkerError if none comes for too long.

        num_calls: of its environments, that it was asked for: each may take the whole time.
        """
        limit = self._timeout * num_calls
        if limit and not worker.connection.poll(limit):
            pid = worker.process.pid
            raise WorkerError(
                f"worker {number} (rows {worker.first}..{worker.stop - 1}, process {pid}) has not "
                f"answered for {limit:g} seconds: its environment hangs, or the process is "
                "stopped. The batch is closed. If a step may take that long: "
                f"step_timeout_seconds={2 * self._timeout:g}, for a run "
                "--env.step_timeout_seconds; 0 waits without limit"
            )
        return worker.connection.recv_bytes()

    def _replay(self, worker: _WorkerProcess) -> None:
        """Bring the rows of a new worker to where those of the dead one were."""
        for row in range(worker.first, worker.stop):
            episode = self._episodes[row]
            if episode is None:
                continue
            number = self._number_of[row]
            self._message(number, b"p", [row])
            answer = self._heard(number, worker, 1 + len(episode.actions))
            if answer[:1] == b"e":
                raise self._failure(row, answer)

    def _started(self, first: int, stop: int) -> _WorkerProcess:
        """A new process for these rows; it is not ready yet."""
        ours, theirs = self._context.Pipe()
        makes = self._makes[first:stop]
        process = self._context.Process(
            target=work,
            args=(theirs, makes, self.spec, self.num_envs, first, self._shared.memory),
            name=f"raffia environments {first}..{stop - 1}",
            daemon=True,
        )
        with theirs, interrupts_deferred():
            try:
                process.start()
            except OSError:
                raise
            except Exception as error:  # from the pickling inside multiprocessing
                raise TypeError(
                    f"{makes[0]!r} cannot be sent to another process ({error}); pass a class or a "
                    "function of a module, or a functools.partial of one"
                ) from error
        return _WorkerProcess(first, stop, process, ours)

    def _wait_until_ready(self, worker: _WorkerProcess) -> None:
        limit = max(self._timeout, _START_SECONDS) if self._timeout else None
        if not worker.connection.poll(limit):
            raise WorkerError(
                f"the worker of rows {worker.first}..{worker.stop - 1}, process "
                f"{worker.process.pid}, was not ready after {limit:g} seconds: making its "
                "environments hangs, or the process is stopped. The batch is closed"
            )
        answer = worker.connection.recv_bytes()
        if answer[:1] == b"e":
            raise self._failure(worker.first + numbers(answer[1:9])[0], answer)

    def _failure(self, row: int, answer: bytes) -> WorkerError:
        text = answer[9:].decode()
        return raised_in(WorkerError(f"row {row} (worker {self._number_of[row]}): {text}"), row)

    @contextmanager
    def _closing_if_broken(self) -> Iterator[None]:
        """Messages and answers must stay in step: who leaves in between leaves for good."""
        if not self._open:
            raise RuntimeError("this WorkerBatch is closed; make a new one")
        try:
            yield
        except BaseException:
            for worker in self._workers:
                worker.kill()
            self._end()
            raise


def _context() -> ForkServerContext | SpawnContext:
    """How processes are started: from a server that has torch already, where there is one.

    Never by a plain fork: a copy of a process with threads may wait forever for a lock.
    """
    if sys.platform == "win32":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["raffia.envs.worker_loop", "raffia.envs.gym"])
    return context
