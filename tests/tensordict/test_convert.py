"""Devices and dtypes, copies, gradients, fills, consolidation, pickles and plain-Python forms."""

import copy
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

from raffia import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    TensorDictParams,
    assert_allclose_td,
    assert_close,
    lazy_stack,
)

B, T = 2, 3
CPU, META = torch.device("cpu"), torch.device("meta")


def make(**kwargs):
    return TensorDict(
        {
            "a": torch.arange(B * T * 1.0).reshape(B, T),
            "i": torch.arange(B),
            "n": {"b": torch.arange(B) + 0.5},
        },
        [B],
        **kwargs,
    )


def floats(**kwargs):
    return TensorDict(make(**kwargs).exclude("i").to_dict(), [B], **kwargs)


def params():
    return TensorDict(
        {
            "w": nn.Parameter(torch.ones(B, T)),
            "n": {"b": nn.Parameter(torch.ones(T))},
            "buffer": torch.zeros(T),
        }
    )


def make_lazy(dim=0):
    return lazy_stack([make(), make() + 1], dim)


def leaves(td):
    return dict(td.items(True, True))


def dtypes(td):
    return {v.dtype for v in leaves(td).values()}


def assert_leaves(result, expected):
    got = leaves(result)
    expected = expected if isinstance(expected, dict) else leaves(expected)
    assert set(got) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value)


class TestTo:
    def test_device_of_a_fresh_container_is_none(self):
        assert make().device is None

    @pytest.mark.parametrize("device", ["cpu", CPU, "meta", META], ids=str)
    def test_device(self, device):
        td = make()
        result = td.to(device)
        assert result is not td
        assert td.device is None
        assert result.device == result["n"].device == torch.device(device)
        assert all(v.device == torch.device(device) for v in leaves(result).values())
        assert result.to(device) is result
        assert result.to(device=device) is result

    def test_leaves_that_need_no_move_are_shared(self):
        td = make()
        assert td.to("cpu")["a"] is td["a"]
        assert td.to("cpu")["n"] is not td["n"]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool], ids=str)
    def test_dtype_casts_every_leaf(self, dtype):
        for result in (make().to(dtype), make().to(dtype=dtype)):
            assert_leaves(result, {k: v.to(dtype) for k, v in leaves(make()).items()})
            assert result.device is None

    def test_dtype_of_all_leaves_already(self):
        td = floats()
        result = td.to(torch.float32)
        assert result["a"] is td["a"]

    @pytest.mark.parametrize(
        ("args", "kwargs"),
        [
            (("cpu", torch.float64), {}),
            (("cpu",), {"dtype": torch.float64}),
            ((), {"device": "cpu", "dtype": torch.float64}),
            ((torch.ones((), dtype=torch.float64),), {}),
        ],
        ids=["positional", "mixed", "keywords", "tensor"],
    )
    def test_device_and_dtype(self, args, kwargs):
        result = make().to(*args, **kwargs)
        assert result.device == CPU
        assert dtypes(result) == {torch.float64}

    def test_other_container(self):
        result = make().to(other=floats(device="cpu").double())
        assert result.device == CPU
        assert dtypes(result) == {torch.float64}
        mixed = make().to(other=make(device="cpu"))
        assert mixed.device == CPU
        assert dtypes(mixed) == {torch.float32, torch.int64}

    @pytest.mark.parametrize("kwargs", [{}, {"device": None}, {"non_blocking": True}], ids=str)
    def test_nothing_to_do(self, kwargs):
        for td in (make(), make(device="cpu")):
            assert td.to(**kwargs) is td

    def test_non_blocking(self):
        assert make().to("cpu", non_blocking=True).device == CPU
        assert make().to("cpu", non_blocking=False).device == CPU

    @pytest.mark.parametrize("bad", ["nope", dict], ids=str)
    def test_bad_argument(self, bad):
        with pytest.raises((TypeError, RuntimeError)):
            make().to(bad)

    def test_lock_stays(self):
        td = make().lock_()
        assert td.to("cpu").is_locked
        assert td.to(torch.float64).is_locked
        assert td.double().is_locked
        assert not make().to("cpu").is_locked

    def test_names_and_batch_size_stay(self):
        td = make(names=["t"])
        for result in (td.to("meta"), td.to(torch.float64), td.to("cpu")):
            assert result.names == ["t"]
            assert result.batch_size == torch.Size([B])

    def test_lazy_stack(self):
        td = make_lazy()
        result = td.to("meta", torch.float64)
        assert type(result) is LazyStackedTensorDict
        assert result.device == result.tensordicts[0].device == META
        assert dtypes(result) == {torch.float64}
        assert result["a"].shape == td["a"].shape

    def test_heterogeneous_lazy_stack(self):
        td = lazy_stack([TensorDict({"a": torch.ones(n)}) for n in (2, 3)])
        result = td.to(torch.float64)
        assert [m["a"].shape[0] for m in result.tensordicts] == [2, 3]
        assert result.tensordicts[1]["a"].dtype is torch.float64

    def test_non_tensor_entries_stay(self):
        td = make().set("s", "text")
        for result in (td.to("cpu"), td.to("meta"), td.to(torch.float64), td.float(), td.cpu()):
            assert result["s"] == "text"

    def test_in_place(self):
        td = make()
        assert td.to(torch.float64, inplace=True) is td
        assert dtypes(td) == {torch.float64}

    def test_new_entries_follow_the_device(self):
        td = make(device="meta")
        td["q"] = torch.ones(B)
        assert td["q"].device == META

    def test_gradient_flows(self):
        td = floats().requires_grad_()
        td.to(torch.float64)["a"].sum().backward()
        torch.testing.assert_close(td["a"].grad, torch.ones(B, T))

    def test_context_manager_writes_back(self):
        td = make()
        with td.to(torch.float64) as other:
            assert other["a"].dtype is torch.float64
            other["a"] = other["a"] + 1
        torch.testing.assert_close(td["a"], make()["a"] + 1)

    def test_cpu(self):
        td = make()
        assert td.cpu().device == CPU
        assert td.cpu()["a"] is td["a"]
        td = make(device="cpu")
        assert td.cpu() is td

    @pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without an accelerator")
    def test_cuda_and_pinning_without_an_accelerator(self):
        with pytest.raises((AssertionError, RuntimeError)):
            make().cuda()
        with pytest.raises(RuntimeError):
            make().pin_memory()

    @pytest.mark.gpu
    def test_cuda(self):
        td = make().cuda()
        assert td.device.type == "cuda" and td["n", "b"].is_cuda and td.is_cuda
        assert td.to("cuda") is td
        assert_leaves(td.cpu(), make())
        pinned = make().pin_memory()
        assert pinned["n", "b"].is_pinned()
        assert pinned.batch_size == torch.Size([B])
        assert_leaves(pinned.to("cuda", non_blocking=True).cpu(), make())

    def test_device_questions(self):
        assert make(device="cpu").is_cpu
        assert make().to("meta").is_meta
        assert not make().is_cuda

    def test_clear_device(self):
        td = make(device="cpu")
        assert td.clear_device_() is td
        assert td.device is None and td["n"].device is None


