"""TensorDictMap beyond a dict: kinds of entries, merges, functions, and every error.

The operations of a dict are tried in random order in test_map_properties.py.
"""

import itertools
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from raffia import NonTensorData, TensorClass, TensorDict, lazy_stack
from raffia.data import (
    CapacityError,
    QueryModule,
    SipHash,
    TensorDictMap,
    TensorStorage,
    UnknownRowError,
)

NAN, INF = float("nan"), float("inf")


def make(in_keys=("k",), size=20, hash_module=None, **options):
    query = QueryModule(list(in_keys), hash_module=hash_module)
    return TensorDictMap(query_module=query, storage=TensorStorage(size), **options)


def k(*numbers, dtype=torch.float32):
    """Keys: one row for each number."""
    return TensorDict({"k": torch.tensor(numbers, dtype=dtype)[:, None]}, [len(numbers)])


def v(*numbers, dtype=torch.float32):
    """Values: one row for each number."""
    return TensorDict({"v": torch.tensor(numbers, dtype=dtype)[:, None]}, [len(numbers)])


def filled(*numbers, **options):
    """A map from each number to ten times as much."""
    m = make(**options)
    m[k(*numbers)] = v(*[10 * number for number in numbers])
    return m


def read(m, *numbers):
    return m[k(*numbers)]["v"].flatten().tolist()


def content(m):
    """The map as a dict from the number of the key to that of the value."""
    if not len(m):
        return {}
    keys, values = m.items()
    return dict(zip(keys["k"].flatten().tolist(), values["v"].flatten().tolist(), strict=True))


def plain(td):
    """Everything in a container: the objects, and their values."""
    return td.batch_size, {
        key: (id(td.get(key)), td.get(key).tolist() if hasattr(td.get(key), "tolist") else None)
        for key in td.keys(True, True)
    }


@contextmanager
def refused(error, match, m, *tds):
    """The block raises `error` with `match` in its message; the map and `tds` are unchanged."""

    def state():
        saved = {name: x.tolist() for name, x in m.state_dict().items()}
        return saved, len(m), [plain(td) for td in tds if isinstance(td, TensorDict)]

    before = state()
    with pytest.raises(error, match=match):
        yield
    assert state() == before


def zeros(x):
    """A hash module for which all rows are the same."""
    return torch.zeros(len(x), dtype=torch.int64)


class Position(TensorClass):
    x: torch.Tensor
    y: torch.Tensor


# -------------------------------------------------------------------------------- reading, writing

DTYPES = [
    *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.uint64, torch.uint32),
    *(torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn),
]
NESTED = TensorDict({"a": torch.tensor([1, 1]), "n": {"b": torch.tensor([[0.5], [1.5]])}}, [2])
POSITION = Position(x=torch.tensor([1, 2]), y=torch.tensor([3, 3]), batch_size=[2])
GRADIENT = torch.ones(2, 1, requires_grad=True)
KINDS = {
    **{str(d): (["v"], v(1, 0, dtype=d), v(1, 0, dtype=d)) for d in DTYPES},
    "nested": (["a", ("n", "b")], NESTED, NESTED),
    "more than keys": (["k"], k(1, 2).set("noise", torch.randn(2)), k(5, 6)),
    "tensorclass": (["x", "y"], POSITION, POSITION),
    "lazy stacks": (["k"], lazy_stack(list(k(1, 2).unbind(0))), lazy_stack(list(v(5, 6)))),
    "more batch dims": (["k"], k(1, 2), TensorDict({"v": torch.arange(6.0).view(2, 3)}, [2, 3])),
    "bit by bit": (["k"], k(0.0, -0.0), v(1, 2)),
    "of a gradient": (["k"], k(1, 2), TensorDict({"v": GRADIENT * 2}, [2])),
}


