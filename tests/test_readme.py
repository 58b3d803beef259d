"""Code in the README and in examples/ runs, and says what it claims to say."""

import ast
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run_blocks(text: str) -> int:
    """Run python blocks in one namespace; hold `expression  # -> value` lines to their value."""
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    namespace = {"__name__": "readme"}
    num_claims = 0
    for block in blocks:
        lines = block.splitlines()
        for statement in ast.parse(block).body:
            code = ast.get_source_segment(block, statement)
            claim = lines[statement.end_lineno - 1][statement.end_col_offset :].strip()
            if not claim.startswith("# -> "):
                exec(compile(code, "README.md", "exec"), namespace)
                continue
            num_claims += 1
            value = repr(eval(compile(code, "README.md", "eval"), namespace))
            expected = claim.removeprefix("# -> ")
            assert value == expected, f"{code} is {value}, the README says {expected}"
    return num_claims


def test_readme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_blocks((ROOT / "README.md").read_text()) >= 10


def test_a_wrong_claim_or_a_broken_block_is_seen():
    assert run_blocks("```python\nx = 1\n```\n and\n```python\nx + 1  # -> 2\n```\n") == 1
    with pytest.raises(AssertionError, match="x is 1, the README says 2"):
        run_blocks("```python\nx = 1\nx  # -> 2\n```\n")
    with pytest.raises(NameError):
        run_blocks("```python\nmissing()\n```\n")


def test_readme_links_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_example_runs(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out