CASTS = {
    "float": torch.float32,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "double": torch.float64,
    "int": torch.int32,
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}


class TestDtypes:
    @pytest.mark.parametrize("name", CASTS)
    def test_cast(self, name):
        td = make()
        result = getattr(td, name)()
        assert_leaves(result, {k: v.to(CASTS[name]) for k, v in leaves(td).items()})
        assert dtypes(td) == {torch.float32, torch.int64}
        assert result.batch_size == td.batch_size

    @pytest.mark.parametrize("name", ["float", "double", "int"])
    def test_cast_lazy(self, name):
        result = getattr(make_lazy(), name)()
        assert type(result) is LazyStackedTensorDict
        assert dtypes(result) == {CASTS[name]}

    def test_type(self):
        assert dtypes(make().type(torch.float64)) == {torch.float64}

    def test_cast_shares_what_fits(self):
        td = make()
        assert td.float()["a"] is td["a"]

    def test_dtype(self):
        assert floats().dtype is torch.float32
        assert make().dtype is None

    def test_is_floating_point(self):
        assert floats().is_floating_point()
        assert not make().is_floating_point()


class TestGrad:
    def test_requires_grad(self):
        td = floats()
        assert td.requires_grad is False
        assert td.requires_grad_() is td
        assert td.requires_grad is True
        assert all(v.requires_grad for v in leaves(td).values())
        td.requires_grad_(False)
        assert not any(v.requires_grad for v in leaves(td).values())

    def test_one_leaf_is_enough(self):
        td = floats()
        td["n", "b"].requires_grad_()
        assert td.requires_grad is True
        assert td["n"].requires_grad is True

    def test_integers_cannot(self):
        with pytest.raises(RuntimeError, match="floating point"):
            make().requires_grad_()

    def test_on_locked(self):
        td = params().lock_().requires_grad_(False)
        assert not td.requires_grad
        assert isinstance(td["w"], nn.Parameter)

    def test_grad_and_zero_grad(self):
        td = floats().requires_grad_()
        assert td.grad is None
        td.pow(2).sum(reduce=True).backward()
        assert_leaves(td.grad, floats() * 2)
        assert td.grad.batch_size == td.batch_size
        assert td.zero_grad(set_to_none=False) is td
        assert_leaves(td.grad, floats() * 0)
        td.zero_grad()
        assert td.grad is None

    def test_grad_of_some(self):
        td = floats()
        td["a"].requires_grad_().sum().backward()
        assert list(td.grad.keys(True, True)) == ["a"]

    @pytest.mark.parametrize("locked", [False, True])
    def test_detach(self, locked):
        td = params()
        if locked:
            td.lock_()
        result = td.detach()
        assert result is not td
        assert not result.requires_grad
        assert type(result["w"]) is torch.Tensor
        assert result["w"].data_ptr() == td["w"].data_ptr()
        assert result.is_locked is locked
        assert td.requires_grad

    def test_detach_in_place(self):
        td = floats().requires_grad_() * 2
        held = td["a"]
        assert td.detach_() is td
        assert td["a"] is held
        assert not td.requires_grad

    def test_data(self):
        td = params()
        data = td.data
        assert type(data["w"]) is torch.Tensor
        assert not data.requires_grad
        data.zero_()
        assert not td["w"].any() and not td["n", "b"].any()
        assert td.lock_().data.is_locked

    def test_set_data(self):
        td = params()
        td.data = td.data + 1
        assert isinstance(td["w"], nn.Parameter)
        torch.testing.assert_close(td["w"].data, torch.full((B, T), 2.0))

    def test_data_and_detach_of_lazy_stack(self):
        td = lazy_stack([params(), params()])
        assert td.requires_grad
        for result in (td.data, td.detach()):
            assert type(result) is LazyStackedTensorDict
            assert not result.requires_grad

    def test_backward(self):
        td = floats().requires_grad_()
        td.pow(2).sum().backward()
        assert_leaves(td.grad, floats() * 2)

    def test_backward_with_gradients(self):
        td = floats().requires_grad_()
        td.pow(2).backward(floats() * 0 + 3)
        assert_leaves(td.grad, floats() * 6)

    def test_backward_refusals(self):
        with pytest.raises(RuntimeError, match="requir"):
            floats().backward()
        with pytest.raises(RuntimeError, match="scalar"):
            floats().requires_grad_().pow(2).backward()