@pytest.mark.parametrize("kind", KINDS)
def test_written_values_are_read(kind, tmp_path):
    in_keys, query, value = KINDS[kind]
    hash_module = SipHash(normalize=False) if kind == "bit by bit" else None
    m = make(in_keys, hash_module=hash_module)
    before = [plain(query), plain(value)]
    m[query.lock_()] = value.lock_()
    m[query[:1]] = value[:1]
    m.save(tmp_path / "map")
    m = TensorDictMap.load(tmp_path / "map")
    found, expected = m[query[[1, 0, 1]]], value[[1, 0, 1]]
    keys = m.keys()
    assert len(m) == 2 and len(found) == 3 and set(keys.keys(True, True)) == {*in_keys}
    assert type(found) is (Position if isinstance(value, Position) else TensorDict)
    assert set(found.keys(True, True)) == set(value.keys(True, True))
    sides = [(found.get(key), expected.get(key)) for key in value.keys(True, True)]
    sides += [(keys.get(key), query.get(key)) for key in in_keys]
    for mine, theirs in sides:
        assert mine.dtype == theirs.dtype and not mine.requires_grad
        assert torch.equal(mine.view(torch.uint8), theirs.detach().view(torch.uint8))
    if "lazy" not in kind:  # whose leaves are stacked when they are read
        assert [plain(query), plain(value)] == before


@pytest.mark.parametrize("batch", [[0], [0, 3]])
@pytest.mark.parametrize("by_key", [False, True])
def test_a_query_of_no_rows_of_an_empty_map(batch, by_key):
    m = TensorDictMap(in_keys=["x"], storage={"v": TensorStorage(5)} if by_key else None)
    query = TensorDict(x=torch.zeros(*batch, 2), batch_size=batch)
    for found in (m[query], m.get(query, 0.5), m.pop(query), m(query)):
        assert found.batch_size == torch.Size(batch)
    default = TensorDict(v=torch.zeros(batch), batch_size=batch)
    assert m.get(query, default)["v"].shape == torch.Size(batch)
    m[query] = default
    assert len(m) == 0 and m.delete(query) == 0 and query in m
    with pytest.raises(TypeError, match="default must be a number"):
        m.get(query, "nothing")
    m[TensorDict(x=torch.zeros(1, 2), batch_size=[1])] = TensorDict(v=torch.ones(1), batch_size=[1])
    assert m[query]["v"].shape == torch.Size(batch)


def test_values_are_copied_when_written_and_when_read():
    m, query, value = make(), k(1, 2), v(1, 2)
    m[query] = value
    before = plain(query)
    sides = [query, value, m[k(1, 2)], m.keys(), m.values(), m.get(k(1), 0), next(iter(m))]
    for ask in (m.contains, m.rows, m.__contains__, m.__getitem__):
        ask(query)
    assert plain(query) == before
    for td in sides:
        td.apply_(lambda x: x.fill_(-1))
    assert content(m) == {1: 1, 2: 2}


def test_defaults():
    m = make()
    m[k(1, 2)] = v(1, 2).set(("n", "x"), torch.tensor([[True, False], [False, True]]))
    td = m.get(k(2, 9, 1), 0)
    assert td["v"].tolist() == [[2], [0], [1]] and td["v"].dtype == torch.float32
    assert td["n", "x"].tolist() == [[False, True], [False, False], [True, False]]
    m = filled(1, 2)
    td = m.get(k(1, 9, 2, 8).reshape(2, 2), v(1, 2, 3, 4).reshape(2, 2))
    assert td["v"].tolist() == [[[10], [2]], [[20], [4]]] and k(9) not in m
    m.clear()  # after which they are still known
    assert m.get(k(1), 3)["v"].tolist() == [[3]] and m.out_keys == ["v"]
    assert m.keys()["k"].shape == m.values()["v"].shape == m[m.keys()]["v"].shape == (0, 1)


# ------------------------------------------------------------------------------------------ merging


