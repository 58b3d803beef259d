"""Batches: their entries and order, selected rows, statistics."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from raffia.lm.data.dialogue import (
    DataPoint,
    Dialogue,
    DialogueDataset,
    Iterable_RL_Dataset,
    List_RL_Dataset,
    ObservationDialogues,
    Vocabulary,
)
from raffia.lm.data.rl_dataset import BatchOrder


def stored(*points, **options):
    return DialogueDataset.of_points(points, Vocabulary(9), **options)


def row_of(length, reward=0.0):
    return DataPoint.from_tokens([1] * length, [0], [reward])


def rows_of(order, seed, start, num):
    return [rows.tolist() for rows in itertools.islice(order.from_update(seed, start), num)]


def test_buckets_give_few_shapes():
    points = [row_of(length) for length in range(2, 30)]
    batches = stored(*points, buckets=(8, 16, 32), sort_window=9).batches(0, 0, 2)
    shapes = {(*batch["tokens"].shape, *batch["action_idxs"].shape)
              for batch in itertools.islice(batches, 40)}  # fmt: skip
    assert shapes <= {(2, length, 2, 8) for length in (8, 16, 32)} and len(shapes) == 3
    longer = stored(row_of(40), buckets=(8,))
    assert longer.take(np.array([0]))["tokens"].shape == (1, 40)


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
    for start in (1, 2, 5, 11, 30):  # a batch follows from the seed and its number
        assert rows_of(order, 3, start, 5) == rows_of(order, 3, 0, start + 5)[start:]
    if num > 6:
        assert drawn[:num] != drawn[num : 2 * num], "all epochs are in one order"
        assert drawn[:num] != sum(rows_of(order, 4, 0, num), [])[:num]


@pytest.mark.parametrize("num", [4000, 4007])  # at 4007 all epochs but one begin within a batch
def test_rows_of_similar_length_share_batches(num):
    lengths = np.random.default_rng(0).integers(2, 200, num)

    def padding(window):
        drawn = rows_of(BatchOrder(lengths, 16, window), 0, 250, 500)
        return sum(16 * lengths[rows].max() for rows in drawn) / lengths[sum(drawn, [])].sum()

    assert padding(1) > 1.7 and padding(50) < 1.05
    order = BatchOrder(np.arange(1000), 10, 100)  # and not in order of length
    means = [np.mean(rows) for rows in rows_of(order, 0, 0, 100)]
    assert abs(np.corrcoef(means, np.arange(100))[0, 1]) < 0.3


def test_statistics_and_the_rows_with_the_highest_returns(cases):
    points = []
    for row in cases["exact_rows"]:
        point = DataPoint.from_tokens(
            row["tokens"], row["action_idxs"], row["rewards"], end_of_action=3
        )
        points += [point] * row["count"]
    data = DialogueDataset.of_points(points, Vocabulary(24))
    found = data.statistics()
    assert (found.num_rows, found.num_finished, found.num_cut, found.longest) == (80, 80, 0, 12)
    assert found.num_tokens == sum(len(point.tokens) for point in points)
    assert found.num_actions == sum(len(point.action_idxs) for point in points)
    assert found.num_utterances == 2 * 64 + 16
    returns = sorted((point.episode_return for point in points), reverse=True)
    assert found.mean_return == pytest.approx(np.mean(returns))
    assert found.return_quantiles[0.5] == pytest.approx(np.median(returns))
    assert (found.return_quantiles[0.0], found.return_quantiles[1.0]) == (-1.0, 3.0)
    assert "80 (80 finished, 0 cut, 0 left out)" in str(found)
    for fraction in (0.05, 0.25, 1.0):
        best, num = data.best(fraction), round(80 * fraction)
        assert sorted((p.episode_return for p in best), reverse=True) == returns[:num]
        assert sorted(next(best.batches(0, 0, num))["index"].tolist()) == best.rows.tolist()
    assert len(data.best(0.001)) == 1 and len(data.best(0.5).best(0.5)) == 20


class Rows(List_RL_Dataset):
    def __init__(self, points, **options):
        super().__init__(SimpleNamespace(num_tokens=9, pad_token_id=8), **options)
        self.points = points

    def size(self):
        return len(self.points)

    def get_item(self, index):
        return self.points[index]


def test_a_custom_list_dataset():
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
    drawn = Drawn(Vocabulary(9, pad_token_id=8))
    first = list(itertools.islice(drawn.batches(0, 0, 5), 4))
    assert torch.equal(next(drawn.batches(0, 3, 5))["tokens"], first[3]["tokens"])
    assert first[0]["attn_mask"].sum(1).tolist() != first[1]["attn_mask"].sum(1).tolist()
    assert first[0]["index"].tolist() == [0, 1, 2, 3, 4]


class Drawn(Iterable_RL_Dataset):
    def sample_item(self, generator):
        return row_of(int(torch.randint(2, 9, (), generator=generator)))


def test_custom_rows_are_checked():
    wrong = DataPoint.from_tokens([1, 9], [], [])
    below = DataPoint.from_tokens([-1], [], [])
    for call, message in (
        (lambda: Rows([]).collate([wrong]), "token 1 of the row is 9, but the vocabulary has 9"),
        (lambda: Rows([], max_len=4).collate([row_of(5)]), r"row 0 has 5 tok.*point.cut\(4\)"),
        (lambda: stored(row_of(2), below), "row 1: token 0 of the row is -1"),
        (
            lambda: stored(row_of(5), max_len=4),
            "row 0 has 5 tokens, more than the 4 of the context",
        ),
        (lambda: next(Rows([]).batches(0, 0, 2)), r"Rows has no rows: size\(\) is 0"),
        (lambda: Rows([]).collate([]), "a batch must have at least one row; got none"),
        (lambda: next(Rows([row_of(2)]).batches(0, 0, 0)), "batch_size=0 must be at least 1"),
        (lambda: stored(buckets=(8, 4)), r"buckets=\(8, 4\) must be increasing lengths"),
        (lambda: stored(buckets=(8, 32), max_len=16), "is longer than max_len=16, which no row is"),
        (lambda: stored(row_of(2)).best(10), r"fraction=10 must be .* at most 1; best\(0.1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


ROLES = ("pad", "bos", "eos", "boa", "eoa", "eod")
COMPLETE = {"num_tokens": 134, "encode": lambda text: list(text.encode("ascii"))}


COMPLETE |= {f"{role}_token_id": 128 + at for at, role in enumerate(ROLES)}


COMPLETE |= {"save": lambda folder: None}


def test_the_error_for_a_missing_special_token_names_the_fix(tmp_path):
    def build(folder=None, **changes):
        entries = {
            name: value for name, value in {**COMPLETE, **changes}.items() if value != "none"
        }
        source = ObservationDialogues([Dialogue([("A", None), ("B", 1.0)])])
        return DialogueDataset.build(source, SimpleNamespace(**entries), folder=folder)

    assert build(tmp_path / "store")[0].tokens == [129, 65, 130, 66, 132, 133]
    refused = [
        ("eoa_token_id", 134, r"eoa_token_id is 134, .* num_tokens=134"),
        ("eoa_token_id", -1, r"eoa_token_id is -1, .* num_tokens=134"),
        ("num_tokens", None, r"no num_tokens.*the largest token id plus one"),
        ("num_tokens", 0, r"no num_tokens.*the largest token id plus one"),
    ]
    for role in ROLES:
        lacks = f"tokenizer has no {role}_token_id, the id of the token that (begins|ends|pads)"
        for value in ("none", None, "</s>", 1.5, True):  # as in tokenizers of transformers
            refused.append(
                (f"{role}_token_id", value, lacks + r".*HFTokenizer\(.*add_missing=True")
            )
    for name, value, message in refused:
        with pytest.raises(ValueError, match=message):
            build(**{name: value})
