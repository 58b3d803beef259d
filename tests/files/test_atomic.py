"""Files and folders that are written atomically, and checked when they are read."""

import os
from pathlib import Path

import pytest

from raffia.files import (
    DamagedFileError,
    check_manifest,
    foreign_reader,
    is_free,
    make_folder,
    new_folder,
    open_plain,
    parse_json,
    replaced,
    write_atomically,
    write_json,
    write_manifest,
)


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(KeyError), replaced(path) as temporary:
        Path(temporary).write_bytes(b"half")
        raise KeyError
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]
    with replaced(path) as temporary:
        Path(temporary).write_bytes(b"new")
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["x"]
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(OSError, match="cannot replace a folder or a device"):
            write_atomically(other, b"new")
    assert (tmp_path / "pipe").is_fifo() and len(os.listdir(tmp_path)) == 2


def test_a_file_is_synced_before_it_is_renamed_and_its_folder_afterwards(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace

    def noted(fd):
        done.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def renamed(old, new):
        done.append((old, new))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", renamed)
    path = tmp_path / "x"
    for content in (b"new", lambda file: file.write(b"new")):
        done.clear()
        write_atomically(path, content)
        (_, temporary), rename, name = done
        assert rename == (temporary, str(path)) and name == ("fsync", str(tmp_path))
        assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["x"]
    done.clear()
    write_atomically(path, b"newer", is_synced=False)
    [(_, new)] = done
    assert new == str(path) and path.read_bytes() == b"newer"


def test_the_parents_of_new_folders_are_synced(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    for _ in range(2):
        make_folder(tmp_path / "a" / "b")
        assert synced == [str(tmp_path), str(tmp_path / "a")]


def test_a_folder_with_only_temporary_files_of_a_killed_process_counts_as_empty(tmp_path):
    (tmp_path / ".0123456789ab.tmp").touch()
    assert is_free(tmp_path / "nowhere") and is_free(tmp_path)
    (tmp_path / ".mine.tmp").touch()
    assert not is_free(tmp_path) and not is_free(tmp_path / ".mine.tmp")


def test_a_folder_appears_completely_or_not_at_all(tmp_path):
    with pytest.raises(KeyError), new_folder(tmp_path / "in" / "x") as temporary:
        (Path(temporary) / "a").write_bytes(b"half")
        raise KeyError
    assert os.listdir(tmp_path / "in") == []
    with new_folder(tmp_path / "in" / "x") as temporary:
        (Path(temporary) / "deep").mkdir()
        (Path(temporary) / "deep" / "a").write_bytes(b"new")
    assert (tmp_path / "in" / "x" / "deep" / "a").read_bytes() == b"new"
    with pytest.raises(OSError), new_folder(tmp_path / "in" / "x"):
        pass
    assert os.listdir(tmp_path / "in") == ["x"] and os.listdir(tmp_path / "in" / "x") == ["deep"]


def test_json_of_any_text_is_written_and_invalid_json_is_damaged(tmp_path):
    content = {"a": "é", "half of a pair": "\ud800"}
    write_json(tmp_path / "x", content)
    assert parse_json("x", (tmp_path / "x").read_bytes()) == content
    for text in (b"{", b"\xff", b'{"a": 1, "a": 2}', b"[" * 200 + b"]" * 200):
        with pytest.raises(DamagedFileError, match="^x.json: it is n"):
            parse_json("x.json", text)


def test_an_error_of_a_reader_becomes_damage_and_an_error_of_the_system_stays():
    class NoStr(Exception):
        def __str__(self):
            raise ValueError

    for error in (KeyError("a"), TypeError("b" * 10**6), RecursionError(), OSError("c"), NoStr()):
        with pytest.raises(DamagedFileError) as info, foreign_reader("x"):
            raise error
        assert str(info.value).startswith("x: it cannot be read: ") and len(str(info.value)) < 400
    for own in (FileNotFoundError(2, "no"), PermissionError(13, "no"), MemoryError()):
        with pytest.raises(type(own)), foreign_reader("x"):
            raise own


def test_a_manifest_finds_every_change(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("a", "in/b"):
        (tmp_path / name).write_bytes(b"0123")
    check_manifest(tmp_path)  # there is none
    write_manifest(tmp_path, ["a", "in/b"])
    check_manifest(tmp_path)
    (tmp_path / "in" / "b").write_bytes(b"0124")
    check_manifest(tmp_path, ["a", "other"])
    with pytest.raises(DamagedFileError, match="in/b: its content is not what"):
        check_manifest(tmp_path)
    (tmp_path / "in" / "b").unlink()
    with pytest.raises(DamagedFileError, match="in/b: it is missing"):
        check_manifest(tmp_path)
    manifest = tmp_path / "raffia_manifest.json"
    manifest.write_text(manifest.read_text().replace('"bytes": 4', '"bytes": 5', 1))
    with pytest.raises(DamagedFileError, match="the checksum differs"):
        check_manifest(tmp_path, [])


def test_only_plain_files_are_opened(tmp_path):
    write_atomically(tmp_path / "x", b"new")
    os.symlink(tmp_path / "x", tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    os.symlink("/dev/zero", tmp_path / "device")
    with open_plain(tmp_path / "x") as file:
        assert file.read() == b"new"
    for name in ("link", "pipe", "device"):
        with pytest.raises(DamagedFileError, match="not a regular file"):
            open_plain(tmp_path / name)
    with pytest.raises(DamagedFileError):
        open_plain("/dev/null")
