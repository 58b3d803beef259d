"""`python -OO`, which leaves out assert statements and docstrings."""

import ast
import subprocess
import sys
from pathlib import Path

from tests.processes import environment

SOURCE = Path(__file__).parents[1] / "src/raffia"
PROGRAM = """
import sys
import torch
import raffia
from raffia.distributed import check_engine
from raffia.distributed.engine import InlineEngine
from raffia.envs import check_env
from raffia.envs.probe import ValueProbe
from raffia.lm import check_language_environment
from raffia.lm.envs.wordle.game import Wordle, WordleEnv
from raffia.lm.envs.wordle.vocabulary import Vocabulary

td = raffia.TensorDict(a=torch.ones(2), b=raffia.TensorDict(c=torch.arange(3)))
print(td.consolidate(sys.argv[1])["b", "c"].tolist())
wordle = Wordle(vocabulary=Vocabulary(("crane", "crown", "slate")))
played = check_language_environment(lambda: WordleEnv(wordle), ["crane", "slate"])
print([finding.name for finding in check_env(ValueProbe).findings[:4]])
print([finding.name for finding in played.findings[:2]])
try:
    check_engine(InlineEngine)
except RuntimeError as error:
    print(error)
"""


def test_results_are_the_same_without_assertions_and_docstrings(tmp_path):
    command = [sys.executable, "-W", "error", "-OO", "-c", PROGRAM, str(tmp_path / "block")]
    options = {"capture_output": True, "text": True, "timeout": 100, "env": environment()}
    done = subprocess.run(command, **options)
    assert done.stdout.splitlines() == [
        "[0, 1, 2]",
        "['spec', 'reset', 'step', 'numbers']",
        "['steps', 'utterances']",
        "check_engine checks by assert, which python -O leaves out: run without",
    ], done.stderr


PURE = {"dim", "isinstance", "len", "bool", "int", "max", "str", "any", "all", "range"}


def calls_in_assertions(text):
    """The lines of assertions that call what may do more than look."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assert)
        for call in ast.walk(node.test)
        if isinstance(call, ast.Call)
        and getattr(call.func, "id", getattr(call.func, "attr", None)) not in PURE
    ]


def test_no_assertion_does_work():
    assert calls_in_assertions("assert len(x) == 1\nassert write(x)\nassert x.pop()") == [2, 3]
    found = {path: calls_in_assertions(path.read_text()) for path in SOURCE.rglob("*.py")}
    contract = SOURCE / "distributed/check_engine.py"  # which isn't run without them
    assert {path: lines for path, lines in found.items() if lines and path != contract} == {}
