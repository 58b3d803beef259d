"""The functional API: parameters taken out of modules, given at each call, and put back."""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from raffia import TensorDict, from_modules
from raffia.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictParams,
    TensorDictSequential,
)
from raffia.nn.functional_modules import (
    get_functional,
    is_functional,
    make_functional,
    repopulate_module,
)

B, A, P = 2, 3, 5  # rows, features, sets of parameters


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def net():
    return nn.Sequential(nn.Linear(A, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, A)))


def normed():
    return nn.Sequential(nn.Linear(A, 4), nn.BatchNorm1d(4))


def keyed():
    return TensorDictSequential(
        TensorDictModule(nn.Linear(A, 4), in_keys=["x"], out_keys=[("h", "x")]),
        TensorDictModule(nn.Linear(4, 1), in_keys=[("h", "x")], out_keys=["y"]),
    )


class TestTheParameters:
    def test_are_nested_like_the_layers_and_are_the_very_objects(self):
        module = net()
        weight, bias = module[2][0].weight, module[0].bias
        params = make_functional(module)
        assert list(params.keys()) == ["0", "1", "2"]
        assert params["2", "0", "weight"] is weight and params["0", "bias"] is bias
        assert isinstance(params, TensorDict) and params["1"].is_empty()
        assert params.batch_size == () and params.is_locked

    def test_include_buffers(self):
        params = make_functional(normed())
        names = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
        assert sorted(params["1"].keys()) == sorted(names)

    def test_are_gone_from_the_module(self):
        module = normed()
        make_functional(module)
        assert module[0].weight is None and module[1].running_mean is None
        assert not list(module.parameters()) and not module.state_dict()
        assert module._is_stateless and module[0]._is_stateless

    def test_stay_in_the_module_if_asked_for(self):
        module = net()
        params = make_functional(module, keep_params=True)
        assert params["0", "weight"] is module[0].weight
        assert is_functional(module) and not module._is_stateless

    def test_are_not_returned_if_not_asked_for(self):
        module = net()
        assert make_functional(module, return_params=False) is None
        assert module[0].weight is None
        assert make_functional(module, return_params=False) is None

    def test_can_be_taken_once(self):
        module = net()
        make_functional(module)
        with pytest.raises(RuntimeError, match="return_params=True on a functional, stateless"):
            make_functional(module)

    def test_can_be_taken_again_after_they_were_put_back(self):
        module = net()
        repopulate_module(module, make_functional(module))
        params = make_functional(module)
        assert module(torch.ones(A), params).shape == (A,)

    def test_of_anything_but_a_module(self):
        with pytest.raises(TypeError, match="nn.Modules, got function"):
            make_functional(lambda x: x)


