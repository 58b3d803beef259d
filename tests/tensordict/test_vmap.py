"""torch.func transforms over containers: vmap in and out, gradients, functional modules."""

import subprocess
import sys

import pytest
import torch
from torch import nn, vmap
from torch.func import functional_call, grad, grad_and_value, jacrev, jvp, vjp

from raffia import LazyStackedTensorDict, TensorDict, is_tensor_collection, lazy_stack

B, T, A, N = 2, 3, 5, 4


def make():
    return TensorDict(
        {
            "a": torch.arange(B * T * A * 1.0).reshape(B, T, A),
            "n": {"b": torch.arange(B * T * 1.0).reshape(B, T)},
        },
        [B, T],
    )


def leaves(td):
    return dict(td.items(True, True))


def assert_leaves(result, expected):
    got = leaves(result)
    expected = expected if isinstance(expected, dict) else leaves(expected)
    assert set(got) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value)


class TestDims:
    @pytest.mark.parametrize("out_dim", [0, 1])
    @pytest.mark.parametrize("in_dim", [0, 1])
    def test_in_and_out(self, in_dim, out_dim):
        """Dims count the batch dims: the function sees one batch dim less, on every level."""
        seen = []

        def fn(td):
            seen.append((td.batch_size, td["n"].batch_size, td["a"].shape, td["n", "b"].shape))
            return td + 1

        result = vmap(fn, in_dim, out_dim)(make())
        rest = (B, T)[1 - in_dim]
        assert seen == [((rest,), (rest,), (rest, A), (rest,))]
        expected = make() + 1 if in_dim == out_dim else (make() + 1).transpose(0, 1)
        assert type(result) is TensorDict
        assert result.batch_size == expected.batch_size
        assert result["n"].batch_size == expected.batch_size
        assert_leaves(result, expected)

    def test_negative_in_dim_counts_the_dims_of_the_leaves_ours(self):
        td = TensorDict({"a": torch.arange(6.0).reshape(2, 3)}, [2, 3])
        assert_leaves(vmap(lambda x: x + 1, -1)(td), (td + 1).transpose(0, 1))
        with pytest.raises(ValueError, match="size"):  # leaves with dims of their own
            vmap(lambda x: x + 1, -1)(make())

    def test_in_dim_beyond_the_batch(self):
        with pytest.raises((ValueError, IndexError, RuntimeError)):
            vmap(lambda td: td, 2)(make())

    def test_out_dim_beyond_the_batch(self):
        with pytest.raises((ValueError, IndexError, RuntimeError)):
            vmap(lambda td: td, 0, 2)(make())

    def test_none_is_shared(self):
        x = torch.arange(N * 1.0)
        result = vmap(lambda td, y: td + y, (None, 0))(make(), x)
        assert result.batch_size == torch.Size([N, B, T])
        for i in range(N):
            assert_leaves(result[i], make() + i)

    def test_none_sees_the_container_itself(self):
        td, seen = make(), []
        vmap(lambda p, y: seen.append(p.batch_size) or y, (None, 0))(td, torch.ones(N))
        assert seen == [td.batch_size]

    def test_out_dims_none_ours(self):
        td, y = vmap(lambda p, y: (p, y), (None, 0), (None, 0))(make(), torch.ones(N))
        assert_leaves(td, make())
        assert td.batch_size == torch.Size([B, T])

    def test_two_containers(self):
        result = vmap(lambda x, y: x * y)(make(), make() + 1)
        assert_leaves(result, make() * (make() + 1))

    def test_containers_with_different_dims(self):
        other = (make() + 1).transpose(0, 1)
        result = vmap(lambda x, y: x + y, (0, 1))(make(), other)
        assert_leaves(result, make() * 2 + 1)

    def test_with_tensors(self):
        x = torch.arange(T * 1.0)
        result = vmap(lambda td, y: td["a"] + y, (1, 0))(make(), x)
        torch.testing.assert_close(result, make()["a"].transpose(0, 1) + x[:, None, None])

    def test_sizes_differ(self):
        with pytest.raises(ValueError, match="same size"):
            vmap(lambda td, y: td["a"] + y, (1, 0))(make(), torch.ones(B))

    def test_inside_dicts_and_tuples(self):
        result = vmap(lambda tree: tree["k"][0] + 1)({"k": (make(),)})
        assert_leaves(result, make() + 1)
        moved = vmap(lambda tree, y: tree["k"]["a"] + y, ({"k": 1}, 0))(
            {"k": make()}, torch.zeros(T)
        )
        torch.testing.assert_close(moved, make()["a"].transpose(0, 1))

    def test_tuple_of_outputs(self):
        td, a = vmap(lambda td: (td, td["a"]), out_dims=(1, 0))(make())
        assert td.batch_size == torch.Size([T, B])
        torch.testing.assert_close(a, make()["a"])

    def test_names(self):
        td = TensorDict({"a": torch.ones(B, T)}, [B, T], names=["b", "t"])
        assert vmap(lambda x: x + 1)(td).names == [None, "t"]
        assert vmap(lambda x: x + 1, out_dims=1)(td).names == ["t", None]

    def test_non_tensor_entries_stay(self):
        td = make().set("s", "text")
        seen = []
        result = vmap(lambda x: seen.append(x["s"]) or x.clone())(td)
        assert seen == ["text"]
        assert result["s"] == "text"

    def test_the_only_batch_dim(self):
        td = TensorDict({"a": torch.ones(B)}, [B])
        assert vmap(lambda x: x["a"].sum())(td).shape == (B,)

    def test_chunks(self):
        assert_leaves(vmap(lambda x: x + 1, chunk_size=1)(make()), make() + 1)