MERGES = {
    "last": lambda x: x[-1],
    "first": lambda x: x[0],
    "sum": lambda x: x.sum(0, dtype=x.dtype),
    "mean": lambda x: x.mean(0),
    "max": lambda x: x.max(0),
}


@pytest.mark.parametrize("merge", MERGES)
def test_merges_equal_numpy(merge):
    rng = np.random.default_rng(0)
    dtypes = [np.float32, np.float64, *([] if merge == "mean" else [np.int32, np.int64])]
    for dtype, shape, accumulate in itertools.product(dtypes, [(), (2, 3)], [False, True]):
        numbers = rng.integers(0, 6, size=14).tolist()
        entries = {"v": torch.tensor(rng.integers(-9, 9, size=(14, *shape)).astype(dtype))}
        entries["n"] = {"w": -entries["v"]}
        value = TensorDict(entries, [14])
        old = value[:4]
        m = make()
        m[k(0, 2, 4, 7)] = old
        m.update(k(*numbers), value, merge=merge, accumulate=accumulate)
        for key in ("v", ("n", "w")):
            stored = dict(zip((0, 2, 4, 7), old[key].numpy(), strict=True))
            groups = {number: [row] for number, row in stored.items()} if accumulate else {}
            for number, row in zip(numbers, value[key].numpy(), strict=True):
                groups.setdefault(number, []).append(row)
            expected = stored | {n: MERGES[merge](np.stack(rows)) for n, rows in groups.items()}
            assert len(m) == len(expected)
            for number, row in expected.items():
                found = m[k(number)[0]][key].numpy()
                assert found.dtype == dtype, (dtype, shape, accumulate)
                np.testing.assert_allclose(found, row, rtol=1e-6)


@pytest.mark.parametrize(
    "merge, dtype, values, expected",
    [
        ("max", torch.bool, [False, True, False], [True]),
        ("max", torch.float32, [1, NAN, -INF], [NAN]),
        ("max", torch.float32, [-INF, 2, INF], [INF]),
        ("sum", torch.float32, [1, INF, NAN], [NAN]),
        ("sum", torch.float32, [1, INF, 2], [INF]),
        # adding ones one by one in bfloat16 stops at 256
        *[("sum", dtype, [1] * 1000, [1000]) for dtype in (torch.float16, torch.bfloat16)],
        *[("mean", dtype, [1] * 1000, [1]) for dtype in (torch.float16, torch.bfloat16)],
    ],
    ids=str,
)
def test_merges_of_special_numbers(merge, dtype, values, expected):
    m = make()
    m.update(k(*[1] * len(values)), v(*values, dtype=dtype), merge=merge)
    torch.testing.assert_close(
        m[k(1)[0]]["v"], torch.tensor(expected, dtype=dtype), equal_nan=True, rtol=0, atol=0
    )


# ------------------------------------------------------------------------- functions and out_keys


def total(new, old=None):
    """A write_fn: sums the values, and counts how many there were."""
    new = new.clone()
    new["n"] = torch.ones(new.batch_size, dtype=torch.int64)
    if old is not None:
        new["v"] += old["v"]
        new["n"] += old["n"]
    return new


def test_a_write_fn_gets_new_rows_alone_and_others_with_the_old_in_rounds():
    calls = []

    def spy(new, old=None):
        old_v = None if old is None else old["v"].flatten().tolist()
        calls.append((new["v"].flatten().tolist(), old_v))
        return total(new, old)

    m, value = make(write_fn=spy), v(1, 2, 3, 4, 5, 6)
    m[k(1)] = v(100)
    m[k()] = v()
    assert calls == [([100], None)]
    calls.clear()
    before = plain(value)
    m[k(2, 1, 2, 3, 2, 1)] = value
    assert plain(value) == before and content(m) == {1: 108, 2: 9, 3: 4}
    assert m[k(1, 2, 3)]["n"].tolist() == [3, 3, 1]
    # first occurrences: 2 and 3 are new; then the second ones, then the third
    assert sorted(calls[:2], key=str) == [([1, 4], None), ([2], [100])]
    assert len(calls) == 4 and sorted(zip(*calls[2], strict=True)) == [(3, 1), (6, 102)]
    assert calls[3] == ([5], [4])
    m = make(write_fn=total)
    m.update(k(1, 2, 1), v(1, 2, 3), merge="sum")  # after a merge there is one row for each key
    assert content(m) == {1: 4, 2: 2} and m[k(1, 2)]["n"].tolist() == [1, 1]