class TestCall:
    def test_last_positional_argument_or_keyword(self):
        module, x = net(), torch.randn(B, A)
        expected = module(x)
        params = make_functional(module)
        assert torch.equal(module(x, params), expected)
        assert torch.equal(module(x, params=params), expected)
        assert torch.equal(module(input=x, params=params), expected)

    def test_layer_by_layer(self):
        module, x = net(), torch.randn(B, A)
        params = make_functional(module)
        hidden = module[1](module[0](x, params["0"]), params["1"])
        assert torch.equal(module[2](hidden, params=params["2"]), module(x, params))
        assert torch.equal(module[2][0](hidden, params["2", "0"]), module(x, params))

    def test_leaves_the_module_as_it_was(self):
        module = net()
        params = make_functional(module)
        module(torch.randn(B, A), params)
        assert module[0].weight is None and module[0]._is_stateless and module[1]._is_stateless

    def test_leaves_the_module_as_it_was_after_an_error_too(self):
        module = net()
        params = make_functional(module)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            module(torch.randn(B, A + 1), params)
        assert module[0].weight is None and module._is_stateless and module[2][0]._is_stateless
        assert module(torch.randn(B, A), params).shape == (B, A)

    def test_nested_dict(self):
        module, x = net(), torch.randn(B, A)
        expected = module(x)
        assert torch.equal(module(x, make_functional(module).to_dict()), expected)

    def test_parameters_made_from_names_or_a_state_dict(self):
        module, x = normed().eval(), torch.randn(B, A)
        expected = module(x)
        from_state = TensorDict(module.state_dict(), []).unflatten_keys(".")
        make_functional(module)
        assert torch.equal(module(x, from_state), expected)

    def test_what_is_lacking_stays_as_it_is(self):
        module, x = nn.Linear(A, 1), torch.ones(A)
        params = make_functional(module)
        without = params.exclude("bias")
        assert_close(module(x, without), module(x, params) - params["bias"])
        repopulate_module(module, params)
        zeros = {"weight": torch.zeros(1, A)}
        assert torch.equal(module(x, params=zeros), params["bias"])

    def test_a_part_that_has_no_place_is_an_error_and_changes_nothing(self):
        module = net()
        params = make_functional(module)
        wrong = params.unlock_().set(("2", "0", "wieght"), torch.zeros(1))
        with pytest.raises(KeyError, match="no parameter, buffer or layer .*wieght"):
            module(torch.randn(A), wrong)
        assert module[0].weight is None and module._is_stateless

    def test_dotted_names_are_answered_with_the_way_to_nest_them(self):
        module = net()
        flat = make_functional(module).flatten_keys(".")
        with pytest.raises(KeyError) as error:
            module(torch.randn(A), flat)
        assert "unflatten_keys('.')" in error.value.__notes__[0]

    def test_gradients_reach_the_parameters(self):
        module = net()
        params = make_functional(module)
        module(torch.randn(B, A), params).sum().backward()
        assert params["0", "weight"].grad.norm() > 0

    @pytest.mark.parametrize("wrong", [(), (torch.ones(A),)])
    def test_a_stateless_module_without_parameters(self, wrong):
        module = nn.Linear(A, 1)
        make_functional(module)
        with pytest.raises(TypeError, match="Linear is stateless.*repopulate_module"):
            module(*wrong)

    def test_parameters_of_a_wrong_type(self):
        module = nn.Linear(A, 1)
        make_functional(module)
        with pytest.raises(TypeError, match="container or nested dict.*got list"):
            module(torch.ones(A), params=[torch.ones(1, A)])

    def test_recurrent_layers(self):
        module, x = nn.GRU(A, 4), torch.randn(7, A)
        expected = module(x)[0]
        params = make_functional(module)
        assert torch.equal(module(x, params)[0], expected)
        half = module(x, params.data * 0.5)[0]
        assert not torch.equal(half, expected)
        assert torch.equal(repopulate_module(module, params)(x)[0], expected)

    def test_hooks_run_once_each_call(self):
        module, calls = net(), []
        module[0].register_forward_hook(lambda *_: calls.append(1))
        params = make_functional(module)
        module(torch.randn(A), params)
        assert len(calls) == 1

    def test_a_forward_set_on_the_module_itself_is_kept(self):
        module = nn.Linear(A, 1)
        module.forward = lambda x: nn.functional.linear(x, module.weight) + 100
        params = make_functional(module)
        assert module(torch.zeros(A), params).item() == 100


class TestStateful:
    def test_keyword_gives_other_parameters_for_one_call(self):
        module, x = get_functional(net()), torch.randn(B, A)
        own, weight = module(x), module[0].weight
        zeros = TensorDict.from_module(module).apply(torch.zeros_like)
        assert module(x, params=zeros).abs().sum() == 0
        assert torch.equal(module(x), own) and module[0].weight is weight

    def test_restores_after_an_error(self):
        module = get_functional(net())
        weight = module[0].weight
        zeros = TensorDict.from_module(module).apply(torch.zeros_like)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            module(torch.randn(A + 1), params=zeros)
        assert module[0].weight is weight

    def test_positional_parameters_are_refused(self):
        module = get_functional(net())
        params = TensorDict.from_module(module)
        for given in (params, params.to_dict()):
            with pytest.raises(TypeError, match="tried to provide the parameters as an argument"):
                module(torch.randn(A), given)

    def test_other_type_errors_are_left_alone(self):
        class Sum(nn.Module):
            def forward(self, values):
                return values["a"] + "text"

        module = get_functional(Sum())
        with pytest.raises(TypeError, match="unsupported operand"):
            module({"a": 1})

    def test_a_plain_call_of_a_module_with_a_dict_argument(self):
        class First(nn.Module):
            def forward(self, values):
                return values["a"]

        assert get_functional(First())({"a": 1}) == 1

    def test_get_functional_gives_the_module_with_its_tensors(self):
        module = net()
        weights = list(module.parameters())
        assert get_functional(module) is module
        assert [id(p) for p in module.parameters()] == [id(p) for p in weights]
        assert is_functional(module) and is_functional(module[2][0]) and not module._is_stateless

    def test_get_functional_needs_a_module_that_has_its_parameters(self):
        module = net()
        make_functional(module)
        with pytest.raises(RuntimeError, match="stateless: repopulate_module"):
            get_functional(module)

    def test_is_functional(self):
        module = net()
        assert not is_functional(module)
        params = make_functional(module)
        assert all(is_functional(layer) for layer in module.modules())
        assert is_functional(repopulate_module(module, params))
        assert not is_functional(net())


