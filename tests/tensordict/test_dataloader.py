"""Containers in a `torch.utils.data.DataLoader`: as the data set and as its items."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from raffia import LazyStackedTensorDict, TensorClass, TensorDict, lazy_stack

N, D = 5, 2


class Step(TensorClass):
    obs: torch.Tensor
    tag: str = "start"


class Rows(Dataset):
    """One container for each row, in a dict with its number."""

    def __init__(self, td):
        self.td = td

    def __len__(self):
        return len(self.td)

    def __getitem__(self, i):
        return {"row": self.td[i], "i": i}


def make():
    entries = {"obs": torch.arange(N * D).reshape(N, D), "next": {"reward": torch.arange(N)}}
    return TensorDict(entries, [N])


def make_step():
    return Step(obs=make()["obs"], batch_size=[N])


def make_lazy():
    return lazy_stack(list(make()))


@pytest.mark.parametrize("dataset", [make, make_step, make_lazy])
def test_a_container_is_a_data_set(dataset):
    td = dataset()
    batches = list(DataLoader(td, batch_size=3))
    assert [batch.batch_size for batch in batches] == [(3,), (N - 3,)]
    assert all(type(batch) is type(td) for batch in batches)
    assert torch.equal(torch.cat([batch.get("obs") for batch in batches]), td.get("obs"))


def test_a_batch_is_read_with_one_index():
    (batch,) = DataLoader(make(), batch_size=N, collate_fn=lambda rows: rows)
    assert type(batch) is TensorDict
    assert batch.batch_size == (N,)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_containers_are_items(num_workers):
    td = make()
    batches = list(DataLoader(Rows(td), batch_size=3, num_workers=num_workers))
    assert [batch["row"].batch_size for batch in batches] == [(3,), (N - 3,)]
    rows = torch.cat([batch["row"] for batch in batches])
    assert (rows == td).all()
    assert batches[1]["i"].tolist() == [3, 4]


def test_default_collate_of_a_tensorclass():
    batch = default_collate([make_step()[0], make_step()[1]])
    assert type(batch) is Step
    assert batch.obs.tolist() == [[0, 1], [2, 3]]


def test_items_of_different_shapes_are_stacked_lazily():
    batch = default_collate([TensorDict(obs=torch.ones(n)) for n in (2, 3)])
    assert type(batch) is LazyStackedTensorDict
    assert batch[1]["obs"].shape == (3,)
