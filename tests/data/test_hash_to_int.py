"""HashToInt: hashes to dense indices, as a module."""

import copy
import multiprocessing
import pickle
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn, tensor

from raffia.data.hash_to_int import HashToInt
from raffia.data.table import CapacityError

LEAST, MOST = -(2**63), 2**63 - 1


@pytest.fixture
def to_int():
    return HashToInt()


# --- indices -------------------------------------------------------------------------------------


def test_indices_are_dense_in_order_of_first_appearance(to_int):
    assert to_int(tensor([40, -1, 40, LEAST]), extend=True).tolist() == [0, 1, 0, 2]
    assert to_int(tensor([MOST, LEAST, 0, -1]), extend=True).tolist() == [3, 2, 4, 1]
    assert len(to_int) == 5


def test_unknown_hashes_give_the_length_and_are_not_added(to_int):
    assert to_int(tensor([4, 5])).tolist() == [0, 0]
    to_int(tensor([40, 41]), extend=True)
    assert to_int(tensor([5, 41, 6, 40])).tolist() == [2, 1, 2, 0]
    assert len(to_int) == 2


@pytest.mark.parametrize("shape", [(), (1,), (6,), (2, 3), (3, 1, 2), (0,), (2, 0)])
def test_any_shape(to_int, shape):
    size = torch.Size(shape).numel()
    key = torch.arange(7, 7 + size).reshape(shape)
    expected = torch.arange(size).reshape(shape)
    assert torch.equal(to_int(key, extend=True), expected)
    assert torch.equal(to_int(key), expected)


def test_any_strides(to_int):
    key = tensor([[5, 6, 7], [8, 9, 5]])
    assert to_int(key.T, True).tolist() == [[0, 1], [2, 3], [4, 0]]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.uint64])
def test_integers_of_any_dtype_are_hashes(to_int, dtype):
    index = to_int(tensor([100, 3, 100], dtype=dtype), extend=True)
    assert index.dtype == torch.int64  # an int8 could not count the values of an int8
    assert to_int(tensor([3, 100])).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("key", "seen"),
    [(tensor([1.0]), "torch.float32 tensor"), (tensor([True]), "torch.bool"), ([1, 2], "list")],
)
def test_what_is_no_hash_is_refused(to_int, key, seen):
    with pytest.raises(TypeError, match=f"tensor of integers.*got .*{seen}.*SipHash"):
        to_int(key, extend=True)


def test_many_keys_equal_a_dict(to_int):
    batches = torch.randint(-300, 300, (20, 50), generator=torch.Generator().manual_seed(0))
    model = {}
    for batch in batches:
        expected = [model.setdefault(key, len(model)) for key in batch.tolist()]
        assert to_int(batch, extend=True).tolist() == expected
    assert len(to_int) == len(model)


def test_clear(to_int):
    to_int(tensor([5, 6]), extend=True)
    to_int.clear()
    assert len(to_int) == 0
    assert to_int(tensor([6]), extend=True).tolist() == [0]


def test_repr_says_how_full_it_is():
    to_int = HashToInt(max_size=9)
    to_int(tensor([5, 6]), extend=True)
    assert repr(to_int) == "HashToInt(len=2, max_size=9)"


# --- capacity ------------------------------------------------------------------------------------


def test_past_max_size_nothing_is_added():
    to_int = HashToInt(max_size=3)
    to_int(tensor([5, 6]), extend=True)
    with pytest.raises(CapacityError, match="2 new rows do not fit: 2 are here and max_size is 3"):
        to_int(tensor([7, 5, 8]), extend=True)
    assert len(to_int) == 2
    assert to_int(tensor([8, 6]), extend=True).tolist() == [2, 1]
    with pytest.raises(ValueError, match="max_size=-1"):
        HashToInt(max_size=-1)


def test_a_state_past_max_size_is_refused():
    large, small = HashToInt(), HashToInt(max_size=2)
    large(torch.arange(3), extend=True)
    small(tensor([9]), extend=True)
    with pytest.raises(CapacityError, match="3 hashes does not fit: max_size is 2"):
        small.load_state_dict(large.state_dict())
    assert small(tensor([9])).tolist() == [0]


# --- content -------------------------------------------------------------------------------------


def test_content_tells_equal_hashes_apart(to_int):
    key, content = tensor([[7, 7], [8, 7]]), tensor([[[1, 1], [1, 2]], [[1, 1], [1, 1]]])
    assert to_int(key, extend=True, content=content).tolist() == [[0, 1], [2, 0]]
    assert to_int(key[0], content=content[0].flip(0)).tolist() == [1, 0]
    assert to_int(tensor([7]), content=tensor([[2, 2]])).tolist() == [3]
    assert to_int(tensor(7), content=tensor([1, 2])).tolist() == 1


def test_content_and_none_are_not_mixed(to_int):
    assert to_int(tensor([5])).tolist() == [0]  # decides nothing
    to_int(tensor([5]), extend=True, content=tensor([[1, 1]]))
    with pytest.raises(
        ValueError, match="1 hashes with content of 2 words, but was called without"
    ):
        to_int(tensor([5]))
    with pytest.raises(ValueError, match="called with content of 1 words"):
        to_int(tensor([5]), extend=True, content=tensor([[1]]))
    to_int.clear()
    assert to_int(tensor([5]), extend=True).tolist() == [0]
    with pytest.raises(ValueError, match="without content, but was called with content of 2 words"):
        to_int(tensor([5]), content=tensor([[1, 1]]))


