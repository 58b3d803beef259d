"""Non-tensor values of memory-mapped containers: written under a lock, and shared on request."""

import copy
import json
import multiprocessing
import os
import pickle
import threading
from pathlib import Path

import pytest
import torch

from raffia import MetaData, NonTensorData, TensorDict, tensorclass
from raffia.files import TemporaryFolder
from tests.tensordict.invariants import sound
from tests.tensordict.stored import through_torch

FORK = multiprocessing.get_context("fork")


def sample():
    inner = TensorDict(text="inner", batch_size=[2])
    return TensorDict(text="a", rows=["x", "y"], n=inner, a=torch.zeros(2), batch_size=[2])


def mapped(folder, method="memmap", **options):
    td = sample()
    td.set("meta", MetaData({"lr": 1}))
    return getattr(td, method)(folder, share_non_tensor=True, **options)


def values(td):
    return td["text"], list(td["rows"]), td["n", "text"], td["meta"]


CHANGES = {
    "set_": lambda td: td.set_("text", "b"),
    "set_ of a stack": lambda td: td.set_("rows", ["p", "q"]),
    "set_at_": lambda td: td.set_at_("rows", "z", 0),
    "a list written through": lambda td: td["rows"].__setitem__(1, "z"),
    "a row": lambda td: td.get("rows")[1].update("z"),
    "update_": lambda td: td.update_({"text": "c"}),
    "update in place": lambda td: td.update({"n": {"text": "d"}}, inplace=True),
    "the entry": lambda td: setattr(td.get("text"), "data", "e"),
    "another type": lambda td: td.set_("text", ("a", 1.5, None)),
    "metadata": lambda td: td.set_("meta", MetaData({"lr": 2})),
}


@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize("method", ["memmap", "memmap_", "memmap_like", "save"])
def test_changes_are_visible_to_all_that_share(tmp_path, folder, method):
    td = mapped(tmp_path / "td" if folder or method == "save" else None, method)
    others = {"pickled": pickle.loads(pickle.dumps(td))}
    if folder:
        others["loaded"] = TensorDict.load_memmap(tmp_path / "td")
    assert all([values(other) == values(td) for other in others.values()])
    for name, change in CHANGES.items():
        for who, other in list(others.items()):
            before = values(td)
            change(other)
            assert values(other) != before, name
            assert values(td) == values(other), f"{name}, {who}"
            for key, value in zip(("text", ("n", "text")), before[::2], strict=True):
                td.set_(key, value)
            td.set_("rows", before[1]), td.set_("meta", before[3])
            assert values(other) == before, f"back after {name}, {who}"
    assert all([sound(one) for one in (td, *others.values())])


def test_a_forked_process_shares_values():
    td = mapped(None)
    worker = FORK.Process(target=lambda: [change(td) for change in CHANGES.values()])
    worker.start(), worker.join()
    assert worker.exitcode == 0
    assert values(td) == (("a", 1.5, None), ["z", "z"], "d", {"lr": 2})


def run_and_join(workers):
    [worker.start() for worker in workers], [worker.join() for worker in workers]


def test_no_change_of_two_processes_is_lost(tmp_path):
    for at, (kind, num) in enumerate(((FORK.Process, 100), (threading.Thread, 50))):
        td = mapped(tmp_path / f"{at}")
        td.set_("rows", [0, 0])

        def count(row, td=td, num=num):
            for _ in range(num):
                td["rows"][row] = td["rows"][row] + 1

        run_and_join([kind(target=count, args=(row,)) for row in range(2)])
        assert td["rows"] == [num, num]


def test_no_entry_of_one_record_is_lost_without_sharing(tmp_path):
    td = TensorDict().set_non_tensor("a", 0).set_non_tensor("b", 0).memmap(tmp_path)

    def count(name):
        for i in range(100):
            td.set_(name, i)

    run_and_join([FORK.Process(target=count, args=(name,)) for name in "ab"])
    assert TensorDict.load(tmp_path).to_dict() == {"a": 99, "b": 99}
    assert td.to_dict() == {"a": 0, "b": 0}  # unchanged since the processes got the container


def test_changes_in_quick_succession_of_equal_length(tmp_path):
    """The inode of a replaced file is reused by the next but one."""
    td, other = mapped(tmp_path), TensorDict.load_memmap(tmp_path)
    for i in range(100):
        other.set_("text", i % 10)
        if i % 2:
            assert td["text"] == i % 10


