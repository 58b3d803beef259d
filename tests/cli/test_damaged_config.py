"""A run whose config.json cannot be read: the error, and the calls that still work."""

import pytest

from raffia.cli import main


@pytest.mark.parametrize("command", ["resume", "evaluate"])
@pytest.mark.parametrize(
    "text", ['{"seed": 0, ', '{"sead": 1}', "[]", "null and void", "null", 99_999 * "["]
)
def test_the_call_that_works_is_named(command, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    (run / "config.json").write_text(text)
    (run / "metrics.jsonl").write_text('{"kind": "start", "update": 0}\n')
    assert main([command, "runs/a"]) == 2
    message = capsys.readouterr().err
    assert "error: runs/a/config.json" in message and "replace it by a copy" in message
    assert message.endswith("\n  raffia report runs/a\n") and "--help" not in message
    assert main(["report", "runs/a", "--out", "page.html"]) == 0
