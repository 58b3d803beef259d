"""The same episodes in every format: as nested dicts of arrays, and as files."""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raffia.data.readers import read_json_lines, read_minari, read_parquet

OURS = "obs action reward terminated truncated info"
THEIRS = "observations actions rewards terminations truncations infos"
MINARI = dict(zip(OURS.split(), THEIRS.split(), strict=True))


def flat(tree, prefix=()):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, (*prefix, name))
        else:
            yield (*prefix, name), value


def nested(entries):
    tree = {}
    for path, value in entries:
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    return tree


def lists(tree):
    return nested((path, value.tolist()) for path, value in flat(tree))


def with_next(episode):
    """Instead of T + 1 observations, T and as many next ones."""
    steps = len(episode["reward"])
    found = []
    for path, value in flat(episode):
        found.append((path, value[:steps]))
        if len(value) == steps + 1:
            found.append((("next", *path), value[1:]))
    return nested(found)


def steps_of(episode, number):
    entries = list(flat(with_next(episode)))
    for t in range(len(episode["reward"])):
        yield {"episode": number} | nested((path, value[t].tolist()) for path, value in entries)


def write_json_episodes(folder, episodes):
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(lists(e)) + "\n" for e in episodes))
    return path


def write_gzip_episodes(folder, episodes):
    path = write_json_episodes(folder, episodes)
    path.write_bytes(gzip.compress(path.read_bytes()))
    return path


def write_json_steps(folder, episodes):
    path = folder / "data.jsonl"
    rows = [row for i, e in enumerate(episodes) for row in steps_of(e, f"e{i}")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_minari(folder, episodes):
    (folder / "data").mkdir(exist_ok=True)
    with h5py.File(folder / "data" / "main_data.hdf5", "w") as file:
        for number, episode in enumerate(episodes):
            group = file.create_group(f"episode_{number}")
            group.attrs.update(id=number, total_steps=len(episode["reward"]), seed=7)
            for path, value in flat(episode):
                group["/".join((MINARI.get(path[0], path[0]), *path[1:]))] = value
    return folder


def arrow_type(value, ndim):
    kind = pa.from_numpy_dtype(value.dtype)
    for _ in range(ndim):
        kind = pa.list_(kind)
    return kind


def struct_type(tree, dims):
    kinds = {
        name: struct_type(x, dims) if isinstance(x, dict) else arrow_type(x, x.ndim - dims)
        for name, x in tree.items()
    }
    return pa.struct(kinds.items())


def write_parquet_episodes(folder, episodes):
    path = folder / "data.parquet"
    schema = pa.schema(struct_type(episodes[0], 0))
    pq.write_table(pa.Table.from_pylist([lists(e) for e in episodes], schema), path)
    return path


def write_parquet_steps(folder, episodes):
    path = folder / "data.parquet"
    kind = struct_type(with_next(episodes[0]), 1)
    schema = pa.schema([("episode", pa.int32()), *kind])
    rows = [row for i, e in enumerate(episodes) for row in steps_of(e, i)]
    pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=3)
    return path


@dataclass
class Format:
    """A file format of episodes.

    where: number of the episode, its first step in the file, step, column -> its place in errors.
    """

    write: Callable
    read: Callable
    where: Callable
    by_step: bool = False

    def column(self, name):
        return MINARI.get(name, name) if self.read is read_minari else name


def quoted(column):
    return column and f", '{column}'"


def in_group(episode, first, step, column):
    column = column and "/" + MINARI.get(column, column)
    return f"episode_{episode}{column}, step {step}"


def in_line(episode, first, step, column):
    return f"line {episode + 1}{quoted(column)}, step {step}"


FORMATS = {
    "json episodes": Format(write_json_episodes, read_json_lines, in_line),
    "gzip": Format(write_gzip_episodes, read_json_lines, in_line),
    "json steps": Format(
        write_json_steps, read_json_lines, lambda _, f, t, c: f"line {f + t + 1}{quoted(c)}", True
    ),
    "minari": Format(write_minari, read_minari, in_group),
    "parquet episodes": Format(
        write_parquet_episodes, read_parquet, lambda e, _, t, c: f"row {e}{quoted(c)}, step {t}"
    ),
    "parquet steps": Format(
        write_parquet_steps, read_parquet, lambda _, f, t, c: f"row {f + t}{quoted(c)}", True
    ),
}


def make_episode(steps, seed=0):
    """An episode as nested dicts of arrays, [steps + 1] for entries of observations."""
    rng = np.random.default_rng(seed)
    last = np.arange(steps) == steps - 1
    return {
        "obs": {
            "pos": rng.normal(size=(steps + 1, 2)).astype(np.float32),
            "image": {"left": rng.integers(0, 255, (steps + 1, 3, 5))},
        },
        "action": rng.integers(0, 4, steps),
        "reward": rng.normal(size=steps).astype(np.float32),
        "terminated": last & (seed % 2 == 0),
        "truncated": last & (seed % 2 == 1),
        "info": {"speed": rng.normal(size=(steps + 1)).astype(np.float32)},
        "weight": rng.normal(size=(steps, 1)).astype(np.float32),
    }


def simple(steps, seed=0, **changes):
    """An episode with a flat observation only."""
    whole = make_episode(steps, seed)
    part = {k: whole[k] for k in ("action", "reward", "terminated", "truncated")}
    return {"obs": whole["obs"]["pos"], **part, **changes}
