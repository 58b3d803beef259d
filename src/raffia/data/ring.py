"""The episodes in a ring of rows: several environments step together, each in its episodes.

`EpisodeRing` holds no data, only numbers: for each row of the ring the rows before and after it,
and what it is. Items are counted for ever, item i lies in row i % num_rows; an episode is named by
the item of its first step. A whole batch of steps [T, E] comes in by one call.

An episode of c steps takes c + 1 rows: the last is its closing row, an observation from which no
action was taken. The first row's `preceding` and the last row's `following` are the row itself, so
following the links past an end stays there: frames before an episode are its first one, and rows
behind it are its last row, with no condition anywhere.

Legend: T times, E environments, C closing rows, H rows a segment looks ahead, N rows in the ring.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raffia.data import kernels
from raffia.data.processes import by_value, from_value
from raffia.data.structure import check_entries

# What a row is; as in the kernels.
STEP, TERMINATED, TRUNCATED, CLOSED_TERMINATED, CLOSED_TRUNCATED = range(5)
NONE = -1  # instead of an item


class RingChange(NamedTuple):
    """The changes of the ring by an addition."""

    item: Tensor  # [T, E] int64, of the steps
    lost: Tensor  # int64, rows of steps that can be drawn no more
    won: Tensor  # int64, rows of steps that can be drawn now


class Cut(NamedTuple):
    """The episodes that were broken off."""

    closing: Tensor  # [C] int64, their closing rows
    before: Tensor  # [C] int64, the rows of the steps before; without one the closing row
    lost: Tensor
    won: Tensor


class Found(NamedTuple):
    """The rows of those items that are here, n of them."""

    position: Tensor  # [n] int64, of each among the items
    row: Tensor  # [n] int64
    is_step: Tensor  # [n] bool; else it is a closing row


class EpisodeRing:
    """The links between the rows of a ring, and the rows at which segments may start.

    num_rows: N.
    look_ahead: H; a step can be drawn when H rows follow it, or its episode has ended.
    look_back: how many rows before its start a segment reads, as far as there are any.

    When the first step of an ended episode is overwritten, the whole episode is lost. An
    unfinished one loses its oldest steps only, and the `look_back` steps after these cannot be
    drawn any more.

    >>> from raffia.data.ring import EpisodeRing
    >>> ring = EpisodeRing(8, look_ahead=2)
    >>> goes_on, ends = torch.tensor([[False]]), torch.tensor([[True]])
    >>> [ring.append(goes_on, goes_on, torch.tensor([0])).won.tolist() for _ in range(3)]
    [[], [], [0]]
    >>> ring.append(ends, goes_on, torch.tensor([0])).won
    tensor([1, 2, 3])
    >>> len(ring), ring.total  # four steps can be drawn; the fifth row is the closing one
    (4, 5)
    """

    env: Tensor  # [E] numbers of the environments, ascending
    last: Tensor  # [E] item of each one's newest step; NONE where the next one starts an episode

    _PER_ROW = ("preceding", "following", "episode", "owner", "kind", "drawable")
    _PER_ENV = ("env", "last", "name", "length", "dropped", "waiting", "num_waiting")
    ENTRIES = (*_PER_ROW, *_PER_ENV, "total", "num_ended", "window")  # of any state

    def __init__(self, num_rows: int, *, look_ahead: int, look_back: int = 0) -> None:
        self.num_rows, self.look_ahead, self.look_back = num_rows, look_ahead, look_back
        # Room for all that one change can bring; what is not touched takes no memory.
        room = torch.empty(2, 2 * num_rows, dtype=torch.int64, device="cpu")
        self._lost, self._won = room.unbind(0)
        self.clear()

    def clear(self) -> None:
        """Forget everything, and count items from 0 again."""
        rows = torch.arange(self.num_rows, device="cpu")
        nobody = rows.new_empty(0)
        self.preceding, self.following = rows.clone(), rows.clone()
        self.episode, self.owner = torch.full_like(rows, NONE), torch.zeros_like(rows)
        self.kind = torch.zeros_like(rows, dtype=torch.uint8)
        self.drawable = torch.zeros_like(rows, dtype=torch.bool)
        # For each known environment, by its position in the order of their numbers.
        for name in self._PER_ENV:
            setattr(self, name, nobody)
        self.counts = rows.new_zeros(5)  # see the kernels
        self._bind()

    def _bind(self) -> None:
        """Pass the addresses of all arrays to the kernels."""
        fields = {name: getattr(self, name) for name in (*self._PER_ROW, *self._PER_ENV)}
        self._numbers = self.counts.numpy()
        self._record = kernels.ring.RingRecord(
            **fields,
            counts=self.counts,
            lost=self._lost,
            won=self._won,
            num_rows=self.num_rows,
            num_envs=len(self.env),
            look_ahead=self.look_ahead,
            look_back=self.look_back,
        )
        self.segments = kernels.ring.SegmentsRecord()  # what `find_segments` works on

    @property
    def address(self) -> int:
        """The address of the ring's record, for kernels."""
        return self._record.address

    def __getstate__(self) -> dict[str, Any]:
        return {"state": by_value(self.state())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        found = from_value(state["state"])
        num_rows, look_ahead, look_back = found["window"].tolist()
        self.__init__(num_rows, look_ahead=look_ahead, look_back=look_back)  # type: ignore[misc]
        self.load_state(found)

    def __len__(self) -> int:
        """How many steps can be drawn."""
        return int(self._numbers[1])

    @property
    def total(self) -> int:
        """How many items were ever appended."""
        return int(self._numbers[0])

    @property
    def num_episodes(self) -> int:
        """The number of stored episodes, finished or not."""
        return int(self._numbers[2]) + int((self.last != NONE).sum())

    # -- items and rows

    def row(self, item: Tensor) -> Tensor:
        """The rows that hold the given items, or held them before.

        >>> EpisodeRing(8, look_ahead=2).row(torch.tensor([0, 9]))
        tensor([0, 1])
        """
        return item % self.num_rows

    def item(self, row: Tensor) -> Tensor:
        """The newest items in these rows; negative where there never was one.

        >>> ring = EpisodeRing(8, look_ahead=0)
        >>> goes_on = torch.zeros(5, 1, dtype=torch.bool)
        >>> for _ in range(2): change = ring.append(goes_on, goes_on, torch.tensor([0]))
        >>> ring.item(torch.tensor([0, 1, 2]))
        tensor([8, 9, 2])
        """
        newest = self.total - 1
        return newest - (newest - row) % self.num_rows

    def holds(self, item: Tensor) -> Tensor:
        """Whether each item is stored, as a step or closing row of an episode not lost: bool.

        >>> EpisodeRing(8, look_ahead=2).holds(torch.tensor([0, -1]))
        tensor([False, False])
        """
        return self._is_stored(item) & (self.episode[self.row(item)] != NONE)

    def find(self, item: Tensor) -> Found | None:
        """The rows of items [N], without those that are not here, such as -1.

        None if one of them is neither -1 nor the number of an item that there ever was.

        >>> ring = EpisodeRing(8, look_ahead=0)
        >>> no = torch.zeros(2, 1, dtype=torch.bool)
        >>> _ = ring.append(no, no, torch.tensor([0]))
        >>> ring.find(torch.tensor([-1, 1])).row, ring.find(torch.tensor([2]))
        (tensor([1]), None)
        """
        item = item.contiguous()
        position, row = item.new_empty(2, len(item)).unbind(0)
        is_step = item.new_empty(len(item), dtype=torch.bool)
        out = position.data_ptr(), row.data_ptr(), is_step.data_ptr()
        num = kernels.ring.find(self.address, item.data_ptr(), len(item), *out)
        if num < 0:
            return None
        if num == len(item):
            return Found(position, row, is_step)
        return Found(position[:num], row[:num], is_step[:num])

    def can_draw(self, item: Tensor) -> Tensor:
        """Whether each item is a step that segments may start from: bool.

        >>> EpisodeRing(8, look_ahead=2).can_draw(torch.tensor([0, -1]))
        tensor([False, False])
        """
        return self._is_stored(item) & self.drawable[self.row(item)]

    def later(self, row: Tensor, fraction: Tensor) -> Tensor:
        """For each step [n], the row of a later state in its episode; its own row if no later one
        exists.

        fraction: [n] float64 in [0, 1), how far on: 0 gives the next state.

        >>> ring = EpisodeRing(8, look_ahead=0)
        >>> no = torch.zeros(4, 1, dtype=torch.bool)
        >>> _ = ring.append(no, no, torch.tensor([0]))
        >>> ring.later(torch.tensor([0, 0, 3]), torch.tensor([0.0, 0.9, 0.5], dtype=torch.float64))
        tensor([1, 3, 3])
        """
        row, fraction, out = row.contiguous(), fraction.contiguous(), torch.empty_like(row)
        given = row.data_ptr(), fraction.data_ptr(), len(row)
        kernels.ring.later(self.address, *given, out.data_ptr())
        return out

    @property
    def live(self) -> range:
        """The items that are not overwritten yet."""
        total = self.total
        return range(max(0, total - self.num_rows), total)

    def _is_stored(self, item: Tensor) -> Tensor:
        live = self.live
        return (item >= live.start) & (item < live.stop)

    # -- changes

    def append(self, terminated: Tensor, truncated: Tensor, env: Tensor) -> RingChange:
        """Add one step of each environment at each time; all closing rows come after them.

        terminated, truncated: [T, E] bool; T at least 1.
        env: [E] int64, each number once.
        Rows: T * E + number of ends; no more than the ring has.
        """
        env = env.contiguous()
        first, positions = self.total, torch.empty_like(env)
        arguments = (
            *(env.data_ptr(), positions.data_ptr(), len(env)),
            *(terminated.data_ptr(), truncated.data_ptr(), len(terminated)),
            int((terminated | truncated).sum()),
        )
        if not kernels.ring.append(self.address, *arguments):
            self._know(env)
            kernels.ring.append(self.address, *arguments)
        item = torch.arange(first, first + terminated.numel(), device="cpu")
        return RingChange(item.view(terminated.shape), *self._changed())

    def cut(self, env: Tensor | None = None) -> Cut:
        """End the episodes of these environments: their newest steps become closing rows.

        env: [E] int64, each number once; None: of all. Those in no episode are left out.
        """
        env = self.env if env is None else env.contiguous()
        positions, closing, before = env.new_empty(3, len(env)).unbind(0)
        given = env.data_ptr(), positions.data_ptr(), len(env)
        out = closing.data_ptr(), before.data_ptr()
        num = kernels.ring.cut(self.address, *given, *out)
        if num < 0:
            self._know(env)
            num = kernels.ring.cut(self.address, *given, *out)
        return Cut(closing[:num], before[:num], *self._changed())

    def skip(self, num_items: int) -> Tensor:
        """Leave numbers out, of which nothing is known; no episode continues. The rows lost by it.

        >>> EpisodeRing(8, look_ahead=2).skip(3)
        tensor([], dtype=torch.int64)
        """
        kernels.ring.skip(self.address, num_items)
        return self._changed()[0]

    def lose(self, row: Tensor) -> Tensor:
        """Lose the episodes that any of these rows belong to; the rows that were lost by it.

        >>> EpisodeRing(8, look_ahead=2).lose(torch.tensor([1, 2]))
        tensor([], dtype=torch.int64)
        """
        row = row.contiguous()
        kernels.ring.lose(self.address, row.data_ptr(), len(row))
        return self._changed()[0]

    def _changed(self) -> tuple[Tensor, Tensor]:
        """The rows that were lost and won by the last change."""
        lost, won = self._numbers[3:].tolist()
        return self._lost[:lost].clone(), self._won[:won].clone()

    def _know(self, env: Tensor) -> None:
        """Assign a position to each new environment."""
        numbers, position = torch.cat([self.env, env]).unique(return_inverse=True)
        known = position[: len(self.env)]
        # Positions move when a number comes in between.
        if len(known):
            self.owner = known[self.owner]
        for name in self._PER_ENV[1:]:
            empty = NONE if name in ("last", "name") else 0
            new = torch.full_like(numbers, empty)
            new[known] = getattr(self, name)
            setattr(self, name, new)
        self.env = numbers
        self._bind()

    # -- state

    def state(self) -> dict[str, Tensor]:
        """A copy of the complete state of the ring, as tensors."""
        names = (*self._PER_ROW, *self._PER_ENV)
        state = {name: getattr(self, name).clone() for name in names}
        state["total"], state["num_ended"] = self.counts[0].clone(), self.counts[2].clone()
        state["window"] = torch.tensor(
            [self.num_rows, self.look_ahead, self.look_back], device="cpu"
        )
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load a state of `state()` that `check_state` accepts.

        >>> ring = EpisodeRing(8, look_ahead=2)
        >>> ring.load_state(EpisodeRing(8, look_ahead=2).state())
        """
        for name in (*self._PER_ROW, *self._PER_ENV):
            setattr(self, name, state[name].clone())
        num_drawable = int(self.drawable.sum())
        self.counts = torch.tensor(
            [state["total"], num_drawable, state["num_ended"], 0, 0], device="cpu"
        )
        self._bind()

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless the state is of a ring of this size with the same segments."""
        check_entries(state, self.ENTRIES, "the episodes of a segment buffer")
        saved, here = state["window"].tolist(), [self.num_rows, self.look_ahead, self.look_back]
        if saved != here:
            raise ValueError(
                f"the state belongs to a ring of {saved[0]} rows whose segments look {saved[1]} "
                f"ahead and {saved[2]} back, but here these are {here[0]}, {here[1]} and "
                f"{here[2]}: create the buffer with the same settings as the saved one"
            )
        if not self._is_sound(state):
            raise ValueError(
                "the state is damaged: its links between rows do not form episodes. "
                "Nothing was changed"
            )

    def _is_sound(self, state: Mapping[str, Tensor]) -> bool:
        """Whether the kernels, which check nothing, find each link inside and come to an end."""
        for names, size in ((self._PER_ROW, self.num_rows), (self._PER_ENV, len(state["env"]))):
            for name in names:
                dtype = {"kind": torch.uint8, "drawable": torch.bool}.get(name, torch.int64)
                if state[name].dtype is not dtype or state[name].shape != (size,):
                    return False
        total, ended = int(state["total"]), int(state["num_ended"])
        env, last, waiting = state["env"], state["last"], state["waiting"]
        preceding, following, episode = (state[name] for name in self._PER_ROW[:3])
        bounds = (
            *((preceding, self.num_rows), (following, self.num_rows), (waiting, self.num_rows)),
            *((state["owner"], max(1, len(env))), (state["kind"], 5)),
            (state["num_waiting"], self.look_ahead + 1),
        )
        if not all(bool(((x >= 0) & (x < stop)).all()) for x, stop in bounds):
            return False
        if not total >= ended >= 0:
            return False
        rows, going = torch.arange(self.num_rows, device="cpu"), last != NONE
        item, live = total - 1 - (total - 1 - rows) % self.num_rows, episode != NONE
        forward = (item[following] >= item) & ~(live & (episode[following] != episode))
        back = ~live | (item[preceding] <= item) & (episode[preceding] == episode)
        newest = episode[last % self.num_rows] == state["name"]
        return bool(
            (forward & back).all()
            and (~going | newest & (last >= 0) & (last < total)).all()
            and (env.diff() > 0).all()
            and int(state["num_waiting"].sum()) <= self.num_rows
        )
