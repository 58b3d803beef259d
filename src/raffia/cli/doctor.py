"""raffia doctor: the checks of this machine, or of an engine's workers.

Packages, threads, GPU, games, folders to write, terminal.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from raffia._version import __version__
from raffia.cli.parser import Parser, UsageError
from raffia.cli.style import call, verdict
from raffia.environment import usable_cores
from raffia.hints import plural

ABOUT = """\
Check this machine: versions, processor and threads, GPU, which extras are installed and how to
install the others, Atari ROMs, and whether compiled kernels can be cached. Include the output in
bug reports. Nothing is written.

With --engine.name, the engine that would run workers is checked instead: a worker is started and
called, and for a Ray cluster the resources and versions of each machine are listed."""

# Project on PyPI -> its module. As pyproject.toml has them.
CORE = {
    "torch": "torch",
    "gymnasium": "gymnasium",
    "llvmlite": "llvmlite",
    "numba": "numba",
    "numpy": "numpy",
    "pyyaml": "yaml",
    "rich": "rich",
    "safetensors": "safetensors",
    "tyro": "tyro",
    "typing-extensions": "typing_extensions",
}
EXTRAS = {
    "atari": ({"ale-py": "ale_py"}, "Atari games"),
    "box2d": ({"box2d": "Box2D"}, "LunarLander, BipedalWalker"),
    "hdf5": ({"h5py": "h5py"}, "offline episodes from HDF5"),
    "hf": ({"transformers": "transformers"}, "Hugging Face language models"),
    "parquet": ({"pyarrow": "pyarrow"}, "offline episodes from Parquet"),
    "report": ({"matplotlib": "matplotlib"}, "HTML reports"),
    "scale": ({"ray": "ray"}, "workers on a Ray cluster"),
    "sweep": ({"optuna": "optuna"}, "raffia sweep --optuna"),
    "text": ({"jinja2": "jinja2", "tokenizers": "tokenizers"}, "Hugging Face tokenizers"),
    "video": (
        {"imageio-ffmpeg": "imageio_ffmpeg", "pillow": "PIL", "pygame-ce": "pygame"},
        "recorded episodes",
    ),
}
LITTLE = 2 * 2**30  # bytes: a run of Atari with its replay on disk takes some


@dataclass(frozen=True)
class Check:
    """The result of one check.

    >>> Check("disk", "note", "0.1 GiB free", "make room").lines()
    ['note   disk: 0.1 GiB free', '       make room']
    """

    name: str
    verdict: str  # "ok"; "note": something is missing or slow; "fails": nothing works without it
    found: str
    fix: str = ""

    def lines(self) -> list[str]:
        """The text lines of the check."""
        fix = [f"{'':7}{self.fix}"] if self.fix else []
        return [f"{self.verdict:<7}{self.name}: {self.found}", *fix]


def doctor(words: Sequence[str]) -> int:
    """`raffia doctor`

    >>> doctor(["--all"])
    Traceback (most recent call last):
        ...
    raffia.cli.parser.UsageError: raffia doctor has no --all
    """
    examples = [
        "raffia doctor",
        "raffia doctor > doctor.txt",
        "raffia doctor --engine.name process",
        "raffia doctor --engine.name ray --engine.address auto",
    ]
    parser = Parser("raffia doctor", ABOUT, examples)
    names = ("inline", "process", "ray")
    parser.flag("--engine.name", "where workers run", dest="engine", choices=names)
    parser.flag("--engine.address", "address of a Ray cluster", default="", dest="address")
    args = parser.read(words)
    if args.engine is None and args.address:
        raise UsageError(
            f"--engine.address {args.address} is the address of a Ray cluster, which needs "
            "--engine.name ray",
            call("raffia", "doctor", "--engine.name", "ray", "--engine.address", args.address),
        )
    if args.engine is None:
        return print_doctor()
    return print_doctor(look=lambda: engine_checks(args.engine, args.address))


def machine_checks() -> list[Check]:
    """Check this machine.

    >>> [check.name for check in machine_checks()][:2]
    ['raffia', 'packages']
    """
    return [
        Check("raffia", "ok", f"{__version__}, Python {platform.python_version()}, {_system()}"),
        packages(),
        torch_itself(),
        other_work(),
        *extras(),
        games(),
        kernel_cache(pathlib.Path(__file__).parents[1]),
        disk(pathlib.Path("runs")),
        terminal(sys.stdout),
    ]


def print_doctor(
    stream: TextIO | None = None, look: Callable[[], list[Check]] = machine_checks
) -> int:
    """Print what was found; the exit status: 0 unless something fails that all needs.

    stream: gets the lines; None: stdout.

    >>> print_doctor(look=lambda: [Check("torch", "fails", "not installed")])
    fails  torch: not installed
    1
    """
    stream = sys.stdout if stream is None else stream
    checks = look()
    for check in checks:
        print("\n".join([verdict(line, stream) for line in check.lines()]), file=stream)
    return int(any(check.verdict == "fails" for check in checks))


def packages() -> Check:
    """Whether what raffia always needs is installed.

    >>> packages().verdict
    'ok'
    """
    found = {project: _version(project, module) for project, module in CORE.items()}
    missing = [project for project, version in found.items() if version is None]
    if missing:
        fix = f"pip install {' '.join(missing)}"
        return Check("packages", "fails", f"not installed: {', '.join(missing)}", fix)
    return Check("packages", "ok", ", ".join(f"{name} {found[name]}" for name in found))


def extras() -> Iterator[Check]:
    """The extras that are installed, and how to install the others.

    >>> [check.name for check in extras()]
    ['atari', 'box2d', 'hdf5', 'hf', 'parquet', 'report', 'scale', 'sweep', 'text', 'video']
    """
    for extra, (projects, use) in EXTRAS.items():
        found = {project: _version(project, module) for project, module in projects.items()}
        missing = [project for project, version in found.items() if version is None]
        if missing:
            fix = f"pip install 'raffia[{extra}]'"
            yield Check(extra, "note", f"no {' and no '.join(missing)}, for {use}", fix)
        else:
            have = ", ".join(f"{name} {version}" for name, version in found.items())
            yield Check(extra, "ok", f"{have} ({use})")


def torch_itself() -> Check:
    """Whether torch works, with how many threads, and whether it sees a GPU.

    >>> torch_itself().name
    'torch'
    """
    try:
        import torch
    except (ImportError, OSError) as error:
        fix = "pip install --force-reinstall torch"
        return Check("torch", "fails", f"cannot be imported: {error}", fix)
    threads, cores = torch.get_num_threads(), usable_cores()
    found = f"{torch.__version__}, {plural(threads, 'thread')} on {cores} usable cores, "
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found += f"GPU: {', '.join(names)} (--device cuda)"
    elif torch.backends.mps.is_available():
        found += "GPU: Apple's (--device mps)"
    elif pathlib.Path("/proc/driver/nvidia/version").exists():
        why = "this torch is a CPU build" if torch.version.cuda is None else "torch cannot use it"
        fix = "for a build that fits the driver see https://pytorch.org/get-started"
        return Check("torch", "note", f"{found}an NVIDIA GPU, but {why}", fix)
    else:
        found += "no GPU"
    if threads > cores:
        fix = f"more threads than cores slow each other down: export OMP_NUM_THREADS={cores}"
        return Check("torch", "note", found, fix)
    return Check("torch", "ok", found)


def other_work() -> Check:
    """Whether other processes use the processor.

    >>> other_work().name
    'load'
    """
    cores = usable_cores()
    if not hasattr(os, "getloadavg"):
        return Check("load", "ok", "unknown on this system")
    busy = os.getloadavg()[0]
    found = f"load average {busy:.1f} over the last minute, {cores} cores"
    if busy > cores + 0.5:
        return Check("load", "note", found, "training will be slower than on an idle machine")
    return Check("load", "ok", found)


def games() -> Check:
    """The number of Atari cartridges.

    >>> games().name
    'ROMs'
    """
    found = importlib.util.find_spec("ale_py")
    paths = found.submodule_search_locations if found else None
    num = len(list(pathlib.Path(paths[0], "roms").glob("*.bin"))) if paths else 0
    if num:
        return Check("ROMs", "ok", f"{num} Atari games")
    return Check(
        "ROMs", "note", "no Atari games; they come with ale-py", "pip install 'raffia[atari]'"
    )


def kernel_cache(package: pathlib.Path) -> Check:
    """Whether compiled kernels can be stored on disk.

    package: the folder of raffia's code; kernels stay beside it, or in the user's own cache.

    >>> kernel_cache(pathlib.Path("nowhere")).name
    'kernels'
    """
    own = os.environ.get("NUMBA_CACHE_DIR")
    user = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"), "numba")
    paths = [pathlib.Path(own)] if own else [package, user]
    for path in paths:
        if os.access(_existing(path) if path != package else path, os.W_OK):
            if others := _others_may_write(path):
                found = f"cached below {path}, where {others}"
                fix = (
                    "anyone who writes there can run code in your processes: export "
                    "NUMBA_CACHE_DIR=/your/folder, and chmod 700 it"
                )
                return Check("kernels", "note", found, fix)
            return Check("kernels", "ok", f"cached below {path}")
    found = f"no cache folder: {' and '.join(map(str, paths))} cannot be written"
    fix = (
        "each start compiles again, which takes seconds: export NUMBA_CACHE_DIR=/your/folder, "
        "which nobody else may write to, as its contents run in your processes"
    )
    return Check("kernels", "note", found, fix)


def _others_may_write(path: pathlib.Path) -> str:
    """Describe who else may write the folder, or its nearest parent; empty if nobody may."""
    there = _existing(path)
    try:
        found = there.stat()
    except OSError:
        return ""
    if found.st_mode & stat.S_IWOTH and not (there != path and found.st_mode & stat.S_ISVTX):
        return "everybody can write"
    if hasattr(os, "getuid") and found.st_uid not in (os.getuid(), 0):
        return "another user can write"
    return ""


def disk(runs: pathlib.Path) -> Check:
    """Whether run folders can be written, and how much room there is.

    >>> disk(pathlib.Path("runs")).name
    'disk'
    """
    path = _existing(runs)
    free = shutil.disk_usage(path).free
    found = f"{free / 2**30:.1f} GiB free in {runs}"
    if not os.access(path, os.W_OK):
        return Check("disk", "note", f"{path.resolve()} cannot be written", "train with --run")
    if free < LITTLE:
        return Check(
            "disk", "note", found, "if the disk is full, a run stops at its next checkpoint"
        )
    return Check("disk", "ok", found)


def terminal(stream: TextIO) -> Check:
    """Whether a run shows a live view or plain lines.

    >>> import io
    >>> terminal(io.StringIO()).found
    'no terminal: runs print plain lines'
    """
    if not stream.isatty():
        return Check("terminal", "ok", "no terminal: runs print plain lines")
    columns, lines = shutil.get_terminal_size()
    return Check("terminal", "ok", f"{columns} x {lines}: runs show a live view")


def _version(project: str, module: str) -> str | None:
    """The version of a package, or None if it is not installed; nothing is imported."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return importlib.metadata.version(project)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _existing(path: pathlib.Path) -> pathlib.Path:
    """The path, or the nearest folder above it that exists."""
    path = path.resolve()
    return next(path for path in (path, *path.parents) if path.exists())


def _system() -> str:
    return f"{platform.system()} {platform.machine()}"


def engine_checks(name: str, address: str = "") -> list[Check]:
    """Check an engine: its room, the time until a worker answers, and the time of a call.

    >>> [check.verdict for check in engine_checks("inline")]
    ['ok', 'ok', 'ok', 'ok']
    """
    from raffia.recipes.workers import try_engine

    try:
        found = try_engine(name, address)
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        return [Check("engine", "fails", f"{name}: {error}")]
    checks = [Check("engine", "ok", f"{name}: {found.description}")]
    for machine in found.machines:
        why = "" if machine.error is None else str(machine.error)
        verdict = "fails" if why else "ok"
        checks.append(Check(f"machine {machine.name}", verdict, machine.describe(), why))
    if found.speed is None:
        return checks
    return [
        *checks,
        Check("first worker", "ok", f"after {found.speed.seconds_to_first:.1f} s"),
        Check("a call", "ok", f"{1e3 * found.speed.seconds_of_call:.2f} ms round trip"),
        Check("arrays", "ok", f"{found.speed.mib_per_second:,.0f} MiB/s round trip"),
    ]
