"""What TorchRL's QueryModule, HashToInt and TensorDictMap get wrong, ours does not.

Each test is named after what must hold; tests of one matter begin with one number. TorchRL 0.14.1
fails each in at least one case. Forests, storages and replay have such tests in their own files.
"""

import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses import FakeTensorMode

from raffia import TensorDict
from raffia.data import (
    BinaryToDecimal,
    CapacityError,
    HashToInt,
    QueryModule,
    RandomProjectionHash,
    SipHash,
    TensorDictMap,
    TensorStorage,
    UnknownRowError,
)


def k(*numbers):
    return TensorDict({"k": torch.tensor(numbers, dtype=torch.float32)[:, None]}, [len(numbers)])


def v(*numbers):
    return TensorDict({"v": torch.tensor(numbers, dtype=torch.float32)[:, None]}, [len(numbers)])


def make(size=20, **options):
    storage = TensorStorage(size)
    return TensorDictMap(query_module=QueryModule(["k"]), storage=storage, **options)


def read(m, *numbers):
    return m[k(*numbers)]["v"].flatten().tolist()


def index(query, entries, **options):
    size = len(next(iter(entries.values())))
    return query(TensorDict(entries, [size]), **options)["_index"].tolist()


# ---------------------------------------------------------------------------- 1: salted hashes

ELSEWHERE = """
import json, pickle, sys
import torch
from raffia import TensorDict
from raffia.data import SipHash

rows = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
with open(sys.argv[1], "rb") as file:
    query = pickle.load(file)
td = query(TensorDict({"k": rows}, [3]), extend=False)
print(json.dumps([SipHash()(rows).tolist(), td["_index"].tolist()]))
"""


@pytest.mark.slow
def test_01_hashes_are_the_same_in_every_process(tmp_path):
    rows = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    query = QueryModule("k")
    assert index(query, {"k": rows}) == [0, 1, 2]
    (tmp_path / "query").write_bytes(pickle.dumps(query))
    # the numbers of the peer's documentation for PYTHONHASHSEED=0
    documented = [-4669941682990263259, -3778166555168484291, -9122128731510687521]
    assert SipHash()(rows).tolist() == documented
    others = [
        subprocess.Popen(
            [sys.executable, "-c", ELSEWHERE, str(tmp_path / "query")],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]
    for other in others:
        assert json.loads(other.communicate()[0]) == [documented, [0, 1, 2]]


# ------------------------------------------------------------------------------ 2: no state_dict


def filled_table():
    table = HashToInt()
    table(torch.tensor([7, 5, 9]), extend=True)
    return table


def filled_query():
    query = QueryModule(["k"])
    query(k(7, 5, 9))
    return query


def filled_map():
    m = make()
    m[k(7, 5, 9)] = v(1, 2, 3)
    return m


STATEFUL = {
    "HashToInt": (filled_table, HashToInt, lambda t: t(torch.tensor([9, 7, 1])).tolist()),
    "QueryModule": (
        filled_query,
        lambda: QueryModule(["k"]),
        lambda q: q(k(9, 7, 1), extend=False)["_index"].tolist(),
    ),
    "TensorDictMap": (filled_map, make, lambda m: m.get(k(9, 7, 1), 3)["v"].flatten().tolist()),
}


@pytest.mark.parametrize("within", ["alone", "in a module"])
@pytest.mark.parametrize("kind", STATEFUL)
def test_02_what_learns_has_a_state_dict(kind, within, tmp_path):
    filled, empty, ask = STATEFUL[kind]
    one, two = filled(), empty()
    if within == "alone":
        outer_one, outer_two = one, two
    else:
        outer_one = nn.ModuleDict({"net": nn.Linear(2, 1), "child": one})
        outer_two = nn.ModuleDict({"net": nn.Linear(2, 1), "child": two})
    save_file(outer_one.state_dict(), tmp_path / "state.safetensors")
    outer_two.load_state_dict(load_file(tmp_path / "state.safetensors"))
    assert ask(two) == ask(one)
    torch.save(outer_one.state_dict(), tmp_path / "state.pt")
    torch.load(tmp_path / "state.pt", weights_only=True)


def test_02_hash_modules_are_registered():
    projections = [RandomProjectionHash(), RandomProjectionHash()]
    query = QueryModule(["a", "b"], hash_module=projections)
    query(TensorDict({"a": torch.randn(2, 20), "b": torch.randn(2, 30)}, [2]))
    assert {id(module) for module in projections} <= {id(module) for module in query.modules()}
    shapes = [tuple(x.shape) for x in query.state_dict().values()]
    assert (20, 16) in shapes and (30, 16) in shapes
    moved = []
    for module in projections:
        module._apply = lambda fn, recurse=True, module=module: moved.append(module) or module
    query.to("cpu")
    assert moved == projections


# ------------------------------------------------------------------------ 3: small floats, tracing

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16}
SMALL = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, *SMALL], ids=str)
@pytest.mark.parametrize("normalize", [True, False])
def test_03_each_number_of_a_small_dtype_has_its_own_hash(dtype, normalize):
    bits = BITS.get(dtype, torch.int8)
    x = torch.arange(2 ** torch.iinfo(bits).bits).to(bits).view(dtype)
    wide = x.to(torch.float32)
    distinct = set(wide[~wide.isnan()].tolist())  # -0.0 == 0.0
    expected = len(distinct) + int(wide.isnan().any()) if normalize else len(x)
    assert SipHash(normalize=normalize)(x).unique().numel() == expected
    found = torch.tensor(
        index(QueryModule("k", hash_module=SipHash(normalize=normalize)), {"k": x})
    )
    assert found.unique().numel() == expected


