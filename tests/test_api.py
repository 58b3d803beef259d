"""The API reference has a page for each public package, with each of its names."""

import doctest
import importlib
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "api.py"


def test_the_examples_of_the_script_pass():
    found = runpy.run_path(str(SCRIPT))
    runner = doctest.DocTestRunner()
    for name in ("packages", "comments_at", "with_lists"):
        for test in doctest.DocTestFinder().find(found[name], name, globs=found):
            assert runner.run(test).failed == 0
    assert runner.tries == 3


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_each_public_name_is_on_the_page_of_its_package(tmp_path):
    args = [sys.executable, str(SCRIPT), str(tmp_path)]
    assert subprocess.check_output(args, text=True) == f"wrote {tmp_path / 'index.html'}\n"
    pages = {path.relative_to(tmp_path).with_suffix("") for path in tmp_path.rglob("*.html")}
    for package in runpy.run_path(str(SCRIPT))["packages"]():
        page = (tmp_path / package.replace(".", "/")).with_suffix(".html")
        ids = set(re.findall(r'id="(\w+)"', page.read_text()))
        missing = set(importlib.import_module(package).__all__) - ids
        assert missing == set(), package
    assert Path("raffia/search") in pages and Path("raffia/cli") not in pages
    search = (tmp_path / "raffia" / "search.html").read_text()
    assert "<li><code>policy</code>: " in search  # arguments are a list
    assert "<li><code>dirichlet_alpha</code>" not in search  # it has no comment
    assert "<li><code>num_simulations</code>: for all roots" in search  # a comment at an argument
