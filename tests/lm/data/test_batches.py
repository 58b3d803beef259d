"""Batches: what they hold, in which order they come, which rows are left, what is counted."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from raffia.lm.data.data_point import Decisions
from raffia.lm.data.dialogue import (
    DataPoint,
    Dialogue,
    DialogueDataset,
    Iterable_RL_Dataset,
    List_RL_Dataset,
    ObservationDialogues,
    Vocabulary,
)
from raffia.lm.data.dialogue_batches import BatchOrder

A = Dialogue([("ab", -0.5), ("<g>", None), ("c", 2.0)])
B = Dialogue([("<g><b>", None), ("c", 0.25)], terminal=False)
C = Dialogue([("<y>", None)], terminal=False)  # no action at all


def row_of(length, reward=0.0):
    return DataPoint.from_tokens([1] * length, [0], [reward])


def rows_of(order, seed, start, num):
    return [rows.tolist() for rows in itertools.islice(order.from_update(seed, start), num)]


def test_a_batch_by_hand(tokenizer):
    data = DialogueDataset.build(ObservationDialogues([A, B, C]), tokenizer)
    batch = data.take(np.array([0, 1, 2]))
    P, a, s = 29, 30, 31  # pad, </a>, </s>
    assert batch["tokens"].tolist() == [
        [33, 0, 1, a, 26, s, 2, a, 34],
        [32, 26, 27, s, 2, a, P, P, P],
        [32, 28, s, P, P, P, P, P, P],
    ]
    assert batch["attn_mask"].sum(1).tolist() == [9, 6, 3]
    assert batch["action_idxs"].tolist() == [[0, 1, 2, 5, 6], [3, 4, 0, 0, 0], [0] * 5]
    assert batch["state_idxs"].tolist() == [
        [0, 1, 2, 5, 6, 8],
        [3, 4, 5, 0, 0, 0],
        [2, 0, 0, 0, 0, 0],
    ]
    assert batch["rewards"].tolist() == [[0, 0, -0.5, 0, 2], [0, 0.25, 0, 0, 0], [0] * 5]
    f, t = False, True
    assert batch["terminals"].tolist() == [[f, f, f, f, f, t], [f, f, f, t, t, t], [f, *[t] * 5]]
    assert batch["action_mask"].tolist() == [[t] * 5, [t, t, f, f, f], [f] * 5]
    assert batch["index"].tolist() == [0, 1, 2]
    kinds = {name: batch[name].dtype for name in batch.keys()}
    assert kinds == {
        "tokens": torch.int64,
        "attn_mask": torch.bool,
        "action_idxs": torch.int64,
        "state_idxs": torch.int64,
        "rewards": torch.float32,
        "terminals": torch.bool,
        "action_mask": torch.bool,
        "index": torch.int64,
    }
    assert batch.batch_size == (3,)


def test_per_utterance_is_honoured(tokenizer):
    """A peer took no notice of per_token."""
    data = DialogueDataset.build(ObservationDialogues([A, B, C]), tokenizer)
    batch = data.take(np.array([0, 1, 2]), per_token=False)
    assert batch["action_idxs"].tolist() == [[3, 7], [5, 0], [0, 0]]
    assert batch["state_idxs"].tolist() == [[0, 5, 8], [3, 5, 0], [2, 0, 0]]
    assert batch["rewards"].tolist() == [[-0.5, 2.0], [0.25, 0.0], [0.0, 0.0]]
    f, t = False, True
    assert batch["terminals"].tolist() == [[f, f, t], [f, f, t], [f, t, t]]
    assert batch["action_mask"].tolist() == [[t, t], [t, f], [f, f]]
    assert next(data.batches(0, 0, 3, per_token=False))["rewards"].shape == (3, 2)


def decisions(row, prefix):
    *states, last = row[f"{prefix}state_idxs"]
    return Decisions(
        row.get(f"{prefix}action_idxs", []), states, row.get(f"{prefix}rewards", []), last
    )


@pytest.mark.parametrize("name", ["A", "B"])
@pytest.mark.parametrize("prefix", ["", "u_"])
def test_the_batches_of_the_numeric_cases(cases, tokenizer, name, prefix):
    rows = [row for row in cases["batches"][name] if prefix + "rewards" in row]
    points = [
        DataPoint(
            row["tokens"],
            decisions(row, ""),
            decisions({"u_state_idxs": [0], **row}, "u_"),
            terminal=bool(row["terminals"][-1]),
            episode_return=0.0,
        )
        for row in rows
    ]
    data = DialogueDataset.of_points([], Vocabulary(35, pad_token_id=29))
    batch = data.collate(points, per_token=not prefix)
    for at, row in enumerate(rows):
        num = len(row[prefix + "rewards"])
        length = len(row["tokens"])
        assert batch["tokens"][at].tolist() == row["tokens"] + [29] * (
            batch["tokens"].shape[1] - length
        )
        for entry, count, filler in [
            ("action_idxs", num, 0),
            ("state_idxs", num + 1, 0),
            ("rewards", num, 0.0),
            ("terminals", num + 1, 1),
        ]:
            found = batch[entry][at].tolist()
            assert found[:count] == pytest.approx(row[prefix + entry])
            assert set(found[count:]) <= {filler}
        assert batch["action_mask"][at].sum() == num
        assert batch["attn_mask"][at].tolist() == [
            place < length for place in range(batch["tokens"].shape[1])
        ]


def test_a_batch_without_actions_has_one_empty_place(tokenizer):
    batch = DialogueDataset.build(ObservationDialogues([C]), tokenizer).take(np.array([0]))
    assert batch["action_idxs"].shape == (1, 1) and batch["state_idxs"].shape == (1, 2)
    assert not batch["action_mask"].any()


def test_buckets_give_few_shapes():
    points = [row_of(length) for length in range(2, 30)]
    data = DialogueDataset.of_points(points, Vocabulary(9), buckets=(8, 16, 32), sort_window=9)
    shapes = {
        (tuple(batch["tokens"].shape), tuple(batch["action_idxs"].shape))
        for batch in itertools.islice(data.batches(0, 0, 2), 40)
    }
    assert shapes <= {((2, length), (2, 8)) for length in (8, 16, 32)} and len(shapes) == 3
    longer = DialogueDataset.of_points([row_of(40)], Vocabulary(9), buckets=(8,))
    assert longer.take(np.array([0]))["tokens"].shape == (1, 40)
    with pytest.raises(ValueError, match=r"buckets=\(8, 4\): give rising lengths"):
        DialogueDataset.of_points(points, Vocabulary(9), buckets=(8, 4))
    with pytest.raises(ValueError, match="is longer than max_len=16, the model's context"):
        DialogueDataset.of_points([], Vocabulary(9), buckets=(8, 32), max_len=16)


@pytest.mark.parametrize(
    ("num", "size", "window"),
    [(7, 3, 2), (12, 4, 1), (12, 4, 50), (5, 8, 3), (1, 3, 1), (100, 7, 3), (6, 6, 2)],
)
def test_each_epoch_has_each_row_once(num, size, window):
    order = BatchOrder(np.arange(num)[::-1] % 5, size, window)
    num_batches = 4 * num
    drawn = sum(rows_of(order, 3, 0, num_batches), [])
    assert all(len(rows) == size for rows in rows_of(order, 3, 0, 3))
    for epoch in range(4 * size):
        assert sorted(drawn[epoch * num : (epoch + 1) * num]) == list(range(num))
    if num > 6:
        assert drawn[:num] != drawn[num : 2 * num], "all epochs are in one order"
        assert drawn[:num] != sum(rows_of(order, 4, 0, num), [])[:num]


@pytest.mark.parametrize("start", [1, 2, 5, 11, 30])
def test_a_batch_follows_from_the_seed_and_its_number(start):
    for num, size in [(7, 3), (5, 8), (50, 4)]:
        order = BatchOrder(np.arange(num) % 3, size, 4)
        assert rows_of(order, 1, 0, start + 5)[start:] == rows_of(order, 1, start, 5)


@pytest.mark.parametrize("num", [4000, 4007])  # at 4007 all epochs but one begin within a batch
def test_rows_of_similar_length_meet(num):
    lengths = np.random.default_rng(0).integers(2, 200, num)

    def padding(window):
        drawn = rows_of(BatchOrder(lengths, 16, window), 0, 250, 500)
        return sum(16 * lengths[rows].max() for rows in drawn) / lengths[sum(drawn, [])].sum()

    assert padding(1) > 1.7 and padding(50) < 1.05


def test_sorted_batches_do_not_come_in_order_of_length():
    lengths = np.arange(1000)
    order = BatchOrder(lengths, 10, 100)
    means = [lengths[rows].mean() for rows in rows_of(order, 0, 0, 100)]
    assert abs(np.corrcoef(means, np.arange(100))[0, 1]) < 0.3


def test_the_loop_goes_on_at_the_number_of_its_update():
    data = DialogueDataset.of_points([row_of(n, float(n)) for n in range(2, 12)], Vocabulary(9))

    def draw(update, num):
        return [
            batch["index"].tolist() for batch in itertools.islice(data.batches(5, update, 4), num)
        ]

    assert draw(0, 12)[7:] == draw(7, 5)


def test_best_takes_the_fraction_with_the_highest_returns(cases):
    points = []
    for row in cases["exact_rows"]:
        point = DataPoint.from_tokens(row["tokens"], row["action_idxs"], row["rewards"])
        points += [point] * row["count"]
    data = DialogueDataset.of_points(points, Vocabulary(24))
    returns = sorted((point.episode_return for point in points), reverse=True)
    for share in (0.05, 0.1, 0.25, 0.5, 1.0):
        best = data.best(share)
        num = round(80 * share)
        assert sorted((p.episode_return for p in best), reverse=True) == returns[:num]
        batch = next(best.batches(0, 0, num))
        assert sorted(batch["index"].tolist()) == best.rows.tolist()
    assert len(data.best(0.001)) == 1 and len(data.best(0.5).best(0.5)) == 20
    with pytest.raises(ValueError, match=r"fraction=10 lies above 0 and is at most 1: best\(0.1\)"):
        data.best(10)


def test_statistics(cases):
    points = []
    for row in cases["exact_rows"]:
        point = DataPoint.from_tokens(
            row["tokens"], row["action_idxs"], row["rewards"], end_of_action=3
        )
        points += [point] * row["count"]
    found = DialogueDataset.of_points(points, Vocabulary(24)).statistics()
    assert (found.num_rows, found.num_finished, found.num_cut, found.longest) == (80, 80, 0, 12)
    assert found.num_tokens == sum(len(point.tokens) for point in points)
    assert found.num_actions == sum(len(point.action_idxs) for point in points)
    assert found.num_utterances == 2 * 64 + 16
    returns = [point.episode_return for point in points]
    assert found.mean_return == pytest.approx(np.mean(returns))
    assert found.return_quantiles[0.5] == pytest.approx(np.median(returns))
    assert (found.return_quantiles[0.0], found.return_quantiles[1.0]) == (-1.0, 3.0)
    assert "80 (80 finished, 0 cut, 0 left out)" in str(found)


class Rows(List_RL_Dataset):
    def __init__(self, points, **options):
        super().__init__(SimpleNamespace(num_tokens=9, pad_token_id=8), **options)
        self.points = points

    def size(self):
        return len(self.points)

    def get_item(self, index):
        return self.points[index]


def test_a_list_of_ones_own():
    data = Rows([row_of(length, float(length)) for length in (2, 3, 4)])
    first = list(itertools.islice(data.batches(0, 0, 2), 3))
    assert sorted(torch.cat([batch["index"] for batch in first]).tolist()) == [0, 0, 1, 1, 2, 2]
    for batch in first:
        assert (batch["rewards"][:, 0] == batch["index"] + 2).all()
    later = next(data.batches(0, 2, 2))
    assert torch.equal(later["tokens"], first[2]["tokens"])
    assert [len(point.tokens) for point in data] == [2, 3, 4] and len(data) == 3
    with pytest.raises(IndexError, match="row 3 of 3"):
        data[3]


def test_rows_of_ones_own_are_checked():
    with pytest.raises(ValueError, match="token 1 of the row is 9, and the vocabulary has 9"):
        Rows([]).collate([DataPoint.from_tokens([1, 9], [], [])])
    with pytest.raises(ValueError, match=r"row 0 has 5 tokens, .* point.cut\(4\)"):
        Rows([], max_len=4).collate([row_of(5)])
    with pytest.raises(ValueError, match="row 1: token 0 of the row is -1"):
        DialogueDataset.of_points([row_of(2), DataPoint.from_tokens([-1], [], [])], Vocabulary(9))
    with pytest.raises(ValueError, match="row 0 has 5 tokens, more than the 4 of the context"):
        DialogueDataset.of_points([row_of(5)], Vocabulary(9), max_len=4)
    with pytest.raises(ValueError, match=r"Rows has no rows: size\(\) is 0"):
        next(Rows([]).batches(0, 0, 2))
    with pytest.raises(ValueError, match="a batch has at least one row, got none"):
        Rows([]).collate([])
    with pytest.raises(ValueError, match="batch_size=0, start_update=0: a batch has at least one"):
        next(Rows([row_of(2)]).batches(0, 0, 0))


def test_a_stream_of_ones_own():
    class Drawn(Iterable_RL_Dataset):
        def sample_item(self, generator):
            return row_of(int(torch.randint(2, 9, (), generator=generator)))

    data = Drawn(Vocabulary(9, pad_token_id=8))
    first = list(itertools.islice(data.batches(0, 0, 5), 4))
    assert torch.equal(next(data.batches(0, 3, 5))["tokens"], first[3]["tokens"])
    assert first[0]["attn_mask"].sum(1).tolist() != first[1]["attn_mask"].sum(1).tolist()
    assert first[0]["index"].tolist() == [0, 1, 2, 3, 4]


def test_rewards_as_numpy_gives_them(tokenizer):
    point = DataPoint.from_obs(Dialogue([("a", np.float32(-0.5))]), tokenizer)
    assert point.utterance_rewards == [-0.5] and type(point.rewards[1]) is float