class TestWrite:
    @pytest.mark.parametrize("locked", [False, True])
    def test_zero(self, locked):
        td = make()
        if locked:
            td.lock_()
        held = td["n", "b"]
        assert td.zero_() is td
        assert td["n", "b"] is held
        assert_leaves(td, {k: torch.zeros_like(v) for k, v in leaves(make()).items()})

    def test_zero_leaves_non_tensors(self):
        assert make().set("s", "text").zero_()["s"] == "text"

    def test_zero_lazy(self):
        td = make_lazy()
        held = td.tensordicts[1]["a"]
        td.zero_()
        assert not held.any()

    @pytest.mark.parametrize("key", ["a", ("n", "b"), "i"])
    def test_fill(self, key):
        td = make()
        held = td.get(key)
        assert td.fill_(key, 3) is td
        assert td.get(key) is held
        assert (held == 3).all()

    def test_fill_a_subtree(self):
        assert (make().fill_("n", 3.0)["n", "b"] == 3).all()

    def test_fill_lazy(self):
        td = make_lazy().fill_("a", 3.0)
        assert (td.tensordicts[0]["a"] == 3).all()

    def test_fill_refusals(self):
        with pytest.raises(KeyError):
            make().fill_("zz", 3.0)
        with pytest.raises(TypeError):
            make().fill_("a", "text")

    @pytest.mark.parametrize("locked", [False, True])
    def test_copy_(self, locked):
        td = make()
        if locked:
            td.lock_()
        held = td["a"]
        assert td.copy_(make().double() + 1) is td
        assert td["a"] is held
        assert td["a"].dtype is torch.float32
        assert_leaves(td, {k: v + 1 for k, v in leaves(make()).items()})

    def test_copy_of_some_keys(self):
        td = make().copy_(TensorDict({"a": torch.ones(B, T)}, [B]))
        torch.testing.assert_close(td["a"], torch.ones(B, T))
        torch.testing.assert_close(td["n", "b"], make()["n", "b"])

    def test_copy_of_an_unknown_key(self):
        with pytest.raises(KeyError, match="zz"):
            make().copy_(TensorDict({"zz": torch.ones(B)}, [B]))

    def test_copy_lazy(self):
        td = make_lazy()
        held = td.tensordicts[0]["i"]
        td.copy_(make_lazy() + 1)
        torch.testing.assert_close(held, torch.arange(B) + 1)

    def test_copy_at(self):
        td = make()
        assert td.copy_at_(make()[0] + 9, 1) is td
        torch.testing.assert_close(td["a"][1], make()["a"][0] + 9)
        torch.testing.assert_close(td["a"][0], make()["a"][0])


