"""Data sets as their own libraries write them: Hugging Face, LeRobot, Minari's tables, D4RL.

The files are made here by the rules of each format: no library of theirs is needed, nor a hub.
"""

import json
import struct

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from raffia.data.readers import (
    MalformedDataError,
    read_d4rl,
    read_episodes,
    read_hugging_face,
    read_json_lines,
    read_lerobot,
    read_minari,
    read_parquet,
)

STEPS = {
    "episode": [0, 0, 0, 1, 1],
    "obs": [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0], [7.0, 7.0], [8.0, 8.0]],
    "action": [0, 1, 2, 1, 0],
    "reward": [0.0, 1.0, 2.0, 5.0, 6.0],
    "terminated": [False, False, True, False, False],
}


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def write_stream(path, columns, **options):
    """Writes Arrow's stream format in batches, as `datasets` does."""
    table = pa.table(columns)
    with pa.ipc.new_stream(str(path), table.schema, **options) as writer:
        writer.write_table(table, max_chunksize=2)


def save_to_disk(folder, *parts):
    folder.mkdir(exist_ok=True)
    names = [f"data-{i:05d}-of-{len(parts):05d}.arrow" for i in range(len(parts))]
    for name, columns in zip(names, parts, strict=True):
        write_stream(folder / name, columns)
    write_json(folder / "state.json", {"_data_files": [{"filename": n} for n in names]})
    write_json(folder / "dataset_info.json", {"features": {}})
    return folder


def part(start, stop):
    return {name: values[start:stop] for name, values in STEPS.items()}


def check_completed(episodes):
    """Checks the episodes of STEPS, with completed entries."""
    first, second = episodes
    assert first["obs"].tolist() == STEPS["obs"][:3]
    # The last step is terminated: its observation replaces the next one.
    assert first["next", "obs"].tolist() == [[1.0, 2.0], [2.0, 3.0], [2.0, 3.0]]
    assert first["terminated"].tolist() == [False, False, True]
    assert first["truncated"].tolist() == [False] * 3
    # The next observation of the last step is unknown, so it is left out.
    assert second["obs"].tolist() == [[7.0, 7.0]] and second["action"].tolist() == [1]
    assert second["next", "obs"].tolist() == [[8.0, 8.0]] and second["reward"].tolist() == [5.0]
    assert second["truncated"].tolist() == [True]


def as_parquet(folder):
    pq.write_table(pa.table(STEPS), folder / "data.parquet")
    return read_parquet(folder / "data.parquet", complete=True)


def as_json_steps(folder):
    rows = [dict(zip(STEPS, row, strict=True)) for row in zip(*STEPS.values(), strict=True)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "data.jsonl").write_text(text, encoding="utf-8-sig")
    return read_json_lines(folder / "data.jsonl", complete=True)


def as_hugging_face(folder):
    return read_hugging_face(save_to_disk(folder, part(0, 2), part(2, 5)), complete=True)


def as_arrow_file(folder):
    """Parquet's reader recognises Arrow's files too, by their first bytes."""
    with pa.ipc.new_file(str(folder / "data.arrow"), pa.table(STEPS).schema) as writer:
        writer.write_table(pa.table(STEPS))
    return read_parquet(folder / "data.arrow", complete=True)


def as_d4rl(folder, **changes):
    names = {"obs": "observations", "action": "actions", "reward": "rewards"}
    names["terminated"] = "terminals"
    columns = {names[n]: np.array(v) for n, v in STEPS.items() if n in names}
    columns["timeouts"] = np.array([False] * 4 + [True])
    with h5py.File(folder / "data.hdf5", "w") as file:
        for name, values in (columns | changes).items():
            if values is not None:
                file[name] = values
        file["metadata/algorithm"] = np.bytes_("SAC")
    return read_d4rl(folder / "data.hdf5")


WRITERS = [as_parquet, as_json_steps, as_hugging_face, as_arrow_file, as_d4rl]


FILE_OF = {as_hugging_face: "", as_json_steps: "data.jsonl", as_d4rl: "data.hdf5"}
FILE_OF |= {as_parquet: "", as_arrow_file: "data.arrow"}