@pytest.mark.parametrize("content", [tensor([[1], [2]]), tensor([[1.0]]), tensor([1]), tensor(1)])
def test_content_of_another_shape_is_refused(content):
    with pytest.raises(ValueError, match=r"int64 of shape \[\*key.shape, words\].* \[1, 'words'\]"):
        HashToInt()(tensor([5]), extend=True, content=content)


# --- a module ------------------------------------------------------------------------------------


def filled(content=False):
    to_int = HashToInt()
    words = tensor([[1], [2], [2]]) if content else None
    to_int(tensor([7, 7, -1]), extend=True, content=words)
    return to_int


@pytest.mark.parametrize("content", [False, True])
def test_the_state_goes_through_safetensors(tmp_path, content):
    saved = nn.ModuleDict({"query": nn.Sequential(nn.Linear(1, 1), filled(content))})
    state = saved.state_dict()
    hashes = state["query.1._extra_state"]
    assert hashes.tolist() == ([[7, 1], [7, 2], [-1, 2]] if content else [7, -1])
    save_file(state, tmp_path / "state.safetensors")
    fresh = nn.ModuleDict({"query": nn.Sequential(nn.Linear(1, 1), HashToInt())})
    fresh.load_state_dict(load_file(tmp_path / "state.safetensors"))
    more, words = tensor([30, -1, 7]), tensor([[2], [2], [2]]) if content else None
    for module in (saved, fresh):
        index = module["query"][1](more, extend=True, content=words)
        assert index.tolist() == ([3, 2, 1] if content else [2, 1, 0])
    assert hashes.shape[0] == (3 if content else 2)  # the state is a copy


def test_an_empty_one_has_a_state():
    to_int = filled()
    to_int.load_state_dict(HashToInt().state_dict())
    assert len(to_int) == 0


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (tensor([5, 5]), "row 1 is the same as a row before it"),
        (tensor([5.0]), r"int64 \[len\] .* got torch.float32 \[1\]"),
        (tensor(5), r"got torch.int64 \[\]"),
        ("hashes", "got 'hashes'"),
    ],
)
def test_what_is_no_state_is_refused(state, why):
    to_int = filled()
    with pytest.raises(ValueError, match=why):
        to_int.load_state_dict({"_extra_state": state})
    assert to_int(tensor([-1, 7])).tolist() == [1, 0]


def test_a_strict_load_wants_the_hashes():
    with pytest.raises(RuntimeError, match="Missing key.*_extra_state"):
        HashToInt().load_state_dict({})


def test_hooks_fire():
    to_int, seen = HashToInt(), []
    to_int.register_forward_hook(lambda module, args, result: seen.append(result.tolist()))
    to_int(tensor([5, 5]), extend=True)
    assert seen == [[0, 0]]


def test_copies():
    original = filled()
    shared, apart = copy.copy(original), copy.deepcopy(original)
    loaded = pickle.loads(pickle.dumps(original))
    original(tensor([100]), extend=True)
    assert [len(x) for x in (original, shared, apart, loaded)] == [3, 3, 2, 2]
    assert apart(tensor([-1, 9]), extend=True).tolist() == [1, 2]
    assert loaded(tensor([-1, 9]), extend=True).tolist() == [1, 2]
    assert len(original) == 3


def test_moving_a_module_keeps_its_indices():
    to_int = nn.Sequential(filled()).to("cpu").half().double()[0]
    assert to_int(tensor([-1, 7])).tolist() == [1, 0]


@pytest.mark.gpu
def test_keys_and_module_may_lie_on_different_devices():
    to_int = filled()
    assert to_int(tensor([-1], device="cuda")).device.type == "cuda"
    to_int.cuda()
    assert to_int(tensor([-1, 5]), extend=True).tolist() == [1, 2]
    assert to_int(tensor([5], device="cuda")).device.type == "cuda"


# --- threads and processes -----------------------------------------------------------------------


def test_threads_agree_on_one_numbering(to_int):
    keys = torch.randint(LEAST, MOST, (3000,), generator=torch.Generator().manual_seed(0))
    start, seen = threading.Barrier(4), []

    def extend(worker):
        order = torch.randperm(3000, generator=torch.Generator().manual_seed(worker))
        start.wait()
        for part in order.split(100):
            index = to_int(keys[part], extend=True)
            seen.append((part, index))

    threads = [threading.Thread(target=extend, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    final = to_int(keys)
    assert len(seen) == 4 * 30
    assert len(to_int) == 3000
    assert final.sort().values.tolist() == list(range(3000))
    for part, index in seen:
        assert torch.equal(final[part], index)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_read(method):
    to_int = HashToInt()
    to_int(torch.arange(100, 200), extend=True)
    with multiprocessing.get_context(method).Pool(1) as pool:
        index = pool.apply(to_int, (tensor([150, 5, 199]),))
    assert index.tolist() == [50, 100, 99]