class TestClone:
    def test_deep(self):
        td = make(names=["t"], device="cpu")
        result = td.clone()
        assert_leaves(result, td)
        assert result["a"] is not td["a"]
        assert result["a"].data_ptr() != td["a"].data_ptr()
        assert (result.names, result.device, result.batch_size) == (["t"], CPU, td.batch_size)
        result["n"].set("q", torch.ones(B))
        assert ("n", "q") not in td.keys(True)

    @pytest.mark.parametrize(
        "fn",
        [
            lambda td: td.clone(False),
            lambda td: td.clone(recurse=False),
            lambda td: td.copy(),
            copy.copy,
        ],
        ids=["clone", "keyword", "copy", "module"],
    )
    def test_shallow(self, fn):
        td = make(names=["t"], device="cpu")
        result = fn(td)
        assert result is not td
        assert result["a"] is td["a"] and result["n", "b"] is td["n", "b"]
        assert result["n"] is not td["n"]
        assert (result.names, result.device) == (["t"], CPU)

    @pytest.mark.parametrize("fn", [lambda td: td.clone(), lambda td: td.copy(), copy.copy])
    def test_copies_are_unlocked(self, fn):
        result = fn(make().lock_())
        assert not result.is_locked
        assert not result["n"].is_locked

    def test_torch_clone(self):
        assert_leaves(torch.clone(make()), make())

    def test_gradient_flows(self):
        td = params()
        result = td.clone()
        assert type(result["w"]) is torch.Tensor
        assert result["w"].requires_grad and not result["w"].is_leaf
        assert isinstance(td.clone(False)["w"], nn.Parameter)

    @pytest.mark.parametrize("recurse", [True, False])
    def test_lazy(self, recurse):
        td = make_lazy(1)
        result = td.clone(recurse)
        assert type(result) is LazyStackedTensorDict
        assert result.stack_dim == 1
        assert result.tensordicts[0] is not td.tensordicts[0]
        assert (result.tensordicts[0]["a"] is td.tensordicts[0]["a"]) is not recurse
        assert_leaves(result, td)

    def test_non_tensor(self):
        td = make().set("s", ["x", "y"]).set("t", "text")
        for result in (td.clone(), td.clone(False), copy.deepcopy(td)):
            assert result["t"] == "text"

    def test_deepcopy(self):
        td = make(names=["t"])
        result = copy.deepcopy(td)
        assert_leaves(result, td)
        assert result["a"].data_ptr() != td["a"].data_ptr()
        assert result["n"] is not td["n"]
        assert result.names == ["t"]

    @pytest.mark.parametrize("kind", ["dense", "nested", "lazy", "params"])
    def test_deepcopy_takes_objects_along(self, kind):
        inner = TensorDict({"a": torch.ones(B)}, [B]).set_non_tensor("seen", {"games": [1]})
        td = {
            "dense": lambda: inner,
            "nested": lambda: TensorDict({"n": inner}, [B]),
            "lazy": lambda: lazy_stack([inner, inner.clone()]),
            "params": lambda: TensorDictParams(inner),
        }[kind]()
        result = copy.deepcopy(td)
        assert type(result) is type(td)
        was, now = (x["n"] if kind == "nested" else x for x in (td, result))
        was, now = (x[0] if kind == "lazy" else x for x in (was, now))
        now["seen"]["games"].append(2)
        assert was["seen"] == {"games": [1]}

    def test_deepcopy_keeps_what_is_shared(self):
        inner = TensorDict(a=torch.ones(B))
        td = TensorDict(first=inner).set("second", inner)
        assert td["first"] is td["second"]
        result = copy.deepcopy(td)
        assert result["first"] is result["second"]
        assert result["first"] is not inner

    def test_contiguous(self):
        td = TensorDict({"a": torch.ones(T, B).t(), "n": {"b": torch.ones(B)}}, [B])
        assert not td.is_contiguous()
        result = td.contiguous()
        assert result.is_contiguous()
        assert result["n", "b"] is td["n", "b"]
        assert_leaves(result, {k: v.contiguous() for k, v in leaves(td).items()})
        assert make().is_contiguous()

    def test_contiguous_lazy_stack_becomes_dense(self):
        td = make_lazy()
        assert not td.is_contiguous()
        result = td.contiguous()
        assert type(result) is TensorDict
        assert_leaves(result, td)


