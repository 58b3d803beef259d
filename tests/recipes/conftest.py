"""What several files of tests here compare with."""

import pytest


@pytest.fixture(scope="session")
def in_one_process(tmp_path_factory):
    """What runs of `layouts.RUNS` leave in one process, each played once."""
    from tests.recipes.layouts import reference

    found = {}

    def find(name):
        if name not in found:
            found[name] = reference(name, tmp_path_factory.mktemp("plain") / "run")
        return found[name]

    return find
