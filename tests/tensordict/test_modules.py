"""Parameters of modules as containers: from_module(s), to_module, TensorDictParams."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from raffia import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictParams,
    from_module,
    from_modules,
    lazy_stack,
)
from raffia.nn import TensorDictModule


def linears(n=2, i=3, o=4, **kw):
    return [nn.Linear(i, o, **kw) for _ in range(n)]


def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def values(module):
    """A free copy of a module's parameters and buffers, no gradient."""
    return TensorDict.from_module(module).data.clone()


def call(params, module, x):
    with params.to_module(module):
        return module(x)


class Tied(nn.Module):
    """Two layers, one weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


class Shared(nn.Module):
    """One layer under two names."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = self.a

    def forward(self, x):
        return self.b(self.a(x))


class Sparse(nn.Module):
    """Absent parameters, absent buffers, an empty child."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, track_running_stats=False)
        self.register_buffer("nothing", None)
        self.register_parameter("void", None)
        self.act = nn.ReLU()


class TestFromModule:
    def test_the_same_parameter_objects(self):
        m = mlp()
        p = from_module(m)
        assert p["0", "weight"] is m[0].weight and p["2", "bias"] is m[2].bias
        assert p.batch_size == torch.Size([]) and p.device is None
        assert set(p.keys(True, True)) == {(n, k) for n in ("0", "2") for k in ("weight", "bias")}

    def test_lock(self):
        m = nn.Linear(3, 4)
        assert from_module(m).is_locked and not TensorDict.from_module(m).is_locked
        assert not from_module(m, lock=False).is_locked
        assert TensorDict.from_module(m, lock=True).is_locked
        nested = from_module(mlp())
        with pytest.raises(RuntimeError, match="Cannot modify locked"):
            nested["0"].set("weight", torch.zeros(4, 3))

    def test_as_module(self):
        m = nn.Linear(3, 4)
        p = from_module(m, as_module=True)
        assert isinstance(p, TensorDictParams) and p["weight"] is m.weight and p.is_locked

    def test_buffers(self):
        m = nn.BatchNorm1d(3)
        p = from_module(m)
        assert set(p.keys()) == {
            "weight",
            "bias",
            "running_mean",
            "running_var",
            "num_batches_tracked",
        }
        assert p["running_mean"] is m.running_mean

    def test_filter_empty(self):
        assert set(from_module(mlp()).keys()) == {"0", "2"}
        every = from_module(mlp(), filter_empty=False)
        assert set(every.keys()) == {"0", "1", "2"} and every["1"].is_empty()
        assert from_module(nn.ReLU()).is_empty()

    def test_absent_entries_are_left_out(self):
        assert set(from_module(Sparse()).keys(True)) == {
            "norm",
            ("norm", "weight"),
            ("norm", "bias"),
        }

    def test_use_state_dict(self):
        m = nn.Sequential(nn.Linear(3, 4))
        p = from_module(m, use_state_dict=True)
        w = p["0", "weight"]
        assert type(w) is torch.Tensor and not w.requires_grad
        assert w.data_ptr() == m[0].weight.data_ptr()

    def test_use_state_dict_runs_hooks(self):
        m = nn.Linear(3, 4)
        m._register_state_dict_hook(
            lambda mod, sd, prefix, meta: sd.update({prefix + "x": torch.ones(1)})
        )
        assert set(from_module(m, use_state_dict=True).keys()) == {"weight", "bias", "x"}
        assert set(from_module(m).keys()) == {"weight", "bias"}

    def test_tied_parameters_stay_tied(self):
        t = Tied()
        p = from_module(t)
        assert p["a", "weight"] is p["b", "weight"] is t.a.weight
        assert len(list(from_module(t, as_module=True).parameters())) == 3

    def test_frozen_parameters_stay_frozen(self):
        m = nn.Linear(3, 4)
        m.weight.requires_grad_(False)
        p = from_module(m)
        assert not p["weight"].requires_grad and p["bias"].requires_grad

    def test_use_in_a_module_attribute(self):
        class Host(nn.Module):
            def __init__(self):
                super().__init__()
                self.p = TensorDictParams(TensorDict(w=torch.ones(3)))

        h = Host()
        assert TensorDict.from_module(h)["p", "w"] is h.p["w"]


class TestFromModules:
    def test_dense(self):
        ms = linears()
        p = from_modules(*ms)
        assert p.batch_size == torch.Size([2]) and p.is_locked
        assert p["weight"].shape == torch.Size([2, 4, 3])
        for v in p.values():
            assert type(v) is nn.Parameter and v.is_leaf and v.requires_grad
        assert_close(p["weight"][1], ms[1].weight)
        assert p["weight"].data_ptr() != ms[0].weight.data_ptr()

    def test_class_method_and_one_module(self):
        assert TensorDict.from_modules(*linears()).is_locked
        assert from_modules(nn.Linear(3, 4)).batch_size == torch.Size([1])
        assert not from_modules(*linears(), lock=False).is_locked

    def test_nested(self):
        p = from_modules(mlp(), mlp())
        assert p["0", "weight"].shape == torch.Size([2, 4, 3]) and p["0"].batch_size == torch.Size(
            [2]
        )

    def test_requires_grad_of_the_first(self):
        a, b = linears()
        a.bias.requires_grad_(False)
        p = from_modules(a, b)
        assert type(p["bias"]) is nn.Parameter
        assert not p["bias"].requires_grad and p["weight"].requires_grad
        p = from_modules(b, a)
        assert p["bias"].requires_grad

    def test_buffers_stay_buffers(self):
        p = from_modules(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
        assert not isinstance(p["running_mean"], nn.Parameter)
        assert p["running_mean"].shape == torch.Size([2, 3])
        assert p["num_batches_tracked"].tolist() == [0, 0]
        assert isinstance(p["weight"], nn.Parameter)

    def test_without_parameters(self):
        p = from_modules(nn.ReLU(), nn.ReLU(), nn.ReLU())
        assert p.is_empty() and p.batch_size == torch.Size([3])

    def test_as_module(self):
        p = from_modules(mlp(), mlp(), as_module=True)
        assert isinstance(p, TensorDictParams) and p.is_locked and p.batch_size == torch.Size([2])
        names = {"0.weight", "0.bias", "2.weight", "2.bias"}
        assert {n for n, _ in p.named_parameters()} == names == set(p.state_dict())
        assert not from_modules(*linears(), as_module=True, lock=False).is_locked

    def test_as_module_with_buffers(self):
        p = from_modules(nn.BatchNorm1d(3), nn.BatchNorm1d(3), as_module=True)
        assert {n for n, _ in p.named_buffers()} == {
            "running_mean",
            "running_var",
            "num_batches_tracked",
        }

    def shared_and_own(self, n=3, requires_grad=True):
        """Modules that share their first layer, and what `from_modules` makes of them."""
        shared = nn.Linear(2, 4).requires_grad_(requires_grad)
        modules = [nn.Sequential(shared, nn.Linear(4, 5)) for _ in range(n)]
        return modules, from_modules(*modules, expand_identical=True, as_module=True)

    @pytest.mark.parametrize("n", [2, 3])
    def test_as_module_with_shared_parameters(self, n):
        """A parameter that all modules share is the one that is registered and trained."""
        modules, p = self.shared_and_own(n)
        shared = modules[0][0]
        named = dict(p.named_parameters())
        assert named["0.weight"] is shared.weight and named["0.bias"] is shared.bias
        assert named["1.weight"].shape == torch.Size([n, 5, 4]) and not list(p.buffers())
        assert p["0", "weight"].shape == torch.Size([n, 4, 2])
        out = torch.vmap(call, (0, None, None))(p, modules[0], torch.ones(2))
        want = torch.stack([m(torch.ones(2)) for m in modules])
        assert_close(out, want)
        (grad,) = torch.autograd.grad(out.square().sum(), [shared.weight], retain_graph=True)
        (expected,) = torch.autograd.grad(want.square().sum(), [shared.weight])
        assert_close(grad, expected)
        optimizer = torch.optim.SGD(p.parameters(), 0.1)
        before = shared.weight.detach().clone()
        for _ in range(2):
            optimizer.zero_grad()
            torch.vmap(call, (0, None, None))(p, modules[0], torch.ones(2)).sum().backward()
            optimizer.step()
        assert not torch.equal(before, shared.weight)
        assert_close(p["0", "weight"][-1], shared.weight)

    def test_of_one_module_every_parameter_is_shared(self):
        (module,), p = self.shared_and_own(1)
        assert p.get_parameter("0.weight") is module[0].weight
        assert p["0", "weight"].shape == torch.Size([1, 4, 2])

    def test_shared_parameters_go_with_the_module(self):
        modules, p = self.shared_and_own()
        shared = modules[0][0].weight
        twins = copy.deepcopy(p), pickle.loads(pickle.dumps(p)), p.clone(), p.to(torch.float64)
        for twin in twins:
            assert [n for n, _ in twin.named_parameters()] == [n for n, _ in p.named_parameters()]
            mine = twin.get_parameter("0.weight")
            assert mine is not shared and mine.shape == shared.shape
            assert_close(mine, shared, check_dtype=False)
            twin["0", "weight"].sum().backward()
            assert_close(mine.grad, torch.full_like(mine, 3.0))
        holder = nn.ModuleList([p]).double()
        assert holder[0].get_parameter("0.weight") is shared and shared.dtype is torch.float64
        assert p["0", "weight"].dtype is torch.float64
        p.zero_()
        assert not shared.any() and not p["0", "weight"].any()

    def test_state_dict_of_shared_parameters(self):
        _, p = self.shared_and_own()
        _, other = self.shared_and_own()
        state = p.state_dict()
        assert state["0.weight"].shape == torch.Size([4, 2])
        for assign in (False, True):
            other.zero_()
            other.load_state_dict(state, assign=assign)
            assert_close(other["0", "weight"], p["0", "weight"])
            assert_close(other.get_parameter("0.weight"), p.get_parameter("0.weight"))

    def test_shared_parameters_that_change_their_memory_or_mode(self):
        modules, p = self.shared_and_own()
        shared = modules[0][0]
        vector = torch.arange(100.0)[: sum(q.numel() for q in p.parameters())]
        nn.utils.vector_to_parameters(vector, p.parameters())  # sets their `data`
        assert_close(p["0", "weight"], shared.weight.expand(3, 4, 2))
        assert_close(p["0", "weight"][1].flatten(), torch.arange(8.0))
        nn.ModuleList([p]).requires_grad_(False)
        assert not p["0", "weight"].requires_grad
        nn.ModuleList([p]).requires_grad_(True)
        with torch.no_grad():
            assert p["0", "weight"].shape == torch.Size([3, 4, 2])
        p["0", "weight"].sum().backward()
        assert_close(shared.weight.grad, torch.full((4, 2), 3.0))
        _, frozen = self.shared_and_own(requires_grad=False)
        assert not frozen.get_parameter("0.weight").requires_grad and not list(frozen.buffers())

    def test_calls_with_other_values_for_shared_parameters(self):
        """`functional_call` puts the value of one row, or one for each row, in place."""
        _, p = self.shared_and_own()

        class Reads(nn.Module):
            def __init__(self):
                super().__init__()
                self.p = p

            def forward(self):
                return self.p["0", "weight"]

        before = p["0", "weight"].clone()
        reads = Reads()
        one, each = torch.rand(4, 2), torch.rand(3, 4, 2)
        assert_close(
            torch.func.functional_call(reads, {"p.0.weight": one}, ()), one.expand(3, 4, 2)
        )
        assert_close(torch.func.functional_call(reads, {"p.0.weight": each}, ()), each)
        assert_close(p["0", "weight"], before)

    @pytest.mark.parametrize("randomness", ["error", "same", "different"])
    @pytest.mark.parametrize("options", [{}, {"as_module": True}, {"use_state_dict": True}])
    def test_lazy_layers(self, options, randomness):
        """The first call initialises them, each as the layer alone would."""

        def lazy():
            return nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyBatchNorm1d(), nn.Linear(4, 2))

        modules = [lazy() for _ in range(3)]
        p = from_modules(*modules, **options)
        assert p.batch_size == torch.Size([3]) and p.is_locked
        optimizer = torch.optim.SGD([v for v in p.values(True, True) if v.requires_grad], 0.1)
        x = torch.randn(5, 7)
        torch.manual_seed(0)  # the bounds below hold for it
        out = torch.vmap(call, (0, None, None), randomness=randomness)(p, lazy(), x)
        assert out.shape == (3, 5, 2)
        assert p["0", "weight"].shape == (3, 4, 7) and p["2", "running_mean"].shape == (3, 4)
        assert type(p["0", "weight"]) is nn.Parameter
        largest = p["0", "weight"].abs().amax((1, 2))
        assert (largest <= 7**-0.5).all() and (largest > 0.8 * 7**-0.5).all()
        assert largest.unique().numel() == 3
        assert nn.parameter.is_lazy(modules[0][0].weight)
        out.sum().backward()
        before = p["0", "weight"].detach().clone()
        optimizer.step()
        assert not torch.equal(before, p["0", "weight"])
        again = torch.vmap(call, (0, None, None), randomness="same")(p, lazy(), x)
        assert again.shape == (3, 5, 2)

    def test_lazy_layers_of_which_some_have_run(self):
        ran = nn.LazyLinear(4)
        ran(torch.ones(2, 3))
        with pytest.raises(RuntimeError, match="initialised in some"):
            from_modules(ran, nn.LazyLinear(4))
        twin = copy.deepcopy(from_modules(nn.LazyLinear(4), nn.LazyLinear(4)))
        empty = nn.LazyLinear(4, device="meta")
        assert torch.vmap(call, (0, None, None))(twin, empty, torch.ones(3)).shape == (2, 4)

    def test_a_call_that_fails_leaves_lazy_layers_as_they_were(self):
        p = from_modules(nn.LazyLinear(4), nn.LazyLinear(4))
        empty = nn.LazyLinear(4)
        hooks = list(empty._forward_pre_hooks)

        def fail(p):
            with p.to_module(empty):
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            torch.vmap(fail)(p)
        assert list(empty._forward_pre_hooks) == hooks
        assert torch.vmap(call, (0, None, None))(p, empty, torch.ones(3)).shape == (2, 4)

    def test_use_state_dict(self):
        p = from_modules(*linears(), use_state_dict=True)
        assert type(p["weight"]) is torch.Tensor and not p["weight"].requires_grad
        assert p["weight"].shape == torch.Size([2, 4, 3])

    def test_tied_become_separate(self):
        p = from_modules(Tied(), Tied())
        assert p["a", "weight"] is not p["b", "weight"]
        assert_close(p["a", "weight"], p["b", "weight"])

    def test_expand_identical(self):
        a, b = linears()
        b.weight = a.weight
        p = from_modules(a, b, expand_identical=True)
        w = p["weight"]
        assert w.stride() == (0, 3, 1) and type(w) is torch.Tensor and not w.is_leaf
        assert type(p["bias"]) is nn.Parameter and p["bias"].is_leaf
        w.sum().backward()
        assert a.weight.grad.unique().tolist() == [2.0]
        copied = from_modules(a, b)["weight"]
        assert copied.is_contiguous() and copied.is_leaf

    def test_errors(self):
        with pytest.raises(RuntimeError, match="shapes.*incompatible.*weight"):
            from_modules(nn.Linear(3, 4), nn.Linear(3, 5))
        with pytest.raises(RuntimeError, match="sets of keys.*exclusive"):
            from_modules(nn.Linear(3, 4), nn.Linear(3, 4, bias=False))
        with pytest.raises(ValueError, match="bias"):
            from_modules(nn.Linear(3, 4), nn.Linear(3, 4, bias=False), expand_identical=True)
        with pytest.raises(RuntimeError):
            from_modules()
        with pytest.raises(RuntimeError, match="(?i)lazystacked.*permitted"):
            from_modules(*linears(), as_module=True, lazy_stack=True)

    def test_lazy_stack_holds_the_originals(self):
        ms = linears()
        p = from_modules(*ms, lazy_stack=True)
        assert (
            isinstance(p, LazyStackedTensorDict) and p.is_locked and p.batch_size == torch.Size([2])
        )
        assert p.tensordicts[0]["weight"] is ms[0].weight
        assert type(p["weight"]) is torch.Tensor and p["weight"].requires_grad
        with torch.no_grad():
            ms[1].weight.fill_(3)
        assert p["weight"][1].unique().tolist() == [3.0]
        assert not from_modules(*ms, lazy_stack=True, lock=False).is_locked

    def test_lazy_stack_of_unlike_modules(self):
        p = from_modules(nn.Linear(3, 4), nn.Linear(3, 5), lazy_stack=True)
        assert p[1]["weight"].shape == torch.Size([5, 3])
        with pytest.raises(RuntimeError, match="weight"):
            p["weight"]
        p = from_modules(nn.Linear(3, 4), nn.Sequential(nn.Linear(3, 5)), lazy_stack=True)
        assert list(p.keys()) == [] and p[1]["0", "bias"].shape == torch.Size([5])

    def test_uninitialised_layers_refuse_a_lazy_stack(self):
        with pytest.raises(RuntimeError, match="lazy modules"):
            from_modules(nn.LazyLinear(3), nn.LazyLinear(3), lazy_stack=True)


class TestVmap:
    def test_dense_gives_gradients_to_the_new_parameters(self):
        ms, x = linears(), torch.randn(3)
        empty = nn.Linear(3, 4, device="meta")
        p = from_modules(*ms)
        y = torch.vmap(call, (0, None, None))(p, empty, x)
        assert_close(y, torch.stack([m(x) for m in ms]))
        y.sum().backward()
        assert_close(p["weight"].grad, x.expand(2, 4, 3))
        assert all(m.weight.grad is None for m in ms)
        assert empty.weight.device.type == "meta"

    def test_dense_gives_gradients_as_module(self):
        p = from_modules(*linears(), as_module=True)
        empty = nn.Linear(3, 4, device="meta")
        torch.vmap(call, (0, None, None))(p, empty, torch.ones(3)).sum().backward()
        assert all(q.grad is not None and q.grad.norm() > 0 for q in p.parameters())

    def test_lazy_gives_gradients_to_the_originals(self):
        ms, x = linears(), torch.randn(3)
        empty = nn.Linear(3, 4, device="meta")
        y = torch.vmap(call, (0, None, None))(from_modules(*ms, lazy_stack=True), empty, x)
        assert_close(y, torch.stack([m(x) for m in ms]))
        y.sum().backward()
        for m in ms:
            assert_close(m.weight.grad, x.expand(4, 3))

    def test_batched_inputs_too(self):
        ms, x = linears(), torch.randn(2, 5, 3)
        y = torch.vmap(call, (0, None, 0))(from_modules(*ms), nn.Linear(3, 4, device="meta"), x)
        assert_close(y, torch.stack([m(v) for m, v in zip(ms, x, strict=True)]))

    def test_nested_module(self):
        ms, x = [mlp() for _ in range(3)], torch.randn(5, 3)
        y = torch.vmap(call, (0, None, None))(from_modules(*ms), mlp().to("meta"), x)
        assert_close(y, torch.stack([m(x) for m in ms]))

    def test_expanded_parameters(self):
        m, x = nn.Linear(3, 4), torch.randn(2, 3)
        p = from_module(m).expand(2)
        y = torch.vmap(call, (0, None, 0))(p, nn.Linear(3, 4, device="meta"), x)
        assert_close(y, m(x))
        y.sum().backward()
        assert_close(m.weight.grad, x.sum(0).expand(4, 3))

    def test_optimise_the_stack(self):
        torch.manual_seed(0)
        p = from_modules(*linears())
        empty, x = nn.Linear(3, 4, device="meta"), torch.randn(6, 3)
        opt = torch.optim.SGD(list(p.values(True, True)), lr=0.1)
        losses = []
        for _ in range(5):
            opt.zero_grad()
            loss = torch.vmap(call, (0, None, None))(p, empty, x).pow(2).mean()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        assert losses == sorted(losses, reverse=True)

    def test_norm_statistics_land_in_the_stack(self):
        torch.manual_seed(0)
        ms = [nn.BatchNorm1d(3) for _ in range(2)]
        p = from_modules(*ms)
        x = torch.randn(2, 5, 3) + 1
        torch.vmap(call, (0, None, 0))(p, nn.BatchNorm1d(3, device="meta"), x)
        assert_close(p["running_mean"], 0.1 * x.mean(1))
        assert p["num_batches_tracked"].tolist() == [1, 1]
        assert ms[0].num_batches_tracked == 0


class TestToModule:
    def test_context_manager(self):
        m = nn.Linear(3, 4)
        w = m.weight
        p = values(m).zero_()
        with p.to_module(m):
            assert m(torch.ones(3)).abs().sum() == 0
            assert [n for n, _ in m.named_parameters()] == ["weight", "bias"]
        assert m.weight is w and w.abs().sum() > 0

    def test_plain_call_gives_the_swap(self):
        m = nn.Linear(3, 4)
        w = m.weight
        swap = values(m).zero_().to_module(m)
        assert m.weight.abs().sum() == 0 and isinstance(m.weight, nn.Parameter)
        assert isinstance(swap, TensorDict) and swap["weight"] is w
        swap.to_module(m)
        assert m.weight is w

    def test_return_swap_false(self):
        m = nn.Linear(3, 4)
        assert values(m).zero_().to_module(m, return_swap=False) is None
        assert m.weight.abs().sum() == 0

    def test_swap_dest(self):
        m = nn.Linear(3, 4)
        w, dest = m.weight, TensorDict()
        assert values(m).to_module(m, swap_dest=dest) is dest and dest["weight"] is w
        dest.to_module(m)
        assert m.weight is w

    def test_parameters_are_used_as_they_are(self):
        m = nn.Linear(3, 4)
        p = TensorDict(weight=nn.Parameter(torch.zeros(4, 3)), bias=nn.Parameter(torch.ones(4)))
        with p.to_module(m):
            assert m.weight is p["weight"]
            m(torch.ones(3)).sum().backward()
        assert p["weight"].grad.sum() == 12 and m.weight.grad is None

    def test_tensors_with_gradient_keep_it(self):
        m = nn.Linear(3, 4)
        p = TensorDict.from_module(m).apply(lambda t: t * 2)
        assert call(p, m, torch.ones(3)).requires_grad
        call(p, m, torch.ones(3)).sum().backward()
        assert m.weight.grad.unique().tolist() == [2.0]
        leaf = values(m).requires_grad_()
        call(leaf, m, torch.ones(3)).sum().backward()
        assert leaf["weight"].grad.unique().tolist() == [1.0]

    def test_preserve_module_state_false_puts_tensors(self):
        m = nn.Linear(3, 4)
        p = values(m)
        with p.to_module(m, preserve_module_state=False):
            assert m.weight is p["weight"]
        assert isinstance(m.weight, nn.Parameter)

    def test_plain_values_share_memory(self):
        m = nn.Linear(3, 4)
        p = values(m)
        with p.to_module(m):
            assert m.weight.data_ptr() == p["weight"].data_ptr()

    def test_inplace_copies_into_the_module(self):
        m = nn.Linear(3, 4)
        w, before = m.weight, m.weight.detach().clone()
        swap = values(m).zero_().to_module(m, inplace=True)
        assert m.weight is w and w.abs().sum() == 0
        assert_close(swap["weight"], before, check_stride=False)
        swap.to_module(m, inplace=True)
        assert m.weight is w
        assert_close(w.detach(), before)

    @pytest.mark.parametrize("keys", ["both", "first", "second"])
    def test_inplace_context_with_a_layer_under_two_names(self, keys):
        shared = nn.Linear(3, 3)
        m = nn.Sequential(shared, nn.Sequential(shared))
        before = copy.deepcopy(m.state_dict())
        new = values(m).zero_()
        if keys != "both":
            new = new.exclude("1" if keys == "first" else "0")
        with new.to_module(m, inplace=True):
            assert not shared.weight.any() and not shared.bias.any()
        for name, value in m.state_dict().items():
            assert_close(value, before[name])

    def test_inplace_call_with_a_tied_parameter(self):
        m = Tied()
        before = copy.deepcopy(m.state_dict())
        swap = values(m).zero_().to_module(m, inplace=True)
        assert not any(p.any() for p in m.parameters())
        swap.to_module(m, inplace=True)
        for name, value in m.state_dict().items():
            assert_close(value, before[name])

    def test_inplace_writes_all_or_nothing(self):
        m = nn.Linear(3, 4)
        before = copy.deepcopy(m.state_dict())
        with pytest.raises(RuntimeError):
            TensorDict(weight=torch.zeros(4, 3), bias=torch.zeros(5)).to_module(m, inplace=True)
        for name, value in m.state_dict().items():
            assert_close(value, before[name])

    def test_a_layer_under_two_names_takes_what_either_brings(self):
        shared = nn.Linear(3, 4)
        m = nn.Sequential(nn.Sequential(shared), shared)
        weight, bias = torch.rand(4, 3), torch.rand(4)
        td = TensorDict({"0": {"0": {"weight": weight}}, "1": {"bias": bias}})
        with td.to_module(m):
            assert_close(shared.weight.data, weight)
            assert_close(shared.bias.data, bias)
        assert not torch.equal(shared.bias, bias)

    def test_params_under_two_names_come_back(self):
        m = nn.Module()
        m.first = m.second = TensorDictParams(TensorDict(w=torch.ones(3)))
        before = m.first.get_parameter("w")
        swap = values(m).zero_().to_module(m)
        assert not m.first["w"].any()
        swap.to_module(m)
        assert m.first["w"] is before and m.first["w"].all()

    def test_a_parameter_in_the_place_of_a_buffer(self):
        """It becomes one: over the same memory, but no parameter of the module."""
        m = nn.BatchNorm1d(3)
        td = values(m)
        mean = td["running_mean"] = nn.Parameter(torch.ones(3))
        with td.to_module(m):
            assert not isinstance(m.running_mean, nn.Parameter)
            assert m.running_mean.data_ptr() == mean.data_ptr()
            assert "running_mean" in dict(m.named_buffers())
            m.running_mean.sum().backward()
        assert mean.grad.tolist() == [1, 1, 1]

    def test_tensors_are_put_in_as_they_are(self):
        """Without the module's state only parameters are parameters."""
        m = nn.BatchNorm1d(3)
        names = list(m.state_dict())
        before = {**dict(m.named_parameters()), **dict(m.named_buffers())}
        td = values(m)
        td["bias"], td["running_mean"] = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
        x = torch.randn(2, 3)
        for how in ("context", "call"):
            swap = td.to_module(m, preserve_module_state=False)
            assert [n for n, _ in m.named_parameters()] == ["bias", "running_mean"]
            assert [n for n, _ in m.named_buffers()] == ["running_var", "num_batches_tracked"]
            assert m.weight is td["weight"] and m.running_mean is td["running_mean"]
            m.eval()
            with torch.no_grad():
                assert_close(m(x), (x - 1) / (1 + m.eps) ** 0.5)
            if how == "context":
                with swap:
                    pass
            else:
                swap.to_module(m)
            assert list(m.state_dict()) == names and "weight" not in m.__dict__
            for name, value in before.items():
                assert getattr(m, name) is value
            assert [n for n, _ in m.named_parameters()] == ["weight", "bias"]

    def test_tensors_as_they_are_in_layers_with_ways_of_their_own(self):
        for m, x in ((nn.Linear(3, 4), torch.ones(3)), (nn.LSTM(3, 2), torch.ones(5, 3))):
            want = torch.zeros_like(m(x)[0] if isinstance(m, nn.LSTM) else m(x))
            with values(m).zero_().to_module(m, preserve_module_state=False):
                assert not list(m.parameters())
                out = m(x)
                td = TensorDictModule(m, ["x"], ["y", "_"] if isinstance(m, nn.LSTM) else ["y"])
                assert_close(td(TensorDict(x=x))["y"], want)
            assert_close(out[0] if isinstance(m, nn.LSTM) else out, want)

    def test_inplace_context(self):
        m = nn.Linear(3, 4)
        w, before = m.weight, m.weight.detach().clone()
        with values(m).zero_().to_module(m, inplace=True):
            assert m.weight is w and w.abs().sum() == 0
        assert m.weight is w
        assert_close(w.detach(), before)

    def test_use_state_dict(self):
        m = nn.Linear(3, 4)
        w = m.weight
        TensorDict(weight=torch.ones(4, 3), bias=torch.zeros(4)).to_module(m, use_state_dict=True)
        assert m.weight.sum() == 12 and isinstance(w, nn.Parameter)

    def test_partial(self):
        m = nn.Linear(3, 4)
        b = m.bias
        with TensorDict(weight=torch.zeros(4, 3)).to_module(m):
            assert m.weight.abs().sum() == 0 and m.bias is b
        with TensorDict().to_module(m):
            pass
        assert m.bias is b

    def test_one_layer_of_many(self):
        m = mlp()
        w = m[2].weight
        with TensorDict({("0", "weight"): torch.zeros(4, 3)}).to_module(m):
            assert m[0].weight.abs().sum() == 0 and m[2].weight is w

    def test_other_shapes_may_enter(self):
        m = nn.Linear(3, 4)
        p = TensorDict(weight=torch.zeros(5, 3), bias=torch.zeros(5))
        assert call(p, m, torch.ones(3)).shape == torch.Size([5])

    def test_unknown_names(self):
        m = nn.Linear(3, 4)
        with pytest.raises(KeyError, match="nope"):
            TensorDict(nope=torch.zeros(4)).to_module(m)
        with pytest.raises(KeyError, match="nope"):
            TensorDict(nope=TensorDict(w=torch.zeros(4))).to_module(m)

    def test_unknown_argument_or_module(self):
        with pytest.raises(TypeError):
            values(nn.Linear(3, 4)).to_module(nn.Linear(3, 4), nonsense=1)
        with pytest.raises((AttributeError, TypeError)):
            TensorDict(w=torch.zeros(1)).to_module(lambda x: x)

    def test_restored_after_an_error(self):
        m = mlp()
        before = {n: p for n, p in m.named_parameters()}
        with pytest.raises(ZeroDivisionError), values(m).to_module(m):
            _ = 1 / 0
        assert all(p is before[n] for n, p in m.named_parameters())
        with pytest.raises(RuntimeError):
            call(values(m), m, torch.ones(7))
        assert all(p is before[n] for n, p in m.named_parameters())

    def test_contexts_nest(self):
        m = nn.Linear(3, 4)
        w = m.weight
        one = TensorDict(weight=torch.full((4, 3), 1.0))
        two = TensorDict(weight=torch.full((4, 3), 2.0))
        with one.to_module(m):
            with two.to_module(m):
                assert m.weight.mean() == 2
            assert m.weight.mean() == 1
        assert m.weight is w

    def test_again_and_again(self):
        m, p = nn.Linear(3, 4), None
        p = values(m)
        w = m.weight
        for i in range(3):
            p["weight"].fill_(i)
            with p.to_module(m):
                assert m.weight.mean() == i
        assert m.weight is w

    def test_locked_containers_work(self):
        m = nn.Linear(3, 4)
        p = values(m).lock_()
        with p.to_module(m):
            pass
        assert p.is_locked

    def test_buffers_go_and_come_back(self):
        m = nn.BatchNorm1d(3)
        p = TensorDict.from_module(m).clone()
        mean, x = m.running_mean, torch.randn(5, 3) + 4
        with p.to_module(m):
            assert m.running_mean is p["running_mean"]
            m(x)
        assert_close(p["running_mean"], 0.1 * x.mean(0))
        assert p["num_batches_tracked"] == 1
        assert m.running_mean is mean and mean.abs().sum() == 0 and m.num_batches_tracked == 0

    def test_module_stays_trainable_and_savable(self):
        m = mlp()
        before = list(m.state_dict())
        with values(m).to_module(m):
            assert list(m.state_dict()) == before
            assert len(list(m.parameters())) == 4
        assert list(m.state_dict()) == before

    def test_meta_module(self):
        real, empty = mlp(), mlp().to("meta")
        x = torch.randn(5, 3)
        assert_close(call(from_module(real), empty, x), real(x))
        assert empty[0].weight.is_meta

    def test_frozen_module_stays_frozen_unless_asked(self):
        m = nn.Linear(3, 4).requires_grad_(False)
        p = TensorDict.from_module(nn.Linear(3, 4))
        assert not call(p, m, torch.ones(3)).requires_grad  # Parameters take the module's flag
        with p.to_module(m, preserve_module_state=False):
            m(torch.ones(3)).sum().backward()
        assert p["weight"].grad is not None and not m.weight.requires_grad
        free = p.clone()  # tensors, not Parameters: taken with the gradient they carry
        assert call(free, m, torch.ones(3)).requires_grad

    def test_frozen_values_in_a_trainable_module(self):
        m = nn.Linear(3, 4)
        p = TensorDict.from_module(nn.Linear(3, 4).requires_grad_(False))
        with p.to_module(m):
            assert m.weight.requires_grad
        with p.to_module(m, preserve_module_state=False):
            assert m.weight is p["weight"] and not m.weight.requires_grad
        assert not p["weight"].requires_grad

    def test_tied_parameters(self):
        t = Tied()
        w, x = t.a.weight, torch.randn(5, 3)
        p = values(t)
        y = t(x)
        with p.to_module(t):
            assert_close(t(x), y)
        assert t.a.weight is t.b.weight is w
        swap = p.to_module(t)
        swap.to_module(t)
        assert t.a.weight is t.b.weight is w

    def test_a_layer_under_two_names(self):
        s = Shared()
        w = s.a.weight
        p = values(s)
        p["a"].zero_()
        p["b"].zero_()
        with p.to_module(s):
            assert s.a is s.b and s.a.weight.abs().sum() == 0
        assert s.a is s.b and s.a.weight is w
        swap = p.to_module(s)
        assert s.b.weight.abs().sum() == 0
        swap.to_module(s)
        assert s.a.weight is w

    def test_a_layer_under_two_names_given_once(self):
        s = Shared()
        w = s.a.weight
        p = values(s)
        p["a"].zero_()
        del p["b"]
        with p.to_module(s):
            assert s.b.weight.abs().sum() == 0
        assert s.b.weight is w

    @pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU])
    def test_recurrent_layers_use_the_given_weights(self, cls):
        torch.manual_seed(0)
        m, other, x = cls(3, 4), cls(3, 4), torch.randn(5, 2, 3)
        y = m(x)[0].detach()
        p = TensorDict.from_module(other)
        out = call(p, m, x)[0]
        assert_close(out, other(x)[0])
        out.sum().backward()
        assert other.weight_ih_l0.grad.norm() > 0 and m.weight_ih_l0.grad is None
        assert_close(m(x)[0], y)
        with values(m).zero_().to_module(m):
            assert m(x)[0].abs().sum() == 0
        assert_close(m(x)[0], y)

    def test_weights_of_another_container_class(self):
        m, x = nn.Linear(3, 4), torch.randn(3)
        p = TensorDictParams(TensorDict(weight=torch.zeros(4, 3), bias=torch.ones(4)))
        with p.to_module(m):
            assert m.weight is p["weight"]
            m(x).sum().backward()
        assert p["bias"].grad.tolist() == [1.0] * 4

    def test_params_held_by_a_module_are_swapped(self):
        class Host(nn.Module):
            def __init__(self):
                super().__init__()
                self.p = TensorDictParams(TensorDict(w=torch.ones(3)))

            def forward(self, x):
                return x * self.p["w"]

        h = Host()
        w = h.p["w"]
        p = TensorDict.from_module(h).data.clone().zero_()
        with p.to_module(h):
            assert h(torch.ones(3)).abs().sum() == 0
        assert h.p["w"] is w and h(torch.ones(3)).sum() == 3 and isinstance(h.p, TensorDictParams)

    def test_threads_with_modules_of_their_own(self):
        torch.manual_seed(0)
        x, wrong = torch.randn(5, 3), []
        pairs = [(mlp(), mlp()) for _ in range(4)]

        def work(m, other):
            p, y, y_other = TensorDict.from_module(other), m(x), other(x)
            for _ in range(20):
                if not torch.allclose(call(p, m, x), y_other) or not torch.allclose(m(x), y):
                    wrong.append(m)

        threads = [threading.Thread(target=work, args=pair) for pair in pairs]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert wrong == []

    def test_modules_are_not_kept_alive(self):
        m = mlp()
        p = values(m)
        call(p, m, torch.ones(3))
        ref = weakref.ref(m)
        del m
        gc.collect()
        assert ref() is None