class TestRepopulate:
    def test_the_very_parameters_come_back(self):
        module, x = normed().eval(), torch.randn(B, A)
        expected, state = (
            module(x),
            {n: id(t) for n, t in module.state_dict(keep_vars=True).items()},
        )
        params = make_functional(module)
        assert repopulate_module(module, params) is module
        assert {n: id(t) for n, t in module.state_dict(keep_vars=True).items()} == state
        assert torch.equal(module(x), expected) and not module._is_stateless

    def test_takes_a_nested_dict(self):
        module = net()
        params = make_functional(module).to_dict()
        assert repopulate_module(module, params)[0].weight is params["0"]["weight"]

    def test_refuses_what_has_no_place_and_changes_nothing(self):
        module = net()
        params = make_functional(module)
        with pytest.raises(KeyError, match="no parameter, buffer or layer 'extra'"):
            repopulate_module(module, params.unlock_().set("extra", torch.zeros(1)))
        assert module._is_stateless and module[0].weight is None

    def test_tied_parameters_and_shared_layers(self):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(A, A, bias=False), nn.Linear(A, A, bias=False)
                self.b.weight = self.a.weight
                self.c = self.a

            def forward(self, x):
                return self.c(self.b(self.a(x)))

        module, x = Tied(), torch.randn(A)
        expected, weight = module(x), module.a.weight
        params = make_functional(module)
        assert params["a", "weight"] is params["b", "weight"] is params["c", "weight"] is weight
        assert torch.equal(module(x, params), expected)
        module(x, params).sum().backward()
        repopulate_module(module, params)
        assert module.a.weight is module.b.weight is module.c.weight is weight
        assert module.c is module.a and len(list(module.parameters())) == 1

    def test_optimiser_made_before_still_trains_the_module(self):
        module, x = net(), torch.randn(B, A)
        optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
        before = module(x)
        params = make_functional(module)
        module(x, params).sum().backward()
        optimiser.step()
        assert module(x, params).sum() < before.sum()
        assert torch.equal(repopulate_module(module, params)(x), module(x, params=params))


