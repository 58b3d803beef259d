"""The loop of a WorkerBatch's worker process: it steps its environments as messages ask.

A message is one letter and what belongs to it; whole numbers are int64. Rows count from 0 within
the worker. Seeds and actions lie in shared memory, and so do the steps.

    r  rows               reset them, with the seeds of those rows
    s  rows               step them, with the actions of those rows
    p  row, seed, actions reset the row and act so: how a new worker takes over from a dead one
    v  row                view: a picture of the row
    c                     close the environments and leave

The answer is "k" (done), for a picture with its shape and its bytes; or "e", the number of rows
that were done before the one that raised, and the text of the error.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np
import torch

from raffia.envs.batch import SerialBatch
from raffia.envs.env import Env, EnvSpec
from raffia.envs.rows import Array, EnvRows
from raffia.interrupts import ignore_terminal

_ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class SharedArrays:
    """Arrays in memory that processes share: outputs of environments, actions and seeds.

    >>> from raffia.envs.probe import ValueProbe
    >>> shared = SharedArrays.over(ValueProbe.spec, 3, None)
    >>> shared.rows.observation.shape, shared.actions.dtype, shared.seeds.shape
    ((3, 1), dtype('int64'), (3,))
    """

    memory: Any  # a RawArray of bytes, which a process gets when it is started
    rows: EnvRows
    seeds: Array  # int64 [E]
    actions: Array  # [E, ...], as in the spec

    @classmethod
    def over(cls, spec: EnvSpec, num_envs: int, memory: Any | None) -> SharedArrays:
        """Lay the arrays over memory, always at the same offsets; None: over new memory.

        >>> from raffia.envs.probe import ValueProbe
        >>> first = SharedArrays.over(ValueProbe.spec, 2, None)
        >>> SharedArrays.over(ValueProbe.spec, 2, first.memory).seeds[:] = 7
        >>> first.seeds
        array([7, 7])
        """
        if memory is None:
            memory = RawArray("b", _laid(spec, num_envs, None)[0])
        size, rows, seeds, actions = _laid(spec, num_envs, np.frombuffer(memory, dtype=np.uint8))
        return cls(memory, rows, seeds, actions)


def _laid(spec: EnvSpec, num_envs: int, memory: Array | None) -> tuple[int, EnvRows, Array, Array]:
    """The size in bytes and the arrays, one after another in `memory`; None: only the size."""
    size = 0

    def allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        nonlocal size
        start = size
        stop = start + int(np.prod(shape)) * dtype.itemsize
        size = -(-stop // _ALIGNMENT) * _ALIGNMENT
        if memory is None:
            return np.empty(0)
        return memory[start:stop].view(dtype).reshape(shape)

    rows = EnvRows.for_spec(spec, num_envs, allocate)
    seeds = allocate((num_envs,), np.dtype(np.int64))
    kind = torch.empty(0, dtype=spec.action.dtype, device="cpu").numpy().dtype
    actions = allocate((num_envs, *spec.action.shape), kind)
    return size, rows, seeds, actions


def work(
    connection: Connection,
    makes: Sequence[Callable[[], Env]],
    spec: EnvSpec,
    num_envs: int,
    first_row: int,
    memory: Any,
) -> None:
    """The main function of a worker process; it ends when it is asked to, or when its parent is
    gone."""
    ignore_terminal()
    torch.set_num_threads(1)
    shared = SharedArrays.over(spec, num_envs, memory)
    envs: list[Env] = []
    try:
        for make in makes:
            env = make()
            if env.spec != spec:
                raise ValueError(
                    f"environments of a batch must have equal specs: {spec}, {env.spec}"
                )
            envs.append(env)
    except Exception as error:
        connection.send_bytes(_failure(len(envs), error))
        return
    worker = _Worker(envs, shared, first_row)
    try:
        connection.send_bytes(b"k")
        while (message := connection.recv_bytes())[:1] != b"c":
            connection.send_bytes(worker.answer(message))
    except (EOFError, ConnectionError):
        pass  # the parent is gone, nobody to report to
    finally:
        worker.batch.close()


class _Worker:
    def __init__(self, envs: Sequence[Env], shared: SharedArrays, start: int) -> None:
        stop = start + len(envs)
        self.batch = SerialBatch(envs, shared.rows.part(start, stop))
        self.seeds = shared.seeds[start:stop]
        self.actions = shared.actions[start:stop]

    def answer(self, message: bytes) -> bytes:
        """Execute the command of a message."""
        done = 0
        try:
            match message[:1]:
                case b"r":
                    for row in numbers(message[1:]):
                        self.batch.reset_row(row, int(self.seeds[row]))
                        done += 1
                case b"s":
                    for row in numbers(message[1:]):
                        self.batch.step_row(row, _action(self.actions[row]))
                        done += 1
                case b"p":
                    row, seed = numbers(message[1:17])
                    actions = np.frombuffer(bytearray(message[17:]), dtype=self.actions.dtype)
                    actions = actions.reshape(-1, *self.actions.shape[1:])
                    self.batch.fast_forward_row(row, seed, torch.from_numpy(actions))
                case b"v":
                    return b"k" + _picture(self.batch.render(*numbers(message[1:])))
        except Exception as error:
            return _failure(done, error)
        return b"k"


def numbers(data: bytes) -> list[int]:
    """Whole numbers out of a message.

    >>> numbers(np.array([3, 1]).tobytes())
    [3, 1]
    """
    values: list[int] = np.frombuffer(data, dtype=np.int64).tolist()
    return values


def _action(value: Array) -> Any:
    return value.copy() if value.ndim else int(value)  # a copy: environments may keep it


def _picture(picture: torch.Tensor | None) -> bytes:
    if picture is None:
        return b""
    return np.array(picture.shape, dtype=np.int64).tobytes() + picture.numpy().tobytes()


def _failure(done: int, error: Exception) -> bytes:
    head = f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    return b"e" + np.array([done]).tobytes() + f"{head}\n\nIn the worker:\n{trace}".encode()
