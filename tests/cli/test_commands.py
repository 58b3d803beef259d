"""The command line's entry: help, mistakes, exit statuses, and a quick start."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import raffia.cli.commands as commands
from raffia._version import __version__
from raffia.algorithms.efficientzero.config import SearchConfig
from raffia.cli import main
from raffia.cli.commands import GROUPS
from raffia.cli.parser import UsageError
from raffia.train.config import ConfigError
from tests.marks import slow_among
from tests.processes import RAFFIA, environment

ROOT = Path(__file__).parents[2]
COMMANDS = [name for group in GROUPS.values() for name in group]


def raffia(*args, code="", **options):
    options = {"capture_output": True, "text": True, "timeout": 60} | options
    command = [sys.executable, "-c", code] if code else RAFFIA
    return subprocess.run([*command, *args], env=environment(), **options)


TRAIN = ["train efficientzero", "train efficientzero --preset cartpole"]
TRAIN += ["train ilql", "train ilql --preset wordle", "sweep efficientzero", "sweep ilql"]


@pytest.mark.parametrize("args", slow_among(["", *COMMANDS, *TRAIN], TRAIN[1], TRAIN[2], TRAIN[4]))
def test_help_has_examples_and_fits_the_terminal(args, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    for columns in (80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main([*args.split(), "--help"]) == 0
        text = capsys.readouterr().out
        prose, _, examples = text.partition("\nexamples:")
        calls = ("usage:", " " * 7)  # calls are to be copied, and stay on one line
        width = max(len(line) for line in prose.splitlines() if not line.startswith(calls))
        assert width <= min(columns, 100) and len(text.splitlines()) > 5
        assert columns > 80 or max(map(len, text.splitlines())) <= 80
        assert args not in TRAIN or ">>>" not in text  # it shows settings, not Python
    assert f"usage: raffia {args.partition(' --')[0] or 'COMMAND'}" in text
    assert args not in COMMANDS or f"  raffia {args}" in examples
    if args in TRAIN:
        assert "--seed INT" in text and "--evaluate.target_return" in text
    else:
        assert main(["help", *args.split()]) == 0 and capsys.readouterr().out == text


def test_the_help_of_a_sweep_has_its_own_flags_first(capsys):
    main(["sweep", "ilql", "--preset", "wordle", "--seeds", "0..4", "--help"])
    flags, _, others = capsys.readouterr().out.partition("start from:")
    assert all(f"\n  {flag} " in flags for flag in ("--seeds", "--grid", "--out", "--workers"))
    assert "\n  --data FILE " in others and "values of --preset wordle" in others
    assert "--run FOLDER" not in others and "raffia train ilql" not in others


def test_without_a_command_there_is_help_and_a_failure_and_a_version(capsys):
    assert main([]) == 2
    assert "usage: raffia COMMAND" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"raffia {__version__}\n"
    done = raffia("--version")
    assert done.returncode == 0 and done.stdout == f"raffia {__version__}\n"
    assert 'raffia = "raffia.cli:main"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    "args",
    ["--help", "train --help", "list", "resume gone", "train efficientzero --preset smoke --help"],
)
def test_commands_that_do_not_need_torch_do_not_import_it(args, tmp_path):
    program = (
        "import sys; from raffia.cli import main; main(sys.argv[1:])\n"
        "import raffia.cli.ilql, raffia.cli.chat, raffia.cli.play, raffia.cli.export\n"
        "slow = [name for name in ('torch', 'numpy', 'gymnasium', 'rich') if name in sys.modules]\n"
        "sys.exit(' '.join(slow) or 0)"
    )
    done = raffia(*args.split(), code=program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def raising(error):
    def command(args):
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UsageError("no such thing", "raffia list"), 2, "error: no such thing\n  raffia list\n"),
        (ConfigError("no such setting"), 2, "error: no such setting\n  raffia demo --help\n"),
        (OSError(28, "No space left", "runs/x"), 1, "error: [Errno 28] No space left: 'runs/x'\n"),
        (ImportError("pip install 'raffia[atari]'"), 1, "error: pip install 'raffia[atari]'\n"),
        (KeyboardInterrupt(), 130, "\nstopped\n"),
        (SystemExit(143), 143, ""),
        (SystemExit(), 0, ""),
        (SystemExit("why"), 1, "why\n"),
    ],
)
def test_errors_become_a_line_and_an_exit_status(error, status, message, monkeypatch, capsys):
    monkeypatch.setattr(commands, "_command", lambda name: raising(error))
    assert main(["demo"]) == status
    assert capsys.readouterr().err == message
    if isinstance(error, OSError):
        error.add_note("raffia resume runs/x")
        assert main(["demo"]) == status
        assert capsys.readouterr().err == f"{message}raffia resume runs/x\n"


def test_a_home_after_an_equals_sign_is_the_users(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    words = []
    monkeypatch.setattr(commands, "dispatch", lambda given: words.extend(given) or 0)
    main(["train", "--run=~/runs/a", "--title=~", "a=~/b", "~/c"])
    assert words == ["train", f"--run={tmp_path}/home/runs/a", "--title=~", "a=~/b", "~/c"]


def test_a_folder_that_was_removed_is_told(monkeypatch, tmp_path, capsys):

    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["list"]) == 2
    assert capsys.readouterr().err.startswith("error: the folder that this shell is in was removed")


def test_errors_of_raffia_are_one_line_and_bugs_show_a_traceback(monkeypatch, capsys):
    assert main(["--debug", "evalute"]) == 1
    assert "Traceback" in capsys.readouterr().err
    assert main(["evalute", "--debug"]) == 1
    capsys.readouterr()
    monkeypatch.setattr(commands, "_command", lambda name: invalid_search)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == "error: num_simulations=0 must be at least 1\n"
    for error in (ValueError("deep within"), AttributeError("a fault")):
        monkeypatch.setattr(commands, "_command", lambda name, error=error: raising(error))
        assert main(["demo"]) == 1
        assert "Traceback" in capsys.readouterr().err


def invalid_search(args):
    return SearchConfig(num_simulations=0)


HELP, TRAIN_HELP = ["--help"], ["train", "efficientzero", "--help"]


@pytest.mark.parametrize("args", slow_among([HELP, ["list"], TRAIN_HELP], TRAIN_HELP))
def test_a_closed_pipe_gives_no_traceback(args):
    read, write = os.pipe()
    os.close(read)
    done = raffia(*args, capture_output=False, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("args", slow_among([HELP, TRAIN_HELP], TRAIN_HELP))
def test_colour_is_for_terminals_that_want_it(args, monkeypatch):
    for variables, coloured in (
        ({"TERM": "xterm"}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
    ):
        monkeypatch.delenv("NO_COLOR", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "stdout", Terminal())
        assert main(args) == 0
        assert ("\033[" in sys.stdout.getvalue()) is coloured