def fail(*args, **kwargs):
    raise RuntimeError("no")


def only_old(change):
    return lambda new, old=None: new if old is None else change(new)


FUNCTIONS = {
    "error": fail,
    "error for old": only_old(fail),
    "None": lambda x, *more: None,
    "tensor": lambda x, *more: x["v"],
    "no row": lambda x, *more: x[:0],
    "no entry": lambda x, *more: x.exclude("v"),
    "dtype": lambda x, *more: x.apply(torch.Tensor.double),
    "shape": lambda x, *more: x.apply(lambda leaf: leaf[:, 0]),
}
WRONG = (ValueError, KeyError, TypeError, RuntimeError)


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("numbers", [(1, 2), (1, 5, 2, 2)], ids=str)
def test_functions_with_invalid_results_change_nothing(kind, numbers):
    function, query, value = FUNCTIONS[kind], k(*numbers), v(*range(len(numbers)))
    m = filled(1, 2)
    if kind != "error for old":

        def merge(values, group, num_groups):
            return function(values[:num_groups])

        with refused(WRONG, None, m, query, value):
            m.update(query, value, merge=merge)
    m.write_fn = function if "error" in kind else only_old(function)
    with refused(WRONG, None, m, query, value):
        m[query] = value
    m.write_fn = None
    m[k(7)] = v(7)
    assert read(m, 7) == [7]


def test_out_keys_select_the_stored_entries():
    m = make(out_keys=["v", ("n", "x")])
    value = v(1, 2).update({"w": torch.ones(2), "n": {"x": torch.ones(2), "y": torch.ones(2)}})
    m[k(1, 2)] = value
    assert set(m[k(1)].keys(True, True)) == {"v", ("n", "x")} == {*m.out_keys}
    with refused(KeyError, "n", m):
        m[k(1)] = v(1)
    m = make()
    with pytest.raises(AttributeError, match="out_keys"):
        m.out_keys  # noqa: B018
    m[k(1, 2)] = value  # by default they are those of the first value
    assert {*m.out_keys} == {"v", "w", ("n", "x"), ("n", "y")}


def test_it_is_a_module():
    m, td = filled(1, 2), k(2, 1).set("other", torch.zeros(2))
    assert m(td) is td and td["v"].tolist() == [[20], [10]]
    assert set(td.keys()) == {"k", "other", "v"}
    assert set(m.select_out_keys("v")(k(1)).keys()) == {"k", "v"}
    assert repr(m).startswith("TensorDictMap(2 of 20 rows, ['k'] -> ['v']")
    assert bool(make())  # else `map or default` would drop an empty one


# ------------------------------------------------------------------------------------ constructors


def test_a_storage_has_one_map():
    storage = TensorStorage(5)
    first, second = (TensorDictMap(in_keys=["k"], storage=storage) for _ in range(2))
    first[k(1)] = v(1)
    with pytest.raises(ValueError, match="its own storage"):
        second[k(5)] = v(5)
    assert content(first) == {1: 1} and len(second) == 0
    with pytest.raises(ValueError, match="holds 1 row"):
        init(**K, storage=storage)(None)


