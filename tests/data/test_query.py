"""QueryModule: from the content of some entries to a row number."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from raffia import NonTensorData, TensorDict
from raffia.data import CapacityError, HashToInt, QueryModule, SipHash

A = [1.0, 1.0, 2.0, 1.0]
B = [[3, 0, 0], [3, 0, 0], [3, 0, 0], [4, 0, 0]]
INDEX = [0, 0, 1, 2]  # of (A, B), in order of first appearance


def make(**extra):
    """Four rows: float32 "a" [4], int64 "b" [4, 3], and the same nested."""
    entries = {"a": torch.tensor(A), "b": torch.tensor(B)}
    return TensorDict({**entries, "n": {**entries}, **extra}, [4])


def rows(*values):
    return TensorDict({"a": torch.tensor(values, dtype=torch.float32)}, [len(values)])


def index(query, td, **options):
    return query(td, **options)[query.index_key].tolist()


def keys(td):
    return set(td.keys(True, True))


def state(td):
    """The objects in the container, and their values."""
    leaves = {key: td.get(key) for key in td.keys(True, True)}
    return td.batch_size, {
        key: (id(leaf), leaf.tolist() if isinstance(leaf, torch.Tensor) else repr(leaf))
        for key, leaf in leaves.items()
    }


def zeros(x):
    return torch.zeros(len(x), dtype=torch.int64)


class Plus(nn.Module):
    """A hash module with a buffer: the first number of each row, plus one."""

    def __init__(self, start=1):
        super().__init__()
        self.register_buffer("start", torch.tensor(start))

    def forward(self, x):
        return x.reshape(len(x), -1)[:, 0].long() + self.start


class Uncopyable:
    def __call__(self, x):
        return SipHash()(x)

    def __deepcopy__(self, memo):
        raise ValueError("I am only one")


# ------------------------------------------------------------------------------------ the keys


@pytest.mark.parametrize("name, key", [("i", "i"), (("i",), "i"), (("n", "i"), ("n", "i"))])
def test_out_keys_may_be_nested(name, key):
    query = QueryModule("a", name, ("hash", "of", "a"))
    assert query.out_keys == [key, ("hash", "of", "a")] == [query.index_key, query.hash_key]
    td = make()
    out = query(td, clone=True)
    assert keys(td) == keys(make()) and keys(out) == keys(td) | {*query.out_keys}
    assert out[key].tolist() == [0, 0, 1, 0] and out[key].dtype == torch.int64


# ----------------------------------------------------------------------------------- components


def test_hash_modules():
    module = Plus()
    assert QueryModule(["a"], hash_module=module).hash_module["a"] is module
    query = QueryModule(["a", "b"], hash_module=module)
    one, two = query.hash_module.values()
    assert len({id(one), id(two), id(module)}) == 3 and query.aggregator is module
    modules = [SipHash(), Plus()]
    query = QueryModule(["a", "b"], hash_module=modules)
    assert list(query.hash_module.values()) == modules and index(query, make()) == INDEX
    assert {*modules} <= {*query.modules()}
    for one in (Uncopyable(), [Uncopyable()], torch.Tensor.int):
        assert index(QueryModule("a", hash_module=one), make()) == [0, 0, 1, 0]
    assert index(QueryModule("a", hash_module=zeros), make()) == [0, 0, 0, 0]
    with pytest.raises(RuntimeError, match="deepcopy.*a list"):
        QueryModule(["a", "b"], hash_module=Uncopyable())
    for number in (1, 3):
        with pytest.raises(ValueError, match=rf"\b{number} .*modules.* 2 "):
            QueryModule(["a", "b"], hash_module=[SipHash() for _ in range(number)])


def test_calls_of_hash_modules_aggregator_and_table():
    calls = []

    def spy(x, extend=None):
        calls.append((tuple(x.shape), extend))
        return SipHash()(x) if extend is None else x % 7

    query = QueryModule(["a", "b"], hash_module=[spy, spy], aggregator=spy, hash_to_int=spy)
    td = query(make().reshape(2, 2))
    assert torch.equal(td["_index"], td["_hash"] % 7)
    query(make()[0], extend=False)
    # each is called once, with flat rows
    shapes = [(4,), (4, 3), (4, 2), (1,), (1, 3), (1, 2)]
    assert [shape for shape, extend in calls if extend is None] == shapes
    assert [extend for _, extend in calls if extend is not None] == [True, False]
    first = QueryModule(["b", "a"], aggregator=lambda hashes: hashes[:, 0])
    assert index(first, make()) == [0, 0, 0, 1]  # it decides about equality
    with pytest.warns(UserWarning, match="aggregator.*one"):
        query = QueryModule("a", aggregator=lambda hashes: 1 / 0)
    assert index(query, make()) == [0, 0, 1, 0]
    module = Plus()
    assert module in set(QueryModule(["a", "b"], aggregator=module).modules())


def test_a_passed_table_is_shared():
    table = HashToInt(max_size=3)
    one, two = QueryModule("a", hash_to_int=table), QueryModule("a", hash_to_int=table)
    assert index(one, rows(5.0, 6.0)) == [0, 1] and index(two, rows(6.0, 7.0, 5.0)) == [1, 2, 0]
    assert index(one, rows(7.0, 8.0), extend=False) == [2, 3]  # unknown content gets the length
    assert index(QueryModule("a"), rows(6.0)) == [0]
    td = rows(2.0, 5.0)
    before = state(td)
    with pytest.raises(CapacityError, match="3"):
        one(td)
    assert state(td) == before and len(table) == 3 and index(two, td, extend=False) == [3, 0]


def test_exact_queries_distinguish_equal_hashes_by_content():
    def exact(**options):
        return QueryModule(["a", "b"], hash_module=zeros, exact=True, **options)

    query, other = exact(), exact()
    assert index(query, make()) == INDEX
    assert index(query, make().reshape(2, 2)) == [INDEX[:2], INDEX[2:]]
    assert len(set(query.hash(make()).tolist())) == 1
    other.load_state_dict(query.state_dict())
    for each in (query, other, pickle.loads(pickle.dumps(query))):
        assert index(each, make()[[3, 2, 0]], extend=False) == [2, 1, 0]
        assert index(each, make(a=torch.zeros(4)), extend=False) == [3] * 4
    mixed = QueryModule(["x", "y"], hash_module=[SipHash(normalize=False), SipHash()], exact=True)
    zeros_of_y = TensorDict({"x": torch.ones(2), "y": torch.tensor([0.0, -0.0])}, [2])
    assert index(mixed, zeros_of_y) == [0, 1]  # bit by bit, if one of them hashes so
    with pytest.raises(TypeError, match="exact=True.*HashToInt"):
        exact(hash_to_int=lambda hashes, extend: hashes)


# -------------------------------------------------------------------------- equality of content


@pytest.mark.parametrize("in_keys", ["a", ["a", "a"]], ids=["one key", "two keys"])
def test_dtype_and_row_shape_count(in_keys):
    query = QueryModule(in_keys)
    shapes = [torch.zeros(1, *shape) for shape in [(2,), (2, 1), (1, 2)]]
    narrow = [torch.int32, torch.uint8, torch.int8, torch.bool, torch.bfloat16, torch.float16]
    shapes += [torch.zeros(1, 8 // dtype.itemsize, dtype=dtype) for dtype in narrow]
    shapes += [torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.complex64)]
    found = [index(query, TensorDict({"a": x}, [1])) for x in shapes]
    assert found == [[i] for i in range(len(shapes))]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 1)), min_size=1, max_size=12),
    st.integers(1, 11),
)
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_numbers_equal_those_of_a_dict(pairs, cut):
    query, numbers = QueryModule(["x", "y"]), {}
    for part in (pairs[:cut], pairs[cut:]):
        x = torch.tensor([pair[0] for pair in part], dtype=torch.int16)
        y = torch.tensor([pair[1] for pair in part], dtype=torch.float64)
        td = TensorDict({"x": x, "y": y[:, None]}, [len(part)])
        known = [numbers.get(pair, len(numbers)) for pair in part]
        assert index(query, td, extend=False) == known
        assert torch.equal(query.hash(td), td["_hash"])
        expected = [numbers.setdefault(pair, len(numbers)) for pair in part]
        assert index(query, td) == expected


# ------------------------------------------------------------------------------------- mistakes


def of(bad):
    """A query of "b" and "a" whose hash module for "a" is this."""
    return QueryModule(["b", "a"], hash_module=[zeros, bad])


WRONG = {
    "missing": (lambda: QueryModule(["a", "c"]), {}, "c"),
    "misspelt": (lambda: QueryModule("obs"), {"obbs": torch.ones(4)}, "Did you mean .*obbs"),
    "through a leaf": (lambda: QueryModule("a", ("a", "index")), {}, "a"),
    "sparse": (lambda: QueryModule("s"), {"s": torch.eye(4).to_sparse()}, "(?i)sparse|layout"),
    **{
        f"{type(entry).__name__} as entry": (
            lambda: QueryModule(["a", "s"]),
            {"s": entry},
            r"\bs\b",
        )
        for entry in (
            "hello",
            NonTensorData({"k": 1}, batch_size=[4]),
            TensorDict({"x": torch.zeros(4)}, [4]),
        )
    },
    "hash of two columns": (lambda: of(lambda x: zeros(x)[:, None]), {}, r"\ba\b"),
    "too few hashes": (lambda: of(lambda x: zeros(x)[1:]), {}, r"\ba\b"),
    "one hash": (lambda: of(lambda x: torch.tensor(0)), {}, r"\ba\b"),
    "float hashes": (lambda: of(lambda x: torch.zeros(len(x))), {}, r"\ba\b"),
    "a list of hashes": (lambda: of(lambda x: [0] * len(x)), {}, r"\ba\b"),
    "bytes": (lambda: of(SipHash(as_tensor=False)), {}, r"\ba\b"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_invalid_calls_change_nothing(kind):
    new, entries, match = WRONG[kind]
    missing = kind in ("missing", "misspelt", "through a leaf")
    error = KeyError if missing else (TypeError, ValueError, RuntimeError)
    query, td = new(), make(**entries)
    before = list(td.keys(True)) if entries else state(td)
    for clone in (True, False):
        with pytest.raises(error, match=match):
            query(td, clone=clone)
        assert before == (list(td.keys(True)) if entries else state(td))
        assert len(query.hash_to_int) == 0
    with pytest.raises(error, match=match):
        query.hash(td) if kind != "through a leaf" else query(td)


def test_no_keys_and_locked_containers_are_refused():
    for names in ([], (), ""):
        with pytest.raises(ValueError, match="`?in_keys`? cannot be empty"):
            QueryModule(names)
    query, td = QueryModule("a"), make().lock_()
    with pytest.raises(RuntimeError, match="locked"):
        query(td)
    assert len(query.hash_to_int) == 0 and keys(td) == keys(make())


# ---------------------------------------------------------------------------------- as a module


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_on_a_gpu(shape):
    td = make().reshape(shape)
    here = QueryModule(["a", "b"])(td.clone())
    query = QueryModule(["a", "b"]).cuda()
    on_gpu = query(td.to("cuda"))
    for key in ("_index", "_hash"):
        assert on_gpu[key].is_cuda and torch.equal(on_gpu[key].cpu(), here[key])
    assert index(query.cpu(), td.flatten()[2:], extend=False) == INDEX[2:]
