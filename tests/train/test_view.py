"""raffia.train.view and live_view: the output, and that a failing stream never stops a run."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from dataclasses import replace

import pytest
from rich.console import Console

from raffia.train.live_view import LiveView, StatusPanel, make_view
from raffia.train.view import Output, PlainView, Status


def test_a_plain_line_has_the_whole_status():
    stream = io.StringIO()
    with PlainView(stream) as view:
        view.show(STATUS)
    with PlainView(stream):
        pass  # nothing was shown
    assert stream.getvalue() == (
        "3:19 |  51 % | update 4,812/9,400 | env step 5,412/10,000 | 3:12 left | "
        "return 187, evaluated 195.2, best 200 | 82 env steps/s | 7.1 updates/s | "
        "1,820 simulations/s | loss 2.310, policy loss 0.312, value prefix loss 0.021\n"
    )


COUNTS = dict(update=4812, num_updates=9400, env_step=5412, num_env_steps=10_000)
SPEEDS = dict(env_steps_per_second=82.0, updates_per_second=7.14, simulations_per_second=1820.0)
RETURNS = dict(latest_return=187.0, best_return=200.0, evaluated_return=195.25)
LOSSES = {"loss": 2.31, "policy_loss": 0.312, "value_prefix_loss": 0.0213}
TIMES = dict(seconds=199.0, seconds_left=192.0)
TITLE = "EfficientZero on cartpole, seed 0"
STATUS = Status(title=TITLE, **COUNTS, **TIMES, **SPEEDS, **RETURNS, losses=LOSSES)
FACTS = [
    "5,412 / 10,000", "82/s", "4,812 / 9,400", "7.1/s", "1,820/s", "51 %", "3:19", "3:12 left",
    "187", "195.2", "200", "loss 2.310", "policy 0.312", "value prefix 0.021",
]  # fmt: skip


def drawn(status: Status, width: int, since: float = 0.0) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    console.print(StatusPanel(status, since))
    return console.file.getvalue().splitlines()


# ---- plain lines


def test_plain_lines_come_at_an_interval_and_for_the_last_state():
    now, stream = [0.0], io.StringIO()
    with PlainView(stream, every_seconds=10, clock=lambda: now[0]) as view:
        for second in range(36):
            now[0] = float(second)
            view.show(replace(STATUS, update=second))
            if second == 15:
                view.message("episode recorded: a.gif")
    lines = stream.getvalue().splitlines()
    assert lines.pop(2) == "episode recorded: a.gif"
    shown = [line.split("update ")[1].split("/")[0] for line in lines]
    assert shown == ["0", "10", "20", "30", "35"]


WORKERS = replace(STATUS, waiting=0.125, staleness=8.0, worker_restarts=2)


def test_waiting_and_restarts_of_workers_are_shown():
    stream = io.StringIO()
    PlainView(stream).show(WORKERS)
    assert "12 % waiting for workers, 8 updates stale, 2 restarts" in stream.getvalue()
    assert "12 % waiting for workers · 8 updates stale · 2 restarts" in "".join(drawn(WORKERS, 80))
    assert "workers" not in "".join(drawn(STATUS, 80))


# ---- streams that end


class Gone(io.StringIO):
    """A stream that fails."""

    error = BrokenPipeError

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize("make", [PlainView, LiveView])
def test_a_stream_that_is_gone_does_not_stop_the_run(make):
    with make(Gone()) as view:
        view.show(STATUS)
        view.message("hello")
        view.show(STATUS)
    failing = Gone()
    failing.error = ValueError
    with pytest.raises(ValueError):  # an error that is not about the stream
        Output(failing).line("text")


def test_a_narrow_terminal_gets_lines_and_unknown_values_are_left_out():
    lines = drawn(STATUS, 30)
    assert all(len(line) <= 30 for line in lines)
    text = " ".join(line.strip() for line in lines)
    assert "update 4,812/9,400" in text and "value prefix loss 0.021" in text
    text = "\n".join(drawn(Status(title="new", num_updates=9), 80))
    assert "0 / 9" in text and "0 %" in text and "left" not in text


@pytest.mark.parametrize("make", [PlainView, LiveView])
def test_letters_that_the_encoding_lacks_do_not_stop_the_run(make):
    file = io.BytesIO()
    stream = io.TextIOWrapper(file, encoding="ascii", errors="strict")
    with make(stream) as view:
        view.message("Größe of a checkpoint [/bold] is [red]damaged")  # no marks of rich
        view.show(replace(STATUS, title="[red]Würfel[/x]"))
    stream.flush()
    output = file.getvalue()
    assert b"Gr??e of a checkpoint [/bold] is [red]damaged\n" in output and b"4,812" in output
    assert make is PlainView or b"[red]W?rfel[/x]" in output


def test_make_view_chooses_by_the_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(make_view(Terminal()), LiveView)
    assert isinstance(make_view(io.StringIO()), PlainView)
    assert isinstance(make_view(), PlainView)  # pytest's output is no terminal
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_view(Terminal()), PlainView)


# ---- the panel


@pytest.mark.parametrize("width", [200, 100, 80, 66, 60, 47, 42])
def test_the_panel_shows_all_facts_at_any_width(width):
    lines = drawn(STATUS, width)
    assert all(len(line) == min(width - 2, 100) for line in lines)  # leaves room for ^C
    text = "\n".join(lines)
    missing = [fact for fact in FACTS if fact not in text]
    assert not missing and "…" not in text


# ---- in a terminal

PROGRAM = """
import sys, time
from raffia.train.live_view import make_view
from raffia.train.view import Status
with make_view() as view:
    print(type(view).__name__)
    for update in range(5):
        view.show(Status(title="a run", update=update, num_updates=4, losses={"loss": 0.5}))
        view.message(f"said {update} " + "x" * 70)
        print(f"printed {update}")
        print(f"warned {update}", file=sys.stderr)
        time.sleep(0.1)
    print("half [/a] line", end="")
open(sys.argv[1], "w").write("ended")
"""


def in_terminal(tmp_path, columns: int, hang_up: bool = False) -> tuple[int, str, bool]:
    """Exit status, the terminal's output, and whether the program came to its end."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    end = tmp_path / "end"
    env = {"PATH": os.environ["PATH"], "TERM": "xterm", "PYTHONPATH": ":".join(sys.path)}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), follower)
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(end)], env=env, **streams)
    os.close(follower)
    output = bytearray()
    with suppress(OSError):  # the other side is closed
        while not (hang_up and b"said 0" in output) and (part := os.read(leader, 4096)):
            output.extend(part)
    os.close(leader)
    return process.wait(60), output.decode(), end.exists()


@pytest.mark.parametrize("columns", [100, 60])
def test_in_a_terminal_all_output_stays_above_the_panel(tmp_path, columns):
    status, output, ended = in_terminal(tmp_path, columns)
    assert status == 0 and ended
    assert "LiveView" in output and "half [/a] line" in output
    for i in range(5):
        assert f"said {i} {'x' * 70}" in output  # in one piece, whatever the width
        assert f"printed {i}" in output and f"warned {i}" in output
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output)
    last = plain[plain.rindex("╭─ a run") :]
    assert "4 / 4" in last and "said" not in last and "half" not in last
    assert last.count("╰") == 1
    assert output.rindex("\x1b[?25h") > output.rfind("\x1b[?25l")  # the cursor is there


def test_a_terminal_that_hangs_up_does_not_stop_the_run(tmp_path):
    _, output, ended = in_terminal(tmp_path, 80, hang_up=True)
    assert "said 0" in output and ended