class TestBuffers:
    def test_what_a_module_writes_lands_in_the_parameters(self):
        module, reference = normed(), normed()
        reference.load_state_dict(module.state_dict())
        x = torch.randn(B, A)
        reference(x)
        params = make_functional(module)
        module(x, params)
        assert params["1", "num_batches_tracked"] == 1
        assert torch.equal(params["1", "running_mean"], reference[1].running_mean)
        assert torch.equal(params["1", "running_var"], reference[1].running_var)

    @pytest.mark.parametrize("stateful", [False, True])
    def test_also_what_it_replaces(self, stateful):
        class Counter(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("count", torch.zeros(()))

            def forward(self, x):
                self.count = self.count + x
                return self.count

        module = Counter()
        params = make_functional(module, keep_params=stateful).clone()
        count = params["count"]
        module(torch.tensor(2.0), params=params)
        assert module(torch.tensor(3.0), params=params) == 5
        assert params["count"] is count and count == 5
        assert (module.count == 0) if stateful else module.count is None

    def test_of_another_shape_can_not_land(self):
        class Grow(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("seen", torch.zeros(1))

            def forward(self, x):
                self.seen = torch.cat([self.seen, x])

        module = Grow()
        params = make_functional(module)
        with pytest.raises(RuntimeError, match=r"'seen' of shape \(1,\) by one of shape \(3,\)"):
            module(torch.ones(2), params)
        assert module.seen is None

    def test_without_running_statistics_given_batch_norm_uses_the_batch(self):
        module = nn.BatchNorm1d(A)
        params = make_functional(module).data
        assert module(torch.randn(B, A), params).shape == (B, A)


class TestTransforms:
    def test_vmap_over_parameters(self):
        module, x = net(), torch.randn(B, A)
        make_functional(module)
        several = [net() for _ in range(P)]
        out = torch.vmap(module, (None, 0))(x, from_modules(*several))
        for i in range(P):
            torch.testing.assert_close(out[i], several[i](x))

    def test_gradients_through_vmap_reach_the_stacked_parameters(self):
        module = net()
        make_functional(module)
        params = from_modules(*[net() for _ in range(P)])
        torch.vmap(module, (None, 0))(torch.randn(B, A), params).sum().backward()
        assert (params["0", "weight"].grad.flatten(1).norm(dim=1) > 0).all()

    def test_vmap_over_expanded_parameters_and_inputs(self):
        module = net()
        params = make_functional(module)
        x = torch.randn(P, B, A)
        out = torch.vmap(module)(x, params.data.expand(P))
        torch.testing.assert_close(out, module(x, params))

    def test_grad(self):
        module, x = net(), torch.randn(B, A)
        params = make_functional(module)
        grads = torch.func.grad(lambda params: module(x, params).square().sum())(params.data)
        module(x, params).square().sum().backward()
        for key in params.keys(True, True):
            torch.testing.assert_close(grads[key], params[key].grad)

    def test_vmap_of_grad_gives_one_gradient_for_each_row(self):
        module, x = net(), torch.randn(B, A)
        params = make_functional(module)
        grad = torch.func.grad(lambda params, row: module(row, params).sum())
        rows = torch.vmap(grad, (None, 0))(params.data, x)
        module(x, params).sum().backward()
        assert rows["0", "weight"].shape == (B, 4, A)
        torch.testing.assert_close(rows["0", "weight"].sum(0), params["0", "weight"].grad)

    def test_grad_of_some_parameters_beside_buffers(self):
        module, x = nn.BatchNorm1d(A).eval(), torch.randn(B, A)
        params = make_functional(module)
        rest = params.exclude("weight").to_dict()
        grad = torch.func.grad(lambda w: module(x, {"weight": w, **rest}).square().sum())
        torch.testing.assert_close(
            grad(params["weight"].data), 2 * x.square().sum(0) / (1 + module.eps)
        )

    def test_functional_inside_functional(self):
        inner, x = net(), torch.randn(B, A)
        inner_params = make_functional(inner)

        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.full((), 2.0))

            def forward(self, x, weights):
                return self.scale * inner(x, weights)

        outer = Outer()
        params = make_functional(outer)
        expected = 2 * inner(x, inner_params)
        assert torch.equal(outer(x, inner_params, params), expected)
        assert torch.equal(outer(x, inner_params, params=params), expected)

    def test_a_module_may_give_its_layers_other_parameters(self):
        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(A, A)

            def forward(self, x, zeros=None):
                return self.layer(x) if zeros is None else self.layer(x, params=zeros)

        module, x = Outer(), torch.randn(A)
        params = make_functional(module)
        zeros = params["layer"].apply(torch.zeros_like)
        assert module(x, zeros, params).abs().sum() == 0
        assert torch.equal(module(x, params=params), module.layer(x, params["layer"]))

    @pytest.mark.parametrize("keep_params", [False, True])
    def test_compiles_as_one_graph(self, keep_params):
        module, x = normed(), torch.randn(B, A)
        params = make_functional(module, keep_params=keep_params)
        expected = module.eval()(x, params=params)
        call = torch.compile(module, fullgraph=True, backend="eager")
        assert torch.equal(call(x, params=params), expected)
        several = torch.compile(
            lambda x, params: torch.vmap(lambda p: module(x, params=p))(params),
            fullgraph=True,
            backend="eager",
        )
        torch.testing.assert_close(several(x, params.data.expand(P))[P - 1], expected)


class TestKeyedModules:
    def test_container_and_parameters(self):
        module, data = keyed(), TensorDict(x=torch.randn(B, A), batch_size=[B])
        expected = module(data.clone())["y"]
        params = make_functional(module)
        assert params["module", "0", "module"].keys() == {"weight", "bias"}
        assert torch.equal(module(data.clone(), params)["y"], expected)
        out = module(data, params=params)
        assert out is data and torch.equal(data["y"], expected)

    def test_stateful_takes_two_containers(self):
        module, data = get_functional(keyed()), TensorDict(x=torch.randn(B, A), batch_size=[B])
        own = module(data.clone())["y"]
        zeros = TensorDict.from_module(module).apply(torch.zeros_like)
        assert module(data.clone(), zeros)["y"].abs().sum() == 0
        assert torch.equal(module(data.clone())["y"], own)

    def test_tensors_by_keyword_or_position(self):
        module, x = keyed(), torch.randn(B, A)
        expected = module(x=x)[-1]
        params = make_functional(module)
        assert torch.equal(module(x, params)[-1], expected)
        assert torch.equal(module(x=x, params=params)[-1], expected)
        assert torch.equal(module(params, x=x)[-1], expected)

    def test_output_container(self):
        module, out = keyed(), TensorDict(batch_size=[B])
        params = make_functional(module)
        module(TensorDict(x=torch.randn(B, A), batch_size=[B]), params, tensordict_out=out)
        assert out["y"].shape == (B, 1)

    def test_vmap_over_parameters_and_data(self):
        module, data = keyed(), TensorDict(x=torch.randn(B, A), batch_size=[B])
        params = make_functional(module).data
        out = torch.vmap(module, (None, 0))(data, params.expand(P))
        assert out.shape == (P, B) and out["y"].shape == (P, B, 1)
        out = torch.vmap(module, (0, 0))(data.expand(P, B), params.expand(P))
        assert out.shape == (P, B)
        torch.testing.assert_close(out[0]["y"], module(data.clone(), params)["y"])

    def test_layers_and_selected_outputs(self):
        module, data = keyed(), TensorDict(x=torch.randn(B, A), batch_size=[B])
        params = make_functional(module)
        half = module[0](data.clone(), params["module", "0"])
        assert half["h", "x"].shape == (B, 4) and "y" not in half
        module.select_out_keys("y")
        assert module(data.clone(), params).keys() == {"x", "y"}

    def test_sequence_edited_afterwards(self):
        module, data = keyed(), TensorDict(x=torch.randn(B, A), batch_size=[B])
        params = make_functional(module)
        with params.unlock_():
            del params["module", "1"]
        del module[1]
        assert "y" not in module(data, params) and ("h", "x") in data.keys(True)

    def test_part_of_a_sequence(self):
        module = keyed().select_subsequence(out_keys=[("h", "x")])
        params = make_functional(module)
        data = module(TensorDict(x=torch.randn(B, A), batch_size=[B]), params)
        assert ("h", "x") in data.keys(True) and "y" not in data

    def test_stateless_without_parameters(self):
        module = keyed()
        make_functional(module)
        with pytest.raises(TypeError, match="TensorDictSequential is stateless"):
            module(TensorDict(x=torch.randn(B, A), batch_size=[B]))

    def test_put_back(self):
        module, data = keyed(), TensorDict(x=torch.randn(B, A), batch_size=[B])
        expected = module(data.clone())["y"]
        repopulate_module(module, make_functional(module))
        assert torch.equal(module(data)["y"], expected)

    def test_a_container_given_to_a_module_that_is_not_keyed_warns(self):
        class Double(nn.Module):
            def __init__(self):
                super().__init__()
                self.factor = nn.Parameter(torch.full((), 2.0))

            def forward(self, td):
                return td["x"] * self.factor

        module, data = Double(), TensorDict(x=torch.ones(B), batch_size=[B])
        params = make_functional(module)
        with pytest.warns(UserWarning, match="does not inherit from TensorDictModuleBase"):
            assert module(data, params).tolist() == [2, 2]
        repopulate_module(module, params)
        with pytest.warns(UserWarning, match="does not inherit from TensorDictModuleBase"):
            assert module(data, params=params).tolist() == [2, 2]
        with pytest.warns(UserWarning, match="does not inherit from TensorDictModuleBase"):
            assert module(data).tolist() == [2, 2]

    def test_compiles_as_one_graph(self):
        module, data = keyed(), TensorDict(x=torch.randn(B, A), batch_size=[B])
        params = make_functional(module)
        expected = module(data.clone(), params)["y"]
        call = torch.compile(
            lambda data, params: module(data, params)["y"], fullgraph=True, backend="eager"
        )
        assert torch.equal(call(data.clone(), params), expected)


class TestOtherMethods:
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(A, 1)

        def forward(self, x):
            return self.layer(x)

        def value(self, x, *, scale=1):
            return scale * self.forward(x)

    def test_named_methods_take_parameters(self):
        module, x = self.Both(), torch.randn(B, A)
        expected = module(x)
        params = make_functional(module, funs_to_decorate=["forward", "value"])
        assert torch.equal(module.value(x, params), expected)
        assert torch.equal(module.value(x, params, scale=2), 2 * expected)
        assert torch.equal(module.value(x, params=params), module(x, params))
        assert torch.equal(module.layer(x, params["layer"]), expected)

    def test_methods_that_are_not_named_do_not(self):
        module, x = self.Both(), torch.randn(B, A)
        params = make_functional(module, ["value"])
        assert module.value(x, params).shape == (B, 1)
        with pytest.raises(TypeError):
            module(x, params)

    def test_more_methods_may_be_named_later(self):
        module, x = get_functional(self.Both()), torch.randn(B, A)
        params = make_functional(module, ["value"])
        assert torch.equal(module.value(x, params), module(x, params))

    def test_a_method_that_is_not_there(self):
        with pytest.raises(AttributeError, match="no method 'valeu'.*mean \"value\""):
            make_functional(self.Both(), ["valeu"])

    def test_list_of_layers(self):
        module = nn.ModuleList([nn.Linear(A, 1)])
        params = make_functional(module)
        assert is_functional(module)
        assert module[0](torch.randn(A), params["0"]).shape == (1,)


class TestSignature:
    def signature(self, forward):
        module = type("Module", (nn.Module,), {"forward": forward})()
        return str(inspect.signature(get_functional(module).forward))

    def test_gains_the_parameters(self):
        assert self.signature(lambda self, x: x) == "(x, params=None)"
        assert self.signature(lambda self, x, y=1: x) == "(x, y=1, params=None)"

    def test_before_keywords(self):
        assert self.signature(lambda self, x, *, y: x) == "(x, params=None, *, y)"
        assert self.signature(lambda self, x, **options: x) == "(x, params=None, **options)"

    def test_after_any_number_of_arguments(self):
        assert self.signature(lambda self, *x, **options: x) == "(*x, params=None, **options)"

    def test_another_name_if_it_is_taken(self):
        assert self.signature(lambda self, params: params) == "(params, params_=None)"

    def test_the_other_name_is_the_one_to_call_with(self):
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.full((), 2.0))

            def forward(self, params):
                return self.weight * params

        module = Scaled()
        weights = make_functional(module)
        assert module(params=3, params_=weights) == 6
        assert module(3, weights) == 6


