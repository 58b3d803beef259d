"""A learner whose state is divided among processes, which share each batch as well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from raffia.distributed.data_parallel import part_of
from raffia.distributed.engine import Lost
from raffia.distributed.follow import LEARN, SHARD, WHOLE, Followers, Marks, is_unchanged, marks_of
from raffia.distributed.group import Group
from raffia.distributed.shards import cut, gathered, rows_of, shard_grads
from raffia.learner import Learner, applies_shards
from raffia.tensordict.tensordict import TensorDict


class StateLost(Lost):
    """A process was lost, and with it its part of the state: continue from the last checkpoint.

    >>> raise StateLost("follower 1 was killed by signal 9")
    Traceback (most recent call last):
    ...
    raffia.distributed.sharded.StateLost: follower 1 was killed by signal 9
    """


class Sharded:
    """A learner whose state is divided by rows among the processes of a group, for models too large
    for one.

    Of "params", "target" and "opt" a process keeps 1 / W; parameters and target are put together
    for each batch, and gradients are divided as they are summed, so that in the midst of an update
    there are whole parameters, target and gradients, and of the optimiser's state the part alone.
    Each takes its rows of a batch [B], as in `DataParallel`. The sums are in order of rank, those
    of `Accumulate(learner, W)` to the bit; their norm, by which they are clipped, is summed in
    doubles, and may differ from the norm in float32 there in its last bits.

    A state that `apply` did not give last is taken for a whole one, and divided: the loop begins
    with `init`, and holds this process's part after the first `apply`. `whole(state)` puts it
    together, for an evaluation or a checkpoint. A process that dies takes its part with it:
    `StateLost`, and a run goes on from what was saved last.

    learner: whose `apply` works on parts (`applies_shards`), of one agent.
    group: `Followers`, which this process leads; or a `Group` whose members all call the same with
        the same state and the same batch.

    >>> import torch
    >>> from raffia.distributed.group import Rendezvous
    >>> from raffia.distributed.check_engine import MeanLearner
    >>> with Rendezvous() as rendezvous, Group(rendezvous.address, rank=0, size=1) as group:
    ...     learner = Sharded(MeanLearner("{}", 0), group)
    ...     batch = TensorDict(x=torch.arange(4.0), batch_size=[4])
    ...     state = learner.init(0)
    ...     update, metrics = learner.grads(state, batch)
    ...     state = learner.whole(learner.apply(state, update))
    >>> state["params", "w"], metrics["priority"]
    (tensor(1.5000), tensor([0., 1., 2., 3.]))
    """

    def __init__(self, learner: Learner, group: Group | Followers) -> None:
        if not applies_shards(learner):
            raise ValueError(
                f"{type(learner).__name__} does not declare that its apply works on parts of a "
                'state: let it clip by update["grad_norm"] and set its attribute applies_shards = '
                "True, or use DataParallel"
            )
        self.learner, self.group = learner, group
        self._given: TensorDict | None = None  # the whole state that was divided last
        self._part: TensorDict | None = None
        self._marks: Marks | None = None  # of the part
        self._update: Marks | None = None
        self._rows = TensorDict()

    def init(self, seed: int) -> TensorDict:
        """The whole initial state of the wrapped learner."""
        return self.learner.init(seed)

    def grads(self, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, TensorDict]:
        """This process's part of the mean gradients, and the metrics of the whole batch.

        Raises `StateLost` where a process is gone, and with it a part of the state.
        """
        parts = [part_of(batch, rank, self.group.size) for rank in range(self.group.size)]
        self._distribute(state)
        assert self._part is not None
        with self._sharing(LEARN, [{"part": part} for part in parts]) as group:
            update, metrics = shard_grads(
                *(group, self.learner, self._part, self._rows, parts[group.rank])
            )
        self._update = marks_of(update)
        return update, metrics

    def apply(self, state: TensorDict, update: TensorDict) -> TensorDict:
        """This process's part of the state after the update, in which all processes take part."""
        if not self._holds(state) or not is_unchanged(self._update, update):
            raise ValueError(
                "apply must be given the state and the update of the last grads, unchanged, "
                "because the parts in other processes would not change with them"
            )
        assert self._part is not None
        if isinstance(self.group, Followers):
            self.group.step()
        self._part = self.learner.apply(self._part, update)
        self._marks, self._given, self._update = marks_of(self._part), None, None
        return self._part

    def whole(self, state: TensorDict) -> TensorDict:
        """The complete state for what `apply` returned last; any other is complete already."""
        if state is not self._part:
            return state
        self._distribute(state)
        with self._sharing(WHOLE) as group:
            parts = gathered(group, state.select(*self._rows.keys()), self._rows)
        out = state.copy()
        for name, tree in parts.items():
            out.set(name, tree)
        return out

    def _holds(self, state: TensorDict) -> bool:
        return self._part is not None and (state is self._part or state is self._given)

    def _distribute(self, state: TensorDict) -> None:
        """Make all processes hold their part of this state."""
        if state is self._part and not is_unchanged(self._marks, state):
            raise ValueError(
                "this process's part of the state was mutated: change the whole state, "
                "learner.whole(state), and pass that"
            )
        if self._holds(state):
            return
        if state.batch_size:
            raise ValueError(
                f"a state of {state.batch_size[0]} members cannot be divided: pass the state of "
                "one agent"
            )
        size = self.group.size
        rows = rows_of(state, size)
        if len(self._rows.keys()) and _differ(rows, self._rows):
            raise ValueError(
                "this part of a state is not the last that apply returned, and the other parts "
                "are gone: pass the newest one, or a whole state"
            )
        parts = [cut(state, rows, rank, size) for rank in range(size)]
        given = [{"state": part, "rows": rows} for part in parts]
        failures = 0
        while True:
            try:
                with self._sharing(SHARD, given) as group:
                    self._part, self._rows = parts[group.rank], rows
                break
            except Lost:  # as the whole is here still
                failures += 1
                if isinstance(self.group, Group) or failures > self.group.max_restarts:
                    raise
        self._given, self._marks, self._update = state, marks_of(self._part), None

    @contextmanager
    def _sharing(
        self, command: int, given: Sequence[Mapping[str, TensorDict]] = ()
    ) -> Iterator[Group]:
        """The group, while all its processes do the same.

        given: what each gets, in order of rank.
        """
        if isinstance(self.group, Group):
            yield self.group
            return
        try:
            with self.group.sharing(command, given[1:]) as group:
                yield group
        except BaseException as error:
            self._given = self._part = self._marks = self._update = None
            if isinstance(error, Lost) and command != SHARD:
                raise StateLost(
                    f"a process was lost, and with it its part of the state ({error}): continue "
                    "from the last checkpoint"
                ) from error
            raise


def _differ(rows: TensorDict, others: TensorDict) -> bool:
    def named(tree: TensorDict) -> dict[object, int]:
        return {key: int(number) for key, number in tree.items(True, True)}

    return named(rows) != named(others)
