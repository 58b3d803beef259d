"""Rebuilds the compiled part of torchrl, which its wheel has for another torch than ours.

    python -m benchmarks.peer_extension

Without it every prioritised sampler of the peer raises. The wheel carries the C++ sources, so that
g++ and the headers that come with torch and Python suffice; it takes one to two minutes. The result
lies in the user's cache folder, by version; neither the repository nor the peer is changed.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

PEER = "torchrl"
NAME = f"{PEER}._{PEER}"  # of the compiled module
COMMAND = "python -m benchmarks.peer_extension"


def library() -> Path:
    """The path of the compiled module of this torchrl, for this torch and this Python."""
    caches = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    versions = f"{PEER}-{importlib.metadata.version(PEER)}-torch-{torch.__version__}"
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return caches / "raffia-benchmarks" / versions / f"_{PEER}{suffix}"


def sources() -> Path:
    spec = importlib.util.find_spec(PEER)
    if spec is None or spec.origin is None:
        raise SystemExit(
            f"{PEER} is not installed here. To install it: pip install 'raffia[bench-data]'"
        )
    return Path(spec.origin).parent / "csrc"


def command(compiler: str, output: Path) -> list[str]:
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    (libraries,) = cpp_extension.library_paths()
    return [
        compiler, "-O3", "-std=c++20", "-shared", "-fPIC", f"-DTORCH_EXTENSION_NAME=_{PEER}",
        *(f"-I{folder}" for folder in includes),
        *(str(sources() / name) for name in ("pybind.cpp", "utils.cpp")),
        f"-L{libraries}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10",
        "-o", str(output),
    ]  # fmt: skip


def build() -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        raise SystemExit("there is no g++ here; on Debian: apt-get install g++")
    target = library()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        output = Path(folder, target.name)
        subprocess.run(command(compiler, output), check=True)
        output.replace(target)  # a build that was cut short leaves nothing that would be loaded
    return target


def load() -> bool:
    """Put the rebuilt module where torchrl looks; to be called before `torchrl.data` is imported.

    False where it was not built: then torchrl falls back on what its wheel has.
    """
    if NAME in sys.modules:
        return True
    if not library().exists():
        return False
    spec = importlib.util.spec_from_file_location(NAME, library())
    if spec is None or spec.loader is None:
        raise ImportError(f"{library()} is no module of this Python; rebuild it: {COMMAND}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[NAME] = module
    return True


def require() -> ModuleType:
    """The compiled module: the rebuilt one, else that of the wheel."""
    load()
    try:
        return importlib.import_module(NAME)
    except ImportError as error:
        raise RuntimeError(
            f"the peer has no compiled part for this torch; run: {COMMAND}"
        ) from error


if __name__ == "__main__":
    print(f"built {build()}")
