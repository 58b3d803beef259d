"""Episodes of Minari's HDF5 layout: forms of files, and errors."""

import json
import os

import h5py
import numpy as np
import pytest

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


def made(folder, make=lambda file: None, number=1):
    """The folder of a data set of `number` episodes, whose file `make` writes."""
    (folder / "data").mkdir(exist_ok=True)
    with h5py.File(folder / "data" / "main_data.hdf5", "w") as file:
        for i in range(number):
            fill(file.create_group(f"episode_{i}"))
        make(file)
    return folder


def changed(folder, change):
    """The folder with the bytes of its file changed by `change`: (bytes, file) -> bytes."""
    path = folder / "data" / "main_data.hdf5"
    with h5py.File(path) as file:
        raw = change(bytearray(path.read_bytes()), file)
    path.write_bytes(raw)
    return folder


def error(folder, **options):
    with pytest.raises(MalformedDataError) as caught:
        list(read_minari(folder, **options))
    return caught.value


def test_episodes_are_counted_indexed_and_iterated_in_order(tmp_path):
    def fill_all(file):
        for number in range(12):
            fill(file.create_group(f"episode_{number}"), steps=number + 1)
        file.create_group("recorder")  # groups of other names are left alone

    episodes = read_minari(made(tmp_path, fill_all, 0))
    assert len(episodes) == 12 and [len(td) for td in episodes] == list(range(1, 13))
    assert len(episodes[10]) == len(episodes[-2]) == len(episodes[np.int64(10)]) == 11
    for index in 12, -13:
        with pytest.raises(IndexError, match=f"no episode {index}: .*main_data.hdf5 holds 12"):
            episodes[index]
    with pytest.raises(TypeError):
        episodes["0"]
    again = iter(episodes)
    next(again)
    with h5py.File(tmp_path / "data" / "main_data.hdf5", "a") as file:  # which locks it
        file["episode_1/actions"][0] = 9
    assert next(again)["action"].tolist() == [9, 1]


def test_metadata_and_attributes(tmp_path):
    attributes = {"id": 0, "seed": 7, "total_steps": 3, "name": "x", "list": [1, 2], "ok": True}

    def add(file):
        file["episode_0"].attrs.update(attributes | {"none": h5py.Empty("f4")})
        file.attrs.update(total_episodes=1, env_spec="{}", authors=["a", "b"])

    episodes = read_minari(made(tmp_path, add))
    assert episodes.metadata == {"total_episodes": 1, "env_spec": "{}", "authors": ["a", "b"]}
    assert episodes.attributes(-1) == attributes | {"none": None}
    found = {"total_episodes": 1, "dataset_id": "toy/e-v0"}
    (tmp_path / "data" / "metadata.json").write_text(json.dumps(found))
    assert read_minari(tmp_path).metadata == found
    episodes.metadata.clear()
    assert episodes.metadata["total_episodes"] == 1
    for text, why in [
        ("", "JSONDecodeError"),
        ("[1]", "it is not a JSON object"),
        ("[" * 99_999, "RecursionError"),
    ]:
        (tmp_path / "data" / "metadata.json").write_text(text)
        wrong = error(tmp_path)
        assert wrong.path.endswith("metadata.json") and why in wrong.why


# ------------------------------------------------------------------------------------------- errors


def not_a_bool(raw, file):
    raw[file["episode_0/terminations"].id.get_offset() + 1] = 7
    return raw


def other_bytes_in_a_chunk(raw, file):
    at = file["episode_0/infos/x"].id.get_chunk_info(0).byte_offset
    raw[at : at + 8] = os.urandom(8)
    return raw


def chunked(file):
    file["episode_0"].create_dataset("infos/x", data=np.ones(3), chunks=(3,), compression="gzip")


UNREAD = "it cannot be read"
DAMAGES = [
    *[
        (lambda raw, file, content=content: content, "the file", UNREAD)
        for content in (b"", b"\x89HDF\r\n\x1a\n", b"PAR1" * 9, b"\0" * 4096)
    ],
    (lambda raw, file: raw[:-100], "the file", UNREAD),
    (not_a_bool, "episode_0/terminations", "it contains bytes that are neither true nor false"),
    (other_bytes_in_a_chunk, "episode_0/infos/x", "it cannot be read (OSError"),
]


@pytest.mark.parametrize(("damage", "where", "why"), DAMAGES)
def test_files_that_were_damaged(tmp_path, damage, where, why):
    found = error(changed(made(tmp_path, chunked), damage))
    assert found.path.endswith("main_data.hdf5") and found.where == where
    assert why in found.why and (found.__cause__ is None) == (damage is not_a_bool) or "OSE" in why


def test_other_files_and_folders_are_refused(tmp_path):
    with h5py.File(tmp_path / "hopper.hdf5", "w") as file:
        file["observations"] = np.zeros((5, 3))
        file["terminals"] = np.zeros(5, bool)
    with pytest.raises(MalformedDataError, match=r"hopper.hdf5.*D4RL's flat layout.*read_d4rl"):
        read_minari(tmp_path / "hopper.hdf5")
    folder = made(tmp_path)
    with pytest.raises(FileNotFoundError, match="main_data.hdf5 is a file; pass the folder that"):
        read_minari(folder / "data" / "main_data.hdf5")
    with pytest.raises(FileNotFoundError, match="no data/main_data.hdf5 in .*; it holds main_data"):
        read_minari(folder / "data")


