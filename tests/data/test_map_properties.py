"""TensorDictMap equals a dict: all operations, in random order.

The model is an `OrderedDict` from the number of a key to the number of its value, the one that was
used least recently first. What the map holds for these numbers are rows of several dtypes.
"""

import copy
import tempfile
from collections import OrderedDict

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from raffia import TensorDict
from raffia.data import CapacityError, QueryModule, TensorDictMap, TensorStorage, UnknownRowError


def weak(x):
    """A hash with three values: most rows collide."""
    first = x.flatten(1)[:, 0] if x.dim() > 1 else x
    return first.long() % 3


# Kinds of keys: a function from int64 [N] to entries [N, ...].
KEYS = {
    "float32": lambda n: {"k": n.float() / 2},
    "wide": lambda n: {"k": torch.stack([n, -n, n * n], 1).double() - 3},
    "small": lambda n: {"k": n.to(torch.int8)[:, None]},
    "matrix": lambda n: {"k": torch.stack([n // 4, n % 4], 1).to(torch.bfloat16)[:, None]},
    "nested": lambda n: {
        "k": (n // 2).int(),
        "in": {"k": torch.stack([n % 2 == 0, n % 2 == 1], 1), "deep": {"k": n.to(torch.uint8)}},
    },
}
NESTED = ["k", ("in", "k"), ("in", "deep", "k")]
MERGES = ["last", "first", "sum", "max", "difference"]
ITEMS = st.lists(st.integers(0, 7), max_size=8)
VALUE = st.integers(-50, 50)
PAIRS = st.lists(st.tuples(st.integers(0, 7), st.integers(-9, 9)), max_size=9)


def difference(td, group, num_groups):
    """A merge that depends on the order: the first value less all the others."""
    result = td[:num_groups].clone()
    for i in range(num_groups):
        mine = td[group == i]
        result[i] = mine.apply(lambda x: 2 * x[0] - x.sum(0), batch_size=[])
    return result


def merged(merge, items):
    """The model's result for the numbers of one key, in their order."""
    return {
        "last": lambda x: x[-1],
        "first": lambda x: x[0],
        "sum": sum,
        "max": max,
        "difference": lambda x: 2 * x[0] - sum(x),
    }[merge](items)


WRONG = st.sampled_from(["unknown", "rows", "dtype", "entry", "merge"])
HASHES = st.sampled_from([None, weak, weak])


class MapMachineOurs(RuleBasedStateMachine):
    limits: tuple[int | None, ...] = (None, 4, 7)
    evicts: tuple[str | None, ...] = (None, "lru")

    @initialize(data=st.data(), kind=st.sampled_from(sorted(KEYS)), hash_module=HASHES)
    def begin(self, data, kind, hash_module):
        self.limit = data.draw(st.sampled_from(self.limits), label="limit")
        self.evict = self.limit and data.draw(st.sampled_from(self.evicts), label="evict")
        self.kind = kind
        in_keys = NESTED if kind == "nested" else ["k"]
        self.query = QueryModule(in_keys, hash_module=hash_module)
        self.map, self.model = self.fresh(), OrderedDict()

    def fresh(self):
        options = {"max_size": self.limit, "evict": self.evict}
        return TensorDictMap(query_module=self.query, storage=TensorStorage(self.limit), **options)

    def keys(self, items, shape=None):
        n = torch.tensor(items, dtype=torch.int64)
        td = TensorDict(KEYS[self.kind](n), [len(items)])
        return td if shape is None else td.reshape(shape)

    def values(self, items, shape=None):
        n = torch.tensor(items, dtype=torch.int64)
        entries = {"v": n.double(), "n": {"w": n.int()[:, None].repeat(1, 2), "tiny": n.half()}}
        td = TensorDict(entries, [len(items)])
        return td if shape is None else td.reshape(shape)

    def numbers_of(self, td):
        """The numbers of values that were read; all leaves must agree."""
        v = td["v"].flatten()
        assert torch.equal(td["n", "w"].reshape(-1, 2).double(), v[:, None].expand(-1, 2))
        assert torch.equal(td["n", "tiny"].flatten().double(), v)
        return v.int().tolist()

    def used(self, items):
        for i in items:
            if i in self.model:
                self.model.move_to_end(i)

    # -- writing

    def write(self, items, groups, do):
        """`do` writes `groups`, {key: value}; the order of last use is that of `items`."""
        total = len(self.model | groups)
        if self.limit is not None and total > self.limit and not self.evict:
            with pytest.raises(CapacityError, match=f"max_size is {self.limit}"):
                do()
            return
        do()
        self.model |= groups
        self.used(items)
        while self.limit is not None and len(self.model) > self.limit:
            self.model.popitem(last=False)

    @rule(items=ITEMS, start=VALUE, shape=st.sampled_from(["row", "row", "column", "one"]))
    def set(self, items, start, shape):
        items = items[:1] if shape == "one" else items
        sizes = {"row": (len(items),), "column": (len(items), 1), "one": () if items else (0,)}
        new = list(range(start, start + len(items)))
        query, value = self.keys(items, sizes[shape]), self.values(new, sizes[shape])
        groups = dict(zip(items, new, strict=True))
        self.write(items, groups, lambda: self.map.__setitem__(query, value))

    @rule(pairs=PAIRS, merge=st.sampled_from(MERGES), accumulate=st.booleans())
    def update(self, pairs, merge, accumulate):
        items = [item for item, _ in pairs]
        stored = self.model if accumulate else {}
        groups = {item: [stored[item]] if item in stored else [] for item in items}
        for item, value in pairs:
            groups[item].append(value)
        groups = {item: merged(merge, found) for item, found in groups.items()}
        if any(abs(value) > 2000 for value in groups.values()):  # float16 holds no more exactly
            return
        query, value = self.keys(items), self.values([value for _, value in pairs])
        args = {"merge": difference if merge == "difference" else merge, "accumulate": accumulate}
        self.write(items, groups, lambda: self.map.update(query, value, **args))

    # -- reading

    @rule(data=st.data(), one=st.booleans())
    def read(self, data, one):
        if not self.model:
            return
        known = st.sampled_from(sorted(self.model))
        items = data.draw(st.lists(known, min_size=1, max_size=1 if one else 4))
        found = self.map[self.keys(items, () if one else None)]
        assert found.batch_size == (() if one else (len(items),))
        assert self.numbers_of(found) == [self.model[item] for item in items]
        self.used(items)

    @rule(items=ITEMS, default=st.integers(-3, 3), as_row=st.booleans())
    def get(self, items, default, as_row):
        if not self.model:
            return
        found = self.map.get(self.keys(items), self.values([default], ()) if as_row else default)
        assert self.numbers_of(found) == [self.model.get(item, default) for item in items]
        self.used(items)

    @rule(items=ITEMS)
    def contains(self, items):
        expected = [item in self.model for item in items]
        query = self.keys(items)
        assert self.map.contains(query).tolist() == expected
        assert (query in self.map) is all(expected)
        assert [row >= 0 for row in self.map.rows(query).tolist()] == expected

    # -- removal

    @rule(data=st.data(), way=st.sampled_from(["delete", "ignore", "pop", "clear"]))
    def remove(self, data, way):
        known = st.lists(st.sampled_from(sorted(self.model)), max_size=4) if self.model else ITEMS
        items = data.draw(ITEMS if way == "ignore" else known)
        if not self.model:
            way = "ignore"
        removed = {item for item in items if item in self.model}
        if way == "pop" and items:
            found = self.numbers_of(self.map.pop(self.keys(items)))
            assert found == [self.model[item] for item in items]
        elif way == "clear":
            self.map.clear()
            removed = list(self.model)
        elif items:
            options = {"missing": "ignore"} if way == "ignore" else {}
            assert self.map.delete(self.keys(items), **options) == len(removed)
        for item in removed:
            del self.model[item]

    # -- errors, which change nothing

    @rule(items=ITEMS.filter(bool), what=WRONG)
    def fail(self, items, what):
        query, value, merge = self.keys(items), self.values(items), "last"
        if what == "unknown":
            if any(item not in self.model for item in items):
                for ask in (self.map.__getitem__, self.map.delete, self.map.pop, self.map):
                    with pytest.raises(UnknownRowError):
                        ask(query)
            return
        if what == "rows":
            value = self.values([*items, 1])
        elif what == "dtype" and self.model:
            value["n", "w"] = value["n", "w"].float()
        elif what == "entry" and self.model:
            del value["v"]
        else:
            merge = lambda td, group, num_groups: 1 / 0  # noqa: E731
        with pytest.raises((ValueError, KeyError, ZeroDivisionError)):
            self.map.update(query, value, merge=merge)

    # -- copies

    @rule(way=st.sampled_from(["state_dict", "folder", "deepcopy"]))
    def continue_with_a_copy(self, way):
        old = self.map
        if way == "state_dict":
            self.map = self.fresh()
            self.map.load_state_dict(old.state_dict())
        elif way == "folder":
            with tempfile.TemporaryDirectory() as folder:
                old.save(folder)
                self.map = TensorDictMap.load(folder, query_module=self.query)
        else:
            self.map = copy.deepcopy(old)
        old.clear()  # of which the copy knows nothing

    # -- always

    @invariant()
    def equals_the_model(self):
        if not hasattr(self, "model"):
            return
        assert len(self.map) == len(self.model)
        mine, all_values = self.map.items()
        assert mine.batch_size == all_values.batch_size == (len(self.model),)
        if not self.model:
            return
        # the stored keys, and in the same order the values of the model
        found = self.numbers_of(all_values)
        rows = self.map.rows(self.keys(list(self.model)))
        assert len(set(rows.tolist())) == len(self.model) and int(rows.min()) >= 0
        order = rows.argsort()  # values() are in the order of the rows
        items = [list(self.model)[i] for i in order.tolist()]
        assert found == [self.model[item] for item in items]
        expected = self.keys(items)
        for key in self.map.in_keys:
            assert torch.equal(mine[key], expected[key])
            assert mine[key].dtype == expected[key].dtype


class LruMachineOurs(MapMachineOurs):
    limits = (2, 3)
    evicts = ("lru",)


EXAMPLES = settings(
    max_examples=30,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    phases=(Phase.generate, Phase.shrink),  # to explain a failure takes minutes
    suppress_health_check=list(HealthCheck),
)
MapMachineOurs.TestCase.settings = LruMachineOurs.TestCase.settings = EXAMPLES
TestMapIsADictOurs = MapMachineOurs.TestCase
TestLruMapIsAnOrderedDictOurs = LruMachineOurs.TestCase

READ, DELETE = TensorDictMap.__getitem__, TensorDictMap.delete
LIES = {
    "a row that is read is not used": ("__getitem__", lambda m, q: READ(copy.deepcopy(m), q)),
    "the first wins": ("__setitem__", lambda m, q, value: m.update(q, value, merge="first")),
    "all is there": ("contains", lambda m, q: torch.ones(q.batch_size, dtype=torch.bool)),
    "one row stays": ("delete", lambda m, q, **options: DELETE(m, q[:-1], **options) + 1),
    "clear does nothing": ("clear", lambda m: None),
}


@pytest.mark.slow
@pytest.mark.parametrize("lie", LIES)
def test_the_machine_finds_a_wrong_result(monkeypatch, lie):
    monkeypatch.setattr(TensorDictMap, *LIES[lie])
    with pytest.raises((AssertionError, ValueError, KeyError, pytest.fail.Exception)):
        one_run = settings(EXAMPLES, phases=[Phase.generate], max_examples=3_000)
        run_state_machine_as_test(LruMachineOurs, settings=one_run)
