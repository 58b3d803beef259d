"""The episodes in a ring of rows: several environments step at once, each in its episodes.

`EpisodeIndex` holds no data, only numbers: for each row of the ring the rows before and after it,
and what it is. Items are counted for ever, item i lies in row i % num_rows; an episode is named by
the item of its first step. A whole batch of steps [T, E] comes in at once.

An episode of c steps takes c + 1 rows: the last is its closing row, an observation from which no
action was taken.

Legend: T times, E environments, C closing rows, H rows a segment looks ahead, N rows in the ring.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raffia.data.by_value import by_value, from_value

# What a row is. A closing row's kind is that of the step before it plus two.
STEP, TERMINATED, TRUNCATED, CLOSED_TERMINATED, CLOSED_TRUNCATED = range(5)
NONE = -1  # instead of an item


class RingChange(NamedTuple):
    """The changes of the ring by an addition."""

    item: Tensor  # [T, E] int64, of the steps
    closing: Tensor  # [C] int64, of the closing rows: by time, then by position in the batch
    lost: Tensor  # int64, rows of steps that can be drawn no more
    won: Tensor  # int64, rows of steps that can be drawn now


class EpisodeIndex:
    """The links between the rows of a ring, and which of them segments may start from.

    num_rows: N.
    look_ahead: H; a step can be drawn when H rows follow it, or its episode has ended.
    look_back: how many rows before its start a segment reads, as far as there are any.

    When the first step of an ended episode is overwritten, the whole episode is lost. One that goes
    on loses its oldest steps only, and the `look_back` steps after these can't be drawn any more.

    >>> from raffia.data.episodes import EpisodeIndex
    >>> episodes = EpisodeIndex(8, look_ahead=2)
    >>> goes_on, ends = torch.tensor([[False]]), torch.tensor([[True]])
    >>> [episodes.append(goes_on, goes_on, torch.tensor([0])).won.tolist() for _ in range(3)]
    [[], [], [0]]
    >>> episodes.append(ends, goes_on, torch.tensor([0])).won
    tensor([1, 2, 3])
    >>> len(episodes), episodes.total  # four steps can be drawn; the fifth row is the closing one
    (4, 5)
    """

    def __init__(self, num_rows: int, *, look_ahead: int, look_back: int = 0) -> None:
        self.num_rows, self.look_ahead, self.look_back = num_rows, look_ahead, look_back
        self.clear()

    def clear(self) -> None:
        """Forget everything, and count items from 0 again.

        >>> EpisodeIndex(8, look_ahead=2).clear()
        """
        rows = torch.arange(self.num_rows)
        # [N]: the rows before and after each in its episode, see `Ring` in segments.py
        self.preceding, self.following = rows.clone(), rows.clone()
        self.episode = torch.full_like(rows, NONE)  # [N] its name; NONE where it is lost
        self.kind = torch.zeros_like(rows, dtype=torch.uint8)  # [N]
        self.drawable = torch.zeros_like(rows, dtype=torch.bool)  # [N]
        self.total = 0  # items ever appended
        self.num_drawable = 0
        self.closing: dict[int, int] = {}  # ended episode -> its closing item
        # For each known environment, by its position in the order of their numbers:
        nobody = torch.empty(0, dtype=torch.int64)
        self._env = nobody  # [E] its number
        # [E] item of its newest step; NONE where the next one starts an episode
        self._last = nobody
        self._name = nobody  # [E] its episode, or NONE
        self._length = nobody  # [E] steps of this episode so far
        self._dropped = nobody  # [E] how many of these were overwritten
        # [H, E] its newest items that can't be drawn yet, the newest last; before them NONE
        self._waiting = torch.empty(self.look_ahead, 0, dtype=torch.int64)

    def __getstate__(self) -> dict[str, Any]:
        return by_value(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(from_value(state))

    def __len__(self) -> int:
        """How many steps can be drawn."""
        return self.num_drawable

    @property
    def num_episodes(self) -> int:
        """How many episodes are here, ended or going on.

        >>> EpisodeIndex(8, look_ahead=2).num_episodes
        0
        """
        return len(self.closing) + int((self._last != NONE).sum())

    @property
    def envs(self) -> Tensor:
        """The numbers of all environments so far, ascending: int64.

        >>> EpisodeIndex(8, look_ahead=2).envs
        tensor([], dtype=torch.int64)
        """
        return self._env

    # -- items and rows

    def row(self, item: Tensor) -> Tensor:
        """The rows that items lie in, or lay in.

        >>> EpisodeIndex(8, look_ahead=2).row(torch.tensor([0, 9]))
        tensor([0, 1])
        """
        return item % self.num_rows

    def item(self, row: Tensor) -> Tensor:
        """The newest items in these rows; negative where there never was one.

        >>> episodes = EpisodeIndex(8, look_ahead=0)
        >>> goes_on = torch.zeros(5, 1, dtype=torch.bool)
        >>> for _ in range(2): change = episodes.append(goes_on, goes_on, torch.tensor([0]))
        >>> episodes.item(torch.tensor([0, 1, 2]))
        tensor([8, 9, 2])
        """
        newest = self.total - 1
        return newest - (newest - row) % self.num_rows

    def holds(self, item: Tensor) -> Tensor:
        """Which items are here, as steps or closing rows of an episode that is not lost: bool.

        >>> EpisodeIndex(8, look_ahead=2).holds(torch.tensor([0, -1]))
        tensor([False, False])
        """
        return self._is_stored(item) & (self.episode[self.row(item)] != NONE)

    def can_draw(self, item: Tensor) -> Tensor:
        """Which items are steps that segments may start from: bool.

        >>> EpisodeIndex(8, look_ahead=2).can_draw(torch.tensor([0, -1]))
        tensor([False, False])
        """
        return self._is_stored(item) & self.drawable[self.row(item)]

    def _is_stored(self, item: Tensor) -> Tensor:
        return (item >= max(0, self.total - self.num_rows)) & (item < self.total)

    # -- adding steps

    def append(self, terminated: Tensor, truncated: Tensor, env: Tensor) -> RingChange:
        """Take in one step of each environment at each time; all closing rows come after them.

        terminated, truncated: [T, E] bool; T at least 1.
        env: [E] int64, each number once.
        Rows: T * E + number of ends; no more than the ring has.
        """
        ends = terminated | truncated
        num_times, num_steps = len(ends), ends.numel()
        num_ends = int(ends.sum())
        num_items = num_steps + num_ends
        lost = self._make_room(num_items)
        if num_times == 1 and not num_ends and self._all_go_on(env):
            return self._go_on(lost)
        env = self._positions(env)
        items = torch.arange(self.total, self.total + num_items)
        rows = items % self.num_rows
        self.total += num_items
        item, row = items[:num_steps].view(ends.shape), rows[:num_steps].view(ends.shape)

        last, name = self._last[env], self._name[env]
        going_on = last != NONE
        begins = torch.cat([~going_on.unsqueeze(0), ends[:-1]])
        row_of_last = self.row(last)
        before = torch.where(begins, row, torch.cat([row_of_last.unsqueeze(0), row[:-1]]))
        after = torch.cat([row[1:], row[-1:]])
        # A name is an item, and items grow: of all that began so far, the largest.
        names = torch.where(begins, item, NONE)
        names[0] = torch.where(going_on, name, names[0])
        names = names.cummax(0).values
        if num_ends:
            after[ends] = rows[num_steps:]
            kind = torch.where(terminated, TERMINATED, torch.where(truncated, TRUNCATED, STEP))
            self._close(items[num_steps:], row[ends], names[ends], kind[ends] + 2)
        self.preceding[row], self.following[row], self.episode[row] = before, after, names
        self.kind[row] = kind.to(torch.uint8) if num_ends else STEP
        self.following[row_of_last[going_on]] = row[0, going_on]
        won = self._advance(item, ends if num_ends else None, env)

        if num_ends:
            ended = ends.any(0)
            since_end = ends.flip(0).to(torch.uint8).argmax(0)  # steps after the last end
            self._last[env] = torch.where(ends[-1], NONE, item[-1])
            self._name[env] = torch.where(ends[-1], NONE, names[-1])
            self._length[env] = torch.where(ended, since_end, self._length[env] + num_times)
            self._dropped[env] = torch.where(ended, 0, self._dropped[env])
        else:
            self._last[env], self._name[env] = item[-1], names[-1]
            self._length[env] += num_times
        return RingChange(item, items[num_steps:], lost, won)

    def _all_go_on(self, env: Tensor) -> bool:
        """Whether one step more of all environments comes next, in rows that stand together."""
        return (
            self.look_ahead > 0
            and self.total % self.num_rows + len(env) <= self.num_rows
            and torch.equal(env, self._env)
            and NONE not in self._last.tolist()
        )

    def _go_on(self, lost: Tensor) -> RingChange:
        """`append` of one step of all environments, which are in an episode and stay in it.

        The most frequent case by far where environments step together; nothing in it is special.
        """
        num_envs = len(self._env)
        first = self.total % self.num_rows
        rows = slice(first, first + num_envs)
        item = torch.arange(self.total, self.total + num_envs)
        row, row_of_last = torch.arange(first, first + num_envs), self.row(self._last)
        self.total += num_envs
        self.preceding[rows], self.following[rows] = row_of_last, row
        self.episode[rows], self.kind[rows] = self._name, STEP
        self.following[row_of_last] = row
        oldest = self._waiting[0]
        ready = oldest != NONE
        if self._dropped.any():
            ready &= self._starts_whole(slice(None), torch.tensor(-self.look_ahead))
        won = self._admit(oldest[ready])
        self._waiting = torch.cat([self._waiting[1:], item.unsqueeze(0)])
        self._last = item.clone()
        self._length += 1
        return RingChange(item.unsqueeze(0), item[:0], lost, won)

    def _close(self, closing: Tensor, before: Tensor, names: Tensor, kind: Tensor) -> None:
        """Write closing rows; closing: items, before: rows."""
        row = self.row(closing)
        self.preceding[row], self.following[row] = before, row
        self.episode[row], self.kind[row] = names, kind.to(torch.uint8)
        self.closing.update(zip(names.tolist(), closing.tolist(), strict=True))

    def cut(self, env: Tensor) -> RingChange:
        """End the episodes of these environments: their newest steps become closing rows.

        env: [E] int64, each number once. Those in no episode are left out. `item` of the result are
        the steps before the closing rows; where there are none, the closing rows themselves.
        """
        return self._cut(self._positions(env))

    def _cut(self, env: Tensor) -> RingChange:
        env_in = env[self._last[env] != NONE]
        closing, names = self._last[env_in], self._name[env_in]
        row = self.row(closing)
        before = self.preceding[row]
        lost = self._withdraw(row)
        self.kind[before] = TRUNCATED
        self.kind[row] = CLOSED_TRUNCATED
        self.closing.update(zip(names.tolist(), closing.tolist(), strict=True))
        waiting = self._waiting[:, env_in]
        whole = self._starts_whole(env_in, torch.arange(-self.look_ahead, 0).unsqueeze(1))
        won = self._admit(waiting[(waiting != NONE) & (waiting != closing) & whole])
        self._last[env] = self._name[env] = NONE
        self._length[env] = self._dropped[env] = 0
        self._waiting[:, env] = NONE
        return RingChange(self.item(before), closing, lost, won)

    def _positions(self, env: Tensor) -> Tensor:
        """The positions of these environments; new ones get one."""
        num_known = len(self._env)
        if num_known:
            position = torch.searchsorted(self._env, env.contiguous())
            if torch.equal(self._env[position.clamp(max=num_known - 1)], env):
                return position
        self._env, position = torch.cat([self._env, env]).unique(return_inverse=True)
        known, num_envs = position[:num_known], len(self._env)
        for name in self._PER_ENV:
            old = getattr(self, name)
            empty = 0 if name in ("_length", "_dropped") else NONE
            new = old.new_full((*old.shape[:-1], num_envs), empty)
            new[..., known] = old
            setattr(self, name, new)
        return position[num_known:]

    def _advance(self, item: Tensor, ends: Tensor | None, env: Tensor) -> Tensor:
        """The rows that can be drawn now; those that can't yet are waiting instead."""
        num_times, ahead = len(item), self.look_ahead
        items = torch.cat([self._waiting[:, env], item])  # [H + T, E]
        time = torch.arange(-ahead, num_times).unsqueeze(1)
        whole = self._starts_whole(env, time)
        if ends is None:  # what can't be drawn yet are the last H
            self._waiting[:, env] = items[num_times:]
            ready = (items[:num_times] != NONE) & whole[:num_times]
            return self._admit(items[:num_times][ready])
        never = num_times + ahead
        end = torch.where(ends, time[ahead:], never)
        end = end.flip(0).cummin(0).values.flip(0)  # the next end, from each time on
        first = end[:1]  # of the episode that each environment was in before
        end = torch.cat([first.expand(ahead, -1), end])
        self._waiting[:, env] = torch.where(end < never, NONE, items)[num_times:]
        ready = (items != NONE) & ((end < never) | (time < num_times - ahead))
        return self._admit(items[ready & (whole | (time > first))])

    def _starts_whole(self, env: Tensor | slice, time: Tensor) -> Tensor:
        """Of the steps of an episode that goes on, which find all they read, from back to start.

        time: [.., 1], counted from the next step that is to come.
        """
        dropped = self._dropped[env]
        return (dropped == 0) | (self._length[env] + time >= dropped + self.look_back)

    def _admit(self, item: Tensor) -> Tensor:
        row = self.row(item)
        self.drawable[row] = True
        self.num_drawable += len(row)
        return row

    def _withdraw(self, row: Tensor) -> Tensor:
        """Of these different rows, those that could be drawn; none can any more."""
        lost = row[self.drawable[row]]
        self.drawable[lost] = False
        self.num_drawable -= len(lost)
        return lost

    # -- overwriting the oldest

    def skip(self, num_items: int) -> Tensor:
        """Leave numbers out, of which nothing is known; no episode goes on. The rows lost by it.

        >>> EpisodeIndex(8, look_ahead=2).skip(3)
        tensor([], dtype=torch.int64)
        """
        lost = self._make_room(num_items)
        rows = self.row(torch.arange(max(0, num_items - self.num_rows), num_items) + self.total)
        self.preceding[rows] = self.following[rows] = rows
        self.total += num_items
        return lost

    def lose(self, row: Tensor) -> Tensor:
        """Lose the episodes that any of these rows belong to; the rows that were lost by it.

        >>> EpisodeIndex(8, look_ahead=2).lose(torch.tensor([1, 2]))
        tensor([], dtype=torch.int64)
        """
        names = self.episode[row].unique()
        names = names[names != NONE]
        if not len(names):
            return names
        self._cut(torch.isin(self._name, names).nonzero()[:, 0])
        for name in names.tolist():
            del self.closing[name]
        rows = torch.isin(self.episode, names).nonzero()[:, 0]
        self.episode[rows] = NONE
        return self._withdraw(rows)

    def _make_room(self, num_items: int) -> Tensor:
        """Forget what the next items overwrite; the rows that can be drawn no more."""
        first = max(0, self.total - self.num_rows)
        oldest = max(0, self.total + num_items - self.num_rows)
        if first == oldest:
            return torch.empty(0, dtype=torch.int64)
        gone = self.row(torch.arange(first, min(oldest, self.total)))
        names = self.episode[gone]
        if bool((names == NONE).all()):  # of episodes that were lost before
            return gone[:0]
        found = [name for name in names.unique().tolist() if name != NONE]
        ended = [name for name in found if name in self.closing]
        incomplete = gone[:0]
        if len(ended) < len(found):
            going_on = torch.isin(names, self._name) & (names != NONE)
            incomplete = self._shorten(gone[going_on], names[going_on], oldest)
        forgotten = torch.cat([gone, self._rest(ended, oldest)]) if ended else gone
        self.episode[forgotten] = NONE
        lost = self._withdraw(forgotten)
        return torch.cat([lost, self._withdraw(incomplete)]) if len(incomplete) else lost

    def _rest(self, names: list[int], oldest: int) -> Tensor:
        """The rows of ended episodes from item `oldest` on; they are struck off the list."""
        newest = max([self.closing.pop(name) for name in names])
        # An episode's items lie close together, so this looks at few rows of others.
        rows = self.row(torch.arange(oldest, max(oldest, newest + 1)))
        return rows[torch.isin(self.episode[rows], torch.tensor(names))]

    def _shorten(self, gone: Tensor, names: Tensor, oldest: int) -> Tensor:
        """Take their oldest steps from episodes that go on; the rows whose frames are incomplete.

        gone, names: the rows that are overwritten, oldest first, and their episodes.
        """
        env = torch.isin(self._name, names).nonzero()[:, 0]
        mine = names.unsqueeze(1) == self._name[env]  # [rows, E]
        self._dropped[env] += mine.sum(0)
        newest_gone = torch.where(mine, torch.arange(len(gone)).unsqueeze(1), NONE).amax(0)
        all_gone = self._last[env] < oldest
        self._last[env[all_gone]] = self._name[env[all_gone]] = NONE
        head = self.following[gone[newest_gone[~all_gone]]]
        self.preceding[head] = head
        if self.look_back == 0:
            return head[:0]
        rows = [head]
        for _ in range(self.look_back - 1):
            rows.append(self.following[rows[-1]])
        return torch.cat(rows).unique()

    # -- keeping

    _PER_ROW = ("preceding", "following", "episode", "kind", "drawable")
    _PER_ENV = ("_last", "_name", "_length", "_dropped", "_waiting")
    ENTRIES = (
        *[name.lstrip("_") for name in (*_PER_ROW, *_PER_ENV, "_env")],
        *("closing", "total", "window"),
    )

    def state(self) -> dict[str, Tensor]:
        """A copy of all of it, as tensors.

        >>> sorted(EpisodeIndex(8, look_ahead=2).state())
        ['closing', 'drawable', 'dropped', 'env', 'episode', 'following', 'kind', 'last', 'length',
        'name', 'preceding', 'total', 'waiting', 'window']
        """
        names = (*self._PER_ROW, *self._PER_ENV, "_env")
        fields = {name.lstrip("_"): getattr(self, name) for name in names}
        state = {name: field.clone() for name, field in fields.items()}
        state["closing"] = torch.tensor(list(self.closing.items()), dtype=torch.int64).view(-1, 2)
        state["total"] = torch.tensor(self.total)
        state["window"] = torch.tensor([self.num_rows, self.look_ahead, self.look_back])
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load a state of `state()`, of a ring of this size with the same segments.

        >>> episodes = EpisodeIndex(8, look_ahead=2)
        >>> episodes.load_state(EpisodeIndex(8, look_ahead=2).state())
        """
        self.check_state(state)
        for name in (*self._PER_ROW, *self._PER_ENV, "_env"):
            setattr(self, name, state[name.lstrip("_")].clone())
        self.closing = dict(state["closing"].tolist())
        self.total = int(state["total"])
        self.num_drawable = int(self.drawable.sum())

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless `load_state(state)` is possible."""
        saved, here = state["window"].tolist(), [self.num_rows, self.look_ahead, self.look_back]
        if saved != here:
            raise ValueError(
                f"the state is of a ring of {saved[0]} rows whose segments look {saved[1]} ahead "
                f"and {saved[2]} back, here it is {here[0]}, {here[1]} and {here[2]}: make the "
                "buffer as the saved one was made"
            )
