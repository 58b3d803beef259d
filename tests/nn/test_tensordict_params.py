"""Containers of parameters in other modules: what torch does to a module reaches their tensors."""

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call

from raffia import TensorDict, from_modules
from raffia.nn import TensorDictParams

B, A = 2, 3


def make(**options):
    nested = TensorDict(b=torch.ones(B), i=torch.arange(B))
    return TensorDictParams(TensorDict(w=torch.zeros(A), n=nested), **options)


class Holder(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layer = nn.Linear(A, 1)
        self.params = make(**options)

    def forward(self, x):
        return self.layer(x) + (self.params["w"] * x).sum() + self.params["n", "b"].sum()


class TestInAModule:
    def test_names(self):
        module = Holder()
        names = ["layer.weight", "layer.bias", "params.w", "params.n.b"]
        assert [name for name, _ in module.named_parameters()] == names
        assert [name for name, _ in module.named_parameters(recurse=False)] == []
        assert [name for name, _ in module.named_parameters(prefix="net")][-1] == "net.params.n.b"
        assert [name for name, _ in module.named_buffers()] == ["params.n.i"]
        assert [name for name, _ in module.named_modules()] == ["", "layer", "params"]
        assert [n for n, _ in module.params.named_parameters(recurse=False)] == ["w", "n.b"]

    def test_parameters_are_the_entries(self):
        module = Holder()
        assert module.params.get_parameter("w") is module.params["w"]
        assert any(p is module.params["n", "b"] for p in module.parameters())

    def test_nested_parameter_by_name(self):
        params = make()
        assert params.get_parameter("n.b") is params["n", "b"]
        with pytest.raises(AttributeError):
            params.get_parameter("n.c")

    def test_state_dict_round_trip(self):
        source, target = Holder(), Holder()
        for leaf in source.params.parameters():
            leaf.data.normal_()
        source.params["n", "i"].add_(5)
        state = source.state_dict()
        assert list(state)[2:] == ["params.w", "params.n.b", "params.n.i"]
        kept = list(target.parameters())
        assert str(target.load_state_dict(state)) == "<All keys matched successfully>"
        assert (target.params == source.params).all()
        assert all(a is b for a, b in zip(kept, target.parameters(), strict=True))

    def test_state_dict_is_detached_unless_asked_otherwise(self):
        module = Holder()
        assert not module.state_dict()["params.w"].requires_grad
        assert module.state_dict(keep_vars=True)["params.w"] is module.params["w"]
        assert list(make().state_dict(prefix="a.")) == ["a.w", "a.n.b", "a.n.i"]

    def test_ours_state_dict_that_does_not_fit(self):
        module, state = Holder(), Holder().state_dict()
        lacking = {name: leaf for name, leaf in state.items() if name != "params.w"}
        with pytest.raises(RuntimeError, match="Missing key.*params.w"):
            module.load_state_dict(lacking)
        assert module.load_state_dict(lacking, strict=False).missing_keys == ["params.w"]
        with pytest.raises(RuntimeError, match="Unexpected key.*params.x"):
            module.load_state_dict({**state, "params.x": torch.ones(1)})
        with pytest.raises(RuntimeError, match=r"params.w: \(4,\) for \(3,\)"):
            module.load_state_dict({**state, "params.w": torch.ones(4)})

    def test_assigned_state_dict(self):
        module = Holder()
        state = {name: leaf + 1 for name, leaf in module.state_dict().items()}
        module.load_state_dict(state, assign=True)
        assert isinstance(module.params["w"], nn.Parameter)
        assert module.params["w"].tolist() == [1] * A
        assert module.params["n", "i"].tolist() == [1, 2]

    def test_cast(self):
        module = Holder()
        w = module.params["w"]
        module.double()
        assert module.params["w"] is w and w.dtype == torch.float64
        assert module.params["n", "i"].dtype == torch.int64
        assert module(torch.ones(A).double()).dtype == torch.float64
        assert module.to(torch.bfloat16).params["n", "b"].dtype == torch.bfloat16

    def test_ours_to_another_kind_of_device(self):
        module = Holder().to("meta")
        assert module.params["w"].is_meta and isinstance(module.params["w"], nn.Parameter)
        module.to_empty(device="cpu")
        assert not module.params["n", "i"].is_meta
        assert all(
            p is q
            for p, q in zip(
                module.params.parameters(),
                [module.params["w"], module.params["n", "b"]],
                strict=True,
            )
        )

    def test_gradients(self):
        module = Holder()
        module(torch.ones(A)).backward()
        grad = module.params.grad
        assert grad["w"].tolist() == [1] * A and grad["n", "b"].tolist() == [1] * B
        assert type(grad) is TensorDict and "i" not in grad["n"]
        module.zero_grad()
        assert module.params["w"].grad is None and module.params.grad is None

    def test_gradients_set_to_zero(self):
        module = Holder()
        module(torch.ones(A)).backward()
        module.zero_grad(set_to_none=False)
        assert module.params["w"].grad.tolist() == [0] * A

    def test_requires_grad(self):
        module = Holder()
        assert module.requires_grad_(False) is module
        assert not any(p.requires_grad for p in module.params.parameters())
        assert module.requires_grad_().params["w"].requires_grad
        assert not module.params["n", "i"].requires_grad

    def test_mode(self):
        module = Holder().eval()
        assert not module.params.training and module.train().params.training

    @pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.AdamW])
    def test_optimiser(self, optimiser):
        module = Holder()
        before = module(torch.ones(A)).item()
        step = optimiser(module.parameters(), lr=0.1)
        module(torch.ones(A)).backward()
        step.step()
        assert (module.params["w"] < 0).all() and (module.params["n", "b"] < 1).all()
        assert module(torch.ones(A)).item() < before

    def test_deepcopy(self):
        module = Holder()
        twin = copy.deepcopy(module)
        twin.params["w"].data.fill_(3)
        assert isinstance(twin.params, TensorDictParams) and module.params["w"].sum() == 0
        assert [n for n, _ in twin.named_parameters()] == [n for n, _ in module.named_parameters()]
        twin(torch.ones(A)).backward()
        assert twin.params["w"].grad is not None and module.params["w"].grad is None

    def test_in_a_list_and_replaced(self):
        layers = nn.ModuleList([make(), make()])
        assert len(list(layers.parameters())) == 4
        assert "1.n.b" in layers.state_dict()
        module = Holder()
        module.params = TensorDictParams(TensorDict(v=torch.ones(1)))
        assert [n for n, _ in module.named_parameters()][2:] == ["params.v"]

    def test_apply_of_its_own_gives_tensors(self):
        seen = []
        make().apply(lambda leaf: seen.append(tuple(leaf.shape)))
        assert seen == [(A,), (B,), (B,)]

    def test_ours_saved_whole(self):
        module, file = Holder(), io.BytesIO()
        module.params.n.lock_()
        torch.save(module, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        assert [n for n, _ in again.named_parameters()] == [n for n, _ in module.named_parameters()]
        assert again.params.n.b is again.params["n", "b"] and again.params.n.is_locked
        assert any(p is again.params.n.b for p in again.parameters())

    def test_swapped_with_to_module(self):
        module = Holder()
        w, ones = module.params["w"], TensorDict.from_module(module).apply(torch.ones_like)
        with ones.to_module(module):
            assert module.params["w"].tolist() == [1] * A
            assert module(torch.ones(A)).item() == A + 1 + A + B
        assert module.params["w"] is w and any(p is w for p in module.parameters())

    @pytest.mark.parametrize("lock", [False, True])
    def test_ours_swapped_nested_ones_follow(self, lock):
        module = Holder()
        if lock:
            module.params.lock_()
        nested = module.params.n
        sums = lambda: [leaf.sum().item() for leaf in module.params["n"].values()]  # noqa: E731
        before, b = sums(), nested.b
        plus = TensorDict.from_module(module).data.apply(lambda leaf: leaf + 5)
        with plus.to_module(module):
            assert sums() == [12, 11] and nested.b.sum() == 12
        assert sums() == before and nested.b is b and next(nested.parameters()) is b

    @pytest.mark.parametrize("lock", [False, True])
    def test_swapped_listings_follow(self, lock):
        module = Holder()
        if lock:
            module.params.lock_()
        before = [leaf.sum().item() for leaf in module.params.values(True, True)]
        plus = TensorDict.from_module(module).data.apply(lambda leaf: leaf + 5)
        with plus.to_module(module):
            assert [leaf.sum().item() for leaf in module.params.values(True, True)] == [15, 12, 11]
        assert [leaf.sum().item() for leaf in module.params.values(True, True)] == before


class TestAttributes:
    def test_leaf(self):
        params = make()
        assert params.w is params["w"]
        assert not hasattr(params, "absent")
        with pytest.raises(AttributeError, match="absent"):
            params.absent  # noqa: B018

    def test_nested(self):
        params = make()
        assert type(params.n) is TensorDictParams and type(params["n"]) is TensorDict
        assert params.n.b is params["n", "b"] and params.n["i"] is params["n", "i"]
        assert [name for name, _ in params.n.named_parameters()] == ["b"]
        assert [name for name, _ in params.n.named_buffers()] == ["i"]
        assert params.get_buffer("n.i") is params["n", "i"]
        assert type(params.get_submodule("n")) is TensorDictParams

    def test_methods_stay_methods(self):
        params = TensorDictParams(TensorDict(keys=torch.ones(1), get=TensorDict(x=torch.ones(1))))
        assert callable(params.keys) and list(params.keys()) == ["keys", "get"]
        assert params.get("get")["x"].item() == 1

    def test_ours_non_tensor(self):
        assert TensorDictParams(TensorDict(name="actor", w=torch.ones(1))).name == "actor"

    def test_are_no_submodules(self):
        module = Holder()
        assert module.params.n.b.sum() == B
        assert [name for name, _ in module.named_modules()] == ["", "layer", "params"]
        assert len(list(module.parameters())) == 4

    def test_ours_later_changes_are_seen(self):
        params = make()
        nested = params.n
        params["n", "c"] = torch.ones(1)
        assert isinstance(nested.c, nn.Parameter)
        assert [name for name, _ in nested.named_parameters()] == ["b", "c"]
        params["n", "b"] = torch.zeros(B)
        assert nested.b is params["n", "b"] and next(nested.parameters()) is nested.b
        params.lock_()
        assert nested.is_locked and params.n is nested

    def test_ours_changes_are_changes_of_the_whole(self):
        params = make()
        params.n["c"] = torch.ones(1)
        assert isinstance(params["n", "c"], nn.Parameter)
        assert [name for name, _ in params.named_parameters()] == ["w", "n.b", "n.c"]
        del params.n["b"]
        assert [name for name, _ in params.named_parameters()] == ["w", "n.c"]
        with pytest.raises(RuntimeError, match="Cannot modify locked"):
            params.lock_().n["d"] = torch.ones(1)
        with pytest.raises(RuntimeError, match="part of a locked graph"):
            params.n.unlock_()

    def test_ours_deeper(self):
        params = TensorDictParams(TensorDict(a=dict(b=dict(c=torch.ones(1)))))
        params.a.b["d"] = torch.zeros(2)
        assert [name for name, _ in params.named_parameters()] == ["a.b.c", "a.b.d"]
        assert params.a.b.d is params["a"]["b"]["d"]

    def test_ours_one_that_is_taken_out_stands_alone(self):
        params = make()
        old = params.n
        params["n"] = TensorDict(b=torch.zeros(1))
        assert old.b.sum() == B and params.n.b.sum() == 0
        old["c"] = torch.ones(1)
        assert [name for name, _ in old.named_parameters()] == ["b", "c"]
        assert [name for name, _ in params.named_parameters()] == ["w", "n.b"]

    def test_ours_moved_with_the_whole(self):
        module = Holder()
        nested = module.params.n
        module.double()
        assert nested.b.dtype == torch.float64
        module.to("meta")
        assert nested.i.is_meta and nested.b is module.params["n", "b"]
        assert not module.eval().params.n.training

    def test_ours_assigned(self):
        params, w = make(), nn.Parameter(torch.ones(A))
        params.w = w
        params.v = nn.Parameter(torch.ones(1))
        params.n.b = nn.Parameter(torch.zeros(B))
        assert params["w"] is w and params["v"] is params.v and params["n", "b"].sum() == 0
        names = [name for name, _ in params.named_parameters()]
        assert sorted(names) == ["n.b", "v", "w"]
        assert list(params.state_dict()) == ["w", "n.b", "n.i", "v"]
        params.n = TensorDict(d=torch.ones(2))
        assert params["n", "d"] is params.n.d and "n.b" not in params.state_dict()
        del params.w
        assert "w" not in params
        with pytest.raises(TypeError, match="cannot assign"):
            params.v = torch.ones(1)

    def test_ours_copies(self):
        params = make()
        for twin in (copy.deepcopy(params.n), params.n.clone()):
            twin["c"] = torch.ones(1)
            assert twin.b is not params.n.b and "c" not in params["n"]

    def test_ours_are_freed_without_the_garbage_collector(self):
        params = make()
        nested, leaf = params.n, weakref.ref(params.w)
        gc.disable()
        try:
            del params, nested
            assert leaf() is None
        finally:
            gc.enable()


class TestRegistries:
    @pytest.mark.parametrize("lock", [False, True])
    def test_ours_what_is_put_there_is_in_the_container(self, lock):
        params, w, b = make(lock=lock), nn.Parameter(torch.ones(A)), torch.zeros(B)
        before = [leaf.sum().item() for leaf in params["n"].values()]
        params._parameters["w"] = w
        params._parameters["n.b"] = b
        params.n._buffers["i"] = b
        assert params["w"] is w and params["n", "b"] is b and params["n", "i"] is b
        assert [leaf.sum().item() for leaf in params["n"].values()] == [0, 0] != before
        assert dict(params.named_parameters())["n.b"] is b and params.n._parameters["b"] is b

    def test_ours_add_and_remove(self):
        params = make()
        params.register_parameter("v", nn.Parameter(torch.ones(1)))
        params.register_buffer("k", torch.arange(2))
        assert params["v"].item() == 1 and params["k"].tolist() == [0, 1]
        params._parameters.update(u=nn.Parameter(torch.ones(1)))
        assert params._parameters.pop("n.b").sum() == B
        assert sorted(params.keys(True, True), key=str) == sorted(
            ["w", ("n", "i"), "v", "k", "u"], key=str
        )
        with pytest.raises(KeyError):
            del params._parameters["absent"]

    def test_ours_refuse(self):
        params = make(lock=True)
        with pytest.raises(TypeError, match="an entry of TensorDictParams is a tensor, got NoneT"):
            params._parameters["w"] = None
        with pytest.raises(RuntimeError, match="Cannot modify locked"):
            params.register_parameter("v", nn.Parameter(torch.ones(1)))
        with pytest.raises(RuntimeError, match="Cannot modify locked"):
            del params.w
        assert list(params.state_dict()) == ["w", "n.b", "n.i"]

    def test_ours_names_with_dots(self):
        params = TensorDictParams(TensorDict({"a.b": dict(c=torch.ones(1)), "d.e": torch.ones(1)}))
        for name in list(params._parameters):
            params._parameters[name] = torch.zeros(1)
        assert params["a.b", "c"].item() == params["d.e"].item() == 0


class TestFunctionalCall:
    def values(self, module):
        return {name: torch.full_like(p, 2) for name, p in module.named_parameters()}

    @pytest.mark.parametrize("lock", [False, True])
    def test_ours_uses_the_values_and_puts_back(self, lock):
        module, x = Holder(lock=lock), torch.ones(A)
        kept, before = dict(module.named_parameters()), module(x).item()
        out = functional_call(module, self.values(module), (x,), strict=False)
        assert out.item() == 2 * A + 2 + 2 * A + 2 * B and not out.requires_grad
        assert module(x).item() == before
        for name, parameter in module.named_parameters():
            assert parameter is kept.pop(name)
        assert not kept and module.params["n", "b"] is module.params._parameters["n.b"]

    def test_ours_nested_alone(self):
        module, x = Holder(), torch.zeros(A)
        shift = functional_call(module, {"params.n.b": torch.full((B,), 5.0)}, (x,)) - module(x)
        assert shift.item() == pytest.approx(4 * B)

    def test_ours_puts_back_after_an_error(self):
        module = Holder()
        kept = dict(module.named_parameters())
        with pytest.raises(RuntimeError):
            functional_call(module, self.values(module), (torch.ones(A + 1),))
        assert all(parameter is kept[name] for name, parameter in module.named_parameters())
        assert module.params["w"] is kept["params.w"]
        assert module.params["n", "b"] is kept["params.n.b"]

    def test_ours_gradients_and_vmap(self):
        module, x = Holder(), torch.ones(A)
        values = self.values(module)
        grads = torch.func.grad(lambda v: functional_call(module, v, (x,)).sum())(values)
        assert grads["params.n.b"].tolist() == [1] * B and grads["params.w"].tolist() == [1] * A
        stacked = {name: torch.stack([v, v + 1]) for name, v in values.items()}
        out = torch.vmap(lambda v: functional_call(module, v, (x,)))(stacked)
        assert out[1].item() - out[0].item() == A + 1 + A + B

    def test_unknown_names(self):
        module = Holder()
        with pytest.raises(RuntimeError, match="params.n.zz"):
            functional_call(module, {"params.n.zz": torch.ones(1)}, (torch.ones(A),), strict=True)


class TestSharedParameters:
    def test_are_registered_once(self):
        w = nn.Parameter(torch.ones(1))
        params = TensorDictParams(TensorDict(a=w, n=TensorDict(c=w)))
        assert len(list(params.parameters())) == 1
        assert list(params.state_dict()) == ["a", "n.c"]

    def test_stay_shared_in_clones(self):
        w = nn.Parameter(torch.ones(1))
        clone = TensorDictParams(TensorDict(a=w, n=TensorDict(c=w))).clone()
        assert clone["a"] is clone["n", "c"] and clone["a"] is not w
        assert type(clone) is TensorDictParams and clone["a"].requires_grad and clone["a"].is_leaf

    def test_ours_plain_tensors_become_one_parameter(self):
        w = torch.ones(1)
        params = TensorDictParams(TensorDict(a=w, n=TensorDict(c=w)))
        assert params["a"] is params["n", "c"] and len(list(params.parameters())) == 1

    def test_with_a_layer_outside(self):
        module = Holder()
        module.params["w2"] = module.layer.weight
        assert len(list(module.parameters())) == 4
        assert module.params["w2"] is module.layer.weight
        module.double()
        assert module.params["w2"] is module.layer.weight

    @pytest.mark.parametrize("leaf", [nn.Buffer(torch.arange(B)), nn.Parameter(torch.ones(1))])
    def test_ours_shared_by_two_containers(self, leaf):
        layers = nn.ModuleList([TensorDictParams(TensorDict(x=leaf)) for _ in range(2)])
        assert [*layers.parameters(), *layers.buffers()][0] is leaf
        assert len(list(layers.parameters())) + len(list(layers.buffers())) == 1

    def test_a_buffer_under_two_names(self):
        count = torch.arange(B)
        params = TensorDictParams(TensorDict(a=count, n=TensorDict(c=count)))
        assert params["a"] is params["n", "c"] and len(list(params.buffers())) == 1


class TestConversion:
    def test_floats_become_parameters_and_the_rest_buffers(self):
        params = make()
        assert isinstance(params["w"], nn.Parameter)
        assert not isinstance(params["n", "i"], nn.Parameter)
        assert [name for name, _ in params.named_buffers()] == ["n.i"]

    @pytest.mark.parametrize("no_convert", [True, "skip"])
    def test_no_convert(self, no_convert):
        w = nn.Parameter(torch.ones(1))
        params = TensorDictParams(TensorDict(w=w, v=torch.ones(1)), no_convert=no_convert)
        assert params["w"] is w and not isinstance(params["v"], nn.Parameter)
        assert [name for name, _ in params.named_buffers()] == ["v"]
        assert params.no_convert == no_convert and make().no_convert is False

    def test_what_is_set_is_converted_and_registered(self):
        params = make()
        params["v"] = torch.ones(1)
        params["n", "c"] = torch.ones(1)
        params.update({"m": {"d": torch.ones(1)}})
        names = [name for name, _ in params.named_parameters()]
        assert sorted(names) == ["m.d", "n.b", "n.c", "v", "w"]
        assert isinstance(params["m", "d"], nn.Parameter)
        params["k"] = torch.arange(2)
        assert "k" in dict(params.named_buffers())

    def test_a_parameter_is_set_as_it_is(self):
        params, v = make(), nn.Parameter(torch.ones(1))
        params["v"] = v
        assert params["v"] is v and any(p is v for p in params.parameters())

    def test_setdefault_gives_what_is_stored(self):
        params = make()
        v = params.setdefault("v", torch.ones(1))
        assert isinstance(v, nn.Parameter) and v is params["v"]
        assert params.setdefault("w", torch.ones(A)).tolist() == [0] * A

    def test_what_is_removed_is_unregistered(self):
        params = make()
        del params["w"]
        params.rename_key_("n", "m")
        assert [name for name, _ in params.named_parameters()] == ["m.b"]
        assert list(params.state_dict()) == ["m.b", "m.i"]

    def test_locked(self):
        params = make().lock_()
        with pytest.raises(RuntimeError, match="Cannot modify locked"):
            params["v"] = torch.ones(1)
        params.set_("w", torch.ones(A))
        assert params["w"].tolist() == [1] * A
        with params.unlock_():
            params["v"] = torch.ones(1)
        assert isinstance(params["v"], nn.Parameter)

    def test_from_module_as_module_is_locked_if_asked_for(self):
        layer = nn.Linear(A, 1)
        assert not TensorDict.from_module(layer, as_module=True).is_locked
        assert TensorDict.from_module(layer, as_module=True, lock=True).is_locked

    def test_a_dict_or_nothing(self):
        params = TensorDictParams({"a": {"b": torch.ones(1)}})
        assert [name for name, _ in params.named_parameters()] == ["a.b"]
        assert list(TensorDictParams().keys()) == []
        assert [n for n, _ in TensorDictParams(w=torch.ones(1)).named_parameters()] == ["w"]


class TestWrites:
    @pytest.mark.parametrize(
        "write",
        [
            lambda p: p.set_("w", torch.ones(A)),
            lambda p: p.update_(TensorDict(w=torch.ones(A))),
            lambda p: p.data.fill_("w", 1.0),
            lambda p: p.fill_("w", 1.0),
            lambda p: p.data.update_({"w": torch.ones(A)}),
            lambda p: p.apply_(lambda leaf: leaf + 1),
            lambda p: p.load_state_dict({**p.state_dict(), "w": torch.ones(A)}),
        ],
    )
    @pytest.mark.parametrize("hooked", [False, True])
    def test_in_place_ones_change_the_parameter_itself(self, write, hooked):
        params = make()
        w = params["w"]
        if hooked:
            params.register_get_post_hook(lambda _, leaf: leaf * 2)
        write(params)
        assert w.tolist() == [1] * A and w.requires_grad and w.is_leaf
        assert next(params.parameters()) is w

    @pytest.mark.parametrize("hooked", [False, True])
    def test_zero(self, hooked):
        params = make()
        b = params["n", "b"]
        if hooked:
            params.register_get_post_hook(lambda _, leaf: leaf + 2)
        params.zero_()
        assert b.tolist() == [0] * B and b.requires_grad

    def test_replacing_ones_make_a_new_parameter(self):
        params = make()
        w = params["w"]
        params.update({"w": torch.ones(A)})
        assert params["w"] is not w and params["w"].tolist() == [1] * A
        assert len(list(params.parameters())) == 2

    def test_of_some_rows(self):
        params = TensorDictParams(TensorDict(a=torch.zeros(B, A), batch_size=[B]))
        params.set_at_("a", torch.ones(A), 0)
        params.update_at_(TensorDict(a=torch.full((A,), 2.0)), 1)
        assert params["a"][:, 0].tolist() == [1, 2] and isinstance(params["a"], nn.Parameter)


class TestPostHook:
    def make(self):
        params, seen = make(), []

        def hook(container, value):
            seen.append((container, value))
            return value + 1

        assert params.register_get_post_hook(hook) is None
        return params, seen

    def test_stands_between_reader_and_tensor(self):
        params, seen = self.make()
        assert params["w"].tolist() == params.get("w").tolist() == [1] * A
        assert params["n", "b"].tolist() == params.get(("n", "b")).tolist() == [2] * B
        assert seen[0][0] is params

    def test_listings(self):
        params, _ = self.make()
        assert [leaf.sum().item() for leaf in params.values(True, True)] == [3, 4, 3]
        assert dict(params.items(True, True))["n", "b"].tolist() == [2] * B
        assert dict(params.items())["w"].tolist() == [1] * A

    def test_none_keeps_the_value(self):
        params = make()
        params.register_get_post_hook(lambda *_: None)
        assert params["w"].tolist() == [0] * A

    def test_operations_and_modules_see_the_tensor_itself(self):
        params, _ = self.make()
        assert params.data["w"].tolist() == params.clone().data["w"].tolist() == [0] * A
        assert params.expand(1)["w"].tolist() == [[0] * A]
        assert params.select("w")["w"].tolist() == [0] * A
        assert params.apply(lambda leaf: leaf)["w"].tolist() == [0] * A
        assert [p.sum().item() for p in params.parameters()] == [0, B]
        assert params.state_dict()["w"].tolist() == [0] * A

    def test_gradients_pass_through(self):
        params = make()
        params.register_get_post_hook(lambda _, leaf: leaf * 2)
        params["w"].sum().backward()
        assert next(params.parameters()).grad.tolist() == [2] * A

    def test_ours_a_missing_entry_has_no_value(self):
        params, seen = self.make()
        assert params.get("absent") is None and params.get("absent", 3) == 3 and not seen
        default = torch.ones(1)
        assert params.get("absent", default) is default


class TestResults:
    @pytest.mark.parametrize(
        "operation",
        [
            lambda p: p[0],
            lambda p: p[:1],
            lambda p: p.data,
            lambda p: p.detach(),
            lambda p: p.expand(4, B),
            lambda p: p.unsqueeze(0),
            lambda p: p.reshape(1, B),
            lambda p: p.unbind(0)[0],
            lambda p: p.split(1)[0],
            lambda p: torch.stack([p, p]),
            lambda p: torch.cat([p, p]),
            lambda p: p.apply(lambda leaf: leaf * 2),
            lambda p: p.select("a"),
            lambda p: p.flatten_keys("."),
            lambda p: p + 1,
            lambda p: p.to_tensordict(),
            lambda p: p.float(),
            lambda p: p.empty(),
        ],
    )
    def test_of_operations_are_plain(self, operation):
        params = TensorDictParams(TensorDict(a=torch.zeros(B, A), batch_size=[B]))
        assert type(operation(params)) is TensorDict

    def test_keep_the_graph(self):
        params = TensorDictParams(TensorDict(a=torch.zeros(B, A), batch_size=[B]))
        torch.stack([params[0], params.unbind(0)[1]])["a"].sum().backward()
        assert params.grad["a"].sum() == B * A

    def test_of_moves_are_parameters(self):
        params = make()
        for moved in (params.to(torch.float64), params.cpu(), params.to("cpu"), params.clone()):
            assert type(moved) is TensorDictParams and isinstance(moved["w"], nn.Parameter)
        assert params.to(torch.float64)["w"].dtype == torch.float64
        assert params["w"].dtype == torch.float32

    def test_shallow_copies_hold_the_same_parameters(self):
        params = make()
        for same in (params.clone(False), params.copy()):
            assert type(same) is TensorDictParams and same["w"] is params["w"]

    @pytest.mark.parametrize("operation", ["map", "memmap_"])
    def test_refused(self, operation):
        arguments = (lambda leaf: leaf,) if operation == "map" else ()
        with pytest.raises(RuntimeError):
            getattr(make(), operation)(*arguments)

    def test_there_is_nothing_to_call(self):
        with pytest.raises(NotImplementedError):
            make()()


class TestVmap:
    def test_over_stacked_modules_with_gradients(self):
        layers = [nn.Linear(A, 1) for _ in range(B)]
        params = TensorDictParams(from_modules(*layers), no_convert=True)
        empty = nn.Linear(A, 1, device="meta")

        def call(params, x):
            with params.to_module(empty):
                return empty(x)

        x = torch.randn(A)
        out = torch.vmap(call, (0, None))(params, x)
        torch.testing.assert_close(out, torch.stack([layer(x) for layer in layers]))
        out.sum().backward()
        assert params["weight"].grad.shape == (B, 1, A)

    def test_held_in_a_module(self):
        class Ensemble(nn.Module):
            def __init__(self):
                super().__init__()
                weights = torch.randn(B, A)
                self.params = TensorDictParams(TensorDict(w=weights, batch_size=[B]))

            def forward(self, x):
                return torch.vmap(lambda p, x: (p["w"] * x).sum(), (0, None))(self.params, x)

        module = Ensemble()
        module(torch.ones(A)).sum().backward()
        assert module.params["w"].grad.unique().tolist() == [1]


def test_compiles_in_a_module():
    module = Holder()
    call = torch.compile(module, fullgraph=True, backend="eager")
    x = torch.ones(A)
    assert torch.equal(call(x), module(x))


class NestedHolder(Holder):
    def forward(self, x):
        return super().forward(x) + self.params.n.b.sum() + self.params.n["i"].sum()


def test_ours_attributes_compile():
    module, x = NestedHolder(), torch.ones(A)
    call = torch.compile(module, fullgraph=True, backend="eager")
    assert torch.equal(call(x), module(x))


@pytest.mark.parametrize("kind", [Holder, NestedHolder])
def test_ours_functional_call_compiles(kind):
    module, x = kind(), torch.ones(A)
    values = {name: torch.full_like(p, 3) for name, p in module.named_parameters()}

    def call(values, x):
        return functional_call(module, values, (x,))

    kept, before = list(module.parameters()), module(x)
    assert torch.equal(
        torch.compile(call, fullgraph=True, backend="eager")(values, x), call(values, x)
    )
    assert torch.equal(module(x), before) and not torch.equal(call(values, x), before)
    assert all(a is b for a, b in zip(module.parameters(), kept, strict=True))


def test_what_is_no_parameter_is_a_buffer():
    source = TensorDict(f=torch.ones(A), i=torch.arange(B), b=nn.Buffer(torch.ones(B)))
    params = TensorDictParams(source)
    assert {key for key, leaf in params.items() if isinstance(leaf, nn.Buffer)} == {"i", "b"}
    assert isinstance(params["f"], nn.Parameter)
    kept = TensorDictParams(source.clone(), no_convert=True)
    assert not list(kept.parameters()) and isinstance(kept["f"], nn.Buffer)
