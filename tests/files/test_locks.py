"""Locks, also on file systems and operating systems that have none."""

import errno
import os
import subprocess
import sys
import textwrap

import pytest

from raffia.data.memmap_storage import MemmapStorage
from raffia.files import Lock
from raffia.recipes.run_folder import claimed


@pytest.fixture(params=[errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def without_locks(request, monkeypatch):
    import fcntl

    def flock(fd, operation):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)


def test_a_file_system_without_locks_gives_a_note(without_locks, tmp_path):
    with open(tmp_path / "x", "wb") as file:
        lock = Lock(file.fileno())
        assert "this file system has no locks" in lock.missing
        lock.release()
    with claimed(tmp_path) as note:
        assert "Nothing prevents a second process from running" in note


def test_a_storage_works_without_locks_and_warns(without_locks, tmp_path):
    with pytest.warns(UserWarning, match="Nothing prevents a second process from writing there"):
        storage = MemmapStorage(3, tmp_path / "rows")
    storage.close()


def test_a_failed_lock_is_a_single_error(tmp_path, monkeypatch):
    """A storage whose constructor failed must not fail again when it is collected."""
    import fcntl

    def flock(fd, operation):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(fcntl, "flock", flock)
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with pytest.raises(OSError, match="broken"):
        MemmapStorage(3, tmp_path / "rows")
    monkeypatch.setattr(os, "open", lambda *a, **o: (_ for _ in ()).throw(OSError(5, "no file")))
    with pytest.raises(OSError, match="no file"):
        MemmapStorage(3, tmp_path / "rows")
    assert unraisable == []


def test_a_second_holder_is_refused(tmp_path):
    with claimed(tmp_path) as note:
        assert note == ""
        with pytest.raises(RuntimeError, match="run by another process"), claimed(tmp_path):
            pass


@pytest.mark.slow
def test_the_package_imports_on_systems_without_locks(tmp_path):
    """As on Windows, which has no `fcntl` and cannot open folders."""
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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        MemmapStorage(3, sys.argv[1]).close()
    assert "this system has no file locks" in str(caught[0].message), caught
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text), str(tmp_path / "rows")],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-2000:]
