"""A run that fails says so, in its rows, in lists and reports, and tells what was saved."""

import json
import traceback
from dataclasses import replace

import pytest

from raffia.cli.commands import main
from raffia.envs.make import env_factory
from raffia.envs.probe import ValueProbe
from raffia.recipes.efficientzero import resume, train
from raffia.report.folder import read_run
from raffia.report.page import write_report
from raffia.report.summary import summarise
from tests.recipes.runs import Quiet, short

BREAKS_AT = 20


class Breaks(ValueProbe):
    """Raises at a step."""

    steps = 0

    def step(self, action):
        Breaks.steps += 1
        if Breaks.steps == BREAKS_AT * 4:  # of four environments
            raise KeyError("no piece stands there")
        return super().step(action)


def fail(folder, every_updates):
    config = short(160)
    config = replace(
        config,
        env=replace(config.env, frame_stack=1),
        checkpoint=replace(config.checkpoint, every_updates=every_updates),
        evaluate=replace(config.evaluate, every_env_steps=10_000),
    )
    Breaks.steps = 0
    with pytest.raises(KeyError, match="no piece stands there") as caught:
        train(config, folder, make_env=env_factory(Breaks), view=Quiet())
    return caught.value


def test_the_error_is_a_row_and_the_state_of_the_run(tmp_path):
    fail(tmp_path / "run", every_updates=2)
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["kind"] == "error" and row["error"] == "KeyError: 'no piece stands there'"
    assert summarise(tmp_path / "run").state == read_run(tmp_path / "run").state == "failed"
    assert row["update"] > 0 and row["env_step"] > 40


def test_the_error_tells_what_was_saved(tmp_path):
    error = fail(tmp_path / "run", every_updates=2)
    text = "".join(traceback.format_exception(error))
    assert "The run failed after update" in text
    assert f"`raffia resume {tmp_path}/run` goes on from there" in text.splitlines()[-1]


def test_before_the_first_checkpoint_it_tells_so(tmp_path):
    error = fail(tmp_path / "run", every_updates=1_000)
    [note] = error.__notes__
    assert "before its first checkpoint" in note and "begins it again" in note


def test_lists_and_reports_show_it(tmp_path, capsys):
    fail(tmp_path / "run", every_updates=2)
    assert main(["list", "runs", "--in", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "failed" in shown and "killed" not in shown
    page = write_report([tmp_path / "run"]).read_text()
    assert "✗ failed" in page and "no piece stands there" in page


@pytest.mark.slow
def test_a_resume_takes_the_failure_back(tmp_path):
    fail(tmp_path / "run", every_updates=2)
    Breaks.steps = -10_000
    assert resume(tmp_path / "run", make_env=env_factory(Breaks), view=Quiet()).reason == "finished"
    assert read_run(tmp_path / "run").state == "finished" and not read_run(tmp_path / "run").failure