def test_a_storage_for_each_entry():
    storage = {"v": TensorStorage(), ("n", "x"): TensorStorage(5)}
    m = TensorDictMap(query_module=QueryModule(["k"]), storage=storage)
    m[k(1, 2)] = v(1, 2).set(("n", "x"), torch.tensor([3, 4]))
    td = m[k(2, 1)]
    assert td["v"].tolist() == [[2], [1]] and td["n", "x"].tolist() == [4, 3]
    other = make()
    other.load_state_dict(m.state_dict())
    assert content(other) == {1: 1, 2: 2} and other[k(2)]["n", "x"].tolist() == [4]
    assert m.delete(k(1)) == 1 and content(m) == {2: 2}


def test_from_a_pair():
    source, dest = k(1, 2), v(1, 2).set("w", torch.ones(2))
    before = plain(source), plain(dest)
    m = TensorDictMap.from_tensordict_pair(source, dest, ["k"])
    assert (plain(source), plain(dest)) == before and len(m) == 0 and source not in m
    assert m.get(source, 3)["v"].tolist() == [[3], [3]]  # entries are known
    with refused(ValueError, "float32.*float64", m):
        m[k(1, dtype=torch.float64)] = dest[:1]
    with refused((ValueError, KeyError), "v", m):
        m[k(1)] = TensorDict({"w": torch.ones(1)}, [1])
    m = TensorDictMap.from_tensordict_pair(
        *(source, dest, ["k"]),
        out_keys=["v"],
        max_size=2,
        evict="lru",
        hash_module=SipHash(),
        collate_fn=lambda values: values.set("more", values["v"] + 1),
        write_fn=total,
        storage_constructor=lambda: TensorStorage(4),
    )
    assert m.max_size == 2 and m.out_keys == ["v"]
    for number in (1, 2, 3, 3):
        m[k(number)] = v(number)
    assert m.contains(k(1, 2, 3)).tolist() == [False, True, True]
    assert m[k(3)]["v"].tolist() == [[6]] and m[k(3)]["more"].tolist() == [[7]]
    m = TensorDictMap.from_tensordict_pair(source, v(1, 2), ["k"], write_fn=total)
    m[k(1, 1)] = v(1, 2)
    assert m[k(1)]["n"].tolist() == [2]


# ----------------------------------------------------------------------------------------- all rows


def test_at_gives_keys_and_values_of_some_rows():
    m = filled(4, 2, 9)
    rows = m.rows(k(9, 4, 9))
    keys, values = m.at(rows)
    assert keys["k"].tolist() == [[9], [4], [9]] and values["v"].tolist() == [[90], [40], [90]]
    assert torch.equal(m.hashes(rows), m.query_module.hash(k(9, 4, 9)))
    m.delete(k(9))
    for ask, row in itertools.product((m.at, m.hashes), (int(rows[0]), 17, -1)):
        with refused(IndexError, str(row), m):
            ask(torch.tensor([row]))


# ----------------------------------------------------------------------------------------- mistakes

W = torch.ones(2)
BAD_VALUES = {
    "too few rows": (v(1), r"\[1\].*\[2\]"),
    "one row": (v(1)[0], r"\[\].*\[2\]"),
    "missing entry": (v(1, 2), "w"),
    "no entry": (TensorDict({}, [2]), "v|w"),
    "row shape": (TensorDict({"v": torch.ones(2, 3), "w": W}, [2]), "v"),
    "dtype": (v(1, 2, dtype=torch.float64).set("w", W), "v.*float64|float64.*v"),
    "extra entry": (v(1, 2).update({"w": W, "z": W}), "z"),
    "container": (v(1, 2).update({"w": TensorDict({"x": W}, [2])}), "w"),
    "string": (v(1, 2).update({"w": "hello"}), "w"),
    "object": (v(1, 2).set("w", NonTensorData({1, 2}, batch_size=[2])), "w"),
    "dict": ({"v": torch.ones(2, 1)}, "dict.*TensorDict"),
}
FITS_AN_EMPTY_MAP = {"missing entry", "no entry", "row shape", "dtype", "extra entry", "container"}


