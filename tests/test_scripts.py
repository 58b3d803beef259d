"""./demo and ./test against a stub Python: what they install, when, and their messages."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Logs its calls; `-m venv` copies the stub into the new folder; env variables make it fail.
STUB = """#!/bin/sh
echo "$*" >>"$STUB_LOG"
case "$1 ${2-}" in
    --version*) echo "Python 3.9.2" ;;
    "-c "*version_info*) exit "${STUB_TOO_OLD-0}" ;;
    "-c "*ensurepip*) exit "${STUB_NO_VENV-0}" ;;
    "-c "*) echo "stub" ;;
    "-m venv")
        mkdir -p "$3/bin" && touch "$3/pyvenv.cfg"
        cp "$0" "$3/bin/python"
        printf '#!/bin/sh\\necho "ran raffia $*"\\n' >"$3/bin/raffia"
        chmod +x "$3/bin/raffia" ;;
    "-m pip") exit "${STUB_PIP_FAILS-0}" ;;
    "-m mypy") exit "${STUB_MYPY_FAILS-0}" ;;
    "scripts/mutants.py --sample") exit "${STUB_MUTANT_LIVES-0}" ;;
esac
"""


class Checkout:
    def __init__(self, folder: Path):
        self.root = folder / "a checkout"
        self.log = folder / "log"
        (folder / "bin").mkdir()
        stub = folder / "bin" / "python3"
        stub.write_text(STUB)
        stub.chmod(0o755)
        (self.root / "scripts").mkdir(parents=True)
        for name in ["demo", "test", "scripts/venv.sh", "pyproject.toml", "constraints.txt"]:
            shutil.copy(ROOT / name, self.root / name)
        self.path = f"{folder / 'bin'}:{os.environ['PATH']}"

    def run(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a script of the checkout from another folder; `calls` has the stub's `-m` calls."""
        self.log.write_text("")
        clean = {k: v for k, v in os.environ.items() if k not in ("RAFFIA_VENV", "PYTHON")}
        result = subprocess.run(
            [str(self.root / command[0]), *command[1:]],
            env={**clean, "PATH": self.path, "STUB_LOG": str(self.log), **env},
            cwd=self.log.parent,
            capture_output=True,
            text=True,
            timeout=20,
        )
        self.calls = [line for line in self.log.read_text().splitlines() if line.startswith("-m ")]
        return result

    @property
    def installed(self) -> list[str]:
        return [line.split()[-1] for line in self.calls if line.startswith("-m pip install")]


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


@pytest.mark.parametrize("name", ["demo", "test", "scripts/venv.sh", ".ci/run"])
def test_syntax(name):
    subprocess.run(["bash" if name == ".ci/run" else "sh", "-n", ROOT / name], check=True)
    assert name.startswith("scripts") or os.access(ROOT / name, os.X_OK)


def test_demo_can_use_the_installation_of_test_but_not_vice_versa(checkout):
    for name, installed in (("demo", [".[report]"]), ("test", [".[dev]"]), ("demo", [])):
        checkout.run(name)
        assert checkout.installed == installed


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"STUB_TOO_OLD": "1"}, "python3 is Python 3.9.2; Raffia needs 3.11 or newer"),
        ({"STUB_TOO_OLD": "1"}, "PYTHON=python3.11"),
        ({"PYTHON": "python3.x"}, "no python3.x here; install Python 3.11 or newer"),
        ({"STUB_NO_VENV": "1"}, "apt-get install python3-venv"),
    ],
)
def test_the_error_for_an_unsuitable_python_names_the_fix(env, message, checkout):
    result = checkout.run("test", **env)
    assert result.returncode == 1 and message in result.stderr
    assert checkout.calls == []


def test_second_demo_installs_nothing(checkout):
    first = checkout.run("demo", "--seed", "3")
    assert first.returncode == 0, first.stderr
    assert checkout.installed == [".[report]"]
    assert "-c constraints.txt" in checkout.calls[1]
    assert first.stdout.endswith("ran raffia demo --seed 3\n")

    second = checkout.run("demo")
    assert checkout.calls == []
    assert second.stdout.endswith("ran raffia demo\n")


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_changed_file_installs_again(checkout, name):
    checkout.run("demo")
    with open(checkout.root / name, "a") as file:
        file.write("# changed\n")
    checkout.run("demo")
    assert checkout.installed == [".[report]"]
    checkout.run("demo")
    assert checkout.installed == []