@pytest.mark.parametrize("write", WRITERS)
def test_the_format_follows_from_the_path(write, tmp_path):
    write(tmp_path)
    check_completed(read_episodes(tmp_path / FILE_OF[write], complete=True))
    columns = {"actions" if write is as_d4rl else "action": "do"}
    renamed = read_episodes(tmp_path / FILE_OF[write], complete=True, columns=columns)
    with pytest.raises(MalformedDataError, match="there is no 'action'"):
        list(renamed)
    if write is not as_d4rl:
        with pytest.raises(MalformedDataError, match="no '(truncated|terminated)'"):
            list(read_episodes(tmp_path / FILE_OF[write]))
        unclear = {"complete": True, "columns": {"terminated": "done"}}
        with pytest.raises(MalformedDataError, match="there is 'done', but neither"):
            list(read_episodes(tmp_path / FILE_OF[write], **unclear))


def test_the_format_follows_from_folders_and_ids(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    folder = minari_tables(tmp_path / "toy" / "door-v0")
    for path in (folder, "toy/door-v0"):
        assert [len(episode) for episode in read_episodes(path)] == [3, 3]
    (tmp_path / "flat" / "data").mkdir(parents=True)
    with h5py.File(tmp_path / "flat" / "data" / "main_data.hdf5", "w") as file:
        for name, values in {"observations": [0, 1], "actions": [1], "rewards": [1.0]}.items():
            file[f"episode_0/{name}"] = values
        file["episode_0/terminations"] = file["episode_0/truncations"] = [False]
    for path in (tmp_path / "flat", tmp_path / "flat" / "data" / "main_data.hdf5"):
        (episode,) = read_episodes(path, complete=True)
        assert episode["truncated"].tolist() == [True]
        with pytest.raises(MalformedDataError, match="truncate_unfinished"):
            list(read_episodes(path))
    lerobot(tmp_path / "robot", "v2.1", FILES["v2.1"])
    assert [len(episode) for episode in read_episodes(tmp_path / "robot")] == [2, 1]
    (tmp_path / "notes.txt").write_text("obs")
    with pytest.raises(ValueError, match="notes.txt cannot be recognized from its name. Supported"):
        read_episodes(tmp_path / "notes.txt")
    with pytest.raises(FileNotFoundError, match="no file or folder toy/door-v1, and no Minari"):
        read_episodes("toy/door-v1")
    with pytest.raises(FileNotFoundError, match="no folder toy/door-v1; .* or the id of a dataset"):
        read_minari("toy/door-v1")


# ------------------------------------------------------------------------------ Hugging Face


def test_forms_of_saved_data_sets(tmp_path):
    rows = {"obs": [[[0.0], [1.0], [2.0]]], "action": [[0, 1]], "reward": [[0.0, 1.0]]}
    rows |= {"terminated": [[False, True]], "truncated": [[False, False]]}
    (episode,) = read_hugging_face(save_to_disk(tmp_path / "saved", rows))
    assert episode["next", "obs"].tolist() == [[1.0], [2.0]]
    write_json(tmp_path / "dataset_dict.json", {"splits": ["saved"]})
    with pytest.raises(IsADirectoryError, match=r"one of \['saved'\].*saved'\)"):
        read_hugging_face(tmp_path)


@pytest.mark.parametrize("name", ["../data.arrow", "/etc/passwd", "", 3])
def test_a_state_file_cannot_name_another_folder(tmp_path, name):
    folder = save_to_disk(tmp_path / "saved", part(0, 5))
    write_json(folder / "state.json", {"_data_files": [{"filename": name}]})
    with pytest.raises(MalformedDataError, match="not the name of a file in this folder"):
        read_hugging_face(folder)


# ----------------------------------------------------------------------------------- LeRobot


def lerobot(folder, version, files):
    write_json(folder / "meta" / "info.json", {"codebase_version": version})
    data = folder / "data" / "chunk-000"
    data.mkdir(parents=True)
    for name, rows in files.items():
        rows = rows if isinstance(rows, dict) else {"episode_index": rows}
        count = len(rows["episode_index"])
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2.0 * count)), 2)
        columns = {"observation.state": vectors, "observation.images.top": np.arange(count)}
        columns |= {"action": vectors, "timestamp": np.arange(count) / 10.0}
        columns |= {name: np.arange(count) for name in ("frame_index", "index", "task_index")}
        pq.write_table(pa.table(columns | rows), data / name)
    return folder


