"""Runs with missing or damaged files: what can be resumed, and the errors."""

import errno
import os
import shutil
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from raffia.cli.parser import UsageError
from raffia.cli.runs import refuse_taken
from raffia.lm import load_tokenizer
from raffia.recipes import efficientzero, ilql, read_run, run_folder
from raffia.recipes.ilql import ILQL_PRESETS
from raffia.recipes.run_folder import claimed, create_run, find_checkpoint, given_back
from raffia.tensordict import TensorDict, safetensors_file
from raffia.train import Checkpoints, RunError

from .ilql_runs import write_chats
from .runs import Quiet, short, with_all

SMOKE = replace(ILQL_PRESETS["ilql-smoke"], num_updates=2)


def damages(text):
    """Contents of a file after a loss of power or a disk error; None for a missing file."""
    return [b"", bytes(len(text)), text[: len(text) // 2], text.replace(b"a", b"b", 1), None]


def test_a_tokenizer_that_the_config_determines_is_made_again(tmp_path):
    run = tmp_path / "run"
    ilql.train(SMOKE, run, view=Quiet())
    path = run / "tokenizer" / "raffia_tokenizer.json"
    content = path.read_bytes()
    for number, damaged in enumerate(damages(content)):
        if damaged is None:
            path.unlink()
        else:
            path.write_bytes(damaged)
        if number % 2:
            assert ilql.load_agent(run) is not None
        else:
            longer = replace(SMOKE, num_updates=3 + number)
            assert ilql.resume(run, config=longer, view=Quiet()).update == 3 + number
        assert path.read_bytes() == content and load_tokenizer(run / "tokenizer").num_tokens


def test_a_tokenizer_made_from_data_is_made_again_by_a_resume_alone(tmp_path):
    files = (write_chats(tmp_path / "chats.jsonl"),)
    data = replace(SMOKE.data, files=files, tokenizer="characters")
    config = ilql.with_sizes(replace(SMOKE, task="data", data=data))
    run = tmp_path / "run"
    ilql.train(config, run, view=Quiet())
    path = run / "tokenizer" / "raffia_tokenizer.json"
    content = path.read_bytes()
    path.write_bytes(content[:40])
    with pytest.raises(RunError, match="raffia resume .* makes the tokenizer again from the data"):
        ilql.load_agent(run)
    assert ilql.resume(run, config=replace(config, num_updates=3), view=Quiet()).update == 3
    assert path.read_bytes() == content
    write_chats(tmp_path / "chats.jsonl", range(3, 30))
    path.write_bytes(content[:40])
    with pytest.raises(RunError, match="was trained on other rows"):
        ilql.resume(run, config=replace(config, num_updates=4), view=Quiet())


def test_a_folder_with_a_half_written_config_can_be_used(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / ".0123456789ab.tmp").write_text('{"seed":')
    refuse_taken(run, "train")
    create_run(run, SMOKE)
    assert read_run(run) == SMOKE and os.listdir(run) == ["config.json"]
    with pytest.raises(UsageError, match="already holds a run"):
        refuse_taken(run, "train")
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.tmp").touch()
    with pytest.raises(UsageError, match="is not a run folder"):
        refuse_taken(other, "train")
    with pytest.raises(RunError, match="is not a run folder"):
        create_run(other, SMOKE)


def test_of_two_that_start_in_a_folder_at_once_one_is_refused(tmp_path, monkeypatch):
    run, later = tmp_path / "run", replace(SMOKE, seed=1)

    def is_free(folder):  # and then another process is there first
        monkeypatch.undo()
        create_run(folder, SMOKE)
        return True

    monkeypatch.setattr(run_folder, "is_free", is_free)
    with pytest.raises(RunError, match="already holds a run"):
        ilql.train(later, run, view=Quiet())
    assert read_run(run) == SMOKE


def test_a_start_that_finds_its_folder_claimed_leaves_it(tmp_path, monkeypatch):
    run = tmp_path / "run"

    def created(*args):
        create_run(*args)
        others.enter_context(claimed(run))

    monkeypatch.setattr("raffia.recipes.api.create_run", created)
    with ExitStack() as others, pytest.raises(RunError, match="run by another process"):
        ilql.train(SMOKE, run, view=Quiet())
    assert read_run(run).num_updates == SMOKE.num_updates


def test_what_stops_a_start_is_raised_also_where_its_folder_cannot_be_removed(
    tmp_path, monkeypatch
):
    create_run(tmp_path / "run", SMOKE)
    monkeypatch.setattr(os, "unlink", lambda *_, **__: os.listdir("/no such folder"))
    with pytest.raises(RunError, match="why it failed"), given_back(tmp_path / "run"):
        raise RunError("why it failed")


def test_an_unreadable_config_is_refused(tmp_path):
    for text in ("[" * 300 + "]" * 300, '{"seed": ' + "9" * 5000 + "}", "\ud800"):
        (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(RunError, match="config.json cannot be read: ") as raised:
            read_run(tmp_path)
        assert len(str(raised.value)) < 1000


def test_a_finished_run_without_checkpoints_is_refused(tmp_path):
    run = tmp_path / "run"
    ilql.train(SMOKE, run, view=Quiet())
    rows = (run / "metrics.jsonl").read_bytes()
    shutil.rmtree(run / "checkpoints")
    message = "the checkpoints of .* are gone: restore them, or .* with `raffia train ilql"
    with pytest.raises(RunError, match=message):
        ilql.resume(run, view=Quiet())
    for which in ("best", "newest"):
        with pytest.raises(RunError, match=message):
            find_checkpoint(run, which)
    assert (run / "metrics.jsonl").read_bytes() == rows  # nothing was started over


def test_a_damaged_checkpoint_is_warned_about_once(tmp_path):
    run = tmp_path / "run"
    ilql.train(SMOKE, run, view=Quiet())
    [state] = run.glob("checkpoints/*/state*")
    state.write_bytes(b"")
    message = f"checkpoint {state.parent} is skipped: {state.name}: it holds 0"
    with pytest.warns(UserWarning) as caught, pytest.raises(RunError, match="are damaged"):
        find_checkpoint(run, "best")
    assert [str(warning.message)[: len(message)] for warning in caught] == [message]


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path):
    run = tmp_path / "run"
    create_run(run, SMOKE)
    (run / "metrics.jsonl").write_text('{"kind": "start", "update": 0}\n')
    with pytest.raises(RunError, match="raffia resume .* continues the run"):
        find_checkpoint(run, "best")
    assert ilql.resume(run, view=Quiet()).update == 2


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.slow
def test_saves_that_fail_leave_nothing_behind(tmp_path, monkeypatch, size):
    """With a disk that is full for states, but has room for rows."""
    from raffia.recipes.population_config import PopulationConfig

    population = PopulationConfig(size=size, replay="own" if size > 1 else "shared")
    config = with_all(short(120, population=population), checkpoint__every_updates=3)
    run, counts, write = tmp_path / "run", [], safetensors_file.write_atomically

    def files():
        return sorted(str(path.relative_to(run)) for path in run.rglob("rows-*") if path.is_file())

    def full(path, content, **options):
        if "checkpoints" in str(path) and len(counts) < 4 and files():
            counts.append(len(files()))
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content, **options)

    monkeypatch.setattr(safetensors_file, "write_atomically", full)
    view = Quiet()
    efficientzero.train(config, run, view=view)
    failed = [line for line in view.messages if "was not saved" in line]
    assert len(failed) == 4 and max(counts) <= size  # else one chunk more for each failed save
    extras = find_checkpoint(run, "newest").extras
    logs = [log for name, log in extras.items() if "replay" in name]
    named = [chunk["file"] for log in logs for chunk in log["chunks"]]
    assert named and {os.path.basename(name) for name in files()} >= {*named}
    monkeypatch.undo()
    longer = with_all(config, collect__num_env_steps=140)
    assert efficientzero.resume(run, config=longer, view=Quiet()).reason == "finished"


def test_the_best_checkpoint_need_not_be_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for update, score in ((10, 1.0), (20, 5.0), (30, 2.0)):
        checkpoints.save(update, {"state": TensorDict(step=torch.tensor(update))}, score=score)
    expected = {"best": 20, "newest": 30, "10": 10}
    assert {which: find_checkpoint(tmp_path, which).update for which in expected} == expected