class TestInside:
    """What the function may do with the container."""

    CASES = {
        "get": (lambda td: td["n", "b"], lambda td: td["n", "b"]),
        "clone": (lambda td: td.clone(), lambda td: td),
        "index": (lambda td: td[0], lambda td: td[:, 0]),
        "mask": (lambda td: td[:2], lambda td: td[:, :2]),
        "unsqueeze": (lambda td: td.unsqueeze(0), lambda td: td.unsqueeze(1)),
        "reshape": (lambda td: td.reshape(T, 1), lambda td: td.reshape(B, T, 1)),
        "stack": (lambda td: torch.stack([td, td + 1], 1), lambda td: torch.stack([td, td + 1], 2)),
        "cat": (lambda td: torch.cat([td, td], 0), lambda td: torch.cat([td, td], 1)),
        "sum": (lambda td: td.sum(0), lambda td: td.sum(1)),
        "mean": (
            lambda td: td.mean(dim="feature", reduce=True),
            lambda td: td.mean(dim="feature", reduce=True),
        ),
        "apply": (lambda td: td.apply(lambda x: x * 2), lambda td: td * 2),
        "select": (lambda td: td.select("a"), lambda td: td.select("a")),
        "exclude": (lambda td: td.exclude("n"), lambda td: td.exclude("n")),
        "flatten_keys": (lambda td: td.flatten_keys("."), lambda td: td.flatten_keys(".")),
        "compare": (lambda td: td > 3, lambda td: td > 3),
        "zeros_like": (lambda td: torch.zeros_like(td) + td, lambda td: td),
        "double": (lambda td: td.double(), lambda td: td.double()),
        "rename": (
            lambda td: td.rename_key_("a", "z"),
            lambda td: td.clone(False).rename_key_("a", "z"),
        ),
        "empty": (lambda td: td.empty().set("q", td["a"]), lambda td: td.empty().set("q", td["a"])),
    }

    @pytest.mark.parametrize("name", CASES)
    def test_operation(self, name):
        fn, whole = self.CASES[name]
        result, expected = vmap(fn)(make()), whole(make())
        if is_tensor_collection(expected):
            assert result.batch_size == expected.batch_size
            assert_leaves(result, expected)
        else:
            torch.testing.assert_close(result, expected)

    def test_set_a_mapped_value(self):
        def fn(td, y):
            return td.set("q", td["a"].sum(-1) + y).update({"n": {"c": td["n", "b"] * y}})

        y = torch.arange(B * 1.0)
        result = vmap(fn)(make(), y)
        torch.testing.assert_close(result["q"], make()["a"].sum(-1) + y[:, None])
        torch.testing.assert_close(result["n", "c"], make()["n", "b"] * y[:, None])

    def test_set_an_unmapped_value(self):
        result = vmap(lambda td: td.set("k", torch.arange(T)))(make())
        torch.testing.assert_close(result["k"], torch.arange(T).expand(B, T))

    def test_source_keeps_its_keys(self):
        td = make()
        vmap(lambda x: x.set("q", x["a"] + 1))(td)
        assert set(td.keys()) == {"a", "n"}

    def test_container_made_inside(self):
        result = vmap(lambda x: TensorDict({"q": x * 2, "z": torch.zeros(T)}))(
            torch.arange(N * 1.0)
        )
        assert type(result) is TensorDict
        assert result.batch_size == torch.Size([N])
        assert_leaves(result, {"q": 2.0 * torch.arange(N), "z": torch.zeros(N, T)})

    @pytest.mark.parametrize("out_dim", [0, 1])
    def test_batched_container_made_inside(self, out_dim):
        x = torch.arange(N * T * 1.0).reshape(N, T)
        result = vmap(lambda x: TensorDict({"q": x, "n": {"r": x}}, [T]), out_dims=out_dim)(x)
        expected = x if out_dim == 0 else x.t()
        assert result.batch_size == expected.shape
        assert result["n"].batch_size == expected.shape
        assert_leaves(result, {"q": expected, ("n", "r"): expected})

    def test_closure_over_a_container(self):
        td = make()
        result = vmap(lambda x: td + x)(torch.arange(N * 1.0))
        assert result.batch_size == torch.Size([N, B, T])
        assert_leaves(result[2], make() + 2)
        assert td.batch_size == torch.Size([B, T])

    def test_randomness(self):
        result = vmap(torch.rand_like, randomness="different")(make())
        assert not torch.equal(result["a"][0], result["a"][1])
        with pytest.raises(RuntimeError, match="randomness"):
            vmap(torch.rand_like)(make())

    def test_locked(self):
        td = make().lock_()
        with pytest.raises(RuntimeError, match="locked"):
            vmap(lambda x: x.set("q", x["a"]))(td)
        assert_leaves(vmap(lambda x: x + 1)(td), make() + 1)

    def test_lazy_stack_made_inside(self):
        result = vmap(lambda x: lazy_stack([x, x + 1], 0))(make())
        assert type(result) is LazyStackedTensorDict
        assert result.batch_size == torch.Size([B, 2, T])
        assert_leaves(result, torch.stack([make(), make() + 1], 1))