@pytest.mark.parametrize("numbers", [(1e5, 2e5), (1e-10, 2e-10, 0.0)], ids=str)
def test_03_bfloat16_is_not_rounded(numbers):
    x = torch.tensor(numbers, dtype=torch.bfloat16)[:, None]
    assert index(QueryModule("k"), {"k": x}) == list(range(len(numbers)))


def test_03_meta_and_fake_tensors_give_the_shape():
    hashes = SipHash()(torch.empty(5, 3, device="meta"))
    assert hashes.shape == (5,) and hashes.dtype == torch.int64 and hashes.is_meta
    with FakeTensorMode():
        hashes = SipHash()(torch.empty(5, 3))
        assert hashes.shape == (5,) and hashes.dtype == torch.int64


@pytest.mark.parametrize(
    "make_input", [lambda: torch.randn(5, 3), lambda: torch.arange(6).view(3, 2).int()]
)
def test_03_is_compiled_without_a_break(make_input):
    x, module = make_input(), SipHash()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), module(x))


# --------------------------------------------------------------------------- 4: blind for dtypes

EQUAL_BYTES = {
    "zeros": [
        torch.zeros(1, 2),
        torch.zeros(1, 2, dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.float64),
        torch.zeros(1, 2, 1, 1),
    ],
    "1.0": [torch.tensor([[1065353216]], dtype=torch.int32), torch.tensor([[1.0]])],
}


@pytest.mark.parametrize("kind", EQUAL_BYTES)
def test_04_dtype_and_shape_are_content(kind):
    tensors = EQUAL_BYTES[kind]
    query = QueryModule("k")
    assert [index(query, {"k": x}) for x in tensors] == [[i] for i in range(len(tensors))]
    for x in tensors:
        m = TensorDictMap(in_keys=["k"])
        m[TensorDict({"k": x}, [1])] = v(1)
        there = [bool(m.contains(TensorDict({"k": other}, [1]))) for other in tensors]
        assert there == [other is x for other in tensors]


# ----------------------------------------------------------------------------- 5: zeros and NaNs

NANS = torch.tensor([0x7FC00000, -0x400000, 0x7FC00001, 0x7F800001], dtype=torch.int32)
EQUAL_NUMBERS = {"zeros": torch.tensor([0.0, -0.0]), "NaNs": NANS.view(torch.float32)}


