"""What holds for episodes from every format."""

import os
import pickle
import re
import subprocess
import sys
import textwrap

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

COLUMNS = ["obs", "action", "reward", "terminated", "truncated"]


def entries(td):
    return {
        unravel_key_to_tuple(key): value
        for key, value in td.items(include_nested=True, leaves_only=True)
    }


def error(form, path, **options):
    with pytest.raises(MalformedDataError) as caught:
        list(form.read(path, **options))
    assert str(caught.value) == f"{caught.value.path}: {caught.value.where}: {caught.value.why}"
    assert os.path.isfile(caught.value.path)
    return caught.value


def test_episodes_are_read_as_they_were_written(form, folder, episode, flattened, next_of):
    written = [episode(3), episode(1, seed=1), episode(4, seed=2)]
    episodes = form.read(form.write(folder, written))
    for _ in range(2):  # as often as one likes
        found = list(episodes)
        assert len(found) == 3
        for td, source in zip(found, written, strict=True):
            assert td.batch_size == (len(source["reward"]),)
            expected = {path: torch.from_numpy(v) for path, v in flattened(next_of(source))}
            assert entries(td).keys() == expected.keys()
            for key, value in entries(td).items():
                assert value.dtype == expected[key].dtype, key
                assert torch.equal(value, expected[key]), key


def test_changing_an_observation_leaves_the_next_one_as_it_is(form, folder, simple):
    (td,) = form.read(form.write(folder, [simple(3)]))
    before = td["next", "obs"].clone()
    td["obs"].zero_()
    assert torch.equal(td["next", "obs"], before)


def test_columns_are_renamed_and_left_out(form, folder, simple):
    source = simple(2)
    source["state"] = source.pop("obs")
    source["note"] = np.array([3, 4])
    path = form.write(folder, [source])
    if form.by_step:
        (td,) = form.read(path, columns={"state": "obs", ("next", "state"): ("next", "obs")})
    else:
        (td,) = form.read(path, columns={"state": "obs"})
    assert torch.equal(td["next", "obs"], torch.from_numpy(source["state"][1:]))
    assert td["note"].tolist() == [3, 4]
    columns = {"state": ("obs", "state"), "note": None, ("next", "state"): ("next", "obs", "state")}
    if not form.by_step:
        del columns["next", "state"]
    (td,) = form.read(path, columns=columns)
    assert td["obs", "state"].shape == (2, 2) and "note" not in td.keys()


def test_a_part_of_a_nested_column_is_renamed_or_left_out(form, folder, episode):
    path = form.write(folder, [episode(2)])
    obs, info = form.column("obs"), form.column("info")
    columns = {(obs, "image", "left"): ("obs", "left"), (info, "speed"): None}
    if form.by_step:
        columns |= {("next", "obs", "image"): ("next", "obs"), ("next", "info"): None}
    (td,) = form.read(path, columns=columns)
    assert sorted(td["obs"].keys()) == ["left", "pos"] == sorted(td["next", "obs"].keys())
    assert "info" not in td.keys()


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"stat": "obs"}, r"no column 'stat', which `columns` names, only 'action'|'actions'"),
        ({"weight": "extra", "more": "extra"}, "two columns are called 'extra'"),
        ({"weight": ("more", "weight")}, r"'more' is a column, so it can't hold"),
    ],
)
def test_names_that_do_not_fit_the_file_are_refused(form, folder, simple, columns, why):
    path = form.write(folder, [simple(2, weight=np.ones(2), more=np.ones(2))])
    with pytest.raises(MalformedDataError, match=why):
        list(form.read(path, columns=columns))


@pytest.mark.parametrize("name", [3, ("a", 3), (), ""])
def test_a_new_name_is_a_key(form, folder, simple, name):
    path = form.write(folder, [simple(2)])
    with pytest.raises((TypeError, KeyError), match="string"):
        form.read(path, columns={"obs": name})


@pytest.mark.parametrize("name", COLUMNS)
def test_a_missing_column_is_named(form, folder, simple, name):
    source = simple(2)
    here = form.column(name)
    found = error(form, form.write(folder, [source]), columns={here: None})
    assert f"there is no '{name}', only " in found.why
    assert f"columns={{<its name>: '{name}'}}" in found.why


@pytest.mark.parametrize("name", ["done", "dones"])
def test_an_end_of_which_no_kind_is_said(form, folder, simple, name):
    path = form.write(folder, [simple(2), simple(3)])
    flags = {form.column("terminated"): name, form.column("truncated"): None}
    found = error(form, path, columns=flags)
    assert f"there is '{name}', and neither 'terminated' nor 'truncated'" in found.why
    assert f"columns={{'{name}': 'terminated'}}" in found.why


