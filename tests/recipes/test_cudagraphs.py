"""Gradients and networks as CUDA graphs; without a GPU, a twin records and replays."""

import copy
import json
from contextlib import closing
from functools import partial

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raffia.algorithms.efficientzero import EfficientZeroLearner, fold, inference, stacked
from raffia.algorithms.efficientzero.inference import RowGraphs, room_for
from raffia.algorithms.efficientzero.stacked import StackedModel
from raffia.algorithms.ilql.learner import ILQLLearner
from raffia.envs import Discrete, EnvSpec, make_env
from raffia.learner import applies_shards, applies_stacks
from raffia.nn import cudagraphs
from raffia.recipes.devices import NUM_WARM, CompiledLearner, GraphedLearner
from raffia.recipes.efficientzero.actors import process_config
from raffia.recipes.efficientzero.experiment import EfficientZeroExperiment
from raffia.recipes.efficientzero.workers import make_learner as make_efficientzero
from raffia.recipes.ilql.experiment import make_learner as make_ilql
from raffia.train.config import to_json
from tests.algorithms.efficientzero.test_learner import batch_of
from tests.marks import slow_among
from tests.nn.test_cudagraphs import Twin
from tests.recipes.ilql_settings import WORDLE
from tests.recipes.runs import Quiet
from tests.recipes.test_settings import BASES, IMAGE, VECTOR, with_all

LINE = EnvSpec(observation_shape=(4,), action=Discrete(2))
PAIR = dict(device="cuda", env__num_envs=4, population__size=2)
FRAMES = EnvSpec(observation_shape=(4, 10, 10), action=Discrete(3))


@pytest.fixture
def twins(monkeypatch):
    """Twins in place of GPUs, in order of their creation."""
    made = []

    def twin(_):
        made.append(Twin())
        return made[-1]

    for module in (inference, cudagraphs):
        monkeypatch.setattr(module, "Card", twin)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return made


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The device: a GPU, or the CPU with a twin in place of a GPU."""
    if request.param == "cpu":
        request.getfixturevalue("twins")
    return request.param


def make_learner():
    """A learner of stacked images, and its config."""
    config = with_all(IMAGE, env__frame_stack=2)
    return EfficientZeroLearner(FRAMES, config, num_updates=10, frame_stack=2), config


def test_recorded_gradients_are_those_of_each_batch_and_state(device):
    learner, config = make_learner()
    sizes = {"num_unrolled": config.loss.unroll_steps, "num_frames": config.env.frame_stack}
    state = learner.init(0).to(device)
    graph = GraphedLearner(learner, learner.read_by_grads)
    results = []
    for seed in range(NUM_WARM + 4):
        batch = batch_of(6, FRAMES, seed, **sizes).to(device)
        expected_result, result = (each.grads(state, batch) for each in (learner, graph))
        results.append((expected_result, result, result[0].clone(), result[1].clone()))
        keys = sorted(state.keys(), reverse=True)  # another order, as in a loaded state
        state = graph.apply(state.clone(), expected_result[0]).select(*keys)
    for expected_result, result, *copies in results:
        for expected, found, copied in zip(expected_result, result, copies, strict=True):
            for key, value in expected.items(True, True):
                torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-4)
                assert torch.equal(found[key], copied[key])  # later replays do not write there


def test_rows_use_the_smallest_graph_with_room(device):
    added = torch.tensor(1.0, device=device)
    graphs = RowGraphs(lambda x, y: (x + added, y.sum(-1)))
    for num in (5, 3, 6, 5, 17):
        x, y = torch.rand(num, device=device), torch.rand(num, 2, 3, device=device)
        first, second = graphs(x, y)
        assert torch.equal(first, x + added) and torch.equal(second, y.sum(-1))
        added += 1  # captured tensors are read again
    assert graphs.sizes == [3, 6, 24]
    sizes = [room_for(num) for num in range(1, 400)]
    assert all(num <= size <= 1.5 * num for num, size in zip(range(1, 400), sizes, strict=True))
    assert len(set(sizes)) == 18


def assert_same_step(found, expected, embedding, action):
    pairs = [networks.recurrent_fn(embedding, action) for networks in (found, expected)]
    for x, y in zip(*([*outputs, after] for outputs, after in pairs), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)


def test_networks_as_graphs_equal_those_without(device):
    """Also with other weights, loaded in place; and in a copy."""
    learner, _ = make_learner()
    model = learner.make_model(0).to(device)
    plain, graphed = fold(model), fold(model, cudagraphs=True)
    for seed in range(3):
        other = learner.make_model(seed).to(device)
        for folded in (plain, graphed):
            folded.refresh(other)
        for num in (5, 2, 6):
            observation = torch.rand(num, 8, 10, 10, device=device)
            action = torch.arange(num, device=device) % 3
            embedding = plain.root(observation).embedding
            for each in (graphed, copy.deepcopy(graphed)):
                assert_same_step(each, plain, embedding, action)
    assert graphed.recurrent_fn.graphs.sizes == [2, 6]


def test_networks_of_members_as_graphs_equal_those_without(device):
    """Of any numbers of rows for each member; with other weights, too, and in a copy."""
    learner = EfficientZeroLearner(LINE, VECTOR, num_updates=10)
    plain, graphed = (
        StackedModel(learner.make_model(0).to(device), 3, "vmap", cudagraphs=cudagraphs)
        for cudagraphs in (False, True)
    )
    for seed in range(2):
        states = torch.stack([learner.init(3 * seed + i) for i in range(3)]).to(device)
        for each in (plain, graphed):
            each.load(states)
        for member in ([0, 0, 1, 1, 2, 2], [2, 0, 2, 2, 1], [1]):
            observation = torch.rand(len(member), 4, device=device)
            action = torch.arange(len(member), device=device) % 2
            root = plain.root(observation, member=torch.tensor(member))
            for each in (graphed, copy.deepcopy(graphed)):
                assert_same_step(each, plain, root.embedding, action)
    assert graphed._models.graphs.sizes == [1, 2, 3]


@pytest.mark.parametrize("base", ["stack", "members"])
def test_the_setting_records_searches_and_gradients(base, tmp_path, twins, monkeypatch):
    """One graph for gradients, and graphs for searches."""
    config = with_all(BASES[base], device="cuda", cudagraphs=True)
    object.__setattr__(config, "device", "cpu")
    if base == "members":  # as on a GPU
        monkeypatch.setattr(stacked, "StackedModel", partial(StackedModel, how="vmap"))
    run = EfficientZeroExperiment(config, tmp_path, Quiet(), make_env, None)
    with closing(run):
        state = run.init()
        num = NUM_WARM + 2
        for _ in range(num):
            state, _ = run.step(state)
        logs = [card.log for card in twins]
        logs.remove(["warm"] * NUM_WARM + ["record", "replay", "replay"])  # of the gradients
        replays = sum(log.count("replay") for log in logs)
        acting = run.actor.num_simulations // (config.env.num_envs * config.population.size)
        assert len(logs) == 2 and replays > acting > 0


def test_processes_that_share_batches_make_the_same_kind_of_learner(monkeypatch):
    """`MAKE_LEARNER` is what another process calls."""
    monkeypatch.setattr(torch, "compile", lambda function: function)
    for kinds, changes in (
        ([GraphedLearner], dict(cudagraphs=True)),
        ([CompiledLearner, CompiledLearner], dict(compile=True)),
        ([EfficientZeroLearner, ILQLLearner], {}),
    ):
        run = with_all(VECTOR, device="cuda", learners__num=2, **changes)
        made = [make_efficientzero(process_config(run), 0)]
        if "cudagraphs" not in changes:
            settings = with_all(WORDLE, learners__num=2, **changes)
            made.append(make_ilql(json.dumps({"run": to_json(settings), "folder": ""}), 0))
        assert [type(one) for one in made] == kinds
    assert applies_shards(made[1]) and applies_shards(CompiledLearner(made[1]))
    assert applies_stacks(GraphedLearner(made[0], [])) and not applies_shards(made[0])


class CopiesFromCPU(TorchDispatchMode):
    """Records operations that copy from the CPU to another device."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sources, results = (
            {leaf.device.type for leaf in tree_leaves(tree) if torch.is_tensor(leaf)}
            for tree in ((args, kwargs), out)
        )
        if "cpu" in sources and "meta" in results:
            self.found.add(str(func))
        return out