@pytest.mark.parametrize("kind", EQUAL_NUMBERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_05_equal_numbers_are_one_state(kind, dtype):
    x = EQUAL_NUMBERS[kind].to(dtype)
    assert index(QueryModule("k"), {"k": x}) == [0] * len(x)
    m = TensorDictMap(in_keys=["k"])
    m[TensorDict({"k": x}, [len(x)])] = v(*range(len(x)))
    assert len(m) == 1


@pytest.mark.parametrize("kind", EQUAL_NUMBERS)
def test_05_bit_by_bit_is_an_option(kind):
    x = EQUAL_NUMBERS[kind]
    query = QueryModule("k", hash_module=SipHash(normalize=False))
    assert index(query, {"k": x}) == list(range(len(x)))
    m = TensorDictMap(query_module=query)
    m[TensorDict({"k": x}, [len(x)])] = v(*range(len(x)))
    assert len(m) == len(x)


# ----------------------------------------------------------------- 6: batches, and bad entries


@pytest.mark.parametrize("shape", [(2, 3), (1, 2, 3), (6, 1)], ids=str)
def test_06_any_number_of_batch_dims(shape):
    td = TensorDict({"k": torch.arange(6.0).reshape(*shape, 1)}, shape)
    out = QueryModule("k")(td)
    assert out["_index"].tolist() == torch.arange(6).reshape(shape).tolist()


def test_06_a_missing_entry_is_a_key_error():
    with pytest.raises(KeyError, match="observation"):
        QueryModule("observation")(k(1))


@pytest.mark.parametrize("entry", ["hello", ["a", "b"]], ids=repr)
def test_06_an_entry_that_is_no_tensor_is_an_error(entry):
    query, td = QueryModule("k"), TensorDict({"k": entry}, [2])
    with pytest.raises(TypeError, match="k"):
        query(td)
    assert set(td.keys()) == {"k"} and len(query.hash_to_int) == 0


# ------------------------------------------------------------------------ 7: random projections


@pytest.mark.parametrize("step", [1e-3, 1e-4, 1e-6])
def test_07_wide_states_are_told_apart(step):
    generator = torch.Generator().manual_seed(0)
    one = torch.randn(500, 17, generator=generator)
    two = one.clone()
    two[torch.arange(500), torch.randint(17, (500,), generator=generator)] += step
    different = (one != two).any(1)  # 1e-6 may be less than the next float
    both = TensorDict({"k": torch.cat([one, two[different]])}, [500 + int(different.sum())])
    m = TensorDictMap.from_tensordict_pair(both, v(*range(len(both))), ["k"])
    m[both] = v(*range(len(both)))
    assert len(m) == len(both) and read_all(m, both) == list(range(len(both)))
    assert index(QueryModule("k"), {"k": both["k"]}) == list(range(len(both)))


def read_all(m, query):
    return m[query]["v"].flatten().int().tolist()


def test_07_large_numbers_are_no_infinities():
    x = 1e5 * torch.randn(10_000, 17, generator=torch.Generator().manual_seed(0))
    assert RandomProjectionHash()(x).unique().numel() == 10_000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_07_a_row_alone_and_in_a_batch_are_the_same(dtype):
    x = torch.randn(64, 40, generator=torch.Generator().manual_seed(0))
    module = RandomProjectionHash(dtype_cast=dtype)
    hashes = module(x)
    assert torch.cat([module(x[i : i + 1]) for i in range(64)]).tolist() == hashes.tolist()


@pytest.mark.parametrize("fitted", [False, True])
def test_07_can_be_saved_and_copied_before_it_is_fitted(fitted):
    x = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    module = RandomProjectionHash()
    if fitted:
        module(x)
    state = module.state_dict()
    copied, loaded = copy.deepcopy(module), RandomProjectionHash()
    loaded.load_state_dict(state)
    expected = module(x).tolist()
    assert copied(x).tolist() == loaded(x).tolist() == expected
    query = QueryModule(["a", "b"], hash_module=RandomProjectionHash())
    assert index(query, {"a": x, "b": x[:, :18]}) == [0, 1, 2]


def test_07_two_of_the_same_seed_agree_whatever_was_drawn_before():
    x = torch.randn(3, 20)
    state = torch.get_rng_state()
    first = RandomProjectionHash()(x)
    assert torch.equal(torch.get_rng_state(), state)  # nor is the global generator used
    torch.randn(7)
    assert torch.equal(RandomProjectionHash()(x), first)
    assert not torch.equal(RandomProjectionHash(seed=1)(x), first)


# -------------------------------------------------------------------------- 8: BinaryToDecimal


def test_08_chunks_can_be_told_apart():
    x = torch.tensor([[0, 0, 0, 1, 0, 0, 1, 0], [0, 0, 1, 0, 0, 0, 0, 1]])
    assert BinaryToDecimal(4, sum_chunks=False)(x).tolist() == [[1, 2], [2, 1]]
    assert BinaryToDecimal(8)(x).tolist() == [18, 33]


def test_08_moves_with_the_module_and_takes_integers():
    module = BinaryToDecimal(4, "cpu", torch.int64, convert_to_binary=True)
    assert module(torch.tensor([[0, 3, 0, -1], [1, 0, 0, 1]])).tolist() == [4, 9]
    assert all(x.is_meta for x in module.to("meta").buffers()) and list(module.buffers())


def test_08_sixty_four_bits_are_all_there():
    x = torch.randint(2, (200, 64), generator=torch.Generator().manual_seed(0))
    assert BinaryToDecimal(64, dtype=torch.int64)(x).unique().numel() == 200
    with pytest.raises(ValueError, match="num_bits=65"):
        BinaryToDecimal(65, dtype=torch.int64)


# --------------------------------------------------------------------------------- 9: HashToInt


def test_09_a_million_keys_in_batches_not_in_a_loop():
    table, keys = HashToInt(), torch.randperm(200_000, generator=torch.Generator().manual_seed(0))
    start = time.process_time()
    first = table(keys, extend=True)
    again = table(keys.flip(0), extend=False)
    took = time.process_time() - start
    assert torch.equal(first, torch.arange(200_000)) and torch.equal(again, first.flip(0))
    assert took < 0.6  # a dict in a Python loop takes more for half of it
    assert sum(x.nbytes for x in table.state_dict().values()) == 8 * 200_000


@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (1, 2, 3), (0, 3)], ids=str)
def test_09_any_shape(shape):
    keys = torch.arange(torch.Size(shape).numel()).reshape(shape) + 5
    found = HashToInt()(keys, extend=True)
    assert found.shape == shape and torch.equal(found, keys - 5)