class TestCopies:
    def test_a_deep_copy_is_functional_by_itself(self):
        module, x = net(), torch.randn(A)
        params = make_functional(module)
        twin = copy.deepcopy(module)
        other = params.apply(torch.zeros_like)
        repopulate_module(twin, other)
        assert twin(x).abs().sum() == 0
        assert module._is_stateless and module[0].weight is None
        assert module(x, params).abs().sum() > 0

    def test_a_deep_copy_of_a_stateful_one(self):
        module, x = get_functional(net()), torch.randn(A)
        twin = copy.deepcopy(module)
        twin[0].weight.data.zero_()
        assert not torch.equal(twin(x), module(x))
        zeros = TensorDict.from_module(module).apply(torch.zeros_like)
        assert twin(x, params=zeros).abs().sum() == 0

    def test_state_dicts_load_after_they_were_put_back(self):
        module, other, x = net(), net(), torch.randn(A)
        repopulate_module(module, make_functional(module))
        module.load_state_dict(other.state_dict())
        assert torch.equal(module(x), other(x))

    def test_moves_and_casts_after_they_were_put_back(self):
        module = net()
        params = make_functional(module)
        module.double()  # nothing to cast
        assert module(torch.randn(A), params).dtype == torch.float32
        repopulate_module(module, params).double()
        assert module(torch.randn(A).double()).dtype == torch.float64


