"""Random operations on storages, and the same on plain lists and dictionaries."""

import shutil
import tempfile

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raffia.data import memmap_files
from raffia.data.check_storage import numbers_in, step
from raffia.data.memmap_storage import MemmapStorage
from raffia.data.storage import TensorStorage

SIZE = 11
ROWS = st.lists(st.integers(0, SIZE - 1), max_size=2 * SIZE)
quick = settings(
    max_examples=15,
    stateful_step_count=25,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


class Machine(RuleBasedStateMachine):
    """A storage, the next unused number, and the folder on disk."""

    on_disk = False

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()  # what is tested here is not the disk
        self.patch.setattr("os.fsync", lambda fd: None)
        self.patch.setattr(memmap_files.MappedFile, "flush", lambda file: None)
        self.root = tempfile.mkdtemp()
        self.next, self.total, self.model = 0, 0, {}
        self.storage = self.make()

    def make(self):
        if self.on_disk:
            return MemmapStorage(SIZE, f"{self.root}/rows")
        return TensorStorage(SIZE)

    def fresh(self, n):
        self.next += n
        return [*range(self.next - n, self.next)]

    def teardown(self):
        self.patch.undo()
        if self.on_disk:
            self.storage.close()
        shutil.rmtree(self.root)

    @rule(kind=st.sampled_from(["state", "folder", "flush", "close", "vanish"]))
    def reopen(self, kind):
        if kind in ("state", "folder"):
            state = self.storage.state_dict()
            self.storage.save(f"{self.root}/saved")
            self.storage.clear()
            if kind == "state":
                self.storage.load_state_dict(state)
            else:
                self.storage.load(f"{self.root}/saved")
        elif self.on_disk:
            getattr(self.storage, {"vanish": "_release"}.get(kind, kind))()
            if kind != "flush":
                self.storage = self.make()
                assert self.storage.lost == 0

    @rule(rows=ROWS)
    def erase(self, rows):
        self.storage.erase(rows)
        self.model = {row: n for row, n in self.model.items() if row not in rows}

    @rule()
    def clear(self):
        self.storage.clear()
        self.model, self.total = {}, 0

    @rule(rows=ROWS)
    def read(self, rows):
        found = self.storage.contains(rows).tolist()
        assert found == [row in self.model for row in rows]
        if self.storage.structure is None:
            return
        if all(found):
            numbers = [self.model[row] for row in rows]
            assert numbers_in(self.storage.get(rows)) == numbers
            out = step(rows).clone()
            assert numbers_in(self.storage.get(torch.tensor(rows).long(), out=out)) == numbers
        else:
            with pytest.raises(IndexError, match="hold nothing"):
                self.storage.get(rows)

    @invariant()
    def equals_the_model(self):
        assert self.storage.rows().tolist() == sorted(self.model)
        assert len(self.storage) == len(self.model)
        assert self.storage.total == self.total
        if self.model:
            found = numbers_in(self.storage.get(sorted(self.model)))
            assert found == [self.model[row] for row in sorted(self.model)]


class Ring(Machine):
    @rule(n=st.integers(0, 3 * SIZE))
    def extend(self, n):
        values = self.fresh(n)
        numbers = [*range(self.total, self.total + n)]
        assert self.storage.extend(step(values)).tolist() == numbers
        self.model |= {number % SIZE: value for number, value in zip(numbers, values, strict=True)}
        self.total += n

    @rule()
    def add(self):
        [value] = self.fresh(1)
        assert self.storage.add(step([value])[0]) == self.total
        self.model[self.total % SIZE] = value
        self.total += 1


class Rows(Machine):
    @rule(rows=ROWS)
    def set(self, rows):
        values = self.fresh(len(rows))
        self.storage.set(rows, step(values))
        self.model |= dict(zip(rows, values, strict=True))

    @rule(row=st.integers(0, SIZE - 1))
    def set_one(self, row):
        [self.model[row]] = values = self.fresh(1)
        self.storage.set(row, step(values)[0])

    @precondition(lambda self: self.model)
    @rule(row=st.sampled_from([-1, SIZE, 10**6]))
    def refused(self, row):
        with pytest.raises(IndexError, match="out of range"):
            self.storage.set([0, row], step([1, 2]))
        with pytest.raises(ValueError, match="is missing"):
            self.storage.set([0], step([1]).select("obs"))


def case(machine, on_disk):
    """The machine's test, on storages in memory or on disk."""
    found = type(f"{machine.__name__}{on_disk}", (machine,), {"on_disk": on_disk}).TestCase
    found.settings = quick
    return found


TestRing, TestRows = case(Ring, False), case(Rows, False)
TestRingOnDisk, TestRowsOnDisk = case(Ring, True), case(Rows, True)
