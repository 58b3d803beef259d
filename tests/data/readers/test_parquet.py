"""Episodes from Parquet: forms of files, and errors."""

import functools
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

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
