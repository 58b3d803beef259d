"""Target copies: against a slow loop, on modules and containers, for one member and for many."""

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


def slow(target: nn.Module, online: nn.Module, rate: float) -> dict[str, torch.Tensor]:
    """What the update should give, leaf by leaf."""
    theirs = online.state_dict()
    return {
        name: leaf.lerp(theirs[name], rate) if leaf.is_floating_point() else theirs[name].clone()
        for name, leaf in target.state_dict().items()
    }


def assert_same(state, expected):
    assert list(state) == list(expected)
    for name, leaf in state.items():
        assert torch.equal(leaf, expected[name]), name


@pytest.mark.parametrize("rate", [0.005, 0.5, 0.75, 1.0, torch.tensor(0.25)])
def test_polyak_is_bitwise_what_a_loop_over_the_leaves_gives(rate):
    target, online = net(1), net(2)
    for _ in range(2):
        online(torch.randn(7, A))
    expected = slow(target, online, float(rate))
    assert update_target(target, online, rate) is target
    assert_same(target.state_dict(), expected)
    assert target[1].num_batches_tracked == 3


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


def test_hard_update_mends_a_target_that_is_not_finite():
    target = TensorDict(w=torch.tensor([torch.nan, torch.inf]))
    assert update_target(target, TensorDict(w=torch.ones(2)))["w"].tolist() == [1, 1]


def test_rate_zero_keeps_everything():
    target, online = net(1), net(2)
    online(torch.randn(7, A))
    online[0].weight.data.fill_(torch.inf)
    expected = {name: leaf.clone() for name, leaf in target.state_dict().items()}
    update_target(target, online, 0)
    assert_same(target.state_dict(), expected)


def test_no_gradient_flows_and_gradients_stay():
    target, online = net(1), net(2)
    for module in (target, online):
        module(torch.randn(7, A)).sum().backward()
    grads = [p.grad.clone() for module in (target, online) for p in module.parameters()]
    update_target(target, online, 0.5)
    after = [p for module in (target, online) for p in module.parameters()]
    assert all(p.is_leaf and p.requires_grad for p in after)
    for before, p in zip(grads, after, strict=True):
        assert torch.equal(before, p.grad)


def holders(module):
    """One module's tensors in every form."""
    container = TensorDict.from_module(module)
    return {"module": module, "container": container, "params": TensorDictParams(container)}


@pytest.mark.parametrize("left", ["module", "container", "params"])
@pytest.mark.parametrize("right", ["module", "container", "params"])
def test_modules_and_containers_mix(left, right):
    target, online = net(1), net(2)
    expected = slow(target, online, 0.5)
    update_target(holders(target)[left], holders(online)[right], 0.5)
    assert_same(target.state_dict(), expected)


def test_buffers_that_are_in_no_state_dict_move_too():
    target, online = nn.Module(), nn.Module()
    target.register_buffer("scale", torch.zeros(2), persistent=False)
    online.register_buffer("scale", torch.ones(2), persistent=False)
    assert update_target(target, online, 0.5).scale.tolist() == [0.5, 0.5]