def test_a_moved_checkout_installs_again(checkout):
    checkout.run("demo")
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    checkout.run("demo")
    assert checkout.installed == [".[report]"]


def test_a_failed_installation_is_done_again(checkout):
    checkout.run("demo")
    constraints = checkout.root / "constraints.txt"
    before = constraints.read_text()
    constraints.write_text(before + "# changed\n")
    failed = checkout.run("demo", STUB_PIP_FAILS="1")
    assert failed.returncode == 1 and "ran raffia" not in failed.stdout
    constraints.write_text(before)  # the old stamp must not be valid again
    checkout.run("demo")
    assert checkout.installed == [".[report]"]


def test_a_failed_check_does_not_hide_the_others_and_fails(checkout):
    result = checkout.run("test", STUB_MYPY_FAILS="1")
    assert checkout.calls[-1] == "-m pytest -n auto -m not slow"
    assert result.returncode == 1
    assert result.stderr == "failed: [mypy]\n"


def test_the_environment_can_be_in_another_folder(checkout, tmp_path):
    checkout.run("demo", RAFFIA_VENV=str(tmp_path / "else where"))
    assert (tmp_path / "else where" / "raffia-stamp").exists()
    assert not (checkout.root / ".venv").exists()
    checkout.run("demo", RAFFIA_VENV="else where")  # relative to the caller's folder
    assert checkout.calls == []


def test_a_foreign_folder_is_left_alone(checkout, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").touch()
    result = checkout.run("demo", RAFFIA_VENV=str(tmp_path / "home"))
    assert result.returncode == 1
    assert "is not a virtual environment" in result.stderr
    assert checkout.calls == []


class TestWhatIsRun:
    @pytest.mark.parametrize(
        ("args", "ends", "texts"),
        [
            ([], "-m not slow", ["The fast checks", "About 4 to 5 minutes", "./test --all"]),
            (["--all", "-x"], "--dist worksteal -x", ["All checks", "About 30 minutes"]),
        ],
    )
    def test_the_fast_set_is_the_default_and_says_so_first(self, args, ends, texts, checkout):
        done = checkout.run("test", *args)
        assert done.returncode == 0, done.stderr
        assert checkout.calls[-1] == f"-m pytest -n auto {ends}"
        first = done.stdout.partition("+ ")[0]
        assert all(text in first for text in texts)

    def test_a_sample_of_mutants_is_judged_by_all_checks_only(self, checkout):
        judged = "scripts/mutants.py --sample 6"
        assert checkout.run("test", "--all").returncode == 0
        assert checkout.log.read_text().splitlines()[-1] == judged
        done = checkout.run("test", "--all", STUB_MUTANT_LIVES="1")
        assert done.returncode == 1 and done.stderr == "failed: [mutants]\n"
        checkout.run("test")
        assert judged not in checkout.log.read_text()
        assert "./test --all" in (ROOT / ".ci" / "run").read_text()

    def test_every_check_is_run_and_other_arguments_go_to_pytest(self, checkout):
        result = checkout.run("test", "-k", "a and b", "-x")
        assert result.returncode == 0, result.stderr
        checks = [line for line in checkout.calls if "venv" not in line and "pip" not in line]
        assert checks == [
            "-m ruff check .",
            "-m ruff format --check .",
            "-m mypy",
            "-m pytest -n auto -m not slow -k a and b -x",
        ]
        done = checkout.run("test", "--help")
        assert "--all" in done.stdout and checkout.calls == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "texts"),
    [
        ("house.py", ["code lines: ", "  train\n", "cycles between files:", "private members"]),
        ("walks.py", ["env to batch: ", "dialogues to ILQL's loss: ", " rooms, "]),
    ],
)
def test_figures_of_the_source_are_printed(script, texts):
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / script], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    for text in texts:
        assert text in done.stdout
