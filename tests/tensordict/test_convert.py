"""Devices and dtypes, gradients, fills, copies, consolidation, pickles and plain-Python forms."""

import copy
import io
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

from raffia import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictParams,
    assert_allclose_td,
    assert_close,
    from_consolidated,
    lazy_stack,
)
from raffia.tensordict import copies
from tests.tensordict.invariants import sound
from tests.tensordict.kinds import raises
from tests.tensordict.stored import PLAIN, RAGGED, Pair, content

B, T = 2, 3
CPU, META = torch.device("cpu"), torch.device("meta")


def make(**kwargs):
    return TensorDict(
        {
            "a": torch.arange(B * T * 1.0).reshape(B, T),
            "i": torch.arange(B),
            "n": {"b": torch.arange(B) + 0.5, "s": "text"},
        },
        [B],
        **kwargs,
    )


def floats(**kwargs):
    entries = {"a": make()["a"], "n": {"b": make()["n", "b"]}}
    return TensorDict(entries, [B], **kwargs)


def params():
    weights = {"w": nn.Parameter(torch.ones(B, T)), "n": {"b": nn.Parameter(torch.ones(T))}}
    return TensorDict(weights | {"buffer": torch.zeros(T)})


KINDS = {
    "plain": make,
    "dressed": lambda: make(device="cpu", names=["t"]),
    "locked": lambda: make(lock=True),
    "lazy": lambda: lazy_stack([make(), make() + 1], 0),
    "lazy 1": lambda: lazy_stack([make(), make() + 1], 1),
    "uneven": lambda: lazy_stack([TensorDict({"a": torch.ones(n)}) for n in (2, 3)]),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def leaves(td):
    return td._leaves([])


def test_addresses():
    td = TensorDict(
        a=torch.ones(2, 2), n={"b": torch.ones(2, 2), "e": {}}, s="text", batch_size=[2]
    )
    stack = lazy_stack([TensorDict(a=torch.ones(n)) for n in (1, 2)])
    found = td.data_ptr()
    assert set(found.keys(True, True)) == {"a", ("n", "b")} and found.batch_size == ()
    assert found["n", "b"] == td["n", "b"].data_ptr() and found.device == CPU and sound(found)
    assert (td[None].data_ptr() == found).all() and not (td[1:].data_ptr() == found).any()
    assert (td[1:].data_ptr(storage=True) == td.data_ptr(storage=True)).all()
    assert stack.data_ptr()["1", "a"] == stack[1]["a"].data_ptr()


# ------------------------------------------------------------------------- devices and dtypes

DTYPES = (
    *(torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)
CASTS = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
CASTS |= {"float": torch.float32, "half": torch.float16, "double": torch.float64}
CASTS["int"] = torch.int32


@kinds
def test_casts(kind):
    for name, dtype in CASTS.items():
        for cast in (
            lambda td, name=name: getattr(td, name)(),
            lambda td, dtype=dtype: td.to(dtype),
            lambda td, dtype=dtype: td.to(dtype=dtype),
            lambda td, dtype=dtype: td.type(dtype),
        ):
            td = KINDS[kind]()
            before, out = content(td), cast(td)
            assert content(out) == content(td.apply(lambda x, dtype=dtype: x.to(dtype)))
            assert content(td) == before and type(out) is type(td) and sound(out)
            assert out.is_locked == td.is_locked and out.device == td.device
            pairs = zip(leaves(td), leaves(out), strict=True)
            assert all([new is old for old, new in pairs if old.dtype is dtype])
    if kind != "locked":
        td = KINDS[kind]()
        assert td.to(torch.float64, inplace=True) is td
        assert {leaf.dtype for leaf in leaves(td)} == {torch.float64}


@pytest.mark.parametrize("wrap", [lambda td: td, lambda td: lazy_stack([td, td]), TensorDictParams])
def test_views_as_another_dtype(wrap):
    td = wrap(TensorDict(a=torch.ones(2, 3), n={"b": torch.ones(2)}, s="text", batch_size=[2]))
    out = td.view(torch.int32)
    assert torch.equal(out["n", "b"], td["n", "b"].view(torch.int32)) and sound(out)
    assert out.batch_size == td.batch_size
    with pytest.raises(RuntimeError, match=r"for key 'b'"):  # two rows of it would be four
        td.view(torch.int16)
    out = td.view(torch.int16, batch_size=[])
    assert out.batch_size == () and out["n", "b"].shape[-1] == 4 and sound(out)


@kinds
@pytest.mark.parametrize("device", ["cpu", CPU, "meta", META], ids=str)
def test_devices(kind, device):
    td = KINDS[kind]()
    was, result = td.device, td.to(device)
    assert td.device == was and type(result) is type(td) and sound(result)
    assert result.device == torch.device(device) and result.is_locked == td.is_locked
    assert (result.batch_size, result.names) == (td.batch_size, td.names)
    assert {leaf.device for leaf in leaves(result)} == {torch.device(device)}
    assert result.to(device) is result and result.to(device=device) is result
    if str(device) == "cpu":  # tensors that need no move are shared
        assert content(result) == content(td)
        assert [id(x) for x in leaves(result)] == [id(x) for x in leaves(td)]
        assert content(td.cpu()) == content(td) and td.cpu().device == CPU
        assert content(td.to("cpu", non_blocking=True)) == content(td)
    elif kind != "uneven":
        assert result["n", "s"] == td["n", "s"]
    for kwargs in ({}, {"device": None}, {"non_blocking": True}):
        assert td.to(**kwargs) is td


def test_forms_of_a_target():
    wanted = floats(device="cpu").double()
    for args, kwargs in [
        (("cpu", torch.float64), {}),
        (("cpu",), {"dtype": torch.float64}),
        ((), {"device": "cpu", "dtype": torch.float64}),
        ((torch.ones((), dtype=torch.float64),), {}),
        ((), {"other": wanted}),
    ]:
        out = make().to(*args, **kwargs)
        assert out.device == CPU and out.dtype is torch.float64
    assert make().to(other=make(device="cpu")).dtype is None
    for bad in ("nope", dict):
        with pytest.raises((TypeError, RuntimeError)):
            make().to(bad)
    for td in (make(), TensorDictParams(make())):
        for where, dtype in ((torch.float64, torch.float64), ("cpu", td["a"].dtype)):
            with td.to(where) as other:  # written back
                assert other["a"].dtype is dtype
                other["a"] = other["a"].detach() + 1
        assert torch.equal(td["a"].float(), make()["a"] + 2)
    assert make().to(batch_size=[]).batch_size == () and make().batch_size == (B,)
    td = make(device="meta")
    td["q"] = torch.ones(B)
    assert td["q"].device == META and td.is_meta and not td.is_cuda and make(device="cpu").is_cpu
    td = make(device="cpu")
    assert td.clear_device_() is td and td.device is None and td["n"].device is None
    assert make().auto_device_().device == CPU
    assert floats().dtype is torch.float32 and make().dtype is None
    assert floats().is_floating_point() and not make().is_floating_point()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without an accelerator")
def test_cuda_and_pinning_without_an_accelerator():
    with pytest.raises((AssertionError, RuntimeError)):
        make().cuda()
    with pytest.raises(TypeError, match="device"):
        make().cuda(1.5)
    with pytest.raises(RuntimeError, match="must not be empty"):
        make().cuda("")
    with pytest.raises(RuntimeError):
        make().pin_memory()


@pytest.mark.gpu
def test_cuda():
    td = make().cuda()
    assert td.device.type == "cuda" and td["n", "b"].is_cuda and td.is_cuda
    assert td.to("cuda") is td and content(td.cpu()) == content(make())
    pinned = make().pin_memory()
    assert pinned["n", "b"].is_pinned() and pinned.batch_size == (B,)
    assert content(pinned.to("cuda", non_blocking=True).cpu()) == content(make())


# ------------------------------------------------------------------------------- gradients


def test_backward():
    for backward, scale in [
        (lambda td: td.pow(2).sum(reduce=True).backward(), 2),
        (lambda td: td.pow(2).sum().backward(), 2),
        (lambda td: td.pow(2).backward(floats() * 0 + 3), 6),
    ]:
        td = floats().requires_grad_()
        backward(td)
        assert content(td.grad) == content(floats() * scale)
        assert td.zero_grad(set_to_none=False) is td and not td.grad["a"].any()
        td.zero_grad()
        assert td.grad is None
    td = floats()
    td["a"].requires_grad_().sum().backward()
    assert list(td.grad.keys(True, True)) == ["a"]
    with pytest.raises(RuntimeError, match="requir"):
        floats().backward()
    with pytest.raises(RuntimeError, match="scalar"):
        floats().requires_grad_().pow(2).backward()


@pytest.mark.parametrize("locked", [False, True])
def test_detach_and_data(locked):
    td = params().lock_() if locked else params()
    for out in (td.detach(), td.data):
        assert out is not td and not out.requires_grad and type(out["w"]) is torch.Tensor
        assert out["w"].data_ptr() == td["w"].data_ptr()
        assert out.is_locked is locked and td.requires_grad
    td.data.zero_()
    assert not td["w"].any() and not td["n", "b"].any()
    td = params()
    td.data = td.data * 0 + 1
    assert isinstance(td["w"], nn.Parameter) and (td["w"] == 1).all()
    td = floats().requires_grad_() * 2
    leaf = td["a"]
    assert td.detach_() is td and td["a"] is leaf and not td.requires_grad
    assert td[:1].detach_()["a"].shape == td[:1]["a"].shape  # views without a gradient
    td = lazy_stack([params(), params()])
    assert td.requires_grad
    for out in (td.data, td.detach()):
        assert type(out) is LazyStackedTensorDict and not out.requires_grad


# ---------------------------------------------------------------------------- filled in place


def test_writing_in_place_of_some():
    td = make().copy_(TensorDict({"a": torch.ones(B, T)}, [B]))
    assert (td["a"] == 1).all() and torch.equal(td["n", "b"], make()["n", "b"])
    assert td.copy_at_(make()[0] + 9, 1) is td
    assert torch.equal(td["a"][1], make()["a"][0] + 9) and (td["a"][0] == 1).all()
    with pytest.raises(KeyError):
        make().copy_(TensorDict({"zz": torch.ones(B)}, [B]))
    with pytest.raises(TypeError):
        make().fill_("a", "text")


# ------------------------------------------------------------------------------------ copies

SHALLOW = {
    "clone(False)": lambda td: td.clone(False),
    "copy": lambda td: td.copy(),
    "copy.copy": copy.copy,
}
DEEP = {"clone": lambda td: td.clone(), "torch": torch.clone, "deepcopy": copy.deepcopy}


@kinds
def test_copies(kind):
    for name, fn in (SHALLOW | DEEP).items():
        td = KINDS[kind]()
        out = fn(td)
        assert type(out) is type(td) and out is not td and content(out) == content(td)
        assert out.device == td.device and not out.is_locked and sound(out)
        shared = [new is old for old, new in zip(leaves(td), leaves(out), strict=True)]
        assert all(shared) if name in SHALLOW else not any(shared)
        addresses = [{leaf.data_ptr() for leaf in leaves(x)} for x in (td, out)]
        assert addresses[0].isdisjoint(addresses[1]) == (name in DEEP)
        if isinstance(td, LazyStackedTensorDict):
            assert out.tensordicts[0] is not td.tensordicts[0]
        else:
            out["n"].set("q", torch.ones(B))
            assert ("n", "q") not in td.keys(True) and not out["n"].is_locked
    weights = params()
    assert type(weights.clone()["w"]) is torch.Tensor and not weights.clone()["w"].is_leaf
    assert weights.clone()["w"].requires_grad
    assert isinstance(weights.clone(False)["w"], nn.Parameter)


def test_contiguous_and_dense():
    td = TensorDict({"a": torch.ones(T, B).t(), "n": {"b": torch.ones(B)}}, [B])
    out = td.contiguous()
    assert not td.is_contiguous() and not TensorDict(n=td).is_contiguous()
    assert out.is_contiguous() and content(out) == content(td)
    assert out["n", "b"] is td["n", "b"]
    nested = td["n", "b"]
    assert td.contiguous(inplace=True) is td and td["a"].is_contiguous() and td["n", "b"] is nested
    strided = torch.zeros(1, 3).as_strided((1, 3), (7, 1))
    td = TensorDict(a=strided, b=torch.ones(1, 3))
    assert strided.is_contiguous() and td.contiguous()["a"] is strided
    out = td.contiguous(canonical=True)
    assert out["a"].stride() == (3, 1) and out["b"] is td["b"]
    lazy = KINDS["lazy"]()
    assert not lazy.is_contiguous() and type(lazy.contiguous()) is TensorDict
    assert_close(lazy.contiguous(), lazy)
    td = make()
    assert td.densify() is td
    td["stack"] = lazy_stack([TensorDict(), TensorDict()])
    assert td.densify() is not td and type(td.densify()["stack"]) is TensorDict


# ---------------------------------------------------------------------------- sizes and new_*


def test_sizes():
    assert (make().numel(), TensorDict({}, [B, T]).numel(), TensorDict().numel()) == (B, B * T, 1)
    assert make().bytes() == 4 * B * T + 8 * B + 4 * B and TensorDict().bytes() == 0
    assert KINDS["lazy"]().bytes() == 2 * make().bytes()
    x = torch.ones(B)
    td = TensorDict({"a": x, "b": x}, [B])
    assert td.bytes() == 16 and td.bytes(count_duplicates=False) == 8


@pytest.mark.parametrize("size", [(4,), (4, 5), ((4, 5),), (torch.Size([4]),)], ids=str)
@pytest.mark.parametrize("name, value", [("zeros", 0), ("ones", 1), ("empty", None), ("full", 3)])
def test_new(name, value, size):
    """Equals a stack of new containers of that size: leaves keep their other dims."""
    batch = torch.Size(size[0] if isinstance(size[0], tuple) else size)
    for td in (make(), make(device="cpu"), lazy_stack([make()])[0]):
        result = getattr(td, f"new_{name}")(*((batch, 3) if name == "full" else size))
        assert result.batch_size == result["n"].batch_size == batch and result.device == td.device
        for old, new in zip(leaves(td), leaves(result), strict=True):
            assert new.shape == (*batch, *old.shape[1:]) and new.dtype == old.dtype
            assert value is None or (new == value).all()
        assert result["n"][0]["s"] == "text" or result["n"].get("s").tolist()
    assert make().new_zeros(4, device="meta").device == META
    assert floats().new_zeros(4, requires_grad=True).requires_grad
    assert floats().new_zeros(4, layout=torch.sparse_coo)["a"].is_sparse
    assert KINDS["lazy"]().new_ones(4, 5)["a"].shape == (4, 5, T)


def test_new_tensor_and_empty():
    result = make().new_tensor([1.0, 2.0])
    assert result.batch_size == (2,) and make().new_tensor(3.0).batch_size == ()
    assert [(x.tolist(), x.dtype) for x in leaves(result)] == [
        *(([1.0, 2.0], torch.float32), ([1, 2], torch.int64), ([1.0, 2.0], torch.float32))
    ]
    td = TensorDict({}, [2, 3], names=["x", "y"])
    assert td.empty(batch_size=[2]).names == ["x"] and td.empty(batch_size=[3]).names == [None]


# -------------------------------------------------------------------------------- plain Python


def test_numpy():
    td = make()
    result = td.numpy()
    assert type(result) is dict and result["n"]["s"] == "text"
    assert isinstance(result["n"]["b"], np.ndarray)
    assert result["a"].tolist() == td["a"].tolist()
    result["a"][0, 0] = 9
    assert td["a"][0, 0] == 9
    assert KINDS["lazy"]().numpy()["a"].shape == (2, B, T)
    with pytest.raises(RuntimeError, match="grad"):
        params().numpy()
    td = floats().requires_grad_()
    assert td.to_struct_array()["a"].tolist() == td["a"].tolist()


LISTED = [
    (
        TensorDict({"a": torch.arange(4).reshape(2, 2), "s": "text"}, [2]),
        [{"a": [0, 1], "s": "text"}, {"a": [2, 3], "s": "text"}],
    ),
    (TensorDict({"a": torch.arange(2), "n": {"b": torch.tensor(1)}}), {"a": [0, 1], "n": {"b": 1}}),
    (TensorDict({"a": torch.eye(2)}, [2, 2]), [[{"a": 1}, {"a": 0}], [{"a": 0}, {"a": 1}]]),
    (lazy_stack([TensorDict(a=torch.arange(n)) for n in (1, 2)]), [{"a": [0]}, {"a": [0, 1]}]),
]


@pytest.mark.parametrize("td, rows", LISTED, ids=["rows", "no batch", "two dims", "lazy"])
def test_tolist(td, rows):
    assert td.tolist(convert_tensors=True) == rows
    if td.batch_dims == 1:
        assert [row["a"].tolist() for row in td.tolist()] == [row["a"] for row in rows]
        assert isinstance(td.tolist(convert_tensors="numpy")[0]["a"], np.ndarray)
        plain = TensorDict(n=td, s="s").to_dict(convert_tensors=True, tolist_first=True)
        assert plain == {"n": rows, "s": "s"}
        nodes = td.tolist(convert_nodes=False)
        assert all([isinstance(x, TensorDict) and x.batch_size == () for x in nodes])


# ----------------------------------------------------------------------------------- state dicts


@pytest.mark.parametrize("kind", ["plain", "dressed", "locked", "lazy"])
@pytest.mark.parametrize("flatten", [True, False])
def test_state_dicts_are_loaded(kind, flatten):
    td, other = KINDS[kind](), KINDS[kind]().apply(lambda x: x + 1)
    state = copy.deepcopy(other.state_dict(flatten=flatten))
    originals = leaves(td)
    assert td.load_state_dict(state) is td and content(td) == content(other)
    assert [id(leaf) for leaf in leaves(td)] == [id(leaf) for leaf in originals]


def test_invalid_state_dicts_are_refused():
    td, state = make(), (make() + 1).state_dict()
    td.load_state_dict(state, assign=True)
    assert td["a"] is state["a"]
    td = TensorDict()
    td.load_state_dict(make().state_dict(), strict=False)
    assert content(td) == content(make())
    state = make().exclude("a").state_dict()
    with pytest.raises(RuntimeError, match="a"):
        make().load_state_dict(state)
    td = (make() + 1).load_state_dict(state, strict=False)
    assert torch.equal(td["a"], make()["a"] + 1) and torch.equal(td["n", "b"], make()["n", "b"])


# ---------------------------------------------------------------------- pickles and one block


def pickled(x):
    return pickle.loads(pickle.dumps(x))


def saved(x):
    """Through torch.save, and torch.load with its default, which reads weights only."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


PICKLES = KINDS | PLAIN
PICKLES["a block"] = lambda: make().exclude(("n", "s")).consolidate(metadata=True)
PICKLES["a class"] = lambda: Pair(x=torch.ones(2), tag="t", batch_size=[2])
PICKLES["classes"] = lambda: lazy_stack([Pair(x=torch.ones(2)), Pair(x=torch.ones(3))])
PICKLES["data"] = lambda: NonTensorData("a", [2])
PICKLES["data of rows"] = lambda: NonTensorStack("a", "b")
del PICKLES["dtypes"]  # torch pickles not all of them


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("name", PICKLES)
def test_pickles(name, locked):
    for way in (pickled,) if name in ("values", "shapes") else (pickled, saved):
        td = PICKLES[name]()
        td = td.lock_() if locked else td
        out = way(td)
        assert type(out) is type(td) and content(out) == content(td) and sound(out)
        assert (out.is_locked, out.device) == (td.is_locked, td.device)
        assert [type(leaf) for leaf in leaves(out)] == [type(leaf) for leaf in leaves(td)]
        if locked and name in ("plain", "dressed", "lazy"):
            with pytest.raises(RuntimeError, match="locked"):
                out["n"]["q"] = torch.ones(B)


def mixed():
    return TensorDict(
        {
            "a": torch.tensor([True, False, True]),
            "b": torch.ones(3, dtype=torch.float64),
            "c": torch.ones(3, dtype=torch.bfloat16),
            "d": torch.ones(3, dtype=torch.complex64),
            "e": torch.zeros(3, 0),
            "t": torch.arange(6).reshape(2, 3).t(),
        },
        [3],
    )


BLOCKS = {name: make for name, make in KINDS.items() if name != "locked"} | PLAIN | {"mixed": mixed}
del BLOCKS["dtypes"]  # dtypes of less than a byte cannot be in a block
OPTIONS = [
    *({}, {"metadata": True}, {"num_threads": 2}, {"inplace": True}, {"share_memory": True}),
    *({"filename": "td"}, {"filename": "td", "use_buffer": True}),
    *({"filename": "td", "inplace": True}, {"return_early": True, "num_threads": 2}),
    {"filename": "td", "return_early": True, "num_threads": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_one_block(name, options, tmp_path):
    td = BLOCKS[name]()
    if "inplace" in options and "f" in td:
        del td["f"]  # whose class is frozen
    wanted = content(td)
    if filename := options.get("filename"):
        options = options | {"filename": tmp_path / filename}
    out = td.consolidate(**options)
    if "return_early" in options:
        assert out.result() is out.result()
        out = out.result()
    assert (out is td) is options.get("inplace", False) and type(out) is type(td)
    assert out.is_locked and out.is_consolidated() and content(out) == wanted and sound(out)
    storages = {leaf.untyped_storage().data_ptr() for leaf in leaves(out) if leaf.numel()}
    assert len(storages) <= 1 and all([leaf.is_contiguous() for leaf in leaves(out)])
    moved = out.to("cpu"), out.to("meta")
    assert content(moved[0]) == content(pickled(out)) == wanted
    assert all([td is out or td.is_consolidated() and sound(td) for td in moved])
    assert not out.clone().is_consolidated()
    if filename:
        assert out is td or out.device == CPU
        back = TensorDict.from_consolidated(tmp_path / "td")
        assert content(back) == wanted and sound(back) and not back.is_locked
        assert back.is_consolidated() and type(back) is type(td)
    if "share_memory" in options and leaves(out):
        assert leaves(out)[0].is_shared()


@pytest.mark.parametrize("options", OPTIONS[:-2], ids=str)
def test_nested_tensors_in_one_block(options, tmp_path):
    for name in ("jagged", "with holes", "int32 offsets", "transposed", "one empty row"):
        td = RAGGED[name]()
        rows = [content(x.unbind()) for x in (td["x"], td["n", "y"], td["x"] + td["n", "y"])]
        if "filename" in options:
            options = options | {"filename": tmp_path / name}
        out = td.consolidate(**options)
        found = [out, pickled(out)]
        if "filename" in options:
            found.append(TensorDict.from_consolidated(tmp_path / name))
        assert out.is_consolidated() and out.is_locked
        assert out["x"].values().untyped_storage().data_ptr() == out._buffer.data_ptr()
        for one in (out, *found[2:]):  # of one structure still
            assert content((one["x"] + one["n", "y"]).unbind()) == rows[2]
        for one in found:
            assert [content(x.unbind()) for x in (one["x"], one["n", "y"])] == rows[:2], name
            assert one["text"] == "t" and one.batch_size == (2,)


def test_writes_into_a_block(tmp_path):
    out = make().consolidate()
    out.zero_()
    storage = out["a"].untyped_storage()
    assert not torch.empty(0, dtype=torch.uint8).set_(storage).any()
    with pytest.raises(RuntimeError, match="locked"):
        out["q"] = torch.ones(B)
    assert not make().is_consolidated()
    out = make().consolidate(tmp_path / "td")
    out["i"].fill_(7)
    got = from_consolidated(tmp_path / "td")
    assert got["i"].tolist() == [7, 7]
    got["i"].fill_(8)
    assert from_consolidated(tmp_path / "td")["i"].tolist() == [7, 7]
    out = make().consolidate()
    assert out.consolidate() is out
    assert out.consolidate(share_memory=True) is not out
    assert make().consolidate(return_early=True).is_consolidated()


@pytest.mark.parametrize("options", [{}, {"metadata": True}, {"inplace": True}])
def test_a_block_is_pickled_as_one(options):
    leaves = {str(i): torch.full((1000,), i, dtype=torch.int32) for i in range(20)}
    td = TensorDict(leaves | {"f": torch.ones(2)}).consolidate(**options)
    assert len(pickle.dumps(td)) < 1.1 * 20 * 4000
    for way in (pickled, saved):  # torch.save has no word for one memory of two dtypes
        out = way(td)
        assert out.is_consolidated() and out.is_locked and bool((out == td).all())


def test_containers_that_are_not_one_block(tmp_path):
    for call, error, match in [
        (
            lambda: TensorDict(a=torch.eye(2).to_sparse()).consolidate(),
            TypeError,
            "not one block of memory",
        ),
        (lambda: make().consolidate(tmp_path / "td", device="meta"), ValueError, "mapped on"),
        (
            lambda: make().consolidate(num_threads=2, return_early=True, non_blocking=True),
            ValueError,
            "return_early",
        ),
    ]:
        raises((call, error, match))
    assert not (tmp_path / "td").exists()


def add_one(td, done):
    td["a"].add_(1)
    done.put((td.is_shared(), td.is_locked))


@pytest.mark.parametrize("kind", ["plain", "dressed", "lazy"])
def test_shared_memory(kind):
    td = KINDS[kind]()
    assert not td.is_shared() and td.share_memory_() is td and td.is_shared() and td.is_locked
    assert all([leaf.is_shared() for leaf in leaves(td)]) and td[0].is_shared()
    assert not td.clone().is_shared() and content(td) == content(KINDS[kind]())
    with pytest.raises(RuntimeError, match="locked"):
        td["q"] = torch.ones(td.batch_size)


@pytest.mark.slow
def test_shared_memory_across_processes():
    ctx = mp.get_context("fork" if "fork" in mp.get_all_start_methods() else "spawn")
    td, done = make().share_memory_(), ctx.Queue()
    worker = ctx.Process(target=add_one, args=(td, done))
    worker.start()
    assert done.get(timeout=60) == (True, True)
    worker.join(60)
    assert worker.exitcode == 0 and torch.equal(td["a"], make()["a"] + 1)


# -------------------------------------------------------------------------------- assert_close


def test_assert_close():
    nan = TensorDict({"a": torch.tensor([float("nan"), 1.0])}, [2])
    lazy = KINDS["lazy"]()
    dense = TensorDict(dict(lazy.items()), [2, B])
    for one, two in [
        *((make(), make()), (lazy, KINDS["lazy"]()), (floats(), floats() + 1e-9), (lazy, dense)),
        *((make(), make(device="cpu")), (nan, nan.clone())),
    ]:
        assert_close(one, two)
        assert_allclose_td(one, two)
    assert_close(floats(), floats() + 0.5, rtol=0, atol=1)
    assert assert_close(floats(), floats().select("a"), intersection=True)
    changed = floats().set(("n", "b"), torch.zeros(B))
    for one, two, options, error, match in [
        (floats(), changed, {}, AssertionError, "'n', 'b'"),
        (make(), make().exclude("a"), {}, KeyError, "'a'"),
        (make().exclude("a"), make(), {}, KeyError, "'a'"),
        (floats(), floats().double(), {}, AssertionError, "'a'"),
        (floats(), floats().set("a", torch.zeros(B, T, 1)), {}, AssertionError, "'a'"),
        (floats(), floats() + 5, {"msg": "the reason"}, AssertionError, "the reason"),
        (nan, nan.clone(), {"equal_nan": False}, AssertionError, "a"),
        (floats(), floats().select("a") + 1, {"intersection": True}, AssertionError, "a"),
        (make(), {}, {}, TypeError, "TensorDict"),
    ]:
        with pytest.raises(error, match=match):
            assert_close(one, two, **options)
    with pytest.raises(AssertionError, match="'n', 'b'"):
        assert_allclose_td(floats(), changed)


def test_copies_from_all_gpus_are_waited_for(monkeypatch):
    """Each GPU has streams of its own."""
    waited = []

    def stream(device):
        return SimpleNamespace(synchronize=lambda: waited.append(device))

    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    leaves = [SimpleNamespace(is_cuda=name != "cpu", device=name) for name in ("a", "cpu", "b")]
    copies.synchronise(SimpleNamespace(_leaves=lambda found: leaves))
    assert sorted(waited) == ["a", "b"]
    waited.clear()
    TensorDict(a=1).to("cpu", torch.float32)
    assert not waited
