"""Fixtures for the tests of all rooms."""

import pytest


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder as the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
