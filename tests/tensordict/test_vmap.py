"""torch.func transforms over containers: vmap in and out, gradients, functional modules."""

import subprocess
import sys

import pytest
import torch
from torch import nn, vmap
from torch.func import grad, grad_and_value, jacrev, jvp, vjp
from torch.testing import assert_close

from raffia import TensorClass, TensorDict, is_tensor_collection, lazy_stack
from tests.tensordict.invariants import sound
from tests.tensordict.kinds import each, leaves

B, T, A, N = 2, 3, 5, 4


def make(**options):
    a, b = torch.arange(B * T * A * 1.0).reshape(B, T, A), torch.arange(B * T * 1.0).reshape(B, T)
    return TensorDict({"a": a, "n": {"b": b}}, [B, T], **options)


def same(result, expected):
    if is_tensor_collection(expected):
        assert result.batch_size == expected.batch_size
        assert result["n"].batch_size == expected["n"].batch_size if "n" in expected else True
        result, expected = leaves(result), leaves(expected)
    if not isinstance(expected, dict):
        return assert_close(result, expected, check_stride=False)
    assert set(result) == set(expected)
    for key, value in expected.items():
        assert_close(result[key], value, check_stride=False)


def test_dims():
    """They count the batch dims: the function gets one batch dim less, on every level."""
    for in_dim, out_dim in ((0, 0), (0, 1), (1, 0), (1, 1)):
        calls = []

        def fn(td, calls=calls):
            calls.append((td.batch_size, td["n"].batch_size, td["a"].shape, td["n", "b"].shape))
            return td + 1

        result, rest = vmap(fn, in_dim, out_dim)(make()), (B, T)[1 - in_dim]
        assert calls == [((rest,), (rest,), (rest, A), (rest,))] and type(result) is TensorDict
        same(result, make() + 1 if in_dim == out_dim else (make() + 1).transpose(0, 1))
    td = TensorDict({"a": torch.arange(6.0).reshape(2, 3)}, [2, 3])
    same(vmap(lambda x: x + 1, -1)(td), (td + 1).transpose(0, 1))  # of the leaves
    for function, args, *others in [
        (lambda x: x + 1, (-1,)),  # a leaf's own
        (lambda td: td, (2,)),
        (lambda td: td, (0, 2)),
        (lambda td, y: td["a"] + y, ((1, 0),), torch.ones(B)),
        (torch.rand_like, ()),
        (lambda x: x.set("q", x["a"]), ()),  # of a locked one
    ]:
        with pytest.raises((ValueError, IndexError, RuntimeError)):
            vmap(function, *args)(make(lock=True), *others)


def test_arguments_and_results():
    result = vmap(lambda td, y: td + y, (None, 0))(make(), torch.arange(N * 1.0))
    assert result.batch_size == (N, B, T)
    for i in range(N):
        same(result[i], make() + i)
    same(vmap(lambda p, y: (p, y), (None, 0), (None, 0))(make(), torch.ones(N))[0], make())
    same(vmap(lambda x, y: x * y)(make(), make() + 1), make() * (make() + 1))
    moved = make()["a"].transpose(0, 1)
    x = torch.arange(T * 1.0)
    same(vmap(lambda td, y: td["a"] + y, (1, 0))(make(), x), moved + x[:, None, None])
    same(vmap(lambda tree: tree["k"][0] + 1)({"k": (make(),)}), make() + 1)
    tree = vmap(lambda tree, y: tree["k"]["a"] + y, ({"k": 1}, 0))({"k": make()}, x * 0)
    same(tree, moved)
    td, a = vmap(lambda td: (td, td["a"]), out_dims=(1, 0))(make())
    assert td.batch_size == (T, B)
    same(a, make()["a"])
    named = TensorDict({"a": torch.ones(B, T)}, [B, T], names=["b", "t"])
    assert vmap(lambda x: x + 1)(named).names == [None, "t"]
    assert vmap(lambda x: x + 1, out_dims=1)(named).names == ["t", None]
    same(vmap(lambda x: x + 1, chunk_size=1)(make(lock=True)), make() + 1)


class Note(TensorClass):
    text: str | None
    x: torch.Tensor | None = None


def test_nested_containers_without_tensors():
    no_entries = lazy_stack([TensorDict({}, [T])] * B)
    for node in (Note("hi", batch_size=[B, T]), no_entries, lazy_stack([no_entries] * T, 1)):
        seen = []
        td = make().set("w", node)
        result = vmap(lambda td, seen=seen: (seen.append(td.get("w").batch_size), td.clone())[1])(
            td
        )
        assert seen == [(T, *node.batch_size[2:])] and result.batch_size == (B, T)
        assert result.get("w").batch_size == node.batch_size and sound(result)


