"""Properties of episodes from every format."""

import os
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from raffia.data.readers import (
    MalformedDataError,
    read_json_lines,
    read_minari,
    read_parquet,
    write_json_lines,
)
from raffia.tensordict.keys import unravel_key_to_tuple
from tests.data.readers.forms import FORMATS, flat, make_episode, simple, with_next


def entries(td):
    return {
        unravel_key_to_tuple(key): value
        for key, value in td.items(include_nested=True, leaves_only=True)
    }


def error(form, path, **options):
    with pytest.raises(MalformedDataError) as caught:
        list(form.read(path, **options))
    found = caught.value
    assert str(found) == f"{found.path}: {found.where}: {found.why}"
    assert os.path.isfile(found.path) and isinstance(found, ValueError)
    again = pickle.loads(pickle.dumps(found))
    assert (again.path, again.where, again.why) == (found.path, found.where, found.why)
    return found


def test_episodes_are_read_as_they_were_written(form, tmp_path):
    written = [make_episode(3), make_episode(1, 1), make_episode(4, 2)]
    episodes = form.read(form.write(tmp_path, written))
    for name in (None, "again.jsonl", "again.jsonl.gz"):
        if name:
            write_json_lines(tmp_path / name, episodes)
        sent = pickle.loads(pickle.dumps(episodes))
        for reader in (episodes, sent, read_json_lines(tmp_path / name) if name else episodes):
            for td, source in zip(reader, written, strict=True):
                assert td.batch_size == (len(source["reward"]),)
                expected = {path: torch.from_numpy(v) for path, v in flat(with_next(source))}
                assert entries(td).keys() == expected.keys()
                for key, value in entries(td).items():
                    assert value.dtype == expected[key].dtype, key
                    assert torch.equal(value, expected[key]), key
    assert type(episodes).__name__ in repr(episodes) and str(tmp_path) in repr(episodes)
    before = td["next", "obs", "pos"].clone()
    td["obs", "pos"].zero_()  # the next one is unchanged
    assert torch.equal(td["next", "obs", "pos"], before)


def test_columns_and_their_parts_are_renamed_and_left_out(form, tmp_path):
    source = simple(2, note=np.array([3, 4]))
    source["state"] = source.pop("obs")
    path = form.write(tmp_path, [source])
    after = {("next", "state"): ("next", "obs")} if form.by_step else {}
    (td,) = form.read(path, columns={"state": "obs", **after})
    assert torch.equal(td["next", "obs"], torch.from_numpy(source["state"][1:]))
    assert td["note"].tolist() == [3, 4]
    after = {("next", "state"): ("next", "obs", "state")} if form.by_step else {}
    (td,) = form.read(path, columns={"state": ("obs", "state"), "note": None, **after})
    assert td["obs", "state"].shape == (2, 2) and "note" not in td.keys()
    path = form.write(tmp_path, [make_episode(2)])
    obs, info = form.column("obs"), form.column("info")
    columns = {(obs, "image", "left"): ("obs", "left"), (info, "speed"): None}
    if form.by_step:
        columns |= {("next", "obs", "image"): ("next", "obs"), ("next", "info"): None}
    (td,) = form.read(path, columns=columns)
    assert sorted(td["obs"].keys()) == ["left", "pos"] == sorted(td["next", "obs"].keys())
    assert "info" not in td.keys()
    for name in (3, ("a", 3), ()):
        with pytest.raises((TypeError, KeyError), match="string"):
            form.read(path, columns={"obs": name})


def test_done_is_terminated_if_the_caller_maps_it(form, tmp_path, monkeypatch):
    source = [simple(2), simple(4, seed=2)]
    path = form.write(tmp_path, source)
    # the same file, whose column of ends has another common name
    monkeypatch.setattr("raffia.data.readers.episode.DONE", (form.column("terminated"),))
    flags = {form.column("terminated"): "terminated", form.column("truncated"): None}
    for td, expected in zip(form.read(path, columns=flags), source, strict=True):
        assert td["terminated"].tolist() == expected["terminated"].tolist()
        assert not td["truncated"].any() and td["truncated"].dtype is torch.bool


# --------------------------------------------------------------------------------------- errors

ONES = np.ones(3)


def ends_early(source):
    source["truncated"][1] = True
    return source


def never_ends(source):
    source["terminated"][-1] = False
    return source


def next_of(**values):
    return lambda s: {**s, "obs": s["obs"][:3], "next": {"obs": s["obs"][:3], **values}}


def with_part_after(source):
    obs = source["obs"][:3]
    return {**source, "obs": {"a": obs}, "next": {"obs": {"a": obs, "b": ONES}}}


def resized(name, change):
    def apply(source):
        x = source[name]
        return {**source, name: np.resize(x, (len(x) + change, *x.shape[1:]))}

    return apply


def of(**changes):
    return lambda source: {**source, **changes}


