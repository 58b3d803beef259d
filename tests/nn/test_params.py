"""Target copies: against a simple loop, on modules and containers, for one member and for many."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from raffia import TensorDict, from_modules, lazy_stack
from raffia.nn import TensorDictParams
from raffia.nn.params import target_copy, update_target

P, A = 3, 5  # members of a population, size of a layer


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    out = nn.Sequential(nn.Linear(A, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    out(torch.randn(7, A))  # moves the running statistics
    return out


def expected_update(target: nn.Module, online: nn.Module, rate: float) -> dict[str, torch.Tensor]:
    """The expected result of the update, leaf by leaf."""
    theirs = online.state_dict()
    return {
        name: leaf.lerp(theirs[name], rate) if leaf.is_floating_point() else theirs[name].clone()
        for name, leaf in target.state_dict().items()
    }


def assert_same(state, expected):
    assert list(state) == list(expected)
    for name, leaf in state.items():
        assert torch.equal(leaf, expected[name]), name


def test_polyak_worked_by_hand_in_double():
    target = TensorDict(w=torch.tensor([0.0, 8.0], dtype=torch.float64))
    online = TensorDict(w=torch.tensor([4.0, 0.0], dtype=torch.float64))
    update_target(target, online, 0.25)
    update_target(target, online, 0.25)
    assert target["w"].tolist() == [4 * (1 - 0.75**2), 8 * 0.75**2]


def test_default_is_the_hard_update():
    target, online = net(1), net(2)
    update_target(target, online)
    assert_same(target.state_dict(), online.state_dict())
    target = TensorDict(w=torch.tensor([torch.nan, torch.inf])).lock_()  # both are replaced
    leaf = target["w"]
    update_target(target, TensorDict(w=torch.ones(2)))
    assert target["w"] is leaf and leaf.tolist() == [1, 1]


def holders(module):
    """One module's tensors in every form."""
    container = TensorDict.from_module(module)
    return {"module": module, "container": container, "params": TensorDictParams(container)}


def test_tied_leaves_move_once():
    def tied(value):
        weight = nn.Parameter(torch.full((2,), value))
        return TensorDict(a=weight, n=dict(b=weight))

    target, online = tied(0.0), tied(1.0)
    update_target(target, online, 0.5)
    assert target["a"].tolist() == [0.5, 0.5]
    update_target(target.data, online.data, 0.5)  # two tensor objects over one memory
    assert target["a"].tolist() == [0.75, 0.75]
    two = TensorDict(a=torch.ones(2), n=dict(b=torch.full((2,), 2.0)))
    with pytest.raises(ValueError, match="'a' and .* are one tensor in the target but two"):
        update_target(target, two)
    assert target["a"].tolist() == [0.75, 0.75]
    target = TensorDict(a=torch.zeros(2), n=dict(b=torch.zeros(2)))
    update_target(target, online.data, 0.5)  # two may follow one
    assert target["a"].tolist() == target["n", "b"].tolist() == [0.5, 0.5]


def members(*values, **options):
    return TensorDict(w=torch.tensor(values, **options), batch_size=[len(values)])


def test_members_of_a_population():
    target, online = members([torch.nan], [1.0]), members([2.0], [torch.inf])
    update_target(target, online, torch.tensor([1.0, 0.0]))  # heals one and harms none
    assert target["w"].tolist() == [[2.0], [1.0]]
    target, rates = members(0, 0, 0), torch.tensor([0.0, 0.1, 1.0])
    update_target(target, members(1, 1, 1), rates)  # integers are copied but at rate 0
    assert target["w"].tolist() == [0, 1, 1]
    target = members([0.0] * 2, [0.0] * 2)
    rates = torch.tensor([0.5, 1.0], dtype=torch.float64)
    update_target(target, members([1.0] * 2, [1.0] * 2), rates)
    assert target["w"].dtype == torch.float32 and target["w"][:, 0].tolist() == [0.5, 1]
    target = lazy_stack([TensorDict(w=torch.zeros(2)) for _ in range(P)])
    online = lazy_stack([TensorDict(w=torch.full((2,), float(i))) for i in range(P)])
    update_target(target, online, 0.5)
    assert target["w"].tolist() == [[0, 0], [0.5, 0.5], [1, 1]]


