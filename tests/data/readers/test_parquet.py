"""Episodes from Parquet: forms of files, and errors."""

import functools
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from raffia.data.readers import MalformedDataError, read_parquet


def steps(**changes):
    """Two episodes of two steps, one in each row."""
    columns = {
        "episode": [7, 7, 9, 9],
        "obs": [[0.0, 1.0], [1.0, 2.0], [5.0, 6.0], [6.0, 7.0]],
        "next_obs": [[1.0, 2.0], [2.0, 3.0], [6.0, 7.0], [7.0, 8.0]],
        "action": [0, 1, 2, 3],
        "reward": [0.0, 1.0, 0.5, 0.0],
        "terminated": [False, True, False, False],
        "truncated": [False, False, False, True],
    }
    return {name: v for name, v in (columns | changes).items() if v is not None}


def episodes(**changes):
    """The same, one in each row."""
    columns = {
        "obs": [[[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]], [[5.0, 6.0], [6.0, 7.0], [7.0, 8.0]]],
        "action": [[0, 1], [2, 3]],
        "reward": [[0.0, 1.0], [0.5, 0.0]],
        "terminated": [[False, True], [False, False]],
        "truncated": [[False, False], [False, True]],
    }
    return {name: v for name, v in (columns | changes).items() if v is not None}


def write(folder, columns, **options):
    path = folder / "data.parquet"
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **options)
    return path


def error(path, **options):
    with pytest.raises(MalformedDataError) as caught:
        list(read_parquet(path, **options))
    return caught.value


def test_a_row_is_a_step_or_an_episode(tmp_path):
    by_step = read_parquet(write(tmp_path, steps()))
    found = list(by_step)
    by_episode = read_parquet(write(tmp_path, episodes()))
    for one, other in zip(found, by_episode, strict=True):
        assert (one == other).all() and "episode" not in one.keys()
    assert len(by_episode) == 2 and repr(by_episode).endswith("data.parquet', 2 episodes)")
    assert not hasattr(by_step, "__len__") and repr(by_step).endswith("data.parquet', 4 steps)")


def test_dtypes_follow_the_file(tmp_path):
    types = "halffloat float double int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool".split()
    columns = {n: pa.array(np.array([0, 1, 1, 0], "f2")).cast(n) for n in types[:3]}
    columns |= {n: pa.array([0, 1, 1, 0], pa.int8()).cast(n) for n in types[3:]}
    (one, _) = read_parquet(write(tmp_path, steps(**columns)))
    for name in types:
        wanted = {"halffloat": "float16", "float": "float32", "double": "float64"}.get(name, name)
        assert one[name].dtype is getattr(torch, wanted) and one[name].tolist() == [0, 1]
    assert one["obs"].dtype is torch.float64


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.float32()), pa.large_list(pa.float32()), pa.list_(pa.float32(), 2)],
    ids=str,
)
def test_all_kinds_of_lists(tmp_path, kind):
    columns = {name: pa.array(steps()[name], kind) for name in ("obs", "next_obs")}
    nested = pa.array(episodes()["obs"], pa.large_list(kind))
    for rows in (steps(**columns), episodes(obs=nested)):
        _, other = read_parquet(write(tmp_path, rows))
        assert other["obs"].tolist() == [[5.0, 6.0], [6.0, 7.0]]
        assert other["next", "obs"].tolist() == [[6.0, 7.0], [7.0, 8.0]]


def test_structs_names_and_left_out_columns(tmp_path):
    obs = [{"x": [1.0, 2.0, 3.0], "more": {"y": [[1], [2], [3]]}}] * 2
    one, _ = read_parquet(write(tmp_path, episodes(obs=obs)))
    assert one["next", "obs", "more", "y"].tolist() == [[2], [3]]
    more = {
        "obs.x": [1, 2, 3, 4],
        "more": [{"x": i} for i in range(4)],
        "note": list("abc") + [None],
    }
    _, other = read_parquet(write(tmp_path, steps(**more)), columns={"note": None})
    assert other["obs.x"].tolist() == [3, 4] and other["more", "x"].tolist() == [2, 3]
    names = pa.array(["a", "a", "b", "b"]).dictionary_encode()
    assert len(list(read_parquet(write(tmp_path, steps(episode=names))))) == 2
    path = write(tmp_path, steps(run=names, episode=None))
    assert len(list(read_parquet(path, columns={"run": "episode"}))) == 2
    for name in ["a", "b"], [1, 2], ["a", None]:
        (one, _) = read_parquet(write(tmp_path, episodes(episode=name)))
        assert "episode" not in one.keys()


def test_episodes_may_be_longer_than_a_block(tmp_path):
    counts = [1, 6000, 3, 2188, 5000, 1]  # 4096 rows are a block; 8192 steps end an episode
    number = np.repeat(np.arange(len(counts)), counts)
    last = np.append(np.diff(number) > 0, True)
    obs = np.arange(len(number))
    columns = {"episode": [f"e{n}" for n in number], "obs": obs, "next_obs": obs + 1}
    columns |= {"action": obs, "reward": obs / 2, "terminated": last, "truncated": ~last & last}
    for size in 700, 10**6:
        found = list(read_parquet(write(tmp_path, columns, row_group_size=size)))
        assert [len(td) for td in found] == counts
        assert torch.equal(torch.cat([td["obs"] for td in found]), torch.from_numpy(obs))


