"""Containers of parameters in other modules: what torch does to a module reaches their tensors."""

import copy

import pytest
import torch
from torch import nn

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

    def test_does_not_keep_module_apply_from_the_other_layers(self):
        seen = []
        Holder().apply(lambda module: seen.append(type(module)))
        assert nn.Linear in seen and Holder in seen

    def test_swapped_with_to_module(self):
        module = Holder()
        w, ones = module.params["w"], TensorDict.from_module(module).apply(torch.ones_like)
        with ones.to_module(module):
            assert module.params["w"].tolist() == [1] * A
            assert module(torch.ones(A)).item() == A + 1 + A + B
        assert module.params["w"] is w and any(p is w for p in module.parameters())

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

    @pytest.mark.parametrize("name", ["buffer", "parameter"])
    def test_ours_shared_by_two_containers(self, name):
        leaf = torch.arange(B) if name == "buffer" else nn.Parameter(torch.ones(1))
        layers = nn.ModuleList([TensorDictParams(TensorDict(x=leaf)) for _ in range(2)])
        assert len(list(layers.parameters())) + len(list(layers.buffers())) == 1


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
