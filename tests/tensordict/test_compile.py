"""Functions of containers under torch.compile(fullgraph=True): same results as without."""

import shutil

import pytest
import torch
from torch import nn

from raffia import LazyStackedTensorDict, TensorDict, is_tensor_collection, lazy_stack

B, T, A = 2, 3, 5


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make():
    return TensorDict(
        {"a": torch.arange(B * T * 1.0).reshape(B, T), "n": {"b": torch.arange(B) + 0.5}}, [B]
    )


def leaves(td):
    return dict(td.items(True, True))


def assert_same(result, expected):
    assert type(result) is type(expected)
    if is_tensor_collection(expected):
        assert result.batch_size == expected.batch_size
        assert result.device == expected.device
        got, want = leaves(result), leaves(expected)
        assert set(got) == set(want)
        for key, value in want.items():
            torch.testing.assert_close(got[key], value)
    elif isinstance(expected, (tuple, list)):
        for x, y in zip(result, expected, strict=True):
            assert_same(x, y)
    elif isinstance(expected, dict):
        assert set(result) == set(expected)
        for key, value in expected.items():
            assert_same(result[key], value)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(result, expected)
    else:
        assert result == expected


def check(fn, *args, backend="eager", calls=2):
    compiled = torch.compile(fn, fullgraph=True, backend=backend)
    for _ in range(calls):
        result = compiled(*[x.clone() if hasattr(x, "clone") else x for x in args])
        expected = fn(*[x.clone() if hasattr(x, "clone") else x for x in args])
        assert_same(result, expected)
    return result


def construct(x):
    return TensorDict({"x": x, "n": {"y": x + 1}}, batch_size=[B])


def update(td):
    return td.update({"a": td["a"] * 2, "n": {"c": td["n", "b"]}})


def write_index(td):
    td[0] = td[1]
    return td


def set_inplace(td):
    td.set_("a", td["a"] + 1)
    return td


def delete(td):
    del td["a"]
    return td


def pop(td):
    return td.pop("a"), td


def lock(td):
    td.lock_()
    return td.is_locked, td + 1


def unlock(td):
    td = td.lock_().unlock_()
    td["q"] = td["a"] + 1
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


def names_none(td):
    return td.names, td


