"""Episodes of Minari's HDF5 layout: what a file may hold, and what is refused in it."""

import json
import os

import h5py
import numpy as np
import pytest
import torch

from raffia.data.readers import MalformedDataError, read_minari


def fill(group, steps=3, **more):
    values = {
        "observations": np.arange(2.0 * (steps + 1)).reshape(-1, 2),
        "actions": np.arange(steps),
        "rewards": np.ones(steps),
        "terminations": np.arange(steps) == steps - 1,
        "truncations": np.zeros(steps, bool),
    }
    for name, value in (values | more).items():
        if value is not None:
            group[name] = value
    return group


@pytest.fixture
def data(tmp_path):
    """The folder of a data set, and its file, still open."""
    (tmp_path / "data").mkdir()
    with h5py.File(tmp_path / "data" / "main_data.hdf5", "w") as file:
        yield tmp_path, file


def error(folder, **options):
    with pytest.raises(MalformedDataError) as caught:
        list(read_minari(folder, **options))
    return caught.value


def test_episodes_are_counted_indexed_and_gone_through_in_order(data):
    folder, file = data
    for number in range(12):
        fill(file.create_group(f"episode_{number}"), steps=number + 1)
    file.close()
    episodes = read_minari(folder)
    assert len(episodes) == 12 and [len(td) for td in episodes] == list(range(1, 13))
    assert len(episodes[10]) == len(episodes[-2]) == len(episodes[np.int64(10)]) == 11
    for index in 12, -13:
        with pytest.raises(IndexError, match=f"no episode {index}: .*main_data.hdf5 holds 12"):
            episodes[index]
    with pytest.raises(TypeError):
        episodes["0"]


def test_dtypes_are_those_of_the_file_in_the_order_of_this_machine(data):
    folder, file = data
    dtypes = "f2 f4 f8 i1 i2 i4 i8 u1 u2 u4 u8 c8 c16 >f4 >i8 >u2".split()
    more = {name: np.arange(3).astype(name) for name in dtypes}
    fill(file.create_group("episode_0"), **more, odd=np.array([True, False, True]))
    file.close()
    (td,) = read_minari(folder)
    for name in dtypes:
        expected = torch.from_numpy(np.arange(3).astype(np.dtype(name).newbyteorder("=")))
        assert td[name].dtype is expected.dtype and torch.equal(td[name], expected)
    assert td["odd"].tolist() == [True, False, True] and td["reward"].dtype is torch.float64


def test_compressed_chunked_and_nested_arrays(data):
    folder, file = data
    group = fill(file.create_group("episode_0"), observations=None)
    values = np.arange(4 * 5 * 6, dtype=np.uint8).reshape(4, 5, 6)
    options = {"chunks": (2, 3, 6), "compression": "gzip", "shuffle": True, "fletcher32": True}
    group.create_dataset("observations/image/_index_0", data=values, **options)
    group.create_dataset("observations/image/_index_1", data=values[:, 0], maxshape=(None, 6))
    file.close()
    (td,) = read_minari(folder)
    assert torch.equal(td["obs", "image", "_index_0"], torch.from_numpy(values[:3]))
    assert torch.equal(td["next", "obs", "image", "_index_1"], torch.from_numpy(values[1:, 0]))


def test_infos_go_with_the_observations_or_with_the_steps(data):
    folder, file = data
    group = fill(file.create_group("episode_0"))
    group["infos/speed"], group["infos/hit"] = np.arange(4), np.arange(3)
    file.close()
    (td,) = read_minari(folder)
    assert td["info", "speed"].tolist() == [0, 1, 2] and td["info", "hit"].tolist() == [0, 1, 2]
    assert td["next", "info", "speed"].tolist() == [1, 2, 3]
    assert ("next", "info", "hit") not in td.keys(True)


def test_metadata_and_attributes(data):
    folder, file = data
    attributes = {"id": 0, "seed": 7, "total_steps": 3, "name": "x", "list": [1, 2], "ok": True}
    fill(file.create_group("episode_0")).attrs.update(attributes | {"none": h5py.Empty("f4")})
    file.attrs.update(total_episodes=1, env_spec="{}", authors=["a", "b"])
    file.close()
    episodes = read_minari(folder)
    assert episodes.metadata == {"total_episodes": 1, "env_spec": "{}", "authors": ["a", "b"]}
    assert episodes.attributes(-1) == attributes | {"none": None}
    found = {"total_episodes": 1, "dataset_id": "toy/e-v0"}
    (folder / "data" / "metadata.json").write_text(json.dumps(found))
    assert read_minari(folder).metadata == found
    episodes.metadata.clear()
    assert episodes.metadata["total_episodes"] == 1


def test_no_file_is_left_open(data):
    folder, file = data
    for number in range(2):
        fill(file.create_group(f"episode_{number}"))
    file.close()
    episodes = iter(read_minari(folder))
    next(episodes)
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:  # which locks it
        file["episode_1/actions"][0] = 9
    assert next(episodes)["action"].tolist() == [9, 1, 2]


# ------------------------------------------------------------------------------------ what is wrong