class MadeFromNumbers(TorchFunctionMode):
    """Records tensors on other devices that are made from Python numbers."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and not torch.is_tensor(args[0]):
            self.found |= {func.__name__} if out.is_meta else set()
        return out


@pytest.mark.parametrize(
    "base", slow_among(["vector", "stack", "fixed", "board"], "stack", "fixed")
)
def test_gradients_copy_nothing_from_the_cpu(base, tmp_path):
    """A CUDA graph can't record such copies."""
    run = EfficientZeroExperiment(BASES[base], tmp_path, Quiet(), make_env, None)
    with closing(run):
        state = run.init()
        batch = run.next_batch(state)
        state, batch = state.to("meta"), batch.to("meta")
        with CopiesFromCPU() as copies, MadeFromNumbers() as created:
            run.learner.grads(state, batch)
            assert not copies.found and not created.found
            torch.zeros(2).to("meta")
            torch.tensor([1.0, 2.0], device="meta")
        assert copies.found and created.found  # both modes record such operations


def test_settings_without_graphs_are_refused(request):
    for changes, message in (
        (dict(), "device=cpu: set device=cuda"),
        (dict(device="cuda", compile=True), "compile=True: "),
        (PAIR | dict(population__workers=2), "population.workers=2: "),
        (PAIR | dict(population__ranges=("batch_size=2..4",)), "a range of batch_size: "),
        (dict(device="cuda", model__evolvable_heads=True), "evolvable_heads=True: "),
    ):
        with pytest.raises(ValueError, match=message):
            with_all(VECTOR, **changes, cudagraphs=True)
    config = with_all(VECTOR, device="cuda", cudagraphs=True)
    assert not config.on("cpu").cudagraphs and config.on("").cudagraphs and config.on("cuda:1")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch sees none on this machine"):
            RowGraphs(lambda x: (x,))
    request.getfixturevalue("twins")
    with pytest.raises(ValueError, match="these rows are on meta"):
        RowGraphs(lambda x: (x,))(torch.zeros(2, device="meta"))
