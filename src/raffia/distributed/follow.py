"""Processes without a loop that share each batch with the one that leads, on any machine.

They hold a state and follow commands: "this is the state", "take this part of the batch", "sum",
"make the step". One that dies is started again and given the state, and the update is made again:
bit for bit what it had been. Followers whose leader is gone leave by themselves.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, cast, get_args

import torch
from torch import Tensor

from raffia.distributed.data_parallel import mean_over, part_of
from raffia.distributed.engine import Engine, Lost, Needs, RoleError, Worker, Workers, make_role
from raffia.distributed.group import Group, Rendezvous, Sums, device_of
from raffia.distributed.pool import waiting_metrics
from raffia.distributed.process import ProcessEngine
from raffia.distributed.shards import gathered, shard_grads
from raffia.learner import Learner
from raffia.tensordict.byte_tensors import bytes_to_tensor, tensor_to_bytes
from raffia.tensordict.tensordict import TensorDict

FOLLOWER = f"{__name__}:Follower"  # the role
MEET_SECONDS = 20.0
HELLO, JOIN, STATE, PART, SUM, STEP, SHARD, LEARN, WHOLE = range(9)  # commands
Marks = list[tuple[Tensor, int]]  # leaves, and how often each was written to


class Followers:
    """Processes that share batches with this one, which leads.

    role: an importable factory "package.module:name" of (config, index), which gives the learner
        that `DataParallel` has here; as with workers it is named and not sent.
    config: JSON that the factory reads.
    num: how many follow; parts of a batch are one more.
    sums: see `Group`.
    num_threads: of torch in each follower; None: as many as here, for sums may differ by it.
    device: where followers compute, as this process does; with "cuda" each takes the next card, or
        shares one where there are fewer. Sums go over NCCL if each process has a card of its own,
        else through the CPU's memory.
    gpus: how many the engine gives each follower, which then computes on those alone.
    max_restarts: how often followers may be lost in one update; once more is an error.
    spares: idle processes that replace one that dies.
    patience: seconds without an answer, or within a sum, after which a follower is taken for dead.
    engine: starts them, as a `RayEngine` does on any machine of its cluster, and outlives them;
        None: processes of this machine.

    States are broadcast where they are not what `apply` gave last. A program that makes followers
    is imported by them: what it runs stands under `if __name__ == "__main__":`.

    >>> from raffia.distributed.check_engine import MeanLearner
    >>> from raffia.distributed.data_parallel import DataParallel
    >>> role = "raffia.distributed.check_engine:MeanLearner"  # moves to where the data are
    >>> with Followers(role, "{}", num=1) as group:
    ...     learner = DataParallel(MeanLearner("{}", 0), group)
    ...     state, batch = learner.init(0), TensorDict(x=torch.arange(4.0), batch_size=[4])
    ...     update, metrics = learner.grads(state, batch)
    ...     state = learner.apply(state, update)
    >>> update["grads", "w"], metrics["priority"], state["params", "w"]
    (tensor(-1.5000), tensor([0., 1., 2., 3.]), tensor(1.5000))
    """

    def __init__(
        self,
        role: str,
        config: str,
        num: int,
        *,
        sums: Sums = "ring",
        num_threads: int | None = None,
        device: str = "cpu",
        max_restarts: int = 3,
        spares: int = 0,
        patience: float = 300.0,
        gpus: float = 0.0,
        engine: Engine | None = None,
    ) -> None:
        if num < 1:
            raise ValueError(
                f"num={num} followers must be at least 1: to use none, use the learner itself"
            )
        if sums not in get_args(Sums):
            raise ValueError(f"sums={sums!r} must be one of {', '.join(get_args(Sums))}")
        if patience <= 0 or max_restarts < 0:
            raise ValueError(
                f"patience={patience} must be above 0, and max_restarts={max_restarts} at least 0"
            )
        self.role, self.num, self.sums = role, num, sums
        self.device = torch.device(device)
        self.max_restarts, self.patience = max_restarts, patience
        self.num_restarts = 0
        self.num_broadcasts = 0
        self.seconds_waited = 0.0
        self._needs = Needs(cpus=num_threads or torch.get_num_threads(), gpus=gpus)
        self._owns_engine = engine is None
        self._engine: Engine = ProcessEngine(spares) if engine is None else engine
        self._engine.require([Workers(role, num, self._needs)])
        settings = {
            "role": role,
            "config": config,
            "size": num + 1,
            "sums": sums,
            "timeout": patience,
            "device": self.device.type if gpus else device,
        }
        self._config = json.dumps(settings)
        self._workers: list[Worker | None] = [None] * num
        self._was_lost = [False] * num
        self._open = [0] * num  # answers that a worker owes
        self._group: Group | None = None
        self._state: Marks | None = None  # that followers hold too
        self._update: Marks | None = None  # ...
        self._is_closed = False
        for index in range(num):  # they load while the program goes on
            self._start(index)

    @property
    def size(self) -> int:
        """The number of processes that share a batch, the leader included."""
        return self.num + 1

    @property
    def workers(self) -> list[Worker | None]:
        """The followers that run."""
        return list(self._workers)

    # -- what DataParallel asks

    def grads(
        self, learner: Learner, state: TensorDict, batch: TensorDict
    ) -> tuple[TensorDict, TensorDict]:
        """The mean gradients over the parts; a follower that is lost meanwhile is replaced."""
        if self._is_closed:
            raise RuntimeError("these followers are closed; make new ones")
        found = {leaf.device.type for leaf in state.values(True, True)} - {self.device.type}
        if found:
            raise ValueError(
                f"these followers compute on {self.device}, but this state is on "
                f"{', '.join(found)}: pass state.to({str(self.device)!r}), or make Followers(..., "
                f"device={min(found)!r})"
            )
        members = len(state.batch_size)
        parts = [part_of(batch, rank, self.size, members) for rank in range(self.size)]
        own: tuple[TensorDict, TensorDict] | None = None
        failures = 0
        while True:
            try:
                self._send_state(state)
                for index, part in enumerate(parts[1:]):
                    self._ask(index, PART, part=part)
                if own is None:
                    own = learner.grads(state, parts[0])
                self._take_all()  # so that nobody sums before all have something to sum
                for index in range(self.num):
                    self._ask(index, SUM)
                assert self._group is not None
                with self._waiting():
                    update, metrics = mean_over(self._group, state, *own)
                self._take_all()
                break
            except Lost as error:
                failures += 1
                self._recover()
                if failures > self.max_restarts:
                    raise Lost(
                        f"followers of {self.role} were lost {failures} times in one update, the "
                        f"last time with: {error}"
                    ) from error
            except BaseException:
                self._reset()
                raise
        self._update = marks_of(update)
        return update, metrics

    def apply(self, learner: Learner, state: TensorDict, update: TensorDict) -> TensorDict:
        """The state after the update, here and in all followers."""
        follows = is_unchanged(self._state, state) and is_unchanged(self._update, update)
        self._state = self._update = None
        if follows:
            try:
                for index in range(self.num):
                    self._ask(index, STEP)
            except Lost:
                follows = False  # detected and corrected with the next gradients
        state = learner.apply(state, update)
        if follows:
            self._state = marks_of(state)
        return state

    # -- what Sharded asks

    @contextmanager
    def sharing(
        self, command: int, given: Sequence[Mapping[str, TensorDict]] = ()
    ) -> Iterator[Group]:
        """A group with all followers, while they do what this process does, too.

        given: what each of them gets. If anything fails, all are ended, and their state with them.
        """
        if self._is_closed:
            raise RuntimeError("these followers are closed; make new ones")
        try:
            if self._group is None:
                self._form_group()
            for index in range(self.num):
                self._ask(index, command, **(given[index] if given else {}))
            assert self._group is not None
            yield self._group
            self._take_all()
        except Lost:
            fault = self._fault()
            self._reset()
            if fault is not None:
                raise fault from None
            raise
        except BaseException:
            self._reset()
            raise

    def step(self) -> None:
        """Make all followers apply the gradients that they hold."""
        for index, worker in enumerate(self._workers):
            if worker is not None:  # one that is gone is found out by the next gradients
                self._ask(index, STEP)

    def _fault(self) -> RoleError | None:
        """The error of a follower that made the others lose it."""
        for index, worker in enumerate(self._workers):
            while worker is not None and self._open[index]:
                try:
                    worker.take(min(self.patience, MEET_SECONDS))
                except RoleError as error:
                    if not str(error).startswith("Lost: "):
                        return RoleError(f"follower {index} of {self.role}: {error}")
                except Lost:
                    break
                self._open[index] -= 1
        return None

    # -- followers

    def _send_state(self, state: TensorDict) -> None:
        """Set the state of all followers, in a group with this process."""
        if self._group is None:
            self._state = None
            self._form_group()
        if not is_unchanged(self._state, state):
            self._state = None
            for index in range(self.num):
                self._ask(index, STATE)
            assert self._group is not None
            self._group.broadcast(state)
            self.num_broadcasts += 1
            self._state = marks_of(state)

    def _form_group(self) -> None:
        for index, worker in enumerate(self._workers):
            if worker is not None and not worker.is_alive:
                # Or only the process that forked it has ended, which nobody could tell apart.
                self._lose(index, worker)
            if self._workers[index] is None:
                self._start(index)
            self._ask(index, HELLO)
        self._take_all()  # all are there, and have made their learner
        with (
            Rendezvous(self._engine.host, self.patience) as rendezvous,
            self._ends_if_one_dies(rendezvous),
        ):
            address = bytes_to_tensor(rendezvous.address.encode())
            for index in range(self.num):
                self._ask(index, JOIN, address=address)
            self._group = _group(
                *(rendezvous.address, 0, self.size, self.sums, self.patience),
                device=device_of(str(self.device), 0),
            )
            self._take_all()

    @contextmanager
    def _ends_if_one_dies(self, rendezvous: Rendezvous) -> Iterator[None]:
        """Stop the followers if one of them dies, which those waiting for it would not notice."""
        met = threading.Event()

        def watch() -> None:
            while not met.wait(0.1):
                if any(worker and not worker.is_alive for worker in self._workers):
                    rendezvous.close()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            met.set()
            thread.join()

    def _start(self, index: int) -> None:
        self._workers[index] = self._engine.start(FOLLOWER, self._config, index, self._needs)
        self._open[index] = 0
        self.num_restarts += self._was_lost[index]
        self._was_lost[index] = False

    def _ask(self, index: int, command: int, **given: Tensor | TensorDict) -> None:
        worker = self._workers[index]
        if worker is None:
            raise Lost(f"follower {index} is gone")
        self._open[index] += 1  # even if it is gone, which is then found out
        worker.ask(TensorDict({"command": torch.tensor(command), **given}))

    def metrics(self) -> dict[str, float]:
        """Seconds spent waiting for followers and sums, and restarts of followers."""
        return waiting_metrics("learners", "learner", self.seconds_waited, self.num_restarts)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds_waited += time.monotonic() - began

    def _take_all(self) -> None:
        """Wait until all have answered their commands."""
        with self._waiting():
            self._take_answers()

    def _take_answers(self) -> None:
        for index, worker in enumerate(self._workers):
            while worker is not None and self._open[index]:
                try:
                    worker.take(self.patience)
                except RoleError as error:
                    self._open[index] -= 1
                    if str(error).startswith("Lost: "):  # it lost another
                        raise Lost(f"follower {index}: {str(error)[6:]}") from None
                    raise RoleError(f"follower {index} of {self.role}: {error}") from error
                self._open[index] -= 1

    def _recover(self) -> None:
        """Leave the group; end whoever does not answer its commands."""
        self._leave()
        for index, worker in enumerate(self._workers):
            while worker is not None and self._open[index]:
                try:
                    worker.take(self.patience)
                except RoleError:
                    pass  # it has lost the others, as was to be
                except Lost:
                    self._lose(index, worker)
                    break
                self._open[index] -= 1

    def _lose(self, index: int, worker: Worker) -> None:
        worker.close()
        self._workers[index] = None
        self._was_lost[index] = True

    def _leave(self) -> None:
        self._state = self._update = None
        if self._group is not None:
            self._group.close()
            self._group = None

    def _reset(self) -> None:
        """End all followers; those that are needed are started again."""
        self._leave()
        for index, worker in enumerate(self._workers):
            if worker is not None:
                worker.close()
            self._workers[index] = None

    def close(self) -> None:
        """End all followers."""
        self._is_closed = True
        self._reset()
        if self._owns_engine:
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Follower:
    """The role of a process that follows; `Followers` start it.

    >>> settings = dict(role="raffia.distributed.check_engine:MeanLearner", config="{}", size=2)
    >>> settings |= dict(sums="ring", timeout=60.0, device="cpu")
    >>> follower = Follower(json.dumps(settings), 0)
    >>> follower.do(TensorDict(command=torch.tensor(HELLO)), None).is_empty()
    True
    """

    def __init__(self, config: str, index: int) -> None:
        settings = json.loads(config)
        self._rank, self._size = index + 1, settings["size"]
        self._sums: Sums = settings["sums"]
        self._timeout: float = settings["timeout"]
        self._device = device_of(settings["device"], self._rank)
        self._learner = cast(Learner, make_role(settings["role"], settings["config"], index))
        self._group: Group | None = None
        self._state: TensorDict | None = None
        self._rows: TensorDict | None = None  # where the state is a part of one
        self._own: tuple[TensorDict, TensorDict] | None = None
        self._update: TensorDict | None = None

    def load(self, state: TensorDict) -> None:
        """Load nothing: a follower receives its state in a collective."""

    def do(self, task: TensorDict, weights: TensorDict | None) -> TensorDict:
        """Follow a command of the leader."""
        command = int(task["command"])
        if command == JOIN:
            if self._group is not None:
                self._group.close()
            self._state = self._own = self._update = None
            address = tensor_to_bytes(task["address"]).decode()
            self._group = _group(
                *(address, self._rank, self._size, self._sums, self._timeout), device=self._device
            )
        elif command == STATE:
            self._state = self._there(self._group).broadcast(None).to(self._device)
        elif command == PART:
            # Cloned, to lie in memory as it does where the leader computes.
            part = task["part"].clone().to(self._device)
            self._own = self._learner.grads(self._there(self._state), part)
        elif command == SUM:
            state, group = self._there(self._state), self._there(self._group)
            self._update, _ = mean_over(group, state, *self._there(self._own))
            self._own = None
        elif command == STEP:
            state, self._state = self._there(self._state), None
            self._state = self._learner.apply(state, self._there(self._update))
            self._update = None
        elif command == SHARD:
            self._state = task["state"].clone().to(self._device)
            self._rows = task["rows"].clone()
        elif command in (LEARN, WHOLE):
            try:
                self._take_part(command, task)
            except BaseException:
                self.close()  # the others wait for it
                raise
        return TensorDict()

    def _take_part(self, command: int, task: TensorDict) -> None:
        group, state, rows = map(self._there, (self._group, self._state, self._rows))
        if command == WHOLE:
            gathered(group, state.select(*rows.keys()), rows, is_kept=False)
        else:
            part = task["part"].clone().to(self._device)
            self._update, _ = shard_grads(group, self._learner, state, rows, part)

    @staticmethod
    def _there(found: Any) -> Any:
        if found is None:
            raise Lost("this follower did not receive the data that this step needs")
        return found

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()


def _group(
    address: str, rank: int, size: int, sums: Sums, patience: float, *, device: torch.device
) -> Group:
    """Form a group, whose members have all made their learner before and so arrive together."""
    limit = min(patience, MEET_SECONDS)
    return Group(
        *(address, rank, size), sums=sums, timeout=patience, meet_seconds=limit, device=device
    )


def marks_of(tree: TensorDict) -> Marks:
    return [(leaf, leaf._version) for leaf in tree.values(True, True)]


def is_unchanged(marks: Marks | None, tree: TensorDict) -> bool:
    """Whether these are the same tensors, unchanged since then."""
    if marks is None:
        return False
    leaves = list(tree.values(True, True))
    return len(leaves) == len(marks) and all(
        leaf is known and leaf._version == version
        for leaf, (known, version) in zip(leaves, marks, strict=True)
    )