def test_09_hooks_are_called():
    seen, table = [], HashToInt()
    table.register_forward_hook(lambda module, args, out: seen.append(out.tolist()))
    table(torch.tensor([5, 6]), extend=True)
    assert seen == [[0, 1]]


def test_09_a_limit_and_a_way_to_forget():
    table = HashToInt(max_size=2)
    table(torch.tensor([5, 6]), extend=True)
    with pytest.raises(CapacityError, match="max_size is 2"):
        table(torch.tensor([6, 7]), extend=True)
    assert len(table) == 2 and table(torch.tensor([6, 7, 5])).tolist() == [1, 2, 0]
    table.clear()
    assert len(table) == 0 and table(torch.tensor([7]), extend=True).tolist() == [0]


# ----------------------------------------------------------------- 10, 11: rows that are not there


@pytest.mark.parametrize("how", ["twice", "repeated", "repeated over old"])
def test_10_an_unseen_row_is_not_there_after_overwriting(how):
    m = make()
    if how != "repeated":
        m[k(1, 2, 3, 4)] = v(1, 2, 3, 4)
    m[k(1, 2, 3, 4) if how == "twice" else k(1, 2, 1, 3, 4, 1)] = (
        v(5, 6, 7, 8) if how == "twice" else v(5, 6, 5, 7, 8, 5)
    )
    assert len(m) == 4 and read(m, 1, 2, 3, 4) == [5, 6, 7, 8]
    assert m.contains(k(9, 1)).tolist() == [False, True]
    with pytest.raises(UnknownRowError, match="1 of 1"):
        m[k(9)]


