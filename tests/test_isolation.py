"""Side effects of importing, each in a fresh interpreter."""

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest

IMPORT_ALL = """
import importlib, pkgutil, sys

def import_all(name):
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        importlib.import_module(module.name)
    for public in getattr(package, "__all__", ()):
        getattr(package, public)
"""

PATCHES_NOTHING = """
import torch, torch.func, torch.overrides, torch.utils.data, torch.multiprocessing.reductions
import torch._functorch.apis, torch._functorch.vmap, torch._functorch.eager_transforms
import torch.utils._pytree, copy, copyreg, types

owners = [torch, torch.Tensor, torch._C.TensorBase, torch.nn.Module, torch.nn.Parameter, torch.nn]
owners += [torch.Size, torch.nn.functional, torch.func, torch.overrides, torch.utils.data]
owners += [torch._functorch.apis, torch._functorch.vmap, torch._functorch.eager_transforms]
owners += [torch.utils._pytree, torch.multiprocessing.reductions, copy, copyreg]
before = [dict(vars(owner)) for owner in owners]
import_all(sys.argv[1])
for owner, old in zip(owners, before):
    for name, value in vars(owner).items():
        if name in old and old[name] is not value:
            sys.exit(f"{owner.__name__}.{name} was replaced")
        if name not in old and not isinstance(value, types.ModuleType):
            sys.exit(f"{owner.__name__}.{name} was added")
"""

NO_NETWORK = """
import socket

def refuse(*args, **kwargs):
    sys.exit("the network was used")

socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
socket.socket.__init__ = refuse
import_all(sys.argv[1])
"""


def python(code, *args, cwd=None, **env):
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *args]
    options = {"capture_output": True, "text": True, "timeout": 100, "env": {**os.environ, **env}}
    return subprocess.run(command, cwd=cwd, **options)


@pytest.mark.slow
@pytest.mark.parametrize("probe", [PATCHES_NOTHING, NO_NETWORK], ids=["patches", "network"])
def test_import_patches_nothing_and_uses_no_network(probe):
    check(python(IMPORT_ALL + probe, "raffia"))


UNWRAPS = "import torch._functorch.vmap as v; v._unwrap_batched = lambda *a: a"


def check(result):
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("probe", "line", "complaint"),
    [
        (PATCHES_NOTHING, "import torch; torch.Tensor.tied = 1", "Tensor.tied was added"),
        (PATCHES_NOTHING, UNWRAPS, "_unwrap_batched was replaced"),
        (NO_NETWORK, "import socket; socket.create_connection(('a', 1))", "the network was used"),
        (NO_NETWORK, "import socket; socket.socket()", "the network was used"),
    ],
)
def test_a_misbehaving_package_is_noticed(tmp_path, probe, line, complaint):
    (tmp_path / "rude").mkdir()
    (tmp_path / "rude" / "__init__.py").touch()
    (tmp_path / "rude" / "inner.py").write_text(line)
    result = python(IMPORT_ALL + probe, "rude", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert result.returncode and complaint in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    not importlib.util.find_spec("tensordict"), reason="extra bench is not installed"
)
@pytest.mark.parametrize("first", ["raffia", "tensordict"])
def test_works_beside_tensordict(first):
    second = {"raffia": "tensordict", "tensordict": "raffia"}[first]
    check(
        python(f"""
        import {first}, {second}, torch
        for package in (raffia, tensordict):
            td = package.TensorDict({{"a": torch.ones(3, 2)}}, batch_size=[3])
            out = torch.vmap(lambda td: td + 1)(td)
            assert type(out) is type(td) and out["a"].sum() == 12
        """)
    )


WITHOUT_FORK = """
import importlib, mmap, os, pkgutil, signal, sys
import gymnasium, multiprocessing.shared_memory, multiprocessing.synchronize, numba, torch

multiprocessing.get_all_start_methods = lambda: ["spawn"]
for module, names in {
    mmap: "MAP_PRIVATE MAP_SHARED MAP_ANONYMOUS PROT_READ PROT_WRITE MADV_HUGEPAGE",
    os: "fork register_at_fork writev posix_fallocate sched_getaffinity getuid killpg O_CLOEXEC"
    " O_NOFOLLOW O_NONBLOCK O_DIRECTORY",
    signal: "SIGKILL SIGHUP SIGALRM SIGUSR1 pthread_sigmask setitimer SIG_BLOCK SIG_UNBLOCK",
}.items():
    for name in names.split():
        delattr(module, name)
for name in ("fcntl", "resource", "pwd", "termios", "readline"):
    sys.modules[name] = None
import_all("raffia")
from raffia import TensorDict
from raffia.data import ReplayBuffer, TensorDictMap, TensorStorage
from raffia.distributed import ProcessEngine

rows = TensorDict(a=torch.arange(3), batch_size=[3])
buffer = ReplayBuffer(storage=TensorStorage(9), batch_size=2)
buffer.extend(rows)
known = TensorDictMap(in_keys=["a"])
known[rows] = rows.apply(lambda x: 2 * x)
rows.save(sys.argv[1] + "/rows.safetensors")
print(known[TensorDict.load(sys.argv[1] + "/rows.safetensors")]["a"].tolist())
print(len(buffer.sample()))
try:
    ProcessEngine()
except OSError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_system_without_fork_and_locks_has_all_but_worker_processes(tmp_path):
    done = python(IMPORT_ALL + WITHOUT_FORK, str(tmp_path))
    assert done.stdout.splitlines() == [
        "[0, 2, 4]",
        "2",
        "workers in processes of this machine need Linux or macOS, and this is linux: leave "
        'engine.name at "inline"',
    ], done.stderr