@pytest.mark.parametrize("content", [b"", b"\x89HDF\r\n\x1a\n", b"PAR1" * 9, b"\0" * 4096])
def test_a_file_that_is_not_hdf5(data, content):
    folder, file = data
    file.close()
    (folder / "data" / "main_data.hdf5").write_bytes(content)
    found = error(folder)
    assert found.path.endswith("main_data.hdf5") and found.where == "the file"
    assert "it can't be read" in found.why and found.__cause__ is not None


def test_a_file_that_was_cut_off(data):
    folder, file = data
    fill(file.create_group("episode_0"))
    file.close()
    path = folder / "data" / "main_data.hdf5"
    path.write_bytes(path.read_bytes()[:-100])
    assert "it can't be read" in error(folder).why


def test_a_flat_file_of_d4rl_is_said(tmp_path):
    with h5py.File(tmp_path / "hopper.hdf5", "w") as file:
        file["observations"] = np.zeros((5, 3))
        file["terminals"] = np.zeros(5, bool)
    with pytest.raises(MalformedDataError, match=r"hopper.hdf5.*D4RL's flat layout.*read_d4rl"):
        read_minari(tmp_path / "hopper.hdf5")


def test_a_folder_of_something_else(data, tmp_path):
    folder, file = data
    file.close()
    with pytest.raises(FileNotFoundError, match="main_data.hdf5 is a file; give the folder that"):
        read_minari(folder / "data" / "main_data.hdf5")
    with pytest.raises(FileNotFoundError, match="no data/main_data.hdf5 in .*; it holds main_data"):
        read_minari(folder / "data")


@pytest.mark.parametrize(
    ("names", "total", "why"),
    [
        ([], 0, "it holds no group episode_0: there is no episode in it"),
        (["0", "1", "3"], 3, "there is no group episode_2, but episode_3"),
        (["1"], 1, "there is no group episode_0, but episode_1"),
        (["0", "1"], 3, "it holds 2 episodes, and its metadata has 3"),
        (["0", "1"], "many", "it holds 2 episodes, and its metadata has many"),
        (["01", "x", "9" * 5000], 0, "it holds no group episode_0"),
    ],
)
def test_episodes_that_are_not_there(data, names, total, why):
    folder, file = data
    for name in names:
        fill(file.create_group(f"episode_{name}"))
    file.attrs["total_episodes"] = total
    file.close()
    found = error(folder)
    assert found.where == "the file" and why in found.why


def test_groups_of_other_names_are_left_alone(data):
    folder, file = data
    fill(file.create_group("episode_0"))
    file.create_group("recorder")
    file.close()
    assert len(read_minari(folder)) == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "JSONDecodeError"), ("[1]", "it is not an object"), ("[" * 99_999, "RecursionError")],
)
def test_metadata_that_is_no_json(data, text, why):
    folder, file = data
    fill(file.create_group("episode_0"))
    file.close()
    (folder / "data" / "metadata.json").write_text(text)
    found = error(folder)
    assert found.path.endswith("metadata.json") and why in found.why


@pytest.mark.parametrize("total", [2, 4, "three", [3, 3]])
def test_total_steps_that_are_not_there(data, total):
    folder, file = data
    fill(file.create_group("episode_0")).attrs["total_steps"] = total
    file.close()
    found = error(folder)
    assert found.where == "episode_0"
    assert found.why == f"it has 3 steps, and its attribute total_steps is {total}"


def test_an_attribute_that_is_a_reference(data):
    folder, file = data
    group = fill(file.create_group("episode_0"))
    group.attrs["self"] = group.ref
    file.close()
    (episodes := read_minari(folder))[0]
    with pytest.raises(MalformedDataError, match="episode_0: an attribute is a Reference, not a"):
        episodes.attributes(0)


def soft(group):
    group["infos"] = h5py.SoftLink("/episode_0/actions")


def dangling(group):
    group["infos"] = h5py.SoftLink("/nowhere")


def external(group):
    group["infos"] = h5py.ExternalLink("/etc/passwd", "/x")


def cycle(group):
    group["infos/a/b"] = np.ones(3)
    group["infos/a/c"] = group["infos"]


def twice(group):
    group["infos/a/x"] = np.ones(3)
    group["infos/b"] = group["infos/a"]


def deep(group):
    group["infos/" + "a/" * 40 + "x"] = np.ones(3)


def outside(group):
    group.create_dataset("infos", (3,), "i1", external=[("/etc/passwd", 0, 3)])


def virtual(group):
    layout = h5py.VirtualLayout((3,), "i1")
    layout[:] = h5py.VirtualSource("other.h5", "x", shape=(3,), dtype="i1")
    group.create_virtual_dataset("infos", layout)


def text(group):
    group["infos"] = ["a", "b", "c"]


def fixed_text(group):
    group["infos"] = np.array([b"a", b"b", b"c"])


def ragged(group):
    group.create_dataset("infos", (3,), h5py.vlen_dtype(np.int32))[0] = [1, 2]


def reference(group):
    group.create_dataset("infos", (3,), h5py.ref_dtype)[0] = group.ref


def compound(group):
    group["infos"] = np.zeros(3, [("a", "f4"), ("b", "i4")])


