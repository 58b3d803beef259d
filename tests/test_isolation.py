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
