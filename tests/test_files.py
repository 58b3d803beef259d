"""How files are written, locked and read; and that nothing but a few files of the source writes."""

import ast
import errno
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from raffia.data.memmap_storage import MemmapStorage
from raffia.files import (
    DamagedFileError,
    Lock,
    check_manifest,
    foreign_reader,
    is_free,
    make_folder,
    open_plain,
    parse_json,
    replaced,
    write_atomically,
    write_json,
    write_manifest,
)
from raffia.recipes.run_folder import claimed

SOURCE = Path(__file__).parents[1] / "src" / "raffia"

# Who may write, and why not by `write_atomically`.
WRITERS = {
    "files.py": "the writer itself",
    "data/folder.py": "files of folders whose manifest comes last; removes what is no longer named",
    "lm/data/token_store.py": "... files of such a folder, written in turn as rows come",
    "data/memmap_files.py": "files that stay mapped: made with their room, never replaced",
    "data/row_files.py": "... removed with their storage",
    "data/torchrl_storages.py": "... in a temporary folder, removed with their storage",
    "tensordict/memmap.py": "... of a container",
    "tensordict/disk.py": "... the record goes first, so that no half of it loads",
    "distributed/process.py": "frees shared memory",
    "train/appended.py": "files that only grow",
    "train/metrics.py": "... cut after the last whole row",
    "train/events.py": "... cut after the last whole record",
    "train/replay_log.py": "removes rows that no checkpoint names",
    "train/checkpoint.py": "removes checkpoints, their manifest first",
    "lm/folder.py": "safetensors to the place that `replaced` gives",
    "recipes/ilql/export.py": "... and a folder that appears at once",
    "recipes/run_folder.py": "removes what a killed process left in a new run's folder",
    "algorithms/ilql/agent_files.py": "safetensors within such a folder",
    "draw/png.py": "matplotlib, into the file that `write_atomically` gives",
    "cli/commands.py": "streams of this process: no files",
}
CALLS = {
    *("write_text", "write_bytes", "savefig", "savez", "savetxt", "tofile", "dump_file"),
    *("save_pretrained", "ftruncate", "truncate", "posix_fallocate", "unlink", "rmtree", "rmdir"),
    *("removedirs", "symlink", "link", "mkdtemp", "mkstemp", "NamedTemporaryFile", "copyfile"),
    *("copytree", "copy2", "makedirs", "mkdir", "writelines_to"),
}
DOTTED = {
    *("os.replace", "os.rename", "os.renames", "os.remove", "shutil.move", "shutil.copy"),
    *("np.save", "numpy.save", "torch.save", "json.dump", "safetensors.torch.save_file"),
}
# Names of functions of `raffia.tensordict.disk` and `safetensors.torch`; the first is a writer.
NAMES = {"save_file"}
OPENERS = {"open", "io.open", "os.fdopen", "gzip.open", "bz2.open", "lzma.open"}


def dotted(node):
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{dotted(value)}.{name}"
    return "?"


def writes(text):
    """The calls in a source that write, make or remove files: (line, what)."""
    found, ours = [], set()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("raffia."):
            ours |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        last = name.rpartition(".")[2]
        place = 0 if isinstance(node.func, ast.Attribute) and name not in OPENERS else 1
        modes = [a.value for a in node.args[place : place + 1] if isinstance(a, ast.Constant)]
        modes += [
            key.value.value
            for key in node.keywords
            if key.arg == "mode" and isinstance(key.value, ast.Constant)
        ]
        is_writing = any(
            isinstance(mode, str) and set(mode) & set("wax+") and set(mode) <= set("rwaxbt+")
            for mode in modes
        )
        if name in OPENERS or (last == "open" and isinstance(node.func, ast.Attribute)):
            if is_writing and name != "os.open":
                found.append((node.lineno, f"{name}(..., {modes})"))
            elif name == "os.open" and any("O_" in ast.unparse(a) for a in node.args[1:]):
                flags = ast.unparse(node.args[1])
                if any(flag in flags for flag in ("O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC")):
                    found.append((node.lineno, f"os.open(..., {flags})"))
        elif last in CALLS and isinstance(node.func, ast.Attribute) or name in DOTTED:
            found.append((node.lineno, name))
        elif name in NAMES and name not in ours:
            found.append((node.lineno, name))
    return found


def test_nothing_else_writes():
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        if there := writes(path.read_text()):
            found[path.relative_to(SOURCE).as_posix()] = there
    others = {name: there for name, there in found.items() if name not in WRITERS}
    assert not others, f"write by raffia.files.write_atomically: {others}"
    assert not WRITERS.keys() - found.keys(), "these write no longer"


@pytest.mark.parametrize(
    "line",
    [
        "Path('x').write_text('a')",
        "path.write_bytes(b'a')",
        "open('x', 'w')",
        "open('x', mode='ab')",
        "with path.open('xb') as file: pass",
        "with open(path, 'rb+') as file: pass",
        "os.open('x', os.O_WRONLY | os.O_CREAT)",
        "os.replace('a', 'b')",
        "np.save('x', a)",
        "torch.save(a, 'x')",
        "json.dump(a, file)",
        "from safetensors.torch import save_file\nsave_file(a, 'x')",
        "model.save_pretrained('x')",
        "figure.savefig('x')",
        "shutil.rmtree('x')",
        "gzip.open('x', 'wb')",
    ],
)
def test_the_test_sees_writers(line):
    assert len(writes(line)) == 1


