"""Functions and keyed modules as CUDA graphs; without a GPU a twin simulates the recording."""

import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.utils._pytree import tree_leaves

from raffia import TensorDict
from raffia.nn import (
    CudaGraphModule,
    ProbabilisticTensorDictModule,
    TensorDictModule,
    TensorDictSequential,
    cudagraphs,
    set_interaction_type,
)

B, A = 2, 3


class Twin:
    """Stands for a GPU's streams: a replay runs the function again into the recorded output."""

    def __init__(self):
        self.log = []

    def warm(self, run):
        self.log.append("warm")
        return run()

    def record(self, run):
        self.log.append("record")
        output = run()

        def replay():
            self.log.append("replay")
            for mine, new in zip(tree_leaves(output), tree_leaves(run()), strict=True):
                if mine is not new:
                    mine.copy_(new)

        return output, replay

    def holds(self, tensor):
        return tensor.device.type == "cpu"


def plain(module, **options):
    """The plain version, as without a GPU."""
    if torch.cuda.is_available():
        return CudaGraphModule(module, **options)
    with pytest.warns(UserWarning, match="no GPU"):
        return CudaGraphModule(module, **options)


def graphed(module, **options):
    graph = plain(module, **options)
    graph._card = Twin()
    return graph


def plus(source="x", dest="y", n=1):
    return TensorDictModule(lambda x: x + n, [source], [dest])