DEEP_DICT = functools.reduce(lambda x, _: {"a": x}, range(40), 1)
DEEP_LIST = functools.reduce(lambda x, _: [x], range(40), 1.0)
NULL, LEFT_OUT = ("null, which is not a number", "cannot be stored in a tensor; to leave the")
TWICE = {"terminated": [True, False, True, True], "truncated": [False] * 4}
FIRST = "the episode from row 0"
BAD_ROWS = [
    ({"obs": [[1.0], [1.0], [1.0, 2.0], [1.0]]}, "row 2, 'obs'", "a list of 2, but the ones bef"),
    ({"obs": [[1.0, 2.0], None] * 2}, "row 1, 'obs'", NULL),
    ({"action": [1, 2, 3, None]}, "row 3, 'action'", NULL),
    ({"action": ["a", "b", "c", "d"]}, "the file, 'action'", f"string {LEFT_OUT}"),
    ({"action": [[{"a": 1}]] * 4}, "the file, 'action'", f"struct<a: int64> {LEFT_OUT}"),
    ({"action": pa.nulls(4)}, "the file, 'action'", f"null {LEFT_OUT}"),
    ({"action": [{"x": 1}, {"x": 2}, None, {"x": 2}]}, "row 2, 'action.x'", NULL),
    ({"action": [DEEP_DICT] * 4}, "the file, 'action", "nested more than 32 levels deep"),
    ({"action": [DEEP_LIST] * 4}, "the file, 'action'", "nested more than 32 levels deep"),
    ({"reward": [True, False] * 2}, f"{FIRST}, 'reward'", "one real number for each ste"),
    ({"episode": None}, "the file", "each row must name its episode; there is no 'episode', only"),
    ({"episode": [1, None, 2, 3]}, "row 1, 'episode'", "null, which names no episode"),
    ({"episode": [1.0, 1.0, 2.0, 2.0]}, "the file, 'episode'", "double, not integers or strin"),
    ({"episode": [1, 2, 2, 1], **TWICE}, "row 3, 'episode'", "ended before; its steps must"),
    ({"episode": [1, 1, 1, 1]}, "row 1", "the episode ends here, but 2 more of its steps"),
    ({"next_obs": None}, f"{FIRST}, 'obs'", "no ('next', 'obs'): the observation"),
    ({"reward": None}, "the file", "there is no 'reward', only"),
]
STEP = "row 1, 'obs', step 1"
WHOLE = ", but each row is an episode"
BAD_EPISODES = [
    ({"obs": [[[1.0], [2.0], [3.0]], [[1.0], [2.0, 3.0], [4.0]]]}, STEP, "a"),
    ({"obs": [[[1.0], [2.0], [3.0]], [[1.0], None, [4.0]]]}, STEP, "null, wh"),
    ({"obs": [[[1.0], [2.0], [3.0]], None]}, "row 1, 'obs'", "null, which is not an episode"),
    ({"action": [[1, 2], [1, None]]}, "row 1, 'action', step 1", NULL),
    ({"action": [[1, 2], [1]]}, "row 1, 'action'", "it has 1 rows, but should have 2"),
    ({"reward": [[1, 2], []]}, "row 1, 'reward'", "it is empty; an episode must have at least one"),
    ({"action": [1, 2]}, "the file, 'action'", f"int64{WHOLE}, as the list"),
    ({"seed": [1, 2]}, "the file, 'seed'", "to leave the column out: columns={'seed': None}"),
    ({"action": [[{"x": 1}, {"x": 2}]] * 2}, "the file, 'action'", "struct<x: int64> cannot"),
    ({"action": [{"x": [1, 2]}, None]}, "row 1, 'action.x'", NULL),
]
BAD = [(steps, *case) for case in BAD_ROWS] + [(episodes, *case) for case in BAD_EPISODES]


@pytest.mark.parametrize(("columns", "change", "where", "why"), BAD)
def test_bad_rows(tmp_path, columns, change, where, why):
    found = error(write(tmp_path, columns(**change)))
    assert found.path == str(tmp_path / "data.parquet")
    assert found.where.startswith(where) and why in found.why


def test_shapes_that_change_between_blocks(tmp_path):
    obs = [[1.0, 2.0]] * 4096 + [[1.0]]
    columns = {"episode": [0] * 4097, "obs": obs, "next_obs": obs, "action": [0] * 4097}
    columns |= {"reward": [0.0] * 4097, "terminated": [False] * 4097}
    path = write(tmp_path, columns | {"truncated": [False] * 4096 + [True]})
    found = error(path)
    assert found.where in ("row 4096, 'obs'", "row 4096, 'next_obs'")
    assert found.why == "rows of [1], but the ones before are [2]"


def test_two_columns_of_one_name(tmp_path):
    table = pa.Table.from_arrays(
        [pa.array(v) for v in steps().values()] + [pa.array([1, 2, 3, 4])], [*steps(), "action"]
    )
    found = error(write(tmp_path, table))
    assert (found.where, found.why) == ("the file, 'action'", "two columns have this name")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" * 3, b"\x89HDF" * 99, b"\xff" * 4096])