def test_a_value_that_json_cannot_represent_changes_nothing(tmp_path):
    td = mapped(tmp_path)
    plain = sample().memmap(tmp_path / "plain")
    for one in (td, plain):
        for key in ("text", "rows"):
            with pytest.raises(TypeError, match="can't be stored on disk"):
                one.set_(key, object())
        assert one["text"] == "a" and one["rows"] == ["x", "y"]
    td.set_("text", "b")
    assert TensorDict.load(tmp_path)["text"] == "b"


def test_which_values_are_not_shared(tmp_path):
    td = mapped(tmp_path)
    to_read = TensorDict.load_memmap(tmp_path, mode="r")
    copies = [td.clone(), td[0][None].expand(2), to_read, through_torch(td)]
    td.set_("text", "b")
    assert [copy.get("text").tolist() for copy in copies] == [["a", "a"]] * 4
    for one in copies:
        if not one.is_locked:
            one.set_("text", "c")
    assert td["text"] == "b"
    alone = sample().memmap(tmp_path / "alone")
    other = pickle.loads(pickle.dumps(alone))
    alone.set_("text", "b")
    assert other["text"] == "a" and TensorDict.load(tmp_path / "alone")["text"] == "b"


def test_tensorclasses_and_stacks(tmp_path):
    td = torch.stack([Named(text="a"), Named(text="b")])
    lazy = TensorDict.lazy_stack([TensorDict(text="a"), TensorDict(text="b", other=1)])
    for i, one in enumerate((td, lazy)):
        one = one.memmap(tmp_path / str(i), share_non_tensor=True)
        other = TensorDict.load_memmap(tmp_path / str(i))
        other.set_("text", ["c", "d"])
        assert list(one["text"] if i else one.text) == ["c", "d"]


@tensorclass
class Named:
    text: str


def test_a_row_and_its_copies(tmp_path):
    td = mapped(tmp_path / "td")
    row = td.get("rows").tensordicts[0]
    copies = [copy.copy(row), copy.deepcopy(row), pickle.loads(pickle.dumps(row)), row.clone()]
    copies += [copy.copy(td.get("rows"))[0], td.get("rows").clone()[0]]
    TensorDict.load_memmap(tmp_path / "td").set_("rows", ["p", "q"])
    assert row.data == "p"
    assert [one.data for one in copies] == ["x"] * len(copies)
    td.unlock_()
    td.get("rows").append(NonTensorData("z", device=td.device))
    assert td["rows"] == ["p", "q", "z"]
    with pytest.raises(AttributeError, match="'_data' yet"):
        _ = object.__new__(NonTensorData).data


def test_one_value_stays_one_for_all_rows(tmp_path):
    td = mapped(tmp_path)
    with pytest.raises(RuntimeError, match="maybe_to_stack"):
        td[0] = td[0].clone().update({"text": "b"})
    alone = sample().memmap(tmp_path / "alone")
    alone[0] = alone[0].clone().update({"text": "b"})
    assert TensorDict.load(tmp_path / "alone").get("text").tolist() == ["b", "a"]
    alone.set_at_("text", "c", 1)
    assert TensorDict.load(tmp_path / "alone").get("text").tolist() == ["b", "c"]


def test_another_form_is_an_error_that_names_the_call(tmp_path):
    td = mapped(tmp_path)
    sample().update({"text": ["a", "b"]}).memmap(tmp_path)
    with pytest.raises(RuntimeError, match="memmap_refresh_"):
        td["text"]
    assert td.memmap_refresh_()["text"] == ["a", "b"]
    td = mapped(tmp_path)
    (tmp_path / "meta.json").unlink()
    with pytest.raises(FileNotFoundError, match="interrupted"):
        td["rows"]


def test_files_are_closed_and_removed(tmp_path):
    def num_open():
        return len(os.listdir("/proc/self/fd"))

    before, td = num_open(), mapped(None)
    for i in range(20):
        td.set_("text", i), td["text"], td["rows"], td["n", "text"]
    folder = Path(td.get("text")._home.folder)
    assert num_open() - before <= 8 and folder.is_dir()
    del td
    assert num_open() == before and not folder.exists()
    path = TemporaryFolder()
    child = FORK.Process(target=lambda: None)
    child.start(), child.join()
    assert Path(path).is_dir()


def test_a_single_file_shares_no_values(tmp_path):
    with pytest.raises(ValueError, match="share_non_tensor"):
        sample().save(tmp_path / "td.safetensors", share_non_tensor=True)


def test_the_record_marks_shared_values(tmp_path):
    mapped(tmp_path)
    entries = json.loads((tmp_path / "meta.json").read_text())["entries"]
    assert entries["text"]["shared"] is True and "shared" not in entries["a"]
    assert mapped(tmp_path).make_memmap("new", (2,)).shape == (2,)
    assert TensorDict.load(tmp_path)["text"] == "a"