class TestModuleChangesAfterUse:
    def used(self):
        m = mlp()
        p = values(m)
        call(p, m, torch.ones(3))
        from_module(m)
        return m, p

    def test_added_layer(self):
        m, p = self.used()
        m.append(nn.Linear(2, 5))
        assert ("3", "weight") in from_module(m).keys(True)
        assert call(p.zero_(), m, torch.ones(3)).shape == torch.Size([5])
        fresh = values(m).zero_()
        assert call(fresh, m, torch.ones(3)).abs().sum() == 0

    def test_replaced_layer(self):
        m, p = self.used()
        new = m[2] = nn.Linear(4, 2)
        assert from_module(m)["2", "weight"] is new.weight
        w = new.weight
        with p.zero_().to_module(m):
            assert new.weight.abs().sum() == 0
        assert new.weight is w

    def test_removed_layer(self):
        m, p = self.used()
        del m[2]
        assert set(from_module(m).keys()) == {"0"}
        with pytest.raises(KeyError, match="2"):
            p.to_module(m)

    def test_added_and_replaced_parameter(self):
        m, p = self.used()
        m[0].register_parameter("extra", nn.Parameter(torch.ones(5)))
        assert from_module(m)["0", "extra"] is m[0].extra
        new = m[0].weight = nn.Parameter(torch.zeros(4, 3))
        assert from_module(m)["0", "weight"] is new
        with p.to_module(m):
            assert m[0].weight is not new
        assert m[0].weight is new

    def test_removed_parameter(self):
        m, p = self.used()
        del m[0].bias
        m[0].register_parameter("bias", None)
        assert set(from_module(m)["0"].keys()) == {"weight"}
        out = call(values(m).zero_(), m, torch.ones(3))
        assert out.abs().sum() == 0

    def test_container_changed_after_use(self):
        m, p = self.used()
        p["2", "bias"] = torch.full((2,), 7.0)
        p["0", "weight"] = torch.zeros(4, 3)
        p["2", "weight"] = torch.zeros(2, 4)
        assert call(p, m, torch.ones(3)).tolist() == [7.0, 7.0]
        del p["2"]
        w = m[2].weight
        with p.to_module(m):
            assert m[2].weight is w

    def test_a_parameter_becomes_tied(self):
        t = Tied()
        t.b.weight = nn.Parameter(torch.ones(3, 3))
        p = values(t)
        call(p, t, torch.ones(3))
        t.b.weight = t.a.weight
        p["a", "weight"].zero_()
        p["b", "weight"].zero_()
        with p.to_module(t):
            assert t.a.weight.abs().sum() == 0 and t.b.weight.abs().sum() == 0
        assert t.a.weight is t.b.weight
        q = from_module(t)
        assert q["a", "weight"] is q["b", "weight"]