FUNCTIONS = {
    "get": lambda td: td["a"] + 1,
    "get_nested": lambda td: td["n", "b"] + 1,
    "get_chain": lambda td: td["n"]["b"] + 1,
    "get_default": lambda td: td.get("zz", td["a"] * 2),
    "get_missing": lambda td: td.get("zz") is None,
    "set": lambda td: td.set("q", td["a"] + 1),
    "set_nested": lambda td: td.set(("n", "q"), td["a"] + 1),
    "set_new_level": lambda td: td.set(("x", "y", "z"), td["a"] + 1),
    "set_": set_inplace,
    "identity": lambda td: td,
    "clone": lambda td: td.clone(),
    "clone_shallow": lambda td: td.clone(False),
    "copy": lambda td: td.copy(),
    "empty": lambda td: td.empty(),
    "index_int": lambda td: td[0],
    "index_slice": lambda td: td[:1],
    "index_none": lambda td: td[None],
    "index_ellipsis": lambda td: td[..., 0],
    "index_tensor": lambda td: td[torch.tensor([1, 0, 1])],
    "index_list": lambda td: td[[1, 0]],
    "write_index": write_index,
    "stack": lambda td: torch.stack([td, td + 1], 0),
    "stack_1": lambda td: TensorDict.stack([td, td + 1], 1),
    "cat": lambda td: torch.cat([td, td], 0),
    "unbind": lambda td: td.unbind(0),
    "split": lambda td: td.split(1, 0),
    "chunk": lambda td: td.chunk(2, 0),
    "reshape": lambda td: td.reshape(1, B),
    "view": lambda td: td.view(-1, 1),
    "unsqueeze": lambda td: td.unsqueeze(-1),
    "squeeze": lambda td: td[:1].squeeze(0),
    "expand": lambda td: td.expand(4, B),
    "permute": lambda td: td.unsqueeze(0).permute(1, 0),
    "transpose": lambda td: td.unsqueeze(0).transpose(0, 1),
    "flatten": lambda td: td.unsqueeze(0).flatten(0, 1),
    "gather": lambda td: td.gather(0, torch.tensor([1, 0, 0])),
    "add": lambda td: td + 1,
    "add_td": lambda td: td + td,
    "lerp_tensor": lambda td: td.lerp(td + 1, torch.tensor(0.5)),
    "iadd": lambda td: td.add_(1),
    "neg": lambda td: -td,
    "eq": lambda td: td == 1,
    "exp": lambda td: td.exp(),
    "lerp": lambda td: td.lerp(td * 2, 0.5),
    "clamp": lambda td: td.clamp(0, 1),
    "mean": lambda td: td.mean(),
    "sum_dim": lambda td: td.sum(0),
    "sum_reduce": lambda td: td.sum(reduce=True),
    "any": lambda td: (td > 1).any(0),
    "to_dtype": lambda td: td.to(torch.float64),
    "to_device": lambda td: td.to("cpu"),
    "float": lambda td: td.double().float(),
    "detach": lambda td: td.detach(),
    "apply": lambda td: td.apply(lambda x: x + 1),
    "apply_others": lambda td: td.apply(lambda x, y: x + y, td),
    "apply_batch_size": lambda td: td.apply(lambda x: x[0], batch_size=[]),
    "named_apply": lambda td: td.named_apply(lambda k, x: x * len(k), nested_keys=True),
    "select": lambda td: td.select("a"),
    "select_nested": lambda td: td.select(("n", "b")),
    "exclude": lambda td: td.exclude("a"),
    "update": update,
    "update_td": lambda td: td.update(TensorDict({"q": td["a"]}, [B])),
    "update_": lambda td: td.update_({"a": td["a"] + 1}),
    "delete": delete,
    "pop": pop,
    "setdefault": lambda td: td.setdefault("q", td["a"]),
    "rename": lambda td: td.rename_key_("a", "z"),
    "flatten_keys": lambda td: td.flatten_keys("."),
    "unflatten_keys": lambda td: td.flatten_keys(".").unflatten_keys("."),
    "context_flatten": context_flatten,
    "to_dict": lambda td: td.to_dict(),
    "keys": lambda td: [k for k in td.keys(True, True)],
    "items": loop_over_items,
    "values": lambda td: [v + 1 for v in td.values(True, True)],
    "contains": branch_on_key,
    "batch_size": lambda td: (td.batch_size, td.shape, td.ndim, td.numel(), td.batch_dims),
    "set_batch_size": lambda td: td.clone(False).auto_batch_size_(1),
    "len": lambda td: len(td) + 1,
    "names_none": names_none,
    "zeros_like": lambda td: torch.zeros_like(td),
    "ones_like": lambda td: torch.ones_like(td),
    "where": lambda td: td.where(torch.tensor([True, False]), td + 1),
    "masked_fill": lambda td: td.masked_fill(torch.tensor([True, False]), 0.0),
    "zero_": lambda td: td.zero_(),
    "device": lambda td: td.device is None,
    "is_empty": lambda td: td.is_empty(),
    "nested_result": lambda td: {"x": td, "y": [td["a"], td["n"]]},
}