class TestSizes:
    def test_numel(self):
        assert make().numel() == B
        assert TensorDict({}, [B, T]).numel() == B * T
        assert TensorDict().numel() == 1

    def test_bytes(self):
        assert make().bytes() == 4 * B * T + 8 * B + 4 * B
        assert TensorDict().bytes() == 0
        assert make_lazy().bytes() == 2 * make().bytes()

    def test_bytes_of_shared_leaves(self):
        x = torch.ones(B)
        td = TensorDict({"a": x, "b": x}, [B])
        assert td.bytes() == 16
        assert td.bytes(count_duplicates=False) == 8


class TestNew:
    """new_*: like `stack`ing new containers of that size, leaves keep what follows the batch."""

    @pytest.mark.parametrize("size", [(4,), (4, 5), ((4, 5),), (torch.Size([4]),)], ids=str)
    @pytest.mark.parametrize("name", ["new_zeros", "new_ones", "new_empty"])
    def test_sizes(self, name, size):
        td = make()
        result = getattr(td, name)(*size)
        batch = torch.Size(size[0] if isinstance(size[0], (tuple, torch.Size)) else size)
        assert result.batch_size == result["n"].batch_size == batch
        assert {k: v.shape for k, v in leaves(result).items()} == {
            "a": batch + (T,),
            "i": batch,
            ("n", "b"): batch,
        }
        assert {k: v.dtype for k, v in leaves(result).items()} == {
            k: v.dtype for k, v in leaves(td).items()
        }
        if name != "new_empty":
            assert all((v == (name == "new_ones")).all() for v in leaves(result).values())

    def test_full(self):
        result = make().new_full((4,), 3)
        assert all((v == 3).all() and v.shape[0] == 4 for v in leaves(result).values())

    def test_options(self):
        td = make(device="cpu")
        assert td.new_zeros(4).device == CPU
        assert make().new_zeros(4).device is None
        assert td.new_zeros(4, device="meta").device == META
        assert dtypes(td.new_ones(4, dtype=torch.float64)) == {torch.float64}
        assert floats().new_zeros(4, requires_grad=True).requires_grad

    def test_non_tensor_entries(self):
        assert make().set("s", "text").new_zeros(4)["s"] == "text"

    def test_lazy(self):
        result = make_lazy().new_ones(4, 5)
        assert result["a"].shape == (4, 5, T)

    def test_new_tensor_of_numbers(self):
        result = make().new_tensor([1.0, 2.0])
        assert result.batch_size == torch.Size([2])
        assert {k: (v.tolist(), v.dtype) for k, v in leaves(result).items()} == {
            "a": ([1.0, 2.0], torch.float32),
            "i": ([1, 2], torch.int64),
            ("n", "b"): ([1.0, 2.0], torch.float32),
        }
        assert make().new_tensor(3.0).batch_size == torch.Size([])


class TestPlainPython:
    def test_numpy(self):
        result = make().set("s", "text").numpy()
        assert type(result) is dict
        assert isinstance(result["n"]["b"], np.ndarray)
        np.testing.assert_array_equal(result["a"], np.arange(B * T).reshape(B, T))
        assert result["s"] == "text"

    def test_numpy_shares_memory(self):
        td = make()
        td.numpy()["a"][0, 0] = 9
        assert td["a"][0, 0] == 9

    def test_numpy_of_a_lazy_stack(self):
        assert make_lazy().numpy()["a"].shape == (2, B, T)

    def test_numpy_needs_detached_leaves(self):
        with pytest.raises(RuntimeError, match="grad"):
            params().numpy()

    def test_tolist(self):
        td = TensorDict({"a": torch.arange(4).reshape(2, 2), "s": "text"}, [2])
        assert td.tolist(convert_tensors=True) == [
            {"a": [0, 1], "s": "text"},
            {"a": [2, 3], "s": "text"},
        ]
        rows = td.tolist()
        assert all(torch.equal(row["a"], x) for row, x in zip(rows, td["a"], strict=True))

    def test_tolist_without_batch(self):
        td = TensorDict({"a": torch.arange(2), "n": {"b": torch.tensor(1)}})
        assert td.tolist(convert_tensors=True) == {"a": [0, 1], "n": {"b": 1}}

    def test_tolist_two_batch_dims(self):
        td = TensorDict({"a": torch.arange(6).reshape(2, 3)}, [2, 3])
        assert td.tolist(convert_tensors=True) == [
            [{"a": 0}, {"a": 1}, {"a": 2}],
            [{"a": 3}, {"a": 4}, {"a": 5}],
        ]

    def test_tolist_options(self):
        td = TensorDict({"a": torch.arange(4).reshape(2, 2)}, [2])
        arrays = td.tolist(convert_tensors="numpy")
        assert isinstance(arrays[0]["a"], np.ndarray)
        nodes = td.tolist(convert_nodes=False)
        assert all(isinstance(x, TensorDict) for x in nodes)
        assert nodes[1].batch_size == torch.Size([])

    def test_tolist_lazy(self):
        rows = lazy_stack([TensorDict({"a": torch.arange(n)}) for n in (1, 2)]).tolist(
            convert_tensors=True
        )
        assert rows == [{"a": [0]}, {"a": [0, 1]}]


