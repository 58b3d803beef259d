"""Code in the README, docs/ and examples/ runs and gives the values that it claims."""

import ast
import re
import runpy
import tomllib
from pathlib import Path

import pytest

from raffia.cli.commands import GROUPS
from raffia.recipes.efficientzero.presets import PRESETS, SUMMARIES
from raffia.recipes.ilql.presets import ILQL_PRESETS, ILQL_SUMMARIES
from tests.marks import slow_among

ROOT = Path(__file__).parents[1]


PAGES = ["README.md", *(f"docs/{name}.md" for name in """data torchrl lightzero functional graph
    search scale sweep training ilql evolution own_algorithm""".split())]  # fmt: skip


LINKED = [*PAGES, "CONTRIBUTING.md"]
LINKED += [f"docs/{name}.md" for name in ("index", "ARCHITECTURE", "results", "tensordict")]


def run_blocks(text: str) -> int:
    """Run python blocks in one namespace; hold `expression  # -> value` lines to their value."""
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    namespace = {"__name__": "readme"}
    num_claims = 0
    for block in blocks:
        lines = block.splitlines()
        for statement in ast.parse(block).body:
            claim = lines[statement.end_lineno - 1][statement.end_col_offset :].strip()
            if not claim.startswith("# -> "):
                exec(compile(ast.Module([statement], []), "README.md", "exec"), namespace)
                continue
            num_claims += 1
            value = repr(
                eval(compile(ast.Expression(statement.value), "README.md", "eval"), namespace)
            )
            expected = claim.removeprefix("# -> ")
            code = ast.unparse(statement)
            assert value == expected, f"{code} is {value}, the page says {expected}"
    return num_claims


@pytest.mark.parametrize(
    "name",
    slow_among(PAGES, "docs/ilql.md", "docs/training.md", "docs/evolution.md"),
)
def test_page_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    least = 1 if name == "docs/lightzero.md" else 10
    assert run_blocks((ROOT / name).read_text()) >= least


def test_the_readme_names_every_command_and_every_extra():
    page = (ROOT / "README.md").read_text()
    commands = {name for group in GROUPS.values() for name in group}
    assert commands - set(re.findall(r"raffia ([a-z-]+)", page)) == set()
    table = page.partition("| extra | for |")[2].partition("\n\n")[0]
    named = re.findall(r"`(\w+)`", "".join(line.split(" | ")[0] for line in table.splitlines()))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for_us = {"dev", "bench", "bench-data"}
    assert set(named) == project["optional-dependencies"].keys() - for_us


def test_a_wrong_claim_or_a_broken_block_is_noticed():
    assert run_blocks("```python\nx = 1\n```\n and\n```python\nx + 1  # -> 2\n```\n") == 1
    with pytest.raises(AssertionError, match="x is 1, the page says 2"):
        run_blocks("```python\nx = 1\nx  # -> 2\n```\n")
    with pytest.raises(NameError):
        run_blocks("```python\nmissing()\n```\n")


def dead_links(page: Path) -> list[str]:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    targets = re.findall(r"\]\(([^)#]+)", prose)
    return [t for t in targets if "://" not in t and not (page.parent / t).exists()]


@pytest.mark.parametrize("name", LINKED)
def test_links_have_targets(name):
    assert dead_links(ROOT / name) == []


def table_after(page, head):
    """The rows of the table whose head begins so."""
    table = (ROOT / "docs" / page).read_text().partition(head)[2].partition("\n\n")[0]
    return table.splitlines()[2:]


def test_the_tables_of_presets_are_correct():
    rows = [
        f"| `{name}` | {run.env.id} | {run.collect.num_env_steps:,} | {run.search.num_simulations} "
        f"| {SUMMARIES[name]} |"
        for name, run in PRESETS.items()
    ]
    needed = "\n".join(rows)
    assert table_after("training.md", "| preset | environment |") == rows, f"it needs:\n{needed}"
    rows = [
        f"| `{name}` | {run.num_updates:,} | {ILQL_SUMMARIES[name]} |"
        for name, run in ILQL_PRESETS.items()
    ]
    needed = "\n".join(rows)
    assert table_after("ilql.md", "| preset | updates |") == rows, f"it needs:\n{needed}"


def test_a_dead_link_is_noticed(tmp_path):
    (tmp_path / "page.md").write_text(
        "[a](page.md) [b](gone.md) [c](https://example.org)\n```\nf[0](x)\n```\n"
    )
    assert dead_links(tmp_path / "page.md") == ["gone.md"]


TAKE_LONG = ("ensemble", "own_algorithm", "own_dialogue", "own_environment", "plan_tictactoe")
TAKE_LONG += ("ppo", "tabular_q_learning")
EXAMPLES = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in TAKE_LONG))
    for path in sorted((ROOT / "examples").glob("*.py"))
]


OUTPUTS = {  # a pattern of an example's output; all must print something
    "ensemble": "read back, equal: True",
    "own_dialogue": r"\.\.\. and ILQL's values: (3\.[3-9]|4)",  # the logs imitated: 2.8
    "own_environment": "mean return 0.9",
    "ppo": r"mean return (4[7-9]|500)",
    "transpositions": "the game is a draw",
}


@pytest.mark.parametrize("path", EXAMPLES)
def test_example_runs(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    output = capsys.readouterr().out
    assert output and re.search(OUTPUTS.get(path.stem, ""), output)