class TestFunctions:
    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_fullgraph(self, name):
        check(FUNCTIONS[name], make())

    def test_source_is_left_as_in_eager(self):
        td = make()
        torch.compile(lambda td: td.set("q", td["a"] + 1), fullgraph=True, backend="eager")(td)
        assert "q" in td.keys()
        torch.testing.assert_close(td["q"], td["a"] + 1)

    def test_in_place_write_is_seen_outside(self):
        td = make()
        held = td["a"]
        torch.compile(lambda td: td.add_(1), fullgraph=True, backend="eager")(td)
        torch.testing.assert_close(held, make()["a"] + 1)

    def test_two_containers(self):
        check(lambda x, y: x + y * 2, make(), make() + 1)

    def test_closure(self):
        held = make()
        check(lambda x: held.apply(lambda y: y * 2).set("x", x), torch.ones(B))

    @pytest.mark.parametrize(
        "fn",
        [lambda td, x: td * x, lambda td, x: x * td, lambda td, x: td < x],
        ids=["right", "left", "compare"],
    )
    def test_tensor_operand_ours(self, fn):
        check(fn, make(), torch.arange(B))

    @pytest.mark.parametrize("fn", [lock, unlock], ids=["lock", "unlock"])
    def test_locking_ours(self, fn):
        """Without a warning."""
        check(fn, make())

    def test_error_inside_comes_out(self):
        with pytest.raises(Exception, match="zz|KeyError|key"):
            torch.compile(lambda td: td["zz"], fullgraph=True, backend="eager")(make())


class TestConstruct:
    X = torch.arange(B * T * 1.0).reshape(B, T)

    @pytest.mark.parametrize(
        "fn",
        [
            construct,
            lambda x: TensorDict({"x": x}, [B]),
            lambda x: TensorDict({"x": x}, B),
            lambda x: TensorDict(x=x, n=TensorDict(y=x)),
            lambda x: TensorDict({"x": x}, [B], device="cpu"),
            lambda x: TensorDict({("n", "y"): x}, [B]),
            lambda x: TensorDict({}, [B]).set("x", x),
            lambda x: TensorDict({"x": x}, x.shape),
            lambda x: TensorDict.from_dict({"x": x, "n": {"y": x}}, batch_size=[B]),
            lambda x: TensorDict.from_dict({"x": x, "n": {"y": x}}, auto_batch_size=True),
            lambda x: TensorDict({"x": x}, [B])["x"] * 2,
        ],
        ids=[
            "nested",
            "list",
            "int",
            "keywords",
            "device",
            "tuple_key",
            "empty_then_set",
            "shape",
            "from_dict",
            "from_dict_auto",
            "and_read",
        ],
    )
    def test_fullgraph(self, fn):
        check(fn, self.X)

    def test_lock_ours(self):
        fn = torch.compile(
            lambda x: TensorDict({"x": x}, [B], lock=True), fullgraph=True, backend="eager"
        )
        assert fn(self.X).is_locked

    def test_non_tensor_entry_passes_through(self):
        td = make().set("s", "text")
        result = torch.compile(lambda td: td + 1, fullgraph=True, backend="eager")(td)
        assert result["s"] == "text"
        torch.testing.assert_close(result["a"], td["a"] + 1)

    def test_non_tensor_entry_made_inside(self):
        fn = torch.compile(
            lambda x: TensorDict({"x": x + 1, "s": "text"}, [B]), fullgraph=True, backend="eager"
        )
        result = fn(self.X)
        assert result["s"] == "text"
        torch.testing.assert_close(result["x"], self.X + 1)

    def test_names(self):
        td = TensorDict({"x": self.X}, [B, T], names=["b", "t"])
        result = torch.compile(lambda td: td + 1, fullgraph=True, backend="eager")(td)
        assert result.names == ["b", "t"]


class TestLazyStack:
    CASES = {
        "make": lambda td: lazy_stack([td, td + 1], 0),
        "get": lambda td: lazy_stack([td, td + 1], 0)["a"],
        "get_nested": lambda td: lazy_stack([td, td + 1], 1)["n", "b"],
        "add": lambda td: lazy_stack([td, td + 1], 0) + 1,
        "unbind": lambda td: lazy_stack([td, td + 1], 0).unbind(0),
        "index": lambda td: lazy_stack([td, td + 1], 0)[1],
        "apply": lambda td: lazy_stack([td, td + 1], 0).apply(lambda x: x * 2),
        "set": lambda td: lazy_stack([td.clone(), td + 1], 0).set("q", torch.ones(2, B)),
        "clone": lambda td: lazy_stack([td, td + 1], 0).clone(),
    }

    @pytest.mark.parametrize("name", CASES)
    def test_made_inside(self, name):
        check(self.CASES[name], make())

    def test_as_argument(self):
        result = check(lambda td: td * 2, lazy_stack([make(), make() + 1], 0))
        assert type(result) is LazyStackedTensorDict


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(A, T)

    def forward(self, td):
        return td.clone(False).set("out", self.linear(td["x"]).tanh())


