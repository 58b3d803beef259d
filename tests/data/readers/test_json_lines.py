"""Episodes as JSON lines: forms of lines, errors, and writing."""

import functools
import gzip
import json
import os
import tracemalloc

import numpy as np
import pytest
import torch

from raffia.data.readers import MalformedDataError, read_json_lines, write_json_lines
from raffia.tensordict.tensordict import TensorDict

EPISODE = {
    "obs": [[0.5, 1], [2, 3], [4, 5]],
    "action": [1, 0],
    "reward": [0, 1],
    "terminated": [False, True],
    "truncated": [False, False],
}
STEPS = [
    {
        "episode": episode,
        "obs": [0.5, t],
        "action": t,
        "reward": 1,
        "terminated": False,
        "truncated": t == 1,
        "next": {"obs": [1.5, t]},
    }
    for episode in ("a", 7)
    for t in range(2)
]


def write(folder, lines):
    path = folder / "data.jsonl"
    texts = [n if isinstance(n, bytes) else json.dumps(n).encode() + b"\n" for n in lines]
    path.write_bytes(b"".join(texts))
    return path


def error(path, **options):
    with pytest.raises(MalformedDataError) as caught:
        list(read_json_lines(path, **options))
    return caught.value


def second(line, where, why):
    """A file whose second line is no object."""
    return [EPISODE, line], f"line 2{where}", why


def entry(name, value, where, why):
    """A file with an episode that has an invalid column."""
    return [EPISODE | {name: value}, EPISODE], f"line 1, {where}", why


def step(line, change, where, why):
    """A file of steps, in whose line an entry is changed or missing."""
    changed = {k: v for k, v in (STEPS[line] | change).items() if v is not None}
    return [*STEPS[:line], changed, *STEPS[line + 1 :]], where, why


def zipped(change):
    """A compressed file whose bytes are changed."""
    return [change(gzip.compress(json.dumps(EPISODE).encode() + b"\n"))], "line", "damaged"


NO_REWARD = "it must be a list of numbers if each line is an episode, or a number"
DEEP = functools.reduce(lambda x, _: [x], range(40), 1.0)
NESTED = "nested more than 32 levels deep"
REFUSED = [
    second(b'{"obs": [1, 2,, 3]}\n', ", character 15", "it is not JSON: Expecting value"),
    second(b'{"obs": [1, 2', ", character 14", "does not end, so the file may have been cut"),
    second(b'{"obs": "\xc3', ", byte 10", "it is not UTF-8; the line does not end"),
    second(b'{"obs": "\xff"}\n', ", byte 10", "it is not UTF-8"),
    second(b"\n", "", "it is blank"),
    second(b"[1, 2]\n", "", 'it is a list, but must be an object: {"obs": ...}'),
    second(b'{"obs": 1, "obs": 2}\n', "", "the key 'obs' occurs twice in one object"),
    second(b'{"a": ' + b"9" * 5000 + b"}\n", "", "Exceeds the limit"),
    second(b"[" * 100_000 + b"\n", "", "nested too deeply"),
    second(b'{"a":' * 40 + b"1" + b"}" * 40 + b"\n", "", NESTED),
    entry("obs", [[1, 2], [3], [4, 5]], "'obs', step 1", "a list of 1, but the ones before have 2"),
    entry("obs", [1, [2], 3], "'obs', step 1", "a list, but the values before are a number"),
    entry("obs", [None, 2, 3], "'obs', step 0", "null cannot be stored in a tensor"),
    entry("obs", [[1, 2], [3, 4], [True, 5]], "'obs', step 2", "true or false, but the values"),
    entry("obs", [{"a": 1}] * 3, "'obs', step 0", "an object cannot be stored in a tensor; to"),
    entry("obs", [[1, 2], [3, 1e39], [4, 5]], "'obs', step 1", "1e+39 does not fit torch.float32"),
    entry("obs", [[1], [1e999], [1]], "'obs', step 1", "it contains inf; to accept NaN and"),
    entry("obs", "x", "'obs'", "a string, but each line is an episode, as the list of rewards"),
    entry("obs", [DEEP] * 3, "'obs'", NESTED),
    entry("obs", [[0.1], [10**400], [1]], "'obs', step 1", "... does not fit torch.float32"),
    entry("action", [1, 2**63], "'action', step 1", "9223372036854775808 does not fit torch.int64"),
    entry("action", 3, "'action'", "it must be a list with one value for each step"),
    entry("reward", [True, False], "'reward', step 0", "true or false, but the column is torch.fl"),
    entry("reward", [], "'reward'", "it is empty; an episode must have at least one step"),
    entry("terminated", [0, 1], "'terminated'", "terminated must be one true or false for each"),
    entry("episode", 1.5, "'episode'", "a number, but each line is an episode"),
    entry("more", {"a": {"b": "x"}}, "'more.a.b'", "columns={('more', 'a', 'b'): None}"),
    step(0, {"episode": None}, "line 1", "each line is a step, because its reward is a number"),
    step(1, {"episode": 1.5}, "line 2, 'episode'", "a number, not a whole number or a string"),
    step(3, {"episode": "a"}, "line 4, 'episode'", "this episode ended before; its steps must"),
    step(2, {"action": None}, "line 3, 'action'", "it is missing here, but the first line has it"),
    step(2, {"extra": 1}, "line 3, 'extra'", "the first line has no such entry; to leave"),
    step(2, {"obs": [1]}, "line 4, 'obs'", "a list of 2, but the ones before have 1"),
    step(2, {"truncated": True}, "line 3", "the episode ends here, but 1 more of its steps"),
    ([EPISODE | {"reward": None}], "line 1", NO_REWARD),
    ([EPISODE | {"reward": {"a": 1}}], "line 1", "there is no 'reward'"),
    ([], "line 1", "the file is empty"),
    *[zipped(lambda data, cut=cut: data[:-cut]) for cut in (1, 4, 9, 15, 30, 40)],
    zipped(lambda data: data[:-6] + bytes([data[-6] ^ 1]) + data[-5:]),  # of its check sum
]


