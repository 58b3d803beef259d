"""What a type checker says of a user's program: nothing of a right one, the mistakes of another."""

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
copied: Step = step.clone()
old = Old(x=torch.zeros(2))
old.x.sum()
Cast(n=3, batch_size=[])
"""
WRONG = """
import torch
from raffia import TensorClass


class Step(TensorClass):
    obs: torch.Tensor
    reward: torch.Tensor | None = None


Step(reward=torch.zeros(3))
Step(obs=torch.zeros(3), rewards=1)
Step(obs="a")
Step(obs=torch.zeros(3)).obs.no_such_method()
"""


@pytest.mark.slow
def test_a_right_program_passes_and_mistakes_are_seen(tmp_path):
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
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
    assert codes == ["call-arg]", "call-arg]", "arg-type]", "attr-defined]"]


def test_the_right_program_runs():
    exec(RIGHT, {"__name__": "right"})
