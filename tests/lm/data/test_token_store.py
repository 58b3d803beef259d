"""Tokens in a folder: made once, memory-mapped, remade when out of date or damaged."""

import json
import os
import signal
import time

import numpy as np
import pytest

from raffia.lm.data.dialogue import (
    ConstantTokenReward,
    DataPoint,
    DialogueDataset,
    TranscriptDialogues,
    read_dialogues,
)
from raffia.lm.data.token_store import TokenStore
from raffia.tensordict.memmap import DamagedFileError

ROWS = [
    {"sequence": [["ab", -0.5], ["<g>", None], ["c", 2.25]]},
    {"sequence": [["<b>", None], ["abc", 0.75]], "terminal": False},
    {"sequence": [["<y>", None]]},
]


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "a.jsonl", ROWS)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def build(path, tokenizer, folder=None, **options):
    return DialogueDataset.build(read_dialogues(path), tokenizer, folder=folder, **options)


def names_of(folder):
    return sorted(os.listdir(folder))


def test_a_store_is_used_while_its_source_is_unchanged(tmp_path, path, tokenizer):
    folder = tmp_path / "store"
    build(path, tokenizer, folder)
    files = names_of(folder)
    os.utime(path, ns=(1, 1))  # touched or copied: the content is the same
    assert build(path, tokenizer, folder).origin == "folder"
    assert names_of(folder) == files
    text = path.read_text()
    path.write_text(text.replace("2.25", "2.75"))  # as long as before
    changed = build(path, tokenizer, folder)
    assert changed.origin == "made: the previous one was made from other rows or settings"
    assert changed[0].episode_return == 2.25 and names_of(folder) != files
    expected = list(changed)
    write(path, [*ROWS[:1], {"sequence": 3}])
    for _ in range(2):  # the skipped rows are stored
        few = build(path, tokenizer, folder, malformed="skip")
        assert len(few) == few.statistics().num_skipped == 1
        assert "line 2, 'sequence': 3 is not a list" in few.store.report.reasons[0]
    assert list(changed) == expected  # an open store outlives its replacement
    with pytest.raises(FileExistsError, match="this folder holds other files"):
        build(path, tokenizer, path.parent)


def test_another_tokenizer_or_setting_remakes_the_store(tmp_path, path, tokenizer, make_tokenizer):
    folder = tmp_path / "store"
    build(path, tokenizer, folder)
    other = make_tokenizer("zyxwvutsrqponmlkjihgfedcba")
    for options in (
        {"tokenizer": other},
        {"max_len": 20},
        {"max_len": np.int64(5), "too_long": "cut"},
        {"token_reward": ConstantTokenReward(0.5)},
        {"token_reward": ConstantTokenReward(0.25)},
        {"malformed": "skip"},
    ):
        arguments = {"tokenizer": tokenizer, **options}
        assert build(path, folder=folder, **arguments).origin.startswith("made: the previous one")
        found = build(path, folder=folder, **arguments)
        assert found.origin == "folder"
        assert "too_long" not in options or max(len(row.tokens) for row in found) == 5
    assert build(path, other, folder)[0].tokens != build(path, tokenizer)[0].tokens
    for rows, origin in ((ROWS, "made"), (ROWS, "folder"), (ROWS[:2], "made")):
        source = TranscriptDialogues(rows)  # a list is identified by its content
        found = DialogueDataset.build(source, tokenizer, folder=tmp_path / "list")
        assert found.origin.startswith(origin)


@pytest.mark.parametrize("name", ["rows", "index", "report", "manifest"])
def test_a_damaged_store_is_remade(tmp_path, path, tokenizer, name):
    folder = tmp_path / "store"
    build(path, tokenizer, folder)
    (file,) = (file for file in folder.iterdir() if file.name.startswith(name))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    if name == "manifest":  # whose folder it was is unknown
        with pytest.raises((DamagedFileError, FileExistsError, ValueError)):
            build(path, tokenizer, folder)
        return
    again = build(path, tokenizer, folder)
    assert again.origin.startswith("made: the previous one was damaged")
    assert list(again) == list(build(path, tokenizer))


def test_a_failure_leaves_the_old_store(tmp_path, path, tokenizer):
    folder = tmp_path / "store"
    before = build(path, tokenizer, folder)
    files = names_of(folder)
    write(path, [*ROWS, {"sequence": 3}])
    with pytest.raises(ValueError, match="line 4"):
        build(path, tokenizer, folder)
    assert names_of(folder) == files
    write(path, ROWS)
    assert list(build(path, tokenizer, folder)) == list(before)


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path, path, tokenizer):
    class Growing(type(read_dialogues(path))):
        def rows(self):
            yield from super().rows()
            write(path, [*ROWS, *ROWS])

    with pytest.raises(RuntimeError, match="changed while it was read"):
        DialogueDataset.build(Growing(path), tokenizer, folder=tmp_path / "s")
    assert not os.listdir(tmp_path / "s")


def test_a_killed_write_leaves_the_previous_store(tmp_path):
    folder = tmp_path / "store"
    point = DataPoint.from_tokens(list(range(9)), [1, 2], [0.5, -0.5])

    def slow():
        for _ in range(10_000):
            time.sleep(0.0005)
            yield point

    TokenStore.write(folder, [point], key={"n": 1})
    child = os.fork()
    if child == 0:
        TokenStore.write(folder, slow(), key={"n": 2})
        os._exit(0)
    time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    store = TokenStore.open(folder, lambda key: key == {"n": 1})
    assert store is not None and store.point(0) == point
    TokenStore.write(folder, [point, point], key={"n": 3})
    assert len(names_of(folder)) == 4, "files of the killed process are left"


@pytest.mark.slow
def test_many_rows(tmp_path):
    """More than one block of summaries."""
    rng, points = np.random.default_rng(0), []
    for _ in range(5000):
        length = int(rng.integers(2, 20))
        actions = sorted(rng.choice(length - 1, int(rng.integers(0, length)), replace=False))
        rewards = rng.normal(size=len(actions)).astype(np.float32).tolist()
        tokens = rng.integers(0, 70_000, length).tolist()
        points.append(DataPoint.from_tokens(tokens, [int(a) for a in actions], rewards))
    TokenStore.write(tmp_path / "s", points, key={})
    store = TokenStore.open(tmp_path / "s", lambda key: True)
    assert len(store) == 5000
    for number in range(0, 5000, 37):
        found, expected = store.point(number), points[number]
        assert (found.tokens, found.state_idxs) == (expected.tokens, expected.state_idxs)
        assert found.rewards == expected.rewards
        assert found.utterance_rewards == pytest.approx(expected.utterance_rewards, rel=1e-6)
    assert store.summary.length.tolist() == [len(point.tokens) for point in points]