class TestStateDict:
    def test_flat(self):
        sd = make().state_dict()
        assert isinstance(sd, OrderedDict)
        assert list(sd) == ["a", "i", "n.b"]

    def test_nested(self):
        sd = make().state_dict(flatten=False)
        assert list(sd) == ["a", "i", "n"]
        assert list(sd["n"]) == ["b"]

    def test_prefix(self):
        assert list(make().state_dict(prefix="p.")) == ["p.a", "p.i", "p.n.b"]

    def test_detached_unless_kept(self):
        assert not params().state_dict()["w"].requires_grad
        assert isinstance(params().state_dict(keep_vars=True)["w"], nn.Parameter)

    def test_leaves_are_not_copied(self):
        td = make()
        assert td.state_dict()["a"].data_ptr() == td["a"].data_ptr()

    @pytest.mark.parametrize("flatten", [True, False])
    @pytest.mark.parametrize("locked", [True, False])
    def test_load_in_place(self, flatten, locked):
        td, sd = make(), (make() + 1).state_dict(flatten=flatten)
        if locked:
            td.lock_()
        held = td["n", "b"]
        assert td.load_state_dict(sd) is td
        assert td["n", "b"] is held
        torch.testing.assert_close(held, make()["n", "b"] + 1)
        torch.testing.assert_close(td["a"], make()["a"] + 1)

    def test_load_assign(self):
        td, sd = make(), (make() + 1).state_dict()
        td.load_state_dict(sd, assign=True)
        assert td["a"] is sd["a"]

    def test_load_into_empty(self):
        td = TensorDict()
        with pytest.raises(RuntimeError, match="key"):
            td.load_state_dict(make().state_dict())
        td.load_state_dict(make().state_dict(), strict=False)
        assert_leaves(td, make())
        assert td.batch_size == torch.Size([B])

    def test_missing_key(self):
        sd = make().exclude("a").state_dict()
        with pytest.raises(RuntimeError, match="a"):
            make().load_state_dict(sd)
        td = (make() + 1).load_state_dict(sd, strict=False)
        torch.testing.assert_close(td["a"], make()["a"] + 1)
        torch.testing.assert_close(td["n", "b"], make()["n", "b"])

    def test_through_a_copy(self):
        sd = copy.deepcopy((make() + 1).state_dict())
        assert_leaves(make().float().load_state_dict(sd), make().float() + 1)

    def test_lazy(self):
        sd = make_lazy().state_dict()
        assert sd["a"].shape == (2, B, T)
        td = (make_lazy() * 0).load_state_dict(sd)
        assert_leaves(td, make_lazy())

    def test_non_tensor_entries_stay(self):
        td = make().set("s", "text")
        assert "s" not in td.state_dict() or td.state_dict()["s"] == "text"
        assert td.load_state_dict(td.state_dict())["s"] == "text"


def roundtrip(x):
    return pickle.loads(pickle.dumps(x))


class TestPickle:
    def test_round_trip(self):
        td = make(names=["t"], device="cpu")
        result = roundtrip(td)
        assert type(result) is TensorDict
        assert_leaves(result, td)
        assert (result.names, result.device) == (["t"], CPU)
        assert result.batch_size == result["n"].batch_size == torch.Size([B])
        result["q"] = torch.ones(B)

    def test_lock_stays(self):
        result = roundtrip(make().lock_())
        assert result.is_locked and result["n"].is_locked
        with pytest.raises(RuntimeError, match="locked"):
            result["n"]["q"] = torch.ones(B)
        assert not roundtrip(make()).is_locked

    def test_lazy(self):
        result = roundtrip(make_lazy(1))
        assert type(result) is LazyStackedTensorDict
        assert result.stack_dim == 1
        assert_leaves(result, make_lazy(1))

    def test_heterogeneous_lazy(self):
        result = roundtrip(lazy_stack([TensorDict({"a": torch.ones(n)}) for n in (2, 3)]))
        assert [m["a"].shape[0] for m in result.tensordicts] == [2, 3]

    def test_parameters(self):
        result = roundtrip(params())
        assert isinstance(result["w"], nn.Parameter)

    def test_non_tensor(self):
        td = make().set("s", "text").set("o", NonTensorData({"k": 1}, batch_size=[B]))
        result = roundtrip(td)
        assert result["s"] == "text"
        assert result["o"] == {"k": 1}

    def test_empty(self):
        assert roundtrip(TensorDict({}, [B])).batch_size == torch.Size([B])


