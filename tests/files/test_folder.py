"""Folders that are written atomically."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from raffia.files.folder import locked, read_folder, write_folder
from raffia.tensordict.memmap import DamagedFileError


def write(path, **files):
    contents = {name.replace("_", "."): text.encode() for name, text in files.items()}
    write_folder(path, "letter", 1, contents)


def texts(path):
    folder = read_folder(path, "letter", 1)
    return {name: folder.read(name).decode() for name in folder.files}


def test_round_trip_and_replacement(tmp_path):
    path = tmp_path / "new" / "folder"
    write(path, a_txt="one", b="two")
    assert texts(path) == {"a.txt": "one", "b": "two"}
    written = {"c.txt": lambda target: Path(target).write_text("three")}
    write_folder(path, "letter", 1, written, extras={"n": [1, None]})
    folder = read_folder(path, "letter", 1)
    assert texts(path) == {"c.txt": "three"} and folder.extras == {"n": [1, None]}
    assert folder.path("c.txt").endswith(".txt")
    assert len(os.listdir(path)) == 2, "the files of the write before are still there"


def test_a_failed_write_changes_nothing(tmp_path):
    write(tmp_path, a="one")
    before = sorted(os.listdir(tmp_path))

    def fails(path):
        Path(path).write_text("half")
        raise OSError("the disk is on fire")

    with pytest.raises(OSError, match="fire"):
        write_folder(tmp_path, "letter", 1, {"a": b"two", "b": fails})
    with pytest.raises(TypeError):
        write_folder(tmp_path, "letter", 1, {"a": b"two"}, extras={"no": object()})
    for name in ("", "../a", "a/b", ".hidden", "a b", "ä"):
        with pytest.raises(ValueError, match="must be plain"):
            write_folder(tmp_path, "letter", 1, {name: b""})
    assert sorted(os.listdir(tmp_path)) == before and texts(tmp_path) == {"a": "one"}


def test_an_error_names_another_kind_or_version(tmp_path):
    write(tmp_path, a="one")
    with pytest.raises(ValueError, match="holds 'letter' of version 1, but .* 'parcel' of version"):
        read_folder(tmp_path, "parcel", 1)
    with pytest.raises(ValueError, match="needs 'letter' of version 2"):
        read_folder(tmp_path, "letter", 2)
    with pytest.raises(FileExistsError, match="holds 'letter', which 'parcel' does not replace"):
        write_folder(tmp_path, "parcel", 1, {})
    with pytest.raises(DamagedFileError, match="holds .'a'., but no 'b'"):
        read_folder(tmp_path, "letter", 1).path("b")
    assert texts(tmp_path) == {"a": "one"}


def test_folders_of_others_are_left_alone(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="not a folder"):
        write(tmp_path / "file", a="one")
    with pytest.raises(FileExistsError, match="other files .'file'.*an empty folder"):
        write(tmp_path, a="one")
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(FileNotFoundError, match="no manifest.json"):
        read_folder(tmp_path, "letter", 1)
    with pytest.raises(FileNotFoundError):
        read_folder(tmp_path / "nothing", "letter", 1)


def damage_manifest(path, change):
    manifest = path / "manifest.json"
    record = json.loads(manifest.read_text())
    change(record)
    manifest.write_text(json.dumps(record))


@pytest.mark.parametrize(
    "damage, match",
    [
        (lambda p: next(p.glob("a.raffia*")).write_text("onE"), "not what was saved"),
        (lambda p: next(p.glob("a.raffia*")).write_text("on"), "holds 2 bytes, not 3"),
        (lambda p: next(p.glob("a.raffia*")).unlink(), "missing"),
        (lambda p: (p / "manifest.json").write_text("{"), "not JSON"),
        (lambda p: (p / "manifest.json").write_text("[1]"), "not a record written by raffia"),
        (lambda p: damage_manifest(p, lambda r: r.update(version=2)), "checksum differs"),
        (lambda p: damage_manifest(p, lambda r: r.pop("sha256")), "checksum differs"),
    ],
)
def test_damage_is_found(tmp_path, damage, match):
    write(tmp_path, a="one")
    damage(tmp_path)
    with pytest.raises(DamagedFileError, match=match):
        read_folder(tmp_path, "letter", 1)


def test_files_are_on_disk_before_the_manifest_names_them(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(fd):
        calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")).split(".raffia-")[0])
        fsync(fd)

    def noted_replace(source, target):
        calls.append("->" + os.path.basename(target))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    write(tmp_path / "folder", a="one", b="two")
    at = calls.index("->manifest.json")
    assert {"a", "b"} <= {*calls[:at]} and calls[at - 2] == "folder"
    assert calls[0] == tmp_path.name  # the folder that has the new folder's name
    assert calls[at + 1 :] == ["folder"]


def test_a_child_that_was_forked_during_a_write_does_not_keep_the_lock(tmp_path):
    pids = []

    def forks(path):
        with open(path, "w"):
            pids.append(os.fork())
        if not pids[0]:
            time.sleep(20)
            os._exit(0)

    write_folder(tmp_path, "letter", 1, {"a": forks})
    try:
        write(tmp_path, a="two")  # waits for ever if the child has the lock
        assert texts(tmp_path) == {"a": "two"}
        assert os.waitpid(pids[0], os.WNOHANG) == (0, 0), "the child has ended before"
    finally:
        os.kill(pids[0], signal.SIGKILL)
        os.waitpid(pids[0], 0)


def test_a_writer_waits_for_readers_and_for_other_writers(tmp_path):
    write(tmp_path, a="one")
    for shared in (True, False):
        written = threading.Event()

        def writes(text=f"by {shared}", written=written):
            write(tmp_path, a=text)
            written.set()

        with locked(str(tmp_path), shared=shared):
            thread = threading.Thread(target=writes)
            thread.start()
            assert not written.wait(0.2)
        thread.join(10)
        assert written.is_set() and texts(tmp_path) == {"a": f"by {shared}"}