def test_11_asking_the_query_module_does_not_poison_the_map():
    m = make()
    m[k(1, 2)] = v(1, 2)
    m.query_module(k(7, 8, 9))
    assert m.contains(k(7, 8, 9)).tolist() == [False] * 3
    m[k(8, 3)] = v(8, 3)
    assert read(m, 1, 2, 8, 3) == [1, 2, 8, 3] and len(m) == 4
    assert m.contains(k(7, 9)).tolist() == [False] * 2


BAD_VALUES = {
    "shape": TensorDict({"v": torch.zeros(1, 5), "w": torch.zeros(1)}, [1]),
    "dtype": TensorDict({"v": torch.zeros(1, 1).int(), "w": torch.zeros(1)}, [1]),
    "missing entry": v(9),
    "more entries": v(9).update({"w": torch.zeros(1), "z": torch.zeros(1)}),
    "rows": v(8, 9).set("w", torch.zeros(2)),
}


@pytest.mark.parametrize("kind", BAD_VALUES)
def test_11_26_a_write_that_fails_writes_nothing(kind):
    m = make()
    m[k(1)] = v(1).set("w", torch.ones(1))
    for number in (9, 1):
        with pytest.raises((ValueError, KeyError)):
            m[k(number)] = BAD_VALUES[kind]
        assert m.contains(k(9, 1)).tolist() == [False, True] and len(m) == 1
    td = m[k(1)]
    assert set(td.keys()) == {"v", "w"} and td["v"].item() == td["w"].item() == 1


# ---------------------------------------------------------------------- 12: full, and unseen rows


def test_12_a_full_map_says_so_and_registers_nothing():
    m = make(size=2)
    m[k(1, 2)] = v(1, 2)
    with pytest.raises(CapacityError, match="max_size is 2"):
        m[k(3)] = v(3)
    assert k(3) not in m and read(m, 2, 1) == [2, 1] and len(m) == 2
    m.delete(k(1))
    m[k(3)] = v(3)
    assert read(m, 3, 2) == [3, 2]


def test_12_or_drops_the_least_recently_used():
    m = make(max_size=2, evict="lru")
    for number in (1, 2, 3):
        m[k(number)] = v(number)
    assert m.contains(k(1, 2, 3)).tolist() == [False, True, True]


@pytest.mark.parametrize("numbers", [(), (1, 2)], ids=["empty", "filled"])
def test_12_an_unseen_row_is_a_key_error(numbers):
    m = make()
    if numbers:
        m[k(*numbers)] = v(*numbers)
    assert m.contains(k(9)).tolist() == [False]
    with pytest.raises(KeyError, match="not in the map"):
        m[k(9)]


# ----------------------------------------------------------------------- 13: what a dict can do


def test_13_clear():
    m = make()
    m[k(1, 2)] = v(1, 2)
    m.clear()
    assert len(m) == 0 and k(1) not in m


def test_13_in_for_several_rows():
    m = make()
    m[k(1, 2)] = v(1, 2)
    assert k(1, 2) in m and k(1, 3) not in m


def test_13_storage_may_be_a_dict():
    storage = {"v": TensorStorage(5), "w": TensorStorage(5)}
    m = TensorDictMap(query_module=QueryModule(["k"]), storage=storage)
    m[k(1, 2)] = v(1, 2).set("w", torch.tensor([3, 4]))
    assert read(m, 2, 1) == [2, 1] and m[k(2)]["w"].tolist() == [4]


def test_13_can_be_called_like_a_module():
    m = make()
    m[k(1, 2)] = v(1, 2)
    assert m(k(2, 1))["v"].tolist() == [[2], [1]]