@pytest.mark.parametrize(
    ("names", "total", "why"),
    [
        ([], 0, "it has no group episode_0, so it holds no episodes"),
        (["0", "1", "3"], 3, "there is no group episode_2, but episode_3"),
        (["1"], 1, "there is no group episode_0, but episode_1"),
        (["0", "1"], 3, "it holds 2 episodes, but its metadata says 3"),
        (["01", "x", "9" * 5000], 0, "it has no group episode_0"),
    ],
)
def test_missing_episodes_are_refused(tmp_path, names, total, why):
    def add(file):
        for name in names:
            fill(file.create_group(f"episode_{name}"))
        file.attrs["total_episodes"] = total

    found = error(made(tmp_path, add, 0))
    assert found.where == "the file" and why in found.why


def attributes(**changes):
    return lambda file: file["episode_0"].attrs.update(changes)


def put(name, value):
    return lambda file: file.__setitem__(name, value)


def test_an_attribute_that_is_a_reference_is_refused(tmp_path):
    folder = made(tmp_path, lambda file: attributes(self=file["episode_0"].ref)(file))
    episodes = read_minari(folder)
    assert len(episodes[0]) == 3
    with pytest.raises(MalformedDataError, match="episode_0: an attribute is a Reference, not a"):
        episodes.attributes(0)


def infos(value):
    """Adds a value as `infos`, or the result of a function of the group."""

    def add(group):
        group["infos"] = value(group) if callable(value) else value

    return add


def dataset(*args, put=None, **options):
    def add(group):
        data = group.create_dataset("infos", *args, **options)
        if put is not None:  # one number, whatever the shape
            data[(0,) * data.ndim] = put(group) if callable(put) else put

    return add


def cycle(group):
    group["infos/a/b"] = np.ones(3)
    group["infos/a/c"] = group["infos"]


def twice(group):
    group["infos/a/x"] = np.ones(3)
    group["infos/b"] = group["infos/a"]


def deep(group):
    group["infos/" + "a/" * 40 + "x"] = np.ones(3)


def virtual(group):
    layout = h5py.VirtualLayout((3,), "i1")
    layout[:] = h5py.VirtualSource("other.h5", "x", shape=(3,), dtype="i1")
    group.create_virtual_dataset("infos", layout)


def other_bytes(group):
    group[b"inf\xffos"] = np.ones(3)


CHUNK = {"shape": (3,), "maxshape": (None,), "chunks": (5 * 10**6,), "compression": "gzip"}
NUMBERS = [{"chunks": (1, 10**6), "compression": "gzip", "put": 1.0}, CHUNK | {"put": 1}]
LINK, ELSEWHERE = "it is a link to another location", "its numbers are in another file"
NO_ROWS, OBJECT = "it is not an array with a row for each step", "its dtype object cannot be"


@pytest.mark.parametrize(
    ("add", "where", "why"),
    [
        (infos(h5py.SoftLink("/episode_0/actions")), "/infos", LINK),
        (infos(h5py.ExternalLink("/etc/passwd", "/x")), "/infos", LINK),
        (cycle, "/infos/a/c", "groups are nested too deeply"),
        (twice, "/infos/b", "groups are nested too deeply"),
        (deep, "/infos" + "/a" * 31, "too deeply"),
        (dataset((3,), "i1", external=[("/etc/passwd", 0, 3)]), "/infos", ELSEWHERE),
        (virtual, "/infos", ELSEWHERE),
        (infos(["a", "b", "c"]), "/infos", OBJECT + " stored in a tensor; to leave the column"),
        (infos(np.array([b"a", b"b", b"c"])), "/infos", "its dtype |S1 cannot be stored in a"),
        (dataset((3,), h5py.vlen_dtype(np.int32), put=[1, 2]), "/infos", OBJECT),
        (infos(3.0), "/infos", NO_ROWS),
        (dataset((3,), "f4"), "/infos", "nothing has been written to it"),
        (dataset((3, 10**9), "f4", **NUMBERS[0]), "/infos", "it takes 12000000000 bytes, of wh"),
        (dataset(dtype="i4", scaleoffset=0, **NUMBERS[1]), "/infos", "it takes 20000000 bytes, of"),
        (infos(np.dtype("f4")), "/infos", "it is not a group"),
        (other_bytes, "", "is not UTF-8"),
    ],
)
def test_entries_other_than_arrays_of_numbers_are_refused(tmp_path, add, where, why):
    folder = made(tmp_path, lambda file: add(file["episode_0"]))
    found = error(folder)
    assert found.where == "episode_0" + where and why in found.why
    if add is not other_bytes:  # left out columns are not checked
        assert len(list(read_minari(folder, columns={"infos": None}))) == 1