class TestStateDict:
    def test_flat_by_default(self):
        td = TensorDict(a=torch.zeros(2), n=TensorDict(b=torch.ones(3)), s="text")
        assert set(td.state_dict()) == {"a", "n.b"}
        assert set(td.state_dict(prefix="p.")) == {"p.a", "p.n.b"}

    def test_load_in_place(self):
        td = TensorDict(a=torch.zeros(2), n=TensorDict(b=torch.ones(3)))
        a = td["a"]
        src = TensorDict(a=torch.ones(2), n=TensorDict(b=torch.zeros(3)))
        assert td.load_state_dict(src.state_dict()) is td
        assert td["a"] is a and a.tolist() == [1.0, 1.0] and td["n", "b"].tolist() == [0.0] * 3
        td.load_state_dict({"a": torch.zeros(2), "n": {"b": torch.ones(3)}})
        assert a.tolist() == [0.0, 0.0]
        td.load_state_dict(src.state_dict(), assign=True)
        assert td["a"] is not a

    def test_strict(self):
        td = TensorDict(a=torch.zeros(2), n=TensorDict(b=torch.ones(3)))
        with pytest.raises(RuntimeError, match="(?s)key sets.*n"):
            td.load_state_dict({"a": torch.ones(2)})
        td.load_state_dict({"a": torch.ones(2)}, strict=False)
        assert td["a"].tolist() == [1.0, 1.0]

    def test_of_a_stack_of_modules(self):
        a, b = from_modules(*linears()), from_modules(*linears())
        c = b.clone()
        c.load_state_dict(a.state_dict())
        assert_close(c["weight"].detach(), a["weight"].detach())
        assert c["weight"] is not a["weight"]

    def test_unflatten_a_module_state_dict(self):
        m, other = mlp(), mlp()
        p = TensorDict(other.state_dict()).unflatten_keys(".")
        x = torch.randn(3)
        assert_close(call(p, m, x), other(x))


