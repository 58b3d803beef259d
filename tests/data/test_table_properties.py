"""HashTable is a dict with numbered rows: any operations in any order, against a plain dict.

Few hashes, few contents and small batches, so that collisions, repetitions, reuse of freed rows and
full tables are the rule. Half of the hashes have one home in the compiled table.
"""

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from raffia.data.table import CapacityError, HashTable

LEAST, MOST = -(2**63), 2**63 - 1
INVERSE = pow(0x9E3779B97F4A7C15, -1, 2**64)  # of the multiplier that gives a hash its home
COLLIDING = [(low * INVERSE) % 2**64 for low in range(40)]
HASHES = st.sampled_from([0, -1, LEAST, MOST] + [h - 2**64 if h > MOST else h for h in COLLIDING])
KEYS = st.lists(st.tuples(HASHES, st.integers(0, 2), st.integers(0, 1)), max_size=60)


class Model:
    """HashTable's contract, in lists and a dict."""

    def __init__(self):
        self.row_of, self.free, self.high = {}, [], 0

    def copy(self):
        twin = Model()
        twin.row_of, twin.free, twin.high = dict(self.row_of), list(self.free), self.high
        return twin

    def insert(self, keys):
        for key in keys:
            if key not in self.row_of:
                if self.free:
                    self.row_of[key] = self.free.pop()
                else:
                    self.row_of[key] = self.high
                    self.high += 1
        return self.lookup(keys)

    def lookup(self, keys):
        return [self.row_of.get(key, -1) for key in keys]

    def remove(self, rows):
        for row in rows:
            del self.row_of[{row: key for key, row in self.row_of.items()}[row]]
            self.free.append(row)


class Operations(RuleBasedStateMachine):
    @initialize(words=st.sampled_from([None, 0, 1, 2]))
    def start(self, words):
        self.words = words
        self.table, self.model = HashTable(words=words), Model()
        self.mark = self.table.mark(), self.model.copy()

    def known(self, keys):
        """Keys for the model: a hash and the compared words of content."""
        return [key[: 1 + (self.words or 0)] for key in keys]

    def query(self, keys):
        """Keys as arguments of the table."""
        known = torch.tensor(self.known(keys), dtype=torch.int64)
        known = known.reshape(len(keys), 1 + (self.words or 0))
        return (known[:, 0],) if self.words is None else (known[:, 0], known[:, 1:])

    @rule(keys=KEYS)
    def lookup(self, keys):
        assert self.table.lookup(*self.query(keys)).tolist() == self.model.lookup(self.known(keys))

    @rule(keys=KEYS)
    def insert(self, keys):
        known = self.known(keys)
        unknown = [key not in self.model.row_of for key in known]
        rows, is_new = self.table.insert_new(*self.query(keys))
        assert rows.tolist() == self.model.insert(known)
        assert is_new.tolist() == unknown

    @rule(keys=KEYS, room=st.integers(-2, 9))
    def insert_in_little_room(self, keys, room):
        known, max_size = self.known(keys), max(0, len(self.table) + room)
        new = set(known) - set(self.model.row_of)
        if new and len(self.table) + len(new) > max_size:
            with pytest.raises(CapacityError, match=f"^{len(new)} new rows do not fit"):
                self.table.insert(*self.query(keys), max_size=max_size)
        else:
            rows = self.table.insert(*self.query(keys), max_size=max_size)
            assert rows.tolist() == self.model.insert(known)

    @rule(data=st.data())
    def remove(self, data):
        live = sorted(self.model.row_of.values())
        rows = data.draw(st.lists(st.sampled_from(live), unique=True)) if live else []
        wrong = data.draw(st.sampled_from([*self.model.free, *rows, -1, self.model.high]))
        with pytest.raises(ValueError, match=f"cannot remove row {wrong} "):
            self.table.remove(torch.tensor([*rows, wrong]))
        self.table.remove(torch.tensor(rows, dtype=torch.int64))
        self.model.remove(rows)
        self.mark = self.table.mark(), self.model.copy()

    @rule()
    def set_mark(self):
        self.mark = self.table.mark(), self.model.copy()

    @rule()
    def rollback(self):
        mark, model = self.mark
        self.table.rollback(mark)
        self.model = model.copy()

    @rule()
    def reload(self):
        table = HashTable(words=self.words)
        table.load_state(self.table.state())
        self.table = table
        self.mark = self.table.mark(), self.model.copy()

    @rule()
    def clear(self):
        self.table.clear()
        self.model = Model()
        self.mark = self.table.mark(), self.model.copy()

    @invariant()
    def same_rows(self):
        table, model = self.table, self.model
        assert (len(table), table.high) == (len(model.row_of), model.high)
        assert table.live().tolist() == sorted(model.row_of.values())
        keys = [(0, *[0] * (self.words or 0))] * model.high
        for key, row in model.row_of.items():
            keys[row] = key
        state = table.state()
        assert state["hashes"].tolist() == [key[0] for key in keys]
        assert state["free"].tolist() == model.free
        if self.words is not None:
            assert state["content"].tolist() == [list(key[1:]) for key in keys]


runs = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # to shrink a failure for reading, add Phase.shrink
)
TestTable = Operations.TestCase
TestTable.settings = runs