def test_the_test_passes_readers_and_our_own_writer():
    text = """
    from raffia.tensordict.disk import save_file
    open("x"); open("x", "rb"); path.open("r"); os.open("x", os.O_RDONLY); Store.open(folder)
    save_file(td, "x"); "a".replace("b", "w"); open(path, encoding="utf-8"); write_atomically(p, b)
    """
    assert writes(textwrap.dedent(text)) == []


# -- written


def test_what_is_replaced_is_there_at_the_end_or_not_at_all(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(KeyError), replaced(path) as there:
        Path(there).write_bytes(b"half")
        raise KeyError
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]
    with replaced(path) as there:
        Path(there).write_bytes(b"new")
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["x"]


def test_a_file_is_on_disk_before_it_has_its_name_and_then_the_name_is(tmp_path, monkeypatch):
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


def test_the_names_of_new_folders_are_brought_to_disk(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def noted(fd):
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    make_folder(tmp_path / "a" / "b")
    assert synced == [str(tmp_path), str(tmp_path / "a")]
    make_folder(tmp_path / "a" / "b")
    assert len(synced) == 2


def test_a_folder_with_what_a_killed_process_left_is_free(tmp_path):
    assert is_free(tmp_path / "nowhere") and is_free(tmp_path)
    (tmp_path / ".0123456789ab.tmp").touch()
    assert is_free(tmp_path)
    (tmp_path / ".mine.tmp").touch()
    assert not is_free(tmp_path) and not is_free(tmp_path / ".mine.tmp")


def test_json_of_any_text_can_be_written(tmp_path):
    write_json(tmp_path / "x", {"a": "é"})
    assert json.loads((tmp_path / "x").read_text()) == {"a": "é"}


# -- read


@pytest.mark.parametrize("text", [b"{", b"\xff", b'{"a": 1, "a": 2}', b"[" * 200 + b"]" * 200])
def test_what_is_no_json_is_damaged(text):
    with pytest.raises(DamagedFileError, match="^x.json: it is n"):
        parse_json("x.json", text)
    assert isinstance(DamagedFileError("x", "y"), (ValueError, RuntimeError))


def test_a_foreign_error_names_the_file_and_the_systems_own_stays():
    class Odd(Exception):
        def __str__(self):
            raise ValueError

    for error in (KeyError("a"), TypeError("b" * 10**6), RecursionError(), OSError("c"), Odd()):
        with pytest.raises(DamagedFileError) as seen, foreign_reader("x"):
            raise error
        assert str(seen.value).startswith("x: it can't be read: ") and len(str(seen.value)) < 400
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
        with pytest.raises(DamagedFileError, match="no plain file"):
            open_plain(tmp_path / name)
    with pytest.raises(DamagedFileError):
        open_plain("/dev/null")


# -- locked


@pytest.fixture(params=[errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def without_locks(request, monkeypatch):
    import fcntl

    def flock(fd, how):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)


def test_a_file_system_without_locks_is_told_of(without_locks, tmp_path):
    with open(tmp_path / "x", "wb") as file:
        lock = Lock(file.fileno())
        assert "this file system has no locks" in lock.missing
        lock.release()
    with claimed(tmp_path) as told:
        assert "Nothing keeps a second process from the same run" in told


def test_rows_are_kept_where_there_are_no_locks(without_locks, tmp_path):
    with pytest.warns(UserWarning, match="Nothing keeps a second process from writing there"):
        storage = MemmapStorage(3, tmp_path / "rows")
    storage.close()


def test_a_lock_that_fails_is_one_error(tmp_path, monkeypatch):
    """A storage whose making failed must not fail once more when it is forgotten."""
    import fcntl

    def flock(fd, how):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(fcntl, "flock", flock)
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    with pytest.raises(OSError, match="broken"):
        MemmapStorage(3, tmp_path / "rows")
    monkeypatch.setattr(os, "open", lambda *a, **o: (_ for _ in ()).throw(OSError(5, "no file")))
    with pytest.raises(OSError, match="no file"):
        MemmapStorage(3, tmp_path / "rows")
    assert seen == []


def test_a_second_holder_is_refused(tmp_path):
    with claimed(tmp_path) as told:
        assert told == ""
        with pytest.raises(RuntimeError, match="run by another process"), claimed(tmp_path):
            pass


@pytest.mark.slow
def test_the_package_imports_on_systems_without_locks(tmp_path):
    """As on Windows, where there is no `fcntl`, and no folder can be opened."""
    text = """
    import sys
    import importlib, os, pkgutil, raffia, numba, torch
    sys.modules["fcntl"] = None
    del os.register_at_fork, os.posix_fallocate
    for found in pkgutil.walk_packages(raffia.__path__, "raffia."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    import warnings
    from raffia.data.memmap_storage import MemmapStorage
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        MemmapStorage(3, sys.argv[1]).close()
    assert "this system has no locks" in str(told[0].message), told
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text), str(tmp_path / "rows")],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-2000:]
