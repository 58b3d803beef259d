"""The lineage of a population, read from the rows of its evaluations and generations.

Legend: P slots, each of which holds one member at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from raffia.hints import plural
from raffia.report.folder import Run
from raffia.report.panel import every
from raffia.report.rows import Row, number

_MOST = 10**9  # numbers of members and generations lie below

_LONGEST = 200  # characters
_WORDS = {  # by kind of mutation, the words before what it changed
    "hyper": "",
    "parameters": "noise on ",
    "activation": "activation of ",
    "architecture": "",
}
_HEADS = {  # of both agents, by what stands in their networks' names
    "fc_value_head": "the value head",
    "fc_value": "the value head",
    "fc_policy_head": "the policy head",
    "fc_policy": "the policy head",
    "fc_reward_head": "the head of the value prefix",
    "v": "head V",
    "q1": "head Q1",
    "q2": "head Q2",
}

Changes = tuple[tuple[int, str], ...]  # generation, and what was changed in it


@dataclass(frozen=True)
class LineageColumn:
    """One generation of a lineage; all tuples are [P].

    >>> LineageColumn(0, (4, 7), (None, None), (4, 7)).changes
    ()
    """

    number: int  # 0: before the first selection
    members: tuple[int, ...]  # a number that no other member ever had; -1: no row has it
    parents: tuple[int | None, ...]  # slots in the column before; None: unknown, first
    founders: tuple[int, ...]  # the first member of each one's line
    changes: tuple[Changes, ...] = ()  # changes since the column before
    hyper: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    fitness: tuple[float, ...] = ()  # nan: not known; empty: not evaluated
    fallen: frozenset[int] = frozenset()  # slots whose member has a fitness that is not finite
    elite: int | None = None  # slot where the best of the column before continues unchanged
    at: float = math.nan  # when it was evaluated, in environment steps or updates

    def fitness_of(self, slot: int) -> float:
        """Fitness of the member at a slot; nan where no row has it."""
        return self.fitness[slot] if self.fitness else math.nan

    @property
    def best(self) -> int | None:
        """The slot of the first member with the greatest fitness."""
        known = [-math.inf if math.isnan(one) else one for one in self.fitness]
        return known.index(max(known)) if known and max(known) > -math.inf else None


@dataclass(frozen=True)
class Lineage:
    """The generations of a run in their order.

    >>> Lineage(2, ()).path
    []
    """

    size: int  # P
    columns: tuple[LineageColumn, ...]

    @property
    def best(self) -> int | None:
        """The slot of the best member of the last column; before it is evaluated, that of the
        heir of the best one of the column before."""
        if not self.columns:
            return None
        last = self.columns[-1]
        if last.fitness or len(self.columns) == 1:
            return last.best
        before = self.columns[-2].best
        if before is None or last.elite is not None:
            return last.elite
        return last.parents.index(before) if before in last.parents else None

    @property
    def path(self) -> list[tuple[int, int]]:
        """Column and slot of the best member and of its ancestors, the first ancestor ahead."""
        found: list[tuple[int, int]] = []
        at, slot = len(self.columns) - 1, self.best
        while slot is not None and at >= 0:
            found.append((at, slot))
            at, slot = at - 1, self.columns[at].parents[slot]
        return found[::-1]

    def lives(self) -> Iterator[list[tuple[int, int]]]:
        """Column and slot of each member as long as it lives, with its parent's ahead; those that
        end first come first.
        """
        lives: dict[int, list[tuple[int, int]]] = {}  # of the living members, by slot
        for index, column in enumerate(self.columns):
            before, following = self.columns[index - 1], {}
            for slot, parent in enumerate(column.parents):
                life: list[tuple[int, int]] = []
                if parent is not None:
                    same = before.members[parent] == column.members[slot] and parent in lives
                    life = lives.pop(parent) if same else [(index - 1, parent)]
                life.append((index, slot))
                following[slot] = life
            yield from lives.values()
            lives = following
        yield from lives.values()

    def last_change(self, slot: int) -> tuple[int, str] | None:
        """The newest change in the descent of the member at a slot of the last column."""
        at: int | None = slot
        for column in reversed(self.columns):
            if at is None:
                return None
            if column.changes and column.changes[at]:
                return column.changes[at][-1]
            at = column.parents[at]
        return None

    def thinned(self, most: int) -> Lineage:
        """The lineage with at most `most` columns, including the first and the last.

        Parents are then slots in the column that is shown before; changes are all since then.
        """
        shown = every(len(self.columns), max(most, 2))
        if len(shown) == len(self.columns):
            return self
        columns = [self.columns[0]]
        for before, at in zip(shown, shown[1:], strict=False):
            ways = [self._way(at, slot, before) for slot in range(self.size)]
            columns.append(
                replace(
                    self.columns[at],
                    parents=tuple([parent for parent, _ in ways]),
                    changes=tuple([changes for _, changes in ways]),
                    elite=self.columns[at].elite if before == at - 1 else None,
                )
            )
        return Lineage(self.size, tuple(columns))

    def _way(self, at: int, slot: int, before: int) -> tuple[int | None, Changes]:
        """The ancestor in the column `before`, and all changes since it."""
        changes: Changes = ()
        here: int | None = slot
        for column in reversed(self.columns[before + 1 : at + 1]):
            if here is None:
                break
            changes = (column.changes[here] if column.changes else ()) + changes
            here = column.parents[here]
        return here, changes


def has_population(run: Run) -> bool:
    """Whether a run is one of several members.

    >>> from pathlib import Path
    >>> has_population(Run(Path("x"), {"population": {"size": 4}})), has_population(Run(Path("x")))
    (True, False)
    """
    has_fitness = any(isinstance(row.get("fitness"), list) for row in run.of("evaluate"))
    return (
        has_fitness or bool(run.of("generation")) or number(run.setting("population", "size")) > 1
    )


def read_lineage(run: Run) -> tuple[Lineage, list[str]]:
    """The lineage of a run, and what is missing or damaged in its rows.

    >>> from pathlib import Path
    >>> rows = (
    ...     {"kind": "evaluate", "update": 5, "fitness": [1.0, 3.0], "members": [0, 1]},
    ...     {"kind": "generation", "generation": 1, "fitness": [1.0, 3.0], "parents": [1, 1],
    ...      "members": [1, 2], "parent_members": [1, 1], "kinds": ["none", "hyper"],
    ...      "changes": ["", "tau 0.5 -> 0.7"], "hyper": {"tau": [0.5, 0.7]}},
    ... )
    >>> lineage, notes = read_lineage(Run(Path("x"), rows=rows))
    >>> lineage.path, lineage.last_change(1), notes
    ([(0, 1), (1, 0)], (1, 'tau 0.5 → 0.7'), [])
    """
    reading = _Reading(_size(run), "update" if run.by_updates else "env_step")
    for row in run.rows:
        if row["kind"] == "start":
            reading.start(row)
        elif row["kind"] == "evaluate":
            reading.evaluation(row)
        elif row["kind"] == "generation":
            reading.generation(row)
    return Lineage(reading.size, tuple(reading.columns)), reading.notes()


def _size(run: Run) -> int:
    size = number(run.setting("population", "size"))
    if size > 1 and size == int(size) and size < _MOST:
        return int(size)
    lists = [
        row.get("members") for row in run.rows if row["kind"] in ("start", "evaluate", "generation")
    ]
    return next((len(found) for found in lists if isinstance(found, list) and found), 0)


class _Reading:
    """A reader of rows into columns, which counts faults."""

    def __init__(self, size: int, clock: str) -> None:
        self.size, self._clock = size, clock
        self.columns: list[LineageColumn] = []
        self._faults: dict[str, list[Row]] = {}

    def notes(self) -> list[str]:
        """Notes about damaged rows, one for each kind of fault."""
        found = []
        for what, rows in self._faults.items():
            at = number(rows[0].get("update"))
            where = "" if math.isnan(at) else f", first at update {at:,.0f}"
            found.append(f"{what} in {plural(len(rows), 'row')}{where}")
        return found

    def _fault(self, row: Row, what: str) -> None:
        self._faults.setdefault(f"{row['kind']}: {what}", []).append(row)

    def start(self, row: Row) -> None:
        """Read the row of a start: the first members, with their hyper-parameters."""
        if "members" not in row:  # written by none of ours, but nothing else hangs on it
            return
        members = _whole(row["members"], self.size, _MOST)
        if members is None:
            self._fault(row, f"members is not a list of {self.size}, and was left out")
            return
        first = LineageColumn(0, members, (None,) * self.size, members, hyper=self._hyper(row))
        self.columns = [first]

    def evaluation(self, row: Row) -> None:
        """Read the row of an evaluation: fitness, and members where the row of their generation is
        lost."""
        members = _whole(row.get("members"), self.size, _MOST)
        if members is None or not self._is_fitness(row):
            what = "fitness" if members is not None else "members"
            self._fault(row, f"{what} is not a list of {self.size}, and was left out")
            return
        if not self.columns:
            self.columns.append(LineageColumn(0, members, (None,) * self.size, members))
        elif self.columns[-1].members != members:
            self.columns.append(self._next(self.columns[-1].number + 1, members, members))
        self._set_fitness(row)

    def generation(self, row: Row) -> None:
        """Read the row of a generation."""
        size = self.size
        members = _whole(row.get("members"), size, _MOST)
        parents = _whole(row.get("parents"), size, size)
        ids = _whole(row.get("parent_members"), size, _MOST)
        if members is None or parents is None or ids is None:
            named = {"members": members, "parents": parents, "parent_members": ids}
            name = next(name for name, found in named.items() if found is None)
            self._fault(row, f"{name} is not a list of {size}, so the generation was left out")
            return
        if not self.columns:
            before = dict(zip(parents, ids, strict=True))
            first = tuple([before.get(slot, -1) for slot in range(size)])
            self.columns.append(LineageColumn(0, first, (None,) * size, first))
        if all(self.columns[-1].members[p] == i for p, i in zip(parents, ids, strict=True)):
            if self._is_fitness(row):
                self._set_fitness(row)
            else:
                self._fault(row, f"fitness is not a list of {size}, and was left out")
        following = self.columns[-1].number + 1
        number_given = _whole([row.get("generation")], 1, _MOST)
        column = self._next(
            max(following, number_given[0] if number_given else 0), members, ids, parents
        )
        changes = self._changes_of(row, column.number)
        hyper = self._hyper(row)
        best = self.columns[-1].best
        heirs = [slot for slot, parent in enumerate(column.parents) if parent == best]
        as_it_was = [p for p in heirs if members[p] == ids[p] and not changes[p]]
        elite = as_it_was[0] if as_it_was and best is not None else None
        self.columns.append(replace(column, changes=changes, hyper=hyper, elite=elite))

    def _next(
        self,
        number_: int,
        members: tuple[int, ...],
        ids: tuple[int, ...],  # the member that each comes from
        parents: tuple[int, ...] | None = None,  # the slot of each in the column before
    ) -> LineageColumn:
        last = self.columns[-1]
        known = {member: slot for slot, member in enumerate(last.members)}
        links = tuple(
            [
                given if given is not None and last.members[given] == one else known.get(one)
                for one, given in zip(ids, parents or [None] * self.size, strict=True)
            ]
        )
        founders = [
            members[slot] if link is None else last.founders[link]
            for slot, link in enumerate(links)
        ]
        return LineageColumn(number_, members, links, tuple(founders), changes=((),) * self.size)

    def _is_fitness(self, row: Row) -> bool:
        found = row.get("fitness")
        return isinstance(found, list) and len(found) == self.size

    def _set_fitness(self, row: Row) -> None:
        fitness = tuple(map(number, row["fitness"]))
        fallen = frozenset([p for p, one in enumerate(fitness) if math.isnan(one)])
        at = number(row.get(self._clock))
        self.columns[-1] = replace(self.columns[-1], fitness=fitness, fallen=fallen, at=at)

    def _changes_of(self, row: Row, generation: int) -> tuple[Changes, ...]:
        kinds, whats = _texts(row.get("kinds"), self.size), _texts(row.get("changes"), self.size)
        if kinds is None or whats is None:
            name = "kinds" if kinds is None else "changes"
            self._fault(row, f"{name} is not a list of {self.size} texts, and was left out")
            return ((),) * self.size
        return tuple(
            [
                () if kind == "none" else ((generation, in_words(kind, what)),)
                for kind, what in zip(kinds, whats, strict=True)
            ]
        )

    def _hyper(self, row: Row) -> dict[str, tuple[float, ...]]:
        found, hyper = row.get("hyper"), {}
        if not isinstance(found, dict):
            self._fault(row, "hyper is not an object, and was left out")
            return {}
        for name, values in found.items():
            if isinstance(values, list) and len(values) == self.size:
                hyper[name] = tuple(map(number, values))
            else:
                self._fault(row, f"{name} of hyper is not a list of {self.size}, and was left out")
        return hyper


def _whole(value: object, size: int, below: int) -> tuple[int, ...] | None:
    """A list of `size` integers from 0 to below `below` as a tuple; None for anything else."""
    if not isinstance(value, list) or len(value) != size or not size:
        return None
    fine = [one for one in value if type(one) is int and 0 <= one < below]
    return tuple(fine) if len(fine) == size else None


def _texts(value: object, size: int) -> list[str] | None:
    if not isinstance(value, list) or len(value) != size:
        return None
    return value if all(isinstance(one, str) for one in value) else None


def in_words(kind: str, what: str) -> str:
    """A change from a row of a generation, in words for the page.

    >>> in_words("architecture", "prediction_network.fc_policy_head.net: 16 nodes more in layer 0")
    'the policy head: 16 nodes more in layer 0'
    >>> in_words("activation", "q1: relu -> tanh")
    'activation of head Q1: relu → tanh'
    """
    if not what:
        return kind[:20]
    if kind in ("activation", "architecture"):
        network, colon, how = what.partition(":")
        named = [_HEADS[part] for part in network.split(".") if part in _HEADS]
        what = named[0] + colon + how if named else what
    return _WORDS.get(kind, f"{kind[:20]}: ") + what[:_LONGEST].replace("->", "→")