def test_done_means_terminated_where_the_caller_says_so(form, folder, simple, monkeypatch):
    for episode in (source := [simple(2), simple(3)]):
        episode["terminated"] = np.arange(len(episode["terminated"])) == len(episode["reward"]) - 1
        episode["truncated"] = np.zeros_like(episode["terminated"])
    path = form.write(folder, source)
    # the same file, whose column of ends has the name that others give it
    monkeypatch.setattr("raffia.data.readers.episode.DONE", (form.column("terminated"),))
    flags = {form.column("terminated"): "terminated", form.column("truncated"): None}
    for td, expected in zip(form.read(path, columns=flags), source, strict=True):
        assert td["terminated"].tolist() == expected["terminated"].tolist()
        assert not td["truncated"].any() and td["truncated"].dtype is torch.bool


def test_a_missing_last_observation_is_named(form, folder, simple):
    source = simple(3)
    source["obs"] = source["obs"][:3]
    found = error(form, form.write(folder, [source]))
    assert "no ('next', 'obs'): the observation after the last step is missing" in found.why


def test_observations_given_twice_are_refused(whole, folder, simple):
    source = simple(3)
    source["next"] = {"obs": source["obs"][1:]}
    found = error(whole, whole.write(folder, [source]))
    assert "gives once more; leave one of them out" in found.why


def test_a_next_observation_unlike_the_observation_is_refused(form, folder, simple):
    source = simple(3)
    source["next"] = {"obs": np.zeros((3, 4), np.float32)}
    source["obs"] = source["obs"][:3]
    found = error(form, form.write(folder, [source]))
    assert "shape [4]" in found.why and "shape [2]" in found.why
    source["next"] = {"obs": source["obs"], "extra": np.ones(3), "obs2": np.ones(3)}
    (td,) = form.read(form.write(folder, [source]))
    assert sorted(td["next"].keys()) == ["extra", "obs", "obs2"]
    source["obs"], source["next"]["obs"] = {"a": source["obs"]}, {"a": source["obs"]}
    source["next"]["obs"]["b"] = np.ones(3)
    assert "no ('obs', 'b') before it" in error(form, form.write(folder, [source])).why


@pytest.mark.parametrize("name", ["action", "terminated", "truncated", "obs", "weight"])
@pytest.mark.parametrize("change", [-1, 2])
def test_lengths_that_disagree_are_refused(whole, folder, simple, name, change):
    source = simple(3, weight=np.ones(3))
    source[name] = np.resize(source[name], (len(source[name]) + change, *source[name].shape[1:]))
    found = error(whole, whole.write(folder, [simple(2, weight=np.ones(2)), source]))
    if name == "obs" and change == -1:
        assert "the observation after the last step is missing" in found.why
    else:
        assert f"it has {len(source[name])} rows, which should be 3" in found.why
        assert "there are 3 rewards" in found.why
    assert whole.column(name) in found.where and found.where.startswith(
        whole.where(1, 2, 0, "").partition(",")[0]
    )


@pytest.mark.parametrize("name", ["action", "terminated", "truncated"])
def test_only_what_goes_with_the_observations_has_a_row_more(whole, folder, simple, name):
    source = simple(3)
    source[name] = np.append(source[name], source[name][:1])
    found = error(whole, whole.write(folder, [source]))
    assert found.why == "it has 4 rows, which should be 3: there are 3 rewards"


@pytest.mark.parametrize(
    "more",
    [
        {"next": np.ones(3)},
        {"next": {"more": np.ones(3)}, "more": {"x": np.ones(4)}},
    ],
)
def test_a_column_holds_no_other(whole, folder, simple, more):
    found = error(whole, whole.write(folder, [simple(3, **more)]))
    assert "is a column, so it can't hold" in found.why


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("reward", np.ones((3, 1), np.float32), r"shape \[1\]; a reward is one real number a step"),
        ("reward", np.ones(3, np.bool_), "one real number a step|true or false"),
        ("terminated", np.array([0, 0, 1]), "one true or false a step"),
        ("truncated", np.array([0.0, 0.0, 0.0]), "one true or false a step"),
        ("truncated", np.array([[False]] * 3), "one true or false a step"),
    ],
)
def test_rewards_are_numbers_and_ends_are_true_or_false(form, folder, simple, name, values, why):
    if name == "reward" and values.ndim == 2 and form.by_step:
        why = "is an episode, as the list of rewards shows"
    found = error(form, form.write(folder, [simple(3, **{name: values})]))
    assert re.search(why, found.why)