def test_parameters_held_as_a_container_in_the_module():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.params = TensorDictParams(TensorDict(w=torch.ones(2)))

        def forward(self):
            return self.params["w"] * 3

    module = Holder()
    params = make_functional(module)
    assert module(params).tolist() == [3, 3]
    assert module(params.apply(torch.zeros_like)).tolist() == [0, 0]
    assert module(params).tolist() == [3, 3]


def notes(caught):
    return " ".join(caught.value.__notes__)


def test_an_error_names_what_the_parameters_lack():
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    params = make_functional(net)
    with pytest.raises(TypeError) as caught:
        net(torch.zeros(3), params.select("0"))
    assert "lack 1.weight, 1.bias" in notes(caught)


def test_an_error_names_parameters_of_another_shape():
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    params = make_functional(net)
    with pytest.raises(RuntimeError) as caught:
        net(torch.zeros(5, 3), torch.stack([params.clone(), params.clone()]))
    assert "1.weight: (2, 2, 4) for (2, 4)" in notes(caught) and "torch.vmap" in notes(caught)


def test_an_error_in_a_to_module_block_names_parameters_of_another_shape():
    layer = nn.Linear(3, 2)
    with pytest.raises(RuntimeError) as caught:
        with TensorDict(weight=torch.zeros(5, 3), bias=torch.zeros(2)).to_module(layer):
            layer(torch.zeros(4, 3))
    assert "weight: (5, 3) for (2, 3)" in notes(caught) and layer.weight.shape == (2, 3)
    with pytest.raises(KeyError) as caught:
        with TensorDict.from_module(layer).clone().to_module(layer):
            raise KeyError("of the user's own")
    assert not hasattr(caught.value, "__notes__")


