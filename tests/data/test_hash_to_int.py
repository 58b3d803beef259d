"""HashToInt: hashes to dense indices, as a module."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn, tensor

from raffia.data.query import HashToInt
from raffia.data.table import CapacityError

LEAST, MOST = -(2**63), 2**63 - 1


def filled(content=False):
    to_int = HashToInt()
    words = tensor([[1, 0], [2, 0], [2, 5]]) if content else None
    to_int(tensor([7, 7, -1]), extend=True, content=words)
    return to_int


@pytest.mark.parametrize("shape", [(50,), (), (5, 1, 10), (2, 0)], ids=str)
@pytest.mark.parametrize("with_content", [False, True])
def test_indices_equal_those_of_a_dict(shape, with_content):
    rng, size = torch.Generator().manual_seed(0), torch.Size(shape).numel()
    to_int, known = HashToInt(), {}
    for _ in range(15):
        key = torch.randint(-30, 30, (size,), generator=rng)
        key[torch.rand(size, generator=rng) < 0.1] = LEAST
        key[torch.rand(size, generator=rng) < 0.1] = MOST
        words = torch.randint(0, 2, (size, 2 * with_content), generator=rng)
        pairs = list(zip(key.tolist(), map(tuple, words.tolist()), strict=True))
        options = {"content": words.reshape(*shape, 2)} if with_content else {}
        expected = [known.get(pair, len(known)) for pair in pairs]  # the length if unknown
        assert to_int(key.reshape(shape), **options).flatten().tolist() == expected
        expected = [known.setdefault(pair, len(known)) for pair in pairs]
        found = to_int(key.reshape(shape), extend=True, **options)
        assert found.shape == shape and found.flatten().tolist() == expected
    assert len(to_int) == len(known)


def test_integers_of_any_dtype_and_strides_are_hashes():
    for dtype in [torch.int8, torch.uint8, torch.int32, torch.uint64]:
        to_int = HashToInt(max_size=9)
        index = to_int(tensor([[100, 3], [4, 100]], dtype=dtype).T, extend=True)
        assert index.tolist() == [[0, 1], [2, 0]]
        assert index.dtype == torch.int64  # an int8 could not count the values of an int8
    assert repr(to_int) == "HashToInt(len=3, max_size=9)"


def test_past_max_size_nothing_is_added():
    to_int, large = HashToInt(max_size=3), HashToInt()
    to_int(tensor([5, 6]), extend=True)
    large(torch.arange(4), extend=True)
    with pytest.raises(CapacityError, match="2 new rows do not fit: the .* holds 2, and max_size"):
        to_int(tensor([7, 5, 8]), extend=True)
    with pytest.raises(CapacityError, match="4 hashes does not fit into max_size=3"):
        to_int.load_state_dict(large.state_dict())
    assert len(to_int) == 2 and to_int(tensor([8, 6]), extend=True).tolist() == [2, 1]


WORDS = tensor([[1, 1]])
REFUSED = [
    (lambda t: t(tensor([1.0]), True), TypeError, "of integers.*got .*torch.float32.*SipHash"),
    (lambda t: t([1, 2]), TypeError, "tensor of integers.*got .*list.*SipHash"),
    (lambda t: t(tensor([5]), content=WORDS), ValueError, "without content, but was called with"),
    *[
        (lambda t, c=c: t(tensor([5]), content=c), ValueError, r"of shape \[\*key.shape, words\]")
        for c in (tensor([[1], [2]]), tensor([[1.0]]), tensor([1]), tensor(1))
    ],
    *[
        (lambda t, s=s: t.load_state_dict({"_extra_state": s}), ValueError, match)
        for s, match in [
            (tensor([5, 5]), "row 1 is equal to an earlier row"),
            (tensor([5.0]), r"int64 of shape \[len\] .* got torch.float32 \[1\]"),
            ("hashes", "got 'hashes'"),
        ]
    ],
    (lambda t: t.load_state_dict({}), RuntimeError, "Missing key.*_extra_state"),
    (lambda t: HashToInt(max_size=-1), ValueError, "max_size=-1"),
]


@pytest.mark.parametrize(("call", "error", "match"), REFUSED)
def test_a_refused_call_changes_nothing(call, error, match):
    to_int = filled()
    with pytest.raises(error, match=match):
        call(to_int)
    assert to_int(tensor([-1, 7, 9])).tolist() == [1, 0, 2] and len(to_int) == 2


# --- a module ------------------------------------------------------------------------------------


def test_copies_moves_and_hooks():
    original, results = filled(), []
    shared, apart = copy.copy(original), copy.deepcopy(original)
    loaded = pickle.loads(pickle.dumps(original))
    original.register_forward_hook(lambda module, args, result: results.append(result.tolist()))
    original(tensor([100, 100]), extend=True)
    assert results == [[2, 2]]
    assert [len(x) for x in (original, shared, apart, loaded)] == [3, 3, 2, 2]
    for other in (apart, nn.Sequential(loaded).to("cpu").half().double()[0]):
        assert other(tensor([-1, 9]), extend=True).tolist() == [1, 2]


@pytest.mark.gpu
def test_keys_and_module_may_be_on_different_devices():
    to_int = filled()
    assert to_int(tensor([-1], device="cuda")).device.type == "cuda"
    to_int.cuda()
    assert to_int(tensor([-1, 5]), extend=True).tolist() == [1, 2]
    assert to_int(tensor([5], device="cuda")).device.type == "cuda"


def test_threads_agree_on_one_numbering():
    to_int = HashToInt()
    keys = torch.randint(LEAST, MOST, (3000,), generator=torch.Generator().manual_seed(0))
    start = threading.Barrier(4)

    def extend(worker):
        order = torch.randperm(3000, generator=torch.Generator().manual_seed(worker))
        start.wait()
        return [(part, to_int(keys[part], extend=True)) for part in order.split(100)]

    with ThreadPoolExecutor(4) as pool:
        pairs = [pair for found in pool.map(extend, range(4)) for pair in found]
    final = to_int(keys)
    assert len(pairs) == 4 * 30 and final.sort().values.tolist() == list(range(3000))
    assert all(torch.equal(final[part], index) for part, index in pairs)


def test_content_and_none_are_not_mixed():
    to_int = HashToInt()
    assert to_int(tensor([5])).tolist() == [0]  # decides nothing
    to_int(tensor(5), extend=True, content=WORDS[0])
    with pytest.raises(ValueError, match="1 hashes with content of 2 words, but was called with"):
        to_int(tensor([5]))
    with pytest.raises(ValueError, match="called with content of 1 words"):
        to_int(tensor([5]), extend=True, content=tensor([[1]]))
    to_int.clear()
    assert to_int(tensor([5]), extend=True).tolist() == [0]