def one_storage(td):
    return len({v.untyped_storage().data_ptr() for v in leaves(td).values()}) == 1


class TestConsolidate:
    def test_leaves_share_one_storage(self):
        td = make()
        result = td.consolidate()
        assert result is not td
        assert one_storage(result)
        assert not one_storage(td)
        assert_leaves(result, td)
        assert dtypes(result) == dtypes(td)

    def test_is_locked(self):
        result = make().consolidate()
        assert result.is_locked
        with pytest.raises(RuntimeError, match="locked"):
            result["q"] = torch.ones(B)

    def test_is_consolidated(self):
        assert make().consolidate().is_consolidated()
        assert not make().is_consolidated()
        assert not make().consolidate().clone().is_consolidated()

    def test_in_place(self):
        td = make()
        assert td.consolidate(inplace=True) is td
        assert one_storage(td)
        assert_leaves(td, make())

    def test_metadata_of_the_container_stays(self):
        td = make(device="cpu", names=["t"])
        result = td.consolidate()
        assert (result.device, result.names) == (CPU, ["t"])
        assert result["n"].batch_size == torch.Size([B])

    @pytest.mark.parametrize("metadata", [False, True])
    def test_pickles(self, metadata):
        td = make().set("s", "text").consolidate(metadata=metadata)
        result = roundtrip(td)
        assert_leaves(result.exclude("s"), make())
        assert result["s"] == "text"
        if metadata:
            assert one_storage(result.exclude("s"))

    def test_mixed_dtypes_are_aligned(self):
        td = TensorDict(
            {
                "a": torch.tensor([True, False, True]),
                "b": torch.ones(3, dtype=torch.float64),
                "c": torch.ones(3, dtype=torch.bfloat16),
                "d": torch.ones(3, dtype=torch.complex64),
                "e": torch.zeros(3, 0),
            },
            [3],
        )
        assert_leaves(td.consolidate(), td)

    def test_views_are_made_contiguous(self):
        td = TensorDict({"a": torch.arange(6).reshape(3, 2).t(), "b": torch.arange(4)[::2]}, [2])
        result = td.consolidate()
        assert result.is_contiguous()
        assert_leaves(result, td)

    def test_values_are_views(self):
        result = make().consolidate()
        result.zero_()
        storage = result["a"].untyped_storage()
        assert not torch.empty(0, dtype=torch.uint8).set_(storage).any()

    def test_empty_and_non_tensor(self):
        assert TensorDict({}, [B]).consolidate().batch_size == torch.Size([B])
        assert make().set("s", "text").consolidate()["s"] == "text"

    def test_lazy(self):
        td = make_lazy()
        result = td.consolidate()
        assert type(result) is LazyStackedTensorDict
        assert_leaves(result, td)

    def test_shared_memory(self):
        assert make().consolidate(share_memory=True)["a"].is_shared()

    def test_to_same_device(self):
        assert_leaves(make().consolidate().to("cpu"), make())


def add_one(td, done):
    td["a"].add_(1)
    done.put((td.is_shared(), td.is_locked))


class TestShare:
    def test_share(self):
        td = make().set("s", "text")
        assert not td.is_shared()
        assert td.share_memory_() is td
        assert td.is_shared() and td["n"].is_shared()
        assert all(v.is_shared() for v in leaves(td).values() if isinstance(v, torch.Tensor))
        assert td.is_locked
        assert td["s"] == "text"

    def test_in_place_writes_are_fine(self):
        td = make().share_memory_()
        td.set_("a", torch.ones(B, T))
        assert (td["a"] == 1).all()
        with pytest.raises(RuntimeError, match="locked"):
            td["q"] = torch.ones(B)

    def test_copies_are_not_shared(self):
        td = make().share_memory_()
        assert not td.clone().is_shared()
        assert td[0].is_shared()

    def test_lazy(self):
        td = make_lazy().share_memory_()
        assert td.is_shared()
        assert td.tensordicts[0]["a"].is_shared()

    @pytest.mark.slow
    def test_across_processes(self):
        ctx = mp.get_context("fork" if "fork" in mp.get_all_start_methods() else "spawn")
        td, done = make().share_memory_(), ctx.Queue()
        worker = ctx.Process(target=add_one, args=(td, done))
        worker.start()
        shared, locked = done.get(timeout=60)
        worker.join(60)
        assert worker.exitcode == 0
        assert shared and locked
        torch.testing.assert_close(td["a"], make()["a"] + 1)


