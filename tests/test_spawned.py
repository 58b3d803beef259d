"""Objects sent to a spawned process work there and are copies: changes stay in that process."""

import functools
import pickle

import pytest
import torch
from torch import nn

from raffia import TensorDict
from raffia.algorithms.efficientzero.config import EfficientZeroConfig
from raffia.algorithms.efficientzero.model import EfficientZeroModelMLP
from raffia.algorithms.efficientzero.planning import Planner
from raffia.data import (
    HashToInt,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    MCTSForest,
    QueryModule,
    ReplayBuffer,
    SliceSampler,
    SumTree,
    TensorDictMap,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from raffia.envs.env import Discrete, EnvSpec
from raffia.search import (
    KeyedSearch,
    RecurrentOutput,
    RootOutput,
    gumbel_policy,
    muzero_policy,
)
from tests.ranks import Ranks


@pytest.fixture(scope="module")
def ranks():
    found = Ranks(1)
    yield found
    found.close()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def root(self, observation, mask=None, to_play=None):
        logits = self.linear(observation)
        return RootOutput(logits, observation.sum(1), observation, mask)

    def recurrent_fn(self, embedding, action):
        zeros = torch.zeros(len(embedding))
        logits = self.linear(embedding)
        return RecurrentOutput(action.float(), zeros, logits, embedding.sum(1)), embedding + 1


def obs(*rows):
    return TensorDict(obs=torch.tensor(rows, dtype=torch.float32), batch_size=[len(rows)])


def a_map():
    found = TensorDictMap(in_keys=["obs"])
    found[obs([1, 2], [3, 4])] = TensorDict(value=torch.tensor([0.5, 0.7]), batch_size=[2])
    return found


def ask_map(found):
    return len(found), found[obs([3, 4], [1, 2])]["value"].tolist()


def change_map(found):
    found[obs([1, 2], [5, 6])] = TensorDict(value=torch.tensor([9.0, 9.0]), batch_size=[2])


def a_query():
    found = QueryModule(in_keys=["obs"], index_key="index")
    found(obs([1, 2], [3, 4]))
    return found


def ask_query(found):
    return found(obs([3, 4], [1, 2], [7, 8]), extend=False)["index"].tolist()


def change_query(found):
    found(obs([9, 9], [7, 8]))


def numbers():
    found = HashToInt()
    found(torch.tensor([5, 6]), extend=True)
    return found


def ask_numbers(found):
    return len(found), found(torch.tensor([6, 5, 7])).tolist()


def change_numbers(found):
    found(torch.tensor([7]), extend=True)


def forest():
    found = MCTSForest()
    found.extend(steps([0, 1, 2]))
    return found


def steps(path):
    observation = torch.tensor(path)
    following = TensorDict(observation=observation[1:])
    size = [len(path) - 1]
    action = torch.zeros(size, dtype=torch.int64)
    return TensorDict(observation=observation[:-1], action=action, next=following, batch_size=size)


def buffer(storage, kind=TensorDictReplayBuffer, **options):
    generator = torch.Generator().manual_seed(0)
    found = kind(storage=storage(10), batch_size=4, generator=generator, **options)
    data = TensorDict(a=torch.arange(6), t=torch.arange(6) // 3, batch_size=[6])
    found.extend(data)
    return found


def ask_buffer(found):
    return len(found), found.sample()["a"].tolist(), found[:]["a"].tolist()


def change_buffer(found):
    found.extend(TensorDict(a=torch.full((9,), 7), t=torch.zeros(9).long(), batch_size=[9]))


def sums():
    found = SumTree(4)
    found.set(torch.tensor([0, 1]), torch.tensor([2.0, 3.0]))
    return found


def ask_sums(found):
    return found.total(), found.get(torch.arange(4)).tolist()


def change_sums(found):
    found.set(torch.tensor([2]), torch.tensor([9.0]))


def planner(policy):
    torch.manual_seed(0)
    policy = functools.partial(policy, num_simulations=8)
    return KeyedSearch(Model(), policy, in_keys=["obs"], generator=torch.Generator().manual_seed(1))


def ask_planner(found):
    out = found(obs([1, 2], [3, 4]))
    return {str(key): value.tolist() for key, value in sorted(out.items(True, True), key=str)}


def change_planner(found):
    with torch.no_grad():
        found.model.linear.weight.mul_(-5)


def agent():
    torch.manual_seed(0)
    spec = EnvSpec(observation_shape=(4,), action=Discrete(2))
    return Planner(
        EfficientZeroModelMLP(4, 2, self_supervised_learning_loss=False),
        spec,
        EfficientZeroConfig(),
    )


def ask_agent(found):
    state = TensorDict(observation=torch.ones(3, 4), batch_size=[3])
    return found.plan(state, num_simulations=8, noise=False).action_weights.tolist()


CASES = {
    "map": (a_map, ask_map, change_map),
    "query": (a_query, ask_query, change_query),
    "numbers": (numbers, ask_numbers, change_numbers),
    "forest": (forest, len, lambda f: f.extend(steps([5, 6, 7, 8]))),
    "sums": (sums, ask_sums, change_sums),
    "lists": (lambda: buffer(ListStorage), ask_buffer, change_buffer),
    "tensors": (lambda: buffer(LazyTensorStorage, prefetch=2), ask_buffer, change_buffer),
    "priorities": (
        lambda: buffer(LazyTensorStorage, TensorDictPrioritizedReplayBuffer, alpha=0.6, beta=0.4),
        ask_buffer,
        change_buffer,
    ),
    "slices": (
        lambda: buffer(
            LazyTensorStorage, ReplayBuffer, sampler=SliceSampler(slice_len=2, traj_key="t")
        ),
        ask_buffer,
        change_buffer,
    ),
}


def use_and_change(rank, name, found):
    _, ask, change = CASES[name]
    result = ask(found)
    change(found)
    return result


@pytest.mark.parametrize("name", CASES)
def test_a_spawned_process_gets_a_working_copy(ranks, name):
    make, ask, change = CASES[name]
    original, changed = make(), make()
    (result,) = ranks.run(use_and_change, 1, name, original)
    assert result == ask(original)
    change(changed)
    assert result != ask(changed)


def plan_and_change(rank, found):
    return ask_planner(found), change_planner(found)


@pytest.mark.parametrize("policy", [muzero_policy, gumbel_policy])
def test_a_planner_works_in_a_spawned_process_and_shares_its_weights(ranks, policy):
    original, twin = planner(policy), planner(policy)
    ((result, _),) = ranks.run(plan_and_change, 1, original)
    assert result == ask_planner(twin)  # the generator's state is sent, too
    change_planner(twin)
    assert torch.equal(original.model.linear.weight, twin.model.linear.weight)


def plan_with_agent(rank, found):
    return ask_agent(found)


def test_an_agent_s_planner_works_in_a_spawned_process(ranks):
    original = agent()
    assert ranks.run(plan_with_agent, 1, original) == [ask_agent(original)]


def read_rows(rank, found):
    return found[:]["a"].tolist(), error_of(lambda: change_buffer(found))


def error_of(act):
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_a_buffer_on_disk_is_read_in_a_spawned_process(ranks, tmp_path):
    found = buffer(functools.partial(LazyMemmapStorage, scratch_dir=tmp_path / "rows"))
    ((rows, error),) = ranks.run(read_rows, 1, found)
    assert rows == [0, 1, 2, 3, 4, 5] and "is open for reading only" in error


def test_a_function_without_a_name_is_refused():
    found = ReplayBuffer(storage=LazyTensorStorage(10), transform=lambda batch: batch)
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError), match="lambda"):
        pickle.dumps(found)