@pytest.mark.parametrize("kind", BAD_VALUES)
def test_bad_values_change_nothing(kind):
    value, match = BAD_VALUES[kind]
    error = TypeError if kind == "dict" else WRONG
    m = make()
    m[k(1, 2)] = v(10, 20).set("w", torch.zeros(2))
    maps = [m] if kind in FITS_AN_EMPTY_MAP else [m, make()]
    for m, numbers in itertools.product(maps, [(1, 2), (8, 9), (9, 9)]):
        query = k(*numbers)
        with refused(error, match, m, query, value):
            m[query] = value
        with refused(error, match, m, query, value):
            m.update(query, value, merge="first", accumulate=True)
    if len(maps) == 2:  # the form of entries is unknown
        m[TensorDict({"k": torch.ones(2, 3)}, [2])] = TensorDict({"z": torch.ones(2)}, [2])
        assert len(m) == 1 and m.out_keys == ["z"]


BAD_QUERIES = {
    "missing entry": (TensorDict({"q": torch.ones(2)}, [2]), KeyError, "k"),
    "string": (TensorDict({"k": "hello"}, [2]), (TypeError, ValueError), "k"),
    "container": (TensorDict({"k": {"x": torch.ones(2)}}, [2]), (TypeError, ValueError), "k"),
    "dict": ({"k": torch.ones(2, 1)}, TypeError, "dict.*TensorDict"),
}


@pytest.mark.parametrize("kind", BAD_QUERIES)
def test_bad_queries_are_refused_everywhere(kind):
    query, error, match = BAD_QUERIES[kind]
    for m in (make(), filled(1, 2)):
        for ask in (
            *(m.__getitem__, m.contains, m.__contains__, m.rows, m.delete, m.__delitem__, m.pop),
            lambda query, m=m: m.get(query, v(0)[0]),
            lambda query, m=m: m.__setitem__(query, v(1, 2)),
        ):
            with refused(error, match, m, query):
                ask(query)


def update(*numbers, dtype=torch.float32, **options):
    return lambda m: m.update(k(*numbers), v(*range(len(numbers)), dtype=dtype), **options)


def init(**options):
    """Makes a map with these options; ignores its argument."""
    return lambda m: TensorDictMap(**options)


def write(keys):
    return lambda m: m.update(TensorDict({"k": keys}, [2]), v(1, 2))