@pytest.mark.parametrize(("lines", "where", "why"), REFUSED)
def test_errors_name_the_line_and_the_reason(tmp_path, lines, where, why):
    path = write(tmp_path, lines)
    found = error(path)
    assert found.path == str(path) and why in found.why and len(str(found)) < 400
    assert found.where == where or (why == "damaged" and found.where.startswith(where))


@pytest.mark.parametrize("zipped", [False, True])
def test_an_endless_line_takes_no_more_memory_than_allowed(tmp_path, zipped):
    text = b'{"a": "' + b"x" * 50_000_000
    path = write(tmp_path, [gzip.compress(text, 1) if zipped else text])
    tracemalloc.start()
    error(path, max_line_bytes=100_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


def test_one_episode_is_in_memory_at_a_time(tmp_path):
    steps = {"obs": [[0.5] * 50] * 201, "action": [1.5] * 200, "reward": [0] * 200}
    ends = {"terminated": [False] * 199 + [True], "truncated": [False] * 200}

    def peak(number):
        path = write(tmp_path, [steps | ends] * number)
        tracemalloc.start()
        for _ in read_json_lines(path):
            pass
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    assert peak(12) < 1.2 * peak(3)


# ------------------------------------------------------------------------------------------- dtypes


def test_integers_become_floats_but_not_the_reverse(tmp_path):
    whole = EPISODE | {"obs": [[1, 2], [3, 4], [5, 6]]}
    one, other = read_json_lines(write(tmp_path, [EPISODE, whole]))
    assert one["obs"].dtype is other["obs"].dtype is torch.float32
    path = write(tmp_path, [whole, EPISODE])
    found = error(path)
    assert found.where == "line 2, 'obs', step 0"
    assert "0.5 is written as a fraction, but the column is torch.int64" in found.why
    assert "dtypes={'obs': torch.float32}" in found.why
    step = STEPS[1] | {"obs": [1, 2], "next": {"obs": [0.5, 1]}}
    (td,) = read_json_lines(write(tmp_path, [step]))
    assert td["obs"].dtype is td["next", "obs"].dtype is torch.float32
    path = write(tmp_path, [whole, EPISODE])
    one, other = read_json_lines(path, dtypes={"obs": torch.float32})
    assert one["obs"].dtype is torch.float32 and one["next", "obs"].dtype is torch.float32


def test_invalid_dtypes_are_refused(tmp_path):
    for dtype, value, why in [
        (torch.uint8, [[1], [256], [0]], "256 does not fit torch.uint8"),
        (torch.bool, [[1], [0], [0]], "a number, but the column is torch.bool"),
    ]:
        path = write(tmp_path, [EPISODE | {"obs": value}])
        assert why in error(path, dtypes={"obs": dtype}).why
    words = "there is no 'ops', which `dtypes` names"
    assert words in error(path, dtypes={"ops": torch.uint8}).why
    with pytest.raises(TypeError, match="'obs': torch.complex64}: JSON cannot represent such"):
        read_json_lines(path, dtypes={"obs": torch.complex64})
    with pytest.raises(TypeError, match="float_dtype=torch.int64 must be one of"):
        read_json_lines(path, float_dtype=torch.int64)


# ------------------------------------------------------------------------------------------ writing


def container(**changes):
    entries = {
        "obs": torch.tensor([[0.5, 1.0], [2.0, 3.0]]),
        "next": {"obs": torch.tensor([[2.0, 3.0], [4.0, 5.0]])},
        "action": torch.tensor([1, 0]),
        "reward": torch.tensor([0.0, 1.0]),
        "terminated": torch.tensor([False, True]),
        "truncated": torch.tensor([False, False]),
    }
    return TensorDict(entries | changes, batch_size=[2])


def test_files_that_are_written(tmp_path):
    episode = container(terminated=torch.tensor([False, False]))
    before = episode.clone()
    write_json_lines(tmp_path / "u.jsonl", [episode])
    assert (episode == before).all()
    assert "neither terminated nor truncated" in error(tmp_path / "u.jsonl").why
    for name in "a.jsonl.gz", "b.jsonl.gz":
        write_json_lines(tmp_path / name, iter([container()]))
    a, b = [(tmp_path / name).read_bytes() for name in ("a.jsonl.gz", "b.jsonl.gz")]
    assert a == b and json.loads(gzip.decompress(a)) == EPISODE
    obs = torch.tensor([[np.nan, 1.0], [np.inf, -np.inf]])
    write_json_lines(tmp_path / "n.jsonl", [container(obs=obs)], allow_nan=True)
    (again,) = read_json_lines(tmp_path / "n.jsonl", allow_nan=True)
    assert torch.equal(again["obs"].nan_to_num(7), obs.nan_to_num(7))
    with pytest.raises(ValueError, match="there are no episodes to write to .*a.jsonl"):
        write_json_lines(tmp_path / "a.jsonl", [])
    assert not (tmp_path / "a.jsonl").exists()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_episodes_that_could_not_be_read_are_not_written(tmp_path, name):
    (tmp_path / name).write_text("old")
    for bad, why in [
        (container(reward=torch.tensor([0, torch.nan])), "'reward', step 1: it contains nan"),
        (container(z=torch.ones(2, dtype=torch.complex64)), "JSON cannot hold"),
        (container(z=["a", "b"]), "'z': JSON cannot hold"),
        (container().exclude("reward"), "episode 1: there is no 'reward'"),
        (container().exclude("next"), "the observation after the last step is missing"),
        (container(terminated=torch.tensor([True, True])), "the episode ends here"),
        (container(action=torch.ones(2, 3)), r"in the first episode of dtype"),
        (container()[0], r"an episode must be a TensorDict of batch size \[T\]"),
        ({"obs": 1}, r"an episode must be a TensorDict of batch size \[T\]; this is dict"),
    ]:
        with pytest.raises(MalformedDataError, match=why):
            write_json_lines(tmp_path / name, [container(), bad])
        assert (tmp_path / name).read_text() == "old" and os.listdir(tmp_path) == [name]


def test_a_small_compressed_file_that_needs_a_large_memory_is_refused(tmp_path):
    path = tmp_path / "small.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=9) as file:
        file.write(b'{"obs": [' + b"0, " * 30_000_000 + b"0]}")
    assert path.stat().st_size < 100_000  # for a line of 90 MB
    tracemalloc.start()
    try:
        with pytest.raises(MalformedDataError, match="line 1.*a small file that needs a lot of"):
            next(iter(read_json_lines(path)))
        assert tracemalloc.get_traced_memory()[1] < 2**27
    finally:
        tracemalloc.stop()


def test_long_lines_are_read_completely(tmp_path, monkeypatch):
    monkeypatch.setattr("raffia.data.readers.json_text.SMALL_BYTES", 64)
    numbers = np.random.default_rng(0).integers(0, 10**9, 2000).tolist()
    line = {"obs": [*numbers, 1], "action": numbers, "reward": numbers}
    line |= {"terminated": [False] * 1999 + [True], "truncated": [False] * 2000}
    for path, write in ((tmp_path / "a.jsonl", open), (tmp_path / "a.jsonl.gz", gzip.open)):
        with write(path, "wb") as file:
            for end in (b"\n", b""):
                file.write(json.dumps(line).encode() + end)
        assert [len(episode) for episode in read_json_lines(path)] == [2000, 2000]
        with pytest.raises(MalformedDataError, match="longer than 5000 bytes"):
            list(read_json_lines(path, max_line_bytes=5000))