FILES = {
    "v2.1": {"episode_000000.parquet": [0, 0, 0], "episode_000001.parquet": [1, 1]},
    "v3.0": {"file-000.parquet": [0, 0, 0, 1], "file-001.parquet": [1]},
}


@pytest.mark.parametrize("version", FILES)
def test_lerobot_in_both_layouts(tmp_path, version):
    episodes = list(read_lerobot(lerobot(tmp_path, version, FILES[version])))
    assert [len(episode) for episode in episodes] == [2, 1]
    first = episodes[0]
    assert first["obs", "state"].tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert first["next", "obs", "state"].tolist() == [[2.0, 3.0], [4.0, 5.0]]
    assert first["next", "obs", "images", "top"].tolist() == [1, 2]
    assert first["reward"].tolist() == [0.0, 0.0] and not first["terminated"].any()
    assert first["truncated"].tolist() == [False, True]
    names = "obs next action timestamp reward terminated truncated"
    assert set(first.keys()) == set(names.split())


def test_folders_without_a_lerobot_data_set_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"meta.info\.json"):
        read_lerobot(tmp_path)
    write_json(tmp_path / "meta" / "info.json", {"codebase_version": "v1.6"})
    with pytest.raises(MalformedDataError, match=r"'v1.6'; supported are \('v2', 'v3'\)"):
        read_lerobot(tmp_path)
    write_json(tmp_path / "meta" / "info.json", {"codebase_version": "v3.0"})
    with pytest.raises(FileNotFoundError, match="no file data/chunk"):
        read_lerobot(tmp_path)


# ------------------------------------------------------------------------------------ Minari


def box(shape):
    return {"type": "Box", "dtype": "float32", "shape": shape}


def fixed(values):
    values = np.asarray(values, np.float32)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values[0].size)


SQUARES = {
    "box": box([2, 2]),
    "bits": {"type": "MultiBinary", "n": [2, 2]},
    "choices": {"type": "MultiDiscrete", "nvec": [[9, 9], [9, 9]]},
}


def minari_tables(folder, kind="arrow", episodes=2, x="box", **changes):
    spaces = {"x": SQUARES[x], "k": {"type": "Discrete", "dtype": "int64", "n": 5}}
    metadata = {"data_format": kind, "total_episodes": episodes}
    metadata["observation_space"] = json.dumps({"type": "Dict", "subspaces": spaces})
    metadata["action_space"] = json.dumps(box([1]))
    write_json(folder / "data" / "metadata.json", metadata | changes)
    speed = pa.field("speed", pa.list_(pa.float32(), 2), metadata={"shape": "2,1"})
    columns = {
        "actions": fixed([[0.0], [1.0], [2.0], [0.0]]),
        "rewards": [0.0, 1.0, 2.0, 0.0],
        "terminations": [False, False, True, False],
        "truncations": [False] * 4,
        "infos": pa.StructArray.from_arrays([fixed(np.arange(8).reshape(4, 2))], fields=[speed]),
    }
    for number in range(episodes):
        x = fixed(np.arange(16).reshape(4, 2, 2) + 100 * number)
        observations = pa.StructArray.from_arrays([x, pa.array([0, 1, 2, 3])], ["x", "k"])
        table = pa.table({"observations": observations, **columns})
        episode_folder = folder / "data" / str(number)
        write_json(episode_folder / "metadata.json", {"id": number, "total_steps": 3, "seed": 7})
        if kind == "parquet":
            pq.write_table(table, episode_folder / "part-0.parquet")
        else:
            with pa.ipc.new_file(str(episode_folder / "part-0.arrow"), table.schema) as writer:
                writer.write_table(table)
    return folder