@pytest.mark.parametrize("name", ["obs", "reward"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused_unless_asked_for(form, folder, simple, name, bad):
    source = simple(3)
    source[name][1] = bad
    path = form.write(folder, [simple(2), source])
    found = error(form, path)
    column = "next.obs" if form.by_step and name == "obs" else name
    step = 0 if form.by_step and name == "obs" else 1
    accepted = [form.where(1, 2, step, column), form.where(1, 2, 1, name)]
    assert found.where in accepted
    assert found.why == f"it holds {bad}; to take NaN and infinity: allow_nan=True"
    td = list(form.read(path, allow_nan=True))[1]
    assert torch.equal(td[name].isfinite(), torch.from_numpy(np.isfinite(source[name][:3])))


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_an_episode_ends_at_its_last_step_only(form, folder, simple, flag):
    source = simple(4)
    source[flag][1] = True
    found = error(form, form.write(folder, [simple(2), source]))
    assert found.where == form.where(1, 2, 1, "")
    assert found.why == "the episode ends here, but 2 more of its steps follow"


def test_an_unfinished_episode_is_refused_or_truncated(form, folder, simple):
    source = simple(3)
    source["terminated"][-1] = False
    path = form.write(folder, [simple(2), source])
    found = error(form, path)
    assert found.where == form.where(1, 2, 2, "")
    assert "neither terminated nor truncated" in found.why
    assert "truncate_unfinished=True" in found.why
    one, other = form.read(path, truncate_unfinished=True)
    assert one["truncated"].tolist() == [False] * 2  # it has terminated
    assert other["truncated"].tolist() == [False, False, True]


@pytest.mark.parametrize("name", ["obs", "action", "weight"])
def test_all_episodes_have_rows_of_one_shape(form, folder, simple, name):
    def source(steps, width):
        rows = steps + (name == "obs")
        return simple(steps, **{"weight": np.ones(steps), name: np.ones((rows, width))})

    path = form.write(folder, [source(2, 3), source(3, 4)])
    found = error(form, path)
    assert found.where.startswith(form.where(1, 2, 0, "").partition(",")[0]) or form.by_step
    assert ("4" in found.why or "4" in found.where) and "3" in found.why


@pytest.mark.parametrize("name", ["json episodes", "json steps", "minari"])
def test_all_episodes_have_the_same_columns(formats, name, folder, simple):
    form = formats[name]
    more, less = simple(2, weight=np.ones(2)), simple(3)
    for pair in [more, less], [less, more]:
        found = error(form, form.write(folder, pair))
        assert "weight" in found.why + found.where
        assert "first" in found.why


def test_observations_without_any_numbers(form, folder, simple):
    (td,) = form.read(form.write(folder, [simple(2, obs=np.zeros((3, 0), np.float32))]))
    assert td["obs"].shape == (2, 0) and td["obs"].dtype is torch.float32


def test_what_is_not_there_or_a_folder_is_said(form, folder):
    with pytest.raises(FileNotFoundError, match="there is no (file|folder) .*absent"):
        form.read(folder / "absent")
    if form.read is not read_minari:
        with pytest.raises(IsADirectoryError, match="is a folder; give the file"):
            form.read(folder)


def test_a_reader_can_be_sent_to_another_process(form, folder, simple):
    episodes = form.read(form.write(folder, [simple(2), simple(3)]))
    next(iter(episodes))
    again = pickle.loads(pickle.dumps(episodes))
    assert [len(td) for td in again] == [2, 3]
    assert type(episodes).__name__ in repr(episodes) and str(folder) in repr(episodes)


def test_the_error_can_be_sent_to_another_process():
    found = pickle.loads(pickle.dumps(MalformedDataError("a", "line 1", "it is blank")))
    assert (found.path, found.where, found.why) == ("a", "line 1", "it is blank")
    assert isinstance(found, ValueError) and str(found) == "a: line 1: it is blank"


def test_episodes_can_be_written_and_read_as_json_lines(form, folder, episode):
    first = list(form.read(form.write(folder, [episode(3), episode(2, seed=1)])))
    for name in "again.jsonl", "again.jsonl.gz":
        write_json_lines(folder / name, first)
        again = list(read_json_lines(folder / name))
        for one, other in zip(first, again, strict=True):
            assert entries(one).keys() == entries(other).keys()
            assert (one == other).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "package", "extra"),
    [(read_minari, "h5py", "hdf5"), (read_parquet, "pyarrow", "parquet")],
)
def test_a_package_that_is_not_installed_is_named(monkeypatch, folder, call, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=rf"{package}.*pip install 'raffia\[{extra}\]'"):
        call(folder)


@pytest.mark.slow
def test_importing_the_readers_imports_no_optional_package():
    code = """
    import sys
    import raffia.data.readers
    assert not {"h5py", "pyarrow", "numba", "pandas"} & set(sys.modules)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
