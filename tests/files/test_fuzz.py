"""Damaged files of every format: they load as they were written, or raise the one error.

One row for each form of files: what makes it, what reads it, and whether a damage may go unseen, as
where nothing says what a file should hold.
"""

import json
import random
import shutil
import time

import pytest
import torch

from raffia import TensorDict
from raffia.data.memmap_storage import MemmapStorage
from raffia.files import (
    DamagedFileError,
    JsonLines,
    check_manifest,
    dump_json,
    parse_json,
    read_signed,
    signed,
    write_atomically,
    write_json,
    write_manifest,
)
from raffia.files.folder import read_folder, write_folder
from raffia.train.checkpoint import CheckpointError, Checkpoints, read_checkpoint
from tests.files.damages import REPLACEMENTS, changed, damaged, paths_of, put
from tests.tensordict.stored import content as all_of
from tests.tensordict.stored import sample, strided, with_holes

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

SECONDS = 5.0  # of processor time, of one read


def make_json(folder):
    write_json(folder / "x.json", {"a": [1, {"b": None}], "c": "text"})


def make_signed(folder):
    write_atomically(folder / "x", dump_json(signed({"format": "raffia", "a": [1, 2], "b": "c"})))


def make_folder(folder):
    files = {"a.bin": b"0123456789" * 20, "b": b""}
    write_folder(folder, "letter", 1, files, extras={"n": [1, None]})


def read_letter(folder):
    found = read_folder(folder, "letter", 1)
    return found.read("a.bin"), found.read("b"), found.extras


def make_manifest(folder):
    (folder / "in").mkdir()
    (folder / "in" / "a").write_bytes(b"0123456789" * 20)
    write_manifest(folder, ["in/a"])


def read_listed(folder):
    check_manifest(folder)
    return (folder / "in" / "a").read_bytes()


def make_log(folder):
    with JsonLines(folder / "x") as log:
        for i in range(5):
            log.write({"update": i, "text": "abc" * i})


def read_log(folder):
    with JsonLines(folder / "x"):
        pass
    return [json.loads(line) for line in (folder / "x").read_bytes().splitlines()[-1:]]


def tree():
    return TensorDict(a=torch.arange(7.0), b={"c": torch.ones(2, 3), "d": "text"})


def content(td):
    """The whole content of a container, comparable."""
    leaves = td.values(True, True)
    data = [(x.dtype, x.shape, x.numpy().tobytes()) for x in leaves if isinstance(x, torch.Tensor)]
    return data, str(list(td.keys(True))), str(td.select("b", strict=False).to_dict())


def full(fill=1.0):
    """A container with entries of each kind, nested tensors among them."""
    td = sample(fill)
    td["j"], td["r"] = with_holes(), strided()
    return td


def make_rows(folder):
    with MemmapStorage(5, folder) as storage:
        storage.extend(TensorDict(a=torch.arange(7.0), batch_size=[7]))


def read_rows(folder):
    with MemmapStorage.open(folder) as storage:
        return storage.get(storage.rows())["a"].tolist()


def make_checkpoint(folder):
    parts = {"state": tree(), "note": b"hello"}
    Checkpoints(folder).save(3, parts, {"n": [1, {}]})


def read_state(folder):
    found = read_checkpoint(folder / "000000003")
    return content(found.tensors("state")), found.read("note"), found.extras, found.update


def read_mapped(folder):
    return all_of(TensorDict.load_memmap(folder, mode="r"))


def read_saved(folder):
    return content(TensorDict.load(folder / "x.safetensors"))


def read_consolidated(folder):
    return all_of(TensorDict.from_consolidated(folder / "x"))


