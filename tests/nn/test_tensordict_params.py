"""Containers of parameters in other modules: torch's methods of a module apply to their tensors."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call

from raffia import TensorClass, TensorDict
from raffia.nn import TensorDictParams as Params

B, A = 2, 3


class Pair(TensorClass):
    w: torch.Tensor
    n: TensorDict


NAMES = ["layer.weight", "layer.bias", "params.w", "params.n.b"]


def make(**options):
    nested = TensorDict(b=torch.ones(B), i=torch.arange(B))
    return Params(TensorDict(w=torch.zeros(A), n=nested), **options)


class Holder(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layer = nn.Linear(A, 1)
        self.params = make(**options)

    def forward(self, x):
        return self.layer(x) + (self.params["w"] * x).sum() + self.params["n", "b"].sum()


class NestedHolder(Holder):
    def forward(self, x):
        return super().forward(x) + self.params.n.b.sum() + self.params.n["i"].sum()


def names(module, **options):
    return [name for name, _ in module.named_parameters(**options)]


def buffers(module):
    return [name for name, _ in module.named_buffers()]


def sums(td):
    return [leaf.sum().item() for leaf in td.values(True, True)]


def same(got, want):
    return len(got) == len(want) and all(a is b for a, b in zip(got, want, strict=True))


# --- in a module --------------------------------------------------------------------------------


def test_names():
    module = Holder()
    assert names(module) == NAMES and names(module, recurse=False) == []
    assert names(module, prefix="net") == [f"net.{name}" for name in NAMES]
    assert buffers(module) == ["params.n.i"] and names(module.params, recurse=False) == ["w", "n.b"]
    assert module.params.n.b.sum() == B  # a nested container is no submodule
    assert [name for name, _ in module.named_modules()] == ["", "layer", "params"]
    params = module.params
    assert same(list(params.parameters()), [params["w"], params["n", "b"]])
    assert params.get_parameter("n.b") is params["n", "b"]
    assert params.get_buffer("n.i") is params["n", "i"]
    with pytest.raises(AttributeError):
        params.get_parameter("n.c")
    shapes = []
    params.apply(lambda leaf: shapes.append(tuple(leaf.shape)))
    assert shapes == [(A,), (B,), (B,)]
    layers = nn.ModuleList([make(), make()])
    assert len(list(layers.parameters())) == 4 and "1.n.b" in layers.state_dict()
    module.params = Params(TensorDict(v=torch.ones(1)))
    assert names(module)[2:] == ["params.v"]
    with pytest.raises(NotImplementedError):
        params()


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trip(assign):
    source, target = Holder(), Holder()
    for leaf in source.params.parameters():
        leaf.data.normal_()
    source.params["n", "i"].add_(5)
    state, parameters = source.state_dict(), list(target.parameters())
    assert list(state)[2:] == ["params.w", "params.n.b", "params.n.i"]
    assert not state["params.w"].requires_grad
    assert source.state_dict(keep_vars=True)["params.w"] is source.params["w"]
    matched = "<All keys matched successfully>"
    assert str(target.load_state_dict(state, assign=assign)) == matched
    assert (target.params == source.params).all()
    assert assign or same(list(target.parameters()), parameters)
    assert isinstance(target.params["w"], nn.Parameter)
    lacking = {name: leaf for name, leaf in state.items() if name != "params.w"}
    assert target.load_state_dict(lacking, strict=False).missing_keys == ["params.w"]
    for wrong, match in (
        (lacking, "Missing key.*params.w"),
        ({**state, "params.x": torch.ones(1)}, "Unexpected key.*params.x"),
        ({**state, "params.w": torch.ones(4)}, r"params.w: \(4,\) for \(3,\)"),
    ):
        with pytest.raises(RuntimeError, match=match):
            target.load_state_dict(wrong)


def test_a_state_dict_may_be_nested_as_that_of_a_container():
    source = Holder().params
    nested = source.state_dict(flatten=False)
    assert nested["n"]["b"] is not None and [*source.state_dict(None, "x.")][1] == "x.n.b"
    for state in (nested, source.state_dict()):
        for from_flatten in (None, state is not nested):
            target = Holder().params
            target.data.apply(lambda leaf: leaf.fill_(9))
            matched = target.load_state_dict(state, from_flatten=from_flatten)
            assert not matched.missing_keys and (target == source).all()
    with pytest.raises(RuntimeError, match='Missing key.*"n.b"'):
        Holder().params.load_state_dict(nested, from_flatten=True)


def test_moves_casts_and_modes():
    module = Holder()
    w, nested = module.params["w"], module.params.n
    module.double()
    assert module.params["w"] is w and w.dtype == nested.b.dtype == torch.float64
    assert module.params["n", "i"].dtype == torch.int64
    assert module.requires_grad_(False) is module
    assert not any(p.requires_grad for p in module.params.parameters())
    assert module.requires_grad_().params["w"].requires_grad
    assert not module.params["n", "i"].requires_grad
    assert not module.eval().params.n.training and module.train().params.training
    module.to("meta")
    assert module.params["w"].is_meta and isinstance(module.params["w"], nn.Parameter)
    assert nested.i.is_meta and nested.b is module.params["n", "b"]
    whole = module.params.to(torch.int32)
    assert names(whole) == [] and buffers(whole) == ["w", "n.b", "n.i"]  # none has a gradient
    params = module.to_empty(device="cpu").params
    assert not params["n", "i"].is_meta
    assert same(list(params.parameters()), [params["w"], params["n", "b"]])


@pytest.mark.parametrize("lock", [False, True])
def test_swapped_with_to_module(lock):
    module = Holder(lock=lock)
    w, nested, b = module.params["w"], module.params.n, module.params.n.b
    plus = TensorDict.from_module(module).data.apply(lambda leaf: leaf * 0 + 5)
    before = sums(module.params)
    with plus.to_module(module):
        assert sums(module.params) == [15, 10, 10] and sums(module.params["n"]) == [10, 10]
        assert nested.b.sum() == 10 and module(torch.ones(A)) == 5 * (A + 1 + A + B)
    assert sums(module.params) == before and module.params["w"] is w and nested.b is b
    assert next(nested.parameters()) is b and any(p is w for p in module.parameters())


@pytest.mark.parametrize("lock", [False, True])
@pytest.mark.parametrize("kind", [Holder, NestedHolder])
def test_functional_call_uses_the_values_and_restores_the_parameters(kind, lock):
    module, x = kind(lock=lock), torch.ones(A)
    parameters, before = list(module.parameters()), module(x).item()
    values = {name: torch.full_like(p, 2) for name, p in module.named_parameters()}

    def call(values, x):
        return functional_call(module, values, (x,))

    more = 2 * B + 1 if kind is NestedHolder else 0
    assert call(values, x).item() == 2 * A + 2 + 2 * A + 2 * B + more
    assert module(x).item() == before
    shift = functional_call(module, {"params.n.b": torch.full((B,), 5.0)}, (x,)) - before
    assert shift.item() == pytest.approx(4 * B * (2 if more else 1))
    for wrong, arguments, strict, match in (
        (values, torch.ones(A + 1), False, "size|shape"),
        ({"params.n.zz": torch.ones(1)}, x, True, "params.n.zz"),
    ):
        with pytest.raises(RuntimeError, match=match):
            functional_call(module, wrong, (arguments,), strict=strict)
    assert same(list(module.parameters()), parameters) and module.params["w"] is parameters[2]
    assert module.params["n", "b"] is module.params._parameters["n.b"] is parameters[3]
    grads = torch.func.grad(lambda v: call(v, x).sum())(values)
    assert grads["params.n.b"].tolist() == [2 if more else 1] * B
    stacked = {name: torch.stack([v, v + 1]) for name, v in values.items()}
    out = torch.vmap(lambda v: call(v, x))(stacked)
    assert out[1].item() - out[0].item() == A + 1 + A + B * (2 if more else 1)
    if not lock and kind is NestedHolder:
        compiled = torch.compile(call, fullgraph=True, backend="eager")
        assert torch.equal(compiled(values, x), call(values, x)) and module(x).item() == before
        assert same(list(module.parameters()), parameters)


def test_a_removed_container_is_independent_and_is_freed():
    params = make()
    old, leaf = params.n, weakref.ref(params.w)
    params["n"] = TensorDict(b=torch.zeros(1))
    assert old.b.sum() == B and params.n.b.sum() == 0
    old["c"] = torch.ones(1)
    assert names(old) == ["b", "c"] and names(params) == ["w", "n.b"]
    gc.disable()  # it is not needed
    try:
        del params, old
        assert leaf() is None
    finally:
        gc.enable()


# --- attributes ---------------------------------------------------------------------------------


def test_attributes():
    params = Params(TensorDict(keys=torch.ones(1), get=TensorDict(x=torch.ones(1))))
    assert callable(params.keys) and list(params.keys()) == ["keys", "get"]
    assert params.get("get")["x"].item() == 1  # methods stay methods
    assert Params(TensorDict(name="actor", w=torch.ones(1))).name == "actor"
    params = make()
    assert params.w is params["w"] and not hasattr(params, "absent")
    with pytest.raises(AttributeError, match="absent"):
        params.absent  # noqa: B018
    nested = params.n
    assert type(nested) is type(params.get_submodule("n")) is Params
    assert type(params["n"]) is TensorDict and names(nested) == ["b"] and buffers(nested) == ["i"]
    assert nested.b is params["n", "b"] and nested["i"] is params["n", "i"]
    params["n", "c"] = torch.ones(1)  # later changes are visible on both sides
    params["n", "b"] = torch.zeros(B)
    nested["d"] = torch.ones(1)
    assert isinstance(nested.c, nn.Parameter) and isinstance(params["n", "d"], nn.Parameter)
    assert nested.b is params["n", "b"] is next(nested.parameters())
    del nested["b"]
    assert names(nested) == ["c", "d"] and names(params) == ["w", "n.c", "n.d"]
    for twin in (copy.deepcopy(nested), nested.clone()):
        twin["e"] = torch.ones(1)
        assert twin.c is not nested.c and "e" not in params["n"]
    params.lock_()
    assert nested.is_locked and params.n is nested
    with pytest.raises(RuntimeError, match="Cannot modify locked"):
        nested["d"] = torch.ones(1)
    with pytest.raises(RuntimeError, match="part of a locked graph"):
        nested.unlock_()
    deep = Params(TensorDict(a=dict(b=dict(c=torch.ones(1)))))
    deep.a.b["d"] = torch.zeros(2)
    assert names(deep) == ["a.b.c", "a.b.d"] and deep.a.b.d is deep["a"]["b"]["d"]


def test_assigned_attributes():
    params, w = make(), nn.Parameter(torch.ones(A))
    params.w, params.v = w, nn.Parameter(torch.ones(1))
    params.n.b = nn.Parameter(torch.zeros(B))
    assert params["w"] is w and params["v"] is params.v and params["n", "b"].sum() == 0
    assert sorted(names(params)) == ["n.b", "v", "w"]
    assert list(params.state_dict()) == ["w", "n.b", "n.i", "v"]
    params.n = TensorDict(d=torch.ones(2))
    assert params["n", "d"] is params.n.d and "n.b" not in params.state_dict()
    del params.w
    assert "w" not in params
    with pytest.raises(TypeError, match="cannot assign"):
        params.v = torch.ones(1)


@pytest.mark.parametrize("lock", [False, True])
def test_tensors_put_into_the_registries_are_in_the_container(lock):
    params, w, b = make(lock=lock), nn.Parameter(torch.ones(A)), torch.zeros(B)
    assert sums(params["n"]) == [2, 1]
    params._parameters["w"], params._parameters["n.b"] = w, b
    params.n._buffers["i"] = b
    assert params["w"] is w and params["n", "b"] is b and params["n", "i"] is b
    assert sums(params["n"]) == [0, 0] and params.n._parameters["b"] is b
    assert dict(params.named_parameters())["n.b"] is b
    if lock:
        with pytest.raises(
            TypeError, match="an entry of TensorDictParams must be a tensor, got NoneT"
        ):
            params._parameters["w"] = None
        for change in (
            lambda: params.register_parameter("v", nn.Parameter(torch.ones(1))),
            lambda: delattr(params, "w"),
        ):
            with pytest.raises(RuntimeError, match="Cannot modify locked"):
                change()
        assert list(params.state_dict()) == ["w", "n.b", "n.i"]
        return
    params = make()
    params.register_parameter("v", nn.Parameter(torch.ones(1)))
    params.register_buffer("k", torch.arange(2))
    params._parameters.update(u=nn.Parameter(torch.ones(1)))
    assert params["v"].item() == 1 and params["k"].tolist() == [0, 1]
    assert params._parameters.pop("n.b").sum() == B
    assert set(params.keys(True, True)) == {"w", ("n", "i"), "v", "k", "u"}
    with pytest.raises(KeyError):
        del params._parameters["absent"]
    dotted = Params(TensorDict({"a.b": dict(c=torch.ones(1)), "d.e": torch.ones(1)}))
    for name in list(dotted._parameters):
        dotted._parameters[name] = torch.zeros(1)
    assert dotted["a.b", "c"].item() == dotted["d.e"].item() == 0


# --- conversion and writes ----------------------------------------------------------------------


def test_constructors():
    assert names(Params({"a": {"b": torch.ones(1)}})) == ["a.b"] and not list(Params().keys())
    for lock in (False, True):
        made = TensorDict.from_module(nn.Linear(A, 1), as_module=True, lock=lock)
        assert made.is_locked is lock and names(made) == ["weight", "bias"]
    entries = {"w": torch.ones(2), "n": {"b": torch.ones(2)}}
    for made in (
        Params.from_dict(entries, batch_size=[2]),
        Params().from_dict_instance(entries, batch_size=[2]),
        Params(Pair(w=torch.ones(2), n=TensorDict(entries["n"]), batch_size=[2])),
    ):
        assert type(made) is Params and made.batch_size == (2,)
        assert names(made) == ["w", "n.b"]


def test_set_tensors_are_converted_and_registered():
    params, parameter = make(), nn.Parameter(torch.ones(1))
    params["v"], params["n", "c"], params["k"] = parameter, torch.ones(1), torch.arange(2)
    params.update({"m": {"d": torch.ones(1)}})
    assert params["v"] is parameter and sorted(names(params)) == ["m.d", "n.b", "n.c", "v", "w"]
    assert isinstance(params["m", "d"], nn.Parameter) and "k" in buffers(params)
    assert isinstance(params.setdefault("s", torch.ones(1)), nn.Parameter)
    assert params.setdefault("w", torch.ones(A)).tolist() == [0] * A
    w = params["w"]
    params.update({"w": torch.ones(A)})  # replaces
    assert params["w"] is not w and params["w"].tolist() == [1] * A
    del params["w"]
    params.rename_key_("n", "o")
    assert sorted(names(params)) == ["m.d", "o.b", "o.c", "s", "v"]
    params.lock_()
    with pytest.raises(RuntimeError, match="Cannot modify locked"):
        params["x"] = torch.ones(1)
    params.set_("v", torch.zeros(1))
    with params.unlock_():
        params["x"] = torch.ones(1)
    assert parameter.item() == 0 and isinstance(params["x"], nn.Parameter)
    rows = Params(TensorDict(a=torch.zeros(B, A), batch_size=[B]))
    rows.set_at_("a", torch.ones(A), 0)
    rows.update_at_(TensorDict(a=torch.full((A,), 2.0)), 1)
    assert rows["a"][:, 0].tolist() == [1, 2] and isinstance(rows["a"], nn.Parameter)


def test_results_of_operations():
    params = Params(TensorDict(a=torch.zeros(B, A), batch_size=[B]))
    for operation in (
        lambda p: p[0],
        lambda p: p.data,
        lambda p: p.expand(4, B),
        lambda p: p.unbind(0)[0],
        lambda p: torch.cat([p, p]),
        lambda p: p.apply(lambda leaf: leaf * 2),
        lambda p: p.select("a"),
        lambda p: p.flatten_keys("."),
        lambda p: p + 1,
        lambda p: p.to_tensordict(),
        lambda p: p.float(),
        lambda p: p.empty(),
    ):
        assert type(operation(params)) is TensorDict  # a plain one
    torch.stack([params[0], params.unbind(0)[1]])["a"].sum().backward()
    assert params.grad["a"].sum() == B * A
    params = make()
    for moved in (params.to(torch.float64), params.cpu(), params.clone()):
        assert type(moved) is Params and isinstance(moved["w"], nn.Parameter)
    assert params.to(torch.float64)["w"].dtype == torch.float64 != params["w"].dtype
    for same_leaves in (params.clone(False), params.copy()):
        assert type(same_leaves) is Params and same_leaves["w"] is params["w"]
    for refused in (lambda: params.map(lambda leaf: leaf), params.memmap_):
        with pytest.raises(RuntimeError):
            refused()


def test_get_hooks_are_called_with_each_read_tensor():
    params, calls = make(), []

    def hook(container, value):
        calls.append(container)
        return value + 1

    assert params.register_get_post_hook(hook) is None
    assert params.get("absent") is None and params.get("absent", 3) == 3 and not calls
    assert params["w"].tolist() == params.get("w").tolist() == [1] * A and calls[0] is params
    assert params["n", "b"].tolist() == params.get(("n", "b")).tolist() == [2] * B
    assert sums(params) == [3, 4, 3] and dict(params.items())["w"].tolist() == [1] * A
    assert dict(params.items(True, True))["n", "b"].tolist() == [2] * B
    for plain in (  # operations and modules see the tensor itself
        params.data["w"],
        params.clone().data["w"],
        params.expand(1)["w"][0],
        params.select("w")["w"],
        params.apply(lambda leaf: leaf)["w"],
        params.state_dict()["w"],
        next(params.parameters()),
    ):
        assert plain.tolist() == [0] * A
    params = make()
    params.register_get_post_hook(lambda *_: None)  # which leaves the value
    assert params["w"].tolist() == [0] * A
    params.register_get_post_hook(lambda _, leaf: leaf * 2)
    params["w"].sum().backward()
    assert next(params.parameters()).grad.tolist() == [2] * A