def test_13_del_pop_and_iteration():
    m = make()
    m[k(1, 2, 3)] = v(1, 2, 3)
    del m[k(1)]
    assert m.pop(k(2))["v"].tolist() == [[2]]
    assert [row["k"].tolist() for row in m] == [[3]]
    assert m.keys()["k"].tolist() == m.values()["v"].tolist() == [[3]]


# --------------------------------------------------------------------- 14: one pass, not row by row


def test_14_repeated_keys_are_written_in_one_pass():
    calls = []

    def merge(values, group, num_groups):
        calls.append(num_groups)
        return values[:num_groups]

    m, count = TensorDictMap(in_keys=["k"]), 100_000
    numbers = torch.arange(count) % 1000
    query = TensorDict({"k": numbers}, [count])
    value = TensorDict({"v": torch.arange(count)}, [count])
    m[query[:10]] = value[:10]  # what is compiled is compiled
    start = time.process_time()
    m[query] = value
    there = m.contains(query)
    took = time.process_time() - start
    assert len(m) == 1000 and bool(there.all())
    assert torch.equal(m[query]["v"], numbers + count - 1000)
    assert took < 1.0  # the peer: 8 s
    m.update(query, value, merge=merge)
    assert calls == [1000]


# ------------------------------------------------------------- 15: side effects, and re-entrance


@pytest.mark.parametrize(
    "use",
    [
        lambda m, query: m.__setitem__(query, v(1, 2)),
        lambda m, query: m[query],
        lambda m, query: m.contains(query),
        lambda m, query: m.get(query, 0),
        lambda m, query: m.rows(query),
    ],
    ids="set get contains default rows".split(),
)
def test_15_the_query_is_not_changed(use):
    m, query = make(), k(1, 2)
    m[k(1, 2)] = v(1, 2)
    before = query["k"]
    use(m, query)
    assert list(query.keys()) == ["k"] and query["k"] is before


@pytest.mark.parametrize("shape", [(2, 3), (3, 1, 2)], ids=str)
def test_15_batches_of_several_dims(shape):
    m, numbers = make(), range(6)
    m[k(*numbers).reshape(shape)] = v(*numbers).reshape(shape)
    assert read(m, 5, 0) == [5, 0] and m[k(*numbers).reshape(shape)].batch_size == shape


def test_15_a_call_within_a_call():
    def ask_again(values):
        m.contains(k(1, 2))  # a batch, while a single row is read
        return values

    m = make(collate_fn=ask_again)
    m[k(1, 2)] = v(1, 2)
    assert m[k(1)[0]].batch_size == () and m[k(1, 2)].batch_size == (2,)


# ---------------------------------------------------------- 26 to 28: what the map has of storage


def test_26_rows_are_counted_once_and_read_as_copies():
    m = make()
    for _ in range(3):
        m[k(1, 2)] = v(1, 2)
    assert len(m) == len(m.keys()) == len(m.values()) == 2
    for td in (m[k(1, 2)], m.values(), m.get(k(1), 0), m[k(1)[0]]):
        td["v"].fill_(-1)
    assert read(m, 1, 2) == [1, 2]


def test_27_signal_handlers_stay_as_they_are(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    m = make()
    m[k(1)] = v(1)
    m.save(tmp_path / "map")
    m = TensorDictMap.load(tmp_path / "map")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_27_a_folder_can_be_used_again(tmp_path):
    m = make()
    for number in (1, 2):
        m[k(number)] = v(number)
        m.save(tmp_path / "map")
    assert read(TensorDictMap.load(tmp_path / "map"), 2, 1) == [2, 1]


def test_28_nothing_is_printed_or_logged(capfd, caplog, tmp_path):
    with caplog.at_level(0):
        m = TensorDictMap.from_tensordict_pair(k(1), v(1), ["k"])
        m[k(1, 2)] = v(1, 2)
        m.save(tmp_path / "map")
        TensorDictMap.load(tmp_path / "map")[k(1)]
    assert capfd.readouterr() == ("", "") and not caplog.records