# operations within the function, and their result on the whole container
INSIDE = {
    "get": (lambda td: td["n", "b"], lambda td: td["n", "b"]),
    "clone": (lambda td: td.clone(), lambda td: td),
    "index": (lambda td: td[0], lambda td: td[:, 0]),
    "reshape": (lambda td: td.reshape(T, 1), lambda td: td.reshape(B, T, 1)),
    "stack": (lambda td: torch.stack([td, td + 1], 1), lambda td: torch.stack([td, td + 1], 2)),
    "cat": (lambda td: torch.cat([td, td], 0), lambda td: torch.cat([td, td], 1)),
    "sum": (lambda td: td.sum(0), lambda td: td.sum(1)),
    "apply": (lambda td: td.apply(lambda x: x * 2), lambda td: td * 2),
    "flatten_keys": (lambda td: td.flatten_keys("."),) * 2,
    "zeros_like": (lambda td: torch.zeros_like(td) + td, lambda td: td),
    "an unmapped value": (
        lambda td: td.set("k", torch.arange(T)),
        lambda td: td.set("k", torch.arange(T).expand(B, T)),
    ),
    "lazy": (lambda td: lazy_stack([td, td + 1], 0), lambda td: torch.stack([td, td + 1], 1)),
    "vmap": (vmap(lambda td: td + 1), lambda td: td + 1),
}


def test_inside():
    def check(row):
        td, (fn, whole) = make(), row
        same(vmap(fn)(td), whole(make()))
        assert set(td.keys()) == {"a", "n"}  # the source keeps its keys

    each(INSIDE, check)

    def fn(td, y):
        return td.set("q", td["a"].sum(-1) + y).update({"n": {"c": td["n", "b"] * y}})

    y = torch.arange(B * 1.0)
    result = vmap(fn)(make(), y)
    same(result["q"], make()["a"].sum(-1) + y[:, None])
    same(result["n", "c"], make()["n", "b"] * y[:, None])
    result = vmap(torch.rand_like, randomness="different")(make())
    assert not torch.equal(result["a"][0], result["a"][1])


def test_containers_made_inside():
    x = torch.arange(N * 1.0)
    result = vmap(lambda x: TensorDict({"q": x * 2, "z": torch.zeros(T)}))(x)
    assert type(result) is TensorDict and result.batch_size == (N,)
    same(leaves(result), {"q": 2.0 * x, "z": torch.zeros(N, T)})
    grid = torch.arange(N * T * 1.0).reshape(N, T)
    for out_dim, want in ((0, grid), (1, grid.t())):
        result = vmap(lambda x: TensorDict({"q": x, "n": {"r": x}}, [T]), out_dims=out_dim)(grid)
        assert result.batch_size == result["n"].batch_size == want.shape
        same(leaves(result), {"q": want, ("n", "r"): want})
    td = make()
    result = vmap(lambda x: td + x)(x)  # a closure
    assert result.batch_size == (N, B, T) and td.batch_size == (B, T)
    same(result[2], make() + 2)


# ------------------------------------------------------------------------------------- modules


def modules(num=B):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(A, N), nn.Tanh(), nn.Linear(N, 1)) for _ in range(num)]


EMPTY = modules(1)[0].to("meta")


def call(params, x, module=EMPTY):
    with params.to_module(module):
        return module(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own
def test_gradients():
    result = grad(lambda p: p["a"].pow(2).sum() + 3 * p["n", "b"].sum())(make())
    assert type(result) is TensorDict and result.batch_size == (B, T)
    same(leaves(result), {"a": 2 * make()["a"], ("n", "b"): torch.full((B, T), 3.0)})
    g, value = grad_and_value(lambda p: p["a"].sum())(make())
    same(value, make()["a"].sum())
    same(leaves(g), {"a": torch.ones(B, T, A), ("n", "b"): torch.zeros(B, T)})
    same(grad(lambda p: (p["a"].sum(), p * 2), has_aux=True)(make())[1], make() * 2)
    jac = jacrev(lambda p: p["x"].pow(2))(TensorDict({"x": torch.arange(3.0)}))
    same(jac["x"], torch.diag(2 * torch.arange(3.0)))
    same(jacrev(lambda x: TensorDict({"q": x * 2}))(torch.ones(3))["q"], 2 * torch.eye(3))
    out, pull = vjp(lambda p: p * 3, make())
    same(out, make() * 3)
    same(pull(make())[0], make() * 3)
    same(jvp(lambda p: p * p, (make(),), (torch.ones_like(make()),))[1], make() * 2)
    same(torch.func.functionalize(lambda p: p.clone().add_(1))(make()), make() + 1)
    module, x = modules(1)[0], torch.randn(7, A)
    params = TensorDict.from_module(module).data.clone()

    def loss(p, x):
        return call(p, x, module).pow(2).mean()

    g = grad(loss)(params, x)
    module(x).pow(2).mean().backward()
    same(g["0", "weight"], module[0].weight.grad)
    same(g["2", "bias"], module[2].bias.grad)
    result = vmap(grad(loss), (None, 0))(params, x)  # of each sample
    assert result.batch_size == (7,)
    for i in range(7):
        same(leaves(result[i]), leaves(grad(loss)(params, x[i])))


SNIPPET = """
import torch, torch._functorch.vmap as v, torch._functorch.eager_transforms as e
import torch._dynamo, torch.distributed, torch.multiprocessing  # torch wraps its own on import
import torch.nn, torch.utils._pytree as p
def snapshot():
    owners = (v, e, p, torch, torch.nn.Module, torch.Tensor, torch.func)
    return {(m.__name__, k): id(o) for m in owners for k, o in vars(m).items() if callable(o)}
before = snapshot()
import raffia
after = snapshot()
changed = [k for k in before if after.get(k) != before[k]]
assert not changed, changed
"""


@pytest.mark.slow
def test_nothing_in_torch_is_patched():
    done = subprocess.run([sys.executable, "-c", SNIPPET], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
