"""`raffia doctor`: its checks on machines that lack something."""

import importlib.util
import io
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
import torch

from raffia.cli import doctor as module
from raffia.cli import main
from raffia.cli.doctor import CORE, EXTRAS, Check, machine_checks, print_doctor


def test_a_disk_that_is_nearly_full_or_cannot_be_written(monkeypatch, tmp_path):
    usage = module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=10**8))
    check = module.disk(tmp_path / "not" / "yet")
    assert check.verdict == "note" and "0.1 GiB free" in check.found
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(module.os, "access", lambda path, mode: False)
    assert "cannot be written" in module.disk(tmp_path).found
    check = module.kernel_cache(tmp_path)
    assert check.verdict == "note" and "NUMBA_CACHE_DIR" in check.fix


PROJECT = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())
PROJECT = PROJECT["project"]


def hide_modules(monkeypatch, *names):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        module.importlib.util, "find_spec", lambda name: None if name in names else find(name)
    )


def checks_by_name():
    return {check.name: check for check in machine_checks()}


def test_the_tables_are_those_of_the_project():
    def names(requirements):
        return {re.match(r"[A-Za-z0-9_-]+", line)[0] for line in requirements}

    assert set(CORE) == names(PROJECT["dependencies"])
    extras = PROJECT["optional-dependencies"]
    for_users = set(re.search(r"\[(.*)\]", extras["all"][0])[1].split(","))
    assert set(EXTRAS) == for_users
    of_gymnasium = {
        "box2d": {"box2d"},
        "video": {"pygame-ce"},
    }  # packages that gymnasium's own extras install
    for extra in for_users:
        ours = names(extras[extra]) - {"gymnasium"}
        assert set(EXTRAS[extra][0]) == ours | of_gymnasium.get(extra, set())


@pytest.mark.slow
def test_doctor_does_not_import_heavy_packages():
    code = """
import sys
from raffia.cli.doctor import print_doctor
status = print_doctor()
heavy = {"ale_py", "matplotlib", "PIL", "h5py", "pyarrow", "gymnasium", "numba", "imageio_ffmpeg"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
sys.exit(status)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"torch {torch.__version__}" in done.stdout and "\033" not in done.stdout


def test_missing_and_broken_packages(monkeypatch):
    with monkeypatch.context() as patch:
        hide_modules(patch, "ale_py", "safetensors", "yaml")
        patch.setitem(sys.modules, "torch", None)
        checks = checks_by_name()
        assert print_doctor(io.StringIO()) == 1
    assert checks["ROMs"].fix == "pip install 'raffia[atari]'"
    packages, torch_check = checks["packages"], checks["torch"]
    assert (packages.verdict, packages.fix) == ("fails", "pip install torch pyyaml safetensors")
    assert torch_check.verdict == "fails" and "cannot be imported" in torch_check.found


@pytest.mark.parametrize(("busy", "verdict"), [(1.9, "ok"), (9.0, "note")])
def test_more_threads_than_cores_and_load(monkeypatch, busy, verdict):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(module, "usable_cores", lambda: 3)
    monkeypatch.setattr(module.os, "getloadavg", lambda: (busy, 0.0, 0.0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "a GPU")
    checks = checks_by_name()
    assert checks["load"].verdict == verdict and checks["torch"].verdict == "note"
    assert "export OMP_NUM_THREADS=3" in checks["torch"].fix
    assert "7 threads on 3 usable cores, GPU: a GPU (--device cuda)" in checks["torch"].found


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_missing_extra_is_a_note_with_the_call(monkeypatch, capsys, extra):
    projects, use = EXTRAS[extra]
    hide_modules(monkeypatch, *projects.values())
    check = checks_by_name()[extra]
    assert check.verdict == "note" and use in check.found
    assert all(project in check.found for project in projects)
    assert check.fix == f"pip install 'raffia[{extra}]'"
    assert main(["doctor"]) == 0
    assert main(["doctor", "--engine.address", "auto"]) == 2
    assert "raffia doctor --engine.name ray --engine.address auto" in capsys.readouterr().err


def test_the_cpu_limit_of_a_container_counts(monkeypatch):
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for text, cores in [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("", 8)]:
        monkeypatch.setattr(pathlib.Path, "read_text", lambda path, text=text: text)
        assert module.usable_cores() == cores


def test_lines_in_colour():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    checks = [Check("a", "ok", "fine"), Check("b", "note", "less", "do this")]
    assert print_doctor(stream, lambda: checks) == 0
    plain = re.sub(r"\033\[[0-9;]*m", "", stream.getvalue())
    assert plain == "ok     a: fine\nnote   b: less\n       do this\n"
    assert "live view" in module.terminal(stream).found


def test_a_kernel_cache_that_others_can_write_is_noted(tmp_path, monkeypatch):
    """Kernels are stored as pickles, which run code when they are loaded."""
    folder = tmp_path / "shared"
    folder.mkdir()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(folder))
    folder.chmod(0o700)
    check = module.kernel_cache(tmp_path)
    assert check.verdict == "ok" and str(folder) in check.found
    for mode in (0o777, 0o1777):
        folder.chmod(mode)
        check = module.kernel_cache(tmp_path)
        assert check.verdict == "note" and "everybody can write" in check.found
        assert "can run code in your processes" in check.fix
    if module.os.getuid() == 0:
        folder.chmod(0o700)
        module.os.chown(folder, 12345, -1)
        assert "another user can write" in module.kernel_cache(tmp_path).found