@pytest.mark.parametrize("rates", [[0.0, 0.25, 1.0], [0.25] * P])
def test_members_may_have_different_rates(rates):
    targets, onlines = [net(i) for i in range(P)], [net(i + P) for i in range(P)]
    expected = [expected_update(t, o, r) for t, o, r in zip(targets, onlines, rates, strict=True)]
    if not rates[0]:
        expected[0]["1.num_batches_tracked"] = targets[0][1].num_batches_tracked.clone()
    target, online = from_modules(*targets), from_modules(*onlines)
    update_target(target, online, torch.tensor(rates))
    for i in range(P):
        for name, leaf in expected[i].items():
            assert torch.equal(target[tuple(name.split("."))][i], leaf), (i, name)


def test_other_leaves():
    target = TensorDict(w=torch.zeros(2, dtype=torch.float64), note="target")
    update_target(target, TensorDict(w=torch.ones(2, dtype=torch.bfloat16)), 0.5)
    assert target["w"].tolist() == [0.5, 0.5] and target["w"].dtype == torch.float64
    assert target["note"] == "target"
    target = TensorDict(w=torch.zeros(2, dtype=torch.complex64))
    update_target(target, TensorDict(w=torch.full((2,), 2 + 4j)), 0.5)
    assert target["w"].tolist() == [1 + 2j, 1 + 2j]
    assert isinstance(update_target(nn.ReLU(), nn.ReLU(), 0.5), nn.ReLU)
    target, online = nn.Module(), nn.Module()  # a buffer that is in no state dict
    target.register_buffer("scale", torch.zeros(2), persistent=False)
    online.register_buffer("scale", torch.ones(2), persistent=False)
    assert update_target(target, online, 0.5).scale.tolist() == [0.5, 0.5]
    target, online = (TensorDictParams(TensorDict(w=torch.full((2,), v))) for v in (0.0, 1.0))
    for params in (target, online):  # a hook on reads is not part of the update
        params.register_get_post_hook(lambda params, value: value * 100)
    update_target(target, online, 0.5)
    assert [p.tolist() for p in target.parameters()] == [[0.5, 0.5]]


ONLINE = net(3)


ONE, TWO = torch.zeros(1), torch.zeros(2)
MISTAKES = [  # a target, the online network, a rate, the error and part of its message
    *(
        (TensorDict(w=TWO), TensorDict(w=TWO), rate, ValueError, r"in 0\.\.1")
        for rate in (-0.1, 1.1, float("nan"), torch.tensor([0.5, 2.0]))
    ),
    (TensorDict(b=TWO, w=TWO), TensorDict(b=TWO + 1), 1.0, KeyError, "online has no entry 'w'"),
    (
        *(TensorDict(b=TWO, w=ONE), TensorDict(b=TWO + 1, w=TWO)),
        *(1.0, ValueError, r"'w': \[1\] and \[2\]"),
    ),
    (
        *(TensorDict(w=TWO).expand(3), TensorDict(w=torch.ones(3, 2), batch_size=[3])),
        *(1.0, ValueError, "'w' of the target is expanded"),
    ),
    ({"w": TWO}, TensorDict(w=TWO), 1.0, TypeError, "target must be an nn.Mo"),
    (net(1), ONLINE, torch.full((P,), 0.5), ValueError, r"3 rates, .*'0.weight' has shape \[4, 5"),
    (net(1), ONLINE, torch.zeros(2, 2), ValueError, r"got shape \[2, 2\]"),
]


@pytest.mark.parametrize("row", range(len(MISTAKES)))
def test_errors_name_the_problem_and_nothing_is_written(row):
    target, online, rate, error, match = MISTAKES[row]
    before = copy.deepcopy(target)
    with pytest.raises(error, match=match):
        update_target(target, online, rate)
    if isinstance(target, nn.Module):
        assert_same(target.state_dict(), before.state_dict())
    elif isinstance(target, TensorDict):
        assert (target == before).all()
    with pytest.raises(TypeError, match="online must be an nn.Module or a container, got dict"):
        target_copy({"w": torch.zeros(2)})