def test_a_function_without_a_gpu_is_called():
    graph = plain(lambda x, k=1: {"y": x + k})
    if torch.cuda.is_available():
        graph._card = None
    for k in range(4):
        assert graph(torch.zeros(A), k=k)["y"].tolist() == [k] * A
    assert graph.counter == 0 and graph.in_keys is None and graph.out_keys is None
    with pytest.raises(RuntimeError, match="require"):
        graph(torch.zeros(A, requires_grad=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is available")
def test_a_keyed_module_without_a_gpu_is_called():
    graph = plain(plus())
    td = TensorDict(x=torch.zeros(A))
    assert graph(td) is td and td["y"].tolist() == [1] * A
    assert graph(x=torch.ones(1)).item() == graph(torch.ones(1)).item() == 2
    out = graph(td, tensordict_out=TensorDict())
    assert list(out.keys()) == ["y"]
    assert graph.in_keys == ["x"] and graph.out_keys == ["y"]
    with pytest.raises(RuntimeError, match="require"):
        graph(TensorDict(x=torch.zeros(A, requires_grad=True)))


@pytest.mark.parametrize("warmup", [0, 1.5, "2"])
def test_warmup_is_a_count(warmup):
    with pytest.raises(ValueError, match="warmup"):
        CudaGraphModule(plus(), warmup=warmup)


def test_keys_of_the_module_go_first():
    with pytest.warns(UserWarning) as caught:
        graph = CudaGraphModule(plus(), in_keys=["q"])
    assert any("ignores in_keys" in str(warning.message) for warning in caught)
    assert graph.in_keys == ["x"] and plain(plus(), in_keys=["x"]).out_keys == ["y"]
    assert plain(lambda td: td, in_keys=["x"]).out_keys == []


@pytest.mark.parametrize("warmup", [1, 4])
def test_calls_of_a_function(warmup):
    graph = graphed(lambda x, pair: (x + pair[0], x * pair[1]), warmup=warmup)
    results = []
    for i in range(6):
        x = torch.full((A,), float(i))
        results.append((i, graph(x, (x, torch.tensor(10.0)))))
    for i, (total, product) in results:  # outputs are copies: later calls don't change them
        assert total.tolist() == [2.0 * i] * A and product.tolist() == [10.0 * i] * A
    replays = ["replay"] * (6 - warmup + 1)
    assert graph._card.log == ["warm"] * (warmup - 1) + ["record", *replays]


def test_new_forms_of_arguments_of_a_function():
    graph = graphed(lambda x, k, options: x + k, warmup=1)
    x = torch.zeros(A)
    graph(x, 1, {"a": x})
    for bad in [(x[:2], 1, {"a": x}), (x, 2, {"a": x}), (x, x, {"a": x}), (x, 1, {"b": x})]:
        with pytest.raises(ValueError, match="recorded with|only tensors"):
            graph(*bad)
    with pytest.raises(RuntimeError, match="require"):
        graph(x.clone().requires_grad_(), 1, {"a": x})
    assert graph(x + 3, 1, {"a": x}).tolist() == [4] * A
    inside = graphed(lambda x: x.add_(1) * 1, warmup=1)
    for x in (torch.zeros(A), torch.zeros(A)):
        inside(x)
    assert x.tolist() == [0] * A  # writes to an input stay inside the graph
    weight = torch.ones(A, requires_grad=True)
    with pytest.raises(RuntimeError):
        graphed(lambda x: x * weight, warmup=1)(torch.ones(A))


def test_calls_of_a_keyed_module():
    graph = graphed(TensorDictSequential(plus("x", ("n", "y")), plus(("n", "y"), "x")))
    for i in range(5):
        td = TensorDict(x=torch.full((B, A), float(i)), other=torch.ones(B), batch_size=[B])
        assert graph(td) is td
        assert (td["n", "y"] == i + 1).all() and (td["x"] == i + 2).all() and td["other"].all()
    assert graph._card.log == ["warm", "record", *["replay"] * 4]
    out = TensorDict(batch_size=[B])
    assert graph(TensorDict(x=torch.zeros(B, A), batch_size=[B]), tensordict_out=out) is out
    assert (out["x"] == 2).all() and "other" not in out
    y, x = graphed(TensorDictSequential(plus("x", "y"), plus("y", "x")), warmup=1)(torch.ones(A))
    assert (y == 2).all() and (x == 3).all()


def test_new_forms_of_containers():
    def td(*shape, key="x", **options):
        return TensorDict({key: torch.zeros(B, *shape)}, **options)

    graph, known = graphed(plus(), warmup=1), td(A, batch_size=[B])
    graph(known.copy())
    for args, kwargs, error, match in (
        ([td(A)], {}, ValueError, "batch_size"),
        ([td(A + 1, batch_size=[B])], {}, ValueError, "shape"),
        ([td(A, key="z", batch_size=[B])], {}, KeyError, "'x'"),
        ([known, torch.ones(1)], {}, ValueError, "entries of the container"),
        ([known], {"more": 1}, ValueError, "recorded with"),
    ):
        with pytest.raises(error, match=match):
            graph(*args, **kwargs)


def test_a_function_of_containers_that_makes_a_new_one():
    graph = graphed(lambda td: TensorDict(z=td["x"] * 2), in_keys=["x"], out_keys=["z"], warmup=1)
    first = graph(TensorDict(x=torch.ones(A)))
    second = graph(TensorDict(x=torch.full((A,), 4.0)))
    assert (first["z"] == 2).all() and (second["z"] == 8).all() and "x" not in second
    assert graph(x=torch.ones(A)).tolist() == [2] * A


def test_a_change_of_the_interaction_type_warns():
    draw = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["a"], distribution_class=Normal, default_interaction_type="random"
    )
    graph = graphed(TensorDictSequential(draw), warmup=1)
    td = TensorDict(loc=torch.zeros(A), scale=torch.ones(A))
    graph(td.copy())
    graph(td.copy())
    with set_interaction_type("mean"), pytest.warns(UserWarning, match="interaction type"):
        graph(td.copy())


def test_state_and_repr():
    net = nn.Linear(A, 1)
    graph = plain(net, warmup=3)
    assert not isinstance(graph, nn.Module) and not hasattr(graph, "weight")
    graph.load_state_dict({"weight": torch.zeros(1, A), "bias": torch.ones(1)})
    assert graph.state_dict()["bias"].item() == net.bias.item() == 1
    assert plain(torch.relu).state_dict() == {}
    text = "module=Linear(in_features=3, out_features=1, bias=True),\n    warmup=3,"
    assert text in repr(graph)


@pytest.mark.gpu
def test_a_graph_on_a_gpu_computes_what_the_function_does():
    net = nn.Sequential(nn.Linear(A, 4), nn.Tanh(), nn.Linear(4, 1)).cuda()
    optimizer = torch.optim.Adam(net.parameters(), 0.01, capturable=True)

    def step(x):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    train = CudaGraphModule(step, warmup=4)
    x = torch.randn(8, A, device="cuda")
    losses = [train(x).item() for _ in range(50)]
    assert losses[-1] < losses[0] and len(set(losses[10:])) == 40
    keyed = CudaGraphModule(TensorDictModule(lambda x: x * 2, ["x"], ["y"]))
    for i in range(5):
        td = TensorDict(x=torch.full((8, A), float(i), device="cuda"), batch_size=[8])
        assert (keyed(td)["y"] == 2 * i).all()
    with pytest.raises(ValueError, match="GPU"):
        CudaGraphModule(lambda x: x, warmup=1)(torch.ones(1))


def test_the_twin_equals_a_graph_on_a_gpu():
    names = {name for name in vars(cudagraphs.Card) if not name.startswith("_")}
    assert names == {name for name in vars(Twin) if not name.startswith("_")}