def opaque(group):
    group["infos"] = np.zeros(3, "V5")


def long_double(group):
    group["infos"] = np.zeros(3, np.longdouble)


def scalar(group):
    group["infos"] = 3.0


def null(group):
    group["infos"] = h5py.Empty("f4")


def unwritten(group):
    group.create_dataset("infos", (3,), "f4")


def inflated(group):
    data = group.create_dataset("infos", (3, 10**9), "f4", chunks=(1, 10**6), compression="gzip")
    data[0, 0] = 1


def large_chunk(group):
    shape = {"shape": (3,), "maxshape": (None,), "chunks": (5 * 10**6,)}
    group.create_dataset("infos", dtype="i4", **shape, scaleoffset=0, compression="gzip")[:] = 1


def named_type(group):
    group["infos"] = np.dtype("f4")


def other_bytes(group):
    group[b"inf\xffos"] = np.ones(3)


@pytest.mark.parametrize(
    ("add", "where", "why"),
    [
        (soft, "/infos", "it is a link to elsewhere, which is not followed"),
        (dangling, "/infos", "it is a link to elsewhere"),
        (external, "/infos", "it is a link to elsewhere"),
        (cycle, "/infos/a/c", "groups are nested without end"),
        (twice, "/infos/b", "groups are nested without end"),
        (deep, "/infos" + "/a" * 31, "or too deeply"),
        (outside, "/infos", "its numbers are in another file, which is not read"),
        (virtual, "/infos", "its numbers are in another file, which is not read"),
        (text, "/infos", "its dtype object can't be in a tensor; to leave the column out: col"),
        (fixed_text, "/infos", "its dtype |S1 can't be in a tensor"),
        (ragged, "/infos", "its dtype object can't be in a tensor"),
        (reference, "/infos", "its dtype object can't be in a tensor"),
        (compound, "/infos", "can't be in a tensor; to leave the column out: columns={'infos'"),
        (opaque, "/infos", "its dtype |V5 can't be in a tensor"),
        (long_double, "/infos", "can't be in a tensor"),
        (scalar, "/infos", "it is not an array with a row for each step"),
        (null, "/infos", "it is not an array with a row for each step"),
        (unwritten, "/infos", "nothing was ever written into it"),
        (inflated, "/infos", "it takes 12000000000 bytes, of which only"),
        (large_chunk, "/infos", "it takes 20000000 bytes, of which only"),
        (named_type, "/infos", "it is not a group"),
        (other_bytes, "", "is not UTF-8"),
    ],
)
def test_what_is_no_array_of_numbers_in_this_file(data, add, where, why):
    folder, file = data
    add(fill(file.create_group("episode_0")))
    file.close()
    found = error(folder)
    assert found.where == "episode_0" + where and why in found.why
    if add is not other_bytes:  # what is left out isn't looked at
        assert len(list(read_minari(folder, columns={"infos": None}))) == 1


def test_the_episode_is_a_link_to_elsewhere(data):
    folder, file = data
    file["episode_0"] = h5py.ExternalLink("other.h5", "/")
    file.close()
    assert "it is a link to elsewhere" in error(folder).why


def test_the_episode_is_an_array(data):
    folder, file = data
    file["episode_0"] = np.ones(3)
    file.close()
    found = error(folder)
    assert (found.where, found.why) == ("episode_0", "it is not a group")


def test_an_array_stands_where_a_group_should(data):
    folder, file = data
    fill(file.create_group("episode_0"), rewards=None).create_group("rewards")["x"] = np.ones(3)
    file.close()
    assert "there is no 'reward'" in error(folder).why


def test_bytes_that_are_neither_true_nor_false(data):
    folder, file = data
    fill(file.create_group("episode_0"))
    file.close()
    path = folder / "data" / "main_data.hdf5"
    with h5py.File(path) as file:
        at = file["episode_0/terminations"].id.get_offset()
    raw = bytearray(path.read_bytes())
    raw[at + 1] = 7
    path.write_bytes(raw)
    found = error(folder)
    assert found.where == "episode_0/terminations"
    assert found.why == "it holds bytes that are neither true nor false"


def test_an_unlike_episode_is_found_whichever_is_read_first(data):
    folder, file = data
    fill(file.create_group("episode_0"))
    fill(file.create_group("episode_1"), observations=np.ones((4, 5)))
    file.close()
    with pytest.raises(
        MalformedDataError, match=r"episode_1/observations: .*shape \[5\], in the f"
    ):
        read_minari(folder)[1]


def test_damage_within_an_array(data):
    folder, file = data
    group = fill(file.create_group("episode_0"))
    group.create_dataset("infos/x", data=np.ones(3), chunks=(3,), compression="gzip")
    file.close()
    path = folder / "data" / "main_data.hdf5"
    with h5py.File(path) as file:
        at = file["episode_0/infos/x"].id.get_chunk_info(0).byte_offset
    raw = bytearray(path.read_bytes())
    raw[at : at + 8] = os.urandom(8)
    path.write_bytes(raw)
    found = error(folder)
    assert found.where == "episode_0/infos/x" and "it can't be read (OSError" in found.why