class TestNested:
    @pytest.mark.parametrize("dim", [0, 1])
    def test_vmap_of_vmap(self, dim):
        seen = []
        result = vmap(
            vmap(lambda td: seen.append(td.batch_size) or td + 1), in_dims=dim, out_dims=dim
        )(make())
        assert seen == [torch.Size([])]
        assert result.batch_size == torch.Size([B, T])
        assert_leaves(result, make() + 1)

    def test_outer_product(self):
        x, y = make()[0], (make() + 1)[1]
        result = vmap(vmap(lambda p, q: p * q, (None, 0)), (0, None))(x, y)
        assert result.batch_size == torch.Size([T, T])
        torch.testing.assert_close(
            result["n", "b"], x["n", "b"][:, None] * y["n", "b"][None], check_stride=False
        )

    def test_made_in_the_middle(self):
        def outer(x):
            td = TensorDict({"x": x})
            return vmap(lambda y: td * y)(torch.arange(T * 1.0))

        result = vmap(outer)(torch.arange(N * 1.0))
        assert result.batch_size == torch.Size([N, T])
        torch.testing.assert_close(result["x"], torch.outer(torch.arange(4.0), torch.arange(3.0)))


class TestLazyStack:
    @pytest.mark.parametrize("out_dim", [0, 1])
    def test_identity(self, out_dim):
        """Mapping over the stack dim gives the members."""
        td = lazy_stack([make(), make() + 1], 0)
        result = vmap(lambda x: x, 0, out_dim)(td)
        assert_leaves(result, td if out_dim == 0 else td.transpose(0, 1))

    def test_read(self):
        td = lazy_stack([make(), make() + 1], 0)
        result = vmap(lambda x: x["a"] * 2)(td)
        torch.testing.assert_close(result, td["a"] * 2)

    def test_other_dim(self):
        td = lazy_stack([make(), make() + 1], 1)
        result = vmap(lambda x: x + 1)(td)
        assert result.batch_size == torch.Size([B, 2, T])
        assert_leaves(result, td + 1)

    @pytest.mark.parametrize("dim", [0, 1])
    def test_arithmetic_over_the_stack_dim_ours(self, dim):
        td = lazy_stack([make(), make() + 1], dim)
        result = vmap(lambda x: x + 1, dim, dim)(td)
        assert result.batch_size == td.batch_size
        assert_leaves(result, td + 1)


def modules(num=B):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(A, N), nn.Tanh(), nn.Linear(N, 1)) for _ in range(num)]