def params(**kw):
    td = TensorDict(
        w=torch.zeros(3, 4), n=TensorDict(b=torch.zeros(2), i=torch.zeros(2, dtype=torch.long))
    )
    return TensorDictParams(td, **kw)


class TestParams:
    def test_is_both(self):
        p = params()
        assert isinstance(p, nn.Module) and isinstance(p, TensorDictParams)
        assert list(p.keys()) == ["w", "n"] and p.batch_size == torch.Size([])

    def test_conversion(self):
        p = params()
        assert type(p["w"]) is nn.Parameter and type(p["n", "b"]) is nn.Parameter
        assert not isinstance(p["n", "i"], nn.Parameter)
        assert [n for n, _ in p.named_parameters()] == ["w", "n.b"]
        assert [n for n, _ in p.named_buffers()] == ["n.i"]
        assert dict(p.named_parameters())["n.b"] is p["n", "b"]

    @pytest.mark.parametrize("flag", [True, "skip"])
    def test_no_convert(self, flag):
        v = nn.Parameter(torch.ones(2))
        p = TensorDictParams(TensorDict(w=torch.zeros(3), v=v), no_convert=flag)
        assert p["v"] is v and not isinstance(p["w"], nn.Parameter)
        assert [n for n, _ in p.named_parameters()] == ["v"]
        assert [n for n, _ in p.named_buffers()] == ["w"]
        p["z"] = torch.zeros(2)
        assert not isinstance(p["z"], nn.Parameter)

    def test_sources(self):
        t = torch.zeros(3)
        assert TensorDictParams({"w": t})["w"].data_ptr() == t.data_ptr()
        assert type(TensorDictParams(w=t)["w"]) is nn.Parameter
        assert TensorDictParams().is_empty()
        v = nn.Parameter(t)
        assert TensorDictParams(TensorDict(w=v))["w"] is v
        m = nn.Linear(2, 3)
        assert TensorDictParams(TensorDict.from_module(m))["weight"] is m.weight

    def test_frozen_parameters_stay_frozen(self):
        v = nn.Parameter(torch.zeros(3), requires_grad=False)
        assert not TensorDictParams(TensorDict(w=v))["w"].requires_grad

    def test_non_leaf_values_become_leaves(self):
        v = torch.ones(3, requires_grad=True) * 2
        assert TensorDictParams(TensorDict(w=v))["w"].is_leaf

    def test_text_entries(self):
        assert TensorDictParams(TensorDict(s="text", w=torch.zeros(2)))["s"] == "text"

    def test_lazy_stacks_are_refused(self):
        with pytest.raises(RuntimeError, match="LazyStacked.*permitted"):
            TensorDictParams(
                lazy_stack([TensorDict(w=torch.zeros(2)), TensorDict(w=torch.zeros(3))])
            )

    def test_set_registers(self):
        p = params()
        p.set("z", torch.zeros(2))
        p["n", "new"] = torch.zeros(2)
        p["deep", "er"] = torch.zeros(1)
        p.set("count", torch.zeros(2, dtype=torch.int))
        p.update({"u": torch.ones(2)})
        assert all(type(p[k]) is nn.Parameter for k in ("z", ("n", "new"), ("deep", "er"), "u"))
        assert {n for n, _ in p.named_parameters()} == {"w", "n.b", "z", "n.new", "deep.er", "u"}
        assert {n for n, _ in p.named_buffers()} == {"n.i", "count"}
        v = nn.Parameter(torch.ones(1))
        p["v"] = v
        assert p["v"] is v

    def test_replacing_and_removing_unregisters(self):
        p = params()
        old = p["w"]
        p["w"] = torch.ones(3, 4)
        assert p["w"] is not old and dict(p.named_parameters())["w"] is p["w"]
        p.set("z", torch.zeros(2))
        p.rename_key_("z", "y")
        assert "y" in dict(p.named_parameters()) and "z" not in dict(p.named_parameters())
        del p["y"]
        p.pop("w")
        assert [n for n, _ in p.named_parameters()] == ["n.b"]

    def test_in_place_updates_keep_the_parameter(self):
        p = params()
        w = p["w"]
        p.set_("w", torch.full((3, 4), 5.0))
        assert p["w"] is w and w[0, 0].item() == 5
        p.update_({"w": torch.full((3, 4), 6.0)})
        assert p["w"] is w and w[0, 0].item() == 6
        p.fill_("w", 2.0)
        assert w.detach().sum() == 24
        p.apply_(lambda x: x.fill_(3))
        assert w.detach().sum() == 36
        p.zero_()
        assert p["w"] is w and w.detach().sum() == 0
        assert w.requires_grad and w.is_leaf and w.grad_fn is None

    def test_lock(self):
        p = params()
        assert not p.is_locked
        p.lock_()
        for change in (lambda: p.set("z", torch.zeros(2)), lambda: p.pop("w")):
            with pytest.raises(RuntimeError, match="Cannot modify locked"):
                change()
        p.set_("w", torch.ones(3, 4))
        p.unlock_()
        p.set("z", torch.zeros(2))
        assert "z" in dict(p.named_parameters())

    def test_data(self):
        p = params()
        d = p.data
        assert type(d) is TensorDict and type(d["w"]) is torch.Tensor and not d["w"].requires_grad
        assert d["w"].data_ptr() == p["w"].data_ptr()

    def test_indexing_gives_plain_containers(self):
        p = TensorDictParams(TensorDict(w=torch.zeros(3, 4), batch_size=[3]))
        row = p[0]
        assert type(row) is TensorDict and row["w"].requires_grad and row["w"].grad_fn is not None
        assert [type(r) for r in p] == [TensorDict] * 3 and len(p) == 3

    @pytest.mark.parametrize(
        "op",
        [
            lambda p: p.reshape(3, 1),
            lambda p: p.view(1, 3),
            lambda p: p.unsqueeze(0),
            lambda p: p.expand(2, 3),
            lambda p: p.unbind(0)[0],
            lambda p: p.split(2)[0],
            lambda p: p.apply(lambda x: x + 1),
            lambda p: p + 1,
            lambda p: p.detach(),
            lambda p: p.select("w"),
            lambda p: p.to_tensordict(),
            lambda p: p.flatten_keys("."),
            lambda p: torch.stack([p, p]),
            lambda p: torch.cat([p, p]),
            lambda p: torch.zeros_like(p),
            lambda p: p.data,
        ],
    )
    def test_results_are_plain_containers(self, op):
        assert (
            type(op(TensorDictParams(TensorDict(w=torch.zeros(3, 4), batch_size=[3]))))
            is TensorDict
        )

    def test_clone(self):
        p = params()
        c = p.clone()
        assert type(c) is TensorDictParams and c["w"] is not p["w"]
        assert type(c["w"]) is nn.Parameter and c["w"].is_leaf and c["w"].requires_grad
        assert [n for n, _ in c.named_parameters()] == ["w", "n.b"]
        shallow = p.clone(False)
        assert type(shallow) is TensorDictParams and shallow["w"] is p["w"]
        assert type(p.copy()) is TensorDictParams and p.copy()["w"] is p["w"]
        c["w"].data.fill_(1)
        assert p["w"].detach().sum() == 0

    def test_casting(self):
        p = params()
        d = p.to(torch.float64)
        assert type(d) is TensorDictParams and type(d["w"]) is nn.Parameter
        assert d["w"].dtype == torch.float64 and p["w"].dtype == torch.float32
        assert p.to("meta")["w"].device.type == "meta" and p["w"].device.type == "cpu"

    def test_ties(self):
        t = nn.Parameter(torch.zeros(3))
        p = TensorDictParams(TensorDict(a=t, n=TensorDict(b=t)))
        assert p["a"] is p["n", "b"] is t
        assert [n for n, _ in p.named_parameters()] == ["a"] and len(list(p.parameters())) == 1
        assert set(p.state_dict()) == {"a", "n.b"}
        for q in (p.clone(), copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
            assert q["a"] is q["n", "b"] and q["a"] is not t
            assert len(list(q.parameters())) == 1

    def test_state_dict(self):
        p, q = params(), params()
        q["w"].data.fill_(1)
        q["n", "i"].fill_(3)
        assert list(p.state_dict()) == ["w", "n.b", "n.i"]
        w = p["w"]
        p.load_state_dict(q.state_dict())
        assert p["w"] is w and w.detach().sum() == 12 and p["n", "i"].tolist() == [3, 3]
        with pytest.raises(RuntimeError, match="(?s)key sets.*n"):
            p.load_state_dict({"w": torch.zeros(3, 4)})

    def test_gradients(self):
        p = params()
        (p["w"].sum() * 2).backward()
        g = p.grad
        assert g["w"].unique().tolist() == [2.0] and not isinstance(g, TensorDictParams)
        p.zero_grad()
        assert p["w"].grad is None
        assert not p.requires_grad_(False)["w"].requires_grad

    def test_optimiser(self):
        p = params()
        opt = torch.optim.SGD(p.parameters(), lr=1.0)
        p["w"].sum().backward()
        opt.step()
        assert p["w"].detach().sum() == -12

    def test_refused_operations(self):
        with pytest.raises(RuntimeError, match="map"):
            params().map(lambda x: x)
        with pytest.raises(RuntimeError, match="memmap"):
            params().memmap_()

    def test_memmap_copy_is_plain(self, tmp_path):
        p = params()
        got = p.memmap(tmp_path)
        assert type(got) is TensorDict and got.is_memmap()
        assert type(p["w"]) is nn.Parameter

    def test_share_memory(self):
        p = params()
        p.share_memory_()
        assert p["w"].is_shared()

    @pytest.mark.parametrize("round_trip", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
    def test_copies(self, round_trip):
        q = round_trip(params())
        assert type(q) is TensorDictParams and type(q["w"]) is nn.Parameter
        assert [n for n, _ in q.named_parameters()] == ["w", "n.b"]
        assert [n for n, _ in q.named_buffers()] == ["n.i"]

    def test_pickle_keeps_the_lock(self):
        assert pickle.loads(pickle.dumps(params().lock_())).is_locked

    def test_get_hook(self):
        p = TensorDictParams(TensorDict(w=torch.ones(3)))
        p.register_get_post_hook(lambda td, value: value * 2)
        assert p["w"].tolist() == [2.0] * 3 and p.get("w").tolist() == [2.0] * 3
        assert dict(p.named_parameters())["w"].detach().tolist() == [1.0] * 3

    def test_vmap(self):
        p = TensorDictParams(TensorDict(w=torch.arange(3.0), batch_size=[3]))
        got = torch.vmap(lambda q: q["w"] * 2)(p)
        assert got.tolist() == [0.0, 2.0, 4.0]
        got.sum().backward()
        assert p["w"].grad.tolist() == [2.0] * 3

    def test_truth_comparison_call(self):
        with pytest.raises(RuntimeError, match="boolean"):
            bool(params())
        assert (params() == params()).all()
        with pytest.raises(NotImplementedError):
            params()(1)


class TestParamsBelow:
    """Nested containers are locked only while the parameters are."""

    def make(self):
        return TensorDictParams(
            TensorDict(
                a=torch.zeros(2, 3), n=dict(b=torch.ones(2), c=torch.ones(2)), batch_size=[2]
            )
        )

    def test_lock(self):
        p = self.make()
        assert not p["n"].is_locked
        assert p.lock_()["n"].is_locked
        with pytest.raises(RuntimeError, match="locked"):
            p["n"].unlock_()
        p.unlock_()
        assert not p["n"].is_locked

    def test_nested_keys_are_taken_out(self):
        p = self.make()
        p.exclude(("n", "b"), inplace=True)
        assert list(p["n"].keys()) == ["c"]
        first, rest = self.make().split_keys([("n", "b")])
        assert list(first.keys(True, True)) == [("n", "b")] and "b" not in rest["n"].keys()

    def test_new_nested_entries_are_parameters_after_the_next_change(self):
        p = self.make()
        p["n"]["d"] = torch.ones(2)
        assert "n.d" not in dict(p.named_parameters())
        p["e"] = torch.ones(2)
        assert {"n.d", "e"} <= set(dict(p.named_parameters()))

    def test_rows_are_written(self):
        p = self.make()
        leaf = p["n", "b"]
        assert p.set_at_(("n", "b"), 5.0, 1) is p
        assert p["n", "b"] is leaf and leaf.tolist() == [1.0, 5.0]
        p.update_at_({"a": torch.ones(3)}, 0)
        assert p["a"].sum() == 3


class TestParamsInModules:
    class Host(nn.Module):
        def __init__(self):
            super().__init__()
            self.params = TensorDictParams(
                TensorDict(a=TensorDict(w=torch.ones(3)), k=torch.zeros(2, dtype=torch.int))
            )

        def forward(self, x):
            return x * self.params["a", "w"]

    def test_names(self):
        h = self.Host()
        assert [n for n, _ in h.named_parameters()] == ["params.a.w"]
        assert [n for n, _ in h.named_buffers()] == ["params.k"]
        assert [n for n, _ in h.named_modules()] == ["", "params"]
        assert list(h.state_dict()) == ["params.a.w", "params.k"]

    def test_load_state_dict(self):
        h, other = self.Host(), self.Host()
        other.params["a", "w"].data.fill_(7)
        h.load_state_dict(other.state_dict())
        assert h.params["a", "w"].detach().tolist() == [7.0] * 3

    def test_casts_and_flags_reach_them(self):
        h = self.Host().double()
        assert h.params["a", "w"].dtype == torch.float64 and h.params["k"].dtype == torch.int32
        assert isinstance(h.params["a", "w"], nn.Parameter)
        h.requires_grad_(False)
        assert not h.params["a", "w"].requires_grad
        assert not h.eval().params.training

    def test_training(self):
        h = self.Host()
        opt = torch.optim.SGD(h.parameters(), lr=1.0)
        h(torch.ones(3)).sum().backward()
        opt.step()
        assert h.params["a", "w"].detach().tolist() == [0.0] * 3
        h.zero_grad()
        assert h.params["a", "w"].grad is None

    def test_deepcopy(self):
        h = self.Host()
        d = copy.deepcopy(h)
        assert type(d.params) is TensorDictParams and d.params["a", "w"] is not h.params["a", "w"]
        assert [n for n, _ in d.named_parameters()] == ["params.a.w"]

    def test_key_set_later(self):
        h = self.Host()
        h.params["late"] = torch.zeros(2)
        assert "params.late" in dict(h.named_parameters())

    def test_compose_with_a_stack_of_modules(self):
        class Ensemble(nn.Module):
            def __init__(self):
                super().__init__()
                self.p = from_modules(*linears(), as_module=True)
                self.__dict__["empty"] = nn.Linear(3, 4, device="meta")

            def forward(self, x):
                return torch.vmap(call, (0, None, None))(self.p, self.empty, x)

        e = Ensemble()
        assert [n for n, _ in e.named_parameters()] == ["p.weight", "p.bias"]
        e(torch.ones(3)).sum().backward()
        assert all(q.grad is not None for q in e.parameters())


class TestOursAtomicSwap:
    def test_a_misfit_leaves_the_module_untouched(self):
        m = mlp()
        before = {n: p for n, p in m.named_parameters()}
        p = values(m).zero_()
        p["zz", "w"] = torch.zeros(1)
        with pytest.raises(KeyError, match="zz"):
            p.to_module(m)
        assert all(q is before[n] for n, q in m.named_parameters())

    def test_misfit_names_the_place(self):
        m = nn.Sequential(nn.Linear(3, 4))
        with pytest.raises(KeyError, match="nope"):
            TensorDict({("0", "nope"): torch.zeros(4)}).to_module(m)


class TestOursVmapLeavesTheModule:
    @pytest.mark.parametrize("lazy", [False, True])
    def test_real_module_under_vmap(self, lazy):
        m, ms = nn.Linear(3, 4), linears()
        w = m.weight
        y = torch.vmap(call, (0, None, None))(from_modules(*ms, lazy_stack=lazy), m, torch.ones(3))
        assert y.requires_grad
        assert m.weight is w and w.requires_grad and m.bias.requires_grad
        m(torch.ones(3)).sum().backward()
        assert w.grad is not None

    def test_member_as_the_module(self):
        ms, x = linears(), torch.randn(3)
        y = torch.vmap(call, (0, None, None))(from_modules(*ms), ms[0], x)
        assert_close(y, torch.stack([m(x) for m in ms]))
        assert ms[0].weight.requires_grad


class TestOursSources:
    def test_the_source_keeps_its_tensors(self):
        t = torch.zeros(3)
        src = TensorDict(w=t, n=TensorDict(b=t))
        TensorDictParams(src)
        assert src["w"] is t and src["n", "b"] is t

    def test_casting_keeps_ties(self):
        t = nn.Parameter(torch.zeros(3))
        q = TensorDictParams(TensorDict(a=t, n=TensorDict(b=t))).to(torch.float64)
        assert q["a"] is q["n", "b"]

    def test_lock_argument(self):
        assert params(lock=True).is_locked

    def test_from_module_does_not_lock_what_a_module_holds(self):
        class Host(nn.Module):
            def __init__(self):
                super().__init__()
                self.p = TensorDictParams(TensorDict(w=torch.ones(3)))

        h = Host()
        from_module(h)
        assert not h.p.is_locked
        h.p["late"] = torch.zeros(2)

    def test_load_state_dict_not_strict(self):
        p = params()
        p.load_state_dict({"w": torch.ones(3, 4)}, strict=False)
        assert p["w"].detach().sum() == 12
        h = nn.ModuleDict({"p": p})
        h.load_state_dict({"p.w": torch.zeros(3, 4)}, strict=False)
        assert p["w"].detach().sum() == 0


class TestOursReprs:
    def test_dense_and_lazy(self):
        ms = linears()
        assert repr(from_modules(*ms)) == (
            "TensorDict(\n"
            "    fields={\n"
            "        bias: Parameter(shape=torch.Size([2, 4]), device=cpu,"
            " dtype=torch.float32, is_shared=False),\n"
            "        weight: Parameter(shape=torch.Size([2, 4, 3]), device=cpu,"
            " dtype=torch.float32, is_shared=False)},\n"
            "    batch_size=torch.Size([2]),\n"
            "    device=None,\n"
            "    is_shared=False)"
        )
        assert repr(from_modules(*ms, lazy_stack=True)) == (
            "LazyStackedTensorDict(\n"
            "    fields={\n"
            "        bias: Tensor(shape=torch.Size([2, 4]), device=cpu,"
            " dtype=torch.float32, is_shared=False),\n"
            "        weight: Tensor(shape=torch.Size([2, 4, 3]), device=cpu,"
            " dtype=torch.float32, is_shared=False)},\n"
            "    exclusive_fields={\n"
            "    },\n"
            "    batch_size=torch.Size([2]),\n"
            "    device=None,\n"
            "    is_shared=False,\n"
            "    stack_dim=0)"
        )
