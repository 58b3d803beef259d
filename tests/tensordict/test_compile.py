"""Functions of containers under torch.compile(fullgraph=True): same results as without."""

import shutil

import pytest
import torch
from torch import nn

from raffia import TensorDict, assert_close, lazy_stack
from tests.marks import slow_among
from tests.tensordict.stored import content

B, T, A = 2, 3, 5


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def make():
    entries = {"a": torch.arange(B * T * 1.0).reshape(B, T), "n": {"b": torch.arange(B) + 0.5}}
    return TensorDict(entries, [B])


def compiled(fn, backend="eager"):
    return torch.compile(fn, fullgraph=True, backend=backend)


def check(fn, *args, backend="eager"):
    """Compiled, called twice, the function gives the same as plainly."""
    for _ in range(2):
        got, want = [
            f(*[x.clone() if hasattr(x, "clone") else x for x in args])
            for f in (compiled(fn, backend), fn)
        ]
        assert content(got) == content(want)


def write_index(td):
    td[0] = td[1]
    return td


def delete(td):
    del td["a"]
    return td


def loop_over_items(td):
    total = torch.zeros(())
    for _, value in td.items(True, True):
        total = total + value.sum()
    return total


def branch_on_key(td):
    return td["a"] if "zz" not in td.keys() and ("n", "b") in td.keys(True) else td["n", "b"]


def context_flatten(td):
    with td.flatten_keys(".") as flat:
        flat["q"] = flat["n.b"] + 1
    return td


def lazy(td):
    return lazy_stack([td.clone(), td + 1], 0)


FUNCTIONS = {
    "get": lambda td: (td["a"] + 1, td["n", "b"] + 1, td["n"]["b"] + 1),
    "set": lambda td: td.set("q", td["a"] + 1).set(("n", "q"), td["a"] + 1),
    "set_new_level": lambda td: td.set(("x", "y", "z"), td["a"] + 1),
    "set_": lambda td: td.set_("a", td["a"] + 1),
    "identity": lambda td: td,
    "copies": lambda td: (td.clone(), td.clone(False), td.copy(), td.empty()),
    "index": lambda td: (td[0], td[:1], td[None], td[..., 0]),
    "index_by_tensors": lambda td: (td[torch.tensor([1, 0, 1])], td[[1, 0]]),
    "write_index": write_index,
    "stack": lambda td: (torch.stack([td, td + 1], 0), TensorDict.stack([td, td + 1], 1)),
    "cat": lambda td: torch.cat([td, td], 0),
    "parts": lambda td: (td.unbind(0), td.split(1, 0), td.chunk(2, 0)),
    "reshape": lambda td: (td.reshape(1, B), td.view(-1, 1), td.expand(4, B)),
    "permute": lambda td: (td.unsqueeze(0).permute(1, 0), td.unsqueeze(0).transpose(0, 1)),
    "arithmetic": lambda td: (td + 1, td + td, -td, td == 1, td.exp(), td.clamp(0, 1)),
    "iadd": lambda td: td.add_(1),
    "reductions": lambda td: (td.mean(), td.sum(0), (td > 1).any(0)),
    "sum_reduce": lambda td: td.sum(reduce=True),
    "to": lambda td: (td.to(torch.float64), td.to("cpu").device, td.double().float(), td.detach()),
    "apply": lambda td: (td.apply(lambda x: x + 1), td.apply(lambda x, y: x + y, td)),
    "apply_batch_size": lambda td: td.apply(lambda x: x[0], batch_size=[]),
    "select": lambda td: (td.select("a"), td.select(("n", "b")), td.exclude("a")),
    "update": lambda td: td.update({"a": td["a"] * 2, "n": {"c": td["n", "b"]}}),
    "update_": lambda td: td.update_({"a": td["a"] + 1}),
    "delete": delete,
    "flatten_keys": lambda td: (td.flatten_keys("."), td.flatten_keys(".").unflatten_keys(".")),
    "context_flatten": context_flatten,
    "to_dict": lambda td: td.to_dict(),
    "keys": lambda td: ([k for k in td.keys(True, True)], [v + 1 for v in td.values(True, True)]),
    "items": loop_over_items,
    "contains": branch_on_key,
    "sizes": lambda td: (td.batch_size, td.shape, td.ndim, td.numel(), td.batch_dims, len(td) + 1),
    "metadata": lambda td: (td.names, td.device is None, td.is_empty(), td),
    "where": lambda td: td.where(torch.tensor([True, False]), td + 1),
    "zero_": lambda td: td.zero_(),
    "lock": lambda td: (td.lock_().is_locked, td + 1),
    "unlock": lambda td: td.lock_().unlock_().set("q", td["a"] + 1),
    "lazy": lambda td: (lazy(td), lazy(td) + 1, lazy(td).unbind(0), lazy(td)[1]),
    "lazy entries": lambda td: (lazy(td)["a"], lazy(td)["n", "b"], lazy(td).clone()),
    "lazy set": lambda td: lazy(td).set("q", torch.ones(2, B)),
}
OF_A_TENSOR = {
    "nested": lambda x: TensorDict({"x": x, "n": {"y": x + 1}}, batch_size=[B]),
    "keywords": lambda x: TensorDict(x=x, n=TensorDict(y=x)),
    "device": lambda x: TensorDict({"x": x}, [B], device="cpu").device,
    "then set": lambda x: TensorDict({}, [B]).set("x", x),
    "from_dict": lambda x: TensorDict.from_dict({"x": x, "n": {"y": x}}, batch_size=[B]),
    "auto": lambda x: TensorDict.from_dict({"x": x, "n": {"y": x}}, auto_batch_size=True),
    "operand": lambda x: (make() * x[:, 0], x[:, 0] * make(), make() < x[:, 0]),
}