# ------------------------------------------------------------------------ nets made functional


def around(net, *keys):
    return TensorDictModule(net, [keys[0]], [keys[1]])


def test_a_keyed_module_around_a_functional_net_takes_its_parameters():
    net = nn.Linear(3, 4)
    params = TensorDict(module=make_functional(net))
    module = around(net, "x", "y")
    td = TensorDict(x=torch.rand(5, 3), batch_size=[5])
    want = td["x"] @ params["module", "weight"].T + params["module", "bias"]
    assert_close(module(td.copy(), params=params)["y"], want)
    assert_close(module(td.copy(), params)["y"], want)
    assert_close(module(x=td["x"], params=params), want)
    several = torch.vmap(module, (None, 0))(td, params.expand(2))
    assert several.batch_size == torch.Size([2, 5]) and several["y"].shape == (2, 5, 4)
    with pytest.raises(TypeError, match="stateless"):
        module(td, None)
    repopulate_module(net, params["module"])
    assert_close(module(td.copy())["y"], want)
    assert (module(td.copy(), params=params.data.apply(torch.zeros_like))["y"] == 0).all()


@pytest.mark.parametrize("kind", [TensorDictSequential, ProbabilisticTensorDictSequential])
def test_a_sequence_around_functional_nets_takes_their_parameters(kind):
    nets = [nn.Linear(3, 4), nn.Linear(4, 2)]
    params = [make_functional(net) for net in nets]
    modules = [around(nets[0], "x", "h"), around(nets[1], "h", "loc")]
    if kind is ProbabilisticTensorDictSequential:
        modules.append(ProbabilisticTensorDictModule({"param": "loc"}, ["a"]))
    seq = kind(*modules)
    tree = TensorDict(module={str(i): {"module": p} for i, p in enumerate(params)})
    td = TensorDict(x=torch.rand(5, 3), batch_size=[5])
    want = nets[1](nets[0](td["x"], params[0]), params[1])
    assert_close(seq(td.copy(), params=tree)["loc"], want)
    assert_close(seq(td.copy(), tree)["loc"], want)
    assert torch.vmap(seq, (None, 0))(td, tree.expand(2))["loc"].shape == (2, 5, 2)


def test_a_net_with_an_argument_of_that_name_gets_it():
    class Takes(nn.Module):
        def forward(self, x, params):
            return x + params["shift"]

    module = around(Takes(), "x", "y")
    out = module(TensorDict(x=torch.ones(2)), params=TensorDict(shift=torch.ones(2)))
    assert out["y"].tolist() == [2, 2]


class ReadsContainer(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(2, 2)

    def forward(self, td):
        return self.l(td["x"])


@pytest.mark.parametrize("by", ["position", "keyword"])
def test_a_container_for_a_plain_module_warns(by):
    module = get_functional(ReadsContainer())
    td = TensorDict(x=torch.ones(2))
    with pytest.warns(UserWarning, match="You are passing a tensordict"):
        module(td) if by == "position" else module(td=td)


def test_a_stateless_plain_module_that_gets_no_parameters_but_a_container():
    module = ReadsContainer()
    make_functional(module)
    with (
        pytest.warns(UserWarning, match="You are passing a tensordict"),
        pytest.raises(TypeError, match="stateless"),
    ):
        module(TensorDict(x=torch.ones(2)))


def test_a_stateless_module_without_parameters_needs_none():
    module = nn.Sequential(nn.ReLU())
    make_functional(module)
    assert module(torch.ones(2)).tolist() == module(torch.ones(2), params={}).tolist() == [1, 1]
