"""What type checkers say of a user's program: nothing of a right one, the mistakes of another."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RIGHT = """
import torch
from raffia import TensorClass, TensorDict, cat, stack, tensorclass


class Step(TensorClass):
    obs: torch.Tensor
    reward: torch.Tensor | None = None

    def total(self) -> torch.Tensor:
        return self.obs.sum()


class Cast(TensorClass, autocast=True):
    n: int


@tensorclass
class Old:
    x: torch.Tensor


td = TensorDict({"a": torch.zeros(3, 2)}, batch_size=[3])
one: TensorDict = td + 1
one = 2 * td - td / 2
one = -(td**2)
one = td[0].clone().to(torch.float64)
mask: TensorDict = (td == td) & (td > 0) | (1 < td)
one = stack([td, td])
one = cat([td, td], 0)
td["b", "c"] = td["a"].sum(-1)
step = Step(obs=torch.zeros(3, 4), batch_size=[3], device="cpu")
step = Step(torch.zeros(3, 4), torch.ones(3), batch_size=[3])
first: Step = step[0]
first.obs.sum()
first.total().item()
more: Step = stack([step, step])
plain: TensorDict = step.to_tensordict()
plain = td.to_tensordict()
finite: bool = td.isfinite().all()
rows: int = td.size(0)
mapped: Step = step.memmap()
step = step.update(reward=None)
copied: Step = step.clone()
old = Old(x=torch.zeros(2))
old.x.sum()
Cast(n=3, batch_size=[])
one = td.view(3, 1).squeeze(1).update({"d": torch.ones(3)}).exclude("d").abs().add(1).lock_()
one = TensorDict.from_dict({"a": torch.zeros(2)}, auto_batch_size=True).mean(0)
total: torch.Tensor = td.sum(reduce=True)
parts: list[TensorDict] = [*td.unbind(0), *td.split(1), *td]
tall: Step = step.reshape(3, 1).sum(0).new_zeros(2)
for key, value in td.items(True, True):
    value.sum()
with td.lock_().unlock_() as free:
    free["e"] = torch.ones(3)
names: list[str] = sorted(td.keys())
"""
WRONG = """
import torch
from raffia import TensorClass, TensorDict


class Step(TensorClass):
    obs: torch.Tensor
    reward: torch.Tensor | None = None


Step(reward=torch.zeros(3))
Step(obs=torch.zeros(3), rewards=1)
Step(obs="a")
Step(obs=torch.zeros(3)).obs.no_such_method()
td = TensorDict(a=torch.zeros(3), batch_size=[3])
td.absolute()
td.view(1, shape=3)
number: int = td.reshape(3)
mean: torch.Tensor = td.mean(0)
row: Step = td[0]
"""


def _written(folder: Path) -> None:
    (folder / "right.py").write_text(RIGHT)
    (folder / "wrong.py").write_text(WRONG)


@pytest.mark.slow
def test_mypy_passes_a_right_program_and_sees_mistakes(tmp_path):
    _written(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", "--no-error-summary"]
        + ["--cache-dir", str(tmp_path / "cache"), "right.py", "wrong.py"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "MYPYPATH": str(ROOT / "src"), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    said = done.stdout.splitlines()
    assert [line for line in said if not line.startswith("wrong.py")] == [], done.stderr
    codes = [line.rpartition("[")[2] for line in said if ": error: " in line]
    assert codes == [
        *("call-arg]", "call-arg]", "arg-type]", "attr-defined]", "attr-defined]", "call-arg]"),
        *("assignment]", "assignment]", "assignment]"),
    ]


@pytest.mark.slow
def test_pyright_passes_a_right_program_and_sees_mistakes(tmp_path):
    checker = shutil.which("basedpyright", path=str(Path(sys.executable).parent))
    if checker is None:
        pytest.skip("basedpyright, of the extra dev, is not installed")
    _written(tmp_path)
    settings = {"extraPaths": [str(ROOT / "src")], "typeCheckingMode": "basic"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [checker, "--outputjson", "--pythonpath", sys.executable],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    mistakes = [(Path(one["file"]).name, one.get("rule", "")) for one in found]
    rules = [
        *("CallIssue", "CallIssue", "ArgumentType", "AttributeAccessIssue", "AttributeAccessIssue"),
        *("CallIssue", "AssignmentType", "AssignmentType", "AssignmentType"),
    ]
    assert mistakes == [("wrong.py", f"report{rule}") for rule in rules]


def test_the_right_program_runs():
    exec(RIGHT, {"__name__": "right"})
