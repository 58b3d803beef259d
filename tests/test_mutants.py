"""scripts/mutants.py: its list fits the source, and it reports which mutants are killed."""

import runpy
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "mutants.py"
MUTANTS = runpy.run_path(str(SCRIPT), run_name="mutants")
LIST = MUTANTS["read_mutants"](ROOT)


def ids(mutant):
    return mutant.name


class TestTheList:
    def test_has_a_hundred_over_all_rooms(self):
        rooms = Counter(Path(mutant.file).with_suffix("").parts[1] for mutant in LIST)
        assert len(LIST) >= 100
        learnt = "algorithms data distributed envs evolution functional jit learner lm nn recipes"
        others = "cli draw files report search sweep tensordict train"
        assert set(rooms) >= {*learnt.split(), *others.split()}

    @pytest.mark.parametrize("mutant", LIST, ids=ids)
    def test_applies_once_and_compiles(self, mutant):
        compile(MUTANTS["mutated"](mutant, ROOT), mutant.file, "exec")

    @pytest.mark.parametrize("mutant", LIST, ids=ids)
    def test_names_tests_that_exist(self, mutant):
        assert mutant.tests
        for test in mutant.tests:
            file, *names = test.partition("[")[0].split("::")
            text = (ROOT / file).read_text()
            for name in names:
                assert f"def {name}(" in text or f"class {name}" in text, test


SOURCE = """
def larger(a, b):
    return a if a > b else b


def waits(seconds):
    return seconds - 1


unused = 1
"""
TESTS = """
from tiny import larger, waits


def test_larger():
    assert larger(1, 2) == 2


def test_waits():
    seconds = 3
    while seconds:
        seconds = waits(seconds)
"""
MUTANT_LIST = """
[[mutant]]
name = "the-smaller-one"
file = "tiny/__init__.py"
old = "a > b"
new = "a < b"
tests = ["tests/test_tiny.py::test_larger"]

[[mutant]]
name = "nobody-looks"
file = "tiny/__init__.py"
old = "unused = 1"
new = "unused = 2"
tests = ["tests/test_tiny.py"]
"""
MORE = """
[[mutant]]
name = "{name}"
file = "tiny/__init__.py"
old = "{old}"
new = "{new}"
tests = ["tests/test_tiny.py::test_waits"]
"""


@pytest.fixture
def tiny(tmp_path):
    """A tree with a package of a few lines."""
    for folder in ("src/tiny", "tests", "scripts", ".venv"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "src" / "tiny" / "__init__.py").write_text(SOURCE)
    (tmp_path / "tests" / "test_tiny.py").write_text(TESTS)
    (tmp_path / "scripts" / "mutants.toml").write_text(MUTANT_LIST)
    shutil.copy(SCRIPT, tmp_path / "scripts")
    return tmp_path


def run(tree, *args):
    return subprocess.run(
        [sys.executable, tree / "scripts" / "mutants.py", *args],
        capture_output=True,
        text=True,
        timeout=60,
    )


def files(tree):
    return {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}


def row(done, name):
    """A line of the table."""
    return next(line for line in done.stdout.splitlines() if line.startswith(f"{name} ")).split()


class TestTheScript:
    @pytest.mark.slow
    def test_reports_each_outcome_and_leaves_the_tree_alone(self, tiny):
        with open(tiny / "scripts" / "mutants.toml", "a") as file:
            file.write(MORE.format(name="twice", old="return", new="yield"))
            file.write(MORE.format(name="gone", old="no such text", new=""))
            file.write(MORE.format(name="no-module", old="unused = 1", new="1 / 0"))
        before = files(tiny)
        done = run(tiny)
        assert done.returncode == 1, done.stderr
        assert row(done, "the-smaller-one")[1:] == ["killed", "tests/test_tiny.py::test_larger"]
        assert row(done, "nobody-looks")[1] == "alive" and row(done, "no-module")[1] == "broken"
        for name, times in (("twice", 2), ("gone", 0)):
            reason = f"does not apply its old text is there {times} times"
            assert " ".join(row(done, name)[1:]).startswith(reason)
        assert "[5/5] " in done.stdout and "1 of 5 mutants were killed" in done.stdout
        assert files(tiny) == before

    @pytest.mark.slow
    def test_all_killed_is_a_success(self, tiny):
        done = run(tiny, "--only", "the-smaller-one")
        assert done.returncode == 0, done.stderr
        assert "1 of 1 mutants were killed" in done.stdout

    @pytest.mark.slow
    def test_a_hanging_mutant_is_killed_by_time(self, tiny):
        with open(tiny / "scripts" / "mutants.toml", "a") as file:
            file.write(MORE.format(name="for-ever", old="seconds - 1", new="seconds"))
        done = run(tiny, "--only", "for-ever", "--seconds", "2")
        assert done.returncode == 0, done.stderr
        assert row(done, "for-ever")[1:4] == ["killed", "by", "time"]

    def test_a_base_that_fails_proves_nothing(self, tiny):
        (tiny / "tests" / "test_tiny.py").write_text(TESTS.replace("== 2", "== 3"))
        done = run(tiny)
        assert done.returncode == 2
        assert "the tests ended with 1 on the source as it is" in done.stderr
        assert "FAILED tests/test_tiny.py::test_larger" in done.stderr

    def test_a_sample_is_the_same_for_the_same_seed(self):
        def sample(seed):
            return run(ROOT, "--list", "--sample", "6", "--seed", seed).stdout.splitlines()

        first, *names = sample("1")
        assert first == f"a sample of 6 of {len(LIST)} mutants, --seed 1"
        assert len(set(names)) == 6 and sample("1")[1:] == names
        assert sample("2")[1:] != names

    def test_an_unknown_name_is_refused(self, tiny):
        done = run(tiny, "--only", "nobody")
        assert done.returncode == 1 and "no mutant is called nobody" in done.stderr