def test_a_file_that_is_not_parquet_was_cut_off_or_has_no_rows(tmp_path, content):
    path = write(tmp_path, steps())
    for wrong in (content, path.read_bytes()[:-50]):
        path.write_bytes(wrong)
        found = error(path)
        assert found.where == "the file" and "it cannot be read" in found.why
        assert found.__cause__ is not None
    assert error(write(tmp_path, pa.table(steps()).slice(0, 0))).why == "it has no rows"


def test_a_changed_page_is_found_by_its_check_sum(tmp_path):
    path = write(tmp_path, steps(), write_page_checksum=True, compression=None)
    raw = bytearray(path.read_bytes())
    at = raw.index(np.array([5.0, 6.0]).tobytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    found = error(path)
    assert found.where == "row 0" and "cannot be read (OSError" in found.why


def test_only_a_part_of_the_file_is_in_memory(tmp_path):
    def peak(number):
        table = pa.table(episodes(obs=[np.zeros((3, 10**5)).tolist()] * 2))
        path = write(tmp_path, pa.concat_tables([table] * number), row_group_size=2)
        before = pa.default_memory_pool().bytes_allocated()
        tracemalloc.start()
        most = 0
        for _ in read_parquet(path):
            most = max(most, pa.default_memory_pool().bytes_allocated() - before)
        found = tracemalloc.get_traced_memory()[1] + most
        tracemalloc.stop()
        return found

    assert peak(8) < 1.5 * peak(2)


def test_small_files_that_need_a_large_memory_are_refused(tmp_path, monkeypatch):
    """Runs of equal values take a few bytes, however many there are."""
    steps, rng = 400_000, np.random.default_rng(0)
    last = np.arange(steps) == steps - 1
    equal = {"obs": np.zeros(steps + 1, "f4"), "action": np.zeros(steps, "i8")}
    equal |= {"reward": np.zeros(steps), "terminated": last, "truncated": last & ~last}
    noise = {**equal, "obs": rng.random(steps + 1, np.float32), "action": np.arange(steps)}
    noise["reward"] = noise["obs"][1:].astype(float)

    def written(columns):
        lists = {name: pa.ListArray.from_arrays([0, len(x)], x) for name, x in columns.items()}
        return write(tmp_path, pa.table(lists), compression="zstd")

    path = written(equal)
    assert path.stat().st_size < 20_000  # for 8 MB
    assert len(next(iter(read_parquet(path)))) == steps  # fits into the memory of any machine
    monkeypatch.setattr("raffia.data.readers.arrow.SMALL_BYTES", 2**20)
    with pytest.raises(MalformedDataError, match="only .* are stored: a small file that needs"):
        next(iter(read_parquet(path)))
    assert len(next(iter(read_parquet(written(noise))))) == steps  # as large, and stored as such


def write_shards(folder, table, cuts):
    """A table in several files, whose names sort otherwise as text than by number."""
    folder.mkdir()
    for number, (start, stop) in enumerate(zip([0, *cuts], [*cuts, table.num_rows], strict=True)):
        pq.write_table(table.slice(start, stop - start), folder / f"part-{8 + number}.parquet")
    (folder / "README.md").write_text("no episodes")
    return folder


@pytest.mark.parametrize("columns", [steps, episodes])
@pytest.mark.parametrize("cuts", [[1], [2], [1, 3], [1, 2, 3], []])
def test_a_folder_of_files_is_read_as_one_file(tmp_path, columns, cuts):
    table = pa.table(columns())
    cuts = [cut for cut in cuts if cut < table.num_rows]
    expected = list(read_parquet(write(tmp_path, table)))
    reader = read_parquet(write_shards(tmp_path / "shards", table, cuts))
    for _ in range(2):
        found = list(reader)
        assert len(found) == len(expected) == 2
        for one, other in zip(found, expected, strict=True):
            assert (one == other).all()
    rows = "2 episodes" if columns is episodes else "4 steps"
    assert repr(reader).endswith(f"shards', {rows})")


def test_files_of_a_folder_must_have_equal_columns_and_contiguous_episodes(tmp_path):
    folder = write_shards(tmp_path / "a", pa.table(steps()), [2])
    pq.write_table(pa.table(steps(action=[0.5, 1.5, 2.5, 3.5])), folder / "part-20.parquet")
    found = error(folder)
    assert found.path.endswith("part-20.parquet") and "action double" in found.why
    folder = write_shards(tmp_path / "b", pa.table(steps()), [2])
    pq.write_table(pa.table(steps()), folder / "part-20.parquet")
    found = error(folder)
    assert found.path.endswith("part-20.parquet") and "this episode ended before" in found.why
    folder = write_shards(tmp_path / "c", pa.table(episodes()), [1])
    wide = episodes(obs=[[[0.0] * 5] * 3, [[1.0] * 5] * 3])
    pq.write_table(pa.table(wide), folder / "part-20.parquet")
    assert "in the first episode" in error(folder).why