@pytest.mark.parametrize(
    ("kind", "x"), [("arrow", "box"), ("parquet", "bits"), ("arrow", "choices")]
)
def test_minaris_tables(tmp_path, kind, x):
    episodes = read_minari(minari_tables(tmp_path, kind, x=x))
    assert len(episodes) == 2 and episodes.attributes(1)["seed"] == 7
    assert episodes.metadata["data_format"] == kind
    second = episodes[-1]
    assert second["obs", "x"].shape == (3, 2, 2) and second["obs", "k"].tolist() == [0, 1, 2]
    assert second["next", "obs", "x"][-1].tolist() == [[112.0, 113.0], [114.0, 115.0]]
    assert second["action"].tolist() == [[0.0], [1.0], [2.0]]
    assert second["terminated"].tolist() == [False, False, True]
    assert second["next", "info", "speed"].shape == (3, 2, 1)
    assert [len(episode) for episode in episodes] == [3, 3]


def test_minari_tables_with_other_metadata_are_refused(tmp_path):
    with pytest.raises(MalformedDataError, match="it holds 2 episodes, but its metadata says 3"):
        read_minari(minari_tables(tmp_path / "a", total_episodes=3))
    folder = minari_tables(tmp_path / "b")
    write_json(folder / "data" / "0" / "metadata.json", {"total_steps": 4})
    with pytest.raises(MalformedDataError, match="3 steps, but its attribute total_steps is 4"):
        read_minari(folder)[0]


# -------------------------------------------------------------------------------------- D4RL


def test_d4rl_with_next_observations_loses_no_step(tmp_path):
    after = np.array(STEPS["obs"]) + 1
    first, second = as_d4rl(tmp_path, next_observations=after)
    assert first["next", "obs"].tolist() == after[:3].tolist()
    assert second["next", "obs"].tolist() == after[3:].tolist()
    assert second["truncated"].tolist() == [False, True]


def test_d4rl_without_timeouts_or_with_numbers_as_flags(tmp_path):
    check_completed(as_d4rl(tmp_path, timeouts=None))
    check_completed(as_d4rl(tmp_path, terminals=np.array([0.0, 0.0, 1.0, 0.0, 0.0])))


def test_malformed_d4rl_is_refused(tmp_path):
    for changes, match in [
        ({"terminals": None}, "there is no 'terminated'"),
        ({"rewards": np.zeros(4)}, r"it has \(4,\) rows, but there are 5 steps"),
        ({"timeouts": np.zeros((5, 1), bool)}, "one value for each step"),
        ({"actions": np.array([b"a"] * 5)}, "cannot be stored in a tensor"),
    ]:
        with pytest.raises(MalformedDataError, match=match):
            list(as_d4rl(tmp_path, **changes))


# ------------------------------------------------------------------------------------ attacks


@pytest.fixture
def stream(tmp_path):
    """A saved data set, and the file with its rows."""
    folder = save_to_disk(tmp_path / "saved", part(0, 5))
    return folder, folder / "data-00000-of-00001.arrow"


def test_a_small_stream_that_needs_a_large_memory_is_refused(stream):
    folder, path = stream
    large = {"obs": np.zeros(2**12), "reward": np.zeros(2**12)}
    write_stream(path, large, options=pa.ipc.IpcWriteOptions(compression="zstd"))
    content = bytearray(path.read_bytes())
    at = content.find(struct.pack("<I", 0xFD2FB528)) - 8
    content[at : at + 8] = struct.pack("<q", 2**40)
    path.write_bytes(bytes(content))
    with pytest.raises(MalformedDataError, match="needs a lot of memory"):
        read_hugging_face(folder)


def test_changed_or_missing_bytes_never_crash_the_process(stream):
    folder, path = stream
    content, rng = path.read_bytes(), np.random.default_rng(0)
    for cut in (10, 100, 300):
        path.write_bytes(content[:cut])
        with pytest.raises(MalformedDataError):
            list(read_hugging_face(folder, complete=True))
    for _ in range(200):
        changed = bytearray(content)
        for at in rng.integers(0, len(content), 3):
            changed[at] = rng.integers(256)
        path.write_bytes(bytes(changed))
        try:
            for episode in read_hugging_face(folder, complete=True):
                assert isinstance(episode["reward"], torch.Tensor)
        except (MalformedDataError, OSError):
            pass