class TestAssertClose:
    @pytest.mark.parametrize("check", [assert_close, assert_allclose_td])
    def test_equal(self, check):
        check(make(), make())
        check(make_lazy(), make_lazy())
        check(floats(), floats() + 1e-9)
        check(make(), make(device="cpu"))

    def test_lazy_with_dense(self):
        dense = TensorDict({k: v for k, v in make_lazy().items()}, [2, B])
        assert_close(make_lazy(), dense)

    @pytest.mark.parametrize("check", [assert_close, assert_allclose_td])
    def test_values_differ(self, check):
        with pytest.raises(AssertionError, match="'n', 'b'"):
            check(floats(), floats().set(("n", "b"), torch.zeros(B)))

    def test_missing_key(self):
        for one, two in ((make(), make().exclude("a")), (make().exclude("a"), make())):
            with pytest.raises(KeyError, match="'a'"):
                assert_close(one, two)

    def test_dtype_differs(self):
        with pytest.raises(AssertionError, match="'a'"):
            assert_close(floats(), floats().double())

    def test_shape_differs(self):
        with pytest.raises((AssertionError, RuntimeError), match="'a'"):
            assert_close(floats(), floats().set("a", torch.zeros(B, T, 1)))

    def test_tolerance_and_message(self):
        assert_close(floats(), floats() + 0.5, rtol=0, atol=1)
        with pytest.raises(AssertionError, match="the reason"):
            assert_close(floats(), floats() + 5, rtol=0, atol=1, msg="the reason")

    def test_nan(self):
        td = TensorDict({"a": torch.tensor([float("nan"), 1.0])}, [2])
        assert_close(td, td.clone())
        with pytest.raises(AssertionError):
            assert_close(td, td.clone(), equal_nan=False)

    @pytest.mark.parametrize("other", [{}, torch.ones(B), None], ids=["dict", "tensor", "None"])
    def test_needs_containers(self, other):
        with pytest.raises(TypeError, match="TensorDict"):
            assert_close(make(), other)


class TestOptions:
    """Less common arguments of methods that copy or convert."""

    def transposed(self):
        return TensorDict({"a": torch.zeros(3, 2).t(), "b": torch.ones(2)}, [2])

    def test_contiguous_in_place(self):
        td = self.transposed()
        kept = td["b"]
        assert td.contiguous(inplace=True) is td
        assert td["a"].is_contiguous() and td["b"] is kept

    def test_contiguous_canonical(self):
        odd = torch.zeros(1, 3).as_strided((1, 3), (7, 1))
        td = TensorDict(a=odd, b=torch.ones(1, 3))
        assert odd.is_contiguous() and td.contiguous()["a"] is odd
        out = td.contiguous(canonical=True)
        assert out["a"].stride() == (3, 1) and out["b"] is td["b"]

    def test_to_batch_size(self):
        td = TensorDict({"a": torch.ones(2, 3)}, [2, 3])
        assert td.to(batch_size=[2]).batch_size == (2,)
        out = td.to(torch.float64, batch_size=[])
        assert out.batch_size == () and out["a"].dtype == torch.float64
        assert td.batch_size == (2, 3)

    def test_consolidate_with_threads(self):
        td = make()
        out = td.consolidate(num_threads=2)
        assert out.is_consolidated() and (out == td).all()

    def test_dense_containers_are_dense_already(self):
        td = make()
        assert td.densify() is td
        td["stack"] = lazy_stack([TensorDict(), TensorDict()])
        assert td.densify() is not td and type(td.densify()["stack"]) is TensorDict

    def test_struct_array_of_parameters(self):
        td = floats().requires_grad_()
        assert td.to_struct_array()["a"].tolist() == td["a"].tolist()

    def test_empty_of_fewer_dims_keeps_their_names(self):
        td = TensorDict({}, [2, 3], names=["x", "y"])
        assert td.empty(batch_size=[2]).names == ["x"]
        assert td.empty(batch_size=[3]).names == [None]

    def test_assert_close_of_common_entries(self):
        td = floats()
        assert assert_close(td, td.select("a"), intersection=True)
        with pytest.raises(AssertionError):
            assert_close(td, td.select("a") + 1, intersection=True)