K = {"in_keys": ["k"]}
WHICH = r"\[1, 3\].*get\(query, default\)"
FULL = "2 new rows.*map holds 2.*size is 3"
REFUSED = {
    "no query": (init(), ValueError, "in_keys=.*query_module="),
    "two queries": (init(**K, query_module=QueryModule(["k"])), ValueError, "must be named"),
    "evict": (init(**K, evict="fifo"), ValueError, "evict='fifo' must be one of 'lru', None"),
    "evict of no size": (init(**K, evict="lru"), ValueError, "max_size"),
    "max_size": (init(**K, max_size=0), ValueError, "max_size.*0"),
    "storage": (init(**K, storage=100), TypeError, "TensorStorage.*got a int"),
    "unknown rows": (lambda m: m[k(1, 8, 2, 9)], UnknownRowError, WHICH),
    "how many": (lambda m: m.pop(k(1, 8, 2, 9)), KeyError, "2 of 4 rows"),
    "other dtype": (lambda m: m[k(1, dtype=torch.float64)], KeyError, "float32.*float64"),
    "another shape": (write(torch.ones(2, 2)), ValueError, r"float32\[1\]"),
    "no shape": (write(torch.ones(2)), ValueError, r"float32\[1\]"),
    "another dtype": (write(torch.ones(2, 1).int()), ValueError, r"float32\[1\]"),
    "missing=": (lambda m: m.delete(k(1), missing="skip"), ValueError, "missing='skip' must be"),
    "merge=": (update(1, 2, merge="min"), ValueError, "'last', 'first', 'sum', 'mean', 'max'"),
    "a number as merge": (update(1, 2, merge=3), ValueError, "'last'"),
    "accumulate=": (update(1, accumulate=True), ValueError, "accumulate.*merge"),
    "write_fn": (update(1, merge="sum", accumulate=True), ValueError, "write_fn"),
    "default of a batch": (lambda m: m.get(k(1, 9, 8), v(1, 2)), WRONG, "v|batch"),
    "default's entry": (lambda m: m.get(k(1, 9), TensorDict(w=torch.ones(()))), WRONG, "v"),
    "default": (lambda m: m.get(k(9, 1), [1, 2]), TypeError, "number"),
    "default where all is known": (lambda m: m.get(k(1), "x"), TypeError, "default must be a num"),
    "full": (update(2, 8, 9), CapacityError, FULL),
    "full storage": (update(2, 8, 9), CapacityError, "max_size is 3"),
    "hash of a shape": (update(1), WRONG, "k"),
    "no hash": (update(1), (TypeError, ValueError), "k"),
    "hashes of rows": (update(1, 2), WRONG, "k"),
    "failing hash": (update(3, 9), RuntimeError, "no"),
    "default of an empty one": (lambda m: m.get(k(1), 0.0), UnknownRowError, "from_tensordict_pa"),
    **{
        f"{merge} of {dtype} {n}": (update(*n, dtype=dtype, merge=merge), ValueError, match)
        for merge, dtype, match in [
            ("mean", torch.int64, "mean.*floating"),
            ("mean", torch.bool, "mean.*floating"),
            ("sum", torch.bool, "sum.*bool"),
        ]
        for n in [(1, 1), (1, 2)]
    },
}
MADE_WITH = {
    "write_fn": {"write_fn": total},
    "full": {"max_size": 3},
    "full storage": {"size": 3},
    "hash of a shape": {"hash_module": lambda x: torch.zeros(len(x), 2)},
    "no hash": {"hash_module": lambda x: None},
    "hashes of rows": {"hash_module": lambda x: zeros(x)[1:]},
    "failing hash": {"hash_module": fail},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refused_call_changes_nothing(kind):
    call, error, match = REFUSED[kind]
    m = make(**MADE_WITH.get(kind, {}))
    if "hash" not in kind and " of torch" not in kind and kind != "default of an empty one":
        m[k(1, 2)] = v(10, 20)
    with refused(error, match, m):
        call(m)


def test_a_default_outside_the_dtype_is_refused():
    for dtype, default in [
        (torch.uint8, -1),
        (torch.int64, 0.5),
        (torch.int64, NAN),
        (torch.bool, 2),
        (torch.float32, 1j),
    ]:
        m = make()
        m[k(9)] = v(1, dtype=dtype)
        with refused(ValueError, 'default=.*"v"', m):
            m.get(k(8), default)


@pytest.mark.parametrize("evict", [None, "lru"])
def test_a_storage_that_fails_changes_nothing(evict, monkeypatch):
    def no_memory(rows, data):
        raise MemoryError("no room for rows")

    m = filled(1, 2, 3, max_size=4, evict=evict)
    query, value = (k(1, 4, 5), v(5, 6, 7)) if evict else (k(1, 4), v(5, 6))
    with monkeypatch.context() as patch, pytest.raises(MemoryError, match="no room"):
        patch.setattr(m.storage, "set", no_memory)
        m[query] = value
    assert content(m) == {1: 10, 2: 20, 3: 30} and m.rows(k(1, 2, 3, 4)).tolist() == [0, 1, 2, -1]
    m[k(4)] = v(4)
    assert content(m) == {1: 10, 2: 20, 3: 30, 4: 4}
    if evict:  # a failed write does not count as use
        m[k(5)] = v(5)
        assert content(m) == {2: 20, 3: 30, 4: 4, 5: 5}


def test_one_of_several_storages_that_fails_changes_nothing(monkeypatch):
    def full(*args):
        raise OSError("no space left")

    m = TensorDictMap(in_keys=["k"], storage={"v": TensorStorage(5), "w": TensorStorage(5)})
    m[k(1, 2)] = v(10, 20).set("w", torch.zeros(2))
    new = v(7, 7).set("w", torch.ones(2))
    for name, change in (("set", lambda: m.update(k(2, 3), new)), ("erase", lambda: m.pop(k(1)))):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
            patch.setattr(m.storage._storages["w"], name, full)
            change()
        assert content(m) == {1: 10, 2: 20} and len(m.storage._storages["v"]) == 2
    m[k(3)] = v(30).set("w", torch.ones(1))
    assert content(m) == {1: 10, 2: 20, 3: 30}


# ---------------------------------------------------------------------------------- copies of a map


def test_an_incomplete_or_inconsistent_state_changes_nothing():
    state = filled(1, 2, 3).state_dict()
    for name, x in state.items():
        m = filled(7)
        if name.startswith("query_module."):
            continue
        with refused(RuntimeError, "(?i)missing", m):
            m.load_state_dict({key: x for key, x in state.items() if key != name})
        changes = [x[:-1], torch.cat([x, x[-1:]]), x.double(), x[None], x - 1 if len(x) else x]
        for change in changes:
            if change.dtype == x.dtype and torch.equal(change, x):
                continue
            m = filled(7)
            try:
                m.load_state_dict({**m.state_dict(), **state, name: change})
            except (RuntimeError, ValueError):
                assert content(m) == {7: 70}
            else:  # any numbers are valid if the entries are consistent
                rows = m.rows(m.keys()).tolist()
                assert len(m) == len(m.values()) == len(set(rows))


def test_threads_write_concurrently():
    m = TensorDictMap(in_keys=["k"])

    def work(i):
        for start in range(400 * i, 400 * i + 400, 40):
            numbers = range(start, start + 40)
            m[k(*numbers)] = v(*numbers)
            assert read(m, *numbers) == list(numbers)
            m.update(k(-1, -2, -1), v(1, 1, 1), merge="sum", accumulate=True)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert content(m) == {i: i for i in range(3200)} | {-1: 160, -2: 80}


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("query_device", ["cpu", "cuda"])
def test_on_a_gpu(device, query_device):
    m = TensorDictMap(in_keys=["k"], storage=TensorStorage(device=device), max_size=4, evict="lru")
    ask = lambda *numbers: k(*numbers).to(query_device)  # noqa: E731
    m[ask(1, 2, 1)] = v(1, 2, 3).to(query_device)
    m.update(ask(2, 3), v(5, 6).to(query_device), merge="sum", accumulate=True)
    assert m[ask(3, 2, 1)]["v"].flatten().tolist() == [6, 7, 3]
    assert m.contains(ask(1, 9)).tolist() == [True, False]
    m[ask(7, 8)] = v(7, 8).to(query_device)
    assert m.contains(ask(3, 2)).tolist() == [False, True]
    m.delete(ask(1))
    assert sorted(m.values()["v"].flatten().tolist()) == [7, 7, 8]
    assert m[ask(7)]["v"].device.type == device


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e8m0fnu])
def test_values_of_dtypes_that_torch_cannot_index(dtype):
    m = make(write_fn=lambda new, old=None: new)
    m[k(1, 2)] = v(1, 1, dtype=dtype)
    m[k(1, 3, 1)] = v(2, 4, 8, dtype=dtype)
    for default in (16, v(16, dtype=dtype)[0]):
        assert m.get(k(1, 5, 3, 2), default)["v"].int().flatten().tolist() == [8, 16, 4, 1]
    for merge in ("sum", "max"):
        with pytest.raises(ValueError, match="not implemented in torch .*; store them as int64"):
            m.update(k(1), v(1, dtype=dtype), merge=merge)