class TestModules:
    def td(self):
        return TensorDict({"x": torch.linspace(-1, 1, 4 * A).reshape(4, A)}, [4])

    def test_container_through_a_module(self):
        check(Net(), self.td())

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_to_module(self, backend):
        net = nn.Linear(A, T)
        params = TensorDict.from_module(net).data.clone()

        def fn(params, x):
            with params.to_module(net):
                return net(x)

        before = dict(net.named_parameters())
        check(fn, params, self.td()["x"], backend=backend)
        assert all(before[k] is p for k, p in net.named_parameters())

    def test_gradients(self):
        net, td = Net(), self.td()
        torch.compile(net, fullgraph=True, backend="aot_eager")(td)["out"].sum().backward()
        got = net.linear.weight.grad.clone()
        net.zero_grad()
        net(td)["out"].sum().backward()
        torch.testing.assert_close(got, net.linear.weight.grad)

    def test_vmap_over_parameters(self):
        params = TensorDict.from_modules(*[nn.Linear(A, T) for _ in range(B)]).data
        net = nn.Linear(A, T, device="meta")

        def fn(params, x):
            def call(p, x):
                with p.to_module(net):
                    return net(x)

            return torch.vmap(call, (0, None))(params, x)

        check(fn, params, self.td()["x"])


class TestBackends:
    @pytest.mark.parametrize("name", ["add", "stack", "update", "sum_reduce", "iadd"])
    def test_aot_eager(self, name):
        check(FUNCTIONS[name], make(), backend="aot_eager", calls=1)

    @pytest.mark.slow
    @pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
    @pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own
    def test_inductor(self):
        check(lambda td: torch.stack([td.exp(), td * 2 + 1]), make(), backend="inductor", calls=1)


class Counter:
    """A backend that counts its graphs."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, gm, example_inputs):
        self.graphs += 1
        return gm.forward


class TestRecompiles:
    def test_same_structure_is_compiled_once(self):
        counter = Counter()
        fn = torch.compile(lambda td: (td + 1)["n", "b"] * 2, fullgraph=True, backend=counter)
        for i in range(4):
            fn(make() + i)
        assert counter.graphs == 1

    def test_locked_source_is_compiled_once(self):
        counter = Counter()
        fn = torch.compile(lambda td: td["a"] * 2, fullgraph=True, backend=counter)
        for i in range(3):
            fn((make() + i).lock_())
        assert counter.graphs == 1

    def test_one_graph_for_a_whole_pipeline(self):
        counter = Counter()

        def fn(td):
            td = td.clone().set("q", td["a"].sum(-1))
            td = torch.stack([td, td * 2], 1)
            return td.select("q", ("n", "b")).flatten(0, 1)

        fn = torch.compile(fn, fullgraph=True, backend=counter)
        assert fn(make()).batch_size == torch.Size([2 * B])
        assert counter.graphs == 1

    def test_batch_size_may_change(self):
        fn = torch.compile(lambda td: td + 1, fullgraph=True, backend="eager")
        for n in (2, 3, 4, 5):
            td = TensorDict({"a": torch.ones(n, A)}, [n])
            result = fn(td)
            assert result.batch_size == torch.Size([n])
            torch.testing.assert_close(result["a"], td["a"] + 1)

    def test_keys_may_change(self):
        fn = torch.compile(lambda td: td + 1, fullgraph=True, backend="eager")
        for n in range(1, 4):
            td = TensorDict({f"k{i}": torch.ones(B) for i in range(n)}, [B])
            assert len(list(fn(td).keys())) == n
