"""`on_row`: each row of a run's log for a logger of one's own, of any algorithm."""

import json
from dataclasses import replace

import pytest

from raffia.recipes import ILQL_PRESETS, resume, train
from raffia.train import Ended
from tests.recipes.runs import Quiet, terminate, tiny

ILQL = replace(ILQL_PRESETS["ilql-smoke"], num_updates=12)


def written(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("config", [tiny(), ILQL], ids=["efficientzero", "ilql"])
def test_each_row_is_given_once_also_after_a_resume(config, tmp_path):
    seen = []
    train(config, tmp_path / "run", view=Quiet({3: terminate}), on_row=seen.append)
    assert seen == written(tmp_path / "run") and seen[-1]["reason"] == "stopped"
    del seen[-1]  # as the resume does in the file: the run goes on
    resume(tmp_path / "run", view=Quiet(), on_row=seen.append)
    assert seen == written(tmp_path / "run") and seen[-1]["reason"] == "finished"


@pytest.mark.parametrize("error", [OSError("no network"), Ended("pruned")], ids=["error", "ended"])
def test_what_it_raises_ends_the_run_after_the_update_which_is_saved(error, tmp_path):
    rows, num_calls = [], 0

    def raises(row):
        nonlocal num_calls
        num_calls += 1
        if row["kind"] == "episode":
            raise error

    if isinstance(error, Ended):
        assert train(tiny(), tmp_path / "run", view=Quiet(), on_row=raises).reason == "pruned"
    else:
        with pytest.raises(OSError, match="no network") as found:
            train(tiny(), tmp_path / "run", view=Quiet(), on_row=raises)
        (note,) = found.value.__notes__
        assert note.startswith("The run failed after update 1. The last checkpoint is of update 1:")
    assert num_calls == 2  # the start and the episode
    resume(tmp_path / "run", view=Quiet(), on_row=rows.append)
    assert [row["kind"] for row in written(tmp_path / "run")].count("start") == 1
    assert rows[0]["kind"] == "resume" and rows[0]["update"] == 1


def test_an_error_at_the_last_row_is_raised_too(tmp_path):
    def raises(row):
        if row["kind"] == "end":
            raise RuntimeError("too late")

    with pytest.raises(RuntimeError, match="too late"):
        train(tiny(), tmp_path / "run", view=Quiet(), on_row=raises)