class TestEnsembles:
    """Parameters of several modules, stacked, mapped over one stateless module."""

    @pytest.fixture(autouse=True)
    def shared_module(self):
        self.module = modules(1)[0].to("meta")

    def call(self, params, x):
        with params.to_module(self.module):
            return self.module(x)

    @pytest.mark.parametrize("kind", ["dense", "module", "lazy"])
    def test_equals_a_loop(self, kind):
        mods, x = modules(), torch.randn(7, A)
        kwargs = {"dense": {}, "module": {"as_module": True}, "lazy": {"lazy_stack": True}}[kind]
        params = TensorDict.from_modules(*mods, **kwargs)
        assert params.batch_size == torch.Size([B])
        result = vmap(self.call, (0, None))(params, x)
        torch.testing.assert_close(result, torch.stack([m(x) for m in mods]))

    @pytest.mark.parametrize("kind", ["dense", "module"])
    def test_gradients_reach_the_stacked_parameters(self, kind):
        mods, x = modules(), torch.randn(7, A)
        params = TensorDict.from_modules(*mods, as_module=kind == "module")
        assert isinstance(params["0", "weight"], nn.Parameter)
        vmap(self.call, (0, None))(params, x).pow(2).sum().backward()
        for mod in mods:
            mod(x).pow(2).sum().backward()
        for i, name in ((0, "0"), (2, "2")):
            expected = torch.stack([mod[i].weight.grad for mod in mods])
            torch.testing.assert_close(params[name, "weight"].grad, expected)

    def test_dense_gradients_do_not_reach_the_originals(self):
        mods = modules()
        params = TensorDict.from_modules(*mods)
        vmap(self.call, (0, None))(params, torch.randn(7, A)).sum().backward()
        assert all(p.grad is None for mod in mods for p in mod.parameters())

    def test_lazy_gradients_reach_the_originals(self):
        mods, x = modules(), torch.randn(7, A)
        params = TensorDict.from_modules(*mods, lazy_stack=True)
        vmap(self.call, (0, None))(params, x).pow(2).sum().backward()
        got = [[p.grad.clone() for p in mod.parameters()] for mod in mods]
        for mod, grads in zip(mods, got, strict=True):
            mod.zero_grad()
            mod(x).pow(2).sum().backward()
            for p, g in zip(mod.parameters(), grads, strict=True):
                torch.testing.assert_close(p.grad, g)

    def test_one_input_each(self):
        mods, x = modules(), torch.randn(B, 7, A)
        params = TensorDict.from_modules(*mods)
        result = vmap(self.call)(params, x)
        torch.testing.assert_close(
            result, torch.stack([m(y) for m, y in zip(mods, x, strict=True)])
        )

    def test_container_input_and_output(self):
        mods, x = modules(), torch.randn(7, A)
        params = TensorDict.from_modules(*mods)

        def fn(p, td):
            return td.set("out", self.call(p, td["x"]))

        result = vmap(fn, (0, None))(params, TensorDict({"x": x}, [7]))
        assert result.batch_size == torch.Size([B, 7])
        torch.testing.assert_close(result["out"], torch.stack([m(x) for m in mods]))
        torch.testing.assert_close(result["x"], x.expand(B, 7, A))

    def test_two_levels(self):
        """A population of ensembles."""
        sets = [TensorDict.from_modules(*modules()).data for _ in range(T)]
        params = torch.stack([p * (i + 1) for i, p in enumerate(sets)])
        x = torch.randn(7, A)
        result = vmap(vmap(self.call, (0, None)), (0, None))(params, x)
        assert result.shape == (T, B, 7, 1)
        torch.testing.assert_close(result[2, 1], self.call(params[2, 1], x))

    def test_module_has_its_own_parameters_back_ours(self):
        module = modules(1)[0]
        before = dict(module.named_parameters())
        params = TensorDict.from_modules(*modules())

        def fn(p, x):
            with p.to_module(module):
                return module(x)

        vmap(fn, (0, None))(params, torch.randn(7, A))
        assert all(before[k] is v for k, v in module.named_parameters())

    def test_draws_in_vmap(self):
        """A module that draws, over stacked parameters."""
        params = TensorDict.from_modules(*modules())

        def fn(p, x):
            return self.call(p, torch.nn.functional.dropout(x, 0.5))

        out = vmap(fn, (0, None), randomness="different")(params, torch.ones(7, A))
        assert out.shape == (B, 7, 1)