SLOW = "reshape unlock parts permute to where index_by_tensors lock copies write_index cat "
SLOW += "flatten_keys context_flatten"
LAZY = ("lazy", "lazy entries")


@pytest.mark.parametrize("name", slow_among(FUNCTIONS, *SLOW.split(), *LAZY))
def test_functions(name):
    check(FUNCTIONS[name], make())


@pytest.mark.parametrize("name", slow_among(OF_A_TENSOR, "operand"))
def test_functions_of_a_tensor(name):
    check(OF_A_TENSOR[name], make()["a"])


def test_several_arguments_closures_and_stacks():
    check(lambda x, y: x + y * 2, make(), make() + 1)
    outer = make()
    check(lambda x: outer.apply(lambda y: y * 2).set("x", x), torch.ones(B))
    check(lambda td: td * 2, lazy(make()))


def test_changes_are_visible_outside():
    td = make()
    before = td["a"]
    compiled(lambda td: td.set("q", td["a"] + 1))(td)
    torch.testing.assert_close(td["q"], td["a"] + 1)
    compiled(lambda td: td.add_(1))(td)
    torch.testing.assert_close(before, make()["a"] + 1)
    with pytest.raises(Exception, match="zz|KeyError|key"):
        compiled(lambda td: td["zz"])(make())
    td = TensorDict({"a": td["a"], "s": "text"}, [B], names=["b"])
    result = compiled(lambda td: td + 1)(td)
    assert result["s"] == "text" and result.names == ["b"]
    result = compiled(lambda x: TensorDict({"x": x + 1, "s": "text"}, [B]))(td["a"])
    assert result["s"] == "text"
    torch.testing.assert_close(result["x"], td["a"] + 1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(A, T)

    def forward(self, td):
        return td.clone(False).set("out", self.linear(td["x"]).tanh())


def test_modules():
    td, net = TensorDict({"x": torch.linspace(-1, 1, 4 * A).reshape(4, A)}, [4]), Net()
    check(net, td)
    grads = []
    for module in (compiled(net, "aot_eager"), net):
        net.zero_grad()
        module(td)["out"].sum().backward()
        grads.append(net.linear.weight.grad.clone())
    torch.testing.assert_close(*grads)
    layer = net.linear
    params, before = TensorDict.from_module(layer).data.clone(), dict(layer.named_parameters())

    def call(params, x, layer=layer):
        with params.to_module(layer):
            return layer(x)

    for backend in ("eager", "aot_eager"):
        check(call, params, td["x"], backend=backend)
    assert all(before[name] is p for name, p in layer.named_parameters())
    stacked = TensorDict.from_modules(*[nn.Linear(A, T) for _ in range(B)]).data
    meta = nn.Linear(A, T, device="meta")
    check(lambda p, x: torch.vmap(lambda p, x: call(p, x, meta), (0, None))(p, x), stacked, td["x"])


@pytest.mark.parametrize(
    "name",
    slow_among(["arithmetic", "stack", "update", "sum_reduce", "iadd"], "arithmetic", "stack"),
)
def test_aot_eager(name):
    check(FUNCTIONS[name], make(), backend="aot_eager")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own
def test_inductor():
    def fn(td):
        return torch.stack([td.exp(), td * 2 + 1])

    assert_close(compiled(fn, "inductor")(make()), fn(make()))


def pipeline(td):
    td = td.clone().set("q", td["a"].sum(-1))
    return torch.stack([td, td * 2], 1).select("q", ("n", "b")).flatten(0, 1)


@pytest.mark.parametrize("prepare", [lambda td: td, lambda td: td.lock_()], ids=["free", "locked"])
@pytest.mark.parametrize("fn", [lambda td: (td + 1)["n", "b"] * 2, pipeline])
def test_one_structure_is_compiled_once(fn, prepare):
    graphs = []

    def count(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    fn = compiled(fn, count)
    for i in range(4):
        result = fn(prepare(make() + i))
    assert len(graphs) == 1 and len(result) in (B, 2 * B)


def test_sizes_and_keys_may_change():
    fn = compiled(lambda td: td + 1)
    for n in (2, 3, 4, 5):
        td = TensorDict({"a": torch.ones(n, A)}, [n])
        assert content(fn(td)) == content(td + 1)
    for n in range(1, 4):
        td = TensorDict({f"k{i}": torch.ones(B) for i in range(n)}, [B])
        assert len(list(fn(td).keys())) == n