class TestTargetCopy:
    def test_of_a_module(self):
        online = net().eval()
        online(torch.randn(7, A)).sum().backward()
        target = target_copy(online)
        assert isinstance(target, nn.Sequential) and not target.training
        assert_same(target.state_dict(), online.state_dict())
        assert not any(p.requires_grad or p.grad is not None for p in target.parameters())
        assert all(p.requires_grad and p.grad is not None for p in online.parameters())
        update_target(target, net(2))  # has separate memory
        assert not torch.equal(target[0].weight, online[0].weight)
        online = nn.Module()
        online.register_buffer("scale", torch.ones(2, requires_grad=True))
        assert not target_copy(online).scale.requires_grad and online.scale.requires_grad

    def test_of_containers(self):
        online = TensorDictParams(TensorDict(w=torch.zeros(2), n=dict(i=torch.arange(2))))
        target = target_copy(online)
        assert type(target) is TensorDictParams
        assert [p.requires_grad for p in target.parameters()] == [False]
        update_target(target, TensorDict(w=torch.ones(2), n=dict(i=torch.zeros(2, dtype=int))))
        assert online["w"].tolist() == [0, 0] and online["n", "i"].tolist() == [0, 1]
        online = from_modules(net(1), net(2))
        target = target_copy(online)
        assert type(target) is TensorDict and target.batch_size == (2,)
        assert type(target["0", "weight"]) is torch.Tensor and (target == online).all()
        update_target(target, from_modules(net(3), net(4)))
        assert not (target == online).all()
        target = target_copy(TensorDict(w=torch.zeros(2)).expand(3))  # an expanded one
        update_target(target, TensorDict(w=torch.ones(3, 2), batch_size=[3]))
        assert target["w"].sum() == 6

    @pytest.mark.parametrize("form", ["module", "container", "params"])
    def test_keeps_ties(self, form):
        online = nn.Module()
        online.a = online.b = nn.Parameter(torch.zeros(2))
        target = target_copy(holders(online)[form])
        container = TensorDict.from_module(target) if form == "module" else target
        assert container["a"] is container["b"] and container["a"] is not online.a


@pytest.mark.parametrize("rate", [1.0, torch.tensor([0.0, 0.25, 1.0])])
def test_compiles_as_one_graph(rate):
    target, online = (from_modules(*map(net, range(i, i + P))).data for i in (0, P))
    expected = update_target(target.clone(), online, rate)
    step = torch.compile(update_target, fullgraph=True, backend="eager")
    step(target, online, rate)
    assert (target == expected).all()


@pytest.fixture
def mesh(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_sharded_parameters_are_updated_in_their_process(mesh):
    online = TensorDict(
        w=distribute_tensor(torch.full((4,), 8.0), mesh, [Shard(0)]), b=torch.ones(1)
    )
    target = TensorDict(w=distribute_tensor(torch.zeros(4), mesh, [Shard(0)]), b=torch.zeros(1))
    assert update_target(target, online, 0.25) is target
    assert target["w"].placements == (Shard(0),)
    assert target["w"].to_local().tolist() == [2.0] * 4 and target["b"].tolist() == [0.25]
    update_target(target, online)
    assert target["w"].to_local().tolist() == [8.0] * 4
    with pytest.raises(ValueError, match="share the memory of 'w'"):
        update_target(TensorDict(w=online["w"], b=torch.ones(1)), online)
    whole = TensorDict(w=distribute_tensor(torch.zeros(4), mesh, [Replicate()]), b=torch.ones(1))
    with pytest.raises(ValueError, match="'w' is placed as .*Replicate"):
        update_target(whole, online)
    with pytest.raises(TypeError, match="entry 'w' is a DTensor.*full_tensor"):
        online.save("nowhere.safetensors")


@pytest.mark.parametrize("rate", [0.005, 0.5, 1.0, torch.tensor(0.25)])
def test_polyak_equals_a_loop_over_the_leaves_bit_for_bit(rate):
    target, online = net(1), net(2)
    for _ in range(2):
        online(torch.randn(7, A))
    for module in (target, online):
        module(torch.randn(7, A)).sum().backward()
    grads = [p.grad.clone() for module in (target, online) for p in module.parameters()]
    expected = expected_update(target, online, float(rate))
    assert update_target(target, online, rate) is target
    assert_same(target.state_dict(), expected)
    assert target[1].num_batches_tracked == 4
    after = [p for module in (target, online) for p in module.parameters()]
    assert all(p.is_leaf and p.requires_grad for p in after)
    assert all(torch.equal(before, p.grad) for before, p in zip(grads, after, strict=True))