class TestGradients:
    def test_grad(self):
        result = grad(lambda p: p["a"].pow(2).sum() + 3 * p["n", "b"].sum())(make())
        assert type(result) is TensorDict
        assert result.batch_size == torch.Size([B, T])
        assert_leaves(result, {"a": 2 * make()["a"], ("n", "b"): torch.full((B, T), 3.0)})

    def test_grad_and_value(self):
        g, value = grad_and_value(lambda p: p["a"].sum())(make())
        torch.testing.assert_close(value, make()["a"].sum())
        assert_leaves(g, {"a": torch.ones(B, T, A), ("n", "b"): torch.zeros(B, T)})

    def test_aux(self):
        g, aux = grad(lambda p: (p["a"].sum(), p * 2), has_aux=True)(make())
        assert_leaves(aux, make() * 2)

    def test_grad_of_a_module(self):
        module, x = modules(1)[0], torch.randn(7, A)
        params = TensorDict.from_module(module)

        def loss(p, x):
            with p.to_module(module):
                return module(x).pow(2).mean()

        g = grad(loss)(params.data.clone(), x)
        module(x).pow(2).mean().backward()
        torch.testing.assert_close(g["0", "weight"], module[0].weight.grad)
        torch.testing.assert_close(g["2", "bias"], module[2].bias.grad)

    def test_per_sample_grad(self):
        module, x = modules(1)[0], torch.randn(7, A)
        params = TensorDict.from_module(module).data.clone()

        def loss(p, x):
            with p.to_module(module):
                return module(x).pow(2).mean()

        result = vmap(grad(loss), (None, 0))(params, x)
        assert result.batch_size == torch.Size([7])
        for i in range(7):
            assert_leaves(result[i], grad(loss)(params, x[i]))

    def test_jacrev_of_a_tensor_output(self):
        jac = jacrev(lambda p: p["x"].pow(2))(TensorDict({"x": torch.arange(3.0)}))
        torch.testing.assert_close(jac["x"], torch.diag(2 * torch.arange(3.0)))

    def test_jacrev_of_a_container_output(self):
        jac = jacrev(lambda x: TensorDict({"q": x * 2}))(torch.ones(3))
        torch.testing.assert_close(jac["q"], 2 * torch.eye(3))

    def test_vjp(self):
        out, pull = vjp(lambda p: p * 3, make())
        assert_leaves(out, make() * 3)
        assert_leaves(pull(make())[0], make() * 3)

    @pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own
    def test_jvp(self):
        out, tangent = jvp(lambda p: p * p, (make(),), (torch.ones_like(make()),))
        assert_leaves(tangent, make() * 2)

    def test_functionalize(self):
        result = torch.func.functionalize(lambda p: p.clone().add_(1))(make())
        assert_leaves(result, make() + 1)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(A, N)

    def forward(self, td):
        return td.clone(False).set("out", self.linear(td["x"]))


class TestFunctionalCall:
    def test_container_argument(self):
        module, td = Reader(), TensorDict({"x": torch.randn(7, A)}, [7])
        params = {k: v * 2 for k, v in module.named_parameters()}
        result = functional_call(module, params, (td,))
        torch.testing.assert_close(result["out"], module.linear(td["x"]) * 2)

    def test_parameters_of_a_container(self):
        module, td = Reader(), TensorDict({"x": torch.randn(7, A)}, [7])
        params = TensorDict.from_module(module).flatten_keys(".").to_dict()
        result = functional_call(module, params, (td,))
        torch.testing.assert_close(result["out"], module.linear(td["x"]))

    def test_stack_module_state(self):
        mods, x = [Reader(), Reader()], torch.randn(7, A)
        params, _ = torch.func.stack_module_state(mods)

        def fn(p, x):
            return functional_call(mods[0], p, (TensorDict({"x": x}, [7]),))

        result = vmap(fn, (0, None))(params, x)
        assert result.batch_size == torch.Size([B, 7])
        torch.testing.assert_close(result["out"], torch.stack([m.linear(x) for m in mods]))


SNIPPET = """
import torch, torch._functorch.vmap as v, torch._functorch.eager_transforms as e
import torch._dynamo, torch.distributed, torch.multiprocessing  # torch wraps its own on import
import torch.nn, torch.utils._pytree as p
def snapshot():
    places = (v, e, p, torch, torch.nn.Module, torch.Tensor, torch.func)
    return {(m.__name__, k): id(o) for m in places for k, o in vars(m).items() if callable(o)}
before = snapshot()
import raffia
after = snapshot()
changed = [k for k in before if after.get(k) != before[k]]
assert not changed, changed
"""


class TestImport:
    @pytest.mark.slow
    def test_nothing_in_torch_is_patched_ours(self):
        done = subprocess.run([sys.executable, "-c", SNIPPET], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