def test_parameters_held_in_a_module_as_a_container():
    class Holder(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.params = TensorDictParams(TensorDict(n=dict(w=torch.full((2,), value))))

    target, online = Holder(0.0), Holder(1.0)
    assert update_target(target, online, 0.25).params["n", "w"].tolist() == [0.25, 0.25]


def test_a_hook_on_reads_is_not_part_of_the_update():
    target, online = (TensorDictParams(TensorDict(w=torch.full((2,), v))) for v in (0.0, 1.0))
    for params in (target, online):
        params.register_get_post_hook(lambda params, value: value * 100)
    update_target(target, online, 0.5)
    assert [p.tolist() for p in target.parameters()] == [[0.5, 0.5]]


def test_a_locked_target_is_written_in_place():
    target = TensorDict(w=torch.zeros(2)).lock_()
    leaf = target["w"]
    update_target(target, TensorDict(w=torch.ones(2)))
    assert target["w"] is leaf and leaf.tolist() == [1, 1]


def test_tied_leaves_move_once():
    def tied(value):
        weight = nn.Parameter(torch.full((2,), value))
        return TensorDict(a=weight, n=dict(b=weight))

    target, online = tied(0.0), tied(1.0)
    update_target(target, online, 0.5)
    assert target["a"].tolist() == [0.5, 0.5]
    update_target(target.data, online.data, 0.5)  # two tensor objects over one memory
    assert target["a"].tolist() == [0.75, 0.75]


def test_a_tied_target_can_not_follow_two_tensors():
    weight = torch.zeros(2)
    target = TensorDict(a=weight, b=weight)
    online = TensorDict(a=torch.ones(2), b=torch.full((2,), 2.0))
    with pytest.raises(ValueError, match="'a' and 'b' are one tensor in the target but two"):
        update_target(target, online)
    assert weight.tolist() == [0, 0]


def test_two_target_leaves_may_follow_one_tensor():
    weight = torch.ones(2)
    target = TensorDict(a=torch.zeros(2), b=torch.zeros(2))
    update_target(target, TensorDict(a=weight, b=weight), 0.5)
    assert target["a"].tolist() == target["b"].tolist() == [0.5, 0.5]


class TestPopulation:
    @pytest.mark.parametrize("num_rates", ["one each", "one for all"])
    def test_members_move_at_their_own_rates(self, num_rates):
        targets, onlines = [net(i) for i in range(P)], [net(i + P) for i in range(P)]
        rates = [0.0, 0.25, 1.0] if num_rates == "one each" else [0.25] * P
        expected = [slow(t, o, r) for t, o, r in zip(targets, onlines, rates, strict=True)]
        expected[0]["1.num_batches_tracked"] = targets[0][1].num_batches_tracked.clone()
        target, online = from_modules(*targets), from_modules(*onlines)
        update_target(target, online, torch.tensor(rates))
        for i in range(P):
            for name, leaf in expected[i].items():
                assert torch.equal(target[tuple(name.split("."))][i], leaf), (i, name)

    def test_integers_are_copied_but_at_rate_zero(self):
        target = TensorDict(n=torch.zeros(P, dtype=torch.int64), batch_size=[P])
        online = TensorDict(n=torch.ones(P, dtype=torch.int64), batch_size=[P])
        update_target(target, online, torch.tensor([0.0, 0.1, 1.0]))
        assert target["n"].tolist() == [0, 1, 1]

    def test_a_diverged_member_is_mended_by_rate_one_and_harms_none_at_rate_zero(self):
        target = TensorDict(w=torch.tensor([[torch.nan], [1.0]]), batch_size=[2])
        online = TensorDict(w=torch.tensor([[2.0], [torch.inf]]), batch_size=[2])
        update_target(target, online, torch.tensor([1.0, 0.0]))
        assert target["w"].tolist() == [[2.0], [1.0]]

    def test_rates_of_another_dtype(self):
        target = TensorDict(w=torch.zeros(P, 2), batch_size=[P])
        rates = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
        update_target(target, TensorDict(w=torch.ones(P, 2), batch_size=[P]), rates)
        assert target["w"].dtype == torch.float32
        assert target["w"][:, 0].tolist() == [0, 0.5, 1]

    def test_entries_without_members_are_refused(self):
        target, online = net(1), net(2)
        expected = {name: leaf.clone() for name, leaf in target.state_dict().items()}
        with pytest.raises(ValueError, match=r"3 rates, .*'0.weight' has shape \[4, 5\]"):
            update_target(target, online, torch.full((P,), 0.5))
        assert_same(target.state_dict(), expected)

    def test_rates_in_a_matrix_are_refused(self):
        with pytest.raises(ValueError, match=r"got shape \[2, 2\]"):
            update_target(net(1), net(2), torch.zeros(2, 2))

    def test_lazily_stacked_members(self):
        target = lazy_stack([TensorDict(w=torch.zeros(2)) for _ in range(P)])
        online = lazy_stack([TensorDict(w=torch.full((2,), float(i))) for i in range(P)])
        update_target(target, online, 0.5)
        assert target["w"].tolist() == [[0, 0], [0.5, 0.5], [1, 1]]


def test_dtypes_and_non_tensors():
    target = TensorDict(w=torch.zeros(2, dtype=torch.float64), note="target")
    update_target(target, TensorDict(w=torch.ones(2, dtype=torch.bfloat16)), 0.5)
    assert target["w"].tolist() == [0.5, 0.5] and target["w"].dtype == torch.float64
    assert target["note"] == "target"


def test_complex_leaves():
    target = TensorDict(w=torch.zeros(2, dtype=torch.complex64))
    update_target(target, TensorDict(w=torch.full((2,), 2 + 4j)), 0.5)
    assert target["w"].tolist() == [1 + 2j, 1 + 2j]


def test_nothing_to_update():
    assert isinstance(update_target(nn.ReLU(), nn.ReLU(), 0.5), nn.ReLU)


class TestMistakes:
    @pytest.mark.parametrize("rate", [-0.1, 1.1, 5, float("nan"), torch.tensor([0.5, 2.0])])
    def test_rate_out_of_range(self, rate):
        target = TensorDict(w=torch.zeros(2))
        with pytest.raises(ValueError, match=r"must be in 0\.\.1"):
            update_target(target, TensorDict(w=torch.ones(2)), rate)
        assert target["w"].tolist() == [0, 0]

    def test_a_missing_entry_is_named_and_nothing_is_written(self):
        target = TensorDict(bias=torch.zeros(2), weight=torch.zeros(2))
        online = TensorDict(bias=torch.ones(2), wieght=torch.ones(2))
        with pytest.raises(KeyError, match="target has no entry 'wieght'.*mean \"weight\""):
            update_target(target, online)
        assert target["bias"].tolist() == [0, 0]
        with pytest.raises(KeyError, match="online has no entry 'weight'"):
            update_target(target, online.select("bias"))

    def test_shapes_that_differ_are_named_and_nothing_is_written(self):
        target = TensorDict(bias=torch.zeros(2), weight=torch.zeros(1))
        online = TensorDict(bias=torch.ones(2), weight=torch.ones(2))
        with pytest.raises(ValueError, match=r"'weight': \[1\] and \[2\]"):
            update_target(target, online)
        assert target["bias"].tolist() == [0, 0]

    def test_a_target_that_is_what_is_trained(self):
        online = net()
        for target in (online, TensorDict.from_module(online), TensorDict.from_module(online).data):
            with pytest.raises(ValueError, match="share the memory of '0.weight'.*target_copy"):
                update_target(target, online, 0.5)

    def test_an_expanded_target(self):
        target = TensorDict(w=torch.zeros(2)).expand(3)
        with pytest.raises(ValueError, match="'w' of the target is expanded"):
            update_target(target, TensorDict(w=torch.ones(3, 2), batch_size=[3]))

    def test_neither_module_nor_container(self):
        with pytest.raises(TypeError, match="target must be an nn.Module or a container, got dict"):
            update_target({"w": torch.zeros(2)}, TensorDict(w=torch.ones(2)))
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
        update_target(target, net(2))  # has memory of its own
        assert not torch.equal(target[0].weight, online[0].weight)

    def test_of_parameters(self):
        online = TensorDictParams(TensorDict(w=torch.zeros(2), n=dict(i=torch.arange(2))))
        target = target_copy(online)
        assert type(target) is TensorDictParams
        assert [p.requires_grad for p in target.parameters()] == [False]
        assert online["w"].requires_grad
        update_target(target, TensorDict(w=torch.ones(2), n=dict(i=torch.zeros(2, dtype=int))))
        assert online["w"].tolist() == [0, 0] and online["n", "i"].tolist() == [0, 1]

    def test_of_a_container(self):
        online = from_modules(net(1), net(2))
        target = target_copy(online)
        assert type(target) is TensorDict and target.batch_size == (2,)
        assert type(target["0", "weight"]) is torch.Tensor
        assert not target["0", "weight"].requires_grad
        assert (target == online).all()
        update_target(target, from_modules(net(3), net(4)))
        assert not (target == online).all()

    def test_of_an_expanded_container_can_be_updated(self):
        target = target_copy(TensorDict(w=torch.zeros(2)).expand(3))
        update_target(target, TensorDict(w=torch.ones(3, 2), batch_size=[3]))
        assert target["w"].sum() == 6

    @pytest.mark.parametrize("form", ["module", "container", "params"])
    def test_keeps_ties(self, form):
        online = nn.Module()
        online.a = online.b = nn.Parameter(torch.zeros(2))
        target = target_copy(holders(online)[form])
        container = TensorDict.from_module(target) if form == "module" else target
        assert container["a"] is container["b"]
        assert container["a"] is not online.a

    def test_buffers_that_need_a_gradient(self):
        online = nn.Module()
        online.register_buffer("scale", torch.ones(2, requires_grad=True))
        assert not target_copy(online).scale.requires_grad
        assert online.scale.requires_grad


@pytest.mark.parametrize("rate", [1.0, 0.25, torch.tensor([0.0, 0.25, 1.0])])
def test_compiles_as_one_graph(rate):
    target, online = ([net(i), net(i + 1), net(i + 2)] for i in (0, P))
    target, online = from_modules(*target).data, from_modules(*online).data
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


def test_parts_of_processes_move_where_they_are(mesh):
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