FORMS = {  # its writer, its reader, whether damage may go unnoticed
    "json": (make_json, lambda f: parse_json("x.json", (f / "x.json").read_bytes()), True),
    "signed": (make_signed, lambda folder: read_signed(folder / "x"), False),
    "folder": (make_folder, read_letter, False),
    "manifest": (make_manifest, read_listed, False),
    "log": (make_log, read_log, True),
    "container folder": (lambda f: full().memmap(f), read_mapped, True),
    "container file": (lambda f: tree().save(f / "x.safetensors"), read_saved, False),
    "consolidated": (lambda f: full().exclude("r").consolidate(f / "x"), read_consolidated, True),
    "rows": (make_rows, read_rows, True),
    "checkpoint": (make_checkpoint, read_state, False),
}
# Files whose loss is no damage: a manifest, a lock.
FREE = {"manifest": ("raffia_manifest.json",), "rows": ("lock", "log.bin")}


@pytest.fixture(params=FORMS)
def form(request, tmp_path):
    make, read, may_load = FORMS[request.param]
    whole = tmp_path / "whole"
    whole.mkdir()
    make(whole)
    return request.param, whole, read, may_load


def attempt(read, folder):
    """The content, or the error, if it is one meant for users; and within a limit of time."""
    start = time.process_time()
    try:
        return read(folder)
    except (DamagedFileError, CheckpointError, FileNotFoundError, ValueError) as error:
        assert 0 < len(str(error)) < 6000
        return error
    finally:
        assert time.process_time() - start < SECONDS


def check(name, expected, found, may_load, part):
    if not isinstance(found, Exception) and part not in FREE.get(name, ()):
        assert may_load or found == expected, f"{part} of {name} was loaded with damage"


def test_bytes_of_any_file(form, tmp_path):
    name, whole, read, may_load = form
    expected, rng, refused = read(whole), random.Random(name), 0
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    for _ in range(80):
        copy = tmp_path / "copy"
        shutil.copytree(whole, copy)
        path = rng.choice(files)
        old = (copy / path).read_bytes()
        (copy / path).write_bytes(damaged(old, rng))
        found = attempt(read, copy)
        refused += isinstance(found, Exception)
        check(name, expected, found, may_load, path.name)
        shutil.rmtree(copy)
    assert refused > 10 or name == "log"


def test_values_of_any_record(form, tmp_path):
    """Also with a right checksum, where a record has one: no value in it is trusted."""
    name, whole, read, _ = form
    records = [path for path in whole.rglob("*") if path.is_file() and is_json(path)]
    rng = random.Random(name)
    for path in sorted(records):
        good, refused = path.read_bytes(), 0
        for _ in range(100):
            document = changed(json.loads(good), rng)
            if isinstance(document, dict) and "sha256" in document and rng.random() < 0.9:
                del document["sha256"]
                document = signed(json.loads(json.dumps(document)))
            path.write_bytes(json.dumps(document).encode())
            refused += isinstance(attempt(read, whole), Exception)
        path.write_bytes(good)
        assert refused or name in ("json", "log")


def is_json(path):
    try:
        return isinstance(json.loads(path.read_bytes()), dict)
    except ValueError:
        return False


@pytest.mark.parametrize("kind", REPLACEMENTS)
def test_a_file_replaced_by_something_else(form, kind, tmp_path):
    name, whole, read, may_load = form
    expected = read(whole)
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    for number, path in enumerate(files):
        copy = tmp_path / str(number)
        shutil.copytree(whole, copy)
        if kind in ("pipe", "device") and name in ("log", "json"):
            continue  # users pass the name of these files themselves
        put(kind, copy / path, tmp_path / f"outside{number}")
        try:
            found = attempt(read, copy)
        except OSError as error:
            found = error
        check(name, expected, found, may_load or kind == "link", path.name)
        if isinstance(found, Exception) and kind != "link":
            continue
        assert kind == "link" or path.name in FREE.get(name, ()) or name == "log", (path, found)


def test_damage_is_of_every_kind():
    draw, text = random.Random(0), b'{"a": 1, "b": [2, 3]}'
    found = {damaged(text, draw) for _ in range(500)}
    assert len(found) > 100 and text[:5] in found and any(len(one) > 3000 for one in found)
    document = {"a": [1, {"b": 2}]}
    assert len([*paths_of(document)]) == 5
    assert len({json.dumps(changed(document, draw)) for _ in range(100)}) > 50
    assert document == {"a": [1, {"b": 2}]}
