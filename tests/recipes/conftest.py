"""Reference runs that several files of tests compare with."""

import pytest


@pytest.fixture(scope="session")
def in_one_process(tmp_path_factory):
    """Results of `layouts.RUNS` in one process; each run is made once."""
    from tests.recipes.layouts import reference

    found = {}

    def find(name):
        if name not in found:
            found[name] = reference(name, tmp_path_factory.mktemp("plain") / "run")
        return found[name]

    return find
