from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributions import Distribution


@pytest.fixture(autouse=True)
def checks_of_distributions(request):
    """Importing torch._dynamo switches them off for good, as it can't follow them.

    Tests share a process; each finds the checks on, but those that compile.
    """
    before = Distribution._validate_args
    compiles = any(word in request.node.nodeid for word in ("compil", "export", "dynamo"))
    Distribution.set_default_validate_args(not compiles)
    yield
    Distribution.set_default_validate_args(before)


@pytest.fixture
def in_threads():
    """Run `work(i)` in eight threads at once; what one raises is raised here."""

    def run(work):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))

    return run