MISSING = r"no \('next', 'obs'\): the observation after the last step is missing"
FLAG = "one true or false for each step"
NO_COLUMN = "is a column, so it cannot contain"
BAD = {  # in any format: the change of an episode of three steps, and the error
    "early end": (ends_early, "the episode ends here, but 1 more of its steps follow"),
    "no end": (never_ends, "neither terminated nor truncated.*truncate_unfinished=True"),
    "no last observation": (lambda s: {**s, "obs": s["obs"][:3]}, MISSING),
    "next of another shape": (next_of(obs=np.zeros((3, 4), "f4")), r"shape \[4\].*shape \[2\]"),
    "more next than before": (with_part_after, r"no entry \('obs', 'b'\) to go with it"),
    "rewards [1]": (of(reward=ONES[:, None]), r"shape \[1\]; a reward must be one real|list of"),
    "true rewards": (of(reward=ONES > 0), "one real number for each step|true or false"),
    "ends as integers": (of(terminated=np.array([0, 0, 1])), FLAG),
    "ends as fractions": (of(truncated=np.zeros(3)), FLAG),
    "ends [1]": (of(truncated=np.array([[False]] * 3)), FLAG),
    "another width": (of(obs=np.ones((4, 4), "f4")), r"\b4\b"),
}
LENGTH = "it has {} rows, but should have 3( or 4)?: there are 3 rewards"
BAD_WHOLE = {  # where an episode is in one piece
    **{
        f"{name} {change:+}": (
            resized(name, change),
            MISSING if (name, change) == ("obs", -1) else LENGTH.format(rows + change),
        )
        for name, rows in (("action", 3), ("terminated", 3), ("truncated", 3), ("obs", 4))
        for change in (-1, 2)
    },
    "observations twice": (lambda s: {**s, "next": {"obs": s["obs"][1:]}}, "repeats what .* leave"),
    "next is a column": (of(next=ONES), NO_COLUMN),
    "next is taken": (of(next={"more": ONES}, more={"x": np.ones(4)}), NO_COLUMN),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_episodes_are_refused(form, tmp_path, kind):
    change, words = BAD[kind]
    second = kind in ("early end", "no end", "another width")
    found = error(form, form.write(tmp_path, [simple(2)] * second + [change(simple(3))]))
    assert re.search(words, found.why + found.where)
    if kind in ("early end", "no end"):
        assert found.where == form.where(1, 2, 1 if kind == "early end" else 2, "")


@pytest.mark.parametrize("kind", BAD_WHOLE)
def test_bad_episodes_with_t_plus_1_observations_are_refused(whole, tmp_path, kind):
    change, words = BAD_WHOLE[kind]
    second = "1" in kind or "2" in kind
    found = error(whole, whole.write(tmp_path, [simple(2)] * second + [change(simple(3))]))
    assert re.search(words, found.why)
    if second:
        assert found.where.startswith(whole.where(1, 2, 0, "").partition(",")[0])


DONE = r"there is 'done', but neither .*columns={'done': 'terminated'}"
MISFITS = [
    ({"stat": "obs"}, r"no column 'stat', which `columns` names; only 'action'|'actions'"),
    ({"weight": "extra", "more": "extra"}, "two columns have the name 'extra'"),
    ({"weight": ("more", "weight")}, r"'more' is a column, so it cannot contain"),
    ({"terminated": "done", "truncated": None}, DONE),
    *[
        ({name: None}, rf"there is no '{name}', only .*columns={{<its name>: '{name}'}}")
        for name in ("obs", "action", "reward", "terminated", "truncated")
    ],
]


def test_columns_that_do_not_fit_the_file_are_refused(form, tmp_path):
    path = form.write(tmp_path, [simple(2, weight=np.ones(2), more=np.ones(2))])
    for columns, why in MISFITS:
        columns = {form.column(name): value for name, value in columns.items()}
        assert re.search(why, error(form, path, columns=columns).why)


def test_unfinished_episodes_and_unusual_columns_can_be_read(form, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no (file|folder) .*absent"):
        form.read(tmp_path / "absent")
    if form.read is not read_minari:
        with pytest.raises(IsADirectoryError, match="is a folder; pass the file"):
            form.read(tmp_path)
    path = form.write(tmp_path, [simple(2), never_ends(simple(3))])
    one, other = form.read(path, truncate_unfinished=True)
    assert one["truncated"].tolist() == [False] * 2  # it has terminated
    assert other["truncated"].tolist() == [False, False, True]
    (td,) = form.read(form.write(tmp_path, [next_of(extra=ONES, obs2=ONES)(simple(3))]))
    assert sorted(td["next"].keys()) == ["extra", "obs", "obs2"]
    (td,) = form.read(form.write(tmp_path, [simple(2, obs=np.zeros((3, 0), np.float32))]))
    assert td["obs"].shape == (2, 0) and td["obs"].dtype is torch.float32


@pytest.mark.parametrize("name", ["json episodes", "json steps", "minari"])
def test_all_episodes_have_the_same_columns(name, tmp_path):
    form = FORMATS[name]
    more, less = simple(2, weight=np.ones(2)), simple(3)
    for pair in [more, less], [less, more]:
        found = error(form, form.write(tmp_path, pair))
        assert "weight" in found.why + found.where and "first" in found.why


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "package", "extra"),
    [(read_minari, "h5py", "hdf5"), (read_parquet, "pyarrow", "parquet")],
)
def test_a_package_that_is_not_installed_is_named(monkeypatch, tmp_path, call, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=rf"{package}.*pip install 'raffia\[{extra}\]'"):
        call(tmp_path)


@pytest.mark.slow
def test_importing_the_readers_imports_no_optional_package():
    code = "import sys, raffia.data.readers\n"
    code += "assert not {'h5py', 'pyarrow', 'numba', 'pandas'} & set(sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
